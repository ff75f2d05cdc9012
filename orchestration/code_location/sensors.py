"""The sensor that launches a failed run again, where that can help: with back-off, and not for ever."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetKey,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    RunRequest,
    RunsFilter,
    SensorDefinition,
)

from dagster_adjunct.assets.declaration.sources import QuerySource
from dagster_adjunct.orchestration.application.graph import to_dagster_name
from dagster_adjunct.orchestration.code_location.sensor_ticks import (
    Deadline,
    LastRequest,
    LaunchRequest,
    Skip,
    StreamFinding,
    StreamScan,
    Tick,
    backoff_seconds,
    digest,
    job_sensor,
    join_shortened,
    request_run,
    scan_ages,
    scan_streams,
)
from dagster_adjunct.resources.common import StoredDocument, check_whole_number, subtract_span
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError

if TYPE_CHECKING:
    from dagster import RunRecord

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, ClosedBatch, OffsetState
    from dagster_adjunct.orchestration.code_location.dataset_assets import DatasetAsset
    from dagster_adjunct.orchestration.code_location.sensor_ticks import LaunchedJob
    from dagster_adjunct.orchestration.startpoints.fan_out import Requests
    from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.system import StreamSystem, SystemStreamPartition


@dataclass(frozen=True, slots=True)
class LaunchWhen:
    """Launch a run as soon as so many `records` wait, or the first unread one of a partition is older than `age`.

    With both, whichever comes first; with neither, one record is enough. What is smaller than the threshold waits for
    more without limit where no `age` is given.
    """

    records: int | None = None
    age: timedelta | None = None

    def __post_init__(self) -> None:
        if self.records is not None:
            what = f"LaunchWhen has records={self.records!r}"
            check_whole_number(self.records, what, "1 or more", argument="records")
        if self.age is not None and (not isinstance(self.age, timedelta) or self.age <= timedelta(0)):
            raise ConfigurationError(
                f"LaunchWhen has age={self.age!r}: expected a timedelta of more than nothing.",
                "Write how long a record may wait: LaunchWhen(age=timedelta(minutes=10)), say.",
                argument="age",
            )

    def enough(self, lag: int) -> bool:
        """Whether so many records are enough, whatever their age."""
        least = self.records or (1 if self.age is None else None)
        return lag > 0 and least is not None and lag >= least

    def __str__(self) -> str:
        thresholds = [f"{self.records:,} records"] if self.records else []
        thresholds += [f"one older than {self.age}"] if self.age else []
        return " or ".join(thresholds) or "1 record"


def launch_rules(
    given: "LaunchWhen | Mapping[str, LaunchWhen] | None", applications: tuple[str, ...]
) -> "dict[str, LaunchWhen]":
    """Return the rule of each application. Raises ConfigurationError for one of an application that is not there."""
    if given is None or isinstance(given, LaunchWhen):
        return dict.fromkeys(applications, given or LaunchWhen())
    unknown = sorted(given.keys() - set(applications))
    if unknown:
        raise ConfigurationError(
            f"launch_when names {unknown[0]!r}, and the applications are {', '.join(applications)}.",
            "Correct the name.",
            argument="launch_when",
        )
    return {name: given.get(name, LaunchWhen()) for name in applications}


# Dagster ends a tick after a minute; what remains is for looking at datasets and storing the cursor.
TICK_SECONDS = 40.0


class NewRecordsCursor(StoredDocument):
    """What was asked for last, and the look at the streams that the tick before did not finish."""

    asked: LastRequest = LastRequest()
    look: StreamScan | None = None


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a look found: whether it is `complete`, and `old`, a partition whose first unread record is too old."""

    look: StreamScan
    complete: bool
    old: str = ""


