"""When runs are launched: for new records, startpoints, delivered versions, stale tables, and after
failures.

Sensors and conditions of assets ask the same launchers. Decisions are pure functions over what a
tick read (`decide_launch`, `decide_restart`).
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import dagster as dg
from dagster import SkipReason as Skip
from pydantic import PositiveInt

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, BoundedDataset, QuerySource
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import to_dagster_name
from dagster_adjunct.orchestration.batch_log.run_lease import LONGEST_STAY, ask_to_end, asked_key
from dagster_adjunct.orchestration.code_location.dagster_internals import NOT_FINISHED_STATUSES
from dagster_adjunct.orchestration.code_location.dataset_assets import (
    DatasetAsset,
    ensure_partitions,
)
from dagster_adjunct.orchestration.code_location.failures import wait_after_failure
from dagster_adjunct.orchestration.code_location.metadata import join_shortened
from dagster_adjunct.orchestration.code_location.sensor_ticks import (
    Backlog,
    Deadline,
    LaunchedJob,
    Launcher,
    StreamFinding,
    StreamScan,
    Tick,
    backoff_seconds,
    digest,
    scan_ages,
    scan_streams,
)
from dagster_adjunct.orchestration.operators.waiting import waits_by_input
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    PermanentError,
    RestatementError,
)
from dagster_adjunct.resources.file_streams.overview import is_of_files
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.startpoint import describe_startpoint
from dagster_adjunct.resources.streams.system import StreamSystem, SystemStreamPartition
from dagster_adjunct.resources.times import describe_span, subtract_span
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState
    from dagster_adjunct.orchestration.startpoints.fan_out import FanOut, Requests
    from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
    from dagster_adjunct.orchestration.startpoints.store import StartpointManager

# The tag of a run has another value if the code location has been loaded again since it was
# launched.
_LOADED_TAG = "adjunct/loaded"
_LOADED = uuid4().hex


@validated
@dataclass(frozen=True, slots=True)
class LaunchWhen:
    """Launch a run when this many `records` are unread, or the first unread one of a partition is
    older than `age`.

    With both, whichever comes first; with neither, one record is enough. Without `age`, fewer
    records than `records` wait without limit. With `stay`, a run that has caught up stays for that
    long, and goes on when there is something new; it ends earlier if the code location is loaded
    again.
    """

    records: "PositiveInt | None" = None
    age: timedelta | None = None
    stay: timedelta | None = None

    def __post_init__(self) -> None:
        _check_span("age", self.age, "how long a record may wait", timedelta.max)
        _check_span("stay", self.stay, "how long a run stays", LONGEST_STAY)

    def enough(self, lag: int) -> bool:
        """Whether `lag` unread records are enough to launch a run, whatever their age."""
        if self.records is not None:
            return lag >= self.records
        waits_for_age = self.age is not None
        return lag > 0 and not waits_for_age

    def __str__(self) -> str:
        thresholds = []
        if self.records:
            thresholds = [f"{self.records:,} records"]
        thresholds += [f"one older than {self.age}"] if self.age else []
        return " or ".join(thresholds) or "1 record"

    def run_config(self, application: str) -> dict[str, Any]:
        """Return the run configuration of a run that is launched: how long it stays; empty
        without `stay`.
        """
        if self.stay is None:
            return {}
        config = {"follow_seconds": self.stay.total_seconds()}
        return {"ops": {to_dagster_name(f"{application}_step"): {"config": config}}}


def _check_span(name: str, span: timedelta | None, what: str, longest: timedelta) -> None:
    """Raise ConfigurationError if an argument of LaunchWhen is no positive time."""
    if span is None:
        return
    if not isinstance(span, timedelta) or not timedelta(0) < span <= longest:
        raise ConfigurationError(
            f"LaunchWhen has {name}={describe_span(span)}: expected a positive timedelta of at most"
            f" {longest}.",
            f"Say {what}, for example LaunchWhen({name}=timedelta(minutes=10)).",
            argument=name,
        )


def launch_rules(
    given: "LaunchWhen | Mapping[str, LaunchWhen] | None", applications: tuple[str, ...]
) -> dict[str, LaunchWhen]:
    """Return the launch rule of each application. Raises ConfigurationError for an unknown
    application.
    """
    if given is None or isinstance(given, LaunchWhen):
        return dict.fromkeys(applications, given or LaunchWhen())
    unknown = sorted(given.keys() - set(applications))
    if unknown:
        raise ConfigurationError(
            f"launch_when names an unknown application {unknown[0]!r}; the applications:"
            f" {', '.join(applications)}.",
            "Correct the name.",
            argument="launch_when",
        )
    return {name: given.get(name, LaunchWhen()) for name in applications}


# Dagster ends a tick after a minute; the rest is for checking datasets and storing the cursor.
TICK_SECONDS = 40.0


def decide_launch(
    backlog: Backlog,
    rule: LaunchWhen,
    unfinished: Sequence[str],
    waiting: Callable[[], Sequence[str]],
) -> str | Skip:
    """Return why a run is needed, or skip it while too few records wait or a dataset has to be
    built first.

    `unfinished` describes work that earlier runs left, which needs a run even without new records.
    `waiting` returns which datasets have to be built.
    """
    scan = backlog.scan
    due = (*unfinished, *scan.due)
    if not scan.lag and not due:
        return Skip("No new records.")
    reasons = []
    if scan.lag:
        reasons = [f"{scan.lag:,} new records"]
    if backlog.old:
        reasons.append(f"{backlog.old} holds one older than {rule.age}")
    what = "; ".join([*reasons, *due])
    is_enough = bool(due or backlog.old) or rule.enough(scan.lag)
    if not is_enough:
        return Skip(f"{what}; a run is launched at {rule}.")
    held = waiting()
    if held:
        return Skip(f"{what}; {'; '.join(held)}.")
    return what


def new_records_launcher(
    app: Application,
    job: LaunchedJob,
    assets: Collection[dg.AssetKey],
    outputs: Collection[dg.AssetKey],
    rule: LaunchWhen,
) -> Launcher:
    """Return the launcher of `job` for enough unread records in the input streams.

    `assets` are those that the job materializes; while a run of one of them is in progress, none is
    launched. A run that stays is asked to end if another run is to write one of the `outputs` or
    waits for its pools, or if the code location has been loaded again.
    """

    def evaluate(tick: Tick) -> dg.RunRequest | Skip:
        active = tick.active_runs()
        if active:
            return _wait_for_run(tick, app, active, outputs, stays=rule.stay is not None)
        who = tick.lease_holder(app.name)
        if who:
            return Skip(f"The application is being run by {who}.")
        decision = _request_for_records(tick, app, outputs, rule)
        if isinstance(decision, Skip) and not tick.lake.exists():
            # Perhaps because its URL is mistyped.
            return Skip(f"{decision.skip_message} There is no lake at {tick.lake.url}.")
        return decision

    stays = ""
    if rule.stay:
        stays = f" The run stays for {rule.stay}."
    text = f"Runs {app.name} when its input streams have new records: {rule}.{stays}"
    name = f"{to_dagster_name(app.name)}_new_records"
    return Launcher(name, job, assets, text, evaluate, "new_records", outputs)


def _wait_for_run(
    tick: Tick,
    app: Application,
    active: Sequence[dg.DagsterRun],
    outputs: Collection[dg.AssetKey],
    *,
    stays: bool,
) -> Skip:
    """Return that the tick is skipped, because runs are in progress (`active`). One of them that
    stays is asked to end if another run waits for it, or if the code location was loaded again.

    `stays` is whether runs of this application's launcher stay.
    """
    running = []  # those that write the outputs
    for run in active:
        if tick.is_of(run, outputs) and _selects(run, outputs):
            running.append(run)
    # Only runs that stay have the tag.
    loaded_before = [run for run in running if run.tags.get(_LOADED_TAG, _LOADED) != _LOADED]
    if loaded_before:
        who = "the code location, which was loaded again,"
    elif stays and (len(running) > 1 or tick.waits_for_pool(running)):
        who = "another run in Dagster"
    else:
        return Skip(f"A run is already in progress.{tick.describe_waiting(active)}")
    ask_to_end(tick.lake.store, asked_key(tick.lake, app.name), who)
    return Skip(
        f"A run is already in progress; it was asked to end: {who} asks for the application."
    )


def _request_for_records(
    tick: Tick, app: Application, outputs: Collection[dg.AssetKey], rule: LaunchWhen
) -> dg.RunRequest | Skip:
    """Measure what is unread, and request a run if there is enough. If the tick's time is over
    before that, remember how far it has come, for the next tick.
    """
    from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
    from dagster_adjunct.orchestration.planner.planner import systems_for
    from dagster_adjunct.orchestration.startpoints.due_restatements import describe_due
    from dagster_adjunct.orchestration.step import progress
    from dagster_adjunct.orchestration.step.waiting import describe_held

    lake = tick.lake
    now = lake.now()
    systems = systems_for(app, lake=lake)
    deadline = Deadline(tick.began + TICK_SECONDS, time.monotonic)
    commit, stored = BatchLog(lake, app.name).read()
    state = progress.ignore_disabled_startpoints(app, stored)
    scan = StreamScan(of=commit.id if commit else "")
    unfinished_scan = tick.cursor.scan  # of the tick before, which ran out of time
    if unfinished_scan is not None and unfinished_scan.of == scan.of:
        scan = unfinished_scan
    records = partial(_application_runs, tick, outputs, now - _LONGEST_WAIT)
    refused = _find_refused_restatement(tick, app, records)

    def restates(stream: str) -> str:
        return "" if refused else describe_due(lake, systems, app, state, stream)

    backlog = measure_backlog(systems, app, state, scan, rule, now, deadline, restates)
    scan = backlog.scan
    if not backlog.complete:
        tick.remember(scan=scan)
        seen = ", ".join(filter(None, [f"{len(scan.streams)} streams", scan.young]))
        return Skip(
            f"The tick's {TICK_SECONDS:.0f} s are over after {seen}; the next tick continues there."
        )
    tick.remember(scan=None)

    unfinished = progress.describe_unfinished(state)

    def waiting() -> tuple[str, ...]:
        """Return which datasets have to be built before the run, or before its first record."""
        delayed = progress.describe_waiting_datasets(lake, systems, app)
        if delayed or unfinished or scan.due:
            return delayed
        unread = _list_unread(systems, app, state)
        return describe_held(systems, lake, app, unread, state.waits.held)

    what = decide_launch(backlog, rule, unfinished, waiting)
    if isinstance(what, Skip):
        return Skip(f"{what.skip_message} {refused}") if refused else what
    failed = "" if refused else wait_after_failure(tick, app, records())
    if failed:
        return Skip(f"{what}; {failed}")
    tags = {"adjunct/lag": str(scan.lag)}
    if rule.stay:
        tags[_LOADED_TAG] = _LOADED
    return tick.request_run(
        f"{app.name}:{lake.id}",
        what,
        {
            "position": progress.position_to_json(app, state),
            "ends": scan.ends,
            "due": scan.due,
            "refused": refused,
        },
        tags=tags,
        run_config=rule.run_config(app.name),
    )


def _find_refused_restatement(
    tick: Tick, app: Application, records: Callable[[], Sequence[dg.RunRecord]]
) -> str:
    """Return why results are not restated until something changes, "" if they may be: the newest
    run has failed with a permanent RestatementError.

    That run has read its inputs before it failed, so new records are still a reason for a run.
    """
    if not app.restated:
        return ""
    failed = wait_after_failure(tick, app, records())
    return failed if tick.cursor.error == RestatementError.__name__ else ""


def _list_unread(
    systems: Mapping[str, StreamSystem], app: Application, state: "ApplicationState"
) -> dict[SystemStreamPartition, str]:
    """Return the next offset of each partition with unread records; empty if the application has
    no join that waits for its dataset.
    """
    from dagster_adjunct.orchestration.step import progress

    unread: dict[SystemStreamPartition, str] = {}
    if not waits_by_input(app.operators):
        return unread
    for name, source in app.inputs.items():
        system = progress.snapshot_system(systems, name)
        unread |= progress.measure_stream_progress(system, source, state).unread
    return unread


def _selects(run: dg.DagsterRun, assets: Collection[dg.AssetKey]) -> bool:
    """Whether a run makes one of these assets; one without a selection makes all of its job's."""
    return not run.asset_selection or any(key in assets for key in run.asset_selection)


