"""Dead letters of nested records: the same bytes by Spark and in this process, and the record's
values in plain Python.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import random
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.sources.json_records import find_fractions, records_to_json
from dagster_adjunct.assets.unbounded.dead_letters import DEAD_LETTERS
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema, named_column
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.nested import draw_rows, draw_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = list[dict[str, Any]]
SCHEMA = Schema.of(
    k="string",
    at="bigint",
    customer={"city": "string", "tags": "map<string,array<decimal(12,8)>>"},
    lines=[{"sku": "string", "day": "date", "seen": "timestamp", "raw": "binary"}],
    price="decimal(10,2)",
)
SEEN = dt.datetime(2026, 1, 31, 9, 30, 0, 123456, tzinfo=dt.UTC)
ROWS: Rows = [
    {"k": "a", "at": 1, "customer": None, "lines": None, "price": Decimal("1.50")},
    {
        "k": None,
        "at": 2,
        "customer": {
            "city": 'a "b"\\\n\x01é',
            "tags": {'q"': [Decimal("0.00000001"), None], "a": None, "": [], "b": [Decimal(0)]},
        },
        "lines": [
            None,
            {"sku": None, "day": None, "seen": None, "raw": None},
            {"sku": "x", "day": dt.date(26, 1, 31), "seen": SEEN, "raw": b"\0\xff"},
        ],
        "price": None,
    },
    {"k": None, "at": 3, "customer": {"city": None, "tags": {}}, "lines": [], "price": None},
    {"k": None, "at": 4, "customer": None, "lines": None, "price": Decimal("-0.10")},
]


def in_json(value: Any) -> Any:
    """Return a value as JSON has it: times to the millisecond."""
    if isinstance(value, dict):
        return {name: in_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [in_json(part) for part in value]
    if isinstance(value, dt.datetime):
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, dt.date):
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def decoded(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def drawn(seed: int) -> tuple[Schema, Rows]:
    """Return a drawn schema without fractions, and rows."""
    chosen = random.Random(seed)
    while find_fractions(schema := draw_schema(chosen)) is not None:
        pass
    return schema, draw_rows(chosen, schema, range(30))


def table_of(schema: Schema, rows: Rows) -> Any:
    return fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")


@pytest.mark.parametrize("seed", range(20))
def test_records_become_json_whose_values_are_theirs(seed: int) -> None:
    schema, rows = drawn(seed)
    texts = records_to_json(table_of(schema, rows).slice(3), schema).to_pylist()
    assert list(map(decoded, texts)) == [in_json(row) for row in rows[3:]]


@pytest.mark.spark
@pytest.mark.parametrize("seed", [*range(6), None])
def test_the_bytes_are_those_of_spark(
    seed: int | None, spark: SparkSession, tmp_path: Path
) -> None:
    from pyspark.sql import functions as F

    schema, rows = (SCHEMA, ROWS) if seed is None else drawn(seed)
    table = table_of(schema, rows)
    pq.write_table(table, tmp_path / "rows.parquet")
    frame = spark.read.parquet(str(tmp_path / "rows.parquet"))
    record = F.struct(*map(named_column, schema.names))
    written = frame.select(F.to_json(record, {"ignoreNullFields": "false"})).collect()
    assert [row[0] for row in written] == records_to_json(table, schema).to_pylist()


def letters_of(world: World) -> list[tuple[Any, ...]]:
    """Return the letters of the records without a key."""
    world.stream("orders", SCHEMA, ["k"], 1)
    table = table_of(SCHEMA, ROWS)
    world.streams.append("orders", table, producer="test", sequence=1)
    dead = DeadLetters("lake.dead")
    spec = unbounded_dataset(
        "orders", input="lake.orders", key="k", partitions=2, on_bad_change=dead
    )
    world.advance(spec)
    found = world.streams.read_arrow(world.streams.all_ranges("dead"))
    return [tuple(row[name] for name in DEAD_LETTERS.names[:-1]) for row in found.to_pylist()]


def test_letters_hold_nested_records(world: World) -> None:
    world.spark = IN_PROCESS
    letters = letters_of(world)
    assert [decoded(letter[-1]) for letter in letters] == [in_json(row) for row in ROWS[1:]]


@pytest.mark.spark
def test_spark_sends_the_same_letters(tmp_path: Path, spark: SparkSession) -> None:
    by_spark = letters_of(World(open_lake(tmp_path / "spark"), lambda: spark))
    assert by_spark == letters_of(World(open_lake(tmp_path / "process"), IN_PROCESS))


@pytest.mark.parametrize("kind", ["float", "array<struct<a:string,b:map<string,double>>>"])
def test_fractions_at_any_depth_need_spark(world: World, kind: str) -> None:
    world.spark = IN_PROCESS
    world.stream("floats", Schema.of(k="string", x=kind), ["k"], 1)
    dead = DeadLetters("lake.dead")
    spec = unbounded_dataset(
        "floats", input="lake.floats", key="k", partitions=2, on_bad_change=dead
    )
    path = "x" if kind == "float" else "x[].b[*]"
    with pytest.raises(ConfigurationError) as failure:
        world.advance(spec)
    assert f"fractions ({path})" in failure.value.problem
