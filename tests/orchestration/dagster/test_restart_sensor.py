"""When a failed run is launched again: the decision with plain values, then ticks over runs that
really failed.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from dagster import (
    AssetKey,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    OpExecutionContext,
    RunRecord,
    job,
    op,
)
from dagster import SkipReason as Skip
from dagster._core.remote_origin import CodeLocationOrigin

from dagster_adjunct import Application, Lake, open_lake
from dagster_adjunct.errors import (
    AdjunctError,
    ApplicationBusyError,
    CommitConflictError,
    CommitStateUnknownError,
    ConfigurationError,
    LeaseLostError,
    OffsetOutOfRangeError,
    RunLeaseLostError,
    TransientError,
)
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    BatchLog,
    ClosedBatch,
)
from dagster_adjunct.orchestration.batch_log.intent import Intent
from dagster_adjunct.orchestration.batch_log.run_lease import Claim, RunLease
from dagster_adjunct.orchestration.code_location.metadata import translate_errors
from dagster_adjunct.orchestration.code_location.sensors import Restart, decide_restart
from dagster_adjunct.resources.streams.system import OffsetRange
from tests.clocks import on_clock
from tests.orchestration.dagster import small
from tests.orchestration.dagster.ticking import ELSEWHERE, HERE, Ticker, job_origin

STATUS = DagsterRunStatus
BEGAN = datetime(2026, 1, 2, tzinfo=UTC)


def intent(run: str, batch: int = 1) -> Intent:
    ranges = {"lake.orders.0": OffsetRange(start="0", end="1")}
    return Intent(batch=batch, run=run, clock=BEGAN, ranges=ranges)


def closed(run: str, at: float) -> ClosedBatch:
    return ClosedBatch(
        intent=intent(run),
        closed_at=datetime.fromtimestamp(at, UTC),
        records=1,
        counters={},
        seconds={},
    )


def ran(run: str, status: DagsterRunStatus, began: float, ended: float | None = None) -> RunRecord:
    return RunRecord(
        storage_id=0,
        # Dagster has no queued run without an origin.
        dagster_run=DagsterRun(
            "copy", run_id=run, status=status, remote_job_origin=job_origin(HERE, "copy")
        ),
        create_timestamp=BEGAN,
        update_timestamp=BEGAN,
        start_time=began,
        end_time=ended,
    )


def failed(*runs: str, seconds: float = 100.0) -> list[RunRecord]:
    """Runs that failed one after the other, the newest first; each took `each` seconds, the last
    ended at 1000.
    """
    return [
        ran(run, STATUS.FAILURE, 1000.0 - seconds * (number + 1), 1000.0 - seconds * number)
        for number, run in enumerate(runs)
    ]


def decided(
    attempts: list[RunRecord],
    state: ApplicationState | None = None,
    *,
    permanent: str = "",
    now: float = 10_000.0,
) -> Restart | Skip:
    return decide_restart(attempts, state or ApplicationState(), permanent, now)


def test_a_run_that_failed_before_its_commit_is_launched_again() -> None:
    assert decided(failed("a")) == Restart("a", "a", 1)


def test_without_runs_there_is_nothing_to_restart() -> None:
    assert decided([]) == Skip("No run to restart.")


@pytest.mark.parametrize(
    "status", [STATUS.STARTED, STATUS.QUEUED, STATUS.SUCCESS, STATUS.CANCELED, STATUS.CANCELING]
)
def test_a_newer_run_ends_the_matter_whatever_became_of_it(status: DagsterRunStatus) -> None:
    skip = decided([ran("newer-run", status, 2000.0), *failed("a")])
    assert isinstance(skip, Skip)
    assert str(skip.skip_message).startswith("The newest run, newer-ru, ")


def test_a_suspended_run_is_in_progress() -> None:
    skip = decided([ran("newer-run", STATUS.SUSPENDED, 2000.0), *failed("a")])
    assert skip == Skip("The newest run, newer-ru, is in progress: nothing to restart.")


def test_a_run_that_closed_a_batch_is_not_launched_again_unless_it_left_one_open() -> None:
    after = ApplicationState(last=closed("a", 950.0))
    assert decided(failed("a"), after) == Skip(
        "Run a failed, and a batch was committed since it began: nothing to restart."
    )
    assert decided(failed("a"), after.model_copy(update={"open": intent("a", 2)})) == Restart(
        "a", "a", 1
    )


def test_a_failed_run_is_not_restarted_after_a_later_batch_of_another_run() -> None:
    assert isinstance(decided(failed("a"), ApplicationState(last=closed("by-hand", 1500.0))), Skip)
    assert decided(failed("a"), ApplicationState(last=closed("before", 899.0))) == Restart(
        "a", "a", 1
    )


def test_a_permanent_failure_is_left_to_people() -> None:
    skip = decided(failed("a"), permanent="the column is missing. Add it.")
    assert skip == Skip("Run a failed permanently: the column is missing. Add it.")


def test_restarts_wait_ever_longer_and_end_at_the_limit() -> None:
    runs, waits = ["a"], []
    while len(runs) < 10:
        decision = decided(failed(*runs), now=1000.0)
        assert isinstance(decision, Skip)
        if "it is no longer restarted" in str(decision.skip_message):
            break
        wait = next(
            seconds
            for seconds in range(0, 4000, 30)
            if isinstance(decided(failed(*runs), now=1000.0 + seconds), Restart)
        )
        waits.append(wait)
        runs.insert(0, f"r{len(runs)}")
    assert waits == [60, 120, 240, 480, 960]
    assert (
        decision.skip_message
        == "Run r5 failed, as did the 5 before it: it is no longer restarted. See its run."
    )


def test_failures_count_in_a_row_whoever_launched_the_runs() -> None:
    assert decided(failed("c", "b", "a")) == Restart("c", "a", 3)
    done = ran("done", STATUS.SUCCESS, 0.0, 100.0)
    assert decided([*failed("c", "b"), done, *failed("a")]) == Restart("c", "b", 2)
    # b closed a batch before it failed: a new row begins with c.
    assert decided(failed("c", "b", "a"), ApplicationState(last=closed("b", 850.0))) == Restart(
        "c", "c", 1
    )


def test_a_run_is_left_to_whoever_else_runs_the_application() -> None:
    who = "run cli-1 on host a (pid 7), since 2026-01-02 00:00:00 UTC"
    skip = decide_restart(failed("a"), ApplicationState(), "", 10_000.0, lambda: who)
    assert isinstance(skip, Skip)
    assert (
        skip.skip_message
        == f"Run a failed before its commit, but the application is being run by {who}: not"
        " restarted."
    )


# -- runs that really failed


class Clock:
    """The machine's clock, so much ahead."""

    passed = timedelta(0)

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.passed


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lake(tmp_path: Path, clock: Clock) -> Lake:
    lake = on_clock(open_lake(tmp_path / "lake"), clock)
    small.create_streams(lake)
    return lake


