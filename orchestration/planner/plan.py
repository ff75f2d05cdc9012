"""The plan: what the planner proved and decided, as plain immutable data."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar

from dagster_adjunct.orchestration.operators.operator import Exchange, StreamEdge
from dagster_adjunct.orchestration.planner.render import describe_differences, render_mermaid, render_text
from dagster_adjunct.resources.errors import ConfigurationError, MalformedDocumentError, PlanningError
from dagster_adjunct.resources.streams.system import SystemStreamPartition

# A plan as JSON.
#
# The document is one object: `format`, the number of its format, and a member for each field of `ExecutionPlan`, whose
# items have members for their fields. A reader ignores members that it doesn't know. Whatever changes the meaning of
# what
# is there gets the next number.


FORMAT = 1
P = TypeVar("P")
_HOW_TO_WRITE = "Write it with adjunct plan MODULE:APP --format json."


def plan_to_json(plan: Any) -> dict[str, Any]:
    """Return a plan as plain JSON values."""
    return {"format": FORMAT, **_to_plain(plan)}


def plan_from_json(kind: type[P], document: object) -> P:
    """Return the plan that a document describes.

    Raises MalformedDocumentError for one of a later format, and for what is no plan, with the member that is wrong.
    """
    from pydantic import TypeAdapter, ValidationError

    from dagster_adjunct.resources.common import first_validation_problem

    if not isinstance(document, dict):
        raise _malformed(f"it is {type(document).__name__}, and a plan is an object", _HOW_TO_WRITE)
    stored_format = document.get("format")
    if isinstance(stored_format, bool) or not isinstance(stored_format, int) or stored_format < 1:
        raise _malformed(f"its format is {stored_format!r}, and a plan has a number there", _HOW_TO_WRITE)
    if stored_format > FORMAT:
        raise _malformed(
            f"it has format {stored_format}, and this version of dagster-adjunct reads formats up to {FORMAT}",
            f"Read it with the version that wrote it, or a later one, or write it again: {_HOW_TO_WRITE}",
        )
    try:
        # As text, for only there a tuple may be written as a list while a number may not be written as text.
        return TypeAdapter(kind).validate_json(json.dumps(_parse_task_partitions(document)), strict=True)
    except ValidationError as error:
        raise _malformed(first_validation_problem(error), _HOW_TO_WRITE) from error
    except (ConfigurationError, TypeError) as error:
        raise _malformed(str(error), _HOW_TO_WRITE) from error


def _parse_task_partitions(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the partitions of its tasks, which are written `system.stream.3`, member by member."""
    tasks = document.get("tasks")
    if not isinstance(tasks, list):
        return document
    return {**document, "tasks": [_task(task) for task in tasks]}


def _task(task: Any) -> Any:
    if not isinstance(task, dict) or not isinstance(task.get("ssps"), list):
        return task
    parsed = [SystemStreamPartition.parse(ssp) for ssp in task["ssps"]]
    return {**task, "ssps": [{f.name: getattr(ssp, f.name) for f in fields(ssp)} for ssp in parsed]}


