"""The changes of Iceberg and Delta tables as streams: `table-changes.customers`.

The records are rows with their operation in the column `op`: first the rows of the table at the
first look, as insertions, then what each commit changed. In the log, a *file* is one of these: a
data file of a state whose rows are all insertions, or the changes between two states.

If the history that is needed has expired, or another table has taken the table's place, that is an
error; or, if so declared, a new snapshot of the whole table follows. Before it one offset is left
out, which shows readers that they have lost changes and must be rebuilt from the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from threading import Lock
from typing import Any, Literal, NamedTuple

from cachetools import LRUCache

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.file_streams.feed import (
    FilePiece,
    FileStreamDeclaration,
    Found,
    KnownFiles,
)
from dagster_adjunct.resources.file_streams.log import AdmittedFile, FileLogState
from dagster_adjunct.resources.file_streams.streams import FileStreams, declare_file_stream
from dagster_adjunct.resources.files.tree import check_folder_url
from dagster_adjunct.resources.iceberg import IcebergTable
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.streams.declaration import build_declaration, check_same_declaration
from dagster_adjunct.resources.streams.system import (
    LogCompaction,
    StreamInfo,
    SystemStreamPartition,
    register_system,
)
from dagster_adjunct.resources.table_snapshots.delta import DeltaVersions
from dagster_adjunct.resources.table_snapshots.iceberg import IcebergSnapshots
from dagster_adjunct.resources.table_snapshots.net_changes import (
    OPERATION,
    net_changes,
    with_operation,
)
from dagster_adjunct.resources.table_snapshots.table import (
    StateFile,
    TableHistory,
    TableState,
    fit_rows,
)
from dagster_adjunct.resources.validation import validated

SYSTEM = "table-changes"
_EPOCH = datetime.fromtimestamp(0, UTC)
OnExpired = Literal["fail", "snapshot"]
_MOST_COMMITS = 200  # of one look
_GAP = "expired: the table's history was lost here"


class TableChangesDeclaration(FileStreamDeclaration):
    """The changes of a table as a stream: see `delta_changes` and `iceberg_changes`."""

    url: str | None = None
    identifier: str | None = None
    catalog: str | None = None
    on_expired: OnExpired = "fail"

    def feed(self, lake: Lake) -> TableChangesFeed:
        return TableChangesFeed(self, self.table)

    def check_stored(self, stream: str, state: FileLogState) -> None:
        stored = type(self).model_validate(state.declared)
        update = {"on_expired": self.on_expired}
        check_same_declaration(stream, stored.model_copy(update=update), self)

    @property
    def table(self) -> DeltaVersions | IcebergSnapshots:
        """The table."""
        if self.url is not None:
            return DeltaVersions(self.url)
        assert self.identifier is not None
        assert self.catalog is not None
        return IcebergSnapshots(IcebergTable(self.identifier, self.catalog))

    @property
    def rows(self) -> Schema:
        """The columns of the table that are read."""
        return Schema(tuple(field for field in self.columns.fields if field.name != OPERATION))


class ChangesCursor(StoredDocument):
    """Up to where a table was admitted: its identity (`table`), and its last admitted state, with
    the number of that state.

    `base` is the first offset of the newest snapshot of the whole table.
    """

    table: str
    state: str
    number: int
    base: int


@dataclass(frozen=True, slots=True)
class TableChangesFeed:
    """Where the changes of a table come from."""

    declared: TableChangesDeclaration
    table: DeltaVersions | IcebergSnapshots

    def __reduce__(self) -> tuple[Any, ...]:
        # Executors need not know the catalogue of a table.
        return TableChangesFeed, (self.declared, self.table.pinned())

    # -- admission

    def find(self, known: KnownFiles) -> Found:
        table = self.table
        if isinstance(table, DeltaVersions):  # which records changes only if that is configured
            table.check_feed()
        if not known.cursor:
            return self._first(table.history(None))
        cursor = ChangesCursor.model_validate_json(known.cursor)
        since = TableState(cursor.state, cursor.number, _EPOCH)
        history = table.history(since)
        if history.identity != cursor.table:
            reason = f"another table has its place, whose id is {history.identity}"
            return self._begin_again_or_fail(known, table.history(None), reason)
        state = table.find_state(history, cursor.state)
        if state is None:
            reason = f"the history after its state {cursor.state} has expired"
            return self._begin_again_or_fail(known, table.history(None), reason)
        return self._changes(cursor, history, state)

    def _first(self, history: TableHistory) -> Found:
        """Return the rows of the whole table, nothing if it has no state yet."""
        if not history.states:
            return Found([], "", {})
        head = history.states[-1]
        return Found(self._snapshot(head, history.identity), _cursor(history, head, 0), {})

    def _snapshot(self, state: TableState, identity: str) -> list[AdmittedFile]:
        """Return the entries of all data files of a state."""
        files = self.table.files(state)
        return [self._admitted(state, file, identity) for file in files]

    def _admitted(self, state: TableState, file: StateFile, identity: str) -> AdmittedFile:
        """Return the entry of a data file whose rows are all insertions. They are counted by
        reading them if the table does not know their number.
        """
        name = _name_rows(state, file)
        entry = AdmittedFile(name, file.size, identity, _micros(state), 0, origin=state.id)
        rows = file.rows
        if rows is None:
            rows = self._rows_of(entry).num_rows
        return entry._replace(rows=rows)

    def _changes(self, cursor: ChangesCursor, history: TableHistory, state: TableState) -> Found:
        """Return the changes after this state, of `_MOST_COMMITS` commits at most."""
        found: list[AdmittedFile] = []
        later = history.after(state.id, state.number)
        newest = history.states[-1:]
        is_rolled_back = not later and newest and newest[0].id != state.id
        if is_rolled_back:
            # The changes are those of the rollback, which is newer than what it takes back.
            later = (replace(newest[0], at=history.current_since or newest[0].at),)
        before = state
        for after in later[:_MOST_COMMITS]:
            if not after.same_rows:
                found += self._between(before, after, history.identity)
            before = after
        more = len(later) > _MOST_COMMITS
        return Found(found, _cursor(history, before, cursor.base), {}, more=more)

    def _between(
        self, before: TableState, after: TableState, identity: str
    ) -> Iterator[AdmittedFile]:
        """Yield the entries of what changed between two states: data files whose rows were all
        inserted, or one entry for all changes; nothing if no row has changed.
        """
        changed = self.table.changed_files(before, after)
        if changed.added is not None:
            for file in changed.added:
                yield self._admitted(after, file, identity)
            return
        name = _name_changes(before, after)
        entry = AdmittedFile(name, changed.size, identity, _micros(after), 0, origin=after.id)
        rows = self._cached(entry).num_rows
        if rows:
            yield entry._replace(rows=rows)

    def _begin_again_or_fail(self, known: KnownFiles, history: TableHistory, reason: str) -> Found:
        """Return a new snapshot of the whole table, as `begin_again` does. Raises AdmittedFileError
        if `on_expired` is "fail", or if the table has no state.
        """
        what = self.table.describe()
        if self.declared.on_expired == "fail" or not history.states:
            raise errors.AdmittedFileError(
                f"the changes of the {what} can't be told: {reason}.",
                'Declare on_expired="snapshot" to take a snapshot of the table: the datasets that'
                " follow it are then built again. To keep it from happening, let the table retain"
                " its history for longer than the time between two looks.",
                rule="expired",
            )
        return self.begin_again(known.by_path(), history, reason)

    def begin_again(
        self, known: Mapping[str, AdmittedFile], history: TableHistory, reason: str
    ) -> Found:
        """Return a new snapshot of the whole table, after one offset that has no record."""
        head = history.states[-1]
        upcoming = max((file.next for file in known.values()), default=0)
        name = f"gap {upcoming} {head.id}"
        problem = f"{_GAP}: {reason}"
        gap = AdmittedFile(name, 0, "", _micros(head), 1, origin=head.id, problem=problem)
        files = [gap, *self._snapshot(head, history.identity)]
        return Found(files, _cursor(history, head, upcoming + 1), {})

    # -- reading

    def tables(self, piece: FilePiece, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        rows = self._cached(piece.file).slice(piece.start, piece.end - piece.start)
        if rows.num_rows:
            yield piece.start, rows.select(list(columns))

    def cuts(self, file: AdmittedFile) -> Sequence[int]:
        return ()

    def _cached(self, file: AdmittedFile) -> pa.Table:
        """Return the records of a file, of which several pieces may be read one after the other."""
        key = self.declared.model_dump_json(), f"{file.etag} {file.path}"
        with _lock:
            found = _read.get(key)
        if found is None:
            found = self._rows_of(file)
            with _lock:
                _read[key] = found
        return found

    def _rows_of(self, file: AdmittedFile) -> pa.Table:
        """Return the records of a file in their order. Raises AdmittedFileError if its history is
        gone.
        """
        try:
            if _is_of_changes(file.path):
                return self._changed_rows(file)
            return self._inserted_rows(file)
        except (errors.DatasetError, errors.TableNotFoundError) as error:
            raise errors.AdmittedFileError(
                f"{error.problem} It was admitted to the stream, and its records can't be read any"
                " more.",
                "Take a new snapshot of the table: begin_changes_again(lake, STREAM, reason=…);"
                " then the datasets that follow it are built again.",
                rule="expired",
                file=file.path,
            ) from error

    def _inserted_rows(self, file: AdmittedFile) -> pa.Table:
        """Return the rows of a data file (`_admitted`) as insertions."""
        named = _parse_rows_name(file.path)
        rows = self.table.file_rows(named.state, named.path, self.declared.rows.names)
        return with_operation(self._fit(rows, file.path), "insert")

    def _changed_rows(self, file: AdmittedFile) -> pa.Table:
        """Return the net changes between the two states that the entry's name has.

        The entry's `etag` is the identity of the table that it was admitted from. Raises
        DatasetError if another table has taken its place.
        """
        table = self.table
        is_replaced = table.identity() != file.etag
        if is_replaced:
            problem = f"The {table.describe()} was replaced."
            raise errors.DatasetError(problem, table=table.describe())
        states = _parse_changes_name(file.path)
        what = f"the {table.describe()}, between {states.before.id} and {states.after.id},"
        changed = table.changed_rows(states.before, states.after, self.declared.rows.names)
        rows_before = self._fit(changed.before, what)
        rows_after = self._fit(changed.after, what)
        net = net_changes(rows_before, rows_after, self.declared.key, what)
        return net.select(self.declared.columns.names)

    def _fit(self, rows: Iterable[Any], what: str) -> pa.Table:
        """Return the rows with exactly the declared columns of the table."""
        schema = self.declared.rows
        tables = [fit_rows(one, schema, what) for one in rows]
        return pa.concat_tables([schema.to_arrow().empty_table(), *tables])


# The records of the files that this process has read last, by declaration and file. Two threads may
# read one file twice.
_read: LRUCache[tuple[str, str], pa.Table] = LRUCache(4)
_lock = Lock()


def _cursor(history: TableHistory, state: TableState, base: int) -> str:
    """Return the text of the cursor after this state was admitted."""
    cursor = ChangesCursor(table=history.identity, state=state.id, number=state.number, base=base)
    return cursor.model_dump_json()


class _FileOfState(NamedTuple):
    """A state, without its time, and the path of one of its data files."""

    state: TableState
    path: str


def _name_rows(state: TableState, file: StateFile) -> str:
    """Return the name of the log's entry for the rows of a data file."""
    return f"rows {state.id} {state.number} {file.path}"


