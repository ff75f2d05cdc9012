"""Changes that leave out columns, which keep what the dataset has, against a dictionary."""

from __future__ import annotations

import datetime as dt
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.declaration.change_formats import DebeziumUnwrapped, OperationColumn
from dagster_adjunct.assets.declaration.change_values import PLACEHOLDER
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.declaration.extractors import Projection, PythonExtractor
from dagster_adjunct.assets.declaration.policies import DeadLetters, DiscardPolicy
from dagster_adjunct.assets.declaration.snapshots import ParquetSnapshot
from dagster_adjunct.assets.reading.stored_file import (
    StoredFile,
    list_stored_files,
    read_stored_file,
)
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.retention.erasure import erase_keys
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.rewind import rewind_dataset
from dagster_adjunct.assets.unbounded.transient_table import TransientTable
from dagster_adjunct.orchestration.maintenance.repartition import repartition_dataset
from dagster_adjunct.resources.bucketing.hashing import bucket_of_key
from dagster_adjunct.resources.bucketing.writer import ROWS_PER_GROUP
from dagster_adjunct.resources.errors import (
    BadChangeError,
    CommitConflictError,
    CommitStateUnknownError,
    ConfigurationError,
    StoreUnavailableError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.streams.startpoint import StartpointSpecific
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.assets.conftest import World
from tests.assets.unbounded.tables import BY_HAND, copy_of, faulty
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.rounds import rounds

NAME = "people"
COLUMNS = ("a", "b", "c")
STREAM = Schema.of(
    k="string", op="string", a="string", b="int", c="string",
    a_isMissing="boolean", b_isMissing="boolean", c_isMissing="boolean",
)  # fmt: skip
FORM = OperationColumn("op", missing="_isMissing")
Change = tuple[str, str, dict[str, Any]]  # key, operation, and the columns that it names
Table = dict[str, dict[str, Any]]


def declared(world: World, **more: Any) -> AdjunctDataset:
    if NAME not in world.streams.list_streams():
        world.stream(NAME, STREAM, ["k"], 2)
    spread = {} if "broadcast" in more else {"partitions": 2}
    options = {**spread, "compaction": BY_HAND, "changes": FORM, **more}
    return unbounded_dataset(NAME, input=f"lake.{NAME}", key="k", **options)


def send(world: World, *changes: Change) -> None:
    rows = [
        (key, op, *(named.get(name) for name in COLUMNS), *(name not in named for name in COLUMNS))
        for key, op, named in changes
    ]
    world.send(NAME, rows)


def applied(changes: Sequence[Change], table: Table | None = None) -> tuple[Table, list[Change]]:
    """Return what changes come to, one after the other, and those that nothing can be kept of.

    A snapshot's row ("r") counts until there is a streamed change of its key.
    """
    table, incomplete, streamed = dict(table or {}), [], set()
    for change in changes:
        key, op, named = change
        if op == "r":
            if key not in streamed:
                table[key] = named
            continue
        if op == "d":
            table.pop(key, None)
        elif op == "i" or set(named) == set(COLUMNS):
            table[key] = dict.fromkeys(COLUMNS) | named
        elif key in table:
            table[key] = table[key] | named
        else:
            incomplete.append(change)
            continue
        streamed.add(key)
    return table, incomplete


def content(world: World, spec: AdjunctDataset) -> Table:
    view = StoredVersions(world.lake, spec).current()
    return {} if view is None else {k: {n: entry[n] for n in COLUMNS} for k, entry in view.items()}


def stored_files(world: World, spec: AdjunctDataset) -> list[StoredFile]:
    return list_stored_files(world.lake.store, spec.name, world.view(spec).sealed)


def dead_letters(world: World) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = world.streams.read_arrow(
            world.streams.all_ranges("dead")
        ).to_pylist()
    except StreamNotFoundError:
        return []
    return rows


def letters(world: World) -> list[str]:
    return [row["reason"] for row in dead_letters(world)]


UNWRAPPED = Schema.of(k="string", a="string", b="int", c="string", deleted="boolean", op="string")


def send_unwrapped(world: World, *changes: Change) -> None:
    """Send the changes as Debezium has them unwrapped: what one does not name is the
    placeholder.
    """
    rows = [
        (
            key,
            *(named.get(name, PLACEHOLDER if name != "b" else 0) for name in COLUMNS),
            op == "d",
            OPS.get(op, op),
        )
        for key, op, named in changes
    ]
    world.send(NAME, rows)


OPS = {"i": "c"}


def drawn_unwrapped(draw: random.Random, count: int) -> list[Change]:
    """Return changes that leave out texts only, and some rows of snapshots."""
    changes: list[Change] = []
    for key, drawn_op, drawn_names in drawn(draw, count):
        op = "r" if draw.random() < 0.2 else drawn_op
        named = {} if op == "d" else {"b": draw.randint(0, 99), **drawn_names}
        whole = {"a": f"r{draw.random()}", "c": None} if op in "ri" else {}
        changes.append((key, op, {**whole, **named}))
    return changes


def incomplete_places(changes: Sequence[Change]) -> list[tuple[int, int]]:
    """Return the partitions and offsets of changes that nothing can be kept of, of all that were
    sent.
    """
    bad, places, offsets = applied(changes)[1], [], [0, 0]
    for change in changes:
        number = bucket_of_key([change[0]], ["string"], 2)
        places += [(number, offsets[number])] if any(change is one for one in bad) else []
        offsets[number] += 1
    return places


def drawn(draw: random.Random, count: int, keys: str = "abcdefg") -> list[Change]:
    """Return changes of a few keys: many leave out columns, some null them."""
    changes = []
    for _ in range(count):
        op = draw.choice("iiuuuuuud")
        names = [] if op == "d" else draw.sample(COLUMNS, draw.randint(1, 3))
        values = {"a": f"t{draw.random()}", "b": draw.randint(0, 99), "c": f"u{draw.random()}"}
        changes.append(
            (draw.choice(keys), op, {n: None if draw.random() < 0.2 else values[n] for n in names})
        )
    return changes


WHOLE = {"a": "x", "b": 1, "c": "y"}


def test_columns_that_a_change_leaves_out_keep_what_the_dataset_has(either: World) -> None:
    spec = declared(either)
    send(either, ("k", "i", WHOLE), ("l", "i", WHOLE))
    either.advance(spec)
    send(either, ("k", "u", {"b": 2}), ("k", "u", {"c": None}), ("l", "u", {"a": "z"}))
    either.advance(spec)
    assert content(either, spec) == {
        "k": {"a": "x", "b": 2, "c": None},
        "l": {"a": "z", "b": 1, "c": "y"},
    }
    send(either, ("k", "u", {"c": "again"}))
    either.advance(spec)
    assert content(either, spec)["k"] == {"a": "x", "b": 2, "c": "again"}


def test_what_nothing_can_be_kept_of_is_a_bad_change(either: World) -> None:
    spec = declared(either)
    send(either, ("k", "i", WHOLE), ("k", "d", {}), ("k", "u", {"b": 2}))
    with pytest.raises(BadChangeError) as reported:
        either.advance(spec)
    assert reported.value.dataset == NAME
    assert "'a', 'c'" in reported.value.problem
    assert StoredVersions(either.lake, spec).current() is None


def test_what_is_marked_as_missing_of_an_insert_is_null(either: World) -> None:
    spec = declared(either)
    send(either, ("k", "i", WHOLE))
    either.send(
        NAME,
        [("k", "I", "a", 1, "c", True, None, False), ("l", "i", "a", 1, "c", False, True, None)],
    )
    either.advance(spec)
    assert content(either, spec) == {
        "k": {"a": None, "b": 1, "c": "c"},
        "l": {"a": "a", "b": None, "c": "c"},
    }


def test_incomplete_changes_go_to_the_dead_letters_once_each(either: World) -> None:
    spec = declared(either, on_bad_change=DeadLetters("lake.dead"))
    send(either, ("k", "u", {"b": 2}), ("k", "?", {}), ("l", "i", WHOLE), ("m", "u", {"a": "x"}))
    report = either.advance(spec)
    assert report.counters["quarantined"] == 3
    assert sorted(reason.split(" ")[0] for reason in letters(either)) == ["it", "it", "unknown"]
    assert content(either, spec) == {"l": WHOLE}
    send(either, ("m", "u", {"c": "x"}), ("k", "i", WHOLE))
    assert either.advance(spec).counters["quarantined"] == 1
    assert len(letters(either)) == 4
    assert content(either, spec) == {"k": WHOLE, "l": WHOLE}


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]
)
def test_any_cut_gives_what_a_dictionary_comes_to(either: World, seed: int) -> None:
    draw = random.Random(seed)
    changes = drawn(draw, 150 if either.spark is IN_PROCESS else 50)
    spec = declared(either, on_bad_change=DeadLetters("lake.dead"), chunk=draw.choice([7, 1000]))
    table, incomplete, at = {}, [], 0
    while at < len(changes):
        cut = changes[at : (at := at + draw.choice([1, 3, 20, 50]))]
        send(either, *cut)
        either.advance(spec)
        table, bad = applied(cut, table)
        incomplete += bad
        assert content(either, spec) == table
        if draw.random() < 0.3:
            compact_dataset(
                either.lake,
                NAME,
                spark=either.spark,
                by="test",
                level=draw.choice(["minor", "major"]),
            )
            assert content(either, spec) == table
    assert len(letters(either)) == len(incomplete)


