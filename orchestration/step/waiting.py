"""Ends a batch's ranges before the first record that still waits for a dataset.

A record waits in its stream, so nothing is buffered. It may be read once the watermark of each
dataset that it waits for has passed its event time, or once it has waited as long as the join
allows. A record that may be read already waits, too, if it comes after one that may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache, partial
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.progress import StreamPosition
from dagster_adjunct.assets.versions.manifest import DatasetManifest, UnboundedManifest
from dagster_adjunct.assets.versions.version import datetime_from_micros
from dagster_adjunct.assets.versions.watermark import known_until
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.intent import HeldTime, Offsets, Ranges, of_stream
from dagster_adjunct.orchestration.operators.event_times import MAX_MICROS, MIN_MICROS, EventTime
from dagster_adjunct.orchestration.operators.lookups import Wait
from dagster_adjunct.orchestration.operators.waiting import (
    HeldRecord,
    WaitsFor,
    list_waits,
    waits_by_input,
)
from dagster_adjunct.orchestration.startpoints.positions import StreamSnapshot, snapshot_streams
from dagster_adjunct.orchestration.step.event_times import TIME
from dagster_adjunct.orchestration.step.progress import declared_event_times
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.lazy_modules import F, pa, pc
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.sql.arrow_expressions import compile_expression
from dagster_adjunct.resources.sql.arrow_kernels import NeedsSpark
from dagster_adjunct.resources.streams.checked_reads import read_frame, read_table
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    TIMESTAMP,
    NumberedOffsets,
    OffsetRange,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ARRIVED = "arrived"
"""The time when a record was written, in microseconds, next to PARTITION, OFFSET and TIME."""


@cache
def _columns() -> pa.Schema:
    """Return the columns of the times that are read."""
    whole = pa.int64()
    return pa.schema([(PARTITION, pa.int32()), (OFFSET, whole), (TIME, whole), (ARRIVED, whole)])


@dataclass(frozen=True, slots=True)
class HeldRanges:
    """The parts of some ranges that may be read now, and the first record of each partition that
    waits. `early` are the joins for which records in these parts are read before their time.
    """

    ranges: Ranges
    held: tuple[HeldRecord, ...] = ()
    early: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _StreamTimes:
    """Reads the event times of an input stream, and when its records were written."""

    stream: StreamSnapshot
    declared: EventTime
    spark: Callable[[], SparkSession]
    stored: Mapping[SystemStreamPartition, HeldTime]

    def read(self, ranges: Ranges) -> pa.Table:
        """Return PARTITION, OFFSET, TIME (null for none) and ARRIVED of the records in these
        ranges.

        A range that has only the record that was found waiting before is not read: what was stored
        of that record is returned.
        """
        parts = []
        others = {}
        for ssp, span in ranges.items():
            held = self._find_stored(ssp)
            if held is not None and self._is_only_record(ssp, span, held):
                parts.append(_stand_in(ssp, held, held.time))
            else:
                others[ssp] = span
        if others:
            parts.append(self._read_stream(others))
        return pa.concat_tables(parts)

    def read_rest(self, ssp: SystemStreamPartition, span: OffsetRange) -> pa.Table:
        """Return times among which is the newest event time of the records in this range of a
        partition. What a run has seen is not read again: its newest time stands for it, which may
        be of a record before the range.
        """
        held = self._find_stored(ssp)
        if held is None:
            return self._read_stream({ssp: span})
        if held.newest is None or held.seen_to is None:  # nothing stands for what was seen
            return self._read_stream({ssp: span})
        compare = self.stream.system.compare
        known = _stand_in(ssp, held, held.newest)
        if compare(held.seen_to, span.end) >= 0:
            return known
        if compare(held.seen_to, span.start) > 0:
            span = OffsetRange(held.seen_to, span.end)
        return pa.concat_tables([known, self._read_stream({ssp: span})])

    def _find_stored(self, ssp: SystemStreamPartition) -> HeldTime | None:
        """Return what a run has stored of a partition of this stream, by this event time; None if
        it has stored nothing, or of another stream or time.
        """
        held = self.stored.get(ssp)
        if held is None:
            return None
        is_of_stream = held.stream == self.stream.info.identity
        is_by_time = held.by == self.declared.expression
        if not is_of_stream or not is_by_time:
            return None
        return held

    def _is_only_record(
        self, ssp: SystemStreamPartition, span: OffsetRange, held: HeldTime
    ) -> bool:
        """Whether a range has no other record than the one that is held."""
        after_first = self.stream.system.advance(ssp, span.start, 1)
        return span == OffsetRange(str(held.offset), after_first)

    def _read_stream(self, ranges: Ranges) -> pa.Table:
        """Return the times, read by this process if it can, else by Spark. Raises
        ConfigurationError if offsets are no numbers.
        """
        system = self.stream.system
        if not isinstance(system, NumberedOffsets):
            raise ConfigurationError(
                f"input {self.stream.name!r} waits for a dataset, but the offsets of system"
                f" {system.name!r} are no numbers, so its batches can't end at a record.",
                "Leave wait= out of the join.",
                stream=self.stream.name,
            )
        if system.capabilities.reads_arrow:
            with suppress(NeedsSpark):
                return self._read_in_process(ranges)
        return self._read_by_spark(ranges)

    def _read_in_process(self, ranges: Ranges) -> pa.Table:
        """Return the times. Raises NeedsSpark if only Spark computes them for certain."""
        if not self.declared.sql:
            records = read_table(self.stream.system, ranges, ())
            return _times(records, records[TIMESTAMP])
        schema = self.stream.info.schema
        if schema is None:
            raise NeedsSpark("unknown columns")
        compiled = compile_expression(self.declared.expression, schema.types)
        if isinstance(compiled, str):
            raise NeedsSpark(compiled)
        records = read_table(self.stream.system, ranges, compiled.columns)
        return _times(records, compiled.evaluate(records))

    def _read_by_spark(self, ranges: Ranges) -> pa.Table:
        """Return the times, computed by Spark."""
        records = read_frame(self.stream.system, self.spark(), ranges)
        time = self.declared.column(f"input {self.stream.name}", records)
        columns = [F.unix_micros(time).alias(TIME), F.unix_micros(TIMESTAMP).alias(ARRIVED)]
        return records.select(PARTITION, OFFSET, *columns).toArrow().cast(_columns())


def _stand_in(ssp: SystemStreamPartition, held: HeldTime, time: datetime) -> pa.Table:
    """Return a record with this event time in the place of the one that is held."""
    columns = {
        PARTITION: [ssp.partition],
        OFFSET: [held.offset],
        TIME: [to_microseconds(time)],
        ARRIVED: [to_microseconds(held.since)],
    }
    return pa.table(columns, schema=_columns())


def _times(records: pa.Table, time: pa.Array) -> pa.Table:
    """Return the columns of `_columns` of these records, whose event times are `time`; null for
    times that are out of range.
    """
    micros = time.cast(arrow_type("timestamp")).cast(pa.int64())
    is_time = pc.and_(pc.greater_equal(micros, MIN_MICROS), pc.less_equal(micros, MAX_MICROS))
    return pa.table(
        {
            PARTITION: records[PARTITION],
            OFFSET: records[OFFSET],
            TIME: pc.if_else(is_time, micros, None),
            ARRIVED: records[TIMESTAMP].cast(arrow_type("timestamp")).cast(pa.int64()),
        }
    ).cast(_columns())


@dataclass(frozen=True, slots=True)
class _PartitionTimes:
    """The event times of the records of a partition that a batch could read, and the joins for
    which they wait. `read_rest` returns the times of the unread records after them.
    """

    ssp: SystemStreamPartition
    times: pa.Table
    waits: Sequence[WaitsFor]
    read_rest: Callable[[], pa.Table]


@dataclass(frozen=True, slots=True)
class Waiting:
    """What decides which records wait: by join, the watermarks `known` of the datasets, the clock,
    and the streams as they are now.

    What the last batch has `stored` of the partitions where records wait is not read again.
    """

    app: Application
    streams: Mapping[str, StreamSnapshot]
    known: Mapping[str, datetime | None]
    now: datetime
    spark: Callable[[], SparkSession]
    stored: Mapping[SystemStreamPartition, HeldTime] = field(default_factory=dict)

    def hold_back(self, ranges: Ranges, unread: Ranges) -> HeldRanges:
        """Return the parts of these ranges that may be read now, and the records that wait.

        `unread` are the ranges up to the ends of the streams: by event time, also the records after
        the given ranges decide how long a record has waited.
        """
        declared = declared_event_times(self.app)
        cut = dict(ranges)
        held: list[HeldRecord] = []
        early: set[str] = set()
        for name, waits in waits_by_input(self.app.operators).items():
            of_input = of_stream(ranges, name)
            if of_input:
                of_input = _without_empty(self.streams[name].system, of_input)
            if not of_input:
                continue
            reader = _StreamTimes(self.streams[name], declared[name], self.spark, self.stored)
            times = reader.read(of_input)
            for ssp, span in of_input.items():
                readable = times.filter(pc.equal(times[PARTITION], ssp.partition))
                rest = OffsetRange(span.end, unread[ssp].end)
                read_rest = cache(partial(reader.read_rest, ssp, rest))
                partition = _PartitionTimes(ssp, readable, waits, read_rest)
                first = self._find_held(partition)
                if first is not None:
                    cut[ssp] = OffsetRange(span.start, str(first.offset))
                    first = replace(
                        first,
                        newest=self._find_newest(partition, first),
                        seen_to=unread[ssp].end,
                        stream=self.streams[name].info.identity,
                    )
                    held.append(first)
                    readable = readable.filter(pc.less(readable[OFFSET], first.offset))
                early |= self._find_early(readable, waits)
        return HeldRanges(cut, tuple(held), frozenset(early))

    def _find_early(self, times: pa.Table, waits: Sequence[WaitsFor]) -> set[str]:
        """Return the joins whose dataset is not complete up to the times of all these records."""
        early = set()
        for waiting in waits:
            if pc.any(_is_beyond(times, self.known[waiting.join])).as_py():
                early.add(waiting.join)
        return early

    def _find_held(self, partition: _PartitionTimes) -> HeldRecord | None:
        """Return the first of a partition's records that waits for a dataset."""
        found = None
        for waiting in partition.waits:
            known = self.known[waiting.join]
            held = partition.times.filter(_is_beyond(partition.times, known))
            if held.num_rows:
                held = held.filter(self._is_within(held, waiting.wait, partition))
            if not held.num_rows:
                continue
            (first,) = held.sort_by(OFFSET).slice(0, 1).to_pylist()
            if found is None or first[OFFSET] < found.offset:
                found = HeldRecord(
                    partition.ssp,
                    first[OFFSET],
                    waiting.dataset,
                    time=datetime_from_micros(first[TIME]),
                    since=datetime_from_micros(first[ARRIVED]),
                    known_until=known,
                )
        return found

    def _find_newest(self, partition: _PartitionTimes, first: HeldRecord) -> datetime | None:
        """Return the newest event time of a partition's records, from the first one that waits to
        the end; None if none waits by event time, or a time is not believed yet.
        """
        if all(waiting.wait.by == "clock" for waiting in partition.waits):
            return None
        times = partition.times
        after = times.filter(pc.greater_equal(times[OFFSET], first.offset))
        newest = _newest((after, partition.read_rest()), MAX_MICROS)
        last_credible = min(waiting.wait.at_most for waiting in partition.waits) + self.now
        if newest > to_microseconds(last_credible):
            return None
        return datetime_from_micros(newest)

    def _is_within(self, held: pa.Table, wait: Wait, partition: _PartitionTimes) -> pa.Array:
        """Return for each of the `held` records whether it has not waited as long as is allowed.

        A time further ahead of the clock than a record may wait is not believed. So a record from
        the year 3000 neither holds its partition until then, nor ends the waiting of other records.
        """
        at_most = wait.at_most // timedelta(microseconds=1)
        now = to_microseconds(self.now)
        last_credible = now + at_most
        if wait.by == "clock":
            dated = held[ARRIVED]
            now_or_newest = now
        else:
            dated = held[TIME]
            now_or_newest = _newest((partition.times, partition.read_rest()), last_credible)
        is_credible = pc.less_equal(dated, last_credible)
        return pc.and_(is_credible, pc.greater(dated, now_or_newest - at_most))


