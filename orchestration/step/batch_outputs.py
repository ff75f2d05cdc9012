"""Writes the output streams and remote tables of a batch, and looks records up in remote tables.

What depends on the engine is behind two protocols, `Frames` and `Writes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol

from dagster_adjunct.orchestration.batch_log.batch_log import Counters, add_counters
from dagster_adjunct.orchestration.operators.batch import Frame, Records
from dagster_adjunct.orchestration.operators.columns import BATCH_ONLY, ORIGIN, tie_breakers
from dagster_adjunct.orchestration.operators.dead_letters import DEAD_LETTER_COLUMNS
from dagster_adjunct.orchestration.operators.lookups import TableLookup
from dagster_adjunct.orchestration.operators.updates import TableSend
from dagster_adjunct.orchestration.step import lookups
from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext
from dagster_adjunct.orchestration.step.event_times import number_by_partition
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch
from dagster_adjunct.orchestration.step.recorded_answers import RecordedAnswers
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.bucketing.writer import check_readable
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.schema import Schema, arrow_type
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    OFFSET,
    PARTITION,
    POSITION,
    READER,
    RECORD_META_COLUMNS,
    SOURCE,
    SOURCE_EPOCH,
    SOURCE_OFFSET,
    TIMESTAMP,
    TOMBSTONE,
    AppendOptions,
    AppendResult,
    OffsetRange,
    Sources,
    StreamSystem,
    StreamWriter,
    SystemStreamPartition,
    require_writer,
)
from dagster_adjunct.resources.tables.arrow import MarkedSource, Marking
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.tables.spark import TableWrite, WriteResult
from dagster_adjunct.resources.tables.table import AnyTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Letters = Sequence[dict[str, Any]]
"""Dead letters: rejected records, each with DEAD_LETTER_COLUMNS and the position of the
original.
"""
_LETTER_IDENTITY = ("table", "kind", "key", "record")


class BatchCounts:
    """What a batch counts: the counters of its outputs and operators, and the metrics of its remote
    tables.
    """

    def __init__(self) -> None:
        self.counters: Counters = {}
        self.measured: dict[str, TableMetrics] = {}

    def count(self, name: str, counters: Mapping[str, int]) -> None:
        """Add to the counters of an output or an operator."""
        self.counters = add_counters(self.counters, {name: dict(counters)})

    def measure(self, table: str, metrics: TableMetrics, counters: Mapping[str, int]) -> None:
        """Add to the metrics and counters of a remote table."""
        self.measured[table] = self.measured.get(table, TableMetrics()) + metrics
        self.count(table, counters)

    def of_tables(self) -> BatchCounts:
        """Return what was counted of remote tables."""
        counts = BatchCounts()
        for table, metrics in self.measured.items():
            counts.measure(table, metrics, self.counters[table])
        return counts


class Frames(Records[Frame], Protocol[Frame]):
    """Frames as outputs and lookups need them, besides what operators do with them."""

    @property
    def session(self) -> SparkSession | None:
        """The Spark session; None for frames of this process."""

    def of_table(self, table: pa.Table) -> Frame:
        """Return the records of an Arrow table."""

    def to_rows(self, frame: Frame) -> Sequence[dict[str, Any]]:
        """Return the records as dictionaries."""

    def schema(self, frame: Frame) -> Schema:
        """Return the columns of records as an output stream gets them."""

    def types(self, frame: Frame) -> dict[str, str]:
        """Return the types of all columns."""

    def count(self, frame: Frame) -> int:
        """Return the number of records, once they are computed."""

    def tasks_at(self, operator: str) -> int:
        """Return how many tasks may work for an operator."""

    def distinct_keys(
        self, operator: str, frame: Frame, lookup: TableLookup, *, sensitive: bool
    ) -> pa.Table:
        """Return the distinct keys of the records, in the columns `key_columns(…)`; keys with a
        null are left out.
        """

    def add_answers(
        self, operator: str, frame: Frame, lookup: TableLookup, answers: pa.Table
    ) -> Frame:
        """Return all records with their answers, and MATCHED."""

    def add_unknown_answers(self, operator: str, frame: Frame, lookup: TableLookup) -> Frame:
        """Return the records with the columns that `add_answers` adds, of the same types, for a
        dry run.
        """

    def sent_types(self, frame: Frame) -> dict[str, str | None]:
        """Return the types of the columns that a table gets, also of those in UPDATE and DEFAULT
        by "struct.column".
        """


@dataclass(frozen=True, slots=True)
class Append:
    """An append to the stream "system.name".

    `producer` and `sequence` are the application's output and the batch.
    """

    system: StreamWriter
    stream: str
    producer: str
    sequence: int
    options: AppendOptions

    @property
    def name(self) -> str:
        return split_stream_name(self.stream)[1]

    def send(self, records: DataFrame | pa.Table, options: AppendOptions) -> AppendResult:
        """Append these records."""
        return self.system.append(
            self.name, records, producer=self.producer, sequence=self.sequence, options=options
        )

    def send_rows(self, records: pa.Table) -> AppendResult:
        """Append records that are in memory, from this process."""
        rows = prepare_arrow_append(records, self.options.sources)
        with naming_records(self.system, self.name, rows):
            return self.send(rows, self.options)


class Writes(Protocol[Frame]):
    """How records get out of an engine, and back from the streams that it has written."""

    def append(self, operator: str, frame: Frame, append: Append) -> AppendResult:
        """Append records to a stream."""

    def read(self, append: Append, **ranges: Any) -> Frame:
        """Return records that were appended."""

    def write(self, operator: str, frame: Frame, write: TableWrite) -> WriteResult:
        """Write records to a remote table."""


@dataclass(frozen=True, slots=True)
class WrittenOutputs(Generic[Frame]):
    """Writes the output streams and remote tables of a batch: `Outputs` of operators.

    (application, batch) is the producer and sequence of every append, so repeating a batch adds
    nothing to streams. `before_output` is called with the name of an output before anything is
    written to it, and raises if the run may not continue. It may also get a function that looks at
    the output; then it returns that function's result.
    """

    planned: PlannedBatch
    counts: BatchCounts
    frames: Frames[Frame]
    writes: Writes[Frame]
    before_output: Callable[..., Any]
    _sent: dict[str, tuple[Append, AppendResult]] = field(default_factory=dict)
    _letters: dict[str, tuple[str, Letters]] = field(default_factory=dict)

    # -- streams

    def send(
        self, operator: str, frame: Frame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        append = self._begin_append(operator, stream)
        system = append.system
        is_cut = self.planned.inputs.intent.cut
        producer = self.planned.producers[operator]
        find = partial(find_previous_append, system, append.name, producer, self.planned.number)
        sent: AppendResult | None = self.before_output(
            stream, find if is_cut or system.capabilities.evolves else _find_nothing
        )
        schema = self.frames.schema(frame)
        create = partial(system.create, append.name, schema=schema, key=key, partitions=partitions)
        if sent is None:
            create()
            result = self.writes.append(operator, frame, append)
        elif is_cut:
            result = sent  # of all records that the batch began with
            self.frames.count(frame)  # counts upstream complete once their records are consumed
        else:
            # The first run may have sent before the columns changed: change them only if the append
            # is a repeat.
            result = self.writes.append(operator, frame, append)
            create()
        self._sent[operator] = append, result
        counters = {"rows": result.rows, "duplicate_batches": int(result.duplicate)}
        self.counts.count(stream, counters)

    def _begin_append(self, operator: str, stream: str) -> Append:
        context = self.planned.context
        name = split_stream_name(stream)[1]
        system = require_writer(self.planned.system_of(stream))
        # one snapshot for all requests: appending fails, and is retried, if the stream has changed
        can = system.capabilities
        if can.evolves:
            system = require_writer(system.snapshot(name))
        producer = self.planned.producers[operator]
        is_main = producer == context.writer
        options = AppendOptions(
            consumed=self.planned.inputs.consumed if is_main else None,
            sources=self.planned.sources(operator) if can.keeps_positions else None,
            fence=context.fence,
        )
        return Append(system, stream, producer, self.planned.number, options)

    def read_sent(self, operator: str, frame: Frame, stream: str) -> Frame:
        append, result = self._sent[operator]
        options: dict[str, Any] = (
            {"positions": True} if append.system.capabilities.keeps_positions else {}
        )
        return self.writes.read(append, ranges=_appended_ranges(append, result), **options)

    def send_dead_letters(
        self, operator: str, frame: Frame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        system = require_writer(self.planned.system_of(stream))
        name = split_stream_name(stream)[1]
        writer = self.planned.context.writer
        sent = find_previous_append(system, name, writer, self.planned.number)
        if sent is None:
            self.send(operator, frame, stream, key=key, partitions=partitions)
            return
        check_letters_sent(system, name, sent, self.frames.to_rows(frame), operator)
        self.counts.count(stream, {"rows": sent.rows, "duplicate_batches": 1})

    # -- remote tables

    def write(self, operator: str, frame: Frame, send: TableSend, *, sensitive: bool) -> None:
        self.before_output(send.table)
        context = self.planned.context
        table = context.app.tables[send.table]
        if self.planned.inputs.consumed is None and table.on_replay == "skip":
            # The table has these records, or will get them from the main position. If the replay
            # left marks, what the main position writes could look old.
            self._letters[operator] = (send.table, ())
            self.counts.count(send.table, {"skipped": self.frames.count(frame)})
            return
        write = TableWrite(
            self._table_of_run(table),
            send.contract,
            send.on_null_key,
            self.planned.partitions_at(operator),
            " and ".join(self.planned.origins[operator].streams.values()),
            self._marking(operator, frame, table),
            send.update is not None,
            () if send.update is None else send.update.remove,
            send.args,
            send.dead_letters,
            sensitive=sensitive,
        )
        written = self.writes.write(operator, frame, write)
        self._letters[operator] = (send.table, written.letters)
        context.open_tables.forget(send.table)
        self.counts.measure(send.table, written.metrics, written.counters)

    def _table_of_run(self, table: AnyTable) -> AnyTable:
        """Return the table as this run may write it: within its rate, and by its fence."""
        context = self.planned.context
        limited = with_credits(context, table, self.frames)
        if context.fence is None:
            return limited
        return limited.with_fence(context.fence, may_create=table.name not in context.begun_tables)

    def _marking(self, operator: str, frame: Frame, table: AnyTable) -> Marking | None:
        return build_marking(
            table,
            self.frames.names(frame),
            self.planned.stream_of(operator),
            self.planned.inputs,
            self.planned.writers[operator],
            made_of_one=self.planned.sources(operator) is not None,
        )

    def refused_records(self, operator: str) -> Frame:
        before = self.planned.operator_before(operator)
        table, letters = self._letters.get(before, ("", ()))
        return self.frames.of_table(table_of_letters(table, letters))


def _appended_ranges(
    append: Append, result: AppendResult
) -> dict[SystemStreamPartition, OffsetRange]:
    system, name = split_stream_name(append.stream)
    return {
        SystemStreamPartition(system, name, partition): OffsetRange(start, result.next[partition])
        for partition, start in result.first.items()
    }


@dataclass(frozen=True, slots=True)
class NoOutputs(Generic[Frame]):
    """Writes nothing, to find out whether a batch can be computed: `Outputs` of operators."""

    frames: Frames[Frame]

    def send(
        self, operator: str, frame: Frame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        pass

    def read_sent(self, operator: str, frame: Frame, stream: str) -> Frame:
        return frame

    def write(self, operator: str, frame: Frame, send: TableSend, *, sensitive: bool) -> None:
        pass

    def refused_records(self, operator: str) -> Frame:
        return self.frames.of_table(table_of_letters("", ()))

    def send_dead_letters(
        self, operator: str, frame: Frame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        pass


@dataclass(frozen=True, slots=True)
class TableLookups(Generic[Frame]):
    """Looks records up in remote tables: `Tables` of operators."""

    planned: PlannedBatch
    counts: BatchCounts
    frames: Frames[Frame]

    def look_up(self, operator: str, frame: Frame, lookup: TableLookup) -> Frame:
        context = self.planned.context
        frame = self.frames.materialize(operator, frame)
        sensitive = bool(self.planned.sensitive(operator, self.frames.names(frame)))
        asked = lookups.describe_lookup(lookup, self.frames.types(frame))
        record = RecordedAnswers(
            context.lake, context.app.name, self.planned.number, operator, asked
        )
        table = with_credits(context, context.app.tables[lookup.table], self.frames)
        reader = context.open_tables.reader(table, context.spark)
        keys = self.frames.distinct_keys(operator, frame, lookup, sensitive=sensitive)
        tasks = self.frames.tasks_at(operator)
        answers, metrics = lookups.answer_keys(keys, lookup, record, reader, tasks)
        self.counts.measure(lookup.table, metrics, metrics.counts())
        return self.frames.add_answers(operator, frame, lookup, answers)


def with_credits(context: StepContext, table: AnyTable, frames: Frames[Any]) -> AnyTable:
    """Return the table as this session's tasks may use it: within the part of its rate that the
    run has.
    """
    credits = context.credits
    return table if credits is None else credits.with_credits(table, frames.session)


def _find_nothing() -> None:
    return None


def find_previous_append(
    system: StreamWriter, stream: str, producer: str, batch: int
) -> AppendResult | None:
    """Return the result of this batch's earlier append to a stream; None if there was none."""
    try:
        return system.appended(stream, producer, batch)
    except (
        errors.StreamNotFoundError,
        errors.ConfigurationError,
    ):  # a custom system may not support this
        return None


