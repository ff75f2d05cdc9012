"""The interface of stream systems, and the values that it exchanges.

Offsets are strings that only their system can order: compare them with `StreamSystem.compare`,
never as text.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.names import check_name, split_stream_name
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.column_changes import NO_CHANGES, ColumnChanges
from dagster_adjunct.resources.schemas.matching_keys import WantedKeys
from dagster_adjunct.resources.schemas.paths import read_path, require_path
from dagster_adjunct.resources.schemas.records import frame_from_arrow
from dagster_adjunct.resources.schemas.schema import AS_NAMED, Schema, StoredNames
from dagster_adjunct.resources.small_work import SMALL_RECORDS, SMALL_ROWS
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True, order=True)
class SystemStreamPartition:
    """A partition (from 0) of a stream in a system; ordered by system, stream, then partition
    number.
    """

    system: str
    stream: str
    partition: int

    def __post_init__(self) -> None:
        check_name("system", self.system)
        check_name("stream", self.stream)
        if (
            not isinstance(self.partition, int)
            or isinstance(self.partition, bool)
            or self.partition < 0
        ):
            problem = (
                f"partition {self.partition!r} of {self.system}.{self.stream} is not a partition"
                " number: expected an integer from 0."
            )
            raise errors.InvalidNameError(
                problem, name=str(self.partition), stream=f"{self.system}.{self.stream}"
            )

    @classmethod
    def parse(cls, text: str) -> SystemStreamPartition:
        """Return the partition with this name, as `str` writes it ("lake.orders.3"). Raises
        InvalidNameError.
        """
        if isinstance(text, str):
            return _parse_partition(text)
        raise _unreadable_partition(text)

    @property
    def qualified_stream(self) -> str:
        """`system.stream`, without the partition."""
        return f"{self.system}.{self.stream}"

    def __str__(self) -> str:
        return f"{self.system}.{self.stream}.{self.partition}"


@lru_cache(maxsize=65_536)
def _parse_partition(text: str) -> SystemStreamPartition:
    """Return the parsed partition. Cached: a starting run parses the same few thousand names
    many times.
    """
    parts = text.split(".")
    if len(parts) != 3 or not parts[2].isdecimal():
        raise _unreadable_partition(text)
    number = int(parts[2])
    if str(number) != parts[2]:  # "03" and "٣": every partition must have a single name
        raise _unreadable_partition(text)
    return SystemStreamPartition(parts[0], parts[1], number)


def _unreadable_partition(text: object) -> errors.InvalidNameError:
    problem = f"stream partition {text!r} can't be read: expected SYSTEM.STREAM.NUMBER."
    return errors.InvalidNameError(problem, "Write it as in lake.flights.3.", name=f"{text!s:.300}")


def require_one_stream(system: str, ssps: Iterable[SystemStreamPartition]) -> str:
    """Return the name (without the system) of the stream that all these partitions belong to.

    Raises ConfigurationError for partitions of several streams, or of another system.
    """
    streams = sorted({ssp.qualified_stream for ssp in ssps})
    if len(streams) != 1 or not streams[0].startswith(f"{system}."):
        problem = (
            f"a read names the streams {', '.join(streams) or '(none)'}: expected one of system"
            f" {system!r}."
        )
        raise errors.ConfigurationError(
            problem, "Read each stream separately: their columns differ.", system=system
        )
    return split_stream_name(streams[0])[1]


def check_partition(ssp: SystemStreamPartition, count: int) -> None:
    """Raise OffsetOutOfRangeError unless a stream of `count` partitions has this one."""
    if ssp.partition >= count:
        problem = f"{ssp} does not exist: the stream has {count} partitions, 0 to {count - 1}."
        raise errors.OffsetOutOfRangeError(
            problem, stream=ssp.qualified_stream, partition=ssp.partition
        )


def time_from_micros(micros: int) -> datetime:
    """Return the time of this number of microseconds since the epoch, as markers store times."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


def order_keys_step(dataset: str) -> str:
    """Return the next step for a dataset whose stream has records of one key in several
    partitions.
    """
    return (
        "What is served stays. Declare order_by=COLUMN, which differs between the changes of a key"
        " and says which one is newer (or a path such as source.lsn), and rebuild: adjunct dataset"
        f" rebuild {dataset} MODULE:APP --reason …. Or let the source send all rows into a new"
        " stream that has its partitions from the start, and read that one under a new name of the"
        " dataset."
    )


