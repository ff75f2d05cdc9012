"""The public API for an application's startpoints: preview what requests would do, request, list and take back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from datetime import datetime, timedelta
from functools import cache, cached_property, partial
from typing import Any, TypeAlias

from pydantic import SkipValidation

from dagster_adjunct.assets.unbounded.rewind import plan_rewind
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    BatchLog,
    Replay,
    application_state,
    check_not_renamed,
    describe_similar_names,
)
from dagster_adjunct.orchestration.operators.stream_facts import CURRENT, RECORDED, JoinVersions
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import plan_application, systems_for
from dagster_adjunct.orchestration.startpoints.positions import StreamSnapshot, resolve_request, snapshot_stream
from dagster_adjunct.orchestration.startpoints.recorded_replay import RecordedPlan, plan_recorded, write_plan
from dagster_adjunct.orchestration.startpoints.request import (
    MS,
    OnUnresolved,
    ReadingTasks,
    StartpointRequest,
    Unreadable,
    broadcast_task_error,
    choose_versions,
    dataset_task_name,
    describe_versions,
    expand_partitions,
    find_reading_tasks,
    is_broadcast,
    to_epoch_ms,
    to_startpoint,
)
from dagster_adjunct.orchestration.startpoints.store import (
    PendingStartpoint,
    has_begun,
    iter_unapplied,
    open_startpoints,
    request_key,
)
from dagster_adjunct.resources.errors import ConfigurationError, PermanentError, raise_first
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.streams.startpoint import Startpoint, check_startpoint, describe_startpoint
from dagster_adjunct.resources.streams.system import StreamSystem, SystemStreamPartition
from dagster_adjunct.resources.validation import validated_methods


def collect_startpoints(
    lake: Lake, systems: Mapping[str, StreamSystem], app: Application, now: datetime
) -> dict[str, list[dict[str, Any]]]:
    """Return rows of what is `waiting`, `expired`, `handed` to tasks, of `replays`, `applied` and `unreadable` entries.

    Rows have JSON values. `expired` requests stay until the next run deletes them. `left` counts the offsets that a
    replay has still to read.
    """
    stored, state = open_startpoints(lake, app).read(), application_state(lake, app.name)

    def aged_rows(requests: Iterable[StartpointRequest]) -> list[dict[str, Any]]:
        rows = []
        for request in requests:
            age_ms = to_epoch_ms(now) - request.startpoint.creation_timestamp_ms
            left_ms = app.startpoints_expire_after // MS - age_ms
            ages = {"age": _format_span(age_ms), "expires_in": _format_span(left_ms)}
            rows.append(_request_row(request) | {"task": request.task} | ages)
        return rows

    return {
        "waiting": aged_rows(stored.waiting),
        "expired": aged_rows(stored.expired),
        "handed": [
            _request_row(held.request) | {"task": held.at, "offset": held.offset}
            for held in iter_unapplied(stored.handed, state)
        ],
        "replays": [_replay_row(systems, replay) for replay in state.offsets.replays.values()],
        "applied": [
            {"partition": str(ssp), **start.model_dump(mode="json", exclude={"id"})}
            for ssp, start in sorted(state.offsets.applied.items())
        ],
        "unreadable": [
            {"partition": one.partition or one.key, "task": one.task, "handed_to": one.at, "error": one.error}
            for one in stored.unreadable
        ],
    }


def _request_row(request: StartpointRequest) -> dict[str, Any]:
    return {
        "partition": str(request.ssp),
        "position": describe_startpoint(request.startpoint),
        "until": None if request.until is None else describe_startpoint(request.until),
        **{name: getattr(request, name) for name in ("by", "reason", "on_unresolved", "versions", "id")},
    }


def _replay_row(systems: Mapping[str, StreamSystem], replay: Replay) -> dict[str, Any]:
    ssp, left, per_cent = replay.ssp, None, None
    if ssp.system in systems:  # the application may no longer use it
        left, whole = (systems[ssp.system].distance(ssp, start, replay.until) for start in (replay.next, replay.start))
        per_cent = 100 * (whole - left) // max(whole, 1)
    facts = replay.model_dump(mode="json", exclude={"ssp"})
    return facts | {"partition": str(ssp), "left": left, "per_cent": per_cent}


def _format_span(ms: int) -> str:
    """Return whole seconds as text; computed with integers, because dates do not reach as far."""
    return str(timedelta(seconds=min(max(ms // 1000, 0), timedelta.max // timedelta(seconds=1))))


_MAX_REMOVALS = 5


@dataclass(frozen=True, slots=True)
class TakenBack:
    """What was taken back, and the `replays` that were stopped; `not_removed` says what was not taken back, and why.

    `unreadable` are entries that this release of Adjunct can't read, taken back as they are.
    """

    startpoints: tuple[PendingStartpoint, ...]
    replays: tuple[Replay, ...]
    not_removed: tuple[str, ...]
    unreadable: tuple[Unreadable, ...] = ()

    def describe(self) -> list[str]:
        """Return a line for each entry."""
        lines = [held.taken_back() for held in self.startpoints]
        lines += [
            f"stopped: {replay.ssp}: the replay from {replay.position} ({replay.by}: {replay.reason}) at offset "
            f"{replay.next}, {replay.until} not reached"
            for replay in self.replays
        ]
        lines += [f"not removed: {text}" for text in self.not_removed]
        return lines + [f"removed unread: {entry.summary()}" for entry in self.unreadable]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "taken_back": [held.summary() for held in self.startpoints],
            "replays": [replay.model_dump(mode="json") for replay in self.replays],
            "not_removed": list(self.not_removed),
            "unreadable": [entry.summary() for entry in self.unreadable],
        }


def take_back_startpoints(
    lake: Lake,
    app: Application,
    ssps: Collection[SystemStreamPartition] | None = None,
    *,
    task: str | None = None,
    by: str,
    reason: str,
) -> TakenBack:
    """Take back what is requested at these partitions (None: all) and not applied, and stop bounded replays there.

    With `task`, only what is for this task alone or was handed to it; replays, which are of all tasks, continue. What a
    batch has begun with stays. Raises CommitConflictError if a run commits at the same moment; what was taken back
    stays so.
    """
    startpoints, log = open_startpoints(lake, app), BatchLog(lake, app.name)
    state, stored = log.read().state, startpoints.read()
    wanted = None if ssps is None else dict.fromkeys(ssps)

    def chosen(held: PendingStartpoint) -> bool:
        # Of a broadcast input all tasks hold the same request, so one task can't give it back alone.
        one = held.request.task if held.at is None or is_broadcast(app, held.request.ssp) else held.at
        return (wanted is None or held.request.ssp in wanted) and (task is None or task == one)

    waiting = [request for request in stored.waiting if chosen(PendingStartpoint(request))]
    taken = [PendingStartpoint(request) for request in startpoints.take_back(waiting, by=by)]
    unread = startpoints.delete_unreadable(
        (
            entry
            for entry in stored.unreadable
            if (wanted is None or entry.ssp in wanted or (entry.ssp is None and entry.at and entry.at == task))
            and (task is None or task in (entry.task, entry.at))
        ),
        by=by,
    )
    # Repeated, because a fan-out that has read a request before its deletion may still hand it out.
    for _ in range(_MAX_REMOVALS):
        handed = [held for held in iter_unapplied(startpoints.get_fan_outs(), state) if chosen(held)]
        idle = [held for held in handed if not has_begun(held, state)]
        if not idle:
            break
        ids: dict[str, dict[SystemStreamPartition, str]] = {}
        for held in idle:
            ids.setdefault(str(held.at), {})[held.request.ssp] = held.request.id
        startpoints.remove_fan_outs(ids)
        taken += idle
    # Read again: a run may have begun with a request before its removal.
    state = log.read().state
    used = [held for held in dict.fromkeys([*taken, *handed]) if has_begun(held, state)]
    taken = [held for held in taken if held not in used]
    kept = [f"{held.summary()}: a batch has begun there" for held in used]
    stopped, going = _stop_replays(log, state, wanted, by, reason) if task is None else ([], [])
    known = (
        {entry.ssp for entry in unread}
        | {held.request.ssp for held in (*taken, *used)}
        | {replay.ssp for replay in (*stopped, *going)}
    )
    kept += [
        f"{replay.ssp}: the replay from {replay.position} ({replay.by}: {replay.reason}): the open batch is reading "
        "it; try again after the batch, or abandon it (adjunct checkpoint abandon)"
        for replay in going
    ]
    if task is not None:
        still = iter_unapplied(startpoints.get_fan_outs(), state)
        for ssp, held in {held.request.ssp: held for held in still}.items():
            if ssp not in known and is_broadcast(app, ssp) and (wanted is None or ssp in wanted):
                kept.append(f"{held.summary()}: it is for all tasks, and can't be taken back from one")
                known.add(ssp)
        for held in map(PendingStartpoint, stored.waiting):
            ssp = held.request.ssp
            if ssp not in known and held.request.task is None and (wanted is None or ssp in wanted):
                kept.append(f"{held.summary()}: it is for every task that reads the partition; leave the task out")
                known.add(ssp)
    kept += [_describe_nothing(ssp, state) for ssp in wanted or () if ssp not in known]
    return TakenBack(tuple(taken), tuple(stopped), tuple(kept), tuple(unread))


def _stop_replays(
    log: BatchLog, state: ApplicationState, ssps: Collection[SystemStreamPartition] | None, by: str, reason: str
) -> tuple[list[Replay], list[Replay]]:
    """Stop the replays at these partitions; return them, and those that the open batch reads, which continue."""
    ours = [replay for replay in state.offsets.replays.values() if ssps is None or replay.ssp in ssps]
    reading = set(state.open.replays.values()) if state.open else set()
    idle = [replay.id for replay in ours if replay.id not in reading]
    return log.cancel_replays(idle, by=by, reason=reason), [replay for replay in ours if replay.id in reading]


def _describe_nothing(ssp: SystemStreamPartition, state: ApplicationState) -> str:
    last = state.offsets.applied.get(ssp)
    if last is None:
        return f"{ssp}: there is no request"
    return (
        f"{ssp}: there is no request; {last.position} ({last.by}: {last.reason}) was applied at "
        f"{last.applied_at:%Y-%m-%d %H:%M} UTC, and only another startpoint moves the position again"
    )


@dataclass(frozen=True, slots=True)
class Preview:
    """What one request would do if a run started now.

    `tasks` are the plan's tasks that it is for, or `dataset NAME`. It reads `offsets` offsets from `start` to `end`:
    the end of the bounded replay, else the current end of the stream. `checkpoint` is where reading would continue
    without it, after an open batch; `moved` is by how many offsets it moves that position, negative for backwards; None
    for a replay, which moves nothing, and where there is nothing to compare. With an `error` the run would fail, unless
    the request continues from the checkpoint then (`falls_back`). `versions` are the dataset versions that a replay is
    joined with.
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
    versions: JoinVersions | None = None

    @property
    def move(self) -> str:
        """What happens to the position, in a few words; if the request can't be applied, why."""
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
        """The same as a sentence, with the number of offsets to read."""
        if self.error is not None:
            return self.move
        again = "" if self.request.until is None else " again"
        return f"{self.offsets:,} offsets to read{again}: {self.move}"

    def to_json(self) -> dict[str, Any]:
        """Return the preview as JSON values."""
        asked, until = self.request, self.request.until
        names = ("checkpoint", "start", "end", "offsets", "moved", "error", "falls_back", "effect", "versions")
        return {
            "partition": str(asked.ssp),
            "tasks": list(self.tasks),
            "position": describe_startpoint(asked.startpoint),
            "until": None if until is None else describe_startpoint(until),
            **{name: getattr(self, name) for name in names},
        }


