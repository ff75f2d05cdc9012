"""The refusal of a stream that was deleted and made anew, or rewritten, since a dataset read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import OffsetOutOfRangeError

if TYPE_CHECKING:
    from dagster_adjunct.resources.streams.interface.stream_system import StreamInfo
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


def beyond_end(
    read_to: Mapping[SystemStreamPartition, str],
    ends: Mapping[SystemStreamPartition, str],
    compare: Callable[[str, str], int],
) -> SystemStreamPartition | None:
    """Return a partition that was read further than it goes, None where there is none."""
    return next((ssp for ssp, offset in read_to.items() if ssp in ends and compare(offset, ends[ssp]) > 0), None)


def made_anew(
    dataset: str,
    stream: str,
    info: StreamInfo,
    *,
    before: str | None,
    read_to: Mapping[SystemStreamPartition, str],
    ends: Mapping[SystemStreamPartition, str],
    compare: Callable[[str, str], int],
    deleted_next: str,
    rewritten_next: str = "",
) -> OffsetOutOfRangeError | None:
    """Return the error that a stream is another one than the dataset has read, None where it is the same.

    It is another one where its identity is not the one `before`, or where it ends before what was read of it. The next
    step depends on whether it was deleted, or rewritten into other partitions before all of it was read.
    """
    beyond = beyond_end(read_to, ends, compare)
    if beyond is None and not info.is_another(before):
        return None
    if info.is_rewritten(before):
        return OffsetOutOfRangeError(
            f"dataset {dataset!r} was read from {stream} before that was rewritten into {info.partitions} "
            "partition(s), and had not read all of it then.",
            f"Offsets begin anew there, and none is taken for one of before. What is served stays. {rewritten_next}",
            dataset=dataset,
            stream=stream,
        )
    if beyond is None:
        return OffsetOutOfRangeError(
            f"dataset {dataset!r} was read from another stream under the name {stream}.",
            f"The stream was deleted and made anew: {deleted_next}",
            dataset=dataset,
            stream=stream,
        )
    return OffsetOutOfRangeError(
        f"dataset {dataset!r} has read {beyond} up to offset {read_to[beyond]}, and the stream ends at {ends[beyond]}.",
        f"The stream was deleted and made anew: {deleted_next}",
        dataset=dataset,
        stream=stream,
        partition=beyond.partition,
        offset=read_to[beyond],
        upcoming=ends[beyond],
    )
