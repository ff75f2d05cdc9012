"""Datasets that switch together: one commit publishes all of them, and readers get all or none."""

from __future__ import annotations

import contextlib
import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.bounded.advance import abandon_version, advance_version_set
from dagster_adjunct.assets.declaration.dataset import bounded_dataset, version_set
from dagster_adjunct.assets.reading.dataset import current_versions
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    DatasetError,
    MarkerConflictError,
    NoSealedVersionError,
)
from dagster_adjunct.resources.objects.lake import lake_in
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.faulty_store import Crash, Fault, FaultyStore

SCHEMA = Schema.of(k="string", n="int")
WHY = {"reason": "ticket 7", "by": "ada"}
NAMES = ("fares", "routes")
ALONE = tuple(bounded_dataset(name, input=f"lake.{name}", key="k", partitions=2) for name in NAMES)
SET = version_set("prices", *ALONE)


@pytest.fixture
def prices(world: World) -> World:
    world.spark = IN_PROCESS
    for name in NAMES:
        world.stream(name, SCHEMA, ["k"], 2)
    return world


def send(world: World, version: str, number: int, *names: str) -> None:
    for name in names or NAMES:
        world.send(name, [("a", number), ("b", number)], version=version)


def advance(world: World, lake=None):
    return advance_version_set(
        SET, lake=lake or world.lake, systems=world.systems, spark=IN_PROCESS, by="test"
    )


def test_current_versions_takes_any_iterable_of_datasets(prices: World) -> None:
    send(prices, "v1", 1)
    advance(prices)
    with ExitStack() as opened:
        served = current_versions(prices.lake, (name for name in NAMES))
        assert [opened.enter_context(it).get("a") for it in served.values() if it] == [
            {"k": "a", "n": 1}
        ] * 2


def seen(world: World) -> dict[str, int | None]:
    with ExitStack() as open_meanwhile:
        served = {
            name: it and open_meanwhile.enter_context(it)
            for name, it in current_versions(world.lake, NAMES).items()
        }
        return {name: None if it is None else it.get("a")["n"] for name, it in served.items()}


def test_a_version_is_published_only_when_every_member_has_it(prices: World) -> None:
    send(prices, "v1", 1)
    assert [report.action for report in advance(prices)] == ["sealed", "sealed"]
    send(prices, "v2", 2, "fares")
    fares, routes = advance(prices)
    assert (fares.action, routes.action) == ("waiting", "waiting")
    assert fares.waiting == routes.waiting == ("lake.routes.0", "lake.routes.1")
    assert seen(prices) == {"fares": 1, "routes": 1}
    send(prices, "v2", 2, "routes")
    advance(prices)
    assert seen(prices) == {"fares": 2, "routes": 2}


def test_what_all_members_wait_for_is_one_commit_and_nothing_new_is_none(prices: World) -> None:
    def commits() -> int:
        return DatasetLog(prices.lake, "fares").read_all()[0].number

    advance(prices)
    begun = commits()
    for name in NAMES:
        prices.streams.append_markers(name, "v1", producer="x", sequence=1, partitions=[0])
    fares, routes = advance(prices)
    assert (fares.waiting, routes.waiting) == (("lake.fares.1",), ("lake.routes.1",))
    assert commits() == begun + 1
    advance(prices)
    assert commits() == begun + 1


def test_pins_rollbacks_and_revocations_move_all_members_in_one_commit(prices: World) -> None:
    for number in (1, 2, 3):
        send(prices, f"v{number}", number)
    advance(prices)
    store = StoredVersions(prices.lake, "fares")
    before = store.log.read()[0].number
    store.rollback(**WHY)
    assert seen(prices) == {"fares": 2, "routes": 2}
    assert store.log.read()[0].number == before + 1
    store.pin("v1", **WHY)
    assert seen(prices) == {"fares": 1, "routes": 1}
    StoredVersions(prices.lake, "routes").unpin(**WHY)
    assert seen(prices) == {"fares": 2, "routes": 2}
    store.revoke("v2", **WHY)
    assert seen(prices) == {"fares": 1, "routes": 1}
    assert [entry.action for entry in StoredVersions(prices.lake, "routes").history()][:4] == [
        "revoke", "unpin", "pin", "rollback",
    ]  # fmt: skip


def test_what_one_member_refuses_is_refused_for_all(prices: World) -> None:
    send(prices, "v1", 1)
    advance(prices)
    send(prices, "v2", 2, "fares")
    prices.streams.append_markers("routes", "v2", producer="x", sequence=1, rows={0: 7, 1: 7})
    fares, routes = advance(prices)
    assert (fares.action, routes.action) == ("rejected", "rejected")
    assert "member routes of the version set rejected it" in fares.note
    assert seen(prices) == {"fares": 1, "routes": 1}
    send(prices, "v3", 3)
    advance(prices)
    assert seen(prices) == {"fares": 3, "routes": 3}


def test_a_member_that_did_not_change_switches_with_the_others(prices: World) -> None:
    send(prices, "v1", 1)
    advance(prices)
    send(prices, "v2", 1, "fares")
    send(prices, "v2", 2, "routes")
    assert [report.action for report in advance(prices)] == ["unchanged", "sealed"]
    assert seen(prices) == {"fares": 1, "routes": 2}
    StoredVersions(prices.lake, "routes").rollback("v1", **WHY)
    StoredVersions(prices.lake, "routes").rollback("v2", **WHY)
    assert seen(prices) == {"fares": 1, "routes": 2}


