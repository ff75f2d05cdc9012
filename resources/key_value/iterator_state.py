"""`IteratorState`: where an iteration stands, for another process to go on from.

| format | kind | incarnation | what is iterated, hashed | partition | key handed out last | checksum |
| 1      | 1    | 8           | 16                       | 4         | any                 | 8        |   bytes
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value.table_segment import TableId
from dagster_adjunct.resources.key_value_errors import IteratorStateError

_FORMAT = 1
_HEAD = struct.Struct(">Bc8s16s")
_BEFORE_KEY = _HEAD.size + 4
_CHECK_BYTES = 8


@dataclass(frozen=True, slots=True)
class IteratorState:
    """The place behind a page's last item. It is good for the same table (not for one that was created anew), kind,
    family, range and partitions; the page size may be another one."""

    _bytes: bytes

    def to_bytes(self) -> bytes:
        """Return the state for storing elsewhere: 38 bytes and those of a key."""
        return self._bytes

    @staticmethod
    def from_bytes(stored: bytes) -> IteratorState:
        """Return what `to_bytes` gave. Raises IteratorStateError for anything else."""
        if (
            not isinstance(stored, bytes)
            or len(stored) < _BEFORE_KEY + _CHECK_BYTES
            or _checksum(stored[:-_CHECK_BYTES]) != stored[-_CHECK_BYTES:]
        ):
            raise IteratorStateError(
                f"{stored!r:.60} is no state of an iterator, or was damaged.", "Give what to_bytes() returned, or None."
            )
        if stored[0] != _FORMAT:
            raise IteratorStateError(
                f"the state of an iterator has format {stored[0]}; this release reads {_FORMAT}.",
                "Go on with the release that wrote it, or begin anew.",
            )
        return IteratorState(stored)


@dataclass(frozen=True, slots=True)
class Iteration:
    """What is iterated: `values` says entries, else keys; segments in the order of `partitions`, a range of each."""

    table: TableId
    values: bool
    partitions: tuple[int, ...]
    within: KeyRange

    @property
    def head(self) -> bytes:
        """What all states of the iteration begin with; `state_behind` takes it."""
        return _HEAD.pack(_FORMAT, self._kind, bytes.fromhex(self.table.incarnation), self._hash())

    def resumed(self, state: IteratorState) -> tuple[int, KeyRange]:
        """Return the place among `partitions` to go on at, and what is left of its range.

        Raises IteratorStateError for the state of anything else.
        """
        if not isinstance(state, IteratorState):
            raise IteratorStateError(
                f"key-value table {self.table}: {state!r:.60} is no state of an iterator.",
                "Give the state of a page, or None; IteratorState.from_bytes reads a stored one.",
                scope=self.table.scope,
                table=self.table.name,
            )
        stored = IteratorState.from_bytes(state.to_bytes()).to_bytes()
        _, kind, incarnation, iterated = _HEAD.unpack_from(stored)
        partition = int.from_bytes(stored[_HEAD.size : _BEFORE_KEY], "big")
        if incarnation != bytes.fromhex(self.table.incarnation):
            self._refuse("of another table, or of one that was deleted since")
        if kind != self._kind:
            self._refuse(f"of an iterator over {'keys' if self.values else 'entries'}")
        if iterated != self._hash() or partition not in self.partitions:
            self._refuse("of another family or range, or of other partitions")
        return self.partitions.index(partition), self.within.after(stored[_BEFORE_KEY:-_CHECK_BYTES])

    @property
    def _kind(self) -> bytes:
        return b"e" if self.values else b"k"

    def _hash(self) -> bytes:
        end = b"-" if self.within.end is None else b"+" + self.within.end
        partitions = ",".join(map(str, self.partitions)).encode()
        parts = (self.within.start, end, partitions)
        return hashlib.blake2b(b"".join(len(part).to_bytes(4, "big") + part for part in parts), digest_size=16).digest()

    def _refuse(self, why: str) -> None:
        raise IteratorStateError(
            f"key-value table {self.table}: the state is {why}.",
            "Give it to the same iterator over the same table, family and range, or begin anew with None.",
            scope=self.table.scope,
            table=self.table.name,
        )


def state_behind(head: bytes, partition: int, key: bytes) -> IteratorState:
    """Return the state of a page of the iteration with this head; its last item is this table key."""
    stored = head + partition.to_bytes(4, "big") + key
    return IteratorState(stored + _checksum(stored))


def _checksum(stored: bytes) -> bytes:
    return hashlib.blake2b(stored, digest_size=_CHECK_BYTES).digest()
