"""The public API for an application's startpoints: preview what requests would do, request, list
and take back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack

from pydantic import SkipValidation

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    BatchLog,
    Replay,
    application_state,
    check_not_renamed,
    describe_similar_names,
)
from dagster_adjunct.orchestration.batch_log.intent import Offsets, Ranges, of_stream
from dagster_adjunct.orchestration.batch_log.run_lease import may_be_running
from dagster_adjunct.orchestration.operators.stream_facts import RECORDED, JoinVersions
from dagster_adjunct.orchestration.planner.planner import plan_application, systems_for
from dagster_adjunct.orchestration.startpoints.positions import AskedApplication
from dagster_adjunct.orchestration.startpoints.preview import (
    Preview,
    Replaced,
    check_previews,
    describe_open_batch,
    describe_output_tables,
    describe_remote_tables,
    describe_state_effects,
    empty_replay_error,
    find_replaced,
    find_streams_read_again,
    mark_blocked_previews,
    other_kind_error,
    preview_request,
    preview_rewinds,
)
from dagster_adjunct.orchestration.startpoints.recorded_plan import RecordedPlan
from dagster_adjunct.orchestration.startpoints.recorded_replay import (
    Span,
    plan_recorded,
    write_plan,
)
from dagster_adjunct.orchestration.startpoints.replaced_rows import (
    check_rows_replaceable,
    reads_rewritten,
)
from dagster_adjunct.orchestration.startpoints.request import (
    MS,
    OnUnresolved,
    StartpointRequest,
    Unreadable,
    describe_versions,
    expand_partitions,
    is_broadcast,
    to_epoch_ms,
)
from dagster_adjunct.orchestration.startpoints.restatement_preview import describe_restatements
from dagster_adjunct.orchestration.startpoints.store import (
    PendingStartpoint,
    StartpointManager,
    iter_unapplied,
    open_startpoints,
)
from dagster_adjunct.resources.errors import ConfigurationError, raise_first
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.streams.startpoint import (
    Startpoint,
    check_startpoint,
    describe_startpoint,
)
from dagster_adjunct.resources.streams.system import (
    OffsetRange,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.threads import requested_once
from dagster_adjunct.resources.validation import validated_methods


def collect_startpoints(
    lake: Lake, systems: Mapping[str, StreamSystem], app: Application, now: datetime
) -> dict[str, list[dict[str, Any]]]:
    """Return all startpoints of an application, by state, as rows of JSON values.

    The states are `waiting`, `expired` (to be deleted by the next run), `handed` to tasks, running
    `replays` (`left` is the number of offsets still to read), `applied`, and `unreadable` entries.
    """
    stored = open_startpoints(lake, app).read()
    state = application_state(lake, app.name)

    def aged_row(request: StartpointRequest) -> dict[str, Any]:
        """Return the row of a request that no task was handed, with its age."""
        age_ms = to_epoch_ms(now) - request.startpoint.creation_timestamp_ms
        left_ms = app.startpoints_expire_after // MS - age_ms
        ages = {"age": _format_span(age_ms), "expires_in": _format_span(left_ms)}
        return _request_row(request) | {"task": request.task} | ages

    rows: dict[str, list[dict[str, Any]]] = {
        "waiting": [*map(aged_row, stored.waiting)],
        "expired": [*map(aged_row, stored.expired)],
        "handed": [],
        "replays": [_replay_row(systems, replay) for replay in state.offsets.replays.values()],
        "applied": [],
        "unreadable": [],
    }
    for held in iter_unapplied(stored.handed, state):
        handed = {"task": held.at, "offset": held.offset}
        rows["handed"].append(_request_row(held.request) | handed)
    for ssp, start in sorted(state.offsets.applied.items()):
        facts = start.model_dump(mode="json", exclude={"id"})
        rows["applied"].append({"partition": str(ssp), **facts})
    for entry in stored.unreadable:
        row = {
            "partition": entry.partition or entry.key,
            "task": entry.task,
            "handed_to": entry.at,
            "error": entry.error,
        }
        rows["unreadable"].append(row)
    return rows


def _request_row(request: StartpointRequest) -> dict[str, Any]:
    """Return the row of a request, without where it waits."""
    until = None
    if request.until is not None:
        until = describe_startpoint(request.until)
    return {
        "partition": str(request.ssp),
        "position": describe_startpoint(request.startpoint),
        "until": until,
        "by": request.by,
        "reason": request.reason,
        "on_unresolved": request.on_unresolved,
        "versions": request.versions,
        "id": request.id,
    }


def _replay_row(systems: Mapping[str, StreamSystem], replay: Replay) -> dict[str, Any]:
    """Return the row of a replay, with how many offsets are left, if the application still has its
    stream system.
    """
    ssp = replay.ssp
    left = None
    per_cent = None
    if ssp.system in systems:  # the application may no longer use it
        distance = systems[ssp.system].distance
        left = distance(ssp, replay.next, replay.until)
        whole = distance(ssp, replay.start, replay.until)
        per_cent = 100 * (whole - left) // max(whole, 1)
    facts = replay.model_dump(mode="json", exclude={"ssp"})
    return facts | {"partition": str(ssp), "left": left, "per_cent": per_cent}


def _format_span(ms: int) -> str:
    """Return a time span as text, in whole seconds, at least 0. Stored times may be too far
    apart for a timedelta.
    """
    longest = timedelta.max // timedelta(seconds=1)
    seconds = min(max(ms // 1000, 0), longest)
    return str(timedelta(seconds=seconds))


_MAX_REMOVALS = 5


@dataclass(frozen=True, slots=True)
class TakenBack:
    """What was taken back: `startpoints`, `unreadable` entries, and `replays`, which were stopped.

    `not_removed` has a line for each startpoint, replay or partition for which nothing was taken
    back, with the reason.
    """

    startpoints: tuple[PendingStartpoint, ...]
    replays: tuple[Replay, ...]
    not_removed: tuple[str, ...]
    unreadable: tuple[Unreadable, ...] = ()

    def describe(self) -> list[str]:
        """Return a line for each entry."""
        lines = []
        for held in self.startpoints:
            lines.append(f"taken back: {held.summary()}")
        for replay in self.replays:
            lines.append(
                f"stopped: {replay.ssp}: the replay from {replay.position} ({replay.by}:"
                f" {replay.reason}) at offset {replay.next}, {replay.until} not reached"
            )
        for text in self.not_removed:
            lines.append(f"not removed: {text}")
        for entry in self.unreadable:
            lines.append(f"removed unread: {entry.summary()}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "taken_back": [held.summary() for held in self.startpoints],
            "replays": [replay.model_dump(mode="json") for replay in self.replays],
            "not_removed": list(self.not_removed),
            "unreadable": [entry.summary() for entry in self.unreadable],
        }


@dataclass(frozen=True, slots=True)
class _Selection:
    """The startpoints to take back: those at `ssps` (None: all) of `task` (None: of all tasks)."""

    app: Application
    ssps: Collection[SystemStreamPartition] | None
    task: str | None

    def has_partition(self, ssp: SystemStreamPartition | None) -> bool:
        """Whether a partition is selected; an unknown one (None) only if all are."""
        return self.ssps is None or ssp in self.ssps

    def includes(self, held: PendingStartpoint) -> bool:
        """Whether a startpoint is selected."""
        if not self.has_partition(held.request.ssp):
            return False
        if self.task is None:
            return True
        if held.at is None or is_broadcast(self.app, held.request.ssp):
            # A broadcast input is handed to all tasks, so its startpoint can't be taken back from
            # one.
            return self.task == held.request.task
        return self.task == held.at

    def includes_unread(self, entry: Unreadable) -> bool:
        """Whether an entry that can't be read is selected. If its partition is unknown, it is if it
        was handed to the selected task, whatever partitions are selected.
        """
        if self.task is not None and self.task not in (entry.task, entry.at):
            return False
        if self.has_partition(entry.ssp):
            return True
        is_at_task = self.task is not None and entry.at == self.task
        return entry.ssp is None and is_at_task


def take_back_startpoints(
    lake: Lake,
    app: Application,
    ssps: Collection[SystemStreamPartition] | None = None,
    *,
    task: str | None = None,
    by: str,
    reason: str,
) -> TakenBack:
    """Take back the startpoints at these partitions (None: all) that are not applied.

    Bounded replays there are stopped. With `task`, only startpoints are taken back that name this
    task or were handed to it; replays belong to all tasks, and continue. A startpoint that a batch
    has begun to apply stays; no run applies one that was taken back. Raises CommitConflictError if
    runs commit at the same moment; repeat it then.
    """
    startpoints = open_startpoints(lake, app)
    log = BatchLog(lake, app.name)
    selected_ssps = None if ssps is None else dict.fromkeys(ssps)
    selection = _Selection(app, selected_ssps, task)
    state = log.read().state
    stored = startpoints.read()
    waiting = [PendingStartpoint(request) for request in stored.waiting]
    selected = [held.request for held in waiting if selection.includes(held)]
    taken = startpoints.take_back(selected, by=by)
    selected_unread = [entry for entry in stored.unreadable if selection.includes_unread(entry)]
    unread = startpoints.delete_unreadable(selected_unread, by=by)
    handed = _remove_handed(startpoints, state, selection)
    logged = log.take_back(_list_ids_in_batches(handed), by=by, reason=reason)
    replays = _select_replays(logged.state, selection)
    stopped = log.cancel_replays([replay.id for replay in replays.idle], by=by, reason=reason)
    left: list[PendingStartpoint] = []
    if task is not None:
        left = [*waiting, *iter_unapplied(startpoints.get_fan_outs(), logged.state)]
    attempt = _Attempt(
        waiting=[PendingStartpoint(request) for request in taken],
        handed=handed,
        is_first_run=logged.commit is None,
        may_run=may_be_running(lake, app.name),
        unread=unread,
        stopped=stopped,
        being_read=replays.being_read,
        left=left,
    )
    return _describe_attempt(selection, attempt, logged.state)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What an attempt to take startpoints back has done.

    `waiting` were taken back before a task had them, `handed` were removed from tasks. If a run
    `may_run`, it may have read the `handed` ones before: then it applies them all the same to
    datasets, and to all tasks if it is the application's first run. `unread` are the unreadable
    entries that were taken back. `stopped` are the replays that were stopped, `being_read` those
    that were not, because the open batch reads them. `left` are all startpoints that are still
    stored; they are only read for a selection with a task.
    """

    waiting: Sequence[PendingStartpoint]
    handed: Sequence[PendingStartpoint]
    is_first_run: bool
    may_run: bool
    unread: Sequence[Unreadable]
    stopped: Sequence[Replay]
    being_read: Sequence[Replay]
    left: Sequence[PendingStartpoint]


