"""The log of a stream of files: which files were admitted, in which order.

    file-streams/SYSTEM/NAME/CURRENT, manifests/…   the commit log (`FileLogState`)
    file-streams/SYSTEM/NAME/pages/…                files that were admitted earlier

A file is admitted once, with the number of its records, which have the next offsets. What a read
returns for these offsets is therefore fixed, however often the folder is listed, and by whom.

The newest files are in the manifest itself (`tail`), older ones in pages of up to `PAGE` files, so
that a commit writes a bounded number of entries.

Retention moves `oldest` forward over whole files. Their names stay in the log, so that they are not
admitted again, until the files themselves are gone.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from threading import Lock
from typing import Annotated, Any, NamedTuple

from cachetools import LRUCache, cached
from pydantic import Field

from dagster_adjunct.resources import errors
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
from dagster_adjunct.resources.objects.store import ObjectInfo, ObjectStore
from dagster_adjunct.resources.streams.declaration import StreamDeclaration
from dagster_adjunct.resources.times import to_microseconds
from dagster_adjunct.resources.validation import validated

KIND = "file-stream"
PREFIX = "file-streams"
PAGE = 10_000
_MOST_IN_TAIL = 1_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_CACHED_PAGES = 128
GRACE = timedelta(hours=1)
"""For how long a page stays after the log no longer refers to it, for those who read it."""
Count = Annotated[int, Field(ge=0)]


class FileContents(NamedTuple):
    """Which file this is, with which contents: its path, and the ETag that changes with them."""

    path: str
    etag: str


class AdmittedFile(NamedTuple):
    """A file as it was admitted: its `rows` have the offsets from `first` on.

    `etag` changes with the contents; files of a table, which never change, have none, or the id of
    the table. `modified`, in microseconds since the epoch, is the time of its records. `values` are
    columns that the file does not contain, as texts: parts of its path, values of its partition.
    `origin` is what added it: a table's snapshot or version. A file with a `problem`, such as
    "damaged: …", was set aside: its records are not read. If that happened before it was admitted,
    it has no offsets. `admitted` is the time of its admission, also in microseconds.
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
    admitted: int = 0

    @property
    def contents(self) -> FileContents:
        """The file and its contents, which identify an admission."""
        return FileContents(self.path, self.etag)

    @property
    def next(self) -> int:
        """The offset after its last record."""
        return self.first + self.rows

    @property
    def is_read(self) -> bool:
        """Whether reads return records of the file: it has some, and was not set aside."""
        return self.rows > 0 and not self.problem

    @property
    def modified_at(self) -> datetime:
        """The time of its records."""
        return _EPOCH + timedelta(microseconds=self.modified)

    @property
    def admitted_at(self) -> datetime:
        """The time of its admission."""
        return _EPOCH + timedelta(microseconds=self.admitted)


class LostFile(NamedTuple):
    """An admitted file that can't be read any more, and why."""

    file: AdmittedFile
    reason: str


class FilePage(StoredDocument):
    """A page of files in the order of admission, with the offsets [first, next).

    `latest` is the newest time when one of them was modified; `low` and `high` are the first and
    the last of their paths in alphabetical order.
    """

    key: str
    count: Count
    sha256: str
    first: Count
    next: Count
    latest: int
    low: str
    high: str


class ReplacedPage(StoredDocument):
    """A page that the log refers to no longer, since `at`, in microseconds since the epoch."""

    key: str
    at: int


class MovedFolder(StoredDocument):
    """A change of a stream's URL: who made it, why, and when, in microseconds since the epoch."""

    before: str
    after: str
    at: int
    by: str
    reason: str

    def describe(self) -> dict[str, Any]:
        """Return it with the time of the change."""
        return {**self.model_dump(), "at": _EPOCH + timedelta(microseconds=self.at)}


