"""What users pass as the session: a Spark session, a function that starts one when it is needed,
or IN_PROCESS.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, final

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.spark.jvm import has_spark_context

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@final
class InProcess:
    """The class of IN_PROCESS, which is passed instead of a session: rows are processed in this
    process, in memory.

    It is meant for small datasets. Code that needs Spark calls it, as it would call a function that
    starts a session, and gets a ConfigurationError.
    """

    __slots__ = ()

    def __call__(self) -> SparkSession:
        """Raise ConfigurationError, because the caller needs a session."""
        problem = "this needs a Spark session, but IN_PROCESS, or the master none, was given."
        step = (
            "Pass a session, or open one with session_scope() and another master than none. Small"
            ' batches of an application with engine="auto" need none.'
        )
        raise ConfigurationError(problem, step, argument="spark")

    def __repr__(self) -> str:
        return "IN_PROCESS"

    def __reduce__(self) -> str:
        return "IN_PROCESS"


IN_PROCESS: Final = InProcess()
# This master means IN_PROCESS: in ADJUNCT_SPARK_MASTER, in commands and in SparkResource.
_NO_MASTER = "none"
# By setting: the value to set, and all values, in lower case, that mean the same.
_REQUIRED = {
    "spark.sql.session.timeZone": (
        "UTC",
        frozenset(
            {"utc", "etc/utc", "gmt", "etc/gmt", "z", "+00:00", "gmt+0", "utc+0", "utc+00:00"}
        ),
    ),
    "spark.sql.ansi.enabled": ("true", frozenset({"true"})),
}


def is_in_process(master: str | None) -> bool:
    """Whether this master, or if it is None that in ADJUNCT_SPARK_MASTER, is "none": no session
    is to be started.
    """
    return (master or os.environ.get("ADJUNCT_SPARK_MASTER")) == _NO_MASTER


def has_running_session() -> bool:
    """Return whether this process has a Spark session already, without loading PySpark."""
    connect = sys.modules.get("pyspark.sql.connect.session")
    if connect is not None and connect.SparkSession.getActiveSession() is not None:
        return True
    return has_spark_context()


def is_remote(used: SparkSession | DataFrame) -> bool:
    """Return whether this is a session of Spark Connect, or a frame of one: its driver is in
    another process.
    """
    return type(used).__module__.startswith("pyspark.sql.connect.")


def identify_session(session: SparkSession) -> str:
    """Return an id of what shares the tables that the session creates.

    That is the session itself with Spark Connect, where it has a database of its own, or else the
    whole application.
    """
    used: Any = session
    return str(used.session_id if is_remote(session) else used.sparkContext.applicationId)


def resolve_session(spark: SparkSession | Callable[[], SparkSession]) -> SparkSession:
    """Return the session that was passed, or that the passed function returns, once its settings
    are checked.

    Raises ConfigurationError for anything else, and for a session without the settings
    (`require_settings`).
    """
    session: Any = spark() if callable(spark) else spark
    if not hasattr(session, "createDataFrame"):
        problem = f"spark is {session!r}: expected a SparkSession, or a function that returns one."
        raise ConfigurationError(
            problem, "Pass a session, or open one with session_scope().", argument="spark"
        )
    return require_settings(session)


def require_settings(session: SparkSession) -> SparkSession:
    """Return the session if its time zone is UTC and ANSI mode is on; otherwise raise
    ConfigurationError.

    With other settings, Spark would cast dates, timestamps and strings, and compare numbers,
    differently from the code that computes without Spark, and sums that overflow would be null.
    """
    for name, (wanted, accepted) in _REQUIRED.items():
        found = session.conf.get(name)
        if (found or "").lower() not in accepted:
            problem = f"the Spark session has {name}={found}: expected {wanted}."
            step = (
                f'Call spark.conf.set("{name}", "{wanted}"), or set it where the session is built.'
            )
            raise ConfigurationError(problem, step, setting=name)
    return session


def session_factory(spark: SparkSession | Callable[[], SparkSession]) -> Callable[[], SparkSession]:
    """Return a function that returns the session, and starts it only when it is called.

    An existing session is checked at once (`require_settings`), a new one when it is started.
    """
    if isinstance(spark, InProcess):
        return spark  # raises when it is called
    if not callable(spark):
        require_settings(spark)
        return lambda: spark
    return lambda: require_settings(spark())
