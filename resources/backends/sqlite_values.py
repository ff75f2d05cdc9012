"""How values are stored in SQLite.

Beside SQLite's own text, integer, real and blob:

    boolean      0 or 1
    timestamp    text in UTC, `2013-07-01T00:00:00Z`; a fraction of a second only where there is one
    date         text, `2013-07-01`
    decimal      text with all its digits (a column made elsewhere as DECIMAL keeps about 15 of them)
    json, lists  text, as JSON; what is in a list as above
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from dagster_adjunct.resources.backends.column_values import Column, Kind


def keep(column: Column) -> Callable[[Any], Any] | None:
    """The function that brings a checked value into the form that SQLite keeps; None where it is that already."""
    if column.kind is Kind.LIST:
        assert column.element is not None
        item = keep(column.element)
        return json.dumps if item is None else lambda values: json.dumps([v if v is None else item(v) for v in values])
    return _KEEP.get(column.kind)


def decode(column: Column) -> Callable[[Any], Any] | None:
    """The function that brings what SQLite keeps back; None where it is as it was."""
    if column.kind is Kind.LIST:
        assert column.element is not None
        item = decode(column.element)
        if item is None:
            return json.loads
        return lambda text: [v if v is None else item(v) for v in json.loads(text)]
    return _DECODE.get(column.kind)


def appended(old: str | None, new: str) -> str:
    """Two lists as JSON, one after the other; SQLite calls it."""
    return new if old is None else json.dumps([*json.loads(old), *json.loads(new)])


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


_KEEP: dict[Kind, Callable[[Any], Any]] = {
    Kind.TIMESTAMP: lambda moment: moment.isoformat().replace("+00:00", "Z"),
    Kind.BOOLEAN: int,
    Kind.DATE: date.isoformat,
    Kind.DECIMAL: str,
    Kind.JSON: json.dumps,
}
_DECODE: dict[Kind, Callable[[Any], Any]] = {
    Kind.BOOLEAN: bool,
    Kind.TIMESTAMP: _moment,
    Kind.DATE: date.fromisoformat,
    Kind.DECIMAL: lambda value: Decimal(str(value)),
    Kind.FLOAT: float,
    Kind.JSON: json.loads,
}
