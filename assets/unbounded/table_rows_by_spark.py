"""The rows of a table by Spark: generations merged bucket by bucket, with no shuffle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.changes.change_formats import PROBLEM
from dagster_adjunct.assets.sources.order_by_column import too_late
from dagster_adjunct.assets.versions.sealed_version import POSITION
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout, Generation
    from dagster_adjunct.resources.objects.object_store import ObjectStore

_NEWER, _GENERATION = "__newer", "__gen"
_STORED, _LATE, _NEWEST = "__stored", "__late", "__newest"


@dataclass(frozen=True, slots=True)
class SparkRows:
    """TableRows over frames; the session is started by the first read."""

    session: Callable[[], SparkSession]

    def stored(
        self, store: ObjectStore, what: str, layout: BucketLayout, generations: Sequence[Generation]
    ) -> DataFrame:
        """Return all rows of these generations; bucket i is partition i."""
        from dagster_adjunct.resources.bucketing.bucketed_tables import bucketed_frame

        rows = bucketed_frame(self.session(), store, what, layout, generations)
        return rows if layout.bucket_by else rows.coalesce(1)

    def positions(self, rows: DataFrame) -> tuple[int | None, int | None]:
        from pyspark.sql import functions as F

        lowest, highest = rows.agg(F.min(POSITION), F.max(POSITION)).collect()[0]
        return lowest, highest

    def without_forgotten(
        self, rows: DataFrame, key: tuple[str, ...], horizon: int | None
    ) -> tuple[DataFrame, Callable[[], dict[str, int]]]:
        from pyspark.sql import Observation, Window
        from pyspark.sql import functions as F

        places = Window.partitionBy(*[column(name) for name in key]).orderBy(POSITION, _GENERATION)
        winners = rows.withColumn(_NEWER, F.lead(F.lit(1)).over(places)).where(F.col(_NEWER).isNull()).drop(_NEWER)
        tombstone = F.col(TOMBSTONE)
        gone = tombstone & (F.col(POSITION) <= F.lit(horizon)) if horizon is not None else F.lit(False)
        observed = Observation()

        def count(condition: Column, name: str) -> Column:
            return F.coalesce(F.sum(condition.cast("long")), F.lit(0)).alias(name)

        watched = winners.observe(
            observed,
            F.count(F.lit(1)).alias("keys"),
            count(gone, "forgotten"),
            count(tombstone & ~gone, "tombstones"),
        )
        return watched.where(~gone), lambda: {name: int(value) for name, value in observed.get.items()}

    def not_expired(self, rows: DataFrame, expires: str, watermark: datetime) -> DataFrame:
        from pyspark.sql import functions as F

        return rows.where(column(expires) > F.lit(watermark))

    def at_stored_positions(self, changes: DataFrame, stored: DataFrame, key: tuple[str, ...]) -> DataFrame:
        from pyspark.sql import functions as F

        return _with_stored(changes, stored, key).withColumn(POSITION, F.greatest(POSITION, _STORED)).drop(_STORED)

    def late_beside(
        self, changes: DataFrame, stored: DataFrame, key: tuple[str, ...], horizon: int
    ) -> tuple[DataFrame, DataFrame, int]:
        from pyspark.sql import functions as F

        changes = _above_forgotten(_with_stored(changes, stored, key), key, horizon).drop(_STORED)
        reasons = F.coalesce(F.col(PROBLEM), F.when(F.col(_LATE), F.lit(too_late(horizon))))
        in_time = changes.where(~F.col(_LATE)).drop(_LATE)
        return in_time, changes.withColumn(PROBLEM, reasons).drop(_LATE), changes.where(_LATE).count()


def _with_stored(changes: DataFrame, stored: DataFrame, key: tuple[str, ...]) -> DataFrame:
    """Return the changes with the position of what the table holds of their key; null where it holds nothing."""
    from pyspark.sql import functions as F

    names = [f"__key_{index}" for index in range(len(key))]
    keys = [column(own).alias(name) for own, name in zip(key, names, strict=True)]
    held = stored.select(*keys, F.col(POSITION).alias(_STORED)).groupBy(*names).agg(F.max(_STORED).alias(_STORED))
    same = reduce(and_, [column(own) == F.col(name) for own, name in zip(key, names, strict=True)])
    return changes.join(held, same, "left").drop(*names)


def _above_forgotten(changes: DataFrame, key: tuple[str, ...], horizon: int) -> DataFrame:
    """Return the changes with a mark where a deletion that is forgotten might beat them; see `late_beside`."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    place = F.when(F.col(PROBLEM).isNull(), F.struct(POSITION, OFFSET, PARTITION, TOMBSTONE))
    newest = F.max(place).over(Window.partitionBy(*[column(name) for name in key]))
    changes = changes.withColumn(_NEWEST, newest)
    last = F.col(_NEWEST)
    below = F.col(_STORED).isNull() & F.col(PROBLEM).isNull() & (last[POSITION] <= F.lit(horizon))
    return changes.where(~below | ~last[TOMBSTONE]).withColumn(_LATE, below).drop(_NEWEST)
