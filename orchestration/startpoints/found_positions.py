"""What the start of a run, and each look at the streams after it, has found: in values, and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_adjunct.resources.streams.interface.startpoint import describe_startpoint

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.positions import OffsetState, Replay, ResolvedStartpoint
    from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
    from dagster_adjunct.orchestration.startpoints.resolving import Unresolved
    from dagster_adjunct.resources.streams.interface.ssp import SystemStreamPartition
    from dagster_adjunct.resources.streams.interface.system import OffsetRange


@dataclass(frozen=True, slots=True)
class Start:
    """What the start of a run decided, to be stored before anything is read.

    `resolved` are the startpoints whose offsets were found now. `done` names those that an earlier commit has taken
    in and that are still fanned out, by task and partition. `paused` are replays that stay where they are, since
    startpoints are switched off. `carried` says of streams that were repartitioned that the checkpoint is of them now.
    """

    checkpoint: dict[str, str]
    offsets: OffsetState
    fan_out: FanOut
    resolved: tuple[ResolvedStartpoint, ...] = ()
    unresolved: tuple[Unresolved, ...] = ()
    done: Mapping[str, Mapping[SystemStreamPartition, str]] = field(default_factory=dict)
    paused: tuple[Replay, ...] = ()
    carried: tuple[str, ...] = ()

    def texts(self) -> list[str]:
        """Return in words what was found, a line each."""
        said = [
            f"{start.ssp}: to start at {start.position}, found at offset {start.offset} ({start.by}: {start.reason})"
            for start in self.resolved
        ]
        said += [
            f"{each.request.ssp}: goes on from its checkpoint ({each.request.by}: {each.request.reason}): {each.error}"
            for each in self.unresolved
        ]
        said += self.carried
        said += [
            f"{each.ssp}: startpoints are switched off: {describe_startpoint(each.startpoint)} is left alone "
            f"({each.by}: {each.reason})"
            for each in self.fan_out.left_alone
        ]
        said += [
            f"{each.ssp}: startpoints are switched off: the replay from {each.position} stays at offset {each.next} "
            f"({each.by}: {each.reason})"
            for each in self.paused
        ]
        return [*said, *self.fan_out.gone(), *self.fan_out.left()]


@dataclass(frozen=True, slots=True)
class Positions:
    """Where the main input goes on: the next offset and the end of each partition, and what retention took of it."""

    starts: dict[SystemStreamPartition, str]
    ends: dict[SystemStreamPartition, str]
    lost: dict[SystemStreamPartition, OffsetRange]
    startpoints: Mapping[SystemStreamPartition, ResolvedStartpoint] = field(default_factory=dict)

    def texts(self) -> list[str]:
        """Return in words what retention took, a line each."""
        return [
            f"{ssp}: retention has passed {whose(self.startpoints.get(ssp))}offset {span.start}; the input goes on "
            f"from {span.end}, the oldest left"
            for ssp, span in sorted(self.lost.items())
        ]


def whose(startpoint: ResolvedStartpoint | None) -> str:
    """Return whose startpoint it is, as words that a position may follow; "" for none."""
    if startpoint is None:
        return ""
    return f"the startpoint {startpoint.position} of {startpoint.by} ({startpoint.reason}) at "
