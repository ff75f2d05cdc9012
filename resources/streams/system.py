"""What every kind of stream can do, in plain values.

Offsets are strings that only their system orders: compare them with `StreamSystem.compare`, never as text.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_serializer, field_validator

from dagster_adjunct.resources.common import StoredDocument, check_name, first_validation_problem, split_stream_name
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    InvalidNameError,
    OffsetOutOfRangeError,
    ProducerConflictError,
    SchemaMismatchError,
    StreamExistsError,
)
from dagster_adjunct.resources.schemas.schema import Schema, check_key_types

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.resources.objects.lake import Lake


@dataclass(frozen=True, slots=True, order=True)
class SystemStreamPartition:
    """A partition (from 0) of a stream of a system; ordered by system, stream, then partition number."""

    system: str
    stream: str
    partition: int

    def __post_init__(self) -> None:
        check_name("system", self.system)
        check_name("stream", self.stream)
        if not isinstance(self.partition, int) or isinstance(self.partition, bool) or self.partition < 0:
            raise InvalidNameError(
                f"partition {self.partition!r} of {self.system}.{self.stream} is no partition number: "
                "expected an integer from 0.",
                "Number the partitions of a stream from 0.",
                name=str(self.partition),
                stream=f"{self.system}.{self.stream}",
            )

    @classmethod
    def parse(cls, text: str) -> SystemStreamPartition:
        """Return what `str` wrote. Raises InvalidNameError for anything else."""
        return _parse_cached(text) if isinstance(text, str) else cls._parse(text)

    @classmethod
    def _parse(cls, text: str) -> SystemStreamPartition:
        parts = text.split(".") if isinstance(text, str) else []
        # "03" and "٣" are digits too, but then two texts would name one partition.
        if len(parts) != 3 or not parts[2].isdecimal() or str(int(parts[2])) != parts[2]:
            raise InvalidNameError(
                f"stream partition {text!r} can't be read: expected SYSTEM.STREAM.NUMBER.",
                "Write it as in lake.flights.3.",
                name=f"{text!s:.300}",
            )
        return cls(parts[0], parts[1], int(parts[2]))

    @property
    def qualified_stream(self) -> str:
        """`system.stream`, without the partition."""
        return f"{self.system}.{self.stream}"

    def __str__(self) -> str:
        return f"{self.system}.{self.stream}.{self.partition}"


@lru_cache(maxsize=65_536)
def _parse_cached(text: str) -> SystemStreamPartition:
    """The start of a run parses the same few thousand names again and again."""
    return SystemStreamPartition._parse(text)


_NAME_LENGTH = 300


def require_one_stream(system: str, ssps: Iterable[SystemStreamPartition]) -> str:
    """Return the stream to which all these partitions belong."""
    streams = sorted({ssp.qualified_stream for ssp in ssps})
    if len(streams) != 1 or not streams[0].startswith(f"{system}."):
        raise ConfigurationError(
            f"a read names the streams {', '.join(streams) or '(none)'}: expected one of system {system!r}.",
            "Read each stream by itself; their columns differ.",
            system=system,
        )
    return split_stream_name(streams[0])[1]


def missing_partition_error(ssp: SystemStreamPartition, count: int) -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError(
        f"{ssp} does not exist: the stream has {count} partitions, 0 to {count - 1}.",
        "Check the partition.",
        stream=ssp.qualified_stream,
        partition=ssp.partition,
    )


def wants_latest_epochs(epochs: str) -> bool:
    """Return whether the latest results are asked for."""
    if epochs not in ("all", "latest"):
        raise ConfigurationError(
            f"epochs={epochs!r}: expected 'all' or 'latest'.", "Choose one of the two.", argument="epochs"
        )
    return epochs == "latest"


def check_producer(producer: str, sequence: int) -> None:
    """Refuse what can't be remembered exactly."""
    if not isinstance(producer, str) or not 0 < len(producer) <= _NAME_LENGTH:
        raise ConfigurationError(
            f"producer {producer!r} is no name: expected a text of 1 to {_NAME_LENGTH} characters.",
            "Name what appends, the same in every retry: an application's output, an import.",
            argument="producer",
        )
    if not isinstance(sequence, int) or isinstance(sequence, bool) or sequence < 0:
        raise ConfigurationError(
            f"sequence {sequence!r} of producer {producer!r} is not an integer from 0.",
            "Count the producer's appends, with the same number in every retry.",
            argument="sequence",
        )


