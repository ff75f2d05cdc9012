"""Infers a schema from a sample of files: JSON lines, CSV or Parquet, local or in S3.

Each file gives its share of the sample, from its beginning. Parquet declares its types, so that
only JSON lines and CSV are inferred from values.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from dagster_adjunct.assets.exchange.file_appends import format_of
from dagster_adjunct.resources.documents import RepeatedMemberError, unique_members
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    SchemaMismatchError,
    translate_file_errors,
)
from dagster_adjunct.resources.files.columns import DeclaredColumns
from dagster_adjunct.resources.files.formats import FileFormat, read_csv
from dagster_adjunct.resources.files.opened import open_decompressed, translate_read_errors
from dagster_adjunct.resources.files.tree import FileTree, ListedFile, LocalTree, open_tree
from dagster_adjunct.resources.lazy_modules import pa, pq, pt
from dagster_adjunct.resources.objects.arrow_files import open_input
from dagster_adjunct.resources.schemas.inference import Doubt, Inference, InferredSchema
from dagster_adjunct.resources.schemas.schema import Schema

_BLOCK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_MAX_WHOLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SampledFile:
    """A file of a tree, and its format."""

    tree: FileTree
    file: ListedFile
    format: FileFormat

    @property
    def url(self) -> str:
        """Where the file is."""
        return f"{self.tree.url}/{self.file.path}"


def infer_from_files(
    urls: Sequence[str], *, rows: int, format: FileFormat | None = None, times: bool = False
) -> InferredSchema:
    """Return the schema of the records in these files and folders, from at most `rows` of them.

    Without `format`, the names of the files say it. With `times`, texts of JSON that all are dates
    or times with a zone become dates and timestamps. Raises ConfigurationError for files that are
    not there or of several formats, SchemaMismatchError for records that no schema can hold.
    """
    files = find_files(urls, format)
    if files[0].format == "parquet":
        return _declared_by_parquet(files, rows)
    what = files[0].url if len(files) == 1 else f"{len(files)} files"
    inference = Inference(what, texts=files[0].format == "csv", times=times)
    share = -(-rows // len(files))
    read = _csv_records if files[0].format == "csv" else _json_records
    for each in files:
        for record in islice(read(each), share):
            inference.add(record)
    return inference.result()


def find_files(urls: Sequence[str], format: FileFormat | None = None) -> list[SampledFile]:
    """Return the files that have these URLs or are in these folders, in order; all have one
    format.
    """
    files = []
    for url in urls:
        found = _in_s3(url) if url.startswith(("s3://", "s3a://")) else _local(url)
        for tree, file in found:
            files.append(SampledFile(tree, file, format or format_of(Path(file.path))))
    formats = sorted({each.format for each in files})
    if len(formats) > 1:
        problem = f"the files have several formats: {', '.join(formats)}."
        raise ConfigurationError(problem, "Name files of one format.", setting="FILES")
    return files


def _local(url: str) -> list[tuple[FileTree, ListedFile]]:
    """Return the file at a path, or all files in the folder at it, each with its tree."""
    path = Path(url.removeprefix("file://")).expanduser().resolve()
    with translate_file_errors(path, "a sample"):
        if path.is_file():
            tree = LocalTree(str(path.parent))
            return [(tree, tree.listed(path.name))]
        if not path.is_dir():
            problem = f"{path} is not there: expected a file or folder."
            raise ConfigurationError(problem, "Check the path.", url=url)
    return _in_folder(LocalTree(str(path)), url)


def _in_s3(url: str) -> list[tuple[FileTree, ListedFile]]:
    """Return the file at a URL, or all files in the folder at it, each with its tree."""
    parent, _, name = url.rstrip("/").rpartition("/")
    is_bucket = parent.endswith(":/")
    if name and not is_bucket:
        tree = open_tree(parent)
        for file in tree.list(name):
            if file.path == name:
                return [(tree, file)]
    return _in_folder(open_tree(url), url)


def _in_folder(tree: FileTree, url: str) -> list[tuple[FileTree, ListedFile]]:
    """Return the files of a tree that are not empty or hidden, each with the tree. Raises
    ConfigurationError if there are none.
    """
    found = []
    for file in tree.list():
        parts = file.path.split("/")
        if not any(part.startswith(("_", ".")) for part in parts) and file.size:
            found.append((tree, file))
    if not found:
        problem = f"there are no files in {url}."
        raise ConfigurationError(problem, "Check the folder.", url=url)
    return found


# -- JSON lines


def _json_records(sampled: SampledFile) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of JSON lines. Raises SchemaMismatchError with the line."""
    decode = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=unique_members).decode
    for number, line in enumerate(_lines(sampled), 1):
        if not line.strip():
            continue
        try:
            record = decode(line.decode())
        except UnicodeDecodeError:
            problem = "it is not UTF-8"
        except RepeatedMemberError as error:
            problem = f"the field {str(error)!r} is specified twice"
        except (ValueError, RecursionError) as error:
            problem = f"it is not JSON ({error})"
        else:
            if isinstance(record, dict):
                yield record
                continue
            problem = f"it is {ascii(record)[:40]}, not an object"
        step = "Write one JSON object per line; `jq -c '.[]'` makes lines of an array."
        raise SchemaMismatchError(
            f"{sampled.url}, line {number}: {problem}.", step, file=sampled.url, line=number
        )


