"""Reads external Parquet, CSV, JSON lines and Avro files with exactly the declared columns and
types, or raises an error that names the file and the line.

Nothing is inferred, cast or left out, unless rules allow other columns (`columns.py`):

    Parquet     the columns have the declared types, or with rules also narrower ones (an int32 is
                read as bigint); timestamps have a zone (INT96 is UTC)
    CSV         RFC 4180 with a header line, in UTF-8; an empty field is null, "" is an empty
                string; true and false; dates as 2026-01-31, timestamps as ISO 8601 with a zone;
                binary columns are the field's bytes
    JSON lines  one object per line; an absent field is null; dates and timestamps as in CSV, binary
                as base64
    Avro        container files, whose columns are as in Avro messages of Kafka

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
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dagster_adjunct.resources.documents import RepeatedMemberError, unique_members
from dagster_adjunct.resources.errors import AdjunctError, SchemaMismatchError
from dagster_adjunct.resources.files.avro_files import count_avro, read_avro
from dagster_adjunct.resources.files.columns import ColumnRules, DeclaredColumns, TwoNamesError
from dagster_adjunct.resources.files.json_values import (
    JSON_KINDS,
    JsonMisfit,
    MapKeys,
    Number,
    column_from_json,
    convert_parsed,
    parsed_type,
)
from dagster_adjunct.resources.files.opened import (
    damaged_file_error,
    open_decompressed,
    translate_read_errors,
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
from dagster_adjunct.resources.schemas.records import RowPlace, cast_column
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.schemas.texts import TextMisfit, convert_texts
from dagster_adjunct.resources.schemas.types import (
    Type,
    is_list,
    is_nested,
    parse_type,
    tree_from_arrow,
)
from dagster_adjunct.resources.schemas.values import first_unreadable
from dagster_adjunct.resources.spark.tasks import TASK_BYTES, read_in_tasks, share_among_tasks
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, TIMESTAMP, TOMBSTONE
from dagster_adjunct.resources.threads import map_in_threads

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def describe_column(field: Field) -> str:
    """Return how errors about a column's values begin: with its name and declared type."""
    return f"column {field.name!r} is declared {field.type}"


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
        self._quoted = False  # whether a quoted value goes on behind what was looked at
        # The end of the last block: its last byte that was looked at, then quotes that were not,
        # because the run of quotes may go on.
        self._carried = b""
        self._lines = 1
        self._opened: _Excerpt | None = None  # the last quoted value that goes on
        self._misplaced: _Excerpt | None = None  # the first misplaced quote

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        data = bytes(self._source.read(None if size is None or size < 0 else size))
        self._ended = not data
        self._check_quotes(data or b"\n")
        return data

    def close(self) -> None:
        self._source.close()
        super().close()

    def quote_error(self, where: str) -> SchemaMismatchError | None:
        """Return the error for the first misplaced quote so far, or for a value without its
        closing quote; None if all quotes are right.
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

    def _check_quotes(self, data: bytes) -> None:
        """Note misplaced quotes in the bytes that were read next, and which quoted value goes on
        behind them.
        """
        # A block begins with one byte that was looked at before, so that each quote has a byte
        # before it. At the start of the file that is a line break.
        if self._carried:
            block = self._carried + data
        else:
            block = b"\n" + data.removeprefix(_BOM)
        end = len(block.rstrip(b'"'))  # quotes behind it wait for the next block
        begin = self._check_all_quotes(block, end)
        if self._quoted and begin is not None:
            self._opened = self._excerpt(block, begin, begin + 1)
        self._lines += block.count(b"\n", 1, end)
        self._carried = block[end - 1 :]

    def _check_all_quotes(self, block: bytes, end: int) -> int | None:
        """Check the quotes of a block before `end` all at once, and each of them only if one may be
        misplaced. Return where the last quoted value begins, None without one.
        """
        letters = np.frombuffer(block, np.uint8)
        quotes = np.flatnonzero(letters[1:end] == ord('"')) + 1
        # If none is misplaced, they open and close values in turn. In an escaped pair, the first
        # quote seems to close the value, and the second one to open it again.
        opening = quotes[1::2] if self._quoted else quotes[::2]
        closing = quotes[::2] if self._quoted else quotes[1::2]
        before = letters[opening - 1]
        behind = letters[closing + 1]
        if not np.isin(np.r_[before, behind], [*_DELIMITERS, ord('"')]).all():
            return self._check_each_quote(block, end)
        if len(quotes) % 2:
            self._quoted = not self._quoted
        begins = opening[before != ord('"')]
        return int(begins[-1]) if len(begins) else None

    def _check_each_quote(self, block: bytes, end: int) -> int | None:
        """Check the quotes of a block before `end` one run after the other, and note the first one
        that is misplaced. Return where the last quoted value begins, None without one.
        """
        begin = None
        for run in _QUOTES.finditer(block, 1, end):
            first, behind = run.span()
            count = behind - first
            if not self._quoted:
                if block[first - 1] not in _DELIMITERS:
                    continue  # quotes in the text of a value that is not quoted
                self._quoted = True
                begin = first
                count = count - 1
            if count % 2:
                # In a pair, the first escapes the second; one without a partner closes the value.
                self._quoted = False
                if block[behind] not in _DELIMITERS and self._misplaced is None:
                    self._misplaced = self._excerpt(block, first, max(1, first - 20))
        return begin

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
    tree: FileTree, file: ListedFile, columns: DeclaredColumns, where: str, wanted: Schema
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the records of a CSV file, with the `wanted` columns, as (number of the first record,
    table); see `DeclaredFiles.tables`.
    """
    check_format(columns.schema, "csv", where)
    with tree.on_disk(file) as path, translate_read_errors(where):
        header = _read_header(path, file.path, columns, where)
        fields = [field for field in wanted.fields if field.name in header.sources]
        number = 0
        source = QuoteReader(open_decompressed(path, file.path))
        try:
            for batch in _csv_reader(source, header, fields):
                found = {}
                for field in fields:
                    texts = batch.column(header.sources[field.name])
                    found[field.name] = _convert_field(texts, field, number, where)
                yield number, _with_missing(found, batch.num_rows, wanted)
                number += batch.num_rows
        except pa.ArrowInvalid as error:
            if "Empty CSV file or block" in str(error):
                return  # there is only a header line, without a line break
            # A misplaced quote comes first: because of it, what follows is misread.
            raise source.quote_error(where) or _csv_error(error, header, columns, where) from error
        except SchemaMismatchError as error:
            raise source.quote_error(where) or error from None
        misquoted = source.quote_error(where)  # which Arrow has accepted
        if misquoted is not None:
            raise misquoted


