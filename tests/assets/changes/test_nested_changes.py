"""Nested columns of the rows in change streams: as declared, or bad changes by their paths."""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.change_formats import DebeziumUnwrapped, OperationColumn
from dagster_adjunct.assets.declaration.change_values import PLACEHOLDER
from dagster_adjunct.assets.declaration.envelope_values import avro_readers, json_from_avro
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope, MaxwellEnvelope
from dagster_adjunct.assets.declaration.nested_envelope_values import (
    json_decoder,
    nested_schema,
    read_nested_columns,
)
from dagster_adjunct.assets.declaration.snapshots import _table
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS, resolve_session
from tests.assets.changes.changing import changes_of, dataset, decoded, envelopes, problems, rows_of
from tests.assets.conftest import World

COLUMNS = (
    "id BIGINT, tags ARRAY<STRING>, attrs MAP<STRING, STRING>,"
    " doc STRUCT<n: INT, at: TIMESTAMP, day: DATE, ok: BOOLEAN, price: DECIMAL(20,2),"
    " parts: ARRAY<STRUCT<raw: BINARY, ratio: DOUBLE>>>"
)
FORM = DebeziumEnvelope(COLUMNS, timestamps="micros", decimals="precise")
DOC = {
    "n": 1,
    "at": 1_706_702_400_000_005,
    "day": 19_782,
    "ok": 1,
    "price": base64.b64encode((12345678901234567890).to_bytes(9, "big", signed=True)).decode(),
    "parts": [{"raw": "AP8=", "ratio": 0.1}, None],
    "more": [1],
}
READ_DOC = {
    "n": 1,
    "at": dt.datetime(2024, 1, 31, 12, 0, 0, 5, tzinfo=dt.UTC),
    "day": dt.date(2024, 2, 29),
    "ok": True,
    "price": Decimal("123456789012345678.90"),
    "parts": [{"raw": b"\0\xff", "ratio": 0.1}, None],
}
NO_DOC = dict.fromkeys(READ_DOC)


def parsed(form: Any, *afters: Any) -> tuple[list[Any], list[Any]]:
    """Return the nested columns of these rows, and why they don't fit, without Spark."""
    nested = nested_schema(Schema.from_ddl(form.columns))
    texts = [json.dumps({"op": "c", "after": after}) for after in afters]
    values, reasons = read_nested_columns(texts, form, nested, json_decoder(nested))
    return values.to_pylist(maps_as_pydicts="strict"), reasons.to_pylist()


def reason(form: Any, after: Any) -> str:
    """Return the one reason why a row does not fit."""
    values, reasons = parsed(form, after)
    (found,) = [why for why in reasons[0].values() if why is not None]
    assert None in values[0].values()
    return str(found).replace("\x02", "").replace("\x03", "")


def test_each_encoding_within_a_row_is_that_of_simple_columns() -> None:
    values, reasons = parsed(FORM, {"id": 1, "tags": ["a", None], "attrs": {"b": "x", "a": None},
                                    "doc": DOC})  # fmt: skip
    assert values == [{"tags": ["a", None], "attrs": {"a": None, "b": "x"}, "doc": READ_DOC}]
    assert set(reasons[0].values()) == {None}


def test_hstore_and_jsonb_are_also_read_from_their_texts() -> None:
    values, _ = parsed(
        FORM,
        {"attrs": '{"a": "1", "b": null}', "doc": '{"n": 5}', "tags": "[]"},
        {"attrs": {"a": 1.5, "b": {"x": 1}}, "doc": None, "tags": None},
    )
    assert values == [
        {"attrs": {"a": "1", "b": None}, "doc": NO_DOC | {"n": 5}, "tags": []},
        {"attrs": {"a": "1.5", "b": '{"x":1}'}, "doc": None, "tags": None},
    ]


