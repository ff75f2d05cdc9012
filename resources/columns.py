"""Columns of Spark by their exact names, whatever characters these have; and literals for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column


def quoted(name: str) -> str:
    """Return a column's name as Spark SQL reads it."""
    return f"`{name.replace('`', '``')}`"


def column(name: str) -> Column:
    """Return the column of this name; its parts are no path into a struct."""
    from pyspark.sql import functions as F

    return F.col(quoted(name))


def bigints(values: Iterable[int]) -> Column:
    """Return an array of bigint as one literal: Spark folds the text, so neither plan nor parser grows."""
    from pyspark.sql import functions as F

    return F.split(F.lit(",".join(map(str, values))), ",").cast("array<bigint>")
