"""A dataset's opened input stream: its columns, partitions and records, and whether it was recreated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_adjunct.assets.declaration.change_values import PositionType, Samples, position_type
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.extractors import Projection, PythonExtractor
from dagster_adjunct.assets.sources.changes import decode_changes, derive_row_schema, shift_positions
from dagster_adjunct.assets.sources.entries import derive_entry_schema
from dagster_adjunct.assets.versions.version import DatasetDeclaration, declaration_from_spec
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import DatasetError, OffsetOutOfRangeError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    OFFSET,
    PARTITION,
    Marker,
    OffsetRange,
    StreamInfo,
    StreamSystem,
    SystemStreamPartition,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


Offsets = Mapping[SystemStreamPartition, str]
Ranges = Mapping[SystemStreamPartition, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class OpenedStream:
    """A dataset's opened input stream; `schema` are the columns that the dataset stores."""

    spec: AdjunctDataset
    system: StreamSystem
    info: StreamInfo
    ssps: tuple[SystemStreamPartition, ...]
    schema: Schema

    @classmethod
    def of(cls, systems: Mapping[str, StreamSystem], spec: AdjunctDataset, *, at_once: bool = False) -> OpenedStream:
        """Open the input of `spec`, and check that its columns and the order of its changes fit the dataset.

        With `at_once`, the stream is read once: later calls return its ends and markers as of now.
        """
        if spec.is_local:
            raise DatasetError(
                f"dataset {spec.name!r} is a local table: its application writes it, and it has no input stream.",
                f"To rebuild it, delete it (adjunct dataset delete {spec.name} --reason …), and let the application "
                "read its input again from an earlier offset: adjunct startpoint set.",
                dataset=spec.name,
            )
        what = f"dataset {spec.name!r} has the input {spec.input}"
        system, stream = resolve_stream(systems, str(spec.input), what, dataset=spec.name)
        system = system.snapshot(stream) if at_once else system
        info = system.info(stream)
        if info.schema is None:
            raise DatasetError(
                f"dataset {spec.name!r} (input {spec.input}): the stream's records are raw, without columns.",
                "Use an input stream that declares its schema.",
                dataset=spec.name,
            )
        entries = derive_entry_schema(spec, derive_row_schema(spec, info.schema))
        if spec.follows_changes:
            check_changes_ordered(spec, info.key, info.partitions, info.partitioner)
        return cls(spec, system, info, tuple(system.partitions(stream)), entries)

    @property
    def declaration(self) -> DatasetDeclaration:
        """The declaration that the manifest stores."""
        return declaration_from_spec(
            self.spec, self.schema, input_partitions=len(self.ssps), position_type=self.position_type
        )

    @property
    def position_type(self) -> PositionType:
        """The type of the changes' positions."""
        order, records = self.spec.following.order, self.info.schema
        if order is None or records is None:
            return "bigint"
        return position_type(order, derive_row_schema(self.spec, records))

    @property
    def copartitioned(self) -> bool:
        """Whether partition i of the stream holds exactly bucket i of the dataset: no exchange is needed."""
        return (
            self.info.partitioner == "spark-murmur3"
            and self.spec.partitions == self.info.partitions
            and self.info.key == self.spec.partition_by
            and self._keeps_partitions()
        )

    def _keeps_partitions(self) -> bool:
        """Whether entries hash like their records: the bucketing columns are unchanged columns of the records."""
        extractor, records, names = self.spec.extractor, self.info.schema, self.spec.partition_by
        if not self.spec.following.changes.keeps(names):
            return False
        if extractor is None or records is None:
            return extractor is None
        ours = isinstance(extractor, Projection | PythonExtractor)  # others may shuffle
        return ours and extractor.keeps(names) and records.select(names) == self.schema.select(names)

    @property
    def has_one_partition_per_key(self) -> bool:
        """Whether all records of one dataset key are in one stream partition, where offsets order them."""
        return has_one_partition_per_key(self.spec, self.info.key, self.info.partitions, self.info.partitioner)

    @property
    def tie_break(self) -> tuple[str, ...]:
        """The columns that order changes of one key with the same position."""
        return () if self.spec.following.order_by is None else (OFFSET, PARTITION)

    def last_offsets(self, known: Offsets, oldest: Offsets, upcoming: Offsets) -> dict[SystemStreamPartition, str]:
        """Return the start offsets of a table without bootstrap: its last offsets, or the stream's default.

        `known` are the last offsets of the partitions that it has read. Removed records are skipped.
        """
        default = oldest if self.info.default_offset == "oldest" else upcoming

        def later(left: str, right: str) -> str:
            return left if self.system.compare(left, right) >= 0 else right

        return {ssp: later(known[ssp], oldest[ssp]) if ssp in known else default[ssp] for ssp in self.ssps}

    def markers(self, since: Offsets) -> list[Marker]:
        """Return the markers at or after these offsets."""
        return self.system.markers(self.info.name, since)

    def count(self, ranges: Ranges) -> int:
        """Return the number of records in the ranges, without reading them."""
        return self.system.records_between(_offset_ranges(ranges))

    def counts(self, ranges: Ranges) -> dict[SystemStreamPartition, int]:
        """Return the number of records in each range; one index lookup if offsets have no gaps."""
        widths = {ssp: int(end) - int(start) for ssp, (start, end) in ranges.items()}
        if self.count(ranges) == sum(widths.values()):
            return widths
        return {ssp: self.count({ssp: span}) for ssp, span in ranges.items()}

    def read(self, spark: SparkSession, ranges: Ranges) -> DataFrame:
        """Return the records of these ranges, with the columns of META."""
        with self._explain_lost_records():
            return self.system.read(spark, _offset_ranges(ranges)).drop(EPOCH)

    def read_arrow(self, ranges: Ranges) -> pa.Table:
        """Return the same without Spark, ordered by partition and offset. All of it is held in memory."""
        with self._explain_lost_records():
            return self.system.read_arrow(_offset_ranges(ranges)).drop_columns([EPOCH])

    @contextmanager
    def _explain_lost_records(self) -> Iterator[None]:
        try:
            yield
        except OffsetOutOfRangeError as error:
            raise OffsetOutOfRangeError(
                f"dataset {self.spec.name!r} lost records that it was about to read: {error.problem}",
                "What is served stays. Advance it again: a bounded dataset resumes with the first complete version "
                "on the stream, an unbounded one as on_lost_offset declares. Keep the stream longer, or advance the "
                "dataset more often.",
                dataset=self.spec.name,
            ) from error

    def read_changes(
        self, spark: SparkSession, ranges: Ranges, *, positions_from: int = 0, samples: Samples | None = None
    ) -> tuple[DataFrame, Samples | None]:
        """Return the changes made from the records of these ranges, as `ChangeDecoder.read_changes` does."""
        assert self.info.schema is not None, "raw records are rejected when the input is opened"
        records = self.read(spark, ranges)
        changes, samples = decode_changes(
            self.spec, records, self.info.schema, self.schema, partitions=len(self.ssps), samples=samples
        )
        if positions_from and self.spec.following.order_by is None:
            return shift_positions(changes, positions_from), samples
        return changes, samples


