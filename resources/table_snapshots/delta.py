"""The versions of a Delta table, by delta-rs.

Which versions there are, and what they changed, is read from the commits in `_delta_log`; rows are
read by delta-rs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from cachetools import TTLCache, cached

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.delta import open_delta, translate_delta_errors
from dagster_adjunct.resources.files.tree import ListedFile, open_tree
from dagster_adjunct.resources.lazy_modules import pa, pc
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
from dagster_adjunct.resources.threads import map_in_threads

if TYPE_CHECKING:
    from deltalake import DeltaTable

_LOG = "_delta_log"
_CONFIGURATION = "configuration"
_FEED = "delta.enableChangeDataFeed"
_COMMIT = re.compile(r"_delta_log/(?P<version>\d{20})\.json$")
_CHECKPOINT = re.compile(r"_delta_log/(?P<version>\d{20})\.checkpoint.*\.parquet$")
# The only part of a version whose rows the query engine of delta-rs has to read (`_needs_engine`).
_WHOLE_VERSION = None
_ENGINE_FEATURES = frozenset({"columnMapping", "deletionVectors"})
"""Reader features with which files are no rows of the table by themselves."""
_THREADS = 16


class _Commits(NamedTuple):
    """The files of a table's commits, by version, and the oldest version that can be read."""

    files: dict[int, ListedFile]
    oldest_readable: int


