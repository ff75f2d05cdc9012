"""The records of a batch as they are read, with the columns that say when they happened; and what follows of it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.columns.hidden_columns import AGAIN, BEHIND, EVENT_TIME
from dagster_adjunct.orchestration.operators.event_times.event_time import LAST
from dagster_adjunct.orchestration.operators.spec.compiling import Watermarks
from dagster_adjunct.orchestration.operators.spec.watermark_inputs import needed_for
from dagster_adjunct.orchestration.step.progress.watermarks import Measured, event_times, moved_times
from dagster_adjunct.orchestration.step.record_times import records_behind
from dagster_adjunct.orchestration.step.record_times.record_positions import with_epochs
from dagster_adjunct.orchestration.step.record_times.records_behind import Lateness, lateness, look_at_each
from dagster_adjunct.orchestration.step.record_times.running_times import TIME, Stood
from dagster_adjunct.orchestration.step.record_times.times_in_tasks import TimesInTasks, times_of
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.quoted_columns import bigints
from dagster_adjunct.resources.spark.kept_frames import KeptFrames
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION, TIMESTAMP, OffsetRange
from dagster_adjunct.resources.times import microseconds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.batchlog.stored_times import PartitionTimes, TimeState
    from dagster_adjunct.orchestration.operators.event_times.event_time import EventTime
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
    from dagster_adjunct.orchestration.step.context.batch_inputs import BatchInputs
    from dagster_adjunct.orchestration.step.context.step_context import StepContext
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

_LONGEST = 2**60  # microseconds: more than there is between any two times


class BatchTimes:
    """Reads the inputs of one batch. What their times say is found when it is first asked for, once a stream.

    In a bounded replay all records are read again, and nothing moves; so also in a rehearsal, which is batch 0.
    """

    def __init__(self, context: StepContext, inputs: BatchInputs) -> None:
        self._context, self._inputs = context, inputs
        self._declared = event_times(context.app)
        self._found: dict[str, Lateness] = {}
        self._after: TimeState | None = None
        self._kept = KeptFrames()
        self._read: dict[str, DataFrame] = {}

    def read(self, stream: str) -> DataFrame:
        """Return the stream's records of the batch: with EVENT_TIME, BEHIND, AGAIN where it says when they happened."""
        records = self._records(stream)
        declared = self._declared.get(stream)
        if declared is None:
            return records
        records = records.withColumns(
            {EVENT_TIME: declared.column(f"input {stream}", records), AGAIN: self._again(stream)}
        )
        return self._with_behind(stream, records)

    def arriving(self, operator: Operator, frame: DataFrame) -> DataFrame:
        """Return what arrives at an operator: at a stateful one, what is below its watermark is behind at least that.

        So are records of a partition that was idle, and of an input that is new: what is closed stays closed.
        """
        from pyspark.sql import functions as F

        name = operator.spec.over_time
        closed = None if name is None else self._inputs.times.operators.get(name)
        if closed is None or EVENT_TIME not in frame.columns:
            return frame
        mark = F.timestamp_micros(F.lit(microseconds(closed)))
        behind = F.when(F.col(EVENT_TIME) < mark, F.greatest(F.col(BEHIND), mark)).otherwise(F.col(BEHIND))
        return frame.withColumn(BEHIND, behind)

    def watermarks(self, name: str) -> Watermarks:
        """Return the watermarks of the stateful operator of this name."""
        stood = self._inputs.times.operators.get(name)
        after = self.after()
        return Watermarks(stood, stood if after is None else after.operators.get(name))

    def after(self) -> TimeState | None:
        """Return how far the inputs have come with the batch; None where none of them says, or nothing moves."""
        if self._after is None and self._declared and not self._stays:
            measured = {stream: self._lateness(stream).measured for stream in self._declared}
            self._after = moved_times(
                self._context.app, self._inputs.times, measured, self._inputs.clock, self._numbered_ranges()
            )
        return self._after

    def close(self) -> None:
        """Let go of records that were read once for several looks."""
        self._kept.release()

    # -- what the columns are made of

    @property
    def _stays(self) -> bool:
        return self._inputs.consumed is None

    @property
    def _rehearsed(self) -> bool:
        return self._inputs.batch == 0

    def _ranges(self, stream: str) -> dict[SystemStreamPartition, OffsetRange]:
        return {ssp: span for ssp, span in self._inputs.ranges.items() if ssp.qualified_stream == stream}

    def _numbered_ranges(self) -> dict[SystemStreamPartition, tuple[int, int]]:
        return {
            ssp: (int(span.start), int(span.end))
            for ssp, span in self._inputs.ranges.items()
            if self._context.systems[ssp.system].numbered_offsets
        }

    def _records(self, stream: str) -> DataFrame:
        if stream in self._read:
            return self._read[stream]
        system, name = split_stream_name(stream)
        streams, ranges = self._context.systems[system], self._ranges(stream)
        if not ranges:
            # A batch that replays other streams: no records of this one.
            first = streams.upcoming(streams.partitions(name)[:1])
            ranges = {ssp: OffsetRange(end, end) for ssp, end in first.items()}
        epochs = {ssp.partition: epoch for ssp, epoch in self._inputs.epochs.items() if ssp in ranges}
        records = with_epochs(streams.read(self._context.spark(), ranges), epochs)
        if stream in self._declared and not streams.reads_columns and self._offsets(stream) and not self._stays:
            records = self._read[stream] = self._kept.keep(records)
        return records

    def _offsets(self, stream: str) -> int:
        system = self._context.systems[split_stream_name(stream)[0]]
        return sum(system.distance(ssp, span.start, span.end) for ssp, span in self._ranges(stream).items())

    def _again(self, stream: str) -> Column:
        from pyspark.sql import functions as F

        if self._stays and not self._rehearsed:
            return F.col(OFFSET) >= F.lit(-1)  # as a literal, Spark would leave out what counts these records
        read_to = self._read_to(stream)
        if not read_to and not self._rehearsed:
            return F.lit(False)
        ends = bigints(read_to.get(number, 0) for number in range(max(read_to, default=0) + 1))
        again = F.col(OFFSET) < F.coalesce(F.get(ends, F.col(PARTITION)), F.lit(0))
        for ssp, stood in self._stood(stream).items():
            for low, high in stood.skipped:  # passed over then, so this is the first time
                here = (F.col(PARTITION) == ssp.partition) & (F.col(OFFSET) >= low) & (F.col(OFFSET) < high)
                again = again & ~here
        return again

    def _read_to(self, stream: str) -> dict[int, int]:
        """Return the offsets below which records of the partitions were read before, without zeros."""
        return {ssp.partition: times.read_to for ssp, times in self._stood(stream).items() if times.read_to}

    def _stood(self, stream: str) -> Mapping[SystemStreamPartition, PartitionTimes]:
        times = self._inputs.times.partitions.items()
        return {ssp: stood for ssp, stood in times if ssp.qualified_stream == stream}

    def _lateness(self, stream: str) -> Lateness:
        if stream not in self._found:
            self._found[stream] = self._look(stream, self._declared[stream])
        return self._found[stream]

    def _look(self, stream: str, declared: EventTime) -> Lateness:
        from pyspark.sql import functions as F

        offsets = self._offsets(stream)
        if self._stays or not offsets:
            return Lateness(Measured())
        records = self._records(stream)
        stood = {ssp.partition: _stood(times) for ssp, times in self._stood(stream).items()}
        delay = _micros(declared.delay)
        # What would be needed beyond all times moves no watermark: operators leave it out, as they do what has no time.
        latest = LAST - _micros(needed_for(self._context.app.operators).get(stream, timedelta(0)))
        in_tasks = None
        name, system = declared.column_name(dict(records.dtypes)), self._context.systems[split_stream_name(stream)[0]]
        if name is not None and system.numbered_offsets:
            unread, columns = self._unread(stream), [] if name == TIMESTAMP else [name]
            if unread is not None and not unread:
                return Lateness(Measured())
            if unread is None:
                pass  # records of before lie between: Spark leaves them out
            elif self._inputs.few and offsets <= records_behind.AT_ONCE and system.reads_arrow:
                return look_at_each(times_of(system.read_arrow(unread, columns), name, latest), stood, delay)
            elif system.reads_in_tasks:
                numbers = [ssp.partition for ssp in unread]
                in_tasks = TimesInTasks(system.task_reads(unread, columns), numbers, name, latest)
        time = F.unix_micros(declared.column(f"input {stream}", records))
        counting = F.when(time <= latest, time).alias(TIME)
        times = records.where(~self._again(stream)).select(PARTITION, OFFSET, counting)
        return lateness(times, stood, delay, offsets=offsets, in_tasks=in_tasks)

    def _unread(self, stream: str) -> dict[SystemStreamPartition, OffsetRange] | None:
        """Return the parts of the batch's ranges, of numbered offsets, that were not read before.

        None where a partition has several, because others between them were read.
        """
        unread = {}
        for ssp, span in self._ranges(stream).items():
            stood, start, end = self._stood(stream).get(ssp), int(span.start), int(span.end)
            gaps = [(0, end)] if stood is None else [*stood.skipped, (stood.read_to, end)]
            parts = [(max(low, start), min(high, end)) for low, high in gaps if max(low, start) < min(high, end)]
            if len(parts) > 1:
                return None
            if parts:
                unread[ssp] = OffsetRange(*map(str, parts[0]))
        return unread

    def _with_behind(self, stream: str, records: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        marks = self._lateness(stream).behind
        if marks is None:
            none = F.lit(None).cast("timestamp")
            # Not a constant in a rehearsal: Spark would leave out what is made of records that are behind.
            return records.withColumn(BEHIND, F.when(F.col(OFFSET) < 0, F.col(TIMESTAMP)) if self._rehearsed else none)
        behind = F.broadcast(self._context.spark().createDataFrame(marks))
        return records.join(behind, [PARTITION, OFFSET], "left").select(*records.columns, BEHIND)


def _stood(times: PartitionTimes) -> Stood:
    return Stood(
        None if times.newest is None else microseconds(times.newest),
        None if times.watermark is None else microseconds(times.watermark),
    )


def _micros(delay: timedelta) -> int:
    return min((delay.days * 86_400 + delay.seconds) * 1_000_000 + delay.microseconds, _LONGEST)