def check_changes_ordered(spec: AdjunctDataset, key: Sequence[str], partitions: int, partitioner: str) -> None:
    """Raise DatasetError if two changes of one key may be in two partitions, where nothing orders them."""
    if spec.following.order_by is not None or has_one_partition_per_key(spec, key, partitions, partitioner):
        return
    keyed = f"keyed by ({', '.join(key)})" if key else "not keyed"
    raise DatasetError(
        f"dataset {spec.name!r} has the key ({', '.join(spec.key)}), and its input {spec.input} is {keyed} over "
        f"{partitions} partitions ({partitioner}): changes of one key could be in several partitions, "
        "where nothing orders them.",
        f"Key the stream by columns of ({', '.join(spec.key)}), give it one partition, or declare order_by=COLUMN.",
        dataset=spec.name,
    )


def has_one_partition_per_key(spec: AdjunctDataset, key: Sequence[str], partitions: int, partitioner: str) -> bool:
    """Whether all records of one dataset key are in one partition of a stream with this key and partitioner."""
    return partitions == 1 or (bool(key) and partitioner != "unknown" and set(key) <= set(spec.key))


def _offset_ranges(ranges: Ranges) -> dict[SystemStreamPartition, OffsetRange]:
    return {ssp: OffsetRange(start, end) for ssp, (start, end) in ranges.items()}


def offsets_by_partition(offsets: Mapping[str, str]) -> dict[SystemStreamPartition, str]:
    """Return stored offsets by stream partition, in order of the partitions."""
    return dict(sorted((SystemStreamPartition.parse(text), offset) for text, offset in offsets.items()))


def offsets_to_json(offsets: Offsets) -> dict[str, str]:
    """Return offsets as a manifest stores them."""
    return {str(ssp): offsets[ssp] for ssp in sorted(offsets)}


