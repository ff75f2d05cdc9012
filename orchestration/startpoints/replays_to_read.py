"""Which bounded replays a batch can go on with, and why one can't."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.startpoints.stream_snapshots import edge_offsets, snapshot_of
from dagster_adjunct.resources.errors import OffsetOutOfRangeError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.stored_positions import OffsetState, Replay
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


def replays_to_read(
    systems: Mapping[str, StreamSystem], app: Application, offsets: OffsetState
) -> dict[SystemStreamPartition, Replay]:
    """Return the bounded replays to go on with: of each partition the one that began first; none if switched off.

    Raises OffsetOutOfRangeError for one that the stream does not hold (any more).
    """
    chosen: dict[SystemStreamPartition, Replay] = {}
    if not app.startpoints:
        return chosen
    for replay in sorted(offsets.replays.values(), key=lambda replay: (replay.epoch, replay.id)):
        chosen.setdefault(replay.ssp, replay)
    for name in sorted({ssp.qualified_stream for ssp in chosen}):
        ssps = [ssp for ssp in chosen if ssp.qualified_stream == name]
        if name not in app.inputs:
            raise _no_replay(app, chosen[ssps[0]], f"the application does not read {name} any more")
        stream = snapshot_of(systems, name)
        system = stream.system
        oldest, upcoming = edge_offsets(system, "oldest", ssps), edge_offsets(system, "upcoming", ssps)
        for ssp in ssps:
            replay = chosen[ssp]
            if stream.info.is_another(replay.stream):
                raise _no_replay(app, replay, "the stream was deleted and made anew")
            if system.compare(replay.next, oldest[ssp]) < 0:
                raise _no_replay(app, replay, f"retention has passed it: the oldest offset left is {oldest[ssp]}")
            if system.compare(replay.until, upcoming[ssp]) > 0:
                raise _no_replay(app, replay, f"the stream ends before {upcoming[ssp]}: it has lost records")
    return chosen


def _no_replay(app: Application, replay: Replay, why: str) -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError(
        f"{replay.ssp}: the replay of {replay.by} ({replay.reason}) has come to offset {replay.next} of "
        f"{replay.until} and can't go on: {why}.",
        f"Cancel it (adjunct startpoint clear MODULE:APP {replay.ssp} --reason …), then ask again from what is there.",
        stream=replay.ssp.qualified_stream,
        partition=replay.ssp.partition,
        offset=replay.next,
        application=app.name,
    )
