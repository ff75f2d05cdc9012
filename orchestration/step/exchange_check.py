"""Checks in Spark's physical plan that a join proven to be co-partitioned really needs no exchange."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import PlanningError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger(__name__)
_EXCHANGE = "ShuffleExchange"
_JOIN = "SortMergeJoin"


def check_join(joined: DataFrame, operator: str, dataset: str) -> None:
    """Warn when the dataset's side of the topmost join is shuffled; fail where ADJUNCT_STRICT_PLANS is set.

    The answer is right either way; what is lost is speed, and the promise that the planner made.
    """
    executed = joined._jdf.queryExecution().executedPlan()
    join = _topmost_join(executed)
    if join is None or not _has_exchange(join.children().apply(1)):
        return
    error = PlanningError(
        f"{operator}: Spark shuffles dataset {dataset}, which the plan proved to be partitioned alike.",
        "Compare the types of the join's keys on both sides, and see the physical plan.",
    )
    if os.environ.get("ADJUNCT_STRICT_PLANS"):
        raise error
    _log.warning("%s\n%s", error, executed.toString())


def _topmost_join(node: Any) -> Any:
    while not node.nodeName().startswith(_JOIN):
        children = node.children()
        if children.size() != 1:
            return None
        node = children.apply(0)
    return node


def _has_exchange(node: Any) -> bool:
    name = node.nodeName()
    if name.startswith(("Exchange", _EXCHANGE)):
        return True
    if name.startswith("BroadcastExchange"):
        return False
    children = node.children()
    return any(_has_exchange(children.apply(index)) for index in range(children.size()))
