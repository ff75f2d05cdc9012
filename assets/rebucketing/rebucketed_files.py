"""Rows of sealed files written anew into other buckets, without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.bucketing.files_before_evolution import as_laid_out
from dagster_adjunct.resources.bucketing.writer import ROWS_PER_GROUP, BucketFileWriter, WriteOptions
from dagster_adjunct.resources.errors import ManifestMismatchError

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.assets.reading.stored_files import StoredFile
    from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog
    from dagster_adjunct.resources.bucketing.bucket_files import BucketFile, BucketLayout

_ROWS_AT_ONCE = 4_000_000


def rebucketed(
    log: DatasetLog,
    stored: Sequence[StoredFile],
    layout: BucketLayout,
    attempt: Attempt,
    number: int,
    options: WriteOptions | None = None,
) -> list[BucketFile]:
    """Write the rows of these files, one for a key, into their new buckets, each in the order of its keys.

    Rows keep what they carry beside their columns, and get the columns of the layout. As many buckets at a time as have
    about `_ROWS_AT_ONCE` rows, so that memory does not grow with the version.
    """
    import pyarrow as pa

    folder = attempt.generation(number).folder
    options = options or WriteOptions(f"dataset {log.name!r}")
    passes = -(-max(1, sum(source.file.rows for source in stored)) // _ROWS_AT_ONCE)
    width = -(-layout.partitions // passes)
    written: list[BucketFile] = []
    for first in range(0, layout.partitions, width):
        parts: dict[int, list[pa.Table]] = {}
        for file in stored:
            for rows, buckets in _bucketed(file, layout):
                for bucket in range(first, min(first + width, layout.partitions)):
                    mine = rows.filter(pa.array(buckets == bucket))
                    if mine.num_rows:
                        parts.setdefault(bucket, []).append(mine)
        for bucket, tables in sorted(parts.items()):
            rows = pa.concat_tables(tables).sort_by([(name, "ascending") for name in layout.key]).combine_chunks()
            writer = BucketFileWriter(log.lake.store, folder, bucket, layout, options)
            try:
                for start in range(0, rows.num_rows, ROWS_PER_GROUP):
                    writer.write(rows.slice(start, ROWS_PER_GROUP))
                done = writer.finish()
            finally:
                writer.discard()
            if done is not None and done.rows:
                written.append(done)
    return written


def _bucketed(stored: StoredFile, layout: BucketLayout) -> Iterator[tuple[pa.Table, Any]]:
    """Yield the file's rows, and the new bucket of each."""
    from dagster_adjunct.resources.bucketing.hashing import buckets

    if stored.sha256() != stored.file.sha256:
        raise ManifestMismatchError(
            f"{stored.what}: {stored.key} is not as it was written, so it can't be rewritten.",
            "Restore that object, or give the version up: withdraw and drop it.",
            key=stored.key,
        )
    file = stored.open()
    for group in range(file.metadata.num_row_groups):
        rows = stored.reading(lambda at=group: file.read_row_group(at))  # type: ignore[misc]
        # A table of a change stream has files from before its columns were added or widened.
        names = [field.name for field in layout.arrow_schema()]
        rows = as_laid_out(rows, layout) if layout.hidden else rows.select(names)
        yield rows, buckets([rows.column(name) for name in layout.bucket_by], layout.partitions)
