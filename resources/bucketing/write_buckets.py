"""Sealed bucket files written by Spark tasks, whose result is the manifest's content.

No committer, no rename and no listing: each task writes its bucket's file with pyarrow, uploads it, and
returns the file's facts as the stage's only row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.bucketing.bucket_files import BucketFile, BucketLayout
from dagster_adjunct.resources.bucketing.writer import DIGEST, TOMBSTONE, BucketFileWriter, WriteOptions
from dagster_adjunct.resources.errors import ManifestMismatchError, PermanentError
from dagster_adjunct.resources.schemas.quoted_columns import quoted, row_hash
from dagster_adjunct.resources.spark.spark_errors import from_document, refusal, to_document, unwrapped, wrapped

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.resources.objects.object_store import ObjectStore, StoreDescriptor

_BUCKET = "__bucket"


def write_buckets(
    df: DataFrame,
    store: ObjectStore,
    folder: str,
    layout: BucketLayout,
    options: WriteOptions,
    *,
    order_by: Sequence[str],
    partitioned: bool = False,
    one_task: bool = False,
    digest_also: Sequence[str] = (),
) -> list[BucketFile]:
    """Run one Spark job that writes `df` into one file a bucket; return the files' facts, by bucket.

    `folder` is the attempt's own: its last segment is the attempt's id.

    `df` has the layout's columns (without `__row`, which the writer adds) and may have more, which serve
    `order_by` only. `partitioned=True` says that partition i of `df` holds exactly bucket i already, so no
    exchange is added; each row is checked, so a wrong claim is an error and never a wrong file. With `one_task`, one
    task writes all buckets of a frame of few rows, each the same, and nothing is moved for that. The rows' digest
    covers the schema's columns and those of `digest_also`: whether the last one is null or left out is the same. With
    `drop_tombstones`, `df` has `__tombstone`, and a bucket whose keys were all deleted comes back without a name: only
    its stats count.
    """
    from pyspark.sql import functions as F

    digest = row_hash((*layout.schema.names, *digest_also))
    if layout.bucket_by:
        keys = [F.col(quoted(name)) for name in layout.bucket_by]
        bucket = F.pmod(F.hash(*keys), F.lit(layout.partitions))
        if not partitioned and not one_task:
            df = df.repartition(layout.partitions, *keys)
        if partitioned or not one_task:
            # In the digest's own column: one more would have to travel to Python.
            digest = F.when(bucket == F.spark_partition_id(), digest).otherwise(_misplaced(options.what, layout))
        if one_task:
            # Looked at where the rows lie, and only then brought together.
            df = df.withColumns({_BUCKET: bucket, DIGEST: digest}).coalesce(1)
    elif not partitioned:
        df = df.coalesce(1)
    one_task = one_task and bool(layout.bucket_by)
    by = [*([_BUCKET] if one_task else []), *map(quoted, order_by)]
    if by:
        df = df.sortWithinPartitions(*by)
    marks = [TOMBSTONE] if options.drop_tombstones and TOMBSTONE not in layout.columns else []
    marks += [] if options.completion is None else options.completion.marks
    there = set(df.columns)
    stored = [name for name in (*layout.columns, *marks) if name in there]
    # By position: mapInArrow looks columns up by name, and stumbles over dots and backticks in them.
    numbered = [f"{quoted(name)} AS c{index}" for index, name in enumerate(stored)]
    last = [f"{DIGEST} AS digest", *([f"{_BUCKET} AS bucket"] if one_task else [])]
    df = (df if one_task else df.withColumn(DIGEST, digest)).selectExpr(*numbered, *last)
    wanted = [*stored, DIGEST, *([_BUCKET] if one_task else [])]
    task = _task(store.descriptor, folder, layout, options, wanted)
    with unwrapped():
        rows = df.mapInArrow(task, "facts string").collect()
    facts = [json.loads(row.facts) for row in rows]
    for file_facts in facts:
        if "error" in file_facts:
            raise from_document(file_facts)
    files = [BucketFile.from_json(file_facts) for file_facts in facts]
    return sorted(files, key=lambda file: file.bucket)


def _misplaced(what: str, layout: BucketLayout) -> Column:
    """Return a column that fails the job, for a row that is in the task of another bucket."""
    from pyspark.sql import functions as F

    problem = F.concat(
        F.lit(f"{what}: a row of another bucket reached the task of bucket "),
        F.spark_partition_id().cast("string"),
        F.lit(f": rows are not partitioned by {', '.join(layout.bucket_by)}."),
    )
    return refusal(
        ManifestMismatchError,
        problem,
        "Nothing was committed. Take back a function's keeps_partitioning=True; else report this.",
        partition_by=", ".join(layout.bucket_by),
    )


def _task(
    descriptor: StoreDescriptor, folder: str, layout: BucketLayout, options: WriteOptions, columns: list[str]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterator[Any]) -> Iterator[Any]:
        yield from wrapped(written(batches))  # what may pass is raised, and Spark tries the task again

    def written(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        bucket = context.partitionId() if context is not None else 0
        store = descriptor.open()
        rows = (pa.Table.from_batches([batch]).rename_columns(columns) for batch in batches)
        parts = _by_bucket(rows) if _BUCKET in columns else iter([(bucket, rows)])
        facts = []
        try:
            for number, tables in parts:
                file = _written(BucketFileWriter(store, folder, number, layout, options), tables)
                facts += [json.dumps(file.to_json())] if file else []
        except PermanentError as error:
            # As a result and not as an exception: Spark would try the task again, and wrap the error in its own.
            facts = [json.dumps(to_document(error))]
            for _ in batches:  # a worker whose input is not drained is not used again
                pass
        yield pa.RecordBatch.from_pydict({"facts": pa.array(facts, pa.string())})

    return write


def _written(writer: BucketFileWriter, tables: Iterator[pa.Table]) -> BucketFile | None:
    """Write these rows as one file; return its facts, None where there is nothing to store."""
    try:
        for table in tables:
            writer.write(table)
        return writer.finish()
    finally:
        writer.discard()


def _by_bucket(tables: Iterator[pa.Table]) -> Iterator[tuple[int, Iterator[pa.Table]]]:
    """Yield each bucket of rows that are sorted by it, with its rows; these are to be consumed before the next."""
    for bucket, parts in groupby(_runs(tables), key=itemgetter(0)):
        yield bucket, (part for _, part in parts)


def _runs(tables: Iterator[pa.Table]) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of one bucket after those of the other, without the column that says so."""
    import pyarrow.compute as pc

    for table in tables:
        buckets, rows = table.column(_BUCKET), table.drop_columns([_BUCKET])
        start = 0
        while start < len(buckets):
            bucket = buckets[start].as_py()
            end = start + pc.sum(pc.equal(buckets.slice(start), bucket)).as_py()
            yield bucket, rows.slice(start, end - start)
            start = end
