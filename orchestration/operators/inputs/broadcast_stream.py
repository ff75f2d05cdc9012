"""Broadcast: every task gets all the records, each with the number of the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.columns.expressions import plain_column
from dagster_adjunct.orchestration.operators.columns.hidden_columns import ORDINAL, TASK, ordinal
from dagster_adjunct.orchestration.operators.columns.known_columns import Columns, Types
from dagster_adjunct.orchestration.operators.spec.operator_spec import Spec
from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, StreamEdge
from dagster_adjunct.orchestration.operators.spec.stream_facts import TASK_NUMBER
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageContext, Made
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.planning_values import PlanContext, Role


@dataclass(frozen=True, slots=True)
class Broadcast(Spec):
    """All the records for each task, with the task's number in the column `task`."""

    kind: ClassVar[str] = "broadcast"
    stream: str
    task: str

    @property
    def role(self) -> Role:
        return "broadcast"

    def summary(self) -> str:
        return f"all of it for each {self.task}"

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        columns = columns_with_task(context.operator, "the stream", flow.columns, self.task, "broadcast")
        return Flow(context.operator, columns, (self.task,), TASK_NUMBER)

    def edge(self, context: PlanContext, flow: Flow, partitions: int) -> StreamEdge:
        told = "one for each task"
        return StreamEdge(self.stream, self.role, partitions, (self.task,), TASK_NUMBER, told, context.operator)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        return None if types is None else types | {self.task: "int"}

    def column_sources(self, context: LineageContext, arriving: Sequence[Made]) -> Made:
        (made,) = arriving
        return made

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        (frame,) = frames
        return for_each_task(frame, self.task, batch.tasks)


def columns_with_task(operator: str, what: str, columns: Columns, task: str, method: str) -> Columns:
    """Return the columns with that of the task's number; refuses one that is there."""
    if columns is None:
        return None
    if task.lower() in map(str.lower, columns):
        raise PlanningError(
            f"{operator}: {what} has a column {task!r}, as the number of the task is called.",
            f'Call that otherwise: {"task" if method == "broadcast" else "broadcast"}="task_number" of {method}().',
            column=task,
            operator=operator,
        )
    return (*columns, task)


def checked_broadcast(after: str, stream: str, task: str) -> Broadcast:
    """Return the broadcast that a user's argument asks for, as the stream of this name, behind the operator `after`."""
    if not isinstance(task, str) or plain_column(task) != task or task.startswith("__"):
        raise ConfigurationError(
            f"broadcast after {after} has task={task!r}: expected the name of a column.",
            'Leave it out for the column "task", or choose another plain name.',
            argument="task",
        )
    return Broadcast(stream, task)


def for_each_task(records: DataFrame, name: str, tasks: int) -> DataFrame:
    """Return all the records once for each task, those of task n in partition n, with its number in the column `name`.

    The number is there a second time, hidden: it orders the copies of one record where they come together again, so
    that a batch that is repeated sends the same bytes. Of what is a copy already, the ordinal tells of which task.
    """
    from pyspark.sql import functions as F

    if TASK in records.columns:
        records = records.withColumn(ORDINAL, ordinal(records, F.col(TASK))).drop(TASK)
    numbers = records.sparkSession.range(0, tasks, 1, tasks).select(F.col("id").cast("int").alias(TASK))
    # The numbers stay where they are, and each of their partitions gets all records.
    return numbers.crossJoin(F.broadcast(records)).select(*records.columns, F.col(TASK).alias(name), TASK)
