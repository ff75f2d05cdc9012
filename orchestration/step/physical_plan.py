"""Compares an application's plan with Spark's physical plans.

A dry run compiles every operator over the real inputs and marks its records with a metric, so that
each exchange and join in Spark's plan has the name of the nearest operator above it. Batches have
no such marks.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.assets.declaration.dataset import LocalTable
from dagster_adjunct.orchestration.planner.planned import PlannedOperator
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.schemas.schema import COPY
from dagster_adjunct.resources.spark.in_process import is_remote
from dagster_adjunct.resources.spark.jvm import cached_plan, executed_plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_log = logging.getLogger("adjunct.step")
# Exchanges in DataFrames; those of other reasons happen when records are written.
_IN_FRAMES = ("partition_by", "auto_repartition")


@dataclass(frozen=True, slots=True)
class JoinProof:
    """How Spark executes one join: the kind of join, how it reads the dataset, and the number of
    exchanges on each side.
    """

    operator: str
    dataset: str
    kind: str
    reads: str
    stream_exchanges: int
    dataset_exchanges: int


@dataclass(frozen=True, slots=True)
class PhysicalProof:
    """The result of comparing Spark's physical plans with the application's plan.

    `differences` are exchanges that the plan does not list, as errors that say what to do. `notes`
    are what the plan makes no claim about, such as a function that repartitions records, or a
    promise that Spark can't check. `states` are the state tables that a batch writes.
    """

    joins: tuple[JoinProof, ...] = ()
    differences: tuple[PlanningError, ...] = ()
    notes: tuple[str, ...] = ()
    states: tuple[LocalTable, ...] = ()

    def report_differences(self) -> None:
        """Log a warning for each difference; with ADJUNCT_STRICT_PLANS raise PlanningError for the
        first.

        Results are right either way; only the speed that the plan promises is lost.
        """
        for difference in self.differences:
            if os.environ.get("ADJUNCT_STRICT_PLANS"):
                raise difference
            _log.warning("%s", difference)

    def to_json(self) -> dict[str, Any]:
        """Return the proof as JSON values."""
        differences = []
        for found in self.differences:
            difference = {"operator": found.operator, "problem": found.problem}
            difference |= {"next_step": found.next_step, "dataset": found.dataset}
            differences.append(difference)
        joins = [asdict(join) for join in self.joins]
        return {"joins": joins, "differences": differences, "notes": list(self.notes)}

    def render(self) -> str:
        """Return the proof as plain text."""
        lines = ["What Spark is going to do"]
        for join in self.joins:
            moved = (
                f"exchanges: {join.stream_exchanges} of records, {join.dataset_exchanges} of the"
                " dataset"
            )
            lines.append(
                f"  {join.operator}  {join.kind} with {join.dataset}, {join.reads}; {moved}"
            )
        lines += [f"  {note}" for note in self.notes]
        lines += [
            f"  NOT IN THE PLAN: {difference.problem} {difference.next_step}"
            for difference in self.differences
        ]
        if not self.differences:
            lines.append("  No exchange that the plan does not list.")
        return "\n".join(lines)


def _check_write_placement(
    operator: str, source: PlannedOperator, on: Mapping[str, str], spark_plan: SparkPlan
) -> str | None:
    """Return a note on records that are written without an exchange, if Spark can't confirm their
    partitioning; None if it does.

    `source` is the planned operator that the records come from, and `on` gives the columns of a
    table's key that their values are written to. Raises PlanningError if the records are certainly
    partitioned differently: writing them would fail, or lose the order of a key's records.
    """
    by = ", ".join(source.partitioned_by)
    expected = f"hashpartitioning({by}, {source.partitions})"
    written_by = ", ".join(on.get(name, name) for name in source.partitioned_by)
    written = f"hashpartitioning({written_by}, {source.partitions})"
    found = spark_plan.partitioning
    if source.partitions == 1 and "singlepartition" in found.lower():
        return None
    if expected in found or written in found:
        return None
    if found in ("UnknownPartitioning(0)", f"UnknownPartitioning({source.partitions})"):
        return (
            f"{operator}: that records are partitioned by {expected} is a promise that Spark can't"
            " check."
        )
    moving = []
    for name, moved in spark_plan.exchanges.items():
        if any(exchange.partitioning in found for exchange in moved):
            moving.append(name)
    raise PlanningError(
        f"{operator}: the plan writes records without a shuffle, as already partitioned by"
        f" {expected}, but after {', '.join(moving) or source.id} their partitioning is {found}.",
        "If a function shuffles records, do not use it as a filter, and remove its"
        " keeps_partitioning; then call partition_by after it.",
        operator=operator,
    )


Side = Literal["stream", "dataset"]
_JOIN_NAMES = {"SortMergeJoin": "sort-merge join", "BroadcastHashJoin": "broadcast join"}
_MARK = "adjunct "
_ATTRIBUTE = re.compile(r"#\d+L?")


@dataclass(slots=True)
class SparkJoin:
    """How Spark joins for an operator ("SortMergeJoin"), and how it reads the dataset's side.

    `buckets` is the number of buckets of a bucketed scan, else None; `broadcast` says whether every
    task gets all of it.
    """

    kind: str
    buckets: int | None = None
    broadcast: bool = False

    def describe_scan(self) -> str:
        """Return in words how the dataset's side is read: broadcast, by buckets, or neither."""
        if self.broadcast:
            return "all of it in every task"
        if self.buckets is None:
            return "not by buckets"
        return f"a bucketed scan of {self.buckets}"


