"""Rows of a table with history: by key in plain Python, and with Spark each with the interval in which it was valid.

    scan of all generations   -> the columns, and `__valid_from`, `__valid_to`, `__first` as stored

A base without deltas is read as stored. Deltas are merged in one of two ways, both without an exchange. With few rows,
each bucket is sorted by key and time, and each row takes its end from its neighbour: one scan, one job. With many rows,
the base is not sorted:

    rows of the keys in deltas -> the newest of each (key, valid_from), with its new interval
                               -> where that differs from the scan it is broadcast, and corrects the scanned rows
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import reduce
from itertools import groupby, pairwise
from math import isnan
from operator import and_, itemgetter
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.reading.key_lookup import Key, KeyFiles, RowGroup
from dagster_adjunct.assets.versions.version import POSITION, TOMBSTONE, SealedVersion, datetime_from_micros
from dagster_adjunct.resources.bucketing.files import GENERATION_COLUMN
from dagster_adjunct.resources.bucketing.timeline import HAS_ENDS, IS_FIRST, VALID_FROM, VALID_TO
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.schemas.schema import named_column, quote_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


_NAN = object()


@dataclass(frozen=True, slots=True)
class Validity:
    """The entry of a key from one moment (included) to another (excluded; None: it is valid now).

    `entry` is None where the key was deleted.
    """

    valid_from: datetime
    valid_to: datetime | None
    entry: dict[str, Any] | None

    @property
    def is_current(self) -> bool:
        """Whether it is the key's entry now."""
        return self.valid_to is None and self.entry is not None

    def holds(self, moment: datetime) -> bool:
        """Whether the moment is in the interval."""
        return self.valid_from <= moment and (self.valid_to is None or moment < self.valid_to)


_Placed = tuple[tuple[datetime, int, int], RowGroup, int]
"""A stored row by its order, (valid_from, position, generation), its row group, and its row there."""


def no_history_error(dataset: str) -> DatasetError:
    """Return the error for a version without history."""
    return DatasetError(
        f"dataset {dataset!r}: this version keeps no history, only the newest entry of each key.",
        'Declare history=timedelta(…) or "all" for a new table: under a new name, or after adjunct dataset delete '
        f"{dataset} --reason …. To read what was served earlier, use open_dataset(…, as_of=…).",
        dataset=dataset,
    )


def find_newest_entry(
    generations: Iterable[KeyFiles], bucket: int, key: Key, names: tuple[str, ...]
) -> dict[str, Any] | None:
    """Return the entry of a key in its row with the highest (valid_from, position, generation); None for a deletion."""
    last_rows = (
        _place_row(files, rows, after - 1)
        for files in generations
        for rows, _, after in deque(files.find_all(bucket, key), maxlen=1)
    )
    newest = max(last_rows, key=itemgetter(0), default=None)
    return None if newest is None else _entry_of(newest, names)


def read_key_history(sealed: SealedVersion, generations: Iterable[KeyFiles], bucket: int, key: Key) -> list[Validity]:
    """Return the entries of a key over time, oldest first, with deletions; [] for a key without rows.

    Intervals that ended before the history's edge are left out, also before a compaction drops them.
    """
    assert sealed.history is not None
    names, edge = sealed.columns.names, None if sealed.edge is None else datetime_from_micros(sealed.edge)
    at: dict[datetime, _Placed] = {}
    for files in generations:
        for rows, first, after in files.find_all(bucket, key):
            for row in range(first, after):
                placed = _place_row(files, rows, row)
                valid_from = placed[0][0]
                at[valid_from] = max(at.get(valid_from, placed), placed, key=itemgetter(0))
    spans = pairwise([*sorted(at), None])
    parts = (Validity(begin, end, _entry_of(at[begin], names)) for begin, end in spans if begin is not None)
    exact = (part for part in parts if edge is None or part.valid_to is None or part.valid_to > edge)
    return list(merge_equal_neighbours(exact, sealed.history.valid_from))


