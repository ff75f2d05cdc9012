"""Writes the output streams and remote tables of a batch, and looks records up in remote tables.

What depends on the engine is behind two protocols, `Frames` and `Writes`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol

from dagster_adjunct.orchestration.application.written_tables import (
    check_first_batch,
    remember_writer,
)
from dagster_adjunct.orchestration.batch_log.batch_log import Counters, add_counters
from dagster_adjunct.orchestration.batch_log.intent import Ranges
from dagster_adjunct.orchestration.operators.batch import Frame, Records
from dagster_adjunct.orchestration.operators.columns import ORIGIN, list_batch_columns, tie_breakers
from dagster_adjunct.orchestration.operators.dead_letters import DEAD_LETTER_COLUMNS
from dagster_adjunct.orchestration.operators.lookups import (
    BEFORE_HISTORY,
    EARLY,
    NO_TIME,
    TableLookup,
)
from dagster_adjunct.orchestration.operators.stream_facts import declared_changes
from dagster_adjunct.orchestration.operators.updates import TableSend
from dagster_adjunct.orchestration.step import lookups
from dagster_adjunct.orchestration.step.event_times import number_by_partition
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch
from dagster_adjunct.orchestration.step.sent_rows import SentRows
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.bucketing.writer import check_readable
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.output_tables.batches import (
    CommittedBatch,
    OutputBatch,
    TableOutput,
    lake_number,
)
from dagster_adjunct.resources.output_tables.opening import open_output
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.streams.checked_reads import read_table
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
TIME_COUNTS = {BEFORE_HISTORY: "before_history", NO_TIME: "null_times", EARLY: "early"}
"""The counters of records by the columns that joins by time mark them with."""
_LETTER_IDENTITY = ("table", "kind", "key", "record")  # all but the problem


class BatchCounts:
    """What a batch counts, by name: the counters of its outputs and operators, descriptions of some
    records that fail an operator's check, and the metrics of its remote tables.
    """

    def __init__(self) -> None:
        self.counters: Counters = {}
        self.samples: dict[str, list[str]] = {}
        self.measured: dict[str, TableMetrics] = {}

    def count(self, name: str, counters: Mapping[str, int]) -> None:
        """Add to the counters of an output or an operator."""
        self.counters = add_counters(self.counters, {name: dict(counters)})

    def sample(self, operator: str, described: Sequence[str]) -> None:
        """Add descriptions of records that fail the check of an operator."""
        self.samples.setdefault(operator, []).extend(described)

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
        null are left out. If they are `sensitive`, errors show no value of them.
        """

    def add_answers(
        self, operator: str, frame: Frame, lookup: TableLookup, answers: pa.Table
    ) -> Frame:
        """Return all records with their answers, and MATCHED."""

    def add_unknown_answers(self, operator: str, frame: Frame, lookup: TableLookup) -> Frame:
        """Return the records with the columns that `add_answers` adds, all null and of the same
        types, for a dry run.
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
        """The name of the stream in its system: "name" of "system.name"."""
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

    def find_previous(self) -> AppendResult | None:
        """Return the result of this batch's earlier append; None if there was none."""
        try:
            return self.system.appended(self.name, self.producer, self.sequence)
        except (errors.StreamNotFoundError, errors.ConfigurationError):
            return None  # a custom system may not support this

    def ranges(self, result: AppendResult) -> Ranges:
        """Return the offsets of the records that were appended with this result."""
        system, name = split_stream_name(self.stream)
        ranges = {}
        for partition, start in result.first.items():
            ssp = SystemStreamPartition(system, name, partition)
            ranges[ssp] = OffsetRange(start, result.next[partition])
        return ranges


class Writes(Protocol[Frame]):
    """How records get out of an engine, and back from the streams that it has written."""

    def append(self, operator: str, frame: Frame, append: Append) -> AppendResult:
        """Append records to a stream."""

    def read(self, append: Append, **ranges: Any) -> Frame:
        """Return records that were appended."""

    def fetch(self, operator: str, frame: Frame, sources: Sources | None) -> pa.Table:
        """Return the records as an output table gets them: in order, with hidden columns, and with
        those of POSITION if there are `sources`.
        """

    def write(self, operator: str, frame: Frame, write: TableWrite) -> WriteResult:
        """Write records to a remote table."""