@dataclass(frozen=True, slots=True)
class SparkExchange:
    """An exchange in Spark's plan: into which partitioning ("hashpartitioning(k, 4)"), and on which
    side of a join, if any.
    """

    partitioning: str
    side: Side | None


@dataclass(frozen=True, slots=True)
class SparkPlan:
    """The joins and exchanges of one physical plan by operator, and the partitioning of its result.

    Operators without an exchange have an empty list.
    """

    joins: Mapping[str, SparkJoin]
    exchanges: Mapping[str, list[SparkExchange]]
    partitioning: str


def mark_operator(operator: str, frame: DataFrame) -> DataFrame:
    """Return the same records, marked with the operator's name in Spark's plans."""
    return frame.observe(f"{_MARK}{operator}", F.count(F.lit(1)))


def inspect_spark_plan(
    operator: str, frame: DataFrame, joins: Collection[str], *, persisted: bool = False
) -> SparkPlan:
    """Return Spark's plan for records that arrive at an operator; no job runs.

    `joins` are the operators that join a dataset; the topmost join of each is recorded. For a frame
    that was just `persisted`, it is the plan that Spark has made to compute its rows.
    """
    top = cached_plan(frame) if persisted else executed_plan(frame)
    reader = _PlanReader(joins, {operator: []})
    waiting = [_PlanNode(top, operator, None)]
    while waiting:
        visited = waiting.pop()
        below = reader.visit(visited)
        if not below.sides:
            continue
        children = visited.node.children()
        for index in range(children.size()):
            side = below.sides[min(index, len(below.sides) - 1)]
            waiting.append(_PlanNode(children.apply(index), below.owner, side))
    return SparkPlan(reader.found, reader.exchanges, _partitioning_text(top.outputPartitioning()))


@dataclass(frozen=True, slots=True)
class _PlanNode:
    """A node of Spark's plan that works for the operator `owner`, on a side of its join, if any."""

    node: Any
    owner: str
    side: Side | None


@dataclass(frozen=True, slots=True)
class _Below:
    """The owner of the nodes below a node, and the side of each of them.

    The last side is that of all further ones. Without a side they are not visited.
    """

    owner: str
    sides: tuple[Side | None, ...]


@dataclass(frozen=True, slots=True)
class _PlanReader:
    """Collects joins and exchanges from the nodes of a plan; `joins` are the operators that join a
    dataset.
    """

    joins: Collection[str]
    exchanges: dict[str, list[SparkExchange]]
    found: dict[str, SparkJoin] = field(default_factory=dict)

    def visit(self, visited: _PlanNode) -> _Below:
        """Record what a node does for its owner; return for whom the nodes below work."""
        node = visited.node
        owner = visited.owner
        side = visited.side
        name = node.nodeName()
        if name.startswith("CollectMetrics") and node.name().startswith(_MARK):
            owner = node.name().removeprefix(_MARK)
            self.exchanges.setdefault(owner, [])
            return _Below(owner, (None,))
        if name.startswith(("BroadcastExchange", "ReusedExchange")):
            self._note_broadcast(name, node, owner, side)
            return _Below(owner, ())
        if name.startswith(("Exchange", "ShuffleExchange")):
            partitioning = _partitioning_text(node.outputPartitioning())
            self.exchanges[owner].append(SparkExchange(partitioning, side))
        elif "Join" in name and owner in self.joins and owner not in self.found:
            self.found[owner] = SparkJoin(name.partition("(")[0])
            return _Below(owner, ("stream", "dataset"))
        else:
            self._note_buckets(name, node, owner, side)
        return _Below(owner, (side,))

    def _note_broadcast(self, name: str, node: Any, owner: str, side: Side | None) -> None:
        """Record that the dataset's side of the owner's join is broadcast, if this node does so."""
        join = self.found.get(owner)
        if join is None or side != "dataset":
            return
        if name.startswith("Broadcast") or node.child().nodeName().startswith("Broadcast"):
            join.broadcast = True

    def _note_buckets(self, name: str, node: Any, owner: str, side: Side | None) -> None:
        """Record the buckets of the first bucketed scan on the dataset's side of the
        owner's join.
        """
        join = self.found.get(owner)
        if join is None or side != "dataset" or join.buckets is not None:
            return
        if _is_bucketed(name, node):
            join.buckets = node.outputPartitioning().numPartitions()


def _is_bucketed(name: str, node: Any) -> bool:
    """Whether a node scans files by buckets."""
    if not name.startswith("Scan ") or node.getClass().getSimpleName() != "FileSourceScanExec":
        return False
    return bool(node.bucketedScan())