def measure_backlog(
    systems: Mapping[str, StreamSystem],
    app: Application,
    state: "ApplicationState",
    scan: StreamScan,
    rule: LaunchWhen,
    now: datetime,
    deadline: Deadline,
    restates: Callable[[str], str] = lambda stream: "",
) -> Backlog:
    """Continue a scan of the application's streams until it is complete or the deadline has passed.

    `restates` returns why a run is needed to follow the changes of a dataset, "" if none is.

    Ages of records are looked up only if the rule has an `age` and nothing else is a reason for a
    run.
    """
    from dagster_adjunct.orchestration.step import progress

    feeding = progress.list_dataset_streams(app)
    opened = cache(partial(progress.snapshot_system, systems))

    def visit(stream: str) -> StreamFinding:
        """Return what is unread of an input, and the ends of a stream that feeds a dataset."""
        if stream in app.restated:
            return StreamFinding(due=restates(stream))
        ends = ""
        if stream in feeding:
            ends = digest(progress.read_stream_ends(opened(stream), stream))
        if stream not in app.inputs:
            return StreamFinding(ends=ends)
        found = progress.measure_stream_progress(opened(stream), app.inputs[stream], state)
        return StreamFinding(ends=ends, lag=found.lag, due=found.due)

    backlog = scan_streams(
        scan,
        dict.fromkeys([*app.inputs, *feeding, *app.restated]),
        partial(_visit_files, visit),
        deadline,
    )
    scan = backlog.scan
    is_due = bool(scan.due) or rule.enough(scan.lag) or bool(progress.describe_unfinished(state))
    if rule.age is None or not backlog.complete or not scan.lag or is_due:
        return backlog
    oldest_ms = int(subtract_span(now, rule.age).timestamp() * 1000)

    def unread(stream: str) -> Mapping[SystemStreamPartition, str]:
        return progress.measure_stream_progress(opened(stream), app.inputs[stream], state).unread

    def is_old(ssp: SystemStreamPartition, start: str) -> bool:
        system = opened(ssp.qualified_stream)
        return system.compare(start, system.offset_for_timestamp(ssp, oldest_ms)) < 0

    return scan_ages(scan, unread, is_old, deadline)


