"""Files with nested columns: Parquet and JSON lines, read as plain Python values; CSV is rejected."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.files.formats import (
    DeclaredFiles,
    FileFormat,
    read_files,
    read_files_with_spark,
)
from dagster_adjunct.resources.files.tree import LocalTree
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from tests.nested import Limits, comparable_rows, draw_rows, draw_schema, write_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = Schema.of(
    k="bigint",
    customer={"id": "int", "address": {"city": "string", "since": "date"}},
    lines=[{"sku": "string", "price": "decimal(10,2)", "at": "timestamp"}],
    attributes="map<string, map<string, array<binary>>>",
    note="string",
)
NOON = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
LINE = (
    '{"k":1,"customer":{"address":{"city":"Köln","since":"2026-01-31"},"id":7},'
    '"lines":[{"sku":"a","price":1.50,"at":"2026-01-31T13:00:00+01:00"},null,{}],'
    '"attributes":{"b":{},"a":{"y":["AQI=",null],"x":[]}}}\n'
)
ROW = {
    "k": 1,
    "customer": {"id": 7, "address": {"city": "Köln", "since": dt.date(2026, 1, 31)}},
    "lines": [
        {"sku": "a", "price": Decimal("1.50"), "at": NOON},
        None,
        {"sku": None, "price": None, "at": None},
    ],
    "attributes": {"a": {"x": [], "y": [b"\1\2", None]}, "b": {}},
    "note": None,
}
# A text in which the fast parser suspects a number that JSON does not have: the lines are read one
# by one.
SLOW = ":NaN,"


def read(folder: Path, format: FileFormat, schema: Schema) -> list[dict[str, Any]]:
    tree = LocalTree(str(folder))
    table = read_files(DeclaredFiles(tree, format, schema, "orders"), tree.list())
    table.validate(full=True)
    assert table.select(schema.names).schema == schema.to_arrow()
    rows: list[dict[str, Any]] = table.select(schema.names).to_pylist(maps_as_pydicts="strict")
    return rows


def has_null_entry(value: Any, kind: str) -> bool:
    return "map<" in kind and "None" in repr(value)


@pytest.mark.lengthy
@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans(), st.sampled_from([None, SLOW]))
def test_drawn_rows_of_json_lines_are_read_as_they_are(
    drawn: Random, omit: bool, note: str | None
) -> None:
    finite = Limits(finite=True)
    schema = draw_schema(drawn, limits=finite)
    rows = draw_rows(drawn, schema, range(4), finite)
    schema = Schema((*schema.fields, *Schema.of(note="string").fields))
    rows = [{**row, "note": note} for row in rows]
    for row in rows:
        # To leave out a null entry of a map would change it.
        omit = omit and not any(has_null_entry(row[f.name], f.type) for f in schema.fields)
    with TemporaryDirectory() as folder:
        text = "".join(f"{write_json(row, omit)}\n" for row in rows)
        (Path(folder) / "a.jsonl").write_text(text, encoding="utf-8")
        assert comparable_rows(read(Path(folder), "jsonl", schema)) == comparable_rows(rows)


@pytest.mark.lengthy
@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_drawn_rows_of_parquet_are_read_as_they_are(drawn: Random) -> None:
    schema = draw_schema(drawn)
    rows = draw_rows(drawn, schema, range(4))
    table = fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")
    with TemporaryDirectory() as folder:
        pq.write_table(table, Path(folder) / "a.parquet")
        assert comparable_rows(read(Path(folder), "parquet", schema)) == comparable_rows(rows)


def test_times_of_parquet_as_int96_are_utc_at_every_depth(tmp_path: Path) -> None:
    schema = Schema.of(
        a="array<struct<n:int,at:timestamp>>", m="map<string,timestamp>", t="timestamp"
    )
    rows = [
        {"a": [{"n": 1, "at": NOON}, None], "m": {"x": NOON}, "t": NOON},
        dict.fromkeys(schema.names),
    ]
    table = fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, use_deprecated_int96_timestamps=True, store_schema=False)
    assert read(tmp_path, "parquet", schema) == rows


def test_nested_values_of_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINE, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(LINE.replace("{", f'{{"note":"{SLOW}",', 1), encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"attributes":{"a":null},"lines":[]}\n{"customer":{}}\n')
    nothing = dict.fromkeys(ORDERS.names)
    assert read(tmp_path, "jsonl", ORDERS) == [
        ROW,
        {**ROW, "note": SLOW},
        {**nothing, "attributes": {"a": None}, "lines": []},
        {**nothing, "customer": {"id": None, "address": None}},
    ]


@pytest.mark.lengthy
@pytest.mark.parametrize("slow", [False, True])
def test_maps_with_new_and_with_many_keys(tmp_path: Path, slow: bool) -> None:
    """More keys than are read as the members of a struct."""
    schema = Schema.of(k="int", m="map<string,struct<v:int,n:map<string,string>>>", note="string")
    rows = []
    for number in range(600):
        value = {"v": number, "n": {"é": "x", f"n{number % 7}": ""}}
        rows.append({"k": number, "m": {f"k{number % 400}": value, "": None}, "note": None})
        if slow:
            rows[-1]["note"] = SLOW
        if not slow:
            rows[-1]["m"].pop("")
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(text)
    assert read(tmp_path, "jsonl", schema) == rows


def test_a_null_entry_is_not_a_missing_one_however_its_key_is_written(tmp_path: Path) -> None:
    schema = Schema.of(k="int", m="map<string,int>")
    lines = [
        '{"k":1,"m":{"a":1}}',
        '{"k":null,"m":{"\\u0061": null}}',
        '{"m":{"a" : null,"é":2}}',
        '{"k":2,"m":null}',
        '{"k":3,"m":{}}',
        '{"k":4,"m":{"x\\"y":null}}',
    ]
    found = [{"a": 1}, {"a": None}, {"a": None, "é": 2}, None, {}, {'x"y': None}]
    for number in range(len(lines)):
        for path in tmp_path.iterdir():
            path.unlink()
        some = [lines[0], lines[number]]
        (tmp_path / "a.jsonl").write_text("\n".join(some), encoding="utf-8")
        assert [row["m"] for row in read(tmp_path, "jsonl", schema)] == [found[0], found[number]]


@pytest.mark.parametrize("note", ["null", f'"{SLOW}"'])
@pytest.mark.parametrize(
    ("members", "parts"),
    [
        ('"customer":{"id":"x"}', ["'customer.id'", "it is a text, expected a number"]),
        ('"customer":{"id":1.5}', ["'customer.id'", "1.5"]),
        ('"customer":{"id":3000000000}', ["'customer.id'", "3000000000"]),
        ('"customer":{"address":[]}', ["'customer.address'", "it is a list, expected an object"]),
        ('"customer":{"address":{"town":1}}', ["'customer.address.town'", "not declared"]),
        ('"customer":{"address":{"since":"2026-02-30"}}', ["'customer.address.since'"]),
        ('"customer":5', ["column 'customer'", "it is the number 5, expected an object"]),
        ('"lines":[{},{"price":1.555}]', ["'lines[].price'", "1.555"]),
        ('"lines":[{"at":"2026-01-31T12:00:00"}]', ["'lines[].at'", "no time zone"]),
        ('"lines":[1]', ["'lines[]'", "it is the number 1, expected an object"]),
        ('"lines":{}', ["column 'lines'", "it is an object, expected a list"]),
        ('"lines":[{"x y":1}]', ["'lines[].`x y`'", "not declared"]),
        ('"attributes":[]', ["column 'attributes'", "it is a list, expected an object"]),
        ('"attributes":{"a":{"x":["?"]}}', ["'attributes[*][*][]'", "base64"]),
        ('"attributes":{"a":{"\\ud83d":null}}', ["'attributes[*]'", "half of a surrogate"]),
        ('"attributes":{"a":null,"a":null}', ["field 'a' is specified twice"]),
        ('"customer":{"id":1,"id":1}', ["field 'id' is specified twice"]),
    ],
)
def test_a_wrong_value_of_json_lines_is_named_by_line_and_path(
    tmp_path: Path, members: str, parts: list[str], note: str
) -> None:
    (tmp_path / "a.jsonl").write_text(f'{LINE}\n{{"note":{note},{members}}}\n', encoding="utf-8")
    with pytest.raises(SchemaMismatchError) as failure:
        read(tmp_path, "jsonl", ORDERS)
    for part in ("line 3", *parts):
        assert part in failure.value.problem
    assert failure.value.line == 3


def test_parquet_may_lack_inner_fields_and_have_them_in_any_order(tmp_path: Path) -> None:
    schema = Schema.of(a="array<struct<x:bigint,y:string,z:date>>")
    kind = pa.list_(pa.struct([("y", pa.string()), ("x", pa.int64())]))
    rows = [[{"x": 1, "y": "p"}, None], None, []]
    pq.write_table(pa.table({"a": pa.array(rows, kind)}), tmp_path / "a.parquet")
    expected = [{"a": [{"x": 1, "y": "p", "z": None}, None]}, {"a": None}, {"a": []}]
    assert read(tmp_path, "parquet", schema) == expected


@pytest.mark.parametrize(
    ("kind", "declared", "part"),
    [
        (pa.list_(pa.int32()), "array<bigint>", "column 'a[]' is int, declared bigint"),
        (pa.struct([("x", pa.uint8())]), "struct<x:int>", "column 'a.x' is uint8, declared int"),
        (pa.struct([("y", pa.int32())]), "struct<x:int>", "column 'a.y' is int, declared no such"),
        (pa.struct([("x", pa.timestamp("us"))]), "struct<x:timestamp>", "'a.x' is a timestamp"),
        (pa.map_(pa.int32(), pa.string()), "map<string,string>", "'a' is map<int,string>"),
        (pa.map_(pa.string(), pa.string()), "map<string,date>", "'a[*]' is string, declared date"),
        (pa.string(), "array<string>", "'a' is string, declared array<string>"),
    ],
)
def test_a_wrong_type_of_parquet_is_named_by_path(
    tmp_path: Path, kind: pa.DataType, declared: str, part: str
) -> None:
    pq.write_table(pa.table({"a": pa.array([], kind)}), tmp_path / "a.parquet")
    with pytest.raises(SchemaMismatchError) as failure:
        read(tmp_path, "parquet", Schema.of(a=declared))
    assert part in failure.value.problem
    assert failure.value.column == "a"


def test_a_map_of_parquet_with_a_key_twice_is_rejected(tmp_path: Path) -> None:
    maps = pa.array([[("a", 1)], [("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int32()))
    pq.write_table(pa.table({"m": maps}), tmp_path / "a.parquet")
    with pytest.raises(SchemaMismatchError) as failure:
        read(tmp_path, "parquet", Schema.of(m="map<string,int>"))
    assert "row 2" in failure.value.problem
    assert failure.value.line == 2


def test_unreadable_parts_of_parquet_are_named_by_path(tmp_path: Path) -> None:
    far = pa.StructArray.from_arrays([pa.array([2**62], pa.timestamp("us", "UTC"))], ["at"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), far)
    pq.write_table(pa.table({"a": lists}), tmp_path / "a.parquet")
    with pytest.raises(SchemaMismatchError) as failure:
        read(tmp_path, "parquet", Schema.of(a="array<struct<at:timestamp>>"))
    assert "'a[].at'" in failure.value.problem


@pytest.mark.spark
@pytest.mark.lengthy
def test_spark_gets_the_same_records(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINE, encoding="utf-8")
    odd = Schema.of(
        {**ORDERS.types, "x.y": "struct<`a b`:int,`c``d`:map<string,struct<`e.f`:date>>>"}
    )
    tree = LocalTree(str(tmp_path))
    declared = DeclaredFiles(tree, "jsonl", odd, "orders")
    found = read_files_with_spark(spark, declared, tree.list()).toArrow().select(odd.names)
    table = fit_to_schema(found, odd, "read")
    assert table.to_pylist(maps_as_pydicts="strict") == [{**ROW, "x.y": None}]


def test_csv_says_that_it_has_no_nested_values(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("k,lines\n1,[]\n")
    with pytest.raises(SchemaMismatchError) as failure:
        read(tmp_path, "csv", Schema.of(k="int", lines=["int"]))
    assert failure.value.column == "lines"
    assert "CSV" in failure.value.problem