@dataclass(frozen=True, slots=True)
class DeltaVersions:
    """The versions of the Delta table at a URL."""

    url: str

    def describe(self) -> str:
        return f"Delta table {self.url}"

    def pinned(self) -> DeltaVersions:
        """Return the table, to be read on executors."""
        return self

    # -- which versions there are

    def open(self, version: int | None = None) -> DeltaTable:
        """Open the table, as of a version. Raises what `open_delta` does."""
        return open_delta(self.url, version)

    def identity(self) -> str:
        return str(self.open().metadata().id)

    def history(self, since: TableState | None) -> TableHistory:
        listed = self._list_commits()
        first = listed.oldest_readable
        if since is not None:
            first = max(first, since.number + 1)
        identity = self.identity()
        wanted = [file for number, file in sorted(listed.files.items()) if number >= first]
        states = map_in_threads(self._read_state, wanted, _THREADS)
        return TableHistory(identity, tuple(states), listed.oldest_readable)

    def _list_commits(self) -> _Commits:
        """Return the commits of the table's log. Raises DatasetError if there are none."""
        commits = {}
        checkpoints = {0}
        for file in open_tree(self.url).list("_delta_log/"):
            commit = _COMMIT.search(file.path)
            if commit is not None:
                commits[int(commit["version"])] = file
                continue
            checkpoint = _CHECKPOINT.search(file.path)
            if checkpoint is not None:
                checkpoints.add(int(checkpoint["version"]))
        if not commits:
            raise errors.TableNotFoundError(
                f"there is no {self.describe()}: it has no commits.",
                "Create it, or correct the URL.",
                table=self.url,
            )
        newest = max(commits)
        first = newest  # of the unbroken series
        while first - 1 in commits:
            first -= 1
        # A version is made from a checkpoint and each commit after it: so from one at, or just
        # before, a commit of the unbroken series that ends with the newest.
        bases = [number for number in checkpoints if first - 1 <= number <= newest]
        return _Commits(commits, min(bases, default=newest))

    def _read_state(self, file: ListedFile) -> TableState:
        """Return the version that a commit made."""
        match = _COMMIT.search(file.path)
        assert match is not None
        number = int(match["version"])
        actions = _parse_actions(open_tree(self.url).read(file))
        written: datetime = file.modified
        for action in actions:
            info = action.get("commitInfo") or {}
            stamp = info.get("inCommitTimestamp", info.get("timestamp"))
            if isinstance(stamp, int):
                written = datetime.fromtimestamp(stamp / 1000, UTC)
        same_rows = not any(_list_changing(actions))
        return TableState(str(number), number, written, same_rows)

    def is_readable(self, state: TableState) -> bool:
        from pyarrow.fs import FileType

        table = self.open(state.number)
        paths = pa.table(table.get_add_actions()).column("path").to_pylist()
        files = _file_system(table)

        def is_there(path: str) -> bool:
            return bool(files.get_file_info(path).type == FileType.File)

        return all(map_in_threads(is_there, paths, _THREADS))

    # -- the rows of a version

    def plan(self, state: TableState, names: Sequence[str]) -> StateScan:
        table = self.open(state.number)
        columns = pa.schema(table.schema())
        missing = [name for name in names if name not in columns.names]
        if missing:  # this version may be older than the column
            known = pa.schema(self.open().schema()).names
            for name in missing:
                if name not in known:
                    raise unknown_column_error(f"the {self.describe()}", name, known)
        columns = pa.schema([columns.field(name) for name in names if name not in missing])
        if _needs_engine(table):
            return StateScan(columns, parts=[_WHOLE_VERSION], rows=None)
        added = pa.table(table.get_add_actions())
        paths = added.column("path").to_pylist()
        sizes = added.column("size_bytes").to_pylist()
        counts = added.column("num_records").to_pylist()
        is_counted = None not in counts
        rows = sum(counts) if is_counted else None
        parts = group_by_size(sorted(zip(paths, sizes, strict=True)))
        return StateScan(columns, parts, rows)

    def read(
        self, state: TableState, part: Any, names: Sequence[str]
    ) -> Iterator[pa.RecordBatch | pa.Table]:
        table = self.open(state.number)
        there = [name for name in names if name in pa.schema(table.schema()).names]
        with translate_delta_errors(self.url, state.number):
            if part is _WHOLE_VERSION:
                for batch in table.scan(columns=there):
                    yield pa.table(batch)
                return
            from pyarrow.dataset import FileSystemDataset, ParquetReadOptions

            # Spark writes timestamps as INT96 by default.
            read = ParquetReadOptions(coerce_int96_timestamp_unit="us")
            whole = table.to_pyarrow_dataset(parquet_read_options=read)
            wanted = set(part)
            fragments = [one for one in whole.get_fragments() if _path_of(one) in wanted]
            if len(fragments) != len(wanted):
                raise errors.DatasetError(
                    f"version {state.id} of the {self.describe()} has {len(fragments)} of"
                    f" {len(wanted)} files that it had before.",
                    "The table was replaced while it was read: run again.",
                    table=self.url,
                )
            chosen = FileSystemDataset(fragments, whole.schema, whole.format, whole.filesystem)
            yield from chosen.to_batches(columns=there)

    # -- changes

    def find_state(self, history: TableHistory, state_id: str) -> TableState | None:
        number = int(state_id)
        if history.states:
            newest = history.states[-1].number
        else:
            newest = number  # there was no commit since
        has_later_commits = history.complete_since <= number + 1
        if has_later_commits and number <= newest:
            return TableState(state_id, number, datetime.fromtimestamp(0, UTC))
        return None

    def files(self, state: TableState) -> list[StateFile]:
        table = self.open(state.number)
        if _needs_engine(table):
            raise _changes_error(f"the {self.describe()}", "has column mapping or deletion vectors")
        added = pa.table(table.get_add_actions())
        found = []
        for action in added.select(["path", "size_bytes", "num_records"]).to_pylist():
            found.append(StateFile(action["path"], action["size_bytes"], action["num_records"]))
        return sorted(found, key=lambda file: file.path)

    def file_rows(
        self, state: TableState, path: str, names: Sequence[str]
    ) -> Iterator[pa.RecordBatch | pa.Table]:
        return self.read(state, [path], names)

    def changed_files(self, before: TableState, after: TableState) -> ChangedFiles:
        size = 0
        for number in range(before.number + 1, after.number + 1):
            size += self._check_recorded(number, self._read_actions(number))
        return ChangedFiles(None, size)

    def _read_actions(self, number: int) -> list[Mapping[str, Any]]:
        """Return the actions of a commit."""
        files = _log_files(os.getpid(), self.url)
        path = f"{_LOG}/{number:020}.json"
        with translate_delta_errors(self.url, number), files.open_input_stream(path) as source:
            return _parse_actions(bytes(source.read()))

    def _check_recorded(self, number: int, actions: Sequence[Mapping[str, Any]]) -> int:
        """Return the size in bytes of the files that a commit has added and removed. Raises
        AdmittedFileError if it has not recorded what it changed.
        """
        what = f"version {number} of the {self.describe()}"
        for action in actions:
            if "metaData" not in action:
                continue
            configuration = action["metaData"].get(_CONFIGURATION, {})
            if str(configuration.get(_FEED)).lower() != "true":
                raise _changes_error(what, "was written without the change data feed")
        changing = list(_list_changing(actions))
        has_vectors = any(file.get("deletionVector") for file in changing)
        records_changes = any("cdc" in action for action in actions)
        if has_vectors and not records_changes:
            raise _changes_error(what, "deletes rows by deletion vectors")
        return sum(int(file.get("size") or 0) for file in changing)

    def check_feed(self) -> None:
        """Raise AdmittedFileError if the table records no changes now."""
        table = self.open()
        if _needs_engine(table):
            raise _changes_error(f"the {self.describe()}", "has column mapping or deletion vectors")
        if str(table.metadata().configuration.get(_FEED)).lower() != "true":
            raise _changes_error(f"the {self.describe()}", "has no change data feed")

    def changed_rows(
        self, before: TableState, after: TableState, names: Sequence[str]
    ) -> ChangedRows:
        with translate_delta_errors(self.url, after.number):
            feed = self.open().load_cdf(before.number + 1, after.number)
            changes = pa.table(feed)
        kinds = pc.cast(changes.column("_change_type"), pa.string())
        is_before = pc.is_in(kinds, pa.array(["delete", "update_preimage"]))
        there = [name for name in names if name in changes.column_names]
        rows = pa.table({name: _without_view(changes.column(name)) for name in there})
        return ChangedRows(
            before=iter([rows.filter(is_before)]), after=iter([rows.filter(pc.invert(is_before))])
        )


