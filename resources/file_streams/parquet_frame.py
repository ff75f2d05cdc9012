"""Reads whole Parquet files by Spark's own reader, which is faster than tasks in Python.

Spark lists the files when the frame is made, and reads what it has listed. The ETags are compared
after that. A file that is replaced later is found by a second scan, which reads sizes and times of
modification while the frame is read, and has no rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.bucketing.hashing import spark_hash
from dagster_adjunct.resources.file_streams.log import AdmittedFile
from dagster_adjunct.resources.files.formats import DeclaredFiles
from dagster_adjunct.resources.files.tree import FileTree, ListedFile, LocalTree, S3Tree
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.schemas.schema import named_column
from dagster_adjunct.resources.schemas.types import (
    Array,
    Simple,
    Struct,
    Type,
    parse_type,
    tree_from_arrow,
)
from dagster_adjunct.resources.schemas.values import MICROS
from dagster_adjunct.resources.spark.tasks import raise_error_column
from dagster_adjunct.resources.spark.tuning import bigint_array
from dagster_adjunct.resources.streams.system import OFFSET, TIMESTAMP
from dagster_adjunct.resources.threads import map_in_threads
from dagster_adjunct.resources.times import to_microseconds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# Spark lists more paths than these in a job.
_FILES_OF_A_SCAN = 32
_SMALL = 1024 * 1024
_THREADS = 16
_S3A = "spark.hadoop.fs.s3a."
_OPTIONS = {
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
    "recursiveFileLookup": "false",
    "mergeSchema": "false",
}
# Hadoop rejects colons, and Spark takes the others for patterns.
_SPECIAL = ":*?[]{}\\"
_STEP = "Restore the file as it was when it was admitted, and run it again."


def read_whole_files(
    spark: SparkSession,
    declared: DeclaredFiles,
    files: Sequence[AdmittedFile],
    added: Sequence[dict[str, pa.Array]],
) -> DataFrame | None:
    """Return the records of whole files, with the `added` columns of each, OFFSET and TIMESTAMP, or
    None if Spark can't read them, or not faster than tasks do.

    Raises SourceChangedError for a file that is not as it was admitted.
    """
    many_small = len(files) > _FILES_OF_A_SCAN and sum(f.size for f in files) < _SMALL * len(files)
    if many_small or not _is_reachable(spark, declared.tree):
        return None
    if not all(_is_plain(spark_url(declared.tree, file.path)) for file in files):
        return None
    frames = []
    for start in range(0, len(files), _FILES_OF_A_SCAN):
        end = start + _FILES_OF_A_SCAN
        scan = _Scan(spark, declared, files[start:end], added[start:end])
        frame = scan.frame()
        if frame is None:
            return None
        frames.append(frame)

    def check(file: AdmittedFile) -> tuple[str, str]:
        listed = ListedFile(file.path, file.size, file.etag, file.modified_at)
        # The same contents may have been written again since the file was admitted.
        modified = to_microseconds(declared.tree.check(listed)) // 1000
        return spark_url(declared.tree, file.path), f"{file.size} {modified}"

    facts = dict(map_in_threads(check, files, _THREADS))
    records = reduce(lambda one, other: one.unionByName(other), frames)
    return records.unionByName(_checks(spark, facts, records))


class _Places(NamedTuple):
    """Files by place in arrays, with gaps; a record's path, its file's place, and whether it is
    known.
    """

    files: list[AdmittedFile | None]
    path: Column
    of_record: Column
    is_known: Column


class _Scan:
    """One scan of few files."""

    def __init__(
        self,
        spark: SparkSession,
        declared: DeclaredFiles,
        files: Sequence[AdmittedFile],
        added: Sequence[dict[str, pa.Array]],
    ) -> None:
        self._spark = spark
        self._declared = declared
        self._files = files
        self._added = added

    def frame(self) -> DataFrame | None:
        """Return the records; None if Spark lists other files."""
        from pyspark.errors import PySparkException

        urls = {spark_url(self._declared.tree, file.path): file for file in self._files}
        reader = self._spark.read.options(**_OPTIONS).schema(self._declared.schema.ddl())
        try:
            scan = reader.parquet(*urls)
            listed = scan.inputFiles()
        except PySparkException:
            return None
        if sorted(map(_normal_url, listed)) != sorted(urls):
            return None
        by_uri = {}
        for uri in listed:
            by_uri[uri] = by_uri[uri.replace("file:///", "file:/")] = urls[_normal_url(uri)]
        places = self._places(by_uri)
        if places is None:
            return None
        firsts = bigint_array(file.first if file else 0 for file in places.files)
        times = bigint_array(file.modified if file else 0 for file in places.files)
        offset = F.get(firsts, places.of_record) + F.col("_metadata.row_index")
        unknown = raise_error_column(errors.AdmittedFileError, places.path, _STEP).cast("bigint")
        return scan.select(
            *self._own_columns(),
            *self._added_columns(places),
            F.when(places.is_known, offset).otherwise(unknown).alias(OFFSET),
            F.timestamp_micros(F.get(times, places.of_record)).alias(TIMESTAMP),
        )

    def _own_columns(self) -> Iterator[Column]:
        """Yield the columns of the files, which fail for a value that Python can't hold."""
        path = F.col("_metadata.file_path")
        for field in self._declared.schema.fields:
            value = named_column(field.name)
            check = _is_readable(value, parse_type(field.type))
            if check is not None:
                error = self._unreadable(field.name, path)
                value = F.when(value.isNull() | check, value).otherwise(error)
            yield value.alias(field.name)

    def _places(self, by_uri: Mapping[str, AdmittedFile]) -> _Places | None:
        """Return where the facts of each file are in arrays, as a search for its path among all
        would take longer than reading the record: at the hash of the path, modulo a number by which
        the hashes of all differ. None if two hashes are equal.
        """
        hashes = spark_hash([pa.array(by_uri, pa.string())]).tolist()
        if len({*hashes}) < len(hashes):
            return None
        size = len(hashes)
        while len({each % size for each in hashes}) < len(hashes):
            size += 1
        files: list[AdmittedFile | None] = [None] * size
        known = [0] * size
        for each, file in zip(hashes, by_uri.values(), strict=True):
            files[each % size] = file
            known[each % size] = each
        path = F.col("_metadata.file_path")
        found = F.hash(path)
        at = F.pmod(found, F.lit(size))
        return _Places(files, path, at, F.get(bigint_array(known), at) == found)

    def _added_columns(self, places: _Places) -> Iterator[Column]:
        values = {file.path: each for file, each in zip(self._files, self._added, strict=True)}
        for name, first in self._added[0].items():
            literals = []
            for file in places.files:
                value = None if file is None else values[file.path][name][0]
                literals.append(_literal(value))
            column = F.get(F.array(*literals), places.of_record)
            yield column.cast(str(tree_from_arrow(first.type, name))).alias(name)

    def _unreadable(self, name: str, path: Column) -> Column:
        place = F.concat(
            F.lit(f"{self._declared.what}: file "),
            path,
            F.lit(f": column {name!r} has a value that Python can't hold: text is UTF-8, and"),
            F.lit(" years are 1 to 9999."),
        )
        step = "Deliver the file again with correct values."
        kind = parse_type(self._declared.schema.field(name).type)
        column = raise_error_column(errors.SchemaMismatchError, place, step, column=name)
        return column.cast(str(kind))


