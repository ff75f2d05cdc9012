"""Begins a batch: what it is going to do is committed, before anything of it is read."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.step.batch_inputs import BatchInputs
from dagster_adjunct.orchestration.step.rehearsal import check_outputs
from dagster_adjunct.orchestration.step.step_report import StepEvent
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import Intent
    from dagster_adjunct.orchestration.step.next_batch import PlannedBatch
    from dagster_adjunct.orchestration.step.step_run import OpenedStep, StepRun


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch whose intent is committed: what it reads, how many records (or offsets), and the seconds so far."""

    run: StepRun
    intent: Intent
    inputs: BatchInputs
    records: int
    seconds: dict[str, float]


def commit_intent(step: OpenedStep, run: StepRun, planned: PlannedBatch) -> OpenBatch:
    """Commit what the batch is going to do, once its outputs are known to take it; nothing is read before."""
    context, intent, state = step.context, planned.intent, run.logged.state
    views = {name: step.versions.view(name, version, state) for name, version in intent.versions.items()}
    columns = {**planned.records, **{name: None if view is None else view.schema for name, view in views.items()}}
    if columns != run.columns:  # once a run, and for other columns of datasets or inputs
        check_outputs(context, views)
    run = replace(run, columns=columns, logged=step.log.open(run.logged, intent))
    spans = intent.ranges.items()
    records = sum(context.systems[ssp.system].distance(ssp, span.start, span.end) for ssp, span in spans)
    told = {"records": records, "unit": context.unit, "versions": intent.versions}
    context.on_event(StepEvent("intent", intent.batch, told))
    inputs = BatchInputs(
        batch=intent.batch,
        ranges={ssp: OffsetRange(span.start, span.end) for ssp, span in spans},
        views=views,
        epochs=intent.epochs,
        consumed=None if intent.replays else {ssp: span.end for ssp, span in spans},
        identities=state.offsets.streams,
        tasks=intent.tasks,
    )
    return OpenBatch(run, intent, inputs, records, {"intent": time.monotonic() - planned.began})
