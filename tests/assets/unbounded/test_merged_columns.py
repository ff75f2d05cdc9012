"""Changes that leave out columns and come in any order, against a sorted list."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.declaration.change_formats import OperationColumn
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.declaration.policies import DeadLetters, DiscardPolicy
from dagster_adjunct.assets.declaration.snapshots import ParquetSnapshot
from dagster_adjunct.assets.exchange.handover import duckdb_view, polars_frame, pyarrow_dataset
from dagster_adjunct.assets.exchange.iceberg import IcebergTable, publish_to_iceberg
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.verification import verify_version
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.retention.erasure import erase_keys
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.rewind import rewind_dataset
from dagster_adjunct.assets.unbounded.transient_table import TransientTable
from dagster_adjunct.assets.versions.manifest import UnboundedManifest
from dagster_adjunct.assets.versions.version import datetime_from_micros
from dagster_adjunct.orchestration.maintenance.repartition import repartition_dataset
from dagster_adjunct.resources.bucketing.hashing import bucket_of_key
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    CommitStateUnknownError,
    DatasetError,
    KeyOrderError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.startpoint import StartpointSpecific
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.resources.times import to_microseconds
from tests.assets.conftest import World
from tests.assets.grown_streams import GrownWorld
from tests.assets.unbounded.tables import BY_HAND, faulty
from tests.faulty_store import Crash, Fault
from tests.rounds import rounds

NAME = "people"
COLUMNS = ("a", "b", "c")
STREAM = Schema.of(
    k="string", op="string", seq="bigint", since="timestamp", a="string", b="int", c="string",
    a_isMissing="boolean", b_isMissing="boolean", c_isMissing="boolean",
)  # fmt: skip
FORM = OperationColumn("op", missing="_isMissing")
LETTERS = DeadLetters("lake.dead")
OVER_TIME = {"history": "all", "valid_from": "since"}
Table = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Change:
    """A change with its position, the second since which it is valid, and what it names."""

    key: str
    seq: int
    second: int = 0
    op: str = "u"
    named: dict[str, Any] = field(default_factory=dict)


def at(second: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=second)


def declared(world: World, **more: Any) -> AdjunctDataset:
    if NAME not in world.streams.list_streams():
        world.stream(NAME, STREAM, ["k"], 2)
    spread = {} if "broadcast" in more else {"partitions": 2}
    options = {**spread, "compaction": BY_HAND, "changes": FORM, "order_by": "seq", **more}
    return unbounded_dataset(NAME, input=f"lake.{NAME}", key="k", **options)


def send(world: World, *changes: Change) -> None:
    schema = world.streams.info(NAME).schema
    assert schema is not None
    rows = []
    for one in changes:
        row = {"k": one.key, "op": one.op, "seq": one.seq, "since": at(one.second), **one.named}
        row |= {f"{name}_isMissing": name not in one.named for name in COLUMNS}
        rows.append(tuple(row.get(name) for name in schema.names))
    world.send(NAME, rows)


def applied(changes: Sequence[Change]) -> Table:
    """Return what the changes come to in their order; one of a row that is not there does
    nothing.
    """
    table: Table = {}
    for one in changes:
        if one.op == "d":
            table.pop(one.key, None)
        elif one.op == "i" or set(one.named) == set(COLUMNS):
            table[one.key] = dict.fromkeys(COLUMNS) | one.named
        elif one.key in table:
            table[one.key] = table[one.key] | one.named
    return table


def by_position(changes: Sequence[Change]) -> Table:
    return applied(sorted(changes, key=lambda one: one.seq))


def content(world: World, spec: AdjunctDataset) -> Table:
    view = StoredVersions(world.lake, spec).current()
    if view is None:
        return {}
    found = {}
    for key, entry in view.items():
        found[key] = {name: entry[name] for name in COLUMNS}
    return found


def drawn(draw: random.Random, count: int, *, seconds: int = 1) -> list[Change]:
    """Return changes of a few keys, in the order of their positions."""
    changes = []
    for seq in range(count):
        op = draw.choice("iiuuuuuuud")
        names = [] if op == "d" else draw.sample(COLUMNS, draw.randint(1, 3))
        values = {"a": f"t{seq}", "b": seq, "c": f"u{seq}"}
        named = {name: None if draw.random() < 0.2 else values[name] for name in names}
        changes.append(Change(draw.choice("abcde"), seq, draw.randrange(seconds), op, named))
    return changes


def compact(world: World, draw: random.Random) -> None:
    level = draw.choice(["minor", "major"])
    compact_dataset(world.lake, NAME, spark=world.spark, by="test", level=level)


WHOLE = {"a": "x", "b": 1, "c": "y"}


def test_what_comes_late_sets_only_what_was_not_set_since(either: World) -> None:
    spec = declared(either)
    changes = [
        Change("k", 1, 0, "i", WHOLE),
        Change("k", 9, 0, "u", {"b": 9}),
        Change("k", 5, 0, "u", {"a": "five", "b": 5}),
        Change("k", 7, 0, "d"),
        Change("k", 6, 0, "u", {"c": "six"}),
        Change("k", 8, 0, "i", {"a": "eight", "b": 8, "c": "eight"}),
    ]
    wanted = [
        WHOLE,
        WHOLE | {"b": 9},
        {"a": "five", "b": 9, "c": "y"},
        None,
        None,
        {"a": "eight", "b": 9, "c": "eight"},
    ]
    for one, row in zip(changes, wanted, strict=True):
        send(either, one)
        report = either.advance(spec)
        assert content(either, spec) == ({} if row is None else {"k": row})
        assert report.counters.get("held", 0) == (one.seq == 7)
        assert report.counters["superseded"] == (one.seq == 6)


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))]
)
def test_every_order_and_cut_gives_what_the_sorted_changes_come_to(
    either: World, seed: int
) -> None:
    draw = random.Random(seed)
    changes = drawn(draw, 120 if either.spark is IN_PROCESS else 40)
    draw.shuffle(changes)
    changes += draw.sample(changes, 10)  # delivered again
    copied = Projection("k STRING, c STRING, b INT, a STRING")
    spec = declared(either, extractor=copied if seed % 2 else None)
    at = 0
    while at < len(changes):
        cut = changes[at : (at := at + draw.choice([1, 3, 10, 30]))]
        send(either, *cut)
        either.advance(spec)
        assert content(either, spec) == by_position(changes[:at])
        if draw.random() < 0.3:
            compact(either, draw)
            assert content(either, spec) == by_position(changes[:at])


def test_a_table_of_one_run_merges_columns_too(sparkling: World) -> None:
    draw = random.Random(4)
    changes = drawn(draw, 40)
    draw.shuffle(changes)
    table = TransientTable(sparkling.systems, declared(sparkling, persistent=False))
    for cut in (changes[:5], changes[5:15], [], changes[15:]):
        send(sparkling, *cut)
        table.advance(sparkling.spark)
    assert table.view is not None
    rows = table.view.frame(sparkling.spark()).collect()
    table.release()
    found = {row.k: {name: row[name] for name in COLUMNS} for row in rows}
    assert found == by_position(changes)


@pytest.mark.parametrize("column", ["seq", "since"])
def test_what_places_a_change_can_not_be_left_out(either: World, column: str) -> None:
    mark = Schema.of({f"{column}_isMissing": "boolean"})
    either.stream(NAME, Schema((*STREAM.fields, *mark.fields)), ["k"], 1)
    spec = declared(either, on_bad_change=LETTERS, **OVER_TIME)
    row = ("k", "u", 1, at(1), "x", 1, "y", False, False, False)
    either.send(NAME, [(*row, True), (*row, False)])
    assert either.advance(spec).counters["quarantined"] == 1
    letters = either.streams.read_arrow(either.streams.all_ranges("dead")).to_pylist()
    assert repr(column) in letters[0]["reason"]
    assert content(either, spec) == {"k": WHOLE}


@pytest.mark.parametrize("order", [pytest.param(None, marks=pytest.mark.long), "seq"])
def test_a_projection_of_single_columns_keeps_what_changes_leave_out(
    sparkling: World, order: str | None
) -> None:
    select = {"b": "cast(upper(A) as int)", "a": "concat(c, '!')"}
    spec = declared(
        sparkling, order_by=order, extractor=Projection("k STRING, b INT, a STRING", select)
    )
    changes = [Change("k", 1, 0, "i", {"a": "1", "b": 1, "c": "one"})]
    changes += [Change("k", 2, 0, "u", {"a": "2"}), Change("k", 3, 0, "u", {"c": "three"})]
    for one in changes:
        send(sparkling, one)
        sparkling.advance(spec)
    assert sparkling.view(spec).get("k") == {"k": "k", "b": 2, "a": "three!"}


@pytest.mark.parametrize(
    "over_time", [pytest.param({}, marks=pytest.mark.long), OVER_TIME], ids=["ordered", "over time"]
)
def test_a_projection_with_a_condition_on_the_key_merges_in_any_order(
    sparkling: World, over_time: dict[str, str]
) -> None:
    draw = random.Random(7)
    select = {"a": "concat(k, a)", "c": "concat(c, cast(b as string))"}
    extractor = Projection(
        "k STRING, a STRING, c STRING, seq BIGINT, since TIMESTAMP", select, "K <> 'b'"
    )
    spec = declared(sparkling, extractor=extractor, on_bad_change=LETTERS, **over_time)
    changes = []
    for one in drawn(draw, 60):
        if one.op == "i" or ("b" in one.named) == ("c" in one.named):
            changes.append(replace(one, second=one.seq))
    expected = {}
    for key, row in by_position(changes).items():
        joined = None if None in (row["b"], row["c"]) else f"{row['c']}{row['b']}"
        if key != "b":
            expected[key] = (None if row["a"] is None else key + row["a"], joined)
    draw.shuffle(changes)
    for cut in (changes[:9], changes[9:20], changes[20:]):
        send(sparkling, *cut)
        sparkling.advance(spec)
    entries = dict(sparkling.view(spec).items())
    assert {key: (entry["a"], entry["c"]) for key, entry in entries.items()} == expected
    assert "b" in by_position(changes)


# -- several partitions


def scattered(world: World, **more: Any) -> tuple[AdjunctDataset, str, str]:
    """Return a table whose changes are in partitions by their operation, and two words for an
    update that are in different ones.
    """
    world.stream(NAME, STREAM, ["op"], 2)
    words = {bucket_of_key([word], ["string"], 2): word for word in ("u", "U", "update", "Update")}
    return declared(world, **more), words[0], words[1]


@pytest.mark.parametrize("over_time", [False, True], ids=["ordered", "over time"])
@pytest.mark.parametrize(
    ("stored", "late", "is_tied"),
    [
        ({"a": "x"}, {"a": "x"}, False),
        ({"a": "x"}, {"a": "z"}, True),
        ({"a": "x"}, {"b": 2}, True),
        ({"a": "x"}, {"a": "x", "b": 2}, True),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_offsets_of_two_partitions_do_not_decide_which_change_set_a_column(
    world: World, over_time: bool, stored: Any, late: Any, is_tied: bool, at_once: bool
) -> None:
    more = {"order_by": None, **OVER_TIME} if over_time else {}
    world = GrownWorld(world.lake, IN_PROCESS)
    spec, first, second = scattered(world, **more)
    send(world, Change("k", 1, 1, "i", WHOLE), Change("l", 1, 1, "i", WHOLE))
    send(world, Change("k", 5, 5, first, stored))
    if not at_once:
        world.advance(spec)
    send(world, Change("k", 5, 5, second, late), Change("l", 6, 6, first, {"b": 7}))
    if is_tied:
        with pytest.raises(KeyOrderError):
            world.advance(spec)
        spec = replace(spec, following=replace(spec.following, on_bad_change=LETTERS))
    assert world.advance(spec).counters.get("quarantined", 0) == is_tied
    kept = [stored, late] if at_once and first != min(first, second) else [stored]
    assert content(world, spec)["k"] in [WHOLE | one for one in kept]
    assert content(world, spec)["l"] == WHOLE | {"b": 7}


def test_a_column_that_an_earlier_change_set_is_compared_too(world: World) -> None:
    world.spark = IN_PROCESS
    spec, first, second = scattered(world)
    send(world, Change("k", 1, 1, "i", WHOLE), Change("k", 5, 5, first, {"a": "five"}))
    send(world, Change("k", 9, 9, first, {"b": 9}))
    world.advance(spec)
    send(world, Change("k", 5, 5, second, {"a": "five"}), Change("k", 4, 4, second, {"a": "4"}))
    world.advance(spec)
    send(world, Change("k", 5, 5, second, {"a": "other"}))
    with pytest.raises(KeyOrderError):
        world.advance(spec)
    assert content(world, spec) == {"k": {"a": "five", "b": 9, "c": "y"}}


# -- over time

LAST = 12


def over_time(changes: Sequence[Change]) -> dict[int, Table]:
    """Return what was valid at each second."""
    ordered = sorted(changes, key=lambda one: (one.second, one.seq))
    return {
        second: applied([one for one in ordered if one.second <= second])
        for second in range(LAST + 1)
    }


def read_over_time(world: World, spec: AdjunctDataset) -> dict[int, Table]:
    """Return what a table says was valid at each second; by Spark, too, where the world has it."""
    view = world.view(spec)
    found: dict[int, Table] = {second: {} for second in range(LAST + 1)}
    for key in "abcdekx":
        for part in view.history_of(key):
            for second in range(LAST + 1):
                if part.entry is not None and part.holds(at(second)):
                    found[second][key] = {name: part.entry[name] for name in COLUMNS}
    if world.spark is not IN_PROCESS:
        rows = view.history_frame(world.spark()).collect()
        for second in range(LAST + 1):
            moment = at(second).timestamp()
            valid = {}
            for row in rows:
                begins = row["__valid_from"].timestamp() <= moment
                ends = row["__valid_to"] is not None and row["__valid_to"].timestamp() <= moment
                if begins and not ends and not row["__tombstone"]:
                    assert row.k not in valid
                    valid[row.k] = {name: row[name] for name in COLUMNS}
            assert valid == found[second], second
    assert content(world, spec) == found[LAST]
    return found


@pytest.mark.lengthy
def test_what_a_late_change_sets_is_carried_into_rows_that_inherited_it(either: World) -> None:
    spec = declared(either, order_by=None, **OVER_TIME)
    sent: list[Change] = []
    for one in [
        Change("k", 0, 1, "i", WHOLE),
        Change("k", 1, 9, "u", {"b": 9}),
        Change("k", 2, 5, "u", {"a": "five", "b": 5}),
        Change("k", 3, 7, "d"),
        Change("k", 4, 8, "u", {"c": "eight"}),
        Change("k", 5, 7, "i", {"a": "seven"}),
        Change("k", 6, 0, "u", {"c": "lost"}),
    ]:
        sent.append(one)
        send(either, one)
        report = either.advance(spec)
        assert report.counters.get("carried", 0) == {2: 1, 3: 1, 4: 1, 5: 2}.get(one.seq, 0)
        assert read_over_time(either, spec) == over_time(sent)


@pytest.mark.lengthy
@pytest.mark.parametrize("ordered", [False, True], ids=["by offset", "ordered"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 12))]
)
def test_every_order_and_cut_gives_the_history_of_the_sorted_changes(
    either: World, seed: int, ordered: bool
) -> None:
    draw = random.Random(seed)
    changes = drawn(draw, 100 if either.spark is IN_PROCESS else 40, seconds=LAST)
    draw.shuffle(changes)
    if ordered:
        changes += draw.sample(changes, 10)  # delivered again
    else:
        changes = [replace(one, seq=place) for place, one in enumerate(changes)]
    spec = declared(either, order_by="seq" if ordered else None, **OVER_TIME)
    begin = 0
    while begin < len(changes):
        cut = changes[begin : (begin := begin + draw.choice([1, 3, 10, 30]))]
        send(either, *cut)
        either.advance(spec)
        assert read_over_time(either, spec) == over_time(changes[:begin])
        if draw.random() < 0.3:
            compact(either, draw)
            assert read_over_time(either, spec) == over_time(changes[:begin])


# -- whatever happens on the way


@dataclass
class Driven:
    """A table that is driven at random, and killed on the way."""

    world: World
    draw: random.Random
    spec: AdjunctDataset
    sent: list[Change] = field(default_factory=list)

    def act_until_done(self, act: Callable[[Lake], object]) -> None:
        done = False
        while not done:
            kind = self.draw.choice(["crash-before", "crash-after", "lost-after"])
            fault = Fault("*", self.draw.randint(1, 40), kind)
            lake = self.world.lake
            if self.draw.random() < 0.5:
                lake = faulty(self.world, fault)
            with suppress(
                Crash, StoreUnavailableError, CommitStateUnknownError, CommitConflictError
            ):
                act(lake)
                done = True

    def advance(self) -> None:
        changes = drawn(self.draw, self.draw.choice([1, 4, 15]), seconds=LAST)
        shuffled = self.draw.sample(range(1000), len(changes))
        taken = {one.seq for one in self.sent}
        for one, seq in zip(changes, shuffled, strict=True):
            if seq not in taken:
                self.sent.append(replace(one, seq=seq))
                send(self.world, self.sent[-1])
        self.act_until_done(lambda lake: self.world.advance(self.spec, lake=lake))

    def upkeep(self) -> None:
        level = self.draw.choice(["minor", "major"])
        policy = DiscardPolicy(keep=1, grace=timedelta(0))
        self.act_until_done(
            lambda lake: compact_dataset(lake, NAME, spark=IN_PROCESS, by="test", level=level)
        )
        self.act_until_done(lambda lake: discard(lake, NAME, policy, by="test"))

    def rewind(self) -> None:
        manifest = StoredVersions(self.world.lake, NAME).require_manifest()
        assert isinstance(manifest, UnboundedManifest)
        positions = {}
        for ssp, end in manifest.offsets.items():
            offset = str(self.draw.randint(0, int(end)))
            positions[SystemStreamPartition.parse(ssp)] = StartpointSpecific(offset=offset)
        self.act_until_done(
            lambda lake: rewind_dataset(
                self.spec, positions=positions, reason="again", **self._where(lake)
            )
        )

    def rebuild(self) -> None:
        self.act_until_done(
            lambda lake: rebuild_dataset(self.spec, reason="anew", **self._where(lake))
        )
        self.act_until_done(lambda lake: self.world.advance(self.spec, lake=lake))

    def _where(self, lake: Lake) -> dict[str, Any]:
        systems = self.world.systems
        return {"lake": lake, "systems": systems, "spark": IN_PROCESS, "by": "test"}

    def check(self) -> None:
        if not self.spec.over_time:
            assert content(self.world, self.spec) == by_position(self.sent)
        else:
            assert read_over_time(self.world, self.spec) == over_time(self.sent)


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("kept", [{}, OVER_TIME], ids=["newest", "over time"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 10))]
)
def test_whatever_happens_on_the_way_the_table_is_what_the_sorted_changes_come_to(
    seed: int, kept: dict[str, Any]
) -> None:
    draw = random.Random(seed)
    world = World(lake_in(InMemoryStore()), IN_PROCESS)
    driven = Driven(world, draw, declared(world, chunk=draw.choice([3, 1000]), **kept))
    driven.advance()
    for _ in range(rounds(10, 40)):
        act = draw.choice([driven.advance, driven.advance, driven.upkeep, driven.rewind])
        act()
        driven.check()
        if draw.random() < 0.1:
            driven.rebuild()
            driven.check()


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "more",
    [
        {"keep_tombstones": 15},
        {"history": timedelta(seconds=4), "valid_from": "since"},
        {"history": timedelta(seconds=4), "valid_from": "since", "order_by": None},
    ],
    ids=["ordered", "over time", "over time by offset"],
)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 10))]
)
def test_what_comes_too_late_changes_nothing_and_the_rest_is_exact(
    seed: int, more: dict[str, Any]
) -> None:
    draw = random.Random(seed)
    world = World(lake_in(InMemoryStore()), IN_PROCESS)
    spec = declared(world, **more)
    changes = drawn(draw, 150, seconds=LAST)
    if spec.over_time:
        changes.sort(key=lambda one: one.second + draw.uniform(0, 8))
    else:
        changes.sort(key=lambda one: one.seq + draw.uniform(0, 40))
    if spec.following.order_by is None:
        changes = [replace(one, seq=place) for place, one in enumerate(changes)]
    accepted: list[Change] = []
    late = 0
    for start in range(0, len(changes), 10):
        cut = changes[start : start + 10]
        in_time = [one for one in cut if not _is_late(world, spec, one)]
        accepted += in_time
        send(world, *cut)
        counters = world.advance(spec).counters
        assert counters.get("late", 0) == len(cut) - len(in_time)
        late += len(cut) - len(in_time)
        if draw.random() < 0.5:
            compact(world, draw)
        if not spec.over_time:
            assert content(world, spec) == by_position(accepted)
            continue
        edge = world.view(spec).sealed.edge
        wanted = over_time(accepted)
        for second, table in read_over_time(world, spec).items():
            if edge is None or at(second) >= datetime_from_micros(edge):
                assert table == wanted[second], second
    assert late or seed


def _is_late(world: World, spec: AdjunctDataset, one: Change) -> bool:
    view = StoredVersions(world.lake, spec).current()
    if view is None:
        return False
    manifest = StoredVersions(world.lake, NAME).require_manifest()
    assert isinstance(manifest, UnboundedManifest)
    horizon = manifest.horizon
    if view.sealed.history is None:
        return horizon is not None and one.seq <= horizon
    pruned = view.sealed.history.pruned
    micros = to_microseconds(at(one.second))
    return (horizon is not None and micros <= horizon) or (pruned is not None and micros < pruned)


# -- what else is done to a table


@pytest.mark.lengthy
@pytest.mark.parametrize("kept", [{}, OVER_TIME], ids=["newest", "over time"])
def test_columns_stay_in_order_when_the_table_is_rewritten(
    world: World, kept: dict[str, Any]
) -> None:
    world.spark = IN_PROCESS
    spec = declared(world, **kept)
    first = [Change(key, 1, 1, "i", WHOLE) for key in "abcde"]
    first += [Change(key, 9, 9, "u", {"b": 9}) for key in "abcd"]
    first += [Change("x", 5, 5, "u", {"a": "held"})]
    send(world, *first)
    assert world.advance(spec).counters["held"] == 1
    erase_keys(world.lake, NAME, ["c"], reason="asked for", by="test")
    compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
    repartition_dataset(world.lake, NAME, 3, reason="more machines", by="test")
    spec = declared(world, partitions=3, **kept)
    late = [Change(key, 5, 5, "u", {"a": "five", "b": 5}) for key in "ab"]
    late += [Change("x", 4, 4, "i", WHOLE), Change("d", 7, 7, "d")]
    send(world, *late)
    before = open_dataset(world.lake, NAME)
    world.advance(spec)
    wanted = [one for one in [*first, *late] if one.key != "c"]
    table = by_position(wanted)
    assert content(world, spec) == table
    assert table["a"] == {"a": "five", "b": 9, "c": "y"}
    assert verify_version(world.view(spec), deep=True).ok
    with before, open_dataset(world.lake, NAME) as after:
        kinds = {one.key["k"]: one.kind for one in after.changes(before.version)}
    assert kinds == {"a": "update", "b": "update", "x": "insert", "d": "delete"}
    if kept:
        assert read_over_time(world, spec) == over_time(wanted)
        compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
        with open_dataset(world.lake, NAME) as served:
            rows = pyarrow_dataset(served.over_time()).to_table().to_pylist()
        assert "__set_at" not in rows[0]
        current = [row["k"] for row in rows if not (row["__valid_to"] or row["__tombstone"])]
        assert sorted(current) == sorted(table)


@pytest.mark.parametrize("kept", [{}, OVER_TIME], ids=["newest", "over time"])
def test_renamed_and_dropped_columns_keep_their_order(world: World, kept: dict[str, Any]) -> None:
    world.spark = IN_PROCESS
    spec = declared(world, **kept)
    send(world, Change("k", 1, 1, "i", WHOLE), Change("k", 9, 9, "u", {"a": "nine", "c": "nine"}))
    world.advance(spec)
    renamed = {"a": "x", "a_isMissing": "x_isMissing"}
    dropped = ("c", "c_isMissing")
    world.streams.change_columns(NAME, renamed=renamed, drop=dropped)
    spec = declared(world, renamed={"a": "x"}, drop="c", **kept)
    for seq, wanted in [(5, ("nine", 5)), (11, ("x11", 5))]:
        row = ("k", "u", seq, at(seq), f"x{seq}", seq, False, seq == 11)
        world.send(NAME, [row])
        world.advance(spec)
        entry = world.view(spec).get("k")
        assert (entry["x"], entry["b"]) == wanted
    mended = {"x": "a", "x_isMissing": "a_isMissing"}
    world.streams.change_columns(NAME, renamed=mended)
    world.streams.create(NAME, schema=STREAM, key=["k"], partitions=2)
    spec = declared(world, renamed={"x": "a"}, **kept)
    send(world, Change("k", 10, 10, "u", {"a": "ten", "b": 10, "c": "ten"}))
    world.advance(spec)
    entry = world.view(spec).get("k")
    assert [entry[name] for name in COLUMNS] == ["x11", 10, "ten"]


def test_changes_are_merged_upon_a_bulk_snapshot(sparkling: World, tmp_path: Path) -> None:
    sparkling.stream(NAME, STREAM, ["k"], 2)
    rows = {"k": ["k", "l"], "seq": [3, 3], "since": [at(3)] * 2, "a": ["x"] * 2, "c": ["y"] * 2}
    snapshot = pa.table({**rows, "b": pa.array([1, 1], pa.int32())})
    pq.write_table(snapshot, tmp_path / "rows.parquet")
    position = {f"lake.{NAME}.{number}": "0" for number in (0, 1)}
    initial = ParquetSnapshot(str(tmp_path / "rows.parquet"), position=position)
    spec = declared(sparkling, initial=initial)
    changes = [Change("k", 2, 0, "u", {"a": "two"}), Change("k", 9, 0, "u", {"b": 9})]
    changes += [Change("k", 5, 0, "u", {"b": 5, "c": "five"}), Change("l", 4, 0, "d")]
    for one in changes:
        send(sparkling, one)
        sparkling.advance(spec)
    assert content(sparkling, spec) == {"k": {"a": "x", "b": 9, "c": "five"}}


def test_an_order_of_texts_merges_columns(either: World) -> None:
    schema = Schema.of({field.name: field.type for field in STREAM.fields}, lsn="string")
    either.stream(NAME, schema, ["k"], 2)
    spec = declared(either, order_by=["lsn", "seq"])
    marks = (True, False, True)
    for lsn, seq, row in [
        ("0000002c:00000c68:0003", 1, ("i", "x", 1, "y", False, False, False)),
        ("0000003c:00000c68:0003", 1, ("u", None, 9, None, *marks)),
        ("0000003c:00000c68:0003", 0, ("u", None, 5, None, *marks)),
        ("0000002d:00000c68:0003", 7, ("u", "late", 2, None, False, False, True)),
    ]:
        op, *rest = row
        either.send(NAME, [("k", op, seq, at(0), *rest, lsn)])
        either.advance(spec)
    assert content(either, spec) == {"k": {"a": "late", "b": 9, "c": "y"}}


def test_a_table_of_whole_rows_may_become_one_of_merged_columns_and_not_back(either: World) -> None:
    stored = ["k", "seq", *COLUMNS]
    whole = declared(either, changes=OperationColumn("op"), columns=stored)
    send(either, Change("k", 5, 0, "i", WHOLE))
    either.advance(whole)
    spec = declared(either, columns=stored)
    send(either, Change("k", 9, 0, "u", {"b": 9}), Change("k", 4, 0, "u", {"a": "late"}))
    either.advance(spec)
    assert content(either, spec) == {"k": WHOLE | {"b": 9}}
    send(either, Change("k", 7, 0, "i", WHOLE | {"a": "seven"}))
    with pytest.raises(DatasetError) as refused:
        either.advance(whole)
    assert "rebuild" in refused.value.next_step
    compact_dataset(either.lake, NAME, spark=either.spark, by="test", level="major")
    either.advance(spec)
    assert content(either, spec) == {"k": {"a": "seven", "b": 9, "c": "y"}}


@pytest.mark.lengthy
def test_other_engines_see_neither_how_columns_were_merged_nor_what_is_held(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyiceberg.catalog.sql")
    import pyiceberg.catalog
    from pyiceberg.utils.config import Config

    world.spark = IN_PROCESS
    spec = declared(world, columns=["k", *COLUMNS])
    send(world, Change("k", 1, 0, "i", WHOLE), Change("l", 1, 0, "i", WHOLE))
    world.advance(spec)
    send(world, Change("k", 9, 0, "u", {"b": 9}), Change("x", 5, 0, "u", {"a": "held"}))
    world.advance(spec)
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKEHOUSE__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKEHOUSE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKEHOUSE__WAREHOUSE", str(tmp_path / "warehouse"))
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    table = IcebergTable("reference.people", catalog="lakehouse")
    catalog = table.open()
    catalog.create_namespace("reference")
    publish_to_iceberg(world.lake, NAME, table)
    read = catalog.load_table(table.identifier).scan().to_arrow()
    assert read.column_names == ["k", *COLUMNS]
    rows = {row.pop("k"): row for row in read.to_pylist()}
    assert rows == content(world, spec) == {"k": WHOLE | {"b": 9}, "l": WHOLE}
    send(world, Change("x", 1, 0, "i", WHOLE))
    world.advance(spec)
    compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
    view = world.view(spec)
    assert pyarrow_dataset(view).to_table().column_names == ["k", *COLUMNS]
    assert polars_frame(view).collect().columns == ["k", *COLUMNS]
    duckdb_view(connection := duckdb.connect(), view, "v")
    assert [column[0] for column in connection.execute("FROM v").description] == ["k", *COLUMNS]


def test_a_rewind_brings_nothing_back_that_a_forgotten_deletion_had_deleted(world: World) -> None:
    world.spark = IN_PROCESS
    spec = declared(world, keep_tombstones=10, broadcast=True)
    send(world, Change("k", 1, 0, "i", WHOLE), Change("k", 5, 0, "d"))
    world.advance(spec)
    send(world, Change("l", 30, 0, "i", WHOLE))
    world.advance(spec)
    compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
    send(world, Change("k", 25, 0, "u", {"b": 25}))
    send(world, Change("k", 2, 0, "i", WHOLE), Change("l", 31, 0, "u", {"b": 31}))
    report = world.advance(spec)
    assert (report.counters["held"], report.counters["late"]) == (1, 1)
    wanted = {"l": WHOLE | {"b": 31}}
    assert content(world, spec) == wanted
    number = bucket_of_key(["k"], ["string"], 2)
    ssp = SystemStreamPartition("lake", NAME, number)
    again: dict[str, Any] = {"lake": world.lake, "systems": world.systems, "spark": IN_PROCESS}
    again |= {"positions": {ssp: StartpointSpecific(offset="3")}, "reason": "again", "by": "test"}
    with pytest.raises(DatasetError):
        rewind_dataset(spec, **again)
    assert content(world, spec) == wanted
    rewind_dataset(spec, force=True, **again)
    assert content(world, spec) == wanted


def test_a_rewind_is_refused_only_for_changes_that_no_deletion_supersedes(world: World) -> None:
    world.spark = IN_PROCESS
    spec = declared(world, keep_tombstones=10, broadcast=True)
    deleted = [
        Change("k", 1, 0, "i", WHOLE),
        Change("k", 3, 0, "u", {"b": 3}),
        Change("k", 5, 0, "d"),
    ]
    for sent in (deleted, [Change("l", 30, 0, "i", WHOLE)]):
        send(world, *sent)
        world.advance(spec)
    compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
    manifest = StoredVersions(world.lake, NAME).require_manifest()
    assert isinstance(manifest, UnboundedManifest)
    assert manifest.horizon == 20
    assert [*content(world, spec)] == ["l"]
    again: dict[str, Any] = {"lake": world.lake, "systems": world.systems, "spark": IN_PROCESS}
    again |= {"reason": "again", "by": "test"}
    ssp = SystemStreamPartition("lake", NAME, bucket_of_key(["k"], ["string"], 2))
    report = rewind_dataset(spec, positions={ssp: StartpointSpecific(offset="0")}, **again)
    assert report.counters.get("late", 0) == 0
    assert content(world, spec) == {"l": WHOLE}
    send(world, Change("k", 7, 0, "i", WHOLE))
    assert world.advance(spec).counters["late"] == 1
    again["positions"] = {ssp: StartpointSpecific(offset="1")}
    with pytest.raises(DatasetError):
        rewind_dataset(spec, **again)
    assert rewind_dataset(spec, force=True, **again).counters["late"] == 1
    assert content(world, spec) == {"l": WHOLE}
