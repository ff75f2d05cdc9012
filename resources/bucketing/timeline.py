"""Writes rows over time: gives each row its end, and prunes rows that ended before the history begins.

The rows of a key are adjacent and in the order of `__valid_from`, each moment once:

    key  valid_from  tombstone      valid_to  first
    a    1           no             4         yes
    a    4           yes            9         no      deleted from 4 to 9
    a    9           no             -         no      valid now
    b    2           no             -         yes

If the history begins at 5 (its edge), a's first row is pruned, because it ended before. Its second one becomes the
first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_adjunct.resources.lazy_modules import np, pa, pc

VALID_FROM = "__valid_from"
VALID_TO = "__valid_to"
IS_FIRST = "__first"
HAS_ENDS = "has_ends"
_TOMBSTONE = "__tombstone"


@dataclass(frozen=True, slots=True)
class TimelineOptions:
    """How rows over time are written. All moments are microseconds since the epoch.

    `fills_ends` sets each row's end and whether it is its key's first; otherwise both stay null, as in a delta. Then
    rows that ended at or before `edge` are pruned, and keys whose last row is a tombstone at or before `forget`. Rows
    before `newest` are counted as corrections of the past.
    """

    fills_ends: bool = False
    edge: int | None = None
    forget: int | None = None
    newest: int | None = None


class Timeline:
    """Converts a file's rows, batch by batch and in order, to the form in which they are stored."""

    def __init__(self, key: tuple[str, ...], options: TimelineOptions) -> None:
        self._key, self._options = key, options
        self._last: pa.Table | None = None
        self._follows_kept = False
        self._pruned = self._forgotten = self._corrections = self._current = 0
        self._forgotten_to: int | None = None

    def take(self, batch: pa.Table) -> pa.Table:
        """Return the rows that can be written: all but the last if ends are filled in, because its end is unknown."""
        if self._options.newest is not None:
            self._corrections += int((_micros(batch) < self._options.newest).sum())
        if not self._options.fills_ends:
            return _with_ends(batch, pa.nulls(batch.num_rows, _moment()), pa.nulls(batch.num_rows, pa.bool_()))
        rows = batch if self._last is None else pa.concat_tables([self._last, batch])
        self._last = rows.slice(rows.num_rows - 1)
        return self._fill_ends(rows, rows.num_rows - 1)

    def rest(self) -> pa.Table | None:
        """Return the last row, once no more rows come, or None."""
        last, self._last = self._last, None
        return None if last is None else self._fill_ends(last, 1)

    def stats(self) -> dict[str, Any]:
        """Return the counters for the file's facts; `current` counts the rows that are valid now."""
        counts = {"corrections": self._corrections, "pruned": self._pruned, "forgotten": self._forgotten}
        counts = {name: count for name, count in counts.items() if count}
        if self._forgotten_to is not None:
            counts["forgotten_to"] = self._forgotten_to
        current = {"current": self._current} if self._options.fills_ends else {}
        return {HAS_ENDS: self._options.fills_ends, **current, **counts}

    def _fill_ends(self, rows: pa.Table, count: int) -> pa.Table:
        """Return the first `count` rows with their ends, without pruned ones; `rows` may have one more, the next."""
        same = np.append(_same_as_next(rows, self._key), False)[:count]  # the next row is of the same key
        begins = _micros(rows)
        ends = np.append(begins[1:], 0)[:count]
        kept = np.ones(count, dtype=bool) if self._options.edge is None else ~(same & (ends <= self._options.edge))
        self._pruned += count - int(kept.sum())
        tombstones = rows.column(_TOMBSTONE).slice(0, count).to_numpy().astype(bool)
        if self._options.forget is not None:
            kept &= ~self._forgettable(kept, same, tombstones, begins[:count])
        # A row that follows a kept row of its key is not the key's first.
        first = ~np.append([self._follows_kept], same[:-1] & kept[:-1])[:count] if count else kept
        if count:
            self._follows_kept = bool(same[-1] and kept[-1])
        self._current += int((kept & ~same & ~tombstones).sum())
        filled = _with_ends(
            rows.slice(0, count), pa.array(ends, pa.int64(), mask=~same).cast(_moment()), pa.array(first)
        )
        return filled if kept.all() else filled.filter(pa.array(kept))

    def _forgettable(self, kept: Any, same: Any, tombstones: Any, begins: Any) -> Any:
        """Return which rows are deletions that may be dropped: the only row of their key, and old enough."""
        alone = ~np.append([self._follows_kept], same[:-1] & kept[:-1])[: len(kept)]
        forgotten = kept & tombstones & ~same & alone & (begins <= self._options.forget)
        if forgotten.any():
            self._forgotten += int(forgotten.sum())
            highest = int(begins[forgotten].max())
            self._forgotten_to = highest if self._forgotten_to is None else max(highest, self._forgotten_to)
        return forgotten


def _with_ends(rows: pa.Table, ends: Any, first: Any) -> pa.Table:
    """Return the rows with these values as `__valid_to` and `__first`."""
    for name, values in ((VALID_TO, ends), (IS_FIRST, first)):
        there = name in rows.column_names
        rows = (
            rows.set_column(rows.column_names.index(name), name, values) if there else rows.append_column(name, values)
        )
    return rows


def _same_as_next(rows: pa.Table, key: tuple[str, ...]) -> Any:
    """Return for each row but the last whether the next one has the same key."""
    count = max(0, rows.num_rows - 1)
    same = np.ones(count, dtype=bool)
    for name in key:
        column = rows.column(name)
        same &= pc.equal(column.slice(0, count), column.slice(1)).to_numpy().astype(bool)
    return same


def _micros(rows: pa.Table) -> Any:
    return rows.column(VALID_FROM).cast(_moment()).cast("int64").to_numpy()


def _moment() -> pa.DataType:
    return pa.timestamp("us", tz="UTC")
