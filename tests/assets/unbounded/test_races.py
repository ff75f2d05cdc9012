"""Writers, compactions, discards and readers at once: one writer wins, readers meet whole
states, never older.
"""

from __future__ import annotations

import multiprocessing
import queue
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.errors import CommitConflictError
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets import reading
from tests.assets.conftest import World
from tests.assets.reading import CODES, DATASET
from tests.assets.unbounded import killed
from tests.assets.unbounded.facts import (
    BY_HAND,
    NAME,
    Fact,
    content,
    facts_in,
    faulty,
    send,
    table_of,
)
from tests.assets.unbounded.tables import left_over
from tests.faulty_store import Fault
from tests.rounds import rounds

AT_ONCE = DiscardPolicy(keep=1, grace=timedelta(0))
SPEC = table_of()
FIRST: list[Fact] = [("a", 1, 1), ("b", 2, 2), ("c", 3, 3)]
SECOND: list[Fact] = [("a", 4, None), ("b", 5, 5), ("d", 6, 6)]
THIRD: list[Fact] = [("a", 7, 7), ("d", 8, None)]
ROUNDS, COMMITS = 6, 24


def table_with(*commits: list[Fact], unread: list[Fact] | None = None, spec: Any = SPEC) -> World:
    world = facts_in(lake_in(InMemoryStore()), IN_PROCESS)
    for facts in commits:
        send(world, facts)
        world.advance(spec)
    if unread:
        send(world, unread)
    return world


def now(world: World) -> dict[str, int]:
    return content(StoredVersions(world.lake, NAME).require_current())


def compact(world: World, level: Any = "major", lake: Lake | None = None) -> Any:
    return compact_dataset(lake or world.lake, NAME, spark=IN_PROCESS, by="test", level=level)


def read_in_all(world: World) -> int:
    return StoredVersions(world.lake, NAME).require_manifest().counters["read"]


# -- somebody else at any request of ours


@pytest.mark.lengthy
@pytest.mark.parametrize("before", [[], [FIRST]], ids=["bootstrap", "commit"])
def test_of_two_writers_at_any_moment_one_counts(before: list[list[Fact]]) -> None:
    conflicts, nth, requests = 0, 0, 1
    while nth < requests:
        nth += 1
        world = table_with(*before, unread=SECOND)
        lake = faulty(world, Fault("*", nth, "meanwhile", lambda w=world: w.advance(SPEC)))
        try:
            world.advance(SPEC, lake=lake)
        except CommitConflictError:
            conflicts += 1
        requests = max(requests, len(lake.store.requests))  # type: ignore[attr-defined]
        assert now(world) == ({"b": 5, "c": 3, "d": 6} if before else {"b": 5, "d": 6}), nth
        assert read_in_all(world) == len(SECOND) + sum(map(len, before)), (
            "a record was applied twice, or never"
        )
        assert left_over(world, SPEC) == set(), f"{nth}: the loser left something"
        assert world.advance(SPEC).action == "up-to-date"
    assert conflicts > 2


@pytest.mark.rounds
@pytest.mark.lengthy
@pytest.mark.parametrize("level", [pytest.param("minor", marks=pytest.mark.long), "major"])
def test_a_commit_at_any_moment_of_a_compaction_is_not_lost(level: str) -> None:
    nth, requests = 0, 1
    while nth < requests:
        nth += rounds(2, 1)
        world = table_with(FIRST, SECOND, [("c", 7, 9)], unread=THIRD)
        lake = faulty(world, Fault("*", nth, "meanwhile", lambda w=world: w.advance(SPEC)))
        assert compact(world, level, lake).action == "compacted"
        requests = max(requests, len(lake.store.requests))  # type: ignore[attr-defined]
        if len(lake.store.requests) < nth:  # type: ignore[attr-defined]
            break  # nobody came
        assert now(world) == {"a": 7, "b": 5, "c": 9}, nth
        assert left_over(world, SPEC) == set()
        compact(world)
        assert now(world) == {"a": 7, "b": 5, "c": 9}, nth


@pytest.mark.rounds
@pytest.mark.lengthy
def test_a_compaction_and_a_discard_at_any_moment_of_a_commit_cost_it_nothing() -> None:
    nth, requests = 0, 1
    refused: list[str] = []
    while nth < requests:
        nth += rounds(2, 1)
        world = table_with(FIRST, SECOND, unread=THIRD)

        def meanwhile(world: World = world) -> None:
            compact(world)
            discard(world.lake, NAME, AT_ONCE, by="other")

        lake = faulty(world, Fault("*", nth, "meanwhile", meanwhile))
        try:
            assert world.advance(SPEC, lake=lake).action == "applied"
        except (
            CommitConflictError
        ) as conflict:  # the files of the version that it read were discarded before it looked
            refused.append(str(conflict))
            assert world.advance(SPEC).action == "applied"
        requests = max(requests, len(lake.store.requests))  # type: ignore[attr-defined]
        assert now(world) == {"a": 7, "b": 5, "c": 3}, nth
        assert read_in_all(world) == 8
        discard(world.lake, NAME, AT_ONCE, by="after")
        assert now(world) == {"a": 7, "b": 5, "c": 3}
        assert left_over(world, SPEC) == set()
    assert len(refused) < 5
    assert all("another writer committed first" in problem for problem in refused)


