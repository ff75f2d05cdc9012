"""Where an entry of a segment lies in its DynamoDB table, and which items a range of table keys is in.

    item                     hash key "h"                      sort key "s"         other attributes
    entry with a family      "f" | partition | family, UTF-8   0x01 | key           "v" version, "d" value
    entry without a family   "k" | partition                   table key            "v" version, "d" value
    a family of the segment  "d" | partition                   prefix of family     "n" term of its listing
    progress of forgetting   "d" | partition                   0x00                 "n" term, "a" when, "p" place
    gate                     "g" | partition | number          0x00                 "n" term; none where it is sealed
    burnt token              "g" | partition | number          0x01                 "t" the latest token

A partition is four bytes, big-endian. A sort key may not be empty, and the key of an entry may. A gate that is not
there has term 0. Families are listed, since DynamoDB can't tell the hash keys that a table has in an order;
`dynamodb_families` says what terms are for, and how a family is forgotten whose entries are gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_adjunct.resources.key_value.addressing import KeyRange, range_of_family
from dagster_adjunct.resources.key_value.table_segment import SegmentLimits

GATES = 64  # of a partition: two writes at a time that check the same one may hinder each other
KEY_SCHEMA = {"h": "B", "s": "B"}
_LONGEST_SORT_KEY = 1024
_LONGEST_KEY = _LONGEST_SORT_KEY - 2  # without a family the sort key has two bytes of length
_LARGEST_ITEM = 400 * 1024
_HASH_BESIDES_FAMILY = 5
_NAMES_AND_VERSION = len("hsvd") + 16
_LARGEST_KEYS = _HASH_BESIDES_FAMILY + (_LONGEST_SORT_KEY - 2) + _LONGEST_SORT_KEY

LIMITS = SegmentLimits(
    table_key=_LONGEST_SORT_KEY + _LONGEST_KEY,
    family_prefix=_LONGEST_SORT_KEY,  # it is the sort key of the list of families
    key=_LONGEST_KEY,
    value=_LARGEST_ITEM - _LARGEST_KEYS - _NAMES_AND_VERSION,
    changes=99,  # of the 100 actions of a transaction one checks the gate
    request=4_000_000,  # of 4 MiB: names, versions and hash keys count too
)

_FIRST_FAMILY, _AFTER_FAMILIES = b"\0\1", b"\x80\0"
_EMPTY_KEY = b"\0\0"
_ABOVE_ALL = b"\xff" * _LONGEST_SORT_KEY

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeyStretch:
    """Items of one hash key in the order of their sort keys, `lowest` and `highest` among them.

    A table key is `prefix` and what follows the first `cut` bytes of the sort key.
    """

    hash_key: bytes
    lowest: bytes
    highest: bytes
    prefix: bytes = b""
    cut: int = 0

    def table_key(self, sort_key: bytes) -> bytes:
        return self.prefix + sort_key[self.cut :]


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The items of one partition in the DynamoDB table `table`."""

    table: str
    partition: int

    def entry(self, table_key: bytes) -> Item:
        """Return the key of the item of an entry."""
        length = int.from_bytes(table_key[:2], "big", signed=True)
        if length <= 0:
            return _item_key(self._hash(b"k"), table_key)
        return _item_key(self._hash(b"f") + table_key[2 : 2 + length], b"\1" + table_key[2 + length :])

    def family(self, prefix: bytes) -> Item:
        """Return the item by which a family is listed."""
        return _item_key(self._hash(b"d"), prefix)

    def progress(self) -> Item:
        """Return the item that says how far those families are forgotten that have no entries."""
        return _item_key(self._hash(b"d"), b"\0")

    def gate(self, number: int) -> Item:
        return _item_key(self._gate_hash(number), b"\0")

    def burnt(self, number: int) -> Item:
        return _item_key(self._gate_hash(number), b"\1")

    def in_family(self, prefix: bytes, within: KeyRange) -> KeyStretch:
        """Return the items of a family that are in a range, which has a key of the family in it."""
        lowest = within.start[len(prefix) :] if within.start.startswith(prefix) else b""
        end = within.end
        highest = end[len(prefix) :] if end is not None and end.startswith(prefix) else _ABOVE_ALL
        hash_key = self._hash(b"f") + prefix[2:]
        return KeyStretch(hash_key, _sort_key(b"\1" + lowest), _sort_key(b"\1" + highest), prefix, 1)

    def before_families(self, within: KeyRange) -> KeyStretch | None:
        """Return where the empty key without a family lies, which comes before all families, if the range has it."""
        if within.start > _EMPTY_KEY or (within.end is not None and within.end <= _EMPTY_KEY):
            return None
        return KeyStretch(self._hash(b"k"), _EMPTY_KEY, _EMPTY_KEY)

    def families(self, within: KeyRange) -> KeyStretch | None:
        """Return the list of the families that have keys in a range."""
        first = family_at(within.start) or within.start
        lowest = max(first, _FIRST_FAMILY)
        highest = _AFTER_FAMILIES if within.end is None else min(within.end, _AFTER_FAMILIES)
        return KeyStretch(self._hash(b"d"), _sort_key(lowest), _sort_key(highest)) if lowest < highest else None

    def after_families(self, within: KeyRange) -> KeyStretch | None:
        """Return the items without a family that are in a range, but for the empty key."""
        lowest = max(within.start, _AFTER_FAMILIES)
        highest = _ABOVE_ALL if within.end is None else within.end
        return KeyStretch(self._hash(b"k"), _sort_key(lowest), _sort_key(highest)) if lowest < highest else None

    def _hash(self, kind: bytes) -> bytes:
        return kind + self.partition.to_bytes(4, "big")

    def _gate_hash(self, number: int) -> bytes:
        return self._hash(b"g") + bytes([number])


def table_key_of(item: Item) -> bytes:
    """Return the table key of an entry by its item."""
    hash_key: bytes = item["h"]["B"]
    sort_key: bytes = item["s"]["B"]
    if hash_key[:1] == b"k":
        return sort_key
    family = hash_key[_HASH_BESIDES_FAMILY:]
    return len(family).to_bytes(2, "big") + family + sort_key[1:]


def behind_family(prefix: bytes) -> bytes:
    """Return the first table key that may come after those of a family."""
    end = range_of_family(prefix).end
    assert end is not None  # no length begins with 0xff
    return end


def family_at(start: bytes) -> bytes | None:
    """Return the prefix of the family that a key or bound lies in; None where it is in none."""
    length = int.from_bytes(start[:2], "big", signed=True)
    return start[: 2 + length] if length > 0 and len(start) >= 2 + length else None


def _sort_key(bound: bytes) -> bytes:
    """Return what a bound may be in a query. One that is cut lets in a neighbour, whom the reader drops."""
    return bound[:_LONGEST_SORT_KEY]


def _item_key(hash_key: bytes, sort_key: bytes) -> Item:
    return {"h": {"B": hash_key}, "s": {"B": sort_key}}