def add_positions(records: DataFrame, sources: Sources | None) -> DataFrame:
    """Return the records with the columns of POSITION; without, if `sources` is None: their output
    keeps none.

    Records that were read back from another output of this batch have them already: the positions
    in the input.
    """
    if sources is None:
        return records.drop(*POSITION)
    if SOURCE in records.columns:
        return records
    epochs = {
        SystemStreamPartition.parse(span.source).partition: span.epoch for span in sources.ranges
    }
    return records.withColumns(
        {
            SOURCE: F.concat(F.lit(f"{sources.stream}."), F.col(PARTITION).cast("string")),
            SOURCE_OFFSET: F.col(OFFSET),
            SOURCE_EPOCH: number_by_partition(epochs).cast("int"),
            READER: F.lit(sources.reader),
        }
    )


def prepare_arrow_append(records: pa.Table, sources: Sources | None) -> pa.Table:
    """Return records in memory as an output stream gets them: in order, with the columns of
    POSITION if it keeps these (`add_positions`)."""
    order = (PARTITION, OFFSET, *tie_breakers(records.column_names))
    rows = records.sort_by([(name, "ascending") for name in order])
    unsent = {*order, *BATCH_ONLY, *(POSITION if sources is None else ())}
    if sources is not None and SOURCE not in rows.column_names:
        epochs = {
            SystemStreamPartition.parse(span.source).partition: span.epoch
            for span in sources.ranges
        }
        partitions = rows.column(PARTITION)
        names = pc.binary_join_element_wise(sources.stream, partitions.cast(pa.string()), ".")
        rows = (
            rows.append_column(SOURCE, names)
            .append_column(SOURCE_OFFSET, rows.column(OFFSET))
            .append_column(SOURCE_EPOCH, epochs_of_partitions(epochs, partitions))
            .append_column(READER, pa.repeat(pa.scalar(sources.reader), rows.num_rows))
        )
    return rows.drop_columns([name for name in rows.column_names if name in unsent])


