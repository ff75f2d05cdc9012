"""One bucketed Spark table over the generations of a manifest, so that joins on its key need no exchange.

Public SQL only: a partitioned, bucketed table in the session's in-memory catalog, one partition a
generation, each at its own folder. Spark lists the folders itself, so before a frame is given out the
files that Spark sees are compared with the manifest's.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote

from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout, Generation
from dagster_adjunct.resources.errors import ManifestMismatchError
from dagster_adjunct.resources.schemas.quoted_columns import literal, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.resources.objects.object_store import ObjectStore

GENERATION = "__gen"
_TABLES_KEPT = 64
_tables: dict[str, dict[str, None]] = {}
_one_at_a_time = threading.Lock()


def bucketed_frame(
    spark: SparkSession, store: ObjectStore, what: str, layout: BucketLayout, generations: Sequence[Generation]
) -> DataFrame:
    """Return the rows of all generations, with the column `__gen` (int), as one bucketed scan.

    Where there is one generation, its rows come in the order of the layout's key, and Spark knows it: a join on (the
    beginning of) the key does not sort them. `what` names the dataset or stream in errors. Raises
    ManifestMismatchError when a folder holds another set of files than its generation lists.
    """
    wanted = [generation for generation in generations if generation.files]
    content = "|".join([store.url, layout.ddl, str(layout.partitions), *layout.bucket_by, "", *layout.key]) + "".join(
        f"|{g.id}:{g.folder}" for g in wanted
    )
    name = f"adjunct_{hashlib.sha256(content.encode()).hexdigest()[:24]}"
    with _one_at_a_time:  # datasets advance in threads of one session, and any of them may drop the oldest table
        known = _tables.setdefault(spark.sparkContext.applicationId, {})
        if name in known:
            # Used again, so it is the last to be dropped: a frame's table must be there when its plan is made.
            known.pop(name, None)
        else:
            _create(spark, store, name, layout, wanted)
            try:
                _check_files(spark, name, what, wanted)
            except BaseException:
                spark.sql(f"DROP TABLE IF EXISTS {name}")
                raise
        known[name] = None
        while len(known) > _TABLES_KEPT:
            oldest = next(iter(known))
            known.pop(oldest, None)
            spark.sql(f"DROP TABLE IF EXISTS {oldest}")
        return spark.table(name)


def _create(
    spark: SparkSession, store: ObjectStore, name: str, layout: BucketLayout, generations: Sequence[Generation]
) -> None:
    clustered = ""
    if layout.bucket_by:
        columns = ", ".join(quoted(column) for column in layout.bucket_by)
        ordered = ", ".join(quoted(column) for column in layout.key)  # what the writer has checked of each file
        sorted_by = f" SORTED BY ({ordered})" if ordered else ""
        clustered = f" CLUSTERED BY ({columns}){sorted_by} INTO {layout.partitions} BUCKETS"
    # Nothing is ever at the root: rows are in the partitions. Without any, the scan is empty and bucketed still.
    root = literal(store.spark_uri(generations[0].folder if generations else "_adjunct"))
    spark.sql(
        f"CREATE TABLE IF NOT EXISTS {name} ({layout.ddl}, `{GENERATION}` INT) USING parquet "
        f"PARTITIONED BY (`{GENERATION}`){clustered} LOCATION {root}"
    )
    if not generations:
        return
    parts = " ".join(
        f"PARTITION (`{GENERATION}`={g.id}) LOCATION {literal(store.spark_uri(g.folder))}" for g in generations
    )
    spark.sql(f"ALTER TABLE {name} ADD IF NOT EXISTS {parts}")


def _check_files(spark: SparkSession, name: str, what: str, generations: Sequence[Generation]) -> None:
    keys = {
        f"{g.folder.rsplit('/', 1)[-1]}/{file.name}": f"{g.folder}/{file.name}" for g in generations for file in g.files
    }
    listed = set(keys)
    seen = {"/".join(unquote(uri).rsplit("/", 2)[-2:]) for uri in spark.table(name).inputFiles()}
    if listed != seen:
        missing, stray = sorted(listed - seen), sorted(seen - listed)
        raise ManifestMismatchError(
            f"{what}: the manifest lists {len(listed)} files, Spark sees {len(seen)}"
            f"{'; missing: ' + ', '.join(missing[:3]) if missing else ''}"
            f"{'; not listed: ' + ', '.join(stray[:3]) if stray else ''}.",
            "Remove what is not listed, or restore what is missing; nothing was read.",
            key=keys[missing[0]] if missing else stray[0],
        )
