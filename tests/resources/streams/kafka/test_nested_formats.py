"""Nested columns come from Kafka's messages and go into them whole, in each format."""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.kafka.avro import Avro
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings
from dagster_adjunct.resources.streams.kafka.formats import Json
from dagster_adjunct.resources.streams.kafka.protobuf import Protobuf
from dagster_adjunct.resources.streams.kafka.record_formats import (
    KafkaTopic,
    create_decoder,
    encode_table,
)
from dagster_adjunct.resources.streams.kafka.schema_registry import RegisteredSchema, SchemaRegistry
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams
from dagster_adjunct.resources.streams.system import OffsetRange
from tests.resources.streams.kafka.messages import STREAM, avro_schema, batch_of
from tests.servers.kafka import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = Schema.of(
    id="bigint",
    customer={"name": "string", "address": {"city": "string", "since": "date"}},
    lines=[
        {
            "sku": "string",
            "price": "decimal(12,2)",
            "at": "timestamp",
            "raw": "binary",
            "ratio": "double",
            "paid": "boolean",
        }
    ],
    attributes="map<string,array<int>>",
)
NOON = dt.datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=dt.UTC)
LINE = {
    "sku": "é",
    "price": Decimal("-9999999999.99"),
    "at": NOON,
    "raw": b"\0\xff",
    "ratio": 0.1,
    "paid": True,
}
NO_LINE = dict.fromkeys(LINE)
ROWS = [
    {
        "id": 1,
        "customer": {"name": "Ann", "address": {"city": "Ulm", "since": dt.date(2024, 2, 29)}},
        "lines": [LINE, None, NO_LINE],
        "attributes": {"b": [1, None], "a": [], "c": None},
    },
    {"id": 2, "customer": {"name": None, "address": None}, "lines": [], "attributes": {}},
    {"id": 3, "customer": None, "lines": None, "attributes": None},
]


def read(topic: KafkaTopic, *values: bytes | None) -> list[dict[str, Any]]:
    """Return the records of these messages, with maps as dictionaries."""
    records = create_decoder(topic, STREAM)(batch_of(values))
    names = topic.schema().names
    return records.select(names).to_pylist(maps_as_pydicts="strict")


def write(topic: KafkaTopic, *rows: dict[str, Any]) -> list[bytes]:
    """Return the values of the messages of these records."""
    schema = topic.schema()
    table = fit_to_schema(to_arrow_table(list(rows), "rows", schema), schema, "rows")
    values: list[bytes] = encode_table(table, topic, STREAM).column("__value").to_pylist()
    return values


def refusal(topic: KafkaTopic, message: bytes) -> str:
    """Return why a message is malformed. It is also kept whole, with nothing in its columns."""
    keeping = KafkaTopic(value=_keeping(topic.value))
    good = next(iter(write(topic, dict.fromkeys(topic.schema().names))), b"")
    rows = read(keeping, good, message)
    assert rows[1] == dict.fromkeys(topic.schema().names) | {"bad": message}
    assert rows[0]["bad"] is None
    with pytest.raises(SchemaMismatchError) as caught:
        read(topic, good, message)
    return caught.value.problem


def _keeping(form: Any) -> Any:
    return replace(form, malformed="bad")


# -- JSON

JSON = KafkaTopic(value=Json(ORDERS))