def decide_launch(
    name: str,
    asked: LastRequest,
    stock: Backlog,
    position: Mapping[str, object],
    *,
    rule: LaunchWhen,
    unfinished: Sequence[str] = (),
    waiting: Callable[[], Sequence[str]] = tuple,
    now: float,
) -> LaunchRequest | Skip:
    """Decide whether to launch a run: when enough waits, and no dataset holds it back.

    `name` tells this application in this lake from others, `position` is where it stands, `now` is in epoch seconds.
    """
    look = stock.look
    due = (*unfinished, *look.due)
    if not look.lag and not due:
        return Skip("No new records.")
    old = f"{stock.old} holds one older than {rule.age}" if stock.old else ""
    what = "; ".join(filter(None, [f"{look.lag:,} new records" if look.lag else "", old, *due]))
    if not due and not stock.old and not rule.enough(look.lag):
        return Skip(f"{what}, fewer than wanted: launched at {rule}.")
    held = waiting()
    if held:
        return Skip(f"{what}; {'; '.join(held)}.")
    return request_run(name, what, {"position": position, "ends": look.ends}, asked, now)


def new_records_sensor(
    app: "Application", job: "LaunchedJob", assets: Collection[AssetKey], rule: LaunchWhen
) -> SensorDefinition:
    """Return a sensor that launches `job` when input streams hold enough that no batch has committed.

    `assets` are those that the job materialises; while a run is on its way to one of them, none is launched.
    """
    own = frozenset(assets)

    def evaluate(tick: Tick) -> RunRequest | Skip:
        from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
        from dagster_adjunct.orchestration.planner.catalog import systems_for
        from dagster_adjunct.orchestration.step.progress import (
            describe_unfinished,
            describe_waiting_datasets,
            ignore_disabled_startpoints,
            position_to_json,
        )

        if tick.in_progress(own):
            return Skip("A run is already in progress.")
        cursor, lake = tick.recall(NewRecordsCursor), tick.lake
        now = lake.now()
        if who := tick.who_runs(app.name):
            return Skip(f"The application is being run by {who}.")
        systems = systems_for(app, lake=lake)
        deadline = Deadline(time.monotonic() + TICK_SECONDS, time.monotonic)
        commit, stored = BatchLog(lake, app.name).read()
        state = ignore_disabled_startpoints(app, stored)
        begun = cursor.look if cursor.look is not None and cursor.look.of == (commit.id if commit else "") else None
        look = begun or StreamScan(of=commit.id if commit else "")
        stock = measure_backlog(systems, app, state, look, rule, now, deadline)
        if not stock.complete:
            tick.remember(NewRecordsCursor(asked=cursor.asked, look=stock.look))
            seen = f"{len(stock.look.streams)} streams" + (f", {stock.look.young}" if stock.look.young else "")
            return Skip(f"The tick's {TICK_SECONDS:.0f} s are over after {seen}; the next one goes on there.")
        decision = decide_launch(
            f"{app.name}:{lake.id}",
            cursor.asked,
            stock,
            position_to_json(app, state),
            rule=rule,
            unfinished=describe_unfinished(state),
            waiting=partial(describe_waiting_datasets, lake, systems, app),
            now=now.timestamp(),
        )
        asked = decision.asked if isinstance(decision, LaunchRequest) else cursor.asked
        tick.remember(NewRecordsCursor(asked=asked))
        if isinstance(decision, Skip):
            # A mistyped address looks like a lake that nobody has written to yet.
            nowhere = "" if lake.exists() else f" There is no lake at {lake.url}."
            return Skip(f"{decision.reason}{nowhere}")
        return RunRequest(run_key=decision.run_key, tags={"adjunct/lag": str(stock.look.lag)})

    return job_sensor(
        f"{to_dagster_name(app.name)}_new_records",
        job,
        f"Runs {app.name} when its input streams have new records: {rule}.",
        evaluate,
    )


