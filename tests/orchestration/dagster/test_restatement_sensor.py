"""Runs that Dagster starts because a dataset has changed, which results follow."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from dagster import DagsterInstance

from dagster_adjunct import Application, Restate, open_lake
from dagster_adjunct.errors import RestatementError
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.startpoints import StartpointUpcoming
from tests.clocks import on_clock
from tests.orchestration.changing_datasets import ChangingWorld, Following
from tests.orchestration.dagster.test_restart_sensor import fail
from tests.orchestration.dagster.ticking import BOTH, Ticker

pytestmark = pytest.mark.lengthy
HOUR = timedelta(hours=1)


@pytest.fixture
def dataset(tmp_path: Path) -> Following:
    """A dataset, and records that were joined with its first entries."""
    world = ChangingWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    dataset = Following(world, random.Random(1))
    dataset.begin()
    world.stream("facts", "k", 2, n="int", k="string")
    dataset.send({"a": (1, 1), "b": (2, 2)})
    world.send("facts", (0, "a"), (1, "b"))
    run_step(world.context(enriching(dataset)))
    return dataset


def enriching(dataset: Following, every: timedelta | None = None, most: int = 100) -> Application:
    app = Application("copy", engine="auto")
    facts = app.input_stream("lake.facts", default_offset="oldest")
    restate = Restate(7 * 24 * HOUR, every, most_records=most)
    joined = facts.join(
        app.table(dataset.declare()), on="k", how="left", select=["v"], restate=restate
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    return app


@BOTH
def test_a_dataset_that_somebody_else_has_advanced_starts_a_run(
    dataset: Following, instance: DagsterInstance, by: str
) -> None:
    world = dataset.world
    app = enriching(dataset)
    sensor = Ticker(world.lake, app, instance, "copy_new_records", by)
    assert sensor.skipped() == "No new records."
    for value in (7, 8):
        dataset.send({"a": (value, 1)})
        sensor.asked()
        run_step(world.context(app))
        assert sensor.skipped() == "No new records."


def test_none_starts_before_results_may_be_restated_again(
    dataset: Following, instance: DagsterInstance
) -> None:
    world = dataset.world
    app = enriching(dataset, every=HOUR)
    dataset.send({"a": (7, 1)})
    run_step(world.context(app))
    dataset.send({"a": (8, 1)})
    sensor = Ticker(world.lake, app, instance, "copy_new_records")
    assert sensor.skipped() == "No new records."
    later = on_clock(world.lake, lambda: datetime.now(UTC) + HOUR)
    Ticker(later, app, instance, "copy_new_records").asked()


def test_too_much_to_restate_holds_no_new_records_back(
    dataset: Following, instance: DagsterInstance
) -> None:
    world = dataset.world
    app = enriching(dataset, most=1)
    dataset.send({"a": (7, 1), "b": (7, 2)})
    sensor = Ticker(world.lake, app, instance, "copy_new_records")
    sensor.asked()
    with pytest.raises(RestatementError) as caught:
        run_step(world.context(app))
    fail(instance, caught.value)
    assert "failed permanently" in sensor.skipped()
    world.send("facts", (2, "a"))
    sensor.asked()
    with pytest.raises(RestatementError):
        run_step(world.context(app))
    fail(instance, caught.value)
    assert "failed permanently" in sensor.skipped()
    Startpoints(app, lake=world.lake).request(
        "changes.planes", StartpointUpcoming(), reason="test", by="test"
    )
    run_step(world.context(app))
    assert sensor.skipped() == "No new records."
