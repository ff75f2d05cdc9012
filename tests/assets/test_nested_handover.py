"""Nested columns in other engines: the values that were written, with maps as maps."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import FileSource, bounded_dataset
from dagster_adjunct.assets.exchange.handover import (
    View,
    duckdb_view,
    polars_frame,
    pyarrow_dataset,
    stream_view,
)
from dagster_adjunct.assets.exchange.sql import query_lake
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.records import to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.assets.nested_orders import ORDERS, ROWS, by_key
from tests.assets.sealing import view_of

duckdb = pytest.importorskip("duckdb")
pytest.importorskip("polars")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


def send(
    lake: Lake, rows: list[dict[str, Any]], sequence: int = 1, schema: Schema = ORDERS
) -> None:
    """Append rows to the stream s, whose columns become those of the schema."""
    streams = LakeStreams(lake)
    streams.create("s", schema=schema, key=["k"], partitions=2)
    streams.append("s", rows, producer="test", sequence=sequence)


def duckdb_rows(view: View) -> list[dict[str, Any]]:
    connection = duckdb.connect()
    duckdb_view(connection, view, "orders")
    result = connection.execute("FROM orders")
    names = [column[0] for column in result.description]
    return by_key([dict(zip(names, row, strict=True)) for row in result.fetchall()])


def check_engines(view: View, rows: list[dict[str, Any]]) -> None:
    assert by_key(python_rows(pyarrow_dataset(view).to_table())) == rows
    assert duckdb_rows(view) == rows
    assert by_key(polars_frame(view).collect().to_dicts()) == rows


def test_every_engine_reads_the_nested_values_of_a_version(lake: Lake) -> None:
    rows = [tuple(row.values()) for row in ROWS]
    view = view_of(lake.store, rows, schema=ORDERS, key=["k"], partitions=2)
    check_engines(view, ROWS)
    connection = duckdb.connect()
    duckdb_view(connection, view, "orders")
    found = connection.execute(
        "SELECT customer.address.city, lines[1].price, attributes['a'], notes['x'].at IS NOT NULL"
        " FROM orders WHERE customer.id = 7"
    ).fetchall()
    full = ROWS[1]
    assert found == [("Ulm", full["lines"][0]["price"], [1, None], True)]
    one = pyarrow_dataset(view).to_table(filter=pc.field("customer", "id") == 7, columns=["k"])
    assert one.to_pylist() == [{"k": "full"}]


def test_every_engine_reads_the_nested_values_of_a_stream(lake: Lake) -> None:
    send(lake, ROWS)
    check_engines(stream_view(lake, "s"), ROWS)


def test_fields_that_were_added_and_widened_later_are_read_from_older_files(lake: Lake) -> None:
    before = Schema.of(
        k="string", c={"id": "int"}, l=[{"sku": "string"}], m="map<string,struct<n:int>>"
    )
    after = Schema.of(
        k="string",
        c={"id": "bigint", "new": {"x": "int"}},
        l=[{"sku": "string", "n": "int"}],
        m="map<string,struct<n:bigint,b:string>>",
    )
    send(
        lake,
        [
            {"k": "a", "c": {"id": 1}, "l": [{"sku": "x"}, None], "m": {"q": {"n": 1}, "r": None}},
            {"k": "b", "c": None, "l": None, "m": None},
            {"k": "c", "c": {"id": None}, "l": [], "m": {}},
        ],
        schema=before,
    )
    newer = {
        "k": "d",
        "c": {"id": 2**40, "new": {"x": 1}},
        "l": [{"sku": "x", "n": 1}],
        "m": {"q": {"n": 2**40, "b": "x"}},
    }
    send(lake, [newer], 2, after)
    check_engines(
        stream_view(lake, "s"),
        [
            {
                "k": "a",
                "c": {"id": 1, "new": None},
                "l": [{"sku": "x", "n": None}, None],
                "m": {"q": {"n": 1, "b": None}, "r": None},
            },
            {"k": "b", "c": None, "l": None, "m": None},
            {"k": "c", "c": {"id": None, "new": None}, "l": [], "m": {}},
            newer,
        ],
    )


def test_sql_reads_parts_of_nested_values_and_hides_sensitive_columns(lake: Lake) -> None:
    send(lake, ROWS, schema=ORDERS.with_sensitive("customer", "notes"))
    query = (
        "SELECT k, customer, notes, lines, attributes, len(lines) AS n, attributes['a'] AS a"
        " FROM lake.s"
    )
    with query_lake(lake, query) as reader:
        found = by_key(python_rows(reader.read_all()))
    expected = []
    for row in ROWS:
        lines, attributes = row["lines"], row["attributes"]
        expected.append(
            {
                "k": row["k"],
                "customer": "***" if row["customer"] is not None else None,
                "notes": "***" if row["notes"] is not None else None,
                "lines": lines,
                "attributes": attributes,
                "n": None if lines is None else len(lines),
                "a": (attributes or {}).get("a"),
            }
        )
    assert found == expected


@pytest.mark.lengthy
def test_equal_nested_values_of_adjacent_versions_are_one_interval(
    lake: Lake, tmp_path: Path
) -> None:
    changed = {**ROWS[1], "attributes": {"a": [1, None], "b": []}}
    versions = {2: ROWS, 3: ROWS, 4: [ROWS[0], changed, *ROWS[2:]]}
    for number, rows in versions.items():
        folder = tmp_path / "incoming" / f"2026-01-0{number}"
        folder.mkdir(parents=True)
        pq.write_table(to_arrow_table(rows, "rows", ORDERS), folder / "a.parquet")
        (folder / "_SUCCESS").touch()
    source = FileSource(str(tmp_path / "incoming"), "parquet", ORDERS)
    spec = bounded_dataset("orders", input=source, key="k", partitions=2, valid_from="name")
    advance_dataset(spec, lake=lake, systems={}, spark=IN_PROCESS, by="test")
    first, last = (dt.datetime(2026, 1, day, tzinfo=dt.UTC) for day in (2, 4))
    full = [(ROWS[1], first, last), (changed, last, None)]
    expected = [(ROWS[0], first, None), *full, *((row, first, None) for row in ROWS[2:])]
    with open_dataset(lake, "orders") as opened:
        view = opened.over_time()
        for rows in (duckdb_rows(view), by_key(polars_frame(view).collect().to_dicts())):
            found = []
            for row in rows:
                start, end = row.pop("valid_from"), row.pop("valid_to")
                assert row.pop("is_current") == (end is None)
                found.append((row, start, end))
            assert sorted(found, key=lambda each: (each[0]["k"], each[1])) == expected
