"""After a permanent failure no run is launched until something has changed; a partition says why
it is missing.
"""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunRequest

from dagster_adjunct import Application, Lake, LakeStreams, Schema, bounded_dataset, open_lake
from dagster_adjunct.errors import ConfigurationError, TransientError
from dagster_adjunct.orchestration.code_location import failures
from dagster_adjunct.orchestration.code_location.failures import Circumstances, Failure, decide_wait
from dagster_adjunct.orchestration.maintenance.delete import delete_stream
from dagster_adjunct.startpoints import StartpointOldest, Startpoints
from tests.orchestration.dagster.test_restart_sensor import fail
from tests.orchestration.dagster.ticking import BOTH, Ticker

WRONG = ConfigurationError("the column 'n' is missing.", "Add it.")
SCHEMA = Schema.of(item="string")
FAILED = Failure("0123456789", 100.0, "the column is missing. Add it.")


def append(lake: Lake, stream: str, number: int, marker: str | None = None) -> None:
    streams = LakeStreams(lake)
    streams.create(stream, schema=SCHEMA, key=["item"], partitions=1)
    rows = pa.Table.from_pylist([{"item": f"{number}"}], SCHEMA.to_arrow())
    streams.append(stream, rows, producer="test", sequence=number, end_of_dataset=marker)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = open_lake(tmp_path / "lake")
    append(lake, "items", 1, "v1")
    append(lake, "orders", 1)
    return lake


def copying() -> Application:
    app = Application("copy")
    app.input_stream("lake.orders", default_offset="oldest").send_to(
        app.output_stream("lake.copy", partitions=1)
    )
    app.table(bounded_dataset("items", input="lake.items", key="item", broadcast=True))
    return app


@pytest.mark.parametrize(
    ("now", "waits"),
    [
        (Circumstances(50.0, 0.0, "a", "a"), True),
        (Circumstances(50.0, 99.0, "a", "a"), True),
        (Circumstances(101.0, 0.0, "a", "a"), False),
        (Circumstances(50.0, 101.0, "a", "a"), False),
        (Circumstances(50.0, 0.0, "b", "a"), False),
    ],
)
def test_what_has_changed_since_a_failure_ends_the_wait(now: Circumstances, waits: bool) -> None:
    text = decide_wait(FAILED, now)
    assert bool(text) == waits
    if waits:
        assert text.startswith(
            "Run 01234567 failed permanently: the column is missing. Add it. Another run would"
        )
    assert decide_wait(None, now) == ""


@BOTH
def test_new_records_launch_nothing_after_a_permanent_failure(
    lake: Lake, instance: DagsterInstance, by: str
) -> None:
    sensor = Ticker(lake, copying(), instance, "copy_new_records", by=by)
    sensor.asked()
    run = fail(instance, WRONG)
    for number in (2, 3):
        append(lake, "orders", number)
        reported = sensor.skipped()
        assert f"Run {run[:8]} failed permanently: the column 'n' is missing. Add it." in reported
        assert "until the code location is loaded again" in reported


def test_a_transient_failure_holds_nothing_back(lake: Lake, instance: DagsterInstance) -> None:
    fail(instance, TransientError("the store did not answer."))
    assert isinstance(Ticker(lake, copying(), instance, "copy_new_records").tick(), RunRequest)


def test_a_code_location_that_was_loaded_again_tries_once_more(
    lake: Lake, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensors = [
        Ticker(lake, copying(), instance, f"copy_{name}") for name in ("new_records", "restart")
    ]
    fail(instance, WRONG)
    assert all("failed permanently" in sensor.skipped() for sensor in sensors)
    monkeypatch.setattr(failures, "LOADED_AT", time.time())
    assert isinstance(sensors[0].tick(), RunRequest)
    assert "failed permanently" not in str(sensors[1].tick())
    again = fail(instance, WRONG)
    assert all(f"Run {again[:8]} failed permanently" in sensor.skipped() for sensor in sensors)


def test_a_run_by_hand_that_succeeds_ends_the_wait(lake: Lake, instance: DagsterInstance) -> None:
    sensor = Ticker(lake, copying(), instance, "copy_new_records")
    fail(instance, WRONG)
    assert "failed permanently" in sensor.skipped()
    instance.add_run(DagsterRun("copy", status=DagsterRunStatus.SUCCESS))
    assert isinstance(sensor.tick(), RunRequest)


def request_startpoint(lake: Lake) -> None:
    Startpoints(copying(), lake=lake).request(
        ["lake.orders"], StartpointOldest(), by="me", reason="it was wrong"
    )


def deliver_again(lake: Lake) -> None:
    append(lake, "items", 2, "v2")


def recreate_stream(lake: Lake) -> None:
    delete_stream(lake, "orders", reason="anew", by="me", force=True)
    append(lake, "orders", 1)


@pytest.mark.parametrize("change", [request_startpoint, deliver_again, recreate_stream])
def test_what_is_changed_in_the_store_ends_the_wait(
    lake: Lake, instance: DagsterInstance, change
) -> None:  # type: ignore[no-untyped-def]
    sensor = Ticker(lake, copying(), instance, "copy_new_records")
    fail(instance, WRONG)
    assert "failed permanently" in sensor.skipped()
    append(lake, "orders", 7)
    assert "failed permanently" in sensor.skipped(), "records are no change"
    change(lake)
    assert isinstance(sensor.tick(), RunRequest)
    again = fail(instance, WRONG)
    assert f"Run {again[:8]} failed permanently" in sensor.skipped()
