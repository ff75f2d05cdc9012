"""Completes changes that leave out columns, from the changes before them and from stored rows.

The rows of one bucket are ordered by key and position:

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from dagster_adjunct.assets.declaration.change_formats import KEPT, kept_matrix
from dagster_adjunct.assets.declaration.change_values import SNAPSHOT_ROWS
from dagster_adjunct.assets.reading.stored_file import StoredFile, column_paths
from dagster_adjunct.assets.reading.superseded import key_codes
from dagster_adjunct.assets.sources.changes import bad_change_error, late_change_reason
from dagster_adjunct.assets.unbounded.tied_changes import (
    Tie,
    TieGroups,
    TieRule,
    group_changes,
    resolve_group,
)
from dagster_adjunct.assets.versions.version import POSITION
from dagster_adjunct.resources.bucketing.files import (
    BucketLayout,
    Generation,
    conform_to_layout,
    key_changes,
    unpack_footer,
)
from dagster_adjunct.resources.bucketing.writer import ROWS_PER_GROUP
from dagster_adjunct.resources.lazy_modules import np, pa, pc, pq
from dagster_adjunct.resources.objects.arrow_files import open_object
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.types import arrow_type, type_from_spark
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.spark.tasks import convert_in_tasks
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class RowCompletion:
    """How the changes of a dataset are completed from the newest rows of its `generations`, given
    oldest first.

    With `by_offset` positions are offsets; else rows of snapshots have positions below streamed
    changes. Incomplete changes are listed in the stats of their file if `set_aside`, else they
    raise BadChangeError.

    With `again`, for a rewind, the generations hold the changes already, and only changes that are
    not superseded must be complete. By offset, positions are raised to at least those of the stored
    rows of their keys. Else changes of a key are late where no row of it is stored and the newest
    of them is not above the `horizon`: a tombstone that was dropped might win against them. Late
    changes are left out. They are counted in the stats, and if `set_aside` listed there like
    incomplete ones, unless the newest change of the key is a deletion.

    By the rule `ties`, changes of which nothing says which one is newer are set aside, too, or
    raise KeyOrderError.
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

    def of_bucket(self, store: ObjectStore, bucket: int) -> BucketCompletion:
        """Return the completion of one bucket's rows."""
        return BucketCompletion(self, store, bucket)


