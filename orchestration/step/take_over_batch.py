"""The batch that a crash left open: it is run again as it is written, before anything else is read."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.startpoints.refused_positions import check_open_batch
from dagster_adjunct.orchestration.step.next_batch import PlannedBatch

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import Intent
    from dagster_adjunct.orchestration.step.step_run import OpenedStep, StepRun


def take_over(step: OpenedStep, run: StepRun, left_open: Intent) -> PlannedBatch:
    """Return somebody's crashed batch, to be run again in the name of this run.

    Raises OffsetOutOfRangeError where one of its streams was made anew meanwhile.
    """
    began = time.monotonic()
    context = step.context
    context.check()
    check_open_batch(context.systems, context.app, run.logged.state, left_open)
    step.versions.hold(left_open.versions, reopened=True)
    return PlannedBatch(left_open.model_copy(update={"run": context.run}), began)
