"""Streams as they answer in one look: what they are, where they begin and end, and whether they were made anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.interface.ssp import SystemStreamPartition
from dagster_adjunct.resources.streams.interface.startpoint import check_offset

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.input import Input
    from dagster_adjunct.resources.streams.interface.system import StreamInfo, StreamSystem


class StreamSnapshots:
    """Streams as they answer in one look, each opened once, by their names ("lake.flights")."""

    def __init__(self, systems: Mapping[str, StreamSystem]) -> None:
        self._systems = systems
        self._opened: dict[str, StreamSystem] = {}
        self._infos: dict[str, StreamInfo] = {}

    def system(self, stream: str) -> StreamSystem:
        """Return the system of a stream, as it answers questions about this stream."""
        if stream not in self._opened:
            system, name = split_stream_name(stream)
            self._opened[stream] = self._systems[system].snapshot(name)
        return self._opened[stream]

    def info(self, stream: str) -> StreamInfo:
        """Return what the stream is. Raises StreamNotFoundError."""
        if stream not in self._infos:
            self._infos[stream] = self.system(stream).info(split_stream_name(stream)[1])
        return self._infos[stream]

    def identity(self, ssp: SystemStreamPartition) -> str | None:
        """Return the identity of a partition's stream, None where its system gives none."""
        return self.info(ssp.qualified_stream).identity

    def partitions(self, stream: str) -> list[SystemStreamPartition]:
        """Return all partitions of the stream, in order."""
        return partitions_of(stream, self.info(stream))


def partitions_of(stream: str, info: StreamInfo) -> list[SystemStreamPartition]:
    """Return all partitions of the stream "system.stream", in order."""
    system, name = split_stream_name(stream)
    return [SystemStreamPartition(system, name, number) for number in range(info.partitions)]


def default_offset(source: Input, info: StreamInfo, system: StreamSystem) -> Literal["oldest", "upcoming"]:
    """Return where a partition without checkpoint and startpoint begins."""
    return source.default_offset or info.default_offset or system.default_offset or "upcoming"


def edge_offsets(
    system: StreamSystem, which: Literal["oldest", "upcoming"], ssps: Sequence[SystemStreamPartition]
) -> dict[SystemStreamPartition, str]:
    """Return the oldest or the upcoming offset of these partitions. Raises ConfigurationError for an answer of none."""
    answers = system.oldest(ssps) if which == "oldest" else system.upcoming(ssps)
    return {ssp: check_offset(system, ssp, answers.get(ssp), f"asked for its {which} offset") for ssp in ssps}