def _visit_files(visit: Callable[[str], StreamFinding], stream: str) -> StreamFinding:
    """Return what `visit` finds of a stream. If files of a stream can't be admitted, the error is a
    reason for a run: that run fails with it, instead of each tick of the sensor.
    """
    try:
        return visit(stream)
    except PermanentError as error:
        if not is_of_files(stream):
            raise
        return StreamFinding(due=f"{stream}: {error.problem.rstrip('.')}")


MAX_RESTARTS = 5
# Failures older than this are ignored, such as those before the sensor was switched on.
_HORIZON = timedelta(days=1)
# Permanent failures older than this are forgotten: another run is launched.
_LONGEST_WAIT = timedelta(days=30)
_ASSET_JOB = "__ASSET_JOB"  # Dagster's own job, of runs that users start by selecting assets
_PAGE = 200


@dataclass(frozen=True, slots=True)
class Restart:
    """The decision to restart the run `failed`: restart `number` after the run `first`, where
    the failures began.
    """

    failed: str
    first: str
    number: int


def decide_restart(
    records: Sequence[dg.RunRecord],
    state: "ApplicationState",
    permanent: str,
    now: float,
    busy: Callable[[], str] = str,  # str() is ""
) -> Restart | Skip:
    """Decide whether to restart the newest of an application's runs; `records` are newest first.

    Only a run that failed before its commit is restarted: it closed no batch, or left one open. It
    is not restarted if another run has closed a batch since it began, or is running the application
    now (`busy` returns which, "" for none), or if its failure is `permanent` ("" if it is not, or
    if something has changed since). The wait is one minute, doubled with each failure in a row, up
    to an hour.
    """
    failed = _failed_in_a_row(records, state)
    if not records:
        return Skip("No run to restart.")
    if not failed:
        last = records[0].dagster_run
        if last.status is dg.DagsterRunStatus.FAILURE:
            found = f"Run {last.run_id[:8]} failed, and a batch was committed since it began"
        elif last.status in NOT_FINISHED_STATUSES:
            found = f"The newest run, {last.run_id[:8]}, is in progress"
        else:
            found = f"The newest run, {last.run_id[:8]}, ended as {last.status.value.lower()}"
        return Skip(f"{found}: nothing to restart.")
    newest = failed[0].dagster_run.run_id
    first = failed[-1].dagster_run.run_id
    what = f"Run {newest[:8]} failed"
    if permanent:
        return Skip(f"{what} permanently: {permanent}")
    if len(failed) > MAX_RESTARTS:
        return Skip(
            f"{what}, as did the {len(failed) - 1} before it: it is no longer restarted. See its"
            " run."
        )
    wait = (failed[0].end_time or now) + backoff_seconds(len(failed)) - now
    if wait > 0:
        return Skip(
            f"{what} before its commit; restart {len(failed)} of {MAX_RESTARTS} is in {wait:.0f} s."
        )
    if who := busy():
        return Skip(
            f"{what} before its commit, but the application is being run by {who}: not restarted."
        )
    return Restart(newest, first, len(failed))


