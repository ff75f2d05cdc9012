"""Streams as they answer in one look: what they are, and where each partition begins and ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.interface.startpoint import check_offset
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.resources.streams.interface.stream_system import StreamInfo, StreamSystem


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """One stream ("lake.flights") in one look: what it is, and the oldest and the upcoming offset of each partition.

    `system` compares its offsets, and finds those of times as they were at this look.
    """

    name: str
    system: StreamSystem
    info: StreamInfo
    partitions: tuple[SystemStreamPartition, ...]
    oldest: Mapping[SystemStreamPartition, str]
    upcoming: Mapping[SystemStreamPartition, str]


def look_at_stream(systems: Mapping[str, StreamSystem], stream: str) -> StreamSnapshot:
    """Return a stream as it is now. Raises StreamNotFoundError, and ConfigurationError for an answer of no offset."""
    system_name, name = split_stream_name(stream)
    system = systems[system_name].snapshot(name)
    info = system.info(name)
    ssps = tuple(SystemStreamPartition(system_name, name, number) for number in range(info.partitions))
    oldest, upcoming = _edges(system, "oldest", ssps), _edges(system, "upcoming", ssps)
    return StreamSnapshot(stream, system, info, ssps, oldest, upcoming)


def look_at_streams(systems: Mapping[str, StreamSystem], streams: Iterable[str]) -> dict[str, StreamSnapshot]:
    """Return these streams as they are now, by name; each is looked at once."""
    return {name: look_at_stream(systems, name) for name in streams}


def _edges(
    system: StreamSystem, which: Literal["oldest", "upcoming"], ssps: Sequence[SystemStreamPartition]
) -> dict[SystemStreamPartition, str]:
    answers = system.oldest(ssps) if which == "oldest" else system.upcoming(ssps)
    return {ssp: check_offset(system, ssp, answers.get(ssp), f"asked for its {which} offset") for ssp in ssps}
