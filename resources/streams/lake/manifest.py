"""The manifest of a lake stream: its declaration, its index of segments, and what its producers
sent.

A segment is one append, or several compacted ones, with at most one file a partition. The newest
segments are in the manifest itself (`tail`), older ones in pages, pages of pages, and so on
(`levels`), each with a summary. Each level has fewer than 2 * FAN_OUT entries; a full one moves its
oldest FAN_OUT entries into a page of the level above. So a commit writes a bounded number of
entries, and a look-up reads one page a level.

The manifest also stores the source ranges that the records were made of (the coverage, `read`). A
range that was read again in a higher epoch replaces all results of lower epochs at its offsets,
even if it produced none. So ranges are stored, not only the positions of records.
"""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, cast

from pydantic import Field, model_validator

from dagster_adjunct.resources.bucketing.files import (
    BucketFile,
    BucketLayout,
    Generation,
    bucket_file_name,
)
from dagster_adjunct.resources.bucketing.writer import ROW
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.errors import MalformedDocumentError, StreamNotFoundError
from dagster_adjunct.resources.objects import commit_log
from dagster_adjunct.resources.objects.commit_log import Commit, CommitLog, PageRef
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.paths import Path, find_path
from dagster_adjunct.resources.schemas.schema import AS_NAMED, StoredNamesField
from dagster_adjunct.resources.streams.declaration import StoredSchema, StreamDeclaration
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    POSITION,
    TIMESTAMP,
    TOMBSTONE,
    SourceRange,
    Sources,
)
from dagster_adjunct.resources.validation import validated

Count = Annotated[int, Field(ge=0)]


class ReplayedRange(NamedTuple):
    """The offsets [start, end) of a source partition that were replayed, last in the epoch
    `epoch` (1 or higher).
    """

    start: Count
    end: Count
    epoch: Count


class Coverage(StoredDocument):
    """Which offsets of a source partition a reader has read: those before `until`, and which of
    them it has replayed.

    The `replayed` ranges are disjoint and in order.
    """

    until: Count = 0
    replayed: tuple[ReplayedRange, ...] = ()


ReadCoverage = Mapping[str, Mapping[str, Coverage]]
"""The coverage of the partitions that a stream's records were made of, by reader and source
partition.
"""


class SupersededRange(NamedTuple):
    """The results, in epochs below `epoch`, that a reader made of the offsets [start, end) of a
    source partition.
    """

    reader: str
    source: str
    start: int
    end: int
    epoch: int


def add_sources(read: ReadCoverage, sources: Sources | None) -> dict[str, dict[str, Coverage]]:
    """Return the coverage with the ranges that one more append was made of; without `sources`, the
    same. Ranges of epoch 0 were read for the first time, those of higher epochs were replayed.
    """
    after = {reader: dict(partitions) for reader, partitions in read.items()}
    if sources is None:
        return after
    by_source = after.setdefault(sources.reader, {})
    spans: dict[str, list[SourceRange]] = {}
    for span in sources.ranges:
        if span.start < span.end:
            spans.setdefault(span.source, []).append(span)
    for source, added in spans.items():
        before = by_source.get(source, Coverage())
        again = [ReplayedRange(one.start, one.end, one.epoch) for one in added if one.epoch]
        if again:
            replayed = _add_ranges((*before.replayed, *again))
        else:
            replayed = before.replayed
        until = max(before.until, *(span.end for span in added))
        by_source[source] = Coverage(until=until, replayed=replayed)
    return after


def list_superseded(read: ReadCoverage) -> list[SupersededRange]:
    """Return the ranges whose results in earlier epochs are replaced, by reader, source
    partition and offset.
    """
    superseded = []
    for reader, partitions in sorted(read.items()):
        for source, coverage in sorted(partitions.items()):
            superseded += [SupersededRange(reader, source, *span) for span in coverage.replayed]
    return superseded