def measure_backlog(
    systems: "Mapping[str, StreamSystem]",
    app: "Application",
    state: "ApplicationState",
    look: StreamScan,
    rule: LaunchWhen,
    now: datetime,
    deadline: Deadline,
) -> Backlog:
    """Go on with a look at the application's streams until it is complete or the deadline has passed."""
    from dagster_adjunct.orchestration.step.progress import (
        describe_unfinished,
        list_dataset_streams,
        measure_stream_progress,
        read_stream_ends,
        snapshot_system,
    )

    feeding = list_dataset_streams(app)
    opened = cache(partial(snapshot_system, systems))

    def visit(stream: str) -> StreamFinding:
        ends = digest(read_stream_ends(opened(stream), stream)) if stream in feeding else ""
        if stream not in app.inputs:
            return StreamFinding(ends=ends)
        progress = measure_stream_progress(opened(stream), app.inputs[stream], state)
        return StreamFinding(ends=ends, lag=progress.lag, due=progress.due)

    look, complete = scan_streams(look, tuple(dict.fromkeys([*app.inputs, *feeding])), visit, deadline)
    if (
        not complete
        or rule.age is None
        or not look.lag
        or rule.enough(look.lag)
        or look.due
        or describe_unfinished(state)
    ):
        return Backlog(look, complete)
    before_ms = int(subtract_span(now, rule.age).timestamp() * 1000)

    def unread(stream: str) -> "Mapping[SystemStreamPartition, str]":
        return measure_stream_progress(opened(stream), app.inputs[stream], state).unread

    def is_old(ssp: "SystemStreamPartition", start: str) -> bool:
        system = opened(ssp.qualified_stream)
        return system.compare(start, system.offset_for_timestamp(ssp, before_ms)) < 0

    look, old, complete = scan_ages(look, unread, is_old, deadline)
    return Backlog(look, complete, "" if old is None else str(old))


MAX_RESTARTS = 5
# A failure that nobody has restarted for so long is history: a sensor that is switched on leaves it alone.
_HORIZON = timedelta(days=1)
_ASSET_JOB = "__ASSET_JOB"
_OPEN = {DagsterRunStatus.QUEUED, DagsterRunStatus.NOT_STARTED, DagsterRunStatus.STARTING, DagsterRunStatus.STARTED}


@dataclass(frozen=True, slots=True)
class ApplicationRun:
    """One run of an application as Dagster tells of it; times are epoch seconds.

    `began_at` is when its process began to work; where it never did, when it failed.
    """

    run_id: str
    status: DagsterRunStatus
    began_at: float
    ended_at: float | None = None


class RestartCursor(StoredDocument):
    """The failed run that was looked at last, and what its failure says of another one; "" for nothing."""

    run_id: str = ""
    permanent: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """Launch `failed` again, the `number`th time since `first`, the first run that failed in a row."""

    failed: str
    first: str
    number: int


def decide_restart(
    attempts: Sequence[ApplicationRun],
    state: "ApplicationState",
    permanent: str,
    *,
    limit: int,
    now: float,
    busy: Callable[[], str] = str,
) -> Restart | Skip:
    """Decide whether to launch the newest of an application's runs again; `attempts` begin with it.

    `busy` says who else is running the application, as somebody by hand: then it is left to that one.
    Only a run that failed before its commit is: one that closed no batch, or left one open. A newer run, whether in
    progress, done or cancelled by somebody, ends the matter; so does a batch of anybody else's since. Failures in a row
    count, whoever launched these runs: one is waited for a minute, two for two minutes, three for four.
    """
    failed = _failed_in_a_row(attempts, state)
    if not failed:
        return Skip(_skip_reason(attempts, state))
    newest, first = failed[0], failed[-1]
    assert newest.ended_at is not None
    what = f"Run {newest.run_id[:8]} failed"
    if permanent:
        return Skip(f"{what} for good: {permanent}")
    if len(failed) > limit:
        return Skip(f"{what}, as did the {len(failed) - 1} before it: not restarted any more. See its run.")
    wait = newest.ended_at + backoff_seconds(len(failed)) - now
    if wait > 0:
        return Skip(f"{what} before its commit; restart {len(failed)} of {limit} is in {wait:.0f} s.")
    if who := busy():
        return Skip(f"{what} before its commit, and the application is being run by {who}: left to that one.")
    return Restart(newest.run_id, first.run_id, len(failed))


