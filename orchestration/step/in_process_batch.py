"""Computes a small batch in this process with Arrow, without a Spark session; outputs get the same
as from Spark.

That is for applications none of whose operators needs Spark (`Spec.spark_need`), and for batches
that do not need it for another reason (`find_spark_need`). Appends have the same digests and
updates the same marks, so a batch that one engine has begun may be ended by the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.reading.valid_time import Reader
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.orchestration.operators.as_of_join import BEFORE_HISTORY, NO_TIME
from dagster_adjunct.orchestration.operators.columns import BRANCH, ORIGIN, first_duplicate
from dagster_adjunct.orchestration.operators.functions import RecordCall, call_in_process
from dagster_adjunct.orchestration.operators.joins import MATCHED, SelectedColumn
from dagster_adjunct.orchestration.operators.lookup_join import AnyTable, TableLookup
from dagster_adjunct.orchestration.operators.operator import AsOf, Exchange, Operator
from dagster_adjunct.orchestration.operators.table_updates import TableSend
from dagster_adjunct.orchestration.step import lookups, recorded_answers
from dagster_adjunct.orchestration.step.batch import BatchContext
from dagster_adjunct.orchestration.step.batch_outputs import (
    Letters,
    epochs_of_partitions,
    table_of_letters,
)
from dagster_adjunct.orchestration.step.context import BatchInputs, BatchMetrics, StepContext, View
from dagster_adjunct.orchestration.step.event_times import ranges_to_read
from dagster_adjunct.orchestration.step.kept_entries import (
    MAX_DATASET_ROWS,
    EntryCache,
    KeyedEntries,
    TimedEntries,
    count_stored_rows,
)
from dagster_adjunct.orchestration.step.verify_plan import DryRun, inputs_of_dry_run
from dagster_adjunct.resources.backends.columns import to_arrow_type
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.objects.store import requests_at_once
from dagster_adjunct.resources.schemas.schema import Schema, arrow_type, type_from_arrow
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.sql.arrow_expressions import (
    ArrowExpression,
    NeedsSpark,
    compile_expression,
)
from dagster_adjunct.resources.sql.expression import parse_expression
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    PARTITION,
    POSITION,
    AppendResult,
    SystemStreamPartition,
)
from dagster_adjunct.resources.tables.arrow import DEFAULT, UPDATE, to_struct_array
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.tables.spark import TableWrite, WriteResult, write_rows
from dagster_adjunct.resources.threads import call_in_threads

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.table_updates import Update


def find_spark_need(context: StepContext, inputs: BatchInputs) -> str:
    """Return why a batch needs Spark, although no operator of its application does; "" if it does
    not.

    Without a session, batches of any size are computed in this process.
    """
    if inputs.intent.cut:
        return "a batch that retention has cut"
    if context.spark is IN_PROCESS:
        return ""
    readers = [
        view
        for view in (*inputs.views.values(), *inputs.over_time.values())
        if isinstance(view, Reader)
    ]
    large = next(
        (reader.dataset for reader in readers if count_stored_rows(reader) > MAX_DATASET_ROWS), None
    )
    return (
        f"the size of dataset {large}" if large else "" if inputs.few else "the size of the batch"
    )


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
    known: dict[str, Any] = {}
    if any(operator.spec.send is not None for operator in context.app.operators):
        with closing(_Rehearsal(context, inputs, lambda output: None, cache, known)) as rehearsal:
            rehearsal.run()
    with closing(ArrowBatch(context, inputs, before_output, cache, known)) as batch:
        batch.run()
        return replace(batch.commit(), in_process=True)


def check_in_process(
    context: StepContext, views: Mapping[str, View], starts: Mapping[SystemStreamPartition, str]
) -> None:
    """Raise the errors that creating an output stream, or writing a table, would raise; nothing is
    read or written.

    Raises NeedsSpark if this process can't compute the batch with the columns that streams and
    datasets have now.
    """
    with closing(ArrowDryRun(context, inputs_of_dry_run(context, views, starts))) as batch:
        batch.run()


class ArrowBatch(BatchContext):
    """A batch whose records are Arrow tables.

    Methods that it does not override work for DataFrames and Arrow tables, or are never called.
    `known` has what the rehearsal of the batch has read and made: the records of input streams, the
    results of functions, and the metrics of lookups.
    """

    def __init__(
        self,
        context: StepContext,
        inputs: BatchInputs,
        before_output: Callable[[str], None],
        cache: EntryCache | None = None,
        known: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(context, inputs, before_output)
        self._cache = EntryCache() if cache is None else cache
        self._known = {} if known is None else known

    def run(self) -> None:
        specs = [operator.spec for operator in self.operators]
        matches = (spec.match for spec in specs)
        joined = {
            match.dataset
            for match in matches
            if match is not None and match.dataset and match.as_of is None
        }
        records = [
            partial(self.read, stream)
            for stream in {spec.reads for spec in specs if spec.reads is not None}
        ]
        entries = [partial(self._entries, name, self.app.dataset(name).key) for name in joined]
        # Here, where a store behind a network is asked at the same time, and not by one operator
        # after the other.
        call_in_threads(*records, *entries, at_once=requests_at_once(self.context.lake.store))
        super().run()

    def compile_operator(self, operator: Operator, sources: Sequence[Any]) -> Any:
        self.arrived[operator.id] = arriving = self._prepare_inputs(operator, sources)
        try:
            return operator.spec.compute(operator.id, arriving, self)
        except NeedsSpark as reason:
            raise NeedsSpark(f"{operator.id}: {reason}") from reason

    def _prepare_inputs(self, operator: Operator, sources: Sequence[Any]) -> list[Any]:
        tables = list(sources)
        for number, source in enumerate(operator.inputs if len(tables) > 1 else ()):
            table = tables[number]
            if len(self.origins[operator.id].streams) > 1:
                table = table.drop_columns(
                    [name for name in POSITION if name in table.column_names]
                )
                if ORIGIN not in table.column_names:
                    table = _set_column(table, ORIGIN, _repeat(self.stream_of(source) or "", table))
            branch = _repeat(str(number), table)
            if BRANCH in table.column_names:
                branch = pc.binary_join_element_wise(branch, table.column(BRANCH), "/")
            tables[number] = _set_column(table, BRANCH, branch)
        return tables

    def moves(self, operator: str) -> list[Exchange]:
        return []  # all records are in one place

    def materialize(self, operator: str, frame: Any) -> Any:
        return frame

    # -- records

    def read(self, stream: str) -> Any:
        if stream not in self._known:
            self._known[stream] = self._read(stream)
        return self._known[stream]

    def _read(self, stream: str) -> Any:
        system = self.system_of(stream)
        ranges, epochs = ranges_to_read(system, stream, self.inputs.intent)
        records = system.read_arrow(ranges)
        if not epochs:
            return records
        added = epochs_of_partitions(epochs, records.column(PARTITION))
        return _set_column(records, EPOCH, pc.add(records.column(EPOCH), added).cast(pa.int32()))

    def count(self, frame: Any) -> int:
        count: int = frame.num_rows
        return count

    def names(self, frame: Any) -> Sequence[str]:
        names: list[str] = frame.column_names
        return names

    def filter(self, frame: Any, condition: str) -> Any:
        return frame.filter(self._evaluate(frame, condition))

    def select(self, frame: Any, expressions: Sequence[str]) -> Any:
        columns: list[tuple[str, Any]] = []
        for text in expressions:
            read = parse_expression(text)
            if read.star:
                excepted = set(map(str.lower, read.excepted))
                columns += [
                    (name, frame.column(name))
                    for name in frame.column_names
                    if name.lower() not in excepted
                ]
            else:
                columns.append((str(read.name), self._evaluate(frame, text)))
        if double := first_duplicate(
            [name for name, _ in columns]
        ):  # the records have more columns than planned
            raise NeedsSpark(f"two columns {double}")
        return pa.table(dict(columns))

    def select_update(self, frame: Any, names: Sequence[str], update: Update) -> Any:
        def struct(pairs: Sequence[tuple[str, str]]) -> Any:
            return to_struct_array(
                {name: self._evaluate(frame, text) for name, text in pairs}, frame.num_rows
            )

        selected, nothing = self.select(frame, names), pa.repeat(pa.scalar(True), frame.num_rows)
        parts = {name: struct(pairs) for name, pairs in update.parts.items()}
        selected = selected.append_column(
            UPDATE, to_struct_array(parts, frame.num_rows) if parts else nothing
        )
        if update.if_missing is None:
            return selected
        return selected.append_column(
            DEFAULT, struct(update.if_missing) if update.if_missing else nothing
        )

    def with_columns(self, frame: Any, columns: Sequence[tuple[str, str]]) -> Any:
        made = [(name, self._evaluate(frame, text)) for name, text in columns]
        for name, values in made:
            there = {column.lower(): column for column in frame.column_names}
            frame = _set_column(frame, name, values, there.get(name.lower()))
        return frame

    def merge(self, frames: Sequence[Any]) -> Any:
        """Return the records of all inputs with the columns of the first; hidden ones that one
        lacks are null there.
        """
        names = [[name for name in frame.column_names if name[:2] != "__"] for frame in frames]
        if any(set(other) != set(names[0]) for other in names):
            raise NeedsSpark("names of columns that differ in their case")
        try:
            return pa.concat_tables(frames, promote_options="default")
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            raise NeedsSpark("inputs with columns of different types") from None

    def repartition(self, frame: Any, partitions: int, by: Sequence[str]) -> Any:
        return frame

    def _evaluate(self, frame: Any, text: str) -> Any:
        return self._compile(frame, text).evaluate(frame)

    def _compile(self, frame: Any, text: str) -> ArrowExpression:
        compiled = compile_expression(text, self._types(frame))
        if isinstance(compiled, str):
            raise NeedsSpark(compiled)
        return compiled

    def _types(self, frame: Any) -> dict[str, str]:
        return {field.name: type_from_arrow(field) for field in frame.schema}

    def call_for_records(self, frame: Any, call: RecordCall, kept: Sequence[str]) -> Any:
        # Behind an output, records have positions that the rehearsal did not know.
        if not set(self.origins[call.operator].streams.values()) <= self.app.inputs.keys():
            return call_in_process(frame, call, kept)
        if call.operator not in self._known:
            self._known[call.operator] = call_in_process(frame, call, kept)
        return self._known[call.operator]

    # -- datasets

    def join(
        self,
        operator: str,
        frame: Any,
        dataset: str,
        on: Sequence[tuple[str, str]],
        chosen: Sequence[SelectedColumn] | None,
        entry: str,
    ) -> tuple[Any, Any]:
        """Return the records with the chosen columns of their entries, or all as the struct
        `entry`, and which records have one; counts both."""
        found = self._entries(dataset, tuple(name for _, name in on))
        places, entries = found.find([frame.column(stream) for stream, _ in on]), found.entries
        if chosen is None:
            frame = frame.append_column(
                entry, entries.to_struct_array().combine_chunks().take(places)
            )
        for item in chosen or ():
            frame = frame.append_column(item.name, entries.column(item.column).take(places))
        self._count(operator, {"rows": frame.num_rows, "unmatched": places.null_count})
        return frame, pc.is_valid(places)

    def join_as_of(
        self,
        operator: str,
        frame: Any,
        dataset: str,
        on: Sequence[tuple[str, str]],
        chosen: Sequence[SelectedColumn],
        as_of: AsOf,
    ) -> tuple[Any, Any]:
        """Return the records with the chosen columns of the entries that were valid at their times,
        BEFORE_HISTORY and NO_TIME, and which records have an entry; counts all of these."""
        found = self._timed_entries(dataset, tuple(name for _, name in on))
        times = frame.column(as_of.column).cast(arrow_type("timestamp"))
        columns = [frame.column(stream) for stream, _ in on]
        places, early = found.find(
            columns, times.cast("int64").to_pylist(), oldest=as_of.before_history == "oldest"
        )
        for item in chosen:
            frame = frame.append_column(item.name, found.entries.column(item.column).take(places))
        counts = {"rows": frame.num_rows, "unmatched": places.null_count}
        counts |= {"before_history": pc.sum(early).as_py() or 0, "null_times": times.null_count}
        self._count(operator, counts)
        return frame.append_column(BEFORE_HISTORY, early).append_column(
            NO_TIME, times.is_null()
        ), pc.is_valid(places)

    def look_up(self, operator: str, frame: Any, lookup: TableLookup) -> Any:
        """Return the records with the columns looked up in a remote table, and MATCHED, null
        where there are none.
        """
        keys = frame.select(list(lookup.keys)).rename_columns(lookups.key_columns(lookup))
        asked = lookups.describe_lookup(lookup, self._types(frame))
        record = recorded_answers.RecordedAnswers(
            self.context.lake, self.app.name, self.number, operator, asked
        )
        reader = self.context.open_tables.reader(
            self._with_credits(self.app.tables[lookup.table]), self.context.spark
        )
        sensitive = bool(self.sensitive(operator))
        distinct = lookups.distinct_keys(operator, keys.drop_null(), lookup, sensitive=sensitive)
        answers, metrics = lookups.answer_keys(distinct, lookup, record, reader, 1)
        self._known[operator] = metrics = metrics + self._known.get(operator, TableMetrics())
        self._measure(lookup.table, metrics, metrics.counts())
        found = KeyedEntries.of(answers, tuple(keys.column_names))
        places = found.find(keys.columns)
        for number, answer in enumerate(lookup.answers, start=len(lookup.keys) + 1):
            frame = frame.append_column(answer.name, found.entries.column(number).take(places))
        there = found.entries.column(lookups.FOUND).take(places)
        matched = pc.if_else(pc.fill_null(there, False), True, pa.scalar(None, pa.bool_()))
        self._count(operator, {"rows": frame.num_rows, "unmatched": matched.null_count})
        return frame.append_column(MATCHED, matched)

    def schema_of(self, dataset: str) -> Schema:
        """Return the columns of a dataset's entries, in the version that the batch reads."""
        view = self.inputs.views[dataset]
        return self._declared_schema(self.app.dataset(dataset)) if view is None else view.schema

    def schema_over_time(self, dataset: str) -> Schema:
        """Return the columns of a dataset's rows over time, of the versions that the batch
        reads.
        """
        reader, _ = self.reader_over_time(dataset)
        return self.schema_of(dataset) if reader is None else reader.schema

    def _entries(self, dataset: str, key: tuple[str, ...]) -> KeyedEntries:
        view = self.inputs.views[dataset]
        if isinstance(view, VersionReader):
            return self._cache.get(view, key)
        return KeyedEntries.of(self.schema_of(dataset).to_arrow().empty_table(), key)

    def _timed_entries(self, dataset: str, key: tuple[str, ...]) -> TimedEntries:
        reader, known_from = self.reader_over_time(dataset)
        if reader is None:
            return TimedEntries.empty(self.schema_of(dataset), key)
        return self._cache.get_over_time(reader, key, known_from)

    # -- outputs

    def output_schema(self, frame: Any) -> Schema:
        return Schema.from_arrow(
            frame.select([name for name in frame.column_names if name[:2] != "__"]).schema
        )

    def _append(self, operator: str, frame: Any, stream: str) -> AppendResult:
        return self._append_rows(operator, frame, stream)

    def refused_records(self, operator: str) -> Any:
        (before,) = self.app.operator(operator).inputs
        return table_of_letters(*self._letters.get(before, ("", ())))

    def letters_of(self, frame: Any) -> Letters:
        letters: Letters = frame.to_pylist()
        return letters

    def read_appended(self, stream: str, result: AppendResult) -> Any:
        return self.system_of(stream).read_arrow(**self._appended(stream, result))

    def _with_credits(self, table: AnyTable) -> AnyTable:
        credits = self.context.credits
        return table if credits is None else credits.with_credits(table, None)

    def _send_rows(self, operator: str, frame: Any, write: TableWrite) -> WriteResult:
        return write_rows(frame, write, what=operator)


