"""Commits a batch: its intent before anything is read, its outputs, then its end, which is the checkpoint.

A commit of the checkpoint applies the startpoints that lie before it; only then are they removed from the fan-outs. A
crash in between leaves them there, and the log knows that they were applied.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.state_table import create_state
from dagster_adjunct.assets.unbounded.transient import TransientVersion
from dagster_adjunct.orchestration.batch_log.batch_log import ClosedBatch, Intent, Range, TimeState, add_counters
from dagster_adjunct.orchestration.step.context import BatchInputs, Counters, StepContext, StepResources, StepState
from dagster_adjunct.orchestration.step.plan_batch import NothingToRead
from dagster_adjunct.orchestration.step.progress import StepEvent, measure_input_times, times_at_batch_start
from dagster_adjunct.orchestration.step.recorded_answers import purge_answers
from dagster_adjunct.orchestration.step.small_batches import is_small_batch, measure_version, should_interpret
from dagster_adjunct.orchestration.step.versions import LeasedBatch
from dagster_adjunct.resources.errors import (
    AdjunctError,
    NullKeyError,
    OffsetOutOfRangeError,
    OperatorFailedError,
    PlanningError,
    ProducerConflictError,
    SchemaMismatchError,
    StoreUnavailableError,
    TableError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.errors import find_adjunct_error
from dagster_adjunct.resources.streams.system import OffsetRange, StreamSystem, SystemStreamPartition
from dagster_adjunct.resources.tables.metrics import TableMetrics


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch whose intent is committed: its inputs, its number of records (or offsets), and the seconds so far."""

    run: StepState
    intent: Intent
    inputs: BatchInputs
    records: int
    seconds: dict[str, float]


def commit_intent(step: StepResources, run: StepState, batch: LeasedBatch, began: float) -> OpenBatch:
    """Commit the intent of the batch, after a dry run has shown that its outputs accept it; nothing is read before.

    `began` is when its planning began, by the monotonic clock.
    """
    context, intent, state = step.context, batch.intent, run.logged.state
    met = {name: step.versions.view(name, version, state) for name, version in intent.versions.items()}
    intent = _follow_lost_changes(context, intent, met)
    views = {name: view for name, view in met.items() if name not in step.states}
    states = {name: view for name, view in met.items() if isinstance(view, VersionReader) and name not in views}
    # Local tables are read with the columns and buckets that they are declared with, whatever is stored.
    own = {dataset.name for dataset in context.app.datasets if dataset.is_owned_by(context.app.name)}
    shapes = {**batch.records, **{name: _plan_shape(view) for name, view in views.items() if name not in own}}
    if shapes != run.shapes:  # once a run, and when columns or buckets change
        context.on_event(StepEvent("analysis", intent.batch))
        starts = {ssp: span.start for ssp, span in intent.ranges.items()}
        step.engine.analyze(context, views, starts, partial(create_state, context.runtime)).report_differences()
    run = replace(run, shapes=shapes, logged=step.log.open(run.logged, intent))
    spans = intent.ranges.items()
    records = sum(context.systems[ssp.system].distance(ssp, span.start, span.end) for ssp, span in spans)
    broadcast = {dataset.name for dataset in context.app.datasets if dataset.broadcast}
    sizes = [measure_version(view, broadcast=name in broadcast) for name, view in met.items()]
    few = is_small_batch(records, intent.tasks, context.app.few_records, sizes)
    detail = {"records": records, "unit": context.unit, "versions": intent.versions, "few": few}
    context.on_event(StepEvent("intent", intent.batch, detail))
    inputs = BatchInputs(
        batch=intent.batch,
        ranges={ssp: OffsetRange(span.start, span.end) for ssp, span in spans},
        views=views,
        epochs=intent.epochs,
        consumed=None if intent.replays else {ssp: span.end for ssp, span in spans},
        identities=state.offsets.streams,
        tasks=intent.tasks,
        few=few,
        interpreted=few and not intent.over_time and should_interpret(sizes),
        over_time={name: step.versions.over_time(name, met) for name, met in intent.over_time.items()},
        reading=intent.reading,
        states=states,
        clock=intent.clock,
        times=times_at_batch_start(context.app, state, intent),
        cut=intent.cut,
    )
    return OpenBatch(run, intent, inputs, records, {"intent": time.monotonic() - began})


