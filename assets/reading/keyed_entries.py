"""Entries in memory by their key, or by key and time, to find those of many records at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from dagster_adjunct.assets.versions.version import TOMBSTONE
from dagster_adjunct.resources.bucketing.files import IS_FIRST, VALID_FROM, VALID_TO
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.schemas.schema import Schema

_FEW = 8
"""How many times more entries than records there are where entries are found among the keys of
records, and not the other way round."""
_OPEN = 2**62
"""Microseconds: the end of an interval that has none."""


@dataclass(frozen=True, slots=True)
class KeyedEntries:
    """Entries, no two of which have the same key, and the row of each key."""

    entries: pa.Table
    key: tuple[str, ...]
    rows: Mapping[tuple[Any, ...], int] | None  # None for a key of one column, which Arrow finds

    @staticmethod
    def of(entries: pa.Table, key: tuple[str, ...]) -> KeyedEntries:
        """Index the entries by the columns of their key."""
        entries = entries.combine_chunks()
        if len(key) == 1:
            return KeyedEntries(entries, key, None)
        keys = _zip_columns([entries.column(name) for name in key])
        return KeyedEntries(entries, key, {values: row for row, values in enumerate(keys)})

    def find(self, columns: Sequence[pa.ChunkedArray]) -> pa.Array:
        """Return the row number of each key's entry, null for a key without one; `columns` are
        those of the keys.
        """
        if self.rows is not None:
            return pa.array(map(self.rows.get, _zip_columns(columns)), pa.int32())
        entries = self.entries.column(self.key[0])
        if len(columns[0]) * _FEW < len(entries):
            return _find_few(columns[0], entries)
        found = pc.index_in(columns[0], value_set=entries)
        if isinstance(found, pa.ChunkedArray):
            return found.combine_chunks()
        return found


def _find_few(keys: pa.ChunkedArray, entries: pa.ChunkedArray) -> pa.Array:
    """Return the row number of each key among many entries, null for a key without one.

    Arrow makes a hash table of the values that are searched: one of few keys, through which the
    entries pass, takes a tenth of the time that one of all entries takes.
    """
    wanted = pc.unique(keys)
    number_of_entry = pc.index_in(entries, value_set=wanted)
    entry_rows = np.nonzero(number_of_entry.is_valid().to_numpy())[0]
    row_of_wanted = np.full(len(wanted), -1, np.int64)
    row_of_wanted[number_of_entry.drop_null().to_numpy()] = entry_rows
    found = row_of_wanted[pc.index_in(keys, value_set=wanted).to_numpy()]
    return pa.array(found, pa.int32(), mask=found < 0)


def _zip_columns(columns: Sequence[pa.ChunkedArray]) -> list[tuple[Any, ...]]:
    """Return the values of these columns, a tuple for each row."""
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


@dataclass(frozen=True, slots=True)
class TimedEntries:
    """The rows over time of a dataset: those of a key are adjacent, in the order of their time, and
    do not overlap.

    The rows of the key number n of `keys` are those from `starts[n]` up to `starts[n + 1]`. A row
    is valid from `begins` up to `ends`, in microseconds. Where `there` is false, the row is a
    deletion. If `firsts` is true for the first row of a key, nothing is known of the key before
    that row. If it is false, the key had no entry before it, at least not after `known_from`; what
    was before that time is unknown (None: all is known).
    """

    keys: KeyedEntries
    entries: pa.Table
    starts: Sequence[int]
    begins: Sequence[int]
    ends: Sequence[int]
    there: Sequence[bool]
    firsts: Sequence[bool]
    known_from: int | None

    @staticmethod
    def of(
        rows: pa.Table, schema: Schema, key: tuple[str, ...], known_from: int | None
    ) -> TimedEntries:
        """Index rows from `read_rows_over_time` by these columns of their key."""
        keys = _zip_columns([rows.column(name) for name in key])
        starts = []
        for row, values in enumerate(keys):
            if not row or values != keys[row - 1]:
                starts.append(row)
        return TimedEntries(
            KeyedEntries.of(rows.select(key).take(pa.array(starts, pa.int64())), key),
            rows.select(schema.names).combine_chunks(),
            [*starts, rows.num_rows],
            rows.column(VALID_FROM).cast("int64").to_pylist(),
            pc.fill_null(rows.column(VALID_TO).cast("int64"), _OPEN).to_pylist(),
            pc.invert(rows.column(TOMBSTONE)).to_pylist(),
            rows.column(IS_FIRST).to_pylist(),
            known_from,
        )

    @staticmethod
    def empty(schema: Schema, key: tuple[str, ...]) -> TimedEntries:
        """Return the rows over time of a dataset without a version: none."""
        entries = schema.to_arrow().empty_table()
        return TimedEntries(
            KeyedEntries.of(entries.select(key), key), entries, [0], [], [], [], [], None
        )

    def find(
        self, columns: Sequence[pa.ChunkedArray], times: Sequence[int | None], *, oldest: bool
    ) -> FoundEntries:
        """Return the entry of each record, by the columns of its key and its time.

        `times` are in microseconds. A record without a key or time gets null and False. With
        `oldest`, a record from before the history gets the key's first entry, but null if the key
        has no rows or `firsts` does not mark its first row: a bounded dataset's oldest version
        lacks the key.
        """
        have_keys = reduce(pc.and_, [column.is_valid() for column in columns]).to_pylist()
        numbers = self.keys.find(columns).to_pylist()
        rows: list[int | None] = []
        early: list[bool] = []
        for number, time, has_key in zip(numbers, times, have_keys, strict=True):
            if has_key and time is not None:
                found = self._find(number, time, oldest=oldest)
            else:
                found = _FoundRow(None, False)
            rows.append(found.row)
            early.append(found.is_early)
        return FoundEntries(pa.array(rows, pa.int64()), pa.array(early, pa.bool_()))

    def _find(self, number: int | None, time: int, *, oldest: bool) -> _FoundRow:
        """Return the entry at a time of the key with this number, None for a key without rows.

        The time may be in a row of the key, after or between its rows, or before all of them.
        """
        is_unknown = self.known_from is not None and time < self.known_from
        if number is None:
            return _FoundRow(None, is_unknown)
        first = self.starts[number]
        end = self.starts[number + 1]
        row = bisect_right(self.begins, time, first, end) - 1  # the last one that has begun
        if row >= first:
            has_ended = time >= self.ends[row]
            if has_ended:
                return _FoundRow(None, is_unknown)
            return _FoundRow(row if self.there[row] else None, False)
        if not self.firsts[first]:
            return _FoundRow(None, is_unknown)
        if oldest:
            for entry_row in range(first, end):
                if self.there[entry_row]:
                    return _FoundRow(entry_row, True)
        return _FoundRow(None, True)


class FoundEntries(NamedTuple):
    """For each record the row of its key's entry at its time (null for none), and whether that time
    is before the history of the key.
    """

    rows: pa.Array
    is_early: pa.Array


class _FoundRow(NamedTuple):
    """The row of an entry, None for none; and whether the time is before the key's history."""

    row: int | None
    is_early: bool
