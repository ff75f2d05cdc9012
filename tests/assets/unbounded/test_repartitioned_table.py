"""A change stream's table rewritten into other partitions: what a dictionary says, under
readers, races and crashes.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.verification import verify_version
from dagster_adjunct.assets.rebucketing import RebucketReport, repartition_table
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.retention.erasure import erase_keys
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.resources.bucketing.hashing import bucket_of_key
from dagster_adjunct.resources.errors import (
    AdjunctError,
    CommitConflictError,
    ConfigurationError,
    DatasetError,
    StillReadError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.unbounded import tables
from tests.assets.unbounded.facts import (
    BY_HAND,
    KEYS,
    NAME,
    Fact,
    Log,
    content,
    facts_in,
    faulty,
    send,
    spans_of,
    table_of,
)
from tests.assets.unbounded.tables import left_over
from tests.faulty_store import Crash, Fault, deaths
from tests.rounds import rounds

WHY: dict[str, Any] = {"reason": "more machines", "by": "ada"}
SPEC, MORE = table_of(), table_of(partitions=5)
FIRST: list[Fact] = [("a", 1, 1), ("b", 2, 2), ("c", 3, 3)]
SECOND: list[Fact] = [("a", 4, None), ("b", 5, 5), ("d", 6, 6)]
THIRD: list[Fact] = [("a", 7, 7), ("d", 8, None)]


def table_with(*commits: list[Fact], spec: AdjunctDataset = SPEC) -> World:
    world = facts_in(lake_in(InMemoryStore()), IN_PROCESS)
    for facts in commits:
        send(world, facts)
        world.advance(spec)
    return world


def rewrite(
    world: World, partitions: int = 5, lake: Lake | None = None, **options: Any
) -> RebucketReport:
    return repartition_table(lake or world.lake, NAME, partitions, **{**WHY, **options})


def check(world: World, log: Log) -> int:
    """What is served is what the facts say, lies where its hash says, and is whole; return its
    partitions.
    """
    view = StoredVersions(world.lake, NAME).require_current()
    starts, ends = spans_of(view)
    assert content(view) == log.table(ends, starts)
    partitions = view.sealed.partitions
    assert partitions is not None
    assert StoredVersions(world.lake, NAME).require_manifest().declaration.partitions == partitions
    buckets = {bucket_of_key([key], ["string"], partitions) for key in KEYS}
    assert {
        file.bucket for generation in view.sealed.generations for file in generation.files
    } <= buckets
    assert verify_version(view, deep=True).ok
    return partitions


def log_of(*commits: list[Fact]) -> Log:
    log = Log()
    for facts in commits:
        log.add(facts)
    return log


def test_base_and_deltas_are_the_same_in_the_new_partitions_and_changes_go_on() -> None:
    world = table_with(FIRST, SECOND)
    store = StoredVersions(world.lake, NAME)
    before, old = store.require_manifest(), store.require_current()
    report = rewrite(world)
    assert (report.before, report.partitions, report.rows) == (2, 5, 6)
    after = store.require_manifest()
    assert check(world, log_of(FIRST, SECOND)) == 5
    assert report.versions == {old.version: store.require_current().version}
    assert (after.offsets, after.stream, after.bootstrap) == (
        before.offsets,
        before.stream,
        before.bootstrap,
    )
    assert [generation.id for generation in store.require_current().sealed.generations] == [
        generation.id for generation in old.sealed.generations
    ]
    assert (store.history()[0].action, store.history()[0].reason) == (
        "repartition",
        "more machines",
    )
    send(world, THIRD)
    with pytest.raises(
        DatasetError, match=r"partitions is 2, was 5.*adjunct dataset repartition facts"
    ):
        world.advance(SPEC)
    assert world.advance(MORE).action == "applied"
    assert check(world, log_of(FIRST, SECOND, THIRD)) == 5
    assert store.require_manifest().counters["read"] == 8
    assert compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major").changed
    assert check(world, log_of(FIRST, SECOND, THIRD)) == 5
    assert world.advance(MORE).action == "up-to-date"


def test_versions_of_before_keep_their_partitions_until_they_are_discarded() -> None:
    world = table_with(FIRST)
    first = StoredVersions(world.lake, NAME).require_current()
    send(world, SECOND)
    world.advance(SPEC)
    with Lease.acquire(world.lake, NAME, [first.version], holder="a reader"):
        rewrite(world)
        discard(world.lake, NAME, DiscardPolicy(keep=1, grace=timedelta(0)), by="test")
        old = StoredVersions(world.lake, NAME).version(first.version)
        assert (content(old), old.sealed.partitions) == ({"a": 1, "b": 2, "c": 3}, 2)
        assert content(StoredVersions(world.lake, NAME).version(as_of=first.sealed.number)) == {
            "a": 1,
            "b": 2,
            "c": 3,
        }
    discard(world.lake, NAME, DiscardPolicy(keep=1, grace=timedelta(0)), by="test")
    assert StoredVersions(world.lake, NAME).require_manifest().retired == ()
    assert left_over(world, MORE) == set()
    assert check(world, log_of(FIRST, SECOND)) == 5
    with pytest.raises(DatasetError):
        StoredVersions(world.lake, NAME).version(first.version)


facts = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(1, 40), st.none() | st.integers(0, 9)), max_size=6
)
step = st.one_of(
    st.tuples(st.just("apply"), facts),
    st.tuples(st.just("minor"), st.just([])),
    st.tuples(st.just("major"), st.just([])),
    st.tuples(st.just("rewrite"), st.integers(1, 6)),
)


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("by_position", [False, True])
@settings(max_examples=rounds(6, 15))
@given(st.lists(step, min_size=2, max_size=8))
def test_a_table_that_is_rewritten_between_is_the_one_that_is_not(
    by_position: bool, steps: list
) -> None:
    """By a column, deletions are kept: what comes late must lose against tombstones in a base
    that was rewritten.
    """
    options = {"order_by": "at"} if by_position else {}
    world, log, partitions = facts_in(lake_in(InMemoryStore()), IN_PROCESS), Log(by_position), 2
    for what, argument in [("apply", [("a", 20, 1), ("b", 21, None)]), *steps]:
        spec = table_of(partitions=partitions, **options)
        if what == "apply" and argument:
            send(world, argument)
            log.add(argument)
            world.advance(spec)
        elif what in ("minor", "major"):
            compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level=what)
        elif what == "rewrite" and argument != partitions:
            rewrite(world, argument)
            partitions = argument
        assert check(world, log) == partitions


@pytest.mark.lengthy
@pytest.mark.rounds
# Who dies after a request leaves what one leaves who dies before the next.
@pytest.mark.parametrize(
    "kind",
    [
        "crash-before",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("crash-after", "lost-after")),
    ],
)
def test_a_fault_at_any_request_leaves_the_old_table_or_the_new_one(kind: str) -> None:
    seen, log = set(), log_of(FIRST, SECOND)
    whole = table_with(FIRST, SECOND)
    counted = faulty(whole)
    rewrite(whole, lake=counted)
    requests = counted.store.requests  # type: ignore[attr-defined]
    for nth in range(1, len(requests) + 1) if kind == "lost-after" else deaths(requests):
        world = table_with(FIRST, SECOND)
        with suppress(Crash, AdjunctError):
            rewrite(world, lake=faulty(world, Fault("*", nth, kind)))  # type: ignore[arg-type]
        partitions = check(world, log)
        seen.add(partitions)
        if partitions == 2:
            rewrite(world)
        discard(world.lake, NAME, DiscardPolicy(keep=None, grace=timedelta(days=1)), by="test")
        send(world, THIRD)
        world.advance(MORE)
        assert check(world, log_of(FIRST, SECOND, THIRD)) == 5
    assert seen == {2, 5}


def test_what_is_committed_meanwhile_is_rewritten_too() -> None:
    def more(world: World) -> None:
        send(world, THIRD)
        world.advance(SPEC)

    def compacted(world: World) -> None:
        assert compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major").changed

    for doing, log in ((more, log_of(FIRST, SECOND, THIRD)), (compacted, log_of(FIRST, SECOND))):
        world = table_with(FIRST, SECOND)
        fault = Fault("put_if_match", 1, "meanwhile", lambda doing=doing, world=world: doing(world))  # type: ignore[misc]
        rewrite(world, lake=faulty(world, fault))
        assert check(world, log) == 5
        assert left_over(world, MORE) == set()


def test_an_erasure_meanwhile_leaves_the_key_in_nothing_that_was_rewritten() -> None:
    world = table_with(FIRST, SECOND)
    fault = Fault(
        "put_if_match",
        1,
        "meanwhile",
        lambda: erase_keys(world.lake, NAME, ["b"], reason="asked", by="ada"),
    )
    rewrite(world, lake=faulty(world, fault))
    view = StoredVersions(world.lake, NAME).require_current()
    assert (content(view), view.sealed.partitions) == ({"c": 3, "d": 6}, 5)
    assert erase_keys(world.lake, NAME, ["b"], reason="once more", by="ada").complete


def test_an_advance_that_read_the_old_table_loses_and_one_of_now_goes_on() -> None:
    world = table_with(FIRST)
    send(world, SECOND)
    fault = Fault("put_if_match", 1, "meanwhile", lambda: rewrite(world))
    with pytest.raises(CommitConflictError):
        world.advance(SPEC, lake=faulty(world, fault))
    assert check(world, log_of(FIRST, SECOND)) == 5
    assert world.advance(MORE).action == "applied"
    assert check(world, log_of(FIRST, SECOND)) == 5
    assert StoredVersions(world.lake, NAME).require_manifest().counters["read"] == 6


def test_a_compaction_that_read_the_old_table_leaves_nothing_behind() -> None:
    world = table_with(FIRST, SECOND)
    fault = Fault("put_if_match", 1, "meanwhile", lambda: rewrite(world))
    report = compact_dataset(faulty(world, fault), NAME, spark=IN_PROCESS, by="test", level="major")
    assert report.action == "superseded"
    assert check(world, log_of(FIRST, SECOND)) == 5
    assert left_over(world, MORE) == set()


def test_what_can_not_be_rewritten_is_refused_and_a_dry_run_changes_nothing() -> None:
    world = table_with(FIRST)
    version = StoredVersions(world.lake, NAME).require_current().version
    commit = StoredVersions(world.lake, NAME).read()[0]
    holds = {version: "open batch 7 of application app"}
    planned = rewrite(world, dry_run=True, roots=lambda: holds)
    assert (planned.versions, planned.holding) == (
        {version: ""},
        ("open batch 7 of application app",),
    )
    with pytest.raises(StillReadError) as caught:
        rewrite(world, roots=lambda: holds)
    assert caught.value.readers == ("open batch 7 of application app",)
    answers = iter([{}, holds])
    with pytest.raises(StillReadError):
        rewrite(world, roots=lambda: next(answers))
    with pytest.raises(ConfigurationError) as caught:
        rewrite(world, 2)
    assert caught.value.argument == "partitions"
    with pytest.raises(ConfigurationError) as caught:
        rewrite(world, reason=" ")
    assert caught.value.argument == "reason"
    assert StoredVersions(world.lake, NAME).read()[0] == commit
    assert left_over(world, SPEC) == set()
    whole = facts_in(lake_in(InMemoryStore()), IN_PROCESS)
    send(whole, FIRST)
    whole.advance(table_of(broadcast=True))
    with pytest.raises(ConfigurationError, match="is broadcast"):
        rewrite(whole)


def test_a_table_that_is_being_built_is_built_first() -> None:
    chunked = table_of(chunk=1)
    world = facts_in(lake_in(InMemoryStore()), IN_PROCESS)
    send(world, FIRST)
    with pytest.raises(Crash):
        world.advance(chunked, lake=faulty(world, Fault("put_if_match", 2, "crash-before")))
    with pytest.raises(DatasetError, match=r"its bootstrap is not finished.*advance"):
        rewrite(world)
    world.advance(chunked)
    rewrite(world)
    assert check(world, log_of(FIRST)) == 5


def test_a_table_without_rows_is_rewritten() -> None:
    world = table_with([("a", 1, None)])
    rewrite(world)
    send(world, FIRST)
    world.advance(table_of(partitions=5, compaction=BY_HAND))
    assert check(world, log_of([("a", 1, None)], FIRST)) == 5


@pytest.mark.long  # in process: above; what Spark reads and compacts: test_engines.py
@pytest.mark.spark
def test_spark_reads_and_compacts_the_rewritten_table(sparkling: World) -> None:
    spec = tables.table(sparkling, order_by="n")
    tables.send(sparkling, spec, {"a": 1, "b": 2, "c": 3, "d": 4})
    _, wanted = tables.send(sparkling, spec, {"a": 9, "e": 5, "b": 8})
    repartition_table(sparkling.lake, spec.name, 5, **WHY)
    spec = tables.table(sparkling, order_by="n", partitions=5)
    assert tables.entries(sparkling, spec) == wanted
    compact_dataset(sparkling.lake, spec.name, spark=sparkling.spark, by="test", level="major")
    assert tables.entries(sparkling, spec) == wanted
    _, wanted = tables.send(sparkling, spec, {"a": 10, "f": 6})
    assert tables.entries(sparkling, spec) == wanted
