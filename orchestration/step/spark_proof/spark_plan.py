"""Reads Spark's physical plan of a batch's records: what moves, how joins are done, and where records lie in the end.

Frames are marked after each operator, so that what is found in a plan has an operator's name: that of the nearest mark
above it. The marks are metrics of Spark's that nobody reads; a rehearsal has them, and no batch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Side = Literal["stream", "dataset"]
_MARK = "adjunct "
_ATTRIBUTE = re.compile(r"#\d+L?")


@dataclass(frozen=True, slots=True)
class FoundExchange:
    """Records that Spark moves for an operator, into `partitioning` ("hashpartitioning(k, 4)"); of a join, a `side`."""

    operator: str
    partitioning: str
    side: Side | None = None


@dataclass(frozen=True, slots=True)
class FoundJoin:
    """How Spark joins for an operator ("SortMergeJoin"), and how it reads the dataset's side.

    `buckets` is the number of them that are read as they are stored, None where it is no bucketed scan; `broadcast`,
    whether every task gets all of it.
    """

    operator: str
    kind: str
    buckets: int | None = None
    broadcast: bool = False


@dataclass(frozen=True, slots=True)
class SparkPlan:
    """What one physical plan does for these operators, and the partitioning of the records in the end."""

    operators: frozenset[str]
    joins: Mapping[str, FoundJoin]
    exchanges: tuple[FoundExchange, ...]
    partitioning: str


def marked(operator: str, frame: DataFrame) -> DataFrame:
    """Return the same records, with the operator's name in Spark's plans of them."""
    from pyspark.sql import functions as F

    return frame.observe(f"{_MARK}{operator}", F.count(F.lit(1)))


def plan_of(operator: str, frame: DataFrame, joins: Collection[str]) -> SparkPlan:
    """Return what Spark plans for records that arrive at an operator, or are kept after it; no job is run.

    `joins` are the operators that join a dataset: of these, the topmost join is looked at.
    """
    top = frame._jdf.queryExecution().executedPlan()
    joins_found: dict[str, FoundJoin] = {}
    exchanges: list[FoundExchange] = []
    operators = {operator}
    waiting: list[tuple[Any, str, Side | None]] = [(top, operator, None)]
    while waiting:
        node, owner, side = waiting.pop()
        name = node.nodeName()
        sides: tuple[Side | None, ...] = (side, side)
        if name.startswith("CollectMetrics"):
            if node.name().startswith(_MARK):
                owner, sides = node.name().removeprefix(_MARK), (None,)
                operators.add(owner)
        elif name.startswith(("BroadcastExchange", "ReusedExchange")) and _is_broadcast(name, node):
            if side == "dataset" and owner in joins_found:
                joins_found[owner] = _with(joins_found[owner], broadcast=True)
            continue
        elif name.startswith(("Exchange", "ShuffleExchange", "ReusedExchange")):
            exchanges.append(FoundExchange(owner, _words(node.outputPartitioning()), side))
        elif "Join" in name and owner in joins and owner not in joins_found:
            joins_found[owner] = FoundJoin(owner, name.partition("(")[0])
            sides = ("stream", "dataset")
        elif (
            side == "dataset"
            and owner in joins_found
            and joins_found[owner].buckets is None
            and _is_bucketed(name, node)
        ):
            joins_found[owner] = _with(joins_found[owner], buckets=node.outputPartitioning().numPartitions())
        children = node.children()
        for index in range(children.size()):
            waiting.append((children.apply(index), owner, sides[min(index, len(sides) - 1)]))
    return SparkPlan(frozenset(operators), joins_found, tuple(exchanges), _words(top.outputPartitioning()))


def _is_broadcast(name: str, node: Any) -> bool:
    return not name.startswith("Reused") or node.child().nodeName().startswith("Broadcast")


def _is_bucketed(name: str, node: Any) -> bool:
    if not name.startswith("Scan ") or node.getClass().getSimpleName() != "FileSourceScanExec":
        return False
    return bool(node.bucketedScan())


def _with(join: FoundJoin, *, buckets: int | None = None, broadcast: bool = False) -> FoundJoin:
    return FoundJoin(
        join.operator, join.kind, join.buckets if buckets is None else buckets, join.broadcast or broadcast
    )


def _words(partitioning: Any) -> str:
    return _ATTRIBUTE.sub("", partitioning.toString())