def _with_missing(found: dict[str, Any], rows: int, wanted: Schema) -> pa.Table:
    """Return the columns that were found as a table with the wanted ones, null where missing."""
    schema = wanted.to_arrow()
    columns = [found.get(field.name, pa.nulls(rows, field.type)) for field in schema]
    if not columns:  # a table that keeps the number of rows
        return pa.table({"": pa.nulls(rows)}).select([])
    return pa.table(columns, schema=schema)


def _convert_field(texts: pa.Array, field: Field, first: int, where: str) -> pa.Array:
    """Return the values of a CSV column. Blanks around a value count only in texts and bytes.

    `where` is the file, and `first` the number in it, from 0, of the first of these records: errors
    name the line by them.
    """
    if field.type in ("string", "binary"):  # they have their type already
        return texts
    try:
        return convert_texts(pc.ascii_trim(texts, characters=" \t"), field.type)
    except TextMisfit as misfit:
        line = record_place("csv", first, misfit.row).fields["line"]
        problem = f"{where}, line {line}: {describe_column(field)}: {misfit.reason}."
        raise SchemaMismatchError(problem, _VALUE_STEP, column=field.name, line=line) from misfit


class _Header(NamedTuple):
    """The names in the header line of a CSV file, and those of the declared columns among them."""

    names: list[str]
    sources: dict[str, str]


