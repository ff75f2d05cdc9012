"""Envelopes in Avro, written by fastavro: with one schema, and with Confluent's ids."""

from __future__ import annotations

import datetime as dt
import io
import json
import math
import random
import struct
from decimal import Decimal
from typing import Any

import pytest
from fastavro import parse_schema, schemaless_writer

from dagster_adjunct.assets.declaration.envelope_parser import read_transactions
from dagster_adjunct.assets.declaration.envelope_values import avro_readers, json_from_avro
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.changes.changing import Change, dataset, decoded, stream
from tests.assets.conftest import World


def schema(*extra: dict[str, Any]) -> dict[str, Any]:
    row = {
        "type": "record",
        "name": "Value",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "name", "type": ["null", "string"], "default": None},
            {
                "name": "price",
                "type": [
                    "null",
                    {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2},
                ],
                "default": None,
            },
            {
                "name": "at",
                "type": [
                    "null",
                    {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"},
                ],
                "default": None,
            },
            {
                "name": "day",
                "type": ["null", {"type": "int", "logicalType": "date"}],
                "default": None,
            },
            {"name": "data", "type": ["null", "bytes"], "default": None},
            *extra,
        ],
    }
    source = {
        "type": "record",
        "name": "Source",
        "fields": [{"name": "lsn", "type": ["null", "long"]}],
    }
    transaction = {
        "type": "record",
        "name": "Block",
        "fields": [
            {"name": "id", "type": "string"},
            {"name": "data_collection_order", "type": "long"},
        ],
    }
    return {
        "type": "record",
        "name": "Envelope",
        "namespace": "shop.public.items",
        "fields": [
            {"name": "before", "type": ["null", row], "default": None},
            {"name": "after", "type": ["null", "Value"], "default": None},
            {"name": "source", "type": source},
            {"name": "op", "type": "string"},
            {"name": "transaction", "type": ["null", transaction], "default": None},
        ],
    }


SCHEMA = json.dumps(schema())
COLUMNS = "id BIGINT, name STRING, price DECIMAL(10,2), at TIMESTAMP, day DATE, data BINARY"
ANVIL = {
    "id": 1,
    "name": "anvil ✓",
    "price": Decimal("-12.50"),
    "at": 1577881800123456,
    "day": 18262,
    "data": b"\x00\xff",
}
BARE = {"id": 1, "name": None, "price": None, "at": None, "day": None, "data": None}
BINARY = Schema.of(value="binary")


def written(
    text: str, op: str, before: Any, after: Any, lsn: int, transaction: Any = None
) -> bytes:
    out = io.BytesIO()
    value = {
        "before": before,
        "after": after,
        "source": {"lsn": lsn},
        "op": op,
        "transaction": transaction,
    }
    schemaless_writer(out, parse_schema(json.loads(text)), value)
    return out.getvalue()


def test_rows_in_avro_are_rows_as_in_json(sparkling: World) -> None:
    values = [
        (written(SCHEMA, "c", None, ANVIL, 10), False),
        (written(SCHEMA, "u", ANVIL, {**ANVIL, "id": 2}, 11), False),
        (written(SCHEMA, "d", {**BARE, "id": 2}, None, 12), False),
        (None, True),
        (b"\x00\x01nonsense", False),
        (written(SCHEMA, "c", None, ANVIL, 13) + b"!", False),
        (b"", False),
        (None, False),
    ]
    stream(sparkling, BINARY, values)
    form = DebeziumEnvelope(COLUMNS, format="avro", avro_schema=SCHEMA, timestamps="micros")
    changes = decoded(sparkling, dataset(changes=form, order_by="source.lsn"))
    at = dt.datetime(2020, 1, 1, 12, 30, 0, 123456, tzinfo=dt.UTC).astimezone().replace(tzinfo=None)
    anvil = (1, "anvil ✓", Decimal("-12.50"), at, dt.date(2020, 1, 1), bytearray(b"\x00\xff"))
    assert changes[:4] == [
        Change(0, anvil, False, 10, None),
        Change(1, (1, *[None] * 5), True, 11, None),
        Change(1, (2, *anvil[1:]), False, 11, None),
        Change(2, (2, *[None] * 5), True, 12, None),
    ]
    reported = {change.offset: str(change.problem) for change in changes[4:]}
    assert sorted(reported) == [4, 5, 6, 7]
    assert all(
        reported[offset].startswith("not Avro of the declared schema: ") for offset in (4, 5, 6)
    )
    assert "1 bytes are left over" in reported[5]
    assert reported[7] == "not a Debezium envelope: the value is null"


