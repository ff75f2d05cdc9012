"""Finds changes of a key of which nothing says which one is newer.

Changes of a key from one partition are in order of their offsets. Where a key has changes in
several partitions, `order_by` or the times of a history say which one is newer. If they say the
same, and the changes differ, nothing does:

    key  order_by  partition  offset  n
    k    5         0          100     1
    k    5         2          3       2     written later, after partitions were added

Such changes are tied, also with the stored row of their key. A tie below a newer change of the key
decides nothing; with a history each time counts. Changes never leave out columns here: with
`order_by` or a history they are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.assets.sources.entries import OpenedChanges
from dagster_adjunct.assets.versions.version import POSITION, TOMBSTONE
from dagster_adjunct.resources.bucketing.files import (
    VALID_FROM,
    BucketFile,
    BucketLayout,
    Generation,
    key_changes,
)
from dagster_adjunct.resources.errors import KeyOrderError
from dagster_adjunct.resources.lazy_modules import np, pc
from dagster_adjunct.resources.schemas.equality import comparable_value
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION
from dagster_adjunct.resources.user_code import format_record

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TieRule:
    """How ties are found: changes with equal `key` and equal rank are tied if they differ in a
    column of `schema`.

    With a history the key ends in `__valid_from`. `order_by` is what changes are ordered by, None
    for their offsets.
    """

    dataset: str
    schema: Schema
    key: tuple[str, ...]
    order_by: tuple[str, ...] | None

    @property
    def over_time(self) -> bool:
        """Whether each time of a key has its own row."""
        return self.key[-1] == VALID_FROM

    def rank(self, position: Any) -> Any:
        """Return what is equal for rows that may be tied: their position; or, if positions are
        offsets, which order nothing across partitions, whether the row is of a snapshot.
        """
        if self.order_by is None:
            return position < 0
        return position

    def ties(self, stored: Row, change: Row) -> bool:
        """Return whether nothing but offsets says which of these rows of a key is newer.

        A row of a bulk snapshot has no partition: a change of any partition is newer.
        """
        have_same_rank = self.rank(stored[POSITION]) == self.rank(change[POSITION])
        is_of_bulk_snapshot = stored[PARTITION] is None
        return have_same_rank and not is_of_bulk_snapshot

    def is_newer(self, stored: Row, change: Row) -> bool:
        """Return whether the stored row is newer than the change, which is then ignored."""
        if self.order_by is None:
            is_change_of_snapshot = self.rank(change[POSITION])
            is_stored_of_snapshot = self.rank(stored[POSITION])
            return bool(is_change_of_snapshot and not is_stored_of_snapshot)
        return bool(stored[POSITION] > change[POSITION])

    def ranged_values(self, rows: pa.Table) -> Any:
        """Return what the ranges in the stats of files are about: positions, or times in
        microseconds.
        """
        if self.over_time:
            return rows.column(VALID_FROM).cast("int64").to_numpy()
        return rows.column(POSITION).to_numpy()

    def highest_of(self, file: BucketFile) -> Any:
        """Return the highest position in a stored file, or with a history the highest time."""
        name = "range" if self.over_time else "positions"
        _, highest = file.stats[name]
        return highest

    def files_within(
        self, generation: Generation, bucket: int, lowest: Any
    ) -> tuple[BucketFile, ...]:
        """Return the files of the bucket that have a position, or time, of `lowest` or higher."""
        found = []
        for file in generation.files:
            if file.bucket == bucket and self.highest_of(file) >= lowest:
                found.append(file)
        return tuple(found)


def find_tie_rule(source: OpenedChanges, layout: BucketLayout) -> TieRule | None:
    """Return how ties are found among the changes of this stream, which are stored in this layout;
    None where all changes of a key are in one partition.
    """
    if len(source.ssps) == 1 or not source.stores_partitions:
        return None
    return TieRule(source.spec.name, layout.schema, layout.key, source.spec.following.order_by)


@dataclass(frozen=True, slots=True)
class Tie:
    """The change at the number `row` is tied with the row `with_row`, which may be a stored one."""

    row: int
    change: Row
    with_row: Row

    def reason(self, rule: TieRule) -> str:
        """Return why the change can't be applied, to follow "the change at offset …"."""
        offset = self.with_row.get(OFFSET)
        if offset is None:
            row = "the stored row"
        else:
            row = f"the change at offset {offset}"
        return (
            f"{row} of partition {self.with_row[PARTITION]} has the same key"
            f" ({format_key(self.change, rule)}) and the same"
            f" {describe_order_value(self.change, rule)}, but other values, so that nothing says"
            " which one is newer"
        )

    def error(self, rule: TieRule) -> KeyOrderError:
        """Return the error for this tie."""
        partition = self.change[PARTITION]
        offset = self.change[OFFSET]
        if rule.over_time:
            order = "the time since when it is valid"
        else:
            order = "order_by"
        return KeyOrderError(
            f"dataset {rule.dataset!r}: the change at offset {offset} of partition {partition}"
            f" can't be applied: {self.reason(rule)}.",
            "Its commit was not made. A key may have changes in several partitions of this stream,"
            f" and {order} has to differ between them. Declare"
            " on_bad_change=DeadLetters(STREAM), which sets the change that is read later aside,"
            " and let the source write the row again. Or declare an order_by that differs, such as"
            " a version or two columns, and rebuild: adjunct dataset rebuild"
            f" {rule.dataset} MODULE:APP --reason ….",
            dataset=rule.dataset,
            partition=partition,
            offset=str(offset),
        )