def resolve_stream(
    systems: Mapping[str, StreamSystem], name: str, what: str, *, dataset: str | None = None
) -> tuple[StreamSystem, str]:
    """Return the system and the stream for a name such as "lake.planes". Raises DatasetError for an unknown system.

    `what` describes in the error what the stream is for.
    """
    system, stream = split_stream_name(name)
    if system not in systems:
        raise DatasetError(
            f"{what}, and no stream system {system!r} is given: there are {', '.join(sorted(systems)) or 'none'}.",
            "Pass the result of open_system(lake, name) in systems.",
            dataset=dataset,
        )
    return systems[system], stream


def find_partition_beyond_end(
    read_to: Mapping[SystemStreamPartition, str],
    ends: Mapping[SystemStreamPartition, str],
    compare: Callable[[str, str], int],
) -> SystemStreamPartition | None:
    """Return a partition that was read beyond its end, else None."""
    return next((ssp for ssp, offset in read_to.items() if ssp in ends and compare(offset, ends[ssp]) > 0), None)


def recreated_stream_error(
    dataset: str,
    stream: str,
    info: StreamInfo,
    *,
    before: str | None,
    read_to: Mapping[SystemStreamPartition, str],
    ends: Mapping[SystemStreamPartition, str],
    compare: Callable[[str, str], int],
    deleted_next: str,
    rewritten_next: str = "",
) -> OffsetOutOfRangeError | None:
    """Return the error for a stream that is not the one that the dataset has read; None if it is the same.

    It is another one if its identity differs from `before`, or if it ends before the offsets read. The next step
    depends on whether it was deleted, or repartitioned before all of it was read.
    """
    beyond = find_partition_beyond_end(read_to, ends, compare)
    if beyond is None and not info.was_recreated(before):
        return None
    if info.was_repartitioned(before):
        return OffsetOutOfRangeError(
            f"dataset {dataset!r} had not read all of {stream} when that was rewritten into {info.partitions} "
            "partition(s).",
            f"Its new offsets can't be compared with the old ones. What is served stays. {rewritten_next}",
            dataset=dataset,
            stream=stream,
        )
    if beyond is None:
        return OffsetOutOfRangeError(
            f"dataset {dataset!r} was read from another stream under the name {stream}.",
            f"The stream was deleted and recreated: {deleted_next}",
            dataset=dataset,
            stream=stream,
        )
    return OffsetOutOfRangeError(
        f"dataset {dataset!r} has read {beyond} up to offset {read_to[beyond]}, and the stream ends at {ends[beyond]}.",
        f"The stream was deleted and recreated: {deleted_next}",
        dataset=dataset,
        stream=stream,
        partition=beyond.partition,
        offset=read_to[beyond],
        upcoming=ends[beyond],
    )


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """Checks that the input stream of a bounded dataset is the one that it was read from before."""

    stream: OpenedStream
    system: StreamSystem

    def check(self, before: str | None) -> None:
        """Raise OffsetOutOfRangeError if the stream does not have this identity."""
        self._check(before, {}, {})

    def ends_at(self, offsets: Mapping[SystemStreamPartition, int]) -> bool:
        """Whether the stream ends at these offsets. Raises OffsetOutOfRangeError if it ends before them."""
        ends = self.stream.system.upcoming(self.stream.ssps)
        if any(int(ends[ssp]) < offset for ssp, offset in offsets.items()):
            ends = self.system.upcoming(self.stream.ssps)  # another writer may have advanced since the first look
        self._check(None, {ssp: str(offset) for ssp, offset in offsets.items()}, ends)
        return all(int(ends[ssp]) == offset for ssp, offset in offsets.items())

    def _check(
        self,
        before: str | None,
        read_to: Mapping[SystemStreamPartition, str],
        ends: Mapping[SystemStreamPartition, str],
    ) -> None:
        spec = self.stream.spec
        ways_on = (
            "Declare the dataset under a new name to build it separately from there, or delete this one (adjunct "
            f"dataset delete {spec.name} --reason …) and advance it again."
        )
        refusal = recreated_stream_error(
            spec.name,
            str(spec.input),
            self.stream.info,
            before=before,
            read_to=read_to,
            ends=ends,
            compare=self.system.compare,
            deleted_next=f"its versions are not those of before, whatever their names. What is served stays. {ways_on}",
            rewritten_next=ways_on,
        )
        if refusal is not None:
            raise refusal
