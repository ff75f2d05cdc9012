"""What one request for startpoints would do to an input, before it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.batchlog.stored_positions import Replay
from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
from dagster_adjunct.orchestration.startpoints.resolving.resolve_request import resolve_request
from dagster_adjunct.resources.errors import PermanentError
from dagster_adjunct.resources.streams.interface.startpoint import describe_startpoint

if TYPE_CHECKING:
    from datetime import datetime

    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.operators.spec.versions_met import VersionsMet
    from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import StreamSnapshot
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


def _goes_on_at(state: ApplicationState, ssp: SystemStreamPartition) -> str | None:
    """Return where reading goes on without a request: a batch that is open is ended before any request is followed."""
    batch = state.open
    if batch is not None and not batch.replays and ssp in batch.ranges:
        return batch.ranges[ssp].end
    return state.checkpoint.get(ssp)


def preview_request(
    look: Callable[[str], StreamSnapshot],
    state: ApplicationState | None,
    request: StartpointRequest,
    tasks: tuple[str, ...],
    versions: VersionsMet,
    now: datetime,
) -> Preview:
    """Return what a request would do to an input; without a `state`, what can be said of one for datasets so far.

    Of recorded `versions` it says what it does of others: which batches met them is looked for in the next place.
    """
    ssp = request.ssp
    if state is None and request.until is not None:
        return Preview(
            request,
            tasks,
            error=f"{ssp} is read by {', '.join(tasks)}, and a table has no replay beside it: it is what its stream "
            "says up to where it has read. Leave the end (until) out.",
        )
    checkpoint = None if state is None else _goes_on_at(state, ssp)
    try:
        stream = look(ssp.qualified_stream)
        start = resolve_request(stream, request, versions=versions, now=now)
    except PermanentError as error:
        falls_back = request.on_unresolved == "checkpoint"
        return Preview(request, tasks, checkpoint, error=str(error), falls_back=falls_back)
    distance = partial(stream.system.distance, ssp)
    if isinstance(start, Replay):
        return Preview(request, tasks, checkpoint, start.start, start.until, distance(start.start, start.until))
    if state is None:
        return Preview(request, tasks, start=start.offset)
    end = stream.upcoming[ssp]
    moved = None
    # Of a stream that was made anew, the checkpoint is in the one before.
    if checkpoint is not None and not stream.info.is_another(state.offsets.streams.get(stream.name)):
        moved = distance(checkpoint, start.offset) - distance(start.offset, checkpoint)
    return Preview(request, tasks, checkpoint, start.offset, end, distance(start.offset, end), moved)
