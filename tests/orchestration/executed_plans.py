"""What Spark has executed: the physical plan of each query, as its own account of it tells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def executed_plans(spark: SparkSession) -> Iterator[list[str]]:
    """Fill the list, at the end of the block, with the plans of what was executed in it, in this
    order.
    """
    plans: list[str] = []
    mode = spark.conf.get("spark.sql.ui.explainMode")
    newest = next((one.executionId() for one in _newest_first(spark)), -1)
    spark.conf.set("spark.sql.ui.explainMode", "simple")
    try:
        yield plans
    finally:
        spark.conf.set("spark.sql.ui.explainMode", mode)
        executed = takewhile(lambda one: one.executionId() > newest, _newest_first(spark))
        plans += reversed([one.physicalPlanDescription() for one in executed])


def _newest_first(spark: SparkSession) -> Iterator[Any]:
    """Give the queries that Spark remembers: they are many, and asking for each takes a while."""
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    executions = spark._jsparkSession.sharedState().statusStore().executionsList()
    return map(executions.apply, reversed(range(executions.size())))
