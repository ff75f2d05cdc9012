"""When the sensor launches a run: the decision with plain values, then the tick on a real lake."""

from __future__ import annotations

from pathlib import Path

import pytest
from dagster import (
    AssetKey,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    RunRequest,
    SensorDefinition,
    SkipReason,
    build_sensor_context,
)

from dagster_adjunct import Application, Lake, LakeResource, build_definitions, open_lake, run_application, systems_for
from orchestration.progress import InputProgress, input_progress
from orchestration.sensors import NewRecordsCursor, Request, Skip, concerns, decide
from tests.orchestration.dagster import small

WAITING = InputProgress(5, {"lake.orders.0": "0"})


def decided(
    cursor: NewRecordsCursor,
    progress: InputProgress = WAITING,
    *,
    waiting: tuple[str, ...] = (),
    active: int = 0,
    now: float = 1000.0,
) -> Request | Skip:
    return decide("app:lake", cursor, progress, waiting=waiting, active_runs=active, now=now)


def asked(cursor: NewRecordsCursor, now: float) -> Request:
    decision = decided(cursor, now=now)
    assert isinstance(decision, Request), decision
    return decision


def test_nothing_new_launches_nothing() -> None:
    assert decided(NewRecordsCursor(), InputProgress(0, {})) == Skip("No new records.")


def test_new_records_launch_a_run_whose_key_holds_the_position_and_the_attempt() -> None:
    request = asked(NewRecordsCursor(), 1000.0)
    assert request.run_key == f"app:lake:{request.cursor.position}:1"
    assert request.cursor.asked_at == 1000.0


def test_a_run_on_its_way_is_waited_for() -> None:
    assert decided(NewRecordsCursor(), active=1) == Skip("5 new records; a run is already in progress.")


def test_a_dataset_without_its_markers_is_waited_for_by_name() -> None:
    skip = decided(NewRecordsCursor(), waiting=("dataset 'items' waits for lake.items.1",))
    assert skip == Skip("5 new records; dataset 'items' waits for lake.items.1.")


def test_a_run_that_moved_nothing_is_tried_again_ever_more_rarely_under_new_keys() -> None:
    request, now, waits, keys = asked(NewRecordsCursor(), 0.0), 0.0, [], set()
    for _ in range(9):
        keys.add(request.run_key)
        wait = 30.0
        while isinstance(decided(request.cursor, now=now + wait), Skip):
            wait += 30.0
        now, waits = now + wait, [*waits, wait]
        request = asked(request.cursor, now)
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert len(keys) == 9


def test_a_position_that_moved_is_asked_for_at_once() -> None:
    first = asked(NewRecordsCursor(), 0.0)
    second = decided(first.cursor, InputProgress(2, {"lake.orders.0": "5"}), now=1.0)
    assert isinstance(second, Request)
    assert second.cursor.attempt == 1
    assert second.cursor.position != first.cursor.position


def test_a_stream_read_from_its_end_gets_its_position_before_it_has_records() -> None:
    assert isinstance(decided(NewRecordsCursor(), InputProgress(0, {}, unresolved=True)), Request)


def test_a_cursor_survives_as_json() -> None:
    cursor = NewRecordsCursor("abc", 3, 12.5)
    assert NewRecordsCursor.from_json(cursor.to_json()) == cursor


@pytest.mark.parametrize("text", [None, "", "nonsense", "[]", '{"version": 99, "position": "a"}', '{"version": 1}'])
def test_a_cursor_of_another_version_starts_anew(text: str | None) -> None:
    assert NewRecordsCursor.from_json(text) == NewRecordsCursor()


def test_a_run_concerns_an_application_by_its_job_or_by_its_assets() -> None:
    priced, other = AssetKey(["lake", "priced"]), AssetKey(["lake", "other"])
    assert concerns(DagsterRun("order_totals"), "order_totals", [priced])
    assert concerns(DagsterRun("__ASSET_JOB", asset_selection={priced}), "order_totals", [priced])
    assert not concerns(DagsterRun("__ASSET_JOB", asset_selection={other}), "order_totals", [priced])


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = open_lake(tmp_path / "lake")
    small.create_streams(lake)
    return lake


def tick(lake: Lake, app: Application, instance: DagsterInstance, cursor: str | None = None) -> tuple[object, str]:
    """Return what the sensor answers, and its cursor after."""
    (sensor,) = build_definitions(app, lake=lake.url).sensors or ()
    assert isinstance(sensor, SensorDefinition)
    with build_sensor_context(
        instance=instance, cursor=cursor, resources={"adjunct_lake": LakeResource(url=lake.url)}
    ) as context:
        return sensor(context), context.cursor or ""


def test_ticks_follow_the_lake_and_never_ask_twice_for_one_position(lake: Lake, tmp_path: Path) -> None:
    app = small.order_totals(tmp_path / "t.sqlite")
    with DagsterInstance.ephemeral() as instance:
        nothing, _ = tick(lake, app, instance)
        assert isinstance(nothing, SkipReason)
        assert nothing.skip_message == "No new records."

        small.append(lake, "orders", 1, small.orders(0, 10))
        held, _ = tick(lake, app, instance)
        assert isinstance(held, SkipReason)
        assert "lake.items.0, lake.items.1" in str(held.skip_message)

        small.append(lake, "items", 1, small.ITEMS, marker="v1")
        request, cursor = tick(lake, app, instance)
        assert isinstance(request, RunRequest)
        assert request.tags["adjunct/lag"] == "10"
        again, _ = tick(lake, app, instance, cursor)
        assert isinstance(again, SkipReason)
        assert "did not get past them" in str(again.skip_message)

        instance.add_run(DagsterRun("order_totals", status=DagsterRunStatus.STARTED))
        running, _ = tick(lake, app, instance)
        assert isinstance(running, SkipReason)
        assert "already in progress" in str(running.skip_message)


def test_an_application_that_reads_from_the_end_of_a_stream_is_launched_once_to_store_where(lake: Lake) -> None:
    app = Application("tail")
    app.input_stream("lake.orders", default_offset="upcoming").send_to(app.output_stream("lake.tail", partitions=1))
    small.append(lake, "orders", 1, small.orders(0, 10))
    systems = systems_for(app, lake)
    assert input_progress(lake, systems, app).unresolved

    run_application(lake, systems, app, _no_spark, run="first")
    small.append(lake, "orders", 2, small.orders(10, 3))
    progress = input_progress(lake, systems, app)
    assert (progress.unresolved, progress.lag) == (False, 3)


def _no_spark() -> object:
    raise AssertionError("a run without records started Spark")
