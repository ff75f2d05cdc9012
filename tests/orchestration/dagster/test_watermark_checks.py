"""What Dagster shows of watermarks: numbers of each run, and a check that warns of the partition
that holds back.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from dagster import AssetKey

from dagster_adjunct import Application, build_definitions
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState
from dagster_adjunct.orchestration.batch_log.event_times import PartitionTimes, TimeState
from dagster_adjunct.orchestration.step.progress import (
    EventTimeReport,
    StateSize,
    StepReport,
    measure_input_times,
)
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.orchestration.dagster.lab import NO_SPARK, SCHEMA, FinishedRun, running_lab, steps_run_by

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_watermark_that_is_too_far_behind_is_warned_of(tmp_path: Path) -> None:
    app = Application("shop")
    orders = app.input_stream(
        "lake.orders",
        event_time="date'2026-01-01'",
        max_watermark_lag=timedelta(minutes=10),
        idle_after=timedelta(days=1),
    )
    orders.send_to(app.output_stream("lake.copy", partitions=2, key="item"))

    def report(slowest: timedelta) -> StepReport:
        marks = {number: NOW - lag for number, lag in ((0, timedelta(0)), (1, slowest))}
        partitions = {
            SystemStreamPartition("lake", "orders", number): PartitionTimes(
                active_at=NOW, newest=mark, watermark=mark
            )
            for number, mark in marks.items()
        }
        state = ApplicationState(
            batch=1, times=TimeState(partitions=partitions, operators={"views": NOW - slowest})
        )
        inputs = measure_input_times(app, state.times, NOW)
        sizes = {"shop-views": StateSize(7, 900, "within 1:00:00")}
        event_time = EventTimeReport(watermarks=inputs, state_sizes=sizes)
        return StepReport(1, True, {}, {}, {}, state, event_time=event_time)

    with running_lab(tmp_path) as lab:
        lab.streams.create("orders", schema=SCHEMA, key=["item"], partitions=2)

        def run(slowest: timedelta) -> FinishedRun:
            defs = build_definitions(app, lake=lab.lake.url, spark=NO_SPARK)
            with steps_run_by(lambda context: report(slowest)):
                return lab.run(defs, AssetKey(["lake", "copy"]))

        fine = run(timedelta(minutes=10))
        assert fine.passed == {"copy watermark_lag_lake_orders": True}
        made = fine.made["copy"]
        assert made["adjunct/watermark_lag_seconds"] == 600
        assert (made["adjunct/state/shop-views/rows"], made["adjunct/state/shop-views/bytes"]) == (
            7,
            900,
        )
        assert made["adjunct/state/shop-views/kept_for"] == "within 1:00:00"
        assert made["adjunct/watermarks"][0]["held_by"] == "lake.orders.1"

        late = run(timedelta(minutes=11)).checks["copy watermark_lag_lake_orders"]
        assert (late.passed, late.severity.value) == (False, "WARN")
        assert (
            late.description
            == "lake.orders: watermark 2025-12-31 23:49:00 UTC, 0:11:00 behind the clock, held back"
            " by lake.orders.1; 0:10:00 is allowed"
        )
