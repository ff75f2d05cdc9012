"""Compiles a batch without records: it checks what outputs accept, and writes nothing.

With Spark, it also compares the physical plans with the application's plan. Jobs run only to
compare rules of time zones.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, LocalTable, UnboundedDataset
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.sources.entries import (
    derive_row_schema,
    derive_stored_schema,
    entries_from_frame,
)
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.written_tables import check_not_lost
from dagster_adjunct.orchestration.batch_log.intent import Intent, Offsets
from dagster_adjunct.orchestration.operators.batch import Frame
from dagster_adjunct.orchestration.operators.calls import SinkFunction
from dagster_adjunct.orchestration.operators.columns import list_batch_columns, tie_breakers
from dagster_adjunct.orchestration.operators.lookup_join import check_stored_columns
from dagster_adjunct.orchestration.operators.lookups import TableLookup
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.orchestration.operators.stream_facts import declared_changes
from dagster_adjunct.orchestration.operators.table_sinks import TableSink, check_sink_columns
from dagster_adjunct.orchestration.operators.updates import LocalSend, TableSend
from dagster_adjunct.orchestration.planner.columns import check_fed_datasets, iterate_dataset_sql
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.step.batch import (
    SparkCompiler,
    SparkOpened,
    SparkParts,
    run_operators,
)
from dagster_adjunct.orchestration.step.batch_outputs import Frames, table_of_letters
from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext, View
from dagster_adjunct.orchestration.step.physical_plan import (
    PhysicalProof,
    PlanInspector,
    mark_operator,
)
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch
from dagster_adjunct.orchestration.step.recorded_answers import plan_results
from dagster_adjunct.orchestration.step.sent_rows import SentRows
from dagster_adjunct.orchestration.step.spark_datasets import SparkDatasets
from dagster_adjunct.orchestration.step.spark_frames import SparkFrames
from dagster_adjunct.orchestration.step.spark_sinks import sink_call
from dagster_adjunct.orchestration.step.spark_state import (
    SparkState,
    WrittenLocalTables,
    prepare_table_rows,
)
from dagster_adjunct.resources.errors import OperatorFailedError, PermanentError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.output_tables.opening import open_output
from dagster_adjunct.resources.schemas.column_changes import evolve
from dagster_adjunct.resources.schemas.schema import AS_NAMED, Schema, value_column
from dagster_adjunct.resources.sql.expression import parse_expression
from dagster_adjunct.resources.streams.system import (
    RECORD_META,
    RECORD_META_DDL,
    OffsetRange,
    require_writer,
)
from dagster_adjunct.resources.tables.functions import TableFunction
from dagster_adjunct.resources.tables.spark import check_record_columns
from dagster_adjunct.resources.threads import run_blocking

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("adjunct.step")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


_Frame_contra = TypeVar("_Frame_contra", contravariant=True)


class Inspect(Protocol[_Frame_contra]):
    """Looks at the records that an operator would write; called with `placed` if they have to be in
    the output's partitions.
    """

    def __call__(self, operator: str, frame: _Frame_contra, *, placed: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class StoredColumns:
    """The columns of remote tables as their stores report them, each read once. `known` has, by
    table, {column: type}, or None if its store does not report them.
    """

    known: dict[str, dict[str, str] | None] = field(default_factory=dict)

    def read(self, table: str, function: TableFunction | None) -> dict[str, str] | None:
        """Return {column: type} as the store of a table reports it; None if it does not, or can't
        be asked now.
        """
        if function is None or not hasattr(function, "stored_types"):
            return None
        if table not in self.known:
            try:
                self.known[table] = run_blocking(_read_stored_types(function))
            except PermanentError:
                raise
            except Exception as error:  # noqa: BLE001 - the batch retries, and reports it
                _log.info("Can't read the columns of table %s now: %s", table, error)
                self.known[table] = None
        return self.known[table]


async def _read_stored_types(function: TableFunction) -> dict[str, str] | None:
    """Return the types of a table's columns as its store reports them; None if it does not."""
    try:
        return await function.stored_types()
    finally:
        await function.close()


