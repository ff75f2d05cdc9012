"""The third application of the example killed with SIGKILL, JVM and all, where it keeps state,
and begun again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dagster_adjunct import application_state, open_lake
from tests.examples.driving import drive
from tests.examples.outputs_over_time import assert_over_time

EVERY = 64
OPTIONS = ["--every", str(EVERY), "--batch", "900", "--app", "over_time"]
STATE = "datasets/flights-over-time"
DEATHS = [
    "output lake.flights-instead@1+0.5",  # Spark's tasks are joining and writing
    f"swap {STATE}-instead-left@1",  # all outputs are written, and no state
    f"swapped {STATE}-instead-left@1",  # one side of the state is in, the other is not
    f"swapped {STATE}-days@1",  # all of it, and the batch is open
    "output lake.airport-days@2+0.3",
    "batch@1",
]


@pytest.mark.slow
# tests/orchestration/test_stream_join.py and test_step_windows.py die there in this process
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_is_killed_where_it_keeps_state_gives_what_an_undisturbed_one_gives(
    tmp_path: Path,
) -> None:
    lake, unused = str(tmp_path / "lake"), tmp_path / "unused"
    for point in DEATHS:
        drive(lake, unused, *OPTIONS, "--kill", point).assert_killed_at(point.rpartition("@")[0])
    assert drive(lake, unused, *OPTIONS).result["spark_started"]
    assert_over_time(lake, EVERY)
    assert application_state(open_lake(lake), "flights-over-time").open is None
