"""Opens files that may be compressed, and says what is wrong with those that can't be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dagster_adjunct.resources.errors import AdjunctError, SchemaMismatchError, file_error
from dagster_adjunct.resources.lazy_modules import pa


def unreadable_file_error(where: str, error: Exception) -> AdjunctError:
    """Return the error for a file that is damaged, or that the file system can't read."""
    if isinstance(error, OSError) and error.errno:  # of the file system, not of a decoder
        return file_error(error, error.filename or where, where)
    reason = str(error) or type(error).__name__
    return SchemaMismatchError(
        f"{where} can't be read: {reason.splitlines()[0].rstrip('.')}.",
        "Deliver the file again, complete and in the declared format.",
    )


_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


def open_decompressed(path: Path, name: str) -> Any:
    """Return a stream of the decompressed bytes of the file at `path`; `name`, its original
    name, tells the codec.
    """
    raw = pa.OSFile(str(path), mode="r")
    codec = _CODECS.get(name[name.rfind(".") :].lower())
    if codec is None:
        return raw
    return pa.CompressedInputStream(raw, codec)
