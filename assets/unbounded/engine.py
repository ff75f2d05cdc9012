"""The two engines that build tables: Spark, or Arrow in this process with all rows in memory.

Both build the same tables from the same streams; tests run random histories through both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, Generic, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from dagster_adjunct.assets.declaration.change_formats import PROBLEM
from dagster_adjunct.assets.reading.stored_file import StoredFile, read_stored_file
from dagster_adjunct.assets.sources.arrow_changes import ArrowDecoder, add_problems
from dagster_adjunct.assets.sources.changes import ChangeDecoder, Rows, late_change_reason
from dagster_adjunct.assets.sources.dead_letters import SparkDecoder
from dagster_adjunct.assets.versions.version import POSITION
from dagster_adjunct.assets.writing.generation import ARROW, SPARK, GenerationWriter
from dagster_adjunct.resources.bucketing.files import BucketLayout, Generation
from dagster_adjunct.resources.common import to_microseconds
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.column_sql import named_column
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


class TableRows(Protocol[Rows]):
    """Operations on the rows of generations, which have `__position`, `__tombstone` and `__gen` next to their columns.

    Of each key the row with the highest (position, generation) wins.
    """

    def stored(self, store: ObjectStore, what: str, layout: BucketLayout, generations: Sequence[Generation]) -> Rows:
        """Return all rows of these generations. Raises ManifestMismatchError for damaged files."""
        ...

    def positions(self, rows: Rows) -> tuple[int | None, int | None]:
        """Return the lowest and the highest position of these rows; None and None without rows."""
        ...

    def drop_forgotten(
        self, rows: Rows, key: tuple[str, ...], horizon: int | None
    ) -> tuple[Rows, Callable[[], dict[str, int]]]:
        """Return the winner of each key without tombstones up to the horizon, and a function with the counts.

        Once the rows are written it counts "keys", dropped tombstones ("forgotten") and kept "tombstones".
        """
        ...

    def drop_expired(self, rows: Rows, expires: str, watermark: datetime) -> Rows:
        """Return the rows whose time in the column `expires` is after the watermark."""
        ...

    def raise_to_stored_positions(self, changes: Rows, stored: Rows, key: tuple[str, ...]) -> Rows:
        """Return the changes, with positions raised to at least those of the stored rows of their keys."""
        ...

    def split_late(self, changes: Rows, stored: Rows, key: tuple[str, ...], horizon: int) -> tuple[Rows, Rows, int]:
        """Return the changes in time, all changes with the late ones marked as problems, and how many are late.

        Changes of a key are late where the table does not hold the key and the newest of them is not above the horizon:
        a tombstone that was dropped might win against them. If the newest is a deletion itself, they are left out.
        """
        ...


_NEWER, _GENERATION = "__newer", "__gen"
_STORED, _LATE, _NEWEST = "__stored", "__late", "__newest"


@dataclass(frozen=True, slots=True)
class SparkRows:
    """TableRows over Spark frames; the first read starts the session."""

    session: Callable[[], SparkSession]

    def stored(
        self, store: ObjectStore, what: str, layout: BucketLayout, generations: Sequence[Generation]
    ) -> DataFrame:
        """Return all rows of these generations; bucket i is partition i."""
        from dagster_adjunct.resources.bucketing.files import bucketed_frame

        rows = bucketed_frame(self.session(), store, what, layout, generations)
        return rows if layout.bucket_by else rows.coalesce(1)

    def positions(self, rows: DataFrame) -> tuple[int | None, int | None]:
        from pyspark.sql import functions as F

        lowest, highest = rows.agg(F.min(POSITION), F.max(POSITION)).collect()[0]
        return lowest, highest

    def drop_forgotten(
        self, rows: DataFrame, key: tuple[str, ...], horizon: int | None
    ) -> tuple[DataFrame, Callable[[], dict[str, int]]]:
        from pyspark.sql import Observation, Window
        from pyspark.sql import functions as F

        places = Window.partitionBy(*[named_column(name) for name in key]).orderBy(POSITION, _GENERATION)
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

    def drop_expired(self, rows: DataFrame, expires: str, watermark: datetime) -> DataFrame:
        from pyspark.sql import functions as F

        return rows.where(named_column(expires) > F.lit(watermark))

    def raise_to_stored_positions(self, changes: DataFrame, stored: DataFrame, key: tuple[str, ...]) -> DataFrame:
        from pyspark.sql import functions as F

        return (
            _join_stored_positions(changes, stored, key)
            .withColumn(POSITION, F.greatest(POSITION, _STORED))
            .drop(_STORED)
        )

    def split_late(
        self, changes: DataFrame, stored: DataFrame, key: tuple[str, ...], horizon: int
    ) -> tuple[DataFrame, DataFrame, int]:
        from pyspark.sql import functions as F

        changes = _mark_late(_join_stored_positions(changes, stored, key), key, horizon).drop(_STORED)
        reasons = F.coalesce(F.col(PROBLEM), F.when(F.col(_LATE), F.lit(late_change_reason(horizon))))
        in_time = changes.where(~F.col(_LATE)).drop(_LATE)
        return in_time, changes.withColumn(PROBLEM, reasons).drop(_LATE), changes.where(_LATE).count()


def _join_stored_positions(changes: DataFrame, stored: DataFrame, key: tuple[str, ...]) -> DataFrame:
    """Return the changes with the stored position of their key, null where the table does not hold the key."""
    from pyspark.sql import functions as F

    names = [f"__key_{index}" for index in range(len(key))]
    keys = [named_column(own).alias(name) for own, name in zip(key, names, strict=True)]
    held = stored.select(*keys, F.col(POSITION).alias(_STORED)).groupBy(*names).agg(F.max(_STORED).alias(_STORED))
    same = reduce(and_, [named_column(own) == F.col(name) for own, name in zip(key, names, strict=True)])
    return changes.join(held, same, "left").drop(*names)


def _mark_late(changes: DataFrame, key: tuple[str, ...], horizon: int) -> DataFrame:
    """Return the changes, marked where a dropped tombstone might win against them; see `split_late`."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    place = F.when(F.col(PROBLEM).isNull(), F.struct(POSITION, OFFSET, PARTITION, TOMBSTONE))
    newest = F.max(place).over(Window.partitionBy(*[named_column(name) for name in key]))
    changes = changes.withColumn(_NEWEST, newest)
    last = F.col(_NEWEST)
    below = F.col(_STORED).isNull() & F.col(PROBLEM).isNull() & (last[POSITION] <= F.lit(horizon))
    return changes.where(~below | ~last[TOMBSTONE]).withColumn(_LATE, below).drop(_NEWEST)


Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ArrowRows:
    """TableRows over Arrow tables."""

    def stored(
        self, store: ObjectStore, what: str, layout: BucketLayout, generations: Sequence[Generation]
    ) -> pa.Table:
        tables = [layout.arrow_schema().empty_table().append_column(_GENERATION, pa.array([], pa.int32()))]
        for generation in generations:
            for file in generation.files:
                rows = read_stored_file(StoredFile(store, what, generation.folder, file), layout)
                tables.append(rows.append_column(_GENERATION, pa.array([generation.id] * rows.num_rows, pa.int32())))
        return pa.concat_tables(tables)

    def positions(self, rows: pa.Table) -> tuple[int | None, int | None]:
        bounds = pc.min_max(rows.column(POSITION)).as_py()
        return bounds["min"], bounds["max"]

    def drop_forgotten(
        self, rows: pa.Table, key: tuple[str, ...], horizon: int | None
    ) -> tuple[pa.Table, Callable[[], dict[str, int]]]:
        order = [(name, "ascending") for name in (*key, POSITION, _GENERATION)]
        rows = rows.sort_by(order)
        last = {row: index for index, row in enumerate(_iterate_keys(rows, key))}
        winners = rows.take(list(last.values()))
        deleted, positions = (winners.column(name).to_pylist() for name in (TOMBSTONE, POSITION))
        gone = [
            mark and horizon is not None and position <= horizon
            for mark, position in zip(deleted, positions, strict=True)
        ]
        counts = {"keys": len(last), "forgotten": sum(gone), "tombstones": sum(deleted) - sum(gone)}
        return _filter_rows(winners, [not mark for mark in gone]), lambda: counts

    def drop_expired(self, rows: pa.Table, expires: str, watermark: datetime) -> pa.Table:
        return rows.filter(pc.greater(rows.column(expires).cast("int64"), to_microseconds(watermark)))

    def raise_to_stored_positions(self, changes: pa.Table, stored: pa.Table, key: tuple[str, ...]) -> pa.Table:
        held = _highest_positions(stored, key)
        rows = zip(_iterate_keys(changes, key), changes.column(POSITION).to_pylist(), strict=True)
        positions = [max(position, held.get(own, position)) for own, position in rows]
        return changes.set_column(changes.column_names.index(POSITION), POSITION, pa.array(positions, pa.int64()))

    def split_late(
        self, changes: pa.Table, stored: pa.Table, key: tuple[str, ...], horizon: int
    ) -> tuple[pa.Table, pa.Table, int]:
        held, own = _highest_positions(stored, key), list(_iterate_keys(changes, key))
        good = [problem is None for problem in changes.column(PROBLEM).to_pylist()]
        names = (POSITION, OFFSET, PARTITION, TOMBSTONE)
        places = list(zip(*(changes.column(name).to_pylist() for name in names), strict=True))
        newest: dict[Key, tuple[int, int, int, bool]] = {}
        for row, place, fine in zip(own, places, good, strict=True):
            if fine:
                newest[row] = max(place, newest.get(row, place))
        late = [fine and row not in held and newest[row][0] <= horizon for row, fine in zip(own, good, strict=True)]
        kept = [not (mark and newest[row][3]) for row, mark in zip(own, late, strict=True)]
        changes, late = _filter_rows(changes, kept), [mark for mark, stays in zip(late, kept, strict=True) if stays]
        reasons = [late_change_reason(horizon) if mark else None for mark in late]
        return _filter_rows(changes, [not mark for mark in late]), add_problems(changes, reasons), sum(late)


