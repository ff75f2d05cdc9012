"""The records of an open batch that a waiting startpoint passes over once the batch is abandoned:
nothing has read them, and no run will.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dagster_adjunct.orchestration.batch_log.batch_log import application_state
from dagster_adjunct.orchestration.batch_log.intent import Intent
from dagster_adjunct.orchestration.startpoints.store import (
    PendingStartpoint,
    StartpointManager,
    iter_unapplied,
)
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.startpoint import (
    StartpointOldest,
    StartpointSpecific,
    StartpointUpcoming,
    resolve_startpoint_to_offset,
)
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition


class PassedOver(NamedTuple):
    """A startpoint that passes over `offsets` of the `span` that a batch gives back; None where
    only a run of the application can tell how many.
    """

    pending: PendingStartpoint
    span: OffsetRange
    offsets: int | None

    @property
    def ssp(self) -> SystemStreamPartition:
        """The partition."""
        return self.pending.request.ssp

    def describe(self) -> str:
        """Return how many of which offsets are passed over, and by which startpoint."""
        count = "may pass over some" if self.offsets is None else f"passes over {self.offsets:,}"
        return (
            f"{count} of the offsets {self.span.start} to {self.span.end} that the batch gives"
            f" back, and no run reads them: {self.pending.summary()}. To read them, take it back"
            f" before the next run: adjunct startpoint clear MODULE:APP {self.ssp} --reason …."
        )


def main_range(batch: Intent | None, ssp: SystemStreamPartition) -> OffsetRange | None:
    """Return what an open batch reads of a partition for the first time; None for a batch that
    reads again, which moves no checkpoint.
    """
    if batch is None or batch.reads_again:
        return None
    return batch.ranges.get(ssp)


def count_passed_over(span: OffsetRange, start: str, distance: Callable[[str, str], int]) -> int:
    """Return how many offsets of a span that is given back are before the offset `start`."""
    return min(distance(span.start, start), distance(span.start, span.end))


def find_passed_over(lake: Lake, application: str, batch: Intent) -> list[PassedOver]:
    """Return the startpoints of an application that pass over records of its open batch once that
    is abandoned, one a partition.

    The application itself is not needed, so positions are looked up in streams of the lake only.
    """
    found: dict[SystemStreamPartition, PassedOver] = {}
    for held in _iter_moving(lake, application):
        ssp = held.request.ssp
        span = main_range(batch, ssp)
        if span is None or ssp in found:
            continue
        offsets = _count(lake, held, span)
        if offsets != 0:
            found[ssp] = PassedOver(held, span, offsets)
    return [found[ssp] for ssp in sorted(found)]


def _iter_moving(lake: Lake, application: str) -> Iterator[PendingStartpoint]:
    """Yield the startpoints that are not applied and move the position of an application."""
    stored = StartpointManager(MetadataStore(lake), application).read()
    state = application_state(lake, application)
    waiting: Sequence[PendingStartpoint] = [PendingStartpoint(each) for each in stored.waiting]
    for held in (*waiting, *iter_unapplied(stored.handed, state)):
        if held.request.until is None and not held.is_of_dataset:
            yield held


def _count(lake: Lake, held: PendingStartpoint, span: OffsetRange) -> int | None:
    """Return how many offsets of the span are before the startpoint; None if that is unknown."""
    start = _find_start(lake, held, span)
    if start is None:
        return None
    numbers = (start, span.start, span.end)
    if not all(number.isdecimal() for number in numbers):
        return None

    def distance(low: str, high: str) -> int:
        return max(int(high) - int(low), 0)

    return count_passed_over(span, start, distance)


def _find_start(lake: Lake, held: PendingStartpoint, span: OffsetRange) -> str | None:
    """Return the offset at which a startpoint starts, or an end of the span if it starts beyond
    that; None if that is unknown.
    """
    position = held.request.startpoint
    if held.offset is not None:
        return held.offset
    if isinstance(position, StartpointSpecific):
        return position.offset
    if isinstance(position, StartpointOldest):
        return span.start
    if isinstance(position, StartpointUpcoming):
        return span.end
    if held.request.ssp.system != "lake":
        return None
    try:
        return resolve_startpoint_to_offset(LakeStreams(lake), held.request.ssp, position)
    except AdjunctError:  # a run will report it
        return None