def _describe_attempt(
    selection: _Selection, attempt: _Attempt, state: ApplicationState
) -> TakenBack:
    """Return what was taken back, and for all else that was selected, why not; a pure function."""
    taken = list(attempt.waiting)
    lines = []
    replayed = {replay.ssp for replay in (*attempt.stopped, *attempt.being_read)}
    for held in attempt.handed:
        why = _why_applied(held, state, is_first_run=attempt.is_first_run, may_run=attempt.may_run)
        is_shown_as_replay = held.request.ssp in replayed and _has_begun(held, state)
        if not why:
            taken.append(held)
        elif not is_shown_as_replay:
            lines.append(f"{held.summary()}: {why}")
    for replay in attempt.being_read:
        lines.append(_describe_going(selection.app, replay))
    reported: set[SystemStreamPartition | None] = {entry.ssp for entry in attempt.unread}
    reported |= {held.request.ssp for held in (*attempt.waiting, *attempt.handed)}
    reported |= replayed
    left = _find_left(selection, attempt.left, reported)
    lines += left.values()
    for ssp in selection.ssps or ():
        if ssp not in reported and ssp not in left:
            lines.append(_describe_nothing(ssp, state))
    return TakenBack(tuple(taken), tuple(attempt.stopped), tuple(lines), tuple(attempt.unread))