def _failed_in_a_row(
    records: Sequence[dg.RunRecord], state: "ApplicationState"
) -> list[dg.RunRecord]:
    """Return the newest runs, newest first, as far as they all failed before their commit."""
    failed: list[dg.RunRecord] = []
    for record in records:
        run = record.dagster_run
        if run.status is not dg.DagsterRunStatus.FAILURE or record.end_time is None:
            break
        is_newest = not failed
        left_open = is_newest and state.open is not None and state.open.run == run.run_id
        # A run whose process never started has only an end.
        began_at = record.start_time or record.end_time
        if not left_open and _has_closed_batch(state, run.run_id, began_at):
            break
        failed.append(record)
    return failed


def _has_closed_batch(state: "ApplicationState", run_id: str, began_at: float) -> bool:
    """Whether a batch was closed by this run, or since it began."""
    if state.last is None:
        return False
    return state.last.intent.run == run_id or state.last.closed_at.timestamp() > began_at


def restart_launcher(
    app: Application,
    job: LaunchedJob,
    assets: Collection[dg.AssetKey],
    outputs: Collection[dg.AssetKey],
) -> Launcher:
    """Return the launcher that restarts runs that failed before their commit: of `job`, or of some
    of its `outputs`.

    Cancelled runs are not restarted, and permanent failures not until something has changed
    (`failures.py`). The new run has the failed run's selection of `assets`.
    """
    assets_of_job = frozenset(assets)

    def evaluate(tick: Tick) -> dg.RunRequest | Skip:
        from dagster_adjunct.orchestration.batch_log.batch_log import application_state

        lake = tick.lake
        now = lake.now()
        records = _application_runs(tick, outputs, now - _HORIZON)
        state = application_state(lake, app.name)
        permanent = ""
        if wait_after_failure(tick, app, records):
            permanent = tick.cursor.permanent
        busy = partial(tick.lease_holder, app.name)
        decision = decide_restart(records, state, permanent, now.timestamp(), busy)
        if isinstance(decision, Skip):
            return decision
        failed = records[0].dagster_run
        selected = failed.asset_selection
        tags = {}
        for key, value in failed.tags.items():
            if key.startswith("adjunct/"):
                tags[key] = value
        if _LOADED_TAG in tags:  # the new run has the code that is loaded now
            tags[_LOADED_TAG] = _LOADED
        tags["adjunct/restart_of"] = decision.first
        tags["adjunct/attempt"] = str(decision.number)
        return dg.RunRequest(
            run_key=(
                f"{app.name}:{lake.id}:restart:{decision.first}:{decision.failed}:{decision.number}"
            ),
            run_config=_config_of(failed, job.name, f"{to_dagster_name(app.name)}_step"),
            asset_selection=sorted(selected & assets_of_job) if selected else None,
            tags=tags,
        )

    text = (
        f"Restarts runs of {app.name} that failed before their commit, up to {MAX_RESTARTS} times"
        " in a row."
    )
    return Launcher(f"{to_dagster_name(app.name)}_restart", job, assets, text, evaluate)


