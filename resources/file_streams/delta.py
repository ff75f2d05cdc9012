"""Delta tables as streams: `delta.orders`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from cachetools import TTLCache, cached

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.delta import (
    delta_place,
    is_on_s3,
    open_delta,
    translate_delta_errors,
    unreadable_delta,
)
from dagster_adjunct.resources.file_streams.feed import FilePiece, Found, KnownFiles
from dagster_adjunct.resources.file_streams.log import AdmittedFile, FileRetention
from dagster_adjunct.resources.file_streams.streams import declare_file_stream
from dagster_adjunct.resources.file_streams.table_columns import (
    ARRAY,
    MAP,
    STRUCT,
    TableColumn,
    arrow_parts,
    locate_columns,
    schema_of_table,
)
from dagster_adjunct.resources.file_streams.tables import (
    OnDelete,
    Start,
    TableCursor,
    TableDeclaration,
    TableFile,
    TableStreams,
    deletion_error,
    expired_error,
    open_parquet,
    replaced_error,
    skipped,
    table_error,
    translate_read_errors,
)
from dagster_adjunct.resources.files.formats import row_group_starts
from dagster_adjunct.resources.files.tree import check_folder_url
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.objects.arrow_files import s3_filesystem_arguments
from dagster_adjunct.resources.objects.lake import Lake, LakeSettings
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.declaration import build_declaration
from dagster_adjunct.resources.streams.system import register_system
from dagster_adjunct.resources.threads import map_in_threads
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyarrow.fs import FileSystem

SYSTEM = "delta"
_THREADS = 16
_OPEN_SECONDS = 60
_LOG = "_delta_log"
_READABLE = frozenset(
    {
        "columnMapping",
        "deletionVectors",
        "timestampNtz",
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
        "variantType",
        "variantType-preview",
    }
)
"""Features of readers that need nothing here, or that are refused by name where they are used."""
_SIMPLE = {
    "long": "bigint",
    "integer": "int",
    "short": "smallint",
    "byte": "tinyint",
    "timestamp_ntz": "timestamp without a time zone",
}


class DeltaDeclaration(TableDeclaration):
    """A Delta table as a stream: see `delta_stream`."""

    source: str

    @property
    def source_url(self) -> str:
        return self.source

    def feed(self, lake: Lake) -> DeltaFeed:
        return DeltaFeed(self)

    def __str__(self) -> str:
        return f"the Delta table at {self.source}"


@dataclass(frozen=True, slots=True)
class DeltaFeed:
    """The data files of a Delta table."""

    declared: DeltaDeclaration

    # -- admission

    def find(self, known: KnownFiles) -> Found:
        declared = self.declared
        table = _open_readable(declared.source)
        cursor = TableCursor.parse(known.cursor)
        with translate_delta_errors(declared.source):
            identity = str(table.metadata().id)
        if cursor is not None and cursor.table != identity:
            raise replaced_error(str(declared), cursor.table, identity)
        located = locate_columns(
            declared.columns,
            table_columns(json.loads(table.schema().to_json())),
            {} if cursor is None else cursor.columns,
            str(declared),
        )
        look = _Look(declared, table, _open_files(os.getpid(), declared.source))
        files = look.first() if cursor is None else look.since(cursor.at)
        after = TableCursor(table=identity, at=table.version(), columns=located)
        return Found(files, after.model_dump_json(), {})

    # -- reading

    def tables(self, piece: FilePiece, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        files = _open_files(os.getpid(), self.declared.source)
        path = f"{self.declared.source}/{piece.file.path}"
        with translate_read_errors(path, piece.file.path), files.open(piece.file.path) as source:
            opened = open_parquet(source)
            in_file = [_file_column(field) for field in opened.schema_arrow]
            yield from TableFile(opened, in_file).records(piece, self.declared, columns)

    def cuts(self, file: AdmittedFile) -> Sequence[int]:
        files = _open_files(os.getpid(), self.declared.source)
        path = f"{self.declared.source}/{file.path}"
        with translate_read_errors(path, file.path), files.open(file.path) as source:
            return row_group_starts(open_parquet(source))

    def has_file(self, path: str) -> bool:
        return _open_files(os.getpid(), self.declared.source).exists(path)


# -- the table


class _Files(NamedTuple):
    """The files of a table in its store; paths are relative to the table."""

    system: FileSystem
    root: str

    def open(self, path: str) -> Any:
        return self.system.open_input_file(f"{self.root}/{path}")

    def read(self, path: str) -> bytes:
        with self.system.open_input_stream(f"{self.root}/{path}") as source:
            return bytes(source.read())

    def exists(self, path: str) -> bool:
        found = self.system.get_file_info(f"{self.root}/{path}")
        return bool(found.is_file)

    def names(self, folder: str) -> list[str]:
        from pyarrow import fs

        found = self.system.get_file_info(fs.FileSelector(f"{self.root}/{folder}"))
        return [one.base_name for one in found]


def _files_key(process: int, url: str) -> tuple[int, str]:
    return process, url


@cached(TTLCache(maxsize=64, ttl=_OPEN_SECONDS), key=_files_key)
def _open_files(process: int, url: str) -> _Files:
    """Return access to a table's files, with the credentials of now."""
    from pyarrow import fs

    if is_on_s3(url):
        arguments = s3_filesystem_arguments(LakeSettings().s3_options())
        return _Files(fs.S3FileSystem(**arguments), url.partition("://")[2].rstrip("/"))
    return _Files(fs.LocalFileSystem(), delta_place(url))


