"""Versions and streams registered as snapshots of an Iceberg table by PyIceberg, without copying
rows.

Stored rows that are no entries (superseded ones, deletions) are left out by position delete files
in the lake. The table's snapshots refer to the lake's own files, so holds in the lake keep these
files (`versions/leases.py`, `streams/lake/maintenance.py`). Expire snapshots in the catalogue: the
next registration releases their holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.assets.exchange.handover import (
    Held,
    StreamView,
    View,
    ViewFiles,
    lend_whole_files,
    must_be_masked,
    read_files,
)
from dagster_adjunct.assets.exchange.iceberg_columns import (
    columns_of_table,
    fields_in_files,
    find_changes,
    map_names,
)
from dagster_adjunct.assets.exchange.iceberg_types import missing_fields, type_differences
from dagster_adjunct.assets.exchange.position_deletes import PositionDeletes, write_position_deletes
from dagster_adjunct.assets.reading.dataset import Dataset, open_dataset
from dagster_adjunct.assets.reading.stored_file import StoredFile
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.leases import (
    hold_folder,
    list_leases,
    release_versions,
    retain_version,
)
from dagster_adjunct.assets.versions.version import POSITION, TOMBSTONE, version_number
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.bucketing.files import IS_FIRST, SET_AT
from dagster_adjunct.resources.iceberg import (
    IcebergTable,
    check_identifier,
    translate_client_errors,
)
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.schemas.types import decimal_digits
from dagster_adjunct.resources.streams.lake import maintenance as stream_holds
from dagster_adjunct.resources.streams.lake.manifest import HIDDEN_COLUMNS, KEY_COPY
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.name_mapping import NameMapping
    from pyspark.sql import SparkSession


DATASET = "adjunct.dataset"
VERSION = "adjunct.version"
NAME = "adjunct.version-name"
GARBAGE = "gc.enabled"
_COMPACTIONS = 3  # of a version before it is registered, while others commit changes
_ATTEMPTS = 3  # to register what is served while others change that
_FIRST_HIDDEN = 2_147_000_000
_HIDDEN = {
    name: _FIRST_HIDDEN + number
    for number, name in enumerate(
        dict.fromkeys(
            (POSITION, TOMBSTONE, *(name for name, _ in HIDDEN_COLUMNS), IS_FIRST, SET_AT)
        )
    )
}
"""Field ids beyond those of any real table, and below those reserved by Iceberg."""
_FIRST_COPY = _FIRST_HIDDEN + 1000


def _hidden_id(name: str) -> int:
    """Return the field id of a hidden column of files: of a copy of a key column, which has a
    number in its name, the id of that number.
    """
    if name in _HIDDEN:
        return _HIDDEN[name]
    return _FIRST_COPY + int(name.removeprefix(KEY_COPY))


@dataclass(frozen=True, slots=True)
class IcebergSnapshot:
    """A dataset's version as a snapshot of an Iceberg table.

    `version` is the version's id, or the commit of a stream. `files` are the lake's own data files;
    `new` tells whether this call created the snapshot.
    """

    table: str
    snapshot_id: int
    dataset: str
    version: str
    files: tuple[str, ...]
    new: bool

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as JSON-able values, with its id as text, because it may exceed
        JSON numbers.
        """
        return asdict(self) | {"snapshot_id": str(self.snapshot_id), "files": list(self.files)}