def test_texts_of_times_and_decimals_are_read_too() -> None:
    form = DebeziumEnvelope(COLUMNS, decimals="string")
    doc = {"at": "2024-01-31T13:00:00.000005+01:00", "day": "2024-02-29", "ok": True}
    values, _ = parsed(form, {"doc": doc | {"price": "123456789012345678.90", "n": 1}})
    assert values[0]["doc"] == READ_DOC | {"parts": None}
    # A numeric without digits of its own.
    scaled = {"scale": 1, "value": base64.b64encode(b"\x0c").decode()}
    assert parsed(FORM, {"doc": {"price": scaled}})[0][0]["doc"]["price"] == Decimal("1.20")


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ({"tags": {"a": 1}}, "column 'tags' is '{\"a\":1}', declared array<string>"),
        ({"tags": "x"}, "column 'tags' is 'x', declared array<string>"),
        ({"attrs": '"x"'}, "column 'attrs' is '\"x\"', declared map<string,string>"),
        ({"doc": {"n": "5"}}, "column 'doc.n' is '5', declared int"),
        ({"doc": {"n": 2**31}}, "column 'doc.n' is '2147483648', declared int"),
        ({"doc": {"n": 1.0}}, "column 'doc.n' is '1.0', declared int"),
        ({"doc": {"ok": 2}}, "column 'doc.ok' is '2', declared boolean"),
        ({"doc": {"day": "29.2.2024"}}, "column 'doc.day' is '29.2.2024', declared date"),
        ({"doc": {"day": 10**9}}, "column 'doc.day' is '1000000000', declared date"),
        ({"doc": {"price": "%"}}, "column 'doc.price' is '%', declared decimal(20,2)"),
        ({"doc": {"price": 1}}, "column 'doc.price' is '1', declared decimal(20,2)"),
        ({"doc": {"parts": [{"raw": "%"}]}}, "column 'doc.parts[].raw' is '%', declared binary"),
        ({"doc": {"N": 5}}, "in column 'doc', it has no field 'n', but 'N' in another case"),
    ],
)
def test_a_nested_value_that_does_not_fit_is_named_by_its_path(after: Any, why: str) -> None:
    assert reason(FORM, after) == why


def test_a_number_without_a_unit_within_a_struct_is_no_time() -> None:
    form = replace(FORM, timestamps=None)
    assert reason(form, {"doc": {"at": 5}}).endswith("; timestamps= says what it counts")


def test_a_nested_decimal_needs_its_encoding_as_a_flat_one_does() -> None:
    with pytest.raises(ConfigurationError) as caught:
        DebeziumEnvelope("id BIGINT, prices ARRAY<DECIMAL(5,2)>")
    assert caught.value.argument == "decimals"


def test_values_of_the_row_are_marked_so_that_they_can_be_hidden() -> None:
    _, reasons = parsed(FORM, {"doc": {"n": "secret"}})
    assert reasons[0]["doc"] == "column 'doc.n' is \x02'secret'\x03, declared int"


def test_debezium_rows_have_their_nested_columns(sparkling: World) -> None:
    row = {"id": 1, "tags": ["a"], "attrs": '{"k": "v"}', "doc": DOC}
    empty = {"id": 2, "tags": [], "attrs": {}, "doc": None}
    envelopes(
        sparkling,
        {"op": "c", "before": None, "after": row},
        {"op": "u", "before": row, "after": empty},
        {"op": "c", "before": None, "after": row | {"id": 3, "doc": {"n": "5"}}},
        {"op": "d", "before": empty, "after": None},
        {"schema": {}, "payload": {"op": "r", "before": None, "after": row | {"id": 4}}},
        {"op": "c", "before": None, "after": {"id": 5, "tags": None, "attrs": None}},
    )
    changes = {}
    for row in changes_of(sparkling, dataset(changes=FORM)).collect():
        found = row.asDict(recursive=True)
        if not found["__tombstone"]:
            changes[found["id"]] = (found["tags"], found["attrs"], found["doc"])
    doc = READ_DOC | {"at": changes[1][2]["at"], "parts": [{"raw": bytearray(b"\0\xff"), "ratio": 0.1}, None]}  # fmt: skip
    assert changes == {1: (["a"], {"k": "v"}, doc), 2: ([], {}, None), 4: (["a"], {"k": "v"}, doc)}
    bad = problems(sparkling, dataset(changes=FORM))
    assert list(bad) == [2, 5]
    assert "column 'doc.n' is" in bad[2]
    assert "no column 'doc'" in bad[5]


