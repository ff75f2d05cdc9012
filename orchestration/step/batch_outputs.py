"""What a batch needs for its outputs: where records come from, marks against repeats, dead
letters, state tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.unbounded.local_table import LocalTableWriter, StateSpec
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.columns import (
    BATCH_ONLY,
    ORIGIN,
    OnNullKey,
    tie_breakers,
)
from dagster_adjunct.orchestration.operators.dead_letters import DEAD_LETTER_COLUMNS
from dagster_adjunct.orchestration.operators.event_time import Watermarks
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.orchestration.step.event_times import number_by_partition
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.bucketing.files import GENERATION_COLUMN, bucketed_frame
from dagster_adjunct.resources.bucketing.writer import check_readable
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc
from dagster_adjunct.resources.reports import sum_counters
from dagster_adjunct.resources.schemas.schema import Schema, arrow_type, named_column
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
    AppendResult,
    OffsetRange,
    Sources,
    StreamSystem,
    StreamWriter,
    SystemStreamPartition,
)
from dagster_adjunct.resources.tables.arrow import MarkedSource, Marking

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext

NEW = "__new"
"""The boolean column of a state table's rows that says whether this batch has written the row."""
Letters = Sequence[dict[str, Any]]
"""Dead letters: rejected records, each with DEAD_LETTER_COLUMNS and the position of the
original.
"""
_LETTER_IDENTITY = ("table", "kind", "key", "record")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the records of an operator come from.

    - `streams`: the streams that they come from, by the operator where they enter the graph: an
      input, or an output that the graph continues from. An operator that assigns new positions
      counts as a stream of its own name.
    - `made_of`: the one input stream that all records are made of; None if there are several.
    - `positions`: the stream that their positions are in, or the operator that assigned these; None
      if several.
    """

    streams: Mapping[str, str]
    made_of: str | None
    positions: str | None


def trace_origins(
    operators: Iterable[Operator], system_of: Callable[[str], StreamSystem]
) -> dict[str, Origin]:
    """Return the origin of the records that leave each operator, by operator.

    After an output stream, records continue with positions in that stream if its system
    `appends_alone`: then they are read back from it.
    """
    result: dict[str, Origin] = {}
    for operator in operators:
        before = [result[source] for source in operator.inputs]
        held_in = {origin.positions for origin in before}
        positions = held_in.pop() if len(held_in) == 1 else None
        streams: Mapping[str, str]
        if len(before) == 1:  # shared: after a merge of many inputs there may be many
            streams = before[0].streams
        else:
            streams = {
                begun: stream for origin in before for begun, stream in origin.streams.items()
            }
        made_of = before[0].made_of if len(streams) == 1 else None
        spec = operator.spec
        if spec.assigns_positions:
            streams, made_of, positions = {operator.id: operator.id}, None, operator.id
        elif spec.reads is not None:
            streams, made_of, positions = {operator.id: spec.reads}, spec.reads, spec.reads
        elif spec.role == "output" and spec.writes is not None:
            streams = {operator.id: spec.writes}
            system = system_of(spec.writes)
            positions = (
                spec.writes
                if isinstance(system, StreamWriter) and system.appends_alone
                else positions
            )
        result[operator.id] = Origin(streams, made_of, positions)
    return result


def output_schema(frame: DataFrame) -> Schema:
    """Return the columns of records as an output stream gets them."""
    return Schema.from_spark(
        frame.select(
            *[named_column(name) for name in frame.columns if not name.startswith("__")]
        ).schema
    )


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
    present = (
        set()
        if there is None
        else {tuple(row[name] for name in _LETTER_IDENTITY) for row in there.to_pylist()}
    )
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


def name_producers(app: Application, writer: str) -> dict[str, str]:
    """Return the name under which each operator appends to its stream: `writer`; for a stream's
    second operator `writer#2`, and so on.
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