def _without_empty(system: StreamSystem, ranges: Ranges) -> Ranges:
    """Return the ranges that are not empty."""
    return {ssp: span for ssp, span in ranges.items() if system.compare(span.start, span.end) < 0}


def describe_held(
    systems: Mapping[str, StreamSystem],
    lake: Lake,
    app: Application,
    unread: Offsets,
    stored: Mapping[SystemStreamPartition, HeldTime],
) -> tuple[str, ...]:
    """Return, for each partition with `unread` records, what its first record waits for; () unless
    all of them wait. `stored` is what the last run has found of the first records.

    A run advances the datasets first. So () is returned also if a dataset has no version yet or has
    anything to read.
    """
    waits = waits_by_input(app.operators)
    may_all_wait = all(ssp.qualified_stream in waits for ssp in unread)
    if not unread or not may_all_wait:
        return ()
    for name in {wait.dataset for wait in list_waits(app.operators)}:
        dataset = app.dataset(name)
        manifest = StoredVersions(lake, dataset).manifest()
        if manifest is None or _has_unread(systems, lake, dataset, manifest):
            return ()
    held = find_held(systems, lake, app, unread, stored)
    if len(held) < len(unread):
        return ()
    return tuple(record.describe() for record in held)


def find_held(
    systems: Mapping[str, StreamSystem],
    lake: Lake,
    app: Application,
    unread: Offsets,
    stored: Mapping[SystemStreamPartition, HeldTime],
) -> tuple[HeldRecord, ...]:
    """Return the first `unread` record of each partition in which it waits. `stored` is what the
    last run has found of the first records.

    A record is left out if only Spark can compute its event time and none is stored, or if
    retention has deleted it. Watermarks of datasets are as a run finds them that advances the
    datasets now, and finds nothing new.
    """
    waits = waits_by_input(app.operators)
    names = {ssp.qualified_stream for ssp in unread}
    streams = snapshot_streams(systems, names & waits.keys(), 1)
    first = {}
    ranges = {}
    for ssp, start in unread.items():
        stream = streams.get(ssp.qualified_stream)
        if stream is not None and stream.system.compare(stream.oldest[ssp], start) <= 0:
            first[ssp] = OffsetRange(start, stream.system.advance(ssp, start, 1))
            ranges[ssp] = OffsetRange(start, stream.upcoming[ssp])
    readable_stored = {ssp: stored[ssp] for ssp in first if ssp in stored}
    known = _find_watermarks_of_run(lake, app)
    waiting = Waiting(app, streams, known, lake.now(), _no_session, readable_stored)
    # Partitions with a stored time one by one: some of them may need Spark, and others not.
    parts = [{ssp: first[ssp]} for ssp in readable_stored]
    parts.append({ssp: span for ssp, span in first.items() if ssp not in readable_stored})
    held: list[HeldRecord] = []
    for part in parts:
        with suppress(NeedsSpark):
            held += waiting.hold_back(part, ranges).held
    return tuple(held)


