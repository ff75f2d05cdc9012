"""Results that follow later changes of datasets, against plain Python."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointUpcoming
from tests.orchestration.changing_datasets import (
    KEYS,
    Changing,
    Delivered,
    Following,
    follow,
    follow_and_die,
    new_world,
)
from tests.orchestration.step_world import StepWorld
from tests.rounds import rounds

WEEK = timedelta(days=7)
EVENTS = ("intent", "output", "outputs", "batch")
Results = dict[int, tuple[str, int | None]]


def enriching(dataset: Changing, how: str = "left", **options: Any) -> Application:
    app = Application("app", engine="auto", **options)
    facts = app.input_stream("lake.facts", default_offset="oldest")
    planes = app.table(replace(dataset.declare(), bootstrap=False))
    joined = facts.join(planes, on="k", how=how, select=["v"], restate=WEEK)
    joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    return app


def latest(world: StepWorld) -> Results:
    ranges = world.streams.all_ranges("out")
    rows = world.streams.read_arrow(ranges, epochs="latest").to_pylist()
    found = {row["n"]: (row["k"], row["v"]) for row in rows}
    assert len(found) == len(rows)
    return found


def expected(dataset: Changing, facts: dict[int, str], how: str = "left") -> Results:
    """Return what a run that knew everything from the start would have sent."""
    results = {}
    for n, k in facts.items():
        entry = dataset.served.get(k)
        if entry is not None or how == "left":
            results[n] = (k, None if entry is None else entry[0])
    return results


@pytest.mark.parametrize("kind", [Following, Delivered])
@pytest.mark.parametrize("how", ["left", "inner"])
def test_results_are_those_of_a_run_that_knew_everything(
    tmp_path: Path, kind: type[Changing], how: str
) -> None:
    dataset = kind(new_world(tmp_path), random.Random(1))
    world = dataset.world
    dataset.begin()
    world.stream("facts", "k", 2, n="int", k="string")
    dataset.send({"a": (1, 1), "b": (2, 2), "c": (3, 3)})
    facts = {n: "abcd"[n % 4] for n in range(8)}
    world.send("facts", *facts.items())
    app = enriching(dataset, how)
    run_step(world.context(app))
    assert latest(world) == expected(dataset, facts, how)
    dataset.send({"a": (7, 1), "d": (4, 4)}, gone=["b"])
    report = run_step(world.context(enriching(dataset, how)))
    assert report.counters["restated"] == {"changed_keys": 3, "records": 6}
    assert latest(world) == expected(dataset, facts, how)
    everything = world.streams.read_arrow(world.streams.all_ranges("out")).to_pylist()
    assert {row["k"] for row in everything if row["__epoch"]} <= {"a", "b", "d"}
    assert run_step(world.context(enriching(dataset, how))).batches == 0


def abandon(world: StepWorld) -> None:
    log = BatchLog(world.lake, "app")
    if log.read().state.open is not None:
        log.abandon(skip=False, by="test", reason="test")


@pytest.mark.rounds
@pytest.mark.parametrize("kind", [Following, Delivered])
@pytest.mark.parametrize("seed", range(rounds(2, 40)))
def test_whatever_happens_results_become_those_of_a_run_that_knew_everything(
    tmp_path: Path, kind: type[Changing], seed: int
) -> None:
    draw = random.Random(f"{kind.__name__} {seed}")
    dataset = kind(new_world(tmp_path), draw, draw.choice([2, None]))
    world = dataset.world
    how = draw.choice(["left", "inner"])
    dataset.begin()
    world.stream("facts", "k", 2, n="int", k="string")
    dataset.change()
    facts: dict[int, str] = {}

    def make() -> Application:
        return enriching(dataset, how, max_batch_records=draw.choice([1, 4, 1000]))

    for _ in range(rounds(25, 40)):
        draw.choice(dataset.actions)()
        fresh = {len(facts) + n: draw.choice(KEYS) for n in range(draw.randrange(3))}
        if fresh:
            world.send("facts", *fresh.items())
            facts |= fresh
        match draw.randrange(6):
            case 0:
                follow_and_die(world, make(), draw.choice(EVENTS))
                if draw.randrange(3) == 0:
                    abandon(world)
            case 1 | 2:
                follow(world, make(), max_batches=1)
            case 3 if facts:
                Startpoints(make(), lake=world.lake).request(
                    "lake.facts",
                    StartpointOldest(),
                    until=StartpointUpcoming(),
                    reason="test",
                    by="test",
                )
            case 4:
                follow(world, make())
    follow(world, make())
    assert latest(world) == expected(dataset, facts, how)
    assert world.state(make()).open is None
