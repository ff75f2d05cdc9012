"""Ends a batch whose outputs are written: that is the checkpoint, and applies its startpoints."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.batch_log import ClosedBatch
from dagster_adjunct.orchestration.step.lost_offsets import with_lost
from dagster_adjunct.orchestration.step.step_report import StepEvent

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.step.run_outputs import WrittenBatch
    from dagster_adjunct.orchestration.step.step_run import OpenedStep, StepRun


def close_batch(step: OpenedStep, written: WrittenBatch) -> StepRun:
    """Commit the end of the batch, which applies its startpoints, and only then remove these from the fan-outs."""
    began, context, opened = time.monotonic(), step.context, written.opened
    run, intent, before = opened.run, opened.intent, opened.run.logged.state.offsets
    done = ClosedBatch(
        intent=intent,
        closed_at=context.lake.now(),
        records=opened.records,
        counters=with_lost(written.counters, context.systems, intent.lost),
        seconds=written.seconds,
    )
    context.on_event(StepEvent("outputs", intent.batch))
    context.check()
    logged = step.log.close(run.logged, done)
    # Only now: a crash before this line leaves them fanned out, and the log knows that they were applied.
    step.startpoints.remove_applied(step.tasks, intent.startpoints)
    state, after = logged.state, logged.state.offsets
    texts = [f"{after.applied[ssp].words(ssp)} applied in batch {intent.batch}" for ssp in intent.startpoints]
    texts += [f"{before.replays[key].words()} has ended" for key in before.replays if key not in after.replays]
    run = replace(run, logged=logged).told(context, texts).with_batch(done, time.monotonic() - began)
    told = {"records": state.records, "unit": context.unit, "counters": written.counters}
    context.on_event(StepEvent("batch", intent.batch, told))
    return run
