"""Remote tables that records are looked up in, in Dagster: an asset above the outputs, and what
asking it took.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from dagster import AssetKey

from dagster_adjunct import Application, build_definitions
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.resources.tables.metrics import (
    Attempts,
    CacheCounts,
    Histogram,
    RecordCounts,
    StoreCounts,
    TableMetrics,
)
from dagster_adjunct.tables import RemoteTable, SqliteTable
from tests.orchestration.dagster.lab import NO_SPARK, SCHEMA, plain, running_lab, steps_run_by

COPY, TABLE = AssetKey(["lake", "copy"]), AssetKey(["tables", "labels"])


def application(folder: Path) -> Application:
    store = SqliteTable(
        folder / "s.sqlite",
        "labels",
        "item",
        columns={"item": "string", "shelf": "int"},
        create=True,
    )
    labels = RemoteTable("labels", key="item", read_function=store)
    app = Application("shop")
    orders = app.input_stream("lake.orders").join(
        app.table(labels), on="item", how="left", min_match_rate=0.5
    )
    orders.send_to(app.output_stream("lake.copy", partitions=2, key="item"))
    return app


def test_a_table_that_is_looked_up_in_is_an_external_asset_above_the_output(tmp_path: Path) -> None:
    graph = build_definitions(application(tmp_path)).resolve_asset_graph()
    assert graph.get(COPY).parent_keys == {AssetKey(["lake", "orders"]), TABLE}
    assert not graph.get(TABLE).is_executable
    assert [key.name for key in graph.asset_check_keys] == ["match_rate_labels"]


def test_what_asking_took_and_the_columns_that_came_of_it_are_on_the_output(tmp_path: Path) -> None:
    took = TableMetrics(
        RecordCounts(reads=9, found=4),
        CacheCounts(hits=3),
        StoreCounts(requests=2),
        Attempts(read_seconds=Histogram({0: 2}, 0.5, 0.25)),
    )
    report = StepReport(
        1,
        True,
        {"join-2-labels": {"rows": 20, "unmatched": 11}, "labels": {"reads": 9}},
        {},
        {},
        ApplicationState(batch=1),
        measured={"labels": took},
    )
    with running_lab(tmp_path) as lab:
        lab.streams.create("orders", schema=SCHEMA, key=["item"], partitions=2)
        app = application(tmp_path)
        defs = build_definitions(app, lake=lab.lake.url, spark=NO_SPARK)
        with steps_run_by(lambda context: report):
            finished = lab.run(defs, COPY)
        made = finished.made["copy"]
        assert (made["adjunct/lookups/labels/reads"], made["adjunct/lookups/labels/found"]) == (
            9,
            4,
        )
        assert (
            made["adjunct/lookups/labels/cache_hits"],
            made["adjunct/lookups/labels/requests"],
        ) == (3, 2)
        assert "adjunct/lookups/labels/read_seconds_p95" in made
        assert "adjunct/lookups/labels/retries" not in made
        assert finished.passed == {"copy match_rate_labels": False}
        check = plain(finished.checks["copy match_rate_labels"].metadata)
        assert (check["adjunct/table"], check["adjunct/match_rate"]) == ("labels", 0.45)
        lineage = str(made["dagster/column_lineage"])
        assert "shelf" in lineage
        assert "labels" in lineage


def counted_pages(folder: Path, *, in_one_chain: bool) -> Application:
    """Return an application that looks up a remote table and writes it: in one chain, or in
    another branch, which is defined after the output stream.
    """
    columns = {"item": "string", "shelf": "int"}
    store = SqliteTable(folder / "z.sqlite", "z", "item", columns=columns, create=True)
    app = Application("shop", engine="auto")
    last = app.table(RemoteTable("z-last", key="item", read_function=store, write_function=store))
    orders = app.input_stream("lake.orders")
    looked_up = orders.join(last, on="item", how="left", select=["shelf as before"])
    sent = looked_up.send_to(app.output_stream("lake.copy", partitions=2, key="item"))
    written = sent if in_one_chain else orders
    written.update(last, add={"shelf": "1"}, if_missing=[])
    return app


@pytest.mark.parametrize("in_one_chain", [False, True])
def test_a_table_that_is_looked_up_in_and_written_fails_no_run(
    tmp_path: Path, in_one_chain: bool
) -> None:
    with running_lab(tmp_path) as lab:
        lab.streams.create("orders", schema=SCHEMA, key=["item"], partitions=2)
        lab.streams.append("orders", [{"item": "a"}], producer="p", sequence=1)
        app = counted_pages(tmp_path, in_one_chain=in_one_chain)
        defs = build_definitions(app, lake=lab.lake.url, spark=NO_SPARK)
        last = AssetKey(["tables", "z_last"])
        copy = defs.resolve_asset_graph().get(COPY)
        orders = AssetKey(["lake", "orders"])
        assert copy.parent_keys == ({orders} if in_one_chain else {orders, last})
        finished = lab.run(defs, COPY, last)
        assert finished.success
        assert {"copy", "z_last"} <= finished.made.keys()
