"""DeadLetters: the records that a table has refused for good, appended to a stream before the batch is committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.sends.output_append import AppendsToOutput
from dagster_adjunct.orchestration.operators.spec.planning_values import Flow
from dagster_adjunct.orchestration.operators.spec.stream_facts import UNKNOWN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.columns.known_columns import Types
    from dagster_adjunct.orchestration.operators.spec.column_lineage import Made
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.planning_values import Exchange, PlanContext

# Of each refused record: the table, what was asked of it ("put", "update", "delete"), key and record as JSON, and why.
LETTER = {"table": "string", "kind": "string", "key": "string", "record": "string", "problem": "string"}


@dataclass(frozen=True, slots=True)
class SendDeadLetters(AppendsToOutput):
    """What the table of the operator before refused, in the output stream `stream`: at most `at_most` of a batch."""

    kind: ClassVar[str] = "dead-letters"
    stream: str
    at_most: int

    def summary(self) -> str:
        return f"up to {self.at_most} refused records of a batch to {self.stream}"

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return self.appended(context, tuple(LETTER), "a dead letter", "Correct the output stream's key=.")

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        letters = Flow(context.operator, tuple(LETTER), (), UNKNOWN)  # they come from the driver, not from partitions
        return AppendsToOutput.exchange_before(self, context, letters, partitions)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        return dict(LETTER)

    def written_types(self, arriving: Types) -> Types:
        return dict(LETTER)

    def written_columns(self, arriving: Made) -> Made:
        return {}

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        output = batch.app.outputs[self.stream]
        letters = batch.letters(operator)
        batch.send_letters(operator, letters, self.stream, key=output.key, partitions=output.partitions)
        return letters