class _Rehearsal(ArrowBatch):
    """Computes a batch without writing anything, to find out whether it needs Spark before it
    writes a table.
    """

    def send(
        self, operator: str, frame: Any, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        return None

    def write(self, operator: str, frame: Any, send: TableSend) -> None:
        return None


class ArrowDryRun(DryRun, ArrowBatch):
    """A dry run without Spark: it checks what the outputs accept, and there are no physical
    plans to inspect.
    """

    def hand_on(self, operator: Operator, frame: Any) -> Any:
        return frame

    def materialize(self, operator: str, frame: Any) -> Any:
        return frame

    def column_types(self, frame: Any) -> dict[str, str | None]:
        types: dict[str, str | None] = {}
        for field in [field for field in frame.schema if not field.name.startswith("__")]:
            types[field.name] = type_from_arrow(field)
            if field.name in (UPDATE, DEFAULT) and pa.types.is_struct(field.type):
                parts = [
                    part.type if pa.types.is_struct(part.type) else [part] for part in field.type
                ]
                types |= {
                    f"{field.name}.{one.name}": type_from_arrow(one)
                    for part in parts
                    for one in part
                }
        return types

    def look_up(self, operator: str, frame: Any, lookup: TableLookup) -> Any:
        self.check_looked_up(operator, lookup)
        for answer in lookup.answers:
            frame = frame.append_column(
                answer.name, pa.nulls(frame.num_rows, to_arrow_type(answer.type))
            )
        return frame.append_column(MATCHED, pa.nulls(frame.num_rows, pa.bool_()))

    def _inspect(self, operator: str, frame: Any, *, persisted: bool = False) -> Any:
        return None

    def _inspect_written(self, operator: str, frame: Any) -> None:
        pass

    def _entries(self, dataset: str, key: tuple[str, ...]) -> KeyedEntries:
        return KeyedEntries.of(self.schema_of(dataset).to_arrow().empty_table(), key)

    def _timed_entries(self, dataset: str, key: tuple[str, ...]) -> TimedEntries:
        return TimedEntries.empty(self.schema_of(dataset), key)


def _repeat(text: str, records: pa.Table) -> pa.Array:
    return pa.repeat(pa.scalar(text), records.num_rows)


def _set_column(records: pa.Table, name: str, values: Any, replaced: str | None = None) -> pa.Table:
    place = records.schema.get_field_index(replaced or name)
    return (
        records.append_column(name, values)
        if place < 0
        else records.set_column(place, name, values)
    )