def _open_readable(url: str, version: int | None = None) -> DeltaTable:
    """Return a table as it is now, or as it was. Raises what `open_delta` does, and
    AdmittedFileError for a table with features that are not read.
    """
    table = open_delta(url, version)
    with translate_delta_errors(url, version):
        features = set(table.protocol().reader_features or ())
    unreadable = sorted(features - _READABLE)
    if unreadable:
        raise unreadable_delta(url, f"it uses {', '.join(unreadable)}")
    return table


class _Commit(NamedTuple):
    """What a commit of the table's log says."""

    version: int
    actions: list[dict[str, Any]]

    @classmethod
    def parse(cls, version: int, data: bytes) -> _Commit:
        return cls(version, [json.loads(line) for line in data.splitlines() if line.strip()])

    def all(self, kind: str) -> list[dict[str, Any]]:
        """Return the actions of a kind."""
        return [action[kind] for action in self.actions if action.get(kind) is not None]

    @property
    def operation(self) -> str:
        infos = self.all("commitInfo")
        return str(infos[0].get("operation", "")) if infos else ""

    @property
    def time(self) -> int:
        """When it was committed, in microseconds since the epoch. If it does not say so: when the
        newest of its files was written, 0 if it has none.
        """
        for info in self.all("commitInfo"):
            for name in ("inCommitTimestamp", "timestamp"):
                if isinstance(info.get(name), int):
                    return int(info[name]) * 1000
        return max((int(add["modificationTime"]) * 1000 for add in self.all("add")), default=0)

    def changing(self, kind: str) -> list[dict[str, Any]]:
        """Return the actions of a kind that change what rows the table has."""
        return [action for action in self.all(kind) if action.get("dataChange", True)]


