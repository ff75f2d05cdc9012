"""When a run is launched for new records: the decision with plain values, then ticks on a real
lake.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dagster import AssetKey, DagsterInstance, DagsterRun, DagsterRunStatus
from dagster import SkipReason as Skip
from dagster._core.remote_origin import CodeLocationOrigin

from dagster_adjunct import (
    Application,
    Lake,
    LakeResource,
    LakeStreams,
    Schema,
    SystemStreamPartition,
    open_lake,
    run_application,
    systems_for,
)
from dagster_adjunct.code_location import LaunchWhen
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    BatchLog,
    OffsetState,
    Replay,
    ResolvedStartpoint,
)
from dagster_adjunct.orchestration.batch_log.intent import Intent
from dagster_adjunct.orchestration.batch_log.run_lease import asked_key
from dagster_adjunct.orchestration.code_location import sensors as new_records
from dagster_adjunct.orchestration.code_location.sensor_ticks import (
    Backlog,
    Deadline,
    StreamFinding,
    StreamScan,
    Tick,
    read_cursor,
    scan_ages,
    scan_streams,
)
from dagster_adjunct.orchestration.code_location.sensors import (
    decide_launch,
    launch_rules,
    measure_backlog,
)
from dagster_adjunct.resources.objects.store import InMemoryStore, StoredObject
from dagster_adjunct.resources.streams.system import OffsetRange
from tests.clocks import on_clock
from tests.orchestration.dagster import small
from tests.orchestration.dagster.ticking import BOTH, ELSEWHERE, HERE, Ticker, job_origin
from tests.orchestration.input_progress import input_progress
from tests.orchestration.offsets.fake_streams import FakeStreams

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)


def decided(
    lag: int = 5,
    *,
    due: str = "",
    old: str = "",
    rule: LaunchWhen | None = None,
    waiting: tuple[str, ...] = (),
    unfinished: tuple[str, ...] = (),
) -> str | Skip:
    backlog = Backlog(
        StreamScan(streams={"lake.orders": StreamFinding(lag=lag, due=due)}), True, old
    )
    return decide_launch(backlog, rule or LaunchWhen(), unfinished, lambda: waiting)


def test_nothing_new_launches_nothing() -> None:
    assert decided(0) == Skip("No new records.")


def test_one_record_is_enough_unless_declared_otherwise() -> None:
    assert isinstance(decided(1), str)


def test_a_threshold_in_records_is_matched_exactly() -> None:
    rule = LaunchWhen(records=100)
    assert decided(99, rule=rule) == Skip("99 new records; a run is launched at 100 records.")
    assert isinstance(decided(100, rule=rule), str)


def test_with_an_age_alone_no_number_of_young_records_is_enough() -> None:
    rule = LaunchWhen(age=timedelta(minutes=10))
    assert decided(10**9, rule=rule) == Skip(
        "1,000,000,000 new records; a run is launched at one older than 0:10:00."
    )
    assert isinstance(decided(1, rule=rule, old="lake.orders.1"), str)


def test_what_is_begun_is_finished_however_little_waits() -> None:
    rule = LaunchWhen(records=100)
    assert isinstance(decided(1, rule=rule, unfinished=("batch 3 is open",)), str)
    assert isinstance(decided(0, rule=rule, due="lake.orders: no position is stored yet"), str)


def test_a_dataset_without_its_markers_is_waited_for_by_name() -> None:
    assert decided(waiting=("dataset 'items' waits for lake.items.1",)) == Skip(
        "5 new records; dataset 'items' waits for lake.items.1."
    )


@pytest.mark.parametrize(
    "wrong",
    [{"records": 0}, {"records": True}, {"records": 1.5}, {"age": timedelta(0)}, {"age": 60}],
)
def test_a_threshold_that_means_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError) as failure:
        LaunchWhen(**wrong)  # type: ignore[arg-type]
    assert failure.value.argument == next(iter(wrong))


def test_thresholds_are_for_all_applications_or_by_name() -> None:
    rule = LaunchWhen(records=7)
    assert launch_rules(rule, ("a", "b")) == {"a": rule, "b": rule}
    assert launch_rules({"b": rule}, ("a", "b")) == {"a": LaunchWhen(), "b": rule}
    with pytest.raises(ConfigurationError, match=r"'c'.* a, b") as caught:
        launch_rules({"c": rule}, ("a", "b"))
    assert caught.value.argument == "launch_when"


def test_a_run_concerns_an_application_by_its_job_here_or_by_its_assets() -> None:
    priced, other = AssetKey(["lake", "priced"]), AssetKey(["lake", "other"])
    with DagsterInstance.ephemeral() as instance:
        tick = Tick(
            instance,
            logging.getLogger(),
            None,
            "order_totals",
            [priced],
            LakeResource(),
            HERE.location_name,
        )
        assert tick.is_of(DagsterRun("order_totals"), [priced])
        assert tick.is_of(DagsterRun("__ASSET_JOB", asset_selection={priced}), [priced])
        assert not tick.is_of(DagsterRun("__ASSET_JOB", asset_selection={other}), [priced])
        for origin, is_of in ((HERE, True), (ELSEWHERE, False)):
            run = DagsterRun("order_totals", remote_job_origin=job_origin(origin, "order_totals"))
            assert tick.is_of(run, [priced]) is is_of


@pytest.mark.parametrize("origin", [HERE, ELSEWHERE])
@BOTH
def test_a_run_of_a_job_of_that_name_in_another_code_location_counts_for_nothing(
    lake: Lake, by: str, origin: CodeLocationOrigin
) -> None:
    small.append(lake, "orders", 1, small.orders(0, 4))
    with DagsterInstance.ephemeral() as instance:
        sensor = Ticker(
            lake,
            copying(),
            instance,
            "copy_new_records",
            launch_when=LaunchWhen(stay=timedelta(hours=1)),
            by=by,
        )
        tags = {"adjunct/loaded": "by another process"}
        made = job_origin(origin, "copy")
        instance.add_run(
            DagsterRun("copy", status=DagsterRunStatus.STARTED, tags=tags, remote_job_origin=made)
        )
        if origin is HERE:
            assert "asked to end" in sensor.skipped()
        else:
            sensor.asked()
        assert (lake.store.head(asked_key(lake, "copy")) is not None) is (origin is HERE)


# -- looks that take several ticks


def ticking(step: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += step


def deadline(pieces: int) -> Deadline:
    """A deadline that lets so many pieces of work begin."""
    seconds = ticking(1.0)
    return Deadline(pieces - 1.0, lambda: next(seconds))


def test_a_look_that_a_deadline_cuts_goes_on_where_it_stopped() -> None:
    names, visited = [f"lake.s{number}" for number in range(10)], []

    def visit(name: str) -> StreamFinding:
        visited.append(name)
        return StreamFinding(lag=len(visited))

    scan, ticks, complete = StreamScan(of="c"), 0, False
    while not complete and ticks < 20:
        backlog = scan_streams(scan, names, visit, deadline(3))
        scan, complete = backlog.scan, backlog.complete
        ticks += 1
    assert (visited, ticks) == (names, 4)
    assert scan.lag == sum(range(1, 11))


def test_a_tick_that_comes_late_looks_at_one_thing_all_the_same() -> None:
    backlog = scan_streams(
        StreamScan(),
        ["lake.a", "lake.b"],
        lambda name: StreamFinding(),
        Deadline(-1.0, lambda: 0.0),
    )
    assert (list(backlog.scan.streams), backlog.complete) == (["lake.a"], False)


def test_ages_are_asked_for_once_each_in_order_and_only_until_one_is_old() -> None:
    ssps = [
        SystemStreamPartition("lake", name, number) for name in ("a", "b") for number in range(12)
    ]
    unread = {
        f"lake.{name}": {ssp: "0" for ssp in ssps if ssp.stream == name} for name in ("a", "b")
    }
    asked: list[SystemStreamPartition] = []

    def is_old(ssp: SystemStreamPartition, start: str) -> bool:
        asked.append(ssp)
        return ssp == ssps[20]

    scan = StreamScan(
        streams={
            "lake.b": StreamFinding(lag=12),
            "lake.a": StreamFinding(lag=12),
            "lake.c": StreamFinding(),
        }
    )
    backlog, ticks = Backlog(scan, complete=False), 0
    while not backlog.complete and ticks < 20:
        backlog = scan_ages(backlog.scan, unread.__getitem__, is_old, deadline(5))
        ticks += 1
    assert (backlog.old, asked, ticks) == (str(ssps[20]), ssps[:21], 5)


# -- ticks on a lake


def copying(name: str = "copy", *streams: str) -> Application:
    app = Application(name)
    for number, stream in enumerate(streams or ("lake.orders",)):
        app.input_stream(stream, default_offset="oldest").send_to(
            app.output_stream(f"lake.copy-{number}", partitions=2)
        )
    return app


@BOTH
def test_a_tick_on_a_lake_that_is_not_there_says_so_and_makes_none(tmp_path: Path, by: str) -> None:
    nowhere = open_lake(tmp_path / "mistyped")
    with DagsterInstance.ephemeral() as instance:
        sensor = Ticker(nowhere, copying(), instance, "copy_new_records", by=by)
        assert sensor.skipped() == f"No new records. There is no lake at {nowhere.url}."
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.lengthy
@BOTH
def test_ticks_follow_the_lake_and_never_ask_twice_for_one_position(
    lake: Lake, tmp_path: Path, by: str
) -> None:
    app = small.order_totals(tmp_path / "t.sqlite")
    with DagsterInstance.ephemeral() as instance:
        sensor = Ticker(lake, app, instance, "order_totals_new_records", by=by)
        assert sensor.skipped() == "No new records."
        small.append(lake, "orders", 1, small.orders(0, 10))
        assert "lake.items.0, lake.items.1" in sensor.skipped()

        small.append(lake, "items", 1, small.ITEMS, marker="v1")
        request = sensor.asked()
        assert request.run_key is not None
        assert request.run_key.startswith(f"order-totals:{lake.id}:")
        assert request.tags["adjunct/lag"] == "10"
        assert "attempt 1 did not change that" in sensor.skipped()

        small.append(lake, "items", 2, small.ITEMS, marker="v2")
        assert sensor.asked().run_key != request.run_key, "another version may let the run get on"
        instance.add_run(DagsterRun("order_totals", status=DagsterRunStatus.STARTED))
        assert sensor.skipped() == "A run is already in progress."


@BOTH
def test_records_of_a_time_are_waited_for_until_the_first_is_old(lake: Lake, by: str) -> None:
    written = datetime.now(UTC)
    small.append(lake, "orders", 1, small.orders(0, 10))

    passed = timedelta(minutes=5)
    rule = LaunchWhen(records=11, age=timedelta(minutes=10))
    with DagsterInstance.ephemeral() as instance:
        there = on_clock(lake, lambda: written + passed)
        sensor = Ticker(
            there, copying(), instance, "copy_new_records", launch_when={"copy": rule}, by=by
        )
        assert sensor.skipped().startswith(
            "10 new records; a run is launched at 11 records or one older"
        )
        passed = timedelta(minutes=11)
        sensor.asked()


@pytest.mark.parametrize("seconds", [-1, 0, 1])
def test_a_record_is_old_at_exactly_the_age_that_is_named(lake: Lake, seconds: int) -> None:
    """Records of one partition at 11:00, 11:10, …; the position stands at each of them in turn."""
    streams = LakeStreams(lake)
    schema = Schema.of(id="bigint", at="timestamp")
    streams.create("timed", schema=schema, partitions=1, timestamp="at")
    times = [NOW - timedelta(minutes=60 - 10 * number) for number in range(6)]
    table = pa.table({"id": list(range(6)), "at": times}, schema=schema.to_arrow())
    streams.append("timed", table, producer="t", sequence=1)
    app = copying("aged", "lake.timed")
    for position, at in enumerate(times):
        rule = LaunchWhen(age=NOW - at + timedelta(seconds=seconds))
        state = ApplicationState(checkpoint={"lake.timed.0": str(position)})
        backlog = measure_backlog(
            {"lake": streams}, app, state, StreamScan(), rule, NOW, Deadline(1.0, lambda: 0.0)
        )
        assert backlog.complete
        assert bool(backlog.old) == (NOW - at > (rule.age or timedelta())), position
        assert not measure_backlog(
            {"lake": streams},
            app,
            state,
            StreamScan(),
            LaunchWhen(age=timedelta.max),
            NOW,
            Deadline(1.0, lambda: 0.0),
        ).old


def test_reading_from_the_end_of_a_stream_launches_one_run_to_store_the_position(
    lake: Lake,
) -> None:
    app = Application("tail")
    app.input_stream("lake.orders", default_offset="upcoming").send_to(
        app.output_stream("lake.tail", partitions=1)
    )
    small.append(lake, "orders", 1, small.orders(0, 10))
    systems = systems_for(app, lake=lake)
    assert input_progress(lake, systems, app).due == ("lake.orders: no position is stored yet",)

    run_application(app, lake=lake, systems=systems, spark=_no_spark, run="first")
    small.append(lake, "orders", 2, small.orders(10, 3))
    progress = input_progress(lake, systems, app)
    assert (progress.due, progress.lag) == ((), 3)


def test_the_lag_counts_from_resolved_startpoints_and_replays_under_way(lake: Lake) -> None:
    small.append(lake, "orders", 1, small.orders(0, 60))
    app, systems = copying(), {"lake": LakeStreams(lake)}
    ends = {
        str(ssp): int(end)
        for ssp, end in systems["lake"].upcoming(systems["lake"].partitions("orders")).items()
    }
    start: dict[str, Any] = {
        "ssp": "lake.orders.0",
        "position": "offset 4",
        "by": "ann",
        "reason": "why",
    }
    resolved = ResolvedStartpoint(id="s", stream=None, offset="4", resolved_at=NOW, **start)
    replay = Replay(
        id="s2@lake.orders.0",
        stream=None,
        epoch=2,
        start="1",
        next="5",
        until="8",
        began_at=NOW,
        versions="current",
        **start,
    )
    at_end = {name: str(end) for name, end in ends.items()}

    def lag_of(offsets: OffsetState) -> tuple[int, tuple[str, ...]]:
        lake.store.delete_many(
            [item.key for item in lake.store.list(f"{lake.application_prefix('copy')}/")]
        )
        log = BatchLog(lake, "copy")
        log.commit(log.read(), ApplicationState(checkpoint=at_end, offsets=offsets), by="test")
        progress = input_progress(lake, systems, app)
        return progress.lag, progress.due

    assert lag_of(OffsetState()) == (0, ())
    assert lag_of(OffsetState(resolved={"lake.orders.0": resolved})) == (
        ends["lake.orders.0"] - 4,
        (),
    )
    replays = {replay.id: replay}
    assert lag_of(OffsetState(replays=replays)) == (3, ("a replay is under way on lake.orders.0",))


@BOTH
def test_a_batch_that_a_crash_left_open_is_due_whatever_the_threshold(lake: Lake, by: str) -> None:
    small.append(lake, "orders", 1, small.orders(0, 4))
    log = BatchLog(lake, "copy")
    checkpoint = {"lake.orders.0": "0", "lake.orders.1": "0"}
    logged = log.commit(log.read(), ApplicationState(checkpoint=checkpoint), by="run")
    ranges = {"lake.orders.0": OffsetRange(start="0", end="1")}
    log.open(logged, Intent(batch=1, run="r", clock=NOW, ranges=ranges))
    with DagsterInstance.ephemeral() as instance:
        Ticker(
            lake, copying(), instance, "copy_new_records", launch_when=LaunchWhen(records=99), by=by
        ).asked()


@pytest.mark.parametrize("reset", [False, True])
def test_a_stream_that_was_recreated_launches_a_run(lake: Lake, reset: bool) -> None:
    small.append(lake, "orders", 1, small.orders(0, 4))
    app, systems = Application("copy"), {"lake": LakeStreams(lake)}
    app.input_stream("lake.orders", default_offset="oldest", reset_offset=reset)
    whole = {"lake.orders.0": "99", "lake.orders.1": "99"}
    log = BatchLog(lake, "copy")
    logged = log.commit(log.read(), ApplicationState(checkpoint=whole), by="run")
    assert input_progress(lake, systems, app).due == (
        "lake.orders.0 ends before the offset that comes next",
    )
    offsets = OffsetState(streams={"lake.orders": "another"})
    log.commit(logged, ApplicationState(checkpoint=whole, offsets=offsets), by="run")
    assert input_progress(lake, systems, app).due == ("lake.orders was deleted and recreated",)


def wide(partitions: int, streams: int) -> tuple[Application, FakeStreams, ApplicationState]:
    """An application that has read nothing of streams with one record in each partition, an hour
    old at NOW.
    """
    fake, names = FakeStreams(), [f"fake.s{number:02}" for number in range(streams)]
    for name in names:
        fake.make(name.partition(".")[2], partitions)
        for number in range(partitions):
            fake.write(
                name.partition(".")[2], number, int((NOW - timedelta(hours=1)).timestamp() * 1000)
            )
    checkpoint = {f"{name}.{number}": "@0" for name in names for number in range(partitions)}
    return copying("wide", *names), fake, ApplicationState(checkpoint=checkpoint)


def test_thousands_of_partitions_fit_in_a_tick() -> None:
    app, fake, state = wide(500, 10)
    rule = LaunchWhen(records=5001, age=timedelta(days=1))
    backlog = measure_backlog(
        {"fake": fake}, app, state, StreamScan(), rule, NOW, Deadline(40.0, lambda: 0.0)
    )
    assert (backlog.complete, backlog.scan.lag, backlog.old) == (True, 5000, "")
    asked = Counter(fake.questions)
    assert asked.pop("offset_for_timestamp") == 5000, (
        "the age of each first record is asked for once"
    )
    assert max(asked.values()) <= 20, "all else is asked once a stream, or twice where ages are"


def test_ages_of_thousands_of_partitions_are_asked_for_over_several_ticks_each_once() -> None:
    app, fake, state = wide(500, 10)
    rule = LaunchWhen(records=5001, age=timedelta(days=1))
    scan, ticks, complete = StreamScan(), 0, False
    while not complete and ticks < 20:
        backlog = measure_backlog({"fake": fake}, app, state, scan, rule, NOW, deadline(1000))
        scan, complete, ticks = backlog.scan, backlog.complete, ticks + 1
    assert ticks == 6
    assert Counter(fake.questions)["offset_for_timestamp"] == 5000


def test_where_enough_records_wait_nobody_asks_for_their_age() -> None:
    app, fake, state = wide(5, 2)
    rule = LaunchWhen(records=10, age=timedelta(days=1))
    backlog = measure_backlog(
        {"fake": fake}, app, state, StreamScan(), rule, NOW, Deadline(40.0, lambda: 0.0)
    )
    assert (backlog.complete, backlog.scan.lag) == (True, 10)
    assert "offset_for_timestamp" not in fake.questions


def test_a_lake_is_asked_as_often_for_many_partitions_as_for_few() -> None:
    requests: list[str] = []

    class Counting(InMemoryStore):
        def get(self, key: str) -> StoredObject:
            requests.append(key)
            return super().get(key)

    def requests_for(partitions: int) -> int:
        lake = Lake(Counting(), "memory")
        streams = LakeStreams(lake)
        schema = Schema.of(id="bigint")
        streams.create("many", schema=schema, key=["id"], partitions=partitions)
        streams.append(
            "many", pa.table({"id": [1, 2, 3]}, schema=schema.to_arrow()), producer="t", sequence=1
        )
        app = copying("many", "lake.many")
        requests.clear()
        rule = LaunchWhen(age=timedelta(days=1))
        backlog = measure_backlog(
            {"lake": streams},
            app,
            ApplicationState(),
            StreamScan(),
            rule,
            NOW,
            Deadline(40.0, lambda: 0.0),
        )
        assert (backlog.scan.lag, backlog.scan.young.rpartition(".")[0]) == (3, "lake.many")
        return sum("/manifests/" in key or key.endswith("/CURRENT") for key in requests)

    assert requests_for(1) == requests_for(64) <= 2, (
        "one scan at the stream answers all, also about ages"
    )


def test_a_tick_that_runs_out_of_time_is_gone_on_with_by_the_next(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.append(lake, "orders", 1, small.orders(0, 10))
    small.append(lake, "rates", 1, small.RATES)
    app = copying("two", "lake.orders", "lake.rates")
    monkeypatch.setattr(new_records, "TICK_SECONDS", -1.0)
    with DagsterInstance.ephemeral() as instance:
        sensor = Ticker(lake, app, instance, "two_new_records")
        assert "over after 1 streams" in sensor.skipped()
        cursor, _ = read_cursor(sensor.cursor)
        assert cursor.scan is not None
        assert {name: progress.lag for name, progress in cursor.scan.streams.items()} == {
            "lake.orders": 10
        }

        log = BatchLog(lake, "two")
        log.commit(log.read(), ApplicationState(checkpoint={"lake.orders.0": "1"}), by="somebody")
        assert "over after 1 streams" in sensor.skipped(), "another commit: the scan begins anew"
        assert sensor.asked().tags["adjunct/lag"] != "12"


def test_a_cursor_of_a_later_release_starts_again_and_says_so_in_the_log(
    lake: Lake, capfd: pytest.CaptureFixture[str]
) -> None:
    small.append(lake, "orders", 1, small.orders(0, 10))
    with DagsterInstance.ephemeral() as instance:
        sensor = Ticker(lake, copying(), instance, "copy_new_records")
        sensor.cursor = '{"version": 99, "asked": "?"}'
        sensor.asked()
    assert "The cursor has version 99" in capfd.readouterr().err


def _no_spark() -> object:
    raise AssertionError("a run without records started Spark")
