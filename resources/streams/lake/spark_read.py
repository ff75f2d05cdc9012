"""Reads a lake stream as one bucketed Spark scan: joins on the stream's key need no exchange on its side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from dagster_adjunct.resources.bucketing.bucket_files import bucket_file_end
from dagster_adjunct.resources.bucketing.bucketed_tables import GENERATION, bucketed_frame
from dagster_adjunct.resources.schemas.quoted_columns import bigints, quoted
from dagster_adjunct.resources.streams.interface.stream_system import (
    EPOCH,
    OFFSET,
    PARTITION,
    POSITION,
    RECORD_META,
    TIMESTAMP,
    TOMBSTONE,
)
from dagster_adjunct.resources.streams.lake.segment_index import Span, holds_records
from dagster_adjunct.resources.streams.lake.stream_manifest import HIDDEN, ROW, Segment, StreamState
from dagster_adjunct.resources.streams.lake.wanted_rows import Cut, cut_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from dagster_adjunct.resources.objects.object_store import ObjectStore


def read_frame(
    spark: SparkSession,
    store: ObjectStore,
    prefix: str,
    state: StreamState,
    touched: Sequence[Segment],
    spans: Mapping[int, Span],
    *,
    positions: bool = False,
) -> DataFrame:
    """Return the records of these spans, which lie in the touched segments, with the columns of RECORD_META.

    With `positions`, those of POSITION follow.

    Each segment is a generation of the table; what differs by generation or partition (the offset at which a
    segment begins, the time of its append) comes from an array literal, however many segments there are.
    """
    from pyspark.sql import functions as F

    declaration = state.declaration
    layout, schema, n = declaration.layout, declaration.schema_, declaration.partitions
    segments = [segment for segment in touched if holds_records(segment, spans)]
    generations = [segment.generation(i, prefix) for i, segment in enumerate(segments)]
    frame = bucketed_frame(spark, store, prefix, layout, generations)
    if not segments:
        return _no_records(frame, schema.names, positions=positions)

    partition: Column = F.lit(0)
    if declaration.key:
        partition = F.pmod(F.hash(*[F.col(quoted(name)) for name in declaration.key]), F.lit(n))
    place = F.col(GENERATION) * n + partition
    base = bigints(offset for segment in segments for offset in segment.base)
    appended = bigints(segment.appended * 1000 for segment in segments)
    meta = {
        PARTITION: partition.cast("int"),
        OFFSET: F.col(ROW) + F.get(base, place),
        TIMESTAMP: F.coalesce(F.col(TIMESTAMP), F.timestamp_micros(F.get(appended, F.col(GENERATION)))),
        TOMBSTONE: F.col(TOMBSTONE),
        EPOCH: F.coalesce(F.col(EPOCH), F.lit(0)),  # files without the column read as null
    }
    for condition in _conditions(cut_of(segments, spans, n), place, len(segments)):
        frame = frame.where(condition)
    own = [F.col(quoted(name)) for name in schema.names]
    return frame.select(
        *own,
        *[meta[name].alias(name) for name in RECORD_META],
        *[F.col(name) for name in POSITION if positions],
    )


def _no_records(frame: DataFrame, own: Sequence[str], *, positions: bool) -> DataFrame:
    """Return the columns of records, of a table without any: a scan that is bucketed still.

    What may say when a record was, or whether it is one, is no literal: Spark would see that nothing passes, and leave
    the scan with its buckets out.
    """
    from pyspark.sql import functions as F

    kinds = dict(zip(RECORD_META, ("int", "bigint", "timestamp", "boolean", "int"), strict=True))
    kinds |= {name: kind for name, kind in HIDDEN if positions and name in POSITION}
    known = {EPOCH: F.lit(0), TIMESTAMP: F.col(TIMESTAMP), TOMBSTONE: F.col(TOMBSTONE)}
    return frame.select(
        *[F.col(quoted(name)) for name in own],
        *[known.get(name, F.lit(None)).cast(kind).alias(name) for name, kind in kinds.items()],
    )


def _conditions(cut: Cut, place: Column, segments: int) -> Iterator[Column]:
    """Yield what rows must fulfil. Spark checks each row, so what costs much is asked only where it may not hold."""
    from pyspark.sql import functions as F

    if cut.partitions is not None:
        # By this Spark leaves out files when it plans, and yet it looks at it for every row: endings compare fast.
        name = F.col("_metadata.file_name")
        yield reduce(or_, [name.endswith(bucket_file_end(partition)) for partition in cut.partitions] or [F.lit(False)])
    if cut.rows:
        yield reduce(or_, [(F.col(ROW) >= low) & (F.col(ROW) < high) for low, high in cut.rows])
    if cut.begun:
        yield _outside(cut.begun, segments) | (F.col(ROW) >= F.get(bigints(cut.lows), place))
    if cut.ended:
        yield _outside(cut.ended, segments) | (F.col(ROW) < F.get(bigints(cut.highs), place))


def _outside(some: Sequence[int], segments: int) -> Column:
    """Return whether a row is in none of these segments. As text, which does not take a call for each."""
    from pyspark.sql import functions as F

    if len(some) == segments:
        return F.lit(False)
    return F.expr(f"`{GENERATION}` NOT IN ({', '.join(map(str, some))})")
