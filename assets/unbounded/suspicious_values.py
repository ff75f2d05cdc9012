"""Warnings about the first changes of a table: values that fit the declared encodings, and look
like other ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.envelope_parser import TEXT, with_envelope_json
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope, MaxwellEnvelope
from dagster_adjunct.assets.sources.entries import (
    OpenedChanges,
    Ranges,
    derive_row_schema,
    describe_input,
)
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.schemas.schema import Field, Schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOKED_AT = 1_000
_MOST = 0.9
_PLAIN_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
_MONTH: dict[str | None, int] = {"millis": 31 * 86_400_000, "micros": 31 * 86_400_000_000}


def find_suspicious_values(
    source: OpenedChanges, ranges: Ranges, spark: Callable[[], SparkSession]
) -> tuple[str, ...]:
    """Return warnings about the first changes in these ranges; () for formats whose values have
    one encoding.

    Raises DatasetError if the schema that the messages contain contradicts the declaration.
    """
    form = source.spec.following.changes
    if not isinstance(form, DebeziumEnvelope | MaxwellEnvelope):
        return ()
    advance = source.system.advance
    compare = source.system.compare
    first_ranges = {}
    for ssp, (start, end) in ranges.items():
        limit = advance(ssp, start, _LOOKED_AT)
        if compare(limit, end) > 0:
            limit = end
        first_ranges[ssp] = (start, limit)
    records = source.read(spark(), first_ranges)
    records = with_envelope_json(form, records, describe_input(source.spec))
    texts = [row[0] for row in records.select(TEXT).limit(_LOOKED_AT).collect()]
    envelopes = list(_iterate_envelopes(texts))
    columns = derive_row_schema(source.spec, source.records)
    contradiction = find_contradiction(form, columns, envelopes)
    if contradiction is not None:
        raise DatasetError(
            f"dataset {source.spec.name!r}: {contradiction}.",
            "Correct the declaration; nothing was read by it.",
            dataset=source.spec.name,
        )
    return tuple(describe_suspicions(form, columns, list(_iterate_rows(envelopes))))


def _iterate_envelopes(texts: Sequence[str | None]) -> Iterator[dict[str, Any]]:
    """Yield the envelopes among these texts, which are JSON objects; other texts are left out."""
    for text in texts:
        try:
            envelope = json.loads(text or "")
        except (ValueError, RecursionError):
            continue
        if isinstance(envelope, dict):
            yield envelope


def _iterate_rows(envelopes: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows after the changes, of those changes that have one."""
    for envelope in envelopes:
        payload = envelope.get("payload") or envelope  # a message with its schema has a payload
        row = payload.get("after") if isinstance(payload, dict) else None
        if isinstance(row, dict):
            yield row


# What the names of Kafka Connect's types say about numbers.
_UNITS = {
    "org.apache.kafka.connect.data.Timestamp": "millis",
    "io.debezium.time.Timestamp": "millis",
    "io.debezium.time.MicroTimestamp": "micros",
    "io.debezium.time.NanoTimestamp": "nanos",
}
_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_YEAR = "io.debezium.time.Year"


def find_contradiction(
    form: DebeziumEnvelope | MaxwellEnvelope, columns: Schema, envelopes: Sequence[dict[str, Any]]
) -> str | None:
    """Return what a schema in the messages (`schemas.enable=true`) says against the declaration,
    None for nothing: by the declaration, all values of the column would be wrong.
    """
    if form.format != "json":
        return None
    for envelope in envelopes:
        sent = _read_sent_fields(envelope)
        for field in columns.fields:
            found = _compare_types(form, field, sent.get(field.name, {}))
            if found is not None:
                return f"by the schema in its messages, {field.name!r} {found}"
    return None


def _read_sent_fields(envelope: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields that the message's schema has for the row after the change, by name; {} for
    a message without its schema.
    """
    schema = envelope.get("schema")
    sides = schema.get("fields") if isinstance(schema, dict) else None
    for side in sides if isinstance(sides, list) else []:
        if isinstance(side, dict) and side.get("field") == "after":
            fields = side.get("fields")
            if isinstance(fields, list):
                return {
                    str(field.get("field")): field for field in fields if isinstance(field, dict)
                }
    return {}


def _compare_types(
    form: DebeziumEnvelope | MaxwellEnvelope, field: Field, sent: dict[str, Any]
) -> str | None:
    """Return how the `sent` schema of a field contradicts its declaration, None if it does not or
    is unknown ({}).
    """
    name = sent.get("name")
    if field.type == "timestamp" and name in _UNITS and _UNITS[name] != form.timestamps:
        return f"counts {_UNITS[name]} ({name}), and timestamps is {form.timestamps!r}"
    if field.type == "date" and name == _YEAR:
        return f"is a year ({name}), and it is declared as a date: declare it as int"
    if field.type.startswith("decimal") and name == _DECIMAL and form.decimals == "precise":
        parameters = sent.get("parameters")
        scale = parameters.get("scale") if isinstance(parameters, dict) else None
        declared = field.type.rstrip(")").split(",")[1]
        if scale is not None and str(scale) != declared:
            return f"has {scale} digits after the point, and it is declared as {field.type}"
    return None


def describe_suspicions(
    form: DebeziumEnvelope | MaxwellEnvelope, schema: Schema, rows: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """Yield a warning for each column whose values in these rows look like another encoding than
    the declared one.
    """
    precise = form.format == "json" and form.decimals == "precise"
    limit = _MONTH.get(form.timestamps, -1)  # without a unit, there are no numbers to compare
    for field in schema.fields:
        values = [row[field.name] for row in rows if row.get(field.name) is not None]
        if not values:
            continue
        is_precise = precise and field.type.startswith("decimal")
        if is_precise and all(map(_is_number_as_text, values)):
            yield (
                f"each value of {field.name!r} is a plain number, read as base64, because of"
                " decimals='precise': if they are numbers, declare decimals='string' and rebuild"
            )
        # Not all: a column may have a time that stands for none.
        if field.type == "timestamp" and _count_within(values, limit) >= _MOST * len(values):
            yield (
                f"the times in {field.name!r} are within a month of 1970, because timestamps is"
                f" {form.timestamps!r}: if they count another unit, correct it and rebuild"
            )


def _is_number_as_text(value: object) -> bool:
    return isinstance(value, str) and _PLAIN_NUMBER.fullmatch(value) is not None


def _count_within(values: Sequence[object], limit: int) -> int:
    """Return how many of the values are whole numbers up to this limit, of either sign."""
    return sum(abs(value) <= limit for value in values if type(value) is int)  # not bool
