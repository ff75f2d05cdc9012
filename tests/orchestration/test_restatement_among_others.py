"""Results that follow later changes, where something else happens too: several joins and inputs,
tombstones, versions that are gone, replays.
"""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.errors import CommitConflictError, ConfigurationError, RestatementError
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.maintenance.expire import expire_versions
from dagster_adjunct.orchestration.operators.lookups import Restate
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step import plan_batch
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointUpcoming
from tests.orchestration.changing_datasets import (
    WHY,
    Changing,
    ChangingWorld,
    Delivered,
    Following,
    follow,
    follow_and_die,
    new_world,
)
from tests.orchestration.step_world import StepWorld
from tests.orchestration.test_restatement import EVENTS, WEEK, begun, enriching, expected, latest
from tests.rounds import rounds

NOTHING_KEPT = DiscardPolicy(keep=1, grace=timedelta(0), followed=timedelta(0))


def latest_rows(world: StepWorld, stream: str) -> list[dict[str, Any]]:
    return world.streams.read_arrow(world.streams.all_ranges(stream), epochs="latest").to_pylist()


def test_tombstones_and_records_without_a_key_stay_what_they_are(tmp_path: Path) -> None:
    dataset, _ = begun(Following, tmp_path)
    world = dataset.world
    world.send("facts", (20, "a"), (23, None), deleted=[(21, "a"), (22, None)])
    run_step(world.context(enriching(dataset)))
    before = latest_rows(world, "out")
    dataset.send({"a": (7, 1)})
    run_step(world.context(enriching(dataset)))

    def shown(rows: list[dict[str, Any]]) -> list[str]:
        found = []
        for row in rows:
            value = 7 if row["v"] == 1 else row["v"]
            found.append(repr((row["n"], row["k"], value, row["__tombstone"])))
        return sorted(found)

    assert shown(latest_rows(world, "out")) == shown(before)


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", [Following, Delivered])
def test_versions_that_are_gone_hold_no_new_records_back(
    tmp_path: Path, kind: type[Changing]
) -> None:
    dataset, _ = begun(kind, tmp_path)
    world = dataset.world
    for value in range(3):
        dataset.send({"a": (7 + value, 1), "d": (4, 4)})
    if isinstance(dataset, Following):
        dataset.rebuild()
        dataset.send({"a": (27, 1)})
    expire_versions(world.lake, "planes", NOTHING_KEPT, by="test")
    world.send("facts", (8, "a"))
    newest = dataset.served["a"][0]
    with pytest.raises(RestatementError):
        run_step(world.context(enriching(dataset)))
    assert (latest(world)[0], latest(world)[8]) == (("a", 1), ("a", newest))
    # The advice works: former results stay, and later changes are followed.
    Startpoints(enriching(dataset), lake=world.lake).request(
        "changes.planes", StartpointUpcoming(), **WHY
    )
    run_step(world.context(enriching(dataset)))
    assert latest(world)[0] == ("a", 1)
    dataset.send({"a": (99, 1)})
    run_step(world.context(enriching(dataset)))
    assert latest(world)[0] == ("a", 99)


def test_results_that_follow_changes_are_not_replaced_by_what_was_known_before(
    tmp_path: Path,
) -> None:
    dataset, _ = begun(Following, tmp_path)
    with pytest.raises(ConfigurationError, match="follow later changes of planes"):
        Startpoints(enriching(dataset), lake=dataset.world.lake).request(
            "lake.facts", StartpointOldest(), until=StartpointUpcoming(), versions="recorded", **WHY
        )


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", [Following, Delivered])
def test_a_dataset_in_other_partitions_is_followed_on(tmp_path: Path, kind: type[Changing]) -> None:
    dataset, facts = begun(kind, tmp_path)
    world = dataset.world
    for value in (7, 8):
        run_step(world.context(enriching(dataset, auto_repartition=True)))
        dataset.repartition()
        dataset.send({"a": (value, 1), "d": (value, 4)})
        facts[100 + value] = "a"
        world.send("facts", (100 + value, "a"))
        run_step(world.context(enriching(dataset, auto_repartition=True)))
        assert latest(world) == expected(dataset, facts)


