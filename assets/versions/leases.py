"""Leases, build records and holds, which keep files of versions from being deleted.

    datasets/{name}/leases/{id}.json                                    a reader's lease: versions,
                                                                        holder, time to live
    datasets/{name}/leases/hold-{hash of the holder}-{version}.json     a hold: a lease that does
                                                                        not expire
    datasets/{name}/leases/hold-{hash of the holder}-{version}/…        files of a hold, such as
                                                                        Iceberg's delete files
    datasets/{name}/attempts/{attempt}.json                             a running or finished build

The holder writes the lease first and then checks whether its versions are doomed; a discard dooms
versions first and then reads the leases. So one of the two always sees the other. A lease expires
once its modification time, by the store's clock, is older than its time to live; its holder renews
it by rewriting it. A hold is for a user that can't renew a lease, such as a table in another
catalogue; it is released by name.

A build record is renewed in the same way: its modification time keeps a running build's files from
being discarded. A finished build is stored in it, so that the next run can reuse the build after a
crash.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Self

from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.version import SealedVersion
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.fence import Heartbeat
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import (
    ObjectInfo,
    delete_holds,
    holder_prefix,
    read_store_clock,
)
from dagster_adjunct.resources.validation import validated

RENEWAL_INTERVAL = timedelta(minutes=5)
# A record renewed within this time belongs to a running build.
RUNNING_WITHIN = 3 * RENEWAL_INTERVAL
_log = logging.getLogger("adjunct.dataset")


@contextmanager
def renew_attempt(
    lake: Lake, dataset: str, attempt: str, by: str
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Write the record of a build, and renew it while the context lasts.

    Yields a function that stores the build's result in the record. The record stays after the
    context; `delete_attempt` deletes it.
    """
    key = attempt_key(lake, dataset, attempt)
    body: dict[str, Any] = {"attempt": attempt, "by": by}
    stopped = threading.Event()
    lock = threading.Lock()

    def write(result: dict[str, Any] | None = None) -> None:
        with lock:  # or a concurrent renewal could overwrite the result
            if result is not None:
                body["built"] = result
            lake.store.put(key, json.dumps(body).encode())

    def renew() -> None:
        while not stopped.wait(RENEWAL_INTERVAL.total_seconds()):
            try:
                write()
            except errors.AdjunctError as error:
                # Two more renewals are tried before the build counts as ended.
                _log.warning("the build record %s was not renewed: %s", key, error)

    write()
    thread = threading.Thread(target=renew, name="adjunct-attempt", daemon=True)
    thread.start()
    try:
        yield write
    finally:
        stopped.set()
        thread.join()


@contextmanager
def record_build(lake: Lake, dataset: str, attempt: str, by: str) -> Iterator[None]:
    """Write the record of a build and renew it while the context lasts, then delete it: the build
    is not resumed after a crash.
    """
    try:
        with renew_attempt(lake, dataset, attempt, by):
            yield
    finally:
        delete_attempt(lake, dataset, attempt)


def list_attempts(lake: Lake, dataset: str) -> dict[str, datetime]:
    """Return, by attempt id, when each build record of a dataset was last renewed, in the
    store's time.
    """
    prefix = f"{lake.dataset_prefix(dataset)}/attempts/"
    renewed = {}
    for item in lake.store.list(prefix):
        attempt = item.key.removeprefix(prefix).removesuffix(".json")
        renewed[attempt] = item.modified
    return renewed


def read_finished_build(lake: Lake, dataset: str, attempt: str) -> dict[str, Any] | None:
    """Return the result of a finished build from its record; None if it is running or has no
    record.
    """
    try:
        body = json.loads(lake.store.get(attempt_key(lake, dataset, attempt)).data)
    except (errors.ObjectNotFoundError, ValueError):
        return None
    if not isinstance(body, dict) or not isinstance(body.get("built"), dict):
        return None
    built: dict[str, Any] = body["built"]
    return built


def delete_attempt(lake: Lake, dataset: str, attempt: str) -> None:
    """Delete the record of an ended build; if that fails, a discard deletes it later."""
    with suppress(errors.AdjunctError):
        lake.store.delete(attempt_key(lake, dataset, attempt))


