"""Iceberg tables as streams: `iceberg.events`."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from cachetools import TTLCache, cached

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.documents import StoredDocument
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
from dagster_adjunct.resources.iceberg import IcebergTable, translate_client_errors
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.declaration import build_declaration
from dagster_adjunct.resources.streams.system import register_system
from dagster_adjunct.resources.threads import map_in_threads
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile, ManifestEntry, ManifestFile
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.name_mapping import MappedField
    from pyiceberg.table.snapshots import Snapshot
    from pyiceberg.types import IcebergType, NestedField

SYSTEM = "iceberg"
_THREADS = 16
_OPEN_SECONDS = 60
_NONE = -1  # of a table without snapshots; Iceberg's ids are positive
_FIELD_ID = b"PARQUET:field_id"
_SIMPLE = {
    "long": "bigint",
    "timestamp": "timestamp without a time zone",
    "timestamptz": "timestamp",
}


class IcebergName(StoredDocument):
    """A table as declarations store it."""

    identifier: str
    catalog: str

    @property
    def table(self) -> IcebergTable:
        return IcebergTable(self.identifier, self.catalog)

    def __str__(self) -> str:
        return f"the Iceberg table {self.identifier!r} of the catalogue {self.catalog!r}"


class IcebergDeclaration(TableDeclaration):
    """An Iceberg table as a stream: see `iceberg_stream`."""

    source: IcebergName

    @property
    def source_url(self) -> str:
        return f"{self.source.catalog}/{self.source.identifier}"

    def feed(self, lake: Lake) -> IcebergFeed:
        return IcebergFeed(self)


def load_iceberg(name: IcebergName) -> Table:
    """Return a table as it is now. Raises TableNotFoundError, ConfigurationError or
    TransientError.
    """
    catalog = name.table.open()
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    with translate_client_errors(name.catalog):
        try:
            return catalog.load_table(name.identifier)
        except (NoSuchTableError, NoSuchNamespaceError) as error:
            raise errors.TableNotFoundError(
                f"{name} does not exist.", "Create it, or correct its name.", table=name.identifier
            ) from error


@dataclass(frozen=True, slots=True)
class IcebergFeed:
    """The data files of an Iceberg table."""

    declared: IcebergDeclaration

    # -- admission

    def find(self, known: KnownFiles) -> Found:
        name = self.declared.source
        table = load_iceberg(name)
        cursor = TableCursor.parse(known.cursor)
        identity = str(table.metadata.table_uuid)
        if cursor is not None and cursor.table != identity:
            raise replaced_error(str(name), cursor.table, identity)
        known_columns = {} if cursor is None else cursor.columns
        located = locate_columns(
            self.declared.columns, table_columns(table.schema().fields), known_columns, str(name)
        )
        look = _Look(self.declared, table)
        with translate_client_errors(name.catalog):
            added = look.first() if cursor is None else look.since(cursor.at, known)
        after = TableCursor(table=identity, at=added.until, columns=located)
        return Found(added.files, after.model_dump_json(), {})

    # -- reading

    def tables(self, piece: FilePiece, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        reader = _open_reader(os.getpid(), self.declared.table, self.declared.source)
        path = piece.file.path
        with translate_read_errors(path, path), reader.io.new_input(path).open() as source:
            opened = open_parquet(source)
            in_file = list(_file_columns(opened.schema_arrow, reader.names, path))
            yield from TableFile(opened, in_file).records(piece, self.declared, columns)

    def cuts(self, file: AdmittedFile) -> Sequence[int]:
        reader = _open_reader(os.getpid(), self.declared.table, self.declared.source)
        with (
            translate_read_errors(file.path, file.path),
            reader.io.new_input(file.path).open() as source,
        ):
            return row_group_starts(open_parquet(source))

    def has_file(self, path: str) -> bool:
        reader = _open_reader(os.getpid(), self.declared.table, self.declared.source)
        return bool(reader.io.new_input(path).exists())


class _AddedFiles(NamedTuple):
    """Files to admit, and the id of the snapshot up to which they were added."""

    files: list[AdmittedFile]
    until: int


class _Look(NamedTuple):
    """A look at a table for files to admit."""

    declared: IcebergDeclaration
    table: Table

    def first(self) -> _AddedFiles:
        """Return the files at the first look: all that the table has now, or, with
        `start="oldest"`, those of the oldest known snapshot, and what was added since.
        """
        current = self.table.metadata.current_snapshot()
        if current is None:
            return _AddedFiles([], _NONE)
        ancestry = self._ancestry()
        if self.declared.start == "current":
            return _AddedFiles(self._all_files(current, ancestry), current.snapshot_id)
        files = self._all_files(ancestry[-1], ancestry)
        for snapshot in reversed(ancestry[:-1]):
            files += self._added(snapshot)
        return _AddedFiles(files, current.snapshot_id)

    def since(self, at: int, known: KnownFiles) -> _AddedFiles:
        """Return the files that were added after the snapshot with this id, up to the current
        one.
        """
        current = self.table.metadata.current_snapshot()
        if current is None and at == _NONE:
            return _AddedFiles([], _NONE)
        ancestry = self._ancestry()
        ids = [snapshot.snapshot_id for snapshot in ancestry]
        if ancestry:
            # The id of the newest snapshot that has expired, _NONE if none has.
            expired = ancestry[-1].parent_snapshot_id or _NONE
        else:
            expired = None  # the table has no current snapshot any more
        if at in ids:
            fresh = ancestry[: ids.index(at)]
        elif at == expired:
            fresh = ancestry  # all snapshots after it are known
        else:
            return self._after_rollback(at, ancestry, known)
        files: list[AdmittedFile] = []
        for snapshot in reversed(fresh):
            files += self._added(snapshot)
        return _AddedFiles(files, ids[0])

    def _after_rollback(
        self, at: int, ancestry: Sequence[Snapshot], known: KnownFiles
    ) -> _AddedFiles:
        """Return the files since a snapshot that is no ancestor of the current one. Raises
        AdmittedFileError, unless the table was rolled back and that is to be ignored.
        """
        what = str(self.declared.source)
        metadata = self.table.metadata
        if at != _NONE and metadata.snapshot_by_id(at) is None:
            raise expired_error(what, f"snapshot {at}, up to which it was read, has expired")
        current_ids = [snapshot.snapshot_id for snapshot in ancestry]
        before = [snapshot.snapshot_id for snapshot in _ancestry_of(metadata, at)]
        common = next((snapshot_id for snapshot_id in before if snapshot_id in current_ids), None)
        if self.declared.on_delete == "fail" or common is None:
            raise table_error(
                f"{what} was rolled back, or its history replaced: snapshot {at}, up to which it"
                " was read, is no ancestor of the current one.",
                'Declare the stream with on_delete="ignore" to go on with what is added after the'
                " rollback, or read the table as another stream, under another name.",
                "rolled-back",
            )
        fresh = ancestry[: current_ids.index(common)]
        if not fresh:  # the rollback is logged once a snapshot follows it
            return _AddedFiles([], at)
        there = known.by_path()
        reason = f"the table was rolled back to snapshot {common}"
        first = fresh[-1]
        files = [skipped(f"snapshot {at}", str(at), first.timestamp_ms * 1000, reason)]
        for snapshot in reversed(fresh):
            files += [file for file in self._added(snapshot) if file.path not in there]
        return _AddedFiles(files, current_ids[0])

    def _ancestry(self) -> list[Snapshot]:
        """Return the snapshots of the main branch that are known, from the current one back."""
        return _ancestry_of(self.table.metadata, self.table.metadata.current_snapshot_id)

    def _all_files(self, snapshot: Snapshot, ancestry: Sequence[Snapshot]) -> list[AdmittedFile]:
        """Return all files of a snapshot. The time of a file is that of the snapshot that added it;
        if that has expired, the time of the oldest one that is known.
        """
        times = {one.snapshot_id: one.timestamp_ms * 1000 for one in ancestry}
        oldest = min(times.values())
        manifests = snapshot.manifests(self.table.io)
        self._check_no_deletes(snapshot, manifests)
        found = []
        for entry in self._data_file_entries(manifests, live=True):
            time = times.get(entry.snapshot_id or 0, oldest)
            file = self._admitted(entry.data_file, str(entry.snapshot_id), time)
            found.append(_NumberedFile(time, entry.sequence_number or 0, file.path, file))
        return [each.file for each in sorted(found)]

    def _check_no_deletes(self, snapshot: Snapshot, manifests: Sequence[ManifestFile]) -> None:
        """Raise AdmittedFileError if rows of a snapshot's files are deleted by delete files."""
        from pyiceberg.manifest import ManifestContent

        deletes = [one for one in manifests if one.content == ManifestContent.DELETES]
        if not deletes:
            return
        try:
            tasks = self.table.scan(snapshot_id=snapshot.snapshot_id).plan_files()
            deleted = sum(1 for task in tasks if task.delete_files)
        except ValueError:  # which PyIceberg raises for equality deletes
            deleted = len(deletes)
        if deleted:
            raise table_error(
                f"{self.declared.source}: {deleted} files of snapshot {snapshot.snapshot_id} have"
                " rows that delete files delete.",
                "Compact the table first, as with Spark's rewrite_data_files and the option"
                " delete-file-threshold=1.",
                "deleted",
            )

    def _added(self, snapshot: Snapshot) -> list[AdmittedFile]:
        """Return the files that a snapshot has added, none for a compaction. If it deleted rows,
        raises AdmittedFileError, or, with `on_delete="ignore"`, returns an entry that says so.
        """
        from pyiceberg.manifest import ManifestContent, ManifestEntryStatus
        from pyiceberg.table.snapshots import Operation

        summary = snapshot.summary
        if summary is not None and summary.operation == Operation.REPLACE:
            return []
        origin = str(snapshot.snapshot_id)
        time = snapshot.timestamp_ms * 1000
        new_manifests = [
            one
            for one in snapshot.manifests(self.table.io)
            if one.added_snapshot_id == snapshot.snapshot_id
        ]
        files = []
        has_delete_files = any(one.content == ManifestContent.DELETES for one in new_manifests)
        removed = 0
        for entry in self._data_file_entries(new_manifests, live=False):
            if entry.snapshot_id != snapshot.snapshot_id:  # an older file, in a merged manifest
                continue
            if entry.status == ManifestEntryStatus.DELETED:
                removed += 1
            elif entry.status == ManifestEntryStatus.ADDED:
                files.append(self._admitted(entry.data_file, origin, time))
        if removed or has_delete_files:
            reason = "deletes or overwrites rows"
            if self.declared.on_delete == "fail":
                raise deletion_error(f"{self.declared.source}: snapshot {origin}", reason)
            return [skipped(f"snapshot {origin}", origin, time, reason)]
        return sorted(files, key=lambda file: file.path)

    def _data_file_entries(
        self, manifests: Sequence[ManifestFile], *, live: bool
    ) -> list[ManifestEntry]:
        """Return the entries of data files in these manifests, none of delete files; with `live`,
        without those of data files that are deleted.
        """
        from pyiceberg.manifest import ManifestContent

        io = self.table.io
        data = [one for one in manifests if one.content == ManifestContent.DATA]
        read = partial(_read_entries, io, live)
        return list(chain.from_iterable(map_in_threads(read, data, _THREADS)))

    def _admitted(self, file: DataFile, origin: str, time: int) -> AdmittedFile:
        """Return a data file as it is admitted. Raises AdmittedFileError for a format that is not
        read.
        """
        from pyiceberg.manifest import FileFormat

        found = ""
        if file.key_metadata:
            found = "encrypted"
        elif file.file_format != FileFormat.PARQUET:
            found = f"in the format {file.file_format}"
        if found:
            raise errors.AdmittedFileError(
                f"{self.declared.source}: {file.file_path} is {found}, expected plain Parquet.",
                "Rewrite the files as Parquet, and read the table as another stream.",
                file=file.file_path,
                rule="format",
            )
        metadata = self.table.metadata
        values = partition_texts(file, metadata.specs()[file.spec_id], metadata)
        size = file.file_size_in_bytes
        return AdmittedFile(
            file.file_path, size, "", time, file.record_count, values=values, origin=origin
        )