@validated
def register_in_iceberg(
    view: View,
    catalog: Catalog,
    identifier: str,
    *,
    properties: Mapping[str, str] | None = None,
    replace_newer: bool = False,
) -> IcebergSnapshot:
    """Make a version the current snapshot of an Iceberg table, in one commit, and return the
    snapshot.

    The table is created on first use; its namespace must exist. The files of the previous version
    are replaced by those of this one in a single snapshot; earlier snapshots stay for time travel.
    Rows that deltas supersede or delete are listed in position delete files, made from the keys of
    all files unless the version has a mask. New columns are added to the table. The snapshot's
    summary has dataset, version and `properties`. If the version is already current, nothing is
    done.

    A table is not set back: if it has the version that is served, or a newer one than the view's,
    only the served version replaces it, also after a pause of any length. `replace_newer` lets any
    version replace any other.

    Raises DatasetError for a version that is not sealed or has rows of other times (see
    `parquet_files`), for one with deltas if the table is partitioned or not of format version 2,
    for a table that is not this dataset's, and for columns that were removed, changed their type,
    were widened in a way that Iceberg does not know, or are identifier fields of the table;
    ManifestMismatchError for a missing or damaged file; CommitConflictError if another writer
    changed the table concurrently or has registered a newer version, CommitStateUnknownError if it
    is not known whether it was changed; TransientError if the catalogue does not answer;
    ConfigurationError if PyIceberg is not installed, and for an identifier without a namespace.
    """
    import_package("Iceberg", "pyiceberg.table", "iceberg")
    check_identifier(identifier)
    if "operation" in (properties or {}):
        raise errors.ConfigurationError(
            "properties has the name 'operation', which Iceberg itself sets in each snapshot.",
            "Rename it.",
            argument="properties",
        )
    may_replace: MayReplace = "anything" if replace_newer else "older"
    return _register_view(view, catalog, identifier, may_replace, dict(properties or {}))


MayReplace = Literal["anything", "older", "if served"]
"""What a registration may replace: anything, no newer version, or anything if its own version is
served.
"""


def _register_view(
    view: View,
    catalog: Catalog,
    identifier: str,
    may_replace: MayReplace,
    properties: dict[str, str],
) -> IcebergSnapshot:
    """Make the view the table's current snapshot, as `register_in_iceberg` describes."""
    with translate_client_errors(catalog.name):
        return lend_whole_files(
            view,
            lambda files: _register(files, catalog, identifier, may_replace, properties),
            masked=True,
        )


def _register(
    files: ViewFiles,
    catalog: Catalog,
    identifier: str,
    may_replace: MayReplace,
    properties: dict[str, str],
) -> IcebergSnapshot:
    """Make the files the table's current snapshot unless they are, and return it.

    They are retained from before the commit on; versions that the table no longer has are released.
    """
    view = files.view
    paths = tuple(files.paths)
    lake = lake_in(view.store)
    if not isinstance(view, StreamView):
        _check_sealed(view, lake)
    table = _load_or_create_table(files, catalog, identifier)
    _check_not_superseded(view, table, identifier, lake, may_replace)
    files = _with_names_of_table(files, table)
    _check_columns(files, table, identifier)
    if must_be_masked(view):
        _check_takes_deletes(view, table, identifier)
    holder = f"{_describe_holder(identifier)} ({table.metadata.table_uuid})"
    _retain(view, lake, holder)
    is_new = not _is_current(view, paths, table)
    if is_new:
        deletes: list[PositionDeletes] = []
        if isinstance(view, VersionReader) and must_be_masked(view):
            folder = hold_folder(lake, view.dataset, view.version, holder=holder)
            deletes = write_position_deletes(view, folder)
        _commit(files, deletes, table, identifier, properties)
        _retain(view, lake, holder)  # if others have released it, who took this process for dead
    snapshot = table.current_snapshot()
    assert snapshot is not None
    _release(
        lake,
        view.dataset,
        holder,
        lambda: {view.version, *_registered_versions(catalog.load_table(identifier))},
    )
    return IcebergSnapshot(
        identifier, snapshot.snapshot_id, view.dataset, view.version, paths, is_new
    )


