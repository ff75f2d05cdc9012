"""A small batch that Spark computes, and this process reads and writes.

With few records, most of the time goes into overhead: tasks that read files of streams and
datasets, exchanges, Python workers that write. So this process reads the records of inputs; Spark
caches each dataset while batches read the same version of it, and broadcasts it; nothing is moved;
and each output is fetched as Arrow and written as a batch in process writes it. Its records,
counters, digests and marks are those of a large batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.valid_time import Reader
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.orchestration.operators.operator import Exchange
from dagster_adjunct.orchestration.step.batch import BatchContext
from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext, View
from dagster_adjunct.orchestration.step.event_times import ranges_to_read
from dagster_adjunct.orchestration.step.kept_entries import count_stored_rows
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.spark.tasks import fetch_small, small_frame
from dagster_adjunct.resources.spark.tuning import FEW_ROWS
from dagster_adjunct.resources.streams.system import LAKE, AppendResult
from dagster_adjunct.resources.tables.spark import (
    TableWrite,
    WriteResult,
    note_exactness,
    write_rows,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.unbounded.transient_table import TransientVersion

MAX_ROWS = 300_000
"""The most rows of all partitioned datasets for a small batch: one task reads them in some
tenths of a second.
"""
_MAX_BYTES = 64 * 1024 * 1024


def _measure_version(view: View) -> tuple[int, int]:
    """Return the rows and bytes in the files of a version, by its manifest; 0 bytes for a table
    in memory.
    """
    sealed = getattr(view, "sealed", None)
    if sealed is None:
        return 0 if view is None else view.rows or 0, 0
    return sum(part.rows for part in sealed.generations), sum(
        part.size for part in sealed.generations
    )


def classify_batch(
    records: int,
    tasks: int | None,
    limit: int,
    views: Mapping[str, View],
    broadcast: Collection[str],
) -> tuple[bool, bool]:
    """Return whether a batch of `records` runs best in one task per stage, and with plans that
    Spark interprets.

    `limit` is the largest number of records of a small batch. `tasks` is how many tasks read each
    record of a broadcast input; None if there is none. The datasets in `broadcast` are read whole
    by every task, however many there are.
    """
    sizes = {name: _measure_version(view) for name, view in views.items()}
    read = [size for name, size in sizes.items() if name not in broadcast]
    rows, size = map(sum, zip((0, 0), *read, strict=True))
    few = records * (tasks or 1) <= limit and rows <= MAX_ROWS and size <= _MAX_BYTES
    return few, few and sum(rows for rows, _ in sizes.values()) <= FEW_ROWS


def read_small_batch(context: StepContext, inputs: BatchInputs) -> BatchInputs | None:
    """Return the inputs of a batch with the records of its input streams, read here; None if tasks
    must read them.

    They must for a batch that is not small, or that retention has cut; whose operators keep state
    or need tasks; whose stream systems can't read into this process; whose datasets have more than
    FEW_ROWS; and whose records, joined with entries of an average size, are too large for memory.
    """
    operators = [operator.spec for operator in context.app.operators]
    if (
        not inputs.few
        or inputs.intent.cut
        or any(spec.needs_tasks or spec.states for spec in operators)
    ):
        return None
    streams = {spec.reads for spec in operators if spec.reads is not None}
    systems = {
        stream: inputs.streams.get(stream) or context.systems[split_stream_name(stream)[0]]
        for stream in streams
    }
    if not all(system.implements("read_arrow") for system in systems.values()):
        return None
    sizes = [_measure_version(view) for view in inputs.views.values()]
    rows = sum(rows for rows, _ in sizes) + sum(map(count_stored_rows, inputs.over_time.values()))
    if rows > FEW_ROWS:  # the first batch of a run would take longer than by tasks
        return None
    room = _MAX_BYTES - sum(inputs.records * size // rows for rows, size in sizes if rows)
    arrived = {}
    for stream, system in systems.items() if room > 0 else ():
        arrived[stream] = system.read_arrow(ranges_to_read(system, stream, inputs.intent)[0])
        room -= arrived[stream].nbytes
    return replace(inputs, arrived=arrived) if room > 0 else None


class SmallBatch(BatchContext):
    """A batch whose records are in one partition, and whose outputs this process writes."""

    def __init__(
        self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]
    ) -> None:
        super().__init__(context, inputs, before_output)
        self._by_tasks: set[str] = set()  # the streams that tasks have written

    def moves(self, operator: str) -> list[Exchange]:
        return []  # all records are in one place

    def is_partitioned(self, operator: str) -> bool:
        return False

    def repartition(self, frame: DataFrame, partitions: int, by: Sequence[str]) -> DataFrame:
        return frame

    def gather_small(self, frame: DataFrame) -> DataFrame:
        return frame

    def hint_join(self, dataset: str, side: DataFrame) -> DataFrame:
        return F.broadcast(side)

    def _frame_of(self, view: VersionReader | TransientVersion) -> DataFrame:
        if not isinstance(view, VersionReader):
            return super()._frame_of(view)
        return self._persisted(view.dataset, view, lambda: view.frame(self.spark))

    def _history_of(self, reader: Reader) -> DataFrame:
        return self._persisted(
            f"{reader.dataset} over time", reader, lambda: reader.history_frame(self.spark)
        )

    def _persisted(self, rows: str, reader: Reader, frame: Callable[[], DataFrame]) -> DataFrame:
        """Return rows of a dataset, which Spark caches for later batches."""
        versions = reader.version if isinstance(reader, VersionReader) else reader.versions
        return self.context.versions.persisted(rows, versions, lambda: frame().coalesce(1))

    def _fetch(self, frame: DataFrame) -> pa.Table | None:
        """Return the records of an output; None if they may be too large for this process."""
        return fetch_small(
            frame, _MAX_BYTES // max(1, sum(rows.num_rows for rows in self.inputs.arrived.values()))
        )

    def _append(self, operator: str, frame: DataFrame, stream: str) -> AppendResult:
        # Tasks write to other systems, with marks of their own.
        rows = self._fetch(frame) if split_stream_name(stream)[0] == LAKE else None
        if rows is None:
            self._by_tasks.add(stream)
            return super()._append(operator, frame, stream)
        return self._append_rows(operator, rows, stream)

    def read_appended(self, stream: str, result: AppendResult) -> DataFrame:
        if stream in self._by_tasks:
            return super().read_appended(stream, result)
        return small_frame(
            self.spark, self.system_of(stream).read_arrow(**self._appended(stream, result))
        )

    def _send_rows(self, operator: str, frame: DataFrame, write: TableWrite) -> WriteResult:
        rows = self._fetch(frame)
        if rows is None:
            return super()._send_rows(operator, frame, write)
        return write_rows(rows, note_exactness(frame, write), what=operator)