def stale_sequence_error(stream: str, producer: str, sequence: int, newest: int) -> ProducerConflictError:
    """Return the refusal of a sequence far below the newest one of its producer."""
    return ProducerConflictError(
        f"sequence {sequence} of producer {producer!r} in {stream} is below those that are still known: the newest one "
        f"is {newest}.",
        f"Nothing was added. Give new records the sequence {newest + 1}, or a producer of their own where its counter "
        "began again. What was appended before and is repeated so late is in already.",
        stream=stream,
        producer=producer,
        sequence=sequence,
        newest=newest,
    )


class StreamDeclaration(StoredDocument):
    """What `create` was told of a stream. Systems that are told more have a subclass of it."""

    columns: Any
    key: tuple[str, ...]
    partitions: Annotated[int, Field(ge=1, le=100_000)]

    @field_validator("columns")
    @classmethod
    def _columns_are_a_schema(cls, value: Any) -> Schema:
        return schema_from_stored(value)

    @field_serializer("columns")
    def _write_columns(self, value: Schema) -> list[dict[str, Any]]:
        return value.to_json()

    @property
    def schema_(self) -> Schema:
        schema: Schema = self.columns
        return schema


D = TypeVar("D", bound=StreamDeclaration)


def build_declaration(
    kind: type[D], stream: str, schema: Schema, key: tuple[str, ...], partitions: int, **more: Any
) -> D:
    """Return the declaration of `stream` ("lake.orders"); `more` is what only this kind of it has.

    Raises ConfigurationError or SchemaMismatchError saying what can't be.
    """
    what = f"stream {split_stream_name(stream)[1]!r}"
    if not schema.fields:
        raise SchemaMismatchError(f"{what} has no columns.", "Name at least one column.", stream=stream)
    if len(set(key)) != len(key):
        raise ConfigurationError(
            f"{what}: key columns {list(key)} stand twice.", "Name each once.", argument="key", stream=stream
        )
    check_key_types(schema, key, what)
    if not key and partitions != 1:
        raise ConfigurationError(
            f"{what} has no key and {partitions} partitions: without a key nothing says where a record belongs.",
            "Name key columns, or declare partitions=1.",
            stream=stream,
        )
    try:
        return kind(columns=schema, key=key, partitions=partitions, **more)
    except ValidationError as error:
        raise ConfigurationError(
            f"{what}: {first_validation_problem(error)} (found {error.errors(include_url=False)[0]['input']!r}).",
            "Correct the declaration.",
            stream=stream,
        ) from None


def check_same_declaration(stream: str, stored: StreamDeclaration, wanted: StreamDeclaration) -> None:
    """Raise StreamExistsError with the differences of two declarations of `stream`, if there are any."""
    columns = stored.schema_.difference(wanted.schema_)
    raise_if_different(
        stream,
        [*([f"columns: {columns}"] if columns else []), *describe_differences(stored, wanted)],
        "Declare it as it is, or choose another name.",
    )


def describe_differences(stored: StreamDeclaration, wanted: StreamDeclaration) -> list[str]:
    """Return in words how two declarations of a kind differ in all but their columns.

    What is left out asks for nothing: an application creates its output without knowing what somebody configured since.
    """
    parts = [name for name in type(wanted).model_fields if name != "columns"]
    values = [(part, getattr(stored, part), getattr(wanted, part)) for part in parts]
    return [f"{part} is {new!r}, expected {old!r}" for part, old, new in values if new is not None and old != new]


def raise_if_different(stream: str, differences: list[str], next_step: str) -> None:
    """Raise StreamExistsError if there are any differences between what `stream` is and what it was declared to be."""
    if differences:
        raise StreamExistsError(
            f"stream {split_stream_name(stream)[1]!r} is there and declared otherwise: {'; '.join(differences)}.",
            next_step,
            stream=stream,
        )


def schema_from_stored(value: Any) -> Schema:
    """Return the columns that are stored of a stream, for a field of a document: what they can't be is a ValueError."""
    try:
        return value if isinstance(value, Schema) else Schema.from_json(value)
    except AdjunctError as error:
        raise ValueError(str(error)) from error


