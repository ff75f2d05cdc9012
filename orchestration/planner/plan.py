"""`ExecutionPlan`: the result of planning, as immutable data, and its JSON format.

A plan's JSON is one object: `format`, the number of the format, and a member for each field of
`ExecutionPlan`. Readers ignore unknown members; a change of meaning increases the number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from dagster_adjunct.orchestration.operators.operator import Exchange, PlannedCall, PlannedStream
from dagster_adjunct.orchestration.operators.stream_facts import Columns
from dagster_adjunct.orchestration.planner.render import (
    describe_differences,
    render_mermaid,
    render_text,
)
from dagster_adjunct.resources.documents import first_validation_problem
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    MalformedDocumentError,
    PlanningError,
)
from dagster_adjunct.resources.reports import to_json_value
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.resources.validation import validated_methods

FORMAT = 1
_HOW_TO_WRITE = "Write it with adjunct plan MODULE:APP --format json."


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """The streams that the operator `join` needs co-partitioned; all of them have `partitions`
    partitions.

    `streams` are the names of its inputs (for merged streams, the id of the operator that merges
    them) and of the source of the joined `dataset`, if any; `partitioned_by` are the partitioning
    columns of the first input. Streams whose records are sent to the dataset are in `FedDataset`.
    """

    join: str
    dataset: str | None
    streams: tuple[str, ...]
    partitions: int
    partitioned_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FedDataset:
    """A joined dataset that the application itself sends records to, at the operators `sinks`.

    The records come from `streams`, which have as many partitions as the dataset.
    """

    dataset: str
    streams: tuple[str, ...]
    sinks: tuple[str, ...]
    partitions: int


@dataclass(frozen=True, slots=True)
class PlannedOperator:
    """An operator, with the partitioning and `columns` of the records that leave it; None if
    columns are unknown yet.

    `reads` names the stream that it reads, `looks_up` the dataset or remote table that it joins,
    `writes` the stream, table or function that it sends records to.
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
    """A send to a remote table.

    `order` is the guaranteed order of the records of a key: "newest" (the store keeps the newest),
    "per key" (the stream's), "any" (order does not matter), or "per source partition" only. `why`
    explains it, `harm` says what may go wrong, and `mends` how to fix that. `replay` describes the
    effect of reading `streams` again. Only those in `again` reach it then; `left_out` says why
    records of the others don't. A table with marks stores the position of the last record that it
    applied from each source partition; `marks` is the name of this send there, else None.
    """

    operator: str
    table: str
    order: str
    why: str
    replay: str
    streams: tuple[str, ...]
    marks: str | None = None
    harm: str = ""
    mends: str = ""
    again: tuple[str, ...] = ()
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class FedJoin:
    """A join with a dataset that the application itself sends records to.

    `sees` says when it finds sent records: in "this batch", in the "next batch", or "both". With
    "both", it finds those of the sends up to `last_send` in this batch, and those of later sends in
    the next.
    """

    join: str
    dataset: str
    sees: Literal["this batch", "next batch", "both"]
    last_send: str | None


@dataclass(frozen=True, slots=True)
class JoinByTime:
    """A join with the entry that was valid at the record's own time, in its column `as_of`.

    `before_history` is the result for a record from before the history of its key: "null", "oldest"
    or "error" (the batch fails). `on_null_time` is the result for a record without a time: "null"
    or "fail". `known` says how far back the dataset's history goes.
    """

    join: str
    dataset: str
    as_of: str
    before_history: str
    on_null_time: str
    known: str


@dataclass(frozen=True, slots=True)
class PlannedState:
    """A local table that the application writes at the operators `sends`; for one key, the later
    send wins.

    `replay` describes the effect on it of reading inputs again.
    """

    table: str
    sends: tuple[str, ...]
    replay: str


@dataclass(frozen=True, slots=True)
class Task:
    """A task ("Partition 3"): the partitions of input streams (`ssps`) and dataset buckets
    ("planes.3") that it owns.

    `broadcast` names the datasets and input streams that it reads completely; `ssps` includes all
    partitions of these streams.
    """

    name: str
    ssps: tuple[SystemStreamPartition, ...]
    buckets: tuple[str, ...]
    broadcast: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SparkNeed:
    """Why an operator needs Spark; `what` is a noun phrase, such as "a DataFrame function"."""

    operator: str
    what: str


@dataclass(frozen=True, slots=True)
class PlannedAdvance:
    """How a dataset is advanced: `needs_spark` says, in noun phrases, why Spark is needed even for
    few records.

    Without any, this process computes small advances, if the application's engine is "auto".
    """

    dataset: str
    needs_spark: tuple[str, ...] = ()


T = TypeVar("T")


