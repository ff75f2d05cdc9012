"""Readers' leases: a version that somebody holds is not deleted (design, rule 4).

    datasets/{name}/leases/{id}.json     which versions, who holds them, for how long

The holder writes the lease first and looks then whether its versions are doomed; whoever discards dooms first and
reads the leases then. So one of the two always sees the other. A lease lives until its modification time, by the
store's clock, is older than its time to live; its holder renews it by rewriting it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self

from assets.log import DatasetLog
from assets.manifest import version_number
from resources.errors import (
    AdjunctError,
    DatasetNotFoundError,
    LeaseLostError,
    ObjectNotFoundError,
    PreconditionFailedError,
    TransientError,
    VersionDiscardedError,
)

if TYPE_CHECKING:
    from assets.manifest import DatasetManifest
    from resources.objects.lake import Lake
    from resources.objects.store import ObjectInfo

TTL = timedelta(minutes=10)
_TRUSTED = 0.9
_log = logging.getLogger("adjunct.dataset")


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease as it stands in the lake; `expires_at` is by the store's clock."""

    key: str
    holder: str
    versions: tuple[str, ...]
    expires_at: datetime


class Lease:
    """Versions of one dataset that are held. Renewed by a thread of its own until `release`; a context manager."""

    def __init__(self, lake: Lake, dataset: str, versions: Sequence[str], holder: str, ttl: timedelta) -> None:
        self.dataset, self.versions, self.holder, self.ttl = dataset, tuple(versions), holder, ttl
        self._lake, self._key = lake, f"{lease_folder(lake, dataset)}/{uuid.uuid4().hex}.json"
        self._etag: str | None = None
        self._written = _clock()
        self._problem = ""
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @classmethod
    def acquire(cls, lake: Lake, dataset: str, versions: Sequence[str], *, holder: str, ttl: timedelta = TTL) -> Lease:
        """Hold these versions, by id. Raises VersionDiscardedError where one is not retained any more."""
        lease = cls(lake, dataset, versions, holder, ttl)
        lease._written = _clock()
        lease._etag = lake.store.put_if_absent(lease._key, lease._body())
        try:
            check_retained(lake, dataset, versions)
        except BaseException:
            lease.release()
            raise
        lease._thread = threading.Thread(target=lease._keep, name="adjunct-lease", daemon=True)
        lease._thread.start()
        return lease

    @property
    def lost(self) -> bool:
        """Whether what is held may have been deleted meanwhile."""
        if not self._problem and self._overdue():
            self._problem = f"it lives for {self.ttl} and was not renewed in time"
        return bool(self._problem)

    def check(self) -> None:
        """Raise LeaseLostError if the lease was lost."""
        if self.lost:
            raise LeaseLostError(
                f"dataset {self.dataset!r}: the lease of {', '.join(self.versions)} by {self.holder} was lost: "
                f"{self._problem}.",
                "Nothing may be built on what was read under it. Run again: it reads what is served then.",
            )

    def renew(self) -> None:
        """Write the lease anew, which moves its expiry. One that was removed meanwhile is lost, not made again."""
        with self._lock:
            if self._etag is None or self._problem:
                return
            began = _clock()
            if not self._rewrite(self._etag):
                self._problem = "it had expired and was removed"
            elif not self.lost:  # else it was written too late: who discards may have seen it expired
                self._written = began

    def _rewrite(self, etag: str) -> bool:
        """Replace the lease's object; False where it is not there any more."""
        try:
            self._etag = self._lake.store.put_if_match(self._key, self._body(), etag)
        except (PreconditionFailedError, ObjectNotFoundError):
            # Nobody else writes it, so what is there is a renewal of ours whose reply was lost.
            found = self._lake.store.head(self._key)
            if found is None or found.etag == etag:
                return False
            return self._rewrite(found.etag)
        return True

    def _overdue(self) -> bool:
        """Whether the lease may have expired, counted from before its last write was sent.

        With a margin: stores round the times that they tell to seconds.
        """
        passed = max(now - then for now, then in zip(_clock(), self._written, strict=True))
        return passed >= _TRUSTED * self.ttl.total_seconds()

    def release(self) -> None:
        """Let the versions go. Safe to repeat; a lease that can't be removed now expires."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock, suppress(AdjunctError):
            if self._etag is not None:
                self._etag = None
                self._lake.store.delete(self._key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def _body(self) -> bytes:
        return lease_body(self.versions, self.holder, self.ttl)

    def _keep(self) -> None:
        while not self._stopped.wait(self.ttl.total_seconds() / 4):
            try:
                self.renew()
            except TransientError as error:
                _log.warning("the lease %s was not renewed: %s", self._key, error)
            except AdjunctError as error:
                self._problem = error.problem
            if self.lost:
                return


def _clock() -> tuple[float, float]:
    """Return two clocks: one that nobody sets, and one that goes on while the machine sleeps."""
    return time.monotonic(), time.time()


def lease_body(versions: Sequence[str], holder: str, ttl: timedelta) -> bytes:
    """Return what a lease's object holds, with a nonce, so that a renewal is a new object with a new ETag."""
    return json.dumps(
        {"versions": list(versions), "holder": holder, "ttl": ttl.total_seconds(), "nonce": uuid.uuid4().hex}
    ).encode()


