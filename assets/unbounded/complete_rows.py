"""Completes changes that leave out columns, from the changes before them and from stored rows.

If changes have an order of their own, or times, merge_columns.py and merge_groups.py do that, in
any order. By offset, the rows of one bucket are ordered by key and position:

    key  a      b      a change that
    k    1      2      is a whole row
    k    3      -      leaves out b: becomes 3, 2
    k    -      4      leaves out a: becomes 3, 4
    k    gone          deletes
    k    5      -      leaves out b: incomplete, because there is no row to take b from

The row before the first change of a key is its newest row in the generations of the table. Rows are
read only for keys that need one, and of these only the missing columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dagster_adjunct.assets.declaration.change_formats import KEPT, kept_matrix
from dagster_adjunct.assets.declaration.change_values import SNAPSHOT_ROWS
from dagster_adjunct.assets.declaration.extractors import UNDECIDED
from dagster_adjunct.assets.declaration.policies import ColumnGroups
from dagster_adjunct.assets.sources.changes import bad_change_error, late_change_reason
from dagster_adjunct.assets.unbounded.merge_columns import (
    ColumnMerge,
    SortedRows,
    lacks_whole_row,
    set_column,
)
from dagster_adjunct.assets.unbounded.merge_groups import GroupMerge
from dagster_adjunct.assets.unbounded.stored_rows import StoredRows
from dagster_adjunct.assets.unbounded.tied_changes import (
    NumberedChange,
    Tie,
    TieGroups,
    TieRule,
    group_changes,
    resolve_group,
)
from dagster_adjunct.assets.versions.version import POSITION
from dagster_adjunct.resources.bucketing.files import (
    SET_AT,
    VALID_FROM,
    BucketFile,
    BucketLayout,
    Generation,
    key_changes,
)
from dagster_adjunct.resources.bucketing.writer import ROWS_PER_GROUP
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.types import arrow_type, type_from_spark
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.spark.tasks import convert_in_tasks, names_by_position
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_READ = (POSITION, TOMBSTONE)
"""The columns of stored rows that are read anyway."""


@dataclass(frozen=True, slots=True)
class RowCompletion:
    """How the changes of a dataset are completed from the newest rows of its `generations`, given
    oldest first.

    With `by_offset` positions are offsets; else rows of snapshots have positions below streamed
    changes. Incomplete changes are listed in the stats of their file if `set_aside`, else they
    raise BadChangeError.

    `again` is for a rewind, which applies changes that the generations may have already:
    - Only changes that are not superseded must be complete.
    - By offset, positions are raised to at least those of the stored rows of their keys, so that an
      earlier change wins where a later one makes no entry any more.
    - Else changes of a key are late where no row of it is stored and the newest of them is not
      above the `horizon`: a tombstone that was dropped might win against them. Where columns are
      merged, the stored row has to be known whole, and only the newest change of the whole row
      counts. Late changes are left out. They are counted in the stats, and if `set_aside` listed
      there like incomplete ones, except where nothing is lost, as the key is not stored: deletions,
      and the changes of the key before them.

    By the rule `ties` (None: there can be none), changes of which nothing says which one is newer
    are set aside, too, or raise KeyOrderError.

    Where the layout has SET_AT, nothing is incomplete: changes are merged by column, or by these
    `groups` of columns, in any order. Changes that set none of the groups are left out, and
    counted.
    """

    input_columns: ClassVar[tuple[str, ...]] = (KEPT, OFFSET, PARTITION)
    """The columns that the rows to complete have in addition to the layout's."""

    dataset: str
    layout: BucketLayout
    generations: tuple[Generation, ...]
    by_offset: bool
    set_aside: bool
    again: bool = False
    horizon: int | None = None
    ties: TieRule | None = None
    groups: ColumnGroups = ()

    @property
    def identity(self) -> tuple[str, ...]:
        """The key columns without the time: with a history, all rows of an entry over time have the
        same.
        """
        key = self.layout.key
        return key[:-1] if key[-1] == VALID_FROM else key

    @property
    def merges_columns(self) -> bool:
        """Whether changes are merged by column."""
        return SET_AT in self.layout.columns

    def of_bucket(self, store: ObjectStore, bucket: int) -> BucketCompletion:
        """Return the completion of one bucket's rows."""
        return BucketCompletion(self, store, bucket)


