"""Writes a batch's records to remote tables, and looks records up in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dagster_adjunct.orchestration.operators.arguments import function_label
from dagster_adjunct.orchestration.operators.columns import BATCH_ONLY, ORIGIN, tie_breakers
from dagster_adjunct.orchestration.operators.sends import DEAD_LETTER_COLUMNS
from dagster_adjunct.orchestration.step import recorded_answers as function_sinks
from dagster_adjunct.orchestration.step.provenance import add_positions
from dagster_adjunct.orchestration.step.recorded_answers import (
    RecordedAnswers,
    SinkCall,
    answer_keys,
    collect_distinct_keys,
    describe_lookup,
    frame_from_answers,
    join_answers,
)
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import ConfigurationError, StreamNotFoundError, TableError
from dagster_adjunct.resources.schemas.column_sql import named_column
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    RECORD_META_DDL,
    SOURCE,
    SOURCE_OFFSET,
    AppendResult,
    OffsetRange,
    SystemStreamPartition,
)
from dagster_adjunct.resources.tables.arrow import MarkedSource, Marking
from dagster_adjunct.resources.tables.spark import TableWrite, write_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.batch_context import SinkFunction, TableLookup, TableSend
    from dagster_adjunct.orchestration.operators.operator import Operator
    from dagster_adjunct.orchestration.step.compile_batch import BatchCounts, BatchGraph
    from dagster_adjunct.orchestration.step.context import BatchInputs
    from dagster_adjunct.resources.streams.system import StreamSystem
    from dagster_adjunct.resources.tables.table import RemoteTable


@dataclass(frozen=True, slots=True)
class FunctionOutputs:
    """The functions that a batch hands records to; `before_output` is called with the name before one is called."""

    graph: BatchGraph
    counts: BatchCounts
    before_output: Callable[[str], None]

    def call_sink(self, operator: str, frame: DataFrame, function: SinkFunction, sensitive: frozenset[str]) -> None:
        """Hand over all records, in tasks; errors tell no values of `sensitive` columns."""
        self.before_output(function_label(function))
        self.counts.add(
            operator, function_sinks.hand_to_function(frame, self._call(operator, function, None, sensitive))
        )

    def call_sink_for_results(
        self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema, sensitive: frozenset[str]
    ) -> DataFrame:
        """Return the results, as they were recorded when the batch was run first, where the records lie."""
        graph = self.graph
        asked = {"function": function_label(function), "returns": {field.name: field.type for field in returns.fields}}
        record = RecordedAnswers(graph.context.lake, graph.app.name, graph.inputs.batch, operator, asked)
        before = partial(self.before_output, function_label(function))
        call = self._call(operator, function, returns, sensitive)
        results, counted = function_sinks.call_or_replay(frame, call, record, before)
        self.counts.add(operator, counted)
        kept = graph.required_partitioning(operator)
        return function_sinks.frame_from_results(graph.spark, results, graph.partitions_at(operator) if kept else None)

    def _call(
        self, operator: str, function: SinkFunction, returns: Schema | None, sensitive: frozenset[str]
    ) -> SinkCall:
        graph = self.graph
        return SinkCall(
            operator,
            function,
            graph.app.name,
            graph.inputs.batch,
            returns,
            graph.stream_of(operator),
            sensitive,
            graph.inputs.cut,
        )


Letters = Sequence[dict[str, Any]]
_LETTER_IDENTITY = ("table", "kind", "key", "record")


def records_from_letters(spark: SparkSession, table: str, letters: Letters) -> DataFrame:
    """Return refused records as records of a stream, at the positions of those that they were."""
    ddl = ", ".join((RECORD_META_DDL, *(f"`{name}` {kind}" for name, kind in DEAD_LETTER_COLUMNS.items())))
    rows = [
        (
            letter.get("partition", 0),
            letter.get("offset", 0),
            datetime.fromisoformat(letter["timestamp"]) if letter.get("timestamp") else None,
            False,
            letter.get("epoch") or 0,
            *({**letter, "table": table}[name] for name in DEAD_LETTER_COLUMNS),
        )
        for letter in letters
    ]
    return spark.createDataFrame(rows, ddl)


def check_letters_sent(system: StreamSystem, stream: str, sent: AppendResult, letters: DataFrame, what: str) -> None:
    """Raise TableError where a batch that is run again finds others refused than its first run has sent already.

    A batch appends to a stream once, so that the others would be lost.
    """
    ranges = {
        SystemStreamPartition(system.name, stream, partition): OffsetRange(start, sent.next[partition])
        for partition, start in sent.first.items()
    }
    there = system.read_arrow(ranges) if ranges else None
    present = set() if there is None else {tuple(row[name] for name in _LETTER_IDENTITY) for row in there.to_pylist()}
    lost = [row for row in letters.select(*_LETTER_IDENTITY).collect() if tuple(row) not in present]
    if lost:
        raise TableError(
            f"{what}: this batch is run again, and table {lost[0]['table']} refuses {len(lost)} record(s) that are not "
            f"among the dead letters of its first run; the first is of key {lost[0]['key']}.",
            "Correct the records or the table, then run the batch again.",
            table=lost[0]["table"],
        )


def find_previous_append(system: StreamSystem, stream: str, producer: str, batch: int) -> AppendResult | None:
    """Return the result of what this batch has sent to a stream before, None where it has not."""
    try:
        return system.appended(stream, producer, batch)
    except (StreamNotFoundError, ConfigurationError):  # a system of the user's that can't tell, maybe
        return None


def output_schema(frame: DataFrame) -> Schema:
    """Return the columns of records that an output stream gets."""
    return Schema.from_spark(
        frame.select(*[named_column(name) for name in frame.columns if not name.startswith("__")]).schema
    )


def find_needed_operators(operators: Sequence[Operator]) -> set[str]:
    """Return the operators whose records reach an output; the others need not run."""
    needed: set[str] = set()
    for operator in reversed(operators):
        if operator.spec.writes is not None or operator.id in needed:
            needed |= {operator.id, *operator.inputs}
    return needed


@dataclass(frozen=True, slots=True)
class StreamOutputs:
    """The streams that a batch appends to; `before_output` is called with the name before anything is written."""

    graph: BatchGraph
    counts: BatchCounts
    before_output: Callable[[str], None]

    def send(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> AppendResult:
        """Append records as (application, batch), to a stream that is created with `key` and `partitions`."""
        self.before_output(stream)
        system, name = self.graph.system_of(stream), split_stream_name(stream)[1]
        create = partial(system.create, name, schema=output_schema(frame), key=key, partitions=partitions)
        producer, batch = self.graph.producers[operator], self.graph.inputs.batch
        append = partial(self._append, operator, frame, stream)
        cut = self.graph.inputs.cut
        sent = find_previous_append(system, name, producer, batch) if cut or system.evolves else None
        if sent is not None and cut:
            result = sent  # of all records that the batch was begun with
            frame.count()  # what has been counted before it would be waited for in vain else
        elif sent is not None:
            # Sent before the columns changed, maybe: they do not change for records that turn out to be others.
            result = append()
            create()
        else:
            create()
            result = append()
        self.counts.add(stream, {"rows": result.rows, "duplicate_batches": int(result.duplicate)})
        return result

    def _append(self, operator: str, frame: DataFrame, stream: str) -> AppendResult:
        system, name = self.graph.system_of(stream), split_stream_name(stream)[1]
        producer, inputs = self.graph.producers[operator], self.graph.inputs
        sources = self.graph.sources(operator) if system.keeps_positions else None
        more: dict[str, Any] = {"sources": sources} if sources else {}
        if inputs.few and system.appends_by_one_task:
            more["one_task"] = True
        return system.append(
            name,
            add_positions(frame, sources).drop(*BATCH_ONLY),
            producer=producer,
            sequence=inputs.batch,
            order_by=("__partition", "__offset", *tie_breakers(frame)),
            partitioned=operator not in self.graph.exchanges,
            consumed=inputs.consumed if producer == self.graph.context.writer else None,
            **more,
        )

    def send_dead_letters(
        self, operator: str, letters: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        """Append refused records, unless the batch has done so before: then none of these may be missing there."""
        system, name = self.graph.system_of(stream), split_stream_name(stream)[1]
        sent = find_previous_append(system, name, self.graph.context.writer, self.graph.inputs.batch)
        if sent is None:
            self.send(operator, letters, stream, key=key, partitions=partitions)
            return
        check_letters_sent(system, name, sent, letters, operator)
        self.counts.add(stream, {"rows": sent.rows, "duplicate_batches": 1})


def find_position_streams(operators: Iterable[Operator], has_own: Callable[[str], bool]) -> dict[str, str | None]:
    """Return the stream that the positions of the records after each operator are in, None where there are several.

    Made records have their own: it is named by the operator that makes them.
    `has_own` says of an output stream whether what goes on after it is read from there.
    """
    result: dict[str, str | None] = {}
    for operator in operators:
        spec = operator.spec
        before = {result[source] for source in operator.inputs}
        result[operator.id] = before.pop() if len(before) == 1 else None
        if spec.assigns_positions:
            result[operator.id] = operator.id
        elif spec.reads is not None:
            result[operator.id] = spec.reads
        elif spec.role == "output" and spec.writes is not None and has_own(spec.writes):
            result[operator.id] = spec.writes
    return result


def build_marking(
    table: Any, columns: Iterable[str], stream: str | None, inputs: BatchInputs, writer: str, *, made_of_one: bool
) -> Marking | None:
    """Return how the records of a batch are marked for a table with conditions; None for one without.

    `columns` are the records', `stream` that of their positions. `writer` begins the names of all sources: two who
    write the same table from the same stream don't take the other's marks for their own. So does a stream that was made
    anew have other names, and a bounded replay: what is read beside the main position has marks of its own, or the main
    position would be behind them. With on_replay="skip" replays are no others.
    """
    if not table.idempotent and table.newest_by is None:
        return None
    there = set(columns)
    again = table.idempotent and table.on_replay == "apply"
    replays = inputs.consumed is None
    sources = {}
    for ssp in inputs.ranges:
        identity = inputs.identities.get(ssp.qualified_stream)
        epoch = inputs.epochs.get(ssp, 0) if again else 0
        name = f"{writer}/{ssp}" + (f"@{identity[:8]}" if identity else "")
        sources[str(ssp)] = MarkedSource(f"{name}~{epoch}", 0) if replays and epoch else MarkedSource(name, epoch)
    if made_of_one and SOURCE in there:
        return Marking((SOURCE,), SOURCE_OFFSET, sources, prefix=f"{writer}/")
    if ORIGIN in there:
        return Marking((ORIGIN, PARTITION), OFFSET, sources, prefix=f"{writer}/")
    return Marking((PARTITION,), OFFSET, sources, stream or "", f"{writer}/")


def name_producers(app: Application, writer: str) -> dict[str, str]:
    """Return under which name each operator appends to its stream: `writer`, with its number where it is not the first
    one to send there."""
    names: dict[str, str] = {}
    senders: Counter[str] = Counter()
    for operator in app.operators:
        target = operator.spec.target(app)
        if target is not None and target.kind == "stream":
            senders[target.name] += 1
            number = senders[target.name]
            names[operator.id] = writer if number == 1 else f"{writer}#{number}"
    return names


class TableOutputs:
    """The remote tables of one batch; `before_output` is called with the name before anything is written.

    What a table has refused is there until the batch has run, by the operator that wrote it.
    """

    def __init__(self, graph: BatchGraph, counts: BatchCounts, before_output: Callable[[str], None]) -> None:
        self._graph, self._counts, self._before_output = graph, counts, before_output
        self._letters: dict[str, tuple[str, tuple[dict[str, Any], ...]]] = {}

    def write(self, operator: str, frame: DataFrame, send: TableSend, sensitive: frozenset[str]) -> None:
        """Write records, few of them in one task; a replay writes nothing to a table that has had its records."""
        graph = self._graph
        self._before_output(send.table)
        table = self._table(send.table)
        if graph.replays and table.on_replay == "skip":
            # Nothing of a bounded replay is for this table: it has had it, or gets it from the main position, to which
            # it would be older than what the replay had marked.
            self._letters[operator] = (send.table, ())
            self._counts.add(send.table, {"skipped": frame.count()})
            return
        credits = graph.context.credits
        table = table if credits is None else credits.with_credits(table, graph.spark)
        exchange = operator in graph.exchanges and not graph.inputs.few
        write = replace(self._write_of(operator, frame, send, table), sensitive=bool(sensitive))
        written = write_table(graph.gather_small(frame), write, exchange=exchange, what=operator)
        self._letters[operator] = (send.table, written.letters)
        graph.context.open_tables.forget(send.table)
        self._counts.measure(send.table, written.metrics, written.counters)

    def _write_of(
        self, operator: str, frame: DataFrame, send: TableSend, table: RemoteTable[Any, Any, Any]
    ) -> TableWrite:
        graph = self._graph
        marking = build_marking(
            table,
            frame.columns,
            graph.stream_of(operator),
            graph.inputs,
            graph.writers[operator],
            made_of_one=graph.sources(operator) is not None,
        )
        return TableWrite(
            table,
            send.contract,
            send.on_null_key,
            graph.partitions_at(operator),
            " and ".join(graph.origins[operator].streams.values()),
            marking,
            send.update is not None,
            () if send.update is None else send.update.remove,
            send.args,
            send.dead_letters,
        )

    def refused_records(self, operator: str) -> DataFrame:
        """Return what the table of the operator before this one has refused."""
        (before,) = self._graph.app.operator(operator).inputs
        return records_from_letters(self._graph.spark, *self._letters.get(before, ("", ())))

    def look_up(self, operator: str, frame: DataFrame, lookup: TableLookup, sensitive: frozenset[str]) -> DataFrame:
        """Return records, which are computed once, with what the table answers: the same however often it is asked."""
        graph = self._graph
        asked = describe_lookup(lookup, dict(frame.dtypes))
        record = RecordedAnswers(graph.context.lake, graph.app.name, graph.inputs.batch, operator, asked)
        reader = graph.context.open_tables.reader(self._table(lookup.table), graph.spark, graph.context.credits)
        keys = collect_distinct_keys(operator, frame, lookup, sensitive=bool(sensitive))
        answers = answer_keys(keys, lookup, record, reader, graph.partitions_at(operator))
        self._counts.measure(lookup.table, answers.metrics, answers.metrics.counts())
        joined = join_answers(operator, frame, lookup, frame_from_answers(graph.spark, answers.table, lookup))
        return self._counts.of_join(operator, joined)

    def _table(self, name: str) -> RemoteTable[Any, Any, Any]:
        return cast("RemoteTable[Any, Any, Any]", self._graph.app.tables[name])
