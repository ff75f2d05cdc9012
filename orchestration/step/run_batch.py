"""One batch of a step, from its plan to its end: its intent is committed, its outputs are run, its end is committed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.batchlog.batch_log import ClosedBatch, add_counters
from dagster_adjunct.orchestration.step.compile_batch import BatchInputs, run_batch
from dagster_adjunct.orchestration.step.next_batch import lost_counters, records_in
from dagster_adjunct.orchestration.step.rehearsal import check_outputs
from dagster_adjunct.orchestration.step.step_report import StepEvent
from dagster_adjunct.resources.errors import StoreUnavailableError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.spark.spark_errors import adjunct_error
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import Intent
    from dagster_adjunct.orchestration.step.plan_batch import PlannedBatch
    from dagster_adjunct.orchestration.step.step_context import StepContext
    from dagster_adjunct.orchestration.step.step_run import Counters, OpenedStep, StepRun

# Seconds before a batch's work is begun again where the store broke off in the middle of it.
_PAUSES = (1.0, 5.0)


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch whose intent is committed: what it reads, how many `records` these are, and the seconds it took so far.

    `unit` is what is counted: offsets have no records behind them everywhere in systems with holes.
    """

    run: StepRun
    intent: Intent
    inputs: BatchInputs
    records: int
    unit: str
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """A batch whose outputs are all written, with what they and the joins have counted."""

    opened: OpenBatch
    counters: Counters
    seconds: dict[str, float]


def commit_intent(step: OpenedStep, planned: PlannedBatch, intent: Intent) -> OpenBatch:
    """Commit what the batch is going to do, once its outputs are known to take it; nothing is read before."""
    context, run = step.context, planned.run
    state = run.logged.state
    views = {name: step.versions.view(name, version, state) for name, version in intent.versions.items()}
    columns = {name: None if view is None else view.schema for name, view in views.items()}
    if columns != run.columns:  # once a run, and for other columns of the datasets
        check_outputs(context, views)
    run = replace(run, columns=columns, logged=step.log.open(run.logged, intent))
    records = records_in(context.systems, intent.ranges)
    systems = {split_stream_name(stream)[0] for stream in context.app.inputs}
    unit = "records" if all(context.systems[name].counts_unread for name in systems) else "offsets"
    _tell(context, "intent", intent, records=records, unit=unit, versions=intent.versions)
    inputs = BatchInputs(
        batch=intent.batch,
        ranges={ssp: OffsetRange(span.start, span.end) for ssp, span in intent.ranges.items()},
        views=views,
        epochs=intent.epochs,
        consumed=None if intent.replays else {ssp: span.end for ssp, span in intent.ranges.items()},
        identities=state.offsets.streams,
        tasks=intent.tasks,
    )
    return OpenBatch(run, intent, inputs, records, unit, {"intent": time.monotonic() - planned.began})


def run_outputs(step: OpenedStep, opened: OpenBatch) -> WrittenBatch:
    """Write every output; where the store broke off, again from the beginning: what is written already stays."""
    began, context, intent = time.monotonic(), step.context, opened.intent

    def before_output(name: str) -> None:
        context.check()
        step.log.hold(opened.run.logged)
        step.versions.check_leases()
        _tell(context, "output", intent, output=name)

    for pause in (*_PAUSES, None):
        try:
            counters = run_batch(context, opened.inputs, before_output)
            return WrittenBatch(opened, counters, opened.seconds | {"work": time.monotonic() - began})
        except Exception as error:
            ours = adjunct_error(error)
            if pause is None or not isinstance(ours, StoreUnavailableError):
                raise
            _tell(context, "again", intent, text=f"{ours.problem} The batch is begun again in {pause:g} s")
        time.sleep(pause)
    raise AssertionError("unreachable")


def close_batch(step: OpenedStep, written: WrittenBatch) -> StepRun:
    """Commit the end of the batch, which applies its startpoints, and only then remove these from the fan-outs."""
    began, context, opened = time.monotonic(), step.context, written.opened
    run, intent, before = opened.run, opened.intent, opened.run.logged.state.offsets
    done = ClosedBatch(
        intent=intent,
        closed_at=context.lake.now(),
        records=opened.records,
        counters=add_counters(written.counters, lost_counters(context.systems, intent.lost)),
        seconds=written.seconds,
    )
    _tell(context, "outputs", intent)
    context.check()
    logged = step.log.close(run.logged, done)
    # Only now: a crash before this line leaves them fanned out, and the log knows that they were applied.
    step.startpoints.remove_applied(step.tasks, intent.startpoints)
    state, after = logged.state, logged.state.offsets
    texts = [f"{after.applied[ssp].words(ssp)} applied in batch {intent.batch}" for ssp in intent.startpoints]
    texts += [f"{before.replays[key].words()} has ended" for key in before.replays if key not in after.replays]
    run = replace(run, logged=logged).told(context, texts).with_batch(done, time.monotonic() - began)
    _tell(context, "batch", intent, records=state.records, unit=opened.unit, counters=written.counters)
    return run


def _tell(context: StepContext, what: str, intent: Intent, **detail: Any) -> None:
    context.on_event(StepEvent(what, intent.batch, detail))