class SetAsideChange(NamedTuple):
    """A change that can't be applied, and why."""

    partition: int
    offset: int
    reason: str


class _Changes(NamedTuple):
    """Changes ordered by key, and a mask of those that are the first of their key."""

    rows: pa.Table
    is_first: Any


class _StoredOfKeys(NamedTuple):
    """The stored rows of keys. `newest` has the index in `rows` of each key's newest row, -1 if
    there is none or it is a deletion; `highest` has the position of that, the lowest integer if
    there is none.
    """

    newest: Any
    highest: Any
    rows: pa.Table


class _HighestStored(NamedTuple):
    """The highest position of the stored rows of each key, and a mask of the keys that have one."""

    highest: Any
    is_stored: Any


class _Completed(NamedTuple):
    """Completed rows, and a mask of those that can be applied."""

    rows: pa.Table
    is_applicable: Any


class BucketCompletion:
    """Completes the changes of one bucket batch by batch, and leaves out incomplete ones.

    They come ordered by key and position. `store` is None if there are no stored rows.
    """

    def __init__(self, declared: RowCompletion, store: ObjectStore | None, bucket: int) -> None:
        self._declared = declared
        self._bucket = bucket
        self._stored = StoredRows(
            store, declared.dataset, declared.layout, declared.generations, bucket
        )
        self._layout = declared.layout
        self._key = list(declared.layout.key)
        self._over_time = self._key[-1] == VALID_FROM
        self._waiting: list[pa.Table] = []
        self._set_aside: list[SetAsideChange] = []
        self._late = 0
        self._merged: Counter[str] = Counter()

    def stats(self) -> dict[str, Any]:
        """Return what was not applied as it was: the changes that were set aside ("incomplete"),
        the number of `late` ones, that of those `of_others`, who own the columns that they set, and
        the numbers of a `Merged` where columns are merged. What is empty or 0 is left out.
        """
        stats = {"incomplete": self._set_aside, "late": self._late, **self._merged}
        return {name: value for name, value in stats.items() if value}

    def take(self, batch: pa.Table) -> pa.Table:
        """Buffer a batch. Once many rows are buffered, return the completed rows of all keys but
        the last one, which the next batch may continue; until then, no rows.
        """
        self._waiting.append(batch)
        # Many rows at once, so that stored files are read less often.
        if sum(rows.num_rows for rows in self._waiting) < ROWS_PER_GROUP:
            return self._with_merged_columns(batch.slice(0, 0)).drop_columns([KEPT])
        rows = pa.concat_tables(self._waiting)
        is_first = np.append(True, key_changes(rows, self._declared.identity))
        start_of_last_key = int(np.flatnonzero(is_first)[-1])
        self._waiting = [rows.slice(start_of_last_key)]
        return self._complete(rows.slice(0, start_of_last_key))

    def rest(self) -> pa.Table | None:
        """Return the rows that are still buffered, completed; None without any."""
        if not self._waiting:
            return None
        rows = pa.concat_tables(self._waiting)
        self._waiting = []
        return self._complete(rows)

    def _complete(self, rows: pa.Table) -> pa.Table:
        """Return the completed rows, without changes that can't be applied, and without KEPT."""
        merges = self._declared.merges_columns
        rule = self._declared.ties
        changes = self._mark_first(rows)
        if rule is not None and rows.num_rows and not merges:  # merges find their own ties
            changes = self._leave_out_tied(changes, rule)
        if self._declared.again and changes.rows.num_rows:
            if self._declared.by_offset:
                changes = self._raise_positions(changes)
            elif self._declared.horizon is not None:  # else none is late
                changes = self._leave_out_late(changes, self._declared.horizon)
        rows = changes.rows
        if merges:
            return self._merge_columns(rows)
        if KEPT not in rows.column_names:
            return rows
        deleted = rows.column(TOMBSTONE).to_numpy()
        names = [*self._layout.schema.names, UNDECIDED]
        # By change and column, whether it leaves out the column; a deletion leaves out none.
        kept = kept_matrix(rows.column(KEPT), names) & ~deleted[:, None]
        rows = rows.drop_columns([KEPT])
        if not kept.any():
            return rows
        key = np.cumsum(changes.is_first) - 1
        # In stream order, by offset: positions of snapshot rows are below all streamed changes.
        stream_order = np.lexsort((rows.column(OFFSET).to_numpy(), key))
        back = np.argsort(stream_order)
        done = self._complete_in_order(
            rows.take(stream_order),
            key,
            np.flatnonzero(changes.is_first),
            deleted[stream_order],
            kept[stream_order],
        )
        return done.rows.take(back[done.is_applicable[back]])

    def _mark_first(self, rows: pa.Table) -> _Changes:
        """Return the rows with the mask of the first row of each key."""
        is_first = np.append(True, key_changes(rows, self._key))[: rows.num_rows]
        return _Changes(rows, is_first)

    def _leave_out_tied(self, given: _Changes, rule: TieRule) -> _Changes:
        """Return the changes without those that are tied with others or with stored rows. Raises
        KeyOrderError unless these are set aside.
        """
        rows = given.rows
        groups = group_changes(rows, given.is_first, rule)
        stored = self._newest_stored(rows, np.flatnonzero(given.is_first), groups, rule)
        # Ties are possible in groups that are of several partitions, or whose key is stored.
        has_stored = np.isin(groups.keys, np.fromiter(stored, np.int64, len(stored)))
        may_be_tied = groups.deciding & (groups.scattered | has_stored)
        tied: list[int] = []
        for group in np.flatnonzero(may_be_tied).tolist():
            numbers = np.arange(groups.starts[group], groups.ends[group])
            changes = python_rows(rows.take(numbers))
            newest = stored.get(int(groups.keys[group]))
            if newest is not None and rule.is_newer(newest, changes[0]):  # they are ignored
                continue
            partner = None
            if newest is not None and rule.ties(newest, changes[0]):
                partner = newest
            ties = resolve_group(map(NumberedChange, numbers.tolist(), changes), partner, rule)
            self._report_ties(ties, rule)
            tied += [tie.row for tie in ties]
        if not tied:
            return given
        stays = np.ones(rows.num_rows, bool)
        stays[tied] = False
        return self._mark_first(rows.filter(pa.array(stays)))

    def _report_ties(self, ties: Sequence[Tie], rule: TieRule) -> None:
        """List these changes as set aside, or raise KeyOrderError for the first."""
        for tie in ties:
            if not self._declared.set_aside:
                raise tie.error(rule)
            change = tie.change
            self._set_aside.append(
                SetAsideChange(change[PARTITION], change[OFFSET], tie.reason(rule))
            )

    def _newest_stored(
        self, rows: pa.Table, first: Any, groups: TieGroups, rule: TieRule
    ) -> dict[int, dict[str, Any]]:
        """Return, by the number of the key, the newest stored row of keys whose changes may be tied
        with it. Keys without a stored row are left out.

        `first` has the index of the first row of each key. Only files with positions, or times, as
        high as those of the changes are read.
        """
        lowest_of_key = rows.take(groups.starts[groups.deciding])
        numbers = groups.keys[groups.deciding]
        values = rule.ranged_values(lowest_of_key)
        generations = []
        files_read: list[BucketFile] = []
        for generation in self._declared.generations:
            files = rule.files_within(generation, self._bucket, values.min())
            if files:
                generations.append(replace(generation, files=files))
                files_read += files
        if not generations:
            return {}
        highest = max(map(rule.highest_of, files_read))
        asked = np.unique(numbers[values <= highest])
        columns = [(field.name, arrow_type(field.type)) for field in self._layout.schema.fields]
        schema = pa.schema([*columns, (PARTITION, pa.int32())])
        newest: dict[int, dict[str, Any]] = {}
        keys = rows.select(self._key).take(first)
        for found in self._stored.iterate(
            keys, asked, schema, positions=True, generations=generations
        ):
            for number, row in zip(found.keys.tolist(), python_rows(found.rows), strict=True):
                before = newest.get(number)  # of a newer generation, which wins if they are equal
                if before is None or row[POSITION] > before[POSITION]:
                    newest[number] = row
        return newest

    def _raise_positions(self, given: _Changes) -> _Changes:
        """Return the changes of a rewind, at positions of at least those of the stored rows of
        their keys.

        Where the newest change of a key makes no entry any more, an earlier one replaces the stored
        row; at its own position it would lose against it.
        """
        rows, is_first = given
        key = np.cumsum(is_first) - 1
        stored = self._find_highest_stored(given)
        position = rows.column(POSITION).to_numpy()
        raised = np.where(
            stored.is_stored[key], np.maximum(position, stored.highest[key]), position
        )
        return _Changes(set_column(rows, POSITION, pa.array(raised)), is_first)

    def _leave_out_late(self, given: _Changes, horizon: int) -> _Changes:
        """Return the changes of a rewind without late ones (see `RowCompletion`), which are counted
        and perhaps set aside.
        """
        rows, is_first = given
        key = np.cumsum(is_first) - 1
        first = np.flatnonzero(is_first)
        position = rows.column(POSITION).to_numpy()
        deleted = rows.column(TOMBSTONE).to_numpy()
        is_missing = ~self._find_highest_stored(given).is_stored
        if self._declared.merges_columns:
            # Changes above the horizon decide only if they set all columns.
            is_whole = deleted | (_count_kept(rows) == 0)
            decided = np.logical_or.reduceat(is_whole & (position > horizon), first)
            late = (is_missing & ~decided)[key] & (position <= horizon)
        else:
            last = np.append(first[1:], len(is_first)) - 1
            late = (is_missing & (position[last] <= horizon))[key]
        # A deletion, and what it supersedes, is no loss: the key is not stored.
        row = np.arange(len(key))
        last_deletion = np.maximum.reduceat(np.where(deleted, row, -1), first)
        counted = late & (row > last_deletion[key])
        self._late += int(counted.sum())
        if self._declared.set_aside:
            reason = late_change_reason(horizon)
            for change in rows.select([PARTITION, OFFSET]).filter(counted).to_pylist():
                self._set_aside.append(SetAsideChange(change[PARTITION], change[OFFSET], reason))
        return self._mark_first(rows.filter(~late))

    def _find_highest_stored(self, given: _Changes) -> _HighestStored:
        """Return the highest position of the stored rows of each key.

        Where columns are merged, only rows that are known whole count.
        """
        first = np.flatnonzero(given.is_first)
        keys = given.rows.select(self._key).take(first)
        highest = np.zeros(len(first), np.int64)
        is_stored = np.zeros(len(first), bool)
        merges = self._declared.merges_columns
        columns = [(SET_AT, pa.string())] if merges else []
        for found in self._stored.iterate(
            keys, np.arange(len(first)), pa.schema(columns), positions=True
        ):
            if merges:
                is_known = ~lacks_whole_row(found.rows.column(SET_AT))
            else:
                is_known = np.ones(len(found.keys), bool)
            known_keys = found.keys[is_known]
            position = found.rows.column(POSITION).to_numpy()[is_known]
            is_higher = ~is_stored[known_keys] | (position > highest[known_keys])
            highest[known_keys[is_higher]] = position[is_higher]
            is_stored[known_keys] = True
        return _HighestStored(highest, is_stored)

    def _complete_in_order(
        self, rows: pa.Table, key: Any, first: Any, deleted: Any, kept: Any
    ) -> _Completed:
        """Complete the rows, which are in stream order within each key.

        For each row, `key` is the number of its key, `deleted` whether it is a deletion, and `kept`
        which columns it leaves out; the last column of `kept` says whether it is UNDECIDED. `first`
        has the index of the first row of each key.
        """
        row = np.arange(len(key))
        is_partial = kept.any(axis=1)
        position = rows.column(POSITION).to_numpy()
        names = self._layout.schema.names
        begins = first[key]
        columns = np.flatnonzero(kept[:, :-1].any(axis=0)).tolist()
        stored = self._read_stored(
            rows, key, first, is_partial, [names[index] for index in columns]
        )
        # A change at a position below the stored row of its key is late.
        below = position < stored.highest[key]
        follows = _stream_order(position) >= _stream_order(stored.highest)[key]
        late = below
        while True:  # one pass, unless snapshot rows are among streamed changes
            # Whether there is a row before this one: by the last whole row or deletion, or by the
            # stored rows.
            before = _last_marked_before(~is_partial & ~late)
            follows_stored = (stored.newest[key] >= 0) & follows
            has_row_before = np.where(before >= begins, ~deleted[before], follows_stored)
            incomplete = is_partial & ~late & ~has_row_before
            # A snapshot row after a streamed change of its key is late, too.
            streamed = _last_marked_before((position >= 0) & ~late & ~incomplete) >= begins
            late_now = below | ((position < 0) & streamed)
            if (late_now == late).all():
                break
            late = late_now
        completed = dict(zip(rows.column_names, rows.columns, strict=True))
        for index in columns:
            name = names[index]
            column = completed[name]
            known = _last_marked(~kept[:, index] & ~late)
            # The stored values follow those of the rows.
            source = np.where(known >= begins, known, len(row) + stored.newest[key])
            stored_values = stored.rows.column(name).cast(column.type)
            both = pa.chunked_array([*column.chunks, *stored_values.chunks], column.type)
            completed[name] = both.take(pa.array(np.where(incomplete | late, row, source)))
        if incomplete.any():
            reported = incomplete
            if self._declared.again:  # only those after the last whole row or deletion of their key
                last = np.append(first[1:], len(row)) - 1
                reported = incomplete & (_last_marked(~is_partial)[last][key] < row)
            # An UNDECIDED row that is incomplete needs no other columns: it is not reported.
            self._report_incomplete(reported & ~kept[:, -1], rows, kept[:, :-1])
        return _Completed(pa.table(completed), ~incomplete)

    def _report_incomplete(self, is_incomplete: Any, rows: pa.Table, kept: Any) -> None:
        """Record these changes of `rows` as incomplete, or raise BadChangeError for the first.
        `kept` says which columns each leaves out.
        """
        names = np.array(self._layout.schema.names, object)
        for row in np.flatnonzero(is_incomplete).tolist():
            offset, partition = (rows.column(name)[row].as_py() for name in (OFFSET, PARTITION))
            missing = ", ".join(map(repr, names[kept[row]].tolist()))
            reason = (
                f"it leaves out {missing}, and the dataset has no row of its key to take the value"
                " from"
            )
            if not self._declared.set_aside:
                raise bad_change_error(self._declared.dataset, offset, partition, reason)
            self._set_aside.append(SetAsideChange(partition, offset, reason))

    # -- by column

    def _with_merged_columns(self, rows: pa.Table) -> pa.Table:
        """Return the rows with all columns that merged ones have, and KEPT."""
        if KEPT not in rows.column_names:
            rows = rows.append_column(KEPT, pa.nulls(rows.num_rows, pa.list_(pa.string())))
        if self._declared.merges_columns and SET_AT not in rows.column_names:
            rows = rows.append_column(SET_AT, pa.nulls(rows.num_rows, pa.string()))
        return rows

    def _merge_columns(self, changes: pa.Table) -> pa.Table:
        """Return the rows that merging the changes with the stored rows has made or changed.

        Raises KeyOrderError for ties unless these are set aside; then the other changes are merged.
        """
        changes = self._leave_out_others(self._with_merged_columns(changes))
        if not changes.num_rows:
            return changes.drop_columns([KEPT])
        rows = self._sort_with_stored(changes)
        merge: ColumnMerge | GroupMerge
        if self._declared.groups:
            merge = GroupMerge(rows, self._layout, self._declared.groups)
        else:
            merge = ColumnMerge(rows, self._layout)
        rule = self._declared.ties
        if rule is not None:
            ties = merge.find_ties(by_offset=rule.order_by is None)
            self._report_ties(ties, rule)
            if ties:
                is_untied_change = rows.is_new.copy()
                is_untied_change[[tie.row for tie in ties]] = False
                return self._merge_columns(rows.rows.filter(pa.array(is_untied_change)))
        merged = merge.merge()
        self._merged.update(superseded=merged.superseded, carried=merged.carried, held=merged.held)
        return merged.rows.select([name for name in changes.column_names if name != KEPT])

    def _leave_out_others(self, changes: pa.Table) -> pa.Table:
        """Return the changes without those that set none of the groups, which are counted."""
        groups = self._declared.groups
        if not groups:
            return changes
        is_others = reduce(pc.and_, (changes.column(order).is_null() for order, _ in groups))
        kept = changes.filter(pc.invert(is_others))
        self._merged["of_others"] += changes.num_rows - kept.num_rows
        return kept

    def _sort_with_stored(self, changes: pa.Table) -> SortedRows:
        """Return the changes together with the stored rows of their keys that they may depend on,
        ordered by key and time; the stored rows of a key and time come first.
        """
        identity = self._declared.identity
        is_first = np.append(True, key_changes(changes, identity))
        number = np.cumsum(is_first) - 1
        first = np.flatnonzero(is_first)
        asked = self._find_dependent_keys(changes, number)
        types = self._layout.types
        names = [name for name in changes.column_names if name in types]
        schema = pa.schema([(name, arrow_type(types[name])) for name in names if name not in _READ])
        shape = pa.schema([changes.schema.field(name) for name in names])
        stored = []
        numbers = []
        for found in self._stored.iterate(
            changes.select(identity).take(first), asked, schema, positions=True
        ):
            stored.append(found.rows.select(names).cast(shape))
            numbers.append(found.keys)
        # Of equal positions, that of the newer generation counts.
        tables = [*reversed(stored), changes]
        numbers = [*reversed(numbers), number]
        rows = pa.concat_tables(tables, promote_options="default").select(changes.column_names)
        is_new = np.arange(rows.num_rows) >= rows.num_rows - changes.num_rows
        key = np.concatenate(numbers)
        order = np.lexsort((self._times(rows), key))
        rows = rows.take(order)
        begins = np.append(True, np.diff(key[order]) > 0)
        starts = np.flatnonzero(begins | np.append(True, np.diff(self._times(rows)) != 0))
        return SortedRows(rows, starts, begins[starts], is_new[order])

    def _times(self, rows: pa.Table) -> Any:
        """Return the times since when rows are valid, in microseconds; 0 without a history."""
        if not self._over_time:
            return np.zeros(rows.num_rows, np.int64)
        return rows.column(VALID_FROM).cast("int64").to_numpy()

    def _find_dependent_keys(self, changes: pa.Table, number: Any) -> Any:
        """Return the numbers of keys whose stored rows matter: a change leaves out columns, or may
        be older than a stored row. `number` has the number of each change's key.
        """
        highest = self._highest_stored()
        if highest is None:
            return np.zeros(0, np.int64)
        is_partial = pa.array(_count_kept(changes) > 0)
        if self._over_time:
            values = changes.column(VALID_FROM).cast("int64")
        else:
            values = changes.column(POSITION)
        is_older = pc.less_equal(values, highest)
        return np.unique(number[pc.or_(is_partial, is_older).to_numpy()])

    def _highest_stored(self) -> Any:
        """Return the highest position, or with history time, of the stored rows of the bucket; None
        without rows.
        """
        name = "range" if self._over_time else "positions"
        found = []
        for generation in self._declared.generations:
            for file in generation.files:
                if file.bucket == self._bucket:
                    found.append(file.stats[name][1])
        return max(found, default=None)

    # -- stored rows

    def _read_stored(
        self, rows: pa.Table, key: Any, first: Any, is_partial: Any, columns: Sequence[str]
    ) -> _StoredOfKeys:
        """Return the stored rows, with these columns, of the keys whose changes leave out columns.

        `is_partial` says which rows leave out columns; `key` and `first` are as in
        `_complete_in_order`.
        """
        types = {}
        for field in self._layout.schema.fields:
            if field.name in columns:
                types[field.name] = arrow_type(field.type)
        schema = pa.schema(list(types.items()))
        newest = np.full(len(first), -1)
        highest = np.full(len(first), np.iinfo(np.int64).min)
        tables = [schema.empty_table()]
        count = 0
        # By offset, a key whose first change is a whole row or a deletion needs no stored row.
        by_offset = self._declared.by_offset
        asked = np.flatnonzero(is_partial[first]) if by_offset else np.unique(key[is_partial])
        keys = rows.select(self._key).take(first)
        for found in self._stored.iterate(keys, asked, schema, positions=not by_offset):
            position = found.rows.column(POSITION).to_numpy()
            is_deleted = found.rows.column(TOMBSTONE).to_numpy()
            index = np.where(is_deleted, -1, np.arange(count, count + len(position)))
            # At equal positions, the newer generation wins, which was read before.
            is_newer = position > highest[found.keys]
            newer_keys = found.keys[is_newer]
            newest[newer_keys] = index[is_newer]
            highest[newer_keys] = position[is_newer]
            tables.append(found.rows.select(schema.names))
            count += len(position)
        return _StoredOfKeys(newest, highest, pa.concat_tables(tables))


