"""Readers' leases: a version that somebody holds is not deleted.

    datasets/{name}/leases/{id}.json     which versions, who holds them, for how long

The holder writes the lease first and looks then whether its versions are doomed; whoever discards dooms first and
reads the leases then. So one of the two always sees the other. A lease lives until its modification time, by the
store's clock, is older than its time to live; its holder renews it by rewriting it.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.resources.errors import (
    AdjunctError,
    DatasetError,
    DatasetNotFoundError,
    LeaseLostError,
    ObjectNotFoundError,
)
from dagster_adjunct.resources.objects.heartbeat import Heartbeat
from dagster_adjunct.resources.objects.retention_holds import delete_holds, holder_prefix
from dagster_adjunct.resources.objects.store import read_store_clock

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.objects.store import ObjectInfo

# Records of builds: that one is running, and what one has finished.
#
#     datasets/{name}/attempts/{attempt}.json     who builds, since when; renewed by being rewritten
#
# The modification time of the record, by the store's clock, is what keeps a running build's files from being
# discarded. A finished build is kept in it, so that a crash after it does not cost the build.


RENEWAL_INTERVAL = timedelta(minutes=5)
# A record that was renewed within this time is of a build that is going on.
RUNNING_WITHIN = 3 * RENEWAL_INTERVAL
_log = logging.getLogger("adjunct.dataset")


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """A build on record; `renewed` is by the store's clock."""

    id: str
    key: str
    renewed: datetime


class AttemptRecord:
    """Keeps a build on record while the context lasts; `finish` leaves what it has built there."""

    def __init__(self, lake: Lake, dataset: str, attempt: str, by: str) -> None:
        self._store, self._key = lake.store, attempt_key(lake, dataset, attempt)
        self._body: dict[str, Any] = {"attempt": attempt, "by": by}
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._write()
        self._thread = threading.Thread(target=self._renew, name="adjunct-attempt", daemon=True)
        self._thread.start()
        return self

    def finish(self, body: dict[str, Any]) -> None:
        """Leave what was built on record."""
        with self._lock:
            self._body |= {"built": body}
        self._write()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _renew(self) -> None:
        while not self._stopped.wait(RENEWAL_INTERVAL.total_seconds()):
            try:
                self._write()
            except AdjunctError as error:
                # Two more are tried before anybody takes the build for one that has ended.
                _log.warning("the build on record in %s was not renewed: %s", self._key, error)

    def _write(self) -> None:
        with self._lock:  # or a renewal that is on its way could end after `finish`, without what was built
            self._store.put(self._key, json.dumps(self._body).encode())


@contextmanager
def record_build(lake: Lake, dataset: str, attempt: str, by: str) -> Iterator[None]:
    """Keep a build on record while the context lasts, and no longer, for one that nobody takes up when it has died."""
    try:
        with AttemptRecord(lake, dataset, attempt, by):
            yield
    finally:
        delete_attempt(lake, dataset, attempt)


def list_attempts(lake: Lake, dataset: str) -> Iterator[AttemptInfo]:
    """Yield the builds on record."""
    prefix = f"{lake.dataset_prefix(dataset)}/attempts/"
    for item in lake.store.list(prefix):
        yield AttemptInfo(item.key.removeprefix(prefix).removesuffix(".json"), item.key, item.modified)


def read_finished_build(lake: Lake, dataset: str, attempt: str) -> dict[str, Any] | None:
    """Return what a build on record has finished, None while it runs or where there is none."""
    try:
        body = json.loads(lake.store.get(attempt_key(lake, dataset, attempt)).data)
    except (ObjectNotFoundError, ValueError):
        return None
    built = body.get("built") if isinstance(body, dict) else None
    return built if isinstance(built, dict) else None


def delete_attempt(lake: Lake, dataset: str, attempt: str) -> None:
    """Delete the record of a build that has ended; what can't be deleted now is garbage for discarding."""
    with suppress(AdjunctError):
        lake.store.delete(attempt_key(lake, dataset, attempt))


def attempt_key(lake: Lake, dataset: str, attempt: str) -> str:
    """Return where the record of a build is."""
    return f"{lake.dataset_prefix(dataset)}/attempts/{attempt}.json"


TTL = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease as it stands in the lake; `expires_at` is by the store's clock."""

    key: str
    holder: str
    versions: tuple[str, ...]
    expires_at: datetime


