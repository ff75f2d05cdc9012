"""The rows of a table with history by Spark: each with the interval in which it was valid, base and deltas as one scan.

    scan of all generations   -> the columns, and `__valid_from`, `__valid_to`, `__first`, as they are stored

Where there are deltas, one of two ways puts their rows between those of the base. Few rows are sorted by key and time
in their buckets, and each looks at its neighbours: one scan, one job. Of many rows the base stays as it was written:

    rows of the keys in deltas -> the newest of each (key, valid_from), with its interval worked out anew
                               -> what the scan does not say of them is broadcast, and corrects it

No row is moved in either, and a base alone is read as it was written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from itertools import pairwise
from math import isnan
from operator import and_
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.versions.version import POSITION, TOMBSTONE
from dagster_adjunct.resources.bucketing.files import GENERATION_COLUMN
from dagster_adjunct.resources.bucketing.timeline import HAS_ENDS, IS_FIRST, VALID_FROM, VALID_TO
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.schemas.column_sql import named_column, quote_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.assets.reading.key_lookup import Key, KeyFiles, RowGroup
    from dagster_adjunct.assets.versions.version import SealedVersion

_NAN = object()


@dataclass(frozen=True, slots=True)
class Validity:
    """What was valid of a key from one moment (included) to another (excluded; None: it still is).

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
        """Whether the moment lies in it."""
        return self.valid_from <= moment and (self.valid_to is None or moment < self.valid_to)


@dataclass(frozen=True, slots=True)
class RowOverTime:
    """One stored row of a key; rows of the same moment compare by `rank`, (position, generation)."""

    valid_from: datetime
    rank: tuple[int, int]
    rows: RowGroup
    row: int

    @property
    def deleted(self) -> bool:
        """Whether it says that the key was deleted."""
        return bool(self.rows.value(TOMBSTONE, self.row))

    def entry(self, names: tuple[str, ...]) -> dict[str, Any] | None:
        """Return what was valid with it, None for a deletion."""
        return None if self.deleted else self.rows.entry(names, self.row)


def no_history_error(dataset: str) -> DatasetError:
    """Return the error for a version that keeps no entries over time."""
    return DatasetError(
        f"dataset {dataset!r}: this version keeps no history: of each key it holds the newest entry only.",
        'Declare history=timedelta(…) or "all", which needs a table built anew: under a new name, or after adjunct '
        f"dataset delete {dataset} --reason …. What was served earlier is read by open_dataset(…, as_of=…).",
        dataset=dataset,
    )


def find_newest_row(generations: Iterable[KeyFiles], bucket: int, key: Key) -> RowOverTime | None:
    """Return the row of a key with the highest (moment, position, generation); None where there is none."""
    newest: RowOverTime | None = None
    for files in generations:
        last = deque(files.find_all(bucket, key), maxlen=1)
        for rows, _, after in last:
            newest = _later(newest, _row_over_time(files, rows, after - 1))
    return newest


def read_key_history(
    generations: Iterable[KeyFiles],
    bucket: int,
    key: Key,
    names: tuple[str, ...],
    edge: datetime | None,
    told_by: str | None,
) -> list[Validity]:
    """Return what was valid of a key and when, oldest first, deletions included; nothing for a key without rows.

    `edge` is the earliest moment that the history is exact for: what had ended by then is left out, whether or not a
    compaction has dropped it already. `told_by` is the column that says since when an entry is valid, if one does.
    """
    at: dict[datetime, RowOverTime] = {}
    for files in generations:
        for rows, first, after in files.find_all(bucket, key):
            for row in range(first, after):
                read = _row_over_time(files, rows, row)
                at[read.valid_from] = _later(at.get(read.valid_from), read)
    spans = pairwise([*sorted(at), None])
    told = (Validity(begin, end, at[begin].entry(names)) for begin, end in spans if begin is not None)
    exact = (part for part in told if edge is None or part.valid_to is None or part.valid_to > edge)
    return list(merge_equal_neighbours(exact, told_by))


def merge_equal_neighbours(parts: Iterable[Validity], told_by: str | None = None) -> Iterator[Validity]:
    """Yield the parts of a history with neighbours of the same content as one; since when it is valid is no content."""

    def content(part: Validity) -> dict[str, Any] | None:
        return (
            None if part.entry is None else {name: _comparable(v) for name, v in part.entry.items() if name != told_by}
        )

    last: Validity | None = None
    for part in parts:
        if last is not None and content(last) == content(part):
            last = Validity(last.valid_from, part.valid_to, last.entry)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


def _comparable(value: Any) -> Any:
    """Return the value, or one that equals itself for NaN, as it does to Spark and the engines that read all keys."""
    return _NAN if isinstance(value, float) and isnan(value) else value


