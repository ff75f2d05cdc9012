"""MetadataStore: namespaces of small entries in the lake, each one document that is committed
whole.

    metadata/NAMESPACE/SCOPE/CURRENT, manifests/…   the commit log; a manifest lists the pages
    metadata/NAMESPACE/SCOPE/pages/…                entries in the order of their keys

Reading a key takes three requests; reading a whole namespace takes two, and one for each page. A
change writes the pages that hold its keys, a manifest and the pointer.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

from pydantic import Field

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects import commit_log
from dagster_adjunct.resources.objects.commit_log import FORMAT, Commit, PageRef
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import ObjectStore, StoredObject
from dagster_adjunct.resources.validation import validated_methods

# The document of a namespace: pages of entries in the order of their keys, and how changes rewrite
# them.
#
# A change rewrites the pages that hold its keys and repeats the references to all others, so its
# cost depends on these pages only. Pages are sized in bytes; one that becomes small is merged with
# the next one.


PAGE_BYTES = 256 * 1024

Entries = Mapping[str, Any]


class DocumentPage(StoredDocument):
    """Where one page is, the SHA-256 of its bytes, and its smallest key."""

    first: str
    key: str
    count: int = Field(ge=1)
    sha256: str


class NamespaceDocument(StoredDocument):
    """The pages of a namespace, in the order of their keys."""

    format: Literal[1] = 1
    pages: tuple[DocumentPage, ...] = ()

    def page_of(self, key: str) -> int:
        """Return the index of the page for this key."""
        return max(0, bisect_right(self.pages, key, key=lambda page: page.first) - 1)


def rewrite_pages(
    document: NamespaceDocument,
    changes: Mapping[str, Any],
    read: Callable[[DocumentPage], Entries],
    write: Callable[[Sequence[tuple[str, Any]]], DocumentPage],
) -> NamespaceDocument | None:
    """Return the document with these entries set (None removes one), or None if nothing changes.

    `read` returns the entries of a page, `write` stores (key, value) pairs as a new page. A
    document without pages counts as one page without entries.
    """
    by_page: dict[int, dict[str, Any]] = {}  # by the number of the page, the changes in it
    for key, value in changes.items():
        by_page.setdefault(document.page_of(key), {})[key] = value
    touched: dict[int, Entries] = {}
    for number, wanted in by_page.items():
        before: Entries = {}
        if document.pages:
            before = read(document.pages[number])
        after = {key: value for key, value in {**before, **wanted}.items() if value is not None}
        if after != before:
            touched[number] = after
    if not touched:
        return None
    pages: list[DocumentPage] = []
    for run in _pages_and_runs(document, touched, read):
        if isinstance(run, DocumentPage):
            pages.append(run)
        else:
            pages += map(write, _parts(run))
    return NamespaceDocument(pages=tuple(pages))


def _pages_and_runs(
    document: NamespaceDocument,
    touched: Mapping[int, Entries],
    read: Callable[[DocumentPage], Entries],
) -> Iterator[DocumentPage | list[tuple[str, Any]]]:
    """Yield, in key order, pages that stay as they are, and runs: the entries of adjacent pages,
    to be written again.

    `touched` has the new entries of changed pages, by the number of the page. A run takes in the
    next page, too, while it is too small for a page of its own. Nothing is yielded for a run
    without entries.
    """
    number = 0
    count = max(1, len(document.pages))  # a document without pages counts as one page
    while number < count:
        if number not in touched:
            yield document.pages[number]
            number += 1
            continue
        run: list[tuple[str, Any]] = []
        size = 0
        # Take in pages that change and, while the run is too small, those behind it.
        while number < count and (number in touched or size < PAGE_BYTES // 4):
            entries = touched[number] if number in touched else read(document.pages[number])
            added = sorted(entries.items())
            run += added
            size += sum(map(_size, added))
            number += 1
        if run:
            yield run


def _parts(run: Sequence[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    """Split the entries into as few pages as they need, of about one size, and yield the entries
    of each.

    Page number n ends with the entry that reaches n times the `target` size, counted from the
    beginning. A large entry may reach several multiples.
    """
    sizes = [_size(entry) for entry in run]
    total = sum(sizes)
    target = total / math.ceil(total / PAGE_BYTES)
    part: list[tuple[str, Any]] = []
    passed = 0
    multiple = 1
    for entry, size in zip(run, sizes, strict=True):
        part.append(entry)
        passed += size
        if passed >= target * multiple:
            yield part
            part = []
            multiple = math.floor(passed / target) + 1
    if part:
        yield part


def _size(entry: tuple[str, Any]) -> int:
    """Return how many bytes a (key, value) pair takes in a page. Raises ConfigurationError for a
    value that JSON can't hold.
    """
    try:
        text = json.dumps(entry, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return len(text.encode()) + 1  # for the comma behind it
    except (TypeError, ValueError) as error:
        problem = f"the entry {entry[0]!r} can't be written as JSON: {error}."
        step = "Use strings, numbers, booleans, lists and dictionaries only."
        raise errors.ConfigurationError(problem, step, key=entry[0]) from error


KIND = "metadata"
_ATTEMPTS = 100
_PAGES_KEPT = 256
_ROOT = "metadata/"
_MANIFESTS_KEPT = 100
_GRACE = timedelta(hours=1)

T = TypeVar("T")


@validated_methods
@dataclass(frozen=True, slots=True)
class MetadataStore:
    """The metadata of a lake. Safe to use from threads and from many processes."""

    lake: Lake

    def namespace(self, name: str, scope: str) -> Namespace:
        """Return the namespace `name` of one scope, such as an application. Sends no request."""
        return Namespace(
            self.lake, f"{_ROOT}{check_name('namespace', name)}/{check_name('scope', scope)}"
        )

    def collect(self) -> int:
        """Delete objects that are more than an hour old and that no namespace uses any more; return
        their number.

        These are pages that later commits have replaced, and all manifests but the newest hundred:
        a namespace keeps no history. A change whose commit takes more than an hour may lose its
        pages.
        """
        before = self.lake.now() - _GRACE
        old: dict[str, list[str]] = {}  # by the prefix of a namespace, keys of its objects
        for item in self.lake.store.list(_ROOT):
            prefix, kind, _ = item.key.rsplit("/", 2)
            if kind in ("pages", "manifests") and item.modified < before:
                old.setdefault(prefix, []).append(item.key)
        garbage: list[str] = []
        for prefix, keys in sorted(old.items()):
            garbage += Namespace(self.lake, prefix).unreached(keys)
        self.lake.store.delete_many(garbage)
        return len(garbage)


@dataclass(frozen=True, slots=True)
class NamespaceSnapshot:
    """A namespace as it was at one commit: `version` counts its commits from 1 and is 0 before the
    first.

    Pages are read on demand. Returned values are shared and must not be changed.
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
        """Yield the entries in the order of their keys, from the key `start` on. Reads their pages,
        each when it is needed.
        """
        first = self.document.page_of(start)
        for page in self.document.pages[first:]:
            yield from ((key, value) for key, value in self._read(page).items() if key >= start)

    def __len__(self) -> int:
        return sum(page.count for page in self.document.pages)