_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def micros_from_valid_from(version: str | None, valid_from: datetime | None) -> int | None:
    """Return what a marker stores of `valid_from`. Raises ConfigurationError for a time without zone or version."""
    if valid_from is None:
        return None
    if not isinstance(valid_from, datetime) or valid_from.tzinfo is None or version is None:
        what = "no version is ended" if version is None else f"version {version!r}"
        raise ConfigurationError(
            f"{what}, with valid_from={valid_from!r}: expected a version that ends, and a time with its zone.",
            "Give end_of_dataset, and a datetime with tzinfo=UTC.",
            argument="valid_from",
        )
    return (valid_from - _UNIX_EPOCH) // timedelta(microseconds=1)


def time_from_micros(micros: int) -> datetime:
    """Return the moment that a marker stores."""
    return _UNIX_EPOCH + timedelta(microseconds=micros)


# Columns that a read adds to the record's own. Those of META go on with what is made of records: a dataset's entries
# have them, too. The epoch is a stream's alone: 0, and more in what a replay wrote.
PARTITION = "__partition"
OFFSET = "__offset"
TIMESTAMP = "__timestamp"
TOMBSTONE = "__tombstone"
EPOCH = "__epoch"
# What a stream's partitions begin at: a later oldest offset says that records were dropped.
FIRST_OFFSET = "0"
META = (PARTITION, OFFSET, TIMESTAMP, TOMBSTONE)
RECORD_META = (*META, EPOCH)
# What tells a record made by an application where it was made from: the input's partition ("lake.orders.3"), offset and
# epoch there, and who read it. Reads add these only where they are asked for; null where the producer gave none.
SOURCE = "__source"
SOURCE_OFFSET = "__source_offset"
SOURCE_EPOCH = "__source_epoch"
READER = "__source_reader"
POSITION = (SOURCE, SOURCE_OFFSET, SOURCE_EPOCH, READER)
RECORD_META_DDL = (
    f"`{PARTITION}` INT, `{OFFSET}` BIGINT, `{TIMESTAMP}` TIMESTAMP, `{TOMBSTONE}` BOOLEAN, `{EPOCH}` INT NOT NULL"
)

# Which records of a replayed output a read gives: all, or the latest results of each source record.
Epochs = Literal["all", "latest"]
Partitioner = Literal["spark-murmur3", "kafka-murmur2", "unknown"]


@dataclass(frozen=True, slots=True)
class Repartitioning:
    """That a stream was rewritten into other partitions: those of the stream `identity` ended at the offsets `ended`,
    by number, and who had read to there goes on at `went_on` in these."""

    identity: str
    ended: tuple[str, ...]
    went_on: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What a stream says of itself.

    `partitioner` is the hash that gave records to partitions: equal counts prove nothing when two streams hash
    differently. `schema` is None where records are raw. `default_offset` says where a reader without a
    checkpoint begins; None leaves that to the system. `compacted` says that the stream keeps the newest record of
    every key, and `tombstones_kept` for how long it then keeps deletions. `identity`, where the system has one, is
    another one after the stream was deleted and made anew, or `repartitioned`.
    """

    name: str
    partitions: int
    key: tuple[str, ...]
    partitioner: Partitioner
    schema: Schema | None
    default_offset: Literal["oldest", "upcoming"] | None = None
    compacted: bool = False
    tombstones_kept: timedelta | None = None
    identity: str | None = None
    repartitioned: Repartitioning | None = None

    def tells_all(self, oldest: Mapping[SystemStreamPartition, str]) -> bool:
        """Whether reading the stream from these oldest offsets gives the newest record of every key it ever held."""
        return self.compacted or all(offset == FIRST_OFFSET for offset in oldest.values())

    def was_recreated(self, before: str | None) -> bool:
        """Whether the stream is no more the one of this identity, as far as its system tells: it was made anew."""
        return before is not None and self.identity is not None and before != self.identity

    def was_repartitioned(self, before: str | None) -> bool:
        """Whether the stream holds the records of the one of this identity, in other partitions."""
        return self.repartitioned is not None and self.repartitioned.identity == before

    def change_since(self, before: str | None) -> str:
        """Return what was done to the stream of this identity, which is another one by now: words after "was"."""
        return f"repartitioned into {self.partitions}" if self.was_repartitioned(before) else "deleted and made anew"


@dataclass(frozen=True, slots=True)
class NewStreams:
    """What is known of any stream that a system makes, before it is made: a plan goes by it.

    `partitioner` is the hash that will give records with a key to partitions. `needs_key` says that without a key there
    can be one partition only, and `typed` that a stream has columns of the types of `Schema`, and no others.
    """

    partitioner: Partitioner = "unknown"
    needs_key: bool = False
    typed: bool = False


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets from `start` up to, but without, `end`."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class Marker:
    """An end-of-dataset marker: the records of the version named `version` end before `offset` in this partition.

    It takes one offset and is no record. `rows` counts the partition's records of the version where the producer
    told, or since the marker before where the stream `counted` them itself. A `checksum` as `records_checksum`
    gives it (r2-…) is that of the partition's records, and is compared with them; one of any other form is the
    producer's own, compared only when the marker comes again. `valid_from` is since when the version is valid, where
    the producer told. `partitions` is how many the stream had then, where the marker says it: the version has records
    in these alone, however many are added later.
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
    """Where an append stands: by partition number, its first offset and the offset after its last.

    `rows` counts records without markers. `duplicate` says that this producer's sequence was in already and
    nothing was added; the offsets then are those of the first time, and empty if that is too long ago to know.
    """

    first: Mapping[int, str]
    next: Mapping[int, str]
    rows: int
    duplicate: bool = False


