"""Reads a batch's records with their event times, and finds those that are behind their partition's
watermark.

A record is behind, or late, if its time is below the watermark that its source partition had when
it arrived:
the newest time of all earlier records, less the delay. Few records are checked by the driver. Many
are checked by the tasks that read them: each task reports blocks of offsets with their oldest and
newest times, and the records that it found behind. A block is checked again, exactly, where its
task had not read all earlier records and these could make a difference.

Times are read with Arrow where possible: in tasks, because Spark hands records to Python one by
one, or in this process, where a few records are read sooner than Spark plans a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.batch_log.event_times import PartitionTimes, TimeState
from dagster_adjunct.orchestration.batch_log.intent import Intent, Ranges, of_stream
from dagster_adjunct.orchestration.operators.columns import BEHIND, EVENT_TIME, REPLAYED
from dagster_adjunct.orchestration.operators.event_times import MAX_MICROS, MIN_MICROS
from dagster_adjunct.orchestration.operators.operator import (
    Operator,
    Watermarks,
    required_retention,
)
from dagster_adjunct.orchestration.startpoints.positions import check_same_stream
from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext
from dagster_adjunct.orchestration.step.progress import (
    Measured,
    declared_event_times,
    times_after_batch,
)
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.records import frame_from_arrow
from dagster_adjunct.resources.schemas.schema import named_columns
from dagster_adjunct.resources.schemas.types import types_from_spark
from dagster_adjunct.resources.spark.tasks import small_frame
from dagster_adjunct.resources.spark.tuning import PersistedFrames, bigint_array
from dagster_adjunct.resources.streams.checked_reads import read_frame, read_options, read_table
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    OFFSET,
    PARTITION,
    TIMESTAMP,
    NumberedOffsets,
    OffsetRange,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.threads import requested_once
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


TIME = "time"
"""The column with a record's event time in microseconds since 1970, null for none; next to
PARTITION and OFFSET.
"""
NEVER = -(2**62)
"""Stands for no time, in microseconds: it is before all times."""


@dataclass(frozen=True, slots=True)
class PriorTimes:
    """The newest time and the watermark of a partition before some records, in microseconds;
    NEVER for none.
    """

    newest: int = NEVER
    watermark: int = NEVER


def iter_partitions(partition: np.ndarray[Any, Any]) -> Iterator[tuple[int, slice]]:
    """Yield each distinct number of a sorted array, with the slice of its elements."""
    if not len(partition):
        return
    starts = np.flatnonzero(np.r_[True, partition[1:] != partition[:-1]]).tolist()
    for start, end in zip(starts, [*starts[1:], len(partition)], strict=True):
        yield int(partition[start]), slice(start, end)


def running_watermarks(
    before: PriorTimes, newest: np.ndarray[Any, Any], delay: int
) -> np.ndarray[Any, Any]:
    """Return the watermark at each record; `newest` is the newest time of all earlier records.
    In microseconds.
    """
    return np.maximum(np.where(newest > NEVER, newest - delay, NEVER), before.watermark)


BLOCK_COLUMNS = ("partition", "first", "last", "oldest", "latest", "mark")
BLOCK_SCHEMA = "partition int, first bigint, last bigint, oldest bigint, latest bigint, mark bigint"
"""What tasks report of the times that they read, one row for each block of offsets and for each
record behind.

