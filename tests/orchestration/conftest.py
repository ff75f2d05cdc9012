"""Fixtures for the tests of the step."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.resources.objects.lake import open_lake
from tests.orchestration.all_engines import run_by_all
from tests.orchestration.step_world import StepWorld

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.orchestration.step.progress import StepReport


@pytest.fixture
def all_engines(request: pytest.FixtureRequest) -> Iterator[Callable[..., StepReport] | None]:
    """What runs an application by all engines, if the tests are to; the report of the test has
    what it counts.
    """
    if os.environ.get("ADJUNCT_TEST_ENGINES") != "all" or request.node.get_closest_marker(
        "one_engine"
    ):
        yield None
        return
    counted = Counter[str]()
    yield partial(run_by_all, counted=counted)
    request.node.user_properties.append(("engines", dict(counted)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many runs were compared, and with what."""
    total = Counter[str]()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if getattr(report, "when", None) == "teardown":
            total.update(dict(report.user_properties).get("engines", {}))
    if total:
        terminalreporter.section("runs by all engines")
        for what, count in sorted(total.items()):
            terminalreporter.write_line(f"{count:6} {what}")


@pytest.fixture
def step_world(
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    all_engines: Callable[..., StepReport] | None,
) -> StepWorld:
    """A fresh lake, the shared session, and physical plans that must be what the planner proved."""
    monkeypatch.setenv("ADJUNCT_STRICT_PLANS", "1")
    return StepWorld(open_lake(tmp_path / "lake"), tmp_path, lambda: spark, run_by_all=all_engines)


@pytest.fixture(params=[pytest.param("spark", marks=pytest.mark.long), "auto"])
def either_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have batches computed in process where they can be, and again by Spark: what holds for one
    holds for the other.

    That both leave the same is compared in test_batches_in_process.py and
    test_drawn_batches_in_process.py.
    """
    monkeypatch.setenv("ADJUNCT_ENGINE", request.param)
    return str(request.param)
