"""Reads the admitted files of a folder: their records, with the columns that files do not contain.

Records of files that this process has just read to count them are kept in memory, up to a limit,
for the read that follows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cachetools import LRUCache

from dagster_adjunct.resources.file_streams.feed import FilePiece
from dagster_adjunct.resources.file_streams.log import AdmittedFile
from dagster_adjunct.resources.files.formats import DeclaredFiles
from dagster_adjunct.resources.files.tree import FileTree, ListedFile, source_changed_error
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.texts import convert_texts
from dagster_adjunct.resources.schemas.types import arrow_type

_MOST_KEPT = 128 * 1024 * 1024
_MOST_OF_A_FILE = 32 * 1024 * 1024

_Tables = tuple[tuple[int, "pa.Table"], ...]


def _size(tables: _Tables) -> int:
    """Return the bytes of a file's records in memory, and 1 for the file itself."""
    size: int = sum(table.nbytes for _, table in tables)
    return size + 1


# By declaration, path and ETag: the records of files that this process has counted.
_counted: LRUCache[tuple[str, ...], _Tables] = LRUCache(_MOST_KEPT, getsizeof=_size)
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class AddedColumns:
    """The columns of a stream that files do not contain, by name: `parts` of the path, the path
    itself, and the time when the file was modified.
    """

    schema: Schema
    path: str | None = None
    modified: str | None = None

    def of(self, file: AdmittedFile, parts: dict[str, str | None]) -> dict[str, pa.Array]:
        """Return the values of a file's records, in arrays of one. `parts` are the texts of the
        other columns.
        """
        added = {}
        for field in self.schema.fields:
            if field.name == self.path:
                added[field.name] = pa.array([file.path], pa.string())
            elif field.name == self.modified:
                at = pa.array([file.modified], pa.int64())
                added[field.name] = at.cast(arrow_type("timestamp"))
            else:
                text = pa.array([parts[field.name]], pa.string())
                added[field.name] = convert_texts(text, field.type)
        return added


@dataclass(frozen=True, slots=True)
class FileReader:
    """Reads admitted files. `parts_of` returns the values of columns that are parts of a path.

    If it `reads_all` values to count the records of a file, a file that can't be read is not
    admitted; otherwise Parquet and Avro files, which say the number themselves, are read later.
    """

    files: DeclaredFiles
    added: AddedColumns
    parts_of: Callable[[str], dict[str, str | None]]
    reads_all: bool

    def count(self, file: ListedFile) -> int:
        """Return the number of records in a file. Raises SchemaMismatchError and
        SourceChangedError.

        If they are read, the records of a file that is not too large are kept for the read that
        follows.
        """
        says_number = self.files.format in ("parquet", "avro")
        if says_number and not self.reads_all:
            return self.files.count(file)
        rows = size = 0
        tables = []  # to keep, with the numbers of their first records
        for number, table in self.files.tables(file):
            rows += table.num_rows
            size += table.nbytes
            tables.append((number, table))
            if size > _MOST_OF_A_FILE:
                tables.clear()
        if size <= _MOST_OF_A_FILE:
            with _lock:
                _counted[self._key(file)] = tuple(tables)
        return rows

    def tables(self, piece: FilePiece, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """Yield the records of a piece as (number of the first in the file, table with these
        columns), in order. Raises SourceChangedError for a file that is not as it was admitted.
        """
        own = [name for name in columns if name in self.files.schema]
        added = self._added(piece.file)
        for number, table in self._own_tables(piece, own):
            for name in columns:
                if name in added:
                    values = pa.repeat(added[name][0], table.num_rows)
                    table = table.append_column(name, values)  # noqa: PLW2901 - one more column
            yield number, table.select(columns)

    def _own_tables(self, piece: FilePiece, names: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """Yield the records of a piece as (number of the first in the file, table), with columns
        that the file contains: those that were kept when it was counted, else from the file.
        """
        file = listed_file(piece.file)
        with _lock:
            counted = _counted.get(self._key(file))
        if counted is None:
            yield from self.files.tables(file, rows=(piece.start, piece.end), names=names)
            return
        for number, table in counted:
            first = max(number, piece.start)
            count = min(number + table.num_rows, piece.end) - first
            if count > 0:
                yield first, table.slice(first - number, count).select(names)
        check_unchanged(self.files.tree, file)

    def _added(self, file: AdmittedFile) -> dict[str, pa.Array]:
        return self.added.of(file, self.parts_of(file.path))

    def _key(self, file: ListedFile) -> tuple[str, ...]:
        """Return what the records of a file depend on: where it is, its contents, and how it is
        read.
        """
        files = self.files
        rules = "" if files.rules is None else files.rules.model_dump_json()
        return (files.tree.url, file.path, file.etag, files.format, files.schema.ddl(), rules)


def check_unchanged(tree: FileTree, file: ListedFile) -> None:
    """Raise SourceChangedError if a file is not as it was listed."""
    now = tree.find(file.path)
    if now is None:
        raise source_changed_error(tree, file, "is gone")
    if now.etag != file.etag:
        raise source_changed_error(tree, file, "was replaced")


def listed_file(file: AdmittedFile) -> ListedFile:
    """Return an admitted file as it was listed."""
    return ListedFile(file.path, file.size, file.etag, file.modified_at)
