"""Exports records to local Parquet files, atomically."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from itertools import count
from pathlib import Path

from dagster_adjunct.resources.errors import ConfigurationError, translate_file_errors
from dagster_adjunct.resources.lazy_modules import pa, pq

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
        else:
            with _file_errors(target):
                partial.mkdir()
            names = (partial / f"part-{number:05d}.parquet" for number in count())
            counts = _write_files(parts, names, records_per_file, target)
        with _file_errors(target):
            _publish(partial, target)
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
    with _file_errors(target):
        exists, has_folder = target.exists() or target.is_symlink(), target.absolute().parent.is_dir()
    if exists:
        raise _exists(target)
    if not has_folder:
        problem = f"--to {target}: there is no folder {target.parent}."
        raise ConfigurationError(problem, "Create it first.", setting="--to")


def _write_files(parts: Iterable[pa.Table], paths: Iterator[Path], limit: int | None, target: Path) -> tuple[int, int]:
    """Write at most `limit` records a file, and at least one file, for the columns."""
    rows = files = room = 0
    with ExitStack() as opened:
        writer: pq.ParquetWriter | None = None
        for part in parts:
            left = part
            while writer is None or left.num_rows:
                with _file_errors(target):
                    if writer is None or (limit is not None and room == 0):
                        opened.close()
                        writer = opened.enter_context(pq.ParquetWriter(next(paths), part.schema, compression="zstd"))
                        files, room = files + 1, limit or 0
                    now = left if limit is None else left.slice(0, room)
                    writer.write_table(now, row_group_size=_GROUP)
                left, rows, room = left.slice(now.num_rows), rows + now.num_rows, room - now.num_rows
        with _file_errors(target):
            opened.close()
    return rows, files


def _publish(partial: Path, target: Path) -> None:
    for path in partial.iterdir() if partial.is_dir() else [partial]:
        _sync(path)
    try:
        if partial.is_dir():
            partial.rename(target)  # can only replace an empty folder
        else:
            os.link(partial, target)  # unlike a rename, this never replaces a file
    except OSError as error:
        if target.exists():
            raise _exists(target) from None
        if partial.is_dir() or isinstance(error, FileExistsError):
            raise
        partial.rename(target)  # on a file system without links
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
