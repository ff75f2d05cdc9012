"""Reads external Parquet, CSV and JSON lines files with exactly the declared columns and types, or
raises an error that names the file and the line.

Nothing is inferred, cast or left out:

    Parquet     the columns have the declared types; timestamps have a zone (INT96 is UTC)
    CSV         RFC 4180 with a header line, in UTF-8; an empty field is null, "" is an empty
                string; true and false; dates as 2026-01-31, timestamps as ISO 8601 with a zone;
                binary columns are the field's bytes
    JSON lines  one object per line; an absent field is null; dates and timestamps as in CSV, binary
                as base64

Columns may be in any order. Files named .gz, .bz2 or .zst are decompressed, except Parquet, which
has its own compression.

Spark's own readers would read all files that exist below a path at that time, expand patterns in
names, and turn values that do not parse into null. Here Python tasks read exactly the listed files;
large Parquet files are divided by row groups.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dagster_adjunct.resources.documents import RepeatedMemberError, unique_members
from dagster_adjunct.resources.errors import AdjunctError, SchemaMismatchError, file_error
from dagster_adjunct.resources.files.json_values import (
    JSON_KINDS,
    JsonMisfit,
    MapKeys,
    Number,
    column_from_json,
    convert_parsed,
    parsed_type,
)
from dagster_adjunct.resources.files.tree import FileTree, ListedFile
from dagster_adjunct.resources.lazy_modules import F, np, pa, pc, pq
from dagster_adjunct.resources.objects.arrow_files import (
    ArrowReadableFile,
    open_input,
    read_json_lines,
)
from dagster_adjunct.resources.schemas.arrow_values import cast_table
from dagster_adjunct.resources.schemas.paths import missing_part, nest_value, read_values
from dagster_adjunct.resources.schemas.records import RowPlace, fit_to_schema
from dagster_adjunct.resources.schemas.schema import Field, Schema, check_column_names
from dagster_adjunct.resources.schemas.texts import TextMisfit, convert_texts
from dagster_adjunct.resources.schemas.types import (
    Type,
    find_difference,
    is_list,
    is_nested,
    parse_type,
    tree_from_arrow,
)
from dagster_adjunct.resources.schemas.values import first_unreadable
from dagster_adjunct.resources.spark.tasks import read_in_tasks
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, TIMESTAMP, TOMBSTONE
from dagster_adjunct.resources.threads import map_in_threads

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_COLUMNS_STEP = "Deliver the files with exactly these columns, or change the declared ones."


def describe_column(field: Field) -> str:
    """Return how errors about a column's values begin: with its name and declared type."""
    return f"column {field.name!r} is declared {field.type}"


def unreadable_file_error(where: str, error: Exception) -> AdjunctError:
    """Return the error for a file that is damaged, or that the file system can't read."""
    if isinstance(error, OSError) and error.errno:
        return file_error(error, error.filename or where, where)
    reason = str(error) or type(error).__name__
    return SchemaMismatchError(
        f"{where} can't be read: {reason.splitlines()[0].rstrip('.')}.",
        "Deliver the file again, complete and in the declared format.",
    )


_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


def open_decompressed(path: Path, name: str) -> Any:
    """Return a stream of the decompressed bytes of the file at `path`; `name`, its original
    name, tells the codec.
    """
    raw = pa.OSFile(str(path), mode="r")
    codec = _CODECS.get(name[name.rfind(".") :].lower())
    if codec is None:
        return raw
    return pa.CompressedInputStream(raw, codec)


_BOM = b"\xef\xbb\xbf"
_QUOTES = re.compile(rb'"+')
_DELIMITERS = b",\r\n"


class _Excerpt(NamedTuple):
    """A place in a file: the number of its line, and the text that begins there."""

    line: int
    text: str


