"""The main job, run once in a local lake, for the tests that only look at what it left.

`make test` gives it every 64th flight and all other data, `make test-long` all flights.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.examples.driving import drive
from tests.rounds import rounds

EVERY = rounds(64, 1)
OPTIONS = rounds(("--every", f"{EVERY}", "--batch", "1500"), ())
# With all flights it is killed here once: after the third batch's stream output, before its table
# output.
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
    """The flights in two deliveries; of all flights killed once between the two outputs of a batch
    and started again.

    One run for all test processes: whoever comes first runs it, and the others wait for that.
    """
    folder = tmp_path_factory.mktemp("main job, local")
    shared = folder.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else folder.parent
    finished = shared / "main job, finished.json"
    with FileLock(f"{finished}.lock"):
        if not finished.exists():
            lake, state = str(folder / "lake"), folder / "state.sqlite"
            if EVERY == 1:
                drive(lake, state, "--kill", f"{KILLED_AT}@{KILLED_IN_BATCH}").assert_killed_at(
                    KILLED_AT
                )
            done = {
                "lake": lake,
                "state": str(state),
                "result": drive(lake, state, *OPTIONS).result,
            }
            finished.write_text(json.dumps(done), encoding="utf-8")
        facts = json.loads(finished.read_text(encoding="utf-8"))
    return FinishedJob(facts["lake"], Path(facts["state"]), facts["result"])
