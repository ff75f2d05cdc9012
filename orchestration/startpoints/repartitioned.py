"""Carries an application's position over to a stream that was rewritten into other partitions. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.streams.interface.ssp import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.log import ApplicationState
    from dagster_adjunct.resources.streams.interface.system import StreamInfo


def carried_over(state: ApplicationState, stream: str, info: StreamInfo) -> ApplicationState | None:
    """Return the state with a position in the stream ("lake.orders") as it is partitioned now.

    None unless the stream was rewritten just when the application had read all of it, so that what it has not read and
    what came after the rewriting are the same. Partitions begin with the highest epoch that any of them had.
    """
    rewritten, offsets = info.repartitioned, state.offsets
    if rewritten is None or info.identity is None or offsets.streams.get(stream) != rewritten.identity:
        return None
    ended = {f"{stream}.{p}": offset for p, offset in enumerate(rewritten.ended)}
    mine = {ssp: offset for ssp, offset in state.checkpoint.items() if is_of(ssp, stream)}
    if mine != ended or waiting_in(state, stream):
        return None
    now = {f"{stream}.{p}": offset for p, offset in enumerate(rewritten.went_on)}

    def spread(epochs: dict[str, int]) -> dict[str, int]:
        highest = max((epoch for ssp, epoch in epochs.items() if is_of(ssp, stream)), default=0)
        others = {ssp: epoch for ssp, epoch in epochs.items() if not is_of(ssp, stream)}
        return others | (dict.fromkeys(now, highest) if highest else {})

    update = {
        "streams": {**offsets.streams, stream: info.identity},
        "applied": {ssp: each for ssp, each in offsets.applied.items() if not is_of(ssp, stream)},
        "epochs": spread(offsets.epochs),
        "opened": spread(offsets.opened),
    }
    others = {ssp: offset for ssp, offset in state.checkpoint.items() if not is_of(ssp, stream)}
    return state.model_copy(update={"checkpoint": others | now, "offsets": offsets.model_copy(update=update)})


def carried_note(stream: str, info: StreamInfo) -> str:
    """Return what the history says of it."""
    return f"{stream} was repartitioned into {info.partitions}: goes on where it had read to"


def waiting_in(state: ApplicationState, stream: str) -> bool:
    """Whether a startpoint that is resolved, or a replay under way, stands on the partitions of the stream."""
    replays = (replay.ssp for replay in state.offsets.replays.values())
    return any(is_of(ssp, stream) for ssp in (*state.offsets.resolved, *replays))


def is_of(ssp: str, stream: str) -> bool:
    """Whether a partition is one of this stream."""
    return SystemStreamPartition.parse(ssp).qualified_stream == stream
