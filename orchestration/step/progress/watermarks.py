"""How far an application has come in the times of its records: what a batch begins with, and leaves. Pure functions.

records ── newest event time of each source partition
        ── its watermark: newest - delay, never going back
        ── of an operator: the lowest of all source partitions above it that are not idle,
           less what operators on the way hold back, never going back
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.stored_times import PartitionTimes, TimeState
from dagster_adjunct.orchestration.operators.spec.watermark_inputs import watermark_inputs
from dagster_adjunct.resources.times import before as long_before

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState, Intent
    from dagster_adjunct.orchestration.operators.event_times.event_time import EventTime
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a batch's records of one stream say, by partition number: the latest event times (in microseconds; none
    where no record has one), and the offsets after the last."""

    newest: Mapping[int, int] = field(default_factory=dict)
    read_to: Mapping[int, int] = field(default_factory=dict)


def event_times(app: Application) -> dict[str, EventTime]:
    """Return what is declared of the times of the input streams, of those that have any."""
    declared = {name: source.event_time for name, source in app.inputs.items()}
    return {name: time for name, time in declared.items() if time is not None}


def begun_times(app: Application, state: ApplicationState, intent: Intent) -> TimeState:
    """Return the times that a batch begins with: those stored, and all source partitions that are known by now.

    Partitions whose records wait for a later batch are active: nobody takes them for idle while there is a backlog.
    """
    declared, stood = event_times(app), state.times.partitions
    known = {ssp for ssp in (*state.checkpoint, *intent.ranges) if ssp.qualified_stream in declared}
    changed = {ssp: PartitionTimes(active_at=intent.clock) for ssp in sorted(known - stood.keys())}
    changed |= {
        ssp: stood[ssp].model_copy(update={"active_at": intent.clock}) for ssp in intent.waiting if ssp in stood
    }
    if not changed:
        return state.times
    return state.times.model_copy(update={"partitions": {**stood, **changed}})


def moved_times(
    app: Application,
    times: TimeState,
    measured: Mapping[str, Measured],
    clock: datetime,
    ranges: Mapping[SystemStreamPartition, tuple[int, int]] | None = None,
) -> TimeState:
    """Return the times after a batch of this clock, whose records of each stream say this.

    `ranges` are the offsets that it read, [from, to), of the partitions whose offsets are numbers.
    """
    declared, partitions = event_times(app), dict(times.partitions)
    for ssp, stood in times.partitions.items():
        read = measured.get(ssp.qualified_stream, Measured())
        if ssp.partition in read.read_to:
            moved = _moved(stood, read, ssp.partition, declared[ssp.qualified_stream].delay, clock)
            span = (ranges or {}).get(ssp)
            partitions[ssp] = (
                moved if span is None else moved.model_copy(update={"skipped": stood.skipped_after(*span)})
            )
    after = times.model_copy(update={"partitions": partitions})
    operators = dict(times.operators)
    for name in watermark_inputs(app.operators):
        now = operator_watermark(app, after, name, clock)
        if now is not None:
            operators[name] = now
    return after.model_copy(update={"operators": operators})


def operator_watermark(app: Application, times: TimeState, name: str, clock: datetime) -> datetime | None:
    """Return the watermark of the stateful operator `name` at these times of its sources; never below its own."""
    stood, lowest = times.operators.get(name), lowest_source(app, times, name, clock)
    if lowest is None or lowest.watermark is None:
        return stood
    return lowest.watermark if stood is None else max(stood, lowest.watermark)


@dataclass(frozen=True, slots=True)
class Lowest:
    """The source partition that an operator waits for, and the watermark that follows from it; None before any."""

    ssp: SystemStreamPartition
    watermark: datetime | None


def lowest_source(app: Application, times: TimeState, name: str, clock: datetime) -> Lowest | None:
    """Return which source partition holds the watermark of a stateful operator back; None where all are idle."""
    declared = event_times(app)
    lowest: Lowest | None = None
    for stream, span in watermark_inputs(app.operators)[name].items():
        for ssp, stood in sorted(times.partitions.items()):
            if ssp.qualified_stream != stream or is_idle(declared.get(stream), stood, clock):
                continue
            mark = None if stood.watermark is None else long_before(stood.watermark, span)
            if mark is None:
                return Lowest(ssp, None)
            if lowest is None or lowest.watermark is None or mark < lowest.watermark:
                lowest = Lowest(ssp, mark)
    return lowest


def is_idle(declared: EventTime | None, times: PartitionTimes, clock: datetime) -> bool:
    """Whether a source partition is not waited for: it had no record for so long, as the input says."""
    if declared is None or declared.idle_after is None:
        return False
    return clock - times.active_at >= declared.idle_after


def _moved(stood: PartitionTimes, read: Measured, partition: int, delay: timedelta, clock: datetime) -> PartitionTimes:
    newest, watermark = stood.newest, stood.watermark
    if partition in read.newest:
        here = EPOCH + timedelta(microseconds=read.newest[partition])
        newest = here if newest is None else max(newest, here)
    if newest is not None:
        mark = long_before(newest, delay)
        watermark = mark if watermark is None else max(watermark, mark)
    read_to = max(stood.read_to, read.read_to[partition])
    return stood.model_copy(update={"active_at": clock, "newest": newest, "watermark": watermark, "read_to": read_to})
