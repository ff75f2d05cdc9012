"""Runs: immutable objects with entries in key order, as blocks followed by an index.

    | block | block | … | footer |

The footer: a head, then of each block where it begins (one more for the end), its checksum, its
number of entries and the length of its first key; then these keys, the filter of all keys, and the
tokens of commits. A run is read by ranges: its footer, whose size is in the pointer, then single
blocks.
"""

from __future__ import annotations

import struct
import threading
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import mmh3
from cachetools import LRUCache
from pydantic import Field

from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.errors import MalformedDocumentError
from dagster_adjunct.resources.key_value.segment import VERSION_BYTES, threads
from dagster_adjunct.resources.lazy_modules import np
from dagster_adjunct.resources.objects.store import ObjectStore

if TYPE_CHECKING:
    import numpy.typing as npt

# Blocks: some tens of kilobytes of a run, read and checked as one.
#
#     | n | length of each key | length of each value | version of each | keys | values |
#
# Numbers are little-endian: n and the lengths of values have four bytes, the lengths of keys two. A
# removed key has the length 2^32 - 1 and no value: it hides what older runs hold.


Value = bytes | None
"""The value of a key in a run or in the log; None means that it was removed."""
Versioned = tuple[bytes, Value]
"""Version and value."""

_COUNT = struct.Struct("<I")
REMOVED = 2**32 - 1
"""The stored length of the value of a removed key."""


class Columns:
    """Entries in key order as three lists of equal length. Each key occurs once; the value of a
    removed one is None.
    """

    __slots__ = ("keys", "values", "versions")

    def __init__(self, keys: list[bytes], versions: list[bytes], values: list[Value]) -> None:
        self.keys = keys
        self.versions = versions
        self.values = values

    def __len__(self) -> int:
        return len(self.keys)

    def get(self, key: bytes) -> Versioned | None:
        """Return version and value of a key; None if it has no entry here."""
        place = bisect_left(self.keys, key)
        if place == len(self.keys) or self.keys[place] != key:
            return None
        return self.versions[place], self.values[place]

    def between(self, start: bytes, end: bytes | None) -> Columns:
        """Return the entries from `start` up to but not including `end`; None means no end."""
        first = 0
        if self.keys and self.keys[0] < start:
            first = bisect_left(self.keys, start)
        last = len(self.keys) if end is None else bisect_left(self.keys, end, first)
        if first == 0 and last == len(self.keys):
            return self
        return Columns(self.keys[first:last], self.versions[first:last], self.values[first:last])


def concat_columns(parts: Sequence[Columns]) -> Columns:
    """Return the entries of several parts, each of which follows the previous one in key order."""
    if len(parts) == 1:
        return parts[0]
    whole = Columns([], [], [])
    for part in parts:
        whole.keys += part.keys
        whole.versions += part.versions
        whole.values += part.values
    return whole


def drop_removed(entries: Columns) -> Columns:
    """Return the entries without those that say that a key was removed."""
    if None not in entries.values:
        return entries
    left = []
    for place, value in enumerate(entries.values):
        if value is not None:
            left.append(place)
    return Columns(
        [entries.keys[place] for place in left],
        [entries.versions[place] for place in left],
        [entries.values[place] for place in left],
    )


def write_block(entries: Columns) -> bytes:
    """Return the bytes of a block."""
    count = len(entries)
    lengths = [REMOVED if value is None else len(value) for value in entries.values]
    return b"".join(
        (
            _COUNT.pack(count),
            struct.pack(f"<{count}H", *map(len, entries.keys)),
            struct.pack(f"<{count}I", *lengths),
            *entries.versions,
            *entries.keys,
            *(value for value in entries.values if value),
        )
    )


def read_block(data: bytes) -> Columns:
    """Return the entries of a block."""
    (count,) = _COUNT.unpack_from(data)
    at = _COUNT.size
    key_lengths = struct.unpack_from(f"<{count}H", data, at)
    at += 2 * count
    lengths = struct.unpack_from(f"<{count}I", data, at)
    at += 4 * count
    keys_at = at + VERSION_BYTES * count
    versions = [data[place : place + VERSION_BYTES] for place in range(at, keys_at, VERSION_BYTES)]
    bounds = [*accumulate(key_lengths, initial=keys_at)]
    keys = [data[start:end] for start, end in pairwise(bounds)]
    values: list[Value]
    if REMOVED in lengths:
        values = []
        at = bounds[-1]
        for length in lengths:
            if length == REMOVED:
                values.append(None)
            else:
                values.append(data[at : at + length])
                at += length
    else:
        values = [
            data[start:end] for start, end in pairwise(accumulate(lengths, initial=bounds[-1]))
        ]
    return Columns(keys, versions, values)