def _no_constant(name: str) -> Any:
    """Reject NaN and Infinity, which Python's JSON decoder would accept."""
    raise ValueError(f"{name} is no number of JSON")


def _lines(sampled: SampledFile) -> Iterator[bytes]:
    """Yield the lines of a file, decompressed, without the byte order mark at its beginning. What
    follows the last line break is a line, too, and may be empty.
    """
    with (
        sampled.tree.on_disk(sampled.file) as path,
        translate_read_errors(sampled.url),
        open_decompressed(path, sampled.file.path) as source,
    ):
        carried = b""  # the beginning of a line that goes on in the next block
        is_first = True
        while True:
            data = bytes(source.read(_BLOCK))
            if is_first:
                data = data.removeprefix(_BOM)
                is_first = False
            if not data:
                yield carried
                return
            *lines, carried = (carried + data).split(b"\n")
            yield from lines


# -- CSV


def _csv_records(sampled: SampledFile) -> Iterator[dict[str, Any]]:
    """Yield the records of a CSV file, whose values are all texts."""
    names = _header(sampled)
    schema = Schema.of(dict.fromkeys(names, "string"))
    columns = DeclaredColumns(schema)
    for _, table in read_csv(sampled.tree, sampled.file, columns, sampled.url, schema):
        for batch in table.to_batches(max_chunksize=1_000):
            yield from batch.to_pylist()


def _header(sampled: SampledFile) -> list[str]:
    """Return the column names in the first line of a CSV file."""
    with (
        sampled.tree.on_disk(sampled.file) as path,
        translate_read_errors(sampled.url, csv.Error),
        open_decompressed(path, sampled.file.path) as source,
    ):
        text = bytes(source.read(_BLOCK)).decode("utf-8-sig", errors="replace")
        names = next(csv.reader(io.StringIO(text, newline="")), [])
    if not names:
        problem = f"{sampled.url} does not begin with a header line."
        step = "Write the names of the columns into its first line."
        raise SchemaMismatchError(problem, step, file=sampled.url, line=1)
    return names


# -- Parquet


def _declared_by_parquet(files: Sequence[SampledFile], rows: int) -> InferredSchema:
    """Return the columns that Parquet files declare; the sample only finds columns that might be a
    key.
    """
    doubts: list[Doubt] = []
    first = files[0]
    schema = _parquet_schema(first, _open_parquet(first), doubts)
    names = [field.name for field in schema.fields if field.type in ("string", "bigint", "int")]
    share = -(-rows // len(files))
    inference = Inference("the files")
    for each in files:
        parquet = _open_parquet(each)
        difference = schema.difference(_parquet_schema(each, parquet, []))
        if difference:
            problem = f"{each.url} has other columns than {first.url}: {difference}."
            raise SchemaMismatchError(problem, "Name files of the same columns.", file=each.url)
        for record in islice(_parquet_records(each, parquet, names), share):
            inference.add(record)
    unique = inference.unique(schema)
    return InferredSchema(schema, tuple(doubts), inference.records, unique)


def _open_parquet(sampled: SampledFile) -> Any:
    """Return a Parquet file, opened by pyarrow, which reads its rows when they are requested."""
    tree = sampled.tree
    file = sampled.file
    source = open_input(
        file.size, partial(tree.read, file), partial(tree.read_range, file), _MAX_WHOLE_BYTES
    )
    with translate_read_errors(sampled.url):
        return pq.ParquetFile(source, coerce_int96_timestamp_unit="us")


def _parquet_schema(sampled: SampledFile, parquet: Any, doubts: list[Doubt]) -> Schema:
    """Return the columns that a Parquet file declares; those without a type are texts, and added to
    `doubts`. Times in INT96, which have no zone, are taken as UTC.
    """
    fields = []
    int96 = set()
    for index in range(len(parquet.schema)):
        column = parquet.schema.column(index)
        if column.physical_type == "INT96":
            int96.add(column.path)
    for field in parquet.schema_arrow:
        kind = pa.timestamp("us", "UTC") if field.name in int96 else field.type
        if pt.is_null(kind):
            doubts.append(Doubt(field.name, "null in all records", "string"))
            kind = pa.string()
        fields.append(pa.field(field.name, kind))
    try:
        return Schema.from_arrow(pa.schema(fields))
    except SchemaMismatchError as error:
        raise error.reworded(f"{sampled.url}: {error.problem}", error.next_step) from error


def _parquet_records(
    sampled: SampledFile, parquet: Any, names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the records of a Parquet file with these columns."""
    with translate_read_errors(sampled.url):
        for batch in parquet.iter_batches(1_000, columns=list(names)):
            yield from batch.to_pylist()