def test_a_dataset_with_versions_joins_with_what_it_has(prices: World) -> None:
    send(prices, "v1", 1)
    prices.advance(ALONE[0])
    advance(prices)  # v1 of the other member: the first one is not waited for
    assert seen(prices) == {"fares": 1, "routes": 1}
    with pytest.raises(DatasetError) as failure:
        prices.advance(ALONE[0])
    assert failure.value.dataset == "fares"
    with pytest.raises(DatasetError) as failure:
        advance_version_set(
            version_set("prices", SET[0], _other()),
            lake=prices.lake,
            systems=prices.systems,
            spark=IN_PROCESS,
            by="test",
        )
    assert failure.value.dataset == "routes"
    with pytest.raises(ConfigurationError) as failure:
        prices.advance(SET[0])
    assert failure.value.dataset in ("fares", "routes")


def _other():
    return bounded_dataset("other", input="lake.routes", key="k", partitions=2)


def test_members_that_deliver_different_versions_are_reported_to_the_user(prices: World) -> None:
    send(prices, "v1", 1, "fares")
    send(prices, "one", 1, "routes")
    with pytest.raises(MarkerConflictError, match="fares: 'v1'; routes: 'one'"):
        advance(prices)


def test_a_version_that_one_member_abandons_ends_for_all(prices: World) -> None:
    send(prices, "v1", 1, "fares")
    fares, routes = advance(prices)
    assert (fares.waiting_since, fares.note) == (routes.waiting_since, routes.note), (
        "each says what all wait for"
    )
    with pytest.raises(
        NoSealedVersionError, match=r"wait for the end-of-dataset markers of lake\.routes\.0"
    ):
        StoredVersions(prices.lake, SET[0]).require_current(prices.systems)
    abandon_version(prices.lake, "routes", "v1", **WHY)
    send(prices, "v1", 1, "routes")
    advance(prices)
    assert seen(prices) == dict.fromkeys(NAMES), "or one member would be published alone"
    send(prices, "v2", 2)
    advance(prices)
    assert seen(prices) == {"fares": 2, "routes": 2}


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", ["crash-before", "crash-after"])
@pytest.mark.parametrize(
    ("request_", "nth"),
    [("put_if_absent", n) for n in range(1, 8)] + [("put_if_match", 1), ("put_if_match", 2)],
)
def test_a_crash_while_joining_or_publishing_leaves_all_or_none(
    prices: World, request_: str, nth: int, kind: str
) -> None:
    send(prices, "v1", 1)
    prices.advance(ALONE[0])
    store = FaultyStore(prices.lake.store, [Fault(request_, nth, kind)])
    with contextlib.suppress(Crash):
        advance(prices, lake_in(store))
    assert seen(prices) in ({"fares": 1, "routes": None}, {"fares": 1, "routes": 1})
    send(prices, "v2", 2)
    advance(prices)
    assert seen(prices) == {"fares": 2, "routes": 2}


def test_a_writer_that_knew_a_member_before_it_joined_can_not_commit(prices: World) -> None:
    send(prices, "v1", 1)
    prices.advance(ALONE[0])
    log = DatasetLog(prices.lake, "fares")
    commit, manifest = log.read()
    advance(prices)
    with pytest.raises(CommitConflictError):
        log.commit(commit, manifest, by="late")


@pytest.mark.lengthy
def test_readers_never_see_a_mix_of_two_versions_of_a_set(prices: World) -> None:
    send(prices, "v1", 1)
    advance(prices)
    mixed: list[dict[str, int | None]] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            versions = seen(prices)
            if len(set(versions.values())) != 1:
                mixed.append(versions)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(2, 12):
        send(prices, f"v{number}", number)
        advance(prices)
    done.set()
    for reader in readers:
        reader.join()
    assert not mixed


@pytest.mark.parametrize("timed", [NAMES, NAMES[:1], NAMES[1:]])
@pytest.mark.parametrize("back", ["revoke", "rollback"])
def test_a_version_of_an_older_time_is_sealed_but_served_in_no_member(
    prices: World, timed: tuple[str, ...], back: str
) -> None:
    """Also where one member alone tells times: a version is current in all members, or in none."""
    dated = (
        bounded_dataset(
            name,
            input=f"lake.{name}",
            key="k",
            partitions=2,
            valid_from="name" if name in timed else None,
        )
        for name in NAMES
    )
    members = version_set("dated", *dated)
    for number in (1, 5, 3):
        send(prices, f"2026-01-0{number}", number)
        reports = advance_version_set(
            members, lake=prices.lake, systems=prices.systems, spark=IN_PROCESS, by="test"
        )
        assert [report.action for report in reports] == ["sealed", "sealed"]
    assert seen(prices) == {"fares": 5, "routes": 5}
    store = StoredVersions(prices.lake, timed[0])
    if back == "revoke":
        store.revoke("2026-01-05", **WHY)
    else:
        store.rollback(**WHY)
    if timed == NAMES:
        assert seen(prices) == {"fares": 3, "routes": 3}
    assert len(set(seen(prices).values())) == 1, "members serve one version"


def test_a_new_member_without_a_version_serves_none_while_another_serves_a_later_one(
    prices: World,
) -> None:
    fares, routes = (replace(dataset, valid_from="name") for dataset in ALONE)
    send(prices, "2026-02-01", 2, "fares")
    advance_dataset(fares, lake=prices.lake, systems=prices.systems, spark=IN_PROCESS, by="test")
    send(prices, "2026-01-01", 1)
    members = version_set("prices", fares, routes)
    reports = advance_version_set(
        members, lake=prices.lake, systems=prices.systems, spark=IN_PROCESS, by="test"
    )
    assert [report.action for report in reports] == ["sealed", "sealed"]
    assert seen(prices) == {"fares": 2, "routes": None}
    for report in reports:
        assert f"adjunct dataset rollback {report.dataset} {report.sealed[0]}" in report.note
    StoredVersions(prices.lake, "routes").rollback("2026-01-01", **WHY)
    assert seen(prices) == {"fares": 1, "routes": 1}
