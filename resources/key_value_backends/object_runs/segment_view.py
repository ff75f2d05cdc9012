"""What a segment holds in one of its states: single keys, and entries in the order of their keys."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value_backends.object_runs.run_blocks import Columns, Versioned, joined
from dagster_adjunct.resources.key_value_backends.object_runs.run_filter import Hashed, hashed, may_hold
from dagster_adjunct.resources.key_value_backends.object_runs.run_format import RunIndex
from dagster_adjunct.resources.key_value_backends.object_runs.run_objects import RunObjects
from dagster_adjunct.resources.key_value_backends.object_runs.segment_pointer import RunRef, SegmentState, columns_of

_PART = 4 * 1024 * 1024  # bytes of a run that are read for a window, at most


class SegmentView:
    """Reads one state through the runs' objects. Raises what `RunObjects` does."""

    def __init__(self, state: SegmentState, objects: RunObjects) -> None:
        self.state, self._objects = state, objects

    def find(self, keys: Iterable[bytes]) -> dict[bytes, Versioned | None]:
        """Return the version and value of each key; None is for one that is not there, or removed."""
        found: dict[bytes, Versioned | None] = {}
        sought: list[_Search] = []
        for key in keys:
            if (recent := self.state.recent.get(key)) is not None:
                found[key] = None if recent[1] is None else recent
            elif key not in found:
                found[key] = None
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
                    found[search.key] = entry
            sought = left
        return found

    def windows(self, within: KeyRange, wanted: int) -> Iterator[Columns]:
        """Yield the entries of a range, removed keys with them, in parts of about `wanted` that follow each other."""
        yield from merged(self._parts(within), within, wanted)

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

    def _parts(self, within: KeyRange) -> list[Part]:
        runs = zip(self.state.levels.runs, self._indexes, strict=True)
        recent = columns_of(self.state.recent).between(within.start, within.end)
        return [*(StoredPart(self._objects, run, index) for run, index in runs), HeldPart(recent)]


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

    def read(self, within: KeyRange, wanted: int) -> tuple[Columns, bytes | None]:
        """Return the first entries of a range, and the key before which all are there; None is the range's end."""
        return self._entries.between(within.start, within.end), None


class StoredPart:
    """Entries of a run, of which so many blocks are read that they have about what is wanted."""

    def __init__(self, objects: RunObjects, run: RunRef, index: RunIndex) -> None:
        self._objects, self._run, self._index = objects, run, index

    def read(self, within: KeyRange, wanted: int) -> tuple[Columns, bytes | None]:
        """Return the first entries of a range, and the key before which all are there; None is the range's end."""
        index = self._index
        first = last = max(0, bisect_right(index.firsts, within.start) - 1)
        counted = 0
        while last < len(index.firsts) and (within.end is None or index.firsts[last] < within.end or last == first):
            counted += index.counts[last] if last > first else 0  # of the first block, nobody knows how many are below
            last += 1
            if counted >= wanted or index.offsets[last] - index.offsets[first] >= _PART:
                break
        if last == first:
            return Columns([], [], []), None
        blocks = self._objects.blocks(self._run, index, first, last - 1)
        reached = index.firsts[last] if last < len(index.firsts) else None
        if reached is not None and within.end is not None and reached >= within.end:
            reached = None
        return joined(blocks).between(within.start, within.end), reached


Part = HeldPart | StoredPart


def merged(parts: Sequence[Part], within: KeyRange, wanted: int) -> Iterator[Columns]:
    """Yield the entries of all parts, in the order of their keys; of a key that several have, the last part's."""
    start: bytes | None = within.start
    while start is not None:
        read = [part.read(KeyRange(start, within.end), wanted) for part in parts]
        reached = min((key for _, key in read if key is not None), default=None)
        sources = [found.between(start, reached) for found, _ in read]
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
