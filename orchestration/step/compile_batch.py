"""Compiles a planned application to DataFrames for one batch, and writes its outputs in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.unbounded.state_table import StateSpec
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import TimeState
from dagster_adjunct.orchestration.operators.arguments import (
    DataFrameFunction,
    OnNullKey,
    first_duplicate,
    function_label,
)
from dagster_adjunct.orchestration.operators.batch_context import (
    SinkFunction,
    StateHandle,
    TableLookup,
    TableSend,
    TimedRows,
    Watermarks,
)
from dagster_adjunct.orchestration.operators.columns import list_hidden_columns
from dagster_adjunct.orchestration.operators.joins import BEFORE_HISTORY, MATCHED, NO_TIME
from dagster_adjunct.orchestration.operators.operator import Exchange, Operator
from dagster_adjunct.orchestration.operators.stream_facts import JoinVersions
from dagster_adjunct.orchestration.planner.notes import name_writers
from dagster_adjunct.orchestration.planner.plan import PlannedOperator
from dagster_adjunct.orchestration.step.batch_inputs import read_entries, read_rows_over_time
from dagster_adjunct.orchestration.step.batch_outputs import (
    FunctionOutputs,
    StreamOutputs,
    TableOutputs,
    find_needed_operators,
    find_position_streams,
    name_producers,
)
from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext
from dagster_adjunct.orchestration.step.event_times import BatchTimes
from dagster_adjunct.orchestration.step.failures import explain_failure, sensitive_columns, sensitive_entries
from dagster_adjunct.orchestration.step.provenance import Origin, tag_branch, trace_origins
from dagster_adjunct.orchestration.step.state import LeftOutRecords, LocalTableWrites, StateTables
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import AdjunctError, PlanningError
from dagster_adjunct.resources.schemas.column_sql import named_column
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.tuning import PersistedFrames, use_interpreted_plans
from dagster_adjunct.resources.streams.system import AppendResult, Sources, StreamSystem
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.user_code import failing_line, function_failed_error

if TYPE_CHECKING:
    from pyspark.errors import AnalysisException
    from pyspark.sql import Column, DataFrame, Row, SparkSession


def moves_only_for_write(graph: BatchGraph, operator: Operator) -> bool:
    """Return whether records are repartitioned only to be written, and continue unmoved."""
    return operator.spec.is_side_output and bool(graph.moves(operator.id))


def repartition_inputs(graph: BatchGraph, operator: Operator, sources: Sequence[DataFrame]) -> list[DataFrame]:
    """Return the records of each input, repartitioned where the plan's auto_repartition says so."""
    frames = list(sources)
    for exchange in graph.moves(operator.id):
        number, by = exchange.input, map(named_column, exchange.partitioned_by)
        frames[number] = graph.gather_small(frames[number]).repartition(exchange.partitions, *by)
    return frames


def prepare_inputs(
    graph: BatchGraph,
    operator: Operator,
    sources: Sequence[DataFrame],
    with_watermark: Callable[[Operator, DataFrame], DataFrame],
) -> list[DataFrame]:
    """Return the records of each input as the operator gets them: repartitioned, with its watermark, tagged by input.

    `sources` are the records that leave the operators before it. Inputs may share positions, so records of several
    inputs say which one they came from.
    """
    frames = [with_watermark(operator, frame) for frame in repartition_inputs(graph, operator, sources)]
    if len(frames) < 2:
        return frames
    one_stream = len(graph.origins[operator.id].streams) == 1
    return [
        tag_branch(frame, number, one_stream=one_stream, stream=graph.stream_of(source) or "")
        for number, (source, frame) in enumerate(zip(operator.inputs, frames, strict=True))
    ]


_TIME_COUNTS = {BEFORE_HISTORY: "before_history", NO_TIME: "null_times"}


def add_barrier(frame: DataFrame) -> DataFrame:
    """Return the same records behind a metric that nobody reads, past which Spark's optimizer moves nothing."""
    from pyspark.sql import functions as F

    return frame.observe(f"here-{uuid4().hex}", F.count(F.lit(1)))


