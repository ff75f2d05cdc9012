"""What writes the rows of a generation into one file a bucket: Spark's tasks, or this process from an Arrow table.

It is passed beside the rows. Both write the same files of the same rows: names, content, order, digests and facts.
Arrow's holds all rows in memory and hashes them one by one, so it is for small datasets; it needs no session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dagster_adjunct.resources.bucketing.bucket_files import BucketFile, BucketLayout
from dagster_adjunct.resources.bucketing.write_buckets import write_buckets
from dagster_adjunct.resources.bucketing.writer import DIGEST, WriteOptions, check_values, write_arrow_buckets
from dagster_adjunct.resources.spark.given_session import IN_PROCESS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.resources.objects.object_store import ObjectStore

Rows_contra = TypeVar("Rows_contra", contravariant=True)


class GenerationWriter(Protocol[Rows_contra]):
    """Writes rows, in each bucket in ascending order of columns that are never null; returns the files by bucket."""

    def __call__(
        self,
        rows: Rows_contra,
        store: ObjectStore,
        folder: str,
        layout: BucketLayout,
        options: WriteOptions,
        *,
        order_by: Sequence[str],
        partitioned: bool,
    ) -> list[BucketFile]: ...


def write_table(
    rows: pa.Table,
    store: ObjectStore,
    folder: str,
    layout: BucketLayout,
    options: WriteOptions,
    *,
    order_by: Sequence[str],
    partitioned: bool,
) -> list[BucketFile]:
    """Write an Arrow table in this process; whether it is partitioned already makes no difference here."""
    from dagster_adjunct.resources.bucketing.row_digest import row_digests

    there = set(rows.schema.names)
    stored = rows.select([name for name in layout.columns if name in there])
    check_values(stored, layout.schema, options.what, layout.key)  # digests are taken of what Python can hold
    if order_by:
        rows = rows.sort_by([(name, "ascending") for name in order_by])
    if options.completion is None:
        rows = rows.append_column(DIGEST, row_digests(rows, layout.schema))
    return write_arrow_buckets(rows, store, folder, layout, options)


# A frame is called df there, and is given by position.
SPARK: GenerationWriter[DataFrame] = write_buckets  # type: ignore[assignment]
BY_ONE_TASK: GenerationWriter[DataFrame] = partial(write_buckets, one_task=True)
"""The same of a frame of few rows: one task writes all buckets."""
ARROW: GenerationWriter[pa.Table] = write_table


def writer_of(spark: Callable[[], SparkSession]) -> GenerationWriter[Any]:
    """Return what writes the rows that are read with this: a session's, or this process's."""
    return ARROW if spark is IN_PROCESS else SPARK
