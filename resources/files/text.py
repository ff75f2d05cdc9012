"""Text files as streams of bytes, decompressed by the ending of their names."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


def opened(path: Path, name: str) -> Any:
    """Return the decompressed bytes of the file at `path`, which is called `name` where it comes from."""
    import pyarrow as pa

    raw = pa.OSFile(str(path), mode="r")
    codec = _CODECS.get(name[name.rfind(".") :].lower())
    return raw if codec is None else pa.CompressedInputStream(raw, codec)


class Watched(io.RawIOBase):
    """Passes a stream on and remembers its last bytes."""

    KEPT = 64 * 1024

    def __init__(self, source: Any) -> None:
        self._source = source
        self.tail = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        data = bytes(self._source.read(None if size is None or size < 0 else size))
        self.tail = (self.tail + data)[-self.KEPT :] if len(data) < self.KEPT else data[-self.KEPT :]
        return data

    def close(self) -> None:
        self._source.close()
        super().close()
