"""What is asked for, under way and applied of an application's startpoints, as the commands show it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.batchlog.batch_log import application_state
from dagster_adjunct.orchestration.startpoints.requests.startpoint_manager import startpoints_of
from dagster_adjunct.resources.streams.interface.startpoint import describe_startpoint

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.stored_positions import OffsetState, Replay
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)


def list_startpoints(
    lake: Lake, systems: Mapping[str, StreamSystem], app: Application, now: datetime
) -> dict[str, list[dict[str, Any]]]:
    """Return what is `waiting`, what is `handed` to tasks, the `replays` under way, and what was `applied` last.

    What no run has taken up in time stands in `expired` until the next one deletes it, what can't be read in
    `unreadable`.

    A row each, of JSON-able values. Of a replay, `left` counts the offsets that it has still to read.
    """
    stored, state = startpoints_of(lake, app).read(), application_state(lake, app.name)
    waiting = [
        _asked(request) | {"task": request.task} | _ages(request, now, app.startpoints_expire_after)
        for request in stored.waiting
    ]
    expired = [
        _asked(request) | {"task": request.task} | _ages(request, now, app.startpoints_expire_after)
        for request in stored.expired
    ]
    handed = [
        _asked(request) | {"task": task, "offset": _offset(state.offsets, request)}
        for task, requests in stored.handed.items()
        for request in requests.values()
        if not state.offsets.has_taken(request.ssp, request.id)  # a crash may have left it there
    ]
    applied = [
        {"partition": str(ssp), **start.model_dump(mode="json", exclude={"id"})}
        for ssp, start in sorted(state.offsets.applied.items())
    ]
    replays = [_replay(systems, replay) for replay in state.offsets.replays.values()]
    unreadable = [
        {
            "partition": unread.partition or unread.key,
            "task": unread.task,
            "handed_to": unread.at,
            "error": unread.error,
        }
        for unread in stored.unreadable
    ]
    return {
        "waiting": waiting,
        "expired": expired,
        "handed": handed,
        "replays": replays,
        "applied": applied,
        "unreadable": unreadable,
    }


def _asked(request: StartpointRequest) -> dict[str, Any]:
    return {
        "partition": str(request.ssp),
        "position": describe_startpoint(request.startpoint),
        "until": None if request.until is None else describe_startpoint(request.until),
        "by": request.by,
        "reason": request.reason,
        "on_unresolved": request.on_unresolved,
        "versions": request.versions,
        "id": request.id,
    }


def _ages(request: StartpointRequest, now: datetime, expires_after: timedelta) -> dict[str, str]:
    age_ms = (now - _EPOCH) // _MS - request.startpoint.creation_timestamp_ms
    return {"age": _span(age_ms), "expires_in": _span(expires_after // _MS - age_ms)}


def _offset(offsets: OffsetState, request: StartpointRequest) -> str | None:
    """Return the offset that was found for it and stored; None while no run has started since."""
    start = offsets.resolved.get(request.ssp)
    return start.offset if start is not None and start.id == request.id else None


def _replay(systems: Mapping[str, StreamSystem], replay: Replay) -> dict[str, Any]:
    facts = replay.model_dump(mode="json", exclude={"ssp"}) | {
        "partition": str(replay.ssp),
        "left": None,
        "per_cent": None,
    }
    ssp = replay.ssp
    if ssp.system not in systems:  # the application is declared without it now
        return facts
    left, whole = (systems[ssp.system].distance(ssp, start, replay.until) for start in (replay.next, replay.start))
    return facts | {"left": left, "per_cent": 100 * (whole - left) // max(whole, 1)}


def _span(ms: int) -> str:
    """Return whole seconds in words; counted in numbers, for no date lies so far in the future as this may reach."""
    return str(timedelta(seconds=min(max(ms // 1000, 0), timedelta.max // timedelta(seconds=1))))