def preview_request(
    app: Application,
    readers: ReadingTasks,
    snapshot_of: Callable[[str], StreamSnapshot],
    state: ApplicationState,
    request: StartpointRequest,
    now: datetime,
) -> Preview:
    """Return what a request would do from this state; one that is not allowed or can't be applied has an `error`.

    For datasets, and for recorded versions, this is what can be said without reading their tables and batches.
    """
    ssp, bounded = request.ssp, request.until is not None
    try:
        versions = choose_versions(app, request)
    except ConfigurationError as error:
        return Preview(request, (), error=str(error), versions=request.versions or CURRENT if bounded else None)
    shown = Preview(request, readers.targets_of(request))
    shown = with_fields(shown, versions=versions if bounded else None)
    if request.task in readers.of_plan and is_broadcast(app, ssp):
        return with_fields(shown, tasks=(str(request.task),), error=str(broadcast_task_error(request)))
    if not shown.tasks:
        return with_fields(shown, error=_describe_unread(request, readers.tasks))
    rewinds = any(task in readers.of_datasets for task in shown.tasks)
    if rewinds and bounded:
        refusal = (
            f"{ssp} is read by {', '.join(shown.tasks)}, and the table of a dataset can't be replayed: it always "
            "holds what its stream says up to its position. Leave the end (until) out."
        )
        return with_fields(shown, error=refusal)
    if not rewinds:
        # An open batch finishes before any request is applied.
        batch = state.open
        reads = batch is not None and not batch.replays and ssp in batch.ranges
        shown = with_fields(shown, checkpoint=batch.ranges[ssp].end if batch and reads else state.checkpoint.get(ssp))
    try:
        stream = snapshot_of(ssp.qualified_stream)
        start = resolve_request(stream, request, versions=versions, now=now)
    except PermanentError as error:
        return with_fields(shown, error=str(error), falls_back=request.on_unresolved == "checkpoint")
    distance = partial(stream.system.distance, ssp)
    if isinstance(start, Replay):
        return with_fields(shown, start=start.start, end=start.until, offsets=distance(start.start, start.until))
    if rewinds:
        return with_fields(shown, start=start.offset)
    end, before, moved = stream.upcoming[ssp], shown.checkpoint, None
    # The checkpoint of a recreated stream is in the former one.
    if before is not None and not stream.info.was_recreated(state.offsets.streams.get(stream.name)):
        moved = distance(before, start.offset) - distance(start.offset, before)
    return with_fields(shown, start=start.offset, end=end, offsets=distance(start.offset, end), moved=moved)


