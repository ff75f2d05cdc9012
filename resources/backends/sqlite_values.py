"""How values are stored in SQLite.

Beside SQLite's own text, integer, real and blob:

    boolean    0 or 1
    timestamp  text in UTC, `2013-07-01T00:00:00Z`; a fraction of a second only where there is one
    date       text, `2013-07-01`
    decimal    text with all its digits (a column made elsewhere as DECIMAL keeps about 15 of them)

A float that isn't a number would silently become null in SQLite, so it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from dagster_adjunct.resources.backends.column_values import Kind, encoder_of


def _number(value: Any) -> float:
    number: float = encoder_of(Kind.FLOAT)(value)
    if math.isnan(number):
        raise TypeError("SQLite has no NaN; write None")
    return number


def _instant(value: Any) -> str:
    moment: datetime = encoder_of(Kind.TIMESTAMP)(value)
    return moment.isoformat().replace("+00:00", "Z")


ENCODERS: dict[Kind, Callable[[Any], Any]] = {
    Kind.FLOAT: _number,
    Kind.TIMESTAMP: _instant,
    Kind.BOOLEAN: lambda value: int(encoder_of(Kind.BOOLEAN)(value)),
    Kind.DATE: lambda value: encoder_of(Kind.DATE)(value).isoformat(),
    Kind.DECIMAL: lambda value: str(encoder_of(Kind.DECIMAL)(value)),
}


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


DECODERS: dict[Kind, Callable[[Any], Any]] = {
    Kind.BOOLEAN: bool,
    Kind.TIMESTAMP: _moment,
    Kind.DATE: date.fromisoformat,
    Kind.DECIMAL: lambda value: Decimal(str(value)),
    Kind.FLOAT: float,
}
