"""The snapshots of an Iceberg table, by PyIceberg.

Columns are found by their ids: a column has the values that it had under an earlier name, and is
null in snapshots of before it was added.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from cachetools import LRUCache, TTLCache, cached

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.delta import delta_options
from dagster_adjunct.resources.iceberg import IcebergTable, translate_client_errors
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.table_snapshots.table import (
    ChangedFiles,
    ChangedRows,
    StateFile,
    StateScan,
    TableHistory,
    TableState,
    group_by_size,
    unknown_column_error,
)

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.table import FileScanTask, Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

_REPLACE = "replace"


class TaggedStates(NamedTuple):
    """The identity of a table, and the snapshots of some of its tags, by name."""

    identity: str
    states: dict[str, TableState]


class _DifferentFiles(NamedTuple):
    """The files of each of two snapshots that the other one does not have with the same rows."""

    before: list[FileScanTask]
    after: list[FileScanTask]


class _Part(NamedTuple):
    """Files of a snapshot, and the metadata of the table that it was planned with."""

    metadata: str
    tasks: list[FileScanTask]


@dataclass(frozen=True, slots=True)
class IcebergSnapshots:
    """The snapshots of the branch `main` of a table.

    With `metadata`, the place of the table's metadata at some time, the table is read as it was
    then, also where its catalogue is not configured.
    """

    table: IcebergTable
    metadata: str = ""

    def pinned(self) -> IcebergSnapshots:
        """Return the table as it is now, to be read on executors."""
        return IcebergSnapshots(self.table, self.metadata or self.load().metadata_location)

    def describe(self) -> str:
        return f"Iceberg table {self.table.identifier} of catalogue {self.table.catalog}"

    def load(self) -> Table:
        """Load the table. Raises DatasetError if there is none, or one of format version 1."""
        if self.metadata:
            return self._load_static(self.metadata)
        catalog = self.table.open()
        from pyiceberg.exceptions import NoSuchTableError

        with translate_client_errors(self.table.catalog):
            try:
                table = catalog.load_table(self.table.identifier)
            except NoSuchTableError as error:
                raise errors.DatasetError(
                    f"there is no {self.describe()}.",
                    "Create it, or correct the identifier.",
                    table=self.table.identifier,
                ) from error
        if table.metadata.format_version < 2:
            raise errors.DatasetError(
                f"the {self.describe()} is of format version 1, whose snapshots have no order of"
                " their own.",
                "Upgrade it: in PyIceberg,"
                " table.transaction().upgrade_table_version(2).commit_transaction().",
                table=self.table.identifier,
            )
        return table

    def identity(self) -> str:
        return str(self.load().metadata.table_uuid)

    def history(self, since: TableState | None) -> TableHistory:
        table = self.load()
        known = {snapshot.snapshot_id: snapshot for snapshot in table.snapshots()}
        chain = []
        at = table.current_snapshot()
        while at is not None:
            chain.append(_state(at))
            at = known.get(at.parent_snapshot_id or 0)
        chain.reverse()
        complete_since = 0
        if chain:
            # Each commit has the next number, also those to other branches. As long as the commit
            # with the number before is known, it was to another branch, and none is missing.
            numbers = {snapshot.sequence_number or 0 for snapshot in known.values()}
            complete_since = chain[0].number
            while complete_since - 1 in numbers:
                complete_since -= 1
        identity = str(table.metadata.table_uuid)
        return TableHistory(identity, tuple(chain), complete_since, _current_since(table.metadata))

    def tags(self, pattern: str) -> TaggedStates:
        """Return the snapshots of the tags whose names match a pattern such as "release-*"."""
        from pyiceberg.table.refs import SnapshotRefType

        table = self.load()
        found = {}
        for name, ref in table.refs().items():
            is_tag = ref.snapshot_ref_type is SnapshotRefType.TAG
            if not is_tag or not fnmatchcase(name, pattern):
                continue
            snapshot = table.snapshot_by_id(ref.snapshot_id)
            if snapshot is not None:
                found[name] = _state(snapshot)
        return TaggedStates(str(table.metadata.table_uuid), found)

    def is_readable(self, state: TableState) -> bool:
        return True  # files of a snapshot in the metadata are not deleted

    def plan(self, state: TableState, names: Sequence[str]) -> StateScan:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        table = self.load()
        projected = self._project(table, names)
        tasks = self._plan_files(table, state)
        rows: int | None = None
        if not any(task.delete_files for task in tasks):
            rows = sum(task.file.record_count for task in tasks)
        sized = [(task, task.file.file_size_in_bytes) for task in tasks]
        columns = schema_to_pyarrow(projected, include_field_ids=False)
        parts = [_Part(table.metadata_location, group) for group in group_by_size(sized)]
        return StateScan(columns, parts, rows)

    def read(
        self, state: TableState, part: Any, names: Sequence[str]
    ) -> Iterator[pa.RecordBatch | pa.Table]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        table = self._load_static(part.metadata)
        scan = ArrowScan(table.metadata, table.io, self._project(table, names), AlwaysTrue())
        with self._naming_snapshot(state):
            yield from scan.to_record_batches(part.tasks)

    # -- changes

    def find_state(self, history: TableHistory, state_id: str) -> TableState | None:
        for state in history.states:
            if state.id == state_id:
                return state
        snapshot = self.load().snapshot_by_id(int(state_id))  # rolled back, but not expired
        return None if snapshot is None else _state(snapshot)

    def files(self, state: TableState) -> list[StateFile]:
        return [_state_file(task) for task in self._tasks(state).values()]

    def file_rows(
        self, state: TableState, path: str, names: Sequence[str]
    ) -> Iterator[pa.RecordBatch | pa.Table]:
        part = _Part(self.load().metadata_location, [self._tasks(state)[path]])
        return self.read(state, part, names)

    def changed_files(self, before: TableState, after: TableState) -> ChangedFiles:
        differ = self._compare(before, after)
        if differ.before:
            tasks = [*differ.before, *differ.after]
            return ChangedFiles(None, sum(task.file.file_size_in_bytes for task in tasks))
        return ChangedFiles([_state_file(task) for task in differ.after])

    def changed_rows(
        self, before: TableState, after: TableState, names: Sequence[str]
    ) -> ChangedRows:
        differ = self._compare(before, after)
        metadata = self.load().metadata_location
        return ChangedRows(
            before=self.read(before, _Part(metadata, differ.before), names),
            after=self.read(after, _Part(metadata, differ.after), names),
        )

    def _compare(self, before: TableState, after: TableState) -> _DifferentFiles:
        """Return the files in which two states differ."""
        old = self._tasks(before)
        new = self._tasks(after)
        removed = [task for path, task in old.items() if not _is_same(task, new.get(path))]
        added = [task for path, task in new.items() if not _is_same(task, old.get(path))]
        return _DifferentFiles(removed, added)

    def _tasks(self, state: TableState) -> dict[str, FileScanTask]:
        """Return the files of a snapshot, which never change, by path."""
        key = self.table, state.id
        with _lock:
            found = _planned.get(key)
        if found is None:
            found = {task.file.file_path: task for task in self._plan_files(self.load(), state)}
            with _lock:
                _planned[key] = found
        return found

    def _load_static(self, metadata: str) -> Table:
        """Load the table as this metadata file has it; also where the catalogue is not configured,
        as on executors.
        """
        from pyiceberg.table import StaticTable

        properties = file_properties(metadata) | _catalog_access(os.getpid(), metadata, self.table)
        with translate_client_errors(self.table.catalog):
            return StaticTable.from_metadata(metadata, properties)

    def _project(self, table: Table, names: Sequence[str]) -> Schema:
        """Return the columns of these names, as the table calls them now; they have their ids.
        Raises DatasetError for a name that the table does not have.
        """
        known = table.schema().column_names
        top = [column.name for column in table.schema().fields]
        for name in names:
            if name not in known:
                raise unknown_column_error(f"the {self.describe()}", name, top)
        return table.schema().select(*names)

    def _plan_files(self, table: Table, state: TableState) -> list[FileScanTask]:
        """Return the files of a snapshot, in the order of their paths. Raises DatasetError if the
        snapshot has expired.
        """
        if table.snapshot_by_id(int(state.id)) is None:  # of which a scan would find no rows
            raise errors.DatasetError(
                f"snapshot {state.id} of the {self.describe()} has expired.",
                "Run again: it goes on as declared for states that have expired.",
                version=state.id,
            )
        with self._naming_snapshot(state):
            tasks = list(table.scan(snapshot_id=int(state.id)).plan_files())
        return sorted(tasks, key=lambda task: task.file.file_path)

    @contextmanager
    def _naming_snapshot(self, state: TableState) -> Iterator[None]:
        """Raise DatasetError, with the snapshot, for what PyIceberg can't read."""
        what = f"snapshot {state.id} of the {self.describe()}"
        try:
            with translate_client_errors(self.table.catalog):
                yield
        except FileNotFoundError as error:
            raise errors.DatasetError(
                f"{what} can't be read: a file of it is gone: {errors.first_line(error)}.",
                "Abandon this version, or restore the file.",
                version=state.id,
            ) from error
        except (ValueError, NotImplementedError) as error:
            raise errors.DatasetError(
                f"{what} can't be read by PyIceberg: {errors.first_line(error)}.",
                "Rewrite its data files, without equality deletes, or abandon this version.",
                version=state.id,
            ) from error


