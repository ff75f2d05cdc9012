"""What requests for startpoints would do to inputs, before they are written: where each starts, how much it reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.batchlog.stored_positions import Replay
from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
from dagster_adjunct.orchestration.startpoints.resolving.resolve_request import resolve_request
from dagster_adjunct.resources.errors import PermanentError
from dagster_adjunct.resources.streams.interface.startpoint import describe_startpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.operators.spec.versions_met import VersionsMet
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import StreamSnapshot
    from dagster_adjunct.orchestration.startpoints.requests.allowed_requests import AllowedRequest
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class Preview:
    """What one request would do if a run started now.

    `tasks` are those that it is for: of the plan, or `dataset NAME`. It reads `offsets` offsets, from `start` up to
    `end`: that of the bounded replay, else the stream's end as it is now. `checkpoint` is where reading would go on
    without it, once a batch that is open has ended, and `moved` by how many offsets it moves that, below 0 for
    backwards; None for a replay, which moves nothing, and where there is nothing to compare. With an `error` it can't
    be followed: the run would fail, unless the request says to go on from the checkpoint then (`falls_back`).
    `versions` are those that a replay meets; None where it is none.
    """

    request: StartpointRequest
    tasks: tuple[str, ...]
    checkpoint: str | None = None
    start: str | None = None
    end: str | None = None
    offsets: int | None = None
    moved: int | None = None
    error: str | None = None
    falls_back: bool = False
    versions: VersionsMet | None = None

    @property
    def move(self) -> str:
        """What happens to the position, in a few words; where it can't be followed, why."""
        if self.error is not None:
            return f"goes on from its checkpoint: {self.error}" if self.falls_back else self.error
        if self.request.until is not None:
            return "the position stays"
        if self.moved is None:
            return "begins here"
        if self.moved == 0:
            return "stays where it is"
        return f"goes back by {-self.moved:,}" if self.moved < 0 else f"passes over {self.moved:,}"

    @property
    def effect(self) -> str:
        """The same as a sentence, with how many offsets there are to read."""
        if self.error is not None:
            return self.move
        again = "" if self.request.until is None else " again"
        return f"{self.offsets:,} offsets to read{again}: {self.move}"

    def to_json(self) -> dict[str, Any]:
        """Return the preview as JSON-able values."""
        asked, until = self.request, self.request.until
        names = ("checkpoint", "start", "end", "offsets", "moved", "error", "falls_back", "effect", "versions")
        return {
            "partition": str(asked.ssp),
            "tasks": list(self.tasks),
            "position": describe_startpoint(asked.startpoint),
            "until": None if until is None else describe_startpoint(until),
            **{name: getattr(self, name) for name in names},
        }


def preview_requests(
    look: Callable[[str], StreamSnapshot],
    state: ApplicationState,
    requests: Sequence[AllowedRequest],
    now: datetime,
) -> list[Preview]:
    """Return what each of these requests would do from this state; what can't be followed has an `error`.

    Of one for datasets, it is what can be said before their tables are looked at.
    """
    return [_preview(look, state, asked, now) for asked in requests]


def _preview(
    look: Callable[[str], StreamSnapshot], state: ApplicationState, asked: AllowedRequest, now: datetime
) -> Preview:
    """Return what a request would do.

    Of recorded `versions` it says what it does of others: which batches met them is looked for in the next place.
    """
    request, ssp = asked.request, asked.request.ssp
    shown = Preview(request, asked.tasks, versions=None if request.until is None else asked.versions)
    if asked.refusal:
        return replace(shown, error=asked.refusal)
    if not asked.rewinds:
        shown = replace(shown, checkpoint=_goes_on_at(state, ssp))
    try:
        stream = look(ssp.qualified_stream)
        start = resolve_request(stream, request, versions=asked.versions, now=now)
    except PermanentError as error:
        return replace(shown, error=str(error), falls_back=request.on_unresolved == "checkpoint")
    if isinstance(start, Replay):
        offsets = stream.system.distance(ssp, start.start, start.until)
        return replace(shown, start=start.start, end=start.until, offsets=offsets)
    return replace(shown, start=start.offset) if asked.rewinds else _moved(shown, state, stream, start.offset)


def _moved(shown: Preview, state: ApplicationState, stream: StreamSnapshot, start: str) -> Preview:
    """Return the preview of a request that moves the position to this offset of its stream."""
    ssp, checkpoint = shown.request.ssp, shown.checkpoint
    distance, end = partial(stream.system.distance, ssp), stream.upcoming[ssp]
    moved = None
    # Of a stream that was made anew, the checkpoint is in the one before.
    if checkpoint is not None and not stream.info.is_another(state.offsets.streams.get(stream.name)):
        moved = distance(checkpoint, start) - distance(start, checkpoint)
    return replace(shown, start=start, end=end, offsets=distance(start, end), moved=moved)


def _goes_on_at(state: ApplicationState, ssp: SystemStreamPartition) -> str | None:
    """Return where reading goes on without a request: a batch that is open is ended before any request is followed."""
    batch = state.open
    if batch is not None and not batch.replays and ssp in batch.ranges:
        return batch.ranges[ssp].end
    return state.checkpoint.get(ssp)


def remote_tables(plan: ExecutionPlan | None, requests: Sequence[StartpointRequest]) -> dict[str, str]:
    """Return what becomes of the remote tables that are made of what is read again."""
    streams = {request.ssp.qualified_stream for request in requests}
    told: dict[str, str] = {}
    for table in () if plan is None else plan.tables:
        if streams & set(table.streams):
            before = told.get(table.table)
            told[table.table] = table.replay if before in (None, table.replay) else f"{before}; and {table.replay}"
    return told


def what_keeps_state(app: Application) -> tuple[str, ...]:
    """Return in words what the application's stateful operators do with records that are read again, a line each."""
    return tuple(
        f"{operator.id} keeps state: records that the application has read before are left out there, and counted "
        "(again)"
        for operator in app.operators
        if operator.spec.states
    )
