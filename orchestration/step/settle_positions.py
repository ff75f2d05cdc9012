"""Positions at which there is nothing to read yet: they are committed, with the startpoints that led there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.batch_log import add_counters
from dagster_adjunct.orchestration.step.lost_offsets import with_lost
from dagster_adjunct.orchestration.step.step_report import StepEvent

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.step.next_batch import NothingToRead
    from dagster_adjunct.orchestration.step.step_run import OpenedStep, StepRun


def settle(step: OpenedStep, run: StepRun, nothing: NothingToRead) -> StepRun:
    """Commit the positions that the inputs are read up to; the startpoints there are applied with that.

    Where nothing has moved, nothing is committed.
    """
    context, positions = step.context, nothing.positions
    if not (positions.startpoints or positions.lost):
        return run
    applied = {ssp: start.id for ssp, start in positions.startpoints.items()}
    lost = with_lost({}, context.systems, positions.lost)
    reached = {ssp: span.start for ssp, span in positions.unread.items()}
    note = "; ".join(["positions moved, nothing to read there yet", *nothing.losses])
    logged = step.log.settle(run.logged, reached, applied, lost, by=context.run, note=note)
    # Only now: a crash before this line leaves them fanned out, and the log knows that they were applied.
    step.startpoints.remove_applied(step.tasks, applied)
    run = replace(run, logged=logged, counters=add_counters(run.counters, lost))
    after = logged.state.offsets.applied
    run = run.told(context, [f"{after[ssp].words(ssp)} applied; there is nothing to read yet" for ssp in applied])
    for text in nothing.losses:
        context.on_event(StepEvent("lost", logged.state.batch, {"text": text}))
    return run
