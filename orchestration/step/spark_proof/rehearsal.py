"""Asks Spark what a batch will do, over no records at all, before it is begun: columns of outputs, joins, exchanges."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.inputs_besides_streams import OwnedBy
from dagster_adjunct.assets.unbounded.state_table import check_state, state_dataset
from dagster_adjunct.orchestration.operators.columns.hidden_columns import UNSENT, tie_breakers
from dagster_adjunct.orchestration.operators.functions.shipped_function import shipped_function
from dagster_adjunct.orchestration.operators.sends.refused_table_sends import CheckedSink, check_columns
from dagster_adjunct.orchestration.operators.spec.table_lookups import check_stored, read_function
from dagster_adjunct.orchestration.planner.known_records.fed_columns import check_fed
from dagster_adjunct.orchestration.step.answers.function_sinks import SinkCall, made_by
from dagster_adjunct.orchestration.step.answers.table_answers import with_unknown
from dagster_adjunct.orchestration.step.batch_compiler.compile_batch import compiled
from dagster_adjunct.orchestration.step.batch_compiler.compiling_batch import CompilingBatch
from dagster_adjunct.orchestration.step.batch_compiler.known_batch import known_batch
from dagster_adjunct.orchestration.step.batch_records.local_sends import kept_rows
from dagster_adjunct.orchestration.step.batch_records.sent_records import sent_schema
from dagster_adjunct.orchestration.step.context.batch_inputs import BatchInputs
from dagster_adjunct.orchestration.step.spark_proof.physical_proof import Proof, check_written
from dagster_adjunct.orchestration.step.spark_proof.spark_plan import marked, plan_of
from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout
from dagster_adjunct.resources.bucketing.bucketed_tables import GENERATION, bucketed_frame
from dagster_adjunct.resources.errors import OperatorFailedError, PermanentError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange
from dagster_adjunct.resources.tables.arrow_operations import DEFAULT, UPDATE
from dagster_adjunct.resources.tables.own_loop import run_to_end
from dagster_adjunct.resources.tables.spark_write import check_record_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.assets.unbounded.state_spec import StateSpec
    from dagster_adjunct.assets.unbounded.transient_version import TransientVersion
    from dagster_adjunct.orchestration.operators.arguments import DataFrameFunction, OnNullKey
    from dagster_adjunct.orchestration.operators.spec.compiling import StateHandle
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
    from dagster_adjunct.orchestration.operators.spec.sink_context import SinkFunction
    from dagster_adjunct.orchestration.operators.spec.table_lookups import TableLookup
    from dagster_adjunct.orchestration.operators.spec.table_sends import TableSend
    from dagster_adjunct.orchestration.step.batch_compiler.known_batch import KnownBatch
    from dagster_adjunct.orchestration.step.context.step_context import StepContext
    from dagster_adjunct.orchestration.step.spark_proof.physical_proof import PhysicalProof
    from dagster_adjunct.orchestration.step.spark_proof.spark_plan import SparkPlan
    from dagster_adjunct.resources.schemas.schema import Schema
    from dagster_adjunct.resources.streams.interface.stream_system import AppendResult
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition
    from dagster_adjunct.resources.tables.table_functions import TableFunction

_log = logging.getLogger("adjunct.step")


def rehearse(
    context: StepContext,
    views: Mapping[str, VersionReader | TransientVersion | None],
    starts: Mapping[SystemStreamPartition, str] | None = None,
    on_state: Callable[[AdjunctDataset], object] = lambda dataset: None,
) -> PhysicalProof:
    """Return what Spark is going to do with a batch over these dataset versions; nothing is read, and no job is run.

    Raises what creating an output stream would raise for the columns that it gets, and PlanningError for what Spark
    refuses. Functions of the application are called with a frame of no records, as a batch may be: one that fails over
    that is refused. `starts` are offsets that are there, of input streams; they are asked for where they are left out.
    `on_state` is told of each table of state that a batch writes.
    """
    ranges = {ssp: OffsetRange(start, start) for ssp, start in (starts or {}).items()}
    rehearsal = Rehearsal(known_batch(context, BatchInputs(0, ranges, views)))
    rehearsal.run()
    for dataset in rehearsal.states:
        on_state(dataset)
    return rehearsal.proof.result()


class Rehearsal(CompilingBatch):
    """A batch without records, which writes nothing and runs no Spark job."""

    def __init__(self, known: KnownBatch) -> None:
        super().__init__(known, lambda name: None)
        self.proof = Proof(known.context.plan)
        for operator in known.app.operators:
            self.proof.allow(operator.id, operator.spec.moves)
        self.states: list[AdjunctDataset] = []
        self._datasets: dict[str, str] = {}
        self._looked_at: dict[str, dict[str, str] | None] = {}

    def run(self) -> None:
        """Compile all operators whose records are written, and look at what Spark makes of each output."""
        frames: dict[str, DataFrame] = {}
        try:
            for operator in self.known.operators:
                compiled_frame = self._named(operator, [frames[source] for source in operator.inputs])
                frames[operator.id] = self._handed_on(operator, compiled_frame)
        finally:
            self.close()

    def _handed_on(self, operator: Operator, frame: DataFrame) -> DataFrame:
        """Return the records as the next operators meet them, cut off from what was looked at already."""
        spec = operator.spec
        if spec.reads is not None or not self.goes_on(operator.id):
            return frame
        if spec.role == "output" and spec.writes is not None and self.system_of(spec.writes).appends_alone:
            # They are read from the output, in whose partitions they lie.
            by = map(column, self.lying_by(operator.id))
            stored = frame.drop(*tie_breakers(frame), *UNSENT).repartition(self.partitions_at(operator.id), *by)
            return self._cut(operator.id, stored)
        frame = marked(operator.id, frame)
        return self.computed_once(operator.id, frame) if self.known.several_take(operator) else frame

    def _cut(self, operator: str, frame: DataFrame) -> DataFrame:
        """Return the same records, which Spark plans no more as part of others: kept, if anybody computed them."""
        return super().computed_once(operator, frame)

    def _look(self, operator: str, frame: DataFrame) -> SparkPlan:
        planned = plan_of(operator, frame, self._datasets)
        self.proof.add(planned, self._datasets)
        return planned

    def _written_as_they_lie(self, operator: str, frame: DataFrame) -> None:
        planned = self._look(operator, frame)
        (source,) = self.app.operator(operator).inputs
        lay = self.known.planned[source]
        if operator not in self.known.exchanges and lay.partitioned_by:
            note = check_written(operator, lay, planned)
            if note is not None:
                self.proof.note(note)

    def _named(self, operator: Operator, sources: Sequence[DataFrame]) -> DataFrame:
        """Return the operator's records; what is refused of them is told with its name."""
        try:
            return compiled(self, operator, sources)
        except PermanentError as error:
            if getattr(error, "operator", None) is not None:
                raise
            about = {"operator": operator.id} if hasattr(error, "operator") else {}
            raise error.reworded(f"{operator.id}: {error.problem}", error.next_step, **about) from error

    def call(self, operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
        try:
            return super().call(operator, function, frame)
        except OperatorFailedError as error:
            raise error.reworded(
                f"{error.problem} It was called with no records, before the batch is begun.",
                "Mend it, so that it gives its columns for no records, too: a batch may have none for it, as where "
                "another stream is replayed.",
            ) from error.__cause__

    def _no_entries(self, dataset: AdjunctDataset, schema: Schema) -> DataFrame:
        if dataset.partitions is None or not set(dataset.partition_by) <= set(schema.names):
            return super()._no_entries(dataset, schema)
        layout = BucketLayout(schema, dataset.partition_by, dataset.partitions, dataset.key)
        store = self.known.context.lake.store
        return bucketed_frame(self.known.spark, store, dataset.name, layout, []).drop(GENERATION)

    def matched(self, operator: str, dataset: str, frame: DataFrame) -> DataFrame:
        self._datasets[operator] = dataset
        return frame

    def first(self, frame: DataFrame) -> None:
        return None

    def looked_up(self, operator: str, frame: DataFrame, lookup: TableLookup) -> DataFrame:
        """Compare what is taken of the table's records with its columns, as its store has them; nothing is read."""
        table = self.app.tables[lookup.table]
        check_stored(operator, table, lookup, self._stored(lookup.table, read_function(table)))
        return with_unknown(self.computed_once(operator, frame), lookup)

    def computed_once(self, operator: str, frame: DataFrame) -> DataFrame:
        self._look(operator, frame)
        return self._cut(operator, frame)

    def send(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> AppendResult | None:
        system, name = self.system_of(stream), split_stream_name(stream)[1]
        sent = sent_schema(frame)
        system.check_create(name, schema=sent, key=key, partitions=partitions)
        if system.evolves and any(dataset.stream == stream for dataset in self.app.datasets):
            stored = system.info(name).schema
            if stored is not None:
                check_fed(self.app, operator, stream, stored, sent)
        if key:
            self._written_as_they_lie(operator, frame)
        else:
            self._look(operator, frame)
        return None

    def entries(self, dataset: str) -> tuple[DataFrame, Schema]:
        declared = self.app.dataset(dataset)
        if isinstance(declared.input, OwnedBy):
            return self._no_entries(declared, declared.input.schema), declared.input.schema
        return super().entries(dataset)

    def keep(self, operator: str, frame: DataFrame, table: str, *, deleted: str | None, on_null_key: OnNullKey) -> None:
        self._written_as_they_lie(operator, frame)
        kept_rows(frame, self.app.dataset(table).key, deleted, on_null_key)

    def state(self, name: str, spec: StateSpec, *, of: str | None = None) -> StateHandle:
        self.states.append(state_dataset(self.known.context.writer, name, spec))
        check_state(self.known.context.lake, self.states[-1])
        return super().state(name, spec, of=of)

    def write(self, operator: str, frame: DataFrame, send: TableSend) -> None:
        """Compare what Spark makes of the records with the table's columns, as its store has them."""
        table = self.app.tables[send.table]
        check_record_columns(frame.columns, table.name, table.key, updates=send.contract is not None, what=operator)
        sink = CheckedSink(table, send)
        check_columns(operator, sink, _types(frame), self._stored_types(sink))
        self._written_as_they_lie(operator, frame)

    def _stored_types(self, sink: CheckedSink) -> dict[str, str] | None:
        return sink.columns or self._stored(sink.table.name, sink.function)

    def _stored(self, table: str, function: TableFunction | None) -> dict[str, str] | None:
        if function is None or not hasattr(function, "stored_types"):
            return None
        if table not in self._looked_at:
            try:
                self._looked_at[table] = run_to_end(_asked(function))
            except PermanentError:
                raise
            except Exception as error:  # noqa: BLE001 - the table's own retries are for the batch, which tells what is wrong
                _log.info("Table %s can't be asked for its columns now: %s", table, error)
                self._looked_at[table] = None
        return self._looked_at[table]

    def hand_to(self, operator: str, frame: DataFrame, function: SinkFunction) -> None:
        shipped_function(operator, function)
        self._look(operator, frame)

    def results_of(self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema) -> DataFrame:
        self._look(operator, frame)
        made = made_by(frame, SinkCall(operator, function, self.app.name, self.number, returns))
        by = self.lying_by(operator)
        if by:
            made = made.repartition(self.partitions_at(operator), *map(column, by))
        return self._cut(operator, made)

    def send_letters(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        name = split_stream_name(stream)[1]
        self.system_of(stream).check_create(name, schema=sent_schema(frame), key=key, partitions=partitions)


async def _asked(function: TableFunction) -> dict[str, str] | None:
    try:
        return await function.stored_types()
    finally:
        await function.close()


def _types(frame: DataFrame) -> dict[str, str | None]:
    """Return the types of the records' columns, and of those in the structs of an update, by "update.name"."""
    from pyspark.sql.types import StructType

    types: dict[str, str | None] = {}
    for field in frame.schema.fields:
        if field.name.startswith("__"):
            continue
        types[field.name] = field.dataType.simpleString()
        if field.name in (UPDATE, DEFAULT) and isinstance(inside := field.dataType, StructType):
            for part in inside.fields:  # of a short update: what is set, added and appended
                columns = part.dataType.fields if isinstance(part.dataType, StructType) else [part]
                types |= {f"{field.name}.{one.name}": one.dataType.simpleString() for one in columns}
    return types
