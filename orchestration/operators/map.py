"""Map: records with other columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.arguments import called
from dagster_adjunct.orchestration.operators.column_lineage import sources_of
from dagster_adjunct.orchestration.operators.expressions import (
    cast_type,
    plain_column,
    split_alias,
    struct_fields,
)
from dagster_adjunct.orchestration.operators.hidden_columns import carried
from dagster_adjunct.orchestration.operators.known_columns import Columns, Types, refuse_double, require
from dagster_adjunct.orchestration.operators.operator_spec import Spec
from dagster_adjunct.orchestration.operators.stream_facts import UNKNOWN
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables.arrow_operations import DEFAULT, UPDATE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.arguments import DataFrameFunction
    from dagster_adjunct.orchestration.operators.column_lineage import LineageContext, Made
    from dagster_adjunct.orchestration.operators.compiling import Batch
    from dagster_adjunct.orchestration.operators.planning_values import Flow, PlanContext

_STRUCT = "named_struct("


@dataclass(frozen=True, slots=True)
class Map(Spec):
    """Records with other columns: either Spark SQL `expressions`, or one DataFrame `function`."""

    kind: ClassVar[str] = "map"
    expressions: tuple[str, ...] = ()
    function: DataFrameFunction | None = None
    keeps_partitioning: bool = False

    def summary(self) -> str:
        return called(self.function) if self.function else ", ".join(self.expressions)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        kept = self._partitioning(flow.partitioned_by)
        flow = replace(flow, columns=self._columns(context.operator, flow.columns))
        if kept == flow.partitioned_by or not flow.partitioned_by:
            return flow
        if kept is not None:
            return replace(flow, partitioned_by=kept)
        return replace(flow, partitioned_by=(), partitioner=UNKNOWN, lost_at=context.operator)

    def _columns(self, operator: str, columns: Columns) -> Columns:
        """Return the columns that are left; None when one of them has no name that can be read off."""
        if self.function is not None:
            return None
        result: list[str] = []
        known = True
        for expression in self.expressions:
            if _is_star(expression):
                known = known and columns is not None
                result.extend(columns or ())
                continue
            what, alias = split_alias(expression)
            column = plain_column(what)
            if column is not None:
                require(operator, "the stream", (column,), columns, "Correct the expression.")
            name = alias or column
            known = known and name is not None
            result.append(name or "")
        named = [name for name in result if name]
        refuse_double(operator, named, "List the columns to keep instead of '*', or choose another name.")
        return tuple(result) if known else None

    def _partitioning(self, partitioned_by: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the names that the partition columns have after it, None when one of them is lost.

        A plain name, a plain name with another ("dest as faa") and "*" pass a column on unchanged.
        """
        if self.function is not None:
            return partitioned_by if self.keeps_partitioning else None
        passed: dict[str, str] = {}
        computed: set[str] = set()
        star = any(map(_is_star, self.expressions))
        for expression in self.expressions:
            what, alias = split_alias(expression)
            column = plain_column(what)
            if column is not None:
                passed.setdefault(column, alias or column)
            elif alias is not None:
                computed.add(alias.lower())
        kept = []
        for column in partitioned_by:
            if star and column.lower() not in computed:
                kept.append(column)
            elif column in passed:
                kept.append(passed[column])
            else:
                return None
        return tuple(kept)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        if types is None or self.function is not None:
            return None
        result: dict[str, str | None] = {}
        for expression in self.expressions:
            if _is_star(expression):
                result |= types
                continue
            what, alias = split_alias(expression)
            column = plain_column(what)
            name = alias or column
            if name is None:
                return None
            result[name] = _type(what, types)
            if alias in (UPDATE, DEFAULT) and what.startswith(_STRUCT) and what.endswith(")"):
                for field, value in struct_fields(what[len(_STRUCT) : -1]):
                    result[f"{alias}.{field}"] = _type(value, types)
        return result

    def column_sources(self, context: LineageContext, arriving: Sequence[Made]) -> Made:
        (columns,) = arriving
        made: Made = {}
        for expression in self.expressions:
            if _is_star(expression):
                made |= columns
                continue
            what, alias = split_alias(expression)
            if alias in (UPDATE, DEFAULT) and what.startswith(_STRUCT) and what.endswith(")"):
                for name, value in struct_fields(what[len(_STRUCT) : -1]):
                    made[f"{alias}.{name}"] = sources_of(value, columns)
                continue
            named = alias or plain_column(what)
            if named is not None:
                made[named] = sources_of(what, columns)
        return made

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: Batch) -> DataFrame:
        (frame,) = frames
        if self.function is not None:
            return batch.call(operator, self.function, frame)
        hidden = [] if any(map(_is_star, self.expressions)) else [f"`{name}`" for name in carried(frame)]
        return frame.selectExpr(*hidden, *self.expressions)


def checked_map(after: str, expressions: Sequence[str | DataFrameFunction], keeps_partitioning: bool) -> Map:
    """Return the map that a user's arguments ask for, behind the operator `after`."""
    functions = [item for item in expressions if callable(item)]
    texts = tuple(item for item in expressions if isinstance(item, str))
    if functions:
        if len(expressions) > 1:
            raise ConfigurationError(
                f"map after {after} mixes a function with other arguments.",
                "Pass the function alone.",
                argument="expressions",
            )
        return Map((), functions[0], keeps_partitioning)
    if not texts or len(texts) < len(expressions) or not all(text.strip() for text in texts):
        raise ConfigurationError(
            f"map after {after} got {expressions!r}: expected Spark SQL expressions or one function.",
            'Write for example map("tailnum", "upper(model) as model").',
            argument="expressions",
        )
    if keeps_partitioning:
        raise ConfigurationError(
            f"map after {after} has keeps_partitioning=True with expressions.",
            "Leave it out: for expressions the planner sees itself what is kept.",
            argument="keeps_partitioning",
        )
    return Map(texts)


def _type(expression: str, types: Mapping[str, str | None]) -> str | None:
    column = plain_column(expression)
    return types.get(column) if column is not None else cast_type(expression)


def _is_star(expression: str) -> bool:
    return expression.strip() == "*"