class StreamSystem(ABC):
    """A system of streams: admin and consumer in one (Samza's SystemAdmin and SystemConsumer).

    Reads are of exact, bounded ranges, so a batch can be read again as it was. All methods raise
    StreamNotFoundError for a stream that is not there. What a system need not have, it need not define: creating and
    appending, markers, positions by time (then `unsupported_startpoints` names "timestamp").
    """

    name: str
    default_offset: Literal["oldest", "upcoming"] | None = None
    # Whether the offsets of an append hold its records and no others, so that reading them gives it back.
    appends_alone: bool = False
    # Whether `create` takes columns that are added or widened.
    evolves: bool = False
    # What a plan may count on of a stream that `create` is yet to make.
    new_streams: NewStreams = NewStreams()
    # Whether offsets are numbers that grow, so that others may compare them.
    numbered_offsets: bool = False
    # Whether `append` takes the columns of POSITION and `sources`; they are not handed to a system that does not.
    keeps_positions = False
    # Whether `append` takes `one_task`: of few records, one task writes all partitions. Others are not handed it.
    appends_by_one_task: bool = False
    # Whether `records_between` answers without reading the records.
    counts_unread: bool = False
    # Whether reading few of the columns costs less than reading all: then they may be read more than once.
    reads_columns: bool = False
    # Whether `read_arrow` gives records without Spark.
    reads_arrow: bool = False
    # Whether `task_reads` gives what tasks read records with.
    reads_in_tasks: bool = False
    # The kinds of startpoints ("oldest", "upcoming", "timestamp", "specific") that the system can't resolve.
    unsupported_startpoints: Collection[str] = ()

    @abstractmethod
    def list_streams(self) -> list[str]:
        """Return the names of all streams, sorted."""

    def create(self, name: str, *, schema: Schema, key: Sequence[str] = (), partitions: int) -> StreamInfo:
        """Create a stream, or do nothing if it is there and declared equally. Raises StreamExistsError.

        A system that `evolves` gives a stream that is there the columns that the declaration adds or widens.
        """
        raise self._unable("create streams", "Create it with the system's own tools, or send to another system.")

    def check_create(self, name: str, *, schema: Schema, key: Sequence[str] = (), partitions: int) -> None:
        """Raise what `create` would raise for this declaration, where that can be told without changing anything.

        A system that can't create at all says so here, too: before a batch that sends to it is begun.
        """
        if type(self).create is StreamSystem.create:
            StreamSystem.create(self, name, schema=schema, key=key, partitions=partitions)

    @abstractmethod
    def info(self, stream: str) -> StreamInfo: ...

    def stored_bytes(self, stream: str) -> int | None:
        """Return how many bytes the stream holds, where that is known without reading records."""
        return None

    @abstractmethod
    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        """Return the first offset that can be read of each partition (`upcoming` where it is empty)."""

    @abstractmethod
    def upcoming(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        """Return the offset that the next record of each partition will have."""

    def offset_for_timestamp(self, ssp: SystemStreamPartition, timestamp_ms: int) -> str:
        """Return the offset of the first record, in offset order, at or after this time (ms since the epoch).

        `upcoming` where there is none.
        """
        raise self._unable("find records by their time", "Start at an offset, or at the oldest or the next record.")

    @abstractmethod
    def compare(self, left: str, right: str) -> int:
        """Return -1, 0 or 1 as `left` comes before, is, or comes after `right`."""

    @abstractmethod
    def distance(self, ssp: SystemStreamPartition, start: str, end: str) -> int:
        """Return how many offsets lie in [start, end): an upper bound of its records, found without reading."""

    @abstractmethod
    def advance(self, ssp: SystemStreamPartition, start: str, count: int) -> str:
        """Return the offset `count` offsets after `start`."""

    @abstractmethod
    def read(self, spark: SparkSession, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> DataFrame:
        """Return exactly the records of these ranges of one stream: its columns, then those of RECORD_META.

        `__epoch` is 0 where the producer gave none, never null.
        Raises OffsetOutOfRangeError for a range that the stream does not hold whole.
        """

    def read_arrow(
        self, ranges: Mapping[SystemStreamPartition, OffsetRange], columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return what `read` does without Spark, ordered by partition and offset; all of it is held in memory.

        Of the stream's own columns only these, when given; those of RECORD_META always.
        """
        raise self._unable("be read without Spark", "Pass a Spark session.")

    def task_reads(
        self, ranges: Mapping[SystemStreamPartition, OffsetRange], columns: Sequence[str]
    ) -> Callable[[int], Iterator[pa.Table]]:
        """Return what yields, called with a partition, its records in order: these columns, then those of RECORD_META.

        It can be pickled, for tasks.
        """
        raise self._unable("be read by tasks", "Pass a Spark session.")

    def append(
        self,
        stream: str,
        data: DataFrame | pa.Table,
        *,
        producer: str,
        sequence: int,
        end_of_dataset: str | None = None,
        order_by: Sequence[str] = (),
        partitioned: bool = False,
        consumed: Mapping[SystemStreamPartition, str] | None = None,
    ) -> AppendResult:
        """Add records, all or none, once per producer and sequence.

        `consumed` has the input's offsets after this batch: a system that can, commits them with the records, for
        its own tools to show. Nothing of Adjunct's reads them back. One that `keeps_positions` takes `sources` as
        well: the ranges that the records were made of (`Sources`).
        """
        raise self._unable("append", "Send to a stream of another system.")

    def appended(self, stream: str, producer: str, sequence: int) -> AppendResult | None:
        """Return the result of an append that is in already, or None.

        Raises ProducerConflictError for a sequence so far below the newest that nobody knows it any more.
        """
        raise self._unable("tell what was appended", "Append again with the same producer and sequence.")

    def markers(self, stream: str, since: Mapping[SystemStreamPartition, str] | None = None) -> list[Marker]:
        """Return the end-of-dataset markers at or after these offsets (of all partitions when None), in order.

        A system without markers has none: no version of a bounded dataset is ever whole on its streams.
        """
        return []

    def records_between(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> int:
        """Return how many records the ranges hold; markers take offsets but are no records.

        Every offset counts as a record unless the system says better: one with markers or holes has to.
        """
        return sum(self.distance(ssp, span.start, span.end) for ssp, span in ranges.items())

    def tells_all(self, stream: str) -> bool:
        """Whether reading the stream from its oldest offset gives the newest record of every key it ever held."""
        return self.info(stream).tells_all(self.oldest(self.partitions(stream)))

    def snapshot(self, stream: str) -> StreamSystem:
        """Return this system as it answers questions about one stream now, for a reader that asks several.

        Where looking costs requests, its answers are all of one moment and found once. Not for writing.
        """
        return self

    def partitions(self, stream: str) -> list[SystemStreamPartition]:
        """Return the stream's partitions, in order."""
        return [SystemStreamPartition(self.name, stream, p) for p in range(self.info(stream).partitions)]

    def _unable(self, what: str, next_step: str) -> ConfigurationError:
        return ConfigurationError(f"stream system {self.name!r} can't {what}.", next_step, system=self.name)


# One way of writing each number, within 64 bits: "0003" would be offset 3, and another text than "3".
_OFFSET = re.compile(r"0|[1-9][0-9]{0,18}")


class NumberedOffsets(StreamSystem):
    """A stream system whose offsets are numbers, written in decimal digits."""

    numbered_offsets = True

    def compare(self, left: str, right: str) -> int:
        a, b = parse_offset(left, self.name), parse_offset(right, self.name)
        return (a > b) - (a < b)

    def distance(self, ssp: SystemStreamPartition, start: str, end: str) -> int:
        return max(parse_offset(end, str(ssp)) - parse_offset(start, str(ssp)), 0)

    def advance(self, ssp: SystemStreamPartition, start: str, count: int) -> str:
        return str(parse_offset(start, str(ssp)) + count)


def parse_offset(text: str, what: str) -> int:
    """Return an offset as a number; `what` says in the error whose it is. Raises OffsetOutOfRangeError."""
    if isinstance(text, str) and _OFFSET.fullmatch(text):
        return int(text)
    raise OffsetOutOfRangeError(
        f"{what}: {text!r:.80} is no offset there: expected decimal digits, the first of several not 0, as in '42'.",
        "Use offsets as this system gave them out.",
        offset=f"{text!s:.80}",
    )


@dataclass(frozen=True, slots=True)
class OffsetRangeChecker:
    """The words in which a system says what it holds: of a "topic", say, up to its `upcoming` offset.

    `dropped` is what to do where records before the oldest are asked for, and `ahead` where the range ends too late.
    """

    of: str
    upcoming: str
    dropped: str
    ahead: str

    def check(self, ssp: SystemStreamPartition, start: int, end: int, oldest: int, upcoming: int) -> None:
        """Raise OffsetOutOfRangeError for a range that the partition does not hold whole."""
        if start > end:
            problem = f"{ssp}: the range begins at {start}, after its end {end}."
            raise _out_of_range(ssp, start, problem, "Give the smaller offset first.")
        if start < oldest:
            raise self.too_old_error(ssp, start, oldest)
        if end > upcoming:
            problem = f"{ssp}: the range ends at offset {end}, {self.upcoming} is {upcoming}."
            step = f"End at {upcoming} or before{self.ahead}"
            raise _out_of_range(ssp, end, problem, step, upcoming=str(upcoming))

    def too_old_error(self, ssp: SystemStreamPartition, start: int, oldest: int) -> OffsetOutOfRangeError:
        """Return the error for a range that begins before what is still held."""
        problem = f"{ssp}: the range begins at offset {start}, the oldest that the {self.of} still holds is {oldest}."
        return _out_of_range(ssp, start, problem, self.dropped, oldest=str(oldest))


def _out_of_range(
    ssp: SystemStreamPartition, offset: int, problem: str, next_step: str, **edge: str
) -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError(
        problem, next_step, stream=ssp.qualified_stream, partition=ssp.partition, offset=str(offset), **edge
    )


SystemFactory = Callable[["Lake"], StreamSystem]
LAKE = "lake"
_registered: dict[str, SystemFactory] = {}


def register_system(name: str, factory: SystemFactory) -> None:
    """Make `name` a system: `factory(lake)` gives its StreamSystem. The same factory may register again."""
    check_name("system", name)
    if name == LAKE or _registered.setdefault(name, factory) is not factory:
        raise ConfigurationError(
            f"stream system {name!r} is registered already.", "Register the second one under another name.", system=name
        )


def registered_systems() -> Mapping[str, SystemFactory]:
    """Return what was registered."""
    return _registered


@dataclass(frozen=True, slots=True)
class SourceRange:
    """The offsets [start, end) of a partition ("lake.orders.3") that an append was made of, read in `epoch`."""

    source: str
    start: int
    end: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Sources:
    """All that an append was made of: ranges of `stream` ("lake.orders").

    `reader` names who read it, and the stream's identity where that has one: one made anew holds other records.
    """

    stream: str
    reader: str
    ranges: tuple[SourceRange, ...]