# -- in process: whatever happens on the way


@dataclass
class History:
    """A table that is driven at random, and what a dictionary says of it."""

    world: World
    draw: random.Random
    spec: AdjunctDataset
    of_debezium: bool = False
    sent: list[Change] = field(default_factory=list)
    taken: int = 0

    @property
    def table(self) -> Table:
        return applied(self.sent[: self.taken])[0]

    def send(self) -> None:
        again = self.draw.randrange(max(1, len(self.sent)))
        changes = (drawn_unwrapped if self.of_debezium else drawn)(
            self.draw, self.draw.choice([1, 4, 15])
        )
        # what was delivered comes again, as of a producer that does not know
        if self.draw.random() < 0.2:
            changes = [
                (key, op, named) for key, op, named in self.sent[again : again + 6]
            ] or changes
        (send_unwrapped if self.of_debezium else send)(self.world, *changes)
        self.sent += changes

    def run(self, act: Callable[[Lake], object]) -> bool:
        """Do it, or die in it; return whether it was done."""
        kind = self.draw.choice(["crash-before", "crash-after", "lost-after"])
        fault = Fault("*", self.draw.randint(1, 40), kind) if self.draw.random() < 0.5 else None
        lake = faulty(self.world, fault) if fault else self.world.lake
        try:
            act(lake)
        except (Crash, StoreUnavailableError, CommitStateUnknownError, CommitConflictError):
            assert fault is not None
            return False
        return True

    def advance(self) -> None:
        while not self.run(lambda lake: self.world.advance(self.spec, lake=lake)):
            assert content(self.world, self.spec) in self._on_the_way()
        self.taken = len(self.sent)

    def _on_the_way(self) -> list[Table]:
        """Return what commits of a chunk each may have come to: prefixes, of each partition its
        own.
        """
        parts = [
            [c for c in self.sent if bucket_of_key([c[0]], ["string"], 2) == number]
            for number in (0, 1)
        ]
        first, second = ([applied(part[:end])[0] for end in range(len(part) + 1)] for part in parts)
        return [one | other for one in first for other in second]

    def upkeep(self) -> None:
        level = self.draw.choice(["minor", "major"])
        self.run(lambda lake: compact_dataset(lake, NAME, spark=IN_PROCESS, by="test", level=level))
        if self.draw.random() < 0.5:
            self.run(
                lambda lake: discard(
                    lake, NAME, DiscardPolicy(keep=1, grace=timedelta(0)), by="test"
                )
            )

    def rewind(self) -> None:
        """Apply changes again from somewhere: with the same declaration they come to the same."""
        ends = {
            int(ssp.rsplit(".", 1)[1]): int(end) for ssp, end in self._manifest().offsets.items()
        }
        parts = self.draw.sample([0, 1], self.draw.randint(1, 2))
        starts = {
            SystemStreamPartition("lake", NAME, n): StartpointSpecific(
                offset=str(self.draw.randint(0, ends[n]))
            )
            for n in parts
        }
        while not self.run(
            lambda lake: rewind_dataset(
                self.spec,
                lake=lake,
                systems=self.world.systems,
                spark=IN_PROCESS,
                positions=starts,
                reason="again",
                by="test",
            )
        ):
            assert content(self.world, self.spec) == self.table

    def rebuild(self) -> None:
        def renewed(lake: Lake) -> object:
            return rebuild_dataset(
                self.spec,
                lake=lake,
                systems=self.world.systems,
                spark=IN_PROCESS,
                reason="anew",
                by="test",
            )

        if not self.run(renewed):
            self.advance()
        self.taken = len(self.sent)

    def _manifest(self) -> Any:
        return StoredVersions(self.world.lake, NAME).require_manifest()


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("of_debezium", [False, True], ids=["operations", "unwrapped"])
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 8))]
)
def test_whatever_happens_on_the_way_the_table_is_what_a_dictionary_comes_to(
    seed: int, of_debezium: bool
) -> None:
    draw = random.Random(seed)
    world = World(lake_in(InMemoryStore()), IN_PROCESS)
    more: dict[str, Any] = {"broadcast": True} if seed % 3 == 0 else {"partitions": 2}
    if of_debezium:
        world.stream(NAME, UNWRAPPED, ["k"], 2)
        more["changes"] = DebeziumUnwrapped("deleted", "op", on_unavailable="keep")
    spec = declared(
        world, on_bad_change=DeadLetters("lake.dead"), chunk=draw.choice([5, 1000]), **more
    )
    history = History(world, draw, spec, of_debezium)
    history.send()
    history.advance()
    for _ in range(rounds(12, 60)):
        act = draw.choice(
            [history.send, history.advance, history.advance, history.upkeep, history.rewind]
        )
        act()
        if draw.random() < 0.1:
            history.rebuild()
        assert content(world, spec) == history.table
    history.advance()
    assert content(world, spec) == history.table
    places = Counter((row["partition"], row["offset"]) for row in dead_letters(world))
    complete = {place for place in places if place not in incomplete_places(history.sent)}
    assert complete == set(), "a change that can be applied was set aside"
    assert set(incomplete_places(history.sent)) == set(places), "one that can't be was lost"


