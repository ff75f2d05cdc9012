"""Values of users' functions as Arrow has them, all of each value or none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.schemas.readable_values import YEARS, unreadable

if TYPE_CHECKING:
    import pyarrow as pa


def exact_array(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Return the values in this type. Raises what Arrow raises, and ValueError for a value that would lose something.

    Arrow makes 2 of 2.5 where whole numbers are asked for, a day of a time of that day, a time in UTC of one without a
    zone or with nanoseconds, days and times of numbers, and infinity of a number that is too large for 32 bits. That a
    float has fewer digits than a double is what its type says. What pandas and NumPy have for a missing value (NaT, NA)
    is null.
    """
    return made_of_present(lambda present: _exact(present, kind), values)


def made_of_present(make: Callable[[Sequence[Any]], pa.Array], values: Sequence[Any]) -> pa.Array:
    """Return what `make` makes of the values; where it fails, of the values with None for NaT and NA, in lists too."""
    import pyarrow as pa

    try:
        return make(values)
    except (pa.ArrowException, TypeError, ValueError):
        present = _without_missing(values)
        if present is None:
            raise
    return make(present)


def _without_missing(values: Sequence[object]) -> list[object] | None:
    """Return the values with None for what is missing; None where nothing is."""
    found = False

    def present(value: object) -> object:
        nonlocal found
        if isinstance(value, list | tuple):
            return [present(item) for item in value]
        missing = is_missing(value)
        found = found or missing
        return None if missing else value

    made = [present(value) for value in values]
    return made if found else None


def is_missing(value: object) -> bool:
    """Whether it is NaT or NA, as pandas and NumPy have it; neither is imported to tell."""
    name = type(value).__name__
    return name in ("NaTType", "NAType") or (name == "datetime64" and value != value)  # noqa: PLR0124


def _exact(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa
    import pyarrow.types as t

    array = pa.array(values, kind)
    checks = {t.is_integer: _whole, t.is_date: _days, t.is_timestamp: _times, t.is_float32: _small, t.is_list: _items}
    for is_kind, check in checks.items():
        if is_kind(kind):
            check(values, array)
    for value in unreadable(array).values():  # 9999-12-31 23:00 of a zone may be the next day in UTC
        raise ValueError(f"{value} is no date of Python: {YEARS}")
    return array


def _whole(values: Sequence[object], array: pa.Array) -> None:
    if any(value is not None and type(value) is not int for value in values):
        for value, kept in zip(values, array.to_pylist(), strict=True):
            if value is not None and value != kept:
                raise ValueError(f"{value} is no whole number")


def _days(values: Sequence[object], array: pa.Array) -> None:
    for value in map(_as_python, values):
        if isinstance(value, datetime) and value.time() != time():
            raise ValueError(f"{value} is a time, and no day")
        if value is not None and not isinstance(value, date):
            raise ValueError(f"{value} is no day")


def _times(values: Sequence[object], array: pa.Array) -> None:
    for value in map(_as_python, values):
        if value is not None and (not isinstance(value, datetime) or value.utcoffset() is None):
            raise ValueError(f"{value} is no time with a zone")
        if getattr(value, "nanosecond", 0):  # of pandas
            raise ValueError(f"{value} is finer than microseconds")


def _small(values: Sequence[object], array: pa.Array) -> None:
    for value, kept in zip(values, array.to_pylist(), strict=True):
        if kept is not None and math.isinf(kept) and value != kept:
            raise ValueError(f"{value} is too large for 32 bits")


def _items(values: Sequence[object], array: pa.Array) -> None:
    lists: Any = [value for value in values if value is not None]
    _exact([item for items in lists for item in items], array.type.value_type)


def _as_python(value: object) -> object:
    import pyarrow as pa

    return value.as_py() if isinstance(value, pa.Scalar) else value