class _NumberedFile(NamedTuple):
    """A file with what the order of admission depends on: its time, the sequence number of the
    commit that added it, and its path.
    """

    time: int
    sequence_number: int
    path: str
    file: AdmittedFile


def _read_entries(io: FileIO, live: bool, manifest: ManifestFile) -> list[ManifestEntry]:
    """Return the entries of a manifest; with `live`, without those of deleted files."""
    return manifest.fetch_manifest_entry(io, discard_deleted=live)


def _ancestry_of(metadata: TableMetadata, at: int | None) -> list[Snapshot]:
    """Return a snapshot and its ancestors, as far as they are known."""
    found = []
    while at is not None:
        snapshot = metadata.snapshot_by_id(at)
        if snapshot is None:
            break
        found.append(snapshot)
        at = snapshot.parent_snapshot_id
    return found


def partition_texts(
    file: DataFile, spec: PartitionSpec, metadata: TableMetadata
) -> dict[str, str | None]:
    """Return the values of a file's partition, by the ids of the columns that have them, as texts
    for `convert_texts`. Columns of which the table is partitioned by a part, such as the day, are
    left out.
    """
    from pyiceberg.conversions import to_json
    from pyiceberg.transforms import IdentityTransform

    texts: dict[str, str | None] = {}
    for place, field in enumerate(spec.fields):
        if not isinstance(field.transform, IdentityTransform):
            continue
        kind = _type_of_field(metadata, field.source_id)
        if kind is None:  # no schema that is left has the column
            continue
        value = file.partition[place]
        if value is None:
            text = None
        elif isinstance(value, bytes):
            text = base64.b64encode(value).decode()
        else:
            text = str(to_json(kind, value))
            if isinstance(value, bool):
                text = text.lower()
        texts[str(field.source_id)] = text
    return texts