@contextmanager
def naming_records(system: StreamWriter, stream: str, rows: pa.Table) -> Iterator[None]:
    """Make the error for a value that can't be stored describe its record, as in tasks, instead
    of a row number.
    """
    try:
        yield
    except SchemaMismatchError as error:
        schema = system.info(stream).schema
        if error.row is None or schema is None:
            raise
        there = schema.select([field for field in schema.names if field in rows.column_names])
        check_readable(
            rows.select(there.names), there, f"stream {stream!r}", stream=f"{system.name}.{stream}"
        )
        raise


def epochs_of_partitions(epochs: Mapping[int, int], partitions: pa.ChunkedArray) -> pa.Array:
    """Return the epoch of each of these partitions as int, 0 for those that `epochs` does not
    list.
    """
    known = np.zeros(max([*epochs, *pc.unique(partitions).to_pylist(), 0]) + 1, np.int32)
    known[list(epochs)] = list(epochs.values())
    return pa.array(known[partitions.to_numpy()])


def table_of_letters(table: str, letters: Letters) -> pa.Table:
    """Return dead letters as records of a stream, at the positions of the originals."""
    rows = [
        {
            PARTITION: letter.get("partition", 0),
            OFFSET: letter.get("offset", 0),
            TIMESTAMP: (
                datetime.fromisoformat(letter["timestamp"]) if letter.get("timestamp") else None
            ),
            TOMBSTONE: False,
            EPOCH: letter.get("epoch") or 0,
            **{name: {**letter, "table": table}[name] for name in DEAD_LETTER_COLUMNS},
        }
        for letter in letters
    ]
    kinds = {**dict(RECORD_META_COLUMNS), **DEAD_LETTER_COLUMNS}
    return pa.Table.from_pylist(
        rows, pa.schema([(name, arrow_type(kind)) for name, kind in kinds.items()])
    )


