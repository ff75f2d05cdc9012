"""Resolves requests: finds the offset at which each starts, once, from its streams as they are now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.stored_positions import Replay, ResolvedStartpoint, replay_id
from dagster_adjunct.resources.errors import ConfigurationError, OffsetOutOfRangeError, PermanentError
from dagster_adjunct.resources.streams.interface.startpoint import (
    describe_startpoint,
    resolve_startpoint_to_offset,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.stored_positions import OffsetState
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.startpoints.startpoint_request import StartpointRequest
    from dagster_adjunct.orchestration.startpoints.stream_snapshots import StreamSnapshot
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A startpoint that has no offset, whose partition goes on from its checkpoint, as its request says."""

    request: StartpointRequest
    error: str


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
    )


def task_partitions(plan: ExecutionPlan) -> dict[str, frozenset[SystemStreamPartition]]:
    """Return the input partitions of each task of a plan, as a fan-out wants them."""
    return {task.name: frozenset(task.ssps) for task in plan.tasks}


def is_broadcast(app: Application, ssp: SystemStreamPartition) -> bool:
    """Whether all tasks of the application read this partition, with one position."""
    source = app.inputs.get(ssp.qualified_stream)
    return source is not None and source.broadcast is not None


def one_task_of_all(request: StartpointRequest) -> ConfigurationError:
    """Return the refusal of a request for one task where all tasks read the partition."""
    return ConfigurationError(
        f"{request.ssp} is of a broadcast input, which all tasks read with one position: {request.task!r} alone can't "
        "start elsewhere.",
        "Ask for it without a task, and all of them start there; what waits is taken back with "
        f"adjunct startpoint clear MODULE:APP {request.ssp} --reason ….",
    )


def is_for_one_of_all(app: Application, request: StartpointRequest) -> bool:
    """Whether a request is for one task alone where all tasks read the partition, and so can't be followed."""
    return request.task is not None and is_broadcast(app, request.ssp)


def newest_of(requests: Sequence[StartpointRequest]) -> dict[SystemStreamPartition, StartpointRequest]:
    """Return the request that counts for each partition: of a broadcast input, all tasks are handed the same."""
    newest: dict[SystemStreamPartition, StartpointRequest] = {}
    for request in requests:
        if request.sequence > newest.setdefault(request.ssp, request).sequence:
            newest[request.ssp] = request
    return newest


def resolve_all(
    streams: Mapping[str, StreamSnapshot],
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
            stream, epoch = streams[request.ssp.qualified_stream], known.next_epoch(request.ssp)
            resolved.append(resolve_request(stream, request, now=now, epoch=epoch))
        except PermanentError as error:
            unresolved.append(_without_offset(request, error))
    return resolved, unresolved


def _without_offset(request: StartpointRequest, error: PermanentError) -> Unresolved:
    """Return the request as one to go on without. Raises the error, said to whom it is, where that is not allowed."""
    if request.on_unresolved != "fail":
        return Unresolved(request, str(error))
    raise error.reworded(
        f"the startpoint of {request.by} ({request.reason}) at {request.ssp} has no offset: {error.problem}",
        f"{error.next_step} Or take it back: adjunct startpoint clear MODULE:APP {request.ssp} --reason …. With "
        "--on-unresolved checkpoint it would have gone on from the checkpoint.",
    ) from error
