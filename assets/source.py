"""The input stream of a dataset: what it says of itself, its positions, and exact reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assets.manifest import Declaration
from resources.errors import DatasetError, OffsetOutOfRangeError
from resources.names import split_stream_name
from resources.schema import Schema, check_key_types
from resources.streams.ssp import SystemStreamPartition
from resources.streams.system import Marker, OffsetRange, StreamInfo, StreamSystem

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from assets.dataset import AdjunctDataset

Ranges = Mapping[SystemStreamPartition, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset's input, opened: `schema` is what the dataset stores of it."""

    spec: AdjunctDataset
    system: StreamSystem
    info: StreamInfo
    ssps: tuple[SystemStreamPartition, ...]
    schema: Schema

    @classmethod
    def of(cls, systems: Mapping[str, StreamSystem], spec: AdjunctDataset) -> Source:
        """Open the input of `spec` and check that its columns can make this dataset."""
        name, stream = split_stream_name(spec.input)
        if name not in systems:
            raise DatasetError(
                f"dataset {spec.name!r} has the input {spec.input}, and no stream system {name!r} is given: there "
                f"are {', '.join(sorted(systems)) or 'none'}.",
                "Pass it in systems, as open_system(name, lake) gives it.",
            )
        system = systems[name]
        info = system.info(stream)
        what = f"dataset {spec.name!r} (input {spec.input})"
        if info.schema is None:
            raise DatasetError(
                f"{what}: the stream's records are raw, without columns.",
                "Use a stream that declares its schema as the input.",
            )
        schema = info.schema if spec.columns is None else info.schema.select(spec.columns, what)
        check_key_types(schema, spec.key, what)
        return cls(spec, system, info, tuple(system.partitions(stream)), schema)

    @property
    def declaration(self) -> Declaration:
        """What the manifest keeps of the specification and its input."""
        spec = self.spec
        return Declaration(
            kind=spec.kind,
            input=spec.input,
            key=spec.key,
            key_types=tuple(self.schema.field(name).type for name in spec.key),
            partition_by=spec.partition_by,
            partitions=spec.partitions,
            input_partitions=len(self.ssps),
            columns=spec.columns,
            bootstrap=spec.bootstrap,
        )

    @property
    def copartitioned(self) -> bool:
        """Whether partition i of the stream holds exactly bucket i of the dataset: no exchange is needed."""
        return (
            self.info.partitioner == "spark-murmur3"
            and self.spec.partitions == self.info.partitions
            and self.info.key == self.spec.partition_by
        )

    @property
    def one_partition_a_key(self) -> bool:
        """Whether all records of one dataset key lie in one stream partition, where offsets order them."""
        return self.info.partitions == 1 or (
            bool(self.info.key) and self.info.partitioner != "unknown" and set(self.info.key) <= set(self.spec.key)
        )

    def markers(self, since: Mapping[SystemStreamPartition, str]) -> list[Marker]:
        """Return the markers at or after these offsets."""
        return self.system.markers(self.info.name, since)

    def count(self, ranges: Ranges) -> int:
        """Return how many records the ranges hold, without reading them."""
        return self.system.records_between(_spans(ranges))

    def counts(self, ranges: Ranges) -> dict[SystemStreamPartition, int]:
        """Return how many records each range holds; one look at the index where offsets have no holes."""
        widths = {ssp: int(end) - int(start) for ssp, (start, end) in ranges.items()}
        if self.count(ranges) == sum(widths.values()):
            return widths
        return {ssp: self.count({ssp: span}) for ssp, span in ranges.items()}

    def read(self, spark: SparkSession, ranges: Ranges) -> DataFrame:
        """Return the records of these ranges, with the stream's meta columns."""
        try:
            return self.system.read(spark, _spans(ranges))
        except OffsetOutOfRangeError as error:
            raise OffsetOutOfRangeError(
                f"dataset {self.spec.name!r} goes on where its input does not reach back any more: {error.problem}",
                "Deliver the content again into a new stream and declare the dataset on it under a new name; "
                "the sealed versions stay readable. A longer retention of the stream keeps this from happening.",
            ) from error


def _spans(ranges: Ranges) -> dict[SystemStreamPartition, OffsetRange]:
    return {ssp: OffsetRange(start, end) for ssp, (start, end) in ranges.items()}


def by_partition(offsets: Mapping[str, str]) -> dict[SystemStreamPartition, str]:
    """Return stored offsets by stream partition, in order of the partitions."""
    return dict(sorted((SystemStreamPartition.parse(text), offset) for text, offset in offsets.items()))


def as_stored(offsets: Mapping[SystemStreamPartition, str]) -> dict[str, str]:
    """Return offsets as a manifest stores them."""
    return {str(ssp): offsets[ssp] for ssp in sorted(offsets)}
