"""What requests for startpoints would do, before they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.unbounded.rewind import plan_rewind
from dagster_adjunct.orchestration.batchlog.stored_positions import Replay
from dagster_adjunct.orchestration.planner.lake_catalog import plan_application
from dagster_adjunct.orchestration.startpoints.dataset_requests import (
    dataset_task,
    dataset_tasks,
    named_only,
    positioned,
)
from dagster_adjunct.orchestration.startpoints.handed_requests import is_broadcast, one_task_of_all
from dagster_adjunct.orchestration.startpoints.resolve_offsets import resolve_request
from dagster_adjunct.orchestration.startpoints.startpoint_request import StartpointRequest
from dagster_adjunct.orchestration.startpoints.stream_snapshots import StreamSnapshot, look_at_stream
from dagster_adjunct.resources.errors import PermanentError
from dagster_adjunct.resources.streams.interface.startpoint import describe_startpoint

if TYPE_CHECKING:
    from datetime import datetime

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class Preview:
    """What one request would do if a run started now.

    `tasks` are those that it is for: of the plan, or `dataset NAME`. It reads `offsets` offsets, from `start` up to
    `end`: that of the bounded replay, else the stream's end as it is now. `checkpoint` is where reading would go on
    without it, and `moved` by how many offsets it moves that, below 0 for backwards; None for a replay, which moves
    nothing, and where there is nothing to compare. With an `error` it can't be followed: the run would fail, unless the
    request says to go on from the checkpoint then (`falls_back`).
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
        names = ("checkpoint", "start", "end", "offsets", "moved", "error", "falls_back", "effect")
        return {
            "partition": str(asked.ssp),
            "tasks": list(self.tasks),
            "position": describe_startpoint(asked.startpoint),
            "until": None if until is None else describe_startpoint(until),
            **{name: getattr(self, name) for name in names},
        }


def preview(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    app: Application,
    requests: Sequence[StartpointRequest],
    state: ApplicationState,
) -> list[Preview]:
    """Return what each request would do if a run started now from this state; what can't be followed has an `error`.

    Looks once at each stream. Raises what planning the application raises.
    """
    now = lake.now()
    look = cache(partial(look_at_stream, systems))
    reading = plan_application(app, systems).partitions_by_task() if app.inputs else {}
    tables, named = dataset_tasks(app, systems), named_only(app)
    owners: dict[SystemStreamPartition, list[str]] = {}
    for task, ssps in {**reading, **tables}.items():
        for ssp in ssps if task not in named else ():
            owners.setdefault(ssp, []).append(task)

    previews: dict[int, Preview] = {}
    rewinds: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        ssp, tasks = request.ssp, tuple(owners.get(request.ssp, ()))
        if request.task is not None:
            tasks = (request.task,) if ssp in {**reading, **tables}.get(request.task, ()) else ()
        if request.task in reading and is_broadcast(app, ssp):
            previews[number] = Preview(request, (str(request.task),), error=str(one_task_of_all(request)))
        elif tasks:
            of_tables = [task for task in tasks if task in tables]
            for task in of_tables:
                rewinds.setdefault(task, []).append(number)
            previews[number] = _followed(look, None if of_tables else state, request, tasks, now)
        else:
            who = "no task reads" if request.task is None else f"{request.task!r} is no task that reads"
            readers = [task for task, ssps in {**reading, **tables}.items() if ssp in ssps]
            instead = f"; {', '.join(map(repr, readers[:3]))} does" if request.task is not None and readers else ""
            previews[number] = Preview(request, (), error=f"{who} {ssp}{instead}.")
    for dataset in app.datasets:
        asked = {n: previews[n] for n in rewinds.get(dataset_task(dataset.name), {}) if previews[n].error is None}
        previews |= _of_table(lake, systems, dataset, asked)
    return [previews[number] for number in range(len(requests))]


def _followed(
    look: Callable[[str], StreamSnapshot],
    state: ApplicationState | None,
    request: StartpointRequest,
    tasks: tuple[str, ...],
    now: datetime,
) -> Preview:
    """Return what a request would do to an input; without a `state`, what can be said of one for datasets so far."""
    ssp = request.ssp
    if state is None and request.until is not None:
        return Preview(
            request,
            tasks,
            error=f"{ssp} is read by {', '.join(tasks)}, and a table has no replay beside it: it is what its stream "
            "says up to where it has read. Leave the end (until) out.",
        )
    checkpoint = None if state is None else state.checkpoint.get(ssp)
    try:
        stream = look(ssp.qualified_stream)
        start = resolve_request(stream, request, now=now)
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


def _of_table(
    lake: Lake, systems: Mapping[str, StreamSystem], dataset: AdjunctDataset, previews: Mapping[int, Preview]
) -> dict[int, Preview]:
    """Return what these requests would do to the table of a dataset, all of them together."""
    requests = {before.request.ssp: before.request for before in previews.values()}
    if not requests:
        return {}
    try:
        plan = plan_rewind(
            lake,
            systems,
            dataset,
            positions={ssp: positioned(request) for ssp, request in requests.items()},
            force={ssp for ssp, request in requests.items() if request.force},
        )
    except PermanentError as error:
        return {number: replace(before, error=str(error)) for number, before in previews.items()}
    refusal = None if plan.refusal is None else str(plan.refusal)
    rewound = {partition.ssp: partition for partition in plan.partitions}
    changed = {}
    for number, before in previews.items():
        partition = rewound[before.request.ssp]
        changed[number] = replace(
            before,
            checkpoint=partition.taken,
            start=partition.start,
            end=partition.taken,
            offsets=partition.again,
            moved=None if partition.taken is None else partition.skipped - partition.again,
            error=refusal,
        )
    return changed
