"""The refusal of a stream that was deleted and made anew, or rewritten, since a dataset read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import OffsetOutOfRangeError

if TYPE_CHECKING:
    from dagster_adjunct.assets.sources.opened_stream import Source
    from dagster_adjunct.resources.streams.interface.stream_system import StreamInfo, StreamSystem
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


@dataclass(frozen=True, slots=True)
class SameStream:
    """The input stream of a bounded dataset, watched for being another one than it was read from before."""

    stream: Source
    system: StreamSystem

    def check(self, before: str | None) -> None:
        """Raise OffsetOutOfRangeError where the stream is not the one that had this identity."""
        self._check(before, {}, {})

    def ends_at(self, offsets: Mapping[SystemStreamPartition, int]) -> bool:
        """Whether the stream ends at these offsets; refused where it ends before what was read of it."""
        ends = self.stream.system.upcoming(self.stream.ssps)
        if any(int(ends[ssp]) < offset for ssp, offset in offsets.items()):
            ends = self.system.upcoming(self.stream.ssps)  # another writer may have read on since we looked
        self._check(None, {ssp: str(offset) for ssp, offset in offsets.items()}, ends)
        return all(int(ends[ssp]) == offset for ssp, offset in offsets.items())

    def _check(
        self,
        before: str | None,
        read_to: Mapping[SystemStreamPartition, str],
        ends: Mapping[SystemStreamPartition, str],
    ) -> None:
        spec = self.stream.spec
        ways_on = (
            "Declare the dataset under a new name to build it from there beside this one, or delete this one (adjunct "
            f"dataset delete {spec.name} --reason …) and advance it again."
        )
        refusal = made_anew(
            spec.name,
            str(spec.input),
            self.stream.info,
            before=before,
            read_to=read_to,
            ends=ends,
            compare=self.system.compare,
            deleted_next="its versions are others, whatever their names, and none is taken. What is served stays. "
            f"{ways_on}",
            rewritten_next=ways_on,
        )
        if refusal is not None:
            raise refusal