@pytest.mark.lengthy
@pytest.mark.rounds
def test_a_commit_that_dies_at_any_request_is_taken_up_with_its_letters_sent_once() -> None:
    before = [("k", "i", WHOLE), ("l", "i", WHOLE)]
    then = [
        ("k", "u", {"b": 2}),
        ("m", "u", {"a": "x"}),
        ("l", "d", {}),
        ("l", "u", {"a": "y"}),
        ("k", "u", {"a": "z"}),
    ]

    def begun() -> tuple[World, AdjunctDataset]:
        world = World(lake_in(InMemoryStore()), IN_PROCESS)
        spec = declared(world, on_bad_change=DeadLetters("lake.dead"))
        send(world, *before)
        world.advance(spec)
        send(world, *then)
        return world, spec

    world, spec = begun()
    counted = FaultyStore(world.lake.store)
    world.advance(spec, lake=Lake(counted, world.lake.id))
    wanted = applied(then, applied(before)[0])[0]
    assert content(world, spec) == wanted == {"k": {"a": "z", "b": 2, "c": "y"}}
    for nth in range(1, len(counted.requests) + 1, rounds(3, 1)):
        for kind in ("crash-before", "crash-after", "lost-after"):
            world, spec = begun()
            with suppress(
                Crash, StoreUnavailableError, CommitStateUnknownError, CommitConflictError
            ):
                world.advance(spec, lake=faulty(world, Fault("*", nth, kind)))
            assert content(world, spec) in (wanted, applied(before)[0]), (nth, kind)
            world.advance(spec)
            assert content(world, spec) == wanted, (nth, kind)
            assert len(letters(world)) == 2, (nth, kind)