def _config_of(run: dg.DagsterRun, job: str, step: str) -> dict[str, Any]:
    """Return the configuration of a failed run for its restart by `job`.

    From a run of another job, only the configuration of the op `step` is taken. `take_over` is left
    out, because it was meant for the failed run only.
    """
    is_own = run.job_name == job
    given: dict[str, Any] = dict(run.run_config)
    if is_own:
        config = given  # its `ops` are replaced below
    else:
        config = {}
    ops = {}
    for name, op in given.get("ops", {}).items():
        if is_own or name == step:
            ops[name] = _without_take_over(op)
    if ops:
        config["ops"] = ops
    return config


def _without_take_over(op: Any) -> Any:
    """Return an op's configuration without `take_over`."""
    given = None
    if isinstance(op, Mapping):
        given = op.get("config")
    if not isinstance(given, Mapping):
        return op
    return {**op, "config": {key: value for key, value in given.items() if key != "take_over"}}


def _application_runs(
    tick: Tick, outputs: Collection[dg.AssetKey], since: datetime
) -> list[dg.RunRecord]:
    """Return the runs of this code location that materialize some of the outputs, newest first.

    They are runs of the job, or of assets that a user selected. Runs of datasets alone commit no
    batch.
    """
    records: list[dg.RunRecord] = []
    for name in (tick.job, _ASSET_JOB):
        # Only failures in a row count, so runs before one that has not failed are not read.
        not_failed = []
        for record in records:
            if record.dagster_run.status is not dg.DagsterRunStatus.FAILURE:
                not_failed.append(record.create_timestamp)
        wanted = dg.RunsFilter(
            job_name=name, updated_after=since, created_after=max(not_failed, default=None)
        )
        records += _read_newest_runs(tick, wanted, outputs)
    return sorted(
        records, key=lambda record: (record.create_timestamp, record.storage_id), reverse=True
    )


