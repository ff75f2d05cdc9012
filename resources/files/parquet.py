"""Parquet files of others: whole, or only the row groups that begin in a range of bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.files.file_misfits import check_columns, damaged
from dagster_adjunct.resources.objects.object_file import RangedFile
from dagster_adjunct.resources.schemas.schema import Schema, conform

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.resources.files.tree import FileTree, FoundFile

_BATCH = 65_536

_WHOLE = 16 * 1024 * 1024
_BUFFER = 1024 * 1024


def parquet_tables(
    tree: FileTree, file: FoundFile, schema: Schema, where: str, span: tuple[int, int] | None = None
) -> Iterator[tuple[int, pa.Table]]:
    """Yield (number of the first record, table) of the row groups that begin in `span`."""
    import pyarrow as pa

    parquet, int96 = _open(tree, file, schema, where)
    start, end = span or (0, file.size)
    number = 0
    for group in range(parquet.metadata.num_row_groups):
        rows = parquet.metadata.row_group(group).num_rows
        if start <= _begins(parquet.metadata.row_group(group).column(0)) < end:
            at = number
            try:
                for batch in parquet.iter_batches(_BATCH, row_groups=[group]):
                    table = conform(_zoned(pa.Table.from_batches([batch]), int96), schema, where, partial(_place, at))
                    yield at, table
                    at += table.num_rows
            except (pa.ArrowException, OSError) as error:
                raise damaged(where, error) from error
        number += rows


def _place(first: int, row: int) -> tuple[str, dict[str, int]]:
    line = first + row + 1
    return f"row {line}", {"line": line}


def count_parquet(tree: FileTree, file: FoundFile, schema: Schema, where: str) -> int:
    """Return how many records the file holds and check its columns: from its footer alone."""
    return int(_open(tree, file, schema, where)[0].metadata.num_rows)


def _open(tree: FileTree, file: FoundFile, schema: Schema, where: str) -> tuple[Any, set[str]]:
    """Return the opened file, and its columns that hold timestamps as INT96."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = _ranged(tree, file)
    try:
        parquet = pq.ParquetFile(
            pa.PythonFile(io.BufferedReader(source, _BUFFER), mode="r"),
            pre_buffer=True,
            coerce_int96_timestamp_unit="us",
            page_checksum_verification=True,
        )
    except (pa.ArrowException, OSError) as error:
        raise damaged(where, error) from error
    columns = [parquet.schema.column(index) for index in range(len(parquet.schema))]
    int96 = {column.path for column in columns if column.physical_type == "INT96"}
    _check_types(parquet.schema_arrow, int96, schema, where)
    return parquet, int96


def _check_types(stored: pa.Schema, int96: set[str], schema: Schema, where: str) -> None:
    import pyarrow as pa

    check_columns(stored.names, schema, where)
    wrong: dict[str, str] = {}
    for field in schema.fields:
        kind = stored.field(field.name).type
        if field.name in int96:
            kind = pa.timestamp("us", "UTC")
        try:
            stored_type = Schema.from_arrow(pa.schema([pa.field(field.name, kind)])).fields[0].type
        except SchemaMismatchError as error:  # a type that has no name here: nested, or a time without a zone
            raise error.reworded(f"{where}: {error.problem}", error.next_step) from error
        if stored_type != field.type:
            wrong[field.name] = f"column {field.name!r} is {stored_type}, declared {field.type}"
    if wrong:
        raise SchemaMismatchError(
            f"{where}: {'; '.join(wrong.values())}.",
            "Write the files with the declared types, or declare what they hold.",
            column=next(iter(wrong)),
        )


def _zoned(table: pa.Table, int96: set[str]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not int96:
        return table
    names = table.schema.names
    columns = [
        pc.assume_timezone(column, "UTC") if name in int96 else column
        for name, column in zip(names, table.columns, strict=True)
    ]
    return pa.table(columns, names=names)


def _begins(column: Any) -> int:
    pages: list[int | None] = [column.data_page_offset, column.dictionary_page_offset]
    return min(offset for offset in pages if offset)


def _ranged(tree: FileTree, file: FoundFile) -> RangedFile:
    """Return a listed file that can be sought in: fetched whole while it is small, else by ranges."""
    if file.size > _WHOLE:
        return RangedFile(file.size, partial(tree.read_range, file))
    whole = memoryview(tree.read(file))
    return RangedFile(file.size, lambda at, count: whole[at : at + count])
