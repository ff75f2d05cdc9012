"""Reads one sealed version of a dataset, whole with Spark or by key in plain Python.

A reader holds the manifest's facts of the version, so what it reads never changes. It takes no
lease: callers that may race with a discard lease the version, as an open `Dataset` and a batch do.

With history, Spark reads each row with the interval in which it was valid: the columns, and
`__valid_from`, `__valid_to`, `__first` as stored. A base without deltas is read as stored. Deltas
are merged in one of two ways, both without an exchange. With few rows, each bucket is sorted by key
and time, and each row takes its end from its neighbour: one scan, one job. With many rows, the base
is not sorted:

    rows of the keys in deltas -> the newest of each (key, valid_from), with its new interval
                               -> where that differs from the scan it is broadcast, and corrects the
                               scanned rows
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial, reduce
from itertools import groupby, zip_longest
from operator import and_, attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dagster_adjunct.assets.reading.interval_ids import interval_id
from dagster_adjunct.assets.reading.key_lookup import (
    FileCache,
    Key,
    KeyFiles,
    RowGroup,
    RowPlace,
    coerce_key,
    end_of_prefix,
)
from dagster_adjunct.assets.reading.superseded import (
    Mask,
    StoredRows,
    can_have_mask,
    mark_entries,
    read_mask,
    read_stored_rows,
)
from dagster_adjunct.assets.versions.version import (
    POSITION,
    TOMBSTONE,
    SealedVersion,
    datetime_from_micros,
)
from dagster_adjunct.resources.bucketing.files import (
    GENERATION_COLUMN,
    HAS_ENDS,
    IS_FIRST,
    VALID_FROM,
    VALID_TO,
    bucketed_frame,
)
from dagster_adjunct.resources.bucketing.hashing import bucket_function, plain_converter
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetError,
    ManifestMismatchError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.lazy_modules import F, np, pa
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.equality import comparable_value
from dagster_adjunct.resources.schemas.paths import Path
from dagster_adjunct.resources.schemas.schema import Field, named_column, named_columns, quote_name
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.spark.tasks import find_adjunct_error, translate_spark_errors
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class Validity:
    """The entry of a key from one moment (included) to another (excluded; None: it is valid now).

    `entry` is None where the key was deleted. `interval_id` identifies the interval of an entry: it
    follows from the key and `valid_from` alone.
    """

    valid_from: datetime
    valid_to: datetime | None
    entry: dict[str, Any] | None
    interval_id: str | None = None

    @property
    def is_current(self) -> bool:
        """Whether it is the key's entry now."""
        return self.valid_to is None and self.entry is not None

    def holds(self, moment: datetime) -> bool:
        """Whether the moment is in the interval."""
        if moment < self.valid_from:
            return False
        return self.valid_to is None or moment < self.valid_to


class _StoredRow(NamedTuple):
    """A row of a key over time: the number `row` in the row group `rows`.

    The newest row has the highest (valid_from, position, generation).
    """

    valid_from: datetime
    position: int
    generation: int
    rows: RowGroup
    row: int

    def entry(self, names: tuple[str, ...]) -> dict[str, Any] | None:
        """Return the entry in the row, None for a deletion."""
        if self.rows.value(TOMBSTONE, self.row):
            return None
        return self.rows.entry(names, self.row)


_by_age = attrgetter("valid_from", "position", "generation")


def no_history_error(dataset: str) -> DatasetError:
    """Return the error for a version without history."""
    return DatasetError(
        f"dataset {dataset!r}: this version keeps no history, only the newest entry of each key.",
        'Declare history=timedelta(…) or "all" for a new table: under a new name, or after adjunct'
        f" dataset delete {dataset} --reason …. To read what was served earlier, use"
        " open_dataset(…, as_of=…).",
        dataset=dataset,
    )


def find_newest_entry(
    generations: Iterable[KeyFiles], bucket: int, key: Key, names: tuple[str, ...]
) -> dict[str, Any] | None:
    """Return the entry of a key from its row with the highest (valid_from, position, generation).

    None for a key without rows, and if that row is a deletion.
    """
    newest: _StoredRow | None = None
    for files in generations:
        # Rows of a key are sorted by time, so a generation's newest is the last one of the scan.
        for rows, _, after in deque(files.scan(bucket, key, end_of_prefix(key)), maxlen=1):
            last = _stored_row(files, rows, after - 1)
            if newest is None or _by_age(last) > _by_age(newest):
                newest = last
    if newest is None:
        return None
    return newest.entry(names)


