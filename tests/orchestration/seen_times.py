"""An operator that sends on what is hidden of the times of records; and the same times in plain
Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, ClassVar

from dagster_adjunct.orchestration.operators.operator import PassThroughSpec, PlanContext
from dagster_adjunct.orchestration.operators.stream_facts import Columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.batch import SparkBatch

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """A time of the tests."""
    return START + timedelta(seconds=seconds)


@dataclass(frozen=True, slots=True)
class Seen(PassThroughSpec):
    """Records with what their times and the batch say, of an operator that keeps its watermark
    by this name.
    """

    kind: ClassVar[str] = "seen"
    name: str
    held: timedelta = timedelta(0)

    def summary(self) -> str:
        return "times"

    @property
    def over_time(self) -> str:
        return self.name

    @property
    def watermark_delay(self) -> timedelta:
        return self.held

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        return Columns(complete=False)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        from pyspark.sql import functions as F

        (frame,) = frames
        marks = batch.state.watermarks(self.name)
        return frame.withColumns(
            {
                "p": F.col("__partition"),
                "at": F.col("__event_time"),
                "behind": F.col("__behind"),
                "again": F.col("__again"),
                "before": F.lit(marks.before).cast("timestamp"),
                "after": F.lit(marks.after).cast("timestamp"),
            }
        )


def watermarks_in_order(
    times: Iterable[float | None], delay: float
) -> tuple[list[float | None], float | None]:
    """Return of each record of a partition the watermark that it is behind (None: it is not),
    and that after all.
    """
    behind: list[float | None] = []
    mark: float | None = None
    for time in times:
        behind.append(mark if time is not None and mark is not None and time < mark else None)
        if time is not None:
            mark = time - delay if mark is None else max(mark, time - delay)
    return behind, mark
