"""Columns of Spark by their exact names, whatever characters these have."""

from __future__ import annotations

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
