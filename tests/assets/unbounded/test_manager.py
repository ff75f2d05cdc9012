"""AdjunctDatasetManager: which stream feeds which datasets, and what becomes of its records
(SAMZA-1278).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dagster_adjunct.assets.advance_dataset import AdjunctDatasetManager
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    FileSource,
    bounded_dataset,
    unbounded_dataset,
    version_set,
)
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.versions.leases import list_leases
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetNotFoundError,
    NoSealedVersionError,
    OffsetOutOfRangeError,
)
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.assets.conftest import World
from tests.assets.unbounded.following_plain import COLUMNS, NAME, table_in

FEED = f"lake.{NAME}"


def following(name: str, **options: object) -> AdjunctDataset:
    return unbounded_dataset(name, input=FEED, key="k", partitions=2, **options)  # type: ignore[arg-type]


def manager(world: World, *datasets: AdjunctDataset) -> AdjunctDatasetManager:
    return AdjunctDatasetManager(datasets, lake=world.lake, systems=world.systems)


def content(world: World, name: str) -> dict[str, int]:
    with open_dataset(world.lake, name) as opened:
        return {key: entry["n"] for key, entry in opened.items()}


@pytest.fixture
def feed(world: World) -> World:
    world.stream(NAME, COLUMNS, ["k"], 2)
    return world


def test_one_stream_may_feed_several_datasets_and_a_dataset_has_one_input(feed: World) -> None:
    one, two, other = (
        following("one"),
        following("two"),
        replace(following("other"), input="lake.other"),
    )
    files = bounded_dataset(
        "files", input=FileSource("folder", "csv", COLUMNS), key="k", partitions=2
    )
    datasets = manager(feed, one, two, other, files)
    assert datasets.inputs() == {FEED: ("one", "two"), "lake.other": ("other",)}
    assert datasets.datasets_of(FEED) == (one, two)
    assert datasets.datasets_of(SystemStreamPartition("lake", NAME, 1)) == (one, two)
    assert datasets.datasets_of("lake.main") == ()


def test_a_dataset_that_is_declared_in_two_ways_is_refused(feed: World) -> None:
    with pytest.raises(ConfigurationError) as failure:
        manager(feed, following("one"), following("one", bootstrap=False))
    assert failure.value.dataset == "one"


def test_a_stream_of_datasets_reaches_the_application_only_if_it_reads_it_itself(
    feed: World,
) -> None:
    datasets = manager(feed, following("one"))
    assert datasets.takes(FEED, app_inputs=["lake.main"])
    assert datasets.takes(SystemStreamPartition("lake", NAME, 0), app_inputs=())
    assert not datasets.takes(FEED, app_inputs=["lake.main", FEED])
    assert not datasets.takes("lake.main", app_inputs=["lake.main"])
    assert not datasets.takes("lake.unknown", app_inputs=())


def test_a_batch_of_a_stream_goes_into_all_its_datasets_each_with_its_own_progress(
    feed: World,
) -> None:
    one, two = following("one"), following("two")
    feed.send(NAME, [("a", 1)])
    assert manager(feed, one).process(FEED, IN_PROCESS, "test")["one"].action == "bootstrapped"
    feed.send(NAME, [("a", 2), ("b", 3)])
    both = manager(feed, one, two)
    reports = both.process(SystemStreamPartition("lake", NAME, 0), IN_PROCESS, by="test")
    assert {name: (report.action, report.counters["read"]) for name, report in reports.items()} == {
        "one": ("applied", 2),
        "two": ("bootstrapped", 3),
    }
    assert content(feed, "one") == content(feed, "two") == {"a": 2, "b": 3}
    assert both.process("lake.main", IN_PROCESS, "test") == {}, (
        "nobody takes it: it is the application's"
    )


def test_bounded_datasets_and_version_sets_are_fed_as_well(feed: World) -> None:
    plain = bounded_dataset("plain", input=FEED, key="k", partitions=2)
    left, right = version_set(
        "pair",
        bounded_dataset("left", input=FEED, key="k", partitions=2),
        bounded_dataset("right", input=FEED, key="k", partitions=2),
    )
    feed.send(NAME, [("a", 1)], version="v1")
    datasets = manager(feed, plain, left, right)
    with pytest.raises(DatasetNotFoundError) as caught:
        datasets.frame("plain", IN_PROCESS)
    assert caught.value.dataset == "plain"
    reports = datasets.process(FEED, IN_PROCESS, "test")
    assert {name: report.action for name, report in reports.items()} == dict.fromkeys(
        ("plain", "left", "right"), "sealed"
    )
    assert content(feed, "right") == {"a": 1}
    assert datasets.reset_at_start() == set(), "versions are never read again"


def test_an_unknown_dataset_is_named(feed: World) -> None:
    with pytest.raises(ConfigurationError) as failure:
        manager(feed, following("one")).frame("three", IN_PROCESS)
    assert failure.value.dataset == "three"


# -- what is reset at start


def partitions() -> set[SystemStreamPartition]:
    return {SystemStreamPartition("lake", NAME, number) for number in (0, 1)}


def test_tables_of_one_run_are_reset_at_start_where_they_are_marked_for_bootstrap(
    feed: World,
) -> None:
    feed.send(NAME, [("a", 1)])
    assert manager(feed, following("one", persistent=False)).reset_at_start() == partitions()
    assert (
        manager(feed, following("one", persistent=False, bootstrap=False)).reset_at_start() == set()
    )


def test_stored_tables_are_reset_at_start_where_a_bootstrap_is_decided(feed: World) -> None:
    feed.send(NAME, [("a", 1)])
    one = following("one")
    datasets = manager(feed, one)
    assert datasets.reset_at_start() == partitions(), "no store was found"
    assert StoredVersions(feed.lake, one).manifest() is None, "it only looks"
    datasets.process(FEED, IN_PROCESS, "test")
    assert datasets.reset_at_start() == set(), "it is valid"
    version = StoredVersions(feed.lake, one).require_manifest().version
    assert version is not None
    lost = next(generation for generation in version.generations if generation.files)
    (Path(feed.lake.url) / lost.folder / lost.files[0].name).unlink()
    assert datasets.reset_at_start() == partitions(), "it is not valid"
    assert manager(feed, following("two", bootstrap=False)).reset_at_start() == set()


def test_a_table_that_lost_its_place_and_is_to_fail_says_so(world: World) -> None:
    table = table_in(world, on_lost_offset="fail")
    table.advance()
    table.send(a=1, b=2, c=3, d=4)
    table.send(e=5, f=6, g=7, h=8)
    table.drop_the_front()
    with pytest.raises(OffsetOutOfRangeError) as caught:
        manager(world, table.spec).reset_at_start()
    assert caught.value.dataset == "accounts"


# -- tables of one run


@pytest.mark.spark
def test_a_table_of_one_run_lives_in_the_manager(sparkling: World) -> None:
    sparkling.stream(NAME, COLUMNS, ["k"], 2)
    one = following("one", persistent=False)
    datasets = manager(sparkling, one)
    with pytest.raises(NoSealedVersionError) as failure:
        datasets.frame("one", sparkling.spark)
    assert failure.value.dataset == "one"
    sparkling.send(NAME, [("a", 1), ("b", 2)])
    assert datasets.process(FEED, sparkling.spark, "test")["one"].action == "bootstrapped"
    sparkling.send(NAME, [("a", 3)])
    assert datasets.process(FEED, sparkling.spark, "test")["one"].counters == {"read": 1}
    assert {row.k: row.n for row in datasets.frame("one", sparkling.spark).collect()} == {
        "a": 3,
        "b": 2,
    }
    assert StoredVersions(sparkling.lake, one).manifest() is None, "nothing is stored"
    datasets.release()
    with pytest.raises(NoSealedVersionError):
        datasets.frame("one", sparkling.spark)


@pytest.mark.spark
def test_what_a_stored_dataset_holds_is_held_until_it_is_asked_for_again(sparkling: World) -> None:
    sparkling.stream(NAME, COLUMNS, ["k"], 2)
    datasets = manager(sparkling, following("one"))
    held = []
    for number in (1, 2):
        sparkling.send(NAME, [("a", number)])
        report = datasets.process(FEED, sparkling.spark, "test")["one"]
        assert [row.n for row in datasets.frame("one", sparkling.spark).collect()] == [number]
        held.append((list_leases(sparkling.lake, "one")[0].versions, (report.version,)))
    assert all(versions == expected for versions, expected in held)
    datasets.release()
    assert list_leases(sparkling.lake, "one") == []
