"""The version that an open dataset reads, its lease, and the switch to another version."""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeVar

from dagster_adjunct.assets.declaration.dataset import BoundedDataset
from dagster_adjunct.assets.reading.served_history import ServedHistory
from dagster_adjunct.assets.reading.served_over_time import ServedOverTime, read_served
from dagster_adjunct.assets.reading.stored_versions import AsOf, StoredVersions
from dagster_adjunct.assets.reading.valid_time import VersionsOverTime
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.dataset_log import redirect_target
from dagster_adjunct.assets.versions.leases import Lease, check_retained
from dagster_adjunct.assets.versions.manifest import DatasetManifest, as_bounded
from dagster_adjunct.assets.versions.switches import find_previous_version
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.times import utc_now
from dagster_adjunct.resources.validation import validated_methods


@dataclass(slots=True, eq=False)
class VersionInUse:
    """A version that an open dataset reads: the number of running calls, and the lease against a
    discard.
    """

    reader: VersionReader
    lease: Lease | None = None
    users: int = 0

    @property
    def leased(self) -> bool:
        """Whether it has a lease, which was not lost."""
        return self.lease is not None and not self.lease.lost

    def release(self) -> None:
        """Release its lease."""
        lease = self.lease
        self.lease = None
        if lease is not None:
            lease.release()


def _release_idle(current: list[VersionInUse]) -> None:
    """Release the version in `current` in the background, when nothing refers to the open dataset
    any more.

    A call that still uses the version, such as an iteration collected with the dataset, releases it
    when it ends. Lent versions stay leased.
    """
    dropped = [*current]
    current.clear()
    for held in dropped:
        if not held.users and held.lease is not None:
            held.lease.release_later()


T = TypeVar("T")
OnDamage = Literal["fail", "previous"]
_TRIES = 20
_log = logging.getLogger("adjunct.serving")


def _declared_on_damage(stored: StoredVersions) -> OnDamage:
    """Return what the dataset declares for a damaged version; only bounded ones declare it."""
    if isinstance(stored.spec, BoundedDataset):
        return stored.spec.on_damage
    return "fail"


def _retry_discarded(lease: Callable[[], T]) -> T:
    """Return `lease()`, retried where a version was replaced and discarded before it could be
    leased.
    """
    for _ in range(_TRIES - 1):
        with suppress(errors.VersionDiscardedError):
            return lease()
    return lease()


class _Current(NamedTuple):
    """The newest commit of a dataset, and a reader of the version that it serves."""

    commit: Commit
    reader: VersionReader