def _check_not_superseded(
    view: Held, table: Table, identifier: str, lake: Lake, may_replace: MayReplace
) -> None:
    """Raise CommitConflictError if the table has a version that the view's may not replace.

    The served version may replace every other. Another one may replace an older one that is not
    served, but not in a bounded dataset with `may_replace` "if served". Call it after the table was
    loaded: the commit fails if the table has changed since.
    """
    registered = _current_version(table)
    if registered in (None, view.version) or may_replace == "anything":
        return
    served, is_bounded = _read_served(view, lake)
    if view.version == served:
        return
    is_older = _number(view, registered) < _number(view, view.version)
    replaces_older = registered != served and is_older
    must_be_served = is_bounded and may_replace == "if served"
    if replaces_older and not must_be_served:
        return
    raise errors.CommitConflictError(
        f"the Iceberg table {identifier!r} has version {registered}, which"
        f" {_describe_view(view)} would set back: {served or 'no version'} is served by now.",
        "Nothing was registered. Register what is served, with a new view; or, if the table has to"
        " go back to this one, register it with replace_newer=True.",
        dataset=view.dataset,
    )


def _read_served(view: Held, lake: Lake) -> tuple[str, bool]:
    """Return the id of the version that is served now ("" if none is), and whether it is one of a
    bounded dataset; of a stream, the number of its newest commit.
    """
    if isinstance(view, StreamView):
        commit, _ = LakeStreams(lake).state(view.stream)
        return str(commit.number), False
    _, manifest = DatasetLog(lake, view.dataset).require()
    return manifest.served_id or "", not manifest.versions_are_commits


def _number(view: Held, version: str) -> int:
    """Return the number of a version of the view's dataset, or of a commit of its stream; newer
    ones have higher numbers.
    """
    if isinstance(view, StreamView):
        return int(version)
    return version_number(version)


def _retain(view: Held, lake: Lake, holder: str) -> None:
    """Prevent the deletion of the view's files; raise if some may be deleted already."""
    if isinstance(view, StreamView):
        stream_holds.retain_files(
            lake, view.stream, view.stream_id, view.version, view.attempts, holder=holder
        )
    else:
        retain_version(lake, view.dataset, view.version, holder=holder)


def _is_current(view: Held, paths: Sequence[str], table: Table) -> bool:
    """Whether the current snapshot is this version, at these paths, which change if the lake is
    moved.
    """
    from dagster_adjunct.assets.exchange.iceberg_snapshot import list_data_paths

    current = table.current_snapshot()
    if current is None or _current_version(table) != view.version:
        return False
    return list_data_paths(current, table.io) == set(paths)


def _current_version(table: Table) -> str | None:
    """Return the version of which the table's current snapshot is, None if it is of none."""
    current = table.current_snapshot()
    if current is None or current.summary is None:
        return None
    return current.summary.additional_properties.get(VERSION)


@validated
def publish_to_iceberg(
    lake: Lake,
    dataset: str,
    table: IcebergTable,
    *,
    spark: SparkSession | Callable[[], SparkSession] | None = None,
    by: str | None = None,
) -> IcebergSnapshot:
    """Make the served version of a dataset the current snapshot of an Iceberg table, and return the
    snapshot.

    A change stream's table with deltas is compacted first if it keeps a history or the Iceberg
    table takes no position deletes; `spark` is called only then. A version that is already current
    is not registered again, and one that is no longer served is not registered at all. Raises as
    `register_in_iceberg` and `compact_dataset` do, and NoSealedVersionError if no version is
    served.
    """
    from dagster_adjunct.assets.unbounded.compaction import compact_dataset

    catalog = table.open()
    with open_dataset(lake, dataset) as opened:
        keeps_history = opened.sealed.history is not None
        compactions = 0
        if keeps_history or not _takes_deletes(catalog, table.identifier):
            compactions = _COMPACTIONS
        # If changes are committed faster than they are compacted, registering raises DatasetError.
        for _ in range(compactions):
            has_deltas = len(opened.sealed.generations) > 1 or opened.sealed.lacks_base
            if not has_deltas:
                break
            compact_dataset(lake, dataset, spark=spark, by=by, level="major")
            opened.refresh()
        _, manifest = DatasetLog(lake, dataset).require()
        return _register_served(
            opened,
            catalog,
            table.identifier,
            keeps_history=keeps_history,
            is_bounded=not manifest.versions_are_commits,
        )


