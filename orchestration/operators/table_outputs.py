"""`SendToOutputTable`, which appends records to an Iceberg or Delta table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dagster_adjunct.orchestration.operators.batch import Batch, Frame
from dagster_adjunct.orchestration.operators.operator import PassThroughSpec, PlanContext
from dagster_adjunct.orchestration.operators.stream_facts import (
    Columns,
    DeclaredApplication,
    LineageNode,
)
from dagster_adjunct.resources.output_tables.opening import partition_columns


@dataclass(frozen=True, slots=True)
class SendToOutputTable(PassThroughSpec):
    """Records appended to the declared output table `table`; a batch is one commit."""

    kind: ClassVar[str] = "send-to-table"
    works_without_spark: ClassVar[bool] = True
    table: str

    @property
    def writes(self) -> str:
        return self.table

    def target(self, app: DeclaredApplication) -> LineageNode:
        return LineageNode("output-table", self.table)

    def summary(self) -> str:
        return self.table

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        declared = context.app.output_tables[self.table]
        next_step = f"Table {self.table} is partitioned by it."
        columns.require(context.operator, partition_columns(declared.table), next_step)
        return columns

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        """Commit the records to the table, and return them unchanged, computed once."""
        (frame,) = frames
        if batch.planned.has_consumers(operator):
            frame = batch.records.materialize(operator, frame)
        batch.outputs.commit(operator, frame, self.table)
        return frame
