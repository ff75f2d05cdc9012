"""Writes a batch's records to remote tables, and looks records up in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from dagster_adjunct.orchestration.step.answers.recorded_answers import RecordedAnswers
from dagster_adjunct.orchestration.step.answers.table_answers import (
    about,
    answered,
    as_frame,
    distinct_keys,
    with_answers,
)
from dagster_adjunct.orchestration.step.batch_compiler.table_marks import marking_of
from dagster_adjunct.orchestration.step.batch_records.refused_records import as_records
from dagster_adjunct.resources.tables.spark_write import TableWrite, write_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.spec.table_lookups import TableLookup
    from dagster_adjunct.orchestration.operators.spec.table_sends import TableSend
    from dagster_adjunct.orchestration.step.batch_compiler.batch_counts import BatchCounts
    from dagster_adjunct.orchestration.step.batch_compiler.known_batch import KnownBatch
    from dagster_adjunct.resources.tables import RemoteTable


class TableOutputs:
    """The remote tables of one batch; `before_output` is called with the name before anything is written.

    What a table has refused is there until the batch has run, by the operator that wrote it.
    """

    def __init__(self, known: KnownBatch, counts: BatchCounts, before_output: Callable[[str], None]) -> None:
        self._known, self._counts, self._before_output = known, counts, before_output
        self._letters: dict[str, tuple[str, tuple[dict[str, Any], ...]]] = {}

    def write(self, operator: str, frame: DataFrame, send: TableSend, sensitive: frozenset[str]) -> None:
        """Write records, few of them in one task; a replay writes nothing to a table that has had its records."""
        known = self._known
        self._before_output(send.table)
        table = self._table(send.table)
        if known.replays and table.on_replay == "skip":
            # Nothing of a bounded replay is for this table: it has had it, or gets it from the main position, to which
            # it would be older than what the replay had marked.
            self._letters[operator] = (send.table, ())
            self._counts.add(send.table, {"skipped": frame.count()})
            return
        credits = known.context.credits
        table = table if credits is None else credits.paid(table, known.spark)
        exchange = operator in known.exchanges and not known.inputs.few
        write = replace(self._write_of(operator, frame, send, table), sensitive=bool(sensitive))
        written = write_table(known.together(frame), write, exchange=exchange, what=operator)
        self._letters[operator] = (send.table, written.letters)
        known.context.open_tables.forget(send.table)
        self._counts.measure(send.table, written.metrics, written.counters)

    def _write_of(
        self, operator: str, frame: DataFrame, send: TableSend, table: RemoteTable[Any, Any, Any]
    ) -> TableWrite:
        known = self._known
        marking = marking_of(
            table,
            frame.columns,
            known.stream_of(operator),
            known.inputs,
            known.writers[operator],
            made_of_one=known.sources(operator) is not None,
        )
        return TableWrite(
            table,
            send.contract,
            send.on_null_key,
            known.partitions_at(operator),
            " and ".join(known.origins[operator].streams.values()),
            marking,
            send.update is not None,
            () if send.update is None else send.update.remove,
            send.args,
            send.dead_letters,
        )

    def letters(self, operator: str) -> DataFrame:
        """Return what the table of the operator before this one has refused."""
        (before,) = self._known.app.operator(operator).inputs
        return as_records(self._known.spark, *self._letters.get(before, ("", ())))

    def looked_up(self, operator: str, frame: DataFrame, lookup: TableLookup, sensitive: frozenset[str]) -> DataFrame:
        """Return records, which are computed once, with what the table answers: the same however often it is asked."""
        known = self._known
        asked = about(lookup, dict(frame.dtypes))
        record = RecordedAnswers(known.context.lake, known.app.name, known.inputs.batch, operator, asked)
        reader = known.context.open_tables.reader(self._table(lookup.table), known.spark, known.context.credits)
        keys = distinct_keys(operator, frame, lookup, sensitive=bool(sensitive))
        answers = answered(keys, lookup, record, reader, known.partitions_at(operator))
        self._counts.measure(lookup.table, answers.metrics, answers.metrics.counts())
        joined = with_answers(operator, frame, lookup, as_frame(known.spark, answers.table, lookup))
        return self._counts.of_join(operator, joined)

    def _table(self, name: str) -> RemoteTable[Any, Any, Any]:
        return cast("RemoteTable[Any, Any, Any]", self._known.app.tables[name])
