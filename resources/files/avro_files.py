"""Reads Avro container files: their own schema says what is in them."""

from __future__ import annotations

import io
import json
import lzma
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.files.columns import DeclaredColumns
from dagster_adjunct.resources.files.opened import (
    damaged_file_error,
    open_decompressed,
    translate_read_errors,
)
from dagster_adjunct.resources.files.tree import FileTree, ListedFile
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.schemas.avro import avro_converters, avro_type
from dagster_adjunct.resources.schemas.parsed_columns import (
    CONVERSION_ERRORS,
    Converters,
    RowProblems,
    build_column,
)
from dagster_adjunct.resources.schemas.schema import Field
from dagster_adjunct.resources.schemas.types import Type

_BATCH = 16_384
_PIECE = 1 << 20
# What fastavro raises for bytes that are not Avro, or not of the file's schema.
_UNREADABLE = (
    *CONVERSION_ERRORS,
    AttributeError,
    EOFError,
    RecursionError,
    lzma.LZMAError,
    struct.error,
    zlib.error,
)


class _Decompressed(io.RawIOBase):
    """A stream of decompressed bytes that knows its place."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._source.close()
        super().close()


class _InPieces(io.BufferedReader):
    """A buffered stream that needs no more memory for `read` than there are bytes: a damaged length
    would otherwise ask for too much.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0 or size <= _PIECE:
            return super().read(size)
        pieces = []
        while size and (piece := super().read(min(size, _PIECE))):
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The columns of a file: their types, how the values of each are converted, and the names
    that it has for the declared ones.
    """

    types: Mapping[str, Type]
    converters: Mapping[str, Converters]
    sources: Mapping[str, str]


@contextmanager
def _open_blocks(path: Path, name: str, where: str) -> Iterator[Any]:
    """Provide fastavro's reader of the blocks of a file. Raises SchemaMismatchError for bytes that
    it can't read.
    """
    fastavro = import_package(where, "fastavro", "avro")
    with (
        translate_read_errors(where, *_UNREADABLE),
        _InPieces(_Decompressed(open_decompressed(path, name))) as source,
    ):
        yield fastavro.block_reader(source)


def count_avro(tree: FileTree, file: ListedFile, columns: DeclaredColumns, where: str) -> int:
    """Return the number of records in a file. Its columns are checked; no record is decoded."""
    with tree.on_disk(file) as path, _open_blocks(path, file.path, where) as blocks:
        _stored_columns(blocks, columns, where)
        return sum(block.num_records for block in blocks)


def read_avro(
    tree: FileTree,
    file: ListedFile,
    columns: DeclaredColumns,
    where: str,
    rows: tuple[int, int],
    wanted: tuple[str, ...],
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the records [start, end) of a file as (number of the first, table with the file's
    names and types of the `wanted` columns). Blocks outside of this range are not decoded.

    Raises SchemaMismatchError for whatever is not as declared.
    """
    with tree.on_disk(file) as path, _open_blocks(path, file.path, where) as blocks:
        stored = _stored_columns(blocks, columns, where)
        given = [stored.sources[name] for name in wanted if name in stored.sources]
        waiting: list[Any] = []
        first = rows[0]
        for record in _records_between(blocks, rows, where):
            waiting.append(record)
            if len(waiting) == _BATCH:
                yield first, _build_table(waiting, first, stored, given, where)
                first += len(waiting)
                waiting = []
        if waiting:
            yield first, _build_table(waiting, first, stored, given, where)


def _stored_columns(blocks: Any, columns: DeclaredColumns, where: str) -> _Stored:
    """Return the columns of a file. Raises SchemaMismatchError unless they are those that are
    declared, or allowed.
    """
    from fastavro.schema import expand_schema

    schema = expand_schema(json.loads(blocks.metadata["avro.schema"]))
    if not isinstance(schema, dict) or schema.get("type") != "record":
        found = json.dumps(schema)[:100]
        raise damaged_file_error(where, ValueError(f"its schema is {found}, which is no record"))
    types = {field["name"]: avro_type(field["type"]) for field in schema["fields"]}
    sources = columns.match([field["name"] for field in schema["fields"]], where)
    columns.check_types(types, sources, where)
    converters = {field["name"]: avro_converters(field["type"]) for field in schema["fields"]}
    return _Stored(types, converters, sources)


def _records_between(blocks: Any, rows: tuple[int, int], where: str) -> Iterator[Any]:
    """Yield the records [start, end) as fastavro reads them. Raises SchemaMismatchError for one
    that is not of the file's schema.
    """
    start, end = rows
    number = 0
    for block in blocks:
        after = number + block.num_records
        if after <= start:  # it need not be decoded
            number = after
            continue
        records = iter(block)
        while number < min(after, end):
            try:
                record = next(records)
            except _UNREADABLE as error:
                raise SchemaMismatchError(
                    f"{where}, record {number + 1}: it is not of the file's own schema"
                    f" ({type(error).__name__}).",
                    "Deliver the file again, complete and in the declared format.",
                    line=number + 1,
                ) from error
            if number >= start:
                yield record
            number += 1
        if number >= end:
            return


def _build_table(
    records: list[Any], first: int, stored: _Stored, names: list[str], where: str
) -> pa.Table:
    """Return records with the columns of these names. Raises SchemaMismatchError for a value that
    a column can't hold.
    """
    arrays = []
    for name in names:
        problems: RowProblems = {}
        values = [record[name] for record in records]
        column = Field(name, str(stored.types[name]))
        arrays.append(build_column(values, column, stored.converters[name], problems))
        if problems:
            row = min(problems)
            raise SchemaMismatchError(
                f"{where}, record {first + row + 1}: {problems[row]}.",
                "Correct the value, or the column's declared type.",
                column=name,
                line=first + row + 1,
            )
    if not names:  # a table that keeps the number of records
        return pa.table({"": pa.nulls(len(records))})
    return pa.table(arrays, names=names)
