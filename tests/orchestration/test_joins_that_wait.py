"""Joins that wait until their dataset is complete up to the record's time, against plain Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from dagster import DagsterInstance
from pyspark.sql import SparkSession

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import Watermark
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.lookups import Wait
from dagster_adjunct.orchestration.operators.windows.aggregates import Count
from dagster_adjunct.orchestration.operators.windows.kinds import Tumbling
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointSpecific
from dagster_adjunct.streams import ARRIVAL
from dagster_adjunct.tables import MemoryTable, RemoteTable
from tests.clocks import Clock, on_clock
from tests.faulty_store import Crash
from tests.orchestration.dagster.ticking import Ticker
from tests.rounds import rounds

pytestmark = pytest.mark.spark

MINUTE = timedelta(minutes=1)
START = datetime(2026, 1, 1, tzinfo=UTC)
FACTS = Schema.of(k="string", at="timestamp", n="int")
CHANGES = Schema.of(k="string", at="timestamp", v="int")


@dataclass
class World:
    """A lake on a clock that tests move, with the stream `facts` and the change stream `prices`."""

    folder: Path
    spark: SparkSession
    partitions: int = 2
    watermark: Watermark = field(default_factory=lambda: Watermark(idle_after=5 * MINUTE))
    wait: timedelta | Wait = 60 * MINUTE

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.lake: Lake = on_clock(open_lake(f"file://{self.folder}"), self.clock)
        self.streams = LakeStreams(self.lake)
        self.sequence = 0
        self.counters: dict[str, Mapping[str, int]] = {}
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
        app = Application("app", **options)
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

    def run(self, dies_at: Sequence[str] = (), **options: Any) -> StepReport:
        """Run the application; the run dies at the first event that is among `dies_at`."""
        return self.run_app(self.application(**options), dies_at)

    def run_app(self, app: Application, dies_at: Sequence[str] = ()) -> StepReport:

        def die(event: Any) -> None:
            if getattr(event, "what", "") in dies_at:
                raise Crash("killed")

        report = run_application(
            app,
            lake=self.lake,
            systems={"lake": self.streams},
            spark=self.spark,
            run="test",
            on_event=die,
        )
        self.counters = {one.dataset: one.counters for one in report.datasets}
        return report.step

    def results(self) -> dict[int, int | None]:
        if "out" not in self.streams.list_streams():
            return {}
        found = self.streams.read_arrow(self.streams.all_ranges("out"), columns=["n", "v"])
        rows = found.select(["n", "v"]).to_pylist()
        assert len({row["n"] for row in rows}) == len(rows)
        return {row["n"]: row["v"] for row in rows}


@pytest.fixture
def world(tmp_path: Path, spark: SparkSession) -> World:
    return World(tmp_path, spark)


def test_a_record_waits_until_the_dataset_knows_its_time(world: World) -> None:
    world.send("prices", ("a", 0, 10), ("b", 0, 20), ("c", 0, 30))
    world.clock.forward(minutes=1)
    world.send("facts", ("a", 4, 1))
    world.run()
    assert world.results() == {}
    world.send("prices", ("a", 3, 11), ("a", 6, 12), ("b", 6, 21), ("c", 6, 31))
    world.clock.forward(minutes=6)
    world.run()
    assert world.results() == {1: 11}


def test_the_latest_results_of_a_chain_are_known_once_no_record_waits(world: World) -> None:
    world.streams.create("in", schema=FACTS, key=["k"], partitions=world.partitions)
    first = Application("first", engine="auto")
    first.input_stream("lake.in", default_offset="oldest").send_to(
        first.output_stream("lake.facts", partitions=world.partitions, key="k")
    )
    world.send("prices", ("a", 0, 10), ("a", 2, 11), ("b", 2, 20), ("c", 2, 30))
    world.clock.forward(minutes=3)
    world.send("in", ("a", 1, 1))
    world.run_app(first)
    world.run()
    world.send("in", ("a", 4, 2))  # waits for the prices
    world.run_app(first)
    Startpoints(first, lake=world.lake).request(
        "lake.in", StartpointOldest(), by="me", reason="a test"
    )
    world.run_app(first)

    def read(epochs: Any) -> list[dict[str, Any]]:
        whole = world.streams.all_ranges("out")
        table = world.streams.read_arrow(whole, ["n", "v"], epochs=epochs)
        return table.select(["n", "v", "__epoch"]).to_pylist()

    for _ in range(2):  # however often it runs
        assert len(world.run().event_time.held) == 1
        with pytest.raises(ConfigurationError) as refused:
            read("latest")
        assert refused.value.stream == "lake.out"
        assert "adjunct checkpoint show" in refused.value.next_step
        assert read("all") == [{"n": 1, "v": 10, "__epoch": 0}]
    world.send("prices", ("a", 3, 12), ("a", 6, 13), ("b", 6, 21), ("c", 6, 31))
    world.clock.forward(minutes=6)
    world.run()
    newest = {row["n"]: row for row in sorted(read("all"), key=lambda row: row["__epoch"])}
    assert sorted(read("latest"), key=lambda row: row["n"]) == [newest[1], newest[2]]
    assert (newest[1]["__epoch"], newest[2]["v"]) == (1, 12)


def early(report: StepReport) -> int:
    return report.counters.get("join-2-prices", {}).get("early", 0)


def test_a_record_that_has_waited_as_long_as_allowed_is_marked(
    tmp_path: Path, spark: SparkSession
) -> None:
    wait = Wait(10 * MINUTE, mark="is_early")
    world = World(tmp_path, spark, partitions=1, watermark=Watermark(), wait=wait)
    world.send("prices", ("a", 0, 10), ("a", 2, 11))
    world.send("facts", ("a", 1, 1), ("a", 3, 2), ("a", 1, 3))
    world.clock.forward(minutes=9)
    assert early(world.run()) == 0
    assert world.results() == {1: 10}  # the third one comes after one that waits
    world.clock.forward(minutes=1)
    assert early(world.run()) == 1
    assert world.results() == {1: 10, 2: 11, 3: 10}
    out = world.streams.read_arrow(world.streams.all_ranges("out"), columns=["n", "is_early"])
    assert {row["n"]: row["is_early"] for row in out.to_pylist()} == {1: False, 2: True, 3: False}


def test_what_was_read_before_anything_waited_is_not_early_when_it_is_read_again(
    tmp_path: Path, spark: SparkSession
) -> None:
    world = World(tmp_path, spark, partitions=1, wait=None)  # type: ignore[arg-type]
    world.send("prices", ("a", 0, 10))
    world.send("facts", ("a", 1, 1), ("a", 3, 2))
    world.run()
    world.wait = Wait(10 * MINUTE)
    Startpoints(world.application(), lake=world.lake).request(
        "lake.facts",
        StartpointOldest(),
        until=StartpointSpecific(offset="2"),
        versions="recorded",
        by="ada",
        reason="an audit",
    )
    again = world.run()
    assert (again.counters["join-2-prices"]["rows"], early(again)) == (2, 0)


def test_records_wait_by_the_times_of_their_input(tmp_path: Path, spark: SparkSession) -> None:
    wait = Wait(10 * MINUTE, by="event time")
    world = World(tmp_path, spark, partitions=1, watermark=Watermark(), wait=wait)
    world.send("prices", ("a", 0, 10))
    world.send("facts", ("a", 3, 1), ("a", 12, 2))
    world.clock.forward(hours=9)
    world.run()
    assert world.results() == {}
    world.send("facts", ("a", 13, 3))
    assert early(world.run(max_batch_records=1)) == 1
    assert world.results() == {1: 10}


def test_a_silent_dataset_is_complete_up_to_the_time_of_its_silence(world: World) -> None:
    world.clock.forward(minutes=1)
    world.send("prices", ("a", 0, 10))
    world.run()
    world.send("facts", ("a", 6, 1), ("b", 6, 2), ("a", 9, 3))
    world.clock.forward(minutes=10)  # 00:11: silent since 00:01, so complete up to 00:06
    world.run()
    assert world.results() == {}
    world.clock.forward(minutes=1)
    world.run()
    assert world.results() == {1: 10, 2: None}


def test_times_of_a_clock_that_is_ahead_are_not_believed(world: World) -> None:
    year = 60 * 24 * 365
    world.send("prices", ("a", year, 10), ("b", year, 20), ("c", year, 30))
    world.clock.forward(minutes=2)
    world.send("facts", ("a", 3, 1))
    world.run()
    assert world.results() == {}


def test_what_cannot_wait_is_rejected(world: World) -> None:
    app = Application("app")
    silent = unbounded_dataset(
        "silent", input="lake.prices", key="k", partitions=2, history="all", valid_from="at"
    )
    facts = app.input_stream("lake.facts", event_time="at")
    with pytest.raises(PlanningError) as caught:
        facts.join(app.table(silent), on="k", as_of="at", wait=MINUTE)
    assert (caught.value.dataset, "watermark=" in str(caught.value)) == ("silent", True)
    untimed = Application("untimed")
    with pytest.raises(PlanningError) as caught:
        untimed.input_stream("lake.facts").join(
            untimed.table(world.prices), on="k", as_of="at", wait=MINUTE
        )
    assert caught.value.stream == "lake.facts"
    prices = app.table(world.prices)
    per_key = facts.window(Tumbling(MINUTE), by="k", name="w", aggregates={"many": Count()})
    with pytest.raises(PlanningError) as caught:
        per_key.join(prices, on="k", as_of="window_start", wait=MINUTE)
    assert caught.value.operator == "window-2-w"
    changes = app.input_changes(world.prices, event_time=ARRIVAL)
    with pytest.raises(PlanningError) as caught:
        changes.join(prices, on="k", as_of="at", wait=MINUTE)
    assert caught.value.stream == "changes.prices"
    remote = app.table(RemoteTable("remote", key="k", read_function=MemoryTable("remote")))
    with pytest.raises(ConfigurationError):
        facts.join(remote, on="k", select={"v": "int"}, wait=MINUTE)
    with pytest.raises(ConfigurationError):
        unbounded_dataset("d", input="lake.prices", key="k", partitions=2, watermark=Watermark())


def test_changes_after_the_watermark_are_counted(tmp_path: Path, spark: SparkSession) -> None:
    world = World(tmp_path, spark, partitions=1, watermark=Watermark(delay=2 * MINUTE))
    world.clock.forward(hours=1)
    world.send("prices", ("a", 0, 10), ("a", 10, 11))
    world.send("facts", ("a", 1, 1))
    world.run()
    assert "late_changes" not in world.counters["prices"]
    world.send("prices", ("a", 7, 12), ("a", 8, 13), ("a", 9, 14))
    world.send("facts", ("a", 1, 2))
    report = world.run()
    assert world.counters["prices"]["late_changes"] == 1
    assert report.counters["join-2-prices"]["late_changes"] == 1


def test_records_wait_for_the_version_of_their_day(tmp_path: Path, spark: SparkSession) -> None:
    world = World(tmp_path, spark)
    world.streams.create(
        "daily", schema=Schema.of(k="string", v="int"), key=["k"], partitions=world.partitions
    )
    daily = bounded_dataset(
        "daily",
        input="lake.daily",
        key="k",
        partitions=world.partitions,
        valid_from="name",
        valid_for=timedelta(days=1),
    )
    app = Application("app")
    facts = app.input_stream("lake.facts", default_offset="oldest", event_time="at")
    joined = facts.join(app.table(daily), on="k", select=["v"], as_of="at", wait=timedelta(days=2))
    joined.send_to(app.output_stream("lake.out", partitions=world.partitions, key="k"))

    def deliver(day: str, value: int) -> None:
        world.streams.append(
            "daily", [{"k": "a", "v": value}], producer=day, sequence=0, end_of_dataset=day
        )

    world.clock.forward(days=1)
    deliver("2026-01-01", 1)
    day = 24 * 60
    world.send("facts", ("a", day - 1, 1), ("a", day, 2))
    world.run_app(app)
    assert world.results() == {1: 1}
    deliver("2026-01-02", 2)
    world.run_app(app)
    assert world.results() == {1: 1, 2: 2}


def test_a_plain_join_waits_for_the_current_version(tmp_path: Path, spark: SparkSession) -> None:
    world = World(tmp_path, spark, partitions=1)
    world.streams.create("daily", schema=Schema.of(k="string", v="int"), key=["k"], partitions=1)
    daily = bounded_dataset(
        "daily",
        input="lake.daily",
        key="k",
        partitions=1,
        valid_from="name",
        valid_for=timedelta(days=1),
    )
    app = Application("app")
    facts = app.input_stream("lake.facts", default_offset="oldest", event_time="at")
    wait = Wait(timedelta(days=2), mark="early")
    facts.join(app.table(daily), on="k", select=["v"], wait=wait).send_to(
        app.output_stream("lake.out", partitions=1, key="k")
    )
    assert [
        (one.join, one.stream)
        for one in plan_application(app, systems={"lake": world.streams}).late_data.waits
    ] == [("join-2-daily", "lake.facts")]
    for day, value in (("2026-01-01", 1), ("2026-01-02", 2)):
        world.clock.forward(days=1)
        world.streams.append(
            "daily", [{"k": "a", "v": value}], producer=day, sequence=0, end_of_dataset=day
        )
        if value == 1:
            world.send("facts", ("a", 24 * 60 - 1, 1), ("a", 24 * 60, 2))
        world.run_app(app)
        assert world.results() == {1: 1, 2: 2} if value == 2 else {1: 1}


def test_a_sensor_starts_no_run_that_could_read_nothing(world: World) -> None:
    world.send("prices", ("a", 0, 10), ("b", 0, 20), ("c", 0, 30))
    world.clock.forward(minutes=1)
    world.run()
    ticker = Ticker(world.lake, world.application(), DagsterInstance.ephemeral(), "app_new_records")
    world.send("facts", ("a", 4, 1))
    waits = ticker.tick()
    assert isinstance(waits, str)
    assert "for dataset prices, which is complete up to" in waits
    world.send("prices", ("a", 2, 11))
    assert not isinstance(ticker.tick(), str)  # the run advances the dataset
    world.run()
    assert isinstance(ticker.tick(), str)
    world.clock.forward(minutes=9)  # silent since 00:01, so complete up to 00:05
    assert not isinstance(ticker.tick(), str)
    assert world.run().event_time.held == ()
    assert world.results() == {1: 11}


def price_at(changes: Sequence[tuple[str, int, int]], key: str, minute: int) -> int | None:
    """Return the newest value of a key at a minute, with all changes known."""
    known = [(at, value) for changed, at, value in changes if changed == key and at <= minute]
    return max(known)[1] if known else None


@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(1, 3)))
def test_late_changes_are_waited_for(tmp_path: Path, spark: SparkSession, seed: int) -> None:
    draw = Random(seed)
    watermark = Watermark(delay=10 * MINUTE, idle_after=15 * MINUTE)
    world = World(tmp_path, spark, watermark=watermark, wait=Wait(120 * MINUTE))
    keys = "abcdef"
    minutes = draw.sample(range(60), 40)
    changes = [(draw.choice(keys), minute, value) for value, minute in enumerate(minutes)]
    facts = [(draw.choice(keys), draw.randrange(60), number) for number in range(60)]
    arrivals = [
        (minute + draw.randrange(10), "prices", change)
        for change in changes
        for minute in [change[1]]
    ]
    arrivals += [(fact[1], "facts", fact) for fact in facts]
    wrong = 0
    minute = 0
    for until in [*sorted(draw.sample(range(1, 75), 8)), 100, 130]:
        due = sorted(one for one in arrivals if minute <= one[0] < until)
        for stream in ("prices", "facts"):
            rows = [row for _, of, row in due if of == stream]
            if rows:
                world.send(stream, *rows)
        world.clock.forward(minutes=until - minute)
        minute = until
        died: list[str] = []
        if draw.random() < 0.4:
            died.append(draw.choice(["intent", "outputs"]))
        with suppress(Crash):
            world.run(dies_at=died, max_batch_records=draw.choice([3, 10, 1000]))
        wrong += early(world.run(max_batch_records=draw.choice([3, 10, 1000])))
    assert wrong == 0
    expected = {number: price_at(changes, key, at) for key, at, number in facts}
    assert world.results() == expected
