"""The change with the highest value of a column wins, in whatever order changes arrive."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DeadLetters, DeltaCompaction
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.errors import BadChangeError, SchemaMismatchError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.faulty_store import FaultyStore
from tests.rounds import rounds

SCHEMA = Schema.of(k="string", at="bigint", n="int")
KEYS = ["a", "b", "c", "d", "e"]
Fact = tuple[str, int, int | None]  # (key, position, value); None deletes


def ordered(**options: Any) -> AdjunctDataset:
    by_hand = DeltaCompaction(inside_commit=False)
    declared = {"order_by": "at", "partitions": 2, "compaction": by_hand, **options}
    return unbounded_dataset("facts", input="lake.facts", key="k", **declared)


def facts_in(world: World) -> World:
    world.stream("facts", SCHEMA, ["k"], 2)
    return world


def send(world: World, facts: Sequence[Fact], kind: Any = None, schema: Schema = SCHEMA) -> None:
    keys, at, values = zip(*facts, strict=True)
    columns = {
        "k": pa.array(keys, pa.string()),
        "at": pa.array(at, kind or pa.int64()),
        "n": pa.array(values, pa.int32()),
        "__tombstone": pa.array([value is None for value in values]),
    }
    world.streams.append("facts", pa.table(columns), producer="test", sequence=world._next("facts"))


class Oracle:
    """What a table holds after these changes: of each key the one with the highest position, the
    later of equals.
    """

    def __init__(self) -> None:
        self.newest: dict[str, tuple[int, int | None]] = {}

    def apply(self, facts: Sequence[Fact]) -> dict[str, int]:
        for key, at, value in facts:
            if key not in self.newest or at >= self.newest[key][0]:
                self.newest[key] = (at, value)
        return {key: value for key, (_, value) in self.newest.items() if value is not None}


def by_key(world: World) -> dict[str, int]:
    view = StoredVersions(world.lake, "facts").require_current()
    entries = {key: entry["n"] for key, entry in view.items()}
    assert {key: entry["n"] for key, entry in view.get_all(KEYS).items()} == entries
    return entries


def by_spark(world: World) -> dict[str, int]:
    view = StoredVersions(world.lake, "facts").require_current()
    rows = view.frame(world.spark()).collect()
    assert len({row.k for row in rows}) == len(rows), "a key stands twice in the frame"
    return {row.k: row.n for row in rows}


@pytest.fixture
def quick(world: World) -> World:
    world.spark = IN_PROCESS
    return world


@pytest.fixture
def plain_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], World]:
    return lambda: facts_in(World(open_lake(tmp_path_factory.mktemp("lake")), IN_PROCESS))


FACTS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(-3, 12), st.none() | st.integers(0, 99)),
    min_size=1,
    max_size=8,
)


@pytest.mark.lengthy
@pytest.mark.rounds
@settings(max_examples=rounds(10, 25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(FACTS, min_size=1, max_size=5), replays=st.sets(st.integers(0, 4)))
def test_the_highest_value_wins_whatever_arrives_when_and_however_often(
    plain_world: Callable[[], World], batches: list[list[Fact]], replays: set[int]
) -> None:
    world, oracle = plain_world(), Oracle()
    for number, facts in enumerate(batches):
        sent = [*facts, *batches[0]] if number in replays and number else facts
        # what was sent first comes again: it changes nothing that is newer
        if number in replays and number:
            sent = [
                fact
                for fact in sent
                if fact not in batches[0] or fact[1] < oracle.newest[fact[0]][0]
            ] or facts
        send(world, sent)
        wanted = oracle.apply(sent)
        world.advance(ordered())
        assert by_key(world) == wanted


@pytest.mark.spark
@pytest.mark.long  # test_engines.py compares both
def test_by_spark_too_with_deletions_replays_and_compactions(sparkling: World) -> None:
    """Of a broadcast copy; tables in partitions are held by the histories of test_engines and
    test_model.
    """
    world, oracle, chance = facts_in(sparkling), Oracle(), random.Random(2)
    spec = ordered(partitions=None, broadcast=True)
    sent: list[Fact] = []
    for number in range(6):
        facts: list[Fact] = [
            (
                chance.choice(KEYS),
                chance.randrange(1000),
                None if chance.random() < 0.3 else chance.randrange(100),
            )
            for _ in range(12)
        ]
        facts += chance.sample(sent, min(len(sent), 4))
        # one fact for each position of a key
        facts = list({(fact[0], fact[1]): fact for fact in facts}.values())
        facts = [fact for fact in facts if all(fact == old or fact[:2] != old[:2] for old in sent)]
        sent += facts
        send(world, facts)
        wanted = oracle.apply(facts)
        world.advance(spec)
        if number in (2, 4):
            compact_dataset(
                world.lake,
                "facts",
                spark=world.spark,
                by="test",
                level="minor" if number == 2 else "major",
            )
        assert by_key(world) == wanted
        assert by_spark(world) == wanted


def test_a_deletion_beats_what_arrives_after_it_and_is_older_also_from_the_base(
    quick: World,
) -> None:
    world = facts_in(quick)
    send(world, [("a", 10, 1), ("b", 10, 1), ("b", 20, None)])
    report = world.advance(ordered())
    assert report.rows is None, "the base holds a deletion, which is no entry"
    assert by_key(world) == {"a": 1}
    send(world, [("a", 9, 7), ("b", 19, 7), ("c", 5, 5)])
    world.advance(ordered())
    assert by_key(world) == {"a": 1, "c": 5}
    send(world, [("b", 21, 8), ("c", 5, 6)])
    world.advance(ordered())
    assert by_key(world) == {"a": 1, "b": 8, "c": 6}, "of equals the later one"


def test_dates_and_instants_order_as_days_and_microseconds(quick: World) -> None:
    for name, kind, values in (
        ("date", pa.date32(), [dt.date(2020, 1, 2), dt.date(1960, 1, 1), dt.date(2020, 1, 1)]),
        (
            "timestamp",
            pa.timestamp("us", tz="UTC"),
            [dt.datetime(2020, 1, 1, 0, 0, 0, at, dt.UTC) for at in (2, 0, 1)],
        ),
    ):
        world = World(quick.lake, quick.spark)
        world.stream(f"by_{name}", Schema.of(k="string", at=name, n="int"), ["k"], 1)
        spec = unbounded_dataset(
            f"by_{name}", input=f"lake.by_{name}", key="k", partitions=1, order_by="at"
        )
        for number, at in enumerate(values):
            table = pa.table(
                {"k": ["x"], "at": pa.array([at], kind), "n": pa.array([number], pa.int32())}
            )
            world.streams.append(f"by_{name}", table, producer="test", sequence=number)
            world.advance(spec)
        assert world.view(spec).get("x")["n"] == 0


def test_changes_at_or_below_the_horizon_come_too_late_and_are_counted(quick: World) -> None:
    world = facts_in(quick)
    spec = ordered(keep_tombstones=10)
    for facts in ([("a", 100, 1), ("b", 50, 1)], [("b", 60, None)]):
        send(world, facts)
        world.advance(spec)
    compact_dataset(world.lake, "facts", spark=world.spark, by="test", level="major")
    assert StoredVersions(world.lake, "facts").require_manifest().horizon == 90
    send(world, [("b", 55, 9), ("c", 90, 9), ("d", 91, 9)])
    report = world.advance(spec)
    assert report.counters["late"] == 2
    assert by_key(world) == {"a": 1, "d": 9}, "the deletion of b is forgotten, and not undone"
    assert StoredVersions(world.lake, "facts").require_manifest().counters["late"] == 2


def test_late_changes_go_to_the_dead_letters_where_there_are_some(quick: World) -> None:
    world = facts_in(quick)
    spec = ordered(keep_tombstones=0, on_bad_change=DeadLetters("lake.facts-dead"))
    for at in (1, 100):
        send(world, [("a", at, 1)])
        world.advance(spec)
    compact_dataset(world.lake, "facts", spark=world.spark, by="test", level="major")
    send(world, [("a", 99, 9), ("b", 100, 9), ("c", 101, 9)])
    report = world.advance(spec)
    assert report.counters["quarantined"] == 2
    assert by_key(world) == {"a": 1, "c": 9}
    dead = world.streams.read_arrow(world.streams.all_ranges("facts-dead")).to_pylist()
    assert {row["reason"] for row in dead} == {
        "it comes too late: deletions up to position 100 are no longer stored"
    }


def test_a_change_without_a_position_is_a_bad_change(quick: World) -> None:
    world = facts_in(quick)
    send(world, [("a", None, 1)])  # type: ignore[list-item]
    with pytest.raises(BadChangeError, match="at"):
        world.advance(ordered())


def test_a_column_that_has_no_order_is_refused(world: World) -> None:
    world.stream("facts", Schema.of(k="string", at="double", n="int"), ["k"], 2)
    with pytest.raises(SchemaMismatchError) as failure:
        world.advance(ordered())
    assert failure.value.column == "at"


@pytest.mark.lengthy
@pytest.mark.parametrize("compacted", [False, True])
def test_older_changes_are_counted_as_superseded_across_commits(
    quick: World, compacted: bool
) -> None:
    world, spec = facts_in(quick), ordered()
    send(world, [("a", 10, 1), ("b", 10, 2), ("c", 10, 3)])
    world.advance(spec)
    if compacted:
        compact_dataset(world.lake, "facts", spark=IN_PROCESS, by="test", level="major")
    send(
        world,
        [
            ("a", 5, 9),
            ("b", 20, 4),
            ("c", 9, None),
            ("d", 1, 5),
            ("a", 4, 8),
            ("e", 3, None),
            ("b", 20, 6),
        ],
    )
    counters = world.advance(spec).counters
    # Of a, 5 and 4 are older than 10; of b, the first 20 is; the deletion of c is older, that of e
    # is not.
    assert {name: counters[name] for name in ("read", "changes", "superseded", "deleted")} == {
        "read": 7, "changes": 3, "superseded": 4, "deleted": 1,
    }  # fmt: skip
    assert by_key(world) == {"a": 1, "b": 6, "c": 3, "d": 5}
    send(world, [("a", 10, 7)])
    assert world.advance(spec).counters["changes"] == 1, "the later of equals wins"


@pytest.mark.spark
def test_spark_counts_older_changes_too(sparkling: World) -> None:
    world, spec = facts_in(sparkling), ordered()
    send(world, [("a", 10, 1), ("b", 10, 2)])
    world.advance(spec)
    send(world, [("a", 5, 9), ("b", 20, 4), ("c", 1, 5)])
    counters = world.advance(spec).counters
    assert (counters["changes"], counters["superseded"]) == (2, 1)
    assert by_spark(world) == {"a": 1, "b": 4, "c": 5}


@pytest.mark.lengthy
@pytest.mark.parametrize("seed", range(6))
def test_counts_of_drawn_changes_are_what_a_dictionary_counts(quick: World, seed: int) -> None:
    chance = random.Random(seed)
    world, spec, newest = facts_in(quick), ordered(), dict[str, int]()
    send(world, [("z", 1000, 1)])
    world.advance(spec)
    for _ in range(5):
        batch = [
            (chance.choice(KEYS), chance.randrange(30), chance.choice([1, 2, None]))
            for _ in range(8)
        ]
        send(world, batch)
        counters = world.advance(spec).counters
        last = {key: (at, value) for key, at, value in sorted(batch, key=lambda fact: fact[1])}
        applied = {key: fact for key, fact in last.items() if fact[0] >= newest.get(key, fact[0])}
        newest |= {key: at for key, (at, _) in applied.items()}
        deleted = sum(value is None for _, value in applied.values())
        assert counters["read"] == 8
        assert (counters["changes"], counters["superseded"], counters["deleted"]) == (
            len(applied), 8 - len(applied), deleted,
        )  # fmt: skip


def test_a_commit_of_new_changes_reads_no_stored_position(quick: World) -> None:
    world, spec = facts_in(quick), ordered()
    send(world, [(key, 10, 1) for key in KEYS])
    world.advance(spec)
    store = FaultyStore(world.lake.store)
    watched = World(Lake(store, world.lake.id), IN_PROCESS, sequences=world.sequences)
    send(watched, [(key, 11, 2) for key in KEYS])
    assert watched.advance(spec).counters["superseded"] == 0
    read = [
        key
        for request, key in store.requests
        if request.startswith(("get", "download")) and "datasets/" in key
    ]
    assert not [key for key in read if key.endswith(".parquet")]
