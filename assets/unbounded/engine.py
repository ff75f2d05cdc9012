"""The two engines that build tables: Spark, or Arrow in this process with all rows in memory.

An engine reads changes, separates those that can't be applied, merges rows and writes files; `changes.py`,
`compaction.py` and `rewind.py` describe the steps for both. Both have the same methods, and build the same tables from
the same streams; tests run random histories through both.

Changes have the columns of the entries, those of META, `__position`, and PROBLEM: why a change can't be applied. Stored
rows have `__position`, `__tombstone` and `__gen` next to their columns; of each key the row with the highest (position,
generation) wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, cast

from dagster_adjunct.assets.declaration.change_formats import PROBLEM, ArrowChangeFormat
from dagster_adjunct.assets.declaration.change_values import Samples
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.reading.stored_file import StoredFile, read_stored_file
from dagster_adjunct.assets.sources.changes import (
    RAW,
    add_problems,
    bad_change_error,
    decode_arrow_changes,
    decode_changes,
    fail_on_problems,
    late_change_reason,
    supports_json,
)
from dagster_adjunct.assets.sources.entries import OpenedStream, Ranges, list_spark_needs, raise_if_spark_needed
from dagster_adjunct.assets.versions.version import POSITION
from dagster_adjunct.assets.writing.generation import ARROW, SPARK
from dagster_adjunct.resources.bucketing import files
from dagster_adjunct.resources.bucketing.files import GENERATION_COLUMN, VALID_FROM, BucketLayout, Generation
from dagster_adjunct.resources.common import to_microseconds
from dagster_adjunct.resources.lazy_modules import F, pa, pc
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.schema import Schema, named_column
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, TIMESTAMP

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEAD_LETTERS = Schema.of(
    dataset="string", stream="string", partition="int", offset="bigint", reason="string", value="string", at="timestamp"
)
"""The columns of a stream of dead letters. `value` is the record's columns as JSON, `at` its own time."""
Counted = Callable[[], int] | None
"""Counts the late changes once they are written; None where they are not left out."""


