"""Runs: immutable objects of entries in the order of their keys, as blocks with an index behind them.

    | block | block | … | footer |

The footer: a head, then of each block where it begins (one more for the end), its checksum, its number of entries and
the length of its first key; then these keys, the filter of all keys, and the tokens of commits. A run is read by
ranges: its footer, whose size the pointer says, then single blocks.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import MalformedDocumentError
from dagster_adjunct.resources.key_value_backends.object_runs.run_blocks import Columns, write_block
from dagster_adjunct.resources.key_value_backends.object_runs.run_filter import build_filter, hashes_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BLOCK_BYTES = 32 * 1024
_MAGIC = b"adjkvr\x00\x01"  # the last two bytes are the number of the format
_HEAD = struct.Struct("<8sIIQIII")
_OVERHEAD = 24  # bytes of an entry beside key and value: version and lengths


@dataclass(frozen=True, slots=True)
class RunIndex:
    """What a footer says: `offsets` of blocks and the end of the last one, `firsts` their first keys."""

    offsets: tuple[int, ...]
    checksums: tuple[int, ...]
    counts: tuple[int, ...]
    firsts: tuple[bytes, ...]
    filter: bytes
    tokens: bytes

    def block_of(self, key: bytes) -> int:
        """Return the block that the key is in, if the run has it; below 0 where it lies before all."""
        return bisect_right(self.firsts, key) - 1


class RunWriter:
    """Makes a run of entries that come in order: give them to `add`, then call `finish`. It writes by `write`."""

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
        """Append entries, whose keys are above all before."""
        self._hashes.append(hashes_of(entries.keys))
        start = 0
        for place, (key, value) in enumerate(zip(entries.keys, entries.values, strict=True), 1):
            self._size += len(key) + len(value or b"") + _OVERHEAD
            if self._size >= BLOCK_BYTES:
                self._extend(entries, start, place)
                self._close()
                start = place
        self._extend(entries, start, len(entries))

    def finish(self, tokens: bytes) -> WrittenRun:
        """Write the rest, and return what was written."""
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
        return WrittenRun(self._offsets[-1] + len(footer), len(footer), count)

    def _extend(self, entries: Columns, start: int, end: int) -> None:
        self._open.keys += entries.keys[start:end]
        self._open.versions += entries.versions[start:end]
        self._open.values += entries.values[start:end]

    def _close(self) -> None:
        block = write_block(self._open)
        self._write(block)
        self._offsets.append(self._offsets[-1] + len(block))
        self._checksums.append(zlib.crc32(block))
        self._counts.append(len(self._open))
        self._firsts.append(self._open.keys[0])
        self._open, self._size = Columns([], [], []), 0


@dataclass(frozen=True, slots=True)
class WrittenRun:
    """A run's size and that of its footer in bytes, and its number of entries, removed ones included."""

    size: int
    footer: int
    count: int


def read_footer(data: bytes, where: str) -> RunIndex:
    """Return what a footer says. Raises MalformedDocumentError where it is damaged, or of another format."""
    if len(data) < _HEAD.size or data[:8] != _MAGIC:
        raise damaged(where, f"its footer begins with {data[:8]!r}, expected {_MAGIC!r}")
    _, checksum, number, _, firsts_size, filter_size, tokens_size = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if zlib.crc32(body) != checksum:
        raise damaged(where, "its footer has another checksum than was stored with it")
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


def damaged(where: str, problem: str) -> MalformedDocumentError:
    """Return the error for an object of a segment that is not what was written."""
    return MalformedDocumentError(
        f"{where} can't be read: {problem}.",
        "Restore this object from a backup or an older object version; for a newer format, upgrade dagster-adjunct.",
        document=where,
    )
