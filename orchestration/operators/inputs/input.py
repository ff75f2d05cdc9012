"""Input: records enter from a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dagster_adjunct.orchestration.operators.columns.expressions import plain_column
from dagster_adjunct.orchestration.operators.columns.known_columns import Types, types_of
from dagster_adjunct.orchestration.operators.inputs.broadcast_stream import columns_with_task, for_each_task
from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageNode, whole
from dagster_adjunct.orchestration.operators.spec.operator_spec import Spec
from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, StreamEdge
from dagster_adjunct.orchestration.operators.spec.stream_facts import TASK_NUMBER, UNKNOWN, facts_of
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.names import split_stream_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.event_times.event_time import EventTime
    from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageContext, Made
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.planning_values import PlanContext, Role

DefaultOffset = Literal["oldest", "upcoming"]
OnLost = Literal["fail", "oldest"]


@dataclass(frozen=True, slots=True)
class Input(Spec):
    """Records of an input stream, as they are stored, and where reading begins where no checkpoint says so.

    With `broadcast`, every task reads all of them; it names the column with the number of the task. With an
    `event_time`, each carries when it happened, and whether it is behind.
    """

    kind: ClassVar[str] = "input"
    stream: str
    default_offset: DefaultOffset | None = None
    reset_offset: bool = False
    on_lost: OnLost = "fail"
    broadcast: str | None = None
    event_time: EventTime | None = None

    @property
    def sql(self) -> Sequence[str]:
        return () if self.event_time is None else self.event_time.sql

    @property
    def says_time(self) -> bool:
        return self.event_time is not None

    @property
    def role(self) -> Role:
        return "input" if self.broadcast is None else "broadcast-input"

    @property
    def reads(self) -> str:
        return self.stream

    def summary(self) -> str:
        return self.stream if self.broadcast is None else f"{self.stream}, all of it for each {self.broadcast}"

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        facts = facts_of(context.catalog, self.stream, context.operator)
        if self.event_time is not None:
            known = None if facts.schema is None else types_of(facts.schema)
            self.event_time.check(context.operator, facts.columns, known)
        if self.broadcast is None:
            return Flow(context.operator, facts.columns, facts.key, facts.partitioner if facts.key else UNKNOWN)
        what = f"stream {self.stream}"
        columns = columns_with_task(context.operator, what, facts.columns, self.broadcast, "input_stream")
        return Flow(context.operator, columns, (self.broadcast,), TASK_NUMBER)

    def declared_partitions(self, context: PlanContext) -> int | None:
        # A broadcast one is in as many as there are tasks, which the others decide: see `counts.with_broadcast`.
        facts = facts_of(context.catalog, self.stream, context.operator)
        return facts.partitions if self.broadcast is None else None

    def edge(self, context: PlanContext, flow: Flow, partitions: int) -> StreamEdge:
        if self.broadcast is None:
            by, partitioner = flow.partitioned_by, flow.partitioner
        else:
            facts = facts_of(context.catalog, self.stream, context.operator)
            partitions, by, partitioner = facts.partitions, facts.key, facts.partitioner
        return StreamEdge(self.stream, self.role, partitions, by, partitioner, "input", context.operator)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        facts = context.catalog.get(self.stream)
        if facts is None or facts.schema is None:
            return None
        return types_of(facts.schema) | ({} if self.broadcast is None else {self.broadcast: "int"})

    def column_sources(self, context: LineageContext, arriving: Sequence[Made]) -> Made:
        return whole(LineageNode("stream", self.stream), context.after or ())

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        records = batch.read(self.stream)
        return records if self.broadcast is None else for_each_task(records, self.broadcast, batch.tasks)


def checked_input(
    stream: str,
    default_offset: DefaultOffset | None,
    reset_offset: bool,
    on_lost: OnLost,
    broadcast: bool | str,
    event_time: EventTime | None = None,
) -> Input:
    """Return the input that a user's arguments ask for."""
    split_stream_name(stream)
    if default_offset not in (None, "oldest", "upcoming"):
        raise ConfigurationError(
            f"input stream {stream!r} has default_offset={default_offset!r}: expected oldest or upcoming.",
            "Choose one, or leave it out.",
            argument="default_offset",
            stream=stream,
        )
    if on_lost not in ("fail", "oldest"):
        raise ConfigurationError(
            f"input stream {stream!r} has on_lost={on_lost!r}: expected fail or oldest.",
            "Choose one, or leave it out to fail.",
            argument="on_lost",
            stream=stream,
        )
    return Input(stream, default_offset, bool(reset_offset), on_lost, _task_column(stream, broadcast), event_time)


def _task_column(stream: str, broadcast: bool | str) -> str | None:
    """Return the name of the column with the task's number, None for an input that tasks share."""
    if isinstance(broadcast, bool):
        return "task" if broadcast else None
    if not isinstance(broadcast, str) or plain_column(broadcast) != broadcast or broadcast.startswith("__"):
        raise ConfigurationError(
            f"input stream {stream!r} has broadcast={broadcast!r}: expected True, or the name of a column.",
            'Write broadcast=True for the column "task", or a plain name for another one.',
            argument="broadcast",
            stream=stream,
        )
    return broadcast