def to_stored(
    app: Application, held: Iterable[HeldRecord]
) -> dict[SystemStreamPartition, HeldTime]:
    """Return what a run stores of the records that it has found waiting."""
    declared = declared_event_times(app)
    stored = {}
    for record in held:
        stored[record.ssp] = HeldTime(
            stream=record.stream,
            offset=record.offset,
            by=declared[record.ssp.qualified_stream].expression,
            time=record.time,
            since=record.since,
            newest=record.newest,
            # Without a newest time, what was seen has to be read again.
            seen_to=None if record.newest is None else record.seen_to,
        )
    return stored


def _find_watermarks_of_run(lake: Lake, app: Application) -> dict[str, datetime | None]:
    """Return, by join, the watermarks of the datasets if a run found nothing new in them."""
    known: dict[str, datetime | None] = {}
    for wait in list_waits(app.operators):
        dataset = app.dataset(wait.dataset)
        manifest = StoredVersions(lake, dataset).manifest()
        if isinstance(manifest, UnboundedManifest):
            manifest = manifest.model_copy(update={"confirmed_at": lake.now()})
        known[wait.join] = known_until(dataset, manifest, over_time=wait.over_time)
    return known


def _has_unread(
    systems: Mapping[str, StreamSystem],
    lake: Lake,
    dataset: AdjunctDataset,
    manifest: DatasetManifest,
) -> bool:
    """Whether an advance of the dataset would find changes, or a version."""
    if isinstance(manifest, UnboundedManifest):
        position = StreamPosition.of(systems, manifest)
        return position.offsets != position.ends
    if dataset.versions is not None:  # partitions, which the application's job does not publish
        return False
    return StoredVersions(lake, dataset).awaiting(systems, manifest) is None


def _no_session() -> SparkSession:
    """Raise NeedsSpark, in place of returning a session."""
    raise NeedsSpark("the event time of an input")


def _is_beyond(times: pa.Table, known: datetime | None) -> pa.Array:
    """Return for each record whether the watermark `known` has not passed its time."""
    if known is None:
        return times[TIME].is_valid()
    return pc.fill_null(pc.greater_equal(times[TIME], to_microseconds(known)), False)


def _newest(parts: Sequence[pa.Table], last: int) -> int:
    """Return the newest event time of these records that is not later than `last`; MIN_MICROS if
    there is none.
    """
    newest = []
    for part in parts:
        time = pc.max(part.filter(pc.less_equal(part[TIME], last))[TIME]).as_py()
        if time is not None:
            newest.append(int(time))
    return max(newest, default=MIN_MICROS)