def merge_equal_neighbours(parts: Iterable[Validity], start_column: str | None = None) -> Iterator[Validity]:
    """Yield the parts of a history, merging adjacent ones whose entries are equal but for `start_column`."""

    def content(part: Validity) -> dict[str, Any] | None:
        if part.entry is None:
            return None
        return {name: _comparable(value) for name, value in part.entry.items() if name != start_column}

    for _, equal in groupby(parts, content):
        first, *more = equal
        yield replace(first, valid_to=more[-1].valid_to) if more else first


def _comparable(value: Any) -> Any:
    """Return the value, or for NaN an object that equals itself, as NaN does in Spark and other engines."""
    return _NAN if isinstance(value, float) and isnan(value) else value


def _place_row(files: KeyFiles, rows: RowGroup, row: int) -> _Placed:
    return (rows.value(VALID_FROM, row), rows.value(POSITION, row), files.id), rows, row


def _entry_of(placed: _Placed, names: tuple[str, ...]) -> dict[str, Any] | None:
    _, rows, row = placed
    return None if rows.value(TOMBSTONE, row) else rows.entry(names, row)


_AT, _WINNER, _END, _BEGINS, _OLDEST = "__at", "__winner", "__end", "__begins", "__oldest"
_NO_GENERATION = -1
_STORED_END, _STORED_FIRST = "__stored_end", "__stored_first"


