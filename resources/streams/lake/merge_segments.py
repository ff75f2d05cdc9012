"""Merges the files of neighbouring segments; offsets stay, `__row` counts from the first one's base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.resources.bucketing.bucket_files import BucketFile, BucketLayout
from dagster_adjunct.resources.bucketing.files_before_evolution import as_laid_out
from dagster_adjunct.resources.bucketing.writer import BucketFileWriter, WriteOptions
from dagster_adjunct.resources.errors import ManifestMismatchError
from dagster_adjunct.resources.schemas.schema import arrow_type
from dagster_adjunct.resources.streams.interface.stream_system import EPOCH, POSITION, SOURCE, TIMESTAMP
from dagster_adjunct.resources.streams.lake.arrow_read import open_parquet
from dagster_adjunct.resources.streams.lake.stream_manifest import (
    ROW,
    Declaration,
    FileEntry,
    Segment,
    data_folder,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.resources.objects.object_store import ObjectStore


def merge_files(
    store: ObjectStore, prefix: str, declaration: Declaration, run: Sequence[Segment], attempt: str
) -> tuple[FileEntry, ...]:
    """Write the run's records into one file a partition and return the files.

    Rows are streamed by row group, so memory does not grow with the run. A timestamp that was the append's is
    written out, since the segment can't tell the appends apart any more. Files of before the stream's columns changed
    are written with those of now.
    """
    folder = data_folder(prefix, attempt)
    options = WriteOptions(prefix, range_of=TIMESTAMP)
    layout = declaration.layout_of((EPOCH, *positions_in(store, prefix, run)))
    written: list[FileEntry] = []
    for partition in sorted({file.partition for segment in run for file in segment.files}):
        writer = BucketFileWriter(store, folder, partition, layout, options)
        rows = 0
        try:
            for segment in run:
                for file in segment.files:
                    if file.partition == partition:
                        rows += file.rows
                        _copy(store, prefix, segment, file, run[0].base[partition], writer, layout)
            done = writer.finish()
        finally:
            writer.discard()
        _check(prefix, partition, rows, done)
        if done is not None:
            written.append(FileEntry.of(done))
    return tuple(written)


def positions_in(store: ObjectStore, prefix: str, run: Sequence[Segment]) -> tuple[str, ...]:
    """Return the columns of positions where a file of these segments has them.

    Segments that were merged of some with positions and some without say that they have none, and their files do.
    """
    if any(segment.positioned and segment.files for segment in run):
        return tuple(POSITION)
    files = ((segment, file) for segment in run for file in segment.files)
    there = any(SOURCE in open_parquet(store, prefix, *place).schema_arrow.names for place in files)
    return tuple(POSITION) if there else ()


def _copy(
    store: ObjectStore,
    prefix: str,
    segment: Segment,
    file: FileEntry,
    base: int,
    writer: BucketFileWriter,
    layout: BucketLayout,
) -> None:
    parquet = open_parquet(store, prefix, segment, file)
    shift = segment.base[file.partition] - base
    for group in range(parquet.metadata.num_row_groups):
        rows = _moved(parquet.read_row_group(group), shift, segment.appended, layout)
        writer.write(as_laid_out(rows, layout))


def _moved(table: pa.Table, shift: int, appended_ms: int, layout: BucketLayout) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    when = pa.scalar(appended_ms * 1000, pa.timestamp("us", tz="UTC"))
    for name, kind in layout.hidden:
        if name not in table.column_names:  # a file of records without epochs, or without positions
            table = table.append_column(name, pa.nulls(table.num_rows, arrow_type(kind)))
    for name, column in (
        (ROW, pc.add(table.column(ROW), shift)),
        (TIMESTAMP, pc.fill_null(table.column(TIMESTAMP), when)),
    ):
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _check(prefix: str, partition: int, expected: int, done: BucketFile | None) -> None:
    written = done.rows if done is not None else 0
    if written != expected:
        raise ManifestMismatchError(
            f"{prefix}: compaction of partition {partition} wrote {written} records, the manifest lists {expected}.",
            "Nothing was committed; the stream is as it was. Report this with the stream's manifest.",
            key=prefix,
        )
