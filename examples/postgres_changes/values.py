"""Values of a table's columns: as Python has them, in keys and snapshots, and as Debezium's JSON
has them.

Both kinds of values have one source: psycopg reads the text of a change as it reads a selected
value. Debezium's settings would be `decimal.handling.mode=string` and
`time.precision.mode=adaptive`, with dates as texts.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg
from psycopg import adapters, pq, sql

from dagster_adjunct.errors import SchemaMismatchError
from dagster_adjunct.examples.postgres_changes.catalogue import Column
from dagster_adjunct.examples.postgres_changes.pgoutput import Row

_TEXT_ARRAY = 1009
# bool, bytea, the integers, oid, the floats, date, timestamp, timestamptz and numeric; others stay
# texts.
_READ = frozenset({16, 17, 20, 21, 23, 26, 700, 701, 1082, 1114, 1184, 1700})
_TEXTS = frozenset({18, 19, 25, 1042, 1043})


def is_selected_as_text(column: Column) -> bool:
    """Whether a snapshot selects a column as its text, because psycopg has no reader for its
    type, or another one.
    """
    return not {column.type, column.element} & (_READ | _TEXTS)


def selected(column: Column) -> sql.Composable:
    """Return the expression that selects a column: its value, or the text that a change would
    have.
    """
    name = sql.Identifier(column.name)
    if not is_selected_as_text(column):
        return name
    # A cast to text may differ from it: that of an inet adds /32.
    return sql.SQL("CASE WHEN {0} IS NOT NULL THEN format('%s', {0}) END").format(name)


def readers(columns: Iterable[Column]) -> Mapping[str, Callable[[str], Any]]:
    """Return, by column, the function that reads its values from PostgreSQL's text."""
    return {column.name: _reader(column) for column in columns}


def _reader(column: Column) -> Callable[[str], Any]:
    oid = column.type if column.type in _READ or column.element in _READ else 0
    if column.element and not oid:
        oid = _TEXT_ARRAY
    if not oid:
        return str
    kind = adapters.get_loader(oid, pq.Format.TEXT)
    assert kind is not None
    loader = kind(oid)
    return lambda text: loader.load(text.encode())


def read_row(
    row: Row, read: Mapping[str, Callable[[str], Any]], names: Sequence[str], table: str
) -> Row:
    """Return a row with Python's values, without columns that the catalogue does not know (any
    more).

    Raises SchemaMismatchError if it lacks one of the columns `names`, or has a value that Python
    does not have.
    """
    for name in names:
        if name not in row:
            raise SchemaMismatchError(
                f"a change of {table} has no column {name!r}: it has {', '.join(row)}. The column"
                " was added, renamed or dropped, or is not published.",
                "Restore the column. If the table has other columns now, declare them, and take a"
                " new snapshot: run with --drop, then again.",
                table=table,
                column=name,
            )
    values: Row = {}
    for name in row.keys() & read.keys():
        values[name] = read_value(row[name], read[name], name, table)
    return {name: values[name] for name in row if name in values}


def read_value(text: str | None, read: Callable[[str], Any], name: str, table: str) -> Any:
    if text is None:
        return None
    try:
        return read(text)
    except (psycopg.DataError, ValueError) as error:
        raise unreadable_error(name, table, error) from error


def unreadable_error(name: str | None, table: str, error: Exception) -> SchemaMismatchError:
    """Return the error for a value that Python, or the declared type, does not have."""
    where = f"column {name!r} of {table}" if name else table
    return SchemaMismatchError(
        f"a value in {where} can't be read: {error}.",
        "Dates have the years 1 to 9999 and are not infinite. Correct the value, declare another"
        " type, or leave the column out of the declared columns.",
        table=table,
        column=name,
    )


def to_json(value: Any) -> Any:
    """Return a value as it is in Debezium's JSON."""
    match value:
        case datetime() if value.tzinfo is None:
            return (value.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(
                microseconds=1
            )
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case date():
            return value.isoformat()
        case Decimal():
            return format(value, "f")
        case bytes():
            return base64.b64encode(value).decode()
        case float() if math.isnan(value):
            return "NaN"
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case list():
            return [to_json(item) for item in value]
        case _:
            return value