def _partitioning_text(partitioning: Any) -> str:
    """Return a partitioning as text, with plain names of columns."""
    return _ATTRIBUTE.sub("", partitioning.toString()).replace(COPY, "")


_UNSEEN = "Spark Connect does not show its clients the plan: joins and shuffles were not compared."


class PlanInspector:
    """Compares Spark's physical plans for the records of a batch, each operator once, with the
    application's plan.
    """

    def __init__(self, planned: PlannedBatch) -> None:
        self._planned = planned
        self._inspected: set[str] = set()
        self._joins: list[JoinProof] = []
        self._differences: list[PlanningError] = []
        self._notes: list[str] = []
        self._datasets: dict[str, str] = {}
        for operator in planned.operators:
            match = operator.spec.match
            if match is not None and match.dataset is not None:
                self._datasets[operator.id] = match.dataset

    def proof(self, states: Iterable[LocalTable]) -> PhysicalProof:
        """Return what was found so far; `states` are the state tables that a batch writes."""
        return PhysicalProof(
            tuple(self._joins), tuple(self._differences), tuple(self._notes), tuple(states)
        )

    def inspect_kept(self, operator: str, frame: DataFrame) -> None:
        """Inspect records that were just cached. Spark's plans of records that are made of them
        begin at the cached ones, so this plan is seen only now.
        """
        self._inspect(operator, frame, persisted=True)

    def inspect(self, operator: str, frame: DataFrame, *, placed: bool) -> None:
        """Inspect records that are written; if they have to be `placed`, check that they are in the
        output's partitions.
        """
        spark_plan = self._inspect(operator, frame)
        if spark_plan is None or not placed:
            return
        source = self._planned.planned[self._planned.operator_before(operator)]
        if operator not in self._planned.exchanges and source.partitioned_by:
            send = self._planned.app.operator(operator).spec.send
            on = {} if send is None else dict(send.on)
            note = _check_write_placement(operator, source, on, spark_plan)
            if note is not None:
                self._notes.append(note)

    def _inspect(
        self, operator: str, frame: DataFrame, *, persisted: bool = False
    ) -> SparkPlan | None:
        """Compare Spark's plan for records that arrive at an operator with the application's plan,
        and return it.

        Returns None with Spark Connect, whose clients do not get Spark's plan.
        """
        if is_remote(frame):
            if _UNSEEN not in self._notes:
                self._notes.append(_UNSEEN)
            return None
        spark_plan = inspect_spark_plan(operator, frame, self._datasets, persisted=persisted)
        new = spark_plan.exchanges.keys() - self._inspected
        for name in sorted(new):
            self._inspected.add(name)
            self._compare(name, spark_plan.exchanges[name], spark_plan.joins.get(name))
        return spark_plan

    def _compare(
        self, operator: str, moved: Sequence[SparkExchange], join: SparkJoin | None
    ) -> None:
        """Compare the join and the exchanges of one operator with the application's plan."""
        dataset = self._datasets.get(operator)
        of_dataset = [each.partitioning for each in moved if each.side == "dataset"]
        of_records = [each.partitioning for each in moved if each.side != "dataset"]
        if dataset is not None and join is not None:
            proof = JoinProof(
                operator,
                dataset,
                kind=_JOIN_NAMES.get(join.kind, join.kind),
                reads=join.describe_scan(),
                stream_exchanges=sum(each.side == "stream" for each in moved),
                dataset_exchanges=len(of_dataset),
            )
            self._joins.append(proof)
        if dataset is not None and of_dataset:
            problem = (
                f"{operator}: Spark shuffles dataset {dataset}, which the plan proved to be"
                f" co-partitioned ({', '.join(of_dataset)})."
            )
            step = (
                "Compare the types of the join's keys and the number of partitions on both sides."
            )
            difference = PlanningError(problem, step, operator=operator, dataset=dataset)
            self._differences.append(difference)
        listed = self._planned.app.operator(operator).spec.moves
        for exchange in self._planned.exchanges.get(operator, ()):
            if exchange.reason in _IN_FRAMES:
                listed += 1
        self._note_unlisted(operator, dataset, of_records[listed:])

    def _note_unlisted(self, operator: str, dataset: str | None, unlisted: Sequence[str]) -> None:
        """Record exchanges of records that the plan does not list: as a difference or, where the
        plan makes no claim about the records' partitioning, as a note.
        """
        if not unlisted:
            return
        times = "once" if len(unlisted) == 1 else f"{len(unlisted)} times"
        problem = (
            f"{operator}: Spark shuffles the records {times} more than the plan lists"
            f" ({', '.join(unlisted)})"
        )
        if dataset is None and not self._planned.required_partitioning(operator):
            self._notes.append(
                f"{problem}; the plan makes no claim about their partitioning after it."
            )
            return
        step = (
            "Shuffle them with partition_by, which the plan lists; a function must leave"
            " partitioned records in place."
        )
        self._differences.append(
            PlanningError(f"{problem}.", step, operator=operator, dataset=dataset)
        )