def _csv_reader(source: Any, header: _Header, fields: Sequence[Field]) -> Any:
    """Return Arrow's reader of these columns of a CSV file, whose fields are texts, or bytes for
    binary columns.
    """
    from pyarrow import csv as arrow_csv

    # Arrow would also convert hexadecimal numbers, and decimals of more digits than declared, so
    # that it only divides the lines into fields.
    kinds = {}
    for field in fields:
        kind = pa.binary() if field.type == "binary" else pa.string()
        kinds[header.sources[field.name]] = kind
    # Without columns, the first one is read as bytes, to count the records.
    convert = arrow_csv.ConvertOptions(
        include_columns=list(kinds) or header.names[:1],
        column_types=kinds or {header.names[0]: pa.binary()},
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    read = arrow_csv.ReadOptions(use_threads=False, block_size=_BLOCK)
    # In a file of one column, an empty line is an empty field, as any other field can be.
    parse = arrow_csv.ParseOptions(
        newlines_in_values=True, ignore_empty_lines=len(header.names) > 1
    )
    return arrow_csv.open_csv(
        source, read_options=read, parse_options=parse, convert_options=convert
    )


def _read_header(path: Path, name: str, columns: DeclaredColumns, where: str) -> _Header:
    """Return the header line. Raises SchemaMismatchError unless it has the declared columns."""
    schema = columns.schema
    with translate_read_errors(where, csv.Error), open_decompressed(path, name) as source:
        text = bytes(source.read(_HEADER)).decode("utf-8-sig", errors="replace")
        rows = csv.reader(io.StringIO(text, newline=""))
        # Empty lines are skipped, unless there is one column, of which they are empty fields.
        names = next((row for row in rows if row or len(schema.fields) == 1), None)
    if not names:
        if names is None:
            begins = "is empty"
        else:
            begins = "begins with an empty line"
        problem = f"{where} {begins}: expected a header line with {', '.join(schema.names)}."
        step = "Deliver the file again; a file without records needs a header line too."
        raise SchemaMismatchError(problem, step, line=1)
    return _Header(names, columns.match(names, where))


def _csv_error(
    error: Exception, header: _Header, columns: DeclaredColumns, where: str
) -> AdjunctError:
    """Return the error for what Arrow's CSV reader has reported, with the line if Arrow
    names one.
    """
    text = str(error)
    if misfit := _NOT_UTF8.match(text):
        given = header.names[int(misfit["column"])]
        name = next(name for name, source in header.sources.items() if source == given)
        line = None
        if misfit["row"]:
            line = int(misfit["row"])
        if line is not None:
            place = f"{where}, line {line}"
        else:
            place = where
        described = describe_column(columns.schema.field(name))
        problem = f"{place}: {described}: the text is not UTF-8."
        return SchemaMismatchError(problem, "Write the file in UTF-8.", column=name, line=line)
    if misfit := _ROW.match(text):
        problem = f"{where}, line {misfit['row']}: {misfit['reason'].rstrip('.')}."
        return SchemaMismatchError(
            problem, "Correct the line: it needs a value for every column.", line=int(misfit["row"])
        )
    return damaged_file_error(where, error)


FileFormat = Literal["parquet", "csv", "jsonl", "avro"]


def check_format(schema: Schema, format: FileFormat, what: str) -> None:
    """Raise SchemaMismatchError for a nested column if the format has only simple values: CSV."""
    for field in schema.fields:
        if format == "csv" and is_nested(field.type):
            raise SchemaMismatchError(
                f"{what}: {describe_column(field)}, but a field of a CSV file is a simple value.",
                "Deliver Parquet, JSON lines or Avro, or declare the column as string.",
                column=field.name,
            )


# That of the first record; a CSV file has a header line.
_FIRST_LINE = {"csv": 2, "jsonl": 1, "parquet": 1, "avro": 1}
_UNITS = {"csv": "line", "jsonl": "line", "parquet": "row", "avro": "record"}


def record_place(format: FileFormat, first: int, row: int) -> RowPlace:
    """Return how errors name a record in its file: as a line, in Parquet as a row, in Avro as a
    record.

    The record is the row number `row` of a table whose first record is number `first` in the file,
    both counted from 0. Line breaks in quoted values are not counted.
    """
    line = first + row + _FIRST_LINE[format]
    return RowPlace(f"{_UNITS[format]} {line}", {"line": line})


@dataclass(frozen=True, slots=True)
class DeclaredFiles:
    """Files of a tree with records in this format and with these columns.

    `what` names the dataset in errors, "" for a stream, which the next step names. If `values` is
    False, errors name the position of a value but do not show it. Each record of JSON lines has a
    member for each `required` column or path, which may be null; others may be absent. In other
    formats, `required` columns may not be missing, whatever the `rules` for files with other
    columns.
    """

    tree: FileTree
    format: FileFormat
    schema: Schema
    what: str
    values: bool = True
    required: tuple[str, ...] = ()
    rules: ColumnRules | None = None

    def describe_file(self, file: ListedFile) -> str:
        """Return how errors name a file."""
        named = f"file {self.tree.url}/{file.path}"
        return f"{self.what}: {named}" if self.what else named

    @property
    def columns(self) -> DeclaredColumns:
        """The declared columns, and the rules for files with others."""
        return DeclaredColumns(self.schema, self.rules, self.required)

    def tables(
        self,
        file: ListedFile,
        span: tuple[int, int] | None = None,
        *,
        rows: tuple[int, int] | None = None,
        names: Sequence[str] | None = None,
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield the records of a file as (number of the first, counted from 0; table with the
        schema's columns, or those of `names`).

        `span` selects the row groups of a Parquet file that begin in this range of bytes, `rows`
        the records [start, end): no more than is needed for them is read. Raises
        SchemaMismatchError for whatever is not as declared, and SourceChangedError.
        """
        wanted = self.schema if names is None else self.schema.select(names)
        start, end = rows or (0, sys.maxsize)
        with (
            self.locating_errors(file),
            closing(self._tables(file, span, (start, end), wanted)) as tables,
        ):
            for number, whole in tables:
                first = max(start, number)
                last = min(end, number + whole.num_rows)
                table = whole.slice(first - number, max(0, last - first))
                if (found := first_unreadable(table)) is not None:
                    at = record_place(self.format, first, found.row)
                    raise found.error(self.describe_file(file), at.text, **at.fields)
                if first < last:
                    yield first, table
                if last == end:  # read no more of the file
                    return

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
                place = self.describe_file(file)
            else:
                place = f"{self.describe_file(file)}, line {error.line}"
            if column is not None:
                place = f"{place}: {describe_column(self.schema.field(column))}"
            problem = f"{place}: the value is not shown, because columns are sensitive."
            about: Any = {"file": error.file, "line": error.line, "column": column}
            raise SchemaMismatchError(problem, error.next_step, **about) from None

    def _tables(
        self, file: ListedFile, span: tuple[int, int] | None, rows: tuple[int, int], wanted: Schema
    ) -> Generator[tuple[int, pa.Table], None, None]:
        """Yield the records of a file as `tables` does, unchecked, and maybe some before and after
        those of `rows`.
        """
        columns = self.columns
        where = self.describe_file(file)
        if self.format == "csv":
            yield from read_csv(self.tree, file, columns, where, wanted)
        elif self.format == "jsonl":
            for number, table in read_jsonl(self.tree, file, columns, where, self.required):
                yield number, table.select(wanted.names)
        elif self.format == "avro":
            names = wanted.names
            for number, table in read_avro(self.tree, file, columns, where, rows, names):
                yield number, _fit(table, columns, wanted, where, partial(self._row, number))
        else:
            yield from read_parquet(self.tree, file, columns, where, span, rows, wanted)

    def _row(self, first: int, row: int) -> RowPlace:
        return record_place(self.format, first, row)

    def row_group_starts(self, file: ListedFile) -> list[int]:
        """Return the numbers of the records, from 0, with which row groups of a Parquet file begin.
        Raises SchemaMismatchError and SourceChangedError.
        """
        with self.locating_errors(file):
            return row_group_starts(
                open_parquet(self.tree, file, self.columns, self.describe_file(file)).file
            )

    def count(self, file: ListedFile) -> int:
        """Return the number of records in a file: from the footer of Parquet, or the heads of
        blocks of Avro, or by reading other files.
        """
        if self.format not in ("parquet", "avro"):
            return sum(table.num_rows for _, table in self.tables(file))
        with self.locating_errors(file):
            where = self.describe_file(file)
            if self.format == "avro":
                return count_avro(self.tree, file, self.columns, where)
            return int(open_parquet(self.tree, file, self.columns, where).file.metadata.num_rows)


def _fit(
    table: pa.Table, columns: DeclaredColumns, wanted: Schema, where: str, place: Any
) -> pa.Table:
    """Return records with a file's names and types as records with the `wanted` columns. `place`
    returns how errors name a row.
    """
    if not wanted.fields:  # a table that keeps the number of rows
        return table.select([])
    found = columns.conform(table, wanted)
    arrays = []
    for field in wanted.fields:
        column = found.column(field.name)
        sensitive = field.sensitive
        arrays.append(
            cast_column(column, field.name, field.type, where, place, sensitive=sensitive)
        )
    return pa.table(arrays, schema=wanted.to_arrow())


_JSON_BLOCK = 8 * 1024 * 1024
_SAMPLE = 64 * 1024
_BLANKS = b" \t\r"


def read_jsonl(
    tree: FileTree,
    file: ListedFile,
    columns: DeclaredColumns,
    where: str,
    required: tuple[str, ...] = (),
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the records of a JSON lines file as (number of the first record, table); see
    `DeclaredFiles.tables`.
    """
    number = 0
    line = 1
    schema = columns.with_older_names.schema
    keys = MapKeys(parse_type(field.type) for field in schema.fields)
    with tree.on_disk(file) as path:
        with translate_read_errors(where):
            source = open_decompressed(path, file.path)
        for block in _blocks(source, where):
            if block.strip(_BLANKS + b"\n"):  # it has a record
                table = _parse_block(block, line, columns, where, required, keys)
                yield number, table
                number += table.num_rows
            line += block.count(b"\n")


def _blocks(source: Any, where: str) -> Iterator[bytes]:
    """Yield the stream's bytes in blocks of whole lines. The last block may be empty, or have a
    line without its line break.
    """
    carried = b""
    first = True
    while True:
        with translate_read_errors(where):
            data = bytes(source.read(_JSON_BLOCK))
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
    block: bytes,
    line: int,
    columns: DeclaredColumns,
    where: str,
    required: tuple[str, ...],
    keys: MapKeys,
) -> pa.Table:
    """Return the records in whole lines of JSON, the first of which is line number `line`."""
    table = _parse_fast(block, columns, keys)
    # Arrow's parser doesn't say whether a null stands in the line or is a missing member.
    if table is None or any(read_values(table, name).null_count for name in required):
        return _parse_lines(block, line, columns, where, required)
    return table


def _count_objects(block: bytes) -> int | None:
    """Return the number of lines that are not blank, or None if one of them can't be an object:
    Arrow would read a line `null` as a record of nulls, or crash.
    """
    text = block.strip(_BLANKS + b"\n")
    breaks = text.count(b"\n")
    # Usually, each line begins and ends with a brace, which is checked for all at once.
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


_Parse = Callable[[bytes, str], "pa.Table"]
"""Parses lines of JSON; the text is Arrow's `unexpected_field_behavior`."""


def _parse_without_others(
    block: bytes, columns: DeclaredColumns, keys: MapKeys, parse: _Parse
) -> pa.Table | None:
    """Return the columns without fields that are left out; None if fields may be there that are
    not left out either.
    """
    if keys.has_maps:  # Arrow would leave out keys that it does not know yet
        return None
    if not columns.ignores_undeclared:
        found = parse(block, "infer").schema
        if not columns.allows(pa.struct(found)):
            return None
    return parse(block, "ignore")


def _parse_with_maps(
    block: bytes, schema: Schema, types: Sequence[Type], keys: MapKeys, parse: _Parse
) -> pa.Table | None:
    """Return the columns with maps as structs of their keys; None if they can't be parsed so."""
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
            for name, type_ in zip(schema.names, types, strict=True):
                keys.learn(type_, found.field(name).type, name)
    if table is None and not keys.too_many:  # all keys are known now
        table = parse(block, "error")
    if keys.may_be_null(block):
        return None
    return table


def _parse_columns(
    block: bytes, schema: Schema, types: Sequence[Type], keys: MapKeys, columns: DeclaredColumns
) -> pa.Table | None:
    """Return the columns with their parsed types; None if maps can't be parsed as structs."""

    def parse(lines: bytes, others: str) -> pa.Table:
        kinds = []
        for name, type_ in zip(schema.names, types, strict=True):
            kinds.append((name, parsed_type(type_, keys, name)))
        return read_json_lines(lines, pa.schema(kinds), others=others)

    if columns.leaves_fields_out:
        return _parse_without_others(block, columns, keys, parse)
    if keys.has_maps:
        return _parse_with_maps(block, schema, types, keys, parse)
    return parse(block, "error")


_INVALID_NUMBER = re.compile(rb"[:\[,]\s*-?(?:NaN|Inf(?:inity)?)\s*[,}\]]")


def _parse_fast(block: bytes, columns: DeclaredColumns, keys: MapKeys) -> pa.Table | None:
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
    schema = columns.with_older_names.schema
    types = [parse_type(field.type) for field in schema.fields]
    try:
        table = _parse_columns(block, schema, types, keys, columns)
        if table is None:
            return None
        converted = []
        for column, type_ in zip(table.columns, types, strict=True):
            converted.append(convert_parsed(column.combine_chunks(), type_))
        found = pa.table(converted, schema=schema.to_arrow())
        # Arrow reads any number of objects in a line.
        return _with_new_names(found, columns) if found.num_rows == count else None
    except (pa.ArrowInvalid, TextMisfit, TwoNamesError, UnicodeDecodeError):
        return None  # UnicodeDecodeError is raised for the key of a map


def _with_new_names(table: pa.Table, columns: DeclaredColumns) -> pa.Table:
    """Return records that may have values under older names with the declared columns. Raises
    TwoNamesError.
    """
    if columns.with_older_names is columns:  # there are no older names
        return table
    return cast_table(columns.conform(table), columns.schema.to_arrow())


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
    block: bytes, first: int, columns: DeclaredColumns, where: str, required: tuple[str, ...]
) -> pa.Table:
    """Return the records, read line by line, which is slow. Raises SchemaMismatchError, which
    names the line.
    """
    numbers: list[int] = []
    records: list[dict[str, Any]] = []
    schema = columns.with_older_names.schema
    for number, line in enumerate(block.split(b"\n"), first):
        if line.strip(_BLANKS):
            numbers.append(number)
            record = _parse_line(line, number, columns, where)
            _require_members(record, required, schema, number, where)
            records.append(record)
    found = []
    for field in schema.fields:
        try:
            values = [record.get(field.name) for record in records]
            found.append(column_from_json(values, parse_type(field.type)))
        except JsonMisfit as misfit:
            at = numbers[misfit.row]
            described = f"column {field.name + misfit.path!r}"
            if misfit.kind:
                described += f" is declared {misfit.kind}"
            problem = f"{where}, line {at}: {described}: {misfit.reason}."
            raise SchemaMismatchError(problem, _VALUE_STEP, column=field.name, line=at) from misfit
    table = pa.table(found, schema=schema.to_arrow())
    try:
        return _with_new_names(table, columns)
    except TwoNamesError:
        raise _two_names_error(table, numbers, columns, where) from None


def _two_names_error(
    table: pa.Table, numbers: Sequence[int], columns: DeclaredColumns, where: str
) -> SchemaMismatchError:
    """Return the error for the first record that has a value under two names of a column."""
    for row, line in enumerate(numbers):
        try:
            columns.conform(table.slice(row, 1))
        except TwoNamesError as error:
            name = str(error)
            problem = f"{where}, line {line}: {name!r} has a value under its older name too."
            step = "Write one of the two, or correct renamed= of the column rules."
            return SchemaMismatchError(problem, step, column=name, line=line)
    raise AssertionError("no record has two names")


def _parse_line(line: bytes, number: int, columns: DeclaredColumns, where: str) -> dict[str, Any]:
    """Return the record in a line. Raises SchemaMismatchError for anything but an object of
    declared fields.
    """
    column = None
    is_undeclared = False
    schema = columns.with_older_names.schema
    try:
        record = _decode_line(line.decode())
    except UnicodeDecodeError as error:
        problem = f"it is not UTF-8 at byte {error.start}"
    except RepeatedMemberError as error:
        column = str(error)
        problem = f"field {column!r} is specified twice"
    except json.JSONDecodeError as error:
        problem = f"it is not JSON at character {error.colno}: {error.msg}"
    except (ValueError, RecursionError) as error:
        problem = f"it is not JSON ({error})"
    else:
        if isinstance(record, dict):
            record = columns.without_others(record)
            unknown = [name for name in record if name not in schema]
            if not unknown:
                return record
            column = unknown[0]
            is_undeclared = True
            problem = f"field {column!r} is not declared"
        else:
            problem = f"it is {_kind_of(record)}, expected an object"
    declared = ", ".join(f"{field.name} {field.type}" for field in schema.fields)
    step = "Correct the line: it must be one JSON object with declared fields only."
    if is_undeclared and columns.rules is not None:
        step += _rules_step(column)
    problem = f"{where}, line {number}: {problem}. Declared are {declared}."
    raise SchemaMismatchError(problem, step, line=number, column=column)


def _rules_step(column: str | None) -> str:
    """Return which rules for columns a file with this undeclared column asks for."""
    return (
        f" Or add {column!r} to the schema, where records without it have a null; or declare"
        f" column_rules=ColumnRules(…) with renamed={{{column!r}: NAME}} if it is the"
        f' older name of a column, or drop=({column!r},) or undeclared="ignore" to leave it out.'
    )


def _kind_of(value: object) -> str:
    """Return the kind of a JSON value, in words."""
    return "null" if value is None else JSON_KINDS[type(value)]


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
    columns: DeclaredColumns,
    where: str,
    span: tuple[int, int] | None,
    rows: tuple[int, int],
    wanted: Schema,
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the records of a Parquet file, with the `wanted` columns, as (number of the first,
    counted from 0; table).

    Only row groups are read that have some of the records `rows`, and, with `span`, whose first
    byte is in this range: (start, end) in bytes, `end` exclusive. Raises SchemaMismatchError for
    whatever is not as declared.
    """
    opened = open_parquet(tree, file, columns, where)
    start, end = span or (0, file.size)
    number = 0
    for group in range(opened.file.metadata.num_row_groups):
        facts = opened.file.metadata.row_group(group)
        after = number + facts.num_rows
        # A row group without rows may have no page, so no first byte.
        if max(number, rows[0]) < min(after, rows[1]) and start <= _first_byte(facts) < end:
            at = number
            for found in _read_group(opened, group, wanted, where):
                place = partial(record_place, "parquet", at)
                yield at, _fit(found, columns, wanted, where, place)
                at += found.num_rows
                if at >= rows[1]:
                    break
        number = after


def _read_group(
    opened: OpenedParquet, group: int, wanted: Schema, where: str
) -> Iterator[pa.Table]:
    """Yield the rows of a row group with the file's columns for the wanted ones; if it has none of
    them, with a column of nulls.
    """
    names = [opened.sources[name] for name in wanted.names if name in opened.sources]
    stored = pa.schema([opened.columns.field(name) for name in names])
    read = names or opened.columns.names[:1]
    with translate_read_errors(where):
        for batch in opened.file.iter_batches(_BATCH, row_groups=[group], columns=read):
            if names:
                yield cast_table(pa.Table.from_batches([batch]).select(names), stored)
            else:
                yield pa.table({"": pa.nulls(batch.num_rows)})


def row_group_starts(parquet: pq.ParquetFile) -> list[int]:
    """Return the numbers of the records, from 0, with which the row groups of a file begin."""
    starts = [0]
    for group in range(parquet.metadata.num_row_groups):
        starts.append(starts[-1] + parquet.metadata.row_group(group).num_rows)
    return starts[:-1]


def _first_byte(group: Any) -> int:
    """Return the position in its file at which a row group of Parquet begins."""
    column = group.column(0)
    offsets = (column.data_page_offset, column.dictionary_page_offset)
    return int(min(filter(None, offsets)))


class OpenedParquet(NamedTuple):
    """An opened Parquet file, its columns, in which timestamps that are stored as INT96 are UTC,
    and the names that it has for the declared ones.
    """

    file: Any
    columns: pa.Schema
    sources: dict[str, str]


def open_parquet(
    tree: FileTree, file: ListedFile, columns: DeclaredColumns, where: str
) -> OpenedParquet:
    """Return the opened file. Raises SchemaMismatchError unless its columns and types are those
    that are declared, or allowed.
    """
    source = open_input(
        file.size, partial(tree.read, file), partial(tree.read_range, file), _MAX_WHOLE_BYTES
    )
    with translate_read_errors(where):
        parquet = pq.ParquetFile(
            source,
            pre_buffer=True,
            coerce_int96_timestamp_unit="us",
            page_checksum_verification=True,
        )
    stored = _stored_columns(parquet)
    sources = columns.match(stored.names, where)
    types = {name: _stored_type(stored.field(name), where) for name in sources.values()}
    columns.check_types(types, sources, where)
    return OpenedParquet(parquet, stored, sources)


def _stored_type(field: pa.Field, where: str) -> Type:
    """Return the type of a column of a Parquet file. Raises SchemaMismatchError for a timestamp
    without a zone.
    """
    try:
        return tree_from_arrow(field.type, field.name)
    except SchemaMismatchError as error:
        error.column = field.name
        raise error.reworded(f"{where}: {error.problem}", error.next_step) from error


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
    """Return the records of these files as an Arrow table in memory, without Spark, with the
    columns that `read_files_with_spark` returns.
    """
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
    """Return the number of records in these files, without Spark."""
    return sum(map_in_threads(declared.count, files, _MAX_THREADS))


def plan_tasks(files: Sequence[ListedFile], format: FileFormat) -> list[list[FilePart]]:
    """Return the parts that each task reads: some of one large Parquet file, or several small
    files.
    """
    pieces = []
    for number, file in enumerate(files):
        parts = 1
        if format == "parquet":
            parts = max(1, round(file.size / TASK_BYTES))
        edges = [file.size * part // parts for part in range(parts + 1)]
        pieces += [FilePart(number, file, start, end) for start, end in pairwise(edges)]
    return share_among_tasks(pieces, lambda piece: piece.end - piece.start)


def _batches(declared: DeclaredFiles, pieces: Sequence[FilePart]) -> Iterator[pa.RecordBatch]:
    """Yield the records of these parts with their `__partition` and `__offset`."""
    for piece in pieces:
        for first, table in declared.tables(piece.file, (piece.start, piece.end)):
            numbers = pa.array(np.full(table.num_rows, piece.number, np.int32))
            offsets = pa.array(np.arange(first, first + table.num_rows, dtype=np.int64))
            numbered = table.append_column(PARTITION, numbers).append_column(OFFSET, offsets)
            yield from numbered.combine_chunks().to_batches()