def test_a_run_that_was_overtaken_while_it_looked_for_records_restates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, facts = begun(Following, tmp_path)
    world = dataset.world
    dataset.send({"a": (7, 1), "d": (4, 4)}, gone=["b"])
    store_places = plan_batch.store_places

    def overtaken(*given: Any) -> str:
        monkeypatch.setattr(plan_batch, "store_places", store_places)
        name = store_places(*given)
        run_step(world.context(enriching(dataset), run="another"))
        dataset.send({"a": (8, 1)})
        return name

    monkeypatch.setattr(plan_batch, "store_places", overtaken)
    with pytest.raises(CommitConflictError):
        run_step(world.context(enriching(dataset)))
    run_step(world.context(enriching(dataset)))
    assert latest(world) == expected(dataset, facts)
    assert not list(world.lake.store.list("applications/app/answers/"))


class TwoDatasets:
    """Two inputs, each joined with two datasets, and what the datasets serve."""

    def __init__(self, world: ChangingWorld, draw: random.Random) -> None:
        self.world = world
        self.draw = draw
        self.datasets = {
            "planes": unbounded_dataset("planes", input="lake.planes", key="k", partitions=2),
            "crews": unbounded_dataset("crews", input="lake.crews", key="k", broadcast=True),
        }
        self.served: dict[str, dict[str, int]] = {"planes": {}, "crews": {}}
        self.facts: dict[int, tuple[str, str, str | None]] = {}
        for name in self.datasets:
            world.stream(name, "k", 1, k="string", v="int")
            self.change(name)
        for name in ("facts", "more"):
            world.stream(name, "k", 2, n="int", k="string", c="string")

    def change(self, name: str) -> None:
        key, gone = self.draw.sample("abcd", 2)
        value = self.draw.randrange(9)
        self.world.send(name, (key, value), deleted=[(gone, None)])
        self.world.advance(self.datasets[name])
        self.served[name][key] = value
        self.served[name].pop(gone, None)

    def add_fact(self) -> None:
        n = len(self.facts)
        fact = self.draw.choice(["facts", "more"]), *self.draw.choices("abcd", k=2)
        self.facts[n] = fact
        self.world.send(fact[0], (n, *fact[1:]))

    def application(self) -> Application:
        app = Application("app", engine="auto", max_batch_records=self.draw.choice([2, 1000]))
        planes, crews = (app.table(dataset) for dataset in self.datasets.values())
        for name, how in (("facts", "left"), ("more", "inner")):
            records = app.input_stream(f"lake.{name}", default_offset="oldest").filter("n % 5 < 4")
            joined = records.join(planes, on="k", how="left", select=["v"], restate=WEEK)
            joined = joined.with_columns(z="coalesce(v, 0) + n").join(
                crews, on={"c": "k"}, how=how, select=["v as cv"], restate=Restate(WEEK)
            )
            joined.send_to(app.output_stream(f"lake.{name}-out", partitions=2, key="k"))
        return app

    def expected(self, stream: str) -> list[tuple[Any, ...]]:
        found = []
        for n, (name, k, c) in self.facts.items():
            is_there = stream == "facts" or c in self.served["crews"]
            if name == stream and n % 5 < 4 and is_there:
                v = self.served["planes"].get(k)
                found.append((n, k, v, (v or 0) + n, self.served["crews"].get(str(c))))
        return found


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(1, 40)))
def test_several_joins_and_inputs_are_restated_together(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    world = new_world(tmp_path)
    two = TwoDatasets(world, draw)
    for _ in range(12):
        two.change(draw.choice(["planes", "crews"]))
        for _ in range(draw.randrange(3)):
            two.add_fact()
        match draw.randrange(5):
            case 0:
                follow_and_die(world, two.application(), draw.choice(EVENTS))
            case 1 | 2:
                follow(world, two.application(), max_batches=draw.choice([1, 2, None]))
    follow(world, two.application())
    for name in ("facts", "more"):
        rows = latest_rows(world, f"{name}-out") if two.expected(name) else []
        found = [(row["n"], row["k"], row["v"], row["z"], row["cv"]) for row in rows]
        assert sorted(found) == sorted(two.expected(name))