def as_json(value: Any) -> Any:
    """Return a value as plain JSON has it, in Adjunct's forms."""
    if isinstance(value, dict):
        return {name: as_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [as_json(part) for part in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    return value


def test_nested_json_is_read_at_every_depth() -> None:
    messages = [json.dumps(as_json(row)).encode() for row in ROWS]
    assert read(JSON, *messages, None) == [*ROWS, dict.fromkeys(ORDERS.names)]


def test_nested_columns_are_written_as_json_with_exact_numbers() -> None:
    topic = KafkaTopic(value=Json("a STRUCT<`x y`: ARRAY<DECIMAL(20,2)>>, m MAP<STRING, BIGINT>"))
    row = {"a": {"x y": [Decimal("12345678901234567.89"), None]}, "m": {"z": 2**63 - 1, "é": None}}
    text = '{"a":{"x y":[12345678901234567.89,null]},"m":{"z":9223372036854775807,"é":null}}'
    assert write(topic, row) == [text.encode()]
    assert read(topic, text.encode()) == [row]


_LINES = st.fixed_dictionaries(
    {
        "sku": st.none() | st.text(st.characters(exclude_categories=("Cs",)), max_size=4),
        "price": st.none() | st.decimals(-(10**9), 10**9, places=2),
        "at": st.none() | st.datetimes(timezones=st.just(dt.UTC)),
        "raw": st.none() | st.binary(max_size=3),
        "ratio": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "paid": st.none() | st.booleans(),
    }
)
_ADDRESSES = st.fixed_dictionaries({"city": st.just("Ulm"), "since": st.none() | st.dates()})
_CUSTOMERS = st.fixed_dictionaries({"name": st.just(None), "address": st.none() | _ADDRESSES})
_KEYS = st.text(st.characters(exclude_categories=("Cs",)), max_size=3)
_COUNTS = st.none() | st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), max_size=3)
_ORDERS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.integers(-(2**63), 2**63 - 1),
            "customer": st.none() | _CUSTOMERS,
            "lines": st.none() | st.lists(st.none() | _LINES, max_size=3),
            "attributes": st.none() | st.dictionaries(_KEYS, _COUNTS, max_size=3),
        }
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.lengthy
@settings(max_examples=60, derandomize=True)
@given(_ORDERS)
def test_drawn_orders_go_through_json(rows: list[dict[str, Any]]) -> None:
    messages = write(JSON, *rows)
    assert read(JSON, *messages) == rows
    for row, message in zip(rows, messages, strict=True):
        found = json.loads(message, parse_float=Decimal)
        assert found["attributes"] == row["attributes"]
        if row["lines"] is not None:
            prices = [line and line["price"] for line in row["lines"]]
            assert [line and line["price"] for line in found["lines"]] == prices
    assert read(JSON, *[json.dumps(as_json(row)).encode() for row in rows]) == rows


def test_missing_and_null_fields_of_objects_are_null_and_undeclared_ones_left_out() -> None:
    rows = read(
        JSON,
        b'{"customer":{"name":null,"more":[{"x":1}]},"lines":[{}]}',
        b'{"customer":null}',
        b"{}",
    )
    nothing = dict.fromkeys(ORDERS.names)
    assert rows == [
        nothing | {"customer": {"name": None, "address": None}, "lines": [NO_LINE]},
        nothing,
        nothing,
    ]


BAD_JSON = [
    ('{"customer":[]}', "column 'customer' is a list, declared struct<name:string,"),
    ('{"customer":{"address":"Ulm"}}', "column 'customer.address' is the text"),
    ('{"customer":{"name":5}}', "column 'customer.name' is 5, declared string"),
    (
        '{"customer":{"Name":"x"}}',
        "in column 'customer', it has no field 'name', but 'Name' in another case",
    ),
    ('{"lines":{"sku":"a"}}', "column 'lines' is an object, declared array<"),
    ('{"lines":[{"sku":"a"},7]}', "column 'lines[]' is 7, declared struct<"),
    ('{"lines":[{"price":1.005}]}', "column 'lines[].price' is 1.005, declared decimal(12,2)"),
    ('{"lines":[null,{"at":"2024-01-01T00:00:00"}]}', "column 'lines[].at' is the text"),
    ('{"lines":[{"at":1704096000123}]}', "column 'lines[].at' is 1704096000123"),
    ('{"lines":[{"raw":"%"}]}', "column 'lines[].raw' is the text"),
    ('{"lines":[{"ratio":1e400}]}', "column 'lines[].ratio' is"),
    ('{"lines":[{"paid":1}]}', "column 'lines[].paid' is 1, declared boolean"),
    ('{"attributes":[["a",[1]]]}', "column 'attributes' is a list, declared map<"),
    ('{"attributes":{"a":[1,2147483648]}}', "column 'attributes[*][]' is 2147483648"),
    ('{"attributes":{"a":1}}', "column 'attributes[*]' is 1, declared array<int>"),
    ('{"attributes":{"\\ud800":[]}}', "column 'attributes' has a key that is not text"),
]