def _type_of_field(metadata: TableMetadata, field_id: int) -> Any:
    """Return the newest type of a field, None if no schema has it."""
    for schema in (metadata.schema(), *reversed(metadata.schemas)):
        if field_id in schema.field_ids:
            return schema.find_field(field_id).field_type
    return None


# -- columns


def table_columns(fields: Sequence[NestedField]) -> tuple[TableColumn, ...]:
    """Return the columns of an Iceberg schema."""
    return tuple(_table_column(one.name, one.field_id, one.field_type, one) for one in fields)


def _table_column(
    name: str, at: int, kind: IcebergType, field: NestedField | None = None
) -> TableColumn:
    """Return a column of this type, or a part of one, with the field id `at`."""
    from pyiceberg.types import ListType, MapType, StructType

    if field is not None and field.initial_default is not None:
        # No schema has such a type, so that the column is refused: files without it would be null.
        return TableColumn(name, at, f"{kind} with an initial default")
    if isinstance(kind, StructType):
        return TableColumn(name, at, STRUCT, table_columns(kind.fields))
    if isinstance(kind, ListType):
        element = _table_column("element", kind.element_id, kind.element_type)
        return TableColumn(name, at, ARRAY, (element,))
    if isinstance(kind, MapType):
        key = _table_column("key", kind.key_id, kind.key_type)
        value = _table_column("value", kind.value_id, kind.value_type)
        return TableColumn(name, at, MAP, (key, value))
    text = str(kind).replace(", ", ",")
    return TableColumn(name, at, _SIMPLE.get(text, text))


