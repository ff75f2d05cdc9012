"""Stores where a run starts, once: what its tasks were handed gets offsets, each partition a position."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.startpoints.resolving.recorded_plan import plans_of
from dagster_adjunct.orchestration.startpoints.start_of_run import start_of_run

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.step.next_batch.look_before_batch import Seen
    from dagster_adjunct.orchestration.step.opened_step.step_run import OpenedStep, StepRun


def store_first_positions(step: OpenedStep, run: StepRun, seen: Seen) -> StepRun:
    """Return the run with a position for each partition, stored before anything is read; as it is if it has started."""
    if seen.handed is None:
        return run
    context = step.context
    logged = run.logged
    plans = plans_of(context.lake, context.app.name, seen.handed)
    start = start_of_run(context.app, seen.streams, step.tasks, seen.handed, logged.state, context.lake.now(), plans)
    if start.state != logged.state:
        logged = step.log.move(logged, start.state, by=context.run, note="; ".join(start.carried) or None)
    if start.done:
        step.startpoints.remove_fan_outs(start.done)
    return replace(run, logged=logged, held=start.held).told(context, start.told)
