"""Resolves the startpoints that a run's tasks were handed: each gets its offset once, from the streams as of now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import OffsetState, Replay, ResolvedStartpoint, replay_id
from dagster_adjunct.orchestration.operators.stream_facts import RECORDED, JoinVersions
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.startpoints.positions import StreamSnapshot, offset_error
from dagster_adjunct.orchestration.startpoints.request import (
    StartpointRequest,
    broadcast_task_error,
    choose_versions,
    is_broadcast,
)
from dagster_adjunct.resources.errors import ConfigurationError, PermanentError
from dagster_adjunct.resources.streams.startpoint import describe_startpoint, resolve_startpoint_to_offset
from dagster_adjunct.resources.streams.system import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.startpoints.recorded_replay import RecordedPlan

if TYPE_CHECKING:
    # By id; an error instead of a plan that can't be used any more.
    Plans = Mapping[str, RecordedPlan | PermanentError]


def resolve_request(
    stream: StreamSnapshot,
    request: StartpointRequest,
    *,
    versions: JoinVersions,
    now: datetime,
    epoch: int = 0,
    plans: Plans | None = None,
) -> ResolvedStartpoint | Replay:
    """Return the request with its start offset as of `now`; a bounded one as a replay, which opens this epoch.

    A replay is joined with these `versions`; one of recorded versions gets its offsets from its plan (without `plans`,
    in a preview, from the stream). Start and end of a replay are equal if there are no records in between. Raises the
    errors of `resolve_startpoint_to_offset`, OffsetOutOfRangeError for an end before the start, and the error of a
    plan.
    """
    ssp, system = request.ssp, stream.system
    plan = None if plans is None or versions != RECORDED else _find_plan(stream, request, plans)
    position = describe_startpoint(request.startpoint)
    start = resolve_startpoint_to_offset(system, ssp, request.startpoint) if plan is None else plan.spans[ssp].start
    if request.until is None:
        return ResolvedStartpoint(
            id=request.id,
            ssp=ssp,
            stream=stream.info.identity,
            position=position,
            offset=start,
            by=request.by,
            reason=request.reason,
            resolved_at=now,
        )
    end = resolve_startpoint_to_offset(system, ssp, request.until) if plan is None else plan.spans[ssp].end
    order = system.compare(start, end)
    if order > 0:
        raise offset_error(
            ssp,
            f"{ssp}: a replay from {position} (offset {start}) until "
            f"{describe_startpoint(request.until)} (offset {end}) would end before it begins.",
            "Choose an end after the start.",
            offset=start,
        )
    return Replay(
        id=replay_id(ssp, request.id),
        ssp=ssp,
        stream=stream.info.identity,
        epoch=epoch,
        position=position,
        start=start,
        next=start,
        # The same text as the start, by which an empty replay is recognized.
        until=start if order == 0 else end,
        by=request.by,
        reason=request.reason,
        began_at=now,
        versions=versions,
        recorded=None if plan is None else plan.id,
    )


def _find_plan(stream: StreamSnapshot, request: StartpointRequest, plans: Plans) -> RecordedPlan:
    """Return the plan of a request for recorded versions, which has the offsets of its partition."""
    ssp, plan = request.ssp, plans.get(request.recorded or "")
    if isinstance(plan, PermanentError):
        raise plan
    if plan is None or ssp not in plan.spans or request.until is None:
        raise ConfigurationError(
            f"the request for {ssp} has no plan of recorded versions: it was written without one.",
            "Request it with Startpoints(…).request(…), the command or the job, which write the plan.",
            argument="versions",
        )
    if stream.info.was_recreated(plan.streams.get(ssp.qualified_stream)):
        raise offset_error(
            ssp,
            f"{ssp} is of a recreated stream; the recorded versions were requested for the former one.",
            "Request a replay with versions=as-of or current.",
        )
    return plan


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A startpoint without an offset, whose partition continues from its checkpoint, as the request says."""

    request: StartpointRequest
    error: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """Where a run's tasks start: `startpoints` by partition, and the `replays` that begin.

    `done` names, by task and partition, what is still fanned out and was applied by an earlier commit, or will be by
    the commit that stores this. `messages` describe what was resolved now, and what has no offset.
    """

    startpoints: Mapping[SystemStreamPartition, ResolvedStartpoint]
    replays: tuple[Replay, ...]
    done: Mapping[str, Mapping[SystemStreamPartition, str]]
    messages: tuple[str, ...]


