"""Filter: records that meet a condition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.arguments import called
from dagster_adjunct.orchestration.operators.operator_spec import PassesRecords
from dagster_adjunct.orchestration.operators.stream_facts import UNKNOWN
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.sql.checking import checked_expression

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.arguments import DataFrameFunction
    from dagster_adjunct.orchestration.operators.compiling import Batch
    from dagster_adjunct.orchestration.operators.known_columns import Types
    from dagster_adjunct.orchestration.operators.planning_values import Flow, PlanContext


@dataclass(frozen=True, slots=True)
class Filter(PassesRecords):
    """The records that meet a Spark SQL condition, or that a DataFrame function lets pass, which may promise that it
    leaves them where they are."""

    kind: ClassVar[str] = "filter"
    condition: str | DataFrameFunction
    keeps_partitioning: bool = False

    def summary(self) -> str:
        return self.condition if isinstance(self.condition, str) else called(self.condition)

    @property
    def sql(self) -> Sequence[str]:
        return (self.condition,) if isinstance(self.condition, str) else ()

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        if isinstance(self.condition, str):
            checked_expression(context.operator, self.condition, flow.columns, next_step="Correct the condition.")
        if isinstance(self.condition, str) or self.keeps_partitioning or not flow.partitioned_by:
            return flow
        return replace(flow, partitioned_by=(), partitioner=UNKNOWN, lost_at=context.operator)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        if types is None or not isinstance(self.condition, str):
            return types
        kind = checked_expression(context.operator, self.condition, tuple(types), types)
        if kind not in (None, "boolean"):
            raise PlanningError(
                f"{context.operator}: the condition {self.condition!r} is {kind}: expected boolean.",
                f"Compare it with something: {self.condition} is not null.",
                operator=context.operator,
            )
        return types

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: Batch) -> DataFrame:
        (frame,) = frames
        if isinstance(self.condition, str):
            return frame.filter(self.condition)
        return batch.call(operator, self.condition, frame)


def checked_filter(after: str, condition: str | DataFrameFunction, keeps_partitioning: bool) -> Filter:
    """Return the filter that a user's argument asks for, behind the operator `after`."""
    if isinstance(condition, str):
        if not condition.strip():
            raise ConfigurationError(f"filter after {after} is empty.", "Write a condition.", argument="condition")
        if keeps_partitioning:
            raise ConfigurationError(
                f"filter after {after} has keeps_partitioning=True with a condition.",
                "Leave it out: a condition leaves records where they are.",
                argument="keeps_partitioning",
            )
    elif not callable(condition):
        raise ConfigurationError(
            f"filter after {after} got {condition!r}.",
            "Pass a Spark SQL condition or a function.",
            argument="condition",
        )
    return Filter(condition, bool(keeps_partitioning))
