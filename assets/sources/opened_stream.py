"""A dataset's opened input stream: its columns, partitions and records, and whether it was recreated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_adjunct.assets.declaration.change_values import PositionType, position_type
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.extractors import Projection, PythonExtractor
from dagster_adjunct.assets.sources.changes import derive_row_schema
from dagster_adjunct.assets.sources.entries import derive_entry_schema
from dagster_adjunct.assets.versions.version import DatasetDeclaration, declaration_from_spec
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import DatasetError, OffsetOutOfRangeError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import (
    EPOCH,
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
            problem = f"dataset {spec.name!r} (input {spec.input}): the stream's records are raw, without columns."
            raise DatasetError(problem, "Use an input stream that declares its schema.", dataset=spec.name)
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
        """Whether partition i of the stream holds exactly bucket i of the dataset: no exchange is needed.

        Entries then hash like their records: the bucketing columns are unchanged columns of the records.
        """
        spec, info, names = self.spec, self.info, self.spec.partition_by
        same = info.partitioner == "spark-murmur3" and spec.partitions == info.partitions and info.key == names
        if not same or not spec.following.changes.keeps(names):
            return False
        if spec.extractor is None:
            return True
        ours = isinstance(spec.extractor, Projection | PythonExtractor)  # others may shuffle
        return (
            ours
            and info.schema is not None
            and spec.extractor.keeps(names)
            and info.schema.select(names) == self.schema.select(names)
        )

    def last_offsets(self, known: Offsets, oldest: Offsets, upcoming: Offsets) -> dict[SystemStreamPartition, str]:
        """Return the start offsets of a table without bootstrap: its last offsets, or the stream's default.

        `known` are the last offsets of the partitions that it has read. Removed records are skipped.
        """
        default = oldest if self.info.default_offset == "oldest" else upcoming

        def later(left: str, right: str) -> str:
            return left if self.system.compare(left, right) >= 0 else right

        return {ssp: later(known[ssp], oldest[ssp]) if ssp in known else default[ssp] for ssp in self.ssps}

    def recreated_error(
        self, before: str | None, read_to: Offsets, ends: Offsets, *, deleted_next: str, rewritten_next: str = ""
    ) -> OffsetOutOfRangeError | None:
        """Return the error for a stream that is not the one that the dataset has read; None if it is the same.

        It is another one if its identity differs from `before`, or if it ends before the offsets read. The next step
        depends on whether it was deleted, or repartitioned before all of it was read.
        """
        name, stream, compare = self.spec.name, str(self.spec.input), self.system.compare
        beyond = next((ssp for ssp, offset in read_to.items() if ssp in ends and compare(offset, ends[ssp]) > 0), None)
        if beyond is None and not self.info.was_recreated(before):
            return None
        if self.info.was_repartitioned(before):
            return OffsetOutOfRangeError(
                f"dataset {name!r} had not read all of {stream} when that was rewritten into {self.info.partitions} "
                "partition(s).",
                f"Its new offsets can't be compared with the old ones. What is served stays. {rewritten_next}",
                dataset=name,
                stream=stream,
            )
        next_step = f"The stream was deleted and recreated: {deleted_next}"
        if beyond is None:
            problem = f"dataset {name!r} was read from another stream under the name {stream}."
            return OffsetOutOfRangeError(problem, next_step, dataset=name, stream=stream)
        return OffsetOutOfRangeError(
            f"dataset {name!r} has read {beyond} up to offset {read_to[beyond]}, and the stream ends at "
            f"{ends[beyond]}.",
            next_step,
            dataset=name,
            stream=stream,
            partition=beyond.partition,
            offset=read_to[beyond],
            upcoming=ends[beyond],
        )

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
        problem = f"{what}, and no stream system {system!r} is given: there are {', '.join(sorted(systems)) or 'none'}."
        raise DatasetError(problem, "Pass the result of open_system(lake, name) in systems.", dataset=dataset)
    return systems[system], stream
