"""Composes a batch of three things, what is planned, frames and outputs, and compiles its operators
in order. Compiling an output writes its records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

from dagster_adjunct.orchestration.operators.batch import (
    Datasets,
    Frame,
    LocalTables,
    Outputs,
    Records,
    Sinks,
    SparkBatch,
    Tables,
)
from dagster_adjunct.orchestration.operators.columns import BRANCH, ORIGIN, list_copies
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.orchestration.step.batch_outputs import (
    BatchCounts,
    TableLookups,
    Writes,
    WrittenOutputs,
)
from dagster_adjunct.orchestration.step.context import BatchInputs, BatchMetrics, StepContext
from dagster_adjunct.orchestration.step.event_times import BatchTimes
from dagster_adjunct.orchestration.step.failures import FailedBatch, analysis_error, explain_failure
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch
from dagster_adjunct.orchestration.step.spark_datasets import SparkDatasets
from dagster_adjunct.orchestration.step.spark_frames import SparkFrames, TaskWrites, rename_copies
from dagster_adjunct.orchestration.step.spark_sinks import CalledSinks
from dagster_adjunct.orchestration.step.spark_state import (
    SparkState,
    TableWriters,
    WrittenLocalTables,
)
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.spark.tuning import PersistedFrames, use_interpreted_plans
from dagster_adjunct.resources.streams.system import POSITION

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def run_operators(
    planned: PlannedBatch, compile_operator: Callable[[Operator, Sequence[Frame]], Frame]
) -> None:
    """Compile the operators in order.

    `compile_operator` gets the records that leave the operators before one, and returns those that
    leave it.
    """
    frames: dict[str, Frame] = {}
    for operator in planned.operators:
        sources = [frames[source] for source in operator.inputs]
        frames[operator.id] = compile_operator(operator, sources)


@dataclass(frozen=True, slots=True)
class BatchParts(Generic[Frame]):
    """A batch as its operators see it: `Batch` of operators."""

    planned: PlannedBatch
    records: Records[Frame]
    datasets: Datasets[Frame]
    tables: Tables[Frame]
    outputs: Outputs[Frame]


@dataclass(frozen=True, slots=True)
class SparkParts:
    """A batch that Spark computes, as its operators see it: `SparkBatch` of operators."""

    planned: PlannedBatch
    records: SparkFrames
    datasets: SparkDatasets
    tables: Tables[DataFrame]
    outputs: Outputs[DataFrame]
    local_tables: LocalTables
    sinks: Sinks
    state: SparkState


@dataclass(frozen=True, slots=True)
class SparkOpened:
    """What a batch on Spark opens: the records that it caches, its times, and writers of tables."""

    planned: PlannedBatch
    kept: PersistedFrames
    times: BatchTimes
    writers: TableWriters

    @staticmethod
    def of(planned: PlannedBatch, opened: ExitStack) -> SparkOpened:
        """Open it; `opened` discards what is not committed, and releases cached records."""
        times = BatchTimes(planned.context, planned.inputs)
        opened.callback(times.close)
        kept = PersistedFrames()
        opened.callback(kept.release)  # before the records that they are made of
        writers = opened.enter_context(ExitStack())
        return SparkOpened(planned, kept, times, TableWriters(planned, writers))


WritesOfFrames = Callable[[SparkFrames], Writes["DataFrame"]]


def run_batch(
    context: StepContext,
    inputs: BatchInputs,
    before_output: Callable[..., Any],
    writes: WritesOfFrames = TaskWrites,
    *,
    gathered: bool = False,
) -> BatchMetrics:
    """Write every output of the application once, in order of definition, with Spark; return the
    metrics of the batch.

    `writes` makes what gets the records of outputs out of Spark. If they are `gathered`, all
    records are in one partition.
    """
    planned = PlannedBatch.of(context, inputs, gathered=gathered)
    with ExitStack() as opened:
        if inputs.interpreted:
            opened.enter_context(use_interpreted_plans(context.spark()))
        spark = SparkOpened.of(planned, opened)
        counts = BatchCounts()
        frames = SparkFrames(planned, spark.times, spark.kept)
        local_tables = WrittenLocalTables(planned, spark.writers)
        parts = SparkParts(
            planned,
            frames,
            SparkDatasets(planned, local_tables),
            TableLookups(planned, counts, frames),
            WrittenOutputs(planned, counts, frames, writes(frames), before_output),
            local_tables,
            CalledSinks(planned, counts, before_output),
            SparkState(planned, spark.times, spark.writers),
        )
        compiler = SparkCompiler(parts, spark.times)
        run_operators(planned, compiler.hand_on)
        # Local and state tables are committed after all other outputs are written.
        local = local_tables.commit(before_output)
        states = parts.state.commit(before_output)
        counters = counts.counters | local | states | frames.observed()
        return BatchMetrics(counters, counts.measured, spark.times.after, samples=frames.sampled())


@dataclass(frozen=True, slots=True)
class SparkCompiler:
    """Compiles the operators of a batch to DataFrames, one after the other.

    Errors of expressions and functions name the operator, without Spark's plan. `arrived` has the
    records of each input of the operators that are compiled already, for them.
    """

    batch: SparkParts
    times: BatchTimes
    arrived: dict[str, list[DataFrame]] = field(default_factory=dict)

    def hand_on(self, operator: Operator, sources: Sequence[DataFrame]) -> DataFrame:
        """Return the records that leave an operator as the next ones get them: cached if these
        are several.
        """
        frame = self.compile(operator, sources)
        if self.batch.planned.is_shared(operator):
            return self.batch.records.materialize(operator.id, frame)
        return frame

    def compile(self, operator: Operator, sources: Sequence[DataFrame]) -> DataFrame:
        """Return the records that leave an operator; `sources` are those that leave the operators
        before it.
        """
        from pyspark.errors import AnalysisException

        planned = self.batch.planned
        # Records that are repartitioned only to be written continue unmoved.
        aside = operator.spec.is_side_output and bool(planned.moves(operator.id))
        try:
            if aside and planned.has_consumers(operator.id):
                # They are read twice: to be written, and to continue.
                keep = self.batch.records.materialize
                sources = [keep(operator.id, frame) for frame in sources]
            self.arrived[operator.id] = self._prepare_inputs(operator, sources)
            leaving = self._rename_copies(operator, self._compile(operator))
        except AnalysisException as error:
            raise analysis_error(operator, error) from error
        return sources[0] if aside else leaving

    def _rename_copies(self, operator: Operator, leaving: DataFrame) -> DataFrame:
        """Return the records that leave an operator with the copied values that they still have."""
        if not list_copies(leaving.columns):
            return leaving
        planned = self.batch.planned
        after = planned.required_partitioning(operator.id)
        before = after  # of records that begin a stream
        if operator.spec.role is None:
            before = planned.required_partitioning(operator.inputs[0])
            for exchange in planned.moves(operator.id):
                before = exchange.partitioned_by
        return rename_copies(leaving, before, after)

    def _compile(self, operator: Operator) -> DataFrame:
        """Return the records that leave an operator whose inputs are in `arrived`. A failed job, as
        compiling an output runs one, is explained; `compile` explains an AnalysisException.
        """
        from pyspark.errors import AnalysisException

        try:
            batch: SparkBatch = self.batch
            leaving: DataFrame = operator.spec.compile(
                operator.id, self.arrived[operator.id], batch
            )
            return leaving
        except AnalysisException:
            raise
        except Exception as error:
            failed = FailedBatch(self.batch.planned, self.batch.records, self.arrived)
            explained = explain_failure(failed, operator.id, error)
            if explained is None:
                raise
            raise explained  # noqa: B904 - its cause is set, unless that reveals sensitive values

    def _prepare_inputs(self, operator: Operator, sources: Sequence[DataFrame]) -> list[DataFrame]:
        """Return the records of each input as the operator gets them: repartitioned, with BEHIND,
        BRANCH and ORIGIN.
        """
        frames = list(sources)
        for exchange in self.batch.planned.moves(operator.id):
            frames[exchange.input] = self.batch.records.repartition(
                frames[exchange.input], exchange.partitions, exchange.partitioned_by
            )
        frames = [self.times.arriving(operator, frame) for frame in frames]
        return add_branches(self.batch.planned, operator, frames, _add_branch)


def add_branches(
    planned: PlannedBatch,
    operator: Operator,
    frames: Sequence[Frame],
    add: Callable[[Frame, str, str | None], Frame],
) -> list[Frame]:
    """Return the records of several inputs with BRANCH; those of one input are returned as they
    are.

    Records of two inputs may have the same position, so BRANCH says which input they came from.
    Unless all inputs have positions in one stream, the columns of POSITION are dropped, because
    the inputs differ in them, and each record that lacks ORIGIN, the stream of the input's
    positions, gets it. `add` adds the branch, and the origin unless it is None.
    """
    if len(frames) < 2:
        return list(frames)
    one_stream = len(planned.origins[operator.id].streams) == 1
    branched: list[Frame] = []
    for number, (source, frame) in enumerate(zip(operator.inputs, frames, strict=True)):
        origin = None if one_stream else planned.stream_of(source) or ""
        branched.append(add(frame, str(number), origin))
    return branched


def _add_branch(frame: DataFrame, branch: str, origin: str | None) -> DataFrame:
    if origin is not None:
        frame = frame.drop(*POSITION)
        if ORIGIN not in frame.columns:
            frame = frame.withColumn(ORIGIN, F.lit(origin))
    number = F.lit(branch)
    if BRANCH in frame.columns:
        number = F.concat_ws("/", number, F.col(BRANCH))
    return frame.withColumn(BRANCH, number)
