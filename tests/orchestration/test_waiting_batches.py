"""What batches read while records wait for a dataset, without Spark: only positions count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from dagster import DagsterInstance

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.declaration.policies import Watermark
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.versions import watermark
from dagster_adjunct.assets.versions.manifest import as_bounded, as_unbounded
from dagster_adjunct.assets.versions.watermark import known_until
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.batch_log.checkpoints import CheckpointManager
from dagster_adjunct.orchestration.operators.lookups import Wait
from dagster_adjunct.orchestration.step import step as step_module
from dagster_adjunct.orchestration.step.context import RunHooks
from dagster_adjunct.orchestration.step.following import Following, Machine, Watched
from dagster_adjunct.orchestration.step.late_changes import late_counters
from dagster_adjunct.orchestration.step.waiting import _StreamTimes, find_held
from dagster_adjunct.resources.errors import CommitConflictError, OffsetOutOfRangeError
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.sql.arrow_kernels import NeedsSpark
from dagster_adjunct.resources.streams.lake.repartition import repartition
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointSpecific
from dagster_adjunct.streams import Retention
from tests.clocks import on_clock
from tests.faulty_store import Crash, Fault, FaultyStore, deaths
from tests.orchestration.dagster.ticking import Ticker
from tests.orchestration.quick_waits import MINUTE, START, QuickWorld
from tests.rounds import rounds

F0, F1 = "lake.facts.0", "lake.facts.1"
WHO: dict[str, Any] = {"by": "ada", "reason": "an audit"}


@pytest.mark.parametrize("limit", [1, 3])
def test_records_that_wait_leave_the_others_no_less_of_a_batch(limit: int) -> None:
    world = QuickWorld(2, options={"max_batch_records": limit})
    waits, goes = world.key(0), world.key(1)
    world.clock.forward(minutes=5)
    world.send("prices", (waits, 3, 1), (goes, 3, 1))
    world.send("facts", *[(waits, 4, n) for n in range(10)], *[(goes, 1, n) for n in range(5)])
    report = world.run()
    assert world.read() == {F1: [0, 1, 2, 3, 4]}
    assert [(str(one.ssp), one.offset) for one in report.event_time.held] == [(F0, 0)]
    world.clock.forward(hours=1)
    world.run()
    assert world.read() == {F0: [*range(10)], F1: [0, 1, 2, 3, 4]}


def test_a_replay_goes_on_while_new_records_wait() -> None:
    world = QuickWorld(wait=Wait(10 * MINUTE, mark="early"))
    world.clock.forward(minutes=5)
    world.send("prices", ("a", 3, 1))
    world.send("facts", ("a", 1, 1), ("a", 4, 2), ("a", 2, 3))
    world.run()
    world.clock.forward(minutes=10)
    world.run()  # the second one is early
    world.send("facts", ("a", 14, 4))
    world.run()
    world.send("prices", ("a", 13, 1))
    until = StartpointSpecific(offset="3")
    world.startpoints.request(
        "lake.facts", StartpointOldest(), until=until, versions="recorded", **WHO
    )
    assert [one.offset for one in world.run().event_time.held] == [3]
    assert world.read() == {F0: [0, 1, 2, 0, 1, 2]}
    first, second, *again = [one.intent.joined.known for one in world.work.inputs]
    assert again == [first, second]  # so the same records are marked
    in_time = [one.intent.joined.in_time for one in world.work.inputs]
    assert in_time == [("join-2-prices",), (), ("join-2-prices",), ()]


@pytest.mark.parametrize("ahead", [timedelta(minutes=3), timedelta(days=365_000)])
def test_a_record_written_in_the_future_does_not_wait_until_then(ahead: timedelta) -> None:
    world = QuickWorld(wait=10 * MINUTE, facts_options={"timestamp": "at"})
    world.clock.forward(minutes=5)
    world.send("prices", ("a", 3, 1))
    world.send("facts", ("a", world.clock() + ahead, 1), ("a", 4, 2))
    assert len(world.run().event_time.held) == 1
    world.clock.forward(minutes=13)
    assert world.run().event_time.held == ()
    assert world.read() == {F0: [0, 1]}


def test_an_event_time_in_the_far_future_ends_nobody_elses_waiting() -> None:
    world = QuickWorld(wait=Wait(10 * MINUTE, by="event time"))
    world.clock.forward(minutes=5)
    world.send("prices", ("a", 3, 1))
    world.send("facts", ("a", 4, 1), ("a", world.clock() + timedelta(days=365_000), 2), ("a", 5, 3))
    assert [one.offset for one in world.run().event_time.held] == [0]
    world.clock.forward(minutes=9)
    world.send("facts", ("a", 14, 4))
    assert [one.offset for one in world.run().event_time.held] == [2]
    assert world.read() == {F0: [0, 1]}


def test_a_change_after_the_time_of_an_idle_partition_is_late_however_many_came_before() -> None:
    world = QuickWorld(2, watermark=Watermark(idle_after=5 * MINUTE))
    busy, idle = world.key(0), world.key(1)
    world.clock.forward(minutes=60)
    world.send("prices", (busy, 60, 1), (idle, 30, 1))
    world.run()
    world.clock.forward(minutes=6)
    world.send("prices", (busy, 66, 1))
    world.run()  # complete up to 61
    for minute in (31, 32):
        world.send("prices", (idle, minute, 1))
        (report,) = world.advance()
        assert report.counters["late_changes"] == 1


def test_a_change_is_late_that_comes_while_another_writer_confirms_an_idle_stream() -> None:
    world = QuickWorld(2, watermark=Watermark(idle_after=5 * MINUTE))
    world.clock.forward(minutes=60)
    world.send("prices", (world.key(0), 60, 1), (world.key(1), 60, 1))
    world.advance()
    world.clock.forward(minutes=6)
    empty = InMemoryStore()  # the stream as the other writer has seen it, without the last change
    for item in world.lake.store.list(""):
        empty.put(item.key, world.lake.store.get(item.key).data)
    seen = {"lake": LakeStreams(on_clock(lake_in(empty), world.clock))}
    world.send("prices", (world.key(0), 60.5, 2))

    def confirm() -> None:
        report = advance_dataset(
            world.prices, lake=world.lake, systems=seen, spark=IN_PROCESS, by="another"
        )
        assert report.counters.get("read", 0) == 0

    meanwhile = FaultyStore(world.lake.store, [Fault("put_if_match", 1, "meanwhile", confirm)])
    lake = on_clock(Lake(meanwhile, world.lake.id), world.clock)
    advance: dict[str, Any] = {"systems": world.systems, "spark": IN_PROCESS, "by": "test"}
    with pytest.raises(CommitConflictError):
        advance_dataset(world.prices, lake=lake, **advance)
    stored = StoredVersions(world.lake, world.prices)
    assert known_until(world.prices, stored.manifest()) == START + 61 * MINUTE
    assert advance_dataset(world.prices, lake=lake, **advance).counters["late_changes"] == 1
    passed = as_unbounded(stored.require_manifest()).watermark.passed
    assert [(mark.until, mark.late) for mark in passed] == [
        (START + 60 * MINUTE, 0),
        (START + 61 * MINUTE, 1),
    ]


def test_a_repartitioned_change_stream_is_not_silent_before_it_was() -> None:
    watermark = Watermark(delay=50 * MINUTE, idle_after=5 * MINUTE)
    world = QuickWorld(2, watermark=watermark)
    stored = StoredVersions(world.lake, world.prices)
    world.clock.forward(minutes=60)
    world.send("prices", (world.key(0), 59, 1))
    world.run()
    assert known_until(world.prices, stored.manifest()) == START + 9 * MINUTE
    world.clock.forward(minutes=1)
    repartition(world.streams, "prices", 3, reason="more", by="ada", check=lambda state: None)
    world.run()
    assert known_until(world.prices, stored.manifest()) is None
    world.clock.forward(minutes=5)
    world.advance()
    assert known_until(world.prices, stored.manifest()) == START + 61 * MINUTE


def test_the_sensor_launches_a_run_where_retention_has_dropped_records_that_wait(
    tmp_path: Path,
) -> None:
    keeps = {"retention": Retention(max_age=30 * MINUTE)}
    world = QuickWorld(lake=open_lake(tmp_path), facts_options=keeps)
    world.clock.forward(minutes=5)
    world.send("prices", ("a", 3, 1))
    world.send("facts", ("a", 4, 1))
    world.run()
    ticker = Ticker(world.lake, world.make(), DagsterInstance.ephemeral(), "app_new_records")
    assert "for dataset prices" in ticker.skipped()
    world.clock.forward(minutes=40)
    world.send("facts", ("a", 44, 2))
    world.streams.maintain("facts")
    ticker.asked()
    with pytest.raises(OffsetOutOfRangeError):
        world.run()


def test_a_batch_reads_the_versions_that_its_records_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = QuickWorld()
    world.create("daily", Schema.of(k="string", v="int"))
    daily = bounded_dataset(
        "daily",
        input="lake.daily",
        key="k",
        partitions=1,
        valid_from="name",
        valid_for=timedelta(days=1),
    )

    def make() -> Application:
        app = Application("app")
        facts = app.input_stream("lake.facts", default_offset="oldest", event_time="at")
        joined = facts.join(app.table(daily), on="k", select=["v"], as_of="at", wait=MINUTE)
        joined.send_to(app.output_stream("lake.out", partitions=1, key="k"))
        return app

    world.make = make
    stored = StoredVersions(world.lake, daily)
    lease = step_module.lease_versions

    def revoke_first(*given: Any) -> Any:
        version = as_bounded(stored.require_manifest()).served_id
        assert version is not None
        monkeypatch.setattr(step_module, "lease_versions", lease)
        stored.revoke(version, **WHO)
        return lease(*given)

    for day in ("2026-01-01", "2026-01-02"):
        row = {"k": "a", "v": 1}
        world.streams.append("daily", [row], producer=day, sequence=0, end_of_dataset=day)
    world.advance(daily)
    world.clock.forward(days=2)
    world.send("facts", ("a", 24 * 60 + 1, 1))
    monkeypatch.setattr(step_module, "lease_versions", revoke_first)
    world.step()
    (inputs,) = world.work.inputs
    known = inputs.intent.joined.known["join-2-daily"]
    assert known is not None
    assert known > world.clock() - MINUTE
    assert inputs.intent.versions["daily"] in inputs.over_time["daily"].versions


def story_with(plan: Sequence[Fault]) -> list[tuple[str, str]]:
    """Run once with these faults and once without, while records wait; return the requests."""
    world = QuickWorld(wait=10 * MINUTE)
    world.clock.forward(minutes=5)
    world.send("prices", ("a", 3, 1))
    world.send("facts", ("a", 1, 1), ("a", 4, 2), ("a", 2, 3))
    lake = world.lake
    store = FaultyStore(lake.store, plan)
    world.lake = on_clock(Lake(store, lake.id), world.clock)
    with suppress(Crash):
        world.run()
    world.lake = lake
    world.clock.forward(minutes=10)
    world.run()
    assert world.read() == {F0: [0, 1, 2]}
    return store.requests


@pytest.mark.lengthy
@pytest.mark.rounds
def test_a_killed_run_reads_each_record_once_though_more_may_be_read_since() -> None:
    for nth in deaths(story_with(())):
        story_with([Fault("*", nth, "crash-before")])


@dataclass
class Oracle:
    """Says in plain Python how many records of each partition have been read."""

    delay: int
    wait: Wait
    newest: dict[int, float] = field(default_factory=dict)
    facts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)

    def is_held(self, fact: tuple[int, int], unread: list[tuple[int, int]], now: int) -> bool:
        at, written = fact
        known = None
        if len(self.newest) == len(self.facts):
            known = min(self.newest.values()) - self.delay
        if known is not None and at < known:
            return False
        most = self.wait.at_most // MINUTE
        if self.wait.by == "clock":
            return written > now - most
        return at > max(one[0] for one in unread) - most

    def run(self, now: int) -> dict[str, list[int]]:
        for partition, facts in self.facts.items():
            unread = facts[self.read.get(partition, 0) :]
            for fact in unread:
                if self.is_held(fact, unread, now):
                    break
                self.read[partition] = self.read.get(partition, 0) + 1
        return {f"lake.facts.{one}": [*range(end)] for one, end in self.read.items()}


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("seed", rounds([0], [*range(20)]))
def test_each_run_reads_exactly_what_need_not_wait(seed: int) -> None:
    draw = Random(seed)
    partitions = draw.choice([1, 2, 3])
    wait = Wait(draw.choice([5, 15]) * MINUTE, by=["clock", "event time"][seed % 2])  # type: ignore[arg-type]
    oracle = Oracle(draw.choice([0, 3]), wait, facts={one: [] for one in range(partitions)})
    limit = {"max_batch_records": draw.choice([1, 3, 1000])}
    world = QuickWorld(partitions, Watermark(delay=oracle.delay * MINUTE), wait, options=limit)
    now = 0
    for _ in range(10):
        now += draw.choice([1, 2, 5])
        world.clock.now = START + now * MINUTE
        for partition in range(partitions):
            key = world.key(partition)
            for at in [max(0, now - draw.randrange(6)) for _ in range(draw.randrange(3))]:
                world.send("prices", (key, at, 1))
                oracle.newest[partition] = max(oracle.newest.get(partition, 0), at)
            for at in [max(0, now - draw.randrange(4)) for _ in range(draw.randrange(4))]:
                world.send("facts", (key, at, 1))
                oracle.facts[partition].append((at, now))
        world.run()
        assert world.read() == oracle.run(now)


@pytest.mark.lengthy
def test_a_run_that_stays_goes_on_when_the_dataset_knows_more_and_when_the_wait_is_over() -> None:
    world = QuickWorld(wait=20 * MINUTE)
    world.clock.forward(minutes=5)
    world.send("prices", ("a", 3, 1))
    world.send("facts", ("a", 4, 1), ("a", 40, 2))
    world.advance()
    read_at: dict[int, float] = {}
    due = [START + 7 * MINUTE]

    def sleep(seconds: float) -> None:
        for number in world.read().get(F0, []):
            read_at.setdefault(number, (world.clock() - START) / MINUTE)
        world.clock.now += timedelta(seconds=seconds)
        if due and due[0] <= world.clock():
            due.pop()
            world.send("prices", ("a", 5, 1))

    def refresh() -> bool:
        world.advance()
        return True

    watched = Watched(
        streams={"lake.prices": lambda: world.streams.fingerprint("prices")},
        startpoints=lambda: None,
        asked=lambda: "",
        refresh=refresh,
    )
    machine = Machine(lambda: world.clock().timestamp(), sleep, lambda: 1)
    stay = Following(22 * MINUTE, watched, machine=machine)
    stay.begin()
    world.step(hooks=RunHooks(wait=stay.wait, go_on=stay.go_on))
    assert [round(read_at[number]) for number in (0, 1)] == [7, 25]


@pytest.mark.rounds
@pytest.mark.lengthy
@pytest.mark.parametrize("seed", range(rounds(1, 10)))
def test_changes_are_late_for_an_application_that_had_passed_their_time(seed: int) -> None:
    draw = Random(seed)
    world = QuickWorld(watermark=Watermark(delay=MINUTE))
    world.clock.forward(hours=10)
    newest = passed = -100
    since: list[int] = []
    expected = []
    for minute in range(0, 75, 3):
        times = [minute - draw.choice([0, 0, 0, 1, 3, 10, 25]) for _ in range(draw.randint(1, 4))]
        world.send("prices", *[("a", time, 1) for time in times])
        world.advance()
        newest = max(newest, *times)
        since += times
        if draw.random() < 0.4:
            world.send("facts", ("a", -200, 1))
            world.step()
            late = sum(time < passed for time in since)
            expected.append(late)
            passed, since = newest - 1, []
    counted = [late_counters(world.make(), read.intent) for read in world.work.inputs]
    assert [found.get("join-2-prices", {}).get("late_changes", 0) for found in counted] == expected
    assert sum(expected) > 3
    last = CheckpointManager(world.lake, "app").read_last_checkpoint()
    assert last is not None
    assert last.late_changes == {"join-2-prices": sum(expected)}


def test_what_is_late_is_bounded_after_more_watermarks_than_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watermark, "MAX_PASSED", 3)
    world = QuickWorld()
    world.clock.forward(hours=10)
    world.send("prices", ("a", 2, 1))
    world.send("facts", ("a", 0, 1))
    world.run()
    for minute in range(3, 8):
        world.send("prices", ("a", minute, 1))
        world.advance()
    world.send("prices", ("a", 1, 1), ("a", 4, 1))  # both late, but one for the application
    world.send("facts", ("a", 0, 1))
    world.run()
    assert world.work.inputs[-1].intent.joined.late == {"prices": 2}


def test_a_replay_counts_no_late_changes_and_passes_nothing() -> None:
    world = QuickWorld()
    world.clock.forward(hours=10)
    world.send("prices", ("a", 5, 1))
    world.send("facts", ("a", 1, 1))
    world.run()
    world.send("prices", ("a", 2, 1))
    until = StartpointSpecific(offset="1")
    world.startpoints.request("lake.facts", StartpointOldest(), until=until, **WHO)
    assert "join-2-prices" not in world.run().counters
    world.send("facts", ("a", 1, 1))
    assert world.run().counters["join-2-prices"]["late_changes"] == 1


@contextmanager
def only_spark_reading() -> Iterator[None]:
    """Let nobody read event times without Spark: of Kafka's records, say."""

    def need_spark(reader: Any, ranges: Any) -> Any:
        raise NeedsSpark("the event time")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_StreamTimes, "_read_stream", need_spark)
        yield


