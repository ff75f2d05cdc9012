"""What a batch knows of its operators (`BatchGraph`), and its outputs: streams, remote tables and functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import add_counters
from dagster_adjunct.orchestration.operators.batch_context import SinkFunction, TableLookup, TableSend
from dagster_adjunct.orchestration.operators.columns import BATCH_ONLY, ORIGIN, function_label, tie_breakers
from dagster_adjunct.orchestration.operators.joins import BEFORE_HISTORY, MATCHED, NO_TIME
from dagster_adjunct.orchestration.operators.operator import Exchange, Operator
from dagster_adjunct.orchestration.operators.sends import DEAD_LETTER_COLUMNS
from dagster_adjunct.orchestration.planner.notes import name_writers
from dagster_adjunct.orchestration.step.context import BatchInputs, Counters, StepContext
from dagster_adjunct.orchestration.step.failures import sensitive_columns, sensitive_entries
from dagster_adjunct.orchestration.step.recorded_answers import (
    RecordedAnswers,
    SinkCall,
    answer_keys,
    call_or_replay,
    collect_distinct_keys,
    describe_lookup,
    frame_from_answers,
    frame_from_results,
    hand_to_function,
    join_answers,
)
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import ConfigurationError, StreamNotFoundError, TableError
from dagster_adjunct.resources.schemas.column_sql import F, bigint_array, named_column
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.tuning import PersistedFrames
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    POSITION,
    READER,
    RECORD_META_DDL,
    SOURCE,
    SOURCE_EPOCH,
    SOURCE_OFFSET,
    AppendResult,
    OffsetRange,
    Sources,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.tables.arrow import MarkedSource, Marking
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.tables.spark import TableWrite, write_table
from dagster_adjunct.resources.tables.table import RemoteTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Letters = Sequence[dict[str, Any]]
_LETTER_IDENTITY = ("table", "kind", "key", "record")


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of the positions of an operator's records.

    `streams` are the streams of the positions, by the operator that each comes from: an input, an output that the graph
    continues from, or an operator that makes records of several. `made_of` is the one input stream that all records are
    made of; None if there are several.
    """

    streams: Mapping[str, str]
    made_of: str | None


def trace_origins(operators: Iterable[Operator]) -> dict[str, Origin]:
    """Return the origin of the records after each operator."""
    result: dict[str, Origin] = {}
    for operator in operators:
        before = [result[source] for source in operator.inputs]
        streams: Mapping[str, str]
        if len(before) == 1:  # shared: after a merge of many inputs there may be many
            streams = before[0].streams
        else:
            streams = {begun: stream for origin in before for begun, stream in origin.streams.items()}
        made_of = before[0].made_of if len(streams) == 1 else None
        spec = operator.spec
        if spec.assigns_positions:
            streams, made_of = {operator.id: operator.id}, None
        elif spec.reads is not None:
            streams, made_of = {operator.id: spec.reads}, spec.reads
        elif spec.role == "output" and spec.writes is not None:
            streams = {operator.id: spec.writes}
        result[operator.id] = Origin(streams, made_of)
    return result


