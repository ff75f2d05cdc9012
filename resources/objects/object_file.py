"""A stored object as a file that pyarrow can seek in, so that only the needed parts are fetched."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Buffer = bytes | memoryview

    from dagster_adjunct.resources.objects.object_store import ObjectStore

_WHOLE = 4 * 1024 * 1024


class RangedFile(io.RawIOBase):
    """A file of `size` bytes of which only what is asked for is fetched: `read` gives so many bytes from a place on."""

    def __init__(self, size: int, read: Callable[[int, int], Buffer]) -> None:
        self._size, self._read = size, read
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
        data = memoryview(self._read(self._at, wanted))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_object(store: ObjectStore, key: str, size: int) -> Any:
    """Return what pyarrow opens to read this object: its bytes while it is small, else a file of ranges."""
    import pyarrow as pa

    if size <= _WHOLE:
        return pa.BufferReader(store.get(key).data)
    return pa.PythonFile(io.BufferedReader(RangedFile(size, partial(store.get_range, key)), 1024 * 1024), mode="r")
