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
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.local_table import create_state
from dagster_adjunct.assets.unbounded.transient_table import TransientVersion
from dagster_adjunct.orchestration.application.application import Application, list_own_tables
from dagster_adjunct.orchestration.application.table_registry import check_stores
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    ClosedBatch,
    Counters,
    LoggedState,
    OffsetState,
    add_counters,
    check_not_renamed,
)
from dagster_adjunct.orchestration.batch_log.intent import HeldTime, Intent, Ranges
from dagster_adjunct.orchestration.operators.lookups import RESTATED
from dagster_adjunct.orchestration.startpoints.positions import StreamSnapshot
from dagster_adjunct.orchestration.startpoints.restatement import Places
from dagster_adjunct.orchestration.step.batch import classify_batch
from dagster_adjunct.orchestration.step.context import (
    BatchInputs,
    BatchMetrics,
    StepContext,
    StepState,
    View,
)
from dagster_adjunct.orchestration.step.dry_run import inputs_of_dry_run
from dagster_adjunct.orchestration.step.engines import BatchEngine, choose_engine
from dagster_adjunct.orchestration.step.late_changes import late_counters
from dagster_adjunct.orchestration.step.lookups import OpenTables
from dagster_adjunct.orchestration.step.plan_batch import (
    NextBatch,
    NothingToRead,
    find_lost_ranges,
    lease_versions,
    maintain_local_tables,
    open_served,
    plan_batch,
    resume_open_batch,
    snapshot_inputs,
    snapshot_open_inputs,
    store_first_positions,
)
from dagster_adjunct.orchestration.step.progress import (
    StepReport,
    measure_input_times,
    times_at_batch_start,
)
from dagster_adjunct.orchestration.step.recorded_answers import purge_answers
from dagster_adjunct.orchestration.step.restated_places import read_places
from dagster_adjunct.orchestration.step.waiting import to_stored
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.spark.tasks import find_adjunct_error
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from dagster_adjunct.resources.tables.shared_rate import RunCredits
from dagster_adjunct.resources.threads import call_in_threads, run_blocking

if TYPE_CHECKING:
    import pyarrow as pa

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

# What reading a batch raises where records of its inputs are gone.
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
    for _ in range(_MAX_STARTS - 1):
        with _open_step(given, engine) as step:
            try:
                return step.run()
            except errors.CommitConflictError as conflict:
                if not step.may_restart:
                    raise
                step.context.check()  # raises if the lease is lost
                if step.state.report.batches:
                    given = replace(given, earlier=step.state.report)
                engine = step.engine
                text = (
                    f"{conflict.problem} This run holds the lease and starts again from that"
                    " commit."
                )
                given.report("lease", 0, text=text)
    with _open_step(given, engine) as step:
        return step.run()


@contextmanager
def _open_step(context: StepContext, engine: BatchEngine | None) -> Iterator[_RunningStep]:
    """Yield a run of the step with its resources; release them at the end."""
    logged = context.log.read()
    check_not_renamed(context.app.name, logged.state)
    # What closing a batch does not delete: answers of an abandoned batch, or of an operator that
    # was removed.
    purge_answers(context.lake, context.app.name, logged.state.batch)
    with RunCredits(context.lake) as credits, closing(OpenTables(credits)) as tables:
        context = replace(context, writes_as=logged.state.names.writes_as, open_tables=tables)
        with closing(context.versions):
            report = context.earlier
            if report is None:
                report = StepReport(
                    batches=0,
                    caught_up=False,
                    counters={},
                    versions={},
                    seconds={},
                    state=logged.state,
                )
            if engine is None:
                engine = choose_engine(context)
            yield _RunningStep(context, engine, logged, StepState(logged, report))


