"""Validation of arguments that several operators share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeAlias

from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DataFrameFunction: TypeAlias = "Callable[[DataFrame], DataFrame]"
OnNullKey = Literal["fail", "skip"]
_PARTITIONS = 100_000
MAX_DURATION = timedelta(days=36_525)
"""Longer durations are a mistake, and lead beyond the times that Spark supports."""


def validate_column_names(what: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return column names, given as one string or several; raises ConfigurationError for duplicates."""
    names = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    for name in names:
        if not isinstance(name, str) or not name.strip() or name.startswith("__"):
            raise ConfigurationError(
                f"{what} names the column {name!r}: expected a non-empty name that does not begin with '__'.",
                "Name a column of the records; names with '__' are reserved.",
                column=name,
            )
    double = first_duplicate(names)
    if double:
        raise ConfigurationError(f"{what} names column {double!r} twice.", "Name it once.", column=double)
    return names


def validate_partition_count(what: str, value: int | None) -> int | None:
    """Return a valid partition count, or None where none is given."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _PARTITIONS:
        raise ConfigurationError(
            f"{what} is {value!r}: expected a whole number from 1 to {_PARTITIONS:,}.",
            "Pass the number of partitions.",
            argument="partitions",
        )
    return value


def first_duplicate(names: Sequence[str]) -> str | None:
    """Return the first duplicate name, ignoring case as Spark does, or None."""
    if len(set(map(str.lower, names))) == len(names):
        return None
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            return name
        seen.add(name.lower())
    return None


def function_label(function: Callable[..., object]) -> str:
    """Return the label of a function in plans: "plus_one()"."""
    return f"{getattr(function, '__name__', type(function).__name__)}()"
