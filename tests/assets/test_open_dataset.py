"""An open dataset and a discard: what Spark or another engine was given stays, or an error of
ours says it went.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.exchange.handover import parquet_files, polars_frame, pyarrow_dataset
from dagster_adjunct.assets.reading.dataset import Dataset, current_versions, open_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import find_unreadable_version
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.versions.leases import list_leases
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetError,
    ManifestMismatchError,
    NoSealedVersionError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World

PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=2)
SCHEMA = Schema.of(tailnum="string", seats="int")
COUNT = 20


def publish(world: World, number: int) -> str:
    """Publish a version in which each plane has `number` seats."""
    world.send("planes", [(f"N{n}", number) for n in range(COUNT)], version=f"v{number}")
    return str(world.advance(PLANES).version)


def discard_all_but_the_newest(world: World) -> None:
    discard(world.lake, "planes", DiscardPolicy(keep=1, grace=timedelta(0)), by="test")


def retained(world: World) -> list[str | None]:
    return [ref.name for ref in open_dataset(world.lake, "planes").versions()]


@pytest.fixture
def planes(sparkling: World) -> World:
    sparkling.stream("planes", SCHEMA, ["tailnum"], 2)
    return sparkling


@pytest.fixture
def plain(tmp_path: Path) -> World:
    world = World(open_lake(tmp_path / "lake"), IN_PROCESS)
    world.stream("planes", SCHEMA, ["tailnum"], 2)
    return world


def seats(world: World, opened: Dataset) -> set[int]:
    return {row.seats for row in opened.frame(world.spark).collect()}


# -- by Spark


@pytest.mark.spark
def test_a_frame_keeps_its_version_until_the_dataset_is_closed(planes: World) -> None:
    publish(planes, 1)
    with open_dataset(planes.lake, "planes") as opened:
        frame = opened.frame(planes.spark)
        publish(planes, 2)
        assert opened.refresh()
        assert seats(planes, opened) == {2}
        publish(planes, 3)
        discard_all_but_the_newest(planes)
        assert {row.seats for row in frame.collect()} == {1}
        assert retained(planes) == ["v1", "v2", "v3"]
    assert list_leases(planes.lake, "planes") == []
    discard_all_but_the_newest(planes)
    assert retained(planes) == ["v3"]


@pytest.mark.spark
def test_a_version_discarded_before_spark_reads_it_is_reported(planes: World) -> None:
    publish(planes, 1)
    served, chosen = (
        open_dataset(planes.lake, "planes"),
        open_dataset(planes.lake, "planes", version="v1"),
    )
    with open_dataset(planes.lake, "planes") as other:
        assert seats(planes, other) == {1}, "its table is known to the session from now on"
    publish(planes, 2)
    discard_all_but_the_newest(planes)
    with chosen, pytest.raises(VersionDiscardedError) as caught:
        chosen.frame(planes.spark)
    assert caught.value.dataset == "planes"
    assert str(caught.value.version).startswith("v000001-")
    with served:
        assert seats(planes, served) == {2}, "what is served takes its place"


@pytest.mark.spark
def test_without_a_lease_a_failed_read_by_spark_reports_the_discarded_version(
    planes: World,
) -> None:
    publish(planes, 1)

    def read_late() -> None:
        with open_dataset(planes.lake, "planes", lease=False) as opened:
            frame = opened.frame(planes.spark)
            publish(planes, 2)
            discard_all_but_the_newest(planes)
            frame.collect()

    with pytest.raises(VersionDiscardedError) as caught:
        read_late()
    assert caught.value.dataset == "planes"
    assert str(caught.value.version).startswith("v000001-")
    assert type(caught.value.__context__).__module__.partition(".")[0] in ("py4j", "pyspark")
    with open_dataset(planes.lake, "planes", version="v2", lease=False) as chosen:
        publish(planes, 3)
        discard_all_but_the_newest(planes)
        with pytest.raises(VersionDiscardedError):
            chosen.frame(planes.spark)


@pytest.mark.spark
def test_a_file_lost_while_spark_reads_is_reported_as_damage_other_errors_pass(
    planes: World,
) -> None:
    publish(planes, 1)

    def read(lose: Callable[[Dataset], object]) -> None:
        with open_dataset(planes.lake, "planes") as opened:
            frame = opened.frame(planes.spark)
            lose(opened)
            frame.collect()

    def lose_files(opened: Dataset) -> None:
        for generation in opened.sealed.generations:
            for file in generation.files:
                planes.lake.store.delete(f"{generation.folder}/{file.name}")

    with pytest.raises(ZeroDivisionError):
        read(lambda _: 1 // 0)
    with pytest.raises(ManifestMismatchError) as caught:
        read(lose_files)
    assert caught.value.dataset == "planes"
    assert str(caught.value.version).startswith("v000001-")


def test_the_damaged_version_is_that_of_the_file_and_not_one_that_the_cause_names(
    plain: World,
) -> None:
    publish(plain, 1)
    publish(plain, 2)
    readers = [StoredVersions(plain.lake, "planes").version(name) for name in ("v1", "v2")]
    one, two = (reader.sealed.generations[0] for reader in readers)
    said_messages = (
        "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file"
        f" file:///lake/{two.folder}/{two.files[0].name}.  SQLSTATE: KD001\nCaused by:"
        f" java.io.EOFException: unlike /{one.folder}/{one.files[0].name}\n\tat a.B.c(B.java:1)\n"
    )
    unread = find_unreadable_version(PySparkException(said_messages), readers)
    assert unread is not None
    assert unread[1] is readers[1]
    about = {
        "dataset": "planes",
        "version": readers[1].version,
        "key": f"{two.folder}/{two.files[0].name}",
    }
    assert unread[0].facts | about == unread[0].facts
    assert find_unreadable_version(PySparkException(said_messages), readers[:1]) is None


# -- by other engines, and by key


def test_what_other_engines_were_given_stays_until_the_dataset_is_closed(plain: World) -> None:
    first = publish(plain, 1)
    with open_dataset(plain.lake, "planes", version="v1") as opened:
        given = pyarrow_dataset(opened), polars_frame(opened)
        assert len(parquet_files(opened)) == 2
        assert [lease.versions for lease in list_leases(plain.lake, "planes")] == [(first,)]
        publish(plain, 2)
        discard_all_but_the_newest(plain)
        assert {*given[0].to_table()["seats"].to_pylist()} == {1}
        assert {*given[1].collect()["seats"]} == {1}
    discard_all_but_the_newest(plain)
    with pytest.raises(DatasetError) as caught:
        open_dataset(plain.lake, "planes", version="v1")
    assert (caught.value.dataset, caught.value.version) == ("planes", "v1")
    gone = open_dataset(plain.lake, "planes", version="v2")
    publish(plain, 3)
    discard_all_but_the_newest(plain)
    with pytest.raises(VersionDiscardedError):
        parquet_files(gone)


def test_reading_a_dataset_without_a_version_says_what_it_waits_for(plain: World) -> None:
    plain.mark("planes", "v1", [0])
    plain.advance(PLANES)
    with open_dataset(plain.lake, "planes") as opened:
        assert opened.versions() == ()
        assert repr(opened) == "Dataset('planes', None)"
        for read in (
            lambda: opened.get("N1"),
            opened.items,
            lambda: opened.version,
            opened.refresh,
        ):
            with pytest.raises(
                NoSealedVersionError,
                match="no version has been marked as complete in every partition",
            ):
                read()
        plain.mark("planes", "v1", [1])
        plain.advance(PLANES)
        assert opened.refresh()
        assert opened.get("N1") is None


def test_a_dataset_is_opened_as_of_a_time_or_commit(plain: World) -> None:
    first = publish(plain, 1)
    second = publish(plain, 2)
    commits = {entry.served: entry for entry in open_dataset(plain.lake, "planes").history()}
    for served, entry in ((first, commits[first]), (second, commits[second])):
        for as_of in (entry.at, entry.number):
            assert open_dataset(plain.lake, "planes", as_of=as_of).version == served
    with pytest.raises(NoSealedVersionError) as caught:
        open_dataset(plain.lake, "planes", as_of=datetime(2000, 1, 1, tzinfo=UTC))
    assert caught.value.dataset == "planes"
    with pytest.raises(ConfigurationError) as caught:
        open_dataset(plain.lake, "planes", version="v1", as_of=2)
    assert caught.value.argument == "as_of"


def test_versions_that_are_served_together_are_opened_for_good(plain: World) -> None:
    publish(plain, 1)
    opened = current_versions(plain.lake, ["planes"])["planes"]
    assert opened is not None
    publish(plain, 2)
    with opened:
        assert not opened.refresh()
        assert {entry["seats"] for _, entry in opened.items()} == {1}


def test_a_version_is_verified_under_a_lease(plain: World) -> None:
    first = publish(plain, 1)
    with open_dataset(plain.lake, "planes") as opened:
        assert opened.verify(deep=True).ok
        assert [lease.versions for lease in list_leases(plain.lake, "planes")] == [(first,)]
        assert opened.diff("v1", "v1").changed == 0
    gone = open_dataset(plain.lake, "planes", version="v1", lease=False)
    publish(plain, 2)
    discard_all_but_the_newest(plain)
    with pytest.raises(VersionDiscardedError):
        gone.verify()
