"""What a stream's records say of their times, read by Arrow, which decodes nothing else of them.

Of many they are read in tasks: Spark hands each record to Python one by one, which costs several times what it takes
to read its time from a file. Of few this process has them before Spark would have planned a job for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.event_times.event_time import FIRST, LAST
from dagster_adjunct.orchestration.step.record_times.running_times import TIME
from dagster_adjunct.orchestration.step.record_times.times_by_block import BLOCKS, BlocksOfTimes
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class TimesInTasks:
    """Reads the records of some partitions by `reads`, whose event time is the column `name`; see `TaskReads`.

    Times after `latest` count as none.
    """

    reads: Callable[[int], Iterator[pa.Table]]
    partitions: Sequence[int]
    name: str
    latest: int = LAST

    def blocks(self, spark: SparkSession, look: BlocksOfTimes) -> DataFrame:
        """Return rows of BLOCKS, made by a task for each partition."""
        tasks = max(1, len(self.partitions))
        return spark.range(0, len(self.partitions), 1, tasks).mapInArrow(_Task(self, look), BLOCKS)

    def of(self, partition: int) -> Iterator[pa.RecordBatch]:
        """Yield (partition, offset, time) of a partition's records: microseconds, null for those that count as none."""
        for records in self.reads(partition):
            yield from times_of(records, self.name, self.latest).combine_chunks().to_batches()


@dataclass(frozen=True, slots=True)
class _Task:
    times: TimesInTasks
    look: BlocksOfTimes

    def __call__(self, places: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in places:
            for place in batch.column(0).to_pylist():
                yield from self.look(self.times.of(self.times.partitions[place]))


def times_of(records: pa.Table, name: str, latest: int = LAST) -> pa.Table:
    """Return PARTITION, OFFSET and TIME of these records, whose event time is the column `name`.

    Times before the year 1, and after `latest`, count as none.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    time = records[name].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    time = pc.if_else(pc.and_(pc.greater_equal(time, FIRST), pc.less_equal(time, latest)), time, None)
    return pa.table({PARTITION: records[PARTITION], OFFSET: records[OFFSET], TIME: time})
