"""Spark SQL for columns with arbitrary names: quoted names, string literals, and the hash of a row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dagster_adjunct.resources.common import LazyModule

if TYPE_CHECKING:
    import pyspark.sql.functions as F
    from pyspark.sql import Column
else:
    F = LazyModule("pyspark.sql.functions")

__all__ = ["F", "bigint_array", "named_column", "quote_name", "quote_text", "row_hash"]


def quote_name(name: str) -> str:
    """Return a column's name in backticks for Spark SQL."""
    return f"`{name.replace('`', '``')}`"


def quote_text(text: str) -> str:
    """Return a text as a string literal of Spark SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def named_column(name: str) -> Column:
    """Return the column of exactly this name; dots in it are no path into a struct."""
    return F.col(quote_name(name))


def row_hash(names: Iterable[str]) -> Column:
    """Return a 64-bit hash of these columns: Spark's xxhash64 of (position, value) of all that are not null.

    Spark's hash skips nulls, so that (1, null) and (null, 1) would be equal without positions. The last column may be
    left out where it is null.
    """
    # A position only with its value: else (0, 1, 1) would stand for two rows, as a 1 could be value or position.
    pairs = [
        f"CASE WHEN {quote_name(name)} IS NOT NULL THEN {place} END, {quote_name(name)}"
        for place, name in enumerate(names)
    ]
    return F.expr(f"xxhash64({', '.join(pairs)})")  # one request to Spark's JVM instead of four per column


def bigint_array(values: Iterable[int]) -> Column:
    """Return an array of bigint as one string literal, which Spark folds, so that the plan stays small."""
    return F.split(F.lit(",".join(map(str, values))), ",").cast("array<bigint>")
