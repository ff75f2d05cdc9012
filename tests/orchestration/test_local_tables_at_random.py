"""State over random streams: whatever dies whenever, tables and outputs are what plain Python makes
of the records.

The application counts the visits of each shop, keeps where each visitor was last, and asks that in
the same batch.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.policies import DeltaCompaction, DiscardPolicy
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.maintenance.expire import expire_versions
from dagster_adjunct.resources.errors import DatasetNotFoundError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark

VISITORS, SHOPS = "abcdef", "pqr"


def visiting() -> Application:
    app = Application("visiting", max_batch_records=6)
    small = DeltaCompaction(deltas=2, fraction=0.3)
    counts = app.local_table(
        "counts",
        key="shop",
        schema=Schema.of(shop="string", visits="bigint"),
        partitions=3,
        compaction=small,
    )
    last = app.local_table(
        "last",
        key="visitor",
        schema=Schema.of(visitor="string", shop="string"),
        partitions=2,
        compaction=small,
    )
    visits = app.input_stream("lake.visits")
    numbered = (
        visits.partition_by("shop")
        .join(counts, on="shop", how="left")
        .map(one_more, keeps_partitioning=True)
    )
    numbered.send_to(counts).send_to(app.output_stream("lake.numbered", partitions=3, key="shop"))
    visits.send_to(last, deleted="shop = 'home'")
    app.input_stream("lake.asked").join(last, on="visitor", how="left").send_to(
        app.output_stream("lake.answers", partitions=2, key="visitor")
    )
    return app


def one_more(frame: Any) -> Any:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    here = Window.partitionBy("shop").orderBy("__partition", "__offset")
    return frame.withColumn("visits", F.coalesce("visits", F.lit(0)) + F.row_number().over(here))


@dataclass
class Expected:
    """What the tables and outputs hold once these batches are done, in plain Python."""

    counts: dict[str, int] = field(default_factory=dict)
    last: dict[str, str] = field(default_factory=dict)
    numbered: list[tuple[str, str, int]] = field(default_factory=list)
    answers: list[tuple[str, str | None]] = field(default_factory=list)

    def batch(self, visits: list[tuple[int, int, str, str]], asked: list[str]) -> None:
        """Do a batch: visits as (partition, offset, visitor, shop)."""
        for _, _, visitor, shop in sorted(visits):
            self.counts[shop] = self.counts.get(shop, 0) + 1
            self.numbered.append((visitor, shop, self.counts[shop]))
            if shop == "home":
                self.last.pop(visitor, None)
            else:
                self.last[visitor] = shop
        self.answers += [(visitor, self.last.get(visitor)) for visitor in asked]


def expected(world: StepWorld, app: Application) -> Expected:
    """Redo the batches of the application's log over the records of its streams."""
    records = {
        name: world.streams.read_arrow(world.streams.all_ranges(name)).to_pylist()
        for name in ("visits", "asked")
    }
    history = BatchLog(world.lake, app.name).history(None)
    done = {
        state.last.intent.batch: state.last.intent for _, state in history if state.last is not None
    }
    result = Expected()
    for number in sorted(done):
        mine: dict[str, list[dict[str, Any]]] = {"visits": [], "asked": []}
        for ssp, span in done[number].ranges.items():
            inside = range(int(span.start), int(span.end))
            of_partition = (
                row for row in records[ssp.stream] if row["__partition"] == ssp.partition
            )
            mine[ssp.stream] += [row for row in of_partition if row["__offset"] in inside]
        result.batch(
            [
                (row["__partition"], row["__offset"], row["visitor"], row["shop"])
                for row in mine["visits"]
            ],
            [row["visitor"] for row in mine["asked"]],
        )
    return result


def check(world: StepWorld, app: Application) -> None:
    wanted = expected(world, app)
    with open_dataset(world.lake, "counts") as counts, open_dataset(world.lake, "last") as last:
        assert {key: entry["visits"] for key, entry in counts.items()} == wanted.counts
        assert {key: entry["shop"] for key, entry in last.items()} == wanted.last
    numbered = [(row["visitor"], row["shop"], row["visits"]) for row in world.rows("numbered")]
    assert sorted(numbered) == sorted(wanted.numbered)
    answers = [(row["visitor"], row["shop"]) for row in world.rows("answers")]
    assert sorted(answers, key=str) == sorted(wanted.answers, key=str)


def history(world: StepWorld, seed: int, rounds: int) -> int:
    """Visits come, runs die anywhere and are started again; return how many died."""
    chance, died = random.Random(seed), 0
    world.stream("visits", "visitor", 2, visitor="string", shop="string")
    world.stream("asked", "visitor", 2, visitor="string")
    app = visiting()
    for number in range(rounds):
        shops = [*SHOPS, "home"]
        world.send(
            "visits",
            *[
                (chance.choice(VISITORS), chance.choice(shops))
                for _ in range(chance.randrange(1, 9))
            ],
        )
        world.send("asked", *[(chance.choice(VISITORS),) for _ in range(chance.randrange(1, 4))])
        faults = [
            Fault("*", chance.randrange(20, 160), chance.choice(["crash-before", "crash-after"]))
        ]
        try:
            replace(world, lake=Lake(FaultyStore(world.lake.store, faults), world.lake.id)).run(
                app, run=f"a-{number}"
            )
        except Crash:
            died += 1
        with suppress(DatasetNotFoundError):
            expire_versions(world.lake, "counts", DiscardPolicy(1, timedelta(0)), by="test")
        if chance.random() < 0.5:
            world.run(app, run=f"b-{number}")
            check(world, app)
    world.run(app, run="last")
    check(world, app)
    return died


@pytest.mark.long  # commits alone, at random: tests/assets/test_local_table_commits.py
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 7))
def test_histories_with_crashes_are_what_plain_python_makes_of_them(
    step_world: StepWorld, seed: int
) -> None:
    assert history(step_world, seed, rounds=8) > 0