def find_replaced_since(before: ReadCoverage, now: ReadCoverage) -> list[SupersededRange]:
    """Return the ranges that `before` contains and that were replayed since, up to the coverage
    `now`: those that have a higher epoch in `now`.
    """
    ranges = []
    for span in list_superseded(now):
        known = before.get(span.reader, {}).get(span.source, Coverage())
        for start, end, epoch in split_by_epoch(
            known.replayed, span.start, min(span.end, known.until)
        ):
            if span.epoch > epoch:
                ranges.append(span._replace(start=start, end=end))
    return ranges


def _add_ranges(ranges: Iterable[ReplayedRange]) -> tuple[ReplayedRange, ...]:
    """Return the offsets of all these ranges as disjoint ranges in order, each with the highest
    epoch.
    """
    edges = []
    for known in ranges:
        edges.append(_Edge(known.start, known.epoch, begins=True))
        edges.append(_Edge(known.end, known.epoch, begins=False))
    merged: list[ReplayedRange] = []
    open_epochs: list[int] = []  # of the ranges that have begun, and have not ended
    start = 0
    epoch = 0  # the highest one from `start` on
    for offset, at_offset in groupby(sorted(edges), key=attrgetter("offset")):
        continues = bool(merged) and merged[-1].end == start and merged[-1].epoch == epoch
        if continues:
            merged[-1] = merged[-1]._replace(end=offset)
        elif epoch:
            merged.append(ReplayedRange(start, offset, epoch))
        for edge in at_offset:
            if edge.begins:
                open_epochs.append(edge.epoch)
            else:
                open_epochs.remove(edge.epoch)
        start = offset
        epoch = max(open_epochs, default=0)
    return tuple(merged)


class _Edge(NamedTuple):
    """The offset at which a range of this epoch begins, or ends."""

    offset: int
    epoch: int
    begins: bool


def split_by_epoch(
    replayed: Sequence[ReplayedRange], start: int, end: int
) -> Iterator[ReplayedRange]:
    """Yield the range [start, end) in pieces of one epoch each, in order; the epoch is 0 where
    nothing was replayed.
    """
    at = start
    first = bisect_right(replayed, start, key=attrgetter("end"))  # the first that ends later
    for known in islice(replayed, first, None):
        if known.start >= end:
            break
        if at < known.start:
            yield ReplayedRange(at, known.start, 0)
        yield ReplayedRange(max(at, known.start), min(known.end, end), known.epoch)
        at = min(known.end, end)
    if at < end:
        yield ReplayedRange(at, end, 0)


STREAM_KIND = "stream"
OPTIONAL_META = {TIMESTAMP: "timestamp", TOMBSTONE: "boolean", EPOCH: "int", **POSITION}
"""The columns that a producer may add to the stream's own, with their Spark types."""
HIDDEN_COLUMNS = ((ROW, "bigint"), *OPTIONAL_META.items())
"""The columns of data files that are not the stream's own."""
KEY_COPY = "__key_"
"""The beginning of the names of hidden columns that copy values of the key: see
`LakeStreamDeclaration.copied`."""
_IN_ALL_FILES = (ROW, TIMESTAMP, TOMBSTONE)


@validated
class Retention(StoredDocument):
    """The retention of a stream, which drops whole segments: those appended more than `max_age` ago
    (whatever the timestamps of their records), then the oldest until at most `max_bytes` are left.
    None: no limit."""

    max_age: Annotated[timedelta, Field(gt=timedelta(0))] | None = None
    max_bytes: Annotated[int, Field(gt=0)] | None = None


@validated
class CompactionPolicy(StoredDocument):
    """The compaction of a stream: runs of at least `min_segments` neighbours, each smaller than
    half of `target_bytes`, are merged into one segment of about `target_bytes`."""

    min_segments: Annotated[int, Field(ge=2)] = 8
    target_bytes: Annotated[int, Field(gt=0)] = 128 * 1024 * 1024


