"""The main job, run once on all the data in a local lake, for the tests that only look at what it left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.examples.driving import drive

# The run of all data is killed here once: after the third batch's stream output, before its table output.
KILLED_AT = "output aircraft-state"
KILLED_IN_BATCH = 3


@dataclass(frozen=True)
class FinishedJob:
    """Where the run left its data, and what it said."""

    lake: str
    state: Path
    result: dict[str, Any]


@pytest.fixture(scope="session")
def main_job(tmp_path_factory: pytest.TempPathFactory) -> FinishedJob:
    """All 336,776 flights in two deliveries; killed once between the two outputs of a batch and started again."""
    folder = tmp_path_factory.mktemp("main job, local")
    lake, state = str(folder / "lake"), folder / "state.sqlite"
    drive(lake, state, "--kill", f"{KILLED_AT}@{KILLED_IN_BATCH}").assert_killed_at(KILLED_AT)
    return FinishedJob(lake, state, drive(lake, state).result)
