"""Bytes of Kafka's messages become typed columns exactly, or not at all; and back."""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import math
import pickle
import string
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.avro import avro_converter
from dagster_adjunct.resources.schemas.parsed_columns import Unfit
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.streams.kafka.avro import Avro
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings, TopicFacts
from dagster_adjunct.resources.streams.kafka.formats import Json, KeyText, Raw, Text
from dagster_adjunct.resources.streams.kafka.produce import _record_times as sent_times
from dagster_adjunct.resources.streams.kafka.protobuf import Protobuf
from dagster_adjunct.resources.streams.kafka.record_formats import (
    KafkaTopic,
    create_decoder,
    encode_table,
)
from dagster_adjunct.resources.streams.kafka.source import _timestamps
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams
from dagster_adjunct.resources.streams.system import OffsetRange
from tests.resources.streams.kafka.messages import (
    FIRST,
    STREAM,
    avro_schema,
    batch_of,
    descriptor_set,
    message_class,
    read,
    written,
)  # fmt: skip
from tests.servers.kafka import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UTC = dt.UTC
EVERY_TYPE = Schema.of(
    tailnum="string",
    on="boolean",
    tiny="tinyint",
    small="smallint",
    seats="int",
    big="bigint",
    ratio="float",
    lat="double",
    price="decimal(12,2)",
    day="date",
    at="timestamp",
    raw="binary",
)
ROW = {
    "tailnum": "N1é",
    "on": True,
    "tiny": -128,
    "small": 32767,
    "seats": -5,
    "big": 2**63 - 1,
    "ratio": 0.5,
    "lat": 1e-300,
    "price": Decimal("-9999999999.99"),
    "day": dt.date(2024, 2, 29),
    "at": dt.datetime(2024, 1, 1, 8, 30, 0, 5, tzinfo=UTC),
    "raw": b"\0\xff",
}
JSON = KafkaTopic(value=Json(EVERY_TYPE))
TIMES: list[Any] = [
    ("day", ["null", {"type": "int", "logicalType": "date"}]),
    ("at", ["null", {"type": "long", "logicalType": "timestamp-micros"}]),
]
NOTHING = dict.fromkeys(EVERY_TYPE.names)


# -- JSON


def test_a_json_object_becomes_columns_of_the_declared_types() -> None:
    text = """{"tailnum":"N1\\u00e9","on":true,"tiny":-128,"small":32767,"seats":-5,"big":9223372036854775807,
        "ratio":0.5,"lat":1e-300,"price":-9999999999.99,"day":"2024-02-29","at":"2024-01-01T10:00:00.000005+01:30",
        "raw":"AP8=","another":[1,{"x":2}]}"""
    assert read(JSON, text.encode(), b"{}", b'{"seats":null}') == [ROW, NOTHING, NOTHING]


def test_objects_and_lists_are_json_text_in_a_string_column() -> None:
    topic = KafkaTopic(value=Json("plane STRING, legs STRING"))
    records = read(topic, '{"plane":{"tail": "é", "seats":[1, null]},"legs":[]}'.encode())
    assert records == [{"plane": '{"tail":"é","seats":[1,null]}', "legs": "[]"}]


def test_a_column_may_have_another_name_than_its_field() -> None:
    topic = KafkaTopic(
        value=Json("id INT, deleted STRING, was INT", names={"deleted": "__deleted", "was": "id2"})
    )
    message = b'{"id":1,"__deleted":"true","id2":2}'
    assert read(topic, message, b'{"deleted":"no"}') == [
        {"id": 1, "deleted": "true", "was": 2}, {"id": None, "deleted": None, "was": None},
    ]  # fmt: skip
    assert written(topic, {"id": 1, "deleted": "true", "was": 2})[0]["__value"] == message


@pytest.mark.parametrize(
    ("unit", "number"), [("millis", 1_704_096_000_123), ("micros", 1_704_096_000_123_000)]
)
def test_numbers_are_timestamps_where_it_is_declared_what_they_count(
    unit: Any, number: int
) -> None:
    topic = KafkaTopic(value=Json("at TIMESTAMP", timestamps=unit))
    message = json.dumps({"at": number}).encode()
    at = dt.datetime(2024, 1, 1, 8, 0, 0, 123_000, tzinfo=UTC)
    assert read(topic, message) == [{"at": at}]
    assert json.loads(written(topic, {"at": at})[0]["__value"]) == {"at": number}


