"""Where datasets and batches are written, from which streams, with what, and in whose name: what travels together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.dataset_log import DatasetLog

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import SparkSession

    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


@dataclass(frozen=True, slots=True)
class Runtime:
    """The lake, the stream systems by name, and Spark, whose session starts when it is first asked for.

    `spark` is called only where there are rows to work on. It may be IN_PROCESS: then all that is worked on is held in
    this process. `by` is the run or the person whom commits name.
    """

    lake: Lake
    systems: Mapping[str, StreamSystem]
    spark: Callable[[], SparkSession]
    by: str

    def now(self) -> datetime:
        """Return the time by the lake's clock."""
        return self.lake.now()

    def log(self, dataset: str) -> DatasetLog:
        """Return the commits of a dataset."""
        return DatasetLog(self.lake, dataset)