def _describe_unread(request: StartpointRequest, tasks: Mapping[str, frozenset[SystemStreamPartition]]) -> str:
    """Return that a request is for no task, and which tasks read its partition."""
    if request.task is None:
        return f"no task reads {request.ssp}."
    readers = [task for task, ssps in tasks.items() if request.ssp in ssps]
    instead = f"; {', '.join(map(repr, readers[:3]))} does" if readers else ""
    return f"task {request.task!r} does not read {request.ssp}{instead}."


def describe_remote_tables(plan: ExecutionPlan | None, requests: Sequence[StartpointRequest]) -> dict[str, str]:
    """Return what a replay does to the remote tables that are written from these partitions."""
    streams = {request.ssp.qualified_stream for request in requests}
    effects: dict[str, dict[str, None]] = {}
    for table in () if plan is None else plan.tables:
        if streams & set(table.streams):
            effects.setdefault(table.table, {})[table.replay] = None
    return {table: "; and ".join(replays) for table, replays in effects.items()}


def describe_state_effects(app: Application) -> tuple[str, ...]:
    """Return what stateful operators do with records that are read again, a line each."""
    return tuple(
        f"{operator.id} keeps state: it leaves out records that were read before, and counts them (again)"
        for operator in app.operators
        if operator.spec.states
    )


