"""Joins with what a dataset served when the record's time came, in whole batches."""

from __future__ import annotations

import datetime as dt
import random
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.policies import DeltaCompaction, DiscardPolicy, Watermark
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.maintenance.expire import expire_versions
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import OperatorFailedError, PlanningError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.startpoints import StartpointOldest, Startpoints, StartpointUpcoming
from tests.orchestration.step_world import StepWorld

TICK = dt.timedelta(microseconds=1)
PRICES = unbounded_dataset(
    "prices",
    input="lake.prices",
    key="item",
    partitions=2,
    compaction=DeltaCompaction(inside_commit=False),
)
PLANES = bounded_dataset("planes", input="lake.planes", key="item", partitions=2)
Moments = list[tuple[dt.datetime, dict[str, int]]]


@pytest.fixture(params=[pytest.param("spark", marks=pytest.mark.spark), "in process"])
def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StepWorld:
    if request.param == "spark":
        made: StepWorld = request.getfixturevalue("step_world")
    else:
        monkeypatch.setenv("ADJUNCT_ENGINE", "auto")
        made = StepWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    made.stream("sales", "item", 2, n="int", item="string", at="timestamp")
    made.stream("prices", "item", 2, item="string", price="int")
    made.stream("planes", "item", 2, item="string", price="int")
    return made


def application(dataset: AdjunctDataset, name: str = "app", **options: Any) -> Application:
    app = Application(name, few_records=0)
    given = {"how": "left", "select": ["price"], "versions": "known-then"} | options
    sales = app.input_stream("lake.sales").join(app.table(dataset), on="item", as_of="at", **given)
    sales.send_to(app.output_stream(f"lake.{name}-out", key="item", partitions=2))
    return app


def advance(world: StepWorld, dataset: AdjunctDataset) -> dt.datetime:
    """Advance a dataset and return the time of its newest commit."""
    advance_dataset(dataset, lake=world.lake, systems=world.systems, spark=IN_PROCESS, by="test")
    return StoredVersions(world.lake, dataset.name).history(1)[0].at


def matched(world: StepWorld, name: str = "app") -> dict[int, int | None]:
    return {row["n"]: row["price"] for row in world.rows(f"{name}-out")}


def send_sales(world: StepWorld, moments: Moments, items: str) -> dict[int, int | None]:
    """Send records around each commit, and return what they are to be joined with."""
    times: list[dt.datetime | None] = [None, moments[-1][0] + dt.timedelta(days=1)]
    for time, _ in moments:
        times += [time - TICK, time, time + TICK]
    sales = []
    expected: dict[int, int | None] = {}
    for item in items:
        for at in times:
            served: dict[str, int] = {}
            for time, entries in moments:
                if at is not None and time <= at:
                    served = entries
            expected[len(sales)] = served.get(item)
            sales.append((len(sales), item, at))
    world.send("sales", *sales)
    return expected


def follow(world: StepWorld, chance: random.Random) -> Moments:
    moments: Moments = []
    now: dict[str, int] = {}
    for step in range(5):
        changed = {item: 10 * step + place for place, item in enumerate(chance.sample("abcd", 2))}
        deleted = [item for item in now if item not in changed and chance.random() < 0.4]
        world.send("prices", *changed.items(), deleted=[(item, None) for item in deleted])
        now = {item: price for item, price in now.items() if item not in deleted} | changed
        moments.append((advance(world, PRICES), now))
        if step in (1, 3):
            level = "minor" if step == 1 else "major"
            compact_dataset(world.lake, "prices", spark=IN_PROCESS, by="test", level=level)
    return moments


def deliver(world: StepWorld) -> Moments:
    moments: Moments = []
    versions = {"v1": {"a": 1, "b": 2}, "v2": {"a": 3}, "v3": {"b": 4, "c": 5}}
    for name, entries in versions.items():
        world.send("planes", *entries.items(), version=name)
        moments.append((advance(world, PLANES), entries))
    with open_dataset(world.lake, "planes") as opened:
        opened.rollback("v1", reason="test", by="test")
    moments.append((StoredVersions(world.lake, "planes").history(1)[0].at, versions["v1"]))
    return moments


def test_records_meet_what_was_served_at_their_time(world: StepWorld) -> None:
    moments = follow(world, random.Random(3))
    expected = send_sales(world, moments, "abcdx")
    report = world.run(application(PRICES))
    assert matched(world) == expected
    counted = report.counters["join-2-prices"]
    assert counted["unmatched"] == sum(price is None for price in expected.values())
    assert counted["before_history"] == 0, "nothing was served before the first commit"
    later = {"x": 99} | moments[-1][1]
    world.send("prices", ("x", 99))
    assert advance(world, PRICES) > moments[-1][0]
    world.send("sales", (1000, "x", dt.datetime(2100, 1, 1, tzinfo=dt.UTC)))
    world.run(application(PRICES))
    assert matched(world) == {**expected, 1000: later["x"]}


