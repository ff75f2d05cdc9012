"""Measures the times of the changes that an advance reads, for the watermark of the dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.dataset import UnboundedDataset
from dagster_adjunct.assets.sources.entries import Ranges
from dagster_adjunct.assets.versions.manifest import UnboundedManifest
from dagster_adjunct.assets.versions.watermark import known_until
from dagster_adjunct.resources.bucketing.files import VALID_FROM
from dagster_adjunct.resources.lazy_modules import F, pa, pc
from dagster_adjunct.resources.streams.system import PARTITION, StreamSystem, SystemStreamPartition
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """The newest time of the changes of each partition ("lake.planes.0"), in microseconds, and how
    many changes came after the watermark had passed their time.
    """

    newest: Mapping[str, int] = field(default_factory=dict)
    late: int = 0


def list_partitions_read(system: StreamSystem, ranges: Ranges) -> list[str]:
    """Return the names of the partitions of which these ranges contain offsets."""
    read = []
    for ssp, (start, end) in ranges.items():
        if system.compare(start, end) < 0:
            read.append(str(ssp))
    return read


def observe_times(
    changes: DataFrame | pa.Table, spec: UnboundedDataset, manifest: UnboundedManifest
) -> tuple[DataFrame | pa.Table, Callable[[], MeasuredTimes]]:
    """Return the same changes, and a function that returns their times once they are written.

    It measures nothing for a dataset without a watermark.
    """
    if not spec.has_watermark:
        return changes, MeasuredTimes
    mark = known_until(spec, manifest)
    if isinstance(changes, pa.Table):
        measured = _measure(changes, spec.input, mark)
        return changes, lambda: measured
    return _observe(changes, tuple(manifest.offsets), mark)


def _measure(changes: pa.Table, stream: str, mark: datetime | None) -> MeasuredTimes:
    micros = changes.column(VALID_FROM).cast("int64")
    times = pa.table({"partition": changes.column(PARTITION), "time": micros})
    newest = {}
    for row in times.group_by("partition").aggregate([("time", "max")]).to_pylist():
        if row["time_max"] is not None:
            newest[f"{stream}.{row['partition']}"] = int(row["time_max"])
    late = 0
    if mark is not None:
        late = pc.sum(pc.less(micros, to_microseconds(mark))).as_py() or 0
    return MeasuredTimes(newest, late)


def _observe(
    changes: DataFrame, partitions: Sequence[str], mark: datetime | None
) -> tuple[DataFrame, Callable[[], MeasuredTimes]]:
    from pyspark.sql import Observation

    micros = F.unix_micros(VALID_FROM)
    metrics = [F.lit(0).alias("late")]
    if mark is not None:
        metrics = [F.count_if(micros < F.lit(to_microseconds(mark))).alias("late")]
    for name in partitions:
        number = SystemStreamPartition.parse(name).partition
        metrics.append(F.max(F.when(F.col(PARTITION) == number, micros)).alias(name))
    observed = Observation()

    def read() -> MeasuredTimes:
        found = dict(observed.get)
        late = int(found.pop("late"))
        newest = {name: time for name, time in found.items() if time is not None}
        return MeasuredTimes(newest, late)

    return changes.observe(observed, *metrics), read