def _parse_rows_name(name: str) -> _FileOfState:
    """Return state and path from a name that `_name_rows` has returned."""
    _, state_id, number, path = name.split(" ", 3)
    return _FileOfState(_state(state_id, number), path)


def _is_of_changes(name: str) -> bool:
    """Return whether `_name_changes` has returned this name, not `_name_rows`."""
    return name.startswith("changes ")


class _StatePair(NamedTuple):
    """The states before and after some changes, without their times."""

    before: TableState
    after: TableState


def _name_changes(before: TableState, after: TableState) -> str:
    """Return the name of the log's entry for the changes between two states."""
    return f"changes {before.id} {before.number} {after.id} {after.number}"


def _parse_changes_name(name: str) -> _StatePair:
    """Return the states from a name that `_name_changes` has returned."""
    _, before_id, before_number, after_id, after_number = name.split(" ", 4)
    return _StatePair(_state(before_id, before_number), _state(after_id, after_number))


def _state(state_id: str, number: str) -> TableState:
    """Return a state as the name of an entry in the log has it, without its time."""
    return TableState(state_id, int(number), _EPOCH)


def _micros(state: TableState) -> int:
    return int(state.at.timestamp() * 1_000_000)


class TableChangeStreams(FileStreams):
    """The changes of declared tables, as the system `table-changes`."""

    name = SYSTEM
    declaration_class = TableChangesDeclaration

    def info(self, stream: str) -> StreamInfo:
        # From the newest snapshot on, it has the newest row of each key.
        return replace(super().info(stream), compaction=LogCompaction())

    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._offsets(ssps, _base)


