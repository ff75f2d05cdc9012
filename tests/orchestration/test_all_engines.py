"""Runs by all engines, as `make test-engines` compares them: each starts from the same lake, and
differences fail.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dagster_adjunct.orchestration.application.application import Application
from tests.orchestration.all_engines import find_obstacle, run_by_all
from tests.orchestration.step_world import StepWorld

pytestmark = [pytest.mark.spark, pytest.mark.one_engine]


def application(world: StepWorld, made: str) -> Application:
    app = Application("app")
    kept = app.input_stream("lake.trips", default_offset="oldest").map(
        "k", f"{made} as v", "1 as w"
    )
    kept.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    kept.update(app.table(world.table()), add={"w": "w"}, if_missing={"w": "0"})
    return app


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    step_world.stream("trips", "k", 2, k="string", v="int")
    step_world.send("trips", ("a", 1), ("a", 2), ("b", 3))
    return step_world


def test_all_engines_begin_with_the_same_lake_and_tables(world: StepWorld) -> None:
    counted = Counter[str]()
    assert run_by_all(world, application(world, "v"), {}, counted).batches == 1
    assert counted["runs compared"] == 1
    assert {counted[f"batches by {engine}"] for engine in ("tasks", "small", "in process")} == {1}
    assert len(world.rows("out")) == sum(row[1] for row in world.records().values()) == 3


def test_a_difference_fails_by_what_it_is(world: StepWorld) -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        run_by_all(world, application(world, "cast(1e9 * rand() as int)"), {}, Counter())
    named = ("stream out", "digests of out by app", "table things in things.sqlite", "counters")
    assert [what in str(failed.value) for what in named] == [True, True, False, False]


def test_runs_that_can_not_be_taken_back_are_left_out(world: StepWorld, tmp_path: Path) -> None:
    app = application(world, "v")
    assert find_obstacle(world, app, {}) == ""
    assert find_obstacle(world, app, {"on_event": lambda event: None}) == "on_event"
    elsewhere = replace(world, folder=tmp_path / "other")
    assert find_obstacle(elsewhere, app, {}) == "streams or a lake elsewhere"
    folder = tmp_path.with_name(f"{tmp_path.name}-tables")
    assert (
        find_obstacle(world, application(replace(world, folder=folder), "v"), {})
        == "tables elsewhere"
    )
