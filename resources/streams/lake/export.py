"""Exports records to local Parquet files, atomically."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.file_errors import translate_file_errors

_GROUP = 65_536


def export_records(parts: Iterable[pa.Table], target: Path, *, records_per_file: int | None = None) -> tuple[int, int]:
    """Write tables of one schema to `target`; return the numbers of records and files.

    `target` is a new .parquet file, or with `records_per_file` a new folder of files with at most that many records.
    It appears when it is complete; until then its data is next to it, under a name that begins with a dot, which is
    deleted if this fails, but stays if the process is killed. Raises ConfigurationError if `target` exists.
    """
    check_export_target(target, records_per_file)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        if records_per_file is None:
            counts = _write_files(parts, iter([partial]), None, target)
            with _file_errors(target):
                _publish_file(partial, target)
        else:
            with _file_errors(target):
                partial.mkdir()
            counts = _write_files(parts, _part_paths(partial), records_per_file, target)
            with _file_errors(target):
                _publish_folder(partial, target)
    finally:
        with suppress(OSError):
            if partial.is_dir():
                shutil.rmtree(partial)
            partial.unlink(missing_ok=True)
    return counts


def _file_errors(target: Path) -> AbstractContextManager[None]:
    return translate_file_errors(target.absolute().parent, f"--to {target}")


def check_export_target(target: Path, records_per_file: int | None) -> None:
    """Raise ConfigurationError if `target` can't be written."""
    if records_per_file is None and target.suffix != ".parquet":
        step = "Use a name that does, or give --records-per-file for a folder of files."
        raise ConfigurationError(f"--to {target} does not end in .parquet.", step, setting="--to")
    if records_per_file is not None and records_per_file < 1:
        problem = f"--records-per-file {records_per_file}: expected 1 or more."
        raise ConfigurationError(problem, setting="--records-per-file")
    if target.exists() or target.is_symlink():
        raise _exists(target)
    if not target.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--to {target}: there is no folder {target.parent}.", "Create it first.", setting="--to"
        )


def _write_files(parts: Iterable[pa.Table], paths: Iterator[Path], limit: int | None, target: Path) -> tuple[int, int]:
    """Write at most `limit` records a file, and at least one file, for the columns."""
    rows = files = room = 0
    writer: pq.ParquetWriter | None = None
    try:
        for part in parts:
            left = part
            while writer is None or left.num_rows:
                with _file_errors(target):
                    if writer is None or (limit is not None and room == 0):
                        _close(writer)
                        writer, room = pq.ParquetWriter(next(paths), part.schema, compression="zstd"), limit or 0
                        files += 1
                    now = left if limit is None else left.slice(0, room)
                    writer.write_table(now, row_group_size=_GROUP)
                left, rows, room = left.slice(now.num_rows), rows + now.num_rows, room - now.num_rows
    finally:
        with _file_errors(target):
            _close(writer)
    return rows, files


def _close(writer: object) -> None:
    if writer is not None:
        writer.close()  # type: ignore[attr-defined]


def _part_paths(folder: Path) -> Iterator[Path]:
    number = 0
    while True:
        yield folder / f"part-{number:05d}.parquet"
        number += 1


def _publish_file(partial: Path, target: Path) -> None:
    _sync(partial)
    try:
        os.link(partial, target)  # unlike a rename, this never replaces a file
    except FileExistsError:
        raise _exists(target) from None
    except OSError:  # a file system without links
        partial.rename(target)
    _sync(target.parent)


def _publish_folder(partial: Path, target: Path) -> None:
    for path in partial.iterdir():
        _sync(path)
    try:
        partial.rename(target)  # can only replace an empty folder
    except OSError:
        if target.exists():
            raise _exists(target) from None
        raise
    _sync(target.parent)


def _sync(path: Path) -> None:
    with suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _exists(target: Path) -> ConfigurationError:
    return ConfigurationError(f"{target} already exists.", "Remove it, or use another name.", setting="--to")