def _count_kept(rows: pa.Table) -> Any:
    """Return how many columns each change leaves out."""
    if KEPT not in rows.column_names:
        return np.zeros(rows.num_rows, np.int64)
    return pc.fill_null(pc.list_value_length(rows.column(KEPT)), 0).to_numpy()


def _stream_order(position: Any) -> Any:
    """Return numbers that sort rows by their offset; rows of a bulk snapshot come first.

    Rows of a snapshot in the stream have SNAPSHOT_ROWS, a negative number, added to their
    positions, which is undone here.
    """
    return np.where(position < SNAPSHOT_ROWS // 2, position - SNAPSHOT_ROWS, position)


def _last_marked_before(marked: Any) -> Any:
    """Return for each row the index of the last marked row before it, or -1."""
    return np.append(-1, _last_marked(marked)[:-1])


def _last_marked(marked: Any) -> Any:
    """Return for each row the index of the last marked row up to and including it, or -1."""
    return np.maximum.accumulate(np.where(marked, np.arange(len(marked)), -1))


def complete_frame(rows: DataFrame, declared: RowCompletion) -> DataFrame:
    """Return the rows, each completed from the earlier ones of its key, without KEPT.

    The rows are ordered within partitions, and all rows of a key are in one partition.
    """
    names = rows.columns
    remaining = [name for name in names if name != KEPT]
    columns = [(name, type_from_spark(rows.schema[name].dataType)) for name in remaining]
    return convert_in_tasks(
        rows, partial(_complete_batches, names=names, declared=declared), columns
    )


def _complete_batches(
    batches: Iterator[pa.RecordBatch], names: Sequence[str], declared: RowCompletion
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a partition, completed; `names` are those of their columns."""
    completing = BucketCompletion(declared, None, 0)
    for batch in batches:
        if batch.num_rows:
            rows = pa.Table.from_batches([batch]).rename_columns(names)
            yield from _number_columns(completing.take(rows))
    rest = completing.rest()
    if rest is not None:
        yield from _number_columns(rest)


def _number_columns(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield the rows under the names c0, c1, …, as tasks return them."""
    yield from rows.rename_columns(names_by_position(rows.column_names)).to_batches()