def resolve_handed(
    app: Application,
    streams: Mapping[str, StreamSnapshot],
    tasks: Iterable[str],
    fan_out: FanOut,
    known: OffsetState,
    plans: Plans,
    now: datetime,
) -> Resolved:
    """Return the offsets of what these tasks were handed; each is looked up once, in its stream.

    Replays of recorded versions get theirs from `plans`, which has an error for a plan that can't be used. What an
    earlier start resolved, and no batch has applied, stays. Raises for a request without an offset, unless it continues
    from the checkpoint.
    """
    waiting, alone, done = _sort_requests(app, tasks, fan_out, known)
    newest: dict[SystemStreamPartition, StartpointRequest] = {}
    for _, request in waiting:  # all tasks that read a broadcast input are handed the same
        if request.sequence > newest.setdefault(request.ssp, request).sequence:
            newest[request.ssp] = request
    unresolved: list[Unresolved] = []
    for request in alone:
        if request.on_unresolved == "fail":
            raise broadcast_task_error(request)
        unresolved.append(Unresolved(request, str(broadcast_task_error(request))))
    startpoints: dict[SystemStreamPartition, ResolvedStartpoint] = {}
    replays: dict[SystemStreamPartition, Replay] = {}
    messages: list[str] = []
    for ssp, request in sorted(newest.items()):
        stream, before = streams[ssp.qualified_stream], known.resolved.get(ssp)
        if before is not None and before.id == request.id and before.stream == stream.info.identity:
            startpoints[ssp] = before
            continue
        start = _resolve_or_skip(app, stream, request, plans, now, known.next_epoch(ssp))
        if isinstance(start, Unresolved):
            unresolved.append(start)
            continue
        if isinstance(start, Replay):
            replays[ssp], offset = start, start.start
        else:
            startpoints[ssp], offset = start, start.offset
        messages.append(f"{ssp}: starts at {start.position}, which is offset {offset} ({start.by}: {start.reason})")
    for without in unresolved:
        asked = without.request
        messages.append(f"{asked.ssp}: continues from its checkpoint ({asked.by}: {asked.reason}): {without.error}")
    # Done too: requests that were replaced by a newer one, and those of the replays that begin.
    for task, request in waiting:
        if request.ssp in replays or request.sequence < newest[request.ssp].sequence:
            done.setdefault(task, {})[request.ssp] = request.id
    return Resolved(startpoints, tuple(replays.values()), done, tuple(messages))


def _sort_requests(
    app: Application, tasks: Iterable[str], fan_out: FanOut, known: OffsetState
) -> tuple[list[tuple[str, StartpointRequest]], list[StartpointRequest], dict[str, dict[SystemStreamPartition, str]]]:
    """Return what these tasks were handed: what can be applied, what is for one task of a broadcast input, and what a
    commit has applied.
    """
    waiting: list[tuple[str, StartpointRequest]] = []
    alone: list[StartpointRequest] = []
    done: dict[str, dict[SystemStreamPartition, str]] = {}
    for task in tasks:
        for ssp, request in fan_out.tasks.get(task, {}).items():
            if known.has_taken(ssp, request.id):
                done.setdefault(task, {})[ssp] = request.id
            elif request.task is not None and is_broadcast(app, ssp):
                alone.append(request)
            else:
                waiting.append((task, request))
    return waiting, alone, done


def _resolve_or_skip(
    app: Application, stream: StreamSnapshot, request: StartpointRequest, plans: Plans, now: datetime, epoch: int
) -> ResolvedStartpoint | Replay | Unresolved:
    """Return the request with its offset, or Unresolved; raise an error that names the requester if it says to fail."""
    try:
        versions = choose_versions(app, request)
        return resolve_request(stream, request, versions=versions, now=now, epoch=epoch, plans=plans)
    except PermanentError as error:
        if request.on_unresolved != "fail":
            return Unresolved(request, str(error))
        what = "can't be applied" if request.versions is not None else "has no offset"
        raise error.reworded(
            f"the startpoint of {request.by} ({request.reason}) at {request.ssp} {what}: {error.problem}",
            f"{error.next_step} Or take it back: adjunct startpoint clear MODULE:APP {request.ssp} --reason …. With "
            "--on-unresolved checkpoint it would have continued from the checkpoint.",
        ) from error
