"""Ends a batch's ranges before the first record that still waits for a dataset.

A record waits in its stream, so nothing is buffered. It may be read once the watermark of each
dataset that it waits for has passed its event time, or once it has waited as long as the join
allows. A record that may be read already waits, too, if it comes after one that may not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.version import datetime_from_micros
from dagster_adjunct.orchestration.batch_log.intent import Ranges, of_stream
from dagster_adjunct.orchestration.operators.event_times import MAX_MICROS, MIN_MICROS, EventTime
from dagster_adjunct.orchestration.operators.waiting import WaitsFor, waits_by_input
from dagster_adjunct.orchestration.startpoints.positions import StreamSnapshot
from dagster_adjunct.orchestration.step.context import StepContext
from dagster_adjunct.orchestration.step.progress import declared_event_times
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.lazy_modules import F, pa, pc
from dagster_adjunct.resources.schemas.arrow_types import arrow_type
from dagster_adjunct.resources.sql.arrow_expressions import NeedsSpark, compile_expression
from dagster_adjunct.resources.streams.checked_reads import read_frame, read_table
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    TIMESTAMP,
    NumberedOffsets,
    OffsetRange,
    SystemStreamPartition,
)
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

TIME = "time"
ARRIVED = "arrived"
"""The event time of a record and the time when it was written, in microseconds, next to PARTITION
and OFFSET.
"""


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """The first record of a partition that waits: for which dataset, its event time, and since when
    it is in its stream. `known_until` is the dataset's watermark; None if it has none.
    """

    ssp: SystemStreamPartition
    offset: int
    dataset: str
    time: datetime
    since: datetime
    known_until: datetime | None

    def describe(self) -> str:
        """Return the record in a sentence without a period."""
        known = "is not known to be complete up to any time"
        if self.known_until is not None:
            known = f"is complete up to {self.known_until:%Y-%m-%d %H:%M:%S}"
        return (
            f"{self.ssp} waits at offset {self.offset} ({self.time:%Y-%m-%d %H:%M:%S}, since"
            f" {self.since:%Y-%m-%d %H:%M:%S}) for dataset {self.dataset}, which {known}"
        )


@dataclass(frozen=True, slots=True)
class HeldRanges:
    """The parts of some ranges that may be read now, and the first record of each partition that
    waits.
    """

    ranges: Ranges
    held: tuple[HeldRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class _StreamTimes:
    """Reads the event times of an input stream, and when its records were written."""

    stream: StreamSnapshot
    declared: EventTime
    spark: Callable[[], SparkSession]

    def read(self, ranges: Ranges) -> pa.Table:
        """Return PARTITION, OFFSET, TIME (null for none) and ARRIVED of the records in these
        ranges.
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
        records = read_frame(self.stream.system, self.spark(), ranges)
        time = self.declared.column(f"input {self.stream.name}", records)
        columns = [F.unix_micros(time).alias(TIME), F.unix_micros(TIMESTAMP).alias(ARRIVED)]
        return records.select(PARTITION, OFFSET, *columns).toArrow()


def _times(records: pa.Table, time: pa.Array) -> pa.Table:
    micros = time.cast(arrow_type("timestamp")).cast(pa.int64())
    is_time = pc.and_(pc.greater_equal(micros, MIN_MICROS), pc.less_equal(micros, MAX_MICROS))
    return pa.table(
        {
            PARTITION: records[PARTITION],
            OFFSET: records[OFFSET],
            TIME: pc.if_else(is_time, micros, None),
            ARRIVED: records[TIMESTAMP].cast(arrow_type("timestamp")).cast(pa.int64()),
        }
    )


def hold_back(
    context: StepContext,
    streams: Mapping[str, StreamSnapshot],
    known: Mapping[str, datetime | None],
    ranges: Ranges,
    unread: Ranges,
) -> HeldRanges:
    """Return the parts of these ranges that may be read now.

    `known` are the watermarks of the datasets. `unread` are the ranges up to the ends of the
    streams: records there decide, too, how long one has waited by event time.
    """
    declared = declared_event_times(context.app)
    cut = dict(ranges)
    held: list[HeldRecord] = []
    for name, waits in waits_by_input(context.app.operators).items():
        of_input = {}
        for ssp, span in of_stream(ranges, name).items():
            if context.compare(ssp, span.start, span.end) < 0:
                of_input[ssp] = span
        if not of_input:
            continue
        reader = _StreamTimes(streams[name], declared[name], context.spark)
        times = reader.read(of_input)
        for ssp, span in of_input.items():
            of_partition = times.filter(pc.equal(times[PARTITION], ssp.partition))
            rest = {ssp: OffsetRange(span.end, unread[ssp].end)}
            first = _find_held(context, ssp, of_partition, waits, known, partial(reader.read, rest))
            if first is not None:
                cut[ssp] = OffsetRange(span.start, str(first.offset))
                held.append(first)
    return HeldRanges(cut, tuple(held))


def _find_held(
    context: StepContext,
    ssp: SystemStreamPartition,
    times: pa.Table,
    waits: Sequence[WaitsFor],
    known: Mapping[str, datetime | None],
    read_rest: Callable[[], pa.Table],
) -> HeldRecord | None:
    """Return the first of these records of a partition that waits for a dataset."""
    found = None
    for one in waits:
        is_held = _is_beyond(times, known[one.dataset])
        if not pc.any(is_held).as_py():
            continue
        at_most = one.wait.at_most
        if one.wait.by == "clock":
            limit = to_microseconds(context.lake.now()) - _micros(at_most)
            is_held = pc.and_(is_held, pc.greater(times[ARRIVED], limit))
        else:
            newest = _newest(times, read_rest())
            is_held = pc.and_(is_held, pc.greater(times[TIME], newest - _micros(at_most)))
        held = times.filter(is_held)
        if not held.num_rows:
            continue
        first = held.sort_by(OFFSET).slice(0, 1).to_pylist()[0]
        if found is None or first[OFFSET] < found.offset:
            found = HeldRecord(
                ssp,
                first[OFFSET],
                one.dataset,
                datetime_from_micros(first[TIME]),
                datetime_from_micros(first[ARRIVED]),
                known[one.dataset],
            )
    return found


def _is_beyond(times: pa.Table, known: datetime | None) -> pa.Array:
    """Return for each record whether the watermark `known` has not passed its time."""
    if known is None:
        return times[TIME].is_valid()
    return pc.fill_null(pc.greater_equal(times[TIME], to_microseconds(known)), False)


def _newest(*times: pa.Table) -> int:
    """Return the newest event time of these records."""
    newest = [pc.max(part[TIME]).as_py() for part in times]
    return max((int(time) for time in newest if time is not None), default=0)


def _micros(span: timedelta) -> int:
    return span // timedelta(microseconds=1)