def _access_key(process: int, metadata: str, table: IcebergTable) -> tuple[int, str]:
    return process, metadata


@cached(TTLCache(maxsize=64, ttl=60), key=_access_key)
def _catalog_access(process: int, metadata: str, table: IcebergTable) -> dict[str, Any]:
    """Return the properties with which the catalogue lets this process read the table's files, also
    credentials that it vends; none if it is not configured here. They are secret.
    """
    try:
        catalog = table.open()
    except errors.ConfigurationError:
        return {}
    from pyiceberg.exceptions import NoSuchTableError

    with translate_client_errors(table.catalog):
        try:
            return dict(catalog.load_table(table.identifier).io.properties)
        except NoSuchTableError:  # dropped or renamed, while its files are there
            return dict(catalog.properties)


# By table and id of a snapshot: the files of the snapshots that were read last, by path.
_planned: LRUCache[tuple[IcebergTable, str], dict[str, FileScanTask]] = LRUCache(8)
_lock = Lock()


def _state_file(task: FileScanTask) -> StateFile:
    rows = None if task.delete_files else task.file.record_count
    return StateFile(task.file.file_path, task.file.file_size_in_bytes, rows)


def _is_same(task: FileScanTask, other: FileScanTask | None) -> bool:
    """Return whether a file has the same rows in two snapshots: the same rows were deleted from
    it.
    """
    if other is None:
        return False
    deletes = {file.file_path for file in task.delete_files}
    return deletes == {file.file_path for file in other.delete_files}


