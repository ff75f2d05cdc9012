"""Merges changes of which each sets groups of columns, with an order for each group. "Group" always
means a group of columns here; the rows of a key are called that.

As if each group were a table of its own, whose newest change counts, and an entry their full join:

    change                     a_seq  a     b_seq  b     `__set_at`
    a_seq=5, a=1               5      1     -      -
    b_seq=2, b=1               5      1     2      1
    a_seq=4, a=2               5      1     2      1
    a_seq=6, deleted           -      -     2      1     {"a_seq": [null, 6]}
    b_seq=9, deleted           -      -     -      -     {"a_seq": [null, 6], "b_seq": [null, 9]}

A change sets the groups whose ordering column is not null. The ordering columns are stored, so that
`__set_at` needs only the positions of groups that were deleted and, where offsets of different
partitions must not decide, the partition that each group came from. It has these as JSON, by the
stored names of the ordering columns. Groups of which nothing is stored have no part in this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dagster_adjunct.assets.declaration.change_formats import KEPT
from dagster_adjunct.assets.sources.changes import position_array
from dagster_adjunct.assets.unbounded.merge_columns import Merged, SortedRows, set_column
from dagster_adjunct.assets.unbounded.tied_changes import Tie
from dagster_adjunct.assets.versions.version import TOMBSTONE
from dagster_adjunct.resources.bucketing.files import SET_AT, BucketLayout
from dagster_adjunct.resources.lazy_modules import np, pa
from dagster_adjunct.resources.schemas.equality import comparable_value
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION

Groups = tuple[tuple[str, tuple[str, ...]], ...]
"""The ordering columns, each with the other columns of its group."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """What the rows say of one group of columns, whose `names` begin with the ordering column.

    Arrays with an element for each row: `says`, whether it sets or deletes the group; `deletes`,
    whether it deletes it; the `position` and the `partition` of that (-1: not known). `winner` has
    an element for each key: the index of the row that says it at the highest position, -1 if none
    of its rows says anything.
    """

    names: tuple[str, ...]
    says: Any
    deletes: Any
    position: Any
    partition: Any
    winner: Any


class GroupMerge:
    """The merge of these rows by groups of columns. Each column that is not of the key is in one
    group.

    The rows of key i begin at `_starts[i]` and end before `_ends[i]`.
    """

    def __init__(self, sorted_rows: SortedRows, layout: BucketLayout, groups: Groups) -> None:
        self._rows = sorted_rows.rows
        self._starts = sorted_rows.starts
        self._ends = np.append(self._starts[1:], self._rows.num_rows)
        self._is_new = sorted_rows.is_new
        self._layout = layout
        # By row: by stored name of an ordering column, [partition, position of the deletion].
        self._set_at = []
        for text in self._rows.column(SET_AT).to_pylist():
            self._set_at.append({} if text is None else json.loads(text))
        self._groups = {}
        for order, columns in groups:
            (stored_name,) = layout.stored_names([order])
            self._groups[stored_name] = self._read_group(stored_name, order, columns)

    def _read_group(self, stored_name: str, order: str, columns: tuple[str, ...]) -> _Group:
        """Return what the rows say of the group with the ordering column `order`, which is stored
        as `stored_name`, and these other columns.
        """
        values = position_array(self._rows, order, self._layout.schema)
        says = values.is_valid().to_numpy()
        position = values.fill_null(0).to_numpy().copy()
        deletes = says & self._rows.column(TOMBSTONE).to_numpy()
        partition = self._rows.column(PARTITION).cast("int64").fill_null(-1).to_numpy().copy()
        for row, set_at in enumerate(self._set_at):
            if stored_name in set_at:
                stored_partition, deleted_at = set_at[stored_name]
                partition[row] = -1 if stored_partition is None else stored_partition
                if deleted_at is not None:
                    says[row] = deletes[row] = True
                    position[row] = deleted_at
        # The highest position wins; of equal ones the last row, for which a code has both.
        count = len(says)
        rank = np.unique(position, return_inverse=True)[1]
        codes = np.where(says, rank * count + np.arange(count), -1)
        newest = np.maximum.reduceat(codes, self._starts)
        winner = np.where(newest < 0, -1, newest % count)
        return _Group((order, *columns), says, deletes, position, partition, winner)

    def find_ties(self, *, by_offset: bool) -> list[Tie]:
        """Return the changes that set a group at the position of its winner, but to other values
        than a row of another partition. A change is listed once, whatever the number of groups.
        """
        assert not by_offset, "each group has an ordering column"
        ties: dict[int, Tie] = {}
        high = np.iinfo(np.int64).max
        for group in self._groups.values():
            # Of a key without a winner (-1) no row says anything, so none is equal.
            wanted = np.repeat(group.position[group.winner], self._ends - self._starts)
            is_equal = group.says & (group.position == wanted) & (group.partition >= 0)
            partition = np.where(is_equal, group.partition, high)
            lowest = np.minimum.reduceat(partition, self._starts)
            partition = np.where(is_equal, group.partition, -high)
            highest = np.maximum.reduceat(partition, self._starts)
            for key in np.flatnonzero(lowest < highest).tolist():
                rows = np.arange(self._starts[key], self._ends[key])
                for tie in self._find_ties_among(rows[is_equal[rows]], group):
                    ties.setdefault(tie.row, tie)
        return list(ties.values())

    def _find_ties_among(self, rows: Any, group: _Group) -> Iterator[Tie]:
        """Yield the ties among rows that set a group at one position. The stored row, or else the
        change of the lowest partition, counts as read first.
        """
        partition = group.partition[rows]
        is_new = self._is_new[rows]
        first = partition.min() if is_new.all() else partition[~is_new][-1]
        base = int(rows[partition == first][-1])
        for other in np.unique(partition[is_new & (partition != first)]).tolist():
            changes = rows[partition == other].tolist()
            if self._content(changes[-1], group) == self._content(base, group):
                continue
            for row in changes:
                if self._is_new[row]:
                    yield Tie(row, self._describe(row), self._describe(base))

    def _content(self, row: int, group: _Group) -> Any:
        """Return what a row sets a group to, in a form that can be compared; None if it deletes
        it.
        """
        if group.deletes[row]:
            return None
        return [comparable_value(self._rows.column(name)[row].as_py()) for name in group.names]

    def _describe(self, row: int) -> dict[str, Any]:
        """Return a row as a tie describes it; stored rows have no offset."""
        found = python_rows(self._rows.slice(row, 1))[0]
        if not self._is_new[row]:
            del found[OFFSET]
        return found

    def merge(self) -> Merged:
        """Return one row for each key of which a change wins in some group.

        The columns of a group are those of its winner, null if the group is deleted or was never
        set. The key, offset and partition are those of the key's last change. A key without any
        group is a tombstone.
        """
        has_new_winner = np.zeros(len(self._starts), bool)
        exists = np.zeros(len(self._starts), bool)
        for group in self._groups.values():
            # A winner of -1, for none, would index the last row.
            has_new_winner |= (group.winner >= 0) & self._is_new[group.winner]
            exists |= self._is_present(group)
        keys = np.flatnonzero(has_new_winner)
        # Changes follow the stored rows of their key.
        last_change = self._ends[keys] - 1
        rows = self._rows.drop_columns([KEPT]).take(last_change)
        for group in self._groups.values():
            source_rows = pa.array(group.winner[keys], mask=~self._is_present(group)[keys])
            for name in group.names:
                rows = set_column(rows, name, self._rows.column(name).take(source_rows))
        rows = set_column(rows, TOMBSTONE, pa.array(~exists[keys]))
        rows = set_column(rows, SET_AT, self._write_set_at(keys))
        superseded = int(self._is_new.sum()) - len(keys)
        return Merged(rows, superseded=superseded, carried=0, held=0)

    def _is_present(self, group: _Group) -> Any:
        """Return for each key whether it has a value of the group: set, and not deleted since."""
        return (group.winner >= 0) & ~group.deletes[group.winner]

    def _write_set_at(self, keys: Any) -> pa.Array:
        """Return the column `__set_at` of these keys, null where it would have no group.

        A group has [partition, position of its deletion]. The partition is null if it is not known,
        or the layout has none; the position is null if the group is not deleted.
        """
        has_partitions = PARTITION in self._layout.columns
        by_key: list[dict[str, list[int | None]]] = [{} for _ in range(len(keys))]
        for stored_name, group in self._groups.items():
            winner = group.winner[keys]
            is_set = winner >= 0  # -1, for none, would index the last row
            is_deleted = is_set & group.deletes[winner]
            is_placed = is_set & (group.partition[winner] >= 0)  # its partition is known
            if not has_partitions:
                is_placed[:] = False
            for key in np.flatnonzero(is_deleted | is_placed).tolist():
                row = winner[key]
                partition = None
                if is_placed[key]:
                    partition = int(group.partition[row])
                deleted_at = None
                if is_deleted[key]:
                    deleted_at = int(group.position[row])
                by_key[key][stored_name] = [partition, deleted_at]
        texts: list[str | None] = []
        for set_at in by_key:
            if not set_at:
                texts.append(None)
                continue
            texts.append(json.dumps(set_at, separators=(",", ":"), ensure_ascii=False))
        return pa.array(texts, pa.string())