def _follow_lost_changes(
    context: StepContext, intent: Intent, met: Mapping[str, VersionReader | TransientVersion | None]
) -> Intent:
    """Return the intent of a resumed batch, with the versions of per-run tables that are left after retention."""
    left = {
        name: view.version
        for name, view in met.items()
        if isinstance(view, TransientVersion) and view.version != intent.versions[name]
    }
    if not left:
        return intent
    for name, version in left.items():
        text = f"dataset {name!r}: retention has deleted changes that batch {intent.batch} had read; it reads {version}"
        context.on_event(StepEvent("lost", intent.batch, {"text": text}))
    return intent.model_copy(update={"versions": {**intent.versions, **left}, "cut": True})


def _plan_shape(view: VersionReader | TransientVersion | None) -> tuple[Schema, int | None] | None:
    """Return what Spark's plans depend on in a dataset's version: its columns and its number of buckets."""
    if view is None:
        return None
    sealed = getattr(view, "sealed", None)
    return view.schema, None if sealed is None else sealed.partitions


def close_batch(step: StepResources, written: WrittenBatch) -> StepState:
    """Commit the end of the batch, which applies its startpoints; then remove these from the fan-outs."""
    began, context, opened = time.monotonic(), step.context, written.opened
    run, intent, before = opened.run, opened.intent, opened.run.logged.state.offsets
    done = ClosedBatch(
        intent=intent,
        closed_at=context.lake.now(),
        records=opened.records,
        counters=_add_lost_counts(written.counters, context.systems, intent.lost),
        seconds=written.seconds,
    )
    context.on_event(StepEvent("outputs", intent.batch))
    context.check()
    logged = step.log.close(run.logged, done, written.times)
    step.startpoints.remove_applied(step.tasks, intent.startpoints)
    if any((asked := operator.spec.call(context.app)) and asked.recorded for operator in context.app.operators):
        purge_answers(context.lake, context.app.name, intent.batch)
    state, after = logged.state, logged.state.offsets
    texts = [f"{after.applied[ssp].words(ssp)} applied in batch {intent.batch}" for ssp in intent.startpoints]
    texts += [f"{before.replays[key].words()} has ended" for key in before.replays if key not in after.replays]
    run = replace(run, logged=logged).with_messages(context, texts)
    run = run.with_batch(done, time.monotonic() - began, written.measured, few=opened.inputs.few)
    detail: dict[str, Any] = {"records": state.records, "unit": context.unit, "counters": written.counters}
    if marks := measure_input_times(context.app, state.times, done.closed_at):
        detail["watermarks"] = marks
    context.on_event(StepEvent("batch", intent.batch, detail))
    return run


def commit_positions(step: StepResources, run: StepState, nothing: NothingToRead) -> StepState:
    """Commit the positions that the inputs have been read up to, with the startpoints there; nothing if none moved."""
    context, positions = step.context, nothing.positions
    if not (positions.startpoints or positions.lost):
        return run
    applied = {ssp: start.id for ssp, start in positions.startpoints.items()}
    lost = _add_lost_counts({}, context.systems, positions.lost)
    reached = {ssp: span.start for ssp, span in positions.unread.items()}
    note = "; ".join(["positions moved, nothing to read there yet", *nothing.losses])
    logged = step.log.commit_positions(run.logged, reached, applied, lost, by=context.run, note=note)
    step.startpoints.remove_applied(step.tasks, applied)
    run = replace(run, logged=logged, counters=add_counters(run.counters, lost))
    after = logged.state.offsets.applied
    run = run.with_messages(
        context, [f"{after[ssp].words(ssp)} applied; there is nothing to read yet" for ssp in applied]
    )
    for text in nothing.losses:
        context.on_event(StepEvent("lost", logged.state.batch, {"text": text}))
    return run