class _Look(NamedTuple):
    """A look at a table for files to admit."""

    declared: DeltaDeclaration
    table: Any
    files: _Files

    def first(self) -> list[AdmittedFile]:
        """Return the files at the first look: all that the table has now, or, with
        `start="oldest"`, those of the oldest version that can be read, and what was added since.
        """
        if self.declared.start == "current":
            return self._all_files(self.table)
        # The names of the log's files begin with the version, in 20 digits.
        names = self._log_names()
        versions = [int(name[:20]) for name in names if re.fullmatch(r"\d{20}\.json", name)]
        if 0 in versions:
            return self.since(-1)
        # The first commits are gone: begin with the oldest version that a checkpoint describes.
        checkpoints = [int(name[:20]) for name in names if re.match(r"\d{20}\.checkpoint", name)]
        oldest = min(checkpoints, default=self.table.version())
        return self._all_files(_open_readable(self.declared.source, oldest)) + self.since(oldest)

    def since(self, at: int) -> list[AdmittedFile]:
        """Return the files that were added after a version. Raises AdmittedFileError."""
        newest = self.table.version()
        if newest < at:
            raise table_error(
                f"{self.declared} was set back: its version is {newest}, and {at} was read before.",
                "Restore the table's newest version, or read it as another stream, under another"
                " name.",
                "rolled-back",
            )
        commits = map_in_threads(self._commit, range(at + 1, newest + 1), _THREADS)
        return [file for commit in commits for file in self._added(commit)]

    def _log_names(self) -> list[str]:
        with translate_delta_errors(self.declared.source):
            return self.files.names(_LOG)

    def _commit(self, version: int) -> _Commit:
        """Return a commit of the table. Raises AdmittedFileError if the log has it no more."""
        try:
            data = self.files.read(f"{_LOG}/{version:020}.json")
        except FileNotFoundError:
            reason = f"the log of its version {version} is gone"
            raise expired_error(str(self.declared), reason) from None
        except OSError as error:
            with translate_delta_errors(self.declared.source):  # which raises it as an AdjunctError
                raise error
        return _Commit.parse(version, data)

    def _added(self, commit: _Commit) -> list[AdmittedFile]:
        """Return the files that a commit has added, none for a compaction. If it deleted rows,
        raises AdmittedFileError, or, with `on_delete="ignore"`, returns an entry that says so.
        """
        origin = str(commit.version)
        added = commit.changing("add")
        removed = len(commit.changing("remove"))
        reason = ""
        if removed:
            reason = f"deletes or overwrites rows ({removed} files)"
        elif added and commit.operation == "RESTORE":
            reason = "restores rows that were deleted"
        if reason and self.declared.on_delete == "fail":
            raise deletion_error(f"{self.declared}: version {origin}", reason)
        if reason:
            return [skipped(f"version {origin}", origin, commit.time, reason)]
        found = []
        for add in added:
            if add.get("deletionVector"):
                raise self._vector_error(commit.version, 1)
            rows = json.loads(add.get("stats") or "{}").get("numRecords")
            values = add.get("partitionValues") or {}
            found.append(_Added(add["path"], add["size"], rows, values, commit.time, origin))
        return self._admitted(found)

    def _all_files(self, table: Any) -> list[AdmittedFile]:
        """Return all files of a version, with the times when they were written. Raises
        AdmittedFileError if rows of them are deleted by deletion vectors.
        """
        version = table.version()
        with translate_delta_errors(self.declared.source):
            if "deletionVectors" in (table.protocol().reader_features or ()):
                vectors = sum(batch.num_rows for batch in table.deletion_vectors())
                if vectors:
                    raise self._vector_error(version, vectors)
            actions = pa.table(table.get_add_actions())
        found = []
        stored = {one.name: str(one.at) for one in _partition_columns(table)}
        partitions = _partition_texts(actions, stored)
        for number, action in enumerate(actions.select(_FACTS).to_pylist()):
            one = _Added(
                action["path"],
                action["size_bytes"],
                action["num_records"],
                partitions[number],
                action["modification_time"] * 1000,
                str(version),
            )
            found.append(one)
        return self._admitted(found)

    def _vector_error(self, version: int, count: int) -> errors.AdmittedFileError:
        """Return the error for files some of whose rows are deleted by deletion vectors."""
        return table_error(
            f"{self.declared}: {count} files of version {version} have deletion vectors.",
            "Rewrite them first, as with Delta's REORG TABLE … APPLY (PURGE).",
            "deleted",
        )

    def _admitted(self, found: Sequence[_Added]) -> list[AdmittedFile]:
        """Return files as they are admitted, in the order of their times, and at one time by
        path.
        """
        kinds = {str(one.at): one.kind for one in _partition_columns(self.table)}
        uncounted = [one for one in found if one.rows is None]
        counted = map_in_threads(self._count, uncounted, _THREADS)
        rows = {one.path: count for one, count in zip(uncounted, counted, strict=True)}
        files = []
        for one in found:
            values = {name: _partition_text(text, kinds[name]) for name, text in one.values.items()}
            count = rows[one.path] if one.rows is None else one.rows
            path = self._path_of(one)
            files.append(
                AdmittedFile(path, one.size, "", one.time, count, values=values, origin=one.origin)
            )
        return sorted(files, key=lambda file: (file.modified, file.path))

    def _count(self, one: _Added) -> int:
        """Return the number of records of a file without statistics."""
        path = self._path_of(one)
        where = f"{self.declared.source}/{path}"
        with translate_read_errors(where, path), self.files.open(path) as source:
            return int(open_parquet(source).metadata.num_rows)

    def _path_of(self, one: _Added) -> str:
        """Return a file's path within the table. Raises AdmittedFileError for one elsewhere."""
        if urlsplit(one.path).scheme or one.path.startswith("/"):
            raise errors.AdmittedFileError(
                f"{self.declared}: the file {one.path} is not in the table's folder.",
                "Shallow clones are not read: make a deep one, or read the original.",
                file=one.path,
                rule="format",
            )
        return unquote(one.path)


class _Added(NamedTuple):
    """A file as the table's log describes it: its `values` are those of its partition, `time` is
    when it was added, in microseconds since the epoch, and `origin` the version that has it.
    Without statistics, the number of its rows is not known.
    """

    path: str
    size: int
    rows: int | None
    values: Mapping[str, str | None]
    time: int
    origin: str


_FACTS = ["path", "size_bytes", "modification_time", "num_records"]