def lease_folder(lake: Lake, dataset: str) -> str:
    """Return where a dataset's leases are."""
    return f"{lake.dataset_prefix(dataset)}/leases"


def live_leases(lake: Lake, dataset: str, now: datetime) -> list[LeaseInfo]:
    """Return the leases that have not expired; `now` is by the store's clock."""
    return [lease for lease in all_leases(lake, dataset) if lease.expires_at > now]


def all_leases(lake: Lake, dataset: str) -> list[LeaseInfo]:
    """Return all leases in the lake, expired or not. One that can't be read holds whatever it may hold: ("*",)."""
    found = []
    for item in lake.store.list(f"{lease_folder(lake, dataset)}/"):
        with suppress(ObjectNotFoundError):  # released in between
            found.append(_parse(item, lake.store.get(item.key).data))
    return found


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


def store_now(lake: Lake, dataset: str) -> datetime:
    """Return the time by the store's clock: that of an object written just now."""
    key = f"{lake.dataset_prefix(dataset)}/clock"
    lake.store.put(key, uuid.uuid4().hex.encode())
    found = lake.store.head(key)
    assert found is not None
    return found.modified


def check_not_doomed(manifest: DatasetManifest, version: str) -> None:
    """Refuse a version that is not retained, or that is being deleted."""
    if manifest.declaration.kind == "unbounded" and version_number(version) < manifest.retained_from:
        raise VersionDiscardedError(
            f"dataset {manifest.name!r}: version {version} has been discarded; those from number "
            f"{manifest.retained_from} on can be read.",
            f"See adjunct dataset history {manifest.name}. A policy that keeps more keeps earlier versions longer: "
            "discard=DiscardPolicy(keep=…, grace=…).",
        )
    ref = manifest.ref(version)
    gone = ref is None if manifest.declaration.kind == "bounded" else False
    if gone or (ref is not None and set(ref.folders) & set(manifest.doomed)):
        served = manifest.version.id if manifest.version else "none"
        raise VersionDiscardedError(
            f"dataset {manifest.name!r}: version {version} has been discarded; the one served is {served}.",
            "Open the dataset again, or pin the versions that must stay: adjunct dataset pin.",
        )


def check_retained(lake: Lake, dataset: str, versions: Sequence[str]) -> None:
    """Refuse versions that are not retained any more, with VersionDiscardedError. To be asked once they are held."""
    manifest = DatasetLog(lake, dataset).read()[1]
    if manifest is None:
        raise DatasetNotFoundError(f"dataset {dataset!r} has no commit in {lake.url}.", "Advance it a first time.")
    for version in versions:
        check_not_doomed(manifest, version)
