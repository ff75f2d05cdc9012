"""Joins that wait until their dataset is complete up to the record's time, against plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.declaration.policies import Watermark
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.lookups import Wait
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.clocks import Clock, on_clock

MINUTE = timedelta(minutes=1)
START = datetime(2026, 1, 1, tzinfo=UTC)
FACTS = Schema.of(k="string", at="timestamp", n="int")
CHANGES = Schema.of(k="string", at="timestamp", v="int")


@dataclass
class World:
    """A lake on a clock that tests move, with the stream `facts` and the change stream `prices`."""

    folder: Path
    engine: Any = IN_PROCESS
    partitions: int = 2
    watermark: Watermark = field(default_factory=lambda: Watermark(idle_after=5 * MINUTE))
    wait: timedelta | Wait = 60 * MINUTE

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.lake: Lake = on_clock(open_lake(f"file://{self.folder}"), self.clock)
        self.streams = LakeStreams(self.lake)
        self.sequence = 0
        self.streams.create("facts", schema=FACTS, key=["k"], partitions=self.partitions)
        self.streams.create("prices", schema=CHANGES, key=["k"], partitions=self.partitions)
        self.prices = unbounded_dataset(
            "prices",
            input="lake.prices",
            key="k",
            partitions=self.partitions,
            history="all",
            valid_from="at",
            watermark=self.watermark,
        )

    def application(self, **options: Any) -> Application:
        app = Application("app", engine="auto", **options)
        facts = app.input_stream("lake.facts", default_offset="oldest", event_time="at")
        joined = facts.join(
            app.table(self.prices), on="k", how="left", select=["v"], as_of="at", wait=self.wait
        )
        joined.send_to(app.output_stream("lake.out", partitions=self.partitions, key="k"))
        return app

    def send(self, stream: str, *rows: tuple[str, int, int]) -> None:
        """Append rows of a key, a minute and a value."""
        self.sequence += 1
        names = self.streams.info(stream).schema.names
        records = [
            dict(zip(names, (key, START + minute * MINUTE, value), strict=True))
            for key, minute, value in rows
        ]
        self.streams.append(stream, records, producer="test", sequence=self.sequence)

    def advance(self) -> None:
        advance_dataset(
            self.prices,
            lake=self.lake,
            systems={"lake": self.streams},
            spark=self.engine,
            by="test",
        )

    def run(self, **options: Any) -> StepReport:
        report = run_application(
            self.application(**options),
            lake=self.lake,
            systems={"lake": self.streams},
            spark=self.engine,
            run="test",
        )
        return report.step

    def results(self) -> dict[int, int | None]:
        if "out" not in self.streams.list_streams():
            return {}
        found = self.streams.read_arrow(self.streams.all_ranges("out"), columns=["n", "v"])
        rows = found.select(["n", "v"]).to_pylist()
        assert len({row["n"] for row in rows}) == len(rows)
        return {row["n"]: row["v"] for row in rows}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_record_waits_until_the_dataset_knows_its_time(world: World) -> None:
    world.send("prices", ("a", 0, 10), ("b", 0, 20), ("c", 0, 30))
    world.clock.forward(minutes=1)
    world.advance()
    world.send("facts", ("a", 4, 1))
    world.run()
    assert world.results() == {}
    world.send("prices", ("a", 3, 11), ("a", 6, 12), ("b", 6, 21), ("c", 6, 31))
    world.clock.forward(minutes=6)
    world.advance()
    world.run()
    assert world.results() == {1: 11}