@dataclass(frozen=True, slots=True)
class SparkEngine:
    """The engine over Spark frames; the first read starts the session."""

    session: Callable[[], SparkSession]
    writer = staticmethod(SPARK)

    def check(self, source: OpenedStream) -> None:
        """Raise ConfigurationError for a dataset whose changes this engine can't read."""

    def read_changes(
        self, source: OpenedStream, ranges: Ranges, positions_from: int = 0, samples: Samples | None = None
    ) -> tuple[DataFrame, Samples | None]:
        """Return the changes made from the records of these ranges, and the first values of their order.

        Positions by offset start at `positions_from`. `samples` are the first values if there were changes before.
        Raises SchemaMismatchError if the first change can't be ordered.
        """
        return decode_changes(source, source.read(self.session(), ranges), positions_from, samples)

    def drop_late(self, changes: DataFrame, horizon: int | None, on_bad_change: object) -> tuple[DataFrame, Counted]:
        """Return the changes above the horizon, and a function that counts the late ones after the write.

        The horizon is a position, or a time in microseconds for rows over time. A late change may be older than a
        deletion that is no longer stored, so it can't be applied. With dead letters it gets a problem instead.
        """
        from pyspark.sql import Observation

        if horizon is None:
            return changes, None
        over_time = VALID_FROM in changes.columns
        late = (F.unix_micros(VALID_FROM) if over_time else F.col(POSITION)) <= F.lit(horizon)
        # A row without a time gets a problem of its own.
        late = F.coalesce(late, F.lit(False)) if over_time else late
        if isinstance(on_bad_change, DeadLetters):
            reason = F.lit(late_change_reason(horizon, over_time))
            return changes.withColumn(PROBLEM, F.coalesce(F.col(PROBLEM), F.when(late, reason))), None
        observed = Observation()
        counted = changes.observe(observed, F.coalesce(F.sum(late.cast("long")), F.lit(0)).alias("late"))
        return counted.where(~late | F.col(PROBLEM).isNotNull()), lambda: int(observed.get["late"])

    def applicable(self, changes: DataFrame, dataset: str, *, set_aside: bool) -> DataFrame:
        """Return the changes without problems; unless others are set aside, the write raises BadChangeError for one."""
        if not set_aside:
            return fail_on_problems(changes, dataset)
        return changes.where(F.col(PROBLEM).isNull()).drop(PROBLEM, RAW)

    def dead_letters(
        self, changes: DataFrame, spec: AdjunctDataset, incomplete: Sequence[tuple[int, int, str]]
    ) -> DataFrame | None:
        """Return the dead letters for the changes that can't be applied, one for each record; None without any.

        `incomplete` has partition, offset and reason of further ones.
        """
        if incomplete:
            place, reason = ("__bad_partition", "__bad_offset"), "__reason"
            columns = f"{place[0]} int, {place[1]} bigint, {reason} string"
            known = changes.sparkSession.createDataFrame(list(incomplete), columns)
            same = (F.col(PARTITION) == F.col(place[0])) & (F.col(OFFSET) == F.col(place[1]))
            changes = changes.join(F.broadcast(known), same, "left")
            changes = changes.withColumn(PROBLEM, F.coalesce(PROBLEM, reason)).drop(*place, reason)
        bad = changes.where(F.col(PROBLEM).isNotNull()).groupBy(PARTITION, OFFSET)
        letters = bad.agg(
            F.min(PROBLEM).alias("reason"), F.first(RAW).alias("value"), F.first(TIMESTAMP).alias("at")
        ).select(
            F.lit(spec.name).alias("dataset"),
            F.lit(str(spec.input)).alias("stream"),
            F.col(PARTITION).alias("partition"),
            F.col(OFFSET).alias("offset"),
            "reason",
            "value",
            "at",
        )
        return None if letters.isEmpty() else letters

    def stored_rows(
        self, store: ObjectStore, what: str, layout: BucketLayout, generations: Sequence[Generation]
    ) -> DataFrame:
        """Return all rows of these generations; bucket i is partition i. Raises ManifestMismatchError for damage."""
        rows = files.bucketed_frame(self.session(), store, what, layout, generations)
        return rows if layout.bucket_by else rows.coalesce(1)

    def position_bounds(self, rows: DataFrame) -> tuple[int | None, int | None]:
        """Return the lowest and the highest position of these rows; None and None without rows."""
        lowest, highest = rows.agg(F.min(POSITION), F.max(POSITION)).collect()[0]
        return lowest, highest

    def drop_expired(self, rows: DataFrame, expires: str, watermark: datetime) -> DataFrame:
        """Return the rows whose time in the column `expires` is after the watermark."""
        return rows.where(named_column(expires) > F.lit(watermark))


def list_change_spark_needs(source: OpenedStream) -> list[str]:
    """Return, in words, why this table's changes can't be applied without Spark; empty if they can.

    Their format has to be an ArrowChangeFormat. Dead letters store records as JSON, which needs Spark for records with
    fractions or decimals.
    """
    spec, needed = source.spec, list_spark_needs(source)
    if not isinstance(spec.following.changes, ArrowChangeFormat):
        needed.append(f"the form of its changes ({spec.following.changes.describe()})")
    assert source.info.schema is not None, "raw records are rejected when the input is opened"
    plain = all(supports_json(field.type) for field in source.info.schema.fields)
    if isinstance(spec.following.on_bad_change, DeadLetters) and not plain:
        needed.append("dead letters of records with fractions or decimals")
    return needed


