"""What of a table's past goes and what stays: for a reader, for an open batch, for a build, for
time travel.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.retention.discard import (
    DiscardReport,
    Listing,
    discard,
    find_oldest_kept,
    plan_retired,
)
from dagster_adjunct.assets.unbounded.compaction import CompactionReport, compact_dataset
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.manifest import Bootstrap, Retired, UnboundedManifest
from dagster_adjunct.assets.versions.version import DatasetDeclaration, version_number
from dagster_adjunct.resources.errors import (
    DatasetError,
    ManifestMismatchError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects import commit_log
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.cycle import make_older, objects
from tests.assets.unbounded.tables import content, copy_of, entries, faulty, left_over, send, table
from tests.faulty_store import Crash, Fault

AT_ONCE = DiscardPolicy(keep=1, grace=timedelta(0))
NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def quick(world: World) -> World:
    """A lake in which nothing needs Spark."""
    world.spark = IN_PROCESS
    return world


def compact(
    world: World, spec: AdjunctDataset, level=None, *, lake: Lake | None = None
) -> CompactionReport:
    return compact_dataset(lake or world.lake, spec.name, spark=world.spark, by="test", level=level)


def go(
    world: World, spec: AdjunctDataset, policy: DiscardPolicy = AT_ONCE, **options
) -> DiscardReport:
    return discard(options.pop("lake", world.lake), spec.name, policy, by="test", **options)


def data(world: World, spec: AdjunctDataset) -> set[str]:
    return {key.rsplit("/", 1)[0] for key in objects(world.lake, f"datasets/{spec.name}/data/")}


def manifest_of(world: World, spec: AdjunctDataset) -> UnboundedManifest:
    return StoredVersions(world.lake, spec.name).require_manifest()


def four_versions(world: World) -> tuple[AdjunctDataset, list[tuple[str, dict[str, int]]]]:
    """Return a table and its versions with what they hold: base, two deltas, and all of it
    compacted.
    """
    spec = table(world)
    history = [
        send(world, spec, {"a": 1, "b": 1}),
        send(world, spec, {"a": 2}),
        send(world, spec, {"b": None, "c": 3}),
    ]
    report = compact(world, spec, "major")
    assert report.version is not None
    return spec, [*history, (report.version, history[-1][1])]


# -- decided from values


def retired(*untils: int) -> UnboundedManifest:
    spans = {"lake.table.0": "0"}
    return UnboundedManifest(
        name="table",
        declaration=DatasetDeclaration(
            kind="unbounded",
            input="lake.table",
            key=("k",),
            key_types=("string",),
            partition_by=("k",),
            partitions=1,
            input_partitions=1,
        ),
        offsets=spans,
        bootstrap=Bootstrap(state="done", start=spans, target=spans, started_at=NOW),
        retired=tuple(
            Retired(generation=place, folder=f"data/{place}", until=until, at=NOW)
            for place, until in enumerate(untils, 1)
        ),
    )


def decided(
    manifest: UnboundedManifest,
    *,
    held: tuple[str, ...] = (),
    kept_from: int = 100,
    hours: dict[int, float] | None = None,
) -> tuple[list[int], int]:
    """Return the generations that go by a grace of an hour, with commits so many hours old; two
    where not said.
    """
    ages = {old.until: 2.0 for old in manifest.retired} | (hours or {})
    committed = {number: NOW - timedelta(hours=age) for number, age in ages.items()}
    policy = DiscardPolicy(keep=1, grace=timedelta(hours=1))
    plan = plan_retired(
        manifest, policy, dict.fromkeys(held, "held"), kept_from, Listing(NOW, commits=committed)
    )
    assert len(plan.discarded) + len(plan.kept) == len(manifest.retired)
    assert all(decision.reason for decision in (*plan.discarded, *plan.kept))
    generations = {old.folder: old.generation for old in manifest.retired}
    assert plan.retained_from is not None
    return [generations[decision.what] for decision in plan.discarded], plan.retained_from


def test_what_was_retired_within_the_grace_stays() -> None:
    assert decided(retired(5, 9)) == ([1, 2], 9)
    assert decided(retired(5, 9), hours={9: 0.5}) == ([1], 5)
    assert decided(retired(5, 9), hours={5: 0.5}) == ([], 1), (
        "versions go from the oldest on, and never in between"
    )


def test_what_one_of_the_newest_versions_needs_stays() -> None:
    assert decided(retired(5, 9), kept_from=9) == ([1, 2], 9)
    assert decided(retired(5, 9), kept_from=8) == ([1], 5)
    assert decided(retired(5, 9), kept_from=0) == ([], 1)


def test_what_a_held_version_needs_stays() -> None:
    assert decided(retired(5, 9), held=("v000009-a",)) == ([1, 2], 9)
    assert decided(retired(5, 9), held=("v000005-a", "v000012-b")) == ([1], 5)
    assert decided(retired(5, 9), held=("*",)) == ([], 1), "a lease that can't be read holds all"


def test_what_was_retired_after_the_lake_was_looked_at_is_young() -> None:
    manifest, policy = retired(5), DiscardPolicy(keep=1, grace=timedelta(hours=1))
    old = Listing(NOW, commits={4: NOW - timedelta(days=9)})
    later = Listing(NOW + timedelta(days=1), commits={6: NOW - timedelta(days=9)})
    assert not plan_retired(manifest, policy, {}, 100, old).discarded
    assert plan_retired(manifest, policy, {}, 100, later).discarded


# -- in a lake


@pytest.mark.lengthy
def test_what_a_compaction_replaced_goes_after_the_grace_and_its_versions_with_it(
    quick: World,
) -> None:
    spec, history = four_versions(quick)
    store = StoredVersions(quick.lake, spec.name)
    assert [entries(quick, spec, version) for version, _ in history] == [
        held for _, held in history
    ]
    assert all(entry.readable for entry in store.history() if entry.served)
    assert len(data(quick, spec)) == 4
    report = go(quick, spec, DiscardPolicy(keep=1, grace=timedelta(hours=1)))
    assert (len(report.discarded), len(data(quick, spec))) == (0, 4)
    assert {judged.reason for judged in report.kept} == {"younger than 1:00:00"}

    make_older(quick.lake, timedelta(hours=2))
    report = go(quick, spec, DiscardPolicy(keep=1, grace=timedelta(hours=1)))
    last, whole = history[-1]
    number = version_number(last)
    assert report.summary().startswith(
        f"dataset table: discarded 3 generation(s); versions from {number} on can be read; "
    )
    assert len(data(quick, spec)) == 1
    assert entries(quick, spec) == entries(quick, spec, last) == whole
    for version, _ in history[:-1]:
        with pytest.raises(VersionDiscardedError, match=f"from number {number} on") as caught:
            store.version(version)
        assert (caught.value.dataset, caught.value.version) == ("table", version)
        with pytest.raises(VersionDiscardedError):
            Lease.acquire(quick.lake, spec.name, [version], holder="me")
    reported = [(entry.action, entry.readable) for entry in store.history()]
    assert reported[:3] == [("expire", True), ("expire", True), ("compact", True)]
    assert {readable for _, readable in reported[3:]} == {False}
    manifest = manifest_of(quick, spec)
    assert (manifest.retired, manifest.doomed, manifest.retained_from) == ((), (), number)
    before = store.read()[0]
    assert go(quick, spec).discarded == ()
    assert store.read()[0] == before, "nothing to discard makes no commit"


def test_the_newest_versions_stay_however_old_they_are(quick: World) -> None:
    spec, history = four_versions(quick)
    make_older(quick.lake, timedelta(days=9))
    report = go(quick, spec, DiscardPolicy(keep=2, grace=timedelta(0)))
    assert report.discarded == ()
    assert "is among the newest 2" in report.kept[0].reason
    assert entries(quick, spec, history[2][0]) == history[2][1]
    report = go(quick, spec, DiscardPolicy(keep=None, grace=timedelta(0)))
    assert ({judged.reason for judged in report.kept}, report.discarded) == (
        {"all versions are kept"},
        (),
    )
    assert len(go(quick, spec, DiscardPolicy(keep=1, grace=timedelta(0))).discarded) == 3


def test_commits_without_a_version_do_not_count_as_versions(quick: World) -> None:
    spec, history = four_versions(quick)
    log = StoredVersions(quick.lake, spec.name).log
    for _ in range(5):
        log.transact(lambda manifest: manifest.after(confirmed_at=datetime.now(UTC)), by="test")
    make_older(quick.lake, timedelta(days=9))
    assert go(quick, spec, DiscardPolicy(keep=2, grace=timedelta(0))).discarded == ()
    assert entries(quick, spec, history[2][0]) == history[2][1]


@pytest.mark.lengthy
def test_a_discard_asks_no_more_where_more_versions_are_kept(quick: World) -> None:
    spec = table(quick)
    asked = []
    for count in (4, 20):
        for number in range(count):
            send(quick, spec, {"a": number})
            if number % 4 == 3:
                StoredVersions(quick.lake, spec.name).log.transact(
                    lambda manifest: manifest.after(confirmed_at=datetime.now(UTC)), by="test"
                )
        compact(quick, spec, "major")
        lake = faulty(quick)
        assert (
            go(quick, spec, DiscardPolicy(keep=100, grace=timedelta(0)), lake=lake).discarded == ()
        )
        asked.append(len(lake.store.requests))
    assert asked[0] == asked[1]


@pytest.mark.lengthy
def test_the_oldest_version_that_is_kept_is_the_one_that_reading_every_commit_finds(
    quick: World,
) -> None:
    spec, _ = four_versions(quick)
    store = StoredVersions(quick.lake, spec.name)
    for number in range(6):
        store.log.transact(
            lambda manifest: manifest.after(confirmed_at=datetime.now(UTC)), by="test"
        )
        send(quick, spec, {"a": number})
        send(quick, spec, {"b": number})
    compact(quick, spec, "major")
    manifest = manifest_of(quick, spec)
    older = manifest.model_copy(update={"numbers": ()})
    assert len(manifest.numbers) > 2
    for keep in range(1, 30):
        policy = DiscardPolicy(keep=keep)
        # No further back than anything is retired: there both say that all of it stays.
        lowest = min(retired.until for retired in manifest.retired)
        oldest, read = (
            find_oldest_kept(store.log, version, policy) for version in (manifest, older)
        )
        assert oldest == read or max(oldest, read) < lowest


def test_the_policy_that_was_declared_last_counts(quick: World) -> None:
    spec = table(quick, discard=DiscardPolicy(keep=1, grace=timedelta(minutes=5)))
    send(quick, spec, {"a": 1})
    send(quick, spec, {"a": 2})
    compact(quick, spec, "major")
    make_older(quick.lake, timedelta(minutes=6))
    assert len(discard(quick.lake, spec.name, by="test").discarded) == 2


def test_a_dry_run_says_what_would_go(quick: World) -> None:
    spec, _ = four_versions(quick)
    before = (
        objects(quick.lake, f"datasets/{spec.name}/data/"),
        StoredVersions(quick.lake, spec.name).read()[0],
    )
    report = go(quick, spec, dry_run=True)
    assert (len(report.discarded), report.dry_run) == (3, True)
    assert report.summary().startswith(
        "dataset table: would discard 3 generation(s); versions from "
    )
    assert report.to_json()["retained_from"] == report.retained_from
    after = (
        objects(quick.lake, f"datasets/{spec.name}/data/"),
        StoredVersions(quick.lake, spec.name).read()[0],
    )
    assert after == before


def test_what_a_crashed_compaction_left_is_garbage_and_a_bootstrap_that_runs_is_not(
    quick: World,
) -> None:
    spec = table(quick, chunk=1)
    quick.send(spec.name, [("a", 1), ("b", 2), ("c", 3)])
    with pytest.raises(Crash):
        quick.advance(spec, lake=faulty(quick, Fault("put_if_match", 1, "crash-after")))
    manifest = manifest_of(quick, spec)
    assert manifest.bootstrap is not None
    building = {generation.folder for generation in manifest.bootstrap.building}
    assert building
    assert building <= manifest.reachable()
    make_older(quick.lake, timedelta(days=9))
    assert go(quick, spec).garbage == ()
    assert quick.advance(spec).action == "bootstrapped"
    assert entries(quick, spec) == {"a": 1, "b": 2, "c": 3}

    assert len(data(quick, spec)) > 1
    with pytest.raises(Crash):
        compact(quick, spec, "major", lake=faulty(quick, Fault("put_if_match", 1, "crash-before")))
    assert left_over(quick, spec)
    make_older(quick.lake, timedelta(days=9))
    assert len(go(quick, spec).garbage) == 1
    assert left_over(quick, spec) == set()
    assert entries(quick, spec) == {"a": 1, "b": 2, "c": 3}


# -- readers


@pytest.mark.lengthy
def test_a_reader_keeps_reading_through_a_major_compaction_and_a_discard(quick: World) -> None:
    spec = table(quick)
    _, first = send(quick, spec, {"a": 1, "b": 1})
    send(quick, spec, {"a": 2})
    with open_dataset(quick.lake, spec.name) as held:
        held.take_lease()
        reading = held.items()
        assert next(reading)[0] == "a"
        send(quick, spec, {"b": None, "c": 3})
        compact(quick, spec, "major")
        report = go(quick, spec)
        assert (report.discarded, data(quick, spec)) != ((), set())
        assert {
            judged.reason.split(" by ")[0] for judged in report.kept if "leased" in judged.reason
        } == {"leased"}
        assert [key for key, _ in reading] == ["b"]
        assert held.get("b") == {"k": "b", "n": 1}
        assert held.refresh()
        assert held.get("b") is None
        go(quick, spec)
        assert len(data(quick, spec)) == 1
        assert held.get("c") == {"k": "c", "n": 3}
    assert first == {"a": 1, "b": 1}


@pytest.mark.lengthy
def test_a_reader_without_a_lease_moves_to_what_is_served_then(quick: World) -> None:
    spec, history = four_versions(quick)
    view: VersionReader = StoredVersions(quick.lake, spec.name).version(history[0][0])
    with open_dataset(quick.lake, spec.name, lease=False) as served:
        send(quick, spec, {"c": 4})
        compact(quick, spec, "major")
        go(quick, spec)
        assert served.get("c") == {"k": "c", "n": 4}
    with pytest.raises(ManifestMismatchError):
        view.get("a")


@pytest.mark.lengthy
def test_of_a_reader_and_a_discard_one_always_sees_the_other(quick: World, tmp_path: Path) -> None:
    """A lease is taken at each moment of a discard: it is refused, or what it holds is still
    there.
    """
    spec, history = four_versions(quick)
    version, whole = history[1]
    outcomes, nth = set(), 0
    while True:
        nth += 1
        copy = copy_of(quick, tmp_path / str(nth))
        view = StoredVersions(copy.lake, spec.name).version(version)
        held: list[Lease] = []

        def hold(copy: World = copy, held: list[Lease] = held) -> None:
            try:
                held.append(Lease.acquire(copy.lake, spec.name, [version], holder="me"))
            except VersionDiscardedError:
                outcomes.add("refused")

        lake = faulty(copy, Fault("*", nth, "meanwhile", hold))
        go(copy, spec, lake=lake)
        if held:
            outcomes.add("held")
            assert content(view) == whole
            go(copy, spec)
            assert content(view) == whole
            held[0].release()
        go(copy, spec)
        assert len(data(copy, spec)) == 1
        assert entries(copy, spec) == history[-1][1]
        if len(lake.store.requests) < nth:
            break
    assert outcomes == {"held", "refused"}


def test_a_version_that_an_open_batch_was_begun_with_stays(quick: World) -> None:
    spec, history = four_versions(quick)
    version, whole = history[1]
    report = go(quick, spec, roots=lambda: {version: "open batch 3 of application flights"})
    assert {judged.reason for judged in report.kept} == {"open batch 3 of application flights"}
    assert content(StoredVersions(quick.lake, spec.name).version_of_batch(version)) == whole
    # A batch that began just before the discard looked at it again: what it reads is doomed, and
    # spared.
    answers = [{}, {version: "open batch 3"}, {version: "open batch 3"}]
    report = go(quick, spec, roots=lambda: answers.pop(0))
    assert {judged.reason for judged in report.spared} == {"open batch 3"}
    assert content(StoredVersions(quick.lake, spec.name).version_of_batch(version)) == whole
    go(quick, spec)
    assert len(data(quick, spec)) == 1


# -- the history


@pytest.mark.lengthy
def test_commits_stay_as_long_as_their_versions_can_be_read(
    quick: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "MANIFESTS_KEPT", 2)
    spec = table(quick)
    history = [send(quick, spec, {"a": number}) for number in range(4)]
    make_older(quick.lake, timedelta(days=2))
    day = DiscardPolicy(keep=1, grace=timedelta(days=1))
    assert go(quick, spec, day).objects == 0
    for version, held in history:
        assert entries(quick, spec, version) == held
    compact(quick, spec, "major")
    for number in range(4, 8):
        history.append(send(quick, spec, {"a": number}))
    make_older(quick.lake, timedelta(days=2))
    assert len(go(quick, spec, day).discarded) == 4
    store = StoredVersions(quick.lake, spec.name)
    assert (
        min(entry.number for entry in store.history(None)) == manifest_of(quick, spec).retained_from
    )
    for version, held in history[4:]:
        assert entries(quick, spec, version) == held
    for version, _ in history[:4]:
        with pytest.raises(VersionDiscardedError):
            store.version(version)
    with pytest.raises(DatasetError) as caught:
        store.version("v000099-x")
    assert (caught.value.dataset, caught.value.version) == ("table", "v000099-x")


# -- sudden ends


@pytest.mark.lengthy
def test_a_compaction_that_dies_at_any_request_is_ended_by_the_next_one(
    quick: World, tmp_path: Path
) -> None:
    spec = table(quick)
    history = [
        send(quick, spec, {"a": 1, "b": 1}),
        send(quick, spec, {"a": 2}),
        send(quick, spec, {"b": None}),
    ]
    outcomes, nth = set(), 0
    while True:
        nth += 1
        copy = copy_of(quick, tmp_path / str(nth))
        lake = faulty(copy, Fault("*", nth, "crash-before"))
        try:
            compact(copy, spec, "major", lake=lake)
        except Crash:
            pass
        else:
            break
        done = len(StoredVersions(copy.lake, spec.name).require_current().sealed.generations)
        outcomes.add(done)
        assert entries(copy, spec) == {"a": 2}
        assert compact(copy, spec, "major").action == ("nothing" if done == 1 else "compacted")
        assert len(StoredVersions(copy.lake, spec.name).require_current().sealed.generations) == 1
        for version, held in history:
            assert entries(copy, spec, version) == held
        make_older(copy.lake, timedelta(hours=1))
        go(copy, spec)
        assert left_over(copy, spec) == set()
        assert len(data(copy, spec)) == 1
        assert entries(copy, spec) == {"a": 2}
        assert objects(copy.lake, f"datasets/{spec.name}/leases/") == {}
    assert outcomes == {1, 3}
    assert nth > 10


@pytest.mark.lengthy
def test_a_discard_that_dies_at_any_request_is_ended_by_the_next_one(
    quick: World, tmp_path: Path
) -> None:
    spec, history = four_versions(quick)
    make_older(quick.lake, timedelta(hours=1))
    nth = 0
    while True:
        nth += 1
        copy = copy_of(quick, tmp_path / str(nth))
        try:
            go(copy, spec, lake=faulty(copy, Fault("*", nth, "crash-before")))
        except Crash:
            pass
        else:
            break
        store = StoredVersions(copy.lake, spec.name)
        for version, held in history:
            if version_number(version) >= manifest_of(copy, spec).retained_from:
                assert content(store.version(version)) == held, "what can be opened can be read"
        go(copy, spec)
        assert (left_over(copy, spec), len(data(copy, spec))) == (set(), 1)
        assert entries(copy, spec) == history[-1][1]
    assert nth > 10