@dataclass(slots=True)
class _RunningStep:
    """A run of the step: `begun` is the commit that it began from, `state` how far it has come."""

    context: StepContext
    engine: BatchEngine
    begun: LoggedState
    state: StepState

    @property
    def logged(self) -> ApplicationState:
        """The state of the application as it was last committed."""
        return self.state.logged.state

    @property
    def may_restart(self) -> bool:
        """Whether the run may start again after a conflict: it has a lease, and no batch is open
        that it has begun itself.
        """
        has_lease = self.context.still_ours is not None
        has_begun_one = self.logged.open is not None and self.state.logged is not self.begun
        return has_lease and not has_begun_one

    def run(self) -> StepReport:
        """Run batch after batch; return the report of the run."""
        hooks = self.context.hooks
        limit = self.context.max_batches
        try:
            while limit is None or self.state.report.batches < limit:
                began = time.monotonic()
                batch = self._prepare_batch()
                if isinstance(batch, NothingToRead):
                    self._commit_positions(batch)
                    self.state = self.state.with_held(batch.held)
                    has_later_work = bool(batch.held) or batch.restates_later
                    if not hooks.wait(has_later_work):
                        return self.state.finish(self.context, caught_up=True)
                    continue
                is_closed = self._run_batch(batch, began)
                if is_closed and not hooks.go_on():
                    break
        except errors.ManifestMismatchError as missing:
            self._check_inputs_are_there(missing)
            raise
        return self.state.finish(self.context, caught_up=False)

    def _check_inputs_are_there(self, missing: errors.ManifestMismatchError) -> None:
        """Raise StreamNotFoundError or OffsetOutOfRangeError if files are missing because somebody
        has deleted their stream since the batch was planned; else do nothing.
        """
        opened = self.context.log.read().state.open
        try:
            # Both raise for an input that is gone.
            if opened is not None:
                snapshot_open_inputs(self.context, opened, self.logged.offsets.streams)
            else:
                snapshot_inputs(self.context, self.state)
        except (errors.StreamNotFoundError, errors.OffsetOutOfRangeError) as gone:
            raise gone from missing

    def _prepare_batch(self) -> NextBatch | NothingToRead:
        """Return the open batch, or plan and lease the next one; nothing of a new batch is
        committed yet.

        Before a new batch, calls `between_batches` if the run has closed one, and maintains the
        local tables. Where a version is discarded between the snapshot and its lease, the batch is
        planned again over a new snapshot.
        """
        context = self.context
        if self.logged.open is not None:
            context.check()
            return resume_open_batch(context, self.logged, self.logged.open)
        if self.state.report.batches:
            context.hooks.between_batches()
        maintain_local_tables(context, self.logged)
        for _ in range(_MAX_SNAPSHOTS - 1):
            with suppress(errors.VersionDiscardedError):
                return self._plan_batch()
        return self._plan_batch()

    def _plan_batch(self) -> NextBatch | NothingToRead:
        """Return the next batch, with its versions leased; at the start of the run, first commit
        the first positions. Raises VersionDiscardedError if a version is discarded meanwhile.
        """
        seen = snapshot_inputs(self.context, self.state)
        self.state = store_first_positions(self.context, self.state, seen)
        planned = plan_batch(self.context, self.state, seen)
        if isinstance(planned, NothingToRead):
            return planned
        return lease_versions(self.context, self.logged, planned, seen)

    def _run_batch(self, batch: NextBatch, began: float) -> bool:
        """Run a batch whose planning `began` at this monotonic time; return whether it is closed.

        It is left open, to be resumed, if retention deletes records of it before they are read.
        """
        inputs = self._commit_intent(batch)
        committed = time.monotonic()
        try:
            if inputs.intent.ranges:
                outputs = self._write_outputs(inputs)
            else:  # a restatement for which no record has a changed key
                outputs = BatchMetrics({}, {})
        except errors.OffsetOutOfRangeError:
            if not find_lost_ranges(self.context, inputs.intent):
                raise
            return False
        work = time.monotonic() - committed
        self._close_batch(inputs, outputs, {"intent": committed - began, "work": work})
        self.context.hooks.on_report(replace(self.state.report, state=self.logged))
        return True

    def _commit_intent(self, batch: NextBatch) -> BatchInputs:
        """Commit the intent of the batch, after a dry run has shown that its outputs accept it;
        return what it reads.

        No input is read before the commit.
        """
        context = self.context
        before = self.logged
        views = self._open_views(batch.intent)
        intent = self._name_views(batch.intent, views)
        self._check_outputs(intent, views, batch.streams)
        if context.registered is not None:
            context.registered.begin_batch(context.fence)
        logged = context.log.open(self.state.logged, intent)
        self.state = replace(self.state, logged=logged)
        restating = intent.restating
        places: Places = {}
        if restating is None:
            records = sum(context.count_offsets(intent.ranges).values())
        else:
            records = restating.records
            if records:  # else no places were stored
                places = read_places(context, restating)
        over_time = {}
        for name, ids in intent.joined.over_time.items():
            over_time[name] = context.versions.over_time(name, ids)
        inputs = BatchInputs(
            intent,
            views,
            identities=before.offsets.streams,
            records=records,
            over_time=over_time,
            served=open_served(context.versions, intent, views),
            times=times_at_batch_start(context.app, before, intent),
            streams={name: stream.system for name, stream in batch.streams.items()},
            places=places,
        )
        inputs = classify_batch(context.app, inputs)
        if not inputs.few:  # its tasks need the memory
            context.versions.unpersist()
        context.report(
            "intent",
            intent.batch,
            records=inputs.records,
            unit=context.unit,
            versions=intent.versions,
            few=inputs.few,
            restates="" if restating is None else restating.describe(),
        )
        return inputs

    def _open_views(self, intent: Intent) -> dict[str, View]:
        """Return the dataset versions that the intent names, opened."""
        views: dict[str, View] = {}
        for name, version in intent.versions.items():
            views[name] = self.context.versions.view(name, version, self.logged)
        return views

    def _name_views(self, intent: Intent, views: Mapping[str, View]) -> Intent:
        """Return the intent with the versions that were opened; unchanged if they are the same.

        They differ where a resumed batch reads a table of one run, and retention has deleted
        changes of the version that the intent names. Then a later version was opened, which is
        reported, and the batch counts as cut.
        """
        versions = dict(intent.versions)
        for name, view in views.items():
            if isinstance(view, TransientVersion) and view.version != versions[name]:
                versions[name] = view.version
                text = (
                    f"dataset {name!r}: retention has deleted changes that batch {intent.batch} had"
                    f" read; it reads {view.version}"
                )
                self.context.report("lost", intent.batch, text=text)
        if versions == intent.versions:
            return intent
        joined = intent.joined.model_copy(update={"versions": versions})
        lost = intent.lost.model_copy(update={"cut": True})
        return intent.model_copy(update={"joined": joined, "lost": lost})

    def _check_outputs(
        self, intent: Intent, views: Mapping[str, View], streams: Mapping[str, StreamSnapshot]
    ) -> None:
        """Find out in a dry run whether outputs accept the batch, once a run, and when columns or
        buckets change; create the state tables that the batch needs.

        The stores of its remote tables are asked whether they can be used, too.
        """
        context = self.context
        states = set(context.states)
        datasets = {name: view for name, view in views.items() if name not in states}
        shapes = _describe_shapes(context.app, datasets, streams)
        if shapes == self.state.shapes:
            return
        context.report("analysis", intent.batch)
        check_stores(context.app)
        starts = {ssp: span.start for ssp, span in intent.ranges.items()}
        proof = self.engine.analyze(context, inputs_of_dry_run(context, datasets, starts))
        for dataset in proof.states:
            create_state(context.runtime, dataset)
        proof.report_differences()
        self.state = replace(self.state, shapes=shapes)

    def _write_outputs(self, inputs: BatchInputs) -> BatchMetrics:
        """Write every output and return the batch's metrics; after a store failure start over,
        keeping what is written.
        """
        is_retry = False
        for pause in _RETRY_PAUSES:
            try:
                return self._compute(inputs, is_retry=is_retry)
            except Exception as error:
                ours = find_adjunct_error(error)
                if not isinstance(ours, errors.StoreUnavailableError):
                    raise
                text = f"{ours.problem} The batch is retried in {pause:g} s"
                self.context.report("again", inputs.intent.batch, text=text)
            time.sleep(pause)
            is_retry = True
        return self._compute(inputs, is_retry=True)

    def _compute(self, inputs: BatchInputs, *, is_retry: bool) -> BatchMetrics:
        """Write every output once; a retry opens the input streams again. Errors of the application
        say what to do about the open batch, and errors of tasks about missing records are raised as
        such.
        """
        context = self.context
        intent = inputs.intent
        try:
            if is_retry:  # files that the streams had before may have been deleted
                now = snapshot_open_inputs(context, intent, inputs.identities)
                systems = {name: stream.system for name, stream in now.items()}
                inputs = replace(inputs, streams=systems)
            if inputs.places:
                inputs = replace(inputs, arrived=_read_restated_records(inputs))
            _announce_run(context)
            return self.engine.run(context, inputs, self._before_output)
        except Exception as error:
            ours = find_adjunct_error(error)
            if isinstance(ours, _MISSING_RECORDS) and ours is not error:
                raise ours from error  # raised in a task
            if not isinstance(ours, _APPLICATION_ERRORS):
                raise
            explained = _add_next_steps(ours, context.app.name, intent.batch)
            if explained is error:
                raise
            cause: BaseException | None
            if ours is error:
                cause = error.__cause__  # the explained error takes the place of this one
            else:
                cause = error
            raise explained from cause

    def _before_output(self, name: str, look: Callable[[], Any] = lambda: None) -> Any:
        """Raise if the run may not write this output, else report that it begins to; return the
        result of `look`, which is called at the same time as the checks.
        """
        context = self.context
        check_log = partial(context.log.check_not_superseded, self.state.logged)
        *_, found = call_in_threads(context.check, check_log, look, at_once=context.at_once)
        context.versions.check_leases()
        context.report("output", self.logged.batch + 1, output=name)
        return found

    def _close_batch(
        self, inputs: BatchInputs, outputs: BatchMetrics, seconds: dict[str, float]
    ) -> None:
        """Commit the end of the batch, which applies its startpoints; then remove these startpoints
        from the fan-outs, and delete answers and commits that nobody needs any more.
        """
        began = time.monotonic()
        context = self.context
        intent = inputs.intent
        before = self.logged.offsets
        counters = add_counters(outputs.counters, late_counters(context.app, intent))
        done = ClosedBatch(
            intent=intent,
            closed_at=context.lake.now(),
            records=inputs.records,
            counters=_count_batch(context, intent, counters),
            seconds=seconds,
        )
        context.report("outputs", intent.batch)
        logged = context.log.close(self.state.logged, done, outputs.times, checks=[context.check])
        context.startpoints.remove_applied(context.tasks, intent.startpoints)
        records_answers = any(call.recorded for call in context.plan.calls)
        # The places of records to restate are stored with the answers.
        if records_answers or intent.restating is not None:
            purge_answers(context.lake, context.app.name, intent.batch)
        if intent.batch % _FORGETTING == 0:
            _forget_old_batches(context)
        texts = _describe_startpoints(intent, before, logged.state.offsets)
        state = replace(self.state, logged=logged).with_messages(context, texts)
        took = time.monotonic() - began
        self.state = state.with_batch(done, took, outputs, few=inputs.few)
        context.report(
            "batch",
            intent.batch,
            records=logged.state.records,
            unit=context.unit,
            counters=counters,
            in_process=outputs.in_process,
            watermarks=measure_input_times(context.app, logged.state.times, done.closed_at),
        )

    def _commit_held(self, held: dict[SystemStreamPartition, HeldTime]) -> None:
        """Commit the records that wait, unless they are those that waited before."""
        waits = self.logged.waits
        if held == waits.held:
            return
        state = self.logged.model_copy(update={"waits": waits.model_copy(update={"held": held})})
        logged = self.context.log.commit(self.state.logged, state, by=self.context.run)
        self.state = replace(self.state, logged=logged)

    def _commit_positions(self, nothing: NothingToRead) -> None:
        """Commit the positions that the inputs have been read up to, with the startpoints applied
        there, and the records that wait.

        If no startpoint or loss has moved a position, commits only the records that wait, and
        nothing if these are the same as before.
        """
        context = self.context
        positions = nothing.positions
        held = to_stored(context.app, nothing.held)
        applied = {}
        for ssp, start in positions.startpoints.items():
            if ssp in positions.unread:
                applied[ssp] = start.id
        if not applied and not positions.lost:
            self._commit_held(held)
            return
        starts = {ssp: span.start for ssp, span in positions.unread.items()}
        lost = _count_lost(context, positions.lost)
        before = self.logged
        offsets = before.offsets.with_applied(applied, None, context.lake.now())
        # Nothing is read at these positions, but the offsets before them are skipped.
        empty_ranges = {ssp: OffsetRange(start, start) for ssp, start in starts.items()}
        update = {
            "checkpoint": before.checkpoint | starts,
            "offsets": offsets.with_reading(before.checkpoint, empty_ranges),
            "totals": add_counters(before.totals, lost),
            "waits": before.waits.model_copy(update={"held": held}),
        }
        note = "; ".join(["positions moved, nothing to read there yet", *nothing.losses])
        logged = context.log.commit(
            self.state.logged, before.model_copy(update=update), by=context.run, note=note
        )
        context.startpoints.remove_applied(context.tasks, applied)
        texts = []
        for ssp in applied:
            startpoint = logged.state.offsets.applied[ssp]
            texts.append(f"{startpoint.describe(ssp)} applied; there is nothing to read yet")
        report = self.state.report
        report = replace(report, counters=add_counters(report.counters, lost))
        state = replace(self.state, logged=logged, report=report)
        self.state = state.with_messages(context, texts)
        for text in nothing.losses:
            context.report("lost", logged.state.batch, text=text)