def read_key_history(
    sealed: SealedVersion, generations: Iterable[KeyFiles], bucket: int, key: Key
) -> list[Validity]:
    """Return the entries of a key (in plain form) over time, oldest first, with deletions; [] for a
    key without rows.

    Intervals that ended before the history begins are left out, also if no compaction has dropped
    them yet.
    """
    assert sealed.history is not None
    names = sealed.columns.names
    newest: dict[datetime, _StoredRow] = {}  # by valid_from
    for files in generations:
        for rows, first, after in files.scan(bucket, key, end_of_prefix(key)):
            for row in range(first, after):
                stored = _stored_row(files, rows, row)
                other = newest.get(stored.valid_from, stored)
                newest[stored.valid_from] = max(other, stored, key=_by_age)
    starts = sorted(newest)
    parts = []
    for start, end in zip_longest(starts, starts[1:]):
        parts.append(Validity(start, end, newest[start].entry(names)))
    intervals = list(merge_equal_neighbours(parts, sealed))
    if sealed.edge is None:
        return intervals
    edge = datetime_from_micros(sealed.edge)
    return [each for each in intervals if each.valid_to is None or each.valid_to > edge]


def merge_equal_neighbours(parts: Iterable[Validity], sealed: SealedVersion) -> Iterator[Validity]:
    """Yield the intervals of a key. Adjacent parts of its history that do not differ in the values
    that the version compares are one interval.

    An interval has the entry with which it begins; only the version's `latest_columns` have the
    values of its end. A deletion has no entry and no id.
    """
    compare = partial(_compared_values, compared=sealed.compared)
    for _, equal in groupby(parts, compare):
        same = list(equal)
        first = same[0]
        last = same[-1]
        entry = first.entry
        identity = None
        if entry is not None and last.entry is not None:
            entry = entry | {name: last.entry[name] for name in sealed.latest_columns}
            key = [entry[name] for name in sealed.key]
            identity = interval_id(key, to_microseconds(first.valid_from))
        yield Validity(first.valid_from, last.valid_to, entry, identity)


def _compared_values(part: Validity, compared: Sequence[Path]) -> list[Any] | None:
    """Return the values by which an entry differs from its neighbours; None for a deletion."""
    if part.entry is None:
        return None
    found = []
    for path in compared:
        value: Any = part.entry
        for step in path.steps:
            if value is not None:
                value = value[step]
        found.append(comparable_value(value))
    return found


def _stored_row(files: KeyFiles, rows: RowGroup, row: int) -> _StoredRow:
    """Return a row of a row group of these files, with what it is ordered by."""
    valid_from = rows.value(VALID_FROM, row)
    return _StoredRow(valid_from, rows.value(POSITION, row), files.id, rows, row)


_AT = "__at"
_WINNER = "__winner"
_END = "__end"
_NEW_END = "__new_end"
_NEW_FIRST = "__new_first"
_OLDEST = "__oldest"
_NO_GENERATION = -1
_STORED_END = "__stored_end"
_STORED_FIRST = "__stored_first"


def _aliased_key(key: Sequence[str]) -> list[Column]:
    """Return the key columns under other names, with which `_same_key` compares those of a row."""
    return [named_column(name).alias(f"__key_{index}") for index, name in enumerate(key)]


def _same_key(key: Sequence[str]) -> Column:
    """Return the condition that a row has the key in the columns of `_aliased_key`."""
    equal = [named_column(name) == F.col(f"__key_{index}") for index, name in enumerate(key)]
    return reduce(and_, equal)


