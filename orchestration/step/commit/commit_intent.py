"""Begins a batch: what it is going to do is committed, before anything of it is read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.state_table import begin_state
from dagster_adjunct.assets.unbounded.transient_version import TransientVersion
from dagster_adjunct.orchestration.step.batch_records.few_records import are_few, are_interpreted, size_of
from dagster_adjunct.orchestration.step.context.batch_inputs import BatchInputs
from dagster_adjunct.orchestration.step.progress.step_report import StepEvent
from dagster_adjunct.orchestration.step.progress.watermarks import begun_times
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import Intent
    from dagster_adjunct.orchestration.step.context.step_context import StepContext
    from dagster_adjunct.orchestration.step.next_batch.hold_versions import HeldBatch
    from dagster_adjunct.orchestration.step.opened_step.step_run import OpenedStep, StepRun
    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch whose intent is committed: what it reads, how many records (or offsets), and the seconds so far."""

    run: StepRun
    intent: Intent
    inputs: BatchInputs
    records: int
    seconds: dict[str, float]


def commit_intent(step: OpenedStep, run: StepRun, batch: HeldBatch, began: float) -> OpenBatch:
    """Commit what the batch is going to do, once its outputs are known to take it; nothing is read before.

    Its seconds count from where its planning `began`, by the monotonic clock.
    """
    context, intent, state = step.context, batch.intent, run.logged.state
    met = {name: step.versions.view(name, version, state) for name, version in intent.versions.items()}
    intent = _with_what_is_left(context, intent, met)
    views = {name: view for name, view in met.items() if name not in step.states}
    states = {name: view for name, view in met.items() if isinstance(view, VersionReader) and name not in views}
    # Local tables are read with the columns and buckets that they are declared with, whatever is stored.
    own = {dataset.name for dataset in context.app.datasets if dataset.is_owned_by(context.app.name)}
    shapes = {**batch.records, **{name: _shape(view) for name, view in views.items() if name not in own}}
    if shapes != run.shapes:  # once a run, and for datasets or inputs of other columns or buckets
        context.on_event(StepEvent("analysis", intent.batch))
        starts = {ssp: span.start for ssp, span in intent.ranges.items()}
        step.engine.rehearse(context, views, starts, partial(begin_state, context.runtime)).tell()
    run = replace(run, shapes=shapes, logged=step.log.open(run.logged, intent))
    spans = intent.ranges.items()
    records = sum(context.systems[ssp.system].distance(ssp, span.start, span.end) for ssp, span in spans)
    broadcast = {dataset.name for dataset in context.app.datasets if dataset.broadcast}
    sizes = [size_of(view, broadcast=name in broadcast) for name, view in met.items()]
    few = are_few(records, intent.tasks, context.app.few_records, sizes)
    told = {"records": records, "unit": context.unit, "versions": intent.versions, "few": few}
    context.on_event(StepEvent("intent", intent.batch, told))
    inputs = BatchInputs(
        batch=intent.batch,
        ranges={ssp: OffsetRange(span.start, span.end) for ssp, span in spans},
        views=views,
        epochs=intent.epochs,
        consumed=None if intent.replays else {ssp: span.end for ssp, span in spans},
        identities=state.offsets.streams,
        tasks=intent.tasks,
        few=few,
        interpreted=few and not intent.over_time and are_interpreted(sizes),
        over_time={name: step.versions.over_time(name, met) for name, met in intent.over_time.items()},
        reading=intent.reading,
        states=states,
        clock=intent.clock,
        times=begun_times(context.app, state, intent),
        cut=intent.cut,
    )
    return OpenBatch(run, intent, inputs, records, {"intent": time.monotonic() - began})


def _with_what_is_left(
    context: StepContext, intent: Intent, met: Mapping[str, VersionReader | TransientVersion | None]
) -> Intent:
    """Return an open batch's intent with the tables of one run as they are left where retention has taken changes."""
    left = {
        name: view.version
        for name, view in met.items()
        if isinstance(view, TransientVersion) and view.version != intent.versions[name]
    }
    if not left:
        return intent
    for name, version in left.items():
        text = f"dataset {name!r}: retention has taken changes that batch {intent.batch} had met; it meets {version}"
        context.on_event(StepEvent("lost", intent.batch, {"text": text}))
    return intent.model_copy(update={"versions": {**intent.versions, **left}, "cut": True})


def _shape(view: VersionReader | TransientVersion | None) -> tuple[Schema, int | None] | None:
    """Return what Spark's plans depend on of a dataset's version: its columns, and in how many buckets it lies."""
    if view is None:
        return None
    sealed = getattr(view, "sealed", None)
    return view.schema, None if sealed is None else sealed.partitions
