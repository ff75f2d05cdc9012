"""Reads runs from a store: footers and blocks by ranges, verified, with a cache of bounded size."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cachetools import LRUCache

from dagster_adjunct.resources.key_value.segment import threads
from dagster_adjunct.resources.key_value_backends.objects.pointer import RunRef
from dagster_adjunct.resources.key_value_backends.objects.runs import (
    Columns,
    RunIndex,
    damaged_object_error,
    read_block,
    read_footer,
)
from dagster_adjunct.resources.objects.store import ObjectStore

S = TypeVar("S")
T = TypeVar("T")

_WHOLE = 256 * 1024  # a run up to this size is read by one request
_SPAN = 4 * 1024 * 1024  # adjacent blocks are read together, up to this size
_WEIGHT = 3  # in memory an entry takes about three times its stored bytes


@dataclass(frozen=True, slots=True)
class _Cached:
    weight: int
    content: RunIndex | Columns


class BlockCache:
    """The most recently used footers and blocks, which never change, up to so many bytes."""

    def __init__(self, size: int) -> None:
        self._kept: LRUCache[tuple[str, int], _Cached] = LRUCache(size, getsizeof=lambda kept: kept.weight)
        self._lock = threading.Lock()

    def get(self, key: tuple[str, int]) -> RunIndex | Columns | None:
        with self._lock:
            kept = self._kept.get(key)
        return None if kept is None else kept.content

    def put(self, key: tuple[str, int], content: RunIndex | Columns, size: int) -> None:
        weight = size * (_WEIGHT if isinstance(content, Columns) else 1)
        with self._lock:
            if weight <= self._kept.maxsize:
                self._kept[key] = _Cached(weight, content)


class RunObjects:
    """The runs of a segment, below `prefix`, for any thread.

    Raises ObjectNotFoundError for a missing run, MalformedDocumentError for a damaged one, and StoreUnavailableError.
    """

    def __init__(self, store: ObjectStore, prefix: str, cache: BlockCache) -> None:
        self.store, self.prefix, self._cache = store, prefix, cache

    def key(self, run: str) -> str:
        """Return the key of a run's object."""
        return f"{self.prefix}/runs/{run}"

    def indexes(self, runs: Sequence[RunRef]) -> list[RunIndex]:
        """Return the indexes of several runs, fetched concurrently."""
        return _at_once(self.index, runs)

    def index(self, run: RunRef) -> RunIndex:
        """Return the index of a run."""
        key = self.key(run.id)
        kept = self._cache.get((key, -1))
        if isinstance(kept, RunIndex):
            return kept
        start = 0 if run.size <= _WHOLE else run.size - run.footer
        data = self.store.get_range(key, start, run.size - start)
        if len(data) != run.size - start:
            raise damaged_object_error(
                self._where(key), f"it ends after {start + len(data):,} bytes, expected {run.size:,}"
            )
        index = read_footer(data[len(data) - run.footer :], self._where(key))
        self._cache.put((key, -1), index, run.footer)
        if start == 0:
            self._keep(key, index, range(len(index.counts)), data)
        return index

    def blocks(self, run: RunRef, index: RunIndex, first: int, last: int) -> list[Columns]:
        """Return the blocks of a run from `first` to `last`, included; neighbors are fetched by one request."""
        key = self.key(run.id)
        blocks_by_number = {number: self._cache.get((key, number)) for number in range(first, last + 1)}
        missing = [number for number, block in blocks_by_number.items() if block is None]
        for blocks in _at_once(lambda span: self._fetch(key, index, span), [*_spans(missing, index)]):
            blocks_by_number.update(blocks)
        return [block for block in blocks_by_number.values() if isinstance(block, Columns)]

    def fetch_at_once(self, wanted: Sequence[tuple[RunRef, RunIndex, int]]) -> list[Columns]:
        """Return single blocks of several runs, fetched concurrently."""
        return _at_once(lambda one: self.blocks(one[0], one[1], one[2], one[2])[0], wanted)

    def _fetch(self, key: str, index: RunIndex, numbers: range) -> dict[int, Columns]:
        start, end = index.offsets[numbers[0]], index.offsets[numbers[-1] + 1]
        data = self.store.get_range(key, start, end - start)
        return self._keep(key, index, numbers, data)

    def _keep(self, key: str, index: RunIndex, numbers: range, data: bytes) -> dict[int, Columns]:
        """Verify and cache the blocks of `numbers`, whose bytes these are."""
        origin = index.offsets[numbers[0]] if numbers else 0
        blocks = {}
        for number in numbers:
            part = data[index.offsets[number] - origin : index.offsets[number + 1] - origin]
            if zlib.crc32(part) != index.checksums[number]:
                raise damaged_object_error(self._where(key), f"block {number} has another checksum than in its footer")
            blocks[number] = read_block(part)
            self._cache.put((key, number), blocks[number], len(part))
        return blocks

    def _where(self, key: str) -> str:
        return f"run {key!r} in {self.store.url}"


def _spans(numbers: Sequence[int], index: RunIndex) -> Iterator[range]:
    """Yield ranges of adjacent blocks that are not too large together."""
    start = 0
    for place in range(1, len(numbers) + 1):
        whole = place < len(numbers) and numbers[place] == numbers[place - 1] + 1
        if whole and index.offsets[numbers[place] + 1] - index.offsets[numbers[start]] <= _SPAN:
            continue
        yield range(numbers[start], numbers[place - 1] + 1)
        start = place


def _at_once(work: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """Return the results of `work` for all items, in threads if there are several; `work` must not use them."""
    if len(items) < 2:
        return [work(item) for item in items]
    return list(threads("runs", 16).map(work, items))
