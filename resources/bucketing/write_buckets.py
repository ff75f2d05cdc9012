"""Sealed bucket files written by Spark tasks, whose result is the manifest's content.

No committer, no rename and no listing: each task writes its bucket's file with pyarrow, uploads it, and
returns the file's facts as the stage's only row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.bucketing.bucket_files import BucketFile, BucketLayout
from dagster_adjunct.resources.bucketing.writer import DIGEST, TOMBSTONE, BucketFileWriter, WriteOptions
from dagster_adjunct.resources.errors import ManifestMismatchError, PermanentError
from dagster_adjunct.resources.schemas.quoted_columns import quoted, row_hash
from dagster_adjunct.resources.spark.spark_errors import from_document, refusal, to_document, unwrapped

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.resources.objects.object_store import ObjectStore, StoreDescriptor


def write_buckets(
    df: DataFrame,
    store: ObjectStore,
    folder: str,
    layout: BucketLayout,
    options: WriteOptions,
    *,
    order_by: Sequence[str],
    partitioned: bool = False,
    digest_also: Sequence[str] = (),
) -> list[BucketFile]:
    """Run one Spark job that writes `df` into one file a bucket; return the files' facts, by bucket.

    `folder` is the attempt's own: its last segment is the attempt's id.

    `df` has the layout's columns (without `__row`, which the writer adds) and may have more, which serve
    `order_by` only. `partitioned=True` says that partition i of `df` holds exactly bucket i already, so no
    exchange is added; each row is checked, so a wrong claim is an error and never a wrong file. The rows' digest
    covers the schema's columns and those of `digest_also`: whether the last one is null or left out is the same. With
    `drop_tombstones`, `df` has `__tombstone`, and a bucket whose keys were all deleted comes back without a name: only
    its stats count.
    """
    from pyspark.sql import functions as F

    digest = row_hash([F.col(quoted(name)) for name in (*layout.schema.names, *digest_also)])
    if layout.bucket_by:
        keys = [F.col(quoted(name)) for name in layout.bucket_by]
        if not partitioned:
            df = df.repartition(layout.partitions, *keys)
        # In the digest's own column: one more would have to travel to Python.
        mine = F.pmod(F.hash(*keys), F.lit(layout.partitions)) == F.spark_partition_id()
        digest = F.when(mine, digest).otherwise(_misplaced(options.what, layout))
    elif not partitioned:
        df = df.coalesce(1)
    if order_by:
        df = df.sortWithinPartitions(*[quoted(name) for name in order_by])
    marks = [TOMBSTONE] if options.drop_tombstones and TOMBSTONE not in layout.columns else []
    stored = [name for name in (*layout.columns, *marks) if name in df.columns]
    # By position: mapInArrow looks columns up by name, and stumbles over dots and backticks in them.
    df = df.select(
        *[F.col(quoted(name)).alias(f"c{index}") for index, name in enumerate(stored)], digest.alias("digest")
    )
    wanted = [*stored, DIGEST]
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
    return refusal(ManifestMismatchError, problem, "Nothing was committed. Report this with the physical plan.")


def _task(
    descriptor: StoreDescriptor, folder: str, layout: BucketLayout, options: WriteOptions, columns: list[str]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        bucket = context.partitionId() if context is not None else 0
        writer = BucketFileWriter(descriptor.open(), folder, bucket, layout, options)
        try:
            for batch in batches:
                writer.write(pa.Table.from_batches([batch]).rename_columns(columns))
            file = writer.finish()
            facts = [json.dumps(file.to_json())] if file else []
        except PermanentError as error:
            # As a result and not as an exception: Spark would try the task again, and wrap the error in its own.
            facts = [json.dumps(to_document(error))]
            for _ in batches:  # a worker whose input is not drained is not used again
                pass
        finally:
            writer.discard()
        yield pa.RecordBatch.from_pydict({"facts": pa.array(facts, pa.string())})

    return write
