"""Checks offsets and ranges against what a lake stream holds, and turns them into numbers."""

from __future__ import annotations

from collections.abc import Mapping

from dagster_adjunct.resources.streams.interface.checked_arguments import no_partition
from dagster_adjunct.resources.streams.interface.numbered_offsets import HeldOffsets, parse_offset
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition
from dagster_adjunct.resources.streams.lake.segment_index import Span
from dagster_adjunct.resources.streams.lake.stream_manifest import StreamState


def check_ranges(
    stream: str, state: StreamState, ranges: Mapping[SystemStreamPartition, OffsetRange]
) -> dict[int, Span]:
    """Return the ranges as [start, end) by partition. Raises OffsetOutOfRangeError for what is not held whole."""
    held = HeldOffsets(
        of="stream",
        upcoming="the stream's upcoming one",
        dropped="Records before it were dropped by retention: begin at the oldest (a startpoint does that), or keep "
        "the stream longer.",
        ahead=f"; if the offset was valid once, stream {stream!r} was restored or created again.",
    )
    spans: dict[int, Span] = {}
    for ssp, given in ranges.items():
        if ssp.partition >= len(state.next):
            raise no_partition(ssp, len(state.next))
        start, end = parse_offset(given.start, str(ssp)), parse_offset(given.end, str(ssp))
        oldest, upcoming = state.oldest[ssp.partition], state.next[ssp.partition]
        held.check(ssp, start, end, oldest, upcoming)
        spans[ssp.partition] = (start, end)
    return spans
