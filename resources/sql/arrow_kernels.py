"""Functions of Spark SQL over Arrow arrays, also nested ones, with Spark's results in ANSI mode.

Each takes and returns arrays. Where Spark raises an error, an Arrow function does, too; a result
that is not certain to be Spark's raises NeedsSpark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any, TypeAlias

from dagster_adjunct.resources.lazy_modules import pa, pc, pt
from dagster_adjunct.resources.schemas.evolution import is_widening
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.sql.result_types import INTEGERS

_TEXTS = {
    "int": r"\A-?[0-9]{1,9}\z",
    "bigint": r"\A-?[0-9]{1,18}\z",
    "date": r"\A[0-9]{4}-[0-9]{2}-[0-9]{2}\z",
}
"""Texts that Arrow and Spark cast alike. Spark also casts others, such as those with spaces
around them.
"""
Function: TypeAlias = Callable[..., Any]
"""Takes and returns arrays, or scalars that stand for all rows."""


class NeedsSpark(Exception):
    """Only Spark can compute the values, or find the error in them."""


def kernel(name: str, *arguments: Any, **options: Any) -> Function:
    """Return the Arrow function of this name, which gets these arguments after its arrays."""
    return lambda *arrays: getattr(pc, name)(*arrays, *arguments, **options)


def _check(flags: Any, what: str) -> None:
    """Raise NeedsSpark unless all flags are true or null."""
    if not isinstance(flags, pa.Scalar):
        flags = pc.all(flags, min_count=0)
    if flags.as_py() is False:
        raise NeedsSpark(what)


def comparison(name: str) -> Function:
    """Return the comparison "equal", "less", …; strings and binary values are compared by their
    bytes, as in Spark.
    """

    def compare(one: Any, other: Any) -> Any:
        if pt.is_floating(one.type):
            # Left to Spark: there NaN = NaN, and -0.0 = 0.0, but filters over Parquet files
            # distinguish the two zeros.
            for side in (one, other):
                is_negative = pc.less(
                    pc.divide(pa.scalar(1.0, side.type), side), pa.scalar(0.0, side.type)
                )
                is_zero = pc.equal(side, pa.scalar(0.0, side.type))
                odd = pc.or_(pc.is_nan(side), pc.and_(is_zero, is_negative))
                _check(pc.invert(odd), "a comparison with NaN or -0.0")
        return getattr(pc, name)(one, other)

    return compare


def equal_or_both_null(one: Any, other: Any) -> Any:
    """Return whether values are equal, as `<=>` does: never null, and true for two nulls."""
    equal = pc.fill_null(comparison("equal")(one, other), False)
    return pc.or_(pc.and_(pc.is_null(one), pc.is_null(other)), equal)


def membership(chosen: pa.Array, *, or_null: bool) -> Function:
    """Return the function for IN over the values `chosen`.

    With `or_null`, null is one of the values in IN: then the result for a value that is not among
    them is null.
    """

    def is_among(array: Any) -> Any:
        unknown = pa.scalar(None, pa.bool_())
        found = pc.if_else(pc.is_in(array, value_set=chosen), True, unknown if or_null else False)
        return pc.if_else(pc.is_valid(array), found, unknown)

    return is_among


def choose(condition: Any, result: Any, otherwise: Any) -> Any:
    """Return the results where the condition is true, and `otherwise` where it is false or null."""
    return pc.if_else(pc.fill_null(condition, False), result, otherwise)


def choose_by_row(
    condition: Any,
    table: pa.Table,
    result: Callable[[pa.Table], Any],
    otherwise: Callable[[pa.Table], Any],
) -> Any:
    """Return what `choose` returns, but call `result` and `otherwise` with their own rows only."""
    condition = pc.fill_null(condition, False)
    if isinstance(condition, pa.Scalar):
        return (result if condition.as_py() else otherwise)(table)
    parts = []
    places = []
    for compute, flags in ((result, condition), (otherwise, pc.invert(condition))):
        rows = table.filter(flags)
        part = compute(rows)
        parts.append(pa.repeat(part, rows.num_rows) if isinstance(part, pa.Scalar) else part)
        places.append(pc.indices_nonzero(flags))
    return pa.concat_arrays(parts).take(pc.sort_indices(pa.concat_arrays(places)))


def divide(one: Any, other: Any) -> Any:
    """Return the quotients. Raises NeedsSpark for a division by zero."""
    _check(pc.not_equal(other, pa.scalar(0, other.type)), "a division by zero")
    return pc.divide(one, other)


def remainder(one: Any, other: Any) -> Any:
    """Return the remainder, which has the sign of the dividend."""
    return pc.subtract_checked(one, pc.multiply_checked(pc.divide_checked(one, other), other))


def concatenate(*texts: Any) -> Any:
    """Return the texts of each row joined; null if one of them is null."""
    return pc.binary_join_element_wise(*texts, "")


def of_ascii(name: str) -> Function:
    """Return the Arrow function of this name, for strings of ASCII letters only; for others it
    raises NeedsSpark.
    """

    def compute(array: Any) -> Any:
        _check(pc.string_is_ascii(array), "letters that are not ASCII")
        return getattr(pc, name)(array)

    return compute


def cast_function(kind: str, to: str) -> Function | None:
    """Return the function that casts one Spark type to another, None where its results may
    differ from Spark's.
    """
    arrow = arrow_type(to)
    if kind in INTEGERS and to.startswith("decimal("):
        return lambda array: pc.cast(pc.cast(array, pa.decimal256(76, arrow.scale)), arrow)
    if kind == "string" and to in _TEXTS:
        pattern = _TEXTS[to]
        return lambda array: _cast_matching(array, pattern, arrow)
    if (kind, to) == ("date", "string"):
        return _cast_dates
    if {kind, to} == {"date", "timestamp"}:
        return kernel("cast", arrow, safe=False)  # to the date before the time
    if kind in (*INTEGERS, "float") and to in ("float", "double"):
        return kernel("cast", arrow, safe=False)  # to the nearest number
    if kind in (*INTEGERS, "boolean") and to in (*INTEGERS, "string"):
        return kernel("cast", arrow)
    if is_widening(kind, to):
        return kernel("cast", arrow)
    return None


def _cast_matching(array: Any, pattern: str, arrow: pa.DataType) -> Any:
    """Return texts cast to a type. Raises NeedsSpark for one that does not match the pattern."""
    _check(pc.match_substring_regex(array, pattern), "an unusual number or date")
    return pc.cast(array, arrow)


def _cast_dates(array: Any) -> Any:
    """Return dates as texts. Raises NeedsSpark for one outside the years 1 to 9999."""
    usual = pc.and_(
        pc.greater_equal(array, pa.scalar(date.min)), pc.less_equal(array, pa.scalar(date.max))
    )
    _check(usual, "a year that has not four digits")
    return pc.cast(array, pa.string())


def field_of(name: str, arrow: pa.DataType) -> Any:
    """Return the function for `value.name` of structs; of arrays of structs, for the arrays of
    these fields. `arrow` is the type of the result.
    """

    def read(values: Any) -> Any:
        if not pt.is_list(values.type):
            return pc.struct_field(values, name)
        first, last = _bounds(values)
        inner = pc.struct_field(values.values.slice(first, last - first), name)
        offsets = pc.subtract(values.offsets, pa.scalar(first, values.offsets.type))
        return pa.ListArray.from_arrays(offsets, inner, type=arrow, mask=pc.is_null(values))

    return read


def value_of(key: str) -> Any:
    """Return the function for the value of this key in maps: null where there is none."""
    return lambda maps: pc.map_lookup(maps, pa.scalar(key, pa.string()), "first")


def element_at(index: int, *, or_null: bool) -> Any:
    """Return the function for the element at an index from 0, or from the end if it is negative.

    An array without that element gives null, or else raises an error.
    """

    def read(arrays: Any) -> Any:
        lengths = size(arrays)
        places = pa.scalar(index, pa.int32())
        if index < 0:
            places = pc.add(lengths, places)
        is_there = pc.and_(pc.less(places, lengths), pc.greater_equal(places, pa.scalar(0)))
        if not or_null and pc.all(is_there, min_count=0).as_py() is False:
            raise pa.ArrowInvalid("an index that is out of bounds")
        found = pc.add(arrays.offsets[:-1], places)
        return arrays.values.take(pc.if_else(is_there, found, pa.scalar(None, found.type)))

    return read


def size(values: Any) -> Any:
    """Return the number of elements of arrays or of entries of maps; null for null."""
    offsets = values.offsets
    lengths = pc.subtract(offsets[1:], offsets[:-1])
    return pc.if_else(pc.is_valid(values), lengths, pa.scalar(None, lengths.type))


def contains(arrays: Any, wanted: Any) -> Any:
    """Return whether arrays contain a value: null if they don't, but contain null."""
    first, last = _bounds(arrays)
    elements = arrays.values.slice(first, last - first)
    lengths = pc.subtract(arrays.offsets[1:], arrays.offsets[:-1])
    rows = pa.array(range(len(arrays)), pa.int64())
    parents = _repeat(rows, lengths)  # the row of each element
    if not isinstance(wanted, pa.Scalar):
        sought = wanted.take(parents)
    else:
        sought = wanted
    equal = pc.equal(elements, sought)
    with_equal = parents.filter(pc.fill_null(equal, False)).unique()
    with_null = parents.filter(pc.is_null(equal)).unique()
    unknown = pa.scalar(None, pa.bool_())
    otherwise = pc.if_else(pc.is_in(rows, value_set=with_null), unknown, False)
    answers = pc.if_else(pc.is_in(rows, value_set=with_equal), True, otherwise)
    known = pc.is_valid(arrays)
    if isinstance(wanted, pa.Scalar):
        known = pc.and_(known, pa.scalar(wanted.is_valid))
    else:
        known = pc.and_(known, pc.is_valid(wanted))
    return pc.if_else(known, answers, unknown)


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of all arrays: the row of each, its number within the row from 0, and its
    value.
    """

    rows: pa.Array
    numbers: pa.Array
    values: pa.Array


def explode(arrays: Any, arrow: pa.DataType, *, keep_empty: bool) -> Elements:
    """Return the elements of arrays, or the entries of maps, which are of this type.

    With `keep_empty`, a row without elements gets one, null.
    """
    import numpy as np

    lengths = pc.fill_null(size(arrays), 0).to_numpy()
    counts = np.maximum(lengths, 1) if keep_empty else lengths
    rows = np.repeat(np.arange(len(arrays)), counts)
    numbers = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = arrays.offsets.to_numpy()[rows] + numbers
    if pt.is_map(arrays.type):
        values = pa.StructArray.from_arrays([arrays.keys, arrays.items], fields=list(arrow))
    else:
        values = arrays.values
    taken = values.take(pa.array(places, pa.int64(), mask=lengths[rows] == 0))
    return Elements(pa.array(rows, pa.int64()), pa.array(numbers, pa.int64()), taken)


def _repeat(rows: Any, counts: Any) -> Any:
    """Return each row as often as counted."""
    import numpy as np

    return pa.array(np.repeat(rows.to_numpy(), counts.to_numpy()), pa.int64())


def _bounds(arrays: Any) -> tuple[int, int]:
    """Return where the elements of arrays begin and end in their values."""
    if not len(arrays):
        return 0, 0
    return arrays.offsets[0].as_py(), arrays.offsets[-1].as_py()
