"""What operators say whose records are appended to a declared output stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.columns.known_columns import require
from dagster_adjunct.orchestration.operators.sends.exchange_before_sink import before_stream
from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageNode
from dagster_adjunct.orchestration.operators.spec.operator_spec import Spec
from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, StreamEdge
from dagster_adjunct.orchestration.operators.spec.stream_facts import (
    UNKNOWN,
    StreamFacts,
    new_streams_in,
    partitioner_of_output,
)
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.names import split_stream_name

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.spec.declared_sinks import Declarations
    from dagster_adjunct.orchestration.operators.spec.planning_values import Exchange, PlanContext, Role


class AppendsToOutput(Spec):
    """Begins the output stream `stream`, in whose partitions its records lie from then on."""

    __slots__ = ()
    stream: str

    @property
    def role(self) -> Role:
        return "output"

    @property
    def writes(self) -> str:
        return self.stream

    def target(self, app: Declarations) -> LineageNode:
        return LineageNode("stream", self.stream)

    def appended(self, context: PlanContext, columns: tuple[str, ...] | None, what: str, why: str) -> Flow:
        """Return the records in the output stream; refused where `what` lacks its key, or it exists as another."""
        output = context.app.outputs[self.stream]
        require(context.operator, what, output.key, columns, why)
        facts = context.catalog.get(output.name)
        if facts is not None and (facts.partitions, facts.key) != (output.partitions, output.key):
            raise PlanningError(
                f"output stream {output.name!r} exists with {facts.partitions} partitions and key "
                f"({', '.join(facts.key)}); it is declared with {output.partitions} and ({', '.join(output.key)}).",
                "Declare it as it is, or choose another name. A lake stream's partitions can be changed: adjunct "
                f"stream repartition {split_stream_name(output.name)[1]} --partitions {output.partitions} --reason ….",
                stream=output.name,
            )
        needs_key = new_streams_in(context.catalog, output.name).needs_key
        if facts is None and needs_key and not output.key and output.partitions > 1:
            raise PlanningError(
                f"{context.operator}: output stream {output.name!r} is declared with {output.partitions} partitions "
                "and without a key: nothing says in which of them a record belongs.",
                'Declare key="…", or partitions=1.',
                operator=context.operator,
                stream=output.name,
            )
        partitioner = partitioner_of_output(context.catalog, output.name) if output.key else UNKNOWN
        return Flow(context.operator, columns, output.key, partitioner)

    def declared_partitions(self, context: PlanContext) -> int:
        return context.app.outputs[self.stream].partitions

    def edge(self, context: PlanContext, flow: Flow, partitions: int) -> StreamEdge:
        by, partitioner = flow.partitioned_by, flow.partitioner
        return StreamEdge(self.stream, self.role, partitions, by, partitioner, "output", context.operator)

    def exchange_before(self, context: PlanContext, flow: Flow, partitions: int) -> Exchange | None:
        output = context.app.outputs[self.stream]
        partitioner = partitioner_of_output(context.catalog, output.name)
        stream = StreamFacts(output.name, output.partitions, output.key, partitioner)
        return before_stream(context.operator, "output", stream, flow, partitions)
