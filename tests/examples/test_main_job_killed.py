"""The main job killed with SIGKILL, JVM and all, at many points, and started again each time.

One test is one fresh lake and a chain of processes: each is killed at the next point of the list,
or runs on from where the one before was killed to the next point, and the last one to the end. What
a death spoiled would show in the end, since nothing that follows takes a doubled or lost record
back. Every 64th flight is delivered, in batches of 900 (3 in each half year), and all planes,
weather, airlines and airports. One more death, in a run of all the data, is in conftest.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dagster_adjunct import application_state, open_lake
from tests.examples.driving import drive
from tests.examples.oracle import expected
from tests.examples.outputs import assert_outputs, sqlite_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
EVERY = 64
OPTIONS = ["--every", str(EVERY), "--batch", "900"]

BEFORE_THE_FIRST_BATCH = [
    "delivered 1@1",
    "swap datasets/planes@1",  # built, not committed
    "swapped datasets/weather@1+0.3",  # while the bootstrap is built
]
# In the midst of a table's output tasks and drivers are killed in
# tests/orchestration/test_newest_and_exact_tables.py.
AMONG_SPARKS_TASKS = ["output lake.enriched-flights@1+0.7"]  # Spark's tasks are writing
# The others lie between two requests: tests/orchestration/offsets/test_step_crashes.py dies there
# in this process, and the run of all the data between its two outputs.
EVERYWHERE_IN_BATCHES = [
    "intent@1",
    "output lake.enriched-flights@1",
    "output lake.enriched-flights@1+0.7",  # Spark's tasks are writing
    # the files are there, nothing lists them (the stream itself exists by now)
    "swap streams/enriched-flights@1",
    "output aircraft-state@1",  # between the two outputs
    "output aircraft-state@2+0.3",  # in the midst of the table's output of the next batch
    "outputs@1",  # both outputs written, batch open
    # after taking over: the close has its manifest and is not swapped in
    "swap applications/flight-delays@2",
    "batch@1",  # right after the commit
    "swap streams/weather@1",  # part 2 is half delivered: the planes are in, the flights are not
]


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param(BEFORE_THE_FIRST_BATCH, marks=pytest.mark.long),
        pytest.param(AMONG_SPARKS_TASKS, marks=pytest.mark.long),
        pytest.param(EVERYWHERE_IN_BATCHES, marks=pytest.mark.long),
    ],
    ids=["before-the-first-batch", "among-sparks-tasks", "everywhere-in-batches"],
)
def test_a_job_killed_again_and_again_gives_what_an_undisturbed_one_gives(
    deaths: list[str], tmp_path: Path
) -> None:
    lake, state = str(tmp_path / "lake"), tmp_path / "state.sqlite"
    for death in deaths:
        drive(lake, state, *OPTIONS, "--kill", death).assert_killed_at(death.rpartition("@")[0])
    result = drive(lake, state, *OPTIONS).result
    assert result["reports"][1]["step"]["caught_up"]
    assert_outputs(lake, sqlite_state(state), EVERY)
    left = application_state(open_lake(lake), "flight-delays")
    assert left.open is None
    assert left.records == expected(EVERY)[2]["flights"]
