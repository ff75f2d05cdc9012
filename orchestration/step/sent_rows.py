"""The rows that a batch sends to an output table, made of its records."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_adjunct.orchestration.application.graph import OutputTable
from dagster_adjunct.orchestration.operators.columns import list_batch_columns
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.output_tables.batches import OutputColumns, ReplacedRange
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import EPOCH, TOMBSTONE, Sources


@dataclass(slots=True)
class SentRows:
    """What an operator sends to an output table in one batch. `sources` are set if rows have their
    source positions; `dropped` counts tombstones that were dropped.
    """

    operator: str
    output: OutputTable
    sources: Sources | None = None
    dropped: int = 0

    @staticmethod
    def of(planned: PlannedBatch, operator: str, table: str) -> SentRows:
        """Return the rows of a batch. Raises PlanningError for records without source positions,
        if the table needs these.
        """
        output = planned.app.output_tables[table]
        if output.on_replay == "append":
            return SentRows(operator, output)
        sources = planned.sources(operator)
        if sources is None:
            raise errors.PlanningError(
                f'{operator}: output table {table} has on_replay="replace", and its records are'
                " made of several inputs, or of one whose offsets are no numbers: they have no"
                " positions by which they could be replaced.",
                'Declare the table with on_replay="append", or send what is made of each input to a'
                " table of its own.",
                operator=operator,
            )
        return SentRows(operator, output, sources)

    def columns(self, schema: Schema) -> OutputColumns:
        """Return the columns of the rows; `schema` are those of the records."""
        return OutputColumns(schema, self.output.hidden, self.output.changes)

    def replaces(self) -> tuple[ReplacedRange, ...]:
        """Return the ranges of records whose rows the batch replaces: none if it reads all of its
        records for the first time, so that their epoch is 0.

        If it reads some again, these are all of its ranges: those that it reads for the first time
        have no rows yet, and delta-rs refuses rows of other ranges in a commit that replaces some.
        """
        if self.sources is None or not any(span.epoch for span in self.sources.ranges):
            return ()
        reader = self.sources.reader
        return tuple(
            ReplacedRange(reader, span.source, span.start, span.end) for span in self.sources.ranges
        )

    def shape(self, records: pa.Table) -> pa.Table:
        """Return the rows made of `records`, which have all hidden columns; rows keep only the
        hidden columns that the table has.

        Raises SchemaMismatchError for a tombstone if the table does not say what becomes of
        tombstones.
        """
        deleted = pc.fill_null(records.column(TOMBSTONE), False)
        tombstones = pc.sum(deleted).as_py() or 0
        if tombstones and self.output.tombstones == "fail":
            raise errors.SchemaMismatchError(
                f"{self.operator} sends {tombstones} tombstone(s) to table {self.output.name}: it"
                " has no keys that they could delete.",
                'Declare what becomes of them: output_table(…, tombstones="drop"), or "keep", which'
                f" marks these rows in the column {TOMBSTONE}.",
                table=self.output.name,
                operator=self.operator,
            )
        if tombstones and self.output.tombstones == "drop":
            self.dropped += tombstones
            records = records.filter(pc.invert(deleted))
        hidden = {name for name, _ in self.output.hidden}
        kept = []
        unsent = {*list_batch_columns(records.column_names)}
        for name in records.column_names:
            is_own = not name.startswith("__") and name not in unsent
            if is_own or name in hidden:
                kept.append(name)
        rows = records.select(kept)
        if EPOCH in hidden:
            epochs = pc.fill_null(rows.column(EPOCH), 0).cast(pa.int32())
            rows = rows.set_column(rows.column_names.index(EPOCH), EPOCH, epochs)
        return rows