class _Reader(NamedTuple):
    """What reading a table's files takes: access to them, and the names that files without field
    ids have for the fields.
    """

    io: FileIO
    names: tuple[MappedField, ...]


def _reader_key(process: int, identity: str, name: IcebergName) -> tuple[int, str]:
    """Return what identifies the access to a table in the cache."""
    return process, identity


@cached(TTLCache(maxsize=64, ttl=_OPEN_SECONDS), key=_reader_key)
def _open_reader(process: int, identity: str, name: IcebergName) -> _Reader:
    """Return this process's access to the files of the table with this identity. Raises
    AdmittedFileError if there is another one under its name.
    """
    table = load_iceberg(name)
    if str(table.metadata.table_uuid) != identity:
        raise replaced_error(str(name), identity, str(table.metadata.table_uuid))
    mapping = table.metadata.name_mapping()
    if mapping is None:
        return _Reader(table.io, ())
    return _Reader(table.io, tuple(mapping.root))


def _file_columns(fields: Any, names: Sequence[MappedField], path: str) -> Iterator[TableColumn]:
    """Yield the columns of a Parquet file with their field ids: those in the file, or, if it has
    none, those that the table's mapping gives to their names. Raises AdmittedFileError if the
    table has no mapping either.
    """
    fields = list(fields)
    by_name = not any(_FIELD_ID in (field.metadata or {}) for field in fields)
    if by_name and fields and not names:
        raise errors.AdmittedFileError(
            f"{path} has no field ids, and the table no name mapping.",
            "Set the table's property schema.name-mapping.default.",
            file=path,
            rule="format",
        )
    for field in fields:
        yield _file_column(field, names if by_name else None)