class JoinCounts:
    """Counts the rows of one join, and how many of them matched no entry; for joins by time also those from before the
    dataset's history, and those without a time.

    Spark counts rows as they pass, so `result` is available once an output has consumed them. `metric` is the name of
    the counts in Spark's plans.
    """

    def __init__(self, name: str) -> None:
        from pyspark.sql import Observation

        self.name, self.metric = name, f"{name}-{uuid4().hex}"
        self._observation = Observation(self.metric)

    def observe(self, joined: DataFrame) -> DataFrame:
        """Return `joined`, counted; its column `__matched` is null where no entry matched."""
        from pyspark.sql import functions as F

        return joined.observe(
            self._observation,
            F.count(F.lit(1)).alias("rows"),
            F.count_if(F.col(MATCHED).isNull()).alias("unmatched"),
            *[F.count_if(told).alias(name) for told, name in _TIME_COUNTS.items() if told in joined.columns],
        )

    def result(self) -> dict[str, int]:
        """Return {"rows", "unmatched"}; for a join by time also {"before_history", "null_times"}.

        Waits for the output if it has not run yet.
        """
        counts: dict[str, Any] = self._observation.get
        return {name: int(value) for name, value in counts.items()}


Counters = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class BatchMetrics:
    """The counters of a batch by output or join, its table metrics, and the event times of its inputs after it."""

    counters: Counters
    measured: Mapping[str, TableMetrics]
    times: TimeState | None = None


class BatchCounts:
    """Collects counters of outputs and joins, and metrics of tables, while a batch is written."""

    def __init__(self) -> None:
        self.counters: Counters = {}
        self.measured: dict[str, TableMetrics] = {}
        self._joins: list[JoinCounts] = []

    def add(self, name: str, counters: Mapping[str, int]) -> None:
        """Add to the counters of an output or an operator."""
        self.counters[name] = sum_counters(self.counters.get(name, {}), counters)

    def measure(self, table: str, metrics: TableMetrics, counters: Mapping[str, int]) -> None:
        """Add the metrics and counters of a table's requests."""
        self.measured[table] = self.measured.get(table, TableMetrics()) + metrics
        self.add(table, counters)

    def of_join(self, operator: str, joined: DataFrame) -> DataFrame:
        """Return joined records, counted as they pass."""
        counts = JoinCounts(operator)
        self._joins.append(counts)
        return counts.observe(joined)

    def of_joins(self) -> Counters:
        """Return the counts of each join; waits for outputs that have not run yet."""
        return {join.name: join.result() for join in self._joins}