def _row_over_time(files: KeyFiles, rows: RowGroup, row: int) -> RowOverTime:
    return RowOverTime(rows.value(VALID_FROM, row), (rows.value(POSITION, row), files.id), rows, row)


def _later(one: RowOverTime | None, other: RowOverTime) -> RowOverTime:
    if one is None or (one.valid_from, one.rank) < (other.valid_from, other.rank):
        return other
    return one


_AT, _WINNER, _END, _BEGINS, _OLDEST = "__at", "__winner", "__end", "__begins", "__oldest"
_NO_GENERATION = -1
_STORED_END, _STORED_FIRST = "__stored_end", "__stored_first"


@dataclass(frozen=True, slots=True)
class RowsOverTime:
    """What is read of one version's rows, given all of them as they are stored, with their generation.

    Up to `sorted_rows` rows of base and deltas are merged by sorting their buckets, and any number where more than
    `broadcast_rows` of them are in deltas. Of others, what deltas change is broadcast.
    """

    sealed: SealedVersion
    rows: DataFrame
    sorted_rows: int
    broadcast_rows: int

    def intervals(self) -> DataFrame:
        """Return the newest row of each (key, valid_from) with the interval in which it is valid.

        The columns are those of the rows; of one key the intervals touch each other. A row that is valid now has no
        `__valid_to`, the oldest of a key is `__first`, and a deletion is a row, too (`__tombstone`).
        """
        return self._merge(self.rows)

    def current(self) -> DataFrame:
        """Return the row of each key that is valid now, unless it deletes."""
        from pyspark.sql import functions as F

        rows = self.rows
        if self._changes:
            # What the base has ended stays ended: a later change of the key can only come behind it or take it back.
            rows = self._merge(rows.where((F.col(GENERATION_COLUMN) != self._base) | F.col(VALID_TO).isNull()))
        return rows.where(F.col(VALID_TO).isNull() & ~F.col(TOMBSTONE))

    def valid_at(self, moment: Column) -> DataFrame:
        """Return the row of each key that was valid at a moment, unless it deletes."""
        from pyspark.sql import functions as F

        rows = self.rows
        if self._changes:
            # What the base ended by then stays ended, and what begins later only ends what was valid then.
            lasted = (F.col(GENERATION_COLUMN) != self._base) | F.col(VALID_TO).isNull() | (F.col(VALID_TO) > moment)
            rows = self._merge(rows.where((F.col(VALID_FROM) <= moment) & lasted))
        ended = F.col(VALID_TO) <= moment
        return rows.where((F.col(VALID_FROM) <= moment) & (F.col(VALID_TO).isNull() | ~ended) & ~F.col(TOMBSTONE))

    @property
    def _base(self) -> int:
        """The generation whose rows say where they end; none after an erasure that has left no row of it."""
        first = next((generation for generation in self.sealed.generations if generation.files), None)
        untold = first is None or any(file.stats.get(HAS_ENDS) is False for file in first.files)
        return _NO_GENERATION if untold or first is None else first.id

    @property
    def _changes(self) -> int:
        """Rows in deltas."""
        return sum(generation.rows for generation in self.sealed.generations if generation.id != self._base)

    def _merge(self, rows: DataFrame) -> DataFrame:
        """Return the newest row of each (key, valid_from), with its interval as it is now."""
        changes = self._changes
        if not changes:
            return rows
        few = sum(generation.rows for generation in self.sealed.generations) <= self.sorted_rows
        return self._merge_by_sorting(rows) if few or changes > self.broadcast_rows else self._merge_by_broadcast(rows)

    def _merge_by_sorting(self, rows: DataFrame) -> DataFrame:
        """Return them from one scan, in the order of key and time: where a row ends is where its neighbour begins."""
        if not self.sealed.partition_by:
            rows = rows.coalesce(1)  # one file a generation: no exchange is needed to meet in one task
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
        """Return them as they are scanned, corrected by what is broadcast: what the deltas have changed."""
        from pyspark.sql import functions as F

        news = F.broadcast(self._corrections(rows))
        same = reduce(and_, (named_column(name) == F.col(f"__key_{i}") for i, name in enumerate(self.sealed.key)))
        joined = rows.join(news, same & (F.col(VALID_FROM) == F.col(_AT)), "left")
        known = F.col(_WINNER).isNotNull()
        # A row of the base of which there is no news is as it was; one of a delta is the winner, or superseded.
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
        """Return what the scan does not say: (key, valid_from) with the generation, end and `first` of its newest row.

        That is each that a delta has, and those of the base whose interval is another one now.
        """
        from pyspark.sql import Window
        from pyspark.sql import functions as F

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
        stands = F.col(_END).eqNullSafe(F.col(_STORED_END)) & F.col(_BEGINS).eqNullSafe(F.col(_STORED_FIRST))
        return placed.where((F.col(_WINNER) != self._base) | ~stands).select(*keys, _AT, _WINNER, _END, _BEGINS)