def mark_blocked_previews(unreadable: Sequence[Unreadable], previews: Sequence[Preview]) -> list[Preview]:
    """Return the previews, with an error where something unreadable blocks the request.

    That is an unreadable request at the same partition and task, which the new one would replace, or an unreadable
    fan-out for the partition or for an unknown one: nothing is read there.
    """

    def checked(shown: Preview) -> Preview:
        asked = shown.request
        for unread in unreadable:
            waits = unread.kind == "request" and unread.key == request_key(asked.target)
            of_task = unread.at is not None and unread.at in shown.tasks
            holds = unread.at is not None and (unread.ssp == asked.ssp or (unread.ssp is None and of_task))
            if waits or holds:
                way = f"{asked.ssp} --reason …" if unread.ssp else f"--all --task {str(unread.at)!r} --reason …"
                error = f"{unread.summary()} Take that back first: adjunct startpoint clear MODULE:APP {way}."
                return with_fields(shown, error=error, falls_back=False)
        return shown

    return [checked(shown) for shown in previews]


def check_previews(previews: Sequence[Preview]) -> None:
    """Raise ConfigurationError for requests that can't be applied now."""
    wrong = [shown for shown in previews if shown.error and not shown.falls_back]
    if wrong:
        more = "" if len(wrong) == 1 else f" The same goes for {len(wrong) - 1} more of the {len(previews)} partitions."
        problem = f"the startpoint can't be applied now, and nothing is written. {wrong[0].error}{more}"
        step = "See what each would do: --dry-run, or preview(…) in Python."
        raise ConfigurationError(problem, step, stream=wrong[0].request.ssp.qualified_stream)