def _failed_in_a_row(attempts: Sequence[ApplicationRun], state: "ApplicationState") -> list[ApplicationRun]:
    """Return the newest runs as far as they failed before a commit, newest first."""
    failed: list[ApplicationRun] = []
    last = state.last
    for attempt in attempts:
        if attempt.status is not DagsterRunStatus.FAILURE or attempt.ended_at is None:
            break
        left_open = not failed and state.open is not None and state.open.run == attempt.run_id
        if last is not None and not left_open and _closed_since(last, attempt):
            break
        failed.append(attempt)
    return failed


def _closed_since(last: "ClosedBatch", attempt: ApplicationRun) -> bool:
    """Whether the application's last batch is this run's own, or was closed by somebody else since it began."""
    return last.intent.run == attempt.run_id or last.closed_at.timestamp() > attempt.began_at


def _skip_reason(attempts: Sequence[ApplicationRun], state: "ApplicationState") -> str:
    if not attempts:
        return "No run to restart."
    newest = attempts[0]
    if newest.status is DagsterRunStatus.FAILURE:
        return f"Run {newest.run_id[:8]} failed, and a batch was committed since it began: nothing to restart."
    status = "is in progress" if newest.status in _OPEN else f"ended as {newest.status.value.lower()}"
    return f"The newest run, {newest.run_id[:8]}, {status}: nothing to restart."


def restart_sensor(
    app: "Application", job: "LaunchedJob", assets: Collection[AssetKey], outputs: Collection[AssetKey]
) -> SensorDefinition:
    """Return a sensor that launches a run of `job`, or of its `outputs`, again when it failed before its commit.

    Not where the failure is permanent, as a run's events say of errors of ours, and not after a person has cancelled
    the run. What is launched makes what the failed run was to make, of the `assets` of the job.
    """
    own, made = frozenset(assets), frozenset(outputs)

    def evaluate(tick: Tick) -> RunRequest | Skip:
        from dagster_adjunct.orchestration.batch_log.batch_log import application_state

        lake, instance = tick.lake, tick.context.instance
        now = lake.now()
        records = application_runs(instance, job.name, made, now - _HORIZON)
        attempts = [run_from_record(record) for record in records]
        state = application_state(lake, app.name)
        cursor = tick.recall(RestartCursor)
        if attempts and attempts[0].status is DagsterRunStatus.FAILURE and cursor.run_id != attempts[0].run_id:
            newest = attempts[0].run_id
            cursor = RestartCursor(run_id=newest, permanent=permanent_failure(instance, newest))
            tick.remember(cursor)
        busy = partial(tick.who_runs, app.name)
        decision = decide_restart(attempts, state, cursor.permanent, limit=MAX_RESTARTS, now=now.timestamp(), busy=busy)
        if isinstance(decision, Skip):
            return decision
        failed = records[0].dagster_run
        return RunRequest(
            run_key=f"{app.name}:{lake.id}:restart:{decision.first}:{decision.failed}:{decision.number}",
            run_config=_without_take_over(failed.run_config) if failed.job_name == job.name else None,
            asset_selection=sorted(failed.asset_selection & own) if failed.asset_selection else None,
            tags={
                **{key: value for key, value in failed.tags.items() if key.startswith("adjunct/")},
                "adjunct/restart_of": decision.first,
                "adjunct/attempt": str(decision.number),
            },
        )

    return job_sensor(
        f"{to_dagster_name(app.name)}_restart",
        job,
        f"Restarts runs of {app.name} that failed before their commit, up to {MAX_RESTARTS} times in a row.",
        evaluate,
    )


