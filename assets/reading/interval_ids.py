"""The stable id of an interval: 32 hex digits, which follow from the key and the interval's begin
alone, so that every engine computes the same, whatever files the interval is read from.

They are the beginning of the SHA-256 digest of a text: the begin in microseconds since 1970, and
each value of the key after a "|". Strings and binaries are their bytes in hex, dates are days and
timestamps microseconds since 1970, other numbers are as they are written in SQL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.times import to_microseconds

INTERVAL_ID = "interval_id"
"""The name under which reads and joins ask for the id, unless a column of the entries has it."""
_DIGITS = 32
_FIRST_DAY = date(1970, 1, 1).toordinal()


def add_interval_id(schema: Schema) -> Schema:
    """Return the columns of entries and the id of their interval, unless one has its name."""
    if INTERVAL_ID in schema:
        return schema
    return Schema((*schema.fields, Field(INTERVAL_ID, "string")))


def interval_id(key: Sequence[Any], begin: int) -> str:
    """Return the id of the interval of a key, a value for each of its columns, that begins at a
    time in microseconds.
    """
    text = "|".join([str(begin), *map(_text, key)])
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def interval_ids(rows: pa.Table, key: Sequence[str], begins: Sequence[int]) -> pa.Array:
    """Return the ids of the intervals that rows with these keys are in, given their begins."""
    columns = [rows.column(name).to_pylist() for name in key]
    found = [interval_id(values, begin) for *values, begin in zip(*columns, begins, strict=True)]
    return pa.array(found, pa.string())


def interval_id_sql(
    schema: Schema,
    key: Sequence[str],
    begin: str,
    quote: Callable[[str], str],
    *,
    duckdb: bool = False,
) -> str:
    """Return the Spark SQL, or DuckDB's, of the id of an interval whose begin is the SQL `begin`, a
    timestamp.
    """
    if duckdb:
        micros = "epoch_us({})"
        days = "({} - DATE '1970-01-01')"
        digest = "sha256({})"
    else:
        micros = "unix_micros({})"
        days = "unix_date({})"
        digest = "sha2({}, 256)"
    texts = [f"cast({micros.format(begin)} AS STRING)"]
    for name in key:
        column = quote(name)
        kind = schema.field(name).type
        if kind in ("string", "binary"):
            texts.append(f"hex({column})")
        elif kind == "timestamp":
            texts.append(f"cast({micros.format(column)} AS STRING)")
        elif kind == "date":
            texts.append(f"cast({days.format(column)} AS STRING)")
        else:
            texts.append(f"cast({column} AS STRING)")
    text = f"concat_ws('|', {', '.join(texts)})"
    return f"substr({digest.format(text)}, 1, {_DIGITS})"


def _text(value: Any) -> str:
    """Return the text of a value of a key."""
    if isinstance(value, str):
        return value.encode().hex().upper()
    if isinstance(value, bytes):
        return value.hex().upper()
    if isinstance(value, datetime):
        return str(to_microseconds(value))
    if isinstance(value, date):
        return str(value.toordinal() - _FIRST_DAY)
    if isinstance(value, Decimal):
        return f"{value:f}"
    return str(value)
