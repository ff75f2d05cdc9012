"""Parquet, CSV and JSON lines as Arrow tables of exactly the declared columns and types, or an error that says where.

Nothing is guessed, cast or left out:

    Parquet     the columns have the declared types; timestamps have a zone (INT96 is UTC)
    CSV         RFC 4180 with a header line, in UTF-8; an empty field is null, "" is an empty text; true and false;
                dates as 2026-01-31, timestamps as ISO 8601 with a zone; binary columns are the field's bytes
    JSON lines  one object a line; an absent field is null; dates and timestamps are texts as in CSV, binary is base64

Columns may be in any order. Files called .gz, .bz2 or .zst are decompressed, except Parquet, which compresses itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.files.file_misfits import declared_as
from dagster_adjunct.resources.schemas.readable_values import first_unreadable

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.resources.files.tree import FileTree, FoundFile
    from dagster_adjunct.resources.schemas.schema import Schema

FileFormat = Literal["parquet", "csv", "jsonl"]
_FIRST = {"csv": 2, "jsonl": 1, "parquet": 1}  # the header line is the first one of a CSV


def place_in(format: FileFormat, number: int) -> tuple[str, int]:
    """Return where the record of this number, counted from 0, is in its file: in words, and as a number.

    A line break in a quoted value begins no line here.
    """
    line = number + _FIRST[format]
    return f"{'row' if format == 'parquet' else 'line'} {line}", line


@dataclass(frozen=True, slots=True)
class DeclaredFiles:
    """Files of one tree that are to hold records in this format, with these columns.

    `what` names the dataset in errors. Without `values`, errors name the place and tell nothing of what stands there.
    """

    tree: FileTree
    format: FileFormat
    schema: Schema
    what: str
    values: bool = True

    def place(self, file: FoundFile) -> str:
        """Return how errors name a file."""
        return f"{self.what}: file {self.tree.url}/{file.path}"

    def tables(self, file: FoundFile, span: tuple[int, int] | None = None) -> Iterator[tuple[int, pa.Table]]:
        """Yield the records of a file as (number of the first, counted from 0; table with the schema's columns).

        `span` chooses the row groups of a Parquet file that begin in these bytes. Raises SchemaMismatchError for
        whatever is not as declared, and SourceChangedError.
        """
        with self.telling(file):
            for number, table in self._tables(file, span):
                if (found := first_unreadable(table)) is not None:
                    place, line = place_in(self.format, number + found.row)
                    raise found.error(self.place(file), place, line=line)
                yield number, table

    @contextmanager
    def telling(self, file: FoundFile) -> Iterator[None]:
        """Have errors about a file name it in their fields, and tell nothing of what stands there without `values`."""
        try:
            yield
        except SchemaMismatchError as error:
            error.file = f"{self.tree.url}/{file.path}"
            if self.values:
                raise
            raise self._untold(error, self.place(file)) from None

    def _untold(self, error: SchemaMismatchError, where: str) -> SchemaMismatchError:
        name = error.column if error.column in self.schema.names else None  # another may be a value: of no header line
        place = where if error.line is None else f"{where}, line {error.line}"
        if name is not None:
            place = f"{place}: {declared_as(self.schema.field(name))}"
        return SchemaMismatchError(
            f"{place}: what was found is not told, because columns are sensitive.",
            error.next_step,
            file=error.file,
            line=error.line,
            column=name,
        )

    def _tables(self, file: FoundFile, span: tuple[int, int] | None) -> Iterator[tuple[int, pa.Table]]:
        if self.format == "parquet":
            from dagster_adjunct.resources.files.parquet import parquet_tables

            return parquet_tables(self.tree, file, self.schema, self.place(file), span)
        if self.format == "csv":
            from dagster_adjunct.resources.files.csv import csv_tables

            return csv_tables(self.tree, file, self.schema, self.place(file))
        from dagster_adjunct.resources.files.jsonl import jsonl_tables

        return jsonl_tables(self.tree, file, self.schema, self.place(file))