def empty_replay_error(previews: Sequence[Preview]) -> ConfigurationError | None:
    """Return the error of replays that would all read nothing, None if one reads something."""
    if all(shown.request.until is not None and shown.offsets == 0 for shown in previews):
        first, others = previews[0], "" if len(previews) == 1 else ", nor in the other partitions"
        problem = (
            f"{first.request.ssp}: there are no records between the startpoint (offset {first.start}) and the end of "
            f"the replay (offset {first.end}){others}; nothing is written."
        )
        return ConfigurationError(problem, "Choose an end after the start.", stream=first.request.ssp.qualified_stream)
    return None


def find_replaced(
    requests: Iterable[StartpointRequest], there: Iterable[PendingStartpoint], named: Collection[str]
) -> list[tuple[PendingStartpoint, StartpointRequest]]:
    """Return what the requests replace; tasks in `named` get no requests for all tasks."""
    by_ssp: dict[SystemStreamPartition, list[PendingStartpoint]] = {}
    for held in there:
        by_ssp.setdefault(held.request.ssp, []).append(held)
    replaced = []
    for request in requests:
        for held in by_ssp.get(request.ssp, ()):
            old, new = held.at or held.request.task, request.task
            if old == new or (None in (old, new) and (old or new) not in named):
                replaced.append((held, request))
    return replaced


def other_kind_error(replaced: Sequence[tuple[PendingStartpoint, StartpointRequest]]) -> ConfigurationError | None:
    """Return the error of a replay that would replace a startpoint that moves the position, or of the reverse."""
    for held, request in replaced:
        if (held.request.until is None) != (request.until is None):
            what = "a bounded replay" if request.until is not None else "a startpoint that moves the position"
            other = "a startpoint that moves the position" if request.until is not None else "a bounded replay"
            return ConfigurationError(
                f"{what} would replace {other}: {held.summary()}.",
                "Let a run apply that first, take it back (adjunct startpoint clear), or replace it with --replace "
                "(replace=True in Python).",
                stream=request.ssp.qualified_stream,
            )
    return None


