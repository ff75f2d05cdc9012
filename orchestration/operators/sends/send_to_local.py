"""SendToLocal: records kept in a local table of the application, beside the way on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.assets.declaration.inputs_besides_streams import OwnedBy
from dagster_adjunct.orchestration.operators.columns.known_columns import require
from dagster_adjunct.orchestration.operators.sends.exchange_before_sink import before_local
from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageNode
from dagster_adjunct.orchestration.operators.spec.operator_spec import PassesRecords
from dagster_adjunct.orchestration.operators.spec.planning_values import ComparedColumn, Requirement
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.sql.checking import checked_condition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.operators.arguments import OnNullKey
    from dagster_adjunct.orchestration.operators.columns.known_columns import Types
    from dagster_adjunct.orchestration.operators.spec.column_lineage import Made
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.declared_sinks import Declarations
    from dagster_adjunct.orchestration.operators.spec.planning_values import Exchange, Flow, PlanContext
    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class SendToLocal(PassesRecords):
    """Records kept by key in a local table with these columns; those that meet the expression `deleted` delete."""

    kind: ClassVar[str] = "send-to-table"
    table: str
    schema: Schema
    deleted: str | None = None
    on_null_key: OnNullKey = "fail"

    @property
    def sql(self) -> Sequence[str]:
        return () if self.deleted is None else (self.deleted,)

    @property
    def writes(self) -> str:
        return self.table

    @property
    def feeds(self) -> str:
        return self.table

    def target(self, app: Declarations) -> LineageNode:
        return LineageNode("dataset", self.table)

    def summary(self) -> str:
        deleted = f", deleted where {self.deleted}" if self.deleted is not None else ""
        return f"local table {self.table} ({', '.join(self.schema.names)}){deleted}"

    def requirements(self, app: Declarations) -> Sequence[Requirement | None]:
        return (Requirement(self.table, app.dataset(self.table).partitions, None, feeds=True),)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        names = self.schema.names
        require(context.operator, "the stream", names, flow.columns, f"They are the columns of table {self.table}.")
        if self.deleted is not None:
            checked_condition(context.operator, self.deleted, flow.columns)
        return flow

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        self.check_types(context.operator, types)
        if self.deleted is not None and types is not None:
            checked_condition(context.operator, self.deleted, tuple(types), types)
        return types

    def declared_types(self, context: PlanContext, arriving: Sequence[Types]) -> Sequence[ComparedColumn]:
        (types,) = arriving
        what, known = f"local table {self.table}", types or {}
        return [ComparedColumn(field.name, known.get(field.name), what, field.type) for field in self.schema.fields]

    def check_types(self, operator: str, types: Types) -> None:
        """Refuse columns of other types than the table's, as far as types are known."""
        for field in self.schema.fields:
            known = None if types is None else types.get(field.name)
            if known is not None and known != field.type:
                raise PlanningError(
                    f"{operator}: column {field.name!r} is {known}, and local table {self.table} is declared with "
                    f"{field.type}.",
                    f'Cast it before: .map("*", …) with cast({field.name} as {field.type}); or declare the column so.',
                    column=field.name,
                    operator=operator,
                )

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        dataset = context.app.dataset(self.table)
        assert dataset.partitions is not None, "a local table has buckets"
        return before_local(context.operator, self.table, dataset.partition_by, dataset.partitions, flow, partitions)

    def written_types(self, arriving: Types) -> Types:
        return None if arriving is None else {name: arriving.get(name) for name in self.schema.names}

    def written_columns(self, arriving: Made) -> Made:
        return {name: sources for name, sources in arriving.items() if name in self.schema}

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        """Keep the records; what goes on are the records as they came, computed once."""
        (frame,) = frames
        self.check_types(operator, dict(frame.dtypes))
        if batch.goes_on(operator):
            frame = batch.computed_once(operator, frame)
        batch.keep(operator, frame, self.table, deleted=self.deleted, on_null_key=self.on_null_key)
        return frame


def checked_send_to_local(
    application: str, after: str, table: AdjunctDataset, deleted: str | None, on_null_key: OnNullKey
) -> SendToLocal:
    """Return what a user's arguments ask for; `after` is the operator before it."""
    owned = table.input
    assert isinstance(owned, OwnedBy), "it is a local table"
    if owned.application != application:
        raise PlanningError(
            f"send_to after {after}: local table {table.name!r} belongs to application {owned.application!r}, which "
            "alone writes it.",
            "Send to a stream that the other application reads. Joining the table is fine.",
            dataset=table.name,
            operator=after,
        )
    if on_null_key not in ("fail", "skip"):
        raise ConfigurationError(
            f"send_to after {after} has on_null_key={on_null_key!r}.", "Write fail or skip.", argument="on_null_key"
        )
    if deleted is not None and (not isinstance(deleted, str) or not deleted.strip()):
        raise ConfigurationError(
            f"send_to after {after} has deleted={deleted!r}: expected a Spark SQL condition.",
            'Write what marks an entry that goes: deleted="visits = 0", say.',
            argument="deleted",
        )
    return SendToLocal(table.name, owned.schema, deleted, on_null_key)
