"""The sensor that launches a failed run again, where that can help: with back-off, and not for ever."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
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

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.sensing.run_requests import Skip, wait_after
from dagster_adjunct.orchestration.code_location.sensing.tick import Tick, job_sensor
from dagster_adjunct.resources.stored_documents import StoredDocument

if TYPE_CHECKING:
    from dagster import RunRecord

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState, ClosedBatch
    from dagster_adjunct.orchestration.code_location.sensing.tick import LaunchedJob

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


def decide(
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
        return Skip(_why_not(attempts, state))
    newest, first = failed[0], failed[-1]
    assert newest.ended_at is not None
    what = f"Run {newest.run_id[:8]} failed"
    if permanent:
        return Skip(f"{what} for good: {permanent}")
    if len(failed) > limit:
        return Skip(f"{what}, as did the {len(failed) - 1} before it: not restarted any more. See its run.")
    wait = newest.ended_at + wait_after(len(failed)) - now
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


def _why_not(attempts: Sequence[ApplicationRun], state: "ApplicationState") -> str:
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
        from dagster_adjunct.orchestration.batchlog.batch_log import application_state

        lake, instance = tick.lake, tick.context.instance
        now = lake.now()
        records = runs_of(instance, job.name, made, now - _HORIZON)
        attempts = [attempt_of(record) for record in records]
        state = application_state(lake, app.name)
        cursor = tick.recall(RestartCursor)
        if attempts and attempts[0].status is DagsterRunStatus.FAILURE and cursor.run_id != attempts[0].run_id:
            newest = attempts[0].run_id
            cursor = RestartCursor(run_id=newest, permanent=permanent_failure(instance, newest))
            tick.remember(cursor)
        busy = partial(tick.who_runs, app.name)
        decision = decide(attempts, state, cursor.permanent, limit=MAX_RESTARTS, now=now.timestamp(), busy=busy)
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
        f"{dagster_name(app.name)}_restart",
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


def runs_of(instance: DagsterInstance, job: str, outputs: Collection[AssetKey], since: datetime) -> "list[RunRecord]":
    """Return the runs of a job that make its outputs, or of these outputs by hand, newest first."""
    records = [
        record
        for name in (job, _ASSET_JOB)
        for record in instance.get_run_records(RunsFilter(job_name=name, updated_after=since), limit=200)
        if _makes(record.dagster_run, job, outputs)
    ]
    return sorted(records, key=lambda record: (record.create_timestamp, record.storage_id), reverse=True)


def attempt_of(record: "RunRecord") -> ApplicationRun:
    """Return what the decision needs of a run's record."""
    run = record.dagster_run
    began_at = record.start_time or record.end_time or record.create_timestamp.timestamp()
    return ApplicationRun(run.run_id, run.status, began_at, record.end_time)


def permanent_failure(instance: DagsterInstance, run_id: str) -> str:
    """Return what makes a run's failure permanent, as `clear_failures` has said it; "" where nothing does.

    A run that was killed has no such event, and an error that is not ours says nothing of a second time.
    """
    for record in instance.all_logs(run_id, of_type=DagsterEventType.STEP_FAILURE):
        event = record.dagster_event
        told = event.step_failure_data.user_failure_data if event is not None else None
        if told is not None and (permanent := told.metadata.get("permanent")) is not None and permanent.value:
            return told.description or "its error is permanent"
    return ""


def _makes(run: DagsterRun, job: str, outputs: Collection[AssetKey]) -> bool:
    """Whether a run is to make outputs: a selection of datasets alone has no batch to commit."""
    if run.asset_selection:
        return any(key in outputs for key in run.asset_selection)
    return run.job_name == job