@dataclass(frozen=True, slots=True)
class _SentRecords:
    """What an operator has appended to a stream."""

    append: Append
    result: AppendResult


@dataclass(frozen=True, slots=True)
class _RefusedRecords:
    """The dead letters of what an operator has written to a table."""

    table: str = ""
    letters: Letters = ()


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
    _sent: dict[str, _SentRecords] = field(default_factory=dict)
    _refused: dict[str, _RefusedRecords] = field(default_factory=dict)

    # -- streams

    def send(
        self, operator: str, frame: Frame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        """Append records to a stream, which is created, or gets the columns of the records, if
        needed.

        A batch that was cut by retention is not appended again: its first append has more records.
        """
        append = self._begin_append(operator, stream)
        system = append.system
        is_cut = self.planned.inputs.intent.lost.cut
        evolves = system.capabilities.evolves
        sent: AppendResult | None = None
        if is_cut or evolves:
            sent = self.before_output(stream, append.find_previous)
        else:
            self.before_output(stream)
        schema = self.frames.schema(frame)
        changes = declared_changes(self.planned.app, stream)
        create_or_change = partial(
            system.create, append.name, schema=schema, key=key, partitions=partitions
        )
        if changes and evolves:
            create_or_change = partial(create_or_change, changes=changes)
        if sent is None:
            create_or_change()
            result = self.writes.append(operator, frame, append)
        elif is_cut:
            result = sent  # of all records that the batch began with
            self.frames.count(frame)  # counts upstream complete once their records are consumed
        else:
            # The first run may have sent before the columns changed: change them only if the append
            # is a repeat. Declared renames and removals come first: they tell which columns of the
            # first append these records still have.
            if changes:
                create_or_change()
            result = self.writes.append(operator, frame, append)
            create_or_change()
        self._sent[operator] = _SentRecords(append, result)
        counters = {"rows": result.rows, "duplicate_batches": int(result.duplicate)}
        self.counts.count(stream, counters)

    def _begin_append(self, operator: str, stream: str) -> Append:
        """Return the append of an operator's records to a stream, in this batch."""
        context = self.planned.context
        system = require_writer(self.planned.system_of(stream))
        # One snapshot for all requests: appending fails, and is retried, if the stream has changed.
        can = system.capabilities
        if can.evolves:
            system = require_writer(system.snapshot(split_stream_name(stream)[1]))
        producer = self.planned.producers[operator]
        # A system commits them under the producer's name, by which tools know the application;
        # further operators of a stream have names of their own, which would be other groups.
        is_main = producer == context.writer
        options = AppendOptions(
            consumed=self.planned.inputs.consumed if is_main else None,
            sources=self.planned.sources(operator) if can.keeps_positions else None,
            fence=context.fence,
        )
        return Append(system, stream, producer, self.planned.number, options)

    def read_sent(self, operator: str, frame: Frame, stream: str) -> Frame:
        """Return the records that the operator has sent, read back from the stream."""
        sent = self._sent[operator]
        options: dict[str, Any] = {}
        if sent.append.system.capabilities.keeps_positions:
            options["positions"] = True
        ranges = sent.append.ranges(sent.result)
        return self.writes.read(sent.append, ranges=ranges, **options)

    def send_dead_letters(
        self, operator: str, frame: Frame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        """Append rejected records to a stream, once per batch; if they were sent before, check that
        none is missing.
        """
        system = require_writer(self.planned.system_of(stream))
        writer = self.planned.context.writer
        append = Append(system, stream, writer, self.planned.number, AppendOptions())
        sent = append.find_previous()
        if sent is None:
            self.send(operator, frame, stream, key=key, partitions=partitions)
            return
        check_letters_sent(append, sent, self.frames.to_rows(frame), operator)
        self.counts.count(stream, {"rows": sent.rows, "duplicate_batches": 1})

    # -- output tables

    def commit(self, operator: str, frame: Frame, table: str) -> None:
        """Append records to an output table in one commit, unless it has this batch already.

        Raises TableNotFoundError for a table that was written and is gone or is another one.
        """
        planned = self.planned
        sent = SentRows.of(planned, operator, table)
        output = open_output(planned.app.output_tables[table].table)
        producer = planned.context.writer
        lake = lake_number(planned.context.lake.id)
        find = partial(output.find_batch, producer, planned.number, planned.clock, lake)
        found: CommittedBatch | None = self.before_output(table, find)
        if found is not None:
            self.frames.count(frame)  # counts upstream complete once their records are consumed
            counters = {"rows": found.rows or 0, "duplicate_batches": 1}
            self.counts.count(table, counters)
            self._remember_writer(output)
            return
        fence = planned.context.fence
        rows = sent.shape(self.writes.fetch(operator, frame, sent.sources))
        batch = OutputBatch(
            producer,
            planned.number,
            planned.clock,
            sent.columns(self.frames.schema(frame)),
            parts=lambda: [rows],
            replaces=sent.replaces(),
            before_commit=fence.check if fence is not None else lambda: None,
            lake=lake,
            check_first=self._check_first(output),
        )
        done = output.commit(batch)
        if rows.num_rows:
            self._remember_writer(output)
        counters = {"rows": rows.num_rows, "duplicate_batches": int(done.duplicate)}
        if sent.dropped:
            counters["dropped_tombstones"] = sent.dropped
        self.counts.count(table, counters)

    def _check_first(self, output: TableOutput) -> Callable[[bool], None]:
        """Return what checks that the batch may be the first one of a table."""
        context = self.planned.context

        def check(exists: bool) -> None:
            check_first_batch(context.lake, output, context.writer, exists=exists)

        return check

    def _remember_writer(self, output: TableOutput) -> None:
        """Remember that the table has rows of this application."""
        context = self.planned.context
        remember_writer(context.lake, output, context.writer, by=context.run)

    # -- remote tables

    def write(self, operator: str, frame: Frame, send: TableSend, *, sensitive: bool) -> None:
        """Write records to a remote table and keep its dead letters.

        Nothing is written in a replay to a table with on_replay="skip", nor by an operator whose
        records the table has (`PlannedBatch.unsent`).
        """
        self.before_output(send.table)
        planned = self.planned
        context = planned.context
        table = context.app.tables[send.table]
        is_replay = planned.inputs.consumed is None
        skips = is_replay and table.on_replay == "skip"
        if skips or operator in planned.unsent:
            # The table has these records, or will get them from the main position. If a replay left
            # marks, what the main position writes could look old.
            self._refused[operator] = _RefusedRecords(send.table)
            self.counts.count(send.table, {"skipped": self.frames.count(frame)})
            return
        update = send.update
        write = TableWrite(
            self._table_of_run(table),
            send.contract,
            send.on_null_key,
            tasks=planned.partitions_at(operator),
            source=" and ".join(planned.origins[operator].streams.values()),
            marking=build_marking(planned, operator, table, self.frames.names(frame)),
            typed=update is not None,
            remove=() if update is None else update.remove,
            args=send.args,
            dead_letters=send.dead_letters,
            sensitive=sensitive,
        )
        written = self.writes.write(operator, frame, write)
        self._refused[operator] = _RefusedRecords(send.table, written.letters)
        context.open_tables.forget(send.table)
        self.counts.measure(send.table, written.metrics, written.counters)

    def _table_of_run(self, table: AnyTable) -> AnyTable:
        """Return the table as this run may write it: within its rate, and by its fence."""
        context = self.planned.context
        of_run = context.open_tables.limit(context.as_known(table), self.frames.session)
        if context.fence is None:
            return of_run
        return of_run.with_fence(context.fence)

    def refused_records(self, operator: str) -> Frame:
        """Return the records that the table of the operator before this one rejected."""
        before = self.planned.operator_before(operator)
        refused = self._refused.get(before, _RefusedRecords())
        return self.frames.of_table(table_of_letters(refused.table, refused.letters))


@dataclass(frozen=True, slots=True)
class NoOutputs(Generic[Frame]):
    """Writes nothing, to find out whether a batch can be computed: `Outputs` of operators."""

    frames: Frames[Frame]

    def send(
        self, operator: str, frame: Frame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        pass

    def read_sent(self, operator: str, frame: Frame, stream: str) -> Frame:
        """Return the same records: nothing was written."""
        return frame

    def commit(self, operator: str, frame: Frame, table: str) -> None:
        pass

    def write(self, operator: str, frame: Frame, send: TableSend, *, sensitive: bool) -> None:
        pass

    def refused_records(self, operator: str) -> Frame:
        """Return no records: nothing was written that a table could reject."""
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
        """Return the records with the columns looked up in a table, and MATCHED. Answers are
        recorded, so a repeated batch gets the same.
        """
        context = self.planned.context
        frames = self.frames
        frame = frames.materialize(operator, frame)
        sensitive = bool(self.planned.sensitive(operator, frames.names(frame)))
        asked = lookups.describe_lookup(lookup, frames.columns(frame))
        recorded = self.planned.recorded_answers(operator, asked)
        table = context.as_known(context.app.tables[lookup.table])
        reader = context.open_tables.reader(table, context.spark, frames.session)
        keys = frames.distinct_keys(operator, frame, lookup, sensitive=sensitive)
        answers, metrics = lookups.answer_keys(
            keys, lookup, recorded, reader, frames.tasks_at(operator)
        )
        self.counts.measure(lookup.table, metrics, metrics.counts())
        return frames.add_answers(operator, frame, lookup, answers)


def _epochs_of(sources: Sources) -> dict[int, int]:
    """Return the epoch of each partition that the batch reads."""
    epochs = {}
    for span in sources.ranges:
        epochs[SystemStreamPartition.parse(span.source).partition] = span.epoch
    return epochs


def add_positions(records: DataFrame, sources: Sources | None) -> DataFrame:
    """Return the records with the columns of POSITION; without them if `sources` is None, for an
    output that does not keep them.

    Records that were read back from another output of this batch have the columns already: their
    positions in the input.
    """
    if sources is None:
        return records.drop(*POSITION)
    if SOURCE in records.columns:
        return records
    return records.withColumns(
        {
            SOURCE: F.concat(F.lit(f"{sources.stream}."), F.col(PARTITION).cast("string")),
            SOURCE_OFFSET: F.col(OFFSET),
            SOURCE_EPOCH: number_by_partition(_epochs_of(sources)).cast("int"),
            READER: F.lit(sources.reader),
        }
    )


def prepare_arrow_append(records: pa.Table, sources: Sources | None) -> pa.Table:
    """Return records in memory as an output stream gets them: in order, and with the columns of
    POSITION if there are `sources`, as for `add_positions`.
    """
    order = (PARTITION, OFFSET, *tie_breakers(records.column_names))
    unsent = {*order, *list_batch_columns(records.column_names)}
    if sources is None:
        unsent.update(POSITION)
    rows = with_positions(records, sources)
    return rows.select([name for name in rows.column_names if name not in unsent])


def with_positions(records: pa.Table, sources: Sources | None) -> pa.Table:
    """Return records in memory in order; with the columns of POSITION, if there are `sources`."""
    order = (PARTITION, OFFSET, *tie_breakers(records.column_names))
    rows = records.sort_by([(name, "ascending") for name in order])
    if sources is not None and SOURCE not in rows.column_names:
        partitions = rows.column(PARTITION)
        names = pc.binary_join_element_wise(sources.stream, partitions.cast(pa.string()), ".")
        epochs = epochs_of_partitions(_epochs_of(sources), partitions)
        rows = (
            rows.append_column(SOURCE, names)
            .append_column(SOURCE_OFFSET, rows.column(OFFSET))
            .append_column(SOURCE_EPOCH, epochs)
            .append_column(READER, pa.repeat(pa.scalar(sources.reader), rows.num_rows))
        )
    return rows


@contextmanager
def naming_records(system: StreamWriter, stream: str, rows: pa.Table) -> Iterator[None]:
    """Make the error for a value that can't be stored describe its record, as in tasks, instead
    of a row number: the `rows` are checked again, by what raises that error.
    """
    try:
        yield
    except SchemaMismatchError as error:
        schema = system.info(stream).schema
        if error.row is not None and schema is not None:
            sent = schema.select([name for name in schema.names if name in rows.column_names])
            what = f"stream {stream!r}"
            check_readable(rows.select(sent.names), sent, what, stream=f"{system.name}.{stream}")
        raise


def epochs_of_partitions(epochs: Mapping[int, int], partitions: pa.ChunkedArray) -> pa.Array:
    """Return the epoch of each of these partitions as int, 0 for those that `epochs` does not
    list.
    """
    numbers = [*epochs, *pc.unique(partitions).to_pylist()]
    by_partition = np.zeros(max(numbers, default=0) + 1, np.int32)
    for partition, epoch in epochs.items():
        by_partition[partition] = epoch
    return pa.array(by_partition[partitions.to_numpy()])


def table_of_letters(table: str, letters: Letters) -> pa.Table:
    """Return dead letters as records of a stream, at the positions of the originals; at offset 0 of
    partition 0 where a letter has no position.
    """
    rows = []
    for letter in letters:
        timestamp = letter.get("timestamp")
        row = {
            PARTITION: letter.get("partition", 0),
            OFFSET: letter.get("offset", 0),
            TIMESTAMP: datetime.fromisoformat(timestamp) if timestamp else None,
            TOMBSTONE: False,
            EPOCH: letter.get("epoch") or 0,
        }
        about = {**letter, "table": table}
        rows.append(row | {name: about[name] for name in DEAD_LETTER_COLUMNS})
    kinds = {**dict(RECORD_META_COLUMNS), **DEAD_LETTER_COLUMNS}
    schema = pa.schema([(name, arrow_type(kind)) for name, kind in kinds.items()])
    return pa.Table.from_pylist(rows, schema)


def check_letters_sent(append: Append, sent: AppendResult, letters: Letters, what: str) -> None:
    """Raise TableError if a retried batch rejects records that its first run did not send as dead
    letters. `sent` is the append of the first run, `letters` what the retry rejects; `what` names
    the operator.

    A batch appends to a stream only once, so these records would be lost.
    """
    ranges = append.ranges(sent)
    present = set()
    if ranges:
        for letter in read_table(append.system, ranges).to_pylist():
            present.add(_identify(letter))
    lost = [letter for letter in letters if _identify(letter) not in present]
    if lost:
        first = lost[0]
        raise errors.TableError(
            f"{what}: this batch was retried, and table {first['table']} rejects"
            f" {len(lost)} record(s) that are not among the dead letters of its first run; the"
            f" first has the key {first['key']}.",
            "Correct the records or the table, then run the batch again.",
            table=first["table"],
        )


def _identify(letter: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values by which a dead letter is told from others."""
    return tuple(letter[name] for name in _LETTER_IDENTITY)


def build_marking(
    planned: PlannedBatch, operator: str, table: AnyTable, columns: Collection[str]
) -> Marking | None:
    """Return how a batch marks its records in a remote table with `idempotent` or `newest_by`; None
    for other tables.

    A mark says from which offset of which source a row was last written, so that the table can
    ignore repeats and older records. `columns` are those of the records of the `operator` that
    writes them. Sources are named after this writer, so that two applications that write one table
    from one stream keep separate marks. A recreated stream gets new names too. So does a bounded
    replay, which reads outside the main position, unless the table has on_replay="skip".
    """
    if not table.idempotent and table.newest_by is None:
        return None
    inputs = planned.inputs
    writer = planned.writers[operator]
    per_epoch = table.idempotent and table.on_replay == "apply"
    sources = {}
    for ssp in inputs.intent.ranges:
        name = f"{writer}/{ssp}"
        identity = inputs.identities.get(ssp.qualified_stream)
        if identity:
            name += f"@{identity[:8]}"
        epoch = 0
        if per_epoch:
            epoch = inputs.intent.epochs.get(ssp, 0)
        is_replay = inputs.consumed is None
        if epoch and is_replay:
            name += f"~{epoch}"
            epoch = 0
        sources[str(ssp)] = MarkedSource(name, epoch)
    prefix = f"{writer}/"
    is_of_one_input = planned.sources(operator) is not None
    if SOURCE in columns and is_of_one_input:  # records read back from an output stream
        return Marking((SOURCE,), SOURCE_OFFSET, sources, prefix=prefix)
    if ORIGIN in columns:  # records of several streams
        return Marking((ORIGIN, PARTITION), OFFSET, sources, prefix=prefix)
    stream = planned.stream_of(operator) or ""
    return Marking((PARTITION,), OFFSET, sources, stream=stream, prefix=prefix)
