"""Nested columns in Iceberg tables: field ids at every depth, fields that are added later, and
what does not fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.exchange.handover import stream_view
from dagster_adjunct.assets.exchange.iceberg import register_in_iceberg
from dagster_adjunct.assets.exchange.iceberg_types import missing_fields, type_differences
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.assets.nested_orders import ORDERS, ROWS, by_key

pytest.importorskip("pyiceberg.catalog.sql")

TABLE = "reference.orders"


class Registered:
    """A stream s of a lake, and a catalogue in which it is registered."""

    def __init__(self, folder: Path) -> None:
        from pyiceberg.catalog.sql import SqlCatalog

        self.lake = open_lake(folder / "lake")
        self.streams = LakeStreams(self.lake)
        self.catalog = SqlCatalog("test", uri=f"sqlite:///{folder}/c.db", warehouse=str(folder))
        self.catalog.create_namespace("reference")
        self.sent = 0

    def send(self, schema: Schema, rows: list[dict[str, Any]]) -> Any:
        """Append rows to the stream, whose columns become those of the schema, and register it;
        return the table.
        """
        self.sent += 1
        self.streams.create("s", schema=schema, key=["k"], partitions=1)
        self.streams.append("s", rows, producer="test", sequence=self.sent)
        register_in_iceberg(stream_view(self.lake, "s"), self.catalog, TABLE)
        return self.catalog.load_table(TABLE)


@pytest.fixture
def registered(tmp_path: Path) -> Registered:
    return Registered(tmp_path)


def test_a_table_has_the_nested_types_and_an_id_for_each_field(registered: Registered) -> None:
    from pyiceberg.schema import index_by_id

    table = registered.send(ORDERS, ROWS)
    types = {field.name: field.field_type for field in table.schema().fields}
    for name, kind in ORDERS.types.items():
        assert not [*type_differences(kind, types[name], name)]
        assert not [*missing_fields(kind, types[name], name)]
    mapped: list[int] = []

    def note(fields: Any) -> None:
        for field in fields:
            mapped.append(field.field_id)
            note(field.fields)

    note(table.name_mapping().root)
    assert len(mapped) == len(set(mapped))
    assert set(index_by_id(table.schema())) <= set(mapped), "readers find every field by its name"


@pytest.mark.lengthy
def test_pyiceberg_reads_what_was_written(registered: Registered) -> None:
    table = registered.send(ORDERS, ROWS)
    expected = []
    for row in ROWS:
        # PyIceberg 0.12 reads null for an array of structs, and for a map of them, as empty.
        expected.append({**row, "lines": row["lines"] or [], "notes": row["notes"] or {}})
    assert by_key(python_rows(table.scan().to_arrow())) == expected
    found = table.scan(row_filter="customer.address.city = 'Ulm'", selected_fields=("k",))
    assert found.to_arrow().to_pylist() == [{"k": "full"}]


@pytest.mark.lengthy
def test_polars_own_reader_reads_what_was_written(
    registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    polars = pytest.importorskip("polars")
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    table = registered.send(ORDERS, ROWS)
    frame = polars.scan_iceberg(table.metadata_location, reader_override="native")
    assert by_key(frame.collect().to_dicts()) == ROWS


@pytest.mark.lengthy
def test_fields_are_added_at_every_depth_and_old_files_have_nulls(registered: Registered) -> None:
    first = Schema.of(
        k="string", c={"id": "int"}, l=[{"sku": "string"}], m="map<string,struct<n:int>>"
    )
    second = Schema.of(
        k="string",
        c={"id": "int", "new": {"x": "int"}},
        l=[{"sku": "string", "n": "int"}],
        m="map<string,struct<n:int,b:string>>",
    )
    old = {"k": "a", "c": {"id": 1}, "l": [{"sku": "x"}, None], "m": {"q": {"n": 1}, "r": None}}
    before = registered.send(first, [old])
    snapshot = before.current_snapshot().snapshot_id
    new = {
        "k": "b",
        "c": {"id": 2, "new": {"x": 1}},
        "l": [{"sku": "y", "n": 1}],
        "m": {"q": {"n": 1, "b": "z"}},
    }
    table = registered.send(second, [new])
    assert by_key(python_rows(table.scan().to_arrow())) == [
        {
            "k": "a",
            "c": {"id": 1, "new": None},
            "l": [{"sku": "x", "n": None}, None],
            "m": {"q": {"n": 1, "b": None}, "r": None},
        },
        new,
    ]
    assert by_key(python_rows(table.scan(snapshot_id=snapshot).to_arrow())) == [old]
    assert before.schema().find_field("l.element.sku").field_id == (
        table.schema().find_field("l.element.sku").field_id
    )


def test_a_table_with_other_inner_types_is_refused_by_path(registered: Registered) -> None:
    of_others = [
        ("k", pa.string()),
        ("c", pa.struct([("id", pa.string()), ("more", pa.int32())])),
        ("l", pa.list_(pa.struct([("sku", pa.int32())]))),
        ("m", pa.map_(pa.int32(), pa.int32())),
    ]
    registered.catalog.create_table(TABLE, schema=pa.schema(of_others))
    schema = Schema.of(k="string", c={"id": "tinyint"}, l=[{"sku": "string"}], m="map<string,int>")
    with pytest.raises(DatasetError) as refused:
        registered.send(schema, [])
    assert refused.value.problem.partition("'reference.orders': ")[2] == (
        "c.more (int) is missing; c.id is int, expected string; l[].sku is string, expected int;"
        " m is map<string,int>, expected map<int, int>."
    )


def order(number: int, change: int) -> dict[str, Any]:
    """Return an order with nested values that no other number or change has, and some nulls."""
    lines: list[Any] = [{"sku": f"{number}-{change}-{at}", "n": at} for at in range(number % 4)]
    if number % 5 == 0:
        lines.append(None)
    notes = {f"k{at}": {"by": f"{number}/{change}"} for at in range(number % 3)}
    return {
        "k": f"{number:03}",
        "c": None if number % 7 == 0 else {"id": number, "address": {"city": f"city {change}"}},
        "l": lines,
        "m": notes,
        "n": [change, None],
    }


@pytest.mark.lengthy
def test_superseded_and_deleted_rows_are_left_out_by_position_deletes(
    registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    polars = pytest.importorskip("polars")
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    schema = Schema.of(
        k="string",
        c={"id": "int", "address": {"city": "string"}},
        l=[{"sku": "string", "n": "int"}],
        m="map<string,struct<by:string>>",
        n="array<int>",
    )
    streams, lake = registered.streams, registered.lake
    streams.create("changes", schema=schema, key=["k"], partitions=1)
    spec = unbounded_dataset("orders", input="lake.changes", key="k", partitions=2)
    expected = {}
    for change, numbers in enumerate((range(200), range(0, 200, 3), range(190, 210))):
        rows = [order(number, change) for number in numbers]
        expected |= {row["k"]: row for row in rows}
        gone = []
        if change:
            gone = [f"{number:03}" for number in range(change, 150, 31)]
        for key in gone:
            expected.pop(key, None)
        kept = [{**row, "__tombstone": False} for row in rows if row["k"] not in gone]
        deleted = [{"k": key, "__tombstone": True} for key in gone]
        streams.append("changes", kept + deleted, producer="t", sequence=change + 1)
        advance_dataset(spec, lake=lake, spark=IN_PROCESS)
    with open_dataset(lake, "orders") as opened:
        assert len(opened.sealed.generations) > 1
        register_in_iceberg(opened, registered.catalog, TABLE)
    table = registered.catalog.load_table(TABLE)
    assert int(table.current_snapshot().summary["total-position-deletes"]) > 60
    rows = [expected[key] for key in sorted(expected)]
    assert by_key(python_rows(table.scan().to_arrow())) == rows
    later = by_key(python_rows(table.scan(row_filter="k >= '100' and c.id < 180").to_arrow()))
    assert later == [
        row for row in rows if row["k"] >= "100" and row["c"] is not None and row["c"]["id"] < 180
    ]
    frame = polars.scan_iceberg(table.metadata_location, reader_override="native")
    assert by_key(frame.collect().to_dicts()) == rows
