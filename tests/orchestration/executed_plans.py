"""What Spark has executed: the physical plan of each query, as its own account of it tells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def executed_plans(spark: SparkSession) -> Iterator[list[str]]:
    """Fill the list, at the end of the block, with the plans of what was executed in it, in this order."""
    plans: list[str] = []
    mode = spark.conf.get("spark.sql.ui.explainMode")
    before = {execution for execution, _ in _told(spark)}
    spark.conf.set("spark.sql.ui.explainMode", "simple")
    try:
        yield plans
    finally:
        spark.conf.set("spark.sql.ui.explainMode", mode)
        plans += [plan for execution, plan in _told(spark) if execution not in before]


def _told(spark: SparkSession) -> list[tuple[int, str]]:
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    told = spark._jsparkSession.sharedState().statusStore().executionsList()
    executions = [told.apply(number) for number in range(told.size())]
    return sorted((one.executionId(), one.physicalPlanDescription()) for one in executions)