@pytest.fixture
def pass_time(clock: Clock) -> Callable[[timedelta], None]:
    def pass_time(span: timedelta) -> None:
        clock.passed += span

    return pass_time


def copying() -> Application:
    app = Application("copy")
    app.input_stream("lake.orders").send_to(app.output_stream("lake.copy", partitions=1))
    return app


def fail(instance: DagsterInstance, error: Exception, **tags: str) -> str:
    """Run a job of the application's name whose op raises this; return the run's id."""

    @op
    def step(context: OpExecutionContext) -> None:
        with translate_errors(context, retry=()):
            raise error

    @job(name="copy")
    def copy() -> None:
        step()

    result = copy.execute_in_process(instance=instance, raise_on_error=False, tags=tags)
    assert not result.success
    return result.run_id


def kill(
    instance: DagsterInstance, selection: set[AssetKey] | None = None, name: str = "copy"
) -> DagsterRun:
    """Leave a run as Dagster leaves one whose process was killed: failed, with no failure of a
    step.
    """
    run = DagsterRun(name, asset_selection=selection and frozenset(selection))
    instance.add_run(run)
    instance.report_run_failed(run)
    return run


def test_a_killed_run_is_launched_again_after_a_minute_with_what_it_was_for(
    lake: Lake, instance: DagsterInstance, pass_time: Callable[[timedelta], None]
) -> None:
    run_id = kill(instance).run_id
    sensor = Ticker(lake, copying(), instance, "copy_restart")
    assert sensor.skipped().startswith(
        f"Run {run_id[:8]} failed before its commit; restart 1 of 5 is in "
    )
    pass_time(timedelta(seconds=61))
    request = sensor.asked()
    assert request.run_key == f"copy:{lake.id}:restart:{run_id}:{run_id}:1"
    assert request.asset_selection is None
    tags = {key: value for key, value in request.tags.items() if key.startswith("adjunct/")}
    assert tags == {"adjunct/restart_of": run_id, "adjunct/attempt": "1"}