def test_an_unknown_nested_value_is_kept_or_refused(sparkling: World) -> None:
    form = DebeziumEnvelope(
        "id BIGINT, tags ARRAY<STRING>, attrs MAP<STRING, STRING>, ns ARRAY<INT>"
    )
    codes = list(PLACEHOLDER.encode())
    good = {"id": 1, "tags": ["a"], "attrs": {}, "ns": [1]}
    rows = [
        good | {"tags": [PLACEHOLDER]},
        good | {"attrs": {PLACEHOLDER: PLACEHOLDER}},
        good | {"ns": codes},
        good | {"tags": PLACEHOLDER, "ns": PLACEHOLDER},
        good | {"tags": ["a", PLACEHOLDER]},
        good,
    ]
    envelopes(sparkling, *[{"op": "u", "before": None, "after": row} for row in rows])
    assert list(problems(sparkling, dataset(changes=form))) == [0, 1, 2, 3, 4]
    keeping = dataset(changes=replace(form, on_unavailable="keep"))
    assert list(problems(sparkling, keeping)) == [4]
    kept = [row["__kept"] for row in rows_of(changes_of(sparkling, keeping))]
    assert [sorted(names or ()) for names in kept] == [
        ["tags"], ["attrs"], ["ns"], ["ns", "tags"], [], [],
    ]  # fmt: skip


UNWRAPPED = Schema.of(
    id="bigint", tags="array<string>", attrs="map<string,string>", ns="array<bigint>", op="string"
)


def decode_either(world: World, form: Any, records: pa.Table, schema: Schema) -> Any:
    """Return the changes in these records, as the world's engine decodes them."""
    records = records.append_column("__tombstone", pa.array([False] * records.num_rows))
    if world.spark is IN_PROCESS:
        return form.decode_arrow(records, schema).to_pylist(maps_as_pydicts="strict")
    frame = resolve_session(world.spark).createDataFrame(records)
    changes = form.decode(frame, schema, "t", key=("id",), order_by=(), comparable=True)
    return [row.asDict(recursive=True) for row in changes.collect()]


def test_unwrapped_rows_have_nested_columns_and_unknown_ones(either: World) -> None:
    codes = list(PLACEHOLDER.encode())
    rows = [
        (1, ["a", None], [("k", "v")], None, "u"),
        (2, [PLACEHOLDER], [], [1], "u"),
        (3, None, [(PLACEHOLDER, PLACEHOLDER)], codes, "u"),
        (4, ["x", PLACEHOLDER], None, None, "u"),
        (5, [PLACEHOLDER], None, None, "r"),
    ]
    arrow = UNWRAPPED.to_arrow()
    columns = zip(*rows, strict=True)
    records = pa.table(list(map(pa.array, columns, arrow.types)), schema=arrow)
    form = DebeziumUnwrapped(None, "op")
    schema = form.schema(UNWRAPPED, "t")
    found = decode_either(either, form, records, schema)
    assert [row["__problem"] is None for row in found] == [True, False, False, False, True]
    assert "column 'tags' is" in found[1]["__problem"]
    found = decode_either(either, replace(form, on_unavailable="keep"), records, schema)
    assert [row["__problem"] is None for row in found] == [True, True, True, False, True]
    kept = [sorted(row["__kept"] or ()) for row in found]
    assert kept == [[], ["tags"], ["attrs", "ns"], [], []]
    assert (found[0]["tags"], found[0]["attrs"]) == (["a", None], {"k": "v"})


def test_rows_with_an_operation_have_nested_columns(either: World) -> None:
    records = Schema.of(id="bigint", doc={"a": [{"b": "int"}]}, op="string")
    form = OperationColumn("op")
    docs = [{"a": [{"b": 1}, None]}, None]
    table = pa.table([[1, 2], docs, ["u", "d"]], schema=records.to_arrow())
    found = decode_either(either, form, table, form.schema(records, "t"))
    assert [row["doc"] for row in found] == docs
    assert [row["__tombstone"] for row in found] == [False, True]


def test_documents_of_mongodb_are_structs_where_declared(sparkling: World) -> None:
    form = DebeziumEnvelope(
        "id STRING, name STRUCT<first: STRING, born: TIMESTAMP>, ids ARRAY<STRING>,"
        " sums MAP<STRING, DECIMAL(10,2)>, counts STRUCT<n: BIGINT>, rest STRING",
        documents=True,
    )
    document = {
        "id": {"$oid": "65a0c0ffee"},
        "name": {"first": "Ann", "born": {"$date": {"$numberLong": "1706702400123"}}},
        "ids": [{"$oid": "01"}, {"$oid": "02"}],
        "sums": {"a": {"$numberDecimal": "12.50"}, "b": 3},
        "counts": {"n": {"$numberLong": "9007199254740993"}},
        "rest": {"x": [1, {"$numberInt": "2"}]},
    }
    envelopes(
        sparkling,
        {"op": "c", "before": None, "after": json.dumps(document)},
        {"op": "c", "before": None, "after": json.dumps({"id": "2"})},
    )
    (first, second) = sorted(rows_of(changes_of(sparkling, dataset(changes=form))),
                             key=lambda row: row["__offset"])  # fmt: skip
    assert first["id"] == "65a0c0ffee"
    assert first["name"]["first"] == "Ann"
    assert first["name"]["born"].timestamp() == 1706702400.123
    assert first["ids"] == ["01", "02"]
    assert first["sums"] == {"a": Decimal("12.50"), "b": Decimal("3.00")}
    assert first["counts"]["n"] == 9007199254740993
    assert first["rest"] == '{"x":[1,2]}'
    assert second["name"] is None
    assert second["ids"] is None


