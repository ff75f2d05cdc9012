"""Dates outside the years 1 to 9999 and text that is not UTF-8 on every way into a dataset, by
Spark and in process.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    Computation,
    FileSource,
    QuerySource,
    bounded_dataset,
)
from dagster_adjunct.assets.declaration.extractors import PythonExtractor
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.declaration.snapshots import ParquetSnapshot
from dagster_adjunct.resources.errors import BadChangeError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.changes.changing import dataset as following
from tests.assets.changes.changing import foreign_stream
from tests.assets.conftest import World
from tests.assets.foreign_streams import stored, stored_table

SCHEMA = Schema.of(k="string", day="date", at="timestamp", name="string")
AFTER, LAST = 253_402_300_800_000_000, 253_402_300_799_999_999
GOOD = [("a", -719_162, 0, "é"), ("b", None, None, None), ("c", 2_932_896, LAST, "😀")]
BAD = {
    "day": ("d", 2_932_897, 0, "x"),
    "at": ("d", 0, AFTER, "x"),
    "name": ("d", 0, 0, b"caf\xe9"),
    "k": (b"\xff\xfe", 0, 0, "x"),
}
"""A record that is wrong in one column."""


def table_of(*rows: tuple[Any, ...]) -> pa.Table:
    columns = []
    for values, field in zip(zip(*rows, strict=True), SCHEMA.to_arrow(), strict=True):
        if field.type == pa.string():
            texts = [text.encode() if isinstance(text, str) else text for text in values]
            columns.append(pa.array(texts, pa.binary()).view(pa.string()))
        else:
            columns.append(pa.array(values, field.type))
    return pa.table(columns, schema=SCHEMA.to_arrow())


def served(world: World, spec: AdjunctDataset) -> dict[str, dt.date | None]:
    """Return the days of all entries, each read by its key."""
    view = world.view(spec)
    entries = {key: view.get(key) for key in ("a", "b", "c", "d")}
    return {key: entry["day"] for key, entry in entries.items() if entry is not None}


DAYS = {"a": dt.date.min, "b": None, "c": dt.date.max}


def deliver(folder: Path, version: str, *rows: tuple[Any, ...]) -> None:
    (folder / version).mkdir(parents=True)
    pq.write_table(table_of(*rows), folder / version / "part.parquet", row_group_size=2)
    (folder / version / "_SUCCESS").touch()


@pytest.mark.parametrize("column", BAD)
def test_a_delivered_file_with_such_a_value_is_rejected_and_the_next_one_served(
    either: World, tmp_path: Path, column: str
) -> None:
    files = FileSource(str(tmp_path / "in"), "parquet", SCHEMA)
    spec = bounded_dataset("kinds", input=files, key="k", partitions=2)
    deliver(tmp_path / "in", "v1", *GOOD, BAD[column])
    report = either.advance(spec)
    assert report.action == "rejected"
    assert f"v1/part.parquet: column {column!r} of row 4 is " in report.note
    deliver(tmp_path / "in", "v2", *GOOD)
    assert either.advance(spec).action == "sealed"
    assert served(either, spec) == DAYS


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.timestamp("ms", "UTC"), [0] * 70_000 + [10**17]),  # in no count of microseconds
        (pa.timestamp("s", "UTC"), [0] * 70_000 + [-(10**14)]),
        (pa.timestamp("ns", "UTC"), [0] * 70_000 + [1]),
    ],
)
def test_a_time_in_a_file_that_microseconds_do_not_hold_is_rejected_by_row(
    world: World, tmp_path: Path, kind: pa.DataType, values: list[int]
) -> None:
    world.spark = IN_PROCESS
    schema = Schema.of(k="int", at="timestamp")
    spec = bounded_dataset(
        "kinds", input=FileSource(str(tmp_path / "in"), "parquet", schema), key="k", partitions=2
    )
    (tmp_path / "in" / "v1").mkdir(parents=True)
    table = pa.table({"k": pa.array(range(len(values)), pa.int32()), "at": pa.array(values, kind)})
    pq.write_table(table, tmp_path / "in" / "v1" / "part.parquet", row_group_size=40_000)
    (tmp_path / "in" / "v1" / "_SUCCESS").touch()
    report = world.advance(spec)
    assert (report.action, "row 70001 " in report.note) == ("rejected", True), report.note


@pytest.mark.parametrize(
    ("format", "text", "place"),
    [
        ("csv", "k,day,at,name\na,0000-01-01,,\n", "column 'day' of line 2"),
        ("csv", "k,day,at,name\na,,,\nb,,9999-12-31T23:59:59-05:00,\n", "column 'at' of line 3"),
        ("jsonl", '{"k": "a"}\n{"k": "b", "day": "0000-12-31"}\n', "column 'day' of line 2"),
        ("jsonl", '{"k": "a", "at": "0001-01-01T00:00:00+05:00"}\n', "column 'at' of line 1"),
        ("jsonl", '{"k": "a"}\n{"k": "b", "name": "caf\udce9"}\n', "column 'name' of line 2"),
    ],
)
def test_text_files_with_such_a_value_are_rejected_by_line(
    world: World, tmp_path: Path, format: Any, text: str, place: str
) -> None:
    world.spark = IN_PROCESS
    spec = bounded_dataset(
        "kinds", input=FileSource(str(tmp_path / "in"), format, SCHEMA), key="k", partitions=2
    )
    (tmp_path / "in" / "v1").mkdir(parents=True)
    (tmp_path / "in" / "v1" / "part").write_bytes(text.encode(errors="surrogateescape"))
    (tmp_path / "in" / "v1" / "_SUCCESS").touch()
    report = world.advance(spec)
    assert (report.action, place in report.note) == ("rejected", True), report.note


@pytest.mark.parametrize("column", BAD)
def test_a_query_that_answers_such_a_value_is_rejected(either: World, column: str) -> None:
    def query(spark: Any, computation: Computation) -> Any:
        table = table_of(*GOOD, BAD[column])
        if spark is IN_PROCESS:
            return table
        made = [
            "CAST(k AS STRING) k",
            "date_from_unix_date(day) day",
            "timestamp_micros(at) at",
            "CAST(name AS STRING) name",
        ]
        return spark.createDataFrame(stored_table(table)).selectExpr(*made)

    spec = bounded_dataset(
        "kinds", input=QuerySource(query, SCHEMA, name="q"), key="k", partitions=2
    )
    report = either.advance(spec)
    assert report.action == "rejected"
    assert f"column {column!r} of the record {{k: " in report.note
    assert "version" in report.note


@pytest.mark.parametrize("column", BAD)
@pytest.mark.parametrize("extracted", [False, True])
def test_a_version_on_a_stream_that_checks_nothing_is_rejected(
    either: World, column: str, extracted: bool
) -> None:
    either.streams.create("kinds", schema=stored(SCHEMA), partitions=1)
    either.foreign["kinds"] = SCHEMA
    extractor = PythonExtractor("tests.assets.extractors:same", SCHEMA.ddl()) if extracted else None
    spec = bounded_dataset("kinds", input="lake.kinds", key="k", partitions=2, extractor=extractor)
    outcomes = []
    for number, rows in enumerate(([*GOOD, BAD[column]], GOOD), 1):
        records = stored_table(table_of(*rows))
        either.streams.append(
            "kinds", records, producer="p", sequence=number, end_of_dataset=f"v{number}"
        )
        report = either.advance(spec)
        outcomes.append((report.action, f"column {column!r} of the record " in report.note))
    assert outcomes == [("rejected", True), ("sealed", False)]
    assert served(either, spec) == DAYS


@pytest.mark.parametrize("column", ["day", "at", "name", "k"])
def test_a_bulk_snapshot_with_such_a_value_is_refused(
    sparkling: World, tmp_path: Path, column: str
) -> None:
    sparkling.streams.create("changes", schema=SCHEMA, key=["k"], partitions=1)
    pq.write_table(table_of(*GOOD, BAD[column]), tmp_path / "rows.parquet")
    snapshot = ParquetSnapshot(str(tmp_path / "rows.parquet"), position={"lake.changes.0": "0"})
    spec = following(key="k", initial=snapshot)
    with pytest.raises(SchemaMismatchError) as caught:
        sparkling.advance(spec)
    assert caught.value.column == column
    pq.write_table(table_of(*GOOD), tmp_path / "rows.parquet")
    assert sparkling.advance(spec).action == "bootstrapped"
    assert served(sparkling, spec) == DAYS


def test_changes_with_such_values_are_dead_letters_and_the_others_applied(either: World) -> None:
    foreign_stream(either, SCHEMA, [*GOOD, *BAD.values()])
    with pytest.raises(BadChangeError):
        either.advance(following(key="k"))
    spec = following(key="k", on_bad_change=DeadLetters("lake.dead"))
    report = either.advance(spec)
    assert report.counters["quarantined"] == len(BAD)
    assert served(either, spec) == DAYS
    letters = either.streams.read_arrow(either.streams.all_ranges("dead")).to_pylist()
    assert sorted(letter["offset"] for letter in letters) == [3, 4, 5, 6]
    assert [
        f"column {column!r} is " in letter["reason"]
        for column, letter in zip(BAD, letters, strict=True)
    ] == [True] * 4
