"""What a run has restated is an asset check, which fails where there is too much."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from dagster import AssetKey

from dagster_adjunct import Application, Restate, bounded_dataset, build_definitions
from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.orchestration.dagster.lab import NO_SPARK, FinishedRun, Lab, plain, running_lab

ITEMS = bounded_dataset("items", input="lake.items", key="item", partitions=2)
CHECK = "copy restated_items"
DAY = timedelta(days=1)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with running_lab(tmp_path) as lab:
        lab.deliver("orders", [("a", "x", 1), ("a", "y", 1), ("b", "x", 1), ("c", "x", 1)], None)
        yield lab


def serve(lab: Lab, version: str, *labels: str) -> None:
    rows = [(item, label, 1) for item, label in zip("abc", labels, strict=True)]
    lab.deliver("items", rows, version)
    systems = {"lake": lab.streams}
    advance_dataset(ITEMS, lake=lab.lake, systems=systems, spark=IN_PROCESS, by="test")


def run(lab: Lab, restate: Restate) -> FinishedRun:
    app = Application("shop", engine="auto")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    joined = orders.join(
        app.table(ITEMS), on="item", select=["label as title"], how="left", restate=restate
    )
    joined.send_to(app.output_stream("lake.copy", partitions=2, key="item"))
    return lab.run(
        build_definitions(app, lake=lab.lake.url, spark=NO_SPARK), AssetKey(["lake", "copy"])
    )


@pytest.mark.lengthy
def test_a_check_has_what_a_run_has_restated_and_since_when_changes_wait(lab: Lab) -> None:
    serve(lab, "v1", "one", "two", "three")
    first = run(lab, Restate(DAY))
    assert first.passed[CHECK]
    assert plain(first.checks[CHECK].metadata)["adjunct/changed_keys"] == 0
    serve(lab, "v2", "ONE", "TWO", "three")
    finished = run(lab, Restate(DAY))
    facts = plain(finished.checks[CHECK].metadata)
    assert (facts["adjunct/changed_keys"], facts["adjunct/records"]) == (2, 3)
    assert "adjunct/waiting_since" not in facts
    serve(lab, "v3", "one", "two", "three")
    waiting = run(lab, Restate(DAY, every=DAY)).checks[CHECK]
    assert plain(waiting.metadata)["adjunct/records"] == 0
    assert "changes of items wait since" in (waiting.description or "")


@pytest.mark.lengthy
def test_too_much_to_restate_fails_the_check_with_the_run(lab: Lab) -> None:
    serve(lab, "v1", "one", "two", "three")
    assert run(lab, Restate(DAY)).success
    serve(lab, "v2", "ONE", "TWO", "three")
    finished = run(lab, Restate(DAY, most_records=2))
    assert not finished.success
    assert finished.passed[CHECK] is False
    check = finished.checks[CHECK]
    assert plain(check.metadata)["adjunct/changed_keys"] == 2
    assert "3 records" in (check.description or "")
