"""The tables that Spark keeps for an application: state tables of its operators, and local tables.

What a batch writes to them is committed at its end, after all other outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.dataset import LocalTable
from dagster_adjunct.assets.generation import SPARK, SPARK_ONE_TASK
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.local_table import (
    LocalTableWriter,
    StateSpec,
    WritingBatch,
    declare_state_dataset,
    validate_state,
)
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import as_unbounded
from dagster_adjunct.orchestration.batch_log.batch_log import Counters
from dagster_adjunct.orchestration.operators.columns import OnNullKey, tie_breakers
from dagster_adjunct.orchestration.operators.operator import Watermarks
from dagster_adjunct.orchestration.operators.stream_facts import RECORDED
from dagster_adjunct.orchestration.operators.updates import LocalSend
from dagster_adjunct.orchestration.step.context import StepContext
from dagster_adjunct.orchestration.step.event_times import BatchTimes
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.bucketing.files import GENERATION_COLUMN, bucketed_frame
from dagster_adjunct.resources.errors import NullKeyError, ZoneRulesError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.reports import sum_counters
from dagster_adjunct.resources.schemas.schema import named_column, value_column
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

NEW = "__new"
"""The boolean column of a state table's rows that says whether this batch has written the row."""


@dataclass(slots=True)
class StateTable:
    """A stateful operator's table in one batch.

    `stores_rows` says whether writes are committed (not in a bounded replay or dry run),
    `reads_records` whether the batch reads any (not in a dry run). `watermarks` are those by which
    rows expire.
    """

    context: StepContext
    declared: LocalTable
    writes: LocalTableWriter
    spec: StateSpec
    watermarks: Watermarks
    stores_rows: bool
    reads_records: bool
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
        if self.stores_rows:
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
        elif self.reads_records:
            rows.count()  # counts upstream complete only once their records are consumed

    def commit(self) -> None:
        """Commit what was written, and drop rows that expire with this batch."""
        is_repeated = self.writes.commit(self.watermarks.after).is_repeated
        self.counted["duplicate_batches"] = int(is_repeated)

    def _scan_appended(self, *, sends: bool) -> DataFrame:
        """Return the unexpired rows with NEW, from a plain scan of the files: each key was
        written once.
        """
        sealed = self.writes.reader(sends=sends).sealed
        what = f"state {self.writes.name!r}"
        rows = bucketed_frame(
            self.context.spark(), self.context.lake.store, what, sealed.layout, sealed.generations
        )
        generation = F.col(GENERATION_COLUMN)
        # False, but not as a literal: Spark forgets the partitioning of a relation that it knows to
        # be empty, and adds an exchange.
        if self.writes.sent:
            is_new = generation.isin(*self.writes.sent)
        else:
            is_new = generation < F.lit(0)
        own = [named_column(name) for name in self.spec.schema.names]
        return self._keep_unexpired(rows.select(*own, is_new.alias(NEW)))

    def _keep_unexpired(self, rows: DataFrame) -> DataFrame:
        """Return the rows that had not expired before the batch."""
        before = self.watermarks.before
        if before is None:
            return rows
        return rows.where(named_column(self.spec.expires) > F.lit(before))


@dataclass(frozen=True, slots=True)
class TableWriters:
    """Opens writers of local tables and state tables; `opened` closes them, which discards what is
    not committed.
    """

    planned: PlannedBatch
    opened: ExitStack

    def open(self, dataset: LocalTable, pinned: object, application: str) -> LocalTableWriter:
        """Return a writer that adds to a table's version in the batch's intent, `pinned`, if it has
        one.
        """
        context = self.planned.context
        inputs = self.planned.inputs
        sealed = pinned.sealed if isinstance(pinned, VersionReader) else None
        batch = WritingBatch(application, self.planned.number, context.run, inputs.intent.lost.cut)
        tasks = SPARK_ONE_TASK if inputs.few else SPARK
        return self.opened.enter_context(
            LocalTableWriter(context.lake, dataset, sealed, batch, tasks)
        )