def _without_take_over(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run without the word to take over, which somebody gave once, for what ran then."""
    ops = {
        name: {**op, "config": {key: value for key, value in op["config"].items() if key != "take_over"}}
        if isinstance(op, Mapping) and isinstance(op.get("config"), Mapping)
        else op
        for name, op in run_config.get("ops", {}).items()
    }
    return {**run_config, "ops": ops} if ops else dict(run_config)


def application_runs(
    instance: DagsterInstance, job: str, outputs: Collection[AssetKey], since: datetime
) -> "list[RunRecord]":
    """Return the runs of a job that make its outputs, or of these outputs by hand, newest first."""
    records = [
        record
        for name in (job, _ASSET_JOB)
        for record in instance.get_run_records(RunsFilter(job_name=name, updated_after=since), limit=200)
        if _makes_outputs(record.dagster_run, job, outputs)
    ]
    return sorted(records, key=lambda record: (record.create_timestamp, record.storage_id), reverse=True)


def run_from_record(record: "RunRecord") -> ApplicationRun:
    """Return what the decision needs of a run's record."""
    run = record.dagster_run
    began_at = record.start_time or record.end_time or record.create_timestamp.timestamp()
    return ApplicationRun(run.run_id, run.status, began_at, record.end_time)


def permanent_failure(instance: DagsterInstance, run_id: str) -> str:
    """Return what makes a run's failure permanent, as `translate_errors` recorded it; "" where nothing does.

    A run that was killed has no such event, and an error that is not ours says nothing of a second time.
    """
    for record in instance.all_logs(run_id, of_type=DagsterEventType.STEP_FAILURE):
        event = record.dagster_event
        told = event.step_failure_data.user_failure_data if event is not None else None
        if told is not None and (permanent := told.metadata.get("permanent")) is not None and permanent.value:
            return told.description or "its error is permanent"
    return ""


def _makes_outputs(run: DagsterRun, job: str, outputs: Collection[AssetKey]) -> bool:
    """Whether a run is to make outputs: a selection of datasets alone has no batch to commit."""
    if run.asset_selection:
        return any(key in outputs for key in run.asset_selection)
    return run.job_name == job


def unapplied_startpoints(fan_outs: "Mapping[str, Requests]", offsets: "OffsetState") -> "list[StartpointRequest]":
    """Return what is fanned out and was not taken in by a commit: each startpoint once, in order of partitions.

    A run that died between its commit and removing what that has applied leaves it here; the next one removes it.
    """
    left: dict[tuple[str, str], StartpointRequest] = {}
    for requests in fan_outs.values():
        for ssp, request in requests.items():
            if not offsets.has_taken(ssp, request.id):
                left[str(ssp), request.id] = request
    return sorted(left.values(), key=lambda request: (request.ssp, request.id))


def describe_waiting(requests: "Sequence[StartpointRequest]") -> str:
    """Return in a few words how many startpoints wait, where, for whom and why."""
    from dagster_adjunct.resources.streams.startpoint import describe_startpoint

    texts = [f"{one.ssp} at {describe_startpoint(one.startpoint)}, {one.by}: {one.reason}" for one in requests]
    return f"{len(requests)} startpoint{'s wait' if len(requests) != 1 else ' waits'} ({join_shortened(texts, '; ')})"


def startpoint_tags(requests: "Sequence[StartpointRequest]") -> dict[str, str]:
    """Return the tags of a run that applies these: their ids, who asked for them and why."""
    return {
        "adjunct/startpoints": join_shortened(request.id for request in requests),
        "adjunct/startpoints_by": join_shortened(request.by for request in requests),
        "adjunct/startpoints_reason": join_shortened((request.reason for request in requests), "; "),
    }


def startpoint_sensor(app: "Application", job: "LaunchedJob", assets: Collection[AssetKey]) -> SensorDefinition:
    """Return a sensor that hands requests for startpoints to tasks and launches one run of `job` that applies them.

    `assets` are those that the job materialises; while a run is on its way to one of them, requests wait for the next
    one. Where a run leaves startpoints as they were, it is asked for again ever more rarely.
    """
    own = frozenset(assets)

    def evaluate(tick: Tick) -> RunRequest | Skip:
        from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
        from dagster_adjunct.orchestration.planner.catalog import plan_application, systems_for
        from dagster_adjunct.orchestration.startpoints.coordinator import fan_out_requests
        from dagster_adjunct.orchestration.startpoints.fan_out import describe_dropped, describe_unapplied
        from dagster_adjunct.orchestration.startpoints.store import open_startpoints
        from dagster_adjunct.orchestration.step.progress import describe_waiting_datasets

        lake = tick.lake
        startpoints = open_startpoints(lake, app)
        state = BatchLog(lake, app.name).read()[1]
        stored = startpoints.read()
        requested = stored.waiting
        pending = unapplied_startpoints(stored.handed, state.offsets)
        if not requested and not pending:
            return Skip("No startpoints wait.")
        if tick.in_progress(own):
            what = describe_waiting([*requested, *pending])
            return Skip(f"{what}; a run is in progress: what it did not meet at its start is for the next one.")
        if who := tick.who_runs(app.name):
            what = describe_waiting([*requested, *pending])
            return Skip(f"{what}; for the next run: the application is being run by {who}.")
        systems = systems_for(app, lake=lake)
        planned = plan_application(app, systems=systems) if app.inputs else None
        fan_out = fan_out_requests(startpoints, systems, app, planned, state.offsets)
        pending = unapplied_startpoints(fan_out.tasks, state.offsets)
        for text in (*describe_dropped(fan_out), *describe_unapplied(fan_out)):
            tick.context.log.warning(text)
        nobodys = [*fan_out.unknown, *(request for held in fan_out.stranded.values() for request in held.values())]
        left = [f"{request.ssp}: no task reads it ({request.by}: {request.reason})" for request in nobodys]
        left += [f"{ssp}: what was handed out can't be read" for ssps in fan_out.held.values() for ssp in sorted(ssps)]
        if not pending:
            return Skip(f"No startpoints wait that a task could apply. {join_shortened(left, '; ')}".rstrip())
        what = "; ".join([describe_waiting(pending), *left[:3]])
        # Datasets that are not made yet hold the input back, and not what is asked of other datasets.
        waiting = describe_waiting_datasets(lake, systems, app)
        if waiting and planned is not None and fan_out.tasks.keys() <= {task.name for task in planned.tasks}:
            return Skip(f"{what}; {'; '.join(waiting)}.")
        ids = sorted({request.id for request in pending})
        return tick.ask(f"{app.name}:{lake.id}:startpoints", what, ids, tags=startpoint_tags(pending))

    return job_sensor(
        f"{to_dagster_name(app.name)}_startpoints",
        job,
        f"Runs {app.name} when somebody has asked for startpoints.",
        evaluate,
    )


def new_versions_sensor(member: "DatasetAsset", job: "LaunchedJob") -> SensorDefinition:
    """Return a sensor that launches `job` for the next version that has been delivered whole, as its partition.

    Where names come as they come, the version's name becomes a partition. A run that did not build it is asked for
    again ever more rarely.
    """
    dataset = member.dataset

    def evaluate(tick: Tick) -> RunRequest | Skip:
        from dagster_adjunct.orchestration.code_location.dataset_assets import ensure_partitions

        version, awaited = _next_delivered(tick.lake, [member])
        if version is None:
            return Skip(f"No new version; {awaited}.")
        if not ensure_partitions(dataset, tick.context.instance, [version]):
            return Skip(f"Version {version} is delivered, and is none of the partitions that are declared.")
        what = f"Version {version} is delivered"
        if tick.in_progress({member.key}):
            return Skip(f"{what}; a run is already in progress.")
        return tick.ask(f"{dataset.name}:{tick.lake.id}", what, {"version": version}, partition_key=version)

    return job_sensor(
        f"{to_dagster_name(dataset.name)}_new_versions",
        job,
        f"Builds versions of {dataset.name} as they are delivered.",
        evaluate,
    )


def has_delivered_versions(dataset: "AdjunctDataset") -> bool:
    """Whether versions of a dataset come by themselves, as markers or folders, and none of them is a partition."""
    return not dataset.follows_changes and dataset.versions is None and not isinstance(dataset.input, QuerySource)


class DeliveredCursor(StoredDocument):
    """What was asked for last, and the version that was seen in the tick before."""

    asked: LastRequest = LastRequest()
    seen: str = ""


def delivered_sensors(
    application: str, units: "Sequence[Sequence[DatasetAsset]]", job: "LaunchedJob"
) -> list[SensorDefinition]:
    """Return sensors that materialise datasets' assets, within `job`, when versions of them are delivered whole.

    All partitions of a stream then have their marker, or a folder is complete. There is one for each dataset; the
    members of a version set, which are published together, share one: it waits until all of them have the version.

    One run takes all that is delivered: where several of these sensors are on, the first by name launches it for all. A
    run that is launched for new records takes it, too: where the sensor for these is on, it has one look to launch it.
    """
    by_name = {f"{to_dagster_name(_group_name(unit))}_delivered": unit for unit in units}
    for_records = f"{to_dagster_name(application)}_new_records"

    def evaluate(tick: Tick, mine: str) -> RunRequest | Skip:
        lake, unit, cursor = tick.lake, by_name[mine], tick.recall(DeliveredCursor)
        version, awaited = _next_delivered(lake, unit)
        if version is None:
            return Skip(f"No new version; {awaited}.")
        what = f"Version {version} is delivered"
        if tick.in_progress({member.key for member in unit}):
            return Skip(f"{what}; a run is already in progress.")
        on = tick.switched_on()
        if for_records in on and cursor.seen != version:
            tick.remember(cursor.model_copy(update={"seen": version}))
            return Skip(f"{what}; {for_records} may launch a run that takes it, else the next look here does.")
        together = {mine: version}
        for other in (by_name.keys() & on) - {mine}:
            with suppress(AdjunctError):  # its own sensor tells it
                there, _ = _next_delivered(lake, by_name[other])
                together |= {other: there} if there is not None else {}
        first = min(together)
        if first != mine:
            return Skip(f"{what}; {first} launches the run that takes it, too.")
        decision = request_run(
            f"{_group_name(unit)}:{lake.id}:delivered", what, together, cursor.asked, lake.now().timestamp()
        )
        if isinstance(decision, Skip):
            return decision
        tick.remember(DeliveredCursor(asked=decision.asked, seen=version))
        keys = [member.key for name in sorted(together) for member in by_name[name]]
        return RunRequest(run_key=decision.run_key, asset_selection=keys)

    return [
        job_sensor(
            name,
            job,
            f"Publishes versions of {', '.join(member.dataset.name for member in unit)} as they are delivered.",
            partial(evaluate, mine=name),
        )
        for name, unit in by_name.items()
    ]


def _group_name(unit: "Sequence[DatasetAsset]") -> str:
    return unit[0].dataset.version_set or unit[0].dataset.name


def _next_delivered(lake: "Lake", unit: "Sequence[DatasetAsset]") -> tuple[str | None, str]:
    from dagster_adjunct.orchestration.planner.catalog import open_dataset_systems
    from dagster_adjunct.orchestration.step.progress import find_version_delivered_to_all

    datasets = [member.dataset for member in unit]
    return find_version_delivered_to_all(lake, open_dataset_systems(datasets, lake), datasets)