def _to_plain(value: Any) -> Any:
    if isinstance(value, SystemStreamPartition):
        return str(value)
    if is_dataclass(value):
        return {field.name: _to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return value


def _malformed(what: str, next_step: str) -> MalformedDocumentError:
    return MalformedDocumentError(f"the document of a plan can't be read: {what}.", next_step, document="plan")


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """What meets in an operator that needs its inputs co-partitioned; all of it has `partitions` partitions.

    `streams` are the names of what arrives there (of an operator that brings streams together: its id), and of the
    input of the `dataset`, where one is joined; `partitioned_by` the columns of the first input that choose the
    partition. What takes part by way of a table is in `FedDataset`, once for all joins; `ExecutionPlan.taking_part`
    has it all.
    """

    join: str
    dataset: str | None
    streams: tuple[str, ...]
    partitions: int
    partitioned_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FedDataset:
    """A joined dataset that the application itself feeds, with as many partitions: by which streams, at which sinks."""

    dataset: str
    streams: tuple[str, ...]
    sinks: tuple[str, ...]
    partitions: int


@dataclass(frozen=True, slots=True)
class PlannedOperator:
    """What is known of the records that leave an operator. `columns` None: not known before it runs.

    `reads` is the stream whose records enter here, `looks_up` what they are joined with, `writes` what they are sent
    to, by name.
    """

    id: str
    kind: str
    inputs: tuple[str, ...]
    summary: str
    partitions: int
    partitioned_by: tuple[str, ...]
    columns: tuple[str, ...] | None
    reads: str | None
    looks_up: str | None
    writes: str | None


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """A send to a remote table. `order` of the records of one key: "newest" (the store keeps it), "per key" (as their
    stream has them), "any" (it comes to the same), or "per source partition" only; `why` it is so, the `harm` that it
    may do, and what `mends` that. `replay` says what reading the `streams` again that its records are made of does to
    it. `marks` is the name by which it knows again what it has had; None where it does not."""

    operator: str
    table: str
    order: str
    why: str
    replay: str
    streams: tuple[str, ...]
    marks: str | None = None
    harm: str = ""
    mends: str = ""


@dataclass(frozen=True, slots=True)
class FedJoin:
    """A join with a dataset that the application itself writes.

    It `meets` what is sent there in "this batch", on top of the version that the batch was begun with, or in the "next
    batch". With "both", in this batch what is sent up to `last_send`, of the local table's sends in their order, and
    in the next what is sent after it.
    """

    join: str
    dataset: str
    meets: Literal["this batch", "next batch", "both"]
    last_send: str | None


@dataclass(frozen=True, slots=True)
class JoinByTime:
    """A join whose records meet the entry that was valid at their own time, in their column `as_of`.

    `before_history` says what a record from before the history of its key meets, "null", "oldest" or "error" (it fails
    the batch); `on_null_time`, whether one without a time meets "null" or is to "fail" it. `known` says how far back
    the dataset tells what was valid.
    """

    join: str
    dataset: str
    as_of: str
    before_history: str
    on_null_time: str
    known: str


@dataclass(frozen=True, slots=True)
class PlannedState:
    """A local table that the application writes, by the operators `sends` in their order: of two records of one key
    the later send's wins. `replay` says what reading its input again does to it."""

    table: str
    sends: tuple[str, ...]
    replay: str


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """What an operator asks of somebody outside of a batch: a "lookup" in a table, or a "sink", a user's function.

    `guarantee` says how often. What is `recorded` is the same when a batch is run again.
    """

    operator: str
    kind: str
    of: str
    guarantee: str
    recorded: bool


@dataclass(frozen=True, slots=True)
class Task:
    """`Partition n`: the input partitions and dataset buckets ("planes.3") that it
    owns, and the datasets and input streams that it reads whole (`ssps` has all partitions of these)."""

    name: str
    ssps: tuple[SystemStreamPartition, ...]
    buckets: tuple[str, ...]
    broadcast: tuple[str, ...]


V = TypeVar("V", bound=Hashable)


def traverse(roots: Iterable[V], next_vertices: Callable[[V], Iterable[V]], visit: Callable[[V], object]) -> None:
    """Visit every vertex that can be reached from `roots`, once each, parents first.

    It is depth first and in the order given by `next_vertices`, which may add connections that the
    graph itself lacks. Cycles end where they meet themselves; depth is not limited by Python's stack.
    """
    seen: set[V] = set()
    for root in roots:
        stack = [root]
        while stack:
            vertex = stack.pop()
            if vertex in seen:
                continue
            seen.add(vertex)
            visit(vertex)
            stack.extend(reversed(list(next_vertices(vertex))))


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
    tables: tuple[PlannedTable, ...]
    fed: tuple[FedDataset, ...]
    calls: tuple[PlannedCall, ...]
    state: tuple[PlannedState, ...]
    fed_joins: tuple[FedJoin, ...]
    by_time: tuple[JoinByTime, ...]

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
            stream=name,
        )

    def partitions_by_task(self) -> dict[str, frozenset[SystemStreamPartition]]:
        """Return the input partitions that each task reads, by its name."""
        return {task.name: frozenset(task.ssps) for task in self.tasks}

    def tables_met_after_sends(self) -> frozenset[str]:
        """Return the local tables that a join meets with what the same batch has sent to them before it."""
        return frozenset(join.dataset for join in self.fed_joins if join.last_send is not None)

    def operator(self, operator_id: str) -> PlannedOperator:
        """Return what is planned for an operator."""
        for operator in self.operators:
            if operator.id == operator_id:
                return operator
        raise PlanningError(
            f"the plan of {self.application!r} has no operator {operator_id!r}.",
            "Check the id.",
            application=self.application,
            operator=operator_id,
        )

    def task(self, name: str) -> Task:
        """Return the task of this name, as in "Partition 3", or "Task 3" where tasks own several partitions."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise PlanningError(
            f"the plan of {self.application!r} has no task {name!r}; it has {len(self.tasks)}, from "
            f"{next((task.name for task in self.tasks), None)!r} on.",
            "Check the name.",
            application=self.application,
        )

    def partitions_at(self, operator_id: str) -> int:
        """Return the partition count of the records that leave an operator."""
        return self.operator(operator_id).partitions

    def taking_part(self, join: str) -> tuple[str, ...]:
        """Return the names of all streams whose records reach a join, in the order of the plan's streams: by way of
        other joins and of tables, too, until they enter another stream; then the input of the join's dataset."""
        operators = {operator.id: operator for operator in self.operators}
        begins = {edge.operator for edge in self.streams if edge.operator and edge.count_from != "auto_repartition"}
        moved = {
            (exchange.operator, exchange.input) for exchange in self.exchanges if exchange.reason == "auto_repartition"
        }
        feeding = {
            group.join: fed.sinks for group in self.join_groups for fed in self.fed if fed.dataset == group.dataset
        }
        reached: set[tuple[str | None, bool]] = set()

        def before(vertex: str) -> list[str]:
            if vertex in begins and vertex != join:
                reached.add((vertex, False))
                return []
            here = [source for number, source in enumerate(operators[vertex].inputs) if (vertex, number) not in moved]
            if len(here) < len(operators[vertex].inputs):
                reached.add((vertex, True))
            return here + list(feeding.get(vertex, ()))

        traverse([join], before, lambda vertex: None)
        dataset = next((group.dataset for group in self.join_groups if group.join == join), None)
        return tuple(
            edge.name
            for edge in self.streams
            if (edge.operator, edge.count_from == "auto_repartition") in reached
            or (edge.dataset is not None and edge.dataset == dataset)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, with the number of their format."""
        return plan_to_json(self)

    @classmethod
    def from_json(cls, document: object) -> ExecutionPlan:
        """Return the plan that `to_json` gave.

        Raises MalformedDocumentError for what is none, and for a format of a later version.
        """
        return plan_from_json(cls, document)

    def differences_from(self, older: ExecutionPlan) -> tuple[str, ...]:
        """Return in words, a line each, what is other than in an older plan; operators may have other numbers."""
        return describe_differences(older.to_json(), self.to_json())

    def to_mermaid(self) -> str:
        """Return the plan as a flowchart of Mermaid."""
        return render_mermaid(self.operators, self.streams, self.exchanges, self.tables, self.calls)

    def render(self) -> str:
        """Return the plan as plain text for people."""
        return render_text(
            self.application,
            self.operators,
            self.streams,
            self.join_groups,
            self.fed,
            self.exchanges,
            self.tables,
            self.calls,
            self.state,
            self.fed_joins,
            self.by_time,
            self.tasks,
            self.notes,
        )