class BucketCompletion:
    """Completes the ordered changes of one bucket batch by batch, and leaves out incomplete
    ones.
    """

    def __init__(self, declared: RowCompletion, store: ObjectStore | None, bucket: int) -> None:
        self._declared = declared
        self._store = store
        self._bucket = bucket
        self._layout = declared.layout
        self._key = list(declared.layout.key)
        self._waiting: list[pa.Table] = []
        self._set_aside: list[tuple[int, int, str]] = []  # partition, offset and reason
        self._late = 0

    def stats(self) -> dict[str, Any]:
        """Return the incomplete changes as (partition, offset, reason), and the number of late
        ones, if any.
        """
        stats = {"incomplete": self._set_aside, "late": self._late}
        found = {}
        for name, value in stats.items():
            if value:
                found[name] = value
        return found

    def take(self, batch: pa.Table) -> pa.Table:
        """Buffer a batch; return completed rows, if many are buffered.

        These are the rows of all keys but the last one, which the next batch may continue.
        """
        self._waiting.append(batch)
        # one read of stored rows for so many
        if sum(rows.num_rows for rows in self._waiting) < ROWS_PER_GROUP:
            names = [name for name in batch.column_names if name != KEPT]
            return batch.slice(0, 0).select(names)
        rows = pa.concat_tables(self._waiting)
        new = np.append(True, key_changes(rows, self._key))
        last = int(np.flatnonzero(new)[-1])
        self._waiting = [rows.slice(last)]
        return self._complete(rows.slice(0, last), new[:last])

    def rest(self) -> pa.Table | None:
        """Return the rows that are still buffered, completed; None without any."""
        if not self._waiting:
            return None
        rows = pa.concat_tables(self._waiting)
        self._waiting = []
        return self._complete(rows, np.append(True, key_changes(rows, self._key)))

    def _complete(self, rows: pa.Table, new: Any) -> pa.Table:
        """Return the completed rows; the mask `new` is true for the first row of each key."""
        if self._declared.ties is not None and rows.num_rows:
            rows, new = self._leave_out_tied(rows, new, self._declared.ties)
        if self._declared.again:
            rows, new = self._place(rows, new)
        if KEPT not in rows.column_names:
            return rows
        deleted = rows.column(TOMBSTONE).to_numpy()
        kept = kept_matrix(rows.column(KEPT), self._layout.schema.names) & ~deleted[:, None]
        rows = rows.drop_columns([KEPT])
        if not kept.any():
            return rows
        key = np.cumsum(new) - 1
        # By offset: rows of snapshots, wherever in the stream, have positions below all streamed
        # changes.
        places = np.lexsort((rows.column(OFFSET).to_numpy(), key))
        back = np.argsort(places)
        done, stays = self._complete_in_order(
            rows.take(places), key, np.flatnonzero(new), deleted[places], kept[places]
        )
        return done.take(back[stays[back]])

    def _leave_out_tied(self, rows: pa.Table, new: Any, rule: TieRule) -> tuple[pa.Table, Any]:
        """Return the rows without changes that are tied with others or with stored rows, and their
        `new`. Raises KeyOrderError unless these are set aside.
        """
        groups = group_changes(rows, new, rule)
        stored = self._newest_stored(rows, np.flatnonzero(new), groups, rule)
        scattered = np.flatnonzero(groups.scattered & groups.deciding)
        known = np.isin(groups.keys, np.fromiter(stored, np.int64, len(stored)))
        tied: list[int] = []
        for at in np.union1d(scattered, np.flatnonzero(known & groups.deciding)).tolist():
            numbers = np.arange(groups.starts[at], groups.ends[at])
            changes = python_rows(rows.take(numbers))
            newest = stored.get(int(groups.keys[at]))
            if newest is not None and rule.is_newer(newest, changes[0]):
                continue
            partner = None
            if newest is not None and rule.ties(newest, changes[0]):
                partner = newest
            found = resolve_group(list(zip(numbers.tolist(), changes, strict=True)), partner, rule)
            self._report_ties(found, rule)
            tied += [tie.row for tie in found]
        if not tied:
            return rows, new
        left = np.ones(rows.num_rows, bool)
        left[tied] = False
        rows = rows.filter(pa.array(left))
        starts = np.append(True, key_changes(rows, self._key)) if rows.num_rows else new[:0]
        return rows, starts

    def _report_ties(self, ties: Sequence[Tie], rule: TieRule) -> None:
        """List these changes as set aside, or raise KeyOrderError for the first."""
        for tie in ties:
            if not self._declared.set_aside:
                raise tie.error(rule)
            self._set_aside.append((tie.change[PARTITION], tie.change[OFFSET], tie.reason(rule)))

    def _newest_stored(
        self, rows: pa.Table, first: Any, groups: TieGroups, rule: TieRule
    ) -> dict[int, dict[str, Any]]:
        """Return the newest stored rows of the keys, by their numbers, that changes may be tied
        with: only files with positions or times as high as those of the changes are read.
        """
        lowest_of_key = rows.take(groups.starts[groups.deciding])
        numbers = groups.keys[groups.deciding]
        values = rule.ranged_values(lowest_of_key)
        generations = tuple(
            replace(generation, files=files)
            for generation in self._declared.generations
            if (files := rule.files_within(generation, self._bucket, values.min()))
        )
        if not generations:
            return {}
        highest = max(rule.highest_of(file) for each in generations for file in each.files)
        asked = np.unique(numbers[values <= highest])
        schema = pa.schema(
            [(field.name, arrow_type(field.type)) for field in self._layout.schema.fields]
            + [(PARTITION, pa.int32())]
        )
        newest: dict[int, dict[str, Any]] = {}
        keys = rows.select(self._key).take(first)
        for of, found in self._iterate_stored(
            keys, asked, schema, positions=True, generations=generations
        ):
            for number, row in zip(of.tolist(), python_rows(found), strict=True):
                before = newest.get(number)  # of a newer generation, which wins if they are equal
                if before is None or row[POSITION] > before[POSITION]:
                    newest[number] = row
        return newest

    def _place(self, rows: pa.Table, new: Any) -> tuple[pa.Table, Any]:
        """Return the changes of a rewind, by offset with raised positions, else without late
        ones; and their `new`.
        """
        by_offset = self._declared.by_offset
        horizon = self._declared.horizon
        if not len(new) or not (by_offset or horizon is not None):
            return rows, new
        key = np.cumsum(new) - 1
        first = np.flatnonzero(new)
        lowest = np.iinfo(np.int64).min
        highest = np.full(len(first), lowest)
        position = rows.column(POSITION).to_numpy()
        keys = rows.select(self._key).take(first)
        for of, found in self._iterate_stored(
            keys, np.arange(len(first)), pa.schema([]), positions=True
        ):
            highest[of] = np.maximum(highest[of], found.column(POSITION).to_numpy())
        if by_offset:
            raised = pa.array(np.maximum(position, highest[key]))
            return rows.set_column(rows.column_names.index(POSITION), POSITION, raised), new
        assert horizon is not None
        last = np.append(first[1:], len(new)) - 1
        late = ((highest == lowest) & (position[last] <= horizon))[key]
        counted = late & ~rows.column(TOMBSTONE).to_numpy()[last][key]
        self._late += int(counted.sum())
        if self._declared.set_aside:
            places = (rows.column(name).filter(counted).to_pylist() for name in (PARTITION, OFFSET))
            self._set_aside += [
                (*place, late_change_reason(horizon)) for place in zip(*places, strict=True)
            ]
        return rows.filter(~late), new[~late]

    def _complete_in_order(
        self, rows: pa.Table, key: Any, first: Any, deleted: Any, kept: Any
    ) -> tuple[pa.Table, Any]:
        """Complete the rows, which are in stream order by key; also return the mask of those
        that can be applied.
        """
        row = np.arange(len(key))
        some = kept.any(axis=1)
        position = rows.column(POSITION).to_numpy()
        names = self._layout.schema.names
        begins = first[key]
        columns = np.flatnonzero(kept.any(axis=0)).tolist()
        stored, lowest, values = self._read_stored(
            rows, key, first, some, [names[index] for index in columns]
        )
        below = position < lowest[key]
        follows = _stream_order(position) >= _stream_order(lowest)[key]
        late = below
        while True:  # one pass, unless snapshot rows are among streamed changes
            # Whether there is a row before this one: by the last whole row or deletion, or by the
            # stored rows.
            before = _last_marked_before(~some & ~late)
            there = np.where(before >= begins, ~deleted[before], (stored[key] >= 0) & follows)
            incomplete = some & ~late & ~there
            streamed = _last_marked_before((position >= 0) & ~late & ~incomplete) >= begins
            found = below | ((position < 0) & streamed)
            if (found == late).all():
                break
            late = found
        completed = dict(zip(rows.column_names, rows.columns, strict=True))
        for index in columns:
            column = completed[name := names[index]]
            known = _last_marked(~kept[:, index] & ~late)
            source = np.where(known >= begins, known, len(row) + stored[key])
            both = pa.chunked_array(
                [*column.chunks, *values.column(name).cast(column.type).chunks], column.type
            )
            completed[name] = both.take(pa.array(np.where(incomplete | late, row, source)))
        if incomplete.any():
            if self._declared.again:  # only those after the last whole row or deletion of their key
                last = np.append(first[1:], len(row)) - 1
                incomplete_now = incomplete & (_last_marked(~some)[last][key] < row)
            else:
                incomplete_now = incomplete
            self._report_incomplete(incomplete_now, rows, kept)
        return pa.table(completed), ~incomplete

    def _report_incomplete(self, rows: Any, places: pa.Table, kept: Any) -> None:
        """Record these changes as incomplete, or raise BadChangeError for the first."""
        names = np.array(self._layout.schema.names, object)
        for row in np.flatnonzero(rows).tolist():
            offset, partition = (places.column(name)[row].as_py() for name in (OFFSET, PARTITION))
            missing = ", ".join(map(repr, names[kept[row]].tolist()))
            reason = (
                f"it leaves out {missing}, and the dataset has no row of its key to take the value"
                " from"
            )
            if not self._declared.set_aside:
                raise bad_change_error(self._declared.dataset, offset, partition, reason)
            self._set_aside.append((partition, offset, reason))

    # -- stored rows

    def _read_stored(
        self, rows: pa.Table, key: Any, first: Any, some: Any, columns: Sequence[str]
    ) -> tuple[Any, Any, pa.Table]:
        """Return the stored rows of the keys whose changes leave out columns.

        Returns two arrays with a value for each key, the index of its row in the table (-1: no row)
        and its highest position, deletions included; then the table, with these columns.
        """
        types = {}
        for field in self._layout.schema.fields:
            if field.name in columns:
                types[field.name] = arrow_type(field.type)
        schema = pa.schema(list(types.items()))
        stored = np.full(len(first), -1)
        highest = np.full(len(first), np.iinfo(np.int64).min)
        tables = [schema.empty_table()]
        count = 0
        # By offset, a key whose first change is a whole row or a deletion needs no stored row.
        asked = np.flatnonzero(some[first]) if self._declared.by_offset else np.unique(key[some])
        keys = rows.select(self._key).take(first)
        by_offset = self._declared.by_offset
        for of, found in self._iterate_stored(keys, asked, schema, positions=not by_offset):
            position = found.column(POSITION).to_numpy()
            # at equal positions, the newer generation wins, which was read before
            newer = position > highest[of]
            at = np.where(found.column(TOMBSTONE).to_numpy(), -1, np.arange(count, count + len(of)))
            stored[of[newer]] = at[newer]
            highest[of[newer]] = position[newer]
            tables.append(found.select(schema.names))
            count += len(of)
        return stored, highest, pa.concat_tables(tables)

    def _iterate_stored(
        self,
        keys: pa.Table,
        asked: Any,
        schema: pa.Schema,
        *,
        positions: bool,
        generations: Sequence[Generation] | None = None,
    ) -> Iterator[tuple[Any, pa.Table]]:
        """Yield for each file, newest generation first, which of the `asked` keys (indices) it has,
        and their rows.

        Without `positions`, a key's row is yielded only from the newest generation that has it.
        `generations` are those to read, by default all.
        """
        for generation in reversed(
            self._declared.generations if generations is None else generations
        ):
            for file in generation.files:
                if file.bucket != self._bucket or not len(asked):
                    continue
                assert self._store is not None, "there are generations in a store only"
                what = f"dataset {self._declared.dataset!r}"
                opened = StoredFile(self._store, what, generation, file)
                find = partial(
                    self._find_in_file, opened, keys.take(asked), schema, positions=positions
                )
                places, found = opened.reading(find)
                yield asked[places], found
                if not positions:
                    asked = np.delete(asked, places)

    def _find_in_file(
        self, stored: StoredFile, keys: pa.Table, schema: pa.Schema, *, positions: bool
    ) -> tuple[Any, pa.Table]:
        """Return the indices of the keys that a file has, and their rows: these columns,
        position and tombstone.
        """
        file = _open_file(stored)
        position = arrow_type(dict(self._layout.hidden)[POSITION])
        whole = pa.schema([(POSITION, position), (TOMBSTONE, pa.bool_()), *schema])
        constants: dict[str, Any] = {} if positions else {POSITION: 0}
        if not stored.file.stats.get("tombstones"):
            constants[TOMBSTONE] = False
        layout = self._layout_of([name for name in whole.names if name not in constants])
        numbers = [np.zeros(0, int)]
        tables = [whole.empty_table()]
        for group in range(file.num_row_groups):
            maybe = self._keys_in_range(file.metadata, group, keys)
            if not len(maybe):
                continue
            head = file.read_row_group(group, columns=self._key, use_threads=False)
            number, row = _match_keys(head, keys.take(maybe), self._key)
            if not len(row):
                continue
            numbers.append(maybe[number])
            stored_names = list(layout.stored.columns)
            read = file.read_row_group(group, columns=stored_names, use_threads=False)
            values = conform_to_layout(read.take(row), layout)
            columns = []
            for field in whole:
                if field.name in constants:
                    constant = pa.scalar(constants[field.name], field.type)
                    columns.append(pa.repeat(constant, len(row)))
                else:
                    columns.append(values.column(field.name))
            tables.append(pa.table(columns, schema=whole))
        return np.concatenate(numbers), pa.concat_tables(tables)

    def _layout_of(self, names: Sequence[str]) -> BucketLayout:
        """Return the layout of the key and these columns, hidden or not, for reading files."""
        known = self._layout.schema
        shown = [name for name in dict.fromkeys([*self._key, *names]) if name in known]
        return replace(
            self._layout,
            schema=known.select(shown),
            bucket_by=(),
            partitions=1,
            key=(),
            hidden=tuple(each for each in self._layout.hidden if each[0] in names),
            projected=True,
        )

    def _keys_in_range(self, metadata: pq.FileMetaData, group: int, keys: pa.Table) -> Any:
        """Return the indices of keys that may be in a row group, by the range of its first key
        column.
        """
        first = column_paths(metadata).index(self._key[0])
        statistics = metadata.row_group(group).column(first).statistics
        if statistics is None or not statistics.has_min_max:
            return np.arange(keys.num_rows)
        column = keys.column(self._key[0])
        least, greatest = (
            pa.scalar(value, column.type) for value in (statistics.min, statistics.max)
        )
        within = pc.and_(pc.greater_equal(column, least), pc.less_equal(column, greatest))
        return np.flatnonzero(within.to_numpy())


