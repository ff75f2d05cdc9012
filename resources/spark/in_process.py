"""A Spark session as users give it: the session itself, a function that starts it when it is needed, or none."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@final
class InProcess:
    """Given for a session, says that there is none: rows are worked on in this process, all of them in memory.

    That is for small datasets. What can only be done by Spark calls it like any function that gives a session, and
    is refused.
    """

    __slots__ = ()

    def __call__(self) -> SparkSession:
        """Raise ConfigurationError: this needs a session."""
        raise ConfigurationError(
            "this needs a Spark session, and there is none: IN_PROCESS, or the master none, was given.",
            "Pass a session, or what session_scope() gives for another master than none.",
            argument="spark",
        )

    def __repr__(self) -> str:
        return "IN_PROCESS"

    def __reduce__(self) -> str:
        return "IN_PROCESS"


IN_PROCESS: Final = InProcess()
# The master that stands for it, in ADJUNCT_SPARK_MASTER, in commands and in SparkResource.
_NO_MASTER = "none"
_ZONE = "spark.sql.session.timeZone"
_UTC = frozenset({"utc", "etc/utc", "gmt", "etc/gmt", "z", "+00:00", "gmt+0", "utc+0", "utc+00:00"})


def is_in_process(master: str | None) -> bool:
    """Whether this master, or where it is None that of the environment, says that there is to be no session."""
    return (master or os.environ.get("ADJUNCT_SPARK_MASTER")) == _NO_MASTER


def resolve_session(spark: SparkSession | Callable[[], SparkSession]) -> SparkSession:
    """Return the session, started where only a function that starts it is given."""
    session = spark() if callable(spark) else spark
    if not hasattr(session, "createDataFrame"):
        raise ConfigurationError(
            f"spark is {session!r}: expected a SparkSession, or a function that returns one.",
            "Pass the session, or what session_scope() gives.",
            argument="spark",
        )
    return require_utc(session)


def require_utc(session: SparkSession) -> SparkSession:
    """Return the session, if days begin in it when they do in UTC. Raises ConfigurationError for another time zone.

    Dates would become other times, and times other texts, than everything that reads without Spark makes of them.
    """
    zone = session.conf.get(_ZONE)
    if (zone or "").lower() not in _UTC:
        raise ConfigurationError(
            f"the Spark session has the time zone {zone}: expected UTC, in which dates and texts are times here.",
            f'Set it before: spark.conf.set("{_ZONE}", "UTC"), or where the session is built.',
            setting=_ZONE,
        )
    return session


def session_factory(spark: SparkSession | Callable[[], SparkSession]) -> Callable[[], SparkSession]:
    """Return a function that returns the session: nothing is started before it is called.

    A session that is there is refused at once where `in_utc` refuses it; one that is started, before it is used.
    """
    if isinstance(spark, InProcess):
        return spark
    if not callable(spark):
        require_utc(spark)
        return lambda: spark
    return lambda: require_utc(spark())
