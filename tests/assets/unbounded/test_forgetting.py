"""Erasure of keys from the tables of change streams: from every generation, whatever happens
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.retention.erasure import erase_keys, find_keys
from dagster_adjunct.assets.retention.key_search import CLEARED
from dagster_adjunct.assets.unbounded.advance import advance_unbounded
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.versions import dataset_log
from dagster_adjunct.assets.versions.leases import Lease, attempt_key, list_attempts
from dagster_adjunct.assets.versions.manifest import DatasetManifest, as_unbounded
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ManifestMismatchError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.test_erasure import copy_of, traces
from tests.assets.unbounded.tables import BY_HAND, content, entries, faulty, send, table
from tests.faulty_store import Crash, Fault, deaths

NAME = "table"
WHY = {"reason": "request 4711", "by": "ada"}
SECRET = "zz-grace.hopper@example"


@pytest.fixture
def quick() -> World:
    return World(lake_in(InMemoryStore()), IN_PROCESS)


def manifest(world: World) -> DatasetManifest:
    return StoredVersions(world.lake, NAME).require_manifest()


def current(world: World) -> VersionReader:
    return StoredVersions(world.lake, NAME).require_current()


def major(world: World) -> str:
    report = compact_dataset(world.lake, NAME, spark=world.spark, by="test", level="major")
    assert report.version is not None
    return report.version


def stored(view: VersionReader) -> dict[int, dict[str, tuple[int | None, int, bool]]]:
    """Return (value, position, whether it is a tombstone) of each stored key, by generation."""
    rows_of: dict[int, dict[str, tuple[int | None, int, bool]]] = {}
    for generation in view.sealed.generations:
        rows = rows_of.setdefault(generation.id, {})
        for file in generation.files:
            data = view.store.get(f"{generation.folder}/{file.name}").data
            for row in pq.read_table(pa.BufferReader(data)).to_pylist():
                rows[row["k"]] = (row.get("n"), row["__position"], row["__tombstone"])
    return rows_of


def grown(world: World, **options: Any) -> AdjunctDataset:
    """Make a table of a base and two deltas, after a compaction that retired a base and a delta."""
    spec = table(world, NAME, **options)
    send(world, spec, {"a": 1, "b": 2, SECRET: 3})
    send(world, spec, {SECRET: 4, "c": 5})
    major(world)
    send(world, spec, {"a": 6, "b": None, SECRET: 7, "d": 8})
    send(world, spec, {SECRET: None, "e": 9, "c": None})
    return spec


LEFT = {"a": 6, "d": 8, "e": 9}


# -- what is retained afterwards


def test_a_key_goes_from_every_generation_and_the_rest_stays_as_it_was(quick: World) -> None:
    spec = grown(quick)
    before, view = manifest(quick), current(quick)
    rows = stored(view)
    report = erase_keys(quick.lake, NAME, [SECRET], **WHY)
    assert report.complete, report.summary()
    after = current(quick)
    expected = {
        number: {k: v for k, v in kept.items() if k != SECRET} for number, kept in rows.items()
    }
    assert stored(after) == expected, "positions, and tombstones of other keys, are what they were"
    assert content(after) == LEFT
    assert traces(quick.lake.store, SECRET) == []
    assert [rewritten.rows for rewritten in report.rewritten] == [1, 1, 1]
    assert {rewritten.state for rewritten in report.rewritten} == {"served"}
    assert report.retained_from == after.sealed.number == manifest(quick).retained_from
    assert (manifest(quick).retired, manifest(quick).doomed) == ((), ())
    assert manifest(quick).offsets == before.offsets
    assert list_attempts(quick.lake, NAME) == {}
    store = StoredVersions(quick.lake, NAME)
    assert [entry.action for entry in store.history()][:2] == ["expire", "erase"]
    with pytest.raises(
        VersionDiscardedError, match=f"from number {report.retained_from} on"
    ) as caught:
        store.version(view.version)
    assert (caught.value.dataset, caught.value.version) == (NAME, view.version)
    _, latest = send(quick, spec, {"a": 10})
    assert content(current(quick)) == latest == {**LEFT, "a": 10}
    assert content(store.version(after.version)) == LEFT, "time travel goes on from the erasure"
    major(quick)
    assert content(current(quick)) == latest
    assert current(quick).rows == 3


@pytest.mark.parametrize("key", [1, 4711])
def test_a_number_that_is_in_counts_or_in_the_reason_is_forgotten(quick: World, key: int) -> None:
    quick.stream(NAME, Schema.of(k="bigint", n="int"), ["k"], 1)
    spec = unbounded_dataset(NAME, input=f"lake.{NAME}", key="k", partitions=1, compaction=BY_HAND)
    for value in (1, 2):
        quick.send(NAME, [(number, value) for number in (1, 2, 4711)])
        quick.advance(spec)
    assert erase_keys(quick.lake, NAME, [key], **WHY).complete
    assert current(quick).get(key) is None
    assert StoredVersions(quick.lake, NAME).history()[1].reason == WHY["reason"]
    assert erase_keys(quick.lake, NAME, [key], **WHY).complete


def test_generations_without_the_key_keep_their_files(quick: World) -> None:
    spec = table(quick, NAME)
    send(quick, spec, {"a": 1, "b": 2})
    send(quick, spec, {SECRET: 3})
    send(quick, spec, {"c": 4})
    base, _, newest = current(quick).sealed.generations
    assert erase_keys(quick.lake, NAME, [SECRET, "nobody"], **WHY).complete
    assert current(quick).sealed.generations == (base, newest), "a delta without rows is not needed"
    assert current(quick).rows is None
    assert content(current(quick)) == {"a": 1, "b": 2, "c": 4}


def test_a_base_alone_knows_its_rows(quick: World) -> None:
    spec = table(quick, NAME)
    send(quick, spec, {"a": 1, "b": 2, SECRET: 3})
    assert erase_keys(quick.lake, NAME, [SECRET], **WHY).complete
    assert current(quick).rows == 2
    send(quick, spec, {SECRET: 4})
    assert erase_keys(quick.lake, NAME, [SECRET], **WHY).complete
    assert current(quick).rows == 2
    assert erase_keys(quick.lake, NAME, ["a", "b"], **WHY).complete
    assert (current(quick).rows, content(current(quick))) == (0, {})
    assert send(quick, spec, {"c": 5})[1] == content(current(quick)) == {"c": 5}


def test_a_delta_that_is_left_alone_counts_no_deletions_as_rows(quick: World) -> None:
    spec = table(quick, NAME)
    send(quick, spec, {"a": 1})
    send(quick, spec, {"b": 2, "c": None})
    send(quick, spec, {SECRET: 3})
    for key in ("a", SECRET):
        assert erase_keys(quick.lake, NAME, [key], **WHY).complete
    left = current(quick)
    assert (content(left), left.sealed.stored_rows) == ({"b": 2}, 2)
    assert (left.rows, left.sealed.lacks_base) == (None, True), (
        "else other engines take the deletion for an entry"
    )
    major(quick)
    assert current(quick).rows == 1


def test_by_a_column_s_order_only_live_rows_are_counted(quick: World) -> None:
    spec = table(quick, NAME, order_by="n")
    send(quick, spec, {"a": 1, "b": 2, SECRET: 3})
    quick.send(NAME, [("b", None), ("x", None)])
    log = StoredVersions(quick.lake, NAME).log
    sealed = current(quick).sealed.model_copy(update={"rows": 3})
    log.transact(lambda now: now.after(version=sealed), by="test")
    assert erase_keys(quick.lake, NAME, [SECRET, "x"], **WHY).complete
    assert current(quick).rows == 2


def test_what_only_earlier_versions_hold_goes_with_these_versions(quick: World) -> None:
    spec = table(quick, NAME)
    send(quick, spec, {"a": 1, SECRET: 2})
    send(quick, spec, {SECRET: None})
    first = major(quick)
    send(quick, spec, {"b": 3})
    second = major(quick)
    before = manifest(quick)
    report = erase_keys(quick.lake, NAME, [SECRET], **WHY)
    assert report.complete
    assert report.rewritten == ()
    assert manifest(quick).version == before.version, "the served version did not hold it"
    store = StoredVersions(quick.lake, NAME)
    assert content(store.version(first)) == {"a": 1}
    assert content(store.version(second)) == {"a": 1, "b": 3}
    assert report.retained_from == int(first[1:7])
    assert traces(quick.lake.store, SECRET) == []
    assert not discard(quick.lake, NAME, DiscardPolicy(keep=None), by="test").discarded
    assert erase_keys(quick.lake, NAME, [SECRET], **WHY).retained_from == report.retained_from, (
        "nothing more to do"
    )


def test_a_table_that_is_being_built_forgets_too(quick: World) -> None:
    spec = table(quick, NAME, chunk=2)
    send(quick, spec, {"a": 1, "b": 2})
    quick.send(NAME, [(SECRET, 3), ("c", 4), (SECRET, 5), ("d", 6), ("e", 7), ("f", 8)])
    systems = {"lake": quick.streams}
    crash = Fault("put_if_match", 4, "crash-before")
    with pytest.raises(Crash):
        advance_unbounded(
            Runtime(faulty(quick, crash), systems, IN_PROCESS, "test"),
            spec,
            rebuild=f"{SECRET} asked",
        )
    building = manifest(quick).bootstrap.building  # type: ignore[union-attr]
    assert len(building) >= 2
    report = erase_keys(quick.lake, NAME, [SECRET], **WHY)
    bootstrap = manifest(quick).bootstrap
    assert bootstrap is not None
    assert (bootstrap.state, bootstrap.why) == ("running", CLEARED)
    assert "building" in {rewritten.state for rewritten in report.rewritten}
    assert ["a build on record" in judged.reason for judged in report.pending] == [True], (
        "the one that died"
    )
    records = [
        attempt_key(quick.lake, NAME, attempt) for attempt in list_attempts(quick.lake, NAME)
    ]
    quick.lake.store.delete_many(records)
    assert erase_keys(quick.lake, NAME, [SECRET], **WHY).complete
    assert traces(quick.lake.store, SECRET) == []
    assert content(current(quick)) == {"a": 1, "b": 2}, "what is served is not touched"
    quick.advance(spec)
    values = {key: entry["n"] for key, entry in current(quick).items() if key != SECRET}
    assert values == {"a": 1, "b": 2, "c": 4, "d": 6, "e": 7, "f": 8}


def test_a_file_that_is_missing_of_what_is_served_or_built_is_named_by_the_search(
    quick: World,
) -> None:
    spec = table(quick, NAME, chunk=2)
    send(quick, spec, {"a": 1, "b": 2})
    quick.send(NAME, [("c", 4), ("d", 6), ("e", 7), ("f", 8)])
    crash = Fault("put_if_match", 4, "crash-before")
    with pytest.raises(Crash):
        advance_unbounded(
            Runtime(faulty(quick, crash), {"lake": quick.streams}, IN_PROCESS, "test"),
            spec,
            rebuild="x",
        )
    assert find_keys(quick.lake, NAME, [SECRET]).clean
    now = as_unbounded(manifest(quick))
    assert now.version is not None
    for what, generations in (
        (f"version {now.version.id}", now.version.generations),
        ("the table that is being built", now.bootstrap.building),
    ):
        lost = f"{generations[-1].folder}/{generations[-1].files[0].name}"
        quick.lake.store.delete(lost)
        search = find_keys(quick.lake, NAME, [SECRET])
        assert f"{lost}: {what} lists it, and it is missing" in map(str, search.unsearched)
        assert not search.clean


def test_files_from_before_a_column_was_added_are_rewritten(quick: World) -> None:
    narrow = table(quick, NAME, columns=["k"])
    quick.send(NAME, [("a", 1), ("b", 1), (SECRET, 1)])
    quick.advance(narrow)
    wide = table(quick, NAME)
    quick.send(NAME, [("c", 2), (SECRET, 3)])
    quick.advance(wide)
    assert erase_keys(quick.lake, NAME, [SECRET], **WHY).complete
    assert content(current(quick)) == {"a": None, "b": None, "c": 2}


@pytest.mark.long  # in process: the tests above; what Spark reads and compacts: test_engines.py
@pytest.mark.spark
def test_spark_reads_what_is_left_and_compacts_it(sparkling: World) -> None:
    spec = grown(sparkling)
    assert erase_keys(sparkling.lake, NAME, [SECRET, "a"], **WHY).complete
    assert entries(sparkling, spec) == {"d": 8, "e": 9}
    assert (
        send(sparkling, spec, {"d": None, "f": 1})[1]
        == entries(sparkling, spec)
        == {"e": 9, "f": 1}
    )
    major(sparkling)
    assert erase_keys(sparkling.lake, NAME, ["f"], **WHY).complete
    assert entries(sparkling, spec) == {"e": 9}
    assert current(sparkling).rows == 1


# -- what it can't reach


def test_the_report_names_what_still_holds_the_keys(quick: World) -> None:
    spec = grown(quick)
    log = StoredVersions(quick.lake, NAME).log

    def reported(now: DatasetManifest) -> DatasetManifest:
        assert now.bootstrap is not None
        return now.after(
            bootstrap=now.bootstrap.model_copy(update={"loaded": True}),
            counters={**now.counters, "quarantined": 2},
        )

    log.transact(reported, by="test")
    report = erase_keys(quick.lake, NAME, [SECRET], **WHY)
    stream, outputs, loaded, dead = report.not_erased
    assert stream.startswith(f"the input: {spec.input}, whose records hold the keys")
    assert "a rebuild brings the keys back, unless tombstones" in stream
    assert outputs.startswith("outputs of applications")
    assert loaded == "the bulk snapshot that the dataset was loaded from"
    assert dead == "dead letters: 2 changes were sent there"


def test_a_rebuild_brings_a_key_back_unless_a_tombstone_was_sent(quick: World) -> None:
    spec = grown(quick)
    erase_keys(quick.lake, NAME, [SECRET], **WHY)
    again = advance_unbounded(
        Runtime(quick.lake, {"lake": quick.streams}, IN_PROCESS, "test"), spec, rebuild="to see"
    )
    assert again.action == "bootstrapped"
    assert content(current(quick)) == LEFT, "the last change on the stream is a tombstone"
    assert find_keys(quick.lake, NAME, [SECRET]).clean


def test_a_delete_of_a_forgotten_key_is_harmless(quick: World) -> None:
    spec = table(quick, NAME)
    send(quick, spec, {"a": 1, SECRET: 2})
    erase_keys(quick.lake, NAME, [SECRET], **WHY)
    assert (
        send(quick, spec, {SECRET: None, "b": 3})[1] == content(current(quick)) == {"a": 1, "b": 3}
    )
    major(quick)
    assert content(current(quick)) == {"a": 1, "b": 3}
    assert erase_keys(quick.lake, NAME, [SECRET], **WHY).complete


# -- readers


def test_a_version_that_somebody_reads_is_pending_until_it_is_let_go(quick: World) -> None:
    grown(quick)
    old = current(quick)
    lease = Lease.acquire(quick.lake, NAME, [old.version], holder="a dashboard")
    report = erase_keys(quick.lake, NAME, [SECRET, "a"], **WHY)
    assert not report.complete
    assert report.pending
    assert all("leased by a dashboard until" in judged.reason for judged in report.pending)
    assert old.get("a") == {"k": "a", "n": 6}, "what is leased is not pulled from under its reader"
    assert current(quick).get("a") is None
    lease.release()
    assert erase_keys(quick.lake, NAME, [SECRET, "a"], **WHY).complete
    assert traces(quick.lake.store, SECRET) == []


def test_an_open_batch_is_run_again_with_the_version_it_was_begun_with(quick: World) -> None:
    grown(quick)
    old, why = current(quick).version, "open batch 3 of application delays"
    report = erase_keys(quick.lake, NAME, ["a"], **WHY, roots=lambda: {old: why})
    assert {judged.reason for judged in report.pending} == {why}
    store = StoredVersions(quick.lake, NAME)
    assert store.version_of_batch(old).get("a") == {"k": "a", "n": 6}
    with pytest.raises(VersionDiscardedError):
        store.version(old)
    assert erase_keys(quick.lake, NAME, ["a"], **WHY).complete


# -- interruptions


@pytest.mark.lengthy
@pytest.mark.rounds
def test_an_erasure_that_dies_at_any_request_is_finished_by_the_next(quick: World) -> None:
    spec = grown(quick)
    whole = copy_of(quick)
    counted = faulty(whole)
    erase_keys(counted, NAME, [SECRET], **WHY)
    assert content(current(whole)) == LEFT
    requests = counted.store.requests  # type: ignore[attr-defined]
    assert len(requests) > 40
    for number, nth in enumerate(deaths(requests), 1):
        world = copy_of(quick)
        with pytest.raises(Crash):
            erase_keys(faulty(world, Fault("*", nth, "crash-before")), NAME, [SECRET], **WHY)
        assert content(current(world)) == LEFT
        assert erase_keys(world.lake, NAME, [SECRET], **WHY).complete
        assert traces(world.lake.store, SECRET) == []
        assert content(current(world)) == LEFT
        if number % 5 == 0:
            assert send(world, spec, {"f": nth})[1] == content(current(world)) == {**LEFT, "f": nth}


def meanwhile(world: World, act: Callable[[], object]) -> Lake:
    return faulty(world, Fault("put_if_match", 1, "meanwhile", act))


def test_deltas_that_are_committed_meanwhile_are_searched_too(quick: World) -> None:
    spec = grown(quick)
    report = erase_keys(
        meanwhile(quick, lambda: send(quick, spec, {SECRET: 11, "f": 12})), NAME, [SECRET], **WHY
    )
    assert report.complete
    assert len(report.rewritten) == 4
    assert content(current(quick)) == {**LEFT, "f": 12}
    assert traces(quick.lake.store, SECRET) == []


def test_an_erasure_searches_a_concurrent_compaction_and_leaves_nothing_behind(
    quick: World,
) -> None:
    spec = grown(quick)
    send(quick, spec, {SECRET: 10})
    assert erase_keys(meanwhile(quick, lambda: major(quick)), NAME, [SECRET], **WHY).complete
    assert content(current(quick)) == LEFT
    assert traces(quick.lake.store, SECRET) == []
    folders = {
        item.key.rsplit("/", 1)[0] for item in quick.lake.store.list(f"datasets/{NAME}/data/")
    }
    assert folders == {generation.folder for generation in current(quick).sealed.generations}


def test_an_advance_that_meets_an_erasure_loses_nothing(quick: World) -> None:
    spec = grown(quick)
    quick.send(NAME, [("f", 12)])
    lake = meanwhile(quick, lambda: erase_keys(quick.lake, NAME, [SECRET], **WHY))
    assert quick.advance(spec, lake=lake).action == "applied"
    assert content(current(quick)) == {**LEFT, "f": 12}
    assert traces(quick.lake.store, SECRET) == []


def test_a_compaction_that_meets_an_erasure_leaves_nothing_behind(quick: World) -> None:
    grown(quick)
    lake = meanwhile(quick, lambda: erase_keys(quick.lake, NAME, [SECRET], **WHY))
    assert (
        compact_dataset(lake, NAME, spark=IN_PROCESS, by="test", level="major").action
        == "superseded"
    )
    assert content(current(quick)) == LEFT
    assert erase_keys(quick.lake, NAME, [SECRET], **WHY).complete, (
        "the compaction has let go of what it read"
    )
    assert traces(quick.lake.store, SECRET) == []


@pytest.mark.lengthy
def test_an_erasure_gives_up_where_commits_never_end(
    quick: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = grown(quick)
    monkeypatch.setattr(
        dataset_log, "retry_conflicts", partial(dataset_log.retry_conflicts, attempts=2)
    )
    acts = [
        Fault("put_if_match", nth, "meanwhile", lambda: send(quick, spec, {"f": 1}))
        for nth in (1, 2)
    ]
    before = {item.key for item in quick.lake.store.list(f"datasets/{NAME}/attempts/")}
    with pytest.raises(CommitConflictError) as caught:
        erase_keys(faulty(quick, *acts), NAME, [SECRET], **WHY)
    assert caught.value.dataset == NAME
    assert {item.key for item in quick.lake.store.list(f"datasets/{NAME}/attempts/")} == before
    assert erase_keys(quick.lake, NAME, [SECRET], **WHY).complete


def test_a_discard_meanwhile_does_not_break_an_erasure(quick: World) -> None:
    grown(quick)
    everything = DiscardPolicy(keep=1, grace=timedelta(0))
    lake = meanwhile(quick, lambda: discard(quick.lake, NAME, everything, by="bob"))
    assert erase_keys(lake, NAME, [SECRET], **WHY).complete
    assert content(current(quick)) == LEFT
    assert traces(quick.lake.store, SECRET) == []


def test_a_damaged_file_stops_the_erasure_before_anything_is_erased(quick: World) -> None:
    spec = table(quick, NAME)
    send(quick, spec, {"a": 1, "b": 2, "c": 3, SECRET: 4})
    send(quick, spec, {SECRET: 5})
    before = manifest(quick)
    generation = current(quick).sealed.generations[0]
    damaged = f"{generation.folder}/{generation.files[-1].name}"
    data = quick.lake.store.get(damaged).data
    quick.lake.store.put(damaged, data[:40] + bytes(byte ^ 1 for byte in data[40:80]) + data[80:])
    with pytest.raises(
        ManifestMismatchError, match=r"nothing was erased.*Restore that object, or rebuild"
    ):
        erase_keys(quick.lake, NAME, ["a", "b", "c", SECRET], **WHY)
    assert manifest(quick) == before
    quick.lake.store.put(damaged, data)
    assert erase_keys(quick.lake, NAME, ["a", "b", "c", SECRET], **WHY).complete
