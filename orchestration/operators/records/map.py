"""Map: records with other columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.arguments import called
from dagster_adjunct.orchestration.operators.columns.hidden_columns import carried
from dagster_adjunct.orchestration.operators.columns.known_columns import Columns, Types, check_names
from dagster_adjunct.orchestration.operators.spec.column_lineage import expression_sources
from dagster_adjunct.orchestration.operators.spec.operator_spec import Spec
from dagster_adjunct.orchestration.operators.spec.stream_facts import UNKNOWN
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.sql.expression_types import type_of
from dagster_adjunct.resources.sql.parsing import parsed, struct_fields
from dagster_adjunct.resources.sql.select_list import checked_list
from dagster_adjunct.resources.tables.arrow_operations import DEFAULT, UPDATE
from dagster_adjunct.resources.user_code import check_plain_function

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.arguments import DataFrameFunction
    from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageContext, Made
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, PlanContext


@dataclass(frozen=True, slots=True)
class Map(Spec):
    """Records with other columns: either Spark SQL `expressions`, or one DataFrame `function`."""

    kind: ClassVar[str] = "map"
    expressions: tuple[str, ...] = ()
    function: DataFrameFunction | None = None
    keeps_partitioning: bool = False

    @property
    def promises_partitioning(self) -> bool:
        return self.keeps_partitioning

    def summary(self) -> str:
        return called(self.function) if self.function else ", ".join(self.expressions)

    @property
    def sql(self) -> Sequence[str]:
        return self.expressions

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
        for item in checked_list(operator, self.expressions, columns):
            if item.expression.star:
                known = known and columns is not None
                result.extend(item.stars(columns or ()))
            else:
                known = known and item.expression.name is not None
                result.append(item.expression.name or "")
        named = [name for name in result if name]
        check_names(operator, named, "List the columns to keep instead of '*', or choose another name.")
        return tuple(result) if known else None

    def _partitioning(self, partitioned_by: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the names that the partition columns have after it, None when one of them is lost.

        A plain name, a plain name with another ("dest as faa") and "*" pass a column on unchanged.
        """
        if self.function is not None:
            return partitioned_by if self.keeps_partitioning else None
        passed: dict[str, str] = {}
        lost: set[str] = set()
        star = False
        for expression in map(parsed, self.expressions):
            if expression.star:
                star = True
                lost |= {name.lower() for name in expression.excepted}
            elif expression.column is not None:
                passed.setdefault(expression.column.lower(), expression.name or expression.column)
            elif expression.alias is not None:
                lost.add(expression.alias.lower())
        kept = []
        for column in partitioned_by:
            if star and column.lower() not in lost:
                kept.append(column)
            elif column.lower() in passed:
                kept.append(passed[column.lower()])
            else:
                return None
        return tuple(kept)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        if types is None or self.function is not None:
            return None
        result: dict[str, str | None] = {}
        for item in checked_list(context.operator, self.expressions, tuple(types), types):
            name = item.expression.name
            if item.expression.star:
                result |= {column: types[column] for column in item.stars(tuple(types))}
                continue
            if name is None:
                return None
            result[name] = item.type
            if name in (UPDATE, DEFAULT):
                result |= {f"{name}.{field}": type_of(value, types) for field, value in struct_fields(item.expression)}
        return result

    def column_sources(self, context: LineageContext, arriving: Sequence[Made]) -> Made:
        (columns,) = arriving
        made: Made = {}
        named: Made = {}
        for expression in map(parsed, self.expressions):
            if expression.star:
                gone = {name.lower() for name in expression.excepted}
                made |= {name: sources for name, sources in columns.items() if name.lower() not in gone}
                continue
            fields = struct_fields(expression) if expression.name in (UPDATE, DEFAULT) else ()
            for name, value in fields:
                made[f"{expression.name}.{name}"] = expression_sources(value, columns, named)
            if expression.name is not None and not fields:
                made[expression.name] = expression_sources(expression, columns, named)
                named[expression.name] = made[expression.name]
        return made

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        (frame,) = frames
        if self.function is not None:
            return batch.call(operator, self.function, frame)
        hidden = [] if any(parsed(text).star for text in self.expressions) else [f"`{name}`" for name in carried(frame)]
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
        check_plain_function(f"map after {after}", functions[0], "expressions", "frame")
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