def _has_begun(held: PendingStartpoint, state: ApplicationState) -> bool:
    """Whether a batch has begun to apply a startpoint; False for one that rewinds a dataset."""
    return not held.is_of_dataset and state.has_begun(held.request.ssp, held.request.id)


def _why_applied(
    held: PendingStartpoint, state: ApplicationState, *, is_first_run: bool, may_run: bool
) -> str:
    """Return why a startpoint that was handed to a task may be applied though it was removed, "" if
    it is not.

    In general, a run that has read it has a conflict in the batch log. There is none for a run that
    rewinds a dataset, and for an application's first run before its first commit.
    """
    may_be_read = may_run and held.at is not None
    if held.is_of_dataset:
        if may_be_read:
            return "removed, but a run that has read it may rewind the dataset"
        return ""
    if _has_begun(held, state):
        return "a batch has begun there"
    if is_first_run and may_be_read:
        return "removed, but the application's first run may begin there"
    return ""


def _remove_handed(
    startpoints: StartpointManager, state: ApplicationState, selection: _Selection
) -> list[PendingStartpoint]:
    """Remove the selected startpoints from the tasks that they were handed to. Return them, with
    those that stay because a batch has begun to apply them.

    This is repeated, because a fan-out that has read a request before its deletion may still hand
    it out.
    """
    handed: list[PendingStartpoint] = []
    for _ in range(_MAX_REMOVALS):
        not_begun: dict[str, Offsets] = {}
        for held in iter_unapplied(startpoints.get_fan_outs(), state):
            if held in handed or not selection.includes(held):
                continue
            handed.append(held)
            request = held.request
            if not _has_begun(held, state):
                not_begun.setdefault(str(held.at), {})[request.ssp] = request.id
        if not not_begun:
            break
        startpoints.remove_fan_outs(not_begun)
    return handed


