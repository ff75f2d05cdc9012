"""Results of joins by time that follow later changes of datasets, against plain Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.lookups import BeforeHistory
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.orchestration.changing_datasets import (
    WHY,
    ChangingWorld,
    follow,
    follow_and_die,
    new_world,
)
from tests.rounds import rounds

DAY = timedelta(days=1)
START = datetime(2026, 1, 1, tzinfo=UTC)
KEYS = "abc"
EVENTS = ("intent", "output", "outputs", "batch")


def day(number: int) -> datetime:
    return START + number * DAY


@dataclass
class Prices:
    """A dataset with history, and what it says."""

    world: ChangingWorld
    draw: random.Random
    before_history: BeforeHistory = "null"

    def __post_init__(self) -> None:
        self.begin()
        self.world.stream("facts", "k", 2, n="int", k="string", at="timestamp")
        self.facts: dict[int, tuple[str, int]] = {}

    def begin(self) -> None:
        raise NotImplementedError

    def declare(self) -> AdjunctDataset:
        raise NotImplementedError

    def valid(self, key: str, at: int) -> int | None:
        """Return the value that was valid on a day, by plain Python."""
        raise NotImplementedError

    @property
    def actions(self) -> list[Callable[[], None]]:
        raise NotImplementedError

    def advance(self) -> None:
        advance_dataset(
            self.declare(),
            lake=self.world.lake,
            systems={"lake": self.world.streams},
            spark=IN_PROCESS,
            by="test",
        )

    def add_facts(self, count: int) -> None:
        fresh = {}
        for n in range(len(self.facts), len(self.facts) + count):
            fresh[n] = self.draw.choice(KEYS), self.draw.randrange(12)
        if fresh:
            self.world.send("facts", *[(n, key, day(at)) for n, (key, at) in fresh.items()])
            self.facts |= fresh

    def application(self, **options: Any) -> Application:
        app = Application("app", engine="auto", **options)
        facts = app.input_stream("lake.facts", default_offset="oldest")
        joined = facts.join(
            app.table(self.declare()),
            on="k",
            how="left",
            select=["v"],
            as_of="at",
            before_history=self.before_history,
            restate=7 * DAY,
        )
        joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
        return app

    def results(self, **options: Any) -> dict[int, int | None]:
        ranges = self.world.streams.all_ranges("out")
        rows = self.world.streams.read_arrow(ranges, **options).to_pylist()
        return {row["n"]: row["v"] for row in rows}

    def check(self) -> None:
        follow(self.world, self.application())
        if self.facts:
            expected = {n: self.valid(key, at) for n, (key, at) in self.facts.items()}
            assert self.results(epochs="latest") == expected


class FollowedPrices(Prices):
    """It follows changes, in any order of their times."""

    def begin(self) -> None:
        self.world.stream("prices", "k", 2, k="string", at="timestamp", v="int")
        self.rows: dict[tuple[str, int], int | None] = {}
        self.change("a", 3, 1)

    def declare(self) -> AdjunctDataset:
        return unbounded_dataset(
            "prices",
            input="lake.prices",
            key="k",
            partitions=2,
            history="all",
            valid_from="at",
            compaction=DeltaCompaction(inside_commit=False),
        )

    def change(self, key: str, at: int, value: int | None) -> None:
        row = (key, day(at), value)
        if value is None:
            self.world.send("prices", deleted=[row])
        else:
            self.world.send("prices", row)
        self.rows[key, at] = value
        self.advance()

    def valid(self, key: str, at: int) -> int | None:
        times = sorted(time for k, time in self.rows if k == key)
        known = [time for time in times if time <= at]
        if known:
            return self.rows[key, known[-1]]
        if self.before_history == "oldest":
            there = [time for time in times if self.rows[key, time] is not None]
            return self.rows[key, there[0]] if there else None
        return None

    def draw_change(self) -> None:
        value = self.draw.choice([None, 1, 2, 3])
        self.change(self.draw.choice(KEYS), self.draw.randrange(12), value)

    def compact(self) -> None:
        level = self.draw.choice(["minor", "major"])
        compact_dataset(self.world.lake, "prices", spark=IN_PROCESS, by="test", level=level)

    def rebuild(self) -> None:
        systems = {"lake": self.world.streams}
        rebuild_dataset(
            self.declare(), lake=self.world.lake, systems=systems, spark=IN_PROCESS, **WHY
        )

    @property
    def actions(self) -> list[Callable[[], None]]:
        return [self.draw_change, self.draw_change, self.draw_change, self.compact, self.rebuild]


class DeliveredPrices(Prices):
    """It arrives in versions of days, in any order; some are revoked."""

    def begin(self) -> None:
        self.world.stream("prices", "k", 1, k="string", v="int")
        self.days: dict[int, dict[str, int]] = {}
        self.deliver(3, {"a": 1})

    def declare(self) -> AdjunctDataset:
        return bounded_dataset(
            "prices", input="lake.prices", key="k", partitions=2, valid_from="name"
        )

    def deliver(self, at: int, content: dict[str, int]) -> None:
        self.days[at] = content
        self.world.send("prices", *content.items(), version=f"{day(at):%Y-%m-%d}")
        self.advance()

    def draw_version(self) -> None:
        free = sorted(set(range(12)) - self.days.keys())
        if free:
            keys = self.draw.sample(KEYS, self.draw.randrange(1, 4))
            self.deliver(self.draw.choice(free), {key: self.draw.randrange(1000) for key in keys})

    def revoke(self) -> None:
        versions = StoredVersions(self.world.lake, "prices")
        refs = [ref for ref in versions.versions() if ref.state == "sealed"]
        if len(refs) < 2:
            return
        ref = self.draw.choice(refs)
        with suppress(DatasetError):
            versions.revoke(ref.id, **WHY)
            at = (datetime.fromisoformat(ref.name).replace(tzinfo=UTC) - START).days
            del self.days[at]

    def valid(self, key: str, at: int) -> int | None:
        known = [time for time in sorted(self.days) if time <= at]
        if known:
            return self.days[known[-1]].get(key)
        if self.before_history == "oldest" and self.days:
            return self.days[min(self.days)].get(key)
        return None

    @property
    def actions(self) -> list[Callable[[], None]]:
        return [self.draw_version, self.draw_version, self.draw_version, self.revoke]


def new_prices(kind: type[Prices], folder: Path, seed: object, **options: Any) -> Prices:
    return kind(new_world(folder), random.Random(f"{kind.__name__} {seed}"), **options)


def test_the_plan_says_that_output_stays_only_where_it_does(tmp_path: Path) -> None:
    prices = FollowedPrices(new_world(tmp_path), random.Random(1))
    stays = "that is written does not change"
    restating = plan_application(prices.application(), systems=prices.world.systems)
    assert stays not in restating.render()
    plain = Application("plain")
    joined = plain.input_stream("lake.facts").join(
        plain.table(prices.declare()), on="k", select=["v"], as_of="at"
    )
    joined.send_to(plain.output_stream("lake.plain", partitions=2, key="k"))
    assert stays in plan_application(plain, systems=prices.world.systems).render()


def test_only_the_interval_that_changed_is_restated(tmp_path: Path) -> None:
    prices = new_prices(FollowedPrices, tmp_path, 0)
    prices.change("a", 9, 3)
    facts = {n: ("ab"[n % 2], n // 2) for n in range(24)}
    prices.world.send("facts", *[(n, key, day(at)) for n, (key, at) in facts.items()])
    prices.facts = facts
    follow(prices.world, prices.application())
    prices.change("a", 5, 2)
    prices.check()
    everything = prices.world.streams.read_arrow(prices.world.streams.all_ranges("out"))
    again = sorted(facts[row["n"]] for row in everything.to_pylist() if row["__epoch"])
    assert again == [("a", at) for at in range(5, 9)]


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("kind", [FollowedPrices, DeliveredPrices])
@pytest.mark.parametrize("seed", range(rounds(1, 20)))
def test_results_by_time_become_those_of_a_run_that_knew_everything(
    tmp_path: Path, kind: type[Prices], seed: int
) -> None:
    before_history: BeforeHistory = ["null", "oldest"][seed % 2]  # type: ignore[assignment]
    prices = new_prices(kind, tmp_path, seed, before_history=before_history)
    draw = prices.draw
    for _ in range(rounds(20, 30)):
        draw.choice(prices.actions)()
        prices.add_facts(draw.randrange(4))
        app = prices.application(max_batch_records=draw.choice([1, 4, 1000]))
        match draw.randrange(4):
            case 0:
                follow_and_die(prices.world, app, draw.choice(EVENTS))
            case 1:
                follow(prices.world, app, max_batches=1)
            case 2:
                follow(prices.world, app)
    prices.check()
