"""Time travel: what was served at a time or after a commit, and a clear word where that has
gone.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    DatasetError,
    DatasetNotFoundError,
    NoSealedVersionError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.unbounded.tables import COLUMNS, content, entries, faulty, send, table
from tests.faulty_store import Crash, Fault, FaultyStore

TICK = timedelta(microseconds=1)


@pytest.fixture
def quick(world: World) -> World:
    """A lake in which nothing needs Spark."""
    world.spark = IN_PROCESS
    return world


def commits(world: World, name: str) -> dict[str, Commit]:
    """Return the commit that made each version."""
    commit_of = {}
    for commit, manifest in StoredVersions(world.lake, name).log.history():
        if manifest.version is not None and manifest.version.number == commit.number:
            commit_of[manifest.version.id] = commit
    return commit_of


@pytest.mark.lengthy
def test_a_table_is_read_as_of_a_time_a_commit_number_or_a_commit_id(quick: World) -> None:
    spec = table(quick)
    history = [send(quick, spec, {"a": number}) for number in range(5)]
    report = compact_dataset(quick.lake, spec.name, spark=IN_PROCESS, by="test", level="major")
    history.append((str(report.version), history[-1][1]))
    store, made = StoredVersions(quick.lake, spec.name), commits(quick, spec.name)
    for place, (version, held) in enumerate(history):
        commit = made[version]
        after = (
            made[history[place + 1][0]].created_at - TICK
            if place + 1 < len(history)
            else datetime.now(UTC)
        )
        for view in (
            store.version(as_of=commit.created_at),
            store.version(as_of=after),
            store.version(as_of=commit.number),
            store.version(as_of=commit.id),
            store.version(version),
        ):
            assert (view.version, content(view)) == (version, held)
    assert store.version(as_of=datetime.now(UTC) + timedelta(days=1)).version == history[-1][0]


def test_a_commit_that_made_no_version_shows_the_one_before(quick: World) -> None:
    spec = table(quick)
    version, held = send(quick, spec, {"a": 1})
    log = StoredVersions(quick.lake, spec.name).log
    log.transact(lambda manifest: manifest.after(confirmed_at=datetime.now(UTC)), by="test")
    commit, _ = log.read()
    assert commit is not None
    view = StoredVersions(quick.lake, spec.name).version(as_of=commit.number)
    assert (view.version, content(view)) == (version, held)


def test_before_the_first_version_there_was_nothing(quick: World) -> None:
    spec = table(quick)
    store = StoredVersions(quick.lake, spec.name)
    with pytest.raises(DatasetNotFoundError) as caught:
        store.version(as_of=datetime.now(UTC))
    assert caught.value.dataset == "table"
    quick.send(spec.name, [("a", 1)])
    with pytest.raises(Crash):
        quick.advance(spec, lake=faulty(quick, Fault("upload", 1, "crash-before")))
    with pytest.raises(NoSealedVersionError, match="bootstrap is not finished") as caught:
        store.version(as_of=1)
    assert caught.value.dataset == "table"
    began = datetime.now(UTC)
    quick.advance(spec)
    with pytest.raises(
        NoSealedVersionError, match=r"served nothing at .* UTC; the oldest .* number 2"
    ):
        store.version(as_of=began)
    with pytest.raises(NoSealedVersionError, match="commit 1") as caught:
        store.version(as_of=1)
    assert caught.value.dataset == "table"
    with pytest.raises(NoSealedVersionError, match="2000-01-01") as caught:
        store.version(as_of=datetime(2000, 1, 1, tzinfo=UTC))
    assert caught.value.dataset == "table"


def test_what_is_asked_for_must_be_one_thing_that_is_there(quick: World) -> None:
    spec = table(quick)
    send(quick, spec, {"a": 1})
    store = StoredVersions(quick.lake, spec.name)
    with pytest.raises(ConfigurationError, match="neither version nor as_of") as caught:
        store.version()
    assert caught.value.argument == "as_of"
    with pytest.raises(ConfigurationError, match="both version 'v1' and as_of 1") as caught:
        store.version("v1", as_of=1)
    assert caught.value.argument == "as_of"
    with pytest.raises(ConfigurationError, match="zone") as caught:
        store.version(as_of=datetime(2026, 1, 1))
    assert caught.value.argument == "as_of"
    for unknown in (99, 0, "nobody"):
        with pytest.raises(
            DatasetError,
            match=rf"no commit {unknown!r}; those that can be read are numbered 1 to 2",
        ):
            store.version(as_of=unknown)


def test_what_was_discarded_is_reported_with_the_oldest_that_is_left(quick: World) -> None:
    spec = table(quick)
    history = [send(quick, spec, {"a": number}) for number in range(3)]
    made = commits(quick, spec.name)
    report = compact_dataset(quick.lake, spec.name, spark=IN_PROCESS, by="test", level="major")
    discard(quick.lake, spec.name, DiscardPolicy(keep=1, grace=timedelta(0)), by="test")
    store, oldest = (
        StoredVersions(quick.lake, spec.name),
        commits(quick, spec.name)[str(report.version)],
    )
    left = (
        r"has been discarded; the oldest readable version was committed at .* UTC, as number"
        rf" {oldest.number}\."
    )
    for version, _ in history:
        for asked in (made[version].created_at, made[version].number):
            with pytest.raises(VersionDiscardedError, match=left):
                store.version(as_of=asked)
    assert store.version(as_of=oldest.created_at).version == report.version
    assert content(store.version(as_of=oldest.number)) == {"a": 2}


def test_an_attempt_that_lost_under_the_same_number_is_never_read(quick: World) -> None:
    spec = table(quick)
    send(quick, spec, {"a": 1})
    quick.send(spec.name, [("a", 2)])
    won: list[str] = []
    rival = Fault(
        "put_if_match", 1, "meanwhile", lambda: won.append(str(quick.advance(spec).version))
    )
    with pytest.raises(CommitConflictError):
        quick.advance(spec, lake=faulty(quick, rival))
    store = StoredVersions(quick.lake, spec.name)
    number = commits(quick, spec.name)[won[0]].number
    manifests = [
        item.key for item in quick.lake.store.list(f"datasets/{spec.name}/manifests/{number:012d}-")
    ]
    assert len(manifests) == 2
    send(quick, spec, {"a": 3})
    assert store.version(as_of=number).version == won[0]
    lost = next(key for key in manifests if won[0].partition("-")[2] not in key)
    with pytest.raises(DatasetError, match="has no commit"):
        store.version(as_of=lost.rsplit("/", 1)[1].partition("-")[2].removesuffix(".json"))


@pytest.mark.lengthy
def test_a_commit_among_many_is_found_by_few_requests(quick: World) -> None:
    spec = table(quick)
    version, _ = send(quick, spec, {"a": 1})
    log = StoredVersions(quick.lake, spec.name).log
    for _ in range(200):
        log.transact(lambda manifest: manifest.after(confirmed_at=datetime.now(UTC)), by="test")
    at = commits(quick, spec.name)[version].created_at
    counting = FaultyStore(quick.lake.store)
    assert (
        StoredVersions(Lake(counting, quick.lake.id), spec.name).version(as_of=at).version
        == version
    )
    assert len(counting.requests) < 15


def test_what_a_bounded_dataset_served_at_a_time_is_found_as_well(quick: World) -> None:
    spec = bounded_dataset("planes", input="lake.planes", key="k", partitions=2)
    quick.stream("planes", COLUMNS, ["k"], 2)
    ids = []
    for number in (1, 2):
        quick.send("planes", [("a", number)], version=f"v{number}")
        ids.append(quick.advance(spec).version)
    store = StoredVersions(quick.lake, spec)
    store.rollback(reason="a test", by="test")
    served = [(entry.at, entry.number, entry.served) for entry in store.history() if entry.served]
    assert [version for _, _, version in served] == [ids[0], ids[1], ids[0]]
    for at, number, version in served:
        assert store.version(as_of=at).version == store.version(as_of=number).version == version
    with pytest.raises(NoSealedVersionError, match="2000-01-01") as caught:
        store.version(as_of=datetime(2000, 1, 1, tzinfo=UTC))
    assert caught.value.dataset == "planes"


def test_a_commit_of_changes_that_was_decided_twice_is_found_by_its_id(quick: World) -> None:
    spec = table(quick)
    send(quick, spec, {"a": 1})
    send(quick, spec, {"a": 2})
    quick.send(spec.name, [("a", 3)])

    def compact() -> object:
        return compact_dataset(quick.lake, spec.name, spark=IN_PROCESS, by="test", level="major")

    compaction = Fault("put_if_match", 1, "meanwhile", compact)
    report = quick.advance(spec, lake=faulty(quick, compaction))
    assert entries(quick, spec, report.version) == {"a": 3}
    number = commits(quick, spec.name)[str(report.version)].number
    assert StoredVersions(quick.lake, spec.name).version(as_of=number).version == report.version