class ServedVersion:
    """Decides which version each call of an open dataset reads, and leases it.

    A call reads one whole version. If that is damaged or was discarded, later calls read another
    one. `fixed` is a version to read permanently; None reads the served one. `Dataset` documents
    leases and damage.
    """

    def __init__(
        self,
        stored: StoredVersions,
        fixed: VersionReader | None,
        *,
        leases: bool = True,
        on_damage: OnDamage | None = None,
        holder: str | None = None,
    ) -> None:
        self._stored = stored
        self._leases = leases
        self._holder = holder or f"{socket.gethostname()}, process {os.getpid()}"
        self._on_damage = on_damage or _declared_on_damage(stored)
        self._fixed = None if fixed is None else fixed.version
        self._closed = False
        self._lock = threading.Lock()  # for counts and `_current`; never held over a request
        self.moving = threading.RLock()
        """The lock for switching to another version. Running calls don't need it: they keep
        their version.
        """

        # The version that the next call enters, or empty: a list, which the finalizer below shares.
        self._current: list[VersionInUse] = []
        self._ended: errors.AdjunctError | None = None  # why `_current` is empty
        # The newest commit when the dataset was last read; None for a fixed version.
        self._commit: Commit | None = None
        self._has_answered = False  # whether a call has succeeded, so that later ones take a lease

        # What stays leased until `close`: versions that were lent, and leases by their versions.
        self._lent: list[VersionInUse] = []
        self._lasting_leases: dict[tuple[str, ...], Lease] = {}

        self.damaged: dict[str, errors.ManifestMismatchError] = {}
        """The versions that were found damaged, each with its error."""
        # The served version, if it is damaged and an earlier one is read.
        self._avoided: str | None = None

        if fixed is None:
            self._commit, manifest = stored.newest()
            reader = stored.reader_of(manifest)
            if reader is None:
                self._ended = stored.not_served_error(manifest)
        else:
            reader = fixed
        if reader is not None:
            self._current.append(VersionInUse(reader))
        # A dataset that is never closed releases its lease when it is garbage collected. Not at the
        # end of the process: nothing renews the lease then, so it expires.
        weakref.finalize(self, _release_idle, self._current).atexit = False

    @property
    def held(self) -> VersionInUse | None:
        """The version that the next call enters, or None."""
        return next(iter(self._current), None)

    def require(self) -> VersionInUse:
        """Return the version that the next call enters. Without one, raise the error that says
        why.
        """
        held = self.held
        if held is None:
            assert self._ended is not None
            raise self._ended.reworded(self._ended.problem, self._ended.next_step)
        return held

    @property
    def lent(self) -> list[VersionReader]:
        """The readers that were lent; their versions stay leased until `close`."""
        return [held.reader for held in self._lent]

    # -- calls

    def answer(self, read: Callable[[VersionReader], T]) -> T:
        """Return `read(reader)`. If the version is damaged, switch to a replacement and call `read`
        again.

        The first call takes no lease. Once a call has succeeded, later calls lease the version
        before they read it.
        """
        while True:
            held = self.enter(leased=self._has_answered)
            try:
                answer = read(held.reader)
                self._has_answered = True
                return answer
            except errors.ManifestMismatchError as error:
                self.replace_damaged(held, error)
            finally:
                self.leave(held)

    def lend(self, read: Callable[[VersionReader], T]) -> T:
        """Return `read(reader)` for a caller that reads the files later; the version stays leased
        until `close`.

        Without leases, only check that the version is still retained.
        """
        while True:
            held = self.enter(leased=True)
            try:
                if not self._leases:
                    check_retained(self._stored.log.lake, self._stored.name, [held.reader.version])
                answer = read(held.reader)
            except errors.ManifestMismatchError as error:
                self.leave(held)
                self.replace_damaged(held, error)
            except errors.VersionDiscardedError:
                self.leave(held)
                has_moved_on = self._fixed is None and self.refresh()
                if not has_moved_on:
                    raise
            except BaseException:
                self.leave(held)
                raise
            else:
                self._keep_until_close(held)
                return answer

    def lend_over_time(self) -> VersionReader | VersionsOverTime:
        """Return a reader over time, whose versions stay leased until `close`.

        Of a dataset whose versions state their time it reads all of them, leased before one is
        opened; else it is the reader of the current version, which may have history.
        """

        def hold() -> VersionsOverTime | None:
            versions = self._stored.require_manifest().versions_over_time
            if versions is None:  # a dataset that follows changes
                return None
            self._lease_until_close(versions)
            return self._stored.over_time(versions)

        over_time = _retry_discarded(hold)
        if over_time is not None:
            return over_time
        return self.lend_current()

    def lend_current(self) -> VersionReader:
        """Return the reader of the current version, which stays leased until `close`."""
        return self.lend(lambda reader: reader)

    def _lease_until_close(self, versions: tuple[str, ...]) -> None:
        """Lease these versions; do nothing if the same ones are leased already, or without leases.
        Raises VersionDiscardedError.
        """
        if versions and versions not in self._lasting_leases and self._leases:
            self._lasting_leases[versions] = self._acquire(*versions)

    def lend_served(self) -> ServedOverTime:
        """Return a reader of all that the dataset has served; its versions stay leased until
        `close`.

        Raises NoSealedVersionError where nothing is served, and ConfigurationError for a version
        that was chosen.
        """
        if self._fixed is not None:
            raise errors.ConfigurationError(
                f"dataset {self._stored.name!r}: version {self._fixed} was chosen, and it is asked"
                " what was served at other times.",
                "Open the dataset without version= and as_of=.",
                argument="versions",
                dataset=self._stored.name,
            )

        def hold() -> ServedOverTime:
            reader = read_served(ServedHistory.read(self._stored.log.lake, self._stored.name))
            if reader is None:
                raise self._stored.not_served_error(self._stored.require_manifest())
            self._lease_until_close(reader.leased)
            return reader

        return _retry_discarded(hold)

    def lend_earlier(
        self, version: str | None = None, *, as_of: AsOf | None = None
    ) -> VersionReader:
        """Return a reader of another version, as `StoredVersions.version` does; it stays leased
        until `close`.
        """
        reader = self._stored.version(version, as_of=as_of)
        self._lease_until_close((reader.version,))
        return reader

    def iterate(self, read: Callable[[VersionReader], Iterator[T]]) -> Iterator[T]:
        """Yield the items of `read(reader)`, for a reader of the version that is current at this
        call.

        If a file is found damaged or discarded before the first item, another version may replace
        it; later the iteration fails.
        """
        items = self._iterate(read)
        next(items)  # enters the version; the generator leaves it when it ends or is closed
        return items

    def _iterate(self, read: Callable[[VersionReader], Iterator[T]]) -> Iterator[Any]:
        """Yield None once the version's lease is held, then the items that `read` returns."""
        entered = False
        begun = False
        while True:
            held = self.enter(leased=True)
            try:
                items = read(held.reader)
                if not entered:
                    entered = True
                    yield None
                for item in items:
                    begun = True
                    yield item
                return
            except errors.ManifestMismatchError as error:
                if begun:
                    self.raise_if_discarded(held.reader.version)
                    raise
                self.replace_damaged(held, error)
            finally:
                self.leave(held)

    def enter(self, *, leased: bool) -> VersionInUse:
        """Return the version that a call reads; the call must pass it to `leave` at its end.

        `leased` takes a lease first, unless there is one. Raises what `require` raises, and
        VersionDiscardedError if the version was discarded and there is no other to read.
        """
        leased = leased and self._leases
        while True:
            with self._lock:
                held = self.require()
                if not leased or held.leased:
                    held.users += 1
                    return held
            try:
                with self.moving:
                    if held is self.held and not held.leased:
                        held.lease = self._acquire(held.reader.version)
            except errors.VersionDiscardedError:
                has_moved_on = self._fixed is None and self.refresh()
                if not has_moved_on:
                    raise

    def leave(self, held: VersionInUse) -> None:
        """End a call. The lease is released if this was the version's last call and later calls
        enter another one.
        """
        with self._lock:
            held.users -= 1
            idle = not held.users and held is not self.held
        if idle:
            held.release()

    def raise_if_discarded(self, version: str) -> None:
        """Raise VersionDiscardedError if this version was discarded: then that is why a file is
        missing.
        """
        self._stored.require_manifest().check_kept(version)

    # -- moving on

    def refresh(self) -> bool:
        """Move on to the version served now; return whether it is a different one."""
        with self.moving:
            if self._closed:
                raise self._closed_error()
            if self._current and not self._may_have_moved():
                return False
            if self._fixed is not None:
                self._read_or_end(partial(self._stored.version, self._fixed))
                return False
            return _retry_discarded(self._move_on)

    def _move_on(self) -> bool:
        """Let later calls enter the version served now; return whether it is a different one."""
        current = self._read_or_end(self._read_current)
        stays = self.held is not None and self._keeps(self.held, current.reader)
        if not stays:
            self._move_to(current.reader)
            self._avoided = None
        self._commit = current.commit
        return not stays

    def close(self) -> None:
        """Release all versions once running calls have ended. Later calls raise an error."""
        with self.moving:
            self._closed = True
            self._replace(None, self._closed_error())
            lent = self._lent
            self._lent = []
            leases = self._lasting_leases
            self._lasting_leases = {}
        for held in lent:
            self.leave(held)
        for lease in leases.values():
            lease.release()

    def _keep_until_close(self, held: VersionInUse) -> None:
        """Keep this version until `close` instead of leaving it; leave it if it is kept already, or
        if the dataset was closed meanwhile.
        """
        with self.moving:
            is_kept = not self._closed and all(other is not held for other in self._lent)
            if is_kept:
                self._lent.append(held)
        if not is_kept:
            self.leave(held)

    def _closed_error(self) -> errors.DatasetError:
        """Return the error for calls after `close`."""
        name = self._stored.name
        return errors.DatasetError(
            f"the reader of dataset {name!r} is closed.", "Open the dataset again.", dataset=name
        )

    def _read_current(self) -> _Current:
        """Return what is served now. Raises NoSealedVersionError."""
        commit, manifest = self._stored.newest()
        served = self._stored.reader_of(manifest)
        if served is None:
            raise self._stored.not_served_error(manifest)
        return _Current(commit, served)

    def _may_have_moved(self) -> bool:
        """Whether the pointer (CURRENT) may have changed since it was read."""
        commit = self._commit
        if commit is None or redirect_target(commit) is not None:
            # A fixed version, which is checked each time; or a dataset that is joining a version
            # set, whose pointer is not known yet.
            return True
        folder, _, _ = commit.manifest_key.rpartition("/manifests/")
        current = self._stored.log.lake.store.head(f"{folder}/CURRENT")
        return current is None or current.etag != commit.etag

    def _read_or_end(self, read: Callable[[], T]) -> T:
        """Return `read()`. If it raises DatasetError, later calls raise that too, until a
        refresh finds a version.
        """
        try:
            return read()
        except errors.DatasetError as error:
            self._replace(None, error)
            raise

    def _move_to(self, reader: VersionReader) -> None:
        """Let later calls enter this version, leased if the previous one was."""
        lease = None
        if self.held is not None and self.held.lease is not None:
            lease = self._acquire(reader.version)
        self._replace(VersionInUse(reader, lease))

    def _replace(self, held: VersionInUse | None, ended: errors.AdjunctError | None = None) -> None:
        """Let later calls enter the version `held`, or raise the error `ended` if that is None."""
        with self.moving:
            with self._lock:
                before = self.held
                self._current.clear()
                if held is not None:
                    self._current.append(held)
                self._ended = ended
                idle = before is not None and not before.users
            if before is not None and idle:
                before.release()

    def _acquire(self, *versions: str) -> Lease:
        """Return a lease on these versions. Raises VersionDiscardedError."""
        name = self._stored.name
        try:
            return Lease.acquire(self._stored.log.lake, name, versions, holder=self._holder)
        except errors.ConfigurationError as error:
            raise errors.DatasetError(
                f"dataset {name!r}: a reader could not write its lease: {error.problem}",
                f"Grant write access to datasets/{name}/leases, or open with lease=False: versions"
                " may then be discarded while they are read.",
                dataset=name,
            ) from error

    # -- damage

    def replace_damaged(self, held: VersionInUse, error: errors.ManifestMismatchError) -> None:
        """Switch from this version, which has a missing or damaged file, to a replacement; raise
        `error`, or for a discarded fixed version VersionDiscardedError, if there is none.

        If it was discarded, the replacement is the version served now, which is no damage. Else the
        version is remembered as damaged.
        """
        with self.moving:
            if held is not self.held:
                return  # another call has switched already
            manifest = self._stored.require_manifest()
            version = held.reader.version
            if self._fixed is not None:
                manifest.check_kept(version)  # raises if the version was discarded
                raise error
            served = self._stored.reader_of(manifest)
            is_discarded = manifest.ref(version) is None
            if is_discarded and served is not None and served.version != version:
                _log.info(
                    "dataset %s: %s was discarded, %s is read now",
                    self._stored.name,
                    version,
                    served.version,
                )
                self._move_to(served)
                return
            self.damaged[version] = error
            other = self._replacement(manifest, version)
            if other is None:
                raise error
            _log.warning(
                "dataset %s: %s is read instead of %s: %s",
                self._stored.name,
                other.version,
                version,
                error,
            )
            self._move_to(other)
            if served is not None and served.version != other.version:
                self._avoided = served.version
            else:
                self._avoided = None

    def _keeps(self, held: VersionInUse, served: VersionReader) -> bool:
        """Whether to go on with `held`: it is the served version, or replaces it, because that is
        damaged, and is still sealed.
        """
        if served.version == held.reader.version:
            return True
        if served.version != self._avoided:
            return False
        ref = self._stored.require_manifest().ref(held.reader.version)
        return ref is not None and ref.state == "sealed"

    def _replacement(self, manifest: DatasetManifest, damaged: str) -> VersionReader | None:
        """Return a reader of the version to read instead of a damaged one, None if there is none.

        That is the served version, if it is not damaged itself; else with on_damage="previous" the
        newest sealed one before that is not known to be damaged.
        """
        served = self._stored.reader_of(manifest)
        if served is not None and served.version not in self.damaged:
            return served
        ref = None
        if self._on_damage == "previous":
            ref = manifest.ref(damaged)
        while ref is not None and ref.id in self.damaged:
            ref = find_previous_version(as_bounded(manifest), ref)
        if ref is None:
            return None
        return self._stored.version(ref.id)