def _register_served(
    opened: Dataset, catalog: Catalog, identifier: str, *, keeps_history: bool, is_bounded: bool
) -> IcebergSnapshot:
    """Register what is served, again if that changes meanwhile: at most three times. Raises the
    last CommitConflictError.
    """
    for attempts_left in reversed(range(_ATTEMPTS)):
        view = opened.over_time() if keeps_history else opened
        try:
            snapshot = _register_view(view, catalog, identifier, "if served", {})
        except errors.CommitConflictError:
            if not attempts_left or not opened.refresh():
                raise
            continue
        # A rollback meanwhile, to the version that the table had before, did not change the table,
        # so it did not stop this registration.
        may_be_outdated = snapshot.new and is_bounded
        if not attempts_left or not may_be_outdated or not opened.refresh():
            return snapshot
    raise AssertionError("unreachable")


@validated
def release_from_iceberg(lake: Lake, dataset: str, identifier: str) -> tuple[str, ...]:
    """Release all versions held for dropped Iceberg tables of this name, in any catalogue; return
    their ids.

    They may then be discarded, and snapshots that still refer to them become unreadable.
    """
    if "." in dataset:
        stream = split_stream_name(dataset).stream
        holders = set(stream_holds.list_retained_attempts(lake, stream))
    else:
        holders = {lease.holder for lease in list_leases(lake, dataset)}
    released: list[str] = []
    for holder in sorted(holders):
        if holder.rpartition(" (")[0] == _describe_holder(identifier):
            released += _release(lake, dataset, holder)
    return tuple(released)


def _release(
    lake: Lake, name: str, holder: str, keep: Callable[[], Collection[str]] | None = None
) -> tuple[str, ...]:
    """Release the versions of a dataset, or a stream ("lake.enriched"), that `holder` holds; return
    them.

    Those that `keep` returns stay held.
    """
    if "." in name:
        stream = split_stream_name(name).stream
        return stream_holds.release_files(lake, stream, holder=holder, keep=keep)
    return release_versions(lake, name, holder=holder, keep=keep)


def _describe_holder(identifier: str) -> str:
    """Return who holds versions for a table; its id follows, since other catalogues may have
    tables of its name.
    """
    return f"Iceberg table {identifier}"


def _check_sealed(view: Held, lake: Lake) -> None:
    """Raise DatasetError for a version that was rejected or revoked."""
    _, manifest = DatasetLog(lake, view.dataset).read()
    ref = None
    if manifest is not None:
        ref = manifest.ref(view.version)
    if ref is not None and ref.state != "sealed":
        raise errors.DatasetError(
            f"dataset {view.dataset!r}, version {view.version} is {ref.state} ({ref.reason}) and"
            " can't be registered.",
            "Register a sealed version.",
            dataset=view.dataset,
            version=view.version,
        )


def _load_or_create_table(files: ViewFiles, catalog: Catalog, identifier: str) -> Table:
    """Return the table, created if it is missing. Raises DatasetError if it has other data, and
    ConfigurationError without its namespace.
    """
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError, TableAlreadyExistsError

    view = files.view
    properties = {DATASET: view.dataset}
    try:
        try:
            table = catalog.load_table(identifier)
        except NoSuchTableError:
            table = catalog.create_table(identifier, schema=files.schema, properties=properties)
    except TableAlreadyExistsError:  # created concurrently
        table = catalog.load_table(identifier)
    except NoSuchNamespaceError as error:
        namespace = identifier.rpartition(".")[0]
        raise errors.ConfigurationError(
            f"the catalogue has no namespace {namespace!r} for the table {identifier!r}.",
            f"Create it: catalog.create_namespace({namespace!r}).",
            table=identifier,
        ) from error
    owner = table.properties.get(DATASET)
    has_data = owner is not None or table.current_snapshot() is not None
    if owner != view.dataset and has_data:
        held = f"dataset {owner!r}" if owner else "data of its own"
        raise errors.DatasetError(
            f"the Iceberg table {identifier!r} holds {held}, which registering"
            f" {_describe_owner(view)} would replace.",
            "Use another table.",
            dataset=view.dataset,
            version=view.version,
        )
    return table