class FileLogState(StoredDocument):
    """What the current commit of a stream says.

    `looked` is whether a look has succeeded: until then, another declaration may replace this one.
    `cursor` is up to where the source has been looked at, in a form of the source's own.
    `set_aside` counts the files that were set aside, by the rule that did it. `replaced` are the
    pages that others may still read. `moved` lists how the URL was changed, the last time last.
    """

    format: Annotated[int, Field(ge=1, le=1)] = 1
    id: str
    declared: dict[str, Any]
    looked: bool = False
    pages: tuple[FilePage, ...] = ()
    tail: tuple[AdmittedFile, ...] = ()
    oldest: Count = 0
    next: Count = 0
    cursor: str = ""
    set_aside: dict[str, Count] = Field(default_factory=dict)
    replaced: tuple[ReplacedPage, ...] = ()
    moved: tuple[MovedFolder, ...] = ()

    def set_aside_since(self, before: FileLogState | None) -> dict[str, int]:
        """Return how many files were set aside since an earlier state, None before the first one,
        by the rule that did it.
        """
        earlier = {} if before is None else before.set_aside
        fresh = {}
        for rule, count in self.set_aside.items():
            more = count - earlier.get(rule, 0)
            if more > 0:
                fresh[rule] = more
        return fresh

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
        """Return the state in a commit; None before the first one, and after a deletion."""
        if commit is None or is_deletion_commit(commit):
            return None
        return decode_body(
            FileLogState,
            commit.body,
            f"commit {commit.number} of the stream {self.stream}",
            "can't be read",
            "Restore the object from a backup or an older object version.",
        )

    def transact(
        self, decide: Callable[[Commit | None], dict[str, Any] | None], *, by: str
    ) -> Commit | None:
        """Commit what `decide` returns, as `CommitLog.transact`.

        If `decide` reads a page that is gone, and the log has changed meanwhile, it is called
        again: the page was replaced, and deleted after `GRACE`, while this process had stopped.
        """
        while True:
            seen = self.log.current()
            try:
                return self.log.transact(decide, by=by, seen=seen)
            except errors.ObjectNotFoundError:
                if self.log.current() == seen:
                    raise

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

    def among(self, state: FileLogState, paths: Collection[str]) -> dict[str, AdmittedFile]:
        """Return the last admission of those of these files that were admitted, by path.

        Reads only the pages that may have one of them: few, where the names of files grow.
        """
        wanted = set(paths)
        in_order = sorted(wanted)
        found: dict[str, AdmittedFile] = {}
        for files in self._pages_with(state, in_order):
            found.update((file.path, file) for file in files if file.path in wanted)
        return found

    def admissions(self, state: FileLogState, path: str) -> list[AdmittedFile]:
        """Return all admissions of a file, in their order."""
        found: list[AdmittedFile] = []
        for files in self._pages_with(state, [path]):
            found += (file for file in files if file.path == path)
        return found

    def _pages_with(
        self, state: FileLogState, paths: Sequence[str]
    ) -> Iterator[tuple[AdmittedFile, ...]]:
        """Yield the files of each page that may have one of these paths, which are in order; the
        tail is the last page.
        """
        for page in state.pages:
            place = bisect_left(paths, page.low)
            is_within = place < len(paths) and paths[place] <= page.high
            if is_within:
                yield _read_files(self.log.store, page)
        yield state.tail

    def first_since(self, state: FileLogState, micros: int) -> int:
        """Return the offset of the first record, in offset order, at or after this time; the
        upcoming offset if there is none.
        """
        for page in state.pages:
            if page.latest >= micros and page.next > state.oldest:
                first = _first_since(_read_files(self.log.store, page), state.oldest, micros)
                if first is not None:
                    return first
        first = _first_since(state.tail, state.oldest, micros)
        if first is None:
            return state.next
        return first

    def add(self, state: FileLogState, files: Sequence[AdmittedFile], cursor: str) -> FileLogState:
        """Return the state with more files, which get the next offsets.

        Writes a page if there are many: nothing refers to it before the state is committed.
        """
        upcoming = state.next
        tail = list(state.tail)
        aside = Counter(state.set_aside)
        now = to_microseconds(self.log.now())
        for file in files:
            tail.append(file._replace(first=upcoming, admitted=now))
            upcoming += file.rows
            if file.problem:
                aside[rule_of(file.problem)] += 1
        update = {"tail": tuple(tail), "next": upcoming, "cursor": cursor, "set_aside": dict(aside)}
        return self._fold(state.model_copy(update=update))

    def void(self, state: FileLogState, problems: Mapping[FileContents, str]) -> FileLogState:
        """Return the state in which these admitted files are set aside, each for its problem. They
        keep their offsets, at which there are no records then. Files that were set aside before
        stay as they are.
        """
        aside = Counter(state.set_aside)
        after = self._change_files(
            state, problems, lambda files: _set_aside(files, problems, aside)
        )
        return after.model_copy(update={"set_aside": dict(aside)})

    def replace_etags(self, state: FileLogState, etags: Mapping[FileContents, str]) -> FileLogState:
        """Return the state in which these admitted files have other ETags."""

        def change(files: Sequence[AdmittedFile]) -> tuple[AdmittedFile, ...]:
            return tuple(file._replace(etag=etags.get(file.contents, file.etag)) for file in files)

        return self._change_files(state, etags, change)

    def _change_files(
        self,
        state: FileLogState,
        concerned: Collection[FileContents],
        change: Callable[[Sequence[AdmittedFile]], tuple[AdmittedFile, ...]],
    ) -> FileLogState:
        """Return the state after `change` of the files of each page that may have one of the
        `concerned` ones, and of the tail.
        """
        paths = sorted({contents.path for contents in concerned})
        pages = []
        for page in state.pages:
            place = bisect_left(paths, page.low)
            is_concerned = place < len(paths) and paths[place] <= page.high
            if not is_concerned:
                pages.append(page)
                continue
            files = _read_files(self.log.store, page)
            after = change(files)
            pages.append(page if after == files else self._write(after))
        return self._with_pages(state, pages, tail=change(state.tail))

    def retain(self, state: FileLogState, retention: FileRetention, now: datetime) -> FileLogState:
        """Return the state in which `oldest` is after the files that retention drops; the same
        state if it drops none.
        """
        listed = [*self.files_between(state, state.oldest, state.next)]
        dropped = 0
        if retention.max_age is not None:
            limit = to_microseconds(now - retention.max_age)
            for file in listed:
                if file.admitted > limit:
                    break
                dropped += 1
        if retention.max_files is not None:
            dropped = max(dropped, len(listed) - retention.max_files)
        if not dropped:
            return state
        return state.model_copy(update={"oldest": listed[dropped - 1].next})

    def forget(
        self, state: FileLogState, present: Callable[[], Collection[str] | None]
    ) -> FileLogState:
        """Return the state without the names of files that retention has dropped and that no longer
        exist; the same state if all names stay.

        `present` lists the files that exist, None if all names are to stay. It is called only if
        there is a page of dropped files. A page is rewritten once half of its names can go.
        """
        if not any(page.next <= state.oldest for page in state.pages):
            return state
        there = set(present() or ())
        if not there:
            # Perhaps the folder is not mounted: then all its files would be new afterwards.
            return state
        pages = []
        for page in state.pages:
            if page.next > state.oldest:
                pages.append(page)
                continue
            files = _read_files(self.log.store, page)
            existing = [file for file in files if file.path in there]
            if 2 * len(existing) > len(files):
                pages.append(page)
            elif existing:
                pages.append(self._write(existing))
        return self._with_pages(state, pages)

    def list_unreachable(self, state: FileLogState, now: datetime) -> list[ObjectInfo]:
        """Return the pages and the manifests that nobody needs any more. A page is listed if this
        state does not refer to it, and if it was replaced, or written and never used, more than
        an hour ago.
        """
        limit = now - GRACE
        needed = {page.key for page in state.pages}
        needed |= {page.key for page in state.replaced if page.at > to_microseconds(limit)}
        unreachable = []
        for item in self.log.store.list(f"{self.log.prefix}/pages/"):
            if item.key not in needed and item.modified < limit:
                unreachable.append(item)
        return unreachable + self.log.list_old_manifests(limit)

    def _fold(self, state: FileLogState) -> FileLogState:
        """Return the state with its tail in pages; the same state while the tail is short."""
        if len(state.tail) <= _MOST_IN_TAIL:
            return state
        pages = list(state.pages)
        files: list[AdmittedFile] = list(state.tail)
        if pages and pages[-1].count < PAGE:
            files = [*_read_files(self.log.store, pages.pop()), *files]
        pages += [self._write(files[at : at + PAGE]) for at in range(0, len(files), PAGE)]
        return self._with_pages(state, pages, tail=())

    def _with_pages(
        self, state: FileLogState, pages: Sequence[FilePage], **update: Any
    ) -> FileLogState:
        """Return the state with these pages, and other fields; it remembers for a while which pages
        it had before.
        """
        now = self.log.now()
        limit = to_microseconds(now - GRACE)
        keys = {page.key for page in pages}
        replaced = [page for page in state.replaced if page.at > limit]
        for page in state.pages:
            if page.key not in keys:
                replaced.append(ReplacedPage(key=page.key, at=to_microseconds(now)))
        return state.model_copy(
            update={"pages": tuple(pages), "replaced": tuple(replaced), **update}
        )

    def _write(self, files: Sequence[AdmittedFile]) -> FilePage:
        """Write files as a page; return the reference to it."""
        # By columns, which are parsed in half the time.
        columns = [*map(list, zip(*files, strict=True))]
        ref = write_page(self.log.store, self.log.prefix, columns)
        paths = [file.path for file in files]
        return FilePage(
            key=ref.key,
            count=len(files),
            sha256=ref.sha256,
            first=files[0].first,
            next=files[-1].next,
            latest=max(file.modified for file in files),
            low=min(paths),
            high=max(paths),
        )


