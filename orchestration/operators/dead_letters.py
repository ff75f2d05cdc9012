"""DeadLetters: the records that a table has refused for good, appended to a stream before the batch is committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.column_lineage import Node
from dagster_adjunct.orchestration.operators.exchange_before_sink import before_stream
from dagster_adjunct.orchestration.operators.known_columns import require
from dagster_adjunct.orchestration.operators.operator_spec import Spec
from dagster_adjunct.orchestration.operators.planning_values import Flow, StreamEdge
from dagster_adjunct.orchestration.operators.stream_facts import UNKNOWN, StreamFacts, partitioner_of_output

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.column_lineage import Made
    from dagster_adjunct.orchestration.operators.compiling import Batch
    from dagster_adjunct.orchestration.operators.declared_sinks import Declarations
    from dagster_adjunct.orchestration.operators.known_columns import Types
    from dagster_adjunct.orchestration.operators.planning_values import Exchange, PlanContext, Role

# Of each refused record: the table, what was asked of it ("put", "update", "delete"), key and record as JSON, and why.
LETTER = {"table": "string", "kind": "string", "key": "string", "record": "string", "problem": "string"}


@dataclass(frozen=True, slots=True)
class DeadLetters(Spec):
    """What the table of the operator before refused, in the output stream `stream`: at most `at_most` of a batch."""

    kind: ClassVar[str] = "dead-letters"
    stream: str
    at_most: int

    @property
    def role(self) -> Role:
        return "output"

    @property
    def writes(self) -> str:
        return self.stream

    def target(self, app: Declarations) -> Node:
        return Node("stream", self.stream)

    def summary(self) -> str:
        return f"up to {self.at_most} refused records of a batch to {self.stream}"

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        output = context.app.outputs[self.stream]
        require(context.operator, "a dead letter", output.key, tuple(LETTER), "Correct the output stream's key=.")
        partitioner = partitioner_of_output(context.catalog, output.name) if output.key else UNKNOWN
        return Flow(context.operator, tuple(LETTER), output.key, partitioner)

    def declared_partitions(self, context: PlanContext) -> int:
        return context.app.outputs[self.stream].partitions

    def edge(self, context: PlanContext, flow: Flow, partitions: int) -> StreamEdge:
        by, partitioner = flow.partitioned_by, flow.partitioner
        return StreamEdge(self.stream, self.role, partitions, by, partitioner, "output", context.operator)

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        output = context.app.outputs[self.stream]
        stream = StreamFacts(
            output.name, output.partitions, output.key, partitioner_of_output(context.catalog, output.name)
        )
        letters = Flow(context.operator, tuple(LETTER), (), UNKNOWN)
        return before_stream(context.operator, "output", stream, letters, partitions)

    def types(self, context: PlanContext, arriving: Sequence[Types]) -> Types:
        return dict(LETTER)

    def written_types(self, arriving: Types) -> Types:
        return dict(LETTER)

    def written_columns(self, arriving: Made) -> Made:
        return {}

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: Batch) -> DataFrame:
        output = batch.app.outputs[self.stream]
        letters = batch.letters(operator)
        batch.send_letters(operator, letters, self.stream, key=output.key, partitions=output.partitions)
        return letters
