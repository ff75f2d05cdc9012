"""Compiles a planned application to DataFrames for one batch, and writes its outputs in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.history import VersionsOverTime
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.sources.entries import derive_stored_schema
from dagster_adjunct.assets.unbounded.state_table import StateSpec
from dagster_adjunct.assets.versions.version import build_layout
from dagster_adjunct.orchestration.batch_log.batch_log import TimeState
from dagster_adjunct.orchestration.operators.batch_context import StateHandle, TimedRows, Watermarks
from dagster_adjunct.orchestration.operators.columns import (
    BRANCH,
    ORIGIN,
    DataFrameFunction,
    OnNullKey,
    first_duplicate,
    function_label,
    list_hidden_columns,
)
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.orchestration.step.batch_outputs import BatchOutputs, add_barrier
from dagster_adjunct.orchestration.step.context import BatchInputs, Counters, StepContext
from dagster_adjunct.orchestration.step.event_times import BatchTimes
from dagster_adjunct.orchestration.step.failures import explain_failure
from dagster_adjunct.orchestration.step.state import LocalTableWrites, StateTables
from dagster_adjunct.resources.bucketing.files import bucketed_frame
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import AdjunctError, PlanningError
from dagster_adjunct.resources.schemas.column_sql import F, named_column
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.tuning import use_interpreted_plans
from dagster_adjunct.resources.streams.system import POSITION
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.user_code import failing_line, function_failed_error

if TYPE_CHECKING:
    from pyspark.errors import AnalysisException
    from pyspark.sql import Column, DataFrame, Observation, Row

_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class BatchMetrics:
    """The counters of a batch by output or join, its table metrics, and the event times of its inputs after it."""

    counters: Counters
    measured: Mapping[str, TableMetrics]
    times: TimeState | None = None


def run_batch(context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> BatchMetrics:
    """Write every output of the application once, in order of definition; return the metrics of the batch.

    (application, batch) is the producer and sequence of every append, so repeating a batch adds nothing to streams.
    `before_output` is called with the output's name before anything is written to it.
    """
    with use_interpreted_plans(context.spark()) if inputs.interpreted else nullcontext():
        batch = BatchCompiler(context, inputs, before_output)
        try:
            batch.run()
            return batch.commit()
        finally:
            batch.close()


class BatchCompiler(BatchOutputs):
    """The BatchContext of a batch that writes: it reads inputs, and writes outputs, for the operators that are
    compiled.
    """

    def __init__(self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> None:
        super().__init__(context, inputs, before_output)
        self._times = BatchTimes(context, inputs)
        self._states = StateTables(context, inputs)
        self._local = LocalTableWrites(context, inputs, self.stream_of)
        self._left_out: dict[str, DataFrame] = {}
        self._observed: list[tuple[str, Observation]] = []

    def run(self) -> None:
        """Compile the operators whose records are written, which writes them."""
        frames: dict[str, DataFrame] = {}
        for operator in self.operators:
            leaving = self.compile_operator(operator, [frames[source] for source in operator.inputs])
            frames[operator.id] = self.materialize(operator.id, leaving) if self.is_shared(operator) else leaving

    def commit(self) -> BatchMetrics:
        """Commit local and state tables, after all other outputs are written; return the metrics of the batch."""
        counters = self.counters | self._local.commit(self._before_output) | self._states.commit(self._before_output)
        counters |= {join.name: join.result() for join in self._joins}  # waits for outputs that have not run yet
        left_out: Counters = {}
        for operator, observation in self._observed:
            of_operator = left_out.setdefault(operator, {})
            assert observation._jo is not None, "it observes"
            if observation._jo.getRow().length():  # else Spark has optimized it away: it gets no records
                for name, count in observation.get.items():
                    of_operator[name] = of_operator.get(name, 0) + int(count)
        return BatchMetrics(counters | left_out, self.measured, self._times.after())

    def close(self) -> None:
        """Discard what is not committed, and release cached records."""
        self._local.close()
        self._states.close()
        self._kept.release()  # before the records that they are made of
        self._times.close()

    # -- the operator that is compiled

    def compile_operator(self, operator: Operator, sources: Sequence[DataFrame]) -> DataFrame:
        """Return the records that leave an operator; `sources` are the records that leave the operators before it.

        Errors of its expressions and functions name the operator, without Spark's plan.
        """
        from pyspark.errors import AnalysisException

        # Records that are repartitioned only to be written continue unmoved.
        aside = operator.spec.is_side_output and bool(self.moves(operator.id))
        try:
            if aside and self.has_consumers(operator.id):  # read twice: to be written, and to continue
                sources = [self.materialize(operator.id, frame) for frame in sources]
            self.arrived[operator.id] = arriving = self._prepare_inputs(operator, sources)
            try:
                leaving = operator.spec.compile(operator.id, arriving, self)
            except AnalysisException:
                raise
            except Exception as error:
                explained = explain_failure(self, operator.id, error)
                if explained is None:
                    raise
                raise explained  # noqa: B904 - its cause is set unless that could reveal sensitive values
        except AnalysisException as error:
            raise _analysis_error(operator, error) from error
        return sources[0] if aside else leaving

    def _prepare_inputs(self, operator: Operator, sources: Sequence[DataFrame]) -> list[DataFrame]:
        """Return the records of each input as the operator gets them: repartitioned, with its watermark, and tagged.

        Inputs may share positions, so records of several inputs say which one they came from. Unless all inputs have
        positions in one stream, the columns of POSITION are dropped, because the inputs differ in them, and the stream
        of the input's positions is added to each record that lacks it.
        """
        frames = list(sources)
        for exchange in self.moves(operator.id):
            number, by = exchange.input, map(named_column, exchange.partitioned_by)
            frames[number] = self.gather_small(frames[number]).repartition(exchange.partitions, *by)
        frames = [self._times.arriving(operator, frame) for frame in frames]
        if len(frames) < 2:
            return frames
        one_stream = len(self.origins[operator.id].streams) == 1
        for number, source in enumerate(operator.inputs):
            if not one_stream:
                frames[number] = frames[number].drop(*POSITION)
                if ORIGIN not in frames[number].columns:
                    frames[number] = frames[number].withColumn(ORIGIN, F.lit(self.stream_of(source) or ""))
            branch = F.lit(str(number))
            if BRANCH in frames[number].columns:
                branch = F.concat_ws("/", branch, F.col(BRANCH))
            frames[number] = frames[number].withColumn(BRANCH, branch)
        return frames

    # -- records and entries

    def read(self, stream: str) -> DataFrame:
        return self._times.read(stream)

    def first(self, frame: DataFrame) -> Row | None:
        return frame.first()

    def call(self, operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
        # Without the barrier Spark pushes later filters below the function, and calls its UDFs twice for a record.
        return add_barrier(_call_frame_function(operator, function, frame))

    def entries(self, dataset: str) -> tuple[DataFrame, Schema]:
        """Return the entries of a dataset and their columns; a local table includes what the batch has sent to it.

        A dataset without `bootstrap` that is not built yet has the columns that it will have.
        """
        declared = self.app.dataset(dataset)
        if declared.is_owned_by(self.app.name):
            reader = self._local.reader(dataset)
            return reader.frame(self.spark), reader.schema
        view = self.inputs.views[dataset]
        if view is None:
            schema = self._declared_schema(declared)
            return self._no_entries(declared, schema), schema
        return view.frame(self.spark), view.schema

    def _no_entries(self, dataset: AdjunctDataset, schema: Schema) -> DataFrame:
        return self.spark.createDataFrame([], schema.ddl())

    def _declared_schema(self, dataset: AdjunctDataset) -> Schema:
        if not isinstance(dataset.input, str):
            return derive_stored_schema(dataset, dataset.input.schema)
        records = self.system_of(dataset.input).info(split_stream_name(dataset.input)[1]).schema
        return Schema(()) if records is None else derive_stored_schema(dataset, records)

    def over_time(self, dataset: str) -> TimedRows:
        """Return which rows of a dataset were valid when, in the version or versions of the batch."""
        declared, view = self.app.dataset(dataset), self.inputs.views[dataset]
        versions = self.inputs.over_time.get(dataset)
        if versions is None and isinstance(view, VersionReader):
            if declared.follows_changes:
                edge = None if view.sealed.history is None else view.sealed.history.pruned
                return TimedRows(view.history_frame(self.spark), view.schema, _to_time(edge))
            versions = VersionsOverTime(view.store, dataset, [view.sealed])
        if versions is not None:  # versions before its edge may have been discarded
            return TimedRows(versions.history_frame(self.spark), versions.schema, _to_time(versions.edge))
        schema = self._declared_schema(declared)  # no version yet: no rows, in its buckets
        layout = build_layout(schema, declared.key, declared.partition_by, declared.partitions, True, over_time=True)
        return TimedRows(bucketed_frame(self.spark, self.context.lake.store, dataset, layout, []), schema, None)

    # -- time and state

    def watermarks(self, name: str) -> Watermarks:
        return self._times.watermarks(name)

    def state(self, name: str, spec: StateSpec, *, of: str | None = None) -> StateHandle:
        return self._states.table(name, spec, self.watermarks(of or name))

    def count_records(self, operator: str, frame: DataFrame, conditions: Mapping[str, Column]) -> DataFrame:
        from pyspark.sql import Observation

        observation = Observation(f"{operator}-{uuid4().hex}")
        self._observed.append((operator, observation))
        return frame.observe(observation, *[F.count_if(met).alias(name) for name, met in conditions.items()])

    def divert_late_records(self, operator: str, records: DataFrame) -> None:
        before = self._left_out.get(operator)
        self._left_out[operator] = records if before is None else before.unionByName(records)

    def diverted_late_records(self, operator: str) -> DataFrame:
        (before,) = self.app.operator(operator).inputs
        return self._left_out[before]

    def write_local(
        self, operator: str, frame: DataFrame, table: str, *, deleted: str | None, on_null_key: OnNullKey
    ) -> None:
        in_place = operator not in self.exchanges
        self._local.send(operator, frame, table, deleted=deleted, on_null_key=on_null_key, partitioned=in_place)


def _to_time(micros: int | None) -> datetime | None:
    return None if micros is None else _BEGIN + timedelta(microseconds=micros)


def _call_frame_function(operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
    """Return the DataFrame that a user's function returns for the records.

    Raises OperatorFailedError for what the function raises, and PlanningError for a result that is no DataFrame, lacks
    the records' hidden columns, or has two columns with one name. Errors of Adjunct and of Spark's analyzer pass
    unchanged.
    """
    from pyspark.errors import AnalysisException
    from pyspark.sql import DataFrame

    try:
        result: object = function(frame)
    except (AdjunctError, AnalysisException):
        raise
    except Exception as error:
        raise function_failed_error(operator, function_label(function), function, error) from error
    if not isinstance(result, DataFrame):
        returned = "None" if result is None else type(result).__name__
        problem = f"{operator}: {function_label(function)} returned {returned}: expected a DataFrame."
        step = "Return a DataFrame made from the given records, with other columns or fewer rows."
        raise PlanningError(problem, step, operator=operator)
    lost = [name for name in list_hidden_columns(frame) if name not in result.columns]
    if lost:
        raise PlanningError(
            f"{operator}: its function returned records without {', '.join(lost)}, which hold each record's "
            "position and epoch.",
            'Keep them: add columns with withColumn or select("*", …), and drop only your own; or give '
            "expressions instead of a function.",
            operator=operator,
        )
    double = first_duplicate(result.columns)
    if double is not None:
        problem = f"{operator}: {function_label(function)} returned two columns called {double!r}."
        step = "Rename or drop one of them; Spark's names ignore case."
        raise PlanningError(problem, step, column=double, operator=operator)
    return result


def _analysis_error(operator: Operator, error: AnalysisException) -> PlanningError:
    problem = str(error).strip().partition("SQLSTATE")[0].strip().splitlines()[0].rstrip(" .")
    place = failing_line(error) or operator.declared_at
    return PlanningError(
        f"{operator.id}: {problem}{f' ({place.describe()})' if place else ''}.",
        "Correct the expression or function; adjunct plan lists the operators by these names.",
        operator=operator.id,
    )
