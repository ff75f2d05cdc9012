"""The step of a planned application: runs batch after batch until it has caught up or reached its limit.

    resume     instead of the stages up to lease: the batch that a crash left open, as logged    plan_batch.py
    maintain   local tables: undo an abandoned batch, merge small generations                    plan_batch.py
    snapshot   the served dataset versions and the input streams                                 plan_batch.py
    start      once a run: resolve startpoints, give every partition a position                  plan_batch.py
    plan       what the batch reads                                                              plan_batch.py
    lease      the dataset versions that it reads                                                versions.py
    intent     commit what it reads, before anything is read                                     commit.py
    outputs    write all outputs; streams and local tables take each batch once                  commit.py
    close      commit the end of the batch, which is the checkpoint                              commit.py
    positions  instead, where there is nothing to read: commit how far the inputs were read      commit.py

A crash leaves either a closed batch or an open intent; the next run repeats that intent as logged. compile_batch.py
compiles what a batch does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.startpoints.store import open_startpoints
from dagster_adjunct.orchestration.step.commit import close_batch, commit_intent, commit_positions, write_outputs
from dagster_adjunct.orchestration.step.context import StepContext, StepResources, StepState
from dagster_adjunct.orchestration.step.engine import SPARK_ENGINE, BatchEngine
from dagster_adjunct.orchestration.step.plan_batch import (
    NothingToRead,
    find_lost_ranges,
    maintain_local_tables,
    plan_batch,
    resume_open_batch,
    snapshot_inputs,
    store_first_positions,
)
from dagster_adjunct.orchestration.step.progress import StepEvent, StepReport
from dagster_adjunct.orchestration.step.recorded_answers import OpenTables, purge_answers
from dagster_adjunct.orchestration.step.state import iter_state_names
from dagster_adjunct.orchestration.step.versions import LeasedBatch, VersionCache, VersionLeases, lease_versions
from dagster_adjunct.resources.errors import CommitConflictError, OffsetOutOfRangeError, VersionDiscardedError
from dagster_adjunct.resources.tables.shared_rate import RunCredits

# How often a run begins: another one that was taken over from may come in between, once.
_MAX_STARTS = 3
# How often all is looked at for one batch: whoever discards versions may be faster, now and then.
_MAX_SNAPSHOTS = 6


def run_step(context: StepContext, engine: BatchEngine = SPARK_ENGINE) -> StepReport:
    """Run batches until the inputs are read to the offsets that were upcoming, or the limit is met.

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
                while context.max_batches is None or run.batches < context.max_batches:
                    began = time.monotonic()
                    run, batch = _prepare_batch(step, run)
                    if isinstance(batch, NothingToRead):
                        return commit_positions(step, run, batch).report(context, caught_up=True)
                    opened = commit_intent(step, run, batch, began)
                    run = opened.run
                    try:
                        written = write_outputs(step, opened)
                    except OffsetOutOfRangeError:
                        if not find_lost_ranges(context, opened.intent):
                            raise
                        continue  # retention was faster: resume it as a batch that was left open
                    run = close_batch(step, written)
                return run.report(context, caught_up=False)
            except CommitConflictError as conflict:
                if run.logged.commit is not begun.logged.commit or context.still_ours is None or attempt == _MAX_STARTS:
                    raise
                context.check()
                text = f"{conflict.problem} This run holds the lease and starts again from that commit."
                context.on_event(StepEvent("lease", 0, {"text": text}))
    raise AssertionError("unreachable")


def _prepare_batch(step: StepResources, run: StepState) -> tuple[StepState, LeasedBatch | NothingToRead]:
    """Return the open batch, or plan and lease the next one; nothing of a new batch is committed yet.

    Where a version is discarded between the snapshot and its lease, the batch is planned again over a new snapshot.
    """
    step.context.check()
    if run.logged.state.open is not None:
        return run, resume_open_batch(step, run, run.logged.state.open)
    if run.batches:
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


@contextmanager
def _open_step(context: StepContext, engine: BatchEngine) -> Iterator[tuple[StepResources, StepState]]:
    """Yield the resources of a run of the step and its initial state; release the resources at the end."""
    app, log = context.app, BatchLog(context.lake, context.app.name)
    run = StepState(log.read())
    context = replace(context, writes_as=run.logged.state.writes_as)
    # Answers of an abandoned batch, or of an operator that was removed.
    purge_answers(context.lake, app.name, run.logged.state.batch)
    with (
        RunCredits(context.lake) as credits,
        closing(OpenTables()) as tables,
        closing(VersionCache(context)) as versions,
        closing(VersionLeases(context.lake, context.run)) as leases,
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
            leases=leases,
        )
        yield step, run
