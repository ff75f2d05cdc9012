"""Single values as Parquet stores them: whole numbers and bytes, which compare and hash without Arrow.

Their order is the order of the values themselves, and Spark's: texts by their UTF-8 bytes, decimals of one type
by their unscaled number.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Context, Decimal
from typing import Any

Plain = int | bytes
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_FIRST_DAY = _EPOCH.date().toordinal()
_EXACT = Context(prec=76)


def to_plain(kind: str) -> Callable[[Any], Plain]:
    """Return what turns a value of this Spark type name into its stored form.

    string: UTF-8 bytes; binary: itself; integers and booleans: themselves; date: days, timestamp: microseconds,
    both since 1970 in UTC; decimal: the unscaled number.
    """
    if kind.startswith("decimal"):
        scale = decimal_type(kind)[1]
        return lambda value: int(Decimal(value).scaleb(scale, _EXACT))
    return _FORMS.get(kind, int)


def decimal_type(kind: str) -> tuple[int, int]:
    """Return precision and scale of `decimal(p,s)`."""
    precision, _, scale = kind.removeprefix("decimal(").rstrip(")").partition(",")
    return int(precision), int(scale)


def _micros(value: dt.datetime) -> int:
    passed = value - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


def _days(value: dt.date) -> int:
    return value.toordinal() - _FIRST_DAY


_FORMS: dict[str, Callable[[Any], Plain]] = {"string": str.encode, "binary": bytes, "date": _days, "timestamp": _micros}