@dataclass(frozen=True, slots=True)
class SparkState:
    """The state of a batch's operators: `State` of operators."""

    planned: PlannedBatch
    times: BatchTimes
    writers: TableWriters
    tables: dict[str, StateTable] = field(default_factory=dict)

    def watermarks(self, name: str) -> Watermarks:
        """Return the watermarks of the stateful operator of this name, before and after the
        batch.
        """
        return self.times.watermarks(name)

    def table(self, name: str, spec: StateSpec, *, of: str | None = None) -> StateTable:
        """Return the state table of this name, opened once; its rows expire by the watermark of the
        operator `of`, by default the one of that name.
        """
        if name not in self.tables:
            self.tables[name] = self._open(name, spec, self.watermarks(of or name))
        return self.tables[name]

    def _open(self, name: str, spec: StateSpec, watermarks: Watermarks) -> StateTable:
        """Return a state table as the batch reads and writes it; in a dry run, check its
        declaration.
        """
        context = self.planned.context
        inputs = self.planned.inputs
        dataset = declare_state_dataset(context.writer, name, spec)
        if self.planned.is_dry_run:
            validate_state(context.lake, dataset)
        writer = self.writers.open(dataset, inputs.views.get(dataset.name), context.writer)
        return StateTable(
            context,
            dataset,
            writer,
            spec,
            watermarks,
            stores_rows=inputs.consumed is not None,
            reads_records=not self.planned.is_dry_run,
        )

    def check_zone_rules(self, name: str, zone: str, outdated: Column) -> None:
        """Raise ZoneRulesError, in a dry run, for stored rows that have not expired and to which
        the present rules of a zone give other times.

        If the rows were stored under other rules, a Spark job looks for them by the condition
        `outdated`.
        """
        if self.planned.is_dry_run:
            _check_zone_rules(self.planned.context, self.tables[name], zone, outdated)

    def commit(self, before_output: Callable[[str], Any]) -> Counters:
        """Commit the state tables, each after a call of `before_output` with its name, unless the
        batch is a bounded replay; return their counters.
        """
        counters: Counters = {}
        for table in self.tables.values():
            if table.stores_rows:
                before_output(table.writes.name)
                table.commit()
                counters[table.writes.name] = table.counted
        return counters


def _check_zone_rules(context: StepContext, state: StateTable, zone: str, outdated: Column) -> None:
    """Raise ZoneRulesError if rows are stored that were computed by other rules of the zone, and
    for which the condition `outdated` is true: by the present rules they have other times. Expired
    rows do not count.
    """
    _, manifest = DatasetLog(context.lake, state.writes.name).read()
    if manifest is None or manifest.version is None:
        return
    stored_rules = manifest.declaration.zone_rules
    if stored_rules == state.spec.zone_rules:
        return
    last_write = as_unbounded(manifest).written
    rows = VersionReader(context.lake.store, manifest.name, manifest.version).frame(context.spark)
    if last_write is not None and last_write.watermark is not None:
        rows = rows.filter(named_column(state.spec.expires) > F.lit(last_write.watermark))
    if not rows.filter(outdated).limit(1).collect():
        return
    # Rules are described by their version and a digest.
    was = stored_rules.split()[0]
    now = state.spec.zone_rules.split()[0]
    raise ZoneRulesError(
        f"state {manifest.name!r} has open windows that were computed by the rules {was} of the"
        f" zone {zone!r}, and by the present ones ({now}) they start or end at other times.",
        f"Run with the rules {was} until these windows have closed, then change to others. Or"
        " start the state over, without the records in open windows: adjunct dataset delete"
        f" {manifest.name} --reason ….",
        dataset=manifest.name,
        zone=zone,
        stored_rules=was,
        python_rules=now,
    )