@validated
class FileRetention(StoredDocument):
    """How long a stream keeps the records of its files: those of files that were admitted more than
    `max_age` ago are dropped, then those of the oldest files until `max_files` are left. None: no
    limit. The files themselves stay.
    """

    max_age: Annotated[timedelta, Field(gt=timedelta(0))] | None = None
    max_files: Annotated[int, Field(gt=0)] | None = None


@dataclass(frozen=True, slots=True)
class FileMaintenance:
    """The result of a maintenance: retention dropped `dropped_files` with `dropped_rows` records;
    `deleted_…` are old manifests and pages of the log that were deleted.
    """

    dropped_files: int = 0
    dropped_rows: int = 0
    deleted_objects: int = 0
    deleted_bytes: int = 0


def rule_of(problem: str) -> str:
    """Return the rule by which a file with this problem was set aside, such as "damaged"; "" if it
    has no problem.
    """
    return problem.partition(":")[0]


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


def _set_aside(
    files: Sequence[AdmittedFile], problems: Mapping[FileContents, str], aside: Counter[str]
) -> tuple[AdmittedFile, ...]:
    """Return the files, with its problem for each that is to be set aside and was not before; count
    these in `aside`, by rule.
    """
    after = []
    for file in files:
        problem = problems.get(file.contents)
        if problem is None or file.problem:
            after.append(file)
            continue
        aside[rule_of(problem)] += 1
        after.append(file._replace(problem=problem))
    return tuple(after)