def preview_rewinds(
    lake: Lake, systems: Mapping[str, StreamSystem], app: Application, previews: Sequence[Preview]
) -> list[Preview]:
    """Return the previews, with what the requests for each dataset together would do to its table."""
    shown = list(previews)
    for dataset in app.datasets:
        task = dataset_task_name(dataset.name)
        mine = [number for number, one in enumerate(shown) if task in one.tasks and one.error is None]
        requests = {shown[number].request.ssp: shown[number].request for number in mine}
        if not requests:
            continue
        try:
            plan = plan_rewind(
                dataset,
                lake=lake,
                systems=systems,
                positions={ssp: to_startpoint(request) for ssp, request in requests.items()},
                force={ssp for ssp, request in requests.items() if request.force},
            )
        except PermanentError as error:
            for number in mine:
                shown[number] = with_fields(shown[number], error=str(error))
            continue
        refusal = None if plan.refusal is None else str(plan.refusal)
        rewound = {partition.ssp: partition for partition in plan.partitions}
        for number in mine:
            partition = rewound[shown[number].request.ssp]
            shown[number] = with_fields(
                shown[number],
                checkpoint=partition.taken,
                start=partition.start,
                end=partition.taken,
                offsets=partition.again,
                moved=None if partition.taken is None else partition.skipped - partition.again,
                error=refusal,
            )
    return shown


# "lake.flights.3", "lake.flights.0-3,7", "lake.flights" for all, a SystemStreamPartition, or several of these.
Partitions: TypeAlias = str | SystemStreamPartition | Iterable[str | SystemStreamPartition]
Rows: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class AskedStartpoints:
    """The result of a request: what each would do now, what it replaces, and whether it is written.

    `tables` says what happens to each remote table that is written from these partitions. `notes` say which versions
    replays are joined with, and which operators leave out records that are read again.
    """

    previews: tuple[Preview, ...]
    replaced: tuple[PendingStartpoint, ...]
    written: bool
    tables: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def describe_effects(self) -> list[str]:
        """Return what else the requests do, a line each: what they replace, tables, and notes."""
        lines = [f"{'replaced' if self.written else 'would be replaced'}: {held.summary()}" for held in self.replaced]
        return [*lines, *(f"table {table}: {becomes}" for table, becomes in self.tables.items()), *self.notes]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "written": self.written,
            "partitions": [preview.to_json() for preview in self.previews],
            "replaced": [held.summary() for held in self.replaced],
            "tables": dict(self.tables),
            "notes": list(self.notes),
        }