BAD_JSON = {
    "a text for a number": b'{"seats":"3"}',
    "a number too large for int": b'{"seats":2147483648}',
    "a number too large for bigint": b'{"big":9223372036854775808}',
    "a number too small for tinyint": b'{"tiny":-129}',
    "a fraction for an int": b'{"seats":1.0}',
    "a boolean for a number": b'{"seats":true}',
    "a number for a boolean": b'{"on":1}',
    "a number for a text": b'{"tailnum":5}',
    "a boolean for a text": b'{"tailnum":false}',
    "a double too large": b'{"lat":1e400}',
    "a float too large": b'{"ratio":1e39}',
    "NaN": b'{"lat":NaN}',
    "Infinity": b'{"lat":-Infinity}',
    "NaN in a field that is not declared": b'{"other":NaN}',
    "a decimal that would be rounded": b'{"price":1.234}',
    "a decimal too large": b'{"price":10000000000}',
    "a decimal that is no number": b'{"price":"1,5"}',
    "a timestamp without a zone": b'{"at":"2024-01-01T00:00:00"}',
    "a timestamp as a number": b'{"at":1704096000123}',
    "a timestamp that would be cut": b'{"at":"2024-01-01T00:00:00.1234567Z"}',
    "a day that is none": b'{"day":"2023-02-29"}',
    "a day with a time": b'{"day":"2024-01-01T00:00:00Z"}',
    "no base64": b'{"raw":"%%%%"}',
    "half a surrogate": b'{"tailnum":"\\ud800"}',
    "a truncated object": b'{"tailnum":"N1"',
    "two objects": b'{"tailnum":"N1"}{"tailnum":"N2"}',
    "a list": b'[{"tailnum":"N1"}]',
    "a text": b'"N1"',
    "null": b"null",
    "nothing": b"",
    "not UTF-8": b'{"tailnum":"\xff"}',
    "UTF-16": '{"tailnum":"N1"}'.encode("utf-16"),
    "too deep": b'{"a":' + b"[" * 200_000,
    "Avro's magic byte": b"\0\0\0\0\1{}",
}


@pytest.mark.parametrize("message", BAD_JSON.values(), ids=BAD_JSON.keys())
def test_a_json_message_that_does_not_fit_is_refused_or_kept_whole(message: bytes) -> None:
    good = b'{"tailnum":"N1","on":false,"seats":7,"lat":2.5}'
    with pytest.raises(
        SchemaMismatchError, match=rf"{STREAM}\.3: the value of the message at offset {FIRST + 1} "
    ) as caught:
        read(JSON, good, message)
    if len(message) > 5:
        assert message.decode(errors="replace") not in str(caught.value)
    keeping = KafkaTopic(value=Json(EVERY_TYPE, malformed="bad"))
    first, second = read(keeping, good, message)
    assert first == NOTHING | {"tailnum": "N1", "on": False, "seats": 7, "lat": 2.5, "bad": None}
    assert second == NOTHING | {"bad": message}


@pytest.mark.parametrize(
    "columns", ["lat DOUBLE", "lat DOUBLE, ratio FLOAT", "lat DOUBLE, price DECIMAL(5,2)"]
)
@pytest.mark.parametrize("number", ["1e400", "-1e400", "1.7976931348623159e308", "9" * 400])
def test_a_number_is_not_taken_for_an_infinity(columns: str, number: str) -> None:
    topic = KafkaTopic(value=Json(columns))  # numbers are read in another way beside some types
    with pytest.raises(SchemaMismatchError, match="declared double"):
        read(topic, b'{"lat":2.5}', f'{{"lat":{number}}}'.encode())
    assert read(topic, b'{"lat":1.7976931348623157e308}')[0]["lat"] == 1.7976931348623157e308


def test_a_column_may_have_the_name_of_the_rule_for_malformed_messages() -> None:
    topic = KafkaTopic(value=Json("fail INT"))
    sent = encode_table(pa.table({"fail": pa.array([7], pa.int32())}), topic, STREAM)
    assert sent.column("__value").to_pylist() == [b'{"fail":7}']


def test_an_error_shows_at_most_60_characters_of_a_message() -> None:
    with pytest.raises(SchemaMismatchError, match="column 'seats' is a number of 500 digits"):
        read(KafkaTopic(value=Json("seats INT")), b'{"seats":' + b"7" * 500 + b"}")
    secret = string.ascii_letters * 20
    with pytest.raises(SchemaMismatchError) as caught:
        read(KafkaTopic(value=Json("seats INT")), json.dumps({"seats": secret}).encode())
    assert secret[:20] in str(caught.value)
    assert secret[:60] not in str(caught.value)


_TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
_ROWS = st.fixed_dictionaries(
    {
        "tailnum": _TEXTS, "on": st.booleans(), "tiny": st.integers(-128, 127),
        "small": st.integers(-(2**15), 2**15 - 1),
        "seats": st.integers(-(2**31), 2**31 - 1), "big": st.integers(-(2**63), 2**63 - 1),
        "ratio": st.floats(allow_nan=False, allow_infinity=False, width=32),
        "lat": st.floats(allow_nan=False, allow_infinity=False),
        "price": st.decimals(-(10**9), 10**9, places=2), "day": st.dates(),
        "at": st.datetimes(timezones=st.just(UTC)), "raw": st.binary(max_size=9),
    }
)  # fmt: skip
_SPARSE = st.lists(
    st.tuples(_ROWS, st.sets(st.sampled_from(EVERY_TYPE.names))), min_size=1, max_size=5
)