@pytest.mark.parametrize(("message", "reason"), BAD_JSON)
def test_a_nested_value_that_does_not_fit_is_refused_by_its_path(message: str, reason: str) -> None:
    assert reason in refusal(JSON, message.encode())


def test_a_bad_element_spoils_only_its_own_message() -> None:
    topic = KafkaTopic(value=Json("a ARRAY<MAP<STRING, INT>>", malformed="bad"))
    good = [b'{"a":[{"x":1},{"y":2}]}', b'{"a":[]}', b'{"a":[{"z":3}]}']
    wrong = b'{"a":[{"x":1},{"y":"2"}]}'
    rows = read(topic, good[0], wrong, good[1], None, good[2])
    assert [row["a"] for row in rows] == [[{"x": 1}, {"y": 2}], None, [], None, [{"z": 3}]]
    assert [row["bad"] for row in rows] == [None, wrong, None, None, None]


def test_times_within_objects_are_in_the_declared_unit() -> None:
    topic = KafkaTopic(value=Json("a ARRAY<STRUCT<at: TIMESTAMP>>", timestamps="millis"))
    row = {"a": [{"at": NOON.replace(microsecond=7000)}, {"at": None}]}
    (message,) = write(topic, row)
    assert json.loads(message)["a"][0] == {"at": 1769860800007}
    assert read(topic, message) == [row]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nested_number_that_json_can_not_represent_is_not_written(value: float) -> None:
    topic = KafkaTopic(value=Json("a STRUCT<b: ARRAY<DOUBLE>>"))
    with pytest.raises(SchemaMismatchError, match=r"column 'a\.b\[\]' has NaN or an infinity"):
        write(topic, {"a": {"b": [1.0, value]}})
    values = pa.array([{"b": [value]}, {"b": [2.0]}], topic.schema().to_arrow().field("a").type)
    hidden = pa.StructArray.from_arrays(
        values.flatten(), fields=list(values.type), mask=pa.array([True, False])
    )
    messages = encode_table(pa.table({"a": hidden}), topic, STREAM).column("__value").to_pylist()
    assert messages == [b'{"a":null}', b'{"a":{"b":[2.0]}}']


# -- keys


@pytest.mark.parametrize(
    "key", [Json("id STRUCT<a: INT>"), Avro(avro_schema(("id", {"type": "array", "items": "int"})))]
)
def test_a_nested_column_in_a_key_is_refused_by_name(key: Any) -> None:
    with pytest.raises(ConfigurationError, match="columns of keys are simple") as caught:
        KafkaTopic(value=Json("seats INT"), key=key)
    assert caught.value.column == "id"


# -- Avro

_LINE_RECORD = {
    "type": "record",
    "name": "Line",
    "fields": [
        {"name": "sku", "type": ["null", "string"]},
        {
            "name": "price",
            "type": [
                "null",
                {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2},
            ],
        },
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
        {"name": "raw", "type": ["null", "bytes"]},
        {"name": "ratio", "type": ["null", "double"]},
        {"name": "paid", "type": ["null", "boolean"]},
    ],
}
_ADDRESS_RECORD = {
    "type": "record",
    "name": "Address",
    "fields": [
        {"name": "city", "type": "string"},
        {"name": "since", "type": ["null", {"type": "int", "logicalType": "date"}]},
    ],
}
_CUSTOMER_RECORD = {
    "type": "record",
    "name": "Customer",
    "fields": [
        {"name": "name", "type": ["null", "string"]},
        {"name": "address", "type": ["null", _ADDRESS_RECORD]},
    ],
}
AVRO_ORDERS = avro_schema(
    ("id", "long"),
    ("customer", ["null", _CUSTOMER_RECORD]),
    ("lines", ["null", {"type": "array", "items": ["null", _LINE_RECORD]}]),
    (
        "attributes",
        [{"type": "map", "values": ["null", {"type": "array", "items": ["null", "int"]}]}, "null"],
    ),
)
AVRO = KafkaTopic(value=Avro(AVRO_ORDERS))


