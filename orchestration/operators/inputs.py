"""`Input`, which reads a stream, and `Broadcast`, which copies records for every task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dagster_adjunct.orchestration.operators.columns import ORDINAL, TASK, ordinal_column, plain_column
from dagster_adjunct.orchestration.operators.event_time import EventTime
from dagster_adjunct.orchestration.operators.operator import Flow, PassThroughSpec, PlanContext, Role, Spec
from dagster_adjunct.orchestration.operators.stream_facts import (
    TASK_NUMBER,
    UNKNOWN,
    ColumnFacts,
    Columns,
    LineageNode,
    require_facts,
)
from dagster_adjunct.resources.common import argument_error
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.lazy_modules import F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.step.batch import BatchContext


@dataclass(frozen=True, slots=True)
class Broadcast(PassThroughSpec):
    """All records once per task, with the task's number in the column `task`."""

    kind: ClassVar[str] = "broadcast"
    role: ClassVar[Role] = "broadcast"
    stream: str
    task: str

    def summary(self) -> str:
        return f"all of it for each {self.task}"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        return add_task_column(context.operator, "the stream", arriving[0], self.task, "broadcast")

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return Flow(context.operator, (self.task,), TASK_NUMBER)

    def declared_count(self, context: PlanContext) -> tuple[int | None, str]:
        return None, "one for each task"

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        return copy_for_each_task(frames[0], self.task, batch.tasks)


def add_task_column(operator: str, what: str, columns: Columns, task: str, method: str) -> Columns:
    """Return the columns with that of the task's number; raises PlanningError if it exists."""
    if task.lower() in map(str.lower, columns.names or ()):
        problem = f"{operator}: {what} has a column {task!r}, which is the name of the column for the task's number."
        step = f'Choose another name: {method}({"task" if method == "broadcast" else "broadcast"}="task_number").'
        raise PlanningError(problem, step, column=task, operator=operator)
    return columns.add({task: ColumnFacts("int")})


def check_task_column(task: str, found: str, **about: Any) -> None:
    """Raise ConfigurationError unless this can be the name of the column for the task's number."""
    if plain_column(task) != task or task.startswith("__"):
        raise argument_error(found, 'a plain column name, by default "task"', **about)


def copy_for_each_task(records: DataFrame, name: str, tasks: int) -> DataFrame:
    """Return all records once per task, those of task n in partition n, with its number in the column `name`.

    A hidden copy of the number orders the copies of one record when they are merged again, so that a repeated batch
    sends the same bytes. For records that are copies already, the ordinal contains the earlier task.
    """
    if TASK in records.columns:
        records = records.withColumn(ORDINAL, ordinal_column(records, F.col(TASK))).drop(TASK)
    numbers = records.sparkSession.range(0, tasks, 1, tasks).select(F.col("id").cast("int").alias(TASK))
    # The numbers stay in their partitions, and each partition gets all records.
    return numbers.crossJoin(F.broadcast(records)).select(*records.columns, F.col(TASK).alias(name), TASK)


DefaultOffset = Literal["oldest", "upcoming"]
OnLost = Literal["fail", "oldest"]


@dataclass(frozen=True, slots=True)
class Input(Spec):
    """The records of an input stream, and where reading starts without a checkpoint.

    With `broadcast`, the name of the column for the task's number, every task reads all records. With an `event_time`,
    records have hidden columns with their time and whether they are late.
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
    def role(self) -> Role:
        return "input" if self.broadcast is None else "broadcast-input"

    @property
    def reads(self) -> str:
        return self.stream

    def summary(self) -> str:
        return self.stream if self.broadcast is None else f"{self.stream}, all of it for each {self.broadcast}"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        facts = require_facts(context.catalog, self.stream, context.operator)
        columns = Columns.of_schema(facts.schema, LineageNode("stream", self.stream))
        if self.event_time is not None:
            self.event_time.check(context.operator, columns.names, columns.types)
        if self.broadcast is None:
            return columns
        return add_task_column(context.operator, f"stream {self.stream}", columns, self.broadcast, "input_stream")

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        if self.broadcast is not None:
            return Flow(context.operator, (self.broadcast,), TASK_NUMBER)
        facts = require_facts(context.catalog, self.stream, context.operator)
        return Flow(context.operator, facts.key, facts.partitioner if facts.key else UNKNOWN)

    def declared_count(self, context: PlanContext) -> tuple[int | None, str]:
        # A broadcast input has a partition per task, which other streams decide: see `add_broadcast_counts`.
        facts = require_facts(context.catalog, self.stream, context.operator)
        return facts.partitions if self.broadcast is None else None, "input"

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        records = batch.read(self.stream)
        return records if self.broadcast is None else copy_for_each_task(records, self.broadcast, batch.tasks)