@validated_methods
@dataclass(frozen=True)
class Startpoints:
    """The startpoints of one application in one lake: preview, request, list and take back.

        startpoints = Startpoints(app)
        startpoints.preview("lake.orders.1,3", StartpointOldest())
        startpoints.request("lake.orders.1,3", StartpointOldest(), by="ada", reason="discounts were wrong")

    Requests go to the tasks of the application's plan, and expire as it says. None of these methods reads records: the
    next run of the application applies the requests.
    """

    app: SkipValidation[Application]
    lake: Lake = field(default_factory=open_lake, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.app, Application):
            known = f": {describe_similar_names(self.lake, self.app)}" if isinstance(self.app, str) else ""
            step = "Pass the Application itself: its plan says which task reads what."
            raise ConfigurationError(f"Startpoints got {self.app!r} for an application{known}.", step, argument="app")

    def preview(
        self,
        partitions: Partitions,
        position: Startpoint,
        *,
        until: Startpoint | None = None,
        task: str | None = None,
        on_unresolved: OnUnresolved = "fail",
        force: bool = False,
        replace: bool = False,
        versions: JoinVersions | None = None,
    ) -> AskedStartpoints:
        """Return what `request` would do with these arguments, and what it would replace; write nothing.

        A request that can't be applied has an `error` in its preview. `notes` say why `request` would reject others.
        """
        wanted = {"task": task, "on_unresolved": on_unresolved, "force": force, "versions": versions}
        requests = build_requests(self._expanded(partitions), position, until, by="preview", reason="-", **wanted)
        return request_startpoints(self.lake, self._systems, self.app, requests, replace=replace, dry_run=True)

    def request(
        self,
        partitions: Partitions,
        position: Startpoint,
        *,
        until: Startpoint | None = None,
        task: str | None = None,
        on_unresolved: OnUnresolved = "fail",
        force: bool = False,
        replace: bool = False,
        versions: JoinVersions | None = None,
        by: str,
        reason: str,
    ) -> AskedStartpoints:
        """Request that these partitions are read from `position` on, all or none; return what a run would do now.

        Each request is applied once, also if the same `position` was requested before. With `until` it is a bounded
        replay: that part is read again, and the main position stays. `task` is one of the plan, or "dataset NAME"; by
        default every task that reads the partition. `on_unresolved` says what a run does if there is no offset: "fail",
        or continue from the "checkpoint". `force` allows the table of a dataset to get older. `versions` says what a
        replay's records are joined with: the entries valid at their time ("as-of", the default if the application has
        as-of joins), what is served then ("current", the default otherwise), or what they were joined with when they
        were first read ("recorded"), which is retained until the replay has ended.

        Replaces what is requested there and not applied. Raises ConfigurationError, and writes nothing, if no task
        reads a partition, if the position has no offset now, if startpoints are disabled, if recorded versions are
        gone, and, without `replace`, if a bounded replay would replace a startpoint that moves the position, or the
        reverse.
        """
        wanted = {"task": task, "on_unresolved": on_unresolved, "force": force, "versions": versions}
        requests = build_requests(self._expanded(partitions), position, until, by=by, reason=reason, **wanted)
        return request_startpoints(self.lake, self._systems, self.app, requests, replace=replace)

    def list(self) -> dict[str, Rows]:
        """Return rows of what is `waiting`, `handed` to tasks, of `replays`, `applied` and `unreadable` entries.

        Rows have JSON values.
        """
        return collect_startpoints(self.lake, self._systems, self.app, self.lake.now())

    def take_back(self, partitions: Partitions, *, task: str | None = None, by: str, reason: str) -> TakenBack:
        """Take back what is requested at these partitions and not applied, and stop bounded replays there.

        With `task`, only what is for this task or was handed to it; replays continue then. What a batch has begun with
        stays, and is listed in `not_removed`. Raises CommitConflictError if a run commits at the same moment.
        """
        return take_back_startpoints(self.lake, self.app, self._expanded(partitions), task=task, by=by, reason=reason)

    def clear(self, *, task: str | None = None, by: str, reason: str) -> TakenBack:
        """Take back everything that is not applied, including requests for streams that the application no longer
        reads.

        All bounded replays are stopped, unless a `task` is given. Raises as `take_back` does.
        """
        return take_back_startpoints(self.lake, self.app, None, task=task, by=by, reason=reason)

    @cached_property
    def _systems(self) -> Mapping[str, StreamSystem]:
        return systems_for(self.app, lake=self.lake)

    def _expanded(self, partitions: Partitions) -> tuple[SystemStreamPartition, ...]:
        named = [partitions] if isinstance(partitions, str | SystemStreamPartition) else [*partitions]
        if not named:
            step = "Name one, as in lake.flights.3, or a stream: lake.flights."
            raise ConfigurationError("no partition is named.", step, argument="partitions")
        return tuple(expand_partitions(self.app, self._systems, map(str, named)))


def build_requests(
    ssps: Iterable[SystemStreamPartition], position: Startpoint, until: Startpoint | None = None, **wanted: Any
) -> list[StartpointRequest]:
    """Return a request for each partition, created now; `wanted` are its other fields. Raises ConfigurationError."""
    check_startpoint(position, "position", "position")
    if until is not None:
        check_startpoint(until, "until", "until")
    return [StartpointRequest(ssp=ssp, startpoint=position.reissue(), until=until, **wanted) for ssp in ssps]


