"""What one batch sends to the application's local tables, and what its joins meet of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.local_manifest import schema_of
from dagster_adjunct.assets.unbounded.local_writes import LocalWrites, WritingBatch
from dagster_adjunct.assets.writing.generation_writer import BY_ONE_TASK, SPARK
from dagster_adjunct.orchestration.operators.columns.hidden_columns import tie_breakers
from dagster_adjunct.orchestration.operators.spec.versions_met import RECORDED
from dagster_adjunct.resources.errors import NullKeyError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.operators.arguments import OnNullKey
    from dagster_adjunct.orchestration.step.context.batch_inputs import BatchInputs
    from dagster_adjunct.orchestration.step.context.step_context import StepContext

Counters = dict[str, dict[str, int]]


class LocalSends:
    """The local tables of one batch. A bounded replay writes none: they have had its records, or get them in order.

    One of recorded versions has its joins meet what it would write all the same, and commits nothing of that.
    `stream_of` tells the stream that the positions of an operator's records are in.
    """

    def __init__(self, context: StepContext, inputs: BatchInputs, stream_of: Callable[[str], str | None]) -> None:
        self._context, self._inputs, self._stream_of = context, inputs, stream_of
        self._writes: dict[str, LocalWrites] = {}
        self._counters: Counters = {}
        self._stack = ExitStack()

    def reader(self, table: str) -> VersionReader:
        """Return the table as the batch was begun with it, with what it has sent so far on top."""
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
        """Write the last record of each key; counted in the end, when it is committed."""
        counted = self._counters.setdefault(table, {"rows": 0, "deleted": 0, "duplicate_batches": 0})
        if self._inputs.consumed is None:
            counted["replayed_batches"] = 1
            if self._inputs.reading != RECORDED or table not in self._context.plan.tables_met_after_sends():
                return
        rows, null_keys = kept_rows(frame, self._context.app.dataset(table).key, deleted, on_null_key)
        names = schema_of(self._context.app.dataset(table)).names
        order = (PARTITION, OFFSET, *tie_breakers(frame))
        try:
            done = self._of(table).send(
                rows.select(*[column(name) for name in (*names, TOMBSTONE, *order)]),
                order_by=order,
                partitioned=partitioned,
            )
        except NullKeyError as error:
            key = self._context.app.dataset(table).key
            raise _located(error, operator, rows, key, self._stream_of(operator)) from error
        if self._inputs.consumed is None:
            return
        if null_keys is not None:
            done["null_keys"] = null_keys()
        for name, count in done.items():
            counted[name] = counted.get(name, 0) + count

    def commit(self, before_commit: Callable[[str], None]) -> Counters:
        """Commit each table that was sent to, once for the batch; return what was counted."""
        for table, writes in self._writes.items():
            if table in self._counters and self._inputs.consumed is not None:
                before_commit(table)
                _, duplicate = writes.commit()
                self._counters[table]["duplicate_batches"] = int(duplicate)
        return self._counters

    def close(self) -> None:
        """Let go of what is not committed."""
        self._stack.close()

    def _of(self, table: str) -> LocalWrites:
        if table not in self._writes:
            view = self._inputs.views.get(table)
            pinned = view.sealed if isinstance(view, VersionReader) else None
            app, run = self._context.app, self._context.run
            batch = WritingBatch(app.name, self._inputs.batch, run, self._inputs.cut)
            writer = BY_ONE_TASK if self._inputs.few else SPARK
            self._writes[table] = self._stack.enter_context(
                LocalWrites(self._context.lake, app.dataset(table), pinned, batch, writer)
            )
        return self._writes[table]


def kept_rows(
    frame: DataFrame, key: tuple[str, ...], deleted: str | None, on_null_key: OnNullKey
) -> tuple[DataFrame, Callable[[], int] | None]:
    """Return the records with `__tombstone` as it is for the table, and what tells how many were left out."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    if deleted is not None:
        frame = frame.withColumn(
            TOMBSTONE, F.coalesce(F.col(TOMBSTONE), F.lit(False)) | F.coalesce(F.expr(deleted), F.lit(False))
        )
    if on_null_key == "fail":
        return frame, None  # the writer refuses them
    lacks = _without_key(key)
    observed = Observation()
    watched = frame.observe(observed, F.coalesce(F.sum(lacks.cast("long")), F.lit(0)).alias("null_keys"))
    return watched.where(~lacks), lambda: int(observed.get["null_keys"])


def _without_key(key: tuple[str, ...]) -> Column:
    return reduce(or_, [column(name).isNull() for name in key])


def _located(
    error: NullKeyError, operator: str, rows: DataFrame, key: tuple[str, ...], stream: str | None
) -> NullKeyError:
    """Return the error with the operator, the first record without a key, and what may be done about such records."""
    first = rows.where(_without_key(key)).select(PARTITION, OFFSET).orderBy(PARTITION, OFFSET).first()
    where = f"{stream}." if stream is not None else "partition "
    place = "" if first is None else f"; the first is {where}{first[0]} at offset {first[1]}"
    return NullKeyError(
        f"{operator}: {error.problem.rstrip('.')}{place}.",
        'Filter them out, or let them be counted and left out: send_to(…, on_null_key="skip").',
        dataset=error.dataset,
        table=error.table,
        operator=operator,
    )