def test_values_of_erased_keys_do_not_come_back_with_changes_that_keep_them(world: World) -> None:
    world.spark = IN_PROCESS
    spec = declared(world)
    send(world, ("k", "i", WHOLE), ("l", "i", WHOLE))
    world.advance(spec)
    send(world, ("k", "u", {"b": 2}))

    def erase() -> None:
        erase_keys(world.lake, NAME, ["k"], reason="request 4711", by="test")

    with pytest.raises(CommitConflictError):
        world.advance(spec, lake=faulty(world, Fault("put_if_match", 1, "meanwhile", erase)))
    with pytest.raises(BadChangeError):
        world.advance(spec)
    assert content(world, spec) == {"l": WHOLE}


@pytest.mark.lengthy
def test_a_version_that_is_compacted_and_discarded_meanwhile_is_read_to_the_end(
    world: World,
) -> None:
    world.spark = IN_PROCESS
    spec = declared(world)
    send(world, ("k", "i", WHOLE), ("l", "i", WHOLE))
    world.advance(spec)
    send(world, ("k", "u", {"b": 2}))
    world.advance(spec)
    send(world, ("k", "u", {"c": "z"}), ("l", "u", {"a": None}))
    probe = copy_of(world, Path(world.lake.url).parent / "probe")
    probe.advance(spec, lake=Lake(counted := FaultyStore(probe.lake.store), probe.lake.id))
    wanted = content(probe, spec)
    assert wanted == {"k": {"a": "x", "b": 2, "c": "z"}, "l": {"a": None, "b": 1, "c": "y"}}
    for nth in range(1, len(counted.requests) + 1):
        copy = copy_of(world, Path(world.lake.url).parent / f"copy{nth}")

        def replaced(copy: World = copy) -> None:
            compact_dataset(copy.lake, NAME, spark=IN_PROCESS, by="other", level="major")
            discard(copy.lake, NAME, DiscardPolicy(keep=1, grace=timedelta(0)), by="other")

        with suppress(CommitConflictError):
            copy.advance(spec, lake=faulty(copy, Fault("*", nth, "meanwhile", replaced)))
        copy.advance(spec)
        assert content(copy, spec) == wanted, counted.requests[nth - 1]