@pytest.mark.rounds
@pytest.mark.lengthy
def test_a_late_change_at_any_moment_of_a_compaction_restores_no_deleted_row() -> None:
    """The deletion of "a" at 4 goes with the compaction; "a" at 3 comes while it runs, or after
    it.
    """
    spec = table_of(order_by="at", keep_tombstones=5)
    late: list[Fact] = [("a", 3, 99), ("e", 21, 1)]
    nth, requests = 0, 1
    while nth < requests:
        nth += rounds(2, 1)
        world = table_with(FIRST, SECOND, [("c", 20, 20)], unread=late, spec=spec)
        lake = faulty(world, Fault("*", nth, "meanwhile", lambda w=world: w.advance(spec)))
        assert compact(world, "major", lake).action == "compacted"
        requests = max(requests, len(lake.store.requests))  # type: ignore[attr-defined]
        world.advance(spec)
        assert now(world) == {"b": 5, "c": 20, "d": 6, "e": 1}, nth
        compact(world)
        assert now(world) == {"b": 5, "c": 20, "d": 6, "e": 1}, nth


@pytest.mark.long  # at any moment: test_of_two_writers_at_any_moment_one_counts
@pytest.mark.lengthy
def test_two_writers_in_processes_of_their_own(tmp_path: Path) -> None:
    url = str(tmp_path / "lake")
    world = facts_in(open_lake(url), IN_PROCESS)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.assets.reading", "tests.assets.unbounded.killed"])
    start, reported = context.Barrier(3), context.Queue()
    writers = [
        context.Process(target=killed.advance_meanwhile, args=(url, {}, ROUNDS, start, reported))
        for _ in range(2)
    ]
    for writer in writers:
        writer.start()
    try:
        for number in range(1, ROUNDS + 1):
            send(world, [("a", number, number), ("b", number, number), ("c", number, number)])
            start.wait(killed.PATIENCE)
            outcomes = [reported.get(timeout=killed.PATIENCE) for _ in writers]
            assert sum(read for _, read, _ in outcomes) == 3, outcomes
            won, lost = sorted(outcomes, key=lambda outcome: -outcome[1])
            assert won[0] == ("bootstrapped" if number == 1 else "applied")
            assert lost[0] in ("conflict", "up-to-date"), outcomes
            assert now(world) == {"a": number, "b": number, "c": number}
            assert read_in_all(world) == 3 * number
            assert left_over(world, SPEC) == set(), "the loser left nothing"
            start.wait(killed.PATIENCE)
    finally:
        for writer in writers:
            writer.join(60)
            writer.kill()
    assert [writer.exitcode for writer in writers] == [0, 0]


# -- readers in processes of their own


@pytest.mark.long  # at any request: test_unbounded_discard.py
@pytest.mark.lengthy
def test_readers_meet_whole_states_during_commits_compactions_and_discards(tmp_path: Path) -> None:
    """Each commit sets every key to its number, so a mix, a missing key and an older state are
    all seen.
    """
    url = str(tmp_path / "lake")
    world = World(open_lake(url), IN_PROCESS)
    world.stream(DATASET, reading.SCHEMA, ["code"], 2)
    spec = unbounded_dataset(
        DATASET, input=f"lake.{DATASET}", key="code", partitions=2, compaction=BY_HAND
    )
    commit(world, spec, 1)
    compacted = 0
    gone: queue.Queue[str] = queue.Queue()
    ways = ["serve", "open", "serve"]
    with (
        reading.reading(url, {}, ways, 0.1) as (readers, matched),
        reading.discarding(url, gone) as problems,
    ):
        for number in range(2, COMMITS + 1):
            commit(world, spec, number)
            if number % 3 == 0:
                level: Any = "minor" if number % 2 else "major"
                compacted += compact_dataset(
                    world.lake, DATASET, spark=IN_PROCESS, by="test", level=level
                ).changed
            while number % 6 == 0 and matched.get(timeout=reading.PATIENCE) not in (number, -1):
                pass
        assert [gone.get(timeout=reading.PATIENCE) for _ in range(5)], (
            "they are discarded while others read"
        )
    assert [seen.problem for seen in readers] == [""] * len(ways)
    assert problems == []
    assert compacted > 4
    assert len({number for seen in readers for number in seen.whole}) > 3
    assert not list(world.lake.store.list(f"datasets/{DATASET}/leases/")), (
        "every reader gave its leases back"
    )


def commit(world: World, spec: Any, number: int) -> None:
    world.send(DATASET, [(code, number) for code in CODES])
    world.advance(spec)