def test_maxwells_json_columns_are_nested_where_declared(sparkling: World) -> None:
    form = MaxwellEnvelope("id BIGINT, doc STRUCT<a: ARRAY<INT>, price: DECIMAL(20,2)>")
    data = {"id": 1, "doc": {"a": [1, 2], "price": 1.25}}
    envelopes(
        sparkling,
        {"database": "s", "table": "t", "type": "insert", "data": data},
        {"database": "s", "table": "t", "type": "update", "data": data | {"doc": None}, "old": {}},
        {"database": "s", "table": "t", "type": "insert", "data": data | {"doc": {"a": 5}}},
        {"database": "s", "table": "t", "type": "delete", "data": data},
    )
    rows = decoded(sparkling, dataset(changes=form))
    assert rows[0].row[1].asDict() == {"a": [1, 2], "price": Decimal("1.25")}
    assert rows[1].row[1] is None
    assert "column 'doc.a' is" in str(rows[2].problem)
    assert rows[3].deleted


SNAPSHOT = Schema.of(id="bigint", tags="array<string>", doc={"n": "int", "m": "map<string,int>"})


def test_a_snapshot_of_postgresql_has_arrays_and_json_as_declared() -> None:
    rows = [(1, ["a", None], {"n": 1, "m": {"b": 2, "a": None}}), (2, None, None)]
    table = _table(rows, [0, 1, 2], SNAPSHOT, "a snapshot")
    assert table.to_pylist(maps_as_pydicts="strict") == [
        {"id": 1, "tags": ["a", None], "doc": {"n": 1, "m": {"a": None, "b": 2}}},
        {"id": 2, "tags": None, "doc": None},
    ]
    for row, path in (
        ((1, "{a}", None), "'tags'"),
        ((1, [], {"n": 1.5}), r"'doc\.n'"),
        ((1, [], {"m": {"a": "1"}}), r"'doc\.m\[\*\]'"),
    ):
        with pytest.raises(SchemaMismatchError, match=f"column {path} holds a value"):
            _table([row], [0, 1, 2], SNAPSHOT, "a snapshot")


def test_envelopes_in_avro_have_nested_columns() -> None:
    fields = [
        {"name": "id", "type": "long"},
        {"name": "tags", "type": {"type": "array", "items": ["null", "string"]}},
        {"name": "attrs", "type": {"type": "map", "values": ["null", "string"]}},
        {"name": "doc", "type": {"type": "record", "name": "Doc", "fields": [
            {"name": "price", "type": {"type": "bytes", "logicalType": "decimal",
                                       "precision": 20, "scale": 2}},
            {"name": "raw", "type": "bytes"},
            {"name": "ratio", "type": "double"},
            {"name": "at", "type": "long"}]}},
    ]  # fmt: skip
    row = {"type": "record", "name": "Row", "fields": fields}
    sides = [{"name": "after", "type": ["null", row]}, {"name": "op", "type": "string"}]
    schema = json.dumps({"type": "record", "name": "Envelope", "fields": sides})
    form = DebeziumEnvelope(
        "id BIGINT, tags ARRAY<STRING>, attrs MAP<STRING, STRING>,"
        " doc STRUCT<price: DECIMAL(20,2), raw: BINARY, ratio: DOUBLE, at: TIMESTAMP>",
        format="avro",
        avro_schema=schema,
        timestamps="micros",
    )
    doc = {"price": Decimal("-123456789012345678.90"), "raw": b"\0", "ratio": float("inf"), "at": 1}
    after = {"id": 1, "tags": ["a", None], "attrs": {"b": None}, "doc": doc}
    out = io.BytesIO()
    fastavro.schemaless_writer(out, json.loads(schema), {"op": "c", "after": after})
    text, problem = json_from_avro(out.getvalue(), avro_readers(form.schemas, "t"))
    assert problem is None
    nested = nested_schema(Schema.from_ddl(form.columns))
    values, reasons = read_nested_columns([text], form, nested, json_decoder(nested))
    assert set(reasons.to_pylist()[0].values()) == {None}
    at = dt.datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=dt.UTC)
    assert values.to_pylist(maps_as_pydicts="strict") == [
        {"tags": ["a", None], "attrs": {"b": None}, "doc": doc | {"at": at}}
    ]