# Columns that a read adds to the record's own; entries of a dataset have those of META too.
# `__epoch` is 0, and higher in the results of a replay.
PARTITION = "__partition"
OFFSET = "__offset"
TIMESTAMP = "__timestamp"
TOMBSTONE = "__tombstone"
EPOCH = "__epoch"
# The first offset of a partition: a later oldest offset means that records were dropped.
FIRST_OFFSET = "0"
META = (PARTITION, OFFSET, TIMESTAMP, TOMBSTONE)
RECORD_META = (*META, EPOCH)
RECORD_META_COLUMNS = tuple(
    zip(RECORD_META, ("int", "bigint", "timestamp", "boolean", "int"), strict=True)
)
"""The names and Spark types of RECORD_META."""
# The source position of a record that an application produced: the partition of its input
# ("lake.orders.3"), the offset there, the epoch in which the application read that offset (higher
# for a replay), and the reader (`Sources.reader`). Reads add these columns only on request; they
# are null if the producer gave none.
SOURCE = "__source"
SOURCE_OFFSET = "__source_offset"
SOURCE_EPOCH = "__source_epoch"
READER = "__source_reader"
POSITION: Mapping[str, str] = {
    SOURCE: "string",
    SOURCE_OFFSET: "bigint",
    SOURCE_EPOCH: "int",
    READER: "string",
}
"""The names of the source position's columns, with their Spark types."""
RECORD_META_DDL = ", ".join(f"`{name}` {kind}" for name, kind in RECORD_META_COLUMNS) + " NOT NULL"

# Which records of an output that was replayed a read returns: all, or only the latest results of
# each source record.
Epochs = Literal["all", "latest"]
Partitioner = Literal["spark-murmur3", "kafka-murmur2", "unknown"]


