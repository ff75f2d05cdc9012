"""Opens files that may be compressed, and says what is wrong with those that can't be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dagster_adjunct.resources.errors import SchemaMismatchError, file_error
from dagster_adjunct.resources.lazy_modules import pa


@contextmanager
def translate_read_errors(where: str, *damage: type[Exception]) -> Iterator[None]:
    """Raise errors about the contents of a damaged file as `damaged_file_error` describes them, and
    those of the file system as `file_error` does.

    Errors about contents are those of Arrow and of decompression, and `damage`. Too little memory
    and a cancelled read say nothing about the file, and are raised as they are.
    """
    try:
        yield
    except (MemoryError, pa.ArrowCancelled) as error:
        error.add_note(f"It was raised while {where} was read.")
        raise
    except OSError as error:
        if error.errno is not None:  # of the file system, not of a decoder
            raise file_error(error, error.filename or where, where) from error
        raise damaged_file_error(where, error) from error
    except (pa.ArrowException, UnicodeDecodeError, *damage) as error:  # names in a footer
        raise damaged_file_error(where, error) from error


def damaged_file_error(where: str, error: Exception) -> SchemaMismatchError:
    """Return the error for a file whose contents can't be read."""
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