@validated
def begin_changes_again(lake: Lake, stream: str, *, reason: str) -> None:
    """Let a stream of a table's changes begin again with the rows that the table has now.

    Datasets that follow it are built again at their next advance, unless they declare otherwise
    (on_lost_offset). For a stream of which earlier records can't be read any more, because the
    table's history has expired. Does nothing if no row was admitted yet, or the table has no state.
    Raises ConfigurationError for another stream.
    """
    system, name = split_stream_name(stream)
    if system != SYSTEM:
        raise errors.ConfigurationError(
            f"{stream} is no stream of a table's changes.",
            f"Name one that delta_changes or iceberg_changes returned: {SYSTEM}.NAME.",
            stream=stream,
        )
    streams = TableChangeStreams(lake)
    declared = streams.declaration(name)
    assert isinstance(declared, TableChangesDeclaration)
    feed = declared.feed(lake)
    log = streams.file_log(name)

    def decide(commit: Commit | None) -> dict[str, Any] | None:
        state = log.parse(commit)
        history = declared.table.history(None)
        if state is None or not state.cursor or not history.states:
            return None  # it has not begun
        found = feed.begin_again(log.known(state), history, reason)
        return log.add(state, found.files, found.cursor).body()

    log.transact(decide, by="begin again")


def _base(state: FileLogState) -> int:
    """Return the first offset of the newest snapshot of the whole table."""
    if not state.cursor:
        return state.oldest
    return max(state.oldest, ChangesCursor.model_validate_json(state.cursor).base)


