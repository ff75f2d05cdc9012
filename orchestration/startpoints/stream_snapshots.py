"""Streams as they answer in one look: what they are, where they begin and end, and whether they were made anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.interface.startpoint import check_offset
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.input import Input
    from dagster_adjunct.resources.streams.interface.stream_system import StreamInfo, StreamSystem


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """One stream ("lake.flights") as it answers in one look: its system, what it is, and its partitions in order."""

    name: str
    system: StreamSystem
    info: StreamInfo
    partitions: tuple[SystemStreamPartition, ...]


def snapshot_of(systems: Mapping[str, StreamSystem], stream: str) -> StreamSnapshot:
    """Return a stream as it is now. Raises StreamNotFoundError."""
    system, name = split_stream_name(stream)
    opened = systems[system].snapshot(name)
    info = opened.info(name)
    partitions = tuple(SystemStreamPartition(system, name, number) for number in range(info.partitions))
    return StreamSnapshot(stream, opened, info, partitions)


def default_offset(source: Input, info: StreamInfo, system: StreamSystem) -> Literal["oldest", "upcoming"]:
    """Return where a partition without checkpoint and startpoint begins."""
    return source.default_offset or info.default_offset or system.default_offset or "upcoming"


def edge_offsets(
    system: StreamSystem, which: Literal["oldest", "upcoming"], ssps: Sequence[SystemStreamPartition]
) -> dict[SystemStreamPartition, str]:
    """Return the oldest or the upcoming offset of these partitions. Raises ConfigurationError for an answer of none."""
    answers = system.oldest(ssps) if which == "oldest" else system.upcoming(ssps)
    return {ssp: check_offset(system, ssp, answers.get(ssp), f"asked for its {which} offset") for ssp in ssps}
