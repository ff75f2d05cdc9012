"""MetadataStore: namespaces of small entries in the lake, each one document that is committed whole.

    metadata/NAMESPACE/SCOPE/CURRENT, manifests/…   the commit log; a manifest lists the pages
    metadata/NAMESPACE/SCOPE/pages/…                entries in the order of their keys

Reading a key costs three requests, reading all of a namespace two and one a page; a change writes the pages that it
touches, a manifest and the pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.resources.metadata.namespace_document import DocumentPage, Entries, NamespaceDocument, changed
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.paging import PageRef, read_page, write_page

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.objects.object_store import ObjectStore

KIND = "metadata"
_ATTEMPTS = 100
_PAGES_KEPT = 256
_ROOT = "metadata/"
_MANIFESTS_KEPT = 100
_GRACE = timedelta(hours=1)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MetadataStore:
    """The metadata of a lake. Safe to use from threads and from many processes."""

    lake: Lake

    def namespace(self, name: str, scope: str) -> Namespace:
        """Return the entries kept under this name for one thing, such as an application."""
        return Namespace(self.lake, f"{_ROOT}{check_name('namespace', name)}/{check_name('scope', scope)}")

    def collect(self) -> int:
        """Delete what no namespace has reached for an hour; return how many objects that were.

        These are pages that later commits rewrote, and manifests before the newest few: a namespace keeps no history.
        A change that takes longer to commit may lose its pages.
        """
        before = self.lake.now() - _GRACE
        old: dict[str, list[str]] = {}
        for item in self.lake.store.list(_ROOT):
            prefix, kind, _ = item.key.rsplit("/", 2)
            if kind in ("pages", "manifests") and item.modified < before:
                old.setdefault(prefix, []).append(item.key)
        garbage = [key for prefix, keys in sorted(old.items()) for key in Namespace(self.lake, prefix).unreached(keys)]
        self.lake.store.delete_many(garbage)
        return len(garbage)


@dataclass(frozen=True, slots=True)
class NamespaceSnapshot:
    """A namespace as it was at one commit: `version` counts its commits from 1 and is 0 before the first.

    Its pages are read when they are needed. What it returns is shared: make new values, don't change these.
    """

    version: int
    document: NamespaceDocument
    _read: Callable[[DocumentPage], Entries]

    def get(self, key: str) -> Any:
        """Return the entry under this key, or None. Reads one page."""
        if not self.document.pages:
            return None
        return self._read(self.document.pages[self.document.page_of(key)]).get(key)

    def items(self, start: str = "") -> Iterator[tuple[str, Any]]:
        """Yield all entries in the order of their keys, from `start` on. Reads their pages, each when it is needed."""
        first = self.document.page_of(start)
        for page in self.document.pages[first:]:
            yield from ((key, value) for key, value in self._read(page).items() if key >= start)

    def __len__(self) -> int:
        return sum(page.count for page in self.document.pages)


class Namespace:
    """Entries of JSON values by key. A change is seen whole or not at all, and never loses another one."""

    def __init__(self, lake: Lake, prefix: str) -> None:
        self._store: ObjectStore = lake.store
        self._prefix = prefix
        self._log = lake.commit_log(prefix, KIND)
        self._cache = _Cache()

    def read(self) -> NamespaceSnapshot:
        """Return the namespace as it stands now."""
        return self._snapshot(self._log.current())

    def transact(self, decide: Callable[[NamespaceSnapshot], tuple[Mapping[str, Any], T]], *, by: str) -> T:
        """Commit the changes that `decide` makes of the namespace as it is, and return what else it decided.

        `decide(snapshot)` gives the new values by key (None removes the entry) and any result. After every conflict
        it decides again, from a new snapshot, so it must have no side effects. Where nothing changes there is no
        commit. Raises CommitConflictError, CommitStateUnknownError (it may have happened: the same call may be
        repeated if deciding twice does no harm) and StoreUnavailableError (it did not happen).
        """
        decided: list[T] = []

        def body(commit: Commit | None) -> dict[str, Any] | None:
            snapshot = self._snapshot(commit)
            changes, result = decide(snapshot)
            decided[:] = [result]
            after = changed(snapshot.document, changes, self._page, self._write)
            return None if after is None else after.model_dump(mode="json")

        self._log.transact(body, by=by, attempts=_ATTEMPTS)
        return decided[0]

    def continue_from(self, other: Namespace, *, by: str) -> None:
        """Begin with the entries of another namespace, which stays as it is; `version` goes on from its own.

        Where that has none, or this one was begun, nothing changes.
        """
        there, here = other.read(), self.read()
        if not there.version or here.version:
            return
        document = changed(NamespaceDocument(), dict(there.items()), self._page, self._write) or NamespaceDocument()
        self._log.continue_from(other._log, document.model_dump(mode="json"), by=by)

    def unreached(self, keys: Sequence[str]) -> list[str]:
        """Return those of these pages and manifests that the namespace does not need any more."""
        commit = self._log.current()
        if commit is None:
            return []
        pages = {page.key for page in self._snapshot(commit).document.pages}
        kept = self._log.manifest_key(max(commit.number - _MANIFESTS_KEPT, 0), "")[: -len(".json")]
        return [key for key in keys if (key not in pages if "/pages/" in key else key < kept)]

    def _snapshot(self, commit: Commit | None) -> NamespaceSnapshot:
        if commit is None:
            return NamespaceSnapshot(0, NamespaceDocument(), self._page)
        where = f"the namespace {commit.manifest_key!r} in {self._store.url}"
        return NamespaceSnapshot(commit.number, NamespaceDocument.parse(commit.body, where), self._page)

    def _page(self, page: DocumentPage) -> Entries:
        entries = self._cache.get(page.key)
        if entries is None:
            entries = dict(read_page(self._store, PageRef(page.key, page.count, page.sha256)))
            self._cache.put(page.key, entries)
        return entries

    def _write(self, entries: Sequence[tuple[str, Any]]) -> DocumentPage:
        ref = write_page(self._store, self._prefix, entries)
        self._cache.put(ref.key, dict(entries))
        return DocumentPage(first=entries[0][0], key=ref.key, count=ref.count, sha256=ref.sha256)


@dataclass(slots=True)
class _Cache:
    """The pages that were read or written last: a page never changes."""

    pages: dict[str, Entries] = field(default_factory=dict)

    def get(self, key: str) -> Entries | None:
        return self.pages.get(key)

    def put(self, key: str, entries: Entries) -> None:
        while len(self.pages) >= _PAGES_KEPT:
            self.pages.pop(next(iter(self.pages), key), None)
        self.pages[key] = entries
