"""A dataset held open by a reader in plain Python: entries by key, of the version served now or of a chosen one.

Every call reads one whole version. `refresh`, or a watch, moves on to the version that is served then, between two
calls; an iteration that runs keeps its version to the end.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from dagster_adjunct.assets.reading.version_in_use import Held, Holding
from dagster_adjunct.assets.reading.version_reader import Entry, VersionReader
from dagster_adjunct.assets.reading.watch import Watch
from dagster_adjunct.assets.versions.choosing import previous
from dagster_adjunct.assets.versions.leases import check_not_doomed
from dagster_adjunct.assets.versions.log import redirect_of
from dagster_adjunct.assets.versions.manifest import as_bounded
from dagster_adjunct.resources.errors import (
    AdjunctError,
    DatasetError,
    ManifestMismatchError,
    VersionDiscardedError,
)

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.file_cache import FileCache
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.resources.objects.commit import Commit
    from dagster_adjunct.resources.schemas.schema import Schema

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
OnDamage = Literal["fail", "previous"]
_TRIES = 20
_log = logging.getLogger("adjunct.serving")


class ServedDataset:
    """Reads a dataset by key, without Spark. Safe to share between threads; close it, or use it in a `with`.

    A first `get` from a new process costs three requests: CURRENT, the manifest, and one row group. With
    `lease=True` a lease (three more requests, then one a renewal) is taken as soon as more is read than one answer:
    before the second `get` or `get_all`, and before the first `items`, `watch` or `hold`. It keeps the version from
    being discarded until the reader has moved on. Without one a version may go: `get` and `get_all` then answer from
    the version served by that time, and an iteration that has begun fails with VersionDiscardedError.

    A damaged or missing file is ManifestMismatchError, unless another version is served by then. With
    `on_damage="previous"` the reader goes back to the sealed version before, with a warning in the log and the error
    in `damaged`, and stays there until another version is served. An iteration that has begun fails all the same, and
    so does a reader of a fixed version.
    """

    def __init__(
        self,
        store: StoredVersions,
        *,
        version: str | None = None,
        cache: FileCache | None = None,
        lease: bool = True,
        on_damage: OnDamage = "fail",
        holder: str | None = None,
    ) -> None:
        """Open the version that is served now, or `version` (an id or name) for good.

        `holder` stands in the lease, for operators; the machine and process unless given. Raises
        DatasetNotFoundError, NoSealedVersionError, and DatasetError for a version that is not there or withdrawn.
        """
        self._store, self._cache = store, cache
        self._on_damage: OnDamage = on_damage
        self._damaged: dict[str, ManifestMismatchError] = {}
        self._avoided: str | None = None  # the version served, while an earlier one is read because of its damage
        self._answered = self._closed = False
        self._watch: Watch | None = None
        self._commit: Commit | None = None
        if version is None:
            self._commit, view = self._read_current()
        else:
            view = self._cached(store.version(version))
        self._fixed = None if version is None else view.version
        holder = holder or f"{socket.gethostname()}, process {os.getpid()}"
        self._holding = Holding(store.log.lake, store.name, view, leases=lease, holder=holder)

    def __repr__(self) -> str:
        held = self._holding.held
        return f"ServedDataset({self.name!r}, {held.view.version if held else None!r})"

    # -- what is served

    @property
    def name(self) -> str:
        """The dataset's name."""
        return self._store.name

    @property
    def version(self) -> str:
        """The id of the version that the next call reads."""
        return self._holding.require().view.version

    @property
    def schema(self) -> Schema:
        """The columns of its entries."""
        return self._holding.require().view.schema

    @property
    def rows(self) -> int | None:
        """The number of its entries; None where deltas have to be merged to know it."""
        return self._holding.require().view.rows

    @property
    def damaged(self) -> dict[str, ManifestMismatchError]:
        """The versions that turned out to be damaged while this reader used them, by id, with what was found."""
        return dict(self._damaged)

    # -- reading

    def get(self, key: object) -> Entry | None:
        """Return the entry of `key`, or None; a key of several columns is a tuple or a dict. See VersionReader.get."""
        return self._answer(lambda view: view.get(key))

    def get_all(self, keys: Iterable[K]) -> dict[K, Entry]:
        """Return the entries of those keys that have one, all of one version."""
        wanted = list(keys)
        return self._answer(lambda view: view.get_all(wanted))

    def items(self, prefix: object = None, *, start: object = None, end: object = None) -> Iterator[tuple[Any, Entry]]:
        """Yield (key, entry) in the order of keys, all of the version that is served when this is called.

        See VersionReader.items for prefixes and ranges. Only the row groups with such keys are read.
        """
        return _Items(self, lambda view: view.items(prefix, start=start, end=end))

    # -- moving on

    def refresh(self) -> bool:
        """Move on to the version that is served now; return whether it is another one. One request if nothing changed.

        Calls that run keep their version. Raises NoSealedVersionError when none is served any more (the last one was
        withdrawn); every call does from then on, until a refresh finds one. A reader of a fixed version never moves,
        and raises DatasetError once that was withdrawn or discarded.
        """
        with self._holding.moving:
            self._check_open()
            if self._holding.held is not None and self._commit is not None and not self._moved_since(self._commit):
                return False
            if self._fixed is not None:
                self._or_end(lambda: self._store.version(self._fixed or ""))
                return False
            for tried in range(_TRIES):
                commit, view = self._or_end(self._read_current)
                try:
                    moved = self._follow(view)
                except VersionDiscardedError:  # replaced and discarded before it could be leased
                    if tried + 1 == _TRIES:
                        raise
                else:
                    self._commit = commit
                    return moved
            raise AssertionError("unreachable")

    def watch(self, interval: float = 5.0) -> Watch:
        """Refresh every `interval` seconds in the background, until the watch is stopped or this is closed."""
        self.hold()
        with self._holding.moving:
            if self._watch is None or not self._watch.running:
                self._watch = Watch(self.name, self.refresh, interval)
            return self._watch

    def hold(self) -> None:
        """Take the lease now. Nothing is done where one is held, or with `lease=False`."""
        self._holding.leave(self._enter(leased=True))

    def close(self) -> None:
        """Stop watching; give the lease back once running iterations have ended. Other calls fail from now on."""
        if self._watch is not None:
            self._watch.stop()
        with self._holding.moving:
            self._closed = True
            self._holding.end(self._was_closed())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside: calls

    def _answer(self, read: Callable[[VersionReader], T]) -> T:
        """Return what `read` makes of the version served, begun again where another one takes its place."""
        while True:
            held = self._enter(leased=self._answered)
            try:
                answer = read(held.view)
                self._answered = True
                return answer
            except ManifestMismatchError as error:
                self._take_another(held, error)
            finally:
                self._holding.leave(held)

    def _enter(self, *, leased: bool) -> Held:
        while True:
            try:
                return self._holding.enter(leased=leased)
            except VersionDiscardedError:
                if self._fixed is not None or not self.refresh():
                    raise

    def _check_open(self) -> None:
        if self._closed:
            raise self._was_closed()

    def _was_closed(self) -> DatasetError:
        return DatasetError(
            f"the reader of dataset {self.name!r} is closed.", "Open the dataset again.", dataset=self.name
        )

    # -- inside: the version that is served

    def _read_current(self) -> tuple[Commit | None, VersionReader]:
        commit, manifest = self._store.read()
        if manifest is None:
            manifest = self._store.require_manifest()
        return commit, self._cached(self._store.view_of(manifest) or self._store.require_current())

    def _cached(self, view: VersionReader) -> VersionReader:
        return view if self._cache is None else VersionReader(view.store, view.dataset, view.sealed, self._cache)

    def _moved_since(self, commit: Commit) -> bool:
        """Whether CURRENT may be another than when it was read."""
        if redirect_of(commit) is not None:
            return True  # about to join a version set: the pointer that will count is not known yet
        pointer = f"{commit.manifest_key.rpartition('/manifests/')[0]}/CURRENT"
        found = self._store.log.lake.store.head(pointer)
        return found is None or found.etag != commit.etag

    def _or_end(self, read: Callable[[], T]) -> T:
        """Return what is read; a DatasetError means that there is nothing to serve, until a refresh finds something."""
        try:
            return read()
        except DatasetError as error:
            self._holding.end(error)
            raise

    def _follow(self, served: VersionReader) -> bool:
        """Move to the version that is served unless it is read already, or avoided; return whether it moved."""
        held = self._holding.held
        if held is not None and (served.version == held.view.version or self._stays_back(held, served)):
            return False
        self._holding.move_to(served)
        self._avoided = None
        return True

    # -- inside: damage

    def _stays_back(self, held: Held, served: VersionReader) -> bool:
        """Whether the version served is the one that was found damaged, and what is read instead may still be."""
        if served.version != self._avoided:
            return False
        ref = self._store.require_manifest().ref(held.view.version)
        return ref is not None and ref.state == "sealed"

    def _take_another(self, held: Held, error: ManifestMismatchError) -> None:
        """Move to a version that takes the place of this one, which has a missing or damaged file, or raise."""
        with self._holding.moving:
            if held is not self._holding.held:
                return  # another call has moved on already
            manifest, version = self._store.require_manifest(), held.view.version
            if self._fixed is not None:
                check_not_doomed(manifest, version)  # which says so, where that is why a file is missing
                raise error
            served = self._store.view_of(manifest)
            if manifest.ref(version) is None and served is not None and served.version != version:
                _log.info("dataset %s: %s was discarded, %s is read now", self.name, version, served.version)
                self._holding.move_to(self._cached(served))
                return
            self._damaged[version] = error
            other = self._replacement(manifest, version)
            if other is None:
                raise error
            _log.warning("dataset %s: %s is read instead of %s: %s", self.name, other.version, version, error)
            self._holding.move_to(self._cached(other))
            self._avoided = served.version if served is not None and served.version != other.version else None

    def _replacement(self, manifest: DatasetManifest, damaged: str) -> VersionReader | None:
        """Return what to read instead of a damaged version: what is served now, else the version before it."""
        served = self._store.view_of(manifest)
        if served is not None and served.version not in self._damaged:
            return served
        ref = manifest.ref(damaged) if self._on_damage == "previous" else None
        while ref is not None and ref.id in self._damaged:
            ref = previous(as_bounded(manifest), ref)
        return None if ref is None else self._store.version(ref.id)


class _Items(Iterator[tuple[Any, Entry]]):
    """An iteration over one version, which stays in use until the iteration ends or is dropped."""

    def __init__(self, served: ServedDataset, read: Callable[[VersionReader], Iterator[tuple[Any, Entry]]]) -> None:
        self._served, self._read = served, read
        self._begun = False
        self._held: Held | None = None
        self._open()

    def __next__(self) -> tuple[Any, Entry]:
        while self._held is not None:
            try:
                item = next(self._rows)
            except StopIteration:
                break
            except ManifestMismatchError as error:
                held = self._held
                self.close()
                if self._begun:
                    check_not_doomed(self._served._store.require_manifest(), held.view.version)
                    raise
                self._served._take_another(held, error)
                self._open()
            else:
                self._begun = True
                return item
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Leave the version."""
        held, self._held = self._held, None
        if held is not None:
            self._served._holding.leave(held)

    def __del__(self) -> None:
        self.close()

    def _open(self) -> None:
        self._held = self._served._enter(leased=True)
        try:
            self._rows = self._read(self._held.view)
        except AdjunctError:
            self.close()
            raise
