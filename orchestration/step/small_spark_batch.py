"""A small batch that Spark computes, and this process reads and writes.

With few records, most of the time goes into overhead: tasks that read files of streams and
datasets, exchanges, Python workers that write. So this process reads the records of inputs; Spark
caches each dataset while batches read the same version of it, and broadcasts it; nothing is moved;
and each output is fetched as Arrow and written as a batch in process writes it. Its records,
counters, digests and marks are those of a large batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.batch import run_batch
from dagster_adjunct.orchestration.step.batch_outputs import Append
from dagster_adjunct.orchestration.step.context import BatchInputs, BatchMetrics, StepContext, View
from dagster_adjunct.orchestration.step.event_times import ranges_to_read
from dagster_adjunct.orchestration.step.kept_entries import count_stored_rows
from dagster_adjunct.orchestration.step.planned_batch import system_of
from dagster_adjunct.orchestration.step.spark_frames import SparkFrames, TaskWrites
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.small_work import SMALL_BYTES, SMALL_DATASETS, SMALL_ROWS
from dagster_adjunct.resources.spark.tasks import fetch_small, small_frame
from dagster_adjunct.resources.streams.checked_reads import read_table
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


def classify_batch(app: Application, inputs: BatchInputs) -> BatchInputs:
    """Return the inputs of a batch with whether it runs best in one task per stage, and with plans
    that Spark interprets.

    Datasets that are broadcast are read whole by every task, however many there are; so are the
    records of broadcast inputs.
    """
    partitioned = dict(inputs.views)
    for dataset in app.datasets:
        if dataset.broadcast:
            partitioned.pop(dataset.name, None)
    rows = sum(map(_count_rows, partitioned.values()))
    size = sum(map(_count_bytes, partitioned.values()))
    records = inputs.records * (inputs.intent.tasks or 1)
    if records > app.few_records or rows > SMALL_DATASETS or size > SMALL_BYTES:
        return inputs
    all_rows = sum(map(_count_rows, inputs.views.values()))
    interpreted = all_rows <= SMALL_ROWS and not inputs.over_time
    return replace(inputs, few=True, interpreted=interpreted)


def _count_rows(view: View) -> int:
    """Return the rows of a version, by its manifest."""
    if isinstance(view, VersionReader):
        return count_stored_rows(view)
    return 0 if view is None else view.rows


def _count_bytes(view: View) -> int:
    """Return the bytes of the files of a version; 0 for a table in memory."""
    if not isinstance(view, VersionReader):
        return 0
    return sum(part.size for part in view.sealed.generations)


def read_small_batch(context: StepContext, inputs: BatchInputs) -> BatchInputs | None:
    """Return the inputs of a batch with the records of its input streams, read here; None if tasks
    must read them.

    They must for a batch that is not small, or that retention has cut; whose operators keep state
    or need tasks; whose stream systems can't read into this process; whose datasets have more than
    SMALL_ROWS; and whose records, joined with entries of an average size, are too large for memory.
    """
    if not inputs.few or inputs.intent.cut:
        return None
    for operator in context.app.operators:
        if operator.spec.needs_tasks or operator.spec.states:
            return None
    systems = {stream: system_of(context, inputs, stream) for stream in context.app.inputs}
    if not all(system.capabilities.reads_arrow for system in systems.values()):
        return None
    room = _room_for_records(inputs)
    arrived: dict[str, pa.Table] = {}
    for stream, system in systems.items():
        if room <= 0:
            return None
        arrived[stream] = read_table(system, ranges_to_read(system, stream, inputs.intent)[0])
        room -= arrived[stream].nbytes
    return replace(inputs, arrived=arrived) if room > 0 else None


def _room_for_records(inputs: BatchInputs) -> int:
    """Return how many bytes of records this process may read, besides an entry of each dataset for
    each record; 0 if the datasets are too large.
    """
    all_rows = sum(map(count_stored_rows, inputs.over_time.values()))
    room = SMALL_BYTES
    for view in inputs.views.values():
        rows = _count_rows(view)
        all_rows += rows
        if rows:
            room -= inputs.records * _count_bytes(view) // rows
    # The first batch of a run over more rows would take longer than by tasks.
    return room if all_rows <= SMALL_ROWS else 0


@dataclass(frozen=True, slots=True)
class FetchedWrites:
    """This process writes the records that Spark computes: `Writes` of outputs.

    Tasks write those that may be too large for this process.
    """

    frames: SparkFrames
    by_tasks: TaskWrites
    _not_fetched: set[str] = field(default_factory=set)

    @staticmethod
    def of(frames: SparkFrames) -> FetchedWrites:
        """Return the writes of these frames."""
        return FetchedWrites(frames, TaskWrites(frames))

    def _fetch(self, frame: DataFrame) -> pa.Table | None:
        """Return the records of an output; None if they may be too large for this process."""
        arrived = self.frames.planned.inputs.arrived.values()
        return fetch_small(frame, SMALL_BYTES // max(1, sum(rows.num_rows for rows in arrived)))

    def append(self, operator: str, frame: DataFrame, append: Append) -> AppendResult:
        # Tasks write to other systems, with marks of their own.
        rows = self._fetch(frame) if split_stream_name(append.stream)[0] == LAKE else None
        if rows is None:
            self._not_fetched.add(append.stream)
            return self.by_tasks.append(operator, frame, append)
        return append.send_rows(rows)

    def read(self, append: Append, **ranges: Any) -> DataFrame:
        if append.stream in self._not_fetched:
            return self.by_tasks.read(append, **ranges)
        return small_frame(self.frames.session, read_table(append.system, **ranges))

    def write(self, operator: str, frame: DataFrame, write: TableWrite) -> WriteResult:
        rows = self._fetch(frame)
        if rows is None:
            return self.by_tasks.write(operator, frame, write)
        return write_rows(rows, note_exactness(frame, write), what=operator)


def run_small_batch(
    context: StepContext, inputs: BatchInputs, before_output: Callable[..., Any]
) -> BatchMetrics:
    """Write every output of the application once, as `run_batch` does; the records of the inputs
    have arrived in this process.
    """
    return run_batch(context, inputs, before_output, FetchedWrites.of, gathered=True)