def as_avro(schema: str, row: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(schema)), row)
    return out.getvalue()


def from_avro(schema: str, message: bytes) -> Any:
    parsed = fastavro.parse_schema(json.loads(schema))
    return fastavro.schemaless_reader(io.BytesIO(message), parsed, None)


def test_avro_has_the_columns_of_its_records() -> None:
    assert AVRO.schema() == ORDERS


def test_nested_avro_goes_both_ways() -> None:
    messages = [as_avro(AVRO_ORDERS, row) for row in ROWS]
    assert read(AVRO, *messages, None) == [*ROWS, dict.fromkeys(ORDERS.names)]
    assert [from_avro(AVRO_ORDERS, message) for message in write(AVRO, *ROWS)] == ROWS


@pytest.mark.lengthy
@settings(max_examples=60, derandomize=True)
@given(_ORDERS)
def test_drawn_orders_go_through_avro(rows: list[dict[str, Any]]) -> None:
    messages = write(AVRO, *rows)
    assert read(AVRO, *messages) == rows
    assert [from_avro(AVRO_ORDERS, message) for message in messages] == rows
    assert read(AVRO, *[as_avro(AVRO_ORDERS, row) for row in rows]) == rows


PLANES = avro_schema(
    ("main", {"type": "record", "name": "Plane", "fields": [
        {"name": "status", "type": {"type": "enum", "name": "Status", "symbols": ["UP", "DOWN"]}},
        {"name": "hash", "type": {"type": "fixed", "name": "Two", "size": 2}},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "any", "type": ["null", "string", "long"]},
        {"name": "time", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "next", "type": ["null", "Plane"]},
        {"name": "made", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ]}),
    ("spare", {"type": "map", "values": "Plane"}),
)  # fmt: skip
PLANE = {
    "status": "UP",
    "hash": b"\0\1",
    "id": "00000000-0000-0000-0000-000000000007",
    "any": '"text"',
    "time": "01:02:03",
    "next": None,
    "made": NOON.replace(microsecond=7000),
}


def test_enums_fixed_unions_and_times_within_avro_records_are_as_at_the_top() -> None:
    topic = KafkaTopic(value=Avro(PLANES))
    assert topic.schema().field("main").type == (
        "struct<status:string,hash:binary,id:string,any:string,time:string,next:string,"
        "made:timestamp>"
    )
    assert topic.schema().field("spare").type == f"map<string,{topic.schema().field('main').type}>"
    row = {"main": PLANE, "spare": {"a": PLANE | {"any": "7"}, "b": PLANE | {"any": None}}}
    (message,) = write(topic, row)
    sent = from_avro(PLANES, message)
    assert (sent["main"]["any"], sent["spare"]["a"]["any"]) == ("text", 7)
    assert read(topic, message) == [row]
    inner = sent["main"] | {"next": sent["main"]}
    (read_row,) = read(topic, as_avro(PLANES, sent | {"main": inner}))
    assert json.loads(read_row["main"]["next"])["status"] == "UP"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"status": "GONE"}, r"column 'spare\[\*\]\.status' .*: expected one of UP, DOWN"),
        ({"hash": b"\0"}, r"column 'spare\[\*\]\.hash' .*: expected 2 bytes"),
        ({"made": NOON}, r"column 'spare\[\*\]\.made' has microseconds"),
        ({"time": "noon"}, r"column 'spare\[\*\]\.time' has a text that is not an ISO time-millis"),
        ({"any": "text"}, r"column 'spare\[\*\]\.any' has a text that is not JSON"),
        ({"status": None}, r"column 'spare\[\*\]\.status' is null in 1 records"),
    ],
)
def test_a_nested_value_that_avro_can_not_hold_is_refused_by_its_path(
    changed: dict[str, Any], message: str
) -> None:
    topic = KafkaTopic(value=Avro(PLANES))
    with pytest.raises(SchemaMismatchError, match=message) as caught:
        write(topic, {"main": PLANE, "spare": {"a": PLANE, "b": PLANE | changed}})
    assert caught.value.column == "spare"


