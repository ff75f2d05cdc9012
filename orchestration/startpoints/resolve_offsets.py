"""Resolves requests: finds the offset at which each starts, once, from its streams as they are now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.stored_positions import Replay, ResolvedStartpoint, replay_id
from dagster_adjunct.orchestration.operators.versions_met import RECORDED
from dagster_adjunct.orchestration.startpoints.versions_of_replays import check_versions, default_versions
from dagster_adjunct.resources.errors import ConfigurationError, OffsetOutOfRangeError, PermanentError
from dagster_adjunct.resources.streams.interface.startpoint import (
    describe_startpoint,
    resolve_startpoint_to_offset,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.stored_positions import OffsetState
    from dagster_adjunct.orchestration.startpoints.handed_requests import HandedRequests
    from dagster_adjunct.orchestration.startpoints.recorded_plan import RecordedPlan
    from dagster_adjunct.orchestration.startpoints.startpoint_request import StartpointRequest
    from dagster_adjunct.orchestration.startpoints.stream_snapshots import StreamSnapshot
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

    # By their ids; instead of one that can't be followed any more, why.
    Plans = Mapping[str, RecordedPlan | PermanentError]


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A startpoint that has no offset, whose partition goes on from its checkpoint, as its request says."""

    request: StartpointRequest
    error: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """Where a run's tasks start: `startpoints` by partition, and the `replays` that begin.

    `told` says in words what was looked up just now, and what has no offset and is gone on without.
    """

    startpoints: Mapping[SystemStreamPartition, ResolvedStartpoint]
    replays: tuple[Replay, ...]
    told: tuple[str, ...]


def resolve_request(
    stream: StreamSnapshot, request: StartpointRequest, *, now: datetime, epoch: int = 0
) -> ResolvedStartpoint | Replay:
    """Return the request with the offset at which it starts `now`; a bounded one as a replay, which opens this epoch.

    Start and end of a replay are one offset where the partition has no records in between. Raises what
    `resolve_startpoint_to_offset` does, and OffsetOutOfRangeError for an end that lies before the start.
    """
    ssp = request.ssp
    system, identity = stream.system, stream.info.identity
    start = resolve_startpoint_to_offset(system, ssp, request.startpoint)
    position = describe_startpoint(request.startpoint)
    if request.until is None:
        return ResolvedStartpoint(
            id=request.id,
            ssp=ssp,
            stream=identity,
            position=position,
            offset=start,
            by=request.by,
            reason=request.reason,
            resolved_at=now,
        )
    end = resolve_startpoint_to_offset(system, ssp, request.until)
    order = system.compare(start, end)
    if order > 0:
        raise OffsetOutOfRangeError(
            f"{ssp}: a replay from {position} (offset {start}) until "
            f"{describe_startpoint(request.until)} (offset {end}) would end before it begins.",
            "Choose an end that lies after the start.",
            stream=ssp.qualified_stream,
            partition=ssp.partition,
            offset=start,
        )
    return Replay(
        id=replay_id(ssp, request.id),
        ssp=ssp,
        stream=identity,
        epoch=epoch,
        position=position,
        start=start,
        next=start,
        # In one way of writing: whether there is anything in between is told by comparing them.
        until=start if order == 0 else end,
        by=request.by,
        reason=request.reason,
        began_at=now,
        versions=request.versions,
    )


def resolve_handed(
    app: Application,
    streams: Mapping[str, StreamSnapshot],
    known: OffsetState,
    handed: HandedRequests,
    plans: Plans,
    now: datetime,
) -> Resolved:
    """Return the offsets of what a run's tasks were handed: each is looked up once, in the stream that it is of.

    A replay of recorded versions has those of its plan. What `plans` holds instead of one is why it can't be followed.

    What an earlier start has found, and no batch has applied, stands. Raises for a request that has no offset, unless
    it says to go on without.
    """
    unresolved: list[Unresolved] = []
    for request, refusal in handed.alone:
        if request.on_unresolved == "fail":
            raise refusal
        unresolved.append(Unresolved(request, str(refusal)))
    startpoints: dict[SystemStreamPartition, ResolvedStartpoint] = {}
    replays: list[Replay] = []
    told: list[str] = []
    for ssp, request in sorted(handed.newest.items()):
        stream, before = streams[ssp.qualified_stream], known.resolved.get(ssp)
        if before is not None and before.id == request.id and before.stream == stream.info.identity:
            startpoints[ssp] = before
            continue
        start = _look_up(app, stream, request, plans, now, known.next_epoch(ssp))
        if isinstance(start, Unresolved):
            unresolved.append(start)
            continue
        if isinstance(start, Replay):
            replays.append(start)
        else:
            startpoints[ssp] = start
        offset = start.start if isinstance(start, Replay) else start.offset
        told.append(f"{ssp}: to start at {start.position}, found at offset {offset} ({start.by}: {start.reason})")
    for without in unresolved:
        asked = without.request
        told.append(f"{asked.ssp}: goes on from its checkpoint ({asked.by}: {asked.reason}): {without.error}")
    return Resolved(startpoints, tuple(replays), tuple(told))


def _look_up(
    app: Application, stream: StreamSnapshot, request: StartpointRequest, plans: Plans, now: datetime, epoch: int
) -> ResolvedStartpoint | Replay | Unresolved:
    """Return the request with its offset. Raises, naming who asked, where it has none and does not go on without."""
    try:
        check_versions(app, request)
        if request.versions == RECORDED:
            return _as_planned(stream, request, plans, now, epoch)
        start = resolve_request(stream, request, now=now, epoch=epoch)
        default = default_versions(app)
        return start.model_copy(update={"versions": start.versions or default}) if isinstance(start, Replay) else start
    except PermanentError as error:
        if request.on_unresolved != "fail":
            return Unresolved(request, str(error))
        what = "can't be followed" if request.versions is not None else "has no offset"
        raise error.reworded(
            f"the startpoint of {request.by} ({request.reason}) at {request.ssp} {what}: {error.problem}",
            f"{error.next_step} Or take it back: adjunct startpoint clear MODULE:APP {request.ssp} --reason …. With "
            "--on-unresolved checkpoint it would have gone on from the checkpoint.",
        ) from error


def _as_planned(stream: StreamSnapshot, request: StartpointRequest, plans: Plans, now: datetime, epoch: int) -> Replay:
    """Return the replay of recorded versions as its plan has it: what it holds was found when it was asked for."""
    ssp, plan = request.ssp, plans.get(request.recorded or "")
    if isinstance(plan, PermanentError):
        raise plan
    if plan is None or ssp not in plan.spans or request.until is None:
        raise ConfigurationError(
            f"the request for {ssp} holds no recorded versions: it was written without looking for them.",
            "Ask for it by Startpoints(…).request(…), by the command or by the job.",
            argument="versions",
        )
    if stream.info.is_another(plan.streams.get(ssp.qualified_stream)):
        raise OffsetOutOfRangeError(
            f"{ssp} is of another stream than the one of which recorded versions were asked for.",
            "What batches met is known for the stream before only.",
            stream=ssp.qualified_stream,
            partition=ssp.partition,
        )
    span = plan.spans[ssp]
    order = stream.system.compare(span.start, span.end)
    return Replay(
        id=replay_id(ssp, request.id),
        ssp=ssp,
        stream=stream.info.identity,
        epoch=epoch,
        position=describe_startpoint(request.startpoint),
        start=span.start,
        next=span.start,
        until=span.end if order else span.start,
        by=request.by,
        reason=request.reason,
        began_at=now,
        versions=RECORDED,
        recorded=plan.id,
    )
