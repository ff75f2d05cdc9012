"""Records of many columns: twice as many columns are twice the work, counted in calls, from the
append to the entry.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.declaration.dataset import (
    FileSource,
    QuerySource,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.resources.bucketing.writer import check_readable
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.records import fit_to_schema
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World

FEW, MANY = 100, 400
KINDS = ("string", "bigint", "date", "timestamp")


def wide(columns: int) -> tuple[Schema, pa.Table]:
    schema = Schema.of(
        {"k": "string", **{f"c{place}": KINDS[place % 4] for place in range(columns - 1)}}
    )
    values = {"string": "x", "bigint": 1, "date": None, "timestamp": None}
    rows = [
        {field.name: values[field.type] for field in schema.fields} | {"k": key} for key in "abc"
    ]
    return schema, pa.Table.from_pylist(rows, schema=schema.to_arrow())


def calls(do: Callable[[], object]) -> int:
    """Return how many functions are called meanwhile, of Python and of C."""
    count = 0

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        do()
    finally:
        sys.setprofile(before)
    return count


def work_of(folder: Path, columns: int) -> dict[str, int]:
    """Return how many calls each thing takes that is done with records of so many columns."""
    world = World(open_lake(folder / "lake"), IN_PROCESS)
    schema, table = wide(columns)
    work = {"declare": calls(lambda: wide(columns)[0].select(schema.names))}
    world.streams.create("s", schema=schema, key=["k"], partitions=1)
    append = {"producer": "p", "sequence": 1, "end_of_dataset": "v1"}
    work["append"] = calls(lambda: world.streams.append("s", table, **append))
    work["rows"] = calls(
        lambda: world.streams.append("s", table.to_pylist(), producer="q", sequence=1)
    )
    work["read"] = calls(lambda: world.streams.read_arrow(world.streams.all_ranges("s")))
    (folder / "in" / "v1").mkdir(parents=True)
    pq.write_table(table, folder / "in" / "v1" / "part.parquet")
    (folder / "in" / "v1" / "_SUCCESS").touch()
    common: dict[str, Any] = {"key": "k", "partitions": 1}
    specs = {
        "version": bounded_dataset("version", input="lake.s", **common),
        "files": bounded_dataset(
            "files", input=FileSource(str(folder / "in"), "parquet", schema), **common
        ),
        "query": bounded_dataset(
            "query", input=QuerySource(lambda *given: table, schema, name="q"), **common
        ),
        "changes": unbounded_dataset("changes", input="lake.s", **common),
    }
    for name, spec in specs.items():
        work[name] = calls(lambda spec=spec: world.advance(spec))  # type: ignore[misc]
        view = world.view(spec)
        work[f"get of {name}"] = calls(lambda view=view: view.get("a"))  # type: ignore[misc]
    return work


@pytest.mark.lengthy
def test_four_times_the_columns_are_four_times_the_work(tmp_path: Path) -> None:
    work_of(tmp_path / "warm", 3)  # imports, and what is made once
    few, many = work_of(tmp_path / "few", FEW), work_of(tmp_path / "many", MANY)
    assert {name: many[name] / few[name] for name in few if many[name] > 5 * few[name]} == {}


class Watched:
    """A table that counts what it is asked for: its names take it as long as it is wide."""

    def __init__(self, table: pa.Table) -> None:
        self.table, self.asked = table, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self.table, name)


@pytest.mark.parametrize(
    "do",
    [
        lambda table, schema: fit_to_schema(table, schema, "records"),
        lambda table, schema: check_readable(table, schema, "records", ("k",)),
    ],
)
def test_a_tables_names_are_not_asked_for_each_column(do: Callable[[Any, Schema], object]) -> None:
    schema, table = wide(50)
    watched = Watched(table)
    do(watched, schema)
    assert watched.asked["column_names"] + watched.asked["columns"] <= 2