@pytest.mark.parametrize(
    "changes",
    [
        [("k", "u", {"b": 2}), ("k", "d", {})],
        [
            ("k", "u", {"b": 2}),
            ("k", "d", {}),
            ("k", "i", {**WHOLE, "b": 3}),
            ("k", "u", {"a": "z"}),
        ],
        [("k", "u", {"b": 2}), ("k", "u", {"a": None})],
    ],
)
def test_what_is_applied_again_from_the_middle_comes_to_the_same(
    either: World, changes: list[Change]
) -> None:
    spec = declared(either)
    send(either, ("k", "i", WHOLE))
    either.advance(spec)
    send(either, *changes)
    either.advance(spec)
    wanted, number = applied([("k", "i", WHOLE), *changes])[0], bucket_of_key(["k"], ["string"], 2)
    starts = {SystemStreamPartition("lake", NAME, number): StartpointSpecific(offset="1")}
    report = rewind_dataset(
        spec,
        lake=either.lake,
        systems=either.systems,
        spark=either.spark,
        positions=starts,
        reason="again",
        by="test",
    )
    assert report.action == "rewound"
    assert content(either, spec) == wanted


def test_what_came_before_a_snapshots_row_stays_incomplete_when_it_is_applied_again(
    world: World,
) -> None:
    world.spark = IN_PROCESS
    world.stream(NAME, UNWRAPPED, ["k"], 2)
    form = DebeziumUnwrapped("deleted", "op", on_unavailable="keep")
    spec = declared(world, changes=form, on_bad_change=DeadLetters("lake.dead"))
    for change in [("k", "u", {"b": 2}), ("k", "r", WHOLE)]:
        send_unwrapped(world, change)
        world.advance(spec)
    assert content(world, spec) == {"k": WHOLE}
    starts = {
        SystemStreamPartition(
            "lake", NAME, bucket_of_key(["k"], ["string"], 2)
        ): StartpointSpecific(offset="0")
    }
    rewind_dataset(
        spec,
        lake=world.lake,
        systems=world.systems,
        spark=IN_PROCESS,
        positions=starts,
        reason="again",
        by="test",
    )
    assert content(world, spec) == {"k": WHOLE}
    send_unwrapped(world, ("k", "u", {"b": 3}))
    world.advance(spec)
    assert content(world, spec) == {"k": {**WHOLE, "b": 3}}


