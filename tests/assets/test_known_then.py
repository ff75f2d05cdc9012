"""What a dataset served at the time of a record: against a dictionary kept commit by commit."""

from __future__ import annotations

import datetime as dt
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DeltaCompaction, DiscardPolicy
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.erasure import erase_keys
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.orchestration.maintenance.expire import expire_versions
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.records import frame_from_arrow
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.rounds import rounds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = Schema.of(k="string", no="int", since="timestamp", n="int", v="int")
KEYS = [(name, number) for name in "ab" for number in (1, 2, 3)]
Key = tuple[str, int]
TICK = dt.timedelta(microseconds=1)
START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


@dataclass
class Served:
    """What was served after each commit that changed it, by the time of the commit."""

    world: World
    name: str
    times: list[dt.datetime] = field(default_factory=list)
    entries: list[dict[Key, int]] = field(default_factory=list)

    def note(self, now: dict[Key, int]) -> None:
        """Note what is served since the newest commit."""
        commits = StoredVersions(self.world.lake, self.name).history(5)
        newest = next(commit for commit in commits if commit.action != "compact")
        if not self.times or newest.at > self.times[-1]:
            self.times.append(newest.at)
            self.entries.append(dict(now))

    def at(self, key: Key, moment: dt.datetime | None) -> int | None:
        found = None
        for time, entries in zip(self.times, self.entries, strict=True):
            if moment is not None and time <= moment:
                found = entries.get(key)
        return found

    def records(self) -> pa.Table:
        """Return records of each key around each commit, in structs."""
        moments: list[dt.datetime | None] = [None, START, self.times[-1] + dt.timedelta(days=1)]
        for time in self.times:
            moments += [time - TICK, time, time + TICK]
        rows = []
        for key in [*KEYS, ("z", 1)]:
            for moment in moments:
                rows.append({"who": {"name": key[0]}, "part": key[1], "seen": {"at": moment}})
        schema = Schema.of(who={"name": "string"}, part="int", seen={"at": "timestamp"})
        return pa.Table.from_pylist(rows, schema=schema.to_arrow())


OPTIONS: dict[str, Any] = {
    "on": {"who.name": "k", "part": "no"},
    "as_of": "seen.at",
    "select": ["v"],
    "versions": "known-then",
}


def check(served: Served, spark: SparkSession | None = None) -> None:
    records = served.records()
    expected = []
    for row in records.to_pylist():
        expected.append(served.at((row["who"]["name"], row["part"]), row["seen"]["at"]))
    with open_dataset(served.world.lake, served.name) as opened:
        joined = opened.point_in_time(records, **OPTIONS)
        assert joined.column("v").to_pylist() == expected
        if spark is not None:
            frame = opened.point_in_time(frame_from_arrow(spark, records), **OPTIONS)
            rows = frame.toArrow().to_pylist()
            served_frame = opened._served.lend_served().frame(spark)
            plan = served_frame._jdf.queryExecution().executedPlan().toString()
            assert "Exchange hashpartitioning" not in plan, "one bucketed scan"
            assert sorted(rows, key=repr) == sorted(joined.to_pylist(), key=repr)


def follow(world: World, chance: random.Random, steps: int = 7) -> Served:
    """Take in changes, compacted and rebuilt in between."""
    kind = chance.choice(["offset", "order", "history"])
    options: dict[str, Any] = {"order_by": "n"} if kind == "order" else {}
    if kind == "history":
        options = {"history": "all", "valid_from": "since"}
    spec = unbounded_dataset(
        "table",
        input="lake.changes",
        key=["k", "no"],
        partition_by="k",
        partitions=2,
        compaction=DeltaCompaction(inside_commit=False),
        **options,
    )
    world.stream("changes", COLUMNS, ["k"], 2)
    served = Served(world, "table")
    newest: dict[Key, tuple[Any, int | None]] = {}
    number = 0
    for _step in range(steps):
        rows = []
        for _ in range(chance.randint(1, 6)):
            number += 1
            key = chance.choice(KEYS)
            order = chance.randint(1, 30)
            deleted = chance.random() < 0.25
            rows.append(
                {
                    "k": key[0],
                    "no": key[1],
                    "since": START + order * dt.timedelta(hours=1),
                    "n": order,
                    "v": number,
                    "__tombstone": deleted,
                }
            )
            rank = number if kind == "offset" else (order, number)
            if key not in newest or rank >= newest[key][0]:
                newest[key] = rank, None if deleted else number
        schema = COLUMNS.to_arrow().append(pa.field("__tombstone", pa.bool_()))
        table = pa.Table.from_pylist(rows, schema=schema)
        world.streams.append("changes", table, producer="test", sequence=world._next("changes"))
        world.advance(spec)
        served.note({key: value for key, (_, value) in newest.items() if value is not None})
        if chance.random() < 0.5:
            level = chance.choice(["minor", "major"])
            compact_dataset(world.lake, "table", spark=IN_PROCESS, by="test", level=level)
    return served


