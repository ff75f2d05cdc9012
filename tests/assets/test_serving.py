"""Datasets held open by a reader in plain Python: which version answers, what it fetches, what
holds it.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, bounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.dataset import Dataset, open_dataset
from dagster_adjunct.assets.reading.key_lookup import FileCache
from dagster_adjunct.assets.reading.served_version import Watch
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.versions.leases import list_leases
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetError,
    DatasetNotFoundError,
    ManifestMismatchError,
    NoSealedVersionError,
    SchemaMismatchError,
    StoreUnavailableError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.faulty_store import Fault, FaultyStore
from tests.servers.s3 import S3Server

SCHEMA = Schema.of(tailnum="string", seats="int")
PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=2)
WHY = {"reason": "ticket 7", "by": "ada"}
COUNT = 40


class Planes:
    """A dataset whose version number `n` has `n` seats in every plane, in a store that counts
    requests.
    """

    def __init__(self, lake: Lake, store: FaultyStore) -> None:
        self.world, self.store = World(lake, IN_PROCESS), store
        self.world.stream("planes", SCHEMA, ["tailnum"], 2)

    def publish(self, number: int) -> str:
        self.world.send(
            "planes", [(f"N{n:03d}", number) for n in range(COUNT)], version=f"v{number}"
        )
        self.world.advance(PLANES)
        manifest = self.dataset().require_manifest()
        return max(manifest.versions, key=lambda ref: ref.number).id

    def dataset(self) -> StoredVersions:
        """Return the dataset as a process that starts now sees it: nothing is cached."""
        return StoredVersions(self.world.lake, "planes")

    def open(self, spec: AdjunctDataset | str = "planes", **options: Any) -> Dataset:
        """Return the same as users open it."""
        return open_dataset(self.world.lake, spec, **options)

    def requests(self) -> list[str]:
        """Return the requests since the last look."""
        sent = [request for request, _ in self.store.requests]
        self.store.requests.clear()
        return sent

    def leased(self) -> list[str]:
        """Return the versions that are leased."""
        return sorted(
            version
            for lease in list_leases(self.world.lake, "planes")
            for version in lease.versions
        )

    def damage(self, version: str, change: Callable[[bytes], bytes] | None = None) -> None:
        """Change the files of a version, or delete them."""
        for generation in self.dataset().version(version).sealed.generations:
            for file in generation.files:
                key = f"{generation.folder}/{file.name}"
                data = self.store.get(key).data
                self.store.delete(key)
                if change is not None:
                    self.store.put(key, change(data))

    def discard_all_but_the_newest(self) -> None:
        discard(self.world.lake, "planes", DiscardPolicy(keep=1, grace=timedelta(0)), by="test")


@pytest.fixture
def planes() -> Planes:
    store = FaultyStore(InMemoryStore())
    return Planes(lake_in(store), store)


def seats(served: Dataset) -> int:
    entry = served.get("N007")
    assert entry is not None
    assert entry["tailnum"] == "N007"
    return int(entry["seats"])


# -- reading


def test_entries_schema_and_facts_of_the_version_served(planes: Planes) -> None:
    first = planes.publish(1)
    with planes.open() as served:
        assert (served.name, served.version, served.rows, served.schema) == (
            "planes",
            first,
            COUNT,
            SCHEMA,
        )
        assert served.get("N001") == {"tailnum": "N001", "seats": 1}
        assert served.get("X") is None
        assert served.get_all(["N003", "X", "N004"]) == {
            "N003": {"tailnum": "N003", "seats": 1},
            "N004": {"tailnum": "N004", "seats": 1},
        }
        assert [key for key, _ in served.items()] == [f"N{n:03d}" for n in range(COUNT)]
        assert [key for key, _ in served.items("N03")] == [f"N{n:03d}" for n in range(30, 40)]
        assert [key for key, _ in served.items(start="N005", end="N008")] == [
            "N005",
            "N006",
            "N007",
        ]
        with pytest.raises(SchemaMismatchError) as caught:
            served.get(7)
        assert caught.value.column == "tailnum"
        with pytest.raises(SchemaMismatchError) as caught:
            served.items(start=7)
        assert caught.value.column == "tailnum"


def test_a_first_get_of_a_new_process_is_three_requests_and_a_warm_one_none(planes: Planes) -> None:
    planes.publish(1)
    planes.requests()
    served = planes.open()
    assert seats(served) == 1
    assert planes.requests() == ["get", "get", "get_range"]
    served.take_lease()
    planes.requests()
    assert [seats(served) for _ in range(5)] == [1] * 5
    assert planes.requests() == []
    served.close()


@pytest.mark.server
def test_a_first_get_is_three_requests_on_s3(s3_server: S3Server) -> None:
    store = FaultyStore(open_lake(s3_server.url(), settings=s3_server.settings).store)
    planes = Planes(lake_in(store), store)
    planes.publish(1)
    planes.requests()
    with planes.open() as served:
        assert seats(served) == 1
        assert planes.requests() == ["get", "get", "get_range"]
        assert [entry["seats"] for _, entry in served.items()] == [1] * COUNT
        planes.publish(2)
        assert served.refresh()
        assert seats(served) == 2


def test_what_is_not_there_is_named(planes: Planes) -> None:
    with pytest.raises(DatasetNotFoundError) as caught:
        planes.open()
    assert caught.value.dataset == "planes"
    planes.publish(1)
    with pytest.raises(DatasetError) as caught:
        planes.open(version="v9")
    assert (caught.value.dataset, caught.value.version) == ("planes", "v9")


def test_a_cache_can_be_shared_by_readers(planes: Planes) -> None:
    planes.publish(1)
    cache = FileCache()
    with planes.open(cache=cache) as one, planes.open(cache=cache) as other:
        assert seats(one) == 1
        planes.requests()
        assert seats(other) == 1
        assert "get_range" not in planes.requests()


def test_a_closed_reader_says_so(planes: Planes) -> None:
    planes.publish(1)
    with planes.open() as served:
        pass
    for call in (
        lambda: served.get("N007"),
        served.refresh,
        served.take_lease,
        served.items,
        lambda: served.version,
    ):
        with pytest.raises(DatasetError, match="the reader of dataset 'planes' is closed"):
            call()
    served.close()


# -- moving on


def test_a_reader_moves_to_a_new_version_between_two_calls_and_only_when_asked_to(
    planes: Planes,
) -> None:
    first = planes.publish(1)
    with planes.open() as served:
        planes.requests()
        assert not served.refresh()
        assert planes.requests() == ["head"], "one request while nothing has changed"
        second = planes.publish(2)
        assert (served.version, seats(served)) == (first, 1)
        assert served.refresh()
        assert (served.version, seats(served)) == (second, 2)
        assert not served.refresh()
        planes.dataset().rollback(**WHY)
        assert served.refresh()
        assert (served.version, seats(served)) == (first, 1)


def test_a_commit_that_serves_the_same_version_moves_nobody(planes: Planes) -> None:
    planes.publish(1)
    with planes.open() as served:
        planes.dataset().pin("v1", **WHY)
        assert not served.refresh()
        planes.publish(2)
        assert not served.refresh(), "pinned"
        planes.dataset().unpin(**WHY)
        assert served.refresh()
        assert seats(served) == 2


def test_an_iteration_keeps_its_version_over_a_switch(planes: Planes) -> None:
    planes.publish(1)
    with planes.open() as served:
        begun, not_begun = served.items(), served.items()
        begun_with = [next(begun) for _ in range(5)]
        planes.publish(2)
        assert served.refresh()
        assert {entry["seats"] for _, entry in [*begun_with, *begun]} == {1}
        assert [entry["seats"] for _, entry in not_begun] == [1] * COUNT
        assert [entry["seats"] for _, entry in served.items()] == [2] * COUNT


def test_a_fixed_version_stays_whatever_is_served(planes: Planes) -> None:
    first = planes.publish(1)
    planes.publish(2)
    with planes.open(version="v1") as served:
        assert not served.refresh()
        assert (served.version, seats(served)) == (first, 1)
        planes.dataset().revoke("v1", **WHY)
        with pytest.raises(DatasetError) as caught:
            served.refresh()
        assert caught.value.version == first
        with pytest.raises(DatasetError, match="is revoked"):
            served.get("N007")


def test_nothing_is_read_once_the_only_version_is_revoked(planes: Planes) -> None:
    planes.publish(1)
    with planes.open() as served:
        assert seats(served) == 1
        planes.dataset().revoke("v1", **WHY)
        with pytest.raises(NoSealedVersionError) as caught:
            served.refresh()
        assert caught.value.dataset == "planes"
        with pytest.raises(NoSealedVersionError) as caught:
            served.get("N007")
        assert caught.value.dataset == "planes"
        planes.publish(2)
        assert served.refresh()
        assert seats(served) == 2


def test_a_refresh_that_fails_leaves_the_reader_where_it_is(planes: Planes) -> None:
    planes.publish(1)
    with planes.open() as served:
        planes.publish(2)
        planes.store.requests.clear()
        planes.store.plan = (Fault("get", 2, "throttle"),)
        with pytest.raises(StoreUnavailableError):
            served.refresh()
        assert seats(served) == 1
        planes.store.plan = ()
        assert served.refresh(), "the change that it did not get to see is still to be seen"
        assert seats(served) == 2


# -- watching


def eventually(matched: Callable[[], Any]) -> None:
    end = time.monotonic() + 240
    while not matched():
        assert time.monotonic() < end, "not met within 240 s"
        time.sleep(0.005)


@pytest.mark.lengthy
def test_a_watch_moves_the_reader_and_shows_its_errors_until_it_is_stopped(planes: Planes) -> None:
    planes.publish(1)
    with planes.open() as served:
        with served.watch(interval=0.01) as watch:
            assert served.watch() is watch
            planes.publish(2)
            eventually(lambda: seats(served) == 2)
            planes.store.plan = tuple(Fault("head", nth, "throttle") for nth in range(1, 10_000))
            eventually(lambda: isinstance(watch.error, StoreUnavailableError))
            assert watch.failing_since is not None
            assert seats(served) == 2
            planes.store.plan = ()
            planes.publish(3)
            eventually(lambda: seats(served) == 3 and watch.error is None)
            assert (watch.failing_since, watch.running) == (None, True)
        assert not watch.running
        planes.publish(4)
        time.sleep(0.05)
        assert seats(served) == 3
        with served.watch(interval=0.01):
            eventually(lambda: seats(served) == 4)
    with pytest.raises(ConfigurationError) as failure, planes.open() as served:
        served.watch(interval=0)
    assert (failure.value.argument, failure.value.dataset) == ("interval", "planes")


def test_a_watch_that_is_made_by_hand_begins_where_it_is_entered() -> None:
    refreshed = threading.Event()
    watch = Watch("planes", lambda: refreshed.set, 0.001)
    assert not watch.running
    with watch:
        assert watch.running
        assert refreshed.wait(60)
    assert not watch.running


@pytest.mark.lengthy
def test_threads_see_whole_versions_that_never_go_back(planes: Planes) -> None:
    planes.publish(1)
    keys = [f"N{n:03d}" for n in range(COUNT)]
    seen: list[list[set[int]]] = [[] for _ in range(4)]
    ended = threading.Event()
    with planes.open() as served, served.watch(interval=0.002):

        def read(mine: list[set[int]]) -> None:
            while not ended.is_set():
                mine.append({entry["seats"] for entry in served.get_all(keys).values()})
                mine.append({entry["seats"] for _, entry in served.items()})

        threads = [threading.Thread(target=read, args=(mine,)) for mine in seen]
        for thread in threads:
            thread.start()
        for number in range(2, 12):
            planes.publish(number)
            planes.discard_all_but_the_newest()
        eventually(lambda: seats(served) == 11)
        ended.set()
        for thread in threads:
            thread.join()
    for mine in seen:
        versions = [version for whole in mine for version in whole]
        assert len(versions) == len(mine), "every call read one version"
        assert versions == sorted(versions)


# -- leases


def test_the_lease_is_taken_before_the_second_answer_and_given_back_in_the_end(
    planes: Planes,
) -> None:
    first = planes.publish(1)
    with planes.open(holder="the web shop") as served:
        assert seats(served) == 1
        assert planes.leased() == []
        assert seats(served) == 1
        assert planes.leased() == [first]
        assert [lease.holder for lease in list_leases(planes.world.lake, "planes")] == [
            "the web shop"
        ]
    assert planes.leased() == []


def test_a_leased_version_stays_until_its_reader_and_iterations_have_moved_on(
    planes: Planes,
) -> None:
    first = planes.publish(1)
    with planes.open() as served:
        running = served.items()
        next(running)
        second = planes.publish(2)
        planes.discard_all_but_the_newest()
        assert seats(served) == 1
        assert served.refresh()
        assert planes.leased() == [first, second]
        planes.discard_all_but_the_newest()
        assert [entry["seats"] for _, entry in running] == [1] * (COUNT - 1)
        assert planes.leased() == [second]
        dropped = served.items()
        planes.publish(3)
        assert served.refresh()
        assert second in planes.leased()
        del dropped
        assert second not in planes.leased()
    assert planes.leased() == []


def test_without_leases_nothing_is_written_and_a_discarded_version_gives_way(
    planes: Planes,
) -> None:
    planes.publish(1)
    with planes.open(lease=False) as served:
        planes.requests()
        assert (seats(served), seats(served), len(list(served.items()))) == (1, 1, COUNT)
        served.take_lease()
        assert {*planes.requests()} == {"get_range"}
    with planes.open(lease=False) as served:
        planes.publish(2)
        planes.discard_all_but_the_newest()
        assert seats(served) == 2, "what it opened is gone, so it answers from what is served"
        planes.publish(3)
        planes.discard_all_but_the_newest()
        assert {
            entry["seats"] for entry in served.get_all(f"N{n:03d}" for n in range(COUNT)).values()
        } == {3}
        assert served.damaged == {}
    with planes.open(lease=False) as served:
        planes.publish(4)
        planes.discard_all_but_the_newest()
        assert [entry["seats"] for _, entry in served.items()] == [4] * COUNT


def test_an_iteration_without_a_lease_fails_where_its_version_is_discarded(
    planes: Planes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_adjunct.resources.bucketing.writer.ROWS_PER_GROUP", 4)
    first = planes.publish(1)
    with planes.open(lease=False) as served:
        running = served.items()
        next(running)
        planes.publish(2)
        planes.discard_all_but_the_newest()
        with pytest.raises(VersionDiscardedError) as caught:
            list(running)
        assert (caught.value.dataset, caught.value.version) == ("planes", first)
    with planes.open(version="v2", lease=False) as fixed:
        planes.publish(3)
        planes.discard_all_but_the_newest()
        with pytest.raises(VersionDiscardedError) as caught:
            fixed.get("N007")
        assert caught.value.version == fixed.version


def test_a_version_discarded_before_it_could_be_leased_gives_way_too(planes: Planes) -> None:
    planes.publish(1)
    with planes.open() as served, planes.open(version="v1") as fixed:
        planes.publish(2)
        planes.discard_all_but_the_newest()
        assert [entry["seats"] for _, entry in served.items()] == [2] * COUNT
        with pytest.raises(VersionDiscardedError) as caught:
            fixed.take_lease()
        assert caught.value.version == fixed.version


def test_a_lease_that_was_lost_is_taken_again(planes: Planes) -> None:
    first = planes.publish(1)
    with planes.open() as served:
        served.take_lease()
        for lease in list_leases(planes.world.lake, "planes"):
            planes.store.delete(lease.key)
        held = served._served.held
        assert held is not None
        assert held.lease is not None
        held.lease.renew()
        assert (held.lease.lost, planes.leased()) == (True, [])
        assert seats(served) == seats(served) == 1
        assert planes.leased() == [first]


def test_a_dataset_that_is_dropped_unclosed_gives_its_lease_back(planes: Planes) -> None:
    first = planes.publish(1)
    served = planes.open()
    served.take_lease()
    with served.watch(interval=0.01) as watch:
        assert planes.leased() == [first]
        del served
        gc.collect()
        eventually(lambda: not watch.running and planes.leased() == [])


def test_a_dataset_collected_together_with_its_iteration_gives_its_lease_back(
    planes: Planes,
) -> None:
    first = planes.publish(1)
    served = planes.open()
    running = served.items()
    next(running)
    cycle: list[Any] = [served, running]
    cycle.append(cycle)
    assert planes.leased() == [first]
    del served, running, cycle
    gc.collect()
    eventually(lambda: planes.leased() == [])


def test_a_dropped_dataset_frees_what_it_has_cached_at_once(planes: Planes) -> None:
    planes.publish(1)
    served = planes.open()
    assert seats(served) == 1
    cache = weakref.ref(served._stored._cache)
    gc.disable()
    try:
        del served
        assert cache() is None, "only the collector of cycles would free it"
    finally:
        gc.enable()


@pytest.mark.lengthy
def test_iterations_and_readers_keep_the_lease_of_a_dropped_dataset(planes: Planes) -> None:
    first = planes.publish(1)
    running = planes.open().items()
    next(running)
    gc.collect()
    time.sleep(0.05)
    assert planes.leased() == [first]
    assert len(list(running)) == COUNT - 1
    del running
    gc.collect()
    eventually(lambda: planes.leased() == [])
    planes.open().lend(lambda reader: reader.version)
    gc.collect()
    time.sleep(0.05)
    assert planes.leased() == [first], "an engine reads it later"


def test_a_reader_that_may_not_write_is_reported_what_to_do(planes: Planes) -> None:
    planes.publish(1)

    def refuse() -> None:
        raise ConfigurationError(
            "PUT was answered 403 AccessDenied: these credentials may not do it.", "Check them."
        )

    with planes.open() as served:
        planes.store.plan = tuple(
            Fault("put_if_absent", nth, "meanwhile", refuse) for nth in range(1, 1_000)
        )
        assert seats(served) == 1
        with pytest.raises(
            DatasetError, match=r"could not write its lease: PUT was answered 403.*lease=False"
        ):
            served.get("N007")


# -- damage


@pytest.mark.parametrize("change", [None, lambda data: data[:4] + b"x" * 40 + data[44:]])
def test_a_damaged_file_is_an_error_by_default(
    planes: Planes, change: Callable[[bytes], bytes] | None
) -> None:
    planes.publish(1)
    second = planes.publish(2)
    planes.damage(second, change)
    with planes.open() as served:
        for _ in range(2):
            with pytest.raises(ManifestMismatchError) as caught:
                served.get("N007")
            assert second.partition("-")[2] in str(caught.value.key)
        with pytest.raises(ManifestMismatchError) as caught:
            next(served.items())
        assert second.partition("-")[2] in str(caught.value.key)
        assert [*served.damaged] == [second]
        assert served.version == second
        planes.publish(3)
        assert seats(served) == 3, "another version is served by now"


@pytest.mark.parametrize("change", [None, lambda data: data[:4] + b"x" * 40 + data[44:]])
def test_a_reader_falls_back_to_the_version_before_where_the_dataset_says_so(
    planes: Planes, change: Callable[[bytes], bytes] | None, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = planes.publish(1), planes.publish(2)
    planes.damage(second, change)
    with planes.open(replace(PLANES, on_damage="previous")) as served:
        assert seats(served) == 1
        assert served.version == first
        assert [*served.damaged] == [second]
        assert second in str(served.damaged[second])
        (warning,) = [
            record.getMessage() for record in caplog.records if record.levelname == "WARNING"
        ]
        assert f"{first} is read instead of {second}" in warning
        assert not served.refresh(), "the damaged version is still the one served"
        planes.dataset().pin(second, **WHY)
        assert not served.refresh()
        assert len(served.get_all(["N001", "N002"])) == 2
        planes.dataset().unpin(**WHY)
        planes.publish(3)
        assert served.refresh()
        assert seats(served) == 3
        planes.dataset().rollback("v1", **WHY)
        assert served.refresh()
        assert seats(served) == 1


def test_an_iteration_falls_back_before_its_first_entry_and_fails_after_it(
    planes: Planes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_adjunct.resources.bucketing.writer.ROWS_PER_GROUP", 4)
    planes.publish(1)
    second = planes.publish(2)
    with planes.open(on_damage="previous") as served:
        begun = served.items()
        assert next(begun)[1]["seats"] == 2
        planes.damage(second)
        with pytest.raises(ManifestMismatchError) as caught:
            list(begun)
        assert second.partition("-")[2] in str(caught.value.key)
        assert [entry["seats"] for _, entry in served.items(start="N030")] == [1] * 10


def test_the_fallback_skips_damaged_versions_and_fails_when_none_is_readable(
    planes: Planes,
) -> None:
    versions = [planes.publish(number) for number in (1, 2, 3)]
    planes.dataset().revoke("v2", **WHY)
    with planes.open(on_damage="previous") as served:
        planes.damage(versions[2])
        assert seats(served) == 1, "a revoked version is never read"
        planes.damage(versions[0])
        cold = planes.open(on_damage="previous", lease=False)
        with pytest.raises(ManifestMismatchError) as caught:
            cold.get("N007")
        assert versions[0].partition("-")[2] in str(caught.value.key)
        assert sorted(cold.damaged) == [versions[0], versions[2]]


def test_a_reader_of_a_fixed_version_never_falls_back(planes: Planes) -> None:
    planes.publish(1)
    second = planes.publish(2)
    planes.damage(second)
    with (
        planes.open(version="v2", on_damage="previous") as served,
        pytest.raises(ManifestMismatchError),
    ):
        served.get("N007")


def test_a_version_that_was_damaged_is_tried_again_when_it_is_chosen_again(planes: Planes) -> None:
    planes.publish(1)
    second = planes.publish(2)
    view = planes.dataset().version(second)
    kept = {
        f"{generation.folder}/{file.name}": (
            planes.store.get(f"{generation.folder}/{file.name}").data
        )
        for generation in view.sealed.generations
        for file in generation.files
    }
    planes.damage(second)
    with planes.open(on_damage="previous") as served:
        assert seats(served) == 1
        planes.publish(3)
        assert served.refresh()
        for key, data in kept.items():
            planes.store.put(key, data)
        planes.dataset().rollback(**WHY)
        assert served.refresh()
        assert (served.version, seats(served)) == (second, 2)
