"""Converts Python values to Arrow arrays without loss, at every depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from enum import Enum
from itertools import chain
from typing import Any

from dagster_adjunct.resources.lazy_modules import pa, pt
from dagster_adjunct.resources.schemas.arrow_values import build_lists, build_maps, length_array
from dagster_adjunct.resources.schemas.types import tree_from_arrow, write_name
from dagster_adjunct.resources.schemas.values import YEARS, unreadable_values


def to_exact_array(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Return the values as an Arrow array of this type, without loss.

    Raises what Arrow raises, and ValueError for values that Arrow would convert with loss:
    fractions to integers, times to dates, times without a zone or with nanoseconds to timestamps in
    UTC, numbers to dates and times, and numbers beyond 32 bits to an infinite float. Rounding a
    double to a float is no loss. The missing values of pandas and NumPy (NaT, NA) become null.
    """
    return build_without_missing(lambda present: _exact(present, kind), values)


def build_without_missing(
    make: Callable[[Sequence[Any]], pa.Array], values: Sequence[Any]
) -> pa.Array:
    """Return `make(values)`. If that raises, replace NaT and NA by None, also within nested
    values, and call it again.
    """
    try:
        return make(values)
    except (pa.ArrowException, TypeError, ValueError):
        replaced = _without_missing(values)
        if replaced is None:
            raise
    return make(replaced)


def _without_missing(values: Sequence[object]) -> list[object] | None:
    """Return the values with None in the place of NaT and NA, also within nested values; None
    if there is no NaT or NA.
    """
    missing = []

    def replace_missing(value: object) -> object:
        if isinstance(value, list | tuple):
            return [replace_missing(item) for item in value]
        if isinstance(value, Mapping):
            return {name: replace_missing(item) for name, item in value.items()}
        if not is_missing(value):
            return value
        missing.append(value)
        return None

    made = [replace_missing(value) for value in values]
    if missing:
        return made
    return None


def is_missing(value: object) -> bool:
    """Whether a value is NaT or NA of pandas or NumPy; imports neither of them."""
    name = type(value).__name__
    if name == "datetime64":
        return bool(value != value)  # noqa: PLR0124
    return name in ("NaTType", "NAType")