def deliver(world: World, chance: random.Random, steps: int = 6) -> Served:
    """Deliver versions; roll back, pin and revoke some."""
    world.stream("versions", COLUMNS, ["k"], 2)
    spec = bounded_dataset(
        "fleet",
        input="lake.versions",
        key=["k", "no"],
        partition_by="k",
        partitions=2,
        discard=DiscardPolicy(keep=None),
    )
    served = Served(world, "fleet")
    delivered: dict[str, dict[Key, int]] = {}
    for step in range(steps):
        name = f"v{step}"
        entries = {key: 10 * step + place for place, key in enumerate(chance.sample(KEYS, 4))}
        rows = [
            {"k": key[0], "no": key[1], "since": START, "n": 1, "v": value}
            for key, value in entries.items()
        ]
        table = pa.Table.from_pylist(rows, schema=COLUMNS.to_arrow())
        sequence = world._next("versions")
        world.streams.append(
            "versions", table, producer="test", sequence=sequence, end_of_dataset=name
        )
        world.advance(spec)
        delivered[name] = entries
        served.note(entries)
        with open_dataset(world.lake, "fleet") as opened:
            if step and chance.random() < 0.5:
                back = chance.choice([*delivered][:-1])
                opened.rollback(back, reason="test", by="test")
                served.note(delivered[back])
    return served


def world_in(folder: Path) -> World:
    return World(open_lake(folder / "lake"), IN_PROCESS)


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(3, 60)))
def test_records_get_what_a_table_served_at_their_time(tmp_path: Path, seed: int) -> None:
    check(follow(world_in(tmp_path), random.Random(seed)))


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(3, 30)))
def test_records_get_the_version_that_was_served_at_their_time(tmp_path: Path, seed: int) -> None:
    check(deliver(world_in(tmp_path), random.Random(seed)))


@pytest.mark.spark
def test_spark_finds_the_same(tmp_path: Path, spark: SparkSession) -> None:
    check(follow(world_in(tmp_path / "table"), random.Random(1)), spark)
    check(deliver(world_in(tmp_path / "fleet"), random.Random(2)), spark)


@pytest.mark.lengthy
def test_what_was_discarded_is_null_or_an_error(tmp_path: Path) -> None:
    world = world_in(tmp_path)
    served = deliver(world, random.Random(4))
    expire_versions(world.lake, "fleet", DiscardPolicy(keep=2, grace=dt.timedelta(0)), by="test")
    records = served.records()
    versions = {one.id for one in StoredVersions(world.lake, "fleet").versions()}
    with open_dataset(world.lake, "fleet") as opened:
        joined = opened.point_in_time(records, **OPTIONS).to_pylist()
        answers = {row["seen"]["at"] for row in joined if row["v"] is not None}
        known = [time for time in served.times if time in answers]
        assert 0 < len(known) < len(served.times)
        assert known == served.times[-len(known) :], "the newest, without a gap"
        for row in joined:
            at = row["seen"]["at"]
            if at is None or at < known[0]:
                assert row["v"] is None
            else:
                assert row["v"] == served.at((row["who"]["name"], row["part"]), at)
        assert versions
        with pytest.raises(DatasetError, match="before the history of its key"):
            opened.point_in_time(records, **OPTIONS, before_history="error")


@pytest.mark.lengthy
def test_upkeep_and_new_columns_do_not_change_what_was_served(tmp_path: Path) -> None:
    world = world_in(tmp_path)
    world.stream("changes", COLUMNS, ["k"], 2)
    declared: dict[str, Any] = {"input": "lake.changes", "key": ["k", "no"], "partition_by": "k"}
    spec = unbounded_dataset(
        "table", partitions=2, compaction=DeltaCompaction(deltas=2), **declared
    )
    served = Served(world, "table")
    now: dict[Key, int] = {}

    def take_in(number: int, columns: Schema) -> None:
        key = KEYS[number % 4]
        values = (*key, START, 1, number, "new")
        row = dict(zip(columns.names, values, strict=False))
        table = pa.Table.from_pylist([row], schema=columns.to_arrow())
        world.streams.append("changes", table, producer="test", sequence=world._next("changes"))
        now[key] = number
        world.advance(spec)
        served.note(now)

    for number in range(6):
        take_in(number, COLUMNS)
    actions = {commit.action for commit in StoredVersions(world.lake, "table").history(None)}
    assert "compact" in actions
    rebuild_dataset(
        spec, lake=world.lake, systems=world.systems, spark=IN_PROCESS, by="test", reason="test"
    )
    served.note(now)
    wider = Schema((*COLUMNS.fields, Field("extra", "string")))
    world.streams.create("changes", schema=wider, key=["k"], partitions=2)
    take_in(6, wider)
    check(served)
    with open_dataset(world.lake, "table") as opened:
        options = {**OPTIONS, "select": ["v", "extra"]}
        joined = opened.point_in_time(served.records(), **options).to_pylist()
        assert {row["extra"] for row in joined if row["v"] == 6} == {"new"}
        assert {row["extra"] for row in joined if row["v"] != 6} == {None}
    erase_keys(world.lake, "table", [KEYS[1]], reason="test", by="test")
    with open_dataset(world.lake, "table") as opened:
        joined = opened.point_in_time(served.records(), **OPTIONS).to_pylist()
    erased = [row["v"] for row in joined if (row["who"]["name"], row["part"]) == KEYS[1]]
    assert set(erased) == {None}


def test_a_chosen_version_does_not_say_what_was_served_at_other_times(tmp_path: Path) -> None:
    world = world_in(tmp_path)
    served = deliver(world, random.Random(4), steps=1)
    with open_dataset(world.lake, "fleet", version="v0") as opened:
        with pytest.raises(ConfigurationError) as caught:
            opened.point_in_time(served.records(), **OPTIONS)
        assert caught.value.argument == "versions"


def test_what_was_served_has_no_intervals(tmp_path: Path) -> None:
    world = world_in(tmp_path)
    served = deliver(world, random.Random(4), steps=1)
    with open_dataset(world.lake, "fleet") as opened:
        with pytest.raises(ConfigurationError) as caught:
            opened.point_in_time(served.records(), **{**OPTIONS, "select": ["interval_id"]})
        assert caught.value.argument == "select"