@pytest.mark.lengthy
@settings(max_examples=60)
@given(_SPARSE)
def test_what_is_written_as_json_is_read_as_it_was(
    made: list[tuple[dict[str, Any], set[str]]],
) -> None:
    rows = [row | dict.fromkeys(nulls) for row, nulls in made]
    messages = [record["__value"] for record in written(JSON, *rows)]
    assert read(JSON, *messages) == rows
    for row, message in zip(rows, messages, strict=True):  # another reader's view
        decoded = json.loads(message, parse_float=Decimal)
        assert decoded.keys() == row.keys()
        assert decoded["price"] == row["price"]
        assert decoded["tailnum"] == row["tailnum"]
        assert decoded["raw"] == (
            None if row["raw"] is None else base64.b64encode(row["raw"]).decode()
        )
        assert decoded["at"] is None or dt.datetime.fromisoformat(decoded["at"]) == row["at"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_json_has_no_form_for_is_not_written(value: float) -> None:
    with pytest.raises(SchemaMismatchError) as failure:
        written(JSON, NOTHING | {"lat": value})
    assert failure.value.facts == {"column": "lat"}


# -- keys, tombstones, headers


def test_a_tombstone_has_its_key_and_nothing_else() -> None:
    topic = KafkaTopic(value=Json("tailnum STRING, seats INT"), key=KeyText("tailnum"))
    given = [b'{"tailnum":"N1","seats":3}', None, b'{"seats":4}']
    batch = create_decoder(topic, STREAM)(batch_of(given, keys=[b"other", b"N2", b"N3"]))
    # the value wins, where there is one
    assert batch.column("tailnum").to_pylist() == ["N1", "N2", None]
    assert batch.column("seats").to_pylist() == [3, None, 4]
    assert batch.column("__tombstone").to_pylist() == [False, True, False]


def test_key_columns_that_the_value_lacks_come_from_every_key() -> None:
    topic = KafkaTopic(
        value=Json("seats INT"), key=KeyText("origin STRING, hour TIMESTAMP, no BIGINT")
    )
    assert topic.schema().names == ("origin", "hour", "no", "seats")
    keys = [b'["EWR","2024-01-01T05:00:00Z","7"]', None, b'["J\xc3\xa9",null,"-1"]']
    assert read(topic, b'{"seats":1}', b'{"seats":2}', None, keys=keys) == [
        {"origin": "EWR", "hour": dt.datetime(2024, 1, 1, 5, tzinfo=UTC), "no": 7, "seats": 1},
        {"origin": None, "hour": None, "no": None, "seats": 2},
        {"origin": "Jé", "hour": None, "no": -1, "seats": None},
    ]


@pytest.mark.parametrize(
    "key", [b"\xff", b"7.0", b"", b"x", b"9223372036854775808", "٣".encode(), b"0x7", b"1_0"]
)
def test_a_key_that_can_not_be_read_is_refused_by_name(key: bytes) -> None:
    topic = KafkaTopic(value=Json("seats INT"), key=KeyText("no BIGINT"))
    with pytest.raises(
        SchemaMismatchError, match=rf"{STREAM}\.3: the key of the message at offset {FIRST} "
    ):
        read(topic, b"{}", keys=[key])
    keeping = KafkaTopic(value=Json("seats INT"), key=KeyText("no BIGINT", malformed="bad_key"))
    assert read(keeping, b'{"seats":1}', keys=[key]) == [
        {"no": None, "seats": None, "bad_key": key}
    ]


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(_TEXTS, st.datetimes(timezones=st.just(UTC)), st.binary(max_size=5)),
        min_size=1,
        max_size=4,
    )
)
def test_keys_of_several_columns_are_read_as_they_were_written(
    keys: list[tuple[str, dt.datetime, bytes]],
) -> None:
    topic = KafkaTopic(value=Json("seats INT"), key=KeyText("a STRING, b TIMESTAMP, c BINARY"))
    rows = [dict(zip("abc", key, strict=True)) | {"seats": 1} for key in keys]
    messages = written(topic, *rows)
    assert (
        read(topic, *(m["__value"] for m in messages), keys=[m["__key"] for m in messages]) == rows
    )


@pytest.mark.parametrize(
    "text", ["2024-01-01T05:00:00+01:70", "2024-01-0\u0661T05:00:00Z", "20240101T050000Z"]
)
def test_a_time_in_another_form_is_malformed_in_keys_and_values(text: str) -> None:
    for topic, message, key in (
        (KafkaTopic(value=Json("seats INT"), key=KeyText("hour TIMESTAMP")), b"{}", text.encode()),
        (KafkaTopic(value=Json("hour TIMESTAMP")), json.dumps({"hour": text}).encode(), b""),
    ):
        with pytest.raises(SchemaMismatchError):
            read(topic, message, keys=[key])