def _changes_error(what: str, reason: str) -> errors.AdmittedFileError:
    """Return the error for changes that the table does not tell."""
    return errors.AdmittedFileError(
        f"{what} {reason}, so that its changes can't be told.",
        "Set delta.enableChangeDataFeed to true before the table is changed, and let it have no"
        " deletion vectors and no column mapping; or read its versions: DeltaVersions(…).",
        rule="feed",
    )


def _without_view(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column with plain texts and bytes, which Arrow can sort and take."""
    if column.type == pa.string_view():
        return pc.cast(column, pa.string())
    if column.type == pa.binary_view():
        return pc.cast(column, pa.binary())
    return column


def _needs_engine(table: DeltaTable) -> bool:
    """Return whether only the query engine of delta-rs reads the table's rows correctly. It reads
    a version in one task.
    """
    features = {str(feature) for feature in table.protocol().reader_features or ()}
    mapped = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    return bool(features & _ENGINE_FEATURES) or mapped != "none"


def _path_of(fragment: Any) -> str:
    return str(fragment.path)


def _file_system(table: DeltaTable) -> Any:
    """Return a file system of Arrow with the table's files."""
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import PyFileSystem

    return PyFileSystem(DeltaStorageHandler.from_table(table._table))


def _parse_actions(data: bytes) -> list[Mapping[str, Any]]:
    """Return the actions in the file of a commit."""
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def _list_changing(actions: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the files that a commit adds or removes, except where it only moves rows to other
    files.
    """
    for action in actions:
        for kind in ("add", "remove"):
            if kind in action and action[kind].get("dataChange", True):
                yield action[kind]


@cached(TTLCache(maxsize=64, ttl=60))
def _log_files(process: int, url: str) -> Any:
    """Return a file system with the table's files, of this process and with recent credentials."""
    return _file_system(DeltaVersions(url).open())
