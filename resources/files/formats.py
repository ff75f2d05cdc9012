"""Files of others with a JSON object on each line, typed strictly by the declared columns."""

from __future__ import annotations

import base64
import binascii
import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.resources.errors import AdjunctError, SchemaMismatchError
from dagster_adjunct.resources.file_errors import file_error
from dagster_adjunct.resources.objects.arrow_files import RangedFile
from dagster_adjunct.resources.schemas.schema import Field, Schema, arrow_type, fit_to_schema, repeated_names
from dagster_adjunct.resources.schemas.values import first_unreadable
from dagster_adjunct.resources.spark.errors import encode_task_errors
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, TIMESTAMP, TOMBSTONE

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.resources.files.tree import FileTree, ListedFile


def describe_column(field: Field) -> str:
    """Return how errors name a column, before they come to what was found in it."""
    return f"column {field.name!r} is declared {field.type}"


def check_columns(columns: list[str], schema: Schema, where: str) -> None:
    """Refuse a file whose columns are not those declared, each once."""
    twice, there = repeated_names(columns), set(columns)
    missing = [name for name in schema.names if name not in there]
    extra = [name for name in columns if name not in schema]
    parts = [f"column {name!r} stands twice" for name in twice]
    parts += [f"column {name!r} is missing" for name in missing]
    parts += [f"column {name!r} is not declared" for name in extra]
    if parts:
        raise SchemaMismatchError(
            f"{where}: {'; '.join(parts)}. Declared are {', '.join(f'{f.name} {f.type}' for f in schema.fields)}.",
            "Deliver the files with exactly these columns, or declare what they hold.",
            column=[*twice, *missing, *extra][0],
        )


def unreadable_file_error(where: str, error: Exception) -> AdjunctError:
    """Return the error for a file that can't be read as what it should be, or that the file system does not give."""
    if isinstance(error, OSError) and error.errno:
        return file_error(error, error.filename or where, where)
    return SchemaMismatchError(
        f"{where} can't be read: {(str(error) or type(error).__name__).splitlines()[0].rstrip('.')}.",
        "Deliver the file again, whole and in the declared format.",
    )


_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


def open_decompressed(path: Path, name: str) -> Any:
    """Return the decompressed bytes of the file at `path`, which is called `name` where it comes from."""
    import pyarrow as pa

    raw = pa.OSFile(str(path), mode="r")
    codec = _CODECS.get(name[name.rfind(".") :].lower())
    return raw if codec is None else pa.CompressedInputStream(raw, codec)


class TailReader(io.RawIOBase):
    """Passes a stream on and remembers its last bytes."""

    KEPT = 64 * 1024

    def __init__(self, source: Any) -> None:
        self._source = source
        self.tail = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        data = bytes(self._source.read(None if size is None or size < 0 else size))
        self.tail = (self.tail + data)[-self.KEPT :] if len(data) < self.KEPT else data[-self.KEPT :]
        return data

    def close(self) -> None:
        self._source.close()
        super().close()


_HEADER = 1024 * 1024
_BLOCK = 16 * 1024 * 1024
_CONVERSION = re.compile(r"In CSV column #(\d+): (?:Row #(\d+): )?(?:CSV conversion error to [^:]*: )?(.*)", re.S)
_ROW = re.compile(r"CSV parse error: Row #(\d+): (.*)", re.S)


def read_csv(tree: FileTree, file: ListedFile, schema: Schema, where: str) -> Iterator[tuple[int, pa.Table]]:
    """Yield (number of the first record, table) of the whole file."""
    import pyarrow as pa

    with tree.on_disk(file) as path:
        names = _read_header(path, file.path, schema, where)
        number, last = 0, None  # the last text, where such a column ends the file
        source = TailReader(open_decompressed(path, file.path))
        try:
            for batch in _csv_reader(source, schema):
                table = pa.Table.from_batches([batch])
                if table.num_rows and schema.field(names[-1]).type == "string":
                    last = table.column(names[-1])[-1].as_py()
                yield number, table.select(list(schema.names))
                number += table.num_rows
        except pa.ArrowInvalid as error:
            raise _csv_error(error, names, schema, where) from error
        except OSError as error:
            raise unreadable_file_error(where, error) from error
        _check_closed(source.tail, names[-1], last, where)