def test_one_key_column_is_its_plain_text() -> None:
    topic = KafkaTopic(value=Json("id BIGINT, seats INT"), key=KeyText("id BIGINT"))
    messages = written(
        topic,
        {"id": 7, "seats": 1},
        {"id": 8, "seats": None},
        {"id": None, "seats": 2},
        tombstones=[False, True, False],
    )
    assert [(m["__key"], m["__value"]) for m in messages] == [
        (b"7", b'{"id":7,"seats":1}'), (b"8", None), (None, b'{"id":null,"seats":2}'),
    ]  # fmt: skip


def test_a_key_may_be_of_any_format() -> None:
    topic = KafkaTopic(value=Raw(), key=Json("id INT"))
    assert topic.schema().ddl() == "`id` INT, `value` BINARY"
    assert read(topic, b"\0", keys=[b'{"id":3}']) == [{"id": 3, "value": b"\0"}]


def test_raw_messages_are_their_bytes() -> None:
    topic = KafkaTopic()
    assert topic.schema().ddl() == "`key` BINARY, `value` BINARY"
    assert read(topic, b"\xff", None, b"", keys=[None, b"k", b""]) == [
        {"key": None, "value": b"\xff"}, {"key": b"k", "value": None}, {"key": b"", "value": b""},
    ]  # fmt: skip


def test_a_message_may_be_kept_as_its_text() -> None:
    topic = KafkaTopic(value=Text("envelope"), key=Json("id INT"))
    text = '{"op":"c","é":1.10}'
    record = {"id": 1, "envelope": text}
    assert read(topic, text.encode(), None, keys=[b'{"id":1}'] * 2) == [
        record,
        {"id": 1, "envelope": None},
    ]
    assert written(topic, record)[0] == {"__key": b'{"id":1}', "__value": text.encode()}
    with pytest.raises(SchemaMismatchError, match="can't be read as text: not UTF-8 at byte 1"):
        read(topic, b"a\xff")
    with pytest.raises(SchemaMismatchError) as failure:
        written(topic, {"id": 1, "envelope": None})
    assert failure.value.facts == {"column": "envelope"}


def test_headers_become_a_column_and_are_headers_again() -> None:
    topic = KafkaTopic(value=Json("seats INT"), headers="said")
    headers = [[("a", b"\0"), ("a", None), ("é", b"")], []]
    rows = read(topic, b"{}", b"{}", headers=headers)
    assert [json.loads(row["said"]) for row in rows] == [
        [["a", "AA=="], ["a", None], ["é", ""]],
        [],
    ]
    again = [
        [(h["name"], h["value"]) for h in message["__headers"]] for message in written(topic, *rows)
    ]
    assert again == headers


@pytest.mark.parametrize(
    "text", ["[1]", '[[5, "AA=="]]', '[[null, "AA=="]]', '[["a", 5]]', '[["\\ud800", null]]']
)
def test_a_text_that_is_no_list_of_headers_is_refused_with_its_column(text: str) -> None:
    topic = KafkaTopic(value=Json("seats INT"), headers="said")
    with pytest.raises(SchemaMismatchError, match="not a list of headers") as failure:
        written(topic, {"seats": 1, "said": text})
    assert failure.value.facts == {"stream": "kafka.flights", "column": "said"}


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (
            lambda: KafkaTopic(value=Json("id INT"), key=KeyText("id BIGINT")).schema(),
            "'id' is bigint in the key",
        ),
        (lambda: Json("id INT", malformed="id"), "occur twice"),
        (lambda: Json("id INT", malformed=""), "malformed='' is not a column name"),
        (lambda: Json("id INT", timestamps="days"), "expected 'millis' or 'micros'"),  # type: ignore[arg-type]
        (lambda: Json("id INT", names={"no": "id"}), "has no column 'no'"),
        (lambda: Json("id INT, no INT", names={"no": "id"}), "two columns for the field 'id'"),
        (lambda: Text("value", malformed="value"), "occur twice"),
        (lambda: KeyText("a DOUBLE"), "have several text forms"),
        (lambda: Raw(malformed="bad"), "never malformed"),
        (lambda: Avro("{"), "an invalid schema"),
        (lambda: Avro('{"type":"recor"}'), "an invalid schema"),
        (lambda: Avro('"string"'), "not a record"),
        (lambda: Protobuf(b"\xff", "air.Flight"), "no usable message"),
        (lambda: Protobuf(descriptor_set(), "air.Nothing"), "no usable message 'air.Nothing'"),
        (lambda: Protobuf("nowhere.desc", "air.Flight"), "nowhere.desc can't be read"),
    ],
)
def test_a_declaration_that_can_not_hold_is_refused(declare: Any, message: str) -> None:
    with pytest.raises((ConfigurationError, SchemaMismatchError), match=message):
        declare()


def test_records_of_other_columns_are_not_written() -> None:
    import pyarrow as pa

    from dagster_adjunct.resources.streams.kafka.record_formats import encode_table

    topic = KafkaTopic(value=Json("id BIGINT"))
    assert encode_table(pa.table({"id": pa.array([1], pa.int32())}), topic, STREAM).column(
        "__value"
    ).to_pylist() == [b'{"id":1}']
    for column, table in (
        ("id", pa.table({"no": [1]})),
        ("no", pa.table({"id": [1], "no": [1]})),
        ("id", pa.table({"id": ["1"]})),
    ):
        with pytest.raises(SchemaMismatchError) as caught:
            encode_table(table, topic, STREAM)
        assert caught.value.column == column
    assert encode_table(pa.table({"id": pa.array([], pa.int64())}), topic, STREAM).num_rows == 0


