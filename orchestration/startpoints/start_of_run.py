"""The start of a run: every input partition gets a position, and every startpoint that waits at a task its offset.

In this order:

    checkpoint       the next offset to read, as the last commit of offsets left it
    reset streams    forget theirs
    startpoints      what was asked for and fanned out: resolved once, stored before anything is read
    defaults         the input's own setting, the stream's, the system's, else upcoming

A checkpoint counts only for the stream that it was made of, and only within what that still holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.positions import Replay, replay_id
from dagster_adjunct.orchestration.startpoints.made_anew import check_all_resolved
from dagster_adjunct.orchestration.startpoints.repartitioned import carried_note, carried_over
from dagster_adjunct.orchestration.startpoints.resolving import (
    Unresolved,
    is_broadcast,
    one_task_of_all,
    resolve_request,
    without_offset,
)
from dagster_adjunct.orchestration.startpoints.stream_snapshots import (
    StreamSnapshots,
    default_offset,
    edge_offsets,
)
from dagster_adjunct.resources.errors import ConfigurationError, PermanentError
from dagster_adjunct.resources.streams.interface.startpoint import describe_startpoint

if TYPE_CHECKING:
    from datetime import datetime

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.log import ApplicationState
    from dagster_adjunct.orchestration.batchlog.positions import OffsetState, ResolvedStartpoint
    from dagster_adjunct.orchestration.operators.input import Input
    from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
    from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
    from dagster_adjunct.resources.streams.interface.ssp import SystemStreamPartition
    from dagster_adjunct.resources.streams.interface.system import StreamInfo, StreamSystem


@dataclass(frozen=True, slots=True)
class Start:
    """What the start of a run decided; its `state` is to be stored before anything is read.

    `resolved` are the startpoints whose offsets were found now, and `unresolved` those that have none and are gone on
    without. `done` names what is still fanned out and was taken in by an earlier commit, or will be by that of this
    start, by task and partition: it is to be removed after that. `paused` are replays that stay where they are, since
    startpoints are switched off. `carried` says of streams that were repartitioned that the checkpoint is of them now.
    Partitions that are `held` are not read in this run: something was handed out for them that can't be read.
    """

    state: ApplicationState
    fan_out: FanOut
    resolved: tuple[ResolvedStartpoint | Replay, ...]
    unresolved: tuple[Unresolved, ...]
    done: Mapping[str, Mapping[SystemStreamPartition, str]]
    paused: tuple[Replay, ...]
    carried: tuple[str, ...]
    held: frozenset[SystemStreamPartition]

    def texts(self) -> list[str]:
        """Return in words what was found, a line each."""
        lines = [
            f"{start.ssp}: to start at {start.position}, found at offset {_first_offset(start)} "
            f"({start.by}: {start.reason})"
            for start in self.resolved
        ]
        lines += [
            f"{each.request.ssp}: goes on from its checkpoint ({each.request.by}: {each.request.reason}): {each.error}"
            for each in self.unresolved
        ]
        lines += self.carried
        lines += [
            f"{request.ssp}: startpoints are switched off: {describe_startpoint(request.startpoint)} is left alone "
            f"({request.by}: {request.reason})"
            for request in self.fan_out.left_alone
        ]
        lines += [
            f"{replay.ssp}: startpoints are switched off: the replay from {replay.position} stays at offset "
            f"{replay.next} ({replay.by}: {replay.reason})"
            for replay in self.paused
        ]
        return [*lines, *self.fan_out.gone(), *self.fan_out.left()]


def start_of_run(
    systems: Mapping[str, StreamSystem],
    app: Application,
    tasks: Mapping[str, frozenset[SystemStreamPartition]],
    fan_out: FanOut,
    state: ApplicationState,
    now: datetime,
) -> Start:
    """Resolve what was fanned out to these tasks and has no offset yet, and give every partition a position.

    Raises OffsetOutOfRangeError and ConfigurationError for a startpoint that can't be resolved (it is not consumed),
    for a stream that was made anew, and for new partitions of one whose key chooses the partition.
    """
    streams = StreamSnapshots(systems)
    carried: list[str] = []
    for name in app.inputs:
        moved = carried_over(state, name, streams.info(name))
        if moved is not None:
            state = moved
            carried.append(carried_note(name, streams.info(name)))
    known = state.offsets
    handed = [(task, request) for task in tasks for request in fan_out.tasks.get(task, {}).values()]
    waiting = [request for _, request in handed if not known.has_taken(request.ssp, request.id)]
    alone = [request for request in waiting if _is_for_one_of_all(app, request)]
    requests = _newest([request for request in waiting if not _is_for_one_of_all(app, request)])
    kept = {
        ssp: start
        for ssp, start in known.resolved.items()
        if ssp in requests and requests[ssp].id == start.id and streams.identity(ssp) == start.stream
    }
    to_resolve = [requests[ssp] for ssp in sorted(requests) if ssp not in kept]
    resolved, unresolved = _resolved(streams, known, alone, to_resolve, now)
    replays = [start for start in resolved if isinstance(start, Replay)]
    begun = {replay.ssp for replay in replays}
    done: dict[str, dict[SystemStreamPartition, str]] = {}
    for task, request in handed:
        ssp = request.ssp
        if known.has_taken(ssp, request.id):
            over = True
        else:
            newest = requests.get(ssp, request)
            over = not _is_for_one_of_all(app, request) and (ssp in begun or request.sequence < newest.sequence)
        if over:
            done.setdefault(task, {})[ssp] = request.id
    still_there = {replay_id(ssp, each) for ids in done.values() for ssp, each in ids.items()}
    offsets = known.model_copy(
        update={
            "resolved": kept | {start.ssp: start for start in resolved if not isinstance(start, Replay)},
            "begun": known.begun & still_there if app.startpoints else known.begun,
            "streams": {name: identity for name in app.inputs if (identity := streams.info(name).identity)},
        }
    ).with_replays(replays)
    checkpoint = dict(state.checkpoint)
    for source in app.inputs.values():
        checkpoint |= _checkpoint(app, source, streams, state, offsets)
    return Start(
        state=state.model_copy(update={"checkpoint": checkpoint, "offsets": offsets}),
        fan_out=fan_out,
        resolved=tuple(resolved),
        unresolved=tuple(unresolved),
        done=done,
        paused=() if app.startpoints else tuple(offsets.replays.values()),
        carried=tuple(carried),
        held=frozenset(ssp for task in tasks for ssp in fan_out.held.get(task, ())),
    )


def _is_for_one_of_all(app: Application, request: StartpointRequest) -> bool:
    """Whether a request is for one task alone where all tasks read the partition, and so can't be followed."""
    return request.task is not None and is_broadcast(app, request.ssp)