def _with_names_of_table(files: ViewFiles, table: Table) -> ViewFiles:
    """Return the files, with the names that the table has for its columns if the view is of an
    earlier version than the newest registered one.
    """
    view = files.view
    newest = max(map(version_number, _registered_versions(table)), default=0)
    if not isinstance(view, VersionReader) or view.sealed.number >= newest:
        return files
    sealed = view.sealed.named_as(columns_of_table(table.metadata), keep_others=True)
    return read_files(VersionReader(view.store, view.dataset, sealed), masked=True)


def _follow_columns(files: ViewFiles, transaction: Transaction) -> None:
    """Rename the table's columns that were renamed, and delete those that were dropped: in the
    transaction, which the caller commits or not.
    """
    changes = find_changes(transaction.table_metadata, files.named_columns)
    if not changes:
        return
    with transaction.update_schema() as update:
        for path, name in changes.items():
            if name is None:
                update.delete_column(path)
            else:
                update.rename_column(path, name)


def _check_columns(files: ViewFiles, table: Table, identifier: str) -> None:
    """Raise DatasetError for missing columns and fields of structs (unless the version was in the
    table before), for changed types, and for identifier fields: Iceberg requires values in them,
    and columns of files may have nulls.
    """
    view = files.view
    transaction = table.transaction()  # which is not committed
    _follow_columns(files, transaction)
    schema = transaction.table_metadata.schema()
    missing = []
    wrong: list[str] = []
    for name, kind in {field.name: field.field_type for field in schema.fields}.items():
        if name not in files.columns:
            missing.append(f"{name} ({kind})")
            continue
        missing += missing_fields(files.columns[name], kind, name)
        wrong += type_differences(files.columns[name], kind, name)
    if view.version not in _registered_versions(table):
        wrong[:0] = [f"{field} is missing" for field in missing]
    for name in sorted(schema.identifier_field_names()):
        wrong.append(f"{name} is an identifier field there")
    if wrong:
        raise errors.DatasetError(
            f"{_describe_view(view)} does not fit the Iceberg table {identifier!r}:"
            f" {'; '.join(wrong)}.",
            "Register this version in a new table. In this one, columns can only be added, and"
            " renamed or dropped as the dataset declares: renamed=, drop=.",
            dataset=view.dataset,
            version=view.version,
        )


def _takes_deletes(catalog: Catalog, identifier: str) -> bool:
    """Whether position deletes can be written for a table; a missing one is created so."""
    with translate_client_errors(catalog.name):
        if not catalog.table_exists(identifier):
            return True
        return _why_no_deletes(catalog.load_table(identifier)) is None


def _why_no_deletes(table: Table) -> str | None:
    """Return why position deletes can't be written for a table, or None."""
    if table.format_version != 2:
        return f"is of format version {table.format_version}"
    if table.spec().fields:
        return "is partitioned"
    return None


def _check_takes_deletes(view: Held, table: Table, identifier: str) -> None:
    """Raise DatasetError if position deletes can't be written for a table."""
    if (reason := _why_no_deletes(table)) is not None:
        raise errors.DatasetError(
            f"{_describe_view(view)} has superseded or deleted rows, which take position deletes to"
            f" leave out, and the Iceberg table {identifier!r} {reason}.",
            f"Register a compacted version: adjunct dataset compact {view.dataset} --level major."
            " Or use a table without partitions, of format version 2.",
            dataset=view.dataset,
            version=view.version,
        )


