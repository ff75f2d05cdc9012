"""PartitionBy: an intermediate stream, in which records are spread anew."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.arguments import column_names, partition_count
from dagster_adjunct.orchestration.operators.columns.expressions import split_alias
from dagster_adjunct.orchestration.operators.columns.known_columns import require
from dagster_adjunct.orchestration.operators.spec.operator_spec import PassesRecords
from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, StreamEdge
from dagster_adjunct.orchestration.operators.spec.stream_facts import SPARK
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.quoted_columns import column

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.planning_values import PlanContext, Role

_NAMED = re.compile(r"\sas\s", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PartitionBy(PassesRecords):
    """An intermediate stream: the records spread anew by `columns`. `partitions` None: inferred."""

    kind: ClassVar[str] = "partition-by"
    stream: str
    columns: tuple[str, ...]
    partitions: int | None = None

    @property
    def role(self) -> Role:
        return "intermediate"

    def summary(self) -> str:
        return f"by {', '.join(self.columns)}"

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        next_step = 'Name columns that it has; an expression needs a name: partition_by("upper(city) as city_key").'
        require(context.operator, "the stream", self.columns, flow.columns, next_step)
        return Flow(context.operator, flow.columns, self.columns, SPARK)

    def declared_partitions(self, context: PlanContext) -> int | None:
        return self.partitions

    def edge(self, context: PlanContext, flow: Flow, partitions: int) -> StreamEdge:
        declared = "" if self.partitions is None else f"partition_by(partitions={self.partitions})"
        return StreamEdge(self.stream, self.role, partitions, self.columns, SPARK, declared, context.operator)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        (frame,) = frames
        return batch.together(frame).repartition(
            batch.partitions_at(operator), *[column(name) for name in self.columns]
        )


def checked_partition_by(after: str, stream: str, columns: Sequence[str], partitions: int | None) -> PartitionBy:
    """Return the intermediate stream of this name that a user's arguments ask for, behind the operator `after`."""
    what = f"partition_by after {after}"
    names = column_names(what, columns)
    if not names:
        raise ConfigurationError(f"{what} names no column.", "Name the columns to partition by.", argument="columns")
    return PartitionBy(stream, names, partition_count(f"{what}: partitions", partitions))


def key_columns(columns: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names of the columns to partition by, and the expressions of those that have to be computed first."""
    # A column may be called "loud name": only "as" names an expression here.
    split = [split_alias(item) if _NAMED.search(str(item)) else (item, None) for item in columns]
    computed = {alias: what for what, alias in split if alias is not None}
    return tuple(alias or item for item, (_, alias) in zip(columns, split, strict=True)), computed