class BatchGraph:
    """What a batch reads, and what the application and its plan say of each operator, by id.

    `operators` are those whose records reach an output, in order; the others need not run. `origins` say where records
    have their positions from; `producers` and `writers` are the names under which operators write to streams and
    tables.
    """

    def __init__(self, context: StepContext, inputs: BatchInputs) -> None:
        operators, needed = context.app.operators, set[str]()
        for operator in reversed(operators):
            if operator.spec.writes is not None or operator.id in needed:
                needed |= {operator.id, *operator.inputs}
        self.context, self.inputs, self.app = context, inputs, context.app
        self.number, self.clock, self.reading = inputs.intent.batch, inputs.intent.clock, inputs.intent.reading
        self.tasks = inputs.intent.tasks or len(context.plan.tasks)
        self.operators = [operator for operator in operators if operator.id in needed]
        self.planned = {planned.id: planned for planned in context.plan.operators}
        self.exchanges: dict[str, list[Exchange]] = defaultdict(list)
        for exchange in context.plan.exchanges:
            self.exchanges[exchange.operator].append(exchange)
        self.origins = trace_origins(operators)
        self.producers = name_producers(self.app, context.writer)
        self.writers = name_writers(self.app, context.writer)
        self._consumers = Counter(source for operator in operators for source in set(operator.inputs))
        self._late = {
            source for operator in operators if operator.spec.reads_late_records for source in operator.inputs
        }
        self._positions = self._find_position_streams()

    def _find_position_streams(self) -> dict[str, str | None]:
        """Return the stream that holds the positions of each operator's records; None if there are several.

        Records that an operator makes have positions of their own, named after that operator. The records that continue
        after an output stream are read from it if its system appends alone.
        """
        result: dict[str, str | None] = {}
        for operator in self.app.operators:
            spec = operator.spec
            before = {result[source] for source in operator.inputs}
            result[operator.id] = before.pop() if len(before) == 1 else None
            if spec.assigns_positions:
                result[operator.id] = operator.id
            elif spec.reads is not None:
                result[operator.id] = spec.reads
            elif spec.role == "output" and spec.writes is not None and self.system_of(spec.writes).appends_alone:
                result[operator.id] = spec.writes
        return result

    @property
    def spark(self) -> SparkSession:
        return self.context.spark()

    def system_of(self, stream: str) -> StreamSystem:
        return self.context.systems[split_stream_name(stream)[0]]

    def partitions_at(self, operator: str) -> int:
        return self.planned[operator].partitions

    def required_partitioning(self, operator: str) -> tuple[str, ...]:
        return self.planned[operator].partitioned_by

    def stream_of(self, operator: str) -> str | None:
        return self._positions[operator]

    def has_consumers(self, operator: str) -> bool:
        return self._consumers[operator] > 0

    def has_late_consumer(self, operator: str) -> bool:
        return operator in self._late

    def is_shared(self, operator: Operator) -> bool:
        """Return whether several operators use the records and nothing stores them: what is read or written is stored
        already.
        """
        return self._consumers[operator.id] > 1 and operator.spec.reads is None and operator.spec.writes is None

    def moves(self, operator: str) -> list[Exchange]:
        """Return the plan's auto_repartition exchanges before an operator."""
        return [move for move in self.exchanges.get(operator, ()) if move.reason == "auto_repartition"]

    def sources(self, operator: str) -> Sources | None:
        """Return what is read of the one stream that an operator's records come from; None if there are several."""
        stream = self.origins[operator].made_of
        return None if stream is None else self.inputs.sources(self.context.writer, stream)

    def gather_small(self, frame: DataFrame) -> DataFrame:
        """Return records that are repartitioned next; few records are coalesced into one task first."""
        # Without the barrier Spark drops a coalesce right before an exchange.
        return add_barrier(frame.coalesce(1)) if self.inputs.few else frame


def add_barrier(frame: DataFrame) -> DataFrame:
    """Return the same records behind a metric that nobody reads, past which Spark's optimizer moves nothing."""
    return frame.observe(f"here-{uuid4().hex}", F.count(F.lit(1)))


_TIME_COUNTS = {BEFORE_HISTORY: "before_history", NO_TIME: "null_times"}


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
        return joined.observe(
            self._observation,
            F.count(F.lit(1)).alias("rows"),
            F.count_if(F.col(MATCHED).isNull()).alias("unmatched"),
            *[F.count_if(flag).alias(name) for flag, name in _TIME_COUNTS.items() if flag in joined.columns],
        )

    def result(self) -> dict[str, int]:
        """Return {"rows", "unmatched"}; for a join by time also {"before_history", "null_times"}.

        Waits for the output if it has not run yet.
        """
        counts: dict[str, Any] = self._observation.get
        return {name: int(value) for name, value in counts.items()}


