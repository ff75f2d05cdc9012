"""Deleting streams and datasets: what is refused, what is left after a crash, and what is made
anew.
"""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions, list_datasets
from dagster_adjunct.assets.versions.dataset_log import DatasetLog, join_version_set
from dagster_adjunct.assets.versions.leases import Lease, release_versions, retain_version
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.batch_log.intent import Intent, JoinedVersions
from dagster_adjunct.orchestration.maintenance.delete import (
    DeletionReport,
    delete_dataset,
    delete_stream,
)
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    DatasetError,
    DatasetNotFoundError,
    OffsetOutOfRangeError,
    StillReadError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.maintenance import release_files, retain_files
from dagster_adjunct.resources.streams.lake.readers import read_new, remove_reader
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from tests.assets.conftest import World
from tests.assets.cycle import NAME, PLANES, planes_in, publish, served, whole
from tests.faulty_store import Crash, Fault, FaultyStore

WHY = {"reason": "ticket 7", "by": "ada"}
SCHEMA = Schema.of(k="string", v="bigint")


def keys(lake: Lake, prefix: str) -> list[str]:
    return sorted(item.key for item in lake.store.list(prefix))


def sent(streams: LakeStreams, *values: int, sequence: int = 1, name: str = "s") -> None:
    streams.create(name, schema=SCHEMA, key=["k"], partitions=2)
    table = pa.table({"k": [f"k{value}" for value in values], "v": pa.array(values, pa.int64())})
    streams.append(name, table, producer="p", sequence=sequence)


def values(streams: LakeStreams, name: str = "s") -> list[int]:
    return sorted(streams.read_arrow(streams.all_ranges(name)).column("v").to_pylist())


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


@pytest.fixture
def planes() -> World:
    world = planes_in(lake_in(InMemoryStore()))
    publish(world, 1, 2)
    return world


def begun(
    lake: Lake,
    *,
    checkpoint: str = "",
    open_over: str = "",
    versions: dict[str, str | None] | None = None,
) -> None:
    """Let application "app" stand at a checkpoint, and have a batch open."""
    log = BatchLog(lake, "app")
    logged = log.read()
    standing = {SystemStreamPartition.parse(checkpoint): "1"} if checkpoint else {}
    logged = log.commit(logged, logged.state.model_copy(update={"checkpoint": standing}), by="run")
    if open_over or versions:
        ranges = {open_over: OffsetRange(start="0", end="1")} if open_over else {}
        log.open(
            logged,
            Intent(
                batch=1,
                run="run",
                clock=datetime.now(UTC),
                ranges=ranges,
                joined=JoinedVersions(versions=versions or {}),
            ),
        )


# -- streams


def test_a_deleted_stream_is_gone_and_what_is_recreated_is_another_one(lake: Lake) -> None:
    streams = LakeStreams(lake)
    sent(streams, 1, 2)
    sent(streams, 5, name="other")
    before = streams.info("s").identity
    objects = len(keys(lake, "streams/s/"))
    planned = delete_stream(lake, "s", dry_run=True, **WHY)
    assert (planned.objects, planned.blocking, planned.affected) == (objects - 1, (), ())
    assert values(streams) == [1, 2], "a dry run changes nothing"
    report = delete_stream(lake, "s", **WHY)
    assert (report.objects, report.repeated) == (planned.objects, False)
    assert streams.list_streams() == ["other"]
    for ask in (streams.info, streams.all_ranges, streams.describe, streams.maintain):
        with pytest.raises(StreamNotFoundError) as failure:
            ask("s")  # type: ignore[operator]
        assert failure.value.stream == "lake.s"
    left = keys(lake, "streams/s/")
    assert len(left) == 2, left
    assert delete_stream(lake, "s", **WHY).objects == 0
    sent(streams, 3)
    assert streams.info("s").identity not in (before, None)
    assert (values(streams), streams.list_streams()) == ([3], ["other", "s"])
    assert values(streams, "other") == [5]
    with pytest.raises(StreamNotFoundError) as failure:
        delete_stream(lake, "x", **WHY)
    assert failure.value.stream == "lake.x"
    with pytest.raises(ConfigurationError) as failure:
        delete_stream(lake, "s", reason=" ", by="ada")
    assert failure.value.argument == "reason"


