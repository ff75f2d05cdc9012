"""Compiles a planned application to DataFrames for one batch, and runs its outputs in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dagster_adjunct.assets.sources.decode_changes import stored_schema
from dagster_adjunct.orchestration.operators.arguments import called
from dagster_adjunct.orchestration.operators.columns.hidden_columns import UNSENT, tie_breakers
from dagster_adjunct.orchestration.planner.table_writers import writers_of
from dagster_adjunct.orchestration.step.answers import function_sinks
from dagster_adjunct.orchestration.step.answers.function_sinks import SinkCall
from dagster_adjunct.orchestration.step.answers.recorded_answers import RecordedAnswers
from dagster_adjunct.orchestration.step.answers.table_answers import (
    about,
    answered,
    as_frame,
    distinct_keys,
    with_answers,
)
from dagster_adjunct.orchestration.step.batch_compiler.join_counts import JoinCounts, as_it_is
from dagster_adjunct.orchestration.step.batch_compiler.over_time import OverTime
from dagster_adjunct.orchestration.step.batch_compiler.table_marks import (
    marking_of,
    producers_of,
    streams_of_positions,
    summed,
)
from dagster_adjunct.orchestration.step.batch_compiler.timed_rows import no_rows, read_over_time, timed_rows
from dagster_adjunct.orchestration.step.batch_compiler.user_functions import result_of
from dagster_adjunct.orchestration.step.batch_inputs import BatchInputs
from dagster_adjunct.orchestration.step.batch_records.local_sends import LocalSends
from dagster_adjunct.orchestration.step.batch_records.refused_records import as_records, check_all_there
from dagster_adjunct.orchestration.step.batch_records.sent_records import is_in, sent_schema, upstream_of_outputs
from dagster_adjunct.orchestration.step.failures.sensitive_columns import sensitive_columns, sensitive_entries
from dagster_adjunct.orchestration.step.failures.told_failure import told_failure
from dagster_adjunct.orchestration.step.record_times.record_positions import as_branch, origins, with_positions
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.interpreted_plans import interpreted_plans
from dagster_adjunct.resources.streams.interface.stream_system import AppendResult
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.tables.spark_write import TableWrite, write_table
from dagster_adjunct.resources.user_code import line_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.assets.unbounded.transient_version import TransientVersion
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.stored_times import TimeState
    from dagster_adjunct.orchestration.operators.arguments import DataFrameFunction, OnNullKey
    from dagster_adjunct.orchestration.operators.spec.compiling import TimedRows
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
    from dagster_adjunct.orchestration.operators.spec.sink_context import SinkFunction
    from dagster_adjunct.orchestration.operators.spec.table_lookups import TableLookup
    from dagster_adjunct.orchestration.operators.spec.table_sends import TableSend
    from dagster_adjunct.orchestration.operators.spec.versions_met import VersionsMet
    from dagster_adjunct.orchestration.planner import Exchange
    from dagster_adjunct.orchestration.step.step_context import StepContext
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem
    from dagster_adjunct.resources.streams.lake.source_ranges import Sources
    from dagster_adjunct.resources.tables import RemoteTable

Counters = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Counted:
    """What a batch has counted, by output or join, what its tables have measured, and how far its inputs have come."""

    counters: Counters
    measured: Mapping[str, TableMetrics]
    times: TimeState | None = None


def run_batch(context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> Counted:
    """Run every output of the application once, in the order of their definition; return what was counted.

    Outputs take (application, batch) as producer and sequence, so running a batch again adds nothing to
    streams. `before_output` is called with the output's name before anything is written to it.
    """
    with interpreted_plans(context.spark()) if inputs.interpreted else nullcontext():
        return CompiledBatch(context, inputs, before_output).run()


class CompiledBatch(OverTime):
    """One batch as its operators are compiled: what they read, where they send to, and what they count."""

    def __init__(self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> None:
        super().__init__(context, inputs)
        self._before_output = before_output
        self._spark: SparkSession = context.spark()
        self._frames: dict[str, DataFrame] = {}
        self._counters: Counters = {}
        self._measured: dict[str, TableMetrics] = {}
        self._joins: list[JoinCounts] = []
        self._kept: list[DataFrame] = []
        operators = context.app.operators
        self._uses = Counter(source for operator in operators for source in set(operator.inputs))
        self._origins = origins(operators)
        self._positions = streams_of_positions(operators, lambda stream: self.system_of(stream).appends_alone)
        self._letters: dict[str, tuple[str, tuple[dict[str, Any], ...]]] = {}
        self._local = LocalSends(context, inputs, self.stream_of)
        self._producers = producers_of(context.app)
        self._writers = writers_of(context.app)
        self._written = upstream_of_outputs(operators)
        self._planned = {planned.id: planned for planned in context.plan.operators}
        self._exchanges: dict[str, list[Exchange]] = {}
        for exchange in context.plan.exchanges:
            self._exchanges.setdefault(exchange.operator, []).append(exchange)

    def run(self) -> Counted:
        """Compile and run the operators whose records are written, and return what was counted."""
        try:
            for operator in self._context.app.operators:
                if operator.id not in self._written:
                    continue
                frame = self._analysed(operator)
                if self._uses[operator.id] > 1 and operator.spec.reads is None and operator.spec.writes is None:
                    # Several operators read these records: compute them once.
                    frame = self.computed_once(operator.id, frame)
                self._frames[operator.id] = frame
            self._counters |= self._local.commit(self._before_output)
            self._counters |= self._states.commit(self._before_output)
            for join in self._joins:
                self._counters[join.name] = join.result()
            self._counters |= self._left_out.counts()
            return Counted(self._counters, self._measured, self._times.after())
        finally:
            self._local.close()
            self._states.close()
            self._times.close()
            for frame in self._kept:
                frame.unpersist()

    def _analysed(self, operator: Operator) -> DataFrame:
        """Return the operator's records; what Spark says of its expressions is told with its name, not with a plan."""
        from pyspark.errors import AnalysisException

        try:
            leaving = operator.spec.compile(operator.id, self.arriving(operator), self)
            return self._frames[operator.inputs[0]] if operator.spec.writes_aside and self._moves(operator) else leaving
        except AnalysisException as error:
            problem = str(error).strip().partition("SQLSTATE")[0].strip().splitlines()[0].rstrip(" .")
            place = line_of(error) or operator.declared_at
            raise PlanningError(
                f"{operator.id}: {problem}{f' ({place.words()})' if place else ''}.",
                "Correct the expression, or the function; adjunct plan shows the operators by these names.",
                operator=operator.id,
            ) from error
        except Exception as error:
            told = told_failure(self, operator.id, error)
            if told is None:
                raise
            raise told  # noqa: B904 - it says itself what may be told of its cause

    def arriving(self, operator: Operator) -> list[DataFrame]:
        """Return the records of each input, where the planner's auto_repartition has them before this operator."""
        frames = [self._frames[source] for source in operator.inputs]
        for exchange in self._moves(operator):
            number, by = exchange.input, map(column, exchange.partitioned_by)
            if operator.spec.writes_aside and self.goes_on(operator.id):  # only what is written moves
                source = operator.inputs[number]
                self._frames[source] = frames[number] = self.computed_once(operator.id, frames[number])
            frames[number] = self.together(frames[number]).repartition(exchange.partitions, *by)
        frames = [self._times.arriving(operator, frame) for frame in frames]
        if len(frames) < 2:
            return frames
        one_stream = len(self._origins[operator.id].streams) == 1
        return [
            as_branch(frame, number, one_stream=one_stream, stream=self._positions[source] or "")
            for number, (source, frame) in enumerate(zip(operator.inputs, frames, strict=True))
        ]

    def _moves(self, operator: Operator) -> list[Exchange]:
        return [move for move in self._exchanges.get(operator.id, ()) if move.reason == "auto_repartition"]

    # -- what operators ask for (operators/spec/compiling.py)

    @property
    def app(self) -> Application:
        return self._context.app

    @property
    def tasks(self) -> int:
        return self._inputs.tasks or len(self._context.plan.tasks)

    @property
    def reading(self) -> VersionsMet:
        return self._inputs.reading

    def stream_of(self, operator: str) -> str | None:
        """Return the stream that the positions of the records after an operator are in; None for several."""
        return self._positions[operator]

    def sensitive(self, operator: str) -> frozenset[str]:
        match = self.app.operator(operator).spec.match
        dataset = None if match is None else match.dataset
        names = frozenset() if dataset is None else sensitive_entries(self._context, dataset)
        for source in self.app.operator(operator).inputs:
            own = [name for name in self._frames[source].columns if not name.startswith("__")]
            names |= sensitive_columns(self._context, source, own)
        return names

    def partitions_at(self, operator: str) -> int:
        return self._planned[operator].partitions

    def lying_by(self, operator: str) -> tuple[str, ...]:
        return self._planned[operator].partitioned_by

    def goes_on(self, operator: str) -> bool:
        return bool(self._uses[operator])

    def system_of(self, stream: str) -> StreamSystem:
        return self._context.systems[split_stream_name(stream)[0]]

    def read(self, stream: str) -> DataFrame:
        return self._times.read(stream)

    def call(self, operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
        # Spark asks a filter behind it below it, too, and would call what is in it twice for a record.
        return as_it_is(result_of(operator, function, frame))

    def entries(self, dataset: str) -> tuple[DataFrame, Schema]:
        if self.app.dataset(dataset).is_owned_by(self.app.name):
            reader = self._local.reader(dataset)
            return self._entries(dataset, reader, reader.schema), reader.schema
        view = self._inputs.views[dataset]
        # Held back by nothing and not built yet: an empty dataset of the columns that it will have.
        schema = self._declared_schema(self.app.dataset(dataset)) if view is None else view.schema
        return self._entries(dataset, view, schema), schema

    def _entries(self, dataset: str, view: VersionReader | TransientVersion | None, schema: Schema) -> DataFrame:
        return self._spark.createDataFrame([], schema.ddl()) if view is None else view.frame(self._spark)

    def _declared_schema(self, dataset: AdjunctDataset) -> Schema:
        if not isinstance(dataset.input, str):
            return stored_schema(dataset, dataset.input.schema)
        records = self.system_of(dataset.input).info(split_stream_name(dataset.input)[1]).schema
        return Schema(()) if records is None else stored_schema(dataset, records)

    def over_time(self, dataset: str) -> TimedRows:
        declared, view = self.app.dataset(dataset), self._inputs.views[dataset]
        read = read_over_time(declared, view, self._inputs.over_time.get(dataset))
        if read is None:
            return no_rows(self._spark, self._context.lake.store, declared, self._declared_schema(declared))
        return timed_rows(self._spark, read)

    def first(self, frame: DataFrame) -> Row | None:
        return frame.first()

    def matched(self, operator: str, dataset: str, frame: DataFrame) -> DataFrame:
        counts = JoinCounts(operator)
        self._joins.append(counts)
        return counts.observe(frame)

    def looked_up(self, operator: str, frame: DataFrame, lookup: TableLookup) -> DataFrame:
        table = cast("RemoteTable[Any, Any, Any]", self.app.tables[lookup.table])
        frame = self.computed_once(operator, frame)
        keys = distinct_keys(frame, lookup)
        asked = about(lookup, dict(frame.dtypes))
        record = RecordedAnswers(self._context.lake, self.app.name, self._inputs.batch, operator, asked)
        reader = self._context.open_tables.reader(table, self._spark, self._context.credits)
        looked_up = answered(keys, lookup, record, reader, self.partitions_at(operator))
        self._measure(lookup.table, looked_up.metrics, looked_up.metrics.counts())
        counts = JoinCounts(operator)
        self._joins.append(counts)
        return counts.observe(with_answers(operator, frame, lookup, as_frame(self._spark, looked_up.table, lookup)))

    def _measure(self, table: str, metrics: TableMetrics, counters: Mapping[str, int]) -> None:
        self._measured[table] = self._measured.get(table, TableMetrics()) + metrics
        self._counters[table] = summed(self._counters.get(table, {}), counters)

    def together(self, frame: DataFrame) -> DataFrame:
        # Spark would drop what brings records together right before they are moved.
        return as_it_is(frame.coalesce(1)) if self._inputs.few else frame

    def computed_once(self, operator: str, frame: DataFrame) -> DataFrame:
        self._kept.append(frame.persist())
        return self._kept[-1]

    def send(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> AppendResult | None:
        self._before_output(stream)
        system, name = self.system_of(stream), split_stream_name(stream)[1]
        create = partial(system.create, name, schema=sent_schema(frame), key=key, partitions=partitions)
        sources = self._sources(operator) if system.keeps_positions else None
        more: dict[str, Any] = {"sources": sources} if sources else {}
        producer = self._producers[operator]
        first = producer == self.app.name
        if self._inputs.few and system.appends_by_one_task:
            more["one_task"] = True
        append = partial(
            system.append,
            name,
            with_positions(frame, sources).drop(*UNSENT),
            producer=producer,
            sequence=self._inputs.batch,
            order_by=("__partition", "__offset", *tie_breakers(frame)),
            partitioned=operator not in self._exchanges,
            consumed=self._inputs.consumed if first else None,
            **more,
        )
        if system.evolves and is_in(system, name, producer, self._inputs.batch):
            # Sent before the columns changed, maybe: they do not change for records that turn out to be others.
            result = append()
            create()
        else:
            create()
            result = append()
        counted = {"rows": result.rows, "duplicate_batches": int(result.duplicate)}
        self._counters[stream] = summed(self._counters.get(stream, {}), counted)
        return result

    def _sources(self, operator: str) -> Sources | None:
        stream = self._origins[operator].made_of
        return None if stream is None else self._inputs.sources(self.app.name, stream)

    def write(self, operator: str, frame: DataFrame, send: TableSend) -> None:
        self._before_output(send.table)
        table = cast("RemoteTable[Any, Any, Any]", self.app.tables[send.table])
        if self._inputs.consumed is None and table.on_replay == "skip":
            # Nothing of a bounded replay is for this table: it has had it, or gets it from the main position, to which
            # it would be older than what the replay had marked.
            self._letters[operator] = (send.table, ())
            self._counters[send.table] = summed(self._counters.get(send.table, {}), {"skipped": frame.count()})
            return
        credits = self._context.credits
        table = table if credits is None else credits.paid(table, self._spark)
        write = TableWrite(
            table,
            send.contract,
            send.on_null_key,
            self.partitions_at(operator),
            " and ".join(self._origins[operator].streams.values()),
            marking_of(
                table,
                frame.columns,
                self._positions[operator],
                self._inputs,
                self._writers[operator],
                made_of_one=self._sources(operator) is not None,
            ),
            send.update is not None,
            () if send.update is None else send.update.remove,
            send.args,
            send.dead_letters,
        )
        exchange = operator in self._exchanges and not self._inputs.few
        written = write_table(self.together(frame), write, exchange=exchange, what=operator)
        self._letters[operator] = (send.table, written.letters)
        self._context.open_tables.forget(send.table)
        self._measure(send.table, written.metrics, written.counters)

    def keep(self, operator: str, frame: DataFrame, table: str, *, deleted: str | None, on_null_key: OnNullKey) -> None:
        lying = operator not in self._exchanges
        self._local.send(operator, frame, table, deleted=deleted, on_null_key=on_null_key, partitioned=lying)

    def hand_to(self, operator: str, frame: DataFrame, function: SinkFunction) -> None:
        self._before_output(called(function))
        self._counters[operator] = function_sinks.handed(frame, self._sink_call(operator, function))

    def results_of(self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema) -> DataFrame:
        call = self._sink_call(operator, function, returns)
        asked = {"function": called(function), "returns": {field.name: field.type for field in returns.fields}}
        record = RecordedAnswers(self._context.lake, self.app.name, self._inputs.batch, operator, asked)
        before = partial(self._before_output, called(function))
        results, self._counters[operator] = function_sinks.results(frame, call, record, before)
        kept = self._planned[operator].partitioned_by
        return function_sinks.as_frame(self._spark, results, self.partitions_at(operator) if kept else None)

    def _sink_call(self, operator: str, function: SinkFunction, returns: Schema | None = None) -> SinkCall:
        told = self.stream_of(operator), self.sensitive(operator)
        return SinkCall(operator, function, self.app.name, self._inputs.batch, returns, *told)

    def letters(self, operator: str) -> DataFrame:
        (before,) = self.app.operator(operator).inputs
        return as_records(self._spark, *self._letters.get(before, ("", ())))

    def send_letters(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        system, name = self.system_of(stream), split_stream_name(stream)[1]
        if is_in(system, name, self.app.name, self._inputs.batch):
            sent = system.appended(name, self.app.name, self._inputs.batch)
            assert sent is not None
            check_all_there(system, name, sent, frame, operator)
            self._counters[stream] = {"rows": sent.rows, "duplicate_batches": 1}
        else:
            self.send(operator, frame, stream, key=key, partitions=partitions)