@dataclass(frozen=True, slots=True)
class Repartitioning:
    """A stream's last repartitioning.

    Before it, the stream was `identity`, and its partitions ended at the offsets `ended`. A reader
    that was at these offsets continues at the offsets `continued_at` of the new partitions.
    `earlier` are the identities before that, of the repartitionings before this one.
    """

    identity: str
    ended: tuple[str, ...]
    continued_at: tuple[str, ...]
    earlier: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredSize:
    """How many files there are, and their bytes."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LogCompaction:
    """How a stream is compacted that keeps the newest record of every key: it keeps deletions for
    `tombstones_kept` (None: forever).

    Its oldest offset stays, so that ranges have fewer records than offsets.
    """

    tombstones_kept: timedelta | None = None


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """The properties of a stream.

    `partitioner` is the hash that assigns records to partitions: streams are only partitioned alike
    if it is equal too. `schema` is None for raw records. `default_offset` is where a reader without
    a checkpoint begins; None leaves that to the system. `compaction` is None for a stream that does
    not promise to keep the newest record of every key. `identity`, if the system has one, changes
    when the stream is deleted and recreated, or `repartitioned`. `former` says what became of
    columns that it had before, by name or path: "renamed to email", "dropped". `names` are the
    stored names of its columns, for a system that renames columns. `find_by` are the keys, each one
    or more columns in order, by which `find_records` need not read all of a range.
    """

    name: str
    partitions: int
    key: tuple[str, ...]
    partitioner: Partitioner
    schema: Schema | None
    default_offset: Literal["oldest", "upcoming"] | None = None
    compaction: LogCompaction | None = None
    identity: str | None = None
    repartitioned: Repartitioning | None = None
    former: Mapping[str, str] = field(default_factory=dict)
    names: StoredNames = AS_NAMED
    find_by: tuple[tuple[str, ...], ...] = ()

    def has_all_keys(self, oldest: Mapping[SystemStreamPartition, str]) -> bool:
        """Return whether the stream still holds the newest record of every key, given its oldest
        offsets.
        """
        if self.compaction is not None:
            return True
        return all(offset == FIRST_OFFSET for offset in oldest.values())

    def was_recreated(self, before: str | None) -> bool:
        """Return whether the stream has another identity than `before`, if both are known."""
        return before is not None and self.identity is not None and before != self.identity

    def was_repartitioned(self, before: str | None) -> bool:
        """Return whether the last repartitioning was of the stream with this identity."""
        return self.repartitioned is not None and self.repartitioned.identity == before

    def change_since(self, before: str | None) -> str:
        """Return what happened to the stream since it had this identity, to follow "was" in a
        message.
        """
        if self.was_repartitioned(before):
            return f"repartitioned into {self.partitions}"
        return "deleted and recreated"


@dataclass(frozen=True, slots=True)
class NewStreams:
    """What plans may assume of streams that a system will create.

    `partitioner` is the hash that assigns keys to partitions. With `needs_key`, a stream without a
    key has one partition only. The columns of a `typed` system have the types of `Schema`, and no
    others.
    """

    partitioner: Partitioner = "unknown"
    needs_key: bool = False
    typed: bool = False


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCapabilities:
    """What a stream system can do that not every system can. Nothing that is not declared is used.

    It has a method `read_arrow` (`reads_arrow`), `task_reads` (`reads_in_tasks`) or
    `offset_for_timestamp` (`finds_times`); `records_between` counts without reading the records
    (`counts_unread`). With `copies=True`, frames of `read` have a copy of each value of the key
    that is inside a column (`copies_keys`), named by `copy_name`: Spark then knows the partitions.
    The frames of `read` have an exchange that moves records into their partitions
    (`exchanges_reads`), which plans do not list.

    The others are for writers. `keeps_positions`: `append` stores the columns of POSITION and gets
    `AppendOptions.sources`. `appends_alone`: no other append gets offsets between those of an
    append, so that reading [first, next) returns exactly it, with POSITION if that is kept and
    `positions=True`. `evolves`: `create` can add or widen columns of an existing stream, and
    snapshots can be written to. `new_streams` is what a plan may assume of a stream that `create`
    has yet to create.
    """

    reads_arrow: bool = False
    reads_in_tasks: bool = False
    finds_times: bool = False
    counts_unread: bool = False
    copies_keys: bool = False
    exchanges_reads: bool = False
    keeps_positions: bool = False
    appends_alone: bool = False
    evolves: bool = False
    new_streams: NewStreams = NewStreams()


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets [start, end)."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class Marker:
    """An end-of-dataset marker: the records of the version `version` end before `offset` in this
    partition.

    It takes one offset and is not a record. `rows` is the number of the version's records in the
    partition, as the producer gave it, or as the stream `counted` them since the previous marker. A
    `checksum` of `records_checksum` (r2-…) is validated against the partition's records; one of
    another form is the producer's own, and is only compared with a repeated marker. `valid_from`,
    if given, is when the version becomes valid. `partitions`, if given, is the stream's number of
    partitions at that time: the version has records in these only, even if more are added.
    """

    ssp: SystemStreamPartition
    offset: str
    version: str
    rows: int | None = None
    checksum: str | None = None
    counted: bool = False
    valid_from: datetime | None = None
    partitions: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class AppendResult:
    """The result of an append: by partition number, its `first` offset and the `next` one after its
    last. A partition that got no records has the same offset in both, or is in neither.

    The offsets include markers; `rows`, the number of records, does not. `duplicate` means that
    this producer's sequence was appended before and nothing was added; the offsets are those of the
    first append, or empty if they are no longer known.
    """

    first: Mapping[int, str]
    next: Mapping[int, str]
    rows: int
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class SourceRange:
    """The offsets [start, end) of the partition `source` ("lake.orders.3") that an append was made
    of.

    `epoch` is 0, or higher if the reader had read these offsets before and read them again (a
    replay).
    """

    source: str
    start: int
    end: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Sources:
    """The ranges of `stream` ("lake.orders") that an append was made of.

    `reader` is "APPLICATION@IDENTITY" with the identity of `stream`, since a recreated stream holds
    other records; only the application if the stream has no identity.
    """

    stream: str
    reader: str
    ranges: tuple[SourceRange, ...]


@validated
@dataclass(frozen=True, slots=True, kw_only=True)
class AppendOptions:
    """How records are appended. A system may ignore what does not concern it.

    `order_by` has the columns that order the records of a Spark frame in their partitions; those
    that the stream does not have are dropped. With `partitioned`, partition i of the frame contains
    exactly the stream's partition i. `consumed` are the next offsets of the input after these
    records: a system may commit them together, for its own tools; Adjunct does not read them. With
    `one_task`, the records are few enough for one task. `fence` is that of the run, to be checked
    before records are sent to where repeated ones are not recognized. `sources` are the ranges that
    the records were made of; then each has the columns of POSITION. Only a system that
    `keeps_positions` gets them.
    """

    order_by: Sequence[str] = ()
    partitioned: bool = False
    consumed: Mapping[SystemStreamPartition, str] | None = None
    sources: Sources | None = None
    one_task: bool = False
    fence: Fence | None = None


@validated
class StreamSystem(ABC):
    """A system of streams that can be read: admin and consumer in one (Samza's SystemAdmin and
    SystemConsumer).

    Reads are of exact, bounded ranges, so that a batch can be read again as it was. All methods
    raise StreamNotFoundError for a missing stream. What is optional is declared in `capabilities`;
    by default, the methods for it raise ConfigurationError. A system whose streams can be written
    is a `StreamWriter`, one whose offsets are growing numbers extends `NumberedOffsets`, and one
    that is read by this process only `DriverReads`.

    `name` is the name that it is registered with. `default_offset` is where a partition without a
    checkpoint begins, if neither the input nor the stream says so; None is "upcoming".
    """

    name: str
    default_offset: Literal["oldest", "upcoming"] | None = None
    capabilities: StreamCapabilities = StreamCapabilities()

    def fenced(self, fence: Fence) -> StreamSystem:
        """Return the system as a run writes to it, which sends nothing once its lease is lost; by
        default itself.

        A system whose appends count once by producer and sequence need not do more; others get the
        fence with each append (`AppendOptions.fence`).
        """
        return self

    @abstractmethod
    def list_streams(self) -> list[str]:
        """Return the names of all streams, sorted."""

    @abstractmethod
    def info(self, stream: str) -> StreamInfo:
        """Return the properties of a stream."""

    def stored_bytes(self, stream: str) -> int | None:
        """Return the stream's size in bytes, or None if that is not known without reading
        records.
        """
        return None

    @abstractmethod
    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        """Return the first readable offset of each partition (`upcoming` if it is empty)."""

    @abstractmethod
    def upcoming(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        """Return the offset that the next record of each partition will have."""

    def fingerprint(self, stream: str) -> str:
        """Return a text that changes whenever the stream's records, markers or partitions change.

        It is requested often: an override should need only one request.
        """
        info = self.info(stream)
        ssps = [
            SystemStreamPartition(self.name, stream, number) for number in range(info.partitions)
        ]
        return f"{info.identity} {self.upcoming(ssps)}"

    def offset_for_timestamp(self, ssp: SystemStreamPartition, timestamp_ms: int) -> str:
        """Return the offset of the first record, in offset order, at or after this time (ms since
        the epoch).

        Returns the upcoming offset if there is none.
        """
        raise self._unable(
            "find records by their time", "Start at an offset, or at the oldest or the next record."
        )

    @abstractmethod
    def compare(self, left: str, right: str) -> int:
        """Return -1, 0 or 1 as `left` comes before, is, or comes after `right`."""

    @abstractmethod
    def distance(self, ssp: SystemStreamPartition, start: str, end: str) -> int:
        """Return the number of offsets in [start, end), without reading: there are at most as
        many records.
        """

    @abstractmethod
    def advance(self, ssp: SystemStreamPartition, start: str, count: int) -> str:
        """Return the offset `count` offsets after `start`."""

    @abstractmethod
    def read(
        self, spark: SparkSession, ranges: Mapping[SystemStreamPartition, OffsetRange]
    ) -> DataFrame:
        """Return exactly the records of these ranges of one stream: its columns, then those of
        RECORD_META.

        `__epoch` is 0 if the producer gave none, never null.
        Raises OffsetOutOfRangeError for a range that the stream does not contain entirely.
        """

    def read_arrow(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """Return the records of these ranges without Spark, in memory, ordered by partition and
        offset.

        The table has the stream's columns, or only these `columns` of them, then those of
        RECORD_META.
        """
        raise self._unable("be read without Spark", "Pass a Spark session.")

    def find_records(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        keys: pa.Table,
        columns: Sequence[str] = (),
    ) -> pa.Table:
        """Return where the records of these ranges are whose values are those of one of the `keys`,
        ordered by partition and offset: PARTITION, OFFSET and the values at `columns`.

        The columns of `keys` have the names of columns of the stream, or of paths, and the types of
        the values there. A key with a null has no records. `columns` are such names, too, or those
        of RECORD_META; the columns of the result have the same names. This default reads the ranges
        in parts, only the columns that it needs. Raises SchemaMismatchError for keys that can't be
        compared.
        """
        stream = require_one_stream(self.name, ranges)
        types = self._column_types(stream)
        what = f"{self.name}.{stream}"
        wanted = WantedKeys.of(keys, types, what)
        in_record = [name for name in columns if name not in RECORD_META]
        paths = {name: require_path(name, types, what) for name in in_record}
        needed = dict.fromkeys(path.column for path in (*wanted.paths, *paths.values()))

        def select(records: pa.Table) -> pa.Table:
            values = {name: records.column(name) for name in RECORD_META}
            values |= {name: read_path(records, path.steps) for name, path in paths.items()}
            return pa.table({name: values[name] for name in (PARTITION, OFFSET, *columns)})

        parts = self._parts_of(ranges) if wanted.keys.num_rows else ()
        # Without records, the result still has its columns.
        empty = {ssp: OffsetRange(span.start, span.start) for ssp, span in ranges.items()}
        found = []
        for part in (empty, *parts):
            records = self.read_arrow(part, list(needed))
            values = [read_path(records, path.steps) for path in wanted.paths]
            found.append(select(records.filter(wanted.find(values))))
        return pa.concat_tables(found)

    def read_records(
        self, stream: str, places: pa.Table, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the records at these places, which are in order, with the columns PARTITION and
        OFFSET that `find_records` returns; otherwise as `read_arrow` does.

        Raises OffsetOutOfRangeError for a place without a record.
        """
        raise self._unable("read single records", "Read ranges.")

    def count_files(self, stream: str, places: pa.Table) -> int | None:
        """Return how many files have the records at these places; None for a stream that does not
        consist of files.
        """
        return None

    def measure(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> StoredSize | None:
        """Return how many files have records of these ranges of one stream, and their bytes; None
        for a stream that does not consist of files.
        """
        return None

    def _column_types(self, stream: str) -> dict[str, str]:
        """Return the types of the stream's columns, none for raw records."""
        schema = self.info(stream).schema
        return {} if schema is None else schema.types

    def _parts_of(
        self, ranges: Mapping[SystemStreamPartition, OffsetRange]
    ) -> Iterator[dict[SystemStreamPartition, OffsetRange]]:
        """Yield the ranges in parts of at most SMALL_ROWS offsets of a partition, in order."""
        for ssp, span in sorted(ranges.items()):
            start = span.start
            while self.compare(start, span.end) < 0:
                end = self.advance(ssp, start, min(SMALL_ROWS, self.distance(ssp, start, span.end)))
                yield {ssp: OffsetRange(start, end)}
                start = end

    def task_reads(
        self, ranges: Mapping[SystemStreamPartition, OffsetRange], columns: Sequence[str]
    ) -> Callable[[int], Iterator[pa.Table]]:
        """Return a picklable function from a partition number to its records in these ranges, in
        order, in parts.

        The tables have these columns of the stream, then those of RECORD_META. Spark's tasks call
        the function.
        """
        raise self._unable("be read by tasks", "Pass a Spark session.")

    def markers(
        self, stream: str, since: Mapping[SystemStreamPartition, str] | None = None
    ) -> list[Marker]:
        """Return the end-of-dataset markers at or after these offsets, in order; None: all of the
        stream.

        A system without markers returns none; a bounded dataset can't be built from its streams.
        """
        return []

    def records_between(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> int:
        """Return the number of records in the ranges, without markers.

        This default counts every offset; systems with markers or gaps override it.
        """
        return sum(self.distance(ssp, span.start, span.end) for ssp, span in ranges.items())

    def needed_versions(
        self, ranges: Mapping[SystemStreamPartition, OffsetRange]
    ) -> Mapping[str, Sequence[str]]:
        """Return the versions of datasets that reading these ranges needs, by dataset: a run leases
        them, and its batch keeps them until it has ended.

        Only a system whose records are made of datasets needs any. Raises VersionDiscardedError if
        the ranges can't be read any more.
        """
        return {}

    def has_all_keys(self, stream: str) -> bool:
        """Return whether the stream still holds the newest record of every key it ever had."""
        return self.info(stream).has_all_keys(self.oldest(self.partitions(stream)))

    def snapshot(self, stream: str) -> StreamSystem:
        """Return a read-only view of this system, to ask several questions about one stream and to
        read it.

        If an answer needs requests, the view sends these only once, so that all its answers are of
        the same moment.
        """
        return self

    def checking_keys(self, dataset: str) -> StreamSystem:
        """Return a view whose reads raise KeyOrderError for a record that is not in the partition
        of its key.

        Offsets order the records of a key only if all of them are in one partition. `dataset` is
        the reader, for the error. This default returns the system itself: it has nothing to check,
        or can't.
        """
        return self

    def partitions(self, stream: str) -> list[SystemStreamPartition]:
        """Return the stream's partitions, in order."""
        return [
            SystemStreamPartition(self.name, stream, p) for p in range(self.info(stream).partitions)
        ]

    def _unable(self, what: str, next_step: str) -> errors.ConfigurationError:
        return errors.ConfigurationError(
            f"stream system {self.name!r} can't {what}.", next_step, system=self.name
        )


@validated
class StreamWriter(StreamSystem):
    """A system whose streams can be created and appended to."""

    @abstractmethod
    def create(
        self,
        name: str,
        *,
        schema: Schema,
        key: Sequence[str] = (),
        partitions: int,
        changes: ColumnChanges = NO_CHANGES,
    ) -> StreamInfo:
        """Create a stream, or do nothing if it exists with this declaration. Raises
        StreamExistsError.

        A system that `evolves` adds and widens columns of an existing stream, and renames and drops
        those of `changes`. Other systems get no changes.
        """

    def check_create(
        self,
        name: str,
        *,
        schema: Schema,
        key: Sequence[str] = (),
        partitions: int,
        changes: ColumnChanges = NO_CHANGES,
    ) -> None:
        """Raise what `create` would raise for this declaration, without changing anything."""
        return

    @abstractmethod
    def append(
        self,
        stream: str,
        data: DataFrame | pa.Table,
        *,
        producer: str,
        sequence: int,
        end_of_dataset: str | None = None,
        options: AppendOptions = AppendOptions(),
    ) -> AppendResult:
        """Append records, all or none, once per producer and sequence.

        Returns the first result for a repeated append, as a `duplicate`. Raises
        ProducerConflictError for other records under a sequence, or a sequence that is so old that
        it is no longer known. `end_of_dataset` adds a marker; applications never pass it, and a
        system without markers raises ConfigurationError for it.
        """

    def appended(self, stream: str, producer: str, sequence: int) -> AppendResult | None:
        """Return the result of an earlier append, or None if there was none.

        Raises ProducerConflictError for a sequence that is so old that it is no longer known.
        """
        raise self._unable("look up appends", "Append again with the same producer and sequence.")


def require_writer(system: StreamSystem) -> StreamWriter:
    """Return the system if its streams can be written. Raises ConfigurationError."""
    if isinstance(system, StreamWriter):
        return system
    problem = (
        f"stream system {system.name!r} can't create streams or append: it is not a StreamWriter."
    )
    raise errors.ConfigurationError(
        problem, "Send to a stream of another system.", system=system.name
    )


class DriverReads(StreamSystem):
    """A stream system that declares `reads_arrow`, and whose `read` gives Spark what `read_arrow`
    reads in this process.
    """

    def read(
        self, spark: SparkSession, ranges: Mapping[SystemStreamPartition, OffsetRange]
    ) -> DataFrame:
        return frame_from_arrow(spark, self.read_arrow(ranges))


# One form for each number, within 64 bits: "0003" is not an offset.
_OFFSET = re.compile(r"0|[1-9][0-9]{0,18}")


class NumberedOffsets(StreamSystem):
    """A stream system whose offsets are growing numbers, written in decimal digits."""

    def compare(self, left: str, right: str) -> int:
        a = parse_offset(left, self.name)
        b = parse_offset(right, self.name)
        return (a > b) - (a < b)

    def distance(self, ssp: SystemStreamPartition, start: str, end: str) -> int:
        return max(parse_offset(end, str(ssp)) - parse_offset(start, str(ssp)), 0)

    def advance(self, ssp: SystemStreamPartition, start: str, count: int) -> str:
        return str(parse_offset(start, str(ssp)) + count)

    def read_records(
        self, stream: str, places: pa.Table, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the records at these places; reads ranges from the first to the last of those that
        are near each other.
        """
        ssps = self.partitions(stream)
        oldest = self.oldest(ssps)
        # Without places, the result still has its columns.
        nothing = {ssp: OffsetRange(oldest[ssp], oldest[ssp]) for ssp in ssps}
        records = [self.read_arrow(nothing, columns)]
        for ssp in ssps:
            here = places.filter(pc.equal(places.column(PARTITION), ssp.partition))
            for part in _near_offsets(here.column(OFFSET).to_pylist()):
                span = OffsetRange(str(part[0]), str(part[-1] + 1))
                read = self.read_arrow({ssp: span}, columns)
                records.append(read.filter(pc.is_in(read.column(OFFSET), pa.array(part))))
        return check_places(self, stream, places, pa.concat_tables(records))


def parse_offset(text: str, what: str) -> int:
    """Return an offset as a number. Raises OffsetOutOfRangeError, in which `what` names the
    partition or system.
    """
    if isinstance(text, str) and _OFFSET.fullmatch(text):
        return int(text)
    problem = (
        f"{what}: {text!r:.80} is not an offset: expected a decimal number without leading zeros,"
        " as in '42'."
    )
    raise errors.OffsetOutOfRangeError(
        problem, "Use offsets as this system returns them.", offset=f"{text!s:.80}"
    )


@validated
def check_range(
    ssp: SystemStreamPartition, start: int, end: int, oldest: int, upcoming: int, last: str = ""
) -> None:
    """Raise OffsetOutOfRangeError for a range that the partition does not contain entirely.

    `last` follows "the stream's upcoming one" in the error, to explain it, such as " (the last
    stable offset)".
    """
    about: Any = {"stream": ssp.qualified_stream, "partition": ssp.partition}
    if start > end:
        problem = f"{ssp}: the range begins at {start}, after its end {end}."
        raise errors.OffsetOutOfRangeError(
            problem, "Give the smaller offset first.", offset=str(start), **about
        )
    if start < oldest:
        raise dropped_offset_error(ssp, start, oldest)
    if end > upcoming:
        problem = (
            f"{ssp}: the range ends at offset {end}, the stream's upcoming one{last} is {upcoming}."
        )
        step = (
            f"End at {upcoming} or before. If the offset was valid once, the stream was recreated,"
            " was restored or has lost records: set a startpoint for this partition."
        )
        raise errors.OffsetOutOfRangeError(
            problem, step, offset=str(end), upcoming=str(upcoming), **about
        )


def check_places(
    system: StreamSystem, stream: str, places: pa.Table, records: pa.Table
) -> pa.Table:
    """Return the records that `system` has read at these places. Raises OffsetOutOfRangeError for
    a place without a record, and for one that is named twice, and StreamReadError for a record
    that is at none of them, or that was read twice.
    """
    # Each record was read once: a place that is named twice makes them fewer.
    if _in_order(places).equals(_in_order(records)):
        return records
    named = Counter(_list_places(places))
    read = Counter(_list_places(records))
    for place, times in read.items():
        if place not in named or times > 1:
            raise _foreign_record_error(system, stream, place, is_named=place in named)
    for place, times in named.items():
        partition, offset = place
        if place not in read:
            problem = f"{system.name}.{stream}.{partition} has no record at offset {offset}."
        elif times > 1:
            problem = f"offset {offset} of {system.name}.{stream}.{partition} is named twice."
        else:
            continue
        raise errors.OffsetOutOfRangeError(
            problem,
            "Name offsets of records, each once, as find_records returns them.",
            stream=f"{system.name}.{stream}",
            partition=partition,
            offset=str(offset),
        )
    return records


class _Place(NamedTuple):
    """Where a record is in a stream."""

    partition: int
    offset: int


def _in_order(records: pa.Table) -> pa.Table:
    """Return the places of records, in order."""
    schema = pa.schema([(PARTITION, pa.int64()), (OFFSET, pa.int64())])
    places = records.select([PARTITION, OFFSET]).cast(schema)
    return places.sort_by([(PARTITION, "ascending"), (OFFSET, "ascending")])


def _list_places(records: pa.Table) -> list[_Place]:
    """Return the places of records."""
    columns = (records.column(PARTITION).to_pylist(), records.column(OFFSET).to_pylist())
    return [_Place(*place) for place in zip(*columns, strict=True)]


def _foreign_record_error(
    system: StreamSystem, stream: str, place: _Place, *, is_named: bool
) -> errors.StreamReadError:
    """Return the error for a record that a system should not have returned; `is_named` says that
    it is wanted, but once.
    """
    read_by = f"{type(system).__name__}.read_arrow()"
    found = f"the record at offset {place.offset} of partition {place.partition}"
    if is_named:
        found += " more than once"
        expected = "each record once"
    else:
        expected = "records of the partitions and offsets that were asked for only"
    return errors.StreamReadError(
        f"{read_by} of stream system {system.name!r} returned {found}, to a read of single records"
        f" of {system.name}.{stream}: expected {expected}.",
        f"Correct {read_by}.",
        system=system.name,
        stream=f"{system.name}.{stream}",
        partition=place.partition,
        found=found,
        expected=expected,
    )


def _near_offsets(offsets: Sequence[int]) -> Iterator[list[int]]:
    """Yield growing offsets in parts that are read at once: each has neighbours that are near, and
    at most SMALL_ROWS offsets from its first to its last one.
    """
    part: list[int] = []
    for offset in offsets:
        if part and (offset - part[-1] > SMALL_RECORDS or offset - part[0] >= SMALL_ROWS):
            yield part
            part = []
        part.append(offset)
    if part:
        yield part


def dropped_offset_error(
    ssp: SystemStreamPartition, start: int, oldest: int
) -> errors.OffsetOutOfRangeError:
    """Return the error for a range that begins before the oldest offset."""
    problem = (
        f"{ssp}: the range begins at offset {start}, the oldest that the stream still holds is"
        f" {oldest}."
    )
    step = (
        "Retention dropped the records before it. Continue without them by a startpoint (oldest)"
        " for this partition. Keep the stream longer (retention.ms and retention.bytes of a topic)"
        " than readers may lag."
    )
    about: Any = {"stream": ssp.qualified_stream, "partition": ssp.partition}
    return errors.OffsetOutOfRangeError(
        problem, step, offset=str(start), oldest=str(oldest), **about
    )


SystemFactory = Callable[["Lake"], StreamSystem]
LAKE = "lake"
CHANGES = "changes"
CHANGE_IMAGES = "change-images"
"""The system of the changes of datasets, and that of changes with the entries before and after."""
_registered: dict[str, SystemFactory] = {}
# Adjunct's own systems of streams of files, whose module registers them when it is first needed.
_MODULES = {
    "delta": "dagster_adjunct.resources.file_streams.delta",
    "files": "dagster_adjunct.resources.file_streams.folder",
    "iceberg": "dagster_adjunct.resources.file_streams.iceberg",
}


@validated
def register_system(name: str, factory: SystemFactory) -> None:
    """Register `factory`, a function from a Lake to a StreamSystem, as `name`.

    Registering the same factory again does nothing; another one of this name raises
    ConfigurationError.
    """
    check_name("system", name)
    if name == LAKE or _registered.setdefault(name, factory) is not factory:
        problem = f"stream system {name!r} is already registered."
        raise errors.ConfigurationError(
            problem, "Register this one under another name.", system=name
        )


def registered_systems() -> Mapping[str, SystemFactory]:
    """Return the registered systems' factories by name."""
    for module in _MODULES.values():
        import_module(module)
    return _registered