class QuoteReader(ArrowReadableFile):
    """The stream of a CSV file, which looks for misplaced quotes while it is read (see
    `quote_error`).

    Arrow accepts them: it reads `"a"b` as ab, and makes the following lines part of a value that
    has no closing quote.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self._source = source
        self._ended = False
        self._quoted = False  # whether a quoted value goes on behind what was read
        # the end of the last block: a run of quotes that may go on, and the byte before it
        self._carried = b""
        self._lines = 1
        self._opened: _Excerpt | None = None  # the last quoted value that goes on
        self._misplaced: _Excerpt | None = None  # the first misplaced quote

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        data = bytes(self._source.read(None if size is None or size < 0 else size))
        self._ended = not data
        self._check(data or b"\n")
        return data

    def close(self) -> None:
        self._source.close()
        super().close()

    def quote_error(self, where: str) -> SchemaMismatchError | None:
        """Return the error for the first misplaced quote so far, or for a value without its
        closing quote.
        """
        if self._misplaced is not None:
            found = self._misplaced
            problem = "a quoted value goes on after its closing quote:"
        elif self._ended and self._quoted and self._opened is not None:
            found = self._opened
            problem = "the file ends within a quoted value, which begins with"
        else:
            return None
        step = (
            "Deliver the file again, complete, with each quote closed and quotes in values doubled."
        )
        problem = f"{where}, line {found.line}: {problem} {found.text!r}."
        return SchemaMismatchError(problem, step, line=found.line)

    def _check(self, data: bytes) -> None:
        """Look for misplaced quotes in what was read next."""
        block = self._carried + data if self._carried else b"\n" + data.removeprefix(_BOM)
        whole = len(block.rstrip(b'"'))
        letters = np.frombuffer(block, np.uint8)
        quotes = np.flatnonzero(letters[1:whole] == ord('"')) + 1
        # Each second one, from the first on unless that closes a value of an earlier block.
        opening = quotes[1::2] if self._quoted else quotes[::2]
        closing = quotes[::2] if self._quoted else quotes[1::2]
        # Usually each second quote closes a value or escapes the next quote, which is checked for
        # all at once.
        around = np.r_[letters[opening - 1], letters[closing + 1]]
        if np.isin(around, [*_DELIMITERS, ord('"')]).all():
            openings = opening[letters[opening - 1] != ord('"')]
            opened = int(openings[-1]) if len(openings) else None
            self._quoted ^= len(quotes) % 2 == 1
        else:
            opened = self._search(block, whole)
        if self._quoted and opened is not None:
            self._opened = self._excerpt(block, opened, opened + 1)
        self._lines += block.count(b"\n", 1, whole)
        self._carried = block[whole - 1 :]

    def _search(self, block: bytes, whole: int) -> int | None:
        """Look at each quote whether it is misplaced; return where the last quoted value begins,
        None without one.
        """
        opened = None
        for run in _QUOTES.finditer(block, 1, whole):
            start, end = run.span()
            count = end - start
            if not self._quoted:
                if block[start - 1] not in _DELIMITERS:
                    continue  # quotes in the text of a value that is not quoted
                self._quoted = True
                opened = start
                count = count - 1
            if count % 2:
                # In a pair, the first escapes the second; one without a partner closes the value.
                self._quoted = False
                if block[end] not in _DELIMITERS and self._misplaced is None:
                    self._misplaced = self._excerpt(block, start, max(1, start - 20))
        return opened

    def _excerpt(self, block: bytes, at: int, start: int) -> _Excerpt:
        """Return the line of the byte `at`, and the text from `start` on."""
        line = self._lines + block.count(b"\n", 1, at)
        return _Excerpt(line, block[start : start + 40].decode(errors="replace"))


_HEADER = 1024 * 1024
_BLOCK = 16 * 1024 * 1024
_NOT_UTF8 = re.compile(
    r"In CSV column #(?P<column>\d+): (?:Row #(?P<row>\d+): )?.*invalid UTF8 data", re.S
)
_ROW = re.compile(r"CSV parse error: Row #(?P<row>\d+): (?P<reason>.*)", re.S)
_VALUE_STEP = "Correct the value, or the column's declared type."


def read_csv(
    tree: FileTree, file: ListedFile, schema: Schema, where: str
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the records of a CSV file as (number of the first record, table); see
    `DeclaredFiles.tables`.
    """
    check_format(schema, "csv", where)
    with tree.on_disk(file) as path:
        names = _read_header(path, file.path, schema, where)
        number = 0
        source = QuoteReader(open_decompressed(path, file.path))
        try:
            for batch in _csv_reader(source, schema):
                columns = [
                    _convert_field(batch.column(field.name), field, number, where)
                    for field in schema.fields
                ]
                yield number, pa.table(columns, schema=schema.to_arrow())
                number += batch.num_rows
        except pa.ArrowInvalid as error:
            if "Empty CSV file or block" in str(error):
                return  # there is only a header line, without a line break
            raise source.quote_error(where) or _csv_error(error, names, schema, where) from error
        except SchemaMismatchError as error:
            raise source.quote_error(where) or error from None
        except OSError as error:
            raise unreadable_file_error(where, error) from error
        if (misquoted := source.quote_error(where)) is not None:
            raise misquoted