def _commit(
    files: ViewFiles,
    deletes: Sequence[PositionDeletes],
    table: Table,
    identifier: str,
    properties: dict[str, str],
) -> None:
    """Commit one snapshot that consists of these files, without the rows that `deletes` mark.

    Raises CommitConflictError and CommitStateUnknownError.
    """
    from pyiceberg.exceptions import (
        CommitFailedException,
        CommitStateUnknownException,
        ValidationException,
    )
    from pyiceberg.table import TableProperties

    from dagster_adjunct.assets.exchange.iceberg_snapshot import SnapshotOfFiles

    view = files.view
    summary = {**properties, DATASET: view.dataset, VERSION: view.version}
    if isinstance(view, VersionReader) and view.sealed.name is not None:
        summary[NAME] = view.sealed.name
    try:
        with table.transaction() as transaction:
            before = transaction.table_metadata.name_mapping()
            _follow_columns(files, transaction)
            with transaction.update_schema() as update:
                update.union_by_name(files.schema)
            # The files belong to the lake: engines that expire snapshots or drop the table must not
            # delete them.
            new_properties = {DATASET: view.dataset}
            if GARBAGE not in table.properties:
                new_properties[GARBAGE] = "false"
            # The files have no field ids, so readers find columns by this mapping.
            new_properties[TableProperties.DEFAULT_NAME_MAPPING] = _name_mapping(
                files, transaction.table_metadata, before
            )
            transaction.set_properties(new_properties)
            # One snapshot: deleting and then adding would leave a snapshot without rows in between.
            snapshot = SnapshotOfFiles(transaction, table.io, summary)
            arriving = _data_files(files, snapshot.missing_paths(files.paths), table, transaction)
            snapshot.replace_files(frozenset(files.paths), arriving, deletes)
            snapshot.commit()
    except CommitStateUnknownException as error:
        raise errors.CommitStateUnknownError(
            f"it is unknown whether version {view.version} was committed to the Iceberg table"
            f" {identifier!r}.",
            "Register it again: a committed version is not registered twice.",
            dataset=view.dataset,
        ) from error
    except (CommitFailedException, ValidationException) as error:
        raise errors.CommitConflictError(
            f"the Iceberg table {identifier!r} was changed by another writer while "
            f"{_describe_view(view)} was registered ({error}).",
            "Nothing was registered. Check the table, and register again.",
            dataset=view.dataset,
        ) from error


def _data_files(
    files: ViewFiles, paths: list[str], table: Table, transaction: Transaction
) -> list[DataFile]:
    """Return Iceberg's descriptions of the files at these paths, made from their footers.

    Raises DatasetError for files from before a column was widened or dropped, ManifestMismatchError
    for missing or damaged ones.
    """
    from pyiceberg.io.pyarrow import parquet_files_to_data_files

    view = files.view
    listed = dict(zip(files.paths, files.files, strict=True))
    try:
        with_hidden = _with_hidden(files.hidden, transaction.table_metadata)
        data_files = list(parquet_files_to_data_files(table.io, with_hidden, iter(paths)))
    except (OSError, ValueError) as error:
        if isinstance(view, VersionReader) and isinstance(error, ValueError):
            _check_stored_types(view, [listed[path].stored for path in paths])
        raise _unreadable_error(view, error) from error
    for file in data_files:
        stored = listed[file.file_path].stored
        if (file.record_count, file.file_size_in_bytes) != (stored.file.rows, stored.file.size):
            raise stored.damaged(
                f"it has {file.record_count} rows in {file.file_size_in_bytes} bytes"
            )
    return data_files


def _unreadable_error(view: Held, error: OSError | ValueError) -> errors.AdjunctError:
    """Return the error for a file of a view that PyIceberg can't read."""
    what = _describe_view(view)
    if isinstance(error, OSError) and error.errno in errors.OF_FILES:
        return errors.file_error(error, error.filename or "/", what)
    step = "Check the catalogue's settings for the lake (s3.endpoint, credentials)"
    if isinstance(view, VersionReader):
        step += f", and the version itself: adjunct dataset verify {view.dataset}."
    else:
        step += ", and read the stream without Iceberg: its error names a damaged file."
    return errors.ManifestMismatchError(
        f"{what}: a file can't be read by PyIceberg: {error}.",
        step,
        dataset=view.dataset,
        version=view.version,
    )