def deleting_with(fault: Fault) -> tuple[Lake, FaultyStore]:
    inner = lake_in(InMemoryStore())
    sent(LakeStreams(inner), 1, 2)
    sent(LakeStreams(inner), 3, sequence=2)
    store = FaultyStore(inner.store, [fault])
    return inner, store


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", ["crash-before", "crash-after"])
def test_a_deletion_that_is_killed_at_any_request_is_ended_by_another(kind: str) -> None:
    for nth in itertools.count(1):
        inner, store = deleting_with(Fault("*", nth, kind))  # type: ignore[arg-type]
        streams = LakeStreams(inner)
        try:
            delete_stream(Lake(store, inner.id), "s", **WHY)
        except Crash:
            if streams.list_streams() == ["s"]:
                assert values(streams) == [1, 2, 3], "not deleted is whole"
        else:
            assert nth > 5
            break
        delete_stream(inner, "s", **WHY)
        assert (streams.list_streams(), len(keys(inner, "streams/s/"))) == ([], 2)
        sent(streams, 7)
        assert values(streams) == [7]


def test_what_is_recreated_while_the_old_one_is_swept_is_left_alone() -> None:
    for nth in itertools.count(1):
        done: list[bool] = []
        inner = lake_in(InMemoryStore())
        streams = LakeStreams(inner)
        sent(streams, 1, 2)

        def renewed(streams: LakeStreams = streams, done: list[bool] = done) -> None:
            # the pointer says that it is deleted, its objects are being deleted
            if not streams.list_streams():
                sent(streams, 7)
                done.append(True)

        store = FaultyStore(inner.store, [Fault("*", nth, "meanwhile", renewed)])
        report = delete_stream(Lake(store, inner.id), "s", **WHY)
        if len(store.requests) < nth:
            break
        if done:
            assert values(streams) == [7], nth
            assert list(streams.log("s").history()), "its history can be read"
            if report.recreated:
                streams.maintain("s", datetime.now(UTC) + timedelta(hours=2))
            assert len(keys(inner, "streams/s/data/")) == 1, nth


def test_an_append_begun_before_a_deletion_does_not_reach_the_new_stream(lake: Lake) -> None:
    class Slow(LakeStreams):
        def _commit(self, seen, append):
            delete_stream(lake, "s", **WHY)
            LakeStreams(lake).create("s", schema=SCHEMA, key=["k"], partitions=5)
            return super()._commit(seen, append)

    sent(LakeStreams(lake), 1)
    with pytest.raises(CommitConflictError) as failure:
        Slow(lake).append("s", pa.table({"k": ["a"], "v": [9]}), producer="p", sequence=2)
    assert failure.value.stream == "lake.s"
    assert values(LakeStreams(lake)) == []


def test_a_stream_that_is_read_is_not_deleted(planes: World) -> None:
    lake, streams = planes.lake, planes.streams
    sent(streams, 1)
    begun(lake, checkpoint="lake.s.0")
    with pytest.raises(StillReadError) as failure:
        delete_stream(lake, "s", **WHY)
    assert failure.value.stream == "lake.s"
    with pytest.raises(StillReadError) as failure:
        delete_stream(lake, NAME, **WHY)
    assert failure.value.stream == "lake.planes"
    begun(lake, checkpoint="lake.s.0", open_over="lake.s.1")
    for force in (False, True):
        with pytest.raises(StillReadError) as failure:
            delete_stream(lake, "s", force=force, **WHY)
        assert failure.value.stream == "lake.s"
    assert delete_stream(lake, NAME, force=True, **WHY).affected == ("dataset planes follows it",)
    assert served(lake) == whole(2), "versions stand for themselves"