@dataclass(frozen=True, slots=True)
class RowsOverTime:
    """Merges the stored rows of one version with history. `rows` has all of them, each with the
    number of its generation.

    Up to `_SORTED_ROWS` rows are merged by sorting their buckets. So are more rows if over
    `_BROADCAST_ROWS` of them are in deltas. Otherwise the corrections by deltas are broadcast.
    """

    sealed: SealedVersion
    rows: DataFrame

    def intervals(self) -> DataFrame:
        """Return the newest row of each (key, valid_from) with the interval in which it is valid.

        The columns are those of the rows, and the intervals of a key are adjacent. A row that is
        valid now has no `__valid_to`, the oldest of a key is `__first`, and deletions are rows too
        (`__tombstone`).
        """
        return self._merge(self.rows)

    def current(self) -> DataFrame:
        """Return the row of each key that is valid now, without deletions."""
        rows = self.rows
        if self._changes:
            # Rows that ended in the base stay ended, so they need not be merged.
            is_of_delta = F.col(GENERATION_COLUMN) != self._base
            rows = self._merge(rows.where(is_of_delta | F.col(VALID_TO).isNull()))
        return rows.where(F.col(VALID_TO).isNull() & ~F.col(TOMBSTONE))

    def valid_at(self, moment: Column) -> DataFrame:
        """Return the row of each key that was valid at a moment, without deletions."""
        rows = self.rows
        if self._changes:
            # Rows that ended in the base by then stay ended, and rows that begin later don't
            # matter.
            lasted = (
                (F.col(GENERATION_COLUMN) != self._base)
                | F.col(VALID_TO).isNull()
                | (F.col(VALID_TO) > moment)
            )
            rows = self._merge(rows.where((F.col(VALID_FROM) <= moment) & lasted))
        has_begun = F.col(VALID_FROM) <= moment
        lasts = F.col(VALID_TO).isNull() | (F.col(VALID_TO) > moment)
        return rows.where(has_begun & lasts & ~F.col(TOMBSTONE))

    @property
    def _base(self) -> int:
        """The number of the base, whose rows store their end; -1 without one (an erasure may
        leave no row of it).
        """
        for first in self.sealed.nonempty[:1]:
            if all(file.stats.get(HAS_ENDS) is not False for file in first.files):
                return first.id
        return _NO_GENERATION

    @property
    def _changes(self) -> int:
        """The number of rows in deltas."""
        return sum(
            generation.rows for generation in self.sealed.generations if generation.id != self._base
        )

    def _merge(self, rows: DataFrame) -> DataFrame:
        """Return the newest row of each (key, valid_from), with its interval as it is now; the rows
        unchanged without deltas.
        """
        changes = self._changes
        if not changes:
            return rows
        if self.sealed.stored_rows <= _SORTED_ROWS or changes > _BROADCAST_ROWS:
            return self._merge_by_sorting(rows)
        return self._merge_by_broadcast(rows)

    def _merge_by_sorting(self, rows: DataFrame) -> DataFrame:
        """Return the merged rows from one sorted scan: a row ends where the next one of its key
        begins.
        """
        if not self.sealed.partition_by:
            rows = rows.coalesce(1)  # one file a generation: one task needs no exchange
        keys = ", ".join(quote_name(name) for name in self.sealed.key)
        in_time = f"PARTITION BY {keys} ORDER BY {VALID_FROM}, {POSITION}, {GENERATION_COLUMN}"
        placed = rows.selectExpr(
            "*",
            f"lead({VALID_FROM}) OVER ({in_time}) AS {_END}",
            f"first({VALID_FROM}) OVER ({in_time} ROWS UNBOUNDED PRECEDING) AS {_OLDEST}",
        )
        merged = {
            VALID_TO: f"{_END} AS {VALID_TO}",
            IS_FIRST: f"{_OLDEST} = {VALID_FROM} AS {IS_FIRST}",
        }
        # A row that ends when it begins is superseded by the next one of the same time.
        newest = placed.where(f"{_END} IS NULL OR {_END} <> {VALID_FROM}")
        return newest.selectExpr(*[merged.get(name, quote_name(name)) for name in rows.columns])

    def _merge_by_broadcast(self, rows: DataFrame) -> DataFrame:
        """Return the newest row of each (key, valid_from) among the scanned ones, with its interval
        corrected by what is broadcast of the deltas.
        """
        corrections = F.broadcast(self._corrections(rows))
        joined = rows.join(
            corrections, _same_key(self.sealed.key) & (F.col(VALID_FROM) == F.col(_AT)), "left"
        )
        is_corrected = F.col(_WINNER).isNotNull()
        # A base row without a correction is unchanged; a delta row is the newest, or superseded.
        kept = joined.where(
            F.when(is_corrected, F.col(GENERATION_COLUMN) == F.col(_WINNER)).otherwise(
                F.col(GENERATION_COLUMN) == self._base
            )
        )
        corrected = kept.withColumns(
            {
                VALID_TO: F.when(is_corrected, F.col(_NEW_END)).otherwise(F.col(VALID_TO)),
                IS_FIRST: F.when(is_corrected, F.col(_NEW_FIRST)).otherwise(F.col(IS_FIRST)),
            }
        )
        return corrected.select(*named_columns(rows.columns))

    def _corrections(self, rows: DataFrame) -> DataFrame:
        """Return corrections of the scan: for a key and `__valid_from` (_AT), the generation
        (_WINNER), end (_NEW_END) and `__first` (_NEW_FIRST) of the newest row.

        There is one where that row is of a delta, or is a base row whose interval has changed.
        """
        keys = _aliased_key(self.sealed.key)
        is_of_delta = F.col(GENERATION_COLUMN) != self._base
        keys_in_deltas = F.broadcast(rows.where(is_of_delta).select(*keys).distinct())
        touched = rows.join(keys_in_deltas, _same_key(self.sealed.key), "left_semi")
        # The merge replaces the end and `__first`, so the stored ones are kept under other names.
        stored = {_STORED_END: F.col(VALID_TO), _STORED_FIRST: F.col(IS_FIRST)}
        merged = self._merge_by_sorting(touched.withColumns(stored))
        has_other_end = ~F.col(VALID_TO).eqNullSafe(F.col(_STORED_END))
        has_other_first = ~F.col(IS_FIRST).eqNullSafe(F.col(_STORED_FIRST))
        names = {
            VALID_FROM: _AT,
            GENERATION_COLUMN: _WINNER,
            VALID_TO: _NEW_END,
            IS_FIRST: _NEW_FIRST,
        }
        return merged.where(is_of_delta | has_other_end | has_other_first).select(
            *keys, *[F.col(column).alias(name) for column, name in names.items()]
        )