def _partition_texts(actions: pa.Table, stored: Mapping[str, str]) -> list[dict[str, str | None]]:
    """Return the values of the partition of each file, as texts by stored name; none if the table
    is not partitioned. `stored` has the stored names of columns, by their names in the table.
    """
    if "partition" not in actions.column_names:
        return [{} for _ in range(actions.num_rows)]
    struct = actions.column("partition").combine_chunks()
    texts = {
        stored.get(field.name, field.name): pc.cast(values, pa.string()).to_pylist()
        for field, values in zip(struct.type, struct.flatten(), strict=True)
    }
    return [
        {name: values[number] for name, values in texts.items()}
        for number in range(actions.num_rows)
    ]


def _partition_columns(table: Any) -> list[TableColumn]:
    """Return the columns by which a table is partitioned."""
    partitioned = set(table.metadata().partition_columns)
    columns = table_columns(json.loads(table.schema().to_json()))
    return [column for column in columns if column.name in partitioned]


def _partition_text(text: str | None, kind: str) -> str | None:
    """Return a partition's value as a CSV file would have it, None for null. `kind` is the type of
    the column.
    """
    if not text:  # Delta's log writes null as an empty text
        return None
    if kind == "timestamp" and not text.endswith("Z"):  # Delta's log means UTC
        return f"{text}Z"
    return text


# -- columns


def table_columns(struct: Mapping[str, Any]) -> tuple[TableColumn, ...]:
    """Return the columns of a Delta schema, which is a parsed JSON object."""
    columns = []
    for field in struct["fields"]:
        stored = field.get("metadata", {}).get("delta.columnMapping.physicalName", field["name"])
        columns.append(_table_column(field["name"], stored, field["type"]))
    return tuple(columns)


def _table_column(name: str, at: str, kind: Any) -> TableColumn:
    """Return a column, or a part of one, of a type as Delta's schema has it: a text or an object.
    `at` is its stored name.
    """
    if isinstance(kind, str):  # a simple type
        return TableColumn(name, at, _SIMPLE.get(kind, kind))
    if kind["type"] == "struct":
        return TableColumn(name, at, STRUCT, table_columns(kind))
    if kind["type"] == "array":
        element = _table_column("element", "element", kind["elementType"])
        return TableColumn(name, at, ARRAY, (element,))
    key = _table_column("key", "key", kind["keyType"])
    value = _table_column("value", "value", kind["valueType"])
    return TableColumn(name, at, MAP, (key, value))


def _file_column(field: pa.Field) -> TableColumn:
    """Return a column of a Parquet file, or a part of one."""
    kind, parts = arrow_parts(field.type)
    return TableColumn(field.name, field.name, kind, tuple(map(_file_column, parts)))


class DeltaStreams(TableStreams):
    """The declared Delta tables, as the system `delta`."""

    name = SYSTEM
    declaration_class = DeltaDeclaration


@validated
def delta_stream(
    name: str,
    url: str,
    *,
    schema: Schema | str | None = None,
    key: Sequence[str] = (),
    start: Start = "current",
    on_delete: OnDelete = "fail",
    retention: FileRetention | None = None,
) -> str:
    """Declare a Delta table to which rows are added as a stream; return its name, "delta.NAME".

    `url` is the table's folder: a path, or `s3://BUCKET/PREFIX`, which is accessed as a lake is.
    Each look at the table admits the data files that its versions have added since the last one, in
    the order of the versions. A record's time is that when its version was committed; at the first
    look, when its file was written. Compactions (`OPTIMIZE`) add no records. The first look admits
    all that the table has now (`start="current"`), or what its oldest version has, and then what
    later ones have added (`"oldest"`). A version that deletes, overwrites or restores rows is an
    error (`on_delete="fail"`), or is left out with all that it adds, and counted (`"ignore"`):
    records that were admitted stay.

    `schema` has the columns to read, by default all that the table has when this is called, but for
    those that begin with "__". With column mapping they stay what they are when the table renames
    them; where a file does not have them, they are null. They may be declared wider than the
    table's. `key` are the columns by which records belong together. `retention` says how long the
    stream keeps its records; the table keeps its own.

    Raises ConfigurationError or SchemaMismatchError, and without `schema` what opening the table
    raises.
    """
    check_folder_url(url)
    what = f"the Delta table at {url}"
    if schema is None:
        columns = table_columns(json.loads(_open_readable(url).schema().to_json()))
        schema = schema_of_table(columns, what)
    elif isinstance(schema, str):
        schema = Schema.from_ddl(schema, f"stream '{SYSTEM}.{name}'")
    declaration = build_declaration(
        DeltaDeclaration,
        f"{SYSTEM}.{name}",
        schema,
        tuple(key),
        1,
        source=url,
        start=start,
        on_delete=on_delete,
        retention=retention,
    )
    return declare_file_stream(SYSTEM, name, declaration)


register_system(SYSTEM, DeltaStreams)