def _describe_going(app: Application, replay: Replay) -> str:
    """Return why a replay was not stopped: the open batch reads it."""
    return (
        f"{replay.ssp}: the replay from {replay.position} ({replay.by}: {replay.reason}): the open "
        "batch is reading it; try again after the batch, or abandon it (adjunct checkpoint abandon "
        f"{app.name} --reason …)"
    )


def _find_left(
    selection: _Selection,
    others: Iterable[PendingStartpoint],
    reported: Collection[SystemStreamPartition | None],
) -> dict[SystemStreamPartition, str]:
    """Return, by partition, why a startpoint was left although its partition is selected: it is for
    other tasks, too. Partitions of which something else is `reported` are left out.
    """
    left: dict[SystemStreamPartition, str] = {}
    for held in others:
        ssp = held.request.ssp
        if ssp in reported or not selection.has_partition(ssp):
            continue
        why = ""
        if held.at is None and held.request.task is None:
            why = "it is for every task that reads the partition; leave the task out"
        elif held.at is not None and is_broadcast(selection.app, ssp):
            why = "it is for all tasks, and can't be taken back from one"
        if why:
            left.setdefault(ssp, f"{held.summary()}: {why}")
    return left


class _SelectedReplays(NamedTuple):
    """Replays to stop: `idle` ones, and those that the open batch is reading."""

    idle: list[Replay]
    being_read: list[Replay]


def _select_replays(state: ApplicationState, selection: _Selection) -> _SelectedReplays:
    """Return the selected replays.

    Replays belong to all tasks: with a task in the selection there are none.
    """
    selected = _SelectedReplays([], [])
    if selection.task is not None:
        return selected
    read_now: Collection[str] = ()
    if state.open is not None:
        read_now = state.open.replays.values()
    for replay in state.offsets.replays.values():
        if not selection.has_partition(replay.ssp):
            continue
        if replay.id in read_now:
            selected.being_read.append(replay)
        else:
            selected.idle.append(replay)
    return selected