def _check_stored_types(view: VersionReader, files: Collection[StoredFile]) -> None:
    """Raise DatasetError where files have a column from before it was widened or dropped."""
    layout = view.sealed.layout
    wanted = {field.name: field.type for field in layout.stored.arrow_schema()}
    stored = (field for file in files for field in file.open().schema_arrow)
    changed = set()
    for field in stored:
        if field.type != wanted.get(field.name):
            changed.add(field.name)
    if changed:
        raise errors.DatasetError(
            f"{_describe_view(view)} has files from before {', '.join(sorted(changed))} was"
            " widened or dropped, and Iceberg does not convert them.",
            f"Register a compacted version: adjunct dataset compact {view.dataset} --level major.",
            dataset=view.dataset,
            version=view.version,
        )


def _name_mapping(files: ViewFiles, metadata: TableMetadata, before: NameMapping | None) -> str:
    """Return the table's mapping of column names to fields, which readers need for all columns in
    the files; `before` is the one before its columns were changed.

    Hidden columns of a change stream's table are mapped to fields that the table does not have,
    like dropped columns, so that no reader sees them.
    """
    from pyiceberg.table.name_mapping import MappedField, NameMapping

    fields = map_names(metadata, before, files.named_columns)
    there = {name for field in fields for name in field.names}
    for name in files.hidden:
        if name not in there:
            fields.append(MappedField(field_id=_hidden_id(name), names=[name]))
    return NameMapping(fields).model_dump_json()


def _with_hidden(hidden: dict[str, str], metadata: TableMetadata) -> TableMetadata:
    """Return the table's metadata as PyIceberg needs it to describe files: with the names that
    files have, and with the hidden columns, of which no statistics are kept. It is never committed.

    `hidden` has the type of each hidden column.
    """
    from pyiceberg.schema import Schema
    from pyiceberg.types import (
        BinaryType,
        BooleanType,
        DateType,
        DecimalType,
        IcebergType,
        IntegerType,
        LongType,
        NestedField,
        StringType,
        TimestamptzType,
    )

    types: dict[str, IcebergType] = {
        "bigint": LongType(),
        "binary": BinaryType(),
        "boolean": BooleanType(),
        "date": DateType(),
        "int": IntegerType(),
        "smallint": IntegerType(),
        "string": StringType(),
        "timestamp": TimestamptzType(),
        "tinyint": IntegerType(),
    }
    for kind in hidden.values():
        digits = decimal_digits(kind)
        if digits is not None:
            types[kind] = DecimalType(*digits)
    schema = metadata.schema()
    fields = [
        NestedField(_hidden_id(name), name, types[kind], required=False)
        for name, kind in hidden.items()
    ]
    wide = Schema(*fields_in_files(metadata), *fields, schema_id=schema.schema_id)
    without_statistics = {f"write.metadata.metrics.column.{name}": "none" for name in hidden}
    return metadata.model_copy(
        update={"schemas": [wide], "properties": {**metadata.properties, **without_statistics}}
    )


def _describe_view(view: Held) -> str:
    """Return the dataset or stream, and which version or commit of it, for an error."""
    kind = " at commit" if isinstance(view, StreamView) else ", version"
    return f"{_describe_owner(view)}{kind} {view.version}"


def _describe_owner(view: Held) -> str:
    """Return the dataset or stream of a view, for an error."""
    if isinstance(view, StreamView):
        return f"stream {view.stream!r}"
    return f"dataset {view.dataset!r}"


def _registered_versions(table: Table) -> set[str]:
    """Return the ids of the versions that the table has snapshots of."""
    versions = set()
    for snapshot in table.snapshots():
        if snapshot.summary and VERSION in snapshot.summary.additional_properties:
            versions.add(snapshot.summary.additional_properties[VERSION])
    return versions