def _read_newest_runs(
    tick: Tick, wanted: dg.RunsFilter, outputs: Collection[dg.AssetKey]
) -> list[dg.RunRecord]:
    """Return the newest of the `wanted` runs that materialize some outputs: at least as many as
    `decide_restart` looks at, if there are so many.

    A run without a selection materializes all of its job, so it counts only if that is the tick's.
    """
    own: list[dg.RunRecord] = []
    after: str | None = None
    while len(own) <= MAX_RESTARTS + 1:
        page = tick.instance.get_run_records(wanted, limit=_PAGE, cursor=after)
        for record in page:
            selected = record.dagster_run.asset_selection
            if selected:
                makes_outputs = not selected.isdisjoint(outputs)
            else:
                makes_outputs = wanted.job_name == tick.job
            if makes_outputs and tick.is_here(record.dagster_run):
                own.append(record)
        if len(page) < _PAGE:
            break
        after = page[-1].dagster_run.run_id
    return own


def unapplied_startpoints(
    handed: "Mapping[str, Requests]", state: "ApplicationState"
) -> "list[StartpointRequest]":
    """Return the startpoints that were `handed` to tasks and that no commit has applied, each once,
    by partition.

    Applied ones can still be in `handed`, if the run that applied them died before it removed them.
    """
    from dagster_adjunct.orchestration.startpoints.store import iter_unapplied

    requests = {}
    for held in iter_unapplied(handed, state):
        requests[held.request.ssp, held.request.id] = held.request
    return [requests[ssp_and_id] for ssp_and_id in sorted(requests)]


def describe_waiting(requests: "Sequence[StartpointRequest]") -> str:
    """Return a text that says how many startpoints wait, where, and who requested them and why."""
    texts = [
        f"{asked.ssp} at {describe_startpoint(asked.startpoint)}, {asked.by}: {asked.reason}"
        for asked in requests
    ]
    if len(requests) == 1:
        waiting = "1 startpoint waits"
    else:
        waiting = f"{len(requests)} startpoints wait"
    return f"{waiting} ({join_shortened(texts, '; ')})"


def startpoints_launcher(
    app: Application,
    job: LaunchedJob,
    assets: Collection[dg.AssetKey],
    outputs: Collection[dg.AssetKey],
) -> Launcher:
    """Return the launcher that hands startpoints to tasks and launches one run of `job` to apply
    them.

    `assets` are those that the job materializes, `outputs` those of the application's step. While a
    run of one of the `assets` is in progress, startpoints wait. If a run does not apply them, the
    next one is requested with back-off.
    """

    def evaluate(tick: Tick) -> dg.RunRequest | Skip:
        from dagster_adjunct.orchestration.batch_log.batch_log import application_state
        from dagster_adjunct.orchestration.startpoints.store import open_startpoints

        startpoints = open_startpoints(tick.lake, app)
        state = application_state(tick.lake, app.name)
        stored = startpoints.read()
        pending = unapplied_startpoints(stored.handed, state)
        if not stored.waiting and not pending:
            return Skip("No startpoints wait.")
        what = describe_waiting([*stored.waiting, *pending])
        active = tick.active_runs()
        if active:
            text = "unless it stays, startpoints requested after its start wait for the next one."
            return Skip(f"{what}; a run is in progress: {text}{tick.describe_waiting(active)}")
        who = tick.lease_holder(app.name)
        if who:
            return Skip(f"{what}; waiting for the next run: the application is being run by {who}.")
        return _request_for_startpoints(tick, app, startpoints, state)

    text = f"Runs {app.name} when startpoints were requested."
    name = f"{to_dagster_name(app.name)}_startpoints"
    return Launcher(name, job, assets, text, evaluate, "new_startpoints", outputs)


def _request_for_startpoints(
    tick: Tick, app: Application, startpoints: "StartpointManager", state: "ApplicationState"
) -> dg.RunRequest | Skip:
    """Hand startpoints to tasks, and request a run if one of them can be applied."""
    from dagster_adjunct.orchestration.planner.planner import plan_application, systems_for
    from dagster_adjunct.orchestration.startpoints.coordinator import fan_out_requests
    from dagster_adjunct.orchestration.startpoints.fan_out import (
        describe_dropped,
        describe_unapplied,
    )
    from dagster_adjunct.orchestration.step import progress

    lake = tick.lake
    systems = systems_for(app, lake=lake)
    planned = None
    if app.inputs:
        planned = plan_application(app, systems=systems)
    fan_out = fan_out_requests(startpoints, systems, app, planned, state.offsets)
    for text in (*describe_dropped(fan_out), *describe_unapplied(fan_out)):
        tick.log.warning(text)
    left = _describe_left(fan_out)
    pending = unapplied_startpoints(fan_out.tasks, state)
    if not pending:
        why = join_shortened(left, "; ")
        return Skip(f"No waiting startpoint can be applied by a task. {why}".rstrip())
    what = "; ".join([describe_waiting(pending), *left[:3]])
    # While a dataset has to be built, no input is read, but a run still applies startpoints for
    # other datasets.
    tasks = {task.name for task in planned.tasks} if planned is not None else set[str]()
    waiting = progress.describe_waiting_datasets(lake, systems, app)
    if waiting and fan_out.tasks.keys() <= tasks:
        return Skip(f"{what}; {'; '.join(waiting)}.")
    tags = {
        "adjunct/startpoints": join_shortened(request.id for request in pending),
        "adjunct/startpoints_by": join_shortened(request.by for request in pending),
        "adjunct/startpoints_reason": join_shortened((request.reason for request in pending), "; "),
    }
    ids = sorted({request.id for request in pending})
    return tick.request_run(f"{app.name}:{lake.id}:startpoints", what, ids, tags=tags)