def _describe_nothing(ssp: SystemStreamPartition, state: ApplicationState) -> str:
    """Return that no startpoint could be taken back at a partition, and what was applied last."""
    last = state.offsets.applied.get(ssp)
    if last is None:
        return f"{ssp}: there is no request"
    return (
        f"{ssp}: there is no request; {last.position} ({last.by}: {last.reason}) was applied at"
        f" {last.applied_at:%Y-%m-%d %H:%M} UTC, and only another startpoint moves the position"
        " again"
    )


# "lake.flights.3", "lake.flights.0-3,7", "lake.flights" for all its partitions, a
# SystemStreamPartition, or several.
Partitions: TypeAlias = str | SystemStreamPartition | Iterable[str | SystemStreamPartition]
Rows: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class AskedStartpoints:
    """The result of requesting startpoints, or of a preview: what each request would do if a run
    started now.

    `replaced` are the startpoints that the requests replace, which no run applies any more; a note
    names those that a batch has begun to apply. `written` is whether the requests are stored.
    `tables` says what records that are read again do to each remote and output table. `notes` say
    that an open batch comes first, which versions replays are joined with, which operators leave
    out records that are read again, and in a preview, how many results would be restated, and why
    the requests would be rejected.
    """

    previews: tuple[Preview, ...]
    replaced: tuple[PendingStartpoint, ...]
    written: bool
    tables: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def open_batch(self) -> int | None:
        """The number of the open batch that the next run repeats first; None without one."""
        numbers = (preview.open_batch for preview in self.previews)
        return next((number for number in numbers if number is not None), None)

    def describe_effects(self) -> list[str]:
        """Return a line for each replaced startpoint, each table, and each note."""
        replaced = "replaced" if self.written else "would be replaced"
        lines = [f"{replaced}: {held.summary()}" for held in self.replaced]
        for table, becomes in self.tables.items():
            lines.append(f"table {table}: {becomes}")
        return [*lines, *self.notes]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "written": self.written,
            "partitions": [preview.to_json() for preview in self.previews],
            "replaced": [held.summary() for held in self.replaced],
            "tables": dict(self.tables),
            "notes": list(self.notes),
        }


class StartOptions(TypedDict, total=False):
    """How partitions are read from another position.

    With `until`, that part is read again as a bounded replay, and the main position stays. `task`
    is one of the plan, or "dataset NAME"; by default every task that reads the partition.
    `on_unresolved` says what a run does if there is no offset: "fail", the default, or continue
    from the "checkpoint". `force` allows the table of a dataset to get older; at the changes by
    which results are restated, it allows any number of results, once. `versions` says what
    a replay's records are joined with: the entries valid at their time ("as-of", the default if the
    application has as-of joins), what is served then ("current", the default otherwise), or what
    they were joined with when they were first read ("recorded"), which is retained until the replay
    has ended.
    """

    until: Startpoint | None
    task: str | None
    on_unresolved: OnUnresolved
    force: bool
    versions: JoinVersions | None