def _exact(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Return the values as an array, without loss. Raises what Arrow raises, and ValueError for
    values that it would convert with loss. Unlike `to_exact_array`, it takes no NaT and NA.
    """
    if pt.is_nested(kind):
        return _exact_nested(values, kind)
    if pt.is_string(kind):
        return _text_array(values)
    array = pa.array(values, kind)
    checks = {
        pt.is_integer: _check_whole,
        pt.is_date: _check_days,
        pt.is_timestamp: _check_times,
        pt.is_float32: _check_float32,
    }
    for is_kind, check in checks.items():
        if is_kind(kind):
            check(values, array)
    # Such as 9999-12-31 23:00 in a time zone, if that is the next day in UTC.
    for value in unreadable_values(array).values():
        raise ValueError(f"{value} is not a date that Python can hold: {YEARS}")
    return array


def _text_array(values: Sequence[object]) -> pa.Array:
    """Return texts, and members of Enums by their values, as an array."""
    try:
        return pa.array(values, pa.string())
    except pa.ArrowTypeError:
        members = [each.value if isinstance(each, Enum) else each for each in values]
        return pa.array(members, pa.string())


def _check_whole(values: Sequence[object], array: pa.Array) -> None:
    """Raise ValueError if an integer was made from a value that is not equal to it."""
    if any(value is not None and type(value) is not int for value in values):  # seldom
        for value, kept in zip(values, array.to_pylist(), strict=True):
            if value is not None and value != kept:
                raise ValueError(f"{value} is not a whole number")


def _check_days(values: Sequence[object], array: pa.Array) -> None:
    """Raise ValueError for a value that is no date: a time of day, or a number."""
    for value in map(_as_python, values):
        if isinstance(value, datetime) and value.time() != time():
            raise ValueError(f"{value} is a time, not a date")
        if value is not None and not isinstance(value, date):
            raise ValueError(f"{value} is not a date")


def _check_times(values: Sequence[object], array: pa.Array) -> None:
    """Raise ValueError for a value that is no time, has no zone, or is finer than microseconds."""
    for value in map(_as_python, values):
        if value is not None and not isinstance(value, datetime):
            raise ValueError(f"{value} is not a time with a time zone")
        if value is not None and value.utcoffset() is None:
            raise NaiveTimeError(f"{value} is not a time with a time zone")
        if getattr(value, "nanosecond", 0):  # a pandas Timestamp
            raise ValueError(f"{value} is finer than microseconds")


def _check_float32(values: Sequence[object], array: pa.Array) -> None:
    """Raise ValueError for a finite number that became infinite in 32 bits."""
    for value, kept in zip(values, array.to_pylist(), strict=True):
        if kept is not None and math.isinf(kept) and value != kept:
            raise ValueError(f"{value} is too large for 32 bits")


class NaiveTimeError(ValueError):
    """A datetime has no time zone."""


class NestedValueError(ValueError):
    """A part of a nested value does not fit: its path from the whole value, the reason, the type
    that is expected there, if the reason does not say what to send, and whether it is a datetime
    that has no time zone.
    """

    def __init__(
        self, path: str, reason: str, expected: str = "", *, is_naive_time: bool = False
    ) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
        self.expected = expected
        self.is_naive_time = is_naive_time

    def within(self, step: str) -> NestedValueError:
        """Return the error with the path from a value that has this one at `step`."""
        return NestedValueError(
            step + self.path, self.reason, self.expected, is_naive_time=self.is_naive_time
        )


def _exact_within(step: str, values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Return parts of nested values as an array; `step` is what their path adds to that of the
    whole.
    """
    try:
        return _exact(values, kind)
    except NestedValueError as error:
        raise error.within(step) from error
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        expected = str(tree_from_arrow(kind, step))
        if isinstance(error, pa.ArrowException | TypeError | OverflowError):
            reason = f"{_shown(_first_misfit(values, kind))} is no {expected}"
        else:
            reason = str(error)
        is_naive = isinstance(error, NaiveTimeError)
        raise NestedValueError(step, reason, expected, is_naive_time=is_naive) from error


def _first_misfit(values: Sequence[object], kind: pa.DataType) -> object:
    """Return the first of the values that does not fit this type; one of them does not."""
    for value in values[:-1]:
        try:
            _exact([value], kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return value
    return values[-1]


def _exact_nested(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Return what `_exact` returns, for a nested type."""
    if pt.is_struct(kind):
        return _exact_structs(values, kind)
    if pt.is_map(kind):
        return _exact_maps(values, kind)
    return _exact_lists(values, kind)


def _exact_lists(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Return lists as an array. Raises NestedValueError for an element that does not fit."""
    lists = [_as_list(value) for value in values]
    items = list(chain.from_iterable(filter(None, lists)))
    return build_lists(length_array(lists), _exact_within("[]", items, kind.value_type), kind)


def _exact_maps(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Return dictionaries as an array of maps. Raises NestedValueError for a value that does not
    fit.
    """
    maps = [_as_entries(value) for value in values]
    entries = list(chain.from_iterable(filter(None, maps)))
    for key, _ in entries:
        if not isinstance(key, str):
            raise ValueError(f"the key {_shown(key)} of a map is no text")
    keys = pa.array([key for key, _ in entries], pa.string())
    items = _exact_within("[*]", [item for _, item in entries], kind.item_type)
    return build_maps(length_array(maps), keys, items)


def _exact_structs(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Return dictionaries, rows or models as an array of structs. Raises NestedValueError for a
    member that does not fit or is not declared.
    """
    structs = [_as_members(value) for value in values]
    names = [field.name for field in kind]
    for struct in filter(None, structs):
        for name in struct:
            if name not in names:
                found = f"this field is not declared: expected {', '.join(names)}"
                raise NestedValueError(f".{write_name(str(name))}", found)
    parts = []
    for field in kind:
        members = [None if struct is None else struct.get(field.name) for struct in structs]
        parts.append(_exact_within(f".{write_name(field.name)}", members, field.type))
    missing = pa.array([struct is None for struct in structs], pa.bool_())
    return pa.StructArray.from_arrays(parts, fields=list(kind), mask=missing)


def _as_list(value: object) -> Sequence[object] | None:
    """Return a value as a list, None for None. Raises ValueError for any other kind of value."""
    value = _as_python(value)
    if type(value).__name__ == "ndarray":  # as pandas returns lists from Parquet
        return list(value)  # type: ignore[call-overload,no-any-return]
    if value is None or isinstance(value, list | tuple):
        return value
    raise ValueError(f"{_shown(value)} is not a list")


def _as_entries(value: object) -> Sequence[tuple[str, object]] | None:
    """Return a value as the (key, value) pairs of a map, None for None. Raises ValueError for any
    other kind of value.
    """
    value = _as_python(value)
    if value is None:
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple) and all(map(_is_entry, value)):  # as Arrow returns maps
        return value
    raise ValueError(f"{_shown(value)} is not a map: expected a dictionary")


def _is_entry(value: object) -> bool:
    """Whether a value is a pair, as Arrow returns the entries of maps."""
    return isinstance(value, tuple) and len(value) == 2


def _as_members(value: object) -> Mapping[str, object] | None:
    """Return a value as the members of a struct by name, None for None. Raises ValueError for any
    other kind of value.
    """
    value = _as_python(value)
    if value is None or isinstance(value, Mapping):
        return value
    if hasattr(value, "asDict"):  # Spark's Row
        return value.asDict()  # type: ignore[no-any-return]
    names = getattr(type(value), "model_fields", None) or getattr(
        value, "__dataclass_fields__", None
    )
    if names is None:
        raise ValueError(f"{_shown(value)} is not a struct: expected a dictionary")
    return {name: getattr(value, name) for name in names}


def _shown(value: object) -> str:
    """Return the beginning of a value's text in ASCII, for errors."""
    return ascii(value)[:100]


def _as_python(value: object) -> object:
    """Return the Python value of an Arrow scalar; any other value unchanged."""
    if isinstance(value, pa.Scalar):
        return value.as_py()
    return value