def _describe_left(fan_out: "FanOut") -> list[str]:
    """Return a text for each startpoint that no run would apply now: which, and why."""
    unassigned = [*fan_out.unknown]
    for stranded in fan_out.stranded.values():
        unassigned += stranded.values()
    left = [
        f"{request.ssp}: no task reads it ({request.by}: {request.reason})"
        for request in unassigned
    ]
    for ssps in fan_out.held.values():
        left += [f"{ssp}: its startpoint can't be read" for ssp in sorted(ssps)]
    return left


def new_versions_launcher(member: DatasetAsset, job: LaunchedJob) -> Launcher:
    """Return the launcher of `job` for the next completely delivered version, whose name is the
    run's partition.

    Dynamic partitions are created for new names. Versions that are no partitions are reported once,
    and left out. If a run does not build the version, the next one is requested with back-off.
    """
    dataset = member.dataset
    assert isinstance(dataset, BoundedDataset)
    partitions = dataset.versions
    assert partitions is not None

    def evaluate(tick: Tick) -> dg.RunRequest | Skip:
        from dagster_adjunct.orchestration.planner.planner import open_dataset_systems
        from dagster_adjunct.orchestration.step.progress import find_delivered_version

        found = find_delivered_version(
            tick.lake, open_dataset_systems([dataset], tick.lake), dataset
        )
        new = [name for name in found.outside if name not in tick.cursor.outside]
        texts = [f"dataset {dataset.name}: {partitions.describe_outside(name)}" for name in new]
        for text in texts:
            tick.log.warning(f"{text}.")
        if set(found.outside) != set(tick.cursor.outside):
            tick.remember(outside=tuple(sorted(found.outside)))
        version = found.version
        if version is None:
            return Skip("; ".join([f"No new version; {found.awaited}", *texts]) + ".")
        if not ensure_partitions(dataset, tick.instance, [version]):
            began = f"its {partitions.by} has not begun in {partitions.timezone or 'UTC'}"
            step = (
                "Declare VersionPartitions(…, timezone=…) if it begins elsewhere; to leave it"
                " out, use"
            )
            return Skip(
                f"Version {version} is delivered, but {began}: it waits. {step} "
                f"adjunct dataset abandon {dataset.name} {version} --reason …"
            )
        return tick.request_run(
            f"{dataset.name}:{tick.lake.id}",
            f"Version {version} is delivered",
            {"version": version},
            partition_key=version,
        )

    text = f"Builds versions of {dataset.name} as they are delivered."
    name = f"{to_dagster_name(dataset.name)}_new_versions"
    return Launcher(name, job, {member.key}, text, evaluate, "new_version", {member.key})


def has_delivered_versions(dataset: AdjunctDataset) -> bool:
    """Whether a dataset's versions are delivered by markers or folders, and are not partitions."""
    return (
        not dataset.follows_changes
        and dataset.versions is None
        and not isinstance(dataset.input, QuerySource)
    )


def delivered_launchers(
    application: str, units: Sequence[Sequence[DatasetAsset]], job: LaunchedJob
) -> list[Launcher]:
    """Return the launchers that materialize datasets of `job` when versions of them are completely
    delivered.

    A version is completely delivered when all partitions of its stream have its marker, or its
    folder is complete. There is one launcher for each dataset; members of a version set share one,
    which waits until all of them have the version.

    One run builds everything that is delivered: if several of these sensors are on, the first by
    name launches it. A run for new records builds it too, so if that sensor is on, these wait for
    one more tick. The requests of conditions in one tick become one run anyway
    (`complete_requests`).
    """
    by_name = {f"{to_dagster_name(_group_name(unit))}_delivered": unit for unit in units}
    for_records = f"{to_dagster_name(application)}_new_records"
    launchers = []
    for name, unit in by_name.items():
        keys = {member.key for member in unit}
        datasets = ", ".join(member.dataset.name for member in unit)
        text = f"Publishes versions of {datasets} as they are delivered."
        decide = partial(_launch_delivered, by_name, name, for_records)
        launchers.append(Launcher(name, job, keys, text, decide, "new_version", keys))
    return launchers