class Namespace:
    """JSON values by key. Readers see all of a change or nothing of it, and concurrent changes
    are never lost.
    """

    def __init__(self, lake: Lake, prefix: str) -> None:
        self._store: ObjectStore = lake.store
        self._prefix = prefix
        self._log = lake.commit_log(prefix, KIND)
        self._pages: dict[str, Entries] = {}  # a cache by object key: pages never change

    def etag(self) -> str | None:
        """Return a text that changes with each commit; None before the first. One request."""
        return self._log.pointer_etag()

    def read(self) -> NamespaceSnapshot:
        """Return the current state of the namespace."""
        return self._snapshot(self._log.current())

    def transact(
        self, decide: Callable[[NamespaceSnapshot], tuple[Mapping[str, Any], T]], *, by: str
    ) -> T:
        """Commit the changes that `decide` returns for the current namespace, and return its
        result.

        `decide(snapshot)` returns new values by key (None removes the entry) and any result. It is
        called again after every conflict, with a new snapshot, so it must have no side effects.
        Without changes there is no commit. Raises CommitConflictError, CommitStateUnknownError (the
        commit may have happened: the call may be repeated if deciding twice is harmless) and
        StoreUnavailableError (it did not happen).
        """
        results: list[T] = []

        def body(commit: Commit | None) -> dict[str, Any] | None:
            snapshot = self._snapshot(commit)
            changes, result = decide(snapshot)
            results.append(result)
            after = rewrite_pages(snapshot.document, changes, self._page, self._write)
            if after is None:
                return None
            return after.model_dump(mode="json")

        self._log.transact(body, by=by, attempts=_ATTEMPTS)
        return results[-1]  # of the last try

    def continue_from(self, other: Namespace, *, by: str) -> None:
        """Start with the entries and the `version` of another namespace, which stays as it is.

        Nothing changes if the other one is empty or this one is not.
        """
        there = other.read()
        here = self.read()
        if not there.version or here.version:
            return
        entries = dict(there.items())
        document = rewrite_pages(NamespaceDocument(), entries, self._page, self._write)
        if document is None:  # all entries were removed again
            document = NamespaceDocument()
        self._log.continue_from(other._log, document.model_dump(mode="json"), by=by)

    def unreached(self, keys: Sequence[str]) -> list[str]:
        """Return those of these object keys, of pages and manifests, that the namespace no
        longer needs; none of them before its first commit.
        """
        commit = self._log.current()
        if commit is None:
            return []
        pages = {page.key for page in self._snapshot(commit).document.pages}
        # with the prefix, as the scope itself may be named "pages"
        folder_of_pages = f"{self._prefix}/pages/"
        oldest_kept = self._log.manifest_key(max(commit.number - _MANIFESTS_KEPT, 0), "")
        # keys of manifests sort by number; without the suffix, this one precedes all of its number
        oldest_kept = oldest_kept.removesuffix(".json")

        def is_needed(key: str) -> bool:
            if key.startswith(folder_of_pages):
                return key in pages
            return key >= oldest_kept

        return [key for key in keys if not is_needed(key)]

    def _snapshot(self, commit: Commit | None) -> NamespaceSnapshot:
        """Return the namespace as of a commit; None is before the first."""
        if commit is None:
            return NamespaceSnapshot(0, NamespaceDocument(), self._page)
        where = f"the namespace {commit.manifest_key!r} in {self._store.url}"
        step = "Restore that object from a backup or an older object version."
        document = commit_log.decode_body(
            NamespaceDocument, commit.body, where, f"is not a namespace of format {FORMAT}", step
        )
        return NamespaceSnapshot(commit.number, document, self._page)

    def _page(self, page: DocumentPage) -> Entries:
        """Return the entries of a page, from the cache if it was read before."""
        entries = self._pages.get(page.key)
        if entries is None:
            entries = self._keep(
                page.key,
                commit_log.read_page(self._store, PageRef(page.key, page.count, page.sha256)),
            )
        return entries

    def _write(self, entries: Sequence[tuple[str, Any]]) -> DocumentPage:
        """Store these (key, value) pairs as a new page."""
        ref = commit_log.write_page(self._store, self._prefix, entries)
        self._keep(ref.key, entries)
        first, _ = entries[0]
        return DocumentPage(first=first, key=ref.key, count=ref.count, sha256=ref.sha256)

    def _keep(self, key: str, entries: Sequence[Any]) -> Entries:
        """Cache the entries of a page and return them. The pages cached first make room."""
        while len(self._pages) >= _PAGES_KEPT:
            # defaults, as other threads may empty the cache at the same time
            self._pages.pop(next(iter(self._pages), key), None)
        kept = self._pages[key] = dict(entries)
        return kept


