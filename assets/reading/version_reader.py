"""Reads one sealed version of a dataset, whole with Spark or by key in plain Python.

A reader holds the manifest's facts of the version, so what it reads never changes. It takes no lease: callers that may
race with a discard lease the version, as an open `Dataset` and a batch do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import groupby
from operator import and_, itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.assets.reading.key_lookup import FileCache, Key, KeyFiles, coerce_key
from dagster_adjunct.assets.reading.rows_over_time import (
    RowsOverTime,
    Validity,
    find_newest_entry,
    no_history_error,
    read_key_history,
)
from dagster_adjunct.assets.versions.version import POSITION, TOMBSTONE, SealedVersion
from dagster_adjunct.resources.bucketing.hashing import bucket_function
from dagster_adjunct.resources.bucketing.timeline import IS_FIRST, VALID_FROM, VALID_TO
from dagster_adjunct.resources.errors import ManifestMismatchError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.schema import Field, Plain, named_column, plain_converter
from dagster_adjunct.resources.spark.errors import find_adjunct_error, translate_spark_errors
from dagster_adjunct.resources.spark.in_process import resolve_session

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


# Bounds in stored form. They may be leading parts of keys, which sort before all keys that begin with them.
Bounds = tuple[tuple[Plain, ...], tuple[Plain, ...] | None]


def key_range(what: str, fields: Sequence[Field], prefix: object, start: object, end: object) -> Bounds:
    """Return (first key, first key after or None) of a prefix, or of `start` (included) to `end` (excluded).

    `prefix` is a string or bytes with which the first key column begins, or a tuple of whole values of leading key
    columns. `start` and `end` are keys or tuples of leading values. `what` names the dataset in errors.
    """
    if prefix is None:
        first = () if start is None else _leading_values(what, fields, start)
        return first, None if end is None else _leading_values(what, fields, end)
    if start is not None or end is not None:
        problem = f"{what}: both a prefix and a range are given."
        raise SchemaMismatchError(problem, "Give prefix=, or start= and end=, not both.", argument="prefix")
    if not isinstance(prefix, tuple | list):
        if fields[0].type not in ("string", "binary"):
            problem = (
                f"{what}: key column {fields[0].name!r} is {fields[0].type}, so {prefix!r} can't be a prefix of it: "
                "only strings and binaries have prefixes."
            )
            step = "Give a tuple of whole values of leading key columns, or start= and end=."
            raise SchemaMismatchError(problem, step, argument="prefix", column=fields[0].name)
        (begin,) = _leading_values(what, fields, prefix)
        assert isinstance(begin, bytes)
        # The least bytes that are greater than all with this prefix, if there are any.
        kept = begin.rstrip(b"\xff")
        return (begin,), (kept[:-1] + bytes([kept[-1] + 1]),) if kept else None
    values = _leading_values(what, fields, prefix)
    if not values:
        return (), None
    *before, last = values
    return values, (*before, last + b"\0" if isinstance(last, bytes) else last + 1)


def _leading_values(what: str, fields: Sequence[Field], values: object) -> tuple[Plain, ...]:
    """Return values of leading key columns in stored form."""
    given = tuple(values) if isinstance(values, tuple | list) else (values,)
    known = fields[: len(given)] if len(given) <= len(fields) else fields
    coerced = coerce_key(what, known, given)
    return tuple(plain_converter(field.type)(value) for field, value in zip(known, coerced, strict=True))


def find_unreadable_version(
    error: BaseException | None, readers: Iterable[VersionReader]
) -> tuple[ManifestMismatchError, VersionReader] | None:
    """Return Spark's error as ManifestMismatchError, with the reader of the version whose file it could not read.

    None for any other error, and for files of other versions.
    """
    translated = None if error is None else find_adjunct_error(error)
    if translated is error or not isinstance(translated, ManifestMismatchError) or translated.url is None:
        return None
    for reader in readers:
        for generation in reader.sealed.generations:
            if f"/{generation.folder}/" in translated.url:
                key = f"{generation.folder}/{translated.url.rpartition('/')[2]}"
                about = {"dataset": reader.dataset, "version": reader.version, "key": key}
                return translated.reworded(translated.problem, translated.next_step, **about), reader
    return None


K = TypeVar("K", bound=Hashable)
Entry = dict[str, Any]
_ROWS_AT_ONCE = 1024


class VersionReader:
    """Reads one version. Reading by key imports no Spark; a reader may be shared by threads."""

    def __init__(self, store: ObjectStore, dataset: str, sealed: SealedVersion, cache: FileCache | None = None) -> None:
        self.store, self.dataset, self.sealed = store, dataset, sealed
        self.version, self.schema = sealed.id, sealed.columns
        self.rows = sealed.rows
        """The number of entries; None if counting them needs a merge of deltas."""
        self._layout = sealed.layout
        self._what = f"dataset {dataset!r}, version {sealed.id}"
        self._key = tuple(sealed.columns.field(name) for name in sealed.key)
        cache = cache or FileCache()
        self._generations = [
            KeyFiles(store, self._what, self._layout, generation, cache) for generation in reversed(sealed.generations)
        ]
        self._names = sealed.columns.names
        self._plain = tuple(plain_converter(field.type) for field in self._key)
        self._bucket_columns = [sealed.key.index(name) for name in sealed.partition_by]
        self._bucketer = bucket_function(
            tuple(self._key[i].type for i in self._bucket_columns), self._layout.partitions
        )

    def __repr__(self) -> str:
        return f"VersionReader({self.dataset!r}, {self.version!r})"

    # -- by Spark

    @translate_spark_errors()
    def frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return all entries, with the columns of `schema`.

        A partitioned dataset is a bucketed scan: a join on its partition columns or its key needs no exchange on this
        side. Superseded rows are dropped during the scan. Raises ManifestMismatchError if the stored files are not
        exactly those of the manifest.
        """
        spark = resolve_session(spark)
        if self.sealed.history is not None:
            rows = self._over_time(spark).current()
        else:
            rows = self._scan_all(spark)
            if self.sealed.positioned:
                rows = self._merge_deltas(rows)
        return rows.select(*[named_column(name) for name in self.schema.names])

    @translate_spark_errors()
    def history_frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return all rows of a version with history, each with the interval in which it is valid.

        A bucketed scan with the columns of `schema`, `__valid_from`, `__valid_to` (null: open), `__first` (the first
        row of its key) and `__tombstone` (the key has no entry in the interval).
        The intervals of a key are adjacent. Raises DatasetError for a version without history, and
        ManifestMismatchError as `frame` does.
        """
        rows = self._over_time(resolve_session(spark)).intervals()
        hidden = (VALID_FROM, VALID_TO, IS_FIRST, TOMBSTONE)
        return rows.select(*[named_column(name) for name in self.schema.names], *hidden)

    @translate_spark_errors()
    def frame_at(self, spark: SparkSession | Callable[[], SparkSession], moment: Column) -> DataFrame:
        """Return the entries that were valid at a moment, with the columns of `schema`.

        Raises DatasetError for a version without history, and ManifestMismatchError as `frame` does.
        """
        rows = self._over_time(resolve_session(spark)).valid_at(moment)
        return rows.select(*[named_column(name) for name in self.schema.names])

    def _over_time(self, spark: SparkSession) -> RowsOverTime:
        if self.sealed.history is None:
            raise no_history_error(self.dataset)
        return RowsOverTime(self.sealed, self._scan_all(spark), _SORTED_ROWS, _BROADCAST_ROWS)

    def _scan_all(self, spark: SparkSession) -> DataFrame:
        """Return all stored rows of all generations."""
        from dagster_adjunct.resources.bucketing.files import bucketed_frame

        return bucketed_frame(spark, self.store, self._what, self._layout, self.sealed.generations)

    def _merge_deltas(self, rows: DataFrame) -> DataFrame:
        """Return the newest row of each key that is not deleted.

        A key is unique within a generation, so the generation of its newest row identifies the row. The keys in deltas
        are broadcast with that generation (none if the newest row is a deletion), and the scan drops their rows in
        other generations. So positions are read from deltas only, and rows stay in their buckets.
        """
        base, *deltas = self.sealed.generations
        changes = sum(delta.rows for delta in deltas)
        if changes:
            shared = F.broadcast if changes <= _BROADCAST_ROWS else _identity
            newest = shared(self._newest_generations(rows, base.id, shared))
            rows = rows.join(newest, self._same_key() & (F.col(_GENERATION) != F.col(_NEWEST)), "left_anti")
        if any(_DELETED_COUNTER not in file.stats for file in base.files):
            rows = rows.where(~F.col(TOMBSTONE))
        return rows

    def _newest_generations(self, rows: DataFrame, base: int, shared: Callable[[DataFrame], DataFrame]) -> DataFrame:
        """Return the keys in deltas, each with the generation of its newest row by (position, generation)."""
        changed = rows.where(F.col(_GENERATION) != base)
        if not self.sealed.partition_by:
            changed = changed.coalesce(1)  # one file a generation: one task needs no exchange
        keys = [named_column(field.name).alias(f"__key_{index}") for index, field in enumerate(self._key)]
        if self.sealed.order_by is not None:  # a late change may be older than the base's row
            changed = rows.join(shared(changed.select(*keys).distinct()), self._same_key(), "left_semi")
        newest = changed.groupBy(*keys).agg(F.max(F.struct(POSITION, _GENERATION, TOMBSTONE)).alias(_NEWEST))
        generation = F.when(F.col(f"{_NEWEST}.{TOMBSTONE}"), _NO_GENERATION).otherwise(
            F.col(f"{_NEWEST}.{_GENERATION}")
        )
        return newest.withColumn(_NEWEST, generation)

    def _same_key(self) -> Column:
        pairs = [named_column(field.name) == F.col(f"__key_{index}") for index, field in enumerate(self._key)]
        return reduce(and_, pairs)

    # -- by key

    def get(self, key: object) -> Entry | None:
        """Return the entry of `key`, or None.

        A key of several columns is a tuple in the order of the key, or a dict. Raises SchemaMismatchError for a
        value of another type than the key's, and ManifestMismatchError for a missing or damaged file.
        """
        return self._find(self._stored_key(key))

    def get_all(self, keys: Iterable[K]) -> dict[K, Entry]:
        """Return the entries of these keys, under the keys as given; keys without an entry are absent."""
        wanted = [(key, self._stored_key(key)) for key in keys]
        # In the order of the files, so that each row group is read once.
        placed = sorted(((self._bucket(values), values, index) for index, (_, values) in enumerate(wanted)))
        entries = {index: self._find(values) for _, values, index in placed}
        return {key: entry for index, (key, _) in enumerate(wanted) if (entry := entries[index]) is not None}

    def history_of(self, key: object) -> list[Validity]:
        """Return the entries of a key over time, oldest first; a deletion has no entry and ends the one before.

        Adjacent intervals with equal entries are merged; those that ended before the history's edge are left out.
        Raises DatasetError for a version without history, and what `get` raises.
        """
        if self.sealed.history is None:
            raise no_history_error(self.dataset)
        values = self._stored_key(key)
        return read_key_history(self.sealed, self._generations, self._bucket(values), values)

    def items(self, prefix: object = None, *, start: object = None, end: object = None) -> Iterator[tuple[Any, Entry]]:
        """Yield (key, entry) in key order; a key of several columns is a tuple.

        `prefix` is a string (or bytes) with which the first key column begins, or a tuple of whole values of leading
        key columns. `start` (included) and `end` (excluded) are keys, or tuples of leading values. Only matching row
        groups are read, when they are reached; memory holds one for each bucket. Raises
        SchemaMismatchError at once for bounds that do not fit the key, ManifestMismatchError as `get`.
        """
        first, after = key_range(self._what, self._key, prefix, start, end)
        buckets = sorted({file.bucket for generation in self.sealed.generations for file in generation.files})
        rows = [self._bucket_items(bucket, first, after) for bucket in buckets]
        merged = heapq.merge(*rows, key=itemgetter(0)) if len(rows) > 1 else (row for one in rows for row in one)
        if len(self._key) == 1:
            return ((key[0], entry) for key, entry in merged)
        return merged

    def _stored_key(self, key: object) -> Key:
        values = coerce_key(self._what, self._key, key)
        return tuple([plain(value) for plain, value in zip(self._plain, values, strict=True)])

    def _bucket(self, key: Key) -> int:
        return self._bucketer([key[index] for index in self._bucket_columns]) if self._bucket_columns else 0

    def _find(self, key: Key) -> Entry | None:
        """Return the row with the highest (position, generation) in any generation, unless it is a tombstone."""
        bucket = self._bucket(key)
        names = self._names
        if self.sealed.history is not None:
            return find_newest_entry(self._generations, bucket, key, names)
        matches = [(*match, files.id) for files in self._generations if (match := files.find(bucket, key))]
        if not matches:
            return None
        if not self.sealed.positioned:
            return matches[0][0].entry(names, matches[0][1])
        rows, row, _ = max(matches, key=lambda match: (match[0].value(POSITION, match[1]), match[2]))
        return None if rows.value(TOMBSTONE, row) else rows.entry(names, row)

    def _bucket_items(self, bucket: int, first: Key, after: Key | None) -> Iterator[tuple[tuple[Any, ...], Entry]]:
        """Yield (key as a tuple, entry) of one bucket in key order, merged over its generations."""
        scans = [self._scan(files, bucket, first, after) for files in self._generations]
        if len(scans) == 1 and not self.sealed.positioned:
            for key, _, row in scans[0]:
                yield key, row
            return
        names, by_time = self._names, self.sealed.history is not None

        def rank(match: tuple[tuple[Any, ...], int, Entry]) -> tuple[Any, ...]:
            _, generation, row = match
            return (*((row[VALID_FROM],) if by_time else ()), row.get(POSITION, 0), generation)

        for key, same in groupby(heapq.merge(*scans, key=itemgetter(0)), key=itemgetter(0)):
            _, _, newest = max(same, key=rank)
            if not newest.get(TOMBSTONE):
                yield key, {name: newest[name] for name in names}

    def _scan(
        self, files: KeyFiles, bucket: int, first: Key, after: Key | None
    ) -> Iterator[tuple[tuple[Any, ...], int, Entry]]:
        """Yield (key, generation, stored row) of one file in key order."""
        key = self.sealed.key
        for rows, begin, end in files.scan(bucket, first, after):
            for at in range(begin, end, _ROWS_AT_ONCE):
                for row in rows.table.slice(at, min(_ROWS_AT_ONCE, end - at)).to_pylist():
                    yield tuple([row[name] for name in key]), files.id, row


_GENERATION = "__gen"
_NEWEST, _NO_GENERATION = "__newest", -1
_DELETED_COUNTER = "deleted"
"""The counter of files without tombstones; of other files the column is read."""
_BROADCAST_ROWS = 2_000_000
"""With more rows in deltas their keys are not broadcast, and each bucket is merged by sorting."""
_SORTED_ROWS = 2_000_000
"""With history and up to this many rows, each bucket is merged by sorting, which needs no job before the scan."""


def _identity(frame: DataFrame) -> DataFrame:
    return frame