def _literal(value: Any) -> Column:
    """Return a value of an added column as a literal: times as microseconds."""
    if value is None or not value.is_valid:
        return F.lit(None)
    if pa.types.is_timestamp(value.type):
        return F.timestamp_micros(F.lit(value.value))
    return F.lit(value.as_py())


def _is_readable(value: Column, type_: Type) -> Column | None:
    """Return whether Python can hold a value; None if it holds all of its type."""
    if isinstance(type_, Array):
        inner = _is_readable(F.lit(None), type_.element)
        if inner is None:
            return None
        return F.forall(value, lambda one: one.isNull() | _require(one, type_.element))
    if isinstance(type_, Struct):
        checks = []
        for member in type_.members:
            part = value.getField(member.name)
            check = _is_readable(part, member.type)
            if check is not None:
                checks.append(part.isNull() | check)
        return reduce(lambda one, other: one & other, checks) if checks else None
    assert isinstance(type_, Simple)
    if type_.name == "string":
        return F.is_valid_utf8(value)
    if type_.name == "date":
        return value.between(F.lit("0001-01-01").cast("date"), F.lit("9999-12-31").cast("date"))
    if type_.name == "timestamp":
        return F.unix_micros(value).between(MICROS.first, MICROS.last)
    return None


def _require(value: Column, type_: Type) -> Column:
    check = _is_readable(value, type_)
    assert check is not None
    return check


def _checks(spark: SparkSession, facts: Mapping[str, str], records: DataFrame) -> DataFrame:
    """Return a frame without rows, with the columns of `records`, which fails when it is read if a
    file has another size or time of modification by then than those in `facts`, by URL.
    """
    pairs = [F.lit(text) for item in facts.items() for text in item]
    scan = spark.read.format("binaryFile").load(list(facts))
    path = F.regexp_replace("path", "^file:/+", "file:///")
    found = F.concat_ws(" ", "length", F.unix_millis("modificationTime"))
    problem = F.concat(path, F.lit(" has changed since it was admitted."))
    error = raise_error_column(errors.AdmittedFileError, problem, _STEP)
    same = found == F.element_at(F.create_map(*pairs), path)
    changed = F.when(same, F.lit(False)).otherwise(error.cast("boolean"))
    names = []
    for field in records.schema.fields:
        names.append(F.lit(None).cast(field.dataType).alias(field.name))
    return scan.where(changed).select(*names)


def spark_url(tree: FileTree, path: str) -> str:
    """Return how Spark names a file of a tree."""
    if isinstance(tree, S3Tree):
        return f"s3a://{tree.bucket}/{tree.prefix}{path}"
    assert isinstance(tree, LocalTree)
    return f"file://{tree.root}/{path}"


def _normal_url(uri: str) -> str:
    """Return how `spark_url` writes a URI of Spark's."""
    text = unquote(uri)
    if text.startswith("file:"):
        return "file:///" + text.removeprefix("file:").lstrip("/")
    return text


def _is_plain(url: str) -> bool:
    """Whether Spark reads a URL as it is."""
    path = url.partition("://")[2].lstrip("/")
    parts = path.split("/")
    if any(part in ("", ".", "..") or part != part.strip() for part in parts):
        return False
    return path.isprintable() and not {*path} & {*_SPECIAL}


def _is_reachable(spark: SparkSession, tree: FileTree) -> bool:
    """Whether the session reads the files of a tree as this process does."""
    if not isinstance(tree, S3Tree):
        return isinstance(tree, LocalTree)
    endpoint = spark.conf.get(f"{_S3A}endpoint", "")
    if spark.conf.get(f"{_S3A}path.style.access", None) is None:
        return False
    return (endpoint or None) == tree.options.endpoint