def _describe_startpoints(intent: Intent, before: OffsetState, after: OffsetState) -> list[str]:
    """Return a text for each startpoint that a batch has applied, and for each replay that it has
    ended.
    """
    texts = []
    for ssp in intent.startpoints:
        texts.append(f"{after.applied[ssp].describe(ssp)} applied in batch {intent.batch}")
    for key, replay in before.replays.items():
        if key not in after.replays:
            texts.append(f"{replay.describe()} has ended")
    return texts


def _describe_shapes(
    app: Application, views: Mapping[str, View], streams: Mapping[str, StreamSnapshot]
) -> dict[str, object]:
    """Return what Spark's plans depend on: the columns of inputs and datasets, and the numbers of
    buckets of stored versions; None for a dataset without a version.

    Local tables are left out: they are read with the columns and buckets that they are declared
    with, whatever is stored.
    """
    shapes: dict[str, object] = {}
    for name, stream in streams.items():
        shapes[name] = stream.info.schema
    local = {table.name for table in list_own_tables(app)}
    for name, view in views.items():
        if name in local:
            continue
        if view is None:
            shapes[name] = None
        elif isinstance(view, VersionReader):
            shapes[name] = (view.schema, view.sealed.partitions)
        else:  # in memory for one run, with the buckets that are declared
            shapes[name] = view.schema
    return shapes


