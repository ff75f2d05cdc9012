"""Which records are behind the watermark of their own source partition: exactly, and with one look at most records.

A record is behind where its time is below the watermark that its partition had when it came: the newest time of all
records before it, since ever, less the delay. Many records are looked at where they are read, and a second time only in
blocks of offsets whose task had not read all that came before them, where that may make a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.operators.columns.hidden_columns import BEHIND
from dagster_adjunct.orchestration.step.progress.watermarks import Measured
from dagster_adjunct.orchestration.step.record_times.running_times import NEVER, TIME, Stood, marks_at, running, spans
from dagster_adjunct.orchestration.step.record_times.times_by_block import BLOCKS, BlocksOfTimes
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.step.record_times.times_in_tasks import TimesInTasks

BLOCK = 1_024
"""Offsets that are looked at again together."""
AT_ONCE = 100_000
"""Offsets: so many are looked at by the driver, more by the tasks that read them."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """What a batch's records say, and those behind: their partition, offset, and the watermark then (a timestamp)."""

    measured: Measured
    behind: pa.Table | None = None


def lateness(
    times: DataFrame, stood: Mapping[int, Stood], delay: int, *, offsets: int, in_tasks: TimesInTasks | None = None
) -> Lateness:
    """Return what the records say, of which there are at most as many as `offsets`; `delay` is in microseconds.

    Of many the times are read by `in_tasks`, where there is such a thing.
    """
    if offsets <= AT_ONCE:
        return look_at_each(times.toArrow(), stood, delay)
    return _by_blocks(times, stood, delay, in_tasks)


def look_at_each(records: pa.Table, stood: Mapping[int, Stood], delay: int) -> Lateness:
    """Return what records say that are all here, in whatever order."""
    import numpy as np

    partition, offset = (records[name].to_numpy() for name in (PARTITION, OFFSET))
    time = records[TIME].fill_null(NEVER).to_numpy()
    order = np.lexsort((offset, partition))
    partition, offset, time = partition[order], offset[order], time[order]
    mark = np.full(len(time), NEVER)
    newest, read_to = {}, {}
    for number, span in spans(partition):
        before = stood.get(number, Stood())
        reached = running(before, time[span])
        mark[span] = marks_at(before, reached[:-1], delay)
        read_to[number] = int(offset[span][-1]) + 1
        if reached[-1] > NEVER:
            newest[number] = int(reached[-1])
    late = (time > NEVER) & (time < mark)
    behind = _behind(partition[late], offset[late], mark[late]) if late.any() else None
    return Lateness(Measured(newest, read_to), behind)


def _by_blocks(times: DataFrame, stood: Mapping[int, Stood], delay: int, in_tasks: TimesInTasks | None) -> Lateness:
    """Look at each record in the task that reads it, and again at the blocks of which that task can't be sure."""
    import pyarrow as pa

    look = BlocksOfTimes(stood, delay, BLOCK)
    if in_tasks is None:
        rows = times.select(PARTITION, OFFSET, TIME).mapInArrow(look, BLOCKS)
    else:
        rows = in_tasks.blocks(times.sparkSession, look)
    looked = put_together(rows.toArrow(), stood, delay, BLOCK)
    behind = looked.behind
    if looked.unsure.num_rows:
        behind = pa.concat_tables([behind, _within(times, looked.unsure, delay)])
    return Lateness(looked.measured, behind if behind.num_rows else None)


@dataclass(frozen=True, slots=True)
class PutTogether:
    """What the tasks' blocks come to: the records behind of those that are sure, and those to look at again.

    Of the latter partition, first offset, and newest time and watermark before it.
    """

    measured: Measured
    behind: pa.Table
    unsure: pa.Table


