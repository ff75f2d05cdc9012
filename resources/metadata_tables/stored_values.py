"""What a table keeps of an object: when it was written, and its bytes or, of a long one, where these are.

    | 1 | kind | modified |  bytes
      1    1       8         kind 0: the object; kind 1: JSON, {"object": key in the object store, "size": n}

`modified` is in microseconds since 1970, UTC, big-endian.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from dagster_adjunct.resources.errors import MalformedDocumentError

_FORMAT = 1
_HEAD = struct.Struct(">BBq")
_EPOCH = datetime.fromtimestamp(0, UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A long object: the key of its bytes in the object store, and how many these are."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class StoredValue:
    """An object as a table keeps it: when it was written, by the object store's clock, and its bytes."""

    modified: datetime
    data: bytes | Elsewhere

    @property
    def size(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.size

    def to_bytes(self) -> bytes:
        """Return what is stored."""
        kind, data = 0, self.data
        if isinstance(data, Elsewhere):
            kind, data = 1, json.dumps({"object": data.key, "size": data.size}).encode()
        return _HEAD.pack(_FORMAT, kind, (self.modified - _EPOCH) // _MICROSECOND) + data


def parse_value(stored: bytes, where: str) -> StoredValue:
    """Return what `to_bytes` gave. Raises MalformedDocumentError, which says `where`."""
    try:
        format_found, kind, modified = _HEAD.unpack_from(stored)
        if format_found != _FORMAT or kind not in (0, 1):
            raise ValueError(f"it has format {format_found} and kind {kind}; this release reads format {_FORMAT}")
        data: bytes | Elsewhere = stored[_HEAD.size :]
        if kind:
            reference = json.loads(stored[_HEAD.size :])
            data = Elsewhere(str(reference["object"]), int(reference["size"]))
    except (struct.error, ValueError, TypeError, KeyError) as error:
        raise MalformedDocumentError(
            f"{where} can't be read: {error}.",
            "Read it with a newer release of dagster-adjunct, or restore the table from a backup.",
            document=where,
        ) from error
    return StoredValue(_EPOCH + modified * _MICROSECOND, data)
