"""Resolves what a run's tasks were handed: each request gets its offset once, from the streams as they are now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.stored_positions import Replay, ResolvedStartpoint
from dagster_adjunct.orchestration.operators.spec.versions_met import RECORDED
from dagster_adjunct.orchestration.startpoints.resolving.resolve_request import as_planned, resolve_request
from dagster_adjunct.orchestration.startpoints.resolving.versions_of_replays import check_versions, default_versions
from dagster_adjunct.resources.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.stored_positions import OffsetState
    from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import StreamSnapshot
    from dagster_adjunct.orchestration.startpoints.requests.handed_requests import HandedRequests
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
    from dagster_adjunct.orchestration.startpoints.resolving.resolve_request import Plans
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


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
            return as_planned(stream, request, plans, now, epoch)
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