@dataclass(frozen=True, slots=True)
class ArrowEngine:
    """The engine over Arrow tables, for changes and tables that fit in memory; see SparkEngine for the methods.

    It reads changes that need no Spark (`list_change_spark_needs`).
    """

    writer = staticmethod(ARROW)

    def check(self, source: OpenedStream) -> None:
        spec, needed = source.spec, list_change_spark_needs(source)
        if spec.following.initial is not None:
            needed.append(f"its bulk snapshot ({spec.following.initial.describe()})")
        raise_if_spark_needed(spec, needed)

    def read_changes(
        self, source: OpenedStream, ranges: Ranges, positions_from: int = 0, samples: Samples | None = None
    ) -> tuple[pa.Table, Samples | None]:
        return decode_arrow_changes(source, source.read_arrow(ranges), positions_from, samples)

    def drop_late(self, changes: pa.Table, horizon: int | None, on_bad_change: object) -> tuple[pa.Table, Counted]:
        if horizon is None:
            return changes, None
        over_time = VALID_FROM in changes.column_names
        places = changes.column(VALID_FROM).cast("int64") if over_time else changes.column(POSITION)
        late = pc.fill_null(pc.less_equal(places, horizon), False)
        if isinstance(on_bad_change, DeadLetters):
            reasons = [late_change_reason(horizon, over_time) if is_late else None for is_late in late.to_pylist()]
            return add_problems(changes, reasons), None
        count = int(pc.sum(late).as_py() or 0)
        return changes.filter(pc.or_(pc.invert(late), pc.is_valid(changes.column(PROBLEM)))), lambda: count

    def applicable(self, changes: pa.Table, dataset: str, *, set_aside: bool) -> pa.Table:
        bad = changes.filter(pc.is_valid(changes.column(PROBLEM)))
        if bad.num_rows and not set_aside:
            offset, partition, reason = (bad.column(name)[0].as_py() for name in (OFFSET, PARTITION, PROBLEM))
            raise bad_change_error(dataset, offset, partition, reason)
        good = changes.filter(pc.is_null(changes.column(PROBLEM)))
        return good.drop_columns([name for name in (PROBLEM, RAW) if name in changes.column_names])

    def dead_letters(
        self, changes: pa.Table, spec: AdjunctDataset, incomplete: Sequence[tuple[int, int, str]]
    ) -> pa.Table | None:
        if incomplete:
            reasons = {(partition, offset): reason for partition, offset, reason in incomplete}
            places = zip(*(changes.column(name).to_pylist() for name in (PARTITION, OFFSET)), strict=True)
            changes = add_problems(changes, [reasons.get(place) for place in places])
        bad = changes.filter(pc.is_valid(changes.column(PROBLEM)))
        if not bad.num_rows:
            return None
        names = {PARTITION: "partition", OFFSET: "offset", PROBLEM: "reason", RAW: "value", TIMESTAMP: "at"}
        rows = bad.select(list(names)).rename_columns(list(names.values()))
        rows = rows.sort_by([("partition", "ascending"), ("offset", "ascending"), ("reason", "ascending")])
        first: dict[tuple[int, int], int] = {}
        for row, place in enumerate(zip(rows["partition"].to_pylist(), rows["offset"].to_pylist(), strict=True)):
            first.setdefault(place, row)
        rows = rows.take(list(first.values()))
        origin = {"dataset": spec.name, "stream": str(spec.input)}
        columns = {name: pa.array([text] * rows.num_rows, pa.string()) for name, text in origin.items()}
        columns |= {name: rows.column(name) for name in names.values()}
        return pa.table(columns).cast(DEAD_LETTERS.to_arrow())

    def stored_rows(
        self, store: ObjectStore, what: str, layout: BucketLayout, generations: Sequence[Generation]
    ) -> pa.Table:
        tables = [layout.arrow_schema().empty_table().append_column(GENERATION_COLUMN, pa.array([], pa.int32()))]
        for generation in generations:
            for file in generation.files:
                rows = read_stored_file(StoredFile(store, what, generation.folder, file), layout)
                tables.append(
                    rows.append_column(GENERATION_COLUMN, pa.array([generation.id] * rows.num_rows, pa.int32()))
                )
        return pa.concat_tables(tables)

    def position_bounds(self, rows: pa.Table) -> tuple[int | None, int | None]:
        bounds = pc.min_max(rows.column(POSITION)).as_py()
        return bounds["min"], bounds["max"]

    def drop_expired(self, rows: pa.Table, expires: str, watermark: datetime) -> pa.Table:
        return rows.filter(pc.greater(rows.column(expires).cast("int64"), to_microseconds(watermark)))


def select_engine(spark: Callable[[], SparkSession]) -> SparkEngine:
    """Return the SparkEngine, which starts the session on first use, or for IN_PROCESS the ArrowEngine.

    The steps do not look into rows, so they are typed for Spark alone.
    """
    return cast("SparkEngine", ArrowEngine()) if spark is IN_PROCESS else SparkEngine(spark)
