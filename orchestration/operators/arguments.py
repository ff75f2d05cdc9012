"""What users write in the arguments of operators, checked and put into one form."""

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
"""What is longer than a hundred years is a mistake, and ends where Spark's times do."""


def validate_column_names(what: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return column names given as one string or several, each once."""
    names = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    for name in names:
        if not isinstance(name, str) or not name.strip() or name.startswith("__"):
            raise ConfigurationError(
                f"{what} names the column {name!r}: expected a name that does not begin with '__'.",
                "Correct it.",
                column=name,
            )
    double = first_duplicate(names)
    if double:
        raise ConfigurationError(f"{what} names column {double!r} twice.", "Name it once.", column=double)
    return names


def validate_partition_count(what: str, value: int | None) -> int | None:
    """Return a partition count that can be used, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _PARTITIONS:
        raise ConfigurationError(
            f"{what} is {value!r}: expected 1 to {_PARTITIONS:,}.", "Change it.", argument="partitions"
        )
    return value


def first_duplicate(names: Sequence[str]) -> str | None:
    """Return the first name that stands twice, None where none does; Spark's column names ignore case."""
    if len(set(map(str.lower, names))) == len(names):
        return None
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            return name
        seen.add(name.lower())
    return None


def function_label(function: Callable[..., object]) -> str:
    """Return a function as plans show it: "plus_one()"."""
    return f"{getattr(function, '__name__', type(function).__name__)}()"
