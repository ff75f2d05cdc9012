"""Nested columns of lake streams: appended in every form, read with and without Spark, evolved,
merged and repartitioned, against plain Python values.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import (
    ProducerConflictError,
    SchemaMismatchError,
    StreamExistsError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy
from dagster_adjunct.resources.streams.lake.repartition import repartition
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.clocks import Clock, on_clock
from tests.nested import comparable_rows, draw_rows, draw_schema

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

ORDERS = Schema.of(
    k="bigint",
    customer={"id": "int", "address": {"city": "string"}},
    lines=[{"sku": "string", "price": "decimal(10,2)", "at": "timestamp"}],
    attributes="map<string, array<float>>",
)
NOON = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
ROWS: list[dict[str, Any]] = [
    {
        "k": 1,
        "customer": {"id": 7, "address": {"city": "Ulm"}},
        "lines": [{"sku": "a", "price": Decimal("1.50"), "at": NOON}, None],
        "attributes": {"b": [1.5, None], "a": []},
    },
    {"k": 2, "customer": {"id": None, "address": None}, "lines": [], "attributes": {}},
    {"k": 3, "customer": None, "lines": None, "attributes": None},
]
LATER = Schema.of(
    k="bigint",
    customer={"id": "bigint", "address": {"city": "string", "zip": "string"}, "vip": "boolean"},
    lines=[{"sku": "string", "price": "decimal(20,2)", "at": "timestamp", "tags": ["string"]}],
    attributes="map<string, array<double>>",
)
LATER_ROW = {
    "k": 4,
    "customer": {"id": 2**40, "address": {"city": "Bonn", "zip": "53111"}, "vip": True},
    "lines": [{"sku": "b", "price": Decimal(10) ** 16, "at": None, "tags": ["x", None]}],
    "attributes": {"z": [0.1]},
}
READ_LATER = [
    {
        "k": 1,
        "customer": {"id": 7, "address": {"city": "Ulm", "zip": None}, "vip": None},
        "lines": [{"sku": "a", "price": Decimal("1.50"), "at": NOON, "tags": None}, None],
        "attributes": {"a": [], "b": [1.5, None]},
    },
    {"k": 2, "customer": {"id": None, "address": None, "vip": None}, "lines": [], "attributes": {}},
    {"k": 3, "customer": None, "lines": None, "attributes": None},
    LATER_ROW,
]


def rows_of(table: pa.Table, schema: Schema) -> list[dict[str, Any]]:
    rows = table.select(schema.names).to_pylist(maps_as_pydicts="strict")
    return sorted(rows, key=lambda row: int(row["k"]))


def read(streams: LakeStreams, schema: Schema, stream: str = "s") -> list[dict[str, Any]]:
    return rows_of(streams.read_arrow(streams.all_ranges(stream)), schema)


def as_arrow(rows: list[dict[str, Any]], schema: Schema) -> pa.Table:
    return fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")


@pytest.fixture
def orders(streams: LakeStreams) -> LakeStreams:
    streams.create("s", schema=ORDERS, key=["k"], partitions=2)
    return streams


@pytest.mark.lengthy
def test_rows_and_frames_are_the_same_append(orders: LakeStreams) -> None:
    pandas = pytest.importorskip("pandas")
    polars = pytest.importorskip("polars")
    orders.append("s", ROWS, producer="p", sequence=1)
    arrow = as_arrow(ROWS, ORDERS)
    entries = arrow.column("attributes").cast(
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.list_(pa.float32()))]))
    )
    place = arrow.column_names.index("attributes")
    polars_frame = polars.from_arrow(arrow.set_column(place, "attributes", entries))
    for frame in (ROWS, arrow, arrow.to_batches()[0], pandas.DataFrame(ROWS), polars_frame):
        assert orders.append("s", frame, producer="p", sequence=1).duplicate
    assert read(orders, ORDERS) == ROWS
    changed = [{**ROWS[0], "lines": [None]}, *ROWS[1:]]
    with pytest.raises(ProducerConflictError):
        orders.append("s", changed, producer="p", sequence=1)


@pytest.mark.lengthy
@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_drawn_rows_are_read_as_they_were_appended(drawn: Random) -> None:
    schema = draw_schema(drawn)
    rows = draw_rows(drawn, schema, range(4))
    streams = LakeStreams(lake_in(InMemoryStore()))
    streams.create("s", schema=schema, key=["k"], partitions=2)
    streams.append("s", rows, producer="p", sequence=1)
    assert streams.append("s", as_arrow(rows, schema), producer="p", sequence=1).duplicate
    assert comparable_rows(read(streams, schema)) == comparable_rows(rows)
    streams.append("s", as_arrow(rows, schema), producer="p", sequence=2)
    parts = pa.concat_tables(streams.read_parts(streams.all_ranges("s")))
    twice = [row for row in rows for _ in range(2)]
    assert comparable_rows(rows_of(parts, schema)) == comparable_rows(twice)
    one = schema.names[-1]
    alone = streams.read_arrow(streams.all_ranges("s"), [one]).column(one)
    assert alone.type == schema.to_arrow().field(one).type


@pytest.mark.spark
@pytest.mark.lengthy
def test_drawn_rows_are_the_same_for_spark(spark: SparkSession, tmp_path: Path) -> None:
    @settings(max_examples=5, database=None, derandomize=True, deadline=None)
    @given(st.randoms(use_true_random=False))
    def check(drawn: Random) -> None:
        schema = draw_schema(drawn)
        rows = draw_rows(drawn, schema, range(4))
        name = f"s{len(streams.list_streams())}"
        streams.create(name, schema=schema, key=["k"], partitions=2)
        frame = spark.createDataFrame(as_arrow(rows, schema))
        streams.append(name, frame, producer="p", sequence=1)
        assert streams.append(name, rows, producer="p", sequence=1).duplicate, "digests differ"
        assert comparable_rows(read(streams, schema, name)) == comparable_rows(rows)
        found = streams.read(spark, streams.all_ranges(name)).toArrow()
        found = fit_to_schema(found.select(schema.names), schema, "read")
        assert comparable_rows(rows_of(found, schema)) == comparable_rows(rows)

    streams = LakeStreams(open_lake(str(tmp_path)))
    check()


@pytest.mark.spark
@pytest.mark.lengthy
def test_spark_frames_get_the_declared_form(spark: SparkSession, tmp_path: Path) -> None:
    """Members of structs in another order and without some, narrow integers, unsorted maps."""
    streams = LakeStreams(open_lake(str(tmp_path)))
    schema = Schema.of(
        k="bigint",
        s={"a": "bigint", "`b c`": "string", "d": {"x": "int"}},
        m="map<string,map<string,array<struct<p:int,q:int>>>>",
    )
    streams.create("s", schema=schema, key=["k"], partitions=2)
    frame = spark.sql(
        "SELECT 1 k, named_struct('`b c`', 'x', 'a', 5) s,"
        " map('b', map('z', array(named_struct('q', 1), null), 'y', null), 'a', null) m"
        " UNION ALL SELECT 2, null, map()"
    )
    streams.append("s", frame, producer="p", sequence=1)
    rows = [
        {
            "k": 1,
            "s": {"a": 5, "`b c`": "x", "d": None},
            "m": {"a": None, "b": {"y": None, "z": [{"p": None, "q": 1}, None]}},
        },
        {"k": 2, "s": None, "m": {}},
    ]
    table = streams.read_arrow(streams.all_ranges("s")).sort_by("k")
    assert rows_of(table, schema) == rows
    assert [key for key, _ in table.column("m")[0].as_py()] == ["a", "b"]
    assert [key for key, _ in table.column("m")[0].as_py()[1][1]] == ["y", "z"]
    assert streams.append("s", rows, producer="p", sequence=1).duplicate
    wrong = {
        "named_struct('e', 1)": "s.e",
        "named_struct('a', 'x')": "s.a",
        "named_struct('d', named_struct('x', 1L))": "s.d.x",
        "array(1)": "s",
    }
    for value, path in wrong.items():
        frame = spark.sql(f"SELECT 1 k, {value} s, CAST(null AS {schema.field('m').type}) m")
        with pytest.raises(SchemaMismatchError) as failure:
            streams.append("s", frame, producer="p", sequence=2)
        assert repr(path) in failure.value.problem
        assert failure.value.column == "s"
    twice = pa.array([[("a", None), ("a", None)]], schema.to_arrow().field("m").type)
    empty = pa.nulls(1, schema.to_arrow().field("s").type)
    frame = spark.createDataFrame(pa.table({"k": [1], "s": empty, "m": twice}))
    with pytest.raises(SchemaMismatchError) as failure:
        streams.append("s", frame, producer="p", sequence=2)
    assert failure.value.column == "m"
    frame = spark.sql("SELECT 1 k, null s, map(1, null) m")
    with pytest.raises(SchemaMismatchError) as failure:
        streams.append("s", frame, producer="p", sequence=2)
    assert failure.value.column == "m"


def evolve(streams: LakeStreams) -> None:
    streams.create("s", schema=ORDERS, key=["k"], partitions=2)
    streams.append("s", ROWS, producer="p", sequence=1)
    streams.create("s", schema=LATER, key=["k"], partitions=2)
    streams.append("s", [LATER_ROW], producer="p", sequence=2)


def test_old_records_are_read_with_added_fields_and_wider_types(streams: LakeStreams) -> None:
    evolve(streams)
    assert streams.info("s").schema == LATER
    assert read(streams, LATER) == READ_LATER
    alone = streams.read_arrow(streams.all_ranges("s"), ["customer"])
    assert alone.column("customer").type == LATER.to_arrow().field("customer").type


def test_who_knows_the_fields_of_before_goes_on(streams: LakeStreams) -> None:
    evolve(streams)
    assert streams.append("s", as_arrow(ROWS, ORDERS), producer="p", sequence=1).duplicate
    streams.append("s", as_arrow(ROWS[:1], ORDERS), producer="old", sequence=1)
    assert read(streams, LATER) == [READ_LATER[0], *READ_LATER]


def test_a_retry_that_knows_more_fields_is_the_same_append(streams: LakeStreams) -> None:
    evolve(streams)
    known = {**READ_LATER[0], "customer": {**READ_LATER[0]["customer"], "vip": False}}
    more = [known, *READ_LATER[1:3]]
    assert streams.append("s", more, producer="p", sequence=1).duplicate
    for place in ({"id": 8}, {"id": 2**40}):
        other = [{**known, "customer": {**known["customer"], **place}}, *more[1:]]
        with pytest.raises((ProducerConflictError, SchemaMismatchError)):
            streams.append("s", other, producer="p", sequence=1)
    assert read(streams, LATER) == READ_LATER


@pytest.mark.spark
@pytest.mark.lengthy
def test_spark_reads_and_retries_old_records(spark: SparkSession, tmp_path: Path) -> None:
    streams = LakeStreams(open_lake(str(tmp_path)))
    evolve(streams)
    frame = streams.read(spark, streams.all_ranges("s"))
    assert rows_of(frame.toArrow(), LATER) == READ_LATER
    added = frame.selectExpr(
        "k", "customer.vip", "lines.tags", "customer IS NULL AS none", "size(lines) AS lines"
    )
    rows = sorted(map(tuple, added.collect()))
    assert rows == [
        (1, None, [None, None], False, 2),
        (2, None, [], False, 0),
        (3, None, None, True, None),
        (4, True, [["x", None]], False, 1),
    ]
    assert frame.where("customer IS NOT NULL").select("customer.vip").count() == 3
    known = {**READ_LATER[0], "customer": {**READ_LATER[0]["customer"], "vip": False}}
    again = spark.createDataFrame(as_arrow([known, *READ_LATER[1:3]], LATER))
    assert streams.append("s", again, producer="p", sequence=1).duplicate
    with pytest.raises(ProducerConflictError):
        streams.append("s", again.where("k > 1"), producer="p", sequence=1)


_WIDENINGS = {
    "tinyint": ["smallint", "int", "bigint", "double", "decimal(12,2)"],
    "smallint": ["int", "bigint", "double", "decimal(10,0)"],
    "int": ["bigint", "double", "decimal(12,2)"],
    "bigint": ["decimal(20,0)", "decimal(38,18)"],
    "float": ["double"],
    "decimal(5,2)": ["decimal(6,2)", "decimal(12,4)", "decimal(30,5)"],
    "decimal(20,2)": ["decimal(38,20)"],
}
_EDGES: dict[str, list[Any]] = {
    "tinyint": [-128, 127],
    "smallint": [-(2**15), 2**15 - 1],
    "int": [-(2**31), 2**31 - 1],
    "bigint": [-(2**63), 2**63 - 1],
    "float": [1.5, -(2.0**127)],
    "decimal(5,2)": [Decimal("-999.99"), Decimal("0.01")],
    "decimal(20,2)": [Decimal("-999999999999999999.99"), Decimal("0.01")],
}


def wrapped(kind: str) -> str:
    return f"struct<a:array<{kind}>,m:map<string,struct<v:{kind}>>,v:{kind}>"


def wrapped_value(kind: str, added: dict[str, None]) -> dict[str, Any]:
    low, high = _EDGES[kind]
    return {"a": [low, None, high], "m": {"x": {"v": high, **added}, "y": None}, "v": low, **added}


@pytest.mark.spark
@pytest.mark.lengthy
def test_every_widening_within_nested_types_is_read_without_a_change(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Whatever `is_widening` allows, both readers can do."""
    streams = LakeStreams(open_lake(str(tmp_path)))
    pairs = [(narrow, wide) for narrow, many in _WIDENINGS.items() for wide in many]
    before = {f"c{n}": wrapped(narrow) for n, (narrow, _) in enumerate(pairs)}
    after = {}
    expected: dict[str, Any] = {"k": 1}
    for number, (narrow, wide) in enumerate(pairs):
        kind = wrapped(wide).replace(f"v:{wide}>", f"v:{wide},w:string>")
        after[f"c{number}"] = kind
        expected[f"c{number}"] = wrapped_value(narrow, {"w": None})
    row = {f"c{n}": wrapped_value(narrow, {}) for n, (narrow, _) in enumerate(pairs)}
    streams.create("s", schema=Schema.of({"k": "bigint"} | before), key=["k"], partitions=1)
    streams.append("s", [{"k": 1, **row}], producer="p", sequence=1)
    now = Schema.of({"k": "bigint"} | after)
    streams.create("s", schema=now, key=["k"], partitions=1)
    assert read(streams, now) == [expected]
    found = streams.read(spark, streams.all_ranges("s")).toArrow()
    assert rows_of(found, now) == [expected]


