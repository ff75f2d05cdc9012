"""Datasets whose stream is rewritten into other partitions: who had read all goes on, nothing is
lost or doubled.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.assets.bounded.advance import advance_version_set
from dagster_adjunct.assets.declaration.dataset import bounded_dataset, version_set
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.errors import OffsetOutOfRangeError
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.repartition import repartition
from tests.assets.conftest import World
from tests.assets.cycle import KEYS as PLANE_KEYS
from tests.assets.cycle import NAME as PLANES_NAME
from tests.assets.cycle import PLANES, SCHEMA, content, deliver, planes_in, publish, served, whole
from tests.assets.unbounded import facts as f
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.rounds import rounds


def rewrite(world: World, stream: str, partitions: int) -> None:
    repartition(
        world.streams, stream, partitions, reason="more", by="ada", check=lambda state: None
    )


def table(spec: Any = None) -> World:
    world = f.facts_in(lake_in(InMemoryStore()), IN_PROCESS)
    f.send(world, [("a", 5, 1), ("b", 6, 2), ("c", 7, 3), ("b", 8, None)])
    world.advance(spec or f.table_of())
    return world


def now(world: World) -> dict[str, int]:
    return f.content(StoredVersions(world.lake, f.NAME).require_current())


change = st.tuples(st.sampled_from(f.KEYS), st.integers(1, 40), st.none() | st.integers(0, 9))
step = st.one_of(
    st.tuples(st.just("apply"), st.lists(change, min_size=1, max_size=6)),
    st.tuples(st.just("stream"), st.integers(1, 5)),
    st.tuples(st.just("compact"), st.sampled_from(["minor", "major"])),
)


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("by_position", [False, True])
@settings(max_examples=rounds(8, 20))
@given(st.lists(step, min_size=2, max_size=9))
def test_a_table_follows_through_any_rewriting_of_its_stream(
    by_position: bool, steps: list
) -> None:
    """The last change that was sent wins, or the highest `at`, however offsets began anew in
    between.
    """
    spec = f.table_of(**({"order_by": "at"} if by_position else {}))
    world, newest, partitions, read = (
        f.facts_in(lake_in(InMemoryStore()), IN_PROCESS),
        {},
        f.PARTITIONS,
        0,
    )
    for what, value in [("apply", [("a", 20, 1), ("b", 21, None)]), *steps]:
        if what == "apply":
            f.send(world, value)
            read += len(value)
            for key, at, n in value:
                if not by_position or at >= newest.get(key, (0, 0))[0]:
                    newest[key] = (at, n)
        elif what == "stream" and value != partitions:
            rewrite(world, f.NAME, value)
            partitions = value
        elif what == "compact":
            compact_dataset(world.lake, f.NAME, spark=IN_PROCESS, by="test", level=value)
        world.advance(spec)
        assert now(world) == {key: n for key, (_, n) in newest.items() if n is not None}
        assert StoredVersions(world.lake, f.NAME).require_manifest().counters["read"] == read


def test_the_history_says_that_a_table_was_carried_over() -> None:
    world = table()
    before = StoredVersions(world.lake, f.NAME).require_manifest()
    rewrite(world, f.NAME, 5)
    assert world.advance(f.table_of()).action == "up-to-date"
    entry = StoredVersions(world.lake, f.NAME).history()[0]
    assert (entry.action, entry.reason) == (
        "carry",
        "lake.facts was repartitioned into 5: continues where it had read to",
    )
    after = StoredVersions(world.lake, f.NAME).require_manifest()
    assert (len(after.offsets), after.version) == (5, before.version)
    assert world.advance(f.table_of()).action == "up-to-date"
    assert StoredVersions(world.lake, f.NAME).require_manifest() == after


def test_a_table_that_had_not_read_all_is_refused_and_names_the_rewriting() -> None:
    world = table()
    f.send(world, [("d", 9, 4)])
    rewrite(world, f.NAME, 5)
    with pytest.raises(
        OffsetOutOfRangeError,
        match=r"when that was rewritten into 5 partition.*dataset rebuild facts",
    ):
        world.advance(f.table_of())
    assert now(world) == {"a": 1, "c": 3}


def test_dead_letters_after_the_rewriting_are_not_taken_for_those_of_before() -> None:
    spec = f.table_of(on_bad_change=DeadLetters(f"lake.{f.DEAD}"))
    world = table(spec)
    f.send(world, [(None, 9, 1), (None, 10, 2)])
    world.advance(spec)
    assert len(f.letters(world)) == 2
    rewrite(world, f.NAME, 5)
    world.advance(spec)
    f.send(world, [(None, 11, 3)])
    world.advance(spec)
    assert len(f.letters(world)) == 3


@pytest.mark.lengthy
def test_a_crash_while_it_is_carried_over_loses_and_doubles_nothing() -> None:
    for nth in range(1, 100):
        world = table()
        rewrite(world, f.NAME, 5)
        f.send(world, [("a", 9, 9), ("c", 10, None), ("e", 11, 5)])
        store = FaultyStore(world.lake.store, [Fault("*", nth, "crash-after")])
        try:
            world.advance(f.table_of(), lake=Lake(store, world.lake.id))
        except Crash:
            world.advance(f.table_of())
        assert now(world) == {"a": 9, "e": 5}
        assert StoredVersions(world.lake, f.NAME).require_manifest().counters["read"] == 7
        if nth > len(store.requests):
            return
    raise AssertionError("it never ends")


def test_a_bounded_dataset_goes_on_between_versions() -> None:
    world = planes_in(lake_in(InMemoryStore()))
    publish(world, 1, 2)
    rewrite(world, PLANES_NAME, 5)
    publish(world, 3)
    store = StoredVersions(world.lake, PLANES_NAME)
    assert [content(store.version(ref.id)) for ref in store.versions()] == [
        whole(1),
        whole(2),
        whole(3),
    ]
    assert [entry.action for entry in store.history()][:2] == ["seal", "carry"]
    # again, under a name that was taken: dropped and told
    world.send(PLANES_NAME, [("a", 99)], version="v2")
    report = world.advance(PLANES)
    assert any("was delivered again" in warning for warning in report.warnings)
    assert served(world.lake) == whole(3)


def test_a_bounded_dataset_with_a_version_half_delivered_is_refused() -> None:
    world = planes_in(lake_in(InMemoryStore()))
    publish(world, 1)
    world.send(PLANES_NAME, [("a", 2)])
    world.advance(PLANES)
    rewrite(world, PLANES_NAME, 5)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        world.advance(PLANES)
    assert (caught.value.dataset, caught.value.stream) == ("planes", "lake.planes")
    assert served(world.lake) == whole(1)


def test_members_of_a_version_set_go_on_in_one_commit() -> None:
    world = planes_in(lake_in(InMemoryStore()))
    world.stream("routes", SCHEMA, ["k"], 2)
    both = version_set(
        "both", PLANES, bounded_dataset("routes", input="lake.routes", key="k", partitions=2)
    )

    def advance() -> list[str]:
        return [
            report.action
            for report in advance_version_set(
                both, lake=world.lake, systems=world.systems, spark=IN_PROCESS, by="test"
            )
        ]

    deliver(world, 1)
    world.send("routes", [(key, 1) for key in PLANE_KEYS], version="v1")
    assert advance() == ["sealed", "sealed"]
    world.send("routes", [(key, 2) for key in PLANE_KEYS], version="v2")
    assert advance() == ["waiting", "waiting"]
    rewrite(world, PLANES_NAME, 5)  # planes has read all of its stream, and the other waits for it
    assert advance() == ["waiting", "waiting"]
    deliver(world, 2)
    assert advance() == ["sealed", "sealed"]
    assert served(world.lake) == served(world.lake, "routes") == whole(2)
