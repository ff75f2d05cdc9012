"""Leases: what a reader holds is not deleted, and a reader whose lease was lost is told so."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta

import pytest

from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.versions import leases
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.leases import (
    Lease,
    list_leases,
    list_live_leases,
    read_lake_clock,
)
from dagster_adjunct.assets.versions.manifest import Bootstrap, UnboundedManifest
from dagster_adjunct.assets.versions.version import DatasetDeclaration
from dagster_adjunct.resources import times
from dagster_adjunct.resources.errors import (
    DatasetNotFoundError,
    LeaseLostError,
    StoreUnavailableError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects import fence
from dagster_adjunct.resources.objects.lake import lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.assets.conftest import World
from tests.assets.cycle import (
    AT_ONCE,
    NAME,
    content,
    faulty,
    make_older,
    objects,
    planes_in,
    publish,
    whole,
)
from tests.faulty_store import Crash, Fault

LEASES = f"datasets/{NAME}/leases/"


@pytest.fixture
def planes(tmp_path) -> World:
    return planes_in(open_lake(tmp_path / "lake"))


@pytest.fixture
def quick() -> World:
    """The same in memory, for tests that repeat a lot and need no modification times."""
    return planes_in(lake_in(InMemoryStore()))


def acquire(world: World, version: str, **options) -> Lease:
    return Lease.acquire(options.pop("lake", world.lake), NAME, [version], holder="me", **options)


def retained(world: World) -> set[str]:
    return {ref.id for ref in StoredVersions(world.lake, NAME).versions()}


def expiries(world: World) -> list[datetime]:
    return [lease.expires_at for lease in list_leases(world.lake, NAME)]


# -- holding


def test_a_leased_version_stays_and_goes_once_it_is_released(planes: World) -> None:
    old, new = publish(planes, 1, 2)
    view = StoredVersions(planes.lake, NAME).version(old)
    with acquire(planes, old) as lease:
        report = discard(planes.lake, NAME, AT_ONCE, by="test")
        assert {judged.what: judged.reason.split(" until")[0] for judged in report.kept}[
            old
        ] == "leased by me"
        assert content(view) == whole(1)
        lease.check()
    discard(planes.lake, NAME, AT_ONCE, by="test")
    assert retained(planes) == {new}


def test_a_version_that_is_gone_can_not_be_leased_and_leaves_no_lease(planes: World) -> None:
    old, _ = publish(planes, 1, 2)
    discard(planes.lake, NAME, AT_ONCE, by="test")
    with pytest.raises(VersionDiscardedError) as failure:
        acquire(planes, old)
    assert failure.value.version == old
    with pytest.raises(DatasetNotFoundError) as failure:
        Lease.acquire(planes.lake, "nothing", [old], holder="me")
    assert failure.value.dataset == "nothing"
    assert objects(planes.lake, LEASES) == {}


def test_a_lease_is_of_every_version_that_it_names(planes: World) -> None:
    first, second, third = publish(planes, 1, 2, 3)
    with Lease.acquire(planes.lake, NAME, [first, second], holder="me"):
        discard(planes.lake, NAME, AT_ONCE, by="test")
        assert retained(planes) == {first, second, third}


def test_of_a_lease_and_a_discard_at_any_request_of_it_one_sees_the_other(quick: World) -> None:
    """The discard runs as a whole just before the nth request of the lease, for every n."""
    old = publish(quick, 1)[0]
    outcomes = set()
    for nth in range(1, 100):
        publish(quick, nth + 1)
        view = StoredVersions(quick.lake, NAME).version(old)
        lake = faulty(
            quick,
            Fault("*", nth, "meanwhile", lambda: discard(quick.lake, NAME, AT_ONCE, by="test")),
        )
        try:
            lease = acquire(quick, old, lake=lake)
        except VersionDiscardedError:
            outcomes.add("refused")
            assert old not in retained(quick)
            old = StoredVersions(quick.lake, NAME).require_current().version
        else:
            outcomes.add("held")
            discard(quick.lake, NAME, AT_ONCE, by="test")
            assert len(content(view)) == 4
            lease.release()
            if len(lake.store.requests) < nth:
                break
    assert outcomes == {"refused", "held"}


@pytest.mark.lengthy
def test_of_a_discard_and_a_lease_at_any_request_of_it_one_sees_the_other(quick: World) -> None:
    """The lease is taken just before the nth request of the discard, for every n."""
    outcomes = set()
    for nth in range(1, 100):
        old = publish(quick, nth)[-1]
        publish(quick, 1000 + nth)
        view = StoredVersions(quick.lake, NAME).version(old)
        held: list[Lease] = []
        lake = faulty(
            quick,
            Fault(
                "*", nth, "meanwhile", lambda held=held, old=old: held.append(acquire(quick, old))
            ),
        )
        try:
            discard(lake, NAME, AT_ONCE, by="test")
        except VersionDiscardedError:
            outcomes.add("refused")
            discard(quick.lake, NAME, AT_ONCE, by="test")
            assert old not in retained(quick)
            continue
        if not held:
            break
        outcomes.add("held")
        assert content(view) == whole(nth)
        discard(quick.lake, NAME, AT_ONCE, by="test")
        assert content(view) == whole(nth), (
            "what was doomed before it was leased is spared while it is leased"
        )
        held[0].release()
        discard(quick.lake, NAME, AT_ONCE, by="test")
        assert not any(
            old.partition("-")[2] in key for key in objects(quick.lake, f"datasets/{NAME}/data/")
        )
    assert outcomes == {"refused", "held"}


def test_a_version_of_an_unbounded_dataset_can_be_leased_though_no_manifest_lists_it(
    planes: World,
) -> None:
    log = DatasetLog(planes.lake, "changes")
    spans = {"lake.planes.0": "0", "lake.planes.1": "0"}
    declaration = DatasetDeclaration(
        kind="unbounded",
        input="lake.planes",
        key=("k",),
        key_types=("string",),
        partition_by=("k",),
        partitions=2,
        input_partitions=2,
    )
    bootstrap = Bootstrap(state="running", start=spans, target=spans, started_at=datetime.now(UTC))
    log.commit(
        None,
        UnboundedManifest(
            name="changes", declaration=declaration, offsets=spans, bootstrap=bootstrap
        ),
        by="me",
    )
    with Lease.acquire(planes.lake, "changes", ["v000007-abc"], holder="me") as lease:
        lease.check()
        assert [info.versions for info in list_leases(planes.lake, "changes")] == [("v000007-abc",)]
    assert list_leases(planes.lake, "changes") == []


# -- expiring


def test_an_expired_lease_holds_nothing_and_is_removed(planes: World) -> None:
    old, new = publish(planes, 1, 2)
    lease = acquire(planes, old)
    make_older(planes.lake, timedelta(minutes=9), LEASES)
    discard(planes.lake, NAME, AT_ONCE, by="test")
    assert retained(planes) == {old, new}, "a lease lives for ten minutes by the store's clock"
    make_older(planes.lake, timedelta(minutes=11), LEASES)
    discard(planes.lake, NAME, AT_ONCE, by="test")
    assert retained(planes) == {new}
    assert objects(planes.lake, LEASES) == {}
    lease.renew()
    assert lease.lost
    assert objects(planes.lake, LEASES) == {}, "it is not made again"
    with pytest.raises(LeaseLostError, match=f"the lease of {old} by me was lost: it was removed"):
        lease.check()
    lease.release()


def test_a_renewal_moves_the_expiry(planes: World) -> None:
    lease = acquire(planes, publish(planes, 1)[0])
    make_older(planes.lake, timedelta(minutes=9), LEASES)
    (before,) = expiries(planes)
    lease.renew()
    (after,) = expiries(planes)
    assert after - before > timedelta(minutes=8)
    lease.check()
    lease.release()
    assert expiries(planes) == []
    lease.release()


@pytest.mark.lengthy
def test_a_lease_renews_itself(planes: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "TTL", timedelta(seconds=6))
    with acquire(planes, publish(planes, 1)[0]) as lease:
        first, deadline = expiries(planes), time.monotonic() + 120
        while expiries(planes) == first:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        lease.check()
        assert len(list_live_leases(planes.lake, NAME, read_lake_clock(planes.lake, NAME))) == 1


@pytest.mark.lengthy
def test_a_lease_that_can_not_be_renewed_in_time_is_lost(
    planes: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "TTL", timedelta(seconds=1))
    failing = [Fault("put_if_match", nth, "lost-before") for nth in range(1, 20)]
    lake = faulty(planes, *failing)
    with acquire(planes, publish(planes, 1)[0], lake=lake) as lease:
        assert not lease.lost
        time.sleep(1.3)
        with pytest.raises(LeaseLostError) as caught:
            lease.check()
        assert caught.value.dataset == "planes"


@pytest.mark.parametrize("clock", [0, 1], ids=["a process that hung", "a machine that slept"])
def test_a_renewal_that_comes_too_late_does_not_count(
    planes: World, monkeypatch, clock: int
) -> None:
    """Whoever discarded meanwhile may have seen the lease as expired, though it stands in the
    lake again.
    """
    lease = acquire(planes, publish(planes, 1)[0])
    now = list(times.read_clocks())
    now[clock] += 541
    for module in (times, fence):
        monkeypatch.setattr(module, "read_clocks", lambda: tuple(now))
    lease.renew()
    with pytest.raises(LeaseLostError) as caught:
        lease.check()
    assert caught.value.dataset == "planes"
    lease.release()


def test_a_renewal_whose_reply_was_lost_is_no_lost_lease(planes: World) -> None:
    lease = acquire(
        planes, publish(planes, 1)[0], lake=faulty(planes, Fault("put_if_match", 1, "lost-after"))
    )
    with pytest.raises(StoreUnavailableError):
        lease.renew()
    lease.renew()
    lease.check()
    lease.release()
    assert objects(planes.lake, LEASES) == {}


def test_a_reader_that_dies_while_it_acquires_leaves_at_most_a_lease_that_expires(
    planes: World,
) -> None:
    old, new = publish(planes, 1, 2)
    for nth in range(1, 5):
        for kind in ("crash-before", "crash-after"):
            with pytest.raises(Crash):
                acquire(planes, old, lake=faulty(planes, Fault("*", nth, kind))).release()
    make_older(planes.lake, timedelta(minutes=11), LEASES)
    discard(planes.lake, NAME, AT_ONCE, by="test")
    assert retained(planes) == {new}
    assert objects(planes.lake, LEASES) == {}


# -- what can't be read


def _lease_like(**changes: object) -> bytes:
    return json.dumps(
        {"versions": ["v000001-x"], "holder": "me", "ttl": 600, "nonce": "n"} | changes
    ).encode()


MALFORMED = {
    "nothing": b"",
    "half a document": b'{"versions": ["v0',
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a number": b"7",
    "no versions": b'{"holder": "me", "ttl": 600}',
    "one version, not in a list": _lease_like(versions="v000001-x"),
    "a version that is no text": _lease_like(versions=[7]),
    "an empty version": _lease_like(versions=[""]),
    "a time to live that is no number": _lease_like(ttl="soon"),
    "a time to live that never ends": _lease_like(ttl=float("inf")),
    "a time to live beyond the calendar": _lease_like(ttl=1e15),
    "a time to live that is none": _lease_like(ttl=float("nan")),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_lease_that_can_not_be_read_keeps_everything_until_it_would_have_expired(
    planes: World, data: bytes
) -> None:
    old, new = publish(planes, 1, 2)
    planes.lake.store.put(f"{LEASES}odd.json", data)
    report = discard(planes.lake, NAME, AT_ONCE, by="test")
    assert {judged.what: judged.reason for judged in report.kept}[old].startswith(
        "leased by a malformed lease, data"
    )
    assert retained(planes) == {old, new}
    make_older(planes.lake, timedelta(minutes=11), LEASES)
    discard(planes.lake, NAME, AT_ONCE, by="test")
    assert retained(planes) == {new}
    assert objects(planes.lake, LEASES) == {}


def test_leases_that_are_released_while_they_are_listed_are_no_error(planes: World) -> None:
    lease = acquire(planes, publish(planes, 1)[0])
    lake = faulty(planes, Fault("get", 1, "meanwhile", lease.release))
    assert list_leases(lake, NAME) == []


def test_the_clock_is_the_stores(planes: World) -> None:
    publish(planes, 1)
    assert abs(read_lake_clock(planes.lake, NAME) - datetime.now(UTC)) < timedelta(seconds=5)

    def moved() -> None:
        make_older(planes.lake, timedelta(hours=3), f"datasets/{NAME}/clock")

    behind = faulty(planes, Fault("head", 1, "meanwhile", moved))
    assert datetime.now(UTC) - read_lake_clock(behind, NAME) > timedelta(hours=2)
