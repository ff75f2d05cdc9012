"""Startpoints on a dataset's own stream: changes applied again, tables built anew, and what is
refused (issue 6.7).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.change_formats import OperationColumn
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.declaration.policies import DeadLetters, DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.rewind import plan_rewind, rewind_dataset
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.resources.bucketing.hashing import bucket_of_key
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    CommitStateUnknownError,
    DatasetError,
    OffsetOutOfRangeError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.assets.conftest import World
from tests.assets.unbounded import facts
from tests.assets.unbounded.facts import (
    DEAD,
    NAME,
    TENFOLD,
    Fact,
    content,
    facts_in,
    letters,
    table_of,
)
from tests.assets.unbounded.following_plain import table_in
from tests.assets.unbounded.tables import BY_HAND, left_over, stored
from tests.faulty_store import WRITES, Crash, Fault, FaultKind, FaultyStore, deaths

COLUMNS = Schema.of(k="string", n="int")
KEYS = [*"abcdefgh"]
FIRST: list[Fact] = [
    ("a", 1, 1),
    ("b", 2, 2),
    ("c", 3, 3),
    ("a", 4, 4),
    ("d", 5, 5),
    ("b", 6, None),
]
SECOND: list[Fact] = [("a", 7, None), ("e", 8, 8), ("c", 2, 9), ("b", 9, 10), ("d", 10, 11)]


def at(offset: int, **made: Any) -> StartpointSpecific:
    return StartpointSpecific(offset=str(offset), **made)


def part(number: int, stream: str = NAME) -> SystemStreamPartition:
    return SystemStreamPartition("lake", stream, number)


def rewind(
    world: World,
    spec: AdjunctDataset,
    positions: Mapping[SystemStreamPartition, Startpoint],
    *,
    lake: Lake | None = None,
    **options: Any,
) -> AdvanceReport:
    reported = {"reason": "the filter was wrong", "by": "ada", **options}
    return rewind_dataset(
        spec,
        lake=lake or world.lake,
        systems=world.systems,
        spark=world.spark,
        positions=positions,
        **reported,
    )


def served(world: World, spec: AdjunctDataset) -> dict[str, int]:
    """Return what is served, by key and, where there is a session, by Spark."""
    view = world.view(spec)
    entries = {key: entry["n"] for key, entry in view.items()}
    if world.spark is not IN_PROCESS:
        rows = view.frame(world.spark()).collect()
        assert len({row.k for row in rows}) == len(rows), "a key stands twice in the frame"
        assert {row.k: row.n for row in rows} == entries
    return entries


# -- by Spark, against plain Python over the stream


class Stream:
    """All that was sent, by partition and offset, and what a table holds by a declaration (a
    bound of n).
    """

    def __init__(self, partitions: int) -> None:
        self.sent: list[list[tuple[str, int | None]]] = [[] for _ in range(partitions)]
        self.table: dict[str, int] = {}
        self.taken = [0] * partitions

    def add(self, changes: list[tuple[str, int | None]]) -> None:
        for change in changes:
            self.sent[bucket_of_key([change[0]], ["string"], len(self.sent))].append(change)

    def apply(self, bound: int, starts: Mapping[int, int]) -> dict[str, int]:
        """Take in what these partitions hold from there on: the newest change of each key
        counts.
        """
        for partition, start in starts.items():
            for key, n in dict(self.sent[partition][start : self.taken[partition]]).items():
                self.table.pop(key, None)
                if n is not None and n < bound:
                    self.table[key] = n
        return self.table

    def advance(self, bound: int) -> dict[str, int]:
        before, self.taken = self.taken, [len(records) for records in self.sent]
        return self.apply(bound, dict(enumerate(before)))


def bounded_by(bound: int, spread: Mapping[str, Any]) -> AdjunctDataset:
    extractor = Projection("k STRING, n INT", where=f"n < {bound}")
    return unbounded_dataset(
        NAME, input=f"lake.{NAME}", key="k", extractor=extractor, compaction=BY_HAND, **spread
    )


@pytest.mark.spark
@pytest.mark.parametrize(
    ("turns", "spread"),
    [
        pytest.param(("minor", "major"), {"partitions": 2}, id="spread", marks=pytest.mark.long),
        pytest.param(("major",), {"partitions": None, "broadcast": True}, id="copy"),
    ],
)
def test_after_a_rewind_keys_changed_since_are_what_the_corrected_declaration_says(
    sparkling: World, turns: tuple[Any, ...], spread: Mapping[str, Any]
) -> None:
    world, chance, stream = sparkling, random.Random(len(turns)), Stream(2)
    world.stream(NAME, COLUMNS, ["k"], 2)
    for level in turns:
        for _ in range(2):
            bound = chance.choice([40, 100])
            changes = [
                (chance.choice(KEYS), None if chance.random() < 0.2 else chance.randrange(100))
                for _ in range(chance.randrange(4, 10))
            ]
            stream.add(changes)
            world.send(NAME, changes)
            world.advance(bounded_by(bound, spread))
            stream.advance(bound)
        compact_dataset(world.lake, NAME, spark=world.spark, by="test", level=level)
        bound = chance.choice([20, 60, 100])
        starts = {p: chance.randrange(stream.taken[p]) for p in chance.sample([0, 1], len(turns))}
        world.send(NAME, late := [(chance.choice(KEYS), chance.randrange(100))])
        stream.add(late)
        corrected = bounded_by(bound, spread)
        report = rewind(world, corrected, {part(p): at(start) for p, start in starts.items()})
        assert report.action == "rewound"
        assert served(world, corrected) == stream.apply(bound, starts), (
            "what came since is for the next advance"
        )
        assert report.offsets == {str(part(p)): str(taken) for p, taken in enumerate(stream.taken)}
    world.advance(corrected)
    assert served(world, corrected) == stream.advance(bound)


def with_operations(*write: str) -> AdjunctDataset:
    return unbounded_dataset(
        NAME,
        input=f"lake.{NAME}",
        key="k",
        partitions=1,
        changes=OperationColumn(write=write),
        on_bad_change=DeadLetters(f"lake.{DEAD}"),
    )


@pytest.mark.spark
def test_an_earlier_change_counts_where_the_newest_makes_no_entry_any_more(
    sparkling: World,
) -> None:
    world = sparkling
    world.stream(NAME, Schema.of(k="string", n="int", op="string"), ["k"], 1)
    world.send(NAME, [("a", 1, "u"), ("b", 1, "u"), ("a", 2, "x"), ("c", 3, "x")])
    wrong = with_operations("u", "x")
    world.advance(wrong)
    assert served(world, wrong) == {"a": 2, "b": 1, "c": 3}
    right = with_operations("u")
    rewind(world, right, {part(0): at(0)})
    assert served(world, right) == {"a": 1, "b": 1, "c": 3}, (
        "nothing of c is said any more: it stays as it was"
    )
    world.send(NAME, [("a", 4, "u"), ("b", 4, "d")])
    world.advance(right)
    assert served(world, right) == {"a": 4, "c": 3}, (
        "what is newer wins over what was placed later than it was"
    )
    rewind(world, right, {part(0): at(0)})
    assert served(world, right) == {"a": 4, "c": 3}
    dead = world.streams.read_arrow(world.streams.all_ranges(DEAD)).to_pylist()
    assert [letter["offset"] for letter in dead] == [2, 3] * 2, "each rewind sets them aside anew"


@pytest.mark.spark
def test_by_a_column_the_highest_still_wins_and_what_may_be_deleted_is_refused(
    sparkling: World,
) -> None:
    world = facts_in(sparkling.lake, sparkling.spark)

    def table(bound: int) -> AdjunctDataset:
        extractor = Projection("k STRING, at BIGINT, n INT", where=f"n < {bound}")
        return table_of(order_by="at", keep_tombstones=10, extractor=extractor, partitions=1)

    sent: list[list[Fact]] = [
        [("a", 100, 1), ("b", 50, 60), ("c", 50, 70)],
        [("b", 60, None), ("a", 90, 2)],
    ]
    for changes in sent:
        facts.send(world, changes)
        world.advance(table(100))
    everything = {part(p): at(0) for p in (0, 1)}
    rewind(world, table(65), everything)
    assert served(world, table(65)) == {"a": 1}, (
        "c is left out now, b stays deleted, and 90 does not beat 100"
    )
    compact_dataset(world.lake, NAME, spark=world.spark, by="test", level="major")
    assert StoredVersions(world.lake, NAME).require_manifest().horizon == 90
    rewind(world, table(65), {part(p): at(0) for p in (0, 1)})
    assert {key for _, key, _ in stored(world, table(65))} == {"a"}, "what is forgotten stays so"
    before = StoredVersions(world.lake, NAME).read()[0]
    with pytest.raises(
        DatasetError,
        match=r"1 of the changes can't be applied again, .* deletions up to position 90",
    ):
        rewind(world, table(100), everything_again := {part(p): at(0) for p in (0, 1)})
    assert StoredVersions(world.lake, NAME).read()[0] == before
    assert all("/attempts/" in key for key in left_over(world, table(100)))
    report = rewind(world, table(100), everything_again, force=True)
    assert report.counters["late"] == 1
    assert served(world, table(100)) == {"a": 1}


@pytest.mark.spark
def test_entries_whose_key_is_computed_are_rewound_only_by_force_and_stay(sparkling: World) -> None:
    world = sparkling
    world.stream(NAME, COLUMNS, ["k"], 1)

    def table(expression: str) -> AdjunctDataset:
        extractor = Projection("k STRING, n INT", select={"k": expression})
        return unbounded_dataset(
            NAME, input=f"lake.{NAME}", key="k", partitions=1, extractor=extractor
        )

    world.send(NAME, [("a", 1), ("b", 2)])
    world.advance(table("concat('x', k)"))
    right = table("concat('y', k)")
    plan = plan_rewind(right, lake=world.lake, systems=world.systems, positions={part(0): at(1)})
    assert "computes the key (k)" in str(plan.refusal)
    with pytest.raises(DatasetError, match=r"entries that they no longer make would stay"):
        rewind(world, right, {part(0): at(1)})
    rewind(world, right, {part(0): at(1)}, force=True)
    assert served(world, right) == {"xa": 1, "xb": 2, "yb": 2}
    report = rewind(world, right, {part(0): StartpointOldest()})
    assert report.action == "bootstrapped"
    assert served(world, right) == {"ya": 1, "yb": 2}


# -- without Spark: what is decided, committed and refused


def reported(world: World) -> Any:
    return StoredVersions(world.lake, NAME).require_manifest()


def now(world: World) -> dict[str, int]:
    return content(StoredVersions(world.lake, NAME).require_current())


def table_with(*commits: list[Fact], **options: Any) -> World:
    world = facts_in(lake_in(InMemoryStore()), IN_PROCESS)
    for changes in commits:
        facts.send(world, changes)
        world.advance(table_of(**options))
    return world


def tenfold(world: World, starts: Mapping[int, int]) -> dict[str, int]:
    """Return what is served once the keys that were changed since are decoded anew."""
    log = facts.Log()
    log.add(FIRST + SECOND)
    after = now(world)
    for partition, start in starts.items():
        after |= {
            key: 10 * after[key] for key, _, _ in log.facts[partition][start:] if key in after
        }
    return after


def test_the_plan_says_what_would_be_done_and_changes_nothing() -> None:
    world = table_with(FIRST, SECOND)
    facts.send(world, [("a", 30, 30)])
    ends = {p: int(reported(world).offsets[str(part(p))]) for p in (0, 1)}
    before = StoredVersions(world.lake, NAME).read()[0]

    def plan(positions: Mapping[SystemStreamPartition, Startpoint], **force: Any) -> Any:
        return plan_rewind(
            table_of(), lake=world.lake, systems=world.systems, positions=positions, **force
        )

    some = plan({part(0): at(1), part(1): StartpointTimestamp(timestamp_ms=0)})
    assert (some.action, some.refusal) == ("rewind", None)
    assert [
        (partition.start, partition.taken, partition.again, partition.skipped)
        for partition in some.partitions
    ] == [("1", str(ends[0]), ends[0] - 1, 0), ("0", str(ends[1]), ends[1], 0)]
    assert (
        f"lake.{NAME}.0: offset 1: starts at 1, read up to {ends[0]}: {ends[0] - 1} offsets again"
        in (some.summary())
    )
    assert some.to_json()["partitions"][0]["ssp"] == f"lake.{NAME}.0"
    assert plan({part(0): StartpointOldest()}).action == "rewind", (
        "the oldest of some partitions is no rebuild"
    )
    assert plan({part(p): StartpointOldest() for p in (0, 1)}).action == "rebuild"
    grown = next(p for p in (0, 1) if int(world.streams.upcoming([part(p)])[part(p)]) > ends[p])
    skipping = plan({part(grown): at(ends[grown] + 1)})
    assert skipping.partitions[0].skipped == 1
    assert "refused" in skipping.summary()
    assert "it would skip the changes in between" in skipping.to_json()["refusal"]
    assert plan({part(grown): at(ends[grown] + 1)}, force=[part(grown)]).refusal is None
    assert StoredVersions(world.lake, NAME).read()[0] == before
    with pytest.raises(DatasetError, match=r"lake.other.0 is none of them"):
        plan({part(0, "other"): at(0)})
    with pytest.raises(OffsetOutOfRangeError) as caught:
        plan({part(0): at(99)})
    assert (
        caught.value.stream,
        caught.value.partition,
        caught.value.offset,
        caught.value.oldest,
    ) == ("lake.facts", 0, "99", "0")


def test_a_startpoint_that_was_applied_does_nothing_however_often_it_comes() -> None:
    world = table_with(FIRST, SECOND)
    wanted = tenfold(world, {0: 1})
    asked: dict[SystemStreamPartition, Startpoint] = {part(0): at(1)}
    first = rewind(world, table_of(extractor=TENFOLD), asked)
    assert (
        first.note
        == f"{int(reported(world).offsets[str(part(0))]) - 1} offsets of 1 partition(s) applied again"
    )
    assert now(world) == wanted
    manifest = reported(world)
    assert manifest.applied == {str(part(0)): (asked[part(0)].id,)}
    assert (manifest.change.action, manifest.change.reason) == ("rewind", "the filter was wrong")
    again = rewind(world, table_of(extractor=TENFOLD), asked)
    assert (again.action, again.note) == ("up-to-date", "its startpoints were applied before")
    assert reported(world) == manifest
    more = {**asked, part(1): StartpointOldest()}
    rewind(world, table_of(extractor=TENFOLD), more)
    positions = {**more, part(0): at(2)}
    plan = plan_rewind(
        table_of(extractor=TENFOLD), lake=world.lake, systems=world.systems, positions=positions
    )
    assert [partition.start for partition in plan.partitions] == ["2"], "only the new one counts"
    entry = StoredVersions(world.lake, NAME).history(limit=1)[0]
    assert (entry.action, entry.by, entry.reason) == ("rewind", "ada", "the filter was wrong")


def test_a_table_of_another_key_is_refused_before_anything_is_decided() -> None:
    world = table_with(FIRST)
    asked: dict[SystemStreamPartition, Startpoint] = {part(0): at(1)}
    rewind(world, table_of(), asked)
    before, other = (
        reported(world),
        replace(table_of(order_by="at"), key=("n",), partition_by=("n",)),
    )
    for attempt in (
        lambda: plan_rewind(
            other, lake=world.lake, systems=world.systems, positions={part(0): at(0)}
        ),
        lambda: rewind(world, other, asked),
        lambda: rewind(world, other, {part(p): StartpointOldest() for p in (0, 1)}),
        lambda: world.advance(other),
    ):
        with pytest.raises(DatasetError, match=r"key is \(n\), was \(k\)"):
            attempt()
    assert reported(world) == before


def test_what_is_after_the_table_is_refused_unless_forced() -> None:
    world = table_with(FIRST)
    spec = table_of()
    before = now(world)
    ends = dict(reported(world).offsets)
    facts.send(world, SECOND)
    upcoming = world.streams.upcoming([part(0), part(1)])
    for startpoint in (StartpointUpcoming(), StartpointSpecific(offset=upcoming[part(0)])):
        with pytest.raises(DatasetError, match=r"it would skip the changes in between"):
            rewind(world, spec, {part(0): startpoint, part(1): at(0)})
    with pytest.raises(DatasetError, match=r"startpoint of lake.facts.0"):
        rewind(world, spec, {part(0): StartpointUpcoming(), part(1): at(0)}, force=[part(1)])
    assert reported(world).offsets == ends
    assert not reported(world).applied
    skip = StartpointUpcoming()
    report = rewind(
        world, spec, {part(0): skip}, force=[part(0)], reason="a flood of nonsense", by="bob"
    )
    assert report.note.endswith(f"{int(upcoming[part(0)]) - int(ends[str(part(0))])} skipped")
    assert now(world) == before
    manifest = reported(world)
    assert manifest.offsets == {**ends, str(part(0)): upcoming[part(0)]}
    assert manifest.applied == {str(part(0)): (skip.id,)}
    entry = StoredVersions(world.lake, NAME).history(limit=1)[0]
    assert (entry.by, entry.reason) == ("bob", "a flood of nonsense")
    world.advance(spec)
    log = facts.Log()
    log.add(FIRST + SECOND)
    of_others = {key for key, _, _ in log.facts[1]}
    assert {k: n for k, n in now(world).items() if k not in of_others} == {
        k: n for k, n in before.items() if k not in of_others
    }
    assert reported(world).offsets == {str(ssp): end for ssp, end in upcoming.items()}


def test_a_forced_rebuild_from_a_truncated_stream_keeps_only_what_it_holds(world: World) -> None:
    world.spark = IN_PROCESS
    table = table_in(world, partitions=1)
    table.send(a=1)
    table.advance()
    table.send(b=2)
    table.advance()
    table.drop_the_front()
    oldest = {part(0, table.spec.name): StartpointOldest()}
    plan = plan_rewind(table.spec, lake=world.lake, systems=world.systems, positions=oldest)
    assert plan.action == "rebuild"
    with pytest.raises(
        DatasetError, match=r"does not hold all changes.*With force, the rebuild keeps only"
    ):
        rewind(world, table.spec, oldest)
    assert table.content == {"a": 1, "b": 2}
    back = rewind(world, table.spec, {part(0, table.spec.name): at(1)})
    assert (back.action, table.content) == ("rewound", {"a": 1, "b": 2}), "a rewind loses nothing"
    report = rewind(world, table.spec, oldest, force=True)
    assert (report.action, table.content) == ("bootstrapped", {"b": 2})
    assert rewind(world, table.spec, oldest, force=True).action == "up-to-date"


def test_a_rewind_builds_an_unmarked_table_from_the_oldest_offset_too() -> None:
    world = facts_in(lake_in(InMemoryStore()), IN_PROCESS)
    world.streams.configure(NAME, retention=None, compaction=None)
    facts.send(world, FIRST)
    spec = table_of(bootstrap=False)
    with pytest.raises(DatasetError, match="has no table yet"):
        rewind(world, spec, {part(0): StartpointOldest()})
    report = rewind(world, spec, {part(p): StartpointOldest() for p in (0, 1)})
    assert report.action == "bootstrapped"
    assert now(world) == {"a": 4, "c": 3, "d": 5}


def test_a_bootstrap_that_was_begun_is_ended_before_changes_are_applied_again() -> None:
    world = facts_in(lake_in(InMemoryStore()), IN_PROCESS)
    facts.send(world, FIRST + SECOND)
    spec = table_of(chunk=4)
    with pytest.raises(Crash):
        world.advance(spec, lake=facts.faulty(world, Fault("put_if_match", 2, "crash-before")))
    assert reported(world).bootstrap.state == "running"
    (planned,) = plan_rewind(
        spec, lake=world.lake, systems=world.systems, positions={part(0): at(0)}
    ).partitions
    assert planned.taken == reported(world).bootstrap.target[str(part(0))], (
        "what the bootstrap will have taken in"
    )
    spec = replace(spec, extractor=TENFOLD)
    report = rewind(world, spec, {part(0): at(0)})
    assert report.action == "rewound"
    assert reported(world).bootstrap.state == "done"
    log = facts.Log()
    log.add(FIRST + SECOND)
    of_first = {key for key, _, _ in log.facts[0]}
    expected = log.table(log.ends)
    entries = now(world)
    assert entries.keys() == expected.keys()
    assert {k: n for k, n in entries.items() if k in of_first} == {
        k: 10 * n for k, n in expected.items() if k in of_first
    }


def test_a_table_that_is_not_valid_is_not_rewound_but_can_be_rebuilt() -> None:
    world = table_with(FIRST)
    file = reported(world).version.generations[0].files[0]
    world.lake.store.delete(f"{reported(world).version.generations[0].folder}/{file.name}")
    with pytest.raises(DatasetError, match=r"is not valid .* the next advance would rebuild it"):
        rewind(world, table_of(), {part(0): at(0)})
    assert "is not valid" in str(
        plan_rewind(
            table_of(), lake=world.lake, systems=world.systems, positions={part(0): at(0)}
        ).refusal
    )
    rewind(world, table_of(), {part(p): StartpointOldest() for p in (0, 1)})
    assert now(world) == {"a": 4, "c": 3, "d": 5}


def test_bounded_datasets_and_tables_of_one_run_say_what_to_do_instead(world: World) -> None:
    versions = bounded_dataset("planes", input="lake.planes", key="k", broadcast=True)
    with pytest.raises(
        DatasetError, match=r"adjunct dataset rollback planes.*adjunct dataset accept planes"
    ):
        rewind(world, versions, {part(0, "planes"): at(0)}, force=True)
    passing = table_of(persistent=False)
    with pytest.raises(DatasetError, match="it is built in each run"):
        rewind(world, passing, {part(0): at(0)}, force=True)


def test_another_order_than_the_tables_is_refused_even_by_force() -> None:
    world = table_with(FIRST)
    with pytest.raises(
        DatasetError, match="is ordered by offset, and declared to be ordered by at"
    ):
        rewind(world, table_of(order_by="at"), {part(0): at(0)}, force=True)


# -- crashes and competitors

CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "a rewind": ({}, False),
    "a rewind with dead letters": ({"on_bad_change": DeadLetters(f"lake.{DEAD}")}, False),
    "a rebuild": ({}, True),
}


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("name", CASES)
def test_a_crash_at_any_request_leaves_it_applied_once_or_not_at_all(name: str) -> None:
    options, renewed = CASES[name]
    bad: list[Fact] = [(None, 11, 1), ("e", 12, 12)] if options else []
    begin = table_with(FIRST, SECOND + bad, **options)
    spec, before = table_of(**options), now(begin)
    starts = {0: 0, 1: 0} if renewed else {0: 1, 1: 0}
    after = tenfold(begin, starts) if not bad else {k: 10 * n for k, n in before.items()}
    positions: dict[SystemStreamPartition, Startpoint] = {
        part(p): StartpointOldest() if renewed else at(start) for p, start in starts.items()
    }
    spec = replace(spec, extractor=TENFOLD)
    sent = letters(begin)
    probe = _copy(begin)
    counted = FaultyStore(probe.lake.store)
    rewind(probe, spec, positions, lake=Lake(counted, probe.lake.id))
    assert now(probe) == after != before
    expected_letters = sorted(letters(probe))
    assert len(expected_letters) == len(sent) * 2
    faults: list[tuple[int, FaultKind]] = [
        (nth, "crash-before") for nth in deaths(counted.requests)
    ]
    faults += [
        (nth, "lost-after") for nth, (made, _) in enumerate(counted.requests, 1) if made in WRITES
    ]
    applied = set()
    for nth, kind in faults:
        where = f"{kind} at request {nth}: {counted.requests[nth - 1]}"
        world = _copy(begin)
        with suppress(Crash, StoreUnavailableError, CommitStateUnknownError, CommitConflictError):
            rewind(world, spec, positions, lake=facts.faulty(world, Fault("*", nth, kind)))
        assert now(world) in (before, after), where
        done = bool(reported(world).applied)
        applied.add(done)
        report = rewind(world, spec, positions)
        assert (report.action == "up-to-date") is done, where
        world.advance(spec)
        assert now(world) == after, where
        assert sorted(letters(world)) == expected_letters, where
        assert reported(world).applied == {
            str(ssp): (startpoint.id,) for ssp, startpoint in positions.items()
        }, where
    assert applied == {True, False}


@pytest.mark.parametrize("renewed", [False, True], ids=["rewind", "rebuild"])
def test_of_two_at_once_one_wins_and_the_other_does_nothing(renewed: bool) -> None:
    world = table_with(FIRST, SECOND)
    positions: dict[SystemStreamPartition, Startpoint] = {
        part(p): StartpointOldest() if renewed else at(0) for p in (0, 1)
    }
    wanted = tenfold(world, {0: 0, 1: 0})

    def other() -> None:
        assert rewind(world, table_of(extractor=TENFOLD), positions, by="the other").action in (
            "rewound",
            "bootstrapped",
        )

    report = rewind(
        world,
        table_of(extractor=TENFOLD),
        positions,
        lake=facts.faulty(world, Fault("put_if_match", 1, "meanwhile", other)),
    )
    assert report.action == "up-to-date"
    assert now(world) == wanted
    history = [
        (entry.action, entry.by) for entry in StoredVersions(world.lake, NAME).history(limit=None)
    ]
    assert "ada" not in {by for action, by in history if action in ("rewind", "bootstrap")}


def test_an_advance_that_comes_first_is_never_undone() -> None:
    world = table_with(FIRST)
    facts.send(world, SECOND)
    positions: dict[SystemStreamPartition, Startpoint] = {part(p): at(0) for p in (0, 1)}
    meanwhile = Fault(
        "put_if_match", 1, "meanwhile", lambda: world.advance(table_of(extractor=TENFOLD))
    )
    with pytest.raises(CommitConflictError):
        rewind(world, table_of(extractor=TENFOLD), positions, lake=facts.faulty(world, meanwhile))
    assert left_over(world, table_of(extractor=TENFOLD)) == set()
    assert not reported(world).applied
    rewind(world, table_of(extractor=TENFOLD), positions)
    log = facts.Log()
    log.add(FIRST + SECOND)
    assert now(world) == {key: 10 * n for key, n in log.table(log.ends).items()}


def test_a_compaction_meanwhile_is_no_conflict() -> None:
    world = table_with(FIRST, SECOND)
    wanted = tenfold(world, {0: 0})

    def compact() -> object:
        return compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")

    rewind(
        world,
        table_of(extractor=TENFOLD),
        {part(0): at(0)},
        lake=facts.faulty(world, Fault("put_if_match", 1, "meanwhile", compact)),
    )
    assert now(world) == wanted


def test_files_that_are_read_again_outlive_a_compaction_and_a_discard_meanwhile() -> None:
    world = table_with(FIRST, SECOND)
    wanted = tenfold(world, {0: 0})
    at_once = DiscardPolicy(keep=1, grace=timedelta(0))
    deleted: list[int] = []

    def discarded() -> None:
        compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
        deleted.append(discard(world.lake, NAME, at_once, by="test").objects)

    probe = _copy(world)
    counted = FaultyStore(probe.lake.store)
    rewind(probe, table_of(extractor=TENFOLD), {part(0): at(0)}, lake=Lake(counted, probe.lake.id))
    gets = [key for request, key in counted.requests if request == "get"]
    first_read = 1 + next(nth for nth, key in enumerate(gets) if "/data/" in key)
    lake = facts.faulty(world, Fault("get", first_read, "meanwhile", discarded))
    rewind(world, table_of(extractor=TENFOLD), {part(0): at(0)}, lake=lake)
    assert deleted == [0]
    assert now(world) == wanted


def test_where_there_is_nothing_to_apply_again_only_the_startpoint_is_recorded_once() -> None:
    world = table_with(FIRST)
    end = StartpointSpecific(offset=reported(world).offsets[str(part(0))])
    before = StoredVersions(world.lake, NAME).require_current().version
    meanwhile = Fault(
        "put_if_match", 1, "meanwhile", lambda: rewind(world, table_of(), {part(0): end})
    )
    rewind(world, table_of(), {part(0): end}, lake=facts.faulty(world, meanwhile))
    assert [entry.action for entry in StoredVersions(world.lake, NAME).history(limit=None)].count(
        "rewind"
    ) == 1
    assert StoredVersions(world.lake, NAME).require_current().version == before


def test_a_table_without_bootstrap_can_go_back_to_before_it_began() -> None:
    world = facts_in(lake_in(InMemoryStore()), IN_PROCESS)
    spec = table_of(bootstrap=False)
    facts.send(world, FIRST)
    world.advance(spec)
    world.advance(spec)
    manifest = reported(world)
    begun = manifest.model_copy(
        update={
            "bootstrap": manifest.bootstrap.model_copy(update={"start": dict(manifest.offsets)})
        }
    )
    StoredVersions(world.lake, NAME).log.transact(lambda _: begun, by="test")
    rewind(world, spec, {part(p): at(0) for p in (0, 1)})
    offsets = StoredVersions(world.lake, NAME).require_current().sealed.offsets
    assert {start for start, _ in offsets.values()} == {"0"}, (
        "the version says from where it has read"
    )


def _copy(world: World) -> World:
    copy = InMemoryStore()
    copy._objects.update(world.lake.store._objects)  # type: ignore[attr-defined]
    return World(Lake(copy, world.lake.id), IN_PROCESS, dict(world.sequences))