class Lease:
    """Versions of one dataset that are held. Renewed by a thread of its own until `release`; a context manager."""

    def __init__(self, lake: Lake, dataset: str, versions: Sequence[str], holder: str) -> None:
        self.dataset, self.versions, self.holder, self.ttl = dataset, tuple(versions), holder, TTL
        self._lake, self._key = lake, f"{lease_folder(lake, dataset)}/{uuid.uuid4().hex}.json"
        # Nobody else writes it, so what is found there is a renewal of ours whose reply was lost.
        self._heartbeat = Heartbeat(lake.store, self._key, self._body, TTL, not_ours=lambda data: "", log=_log)

    @classmethod
    def acquire(cls, lake: Lake, dataset: str, versions: Sequence[str], *, holder: str) -> Lease:
        """Hold these versions, by id. Raises VersionDiscardedError where one is not retained any more."""
        lease = cls(lake, dataset, versions, holder)
        lease._heartbeat.write(partial(lake.store.put_if_absent, lease._key))
        try:
            check_retained(lake, dataset, versions)
        except BaseException:
            lease.release()
            raise
        lease._heartbeat.start()
        return lease

    @property
    def lost(self) -> bool:
        """Whether what is held may have been deleted meanwhile."""
        return bool(self._heartbeat.problem)

    def check(self) -> None:
        """Raise LeaseLostError if the lease was lost."""
        if self.lost:
            raise LeaseLostError(
                f"dataset {self.dataset!r}: the lease of {', '.join(self.versions)} by {self.holder} was lost: "
                f"{self._heartbeat.problem}.",
                "Nothing may be built on what was read under it. Run again: it reads what is served then.",
                dataset=self.dataset,
            )

    def renew(self) -> None:
        """Write the lease anew, which moves its expiry. One that was removed meanwhile is lost, not made again."""
        self._heartbeat.renew()

    def release(self) -> None:
        """Let the versions go. Safe to repeat; a lease that can't be removed now expires."""
        self._heartbeat.end(self._remove)

    def release_later(self) -> None:
        """Let the versions go in the background, waiting for nothing: for what runs where an object is collected."""
        self._heartbeat.end_in_background(self._remove)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def _remove(self, etag: str) -> None:
        self._lake.store.delete(self._key)

    def _body(self) -> bytes:
        return lease_body(self.versions, self.holder, self.ttl)


def lease_body(versions: Sequence[str], holder: str, ttl: timedelta) -> bytes:
    """Return what a lease's object holds, with a nonce, so that a renewal is a new object with a new ETag."""
    return json.dumps(
        {"versions": list(versions), "holder": holder, "ttl": ttl.total_seconds(), "nonce": uuid.uuid4().hex}
    ).encode()


def lease_folder(lake: Lake, dataset: str) -> str:
    """Return where a dataset's leases are."""
    return f"{lake.dataset_prefix(dataset)}/leases"


def list_live_leases(lake: Lake, dataset: str, now: datetime) -> list[LeaseInfo]:
    """Return the leases that have not expired; `now` is by the store's clock."""
    return [lease for lease in list_leases(lake, dataset) if lease.expires_at > now]


def list_leases(lake: Lake, dataset: str) -> list[LeaseInfo]:
    """Return all leases in the lake, expired or not. One that can't be read holds whatever it may hold: ("*",)."""
    leases = []
    for item in lake.store.list(f"{lease_folder(lake, dataset)}/"):
        with suppress(ObjectNotFoundError):  # released in between
            leases.append(_parse(item, lake.store.get(item.key).data))
    return leases


def _parse(item: ObjectInfo, data: bytes) -> LeaseInfo:
    try:
        body = json.loads(data)
        versions, holder = body["versions"], str(body["holder"])
        if not isinstance(versions, list) or not all(isinstance(version, str) and version for version in versions):
            raise ValueError
        expires_at = item.modified + timedelta(seconds=float(body["ttl"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return LeaseInfo(item.key, f"a malformed lease, {item.key}", ("*",), item.modified + TTL)
    return LeaseInfo(item.key, holder, tuple(versions), expires_at)


def read_lake_clock(lake: Lake, dataset: str) -> datetime:
    """Return the time by the store's clock: that of an object written just now."""
    return read_store_clock(lake.store, f"{lake.dataset_prefix(dataset)}/clock")


def check_retained(lake: Lake, dataset: str, versions: Sequence[str]) -> None:
    """Refuse versions that are not retained any more, with VersionDiscardedError. To be asked once they are held."""
    manifest = DatasetLog(lake, dataset).read()[1]
    if manifest is None:
        raise DatasetNotFoundError(
            f"dataset {dataset!r} has no commit in {lake.url}.", "Advance it a first time.", dataset=dataset
        )
    for version in versions:
        manifest.check_kept(version)


# Holds: versions kept for something outside that can't renew a lease, such as a table in another catalogue.
#
#     datasets/{name}/leases/hold-{hash of the holder}-{version}.json
#
# A hold is a lease that does not run out, so whoever discards spares it as any other; it is let go by name.


_FOR_EVER = timedelta(days=36_500)


def retain_version(lake: Lake, dataset: str, version: str, *, holder: str) -> None:
    """Keep a version from being discarded until `let_go`; to hold it again changes nothing.

    Raises VersionDiscardedError where it is not retained any more.
    """
    lake.store.put(f"{_hold_prefix(lake, dataset, holder)}{version}.json", lease_body([version], holder, _FOR_EVER))
    try:
        check_retained(lake, dataset, [version])
    except DatasetError:
        lake.store.delete(f"{_hold_prefix(lake, dataset, holder)}{version}.json")
        raise


def release_versions(lake: Lake, dataset: str, *, holder: str, keep: Collection[str] = ()) -> tuple[str, ...]:
    """End this holder's holds of all versions but `keep`, and return the versions that it held.

    With `keep`, holds of the last hour stay as well (`delete_holds`).
    """
    return delete_holds(lake.store, _hold_prefix(lake, dataset, holder), keep=keep)


def _hold_prefix(lake: Lake, dataset: str, holder: str) -> str:
    return holder_prefix(f"{lease_folder(lake, dataset)}/hold-", holder)
