"""Composes a batch of three things, what is planned, frames and outputs, and compiles its operators
in order. Compiling an output writes its records.

In a small batch, Spark computes, and this process reads and writes: with few records, most of the
time goes into overhead, which is tasks that read files, exchanges, and Python workers that write.
So this process reads the records of inputs; Spark caches each dataset while batches read the same
version of it, and broadcasts it; nothing is moved; and each output is fetched as Arrow and written
as a batch in process writes it. Its records, counters, digests and marks are those of a large
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic

from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.orchestration.application.application import Application
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
    Append,
    BatchCounts,
    TableLookups,
    Writes,
    WrittenOutputs,
)
from dagster_adjunct.orchestration.step.context import BatchInputs, BatchMetrics, StepContext, View
from dagster_adjunct.orchestration.step.event_times import BatchTimes, ranges_to_read
from dagster_adjunct.orchestration.step.failures import FailedBatch, analysis_error, explain_failure
from dagster_adjunct.orchestration.step.kept_entries import count_stored_rows
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch, system_of
from dagster_adjunct.orchestration.step.spark_datasets import SparkDatasets
from dagster_adjunct.orchestration.step.spark_frames import SparkFrames, TaskWrites, rename_copies
from dagster_adjunct.orchestration.step.spark_sinks import CalledSinks
from dagster_adjunct.orchestration.step.spark_state import (
    SparkState,
    TableWriters,
    WrittenLocalTables,
)
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.small_work import SMALL_BYTES, SMALL_DATASETS, SMALL_ROWS
from dagster_adjunct.resources.spark.tasks import fetch_small, small_frame
from dagster_adjunct.resources.spark.tuning import PersistedFrames, use_interpreted_plans
from dagster_adjunct.resources.streams.checked_reads import read_table
from dagster_adjunct.resources.streams.system import LAKE, POSITION, AppendResult, Sources
from dagster_adjunct.resources.tables.spark import (
    TableWrite,
    WriteResult,
    note_exactness,
    write_rows,
)

if TYPE_CHECKING:
    import pyarrow as pa
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
        """Open what a batch on Spark needs. When `opened` is closed, it discards what is not
        committed, and releases cached records.
        """
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
            records=frames,
            datasets=SparkDatasets(planned, local_tables),
            tables=TableLookups(planned, counts, frames),
            outputs=WrittenOutputs(planned, counts, frames, writes(frames), before_output),
            local_tables=local_tables,
            sinks=CalledSinks(planned, counts, before_output),
            state=SparkState(planned, spark.times, spark.writers),
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
        """Return the records that leave an operator as the operators after it get them: cached if
        several get them.
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
        is_moved_aside = operator.spec.is_side_output and bool(planned.moves(operator.id))
        try:
            if is_moved_aside and planned.has_consumers(operator.id):
                # They are read twice: to be written, and to continue.
                keep = self.batch.records.materialize
                sources = [keep(operator.id, frame) for frame in sources]
            self.arrived[operator.id] = self._prepare_inputs(operator, sources)
            leaving = self._rename_copies(operator, self._compile(operator))
        except AnalysisException as error:
            raise analysis_error(operator, error) from error
        if is_moved_aside:
            return sources[0]
        return leaving

    def _rename_copies(self, operator: Operator, leaving: DataFrame) -> DataFrame:
        """Return the records that leave an operator, with the copies of the values that they are
        partitioned by (`copy_name`) under the names that these values have after it.
        """
        if not list_copies(leaving.columns):
            return leaving
        planned = self.batch.planned
        after = planned.required_partitioning(operator.id)
        if operator.spec.role is None:
            before = planned.required_partitioning(operator.inputs[0])
            for exchange in planned.moves(operator.id):
                before = exchange.partitioned_by
        else:  # where a stream begins, records are partitioned by these names already
            before = after
        return rename_copies(leaving, before, after)

    def _compile(self, operator: Operator) -> DataFrame:
        """Return the records that leave an operator whose inputs are in `arrived`.

        Compiling an output runs a job. Its failure is explained here, an AnalysisException by
        `compile`.
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
    is_of_one_stream = len(planned.origins[operator.id].streams) == 1
    branched: list[Frame] = []
    for number, (source, frame) in enumerate(zip(operator.inputs, frames, strict=True)):
        origin = None
        if not is_of_one_stream:
            origin = planned.stream_of(source) or ""
        branched.append(add(frame, str(number), origin))
    return branched


def _add_branch(frame: DataFrame, branch: str, origin: str | None) -> DataFrame:
    """Return the records with BRANCH; with ORIGIN and without POSITION if there is an `origin`. A
    branch goes before those that the records have already.
    """
    if origin is not None:
        frame = frame.drop(*POSITION)
        if ORIGIN not in frame.columns:
            frame = frame.withColumn(ORIGIN, F.lit(origin))
    number = F.lit(branch)
    if BRANCH in frame.columns:
        number = F.concat_ws("/", number, F.col(BRANCH))
    return frame.withColumn(BRANCH, number)


def classify_batch(app: Application, inputs: BatchInputs) -> BatchInputs:
    """Return the inputs of a batch with whether it runs best in one task per stage (`few`), and
    with plans that Spark interprets.

    Every task reads all entries of a dataset that is broadcast, in any batch, so its size decides
    nothing about tasks. The records of broadcast inputs count once for each task.
    """
    views = read_whole(app, inputs)
    shared_by_tasks = dict(views)
    for dataset in app.datasets:
        if dataset.broadcast:
            shared_by_tasks.pop(dataset.name, None)
    rows = sum(map(_count_rows, shared_by_tasks.values()))
    size = sum(map(_count_bytes, shared_by_tasks.values()))
    records = inputs.records * (inputs.intent.tasks or 1)
    has_small_datasets = rows <= SMALL_DATASETS and size <= SMALL_BYTES
    if records > app.few_records or not has_small_datasets:
        return inputs
    all_rows = sum(map(_count_rows, views.values()))
    interpreted = all_rows <= SMALL_ROWS and not inputs.looked_back_at
    return replace(inputs, few=True, interpreted=interpreted)


def read_whole(app: Application, inputs: BatchInputs) -> dict[str, View]:
    """Return the versions of which a batch reads all entries: a restatement looks up current
    entries by their keys.
    """
    if not inputs.places:
        return dict(inputs.views)
    whole = {}
    for operator in app.operators:
        match = operator.spec.match
        if match is not None and match.dataset is not None and match.as_of is not None:
            whole[match.dataset] = inputs.views[match.dataset]
    return whole


def _count_rows(view: View) -> int:
    """Return the rows of a version, by its manifest; 0 if the dataset has none yet."""
    if view is None:
        return 0
    if isinstance(view, VersionReader):
        return count_stored_rows(view)
    return view.rows


def _count_bytes(view: View) -> int:
    """Return the bytes of the files of a version; 0 for a table in memory."""
    if not isinstance(view, VersionReader):
        return 0
    return sum(part.size for part in view.sealed.generations)


def read_small_batch(context: StepContext, inputs: BatchInputs) -> BatchInputs | None:
    """Return the inputs of a batch with the records of its input streams, which this process has
    read; None if tasks must read them.

    Tasks must read a batch that is not small or that retention has cut. They also must if an
    operator keeps state or needs tasks, if a stream system can't read into this process, if the
    datasets have more than SMALL_ROWS rows, or if the records, each with an entry of average size
    from each dataset, are too large for memory.
    """
    if not inputs.few or inputs.intent.lost.cut:
        return None
    for operator in context.app.operators:
        if operator.spec.needs_tasks or operator.spec.states:
            return None
    systems = {stream: system_of(context, inputs, stream) for stream in context.app.inputs}
    if not all(system.capabilities.reads_arrow for system in systems.values()):
        return None
    room = _room_for_records(inputs)
    arrived: dict[str, pa.Table] = {}
    for stream, system in systems.items():
        if room <= 0:
            return None
        asked = ranges_to_read(system, stream, inputs.intent)
        arrived[stream] = read_table(system, asked.ranges)
        room -= arrived[stream].nbytes
    if room <= 0:
        return None
    return replace(inputs, arrived=arrived)


def _room_for_records(inputs: BatchInputs) -> int:
    """Return how many bytes of records this process may read, besides an entry of each dataset for
    each record; 0 if the datasets are too large.
    """
    all_rows = sum(map(count_stored_rows, inputs.looked_back_at))
    room = SMALL_BYTES
    for view in inputs.views.values():
        rows = _count_rows(view)
        all_rows += rows
        if rows:
            room -= inputs.records * _count_bytes(view) // rows
    if all_rows > SMALL_ROWS:  # the first batch of a run would take longer than by tasks
        return 0
    return room


@dataclass(frozen=True, slots=True)
class FetchedWrites:
    """This process writes the records that Spark computes: `Writes` of outputs.

    Tasks write those that may be too large for this process.
    """

    frames: SparkFrames
    by_tasks: TaskWrites
    _not_fetched: set[str] = field(default_factory=set)

    @staticmethod
    def of(frames: SparkFrames) -> FetchedWrites:
        """Return the writes of these frames."""
        return FetchedWrites(frames, TaskWrites(frames))

    def _fetch(self, frame: DataFrame) -> pa.Table | None:
        """Return the records of an output; None if they may be too large for this process."""
        arrived = self.frames.planned.inputs.arrived.values()
        records = sum(rows.num_rows for rows in arrived)
        largest_row = SMALL_BYTES // max(1, records)
        return fetch_small(frame, largest_row)

    def append(self, operator: str, frame: DataFrame, append: Append) -> AppendResult:
        """Append records to a stream: of the lake from this process, if they are few enough."""
        rows = None
        system, _ = split_stream_name(append.stream)
        if system == LAKE:  # tasks write to other systems, with marks of their own
            rows = self._fetch(frame)
        if rows is None:
            self._not_fetched.add(append.stream)
            return self.by_tasks.append(operator, frame, append)
        return append.send_rows(rows)

    def read(self, append: Append, **ranges: Any) -> DataFrame:
        """Return records that were appended, read by whoever has written them."""
        if append.stream in self._not_fetched:
            return self.by_tasks.read(append, **ranges)
        return small_frame(self.frames.session, read_table(append.system, **ranges))

    def fetch(self, operator: str, frame: DataFrame, sources: Sources | None) -> pa.Table:
        """Return the records as an output table gets them."""
        return self.by_tasks.fetch(operator, frame, sources)

    def write(self, operator: str, frame: DataFrame, write: TableWrite) -> WriteResult:
        """Write records to a remote table, from this process if they are few enough."""
        rows = self._fetch(frame)
        if rows is None:
            return self.by_tasks.write(operator, frame, write)
        return write_rows(rows, note_exactness(frame, write), what=operator)


def run_small_batch(
    context: StepContext, inputs: BatchInputs, before_output: Callable[..., Any]
) -> BatchMetrics:
    """Write every output of the application once, as `run_batch` does; the records of the inputs
    have arrived in this process.
    """
    return run_batch(context, inputs, before_output, FetchedWrites.of, gathered=True)