def file_properties(location: str) -> dict[str, str]:
    """Return the properties with which PyIceberg reads files there without a catalogue: the
    ADJUNCT_S3_… settings and boto3's credentials.
    """
    names = {
        "AWS_ENDPOINT_URL": "s3.endpoint",
        "AWS_REGION": "s3.region",
        "AWS_ACCESS_KEY_ID": "s3.access-key-id",
        "AWS_SECRET_ACCESS_KEY": "s3.secret-access-key",
        "AWS_SESSION_TOKEN": "s3.session-token",
    }
    options = delta_options(location)
    return {names[name]: value for name, value in options.items() if name in names}


def _current_since(metadata: TableMetadata) -> datetime | None:
    """Return since when the current snapshot is the table's; None if its log does not say."""
    for entry in reversed(metadata.snapshot_log):
        if entry.snapshot_id == metadata.current_snapshot_id:
            return datetime.fromtimestamp(entry.timestamp_ms / 1000, UTC)
    return None


def _state(snapshot: Snapshot) -> TableState:
    """Return a snapshot as a state; a compaction has the operation "replace"."""
    operation = "" if snapshot.summary is None else snapshot.summary.operation.value
    return TableState(
        str(snapshot.snapshot_id),
        snapshot.sequence_number or 0,
        datetime.fromtimestamp(snapshot.timestamp_ms / 1000, UTC),
        operation == _REPLACE,
    )
