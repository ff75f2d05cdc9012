"""What a task finds in the times of records as it reads them: blocks of offsets, and records that are behind.

A task knows the records that it has read itself. Where others come before these, more may be behind than it has found:
each block says the oldest time of the others in it, so that who knows all blocks sees where that can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.step.record_times.running_times import NEVER, Stood, marks_at, running, spans

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

COLUMNS = ("partition", "first", "last", "oldest", "latest", "mark")
BLOCKS = f"{COLUMNS[0]} int, {', '.join(f'{name} bigint' for name in COLUMNS[1:])}"
"""A row for each block: its first and last offset, the oldest time of those not found behind, and the newest of all.

`mark` is null there. A record that is behind is a row of its own: its offset is the first and the last, and `mark` the
watermark that it is below, by what the task had read.
"""
ALWAYS = 2**62
"""Microseconds: after all times."""


@dataclass(frozen=True, slots=True)
class BlocksOfTimes:
    """Turns batches of (partition, offset, time) into BLOCKS of at most `length` offsets; `delay` in microseconds."""

    stood: Mapping[int, Stood]
    delay: int
    length: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reached: dict[int, tuple[int, int]] = {}  # partition: the last offset, and the newest time up to it
        for batch in batches:
            partition, offset, time = _in_order(batch)
            for number, span in spans(partition):
                last, newest = reached.get(number, (-1, NEVER))
                before = self.stood.get(number, Stood())
                if newest > NEVER and last < offset[span.start]:  # else they came out of order, and nothing is known
                    before = Stood(newest, before.watermark)
                after = running(before, time[span])
                reached[number] = int(offset[span][-1]), int(after[-1])
                yield self._blocks(number, offset[span], time[span], marks_at(before, after[:-1], self.delay))

    def _blocks(
        self, number: int, offset: np.ndarray[Any, Any], time: np.ndarray[Any, Any], mark: np.ndarray[Any, Any]
    ) -> pa.RecordBatch:
        import numpy as np
        import pyarrow as pa

        behind = (time > NEVER) & (time < mark)
        block = offset // self.length
        starts = np.flatnonzero(np.r_[True, block[1:] != block[:-1]])
        oldest = np.minimum.reduceat(np.where(behind | (time == NEVER), ALWAYS, time), starts)
        latest = np.maximum.reduceat(time, starts)
        own = offset[behind]
        none = np.zeros(len(own), np.int64)
        values = [
            np.full(len(starts) + len(own), number, np.int32),
            np.r_[offset[starts], own],
            np.r_[offset[np.r_[starts[1:], len(offset)] - 1], own],
            np.r_[oldest, none],
            np.r_[latest, none],
        ]
        marks = pa.array(np.r_[starts, mark[behind]], mask=np.r_[starts >= 0, none > 0])
        return pa.record_batch([*map(pa.array, values), marks], names=list(COLUMNS))


def _in_order(batch: pa.RecordBatch) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    import numpy as np

    partition, offset = (batch.column(place).to_numpy() for place in (0, 1))
    time = batch.column(2).fill_null(NEVER).to_numpy()
    if (partition[1:] == partition[:-1]).all() and (offset[1:] > offset[:-1]).all():
        return partition, offset, time
    order = np.lexsort((offset, partition))
    return partition[order], offset[order], time[order]
