"""The launchpad's job for startpoints: asks for them, shows what they would do, takes them back;
without Spark.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance

from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    SystemStreamPartition,
    build_definitions,
    open_lake,
)
from dagster_adjunct.orchestration.startpoints.store import StartpointManager
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.streams.startpoint import StartpointSpecific, StartpointTimestamp
from tests.orchestration.dagster import small
from tests.orchestration.dagster.lab import FinishedRun

ORDERS = [SystemStreamPartition("lake", "orders", number) for number in range(2)]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = open_lake(tmp_path / "lake")
    small.append(lake, "orders", 1, small.orders(0, 20))
    return lake


@pytest.fixture
def startpoints(lake: Lake) -> StartpointManager:
    return StartpointManager(MetadataStore(lake), "copy-all")


def launch(lake: Lake, instance: DagsterInstance, **config: Any) -> FinishedRun:
    app = Application("copy-all")
    app.input_stream("lake.orders").send_to(app.output_stream("lake.copy", partitions=1))
    job = build_definitions(app, lake=lake.url).resolve_job_def("copy_all_startpoint")
    run_config = {"ops": {"startpoint_copy_all": {"config": {"reason": "wrong rates", **config}}}}
    return FinishedRun(
        job.execute_in_process(run_config=run_config, instance=instance, raise_on_error=False),
        instance,
    )


def test_a_whole_stream_is_asked_for_with_who_and_why_and_what_it_will_do(
    lake: Lake, instance: DagsterInstance, startpoints: StartpointManager
) -> None:
    finished = launch(
        lake, instance, partitions=["lake.orders"], position={"at": "oldest"}, by="ann"
    )
    assert finished.success, finished.log
    asked = startpoints.read().waiting
    assert [
        (request.ssp, request.startpoint.kind, request.by, request.reason) for request in asked
    ] == [(ssp, "oldest", "ann", "wrong rates") for ssp in ORDERS]
    streams = LakeStreams(lake)
    for ssp, end in streams.upcoming(ORDERS).items():
        assert (
            f"{ssp} (Partition {ssp.partition}): from 0; {end} offsets to read: begins here"
            in finished.log
        )
    assert (
        "requested; the next run of copy-all applies it, which the sensor copy_all_startpoints"
        " launches if it is on." in finished.log
    )


def test_a_bounded_replay_is_asked_for_by_time_and_offset(
    lake: Lake, instance: DagsterInstance, startpoints: StartpointManager
) -> None:
    finished = launch(
        lake,
        instance,
        partitions=["lake.orders.1"],
        position={"at": "timestamp", "value": "2026-01-02T00:00Z"},
        until={"at": "offset", "value": "3"},
        task="Partition 1",
        versions="current",
    )
    assert finished.success, finished.log
    assert "versions current: every join uses what is served when the replay runs" in finished.log
    (asked,) = startpoints.read().waiting
    assert isinstance(asked.startpoint, StartpointTimestamp)
    assert asked.startpoint.timestamp_ms == 1767312000000
    assert isinstance(asked.until, StartpointSpecific)
    assert (asked.until.offset, asked.task, asked.by) == (
        "3",
        "Partition 1",
        finished.result.run_id,
    )
    assert asked.versions == "current"


def test_a_dry_run_shows_all_that_and_writes_nothing(
    lake: Lake, instance: DagsterInstance, startpoints: StartpointManager
) -> None:
    finished = launch(
        lake,
        instance,
        partitions=["lake.orders.0-1"],
        position={"at": "offset", "value": "2"},
        dry_run=True,
    )
    assert finished.success, finished.log
    assert startpoints.read().waiting == []
    assert "Dry run: nothing was written." in finished.log
    (event,) = [event for event in finished.events if event.event_type_value == "STEP_OUTPUT"]
    displayed = event.step_output_data.metadata["adjunct/startpoints"].value
    assert [
        (partition["partition"], partition["start"], partition["tasks"])
        for partition in displayed["partitions"]
    ] == [("lake.orders.0", "2", ["Partition 0"]), ("lake.orders.1", "2", ["Partition 1"])]
    assert displayed["written"] is False


@pytest.mark.lengthy
def test_what_waits_is_taken_back(
    lake: Lake, instance: DagsterInstance, startpoints: StartpointManager
) -> None:
    launch(lake, instance, partitions=["lake.orders"], position={"at": "oldest"})
    finished = launch(lake, instance, action="clear", partitions=["lake.orders.0"])
    assert finished.success, finished.log
    assert "taken back: lake.orders.0: oldest" in finished.log
    assert [request.ssp for request in startpoints.read().waiting] == [ORDERS[1]]
    again = launch(lake, instance, action="clear", partitions=["lake.orders.0"])
    assert "not removed: lake.orders.0: there is no request" in again.log


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"position": {"at": "oldest"}, "partitions": ["lake.nothing"]},
            "does not read lake.nothing",
        ),
        ({"position": {"at": "oldest"}, "partitions": []}, "no partition is named"),
        ({"partitions": ["lake.orders"]}, "action set needs a position"),
        (
            {"partitions": ["lake.orders"], "position": {"at": "timestamp"}},
            "position timestamp needs a value",
        ),
        (
            {"partitions": ["lake.orders"], "position": {"at": "oldest"}, "versions": "recorded"},
            "is for a bounded replay",
        ),
        (
            {
                "partitions": ["lake.orders"],
                "position": {"at": "oldest"},
                "until": {"at": "upcoming"},
                "versions": "as_of",
            },
            "no join of application 'copy-all' is as-of",
        ),
        (
            {"partitions": ["lake.orders"], "position": {"at": "offset", "value": "999"}},
            "nothing is written",
        ),
        (
            {"partitions": ["lake.orders"], "action": "clear", "dry_run": True},
            "action clear has no dry run",
        ),
        ({"partitions": [], "action": "clear"}, "no partition is named"),
        (
            {"partitions": ["lake.orders"], "position": {"at": "oldest"}, "reason": " "},
            "reason=' '",
        ),
    ],
)
def test_what_cannot_be_asked_for_fails_and_writes_nothing(
    lake: Lake,
    instance: DagsterInstance,
    startpoints: StartpointManager,
    config: dict[str, Any],
    problem: str,
) -> None:
    finished = launch(lake, instance, **config)
    assert not finished.success
    assert problem in finished.failure.description
    assert startpoints.read().waiting == []


def test_without_startpoints_there_is_no_sensor_and_the_job_refuses(
    lake: Lake, instance: DagsterInstance, startpoints: StartpointManager
) -> None:
    app = Application("copy-all", startpoints=False)
    app.input_stream("lake.orders").send_to(app.output_stream("lake.copy", partitions=1))
    definitions = build_definitions(app, lake=lake.url)
    assert "copy_all_startpoints" not in {sensor.name for sensor in definitions.sensors or ()}
    config = {"partitions": ["lake.orders"], "position": {"at": "oldest"}, "reason": "wrong rates"}
    result = definitions.resolve_job_def("copy_all_startpoint").execute_in_process(
        run_config={"ops": {"startpoint_copy_all": {"config": config}}},
        instance=instance,
        raise_on_error=False,
    )
    finished = FinishedRun(result, instance)
    assert not finished.success
    assert "disabled" in finished.failure.description
    assert startpoints.read().waiting == []
