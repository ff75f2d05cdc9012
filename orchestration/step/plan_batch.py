"""Plans the next batch of a step: what it reads, which dataset versions it meets, and what the run starts with."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.batch_log import add_counters
from dagster_adjunct.orchestration.startpoints.fan_out_coordinator import fan_out_requests
from dagster_adjunct.orchestration.startpoints.input_made_anew import check_open_batch
from dagster_adjunct.orchestration.startpoints.input_positions import input_positions
from dagster_adjunct.orchestration.startpoints.replays_to_read import replays_to_read
from dagster_adjunct.orchestration.startpoints.start_of_run import start_of_run
from dagster_adjunct.orchestration.step.next_batch import lost_counters, main_batch, replay_batch
from dagster_adjunct.orchestration.step.step_report import StepEvent

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.advance_report import AdvanceReport
    from dagster_adjunct.orchestration.batchlog.batch_log import Intent
    from dagster_adjunct.orchestration.startpoints.input_positions import InputPositions
    from dagster_adjunct.orchestration.step.step_context import StepContext
    from dagster_adjunct.orchestration.step.step_run import OpenedStep, StepRun


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """What is next: the batch of this intent, or (None) nothing, since all is read up to these positions.

    Planning it began at `began`, by the monotonic clock.
    """

    run: StepRun
    began: float
    intent: Intent | None
    positions: InputPositions | None = None


def plan_batch(step: OpenedStep, run: StepRun) -> PlannedBatch:
    """Return what the next batch is to do. Commits where the run starts, before its first batch, and nothing else."""
    began, context, versions = time.monotonic(), step.context, step.versions
    context.check()
    if run.logged.state.open is not None:
        return PlannedBatch(run, began, _taken_over(step, run, run.logged.state.open))
    if run.batches:
        context.between_batches()
    served = versions.current()
    if run.held is None:
        run = _start(step, run)
    state = run.logged.state
    positions = input_positions(context.systems, context.app, state, run.held or ())
    replays = replays_to_read(context.systems, context.app, state.offsets)
    intent = replay_batch(context, state, positions, replays)
    if intent is None:
        intent = main_batch(context, state, positions)
        if intent is None:
            return PlannedBatch(run, began, None, positions)
        _tell_lost(context, intent.batch, positions)
    served = versions.hold_served(served)
    versions.check_fresh()
    served |= versions.read_on(state, partial(_tell_table, context, intent.batch))
    met = {dataset.name: served[dataset.name] for dataset in context.app.datasets}
    return PlannedBatch(run, began, intent.model_copy(update={"versions": met}))


def settle(step: OpenedStep, planned: PlannedBatch) -> StepRun:
    """Commit positions at which there is nothing to read yet: the startpoints there are applied with that.

    Where nothing has moved, nothing is committed.
    """
    run, positions, context = planned.run, planned.positions, step.context
    if positions is None or not (positions.startpoints or positions.lost):
        return run
    state = run.logged.state
    applied = {ssp: start.id for ssp, start in positions.startpoints.items()}
    lost = lost_counters(context.systems, positions.lost)
    moved = state.model_copy(
        update={
            "checkpoint": state.checkpoint | {ssp: span.start for ssp, span in positions.unread.items()},
            "offsets": state.offsets.with_applied(applied, None, context.lake.now()),
            "totals": add_counters(state.totals, lost),
        }
    )
    note = "; ".join(["positions moved, nothing to read there yet", *positions.texts()])
    logged = step.log.move(run.logged, moved, by=context.run, note=note)
    # Only now: a crash before this line leaves them fanned out, and the log knows that they were applied.
    step.startpoints.remove_applied(step.tasks, applied)
    run = replace(run, logged=logged, counters=add_counters(run.counters, lost))
    said = [f"{logged.state.offsets.applied[ssp].words(ssp)} applied; there is nothing to read yet" for ssp in applied]
    run = run.told(context, said)
    _tell_lost(context, state.batch, positions)
    return run


def _taken_over(step: OpenedStep, run: StepRun, intent: Intent) -> Intent:
    """Return somebody's crashed batch, to be run again as it is written, in the name of this run."""
    context = step.context
    check_open_batch(context.systems, context.app, run.logged.state, intent)
    step.versions.hold(intent.versions, reopened=True)
    return intent.model_copy(update={"run": context.run})


def _start(step: OpenedStep, run: StepRun) -> StepRun:
    """Resolve what is fanned out, once a run, and store every position before anything is read from it."""
    context, logged = step.context, run.logged
    state = logged.state
    if context.fan_out is None:
        fan_out = fan_out_requests(step.startpoints, context.systems, context.app, context.plan, state.offsets)
    else:
        fan_out = context.fan_out.without_taken_back(step.startpoints.get_fan_outs())
    start = start_of_run(context.systems, context.app, step.tasks, fan_out, state, context.lake.now())
    if start.state != state:
        logged = step.log.move(logged, start.state, by=context.run, note="; ".join(start.carried) or None)
    if start.done:
        step.startpoints.remove_fan_outs(start.done)
    return replace(run, logged=logged, held=start.held).told(context, start.texts())


def _tell_lost(context: StepContext, batch: int, positions: InputPositions) -> None:
    for text in positions.texts():
        context.on_event(StepEvent("lost", batch, {"text": text}))


def _tell_table(context: StepContext, batch: int, report: AdvanceReport) -> None:
    context.on_event(StepEvent("table", batch, {"report": report}))
