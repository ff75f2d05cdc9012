"""Fans out startpoint requests for a run, applies those for datasets, and decides where the run's
tasks start.

Every input partition gets a position, from the first of these that it has:

    startpoint       a request that was fanned out: its offset is found once, and stored before
                     anything is read
    checkpoint       the next offset to read, from the last commit of offsets; streams to reset lose
                     it
    default          the input's own setting, the stream's, the system's, else upcoming

A checkpoint is valid only for the stream that it was made of (not for a recreated one), and only if
the stream still has that offset.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.unbounded.rewind import rewind_table
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import DatasetManifest, as_unbounded
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    BatchLog,
    OffsetState,
    Replay,
    ResolvedStartpoint,
    application_state,
    check_not_renamed,
    list_application_states,
    replay_id,
)
from dagster_adjunct.orchestration.batch_log.intent import Offsets, ReadVersions
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.startpoints.fan_out import (
    FanOut,
    Requests,
    describe_disabled,
    describe_dropped,
    describe_unapplied,
)
from dagster_adjunct.orchestration.startpoints.positions import (
    CarriedOver,
    Plans,
    StreamSnapshot,
    carry_over_positions,
    check_same_streams,
    choose_first_positions,
    find_furthest,
    resolve_request,
)
from dagster_adjunct.orchestration.startpoints.request import (
    StartpointRequest,
    broadcast_task_error,
    choose_versions,
    dataset_task_name,
    find_reading_tasks,
    is_broadcast,
    list_rewindable_datasets,
    to_startpoint,
)
from dagster_adjunct.orchestration.startpoints.store import StartpointManager, open_startpoints
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.startpoint import resolve_startpoint_to_offset
from dagster_adjunct.resources.streams.system import (
    OffsetRange,
    StreamSystem,
    SystemStreamPartition,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DatasetOutcome:
    """The outcome of applying the startpoint requests for datasets.

    `failed` has, by dataset, the error of a request that was rejected or could not be applied: the
    dataset's requests stay, and it must not advance until somebody has taken them back or solved
    the problem. `fan_out` is the fan-out made for this; None if none was needed.
    """

    reports: tuple[AdvanceReport, ...] = ()
    failed: Mapping[str, errors.AdjunctError] = field(default_factory=dict)
    fan_out: FanOut | None = None

    def raise_failed(self) -> None:
        """Raise the first error, if any, with the others as its notes."""
        errors.raise_first(tuple(self.failed.values()))


def apply_dataset_startpoints(
    runtime: Runtime,
    app: Application,
    startpoints: StartpointManager,
    handed: FanOut,
    *,
    only: Collection[str] | None = None,
    on_report: Callable[[AdvanceReport], None] = lambda report: None,
) -> DatasetOutcome:
    """Rewind, or rebuild, the datasets that startpoints were fanned out to, each in one commit.
    Call it before the datasets advance.

    `handed` is the result of a fan-out; a dataset that was handed an unreadable entry fails. `only`
    names the datasets (None: all). Applied requests are removed from the fan-outs after the commit:
    if a run dies in between, the next one sees from the commit that they are applied. A failing
    dataset does not stop the others.
    """
    reports: list[AdvanceReport] = []
    failed: dict[str, errors.AdjunctError] = {}
    for text in describe_dropped(handed):
        _log.warning("%s", text)
    for dataset in list_rewindable_datasets(app, only):
        task = dataset_task_name(dataset.name)
        if task in handed.held:
            failed[dataset.name] = _unreadable_error(dataset, handed)
            continue
        requests = _drop_unresolved(runtime, dataset, handed.tasks.get(task, {}))
        if not requests:
            continue
        try:
            report = _rewind_dataset(runtime, dataset, requests)
        except errors.AdjunctError as error:
            failed[dataset.name] = error
            continue
        reports.append(report)
        applied = {ssp: request.id for ssp, request in requests.items()}
        startpoints.remove_fan_outs({task: applied})
        on_report(report)
    return DatasetOutcome(tuple(reports), failed)


def _unreadable_error(dataset: AdjunctDataset, handed: FanOut) -> errors.MalformedDocumentError:
    """Return the error for a dataset that was handed a startpoint that can't be read, with the
    reason of the first such startpoint.
    """
    task = dataset_task_name(dataset.name)
    ssps = handed.held[task]
    why = ""
    for entry in handed.unreadable:
        was_handed_out = bool(entry.at)
        is_for_partition = was_handed_out and entry.ssp in ssps
        if entry.at == task or is_for_partition:
            why = entry.error
            break
    stream = min(ssps).qualified_stream
    return errors.MalformedDocumentError(
        f"dataset {dataset.name!r} was handed a startpoint that can't be read, and does not"
        f" advance. {why}",
        f"Take it back (adjunct startpoint clear MODULE:APP {stream} --reason …), or upgrade.",
        dataset=dataset.name,
    )


def _drop_unresolved(
    runtime: Runtime,
    dataset: AdjunctDataset,
    handed: Mapping[SystemStreamPartition, StartpointRequest],
) -> dict[SystemStreamPartition, StartpointRequest]:
    """Return the requests without those that have no offset and continue from the checkpoint, of
    which the log warns. The rewind raises an error for others without an offset.
    """
    requests: dict[SystemStreamPartition, StartpointRequest] = {}
    for ssp, request in handed.items():
        try:
            if request.on_unresolved == "checkpoint":  # called for its error
                resolve_startpoint_to_offset(runtime.systems[ssp.system], ssp, request.startpoint)
        except errors.PermanentError as error:
            _log.warning(
                "%s: dataset %s continues without its startpoint: %s", ssp, dataset.name, error
            )
        else:
            requests[ssp] = request
    return requests


def _rewind_dataset(runtime: Runtime, dataset: AdjunctDataset, requests: Requests) -> AdvanceReport:
    """Rewind the table of a dataset to where these requests begin, in one commit. Raises
    DatasetError for a request with an end.
    """
    positions = {}
    reasons = []
    force = set()
    for ssp, request in requests.items():
        if request.until is not None:
            raise errors.DatasetError(
                f"dataset {dataset.name!r}: the startpoint of {ssp} has an end (until), and the"
                " table of a dataset can't be replayed: it always holds what its stream says up to"
                " its position.",
                "Take the request back, and request a startpoint without an end.",
                dataset=dataset.name,
            )
        positions[ssp] = to_startpoint(request)
        reasons.append(f"{request.reason} (asked for by {request.by})")
        if request.force:
            force.add(ssp)
    reason = "; ".join(dict.fromkeys(reasons))
    return rewind_table(runtime, dataset, positions=positions, reason=reason, force=force)


def fan_out_requests(
    startpoints: StartpointManager,
    systems: Mapping[str, StreamSystem],
    app: Application,
    plan: ExecutionPlan | None,
    offsets: OffsetState,
) -> FanOut:
    """Fan the waiting requests out to the plan's tasks and to rewindable datasets; return what each
    has to apply.

    `offsets` says which requests the batch log has applied. Sensors and runs at their start may
    call this at the same time. If the application disables startpoints, requests stay as they are,
    and are returned as `disabled`. If it has neither inputs nor rewindable datasets, they also
    stay, and the result is empty.
    """
    if not app.startpoints:
        stored = startpoints.read()
        disabled = list(stored.waiting)
        for requests in stored.handed.values():
            disabled += requests.values()
        return FanOut(disabled=tuple(disabled))
    readers = find_reading_tasks(app, plan, systems)
    if not readers.tasks:
        return FanOut({})
    dataset_of = {
        dataset_task_name(dataset.name): dataset.name for dataset in list_rewindable_datasets(app)
    }

    @cache
    def read_manifest(dataset: str) -> DatasetManifest | None:
        """Return the newest manifest of a dataset, read once."""
        _, manifest, _ = DatasetLog(startpoints.lake, dataset).read_or_newest()
        return manifest

    def taken(task: str, request: StartpointRequest) -> bool:
        """Return whether a commit, of the batch log or of the dataset, has applied a request for
        this task.
        """
        if task not in dataset_of:
            return offsets.has_taken(request.ssp, request.id)
        manifest = read_manifest(dataset_of[task])
        if manifest is None:
            return False
        return as_unbounded(manifest).has_applied(str(request.ssp), request.id)

    return startpoints.fan_out(
        readers.tasks, named_only=readers.named_only, taken=taken, complete=True
    )


def fan_out_for_run(runtime: Runtime, app: Application, plan: ExecutionPlan | None) -> FanOut:
    """Fan out at the start of a run, whose datasets and tasks apply what they are handed here."""
    startpoints = open_startpoints(runtime.lake, app)
    offsets = application_state(runtime.lake, app.name).offsets
    return fan_out_requests(startpoints, runtime.systems, app, plan, offsets)


@dataclass(slots=True)
class _Resolving:
    """Finds the offsets of the requests that the tasks of a run were handed: `startpoints` with
    their offsets, and `replays` that begin.

    An offset that an earlier run has stored, and no batch has applied, is kept (`known`); others
    are looked up in their stream. Replays of recorded versions get their offsets from `plans`,
    which has an error for a plan that can't be used.

    `done` has, by task and partition, the id of each request that was applied by an earlier commit,
    or will be by the commit that stores this: it is to be removed from the fan-out. `messages`
    describe offsets that were looked up now, `continued` requests without one.
    """

    app: Application
    streams: Mapping[str, StreamSnapshot]
    known: OffsetState
    plans: Plans
    now: datetime
    startpoints: dict[SystemStreamPartition, ResolvedStartpoint] = field(default_factory=dict)
    replays: dict[SystemStreamPartition, Replay] = field(default_factory=dict)
    done: dict[str, Offsets] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    continued: list[str] = field(default_factory=list)

    def resolve(self, tasks: Iterable[str], fan_out: FanOut) -> None:
        """Find the offsets of the requests that these tasks were handed.

        Raises an error for a request without an offset, unless it then continues from the
        checkpoint.
        """
        waiting = self._list_waiting(tasks, fan_out)
        # Several tasks have the same partition only if the input is broadcast.
        newest: dict[SystemStreamPartition, StartpointRequest] = {}
        for _, request in waiting:
            other = newest.get(request.ssp)
            if other is None or request.sequence >= other.sequence:
                newest[request.ssp] = request
        for _, request in sorted(newest.items()):
            self._resolve(request)
        # Requests that a newer one replaces are done too, and those of replays, which are stored as
        # replays from here on.
        for task, request in waiting:
            is_replaced = request.sequence < newest[request.ssp].sequence
            if request.ssp in self.replays or is_replaced:
                self._mark_done(task, request)

    def _list_waiting(
        self, tasks: Iterable[str], fan_out: FanOut
    ) -> list[tuple[str, StartpointRequest]]:
        """Return the requests that need an offset, each with the task that was handed it.

        Those that a commit has applied are marked as done. One for a single task of a broadcast
        input can't be applied: it continues from the checkpoint, or its error is raised.
        """
        waiting = []
        for task in tasks:
            for request in fan_out.tasks.get(task, {}).values():
                is_for_one = request.task is not None
                if self.known.has_taken(request.ssp, request.id):
                    self._mark_done(task, request)
                elif not is_for_one or not is_broadcast(self.app, request.ssp):
                    waiting.append((task, request))
                elif request.on_unresolved == "fail":
                    raise broadcast_task_error(request)
                else:
                    self._continue(request, broadcast_task_error(request))
        return waiting

    def _mark_done(self, task: str, request: StartpointRequest) -> None:
        """Add a request that a task was handed to `done`."""
        self.done.setdefault(task, {})[request.ssp] = request.id

    def _resolve(self, request: StartpointRequest) -> None:
        """Find the offset of a request, which begins a replay or moves the position."""
        ssp = request.ssp
        stream = self.streams[ssp.qualified_stream]
        before = self.known.resolved.get(ssp)
        if before is not None and before.is_of(request.id, stream.info.identity):
            self.startpoints[ssp] = before
            return
        start = self._look_up(stream, request)
        if isinstance(start, Replay):
            self.replays[ssp] = start
            offset = start.start
        elif start is not None:
            self.startpoints[ssp] = start
            offset = start.offset
        else:  # the partition continues from the checkpoint
            return
        self.messages.append(
            f"{ssp}: starts at {start.position}, which is offset {offset} ({start.by}:"
            f" {start.reason})"
        )

    def _look_up(
        self, stream: StreamSnapshot, request: StartpointRequest
    ) -> ResolvedStartpoint | Replay | None:
        """Return the request with its offset; None if it has none, and continues from the
        checkpoint.

        If the request has on_unresolved="fail", an error with the reason and the request's author
        is raised instead."""
        try:
            return resolve_request(
                stream,
                request,
                versions=choose_versions(self.app, request),
                now=self.now,
                epoch=self.known.epochs.next_of(request.ssp),
                plans=self.plans,
            )
        except errors.PermanentError as error:
            if request.on_unresolved != "fail":
                self._continue(request, error)
                return None
            what = "can't be applied" if request.versions is not None else "has no offset"
            raise error.reworded(
                f"the startpoint of {request.by} ({request.reason}) at {request.ssp} {what}:"
                f" {error.problem}",
                f"{error.next_step} Or take it back: adjunct startpoint clear MODULE:APP"
                f" {request.ssp} --reason …. With --on-unresolved checkpoint it would have"
                " continued from the checkpoint.",
            ) from error

    def _continue(self, request: StartpointRequest, why: errors.AdjunctError) -> None:
        """Report that a request without an offset continues from the checkpoint."""
        self.continued.append(
            f"{request.ssp}: continues from its checkpoint ({request.by}: {request.reason}): {why}"
        )

    def list_done(self) -> set[str]:
        """Return the ids of the replays that the requests in `done` start."""
        ids: set[str] = set()
        for requests in self.done.values():
            for ssp, request_id in requests.items():
                ids.add(replay_id(ssp, request_id))
        return ids


@dataclass(frozen=True, slots=True)
class RunStart:
    """The start of a run; its `state` is to be stored before anything is read.

    `done` has, by task and partition, the id of each request that was applied by an earlier commit,
    or is by the commit of `state`: after that commit it is to be removed from the fan-out.
    `carried` has a note for each repartitioned stream to which the checkpoint was carried over.
    Partitions in `held` are not read in this run, because an unreadable startpoint was handed out
    for them. `messages` has a line for each request that was resolved or is left.
    """

    state: ApplicationState
    done: Mapping[str, Offsets]
    carried: tuple[str, ...]
    held: frozenset[SystemStreamPartition]
    messages: tuple[str, ...]


def start_run(
    app: Application,
    streams: Mapping[str, StreamSnapshot],
    tasks: Iterable[str],
    fan_out: FanOut,
    state: ApplicationState,
    now: datetime,
    plans: Plans,
    *,
    is_first: bool,
) -> RunStart:
    """Find the offsets of the startpoints that were fanned out to these tasks, and give every
    partition a position.

    Streams are read only to find offsets of times; all else is decided by the snapshots. `plans`
    are those that requests for recorded versions name. `is_first` is whether this is the first step
    of its run: only that resets inputs.

    Raises OffsetOutOfRangeError and ConfigurationError for a startpoint that can't be resolved (it
    is not consumed), for a recreated stream, and for new partitions of a keyed stream;
    VersionDiscardedError if a version that a replay needs is gone.
    """
    carried = _carry_over(app, streams, state)
    state = carried.state
    known = state.offsets
    resolved = _Resolving(app, streams, known, plans, now)
    resolved.resolve(tasks, fan_out)
    reset = {source.stream for source in app.inputs.values() if source.reset_offset}
    check_same_streams(app, streams, known, resolved.startpoints, reset)
    checkpoint = state.checkpoint | choose_first_positions(
        app, streams, state, resolved.startpoints, is_first=is_first
    )
    moved = {}
    for ssp, start in checkpoint.items():
        if start != state.checkpoint.get(ssp):
            moved[ssp] = start
    identities: dict[str, str] = {}
    times = state.times
    for name, stream in streams.items():
        if stream.info.identity:
            identities[name] = stream.info.identity
        if stream.was_recreated(known):
            times = times.without_stream(name)
    begun = known.begun
    if app.startpoints:  # of other replays no request is fanned out any more
        begun &= resolved.list_done()
    offsets = known.model_copy(
        update={
            "resolved": dict(resolved.startpoints),
            "begun": begun,
            "streams": identities,
            "joined": _keep_joined(app, known),
            "furthest": find_furthest(state, streams, [*moved, *resolved.startpoints]),
        }
    ).with_replays(resolved.replays.values())
    offsets = _add_skipped(offsets, state, streams, moved)
    held: set[SystemStreamPartition] = set()
    for task in tasks:
        held.update(fan_out.held.get(task, ()))
    return RunStart(
        state=state.model_copy(
            update={"checkpoint": checkpoint, "offsets": offsets, "times": times}
        ),
        done=resolved.done,
        carried=carried.notes,
        held=frozenset(held),
        messages=(
            *resolved.messages,
            *resolved.continued,
            *carried.notes,
            *describe_disabled(fan_out),
            *_describe_paused(app, offsets),
            *describe_dropped(fan_out),
            *describe_unapplied(fan_out),
        ),
    )


def _carry_over(
    app: Application, streams: Mapping[str, StreamSnapshot], state: ApplicationState
) -> CarriedOver:
    """Return the state with its positions carried over to streams that were repartitioned; with one
    note more if that are inputs whose results are restated.
    """
    carried = carry_over_positions(state, streams)
    before = state.offsets.streams
    after = carried.state.offsets.streams
    is_carried = any(after.get(name) != before.get(name) for name in app.inputs)
    if not is_carried or not app.restated:
        return carried
    note = "results of records from before that follow no changes of datasets"
    return CarriedOver(carried.state, (*carried.notes, note))


def _keep_joined(app: Application, known: OffsetState) -> dict[str, tuple[ReadVersions, ...]]:
    """Return the joined versions of those datasets whose changes results still follow."""
    followed = {dataset.name for dataset in app.restated.values()}
    return {name: read for name, read in known.joined.items() if name in followed}


def _add_skipped(
    offsets: OffsetState,
    state: ApplicationState,
    streams: Mapping[str, StreamSnapshot],
    moved: Offsets,
) -> OffsetState:
    """Return the `offsets` with the spans that the main position skips where it is `moved` to these
    offsets. `state` is the one before.

    In a recreated stream, it skips all before its new offset, and what it skipped in the former
    stream is forgotten.
    """
    recreated = {name for name, stream in streams.items() if stream.was_recreated(state.offsets)}
    skipped = dict(offsets.skipped)
    before = {}
    for ssp in moved:
        if ssp.qualified_stream in recreated:
            before[ssp] = "0"
            skipped.pop(ssp, None)
        else:
            before[ssp] = state.checkpoint.get(ssp, "0")
    nothing_read = {ssp: OffsetRange(start, start) for ssp, start in moved.items()}
    return offsets.model_copy(update={"skipped": skipped}).with_reading(before, nothing_read)


def _describe_paused(app: Application, offsets: OffsetState) -> list[str]:
    """Return a line for each replay of an application that disables startpoints."""
    lines: list[str] = []
    if app.startpoints:
        return lines
    for replay in offsets.replays.values():
        lines.append(
            f"{replay.ssp}: startpoints are disabled: the replay from {replay.position} stays at"
            f" offset {replay.next} ({replay.by}: {replay.reason})"
        )
    return lines


# The kinds of outputs that another application may have written.
_SHARED = ("stream", "table")
_SHOWN = 5


def describe_other_writers(lake: Lake, app: Application) -> list[str]:
    """Return notes for the plan on why a run would be rejected; empty if it would not be.

    A run is rejected if the application was renamed; and if it has never run, another one has
    written its outputs, and no startpoints say where it begins.
    """
    if not lake.exists():
        return []
    commit, state = BatchLog(lake, app.name).read()
    renamed_to = state.names.renamed_to
    if renamed_to is not None:
        return [
            f"application {app.name!r} was renamed {renamed_to!r}: no run starts under its"
            " former name."
        ]
    if commit is not None:
        return []
    notes = []
    for writer in _find_writers(lake, app, list_application_states(lake)):
        notes.append(
            f"application {app.name!r} has never run, and {writer.describe()} (adjunct app rename"
            f" {writer.name} {app.name} --reason …)."
        )
    return notes


def check_first_run(lake: Lake, app: Application, *, adopt: bool = False) -> str | None:
    """Return the name by which tables know a renamed application; None for others.

    Raises ConfigurationError under its former name, and for a first run that would write records
    again.

    A first run would write them again if another application has written the same outputs from the
    same inputs. It is allowed if startpoints say where each of the partitions begins that the other
    one has read, or with `adopt`.
    """
    commit, state = BatchLog(lake, app.name).read()
    check_not_renamed(app.name, state)
    if commit is not None:
        return state.names.writes_as
    others = list_application_states(lake)
    for name, other in others.items():
        if other.names.renamed_to == app.name:
            raise errors.ConfigurationError(
                f"application {name!r} is being renamed {app.name!r}, and the rename has not"
                " finished.",
                f"Finish it: adjunct app rename {name} {app.name} --reason ….",
                application=app.name,
            )
    if adopt:
        return None
    writer = next(_find_writers(lake, app, others), None)
    if writer is None:
        return None
    stream = min(writer.read).qualified_stream
    raise errors.ConfigurationError(
        f"application {app.name!r} has never run, and {writer.describe()}.",
        "If it is the same application, take over its log: adjunct app rename"
        f" {writer.name} {app.name} --reason …. Otherwise set where it begins (adjunct startpoint"
        f" set MODULE:APP {stream} --upcoming --reason …), or let it add all records to the"
        " existing outputs: --adopt (adopt=True; adopt in the config of the Dagster op).",
        application=app.name,
        stream=stream,
    )


@dataclass(frozen=True, slots=True)
class _Writer:
    """An application that has `written` outputs of another one, and `read` partitions that this
    one reads for them.

    If it reads several streams, it is not known from which of them an output was made.
    """

    name: str
    state: ApplicationState
    written: list[str]
    read: list[SystemStreamPartition]

    def describe(self) -> str:
        """Return what it has read and written, and what a run of this application would do."""
        streams = ", ".join(dict.fromkeys(ssp.qualified_stream for ssp in self.read))
        shown = ", ".join(self.written[:_SHOWN])
        if len(self.written) > _SHOWN:
            shown += ", …"
        streams_read = {ssp.qualified_stream for ssp in self.state.checkpoint}
        if len(streams_read) == 1:
            done = f"written {shown} from {streams}"
            effect = "would read and write these records again"
        else:
            done = f"read {streams}, and written {shown}"
            effect = "may read and write the same records again"
        return (
            f"application {self.name!r} has {done} ({self.state.batch:,} batches): a run {effect}"
        )


def _find_writers(
    lake: Lake, app: Application, others: Mapping[str, ApplicationState]
) -> Iterator[_Writer]:
    """Yield each application that has written outputs of `app` and read inputs of `app`.

    One is left out if startpoints of `app` say where all partitions begin that it has read.
    Requests with an end (`until`) only replay: they move no beginning.
    """
    found = list(_list_writers(app, others))
    if not found:
        return
    stored = open_startpoints(lake, app).read()
    requests = list(stored.waiting)
    for of_task in stored.handed.values():
        requests += of_task.values()
    asked = {request.ssp for request in requests if request.until is None}
    for writer in found:
        if not asked.issuperset(writer.read):
            yield writer


def _list_writers(app: Application, others: Mapping[str, ApplicationState]) -> Iterator[_Writer]:
    """Yield each of the other applications that has written outputs of `app` and read inputs of
    `app`.
    """
    inputs_of = {}
    for node, streams in find_input_streams(app).items():
        if node.kind in _SHARED:
            inputs_of[node.name] = streams
    for name, state in others.items():
        written = _find_written(state, inputs_of)
        read_for_them = frozenset[str]().union(*(inputs_of[output] for output in written))
        read = sorted(ssp for ssp in state.checkpoint if ssp.qualified_stream in read_for_them)
        if read and name != app.name:
            yield _Writer(name, state, written, read)


def _find_written(state: ApplicationState, inputs_of: Mapping[str, frozenset[str]]) -> list[str]:
    """Return which outputs an application has written, although it reads one of the streams that
    the output is made of. `inputs_of` has these streams by output.
    """
    written = []
    for output, streams in sorted(inputs_of.items()):
        has_read = any(map(state.has_position_in, streams))
        if has_read and _has_written(state, output):
            written.append(output)
    return written


def _has_written(state: ApplicationState, output: str) -> bool:
    """Whether an application has written this output."""
    # Totals are by output, except "lost_offsets", which are by input: an output may have an input's
    # name.
    for counter, number in state.totals.get(output, {}).items():
        if number and counter != "lost_offsets":
            return True
    return False


def find_input_streams(app: Application) -> dict[LineageNode, frozenset[str]]:
    """Return, by asset that the application writes, the input streams whose records reach it."""
    read: dict[str, frozenset[str]] = {}  # by operator
    found: dict[LineageNode, frozenset[str]] = {}
    for operator in app.operators:
        streams = frozenset[str]()
        for parent in operator.inputs:
            streams |= read[parent]
        if operator.spec.reads is not None:
            streams |= {operator.spec.reads}
        read[operator.id] = streams
        target = operator.spec.target(app)
        if target is not None:
            found[target] = found.get(target, frozenset()) | streams
    return found