@dataclass(frozen=True, slots=True)
class RowsOverTime:
    """Merges all stored rows of one version, which have their generation.

    Up to `sorted_rows` rows are merged by sorting their buckets, as is any number with more than `broadcast_rows` rows
    in deltas. Otherwise the changes by deltas are broadcast.
    """

    sealed: SealedVersion
    rows: DataFrame
    sorted_rows: int
    broadcast_rows: int

    def intervals(self) -> DataFrame:
        """Return the newest row of each (key, valid_from) with the interval in which it is valid.

        The columns are those of the rows, and the intervals of a key are adjacent. A row that is valid now has no
        `__valid_to`, the oldest of a key is `__first`, and deletions are rows too (`__tombstone`).
        """
        return self._merge(self.rows)

    def current(self) -> DataFrame:
        """Return the row of each key that is valid now, without deletions."""
        rows = self.rows
        if self._changes:
            # Rows that ended in the base stay ended, so they need not be merged.
            rows = self._merge(rows.where((F.col(GENERATION_COLUMN) != self._base) | F.col(VALID_TO).isNull()))
        return rows.where(F.col(VALID_TO).isNull() & ~F.col(TOMBSTONE))

    def valid_at(self, moment: Column) -> DataFrame:
        """Return the row of each key that was valid at a moment, without deletions."""
        rows = self.rows
        if self._changes:
            # Rows that ended in the base by then stay ended, and rows that begin later don't matter.
            lasted = (F.col(GENERATION_COLUMN) != self._base) | F.col(VALID_TO).isNull() | (F.col(VALID_TO) > moment)
            rows = self._merge(rows.where((F.col(VALID_FROM) <= moment) & lasted))
        ended = F.col(VALID_TO) <= moment
        return rows.where((F.col(VALID_FROM) <= moment) & (F.col(VALID_TO).isNull() | ~ended) & ~F.col(TOMBSTONE))

    @property
    def _base(self) -> int:
        """The generation whose rows store their end; -1 after an erasure that left no row of it."""
        first = next((generation for generation in self.sealed.generations if generation.files), None)
        untold = first is None or any(file.stats.get(HAS_ENDS) is False for file in first.files)
        return _NO_GENERATION if untold or first is None else first.id

    @property
    def _changes(self) -> int:
        """The number of rows in deltas."""
        return sum(generation.rows for generation in self.sealed.generations if generation.id != self._base)

    def _merge(self, rows: DataFrame) -> DataFrame:
        """Return the newest row of each (key, valid_from), with its interval as it is now."""
        changes = self._changes
        if not changes:
            return rows
        few = sum(generation.rows for generation in self.sealed.generations) <= self.sorted_rows
        return self._merge_by_sorting(rows) if few or changes > self.broadcast_rows else self._merge_by_broadcast(rows)

    def _merge_by_sorting(self, rows: DataFrame) -> DataFrame:
        """Return the merged rows from one sorted scan: a row ends where the next one of its key begins."""
        if not self.sealed.partition_by:
            rows = rows.coalesce(1)  # one file a generation: one task needs no exchange
        keys = ", ".join(quote_name(name) for name in self.sealed.key)
        in_time = f"PARTITION BY {keys} ORDER BY {VALID_FROM}, {POSITION}, {GENERATION_COLUMN}"
        placed = rows.selectExpr(
            "*",
            f"lead({VALID_FROM}) OVER ({in_time}) AS {_END}",
            f"first({VALID_FROM}) OVER ({in_time} ROWS UNBOUNDED PRECEDING) AS {_OLDEST}",
        )
        now = {VALID_TO: f"{_END} AS {VALID_TO}", IS_FIRST: f"{_OLDEST} = {VALID_FROM} AS {IS_FIRST}"}
        newest = placed.where(f"{_END} IS NULL OR {_END} <> {VALID_FROM}")
        return newest.selectExpr(*[now.get(name) or quote_name(name) for name in rows.columns])

    def _merge_by_broadcast(self, rows: DataFrame) -> DataFrame:
        """Return the scanned rows, corrected by the broadcast changes of the deltas."""
        news = F.broadcast(self._corrections(rows))
        same = reduce(and_, (named_column(name) == F.col(f"__key_{i}") for i, name in enumerate(self.sealed.key)))
        joined = rows.join(news, same & (F.col(VALID_FROM) == F.col(_AT)), "left")
        known = F.col(_WINNER).isNotNull()
        # A base row without a correction is unchanged; a delta row is the newest, or superseded.
        kept = joined.where(
            F.when(known, F.col(GENERATION_COLUMN) == F.col(_WINNER)).otherwise(F.col(GENERATION_COLUMN) == self._base)
        )
        now = {VALID_TO: F.col(_END), IS_FIRST: F.col(_BEGINS)}
        return kept.select(
            *[
                F.when(known, now[name]).otherwise(F.col(name)).alias(name) if name in now else named_column(name)
                for name in rows.columns
            ]
        )

    def _corrections(self, rows: DataFrame) -> DataFrame:
        """Return the corrections of the scan: (key, valid_from) with generation, end and `first` of its newest row.

        They cover each row of a delta, and the base rows whose interval has changed.
        """
        from pyspark.sql import Window

        if not self.sealed.partition_by:
            rows = rows.coalesce(1)  # one file a generation: no exchange is needed to meet in one task
        keys = [f"__key_{i}" for i in range(len(self.sealed.key))]
        named = [named_column(name).alias(key) for name, key in zip(self.sealed.key, keys, strict=True)]
        changed = F.broadcast(rows.where(F.col(GENERATION_COLUMN) != self._base).select(*named).distinct())
        same = reduce(and_, (named_column(name) == F.col(key) for name, key in zip(self.sealed.key, keys, strict=True)))
        touched = rows.join(changed, same, "left_semi")
        newest = F.struct(
            POSITION, F.col(GENERATION_COLUMN).alias(_WINNER), F.col(VALID_TO).alias(_STORED_END), IS_FIRST
        )
        winners = touched.groupBy(*named, F.col(VALID_FROM).alias(_AT)).agg(F.max(newest).alias("__newest"))
        in_time = Window.partitionBy(*keys).orderBy(_AT)
        placed = winners.select(
            *keys,
            _AT,
            F.col(f"__newest.{_WINNER}").alias(_WINNER),
            F.col(f"__newest.{_STORED_END}").alias(_STORED_END),
            F.col(f"__newest.{IS_FIRST}").alias(_STORED_FIRST),
            F.lead(_AT).over(in_time).alias(_END),
            F.lag(_AT).over(in_time).isNull().alias(_BEGINS),
        )
        unchanged = F.col(_END).eqNullSafe(F.col(_STORED_END)) & F.col(_BEGINS).eqNullSafe(F.col(_STORED_FIRST))
        return placed.where((F.col(_WINNER) != self._base) | ~unchanged).select(*keys, _AT, _WINNER, _END, _BEGINS)
