"""Commits how far the inputs are read: by a batch that is written, or where there is nothing to read yet.

That commit is the checkpoint, and applies the startpoints that lie before it; only then are these removed from the
fan-outs: a crash in between leaves them there, and the log knows that they were applied.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.batchlog.batch_log import ClosedBatch, add_counters
from dagster_adjunct.orchestration.step.answers.recorded_answers import forget_answers
from dagster_adjunct.orchestration.step.progress.step_report import StepEvent
from dagster_adjunct.orchestration.step.progress.time_progress import input_times

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import Range
    from dagster_adjunct.orchestration.step.commit.run_outputs import WrittenBatch
    from dagster_adjunct.orchestration.step.next_batch.plan_batch import NothingToRead
    from dagster_adjunct.orchestration.step.opened_step.step_run import Counters, OpenedStep, StepRun
    from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange, StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


def close_batch(step: OpenedStep, written: WrittenBatch) -> StepRun:
    """Commit the end of the batch, which applies its startpoints, and only then remove these from the fan-outs."""
    began, context, opened = time.monotonic(), step.context, written.opened
    run, intent, before = opened.run, opened.intent, opened.run.logged.state.offsets
    done = ClosedBatch(
        intent=intent,
        closed_at=context.lake.now(),
        records=opened.records,
        counters=_with_lost(written.counters, context.systems, intent.lost),
        seconds=written.seconds,
    )
    context.on_event(StepEvent("outputs", intent.batch))
    context.check()
    logged = step.log.close(run.logged, done, written.times)
    step.startpoints.remove_applied(step.tasks, intent.startpoints)
    if any((asked := operator.spec.call(context.app)) and asked.recorded for operator in context.app.operators):
        forget_answers(context.lake, context.app.name, intent.batch)
    state, after = logged.state, logged.state.offsets
    texts = [f"{after.applied[ssp].words(ssp)} applied in batch {intent.batch}" for ssp in intent.startpoints]
    texts += [f"{before.replays[key].words()} has ended" for key in before.replays if key not in after.replays]
    run = replace(run, logged=logged).told(context, texts)
    run = run.with_batch(done, time.monotonic() - began, written.measured, few=opened.inputs.few)
    told: dict[str, Any] = {"records": state.records, "unit": context.unit, "counters": written.counters}
    if marks := input_times(context.app, state.times, done.closed_at):
        told["watermarks"] = marks
    context.on_event(StepEvent("batch", intent.batch, told))
    return run


def settle(step: OpenedStep, run: StepRun, nothing: NothingToRead) -> StepRun:
    """Commit the positions that the inputs are read up to; the startpoints there are applied with that.

    Where nothing has moved, nothing is committed.
    """
    context, positions = step.context, nothing.positions
    if not (positions.startpoints or positions.lost):
        return run
    applied = {ssp: start.id for ssp, start in positions.startpoints.items()}
    lost = _with_lost({}, context.systems, positions.lost)
    reached = {ssp: span.start for ssp, span in positions.unread.items()}
    note = "; ".join(["positions moved, nothing to read there yet", *nothing.losses])
    logged = step.log.settle(run.logged, reached, applied, lost, by=context.run, note=note)
    step.startpoints.remove_applied(step.tasks, applied)
    run = replace(run, logged=logged, counters=add_counters(run.counters, lost))
    after = logged.state.offsets.applied
    run = run.told(context, [f"{after[ssp].words(ssp)} applied; there is nothing to read yet" for ssp in applied])
    for text in nothing.losses:
        context.on_event(StepEvent("lost", logged.state.batch, {"text": text}))
    return run


def _with_lost(
    counters: Counters,
    systems: Mapping[str, StreamSystem],
    lost: Mapping[SystemStreamPartition, OffsetRange | Range],
) -> Counters:
    """Return these counters, and beside them how much of each stream is `lost`."""
    counted = {name: dict(of_name) for name, of_name in counters.items()}
    for ssp, span in lost.items():
        of_stream = counted.setdefault(ssp.qualified_stream, {})
        distance = systems[ssp.system].distance(ssp, span.start, span.end)
        of_stream["lost_offsets"] = of_stream.get("lost_offsets", 0) + distance
    return counted
