"""`SendDeadLetters`, which sends the records that a remote table rejected to a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dagster_adjunct.orchestration.operators.batch import Batch, Frame
from dagster_adjunct.orchestration.operators.operator import Exchange, Flow, PlanContext
from dagster_adjunct.orchestration.operators.sends import OutputStreamSpec
from dagster_adjunct.orchestration.operators.stream_facts import UNKNOWN, ColumnFacts, Columns

# The table that rejected a record, the operation ("put", "update", "delete"), its key and record as
# JSON, the reason.
DEAD_LETTER_COLUMNS = {
    "table": "string",
    "kind": "string",
    "key": "string",
    "record": "string",
    "problem": "string",
}
_DEAD_LETTERS = Columns({name: ColumnFacts(kind) for name, kind in DEAD_LETTER_COLUMNS.items()})


@dataclass(frozen=True, slots=True)
class SendDeadLetters(OutputStreamSpec):
    """The records that the table of the operator before rejected, sent to `stream`: at most
    `at_most` per batch.
    """

    kind: ClassVar[str] = "dead-letters"
    keeps_each: ClassVar[bool] = False
    stream: str
    at_most: int

    def summary(self) -> str:
        return f"up to {self.at_most} rejected records of a batch to {self.stream}"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        next_step = "Correct the output stream's key=."
        self.check_output(context, _DEAD_LETTERS, "a dead letter", next_step)
        return _DEAD_LETTERS

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        # Dead letters come from the driver, in no partitions.
        letters = Flow(context.operator, (), UNKNOWN)
        return OutputStreamSpec.exchange_before(self, context, letters, partitions)

    def written(self, arriving: Columns) -> Columns:
        return _DEAD_LETTERS

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        output = batch.planned.app.outputs[self.stream]
        letters = batch.outputs.refused_records(operator)
        batch.outputs.send_dead_letters(
            operator, letters, self.stream, key=output.key, partitions=output.partitions
        )
        return letters
