"""Versions on a stream, on which a marker in every partition ends a version."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.dataset import BoundedDataset
from dagster_adjunct.assets.sources import entries
from dagster_adjunct.assets.sources.entries import Offsets
from dagster_adjunct.assets.sources.markers import (
    CompleteVersion,
    IncompleteVersion,
    IntOffsets,
    MarkedSegment,
    check_counts,
    check_repeats,
    describe_redeliveries,
    find_next_delivery,
    find_truncated_partitions,
    position_from_manifest,
    resume_after_truncation,
)
from dagster_adjunct.assets.sources.version_source import (
    Awaiting,
    Delivery,
    VersionSource,
    contradiction_error,
)
from dagster_adjunct.assets.versions.manifest import (
    BoundedManifest,
    DatasetManifest,
    Lost,
    follow_added_partitions,
    follow_repartition,
)
from dagster_adjunct.resources.bucketing import hashing
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.system import (
    FIRST_OFFSET,
    META,
    OFFSET,
    PARTITION,
    Marker,
    StreamSystem,
    SystemStreamPartition,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NONE: Offsets = {}


class StreamSource(VersionSource):
    """The versions on a dataset's input stream, as of when this was opened."""

    def __init__(
        self,
        systems: Mapping[str, StreamSystem],
        spec: BoundedDataset,
        *,
        now: Callable[[], datetime],
    ) -> None:
        stream = entries.open_stream(systems, spec)
        self._stream = stream
        # Offsets order the records of one key; the partition breaks ties if a key can be in several
        # partitions.
        info = stream.info
        has_one_partition = entries.has_one_partition_per_key(
            spec, info.key, info.partitions, info.partitioner
        )
        ordered_by = (OFFSET,) if has_one_partition else (OFFSET, PARTITION)
        super().__init__(spec, stream.schema, stream.declaration, ordered_by)
        self.copartitioned = stream.copartitioned
        self.info = info
        self._now = now
        self.ordered_by_offset = info.partitions > 1 and not spec.by_offset
        self._system = systems[split_stream_name(str(spec.input)).system]
        # Markers read before, and the offsets from which on they are complete.
        self._seen: tuple[dict[SystemStreamPartition, int], list[Marker]] | None = None

    def first_manifest(self) -> BoundedManifest:
        """Return a manifest that starts at the first offset of each partition, even if retention
        has removed it.
        """
        offsets = entries.offsets_to_json(dict.fromkeys(self._stream.ssps, FIRST_OFFSET))
        return BoundedManifest(
            name=self.spec.name,
            declaration=self.declaration,
            stream=self.info.identity,
            offsets=offsets,
        )

    def follow_repartition(self, stored: DatasetManifest) -> DatasetManifest | None:
        """Return a stored manifest at its position in a stream that was repartitioned, or got more
        partitions.

        None if neither happened, or if the dataset had unread records when the stream was
        repartitioned.
        """
        return follow_repartition(stored, self.info) or follow_added_partitions(stored, self.info)

    def resume_manifest(self, stored: DatasetManifest) -> BoundedManifest:
        """Return a stored manifest to continue from; see `VersionSource`."""
        # Before the declaration, which would also differ for a stream recreated with other
        # partitions.
        if stored.declaration.input == self.declaration.input:
            self._raise_if_recreated(stored.stream)
        return super().resume_manifest(stored)

    def next(self, manifest: BoundedManifest) -> Delivery | Awaiting:
        """Return the next complete version, or the partitions without its marker.

        If retention has removed unread records, the dataset resumes with the next version that is
        whole; until that is known, its offsets stay. Raises MarkerConflictError for contradictory
        markers, and OffsetOutOfRangeError for a recreated stream.
        """
        self._raise_if_recreated(manifest.stream)
        offsets, settled, reusable = position_from_manifest(manifest)
        oldest: dict[SystemStreamPartition, int] = {}
        for ssp, offset in self._stream.system.oldest(self._stream.ssps).items():
            oldest[ssp] = int(offset)
        markers = self._markers(offsets)
        name = self.spec.name
        left_out = self.outside(marker.version for marker in markers) - set(settled)
        settled = {**settled, **{version: {} for version in left_out}}
        lost = self._find_loss(offsets, oldest)
        resumed = resume_after_truncation(name, offsets, oldest, markers, settled, self._count)
        has_commit = manifest.change is not None
        if isinstance(resumed, IncompleteVersion):
            # The offsets stay: only the next markers tell which versions are lost.
            start = {ssp: max(offset, oldest[ssp]) for ssp, offset in offsets.items()}
            answer = replace(self._await(resumed, start), offsets=manifest.offsets)
            if lost is None or not has_commit:
                return answer
            return replace(answer, notes=(lost.summary(),))
        if lost is not None:
            lost = lost.model_copy(update={"versions": resumed.lost})
        # A dataset without a commit only reports losses of versions that it can name.
        if not resumed.lost and not has_commit:
            lost = None
        reusable |= set(resumed.lost)
        upcoming = find_next_delivery(name, resumed.offsets, markers, settled, reusable)
        return replace(self._without_redeliveries(upcoming, manifest, left_out, markers), lost=lost)

    def _find_loss(self, offsets: IntOffsets, oldest: IntOffsets) -> Lost | None:
        """Return the ranges of unread offsets that retention has removed, None without any."""
        ranges = {}
        for ssp in find_truncated_partitions(offsets, oldest):
            ranges[str(ssp)] = (str(offsets[ssp]), str(oldest[ssp]))
        return Lost(versions=(), ranges=ranges, at=self._now()) if ranges else None

    def _await(self, incomplete: IncompleteVersion, offsets: IntOffsets) -> Awaiting:
        """Return what is awaited after these offsets."""
        return Awaiting(
            incomplete.version,
            tuple(map(str, incomplete.missing)),
            idle=self._ends_at(offsets),
            stream=self.info.identity,
        )

    def _without_redeliveries(
        self,
        upcoming: CompleteVersion | IncompleteVersion,
        manifest: BoundedManifest,
        left_out: Collection[str],
        markers: Sequence[Marker],
    ) -> Delivery | Awaiting:
        """Return the source's answer about the next version, with counts of the records that are
        dropped before it: re-deliveries, and versions that are no partitions (`left_out`).
        """
        dropped: dict[MarkedSegment, int] = {}
        outside: dict[str, int] = {}
        for segment in upcoming.dropped:
            version = segment.marker.version
            count = self._count(segment)
            if version in left_out:
                outside[version] = outside.get(version, 0) + count
            else:
                dropped[segment] = count
        answer: Delivery | Awaiting
        if isinstance(upcoming, CompleteVersion):
            records = self._stream.counts(
                {
                    segment.ssp: (str(segment.start), str(segment.end))
                    for segment in upcoming.segments
                }
            )
            check_repeats(self.spec.name, upcoming, markers, records)
            answer = upcoming.delivery(records)
        else:
            answer = self._await(upcoming, upcoming.offsets)
        return replace(
            answer,
            offsets=entries.offsets_to_json(_to_texts(upcoming.offsets)),
            redelivered=sum(dropped.values()),
            left_out=sum(outside.values()),
            outside=tuple(outside),
            notes=(*describe_redeliveries(manifest, dropped), *self.describe_outside(outside)),
            stream=self.info.identity,
        )

    def check(self, delivery: Delivery, spark: Callable[[], SparkSession]) -> int:
        """Return the version's number of records, after comparing counts and checksums with its
        markers. Raises MarkerConflictError if they differ.

        Counting reads no records. A checksum costs one pass over the records, and is only computed
        if a marker has one in the format of `records_checksum`.
        """
        complete: CompleteVersion = delivery.content
        records = self._stream.counts(_parse_ranges(delivery))
        check_counts(self.spec.name, complete, records)
        promised: dict[MarkedSegment, str] = {}
        for segment in complete.segments:
            checksum = hashing.parse_records_checksum(segment.marker.checksum)
            if checksum is not None:
                promised[segment] = checksum
        checksums: dict[int, str] = {}
        if promised and any(records.values()):
            checksums = self._checksums(delivery, spark, self._stream.records)
        for segment, checksum in promised.items():
            computed = checksums.get(segment.ssp.partition, hashing.EMPTY_CHECKSUM)
            if checksum != computed:
                name = self.spec.name
                marker = segment.marker
                raise contradiction_error(
                    f"dataset {name!r}, version {delivery.version!r}: the marker at"
                    f" offset {marker.offset} of {marker.ssp} expects records with the"
                    f" checksum {checksum}, those before it have {computed}.",
                    name,
                    delivery.version,
                    checksum,
                    computed,
                    "The version is not published and what is served stays. Deliver the right"
                    " content under a new version name; producers compute checksums with"
                    " records_checksum(df, schema).",
                )
        return sum(records.values())

    def list_spark_needs(self) -> list[str]:
        """Return, in words, why records can't be read, or entries made, without Spark."""
        return entries.list_spark_needs(self._stream)

    def records_in_arrow(self, delivery: Delivery) -> pa.Table:
        """Return the version's records with the columns of META, ordered by partition and
        offset.
        """
        return self._stream.read_arrow(_parse_ranges(delivery))

    def place(self, delivery: Delivery, partition: int, offset: int) -> str:
        """Return the partition and the offset of the record."""
        return f"{self.spec.input}.{partition} at offset {offset}"

    # -- inside

    def _ends_at(self, offsets: IntOffsets) -> bool:
        """Whether the stream ends at these offsets, so that nothing new has arrived. Raises
        OffsetOutOfRangeError if it ends before them.
        """
        ends = self._stream.system.upcoming(self._stream.ssps)
        read_to = _to_texts(offsets)
        if any(int(ends[ssp]) < offset for ssp, offset in offsets.items()):
            # Another run may have read further since the stream was opened: the ends of now count.
            ends = self._system.upcoming(self._stream.ssps)
        self._raise_if_recreated(None, read_to, ends)
        return read_to == {ssp: ends[ssp] for ssp in read_to}

    def _raise_if_recreated(
        self, before: str | None, read_to: Offsets = _NONE, ends: Offsets = _NONE
    ) -> None:
        """Raise OffsetOutOfRangeError if the stream is not the one with the identity `before`
        (None: any), or if it `ends` before the offsets `read_to`.
        """
        refusal = self._stream.recreated_error(before, read_to, ends)
        if refusal is not None:
            raise refusal

    def _count(self, segment: MarkedSegment) -> int:
        """Return the number of records in a segment."""
        return self._stream.count({segment.ssp: (str(segment.start), str(segment.end))})

    def _markers(self, offsets: IntOffsets) -> list[Marker]:
        """Return the markers at or after these offsets, and perhaps earlier ones, known from a
        call before.
        """
        if self._seen is not None:
            since, markers = self._seen
            if all(since[ssp] <= offset for ssp, offset in offsets.items()):
                return markers
        markers = self._stream.system.markers(self.info.name, _to_texts(offsets))
        self._seen = (dict(offsets), markers)
        return markers

    def records_in_spark(self, delivery: Delivery, spark: SparkSession) -> DataFrame:
        """Return the version's records with the columns of META.

        Raises SchemaMismatchError if their columns differ from the stream's declared ones.
        """
        records = self._stream.read(spark, _parse_ranges(delivery))
        declared = self._stream.records
        given = Schema.from_spark(records.drop(*META).schema)
        if given != declared:
            raise SchemaMismatchError(
                f"dataset {self.spec.name!r}, version {delivery.version!r}: {self.spec.input} has"
                f" other columns in this version than it declares: {declared.difference(given)}.",
                "Deliver the version again with one schema, into a stream that declares it.",
                dataset=self.spec.name,
            )
        return records

    def _checksums(
        self, delivery: Delivery, spark: Callable[[], SparkSession], schema: Schema
    ) -> dict[int, str]:
        """Return the checksum of the records of each partition that has any, by the partition's
        number. `schema` are the columns of the records.
        """
        if spark is IN_PROCESS:
            entries.raise_if_spark_needed(self.spec, self.list_spark_needs())
            return hashing.arrow_checksums_by(PARTITION, self.records_in_arrow(delivery), schema)
        return hashing.checksums_by(PARTITION, self.records_in_spark(delivery, spark()), schema)


def _parse_ranges(delivery: Delivery) -> dict[SystemStreamPartition, tuple[str, str]]:
    """Return the offsets [start, end) of a delivery's records, by partition."""
    return {SystemStreamPartition.parse(ssp): span for ssp, span in delivery.ranges.items()}


def _to_texts(offsets: IntOffsets) -> dict[SystemStreamPartition, str]:
    """Return offsets as stream systems take them."""
    return {ssp: str(offset) for ssp, offset in offsets.items()}
