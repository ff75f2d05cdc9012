"""Nested values: how their types are spelled, and how Python's and Arrow's values become columns."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import Array, Map, Simple, parse_type, type_from_arrow

ORDER = Schema.of(
    id="bigint",
    customer={"id": "bigint", "address": {"city": "string", "zip": "string"}},
    lines=[{"sku": "string", "price": "decimal(10,2)", "at": "timestamp"}],
    attributes="map<string, array<int>>",
)
NOON = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
ROWS = [
    {
        "id": 1,
        "customer": {"id": 7, "address": {"city": "Ulm", "zip": None}},
        "lines": [{"sku": "a", "price": Decimal("1.50"), "at": NOON}, None],
        "attributes": {"b": [1, None], "a": []},
    },
    {"id": 2, "customer": {"address": None}, "lines": [], "attributes": {}},
    {"id": 3, "customer": None, "lines": None, "attributes": None},
]
READ = [
    {**ROWS[0], "attributes": {"a": [], "b": [1, None]}},
    {**ROWS[1], "customer": {"id": None, "address": None}},
    ROWS[2],
]


def rows_of(table):
    return table.to_pylist(maps_as_pydicts="strict")


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("ARRAY< long >", "array<bigint>"),
        ("map<string,array<bool>>", "map<string,array<boolean>>"),
        ("struct<A : int, `b c`: decimal(10, 2)>", "struct<A:int,`b c`:decimal(10,2)>"),
        ("struct<`x``y`:struct<z:date>>", "struct<`x``y`:struct<z:date>>"),
    ],
)
def test_types_are_read_in_sparks_spelling_and_written_in_one(text, normal):
    assert Schema.of(a=text).field("a").type == normal
    assert str(parse_type(normal)) == normal
    assert type_from_arrow(Schema.of(a=text).to_arrow().field("a")) == normal
    assert Schema.from_json(Schema.of(a=text).to_json()) == Schema.of(a=text)
    assert Schema.from_ddl(Schema.of(a=text).ddl()) == Schema.of(a=text)


def test_a_type_is_a_tree():
    assert parse_type("array<map<string,int>>") == Array(Map(Simple("int")))


@pytest.mark.parametrize(
    "text",
    [
        "array<int",
        "array<>",
        "array<int>>",
        "map<int,string>",
        "struct<a:int,A:int>",
        "struct<a int>x",
        "struct<>",
        "array<interval>",
        "struct<a:decimal(39,2)>",
    ],
)
def test_a_text_that_is_no_type_is_rejected_for_its_column(text):
    with pytest.raises(SchemaMismatchError) as failure:
        Schema.of(a=text)
    assert failure.value.column == "a"


def test_a_mistyped_part_of_a_nested_schema_is_named():
    with pytest.raises(SchemaMismatchError) as failure:
        Schema.of(customer={"id": "bigint", "name": "strong"})
    assert failure.value.column == "name"


def test_rows_become_columns_of_their_declared_types():
    table = fit_to_schema(to_arrow_table(ROWS, "rows", ORDER), ORDER, "rows")
    assert table.schema == ORDER.to_arrow()
    assert rows_of(table) == READ


def test_frames_of_pandas_and_polars_become_the_same_columns():
    pandas = pytest.importorskip("pandas")
    polars = pytest.importorskip("polars")
    frame = pandas.DataFrame(ROWS)
    table = fit_to_schema(to_arrow_table(frame, "rows", ORDER), ORDER, "rows")
    assert rows_of(table) == READ
    arrow = fit_to_schema(to_arrow_table(ROWS, "rows", ORDER), ORDER, "rows")
    entries = arrow.column("attributes").cast(
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.list_(pa.int32()))]))
    )
    frame = polars.from_arrow(arrow.set_column(3, "attributes", entries))
    assert rows_of(fit_to_schema(to_arrow_table(frame, "rows", ORDER), ORDER, "rows")) == READ


def test_slices_and_narrow_types_are_cast_at_every_depth():
    narrow = pa.table(
        {
            "a": pa.array(
                [[{"x": 1, "y": "p"}], None, [], [{"x": None, "y": None}, {"x": 3, "y": "q"}]],
                pa.large_list(pa.struct([("y", pa.large_string()), ("x", pa.int8())])),
            )
        }
    ).slice(1)
    wide = Schema.of(a="array<struct<x:bigint,y:string,z:date>>")
    table = fit_to_schema(narrow, wide, "rows")
    table.validate(full=True)
    none = {"x": None, "y": None, "z": None}
    assert rows_of(table)[:2] == [{"a": None}, {"a": []}]
    assert rows_of(table)[2] == {"a": [none, {"x": 3, "y": "q", "z": None}]}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"customer": {"id": "x"}}, "customer.id"),
        ({"customer": {"idd": 1}}, "customer.idd"),
        ({"customer": [1]}, "customer"),
        ({"lines": {"sku": "a"}}, "lines"),
        ({"lines": [{"price": Decimal("1.555")}]}, "lines[].price"),
        ({"lines": [{"at": dt.datetime(2026, 1, 1)}]}, "lines[].at"),
        ({"lines": [{"sku": 5}]}, "lines[].sku"),
        ({"attributes": {"a": [2**40]}}, "attributes[*][]"),
        ({"attributes": {1: [2]}}, "attributes"),
        ({"attributes": [("a", [1]), ("a", [2])]}, "attributes"),
    ],
)
def test_a_value_that_does_not_fit_is_rejected_by_its_path(change, path):
    with pytest.raises(SchemaMismatchError) as failure:
        to_arrow_table([ROWS[0], {**ROWS[0], **change}], "rows", ORDER)
    assert failure.value.facts == {"column": path.split(".")[0].split("[")[0], "row": 1}
    assert repr(path) in failure.value.problem


@pytest.mark.parametrize(
    ("values", "kind", "path"),
    [
        ([[{"x": 1}], [{"x": 300}]], "array<struct<x:tinyint>>", "a[].x"),
        ([{"x": [1.5]}], "struct<x:array<float>>", None),
        ([{"x": [1e300]}], "struct<x:array<float>>", "a.x[]"),
    ],
)
def test_an_arrow_value_that_does_not_fit_is_rejected_by_its_path(values, kind, path):
    schema = Schema.of(a=kind)
    table = pa.table({"a": pa.array(values)})
    if path is None:
        assert fit_to_schema(table, schema, "rows").num_rows == 1
        return
    with pytest.raises(SchemaMismatchError) as failure:
        fit_to_schema(table, schema, "rows")
    assert failure.value.facts == {"column": "a", "row": len(values) - 1}
    assert repr(path) in failure.value.problem


@pytest.mark.parametrize(
    ("given", "kind", "path"),
    [
        (pa.list_(pa.string()), "array<int>", "a[]"),
        (pa.struct([("x", pa.int64()), ("y", pa.int64())]), "struct<x:bigint>", "a"),
        (pa.struct([("x", pa.timestamp("us"))]), "struct<x:timestamp>", "a.x"),
        (pa.map_(pa.int32(), pa.string()), "map<string,string>", "a, the keys,"),
        (pa.int64(), "struct<x:bigint>", "a"),
    ],
)
def test_an_arrow_type_that_does_not_fit_is_rejected_by_its_path(given, kind, path):
    with pytest.raises(SchemaMismatchError) as failure:
        fit_to_schema(pa.table({"a": pa.array([], given)}), Schema.of(a=kind), "rows")
    assert repr(path) in failure.value.problem


def test_maps_are_stored_alike_if_their_entries_are():
    schema = Schema.of(a="map<string,int>")
    orders = [[("b", 1), ("a", 2), ("é", 3)], [("é", 3), ("a", 2), ("b", 1)]]
    table = pa.table({"a": pa.array(orders, pa.map_(pa.string(), pa.int64()))})
    one, other = fit_to_schema(table, schema, "rows").column("a")
    assert one.as_py() == other.as_py() == [("a", 2), ("b", 1), ("é", 3)]
    twice = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    with pytest.raises(SchemaMismatchError):
        fit_to_schema(pa.table({"a": twice}), schema, "rows")
