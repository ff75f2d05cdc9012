"""`SqliteSegments`: key-value tables in an SQLite file, used in the calling thread."""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import tenacity

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.key_value import segment
from dagster_adjunct.resources.key_value.segment import (
    ConditionsFailed,
    Failing,
    KeyRange,
    ReplyLostError,
    SegmentChange,
    SegmentLimits,
    StoredEntry,
    StoredPage,
    TableId,
    TableSegment,
)
from dagster_adjunct.resources.table_backends.sqlite import (
    file_identity,
    is_missing,
    prepare_new_file,
    primary_error_code,
    sqlite_file_error,
)
from dagster_adjunct.resources.validation import SecondsOrZero, validated

_INCARNATION = re.compile(r"[0-9a-f]{16}")


def sql_table_name(table: TableId) -> str:
    """Return the SQL name of the table with the entries. Raises ConfigurationError for an
    invalid incarnation.
    """
    if not _INCARNATION.fullmatch(table.incarnation):
        problem = (
            f"key-value table {table} has the incarnation {table.incarnation!r}: expected 16"
            " hexadecimal digits."
        )
        raise errors.ConfigurationError(problem, "Open it through its manager.", table=str(table))
    return f"kvt_{table.incarnation}"


_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_UNUSABLE = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
)
# Seconds that SQLite itself waits for a lock. Its pauses grow to a tenth of a second, in which the
# last writers write again: of eight busy processes some waited six seconds, and with short pauses
# half a second.
_WAIT = 0.02
# The page cache of a connection. With SQLite's default of 2 MiB, reads of many keys spread over 10
# MiB rarely hit it.
_CACHE_KIB = 32 * 1024
_STATEMENTS = 256  # that a connection keeps compiled: nine for each table in use


class FileConnection(sqlite3.Connection):
    """A connection that knows which file it has open (device and inode): another file may have
    its path by now.
    """

    file: tuple[int, int] | None = None


