"""The log of a stream of files: which files were admitted, in which order.

    file-streams/SYSTEM/NAME/CURRENT, manifests/…   the commit log (`FileLogState`)
    file-streams/SYSTEM/NAME/pages/…                files that were admitted earlier

A file is admitted once, with the number of its records, which have the next offsets. What a read
returns for these offsets is therefore fixed, however often the folder is listed, and by whom.

The newest files are in the manifest itself (`tail`), older ones in pages of up to `PAGE` files, so
that a commit writes a bounded number of entries.
"""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple

from cachetools import LRUCache
from pydantic import Field

from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.objects.commit_log import (
    Commit,
    CommitLog,
    PageRef,
    decode_body,
    is_deletion_commit,
    read_page,
    write_page,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.streams.system import StreamDeclaration

KIND = "file-stream"
PREFIX = "file-streams"
PAGE = 10_000
_MOST_IN_TAIL = 1_000

# The files of pages that this process has read, by the digest of the page.
_pages: LRUCache[str, tuple[AdmittedFile, ...]] = LRUCache(maxsize=128)
Count = Annotated[int, Field(ge=0)]


class AdmittedFile(NamedTuple):
    """A file as it was admitted: its `rows` have the offsets from `first` on.

    `etag` changes with the contents, and `modified`, in microseconds since the epoch, is the time
    of its records. `values` are columns that the file does not contain, as texts: parts of its
    path, values of its partition. `origin` is what added it: a table's snapshot or version. A file
    with a `problem` was set aside: its records are not read. If that happened before it was
    admitted, it has no offsets. Files of one `form` are read alike, if their source knows some.
    """

    path: str
    size: Count
    etag: str
    modified: int
    rows: Count
    first: Count = 0
    values: dict[str, str | None] = {}  # noqa: RUF012 - never changed
    origin: str = ""
    problem: str = ""
    form: str = ""

    @property
    def modified_at(self) -> datetime:
        """The time of its records."""
        return datetime.fromtimestamp(self.modified / 1_000_000, UTC)

    @property
    def next(self) -> int:
        """The offset after its last record."""
        return self.first + self.rows


class FilePage(StoredDocument):
    """A page of files in the order of admission, with the offsets [first, next)."""

    key: str
    count: Count
    sha256: str
    first: Count
    next: Count
    latest: int


class FileLogState(StoredDocument):
    """What the current commit of a stream says.

    `cursor` is up to where the source has been looked at, in a form of the source's own.
    `set_aside` counts the files that were set aside, by the rule that did it.
    """

    format: Annotated[int, Field(ge=1, le=1)] = 1
    id: str
    declared: dict[str, Any]
    pages: tuple[FilePage, ...] = ()
    tail: tuple[AdmittedFile, ...] = ()
    oldest: Count = 0
    next: Count = 0
    cursor: str = ""
    set_aside: dict[str, Count] = Field(default_factory=dict)

    @classmethod
    def empty(cls, declaration: StreamDeclaration) -> FileLogState:
        """Return the state of a stream of which nothing was admitted."""
        return cls(id=uuid.uuid4().hex, declared=declaration.model_dump(mode="json"))

    def body(self) -> dict[str, Any]:
        """Return the body of a commit."""
        return self.model_dump(mode="json")


class FileLog:
    """The log of one stream of files."""

    def __init__(self, lake: Lake, system: str, stream: str) -> None:
        self.stream = f"{system}.{stream}"
        self.log: CommitLog = lake.commit_log(log_prefix(system, stream), KIND)

    def read(self) -> FileLogState | None:
        """Return the current state, None before the first commit or after a deletion."""
        return self.parse(self.log.current())

    def parse(self, commit: Commit | None) -> FileLogState | None:
        """Return the state in a commit."""
        if commit is None or is_deletion_commit(commit):
            return None
        return decode_body(
            FileLogState,
            commit.body,
            f"commit {commit.number} of the stream {self.stream}",
            "can't be read",
            "Restore the object from a backup or an older object version.",
        )

    def files(self, state: FileLogState) -> Iterator[AdmittedFile]:
        """Yield all files in the order of admission."""
        for page in state.pages:
            yield from _read_files(self.log.store, page)
        yield from state.tail

    def files_between(self, state: FileLogState, start: int, end: int) -> Iterator[AdmittedFile]:
        """Yield the files that have records at the offsets [start, end), in order."""
        for page in state.pages:
            if page.first < end and start < page.next:
                yield from _overlapping(_read_files(self.log.store, page), start, end)
        yield from _overlapping(state.tail, start, end)

    def known(self, state: FileLogState) -> dict[str, AdmittedFile]:
        """Return the last admission of each file, by path."""
        return {file.path: file for file in self.files(state)}

    def first_since(self, state: FileLogState, micros: int) -> int:
        """Return the offset of the first record, in offset order, at or after this time; the
        upcoming offset if there is none.
        """
        for page in state.pages:
            if page.latest < micros or page.next <= state.oldest:
                continue
            for file in _read_files(self.log.store, page):
                if file.modified >= micros and file.next > state.oldest:
                    return file.first
        for file in state.tail:
            if file.modified >= micros and file.rows:
                return file.first
        return state.next

    def add(self, state: FileLogState, files: Sequence[AdmittedFile], cursor: str) -> FileLogState:
        """Return the state with more files, which get the next offsets.

        Writes a page if there are many: nothing refers to it before the state is committed.
        """
        upcoming = state.next
        tail = list(state.tail)
        aside = Counter(state.set_aside)
        for file in files:
            tail.append(file._replace(first=upcoming))
            upcoming += file.rows
            if file.problem:
                aside[file.problem.partition(":")[0]] += 1
        update = {"tail": tuple(tail), "next": upcoming, "cursor": cursor, "set_aside": dict(aside)}
        return self._fold(state.model_copy(update=update))

    def void(self, state: FileLogState, path: str, etag: str, problem: str) -> FileLogState:
        """Return the state in which an admitted file is set aside: its offsets stay, without
        records.
        """

        def changed(file: AdmittedFile) -> AdmittedFile:
            if (file.path, file.etag) == (path, etag):
                return file._replace(problem=problem)
            return file

        pages = []
        for page in state.pages:
            files = _read_files(self.log.store, page)
            after = tuple(map(changed, files))
            pages.append(page if after == files else self._write(after))
        aside = Counter(state.set_aside)
        aside[problem.partition(":")[0]] += 1
        update = {
            "pages": tuple(pages),
            "tail": tuple(map(changed, state.tail)),
            "set_aside": dict(aside),
        }
        return state.model_copy(update=update)

    def _fold(self, state: FileLogState) -> FileLogState:
        """Return the state with its tail in pages, if that is long."""
        if len(state.tail) <= _MOST_IN_TAIL:
            return state
        pages = list(state.pages)
        files: list[AdmittedFile] = list(state.tail)
        if pages and pages[-1].count < PAGE:
            files = [*_read_files(self.log.store, pages.pop()), *files]
        pages += [self._write(files[at : at + PAGE]) for at in range(0, len(files), PAGE)]
        return state.model_copy(update={"pages": tuple(pages), "tail": ()})

    def _write(self, files: Sequence[AdmittedFile]) -> FilePage:
        ref = write_page(self.log.store, self.log.prefix, files)
        return FilePage(
            key=ref.key,
            count=ref.count,
            sha256=ref.sha256,
            first=files[0].first,
            next=files[-1].next,
            latest=max(file.modified for file in files),
        )


def log_prefix(system: str, stream: str) -> str:
    """Return the prefix of a stream's log in the lake."""
    return f"{PREFIX}/{system}/{stream}"


def list_logged(lake: Lake, system: str) -> list[str]:
    """Return the streams of a system whose files were admitted before."""
    prefix = f"{PREFIX}/{system}/"
    found = set()
    for item in lake.store.list(prefix):
        name, _, rest = item.key.removeprefix(prefix).partition("/")
        if rest == "CURRENT":
            found.add(name)
    return sorted(found)


def _read_files(store: ObjectStore, page: FilePage) -> tuple[AdmittedFile, ...]:
    """Return the files of a page."""
    files = _pages.get(page.sha256)
    if files is None:
        items = read_page(store, PageRef(page.key, page.count, page.sha256))
        files = tuple(AdmittedFile(*item) for item in items)
        _pages[page.sha256] = files
    return files


def _overlapping(files: Sequence[AdmittedFile], start: int, end: int) -> Iterator[AdmittedFile]:
    """Yield the files, which are in offset order, that have records at [start, end)."""
    at = bisect_right(files, start, key=lambda file: file.first)
    # Files without records have the offset of the next one.
    while at > 0 and files[at - 1].next > start:
        at -= 1
    for file in files[at:]:
        if file.first >= end:
            return
        if file.rows:
            yield file
