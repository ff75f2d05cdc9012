"""SendToStream: records appended to an output stream, which the graph goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dagster_adjunct.orchestration.operators.sends.output_append import AppendsToOutput
from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageNode, whole
from dagster_adjunct.orchestration.operators.spec.operator_spec import PassesRecords
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageContext, Made
    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext
    from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, PlanContext


@dataclass(frozen=True, slots=True)
class SendToStream(AppendsToOutput, PassesRecords):
    """Records appended to an output stream."""

    kind: ClassVar[str] = "send-to"
    stream: str

    def summary(self) -> str:
        return self.stream

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        (flow,) = arriving
        why = f"They are the key of output {context.app.outputs[self.stream].name}."
        return self.appended(context, flow.columns, "the stream", why)

    def column_sources(self, context: LineageContext, arriving: Sequence[Made]) -> Made:
        (made,) = arriving
        return whole(LineageNode("stream", self.stream), made)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
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