@pytest.mark.parametrize(
    "kind",
    [
        "struct<id:int>",
        "struct<id:int,town:struct<city:string>>",
        "struct<id:smallint,address:struct<city:string>>",
        "struct<id:string,address:struct<city:string>>",
        "struct<id:int,address:struct<City:string>>",
        "array<int>",
        "string",
    ],
)
def test_other_changes_within_nested_types_are_rejected(streams: LakeStreams, kind: str) -> None:
    streams.create("s", schema=ORDERS, key=["k"], partitions=2)
    changed = Schema.of({**ORDERS.types, "customer": kind})
    with pytest.raises(
        StreamExistsError, match=r"customer(\.id|\.address(\.city)?)? (is|\(\S+\) is)"
    ):
        streams.create("s", schema=changed, key=["k"], partitions=2)
    assert streams.info("s").schema == ORDERS


def test_old_and_new_records_are_merged(lake: Lake, clock: Clock) -> None:
    streams = LakeStreams(on_clock(lake, clock))
    evolve(streams)
    streams.append("s", [LATER_ROW], producer="p", sequence=3)
    streams.configure("s", retention=None, compaction=CompactionPolicy(min_segments=2))
    assert streams.maintain("s", clock.forward(hours=3)).merged_into == 1
    assert read(streams, LATER) == [*READ_LATER, LATER_ROW]


