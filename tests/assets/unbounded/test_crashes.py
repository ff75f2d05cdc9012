"""The process ends between any two requests of an advance or a compaction: the next run ends as
if nothing had been.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.policies import DeadLetters, DeltaCompaction, DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    CommitStateUnknownError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.cycle import make_older
from tests.assets.unbounded import killed
from tests.assets.unbounded.facts import (
    DEAD,
    NAME,
    Fact,
    content,
    facts_in,
    faulty,
    letters,
    send,
    table_of,
)
from tests.assets.unbounded.tables import left_over
from tests.faulty_store import WRITES, Crash, Fault, FaultKind, FaultyStore, deaths

HOUR = timedelta(hours=1)
AT_ONCE = DiscardPolicy(keep=1, grace=timedelta(0))
FIRST: list[Fact] = [
    ("a", 1, 1),
    ("b", 2, 2),
    ("c", 3, 3),
    ("a", 4, 4),
    ("d", 5, 5),
    ("b", 6, None),
]
SECOND: list[Fact] = [("a", 7, None), ("e", 8, 8), ("c", 2, 9), ("b", 9, 10), ("d", 10, 11)]
BAD: list[Fact] = [(None, 11, 1), ("a", 12, 12), (None, 13, None)]
WITH_LETTERS: dict[str, Any] = {"on_bad_change": DeadLetters(f"lake.{DEAD}")}


@dataclass(frozen=True)
class Case:
    """What was there before, and what the run does that dies."""

    options: dict[str, Any]
    before: tuple[list[Fact], ...]
    sent: list[Fact]
    act: str = "advance"
    kill_at: tuple[float, ...] = ()

    @property
    def spec(self) -> AdjunctDataset:
        return table_of(**self.options)


CASES = {
    "a commit": Case({}, (FIRST,), SECOND, kill_at=(0.4, 0.7, 1)),
    "a commit that compacts": Case(
        {"compaction": DeltaCompaction(deltas=2)}, (FIRST, SECOND), [("c", 9, 1)]
    ),
    "a commit of several chunks": Case({"chunk": 2}, (FIRST,), SECOND),
    "a commit by position": Case({"order_by": "at", "keep_tombstones": 4}, (FIRST,), SECOND),
    "a bootstrap": Case({}, (), FIRST),
    "a bootstrap of several chunks": Case(
        {"chunk": 2}, (), FIRST + SECOND, kill_at=(0.3, 0.6, 0.9)
    ),
    "a bootstrap with dead letters": Case({"chunk": 3, **WITH_LETTERS}, (), BAD + SECOND[:2] + BAD),
    "a long bootstrap with dead letters": Case(
        {"chunk": 3, **WITH_LETTERS}, (), FIRST + BAD + SECOND + BAD
    ),
    "an empty table": Case({"bootstrap": False}, (), FIRST),
    "a commit with dead letters": Case(
        WITH_LETTERS, (FIRST,), BAD + SECOND + BAD, kill_at=(0.5, 0.7, 0.9)
    ),
    "a second commit with dead letters": Case(WITH_LETTERS, (FIRST + BAD, BAD), BAD),
    "a commit of dead letters alone": Case(WITH_LETTERS, (FIRST,), [(None, 1, 1)]),
    "chunks with dead letters": Case({"chunk": 2, **WITH_LETTERS}, (FIRST,), BAD + SECOND + BAD),
    "a minor compaction": Case({}, (FIRST, SECOND, [("a", 1, 1)]), [], "minor"),
    "a major compaction": Case(
        {}, (FIRST, SECOND, [("a", 1, 1)]), [], "major", kill_at=(0.5, 0.75, 0.95)
    ),
    "a major compaction that forgets": Case(
        {"order_by": "at", "keep_tombstones": 4}, (FIRST, SECOND, [("a", 20, None)]), [], "major"
    ),
}
# Chunks with dead letters are in the bootstrap, a commit with them is by itself: this one is both.
AT_LENGTH = {
    "chunks with dead letters",
    "a bootstrap with dead letters",
    "a long bootstrap with dead letters",
}
AT_LENGTH |= {"a bootstrap of several chunks"}  # killed with it, too


def prepared(case: Case, lake: Lake) -> World:
    world = facts_in(lake, IN_PROCESS)
    for facts in case.before:
        send(world, facts)
        settle(world, case.spec)
    if case.sent:
        send(world, case.sent)
    return world


def settle(world: World, spec: AdjunctDataset) -> None:
    """Advance until there is nothing to do."""
    for _ in range(3):
        if world.advance(spec).action == "up-to-date":
            return
    pytest.fail("it never ends")


def copy_of(world: World) -> World:
    """Return a copy, in memory, of a lake in memory."""
    copy = InMemoryStore()
    copy._objects.update(world.lake.store._objects)  # type: ignore[attr-defined]
    return World(Lake(copy, world.lake.id), IN_PROCESS, dict(world.sequences))


def an_hour_later(lake: Lake) -> None:
    if isinstance(lake.store, InMemoryStore):
        objects = lake.store._objects
        objects.update(
            {
                key: (data, replace(info, modified=info.modified - HOUR))
                for key, (data, info) in objects.items()
            }
        )
    else:
        make_older(lake, HOUR)


def act(world: World, case: Case, lake: Lake | None = None) -> None:
    if case.act == "advance":
        world.advance(case.spec, lake=lake)
    else:
        compact_dataset(lake or world.lake, NAME, spark=IN_PROCESS, by="test", level=case.act)  # type: ignore[arg-type]


def states(world: World) -> list[dict[str, int]]:
    """Return what each commit serves, oldest first."""
    store = StoredVersions(world.lake, NAME)
    if store.manifest() is None:
        return []
    views = [store.reader_of(manifest) for _, manifest in store.log.history()]
    return [content(view) for view in reversed(views) if view is not None]


def outcome(world: World, case: Case) -> dict[str, object]:
    """Return what is to be the same whether a run has died or not, once all is read, compacted
    and discarded.
    """
    settle(world, case.spec)
    if case.act != "advance":
        act(world, case)
    manifest = StoredVersions(world.lake, NAME).require_manifest()
    assert manifest.bootstrap is not None
    facts = {
        "content": content(StoredVersions(world.lake, NAME).require_current()),
        "offsets": manifest.offsets,
        "counted": {name: manifest.counters.get(name, 0) for name in ("read", "quarantined")},
        "letters": sorted(letters(world)),
        "bootstrap": (manifest.bootstrap.state, manifest.bootstrap.target),
        "horizon": manifest.horizon,
    }
    an_hour_later(world.lake)
    discard(world.lake, NAME, AT_ONCE, by="test")
    assert left_over(world, case.spec) == set()
    assert content(StoredVersions(world.lake, NAME).require_current()) == facts["content"]
    return facts


def check(
    world: World, case: Case, allowed: list[dict[str, int]], expected: dict[str, object], where: str
) -> None:
    """Nothing but whole states is served after the end of a run, and the next ones end as if it
    had not been.
    """
    for state in states(world):
        assert state in allowed, f"{where}: neither a state before nor after a commit is served"
    sent = letters(world)
    assert len(set(sent)) == len(sent), where
    assert outcome(world, case) == expected, where


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name in AT_LENGTH else name for name in CASES],
)
def test_what_dies_at_any_request_is_taken_up(name: str) -> None:
    case = CASES[name]
    begin = prepared(case, lake_in(InMemoryStore()))
    whole = copy_of(begin)
    act(whole, case)
    allowed = states(whole)
    expected = outcome(whole, case)
    probe = copy_of(begin)
    counted = FaultyStore(probe.lake.store)
    act(probe, case, Lake(counted, probe.lake.id))
    # After a request is before the next one; the reply to a read may be lost without any harm.
    lost: list[tuple[int, FaultKind]] = [
        (nth, "lost-after") for nth, (made, _) in enumerate(counted.requests, 1) if made in WRITES
    ]
    assert len(counted.requests) + len(lost) >= 10
    faults: list[tuple[int, FaultKind]] = [
        (nth, "crash-before") for nth in deaths(counted.requests)
    ]
    faults += [*lost, (len(counted.requests), "crash-after")]
    for nth, kind in faults:
        where = f"{kind} at request {nth}: {counted.requests[nth - 1]}"
        copy = copy_of(begin)
        try:
            act(copy, case, faulty(copy, Fault("*", nth, kind)))
        except Crash:
            assert kind != "lost-after"
        except (StoreUnavailableError, CommitStateUnknownError, CommitConflictError):
            assert kind == "lost-after", where
        else:
            assert kind == "lost-after", where
        check(copy, case, allowed, expected, where)


@pytest.mark.lengthy
def test_dead_letters_are_sent_once_though_more_has_come_since_the_crash() -> None:
    """Who takes over must send the letters of the very changes that the other one has sent, and
    no others with them.
    """
    case = CASES["a commit with dead letters"]
    begin = prepared(case, lake_in(InMemoryStore()))
    outcomes, nth = set(), 0
    while True:
        nth += 1
        copy = copy_of(begin)
        try:
            act(copy, case, faulty(copy, Fault("*", nth, "crash-before")))
        except Crash:
            pass
        else:
            break
        outcomes.add(len(letters(copy)))
        send(copy, [*BAD, ("b", 30, 30), (None, 31, 31)])
        settle(copy, case.spec)
        sent = letters(copy)
        assert len(sent) == len(set(sent)) == 7, nth
        manifest = StoredVersions(copy.lake, NAME).require_manifest()
        assert manifest.counters["quarantined"] == 7, nth
        assert content(StoredVersions(copy.lake, NAME).require_current())["b"] == 30
    assert outcomes == {0, 4}


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param(name, part, marks=[pytest.mark.long] * (number != 1))
        for name, case in CASES.items()
        for number, part in enumerate(case.kill_at)
    ],
)
def test_what_is_killed_is_taken_up(name: str, part: float, tmp_path: Path) -> None:
    case = CASES[name]
    begin = prepared(case, open_lake(tmp_path / "begin"))
    shutil.copytree(begin.lake.url, tmp_path / "whole")
    whole = World(open_lake(tmp_path / "whole"), IN_PROCESS, dict(begin.sequences))
    counted = faulty(whole)
    act(whole, case, counted)
    allowed = states(whole)
    expected = outcome(whole, case)
    nth = max(1, round(part * len(counted.store.requests)))  # type: ignore[attr-defined]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.assets.unbounded.killed"])
    process = context.Process(
        target=killed.act_until_request, args=(begin.lake.url, case.options, case.act, nth)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    check(begin, case, allowed, expected, f"killed before request {nth}")