class Bounds(NamedTuple):
    """The first key of a range, and the first one after it, None without a limit; in plain form.

    A bound may be a leading part of keys: it sorts before all keys that begin with it.
    """

    first: Key
    after: Key | None


def key_range(
    what: str, fields: Sequence[Field], prefix: object, start: object, end: object
) -> Bounds:
    """Return the bounds of the keys with a prefix, or from `start` (included) to `end` (excluded);
    None for any of them sets no bound.

    `prefix` is a string or bytes with which the first key column begins, or a tuple of whole values
    of leading key columns. `start` and `end` are keys or tuples of leading values. `what` names the
    dataset in errors. Raises SchemaMismatchError for values that do not fit the key, and for a
    prefix together with a range.
    """
    if prefix is None:
        first: Key = ()
        after: Key | None = None
        if start is not None:
            first = _leading_values(what, fields, start)
        if end is not None:
            after = _leading_values(what, fields, end)
        return Bounds(first, after)
    if start is not None or end is not None:
        raise SchemaMismatchError(
            f"{what}: both a prefix and a range are given.",
            "Give prefix=, or start= and end=, not both.",
            argument="prefix",
        )
    if not isinstance(prefix, tuple | list):
        if fields[0].type not in ("string", "binary"):
            raise SchemaMismatchError(
                f"{what}: key column {fields[0].name!r} is {fields[0].type}, so {prefix!r} can't be"
                " a prefix of it: only strings and binaries have prefixes.",
                "Give a tuple of whole values of leading key columns, or start= and end=.",
                argument="prefix",
                column=fields[0].name,
            )
        (begin,) = _leading_values(what, fields, prefix)
        assert isinstance(begin, bytes)
        # The least bytes that are greater than all bytes with this prefix, if there are any.
        stripped = begin.rstrip(b"\xff")
        if not stripped:
            return Bounds((begin,), None)
        return Bounds((begin,), (stripped[:-1] + bytes([stripped[-1] + 1]),))
    values = _leading_values(what, fields, prefix)
    if not values:
        return Bounds((), None)
    return Bounds(values, end_of_prefix(values))


def _leading_values(what: str, fields: Sequence[Field], values: object) -> Key:
    """Return a value of the first key column, or a tuple of values of leading ones, in plain form.
    Raises SchemaMismatchError and NullKeyError for values that do not fit.
    """
    given: tuple[object, ...]
    if isinstance(values, tuple | list):
        given = tuple(values)
    else:
        given = (values,)
    if len(given) <= len(fields):  # of too many values, the error names all columns
        leading = fields[: len(given)]
    else:
        leading = fields
    plain = []
    for field, value in zip(leading, coerce_key(what, leading, given), strict=True):
        plain.append(plain_converter(field.type)(value))
    return tuple(plain)


