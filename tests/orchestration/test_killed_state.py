"""State, look-ups and results of functions are what plain Python makes of the batches, whenever
runs are killed.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.orchestration import killed_state
from tests.orchestration.killed_runs import killed
from tests.orchestration.killed_state import DOORS, SHOPS, check, selling, set_prices
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark


def send(world: StepWorld, chosen: random.Random, count: int) -> None:
    for door in DOORS:
        world.send(door, *[(chosen.choice("abcde"), chosen.choice(SHOPS)) for _ in range(count)])


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_whenever_runs_are_killed_state_and_answers_are_what_plain_python_makes(
    step_world: StepWorld, tmp_path: Path, seed: int
) -> None:
    chosen, died = random.Random(seed), 0
    for door in DOORS:
        step_world.stream(door, "visitor", 2, visitor="string", shop="string")
    app = selling(tmp_path)
    for edition in (1, 2):
        set_prices(tmp_path, edition)
        send(step_world, chosen, 25)
        died += killed(step_world, app, killed_state, tmp_path, chosen)
    set_prices(tmp_path, 3)
    step_world.run(app, run="last")
    assert died
    check(step_world, app, editions=3)