def _open_file(stored: StoredFile) -> pq.ParquetFile:
    footer = stored.file.footer
    metadata = None
    if footer is not None:
        metadata = pq.read_metadata(pa.BufferReader(unpack_footer(footer)))
    source = open_object(stored.store, stored.key, stored.file.size)
    return pq.ParquetFile(
        source, metadata=metadata, page_checksum_verification=True, pre_buffer=True
    )


def _match_keys(head: pa.Table, keys: pa.Table, names: Sequence[str]) -> tuple[Any, Any]:
    """Return two arrays of the same length: which keys are in the rows `head`, and the row of
    each.
    """
    pairs = [(head.column(name).cast(keys.column(name).type), keys.column(name)) for name in names]
    codes = key_codes(
        [pa.chunked_array([*stored.chunks, *wanted.chunks]) for stored, wanted in pairs]
    )
    places = pc.index_in(codes.slice(0, head.num_rows), value_set=codes.slice(head.num_rows))
    rows = pc.indices_nonzero(pc.is_valid(places))
    return places.take(rows).to_numpy(), rows.to_numpy()


def _stream_order(position: Any) -> Any:
    """Return numbers that sort rows by their offset; rows of a bulk snapshot come first.

    Rows of a snapshot in the stream have SNAPSHOT_ROWS added to their positions, which is undone
    here.
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
    left = [name for name in names if name != KEPT]
    columns = [(name, type_from_spark(rows.schema[name].dataType)) for name in left]
    return convert_in_tasks(
        rows, partial(_complete_batches, names=names, declared=declared), columns
    )


def _complete_batches(
    batches: Iterator[pa.RecordBatch], names: Sequence[str], declared: RowCompletion
) -> Iterator[pa.RecordBatch]:
    completing = BucketCompletion(declared, None, 0)
    for batch in batches:
        if batch.num_rows:
            yield from _number_columns(
                completing.take(pa.Table.from_batches([batch]).rename_columns(names))
            )
    if (rest := completing.rest()) is not None:
        yield from _number_columns(rest)


def _number_columns(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    yield from rows.rename_columns([f"c{index}" for index in range(rows.num_columns)]).to_batches()