def _announce_run(context: StepContext) -> None:
    """Let tables refuse writes of earlier runs, once a run, if such a run may only be paused and go
    on later (`Fence`). Without a lease there is no fence, and nothing is done.
    """
    lease = context.lease
    fence = context.fence
    if lease is None or fence is None or not lease.has_unfenced:
        return
    names = set()
    for operator in context.app.operators:
        if operator.spec.send is not None:
            names.add(operator.spec.send.table)

    async def announce() -> None:
        for name in sorted(names):
            async with context.app.tables[name].with_fence(fence) as table:
                await table.announce()

    run_blocking(announce())
    lease.note_fenced()


def _add_next_steps(error: errors.AdjunctError, app: str, batch: int) -> errors.AdjunctError:
    """Return the error with how to finish or abandon the batch that it leaves open: in the next
    step of a new error, or as a note of the given one.
    """
    give_up = f"adjunct checkpoint abandon {app} --reason …"
    if isinstance(error, errors.ProducerConflictError):
        if error.newest is not None and error.newest > batch:
            return error.reworded(
                error.problem,
                f"Nothing was written. Batch {batch} is open, and the output has batches of {app!r}"
                f" up to {error.newest}: the batch log was deleted, or another application has this"
                " name. Restore the log, or choose another name.",
            )
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