def test_a_failed_run_is_found_behind_any_number_of_other_runs_of_assets(
    lake: Lake,
    instance: DagsterInstance,
    pass_time: Callable[[timedelta], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dagster_adjunct.orchestration.code_location.sensors._PAGE", 4)
    run_id = kill(instance, {AssetKey(["lake", "copy"])}, "__ASSET_JOB").run_id
    for _ in range(9):
        kill(instance, {AssetKey("other")}, "__ASSET_JOB")
    pass_time(timedelta(minutes=2))
    sensor = Ticker(lake, copying(), instance, "copy_restart")
    assert sensor.asked().tags["adjunct/restart_of"] == run_id
    instance.add_run(DagsterRun("copy", status=DagsterRunStatus.SUCCESS))
    assert "ended as success" in sensor.skipped()


def test_a_restart_keeps_the_tags_that_say_which_startpoints_it_is_for(
    lake: Lake, instance: DagsterInstance, pass_time: Callable[[timedelta], None]
) -> None:
    first = fail(
        instance, OSError("no route to host"), **{"adjunct/startpoints": "a, b", "mine": "x"}
    )
    second = kill(instance).run_id
    pass_time(timedelta(minutes=3))
    request = Ticker(lake, copying(), instance, "copy_restart").asked()
    assert request.run_key == f"copy:{lake.id}:restart:{first}:{second}:2"
    assert "adjunct/startpoints" not in request.tags

    with DagsterInstance.ephemeral() as other:
        fail(other, OSError("no route to host"), **{"adjunct/startpoints": "a, b", "mine": "x"})
        tags = Ticker(lake, copying(), other, "copy_restart").asked().tags
    assert tags["adjunct/startpoints"] == "a, b"
    assert "mine" not in tags


@pytest.mark.parametrize(
    "error",
    [
        CommitConflictError("application 'copy' was taken over by another run.", "Let it finish."),
        OffsetOutOfRangeError(
            "lake.orders.0: retention has passed the checkpoint.", "Write a startpoint."
        ),
        ConfigurationError("that can't work.", "Change it."),
    ],
)
def test_what_fails_again_until_something_is_changed_is_not_restarted(
    lake: Lake, instance: DagsterInstance, pass_time: Callable[[timedelta], None], error: Exception
) -> None:
    run_id = fail(instance, error)
    pass_time(timedelta(hours=1))
    sensor = Ticker(lake, copying(), instance, "copy_restart")
    assert sensor.skipped() == f"Run {run_id[:8]} failed permanently: {error}"
    assert sensor.skipped() == f"Run {run_id[:8]} failed permanently: {error}", (
        "as the cursor has it"
    )


@pytest.mark.parametrize(
    "error", [TransientError("the store did not answer."), ValueError("a bug, or bad luck")]
)
def test_what_may_pass_is_restarted(
    lake: Lake, instance: DagsterInstance, pass_time: Callable[[timedelta], None], error: Exception
) -> None:
    fail(instance, error)
    pass_time(timedelta(minutes=2))
    Ticker(lake, copying(), instance, "copy_restart").asked()


def test_a_run_that_committed_before_it_was_killed_is_left_alone(
    lake: Lake, instance: DagsterInstance, pass_time: Callable[[timedelta], None]
) -> None:
    run = kill(instance)
    log = BatchLog(lake, "copy")
    opened = log.open(log.read(), intent(run.run_id))
    pass_time(timedelta(minutes=2))
    sensor = Ticker(lake, copying(), instance, "copy_restart")
    sensor.asked()
    log.close(opened, closed(run.run_id, datetime.now(UTC).timestamp()))
    assert "nothing to restart" in sensor.skipped()


def test_outputs_that_were_materialised_by_hand_are_restarted_as_they_were_selected(
    lake: Lake, instance: DagsterInstance, pass_time: Callable[[timedelta], None], tmp_path: Path
) -> None:
    app = small.order_totals(tmp_path / "t.sqlite")
    priced, table = AssetKey(["lake", "priced"]), AssetKey(["tables", "item_state"])
    kill(instance, {priced, table, AssetKey("report")}, "__ASSET_JOB")
    pass_time(timedelta(minutes=2))
    sensor = Ticker(lake, app, instance, "order_totals_restart")
    assert sensor.asked().asset_selection == [priced, table]


@pytest.mark.lengthy
def test_a_run_for_a_dataset_alone_is_none_of_its_business(
    lake: Lake, instance: DagsterInstance, pass_time: Callable[[timedelta], None], tmp_path: Path
) -> None:
    app = small.order_totals(tmp_path / "t.sqlite")
    kill(instance, {AssetKey(["datasets", "items_dataset"])}, "order_totals")
    kill(instance, None, "another_job")
    pass_time(timedelta(minutes=2))
    assert Ticker(lake, app, instance, "order_totals_restart").skipped() == "No run to restart."


@pytest.mark.parametrize(("location", "is_restarted"), [(HERE, True), (ELSEWHERE, False)])
def test_a_run_of_that_name_in_another_code_location_is_not_restarted(
    lake: Lake,
    instance: DagsterInstance,
    pass_time: Callable[[timedelta], None],
    location: CodeLocationOrigin,
    is_restarted: bool,
) -> None:
    run = DagsterRun("copy", remote_job_origin=job_origin(location, "copy"))
    instance.add_run(run)
    instance.report_run_failed(run)
    pass_time(timedelta(minutes=2))
    sensor = Ticker(lake, copying(), instance, "copy_restart")
    assert (sensor.tick() != "No run to restart.") is is_restarted


def test_a_failure_of_the_day_before_yesterday_is_left_alone(
    lake: Lake, instance: DagsterInstance, pass_time: Callable[[timedelta], None]
) -> None:
    kill(instance)
    pass_time(timedelta(days=2))
    assert Ticker(lake, copying(), instance, "copy_restart").skipped() == "No run to restart."


@pytest.mark.parametrize(
    "error", [CommitStateUnknownError, LeaseLostError, ApplicationBusyError, RunLeaseLostError]
)
def test_what_a_new_run_finds_settled_is_launched_again(
    lake: Lake,
    instance: DagsterInstance,
    pass_time: Callable[[timedelta], None],
    error: type[AdjunctError],
) -> None:
    fail(instance, error("the store stopped answering."))
    pass_time(timedelta(seconds=61))
    assert Ticker(lake, copying(), instance, "copy_restart").asked().tags["adjunct/attempt"] == "1"


def test_no_sensor_launches_a_run_while_somebody_runs_the_application_by_hand(
    lake: Lake, instance: DagsterInstance, pass_time: Callable[[timedelta], None]
) -> None:
    kill(instance)
    pass_time(timedelta(seconds=61))
    small.append(lake, "orders", 1, small.orders(1, 5))
    with RunLease(lake, "copy", "by-hand", Claim()):
        texts = [
            Ticker(lake, copying(), instance, f"copy_{name}").skipped()
            for name in ("restart", "new_records")
        ]
    assert all(
        "the application is being run by run by-hand on host" in text.lower() for text in texts
    ), texts
    Ticker(lake, copying(), instance, "copy_new_records").asked()
    Ticker(lake, copying(), instance, "copy_restart").asked()


def test_a_run_that_has_waited_for_another_one_is_not_retried_within_itself(lake: Lake) -> None:
    begun = 0

    @op
    def step(context: OpExecutionContext) -> None:
        nonlocal begun
        begun += 1
        with translate_errors(context):
            raise ApplicationBusyError("another one runs it.")

    @job(name="copy")
    def copy() -> None:
        step()

    assert not copy.execute_in_process(raise_on_error=False).success
    assert begun == 1


def test_a_restart_does_not_take_over_again(
    lake: Lake, instance: DagsterInstance, pass_time: Callable[[timedelta], None]
) -> None:
    config = {"ops": {"copy_step": {"config": {"take_over": True, "wait_seconds": 7.0}}}}
    run = DagsterRun("copy", run_config=config)
    instance.add_run(run)
    instance.report_run_failed(run)
    pass_time(timedelta(seconds=61))
    request = Ticker(lake, copying(), instance, "copy_restart").asked()
    assert request.run_config == {"ops": {"copy_step": {"config": {"wait_seconds": 7.0}}}}


@pytest.mark.parametrize("job", ["copy", "__ASSET_JOB"])
def test_a_restart_stays_as_the_run_would_have_that_a_sensor_or_a_condition_launched(
    lake: Lake, instance: DagsterInstance, pass_time: Callable[[timedelta], None], job: str
) -> None:
    config = {"ops": {"copy_step": {"config": {"follow_seconds": 600.0}}}}
    # of an asset that is not restarted
    more = {"report": {"config": {"day": 3}}} if job == "__ASSET_JOB" else {}
    run = DagsterRun(
        job,
        run_config={"ops": {**config["ops"], **more}},
        asset_selection={AssetKey(["lake", "copy"])},
    )
    instance.add_run(run)
    instance.report_run_failed(run)
    pass_time(timedelta(seconds=61))
    assert Ticker(lake, copying(), instance, "copy_restart").asked().run_config == config
