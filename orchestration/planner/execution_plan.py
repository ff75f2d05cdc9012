"""The plan: what the planner proved and decided, as plain immutable data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from dagster_adjunct.resources.errors import PlanningError

Role = Literal["input", "broadcast-input", "output", "intermediate", "side-input"]
Reason = Literal["partition_by", "auto_repartition", "output", "remote table", "dataset"]


@dataclass(frozen=True, slots=True)
class StreamEdge:
    """One stream of the application.

    `partitions` is None for a broadcast dataset's side input; for another dataset it is the dataset's
    own count. `count_from` says where the count comes from ("input", "dataset planes", "inferred from
    dataset planes in join-2-planes"). `dataset` is set on side inputs, `operator` on all others.
    """

    name: str
    role: Role
    partitions: int | None
    partitioned_by: tuple[str, ...]
    partitioner: str
    count_from: str
    operator: str | None = None
    dataset: str | None = None


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """The streams that meet in a join with a partitioned dataset; all have `partitions` partitions.

    `streams` are names of edges, `partitioned_by` the stream's columns that choose the partition.
    """

    join: str
    dataset: str
    streams: tuple[str, ...]
    partitions: int
    partitioned_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Records move before (or, for partition_by, at) `operator`, into `partitions` by `partitioned_by`.

    With `partitioned_by` () they are spread evenly.
    """

    operator: str
    reason: Reason
    partitioned_by: tuple[str, ...]
    partitions: int
    why: str


@dataclass(frozen=True, slots=True)
class PlannedOperator:
    """What is known of the records that leave an operator. `columns` None: not known before it runs."""

    id: str
    kind: str
    inputs: tuple[str, ...]
    summary: str
    partitions: int
    partitioned_by: tuple[str, ...]
    columns: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Task:
    """`Partition n`: the input partitions ("lake.flights.3") and dataset buckets ("planes.3") that it
    owns, and the datasets and input streams that it reads whole (`ssps` has all partitions of these)."""

    name: str
    ssps: tuple[str, ...]
    buckets: tuple[str, ...]
    broadcast: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """A proven application. Equal applications and catalogs give equal plans."""

    application: str
    operators: tuple[PlannedOperator, ...]
    streams: tuple[StreamEdge, ...]
    join_groups: tuple[JoinGroup, ...]
    exchanges: tuple[Exchange, ...]
    tasks: tuple[Task, ...]
    notes: tuple[str, ...]

    def stream(self, name: str) -> StreamEdge:
        """Return the edge of an input, output or intermediate stream, else of a side input."""
        for wanted in (False, True):
            for edge in self.streams:
                if edge.name == name and (edge.dataset is not None) == wanted:
                    return edge
        raise PlanningError(
            f"the plan of {self.application!r} has no stream {name!r}; it has "
            f"{', '.join(edge.name for edge in self.streams)}.",
            "Check the name.",
        )

    def operator(self, operator_id: str) -> PlannedOperator:
        """Return what is planned for an operator."""
        for operator in self.operators:
            if operator.id == operator_id:
                return operator
        raise PlanningError(f"the plan of {self.application!r} has no operator {operator_id!r}.", "Check the id.")

    def task(self, name: str) -> Task:
        """Return the task of this name, as in "Partition 3"."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise PlanningError(
            f"the plan of {self.application!r} has no task {name!r}; it has {len(self.tasks)}, from 'Partition 0' on.",
            "Check the name.",
        )

    def partitions_at(self, operator_id: str) -> int:
        """Return the partition count of the records that leave an operator."""
        return self.operator(operator_id).partitions

    def exchanges_before(self, operator_id: str) -> tuple[Exchange, ...]:
        """Return the exchanges that an operator's records go through before it, in order."""
        return tuple(exchange for exchange in self.exchanges if exchange.operator == operator_id)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    def render(self) -> str:
        """Return the plan as plain text for people."""
        from dagster_adjunct.orchestration.planner.render import render

        return render(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
