"""WithColumns: records with more columns, or others in the places of some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.arguments import column_names
from dagster_adjunct.orchestration.operators.columns.expressions import plain_column
from dagster_adjunct.orchestration.operators.columns.known_columns import Columns, Types
from dagster_adjunct.orchestration.operators.spec.column_lineage import sources_of
from dagster_adjunct.orchestration.operators.spec.operator_spec import Spec
from dagster_adjunct.orchestration.operators.spec.stream_facts import UNKNOWN
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.sql.checking import checked_expression

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageContext, Made
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, PlanContext


@dataclass(frozen=True, slots=True)
class WithColumns(Spec):
    """All columns, and these: pairs (name, Spark SQL expression over the columns that arrive).

    A column whose name is there is replaced in its place; names ignore case, as Spark's do.
    """

    kind: ClassVar[str] = "with-columns"
    columns: tuple[tuple[str, str], ...]

    def summary(self) -> str:
        return ", ".join(f"{expression} as {name}" for name, expression in self.columns)

    @property
    def sql(self) -> Sequence[str]:
        return tuple(expression for _, expression in self.columns)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        for _, expression in self.columns:
            checked_expression(context.operator, expression, flow.columns)
        moved = replace(flow, columns=self._columns(flow.columns))
        kept = tuple(self._kept(column) for column in flow.partitioned_by)
        if all(kept):
            return replace(moved, partitioned_by=tuple(name for name in kept if name))
        return replace(moved, partitioned_by=(), partitioner=UNKNOWN, lost_at=context.operator)

    def _columns(self, columns: Columns) -> Columns:
        if columns is None:
            return None
        given = {name.lower(): name for name, _ in self.columns}
        there = set(map(str.lower, columns))
        added = (name for name, _ in self.columns if name.lower() not in there)
        kept = columns if there.isdisjoint(given) else tuple(given.get(name.lower(), name) for name in columns)
        return (*kept, *added)

    def _kept(self, column: str) -> str | None:
        """Return the name that a column has after it, None where another one stands in its place."""
        for name, expression in self.columns:
            if name.lower() == column.lower():
                return name if (plain_column(expression) or "").lower() == column.lower() else None
        return column

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        if types is None:
            return None
        known = {
            name: checked_expression(context.operator, expression, tuple(types), types)
            for name, expression in self.columns
        }
        columns = self._columns(tuple(types)) or ()
        if columns[: len(types)] == tuple(types):  # none is replaced under another spelling
            return types | known
        return {name: types.get(name) for name in columns} | known

    def column_sources(self, context: LineageContext, arriving: Sequence[Made]) -> Made:
        (made,) = arriving
        given = {name: sources_of(expression, made) for name, expression in self.columns}
        replaced = {name.lower() for name in given}
        kept = {name: sources for name, sources in made.items() if name.lower() not in replaced}
        return kept | {name: sources for name, sources in given.items() if sources}

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        from pyspark.sql import functions as F

        (frame,) = frames
        return frame.withColumns({name: F.expr(expression) for name, expression in self.columns})


def checked_with_columns(after: str, columns: Mapping[str, str]) -> WithColumns:
    """Return the columns that a user's arguments ask for, behind the operator `after`."""
    what = f"with_columns after {after}"
    if not columns:
        raise ConfigurationError(f"{what} names no column.", 'Write gross="spent * 1.2", say.', argument="columns")
    column_names(what, list(columns))
    for name, expression in columns.items():
        if not isinstance(expression, str) or not expression.strip():
            raise ConfigurationError(
                f"{what} got {name}={expression!r}: expected a Spark SQL expression.",
                f'Write {name}="spent * 1.2", say; a text is {name}="\'text\'".',
                argument=name,
            )
    return WithColumns(tuple(columns.items()))