def _convert_field(fields: pa.Array, field: Field, first: int, where: str) -> pa.Array:
    """Return the values of the fields of a CSV column. `first` is the number of the first
    record.
    """
    if field.type in ("string", "binary"):
        return fields
    try:
        return convert_texts(pc.ascii_trim(fields, characters=" \t"), field.type)
    except TextMisfit as misfit:
        line = record_place("csv", first, misfit.row).fields["line"]
        problem = f"{where}, line {line}: {describe_column(field)}: {misfit.reason}."
        raise SchemaMismatchError(problem, _VALUE_STEP, column=field.name, line=line) from misfit


def _csv_reader(source: Any, schema: Schema) -> Any:
    """Return Arrow's reader of a CSV file, whose fields are texts, or bytes for binary columns."""
    import pyarrow.csv as pc

    # Arrow would also convert hexadecimal numbers, and decimals of more digits than declared, so
    # that it only divides the lines into fields.
    convert = pc.ConvertOptions(
        column_types={
            f.name: pa.binary() if f.type == "binary" else pa.string() for f in schema.fields
        },
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    read = pc.ReadOptions(use_threads=False, block_size=_BLOCK)
    # In a file of one column, an empty line is an empty field, as any other field can be.
    parse = pc.ParseOptions(newlines_in_values=True, ignore_empty_lines=len(schema.fields) > 1)
    return pc.open_csv(source, read_options=read, parse_options=parse, convert_options=convert)


def _read_header(path: Path, name: str, schema: Schema, where: str) -> list[str]:
    """Return the names in the header line. Raises SchemaMismatchError unless they are the
    declared ones.
    """
    try:
        with open_decompressed(path, name) as source:
            text = bytes(source.read(_HEADER)).decode("utf-8-sig", errors="replace")
        rows = csv.reader(io.StringIO(text, newline=""))
        names = next((row for row in rows if row or len(schema.fields) == 1), None)
    except (OSError, csv.Error) as error:
        raise unreadable_file_error(where, error) from error
    if not names:
        begins = "begins with an empty line"
        if names is None:
            begins = "is empty"
        problem = f"{where} {begins}: expected a header line with {', '.join(schema.names)}."
        step = "Deliver the file again; a file without records needs a header line too."
        raise SchemaMismatchError(problem, step, line=1)
    check_column_names(names, schema, where, next_step=_COLUMNS_STEP)
    return names


def _csv_error(error: Exception, names: list[str], schema: Schema, where: str) -> AdjunctError:
    """Return the error for what Arrow's CSV reader has reported, with the line if Arrow
    names one.
    """
    text = str(error)
    if misfit := _NOT_UTF8.match(text):
        name = names[int(misfit["column"])]
        line = None
        if misfit["row"]:
            line = int(misfit["row"])
        place = where
        if line is not None:
            place = f"{where}, line {line}"
        problem = f"{place}: {describe_column(schema.field(name))}: the text is not UTF-8."
        return SchemaMismatchError(problem, "Write the file in UTF-8.", column=name, line=line)
    if misfit := _ROW.match(text):
        problem = f"{where}, line {misfit['row']}: {misfit['reason'].rstrip('.')}."
        return SchemaMismatchError(
            problem, "Correct the line: it needs a value for every column.", line=int(misfit["row"])
        )
    return unreadable_file_error(where, error)


FileFormat = Literal["parquet", "csv", "jsonl"]


def check_format(schema: Schema, format: FileFormat, what: str) -> None:
    """Raise SchemaMismatchError for a nested column if the format has only simple values: CSV."""
    for field in schema.fields:
        if format == "csv" and is_nested(field.type):
            raise SchemaMismatchError(
                f"{what}: {describe_column(field)}, but a field of a CSV file is a simple value.",
                "Deliver Parquet or JSON lines, or declare the column as string.",
                column=field.name,
            )


# That of the first record; a CSV file has a header line.
_FIRST_LINE = {"csv": 2, "jsonl": 1, "parquet": 1}


def record_place(format: FileFormat, first: int, row: int) -> RowPlace:
    """Return how errors name a record in its file: as a line, in Parquet as a row.

    The record is the row number `row` of a table whose first record is number `first` in the file,
    both counted from 0. Line breaks in quoted values are not counted.
    """
    line = first + row + _FIRST_LINE[format]
    unit = "row" if format == "parquet" else "line"
    return RowPlace(f"{unit} {line}", {"line": line})


@dataclass(frozen=True, slots=True)
class DeclaredFiles:
    """Files of a tree with records in this format and with these columns.

    `what` names the dataset in errors. If `values` is False, errors name the position of a value
    but do not show it. Each record of JSON lines has a member for each `required` column or path,
    which may be null; others may be absent.
    """

    tree: FileTree
    format: FileFormat
    schema: Schema
    what: str
    values: bool = True
    required: tuple[str, ...] = ()

    def place(self, file: ListedFile) -> str:
        """Return how errors name a file."""
        return f"{self.what}: file {self.tree.url}/{file.path}"

    def tables(
        self, file: ListedFile, span: tuple[int, int] | None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield the records of a file as (number of the first, counted from 0; table with the
        schema's columns).

        `span` selects the row groups of a Parquet file that begin in this range of bytes. Raises
        SchemaMismatchError for whatever is not as declared, and SourceChangedError.
        """
        with self.locating_errors(file):
            for number, table in self._tables(file, span):
                if (found := first_unreadable(table)) is not None:
                    at = record_place(self.format, number, found.row)
                    raise found.error(self.place(file), at.text, **at.fields)
                yield number, table

    @contextmanager
    def locating_errors(self, file: ListedFile) -> Iterator[None]:
        """Add the file to the fields of a SchemaMismatchError; unless `values`, also remove
        values from its text.
        """
        try:
            yield
        except SchemaMismatchError as error:
            error.file = f"{self.tree.url}/{file.path}"
            if self.values:
                raise
            # If the header line is missing, `column` may be a value.
            column = None
            if error.column in self.schema.names:
                column = error.column
            if error.line is None:
                place = self.place(file)
            else:
                place = f"{self.place(file)}, line {error.line}"
            if column is not None:
                place = f"{place}: {describe_column(self.schema.field(column))}"
            problem = f"{place}: the value is not shown, because columns are sensitive."
            about: Any = {"file": error.file, "line": error.line, "column": column}
            raise SchemaMismatchError(problem, error.next_step, **about) from None

    def _tables(
        self, file: ListedFile, span: tuple[int, int] | None
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield the records of a file as `tables` does, unchecked."""
        if self.format == "parquet":
            return read_parquet(self.tree, file, self.schema, self.place(file), span)
        if self.format == "csv":
            return read_csv(self.tree, file, self.schema, self.place(file))
        return read_jsonl(self.tree, file, self.schema, self.place(file), self.required)


_JSON_BLOCK = 8 * 1024 * 1024
_SAMPLE = 64 * 1024
_BLANKS = b" \t\r"


def read_jsonl(
    tree: FileTree, file: ListedFile, schema: Schema, where: str, required: tuple[str, ...] = ()
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the records of a JSON lines file as (number of the first record, table); see
    `DeclaredFiles.tables`.
    """
    number = 0
    line = 1
    keys = MapKeys(parse_type(field.type) for field in schema.fields)
    with tree.on_disk(file) as path:
        for block in _blocks(open_decompressed(path, file.path), where):
            if block.strip(_BLANKS + b"\n"):
                table = _parse_block(block, line, schema, where, required, keys)
                yield number, table
                number += table.num_rows
            line += block.count(b"\n")


def _blocks(source: Any, where: str) -> Iterator[bytes]:
    """Yield the stream's bytes in blocks of whole lines."""
    carried = b""
    first = True
    while True:
        try:
            data = bytes(source.read(_JSON_BLOCK))
        except OSError as error:
            raise unreadable_file_error(where, error) from error
        if first:
            data = data.removeprefix(_BOM)
            first = False
        if not data:
            yield carried
            return
        carried += data
        cut = carried.rfind(b"\n") + 1
        if cut:
            yield carried[:cut]
            carried = carried[cut:]


def _parse_block(
    block: bytes, line: int, schema: Schema, where: str, required: tuple[str, ...], keys: MapKeys
) -> pa.Table:
    """Return the records in whole lines of JSON, the first of which is line number `line`."""
    table = _parse_fast(block, schema, keys)
    # Arrow's parser doesn't say whether a null stands in the line or is a missing member.
    if table is None or any(read_values(table, name).null_count for name in required):
        return _parse_lines(block, line, schema, where, required)
    return table


def _count_objects(block: bytes) -> int | None:
    """Return the number of lines that are not blank, or None if one of them can't be an object:
    Arrow would read a line `null` as a record of nulls, or crash.
    """
    text = block.strip(_BLANKS + b"\n")
    breaks = text.count(b"\n")
    if text[:1] == b"{" and text[-1:] == b"}" and text.count(b"}\n{") == breaks:
        return breaks + 1
    count = 0
    for line in text.split(b"\n"):
        stripped = line.strip(_BLANKS)
        may_be_object = stripped[:1] == b"{" and stripped[-1:] == b"}"
        if stripped and not may_be_object:
            return None
        count += bool(stripped)
    return count


def _parse_columns(
    block: bytes, names: Sequence[str], types: Sequence[Type], keys: MapKeys
) -> pa.Table | None:
    """Return the columns with their parsed types; None if maps can't be parsed as structs."""

    def parse(lines: bytes, others: str) -> pa.Table:
        kinds = []
        for name, type_ in zip(names, types, strict=True):
            kinds.append((name, parsed_type(type_, keys, name)))
        return read_json_lines(lines, pa.schema(kinds), others=others)

    if not keys.has_maps:
        return parse(block, "error")
    table = None
    # New keys are usually among the first lines.
    for sample in (block[: block.find(b"\n", _SAMPLE) + 1] or block, block):
        if keys.too_many:
            return None
        try:
            table = parse(block, "error")
            break
        except pa.ArrowInvalid:
            found = parse(sample, "infer").schema
            for name, type_ in zip(names, types, strict=True):
                keys.learn(type_, found.field(name).type, name)
    if table is None and not keys.too_many:
        table = parse(block, "error")
    if keys.may_be_null(block):
        return None
    return table


_INVALID_NUMBER = re.compile(rb"[:\[,]\s*-?(?:NaN|Inf(?:inity)?)\s*[,}\]]")


def _parse_fast(block: bytes, schema: Schema, keys: MapKeys) -> pa.Table | None:
    """Return the records as Arrow's parser reads them, or None if that is not certain to be
    right.
    """
    count = _count_objects(block)
    # Arrow would read NaN as a number. A search for bytes is far faster than one for a pattern.
    may_be_invalid = b"NaN" in block or b"Inf" in block
    if count is None:
        return None
    if may_be_invalid and _INVALID_NUMBER.search(block):
        return None
    types = [parse_type(field.type) for field in schema.fields]
    try:
        table = _parse_columns(block, schema.names, types, keys)
        if table is None:
            return None
        columns = []
        for column, type_ in zip(table.columns, types, strict=True):
            columns.append(convert_parsed(column.combine_chunks(), type_))
    except (pa.ArrowInvalid, TextMisfit, UnicodeDecodeError):  # the last for a key of a map
        return None
    if table.num_rows != count:  # Arrow reads any number of objects in a line
        return None
    return pa.table(columns, schema=schema.to_arrow())


def _no_constant(name: str) -> Any:
    """Reject NaN and Infinity, which Python's JSON decoder would accept."""
    raise ValueError(f"{name} is no number of JSON")


_decode_line = json.JSONDecoder(
    parse_float=Number,
    parse_int=Number,
    parse_constant=_no_constant,
    object_pairs_hook=unique_members,
).decode


def _parse_lines(
    block: bytes, first: int, schema: Schema, where: str, required: tuple[str, ...]
) -> pa.Table:
    """Return the records, read line by line, which is slow. Raises SchemaMismatchError, which
    names the line.
    """
    numbers: list[int] = []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(block.split(b"\n"), first):
        if line.strip(_BLANKS):
            numbers.append(number)
            record = _parse_line(line, number, schema, where)
            _require_members(record, required, schema, number, where)
            records.append(record)
    columns = []
    for field in schema.fields:
        try:
            values = [record.get(field.name) for record in records]
            columns.append(column_from_json(values, parse_type(field.type)))
        except JsonMisfit as misfit:
            at = numbers[misfit.row]
            described = f"column {field.name + misfit.path!r}"
            if misfit.kind:
                described += f" is declared {misfit.kind}"
            problem = f"{where}, line {at}: {described}: {misfit.reason}."
            raise SchemaMismatchError(problem, _VALUE_STEP, column=field.name, line=at) from misfit
    return pa.table(columns, schema=schema.to_arrow())


def _parse_line(line: bytes, number: int, schema: Schema, where: str) -> dict[str, Any]:
    """Return the record in a line. Raises SchemaMismatchError for anything but an object of
    declared fields.
    """
    column = None
    try:
        record = _decode_line(line.decode())
    except UnicodeDecodeError as error:
        problem = f"it is not UTF-8 at byte {error.start}"
    except RepeatedMemberError as error:
        column = str(error)
        problem = f"field {column!r} is specified twice"
    except (ValueError, RecursionError) as error:
        problem = f"it is not JSON ({error})"
    else:
        if isinstance(record, dict):
            unknown = [name for name in record if name not in schema]
            if not unknown:
                return record
            column = unknown[0]
            problem = f"field {column!r} is not declared"
        else:
            found = "null"
            if record is not None:
                found = JSON_KINDS[type(record)]
            problem = f"it is {found}, expected an object"
    declared = ", ".join(f"{field.name} {field.type}" for field in schema.fields)
    step = "Correct the line: it must be one JSON object with declared fields only."
    problem = f"{where}, line {number}: {problem}. Declared are {declared}."
    raise SchemaMismatchError(problem, step, line=number, column=column)


def _require_members(
    record: dict[str, Any], required: tuple[str, ...], schema: Schema, number: int, where: str
) -> None:
    """Raise SchemaMismatchError for a record that lacks one of the `required` columns or paths."""
    for name in required:
        missing = missing_part(record, name, schema.names)
        if missing is not None:
            found = ", ".join(record) or "no fields"
            problem = (
                f"{where}, line {number}: field {missing!r}, which is part of the key, is missing;"
                f" it has {found}."
            )
            null = json.dumps(nest_value(name, schema.names, None), ensure_ascii=False)[1:-1]
            step = f"Correct the names, or write {null} for records without a key."
            raise SchemaMismatchError(problem, step, line=number, column=missing)


_BATCH = 65_536

_MAX_WHOLE_BYTES = 16 * 1024 * 1024


def read_parquet(
    tree: FileTree,
    file: ListedFile,
    schema: Schema,
    where: str,
    span: tuple[int, int] | None = None,
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the records of a Parquet file as (number of the first, counted from 0; table).

    With `span`, only of the row groups whose first byte is in this range: (start, end) in bytes,
    `end` exclusive. Raises SchemaMismatchError for whatever is not as declared.
    """
    parquet, stored = open_parquet(tree, file, schema, where)
    start, end = span or (0, file.size)
    number = 0
    for group in range(parquet.metadata.num_row_groups):
        rows = parquet.metadata.row_group(group).num_rows
        # A row group without rows may have no page, so no first byte.
        if rows and start <= _first_byte(parquet.metadata.row_group(group)) < end:
            at = number
            try:
                for batch in parquet.iter_batches(_BATCH, row_groups=[group]):
                    rows_read = pa.Table.from_batches([batch])
                    place = partial(record_place, "parquet", at)
                    table = fit_to_schema(cast_table(rows_read, stored), schema, where, place)
                    yield at, table
                    at += table.num_rows
            except (pa.ArrowException, OSError) as error:
                raise unreadable_file_error(where, error) from error
        number += rows


def _first_byte(group: Any) -> int:
    """Return the position in its file at which a row group of Parquet begins."""
    column = group.column(0)
    offsets = (column.data_page_offset, column.dictionary_page_offset)
    return int(min(filter(None, offsets)))


def open_parquet(
    tree: FileTree, file: ListedFile, schema: Schema, where: str
) -> tuple[Any, pa.Schema]:
    """Return the opened file and its columns, in which timestamps that are stored as INT96 are UTC.

    Raises SchemaMismatchError unless its columns and types are the declared ones.
    """
    source = open_input(
        file.size, partial(tree.read, file), partial(tree.read_range, file), _MAX_WHOLE_BYTES
    )
    try:
        parquet = pq.ParquetFile(
            source,
            pre_buffer=True,
            coerce_int96_timestamp_unit="us",
            page_checksum_verification=True,
        )
    except (pa.ArrowException, OSError) as error:
        raise unreadable_file_error(where, error) from error
    stored = _stored_columns(parquet)
    _check_types(stored, schema, where)
    return parquet, stored


def _stored_columns(parquet: Any) -> pa.Schema:
    """Return the columns of a Parquet file; timestamps that are stored as INT96 are UTC."""
    columns = [parquet.schema.column(index) for index in range(len(parquet.schema))]
    is_int96 = [column.physical_type == "INT96" for column in columns]
    stored = parquet.schema_arrow.remove_metadata()
    if not any(is_int96):
        return stored
    leaves = iter(is_int96)
    return pa.schema([field.with_type(_in_utc(field.type, leaves)) for field in stored])


def _in_utc(kind: pa.DataType, leaves: Iterator[bool]) -> pa.DataType:
    """Return an Arrow type with timestamps in UTC where `leaves`, the Parquet columns of its simple
    types in their order, are INT96.
    """
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_utc(field.type, leaves)) for field in kind])
    if pa.types.is_map(kind):
        key = _in_utc(kind.key_type, leaves)
        return pa.map_(key, _in_utc(kind.item_type, leaves))
    if is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_utc(kind.value_type, leaves)))
    if next(leaves):
        return pa.timestamp("us", "UTC")
    return kind


def _check_types(stored: pa.Schema, schema: Schema, where: str) -> None:
    """Raise SchemaMismatchError unless these columns and types are the declared ones."""
    check_column_names(stored.names, schema, where, next_step=_COLUMNS_STEP)
    wrong: dict[str, str] = {}
    for field in schema.fields:
        try:
            stored_type = tree_from_arrow(stored.field(field.name).type, field.name)
        except SchemaMismatchError as error:
            # A timestamp without a zone.
            error.column = field.name
            raise error.reworded(f"{where}: {error.problem}", error.next_step) from error
        found = find_difference(stored_type, parse_type(field.type), field.name, _are_equal)
        if found is not None:
            wrong[field.name] = f"column {found.path!r} is {found.given}, declared {found.declared}"
    if wrong:
        step = "Write the files with the declared types, or change the declared types."
        raise SchemaMismatchError(
            f"{where}: {'; '.join(wrong.values())}.", step, column=next(iter(wrong))
        )


def _are_equal(stored: str, declared: str) -> bool:
    """Whether two parts of types are equal, by their texts."""
    return stored == declared


_TASK_BYTES = 64 * 1024 * 1024
_MAX_THREADS = 16


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file, or the part of a large Parquet file whose row groups begin in [start, end).

    `start` and `end` are byte positions. `number` is the file's index in the list, which is its
    records' `__partition`.
    """

    number: int
    file: ListedFile
    start: int
    end: int


def read_files_with_spark(
    spark: SparkSession, declared: DeclaredFiles, files: Sequence[ListedFile]
) -> DataFrame:
    """Return the records of these files as a frame with the declared columns and those of META.

    `__partition` is the file's index in `files`, `__offset` the record's index in its file, both
    from 0. `__timestamp` is null and `__tombstone` false.
    """
    columns = [
        *((field.name, field.type) for field in declared.schema.fields),
        (PARTITION, "int"),
        (OFFSET, "bigint"),
    ]
    frame = read_in_tasks(
        spark, plan_tasks(files, declared.format), partial(_batches, declared), columns
    )
    return frame.select(
        "*", F.lit(None).cast("timestamp").alias(TIMESTAMP), F.lit(False).alias(TOMBSTONE)
    )


def read_files(declared: DeclaredFiles, files: Sequence[ListedFile]) -> pa.Table:
    """Return what `read_files_with_spark` returns, as an Arrow table in memory, without Spark."""
    columns = [
        *declared.schema.to_arrow(),
        pa.field(PARTITION, pa.int32()),
        pa.field(OFFSET, pa.int64()),
    ]
    batches: list[pa.RecordBatch] = []
    for task in plan_tasks(files, declared.format):
        batches += _batches(declared, task)
    if batches:
        rows = pa.Table.from_batches(batches).cast(pa.schema(columns))
    else:
        rows = pa.schema(columns).empty_table()
    rows = rows.append_column(TIMESTAMP, pa.nulls(rows.num_rows, pa.timestamp("us", "UTC")))
    return rows.append_column(TOMBSTONE, pa.array([False] * rows.num_rows, pa.bool_()))


def count_file_records(declared: DeclaredFiles, files: Sequence[ListedFile]) -> int:
    """Return the number of records in these files, without Spark: from Parquet footers, or by
    reading other files.
    """

    def count(file: ListedFile) -> int:
        if declared.format == "parquet":
            with declared.locating_errors(file):
                # Only reads the footer, which has the number of rows, and the columns, which are
                # validated.
                parquet, _ = open_parquet(
                    declared.tree, file, declared.schema, declared.place(file)
                )
                return int(parquet.metadata.num_rows)
        return sum(table.num_rows for _, table in declared.tables(file))

    return sum(map_in_threads(count, files, _MAX_THREADS))


def plan_tasks(files: Sequence[ListedFile], format: FileFormat) -> list[list[FilePart]]:
    """Return the parts that each task reads: about 64 MiB of one large Parquet file, or several
    small files.
    """
    pieces = []
    for number, file in enumerate(files):
        parts = 1
        if format == "parquet":
            parts = max(1, round(file.size / _TASK_BYTES))
        edges = [file.size * part // parts for part in range(parts + 1)]
        pieces += [FilePart(number, file, start, end) for start, end in pairwise(edges)]
    tasks: list[list[FilePart]] = []
    room = 0
    for piece in pieces:
        size = piece.end - piece.start
        if not tasks or size > room:
            tasks.append([])
            room = _TASK_BYTES
        tasks[-1].append(piece)
        room -= size
    return tasks


def _batches(declared: DeclaredFiles, pieces: Sequence[FilePart]) -> Iterator[pa.RecordBatch]:
    """Yield the records of these parts with their `__partition` and `__offset`."""
    for piece in pieces:
        for first, table in declared.tables(piece.file, (piece.start, piece.end)):
            numbers = pa.array(np.full(table.num_rows, piece.number, np.int32))
            offsets = pa.array(np.arange(first, first + table.num_rows, dtype=np.int64))
            numbered = table.append_column(PARTITION, numbers).append_column(OFFSET, offsets)
            yield from numbered.combine_chunks().to_batches()
