"""Writes a batch's records to streams, remote tables and functions, and looks records up in remote tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.arguments import function_label
from dagster_adjunct.orchestration.operators.batch_context import SinkFunction, TableLookup, TableSend
from dagster_adjunct.orchestration.operators.columns import BATCH_ONLY, ORIGIN, tie_breakers
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.orchestration.operators.sends import DEAD_LETTER_COLUMNS
from dagster_adjunct.orchestration.step import recorded_answers as function_sinks
from dagster_adjunct.orchestration.step.context import BatchInputs
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
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.tables.arrow import MarkedSource, Marking
from dagster_adjunct.resources.tables.spark import TableWrite, write_table
from dagster_adjunct.resources.tables.table import RemoteTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.orchestration.step.compile_batch import BatchCounts, BatchGraph


@dataclass(frozen=True, slots=True)
class FunctionOutputs:
    """Hands records to sink functions; `before_output` is called with a function's name before it is called."""

    graph: BatchGraph
    counts: BatchCounts
    before_output: Callable[[str], None]

    def call_sink(self, operator: str, frame: DataFrame, function: SinkFunction, sensitive: frozenset[str]) -> None:
        """Hand all records to the function, in tasks; errors omit values of `sensitive` columns."""
        self.before_output(function_label(function))
        self.counts.add(
            operator, function_sinks.hand_to_function(frame, self._call(operator, function, None, sensitive))
        )

    def call_sink_for_results(
        self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema, sensitive: frozenset[str]
    ) -> DataFrame:
        """Return the function's results, as recorded by the batch's first run, partitioned like the records."""
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
    """Return rejected records as records of a stream, at the positions of the originals."""
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
    """Raise TableError if a retried batch rejects records that its first run did not send as dead letters.

    A batch appends to a stream only once, so these records would be lost.
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
            f"{what}: this batch was retried, and table {lost[0]['table']} rejects {len(lost)} record(s) that are not "
            f"among the dead letters of its first run; the first has the key {lost[0]['key']}.",
            "Correct the records or the table, then run the batch again.",
            table=lost[0]["table"],
        )


def find_previous_append(system: StreamSystem, stream: str, producer: str, batch: int) -> AppendResult | None:
    """Return the result of this batch's earlier append to a stream; None if there was none."""
    try:
        return system.appended(stream, producer, batch)
    except (StreamNotFoundError, ConfigurationError):  # a custom system may not support this
        return None


def output_schema(frame: DataFrame) -> Schema:
    """Return the columns of records as an output stream gets them."""
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
    """Appends to streams; `before_output` is called with a stream's name before anything is written."""

    graph: BatchGraph
    counts: BatchCounts
    before_output: Callable[[str], None]

    def send(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> AppendResult:
        """Append records as (application, batch); creates the stream with `key` and `partitions` if needed."""
        self.before_output(stream)
        system, name = self.graph.system_of(stream), split_stream_name(stream)[1]
        create = partial(system.create, name, schema=output_schema(frame), key=key, partitions=partitions)
        producer, batch = self.graph.producers[operator], self.graph.inputs.batch
        append = partial(self._append, operator, frame, stream)
        cut = self.graph.inputs.cut
        sent = find_previous_append(system, name, producer, batch) if cut or system.evolves else None
        if sent is not None and cut:
            result = sent  # of all records that the batch began with
            frame.count()  # counts upstream complete only once their records are consumed
        elif sent is not None:
            # The first run may have sent before the columns changed: change them only if the append is a repeat.
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
        """Append dead letters; if the batch has sent them before, check that none is missing there."""
        system, name = self.graph.system_of(stream), split_stream_name(stream)[1]
        sent = find_previous_append(system, name, self.graph.context.writer, self.graph.inputs.batch)
        if sent is None:
            self.send(operator, letters, stream, key=key, partitions=partitions)
            return
        check_letters_sent(system, name, sent, letters, operator)
        self.counts.add(stream, {"rows": sent.rows, "duplicate_batches": 1})


def find_position_streams(operators: Iterable[Operator], has_own: Callable[[str], bool]) -> dict[str, str | None]:
    """Return the stream that holds the positions of each operator's records; None if there are several.

    Records that an operator makes have positions of their own, named after that operator. `has_own` says whether the
    records that continue after an output stream are read from it.
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
    """Return how a batch's records are marked in a table that ignores repeats or keeps the newest; None for other
    tables.

    `columns` are the columns of the records, `stream` is the stream of their positions. Sources are named after
    `writer`, so that two applications that write one table from one stream keep separate marks. A recreated stream gets
    new names too. So does a bounded replay, which reads outside the main position, unless the table has
    on_replay="skip".
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
    """Return the name under which each operator appends to its stream: `writer`, plus a number from the second operator
    on.
    """
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
    """The remote tables of one batch; `before_output` is called with a table's name before anything is written.

    Keeps the rejected records of each operator until the batch has run.
    """

    def __init__(self, graph: BatchGraph, counts: BatchCounts, before_output: Callable[[str], None]) -> None:
        self._graph, self._counts, self._before_output = graph, counts, before_output
        self._letters: dict[str, tuple[str, tuple[dict[str, Any], ...]]] = {}

    def write(self, operator: str, frame: DataFrame, send: TableSend, sensitive: frozenset[str]) -> None:
        """Write records, few of them in one task; a replay writes nothing to a table with on_replay="skip"."""
        graph = self._graph
        self._before_output(send.table)
        table = self._table(send.table)
        if graph.replays and table.on_replay == "skip":
            # The table has these records, or gets them from the main position, which must not look older than a mark
            # of the replay.
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
        """Return the records that the table of the operator before this one has rejected."""
        (before,) = self._graph.app.operator(operator).inputs
        return records_from_letters(self._graph.spark, *self._letters.get(before, ("", ())))

    def look_up(self, operator: str, frame: DataFrame, lookup: TableLookup, sensitive: frozenset[str]) -> DataFrame:
        """Return the records, computed once, with the table's recorded answers."""
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