def _add_lost_counts(
    counters: Counters,
    systems: Mapping[str, StreamSystem],
    lost: Mapping[SystemStreamPartition, OffsetRange | Range],
) -> Counters:
    """Return the counters with the number of lost offsets of each stream."""
    counted = {name: dict(of_name) for name, of_name in counters.items()}
    for ssp, span in lost.items():
        of_stream = counted.setdefault(ssp.qualified_stream, {})
        distance = systems[ssp.system].distance(ssp, span.start, span.end)
        of_stream["lost_offsets"] = of_stream.get("lost_offsets", 0) + distance
    return counted


# Errors that are fixed in the application, its records or its tables; the batch stays open until then.
_APPLICATION_ERRORS = (
    NullKeyError,
    OperatorFailedError,
    PlanningError,
    ProducerConflictError,
    SchemaMismatchError,
    TableError,
)
# Seconds before a batch is retried after a store failure.
_RETRY_PAUSES = (1.0, 5.0)


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """A batch whose outputs are all written, with its counters and table metrics.

    `times` are the event times of the inputs after it; None where they do not change.
    """

    opened: OpenBatch
    counters: Counters
    measured: Mapping[str, TableMetrics]
    seconds: dict[str, float]
    times: TimeState | None = None


def add_next_steps(error: AdjunctError, app: str, batch: int) -> AdjunctError:
    """Return the error with how to finish or abandon the batch that it leaves open, in its next step or as a note."""
    give_up = f"adjunct checkpoint abandon {app} --reason …"
    if isinstance(error, ProducerConflictError) and error.newest is not None and error.newest > batch:
        return error.reworded(
            error.problem,
            f"Nothing was written. Batch {batch} is open, and the output has batches of {app!r} up to {error.newest}: "
            "the batch log was deleted, or another application has this name. Restore the log, or choose another name.",
        )
    if isinstance(error, ProducerConflictError):
        return error.reworded(
            error.problem,
            f"Batch {batch} is open, and this output already has it from a run with different code: finish it with "
            f"that code and deploy again; or abandon it, and its records are sent again in another batch: {give_up}.",
        )
    way_out = (
        f"Batch {batch} stays open: the next run retries it with the code deployed by then, and adds nothing to "
        f"outputs that have it. Or abandon it: {give_up} (--skip also skips its records)."
    )
    if isinstance(error, OperatorFailedError):
        return error.reworded(error.problem, f"{error.next_step} {way_out}")
    if way_out not in getattr(error, "__notes__", ()):
        error.add_note(way_out)
    return error


def write_outputs(step: StepResources, opened: OpenBatch) -> WrittenBatch:
    """Write every output; after a store failure start over, keeping what is already written."""
    began, context, intent = time.monotonic(), step.context, opened.intent

    def before_output(name: str) -> None:
        context.check()
        step.log.check_not_superseded(opened.run.logged)
        step.leases.check_held()
        context.on_event(StepEvent("output", intent.batch, {"output": name}))

    for pause in (*_RETRY_PAUSES, None):
        try:
            done = step.engine.run(context, opened.inputs, before_output)
            return WrittenBatch(
                opened, done.counters, done.measured, opened.seconds | {"work": time.monotonic() - began}, done.times
            )
        except Exception as error:
            ours = find_adjunct_error(error)
            if isinstance(ours, _APPLICATION_ERRORS):
                explained = add_next_steps(ours, context.app.name, intent.batch)
                if explained is error:
                    raise
                raise explained from (error.__cause__ if ours is error else error)
            if isinstance(ours, OffsetOutOfRangeError) and ours is not error:
                raise ours from error  # raised in a task
            if pause is None or not isinstance(ours, StoreUnavailableError):
                raise
            text = f"{ours.problem} The batch is retried in {pause:g} s"
            context.on_event(StepEvent("again", intent.batch, {"text": text}))
        time.sleep(pause)
    raise AssertionError("unreachable")