def format_key(row: Row, rule: TieRule) -> str:
    """Return the row's key for a message, without the values of sensitive columns."""
    names = []
    for name in rule.key:
        if name != VALID_FROM:
            names.append(name)
    return format_record({name: row[name] for name in names}, rule.schema.sensitive)


def describe_order_value(row: Row, rule: TieRule) -> str:
    """Return what the row is ordered by, in words for a message: its time, or its values of
    `order_by` without sensitive ones. Where these are not columns of the row, its position.
    """
    if rule.over_time:
        return f"time since when it is valid ({row[VALID_FROM].isoformat()})"
    order = rule.order_by or ()
    names = ", ".join(order)
    if all(name in row for name in order):
        values = {name: row[name] for name in order}
        return f"order_by value ({format_record(values, rule.schema.sensitive)})"
    return f"order_by value ({names}: {row[POSITION]})"


@dataclass(frozen=True, slots=True)
class TieGroups:
    """The groups of adjacent changes with equal key and rank, in order.

    Group i is the rows from `starts[i]` up to `ends[i]`, of the key with the number `keys[i]`.
    `scattered[i]` says that they are of several partitions, `deciding[i]` that the group is the
    last of its key, so that what is stored is one of its rows.
    """

    starts: Any
    ends: Any
    keys: Any
    scattered: Any
    deciding: Any


def group_changes(rows: pa.Table, is_first: Any, rule: TieRule) -> TieGroups:
    """Return the groups of these changes, of which there is at least one.

    The rows are ordered by key and position; `is_first` is true for the first row of each key.
    """
    begins = _mark_group_starts(rows, is_first, rule)
    starts = np.flatnonzero(begins)
    partition = rows.column(PARTITION).to_numpy()
    lowest = np.minimum.reduceat(partition, starts)
    highest = np.maximum.reduceat(partition, starts)
    begins_key = is_first[starts]
    return TieGroups(
        starts=starts,
        ends=np.append(starts[1:], rows.num_rows),
        keys=np.cumsum(begins_key) - 1,
        scattered=lowest != highest,
        deciding=np.append(begins_key[1:], True),  # the next group is of another key
    )


def _mark_group_starts(rows: pa.Table, is_first: Any, rule: TieRule) -> Any:
    """Return which rows begin a group of equal keys and ranks."""
    if rule.order_by is not None:
        return is_first | np.append(True, key_changes(rows, [POSITION]))
    is_of_snapshot = pc.less(rows.column(POSITION), 0).to_numpy()
    return is_first | np.append(True, is_of_snapshot[1:] != is_of_snapshot[:-1])


class NumberedChange(NamedTuple):
    """A change, and the number of its row."""

    number: int
    change: Row


def resolve_group(
    changes: Iterable[NumberedChange], stored: Row | None, rule: TieRule
) -> list[Tie]:
    """Return the ties among changes of one key and rank, which are in the order of their numbers.

    `stored` is the stored row that they may be tied with, None if there is none. What counts as
    read first is the last change from its partition, or else the row itself; without a stored row
    the last change of the lowest partition. All changes of another partition are tied with that,
    unless their last one has the same content.
    """
    by_partition: dict[int, list[NumberedChange]] = {}
    for each in changes:
        by_partition.setdefault(each.change[PARTITION], []).append(each)
    base_partition = min(by_partition) if stored is None else stored[PARTITION]
    base: Row | None
    if base_partition in by_partition:
        base = by_partition[base_partition][-1].change
    else:
        base = stored
    assert base is not None, "either a change or the stored row is of this partition"
    ties = []
    for partition, partition_changes in sorted(by_partition.items()):
        if partition == base_partition or _same_content(
            partition_changes[-1].change, base, rule.schema.names
        ):
            continue
        ties += [Tie(each.number, each.change, base) for each in partition_changes]
    return ties


def _same_content(change: Row, base: Row, names: Sequence[str]) -> bool:
    """Return whether two rows of a key are the same: both deleted, or neither and with the same
    values in these columns.
    """
    if change[TOMBSTONE] or base[TOMBSTONE]:
        return bool(change[TOMBSTONE] and base[TOMBSTONE])
    return all(comparable_value(change[name]) == comparable_value(base[name]) for name in names)
