"""The job that hands change streams' tables over to Iceberg: with their deltas, registered once,
on a schedule.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dagster import DefaultScheduleStatus, Definitions

from dagster_adjunct import AdjunctDataset, Application, build_definitions, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.exchange import IcebergTable
from dagster_adjunct.resources.errors import ConfigurationError
from tests.assets.unbounded.test_unbounded_handover import configured
from tests.orchestration.dagster.lab import APPLES, NO_SPARK, FinishedRun, Lab

duckdb = pytest.importorskip("duckdb")
pytest.importorskip("pyiceberg.catalog.sql")

PRICES = unbounded_dataset(
    "prices",
    input="lake.prices",
    key="item",
    partitions=2,
    compaction=DeltaCompaction(inside_commit=False),
)
TABLES = {"prices": IcebergTable("reference.prices", catalog="lakehouse")}


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {
        "TYPE": "sql",
        "URI": f"sqlite:///{tmp_path}/catalog.db",
        "WAREHOUSE": str(tmp_path / "warehouse"),
    }.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LAKEHOUSE__{name}", value)
    configured(monkeypatch)
    opened = TABLES["prices"].open()
    opened.create_namespace("reference")
    return opened


def definitions(
    lab: Lab, *datasets: AdjunctDataset, tables: dict[str, IcebergTable]
) -> Definitions:
    app = Application("shop")
    app.input_stream("lake.orders").send_to(app.output_stream("lake.copy", partitions=1))
    for dataset in datasets:
        app.table(dataset)
    return build_definitions(app, lake=lab.lake.url, spark=NO_SPARK, iceberg=tables)


def hand_over(
    lab: Lab, *datasets: AdjunctDataset, tables: dict[str, IcebergTable] = TABLES
) -> FinishedRun:
    job = definitions(lab, *datasets, tables=tables).resolve_job_def("shop_iceberg")
    return FinishedRun(
        job.execute_in_process(instance=lab.instance, raise_on_error=False), lab.instance
    )


def in_table(catalog: Any) -> list[tuple[Any, ...]]:
    """Return what DuckDB reads from the Iceberg table."""
    connection = catalog.load_table("reference.prices").scan().to_duckdb("prices")
    rows: list[tuple[Any, ...]] = sorted(connection.execute("FROM prices").fetchall())
    return rows


@pytest.mark.lengthy
def test_what_is_new_is_registered_with_its_deltas_and_what_is_there_is_left_alone(
    lab: Lab, catalog: Any
) -> None:
    lab.deliver("prices", APPLES, None)
    lab.advance(PRICES)
    lab.deliver("prices", [("a", "Apricots", 9), ("z", "Zucchini", 1)], None)
    lab.advance(PRICES)
    finished = hand_over(lab, PRICES)
    assert finished.success
    rows = {row[0]: row for row in APPLES} | {"a": ("a", "Apricots", 9), "z": ("z", "Zucchini", 1)}
    assert in_table(catalog) == sorted(rows.values())
    observed = finished.observed["prices"]["adjunct/iceberg"]
    served = lab.store("prices").require_current()
    assert (observed["table"], observed["version"], observed["new"]) == (
        "reference.prices",
        served.version,
        True,
    )
    assert len(served.sealed.generations) == 2
    again = hand_over(lab, PRICES)
    assert again.success
    assert again.observed == {}
    assert f"version {served.version} is already registered in reference.prices" in again.log
    assert lab.store("prices").require_current().version == served.version


@pytest.mark.lengthy
def test_the_job_continues_after_a_failing_dataset_and_skips_one_without_a_version(
    lab: Lab, catalog: Any
) -> None:
    lab.deliver("prices", APPLES, None)
    lab.advance(PRICES)
    lost, absent = (replace(PRICES, name=name, input=f"lake.{name}") for name in ("lost", "absent"))
    lab.deliver("lost", APPLES, None)
    lab.advance(lost)
    tables = {
        "lost": IcebergTable("reference.lost", catalog="nowhere"),
        "absent": IcebergTable("reference.absent", catalog="lakehouse"),
        **TABLES,
    }
    finished = hand_over(lab, lost, absent, PRICES, tables=tables)
    assert not finished.success
    assert "'nowhere' is not configured: configured are" in finished.failure.description
    assert "lakehouse" in finished.failure.description
    assert "dataset absent has not been advanced yet" in finished.log
    assert in_table(catalog) == sorted(APPLES)


def test_the_schedule_is_off_and_a_table_needs_a_dataset(lab: Lab) -> None:
    schedules = {
        schedule.name: schedule
        for schedule in definitions(lab, PRICES, tables=TABLES).schedules or ()
    }
    assert schedules["shop_iceberg_daily"].default_status is DefaultScheduleStatus.STOPPED
    assert schedules["shop_iceberg_daily"].job_name == "shop_iceberg"
    without = definitions(lab, PRICES, tables={})
    assert not any("iceberg" in schedule.name for schedule in without.schedules or ())
    with pytest.raises(ConfigurationError) as caught:
        definitions(lab, PRICES, tables={"price": TABLES["prices"]})
    assert (caught.value.dataset, caught.value.argument) == ("price", "iceberg")
