"""A Spark session as users give it: the session itself, or a function that starts or returns it when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def session_of(spark: SparkSession | Callable[[], SparkSession]) -> SparkSession:
    """Return the session, started where only a function that starts it is given."""
    session = spark() if callable(spark) else spark
    if not hasattr(session, "createDataFrame"):
        raise ConfigurationError(
            f"spark is {session!r}: expected a SparkSession, or a function that returns one.",
            "Pass the session, or what session_scope() gives.",
            argument="spark",
        )
    return session


def starter_of(spark: SparkSession | Callable[[], SparkSession]) -> Callable[[], SparkSession]:
    """Return a function that returns the session: nothing is started before it is called."""
    return spark if callable(spark) else lambda: spark
