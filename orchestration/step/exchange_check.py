"""Checks in Spark's physical plan that joins proven to be co-partitioned really need no exchange."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import PlanningError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger(__name__)
_EXCHANGE = "ShuffleExchange"
_JOIN = "SortMergeJoin"
_COUNTS = "CollectMetrics"


@dataclass(frozen=True, slots=True)
class ProvenJoin:
    """A join that the planner has proven to need no exchange: its operator's id, and the dataset."""

    operator: str
    dataset: str


def check_joins(frame: DataFrame, joins: Mapping[str, ProvenJoin]) -> set[str]:
    """Warn of each of the joins whose dataset is shuffled, and return those that the plan of `frame` has.

    `joins` are by the names under which their records are counted. Spark plans the records once, whatever the number of
    joins. With ADJUNCT_STRICT_PLANS it fails instead of warning: the answer is right either way; what is lost is speed,
    and the promise that the planner made.
    """
    executed = frame._jdf.queryExecution().executedPlan()
    met: set[str] = set()
    for node in _nodes(executed):
        if not node.nodeName().startswith(_COUNTS) or (name := node.name()) not in joins:
            continue
        met.add(name)
        join = _topmost_join(node)
        if join is not None and any(map(_is_exchange, _nodes(join.children().apply(1)))):
            _tell(joins[name], executed)
    return met


def _tell(join: ProvenJoin, executed: Any) -> None:
    error = PlanningError(
        f"{join.operator}: Spark shuffles dataset {join.dataset}, which the plan proved to be partitioned alike.",
        "Compare the types of the join's keys on both sides, and see the physical plan.",
        dataset=join.dataset,
        operator=join.operator,
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


def _is_exchange(node: Any) -> bool:
    return bool(node.nodeName().startswith(("Exchange", _EXCHANGE)))


def _nodes(top: Any) -> Iterator[Any]:
    """Yield the nodes of a physical plan, without what is broadcast."""
    waiting = [top]
    while waiting:
        node = waiting.pop()
        if node.nodeName().startswith("BroadcastExchange"):
            continue
        yield node
        children = node.children()
        waiting.extend(children.apply(index) for index in range(children.size()))
