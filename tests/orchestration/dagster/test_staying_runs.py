"""Runs that stay, in Dagster: what the sensor launches, what is reported meanwhile, and what ends them."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dagster as dg
import pyarrow as pa
import pytest

from dagster_adjunct import Application, Lake, LakeStreams, Schema, bounded_dataset, build_definitions, open_lake
from dagster_adjunct.code_location import LaunchWhen
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.batch_log.run_lease import asked_key
from dagster_adjunct.orchestration.code_location import sensors
from dagster_adjunct.orchestration.code_location.output_assets import Bundled
from dagster_adjunct.orchestration.step import following
from dagster_adjunct.orchestration.step.batch import BatchMetrics
from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.orchestration.step.step import run_step
from tests.orchestration.dagster.lab import APPLES, NO_SPARK, FinishedRun, Lab, running_lab
from tests.orchestration.dagster.ticking import Ticker
from tests.orchestration.stub_engine import StubEngine

STAYING = LaunchWhen(stay=timedelta(minutes=30))


def shop() -> Application:
    app = Application("shop")
    app.input_stream("lake.orders", default_offset="oldest").send_to(app.output_stream("lake.copy", partitions=1))
    app.table(bounded_dataset("items", input="lake.items", key="item", partitions=2))
    return app


@pytest.fixture
def lake_with_orders(tmp_path: Path) -> Lake:
    lake = open_lake(tmp_path / "lake")
    schema = Schema.of(item="string", label="string", price="int")
    for name in ("orders", "items"):
        LakeStreams(lake).create(name, schema=schema, key=["item"], partitions=2)
    return lake


def deliver(lake: Lake, stream: str, sequence: int, marker: str | None = None) -> None:
    rows = [dict(zip(("item", "label", "price"), row, strict=True)) for row in APPLES]
    schema = Schema.of(item="string", label="string", price="int").to_arrow()
    table = pa.Table.from_pylist(rows, schema)
    LakeStreams(lake).append(stream, table, producer="test", sequence=sequence, end_of_dataset=marker)


def test_the_sensor_launches_a_run_that_stays_and_lets_it_be(lake_with_orders: Lake) -> None:
    lake = lake_with_orders
    deliver(lake, "items", 1, "v1")
    deliver(lake, "orders", 1)
    with dg.DagsterInstance.ephemeral() as instance:
        sensor = Ticker(lake, shop(), instance, "shop_new_records", launch_when=STAYING)
        request = sensor.asked()
        assert request.run_config == {"ops": {"shop_step": {"config": {"follow_seconds": 1800.0}}}}
        job = sensor.defs.resolve_job_def("shop")
        assert dg.validate_run_config(job, request.run_config)
        run = dg.DagsterRun("shop", status=dg.DagsterRunStatus.STARTED, tags=dict(request.tags))
        instance.add_run(run)
        assert sensor.skipped() == "A run is already in progress."
        assert lake.store.head(asked_key(lake, "shop")) is None
        items = {dg.AssetKey(["datasets", "items_dataset"])}
        instance.add_run(dg.DagsterRun("shop", status=dg.DagsterRunStatus.STARTED, asset_selection=frozenset(items)))
        assert sensor.skipped() == "A run is already in progress.", "a dataset's run needs no lease of the application"
        assert lake.store.head(asked_key(lake, "shop")) is None
        instance.add_run(dg.DagsterRun("shop", status=dg.DagsterRunStatus.STARTED))
        assert "asked to end: another run" in sensor.skipped()
        assert b"another run in Dagster" in lake.store.get(asked_key(lake, "shop")).data


def test_a_run_of_code_that_was_loaded_before_is_asked_to_end(lake_with_orders: Lake) -> None:
    lake = lake_with_orders
    with dg.DagsterInstance.ephemeral() as instance:
        sensor = Ticker(lake, shop(), instance, "shop_new_records", launch_when=STAYING)
        tags = {sensors._LOADED_TAG: "by another process"}
        instance.add_run(dg.DagsterRun("shop", status=dg.DagsterRunStatus.STARTED, tags=tags))
        assert "asked to end" in sensor.skipped()
        assert b"loaded again" in lake.store.get(asked_key(lake, "shop")).data


@pytest.mark.parametrize("wrong", [timedelta(0), timedelta(minutes=-1), 60])
def test_a_stay_that_is_no_time_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LaunchWhen(stay=wrong)
    assert caught.value.argument == "stay"


class Copies(StubEngine):
    """Writes nothing, and counts a row for each record."""

    def run(self, context: StepContext, inputs: BatchInputs, before_output: Any) -> BatchMetrics:
        return BatchMetrics({"lake.copy": {"rows": inputs.records}}, {})


def test_batches_and_versions_of_a_run_that_stays_are_reported_before_it_ends(tmp_path: Path) -> None:
    with running_lab(tmp_path) as lab:
        lab.deliver("items", APPLES, "v1")
        lab.deliver("orders", APPLES, None)
        defs = build_definitions(shop(), lake=lab.lake.url, spark=NO_SPARK)
        finished = stay(lab, defs)
        assert finished.success, finished.log
        made = [
            event.step_materialization_data.materialization
            for event in finished.events
            if event.is_step_materialization
        ]
        copies = [one for one in made if one.asset_key.path[-1] == "copy"]
        assert [one.metadata["adjunct/last_batch"].value for one in copies] == [1, 2]
        assert [one.metadata["adjunct/batches"].value for one in copies] == [1, 2]
        versions = {one.tags["dagster/data_version"] for one in made if one.asset_key.path[-1] == "items_dataset"}
        assert len(versions) == 2, "the second was delivered, sealed and reported while the run stayed"
        assert "it has stayed for 0:10:00" in finished.log


def stay(lab: Lab, defs: dg.Definitions) -> FinishedRun:
    """Run the job; a version and records come when it waits first, and its end when it waits again."""
    waited = list[bool]()

    class Waiting(following.Following):
        def wait(self) -> bool:
            if not waited:
                lab.deliver("items", [("a", "Apple", 3)], "v2")
                lab.deliver("orders", APPLES, None)
            else:
                self._end = self._clock()
            waited.append(True)
            return super().wait()

    step = partial(run_step, engine=Copies())
    bundled = partial(Bundled, every=0.0)
    module = "dagster_adjunct.orchestration.code_location.output_assets"
    with (
        patch.object(following, "run_step", step),
        patch.object(following, "Following", Waiting),
        patch(f"{module}.Bundled", bundled),
    ):
        job = defs.resolve_job_def("shop")
        config = {"ops": {"shop_step": {"config": {"follow_seconds": 600}}}}
        result = job.execute_in_process(instance=lab.instance, run_config=config, raise_on_error=False)
    return FinishedRun(result, lab.instance)


def test_reports_are_bundled_to_one_a_minute_and_none_is_lost() -> None:
    now, passed_on = [0.0], list[int]()

    def report(batches: int) -> StepReport:
        return StepReport(batches, False, {}, {}, {}, state=None)  # type: ignore[arg-type]

    bundled = Bundled(lambda report: passed_on.append(report.batches), clock=lambda: now[0])
    for batches, at in enumerate((1, 20, 59, 61, 62, 100), 1):
        now[0] = at
        bundled.add(report(batches))
    assert passed_on == [4]
    for at in (110, 122, 300):
        now[0] = at
        bundled.flush()
    assert passed_on == [4, 6]