Of a block: its first and last offset, the oldest time of records that were not found behind, and
the latest of all; `mark` is null. Of a record that is behind: its offset, as the first and the
last, and `mark`, the watermark that it is below, by what the task had read before it.
"""
ALWAYS = 2**62
"""The oldest time of a block without times, in microseconds: it is after all times."""


@dataclass(frozen=True, slots=True)
class _Timed:
    """Records by partition and offset: equally long arrays of their partitions, offsets and event
    times in microseconds, NEVER for none.
    """

    partition: np.ndarray[Any, Any]
    offset: np.ndarray[Any, Any]
    time: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class _Reached:
    """The last offset that a task has read of a partition, and the newest time up to it."""

    last: int
    newest: int


@dataclass(frozen=True, slots=True)
class TimeBlockMapper:
    """Maps Arrow batches of (partition, offset, time) to rows of BLOCK_SCHEMA, in blocks of
    `length` offsets; `delay` in microseconds. `prior` has the times before the batch by partition.
    """

    prior: Mapping[int, PriorTimes]
    delay: int
    length: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield rows of BLOCK_SCHEMA for Arrow batches of (partition, offset, time), the records of
        one task.

        Where the offsets of a partition do not ascend from one Arrow batch to the next, the next
        one is checked with the `prior` times alone.
        """
        reached: dict[int, _Reached] = {}
        for batch in batches:
            timed = _sort_by_offset(batch)
            for number, span in iter_partitions(timed.partition):
                offset = timed.offset[span]
                time = timed.time[span]
                before = self.prior.get(number, PriorTimes())
                earlier = reached.get(number, _Reached(-1, NEVER))
                is_in_order = earlier.last < offset[0]
                if is_in_order and earlier.newest > NEVER:
                    before = PriorTimes(earlier.newest, before.watermark)
                # The newest time before the first record, then up to each record.
                newest = np.maximum.accumulate(np.r_[before.newest, time])
                reached[number] = _Reached(int(offset[-1]), int(newest[-1]))
                mark = running_watermarks(before, newest[:-1], self.delay)
                yield self._make_blocks(number, offset, time, mark)

    def _make_blocks(
        self,
        partition: int,
        offset: np.ndarray[Any, Any],
        time: np.ndarray[Any, Any],
        mark: np.ndarray[Any, Any],
    ) -> pa.RecordBatch:
        """Return rows of BLOCK_SCHEMA for records of one partition, of which the arrays have the
        offset, the time and the watermark. First the blocks, then the records behind.
        """
        is_behind = (time > NEVER) & (time < mark)
        block = offset // self.length
        starts = np.flatnonzero(np.r_[True, block[1:] != block[:-1]])
        ends = np.r_[starts[1:], len(offset)] - 1
        counted = np.where(is_behind | (time == NEVER), ALWAYS, time)
        oldest = np.minimum.reduceat(counted, starts)
        latest = np.maximum.reduceat(time, starts)
        behind = offset[is_behind]
        no_time = np.zeros(len(behind), np.int64)
        no_mark = np.zeros(len(starts), np.int64)
        is_block = np.r_[np.ones(len(starts), bool), np.zeros(len(behind), bool)]
        columns = [
            pa.array(np.full(len(is_block), partition, np.int32)),
            pa.array(np.r_[offset[starts], behind]),
            pa.array(np.r_[offset[ends], behind]),
            pa.array(np.r_[oldest, no_time]),
            pa.array(np.r_[latest, no_time]),
            pa.array(np.r_[no_mark, mark[is_behind]], mask=is_block),
        ]
        return pa.record_batch(columns, names=list(BLOCK_COLUMNS))


def _sort_by_offset(batch: pa.RecordBatch | pa.Table) -> _Timed:
    """Return the records of (partition, offset, time), sorted by partition and offset."""
    partition = batch.column(0).to_numpy()
    offset = batch.column(1).to_numpy()
    time = batch.column(2).fill_null(NEVER).to_numpy()
    is_of_one = (partition[1:] == partition[:-1]).all()
    if is_of_one and (offset[1:] > offset[:-1]).all():
        return _Timed(partition, offset, time)
    order = np.lexsort((offset, partition))
    return _Timed(partition[order], offset[order], time[order])


BLOCK_LENGTH = 1_024
"""The number of offsets in a block, which is checked again as a whole."""
DRIVER_LIMIT = 100_000
"""The largest number of offsets that the driver checks; more are checked by the tasks that read
them.
"""


def find_late_in_memory(records: pa.Table, prior: Mapping[int, PriorTimes], delay: int) -> Measured:
    """Return the event times and late records of `records`, which has PARTITION, OFFSET and
    TIME, in any order.
    """
    timed = _sort_by_offset(records.select([PARTITION, OFFSET, TIME]))
    mark = np.full(len(timed.time), NEVER)
    newest = {}
    read_to = {}
    for number, span in iter_partitions(timed.partition):
        before = prior.get(number, PriorTimes())
        reached = np.maximum.accumulate(np.r_[before.newest, timed.time[span]])
        mark[span] = running_watermarks(before, reached[:-1], delay)
        read_to[number] = int(timed.offset[span][-1]) + 1
        if reached[-1] > NEVER:
            newest[number] = int(reached[-1])
    is_late = (timed.time > NEVER) & (timed.time < mark)
    behind = None
    if is_late.any():
        behind = _late_table(timed.partition[is_late], timed.offset[is_late], mark[is_late])
    return Measured(newest, read_to, behind)