def attempt_key(lake: Lake, dataset: str, attempt: str) -> str:
    """Return the key of a build's record."""
    return f"{lake.dataset_prefix(dataset)}/attempts/{attempt}.json"


TTL = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease as stored in the lake; `expires_at` is by the store's clock."""

    key: str
    holder: str
    versions: tuple[str, ...]
    expires_at: datetime


@validated
class Lease:
    """A lease of versions of one dataset, renewed by its own thread until `release`; a context
    manager.
    """

    def __init__(self, lake: Lake, dataset: str, versions: Sequence[str], holder: str) -> None:
        self.dataset = dataset
        self.versions = tuple(versions)
        self.holder = holder
        self._lake = lake
        self._key = f"{lease_folder(lake, dataset)}/{uuid.uuid4().hex}.json"
        body = partial(lease_body, self.versions, holder, TTL)
        self._heartbeat = Heartbeat(
            lake.store, self._key, body, TTL, describe_loss=_describe_loss, log=_log
        )

    @classmethod
    def acquire(cls, lake: Lake, dataset: str, versions: Sequence[str], *, holder: str) -> Lease:
        """Lease these versions, by id; `holder` says in words who does. Raises
        VersionDiscardedError if one is no longer retained.
        """
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
        """Whether the lease has ended without `release`, so that its versions may be deleted."""
        return bool(self._heartbeat.problem)

    def check(self) -> None:
        """Raise LeaseLostError if the lease was lost."""
        if self.lost:
            raise errors.LeaseLostError(
                f"dataset {self.dataset!r}: the lease of {', '.join(self.versions)} by"
                f" {self.holder} was lost: {self._heartbeat.problem}.",
                "Do not use what was read under this lease. Run again, with the version that is"
                " served by then.",
                dataset=self.dataset,
            )

    def renew(self) -> None:
        """Rewrite the lease, which extends it. A lease that was removed is lost, not recreated."""
        self._heartbeat.renew()

    def release(self) -> None:
        """Release the versions. Safe to repeat; a lease that can't be removed expires."""
        self._heartbeat.end(self._remove)

    def release_later(self) -> None:
        """Release the versions in the background without waiting, for finalizers."""
        self._heartbeat.end_in_background(self._remove)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _remove(self, etag: str) -> None:
        self._lake.store.delete(self._key)


def _describe_loss(data: bytes) -> str:
    """Return "": the object of a lease is never somebody else's. No other process writes it, so
    unexpected content is our own renewal whose reply was lost.
    """
    return ""


@contextmanager
def lease_served(
    lake: Lake, dataset: str, version: SealedVersion | None, *, holder: str
) -> Iterator[Lease | None]:
    """Lease the served version while the context lasts; None leases nothing.

    Raises CommitConflictError if it was discarded concurrently.
    """
    if version is None:
        yield None
        return
    try:
        lease = Lease.acquire(lake, dataset, [version.id], holder=holder)
    except errors.VersionDiscardedError as error:
        raise errors.CommitConflictError(
            f"dataset {dataset!r}: version {version.id} was discarded before the {holder} could"
            " read it.",
            "Nothing of this attempt is visible. Advance again, which continues from the other"
            " commit.",
            dataset=dataset,
        ) from error
    with lease:
        yield lease


def lease_body(versions: Sequence[str], holder: str, ttl: timedelta) -> bytes:
    """Return the content of a lease's object; a nonce gives each renewal a new ETag."""
    return json.dumps(
        {
            "versions": list(versions),
            "holder": holder,
            "ttl": ttl.total_seconds(),
            "nonce": uuid.uuid4().hex,
        }
    ).encode()


def lease_folder(lake: Lake, dataset: str) -> str:
    """Return the folder of a dataset's leases."""
    return f"{lake.dataset_prefix(dataset)}/leases"


def list_live_leases(lake: Lake, dataset: str, now: datetime) -> list[LeaseInfo]:
    """Return the leases that have not expired; `now` is by the store's clock."""
    return [lease for lease in list_leases(lake, dataset) if lease.expires_at > now]


