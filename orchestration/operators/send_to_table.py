"""SendToTable: records written to a table, beside the way on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.column_lineage import Node, add
from dagster_adjunct.orchestration.operators.exchange_before_sink import before_stream, before_table
from dagster_adjunct.orchestration.operators.known_columns import require
from dagster_adjunct.orchestration.operators.operator_spec import PassesRecords
from dagster_adjunct.orchestration.operators.planning_values import Requirement
from dagster_adjunct.orchestration.operators.stream_facts import StreamFacts, facts_of
from dagster_adjunct.resources.tables.spark_write import DEFAULT, UPDATE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.arguments import OnNullKey
    from dagster_adjunct.orchestration.operators.column_lineage import Made
    from dagster_adjunct.orchestration.operators.compiling import Batch
    from dagster_adjunct.orchestration.operators.declared_sinks import Declarations
    from dagster_adjunct.orchestration.operators.planning_values import Exchange, Flow, PlanContext
    from dagster_adjunct.resources.tables.partial_update import UpdateContract


@dataclass(frozen=True, slots=True)
class SendToTable(PassesRecords):
    """Records written to a table: a remote one, or (`dataset`) the stream that feeds a dataset."""

    kind: ClassVar[str] = "send-to-table"
    table: str
    dataset: bool = False
    contract: UpdateContract | None = None
    on_null_key: OnNullKey = "fail"

    @property
    def writes(self) -> str:
        return self.table

    def target(self, app: Declarations) -> Node:
        return Node("stream", self._fed(app)) if self.dataset else Node("table", self.table)

    def _fed(self, app: Declarations) -> str:
        stream = app.dataset(self.table).stream
        assert stream is not None  # MessageStream.send_to refuses others
        return stream

    def summary(self) -> str:
        contract = f" ({self.contract.value})" if self.contract is not None else ""
        return f"{'dataset' if self.dataset else 'table'} {self.table}{contract}"

    def requirement(self, app: Declarations) -> Requirement | None:
        if not self.dataset:
            return None
        dataset = app.dataset(self.table)
        return None if dataset.partitions is None else Requirement(dataset.name, dataset.partitions, None)

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        key = context.app.dataset(self.table).key if self.dataset else context.app.table_key(self.table)
        require(context.operator, "the stream", key, flow.columns, f"They are the key of table {self.table}.")
        return flow

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        if not self.dataset:
            return before_table(context.operator, self.table, context.app.table_key(self.table), flow, partitions)
        facts = facts_of(context.catalog, self._fed(context.app), context.operator)
        key = facts.key or context.app.dataset(self.table).key
        stream = StreamFacts(facts.name, facts.partitions, key, facts.partitioner)
        return before_stream(context.operator, "dataset", stream, flow, partitions)

    def written_columns(self, arriving: Made) -> Made:
        """Of update messages, a table's columns are those of the update and of the default record."""
        if self.dataset:
            return arriving
        written: Made = {}
        for name, sources in arriving.items():
            add(written, name.partition(".")[2] if name.startswith((f"{UPDATE}.", f"{DEFAULT}.")) else name, sources)
        return written

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: Batch) -> DataFrame:
        """Write the records; the dataset takes its changes when it next advances."""
        (frame,) = frames
        if self.dataset:
            dataset = batch.app.dataset(self.table)
            key, partitions = dataset.partition_by or dataset.key, dataset.partitions or 1
            batch.send(operator, frame, self._fed(batch.app), key=key, partitions=partitions)
        else:
            batch.write(operator, frame, self.table, self.contract, self.on_null_key)
        return frame
