"""What must hold of batches and recorded answers holds with a lake's metadata in a key-value table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.orchestration.step_world import StepWorld

# Collected here once more, over the lake below.
from tests.orchestration.test_step_lookups import (  # noqa: F401
    test_a_batch_that_is_run_again_meets_the_answers_that_were_recorded_first,
)
from tests.routed_lakes import lake_with_metadata_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def step_world(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> StepWorld:
    """A fresh lake with its metadata in a table, the shared session, and plans that must be what was proved."""
    monkeypatch.setenv("ADJUNCT_STRICT_PLANS", "1")
    return StepWorld(lake_with_metadata_in("table", tmp_path / "lake"), tmp_path, lambda: spark)
