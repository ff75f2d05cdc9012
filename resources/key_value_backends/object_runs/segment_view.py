"""What a segment holds in one of its states: single keys, and entries in the order of their keys."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value_backends.object_runs.run_blocks import Columns, Versioned, joined
from dagster_adjunct.resources.key_value_backends.object_runs.run_filter import Hashed, hashed, may_hold
from dagster_adjunct.resources.key_value_backends.object_runs.run_format import RunIndex
from dagster_adjunct.resources.key_value_backends.object_runs.run_objects import RunObjects
from dagster_adjunct.resources.key_value_backends.object_runs.segment_pointer import RunRef, SegmentState, columns_of

_WINDOW = 2_000  # entries of a run that are merged with others' at a time
_PART = 4 * 1024 * 1024  # bytes of a run that are fetched at a time, at most


class SegmentView:
    """Reads one state through the runs' objects. Raises what `RunObjects` does."""

    def __init__(self, state: SegmentState, objects: RunObjects) -> None:
        self.state, self._objects = state, objects

    def find(self, keys: Iterable[bytes]) -> dict[bytes, Versioned | None]:
        """Return the version and value of each key; None is for one that is not there, or removed."""
        entries: dict[bytes, Versioned | None] = {}
        sought: list[_Search] = []
        for key in keys:
            if (recent := self.state.recent.get(key)) is not None:
                entries[key] = None if recent[1] is None else recent
            elif key not in entries:
                entries[key] = None
                sought.append(_Search(key, hashed(key), len(self.state.levels.runs)))
        while sought:
            sought = [search for search in sought if self._next_run(search)]
            # Of each key that block which is most likely to have it, all at once.
            wanted = [
                (self.state.levels.runs[search.run], self._indexes[search.run], search.block) for search in sought
            ]
            distinct = {(run.id, block): (run, index, block) for run, index, block in wanted}
            blocks = dict(zip(distinct, self._objects.fetch_at_once([*distinct.values()]), strict=True))
            left = []
            for search, (run, _, block) in zip(sought, wanted, strict=True):
                entry = blocks[run.id, block].get(search.key)
                if entry is None:
                    left.append(search)
                elif entry[1] is not None:
                    entries[search.key] = entry
            sought = left
        return entries

    def windows(self, within: KeyRange, wanted: int) -> Iterator[Columns]:
        """Yield the entries of a range, removed keys with them, in parts that follow each other.

        About `wanted` are fetched at a time: give what is going to be taken.
        """
        yield from merged(self._parts(within, wanted), within)

    @cached_property
    def _indexes(self) -> list[RunIndex]:
        return self._objects.indexes(self.state.levels.runs)

    def _next_run(self, search: _Search) -> bool:
        """Go on to the next older run that may hold the key; False where there is none."""
        for run in range(search.run - 1, -1, -1):
            index = self._indexes[run]
            if may_hold(index.filter, search.hashed) and (block := index.block_of(search.key)) >= 0:
                search.run, search.block = run, block
                return True
        return False

    def _parts(self, within: KeyRange, wanted: int) -> list[Part]:
        runs = zip(self.state.levels.runs, self._indexes, strict=True)
        recent = columns_of(self.state.recent).between(within.start, within.end)
        return [*(StoredPart(self._objects, run, index, wanted, within.end) for run, index in runs), HeldPart(recent)]


@dataclass(slots=True)
class _Search:
    key: bytes
    hashed: Hashed
    run: int
    block: int = -1


class HeldPart:
    """Entries that are at hand."""

    def __init__(self, entries: Columns) -> None:
        self._entries = entries

    def reach(self, within: KeyRange) -> bytes | None:
        """Return the key before which a window is best read; None is the range's end."""
        return None

    def read(self, within: KeyRange) -> Columns:
        """Return the entries of a range."""
        return self._entries.between(within.start, within.end)


class StoredPart:
    """Entries of a run, of which about `wanted` before a key are going to be read."""

    def __init__(self, objects: RunObjects, run: RunRef, index: RunIndex, wanted: int, end: bytes | None) -> None:
        self._objects, self._run, self._index, self._wanted, self._end = objects, run, index, wanted, end
        self._held: dict[int, Columns] = {}

    def reach(self, within: KeyRange) -> bytes | None:
        """Return the key before which the run has a window's entries of a range; None is the range's end."""
        index = self._index
        first = last = max(0, index.block_of(within.start))
        counted = 0  # without those of the first block: nobody knows how many of them lie before the range
        while last < len(index.firsts) and (counted < _WINDOW or last == first):
            counted += index.counts[last] if last > first else 0
            last += 1
        reached = index.firsts[last] if last < len(index.firsts) else None
        return reached if reached is not None and (within.end is None or reached < within.end) else None

    def read(self, within: KeyRange) -> Columns:
        """Return the entries of a range, of which only the blocks are read that may have some, and some behind them."""
        firsts = self._index.firsts
        first = max(0, self._index.block_of(within.start))
        last = len(firsts) if within.end is None else bisect_left(firsts, within.end)
        if first >= last:
            return Columns([], [], [])
        if not all(number in self._held for number in range(first, last)):
            ahead = max(last, self._ahead_of(first))
            self._held = dict(enumerate(self._objects.blocks(self._run, self._index, first, ahead - 1), first))
        return joined([self._held[number] for number in range(first, last)]).between(within.start, within.end)

    def _ahead_of(self, first: int) -> int:
        """Return the block before which there are about so many entries as are wanted in all, within the range."""
        index, last, counted = self._index, first, 0
        while last < len(index.firsts) and (self._end is None or index.firsts[last] < self._end):
            if counted >= self._wanted or index.offsets[last] - index.offsets[first] >= _PART:
                break
            counted += index.counts[last]
            last += 1
        return last


Part = HeldPart | StoredPart


def merged(parts: Sequence[Part], within: KeyRange) -> Iterator[Columns]:
    """Yield the entries of all parts, in the order of their keys; of a key that several have, the last part's.

    They come in windows of some thousand entries of the part that has most there.
    """
    start: bytes | None = within.start
    while start is not None:
        left = KeyRange(start, within.end)
        reached = min((key for part in parts if (key := part.reach(left)) is not None), default=None)
        window = KeyRange(start, within.end if reached is None else reached)
        sources = [part.read(window) for part in parts]
        yield newest_of([source for source in sources if len(source)])
        start = reached


def newest_of(sources: Sequence[Columns]) -> Columns:
    """Return the entries of several in the order of their keys; for a key that several have, that of the last one."""
    if len(sources) < 2:
        return sources[0] if sources else Columns([], [], [])
    places: dict[bytes, Versioned] = {}
    for source in sources:
        places.update(zip(source.keys, zip(source.versions, source.values, strict=True), strict=True))
    return columns_of(places)