class UnreadableVersion(NamedTuple):
    """The error that a file can't be read, and the reader of its version."""

    error: ManifestMismatchError
    reader: VersionReader


def find_unreadable_version(
    error: BaseException | None, readers: Iterable[VersionReader]
) -> UnreadableVersion | None:
    """Return Spark's error as ManifestMismatchError, with the reader of the version whose file it
    could not read.

    None for any other error, and for a file of a version that none of `readers` reads.
    """
    if error is None:
        return None
    found = find_adjunct_error(error)
    is_of_spark = found is not error
    if not is_of_spark or not isinstance(found, ManifestMismatchError) or found.url is None:
        return None
    _, _, file = found.url.rpartition("/")
    for reader in readers:
        for generation in reader.sealed.generations:
            if f"/{generation.folder}/" in found.url:
                about = {
                    "dataset": reader.dataset,
                    "version": reader.version,
                    "key": f"{generation.folder}/{file}",
                }
                named = found.reworded(found.problem, found.next_step, **about)
                return UnreadableVersion(named, reader)
    return None


K = TypeVar("K", bound=Hashable)
Entry = dict[str, Any]
_ROWS_AT_ONCE = 1024


class VersionReader:
    """Reads one version, which never changes. Reading by key imports no Spark; threads may share
    a reader.
    """

    def __init__(
        self,
        store: ObjectStore,
        dataset: str,
        sealed: SealedVersion,
        cache: FileCache | None = None,
    ) -> None:
        self.store = store
        self.dataset = dataset
        self.sealed = sealed
        self.version = sealed.id
        self.schema = sealed.columns
        self.rows = sealed.rows
        """The number of entries; None if counting them needs a merge of deltas."""
        self._layout = sealed.layout
        self._what = f"dataset {dataset!r}, version {sealed.id}"
        self._key = tuple(sealed.columns.field(name) for name in sealed.key)
        cache = cache or FileCache()
        self._generations = []  # newest first
        for generation in reversed(sealed.generations):
            files = KeyFiles(store, self._what, self._layout, generation, cache)
            self._generations.append(files)
        self._mask: Mask | None = None
        self._names = sealed.columns.names
        self._plain = tuple(plain_converter(field.type) for field in self._key)
        self._bucket_columns = [sealed.key.index(name) for name in sealed.partition_by]
        bucket_types = tuple(self._key[index].type for index in self._bucket_columns)
        self._bucketer = bucket_function(bucket_types, self._layout.partitions)

    def __repr__(self) -> str:
        return f"VersionReader({self.dataset!r}, {self.version!r})"

    # -- by Spark

    @translate_spark_errors()
    def frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return all entries, with the columns of `schema`.

        A partitioned dataset is a bucketed scan: a join on its partition columns or its key needs
        no exchange on this side. Superseded rows are dropped during the scan, by the version's mask
        where it has one. Raises ManifestMismatchError if the stored files are not exactly those of
        the manifest.
        """
        spark = resolve_session(spark)
        if self.sealed.history is not None:
            rows = self._over_time(spark).current()
        else:
            rows = self._scan_all(spark)
            mask = self._find_mask()
            if mask is not None:
                rows = mask.drop_superseded(rows, self.sealed)
            elif self.sealed.positioned:
                rows = self._merge_deltas(rows)
        return rows.select(*named_columns(self.schema.names))

    @translate_spark_errors()
    def history_frame(self, spark: SparkSession | Callable[[], SparkSession]) -> DataFrame:
        """Return all rows of a version with history, each with the interval in which it is valid.

        A bucketed scan with the columns of `schema`, `__valid_from`, `__valid_to` (null: open),
        `__first` (the first row of its key) and `__tombstone` (the key has no entry in the
        interval). The intervals of a key are adjacent. Its first row may be an anchor, which only
        tells since when the interval of the second has lasted (see `Timeline`). Raises DatasetError
        for a version without history, and ManifestMismatchError as `frame` does.
        """
        rows = self._over_time(resolve_session(spark)).intervals()
        hidden = (VALID_FROM, VALID_TO, IS_FIRST, TOMBSTONE)
        return rows.select(*named_columns(self.schema.names), *hidden)

    @translate_spark_errors()
    def frame_at(
        self, spark: SparkSession | Callable[[], SparkSession], moment: Column
    ) -> DataFrame:
        """Return the entries that were valid at a moment, with the columns of `schema`.

        Raises DatasetError for a version without history, and ManifestMismatchError as `frame`
        does.
        """
        rows = self._over_time(resolve_session(spark)).valid_at(moment)
        return rows.select(*named_columns(self.schema.names))

    def _over_time(self, spark: SparkSession) -> RowsOverTime:
        """Return the stored rows, to be merged over time. Raises DatasetError without history."""
        if self.sealed.history is None:
            raise no_history_error(self.dataset)
        return RowsOverTime(self.sealed, self._scan_all(spark))

    def _scan_all(self, spark: SparkSession) -> DataFrame:
        """Return all stored rows of all generations, with the number of their generation."""
        return bucketed_frame(spark, self.store, self._what, self._layout, self.sealed.generations)

    def _find_mask(self) -> Mask | None:
        """Return the stored mask of this version, None without one. It is kept once it was found;
        until then, each call looks for it.
        """
        if self._mask is None and can_have_mask(self.sealed):
            self._mask = read_mask(self.store, self.sealed)
        return self._mask

    def _merge_deltas(self, rows: DataFrame) -> DataFrame:
        """Return the newest row of each key that is not deleted.

        A key is unique within a generation, so the generation of its newest row identifies the row.
        The keys in deltas are broadcast with that generation (none if the newest row is a
        deletion), and the scan drops their rows in other generations. So positions are read from
        deltas only, and rows stay in their buckets.
        """
        base, *deltas = self.sealed.generations
        changes = sum(delta.rows for delta in deltas)
        if changes:
            is_few = changes <= _BROADCAST_ROWS
            newest = self._newest_generations(rows, base.id, broadcast=is_few)
            is_older = F.col(GENERATION_COLUMN) != F.col(_NEWEST)
            rows = rows.join(newest, _same_key(self.sealed.key) & is_older, "left_anti")
        may_have_tombstones = any(_DELETED_COUNTER not in file.stats for file in base.files)
        if may_have_tombstones:  # those of deltas have been dropped by their keys
            rows = rows.where(~F.col(TOMBSTONE))
        return rows

    def _newest_generations(self, rows: DataFrame, base: int, *, broadcast: bool) -> DataFrame:
        """Return the keys in deltas, each with the generation of its newest row (_NEWEST), -1 if
        that is a deletion. With `broadcast` they are sent to all tasks.

        `base` is the number of the base. The newest row has the highest (position, generation). By
        offset it is in a delta, so the base's rows are not read.
        """
        changed = rows.where(F.col(GENERATION_COLUMN) != base)
        if not self.sealed.partition_by:
            changed = changed.coalesce(1)  # one file a generation: one task needs no exchange
        keys = _aliased_key(self.sealed.key)
        if self.sealed.order_by is not None:  # a late change may be older than the base's row
            changed_keys = changed.select(*keys).distinct()
            if broadcast:
                changed_keys = F.broadcast(changed_keys)
            changed = rows.join(changed_keys, _same_key(self.sealed.key), "left_semi")
        newest = changed.groupBy(*keys).agg(
            F.max(F.struct(POSITION, GENERATION_COLUMN, TOMBSTONE)).alias(_NEWEST)
        )
        generation = F.when(F.col(f"{_NEWEST}.{TOMBSTONE}"), _NO_GENERATION).otherwise(
            F.col(f"{_NEWEST}.{GENERATION_COLUMN}")
        )
        newest = newest.withColumn(_NEWEST, generation)
        if broadcast:
            newest = F.broadcast(newest)
        return newest

    # -- by bucket

    @property
    def buckets(self) -> list[int]:
        """The buckets that have rows."""
        buckets = set[int]()
        for generation in self.sealed.generations:
            buckets.update(file.bucket for file in generation.files)
        return sorted(buckets)

    def keys_in(self, bucket: int, generations: Collection[int]) -> list[Key]:
        """Return the keys, in plain form and sorted, of a bucket's rows in these generations."""
        keys: set[Key] = set()
        for files in self._generations:
            if files.id not in generations:
                continue
            for rows, begin, end in files.scan(bucket, (), None):
                keys.update(rows.keys(begin, end, len(self._key)))
        return sorted(keys)

    def stored_rows_of(self, bucket: int, keys: Sequence[Key]) -> StoredRows:
        """Return a bucket's stored rows of these keys (in plain form, sorted), superseded ones and
        tombstones included.
        """
        tables = [self._layout.arrow_schema().empty_table()]
        generations: list[int] = []
        for files in self._generations:
            for rows, numbers in files.rows_of(bucket, keys):
                tables.append(rows.table.take(pa.array(numbers)))
                generations += [files.id] * len(numbers)
        return StoredRows(pa.concat_tables(tables), np.array(generations, np.int64))

    # -- by key

    def get(self, key: object) -> Entry | None:
        """Return the entry of `key`, or None.

        A key of several columns is a tuple in the order of the key, or a dict. Raises
        SchemaMismatchError for a value of another type than the key's, and ManifestMismatchError
        for a missing or damaged file.
        """
        return self._find(self._plain_key(key))

    def get_all(self, keys: Iterable[K]) -> dict[K, Entry]:
        """Return the entries of these keys, under the keys as given; keys without an entry are
        absent.
        """
        wanted = [(key, self._plain_key(key)) for key in keys]
        try:
            set(map(itemgetter(0), wanted))  # only whether all keys can be hashed
        except TypeError as error:
            raise ConfigurationError(
                f"{self._what}: get_all returns a dict by key, and one of these keys can't be used"
                f" in a dict: {error}.",
                "Give a key of several columns as a tuple, and that of one column as its value.",
                argument="keys",
                dataset=self.dataset,
            ) from error
        placed = []
        for index, (_, values) in enumerate(wanted):
            placed.append((self._bucket(values), values, index))
        found: dict[int, Entry | None] = {}
        for _, values, index in sorted(placed):  # as in the files: each row group is read once
            found[index] = self._find(values)
        entries = {}
        for index, (key, _) in enumerate(wanted):
            entry = found[index]
            if entry is not None:
                entries[key] = entry
        return entries

    def history_of(self, key: object) -> list[Validity]:
        """Return the entries of a key over time, oldest first; a deletion has no entry and ends the
        one before.

        Adjacent intervals with equal entries are merged; those that ended before the history begins
        are left out. Raises DatasetError for a version without history, and what `get` raises.
        """
        if self.sealed.history is None:
            raise no_history_error(self.dataset)
        values = self._plain_key(key)
        return read_key_history(self.sealed, self._generations, self._bucket(values), values)

    def items(
        self, prefix: object = None, *, start: object = None, end: object = None
    ) -> Iterator[tuple[Any, Entry]]:
        """Yield (key, entry) in key order; a key of several columns is a tuple.

        `prefix` is a string (or bytes) with which the first key column begins, or a tuple of whole
        values of leading key columns. `start` (included) and `end` (excluded) are keys, or tuples
        of leading values. Only matching row groups are read, when they are reached; memory holds
        one of each file. Raises SchemaMismatchError at once for bounds that do not fit the key,
        ManifestMismatchError as `get`.
        """
        bounds = key_range(self._what, self._key, prefix, start, end)
        items = [self._bucket_items(bucket, bounds) for bucket in self.buckets]
        merged: Iterator[tuple[tuple[Any, ...], Entry]]
        if len(items) == 1:
            merged = items[0]
        else:
            merged = heapq.merge(*items, key=itemgetter(0))
        if len(self._key) == 1:
            return ((value, entry) for (value,), entry in merged)
        return merged

    def _plain_key(self, key: object) -> Key:
        """Return a key as users give it in plain form."""
        values = coerce_key(self._what, self._key, key)
        return tuple([plain(value) for plain, value in zip(self._plain, values, strict=True)])

    def place_keys(self, keys: pa.Table) -> dict[int, list[Key]]:
        """Return the keys of a table, in plain form, by their bucket."""
        placed: dict[int, list[Key]] = {}
        for values in zip(*(column.to_pylist() for column in keys.columns), strict=True):
            key = self._plain_key(values[0] if len(values) == 1 else values)
            placed.setdefault(self._bucket(key), []).append(key)
        return placed

    def _bucket(self, key: Key) -> int:
        """Return the bucket of a key in plain form; 0 in a broadcast copy."""
        if self._bucket_columns:
            return self._bucketer([key[index] for index in self._bucket_columns])
        return 0

    def _find(self, key: Key) -> Entry | None:
        """Return the entry of a key in plain form.

        It is the key's row with the highest (position, generation), or with history (valid_from,
        position, generation); None if that row is a deletion.
        """
        bucket = self._bucket(key)
        names = self._names
        if self.sealed.history is not None:
            return find_newest_entry(self._generations, bucket, key, names)
        newest: RowPlace | None = None
        highest: tuple[Any, int] | None = None  # (position, generation)
        for files in self._generations:
            found = files.find(bucket, key)
            if found is None:
                continue
            if not self.sealed.positioned:  # there is one generation
                return found.rows.entry(names, found.row)
            order = (found.rows.value(POSITION, found.row), files.id)
            if highest is None or order > highest:
                newest = found
                highest = order
        if newest is None or newest.rows.value(TOMBSTONE, newest.row):
            return None
        return newest.rows.entry(names, newest.row)

    def _bucket_items(self, bucket: int, bounds: Bounds) -> Iterator[tuple[tuple[Any, ...], Entry]]:
        """Yield (key, entry) of one bucket in key order, merged over its generations. Keys are
        tuples.
        """
        scans = [self._scan(files, bucket, bounds) for files in self._generations]
        if len(scans) == 1 and not self.sealed.positioned:
            for match in scans[0]:
                yield match.key, match.row
            return
        names = self._names
        by_time = self.sealed.history is not None

        def age(match: _ScannedRow) -> tuple[Any, ...]:
            """Return what is highest for the newest row of a key."""
            place = (match.row.get(POSITION, 0), match.generation)
            if by_time:
                return (match.row[VALID_FROM], *place)
            return place

        by_key = attrgetter("key")
        for key, same in groupby(heapq.merge(*scans, key=by_key), key=by_key):
            newest = max(same, key=age).row
            if not newest.get(TOMBSTONE):
                yield key, {name: newest[name] for name in names}

    def _scan(self, files: KeyFiles, bucket: int, bounds: Bounds) -> Iterator[_ScannedRow]:
        """Yield the stored rows of one file within the bounds, in key order."""
        key = self.sealed.key
        for rows, begin, end in files.scan(bucket, bounds.first, bounds.after):
            for start in range(begin, end, _ROWS_AT_ONCE):
                part = rows.table.slice(start, min(_ROWS_AT_ONCE, end - start))
                for row in python_rows(part):
                    yield _ScannedRow(tuple([row[name] for name in key]), files.id, row)


