"""Writing one generation of bucket files, for bounded and unbounded datasets.

A GenerationWriter writes the rows into one file for each bucket: by Spark tasks, or in this process
from an Arrow table. Both write the same files for the same rows: names, content, order, digests and
facts. The Arrow writer holds all rows in memory, so it suits small datasets; it needs no session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypedDict, Unpack

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.resources.bucketing.files import BucketFile, BucketLayout, Generation
from dagster_adjunct.resources.bucketing.writer import (
    DIGEST,
    WriteOptions,
    write_arrow_buckets,
    write_buckets,
)
from dagster_adjunct.resources.errors import KeyOrderError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa, pc, pt
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.schema import named_column
from dagster_adjunct.resources.small_work import SMALL_ROWS
from dagster_adjunct.resources.spark.in_process import IN_PROCESS, session_factory
from dagster_adjunct.resources.spark.session import session_scope
from dagster_adjunct.resources.streams.lake.streams import open_systems
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, StreamSystem

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


GenerationWriter = Callable[..., list[BucketFile]]
"""Called as writer(rows, store, folder, layout, options, order_by=…, partitioned=…): writes the
rows of each bucket, sorted by `order_by`, into one file, and returns the files.

`partitioned` says that partition i of a frame is exactly bucket i.
"""


def write_arrow_table(
    rows: pa.Table,
    store: ObjectStore,
    folder: str,
    layout: BucketLayout,
    options: WriteOptions,
    *,
    order_by: Sequence[str],
    partitioned: bool,
) -> list[BucketFile]:
    """Write an Arrow table in this process, as a GenerationWriter; `partitioned` is ignored."""
    from dagster_adjunct.resources.bucketing.hashing import row_digests

    if order_by:
        rows = _sort_as_spark(rows, order_by)
    if options.completion is None:  # else rows change while they are written
        rows = rows.append_column(DIGEST, row_digests(rows, layout.schema.names))
    return write_arrow_buckets(rows, store, folder, layout, options)


def _sort_as_spark(rows: pa.Table, order_by: Sequence[str]) -> pa.Table:
    """Return the rows in Spark's ascending order of these columns: nulls first, NaN last. Nested
    values, which have no order, are sorted by their hashes.
    """
    from dagster_adjunct.resources.bucketing.hashing import row_digests

    columns = {}
    for index, name in enumerate(order_by):
        column = rows.column(name)
        if pt.is_nested(column.type):
            column = row_digests(rows, [name])
        if column.null_count:  # Arrow sorts nulls last: false, for a null, comes first
            columns[f"known{index}"] = column.is_valid()
        columns[f"value{index}"] = column
    return rows.take(
        pc.sort_indices(pa.table(columns), sort_keys=[(name, "ascending") for name in columns])
    )


SPARK: GenerationWriter = write_buckets
SPARK_ONE_TASK: GenerationWriter = partial(write_buckets, one_task=True)
"""For a frame of few rows: one task writes all buckets."""
ARROW: GenerationWriter = write_arrow_table


class RecordPlace(NamedTuple):
    """Where a record is in its stream."""

    partition: int
    offset: int


def find_null_keys(
    rows: DataFrame | pa.Table, key: tuple[str, ...], limit: int
) -> list[RecordPlace]:
    """Return where the first rows with a null key column are, at most `limit` of them, in the order
    of partition and offset.
    """
    if isinstance(rows, pa.Table):
        has_null = reduce(pc.or_, [rows.column(name).is_null() for name in key])
        places = rows.filter(has_null).select([PARTITION, OFFSET])
        places = places.sort_by([(PARTITION, "ascending"), (OFFSET, "ascending")]).slice(0, limit)
        return [RecordPlace(*row.values()) for row in places.to_pylist()]
    is_null = reduce(or_, [named_column(name).isNull() for name in key])
    places = rows.where(is_null).select(PARTITION, OFFSET).orderBy(PARTITION, OFFSET)
    return [RecordPlace(*row) for row in places.limit(limit).collect()]


@dataclass(frozen=True, slots=True)
class Runtime:
    """What an advance works with: the lake, the stream systems by name, and Spark.

    `spark` is called only when there are rows to process. With IN_PROCESS all rows are processed in
    memory, without a session; with `few_in_process`, at most SMALL_ROWS are. `by` is the run or
    person named in commits.
    """

    lake: Lake
    systems: Mapping[str, StreamSystem]
    spark: Callable[[], SparkSession]
    by: str
    few_in_process: bool = False

    def spark_for(
        self, rows: int | None, needs_spark: Sequence[str] = ()
    ) -> Callable[[], SparkSession]:
        """Return IN_PROCESS if this process computes this many rows, else `spark`.

        `needs_spark` names what needs Spark however few the rows are; `rows` is None if their
        number is unknown.
        """
        is_few = rows is not None and rows <= SMALL_ROWS
        if self.few_in_process and is_few and not needs_spark:
            return IN_PROCESS
        return self.spark

    def now(self) -> datetime:
        """Return the time by the lake's clock."""
        return self.lake.now()

    def log(self, dataset: str) -> DatasetLog:
        """Return the log of a dataset."""
        return DatasetLog(self.lake, dataset)


class RuntimeOptions(TypedDict, total=False):
    """Where a call works. Defaults: the lake of `open_lake()`, the systems of the streams of its
    datasets, and a session that ends with the call and is started when it is needed.
    """

    lake: Lake | None
    systems: Mapping[str, StreamSystem] | None
    spark: SparkSession | Callable[[], SparkSession] | None


