"""Plans the next batch of a step: what it reads, and which dataset versions it meets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.startpoints.input_positions import input_positions
from dagster_adjunct.orchestration.startpoints.refused_positions import check_positions
from dagster_adjunct.orchestration.step.next_batch import NothingToRead, PlannedBatch, main_batch, replay_batch
from dagster_adjunct.orchestration.step.step_report import StepEvent

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.advance_report import AdvanceReport
    from dagster_adjunct.orchestration.step.look_before_batch import Seen
    from dagster_adjunct.orchestration.step.step_run import OpenedStep, StepRun


def plan_batch(step: OpenedStep, run: StepRun, seen: Seen) -> PlannedBatch | NothingToRead:
    """Return what the next batch is to do, over what was seen; commit nothing. Its versions are leased by then."""
    context, versions, state = step.context, step.versions, run.logged.state
    positions = input_positions(context.app, seen.streams, state, run.held or ())
    losses = check_positions(context.app, seen.streams, state.offsets, positions)
    intent = replay_batch(context, state, positions)
    if intent is None:
        intent = main_batch(context, state, positions)
        if intent is None:
            return NothingToRead(positions, losses)
        for text in losses:
            context.on_event(StepEvent("lost", intent.batch, {"text": text}))

    def tell_table(report: AdvanceReport) -> None:
        context.on_event(StepEvent("table", state.batch + 1, {"report": report}))

    served = versions.hold_served(seen.served)
    versions.check_fresh()
    served = served | versions.read_on(state, tell_table)
    met = {dataset.name: served[dataset.name] for dataset in context.app.datasets}
    records = {name: snapshot.info.schema for name, snapshot in seen.streams.items()}
    return PlannedBatch(intent.model_copy(update={"versions": met}), seen.began, records)