def _csv_reader(source: Any, schema: Schema) -> Any:
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


def _read_header(path: Path, name: str, schema: Schema, where: str) -> list[str]:
    """Return the names in the file's first line, which have to be the declared ones."""
    try:
        with open_decompressed(path, name) as source:
            text = bytes(source.read(_HEADER)).decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise unreadable_file_error(where, error) from error
    names = next((row for row in csv.reader(io.StringIO(text)) if row), None)
    if names is None:
        raise SchemaMismatchError(
            f"{where} is empty: expected a header line with {', '.join(schema.names)}.",
            "Deliver the file again; a file without records has its header line.",
            line=1,
        )
    check_columns(names, schema, where)
    return names


def _csv_error(error: Exception, names: list[str], schema: Schema, where: str) -> AdjunctError:
    text = str(error)
    if misfit := _CONVERSION.match(text):
        name = names[int(misfit[1])]
        line = int(misfit[2]) if misfit[2] else None
        place = where if line is None else f"{where}, line {line}"
        return SchemaMismatchError(
            f"{place}: {describe_column(schema.field(name))}: {misfit[3].rstrip('.')}.",
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
    return unreadable_file_error(where, error)


def _check_closed(tail: bytes, column: str, last: str | None, where: str) -> None:
    """Refuse a file that ends inside of a quoted value: the reader takes its end for the closing quote.

    Without this, one quote too many would swallow all lines after it into one value.
    """
    if last is None or len(last) > TailReader.KEPT // 8:
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


# Parquet, CSV and JSON lines as Arrow tables of exactly the declared columns and types, or an error that says where.
#
# Nothing is guessed, cast or left out:
#
#     Parquet     the columns have the declared types; timestamps have a zone (INT96 is UTC)
#     CSV         RFC 4180 with a header line, in UTF-8; an empty field is null, "" is an empty text; true and false;
#                 dates as 2026-01-31, timestamps as ISO 8601 with a zone; binary columns are the field's bytes
#     JSON lines  one object a line; an absent field is null; dates and timestamps are texts as in CSV, binary is base64
#
# Columns may be in any order. Files called .gz, .bz2 or .zst are decompressed, except Parquet, which compresses itself.


FileFormat = Literal["parquet", "csv", "jsonl"]
_FIRST_LINE = {"csv": 2, "jsonl": 1, "parquet": 1}  # the header line is the first one of a CSV


def record_position(format: FileFormat, number: int) -> tuple[str, int]:
    """Return where the record of this number, counted from 0, is in its file: in words, and as a number.

    A line break in a quoted value begins no line here.
    """
    line = number + _FIRST_LINE[format]
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

    def place(self, file: ListedFile) -> str:
        """Return how errors name a file."""
        return f"{self.what}: file {self.tree.url}/{file.path}"

    def tables(self, file: ListedFile, span: tuple[int, int] | None = None) -> Iterator[tuple[int, pa.Table]]:
        """Yield the records of a file as (number of the first, counted from 0; table with the schema's columns).

        `span` chooses the row groups of a Parquet file that begin in these bytes. Raises SchemaMismatchError for
        whatever is not as declared, and SourceChangedError.
        """
        with self.locating_errors(file):
            for number, table in self._tables(file, span):
                if (found := first_unreadable(table)) is not None:
                    place, line = record_position(self.format, number + found.row)
                    raise found.error(self.place(file), place, line=line)
                yield number, table

    @contextmanager
    def locating_errors(self, file: ListedFile) -> Iterator[None]:
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
            place = f"{place}: {describe_column(self.schema.field(name))}"
        return SchemaMismatchError(
            f"{place}: what was found is not told, because columns are sensitive.",
            error.next_step,
            file=error.file,
            line=error.line,
            column=name,
        )

    def _tables(self, file: ListedFile, span: tuple[int, int] | None) -> Iterator[tuple[int, pa.Table]]:
        if self.format == "parquet":
            return read_parquet(self.tree, file, self.schema, self.place(file), span)
        if self.format == "csv":
            return read_csv(self.tree, file, self.schema, self.place(file))
        return read_jsonl(self.tree, file, self.schema, self.place(file))


_JSON_BLOCK = 8 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_TEXTS = ("date", "timestamp", "binary")


def read_jsonl(tree: FileTree, file: ListedFile, schema: Schema, where: str) -> Iterator[tuple[int, pa.Table]]:
    """Yield (number of the first record, table) of the whole file."""
    number, line = 0, 1
    with tree.on_disk(file) as path:
        for block in _blocks(open_decompressed(path, file.path), where):
            if block.strip():
                table = _parse_block(block, line, schema, where)
                yield number, table
                number += table.num_rows
            line += block.count(b"\n")


def _blocks(source: Any, where: str) -> Iterator[bytes]:
    """Yield the stream in blocks of whole lines."""
    carried, first = b"", True
    while True:
        try:
            data = bytes(source.read(_JSON_BLOCK))
        except OSError as error:
            raise unreadable_file_error(where, error) from error
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


def _parse_block(block: bytes, line: int, schema: Schema, where: str) -> pa.Table:
    import pyarrow as pa

    try:
        table = _read_json(block, schema.fields)
    except pa.ArrowInvalid as error:
        raise _json_error(block, line, schema, where, error) from error
    columns = []
    for field in schema.fields:
        try:
            columns.append(_convert_column(table.column(field.name), field))
        except (pa.ArrowInvalid, binascii.Error, ValueError) as error:
            raise SchemaMismatchError(
                f"{where}: {describe_column(field)}: {str(error).splitlines()[0]}",
                "Write dates as 2026-01-31, timestamps as ISO 8601 with a zone, binary values as base64.",
                column=field.name,
            ) from error
    return pa.table(columns, schema=schema.to_arrow())


def _read_json(block: bytes, fields: tuple[Field, ...], *, others: str = "error") -> pa.Table:
    import pyarrow as pa
    import pyarrow.json as pj

    kinds = [(field.name, pa.string() if field.type in _TEXTS else arrow_type(field.type)) for field in fields]
    return pj.read_json(
        io.BytesIO(block),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
        parse_options=pj.ParseOptions(explicit_schema=pa.schema(kinds), unexpected_field_behavior=others),
    )


def _convert_column(column: pa.ChunkedArray, field: Field) -> pa.ChunkedArray:
    import pyarrow as pa

    if field.type in _TEXTS:
        column.validate(full=True)  # the parser takes texts that are not UTF-8
    if field.type == "binary":
        values = [None if text is None else base64.b64decode(text, validate=True) for text in column.to_pylist()]
        return pa.chunked_array([pa.array(values, pa.binary())])
    return column.cast(arrow_type(field.type))


def _json_error(block: bytes, first: int, schema: Schema, where: str, error: Exception) -> AdjunctError:
    """Return an error that names the line and the column: read again slowly, since the fast reader names neither."""
    import pyarrow as pa

    lines = block.split(b"\n")
    for number, line in enumerate(lines, first):
        if problem := _find_line_problem(line, schema):
            return SchemaMismatchError(
                f"{where}, line {number}: {problem}. Declared are "
                f"{', '.join(f'{field.name} {field.type}' for field in schema.fields)}.",
                "Mend the line: one JSON object with declared fields only.",
                line=number,
            )
    for field in schema.fields:
        try:
            _read_json(block, (field,), others="ignore")
        except pa.ArrowInvalid as arrow_error:
            number = first + _find_first_bad_line(lines, field)
            return SchemaMismatchError(
                f"{where}, line {number}: {describe_column(field)}: {arrow_error}",
                "Mend the value, or declare the column as what it holds.",
                column=field.name,
                line=number,
            )
    return unreadable_file_error(where, error)


def _find_line_problem(line: bytes, schema: Schema) -> str:
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


def _find_first_bad_line(lines: list[bytes], field: Field) -> int:
    """Return the index of the first line whose value of the column can't be read, by halving."""
    import pyarrow as pa

    low, high = 0, len(lines)
    while high - low > 1:
        middle = (low + high) // 2
        part = b"\n".join(lines[low:middle])
        try:
            if part.strip():
                _read_json(part, (field,), others="ignore")
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low


_BATCH = 65_536

_MAX_WHOLE_BYTES = 16 * 1024 * 1024
_BUFFER = 1024 * 1024


def read_parquet(
    tree: FileTree, file: ListedFile, schema: Schema, where: str, span: tuple[int, int] | None = None
) -> Iterator[tuple[int, pa.Table]]:
    """Yield (number of the first record, table) of the row groups that begin in `span`."""
    import pyarrow as pa

    parquet, int96 = _open_parquet(tree, file, schema, where)
    start, end = span or (0, file.size)
    number = 0
    for group in range(parquet.metadata.num_row_groups):
        rows = parquet.metadata.row_group(group).num_rows
        if start <= _first_byte(parquet.metadata.row_group(group).column(0)) < end:
            at = number
            try:
                for batch in parquet.iter_batches(_BATCH, row_groups=[group]):
                    table = fit_to_schema(
                        _with_time_zones(pa.Table.from_batches([batch]), int96), schema, where, partial(_row_label, at)
                    )
                    yield at, table
                    at += table.num_rows
            except (pa.ArrowException, OSError) as error:
                raise unreadable_file_error(where, error) from error
        number += rows


def _row_label(first: int, row: int) -> tuple[str, dict[str, int]]:
    line = first + row + 1
    return f"row {line}", {"line": line}


def count_parquet(tree: FileTree, file: ListedFile, schema: Schema, where: str) -> int:
    """Return how many records the file holds and check its columns: from its footer alone."""
    return int(_open_parquet(tree, file, schema, where)[0].metadata.num_rows)


def _open_parquet(tree: FileTree, file: ListedFile, schema: Schema, where: str) -> tuple[Any, set[str]]:
    """Return the opened file, and its columns that hold timestamps as INT96."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = _open_ranged(tree, file)
    try:
        parquet = pq.ParquetFile(
            pa.PythonFile(io.BufferedReader(source, _BUFFER), mode="r"),
            pre_buffer=True,
            coerce_int96_timestamp_unit="us",
            page_checksum_verification=True,
        )
    except (pa.ArrowException, OSError) as error:
        raise unreadable_file_error(where, error) from error
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


def _with_time_zones(table: pa.Table, int96: set[str]) -> pa.Table:
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


def _first_byte(column: Any) -> int:
    pages: list[int | None] = [column.data_page_offset, column.dictionary_page_offset]
    return min(offset for offset in pages if offset)


def _open_ranged(tree: FileTree, file: ListedFile) -> RangedFile:
    """Return a listed file that can be sought in: fetched whole while it is small, else by ranges."""
    if file.size > _MAX_WHOLE_BYTES:
        return RangedFile(file.size, partial(tree.read_range, file))
    whole = memoryview(tree.read(file))
    return RangedFile(file.size, lambda at, count: whole[at : at + count])


# Files of others as one Spark frame: read by Python tasks, each from the very objects that were listed.
#
# Spark's own readers would open whatever lies under a path by then, take patterns for names, and turn a value that
# does not parse into null. Here each task reads listed files with the reader that also checks them, and fails with an
# error that names file and column. Large Parquet files are shared out by their row groups.


_TASK_BYTES = 64 * 1024 * 1024
_MAX_THREADS = 16


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file, or the part of a large Parquet file whose row groups begin in [start, end).

    `number` is the file's place in the list, which stands in `__partition` of its records.
    """

    number: int
    file: ListedFile
    start: int
    end: int


def read_files_with_spark(spark: SparkSession, declared: DeclaredFiles, files: Sequence[ListedFile]) -> DataFrame:
    """Return the records of these files: the columns that are declared, then those of META.

    `__partition` is the file's place in `files`, `__offset` the record's in its file, both counted from 0.
    """
    from pyspark.sql import functions as F

    tasks, schema = plan_tasks(files, declared.format), declared.schema
    read = _task_reader(declared, tasks)
    # By position: mapInArrow looks columns up by name, and stumbles over dots and backticks in them.
    kinds = [*(field.type for field in schema.fields), "int", "bigint"]
    ddl = ", ".join(f"c{index} {kind}" for index, kind in enumerate(kinds))
    frame = spark.range(0, len(tasks), 1, max(1, len(tasks))).mapInArrow(read, ddl)
    return frame.select(
        *[F.col(f"c{index}").alias(name) for index, name in enumerate((*schema.names, PARTITION, OFFSET))],
        F.lit(None).cast("timestamp").alias(TIMESTAMP),
        F.lit(False).alias(TOMBSTONE),
    )


def read_files(declared: DeclaredFiles, files: Sequence[ListedFile]) -> pa.Table:
    """Return what `files_frame` does without Spark; all of it is held in memory."""
    import pyarrow as pa

    columns = [*declared.schema.to_arrow(), pa.field(PARTITION, pa.int32()), pa.field(OFFSET, pa.int64())]
    parts = [
        batch.rename_columns([column.name for column in columns])
        for task in plan_tasks(files, declared.format)
        for piece in task
        for batch in _batches(declared, piece)
    ]
    rows = pa.Table.from_batches(parts).cast(pa.schema(columns)) if parts else pa.schema(columns).empty_table()
    rows = rows.append_column(TIMESTAMP, pa.nulls(rows.num_rows, pa.timestamp("us", "UTC")))
    return rows.append_column(TOMBSTONE, pa.array([False] * rows.num_rows, pa.bool_()))


def count_file_records(declared: DeclaredFiles, files: Sequence[ListedFile]) -> int:
    """Return how many records these files hold, without Spark: Parquet by footers, texts by reading them."""

    def count(file: ListedFile) -> int:
        if declared.format == "parquet":
            with declared.locating_errors(file):
                return count_parquet(declared.tree, file, declared.schema, declared.place(file))
        return sum(table.num_rows for _, table in declared.tables(file))

    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        return sum(pool.map(count, files))


def plan_tasks(files: Sequence[ListedFile], format: FileFormat) -> list[list[FilePart]]:
    """Return what each task reads: about 64 MiB, of one large Parquet file or of several small files."""
    pieces = []
    for number, file in enumerate(files):
        parts = max(1, round(file.size / _TASK_BYTES)) if format == "parquet" else 1
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


def _task_reader(
    declared: DeclaredFiles, tasks: list[list[FilePart]]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read(batches: Iterator[Any]) -> Iterator[Any]:
        wanted = [number for batch in batches for number in batch.column(0).to_pylist()]
        for number in wanted:
            for piece in tasks[number]:
                yield from encode_task_errors(_batches(declared, piece))

    return read


def _batches(declared: DeclaredFiles, piece: FilePart) -> Iterator[pa.RecordBatch]:
    import numpy as np
    import pyarrow as pa

    for first, table in declared.tables(piece.file, (piece.start, piece.end)):
        rows = table.num_rows
        marks = [
            pa.array(np.full(rows, piece.number, np.int32)),
            pa.array(np.arange(first, first + rows, dtype=np.int64)),
        ]
        columns = [*table.columns, *marks]
        numbered = pa.table(columns, names=[f"c{index}" for index in range(len(columns))])
        yield from numbered.combine_chunks().to_batches()