@contextmanager
def open_runtime(
    specs: Iterable[AdjunctDataset], *, by: str, **where: Unpack[RuntimeOptions]
) -> Iterator[Runtime]:
    """Yield a runtime for these datasets; `by` is who works, and `where` says where. A session that
    it starts ends with the context.
    """
    lake = where.get("lake") or open_lake()
    systems = where.get("systems")
    spark = where.get("spark")
    if systems is None:
        systems = open_systems(lake, [spec.stream for spec in specs if spec.stream])
    with ExitStack() as stack:
        stack.enter_context(lake.manifests.while_kept())
        if spark is None:
            spark = stack.enter_context(session_scope(lake_url=lake.url))
        yield Runtime(lake, systems, session_factory(spark), by)


def no_session() -> NoReturn:
    """Fail: this is passed as `spark` where no records are read, so nothing should call it."""
    raise AssertionError("no records are read here")


# An error names at most this many keys or records.
MAX_NAMED = 5


class WrittenGeneration(NamedTuple):
    """A generation with its files, and counters of what was left out (see `write_generation`)."""

    generation: Generation
    counters: dict[str, int]


_ALWAYS_COUNTED = ("superseded", "deleted")
_COUNTED_IF_ANY = ("corrections", "pruned", "forgotten")


def write_generation(
    store: ObjectStore,
    into: Generation,
    layout: BucketLayout,
    rows: DataFrame | pa.Table,
    writer: GenerationWriter,
    options: WriteOptions,
    *,
    order_by: Sequence[str],
    partitioned: bool,
) -> WrittenGeneration:
    """Write the last row of each key into one file a bucket; return `into`, which has no files yet,
    with these, and counters.

    `order_by` sorts the rows within each key, the one to keep last. `partitioned` says that
    partition i of a frame is exactly bucket i. Counters are the numbers of superseded rows, which
    have a later one of their key, and of deleted keys, whose last row is a dropped tombstone; for
    rows over time also of corrections of the past, pruned and forgotten rows, and `forgotten_to`, a
    position. With `name_conflicting` in the options, raises SchemaMismatchError if superseded rows
    have other values than the row that is kept; with `one_per_key`, KeyOrderError if rows of a key
    differ and come from several partitions.
    """
    files = writer(
        rows,
        store,
        into.folder,
        layout,
        replace(options, last_per_key=True),
        order_by=(*layout.key, *order_by),
        partitioned=partitioned,
    )
    _raise_if_repeated(files, layout, options)
    counters = {name: _sum_counts(files, name) for name in _ALWAYS_COUNTED}
    for name in _COUNTED_IF_ANY:
        count = _sum_counts(files, name)
        if count:
            counters[name] = count
    highest = [int(file.stats["forgotten_to"]) for file in files if "forgotten_to" in file.stats]
    if highest:  # a position and not a count; kept even if the file has no rows left
        counters["forgotten_to"] = max(highest)
    written = replace(into, files=tuple(file for file in files if file.rows))
    return WrittenGeneration(written, counters)


def _sum_counts(files: Sequence[BucketFile], name: str) -> int:
    """Return the sum of a counter in the statistics of files."""
    return sum(int(file.stats.get(name, 0)) for file in files)


def _list_keys(files: Sequence[BucketFile], name: str) -> list[str]:
    """Return the keys that the statistics of files have under this name."""
    keys: list[str] = []
    for file in files:
        keys += file.stats.get(name, ())
    return keys


def _raise_if_repeated(
    files: Sequence[BucketFile], layout: BucketLayout, options: WriteOptions
) -> None:
    """Raise KeyOrderError for keys whose rows differ in several partitions, and SchemaMismatchError
    for keys with several values if each is to be delivered once; the files' stats count both.
    """
    scattered = _sum_counts(files, "scattered")
    if scattered:
        keys = _list_keys(files, "scattered_keys")
        raise KeyOrderError(
            f"{options.what}: {scattered} key(s) have records with different values in several"
            " partitions, and their offsets do not say which one is newer. Such keys:"
            f" {format_first(keys)}. All records of a key have to be in one partition: in a stream"
            f" keyed by {', '.join(layout.key)}, or with one partition.",
            "Deliver the version so, under a new name: do not add partitions within a version, and"
            " let all producers choose partitions in the same way.",
            column=layout.key[0],
        )
    conflicting = _sum_counts(files, "conflicting")
    if conflicting and options.name_conflicting:
        keys = _list_keys(files, "conflicting_keys")
        problem = (
            f"{options.what}: {conflicting} record(s) have the same key ({', '.join(layout.key)})"
            " as another record but other values, which duplicates='error' forbids. Such keys:"
            f" {format_first(keys)}."
        )
        raise SchemaMismatchError(
            problem, "Deliver each key once, or declare duplicates='last'.", column=layout.key[0]
        )


def count_deletions(generation: Generation) -> int:
    """Return how many of a generation's rows are tombstones."""
    return sum(int(file.stats.get("tombstones", 0)) for file in generation.files)


def format_first(things: Sequence[str]) -> str:
    """Return the first MAX_NAMED of these texts, joined, for errors; "…" stands for the others."""
    first = ", ".join(things[:MAX_NAMED])
    if len(things) > MAX_NAMED:
        first += " …"
    return first