def request_startpoints(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    app: Application,
    requests: Sequence[StartpointRequest],
    *,
    replace: bool = False,
    dry_run: bool = False,
) -> AskedStartpoints:
    """Write these requests, all or none; return what they would do if a run started now.

    Each replaces what is not applied yet at the same partition and task. Raises ConfigurationError if no task reads a
    partition; if what is stored there can't be read; if a startpoint has no offset now, unless the request continues
    from the checkpoint; and, without `replace`, if a bounded replay would replace a startpoint that moves the position,
    or the reverse. With `dry_run` nothing is written, and the previews and notes have these errors. Raises in any case
    if the application disables startpoints.
    """
    startpoints = open_startpoints(lake, app)
    startpoints.check_on()
    stored, state = startpoints.read(), application_state(lake, app.name)
    check_not_renamed(app.name, state)
    plan = plan_application(app, systems=systems) if app.inputs else None
    readers = find_reading_tasks(app, plan, systems)
    versions = describe_versions(app, requests)

    snapshot_of = cache(partial(snapshot_stream, systems))  # one snapshot of each stream
    tables, keeping_state = describe_remote_tables(plan, requests), describe_state_effects(app)
    previews = [preview_request(app, readers, snapshot_of, state, request, stored.at) for request in requests]
    previews = preview_rewinds(lake, systems, app, previews)
    previews = mark_blocked_previews(stored.unreadable, previews)
    previews, recorded = _plan_recorded_versions(lake, app, plan, snapshot_of, previews, stored.at)
    there = [*map(PendingStartpoint, stored.waiting), *iter_unapplied(stored.handed, state)]
    replaced = find_replaced(requests, there, readers.by_name)
    refusals = [*filter(None, [empty_replay_error(previews), None if replace else other_kind_error(replaced)])]
    if not dry_run:
        check_previews(previews)
        raise_first(refusals)
        if recorded is not None:
            write_plan(lake, recorded)  # retains its versions from here on
            plan_id = recorded.id
            requests = [with_fields(one, recorded=plan_id) if one.versions == RECORDED else one for one in requests]
        startpoints.write_startpoints(requests)
    taken_over = tuple(dict.fromkeys(old for old, _ in replaced))
    rejected = [f"would be rejected: {refusal}" for refusal in refusals]
    notes = (*rejected, *versions, *(() if recorded is None else recorded.describe()), *keeping_state)
    return AskedStartpoints(tuple(previews), taken_over, not dry_run, tables, notes)


def _plan_recorded_versions(
    lake: Lake,
    app: Application,
    plan: ExecutionPlan | None,
    snapshot_of: Callable[[str], StreamSnapshot],
    previews: list[Preview],
    now: datetime,
) -> tuple[list[Preview], RecordedPlan | None]:
    """Return the previews, and the plan that the requests for recorded versions share; nothing is written or retained.

    A request whose records no batch has read, or whose versions are gone, gets an `error` in its preview. All requests
    of one call share a plan, so that the records of one batch stay together; if one can't be applied, none is planned.
    """
    replays = [one for one in previews if one.request.versions == RECORDED and one.error is None]
    wanted = {one.request.ssp: one for one in replays if one.request.until is not None}
    if not wanted or any(shown.error and not shown.falls_back for shown in previews):
        return previews, None
    spans = {ssp: (str(shown.start), str(shown.end)) for ssp, shown in wanted.items()}
    problems, recorded = plan_recorded(lake, app, plan, snapshot_of, spans, now)
    for ssp, problem in problems.items():
        previews[previews.index(wanted[ssp])] = with_fields(wanted[ssp], error=problem)
    return previews, recorded
