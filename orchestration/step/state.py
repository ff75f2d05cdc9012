"""Local tables and state tables of one batch: what it writes to them, and what its joins read of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.local_table import (
    LocalTableWriter,
    StateSpec,
    WritingBatch,
    columns_of_local_table,
    declare_state_dataset,
    state_dataset_name,
)
from dagster_adjunct.assets.writing.generation import SPARK, SPARK_ONE_TASK
from dagster_adjunct.orchestration.batch_log.batch_log import Counters
from dagster_adjunct.orchestration.operators.columns import OnNullKey, tie_breakers
from dagster_adjunct.orchestration.operators.event_time import Watermarks
from dagster_adjunct.orchestration.operators.stream_facts import RECORDED
from dagster_adjunct.resources.bucketing.files import GENERATION_COLUMN, bucketed_frame
from dagster_adjunct.resources.common import sum_counters
from dagster_adjunct.resources.errors import NullKeyError, SchemaMismatchError
from dagster_adjunct.resources.schemas.column_sql import F, named_column
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext

NEW = "__new"


def iter_state_names(context: StepContext) -> Iterator[str]:
    """Yield the names of the datasets that hold the state of the application's operators."""
    for operator in context.app.operators:
        for name in operator.spec.states:
            yield state_dataset_name(context.writer, name)


@dataclass(slots=True)
class StateTable:
    """A table of state in one batch.

    `kept` says whether writes are committed, `real` whether any records are read (not in a dry run).
    """

    context: StepContext
    writes: LocalTableWriter
    spec: StateSpec
    watermarks: Watermarks
    kept: bool
    real: bool
    counted: dict[str, int] = field(default_factory=dict)

    def frame(self) -> DataFrame:
        """Return the unexpired rows as of the start of the batch, in their buckets, so that no exchange is needed."""
        if self.spec.append_only:
            return self._scan_appended(sends=False).drop(NEW)
        return self._keep_unexpired(self.writes.reader(sends=False).frame(self.context.spark))

    def with_written(self) -> DataFrame:
        """Return the rows of `frame` and those that the batch has written, marked by the boolean `__new`; no exchange
        is needed. For append-only tables."""
        return self._scan_appended(sends=True)

    def write(self, rows: DataFrame, *, partitioned: bool = False) -> None:
        """Write rows of the table's columns, with `__tombstone` if some delete; they are committed with the batch.

        `partitioned` says that they are in the table's partitions already. A bounded replay writes nothing.
        """
        if TOMBSTONE not in rows.columns:
            rows = rows.withColumn(TOMBSTONE, F.lit(False))
        rows = rows.select(*map(named_column, (*self.spec.schema.names, TOMBSTONE)))
        if self.kept:
            done = self.writes.send(rows, order_by=(), partitioned=partitioned)
            if self.spec.append_only and done.get("superseded"):
                raise SchemaMismatchError(
                    f"state {self.writes.name!r}: {done['superseded']} record(s) of the batch have the same position "
                    "as another one, and only one of them would be kept.",
                    "An operator before this one makes several unordered records of one, as explode does in map, "
                    "select or with_columns, or a function: use flat_map there.",
                    dataset=self.writes.name,
                )
            self.counted = sum_counters(self.counted, done)
        elif self.real:
            rows.count()  # runs the counts of these records

    def commit(self) -> None:
        """Commit what was written, and drop rows that expire with this batch."""
        _, duplicate = self.writes.commit(self.watermarks.after)
        self.counted["duplicate_batches"] = int(duplicate)

    def _scan_appended(self, *, sends: bool) -> DataFrame:
        """Return the rows as scanned: each key was written once."""
        sealed = self.writes.reader(sends=sends).sealed
        what = f"state {self.writes.name!r}"
        rows = bucketed_frame(self.context.spark(), self.context.lake.store, what, sealed.layout, sealed.generations)
        # Not a literal: Spark forgets the partitioning of a relation that it knows to be empty, and adds an exchange.
        generation, sent = F.col(GENERATION_COLUMN), self.writes.sent
        new = (generation.isin(*sent) if sent else generation < F.lit(0)).alias(NEW)
        return self._keep_unexpired(rows.select(*map(named_column, self.spec.schema.names), new))

    def _keep_unexpired(self, rows: DataFrame) -> DataFrame:
        before = self.watermarks.before
        return rows if before is None else rows.where(named_column(self.spec.expires) > F.lit(before))


