"""What an application's batch log holds of event times: of each source partition, and of each stateful operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from pydantic import Field as Default

from dagster_adjunct.orchestration.batchlog.stored_positions import Partition
from dagster_adjunct.resources.stored_documents import StoredDocument
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

SKIPPED = 100
"""Spans of offsets of a partition that are known to have been passed over."""


class PartitionTimes(StoredDocument):
    """How far a source partition has come in time; None before its first record that has one.

    `newest` is the latest event time of its records, `watermark` what no record of it should be below any more; it
    never goes back. `read_to` is the offset after the highest that was ever read, `skipped` are the spans of offsets
    [from, to) below it that never were, SKIPPED at most, in order; `active_at` the clock of the last
    batch that had records of it, or left some for a later one, or of the first one that knew it.
    """

    active_at: datetime
    newest: datetime | None = None
    watermark: datetime | None = None
    read_to: int = 0
    skipped: tuple[tuple[int, int], ...] = ()

    def skipped_after(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the spans that are skipped once the offsets [start, end) were read, too.

        Each startpoint that goes forward adds one. Of more than SKIPPED the lowest are forgotten, and count as read.
        """
        gaps = [*self.skipped, (self.read_to, start)]
        parts = [part for low, high in gaps for part in ((low, min(high, start)), (max(low, end), high))]
        return tuple(part for part in parts if part[0] < part[1])[-SKIPPED:]


class TimeState(StoredDocument):
    """The times of source partitions, and the watermarks that stateful operators have had, by their names."""

    partitions: dict[Partition, PartitionTimes] = Default(default_factory=dict)
    operators: dict[str, datetime] = Default(default_factory=dict)

    def without(self, streams: Iterable[str]) -> TimeState:
        """Return the state without these streams: they are others by now, and their offsets say nothing."""
        gone = {*streams}
        left = {ssp: times for ssp, times in self.partitions.items() if ssp.qualified_stream not in gone}
        return self if len(left) == len(self.partitions) else self.model_copy(update={"partitions": left})

    def carried(self, stream: str, went_on: Mapping[SystemStreamPartition, str]) -> TimeState:
        """Return the state with the stream in other partitions, which go on at these offsets.

        A record of any partition may be in any other now: each has come as far as the one that was farthest behind.
        """
        before = [times for ssp, times in self.partitions.items() if ssp.qualified_stream == stream]
        if not before:
            return self
        newest = [times.newest for times in before if times.newest is not None]
        marks = [times.watermark for times in before if times.watermark is not None]
        all_known = len(newest) == len(before)
        carried = {
            ssp: PartitionTimes(
                active_at=max(times.active_at for times in before),
                newest=min(newest) if all_known else None,
                watermark=min(marks) if all_known else None,
                read_to=int(offset) if offset.isdecimal() else 0,
            )
            for ssp, offset in went_on.items()
        }
        return self.model_copy(update={"partitions": {**self.without([stream]).partitions, **carried}})