def list_leases(lake: Lake, dataset: str) -> list[LeaseInfo]:
    """Return all leases of a dataset, expired or not. An unreadable one counts as a lease of all
    versions: ("*",).
    """
    leases = []
    for item in lake.store.list(f"{lease_folder(lake, dataset)}/"):
        if not item.key.endswith(".json"):
            continue
        with suppress(errors.ObjectNotFoundError):  # released concurrently
            leases.append(_parse(item, lake.store.get(item.key).data))
    return leases


def _parse(item: ObjectInfo, data: bytes) -> LeaseInfo:
    """Return the lease in an object; if it is malformed, one of all versions, so that nothing is
    deleted by mistake.
    """
    try:
        body = json.loads(data)
        versions = body["versions"]
        holder = str(body["holder"])
        if not isinstance(versions, list):
            raise ValueError
        for version in versions:
            if not isinstance(version, str) or not version:
                raise ValueError
        expires_at = item.modified + timedelta(seconds=float(body["ttl"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return LeaseInfo(item.key, f"a malformed lease, {item.key}", ("*",), item.modified + TTL)
    return LeaseInfo(item.key, holder, tuple(versions), expires_at)


def read_lake_clock(lake: Lake, dataset: str) -> datetime:
    """Return the time by the store's clock: this writes an object and reads its modification
    time.
    """
    return read_store_clock(lake.store, f"{lake.dataset_prefix(dataset)}/clock")


def check_retained(lake: Lake, dataset: str, versions: Sequence[str]) -> None:
    """Raise VersionDiscardedError if one of these leased versions is no longer retained."""
    manifest = DatasetLog(lake, dataset).require().manifest
    for version in versions:
        manifest.check_kept(version)


_FOR_EVER = timedelta(days=36_500)


def retain_version(lake: Lake, dataset: str, version: str, *, holder: str) -> None:
    """Keep a version from being discarded until `release_versions`. Safe to repeat.

    Raises VersionDiscardedError if it is no longer retained.
    """
    key = f"{_hold_prefix(lake, dataset, holder)}{version}.json"
    lake.store.put(key, lease_body([version], holder, _FOR_EVER))
    try:
        check_retained(lake, dataset, [version])
    except errors.DatasetError:
        lake.store.delete(key)
        raise


def hold_folder(lake: Lake, dataset: str, version: str, *, holder: str) -> str:
    """Return the folder of a hold's files. They stay until the version is discarded, also after
    its release.
    """
    return f"{_hold_prefix(lake, dataset, holder)}{version}"


def list_released_files(lake: Lake, dataset: str) -> dict[str, list[ObjectInfo]]:
    """Return, by version, the files of holds that were released."""
    prefix = f"{lease_folder(lake, dataset)}/hold-"
    held = set[str]()
    files_of_hold: dict[str, list[ObjectInfo]] = {}
    for item in lake.store.list(prefix):
        hold, _, file = item.key.removeprefix(prefix).partition("/")
        if file:
            files_of_hold.setdefault(hold, []).append(item)
        else:
            held.add(hold.removesuffix(".json"))
    released: dict[str, list[ObjectInfo]] = {}
    for hold, items in files_of_hold.items():
        if hold not in held:
            _, _, version = hold.partition("-")  # the holder's hash, then the version
            released.setdefault(version, []).extend(items)
    return released


def release_versions(
    lake: Lake, dataset: str, *, holder: str, keep: Callable[[], Collection[str]] | None = None
) -> tuple[str, ...]:
    """Release this holder's holds of all versions but those that `keep` returns, and return the
    released versions.

    With `keep`, the newest holds stay as well (`delete_holds`).
    """
    return delete_holds(lake.store, _hold_prefix(lake, dataset, holder), keep=keep)


def _hold_prefix(lake: Lake, dataset: str, holder: str) -> str:
    """Return what the keys of all holds of this holder begin with."""
    return holder_prefix(f"{lease_folder(lake, dataset)}/hold-", holder)