def test_numbers_that_json_has_not_are_read_from_avro(sparkling: World) -> None:
    newer = json.dumps(schema({"name": "ratio", "type": "double"}))
    values = [
        written(newer, "c", None, {**ANVIL, "ratio": ratio}, 1)
        for ratio in (math.inf, math.nan, 1e39)
    ]
    stream(sparkling, BINARY, [(value,) for value in values])
    form = DebeziumEnvelope("id BIGINT, ratio DOUBLE", format="avro", avro_schema=newer)
    assert [str(change.row[1]) for change in decoded(sparkling, dataset(changes=form))] == [
        "inf",
        "nan",
        "1e+39",
    ]
    narrow = DebeziumEnvelope("id BIGINT, ratio FLOAT", format="avro", avro_schema=newer)
    read = [
        (str(change.row[1]), change.problem)
        for change in decoded(sparkling, dataset(changes=narrow))
    ]
    reported = "column 'ratio' is a number too large for float"
    assert read == [("inf", None), ("nan", None), ("None", reported)]


def test_values_with_a_schema_id_are_read_with_their_own_schema(sparkling: World) -> None:
    newer = json.dumps(schema({"name": "color", "type": "string", "default": "grey"}))

    def confluent(number: int, data: bytes) -> bytes:
        return struct.pack(">bI", 0, number) + data

    values = [
        confluent(7, written(SCHEMA, "c", None, ANVIL, 1)),
        confluent(41, written(newer, "c", None, {**ANVIL, "color": "red"}, 2)),
        confluent(8, written(SCHEMA, "c", None, ANVIL, 3)),
        written(SCHEMA, "d", ANVIL, None, 3),
    ]
    stream(sparkling, BINARY, [(value,) for value in values])
    form = DebeziumEnvelope(
        "id BIGINT, color STRING", format="avro", avro_schema={41: newer, 7: SCHEMA}
    )
    changes = decoded(sparkling, dataset(changes=form))
    assert [change.row for change in changes[:2]] == [(1, None), (1, "red")]
    assert changes[2].problem == "the Avro schema 8 is not declared: avro_schema has 7, 41"
    assert str(changes[3].problem).startswith("not Avro with a schema id: it begins with 02020212")


def test_transactions_are_known_of_avro_too(sparkling: World) -> None:
    blocks = [None, {"id": "5", "data_collection_order": 1}]
    stream(
        sparkling,
        BINARY,
        [(written(SCHEMA, "c", None, ANVIL, 1, block),) for block in blocks] + [(b"",)],
    )
    form = DebeziumEnvelope("id BIGINT", format="avro", avro_schema=SCHEMA)
    records = sparkling.streams.read(sparkling.spark(), sparkling.streams.all_ranges("changes"))
    rows = read_transactions(form, records, "it").collect()
    judged_rows = sorted(
        (row["__offset"], row["transaction"], row["number"], row["readable"]) for row in rows
    )
    assert judged_rows == [(0, None, None, True), (1, "5", "1", True), (2, None, None, False)]


def test_whatever_bytes_there_are_they_are_read_or_a_problem() -> None:
    by_id = avro_readers({None: SCHEMA}, "it")
    good = written(SCHEMA, "u", ANVIL, ANVIL, 9)
    chance = random.Random(7)
    for _ in range(5_000):
        data = bytearray(good[: chance.randrange(len(good) + 1)])
        for _ in range(chance.randrange(4)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        text, problem = json_from_avro(bytes(data), by_id)
        assert (text is None) != (problem is None)


def test_a_schema_that_is_none_is_refused_before_a_task_is_run(sparkling: World) -> None:
    stream(sparkling, BINARY, [(b"x",)])
    form = DebeziumEnvelope("id BIGINT", format="avro", avro_schema={7: '{"type": "recrd"}'})
    with pytest.raises(ConfigurationError) as caught:
        decoded(sparkling, dataset(changes=form))
    assert caught.value.argument == "avro_schema"


ANY_SCALE = {
    "type": "record",
    "name": "VariableScaleDecimal",
    "namespace": "io.debezium.data",
    "fields": [{"name": "scale", "type": "int"}, {"name": "value", "type": "bytes"}],
}


@pytest.mark.parametrize("scale", [-(2**31), -16_384, 16_384, 2**31 - 1])
def test_a_scale_that_no_database_has_is_a_problem_and_no_huge_text(scale: int) -> None:
    text = json.dumps(schema({"name": "total", "type": ANY_SCALE}))
    total = {"scale": scale, "value": b"\x01"}
    value = written(text, "c", None, {**ANVIL, "total": total}, 1)
    found = json_from_avro(value, avro_readers({None: text}, "it"))
    assert found.text is None
    assert f"a decimal has the scale {scale}" in str(found.problem)


def test_a_decimal_with_a_scale_of_its_own_is_exact_in_avro_too(sparkling: World) -> None:
    text = json.dumps(schema({"name": "total", "type": ANY_SCALE}))
    totals = [{"scale": 3, "value": b"\xff"}, {"scale": 0, "value": (10**37).to_bytes(16, "big")}]
    values = [written(text, "c", None, {**ANVIL, "total": total}, 1) for total in totals]
    stream(sparkling, BINARY, [(value,) for value in values])
    form = DebeziumEnvelope("id BIGINT, total DECIMAL(38,0)", format="avro", avro_schema=text)
    rounded, exact = decoded(sparkling, dataset(changes=form))
    assert exact.row == (1, Decimal(10**37))
    assert rounded.problem == "column 'total' is '-0.001', declared decimal(38,0)"