@validated_methods
@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """A proven application. Equal applications and catalogs give equal plans.

    `columns` are those after each operator, by its id; the JSON has only their names. With the
    `engine` "auto", `needs_spark` says why no batch is computed without Spark; it is empty if small
    batches are. `advances` says that of each dataset that is made from a source.
    """

    application: str
    operators: tuple[PlannedOperator, ...]
    streams: tuple[PlannedStream, ...]
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
    columns: Mapping[str, Columns] = field(default_factory=dict, compare=False, repr=False)
    engine: str = "spark"
    needs_spark: tuple[SparkNeed, ...] = ()
    advances: tuple[PlannedAdvance, ...] = ()

    def stream(self, name: str) -> PlannedStream:
        """Return the planned stream of this name; raises PlanningError for an unknown one.

        If the application reads or writes the stream and a dataset is also built from it, that is
        the former.
        """
        streams = sorted(self.streams, key=lambda stream: stream.dataset is not None)
        return self._find("stream", name, {stream.name: stream for stream in reversed(streams)})

    def operator(self, operator_id: str) -> PlannedOperator:
        """Return the planned operator of this id; raises PlanningError for an unknown one."""
        return self._find(
            "operator", operator_id, {operator.id: operator for operator in self.operators}
        )

    def task(self, name: str) -> Task:
        """Return the task of this name: "Partition 3", or "Task 3" if tasks own several partitions.

        Raises PlanningError for an unknown name.
        """
        return self._find("task", name, {task.name: task for task in self.tasks})

    def _find(self, kind: str, name: str, known: Mapping[str, T]) -> T:
        if name not in known:
            shown = [*known][:10]
            problem = (
                f"the plan of {self.application!r} has no {kind} {name!r}; it has"
                f" {', '.join(shown)}{', …' if len(known) > len(shown) else ''}."
            )
            step = "Check the name."
            raise PlanningError(
                problem,
                step,
                application=self.application,
                **{} if kind == "task" else {kind: name},
            )
        return known[name]

    def partitions_by_task(self) -> dict[str, frozenset[SystemStreamPartition]]:
        """Return the input partitions that each task reads, by its name."""
        return {task.name: frozenset(task.ssps) for task in self.tasks}

    def tables_joined_after_sends(self) -> frozenset[str]:
        """Return the names of the local tables in which a join finds records that are sent in
        the same batch.
        """
        return frozenset(join.dataset for join in self.fed_joins if join.last_send is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, with the format's number."""
        shown = {
            member.name: to_json_value(getattr(self, member.name))
            for member in fields(self)
            if member.compare
        }
        return {"format": FORMAT, **shown}

    @classmethod
    def from_json(cls, document: object) -> ExecutionPlan:
        """Return the plan from what `to_json` returned.

        Raises MalformedDocumentError for a later format, and for an invalid document; the error
        names the wrong member.
        """
        if not isinstance(document, dict):
            raise _malformed_error(f"it is {type(document).__name__}: expected an object")
        stored = document.get("format")
        if isinstance(stored, bool) or not isinstance(stored, int) or stored < 1:
            raise _malformed_error(f"its format is {stored!r}: expected a whole number from 1")
        if stored > FORMAT:
            raise _malformed_error(
                f"it has format {stored}, and this version of dagster-adjunct reads formats up to"
                f" {FORMAT}",
                "Read it with the version that wrote it, or a later one, or write it again:"
                f" {_HOW_TO_WRITE}",
            )
        try:
            if isinstance(document.get("tasks"), list):
                document = {
                    **document,
                    "tasks": [_parse_partitions(task) for task in document["tasks"]],
                }
            # Strict validation rejects lists for tuples, except of JSON text, and it rejects a
            # string for a number.
            return TypeAdapter(cls).validate_json(json.dumps(document), strict=True)
        except ValidationError as error:
            raise _malformed_error(first_validation_problem(error)) from error
        except (ConfigurationError, TypeError) as error:
            raise _malformed_error(str(error)) from error

    def differences_from(self, older: ExecutionPlan) -> tuple[str, ...]:
        """Return the differences from an older plan, one line each; a new number of an operator
        is no difference.
        """
        return describe_differences(older.to_json(), self.to_json())

    def to_mermaid(self) -> str:
        """Return the plan as a Mermaid flowchart."""
        return render_mermaid(self)

    def render(self) -> str:
        """Return the plan as readable text."""
        return render_text(self)


def _parse_partitions(task: Any) -> Any:
    """Return a task of a plan's JSON with its partitions ("system.stream.3") parsed."""
    if not isinstance(task, dict) or not isinstance(task.get("ssps"), list):
        return task
    return {**task, "ssps": [asdict(SystemStreamPartition.parse(ssp)) for ssp in task["ssps"]]}


def _malformed_error(what: str, next_step: str = _HOW_TO_WRITE) -> MalformedDocumentError:
    return MalformedDocumentError(
        f"the plan document can't be read: {what}.", next_step, document="plan"
    )
