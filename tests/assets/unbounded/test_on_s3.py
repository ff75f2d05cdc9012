"""The life of a table on a real S3 server: bootstrap, follow, sudden ends, compaction, recovery,
discarding, races.

Spark reads and writes such tables on S3 in tests/examples/test_main_job_elsewhere.py; here it is
left out.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from dagster_adjunct.assets.declaration.policies import DeadLetters, DiscardPolicy
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.errors import CommitConflictError, VersionDiscardedError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.unbounded.facts import (
    DEAD,
    NAME,
    content,
    facts_in,
    faulty,
    letters,
    send,
    table_of,
)
from tests.assets.unbounded.tables import left_over
from tests.faulty_store import Crash, Fault
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.server
AT_ONCE = DiscardPolicy(keep=1, grace=timedelta(0))
SPEC = table_of(chunk=2, on_bad_change=DeadLetters(f"lake.{DEAD}"))


@pytest.fixture
def world(versitygw: S3Server, monkeypatch: pytest.MonkeyPatch) -> World:
    versitygw.set_in(monkeypatch)
    return facts_in(open_lake(versitygw.url()), IN_PROCESS)


def now(world: World) -> dict[str, int]:
    with open_dataset(world.lake, NAME) as served:
        return content(served)


def compact(world: World) -> str:
    return compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major").action


def test_bootstrap_follow_compact_discard(world: World) -> None:
    send(world, [("a", 1, 1), ("b", 2, 2), (None, 3, 3), ("a", 4, 4), ("c", 5, 5)])
    report = world.advance(SPEC)
    assert (report.action, report.decision.action) == ("bootstrapped", "bootstrap")
    assert now(world) == {"a": 4, "b": 2, "c": 5}
    first = StoredVersions(world.lake, NAME).require_current().version
    send(world, [("b", 6, None), ("d", 7, 7), ("nobody", 8, None)])
    assert world.advance(SPEC).action == "applied"
    assert now(world) == {"a": 4, "c": 5, "d": 7}
    assert len(letters(world)) == 1
    store = StoredVersions(world.lake, NAME)
    with open_dataset(world.lake, NAME, version=first) as held:
        held.take_lease()
        assert compact(world) == "compacted"
        discard(world.lake, NAME, AT_ONCE, by="test")
        assert content(held) == {"a": 4, "b": 2, "c": 5}, "what is held stays"
    assert content(store.version(as_of=store.version(first).sealed.number)) == {
        "a": 4,
        "b": 2,
        "c": 5,
    }
    discard(world.lake, NAME, AT_ONCE, by="test")
    with pytest.raises(VersionDiscardedError):
        store.version(first)
    assert now(world) == {"a": 4, "c": 5, "d": 7}
    assert len(store.require_current().sealed.generations) == 1
    assert left_over(world, SPEC) == set()
    assert world.advance(SPEC).action == "up-to-date"


@pytest.mark.long  # on another store: test_crashes.py
def test_what_dies_at_any_request_is_taken_up(world: World) -> None:
    """The same table, run after run: each sends something, dies one request later than the last
    one, and goes on.
    """
    send(world, [("a", 0, 0), ("b", 0, 0)])
    world.advance(SPEC)
    nth = dead = 0
    while True:
        nth += 1
        send(world, [("a", nth, nth), (None, nth, nth), ("b", nth, None if nth % 2 else nth)])
        lake = faulty(world, Fault("*", nth, "crash-before"))
        try:
            world.advance(SPEC, lake=lake)
        except Crash:
            dead += 1
        else:
            break
        world.advance(SPEC)
        world.advance(SPEC)
        assert now(world) == {"a": nth} | ({} if nth % 2 else {"b": nth})
        assert len(letters(world)) == len(set(letters(world))) == nth
        if nth % 5 == 0:
            assert compact(world) == "compacted"
    assert dead > 10


def test_a_table_whose_file_is_lost_is_rebuilt(world: World) -> None:
    send(world, [("a", 1, 1), ("b", 2, 2)])
    world.advance(SPEC)
    generation = StoredVersions(world.lake, NAME).require_current().sealed.generations[0]
    world.lake.store.delete(f"{generation.folder}/{generation.files[0].name}")
    report = world.advance(SPEC)
    assert (report.action, report.decision.store) == ("bootstrapped", "invalid")
    assert now(world) == {"a": 1, "b": 2}


def test_of_two_writers_one_counts(world: World) -> None:
    conflicts = 0
    for nth in (1, 4, 7, 10, 13, 16):
        send(world, [("a", nth, nth), ("b", nth, nth)])
        try:
            world.advance(
                SPEC, lake=faulty(world, Fault("*", nth, "meanwhile", lambda: world.advance(SPEC)))
            )
        except CommitConflictError:
            conflicts += 1
        assert now(world) == {"a": nth, "b": nth}
        assert world.advance(SPEC).action == "up-to-date"
    assert StoredVersions(world.lake, NAME).require_manifest().counters["read"] == 12, (
        "nothing twice"
    )
    assert conflicts > 0