def _file_column(field: pa.Field, names: Sequence[MappedField] | None) -> TableColumn:
    """Return a column of a file, or a part of one, with its field id: that in the file if `names`
    is None, else the one to which `names` map its name; -1 if it has none.
    """
    at = -1
    part_names: Sequence[MappedField] | None = None
    if names is None:
        at = int((field.metadata or {}).get(_FIELD_ID, -1))
    else:
        part_names = ()
        mapped = next((one for one in names if field.name in one.names), None)
        if mapped is not None:
            part_names = mapped.fields
            if mapped.field_id is not None:
                at = mapped.field_id
    kind, parts = arrow_parts(field.type)
    columns = tuple(_file_column(part, part_names) for part in parts)
    return TableColumn(field.name, at, kind, columns)


class IcebergStreams(TableStreams):
    """The declared Iceberg tables, as the system `iceberg`."""

    name = SYSTEM
    declaration_class = IcebergDeclaration


@validated
def iceberg_stream(
    name: str,
    table: IcebergTable,
    *,
    schema: Schema | str | None = None,
    key: Sequence[str] = (),
    start: Start = "current",
    on_delete: OnDelete = "fail",
    retention: FileRetention | None = None,
) -> str:
    """Declare an Iceberg table to which rows are added as a stream; return its name,
    "iceberg.NAME".

    Each look at the table admits the data files that its snapshots have added since the last one,
    in the order of the snapshots of its main branch. A record's time is that when its snapshot was
    committed. Compactions add no records. The first look admits all that the table has now
    (`start="current"`), or all that its oldest snapshot has, and then what later ones have added
    (`"oldest"`). A snapshot that deletes or overwrites rows, also by a rollback, is an error
    (`on_delete="fail"`), or is left out with all that it adds, and counted (`"ignore"`): records
    that were admitted stay.

    `schema` has the columns to read, by default all that the table has when this is called, but for
    those that begin with "__". They are found by their field ids, so they stay what they are when
    the table renames them; where a file does not have them, they are null. They may be declared
    wider than the table's. `key` are the columns by which records belong together. `retention` says
    how long the stream keeps its records; the table keeps its own.

    Raises ConfigurationError or SchemaMismatchError, and without `schema` what opening the table
    raises.
    """
    source = IcebergName(identifier=table.identifier, catalog=table.catalog)
    if schema is None:
        schema = schema_of_table(table_columns(load_iceberg(source).schema().fields), str(source))
    elif isinstance(schema, str):
        schema = Schema.from_ddl(schema, f"stream '{SYSTEM}.{name}'")
    declaration = build_declaration(
        IcebergDeclaration,
        f"{SYSTEM}.{name}",
        schema,
        tuple(key),
        1,
        source=source,
        start=start,
        on_delete=on_delete,
        retention=retention,
    )
    return declare_file_stream(SYSTEM, name, declaration)


register_system(SYSTEM, IcebergStreams)