def test_a_stream_with_a_named_reader_is_deleted_by_force_and_the_reader_is_reported(
    lake: Lake,
) -> None:
    streams = LakeStreams(lake)
    sent(streams, 1)
    read_new(lake, "s", reader="report").commit()
    batch = read_new(lake, "s", reader="report")
    with pytest.raises(StillReadError) as failure:
        delete_stream(lake, "s", **WHY)
    assert failure.value.stream == "lake.s"
    assert delete_stream(lake, "s", force=True, **WHY).affected == (
        "reader report has a position in it",
    )
    sent(streams, 2, 3)
    batch.commit()
    # To begin anew by itself would be to number its batches from 1 again, over those that it has
    # made.
    with pytest.raises(OffsetOutOfRangeError) as failure:
        read_new(lake, "s", reader="report")
    assert failure.value.stream == "lake.s"
    assert remove_reader(lake, "s", "report")
    assert sorted(read_new(lake, "s", reader="report").table()["v"].to_pylist()) == [2, 3]


def test_a_stream_whose_files_are_held_is_not_deleted(lake: Lake) -> None:
    streams = LakeStreams(lake)
    sent(streams, 1)
    commit, state = streams.state("s")
    retain_files(
        lake,
        "s",
        state.id,
        str(commit.number),
        [state.index.tail[0].attempt],
        holder="a table elsewhere",
    )
    for force in (False, True):
        with pytest.raises(StillReadError) as caught:
            delete_stream(lake, "s", force=force, **WHY)
        assert caught.value.readers == ("a table elsewhere holds its files",)
    assert values(streams) == [1]
    release_files(lake, "s", holder="a table elsewhere")
    delete_stream(lake, "s", **WHY)
    assert streams.list_streams() == []


def test_a_stream_that_an_open_batch_writes_is_not_deleted(lake: Lake) -> None:
    streams = LakeStreams(lake)
    sent(streams, 1)
    sent(streams, 1, name="in")
    streams.append("s", pa.table({"k": ["a"], "v": [9]}), producer="app", sequence=1)
    begun(lake, checkpoint="lake.in.0", open_over="lake.in.0")
    with pytest.raises(StillReadError) as failure:
        delete_stream(lake, "s", force=True, **WHY)
    assert failure.value.stream == "lake.s"


def test_who_commits_while_readers_are_looked_for_is_seen(lake: Lake) -> None:
    streams = LakeStreams(lake)
    sent(streams, 1)
    looked: list[int] = []

    def meanwhile() -> None:
        looked.append(1)
        sent(streams, 2, sequence=2)
        begun(lake, open_over="lake.s.0")

    pointer = Fault("put_if_match", 1, "meanwhile", meanwhile)
    with pytest.raises(StillReadError) as failure:
        delete_stream(Lake(FaultyStore(lake.store, [pointer]), lake.id), "s", **WHY)
    assert failure.value.stream == "lake.s"
    assert looked
    assert values(streams) == [1, 2]


# -- datasets


def test_a_deleted_dataset_is_gone_and_is_rebuilt_from_its_stream(planes: World) -> None:
    lake = planes.lake
    version = StoredVersions(lake, NAME).require_current().version
    planned = delete_dataset(lake, NAME, dry_run=True, **WHY)
    assert served(lake) == whole(2)
    report = delete_dataset(lake, NAME, **WHY)
    assert planned.objects == report.objects > 5
    assert (list_datasets(lake), served(lake)) == ([], None)
    store = StoredVersions(lake, NAME)
    with pytest.raises(DatasetNotFoundError):
        store.require_manifest()
    with pytest.raises(DatasetNotFoundError):
        store.version(version)
    assert store.history() == []
    left = [key for key in keys(lake, f"datasets/{NAME}/") if not key.endswith("/clock")]
    assert len(left) == 2, left
    other = bounded_dataset(NAME, input="lake.planes", key="k", partitions=3)
    planes.advance(other)
    assert served(lake) == whole(2), "the stream still has its versions"
    assert StoredVersions(lake, other).require_current().version != version
    assert list_datasets(lake) == [NAME]
    assert all(entry.action != "commit" for entry in store.history())
    with pytest.raises(DatasetNotFoundError, match=f"no dataset 'x'.*there are: {NAME}"):
        delete_dataset(lake, "x", **WHY)


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "kind", ["crash-before", pytest.param("crash-after", marks=pytest.mark.long)]
)
def test_a_dataset_deletion_that_is_killed_at_any_request_is_ended_by_another(kind: str) -> None:
    for nth in itertools.count(1):
        world = planes_in(lake_in(InMemoryStore()))
        publish(world, 1)
        store = FaultyStore(world.lake.store, [Fault("*", nth, kind)])  # type: ignore[arg-type]
        try:
            delete_dataset(Lake(store, world.lake.id), NAME, **WHY)
        except Crash:
            if list_datasets(world.lake):
                assert served(world.lake) == whole(1)
        else:
            assert nth > 5
            break
        delete_dataset(world.lake, NAME, **WHY)
        left = [key for key in keys(world.lake, f"datasets/{NAME}/") if not key.endswith("/clock")]
        assert (
            list_datasets(world.lake),
            len([key for key in left if "deleting-" not in key]),
        ) == ([], 2)
        world.advance(PLANES)
        assert served(world.lake) == whole(1)


