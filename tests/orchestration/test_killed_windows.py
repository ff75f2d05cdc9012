"""Session windows, and a window behind them, are what plain Python makes of the whole input,
wherever runs die.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dagster_adjunct.orchestration.step.progress import StepEvent
from tests.faulty_store import Crash
from tests.orchestration import chained_windows
from tests.orchestration.chained_windows import chained, check, clicks_of, create, send
from tests.orchestration.killed_runs import killed
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark

STAGES = ("intent", "sessions", "spans", "chained-sessions", "chained-spans", "outputs")
"""Where a batch dies: behind its intent, before each of its outputs and tables of state, and
before its end.
"""


def dying(stage: str) -> Callable[[StepEvent], None]:
    def die(event: StepEvent) -> None:
        if stage in (event.what, str(event.detail.get("output", "")).removeprefix("lake.")):
            raise Crash

    return die


@pytest.mark.parametrize(
    "stages",
    [("chained-spans",), pytest.param(STAGES, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def test_a_batch_that_dies_at_any_stage_is_run_again_and_gives_each_window_once(
    step_world: StepWorld, stages: tuple[str, ...]
) -> None:
    create(step_world)
    clicks = clicks_of(5, 120 + 60 * (len(stages) - 1))
    size = len(clicks) // (len(stages) + 1)
    send(step_world, clicks[:size])
    step_world.run(chained(), run="first")
    for number, stage in enumerate(stages, 1):
        send(step_world, clicks[number * size : (number + 1) * size])
        with pytest.raises(Crash):
            step_world.run(chained(), run=f"dies-{stage}", on_event=dying(stage))
        step_world.run(chained(), run=f"after-{stage}")
    check(step_world, 8)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2))
def test_whenever_runs_are_killed_each_window_comes_once(
    step_world: StepWorld, tmp_path: Path, seed: int
) -> None:
    create(step_world)
    chosen, died, clicks = random.Random(seed), 0, clicks_of(seed, 360)
    for number in range(3):
        send(step_world, clicks[number * 120 : (number + 1) * 120])
        died += killed(step_world, chained(), chained_windows, tmp_path, chosen)
    step_world.run(chained(60), run="last")
    assert died
    check(step_world, 20)
