"""Which records are behind the watermark of their own source partition: exactly, and with one look at most records.

A record is behind where its time is below the watermark that its partition had when it came: the newest time of all
records before it, since ever, less the delay. Of many records, blocks of offsets are looked at first: only in one whose
oldest time is below the watermark at its end can there be any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.operators.hidden_columns import BEHIND
from dagster_adjunct.orchestration.step.watermarks import Measured
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql import DataFrame

TIME = "time"
"""The event time of a record in microseconds since 1970, null for none; with it its partition and its offset."""
BLOCK = 1_024
"""Offsets that are looked at together."""
AT_ONCE = 100_000
"""Offsets: so many are looked at each, by the driver; of more, blocks come first."""
_NEVER = -(2**62)  # before all times


@dataclass(frozen=True, slots=True)
class Stood:
    """How far a partition had come before a batch, in microseconds: its newest time and its watermark."""

    newest: int | None = None
    watermark: int | None = None


@dataclass(frozen=True, slots=True)
class Lateness:
    """What a batch's records say, and those behind: their partition, offset, and the watermark then (a timestamp)."""

    measured: Measured
    behind: pa.Table | None = None


def lateness(times: DataFrame, stood: Mapping[int, Stood], delay: int, *, offsets: int) -> Lateness:
    """Return what the records say, of which there are at most as many as `offsets`; `delay` is in microseconds."""
    if offsets <= AT_ONCE:
        return look_at_each(times.toArrow(), stood, delay)
    return _by_blocks(times, stood, delay)


def look_at_each(records: pa.Table, stood: Mapping[int, Stood], delay: int) -> Lateness:
    """Return what records say that are all here, in whatever order."""
    import numpy as np

    partition, offset = (records[name].to_numpy() for name in (PARTITION, OFFSET))
    time = records[TIME].fill_null(_NEVER).to_numpy()
    order = np.lexsort((offset, partition))
    partition, offset, time = partition[order], offset[order], time[order]
    mark = np.full(len(time), _NEVER)
    newest, read_to = {}, {}
    for number, span in _spans(partition):
        before = stood.get(number, Stood())
        running = _running(before, time[span])
        mark[span] = _marks(before, running[:-1], delay)
        read_to[number] = int(offset[span][-1]) + 1
        if running[-1] > _NEVER:
            newest[number] = int(running[-1])
    late = (time > _NEVER) & (time < mark)
    behind = _behind(partition[late], offset[late], mark[late]) if late.any() else None
    return Lateness(Measured(newest, read_to), behind)


def _by_blocks(times: DataFrame, stood: Mapping[int, Stood], delay: int) -> Lateness:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql import functions as F

    times = times.withColumn("block", F.col(OFFSET) - F.pmod(F.col(OFFSET), F.lit(BLOCK)))
    oldest, latest, last = F.min(TIME).alias("oldest"), F.max(TIME).alias("latest"), F.max(OFFSET).alias("last")
    blocks = times.groupBy(PARTITION, "block").agg(oldest, latest, last).toArrow()
    blocks = blocks.sort_by([(PARTITION, "ascending"), ("block", "ascending")])
    partition, last_offset = blocks[PARTITION].to_numpy(), blocks["last"].to_numpy()
    latest_time, oldest_time = (blocks[name].fill_null(_NEVER).to_numpy() for name in ("latest", "oldest"))
    newest, read_to = {}, {}
    begun, suspect = np.full(len(partition), _NEVER), np.zeros(len(partition), bool)
    for number, span in _spans(partition):
        before = stood.get(number, Stood())
        running = _running(before, latest_time[span])
        begun[span] = running[:-1]
        ends = _marks(before, running[1:], delay)
        suspect[span] = (oldest_time[span] > _NEVER) & (oldest_time[span] < ends)
        read_to[number] = int(last_offset[span][-1]) + 1
        if running[-1] > _NEVER:
            newest[number] = int(running[-1])
    measured = Measured(newest, read_to)
    if not suspect.any():
        return Lateness(measured)
    floor = [stood.get(int(number), Stood()).watermark for number in partition[suspect]]
    looked_at = pa.table(
        {
            PARTITION: pa.array(partition[suspect], pa.int32()),
            "block": pa.array(blocks["block"].to_numpy()[suspect], pa.int64()),
            "begun": pa.array(begun[suspect], pa.int64()),
            "floor": pa.array([_NEVER if mark is None else mark for mark in floor], pa.int64()),
        }
    )
    return Lateness(measured, _within(times, looked_at, delay))


def _within(times: DataFrame, blocks: pa.Table, delay: int) -> pa.Table | None:
    """Return the records behind in these blocks, each of which says the newest time and the watermark before it."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    spark = times.sparkSession
    found = times.join(F.broadcast(spark.createDataFrame(blocks)), [PARTITION, "block"])
    earlier = Window.partitionBy(PARTITION, "block").orderBy(OFFSET).rowsBetween(Window.unboundedPreceding, -1)
    running = F.greatest(F.max(TIME).over(earlier), F.col("begun"))
    mark = F.greatest(running - F.lit(delay), F.col("floor"))
    late = found.select(PARTITION, OFFSET, TIME, mark.alias("mark")).where(F.col(TIME) < F.col("mark"))
    rows = late.select(PARTITION, OFFSET, "mark").toArrow()
    if not rows.num_rows:
        return None
    return _behind(*(rows[name].to_numpy() for name in (PARTITION, OFFSET, "mark")))


def _spans(partition: np.ndarray[Any, Any]) -> Iterator[tuple[int, slice]]:
    """Yield each number, and where its records are, of numbers in their order."""
    import numpy as np

    if not len(partition):
        return
    starts = np.flatnonzero(np.r_[True, partition[1:] != partition[:-1]]).tolist()
    for start, end in zip(starts, [*starts[1:], len(partition)], strict=True):
        yield int(partition[start]), slice(start, end)


def _running(before: Stood, times: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the newest time before the first, and after each."""
    import numpy as np

    first = _NEVER if before.newest is None else before.newest
    return np.maximum.accumulate(np.r_[first, times])


def _marks(before: Stood, newest: np.ndarray[Any, Any], delay: int) -> np.ndarray[Any, Any]:
    """Return the watermarks at these newest times."""
    import numpy as np

    floor = _NEVER if before.watermark is None else before.watermark
    return np.maximum(np.where(newest > _NEVER, newest - delay, _NEVER), floor)


def _behind(partition: np.ndarray[Any, Any], offset: np.ndarray[Any, Any], mark: np.ndarray[Any, Any]) -> pa.Table:
    import pyarrow as pa

    return pa.table(
        {
            PARTITION: pa.array(partition, pa.int32()),
            OFFSET: pa.array(offset, pa.int64()),
            BEHIND: pa.array(mark, pa.timestamp("us", tz="UTC")),
        }
    )