@validated_methods
@dataclass(frozen=True)
class Startpoints:
    """The startpoints of one application in one lake: preview, request, list and take back.

        startpoints = Startpoints(app)
        startpoints.preview("lake.orders.1,3", StartpointOldest())
        startpoints.request("lake.orders.1,3", StartpointOldest(), by="ada", reason="a mistake")

    Requests go to the tasks of the application's plan, and expire as it says. None of these methods
    reads records: the next run of the application applies the requests.
    """

    app: SkipValidation[Application]
    lake: Lake = field(default_factory=open_lake, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.app, Application):
            return
        known = ""
        if isinstance(self.app, str):
            known = f": {describe_similar_names(self.lake, self.app)}"
        raise ConfigurationError(
            f"Startpoints: app is {self.app!r}, not an Application{known}.",
            "Pass the Application itself: its plan says which task reads what.",
            argument="app",
        )

    def preview(
        self,
        partitions: Partitions,
        position: Startpoint,
        *,
        replace: bool = False,
        **how: Unpack[StartOptions],
    ) -> AskedStartpoints:
        """Return what `request` would do with these arguments, and what it would replace; write
        nothing.

        A request that can't be applied has an `error` in its preview. `notes` say why `request`
        would reject others.
        """
        requests = self._build(partitions, position, "preview", "-", how)
        return request_startpoints(
            self.lake, self._systems, self.app, requests, replace=replace, dry_run=True
        )

    def request(
        self,
        partitions: Partitions,
        position: Startpoint,
        *,
        by: str,
        reason: str,
        replace: bool = False,
        **how: Unpack[StartOptions],
    ) -> AskedStartpoints:
        """Request that these partitions are read from `position` on, all or none; return what a run
        would do now.

        Each request is applied once, also if the same `position` was requested before. With `until`
        it is a bounded replay: that part is read again, and the main position stays. `StartOptions`
        has the other options.

        Replaces what is requested there and not applied. Raises ConfigurationError, and writes
        nothing, if no task reads a partition, if the position has no offset now, if startpoints are
        disabled, if recorded versions are gone, and, without `replace`, if a bounded replay would
        replace a startpoint that moves the position, or the reverse.
        """
        requests = self._build(partitions, position, by, reason, how)
        return request_startpoints(
            self.lake, self._systems, self.app, requests, replace=replace, dry_run=False
        )

    def list(self) -> dict[str, Rows]:
        """Return all startpoints by state, as rows of JSON values.

        The states are `waiting`, `expired`, `handed` to tasks, running `replays`, `applied`, and
        `unreadable` entries.
        """
        return collect_startpoints(self.lake, self._systems, self.app, self.lake.now())

    def take_back(
        self, partitions: Partitions, *, task: str | None = None, by: str, reason: str
    ) -> TakenBack:
        """Take back the startpoints at these partitions that are not applied, and stop bounded
        replays there.

        With `task`, only those that name this task or were handed to it; replays continue then. A
        startpoint that a batch has begun to apply stays, and is listed in `not_removed`. Raises
        CommitConflictError if a run commits at the same moment.
        """
        return take_back_startpoints(
            self.lake, self.app, self._expanded(partitions), task=task, by=by, reason=reason
        )

    def clear(self, *, task: str | None = None, by: str, reason: str) -> TakenBack:
        """Take back all startpoints that are not applied, also for streams that the application no
        longer reads, and stop all bounded replays.

        With `task`, only those that name this task or were handed to it; replays continue then. A
        startpoint that a batch has begun to apply stays, and is listed in `not_removed`. Raises
        CommitConflictError if a run commits at the same moment.
        """
        return take_back_startpoints(self.lake, self.app, None, task=task, by=by, reason=reason)

    @requested_once
    def _systems(self) -> Mapping[str, StreamSystem]:
        """The stream systems of the application, opened once."""
        return systems_for(self.app, lake=self.lake)

    def _build(
        self, partitions: Partitions, position: Startpoint, by: str, reason: str, how: StartOptions
    ) -> Sequence[StartpointRequest]:
        """Return the requests for a user's arguments."""
        return build_requests(self._expanded(partitions), position, by=by, reason=reason, **how)

    def _expanded(self, partitions: Partitions) -> tuple[SystemStreamPartition, ...]:
        """Return the partitions that a user names; raises ConfigurationError for none."""
        if isinstance(partitions, str | SystemStreamPartition):
            partitions = [partitions]
        named = [str(partition) for partition in partitions]
        if not named:
            step = "Name one, as in lake.flights.3, or a stream: lake.flights."
            raise ConfigurationError("no partition is named.", step, argument="partitions")
        return tuple(expand_partitions(self.app, self._systems, named))


