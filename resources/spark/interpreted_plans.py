"""Lets Spark interpret the plans of few rows: compiling one takes longer than it takes them to pass.

Spark writes, compiles and loads some classes for each stage of a plan that it has not met before, as those of a
session's first batch, and where a literal has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from dagster_adjunct.resources.spark.given_session import IN_PROCESS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FEW_ROWS = 100_000
"""So many rows, at most, are worked on sooner by a plan that is interpreted."""
_COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
_INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


@contextmanager
def interpreted_plans(session: SparkSession) -> Iterator[None]:
    """Have what this session plans meanwhile interpreted; a session that was given other settings keeps them."""
    if any(session.conf.get(name) != value for name, value in _COMPILED.items()):
        yield
        return
    _set(session, _INTERPRETED)
    try:
        yield
    except BaseException:
        with suppress(Exception):  # of a session that has died the first error counts
            _set(session, _COMPILED)
        raise
    _set(session, _COMPILED)


def interpreted_if_few(spark: Callable[[], SparkSession], rows: int | None) -> AbstractContextManager[None]:
    """Have plans interpreted that are known to work on so few rows; `spark` is not asked for a session otherwise."""
    few = rows is not None and rows <= FEW_ROWS and spark is not IN_PROCESS
    return interpreted_plans(spark()) if few else nullcontext()


def _set(session: SparkSession, settings: dict[str, str]) -> None:
    for name, value in settings.items():
        session.conf.set(name, value)