@pytest.mark.lengthy
def test_the_sensor_goes_by_what_the_last_run_found_where_it_can_read_nothing_itself(
    tmp_path: Path,
) -> None:
    world = QuickWorld(lake=open_lake(tmp_path))
    world.clock.forward(minutes=5)
    world.send("prices", ("a", 3, 1))
    world.send("facts", ("a", 1, 1), ("a", 4, 2), ("a", 9, 3))
    world.run()
    ticker = Ticker(world.lake, world.make(), DagsterInstance.ephemeral(), "app_new_records")
    with only_spark_reading():
        assert "waits at offset 1" in ticker.skipped()
        world.send("prices", ("a", 4, 1))
        world.advance()
        assert "waits at offset 1" in ticker.skipped(), "complete up to its time, not beyond"
        world.send("prices", ("a", 5, 1))
        world.advance()
        ticker.asked()
    world.run()
    assert world.read() == {F0: [0, 1]}
    with only_spark_reading():
        assert "waits at offset 2" in ticker.skipped()
        world.clock.forward(hours=2)
        ticker.asked()  # the wait is over


def test_what_waits_by_event_time_is_known_while_its_stream_stays_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = Wait(10 * MINUTE, by="event time")
    world = QuickWorld(wait=wait, options={"max_batch_records": 1})
    world.clock.forward(hours=1)
    world.send("prices", ("a", 3, 1))
    world.send("facts", ("a", 1, 1), ("a", 4, 2), ("a", 9, 3))
    world.run()

    def held() -> list[int]:
        state = BatchLog(world.lake, "app").read().state
        with only_spark_reading():
            found = find_held(
                world.systems, world.lake, world.make(), state.checkpoint, state.waits.held
            )
        return [record.offset for record in found]

    assert held() == [1]
    world.send("facts", ("a", 13, 4))
    assert held() == [], "unknown"
    read = []
    read_stream = _StreamTimes._read_stream

    def reading(reader: _StreamTimes, ranges: Any) -> Any:
        read.extend((int(span.start), int(span.end)) for span in ranges.values())
        return read_stream(reader, ranges)

    with monkeypatch.context() as patched:
        patched.setattr(_StreamTimes, "_read_stream", reading)
        world.run()
    assert read == [(3, 4)], "what was seen is not read again"
    assert held() == [1]
    world.send("facts", ("a", 14, 5))
    world.run()
    assert world.read() == {F0: [0, 1]}
    assert held() == [2]
    world.send("facts", ("a", 61 + 11, 6))
    world.run()
    assert held() == [], "a time that is not believed yet may be believed later"
