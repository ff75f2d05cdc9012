"""Blocks: some tens of kilobytes of a run, that are read and checked as one.

    | n | length of each key | length of each value | version of each | keys | values |

Numbers are little-endian: n and the lengths of values have four bytes, the lengths of keys two. A removed key has the
length 2^32 - 1 and no value: it hides what older runs hold.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from dagster_adjunct.resources.key_value.key_version import VERSION_BYTES

Value = bytes | None
"""What a key has in a run, or in the log: None says that it was removed."""
Versioned = tuple[bytes, Value]
"""The version and the value."""

_COUNT = struct.Struct("<I")
_REMOVED = 2**32 - 1


class Columns:
    """Entries in the order of their keys, which differ; `values` has None for a removed one."""

    __slots__ = ("keys", "values", "versions")

    def __init__(self, keys: list[bytes], versions: list[bytes], values: list[Value]) -> None:
        self.keys, self.versions, self.values = keys, versions, values

    def __len__(self) -> int:
        return len(self.keys)

    def get(self, key: bytes) -> Versioned | None:
        """Return what is known of a key here, None where that is nothing."""
        place = bisect_left(self.keys, key)
        if place == len(self.keys) or self.keys[place] != key:
            return None
        return self.versions[place], self.values[place]

    def between(self, start: bytes, end: bytes | None) -> Columns:
        """Return the entries from `start` up to `end`, which is not one of them; None is no end."""
        first = bisect_left(self.keys, start) if self.keys and self.keys[0] < start else 0
        last = len(self.keys) if end is None else bisect_left(self.keys, end, first)
        if first == 0 and last == len(self.keys):
            return self
        return Columns(self.keys[first:last], self.versions[first:last], self.values[first:last])


def joined(parts: Sequence[Columns]) -> Columns:
    """Return parts one behind the other as one."""
    if len(parts) == 1:
        return parts[0]
    whole = Columns([], [], [])
    for part in parts:
        whole.keys += part.keys
        whole.versions += part.versions
        whole.values += part.values
    return whole


def without_removed(entries: Columns) -> Columns:
    """Return entries without those that say that a key was removed."""
    if None not in entries.values:
        return entries
    left = [place for place, value in enumerate(entries.values) if value is not None]
    return Columns(
        [entries.keys[place] for place in left],
        [entries.versions[place] for place in left],
        [entries.values[place] for place in left],
    )


def write_block(entries: Columns) -> bytes:
    """Return the bytes of a block of these entries."""
    count = len(entries)
    lengths = [_REMOVED if value is None else len(value) for value in entries.values]
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
    """Return the entries of a block whose checksum was right."""
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
    if _REMOVED in lengths:
        values, at = [], bounds[-1]
        for length in lengths:
            values.append(None if length == _REMOVED else data[at : at + length])
            at += 0 if length == _REMOVED else length
    else:
        values = [data[start:end] for start, end in pairwise(accumulate(lengths, initial=bounds[-1]))]
    return Columns(keys, versions, values)
