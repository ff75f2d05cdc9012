"""The start of a run: every input partition gets a position, and every startpoint that waits at a task its offset.

In this order:

    checkpoint       the next offset to read, as the last commit of offsets left it
    reset streams    forget theirs
    startpoints      what was asked for and fanned out: resolved once, stored before anything is read
    defaults         the input's own setting, the stream's, the system's, else upcoming

A checkpoint counts only for the stream that it was made of, and only within what that still holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.stored_positions import replay_id
from dagster_adjunct.orchestration.startpoints.positions.first_positions import first_positions
from dagster_adjunct.orchestration.startpoints.positions.refused_positions import check_same_streams
from dagster_adjunct.orchestration.startpoints.positions.repartitioned_positions import carry_over_all
from dagster_adjunct.orchestration.startpoints.requests.fan_out_in_words import (
    gone_in_words,
    left_alone_in_words,
    left_in_words,
)
from dagster_adjunct.orchestration.startpoints.resolving.resolve_handed import resolve_handed

if TYPE_CHECKING:
    from datetime import datetime

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import StreamSnapshot
    from dagster_adjunct.orchestration.startpoints.requests.fan_out import FanOut
    from dagster_adjunct.orchestration.startpoints.resolving.resolve_request import Plans
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class Start:
    """What the start of a run decided; its `state` is to be stored before anything is read.

    `done` names what is still fanned out and was taken in by an earlier commit, or will be by that of this start, by
    task and partition: it is to be removed after that. `carried` says of streams that were repartitioned that the
    checkpoint is of them now. Partitions that are `held` are not read in this run: something was handed out for them
    that can't be read. `told` says in words what was found and what is left, a line each.
    """

    state: ApplicationState
    done: Mapping[str, Mapping[SystemStreamPartition, str]]
    carried: tuple[str, ...]
    held: frozenset[SystemStreamPartition]
    told: tuple[str, ...]


def start_of_run(
    app: Application,
    streams: Mapping[str, StreamSnapshot],
    tasks: Iterable[str],
    fan_out: FanOut,
    state: ApplicationState,
    now: datetime,
    plans: Plans | None = None,
) -> Start:
    """Resolve what was fanned out to these tasks and has no offset yet, and give every partition a position.

    Only times are asked for: all else is decided over the inputs as they were looked at. `plans` are those that
    requests for recorded versions name. Raises OffsetOutOfRangeError and ConfigurationError for a startpoint that
    can't be resolved (it is not consumed), for a stream that was made anew, and for new partitions of one whose key
    chooses the partition; VersionDiscardedError where what a replay is to meet again is gone.
    """
    state, carried = carry_over_all(state, streams)
    known = state.offsets
    resolved = resolve_handed(app, streams, tasks, fan_out, known, plans or {}, now)
    reset = {source.stream for source in app.inputs.values() if source.reset_offset}
    check_same_streams(app, streams, known, resolved.startpoints, reset)
    checkpoint = state.checkpoint | first_positions(app, streams, state, resolved.startpoints)

    still_there = {replay_id(ssp, request) for ids in resolved.done.values() for ssp, request in ids.items()}
    offsets = known.model_copy(
        update={
            "resolved": dict(resolved.startpoints),
            "begun": known.begun & still_there if app.startpoints else known.begun,
            "streams": {name: identity for name, stream in streams.items() if (identity := stream.info.identity)},
        }
    ).with_replays(resolved.replays)
    made_anew = [name for name, stream in streams.items() if stream.info.is_another(known.streams.get(name))]
    times = state.times.without(made_anew)
    paused = [
        f"{replay.ssp}: startpoints are switched off: the replay from {replay.position} stays at offset "
        f"{replay.next} ({replay.by}: {replay.reason})"
        for replay in (() if app.startpoints else offsets.replays.values())
    ]
    return Start(
        state=state.model_copy(update={"checkpoint": checkpoint, "offsets": offsets, "times": times}),
        done=resolved.done,
        carried=carried,
        held=frozenset(ssp for task in tasks for ssp in fan_out.held.get(task, ())),
        told=(
            *resolved.told,
            *carried,
            *left_alone_in_words(fan_out),
            *paused,
            *gone_in_words(fan_out),
            *left_in_words(fan_out),
        ),
    )