def put_together(rows: pa.Table, stood: Mapping[int, Stood], delay: int, length: int) -> PutTogether:
    """Return what rows of BLOCKS say, of all tasks, about blocks of `length` offsets."""
    import numpy as np

    rows = rows.sort_by([("partition", "ascending"), ("last", "ascending")])
    blocks, late = rows.filter(rows["mark"].is_null()), rows.filter(rows["mark"].is_valid())
    partition, first, last, oldest, latest = (blocks[name].to_numpy() for name in blocks.column_names[:-1])
    late_partition, late_offset, late_mark = (late[name].to_numpy() for name in ("partition", "last", "mark"))
    begun, mark, place = np.full(len(last), NEVER), np.full(len(last), NEVER), np.zeros(len(late_mark), np.int64)
    newest, read_to = {}, {}
    for number, span in spans(partition):
        before = stood.get(number, Stood())
        reached = running(before, latest[span])
        begun[span], mark[span] = reached[:-1], marks_at(before, reached[:-1], delay)
        mine = slice(*np.searchsorted(late_partition, [number, number + 1]))
        place[mine] = span.start + np.searchsorted(last[span], late_offset[mine])
        read_to[number] = int(last[span][-1]) + 1
        if reached[-1] > NEVER:
            newest[number] = int(reached[-1])
    # Of one block several batches may have had a part each, and several tasks: those in any order.
    begins = last - last % length
    other = np.r_[len(last) > 0, (partition[1:] != partition[:-1]) | (begins[1:] != begins[:-1])][: len(last)]
    mixed = ~other & np.r_[False, first[1:] <= last[:-1]][: len(last)]
    block = np.cumsum(other) - 1
    unsure = np.bincount(block, (oldest < mark) | mixed) > 0
    sure = ~unsure[block[place]]
    behind = _behind(late_partition[sure], late_offset[sure], np.maximum(late_mark, mark[place])[sure])
    again = np.flatnonzero(other)[unsure]
    return PutTogether(Measured(newest, read_to), behind, _asked(partition[again], begins[again], begun[again], stood))


def _asked(
    partition: np.ndarray[Any, Any],
    begins: np.ndarray[Any, Any],
    begun: np.ndarray[Any, Any],
    stood: Mapping[int, Stood],
) -> pa.Table:
    import pyarrow as pa

    floors = (stood.get(number, Stood()).watermark for number in partition.tolist())
    return pa.table(
        {
            PARTITION: pa.array(partition, pa.int32()),
            "block": pa.array(begins, pa.int64()),
            "begun": pa.array(begun, pa.int64()),
            "floor": pa.array([NEVER if floor is None else floor for floor in floors], pa.int64()),
        }
    )


def _within(times: DataFrame, blocks: pa.Table, delay: int) -> pa.Table:
    """Return the records behind in these blocks, each of which says the newest time and the watermark before it."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    spark = times.sparkSession
    times = times.withColumn("block", F.col(OFFSET) - F.pmod(F.col(OFFSET), F.lit(BLOCK)))
    asked = times.join(F.broadcast(spark.createDataFrame(blocks)), [PARTITION, "block"])
    earlier = Window.partitionBy(PARTITION, "block").orderBy(OFFSET).rowsBetween(Window.unboundedPreceding, -1)
    running = F.greatest(F.max(TIME).over(earlier), F.col("begun"))
    mark = F.greatest(running - F.lit(delay), F.col("floor"))
    late = asked.select(PARTITION, OFFSET, TIME, mark.alias("mark")).where(F.col(TIME) < F.col("mark"))
    rows = late.select(PARTITION, OFFSET, "mark").toArrow()
    return _behind(*(rows[name].to_numpy() for name in (PARTITION, OFFSET, "mark")))


def _behind(partition: np.ndarray[Any, Any], offset: np.ndarray[Any, Any], mark: np.ndarray[Any, Any]) -> pa.Table:
    import pyarrow as pa

    return pa.table(
        {
            PARTITION: pa.array(partition, pa.int32()),
            OFFSET: pa.array(offset, pa.int64()),
            BEHIND: pa.array(mark, pa.timestamp("us", tz="UTC")),
        }
    )