def _iterate_keys(rows: pa.Table, key: tuple[str, ...]) -> Iterator[Key]:
    return zip(*(rows.column(name).to_pylist() for name in key), strict=True)


def _highest_positions(stored: pa.Table, key: tuple[str, ...]) -> dict[Key, int]:
    """Return the highest stored position of each key."""
    held: dict[Key, int] = {}
    for own, position in zip(_iterate_keys(stored, key), stored.column(POSITION).to_pylist(), strict=True):
        held[own] = max(position, held.get(own, position))
    return held


def _filter_rows(rows: pa.Table, mask: Sequence[bool]) -> pa.Table:
    return rows.filter(pa.array(mask, pa.bool_()))


@dataclass(frozen=True, slots=True)
class Engine(Generic[Rows]):
    """A decoder of changes, a reader of stored rows and a writer of generations, all on the same kind of rows."""

    decoder: ChangeDecoder[Rows]
    table: TableRows[Rows]
    writer: GenerationWriter[Rows]


ARROW_ENGINE = Engine(ArrowDecoder(), ArrowRows(), ARROW)


def select_engine(spark: Callable[[], SparkSession]) -> Engine[Any]:
    """Return the Spark engine, which starts the session on first use, or for IN_PROCESS the Arrow engine."""
    return ARROW_ENGINE if spark is IN_PROCESS else Engine(SparkDecoder(spark), SparkRows(spark), SPARK)
