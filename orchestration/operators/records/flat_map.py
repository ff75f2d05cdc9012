"""FlatMap: any number of records made of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.arguments import called, column_names
from dagster_adjunct.orchestration.operators.columns.expressions import plain_column, split_alias
from dagster_adjunct.orchestration.operators.columns.hidden_columns import ORDINAL, carried, ordinal
from dagster_adjunct.orchestration.operators.columns.known_columns import Types, types_of
from dagster_adjunct.orchestration.operators.functions.function_results import flow_of_results
from dagster_adjunct.orchestration.operators.functions.record_functions import (
    RecordCall,
    call_in_tasks,
    checked_function,
)
from dagster_adjunct.orchestration.operators.records.with_columns import WithColumns
from dagster_adjunct.orchestration.operators.spec.operator_spec import Spec
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.sql.checking import checked_expression

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.functions.record_functions import RecordFunction
    from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageContext, Made
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, PlanContext

_NUMBER, _ELEMENT = "__number", "__element"


@dataclass(frozen=True, slots=True)
class Elements(Spec):
    """A record for each element of an array or map: all columns, and the element as `name`, in place of one so called.

    A record without elements is gone, or with `keep_empty` goes on with null.
    """

    kind: ClassVar[str] = "flat-map"
    expression: str
    name: str
    keep_empty: bool = False

    def summary(self) -> str:
        return f"each of {self.expression} as {self.name}" + (", or null" if self.keep_empty else "")

    @property
    def sql(self) -> Sequence[str]:
        return (self.expression,)

    @property
    def _as_columns(self) -> WithColumns:
        """What it does to columns: as if it gave one more, which is none of those that arrive."""
        return WithColumns(((self.name, f"explode({self.expression})"),))

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        checked_expression(context.operator, self.expression, flow.columns)
        return self._as_columns.flow(context, arriving)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        if types is not None:
            kind = checked_expression(context.operator, self.expression, tuple(types), types)
            if kind is not None and not kind.startswith(("array<", "map<")):
                raise self._no_elements(context.operator, kind)
            if kind is not None and kind.startswith("array<") and "…" not in kind:
                return (self._as_columns.types(context, arriving) or {}) | {self.name: kind[6:-1]}
        return self._as_columns.types(context, arriving)

    def column_sources(self, context: LineageContext, arriving: Sequence[Made]) -> Made:
        return self._as_columns.column_sources(context, arriving)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        from pyspark.sql import functions as F
        from pyspark.sql.types import ArrayType, MapType

        (frame,) = frames
        values = F.expr(self.expression)
        kind = frame.select(values).schema.fields[0].dataType
        if not isinstance(kind, ArrayType | MapType):
            raise self._no_elements(operator, kind.simpleString())
        values = F.map_entries(values) if isinstance(kind, MapType) else values
        exploded = (F.posexplode_outer if self.keep_empty else F.posexplode)(values)
        made = frame.select("*", exploded.alias(_NUMBER, _ELEMENT))
        number = F.coalesce(F.col(_NUMBER), F.lit(0))
        there = {name.lower() for name in frame.columns}
        columns = [
            F.col(_ELEMENT).alias(self.name) if name.lower() == self.name.lower() else column(name)
            for name in frame.columns
            if name != ORDINAL
        ]
        if self.name.lower() not in there:
            columns.append(F.col(_ELEMENT).alias(self.name))
        return made.select(*columns, ordinal(frame, number).alias(ORDINAL))

    def _no_elements(self, operator: str, kind: str) -> PlanningError:
        return PlanningError(
            f"{operator}: {self.expression} is {kind}, which has no elements: expected an array or a map.",
            "Make one of it, with split(words, ' ') or from_json(text, 'array<string>'), say.",
            operator=operator,
        )


@dataclass(frozen=True, slots=True)
class FlatMap(Spec):
    """The records that a `function` makes of each record, with the columns of `schema`."""

    kind: ClassVar[str] = "flat-map"
    function: RecordFunction
    schema: Schema
    keeps_partitioning: bool = False

    @property
    def promises_partitioning(self) -> bool:
        return self.keeps_partitioning

    def summary(self) -> str:
        return called(self.function)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        kept = self.keeps_partitioning
        return flow_of_results(context.operator, flow, self.function, self.schema, keeps_partitioning=kept)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        return types_of(self.schema)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        (frame,) = frames
        return call_in_tasks(
            frame,
            RecordCall(
                operator,
                self.function,
                self.schema,
                several=True,
                stream=batch.stream_of(operator),
                sensitive=batch.sensitive(operator),
            ),
            carried(frame),
        )


def checked_flat_map(
    after: str, what: str | RecordFunction, schema: Schema | None, keep_empty: bool, keeps_partitioning: bool
) -> Elements | FlatMap:
    """Return the operator that a user's arguments ask for, behind the operator `after`."""
    called_so = f"flat_map after {after}"
    if isinstance(what, str):
        if schema is not None or keeps_partitioning:
            raise ConfigurationError(
                f"{called_so} has an expression, and schema= or keeps_partitioning=, which are for functions.",
                "Leave them out.",
                argument="schema",
            )
        expression, alias = split_alias(what)
        name = alias or plain_column(expression)
        if not expression or name is None:
            raise ConfigurationError(
                f"{called_so} got {what!r}: nothing says how an element is called.",
                "Write flat_map(\"split(words, ' ') as word\"), say.",
                argument="what",
            )
        column_names(called_so, name)
        return Elements(expression, name, bool(keep_empty))
    checked_function(called_so, what, schema, "record")
    assert schema is not None
    if keep_empty:
        raise ConfigurationError(
            f"{called_so} has a function, and keep_empty=, which is for expressions.",
            "Leave it out: the function says itself what it makes of a record.",
            argument="keep_empty",
        )
    return FlatMap(what, schema, bool(keeps_partitioning))
