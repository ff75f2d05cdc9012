"""Sink: records handed to a function of the user's, whose results flow on where it declares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.arguments import called
from dagster_adjunct.orchestration.operators.columns.known_columns import Types, types_of
from dagster_adjunct.orchestration.operators.functions.function_results import flow_of_results
from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageNode
from dagster_adjunct.orchestration.operators.spec.operator_spec import Spec
from dagster_adjunct.orchestration.operators.spec.planning_values import Call, Flow
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.user_code import check_plain_function

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageContext, Made
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.declared_sinks import Declarations
    from dagster_adjunct.orchestration.operators.spec.planning_values import PlanContext
    from dagster_adjunct.orchestration.operators.spec.sink_context import SinkFunction


@dataclass(frozen=True, slots=True)
class Sink(Spec):
    """Records handed to `function`, in Spark's tasks. With `returns` its results go on, else the records do."""

    kind: ClassVar[str] = "sink"
    function: SinkFunction
    returns: Schema | None = None
    keeps_partitioning: bool = False

    @property
    def promises_partitioning(self) -> bool:
        return self.keeps_partitioning

    @property
    def writes(self) -> str:
        return called(self.function)

    def target(self, app: Declarations) -> LineageNode:
        return LineageNode("sink", f"{app.name}/{called(self.function).removesuffix('()')}")

    def summary(self) -> str:
        return called(self.function) if self.returns is None else f"what {called(self.function)} returns"

    def call(self, app: Declarations) -> Call:
        once = "at least once for each record of a batch"
        if self.returns is None:
            return Call(
                "sink", called(self.function), f"{once}, and again where the batch is run again", recorded=False
            )
        return Call("sink", called(self.function), f"{once}; not again once its results are recorded", recorded=True)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        if self.returns is None:
            return flow
        kept = self.keeps_partitioning
        return flow_of_results(context.operator, flow, self.function, self.returns, keeps_partitioning=kept)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        return types if self.returns is None else types_of(self.returns)

    def column_sources(self, context: LineageContext, arriving: Sequence[Made]) -> Made:
        (made,) = arriving
        return made if self.returns is None else {}

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        (frame,) = frames
        if self.returns is not None:
            return batch.results_of(operator, frame, self.function, self.returns)
        if batch.goes_on(operator):
            frame = batch.computed_once(operator, frame)
        batch.hand_to(operator, frame, self.function)
        return frame


def checked_sink(after: str, function: object, returns: object, keeps_partitioning: bool) -> Sink:
    """Return the sink that a user's arguments ask for, behind the operator `after`."""
    what = f"sink after {after}"
    if not callable(function):
        raise ConfigurationError(f"{what} got {function!r}.", "Pass a function.", argument="function")
    check_plain_function(what, function, "function", "records", "context")
    if returns is not None and (not isinstance(returns, Schema) or not returns.fields):
        raise ConfigurationError(
            f"{what} has returns={returns!r}: expected the columns of its results.",
            'Declare them: returns=Schema.of(order="bigint", state="string"); or leave it out.',
            argument="returns",
        )
    if keeps_partitioning and returns is None:
        raise ConfigurationError(
            f"{what} has keeps_partitioning=True without returns=: the records go on as they were.",
            "Leave it out.",
            argument="keeps_partitioning",
        )
    return Sink(function, returns, keeps_partitioning)
