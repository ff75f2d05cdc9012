"""Merges changes that leave out columns with the stored rows of their keys, in any order.

Each column has the position of the change that set it, and the change with the highest position
counts:

    position  change                 a     b     stored
    1         insert a=1, b=1        1     1     position 1
    9         b=9                    1     9     position 9, {"": 1, "b": 9}
    5         a=5, late              5     9     position 9, {"": 1, "a": 5, "b": 9}
    7         delete, late           -     9     position 9, {"": 7, "b": 9}, a tombstone
    8         insert a=8, b=8, late  8     9     position 9, {"": 8, "b": 9}

`__set_at` is null where one change wrote all of a row, or deleted it, at the row's position. Else
it has, as JSON, the position of each column that was set since the newest change of the whole row,
by its stored name, and under "" the position of that change: null if none is known. A row that was
deleted, or never written whole, is *held*: it is a tombstone with the columns that were set since,
and becomes an entry with the whole row that comes late.

With history a key has such a row for each time, and null under "" says that the other columns are
inherited from the row before it. Rows store what they inherit. A column that a late change sets is
carried into the rows that inherited it:

    time      change                 a     b     stored
    1         insert a=1, b=1        1     1
    9         b=9                    1     9     {"": null, "b": 9}
    5         a=5, late              5     1     {"": null, "a": 5}, and in the row of 9: a=5
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dagster_adjunct.assets.declaration.change_formats import KEPT, kept_matrix
from dagster_adjunct.assets.unbounded.tied_changes import Tie
from dagster_adjunct.assets.versions.version import POSITION, TOMBSTONE
from dagster_adjunct.resources.bucketing.files import SET_AT, BucketLayout
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.schemas.equality import comparable_value
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION

_WHOLE = ""
_OF_SNAPSHOT = -1
_OF_EARLIER_CHANGE = -2
"""In place of a partition: the row is of a bulk snapshot; an earlier change has set the column."""


@dataclass(frozen=True, slots=True, eq=False)
class SortedRows:
    """Stored rows and changes, of which those with the same key, and time, are a group.

    Group i begins at the row `starts[i]`, and `begins` says which groups are the first of their
    key. `is_new` says which rows are changes: within a group they follow the stored rows, which are
    ordered by generation.
    """

    rows: pa.Table
    starts: Any
    begins: Any
    is_new: Any


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """The rows that merging has made or changed, one for each key and time, without KEPT.

    `superseded` is the number of changes, less one for each row that changes have set: of several
    changes that were merged into one row, all but one count. `carried` is the number of rows that
    no change has set, but which inherit another value. `held` is the number of rows that wait for a
    whole one.
    """

    rows: pa.Table
    superseded: int
    carried: int
    held: int


class ColumnMerge:
    """The merge of these rows, whose columns are those of the layout.

    What rows say is in arrays with a column for each of `_names`, the columns besides the key, and
    a last one for whether there is an entry at all: only whole rows and deletions say that.
    """

    def __init__(self, sorted_rows: SortedRows, layout: BucketLayout) -> None:
        self._rows = sorted_rows.rows
        self._starts = sorted_rows.starts
        self._begins = sorted_rows.begins
        self._is_new = sorted_rows.is_new
        self._layout = layout
        self._names = [name for name in layout.schema.names if name not in layout.key]
        self._stored_names = layout.stored_names(self._names)
        self._is_deleted = self._rows.column(TOMBSTONE).to_numpy()
        self._group = np.repeat(np.arange(len(self._starts)), self._sizes())
        self._row_sets, self._rank, self._row_rank, self._positions = self._read_statements()
        # Of each group the row that wins in each column, -1 if none sets it; and the row with the
        # highest position.
        self._winner = self._find_newest(np.where(self._row_sets, self._rank, -1))
        self._top = self._find_newest(self._row_rank[:, None])[:, 0]

    def _sizes(self) -> Any:
        return np.diff(np.append(self._starts, self._rows.num_rows))

    # -- what rows say

    def _read_statements(self) -> tuple[Any, Any, Any, Any]:
        """Return four arrays: which columns each row sets; the rank of the position at which it
        sets each column; the rank of its own position; and the position of each rank.
        """
        position = self._rows.column(POSITION).to_numpy()
        kept = kept_matrix(self._rows.column(KEPT), self._names) & ~self._is_deleted[:, None]
        row_sets = np.column_stack([~kept, ~kept.any(axis=1)])
        places = {name: column for column, name in enumerate(self._stored_names)}
        # Of rows that several changes have written: the position of the change of the whole row,
        # by row; the rows without one; and the positions of columns that were set since.
        whole_positions: dict[int, Any] = {}
        never_whole: list[int] = []
        part_rows: list[int] = []
        part_columns: list[int] = []
        part_positions: list[Any] = []
        for row, set_at in self._iterate_set_at():
            whole_at = set_at.pop(_WHOLE)
            if whole_at is None:
                never_whole.append(row)
            else:
                whole_positions[row] = whole_at
            for name, column_position in set_at.items():
                if name in places:  # else the column was dropped
                    part_rows.append(row)
                    part_columns.append(places[name])
                    part_positions.append(column_position)
        values = [
            position,
            np.array(list(whole_positions.values()), position.dtype),
            np.array(part_positions, position.dtype),
        ]
        positions, ranks = np.unique(np.concatenate(values), return_inverse=True)
        row_rank, whole_ranks, part_ranks = np.split(ranks, np.cumsum(list(map(len, values[:2]))))
        rank = np.repeat(row_rank[:, None], row_sets.shape[1], axis=1)
        rank[list(whole_positions)] = whole_ranks[:, None]
        row_sets[never_whole] = False
        row_sets[part_rows, part_columns] = True
        rank[part_rows, part_columns] = part_ranks
        return row_sets, rank, row_rank, positions

    def _iterate_set_at(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each row that was not written by one change, with the positions of its columns."""
        texts = self._rows.column(SET_AT)
        rows = pc.indices_nonzero(texts.is_valid())
        for row, text in zip(rows.to_pylist(), texts.take(rows).to_pylist(), strict=True):
            yield row, json.loads(text)

    def _find_newest(self, rank: Any) -> Any:
        """Return, for each group and column, the index of the row with the highest rank, the last
        one of equal ranks; -1 where all ranks are -1.
        """
        count = len(rank)
        codes = np.where(rank < 0, -1, rank * count + np.arange(count)[:, None])
        newest = np.maximum.reduceat(codes, self._starts, axis=0)
        return np.where(newest < 0, -1, newest % count)

    # -- ties

    def find_ties(self, *, by_offset: bool) -> list[Tie]:
        """Return the changes that are tied with a row of another partition: they set other columns
        or other values at the position that decides a column.

        If positions are offsets, which order nothing across partitions, all streamed changes of a
        group are at one position, and rows of snapshots at a lower one.
        """
        level = self._rank
        row_level = self._row_rank
        partition = self._rows.column(PARTITION).cast("int64").fill_null(_OF_SNAPSHOT)
        partition = partition.to_numpy()[:, None]
        if by_offset:
            level = (self._positions[level] >= 0).astype(np.int64)
            row_level = (self._positions[row_level] >= 0).astype(np.int64)
        else:  # the partition of a column that an earlier change has set is not stored
            is_own = self._rank == self._row_rank[:, None]
            partition = np.where(is_own, partition, _OF_EARLIER_CHANGE)
        # The level at which each column of a row's group is decided; -1 if no row sets it.
        decided = np.take_along_axis(level, np.maximum(self._winner, 0), axis=0)
        decided = np.where(self._winner < 0, -1, decided)[self._group]
        # Also rows of that level that leave out the column: they are tied with those that set it.
        equal = (level == decided) & self._row_sets | (row_level[:, None] == decided)
        equal &= partition != _OF_SNAPSHOT
        high = np.iinfo(np.int64).max
        lowest = np.minimum.reduceat(np.where(equal, partition, high), self._starts, axis=0)
        highest = np.maximum.reduceat(np.where(equal, partition, -high), self._starts, axis=0)
        partition = np.broadcast_to(partition, equal.shape)
        ends = self._starts + self._sizes()
        ties: dict[int, Tie] = {}
        for group, column in np.argwhere(lowest < highest).tolist():
            rows = np.arange(self._starts[group], ends[group])
            rows = rows[equal[rows, column]]
            for tie in self._find_ties_among(rows, column, partition[rows, column]):
                ties.setdefault(tie.row, tie)
        return list(ties.values())

    def _find_ties_among(self, rows: Any, column: int, partitions: Any) -> Iterator[Tie]:
        """Yield the ties among equal rows of a group in this column. The stored row, or else the
        change of the lowest partition, counts as read first.
        """
        is_new = self._is_new[rows]
        if is_new.all():
            first = partitions.min()
        else:
            first = partitions[~is_new][-1]
        base = rows[partitions == first]
        for other in np.unique(partitions[is_new & (partitions != first)]).tolist():
            changes = rows[partitions == other]
            if self._value(changes, column) == self._value(base, column):
                continue
            for row in changes[self._is_new[changes]].tolist():
                yield Tie(row, self._describe(row), self._describe(int(base[-1])))

    def _value(self, rows: Any, column: int) -> Any:
        """Return what these rows, one after the other, set a column to, in a form that can be
        compared: a tuple with the value, True for a deletion, None if they don't set it. For the
        last column, return whether they delete the row.
        """
        setting = rows[self._row_sets[rows, column]]
        if not len(setting):
            return None
        row = int(setting[-1])
        is_deleted = bool(self._is_deleted[row])
        if column == len(self._names):
            return is_deleted
        is_set_with_row = self._rank[row, column] == self._rank[row, -1]
        if is_set_with_row and is_deleted:  # else it was set after the deletion
            return True
        return (comparable_value(self._rows.column(self._names[column])[row].as_py()),)

    def _describe(self, row: int) -> dict[str, Any]:
        """Return a row as a tie describes it; stored rows have no offset."""
        found = python_rows(self._rows.slice(row, 1))[0]
        if not self._is_new[row]:
            del found[OFFSET]
        return found

    # -- the result

    def merge(self) -> Merged:
        """Return the groups that changes have made or changed, each as one row.

        A group is changed where a change wins in a column or is the newest one; or where it only
        inherits another value than before (`carried`).
        """
        source = self._find_sources()
        won = np.where(self._winner >= 0, self._is_new[self._winner], False)
        applied = won.any(axis=1) | self._is_new[self._top]
        carried = self._find_carried(source) & ~applied
        groups = np.flatnonzero(applied | carried)
        source = source[groups]
        top = self._top[groups]
        exists = (source[:, -1] >= 0) & ~self._is_deleted[source[:, -1]]
        set_at = self._write_set_at(groups)
        rows = self._rows.drop_columns([KEPT]).take(top)
        for column, name in enumerate(self._names):
            places = pa.array(source[:, column], mask=source[:, column] < 0)
            rows = set_column(rows, name, self._rows.column(name).take(places))
        rows = set_column(rows, TOMBSTONE, pa.array(~exists))
        rows = set_column(rows, SET_AT, set_at)
        return Merged(
            rows,
            superseded=int(self._is_new.sum() - applied.sum()),
            carried=int(carried.sum()),
            held=int((set_at.is_valid().to_numpy(zero_copy_only=False) & ~exists).sum()),
        )

    def _find_sources(self) -> Any:
        """Return the row that each group takes each column from; -1 if nothing is known of it.

        A group that does not set a column takes it from the group of its key before it. A stored
        row has done that already, so it keeps what it has unless a change before it was merged in.
        """
        groups = np.arange(len(self._starts))[:, None]
        key_start = np.maximum.accumulate(np.where(self._begins[:, None], groups, -1))
        sets = self._winner >= 0
        stored = self._find_newest(np.where(self._is_new, -1, self._row_rank)[:, None])
        # The last group that sets the column, up to each group and before it.
        last_setting = np.maximum.accumulate(np.where(sets, groups, -1))
        setting_before = np.vstack([np.full((1, sets.shape[1]), -1), last_setting[:-1]])
        winner_before = np.take_along_axis(self._winner, np.maximum(setting_before, 0), axis=0)
        is_overtaken = (setting_before >= key_start) & self._is_new[winner_before]
        keeps_stored = (stored >= 0) & ~is_overtaken
        # The row that has the column, of the last group up to each group that has one of its own.
        own = np.where(sets, self._winner, stored)
        owner = np.maximum.accumulate(np.where(sets | keeps_stored, groups, -1))
        source = np.take_along_axis(own, np.maximum(owner, 0), axis=0)
        return np.where(owner >= key_start, source, -1)

    def _find_carried(self, source: Any) -> Any:
        """Return which groups inherit a column from the row of another group. A stored row that
        may keep what it has takes its columns from itself.
        """
        is_inherited = (self._winner < 0) & (source >= 0)
        own_group = np.arange(len(source))[:, None]
        is_of_other_group = self._group[source] != own_group
        return (is_inherited & is_of_other_group).any(axis=1)

    def _write_set_at(self, groups: Any) -> pa.Array:
        """Return the column `__set_at` of these groups, null for rows that one change wrote whole
        or deleted.
        """
        winner = self._winner[groups]
        sets = winner >= 0
        rank = np.where(sets, np.take_along_axis(self._rank, np.maximum(winner, 0), axis=0), -1)
        whole = rank[:, -1]
        is_part = sets[:, :-1] & (rank[:, :-1] != whole[:, None])
        partly = (whole < 0) | (whole != self._row_rank[self._top[groups]]) | is_part.any(axis=1)
        # By row, the positions of its columns, by stored name, and of the whole row (_WHOLE).
        positions_by_row: dict[int, dict[str, Any]] = {}
        rows = np.flatnonzero(partly)
        for row, position in zip(rows.tolist(), self._positions_of(whole[rows]), strict=True):
            positions_by_row[row] = {_WHOLE: position}
        rows, columns = np.nonzero(is_part)
        positions = self._positions_of(rank[rows, columns])
        for row, column, position in zip(rows.tolist(), columns.tolist(), positions, strict=True):
            positions_by_row[row][self._stored_names[column]] = position
        texts: list[str | None] = [None] * len(groups)
        for row, set_at in positions_by_row.items():
            texts[row] = json.dumps(set_at, separators=(",", ":"), ensure_ascii=False)
        return pa.array(texts, pa.string())

    def _positions_of(self, ranks: Any) -> list[Any]:
        """Return the positions of these ranks as Python values, None for -1."""
        values = self._positions[ranks].tolist()
        return [
            None if rank < 0 else value for rank, value in zip(ranks.tolist(), values, strict=True)
        ]


def lacks_whole_row(set_at: pa.ChunkedArray) -> Any:
    """Return for which stored rows no change of the whole row is known, by their `__set_at`."""
    begin = f'{{"{_WHOLE}":null'  # `_write_set_at` writes this member first
    return pc.fill_null(pc.starts_with(set_at, begin), False).to_numpy()


def set_column(rows: pa.Table, name: str, values: Any) -> pa.Table:
    """Return the rows with these values in one of their columns."""
    return rows.set_column(rows.column_names.index(name), name, values)
