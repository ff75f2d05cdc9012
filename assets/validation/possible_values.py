"""Values that a column can't hold whatever its rows are, so that Spark would refuse to compare them with it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from decimal import Decimal
from numbers import Number

_WHOLE = frozenset({"tinyint", "smallint", "int", "bigint"})
_FLOATS = frozenset({"float", "double"})
_TRUTHS = frozenset({"t", "true", "y", "yes", "1", "f", "false", "n", "no", "0"})
_NO_DIGITS = ("nan", "inf", "infinity")


def impossible(values: Iterable[object], kind: str) -> list[object]:
    """Return those of the values that a column of this type certainly can't hold: 'a' and True in an int column, say.

    What a text column can be compared with depends on its rows, so nothing is impossible there.
    """
    return [value for value in values if not _may_be(value, kind)]


def _may_be(value: object, kind: str) -> bool:
    number = kind in _WHOLE or kind in _FLOATS or kind.startswith("decimal")
    if isinstance(value, str):
        text = value.strip().lower()
        if kind == "boolean":
            return text in _TRUTHS
        if number and kind not in _WHOLE and text.lstrip("+-") in _NO_DIGITS:
            return True
        return any(letter.isdigit() for letter in text) or not (number or kind in ("date", "timestamp"))
    if isinstance(value, bool):
        return not number and kind not in ("date", "timestamp", "binary")
    if isinstance(value, Number | Decimal):
        return kind not in ("boolean", "date", "timestamp", "binary")
    if isinstance(value, date):  # or a datetime
        return not number and kind not in ("boolean", "binary")
    return True
