"""The rows of a table with history by Spark: each with the interval in which it was valid, base and deltas as one scan.

    scan of all generations   -> the columns, and `__valid_from`, `__valid_to`, `__first`, as they are stored

Where there are deltas, one of two ways puts their rows between those of the base. Few rows are sorted by key and time
in their buckets, and each looks at its neighbours: one scan, one job. Of many rows the base stays as it was written:

    rows of the keys in deltas -> the newest of each (key, valid_from), with its interval worked out anew
                               -> what the scan does not say of them is broadcast, and corrects it

No row is moved in either, and a base alone is read as it was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.kept_history import FIRST, TOLD, VALID_FROM, VALID_TO
from dagster_adjunct.assets.versions.sealed_version import POSITION, TOMBSTONE
from dagster_adjunct.resources.bucketing.bucketed_tables import GENERATION
from dagster_adjunct.resources.schemas.quoted_columns import column, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.assets.versions.sealed_version import SealedVersion

_AT, _WINNER, _END, _BEGINS, _OLDEST = "__at", "__winner", "__end", "__begins", "__oldest"
_NONE = -1
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
        return self._merged(self.rows)

    def current(self) -> DataFrame:
        """Return the row of each key that is valid now, unless it deletes."""
        from pyspark.sql import functions as F

        rows = self.rows
        if self._changes:
            # What the base has ended stays ended: a later change of the key can only come behind it or take it back.
            rows = self._merged(rows.where((F.col(GENERATION) != self._base) | F.col(VALID_TO).isNull()))
        return rows.where(F.col(VALID_TO).isNull() & ~F.col(TOMBSTONE))

    def valid_at(self, moment: Column) -> DataFrame:
        """Return the row of each key that was valid at a moment, unless it deletes."""
        from pyspark.sql import functions as F

        rows = self.rows
        if self._changes:
            # What the base ended by then stays ended, and what begins later only ends what was valid then.
            lasted = (F.col(GENERATION) != self._base) | F.col(VALID_TO).isNull() | (F.col(VALID_TO) > moment)
            rows = self._merged(rows.where((F.col(VALID_FROM) <= moment) & lasted))
        ended = F.col(VALID_TO) <= moment
        return rows.where((F.col(VALID_FROM) <= moment) & (F.col(VALID_TO).isNull() | ~ended) & ~F.col(TOMBSTONE))

    @property
    def _base(self) -> int:
        """The generation whose rows say where they end; none after an erasure that has left no row of it."""
        first = next((generation for generation in self.sealed.generations if generation.files), None)
        untold = first is None or any(file.stats.get(TOLD) is False for file in first.files)
        return _NONE if untold or first is None else first.id

    @property
    def _changes(self) -> int:
        """Rows in deltas."""
        return sum(generation.rows for generation in self.sealed.generations if generation.id != self._base)

    def _merged(self, rows: DataFrame) -> DataFrame:
        """Return the newest row of each (key, valid_from), with its interval as it is now."""
        changes = self._changes
        if not changes:
            return rows
        few = sum(generation.rows for generation in self.sealed.generations) <= self.sorted_rows
        return self._sorted(rows) if few or changes > self.broadcast_rows else self._corrected(rows)

    def _sorted(self, rows: DataFrame) -> DataFrame:
        """Return them from one scan, in the order of key and time: where a row ends is where its neighbour begins."""
        if not self.sealed.partition_by:
            rows = rows.coalesce(1)  # one file a generation: no exchange is needed to meet in one task
        keys = ", ".join(quoted(name) for name in self.sealed.key)
        in_time = f"PARTITION BY {keys} ORDER BY {VALID_FROM}, {POSITION}, {GENERATION}"
        placed = rows.selectExpr(
            "*",
            f"lead({VALID_FROM}) OVER ({in_time}) AS {_END}",
            f"first({VALID_FROM}) OVER ({in_time} ROWS UNBOUNDED PRECEDING) AS {_OLDEST}",
        )
        now = {VALID_TO: f"{_END} AS {VALID_TO}", FIRST: f"{_OLDEST} = {VALID_FROM} AS {FIRST}"}
        newest = placed.where(f"{_END} IS NULL OR {_END} <> {VALID_FROM}")
        return newest.selectExpr(*[now.get(name) or quoted(name) for name in rows.columns])

    def _corrected(self, rows: DataFrame) -> DataFrame:
        """Return them as they are scanned, corrected by what is broadcast: what the deltas have changed."""
        from pyspark.sql import functions as F

        news = F.broadcast(self._news(rows))
        same = reduce(and_, (column(name) == F.col(f"__key_{i}") for i, name in enumerate(self.sealed.key)))
        joined = rows.join(news, same & (F.col(VALID_FROM) == F.col(_AT)), "left")
        known = F.col(_WINNER).isNotNull()
        # A row of the base of which there is no news is as it was; one of a delta is the winner, or superseded.
        kept = joined.where(
            F.when(known, F.col(GENERATION) == F.col(_WINNER)).otherwise(F.col(GENERATION) == self._base)
        )
        now = {VALID_TO: F.col(_END), FIRST: F.col(_BEGINS)}
        return kept.select(
            *[
                F.when(known, now[name]).otherwise(F.col(name)).alias(name) if name in now else column(name)
                for name in rows.columns
            ]
        )

    def _news(self, rows: DataFrame) -> DataFrame:
        """Return what the scan does not say: (key, valid_from) with the generation, end and `first` of its newest row.

        That is each that a delta has, and those of the base whose interval is another one now.
        """
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        if not self.sealed.partition_by:
            rows = rows.coalesce(1)  # one file a generation: no exchange is needed to meet in one task
        keys = [f"__key_{i}" for i in range(len(self.sealed.key))]
        named = [column(name).alias(key) for name, key in zip(self.sealed.key, keys, strict=True)]
        changed = F.broadcast(rows.where(F.col(GENERATION) != self._base).select(*named).distinct())
        same = reduce(and_, (column(name) == F.col(key) for name, key in zip(self.sealed.key, keys, strict=True)))
        touched = rows.join(changed, same, "left_semi")
        newest = F.struct(POSITION, F.col(GENERATION).alias(_WINNER), F.col(VALID_TO).alias(_STORED_END), FIRST)
        winners = touched.groupBy(*named, F.col(VALID_FROM).alias(_AT)).agg(F.max(newest).alias("__newest"))
        in_time = Window.partitionBy(*keys).orderBy(_AT)
        placed = winners.select(
            *keys,
            _AT,
            F.col(f"__newest.{_WINNER}").alias(_WINNER),
            F.col(f"__newest.{_STORED_END}").alias(_STORED_END),
            F.col(f"__newest.{FIRST}").alias(_STORED_FIRST),
            F.lead(_AT).over(in_time).alias(_END),
            F.lag(_AT).over(in_time).isNull().alias(_BEGINS),
        )
        stands = F.col(_END).eqNullSafe(F.col(_STORED_END)) & F.col(_BEGINS).eqNullSafe(F.col(_STORED_FIRST))
        return placed.where((F.col(_WINNER) != self._base) | ~stands).select(*keys, _AT, _WINNER, _END, _BEGINS)
