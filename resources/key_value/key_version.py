"""`KeyVersion`: which write of a key somebody has seen (PDP-39)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dagster_adjunct.resources.key_value_errors import KeyValueTableError

TOKEN_BYTES = 12
VERSION_BYTES = 16


def new_token() -> bytes:
    """Return what no other request has: the name of a request, and the beginning of the versions that it writes."""
    return os.urandom(TOKEN_BYTES)


def version_of(token: bytes, place: int) -> bytes:
    """Return the version that the change at this place of a request gives its key. It never comes again."""
    return token + place.to_bytes(VERSION_BYTES - TOKEN_BYTES, "big")


# Not frozen: one is made for each entry that is read, and a frozen one takes twice as long to make.
@dataclass(slots=True, unsafe_hash=True)
class KeyVersion:
    """The version of a key: it changes with every write, also of an equal value, and never comes back.

    Versions are equal or they are not; neither is older. A version from before a delete is never valid again.
    """

    _bytes: bytes

    def to_bytes(self) -> bytes:
        """Return the version for storing elsewhere: 16 bytes."""
        return self._bytes

    @staticmethod
    def from_bytes(stored: bytes) -> KeyVersion:
        """Return what `to_bytes` gave. Raises KeyValueTableError for anything else."""
        if not isinstance(stored, bytes) or len(stored) != VERSION_BYTES:
            raise KeyValueTableError(
                f"{stored!r:.60} is no version of a key: expected {VERSION_BYTES} bytes.",
                "Give what KeyVersion.to_bytes() returned.",
            )
        return KeyVersion(stored)

    def __repr__(self) -> str:
        return f"KeyVersion({self._bytes.hex()})"

    def __str__(self) -> str:
        return self._bytes.hex()
