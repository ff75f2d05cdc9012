"""Runs that stay, in Dagster: what the sensor launches, what is reported meanwhile, and what
ends them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dagster as dg
import pyarrow as pa
import pytest
from dagster._core.storage.dagster_run import RunOpConcurrency

from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    Schema,
    bounded_dataset,
    build_definitions,
    open_lake,
    unbounded_dataset,
)
from dagster_adjunct.code_location import LaunchWhen
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.batch_log.run_lease import asked_key
from dagster_adjunct.orchestration.code_location import sensors
from dagster_adjunct.orchestration.code_location.output_assets import Bundled
from dagster_adjunct.orchestration.step import following
from dagster_adjunct.orchestration.step.context import BatchInputs, BatchMetrics, StepContext
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.startpoints import StartpointOldest, Startpoints
from tests.orchestration.dagster.lab import APPLES, NO_SPARK, FinishedRun, Lab, running_lab
from tests.orchestration.dagster.ticking import BOTH, HERE, Ticker, job_origin
from tests.orchestration.stub_engine import StubEngine

STAYING = LaunchWhen(stay=timedelta(minutes=30))


def shop() -> Application:
    app = Application("shop")
    app.input_stream("lake.orders", default_offset="oldest").send_to(
        app.output_stream("lake.copy", partitions=1)
    )
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
    LakeStreams(lake).append(
        stream, table, producer="test", sequence=sequence, end_of_dataset=marker
    )


@BOTH
def test_the_sensor_launches_a_run_that_stays_and_lets_it_be(
    lake_with_orders: Lake, by: str
) -> None:
    lake = lake_with_orders
    deliver(lake, "items", 1, "v1")
    deliver(lake, "orders", 1)
    with dg.DagsterInstance.ephemeral() as instance:
        sensor = Ticker(lake, shop(), instance, "shop_new_records", launch_when=STAYING, by=by)
        request = sensor.asked()
        assert request.run_config == {"ops": {"shop_step": {"config": {"follow_seconds": 1800.0}}}}
        job = sensor.defs.resolve_job_def("shop")
        assert dg.validate_run_config(job, request.run_config)
        run = dg.DagsterRun("shop", status=dg.DagsterRunStatus.STARTED, tags=dict(request.tags))
        instance.add_run(run)
        assert sensor.skipped() == "A run is already in progress."
        assert lake.store.head(asked_key(lake, "shop")) is None
        items = {dg.AssetKey(["datasets", "items_dataset"])}
        instance.add_run(
            dg.DagsterRun(
                "shop", status=dg.DagsterRunStatus.STARTED, asset_selection=frozenset(items)
            )
        )
        assert sensor.skipped() == "A run is already in progress.", (
            "a dataset's run needs no lease of the application"
        )
        assert lake.store.head(asked_key(lake, "shop")) is None
        instance.add_run(dg.DagsterRun("shop", status=dg.DagsterRunStatus.STARTED))
        assert "asked to end: another run" in sensor.skipped()
        assert b"another run in Dagster" in lake.store.get(asked_key(lake, "shop")).data


@BOTH
def test_a_run_that_stays_is_asked_to_end_for_one_that_waits_for_its_pools(
    lake_with_orders: Lake, by: str
) -> None:
    lake, status = lake_with_orders, dg.DagsterRunStatus

    def add(
        instance: dg.DagsterInstance, job: str, status: dg.DagsterRunStatus, *pools: str
    ) -> None:
        needed = RunOpConcurrency(
            root_key_counts={}, has_unconstrained_root_nodes=False, all_pools=set(pools)
        )
        origin = job_origin(HERE, job)
        instance.add_run(
            dg.DagsterRun(job, status=status, remote_job_origin=origin, run_op_concurrency=needed)
        )

    with dg.DagsterInstance.ephemeral() as instance:
        sensor = Ticker(lake, shop(), instance, "shop_new_records", launch_when=STAYING, by=by)
        add(instance, "shop", status.STARTED, "adjunct/dataset/items", "adjunct/application/shop")
        add(instance, "elsewhere", status.QUEUED, "adjunct/dataset/others")
        add(instance, "has_begun", status.STARTED, "adjunct/dataset/items")
        assert sensor.skipped() == "A run is already in progress."
        add(instance, "till", status.QUEUED, "adjunct/dataset/items", "adjunct/application/till")
        assert "asked to end: another run" in sensor.skipped()
        assert lake.store.head(asked_key(lake, "shop")) is not None


@BOTH
def test_a_run_of_code_that_was_loaded_before_is_asked_to_end(
    lake_with_orders: Lake, by: str
) -> None:
    lake = lake_with_orders
    with dg.DagsterInstance.ephemeral() as instance:
        sensor = Ticker(lake, shop(), instance, "shop_new_records", launch_when=STAYING, by=by)
        tags = {sensors._LOADED_TAG: "by another process"}
        instance.add_run(dg.DagsterRun("shop", status=dg.DagsterRunStatus.STARTED, tags=tags))
        assert "asked to end" in sensor.skipped()
        assert b"loaded again" in lake.store.get(asked_key(lake, "shop")).data
        # Also by code whose runs no longer stay.
        lake.store.delete(asked_key(lake, "shop"))
        assert "asked to end" in Ticker(lake, shop(), instance, "shop_new_records", by=by).skipped()
        assert lake.store.head(asked_key(lake, "shop")) is not None


def test_a_restart_by_code_that_was_loaded_again_is_let_be(lake_with_orders: Lake) -> None:
    lake = lake_with_orders
    tags = {sensors._LOADED_TAG: "by another process"}
    with dg.DagsterInstance.ephemeral() as instance:
        run = dg.DagsterRun("shop", tags=tags)
        instance.add_run(run)
        instance.report_run_failed(run)
        with patch.object(sensors, "backoff_seconds", lambda attempt: -1e6):
            request = Ticker(lake, shop(), instance, "shop_restart", launch_when=STAYING).asked()
        instance.add_run(
            dg.DagsterRun("shop", status=dg.DagsterRunStatus.STARTED, tags=dict(request.tags))
        )
        sensor = Ticker(lake, shop(), instance, "shop_new_records", launch_when=STAYING)
        assert sensor.skipped() == "A run is already in progress."


@pytest.mark.parametrize("wrong", [timedelta(0), timedelta(minutes=-1), 60, timedelta.max])
def test_a_stay_that_is_no_time_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LaunchWhen(stay=wrong)
    assert caught.value.argument == "stay"


class Copies(StubEngine):
    """Writes nothing, and counts a row for each record."""

    def run(self, context: StepContext, inputs: BatchInputs, before_output: Any) -> BatchMetrics:
        return BatchMetrics({"lake.copy": {"rows": inputs.records}}, {})


@pytest.mark.lengthy
def test_batches_and_versions_of_a_run_that_stays_are_reported_before_it_ends(
    tmp_path: Path,
) -> None:
    with running_lab(tmp_path) as lab:
        lab.deliver("items", APPLES, "v1")
        lab.deliver("orders", APPLES, None)
        defs = build_definitions(shop(), lake=lab.lake.url, spark=NO_SPARK)

        def deliver() -> None:
            lab.deliver("items", [("a", "Apple", 3)], "v2")
            lab.deliver("orders", APPLES, None)

        finished = stay(lab, defs, deliver, every=0.0)
        assert finished.success, finished.log
        made = [
            event.step_materialization_data.materialization
            for event in finished.events
            if event.is_step_materialization
        ]
        copies = [one for one in made if one.asset_key.path[-1] == "copy"]
        assert [one.metadata["adjunct/last_batch"].value for one in copies] == [1, 2]
        assert [one.metadata["adjunct/batches"].value for one in copies] == [1, 2]
        versions = {
            one.tags["dagster/data_version"]
            for one in made
            if one.asset_key.path[-1] == "items_dataset"
        }
        assert len(versions) == 2, (
            "the second was delivered, sealed and reported while the run stayed"
        )
        assert "it has stayed for 0:10:00" in finished.log


def stay(
    lab: Lab,
    defs: dg.Definitions,
    *waits: Callable[[], object],
    begun: Callable[[], object] = lambda: None,
    every: float = 60.0,
) -> FinishedRun:
    """Run the job; each time that it waits the next of `waits` is called, and then it ends.

    `begun` is called once, after the assets of datasets and before the run looks first; `every` is
    how often it reports.
    """
    due, begins = iter(waits), iter([begun])

    class Waiting(following.Following):
        def begin(self) -> None:
            next(begins, lambda: None)()
            super().begin()

        def wait(self, held: bool = False) -> bool:
            act = next(due, None)
            if act is None:
                self._end = self._clock()
            else:
                act()
            return super().wait(held)

    step = partial(run_step, engine=Copies())
    bundled = partial(Bundled, every=every)
    module = "dagster_adjunct.orchestration.code_location.output_assets"
    with (
        patch("dagster_adjunct.orchestration.step.run.run_step", step),
        patch.object(following, "Following", Waiting),
        patch.object(following, "_PAUSE", 0.0),
        patch(f"{module}.Bundled", bundled),
    ):
        job = defs.resolve_job_def("shop")
        config = {"ops": {"shop_step": {"config": {"follow_seconds": 600}}}}
        result = job.execute_in_process(
            instance=lab.instance, run_config=config, raise_on_error=False
        )
    return FinishedRun(result, lab.instance)


def versions_of_items(finished: FinishedRun) -> list[str]:
    """Return the versions of the dataset that a run reported, by their names."""
    made = [
        one.step_materialization_data.materialization
        for one in finished.events
        if one.is_step_materialization
    ]
    return [
        str(one.metadata["adjunct/name"].value)
        for one in made
        if one.asset_key.path[-1] == "items_dataset"
    ]


@pytest.mark.lengthy
def test_a_version_that_comes_after_its_asset_and_before_the_first_look_is_published(
    tmp_path: Path,
) -> None:
    with running_lab(tmp_path) as lab:
        lab.deliver("items", APPLES, "v1")
        lab.deliver("orders", APPLES, None)
        defs = build_definitions(shop(), lake=lab.lake.url, spark=NO_SPARK)
        finished = stay(lab, defs, begun=lambda: lab.deliver("items", [("a", "Apple", 3)], "v2"))
        assert finished.success, finished.log
        assert versions_of_items(finished) == ["v1", "v2"]


@pytest.mark.lengthy
def test_versions_are_reported_at_most_once_a_minute_and_at_the_end(tmp_path: Path) -> None:
    with running_lab(tmp_path) as lab:
        lab.deliver("items", APPLES, "v1")
        lab.deliver("orders", APPLES, None)
        defs = build_definitions(shop(), lake=lab.lake.url, spark=NO_SPARK)
        more = [
            partial(lab.deliver, "items", [("a", "Apple", number)], f"v{number}")
            for number in (2, 3)
        ]
        finished = stay(lab, defs, *more)
        assert finished.success, finished.log
        assert versions_of_items(finished) == ["v1", "v3"]


@pytest.mark.lengthy
def test_a_startpoint_of_a_dataset_is_applied_by_a_run_that_stays(tmp_path: Path) -> None:
    app = Application("shop")
    app.input_stream("lake.orders", default_offset="oldest").send_to(
        app.output_stream("lake.copy", partitions=1)
    )
    app.table(unbounded_dataset("items", input="lake.items", key="item", partitions=2))
    with running_lab(tmp_path) as lab:
        lab.deliver("items", APPLES, None)
        lab.deliver("orders", APPLES, None)

        def ask() -> None:
            startpoints = Startpoints(app, lake=lab.lake)
            startpoints.request(
                "lake.items", StartpointOldest(), reason="again", by="test", force=True
            )

        defs = build_definitions(app, lake=lab.lake.url, spark=NO_SPARK)
        finished = stay(lab, defs, ask)
        assert finished.success, finished.log
        assert any("again" in entry.reason for entry in lab.store("items").history()), finished.log


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
