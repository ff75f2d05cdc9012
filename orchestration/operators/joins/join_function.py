"""JoinFunction: records with what a function makes of each and of its dataset entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.arguments import called
from dagster_adjunct.orchestration.operators.columns.known_columns import Types, types_of
from dagster_adjunct.orchestration.operators.functions.record_functions import (
    RecordCall,
    call_in_tasks,
    checked_function,
)
from dagster_adjunct.orchestration.operators.joins.join import Join, checked_join
from dagster_adjunct.orchestration.operators.joins.join_arguments import How, On
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.operators.functions.record_functions import RecordFunction
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, PlanContext

_ENTRY = "__entry"


@dataclass(frozen=True, slots=True)
class JoinFunction(Join):
    """Records with the columns that `function(record, entry)` gives; None drops the record.

    An inner join calls it for records that meet an entry, a left one for all: the entry is None then.
    """

    kind: ClassVar[str] = "join"
    function: RecordFunction = field(kw_only=True)
    made: Schema = field(kw_only=True)

    def summary(self) -> str:
        return f"{Join.summary(self)}, by {called(self.function)}"

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        flow = Join.flow(self, context, arriving)
        there = {name.lower() for name in flow.columns or ()}
        taken = next((name for name in self.made.names if name.lower() in there), None)
        if taken is not None:
            raise PlanningError(
                f"{context.operator}: the stream and {called(self.function)} both bring a column {taken!r}; the "
                f"stream's columns there are {', '.join(flow.columns or ())}.",
                "Call it otherwise in schema=, and put it in the place of the other with select() behind the join.",
                operator=context.operator,
                column=taken,
            )
        return replace(flow, columns=None if flow.columns is None else (*flow.columns, *self.made.names))

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        types = Join.types(self, context, arriving)
        return None if types is None else types | types_of(self.made)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        from pyspark.sql import functions as F

        (frame,) = frames
        entries, schema = batch.entries(self.dataset)
        self._check_types(operator, dict(frame.dtypes), schema)
        entry = F.struct(*[column(name) for name in schema.names]).alias(_ENTRY)
        joined = self._joined(operator, frame, entries, [entry], batch)
        return call_in_tasks(
            joined,
            RecordCall(
                operator,
                self.function,
                self.made,
                entry=_ENTRY,
                stream=batch.stream_of(operator),
                sensitive=batch.sensitive(operator),
            ),
            frame.columns,
        )


def checked_join_function(
    operator: str,
    dataset: AdjunctDataset,
    on: On,
    how: How,
    function: RecordFunction | None,
    schema: Schema | None,
    min_match_rate: float | None,
    others: bool,
) -> JoinFunction:
    """Return the join that a user's arguments ask for; `others` says whether they select columns, too."""
    if others:
        raise ConfigurationError(
            f"{operator} has a function, and select= or prefix=, which say what a join without one adds.",
            "Leave them out: the function gets the whole entry, and schema= says what it adds.",
            argument="select",
            operator=operator,
        )
    checked_function(operator, function, schema, "record", "entry")
    assert function is not None
    assert schema is not None
    join = checked_join(operator, dataset, on, how, (), "", min_match_rate)
    return JoinFunction(join.dataset, join.on, join.how, (), "", join.min_match_rate, function=function, made=schema)
