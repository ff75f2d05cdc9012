"""Functions of Spark SQL over Arrow arrays. Each returns Spark's values or raises NeedsSpark (ANSI mode, UTC)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any

from dagster_adjunct.resources.lazy_modules import pa, pc, pt
from dagster_adjunct.resources.schemas.schema import arrow_type, is_widening
from dagster_adjunct.resources.sql.types import INTEGERS

Function = Callable[..., Any]
"""Takes and returns arrays, or scalars that stand for all rows."""


class NeedsSpark(Exception):
    """Only Spark can compute the values, or find the error in them."""


def kernel(name: str, *arguments: Any, **options: Any) -> Function:
    """Return a function of Arrow by its name, with further arguments."""
    return lambda *arrays: getattr(pc, name)(*arrays, *arguments, **options)


def _check(flags: Any, what: str) -> None:
    """Raise NeedsSpark unless all flags are true or null."""
    if not (flags.as_py() is not False if isinstance(flags, pa.Scalar) else pc.all(flags, min_count=0).as_py()):
        raise NeedsSpark(what)


def comparison(name: str) -> Function:
    """Return "equal", "less", …; strings and binary values are compared by their bytes, as in Spark."""

    def compare(one: Any, other: Any) -> Any:
        if pt.is_floating(one.type):
            # In Spark, NaN = NaN; and -0.0 = 0.0, but in filters over Parquet files they are told apart.
            for side in (one, other):
                is_negative = pc.less(pc.divide(pa.scalar(1.0, side.type), side), pa.scalar(0.0, side.type))
                is_zero = pc.equal(side, pa.scalar(0.0, side.type))
                odd = pc.or_(pc.is_nan(side), pc.and_(is_zero, is_negative))
                _check(pc.invert(odd), "a comparison with NaN or -0.0")
        return getattr(pc, name)(one, other)

    return compare


def equal_or_both_null(one: Any, other: Any) -> Any:
    equal = pc.fill_null(comparison("equal")(one, other), False)
    return pc.or_(pc.and_(pc.is_null(one), pc.is_null(other)), equal)


def membership(chosen: pa.Array, *, or_null: bool) -> Function:
    """Return IN over these values, and maybe null: then a value that is not among them is unknown."""

    def is_among(array: Any) -> Any:
        unknown = pa.scalar(None, pa.bool_())
        found = pc.if_else(pc.is_in(array, value_set=chosen), True, unknown if or_null else False)
        return pc.if_else(pc.is_valid(array), found, unknown)

    return is_among


def choose(condition: Any, result: Any, otherwise: Any) -> Any:
    return pc.if_else(pc.fill_null(condition, False), result, otherwise)


def choose_by_row(
    condition: Any, table: pa.Table, result: Callable[[pa.Table], Any], otherwise: Callable[[pa.Table], Any]
) -> Any:
    """Return what `choose` does; `result` and `otherwise` are given their own rows."""
    condition = pc.fill_null(condition, False)
    if isinstance(condition, pa.Scalar):
        return (result if condition.as_py() else otherwise)(table)
    parts, places = [], []
    for compute, flags in ((result, condition), (otherwise, pc.invert(condition))):
        rows = table.filter(flags)
        part = compute(rows)
        parts.append(pa.repeat(part, rows.num_rows) if isinstance(part, pa.Scalar) else part)
        places.append(pc.indices_nonzero(flags))
    return pa.concat_arrays(parts).take(pc.sort_indices(pa.concat_arrays(places)))


def divide(one: Any, other: Any) -> Any:
    _check(pc.not_equal(other, pa.scalar(0, other.type)), "a division by zero")
    return pc.divide(one, other)


def remainder(one: Any, other: Any) -> Any:
    """Return the remainder with the sign of the dividend."""
    return pc.subtract_checked(one, pc.multiply_checked(pc.divide_checked(one, other), other))


def concatenate(*texts: Any) -> Any:
    return pc.binary_join_element_wise(*texts, "")


def upper(array: Any) -> Any:
    _check(pc.string_is_ascii(array), "letters that are not ASCII")
    return pc.ascii_upper(array)


def lower(array: Any) -> Any:
    _check(pc.string_is_ascii(array), "letters that are not ASCII")
    return pc.ascii_lower(array)


# Casts


def cast_function(kind: str, to: str) -> Function | None:
    """Return the cast between two Spark types, None where it may differ from Spark's."""
    arrow = arrow_type(to)
    if kind in INTEGERS and to.startswith("decimal("):
        return lambda array: pc.cast(pc.cast(array, pa.decimal256(76, arrow.scale)), arrow)
    if kind == "string" and to in _TEXTS:
        pattern = _TEXTS[to]
        return lambda array: _cast_matching(array, pattern, arrow)
    if (kind, to) == ("date", "string"):
        return _cast_dates
    if (kind in (*INTEGERS, "float") and to in ("float", "double")) or {kind, to} == {"date", "timestamp"}:
        return kernel("cast", arrow, safe=False)  # to the nearest number; to the date before the time
    if (kind in (*INTEGERS, "boolean") and to in (*INTEGERS, "string")) or is_widening(kind, to):
        return kernel("cast", arrow)
    return None


_TEXTS = {"int": r"\A-?[0-9]{1,9}\z", "bigint": r"\A-?[0-9]{1,18}\z", "date": r"\A[0-9]{4}-[0-9]{2}-[0-9]{2}\z"}
"""Texts that are cast alike. Spark takes others too, such as those with spaces around them."""


def _cast_matching(array: Any, pattern: str, arrow: pa.DataType) -> Any:
    _check(pc.match_substring_regex(array, pattern), "an unusual number or date")
    return pc.cast(array, arrow)


def _cast_dates(array: Any) -> Any:
    usual = pc.and_(pc.greater_equal(array, pa.scalar(date.min)), pc.less_equal(array, pa.scalar(date.max)))
    _check(usual, "a year that has not four digits")
    return pc.cast(array, pa.string())
