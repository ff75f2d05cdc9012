"""Columns of Spark by their exact names, whatever characters these have; literals for them, and the hash of a row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column


def quote_name(name: str) -> str:
    """Return a column's name as Spark SQL reads it."""
    return f"`{name.replace('`', '``')}`"


def quote_text(text: str) -> str:
    """Return a text as Spark SQL reads it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def named_column(name: str) -> Column:
    """Return the column of this name; its parts are no path into a struct."""
    from pyspark.sql import functions as F

    return F.col(quote_name(name))


def row_hash(names: Iterable[str]) -> Column:
    """Return a 64-bit hash of these columns in their places: Spark's xxhash64 of (place, value) of all that are there.

    Spark's hash passes over nulls, so that (1, null) and (null, 1) would look the same. A value whose place is the last
    one may be left out where it is null.
    """
    from pyspark.sql import functions as F

    # The place only beside a value: with (0, 1, 1) for both, a 1 that moved would be taken for a place.
    pairs = [
        f"CASE WHEN {quote_name(name)} IS NOT NULL THEN {place} END, {quote_name(name)}"
        for place, name in enumerate(names)
    ]
    return F.expr(f"xxhash64({', '.join(pairs)})")  # one request to Spark's JVM, in place of four a column


def bigint_array(values: Iterable[int]) -> Column:
    """Return an array of bigint as one literal: Spark folds the text, so neither plan nor parser grows."""
    from pyspark.sql import functions as F

    return F.split(F.lit(",".join(map(str, values))), ",").cast("array<bigint>")
