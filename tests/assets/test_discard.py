"""Discarding: what goes, what stays and why; and that nothing which anybody can reach is ever
deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dagster_adjunct.assets.bounded.advance import advance_version_set
from dagster_adjunct.assets.declaration.dataset import bounded_dataset, version_set
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.dataset import current_versions
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention import discard as discard_module
from dagster_adjunct.assets.retention.discard import DiscardReport, Listing, discard, plan_discard
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.leases import Lease, LeaseInfo
from dagster_adjunct.assets.versions.manifest import (
    Bootstrap,
    BoundedManifest,
    DatasetManifest,
    Pin,
    UnboundedManifest,
)
from dagster_adjunct.assets.versions.version import (
    DatasetDeclaration,
    SealedVersion,
    Verdict,
    VersionRef,
)
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    DatasetError,
    DatasetNotFoundError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects import commit_log
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.cycle import (
    AT_ONCE,
    KEYS,
    NAME,
    PLANES,
    WHY,
    content,
    data_and_documents,
    deliver,
    faulty,
    make_older,
    objects,
    pin_that_has_ended,
    planes_in,
    publish,
    reached,
    served,
    whole,
)
from tests.faulty_store import Crash, Fault

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
LONG_AGO = NOW - timedelta(days=30)
DAY = timedelta(hours=24)


@pytest.fixture
def planes(tmp_path: Path) -> World:
    return planes_in(open_lake(tmp_path / "lake"))


@pytest.fixture
def new_planes() -> Callable[[], World]:
    """Make worlds in memory, for tests that repeat a history and need no modification times."""
    return lambda: planes_in(lake_in(InMemoryStore()))


def retained(world: World, name: str = NAME) -> list[str]:
    return [ref.name or "" for ref in StoredVersions(world.lake, name).versions()]


# -- the decision, on plain values


def ref(number: int, state: str = "sealed", name: str | None = None) -> VersionRef:
    return VersionRef(
        id=f"v{number:06d}-attempt{number}",
        number=number,
        name=name or f"v{number}",
        rows=1,
        sealed_at=LONG_AGO,
        state=state,  # type: ignore[arg-type]
        document=f"datasets/planes/versions/v{number:06d}-attempt{number}-0.json",
        folders=(f"datasets/planes/data/attempt{number}",),
    )


def manifest_of(
    refs: Sequence[VersionRef],
    *,
    head: int,
    pinned: int | None = None,
    order: str = "arrival",
    doomed: tuple[str, ...] = (),
) -> DatasetManifest:
    by_number = {version.number: version for version in refs}
    displayed = by_number[pinned or head]
    pin = Pin(version=by_number[pinned].id, reason="audit", by="ada", at=NOW) if pinned else None
    declaration = DatasetDeclaration(
        kind="bounded",
        input="lake.planes",
        key=("k",),
        key_types=("string",),
        partition_by=("k",),
        partitions=2,
        input_partitions=0,
        order=order,
    )
    sealed = SealedVersion(
        id=displayed.id,
        number=displayed.number,
        name=displayed.name,
        sealed_at=LONG_AGO,
        columns=Schema.of(k="string"),
        key=("k",),
        partition_by=("k",),
        partitions=2,
        positioned=False,
        rows=0,
        offsets={},
        generations=(Generation(displayed.number, displayed.folders[0], ()),),
    )
    return BoundedManifest(
        name="planes", declaration=declaration, version=sealed, head=by_number[head].id, pin=pin,
        versions=tuple(refs), offsets={}, doomed=doomed, next_number=99, next_generation=99,
    )  # fmt: skip


def judge(
    refs: Sequence[VersionRef],
    *,
    head: int,
    policy: DiscardPolicy = DiscardPolicy(keep=2, grace=DAY),  # noqa: B008 - a frozen value
    leases: Sequence[LeaseInfo] = (),
    roots: dict[str, str] | None = None,
    listing: Listing | None = None,
    **facts,
) -> dict[str, str]:
    """Return why each version goes or stays, by name."""
    manifest = manifest_of(refs, head=head, **facts)
    plan = plan_discard(manifest, policy, leases, roots or {}, listing or Listing(NOW))
    judged = {
        **{f"-{version.name}": version.reason for version in plan.discarded},
        **{f"+{version.name}": version.reason for version in plan.kept},
    }
    assert len(judged) == len(refs), "every version is judged once"
    return judged


def test_the_newest_sealed_versions_stay_and_older_ones_go() -> None:
    assert judge([ref(1), ref(2), ref(3), ref(4)], head=4) == {
        "-v1": "not among the newest 2",
        "-v2": "not among the newest 2",
        "+v3": "among the newest 2",
        "+v4": "served",
    }


def test_the_version_served_before_a_rollback_is_kept_to_replace_its_correction() -> None:
    refs = [ref(1), ref(2), ref(3), ref(4)]
    refs[3] = refs[3].model_copy(update={"replaced": refs[0].id})
    assert judge(refs, head=4)["+v1"] == "served again if the current one is revoked"
    assert "-v1" in judge(refs, head=4, policy=DiscardPolicy(keep=1, grace=DAY))


def test_rejected_and_revoked_versions_take_no_place_of_sealed_ones_and_go_by_age() -> None:
    refs = [ref(1), ref(2), ref(3, "rejected"), ref(4, "revoked")]
    assert judge(refs, head=2) == {
        "+v1": "among the newest 2",
        "+v2": "served",
        "-v3": "rejected, older than 1 day, 0:00:00",
        "-v4": "revoked, older than 1 day, 0:00:00",
    }
    young = Listing(
        NOW, documents={version.document or "": NOW - timedelta(hours=23) for version in refs}
    )
    assert {
        name: why
        for name, why in judge(refs, head=2, listing=young).items()
        if name in ("+v3", "+v4")
    } == {"+v3": "younger than 1 day, 0:00:00", "+v4": "younger than 1 day, 0:00:00"}


def test_what_is_pinned_stays_and_so_does_what_would_be_served_without_the_pin() -> None:
    judged = judge([ref(number) for number in range(1, 7)], head=3, pinned=1)
    assert judged == {
        "+v1": "pinned",
        "-v2": "not among the newest 2",
        "+v3": "what the last switch chose",
        "-v4": "not among the newest 2",
        "+v5": "among the newest 2",
        "+v6": "among the newest 2",
    }


def test_leases_keep_versions_until_they_expire() -> None:
    refs = [ref(number) for number in range(1, 5)]
    leases = [
        LeaseInfo("one", "a batch", (refs[0].id,), NOW + timedelta(seconds=1)),
        LeaseInfo("two", "a reader that died", (refs[1].id,), NOW),
    ]
    judged = judge(refs, head=4, leases=leases)
    assert judged["+v1"] == "leased by a batch until 2026-11-21 12:00:01 UTC"
    assert judged["-v2"] == "not among the newest 2"
    unread = [LeaseInfo("odd", "a malformed lease, odd", ("*",), NOW + timedelta(minutes=1))]
    assert judge(refs, head=4, leases=unread)["+v2"].startswith("leased by a malformed lease, odd")


def test_open_batches_keep_versions_whatever_their_state() -> None:
    refs = [ref(1), ref(2, "revoked"), ref(3), ref(4)]
    why = {
        refs[0].id: "open batch 7 of application delays",
        refs[1].id: "open batch 8 of application delays",
    }
    judged = judge(refs, head=4, roots=why)
    assert judged["+v1"] == "open batch 7 of application delays"
    assert judged["+v2"] == "open batch 8 of application delays"


def test_age_is_that_of_the_stored_document_not_of_the_clock_of_who_sealed_it() -> None:
    refs = [ref(1), ref(2), ref(3), ref(4)]
    written = {
        str(refs[0].document): NOW - DAY + timedelta(seconds=1),
        str(refs[1].document): NOW - DAY,
    }
    judged = judge(refs, head=4, listing=Listing(NOW, documents=written))
    assert judged["+v1"] == "younger than 1 day, 0:00:00"
    assert judged["-v2"] == "not among the newest 2"


def test_without_a_limit_only_what_is_not_sealed_goes() -> None:
    refs = [ref(1), ref(2, "rejected"), ref(3)]
    assert judge(refs, head=3, policy=DiscardPolicy(keep=None, grace=DAY)) == {
        "+v1": "all are kept",
        "-v2": "rejected, older than 1 day, 0:00:00",
        "+v3": "served",
    }


def test_versions_ordered_by_name_stay_by_name_and_only_in_their_newest_build() -> None:
    refs = [
        ref(1, name="2026-01-31"),
        ref(2, name="2026-02-02"),
        ref(3, name="2026-01-05"),  # a backfill of an old day
        ref(4, name="2026-01-31"),  # built again
    ]
    manifest = manifest_of(refs, head=2, order="name")
    plan = plan_discard(manifest, DiscardPolicy(keep=2, grace=DAY), (), {}, Listing(NOW))
    assert {judged.what: judged.reason for judged in plan.discarded} == {
        refs[0].id: f"built again since, as {refs[3].id}",
        refs[2].id: "not among the newest 2",
    }
    everything = plan_discard(manifest, DiscardPolicy(keep=None, grace=DAY), (), {}, Listing(NOW))
    assert {judged.what: judged.reason for judged in everything.discarded} == {
        refs[0].id: f"built again since, as {refs[3].id}"
    }


def test_unreferenced_files_are_garbage_after_the_grace_period() -> None:
    refs = [ref(1), ref(2)]
    data, versions = "datasets/planes/data", "datasets/planes/versions"
    listing = Listing(
        NOW,
        folders={
            f"{data}/attempt1": LONG_AGO,
            f"{data}/died": NOW - DAY,
            f"{data}/running": NOW - DAY + timedelta(seconds=1),
            f"{data}/being-deleted": LONG_AGO,
        },
        documents={str(refs[0].document): LONG_AGO, f"{versions}/never-committed.json": LONG_AGO},
    )
    manifest = manifest_of(refs, head=2, doomed=(f"{data}/being-deleted",))
    plan = plan_discard(manifest, DiscardPolicy(), (), {}, listing)
    assert [judged.what for judged in plan.garbage] == [
        f"{data}/died",
        f"{versions}/never-committed.json",
    ]
    assert (
        plan.garbage[0].reason == "no version references it, unchanged since 2026-11-20 12:00 UTC"
    )


# -- versions


def test_nothing_goes_that_is_younger_than_the_grace_period_by_the_stores_clock(
    planes: World,
) -> None:
    publish(planes, 1, 2, 3, 4)
    policy = DiscardPolicy(keep=1, grace=timedelta(hours=1))
    assert discard(planes.lake, NAME, policy, by="test").discarded == ()
    first, second, _, _ = StoredVersions(planes.lake, NAME).versions()
    make_older(planes.lake, timedelta(minutes=59), first.document)
    make_older(planes.lake, timedelta(minutes=61), second.document)
    report = discard(planes.lake, NAME, policy, by="test")
    assert [(judged.what, judged.reason) for judged in report.discarded] == [
        (second.id, "not among the newest 1")
    ]
    assert retained(planes) == ["v1", "v3", "v4"]


def test_a_discarded_version_can_not_be_opened_any_more_and_the_error_names_what_can(
    planes: World,
) -> None:
    old, new = publish(planes, 1, 2)
    report = discard(planes.lake, NAME, AT_ONCE, by="test")
    assert report.summary().startswith("dataset planes: discarded 1 version(s); 3 objects of ")
    assert data_and_documents(planes.lake) == reached(planes.lake)
    store = StoredVersions(planes.lake, NAME)
    for version in (old, "v1"):
        with pytest.raises(
            DatasetError, match=rf"has no version '{version}'; the newest retained are {new} \(v2\)"
        ):
            store.version(version)
    newest = store.history()[1]
    assert (newest.action, newest.by, newest.reason) == (
        "expire",
        "test",
        "1 versions, 0 leftovers",
    )


def test_a_dropped_version_is_deleted_by_the_next_discard_whatever_its_age(planes: World) -> None:
    publish(planes, 1, 2)
    store = StoredVersions(planes.lake, NAME)
    store.revoke("v1", **WHY)
    store.remove_version("v1", **WHY)
    assert len(data_and_documents(planes.lake)) > len(reached(planes.lake))
    report = discard(planes.lake, NAME, by="test")
    assert (report.discarded, report.garbage, report.objects) == ((), (), 3)
    assert data_and_documents(planes.lake) == reached(planes.lake)


def test_an_expired_pin_ends_with_the_discard_and_a_running_one_does_not(planes: World) -> None:
    old, new = publish(planes, 1, 2)
    store = StoredVersions(planes.lake, NAME)
    store.pin("v1", **WHY, expires_at=datetime.now(UTC) + timedelta(hours=1))
    assert discard(planes.lake, NAME, AT_ONCE, by="test").unpinned is None
    assert served(planes.lake) == whole(1)
    pin_that_has_ended(store, "v1")
    reported = discard(planes.lake, NAME, AT_ONCE, by="test", dry_run=True)
    assert reported.unpinned == old
    assert store.require_manifest().pin is not None
    report = discard(planes.lake, NAME, AT_ONCE, by="test")
    assert (report.unpinned, report.discarded) == (old, reported.discarded)
    assert (served(planes.lake), retained(planes)) == (whole(2), ["v2"])
    assert [(entry.action, entry.version, entry.reason) for entry in store.history()][2] == (
        "unpin",
        old,
        "expired",
    )
    assert StoredVersions(planes.lake, NAME).require_current().version == new


def test_a_dataset_that_is_not_there_is_an_error(planes: World) -> None:
    with pytest.raises(DatasetNotFoundError) as failure:
        discard(planes.lake, "nothing", by="test")
    assert failure.value.dataset == "nothing"
    assert not objects(planes.lake, "datasets/nothing/")


# -- what is told before it is done


class TooFew:
    """Refuses versions that lack a key."""

    name = "all_keys"
    severity = "error"

    def __call__(self, candidate) -> Verdict:
        return Verdict(
            name=self.name,
            passed=candidate.view.rows == len(KEYS),
            message=f"{candidate.view.rows} rows",
        )


CHECKED = replace(PLANES, validators=(TooFew(),))


def forget_the_build(world: World) -> None:
    """Let a build that died be one that was not renewed for long."""
    make_older(world.lake, timedelta(minutes=16), f"datasets/{NAME}/attempts/")


def everything(world: World) -> tuple[str, ...]:
    """Make versions in every state, a build that died, and a lease; return the names that have
    to stay.
    """
    publish(world, 1, 2, 3, 4, 5)
    store = StoredVersions(world.lake, NAME)
    store.revoke("v2", **WHY)
    store.pin("v3", **WHY)
    deliver(world, 6, keys=("a",))
    world.advance(CHECKED)
    deliver(world, 7)
    world.advance(CHECKED)
    deliver(world, 8)
    with pytest.raises(Crash):
        world.advance(PLANES, lake=faulty(world, Fault("put", 2, "crash-before")))
    forget_the_build(world)
    Lease.acquire(world.lake, NAME, [store.version("v4").version], holder="me")
    return ("v3", "v4", "v7")


@pytest.mark.lengthy
def test_a_dry_run_reports_what_would_go_and_why_and_changes_nothing(planes: World) -> None:
    everything(planes)
    before = objects(planes.lake)
    reported = discard(planes.lake, NAME, AT_ONCE, by="test", dry_run=True)
    after = objects(planes.lake)
    clock = f"datasets/{NAME}/clock"
    after.pop(clock)
    assert after == before
    assert reported.dry_run
    assert "would discard 4 version(s); 1 leftover(s)" in reported.summary()
    done = discard(planes.lake, NAME, AT_ONCE, by="test")
    assert (done.discarded, done.kept, done.garbage) == (
        reported.discarded,
        reported.kept,
        reported.garbage,
    )
    reported_json = reported.to_json()
    assert {version["name"]: version["reason"] for version in reported_json["discarded"]}[
        "v6"
    ] == "rejected, older than 0:00:00"
    assert reported_json["dry_run"] is True


@pytest.mark.lengthy
def test_nothing_that_can_be_reached_is_deleted_and_everything_else_is(planes: World) -> None:
    staying = everything(planes)
    views = {name: StoredVersions(planes.lake, NAME).version(name) for name in staying}
    before, needed = objects(planes.lake), reached(planes.lake)
    report = discard(planes.lake, NAME, AT_ONCE, by="test")
    assert tuple(retained(planes)) == staying
    after = objects(planes.lake)
    deleted = set(before) - set(after)
    assert report.objects == len(deleted)
    assert reached(planes.lake) == data_and_documents(planes.lake) < needed
    assert {key.split("/")[2] for key in deleted} == {"data", "versions", "attempts"}
    for name, view in views.items():
        assert content(view) == whole(int(name[1:]))
    assert served(planes.lake) == whole(3)


# -- what builds leave


def test_files_of_a_dead_build_are_collected_only_after_the_grace_period(planes: World) -> None:
    publish(planes, 1)
    deliver(planes, 2)
    with pytest.raises(Crash):
        planes.advance(PLANES, lake=faulty(planes, Fault("put", 2, "crash-before")))
    left = data_and_documents(planes.lake) - reached(planes.lake)
    (folder,) = {key.rpartition("/")[0] for key in left}
    policy = DiscardPolicy(grace=timedelta(hours=1))
    make_older(planes.lake, timedelta(minutes=59))
    assert discard(planes.lake, NAME, policy, by="test").garbage == ()
    make_older(planes.lake, timedelta(minutes=61), f"{folder}/")
    assert discard(planes.lake, NAME, policy, by="test").garbage == (), (
        "the build was renewed 59 minutes ago"
    )
    make_older(planes.lake, timedelta(minutes=61), f"datasets/{NAME}/attempts/")
    report = discard(planes.lake, NAME, policy, by="test")
    assert [judged.what for judged in report.garbage] == [folder]
    assert data_and_documents(planes.lake) == reached(planes.lake)
    assert objects(planes.lake, f"datasets/{NAME}/attempts/") == {}
    assert planes.advance(PLANES).action == "sealed"
    assert served(planes.lake) == whole(2)


def test_a_document_that_was_never_committed_is_collected(planes: World) -> None:
    publish(planes, 1)
    deliver(planes, 2)
    with pytest.raises(Crash):
        planes.advance(PLANES, lake=faulty(planes, Fault("put_if_match", 1, "crash-before")))
    assert len(objects(planes.lake, f"datasets/{NAME}/versions/")) == 2
    forget_the_build(planes)
    discard(planes.lake, NAME, AT_ONCE, by="test")
    assert data_and_documents(planes.lake) == reached(planes.lake)
    planes.advance(PLANES)
    assert served(planes.lake) == whole(2)


@pytest.mark.lengthy
@pytest.mark.parametrize("taken_for_garbage", [False, True])
def test_a_build_is_published_unless_a_discard_took_it_for_garbage(
    new_planes, monkeypatch, taken_for_garbage
) -> None:
    """A whole discard runs before each request of the advance in turn, with a grace period of
    nothing.

    A build that is on record is none of its business, unless it was not renewed for long.
    """
    if taken_for_garbage:
        monkeypatch.setattr(discard_module, "RUNNING_WITHIN", timedelta(0))
    outcomes = set()
    for nth in range(1, 100):
        world = new_planes()
        publish(world, 1)
        deliver(world, 2)
        lake = faulty(
            world,
            Fault(
                "*",
                nth,
                "meanwhile",
                lambda world=world: discard(world.lake, NAME, AT_ONCE, by="test"),
            ),
        )
        try:
            outcomes.add(world.advance(PLANES, lake=lake).action)
        except CommitConflictError as conflict:
            outcomes.add(
                "discarded"
                if "another writer discarded this build" in str(conflict)
                else str(conflict)
            )
            assert served(world.lake) == whole(1)
            world.advance(PLANES)
        assert served(world.lake) == whole(2)
        assert reached(world.lake) <= data_and_documents(world.lake), (
            "what is published is all there"
        )
        if len(lake.store.requests) < nth:
            break
    assert outcomes == ({"sealed", "discarded"} if taken_for_garbage else {"sealed"})


@pytest.mark.lengthy
def test_a_finished_build_that_a_discard_has_deleted_is_built_again(
    new_planes, monkeypatch
) -> None:
    """The discard dies at each of its requests in turn: the record of the build may outlive its
    files.
    """
    monkeypatch.setattr(discard_module, "RUNNING_WITHIN", timedelta(0))
    builds = set()
    for nth in range(1, 100):
        world = new_planes()
        publish(world, 1)
        deliver(world, 2)
        with pytest.raises(Crash):
            world.advance(PLANES, lake=faulty(world, Fault("put_if_absent", 1, "crash-before")))
        died = True
        try:
            discard(faulty(world, Fault("*", nth, "crash-before")), NAME, AT_ONCE, by="test")
            died = False
        except Crash:
            pass
        files = len(objects(world.lake, f"datasets/{NAME}/data/"))
        assert world.advance(PLANES).action == "sealed"
        builds.add(len(objects(world.lake, f"datasets/{NAME}/data/")) > files)
        assert served(world.lake) == whole(2)
        assert reached(world.lake) <= data_and_documents(world.lake)
        if not died:
            break
    assert builds == {False, True}, "it is taken up while it is whole, and not after"


# -- dying half-way, and several at once


def state_of(world: World) -> dict[str, object]:
    manifest = StoredVersions(world.lake, NAME).require_manifest()
    return {
        "retained": [(version.id, version.state) for version in manifest.versions],
        "doomed": manifest.doomed,
        "served": served(world.lake),
        "stored": {
            key
            for key in objects(world.lake, f"datasets/{NAME}/")
            if key.split("/")[2] not in ("manifests", "CURRENT")
        },
    }


def copy_of(world: World) -> World:
    """Return a copy in memory, with the times of the objects: what is repeated for every request
    must be cheap.
    """
    store = InMemoryStore()
    for item in world.lake.store.list(""):
        data = world.lake.store.get(item.key).data
        store.put(item.key, data)
        store._objects[item.key] = (
            data,
            replace(store._objects[item.key][1], modified=item.modified),
        )
    return World(Lake(store, world.lake.id), IN_PROCESS, dict(world.sequences))


@pytest.mark.lengthy
def test_a_discard_that_dies_at_any_request_is_ended_by_the_next_one(planes: World) -> None:
    everything(planes)
    make_older(planes.lake, timedelta(hours=30), f"datasets/{NAME}/attempts/")
    uninterrupted = copy_of(planes)
    discard(uninterrupted.lake, NAME, AT_ONCE, by="test")
    expected = state_of(uninterrupted)
    assert expected["doomed"] == ()
    nth, died = 1, True
    while died:
        died = False
        for kind in ("crash-before", "crash-after"):
            copy = copy_of(planes)
            try:
                discard(faulty(copy, Fault("*", nth, kind)), NAME, AT_ONCE, by="test")
            except Crash:
                died = True
            assert served(copy.lake) == whole(3)
            assert reached(copy.lake) <= data_and_documents(copy.lake)
            discard(copy.lake, NAME, AT_ONCE, by="test")
            assert state_of(copy) == expected
        nth += 1
    assert nth > 20


@pytest.mark.lengthy
def test_two_discards_at_once_do_what_one_does(planes: World) -> None:
    everything(planes)
    expected = None
    for nth in range(1, 100):
        copy = copy_of(planes)
        other = Fault(
            "*", nth, "meanwhile", lambda copy=copy: discard(copy.lake, NAME, AT_ONCE, by="other")
        )
        lake = faulty(copy, other)
        discard(lake, NAME, AT_ONCE, by="test")
        expected = expected or state_of(copy)
        assert state_of(copy) == expected
        assert expected["doomed"] == ()
        if len(lake.store.requests) < nth:
            break


def test_what_is_doomed_and_leased_is_spared_reported_and_deleted_later(planes: World) -> None:
    old, _ = publish(planes, 1, 2)
    view, held = StoredVersions(planes.lake, NAME).version(old), []
    # Between the reading of leases for the decision and the commit of the doomed.
    lease = Fault(
        "put_if_match",
        1,
        "meanwhile",
        lambda: held.append(Lease.acquire(planes.lake, NAME, [old], holder="me")),
    )
    report = discard(faulty(planes, lease), NAME, AT_ONCE, by="test")
    assert {judged.reason.split(" until")[0] for judged in report.spared} == {"leased by me"}
    assert "2 spared" in report.summary()
    assert content(view) == whole(1)
    with pytest.raises(VersionDiscardedError):
        Lease.acquire(planes.lake, NAME, [old], holder="another")
    held[0].release()
    assert discard(planes.lake, NAME, AT_ONCE, by="test").objects == 3
    assert data_and_documents(planes.lake) == reached(planes.lake)


@pytest.mark.lengthy
def test_a_comparison_of_which_a_version_is_discarded_meanwhile_says_so(new_planes) -> None:
    """A whole discard runs before each request of the comparison in turn."""
    outcomes = set()
    for nth in range(1, 100):
        world = new_planes()
        old, new = publish(world, 1, 2)
        lake = faulty(
            world,
            Fault(
                "*",
                nth,
                "meanwhile",
                lambda world=world: discard(world.lake, NAME, AT_ONCE, by="test"),
            ),
        )
        try:
            outcomes.add(StoredVersions(lake, NAME).diff(old, new).changed == len(KEYS))
        except DatasetError as error:
            outcomes.add(type(error).__name__)
        if len(lake.store.requests) < nth:
            break
    assert outcomes == {True, "DatasetError", "VersionDiscardedError"}


# -- version sets


NAMES = ("fares", "routes")
SET = version_set(
    "prices",
    *(bounded_dataset(name, input=f"lake.{name}", key="k", partitions=2) for name in NAMES),
)


@pytest.fixture
def prices(tmp_path: Path) -> World:
    world = World(open_lake(tmp_path / "lake"), IN_PROCESS)
    for name in NAMES:
        world.stream(name, Schema.of(k="string", n="int"), ["k"], 2)
    return world


def publish_set(world: World, *versions: tuple[int, int]) -> None:
    """Deliver and publish `v1`, `v2`, …: what fares and routes hold in each."""
    for fares, routes in versions:
        number = world.sequences.get("fares", 0) + 1
        for name, value in (("fares", fares), ("routes", routes)):
            world.send(name, [(key, value) for key in KEYS], version=f"v{number}")
        advance_version_set(
            SET, lake=world.lake, systems=world.systems, spark=IN_PROCESS, by="test"
        )


def seen(world: World) -> tuple[int | None, ...]:
    with ExitStack() as open_meanwhile:
        served = {
            name: it and open_meanwhile.enter_context(it)
            for name, it in current_versions(world.lake, NAMES).items()
        }
        return tuple(None if (it := served[name]) is None else content(it)["a"] for name in NAMES)


@pytest.mark.lengthy
def test_members_of_a_version_set_are_discarded_each_by_itself_and_read_together(
    prices: World,
) -> None:
    publish_set(prices, (1, 1), (2, 2), (3, 3))
    discard(prices.lake, "fares", DiscardPolicy(keep=2, grace=timedelta(0)), by="test")
    assert (retained(prices, "fares"), retained(prices, "routes")) == (
        ["v2", "v3"],
        ["v1", "v2", "v3"],
    )
    for name in NAMES:
        assert reached(prices.lake, name) == data_and_documents(prices.lake, name)
    assert seen(prices) == (3, 3)
    with pytest.raises(DatasetError) as caught:
        StoredVersions(prices.lake, "routes").rollback("v1", **WHY)
    assert (caught.value.dataset, caught.value.version) == ("fares", "v1")
    assert seen(prices) == (3, 3)
    StoredVersions(prices.lake, "routes").rollback("v2", **WHY)
    assert seen(prices) == (2, 2)


@pytest.mark.lengthy
def test_a_version_that_stands_for_several_names_stays_while_it_is_served(prices: World) -> None:
    publish_set(prices, (1, 1), (1, 2), (1, 3), (1, 4))
    for name in NAMES:
        discard(prices.lake, name, DiscardPolicy(keep=2, grace=timedelta(0)), by="test")
    StoredVersions(prices.lake, "fares").rollback(**WHY)
    assert seen(prices) == (1, 3)


@pytest.mark.lengthy
@pytest.mark.parametrize("end", ["advance", "discard"])
def test_an_expired_pin_of_a_version_set_ends_for_all_members_in_one_commit(
    prices: World, end: str
) -> None:
    publish_set(prices, (1, 1), (2, 2))
    store = StoredVersions(prices.lake, "fares")
    pin_that_has_ended(store, "v1")
    prices.mark("fares", "v3", [0])  # so that only one of them has anything new to say
    before, _ = store.log.read()
    assert before is not None

    def run(lake) -> None:
        if end == "discard":
            discard(lake, "routes", AT_ONCE, by="test")
        else:
            advance_version_set(SET, lake=lake, systems=prices.systems, spark=IN_PROCESS, by="test")

    nth = 1
    while True:
        lake = faulty(prices, Fault("*", nth, "crash-after"))
        try:
            run(lake)
        except Crash:
            assert seen(prices) in ((1, 1), (2, 2))
            nth += 1
        else:
            break
    assert seen(prices) == (2, 2)
    unpinned = [entry for entry in store.history() if entry.action == "unpin"]
    assert [entry.number for entry in unpinned] == [before.number + 1]


# -- commits of the past


@pytest.mark.lengthy
def test_commits_beyond_the_newest_ones_go_when_they_are_old(
    planes: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "MANIFESTS_KEPT", 5)
    publish(planes, *range(1, 9))
    log = DatasetLog(planes.lake, NAME)
    policy = DiscardPolicy(keep=None, grace=timedelta(hours=1))
    commits = len(list(log.history()))
    discard(planes.lake, NAME, policy, by="test")
    assert len(list(log.history())) == commits, "all of them are young"
    make_older(planes.lake, timedelta(hours=2), f"datasets/{NAME}/manifests/")
    discard(planes.lake, NAME, policy, by="test")
    numbers = [commit.number for commit, _ in log.history()]
    assert numbers == list(range(commits, commits - 6, -1))
    assert len(objects(planes.lake, f"datasets/{NAME}/manifests/")) == 6
    assert retained(planes) == [f"v{number}" for number in range(1, 9)], (
        "a version needs no commit of the past"
    )
    assert content(StoredVersions(planes.lake, NAME).version("v1")) == whole(1)
    assert publish(planes, 9)
    assert served(planes.lake) == whole(9)


@pytest.mark.lengthy
def test_commits_of_a_version_set_go_as_well(
    prices: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "MANIFESTS_KEPT", 2)
    publish_set(prices, (1, 1), (2, 2), (3, 3), (4, 4), (5, 5))
    make_older(prices.lake, timedelta(days=2), "version-sets/")
    kept = DiscardPolicy(keep=None)
    discard(prices.lake, "fares", kept, by="test")
    assert len(objects(prices.lake, "version-sets/prices/manifests/")) == 3
    assert [len(StoredVersions(prices.lake, name).history()) for name in NAMES] == [3, 3]
    assert seen(prices) == (5, 5)


def test_a_commit_that_an_open_batch_needs_of_an_unbounded_dataset_stays(
    planes: World, monkeypatch
) -> None:
    """Its versions stand nowhere but in their commits."""
    monkeypatch.setattr(commit_log, "MANIFESTS_KEPT", 2)
    log = DatasetLog(planes.lake, "changes")
    declaration = DatasetDeclaration(
        kind="unbounded",
        input="lake.planes",
        key=("k",),
        key_types=("string",),
        partition_by=("k",),
        partitions=2,
        input_partitions=2,
    )
    spans = {"lake.planes.0": "0", "lake.planes.1": "0"}
    bootstrap = Bootstrap(state="done", start=spans, target=spans, started_at=NOW)
    manifest = UnboundedManifest(
        name="changes", declaration=declaration, offsets=spans, bootstrap=bootstrap
    )
    commit, ids = log.commit(None, manifest, by="test"), []
    for number in range(2, 9):
        attempt = log.attempt()
        version = SealedVersion(
            id=f"v{number:06d}-{attempt.id}",
            number=number,
            name=None,
            sealed_at=NOW,
            columns=Schema.of(k="string", n="int"),
            key=("k",),
            partition_by=("k",),
            partitions=2,
            positioned=True,
            generations=(attempt.generation(number),),
            offsets={},
        )
        # What versions before the sixth read has gone, as an erasure does it.
        manifest = manifest.after(
            version=version, next_generation=number + 1, retained_from=min(number, 6)
        )
        commit = log.commit(commit, manifest, by="test", commit_id=attempt.id)
        ids.append(version.id)
    make_older(planes.lake, timedelta(days=2), "datasets/changes/")
    planes.lake.store.put(
        "datasets/changes/leases/one.json",
        b'{"versions": ["%s"], "holder": "me", "ttl": 60}' % ids[1].encode(),
    )
    report: DiscardReport = discard(
        planes.lake, "changes", by="test", roots=lambda: {ids[0]: "open batch 3"}
    )
    assert report.objects == 3
    store = StoredVersions(planes.lake, "changes")
    opened = {}
    for number, version in enumerate(ids, start=2):
        try:
            opened[number] = store.version_of_batch(version).version == version
        except DatasetError:
            opened[number] = False
    assert opened == {2: True, 3: True, 4: False, 5: False, 6: True, 7: True, 8: True}