@dataclass(frozen=True, slots=True)
class CheckedLookups(Generic[Frame]):
    """Compares the columns that are looked up with those in the tables' stores: `Tables` of
    operators.
    """

    planned: PlannedBatch
    frames: Frames[Frame]
    stored: StoredColumns

    def look_up(self, operator: str, frame: Frame, lookup: TableLookup) -> Frame:
        """Return the records with the columns of the lookup, whose values are unknown. Raises
        PlanningError for a column that the table's store does not have.
        """
        table = self.planned.app.tables[lookup.table]
        stored = self.stored.read(lookup.table, table.read_function)
        check_stored_columns(operator, table, lookup, stored)
        return self.frames.add_unknown_answers(operator, frame, lookup)


@dataclass(frozen=True, slots=True)
class CheckedOutputs(Generic[Frame]):
    """Checks that output streams and remote tables accept the columns of the records: `Outputs` of
    operators.
    """

    planned: PlannedBatch
    frames: Frames[Frame]
    stored: StoredColumns
    inspect: Inspect[Frame]

    def send(
        self, operator: str, frame: Frame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        """Check that a stream, and the datasets made from it, accept the columns of the records."""
        app = self.planned.app
        system = require_writer(self.planned.system_of(stream))
        name = split_stream_name(stream)[1]
        sent = self.frames.schema(frame)
        changes = declared_changes(app, stream)
        check = partial(system.check_create, name, schema=sent, key=key, partitions=partitions)
        if changes and system.capabilities.evolves:
            check = partial(check, changes=changes)
        check()
        feeds_dataset = any(dataset.stream == stream for dataset in app.datasets)
        if feeds_dataset and system.capabilities.evolves:
            stored = system.info(name).schema
            if stored is not None:
                changed = evolve(stored, AS_NAMED, sent, changes)
                check_fed_datasets(app, operator, stream, stored, changed)
        self.inspect(operator, frame, placed=bool(key))

    def read_sent(self, operator: str, frame: Frame, stream: str) -> Frame:
        """Return the same records: nothing was written."""
        return frame

    def commit(self, operator: str, frame: Frame, table: str) -> None:
        """Check that an output table is the one that was written, if any was, and accepts the
        columns of the records; log how it will change.
        """
        sent = SentRows.of(self.planned, operator, table)
        output = open_output(self.planned.app.output_tables[table].table)
        columns = sent.columns(self.frames.schema(frame))
        context = self.planned.context
        check_not_lost(context.lake, output, context.writer)
        for change in output.check(columns, context.writer):
            _log.info("%s: output table %s: %s", operator, table, change)
        self.inspect(operator, frame, placed=False)

    def write(self, operator: str, frame: Frame, send: TableSend, *, sensitive: bool) -> None:
        """Check that a remote table accepts the columns of the records, and inspect the plan, whose
        records have to be in the table's partitions.
        """
        table = self.planned.app.tables[send.table]
        updates = send.contract is not None
        names = self.frames.names(frame)
        check_record_columns(names, table, updates=updates, what=operator)
        sink = TableSink(table, send)
        columns = sink.columns or self.stored.read(table.name, sink.function)
        check_sink_columns(operator, sink, self.frames.sent_types(frame), columns)
        self.inspect(operator, frame, placed=True)

    def refused_records(self, operator: str) -> Frame:
        """Return no records: nothing was written that a table could reject."""
        return self.frames.of_table(table_of_letters("", ()))

    def send_dead_letters(
        self, operator: str, frame: Frame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        """Check that a stream accepts dead letters."""
        system = require_writer(self.planned.system_of(stream))
        name = split_stream_name(stream)[1]
        schema = self.frames.schema(frame)
        system.check_create(name, schema=schema, key=key, partitions=partitions)


@dataclass(frozen=True, slots=True)
class CheckedLocalTables:
    """Compiles what would be written to local tables: `LocalTables` of operators."""

    planned: PlannedBatch
    inspect: Inspect[DataFrame]

    def write(self, operator: str, frame: DataFrame, send: LocalSend) -> None:
        """Compile what would be written to a local table."""
        self.inspect(operator, frame, placed=True)
        key = self.planned.app.dataset(send.table).key_sources
        prepare_table_rows(frame, key, send.deleted, send.on_null_key)


@dataclass(frozen=True, slots=True)
class CheckedSinks:
    """Compiles the calls of users' functions, which it pickles: `Sinks` of operators."""

    planned: PlannedBatch
    frames: SparkFrames
    inspect: Inspect[DataFrame]

    def call(self, operator: str, frame: DataFrame, function: SinkFunction) -> None:
        """Pickle a function, and inspect the records that it would get."""
        sink_call(self.planned, operator, function, None, frame.columns)
        self.inspect(operator, frame, placed=False)

    def call_for_results(
        self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema
    ) -> DataFrame:
        """Return a function's results as they would be partitioned; the function is called only if
        they are computed.
        """
        self.inspect(operator, frame, placed=False)
        call = sink_call(self.planned, operator, function, returns, frame.columns)
        made = plan_results(frame, call)
        by = self.planned.required_partitioning(operator)
        if by:
            columns = [value_column(made.columns, name) for name in by]
            made = made.repartition(self.planned.partitions_at(operator), *columns)
        return self.frames.kept.keep(made)


def analyze_batch(context: StepContext, views: Mapping[str, View]) -> PhysicalProof:
    """Return what Spark would do with a batch over these dataset versions; no record is read."""
    return compare_plans(context, inputs_of_dry_run(context, views, {}))


def inputs_of_dry_run(
    context: StepContext, views: Mapping[str, View], starts: Offsets
) -> BatchInputs:
    """Return the inputs of a batch that reads nothing: it is number 0.

    `starts` are existing offsets of the input streams; they are looked up where left out.
    """
    ranges = {ssp: OffsetRange(start, start) for ssp, start in starts.items()}
    return BatchInputs(Intent(batch=0, run=context.run, clock=_EPOCH, ranges=ranges), views)


def compare_plans(context: StepContext, inputs: BatchInputs) -> PhysicalProof:
    """Compile a batch that reads nothing; return how Spark's plans differ from the plan."""
    planned = PlannedBatch.of(context, inputs)
    inspector = PlanInspector(planned)
    with ExitStack() as opened:
        spark = SparkOpened.of(planned, opened)
        frames = SparkFrames(planned, spark.times, spark.kept, inspector.inspect_kept)
        stored = StoredColumns()
        local_tables = WrittenLocalTables(planned, spark.writers)
        parts = SparkParts(
            planned,
            records=frames,
            datasets=SparkDatasets(planned, local_tables),
            tables=CheckedLookups(planned, frames, stored),
            outputs=CheckedOutputs(planned, frames, stored, inspector.inspect),
            local_tables=CheckedLocalTables(planned, inspector.inspect),
            sinks=CheckedSinks(planned, frames, inspector.inspect),
            state=SparkState(planned, spark.times, spark.writers),
        )
        compiler = DryCompiler(SparkCompiler(parts, spark.times))
        run_operators(planned, compiler.hand_on)
        return inspector.proof(table.declared for table in parts.state.tables.values())


@dataclass(frozen=True, slots=True)
class DryCompiler:
    """Compiles the operators of a dry run: records are marked with the operator that they leave."""

    compiler: SparkCompiler

    def hand_on(self, operator: Operator, sources: Sequence[DataFrame]) -> DataFrame:
        """Return the records that leave an operator as the next ones get them. They are marked with
        the operator, unless the next operators read them from a stream or there are none.

        Records that a batch reads back from an output are cached, and so are those of an input that
        Spark reads with an exchange. Then Spark's plan for the next operators starts at the cached
        records.
        """
        planned = self.compiler.batch.planned
        frames = self.compiler.batch.records
        frame = self._compile(operator, sources)
        if not planned.has_consumers(operator.id):
            return frame
        if operator.spec.reads is not None:
            system = planned.system_of(operator.spec.reads)
            if system.capabilities.exchanges_reads:
                return frames.kept.keep(frame)
            return frame
        if _is_read_back(planned, operator):
            # The next operators read them from the output, partitioned as it is.
            unstored = (*tie_breakers(frame.columns), *list_batch_columns(frame.columns))
            stored = frame.drop(*unstored)
            required = planned.required_partitioning(operator.id)
            by = [value_column(stored.columns, name) for name in required]
            return frames.kept.keep(stored.repartition(planned.partitions_at(operator.id), *by))
        marked = mark_operator(operator.id, frame)
        if planned.is_shared(operator):
            return frames.materialize(operator.id, marked)
        return marked

    def _compile(self, operator: Operator, sources: Sequence[DataFrame]) -> DataFrame:
        """Return the records that leave an operator; errors name it."""
        try:
            return self.compiler.compile(operator, sources)
        except OperatorFailedError as error:
            raise error.reworded(
                f"{error.problem} It was called with no records, in the dry run before the batch.",
                "Return the same columns for no records, too: a batch may have none for it, as when"
                " another stream is replayed.",
            ) from error.__cause__
        except PermanentError as error:
            if getattr(error, "operator", None) is not None:  # it names one already
                raise
            about = {"operator": operator.id} if hasattr(error, "operator") else {}
            raise error.reworded(
                f"{operator.id}: {error.problem}", error.next_step, **about
            ) from error


def _is_read_back(planned: PlannedBatch, operator: Operator) -> bool:
    """Whether the records that leave an operator are read from the stream that it writes."""
    spec = operator.spec
    if spec.role != "output" or spec.writes is None:
        return False
    return planned.system_of(spec.writes).capabilities.appends_alone


def verify_plan(runtime: Runtime, app: Application, plan: ExecutionPlan) -> PhysicalProof:
    """Return what Spark would do with a batch of this application over the served dataset versions.

    A dataset without a version is treated as an empty one with its declared buckets. Raises the
    errors that a run raises before its first batch for mistakes in expressions and functions.
    """
    views: dict[str, VersionReader | None] = {}
    lake_exists = runtime.lake.exists()
    for dataset in app.datasets:
        views[dataset.name] = None
        is_stored = dataset.persistent and not isinstance(dataset, LocalTable)
        if lake_exists and is_stored:
            views[dataset.name] = StoredVersions(runtime.lake, dataset, named_now=True).current()
    _analyze_projections(runtime, app)
    return analyze_batch(StepContext(runtime, app, plan, FanOut()), views)


def _analyze_projections(runtime: Runtime, app: Application) -> None:
    """Let Spark analyze the projections of datasets, over no records; raises PlanningError for what
    it rejects.

    A projection of hidden columns that not all stream systems have is left to the run that advances
    the dataset.
    """
    for dataset in app.datasets:
        if not isinstance(dataset.extractor, Projection) or not isinstance(dataset.input, str):
            continue
        system, stream = split_stream_name(dataset.input)
        records = runtime.systems[system].info(stream).schema
        if records is None or not _hidden_columns(dataset) <= {*RECORD_META}:
            continue
        if isinstance(dataset, UnboundedDataset):
            rows = derive_row_schema(dataset, records)
        else:
            rows = records
        frame = runtime.spark().createDataFrame([], f"{rows.ddl()}, {RECORD_META_DDL}")
        entries_from_frame(dataset, frame, derive_stored_schema(dataset, records))


def _hidden_columns(dataset: AdjunctDataset) -> set[str]:
    """Return the hidden columns that the expressions of a dataset read."""
    hidden = set()
    for sql in iterate_dataset_sql(dataset):
        if sql.is_query:
            continue
        for column in parse_expression(sql.text).columns:
            if column.name.startswith("__"):
                hidden.add(column.name)
    return hidden
