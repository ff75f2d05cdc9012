"""An expectation of an application is an asset check with counts and a sample, also where it fails
the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import AssetKey

from dagster_adjunct import Application, build_definitions
from dagster_adjunct.orchestration.operators.operator import OnFail
from tests.orchestration.dagster.lab import NO_SPARK, FinishedRun, Lab, plain, running_lab

ITEMS = [("a", "apple", 3), ("b", "bean", 0), ("c", "carrot", None)]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with running_lab(tmp_path) as lab:
        lab.deliver("orders", ITEMS, None)
        yield lab


def run(lab: Lab, on_fail: OnFail) -> FinishedRun:
    app = Application("shop", engine="auto")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    checked = orders.expect("price > 0", name="has_price", on_fail=on_fail)
    named = checked.expect("label is not null", name="has-label", on_fail="drop")
    named.send_to(app.output_stream("lake.copy", partitions=1))
    return lab.run(
        build_definitions(app, lake=lab.lake.url, spark=NO_SPARK), AssetKey(["lake", "copy"])
    )


def test_a_check_has_the_counts_of_the_run_and_a_sample(lab: Lab) -> None:
    finished = run(lab, "warn")
    assert finished.success
    assert finished.passed == {"copy expect_has_price": False, "copy expect_has_label": True}
    check = finished.checks["copy expect_has_price"]
    assert check.severity.value == "WARN"
    facts = plain(check.metadata)
    assert (facts["adjunct/rows"], facts["adjunct/failed"]) == (3, 2)
    assert (facts["adjunct/condition"], facts["adjunct/on_fail"]) == ("price > 0", "warn")
    for text in facts["adjunct/sample"]:
        assert text.split(" at ")[0] in ("item = b", "item = c")
    assert "adjunct/sample" not in plain(finished.checks["copy expect_has_label"].metadata)


def test_a_failed_batch_fails_the_check(lab: Lab) -> None:
    finished = run(lab, "fail")
    assert not finished.success
    assert finished.passed["copy expect_has_price"] is False
    check = finished.checks["copy expect_has_price"]
    assert check.severity.value == "ERROR"
    assert "item = " in check.description
    assert "copy" not in lab.streams.list_streams()