def _declare(name: str, schema: Schema | str, key: str | Sequence[str], **more: Any) -> str:
    """Declare the changes of a table, which `more` names; return the name of the stream."""
    stream = f"{SYSTEM}.{name}"
    if isinstance(schema, str):
        schema = Schema.from_ddl(schema, f"stream {stream!r}")
    names = (key,) if isinstance(key, str) else tuple(key)
    if not names or OPERATION in schema:
        raise errors.ConfigurationError(
            f"stream {stream!r} has key={key!r} and columns {', '.join(schema.names)}: expected a"
            f" key, and no column {OPERATION!r}, which has the operation.",
            "Name the columns by which the table's rows are unique; rename the column in the"
            " table.",
            argument="key",
            stream=stream,
        )
    columns = Schema((*schema.fields, Field(OPERATION, "string")))
    declaration = build_declaration(TableChangesDeclaration, stream, columns, names, 1, **more)
    return declare_file_stream(SYSTEM, name, declaration)


@validated
def delta_changes(
    name: str,
    url: str,
    *,
    schema: Schema | str,
    key: str | Sequence[str],
    on_expired: OnExpired = "fail",
) -> str:
    """Declare the changes of a Delta table as a stream; return its name, "table-changes.NAME".

    The table has delta.enableChangeDataFeed. The stream begins with the rows that the table has at
    the first look; then each commit gives the net change of each key. Records have the columns of
    `schema`, and `op`: insert, update or delete. By the columns of `key`, rows of the table are
    unique. `on_expired` says what happens if the commits after the last look are gone, or another
    table has its place: an error, or a new snapshot of the table ("snapshot"), from which datasets
    that follow it are built again. Raises ConfigurationError.
    """
    check_folder_url(url)
    return _declare(name, schema, key, url=url, on_expired=on_expired)


@validated
def iceberg_changes(
    name: str,
    table: IcebergTable,
    *,
    schema: Schema | str,
    key: str | Sequence[str],
    on_expired: OnExpired = "fail",
) -> str:
    """Declare the changes of an Iceberg table as a stream; return its name, "table-changes.NAME".

    They are the differences of snapshots of the branch main by key, read from the data files that
    these do not have in common. For the arguments see `delta_changes`. Raises ConfigurationError.
    """
    return _declare(
        name, schema, key, identifier=table.identifier, catalog=table.catalog, on_expired=on_expired
    )


register_system(SYSTEM, TableChangeStreams)