# -- Avro

LOGICAL = avro_schema(
    ("tailnum", "string"),
    ("seats", ["null", "int"]),
    ("at", {"type": "long", "logicalType": "timestamp-millis"}),
    ("precise", ["null", {"type": "long", "logicalType": "timestamp-micros"}]),
    ("day", {"type": "int", "logicalType": "date"}),
    ("price", {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}),
    ("id", {"type": "string", "logicalType": "uuid"}),
    ("status", {"type": "enum", "name": "Status", "symbols": ["LATE", "EARLY"]}),
    ("before", ["null", "Status"]),
    ("time", {"type": "int", "logicalType": "time-millis"}),
    ("hash", {"type": "fixed", "name": "Four", "size": 4}),
    ("plane", {"type": "record", "name": "Plane", "fields": [{"name": "raw", "type": "bytes"},
        {"name": "made", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]}]}),
    ("legs", {"type": "array", "items": "int"}),
    ("tags", {"type": "map", "values": "string"}),
    ("any", ["null", "string", "long"]),
    ("ratio", "float"),
    ("lat", "double"),
)  # fmt: skip
FLIGHT = {
    "tailnum": "N1é",
    "seats": None,
    "at": dt.datetime(2024, 1, 1, 1, 2, 3, 456_000, tzinfo=UTC),
    "precise": dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    "day": dt.date(1900, 1, 1),
    "price": Decimal("-1.20"),
    "id": UUID(int=7),
    "status": "LATE",
    "before": "EARLY",
    "time": dt.time(1, 2, 3),
    "hash": b"\0\1\2\3",
    "plane": {"raw": b"\0", "made": None},
    "legs": [1, -2],
    "tags": {"é": "x"},
    "any": "text",
    "ratio": 0.5,
    "lat": math.inf,
}


def as_avro(schema: str, row: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(schema)), row)
    return out.getvalue()


def test_an_avro_record_becomes_columns_of_its_types() -> None:
    topic = KafkaTopic(value=Avro(LOGICAL))
    assert (
        topic.schema().ddl()
        == "`tailnum` STRING, `seats` INT, `at` TIMESTAMP, `precise` TIMESTAMP, `day` DATE, `price`"
        " DECIMAL(10,2), `id` STRING, `status` STRING, `before` STRING, `time` STRING, `hash`"
        " BINARY, `plane` struct<raw:binary,made:timestamp>, `legs` array<int>, `tags`"
        " map<string,string>, `any` STRING, `ratio` FLOAT, `lat` DOUBLE"
    )
    message = as_avro(LOGICAL, FLIGHT)
    records = read(topic, message, None)
    assert records[0] == FLIGHT | {
        "id": "00000000-0000-0000-0000-000000000007",
        "time": "01:02:03",
        "tags": [("é", "x")],
        "any": '"text"',
    }
    assert set(records[1].values()) == {None}
    assert written(topic, records[0])[0]["__value"] == message


@pytest.mark.parametrize("cut", [0, 1, 3, -1])
def test_avro_that_is_cut_is_refused(cut: int) -> None:
    topic = KafkaTopic(value=Avro(LOGICAL))
    with pytest.raises(SchemaMismatchError, match="not Avro of its schema"):
        read(topic, as_avro(LOGICAL, FLIGHT)[:cut])


@pytest.mark.parametrize(
    "message",
    [
        as_avro(LOGICAL, FLIGHT) + b"\0",
        b"\xff" * 50,
        b"{}",
        as_avro(avro_schema(("a", "int")), {"a": 1}),
    ],
)
def test_bytes_that_are_not_of_the_avro_schema_are_refused_or_kept(message: bytes) -> None:
    with pytest.raises(SchemaMismatchError, match="not Avro of its schema"):
        read(KafkaTopic(value=Avro(LOGICAL)), message)
    record = read(KafkaTopic(value=Avro(LOGICAL, malformed="bad")), message)[0]
    assert record.pop("bad") == message
    assert set(record.values()) == {None}


