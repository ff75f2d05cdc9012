"""CSV files of others, typed strictly: a value that is not of its column's type is an error naming it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import AdjunctError, SchemaMismatchError
from dagster_adjunct.resources.files.file_misfits import check_columns, damaged, declared_as
from dagster_adjunct.resources.files.text import Watched, opened
from dagster_adjunct.resources.schemas.schema import arrow_type

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from dagster_adjunct.resources.files.tree import FileTree, FoundFile
    from dagster_adjunct.resources.schemas.schema import Schema

_HEADER = 1024 * 1024
_BLOCK = 16 * 1024 * 1024
_CONVERSION = re.compile(r"In CSV column #(\d+): (?:Row #(\d+): )?(?:CSV conversion error to [^:]*: )?(.*)", re.S)
_ROW = re.compile(r"CSV parse error: Row #(\d+): (.*)", re.S)


def csv_tables(tree: FileTree, file: FoundFile, schema: Schema, where: str) -> Iterator[tuple[int, pa.Table]]:
    """Yield (number of the first record, table) of the whole file."""
    import pyarrow as pa

    with tree.on_disk(file) as path:
        names = _header(path, file.path, schema, where)
        number, last = 0, None  # the last text, where such a column ends the file
        source = Watched(opened(path, file.path))
        try:
            for batch in _reader(source, schema):
                table = pa.Table.from_batches([batch])
                if table.num_rows and schema.field(names[-1]).type == "string":
                    last = table.column(names[-1])[-1].as_py()
                yield number, table.select(list(schema.names))
                number += table.num_rows
        except pa.ArrowInvalid as error:
            raise _explained(error, names, schema, where) from error
        except OSError as error:
            raise damaged(where, error) from error
        _check_closed(source.tail, names[-1], last, where)


def _reader(source: Any, schema: Schema) -> Any:
    import pyarrow.csv as pc

    return pc.open_csv(
        source,
        read_options=pc.ReadOptions(use_threads=False, block_size=_BLOCK),
        parse_options=pc.ParseOptions(newlines_in_values=True),
        convert_options=pc.ConvertOptions(
            column_types={field.name: arrow_type(field.type) for field in schema.fields},
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            true_values=["true", "True", "TRUE"],
            false_values=["false", "False", "FALSE"],
            timestamp_parsers=[pc.ISO8601],
        ),
    )


def _header(path: Path, name: str, schema: Schema, where: str) -> list[str]:
    """Return the names in the file's first line, which have to be the declared ones."""
    try:
        with opened(path, name) as source:
            text = bytes(source.read(_HEADER)).decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise damaged(where, error) from error
    names = next((row for row in csv.reader(io.StringIO(text)) if row), None)
    if names is None:
        raise SchemaMismatchError(
            f"{where} is empty: expected a header line with {', '.join(schema.names)}.",
            "Deliver the file again; a file without records has its header line.",
            line=1,
        )
    check_columns(names, schema, where)
    return names


def _explained(error: Exception, names: list[str], schema: Schema, where: str) -> AdjunctError:
    text = str(error)
    if misfit := _CONVERSION.match(text):
        name = names[int(misfit[1])]
        line = int(misfit[2]) if misfit[2] else None
        place = where if line is None else f"{where}, line {line}"
        return SchemaMismatchError(
            f"{place}: {declared_as(schema.field(name))}: {misfit[3].rstrip('.')}.",
            "Mend the value, or declare the column as what it holds.",
            column=name,
            line=line,
        )
    if misfit := _ROW.match(text):
        return SchemaMismatchError(
            f"{where}, line {misfit[1]}: {misfit[2].rstrip('.')}.",
            "Mend the line: each has a value for every column.",
            line=int(misfit[1]),
        )
    return damaged(where, error)


def _check_closed(tail: bytes, column: str, last: str | None, where: str) -> None:
    """Refuse a file that ends inside of a quoted value: the reader takes its end for the closing quote.

    Without this, one quote too many would swallow all lines after it into one value.
    """
    if last is None or len(last) > Watched.KEPT // 8:
        return
    ending = tail.rstrip(b"\r\n")
    plain = last.encode()
    unquoted = b"\n" not in plain and (ending == plain or ending.endswith((b"," + plain, b"\n" + plain, b"\r" + plain)))
    if not (ending.endswith(b'"') or unquoted):
        raise SchemaMismatchError(
            f"{where} ends inside of a quoted value, which begins with {last[:40]!r}.",
            "Deliver the file again, whole, with each quote closed and quotes in values doubled.",
            column=column,
        )