# `SharedValue`: one small value that processes change by compare-and-swap, without a history.
#
#     metadata/NAMESPACE/SCOPE/NAME.json      the value, with a nonce in each version
#
# For values that change several times a second and are soon obsolete: a change without a conflict
# costs one request, and leaves nothing to collect.


_VALUE_ATTEMPTS = 20


class SharedValue:
    """One value of a lake's metadata. For one thread at a time; any number of processes."""

    def __init__(self, lake: Lake, namespace: str, scope: str, name: str) -> None:
        checked = (
            check_name("namespace", namespace),
            check_name("scope", scope),
            check_name("value", name),
        )
        self._store = lake.store
        self._key = f"metadata/{'/'.join(checked)}.json"
        self._seen: StoredObject | None = None  # None: to be read first

    def forget(self) -> None:
        """Drop the cached value, so that the next `transact` reads it again.

        Call this when another process has probably changed it.
        """
        self._seen = None

    def transact(self, decide: Callable[[bytes | None], tuple[bytes | None, T]]) -> T:
        """Write the value that `decide` returns for the current one (None writes nothing), and
        return its result.

        `decide` gets None if there is no value yet. It is called again after every conflict, so it
        must have no side effects. No two values that it returns may be equal: put a nonce into
        each. Raises StoreUnavailableError if the write may have happened, and CommitConflictError
        after many conflicts.
        """

        def decided() -> Callable[[], T]:
            """Decide for the current value; return a function that writes what was decided."""
            if self._seen is None:
                with suppress(errors.ObjectNotFoundError):
                    self._seen = self._store.get(self._key)
            seen = self._seen
            value, result = decide(None if seen is None else seen.data)

            def commit() -> T:
                if value is not None:
                    self._write(value, seen)
                return result

            return commit

        return commit_log.retry_conflicts(decided, attempts=_VALUE_ATTEMPTS)

    def _write(self, value: bytes, seen: StoredObject | None) -> None:
        """Replace the value `seen` (None: create it). Raises CommitConflictError if it has changed
        since.
        """
        self._seen = None  # read it again, unless this write succeeds
        try:
            before = None if seen is None else seen.etag
            etag = commit_log.put_after(self._store, self._key, value, before)
        except (errors.ObjectExistsError, errors.PreconditionFailedError) as error:
            problem = f"{self._key} in {self._store.url} was changed by another process."
            raise errors.CommitConflictError(
                problem, "It is read and decided again.", prefix=self._key
            ) from error
        self._seen = StoredObject(value, etag)