class SqliteConnections:
    """Connections to a file, in autocommit and write-ahead mode; idle ones are kept for the next
    use.

    None may be open while the process forks: SQLite records locks per process, so a child would
    take its parent's locks for its own. A fork waits for connections in use, and closes all.

    If the file is removed, or replaced by a copy, open connections still have the old one, and
    their writes would be lost. So each use checks that the path still leads to the same file.
    """

    def __init__(self, path: str, busy_timeout: float) -> None:
        self.path = path
        self.busy_timeout = busy_timeout
        self._idle: list[FileConnection] = []
        self._lock = threading.Lock()
        self._live = 0  # how many are open, in use or idle
        with _forking:
            _all.add(self)

    def __del__(self) -> None:
        # connections are parts of cycles, and would stay open until the garbage collector finds
        # them
        self.close()

    def take(self) -> FileConnection:
        """Return a connection for the caller alone. `give` it back, or `drop` it. Raises
        sqlite3.Error.
        """
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._open("rw")
            if connection.file == file_identity(self.path):
                return connection
            self.drop(connection)

    def begin(self, connection: sqlite3.Connection) -> None:
        """Begin a write transaction; wait up to `busy_timeout` for that of another connection.
        Raises sqlite3.Error.
        """
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            self._execute_patiently(connection, "BEGIN IMMEDIATE")

    def give(self, connection: FileConnection) -> None:
        """Roll back an open transaction and keep the connection for the next use; if rolling
        back fails, close it.
        """
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            self.drop(connection)
        else:
            self._idle.append(connection)

    def drop(self, connection: FileConnection) -> None:
        """Close a connection from `take` instead of giving it back."""
        try:
            connection.close()
        finally:
            with self._lock:
                self._live -= 1

    def make_file(self) -> None:
        """Create the file and its folder if they are missing. Raises sqlite3.Error and OSError."""
        prepare_new_file(Path(self.path))
        self._idle.append(self._open("rwc"))

    def close(self) -> None:
        """Close the connections that are not in use."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            self.drop(connection)

    def close_for_fork(self) -> None:
        """Close all connections, waiting for those in use; return once `_lock` is free.

        A lock that a thread of the parent holds would stay locked in the child.
        """
        while True:
            self.close()
            with self._lock:
                if not self._live:
                    return
            time.sleep(0.0005)

    def _open(self, mode: str) -> FileConnection:
        """Return a new connection to the file, which must exist for the mode "rw"; the mode "rwc"
        creates a missing one.
        """
        with _forking, self._lock:
            self._live += 1
        connection = None
        try:
            connection = sqlite3.connect(
                f"{Path(self.path).as_uri()}?mode={mode}",
                uri=True,
                timeout=min(_WAIT, self.busy_timeout),
                isolation_level=None,
                check_same_thread=False,
                cached_statements=_STATEMENTS,
                factory=FileConnection,
            )
            connection.file = file_identity(self.path)
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                # SQLite itself does not wait if another connection is changing the mode, too.
                self._execute_patiently(connection, "PRAGMA journal_mode = WAL")
            # A finished write survives a power failure.
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        except BaseException:
            if connection is not None:
                connection.close()
            with self._lock:
                self._live -= 1
            raise
        return connection

    def _execute_patiently(self, connection: sqlite3.Connection, statement: str) -> None:
        """Execute a statement, again and again while another connection holds the lock, for up to
        `busy_timeout` seconds.
        """
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_busy),
            stop=tenacity.stop_after_delay(self.busy_timeout),
            wait=tenacity.wait_random(0.001, 0.005),
            reraise=True,
        )
        attempts(connection.execute, statement)


_all: WeakSet[SqliteConnections] = WeakSet()
_forking = threading.Lock()  # held during a fork: no connection is opened meanwhile


def _before_fork() -> None:
    """Close the connections of all files, and let no new one be opened until the fork is over."""
    _forking.acquire()
    for connections in list(_all):
        connections.close_for_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_forking.release, after_in_child=_forking.release
)


def is_busy(error: BaseException) -> bool:
    """Whether the error says that another connection holds SQLite's lock, so that the request
    changed nothing.
    """
    return isinstance(error, sqlite3.Error) and primary_error_code(error) in _BUSY


def translate_sqlite_error(error: sqlite3.Error, path: str, label: str) -> errors.AdjunctError:
    """Return the table's error for one of SQLite, of a request to the file at `path` that changed
    nothing; `label` names file and table.
    """
    if is_busy(error):
        step = (
            "It is retried. If that continues, find the long transaction or the stopped process"
            " that holds the lock, or raise busy_timeout."
        )
        return errors.TableUnavailableError(
            f"{label} is locked by another process ({error}).", step, table=label
        )
    of_file = sqlite_file_error(error, path, label)
    if of_file is not None:
        return of_file
    if primary_error_code(error) in _UNUSABLE:
        next_step = "Check that it is a writable SQLite file, and that its disk has space."
        return errors.TableAccessError(f"{label} can't be used ({error}).", next_step, table=label)
    return errors.TableError(
        f"{label} rejected the request: {error}.", "Check the file and its disk.", table=label
    )


# A key-value table is two tables of the file. `kvt_<incarnation>` has the entries of all
# partitions, ordered by table key; `kvt_<incarnation>_tokens` has the tokens of recent requests,
# oldest first. A write first inserts its token, so a trigger that rejects these insertions seals
# the table.


SEALED = "adjunct: the table is sealed"
_PRUNED_AT_ONCE = 1024  # tokens


class SqliteStatements:
    """The SQL statements for one key-value table.

    Reads return key, version and value. Parameters are in the order of the columns, those of
    conditions last.
    """

    def __init__(self, table: TableId) -> None:
        self.name = name = sql_table_name(table)
        one = "WHERE partition = ? AND key = ?"
        oldest = f"SELECT id FROM {name}_tokens ORDER BY id LIMIT {_PRUNED_AT_ONCE}"
        self.get = f"SELECT key, version, value FROM {name} {one}"
        self.get_version = f"SELECT key, version, NULL FROM {name} {one}"
        self.put = f"REPLACE INTO {name} VALUES (?, ?, ?, ?)"
        self.insert = f"INSERT OR IGNORE INTO {name} VALUES (?, ?, ?, ?)"
        self.replace = f"UPDATE {name} SET version = ?, value = ? {one} AND version = ?"
        self.remove = f"DELETE FROM {name} {one}"
        self.remove_version = f"DELETE FROM {name} {one} AND version = ?"
        self.remember = f"INSERT INTO {name}_tokens (token, at) VALUES (?, ?)"
        self.remembered = f"SELECT 1 FROM {name}_tokens WHERE token = ?"
        self.prune = f"DELETE FROM {name}_tokens WHERE id IN ({oldest}) AND at < ?"

    def get_many(self, values: bool, length: int) -> str:
        """Return the query for `length` keys; the partition is its last parameter.

        Keys are looked up in their order. `IN` would first sort them into a table of its own, which
        takes a sixth longer.
        """
        places = ", ".join(["(?)"] * length)
        return (
            f"WITH asked (key) AS (VALUES {places}) SELECT t.key, t.version,"
            f" {'value' if values else 'NULL'} FROM asked CROSS JOIN {self.name} AS t WHERE"
            " t.partition = ? AND t.key = asked.key"
        )

    def page(self, values: bool, ends: bool) -> str:
        """Return the query for the first entries from a key on and, if it `ends`, up to but not
        including another.
        """
        until = ""
        if ends:
            until = " AND key < ?"
        return (
            f"SELECT key, version, {'value' if values else 'NULL'} FROM {self.name} "
            f"WHERE partition = ? AND key >= ?{until} ORDER BY key LIMIT ?"
        )


def table_exists(connection: sqlite3.Connection, table: TableId) -> bool:
    """Whether the table exists."""
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(query, (sql_table_name(table),)).fetchone() is not None


HORIZON = 60.0
# Seconds: the last attempt of a request may start at its horizon, and wait.
_TOKENS_KEPT = 2 * HORIZON
_WRITES_BETWEEN_PRUNING = 256
_KEYS_AT_ONCE = 1024  # in one query
_PAGE_BYTES = 16 << 20  # of values, after which a page ends
_ROWS_ALL_MEASURED = 64  # if more rows are fetched at a time, only some values are measured
_SAMPLED = 8  # one of so many values is measured then
_LARGEST_LIMIT = 2**63 - 1  # of an integer in SQLite
_KEY = itemgetter(0)

T = TypeVar("T")
_Execute = Callable[..., sqlite3.Cursor]


class SqliteSegment:
    """Sends the requests to one partition, in the calling thread.

    A write is one transaction, which inserts its token first: a sealed table rejects that, and a
    repeated request finds it.
    """

    def __init__(
        self, connections: SqliteConnections, table: TableId, partition: int, label: str
    ) -> None:
        self._connections = connections
        self._table = table
        self._partition = partition
        self._label = label
        self._sql = SqliteStatements(table)
        self._writes = 0

    async def apply(
        self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool = False
    ) -> None:
        """Apply the changes in one transaction. Raises ConditionsFailed if a condition is not
        met.
        """
        if repeated:
            write = self._repeat
        else:
            write = self._write

        def transaction(connection: FileConnection) -> Failing | None:
            """Write and commit; return what `write` returns."""
            self._connections.begin(connection)
            failing = write(connection.execute, changes, token)
            if failing is None:  # else conditions fail or, with {}, nothing was left to do
                self._commit(connection.execute)
            return failing

        if failing := self._lend(transaction):
            raise ConditionsFailed(failing)

    async def get(self, keys: Sequence[bytes], *, values: bool = True) -> list[StoredEntry | None]:
        """Return the entries of the keys, all of one moment; None for missing keys."""
        if len(keys) == 1:
            query = self._sql.get if values else self._sql.get_version
            asked = (self._partition, keys[0])
            row = self._lend(lambda connection: connection.execute(query, asked).fetchone())
            return [None if row is None else StoredEntry._make(row)]
        by_key = self._lend(lambda connection: self._find(connection.execute, keys, values))
        return list(map(by_key.get, keys))

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        query = self._sql.page(values, within.end is not None)
        ends = (within.start,) if within.end is None else (within.start, within.end)
        asked = (self._partition, *ends, min(limit, _LARGEST_LIMIT))
        return self._lend(lambda connection: _page(connection.execute(query, asked), limit, values))

    async def close(self) -> None:
        """Close unused connections to the file, for all tables of the same backend."""
        self._connections.close()

    def _write(
        self, execute: _Execute, changes: Sequence[SegmentChange], token: bytes
    ) -> Failing | None:
        """Write the token and all changes in the open transaction and return None, or return the
        failing conditions. Now and then deletes old tokens first.
        """
        now = int(time.time())
        execute(self._sql.remember, (token, now))
        if self._writes % _WRITES_BETWEEN_PRUNING == 0:
            execute(self._sql.prune, (now - _TOKENS_KEPT,))
        self._writes += 1
        for place, change in enumerate(changes):
            if not self._change(execute, change):
                # Keys differ, so what was written so far does not affect the conditions of later
                # changes.
                return self._failing(execute, changes, place)
        return None

    def _repeat(
        self, execute: _Execute, changes: Sequence[SegmentChange], token: bytes
    ) -> Failing | None:
        """Write all changes in the open transaction, unless an earlier attempt was committed.

        Returns None if they are written and have to be committed, {} if the earlier attempt was
        committed, else the failing conditions.
        """
        if execute(self._sql.remembered, (token,)).fetchone() is not None:
            return {}
        failing = self._failing(execute, changes, 0)
        if not failing:
            return self._write(execute, changes, token)
        # If the lost commit is at the end of the log, a recovery by SQLite could still apply it:
        # overwrite it there by another commit.
        execute(self._sql.remember, (b"", int(time.time())))
        self._commit(execute)
        return failing

    def _change(self, execute: _Execute, change: SegmentChange) -> bool:
        """Make one change; return whether its condition holds."""
        sql = self._sql
        expected = change.expected
        where = (self._partition, change.key)
        if change.is_guard:
            return not self._failing(execute, [change], 0)
        if change.value is None:
            if expected is segment.ANYTHING:
                execute(sql.remove, where)
                return True
            if expected is segment.ABSENT:
                return execute(sql.get_version, where).fetchone() is None
            return execute(sql.remove_version, (*where, expected)).rowcount == 1
        if expected is segment.ANYTHING:
            execute(sql.put, (*where, change.version, change.value))
            return True
        if expected is segment.ABSENT:
            return execute(sql.insert, (*where, change.version, change.value)).rowcount == 1
        return execute(sql.replace, (change.version, change.value, *where, expected)).rowcount == 1

    def _failing(self, execute: _Execute, changes: Sequence[SegmentChange], start: int) -> Failing:
        """Return the indexes, from `start` on, of changes whose conditions do not hold, with the
        versions found.
        """
        current: dict[bytes, bytes] = {}
        for change in changes[start:]:
            if change.expected is not segment.ANYTHING:
                row = execute(self._sql.get_version, (self._partition, change.key)).fetchone()
                if row is not None:
                    _, version, _ = row
                    current[change.key] = version
        return segment.failed_conditions(changes, current, start)

    def _commit(self, execute: _Execute) -> None:
        """Commit the open transaction; ReplyLostError if it is unknown whether it was committed."""
        try:
            execute("COMMIT")
        except sqlite3.Error as error:
            # Certainly not committed: another connection has the lock, or the disk is full, so the
            # commit is incomplete in the log.
            if is_busy(error) or primary_error_code(error) == sqlite3.SQLITE_FULL:
                raise
            problem = (
                f"{self._label}: the commit of a write failed ({error}), and whether it was stored"
                " is unknown."
            )
            step = "It is repeated unless it was stored. If the error persists, check the disk."
            raise ReplyLostError(problem, step) from error

    def _find(
        self, execute: _Execute, keys: Sequence[bytes], values: bool
    ) -> dict[bytes, StoredEntry]:
        """Return the entries of many keys, all of one moment."""
        by_key: dict[bytes, StoredEntry] = {}
        needs_several_queries = len(keys) > _KEYS_AT_ONCE
        if needs_several_queries:
            execute("BEGIN")  # so that all queries see the same moment
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            # Adjacent keys are in the same page of the file.
            part = sorted(keys[start : start + _KEYS_AT_ONCE])
            # Use few lengths (powers of two), so that the compiled statements are reused.
            length = min(1 << (len(part) - 1).bit_length(), _KEYS_AT_ONCE)
            again = repeat(part[-1], length - len(part))
            rows = execute(self._sql.get_many(values, length), (*part, *again, self._partition))
            entries = list(map(tuple.__new__, repeat(StoredEntry), rows))
            by_key.update(zip(map(_KEY, entries), entries, strict=True))
        if needs_several_queries:
            execute("COMMIT")
        return by_key

    def _lend(self, ask: Callable[[FileConnection], T]) -> T:
        """Return what `ask` returns for a connection, which is given back at the end.

        Then whatever is not committed is rolled back. Raises the table's errors instead of
        SQLite's.
        """
        path = self._connections.path
        try:
            connection = self._connections.take()
        except sqlite3.Error as error:
            if is_missing(path):
                raise segment.missing_table_error(self._table, self._label) from error
            raise translate_sqlite_error(error, path, self._label) from error
        try:
            return ask(connection)
        except sqlite3.Error as error:
            # SQLite has no code of its own for a missing table.
            if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:
                with suppress(sqlite3.Error):
                    if not table_exists(connection, self._table):
                        raise segment.deleted_table_error(self._table, self._label) from error
            if error.sqlite_errorcode == sqlite3.SQLITE_CONSTRAINT_TRIGGER and SEALED in str(error):
                raise segment.sealed_table_error(self._table, self._label) from error
            raise translate_sqlite_error(error, path, self._label) from error
        finally:
            self._connections.give(connection)


def _page(rows: Iterator[Any], limit: int, values: bool) -> StoredPage:
    """Return a page of at most `limit` rows (key, version, value); it ends early once its values
    have _PAGE_BYTES.
    """
    flat: list[Any] = []
    size = 0.0
    if values:
        count = 1
    else:
        count = _ROWS_ALL_MEASURED
    # Items of rows are kept in one list: Python's garbage collector would scan each row.
    while size < _PAGE_BYTES and (part := list(chain.from_iterable(islice(rows, count)))):
        flat += part
        if values:
            # Only some of many values are measured: measuring a value takes as long as making its
            # entry.
            step = 1 if count < _ROWS_ALL_MEASURED else _SAMPLED
            measured = part[2 :: 3 * step]  # the values of each `step`th row
            size += sum(map(len, measured)) * (len(part) / 3 / len(measured))
            count *= 2
            # fetch no more than will fill the page if rows are as large as so far: a value may have
            # 512 MiB
            if size:
                count = min(count, 1 + int((_PAGE_BYTES - size) / size * (len(flat) / 3)))
    keys = flat[::3]
    return StoredPage(
        keys, flat[1::3], flat[2::3], is_last=size < _PAGE_BYTES and len(keys) < limit
    )


@validated
class SqliteSegments:
    """Key-value tables in the file at `path`, which the first table creates. All partitions of a
    table are in it.

    Requests run in the calling thread and need no event loop. The file is in write-ahead mode,
    which needs a local disk, and a write is on the disk when it returns. There is one writer at a
    time: a request waits for others up to `busy_timeout` seconds, with its thread, and then raises
    TableUnavailableError. Later tables reuse the space of a deleted one. Values are limited to 512
    MiB.
    """

    limits = SegmentLimits(value=2**29)
    waits = False
    horizon = HORIZON

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout: SecondsOrZero = 10.0) -> None:
        label = "key-value tables in SQLite have"
        if str(path) in ("", ":memory:"):
            expected = (
                "the path of a file (each connection to memory would have a database of its own)"
            )
            raise argument_error(f"{label} the path {str(path)!r}", expected, argument="path")
        self.path = str(Path(path).absolute())  # another process has another working directory
        self.busy_timeout = busy_timeout
        self._connections = SqliteConnections(self.path, busy_timeout)

    def __repr__(self) -> str:
        return f"SqliteSegments({self.path!r})"

    def to_dict(self) -> dict[str, Any]:
        return {"path": self.path, "busy_timeout": self.busy_timeout}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SqliteSegments, **self.to_dict()), ()

    def create(self, table: TableId, partitions: int) -> None:
        """Create the file and the tables of entries and of recent requests, unless they exist."""
        label = self._label(table)
        name = sql_table_name(table)
        try:
            self._connections.make_file()
        except sqlite3.Error as error:
            raise translate_sqlite_error(error, self.path, label) from error
        except OSError as error:
            raise errors.TableAccessError(
                f"{label} can't be created: {error.strerror} ({error.filename}).",
                "Use a writable path.",
                table=label,
            ) from error
        entries = (
            "partition INTEGER NOT NULL, key BLOB NOT NULL, version BLOB NOT NULL, value BLOB NOT"
            " NULL"
        )
        self._change(
            table,
            f"CREATE TABLE IF NOT EXISTS {name} ({entries}, PRIMARY KEY (partition, key)) WITHOUT"
            " ROWID",
            f"CREATE TABLE IF NOT EXISTS {name}_tokens "
            "(id INTEGER PRIMARY KEY, token BLOB NOT NULL, at INTEGER NOT NULL)",
        )

    def seal(self, table: TableId, partitions: int) -> None:
        """Let each write fail from now on, by a trigger of the table of requests."""
        name = sql_table_name(table)
        trigger = (
            f"CREATE TRIGGER IF NOT EXISTS {name}_sealed BEFORE INSERT ON {name}_tokens "
            f"BEGIN SELECT RAISE(ABORT, '{SEALED}'); END"
        )
        self._change(table, trigger, must_exist=True)

    def delete(self, table: TableId, partitions: int) -> None:
        name = sql_table_name(table)
        if not is_missing(self.path):
            self._change(
                table, f"DROP TABLE IF EXISTS {name}", f"DROP TABLE IF EXISTS {name}_tokens"
            )

    def check_may_seal(self, table: TableId, partitions: int) -> None:
        """Check that the file can be written: SQLite knows no other rights.

        It creates a table and rolls back, because a read-only file rejects nothing before that.
        """
        self._change(table, f"CREATE TABLE {sql_table_name(table)}_dry_run (one)", commit=False)

    def check_may_delete(self, table: TableId, partitions: int) -> None:
        if not is_missing(self.path):
            self.check_may_seal(table, partitions)

    def open(self, table: TableId, partition: int) -> TableSegment:
        return SqliteSegment(self._connections, table, partition, self._label(table))

    def location(self, table: TableId, partition: int) -> str:
        return f"{self.path}, table {sql_table_name(table)}, partition {partition}"

    def _change(
        self, table: TableId, *statements: str, must_exist: bool = False, commit: bool = True
    ) -> None:
        """Execute statements that change the schema in one write transaction.

        With `must_exist` a missing table is a KeyValueTableNotFoundError. Without `commit` the
        transaction is rolled back: it only finds out whether the file can be written.
        """
        try:
            connection = self._connections.take()
            try:
                self._connections.begin(connection)
                if must_exist and not table_exists(connection, table):
                    raise segment.deleted_table_error(table, self._label(table))
                for statement in statements:
                    connection.execute(statement)
                connection.execute("COMMIT" if commit else "ROLLBACK")
            finally:
                self._connections.give(connection)
        except sqlite3.Error as error:
            raise translate_sqlite_error(error, self.path, self._label(table)) from error

    def _label(self, table: TableId) -> str:
        """Return what errors call the table."""
        return f"key-value table {table} in {self.path}"
