"""The sensor and the condition that launch runs for startpoints: ticks on a real lake and
instance; nothing is run.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus

from dagster_adjunct import Application, Lake, LakeStreams, SystemStreamPartition, open_lake
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    AppliedStartpoint,
    BatchLog,
    OffsetState,
)
from dagster_adjunct.orchestration.code_location.sensors import unapplied_startpoints
from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
from dagster_adjunct.orchestration.startpoints.store import StartpointManager
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointSpecific
from tests.clocks import on_clock
from tests.faulty_store import FaultyStore
from tests.orchestration.dagster import small
from tests.orchestration.dagster.ticking import BOTH, Ticker
from tests.orchestration.offsets.stored_startpoints import write_startpoint

ORDERS = [SystemStreamPartition("lake", "orders", number) for number in range(2)]
NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = open_lake(tmp_path / "lake")
    small.append(lake, "orders", 1, small.orders(0, 20))
    return lake


def copying() -> Application:
    app = Application("copy")
    app.input_stream("lake.orders").send_to(app.output_stream("lake.copy", partitions=1))
    return app


def ask_for(
    lake: Lake,
    ssp: SystemStreamPartition,
    *,
    offset: str = "3",
    by: str = "ann",
    task: str | None = None,
    age: timedelta = timedelta(0),
) -> str:
    made_ms = int((datetime.now(UTC) - age).timestamp() * 1000)
    startpoint = StartpointSpecific(offset=offset, creation_timestamp_ms=made_ms)
    manager = StartpointManager(MetadataStore(lake), "copy")
    write_startpoint(manager, ssp, startpoint, by=by, reason="the rates were wrong", task=task)
    # Each asking has an id of its own; one that has expired is not among the requests.
    return next(
        (request.id for request in manager.read().waiting if request.target == (ssp, task)), ""
    )


@BOTH
def test_without_requests_nothing_is_launched_and_no_plan_is_made(
    lake: Lake, instance: DagsterInstance, by: str
) -> None:
    """A plan is made of the streams: none is looked at."""
    store = FaultyStore(lake.store)
    sensor = Ticker(Lake(store, lake.id), copying(), instance, "copy_startpoints", by=by)
    assert sensor.skipped() == "No startpoints wait."
    assert store.requests
    assert not [key for _, key in store.requests if key.startswith("streams/")]


@BOTH
def test_requests_are_fanned_out_and_launch_one_run_that_names_them(
    lake: Lake, instance: DagsterInstance, by: str
) -> None:
    ids = sorted([ask_for(lake, ORDERS[0]), ask_for(lake, ORDERS[1], by="bob")])
    sensor = Ticker(lake, copying(), instance, "copy_startpoints", by=by)
    request = sensor.asked()
    assert request.run_key is not None
    assert request.run_key.startswith(f"copy:{lake.id}:startpoints:")
    assert request.run_key.endswith(":1")
    tags = {
        key: value for key, value in request.tags.items() if key.startswith("adjunct/startpoints")
    }
    assert sorted(tags.pop("adjunct/startpoints").split(", ")) == ids
    assert tags == {
        "adjunct/startpoints_by": "ann, bob",
        "adjunct/startpoints_reason": "the rates were wrong",
    }

    fanned_out = StartpointManager(MetadataStore(lake), "copy").get_fan_outs()
    assert {
        ssp: asked.startpoint.id for held in fanned_out.values() for ssp, asked in held.items()
    }.keys() == {*ORDERS}
    again = sensor.skipped()
    assert (
        "2 startpoints wait (lake.orders.0 at offset 3, ann: the rates were wrong; lake.orders.1"
        in again
    )
    assert "attempt 1 did not change that" in again


@pytest.mark.lengthy
@BOTH
def test_what_a_failed_run_left_is_asked_for_again_under_the_next_attempt(
    lake: Lake, instance: DagsterInstance, by: str
) -> None:
    at = NOW
    ask_for(lake, ORDERS[0])
    sensor = Ticker(on_clock(lake, lambda: at), copying(), instance, "copy_startpoints", by=by)
    first = sensor.asked().run_key
    keys, waits = [str(first)], []
    for _ in range(3):
        seconds = 0
        while isinstance(request := sensor.tick(), str):
            seconds += 30
            at += timedelta(seconds=30)
        keys.append(str(request.run_key))
        waits.append(seconds)
    assert waits == [60, 120, 240]
    assert [key.rpartition(":")[2] for key in keys] == ["1", "2", "3", "4"]
    assert len({key.rpartition(":")[0] for key in keys}) == 1

    ask_for(lake, ORDERS[1])
    assert sensor.asked().run_key not in keys, "another startpoint is asked for at once"


@BOTH
def test_a_request_written_while_a_run_is_in_progress_waits_for_the_next_one(
    lake: Lake, instance: DagsterInstance, by: str
) -> None:
    running = DagsterRun("copy", status=DagsterRunStatus.STARTED)
    instance.add_run(running)
    ask_for(lake, ORDERS[0])
    sensor = Ticker(lake, copying(), instance, "copy_startpoints", by=by)
    assert (
        sensor.skipped()
        == "1 startpoint waits (lake.orders.0 at offset 3, ann: the rates were wrong); a run is in"
        " progress: unless it stays, startpoints requested after its start wait for the next"
        " one."
    )
    startpoints = StartpointManager(MetadataStore(lake), "copy")
    assert len(startpoints.read().waiting) == 1
    assert startpoints.get_fan_outs() == {}

    instance.delete_run(running.run_id)
    sensor.asked()


@BOTH
def test_requests_that_no_task_can_apply_are_reported_and_not_launched_for(
    lake: Lake, instance: DagsterInstance, by: str
) -> None:
    ask_for(lake, SystemStreamPartition("lake", "orders", 9))
    ask_for(lake, ORDERS[0], task="Partition 9")
    sensor = Ticker(lake, copying(), instance, "copy_startpoints", by=by)
    assert (
        sensor.skipped()
        == "No waiting startpoint can be applied by a task. lake.orders.9: no task reads it (ann:"
        " the rates were wrong); lake.orders.0: no task reads it (ann: the rates were wrong)"
    )
    wanted = ask_for(lake, ORDERS[1])
    assert sensor.asked().tags["adjunct/startpoints"] == wanted


@BOTH
def test_an_expired_request_launches_nothing(
    lake: Lake, instance: DagsterInstance, by: str
) -> None:
    ask_for(lake, ORDERS[0], age=timedelta(hours=13))
    assert (
        Ticker(lake, copying(), instance, "copy_startpoints", by=by).skipped()
        == "No startpoints wait."
    )


@BOTH
def test_a_startpoint_that_was_applied_before_a_crash_is_not_launched_for_again(
    lake: Lake, instance: DagsterInstance, by: str
) -> None:
    startpoint_id = ask_for(lake, ORDERS[0])
    sensor = Ticker(lake, copying(), instance, "copy_startpoints", by=by)
    sensor.asked()
    applied = AppliedStartpoint(
        id=startpoint_id,
        position="offset 3",
        offset="3",
        epoch=1,
        by="ann",
        reason="why",
        batch=1,
        applied_at=NOW,
    )
    log = BatchLog(lake, "copy")
    offsets = OffsetState(applied={"lake.orders.0": applied})
    log.commit(
        log.read(), ApplicationState(checkpoint={"lake.orders.0": "3"}, offsets=offsets), by="run"
    )
    assert sensor.skipped() == "No startpoints wait."


def test_a_replay_that_has_begun_is_not_launched_for_again() -> None:
    request = StartpointRequest(
        ssp=ORDERS[0],
        startpoint=StartpointOldest(id="a"),
        until=StartpointSpecific(offset="3"),
        by="ann",
        reason="why",
    )
    fanned_out = {"Partition 0": {ORDERS[0]: request}}

    def begun(replay: str) -> ApplicationState:
        return ApplicationState(offsets=OffsetState(begun=frozenset({replay})))

    assert unapplied_startpoints(fanned_out, ApplicationState()) == [request]
    assert unapplied_startpoints(fanned_out, begun("a@lake.orders.1")) == [request]
    assert unapplied_startpoints(fanned_out, begun("a@lake.orders.0")) == []


@BOTH
def test_startpoints_wait_for_the_datasets_that_hold_the_input_back(
    lake: Lake, instance: DagsterInstance, tmp_path: Path, by: str
) -> None:
    app = small.order_totals(tmp_path / "t.sqlite", name="copy")
    ask_for(lake, ORDERS[0])
    sensor = Ticker(lake, app, instance, "copy_startpoints", by=by)
    assert "'items'" in sensor.skipped()
    small.append(lake, "items", 1, small.ITEMS, marker="v1")
    sensor.asked()


@BOTH
def test_a_startpoint_for_a_datasets_stream_does_not_wait_for_other_datasets(
    lake: Lake, instance: DagsterInstance, tmp_path: Path, by: str
) -> None:
    app = small.order_totals(tmp_path / "t.sqlite", name="copy")
    small.append(lake, "rates", 1, small.RATES)
    wanted = ask_for(lake, SystemStreamPartition("lake", "rates", 0), offset="0")
    assert (
        Ticker(lake, app, instance, "copy_startpoints", by=by).asked().tags["adjunct/startpoints"]
        == wanted
    )
    assert list(StartpointManager(MetadataStore(lake), "copy").get_fan_outs()) == ["dataset rates"]


def test_a_startpoint_on_a_datasets_stream_launches_an_application_of_datasets(
    lake: Lake, instance: DagsterInstance
) -> None:
    app = Application("copy")
    app.table(small.rates)
    small.append(lake, "rates", 1, small.RATES)
    sensor = Ticker(lake, app, instance, "copy_startpoints")
    assert sensor.skipped() == "No startpoints wait."
    wanted = ask_for(lake, SystemStreamPartition("lake", "rates", 0), offset="0")
    assert sensor.asked().tags["adjunct/startpoints"] == wanted


@pytest.mark.lengthy
def test_thousands_of_startpoints_make_one_run_with_tags_that_a_database_can_index(
    lake: Lake, instance: DagsterInstance
) -> None:
    streams = LakeStreams(lake)
    streams.create("wide", schema=small.SCHEMAS["orders"], key=["item"], partitions=2000)
    app = Application("copy")
    app.input_stream("lake.wide").send_to(app.output_stream("lake.copied", partitions=1))
    StartpointManager(MetadataStore(lake), "copy").write_startpoints(
        StartpointRequest(
            ssp=SystemStreamPartition("lake", "wide", number),
            startpoint=StartpointOldest(),
            by="ann",
            reason="why",
        )
        for number in range(2000)
    )
    request = Ticker(lake, app, instance, "copy_startpoints").asked()
    assert request.tags["adjunct/startpoints"].endswith(" and 1995 more")
    assert max(map(len, request.tags.values())) < 300