@pytest.mark.parametrize(
    "form",
    [
        FORM,
        DebeziumUnwrapped("op", on_unavailable="keep"),
        DebeziumEnvelope("k STRING, b INT", on_unavailable="keep"),
        DebeziumEnvelope("k STRING, b INT", on_missing="keep"),
    ],
)
@pytest.mark.parametrize(
    ("extractor", "order"),
    [
        (PythonExtractor("a.b:c", "k STRING, b INT"), None),
        (Projection("k STRING, b INT", {"b": "{1, 2}[0]"}), None),
        (Projection("k STRING, b INT", where="k = 'x' AND b > 0"), "seq"),
        (Projection("k STRING, b INT", {"k": "upper(k)"}, "k = 'x'"), "seq"),
    ],
)
def test_keeping_values_is_refused_with_an_extractor_that_may_need_them(
    form: Any, extractor: Any, order: str | None
) -> None:
    with pytest.raises(ConfigurationError) as reported:
        unbounded_dataset(
            NAME,
            input="lake.s",
            key="k",
            broadcast=True,
            changes=form,
            extractor=extractor,
            order_by=order,
        )
    assert (reported.value.argument, reported.value.dataset) == ("extractor", NAME)


PROJECTION = Projection(
    "k STRING, sum STRING, tag STRING",
    {"sum": "concat(a, '+', B)", "tag": "concat(K, ':', c)"},
    "c IS NOT NULL OR k = 'b'",
)


def projected(change: Change, rows: Table) -> bool:
    """Apply a change to the rows of the source; return whether nothing can be made of it: it names
    one of a and b, or its row, which had no entry, has one now and is not known.
    """
    key, op, named = change
    if op == "d":
        rows.pop(key, None)
        return False
    if op == "i":
        rows[key] = dict.fromkeys(COLUMNS) | named
        return False
    if ("a" in named) != ("b" in named):
        return True
    if "c" in named:
        row = rows.get(key, {}) | named
        had_entry = key in rows and passes(key, rows[key])
        if passes(key, row) and not had_entry and set(named) != set(COLUMNS):
            return True
    if key in rows or set(named) == set(COLUMNS):
        rows[key] = dict.fromkeys(COLUMNS) | rows.get(key, {}) | named
    return False


def passes(key: str, row: dict[str, Any]) -> bool:
    return row.get("c") is not None or key == "b"


def entries_of(rows: Table) -> Table:
    made = {}
    for key, row in rows.items():
        if passes(key, row):
            total = None if None in (row["a"], row["b"]) else f"{row['a']}+{row['b']}"
            tag = None if row["c"] is None else f"{key}:{row['c']}"
            made[key] = {"k": key, "sum": total, "tag": tag}
    return made


@pytest.mark.spark
@pytest.mark.rounds
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))]
)
def test_a_projection_of_several_columns_with_a_condition_is_that_of_whole_rows(
    sparkling: World, seed: int
) -> None:
    draw = random.Random(seed)
    spec = declared(sparkling, on_bad_change=DeadLetters("lake.dead"), extractor=PROJECTION)
    changes = drawn(draw, rounds(100, 150), keys="abc")
    rows: Table = {}
    bad = 0
    for start in range(0, len(changes), 50):
        cut = changes[start : start + 50]
        send(sparkling, *cut)
        sparkling.advance(spec)
        bad += sum(projected(change, rows) for change in cut)
        assert dict(sparkling.view(spec).items()) == entries_of(rows)
    assert len(letters(sparkling)) == bad > 0
    assert any("of which column 'sum' is made" in reason for reason in letters(sparkling))


@pytest.mark.spark
def test_a_change_that_leaves_out_some_columns_of_a_condition_is_a_bad_change(
    sparkling: World,
) -> None:
    extractor = Projection("k STRING, c STRING", where="a = 'x' AND b > 0")
    spec = declared(sparkling, extractor=extractor)
    send(sparkling, ("k", "i", WHOLE), ("l", "i", {**WHOLE, "b": 0}))
    sparkling.advance(spec)
    send(sparkling, ("k", "u", {"c": "z"}), ("l", "u", {"c": "z"}))
    sparkling.advance(spec)
    assert dict(sparkling.view(spec).items()) == {"k": {"k": "k", "c": "z"}}
    send(sparkling, ("k", "u", {"a": "x"}))
    with pytest.raises(BadChangeError) as reported:
        sparkling.advance(spec)
    assert "the condition (a = 'x' AND b > 0)" in reported.value.problem


