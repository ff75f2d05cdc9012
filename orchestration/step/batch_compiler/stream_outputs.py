"""Appends a batch's records to streams, once however often the batch is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.operators.columns.hidden_columns import UNSENT, tie_breakers
from dagster_adjunct.orchestration.step.batch_records.refused_records import check_all_there
from dagster_adjunct.orchestration.step.batch_records.sent_records import sent_before, sent_schema
from dagster_adjunct.orchestration.step.record_times.record_positions import with_positions
from dagster_adjunct.resources.names import split_stream_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.step.batch_compiler.batch_counts import BatchCounts
    from dagster_adjunct.orchestration.step.batch_compiler.known_batch import KnownBatch
    from dagster_adjunct.resources.streams.interface.stream_system import AppendResult


@dataclass(frozen=True, slots=True)
class StreamOutputs:
    """The streams that a batch appends to; `before_output` is called with the name before anything is written."""

    known: KnownBatch
    counts: BatchCounts
    before_output: Callable[[str], None]

    def send(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> AppendResult:
        """Append records as (application, batch), to a stream that is created with `key` and `partitions`."""
        self.before_output(stream)
        system, name = self.known.system_of(stream), split_stream_name(stream)[1]
        create = partial(system.create, name, schema=sent_schema(frame), key=key, partitions=partitions)
        producer, batch = self.known.producers[operator], self.known.inputs.batch
        append = partial(self._append, operator, frame, stream)
        cut = self.known.inputs.cut
        sent = sent_before(system, name, producer, batch) if cut or system.evolves else None
        if sent is not None and cut:
            result = sent  # of all records that the batch was begun with
            frame.count()  # what has been counted before it would be waited for in vain else
        elif sent is not None:
            # Sent before the columns changed, maybe: they do not change for records that turn out to be others.
            result = append()
            create()
        else:
            create()
            result = append()
        self.counts.add(stream, {"rows": result.rows, "duplicate_batches": int(result.duplicate)})
        return result

    def _append(self, operator: str, frame: DataFrame, stream: str) -> AppendResult:
        system, name = self.known.system_of(stream), split_stream_name(stream)[1]
        producer, inputs = self.known.producers[operator], self.known.inputs
        sources = self.known.sources(operator) if system.keeps_positions else None
        more: dict[str, Any] = {"sources": sources} if sources else {}
        if inputs.few and system.appends_by_one_task:
            more["one_task"] = True
        return system.append(
            name,
            with_positions(frame, sources).drop(*UNSENT),
            producer=producer,
            sequence=inputs.batch,
            order_by=("__partition", "__offset", *tie_breakers(frame)),
            partitioned=operator not in self.known.exchanges,
            consumed=inputs.consumed if producer == self.known.context.writer else None,
            **more,
        )

    def send_letters(
        self, operator: str, letters: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        """Append refused records, unless the batch has done so before: then none of these may be missing there."""
        system, name = self.known.system_of(stream), split_stream_name(stream)[1]
        sent = sent_before(system, name, self.known.context.writer, self.known.inputs.batch)
        if sent is None:
            self.send(operator, letters, stream, key=key, partitions=partitions)
            return
        check_all_there(system, name, sent, letters, operator)
        self.counts.add(stream, {"rows": sent.rows, "duplicate_batches": 1})
