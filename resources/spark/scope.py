"""A Spark session for as long as a block of code runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from dagster_adjunct.resources.spark.in_process import IN_PROCESS, has_running_session, is_in_process
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@validated
@contextmanager
def session_scope(
    *,
    master: str | None = None,
    lake_url: str | None = None,
    quick: bool | None = None,
    on_start: Callable[[str], None] = lambda text: None,
) -> Iterator[Callable[[], SparkSession]]:
    """Yield a function that returns the session; what never calls it never waits for Spark.

    For the master "none" (also in ADJUNCT_SPARK_MASTER) it yields IN_PROCESS: nothing is ever started.
    `quick` (default: as ADJUNCT_SPARK_QUICK says, else not) is for short runs and small batches: the JVM compiles less,
    and maps the classes that an earlier one has loaded. The first one of a machine keeps them, some seconds at its end.
    A session that runs already is used, and not stopped at the end. `on_start` is called with a line of text before a
    session is started, which takes 6-10 s.
    """
    if is_in_process(master):
        yield IN_PROCESS
        return
    owned: list[SparkSession] = []

    @cache
    def spark() -> SparkSession:
        from dagster_adjunct.resources.spark.session import new_session

        is_new = not has_running_session()
        if is_new:
            on_start("starting Spark")
        session = new_session(master=master, lake_url=lake_url, quick=quick, keep_classes=is_new)
        owned.extend([session] if is_new else [])
        return session

    try:
        yield spark
    finally:
        for session in owned:
            from dagster_adjunct.resources.spark.session import stop_session

            stop_session(session)
