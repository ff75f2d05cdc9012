"""The decimals that Spark makes of others, where all digits fit: which are left out else, a setting says."""

from __future__ import annotations

import re
from collections.abc import Iterable

_DECIMAL = re.compile(r"decimal\((\d+),(-?\d+)\)")
_DIGITS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 20}
_MOST = 38
Digits = tuple[int, int]
"""Precision and scale."""


def digits_of(type_: str | None) -> Digits | None:
    """Return the digits of a decimal, and of an integer those of the decimal that it becomes beside one."""
    match = None if type_ is None else _DECIMAL.fullmatch(type_)
    if match is not None:
        return int(match[1]), int(match[2])
    return None if type_ not in _DIGITS else (_DIGITS[type_], 0)


def calculated(operator: str, one: Digits, other: Digits) -> str | None:
    """Return the type of "Add", "Sub", "Mul", "Div" or "Mod" of two decimals."""
    (precision, scale), (others_precision, others_scale) = one, other
    most = max(scale, others_scale)
    whole, others_whole = precision - scale, others_precision - others_scale
    if operator in ("Add", "Sub"):
        return _decimal(max(whole, others_whole) + most + 1, most)
    if operator == "Mul":
        return _decimal(precision + others_precision + 1, scale + others_scale)
    if operator == "Div":
        divided = max(6, scale + others_precision + 1)
        return _decimal(whole + others_scale + divided, divided)
    return _decimal(min(whole, others_whole) + most, most)


def widest_decimal(types: Iterable[str | None]) -> str | None:
    """Return the decimal that several become together."""
    digits = [digits_of(type_) for type_ in types]
    known = [item for item in digits if item is not None]
    if not known or len(known) < len(digits):
        return None
    scale = max(scale for _, scale in known)
    return _decimal(max(precision - scale for precision, scale in known) + scale, scale)


def rounded(digits: Digits, places: int) -> str | None:
    """Return the type of a decimal that is rounded to so many places behind the point."""
    precision, scale = digits
    if places < 0:
        return None
    kept = min(scale, places)
    return _decimal(precision - scale + 1 + kept, kept)


def summed(digits: Digits) -> str | None:
    """Return the type of the sum of a column of decimals."""
    precision, scale = digits
    return f"decimal({min(precision + 10, _MOST)},{scale})"


def _decimal(precision: int, scale: int) -> str | None:
    return f"decimal({precision},{scale})" if precision <= _MOST else None