def sum_counters(before: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """Return the sums of two sets of counters."""
    return {name: before.get(name, 0) + more.get(name, 0) for name in {**before, **more}}


def call_frame_function(operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
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
        raise PlanningError(
            f"{operator}: {function_label(function)} returned {returned}: expected a DataFrame.",
            "Return a DataFrame made from the given records, with other columns or fewer rows.",
            operator=operator,
        )
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
        raise PlanningError(
            f"{operator}: {function_label(function)} returned two columns called {double!r}.",
            "Rename or drop one of them; Spark's names ignore case.",
            column=double,
            operator=operator,
        )
    return result


class BatchCompiler:
    """The BatchContext of a batch that writes: it reads inputs, and writes outputs, for the operators that are
    compiled.

    `before_output` is called with the name of an output before anything is written to it.
    """

    def __init__(self, graph: BatchGraph, before_output: Callable[[str], None]) -> None:
        context, inputs = graph.context, graph.inputs
        self.graph = graph
        self._before_output = before_output
        self._arrived: dict[str, list[DataFrame]] = {}
        self._kept = PersistedFrames()
        self._times = BatchTimes(context, inputs)
        self._states = StateTables(context, inputs)
        self._left_out = LeftOutRecords()
        self._local = LocalTableWrites(context, inputs, graph.stream_of)
        self._counts = BatchCounts()
        self._streams = StreamOutputs(graph, self._counts, before_output)
        self._tables = TableOutputs(graph, self._counts, before_output)
        self._functions = FunctionOutputs(graph, self._counts, before_output)

    def commit(self) -> BatchMetrics:
        """Commit local and state tables, after all other outputs are written; return the metrics of the batch."""
        counters = self._counts.counters
        counters |= self._local.commit(self._before_output)
        counters |= self._states.commit(self._before_output)
        counters |= self._counts.of_joins()
        counters |= self._left_out.counts()
        return BatchMetrics(counters, self._counts.measured, self._times.after())

    def close(self) -> None:
        """Discard what is not committed, and release cached records."""
        self._local.close()
        self._states.close()
        self._kept.release()  # before the records that they are made of
        self._times.close()

    # -- the operator that is compiled

    def note_arriving(self, operator: str, frames: Sequence[DataFrame]) -> None:
        """Remember the input records of an operator, for finding the record that fails in it."""
        self._arrived[operator] = list(frames)

    def arriving(self, operator: Operator) -> list[DataFrame]:
        """Return the input records of an operator, for each input."""
        return self._arrived[operator.id]

    def with_watermark(self, operator: Operator, frame: DataFrame) -> DataFrame:
        return self._times.arriving(operator, frame)

    def sensitive(self, operator: str) -> frozenset[str]:
        compiled = self.app.operator(operator)
        dataset = None if compiled.spec.match is None else compiled.spec.match.dataset
        names = frozenset() if dataset is None else sensitive_entries(self.graph.context, dataset)
        for source, frame in zip(compiled.inputs, self._arrived[operator], strict=True):
            own = [name for name in frame.columns if not name.startswith("__")]
            names |= sensitive_columns(self.graph.context, source, own)
        return names

    # -- the graph

    @property
    def app(self) -> Application:
        return self.graph.app

    @property
    def tasks(self) -> int:
        return self.graph.tasks

    @property
    def reading(self) -> JoinVersions:
        return self.graph.inputs.reading

    @property
    def number(self) -> int:
        return self.graph.inputs.batch

    @property
    def clock(self) -> datetime:
        return self.graph.inputs.clock

    def system_of(self, stream: str) -> StreamSystem:
        return self.graph.system_of(stream)

    def partitions_at(self, operator: str) -> int:
        return self.graph.partitions_at(operator)

    def required_partitioning(self, operator: str) -> tuple[str, ...]:
        return self.graph.required_partitioning(operator)

    def stream_of(self, operator: str) -> str | None:
        return self.graph.stream_of(operator)

    def has_consumers(self, operator: str) -> bool:
        return self.graph.has_consumers(operator)

    def has_late_consumer(self, operator: str) -> bool:
        return operator in self.graph.late_consumers

    # -- records, entries and lookups

    def read(self, stream: str) -> DataFrame:
        return self._times.read(stream)

    def gather_small(self, frame: DataFrame) -> DataFrame:
        return self.graph.gather_small(frame)

    def materialize(self, operator: str, frame: DataFrame) -> DataFrame:
        return self._kept.keep(frame)

    def first(self, frame: DataFrame) -> Row | None:
        return frame.first()

    def call(self, operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
        # Without the barrier Spark pushes later filters below the function, and calls its UDFs twice for a record.
        return add_barrier(call_frame_function(operator, function, frame))

    def entries(self, dataset: str) -> tuple[DataFrame, Schema]:
        return read_entries(self.graph, dataset, self._local, self._no_entries)

    def _no_entries(self, dataset: AdjunctDataset, schema: Schema) -> DataFrame:
        return self.graph.spark.createDataFrame([], schema.ddl())

    def over_time(self, dataset: str) -> TimedRows:
        return read_rows_over_time(self.graph, dataset)

    def count_matches(self, operator: str, dataset: str, frame: DataFrame) -> DataFrame:
        return self._counts.of_join(operator, frame)

    def look_up(self, operator: str, frame: DataFrame, lookup: TableLookup) -> DataFrame:
        return self._tables.look_up(operator, self.materialize(operator, frame), lookup, self.sensitive(operator))

    # -- time and state

    def watermarks(self, name: str) -> Watermarks:
        return self._times.watermarks(name)

    def state(self, name: str, spec: StateSpec, *, of: str | None = None) -> StateHandle:
        return self._states.table(name, spec, self.watermarks(of or name))

    def count_records(self, operator: str, frame: DataFrame, conditions: Mapping[str, Column]) -> DataFrame:
        return self._left_out.counted(operator, frame, conditions)

    def divert_late_records(self, operator: str, records: DataFrame) -> None:
        self._left_out.leave(operator, records)

    def diverted_late_records(self, operator: str) -> DataFrame:
        (before,) = self.app.operator(operator).inputs
        return self._left_out.of(before)

    # -- outputs

    def send(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> AppendResult | None:
        return self._streams.send(operator, frame, stream, key=key, partitions=partitions)

    def write(self, operator: str, frame: DataFrame, send: TableSend) -> None:
        self._tables.write(operator, frame, send, self.sensitive(operator))

    def refused_records(self, operator: str) -> DataFrame:
        return self._tables.refused_records(operator)

    def send_dead_letters(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        self._streams.send_dead_letters(operator, frame, stream, key=key, partitions=partitions)

    def write_local(
        self, operator: str, frame: DataFrame, table: str, *, deleted: str | None, on_null_key: OnNullKey
    ) -> None:
        lying = operator not in self.graph.exchanges
        self._local.send(operator, frame, table, deleted=deleted, on_null_key=on_null_key, partitioned=lying)

    def call_sink(self, operator: str, frame: DataFrame, function: SinkFunction) -> None:
        self._functions.call_sink(operator, frame, function, self.sensitive(operator))

    def call_sink_for_results(
        self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema
    ) -> DataFrame:
        return self._functions.call_sink_for_results(operator, frame, function, returns, self.sensitive(operator))


@dataclass(frozen=True, slots=True)
class BatchGraph:
    """What a batch reads, and what the application and its plan say of each operator, by id; immutable.

    `operators` are those whose records are written, in order. `consumers` counts the operators that take the records of
    each, `late_consumers` are the operators whose left-out records are used. `origins` and `positions` say where
    records have their positions from; `producers` and `writers` are the names under which operators write to streams
    and tables.
    """

    context: StepContext
    inputs: BatchInputs
    operators: Sequence[Operator]
    planned: Mapping[str, PlannedOperator]
    exchanges: Mapping[str, Sequence[Exchange]]
    consumers: Mapping[str, int]
    late_consumers: frozenset[str]
    origins: Mapping[str, Origin]
    positions: Mapping[str, str | None]
    producers: Mapping[str, str]
    writers: Mapping[str, str]

    @property
    def app(self) -> Application:
        return self.context.app

    @property
    def spark(self) -> SparkSession:
        return self.context.spark()

    @property
    def replays(self) -> bool:
        """Whether the batch reads outside the main position: a bounded replay, or a dry run."""
        return self.inputs.consumed is None

    @property
    def tasks(self) -> int:
        return self.inputs.tasks or len(self.context.plan.tasks)

    def partitions_at(self, operator: str) -> int:
        return self.planned[operator].partitions

    def required_partitioning(self, operator: str) -> tuple[str, ...]:
        return self.planned[operator].partitioned_by

    def stream_of(self, operator: str) -> str | None:
        """Return the stream that holds the positions of an operator's records; None if there are several."""
        return self.positions[operator]

    def has_consumers(self, operator: str) -> bool:
        return self.consumers.get(operator, 0) > 0

    def is_shared(self, operator: Operator) -> bool:
        """Return whether several operators use the records and nothing stores them: what is read or written is stored
        already.
        """
        spec = operator.spec
        return self.consumers.get(operator.id, 0) > 1 and spec.reads is None and spec.writes is None

    def moves(self, operator: str) -> Sequence[Exchange]:
        """Return the plan's auto_repartition exchanges before an operator."""
        return [move for move in self.exchanges.get(operator, ()) if move.reason == "auto_repartition"]

    def system_of(self, stream: str) -> StreamSystem:
        return self.context.systems[split_stream_name(stream)[0]]

    def sources(self, operator: str) -> Sources | None:
        """Return what is read of the one stream that an operator's records come from; None if there are several."""
        stream = self.origins[operator].made_of
        return None if stream is None else self.inputs.sources(self.context.writer, stream)

    def gather_small(self, frame: DataFrame) -> DataFrame:
        """Return records that are repartitioned next; few records are coalesced into one task first."""
        # Without the barrier Spark drops a coalesce right before an exchange.
        return add_barrier(frame.coalesce(1)) if self.inputs.few else frame


def build_batch_graph(context: StepContext, inputs: BatchInputs) -> BatchGraph:
    """Return the graph of a batch that reads these inputs."""
    operators = context.app.operators
    written = find_needed_operators(operators)
    exchanges: dict[str, list[Exchange]] = {}
    for exchange in context.plan.exchanges:
        exchanges.setdefault(exchange.operator, []).append(exchange)
    return BatchGraph(
        context,
        inputs,
        operators=[operator for operator in operators if operator.id in written],
        planned={planned.id: planned for planned in context.plan.operators},
        exchanges=exchanges,
        consumers=Counter(source for operator in operators for source in set(operator.inputs)),
        late_consumers=frozenset(
            source for operator in operators if operator.spec.reads_late_records for source in operator.inputs
        ),
        origins=trace_origins(operators),
        positions=find_position_streams(
            operators, lambda stream: context.systems[split_stream_name(stream)[0]].appends_alone
        ),
        producers=name_producers(context.app, context.writer),
        writers=name_writers(context.app, context.writer),
    )


def run_batch(context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> BatchMetrics:
    """Write every output of the application once, in order of definition; return the metrics of the batch.

    (application, batch) is the producer and sequence of every append, so repeating a batch adds nothing to streams.
    `before_output` is called with the output's name before anything is written to it.
    """
    with use_interpreted_plans(context.spark()) if inputs.interpreted else nullcontext():
        batch = BatchCompiler(build_batch_graph(context, inputs), before_output)
        try:
            compile_operators(batch)
            return batch.commit()
        finally:
            batch.close()


def compile_operators(batch: BatchCompiler) -> dict[str, DataFrame]:
    """Compile the operators whose records are written, which writes them; return the records that leave each."""
    frames: dict[str, DataFrame] = {}
    for operator in batch.graph.operators:
        leaving = compile_operator(batch, operator, [frames[source] for source in operator.inputs])
        # Records that several operators use are computed once.
        several = batch.graph.is_shared(operator)
        frames[operator.id] = batch.materialize(operator.id, leaving) if several else leaving
    return frames


def compile_operator(batch: BatchCompiler, operator: Operator, sources: Sequence[DataFrame]) -> DataFrame:
    """Return the records that leave an operator; `sources` are the records that leave the operators before it.

    Errors of its expressions and functions name the operator, without Spark's plan.
    """
    from pyspark.errors import AnalysisException

    aside = moves_only_for_write(batch.graph, operator)
    try:
        if aside and batch.graph.has_consumers(operator.id):  # read twice: to be written, and to continue
            sources = [batch.materialize(operator.id, frame) for frame in sources]
        arriving = prepare_inputs(batch.graph, operator, sources, batch.with_watermark)
        batch.note_arriving(operator.id, arriving)
        leaving = _compile_spec(batch, operator, arriving)
    except AnalysisException as error:
        raise _analysis_error(operator, error) from error
    return sources[0] if aside else leaving


def _compile_spec(batch: BatchCompiler, operator: Operator, arriving: Sequence[DataFrame]) -> DataFrame:
    from pyspark.errors import AnalysisException

    try:
        return operator.spec.compile(operator.id, arriving, batch)
    except AnalysisException:
        raise
    except Exception as error:
        told = explain_failure(batch, operator.id, error)
        if told is None:
            raise
        raise told  # noqa: B904 - it says itself what may be told of its cause


def _analysis_error(operator: Operator, error: AnalysisException) -> PlanningError:
    problem = str(error).strip().partition("SQLSTATE")[0].strip().splitlines()[0].rstrip(" .")
    place = failing_line(error) or operator.declared_at
    return PlanningError(
        f"{operator.id}: {problem}{f' ({place.words()})' if place else ''}.",
        "Correct the expression or function; adjunct plan lists the operators by these names.",
        operator=operator.id,
    )