def _find_late_by_blocks(
    times: DataFrame, prior: Mapping[int, PriorTimes], delay: int, in_tasks: TaskTimeReader | None
) -> Measured:
    """Return the event times and late records of `times`, which has PARTITION, OFFSET and TIME.

    Each record is checked in the task that reads it, and again where that task can't be sure. If
    `in_tasks` is given, it reads the same records for the first check, instead of `times`.
    """
    mapper = TimeBlockMapper(prior, delay, BLOCK_LENGTH)
    if in_tasks is None:
        rows = times.select(PARTITION, OFFSET, TIME).mapInArrow(mapper, BLOCK_SCHEMA)
    else:
        rows = in_tasks.blocks(times.sparkSession, mapper)
    merged = merge_blocks(rows.toArrow(), prior, delay, BLOCK_LENGTH)
    behind = merged.behind
    if merged.unsure.num_rows:
        behind = pa.concat_tables([behind, _find_late_in_blocks(times, merged.unsure, delay)])
    if not behind.num_rows:
        return merged.measured
    return replace(merged.measured, behind=behind)


@dataclass(frozen=True, slots=True)
class MergedBlocks:
    """What tasks have found together: the event times, without late records; the late records of
    blocks whose tasks were certain (`behind`); and the other blocks (`unsure`), as rows of their
    partition, the first offset ("block"), and the newest time ("begun") and the watermark ("floor")
    before the block.
    """

    measured: Measured
    behind: pa.Table
    unsure: pa.Table


def merge_blocks(
    rows: pa.Table, prior: Mapping[int, PriorTimes], delay: int, length: int
) -> MergedBlocks:
    """Merge the rows of BLOCK_SCHEMA of all tasks, in blocks of `length` offsets.

    A task knows the times that it has read itself. Those of other tasks raise the watermark at its
    blocks: a block is checked again if it has a time below this watermark that its task did not
    find behind.
    """
    rows = rows.sort_by([("partition", "ascending"), ("last", "ascending")])
    blocks = rows.filter(rows["mark"].is_null())
    late = rows.filter(rows["mark"].is_valid())
    partition = blocks["partition"].to_numpy()
    first = blocks["first"].to_numpy()
    last = blocks["last"].to_numpy()
    oldest = blocks["oldest"].to_numpy()
    latest = blocks["latest"].to_numpy()
    late_partition = late["partition"].to_numpy()
    late_offset = late["last"].to_numpy()
    late_mark = late["mark"].to_numpy()
    # For each row of a block: the newest time and the watermark before it, by the rows of all
    # tasks.
    begun = np.full(len(last), NEVER)
    mark = np.full(len(last), NEVER)
    # The row of the block that each late record is in.
    place = np.zeros(len(late_mark), np.int64)
    newest = {}
    read_to = {}
    for number, span in iter_partitions(partition):
        before = prior.get(number, PriorTimes())
        reached = np.maximum.accumulate(np.r_[before.newest, latest[span]])
        begun[span] = reached[:-1]
        mark[span] = running_watermarks(before, reached[:-1], delay)
        late_start, late_end = np.searchsorted(late_partition, [number, number + 1])
        in_span = np.searchsorted(last[span], late_offset[late_start:late_end])
        place[late_start:late_end] = span.start + in_span
        read_to[number] = int(last[span][-1]) + 1
        if reached[-1] > NEVER:
            newest[number] = int(reached[-1])
    # Several Arrow batches or tasks may each have reported a part of a block, the tasks in any
    # order.
    begins = last - last % length  # the first offset of the block
    is_other_block = (partition[1:] != partition[:-1]) | (begins[1:] != begins[:-1])
    overlaps_previous = first[1:] <= last[:-1]
    is_first = np.r_[True, is_other_block][: len(last)]  # of the rows of a block
    is_mixed = ~is_first & np.r_[False, overlaps_previous][: len(last)]
    block = np.cumsum(is_first) - 1  # the number of each row's block
    # By number of the block: whether one of its rows has a time that may be behind, or two of them
    # overlap.
    is_unsure = np.bincount(block, (oldest < mark) | is_mixed) > 0
    is_sure = ~is_unsure[block[place]]  # of the late records
    # Other tasks may have read newer times before a record than the task that found it late.
    exact_mark = np.maximum(late_mark, mark[place])
    behind = _late_table(late_partition[is_sure], late_offset[is_sure], exact_mark[is_sure])
    unsure = np.flatnonzero(is_first)[is_unsure]  # the first row of each such block
    floors = [prior.get(number, PriorTimes()).watermark for number in partition[unsure].tolist()]
    recheck = {
        PARTITION: pa.array(partition[unsure], pa.int32()),
        "block": pa.array(begins[unsure], pa.int64()),
        "begun": pa.array(begun[unsure], pa.int64()),
        "floor": pa.array(floors, pa.int64()),
    }
    return MergedBlocks(Measured(newest, read_to), behind, pa.table(recheck))


