"""The manifest of a lake stream: its declaration, its index of segments, and what its producers sent.

A segment is one append (or several, compacted): at most one file a partition. The newest segments stand in
the manifest itself (`tail`); older ones in pages, pages of pages, and so on (`levels`), each with a summary,
so that neither a commit nor a look-up gets dearer by much as the stream grows.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import (
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from dagster_adjunct.resources.bucketing.bucket_files import (
    BucketFile,
    BucketLayout,
    Generation,
    bucket_file_name,
)
from dagster_adjunct.resources.errors import MalformedDocumentError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.stored_documents import StoredDocument, first_problem
from dagster_adjunct.resources.streams.interface.declared_stream import StreamDeclaration, stored_schema
from dagster_adjunct.resources.streams.interface.stream_system import (
    EPOCH,
    READER,
    SOURCE,
    SOURCE_EPOCH,
    SOURCE_OFFSET,
    TIMESTAMP,
    TOMBSTONE,
)
from dagster_adjunct.resources.streams.lake.source_coverage import Coverage

KIND = "stream"
ROW = "__row"
HIDDEN = (
    (ROW, "bigint"),
    (TIMESTAMP, "timestamp"),
    (TOMBSTONE, "boolean"),
    (EPOCH, "int"),
    (SOURCE, "string"),
    (SOURCE_OFFSET, "bigint"),
    (SOURCE_EPOCH, "int"),
    (READER, "string"),
)
_ALWAYS = (ROW, TIMESTAMP, TOMBSTONE)

Count = Annotated[int, Field(ge=0)]


class Retention(StoredDocument):
    """What a stream keeps: whole segments younger than `max_age` (since their append was committed, whatever the
    records' own timestamps say) and, of these, the newest of at most `max_bytes` together. None: no limit."""

    max_age: Annotated[timedelta, Field(gt=timedelta(0))] | None = None
    max_bytes: Annotated[int, Field(gt=0)] | None = None


class CompactionPolicy(StoredDocument):
    """When small segments are merged: runs of at least `min_segments` neighbours, each smaller than half of
    `target_bytes`, into one of about `target_bytes`."""

    min_segments: Annotated[int, Field(ge=2)] = 8
    target_bytes: Annotated[int, Field(gt=0)] = 128 * 1024 * 1024


class Declaration(StreamDeclaration):
    """What `create` was told of a lake stream."""

    timestamp: str | None = None
    retention: Retention | None = None
    compaction: CompactionPolicy | None = None

    @property
    def layout(self) -> BucketLayout:
        """How the stream's files look: Spark's own buckets by key, rows in offset order."""
        return BucketLayout(self.schema_, self.key, self.partitions, hidden=HIDDEN)

    def layout_of(self, columns: Iterable[str]) -> BucketLayout:
        """Return the layout of files for content with these columns: epochs and positions only where there are some."""
        there = {*_ALWAYS, *columns}
        return replace(self.layout, hidden=tuple(item for item in HIDDEN if item[0] in there))


class FileEntry(NamedTuple):
    """One data file: its partition, facts, and the range of its records' timestamps (us since the epoch).

    `untimed` counts records whose timestamp is that of their append.
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
        low, high = file.stats.get("range") or (None, None)
        untimed = int(file.stats.get("range_nulls", 0))
        return cls(file.bucket, file.rows, file.size, file.sha256, low, high, untimed)


class MarkerEntry(NamedTuple):
    """One end-of-dataset marker; `counted` says that its producer left `rows` to the stream.

    `valid_from` is since when the version is valid, in microseconds since the epoch, where the producer told.
    """

    partition: Count
    offset: Count
    version: str
    rows: Count | None
    checksum: str | None
    counted: bool
    valid_from: int | None


class Segment(StoredDocument):
    """The records and markers from `base` up to `next`, by partition; `__row` in a file counts from `base`.

    `appended` is when it was committed, in ms since the epoch; `attempt` is the folder of its files. `positioned` says
    that its records tell what they were made of, and `chained` that some are of records that were replayed themselves.
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
        return 1

    @property
    def marked(self) -> int:
        return len(self.markers)

    def latest(self, partition: int) -> int | None:
        """Return the partition's greatest record timestamp in us, or None without records."""
        for file in self.files:
            if file.partition == partition:
                untimed = self.appended * 1000 if file.untimed else None
                known = [time for time in (file.latest, untimed) if time is not None]
                return max(known)
        return None

    def folder(self, prefix: str) -> str:
        return data_folder(prefix, self.attempt)

    def key_of(self, prefix: str, file: FileEntry) -> str:
        return f"{self.folder(prefix)}/{bucket_file_name(file.partition, self.attempt)}"

    def generation(self, number: int, prefix: str) -> Generation:
        files = tuple(
            BucketFile(f.partition, bucket_file_name(f.partition, self.attempt), f.rows, f.size, f.sha256)
            for f in self.files
        )
        return Generation(number, self.folder(prefix), files)


class Page(StoredDocument):
    """A stored page of segments (level 1) or of pages of the level below, with their sums."""

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


Entry = Segment | Page


class Sent(NamedTuple):
    """One sequence of a producer: a digest of its contents, its offsets by partition, its records.

    `columns` is the place of the columns that it was written with among all that the stream has had. Where the stream
    was repartitioned since, `partitions` is how many it was written in, and its offsets are not known.
    """

    sequence: Count
    digest: str
    first: tuple[int, ...]
    next: tuple[int, ...]
    rows: Count
    columns: Count
    partitions: Count = 0


class Dropped(NamedTuple):
    """An object or folder that the index reached until `at` (ms), kept a while for those who still read it."""

    key: str
    at: Count


class Rewritten(StoredDocument):
    """How a stream came to its partitions: those of the stream `id` ended at `ended`, and these went on at `next`.

    `oldest` is where those began then. `at` is when, in ms since the epoch.
    """

    id: str
    ended: tuple[Count, ...]
    next: tuple[Count, ...]
    at: Count
    reason: str
    oldest: tuple[Count, ...]


class StreamState(StoredDocument):
    """The body of a stream's manifest.

    `id` tells the stream from another one that was made under its name later.
    `earlier` are the columns that it had before those of the declaration, oldest first: files are still written with
    them by who knows no others. `horizon` (ms): attempts begun before it are lost unless the index lists them.
    `rewritten` is its last rewriting into other partitions, `rewritten_before` are the ones before it, oldest first.
    `marked_until` is the offset after each partition's last marker, 0 without one. `read` says what readers made its
    records of, by reader and source partition.
    """

    declaration: Declaration
    id: str
    earlier: tuple[Any, ...] = ()
    rewritten: Rewritten | None = None
    rewritten_before: tuple[Rewritten, ...] = ()
    oldest: tuple[Count, ...]
    next: tuple[Count, ...]
    marked_until: tuple[Count, ...]
    tail: tuple[Segment, ...] = ()
    levels: tuple[tuple[Page, ...], ...] = ()
    producers: dict[str, tuple[Sent, ...]] = Field(default_factory=dict)
    next_segment: Count = 0
    appended: Count = 0
    horizon: Count = 0
    dropped: tuple[Dropped, ...] = ()
    read: dict[str, dict[str, Coverage]] = Field(default_factory=dict)

    @field_validator("earlier")
    @classmethod
    def _earlier_are_schemas(cls, value: tuple[Any, ...]) -> tuple[Schema, ...]:
        return tuple(stored_schema(stored) for stored in value)

    @field_serializer("earlier")
    def _write_earlier(self, value: tuple[Schema, ...]) -> list[list[dict[str, Any]]]:
        return [schema.to_json() for schema in value]

    @model_validator(mode="after")
    def _index_is_whole(self) -> StreamState:
        n = self.declaration.partitions
        at: tuple[int, ...] = self.oldest
        for entry in self.entries():
            if not len(entry.base) == len(entry.next) == n:
                raise ValueError(f"an entry has {len(entry.base)} partitions, expected {n}")
            if entry.base != at:
                raise ValueError(f"an entry begins at {list(entry.base)}, expected {list(at)}")
            at = entry.next
        if at != self.next or len(self.marked_until) != n or len(at) != n:
            raise ValueError(f"the index ends at {list(at)}, expected {list(self.next)}")
        return self

    def declared_with(self, columns: int) -> Declaration:
        """Return the declaration with the columns of this place: those of now stand last."""
        if columns == len(self.earlier):
            return self.declaration
        return self.declaration.model_copy(update={"columns": self.earlier[columns]})

    def with_declaration(self, declaration: Declaration) -> StreamState:
        """Return the state with another declaration, which keeps the columns of this one among the earlier."""
        update: dict[str, Any] = {"declaration": declaration}
        if declaration.schema_ != self.declaration.schema_:
            update["earlier"] = (*self.earlier, self.declaration.schema_)
        return self.model_copy(update=update)

    def entries(self) -> list[Entry]:
        """Return what the manifest itself lists, oldest first."""
        return [*(page for level in reversed(self.levels) for page in level), *self.tail]

    @classmethod
    def empty(cls, declaration: Declaration) -> StreamState:
        zeros = (0,) * declaration.partitions
        return cls(declaration=declaration, id=uuid.uuid4().hex, oldest=zeros, next=zeros, marked_until=zeros)

    @classmethod
    def parse(cls, body: Any, where: str) -> StreamState:
        """Return the state in a manifest's body. Raises MalformedDocumentError that names `where`."""
        return _validated(cls, body, where)

    def body(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def parse_entries(level: int, items: list[Any], where: str) -> tuple[Entry, ...]:
    """Return the entries in a page of this level."""
    if level == 1:
        return tuple(_validated(Segment, item, where) for item in items)
    return tuple(_validated(Page, item, where) for item in items)


def data_folder(prefix: str, attempt: str) -> str:
    return f"{prefix}/data/{attempt}"


P = TypeVar("P", bound=StoredDocument)


def _validated(kind: type[P], body: Any, where: str) -> P:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise MalformedDocumentError(
            f"{where} is malformed: {first_problem(error)}.",
            "Restore this object from a backup or an older object version; the records themselves are untouched.",
            document=where,
        ) from None
