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
BATCH = 65_536


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


def check_columns(found: list[str], schema: Schema, where: str) -> None:
    """Refuse a file whose columns are not those declared, each once."""
    twice = sorted({name for name in found if found.count(name) > 1})
    missing = [name for name in schema.names if name not in found]
    extra = [name for name in found if name not in schema.names]
    parts = [f"column {name!r} stands twice" for name in twice]
    parts += [f"column {name!r} is missing" for name in missing]
    parts += [f"column {name!r} is not declared" for name in extra]
    if parts:
        raise SchemaMismatchError(
            f"{where}: {'; '.join(parts)}. Declared are {', '.join(f'{f.name} {f.type}' for f in schema.fields)}.",
            "Deliver the files with exactly these columns, or declare what they hold.",
        )


def damaged(where: str, error: Exception) -> SchemaMismatchError:
    """Return the error for a file that can't be read as what it should be."""
    return SchemaMismatchError(
        f"{where} can't be read: {(str(error) or type(error).__name__).splitlines()[0].rstrip('.')}.",
        "Deliver the file again, whole and in the declared format.",
    )
