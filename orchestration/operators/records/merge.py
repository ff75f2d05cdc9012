"""Merge: the records of several inputs, by the names of their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.columns.known_columns import Types
from dagster_adjunct.orchestration.operators.spec.column_lineage import add
from dagster_adjunct.orchestration.operators.spec.operator_spec import Spec
from dagster_adjunct.orchestration.operators.spec.planning_values import agreed
from dagster_adjunct.orchestration.operators.spec.stream_facts import SPARK, UNKNOWN
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.sql.expression_types import differ

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageContext, Made
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, PlanContext


@dataclass(frozen=True, slots=True)
class Merge(Spec):
    """The records of all inputs, which have the same columns of the same types; they stand in the first one's order.

    `inputs` are the ids of the operators whose records they are.
    """

    kind: ClassVar[str] = "merge"
    inputs: tuple[str, ...]

    def summary(self) -> str:
        return f"of {', '.join(self.inputs)}"

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        first, *others = arriving
        for source, other in zip(self.inputs[1:], others, strict=True):
            if first.columns is not None and other.columns is not None:
                self._check_names(context.operator, first.columns, source, other.columns)
        flow = agreed(context, arriving)
        if flow.partitioner == SPARK or not flow.partitioned_by:
            return flow
        # Another system's client has chosen the partition, and several tasks may read one: nothing lies by it here.
        return replace(flow, partitioned_by=(), partitioner=UNKNOWN, lost_at=context.operator)

    def _check_names(self, operator: str, first: Sequence[str], source: str, other: Sequence[str]) -> None:
        missing = [name for name in first if name not in other]
        more = [name for name in other if name not in first]
        if not missing and not more:
            return
        lacks = f"has no {', '.join(map(repr, missing))}" if missing else ""
        has = f"has {', '.join(map(repr, more))}" if more else ""
        kept = ", ".join(f'"{name}"' for name in first if name in other) or '"…"'
        raise PlanningError(
            f"{operator}: its inputs have different columns: {source} {' and '.join(filter(None, (lacks, has)))}, "
            f"unlike {self.inputs[0]}.",
            f"Give all of them the same: .select({kept}) of each, or .with_columns(…) for what is missing.",
            operator=operator,
            column=(missing or more)[0],
        )

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        known = [(source, types) for source, types in zip(self.inputs, arriving, strict=True) if types is not None]
        if len(known) < len(self.inputs):
            return None
        for source, types in known[1:]:
            self._check_types(context.operator, known[0][1], source, types)
        return {
            name: next((types[name] for _, types in known if types.get(name) is not None), None) for name in known[0][1]
        }

    def _check_types(
        self, operator: str, first: Mapping[str, str | None], source: str, other: Mapping[str, str | None]
    ) -> None:
        for name, kind in first.items():
            there = other.get(name)
            if kind is not None and there is not None and differ(kind, there):
                raise PlanningError(
                    f"{operator}: its inputs have different types of {name!r}: {there} in {source}, {kind} in "
                    f"{self.inputs[0]}; equal values of different types would lie in different partitions.",
                    f'Cast it in one of them: .with_columns({name}="cast({name} as {kind})").',
                    operator=operator,
                    column=name,
                )

    def column_sources(self, context: LineageContext, arriving: Sequence[Made]) -> Made:
        result: Made = {}
        for made in arriving:
            for name, sources in made.items():
                add(result, name, sources)
        return {name: sources for name, sources in result.items() if all(name in made for made in arriving)}

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        own = [{name: kind for name, kind in frame.dtypes if not name.startswith("__")} for frame in frames]
        for source, types in zip(self.inputs[1:], own[1:], strict=True):
            self._check_names(operator, tuple(own[0]), source, tuple(types))
            self._check_types(operator, own[0], source, types)
        by = batch.lying_by(operator)
        first, *others = frames
        if by:
            # Spark puts partition i of all inputs together where they lie alike. It compares them by the names that the
            # columns have in their files, unless these are columns of the frame's own: that needs more than an alias.
            first = first.withColumns({name: column(name).alias(name, metadata={"merged": 1}) for name in by})
        # Of the hidden columns some have only what one input has been through: the others have null there.
        merged = reduce(lambda left, right: left.unionByName(right, allowMissingColumns=True), others, first)
        if not by:
            return merged
        partitions = batch.partitions_at(operator)
        if partitions == 1:
            return merged.coalesce(1)
        # Where Spark sees that they lie so, it leaves this out.
        return merged.repartition(partitions, *map(column, by))


def checked_merge(after: str, others: Sequence[str]) -> Merge:
    """Return the merge of the operator `after` and these others."""
    return Merge((after, *others))
