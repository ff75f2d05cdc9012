"""Resolves one request: the offset at which it starts, looked up in its stream, or as a recorded plan has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.stored_positions import Replay, ResolvedStartpoint, replay_id
from dagster_adjunct.orchestration.operators.spec.versions_met import RECORDED, VersionsMet
from dagster_adjunct.resources.errors import ConfigurationError, OffsetOutOfRangeError, PermanentError
from dagster_adjunct.resources.streams.interface.startpoint import (
    describe_startpoint,
    resolve_startpoint_to_offset,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import StreamSnapshot
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
    from dagster_adjunct.orchestration.startpoints.resolving.recorded_plan import RecordedPlan

    # By their ids; instead of one that can't be followed any more, why.
    Plans = Mapping[str, RecordedPlan | PermanentError]


def resolve_request(
    stream: StreamSnapshot,
    request: StartpointRequest,
    *,
    versions: VersionsMet,
    now: datetime,
    epoch: int = 0,
    plans: Plans | None = None,
) -> ResolvedStartpoint | Replay:
    """Return the request with the offset at which it starts `now`; a bounded one as a replay, which opens this epoch.

    A replay meets these `versions`; one of recorded versions starts and ends as its plan has it: what it holds was
    found when it was asked for, which is before there are `plans`. Start and end of a replay are one offset where the
    partition has no records in between. Raises what `resolve_startpoint_to_offset` does, OffsetOutOfRangeError for an
    end that lies before the start, and why a plan can't be followed.
    """
    ssp, system = request.ssp, stream.system
    plan = None if plans is None or versions != RECORDED else _plan_of(stream, request, plans)
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
        stream=stream.info.identity,
        epoch=epoch,
        position=position,
        start=start,
        next=start,
        # In one way of writing: whether there is anything in between is told by comparing them.
        until=start if order == 0 else end,
        by=request.by,
        reason=request.reason,
        began_at=now,
        versions=versions,
        recorded=None if plan is None else plan.id,
    )


def _plan_of(stream: StreamSnapshot, request: StartpointRequest, plans: Plans) -> RecordedPlan:
    """Return the plan of a request for recorded versions, which has the offsets of its partition."""
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
    return plan
