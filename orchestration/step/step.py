"""The step of a planned application: runs batch after batch until it has caught up or reached its limit.

    resume     instead of the stages up to lease: the batch that a crash left open, as logged    plan_batch.py
    maintain   local tables: undo an abandoned batch, merge small generations                    plan_batch.py
    snapshot   the served dataset versions and the input streams                                 plan_batch.py
    start      once a run: resolve startpoints, give every partition a position                  plan_batch.py
    plan       what the batch reads                                                              plan_batch.py
    lease      the dataset versions that it reads                                                plan_batch.py
    intent     commit what it reads, before anything is read
    outputs    write all outputs; streams and local tables take each batch once                  batch.py
    close      commit the end of the batch, which is the checkpoint
    positions  instead, where there is nothing to read: commit how far the inputs were read

A crash leaves either a closed batch or an open intent; the next run repeats that intent as logged. A commit of the
checkpoint applies the startpoints that lie before it; only then are they removed from the fan-outs. A crash in between
leaves them there, and the log knows that they were applied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.local_table import create_state
from dagster_adjunct.assets.unbounded.transient import TransientVersion
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog, ClosedBatch, Counters, add_counters
from dagster_adjunct.orchestration.startpoints.store import open_startpoints
from dagster_adjunct.orchestration.step.batch import BatchMetrics, run_batch
from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext, StepResources, StepState
from dagster_adjunct.orchestration.step.plan_batch import (
    BatchVersions,
    NothingToRead,
    PlannedBatch,
    Spans,
    find_lost_ranges,
    lease_versions,
    maintain_local_tables,
    plan_batch,
    resume_open_batch,
    snapshot_inputs,
    store_first_positions,
)
from dagster_adjunct.orchestration.step.progress import (
    StepEvent,
    StepReport,
    measure_input_times,
    times_at_batch_start,
)
from dagster_adjunct.orchestration.step.recorded_answers import OpenTables, purge_answers
from dagster_adjunct.orchestration.step.state import iter_state_names
from dagster_adjunct.orchestration.step.verify_plan import PhysicalProof, analyze_batch
from dagster_adjunct.resources.errors import (
    AdjunctError,
    CommitConflictError,
    NullKeyError,
    OffsetOutOfRangeError,
    OperatorFailedError,
    PlanningError,
    ProducerConflictError,
    SchemaMismatchError,
    StoreUnavailableError,
    TableError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.spark.errors import find_adjunct_error
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.spark.tuning import FEW_ROWS, prewarm_workers
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.resources.tables.shared_rate import RunCredits

# How often a run begins: the run that it took over from may commit once more.
_MAX_STARTS = 3
# How often a batch is planned: versions may be discarded between the snapshot and their lease.
_MAX_SNAPSHOTS = 6
# Seconds before a batch is retried after a store failure.
_RETRY_PAUSES = (1.0, 5.0)
# Errors that are fixed in the application, its records or its tables; the batch stays open until then.
_APPLICATION_ERRORS = (
    NullKeyError,
    OperatorFailedError,
    PlanningError,
    ProducerConflictError,
    SchemaMismatchError,
    TableError,
)
View = VersionReader | TransientVersion | None


class BatchEngine:
    """Checks and computes batches with Spark; the step decides and commits what they read. Tests replace it."""

    def analyze(
        self,
        context: StepContext,
        views: Mapping[str, View],
        starts: Mapping[SystemStreamPartition, str],
        on_state: Callable[[AdjunctDataset], object],
    ) -> PhysicalProof:
        """Return what is proven of a batch over these versions; raise for one that could not finish.

        Nothing is read or written. `on_state` receives each state table that the batch writes. Also starts the Python
        workers that the output tasks will need.
        """
        prewarm_workers(resolve_session(context.spark))
        return analyze_batch(context, views, starts, on_state)

    def run(self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> BatchMetrics:
        """Write every output of a batch and return its counters; streams and local tables ignore a repeated batch.

        `before_output` is called with the output's name before anything is written to it, and raises if the run may not
        continue.
        """
        return run_batch(context, inputs, before_output)


SPARK_ENGINE: Final = BatchEngine()


def run_step(context: StepContext, engine: BatchEngine = SPARK_ENGINE) -> StepReport:
    """Run batches until the inputs are read to the offsets that were upcoming, or the limit is reached.

    A batch that a crash left open comes first. Then the startpoints that the tasks were handed are resolved, once a
    run. Bounded replays take turns with the main input. `engine` computes what a batch does.

    Raises NoSealedVersionError before reading any input when a dataset marked for bootstrap has no version,
    StaleDatasetError when one is staler than its table allows, and CommitConflictError when another run takes the
    application over. Who was taken over from may commit once more before it notices: who holds the lease then begins
    from that commit.
    """
    for attempt in range(1, _MAX_STARTS + 1):
        with _open_step(context, engine) as (step, begun):
            run = begun
            try:
                while context.max_batches is None or run.report.batches < context.max_batches:
                    began = time.monotonic()
                    run, batch = _prepare_batch(step, run)
                    if isinstance(batch, NothingToRead):
                        return _commit_positions(step, run, batch).finish(context, caught_up=True)
                    run, inputs = _commit_intent(step, run, batch)
                    seconds = {"intent": time.monotonic() - began}
                    try:
                        outputs = _write_outputs(step, run, inputs, seconds)
                    except OffsetOutOfRangeError:
                        if not find_lost_ranges(context, inputs.intent):
                            raise
                        continue  # retention was faster: resume it as a batch that was left open
                    run = _close_batch(step, run, inputs, outputs, seconds)
                return run.finish(context, caught_up=False)
            except CommitConflictError as conflict:
                if run.logged.commit is not begun.logged.commit or context.still_ours is None or attempt == _MAX_STARTS:
                    raise
                context.check()
                text = f"{conflict.problem} This run holds the lease and starts again from that commit."
                context.on_event(StepEvent("lease", 0, {"text": text}))
    raise AssertionError("unreachable")


@contextmanager
def _open_step(context: StepContext, engine: BatchEngine) -> Iterator[tuple[StepResources, StepState]]:
    """Yield the resources of a run of the step and its initial state; release the resources at the end."""
    app, log = context.app, BatchLog(context.lake, context.app.name)
    logged = log.read()
    run = StepState(logged, StepReport(0, False, {}, {}, {}, logged.state))
    context = replace(context, writes_as=run.logged.state.writes_as)
    # Answers of an abandoned batch, or of an operator that was removed.
    purge_answers(context.lake, app.name, run.logged.state.batch)
    with (
        RunCredits(context.lake) as credits,
        closing(OpenTables()) as tables,
        closing(BatchVersions(context)) as versions,
    ):
        context = replace(context, credits=credits, open_tables=tables)
        step = StepResources(
            context=context,
            engine=engine,
            log=log,
            startpoints=open_startpoints(context.lake, app),
            tasks=context.plan.partitions_by_task(),
            states=tuple(iter_state_names(context)),
            versions=versions,
        )
        yield step, run


def _prepare_batch(step: StepResources, run: StepState) -> tuple[StepState, PlannedBatch | NothingToRead]:
    """Return the open batch, or plan and lease the next one; nothing of a new batch is committed yet.

    Where a version is discarded between the snapshot and its lease, the batch is planned again over a new snapshot.
    """
    step.context.check()
    if run.logged.state.open is not None:
        return run, resume_open_batch(step, run, run.logged.state.open)
    if run.report.batches:
        step.context.between_batches()
    maintain_local_tables(step, run)
    for attempt in range(1, _MAX_SNAPSHOTS + 1):
        seen = snapshot_inputs(step, run)
        run = store_first_positions(step, run, seen)
        planned = plan_batch(step, run, seen)
        if isinstance(planned, NothingToRead):
            return run, planned
        try:
            return run, lease_versions(step, run, planned, seen)
        except VersionDiscardedError:
            if attempt == _MAX_SNAPSHOTS:
                raise
    raise AssertionError("unreachable")


def _commit_intent(step: StepResources, run: StepState, batch: PlannedBatch) -> tuple[StepState, BatchInputs]:
    """Commit the intent of the batch, after a dry run has shown that its outputs accept it; return what it reads.

    Nothing is read before.
    """
    context, app, intent, state = step.context, step.context.app, batch.intent, run.logged.state
    opened = {name: step.versions.view(name, version, state) for name, version in intent.versions.items()}
    # A resumed batch reads the versions of per-run tables that are left after retention.
    rebuilt = {name: view.version for name, view in opened.items() if isinstance(view, TransientVersion)}
    rebuilt = {name: version for name, version in rebuilt.items() if version != intent.versions[name]}
    for name, version in rebuilt.items():
        text = f"dataset {name!r}: retention has deleted changes that batch {intent.batch} had read; it reads {version}"
        context.on_event(StepEvent("lost", intent.batch, {"text": text}))
    if rebuilt:
        intent = intent.model_copy(update={"versions": {**intent.versions, **rebuilt}, "cut": True})
    views = {name: view for name, view in opened.items() if name not in step.states}
    states = {name: view for name, view in opened.items() if isinstance(view, VersionReader) and name not in views}
    # Local tables are read with the columns and buckets that they are declared with, whatever is stored. Spark's plans
    # depend on the columns and buckets of all others.
    own = {dataset.name for dataset in app.datasets if dataset.is_owned_by(app.name)}
    shapes: dict[str, object] = {**batch.schemas}
    for name, view in views.items():
        if name not in own:
            buckets = view.sealed.partitions if isinstance(view, VersionReader) else None
            shapes[name] = None if view is None else (view.schema, buckets)
    if shapes != run.shapes:  # once a run, and when columns or buckets change
        context.on_event(StepEvent("analysis", intent.batch))
        starts = {ssp: span.start for ssp, span in intent.ranges.items()}
        step.engine.analyze(context, views, starts, partial(create_state, context.runtime)).report_differences()
    run = replace(run, shapes=shapes, logged=step.log.open(run.logged, intent))
    spans = intent.ranges.items()
    records = sum(context.systems[ssp.system].distance(ssp, span.start, span.end) for ssp, span in spans)
    broadcast = {dataset.name for dataset in app.datasets if dataset.broadcast}
    sizes = [measure_version(view, broadcast=name in broadcast) for name, view in opened.items()]
    few = is_small_batch(records, intent.tasks, app.few_records, sizes)
    detail = {"records": records, "unit": context.unit, "versions": intent.versions, "few": few}
    context.on_event(StepEvent("intent", intent.batch, detail))
    inputs = BatchInputs(
        intent,
        views,
        identities=state.offsets.streams,
        records=records,
        few=few,
        interpreted=few and not intent.over_time and should_interpret(sizes),
        over_time={name: step.versions.over_time(name, ids) for name, ids in intent.over_time.items()},
        states=states,
        times=times_at_batch_start(app, state, intent),
    )
    return run, inputs


MAX_ROWS = 300_000
"""The rows of all partitioned datasets that one task reads, at most: some tenths of a second."""
_MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class VersionSize:
    """The number of rows in a dataset's version, and of bytes read for them (0 for a table in memory).

    `broadcast`: every task reads all of it, however many there are.
    """

    rows: int
    bytes: int = 0
    broadcast: bool = False


def measure_version(view: View, *, broadcast: bool = False) -> VersionSize:
    """Return the size of a version, from its manifest."""
    sealed = getattr(view, "sealed", None)
    if sealed is None:
        return VersionSize(0 if view is None else view.rows or 0, 0, broadcast)
    generations = sealed.generations
    return VersionSize(sum(part.rows for part in generations), sum(part.size for part in generations), broadcast)


def is_small_batch(records: int, tasks: int | None, limit: int, sizes: Iterable[VersionSize]) -> bool:
    """Return whether a batch of so many records, joined with versions of these sizes, runs best in one task per stage.

    `limit` is the largest number of records of a small batch. `tasks` is how many tasks read each record of a broadcast
    input; None if there is none.
    """
    read = [size for size in sizes if not size.broadcast]
    rows, size = sum(size.rows for size in read), sum(size.bytes for size in read)
    return records * (tasks or 1) <= limit and rows <= MAX_ROWS and size <= _MAX_BYTES


def should_interpret(sizes: Iterable[VersionSize]) -> bool:
    """Return whether Spark should interpret the plans over these versions instead of compiling them."""
    return sum(size.rows for size in sizes) <= FEW_ROWS


def _write_outputs(step: StepResources, run: StepState, inputs: BatchInputs, seconds: dict[str, float]) -> BatchMetrics:
    """Write every output; after a store failure start over, keeping what is already written.

    Adds the time that it took to `seconds`.
    """
    began, context, intent = time.monotonic(), step.context, inputs.intent

    def before_output(name: str) -> None:
        context.check()
        step.log.check_not_superseded(run.logged)
        step.versions.check_leases()
        context.on_event(StepEvent("output", intent.batch, {"output": name}))

    for pause in (*_RETRY_PAUSES, None):
        try:
            outputs = step.engine.run(context, inputs, before_output)
        except Exception as error:
            ours = find_adjunct_error(error)
            if isinstance(ours, _APPLICATION_ERRORS):
                explained = _add_next_steps(ours, context.app.name, intent.batch)
                if explained is error:
                    raise
                raise explained from (error.__cause__ if ours is error else error)
            if isinstance(ours, OffsetOutOfRangeError) and ours is not error:
                raise ours from error  # raised in a task
            if pause is None or not isinstance(ours, StoreUnavailableError):
                raise
            text = f"{ours.problem} The batch is retried in {pause:g} s"
            context.on_event(StepEvent("again", intent.batch, {"text": text}))
        else:
            seconds["work"] = time.monotonic() - began
            return outputs
        time.sleep(pause)
    raise AssertionError("unreachable")


def _add_next_steps(error: AdjunctError, app: str, batch: int) -> AdjunctError:
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


def _close_batch(
    step: StepResources, run: StepState, inputs: BatchInputs, outputs: BatchMetrics, seconds: dict[str, float]
) -> StepState:
    """Commit the end of the batch, which applies its startpoints; then remove these from the fan-outs."""
    began, context, intent = time.monotonic(), step.context, inputs.intent
    before = run.logged.state.offsets
    done = ClosedBatch(
        intent=intent,
        closed_at=context.lake.now(),
        records=inputs.records,
        counters=add_counters(outputs.counters, _count_lost(context, intent.lost)),
        seconds=seconds,
    )
    context.on_event(StepEvent("outputs", intent.batch))
    context.check()
    logged = step.log.close(run.logged, done, outputs.times)
    step.startpoints.remove_applied(step.tasks, intent.startpoints)
    if any(call.recorded for call in context.plan.calls):
        purge_answers(context.lake, context.app.name, intent.batch)
    state, after = logged.state, logged.state.offsets
    texts = [f"{after.applied[ssp].describe(ssp)} applied in batch {intent.batch}" for ssp in intent.startpoints]
    texts += [f"{before.replays[key].describe()} has ended" for key in before.replays if key not in after.replays]
    run = replace(run, logged=logged).with_messages(context, texts)
    run = run.with_batch(done, time.monotonic() - began, outputs.measured, few=inputs.few)
    detail: dict[str, Any] = {"records": state.records, "unit": context.unit, "counters": outputs.counters}
    if marks := measure_input_times(context.app, state.times, done.closed_at):
        detail["watermarks"] = marks
    context.on_event(StepEvent("batch", intent.batch, detail))
    return run


def _commit_positions(step: StepResources, run: StepState, nothing: NothingToRead) -> StepState:
    """Commit the positions that the inputs have been read up to, with the startpoints there; nothing if none moved."""
    context, positions = step.context, nothing.positions
    if not (positions.startpoints or positions.lost):
        return run
    applied = {ssp: start.id for ssp, start in positions.startpoints.items()}
    lost, state = _count_lost(context, positions.lost), run.logged.state
    update = {
        "checkpoint": {**state.checkpoint, **{ssp: span.start for ssp, span in positions.unread.items()}},
        "offsets": state.offsets.with_applied(applied, None, context.lake.now()),
        "totals": add_counters(state.totals, lost),
    }
    note = "; ".join(["positions moved, nothing to read there yet", *nothing.losses])
    logged = step.log.commit(run.logged, state.model_copy(update=update), by=context.run, note=note)
    step.startpoints.remove_applied(step.tasks, applied)
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