def check_letters_sent(
    system: StreamSystem, stream: str, sent: AppendResult, letters: Letters, what: str
) -> None:
    """Raise TableError if a retried batch rejects records that its first run did not send as dead
    letters.

    A batch appends to a stream only once, so these records would be lost.
    """
    ranges = {
        SystemStreamPartition(system.name, stream, partition): OffsetRange(
            start, sent.next[partition]
        )
        for partition, start in sent.first.items()
    }
    there = system.read_arrow(ranges) if ranges else None
    if there is None:
        present = set()
    else:
        present = {tuple(row[name] for name in _LETTER_IDENTITY) for row in there.to_pylist()}
    lost = [
        letter
        for letter in letters
        if tuple(letter[name] for name in _LETTER_IDENTITY) not in present
    ]
    if lost:
        problem = (
            f"{what}: this batch was retried, and table {lost[0]['table']} rejects"
            f" {len(lost)} record(s) that are not among the dead letters of its first run; the"
            f" first has the key {lost[0]['key']}."
        )
        raise errors.TableError(
            problem,
            "Correct the records or the table, then run the batch again.",
            table=lost[0]["table"],
        )


def build_marking(
    table: Any,
    columns: Iterable[str],
    stream: str | None,
    inputs: BatchInputs,
    writer: str,
    *,
    made_of_one: bool,
) -> Marking | None:
    """Return how a batch marks its records in a remote table with `idempotent` or `newest_by`; None
    for other tables.

    A mark says from which offset of which source a row was last written, so that the table can
    ignore repeats and older records. `columns` are the columns of the records, `stream` is the
    stream of their positions. Sources are named after `writer`, so that two applications that write
    one table from one stream keep separate marks. A recreated stream gets new names too. So does a
    bounded replay, which reads outside the main position, unless the table has on_replay="skip".
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
        sources[str(ssp)] = (
            MarkedSource(f"{name}~{epoch}", 0) if replays and epoch else MarkedSource(name, epoch)
        )
    if made_of_one and SOURCE in there:
        return Marking((SOURCE,), SOURCE_OFFSET, sources, prefix=f"{writer}/")
    if ORIGIN in there:
        return Marking((ORIGIN, PARTITION), OFFSET, sources, prefix=f"{writer}/")
    return Marking((PARTITION,), OFFSET, sources, stream or "", f"{writer}/")
