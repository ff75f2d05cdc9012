"""Measures the times of the changes that an advance reads, for the watermark of the dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dagster_adjunct.assets.declaration.dataset import UnboundedDataset
from dagster_adjunct.assets.sources.entries import Ranges
from dagster_adjunct.assets.versions.manifest import UnboundedManifest
from dagster_adjunct.assets.versions.watermark import passed_marks
from dagster_adjunct.resources.bucketing.files import VALID_FROM
from dagster_adjunct.resources.lazy_modules import F, pa, pc
from dagster_adjunct.resources.streams.system import PARTITION, StreamSystem, SystemStreamPartition
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """The times of changes, for the watermark.

    `newest` is the newest time of the changes of each partition ("lake.planes.0"), in microseconds;
    partitions without a time are left out. `late` has, for each passed watermark, oldest first, the
    number of changes whose time is before it.
    """

    newest: Mapping[str, int] = field(default_factory=dict)
    late: tuple[int, ...] = ()

    @property
    def all_late(self) -> int:
        """The number of changes whose time is before the newest watermark; 0 without one."""
        if not self.late:
            return 0
        return self.late[-1]


NO_TIMES = MeasuredTimes()


def list_partitions_read(system: StreamSystem, ranges: Ranges) -> list[str]:
    """Return the names of the partitions of which these ranges contain offsets."""
    read = []
    for ssp, (start, end) in ranges.items():
        if system.compare(start, end) < 0:
            read.append(str(ssp))
    return read


class TimedChanges(NamedTuple):
    """Changes, and a function that returns their times. Call it only after they are written."""

    changes: DataFrame | pa.Table
    read_times: Callable[[], MeasuredTimes]


def observe_times(
    changes: DataFrame | pa.Table, spec: UnboundedDataset, manifest: UnboundedManifest
) -> TimedChanges:
    """Return the same changes, with a function for their times; without a watermark it returns no
    times.
    """
    if not spec.has_watermark:
        return TimedChanges(changes, MeasuredTimes)
    marks = [to_microseconds(mark.until) for mark in passed_marks(spec, manifest)]
    if isinstance(changes, pa.Table):
        measured = _measure(changes, spec.input, marks)
        return TimedChanges(changes, lambda: measured)
    return _observe(changes, tuple(manifest.offsets), marks)


def _measure(changes: pa.Table, stream: str, marks: Sequence[int]) -> MeasuredTimes:
    """Return the times of the changes in a table; `marks` are the watermarks that have passed, in
    microseconds.
    """
    micros = changes.column(VALID_FROM).cast("int64")
    times = pa.table({"partition": changes.column(PARTITION), "time": micros})
    newest = {}
    for row in times.group_by("partition").aggregate([("time", "max")]).to_pylist():
        if row["time_max"] is not None:
            newest[f"{stream}.{row['partition']}"] = int(row["time_max"])
    late = tuple(int(pc.sum(pc.less(micros, mark)).as_py() or 0) for mark in marks)
    return MeasuredTimes(newest, late)


def _observe(changes: DataFrame, partitions: Sequence[str], marks: Sequence[int]) -> TimedChanges:
    """Return the changes of a frame, and a function that returns the times which Spark measures
    while they are written. Until they are, the function blocks.

    Spark has to know its metrics before it reads changes. So each of the dataset's `partitions` has
    one, which is null if the partition has no changes. `marks` are as for `_measure`.
    """
    from pyspark.sql import Observation

    micros = F.unix_micros(VALID_FROM)
    metrics = [F.count_if(micros < F.lit(mark)).alias(f"late{mark}") for mark in marks]
    for name in partitions:
        number = SystemStreamPartition.parse(name).partition
        metrics.append(F.max(F.when(F.col(PARTITION) == number, micros)).alias(name))
    observed = Observation()

    def read_times() -> MeasuredTimes:
        values = dict(observed.get)
        late = tuple(int(values.pop(f"late{mark}")) for mark in marks)
        newest = {name: time for name, time in values.items() if time is not None}
        return MeasuredTimes(newest, late)

    return TimedChanges(changes.observe(observed, *metrics), read_times)