def test_a_null_record_needs_no_values_for_its_fields() -> None:
    schema = avro_schema(("a", ["null", {"type": "record", "name": "A", "fields": [
        {"name": "b", "type": "int"}]}]))  # fmt: skip
    topic = KafkaTopic(value=Avro(schema))
    rows = [{"a": None}, {"a": {"b": 1}}]
    assert read(topic, *write(topic, *rows)) == rows


class KnownSchemas(SchemaRegistry):
    """A registry that has one schema, with the id 7, and needs no server."""

    text = ""

    def schema(self, number: int) -> RegisteredSchema:
        assert number == 7
        return RegisteredSchema(7, "AVRO", self.text)


def _with_writer(schema: str) -> SchemaRegistry:
    registry = KnownSchemas("http://localhost:1")
    object.__setattr__(registry, "text", schema)
    return registry


def _plane(*fields: tuple[str, Any, Any]) -> dict[str, Any]:
    """Return a record type whose fields have a default unless it is `...`."""
    made = []
    for name, kind, default in fields:
        made.append({"name": name, "type": kind})
        if default is not ...:
            made[-1]["default"] = default
    return {"type": "record", "name": "Plane", "fields": made}


def test_nested_records_are_resolved_from_their_writers_schema() -> None:
    writer = avro_schema(
        ("planes", {"type": "map", "values": _plane(("seats", "int", ...), ("old", "int", ...),
                                                    ("tail", "string", ...))}),
    )  # fmt: skip
    seats = ["null", "long"]
    reader = avro_schema(
        ("planes", {"type": "map", "values": _plane(("tail", "string", ...), ("seats", seats, ...),
                                                    ("tags", {"type": "array", "items": "string"},
                                                     ["new"]))}),
    )  # fmt: skip
    topic = KafkaTopic(value=Avro(reader, registry=_with_writer(writer)))
    sent = {"planes": {"a": {"seats": 3, "old": 1, "tail": "N1"}}}
    message = b"\0\0\0\0\7" + as_avro(writer, sent)
    assert read(topic, message) == [{"planes": {"a": {"tail": "N1", "seats": 3, "tags": ["new"]}}}]


def test_a_field_of_a_nested_record_in_another_case_is_malformed() -> None:
    writer = avro_schema(("plane", ["null", _plane(("Seats", "int", ...))]))
    reader = avro_schema(("plane", ["null", _plane(("seats", "int", 0))]))
    topic = KafkaTopic(value=Avro(reader, registry=_with_writer(writer)))
    message = b"\0\0\0\0\7" + as_avro(writer, {"plane": {"Seats": 3}})
    with pytest.raises(SchemaMismatchError, match="no field 'seats', but 'Seats' in another case"):
        read(topic, message)


# -- Protobuf