@pytest.mark.lengthy
def test_a_build_that_began_after_the_deletion_is_left_alone() -> None:
    for nth in itertools.count(1):
        world = planes_in(lake_in(InMemoryStore()))
        publish(world, 1)
        done: list[bool] = []

        def renewed(world: World = world, done: list[bool] = done) -> None:
            if not list_datasets(world.lake):
                world.advance(PLANES)
                done.append(True)

        store = FaultyStore(world.lake.store, [Fault("*", nth, "meanwhile", renewed)])
        delete_dataset(Lake(store, world.lake.id), NAME, **WHY)
        if len(store.requests) < nth:
            break
        if done:
            assert served(world.lake) == whole(1), nth


def test_a_dataset_that_is_held_is_not_deleted(planes: World) -> None:
    lake, version = planes.lake, StoredVersions(planes.lake, NAME).require_current().version
    with Lease.acquire(lake, NAME, [version], holder="a reader"):
        for force in (False, True):
            with pytest.raises(StillReadError) as caught:
                delete_dataset(lake, NAME, force=force, **WHY)
            assert caught.value.readers[0].startswith(f"a reader holds {version} until")
    retain_version(lake, NAME, version, holder="a table elsewhere")
    with pytest.raises(StillReadError) as failure:
        delete_dataset(lake, NAME, force=True, **WHY)
    assert failure.value.dataset == "planes"
    release_versions(lake, NAME, holder="a table elsewhere")
    begun(lake, versions={NAME: version})
    with pytest.raises(StillReadError) as failure:
        delete_dataset(lake, NAME, force=True, **WHY)
    assert failure.value.dataset == "planes"
    assert served(lake) == whole(2)


def test_a_reader_that_comes_between_the_look_and_the_deletion_keeps_its_files(
    planes: World,
) -> None:
    lake = planes.lake
    view = StoredVersions(lake, NAME).require_current()
    leases: list[Lease] = []

    def meanwhile() -> None:
        leases.append(Lease.acquire(lake, NAME, [view.version], holder="late"))

    pointer = Fault("put_if_match", 1, "meanwhile", meanwhile)
    with pytest.raises(DatasetError) as failure:
        delete_dataset(Lake(FaultyStore(lake.store, [pointer]), lake.id), NAME, **WHY)
    assert failure.value.dataset == "planes"
    assert list_datasets(lake) == []
    assert {key: entry["n"] for key, entry in view.items()} == whole(2), "what it holds stays"
    leases[0].release()
    assert delete_dataset(lake, NAME, **WHY).repeated
    assert not keys(lake, f"datasets/{NAME}/data/")


def test_a_member_of_a_version_set_is_not_deleted(planes: World) -> None:
    join_version_set(planes.lake, "both", [NAME], by="ada")
    with pytest.raises(DatasetError) as failure:
        delete_dataset(planes.lake, NAME, force=True, **WHY)
    assert failure.value.dataset == "planes"


def test_a_deleted_dataset_can_join_a_version_set(planes: World) -> None:
    delete_dataset(planes.lake, NAME, **WHY)
    join_version_set(planes.lake, "both", [NAME], by="ada")
    assert DatasetLog(planes.lake, NAME).read()[1] is None


def test_a_report_says_what_it_did() -> None:
    report = DeletionReport("stream", "s", 1234, 5678)
    assert report.summary() == "stream s: 1,234 objects, 5,678 bytes deleted"
    assert report.to_json()["objects"] == 1234
