"""Computes a small batch in this process with Arrow, without a Spark session; outputs get the same
as from Spark.

That is for applications none of whose operators needs Spark (`Spec.spark_need`), and for batches
that do not need it for another reason (`find_spark_need`). Appends have the same digests and
updates the same marks, so a batch that one engine has begun may be ended by the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dagster_adjunct.assets.reading.served_over_time import ServedOverTime
from dagster_adjunct.assets.reading.valid_time import Reader
from dagster_adjunct.orchestration.operators.batch import Batch, Outputs, Tables
from dagster_adjunct.orchestration.operators.columns import BRANCH, ORIGIN
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.orchestration.step.arrow_frames import (
    ArrowDatasets,
    ArrowFrames,
    ProcessWrites,
    Rehearsed,
    set_column,
)
from dagster_adjunct.orchestration.step.batch import (
    BatchParts,
    add_branches,
    read_whole,
    run_operators,
)
from dagster_adjunct.orchestration.step.batch_outputs import (
    BatchCounts,
    NoOutputs,
    TableLookups,
    WrittenOutputs,
)
from dagster_adjunct.orchestration.step.context import BatchInputs, BatchMetrics, StepContext
from dagster_adjunct.orchestration.step.dry_run import CheckedLookups, CheckedOutputs, StoredColumns
from dagster_adjunct.orchestration.step.kept_entries import EntryCache, count_stored_rows
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.small_work import SMALL_DATASETS
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.sql.arrow_kernels import NeedsSpark
from dagster_adjunct.resources.streams.system import POSITION
from dagster_adjunct.resources.threads import call_in_threads


def find_spark_need(context: StepContext, inputs: BatchInputs) -> str:
    """Return why a batch needs Spark, although no operator of its application does; "" if it does
    not.

    Without a session, batches of any size are computed in this process, except cut ones.
    """
    if inputs.intent.lost.cut:
        return "a batch that retention has cut"
    if context.spark is IN_PROCESS:
        return ""
    for view in (*read_whole(context.app, inputs).values(), *inputs.looked_back_at):
        if isinstance(view, Reader | ServedOverTime) and count_stored_rows(view) > SMALL_DATASETS:
            return f"the size of dataset {view.dataset}"
    return "" if inputs.few else "the size of the batch"


def run_in_process(
    context: StepContext,
    inputs: BatchInputs,
    before_output: Callable[[str], None],
    cache: EntryCache,
) -> BatchMetrics:
    """Write every output of the application once, as `run_batch` does, without Spark.

    Raises NeedsSpark for values for which Spark's result might differ. No remote table is written
    by then: as some do not ignore repeats, the batch is first computed without writing anything.
    """
    planned = PlannedBatch.of(context, inputs, gathered=True)
    rehearsed = Rehearsed()
    counts = BatchCounts()
    if any(operator.spec.send is not None for operator in context.app.operators):
        # The rehearsal asks the tables of lookups, and records their answers for the batch.
        counts = _rehearse(planned, cache, rehearsed).of_tables()
    frames = ArrowFrames(planned, counts, rehearsed)
    outputs = WrittenOutputs(planned, counts, frames, ProcessWrites(), before_output)
    lookups = TableLookups(planned, counts, frames)
    _compute(frames, ArrowDatasets(planned, cache), lookups, outputs)
    return BatchMetrics(counts.counters, counts.measured, in_process=True, samples=counts.samples)


def _rehearse(planned: PlannedBatch, cache: EntryCache, rehearsed: Rehearsed) -> BatchCounts:
    """Compute a batch without writing anything; return what it counts."""
    counts = BatchCounts()
    frames = ArrowFrames(planned, counts, rehearsed)
    lookups = TableLookups(planned, counts, frames)
    _compute(frames, ArrowDatasets(planned, cache), lookups, NoOutputs(frames))
    return counts


def check_in_process(context: StepContext, inputs: BatchInputs) -> None:
    """Raise the errors that creating an output stream, or writing a table, would raise; nothing is
    read or written.

    Raises NeedsSpark if this process can't compute the batch with the columns that streams and
    datasets have now.
    """
    planned = PlannedBatch.of(context, inputs, gathered=True)
    frames = ArrowFrames(planned, BatchCounts())
    stored = StoredColumns()
    outputs = CheckedOutputs(planned, frames, stored, _inspect_nothing)
    lookups = CheckedLookups(planned, frames, stored)
    _compute(frames, ArrowDatasets(planned, EntryCache()), lookups, outputs)


def _inspect_nothing(operator: str, frame: pa.Table, *, placed: bool) -> None:
    """There are no physical plans to inspect."""


def _compute(
    frames: ArrowFrames,
    datasets: ArrowDatasets,
    lookups: Tables[pa.Table],
    outputs: Outputs[pa.Table],
) -> None:
    """Compute the operators of a batch in order, after its inputs and datasets have been read."""
    _read_at_once(frames, datasets)
    batch = BatchParts(frames.planned, frames, datasets, lookups, outputs)
    run_operators(frames.planned, partial(_compute_operator, frames.planned, batch))


def _read_at_once(frames: ArrowFrames, datasets: ArrowDatasets) -> None:
    """Read the input streams and the datasets of a batch at the same time, before its operators ask
    for them one after the other: a store may be behind a network.

    What is read is kept by `frames` and `datasets`.
    """
    planned = frames.planned
    streams = set()
    joined = set()
    for operator in planned.operators:
        match = operator.spec.match
        if operator.spec.reads is not None:
            streams.add(operator.spec.reads)
        if match is not None and match.dataset and match.as_of is None:
            joined.add(match.dataset)
    calls: list[Callable[[], object]] = [partial(frames.read, stream) for stream in streams]
    if planned.inputs.places:
        joined.clear()  # keys are looked up
    for name in joined:
        calls.append(partial(datasets.entries, name, planned.app.dataset(name).key))
    call_in_threads(*calls, at_once=planned.context.at_once)


def _compute_operator(
    planned: PlannedBatch, batch: Batch[pa.Table], operator: Operator, sources: Sequence[pa.Table]
) -> pa.Table:
    """Return the records that leave an operator. Raises NeedsSpark, whose text begins with the
    operator's id.
    """
    arriving = add_branches(planned, operator, sources, _add_branch)
    try:
        return operator.spec.compile(operator.id, arriving, batch)
    except NeedsSpark as reason:
        raise NeedsSpark(f"{operator.id}: {reason}") from reason


def _add_branch(table: pa.Table, branch: str, origin: str | None) -> pa.Table:
    """Return the records with BRANCH; with ORIGIN and without POSITION if there is an `origin`. A
    branch goes before those that the records have already.
    """
    if origin is not None:
        table = table.drop_columns([name for name in POSITION if name in table.column_names])
        if ORIGIN not in table.column_names:
            table = set_column(table, ORIGIN, _repeat(origin, table))
    number = _repeat(branch, table)
    if BRANCH in table.column_names:
        number = pc.binary_join_element_wise(number, table.column(BRANCH), "/")
    return set_column(table, BRANCH, number)


def _repeat(text: str, records: pa.Table) -> pa.Array:
    """Return a column with this text for each record."""
    return pa.repeat(pa.scalar(text), records.num_rows)