def _page_key(store: ObjectStore, page: FilePage) -> tuple[str, str]:
    """Return what identifies a page in the cache; all stores have the same page under one key."""
    return page.key, page.sha256


@cached(LRUCache(maxsize=_CACHED_PAGES), key=_page_key, lock=Lock())
def _read_files(store: ObjectStore, page: FilePage) -> tuple[AdmittedFile, ...]:
    """Return the files of a page."""
    columns = read_page(store, PageRef(page.key, page.count, page.sha256))
    return tuple(map(AdmittedFile._make, zip(*columns, strict=True)))


def _first_since(files: Sequence[AdmittedFile], oldest: int, micros: int) -> int | None:
    """Return the offset of the first record at or after this time, None if there is none."""
    for file in files:
        is_kept = file.first >= oldest
        if is_kept and file.is_read and file.modified >= micros:
            return file.first
    return None


def _overlapping(files: Sequence[AdmittedFile], start: int, end: int) -> Iterator[AdmittedFile]:
    """Yield the files, which are in offset order, that have records at [start, end)."""
    place = bisect_right(files, start, key=lambda file: file.first)
    # Files without records have the offset of the next one.
    while place > 0 and files[place - 1].next > start:
        place -= 1
    for file in files[place:]:
        if file.first >= end:
            return
        if file.rows:
            yield file