def orders_descriptors() -> bytes:
    """Return a set with the message shop.Order, as protoc would make it of this file:

    syntax = "proto3"; package shop;
    message Address { string city = 1; optional int32 zip = 2; }
    enum Status { NEW = 0; PAID = 1; }
    message Line { string sku = 1; double price = 2; google.protobuf.Timestamp at = 3;
      google.protobuf.StringValue note = 4; Status status = 5; uint64 id = 6; bytes raw = 7;
      google.protobuf.Duration took = 8; Line bundle = 9; }
    message Order { int64 id = 1; Address address = 2; repeated Line lines = 3;
      map<int32, Address> depots = 4; map<string, Status> states = 5; oneof paid_by {
      string card = 6; Address cash = 7; } repeated google.protobuf.Timestamp times = 8;
      repeated Status steps = 9; map<bool, google.protobuf.Int64Value> flags = 10; }
    """
    from google.protobuf import descriptor_pb2, duration_pb2, timestamp_pb2, wrappers_pb2

    kinds = descriptor_pb2.FieldDescriptorProto
    descriptors = descriptor_pb2.FileDescriptorSet()
    imports = []
    for module in (timestamp_pb2, wrappers_pb2, duration_pb2):
        module.DESCRIPTOR.CopyToProto(descriptors.file.add())
        imports.append(module.DESCRIPTOR.name)
    file = descriptors.file.add(
        name="shop.proto", package="shop", syntax="proto3", dependency=imports
    )
    status = file.enum_type.add(name="Status")
    for number, name in enumerate(("NEW", "PAID")):
        status.value.add(name=name, number=number)

    def add(message: Any, number: int, name: str, kind: Any, *, repeated: bool = False) -> Any:
        label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
        field = message.field.add(name=name, number=number, label=label)
        if isinstance(kind, str):
            field.type = kinds.TYPE_ENUM if kind == ".shop.Status" else kinds.TYPE_MESSAGE
            field.type_name = kind
        else:
            field.type = kind
        return field

    def add_map(message: Any, number: int, name: str, key: Any, value: Any) -> None:
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        add(entry, 1, "key", key)
        add(entry, 2, "value", value)
        add(message, number, name, f".shop.{message.name}.{entry.name}", repeated=True)

    address = file.message_type.add(name="Address")
    add(address, 1, "city", kinds.TYPE_STRING)
    zip_code = add(address, 2, "zip", kinds.TYPE_INT32)
    address.oneof_decl.add(name="_zip")
    zip_code.proto3_optional = True
    zip_code.oneof_index = 0
    line = file.message_type.add(name="Line")
    for number, (name, kind) in enumerate(
        {
            "sku": kinds.TYPE_STRING,
            "price": kinds.TYPE_DOUBLE,
            "at": ".google.protobuf.Timestamp",
            "note": ".google.protobuf.StringValue",
            "status": ".shop.Status",
            "id": kinds.TYPE_UINT64,
            "raw": kinds.TYPE_BYTES,
            "took": ".google.protobuf.Duration",
            "bundle": ".shop.Line",
        }.items(),
        1,
    ):
        add(line, number, name, kind)
    order = file.message_type.add(name="Order")
    add(order, 1, "id", kinds.TYPE_INT64)
    add(order, 2, "address", ".shop.Address")
    add(order, 3, "lines", ".shop.Line", repeated=True)
    add_map(order, 4, "depots", kinds.TYPE_INT32, ".shop.Address")
    add_map(order, 5, "states", kinds.TYPE_STRING, ".shop.Status")
    order.oneof_decl.add(name="paid_by")
    add(order, 6, "card", kinds.TYPE_STRING).oneof_index = 0
    add(order, 7, "cash", ".shop.Address").oneof_index = 0
    add(order, 8, "times", ".google.protobuf.Timestamp", repeated=True)
    add(order, 9, "steps", ".shop.Status", repeated=True)
    add_map(order, 10, "flags", kinds.TYPE_BOOL, ".google.protobuf.Int64Value")
    result: bytes = descriptors.SerializeToString()
    return result


PROTOBUF = KafkaTopic(value=Protobuf(orders_descriptors(), "shop.Order"))


@lru_cache
def order_class() -> Any:
    """Return the class of shop.Order, made by Protobuf alone."""
    from google.protobuf import descriptor_pb2, message_factory

    files = descriptor_pb2.FileDescriptorSet.FromString(orders_descriptors()).file
    return message_factory.GetMessages(list(files))["shop.Order"]


