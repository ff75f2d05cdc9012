"""SendToTable: records written to a table, beside the way on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.columns.hidden_columns import carried
from dagster_adjunct.orchestration.operators.columns.known_columns import require
from dagster_adjunct.orchestration.operators.columns.update_columns import with_lists
from dagster_adjunct.orchestration.operators.sends.exchange_before_sink import before_stream, before_table
from dagster_adjunct.orchestration.operators.sends.refused_table_sends import (
    CheckedSink,
    check_columns,
    check_table,
    declared_types,
    summed_columns,
)
from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageNode, add, sources_of
from dagster_adjunct.orchestration.operators.spec.operator_spec import PassesRecords
from dagster_adjunct.orchestration.operators.spec.planning_values import Requirement
from dagster_adjunct.orchestration.operators.spec.stream_facts import StreamFacts, facts_of
from dagster_adjunct.orchestration.operators.spec.table_sends import ChangedColumns
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.quoted_columns import quoted
from dagster_adjunct.resources.sql.checking import checked_expression
from dagster_adjunct.resources.tables.arrow_operations import DEFAULT, UPDATE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.columns.known_columns import Types
    from dagster_adjunct.orchestration.operators.spec.column_lineage import Made
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.declared_sinks import Declarations
    from dagster_adjunct.orchestration.operators.spec.planning_values import ComparedColumn, Exchange, Flow, PlanContext
    from dagster_adjunct.orchestration.operators.spec.table_sends import TableSend


@dataclass(frozen=True, slots=True)
class SendToTable(PassesRecords):
    """Records written to a remote table, as `send` says."""

    kind: ClassVar[str] = "send-to-table"
    send: TableSend

    @property
    def writes(self) -> str:
        return self.send.table

    @property
    def sends(self) -> TableSend:
        return self.send

    @property
    def sql(self) -> Sequence[str]:
        return tuple(expression for _, _, expression in self._written)

    @property
    def _written(self) -> Sequence[tuple[str, str, str]]:
        return () if self.send.update is None else self.send.update.written

    @property
    def adds(self) -> bool:
        update = self.send.update
        return update is not None and bool(update.add or update.append)

    def target(self, app: Declarations) -> LineageNode:
        return LineageNode("table", self.send.table)

    def summary(self) -> str:
        contract = f" ({self.send.contract.value})" if self.send.contract is not None else ""
        update, parts = self.send.update, ""
        if update is not None:
            parts = "".join(f", {part} {', '.join(name for name, _ in pairs)}" for part, pairs in update.parts.items())
            parts += f", remove {', '.join(update.remove)}" if update.remove else ""
        return f"table {self.send.table}{contract}{parts}"

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        table = self.send.table
        key = context.app.table_key(table)
        require(context.operator, "the stream", key, flow.columns, f"They are the key of table {table}.")
        check_table(context.operator, self._sink(context.app))
        for part, name, expression in self._written:
            where = f"Correct {part}= for column {name!r} of table {table}."
            checked_expression(context.operator, expression, flow.columns, next_step=where)
        if self.send.contract is not None and self.send.update is None:
            require(
                context.operator, "the stream", (UPDATE,), flow.columns,
                f"With a contract table {table} takes updates: give records their form with "
                ".map(*update_message(…)), or write stream.update(table, set={…}); or leave the contract out.",
            )  # fmt: skip
        return flow

    def declared_types(self, context: PlanContext, arriving: Sequence[Types]) -> Sequence[ComparedColumn]:
        (types,) = arriving
        return declared_types(self._sink(context.app), types)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        (types,) = arriving
        for expression in () if types is None else self.sql:
            checked_expression(context.operator, expression, tuple(types or ()), types)
        check_columns(context.operator, self._sink(context.app), types)
        return types

    def changed(self, app: Declarations, arriving: Types) -> ChangedColumns | None:
        update = self.send.update
        if update is None:
            return None
        summed = summed_columns(self._sink(app), arriving)
        return ChangedColumns(
            frozenset(name for name, _ in update.set) | frozenset(update.remove),
            summed,
            frozenset(name for name, _ in update.append),
            frozenset(name for name, _ in update.add) - summed,
            frozenset(name for name, _ in update.if_missing or ()) - frozenset(app.table_key(self.send.table)),
        )

    def _sink(self, app: Declarations) -> CheckedSink:
        return CheckedSink(app.tables[self.send.table], self.send)

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        table = self.send.table
        return before_table(context.operator, table, context.app.table_key(table), flow, partitions)

    def written_columns(self, arriving: Made) -> Made:
        """Of update messages, a table's columns are those of the update and of the default record."""
        written: Made = {}
        if self.send.update is not None:
            for _, name, expression in self._written:
                add(written, name, sources_of(expression, arriving))
            return written
        for name, sources in arriving.items():
            add(written, name.partition(".")[2] if name.startswith((f"{UPDATE}.", f"{DEFAULT}.")) else name, sources)
        return written

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        """Write the records; what goes on are the records as they came, computed once."""
        (frame,) = frames
        if batch.goes_on(operator):
            frame = batch.computed_once(operator, frame)
        written = frame
        if self.send.update is not None:
            key = [quoted(name) for name in batch.app.table_key(self.send.table)]
            update = with_lists(self.send.update, frame)
            hidden = [quoted(name) for name in carried(frame)]
            written = frame.selectExpr(*hidden, *key, *update.expressions())
        batch.write(operator, written, self.send)
        return frame


@dataclass(frozen=True, slots=True)
class SendToDataset(PassesRecords):
    """Records written to the stream that feeds a dataset."""

    kind: ClassVar[str] = "send-to-table"
    table: str

    @property
    def writes(self) -> str:
        return self.table

    @property
    def feeds(self) -> str:
        return self.table

    def target(self, app: Declarations) -> LineageNode:
        return LineageNode("stream", self._fed(app))

    def _fed(self, app: Declarations) -> str:
        stream = app.dataset(self.table).stream
        assert stream is not None  # MessageStream.send_to refuses others
        return stream

    def summary(self) -> str:
        return f"dataset {self.table}"

    def requirements(self, app: Declarations) -> Sequence[Requirement | None]:
        dataset = app.dataset(self.table)
        if dataset.partitions is None:
            return ()
        return (Requirement(dataset.name, dataset.partitions, None, feeds=True),)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        key = context.app.dataset(self.table).key
        require(context.operator, "the stream", key, flow.columns, f"They are the key of table {self.table}.")
        return flow

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        facts = facts_of(context.catalog, self._fed(context.app), context.operator)
        key = facts.key or context.app.dataset(self.table).key
        stream = StreamFacts(facts.name, facts.partitions, key, facts.partitioner)
        return before_stream(context.operator, "dataset", stream, flow, partitions)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        """Write the records; the dataset takes its changes when it next advances.

        The stream is there, as planning asks, and stays as it is: how it is spread is its own, and need not be as the
        dataset's buckets are, which another deployment may change.
        """
        (frame,) = frames
        fed = self._fed(batch.app)
        stream = batch.system_of(fed).info(split_stream_name(fed)[1])
        batch.send(operator, frame, fed, key=stream.key, partitions=stream.partitions)
        return frame
