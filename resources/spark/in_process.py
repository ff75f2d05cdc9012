"""The session that users pass: a Spark session, a function that starts one when it is needed, or IN_PROCESS."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, final

from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@final
class InProcess:
    """Passed in place of a session: there is none, and rows are processed in this process, in memory.

    That is for small datasets. Code that needs Spark calls it like any function that starts a session, which raises
    ConfigurationError.
    """

    __slots__ = ()

    def __call__(self) -> SparkSession:
        """Raise ConfigurationError: this needs a session."""
        problem = "this needs a Spark session, but IN_PROCESS, or the master none, was given."
        step = "Pass a session, or open one with session_scope() and another master than none. Small batches of an "
        step += 'application with engine="auto" need none.'
        raise ConfigurationError(problem, step, argument="spark")

    def __repr__(self) -> str:
        return "IN_PROCESS"

    def __reduce__(self) -> str:
        return "IN_PROCESS"


IN_PROCESS: Final = InProcess()
# The master that means IN_PROCESS, in ADJUNCT_SPARK_MASTER, in commands and in SparkResource.
_NO_MASTER = "none"
_REQUIRED = {
    "spark.sql.session.timeZone": (
        "UTC", frozenset({"utc", "etc/utc", "gmt", "etc/gmt", "z", "+00:00", "gmt+0", "utc+0", "utc+00:00"}),
    ),
    "spark.sql.ansi.enabled": ("true", frozenset({"true"})),
}  # fmt: skip


def is_in_process(master: str | None) -> bool:
    """Whether this master, or if it is None that of the environment, means that there is no session."""
    return (master or os.environ.get("ADJUNCT_SPARK_MASTER")) == _NO_MASTER


def has_running_session() -> bool:
    """Return whether this process has a Spark session already, without loading PySpark."""
    pyspark, connect = sys.modules.get("pyspark"), sys.modules.get("pyspark.sql.connect.session")
    if connect is not None and connect.SparkSession.getActiveSession() is not None:
        return True
    return pyspark is not None and pyspark.SparkContext._active_spark_context is not None


def is_remote(used: SparkSession | DataFrame) -> bool:
    """Return whether this is a session of Spark Connect, or a frame of one: its driver is in another process."""
    return type(used).__module__.startswith("pyspark.sql.connect.")


def identify_session(session: SparkSession) -> str:
    """Return an id of the session, or of its application where that has the tables of all its sessions."""
    used: Any = session
    return str(used.session_id if is_remote(session) else used.sparkContext.applicationId)


def resolve_session(spark: SparkSession | Callable[[], SparkSession]) -> SparkSession:
    """Return the session, started if a function that starts it is given, with the settings that it needs."""
    session = spark() if callable(spark) else spark
    if not hasattr(session, "createDataFrame"):
        problem = f"spark is {session!r}: expected a SparkSession, or a function that returns one."
        raise ConfigurationError(problem, "Pass a session, or open one with session_scope().", argument="spark")
    return require_settings(session)


def require_settings(session: SparkSession) -> SparkSession:
    """Return the session if its time zone is UTC and its SQL is ANSI's, or else raise ConfigurationError.

    Otherwise Spark would cast dates, timestamps and strings, and compare numbers, differently from the code that
    computes without Spark, and sums that overflow would be null.
    """
    for name, (wanted, accepted) in _REQUIRED.items():
        found = session.conf.get(name)
        if (found or "").lower() not in accepted:
            problem = f"the Spark session has {name}={found}: expected {wanted}."
            step = f'Call spark.conf.set("{name}", "{wanted}"), or set it where the session is built.'
            raise ConfigurationError(problem, step, setting=name)
    return session


def session_factory(spark: SparkSession | Callable[[], SparkSession]) -> Callable[[], SparkSession]:
    """Return a function that returns the session, and starts it only when it is called.

    An existing session is checked at once (`require_settings`), a new one when it is started.
    """
    if isinstance(spark, InProcess):
        return spark
    if not callable(spark):
        require_settings(spark)
        return lambda: spark
    return lambda: require_settings(spark())