def proto_order() -> Any:
    return order_class()()


PROTO_LINE: dict[str, Any] = {
    "sku": "a",
    "price": 0.5,
    "at": NOON,
    "note": "",
    "status": "PAID",
    "id": Decimal(2**64 - 1),
    "raw": b"\xff",
    "took": '"3s"',
    "bundle": None,
}
PROTO_EMPTY_LINE = {
    "sku": "",
    "price": 0.0,
    "at": None,
    "note": None,
    "status": "NEW",
    "id": Decimal(0),
    "raw": b"",
    "took": None,
    "bundle": None,
}
PROTO_ROW: dict[str, Any] = {
    "id": 7,
    "address": {"city": "Ulm", "zip": 0},
    "lines": [PROTO_LINE, PROTO_EMPTY_LINE],
    "depots": {"-1": {"city": "", "zip": None}, "2": {"city": "Bonn", "zip": None}},
    "states": {"x": "NEW", "y": "PAID"},
    "card": None,
    "cash": {"city": "Köln", "zip": None},
    "times": [NOON],
    "steps": ["PAID", "NEW"],
    "flags": {"false": 0, "true": 5},
}
PROTO_NOTHING = {
    "id": 0,
    "address": None,
    "lines": [],
    "depots": {},
    "states": {},
    "card": None,
    "cash": None,
    "times": [],
    "steps": [],
    "flags": {},
}


def filled_order() -> Any:
    order = proto_order()
    order.id = 7
    order.address.city = "Ulm"
    order.address.zip = 0
    line = order.lines.add(sku="a", price=0.5, status=1, id=2**64 - 1, raw=b"\xff")
    line.at.FromDatetime(NOON)
    line.note.value = ""
    line.took.seconds = 3
    order.lines.add()
    order.depots[-1].city = ""
    order.depots[2].city = "Bonn"
    order.states["x"] = 0
    order.states["y"] = 1
    order.cash.city = "Köln"
    order.times.add().FromDatetime(NOON)
    order.steps.extend([1, 0])
    order.flags[False].value = 0
    order.flags[True].value = 5
    return order


def test_nested_protobuf_goes_both_ways() -> None:
    line = (
        "struct<sku:string,price:double,at:timestamp,note:string,status:string,id:decimal(20,0),"
        "raw:binary,took:string,bundle:string>"
    )
    address = "struct<city:string,zip:int>"
    assert PROTOBUF.schema().types == {
        "id": "bigint",
        "address": address,
        "lines": f"array<{line}>",
        "depots": f"map<string,{address}>",
        "states": "map<string,string>",
        "card": "string",
        "cash": address,
        "times": "array<timestamp>",
        "steps": "array<string>",
        "flags": "map<string,bigint>",
    }
    messages = [filled_order().SerializeToString(), b"", None]
    assert read(PROTOBUF, *messages) == [PROTO_ROW, PROTO_NOTHING, dict.fromkeys(PROTO_ROW)]
    order = proto_order()
    sent = [type(order).FromString(message) for message in write(PROTOBUF, PROTO_ROW, {"id": 0})]
    assert sent == [filled_order(), order]


