"""Carries an application's position over to a stream that was rewritten into other partitions. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import StreamSnapshot
    from dagster_adjunct.resources.streams.interface.stream_system import StreamInfo


def carry_over_all(
    state: ApplicationState, streams: Mapping[str, StreamSnapshot]
) -> tuple[ApplicationState, tuple[str, ...]]:
    """Return the state with a position in each of these streams that was rewritten, and what the history says of it."""
    notes: list[str] = []
    for name, stream in streams.items():
        carried = carried_over(state, name, stream.info)
        if carried is not None:
            state = carried
            notes.append(carried_note(name, stream.info))
    return state, tuple(notes)


def carried_over(state: ApplicationState, stream: str, info: StreamInfo) -> ApplicationState | None:
    """Return the state with a position in the stream ("lake.orders") as it is partitioned now.

    None unless the stream was rewritten just when the application had read all of it, so that what it has not read and
    what came after the rewriting are the same. Partitions begin with the highest epoch that any of them had.
    """
    rewritten, offsets = info.repartitioned, state.offsets
    if rewritten is None or info.identity is None or offsets.streams.get(stream) != rewritten.identity:
        return None
    ended = _by_partition(stream, rewritten.ended)
    mine = {ssp: offset for ssp, offset in state.checkpoint.items() if ssp.qualified_stream == stream}
    if mine != ended or waiting_in(state, stream):
        return None
    now = _by_partition(stream, rewritten.went_on)

    def spread(epochs: Mapping[SystemStreamPartition, int]) -> dict[SystemStreamPartition, int]:
        highest = max((epoch for ssp, epoch in epochs.items() if ssp.qualified_stream == stream), default=0)
        others = {ssp: epoch for ssp, epoch in epochs.items() if ssp.qualified_stream != stream}
        return others | (dict.fromkeys(now, highest) if highest else {})

    update = {
        "streams": {**offsets.streams, stream: info.identity},
        "applied": {ssp: start for ssp, start in offsets.applied.items() if ssp.qualified_stream != stream},
        "epochs": spread(offsets.epochs),
        "opened": spread(offsets.opened),
    }
    others = {ssp: offset for ssp, offset in state.checkpoint.items() if ssp.qualified_stream != stream}
    return state.model_copy(
        update={
            "checkpoint": others | now,
            "offsets": offsets.model_copy(update=update),
            "times": state.times.carried(stream, now),
        }
    )


def carried_note(stream: str, info: StreamInfo) -> str:
    """Return what the history says of it."""
    return f"{stream} was repartitioned into {info.partitions}: goes on where it had read to"


def waiting_in(state: ApplicationState, stream: str) -> bool:
    """Whether a startpoint that is resolved, or a replay under way, stands on the partitions of the stream."""
    replays = (replay.ssp for replay in state.offsets.replays.values())
    return any(ssp.qualified_stream == stream for ssp in (*state.offsets.resolved, *replays))


def _by_partition(stream: str, offsets: Iterable[str]) -> dict[SystemStreamPartition, str]:
    system, name = split_stream_name(stream)
    return {SystemStreamPartition(system, name, number): offset for number, offset in enumerate(offsets)}
