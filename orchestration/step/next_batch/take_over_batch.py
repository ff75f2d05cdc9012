"""The batch that a crash left open: it is run again as it is written, before anything else is read.

Where retention has taken records of it meanwhile, it is run with what is left, if its inputs say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.batch_log import Range
from dagster_adjunct.orchestration.startpoints.positions.refused_positions import (
    check_open_batch,
    loss_in_words,
    open_batch_past_the_end,
)
from dagster_adjunct.orchestration.step.next_batch.hold_versions import HeldBatch
from dagster_adjunct.orchestration.step.progress.step_report import StepEvent
from dagster_adjunct.resources.errors import OffsetOutOfRangeError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import Intent
    from dagster_adjunct.orchestration.step.context.step_context import StepContext
    from dagster_adjunct.orchestration.step.opened_step.step_run import OpenedStep, StepRun
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


def take_over(step: OpenedStep, run: StepRun, left_open: Intent) -> HeldBatch:
    """Return somebody's crashed batch, to be run again in the name of this run.

    Streams that the application does not read any more are left where they were. Raises OffsetOutOfRangeError where a
    stream was made anew meanwhile, or does not hold all of the batch any more and its input does not say to go on.
    """
    context = step.context
    ranges = {ssp: span for ssp, span in left_open.ranges.items() if ssp.qualified_stream in context.app.inputs}
    left_open = left_open.model_copy(update={"ranges": ranges, "run": context.run})
    _check_same_streams(context, run, left_open)
    gone = lost_ranges(context, left_open)
    if gone:
        resolved = run.logged.state.offsets.resolved
        oldest = {ssp for ssp in left_open.startpoints if ssp in resolved and resolved[ssp].position == "oldest"}
        lost = {ssp: span for ssp, span in gone.items() if ssp not in oldest}  # the oldest is what is left
        check_open_batch(context.app, left_open, lost)
        left_open = _cut(context, left_open, gone, lost)
    step.leases.take(left_open.versions, left_open.over_time, reopened=True)
    records = {
        name: context.systems[split_stream_name(name)[0]].info(split_stream_name(name)[1]).schema
        for name in context.app.inputs
    }
    return HeldBatch(left_open, records)


def lost_ranges(context: StepContext, intent: Intent) -> dict[SystemStreamPartition, OffsetRange]:
    """Return the offsets that the batch is to read and its streams have no more: [its start, the oldest left).

    Raises OffsetOutOfRangeError where a stream ends before the batch does.
    """
    lost: dict[SystemStreamPartition, OffsetRange] = {}
    for name in sorted({ssp.qualified_stream for ssp in intent.ranges}):
        spans = {ssp: span for ssp, span in intent.ranges.items() if ssp.qualified_stream == name}
        system = context.systems[split_stream_name(name)[0]]
        oldest, upcoming = system.oldest(spans), system.upcoming(spans)
        for ssp, span in spans.items():
            if system.compare(span.end, upcoming[ssp]) > 0:
                raise open_batch_past_the_end(context.app, intent.batch, ssp, span.end, upcoming[ssp])
            if system.compare(span.start, oldest[ssp]) < 0:
                lost[ssp] = OffsetRange(span.start, oldest[ssp])
    return lost


def _cut(
    context: StepContext,
    intent: Intent,
    gone: dict[SystemStreamPartition, OffsetRange],
    lost: dict[SystemStreamPartition, OffsetRange],
) -> Intent:
    """Return the batch with what is left to read, and what is lost counted."""
    ranges, counted = dict(intent.ranges), dict(intent.lost)
    for ssp, span in gone.items():
        end = ranges[ssp].end
        whole = context.systems[ssp.system].compare(end, span.end) < 0
        ranges[ssp] = Range(start=span.end, end=span.end if whole else end)
    for ssp, span in lost.items():
        counted[ssp] = Range(start=counted[ssp].start if ssp in counted else span.start, end=span.end)
        text = loss_in_words(ssp, span, f"batch {intent.batch}, which was open, at ")
        context.on_event(StepEvent("lost", intent.batch, {"text": text}))
    return intent.model_copy(update={"ranges": ranges, "lost": counted, "cut": True})


def _check_same_streams(context: StepContext, run: StepRun, left_open: Intent) -> None:
    before, app = run.logged.state.offsets.streams, context.app.name
    for name, ssp in sorted({ssp.qualified_stream: ssp for ssp in left_open.ranges}.items()):
        identity, info = before.get(name), context.systems[ssp.system].info(ssp.stream)
        if info.is_another(identity):
            raise OffsetOutOfRangeError(
                f"{name} was {info.how_it_came(identity)} (it is {info.identity}, and was {identity}), and batch "
                f"{left_open.batch} of application {app!r} is open over the stream before.",
                f"Give the batch up (adjunct checkpoint abandon {app} --reason …), then say where to "
                f"begin in the new stream: adjunct startpoint set MODULE:APP {name} --oldest --reason ….",
                application=app,
                stream=name,
            )
