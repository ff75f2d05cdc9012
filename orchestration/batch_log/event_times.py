"""The event times of an application's inputs, as its batch log stores them: how far each source
partition has come, and the watermarks of operators.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import Field as Default

from dagster_adjunct.orchestration.batch_log.intent import (
    MAX_SKIPPED,
    Offsets,
    Partition,
    Spans,
    cut_out,
    of_stream,
    without_stream,
)
from dagster_adjunct.resources.documents import StoredDocument


class PartitionTimes(StoredDocument):
    """The event times of a source partition; None before its first record with a time.

    `newest` is the latest event time of its records, `watermark` the time below which no further
    record is expected; it never decreases. `read_to` is the offset after the highest one ever read,
    `skipped` are the spans [from, to) below it that were never read, in order, MAX_SKIPPED at most.
    `active_at` is the clock of the last batch that had records of it or left some for a later
    batch, or of the first batch that knew it.
    """

    active_at: datetime
    newest: datetime | None = None
    watermark: datetime | None = None
    read_to: int = 0
    skipped: Spans = ()

    def skipped_after(self, start: int, end: int) -> Spans:
        """Return the skipped spans after the offsets [start, end) were read.

        Each startpoint that moves forward adds a span. Of more than MAX_SKIPPED spans the lowest
        are dropped, and count as read.
        """
        spans = [*self.skipped, (self.read_to, start)]
        return tuple(cut_out(spans, start, end)[-MAX_SKIPPED:])


class TimeState(StoredDocument):
    """The event times of source partitions, and the watermarks of stateful operators by name."""

    partitions: dict[Partition, PartitionTimes] = Default(default_factory=dict)
    operators: dict[str, datetime] = Default(default_factory=dict)

    def without_stream(self, stream: str) -> TimeState:
        """Return the state without a stream that was recreated, so that its former offsets mean
        nothing.
        """
        return self.model_copy(update={"partitions": without_stream(self.partitions, stream)})

    def carry_over(self, stream: str, went_on: Offsets) -> TimeState:
        """Return the state after the stream was repartitioned into partitions that continue at
        these offsets.

        Any record may be in any partition now. So each new partition has come as far as the old
        partition that was farthest behind, and has no times if an old one had none.
        """
        before = of_stream(self.partitions, stream).values()
        if not before:
            return self
        newest = []
        watermarks = []
        for times in before:
            if times.newest is not None and times.watermark is not None:
                newest.append(times.newest)
                watermarks.append(times.watermark)
        carried = PartitionTimes(active_at=max(times.active_at for times in before))
        if len(newest) == len(before):
            carried = carried.model_copy(
                update={"newest": min(newest), "watermark": min(watermarks)}
            )
        partitions = without_stream(self.partitions, stream)
        for ssp, offset in went_on.items():
            read_to = int(offset) if offset.isdecimal() else 0
            partitions[ssp] = carried.model_copy(update={"read_to": read_to})
        return self.model_copy(update={"partitions": partitions})