def _forget_old_batches(context: StepContext) -> None:
    """Delete what the application's batch log no longer retains. Raises nothing: the batch is
    done.
    """
    if context.app.log_retention is None:
        return
    try:
        context.log.forget(context.app.log_retention)
    except errors.AdjunctError as error:
        _log.warning("the batch log of %s keeps old commits for now: %s", context.app.name, error)


def _count_batch(context: StepContext, intent: Intent, written: Counters) -> Counters:
    """Return the counters of a batch; `written` are those of its outputs and operators.

    Records whose results are restated do not count again for the match rates of joins.
    """
    counters = add_counters(written, _count_lost(context, intent.lost.offsets))
    restating = intent.restating
    if restating is None:
        return counters
    for operator in context.app.operators:
        if operator.spec.match is not None:
            counters.pop(operator.id, None)
    counted = {"changed_keys": restating.keys, "records": restating.records}
    return add_counters(counters, {RESTATED: counted})


def _read_restated_records(inputs: BatchInputs) -> dict[str, pa.Table]:
    """Return the records whose results are restated, by input stream."""
    arrived = {}
    for stream, places in inputs.places.items():
        arrived[stream] = inputs.streams[stream].read_records(split_stream_name(stream)[1], places)
    return arrived


def _count_lost(context: StepContext, lost: Ranges) -> Counters:
    """Return the number of lost offsets of each stream, as counters."""
    counters: Counters = {}
    for ssp, number in context.count_offsets(lost).items():
        counters = add_counters(counters, {ssp.qualified_stream: {"lost_offsets": number}})
    return counters