def test_records_meet_the_version_that_was_served_at_their_time(world: StepWorld) -> None:
    expected = send_sales(world, deliver(world), "abcx")
    world.run(application(PLANES, how="inner"))
    assert matched(world) == {n: price for n, price in expected.items() if price is not None}


@pytest.mark.parametrize("world", ["in process"], indirect=True)
def test_an_open_batch_looks_back_to_the_commits_that_it_began_with(world: StepWorld) -> None:
    moments = follow(world, random.Random(5))
    expected = send_sales(world, moments, "abcd")
    app = application(PRICES)
    world.killed_when(app, "intent")
    intent = world.state(app).open
    assert intent is not None
    assert intent.joined.served["prices"].first == 0
    world.send("prices", ("a", 77), ("b", 77), ("c", 77), ("d", 77))
    advance(world, PRICES)
    compact_dataset(world.lake, "prices", spark=IN_PROCESS, by="test", level="major")
    policy = DiscardPolicy(keep=1, grace=dt.timedelta(0))
    expire_versions(world.lake, "prices", policy, by="test")
    run_step(world.context(app, run="run-2"))
    assert matched(world) == expected


@pytest.mark.parametrize("world", ["in process"], indirect=True)
def test_what_was_discarded_is_null_or_fails_the_batch(world: StepWorld) -> None:
    moments = follow(world, random.Random(5))
    policy = DiscardPolicy(keep=1, grace=dt.timedelta(0))
    expire_versions(world.lake, "prices", policy, by="test")
    before, after = moments[0][0], moments[-1][0]
    world.send("sales", (0, "a", before), (1, "a", after))
    report = world.run(application(PRICES))
    assert matched(world) == {0: None, 1: moments[-1][1].get("a")}
    assert report.counters["join-2-prices"]["before_history"] == 1
    with pytest.raises(OperatorFailedError) as caught:
        world.run(application(PRICES, "strict", before_history="error"))
    assert caught.value.operator == "join-2-prices"


@pytest.mark.parametrize("world", ["in process"], indirect=True)
def test_replays_look_back_from_now_or_from_the_recorded_batch(world: StepWorld) -> None:
    world.send("prices", ("a", 1))
    first = advance(world, PRICES)
    ahead = first + dt.timedelta(days=1)
    world.send("sales", (0, "a", first), (1, "a", ahead))
    app = application(PRICES)
    world.run(app)
    world.send("prices", ("a", 2))
    advance(world, PRICES)
    startpoints = Startpoints(app, lake=world.lake)
    # A record from after all commits meets the newest one that its batch knows.
    answers = {"recorded": {0: 1, 1: 1}, "as-of": {0: 1, 1: 2}, "current": {0: 2, 1: 2}}
    for epoch, (versions, expected) in enumerate(answers.items(), 1):
        startpoints.request(
            "lake.sales",
            StartpointOldest(),
            until=StartpointUpcoming(),
            versions=versions,
            reason="test",
            by="test",
        )
        world.run(app)
        sent = world.streams.read_arrow(world.streams.all_ranges("app-out")).to_pylist()
        rows = [row for row in sent if row["__epoch"] == epoch]
        assert {row["n"]: row["price"] for row in rows} == expected, versions


def test_what_nobody_can_know_is_refused_in_the_plan() -> None:
    with pytest.raises(PlanningError, match="oldest"):
        application(PRICES, before_history="oldest")
    of_one_run = unbounded_dataset(
        "fast", input="lake.prices", key="item", partitions=2, persistent=False
    )
    with pytest.raises(PlanningError, match="persistent=False"):
        application(of_one_run)
    watched = unbounded_dataset(
        "watched",
        input="lake.prices",
        key="item",
        partitions=2,
        history="all",
        watermark=Watermark(),
    )
    with pytest.raises(PlanningError, match="wait="):
        application(watched, wait=dt.timedelta(minutes=1))
    app = Application("owner", few_records=0)
    schema = Schema.of(item="string", price="int")
    owned = app.local_table("owned", schema=schema, key="item", partitions=2)
    with pytest.raises(PlanningError, match="a local table"):
        app.input_stream("lake.sales").join(owned, on="item", as_of="at", versions="known-then")


@pytest.mark.parametrize("world", ["in process"], indirect=True)
def test_the_plan_says_whose_past_is_read(world: StepWorld) -> None:
    advance_first = follow(world, random.Random(1))
    assert advance_first
    plan = plan_application(application(PRICES), systems=world.systems)
    text = plan.render()
    assert "as of at, as known then" in text
    assert "what it served then, as long as commits are kept" in text
    with pytest.raises(PlanningError, match="interval_id"):
        plan_application(
            application(PRICES, select=["price", "interval_id"]), systems=world.systems
        )
