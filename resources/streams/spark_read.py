"""Reads a lake stream as one bucketed Spark scan: joins on the stream's key need no exchange on its side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from resources.bucketing.read import GENERATION, bucketed_frame
from resources.columns import quoted
from resources.streams.document import ROW, Segment, StreamState
from resources.streams.index import Span, holds_records
from resources.streams.system import META, META_DDL, OFFSET, PARTITION, TIMESTAMP, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from resources.objects.store import ObjectStore


def read_frame(
    spark: SparkSession,
    store: ObjectStore,
    prefix: str,
    state: StreamState,
    touched: Sequence[Segment],
    spans: Mapping[int, Span],
) -> DataFrame:
    """Return the records of these spans, which lie in the touched segments, with the columns of META.

    Each segment is a generation of the table; what differs by generation or partition (the offset at which a
    segment begins, the time of its append) comes from an array literal, however many segments there are.
    """
    from pyspark.sql import functions as F

    declaration = state.declaration
    layout, schema, n = declaration.layout, declaration.schema_, declaration.partitions
    segments = [segment for segment in touched if holds_records(segment, spans)]
    if not segments:
        return spark.createDataFrame([], f"{schema.ddl()}, {META_DDL}")
    generations = [segment.generation(i, prefix) for i, segment in enumerate(segments)]
    frame = bucketed_frame(spark, store, prefix, layout, generations)

    partition: Column = F.lit(0)
    if declaration.key:
        partition = F.pmod(F.hash(*[F.col(quoted(name)) for name in declaration.key]), F.lit(n))
    base = _array(offset for segment in segments for offset in segment.base)
    offset = F.col(ROW) + F.get(base, F.col(GENERATION) * n + partition)
    appended = _array(segment.appended * 1000 for segment in segments)
    timestamp = F.coalesce(F.col(TIMESTAMP), F.timestamp_micros(F.get(appended, F.col(GENERATION))))

    wanted = [p for p in range(n) if spans.get(p, (0, 0))[0] < spans.get(p, (0, 0))[1]]
    if any(f.partition not in wanted for s in segments for f in s.files):
        # Spark leaves out files by this filter when it plans; the row filter below makes it exact.
        names = "|".join(f"{p:05d}" for p in wanted)
        frame = frame.where(F.col("_metadata.file_name").rlike(rf"_({names})\.c000\."))
    if _is_cut(segments, spans):
        lows, highs = _row_bounds(segments, spans)
        frame = frame.where((F.col(ROW) >= lows) & (F.col(ROW) < highs))
        start = _array(spans.get(p, (0, 0))[0] for p in range(n))
        end = _array(spans.get(p, (0, 0))[1] for p in range(n))
        frame = frame.where((offset >= F.get(start, partition)) & (offset < F.get(end, partition)))
    meta = {PARTITION: partition.cast("int"), OFFSET: offset, TIMESTAMP: timestamp, TOMBSTONE: F.col(TOMBSTONE)}
    return frame.select(*[F.col(quoted(name)) for name in schema.names], *[meta[name].alias(name) for name in META])


def _array(values: Iterable[int]) -> Column:
    """Return an array of bigint as one literal: Spark folds the text, so neither plan nor parser grows."""
    from pyspark.sql import functions as F

    return F.split(F.lit(",".join(map(str, values))), ",").cast("array<bigint>")


def _is_cut(segments: Sequence[Segment], spans: Mapping[int, Span]) -> bool:
    """Return whether some file of the segments holds records outside of the spans."""
    for segment in segments:
        for file in segment.files:
            start, end = spans.get(file.partition, (0, 0))
            if segment.base[file.partition] < start or end < segment.next[file.partition]:
                return True
    return False


def _row_bounds(segments: Sequence[Segment], spans: Mapping[int, Span]) -> tuple[int, int]:
    """Return bounds of `__row` over all wanted records: Parquet skips row groups by them."""
    lows, highs = [], []
    for segment in segments:
        for partition, (start, end) in spans.items():
            base, after = segment.base[partition], segment.next[partition]
            if base < end and start < after and start < end:
                lows.append(max(start - base, 0))
                highs.append(min(end, after) - base)
    return min(lows), max(highs)