class LakeStreamDeclaration(StreamDeclaration):
    """The declaration of a lake stream, as given to `create`, and the stored names of its
    columns. `find_by` are the keys by which maintenance indexes records (`key_index`).
    """

    timestamp: str | None = None
    retention: Retention | None = None
    compaction: CompactionPolicy | None = None
    find_by: tuple[tuple[str, ...], ...] | None = None
    names: StoredNamesField = AS_NAMED

    @property
    def copied(self) -> dict[str, Path]:
        """The values of the key that are inside columns, by the hidden column with a copy of each:
        Spark's buckets are by columns.
        """
        types = self.columns.types
        copies = {}
        for place, name in enumerate(self.key):
            path = find_path(name, types)
            if path is not None:  # else the name is that of a column
                copies[f"{KEY_COPY}{place}"] = path
        return copies

    @property
    def layout(self) -> BucketLayout:
        """The layout of the stream's files: Spark's buckets by key, rows in offset order."""
        copied = self.copied
        names = {str(path): copy for copy, path in copied.items()}
        return BucketLayout(
            self.columns,
            tuple(names.get(name, name) for name in self.key),
            self.partitions,
            hidden=(*HIDDEN_COLUMNS, *((copy, path.type) for copy, path in copied.items())),
            names=self.names,
        )

    def layout_of(self, columns: Iterable[str]) -> BucketLayout:
        """Return the layout of files with these columns: those of epochs and source positions
        are optional.
        """
        there = {*_IN_ALL_FILES, *self.copied, *columns}
        layout = self.layout
        hidden = tuple((name, kind) for name, kind in layout.hidden if name in there)
        return replace(layout, hidden=hidden)


class EarlierColumns(StoredDocument):
    """Columns that a stream had before, with their stored names."""

    columns: StoredSchema
    names: StoredNamesField = AS_NAMED


class FileEntry(NamedTuple):
    """A data file: its partition, size in bytes, and the range of its records' timestamps (us since
    the epoch).

    `untimed` is the number of records without a timestamp: these have the time of their append.
    `earliest` and `latest` are those of the others, None if there are none.
    """

    partition: Count
    rows: Count
    size: Count
    sha256: str
    earliest: int | None
    latest: int | None
    untimed: Count

    @classmethod
    def of(cls, file: BucketFile) -> FileEntry:
        """Return the entry of a file that was just written."""
        # There is no range if no record has a timestamp.
        low, high = file.stats.get("range") or (None, None)
        untimed = int(file.stats.get("range_nulls", 0))
        return cls(file.bucket, file.rows, file.size, file.sha256, low, high, untimed)


class MarkerEntry(NamedTuple):
    """An end-of-dataset marker at `offset`; `rows` is the number of its version's records in this
    partition.

    `counted` means that the stream counted them; otherwise the producer gave the number.

    `valid_from`, if given, is when the version becomes valid, in microseconds since the epoch.
    """

    partition: Count
    offset: Count
    version: str
    rows: Count | None
    checksum: str | None
    counted: bool
    valid_from: int | None


class Segment(StoredDocument):
    """The records and markers at the offsets [base, next) of each partition.

    A file's `__row` plus the partition's `base` is a record's offset. `appended` is the segment's
    commit time, in ms since the epoch; `attempt` is the folder of its files. `positioned` means
    that all its records have source positions, and `chained` that some were made of records that
    were themselves results of a replay.
    """

    id: Count
    attempt: str
    base: tuple[Count, ...]
    next: tuple[Count, ...]
    appended: Count
    files: tuple[FileEntry, ...] = ()
    markers: tuple[MarkerEntry, ...] = ()
    positioned: bool = False
    chained: bool = False

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def segments(self) -> int:
        """The number of segments, as that of a `Page`."""
        return 1

    @property
    def marked(self) -> int:
        """The number of markers."""
        return len(self.markers)

    def latest(self, partition: int) -> int | None:
        """Return the latest timestamp of the partition's records in us since the epoch, None
        without records. A record without a timestamp has the time of its append.
        """
        for file in self.files:
            if file.partition == partition:
                if file.latest is None:
                    return self.appended * 1000
                if file.untimed:
                    return max(file.latest, self.appended * 1000)
                return file.latest
        return None

    def folder(self, prefix: str) -> str:
        """Return the folder of the segment's files; `prefix` is that of the stream's objects."""
        return data_folder(prefix, self.attempt)

    def key_of(self, prefix: str, file: FileEntry) -> str:
        """Return the object key of a file; `prefix` is that of the stream's objects."""
        return f"{self.folder(prefix)}/{bucket_file_name(file.partition, self.attempt)}"

    def generation(self, number: int, prefix: str) -> Generation:
        """Return the segment as a generation of the bucketed table that Spark reads."""
        files = []
        for file in self.files:
            name = bucket_file_name(file.partition, self.attempt)
            files.append(BucketFile(file.partition, name, file.rows, file.size, file.sha256))
        return Generation(number, self.folder(prefix), tuple(files))