def test_a_message_within_itself_is_json_text() -> None:
    order = proto_order()
    order.lines.add().bundle.sku = "b"
    (row,) = read(PROTOBUF, order.SerializeToString())
    assert row["lines"] == [PROTO_EMPTY_LINE | {"bundle": '{"sku":"b"}'}]
    assert type(order).FromString(*write(PROTOBUF, row)) == order


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lines": [None]}, r"column 'lines\[\]' is null"),
        ({"states": {"x": None}}, r"column 'states\[\*\]' is null"),
        ({"states": {"x": "GONE"}}, r"column 'states\[\*\]' has a value"),
        ({"steps": ["GONE"]}, r"column 'steps\[\]' has a value"),
        ({"depots": {"x": {"city": "a"}}}, r"column 'depots\[\*\]' has a value"),
        ({"depots": {"01": {"city": "a"}}}, r"column 'depots\[\*\]' has a value"),
        ({"lines": [{"id": Decimal(-1)}]}, r"column 'lines\[\]\.id' has a value"),
        ({"lines": [{"took": "3s"}]}, r"column 'lines\[\]\.took' has a value"),
        ({"lines": [{"bundle": '{"wings":2}'}]}, r"column 'lines\[\]\.bundle' has a value"),
        ({"card": "1", "cash": {"city": "a"}}, "only one of the oneof 'paid_by' can"),
    ],
)
def test_a_nested_value_that_protobuf_can_not_hold_is_refused_by_its_path(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(SchemaMismatchError, match=message):
        write(PROTOBUF, {"id": 1} | changed)


def test_a_nested_protobuf_field_of_another_type_is_malformed() -> None:
    wrong = b"\x12\x02\x08\x01"  # address: the number 1 in place of its city
    assert "not shop.Address: field 'city' has another type" in refusal(PROTOBUF, wrong)


# -- through Spark and a real broker


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.parametrize("form", ["json", "avro", "protobuf"])
def test_nested_columns_go_through_spark_and_a_broker(
    spark: SparkSession, kafka: KafkaServer, lake: Lake, form: str
) -> None:
    declared = {"json": JSON, "avro": AVRO, "protobuf": PROTOBUF}[form]
    rows = [PROTO_ROW, PROTO_ROW | {"id": 8}] if form == "protobuf" else ROWS
    topic = replace(declared, topic=kafka.new_topic(2))
    streams = KafkaStreams(lake, KafkaSettings("kafka", kafka.bootstrap, topics={"orders": topic}))
    schema = topic.schema()
    table = fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")
    streams.append("orders", table, producer="here", sequence=1)
    ends = streams.upcoming(streams.partitions("orders"))
    frame = streams.read(spark, {ssp: OffsetRange("0", end) for ssp, end in ends.items()})
    frame = frame.select(*schema.names)
    assert Schema.from_spark(frame.schema) == schema
    assert found(frame.toArrow()) == rows
    changed = frame.withColumn("id", F.col("id") + 100)
    streams.append("orders", changed, producer="there", sequence=1)
    later = {
        ssp: OffsetRange(ends[ssp], end)
        for ssp, end in streams.upcoming(streams.partitions("orders")).items()
    }
    moved = [row | {"id": row["id"] + 100} for row in rows]
    assert found(streams.read(spark, later).select(*schema.names).toArrow()) == moved


@pytest.mark.spark
@pytest.mark.server
def test_a_created_topic_has_nested_columns_and_a_simple_key(
    spark: SparkSession, kafka: KafkaServer, lake: Lake
) -> None:
    prefix = f"{kafka.new_topic(1)}-"
    streams = KafkaStreams(lake, KafkaSettings("kafka", kafka.bootstrap, prefix=prefix))
    streams.create("orders", schema=ORDERS, partitions=1, key=("id",))
    table = fit_to_schema(to_arrow_table(ROWS, "rows", ORDERS), ORDERS, "rows")
    streams.append("orders", table, producer="here", sequence=1)
    ends = streams.upcoming(streams.partitions("orders"))
    frame = streams.read(spark, {ssp: OffsetRange("0", end) for ssp, end in ends.items()})
    assert found(frame.select(*ORDERS.names).toArrow()) == ROWS
    with pytest.raises((ConfigurationError, SchemaMismatchError)) as caught:
        streams.create("wrong", schema=ORDERS, partitions=1, key=("customer",))
    assert "customer" in str(caught.value)


def found(records: pa.Table) -> list[dict[str, Any]]:
    """Return the records in the order of their ids."""
    rows = records.to_pylist(maps_as_pydicts="strict")
    return sorted(rows, key=lambda row: row["id"])
