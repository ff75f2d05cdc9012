"""Plans the next batch of a step: what it reads, and which dataset versions it meets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.versions_met import RECORDED
from dagster_adjunct.orchestration.startpoints.input_positions import input_positions
from dagster_adjunct.orchestration.startpoints.refused_positions import check_positions
from dagster_adjunct.orchestration.step.next_batch import NothingToRead, PlannedBatch, main_batch, replay_batch
from dagster_adjunct.orchestration.step.step_report import StepEvent

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.advance_report import AdvanceReport
    from dagster_adjunct.orchestration.step.look_before_batch import Seen
    from dagster_adjunct.orchestration.step.step_run import OpenedStep, StepRun
    from dagster_adjunct.resources.schemas.schema import Schema


def plan_batch(step: OpenedStep, run: StepRun, seen: Seen) -> PlannedBatch | NothingToRead:
    """Return what the next batch is to do, over what was seen; commit nothing. Its versions are leased by then."""
    context, versions, state = step.context, step.versions, run.logged.state
    positions = input_positions(context.app, seen.streams, state, run.held or ())
    losses = check_positions(context.app, seen.streams, state.offsets, positions)
    intent = replay_batch(context, state, positions, versions.plan_of)
    if intent is not None and intent.reading == RECORDED:
        return PlannedBatch(versions.hold_recorded(intent, seen.served), seen.began, _records(seen))
    if intent is None:
        intent = main_batch(context, state, positions)
        if intent is None:
            return NothingToRead(positions, losses)
        for text in losses:
            context.on_event(StepEvent("lost", intent.batch, {"text": text}))

    def tell_table(report: AdvanceReport) -> None:
        context.on_event(StepEvent("table", state.batch + 1, {"report": report}))

    served = versions.hold_served(seen.served)
    over_time = versions.hold_over_time(served)
    versions.check_fresh()
    served = served | versions.read_on(state, tell_table)
    met = {name: served[name] for name in (*(dataset.name for dataset in context.app.datasets), *versions.states)}
    return PlannedBatch(intent.model_copy(update={"versions": met, "over_time": over_time}), seen.began, _records(seen))


def _records(seen: Seen) -> dict[str, Schema | None]:
    return {name: snapshot.info.schema for name, snapshot in seen.streams.items()}
