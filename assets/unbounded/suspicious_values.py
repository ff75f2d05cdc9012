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
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOKED_AT = 1_000
_PLAIN_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
_MONTH = {"millis": 31 * 86_400_000, "micros": 31 * 86_400_000_000}


def find_suspicious_values(
    source: OpenedChanges, ranges: Ranges, spark: Callable[[], SparkSession]
) -> tuple[str, ...]:
    """Return warnings about the first changes in these ranges; () for formats whose values have
    one encoding.
    """
    form = source.spec.following.changes
    if not isinstance(form, DebeziumEnvelope | MaxwellEnvelope):
        return ()
    advance = source.system.advance
    compare = source.system.compare
    first = {}
    for ssp, (start, end) in ranges.items():
        last = advance(ssp, start, _LOOKED_AT)
        if compare(last, end) > 0:
            last = end
        first[ssp] = (start, last)
    records = with_envelope_json(form, source.read(spark(), first), describe_input(source.spec))
    texts = [row[0] for row in records.select(TEXT).limit(_LOOKED_AT).collect()]
    rows = derive_row_schema(source.spec, source.records)
    return tuple(_describe_suspicions(form, rows, list(_iterate_rows(texts))))


def _iterate_rows(texts: Sequence[str | None]) -> Iterator[dict[str, Any]]:
    """Yield the rows after the changes; bad changes are left out."""
    for text in texts:
        try:
            envelope = json.loads(text or "")
            row = (envelope.get("payload") or envelope).get("after")
        except (ValueError, AttributeError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def _describe_suspicions(
    form: DebeziumEnvelope | MaxwellEnvelope, schema: Schema, rows: Sequence[dict[str, Any]]
) -> Iterator[str]:
    precise = form.format == "json" and form.decimals == "precise"
    for field in schema.fields:
        values = []
        for row in rows:
            if row.get(field.name) is not None:
                values.append(row[field.name])
        if not values:
            continue
        is_precise = precise and field.type.startswith("decimal")
        if is_precise and all(map(_is_number_as_text, values)):
            yield (
                f"each value of {field.name!r} is a plain number, read as base64, because of"
                " decimals='precise': if they are numbers, declare decimals='string' and rebuild"
            )
        if field.type == "timestamp" and form.timestamps is not None:
            limit = _MONTH[form.timestamps]
            if all(_is_number_within(value, limit) for value in values):
                yield (
                    f"all times in {field.name!r} are within a month of 1970, because timestamps is"
                    f" {form.timestamps!r}: if they count another unit, correct it and rebuild"
                )


def _is_number_as_text(value: object) -> bool:
    return isinstance(value, str) and _PLAIN_NUMBER.fullmatch(value) is not None


def _is_number_within(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= limit