class Page(StoredDocument):
    """The summary of a stored page: its entries are segments (level 1), or pages of the level
    below.

    It has their number (`count`), totals over their segments, and `latest_us`, the latest record
    timestamp by partition. `marked` is the number of markers.
    """

    key: str
    sha256: str
    count: Count
    level: Annotated[int, Field(ge=1)]
    base: tuple[Count, ...]
    next: tuple[Count, ...]
    appended: Count
    segments: Count
    rows: Count
    size: Count
    marked: Count
    latest_us: tuple[int | None, ...]

    def latest(self, partition: int) -> int | None:
        return self.latest_us[partition]


IndexEntry = Segment | Page


class SentSequence(NamedTuple):
    """An append under one sequence of a producer: digest, offsets [first, next) by partition, and
    number of records.

    `columns` is the index of its columns (`StreamState.with_columns_at`). If the stream was
    repartitioned since, `partitions` is the number of partitions that the append was written to,
    and its offsets are no longer known.
    """

    sequence: Count
    digest: str
    first: tuple[int, ...]
    next: tuple[int, ...]
    rows: Count
    columns: Count
    partitions: Count = 0


class DroppedKey(NamedTuple):
    """An object or folder that was in the index until `at` (ms since the epoch), kept a while
    for its readers.
    """

    key: str
    at: Count


class RepartitionRecord(StoredDocument):
    """A repartitioning of the stream that had the identity `id`, at the time `at` (ms since the
    epoch).

    The old partitions held the offsets [oldest, ended). After the same records, the new ones
    continue at `next`.
    """

    id: str
    ended: tuple[Count, ...]
    next: tuple[Count, ...]
    at: Count
    reason: str
    oldest: tuple[Count, ...]


class SegmentIndex(StoredDocument):
    """The list of a stream's segments (see the module).

    `tail` has the newest segments, `levels` have pages of older ones, the lowest level first.
    `next_segment` is the id of the next segment. `dropped` are the keys of what left the index.
    """

    tail: tuple[Segment, ...] = ()
    levels: tuple[tuple[Page, ...], ...] = ()
    next_segment: Count = 0
    dropped: tuple[DroppedKey, ...] = ()

    def entries(self) -> list[IndexEntry]:
        """Return the entries in the manifest itself, oldest first."""
        return [*chain.from_iterable(reversed(self.levels)), *self.tail]


