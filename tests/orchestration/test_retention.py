"""Discarding beside applications: what an open batch was begun with stays until the batch has
ended.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.maintenance import DiscardReport, expire_all_versions, expire_versions
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    BatchLog,
    ClosedBatch,
    list_applications,
)
from dagster_adjunct.orchestration.batch_log.intent import Intent, JoinedVersions
from dagster_adjunct.orchestration.maintenance.expire import versions_in_open_batches
from dagster_adjunct.resources.errors import MalformedDocumentError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.streams.system import OffsetRange
from tests.assets.conftest import World
from tests.assets.cycle import NAME, PLANES, content, planes_in, publish, served, whole
from tests.faulty_store import Fault, FaultyStore

AT_ONCE = {NAME: replace(PLANES, discard=DiscardPolicy(keep=1, grace=timedelta(0)))}


@pytest.fixture
def planes(tmp_path: Path) -> World:
    return planes_in(open_lake(tmp_path / "lake"))


def begin(lake: Lake, application: str, versions: dict[str, str | None], batch: int = 1) -> Intent:
    """Open a batch, as a step does before it reads anything."""
    log = BatchLog(lake, application)
    spans = {"lake.trips.0": OffsetRange(start="0", end="5")}
    intent = Intent(
        batch=batch,
        run="a run",
        clock=datetime.now(UTC),
        ranges=spans,
        joined=JoinedVersions(versions=versions),
    )
    log.open(log.read(), intent)
    return intent


def end(lake: Lake, application: str, intent: Intent) -> None:
    log = BatchLog(lake, application)
    done = ClosedBatch(
        intent=intent, closed_at=datetime.now(UTC), records=5, counters={}, seconds={}
    )
    log.close(log.read(), done)


def retained(world: World) -> list[str | None]:
    return [ref.name for ref in StoredVersions(world.lake, NAME).versions()]


@pytest.mark.lengthy
def test_an_open_batch_keeps_its_version_until_it_is_closed(planes: World) -> None:
    old, _, _ = publish(planes, 1, 2, 3)
    intent = begin(planes.lake, "delays", {NAME: old, "other": None})
    (report,) = expire_all_versions(planes.lake, AT_ONCE, by="test")
    assert {version.name: version.reason for version in report.kept}[
        "v1"
    ] == "open batch 1 of application delays"
    assert retained(planes) == ["v1", "v3"]
    assert content(StoredVersions(planes.lake, NAME).version_of_batch(old)) == whole(1)
    end(planes.lake, "delays", intent)
    expire_all_versions(planes.lake, AT_ONCE, by="test")
    assert retained(planes) == ["v3"]


@pytest.mark.lengthy
def test_discarding_one_dataset_spares_open_batches_and_follows_its_declaration(
    planes: World,
) -> None:
    old, _, _ = publish(planes, 1, 2, 3)
    intent = begin(planes.lake, "delays", {NAME: old})
    assert expire_versions(planes.lake, NAME, by="test").discarded == (), (
        "three are kept, and nothing young"
    )
    policy = DiscardPolicy(keep=1, grace=timedelta(0))
    reported = expire_versions(planes.lake, NAME, policy, by="test", dry_run=True)
    assert [version.name for version in reported.discarded] == ["v2"]
    expire_versions(planes.lake, NAME, policy, by="test")
    assert retained(planes) == ["v1", "v3"]
    end(planes.lake, "delays", intent)
    (report,) = expire_all_versions(planes.lake, AT_ONCE, by="test")
    assert isinstance(report, DiscardReport)
    assert retained(planes) == ["v3"]


def test_an_open_batch_ends_with_a_version_that_is_revoked_and_dropped_meanwhile(
    planes: World,
) -> None:
    _, old = publish(planes, 1, 2)
    begin(planes.lake, "delays", {NAME: old})
    store = StoredVersions(planes.lake, NAME)
    for change in (store.revoke, store.remove_version):
        change(old, reason="ticket 7", by="ada")
        expire_all_versions(planes.lake, AT_ONCE, by="test")
        assert content(store.version_of_batch(old)) == whole(2)
    assert served(planes.lake) == whole(1), "nobody else gets it"


@pytest.mark.lengthy
def test_the_batches_of_all_applications_count(planes: World) -> None:
    ids = publish(planes, 1, 2, 3, 4)
    first = begin(planes.lake, "delays", {NAME: ids[0]})
    begin(planes.lake, "fares", {NAME: ids[1]}, batch=8)
    assert list_applications(planes.lake) == ["delays", "fares"]
    assert versions_in_open_batches(planes.lake) == {
        NAME: {
            ids[0]: "open batch 1 of application delays",
            ids[1]: "open batch 8 of application fares",
        }
    }
    end(planes.lake, "delays", first)
    assert versions_in_open_batches(planes.lake) == {
        NAME: {ids[1]: "open batch 8 of application fares"}
    }
    expire_all_versions(planes.lake, AT_ONCE, by="test")
    assert retained(planes) == ["v2", "v4"]


def test_finding_open_batches_costs_the_same_after_many_batches(planes: World) -> None:
    (version,) = publish(planes, 1)
    asked = []
    for batches in (1, 10):
        for batch in range(batches):
            end(planes.lake, "delays", begin(planes.lake, "delays", {NAME: version}, batch + 1))
        lake = Lake(FaultyStore(planes.lake.store), planes.lake.id)
        assert versions_in_open_batches(lake) == {}
        asked.append([request for request, _ in lake.store.requests])  # type: ignore[attr-defined]
        assert not [
            key for request, key in lake.store.requests if request == "list" and "delays" in key
        ]  # type: ignore[attr-defined]
    assert asked[0] == asked[1] == ["list", "get", "get"]
    assert len(list(planes.lake.store.list("applications/_names/"))) == 1


def test_an_application_that_only_stored_where_it_begins_keeps_nothing(planes: World) -> None:
    publish(planes, 1)
    log = BatchLog(planes.lake, "delays")
    log.commit(log.read(), ApplicationState(checkpoint={"lake.trips.0": "0"}), by="a run")
    assert versions_in_open_batches(planes.lake) == {}


@pytest.mark.lengthy
def test_a_batch_that_opens_while_its_version_is_doomed_is_run_again_with_it(planes: World) -> None:
    """A step leases, and opens its batch, between the discard's decision and its commit; then it
    dies.
    """
    old = publish(planes, 1)[0]
    for nth in range(1, 60):
        publish(planes, nth + 1)
        opened: list[Intent] = []

        def open_now(opened: list[Intent] = opened, old: str = old) -> None:
            if old in [ref.id for ref in StoredVersions(planes.lake, NAME).versions()]:
                opened.append(begin(planes.lake, "delays", {NAME: old}))

        lake = Lake(
            FaultyStore(planes.lake.store, [Fault("put_if_match", nth, "meanwhile", open_now)]),
            planes.lake.id,
        )
        expire_all_versions(lake, AT_ONCE, by="test")
        expire_all_versions(planes.lake, AT_ONCE, by="test")
        if opened:
            assert len(content(StoredVersions(planes.lake, NAME).version_of_batch(old))) == 4
            end(planes.lake, "delays", opened[0])
            expire_all_versions(planes.lake, AT_ONCE, by="test")
        assert len(retained(planes)) == 1
        if nth > sum(made == "put_if_match" for made, _ in lake.store.requests):  # type: ignore[attr-defined]
            return
        old = StoredVersions(planes.lake, NAME).require_current().version
    raise AssertionError("a discard has less requests")


def test_datasets_follow_their_own_policy_or_else_the_default(planes: World) -> None:
    publish(planes, 1, 2, 3, 4, 5)
    assert [report.discarded for report in expire_all_versions(planes.lake, by="test")] == [()], (
        "all are younger than a day"
    )
    (reported,) = expire_all_versions(planes.lake, AT_ONCE, by="test", dry_run=True)
    assert [version.name for version in reported.discarded] == ["v1", "v2", "v3", "v4"]
    assert len(retained(planes)) == 5
    assert expire_all_versions(planes.lake, AT_ONCE, by="test", datasets=[]) == []
    (done,) = expire_all_versions(planes.lake, AT_ONCE, by="test", datasets=[NAME])
    assert done.discarded == reported.discarded
    assert served(planes.lake) == whole(5)


def test_every_dataset_of_the_lake_is_looked_at(planes: World) -> None:
    publish(planes, 1)
    other = bounded_dataset("copies", input="lake.planes", key="k", partitions=2)
    planes.advance(other)
    assert [
        report.dataset
        for report in expire_all_versions(planes.lake, {**AT_ONCE, "copies": other}, by="test")
    ] == ["copies", NAME]


@pytest.mark.lengthy
def test_a_dataset_that_can_not_be_read_keeps_no_other_from_being_discarded_in(
    planes: World,
) -> None:
    publish(planes, 1, 2)
    for name in ("broken", "copies"):
        planes.advance(bounded_dataset(name, input="lake.planes", key="k", partitions=2))
        planes.lake.store.put(f"datasets/{name}/CURRENT", b"{")
    with pytest.raises(MalformedDocumentError) as raised:
        expire_all_versions(planes.lake, AT_ONCE, by="test", datasets=["broken", "copies", NAME])
    assert "datasets/broken/CURRENT" in str(raised.value.document)
    assert "datasets/copies/CURRENT" in raised.value.__notes__[0]
    assert retained(planes) == ["v2"]
