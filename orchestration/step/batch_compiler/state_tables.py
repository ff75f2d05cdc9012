"""The tables of state of one batch: what its operators kept before, what they keep now, and their commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.local_writes import LocalWrites, WritingBatch
from dagster_adjunct.assets.unbounded.state_table import state_dataset, state_name
from dagster_adjunct.assets.writing.generation_writer import BY_ONE_TASK, SPARK
from dagster_adjunct.resources.bucketing.bucketed_tables import GENERATION, bucketed_frame
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.streams.interface.stream_system import TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.unbounded.state_spec import StateSpec
    from dagster_adjunct.orchestration.operators.spec.compiling import Watermarks
    from dagster_adjunct.orchestration.step.context.batch_inputs import BatchInputs
    from dagster_adjunct.orchestration.step.context.step_context import StepContext

Counters = dict[str, dict[str, int]]
NEW = "__new"


def states_of(context: StepContext) -> Iterator[str]:
    """Yield the names of the datasets that the state of an application's operators is in."""
    for operator in context.app.operators:
        for name in operator.spec.states:
            yield state_name(context.writer, name)


@dataclass(slots=True)
class StateTable:
    """One table of state in one batch (operators/spec/compiling.py).

    `kept` says whether what is written is kept, `real` whether records are read at all.
    """

    context: StepContext
    writes: LocalWrites
    spec: StateSpec
    watermarks: Watermarks
    kept: bool
    real: bool
    counted: dict[str, int] = field(default_factory=dict)

    def frame(self) -> DataFrame:
        if self.spec.append_only:
            return self._appended(sends=False).drop(NEW)
        return self._standing(self.writes.reader(sends=False).frame(self.context.spark))

    def with_written(self) -> DataFrame:
        return self._appended(sends=True)

    def write(self, rows: DataFrame, *, lying: bool = False) -> None:
        from pyspark.sql import functions as F

        if TOMBSTONE not in rows.columns:
            rows = rows.withColumn(TOMBSTONE, F.lit(False))
        rows = rows.select(*[column(name) for name in (*self.spec.schema.names, TOMBSTONE)])
        if self.kept:
            done = self.writes.send(rows, order_by=(), partitioned=lying)
            if self.spec.append_only and done.get("superseded"):
                raise SchemaMismatchError(
                    f"state {self.writes.name!r}: {done['superseded']} record(s) of the batch have the position of "
                    "another one, and only one of those would be kept.",
                    "Something before this operator makes several records of one without an order among them, as "
                    "explode in map, select or with_columns does, or a function: use flat_map there.",
                    dataset=self.writes.name,
                )
            for name, count in done.items():
                self.counted[name] = self.counted.get(name, 0) + count
        elif self.real:
            rows.count()  # what passes here is counted

    def commit(self) -> None:
        """Commit what was written, and drop what has expired with this batch."""
        _, duplicate = self.writes.commit(self.watermarks.after)
        self.counted["duplicate_batches"] = int(duplicate)

    def _appended(self, *, sends: bool) -> DataFrame:
        """Return the rows as they are scanned: each key was written once."""
        from pyspark.sql import functions as F

        sealed = self.writes.reader(sends=sends).sealed
        what = f"state {self.writes.name!r}"
        rows = bucketed_frame(self.context.spark(), self.context.lake.store, what, sealed.layout, sealed.generations)
        # Not a literal: of rows that are none Spark forgets where they lie, and would move them.
        new = F.col(GENERATION).isin(*self.writes.sent) if self.writes.sent else F.col(GENERATION) < F.lit(0)
        return self._standing(rows.select(*[column(name) for name in self.spec.schema.names], new.alias(NEW)))

    def _standing(self, rows: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        before = self.watermarks.before
        return rows if before is None else rows.where(column(self.spec.expires) > F.lit(before))


class StateTables:
    """The tables of state of one batch. A bounded replay keeps nothing: what it reads was kept, or comes in order."""

    def __init__(self, context: StepContext, inputs: BatchInputs) -> None:
        self._context, self._inputs = context, inputs
        self._tables: dict[str, StateTable] = {}
        self._stack = ExitStack()

    def table(self, name: str, spec: StateSpec, watermarks: Watermarks) -> StateTable:
        """Return the table of this name, as the batch was begun with it."""
        if name not in self._tables:
            writer_name, inputs = self._context.writer, self._inputs
            dataset = state_dataset(writer_name, name, spec)
            pinned = inputs.states.get(dataset.name)
            batch = WritingBatch(writer_name, inputs.batch, self._context.run, inputs.cut)
            writer = BY_ONE_TASK if inputs.few else SPARK
            sealed = None if pinned is None else pinned.sealed
            writes = self._stack.enter_context(LocalWrites(self._context.lake, dataset, sealed, batch, writer))
            kept = inputs.consumed is not None
            self._tables[name] = StateTable(self._context, writes, spec, watermarks, kept, inputs.batch > 0)
        return self._tables[name]

    def commit(self, before_commit: Callable[[str], None]) -> Counters:
        """Commit each table once for the batch; return what was counted, by dataset."""
        counted: Counters = {}
        for table in self._tables.values():
            if table.kept:
                before_commit(table.writes.name)
                table.commit()
                counted[table.writes.name] = table.counted
        return counted

    def close(self) -> None:
        """Let go of what is not committed."""
        self._stack.close()