@dataclass(frozen=True, slots=True)
class WrittenLocalTables:
    """The local tables that a batch writes: `LocalTables` of operators."""

    planned: PlannedBatch
    writers: TableWriters
    counters: Counters = field(default_factory=dict)
    _opened: dict[str, LocalTableWriter] = field(default_factory=dict)

    def open(self, dataset: LocalTable) -> LocalTableWriter:
        """Return the batch's writer of a local table."""
        if dataset.name not in self._opened:
            pinned = self.planned.inputs.views.get(dataset.name)
            self._opened[dataset.name] = self.writers.open(dataset, pinned, self.planned.app.name)
        return self._opened[dataset.name]

    def write(self, operator: str, frame: DataFrame, send: LocalSend) -> None:
        """Write the last record of each key to a local table, and count; a replay writes only what
        its own joins read.
        """
        counted = self.counters.setdefault(
            send.table, {"rows": 0, "deleted": 0, "duplicate_batches": 0}
        )
        replays = self.planned.inputs.consumed is None
        if replays:
            counted["replayed_batches"] = 1
            if not self._is_read_in_replays(send.table):
                return
        done = self._send(operator, frame, send)
        if not replays:
            self.counters[send.table] = sum_counters(counted, done)

    def _is_read_in_replays(self, table: str) -> bool:
        """Whether a replay of recorded versions joins what the batch sends to a table."""
        joined = self.planned.context.plan.tables_joined_after_sends()
        return self.planned.reading == RECORDED and table in joined

    def _send(self, operator: str, frame: DataFrame, send: LocalSend) -> dict[str, int]:
        """Send records to a local table and return what was counted. Raises NullKeyError, with the
        first record that has no key.
        """
        dataset = self.planned.app.dataset(send.table)
        assert isinstance(dataset, LocalTable), "the planner checks what operators send to"
        key = dataset.key_sources
        prepared = prepare_table_rows(frame, key, send.deleted, send.on_null_key)
        order = (PARTITION, OFFSET, *tie_breakers(frame.columns))
        columns = []
        for name in dataset.stored.names:
            columns.append(value_column(frame.columns, dataset.source_of(name)).alias(name))
        try:
            done = self.open(dataset).send(
                prepared.rows.select(*columns, *map(named_column, (TOMBSTONE, *order))),
                order_by=order,
                partitioned=self.planned.is_partitioned(operator),
            )
        except NullKeyError as error:
            stream = self.planned.stream_of(operator)
            raise locate_null_key(error, operator, prepared.rows, key, stream) from error
        if prepared.count_null_keys is None:
            return done
        return {**done, "null_keys": prepared.count_null_keys()}

    def commit(self, before_output: Callable[[str], Any]) -> Counters:
        """Commit the tables that were written, each after a call of `before_output` with its name,
        unless the batch is a bounded replay; return their counters.
        """
        if self.planned.inputs.consumed is not None:
            for table, writer in self._opened.items():
                is_written = table in self.counters  # others were opened for joins
                if is_written:
                    before_output(table)
                    is_repeated = writer.commit().is_repeated
                    self.counters[table]["duplicate_batches"] = int(is_repeated)
        return self.counters


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """Records for a local table; `count_null_keys` returns, once they are computed, how many with a
    null key were skipped. It is None if these are not skipped.
    """

    rows: DataFrame
    count_null_keys: Callable[[], int] | None = None


def prepare_table_rows(
    frame: DataFrame, key: tuple[str, ...], deleted: str | None, on_null_key: OnNullKey
) -> PreparedRows:
    """Return the records as a local table with this `key` gets them: `__tombstone` is true also
    where the SQL condition `deleted` is.

    With `on_null_key` "skip", records without a key are left out and counted; else the writer
    rejects them.
    """
    from pyspark.sql import Observation

    if deleted is not None:
        is_tombstone = F.coalesce(F.col(TOMBSTONE), F.lit(False))
        is_deleted = F.coalesce(F.expr(deleted), F.lit(False))
        frame = frame.withColumn(TOMBSTONE, is_tombstone | is_deleted)
    if on_null_key == "fail":
        return PreparedRows(frame)  # the writer rejects them
    lacks_key = _lacks_key(frame.columns, key)
    observed = Observation()
    count = F.coalesce(F.sum(lacks_key.cast("long")), F.lit(0)).alias("null_keys")
    watched = frame.observe(observed, count)
    return PreparedRows(watched.where(~lacks_key), lambda: int(observed.get["null_keys"]))


def _lacks_key(names: Collection[str], key: tuple[str, ...]) -> Column:
    """Return the condition that a part of a record's key is null."""
    return reduce(or_, [value_column(names, name).isNull() for name in key])


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
    lacking = rows.where(_lacks_key(rows.columns, key))
    first = lacking.select(PARTITION, OFFSET).orderBy(PARTITION, OFFSET).first()
    place = ""
    if first is not None:
        partition, offset = first
        where = f"partition {partition}" if stream is None else f"{stream}.{partition}"
        place = f"; the first is {where} at offset {offset}"
    problem = f"{operator}: {error.problem.rstrip('.')}{place}."
    step = 'Filter them out, or skip and count them: send_to(…, on_null_key="skip").'
    return errors.NullKeyError(
        problem, step, dataset=error.dataset, table=error.table, operator=operator
    )