_BITS_A_KEY = 10  # with seven probes: one percent false positives
_PROBES = 7
# Not the seed of the hashes that select partitions, which are similar for all keys of a partition.
_SEED = 1
_WORD = (1 << 64) - 1

Hashed = tuple[int, int]
"""Both hashes of a key, from which those of all probes follow."""


def hash_key(key: bytes) -> Hashed:
    """Return the hashes of a key for `may_hold`, the same for every filter."""
    first, second = mmh3.hash64(key, _SEED, True, signed=False)
    return first, second


def hash_keys(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Return the two hashes of each key for `build_filter`."""
    return np.array([hash_key(key) for key in keys], dtype=np.uint64).reshape(len(keys), 2)


def build_filter(hashes: Sequence[npt.NDArray[np.uint64]]) -> bytes:
    """Return the Bloom filter of the keys with these hashes; it has at least one byte."""
    size = max(8, (sum(map(len, hashes)) * _BITS_A_KEY + 7) // 8 * 8)
    marks = np.zeros(size, dtype=bool)
    for part in hashes:
        for probe in range(_PROBES):
            marks[(part[:, 0] + np.uint64(probe) * part[:, 1]) % np.uint64(size)] = True
    return np.packbits(marks, bitorder="little").tobytes()


def may_hold(stored: bytes, key: Hashed) -> bool:
    """Whether this Bloom filter may contain the key: True for all of its keys, and for about 1%
    of all others.
    """
    size = 8 * len(stored)
    first, second = key
    for probe in range(_PROBES):
        bit = ((first + probe * second) & _WORD) % size
        if not stored[bit >> 3] >> (bit & 7) & 1:
            return False
    return True


BLOCK_BYTES = 32 * 1024
_MAGIC = b"adjkvr\x00\x01"  # the last two bytes are the number of the format
_HEAD = struct.Struct("<8sIIQIII")
_OVERHEAD = 24  # bytes of an entry besides key and value: version and lengths


class RunRef(StoredDocument):
    """A run, as the pointer lists it.

    `size` and `footer` are bytes of the run and of its footer, `count` is the number of entries,
    including removed ones. `first` and `last` are numbers of commits, and `newest` is the time of
    the last one, in milliseconds since 1970.
    """

    id: str
    size: int = Field(ge=0)
    footer: int = Field(ge=0)
    count: int = Field(ge=0)
    first: int
    last: int
    newest: int


@dataclass(frozen=True, slots=True)
class RunIndex:
    """The content of a run's footer.

    For each block `checksums`, `counts` of entries and its first key (`firsts`). `offsets` has one
    more, the end of the last block.
    """

    offsets: tuple[int, ...]
    checksums: tuple[int, ...]
    counts: tuple[int, ...]
    firsts: tuple[bytes, ...]
    filter: bytes
    tokens: bytes

    def block_of(self, key: bytes) -> int:
        """Return the number of the block that has the key, if the run has it; -1 if the key
        precedes all blocks.
        """
        return bisect_right(self.firsts, key) - 1


class RunWriter:
    """Writes a run: pass entries in key order to `add`, then call `finish`. Both call `write`
    with bytes.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._offsets = [0]
        self._checksums: list[int] = []
        self._counts: list[int] = []
        self._firsts: list[bytes] = []
        self._hashes: list[npt.NDArray[np.uint64]] = []
        self._open = Columns([], [], [])
        self._size = 0

    def add(self, entries: Columns) -> None:
        """Append entries, whose keys must be greater than all previous ones."""
        self._hashes.append(hash_keys(entries.keys))
        start = 0
        for place, (key, value) in enumerate(zip(entries.keys, entries.values, strict=True), 1):
            self._size += len(key) + len(value or b"") + _OVERHEAD
            if self._size >= BLOCK_BYTES:
                self._extend(entries, start, place)
                self._close()
                start = place
        self._extend(entries, start, len(entries))

    def finish(self, tokens: bytes) -> dict[str, int]:
        """Write the last block and the footer; return the fields `size`, `footer` and `count` of
        the `RunRef`.
        """
        if len(self._open):
            self._close()
        number = len(self._counts)
        stored_filter = build_filter(self._hashes)
        body = b"".join(
            (
                struct.pack(f"<{number + 1}Q", *self._offsets),
                struct.pack(f"<{number}I", *self._checksums),
                struct.pack(f"<{number}I", *self._counts),
                struct.pack(f"<{number}H", *map(len, self._firsts)),
                *self._firsts,
                stored_filter,
                tokens,
            )
        )
        sizes = (sum(map(len, self._firsts)), len(stored_filter), len(tokens))
        count = sum(self._counts)
        footer = _HEAD.pack(_MAGIC, zlib.crc32(body), number, count, *sizes) + body
        self._write(footer)
        return {"size": self._offsets[-1] + len(footer), "footer": len(footer), "count": count}

    def _extend(self, entries: Columns, start: int, end: int) -> None:
        """Add entries to the open block."""
        self._open.keys += entries.keys[start:end]
        self._open.versions += entries.versions[start:end]
        self._open.values += entries.values[start:end]

    def _close(self) -> None:
        """Write the open block, and begin another one."""
        block = write_block(self._open)
        self._write(block)
        self._offsets.append(self._offsets[-1] + len(block))
        self._checksums.append(zlib.crc32(block))
        self._counts.append(len(self._open))
        self._firsts.append(self._open.keys[0])
        self._open = Columns([], [], [])
        self._size = 0


def read_footer(data: bytes, where: str) -> RunIndex:
    """Return the content of a footer. Raises MalformedDocumentError if it is damaged or of
    another format.
    """
    if len(data) < _HEAD.size or data[:8] != _MAGIC:
        raise damaged_object_error(
            where, f"its footer begins with {data[:8]!r}, expected {_MAGIC!r}"
        )
    _, checksum, number, _, firsts_size, filter_size, tokens_size = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if zlib.crc32(body) != checksum:
        raise damaged_object_error(where, "its footer has another checksum than was stored with it")
    arrays = struct.Struct(f"<{number + 1}Q{number}I{number}I{number}H")
    numbers = arrays.unpack_from(body)
    lengths = numbers[3 * number + 1 :]
    at = arrays.size
    firsts = tuple(body[start:end] for start, end in pairwise(accumulate(lengths, initial=at)))
    at += firsts_size
    return RunIndex(
        numbers[: number + 1],
        numbers[number + 1 : 2 * number + 1],
        numbers[2 * number + 1 : 3 * number + 1],
        firsts,
        body[at : at + filter_size],
        body[at + filter_size : at + filter_size + tokens_size],
    )


def damaged_object_error(where: str, problem: str) -> MalformedDocumentError:
    """Return the error for a damaged object of a segment."""
    step = (
        "Restore this object from a backup or an older object version; for a newer format, upgrade"
        " dagster-adjunct."
    )
    return MalformedDocumentError(f"{where} can't be read: {problem}.", step, document=where)


# Reading runs from a store: footers and blocks by ranges, verified, with a cache of bounded size.

S = TypeVar("S")
T = TypeVar("T")

_WHOLE = 256 * 1024  # a run up to this size is read by one request
_SPAN = 4 * 1024 * 1024  # adjacent blocks are read together, up to this size
_WEIGHT = 3  # in memory an entry takes about three times its stored bytes


class _Kept(NamedTuple):
    """A footer or block in the cache, and about how many bytes of memory it takes."""

    weight: int
    content: RunIndex | Columns


class WantedBlock(NamedTuple):
    """A block to fetch: its run, the run's index, and its number."""

    run: RunRef
    run_index: RunIndex
    number: int


_FOOTER = -1  # stands for the number of a block


class BlockCache:
    """The most recently used footers and blocks, up to `size` bytes. They never change, so they
    are always valid.
    """

    def __init__(self, size: int) -> None:
        # By object key, and number of the block, `_FOOTER` for the footer.
        self._kept: LRUCache[tuple[str, int], _Kept] = LRUCache(
            size, getsizeof=attrgetter("weight")
        )
        self._lock = threading.Lock()

    def get(self, key: tuple[str, int]) -> RunIndex | Columns | None:
        """Return a footer or block; None if it is not kept."""
        with self._lock:
            kept = self._kept.get(key)
        return None if kept is None else kept.content

    def put(self, key: tuple[str, int], content: RunIndex | Columns, size: int) -> None:
        """Keep a footer or block of `size` stored bytes, unless it is too large."""
        weight = size * (_WEIGHT if isinstance(content, Columns) else 1)
        with self._lock:
            if weight <= self._kept.maxsize:
                self._kept[key] = _Kept(weight, content)


class RunObjects:
    """The objects of a segment's runs, whose keys begin with `prefix`, for any thread.

    Raises ObjectNotFoundError for a missing run, MalformedDocumentError for a damaged one, and
    StoreUnavailableError.
    """

    def __init__(self, store: ObjectStore, prefix: str, cache: BlockCache) -> None:
        self.store = store
        self.prefix = prefix
        self._cache = cache

    def key(self, run: str) -> str:
        """Return the object key of the run with this id."""
        return f"{self.prefix}/runs/{run}"

    def indexes(self, runs: Sequence[RunRef]) -> list[RunIndex]:
        """Return the indexes of several runs, fetched concurrently."""
        return _at_once(self.index, runs)

    def index(self, run: RunRef) -> RunIndex:
        """Return the index of a run."""
        key = self.key(run.id)
        kept = self._cache.get((key, _FOOTER))
        if isinstance(kept, RunIndex):
            return kept
        start = 0 if run.size <= _WHOLE else run.size - run.footer
        data = self.store.get_range(key, start, run.size - start)
        if len(data) != run.size - start:
            raise damaged_object_error(
                self._where(key),
                f"it ends after {start + len(data):,} bytes, expected {run.size:,}",
            )
        index = read_footer(data[len(data) - run.footer :], self._where(key))
        self._cache.put((key, _FOOTER), index, run.footer)
        if start == 0:
            self._keep(key, index, range(len(index.counts)), data)
        return index

    def blocks(self, run: RunRef, index: RunIndex, first: int, last: int) -> list[Columns]:
        """Return the blocks `first` to `last`, both included, of a run; one request fetches
        adjacent ones.
        """
        key = self.key(run.id)
        blocks_by_number = {
            number: self._cache.get((key, number)) for number in range(first, last + 1)
        }
        missing = []
        for number, block in blocks_by_number.items():
            if block is None:
                missing.append(number)
        for blocks in _at_once(
            lambda span: self._fetch(key, index, span), [*_spans(missing, index)]
        ):
            blocks_by_number.update(blocks)
        return [block for block in blocks_by_number.values() if isinstance(block, Columns)]

    def fetch_at_once(self, wanted: Sequence[WantedBlock]) -> list[Columns]:
        """Return these blocks, fetched concurrently."""

        def fetch(block: WantedBlock) -> Columns:
            (fetched,) = self.blocks(block.run, block.run_index, block.number, block.number)
            return fetched

        return _at_once(fetch, wanted)

    def _fetch(self, key: str, index: RunIndex, numbers: range) -> dict[int, Columns]:
        """Return the blocks with these consecutive numbers, by number, from the store."""
        start = index.offsets[numbers[0]]
        end = index.offsets[numbers[-1] + 1]
        data = self.store.get_range(key, start, end - start)
        return self._keep(key, index, numbers, data)

    def _keep(self, key: str, index: RunIndex, numbers: range, data: bytes) -> dict[int, Columns]:
        """Verify and cache the blocks with these consecutive numbers, whose bytes are `data`;
        return them by number.
        """
        origin = 0
        if numbers:
            origin = index.offsets[numbers[0]]
        blocks = {}
        for number in numbers:
            part = data[index.offsets[number] - origin : index.offsets[number + 1] - origin]
            if zlib.crc32(part) != index.checksums[number]:
                raise damaged_object_error(
                    self._where(key), f"block {number} has another checksum than in its footer"
                )
            blocks[number] = read_block(part)
            self._cache.put((key, number), blocks[number], len(part))
        return blocks

    def _where(self, key: str) -> str:
        """Return what errors call the object with this key."""
        return f"run {key!r} in {self.store.url}"


def _spans(numbers: Sequence[int], index: RunIndex) -> Iterator[range]:
    """Yield ranges of adjacent block numbers to fetch by one request each, of at most _SPAN
    bytes if possible.
    """
    start = 0
    for place in range(1, len(numbers) + 1):
        is_adjacent = place < len(numbers) and numbers[place] == numbers[place - 1] + 1
        if is_adjacent:
            size = index.offsets[numbers[place] + 1] - index.offsets[numbers[start]]
            if size <= _SPAN:
                continue
        yield range(numbers[start], numbers[place - 1] + 1)
        start = place


def _at_once(work: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """Return the results of `work` for all items; several run in threads of a pool.

    `work` must not wait for other work in this pool.
    """
    if len(items) < 2:
        return [work(item) for item in items]
    return list(threads("runs", 16).map(work, items))