def test_old_and_new_records_are_repartitioned(lake: Lake, clock: Clock) -> None:
    streams = LakeStreams(on_clock(lake, clock))
    evolve(streams)
    repartition(streams, "s", 3, reason="more", by="ada", check=lambda state: None)
    assert read(streams, LATER) == READ_LATER


FAR = pa.array([2**62], pa.timestamp("us", "UTC"))
BAD = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
)
ONE = pa.array([0, 1], pa.int32())


@pytest.mark.parametrize(
    ("column", "array", "path"),
    [
        ("lines", pa.ListArray.from_arrays(ONE, pa.StructArray.from_arrays([FAR], ["at"])), "at"),
        ("lines", pa.ListArray.from_arrays(ONE, pa.StructArray.from_arrays([BAD], ["sku"])), "sku"),
    ],
)
def test_unreadable_parts_are_rejected_by_path(
    orders: LakeStreams, column: str, array: pa.Array, path: str
) -> None:
    table = as_arrow(ROWS[:1], ORDERS)
    table = table.set_column(table.column_names.index(column), column, array)
    with pytest.raises(SchemaMismatchError) as failure:
        orders.append("s", table, producer="p", sequence=1)
    assert repr(f"{column}[].{path}") in failure.value.problem
    assert failure.value.column == column
    assert read(orders, ORDERS) == []