class BatchOutputs(BatchGraph):
    """A batch that writes to streams, remote tables and functions, and looks records up in remote tables.

    `before_output` is called with the name of an output before anything is written to it. `arrived` has the records of
    each input of an operator that is compiled, for errors.
    """

    def __init__(self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> None:
        super().__init__(context, inputs)
        self.counters: Counters = {}
        self.measured: dict[str, TableMetrics] = {}
        self.arrived: dict[str, list[DataFrame]] = {}
        self._before_output = before_output
        self._letters: dict[str, tuple[str, Letters]] = {}
        self._joins: list[JoinCounts] = []
        self._kept = PersistedFrames()

    def sensitive(self, operator: str) -> frozenset[str]:
        compiled = self.app.operator(operator)
        dataset = None if compiled.spec.match is None else compiled.spec.match.dataset
        names = frozenset() if dataset is None else sensitive_entries(self.context, dataset)
        for source, frame in zip(compiled.inputs, self.arrived[operator], strict=True):
            own = [name for name in frame.columns if not name.startswith("__")]
            names |= sensitive_columns(self.context, source, own)
        return names

    def materialize(self, operator: str, frame: DataFrame) -> DataFrame:
        return self._kept.keep(frame)

    def count_matches(self, operator: str, dataset: str, frame: DataFrame) -> DataFrame:
        self._joins.append(JoinCounts(operator))
        return self._joins[-1].observe(frame)

    def _count(self, name: str, counters: Mapping[str, int]) -> None:
        """Add to the counters of an output or an operator."""
        self.counters = add_counters(self.counters, {name: dict(counters)})

    def _measure(self, table: str, metrics: TableMetrics, counters: Mapping[str, int]) -> None:
        self.measured[table] = self.measured.get(table, TableMetrics()) + metrics
        self._count(table, counters)

    # -- streams

    def send(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> AppendResult | None:
        """Append records as (application, batch); creates the stream with `key` and `partitions` if needed."""
        self._before_output(stream)
        system, name = self.system_of(stream), split_stream_name(stream)[1]
        create = partial(system.create, name, schema=output_schema(frame), key=key, partitions=partitions)
        cut = self.inputs.intent.cut
        sent = (
            find_previous_append(system, name, self.producers[operator], self.number) if cut or system.evolves else None
        )
        if sent is not None and cut:
            result = sent  # of all records that the batch began with
            frame.count()  # counts upstream complete only once their records are consumed
        elif sent is not None:
            # The first run may have sent before the columns changed: change them only if the append is a repeat.
            result = self._append(operator, frame, stream)
            create()
        else:
            create()
            result = self._append(operator, frame, stream)
        self._count(stream, {"rows": result.rows, "duplicate_batches": int(result.duplicate)})
        return result

    def _append(self, operator: str, frame: DataFrame, stream: str) -> AppendResult:
        system, producer = self.system_of(stream), self.producers[operator]
        sources = self.sources(operator) if system.keeps_positions else None
        more: dict[str, Any] = {"sources": sources} if sources else {}
        if self.inputs.few and system.appends_by_one_task:
            more["one_task"] = True
        return system.append(
            split_stream_name(stream)[1],
            add_positions(frame, sources).drop(*BATCH_ONLY),
            producer=producer,
            sequence=self.number,
            order_by=("__partition", "__offset", *tie_breakers(frame)),
            partitioned=operator not in self.exchanges,
            consumed=self.inputs.consumed if producer == self.context.writer else None,
            **more,
        )

    def send_dead_letters(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        """Append dead letters; if the batch has sent them before, check that none is missing there."""
        system, name = self.system_of(stream), split_stream_name(stream)[1]
        sent = find_previous_append(system, name, self.context.writer, self.number)
        if sent is None:
            self.send(operator, frame, stream, key=key, partitions=partitions)
            return
        _check_letters_sent(system, name, sent, frame, operator)
        self._count(stream, {"rows": sent.rows, "duplicate_batches": 1})

    # -- remote tables

    def _table(self, name: str) -> RemoteTable[Any, Any, Any]:
        return cast("RemoteTable[Any, Any, Any]", self.app.tables[name])

    def write(self, operator: str, frame: DataFrame, send: TableSend) -> None:
        """Write records, few of them in one task; a replay writes nothing to a table with on_replay="skip"."""
        self._before_output(send.table)
        table = self._table(send.table)
        if self.inputs.consumed is None and table.on_replay == "skip":
            # The table has these records, or gets them from the main position, which must not look older than a mark
            # of the replay.
            self._letters[operator] = (send.table, ())
            self._count(send.table, {"skipped": frame.count()})
            return
        credits, one_source = self.context.credits, self.sources(operator) is not None
        marking = build_marking(
            table, frame.columns, self.stream_of(operator), self.inputs, self.writers[operator], made_of_one=one_source
        )
        write = TableWrite(
            table if credits is None else credits.with_credits(table, self.spark),
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
        exchange = operator in self.exchanges and not self.inputs.few
        written = write_table(self.gather_small(frame), write, exchange=exchange, what=operator)
        self._letters[operator] = (send.table, written.letters)
        self.context.open_tables.forget(send.table)
        self._measure(send.table, written.metrics, written.counters)

    def refused_records(self, operator: str) -> DataFrame:
        """Return the records that the previous operator sent to its table and that the table rejected."""
        (before,) = self.app.operator(operator).inputs
        return _records_from_letters(self.spark, *self._letters.get(before, ("", ())))

    def look_up(self, operator: str, frame: DataFrame, lookup: TableLookup) -> DataFrame:
        """Return the records, computed once, with the table's recorded answers."""
        frame = self.materialize(operator, frame)
        record = self._recorded(operator, describe_lookup(lookup, dict(frame.dtypes)))
        reader = self.context.open_tables.reader(self._table(lookup.table), self.spark, self.context.credits)
        keys = collect_distinct_keys(operator, frame, lookup, sensitive=bool(self.sensitive(operator)))
        answers, metrics = answer_keys(keys, lookup, record, reader, self.partitions_at(operator))
        self._measure(lookup.table, metrics, metrics.counts())
        joined = join_answers(operator, frame, lookup, frame_from_answers(self.spark, answers, lookup))
        return self.count_matches(operator, "", joined)

    def _recorded(self, operator: str, asked: dict[str, Any]) -> RecordedAnswers:
        return RecordedAnswers(self.context.lake, self.app.name, self.number, operator, asked)

    # -- functions

    def call_sink(self, operator: str, frame: DataFrame, function: SinkFunction) -> None:
        """Hand all records to the function, in tasks; errors omit values of sensitive columns."""
        self._before_output(function_label(function))
        self._count(operator, hand_to_function(frame, self._sink_call(operator, function, None)))

    def call_sink_for_results(
        self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema
    ) -> DataFrame:
        """Return the function's results, as recorded by the batch's first run, partitioned like the records."""
        label = function_label(function)
        asked = {"function": label, "returns": {field.name: field.type for field in returns.fields}}
        call, record = self._sink_call(operator, function, returns), self._recorded(operator, asked)
        results, counted = call_or_replay(frame, call, record, partial(self._before_output, label))
        self._count(operator, counted)
        partitions = self.partitions_at(operator) if self.required_partitioning(operator) else None
        return frame_from_results(self.spark, results, partitions)

    def _sink_call(self, operator: str, function: SinkFunction, returns: Schema | None) -> SinkCall:
        return SinkCall(
            operator,
            function,
            self.app.name,
            self.number,
            returns,
            self.stream_of(operator),
            self.sensitive(operator),
            self.inputs.intent.cut,
        )


def output_schema(frame: DataFrame) -> Schema:
    """Return the columns of records as an output stream gets them."""
    return Schema.from_spark(
        frame.select(*[named_column(name) for name in frame.columns if not name.startswith("__")]).schema
    )


def find_previous_append(system: StreamSystem, stream: str, producer: str, batch: int) -> AppendResult | None:
    """Return the result of this batch's earlier append to a stream; None if there was none."""
    try:
        return system.appended(stream, producer, batch)
    except (StreamNotFoundError, ConfigurationError):  # a custom system may not support this
        return None


def add_positions(records: DataFrame, sources: Sources | None) -> DataFrame:
    """Return the records with the columns of POSITION if their output keeps these, else without.

    Records from an output of this batch already have them: their positions are in the application's input.
    """
    if sources is None:
        return records.drop(*POSITION)
    if SOURCE in records.columns:
        return records
    numbers = {SystemStreamPartition.parse(span.source).partition: span.epoch for span in sources.ranges}
    epoch = F.get(bigint_array(numbers.get(p, 0) for p in range(max(numbers, default=0) + 1)), F.col(PARTITION))
    return records.withColumns(
        {
            SOURCE: F.concat(F.lit(f"{sources.stream}."), F.col(PARTITION).cast("string")),
            SOURCE_OFFSET: F.col(OFFSET),
            SOURCE_EPOCH: F.coalesce(epoch, F.lit(0)).cast("int"),
            READER: F.lit(sources.reader),
        }
    )


def _records_from_letters(spark: SparkSession, table: str, letters: Letters) -> DataFrame:
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


def _check_letters_sent(system: StreamSystem, stream: str, sent: AppendResult, letters: DataFrame, what: str) -> None:
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
        problem = (
            f"{what}: this batch was retried, and table {lost[0]['table']} rejects {len(lost)} record(s) that are not "
            f"among the dead letters of its first run; the first has the key {lost[0]['key']}."
        )
        raise TableError(problem, "Correct the records or the table, then run the batch again.", table=lost[0]["table"])


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
    per_epoch = table.idempotent and table.on_replay == "apply"
    replays = inputs.consumed is None
    sources = {}
    for ssp in inputs.intent.ranges:
        identity = inputs.identities.get(ssp.qualified_stream)
        epoch = inputs.intent.epochs.get(ssp, 0) if per_epoch else 0
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