def _newest(requests: Sequence[StartpointRequest]) -> dict[SystemStreamPartition, StartpointRequest]:
    """Return the request that counts for each partition: of a broadcast input, all tasks are handed the same."""
    newest: dict[SystemStreamPartition, StartpointRequest] = {}
    for request in requests:
        if request.sequence > newest.setdefault(request.ssp, request).sequence:
            newest[request.ssp] = request
    return newest


def _resolved(
    streams: StreamSnapshots,
    known: OffsetState,
    alone: Sequence[StartpointRequest],
    requests: Sequence[StartpointRequest],
    now: datetime,
) -> tuple[list[ResolvedStartpoint | Replay], list[Unresolved]]:
    """Return these requests with their offsets, and those that have none and say to go on without."""
    resolved: list[ResolvedStartpoint | Replay] = []
    unresolved: list[Unresolved] = []
    for request in alone:
        refusal = one_task_of_all(request)
        if request.on_unresolved == "fail":
            raise refusal
        unresolved.append(Unresolved(request, str(refusal)))
    for request in requests:
        try:
            resolved.append(resolve_request(streams, request, now=now, epoch=known.next_epoch(request.ssp)))
        except PermanentError as error:
            unresolved.append(without_offset(request, error))
    return resolved, unresolved


def _checkpoint(
    app: Application, source: Input, streams: StreamSnapshots, state: ApplicationState, offsets: OffsetState
) -> dict[SystemStreamPartition, str]:
    """Return a position for every partition of an input, also for those that have a startpoint to begin at."""
    stream = source.stream
    system, info, ssps = streams.system(stream), streams.info(stream), streams.partitions(stream)
    kept = {ssp: state.checkpoint[ssp] for ssp in ssps if ssp in state.checkpoint}
    if source.reset_offset:
        kept = {}
    elif info.is_another(state.offsets.streams.get(stream)):
        check_all_resolved(app, stream, info, state.offsets.streams[stream], offsets.resolved)
        kept = {ssp: offsets.resolved[ssp].offset for ssp in ssps}
    fresh = [ssp for ssp in ssps if ssp not in kept]
    choice = default_offset(source, info, system)
    if kept and fresh:
        # These came after the others: what they held before anybody looked is new, whatever the default.
        _check_added(app, source, info, [ssp for ssp in fresh if ssp not in offsets.resolved])
        choice = "oldest"
    return {**kept, **edge_offsets(system, choice, fresh)} if fresh else kept


def _check_added(app: Application, source: Input, info: StreamInfo, added: Sequence[SystemStreamPartition]) -> None:
    if info.key and added:
        names = " ".join(map(str, sorted(added)))
        raise ConfigurationError(
            f"{names}: added to {source.stream}, whose key ({', '.join(info.key)}) chooses the partition, since "
            f"application {app.name!r} began to read it: records of one key lie in two partitions now.",
            "Write a startpoint for each to accept that (adjunct startpoint set MODULE:APP "
            f"{names} --oldest --reason …), or read the stream anew from its oldest offset.",
        )


def _first_offset(start: ResolvedStartpoint | Replay) -> str:
    return start.start if isinstance(start, Replay) else start.offset
