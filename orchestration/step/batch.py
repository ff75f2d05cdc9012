"""One batch of a planned application: compiles its operators to DataFrames, and writes its outputs
in order.

`BatchContext` is what a batch passes to its operators (`Spec.compile`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.valid_time import Reader, VersionsOverTime
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.sources.entries import derive_stored_schema
from dagster_adjunct.assets.unbounded.local_table import (
    LocalTableWriter,
    StateSpec,
    WritingBatch,
    columns_of_local_table,
    declare_state_dataset,
)
from dagster_adjunct.assets.versions.version import build_layout, datetime_from_micros
from dagster_adjunct.assets.writing.generation import SPARK, SPARK_ONE_TASK
from dagster_adjunct.orchestration.batch_log.batch_log import Counters, add_counters
from dagster_adjunct.orchestration.operators.as_of_join import BEFORE_HISTORY, NO_TIME, TimedRows
from dagster_adjunct.orchestration.operators.columns import (
    BATCH_ONLY,
    BRANCH,
    ORIGIN,
    DataFrameFunction,
    OnNullKey,
    function_label,
    tie_breakers,
)
from dagster_adjunct.orchestration.operators.event_time import Watermarks
from dagster_adjunct.orchestration.operators.functions import (
    RecordCall,
    call_in_tasks,
    pickle_function,
)
from dagster_adjunct.orchestration.operators.joins import MATCHED
from dagster_adjunct.orchestration.operators.lookup_join import AnyTable, TableLookup
from dagster_adjunct.orchestration.operators.operator import Exchange, Operator
from dagster_adjunct.orchestration.operators.sends import SinkFunction
from dagster_adjunct.orchestration.operators.stream_facts import RECORDED
from dagster_adjunct.orchestration.operators.table_updates import TableSend
from dagster_adjunct.orchestration.planner.notes import name_writers
from dagster_adjunct.orchestration.step import batch_outputs, lookups, recorded_answers
from dagster_adjunct.orchestration.step.context import BatchInputs, BatchMetrics, StepContext
from dagster_adjunct.orchestration.step.event_times import BatchTimes
from dagster_adjunct.orchestration.step.failures import (
    analysis_error,
    call_frame_function,
    explain_failure,
    sensitive_columns,
)
from dagster_adjunct.resources.bucketing.files import bucketed_frame
from dagster_adjunct.resources.errors import NullKeyError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.reports import sum_counters
from dagster_adjunct.resources.schemas.schema import Schema, named_column
from dagster_adjunct.resources.spark.tasks import small_frame
from dagster_adjunct.resources.spark.tuning import PersistedFrames, use_interpreted_plans
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    POSITION,
    TOMBSTONE,
    AppendResult,
    OffsetRange,
    Sources,
    StreamSystem,
    SystemStreamPartition,
    require_writer,
)
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.tables.spark import TableWrite, WriteResult, write_table

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, Observation, Row, SparkSession

    from dagster_adjunct.assets.unbounded.transient_table import TransientVersion
    from dagster_adjunct.orchestration.operators.table_updates import Update

_TIME_COUNTS = {BEFORE_HISTORY: "before_history", NO_TIME: "null_times"}


def run_batch(batch: BatchContext) -> BatchMetrics:
    """Write every output of the application once, in order of definition; return the metrics of the
    batch.

    (application, batch) is the producer and sequence of every append, so repeating a batch adds
    nothing to streams.
    """
    plans = use_interpreted_plans(batch.spark) if batch.inputs.interpreted else nullcontext()
    with plans, closing(batch):
        batch.run()
        return batch.commit()


class BatchContext:
    """One batch that is being written: what its operators read, and what they write.

    `number` is the batch's number among those of the application, and `clock` its start by the
    lake's clock; a repeated batch has the same. `reading` says which versions its joins use; with
    "current", as-of joins use current entries. `tasks` is the number of tasks, each of which gets a
    copy of broadcast records.

    `operators` are those whose records reach an output, in order; the others need not run.
    `origins` has the origin of each operator's records; `producers` and `writers` are the names
    under which operators write to streams and tables. `arrived` has the records of each input of
    the operators that are compiled already, for error reports. `before_output` is called with the
    name of an output before anything is written to it, and raises if the run may not continue. It
    may also get a function that looks at the output; then it returns that function's result.
    """

    def __init__(
        self, context: StepContext, inputs: BatchInputs, before_output: Callable[..., Any]
    ) -> None:
        operators, needed = context.app.operators, set[str]()
        for operator in reversed(operators):
            if operator.spec.writes is not None or operator.id in needed:
                needed |= {operator.id, *operator.inputs}
        self.context, self.inputs, self.app = context, inputs, context.app
        self._snapshots: dict[str, StreamSystem] = {**inputs.streams}
        self.number, self.clock, self.reading = (
            inputs.intent.batch,
            inputs.intent.clock,
            inputs.intent.reading,
        )
        self.tasks = inputs.intent.tasks or len(context.plan.tasks)
        self.operators = [operator for operator in operators if operator.id in needed]
        self.planned = {planned.id: planned for planned in context.plan.operators}
        self.exchanges: dict[str, list[Exchange]] = defaultdict(list)
        for exchange in context.plan.exchanges:
            self.exchanges[exchange.operator].append(exchange)
        self.origins = batch_outputs.trace_origins(operators, self.system_of)
        self.producers = batch_outputs.name_producers(self.app, context.writer)
        self.writers = name_writers(self.app, context.writer)
        self.arrived: dict[str, list[DataFrame]] = {}
        self._consumers = Counter(source for operator in operators for source in operator.inputs)
        self._late_consumed = {
            source
            for operator in operators
            if operator.spec.reads_late_records
            for source in operator.inputs
        }
        self._before_output = before_output
        self._times = BatchTimes(context, inputs)
        self._state_tables: dict[str, batch_outputs.StateTable] = {}
        self._local: dict[str, LocalTableWriter] = {}
        self._writers = ExitStack()
        self._late: dict[str, DataFrame] = {}
        self._letters: dict[str, tuple[str, batch_outputs.Letters]] = {}
        self._counters: Counters = {}
        self._table_counters: Counters = {}  # of local tables and state tables
        self._measured: dict[str, TableMetrics] = {}
        self._observed: list[tuple[str, Observation]] = []
        self._kept = PersistedFrames()

    def run(self) -> None:
        """Compile the operators in order; compiling an output writes its records."""
        frames: dict[str, DataFrame] = {}
        for operator in self.operators:
            leaving = self.compile_operator(
                operator, [frames[source] for source in operator.inputs]
            )
            frames[operator.id] = self.hand_on(operator, leaving)

    def commit(self) -> BatchMetrics:
        """Commit local and state tables, after all other outputs are written; return the metrics
        of the batch.
        """
        for table, writer in self._local.items() if self.inputs.consumed is not None else ():
            if table in self._table_counters:
                self._before_output(table)
                _, duplicate = writer.commit()
                self._table_counters[table]["duplicate_batches"] = int(duplicate)
        for state in self._state_tables.values():
            if state.kept:
                self._before_output(state.writes.name)
                state.commit()
                self._table_counters[state.writes.name] = state.counted
        observed: Counters = {}
        for operator, observation in self._observed:
            of_operator = observed.setdefault(operator, {})
            # `getRow` waits for the query that has the observation. Its row is empty if Spark has
            # optimized the records away. With Spark Connect there is nothing to wait for.
            observed_in_jvm = getattr(observation, "_jo", None)
            if observed_in_jvm is None or observed_in_jvm.getRow().length():
                for name, count in observation.get.items():
                    of_operator[name] = of_operator.get(name, 0) + int(count)
        return BatchMetrics(
            self._counters | self._table_counters | observed, self._measured, self._times.after
        )

    def close(self) -> None:
        """Discard what is not committed, and release cached records."""
        self._writers.close()
        self._kept.release()  # before the records that they are made of
        self._times.close()

    # -- the operator that is compiled

    def compile_operator(self, operator: Operator, sources: Sequence[DataFrame]) -> DataFrame:
        """Return the records that leave an operator; `sources` are the records that leave the
        operators before it.

        Errors of its expressions and functions name the operator, without Spark's plan.
        """
        from pyspark.errors import AnalysisException

        # Records that are repartitioned only to be written continue unmoved.
        aside = operator.spec.is_side_output and bool(self.moves(operator.id))
        try:
            if aside and self.has_consumers(
                operator.id
            ):  # read twice: to be written, and to continue
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
            raise analysis_error(operator, error) from error
        return sources[0] if aside else leaving

    def hand_on(self, operator: Operator, frame: DataFrame) -> DataFrame:
        """Return the records as the next operators get them: cached if these are several."""
        return self.materialize(operator.id, frame) if self.is_shared(operator) else frame

    def _prepare_inputs(self, operator: Operator, sources: Sequence[DataFrame]) -> list[DataFrame]:
        """Return the records of each input as the operator gets them: repartitioned, with BEHIND,
        BRANCH and ORIGIN.

        Records of two inputs may have the same position, so BRANCH says which input they came from.
        Unless all inputs have positions in one stream, the columns of POSITION are dropped, because
        the inputs differ in them, and each record that lacks ORIGIN, the stream of the input's
        positions, gets it.
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
                    frames[number] = frames[number].withColumn(
                        ORIGIN, F.lit(self.stream_of(source) or "")
                    )
            branch = F.lit(str(number))
            if BRANCH in frames[number].columns:
                branch = F.concat_ws("/", branch, F.col(BRANCH))
            frames[number] = frames[number].withColumn(BRANCH, branch)
        return frames

    # -- what is planned of operators

    @property
    def spark(self) -> SparkSession:
        return self.context.spark()

    def system_of(self, stream: str) -> StreamSystem:
        """Return the system of a stream ("system.stream"); the snapshot of it, if the batch has
        taken one.
        """
        return self._snapshots.get(stream) or self.context.systems[split_stream_name(stream)[0]]

    def partitions_at(self, operator: str) -> int:
        """Return the planned partition count of the records that leave an operator."""
        return self.planned[operator].partitions

    def required_partitioning(self, operator: str) -> Sequence[str]:
        """Return the columns that records must be partitioned by after an operator; () where
        nothing relies on it.
        """
        return self.planned[operator].partitioned_by

    def stream_of(self, operator: str) -> str | None:
        """Return the stream that the positions of an operator's records are in; None if there
        are several.
        """
        return self.origins[operator].positions

    def has_consumers(self, operator: str) -> bool:
        """Whether another operator uses the records of this one."""
        return self._consumers[operator] > 0

    def has_late_consumer(self, operator: str) -> bool:
        """Whether an operator reads the late records of this one."""
        return operator in self._late_consumed

    def is_shared(self, operator: Operator) -> bool:
        """Return whether several operators use this one's records, which no stream or table
        stores.
        """
        return (
            self._consumers[operator.id] > 1
            and operator.spec.reads is None
            and operator.spec.writes is None
        )

    def moves(self, operator: str) -> list[Exchange]:
        """Return the plan's auto_repartition exchanges before an operator."""
        return [
            move for move in self.exchanges.get(operator, ()) if move.reason == "auto_repartition"
        ]

    def is_partitioned(self, operator: str) -> bool:
        """Whether the records that an operator writes arrive in the partitions of its output."""
        return operator not in self.exchanges

    def sensitive(self, operator: str) -> frozenset[str]:
        """Return the columns of an operator's input whose values must not appear in errors."""
        compiled = self.app.operator(operator)
        match = compiled.spec.match
        joined = None if match is None or match.dataset is None else match.node
        names = frozenset(name for node, name in self.context.sensitive if node == joined)
        for source, frame in zip(compiled.inputs, self.arrived[operator], strict=True):
            own = [name for name in self.names(frame) if not name.startswith("__")]
            names |= sensitive_columns(self.context, source, own)
        return names

    # -- records

    def read(self, stream: str) -> DataFrame:
        """Return the batch's records of an input stream."""
        return self._times.read(stream)

    def count(self, frame: DataFrame) -> int:
        """Return the number of these records."""
        return frame.count()

    def names(self, frame: DataFrame) -> Sequence[str]:
        """Return the names of the records' columns, hidden ones included."""
        return frame.columns

    def filter(self, frame: DataFrame, condition: str) -> DataFrame:
        """Return the records that match a Spark SQL condition."""
        return frame.filter(condition)

    def select(self, frame: DataFrame, expressions: Sequence[str]) -> DataFrame:
        """Return the records with the columns that these Spark SQL expressions give."""
        return frame.selectExpr(*expressions)

    def select_update(self, frame: DataFrame, names: Sequence[str], update: Update) -> DataFrame:
        """Return the records with these (quoted) columns, and the columns UPDATE and DEFAULT of
        a partial update.
        """
        return frame.selectExpr(*names, *update.expressions())

    def with_columns(self, frame: DataFrame, columns: Sequence[tuple[str, str]]) -> DataFrame:
        """Return the records with these columns, pairs of a name and a Spark SQL expression,
        added or replaced.
        """
        return frame.withColumns({name: F.expr(expression) for name, expression in columns})

    def repartition(self, frame: DataFrame, partitions: int, by: Sequence[str]) -> DataFrame:
        """Return the records in partitions by these columns."""
        return self.gather_small(frame).repartition(partitions, *map(named_column, by))

    def call(self, operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
        """Return the result of a user's DataFrame function, which must keep the hidden columns."""
        # Without the barrier Spark pushes later filters below the function, and calls its UDFs
        # twice for a record.
        return _add_barrier(call_frame_function(operator, function, frame))

    def call_for_records(
        self, frame: DataFrame, call: RecordCall, kept: Sequence[str]
    ) -> DataFrame:
        """Return what a user's function returns for each record, with the columns `kept` of the
        record.
        """
        return call_in_tasks(frame, call, kept)

    def first(self, frame: DataFrame) -> Row | None:
        """Compute and return the first of these records; None if there is none, and in a dry
        run.
        """
        return frame.first()

    def gather_small(self, frame: DataFrame) -> DataFrame:
        """Return the records, in one task if the batch is small; used before they are
        repartitioned.
        """
        # Without the barrier Spark drops a coalesce right before an exchange.
        return _add_barrier(frame.coalesce(1)) if self.inputs.few else frame

    def materialize(self, operator: str, frame: DataFrame) -> DataFrame:
        """Return the same records, computed once and cached for the batch, so that all readers
        see the same.
        """
        return self._kept.keep(frame)

    def count_records(
        self, operator: str, frame: DataFrame, conditions: Mapping[str, Column]
    ) -> DataFrame:
        """Return the records; counts how many match each condition, as metrics of the operator."""
        from pyspark.sql import Observation

        observation = Observation(f"{operator}-{uuid4().hex}")
        self._observed.append((operator, observation))
        return frame.observe(
            observation, *[F.count_if(met).alias(name) for name, met in conditions.items()]
        )

    def count_matches(self, operator: str, dataset: str, frame: DataFrame) -> DataFrame:
        """Return joined records and count their matches; `__matched` is null where a record has
        no entry.
        """
        times = {name: F.col(flag) for flag, name in _TIME_COUNTS.items() if flag in frame.columns}
        return self.count_records(
            operator, frame, {"rows": F.lit(True), "unmatched": F.col(MATCHED).isNull(), **times}
        )

    def divert_late_records(self, operator: str, records: DataFrame) -> None:
        """Pass on an operator's late records (`to_late_records`) to the operator that reads
        them.
        """
        before = self._late.get(operator)
        self._late[operator] = records if before is None else before.unionByName(records)

    def diverted_late_records(self, operator: str) -> DataFrame:
        """Return the late records of the operator before this one."""
        (before,) = self.app.operator(operator).inputs
        return self._late[before]

    # -- datasets and state

    def entries(self, dataset: str) -> tuple[DataFrame, Schema]:
        """Return the entries of a dataset and their columns; a local table includes what the batch
        has sent to it.

        A dataset without `bootstrap` that is not built yet has the columns that it will have.
        """
        declared = self.app.dataset(dataset)
        if declared.is_owned_by(self.app.name):
            reader = self._open_local(declared).reader()
            return reader.frame(self.spark), reader.schema
        view = self.inputs.views[dataset]
        if view is None:
            schema = self._declared_schema(declared)
            return self._no_entries(declared, schema), schema
        return self._frame_of(view), view.schema

    def _frame_of(self, view: VersionReader | TransientVersion) -> DataFrame:
        return view.frame(self.spark)

    def hint_join(self, dataset: str, side: DataFrame) -> DataFrame:
        """Return a dataset's side of a join with a hint: broadcast it, or merge bucket by
        bucket.
        """
        return F.broadcast(side) if self.app.dataset(dataset).broadcast else side.hint("merge")

    def _no_entries(self, dataset: AdjunctDataset, schema: Schema) -> DataFrame:
        return self.spark.createDataFrame([], schema.ddl())

    def _declared_schema(self, dataset: AdjunctDataset) -> Schema:
        if not isinstance(dataset.input, str):
            return derive_stored_schema(dataset, dataset.input.schema)
        records = self.system_of(dataset.input).info(split_stream_name(dataset.input)[1]).schema
        return Schema(()) if records is None else derive_stored_schema(dataset, records)

    def reader_over_time(self, dataset: str) -> tuple[Reader | None, int | None]:
        """Return a reader of a dataset's rows over time (None if it has no version yet), and the
        time from which its history is known, in microseconds (None if all of it is known).
        """
        view, versions = self.inputs.views[dataset], self.inputs.over_time.get(dataset)
        if versions is None and isinstance(view, VersionReader):
            if self.app.dataset(dataset).follows_changes:
                return view, None if view.sealed.history is None else view.sealed.history.pruned
            versions = VersionsOverTime(view.store, dataset, [view.sealed])
        return (
            versions,
            None if versions is None else versions.edge,
        )  # versions before it may have been discarded

    def over_time(self, dataset: str) -> TimedRows:
        """Return the rows over time of a dataset, of the versions that the batch started with."""
        reader, known_from = self.reader_over_time(dataset)
        if reader is not None:
            return TimedRows(self._history_of(reader), reader.schema, _to_time(known_from))
        declared = self.app.dataset(dataset)
        schema = self._declared_schema(declared)  # no version yet: no rows, in its buckets
        layout = build_layout(
            schema, declared.key, declared.partition_by, declared.partitions, True, over_time=True
        )
        return TimedRows(
            bucketed_frame(self.spark, self.context.lake.store, dataset, layout, []), schema, None
        )

    def _history_of(self, reader: Reader) -> DataFrame:
        return reader.history_frame(self.spark)

    def watermarks(self, name: str) -> Watermarks:
        """Return the watermarks of the stateful operator of this name, before and after this
        batch.
        """
        return self._times.watermarks(name)

    def state(
        self, name: str, spec: StateSpec, *, of: str | None = None
    ) -> batch_outputs.StateTable:
        """Return the state table of this name, one of the operator's `states`.

        Rows expire by the watermark of the stateful operator `of`, by default the one of the
        table's name.
        """
        marks = self.watermarks(of or name)
        if name not in self._state_tables:
            dataset, kept = (
                declare_state_dataset(self.context.writer, name, spec),
                self.inputs.consumed is not None,
            )
            writer = self._open_writer(
                dataset, self.inputs.states.get(dataset.name), self.context.writer
            )
            table = batch_outputs.StateTable(
                self.context, writer, spec, marks, kept, self.number > 0
            )
            self._state_tables[name] = table
        return self._state_tables[name]

    def check_zone_rules(
        self, state: batch_outputs.StateTable, zone: str, outdated: Column
    ) -> None:
        """Check in the dry run that the present rules of the zone are those of the stored rows, or
        make no difference.

        `outdated` says whether they would give a row other times.
        """

    def write_local(
        self,
        operator: str,
        frame: DataFrame,
        table: str,
        *,
        deleted: str | None,
        on_null_key: OnNullKey,
    ) -> None:
        """Write the last record of each key to a local table; tombstones, and records for which the
        SQL condition `deleted` is true, delete their key.

        The table is committed, and counted, at the end of the batch. A bounded replay commits
        nothing; in one of recorded versions, joins still read what the batch would write.
        """
        replays = self.inputs.consumed is None
        counted = self._table_counters.setdefault(
            table, {"rows": 0, "deleted": 0, "duplicate_batches": 0}
        )
        if replays:
            counted["replayed_batches"] = 1
            if (
                self.reading != RECORDED
                or table not in self.context.plan.tables_joined_after_sends()
            ):
                return
        dataset = self.app.dataset(table)
        rows, null_keys = batch_outputs.prepare_table_rows(frame, dataset.key, deleted, on_null_key)
        order = (PARTITION, OFFSET, *tie_breakers(frame.columns))
        names = (*columns_of_local_table(dataset).names, TOMBSTONE, *order)
        try:
            done = self._open_local(dataset).send(
                rows.select(*map(named_column, names)),
                order_by=order,
                partitioned=self.is_partitioned(operator),
            )
        except NullKeyError as error:
            raise batch_outputs.locate_null_key(
                error, operator, rows, dataset.key, self.stream_of(operator)
            ) from error
        if not replays:
            skipped = {} if null_keys is None else {"null_keys": null_keys()}
            self._table_counters[table] = sum_counters(counted, {**done, **skipped})

    def _open_local(self, dataset: AdjunctDataset) -> LocalTableWriter:
        if dataset.name not in self._local:
            pinned = self.inputs.views.get(dataset.name)
            self._local[dataset.name] = self._open_writer(dataset, pinned, self.app.name)
        return self._local[dataset.name]

    def _open_writer(self, dataset: AdjunctDataset, pinned: object, owner: str) -> LocalTableWriter:
        """Return a writer that adds to a table's version in the batch's intent, `pinned`, if it has
        one; `close` drops what is not committed.
        """
        sealed = pinned.sealed if isinstance(pinned, VersionReader) else None
        batch = WritingBatch(owner, self.number, self.context.run, self.inputs.intent.cut)
        tasks = SPARK_ONE_TASK if self.inputs.few else SPARK
        return self._writers.enter_context(
            LocalTableWriter(self.context.lake, dataset, sealed, batch, tasks)
        )

    # -- output streams

    def send(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> AppendResult | None:
        """Append records to a stream as (application, batch); it is created with `key` and
        `partitions` if needed.

        Returns None in a dry run.
        """
        system, name = require_writer(self.system_of(stream)), split_stream_name(stream)[1]
        # one snapshot for all requests: appending fails, and is retried, if the stream has changed
        if system.evolves:
            self._snapshots[stream] = system = require_writer(system.snapshot(name))
        find = partial(
            batch_outputs.find_previous_append, system, name, self.producers[operator], self.number
        )
        cut = self.inputs.intent.cut
        sent: AppendResult | None = self._before_output(
            stream, find if cut or system.evolves else lambda: None
        )
        create = partial(
            system.create, name, schema=self.output_schema(frame), key=key, partitions=partitions
        )
        if sent is not None and cut:
            result = sent  # of all records that the batch began with
            frame.count()  # counts upstream complete only once their records are consumed
        elif sent is not None:
            # The first run may have sent before the columns changed: change them only if the append
            # is a repeat.
            result = self._append(operator, frame, stream)
            create()
        else:
            create()
            result = self._append(operator, frame, stream)
        self._count(stream, {"rows": result.rows, "duplicate_batches": int(result.duplicate)})
        return result

    def _append(self, operator: str, frame: DataFrame, stream: str) -> AppendResult:
        system, options = (
            require_writer(self.system_of(stream)),
            self._append_options(operator, stream),
        )
        if self.inputs.few and system.accepts("one_task"):
            options["one_task"] = True
        return system.append(
            split_stream_name(stream)[1],
            batch_outputs.add_positions(frame, options.get("sources")).drop(*BATCH_ONLY),
            order_by=(PARTITION, OFFSET, *tie_breakers(frame.columns)),
            partitioned=self.is_partitioned(operator),
            **options,
        )

    def _append_rows(self, operator: str, rows: pa.Table, stream: str) -> AppendResult:
        """Append records that are in memory, from this process."""
        options = self._append_options(operator, stream)
        rows = batch_outputs.prepare_arrow_append(rows, options.get("sources"))
        system, name = require_writer(self.system_of(stream)), split_stream_name(stream)[1]
        with batch_outputs.naming_records(system, name, rows):
            return system.append(name, rows, **options)

    def _append_options(self, operator: str, stream: str) -> dict[str, Any]:
        """Return the arguments of an append: who writes which batch, and the input ranges that
        it was made of.
        """
        producer = self.producers[operator]
        consumed = self.inputs.consumed if producer == self.context.writer else None
        options: dict[str, Any] = {
            "producer": producer,
            "sequence": self.number,
            "consumed": consumed,
        }
        sources = (
            self._sources(operator)
            if require_writer(self.system_of(stream)).accepts("sources")
            else None
        )
        if self.context.fence is not None and require_writer(self.system_of(stream)).accepts(
            "fence"
        ):
            options["fence"] = self.context.fence
        return options | ({"sources": sources} if sources else {})

    def output_schema(self, frame: DataFrame) -> Schema:
        """Return the columns of records as an output stream gets them."""
        return batch_outputs.output_schema(frame)

    def read_appended(self, stream: str, result: AppendResult) -> DataFrame:
        """Return the records of an append to a stream; they keep their positions in the input."""
        return self.system_of(stream).read(self.spark, **self._appended(stream, result))

    def _appended(self, stream: str, result: AppendResult) -> dict[str, Any]:
        system, name = split_stream_name(stream)
        ranges = {
            SystemStreamPartition(system, name, partition): OffsetRange(
                start, result.next[partition]
            )
            for partition, start in result.first.items()
        }
        positions = require_writer(self.system_of(stream)).accepts("sources")
        return {"ranges": ranges} | ({"positions": True} if positions else {})

    def _sources(self, operator: str) -> Sources | None:
        """Return the ranges of the input stream that an operator's records are made of; None if
        there are several.
        """
        stream = self.origins[operator].made_of
        return None if stream is None else self.inputs.sources(self.context.writer, stream)

    def send_dead_letters(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        """Append rejected records to a stream, once per batch; if they were sent before, check
        that none is missing.
        """
        system, name = require_writer(self.system_of(stream)), split_stream_name(stream)[1]
        sent = batch_outputs.find_previous_append(system, name, self.context.writer, self.number)
        if sent is None:
            self.send(operator, frame, stream, key=key, partitions=partitions)
            return
        batch_outputs.check_letters_sent(system, name, sent, self.letters_of(frame), operator)
        self._count(stream, {"rows": sent.rows, "duplicate_batches": 1})

    def _count(self, name: str, counters: Mapping[str, int]) -> None:
        """Add to the counters of an output or an operator."""
        self._counters = add_counters(self._counters, {name: dict(counters)})

    # -- remote tables

    def _measure(self, table: str, metrics: TableMetrics, counters: Mapping[str, int]) -> None:
        self._measured[table] = self._measured.get(table, TableMetrics()) + metrics
        self._count(table, counters)

    def write(self, operator: str, frame: DataFrame, send: TableSend) -> None:
        """Write records to a declared remote table, few of them in one task; a replay writes
        nothing to a table with on_replay="skip".
        """
        self._before_output(send.table)
        table = self.app.tables[send.table]
        if self.inputs.consumed is None and table.on_replay == "skip":
            # The table has these records, or will get them from the main position. If the replay
            # left marks, what the main position writes could look old.
            self._letters[operator] = (send.table, ())
            self._count(send.table, {"skipped": self.count(frame)})
            return
        columns, one_source = self.names(frame), self._sources(operator) is not None
        marking = batch_outputs.build_marking(
            table,
            columns,
            self.stream_of(operator),
            self.inputs,
            self.writers[operator],
            made_of_one=one_source,
        )
        table_of_run = self._with_credits(table)
        if self.context.fence is not None:
            missing = send.table not in self.context.begun_tables
            table_of_run = table_of_run.with_fence(self.context.fence, may_create=missing)
        write = TableWrite(
            table_of_run,
            send.contract,
            send.on_null_key,
            self.partitions_at(operator),
            " and ".join(self.origins[operator].streams.values()),
            marking,
            send.update is not None,
            () if send.update is None else send.update.remove,
            send.args,
            send.dead_letters,
            sensitive=bool(self.sensitive(operator)),
        )
        written = self._send_rows(operator, frame, write)
        self._letters[operator] = (send.table, written.letters)
        self.context.open_tables.forget(send.table)
        self._measure(send.table, written.metrics, written.counters)

    def _with_credits(self, table: AnyTable) -> AnyTable:
        """Return the table as this session's tasks may use it: within the part of its rate that
        the run has.
        """
        credits = self.context.credits
        return table if credits is None else credits.with_credits(table, self.spark)

    def _send_rows(self, operator: str, frame: DataFrame, write: TableWrite) -> WriteResult:
        exchange = operator in self.exchanges and not self.inputs.few
        return write_table(self.gather_small(frame), write, exchange=exchange, what=operator)

    def refused_records(self, operator: str) -> DataFrame:
        """Return the records that the table of the operator before this one rejected
        (DEAD_LETTER_COLUMNS).
        """
        (before,) = self.app.operator(operator).inputs
        return small_frame(
            self.spark, batch_outputs.table_of_letters(*self._letters.get(before, ("", ())))
        )

    def letters_of(self, frame: DataFrame) -> batch_outputs.Letters:
        """Return dead letters as dictionaries."""
        return [row.asDict() for row in frame.collect()]

    def look_up(self, operator: str, frame: DataFrame, lookup: TableLookup) -> DataFrame:
        """Return records, computed once, with the columns looked up in a remote table; `__matched`
        as in `count_matches`.
        """
        frame = self.materialize(operator, frame)
        asked = lookups.describe_lookup(lookup, dict(frame.dtypes))
        record = recorded_answers.RecordedAnswers(
            self.context.lake, self.app.name, self.number, operator, asked
        )
        reader = self.context.open_tables.reader(
            self._with_credits(self.app.tables[lookup.table]), self.context.spark
        )
        keys = lookups.collect_distinct_keys(
            operator, frame, lookup, sensitive=bool(self.sensitive(operator))
        )
        answers, metrics = lookups.answer_keys(
            keys, lookup, record, reader, self.partitions_at(operator)
        )
        self._measure(lookup.table, metrics, metrics.counts())
        answered = lookups.frame_from_answers(self.spark, answers, lookup)
        joined = lookups.join_answers(operator, frame, lookup, answered)
        return self.count_matches(operator, "", joined)

    # -- functions

    def call_sink(self, operator: str, frame: DataFrame, function: SinkFunction) -> None:
        """Call a user's function with the records, in Spark tasks; errors omit values of
        sensitive columns.
        """
        self._before_output(function_label(function))
        self._count(
            operator,
            recorded_answers.call_function(frame, self._sink_call(operator, function, None)),
        )

    def call_sink_for_results(
        self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema
    ) -> DataFrame:
        """Return the results of a user's function for the records, partitioned like these; a
        repeated batch reuses the recorded results.
        """
        label = function_label(function)
        asked = {"function": label, "returns": {field.name: field.type for field in returns.fields}}
        call = self._sink_call(operator, function, returns)
        record = recorded_answers.RecordedAnswers(
            self.context.lake, self.app.name, self.number, operator, asked
        )
        before_call = partial(self._before_output, label)
        results, counted = recorded_answers.call_unless_recorded(frame, call, record, before_call)
        self._count(operator, counted)
        partitions = self.partitions_at(operator) if self.required_partitioning(operator) else None
        return recorded_answers.frame_from_results(self.spark, results, partitions)

    def _sink_call(
        self, operator: str, function: SinkFunction, returns: Schema | None
    ) -> recorded_answers.SinkCall:
        label, shipped, cut = (
            function_label(function),
            pickle_function(operator, function),
            self.inputs.intent.cut,
        )
        stream, sensitive = self.stream_of(operator), self.sensitive(operator)
        application, number, fence = self.app.name, self.number, self.context.fence
        return recorded_answers.SinkCall(
            operator, label, shipped, application, number, returns, stream, sensitive, cut, fence
        )


def _to_time(micros: int | None) -> datetime | None:
    return None if micros is None else datetime_from_micros(micros)


def _add_barrier(frame: DataFrame) -> DataFrame:
    """Return the same records with a metric that nobody reads: Spark's optimizer moves nothing
    past it.
    """
    return frame.observe(f"here-{uuid4().hex}", F.count(F.lit(1)))
