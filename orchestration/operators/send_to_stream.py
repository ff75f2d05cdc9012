"""SendToStream: records appended to an output stream, which the graph goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dagster_adjunct.orchestration.operators.column_lineage import Node, whole
from dagster_adjunct.orchestration.operators.exchange_before_sink import before_stream
from dagster_adjunct.orchestration.operators.known_columns import require
from dagster_adjunct.orchestration.operators.operator_spec import PassesRecords
from dagster_adjunct.orchestration.operators.planning_values import Flow, StreamEdge
from dagster_adjunct.orchestration.operators.stream_facts import UNKNOWN, StreamFacts, partitioner_of_output
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.column_lineage import LineageContext, Made
    from dagster_adjunct.orchestration.operators.compiling import Batch
    from dagster_adjunct.orchestration.operators.declared_sinks import Declarations
    from dagster_adjunct.orchestration.operators.planning_values import Exchange, PlanContext, Role


@dataclass(frozen=True, slots=True)
class SendToStream(PassesRecords):
    """Records appended to an output stream."""

    kind: ClassVar[str] = "send-to"
    stream: str

    @property
    def role(self) -> Role:
        return "output"

    @property
    def writes(self) -> str:
        return self.stream

    def target(self, app: Declarations) -> Node:
        return Node("stream", self.stream)

    def summary(self) -> str:
        return self.stream

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        output = context.app.outputs[self.stream]
        what = f"They are the key of output {output.name}."
        require(context.operator, "the stream", output.key, flow.columns, what)
        facts = context.catalog.get(output.name)
        if facts is not None and (facts.partitions, facts.key) != (output.partitions, output.key):
            raise PlanningError(
                f"output stream {output.name!r} exists with {facts.partitions} partitions and key "
                f"({', '.join(facts.key)}); it is declared with {output.partitions} and ({', '.join(output.key)}).",
                "Declare it as it is, or choose another name. A lake stream's partitions can be changed: adjunct "
                f"stream repartition {output.name.partition('.')[2]} --partitions {output.partitions} --reason ….",
                stream=output.name,
            )
        partitioner = partitioner_of_output(context.catalog, output.name) if output.key else UNKNOWN
        return Flow(context.operator, flow.columns, output.key, partitioner)

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

    def column_sources(self, context: LineageContext, arriving: Sequence[Made]) -> Made:
        (made,) = arriving
        return whole(Node("stream", self.stream), made)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: Batch) -> DataFrame:
        """Append to the output stream and go on with what it holds of this batch, where its system can tell."""
        (frame,) = frames
        output = batch.app.outputs[self.stream]
        system = batch.system_of(self.stream)
        goes_on = batch.goes_on(operator)
        if goes_on and not system.appends_alone:
            # Others may write between these records: go on with those that were sent, computed once.
            frame = batch.computed_once(operator, frame)
        result = batch.send(operator, frame, self.stream, key=output.key, partitions=output.partitions)
        if result is None or not goes_on or not system.appends_alone:
            return frame
        system_name, stream = split_stream_name(self.stream)
        ranges = {
            SystemStreamPartition(system_name, stream, partition): OffsetRange(start, result.next[partition])
            for partition, start in result.first.items()
        }
        # The positions in the input go on with the records, not their new ones.
        more: dict[str, Any] = {"positions": True} if system.keeps_positions else {}
        return system.read(frame.sparkSession, ranges, **more)
