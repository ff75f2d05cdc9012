"""Results that follow later changes of datasets, against plain Python."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.step import run_step
from tests.orchestration.changing_datasets import Changing, Delivered, Following, new_world
from tests.orchestration.step_world import StepWorld

WEEK = timedelta(days=7)
Results = dict[int, tuple[str, int | None]]


def enriching(dataset: Changing, how: str = "left", **options: Any) -> Application:
    app = Application("app", engine="auto", **options)
    facts = app.input_stream("lake.facts", default_offset="oldest")
    joined = facts.join(app.table(dataset.declare()), on="k", how=how, select=["v"], restate=WEEK)
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
