"""A stored object as a file that pyarrow can seek in, so that only the needed parts are fetched."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.object_store import ObjectStore

_WHOLE = 4 * 1024 * 1024


class ObjectFile(io.RawIOBase):
    """Reads ranges of one object, whose size (bytes) the manifest tells."""

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        self._store, self._key, self._size = store, key, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._at)
        if wanted <= 0:
            return 0
        data = self._store.get_range(self._key, self._at, wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_object(store: ObjectStore, key: str, size: int) -> Any:
    """Return what pyarrow opens to read this object: its bytes while it is small, else a file of ranges."""
    import pyarrow as pa

    if size <= _WHOLE:
        return pa.BufferReader(store.get(key).data)
    return pa.PythonFile(io.BufferedReader(ObjectFile(store, key, size), 1024 * 1024), mode="r")