def test_text_in_avro_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(SchemaMismatchError, match="UnicodeDecodeError"):
        read(KafkaTopic(value=Avro(avro_schema(("a", "string")))), b"\x04\xff\xfe")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("tailnum", None, "column 'tailnum' is null in 1 records"),
        ("at", dt.datetime(2024, 1, 1, 0, 0, 0, 1, tzinfo=UTC), "column 'at' has microseconds"),
        ("plane", {"raw": None, "made": None}, r"column 'plane\.raw' is null in 1 records"),
        ("legs", [1, None], r"column 'legs\[\]' is null in 1 records"),
        ("tags", {"a": None}, r"column 'tags\[\*\]' is null in 1 records"),
        ("any", "text", "column 'any' has a text that is not JSON of its Avro type"),
        ("status", "GONE", "does not fit its Avro schema"),
        ("hash", b"\0", "does not fit its Avro schema"),
        ("time", "noon", "column 'time' has a text that is not an ISO time-millis[.]"),
        (
            "time",
            "01:02:03.000004",
            "column 'time' .* not an ISO time-millis: .* digits below a millisecond",
        ),
        (
            "time",
            "01:02:03+01:00",
            "column 'time' .* not an ISO time-millis: a time-millis has no time zone",
        ),
    ],
)
def test_a_value_that_avro_would_change_or_refuse_is_not_written(
    column: str, value: Any, message: str
) -> None:
    topic = KafkaTopic(value=Avro(LOGICAL))
    row = read(topic, as_avro(LOGICAL, FLIGHT))[0]
    with pytest.raises(SchemaMismatchError, match=message) as caught:
        written(topic, row | {column: value})
    assert caught.value.column in (column, None)


ALIKE = avro_schema(
    (
        "plane",
        {
            "type": "record",
            "name": "Plane",
            "fields": [
                {"name": "a", "type": {"type": "array", "items": "int"}},
                {"name": "A", "type": {"type": "map", "values": ["null", "string"]}},
                {"name": "raw", "type": "bytes"},
                {"name": "made", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
            ],
        },
    )
)  # fmt: skip


def test_a_record_that_can_not_be_a_struct_is_json_text() -> None:
    topic = KafkaTopic(value=Avro(ALIKE))
    assert topic.schema().ddl() == "`plane` STRING"
    text = '{"a":[1,-2],"A":{"x":null},"raw":"AA==","made":"2024-01-01T00:00:00+00:00"}'
    assert read(topic, written(topic, {"plane": text})[0]["__value"]) == [{"plane": text}]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"raw": "%"}, "column 'plane' has a text that is not JSON of its Avro type"),
        ({"a": [1.5]}, "expected int, found float"),
        ({"a": [True]}, "expected int, found bool"),
        ({"a": {"1": 2}}, "expected array, found dict"),
        ({"a": [2**31]}, "a number out of the range of int"),
        ({"a": [None]}, "expected int, found NoneType"),
        ({"A": [["a", "x"]]}, "expected map, found list"),
        ({"A": {"a": 1}}, "expected string, found int"),
        ({"made": "2024-01-01T00:00:00"}, "a timestamp-micros needs a time zone"),
    ],
)
def test_json_text_that_avro_would_change_is_not_written(
    changed: dict[str, Any], message: str
) -> None:
    plane = {"a": [], "A": {}, "raw": "AA==", "made": None} | changed
    with pytest.raises(SchemaMismatchError, match=message) as caught:
        written(KafkaTopic(value=Avro(ALIKE)), {"plane": json.dumps(plane)})
    assert caught.value.column == "plane"


def test_a_text_of_a_logical_type_of_ones_own_stays_text() -> None:
    email = {"type": "string", "logicalType": "email"}
    topic = KafkaTopic(value=Avro(avro_schema(("a", {"type": "array", "items": email}))))
    assert read(topic, written(topic, {"a": ["x@y"]})[0]["__value"])[0] == {"a": ["x@y"]}


def test_a_local_time_is_not_taken_for_one_of_a_zone() -> None:
    convert = avro_converter({"type": "long", "logicalType": "timestamp-micros"})
    assert convert is not None
    assert convert(dt.datetime(2024, 1, 1, tzinfo=UTC)) == dt.datetime(2024, 1, 1, tzinfo=UTC)
    with pytest.raises(Unfit, match="without a zone"):  # a writer's local-timestamp-micros
        convert(dt.datetime(2024, 1, 1))


def test_a_decimal_that_was_written_as_bytes_is_exact() -> None:
    convert = avro_converter(
        {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}
    )
    assert convert is not None
    unscaled = 10**38 - 1
    expected = Decimal("9" * 36 + ".99")
    assert convert(unscaled.to_bytes(16, "big", signed=True)) == expected
    with pytest.raises(Unfit, match="38 digits"):
        convert((unscaled + 1).to_bytes(17, "big", signed=True))


