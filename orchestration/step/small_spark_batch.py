"""A small batch that Spark computes, and this process reads and writes.

With few records, most of the time goes into overhead: tasks that read files of streams and
datasets, exchanges, Python workers that write. So this process reads the records of inputs; Spark
caches each dataset while batches read the same version of it, and broadcasts it; nothing is moved;
and each output is fetched as Arrow and written as a batch in process writes it. Its records,
counters, digests and marks are those of a large batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.step.batch import run_batch
from dagster_adjunct.orchestration.step.batch_outputs import Append
from dagster_adjunct.orchestration.step.context import BatchInputs, BatchMetrics, StepContext, View
from dagster_adjunct.orchestration.step.event_times import ranges_to_read
from dagster_adjunct.orchestration.step.kept_entries import count_stored_rows
from dagster_adjunct.orchestration.step.spark_frames import SparkFrames, TaskWrites
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


MAX_ROWS = 300_000
"""The most rows of all partitioned datasets for a small batch: one task reads them in some
tenths of a second.
"""
_MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Size:
    """The rows of datasets, and the bytes of their files; 0 bytes for a table in memory."""

    rows: int = 0
    bytes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.rows + other.rows, self.bytes + other.bytes)

    @staticmethod
    def of(view: View) -> Size:
        """Return the size of a version, by its manifest."""
        sealed = getattr(view, "sealed", None)
        if sealed is not None:
            parts = sealed.generations
            return Size(sum(part.rows for part in parts), sum(part.size for part in parts))
        return Size() if view is None else Size(view.rows or 0)


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
    sizes = {name: Size.of(view) for name, view in views.items()}
    read = sum((size for name, size in sizes.items() if name not in broadcast), Size())
    few = records * (tasks or 1) <= limit and read.rows <= MAX_ROWS and read.bytes <= _MAX_BYTES
    return few, few and sum(sizes.values(), Size()).rows <= FEW_ROWS


def read_small_batch(context: StepContext, inputs: BatchInputs) -> BatchInputs | None:
    """Return the inputs of a batch with the records of its input streams, read here; None if tasks
    must read them.

    They must for a batch that is not small, or that retention has cut; whose operators keep state
    or need tasks; whose stream systems can't read into this process; whose datasets have more than
    FEW_ROWS; and whose records, joined with entries of an average size, are too large for memory.
    """
    specs = [operator.spec for operator in context.app.operators]
    need_tasks = any(spec.needs_tasks or spec.states for spec in specs)
    if need_tasks or not inputs.few or inputs.intent.cut:
        return None
    streams = {spec.reads for spec in specs if spec.reads is not None}
    systems = {
        stream: inputs.streams.get(stream) or context.systems[split_stream_name(stream)[0]]
        for stream in streams
    }
    if not all(system.capabilities.reads_arrow for system in systems.values()):
        return None
    room = _room_for_records(inputs)
    arrived: dict[str, pa.Table] = {}
    for stream, system in systems.items():
        if room > 0:
            arrived[stream] = system.read_arrow(ranges_to_read(system, stream, inputs.intent)[0])
            room -= arrived[stream].nbytes
    return replace(inputs, arrived=arrived) if room > 0 else None


def _room_for_records(inputs: BatchInputs) -> int:
    """Return how many bytes of records this process may read, besides an entry of each dataset for
    each record; 0 if the datasets are too large.
    """
    sizes = [Size.of(view) for view in inputs.views.values()]
    over_time = sum(map(count_stored_rows, inputs.over_time.values()))
    if sum(sizes, Size()).rows + over_time > FEW_ROWS:
        return 0  # the first batch of a run would take longer than by tasks
    entries = sum(inputs.records * size.bytes // size.rows for size in sizes if size.rows)
    return _MAX_BYTES - entries


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
        return fetch_small(frame, _MAX_BYTES // max(1, sum(rows.num_rows for rows in arrived)))

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
        return small_frame(self.frames.session, append.system.read_arrow(**ranges))

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
