"""Fixtures for the tests of the step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.resources.objects.lake import open_lake
from tests.orchestration.step_world import StepWorld

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def step_world(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> StepWorld:
    """A fresh lake, the shared session, and physical plans that must be what the planner proved."""
    monkeypatch.setenv("ADJUNCT_STRICT_PLANS", "1")
    return StepWorld(open_lake(tmp_path / "lake"), tmp_path, lambda: spark)


@pytest.fixture(params=[pytest.param("spark", marks=pytest.mark.long), "auto"])
def either_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have batches computed in process where they can be, and again by Spark: what holds for one holds for the other.

    That both leave the same is compared in test_batches_in_process.py and test_drawn_batches_in_process.py.
    """
    monkeypatch.setenv("ADJUNCT_ENGINE", request.param)
    return str(request.param)
