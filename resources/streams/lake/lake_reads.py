"""What lake streams hold, read by Spark or without it: exact ranges, or of these the latest results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.resources.spark.given_session import session_of
from dagster_adjunct.resources.streams.interface.checked_arguments import check_epochs, one_stream
from dagster_adjunct.resources.streams.interface.marker_times import time_of_micros
from dagster_adjunct.resources.streams.interface.numbered_offsets import NumberedOffsets, parse_offset
from dagster_adjunct.resources.streams.interface.stream_system import POSITION, Epochs, Marker, OffsetRange
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition
from dagster_adjunct.resources.streams.lake.arrow_read import meta_schema, read_tables
from dagster_adjunct.resources.streams.lake.latest_results import (
    WithoutPosition,
    only_latest,
    only_latest_frame,
    replaced_results,
    without_positions,
)
from dagster_adjunct.resources.streams.lake.ranges import check_ranges
from dagster_adjunct.resources.streams.lake.segment_index import Span, markers_in, touches, walk
from dagster_adjunct.resources.streams.lake.stream_manifest import Segment, StreamState
from dagster_adjunct.resources.streams.lake.stream_states import StreamStates
from dagster_adjunct.resources.streams.lake.task_reads import TaskReads

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


class LakeReads(StreamStates, NumberedOffsets):
    """The reading half of `LakeStreams`."""

    def records_between(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> int:
        if not ranges:
            return 0
        stream = one_stream(self.name, ranges)
        _, state = self.state(stream)
        spans = check_ranges(stream, state, ranges)
        width = sum(end - start for start, end in spans.values())
        return width - len(markers_in(state, self.pages_of(stream), spans))

    def read(
        self,
        spark: SparkSession | Callable[[], SparkSession],
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        *,
        epochs: Epochs = "all",
        positions: bool = False,
        without_position: WithoutPosition = "refuse",
    ) -> DataFrame:
        """Return the records of these ranges of one stream, as a scan that is bucketed by its key.

        Exactly these; with `epochs="latest"` those of them that no later epoch has replaced by now, in the whole
        stream. That refuses records that do not tell what they were made of, or keeps them all
        (`without_position="keep"`). With `positions`, the columns of POSITION follow.
        """
        from dagster_adjunct.resources.streams.lake.spark_read import read_frame

        spark = session_of(spark)
        latest = check_epochs(epochs)
        stream, state, segments, spans = self._found(ranges)
        prefix = self.lake.stream_prefix(stream)
        replaced = replaced_results(self, stream, state, segments, without_position) if latest else []
        frame = read_frame(
            spark, self.lake.store, prefix, state, segments, spans, positions=positions or bool(replaced)
        )
        frame = only_latest_frame(frame, replaced)
        return frame if positions else frame.drop(*POSITION)

    def read_arrow(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str] | None = None,
        *,
        epochs: Epochs = "all",
        positions: bool = False,
        without_position: WithoutPosition = "refuse",
    ) -> pa.Table:
        """Return the same (of `columns` only, when given) without Spark, ordered by partition and offset.

        All of it is held in memory; `read_parts` gives it piece by piece.
        """
        import pyarrow as pa

        parts = self.read_parts(ranges, columns, epochs=epochs, positions=positions, without_position=without_position)
        return pa.concat_tables(parts)

    def read_parts(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str] | None = None,
        *,
        epochs: Epochs = "all",
        positions: bool = False,
        without_position: WithoutPosition = "refuse",
    ) -> Iterator[pa.Table]:
        """Yield what `read_arrow` returns in parts of at most 65,536 records; one is in memory. The first is empty."""
        latest = check_epochs(epochs)
        stream, state, segments, spans = self._found(ranges)
        schema = state.declaration.schema_ if columns is None else state.declaration.schema_.select(columns)
        replaced = replaced_results(self, stream, state, segments, without_position) if latest else []
        yield meta_schema(schema.to_arrow(), positions=positions).empty_table()
        wanted = positions or bool(replaced)
        prefix = self.lake.stream_prefix(stream)
        for table in read_tables(self.lake.store, prefix, schema, segments, spans, positions=wanted):
            latest_rows = only_latest(table, replaced)
            yield latest_rows if positions else without_positions(latest_rows)

    def task_reads(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str],
    ) -> TaskReads:
        stream, state, segments, spans = self._found(ranges)
        schema, prefix = state.declaration.schema_.select(columns), self.lake.stream_prefix(stream)
        return TaskReads(self.lake.store.descriptor, prefix, schema, segments, spans)

    def _found(
        self, ranges: Mapping[SystemStreamPartition, OffsetRange]
    ) -> tuple[str, StreamState, list[Segment], dict[int, Span]]:
        """Return the stream of these ranges, its state, the segments that they touch, and the ranges by partition."""
        stream = one_stream(self.name, ranges)
        _, state = self.state(stream)
        spans = check_ranges(stream, state, ranges)
        return stream, state, list(walk(state, self.pages_of(stream), lambda entry: touches(entry, spans))), spans

    def whole(self, stream: str) -> dict[SystemStreamPartition, OffsetRange]:
        """Return the ranges of all that the stream holds now."""
        _, state = self.state(stream)
        return {
            SystemStreamPartition(self.name, stream, p): OffsetRange(str(start), str(end))
            for p, (start, end) in enumerate(zip(state.oldest, state.next, strict=True))
        }

    def markers(self, stream: str, since: Mapping[SystemStreamPartition, str] | None = None) -> list[Marker]:
        _, state = self.state(stream)
        ends = dict(enumerate(state.next))
        if since is None:
            spans = {p: (0, end) for p, end in ends.items()}
        else:
            spans = {
                ssp.partition: (parse_offset(offset, str(ssp)), ends.get(ssp.partition, 0))
                for ssp, offset in since.items()
                if ssp.stream == stream
            }
        ssps = [SystemStreamPartition(self.name, stream, p) for p in ends]
        return [
            Marker(
                ssps[entry.partition],
                str(entry.offset),
                entry.version,
                entry.rows,
                entry.checksum,
                entry.counted,
                None if entry.valid_from is None else time_of_micros(entry.valid_from),
            )
            for entry in markers_in(state, self.pages_of(stream), spans)
        ]
