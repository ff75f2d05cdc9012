"""Filter: records that meet a condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.arguments import called
from dagster_adjunct.orchestration.operators.columns.known_columns import FINAL
from dagster_adjunct.orchestration.operators.spec.operator_spec import PassesRecords
from dagster_adjunct.orchestration.operators.spec.stream_facts import UNKNOWN
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.sql.checking import checked_condition
from dagster_adjunct.resources.sql.parsing import true_only_with
from dagster_adjunct.resources.user_code import check_plain_function

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.arguments import DataFrameFunction
    from dagster_adjunct.orchestration.operators.columns.known_columns import Types
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, PlanContext


@dataclass(frozen=True, slots=True)
class Filter(PassesRecords):
    """The records that meet a Spark SQL condition, or that a DataFrame function lets pass, which leaves their columns
    as they are and may promise that it leaves them where they are, too."""

    kind: ClassVar[str] = "filter"
    condition: str | DataFrameFunction
    keeps_partitioning: bool = False

    @property
    def promises_partitioning(self) -> bool:
        return self.keeps_partitioning

    def summary(self) -> str:
        return self.condition if isinstance(self.condition, str) else called(self.condition)

    @property
    def sql(self) -> Sequence[str]:
        return (self.condition,) if isinstance(self.condition, str) else ()

    @property
    def asks_final(self) -> bool:
        return isinstance(self.condition, str) and true_only_with(self.condition, FINAL)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        if isinstance(self.condition, str):
            checked_condition(context.operator, self.condition, flow.columns)
        if isinstance(self.condition, str) or self.keeps_partitioning or not flow.partitioned_by:
            return flow
        return replace(flow, partitioned_by=(), partitioner=UNKNOWN, lost_at=context.operator)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        if types is None or not isinstance(self.condition, str):
            return types
        checked_condition(context.operator, self.condition, tuple(types), types)
        return types

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        (frame,) = frames
        if isinstance(self.condition, str):
            return frame.filter(self.condition)
        passed = batch.call(operator, self.condition, frame)
        _check_columns(operator, self.condition, dict(frame.dtypes), dict(passed.dtypes))
        return passed


def _check_columns(
    operator: str, function: DataFrameFunction, before: Mapping[str, str], after: Mapping[str, str]
) -> None:
    """Refuse a function that changes columns: what comes after a filter is planned with those that came to it."""
    changed = [name for name in (*before, *after) if before.get(name) != after.get(name)]
    if not changed:
        return
    name = changed[0]
    was, made = before.get(name), after.get(name)
    what = f"adds the column {name!r}" if was is None else f"drops the column {name!r}"
    if was is not None and made is not None:
        what = f"makes the column {name!r}, which is {was}, {made}"
    raise PlanningError(
        f"{operator}: {called(function)} {what}: a filter leaves the columns of records as they are.",
        "Change columns with map(function), and filter by them behind it.",
        operator=operator,
        column=name,
    )


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
    else:
        check_plain_function(f"filter after {after}", condition, "condition", "frame")
    return Filter(condition, bool(keeps_partitioning))
