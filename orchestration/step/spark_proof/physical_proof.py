"""Compares what Spark is going to do with what the plan promises: joins, exchanges, and where written records lie."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.planner.plans.plan_parts import PlannedOperator
    from dagster_adjunct.orchestration.step.spark_proof.spark_plan import FoundJoin, SparkPlan

_log = logging.getLogger("adjunct.step")
# What the plan lists and a frame has; the others move records as they are written.
_IN_FRAMES = ("partition_by", "auto_repartition")


@dataclass(frozen=True, slots=True)
class JoinProof:
    """One join as Spark does it: how, how the dataset's side is read, and how many exchanges each side has."""

    operator: str
    dataset: str
    kind: str
    reads: str
    stream_exchanges: int
    dataset_exchanges: int


@dataclass(frozen=True, slots=True)
class Difference:
    """What Spark is going to do at an operator and the plan does not list, in words, with what to look at."""

    operator: str
    problem: str
    next_step: str
    dataset: str | None = None


@dataclass(frozen=True, slots=True)
class PhysicalProof:
    """What Spark's physical plans of an application say of its plan.

    `differences` is what they do that is not listed there; `notes` is what the plan claims nothing of, such as a
    function that moves records as it likes, or what rests on a promise that Spark can't see.
    """

    joins: tuple[JoinProof, ...] = ()
    differences: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    def tell(self) -> None:
        """Warn of each difference; with ADJUNCT_STRICT_PLANS raise PlanningError for the first.

        The answer is right either way: what is lost is speed, and the promise that the planner made.
        """
        for difference in self.differences:
            error = PlanningError(
                difference.problem, difference.next_step, operator=difference.operator, dataset=difference.dataset
            )
            if os.environ.get("ADJUNCT_STRICT_PLANS"):
                raise error
            _log.warning("%s", error)

    def to_json(self) -> dict[str, Any]:
        """Return the proof as plain JSON values."""
        return {
            "joins": [{name: getattr(join, name) for name in JoinProof.__slots__} for join in self.joins],
            "differences": [
                {"operator": difference.operator, "problem": difference.problem, "next_step": difference.next_step}
                for difference in self.differences
            ],
            "notes": list(self.notes),
        }

    def render(self) -> str:
        """Return the proof as plain text for people."""
        lines = ["What Spark is going to do"]
        for join in self.joins:
            moved = f"exchanges: {join.stream_exchanges} of records, {join.dataset_exchanges} of the dataset"
            lines.append(f"  {join.operator}  {join.kind} with {join.dataset}, {join.reads}; {moved}")
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  NOT IN THE PLAN: {difference.problem} {difference.next_step}" for difference in self.differences]
        if not self.differences:
            lines.append("  No exchange that the plan does not list.")
        return "\n".join(lines)


class Proof:
    """Collects the physical plans of an application, each operator once, and compares them with its plan."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self._listed = Counter(exchange.operator for exchange in plan.exchanges if exchange.reason in _IN_FRAMES)
        self._claims = {operator.id: operator.partitioned_by for operator in plan.operators}
        self._seen: set[str] = set()
        self._joins: list[JoinProof] = []
        self._differences: list[Difference] = []
        self._notes: list[str] = []

    def add(self, spark_plan: SparkPlan, datasets: Mapping[str, str]) -> None:
        """Take in a plan; `datasets` are those that operators look up in."""
        for operator in sorted(spark_plan.operators):
            if operator in self._seen:
                continue
            self._seen.add(operator)
            moved = [exchange for exchange in spark_plan.exchanges if exchange.operator == operator]
            if operator in datasets:
                self._join(operator, datasets[operator], spark_plan)
            self._moved(
                operator, datasets.get(operator), [(exchange.partitioning, exchange.side) for exchange in moved]
            )

    def allow(self, operator: str, moves: int) -> None:
        """Expect an operator to move rows of its own so often."""
        self._listed[operator] += moves

    def result(self) -> PhysicalProof:
        return PhysicalProof(tuple(self._joins), tuple(self._differences), tuple(self._notes))

    def note(self, text: str) -> None:
        self._notes.append(text)

    def _join(self, operator: str, dataset: str, spark_plan: SparkPlan) -> None:
        join = spark_plan.joins.get(operator)
        if join is None:
            return
        sides = Counter(exchange.side for exchange in spark_plan.exchanges if exchange.operator == operator)
        self._joins.append(JoinProof(operator, dataset, _kind(join), _reads(join), sides["stream"], sides["dataset"]))

    def _moved(self, operator: str, dataset: str | None, moved: Sequence[tuple[str, str | None]]) -> None:
        of_dataset = [where for where, side in moved if side == "dataset"]
        others = [where for where, side in moved if side != "dataset"]
        if of_dataset and dataset is not None:
            self._differences.append(
                Difference(
                    operator,
                    f"{operator}: Spark shuffles dataset {dataset}, which the plan proved to be partitioned alike "
                    f"({', '.join(of_dataset)}).",
                    "Compare the types of the join's keys on both sides, and its partitions.",
                    dataset,
                )
            )
        unlisted = others[self._listed[operator] :]
        if not unlisted:
            return
        times = "once" if len(unlisted) == 1 else f"{len(unlisted)} times"
        problem = f"{operator}: Spark moves the records {times} more than the plan lists ({', '.join(unlisted)})"
        if dataset is None and not self._claims.get(operator):
            self._notes.append(f"{problem}; the plan claims nothing of where they lie after it.")
            return
        step = "Move them with partition_by, where the plan lists it; a function may not move what keeps its place."
        self._differences.append(Difference(operator, f"{problem}.", step, dataset))


def check_written(operator: str, source: PlannedOperator, spark_plan: SparkPlan) -> str | None:
    """Return a note on records that are written where they lie, or None where Spark sees that they lie right.

    `source` is planned for the operator that they come from. Raises PlanningError where they certainly lie otherwise
    than it says: writing them would fail, or lose the order of a key's records.
    """
    expected = f"hashpartitioning({', '.join(source.partitioned_by)}, {source.partitions})"
    lying = spark_plan.partitioning
    if expected in lying or (source.partitions == 1 and "singlepartition" in lying.lower()):
        return None
    if lying in ("UnknownPartitioning(0)", f"UnknownPartitioning({source.partitions})"):
        return f"{operator}: that records lie as {expected} is a promise, which Spark can't see."
    moving = list(
        dict.fromkeys(exchange.operator for exchange in spark_plan.exchanges if exchange.partitioning in lying)
    ) or [source.id]
    raise PlanningError(
        f"{operator}: records are written where they lie, which the plan says is {expected}; after "
        f"{', '.join(moving)} it is {lying}.",
        "A function that moves records may not promise keeps_partitioning, nor be a filter: take that back, and use "
        "partition_by behind it.",
        operator=operator,
    )


def _kind(join: FoundJoin) -> str:
    kinds = {"SortMergeJoin": "sort-merge join", "BroadcastHashJoin": "broadcast join"}
    return kinds.get(join.kind, join.kind)


def _reads(join: FoundJoin) -> str:
    if join.broadcast:
        return "all of it in every task"
    return f"a bucketed scan of {join.buckets}" if join.buckets is not None else "not by buckets"