_LONGEST_STOP = 10.0


@validated_methods
class Watch:
    """Refreshes a dataset every `interval` seconds from `start` until `stop`; a `with` does both.

    `Dataset.watch` returns one that is started. `refresh` returns the function to call, or None
    when the open dataset is gone, which ends the watch. A failed refresh leaves the dataset at its
    version and is retried: until one succeeds, `error` holds the exception and `failing_since` the
    time of the first failure, and the log reports it once. Any exception but an AdjunctError ends
    the watch: `running` is then False.
    """

    def __init__(
        self, name: str, refresh: Callable[[], Callable[[], object] | None], interval: float
    ) -> None:
        if not 0 < interval <= threading.TIMEOUT_MAX:
            raise errors.ConfigurationError(
                f"dataset {name!r} can't be watched with an interval of {interval} seconds.",
                "Pass an interval above 0 and below 200 years.",
                argument="interval",
                dataset=name,
            )
        self.error: Exception | None = None
        self.failing_since: datetime | None = None
        self.refreshed_at: datetime | None = None
        self._name = name
        self._refresh = refresh
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{name}", daemon=True)

    @property
    def running(self) -> bool:
        """Whether the watch is refreshing."""
        return self._thread.is_alive() and not self._stopped.is_set()

    def start(self) -> Self:
        """Start refreshing; does nothing if it was started before."""
        if self._thread.ident is None:
            self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the watch, waiting at most 10 s for a running refresh."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_LONGEST_STOP)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self) -> None:
        """Refresh the dataset until the watch is stopped, the dataset is gone, or an unexpected
        error occurs.
        """
        while not self._stopped.wait(self._interval):
            refresh = self._refresh()
            if refresh is None:
                return
            try:
                refresh()
            except Exception as error:
                self._record_failure(error)
                if not isinstance(error, errors.AdjunctError):
                    raise
            else:
                self.error = None
                self.failing_since = None
                self.refreshed_at = utc_now()
            finally:
                del refresh  # else this thread would keep the reader alive while it waits

    def _record_failure(self, error: Exception) -> None:
        """Keep the error of a refresh, and log it unless the last one was the same."""
        if self.error is None or str(self.error) != str(error):
            _log.warning(
                "dataset %s: can't check for a new version, and keeps the current one: %s",
                self._name,
                error,
            )
        self.error = error
        self.failing_since = self.failing_since or utc_now()