@dataclass(slots=True)
class StateTable:
    """A stateful operator's table in one batch.

    `kept` says whether writes are committed (not in a bounded replay or dry run), `real` whether
    the batch reads records (not in a dry run). `watermarks` are those by which rows expire.
    """

    context: StepContext
    writes: LocalTableWriter
    spec: StateSpec
    watermarks: Watermarks
    kept: bool
    real: bool
    counted: dict[str, int] = field(default_factory=dict)

    def frame(self) -> DataFrame:
        """Return the unexpired rows as of the start of the batch, in their buckets, so that no
        exchange is needed.
        """
        if self.spec.append_only:
            return self._scan_appended(sends=False).drop(NEW)
        return self._keep_unexpired(self.writes.reader(sends=False).frame(self.context.spark))

    def with_written(self) -> DataFrame:
        """Return the rows of `frame` and those that the batch has written, marked by the boolean
        `__new`; no exchange is needed. For append-only tables."""
        return self._scan_appended(sends=True)

    def write(self, rows: DataFrame, *, partitioned: bool = False) -> None:
        """Write rows of the table's columns, with `__tombstone` if some delete; they are committed
        with the batch.

        `partitioned` says that they are in the table's partitions already. A bounded replay writes
        nothing.
        """
        if TOMBSTONE not in rows.columns:
            rows = rows.withColumn(TOMBSTONE, F.lit(False))
        rows = rows.select(*map(named_column, (*self.spec.schema.names, TOMBSTONE)))
        if self.kept:
            done = self.writes.send(rows, order_by=(), partitioned=partitioned)
            if self.spec.append_only and done.get("superseded"):
                raise errors.SchemaMismatchError(
                    f"state {self.writes.name!r}: {done['superseded']} record(s) of the batch have"
                    " the same position as another one, and only one of them would be kept.",
                    "An operator before this one makes several unordered records of one, as explode"
                    " does in map, select or with_columns, or a function: use flat_map there.",
                    dataset=self.writes.name,
                )
            self.counted = sum_counters(self.counted, done)
        elif self.real:
            rows.count()  # counts upstream complete only once their records are consumed

    def commit(self) -> None:
        """Commit what was written, and drop rows that expire with this batch."""
        _, duplicate = self.writes.commit(self.watermarks.after)
        self.counted["duplicate_batches"] = int(duplicate)

    def _scan_appended(self, *, sends: bool) -> DataFrame:
        """Return the unexpired rows with NEW, from a plain scan of the files: each key was
        written once.
        """
        sealed = self.writes.reader(sends=sends).sealed
        what = f"state {self.writes.name!r}"
        rows = bucketed_frame(
            self.context.spark(), self.context.lake.store, what, sealed.layout, sealed.generations
        )
        # Not a literal: Spark forgets the partitioning of a relation that it knows to be empty, and
        # adds an exchange.
        generation, sent = F.col(GENERATION_COLUMN), self.writes.sent
        new = (generation.isin(*sent) if sent else generation < F.lit(0)).alias(NEW)
        return self._keep_unexpired(rows.select(*map(named_column, self.spec.schema.names), new))

    def _keep_unexpired(self, rows: DataFrame) -> DataFrame:
        before = self.watermarks.before
        return (
            rows if before is None else rows.where(named_column(self.spec.expires) > F.lit(before))
        )


def prepare_table_rows(
    frame: DataFrame, key: tuple[str, ...], deleted: str | None, on_null_key: OnNullKey
) -> tuple[DataFrame, Callable[[], int] | None]:
    """Return the records with `__tombstone`, also where the SQL condition `deleted` is true; and a
    function that, once they are computed, returns how many records with a null key were skipped
    (None if these are not skipped).
    """
    from pyspark.sql import Observation

    if deleted is not None:
        frame = frame.withColumn(
            TOMBSTONE,
            F.coalesce(F.col(TOMBSTONE), F.lit(False)) | F.coalesce(F.expr(deleted), F.lit(False)),
        )
    if on_null_key == "fail":
        return frame, None  # the writer rejects them
    lacks = _lacks_key(key)
    observed = Observation()
    watched = frame.observe(
        observed, F.coalesce(F.sum(lacks.cast("long")), F.lit(0)).alias("null_keys")
    )
    return watched.where(~lacks), lambda: int(observed.get["null_keys"])


def _lacks_key(key: tuple[str, ...]) -> Column:
    return reduce(or_, [named_column(name).isNull() for name in key])


def locate_null_key(
    error: errors.NullKeyError,
    operator: str,
    rows: DataFrame,
    key: tuple[str, ...],
    stream: str | None,
) -> errors.NullKeyError:
    """Return the error with the operator, the first record without a key, and what to do about
    such records.
    """
    first = rows.where(_lacks_key(key)).select(PARTITION, OFFSET).orderBy(PARTITION, OFFSET).first()
    where = f"{stream}." if stream is not None else "partition "
    place = "" if first is None else f"; the first is {where}{first[0]} at offset {first[1]}"
    problem = f"{operator}: {error.problem.rstrip('.')}{place}."
    step = 'Filter them out, or skip and count them: send_to(…, on_null_key="skip").'
    return errors.NullKeyError(
        problem, step, dataset=error.dataset, table=error.table, operator=operator
    )
