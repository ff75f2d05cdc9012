"""Files of others with a JSON object on each line, typed strictly by the declared columns."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import AdjunctError, SchemaMismatchError
from dagster_adjunct.resources.files.file_misfits import damaged, declared_as
from dagster_adjunct.resources.files.text import opened
from dagster_adjunct.resources.schemas.schema import Field, Schema, arrow_type

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.resources.files.tree import FileTree, FoundFile

_BLOCK = 8 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_TEXTS = ("date", "timestamp", "binary")


def jsonl_tables(tree: FileTree, file: FoundFile, schema: Schema, where: str) -> Iterator[tuple[int, pa.Table]]:
    """Yield (number of the first record, table) of the whole file."""
    number, line = 0, 1
    with tree.on_disk(file) as path:
        for block in _blocks(opened(path, file.path), where):
            if block.strip():
                table = _parsed(block, line, schema, where)
                yield number, table
                number += table.num_rows
            line += block.count(b"\n")


def _blocks(source: Any, where: str) -> Iterator[bytes]:
    """Yield the stream in blocks of whole lines."""
    carried, first = b"", True
    while True:
        try:
            data = bytes(source.read(_BLOCK))
        except OSError as error:
            raise damaged(where, error) from error
        if first:
            data, first = data.removeprefix(_BOM), False
        if not data:
            yield carried
            return
        carried += data
        cut = carried.rfind(b"\n") + 1
        if cut:
            yield carried[:cut]
            carried = carried[cut:]


def _parsed(block: bytes, line: int, schema: Schema, where: str) -> pa.Table:
    import pyarrow as pa

    try:
        table = _read(block, schema.fields)
    except pa.ArrowInvalid as error:
        raise _explained(block, line, schema, where, error) from error
    columns = []
    for field in schema.fields:
        try:
            columns.append(_typed(table.column(field.name), field))
        except (pa.ArrowInvalid, binascii.Error, ValueError) as error:
            raise SchemaMismatchError(
                f"{where}: {declared_as(field)}: {str(error).splitlines()[0]}",
                "Write dates as 2026-01-31, timestamps as ISO 8601 with a zone, binary values as base64.",
                column=field.name,
            ) from error
    return pa.table(columns, schema=schema.to_arrow())


def _read(block: bytes, fields: tuple[Field, ...], *, others: str = "error") -> pa.Table:
    import pyarrow as pa
    import pyarrow.json as pj

    kinds = [(field.name, pa.string() if field.type in _TEXTS else arrow_type(field.type)) for field in fields]
    return pj.read_json(
        io.BytesIO(block),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
        parse_options=pj.ParseOptions(explicit_schema=pa.schema(kinds), unexpected_field_behavior=others),
    )


def _typed(column: pa.ChunkedArray, field: Field) -> pa.ChunkedArray:
    import pyarrow as pa

    if field.type in _TEXTS:
        column.validate(full=True)  # the parser takes texts that are not UTF-8
    if field.type == "binary":
        values = [None if text is None else base64.b64decode(text, validate=True) for text in column.to_pylist()]
        return pa.chunked_array([pa.array(values, pa.binary())])
    return column.cast(arrow_type(field.type))


def _explained(block: bytes, first: int, schema: Schema, where: str, error: Exception) -> AdjunctError:
    """Return an error that names the line and the column: read again slowly, since the fast reader names neither."""
    import pyarrow as pa

    lines = block.split(b"\n")
    for number, line in enumerate(lines, first):
        if problem := _problem(line, schema):
            return SchemaMismatchError(
                f"{where}, line {number}: {problem}. Declared are "
                f"{', '.join(f'{field.name} {field.type}' for field in schema.fields)}.",
                "Mend the line: one JSON object with declared fields only.",
                line=number,
            )
    for field in schema.fields:
        try:
            _read(block, (field,), others="ignore")
        except pa.ArrowInvalid as arrow_error:
            number = first + _first_bad(lines, field)
            return SchemaMismatchError(
                f"{where}, line {number}: {declared_as(field)}: {arrow_error}",
                "Mend the value, or declare the column as what it holds.",
                column=field.name,
                line=number,
            )
    return damaged(where, error)


def _problem(line: bytes, schema: Schema) -> str:
    if not line.strip():
        return ""
    try:
        record = json.loads(line)
    except ValueError as error:
        return f"it is no JSON ({error})"
    if not isinstance(record, dict):
        return f"it is a {type(record).__name__}, expected an object"
    unknown = [name for name in record if name not in schema]
    return f"field {unknown[0]!r} is not declared" if unknown else ""


def _first_bad(lines: list[bytes], field: Field) -> int:
    """Return the index of the first line whose value of the column can't be read, by halving."""
    import pyarrow as pa

    low, high = 0, len(lines)
    while high - low > 1:
        middle = (low + high) // 2
        part = b"\n".join(lines[low:middle])
        try:
            if part.strip():
                _read(part, (field,), others="ignore")
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low
