"""Parquet, CSV and JSON lines as Arrow tables of exactly the declared columns and types, or an error that says where.

Nothing is guessed, cast or left out:

    Parquet     the columns have the declared types; timestamps have a zone (INT96 is UTC)
    CSV         RFC 4180 with a header line, in UTF-8; an empty field is null, "" is an empty text; true and false;
                dates as 2026-01-31, timestamps as ISO 8601 with a zone; binary columns are the field's bytes
    JSON lines  one object a line; an absent field is null; dates and timestamps are texts as in CSV, binary is base64

Columns may be in any order. Files called .gz, .bz2 or .zst are decompressed, except Parquet, which compresses itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.resources.errors import SchemaMismatchError

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.resources.files.tree import FileTree, FoundFile
    from dagster_adjunct.resources.schemas.schema import Schema

FileFormat = Literal["parquet", "csv", "jsonl"]


# What an error about a file says before it comes to what was found there.
_PLACE = re.compile(r"(, line \d+)?(: line \d+|: column '[^']*'( of line \d+)? is declared \w+(\(\d+,\d+\))?)?")


def tables(
    tree: FileTree,
    file: FoundFile,
    format: FileFormat,
    schema: Schema,
    what: str,
    span: tuple[int, int] | None = None,
    *,
    values: bool = True,
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the records of a file as (number of the first, counted from 0; table with the schema's columns).

    `span` chooses the row groups of a Parquet file that begin in these bytes. `what` names the dataset in errors.
    Raises SchemaMismatchError for whatever is not as declared, and SourceChangedError; without `values`, errors name
    the place and tell nothing of what stands there.
    """
    if not values:
        return _untold(tables(tree, file, format, schema, what, span), f"{what}: file {tree.url}/{file.path}")
    where = f"{what}: file {tree.url}/{file.path}"
    if format == "parquet":
        from dagster_adjunct.resources.files.parquet import parquet_tables

        return parquet_tables(tree, file, schema, where, span)
    if format == "csv":
        from dagster_adjunct.resources.files.csv import csv_tables

        return csv_tables(tree, file, schema, where)
    from dagster_adjunct.resources.files.jsonl import jsonl_tables

    return jsonl_tables(tree, file, schema, where)


def _untold(parts: Iterator[tuple[int, pa.Table]], where: str) -> Iterator[tuple[int, pa.Table]]:
    try:
        yield from parts
    except SchemaMismatchError as error:
        place = _PLACE.match(error.problem.removeprefix(where))
        raise SchemaMismatchError(
            f"{where}{place[0] if place else ''}: what was found is not told, because columns are sensitive.",
            error.next_step,
        ) from None