def _launch_delivered(
    by_name: Mapping[str, Sequence[DatasetAsset]], mine: str, for_records: str, tick: Tick
) -> dg.RunRequest | Skip:
    """Request the run that builds what is delivered to the datasets of the sensor `mine`.

    `by_name` has the datasets of each such sensor of the application. So that one run builds all
    that is delivered, it is left to the sensor `for_records`, if that is on, for one tick, and to a
    sensor that is before `mine` in the order of names, if there is something for its datasets, too.
    """
    lake = tick.lake
    unit = by_name[mine]
    version, awaited = _next_delivered(lake, unit)
    if version is None:
        return Skip(f"No new version; {awaited}.")
    what = f"Version {version} is delivered"
    active = tick.active_runs()
    if active:
        return Skip(f"{what}; a run is already in progress.{tick.describe_waiting(active)}")
    on = tick.running_sensors()
    if for_records in on and tick.cursor.seen != version:
        tick.remember(seen=version)
        return Skip(
            f"{what}; {for_records} may launch a run that builds it; otherwise the next tick here"
            " does."
        )
    others: set[str] = set()
    if not tick.by_condition:  # requests of conditions become one run without this
        others = by_name.keys() & on - {mine}
    # By sensor, the version that is delivered.
    delivered = {mine: version} | _find_delivered(lake, {name: by_name[name] for name in others})
    first = min(delivered)
    if first != mine:
        return Skip(f"{what}; {first} launches the run that builds it too.")
    keys: list[dg.AssetKey] = []
    for name in sorted(delivered):
        keys += [member.key for member in by_name[name]]
    request = tick.request_run(
        f"{_group_name(unit)}:{lake.id}:delivered", what, delivered, asset_selection=keys
    )
    if isinstance(request, dg.RunRequest):
        tick.remember(seen=version)
    return request


def _find_delivered(lake: Lake, units: Mapping[str, Sequence[DatasetAsset]]) -> dict[str, str]:
    """Return the version that is delivered to each unit of datasets, by its name; units without one
    are left out, and those with an error, which their own sensors report.
    """
    found = {}
    for name, unit in units.items():
        with suppress(AdjunctError):
            version, _ = _next_delivered(lake, unit)
            if version is not None:
                found[name] = version
    return found


def stale_launcher(member: DatasetAsset, window: timedelta, job: LaunchedJob) -> Launcher:
    """Return the launcher that materializes a table within `job` when nobody has checked the table
    for changes within the window.

    Only a condition asks it, when Dagster says that the freshness policy fails, or that the table
    was never materialized. Dagster may say so for a while after a run has checked it, so the time
    of the last check decides.
    """
    dataset = member.dataset.name
    keys = {member.key}

    def evaluate(tick: Tick) -> dg.RunRequest | Skip:
        known = tick.instance.get_latest_materialization_event(member.key)
        checked = None if known is None else known.timestamp
        if checked is not None and tick.lake.now().timestamp() - checked < window.total_seconds():
            return Skip(f"Dataset {dataset} was checked for changes within {window}.")
        what = f"Dataset {dataset} was not checked for changes within {window}"
        about = {"checked": checked}
        return tick.request_run(
            f"{dataset}:{tick.lake.id}:stale", what, about, asset_selection=[member.key]
        )

    text = f"Checks {dataset} for changes when nobody has for {window}."
    return Launcher(f"{to_dagster_name(dataset)}_stale", job, keys, text, evaluate, "stale", keys)


def _group_name(unit: Sequence[DatasetAsset]) -> str:
    """Return the name of the version set, or of the only dataset."""
    return unit[0].dataset.version_set or unit[0].dataset.name


def _next_delivered(lake: Lake, unit: Sequence[DatasetAsset]) -> tuple[str | None, str]:
    """Return the next version that is delivered to all of these datasets, None if there is none,
    and a text that says what is awaited.
    """
    from dagster_adjunct.orchestration.planner.planner import open_dataset_systems
    from dagster_adjunct.orchestration.step import progress

    datasets = []
    for member in unit:
        if isinstance(member.dataset, BoundedDataset):
            datasets.append(member.dataset)
    found = progress.find_version_delivered_to_all(
        lake, open_dataset_systems(datasets, lake), datasets
    )
    return found.version, found.awaited
