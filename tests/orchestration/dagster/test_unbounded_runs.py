"""The application's job over a change stream's table, with Spark: bootstrap, main input,
compaction.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance

from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    application_state,
    build_definitions,
    open_lake,
    run_application,
    systems_for,
)
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.step.progress import StepEvent
from tests.orchestration.dagster import small
from tests.orchestration.dagster.lab import FinishedRun

ORDERS = small.orders(0, 20)


@pytest.mark.usefixtures("either_engine")
@pytest.mark.spark
def test_the_main_input_waits_for_the_bootstrap_and_compaction_changes_no_entry(
    tmp_path: Path, spark: Any
) -> None:
    lake = open_lake(tmp_path / "lake")
    app = small.order_totals(tmp_path / "t.sqlite")
    small.append(lake, "items", 1, small.ITEMS, marker="v1")
    small.append(lake, "rates", 1, small.RATES)
    small.append(lake, "orders", 1, ORDERS)
    defs = build_definitions(app, lake=lake.url)

    with DagsterInstance.ephemeral() as instance:

        def run(job: str, **options: Any) -> FinishedRun:
            executed = defs.resolve_job_def(job).execute_in_process(
                instance=instance, raise_on_error=False, **options
            )
            return FinishedRun(executed, instance)

        in_the_way = Path(lake.url) / "datasets/rates/data"
        in_the_way.parent.mkdir(parents=True)
        in_the_way.touch()
        ended = run("order_totals")
        in_the_way.unlink()
        assert not ended.success
        assert ended.passed["rates bootstrapped"] is False
        assert set(ended.made) == {"items"}
        assert application_state(lake, "order-totals").batch == 0, "no order was read"

        done = run("order_totals")
        assert done.success
        assert done.passed["rates bootstrapped"] is True
        assert small.priced(lake) == small.expected(ORDERS)

        for sequence in (2, 3):
            small.append(lake, "rates", sequence, [("GBP", 1.1 + sequence)])
            assert run("order_totals").success
        compacted = run("order_totals_compact", run_config=_level("major"))
        assert compacted.success
        assert compacted.observed["rates"]["adjunct/compaction"]["generations"] == [3, 1]
        assert _rates(lake) == {**dict(small.RATES), "GBP": 4.1}
        assert "nothing" in run("order_totals_compact").log


@pytest.mark.spark
def test_datasets_of_both_kinds_advance_at_once_in_threads_of_one_session(
    tmp_path: Path, spark: Any
) -> None:
    lake = open_lake(tmp_path / "lake")
    app = small.order_totals(tmp_path / "t.sqlite")
    small.append(lake, "orders", 1, ORDERS)
    for sequence in (1, 2, 3):
        small.append(lake, "items", sequence, small.ITEMS, marker=f"v{sequence}")
        small.append(lake, "rates", sequence, small.RATES)
        done = run_application(
            app,
            lake=lake,
            systems=systems_for(app, lake=lake),
            spark=lambda: spark,
            run=f"run-{sequence}",
        )
        assert [report.dataset for report in done.datasets] == ["items", "rates"]
    assert small.priced(lake) == small.expected(ORDERS)


@pytest.mark.usefixtures("either_engine")
@pytest.mark.spark
def test_a_table_that_is_not_marked_for_bootstrap_is_followed_between_batches(
    tmp_path: Path, spark: Any
) -> None:
    lake = open_lake(tmp_path / "lake")
    rates = replace(small.rates, bootstrap=False)
    app = Application("followed", max_batch_records=10)
    (
        app.input_stream("lake.orders")
        .join(app.table(rates), on="currency", how="left", select=["rate"])
        .send_to(app.output_stream("lake.rated", partitions=2, key="item"))
    )
    small.append(lake, "rates", 1, small.RATES)
    small.append(lake, "orders", 1, ORDERS)

    class AfterTheFirstBatch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            event = getattr(record, "adjunct_event", None)
            if isinstance(event, StepEvent) and (event.what, event.batch) == ("batch", 1):
                small.append(lake, "rates", 2, [("EUR", 9.5)])

    handler, log = AfterTheFirstBatch(level=logging.INFO), logging.getLogger("adjunct.run")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with DagsterInstance.ephemeral() as instance:
            job = build_definitions(app, lake=lake.url).resolve_job_def("followed")
            finished = FinishedRun(
                job.execute_in_process(instance=instance, raise_on_error=False), instance
            )
            assert finished.success
            made = finished.made
    finally:
        log.removeHandler(handler)
    streams = LakeStreams(lake)
    rated = streams.read_arrow(
        streams.all_ranges("rated"), columns=["currency", "rate"]
    ).to_pylist()
    assert {row["rate"] for row in rated if row["currency"] == "EUR"} == {1.0, 9.5}
    served = StoredVersions(lake, "rates").require_current().version
    assert made["rates"]["data version"] == served
    assert len(made["rated"]["adjunct/versions"]["rates"]) == 2


def _level(level: str) -> dict[str, Any]:
    return {"ops": {"compact_order_totals": {"config": {"level": level}}}}


def _rates(lake: Lake) -> dict[str, float]:
    view = StoredVersions(lake, "rates").require_current()
    assert view.rows == 3
    return {key: entry["rate"] for key, entry in view.items()}
