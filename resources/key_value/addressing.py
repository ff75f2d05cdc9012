"""Where an entry lies: the bytes of its table key, and the partition that these are in (PDP-39, "Mapping KVPs").

    with a family      | length of the family | family, UTF-8 | key, serialised |
                       |<------ prefix, which is hashed ----->|
    without            | - length of the key  | key, serialised |
                       |<------ prefix, which is hashed ------>|

A length is two bytes, big-endian; a negative one is its two's complement, so that no family begins like a key without
one. The empty family has the bytes of the empty key without a family, and is refused.

Entries of one table key order are in the order of these bytes: within a family in that of the keys.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from operator import itemgetter

import mmh3

from dagster_adjunct.resources.key_value_errors import KeyTooLongError, SerializationError

LONGEST = 8190
"""Bytes that a family and a key may have together: 8,192 without the two of the length."""
_LENGTH = struct.Struct(">h")
HASH_BITS = 52


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Table keys from `start` up to `end`, which is not in it any more; None is the end of all."""

    start: bytes = b""
    end: bytes | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no key can be in it."""
        return self.end is not None and self.start >= self.end

    def after(self, table_key: bytes) -> KeyRange:
        """Return what of this range lies behind a key."""
        return KeyRange(table_key + b"\0", self.end)


@lru_cache(maxsize=1024)
def family_prefix(family: str) -> bytes:
    """Return what the table keys of a family begin with. Raises SerializationError and KeyTooLongError."""
    if not isinstance(family, str):
        raise SerializationError(
            f"a key family is {family!r}: expected text, or None.", "Give a string.", family=f"{family!r:.80}"
        )
    if not family:
        raise SerializationError(
            "a key family is empty.",
            "Give it at least one character, or None for keys that have no family.",
            family=family,
        )
    try:
        encoded = family.encode()
    except UnicodeEncodeError as error:
        raise SerializationError(
            f"the key family {family!r} is no text: it has half of a surrogate pair at {error.start}.",
            "Give what UTF-8 can hold.",
            family=f"{family!r:.80}",
        ) from None
    if len(encoded) > LONGEST:
        raise KeyTooLongError(
            f"a key family has {len(encoded):,} bytes of UTF-8; a family and a key may have {LONGEST:,} together.",
            "Use a shorter one, such as a hash of it.",
            family=family[:80],
            size=len(encoded),
        )
    return _LENGTH.pack(len(encoded)) + encoded


def table_key(prefix: bytes, key: bytes) -> bytes:
    """Return the table key of a serialised key; `prefix` is that of its family, or empty where it has none."""
    if len(key) + len(prefix) > (LONGEST + 2 if prefix else LONGEST):
        raise KeyTooLongError(
            f"a key of {len(key):,} bytes" + (f" in a family of {len(prefix) - 2:,}" if prefix else "") + " is too "
            f"long: expected at most {LONGEST:,} together.",
            "Use a shorter one, such as a hash of it.",
            size=len(key) + max(len(prefix) - 2, 0),
        )
    return prefix + key if prefix else _LENGTH.pack(-len(key)) + key


def split_table_key(stored: bytes) -> tuple[str | None, bytes]:
    """Return the family, None where there is none, and the serialised key of a table key."""
    (length,) = _LENGTH.unpack_from(stored)
    if length <= 0:
        return None, stored[2:]
    return stored[2 : 2 + length].decode(), stored[2 + length :]


def split_table_keys(stored: Sequence[bytes]) -> tuple[Iterable[str | None], Sequence[bytes]]:
    """Return the families and the serialised keys of table keys, one or more, in their order.

    Fast where all are of one family, which is then repeated without end.
    """
    (length,) = _LENGTH.unpack_from(stored[0])
    if length < 0:  # nothing with a family lies behind
        return repeat(None), list(map(itemgetter(slice(2, None)), stored))
    behind = 2 + length
    if length > 0 and stored[-1].startswith(stored[0][:behind]):
        return repeat(stored[0][2:behind].decode()), list(map(itemgetter(slice(behind, None)), stored))
    families, keys = zip(*map(split_table_key, stored), strict=True)
    return families, keys


def partition_of(prefix: bytes, partitions: int) -> int:
    """Return the partition, from 0, of a family's prefix, or of a table key without a family.

    They are n equal ranges of the high 52 bits of Murmur3: of the first word of its x64 variant of 128 bits, seed 0.
    """
    # By name: mmh3 (5.3.1) passes over a fourth argument that is given by its place, and the hash would be signed.
    high = mmh3.hash64(prefix, 0, True, signed=False)[0] >> (64 - HASH_BITS)
    return high * partitions >> HASH_BITS


def range_of_family(prefix: bytes) -> KeyRange:
    """Return the range of all table keys that begin with `prefix`, which is not empty."""
    end = bytearray(prefix)
    while end and end[-1] == 0xFF:
        end.pop()
    if not end:
        return KeyRange(prefix)
    end[-1] += 1
    return KeyRange(prefix, bytes(end))


def part_of_family(prefix: bytes, beginning: bytes, start: bytes | None, end: bytes | None) -> KeyRange:
    """Return the range of a family's serialised keys that begin with `beginning` and lie from `start` up to `end`."""
    whole = range_of_family(prefix + beginning)
    first = whole.start if start is None else max(whole.start, prefix + start)
    if end is None:
        return KeyRange(first, whole.end)
    return KeyRange(first, prefix + end if whole.end is None else min(whole.end, prefix + end))