@pytest.mark.parametrize(
    "format", [Json("k STRING, day DATE, at TIMESTAMP"), Avro(avro_schema(("k", "string"), *TIMES))]
)
@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("day", pa.array([2_932_897], pa.int32()).cast(pa.date32())),
        ("at", pa.array([253_402_300_800_000_000], pa.int64()).cast(pa.timestamp("us", "UTC"))),
        ("at", pa.array([10**13], pa.timestamp("s", "UTC"))),
        ("k", pa.array([b"\xff"], pa.binary()).view(pa.string())),
    ],
)
def test_values_that_python_does_not_have_are_not_written(
    format: Any, column: str, values: pa.Array
) -> None:
    good = {
        "k": pa.array(["a"]),
        "day": pa.array([None], pa.date32()),
        "at": pa.array([None], values.type),
    }
    good["at"] = pa.array([None], pa.timestamp("us", "UTC"))
    table = pa.table(good | {column: values})
    with pytest.raises(SchemaMismatchError) as caught:
        encode_table(table, KafkaTopic(value=format), STREAM)
    assert (caught.value.stream, caught.value.column) == (STREAM, column)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_records_own_time_is_one_that_kafka_keeps_in_any_unit(unit: Any) -> None:
    target = TopicFacts(KafkaSettings("kafka", "nowhere:1"), "s", "s", "i", 1)
    second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]

    def times(*counts: int | None) -> list[int]:
        column = pa.array(counts, pa.timestamp(unit, "UTC"))
        return list(sent_times(pa.RecordBatch.from_pydict({"__timestamp": column}), target))

    assert times(second, None, 5 * second) == [1000, 0, 5000]
    late = [] if unit == "ns" else [253_402_300_800 * second, 2**62]
    for count in (-second, 0, *late):
        with pytest.raises(SchemaMismatchError) as caught:
            times(second, count)
        assert caught.value.stream == str(target)
    if unit == "ns":
        assert times(second + 1) == [1000], "Kafka keeps milliseconds"


def test_a_messages_time_after_the_year_9999_is_none() -> None:
    assert _timestamps([-1, 0, 253_402_300_799_999, 253_402_300_800_000, 2**62]).to_pylist() == [
        None,
        dt.datetime(1970, 1, 1, tzinfo=UTC),
        dt.datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC),
        None,
        None,
    ]


# -- Protobuf

PROTOBUF = KafkaTopic(value=Protobuf(descriptor_set(), "air.Flight"))


def _flight() -> Any:
    flight = message_class("air.Flight")(
        tailnum="N1é",
        number=-3,
        delay=0,
        id=2**64 - 1,
        status=1,
        legs=[1, 2**60],
        raw=b"\xff",
        lat=-0.5,
        on=True,
        debt=-(2**63),
        ratio=0.25,
        gate=2**32 - 1,
        seats={"a": 1},
    )
    flight.at.FromDatetime(dt.datetime(2024, 1, 1, 0, 0, 0, 5))
    flight.weight.value = 0
    flight.plane.tailnum = "N2"
    flight.spare.add().tailnum = "N3"
    return flight


def test_a_protobuf_message_becomes_columns_of_its_fields() -> None:
    assert (
        PROTOBUF.schema().ddl()
        == "`tailnum` STRING, `number` INT, `delay` INT, `id` DECIMAL(20,0), `status` STRING, `at`"
        " TIMESTAMP, `weight` BIGINT, `plane` struct<tailnum:string>, `legs` array<bigint>,"
        " `spare` array<struct<tailnum:string>>, `raw` BINARY, `lat` DOUBLE, `on` BOOLEAN, `seats`"
        " map<string,int>, `debt` BIGINT, `ratio` FLOAT, `gate` BIGINT"
    )
    row = {
        "tailnum": "N1é",
        "number": -3,
        "delay": 0,
        "id": Decimal(2**64 - 1),
        "status": "LATE",
        "at": dt.datetime(2024, 1, 1, 0, 0, 0, 5, tzinfo=UTC),
        "weight": 0,
        "plane": {"tailnum": "N2"},
        "legs": [1, 1152921504606846976],
        "spare": [{"tailnum": "N3"}],
        "raw": b"\xff",
        "lat": -0.5,
        "on": True,
        "seats": [("a", 1)],
        "debt": -(2**63),
        "ratio": 0.25,
        "gate": 2**32 - 1,
    }
    empty = {
        "tailnum": "",
        "number": 0,
        "delay": None,
        "id": Decimal(0),
        "status": "UNKNOWN",
        "at": None,
        "weight": None,
        "plane": None,
        "legs": [],
        "spare": [],
        "raw": b"",
        "lat": 0.0,
        "on": False,
        "seats": [],
        "debt": 0,
        "ratio": 0.0,
        "gate": 0,
    }
    assert read(PROTOBUF, _flight().SerializeToString(), b"", None) == [
        row,
        empty,
        dict.fromkeys(row),
    ]
    messages = [
        message_class("air.Flight").FromString(m["__value"]) for m in written(PROTOBUF, row, empty)
    ]
    assert messages == [_flight(), message_class("air.Flight")()]


def test_a_protobuf_enum_that_is_not_declared_is_its_number() -> None:
    flight = message_class("air.Flight")(status=7)
    row = read(PROTOBUF, flight.SerializeToString())[0]
    assert row["status"] == "7"
    assert message_class("air.Flight").FromString(written(PROTOBUF, row)[0]["__value"]).status == 7


BAD_PROTOBUF = {
    "cut": _flight().SerializeToString()[:-3],
    "noise": b"\xff\xff\xff",
    "text that is not UTF-8": b"\x0a\x02\xff\xfe",
    "a number where a text belongs": b"\x08\x01",
    "a text where a number belongs": b"\x12\x01x",
    "a time that there is not": b"\x32\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x10\x00"[:13],
}


