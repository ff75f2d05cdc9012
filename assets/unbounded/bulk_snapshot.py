"""Loads a bulk snapshot as a table's base: its position checked against the stream, its rows with the right columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dagster_adjunct.assets.declaration.changes.change_formats import ORDER, PROBLEM
from dagster_adjunct.assets.declaration.changes.change_order import LOWEST
from dagster_adjunct.assets.declaration.initial_load import no_offset, positions
from dagster_adjunct.assets.sources.order_by_column import with_order
from dagster_adjunct.assets.unbounded.next_served_version import table_layout
from dagster_adjunct.assets.versions.build_attempts import AttemptRenewal, forget_attempt
from dagster_adjunct.assets.versions.kept_history import VALID_FROM
from dagster_adjunct.assets.versions.sealed_version import POSITION
from dagster_adjunct.assets.writing.generation_writer import SPARK
from dagster_adjunct.assets.writing.write_generation import write_generation
from dagster_adjunct.resources.bucketing.write_over_time import OverTimeWrite
from dagster_adjunct.resources.errors import AdjunctError, DatasetError, OffsetOutOfRangeError
from dagster_adjunct.resources.objects.object_store import telling_of_staged
from dagster_adjunct.resources.schemas.schema import repeated, widens
from dagster_adjunct.resources.streams.interface.stream_system import TIMESTAMP, TOMBSTONE

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from dagster_adjunct.assets.declaration.changes.change_order import Samples
    from dagster_adjunct.assets.declaration.initial_load import Snapshot
    from dagster_adjunct.assets.sources.opened_stream import Source
    from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog
    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.resources.bucketing.bucket_files import Generation
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.schemas.schema import Schema
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

_STAGED_BYTES = 128 * 1024 * 1024
_SNAPSHOT = "a bulk snapshot"


def load_snapshot(
    context: Runtime, source: Source, attempt: Attempt, number: int
) -> tuple[Generation, dict[SystemStreamPartition, str], Samples | None]:
    """Write the bulk snapshot as a base; return it, the position from which the stream goes on, and the first values
    that its rows are ordered by.

    Raises DatasetError for other columns and for a key that stands twice, and what `check_position` raises.
    """
    from pyspark.sql import functions as F

    spec, spark = source.spec, context.spark()
    initial = spec.following.initial
    assert initial is not None
    what = f"dataset {spec.name!r}: {initial.describe()}"
    with closing(initial.load(spec, source.schema, source.ssps, spark)) as snapshot:
        start = check_position(snapshot, source, what)
        with (
            as_frame(snapshot, source.schema, what, context.log(spec.name), spark, context.by) as rows,
            AttemptRenewal(context.lake, spec.name, attempt.id, context.by),
        ):
            placed, samples = _placed(source, rows)
            placed = placed.withColumn(TOMBSTONE, F.lit(False))
            layout = table_layout(source)
            if spec.following.history is not None:
                placed = placed.withColumn(VALID_FROM, _valid_from(source, start, spark))
            generation, counters = write_generation(
                context.lake,
                attempt,
                number,
                layout,
                placed,
                SPARK,
                what=f"dataset {spec.name!r}, bulk snapshot",
                order_by=(*layout.key, POSITION),
                keep_tombstones=False,
                partitioned=False,
                over_time=None if spec.following.history is None else OverTimeWrite(told=True),
            )
    if counters["superseded"]:
        raise DatasetError(
            f"dataset {spec.name!r}: {counters['superseded']:,} rows of the bulk snapshot have a key "
            f"({', '.join(spec.key)}) that another row has too.",
            "Nothing was published. Correct the snapshot, or the key.",
            dataset=spec.name,
        )
    return generation, start, samples


def _placed(source: Source, rows: DataFrame) -> tuple[DataFrame, Samples | None]:
    """Return the rows of a snapshot with their positions: those of their columns, else below all changes."""
    from pyspark.sql import functions as F

    order = source.spec.following.order_by or ()
    lowest = F.lit(LOWEST).cast("bigint") if source.position_type == "bigint" else F.lit("")
    if not order or not set(order) <= set(source.schema.names):
        return rows.withColumn(POSITION, lowest), None
    placed, samples = with_order(source.spec, rows.withColumn(PROBLEM, F.lit(None).cast("string")), source.schema, None)
    return placed.withColumn(POSITION, F.coalesce(F.col(ORDER), lowest)).drop(ORDER, PROBLEM), samples


def _valid_from(source: Source, start: Mapping[SystemStreamPartition, str], spark: SparkSession) -> Column:
    """Return since when the rows of a snapshot are valid: by their column, else since before all changes that follow.

    That is the time of the oldest record from the snapshot's position on, so that a change never comes before the row
    that it changes; of now where there is none.
    """
    from pyspark.sql import functions as F

    from dagster_adjunct.resources.schemas.quoted_columns import column

    name = source.spec.following.valid_from
    if name is not None and name in source.schema.names:
        return column(name).cast("timestamp")
    if name is not None:
        raise DatasetError(
            f"dataset {source.spec.name!r}: the rows of its bulk snapshot don't say since when they are valid: "
            f"valid_from names {name!r}, which is not stored.",
            "Store that column too, or leave valid_from out.",
            dataset=source.spec.name,
        )
    ends = source.system.upcoming(source.ssps)
    ranges = {ssp: (offset, ends[ssp]) for ssp, offset in start.items() if source.system.compare(offset, ends[ssp]) < 0}
    oldest = source.read(spark, ranges).agg(F.min(TIMESTAMP)).first() if ranges else None
    return F.lit(oldest[0]) if oldest is not None and oldest[0] is not None else F.current_timestamp()


def check_position(snapshot: Snapshot, source: Source, what: str) -> dict[SystemStreamPartition, str]:
    """Return the snapshot's position, if it is of every partition and still on the stream.

    Raises DatasetError and OffsetOutOfRangeError.
    """
    position = positions(
        source.spec, what, {str(ssp): offset for ssp, offset in snapshot.position.items()}, source.ssps
    )
    oldest, upcoming = source.system.oldest(source.ssps), source.system.upcoming(source.ssps)
    for ssp, offset in position.items():
        try:
            source.system.compare(offset, offset)
        except OffsetOutOfRangeError as error:
            raise no_offset(OffsetOutOfRangeError, what, ssp, offset) from error
        if source.system.compare(offset, oldest[ssp]) < 0:
            raise OffsetOutOfRangeError(
                f"{what} was taken at offset {offset} of {ssp}, and the stream holds nothing before {oldest[ssp]} any "
                "more: the changes between the two are lost.",
                "Take a new snapshot. A longer retention of the stream keeps this from happening.",
                offset=offset,
                stream=ssp.qualified_stream,
                partition=ssp.partition,
                oldest=oldest[ssp],
            )
        if source.system.compare(offset, upcoming[ssp]) > 0:
            raise OffsetOutOfRangeError(
                f"{what} was taken at offset {offset} of {ssp}, and the stream ends at {upcoming[ssp]}.",
                "Correct the position: it is the offset of the first change that the snapshot may lack.",
                offset=offset,
                stream=ssp.qualified_stream,
                partition=ssp.partition,
                upcoming=upcoming[ssp],
            )
    return position


def fitted(rows: DataFrame, schema: Schema, what: str) -> DataFrame:
    """Return these columns of the rows, in their types. Raises DatasetError for missing ones and other types."""
    from dagster_adjunct.resources.schemas.quoted_columns import column

    types = {field.name: field.dataType.simpleString() for field in rows.schema.fields}
    twice = repeated(rows.columns)
    wrong = [(name, "is missing") for name in schema.names if name not in types]
    wrong += [
        (field.name, f"is {types[field.name]}, expected {field.type}")
        for field in schema.fields
        if field.name in types and not widens(types[field.name], field.type)
    ]
    wrong += [(name, "stands twice") for name in twice if name in schema]
    if wrong:
        raise DatasetError(
            f"{what} has other columns than the dataset: {'; '.join(' '.join(part) for part in wrong)}.",
            "Select, name and cast the columns of the snapshot as the dataset has them.",
            column=wrong[0][0],
        )
    return rows.select(*[column(field.name).cast(field.type).alias(field.name) for field in schema.fields])


@contextmanager
def as_frame(
    snapshot: Snapshot, schema: Schema, what: str, log: DatasetLog, spark: SparkSession, by: str
) -> Iterator[DataFrame]:
    """Give the rows of a snapshot as a frame with these columns, while the context lasts.

    Arrow tables are put in the lake meanwhile, where all of Spark's executors see them.
    """
    from pyspark.sql import DataFrame

    if isinstance(snapshot.rows, DataFrame):
        yield fitted(snapshot.rows, schema, what)
        return
    attempt = log.attempt()
    folder = f"{attempt.folder}/{attempt.id}"
    with AttemptRenewal(log.lake, log.name, attempt.id, by):
        try:
            rows = _staged(log.lake, folder, snapshot.rows, spark)
            yield fitted(spark.createDataFrame([], schema.ddl()) if rows is None else rows, schema, what)
        finally:
            with suppress(AdjunctError):  # what can't be deleted now is garbage for discarding
                log.lake.store.delete_many([item.key for item in log.lake.store.list(f"{folder}/")])
    forget_attempt(log.lake, log.name, attempt.id)


def _staged(lake: Lake, folder: str, tables: Iterable[pa.Table], spark: SparkSession) -> DataFrame | None:
    """Write tables below a folder of the lake, and return them as a frame; None where there are none."""
    import pyarrow.parquet as pq

    path = lake.store.staging_dir() / f"{uuid4().hex}.parquet"
    number, writer = 0, None
    try:
        for table in tables:
            with telling_of_staged(lake.store, path, _SNAPSHOT):
                writer = writer or pq.ParquetWriter(path, table.schema)
                writer.write_table(table)
                size = path.stat().st_size
            if size >= _STAGED_BYTES:
                number, writer = _uploaded(lake, folder, path, number, writer), None
        if writer is not None:
            number, writer = _uploaded(lake, folder, path, number, writer), None
    finally:
        with suppress(OSError):  # of a disk that is full, say, as was told
            if writer is not None:
                writer.close()
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return spark.read.parquet(lake.store.spark_uri(folder)) if number else None


def _uploaded(lake: Lake, folder: str, path: Any, number: int, writer: Any) -> int:
    with telling_of_staged(lake.store, path, _SNAPSHOT):
        writer.close()
    lake.store.upload(path, f"{folder}/rows-{number:05d}.parquet")
    path.unlink(missing_ok=True)
    return number + 1