KEYED = DebeziumEnvelope("id STRUCT<n: BIGINT, region: STRING>, v STRING", on_missing="null")


def test_rows_of_envelopes_are_keyed_by_paths(sparkling: World) -> None:
    one = {"id": {"n": 1, "region": "eu"}, "v": "a"}
    moved = {"id": {"n": 1, "region": "us"}, "v": "b"}
    other = {"id": {"n": 2, "region": "us"}, "v": "c"}
    envelopes(
        sparkling,
        {"op": "c", "before": None, "after": one},
        {"op": "u", "before": one, "after": moved},
        {"op": "u", "before": moved, "after": other},
        {"op": "u", "before": {"id": None, "v": None}, "after": one},
        {"op": "d", "before": {"id": '{"n": 2}', "v": None}, "after": None},
        {"op": "d", "before": {"id": {"n": "x"}, "v": None}, "after": None},
        {"op": "c", "before": None, "after": {"id": {"region": "eu"}, "v": "d"}},
    )
    spec = dataset(key="id.n as no", changes=KEYED, columns=["v"])
    found = [
        (row["__offset"], row["no"], row["v"], row["__tombstone"])
        for row in changes_of(sparkling, spec).collect()
        if row["__problem"] is None
    ]
    assert found == [
        (0, 1, "a", False),
        (1, 1, "b", False),
        (2, 1, None, True),
        (2, 2, "c", False),
        (4, 2, None, True),
    ]
    bad = problems(sparkling, spec)
    assert list(bad) == [3, 5, 6]
    assert "before it" in bad[3]
    assert "'id.n'" in bad[5]
    assert bad[6] == "null key column 'no'"


def test_a_table_of_envelopes_is_ordered_and_keyed_by_paths_of_rows(sparkling: World) -> None:
    form = DebeziumEnvelope("id STRUCT<n: BIGINT>, meta STRUCT<seq: BIGINT, v: STRING>")

    def row(number: int, seq: int, value: str) -> dict[str, Any]:
        return {"id": {"n": number}, "meta": {"seq": seq, "v": value}}

    envelopes(
        sparkling,
        {"op": "c", "before": None, "after": row(1, 5, "new")},
        {"op": "u", "before": row(1, 5, "new"), "after": row(1, 3, "old")},
        {"op": "c", "before": None, "after": row(2, 1, "gone")},
        {"op": "d", "before": row(2, 2, "gone"), "after": None},
    )
    spec = dataset(key="id.n", changes=form, order_by="meta.seq")
    sparkling.advance(spec)
    assert dict(sparkling.view(spec).items()) == {1: {"n": 1, **row(1, 5, "new")}}


def test_rows_of_maxwell_are_keyed_by_paths(sparkling: World) -> None:
    form = MaxwellEnvelope("id STRUCT<n: BIGINT>, v STRING")

    def change(kind: str, data: Any, old: Any = None) -> dict[str, Any]:
        return {"type": kind, "data": data, "old": old, "database": "d", "table": "t"}

    one = {"id": {"n": 1}, "v": "a"}
    envelopes(
        sparkling,
        change("insert", one),
        change("update", {"id": {"n": 1}, "v": "b"}, {"v": "a"}),
        change("update", {"id": {"n": 2}, "v": "b"}, {"id": {"n": 1}}),
        change("delete", {"id": {"n": 2}, "v": "b"}),
    )
    found = [
        (row["__offset"], row["n"], row["v"], row["__tombstone"], row["__problem"])
        for row in changes_of(sparkling, dataset(key="id.n", changes=form, columns=["v"])).collect()
    ]
    assert found == [
        (0, 1, "a", False, None),
        (1, 1, "b", False, None),
        (2, 1, None, True, None),
        (2, 2, "b", False, None),
        (3, 2, None, True, None),
    ]