@pytest.mark.parametrize("message", BAD_PROTOBUF.values(), ids=BAD_PROTOBUF.keys())
def test_bytes_that_are_not_the_protobuf_message_are_refused_or_kept(message: bytes) -> None:
    with pytest.raises(
        SchemaMismatchError, match=r"can't be read as Protobuf \(air.Flight\): not air.Flight"
    ):
        read(PROTOBUF, message)
    keeping = KafkaTopic(value=Protobuf(descriptor_set(), "air.Flight", malformed="bad"))
    record = read(keeping, message)[0]
    assert record.pop("bad") == message
    assert set(record.values()) == {None}


def test_protobuf_fields_of_a_newer_schema_are_left_out() -> None:
    newer = b"\x0a\x02N1" + b"\xc0\x3e\x07"  # field 1000 is a varint
    assert read(PROTOBUF, newer)[0]["tailnum"] == "N1"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("status", "GONE"),
        ("legs", [1, None]),
        ("spare", [None]),
        ("seats", {"a": None}),
        ("id", Decimal(-1)),
        ("gate", -1),
    ],
)
def test_a_value_that_the_protobuf_field_can_not_hold_is_not_written(
    column: str, value: Any
) -> None:
    row = read(PROTOBUF, b"")[0]
    with pytest.raises(SchemaMismatchError) as caught:
        written(PROTOBUF, row | {column: value})
    assert caught.value.column == column


def test_a_protobuf_declaration_reads_its_file_once_and_travels(tmp_path: Path) -> None:
    path = tmp_path / "air.desc"
    path.write_bytes(descriptor_set())
    declared = Protobuf(str(path), "air.Plane.Seat")
    path.unlink()
    there = pickle.loads(pickle.dumps(declared))
    assert there == declared
    assert there.columns().names == ("row",)
    assert len(repr(declared)) < 200


# -- through Spark and a real broker


@pytest.mark.spark
@pytest.mark.server
def test_a_format_goes_through_spark_and_a_broker(
    spark: SparkSession, kafka: KafkaServer, lake: Lake
) -> None:
    name = kafka.new_topic(2)
    topic = KafkaTopic(
        name, Protobuf(descriptor_set(), "air.Plane"), KeyText("tailnum"), "kafka-murmur2"
    )
    streams = KafkaStreams(lake, KafkaSettings("kafka", kafka.bootstrap, topics={"planes": topic}))
    rows = [(f"N{n}", n == 3) for n in range(20)]
    frame = spark.createDataFrame(rows, "tailnum STRING, __tombstone BOOLEAN")
    streams.append("planes", frame, producer="me", sequence=1)
    sent = kafka.producer()
    sent.produce(name, b"\xff\xff", "N4", partition=0)
    assert sent.flush(10) == 0
    ends = streams.upcoming(streams.partitions("planes"))
    first, bad = streams.partitions("planes")[0], int(ends[streams.partitions("planes")[0]]) - 1
    whole = {ssp: OffsetRange("0", end) for ssp, end in ends.items()}
    with pytest.raises(
        SchemaMismatchError, match=rf"kafka\.planes\.0: .* at offset {bad} "
    ) as caught:
        _collected(streams, spark, whole)
    assert "malformed=COLUMN" in caught.value.next_step
    collected = _collected(streams, spark, whole | {first: OffsetRange("0", str(bad))})
    assert sorted(collected, key=lambda row: int(row[0][1:])) == rows


def _collected(
    streams: KafkaStreams, spark: SparkSession, ranges: dict[Any, OffsetRange]
) -> list[tuple[str, bool]]:
    with translate_spark_errors():
        return [
            tuple(row)
            for row in streams.read(spark, ranges).select("tailnum", "__tombstone").collect()
        ]


CASES = [
    (b'{"id": 1, "Name": "x"}', "it has no field 'name', but 'Name' in another case"),
    (b'{"id": 1, "NAME": null}', "it has no field 'name', but 'NAME' in another case"),
    (b'{"ID": 1, "name": "x"}', "it has no field 'id', but 'ID' in another case"),
    (b'{"id": 1, "name": null, "Name": "x"}', None),
    (b'{"id": 1, "other": "\\"name\\": x"}', None),
    (b'{"id": 1}', None),
]


@pytest.mark.parametrize(("message", "reason"), CASES)
@pytest.mark.parametrize("columns", ["id INT, name STRING", "id INT, name STRING, day DATE"])
def test_a_field_in_another_case_is_malformed_and_no_null(
    message: bytes, reason: str | None, columns: str
) -> None:
    topic = KafkaTopic(value=Json(columns))
    good = b'{"id": 2, "name": "y"}'
    if reason is None:
        assert len(read(topic, good, message)) == 2
        return
    with pytest.raises(SchemaMismatchError) as caught:
        read(topic, good, message)
    assert reason in caught.value.problem
    kept = read(KafkaTopic(value=Json(columns, malformed="bad")), good, message)
    assert [row["bad"] for row in kept] == [None, message]