def test_a_column_that_was_added_since_keeps_null(world: World) -> None:
    world.spark = IN_PROCESS
    narrow = declared(world, columns=["k", "a"])
    send(world, ("k", "i", WHOLE))
    world.advance(narrow)
    send(world, ("k", "u", {"a": "z"}), ("k", "u", {"b": 7}))
    world.advance(declared(world))
    assert content(world, declared(world)) == {"k": {"a": "z", "b": 7, "c": None}}


def test_a_change_that_leaves_out_only_what_is_not_stored_is_whole(world: World) -> None:
    world.spark = IN_PROCESS
    spec = declared(world, columns=["k", "a"])
    send(world, ("k", "u", {"a": "z"}))
    world.advance(spec)
    assert world.view(spec).get("k") == {"k": "k", "a": "z"}


def test_a_repartitioned_table_goes_on_with_what_it_has(world: World) -> None:
    world.spark = IN_PROCESS
    spec = declared(world)
    send(world, *[(key, "i", WHOLE) for key in "abcdefgh"])
    world.advance(spec)
    repartition_dataset(world.lake, NAME, 3, reason="more machines", by="test")
    send(world, *[(key, "u", {"b": number}) for number, key in enumerate("abcdefgh")])
    spec = declared(world, partitions=3)
    world.advance(spec)
    assert content(world, spec) == {
        key: {**WHOLE, "b": number} for number, key in enumerate("abcdefgh")
    }


@pytest.mark.lengthy
def test_a_commit_of_many_changes_is_completed_across_its_batches(world: World) -> None:
    world.spark = IN_PROCESS
    spec, draw = declared(world, broadcast=True), random.Random(1)
    keys = [f"key {number}" for number in range(7)]
    send(world, *[(key, "i", WHOLE) for key in keys])
    world.advance(spec)
    names = [draw.sample(COLUMNS, draw.randint(1, 2)) for _ in range(50)]
    changes = [
        (keys[n % 7], "u", {name: n if name == "b" else f"{name}{n}" for name in names[n % 50]})
        for n in range(ROWS_PER_GROUP + 999)
    ]
    send(world, *changes)
    assert world.advance(spec).counters["changes"] == len(keys)
    assert content(world, spec) == applied(changes, dict.fromkeys(keys, WHOLE))[0]


KINDS: dict[str, Callable[[int], Any]] = {
    "bigint": lambda n: n * 7 - 1000,
    "string": lambda n: f"key {n * 7919 % 1_000_003}",
    "date": lambda n: dt.date(1, 1, 1) + dt.timedelta(n),
    "timestamp": lambda n: dt.datetime(1960, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=n),
    "decimal(20,2)": lambda n: Decimal(n * 7 - 1000) / 100,
    "binary": lambda n: n.to_bytes(3, "big"),
}


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "key",
    [
        *(
            pytest.param([kind], marks=[pytest.mark.long] * (number > 0))
            for number, kind in enumerate(KINDS)
        ),
        pytest.param(["string", "bigint"], marks=pytest.mark.long),
        ["bigint", "decimal(20,2)"],
    ],
)
def test_rows_are_found_by_keys_of_any_type_in_any_row_group(world: World, key: list[str]) -> None:
    count, names = ROWS_PER_GROUP + 5_000, [f"k{index}" for index in range(len(key))]
    keys = dict(zip(names, key, strict=True))
    world.stream(
        NAME, Schema.of({**keys, "op": "string", "v": "string", "v_isMissing": "boolean"}), names, 1
    )
    spec = unbounded_dataset(
        NAME, input=f"lake.{NAME}", key=names, broadcast=True, changes=FORM, compaction=BY_HAND
    )
    world.spark = IN_PROCESS
    schema = world.streams.info(NAME).schema.to_arrow()  # type: ignore[union-attr]

    def send_keys(numbers: Sequence[int], op: str, value: str | None) -> None:
        columns = {
            name: pa.array([KINDS[kind](n) for n in numbers], schema.field(name).type)
            for name, kind in keys.items()
        }
        size = len(numbers)
        columns |= {
            "op": pa.array([op] * size),
            "v": pa.array([value and f"{value}{n}" for n in numbers], pa.string()),
        }
        columns |= {
            "v_isMissing": pa.array([value is None] * size),
            "__tombstone": pa.array([False] * size),
        }
        world.streams.append(NAME, pa.table(columns), producer="test", sequence=world._next(NAME))

    send_keys(range(0, 2 * count, 2), "i", "v")
    world.advance(spec)
    assert len(world.view(spec).sealed.generations[0].files) == 1
    asked = random.Random(1).sample(range(0, 2 * count, 2), 50)
    send_keys(asked, "u", None)
    world.advance(spec)
    tables = [
        read_stored_file(file, world.view(spec).sealed.layout) for file in stored_files(world, spec)
    ]
    assert sorted(tables[-1].column("v").to_pylist()) == sorted(f"v{n}" for n in asked)
    send_keys([asked[0] + 1], "u", None)
    with pytest.raises(BadChangeError):
        world.advance(spec)