def build_requests(
    ssps: Iterable[SystemStreamPartition],
    position: Startpoint,
    until: Startpoint | None = None,
    **wanted: Any,
) -> list[StartpointRequest]:
    """Return a request for each partition, created now; `wanted` are the other fields of
    StartpointRequest.

    Raises ConfigurationError for an invalid field.
    """
    check_startpoint(position, "position", "position")
    if until is not None:
        check_startpoint(until, "until", "until")
    requests = []
    for ssp in ssps:
        request = StartpointRequest(ssp=ssp, startpoint=position.reissue(), until=until, **wanted)
        requests.append(request)
    return requests


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

    Each replaces the startpoint at the same partition and task that is not applied yet. Raises
    ConfigurationError if no task reads a partition; if the startpoint to replace can't be read; if
    the position has no offset now, unless the request continues from the checkpoint; and, without
    `replace`, if a bounded replay would replace a startpoint that moves the position, or the
    reverse. With `dry_run` nothing is written, and the previews and notes have these errors; only
    for an application that disables startpoints or was renamed the error is raised all the same.
    """
    startpoints = open_startpoints(lake, app)
    startpoints.check_on()
    _check_ends(app, requests)
    stored = startpoints.read()
    state = application_state(lake, app.name)
    check_not_renamed(app.name, state)
    plan = plan_application(app, systems=systems) if app.inputs else None
    asked = AskedApplication(lake, systems, app, plan, state, stored.at)
    previews = preview_rewinds(asked, [preview_request(asked, request) for request in requests])
    previews = mark_blocked_previews(stored.unreadable, previews)
    planned = _plan_recorded_versions(asked, previews)
    previews = planned.previews
    waiting = [PendingStartpoint(request) for request in stored.waiting]
    pending = [*waiting, *iter_unapplied(stored.handed, state)]
    replaced = find_replaced(requests, pending, asked.readers.named_only)
    former = tuple(dict.fromkeys(held for held, _ in replaced))
    refusals = _find_refusals(previews, [] if replace else replaced)
    again = _list_ranges_read_again(previews)
    refusals += _find_irreplaceable_rows(asked, again)
    notes = [f"would be rejected: {refusal}" for refusal in refusals]
    notes += describe_open_batch(app.name, previews)
    if not dry_run:
        check_previews(previews)
        raise_first(refusals)
        startpoints.write_startpoints(_retain_recorded(lake, requests, planned.recorded))
        if former:
            first, *_ = requests
            ids = _list_ids_in_batches(former)
            log = BatchLog(lake, app.name)
            # No batch applies them any more, unless it has begun to.
            state = log.take_back(ids, by=first.by, reason=first.reason).state
    applied = _find_applied(lake, app, state, former)
    for held, why in applied.items():
        notes.append(f"applied before: {held.summary()}: {why}")
    notes += describe_versions(app, requests)
    if planned.recorded is not None:
        notes += planned.recorded.describe()
    if dry_run:
        notes += describe_restatements(asked, previews)
    read_again = find_streams_read_again(previews)
    notes += describe_state_effects(app, read_again)
    notes += _describe_lost_marks(asked, again)
    tables = describe_remote_tables(plan, read_again) | describe_output_tables(plan, read_again)
    not_applied = tuple(held for held in former if held not in applied)
    return AskedStartpoints(tuple(previews), not_applied, not dry_run, tables, tuple(notes))


def _find_refusals(
    previews: Sequence[Preview], replaced: Sequence[Replaced]
) -> list[ConfigurationError]:
    """Return why requests are rejected although a run could apply each of them; `replaced` are the
    startpoints that they must not replace by ones of another kind.
    """
    refusals = []
    for error in (empty_replay_error(previews), other_kind_error(replaced)):
        if error is not None:
            refusals.append(error)
    return refusals


def _list_ranges_read_again(previews: Iterable[Preview]) -> Ranges:
    """Return the offsets that the application would read again of its input streams."""
    ranges = {}
    for shown in previews:
        if shown.reads_again and shown.start is not None and shown.end is not None:
            ranges[shown.request.ssp] = OffsetRange(shown.start, shown.end)
    return ranges


def _find_irreplaceable_rows(
    asked: AskedApplication, ranges: Ranges
) -> Iterator[ConfigurationError]:
    """Yield the error for records in these ranges whose rows in an output table could not be
    replaced.
    """
    if asked.plan is None or not ranges:
        return
    streams = {name: asked.snapshot(name) for name in asked.app.inputs}
    writer = asked.state.names.writes_as or asked.app.name
    try:
        check_rows_replaceable(asked.app, asked.plan, streams, ranges, writer=writer)
    except ConfigurationError as error:
        yield error


def _describe_lost_marks(asked: AskedApplication, ranges: Ranges) -> Iterator[str]:
    """Yield a note for each remote table that applies records in these ranges again, because they
    were repartitioned since it has remembered their positions.
    """
    if asked.plan is None:
        return
    for table in asked.plan.tables:
        if table.marks is None:
            continue
        for name in table.again:
            if reads_rewritten(asked.snapshot(name), of_stream(ranges, name)):
                yield (
                    f"{table.operator}: {name} was repartitioned, so that its records have other"
                    f" offsets: table {table.table} applies those again that it had applied before"
                )


def _check_ends(app: Application, requests: Sequence[StartpointRequest]) -> None:
    """Raise ConfigurationError for a replay of changes by which results are restated."""
    for request in requests:
        stream = request.ssp.qualified_stream
        if request.until is not None and stream in app.restated:
            raise ConfigurationError(
                f"{request.ssp} has the changes by which results are restated, always up to the"
                " newest: until= can't end them.",
                "Leave until= out.",
                argument="until",
                stream=stream,
            )


def _retain_recorded(
    lake: Lake, requests: Sequence[StartpointRequest], recorded: RecordedPlan | None
) -> list[StartpointRequest]:
    """Write the plan of recorded versions, which retains them from here on. Return the requests,
    those for recorded versions with its id; all unchanged, and nothing written, without a plan.
    """
    if recorded is None:
        return list(requests)
    write_plan(lake, recorded)
    planned = []
    for request in requests:
        if request.versions == RECORDED:
            planned.append(with_fields(request, recorded=recorded.id))
        else:
            planned.append(request)
    return planned


def _find_applied(
    lake: Lake, app: Application, state: ApplicationState, former: Sequence[PendingStartpoint]
) -> dict[PendingStartpoint, str]:
    """Return those of the `former` startpoints, which requests would replace, that are applied all
    the same, with the reason.
    """
    applied: dict[PendingStartpoint, str] = {}
    if not former:
        return applied
    is_first_run = state == ApplicationState()  # before the first commit
    may_run = may_be_running(lake, app.name)
    for held in former:
        why = _why_applied(held, state, is_first_run=is_first_run, may_run=may_run)
        if why:
            applied[held] = why
    return applied


def _list_ids_in_batches(
    pending: Iterable[PendingStartpoint],
) -> list[tuple[SystemStreamPartition, str]]:
    """Return partition and id of the startpoints that batches apply: all but those of datasets."""
    return [(held.request.ssp, held.request.id) for held in pending if not held.is_of_dataset]


class _PlannedVersions(NamedTuple):
    """The previews of requests, and the plan for all those with recorded versions; None without
    such requests, or if one of all the requests can't be applied.
    """

    previews: list[Preview]
    recorded: RecordedPlan | None


def _plan_recorded_versions(asked: AskedApplication, previews: list[Preview]) -> _PlannedVersions:
    """Return one plan for all requests with recorded versions, so that the records of one batch
    are read together again.

    Nothing is written or retained yet. If no batch has read the records of a request, or versions
    are gone, its preview has an `error`.
    """
    spans = {}
    for shown in previews:
        if shown.is_refused:
            return _PlannedVersions(previews, None)
        request = shown.request
        is_recorded_replay = request.versions == RECORDED and request.until is not None
        if is_recorded_replay and shown.error is None:
            spans[request.ssp] = Span(str(shown.start), str(shown.end))
    if not spans:
        return _PlannedVersions(previews, None)
    planned = plan_recorded(asked, spans)
    completed = []
    for shown in previews:
        problem = planned.problems.get(shown.request.ssp)
        if problem is not None and shown.request.versions == RECORDED:
            completed.append(with_fields(shown, error=problem))
        else:
            completed.append(shown)
    return _PlannedVersions(completed, planned.plan)
