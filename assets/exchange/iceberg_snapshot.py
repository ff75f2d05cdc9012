"""A snapshot of an Iceberg table that has exactly the given files, position deletes included.

PyIceberg reads position delete files, but its writers make manifests of data files only. The two
classes below add what is missing, on PyIceberg's internal classes. These are used nowhere else, and
may change in any release: `pyproject.toml` allows only the minor version that they are written for,
and `tests/test_private_interfaces.py` fails for another one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cached_property

from pyiceberg.exceptions import ValidationException
from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriter,
    ManifestWriterV2,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Transaction
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.table.update.snapshot import _OverwriteFiles
from pyiceberg.typedef import Record

from dagster_adjunct.assets.exchange.position_deletes import PATH_ID, PositionDeletes

WRITTEN_FOR = ("0.12",)


def list_data_paths(snapshot: Snapshot, io: FileIO) -> set[str]:
    """Return the paths of a snapshot's data files."""
    return _data_paths(_list_entries(snapshot, io))


def _list_entries(snapshot: Snapshot | None, io: FileIO) -> list[ManifestEntry]:
    """Return the manifest entries of a snapshot; [] for None."""
    entries: list[ManifestEntry] = []
    if snapshot is not None:
        for manifest in snapshot.manifests(io):
            entries += manifest.fetch_manifest_entry(io)
    return entries


def _data_paths(entries: Sequence[ManifestEntry]) -> set[str]:
    """Return the paths of the data files among these entries."""
    found = set()
    for entry in entries:
        if entry.data_file.content == DataFileContent.DATA:
            found.add(entry.data_file.file_path)
    return found


class SnapshotOfFiles(_OverwriteFiles):
    """A new snapshot of exactly these files, in one commit.

    Data files that the table has already stay, with their sequence numbers; all other files of the
    table are removed. Delete files are always added as new ones: they apply only to data files that
    are not younger than themselves and have their partition spec, so that data files of an earlier
    spec are removed and added again.
    """

    def __init__(self, transaction: Transaction, io: FileIO, properties: dict[str, str]) -> None:
        super().__init__(Operation.OVERWRITE, transaction, io, snapshot_properties=properties)

    @cached_property
    def live(self) -> list[ManifestEntry]:
        """The manifest entries of the current snapshot."""
        return _list_entries(self._transaction.table_metadata.current_snapshot(), self._io)

    def missing_paths(self, paths: Sequence[str]) -> list[str]:
        """Return those of the paths at which the current snapshot has no data file of the
        table's partition spec.
        """
        there = _data_paths([entry for entry in self.live if self._has_spec(entry)])
        found = []
        for path in paths:
            if path not in there:
                found.append(path)
        return found

    def replace_files(
        self,
        paths: Collection[str],
        arriving: Sequence[DataFile],
        deletes: Sequence[PositionDeletes],
    ) -> None:
        """Set the files of the snapshot: the data files at `paths`, and these delete files.

        `arriving` are those of the data files that the current snapshot lacks.
        """
        self._deleted_data_files = set()
        for entry in self.live:
            if entry.data_file.file_path not in paths or not self._has_spec(entry):
                self._deleted_data_files.add(entry.data_file)
        self._added_data_files = [*arriving, *map(_delete_file, deletes)]
        if not deletes and self._parent_snapshot_id is None:
            # Any other snapshot must not be an append: those who read appended rows alone ignore
            # delete files.
            self._operation = Operation.APPEND

    def _has_spec(self, entry: ManifestEntry) -> bool:
        """Whether a file has the table's current partition spec."""
        return entry.data_file.spec_id == self._transaction.table_metadata.default_spec_id

    def _validate_concurrency(self) -> None:
        """Raise ValidationException if another writer has committed a snapshot, instead of
        retrying on top of it.
        """
        if self._commit_window is not None and not self._commit_window.is_empty():
            raise ValidationException("another snapshot was committed")

    def _manifests(self) -> list[ManifestFile]:
        """Write the manifests of the snapshot and return them.

        For each partition spec there is one of the data files and one of the delete files, if it
        has any.
        """
        entries: dict[tuple[ManifestContent, int], list[ManifestEntry]] = defaultdict(list)
        for entry in self.live:
            snapshot_id: int | None
            if entry.data_file in self._deleted_data_files:
                status = ManifestEntryStatus.DELETED
                snapshot_id = self._snapshot_id
            else:
                status = ManifestEntryStatus.EXISTING
                snapshot_id = entry.snapshot_id
            listed = entries[_manifest_of(entry.data_file), entry.data_file.spec_id]
            listed.append(
                ManifestEntry.from_args(
                    status=status,
                    snapshot_id=snapshot_id,
                    sequence_number=entry.sequence_number,
                    file_sequence_number=entry.file_sequence_number,
                    data_file=entry.data_file,
                )
            )
        default = self._transaction.table_metadata.default_spec_id
        for file in self._added_data_files:
            added = ManifestEntry.from_args(
                status=ManifestEntryStatus.ADDED, snapshot_id=self._snapshot_id, data_file=file
            )
            entries[_manifest_of(file), default].append(added)
        return [
            self._write(content, self.spec(spec), listed)
            for (content, spec), listed in entries.items()
        ]

    def _write(
        self, content: ManifestContent, spec: PartitionSpec, entries: Sequence[ManifestEntry]
    ) -> ManifestFile:
        """Write a manifest with these entries, of data files or of delete files, and return it."""
        writer: ManifestWriter
        if content == ManifestContent.DATA:
            writer = self.new_manifest_writer(spec)
        else:
            output = self.new_manifest_output()
            writer = _DeleteManifestWriter(
                spec, self.schema(), output, self._snapshot_id, self._compression
            )
        with writer:
            for entry in entries:
                writer.add_entry(entry)
        return writer.to_manifest_file()


class _DeleteManifestWriter(ManifestWriterV2):
    """Writes a manifest of delete files."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def _manifest_of(file: DataFile) -> ManifestContent:
    """Return in which kind of manifest a file is listed."""
    if file.content == DataFileContent.DATA:
        return ManifestContent.DATA
    return ManifestContent.DELETES


def _delete_file(deletes: PositionDeletes) -> DataFile:
    """Return Iceberg's description of a position delete file."""
    return DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path=deletes.path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=deletes.rows,
        file_size_in_bytes=deletes.size,
        lower_bounds={PATH_ID: deletes.data_path.encode()},
        upper_bounds={PATH_ID: deletes.data_path.encode()},
    )
