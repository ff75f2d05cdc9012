"""Where a batch can go on in its inputs: what is unread, within what the streams held at one look. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Container
    from datetime import datetime

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.batchlog.stored_positions import OffsetState, Replay, ResolvedStartpoint
    from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import StreamSnapshot
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class InputPositions:
    """Where the main input goes on, by partition: what there is to read, and what retention took before that.

    `unread` is empty where the next offset is the end. `startpoints` are those that the next batch applies, and
    `replays` the bounded ones to go on with. What no batch can be made of is told to `check_positions`: positions past
    the end of their partition (`past_end`: both offsets), and replays that can't go on, each with why.
    """

    unread: Mapping[SystemStreamPartition, OffsetRange]
    lost: Mapping[SystemStreamPartition, OffsetRange] = field(default_factory=dict)
    startpoints: Mapping[SystemStreamPartition, ResolvedStartpoint] = field(default_factory=dict)
    replays: Mapping[SystemStreamPartition, Replay] = field(default_factory=dict)
    past_end: Mapping[SystemStreamPartition, tuple[str, str]] = field(default_factory=dict)
    stuck_replays: tuple[tuple[Replay, str], ...] = ()


def input_positions(
    app: Application,
    streams: Mapping[str, StreamSnapshot],
    state: ApplicationState,
    held: Container[SystemStreamPartition] = (),
) -> InputPositions:
    """Return where the inputs go on in these streams, and how far; partitions that are `held` are not read.

    Partitions that were added since the start of the run wait for the next one.
    """
    replays = _first_replays(app, state.offsets)
    stuck = [(replay, why) for ssp, replay in sorted(replays.items()) if (why := _why_stuck(replay, streams))]
    unread: dict[SystemStreamPartition, OffsetRange] = {}
    lost: dict[SystemStreamPartition, OffsetRange] = {}
    startpoints: dict[SystemStreamPartition, ResolvedStartpoint] = {}
    past_end: dict[SystemStreamPartition, tuple[str, str]] = {}
    for stream in streams.values():
        if stream.info.is_another(state.offsets.streams.get(stream.name)):
            continue  # offsets of another stream say nothing in this one
        for ssp in stream.partitions:
            if ssp not in state.checkpoint or ssp in held:
                continue
            startpoint, oldest, upcoming = state.offsets.resolved.get(ssp), stream.oldest[ssp], stream.upcoming[ssp]
            start = startpoint.offset if startpoint else state.checkpoint[ssp]
            if startpoint is not None:
                startpoints[ssp] = startpoint
            if stream.system.compare(start, upcoming) > 0:
                past_end[ssp] = (start, upcoming)
                continue
            if stream.system.compare(start, oldest) < 0:
                if startpoint is None or startpoint.position != "oldest":
                    lost[ssp] = OffsetRange(start, oldest)
                start = oldest
            unread[ssp] = OffsetRange(start, upcoming)
    return InputPositions(unread, lost, startpoints, replays, past_end, tuple(stuck))


def _first_replays(app: Application, offsets: OffsetState) -> dict[SystemStreamPartition, Replay]:
    """Return of each partition the bounded replay that began first; none where startpoints are switched off."""
    first: dict[SystemStreamPartition, Replay] = {}
    if app.startpoints:
        for replay in sorted(offsets.replays.values(), key=order_of_replay):
            first.setdefault(replay.ssp, replay)
    return first


def order_of_replay(replay: Replay) -> tuple[datetime, str, int, str]:
    """Return what replays are sorted by: those that began first come first.

    Not by their epochs alone: these get higher where a batch was given up, and what began together has to stay so.
    """
    return replay.began_at, replay.recorded or "", replay.epoch, replay.id


def _why_stuck(replay: Replay, streams: Mapping[str, StreamSnapshot]) -> str:
    """Return why a replay can't go on, as a sentence may end; "" where it can."""
    ssp = replay.ssp
    stream = streams.get(ssp.qualified_stream)
    if stream is None:
        return f"the application does not read {ssp.qualified_stream} any more"
    if stream.info.is_another(replay.stream) or ssp not in stream.oldest:
        return "the stream was deleted and made anew"
    if stream.system.compare(replay.next, stream.oldest[ssp]) < 0:
        return f"retention has passed it: the oldest offset left is {stream.oldest[ssp]}"
    if stream.system.compare(replay.until, stream.upcoming[ssp]) > 0:
        return f"the stream ends before {stream.upcoming[ssp]}: it has lost records"
    return ""