class _ScannedRow(NamedTuple):
    """A stored row, with its key and the number of its generation."""

    key: tuple[Any, ...]
    generation: int
    row: Entry


_NEWEST = "__newest"
_DELETED_COUNTER = "deleted"
"""Files whose stats have this counter were written without tombstones; of other files
`__tombstone` is read.
"""
_BROADCAST_ROWS = 2_000_000
"""With more rows in deltas their keys are not broadcast, and each bucket is merged by sorting."""
_SORTED_ROWS = 2_000_000
"""With history and up to this many rows, each bucket is merged by sorting, which needs no job
before the scan.
"""


def read_entries(view: VersionReader, bucket: int | None, *, threads: bool = True) -> pa.Table:
    """Return the entries of one bucket, or of all (None), with the columns that users see and
    deltas merged.

    Each file is fetched whole, in one request. `threads` decodes columns in parallel; pass False
    where buckets are read in parallel. Raises ManifestMismatchError for a file that is missing or
    damaged or differs from the manifest.
    """
    stored = read_stored_rows(view.store, view.dataset, view.sealed, bucket, threads=threads)
    return entries_among(view, stored)


def read_entries_of(view: VersionReader, bucket: int, keys: Sequence[Key]) -> pa.Table:
    """Return the entries of these keys (in plain form, sorted) in a bucket, by lookups."""
    return entries_among(view, view.stored_rows_of(bucket, keys))


def entries_among(view: VersionReader, stored: StoredRows) -> pa.Table:
    """Return the entries among stored rows of a version: the newest row of each key, without
    deletions. The rows have to include all of each key.
    """
    sealed = view.sealed
    rows = stored.rows
    if rows.num_rows and sealed.positioned:
        is_entry = mark_entries(stored, sealed.key, by_time=sealed.history is not None)
        if not is_entry.all():
            rows = rows.filter(pa.array(is_entry))
    return rows.select(sealed.columns.names)


def look_up_entries(view: VersionReader, keys: pa.Table) -> pa.Table:
    """Return the entries of these keys, each once and without null; the columns are in the order
    of the key.
    """
    found = [view.schema.to_arrow().empty_table()]
    for bucket, placed in sorted(view.place_keys(keys).items()):
        found.append(read_entries_of(view, bucket, sorted(placed)))
    return pa.concat_tables(found)