def _find_late_in_blocks(times: DataFrame, blocks: pa.Table, delay: int) -> pa.Table:
    """Return the late records of these blocks; `blocks` has the rows of unsure blocks from
    `merge_blocks`.
    """
    from pyspark.sql import Window

    spark = times.sparkSession
    times = times.withColumn("block", F.col(OFFSET) - F.pmod(F.col(OFFSET), F.lit(BLOCK_LENGTH)))
    rechecked = times.join(F.broadcast(frame_from_arrow(spark, blocks)), [PARTITION, "block"])
    earlier = (
        Window.partitionBy(PARTITION, "block")
        .orderBy(OFFSET)
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    running = F.greatest(F.max(TIME).over(earlier), F.col("begun"))
    mark = F.greatest(running - F.lit(delay), F.col("floor"))
    late = rechecked.select(PARTITION, OFFSET, TIME, mark.alias("mark")).where(
        F.col(TIME) < F.col("mark")
    )
    rows = late.select(PARTITION, OFFSET, "mark").toArrow()
    return _late_table(rows[PARTITION].to_numpy(), rows[OFFSET].to_numpy(), rows["mark"].to_numpy())


def _late_table(
    partition: np.ndarray[Any, Any], offset: np.ndarray[Any, Any], mark: np.ndarray[Any, Any]
) -> pa.Table:
    """Return a table of late records: their positions, and as BEHIND the watermarks that they are
    below, given in microseconds.
    """
    return pa.table(
        {
            PARTITION: pa.array(partition, pa.int32()),
            OFFSET: pa.array(offset, pa.int64()),
            BEHIND: pa.array(mark, pa.timestamp("us", tz="UTC")),
        }
    )


@dataclass(frozen=True, slots=True)
class TaskTimeReader:
    """Reads the event times, in column `name`, of some partitions in tasks; see `TaskReads`.

    Times after `latest` count as none.
    """

    reads: Callable[[int], Iterator[pa.Table]]
    partitions: Sequence[int]
    name: str
    latest: int = MAX_MICROS

    def blocks(self, spark: SparkSession, mapper: TimeBlockMapper) -> DataFrame:
        """Return rows of BLOCK_SCHEMA, computed by one task for each partition."""
        number = len(self.partitions)
        return spark.range(0, number, 1, max(1, number)).mapInArrow(
            partial(self._map, mapper), BLOCK_SCHEMA
        )

    def _map(
        self, mapper: TimeBlockMapper, places: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows of BLOCK_SCHEMA of the partitions that a task reads, given by their places in
        `partitions`.
        """
        for batch in places:
            for place in batch.column(0).to_pylist():
                yield from mapper(self.of(self.partitions[place]))

    def of(self, partition: int) -> Iterator[pa.RecordBatch]:
        """Yield (partition, offset, time) of a partition's records: microseconds, null for times
        that count as none.
        """
        for records in self.reads(partition):
            yield from extract_times(records, self.name, self.latest).combine_chunks().to_batches()


def extract_times(records: pa.Table, name: str, latest: int = MAX_MICROS) -> pa.Table:
    """Return PARTITION, OFFSET and TIME of these records, whose event time is the column `name`.

    Times before the year 1, and after `latest`, count as none.
    """
    time = records[name].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    counts = pc.and_(pc.greater_equal(time, MIN_MICROS), pc.less_equal(time, latest))
    time = pc.if_else(counts, time, None)
    return pa.table({PARTITION: records[PARTITION], OFFSET: records[OFFSET], TIME: time})


@dataclass(frozen=True, slots=True)
class _TimeReads:
    """Reads of the event times in a column, of ranges of a stream."""

    system: NumberedOffsets
    ranges: Ranges
    name: str

    @property
    def columns(self) -> list[str]:
        """The columns that are read besides those of the position; [] for the stream's timestamp,
        which is read with the position.
        """
        if self.name == TIMESTAMP:
            return []
        return [self.name]

    def read_times(self, latest: int) -> pa.Table:
        """Return the times, read by this process; those after `latest` count as none."""
        records = read_table(self.system, self.ranges, self.columns)
        return extract_times(records, self.name, latest)

    def in_tasks(self, latest: int) -> TaskTimeReader:
        """Return what reads the times in tasks."""
        reads = self.system.task_reads(self.ranges, self.columns)
        partitions = [ssp.partition for ssp in self.ranges]
        return TaskTimeReader(reads, partitions, self.name, latest)


_LONGEST = 2**60  # microseconds: longer than from the first time to the last


@dataclass(frozen=True, slots=True)
class AskedRanges:
    """The ranges that a batch reads of a stream, and the epochs of its partitions that are not
    0.
    """

    ranges: Ranges
    epochs: Mapping[int, int]


def ranges_to_read(streams: StreamSystem, stream: str, intent: Intent) -> AskedRanges:
    """Return the ranges that a batch reads of a stream; for a batch that reads only other streams,
    an empty range, so that the frame without records has their columns.
    """
    ranges = intent.ranges_of(stream)
    if not ranges:  # the batch replays other streams: read no records of this one
        first = streams.upcoming(streams.partitions(split_stream_name(stream)[1])[:1])
        ranges = {ssp: OffsetRange(end, end) for ssp, end in first.items()}
    epochs = {}
    for ssp, epoch in of_stream(intent.epochs, stream).items():
        epochs[ssp.partition] = epoch
    return AskedRanges(ranges, epochs)


class BatchTimes:
    """Reads the inputs of one batch, and measures their event times once for each stream, when
    first needed.

    In a bounded replay all records count as read before, and no event times change; nor do they in
    a dry run, which is batch 0.
    """

    def __init__(self, context: StepContext, inputs: BatchInputs) -> None:
        self._context = context
        self._inputs = inputs
        self._declared = declared_event_times(context.app)
        self._is_replay = inputs.consumed is None
        self._is_dry_run = inputs.intent.batch == 0
        self._measured = cache(self._measure)
        self._kept = PersistedFrames()
        self._read: dict[str, DataFrame] = {}

    def read(self, stream: str) -> DataFrame:
        """Return the stream's records of the batch; with EVENT_TIME, BEHIND and REPLAYED if it
        declares event times.
        """
        records = self._records(stream)
        declared = self._declared.get(stream)
        if declared is None:
            return records
        records = records.withColumns(
            {
                EVENT_TIME: declared.column(f"input {stream}", records),
                REPLAYED: self._was_read_before(stream),
            }
        )
        return self._with_behind(stream, records)

    def arriving(self, operator: Operator, frame: DataFrame) -> DataFrame:
        """Return the records that arrive at an operator; at a stateful one, records below its
        watermark are behind, too.

        They may be above the watermark of their own partition, if that was idle or is of a new
        input: what the operator has closed stays closed.
        """
        name = operator.spec.over_time
        closed = None if name is None else self._inputs.times.operators.get(name)
        if closed is None or EVENT_TIME not in frame.columns:
            return frame
        mark = F.timestamp_micros(F.lit(to_microseconds(closed)))
        behind = F.when(F.col(EVENT_TIME) < mark, F.greatest(F.col(BEHIND), mark)).otherwise(
            F.col(BEHIND)
        )
        return frame.withColumn(BEHIND, behind)

    def watermarks(self, name: str) -> Watermarks:
        """Return the watermarks of the stateful operator of this name, before and after the
        batch.
        """
        before = self._inputs.times.operators.get(name)
        if self.after is not None:
            after = self.after.operators.get(name)
        else:
            after = before
        return Watermarks(before, after)

    @requested_once
    def after(self) -> TimeState | None:
        """The event times after the batch; None if no input declares any, or none change."""
        if not self._declared or self._is_replay:
            return None
        intent = self._inputs.intent
        measured = {stream: self._measured(stream) for stream in self._declared}
        numbered = {}
        for ssp, span in intent.ranges.items():
            if isinstance(self._context.systems[ssp.system], NumberedOffsets):
                numbered[ssp] = (int(span.start), int(span.end))
        return times_after_batch(
            self._context.app, self._inputs.times, measured, intent.clock, numbered
        )

    def close(self) -> None:
        """Release cached records."""
        self._kept.release()

    # -- columns

    def _records(self, stream: str) -> DataFrame:
        """Return the stream's records of the batch, with the batch's epochs added."""
        if stream in self._read:
            return self._read[stream]
        context = self._context
        streams = context.system_of(stream)
        asked = ranges_to_read(streams, stream, self._inputs.intent)
        if stream in self._inputs.arrived:
            records = small_frame(context.spark(), self._inputs.arrived[stream])
        else:
            options = read_options(streams)
            system = self._system_now(stream)
            records = read_frame(system, context.spark(), asked.ranges, **options)
        if asked.epochs:
            # They are added: records that an application wrote in a replay have an epoch already.
            epoch = F.col(EPOCH) + number_by_partition(asked.epochs)
            records = records.withColumn(EPOCH, epoch.cast("int"))
        is_read_twice = not streams.capabilities.reads_in_tasks and self._is_measured(stream)
        if is_read_twice:
            records = self._read[stream] = self._kept.keep(records)
        return records

    def _system_now(self, stream: str) -> StreamSystem:
        """Return the system of an input as it is now. Raises OffsetOutOfRangeError if the input
        was recreated.
        """
        name, short = split_stream_name(stream)
        system = self._context.systems[name].snapshot(short)
        inputs = self._inputs
        check_same_stream(
            self._context.app,
            inputs.intent,
            stream,
            system.info(short),
            inputs.identities.get(stream),
        )
        return system

    def _is_measured(self, stream: str) -> bool:
        """Whether the batch reads records whose event times count."""
        if stream not in self._declared or self._is_replay:
            return False
        return self._offsets(stream) > 0

    def _offsets(self, stream: str) -> int:
        """Return how many offsets the batch reads of a stream."""
        ranges = self._inputs.intent.ranges_of(stream)
        return sum(self._context.count_offsets(ranges).values())

    def _was_read_before(self, stream: str) -> Column:
        """Return the condition that a record was read before, by an earlier batch."""
        if self._is_replay and not self._is_dry_run:
            # True, but not as a literal: Spark would drop the count of these records.
            return F.col(OFFSET) >= F.lit(-1)
        known = self._partition_times(stream)
        read_to = {}
        for ssp, prior in known.items():
            if prior.read_to:
                read_to[ssp.partition] = prior.read_to
        # In a dry run it is no literal, either: Spark would drop what depends on it.
        if not read_to and not self._is_dry_run:
            return F.lit(False)
        is_read_again = F.col(OFFSET) < number_by_partition(read_to)  # 0 for new partitions
        for ssp, prior in known.items():
            for low, high in prior.skipped:  # skipped before, so this is the first read
                is_within = (F.col(OFFSET) >= low) & (F.col(OFFSET) < high)
                is_skipped = is_within & (F.col(PARTITION) == ssp.partition)
                is_read_again = is_read_again & ~is_skipped
        return is_read_again

    def _partition_times(self, stream: str) -> Mapping[SystemStreamPartition, PartitionTimes]:
        """Return the event times of the stream's partitions at the start of the batch."""
        return of_stream(self._inputs.times.partitions, stream)

    def _measure(self, stream: str) -> Measured:
        """Return the event times of the records that the batch reads first of a stream, and those
        behind.

        The quickest way that is certain to give all times is taken: this process reads few records,
        then Spark, then tasks.
        """
        if not self._is_measured(stream):
            return Measured()
        offsets = self._offsets(stream)
        declared = self._declared[stream]
        records = self._records(stream)
        prior = {}
        for ssp, times in self._partition_times(stream).items():
            prior[ssp.partition] = PriorTimes(_to_prior(times.newest), _to_prior(times.watermark))
        delay = _to_micros(declared.delay)
        # Times so far in the future that their state could never expire move no watermark;
        # operators skip such records.
        retention = required_retention(self._context.app.operators).get(stream, timedelta(0))
        latest = MAX_MICROS - _to_micros(retention)
        reads = self._plan_reads(stream, declared.column_name(types_from_spark(records.schema)))
        if reads is not None and not reads.ranges:  # all was read before
            return Measured()
        is_few = self._inputs.few and offsets <= DRIVER_LIMIT
        if reads is not None and is_few and reads.system.capabilities.reads_arrow:
            return find_late_in_memory(reads.read_times(latest), prior, delay)
        time = F.unix_micros(declared.column(f"input {stream}", records))
        counting = F.when(time <= latest, time).alias(TIME)
        frame = records.where(~self._was_read_before(stream)).select(PARTITION, OFFSET, counting)
        if offsets <= DRIVER_LIMIT:
            return find_late_in_memory(frame.toArrow(), prior, delay)
        in_tasks = None
        if reads is not None and reads.system.capabilities.reads_in_tasks:
            in_tasks = reads.in_tasks(latest)
        return _find_late_by_blocks(frame, prior, delay, in_tasks)

    def _plan_reads(self, stream: str, name: str | None) -> _TimeReads | None:
        """Return how to read the column `name` of the records that were not read before; None if
        Spark has to filter them, or computes the time.
        """
        system = self._system_now(stream)
        if name is None or not isinstance(system, NumberedOffsets):
            return None
        unread = self._unread(stream)
        if unread is None:
            return None
        return _TimeReads(system, unread, name)

    def _unread(self, stream: str) -> Ranges | None:
        """Return the part of each of the batch's ranges, of numbered offsets, that no earlier batch
        has read; without partitions of which all was read.

        None if a partition has several such parts.
        """
        unread = {}
        known = self._partition_times(stream)
        for ssp, span in self._inputs.intent.ranges_of(stream).items():
            start = int(span.start)
            end = int(span.end)
            if ssp in known:
                not_read_before = [*known[ssp].skipped, (known[ssp].read_to, end)]
            else:
                not_read_before = [(0, end)]
            parts = []
            for low, high in not_read_before:
                first = max(low, start)
                until = min(high, end)
                if first < until:
                    parts.append(OffsetRange(str(first), str(until)))
            if len(parts) > 1:
                return None
            if parts:
                unread[ssp] = parts[0]
        return unread

    def _with_behind(self, stream: str, records: DataFrame) -> DataFrame:
        """Return the records with BEHIND: the watermark that a late record is below, else null."""
        marks = self._measured(stream).behind
        if marks is None:
            if self._is_dry_run:
                # Not a constant: Spark would drop the branch for records that are behind.
                none = F.when(F.col(OFFSET) < 0, F.col(TIMESTAMP))
            else:
                none = F.lit(None).cast("timestamp")
            return records.withColumn(BEHIND, none)
        behind = F.broadcast(frame_from_arrow(self._context.spark(), marks))
        joined = records.join(behind, [PARTITION, OFFSET], "left")
        return joined.select(*named_columns(records.columns), BEHIND)


def number_by_partition(numbers: Mapping[int, int]) -> Column:
    """Return a column that looks up each record's partition in `numbers`; 0 for partitions that
    it does not list.
    """
    partitions = range(max(numbers, default=0) + 1)
    by_place = bigint_array(numbers.get(partition, 0) for partition in partitions)
    return F.coalesce(F.get(by_place, F.col(PARTITION)), F.lit(0))


def _to_prior(time: datetime | None) -> int:
    """Return a time in microseconds, NEVER for None."""
    return NEVER if time is None else to_microseconds(time)


def _to_micros(delay: timedelta) -> int:
    """Return a span in microseconds, no longer than from the first time to the last."""
    return min(delay // timedelta(microseconds=1), _LONGEST)
