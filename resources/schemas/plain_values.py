"""The plain forms of values, which hash and compare alike in Python, Arrow and Parquet."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from typing import Any

from dagster_adjunct.resources.schemas.types import decimal_digits

Plain = int | bytes
"""A value as Parquet stores it, which compares and hashes without Arrow. Plain values are ordered
as in Spark: strings by their UTF-8 bytes, decimals of one type by their unscaled number."""


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_DAY = _EPOCH.date().toordinal()
_EXACT = Context(prec=76)


def plain_converter(kind: str) -> Callable[[Any], Plain]:
    """Return a function that converts a value of this Spark type to its plain form.

    string: UTF-8 bytes; binary: itself; integers and booleans: themselves; date: days, timestamp:
    microseconds, both since 1970 in UTC; decimal: the unscaled number.
    """
    digits = decimal_digits(kind)
    if digits is not None:
        return lambda value: int(Decimal(value).scaleb(digits[1], _EXACT))
    return _CONVERTERS.get(kind, int)


def _micros(value: datetime) -> int:
    passed = value - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


def _days(value: date) -> int:
    return value.toordinal() - _FIRST_DAY


_CONVERTERS: dict[str, Callable[[Any], Plain]] = {
    "string": str.encode,
    "binary": bytes,
    "date": _days,
    "timestamp": _micros,
}