def test_a_misfit_in_a_row_is_described_by_its_own_type(tmp_path: Path) -> None:
    streams = LakeStreams(open_lake(tmp_path))
    schema = Schema.of(k="int", meta={"at": "timestamp"}, attributes="map<string, int>")
    streams.create("s", schema=schema, key=["k"], partitions=1)
    with pytest.raises(SchemaMismatchError, match="'noon' is no timestamp") as caught:
        streams.append("s", [{"k": 1, "meta": {"at": "noon"}}], producer="p", sequence=1)
    assert "`adjunct stream append NAME FILE`" in caught.value.next_step
    with pytest.raises(SchemaMismatchError, match="the key 1 of a map is no text"):
        streams.append("s", [{"k": 1, "attributes": {1: 1}}], producer="p", sequence=1)


def test_an_unreadable_key_of_a_map_is_rejected(orders: LakeStreams) -> None:
    table = as_arrow(ROWS[:1], ORDERS)
    items = pa.array([[1.0]], pa.list_(pa.float32()))
    bad = pa.MapArray.from_arrays(ONE, BAD, items)
    table = table.set_column(table.column_names.index("attributes"), "attributes", bad)
    with pytest.raises(SchemaMismatchError) as failure:
        orders.append("s", table, producer="p", sequence=1)
    assert "'attributes, the keys,'" in failure.value.problem


@pytest.mark.parametrize(
    ("options", "column", "advice"),
    [
        ({"key": ["customer"]}, "customer", "for example 'customer.id'"),
        ({"key": ["customer.no"]}, "customer.no", "Name one of its fields: id, address."),
        ({"key": ["lines[].sku"]}, "lines[].sku", "Make the value a column of its own"),
        ({"key": ["lines"]}, "lines", "Make a simple value of it a column of its own"),
        ({"key": ["k"], "timestamp": "lines"}, "lines", "Cast it"),
        ({"key": ["k"], "timestamp": "customer.id"}, "customer.id", "__timestamp"),
    ],
)
def test_keys_are_simple_values_and_times_are_columns(
    streams: LakeStreams, options: dict[str, Any], column: str, advice: str
) -> None:
    with pytest.raises(SchemaMismatchError) as failure:
        streams.create("s", schema=ORDERS, partitions=1, **options)
    assert failure.value.column == column
    assert advice in str(failure.value.next_step)
    assert streams.list_streams() == []