# -- by Spark


def envelope(op: str, **after: Any) -> dict[str, Any]:
    return {"id": after["id"], "value": json.dumps({"op": op, "before": None, "after": after})}


@pytest.mark.parametrize(
    "persistent",
    [pytest.param(True, id="stored"), pytest.param(False, id="of one run", marks=pytest.mark.long)],
)
def test_envelopes_keep_what_is_not_known_and_what_is_not_named(
    sparkling: World, persistent: bool
) -> None:
    sparkling.stream("pages", Schema.of(id="bigint", value="string"), ["id"], 2)
    form = DebeziumEnvelope("id BIGINT, a STRING, b INT", on_unavailable="keep", on_missing="keep")
    spec = unbounded_dataset(
        "pages",
        input="lake.pages",
        key="id",
        partitions=2,
        changes=form,
        persistent=persistent,
        compaction=BY_HAND,
    )
    table = TransientTable(sparkling.systems, spec)

    def advance(*sent: dict[str, Any]) -> dict[int, tuple[Any, ...]]:
        sparkling.send("pages", [(row["id"], row["value"]) for row in sent])
        if persistent:
            sparkling.advance(spec)
            return {key: (entry["a"], entry["b"]) for key, entry in sparkling.view(spec).items()}
        table.advance(sparkling.spark)
        assert table.view is not None
        return {row.id: (row.a, row.b) for row in table.view.frame(sparkling.spark()).collect()}

    ids = range(1, 9)
    assert advance(*(envelope("c", id=n, a=f"a{n}", b=n) for n in ids)) == {
        n: (f"a{n}", n) for n in ids
    }
    update = advance(
        *(envelope("u", id=n, a=[PLACEHOLDER], b=10 * n) for n in ids), envelope("u", id=1, b=None)
    )
    assert update == {1: ("a1", None)} | {n: (f"a{n}", 10 * n) for n in ids if n > 1}
    assert advance(envelope("u", id=2, a="z")) == update | {2: ("z", 20)}
    with pytest.raises(BadChangeError), translate_spark_errors():
        advance(envelope("u", id=99, b=1))
    table.release()


def test_changes_upon_a_bulk_snapshot_are_completed_from_it(
    sparkling: World, tmp_path: Path
) -> None:
    sparkling.stream(NAME, STREAM, ["k"], 2)
    snapshot = pa.table(
        {"k": ["k", "l"], "a": ["x", "x"], "b": pa.array([1, 1], pa.int32()), "c": ["y", "y"]}
    )
    pq.write_table(snapshot, tmp_path / "rows.parquet")
    position = {f"lake.{NAME}.{number}": "0" for number in (0, 1)}
    spec = declared(
        sparkling, initial=ParquetSnapshot(str(tmp_path / "rows.parquet"), position=position)
    )
    send(sparkling, ("k", "u", {"b": 2}), ("l", "d", {}), ("m", "i", WHOLE))
    sparkling.advance(spec)
    assert content(sparkling, spec) == {"k": {**WHOLE, "b": 2}, "m": WHOLE}