class StreamState(StoredDocument):
    """The body of a stream's manifest.

    `id` is the stream's identity: a recreated or repartitioned stream has another one. `earlier`
    are its columns before those of the declaration, oldest first; producers may still write with
    them. `rewritings` are all repartitionings, oldest first. `horizon` (ms since the epoch):
    attempts begun before it are lost unless they are in the index.
    `marked_until` is the offset after each partition's last marker, 0 without one. `read` is the
    coverage that the records were made of, by reader and source partition.
    """

    declaration: LakeStreamDeclaration
    id: str
    earlier: tuple[EarlierColumns, ...] = ()
    rewritings: tuple[RepartitionRecord, ...] = ()
    oldest: tuple[Count, ...]
    next: tuple[Count, ...]
    marked_until: tuple[Count, ...]
    index: SegmentIndex = SegmentIndex()
    producers: dict[str, tuple[SentSequence, ...]] = Field(default_factory=dict)
    appended: Count = 0
    horizon: Count = 0
    read: dict[str, dict[str, Coverage]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_offsets(self) -> StreamState:
        """Raise ValueError unless the entries follow each other without a gap, from `oldest` to
        `next`, in as many partitions as are declared.
        """
        n = self.declaration.partitions
        for name in ("oldest", "marked_until"):
            count = len(getattr(self, name))
            if count != n:
                raise ValueError(f"{name} has {count} partitions, expected {n}")
        at: tuple[int, ...] = self.oldest
        for entry in self.entries():
            if not len(entry.base) == len(entry.next) == n:
                raise ValueError(f"an entry has {len(entry.base)} partitions, expected {n}")
            if entry.base != at:
                raise ValueError(f"an entry begins at {list(entry.base)}, expected {list(at)}")
            at = entry.next
        if at != self.next:
            raise ValueError(
                f"its segments end at offsets {list(at)}, but its next offsets are"
                f" {list(self.next)}"
            )
        return self

    def with_columns_at(self, columns: int) -> LakeStreamDeclaration:
        """Return the declaration with the columns of this index: 0 is the oldest, `len(earlier)`
        the current ones.
        """
        if columns == len(self.earlier):
            return self.declaration
        before = self.earlier[columns]
        return self.declaration.model_copy(
            update={"columns": before.columns, "names": before.names}
        )

    @property
    def rewritten(self) -> RepartitionRecord | None:
        """The last repartitioning, None if there was none."""
        return self.rewritings[-1] if self.rewritings else None

    def with_index(self, **changes: Any) -> StreamState:
        """Return the state with these fields of its index changed."""
        return self.model_copy(update={"index": self.index.model_copy(update=changes)})

    def with_declaration(self, declaration: LakeStreamDeclaration) -> StreamState:
        """Return the state with another declaration; the replaced columns are added to
        `earlier`.
        """
        replaced = EarlierColumns(columns=self.declaration.columns, names=self.declaration.names)
        if (declaration.columns, declaration.names) != (replaced.columns, replaced.names):
            earlier = (*self.earlier, replaced)
        else:
            earlier = self.earlier
        return self.model_copy(update={"declaration": declaration, "earlier": earlier})

    def entries(self) -> list[IndexEntry]:
        """Return the entries in the manifest itself, oldest first."""
        return self.index.entries()

    @classmethod
    def empty(cls, declaration: LakeStreamDeclaration) -> StreamState:
        """Return the state of a new stream."""
        zeros = (0,) * declaration.partitions
        return cls(
            declaration=declaration,
            id=uuid.uuid4().hex,
            oldest=zeros,
            next=zeros,
            marked_until=zeros,
        )

    def body(self) -> dict[str, Any]:
        """Return the body of a commit."""
        return self.model_dump(mode="json")


def data_folder(prefix: str, attempt: str) -> str:
    """Return the folder of the files of an attempt to append, merge or repartition."""
    return f"{prefix}/data/{attempt}"


def new_attempt(started: int) -> str:
    """Return a name for an attempt begun at this time, in ms since the epoch."""
    return f"{started:013d}-{uuid.uuid4().hex[:12]}"


def find_attempt_start(attempt: str) -> int | None:
    """Return when an attempt began, in ms since the epoch; None if this is not the name of one."""
    started = attempt[:13]
    return int(started) if started.isdecimal() else None


_RESTORE = (
    "Restore this object from a backup or an older object version; the records themselves are"
    " untouched."
)
FAN_OUT = 32
_MAX_CACHED_PAGES = 128


class Span(NamedTuple):
    """The offsets, or rows, [start, end)."""

    start: int
    end: int


@dataclass(slots=True)
class StreamFiles:
    """Where one stream's files are stored; reads and writes its index pages, which never change
    and so are cached.
    """

    store: ObjectStore
    prefix: str
    _cache: dict[str, tuple[IndexEntry, ...]] = field(default_factory=dict)  # by keys of pages

    def read(self, page: Page) -> tuple[IndexEntry, ...]:
        """Return the page's entries. Raises MalformedDocumentError or ManifestMismatchError."""
        if page.key in self._cache:
            return self._cache[page.key]
        kind: type[Segment] | type[Page] = Segment if page.level == 1 else Page
        where = f"page {page.key!r} in {self.store.url}"
        items = commit_log.read_page(self.store, PageRef(page.key, page.count, page.sha256))
        entries = tuple(
            commit_log.decode_body(kind, item, where, "is malformed", _RESTORE) for item in items
        )
        while len(self._cache) >= _MAX_CACHED_PAGES:  # forget the oldest
            self._cache.pop(next(iter(self._cache)), None)
        self._cache[page.key] = entries
        return entries

    def write(self, level: int, entries: Sequence[IndexEntry]) -> Page:
        """Store consecutive index entries as a new page of this level; return its summary."""
        ref = commit_log.write_page(
            self.store, self.prefix, [entry.model_dump(mode="json") for entry in entries]
        )
        return Page(
            key=ref.key,
            sha256=ref.sha256,
            count=ref.count,
            level=level,
            base=entries[0].base,
            next=entries[-1].next,
            appended=entries[-1].appended,
            segments=sum(entry.segments for entry in entries),
            rows=sum(entry.rows for entry in entries),
            size=sum(entry.size for entry in entries),
            marked=sum(entry.marked for entry in entries),
            latest_us=tuple(_find_latest(entries, p) for p in range(len(entries[0].base))),
        )


def _find_latest(entries: Iterable[IndexEntry], partition: int) -> int | None:
    """Return the latest timestamp of the partition's records, None without records."""
    times = []
    for entry in entries:
        latest = entry.latest(partition)
        if latest is not None:
            times.append(latest)
    return max(times, default=None)


def walk_segments(
    state: StreamState, files: StreamFiles, wanted: Callable[[IndexEntry], bool]
) -> Iterator[Segment]:
    """Return the segments for which `wanted` is true, oldest first. Reads only the pages for which
    it is true.

    `wanted` must be true for a page if it is true for one of the page's entries.
    """
    return (entry for entry in _walk(state, files, wanted) if isinstance(entry, Segment))


def list_overlapping(
    state: StreamState, files: StreamFiles, spans: Mapping[int, Span]
) -> list[Segment]:
    """Return the segments with an offset of one of these spans, oldest first."""
    return list(walk_segments(state, files, lambda entry: overlaps_spans(entry, spans)))


def _walk(
    state: StreamState,
    files: StreamFiles,
    wanted: Callable[[IndexEntry], bool] = lambda _: True,
    lowest: int = 0,
) -> Iterator[IndexEntry]:
    """Yield the wanted index entries, each page before its own entries. Reads only pages of
    levels above `lowest`.
    """
    waiting: list[IndexEntry] = list(reversed(state.entries()))
    while waiting:
        entry = waiting.pop()
        if wanted(entry):
            yield entry
            if isinstance(entry, Page) and entry.level > lowest:
                waiting.extend(reversed(files.read(entry)))


def list_segments(state: StreamState, files: StreamFiles) -> list[Segment]:
    """Return all segments, oldest first. Reads all pages."""
    return [entry for entry in _walk(state, files) if isinstance(entry, Segment)]


def overlaps_spans(entry: IndexEntry, spans: Mapping[int, Span]) -> bool:
    """Return whether the entry contains an offset of one of these spans, which are [start, end)
    by partition.
    """
    for p, (start, end) in spans.items():
        if max(start, entry.base[p]) < min(end, entry.next[p]):
            return True
    return False


def may_have_records_in(segment: Segment, spans: Mapping[int, Span]) -> bool:
    """Return whether one of the segment's files may contain a record of these spans.

    A segment that overlaps them (`overlaps_spans`) may have only markers there, and no file.
    """
    filled = {file.partition for file in segment.files}
    return overlaps_spans(segment, {p: span for p, span in spans.items() if p in filled})


def find_markers(
    state: StreamState, files: StreamFiles, spans: Mapping[int, Span]
) -> list[MarkerEntry]:
    """Return the markers in these spans, oldest first."""

    def may_have_some(entry: IndexEntry) -> bool:
        return entry.marked > 0 and overlaps_spans(entry, spans)

    found = []
    for segment in walk_segments(state, files, may_have_some):
        for marker in segment.markers:
            span = spans.get(marker.partition)
            if span is not None and span.start <= marker.offset < span.end:
                found.append(marker)
    return found


@dataclass(frozen=True, slots=True)
class Fold:
    """A page written at `made` (ms since the epoch), to replace its `entries`, the oldest of the
    level below.
    """

    page: Page
    entries: tuple[IndexEntry, ...]
    made: int


class FullLevel(NamedTuple):
    """The level and the entries of an index page that is to be written."""

    level: int
    entries: tuple[IndexEntry, ...]


def find_full_level(state: StreamState) -> FullLevel | None:
    """Return the next index page to write, or None if no level is full."""
    by_level: list[Sequence[IndexEntry]] = [state.index.tail, *state.index.levels]
    for level, entries in enumerate(by_level, start=1):
        if len(entries) >= 2 * FAN_OUT:
            return FullLevel(level, tuple(entries[:FAN_OUT]))
    return None


def apply_fold(state: StreamState, fold: Fold | None) -> StreamState:
    """Return the state with the fold's entries replaced by its page; unchanged without a fold, or
    if another writer has replaced its entries.

    A page older than the horizon is not used, since it may have been deleted before a manifest
    referred to it.
    """
    if fold is None or fold.made < state.horizon:
        return state
    level = fold.page.level
    count = len(fold.entries)
    # The tail is level 0; the last, empty one is for the first page of a new level.
    by_level: list[tuple[IndexEntry, ...]] = [state.index.tail, *state.index.levels, ()]
    if level >= len(by_level):  # maintenance has left fewer levels
        return state
    below = by_level[level - 1]
    if below[:count] != fold.entries:
        return state
    by_level[level - 1] = below[count:]
    by_level[level] = (*by_level[level], fold.page)
    while not by_level[-1] and len(by_level) > 1:  # the level that was not needed
        by_level.pop()
    return state.with_index(tail=by_level[0], levels=tuple(by_level[1:]))


class Leaf(NamedTuple):
    """A page of level 1 with its segments, or a segment of the tail with itself."""

    entry: IndexEntry
    segments: tuple[Segment, ...]


def list_leaves(state: StreamState, files: StreamFiles) -> list[Leaf]:
    """Return the pages of level 1, then the tail's segments; oldest first."""
    leaves = []
    for entry in _walk(state, files, lowest=1):
        if isinstance(entry, Segment):
            leaves.append(Leaf(entry, (entry,)))
        elif entry.level == 1:
            leaves.append(Leaf(entry, cast("tuple[Segment, ...]", files.read(entry))))
    return leaves


def list_page_keys(state: StreamState, files: StreamFiles) -> set[str]:
    """Return the keys of all pages in the index."""
    return {entry.key for entry in _walk(state, files, lowest=1) if isinstance(entry, Page)}


def rebuild_index(
    state: StreamState, kept: Sequence[IndexEntry], files: StreamFiles
) -> StreamState:
    """Return the state with an index of exactly the `kept` entries: segments and pages of level 1,
    oldest first.

    Writes the pages that the new index needs. The given pages are used as they are; segments
    between them get new ones.
    """
    tail: list[IndexEntry] = []
    level: list[IndexEntry] = []
    for entry in kept:
        if isinstance(entry, Segment):
            tail.append(entry)
            continue
        while tail:  # segments before a kept page get pages, so that all stay in order
            level.append(files.write(1, tail[:FAN_OUT]))
            del tail[:FAN_OUT]
        level.append(entry)
    while len(tail) >= 2 * FAN_OUT:
        level.append(files.write(1, tail[:FAN_OUT]))
        del tail[:FAN_OUT]
    levels: list[tuple[IndexEntry, ...]] = []
    # A level that is full moves its oldest entries into pages of the one above.
    while level:
        above: list[IndexEntry] = []
        while len(level) >= 2 * FAN_OUT:
            above.append(files.write(len(levels) + 2, level[:FAN_OUT]))
            del level[:FAN_OUT]
        levels.append(tuple(level))
        level = above
    if kept:
        oldest = kept[0].base
    else:
        oldest = state.next
    after = state.with_index(tail=tuple(tail), levels=tuple(levels))
    return after.model_copy(update={"oldest": oldest})


NAMES_PREFIX = "streams/_names"


class CommittedState(NamedTuple):
    """A commit of a stream, and the state in it."""

    commit: Commit
    state: StreamState


class StreamStates:
    """Reads the states of a lake's streams. Safe to use from several threads and processes."""

    name = "lake"

    @validated
    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self._pages: dict[str, StreamFiles] = {}
        self._snapshot: dict[str, CommittedState] | None = None
        # Streams to which others append at the same time; views share it.
        self._contended: set[str] = set()

    def list_streams(self) -> list[str]:
        names = [item.key.rsplit("/", 1)[-1] for item in self.lake.store.list(f"{NAMES_PREFIX}/")]
        return sorted(name for name in names if self._exists(name))

    def log(self, stream: str) -> CommitLog:
        """Return the stream's commit log (internal)."""
        return self.lake.commit_log(self.lake.stream_prefix(stream), STREAM_KIND)

    def state(self, stream: str) -> CommittedState:
        """Return the stream's current commit and the state in it (internal). Raises
        StreamNotFoundError.
        """
        if self._snapshot is not None and stream in self._snapshot:
            return self._snapshot[stream]
        commit = self._require_commit(stream, self.log(stream).current())
        current = CommittedState(commit, self._parse(commit))
        if self._snapshot is not None:
            self._snapshot[stream] = current
        return current

    def _exists(self, stream: str) -> bool:
        """Return whether a stream whose name is stored was created, and not deleted since."""
        try:
            commit = self.log(stream).current()
        except MalformedDocumentError:
            return True  # whoever reads the stream gets the error
        return commit is not None and not commit_log.is_deletion_commit(commit)

    def _require_commit(self, stream: str, commit: Commit | None) -> Commit:
        """Return the commit. Raises StreamNotFoundError if there is none, or it deletes the
        stream.
        """
        if commit is None or commit_log.is_deletion_commit(commit):
            there = ", ".join(self.list_streams()) or "none"
            problem = f"there is no stream {stream!r} in {self.lake.url}. Streams: {there}."
            step = (
                "Check the name and the lake, or create the stream first:"
                f" streams.create({stream!r}, schema=…, partitions=…)."
            )
            raise StreamNotFoundError(problem, step, stream=f"lake.{stream}")
        return commit

    def _parse(self, commit: Commit) -> StreamState:
        where = f"the stream index {commit.manifest_key!r} in {self.lake.url}"
        return commit_log.decode_body(StreamState, commit.body, where, "is malformed", _RESTORE)

    def files_of(self, stream: str) -> StreamFiles:
        """Return the stored files and pages of the stream (internal)."""
        return self._pages.setdefault(
            stream, StreamFiles(self.lake.store, self.lake.stream_prefix(stream))
        )

    def now_ms(self) -> int:
        """Return the lake's time in ms since the epoch (internal)."""
        return int(self.lake.now().timestamp() * 1000)
