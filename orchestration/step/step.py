"""The step of a planned application: runs batch after batch until it has caught up or reached its
limit.

    resume     replaces the stages up to lease: the batch that a crash left open, as logged
               plan_batch.py
    maintain   local tables: undo an abandoned batch, merge small generations
               plan_batch.py
    snapshot   the served dataset versions and the input streams
               plan_batch.py
    start      once a run: resolve startpoints, give every partition a position
               plan_batch.py
    plan       what the batch reads
               plan_batch.py
    lease      the dataset versions that it reads
               plan_batch.py
    intent     commit what it reads, before anything is read
    outputs    write all outputs; streams and local tables take each batch once
               batch.py
    close      commit the end of the batch, which is the checkpoint
    positions  replaces lease and later stages if there is nothing to read: commit how far the
               inputs were read

A crash leaves either a closed batch or an open intent; the next run repeats that intent as logged.
The commit of a checkpoint applies the batch's startpoints; after it, they are removed from the
fan-outs. If a crash prevents the removal, the log still records that they were applied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.local_table import create_state
from dagster_adjunct.assets.unbounded.transient_table import TransientVersion
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ClosedBatch,
    Counters,
    add_counters,
    check_not_renamed,
)
from dagster_adjunct.orchestration.step.check_stores import check_stores
from dagster_adjunct.orchestration.step.context import (
    BatchInputs,
    BatchMetrics,
    StepContext,
    StepState,
)
from dagster_adjunct.orchestration.step.engines import BatchEngine, choose_engine
from dagster_adjunct.orchestration.step.lookups import OpenTables
from dagster_adjunct.orchestration.step.plan_batch import (
    NothingToRead,
    PlannedBatch,
    Spans,
    find_lost_ranges,
    lease_versions,
    maintain_local_tables,
    plan_batch,
    resume_open_batch,
    snapshot_inputs,
    snapshot_open_inputs,
    store_first_positions,
)
from dagster_adjunct.orchestration.step.progress import (
    StepEvent,
    StepReport,
    measure_input_times,
    times_at_batch_start,
)
from dagster_adjunct.orchestration.step.recorded_answers import purge_answers
from dagster_adjunct.orchestration.step.small_spark_batch import classify_batch
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.store import requests_at_once
from dagster_adjunct.resources.spark.tasks import find_adjunct_error
from dagster_adjunct.resources.tables.operation import run_blocking
from dagster_adjunct.resources.tables.shared_rate import RunCredits
from dagster_adjunct.resources.threads import call_in_threads

_log = logging.getLogger("adjunct.run")
# How often a run starts, at most: the run that it took over from may commit once more.
_MAX_STARTS = 3
# How often a batch is planned, at most: versions may be discarded between the snapshot and their
# lease.
_MAX_SNAPSHOTS = 6
# Seconds before a batch is retried after a store failure.
_RETRY_PAUSES = (1.0, 5.0)
# Old commits are deleted from the batch log once in this many batches.
_FORGETTING = 100
# Errors that are fixed in the application, its records or its tables; the batch stays open until
# then.
_APPLICATION_ERRORS = (
    errors.NullKeyError,
    errors.OperatorFailedError,
    errors.PlanningError,
    errors.ProducerConflictError,
    errors.SchemaMismatchError,
    errors.TableError,
)

# What a batch meets where records of its inputs are gone.
_MISSING_RECORDS = (errors.ManifestMismatchError, errors.OffsetOutOfRangeError)


def run_step(given: StepContext, engine: BatchEngine | None = None) -> StepReport:
    """Run batches until the inputs are read to their ends, or `max_batches` is reached; return the
    report of the run.

    A batch that a crash left open comes first. Then the startpoints that the tasks were handed are
    resolved, once a run. Bounded replays take turns with the main input. `engine` computes what a
    batch does, by default the one that the application has chosen.

    Raises NoSealedVersionError before reading any input when a dataset marked for bootstrap has no
    version, StaleDatasetError when one is staler than its table allows, and CommitConflictError
    when another run takes the application over. A run that holds the lease may find a commit that
    is not its own: of the run that held the lease before, or of somebody who has taken a startpoint
    back. Then it starts again from that commit.
    """
    for attempt in range(1, _MAX_STARTS + 1):
        with _open_step(given) as (context, begun):
            run, engine = begun, engine or choose_engine(context)
            try:
                while context.max_batches is None or run.report.batches < context.max_batches:
                    began = time.monotonic()
                    run, batch = _prepare_batch(context, run)
                    if isinstance(batch, NothingToRead):
                        run = _commit_positions(context, run, batch)
                        if context.wait():
                            continue
                        return run.finish(context, caught_up=True)
                    run, inputs = _commit_intent(context, engine, run, batch)
                    seconds = {"intent": time.monotonic() - began}
                    try:
                        outputs = _write_outputs(context, engine, run, inputs, seconds)
                    except errors.OffsetOutOfRangeError:
                        if not find_lost_ranges(context, inputs.intent):
                            raise
                        continue  # retention was faster: resume it as a batch that was left open
                    run = _close_batch(context, run, inputs, outputs, seconds)
                    context.on_report(replace(run.report, state=run.logged.state))
                    if not context.go_on():
                        break
                return run.finish(context, caught_up=False)
            except errors.ManifestMismatchError as missing:
                _check_inputs_are_there(context, run, missing)
                raise
            except errors.CommitConflictError as conflict:
                began_batch = run.logged.state.open is not None and run.logged is not begun.logged
                if began_batch or context.still_ours is None or attempt == _MAX_STARTS:
                    raise
                context.check()
                if run.report.batches:
                    given = replace(given, earlier=run.report)
                text = (
                    f"{conflict.problem} This run holds the lease and starts again from that"
                    " commit."
                )
                context.on_event(StepEvent("lease", 0, {"text": text}))
    raise AssertionError("unreachable")


def _check_inputs_are_there(
    context: StepContext, run: StepState, missing: errors.ManifestMismatchError
) -> None:
    """Raise StreamNotFoundError or OffsetOutOfRangeError if files are missing with their stream.

    Somebody has deleted it since the batch was planned.
    """
    opened = context.log.read().state.open
    try:
        if opened is not None:
            snapshot_open_inputs(context, opened, run.logged.state.offsets.streams)
        else:
            snapshot_inputs(context, run)
    except (errors.StreamNotFoundError, errors.OffsetOutOfRangeError) as gone:
        raise gone from missing


@contextmanager
def _open_step(context: StepContext) -> Iterator[tuple[StepContext, StepState]]:
    """Yield the context of a run of the step with its resources, and its initial state; release
    them at the end.
    """
    logged = context.log.read()
    check_not_renamed(context.app.name, logged.state)
    # What closing a batch does not delete: answers of an abandoned batch, or of an operator that
    # was removed.
    purge_answers(context.lake, context.app.name, logged.state.batch)
    with RunCredits(context.lake) as credits, closing(OpenTables()) as tables:
        context = replace(
            context, writes_as=logged.state.writes_as, credits=credits, open_tables=tables
        )
        with closing(context.versions):
            report = context.earlier or StepReport(0, False, {}, {}, {}, logged.state)
            yield context, StepState(logged, report)


def _prepare_batch(
    context: StepContext, run: StepState
) -> tuple[StepState, PlannedBatch | NothingToRead]:
    """Return the open batch, or plan and lease the next one; nothing of a new batch is committed
    yet.

    Where a version is discarded between the snapshot and its lease, the batch is planned again over
    a new snapshot.
    """
    if run.logged.state.open is not None:
        context.check()
        return run, resume_open_batch(context, run, run.logged.state.open)
    if run.report.batches:
        context.between_batches()
    maintain_local_tables(context, run)
    for attempt in range(1, _MAX_SNAPSHOTS + 1):
        seen = snapshot_inputs(context, run)
        run = store_first_positions(context, run, seen)
        planned = plan_batch(context, run, seen)
        if isinstance(planned, NothingToRead):
            return run, planned
        try:
            return run, lease_versions(context, run, planned, seen)
        except errors.VersionDiscardedError:
            if attempt == _MAX_SNAPSHOTS:
                raise
    raise AssertionError("unreachable")


def _commit_intent(
    context: StepContext, engine: BatchEngine, run: StepState, batch: PlannedBatch
) -> tuple[StepState, BatchInputs]:
    """Commit the intent of the batch, after a dry run has shown that its outputs accept it; return
    what it reads.

    Once a step, and when columns change, the stores of its remote tables are asked whether they can
    be used.

    No input is read before the commit.
    """
    app, intent, state = context.app, batch.intent, run.logged.state
    opened = {
        name: context.versions.view(name, version, state)
        for name, version in intent.versions.items()
    }
    # A resumed batch reads the versions of per-run tables that are left after retention.
    rebuilt = {
        name: view.version for name, view in opened.items() if isinstance(view, TransientVersion)
    }
    rebuilt = {
        name: version for name, version in rebuilt.items() if version != intent.versions[name]
    }
    for name, version in rebuilt.items():
        text = (
            f"dataset {name!r}: retention has deleted changes that batch {intent.batch} had read;"
            f" it reads {version}"
        )
        context.on_event(StepEvent("lost", intent.batch, {"text": text}))
    if rebuilt:
        intent = intent.model_copy(update={"versions": {**intent.versions, **rebuilt}, "cut": True})
    state_tables = context.states
    views = {name: view for name, view in opened.items() if name not in state_tables}
    states = {
        name: view
        for name, view in opened.items()
        if isinstance(view, VersionReader) and name not in views
    }
    # Local tables are read with the columns and buckets that they are declared with, whatever is
    # stored. Spark's plans depend on the columns and buckets of all others.
    own = {dataset.name for dataset in app.datasets if dataset.is_owned_by(app.name)}
    shapes: dict[str, object] = {name: stream.info.schema for name, stream in batch.streams.items()}
    for name, view in views.items():
        if name not in own:
            buckets = view.sealed.partitions if isinstance(view, VersionReader) else None
            shapes[name] = None if view is None else (view.schema, buckets)
    if shapes != run.shapes:  # once a run, and when columns or buckets change
        context.on_event(StepEvent("analysis", intent.batch))
        starts = {ssp: span.start for ssp, span in intent.ranges.items()}
        check_stores(app)
        proof = engine.analyze(context, views, starts)
        for dataset in proof.states:
            create_state(context.runtime, dataset)
        proof.report_differences()
    context.before_batch(context.fence)
    run = replace(run, shapes=shapes, logged=context.log.open(run.logged, intent))
    spans = intent.ranges.items()
    records = sum(
        context.systems[ssp.system].distance(ssp, span.start, span.end) for ssp, span in spans
    )
    broadcast = {dataset.name for dataset in app.datasets if dataset.broadcast}
    few, interpreted = classify_batch(records, intent.tasks, app.few_records, opened, broadcast)
    if not few:
        context.versions.unpersist()
    detail = {"records": records, "unit": context.unit, "versions": intent.versions, "few": few}
    context.on_event(StepEvent("intent", intent.batch, detail))
    inputs = BatchInputs(
        intent,
        views,
        identities=state.offsets.streams,
        records=records,
        few=few,
        interpreted=interpreted and not intent.over_time,
        over_time={
            name: context.versions.over_time(name, ids) for name, ids in intent.over_time.items()
        },
        states=states,
        times=times_at_batch_start(app, state, intent),
        streams={name: stream.system for name, stream in batch.streams.items()},
    )
    return run, inputs


def _write_outputs(
    context: StepContext,
    engine: BatchEngine,
    run: StepState,
    inputs: BatchInputs,
    seconds: dict[str, float],
) -> BatchMetrics:
    """Write every output and return the batch's metrics; after a store failure start over, keeping
    what is written.

    Adds the time that it took to `seconds`, as "work".
    """
    began, intent = time.monotonic(), inputs.intent

    def before_output(name: str, look: Callable[[], Any] = lambda: None) -> Any:
        """Raise if the run may not write this output; return the result of `look`, which is
        called meanwhile.
        """
        owned = partial(context.log.check_not_superseded, run.logged)
        *_, found = call_in_threads(
            context.check, owned, look, at_once=requests_at_once(context.lake.store)
        )
        context.versions.check_leases()
        context.on_event(StepEvent("output", intent.batch, {"output": name}))
        return found

    for pause in (*_RETRY_PAUSES, None):
        try:
            if (
                not inputs.streams
            ):  # a retry: files that they had when the batch was planned may have been deleted
                now = snapshot_open_inputs(context, intent, inputs.identities)
                inputs = replace(
                    inputs, streams={name: stream.system for name, stream in now.items()}
                )
            _announce_run(context)
            outputs = engine.run(context, inputs, before_output)
        except Exception as error:
            ours = find_adjunct_error(error)
            if isinstance(ours, _APPLICATION_ERRORS):
                explained = _add_next_steps(ours, context.app.name, intent.batch)
                if explained is error:
                    raise
                raise explained from (error.__cause__ if ours is error else error)
            if isinstance(ours, _MISSING_RECORDS) and ours is not error:
                raise ours from error  # raised in a task
            if pause is None or not isinstance(ours, errors.StoreUnavailableError):
                raise
            text = f"{ours.problem} The batch is retried in {pause:g} s"
            context.on_event(StepEvent("again", intent.batch, {"text": text}))
            inputs = replace(inputs, streams={})
        else:
            seconds["work"] = time.monotonic() - began
            return outputs
        time.sleep(pause)
    raise AssertionError("unreachable")


def _announce_run(context: StepContext) -> None:
    """Let tables refuse writes of earlier runs, if one of them may have been paused and wake up
    (`Fence`).
    """
    lease, fence = context.lease, context.fence
    if lease is None or fence is None or not lease.has_unfenced:
        return
    names = {
        operator.spec.send.table
        for operator in context.app.operators
        if operator.spec.send is not None
    }

    async def announce() -> None:
        for name in sorted(names):
            async with context.app.tables[name].with_fence(fence) as table:
                await table.announce()

    run_blocking(announce())
    lease.note_fenced()


def _add_next_steps(error: errors.AdjunctError, app: str, batch: int) -> errors.AdjunctError:
    """Return the error with how to finish or abandon the batch that it leaves open, in its next
    step or as a note.
    """
    give_up = f"adjunct checkpoint abandon {app} --reason …"
    if (
        isinstance(error, errors.ProducerConflictError)
        and error.newest is not None
        and error.newest > batch
    ):
        return error.reworded(
            error.problem,
            f"Nothing was written. Batch {batch} is open, and the output has batches of {app!r} up"
            f" to {error.newest}: the batch log was deleted, or another application has this name."
            " Restore the log, or choose another name.",
        )
    if isinstance(error, errors.ProducerConflictError):
        return error.reworded(
            error.problem,
            f"Batch {batch} is open, and this output already has it from a run with different code:"
            " finish it with that code and deploy again; or abandon it, and its records are sent"
            f" again in another batch: {give_up}.",
        )
    way_out = (
        f"Batch {batch} stays open: the next run retries it with the code deployed by then, and"
        f" adds nothing to outputs that have it. Or abandon it: {give_up} (--skip also skips its"
        " records)."
    )
    if isinstance(error, errors.OperatorFailedError):
        return error.reworded(error.problem, f"{error.next_step} {way_out}")
    if way_out not in getattr(error, "__notes__", ()):
        error.add_note(way_out)
    return error


def _close_batch(
    context: StepContext,
    run: StepState,
    inputs: BatchInputs,
    outputs: BatchMetrics,
    seconds: dict[str, float],
) -> StepState:
    """Commit the end of the batch, which applies its startpoints; then remove these from the
    fan-outs.
    """
    began, intent = time.monotonic(), inputs.intent
    before = run.logged.state.offsets
    done = ClosedBatch(
        intent=intent,
        closed_at=context.lake.now(),
        records=inputs.records,
        counters=add_counters(outputs.counters, _count_lost(context, intent.lost)),
        seconds=seconds,
    )
    context.on_event(StepEvent("outputs", intent.batch))
    logged = context.log.close(run.logged, done, outputs.times, checks=[context.check])
    context.startpoints.remove_applied(context.tasks, intent.startpoints)
    if any(call.recorded for call in context.plan.calls):
        purge_answers(context.lake, context.app.name, intent.batch)
    if intent.batch % _FORGETTING == 0:
        _forget_old_batches(context)
    state, after = logged.state, logged.state.offsets
    texts = [
        f"{after.applied[ssp].describe(ssp)} applied in batch {intent.batch}"
        for ssp in intent.startpoints
    ]
    texts += [
        f"{before.replays[key].describe()} has ended"
        for key in before.replays
        if key not in after.replays
    ]
    run = replace(run, logged=logged).with_messages(context, texts)
    run = run.with_batch(done, time.monotonic() - began, outputs, few=inputs.few)
    detail: dict[str, Any] = {
        "records": state.records,
        "unit": context.unit,
        "counters": outputs.counters,
    }
    detail["in_process"] = outputs.in_process
    if marks := measure_input_times(context.app, state.times, done.closed_at):
        detail["watermarks"] = marks
    context.on_event(StepEvent("batch", intent.batch, detail))
    return run


def _forget_old_batches(context: StepContext) -> None:
    """Delete what the application's batch log no longer retains. Raises nothing: the batch is
    done.
    """
    if context.app.log_retention is not None:
        try:
            context.log.forget(context.app.log_retention)
        except errors.AdjunctError as error:
            _log.warning(
                "the batch log of %s keeps old commits for now: %s", context.app.name, error
            )


def _commit_positions(context: StepContext, run: StepState, nothing: NothingToRead) -> StepState:
    """Commit the positions that the inputs have been read up to, with the startpoints applied
    there.

    Does nothing if no startpoint or loss has moved a position.
    """
    positions = nothing.positions
    if not (positions.startpoints or positions.lost):
        return run
    applied = {ssp: start.id for ssp, start in positions.startpoints.items()}
    lost, state = _count_lost(context, positions.lost), run.logged.state
    update = {
        "checkpoint": {
            **state.checkpoint,
            **{ssp: span.start for ssp, span in positions.unread.items()},
        },
        "offsets": state.offsets.with_applied(applied, None, context.lake.now()),
        "totals": add_counters(state.totals, lost),
    }
    note = "; ".join(["positions moved, nothing to read there yet", *nothing.losses])
    logged = context.log.commit(
        run.logged, state.model_copy(update=update), by=context.run, note=note
    )
    context.startpoints.remove_applied(context.tasks, applied)
    after = logged.state.offsets.applied
    texts = [f"{after[ssp].describe(ssp)} applied; there is nothing to read yet" for ssp in applied]
    report = replace(run.report, counters=add_counters(run.report.counters, lost))
    run = replace(run, logged=logged, report=report).with_messages(context, texts)
    for text in nothing.losses:
        context.on_event(StepEvent("lost", logged.state.batch, {"text": text}))
    return run


def _count_lost(context: StepContext, lost: Spans) -> Counters:
    """Return the number of lost offsets of each stream, as counters."""
    counters: Counters = {}
    for ssp, span in lost.items():
        distance = context.systems[ssp.system].distance(ssp, span.start, span.end)
        counters = add_counters(counters, {ssp.qualified_stream: {"lost_offsets": distance}})
    return counters
