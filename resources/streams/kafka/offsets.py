"""The ranges of Kafka's offsets that a partition holds whole."""

from __future__ import annotations

from dagster_adjunct.resources.errors import OffsetOutOfRangeError
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


def check_range(ssp: SystemStreamPartition, start: int, end: int, oldest: int, upcoming: int) -> None:
    """Raise OffsetOutOfRangeError for a range that the partition does not hold whole."""
    if start > end:
        raise OffsetOutOfRangeError(
            f"{ssp}: the range begins at {start}, after its end {end}.",
            "Give the smaller offset first.",
            stream=ssp.qualified_stream,
            partition=ssp.partition,
            offset=str(start),
        )
    if start < oldest:
        raise too_old(ssp, start, oldest)
    if end > upcoming:
        raise OffsetOutOfRangeError(
            f"{ssp}: the range ends at offset {end}, the topic's upcoming one (the last stable offset) is {upcoming}.",
            f"End at {upcoming} or before. If the offset was valid once, the topic was created again or has lost "
            "records: set a startpoint for this partition.",
            stream=ssp.qualified_stream,
            partition=ssp.partition,
            offset=str(end),
            upcoming=str(upcoming),
        )


def too_old(ssp: SystemStreamPartition, start: int, oldest: int) -> OffsetOutOfRangeError:
    """Return the error for a range that begins before what the topic still holds."""
    return OffsetOutOfRangeError(
        f"{ssp}: the range begins at offset {start}, the oldest that the topic still holds is {oldest}.",
        "Records before it were deleted by retention. Go on without them by a startpoint (oldest) for this partition, "
        "or keep the topic longer (retention.ms, retention.bytes) than its reader may fall behind.",
        stream=ssp.qualified_stream,
        partition=ssp.partition,
        offset=str(start),
        oldest=str(oldest),
    )