class LocalTables:
    """The local tables and state tables of one batch; what is not committed is discarded by `close`.

    A bounded replay commits nothing to them. In a replay of recorded versions, joins still read what the batch would
    write. `stream_of` returns the stream that holds the positions of an operator's records.
    """

    def __init__(self, context: StepContext, inputs: BatchInputs, stream_of: Callable[[str], str | None]) -> None:
        self._context, self._inputs, self._stream_of = context, inputs, stream_of
        self._stack = ExitStack()
        self._states: dict[str, StateTable] = {}
        self._writes: dict[str, LocalTableWriter] = {}
        self._counters: Counters = {}

    def state(self, name: str, spec: StateSpec, watermarks: Watermarks) -> StateTable:
        """Return the state table of this name."""
        if name not in self._states:
            writer, inputs = self._context.writer, self._inputs
            dataset = declare_state_dataset(writer, name, spec)
            writes = self._open(dataset, inputs.states.get(dataset.name), writer)
            kept = inputs.consumed is not None
            self._states[name] = StateTable(self._context, writes, spec, watermarks, kept, inputs.intent.batch > 0)
        return self._states[name]

    def reader(self, table: str) -> VersionReader:
        """Return a reader of the table at the version of the batch's intent, plus what the batch has sent so far."""
        return self._of(table).reader()

    def send(
        self,
        operator: str,
        frame: DataFrame,
        table: str,
        *,
        deleted: str | None,
        on_null_key: OnNullKey,
        partitioned: bool,
    ) -> None:
        """Write the last record of each key; it is committed, and counted, at the end of the batch."""
        counted = self._counters.setdefault(table, {"rows": 0, "deleted": 0, "duplicate_batches": 0})
        if self._inputs.consumed is None:
            counted["replayed_batches"] = 1
            if self._inputs.intent.reading != RECORDED or table not in self._context.plan.tables_met_after_sends():
                return
        dataset = self._context.app.dataset(table)
        rows, null_keys = prepare_table_rows(frame, dataset.key, deleted, on_null_key)
        names = columns_of_local_table(dataset).names
        order = (PARTITION, OFFSET, *tie_breakers(frame))
        try:
            done = self._of(table).send(
                rows.select(*map(named_column, (*names, TOMBSTONE, *order))),
                order_by=order,
                partitioned=partitioned,
            )
        except NullKeyError as error:
            raise _locate_null_key(error, operator, rows, dataset.key, self._stream_of(operator)) from error
        if self._inputs.consumed is None:
            return
        if null_keys is not None:
            done["null_keys"] = null_keys()
        self._counters[table] = sum_counters(counted, done)

    def commit(self, before_commit: Callable[[str], None]) -> Counters:
        """Commit each table once for the batch, state tables last; return the counters by dataset."""
        counters = self._counters
        if self._inputs.consumed is None:
            return counters
        for table, writes in self._writes.items():
            if table in counters:
                before_commit(table)
                _, duplicate = writes.commit()
                counters[table]["duplicate_batches"] = int(duplicate)
        for state in self._states.values():
            before_commit(state.writes.name)
            state.commit()
            counters[state.writes.name] = state.counted
        return counters

    def close(self) -> None:
        """Discard what is not committed."""
        self._stack.close()

    def _of(self, table: str) -> LocalTableWriter:
        if table not in self._writes:
            app = self._context.app
            self._writes[table] = self._open(app.dataset(table), self._inputs.views.get(table), app.name)
        return self._writes[table]

    def _open(self, dataset: AdjunctDataset, pinned: object, writer: str) -> LocalTableWriter:
        """Return a writer of a table at its version in the batch's intent, if it has one."""
        context, inputs = self._context, self._inputs
        sealed = pinned.sealed if isinstance(pinned, VersionReader) else None
        batch = WritingBatch(writer, inputs.intent.batch, context.run, inputs.intent.cut)
        tasks = SPARK_ONE_TASK if inputs.few else SPARK
        return self._stack.enter_context(LocalTableWriter(context.lake, dataset, sealed, batch, tasks))


def prepare_table_rows(
    frame: DataFrame, key: tuple[str, ...], deleted: str | None, on_null_key: OnNullKey
) -> tuple[DataFrame, Callable[[], int] | None]:
    """Return the records with `__tombstone` set for the table, and a function that returns how many null keys were
    skipped.
    """
    from pyspark.sql import Observation

    if deleted is not None:
        frame = frame.withColumn(
            TOMBSTONE, F.coalesce(F.col(TOMBSTONE), F.lit(False)) | F.coalesce(F.expr(deleted), F.lit(False))
        )
    if on_null_key == "fail":
        return frame, None  # the writer rejects them
    lacks = _lacks_key(key)
    observed = Observation()
    watched = frame.observe(observed, F.coalesce(F.sum(lacks.cast("long")), F.lit(0)).alias("null_keys"))
    return watched.where(~lacks), lambda: int(observed.get["null_keys"])


def _lacks_key(key: tuple[str, ...]) -> Column:
    return reduce(or_, [named_column(name).isNull() for name in key])


def _locate_null_key(
    error: NullKeyError, operator: str, rows: DataFrame, key: tuple[str, ...], stream: str | None
) -> NullKeyError:
    """Return the error with the operator, the first record without a key, and what to do about such records."""
    first = rows.where(_lacks_key(key)).select(PARTITION, OFFSET).orderBy(PARTITION, OFFSET).first()
    where = f"{stream}." if stream is not None else "partition "
    place = "" if first is None else f"; the first is {where}{first[0]} at offset {first[1]}"
    problem = f"{operator}: {error.problem.rstrip('.')}{place}."
    step = 'Filter them out, or skip and count them: send_to(…, on_null_key="skip").'
    return NullKeyError(problem, step, dataset=error.dataset, table=error.table, operator=operator)
