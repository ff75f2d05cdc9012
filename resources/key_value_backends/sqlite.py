"""`SqliteSegment`: one partition of a key-value table in an SQLite file, in the thread of whoever asks."""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, repeat
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

import tenacity

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    TableAccessError,
    TableError,
    TableUnavailableError,
)
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ANYTHING,
    ConditionsFailed,
    KeyRange,
    ReplyLostError,
    SegmentChange,
    SegmentLimits,
    StoredEntry,
    StoredPage,
    TableId,
    TableSegment,
    deleted_table_error,
    missing_table_error,
    sealed_table_error,
)

_INCARNATION = re.compile(r"[0-9a-f]{16}")


def sql_table_name(table: TableId) -> str:
    """Return the name of the table with the entries. Raises ConfigurationError for an incarnation that is none."""
    if not _INCARNATION.fullmatch(table.incarnation):
        raise ConfigurationError(
            f"key-value table {table} has the incarnation {table.incarnation!r}: expected 16 hexadecimal digits.",
            "Open it through its manager.",
            table=str(table),
        )
    return f"kvt_{table.incarnation}"


_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_UNUSABLE = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_FULL,
)
# Seconds that SQLite waits by itself for a lock. Its pauses grow to a tenth of a second, in which those who have just
# written write again: of eight busy processes some waited six seconds, and with short pauses half a second.
_WAIT = 0.02
# What a connection keeps of the file. Of SQLite's own 2 MiB, reads of many keys all over a file of 10 MiB find little.
_CACHE_KIB = 32 * 1024
_STATEMENTS = 256  # that a connection keeps compiled: nine for each table that is in use


class FileConnection(sqlite3.Connection):
    """A connection that knows the file that it has open, as another may come under its name: device and number."""

    file: tuple[int, int] | None = None


class SqliteConnections:
    """Connections to a file, in autocommit and write-ahead mode: as many as are used at once, kept for the next use.

    None may live while the process forks: SQLite notes locks for a process, so that a child would take its parent's for
    its own. So a fork waits for those that are lent, and closes all.

    A file that is removed, or replaced by a copy, lives on for those who have it open: what they wrote would be lost.
    """

    def __init__(self, path: str, busy_timeout: float) -> None:
        self.path = path
        self.busy_timeout = busy_timeout
        self._idle: list[FileConnection] = []
        self._lock = threading.Lock()
        self._live = 0
        with _forking:
            _all.add(self)

    def __del__(self) -> None:
        self.close()  # each is part of a cycle, and would be open until these are looked for

    def take(self) -> FileConnection:
        """Return a connection that nobody else uses. `give` it back, or `drop` it. Raises sqlite3.Error."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._opened("rw")
            if connection.file == self._file():
                return connection
            self.drop(connection)

    def begin(self, connection: sqlite3.Connection) -> None:
        """Begin a transaction that writes, once nobody else does. Raises sqlite3.Error."""
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            self._patiently(connection, "BEGIN IMMEDIATE")

    def give(self, connection: FileConnection) -> None:
        """Keep a connection, outside of any transaction, for the next use."""
        self._idle.append(connection)

    def give_after_error(self, connection: FileConnection) -> None:
        """Undo what a connection has begun and keep it, or close it where that does not work."""
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            self.drop(connection)
        else:
            self._idle.append(connection)

    def drop(self, connection: FileConnection) -> None:
        """Close a connection that was taken."""
        try:
            connection.close()
        finally:
            with self._lock:
                self._live -= 1

    def make_file(self) -> None:
        """Make the file and its folder where they are missing. Raises sqlite3.Error and OSError."""
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        self._idle.append(self._opened("rwc"))

    def close(self) -> None:
        """Close the connections that are not in use."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took it
                return
            self.drop(connection)

    def close_for_fork(self) -> None:
        """Return when no connection lives, and no other thread holds the lock, which would stay held in the child."""
        while True:
            self.close()
            with self._lock:
                if not self._live:
                    return
            time.sleep(0.0005)

    def _file(self) -> tuple[int, int] | None:
        """Return which file has the path now; None where there is none."""
        try:
            status = os.stat(self.path)  # noqa: PTH116 - it is asked for each request, and a Path takes thrice as long
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _opened(self, mode: str) -> FileConnection:
        with _forking, self._lock:
            self._live += 1
        try:
            return self._connect(mode)
        except BaseException:
            with self._lock:
                self._live -= 1
            raise

    def _connect(self, mode: str) -> FileConnection:
        connection = sqlite3.connect(
            f"{Path(self.path).as_uri()}?mode={mode}",
            uri=True,
            timeout=min(_WAIT, self.busy_timeout),
            isolation_level=None,
            check_same_thread=False,
            cached_statements=_STATEMENTS,
            factory=FileConnection,
        )
        try:
            connection.file = self._file()
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                # SQLite does not wait here when another connection does the same.
                self._patiently(connection, "PRAGMA journal_mode = WAL")
            # Whoever was told that a write is done can rely on it, also after a power failure.
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _patiently(self, connection: sqlite3.Connection, statement: str) -> None:
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_busy),
            stop=tenacity.stop_after_delay(self.busy_timeout),
            wait=tenacity.wait_random(0.001, 0.005),
            reraise=True,
        )
        attempts(connection.execute, statement)


_all: WeakSet[SqliteConnections] = WeakSet()
_forking = threading.Lock()  # held by a fork: no connection is opened meanwhile


def _before_fork() -> None:
    _forking.acquire()
    for connections in list(_all):
        connections.close_for_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_forking.release, after_in_child=_forking.release)


def is_busy(error: BaseException) -> bool:
    """Tell whether an error of SQLite's says that others hold a lock: what was asked for did not happen."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _BUSY


def translate_sqlite_error(error: sqlite3.Error, label: str) -> AdjunctError:
    """Return what an error of SQLite's means where nothing was changed; `label` says what was used."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _BUSY:
        return TableUnavailableError(
            f"{label} is locked by another process ({error}).",
            "It is tried again; if that goes on, find the long transaction, or raise busy_timeout.",
            table=label,
        )
    if code in _UNUSABLE:
        return TableAccessError(
            f"{label} can't be used ({error}).",
            "Check that it is an SQLite file and may be written, and that its disk has room.",
            table=label,
        )
    return TableError(f"{label} refused the request: {error}.", "Look at the file and its disk.", table=label)


# The two tables in an SQLite file that are a key-value table, and the statements over them.
#
# `kvt_<incarnation>` has the entries of all partitions, in the order of their table keys; `kvt_<incarnation>_tokens`
# the recent requests, oldest first. A write notes its request before anything else, so a trigger that refuses these
# notes is the seal.


SEALED = "adjunct: the table is sealed"
_PRUNED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class SqliteStatements:
    """What is sent about one table. Reads give key, version and value; parameters are in the order of the columns."""

    name: str
    get: str
    get_version: str
    put: str
    insert: str
    replace: str
    remove: str
    remove_version: str
    remember: str
    remembered: str
    forget: str

    @staticmethod
    @lru_cache(maxsize=256)
    def of(table: TableId) -> SqliteStatements:
        """Return the statements over the table of this incarnation."""
        name = sql_table_name(table)
        one = "WHERE partition = ? AND key = ?"
        oldest = f"SELECT id FROM {name}_tokens ORDER BY id LIMIT {_PRUNED_AT_ONCE}"
        return SqliteStatements(
            name,
            get=f"SELECT key, version, value FROM {name} {one}",
            get_version=f"SELECT key, version, NULL FROM {name} {one}",
            put=f"REPLACE INTO {name} VALUES (?, ?, ?, ?)",
            insert=f"INSERT OR IGNORE INTO {name} VALUES (?, ?, ?, ?)",
            replace=f"UPDATE {name} SET version = ?, value = ? {one} AND version = ?",
            remove=f"DELETE FROM {name} {one}",
            remove_version=f"DELETE FROM {name} {one} AND version = ?",
            remember=f"INSERT INTO {name}_tokens (token, at) VALUES (?, ?)",
            remembered=f"SELECT 1 FROM {name}_tokens WHERE token = ?",
            forget=f"DELETE FROM {name}_tokens WHERE id IN ({oldest}) AND at < ?",
        )

    def get_many(self, values: bool, length: int) -> str:
        """Return the query for as many keys; the partition is its last parameter.

        Each key is looked up as it comes. `IN` sorts them into a table of its own first, which takes a sixth longer.
        """
        places = ", ".join(["(?)"] * length)
        return (
            f"WITH asked (key) AS (VALUES {places}) SELECT t.key, t.version, {_value(values)} "
            f"FROM asked CROSS JOIN {self.name} AS t WHERE t.partition = ? AND t.key = asked.key"
        )

    def page(self, values: bool, ends: bool) -> str:
        """Return the query for the first entries from a key on and, where it `ends`, before another."""
        until = " AND key < ?" if ends else ""
        return (
            f"SELECT key, version, {_value(values)} FROM {self.name} "
            f"WHERE partition = ? AND key >= ?{until} ORDER BY key LIMIT ?"
        )


def _value(values: bool) -> str:
    return "value" if values else "NULL"


def create(connection: sqlite3.Connection, table: TableId) -> None:
    """Make both tables where they are missing, in the transaction that is open."""
    name = sql_table_name(table)
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {name} (partition INTEGER NOT NULL, key BLOB NOT NULL, version BLOB NOT NULL, "
        "value BLOB NOT NULL, PRIMARY KEY (partition, key)) WITHOUT ROWID"
    )
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {name}_tokens (id INTEGER PRIMARY KEY, token BLOB NOT NULL, at INTEGER NOT NULL)"
    )


def seal(connection: sqlite3.Connection, table: TableId) -> None:
    """Refuse all writes from the commit of the open transaction on; the table is there."""
    name = sql_table_name(table)
    connection.execute(
        f"CREATE TRIGGER IF NOT EXISTS {name}_sealed BEFORE INSERT ON {name}_tokens "
        f"BEGIN SELECT RAISE(ABORT, '{SEALED}'); END"
    )


def drop(connection: sqlite3.Connection, table: TableId) -> None:
    """Remove both tables, in the transaction that is open."""
    name = sql_table_name(table)
    connection.execute(f"DROP TABLE IF EXISTS {name}")
    connection.execute(f"DROP TABLE IF EXISTS {name}_tokens")


def write_something(connection: sqlite3.Connection, table: TableId) -> None:
    """Make a table that is to be rolled back. A file that may only be read refuses this, and no earlier statement."""
    connection.execute(f"CREATE TABLE {sql_table_name(table)}_rehearsed (one)")


def is_there(connection: sqlite3.Connection, table: TableId) -> bool:
    """Tell whether the table exists."""
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(query, (sql_table_name(table),)).fetchone() is not None


HORIZON = 60.0
_TOKENS_KEPT = 2 * HORIZON  # seconds: the last attempt of a request may begin at its horizon, and wait
_WRITES_BETWEEN_PRUNING = 256
_KEYS_AT_ONCE = 1024
_PAGE_BYTES = 16 << 20  # of values, after which a page ends
_ROWS_ALL_LOOKED_AT = 64  # rows at a time, from which on only some are
_SAMPLED = 8  # values for one whose size is then added up
_LARGEST_LIMIT = 2**63 - 1  # of an integer in SQLite
_KEY = itemgetter(0)

T = TypeVar("T")
_Execute = Callable[..., sqlite3.Cursor]


class SqliteSegment:
    """Requests to one partition. A write is one transaction, which notes the token of its request first.

    That note is what a seal refuses, and what a repeated request is known by.
    """

    waits = False

    def __init__(
        self, connections: SqliteConnections, table: TableId, partition: int, limits: SegmentLimits, label: str
    ) -> None:
        self.limits = limits
        self._connections, self._table, self._partition = connections, table, partition
        self._label = label
        self._sql = SqliteStatements.of(table)
        self._writes = 0

    async def apply(self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool = False) -> None:
        write = self._again if repeated else self._write

        def transaction(connection: FileConnection) -> dict[int, bytes | None] | None:
            execute = connection.execute
            self._connections.begin(connection)
            failing = write(execute, changes, token)
            if failing is None:
                self._commit(execute)
            else:
                execute("ROLLBACK")
            return failing

        if failing := self._lent(transaction):
            raise ConditionsFailed(failing)

    async def get(self, keys: Sequence[bytes], *, values: bool = True) -> list[StoredEntry | None]:
        if len(keys) == 1:
            query, asked = self._sql.get if values else self._sql.get_version, (self._partition, keys[0])
            row = self._lent(lambda connection: connection.execute(query, asked).fetchone())
            return [None if row is None else StoredEntry._make(row)]
        by_key = self._lent(lambda connection: self._found(connection.execute, keys, values))
        return list(map(by_key.get, keys))

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        query = self._sql.page(values, within.end is not None)
        ends = (within.start,) if within.end is None else (within.start, within.end)
        asked = (self._partition, *ends, min(limit, _LARGEST_LIMIT))
        return self._lent(lambda connection: _page(connection.execute(query, asked), limit, values))

    async def close(self) -> None:
        """Close the file as far as nobody uses it, for all tables of the same backend."""
        self._connections.close()

    def _write(
        self, execute: _Execute, changes: Sequence[SegmentChange], token: bytes
    ) -> dict[int, bytes | None] | None:
        """Write all changes; return None, or the places whose conditions don't hold with the versions found there."""
        now = int(time.time())
        execute(self._sql.remember, (token, now))
        if self._writes % _WRITES_BETWEEN_PRUNING == 0:
            execute(self._sql.forget, (now - _TOKENS_KEPT,))
        self._writes += 1
        for place, change in enumerate(changes):
            if not self._written(execute, change):
                # No key comes twice, so that what was written before this place says nothing of those behind it.
                return self._failing(execute, changes, place)
        return None

    def _again(
        self, execute: _Execute, changes: Sequence[SegmentChange], token: bytes
    ) -> dict[int, bytes | None] | None:
        """The same for a request whose commit may have happened: an empty result says that it has."""
        if execute(self._sql.remembered, (token,)).fetchone() is not None:
            return {}
        failing = self._failing(execute, changes, 0)
        if not failing:
            return self._write(execute, changes, token)
        # What the lost commit left at the end of the log could still be found there by a recovery: write over it.
        execute(self._sql.remember, (b"", int(time.time())))
        self._commit(execute)
        execute("BEGIN")
        return failing

    def _written(self, execute: _Execute, change: SegmentChange) -> bool:
        """Do one change; tell whether its condition holds."""
        sql, partition, key, expected = self._sql, self._partition, change.key, change.expected
        if change.is_guard:
            return not self._failing(execute, [change], 0)
        if change.value is None:
            if expected is ANYTHING:
                execute(sql.remove, (partition, key))
                return True
            if expected is ABSENT:
                return execute(sql.get_version, (partition, key)).fetchone() is None
            return execute(sql.remove_version, (partition, key, expected)).rowcount == 1
        if expected is ANYTHING:
            execute(sql.put, (partition, key, change.version, change.value))
            return True
        if expected is ABSENT:
            return execute(sql.insert, (partition, key, change.version, change.value)).rowcount == 1
        return execute(sql.replace, (change.version, change.value, partition, key, expected)).rowcount == 1

    def _failing(self, execute: _Execute, changes: Sequence[SegmentChange], start: int) -> dict[int, bytes | None]:
        """Return the places, from `start` on, whose conditions don't hold, with the versions found there."""
        failing: dict[int, bytes | None] = {}
        for place, change in enumerate(changes[start:], start):
            if change.expected is not ANYTHING:
                row = execute(self._sql.get_version, (self._partition, change.key)).fetchone()
                version = None if row is None else row[1]
                if version != (None if change.expected is ABSENT else change.expected):
                    failing[place] = version
        return failing

    def _commit(self, execute: _Execute) -> None:
        try:
            execute("COMMIT")
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            # Others have the lock, or the disk had no room for all of it: then its end is missing in the log.
            if is_busy(error) or code == sqlite3.SQLITE_FULL:
                raise
            raise ReplyLostError(
                f"{self._label}: the commit of a write failed ({error}); it may be in the log or not.",
                "It is looked for; if that goes on, look at the disk.",
            ) from error

    def _found(self, execute: _Execute, keys: Sequence[bytes], values: bool) -> dict[bytes, StoredEntry]:
        """Return the entries of many keys by their keys, as they stand at one moment."""
        by_key: dict[bytes, StoredEntry] = {}
        several = len(keys) > _KEYS_AT_ONCE
        if several:
            execute("BEGIN")
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            part = sorted(keys[start : start + _KEYS_AT_ONCE])  # neighbours lie in the same page of the file
            # A few lengths only, so that the statements stay compiled.
            length = min(1 << (len(part) - 1).bit_length(), _KEYS_AT_ONCE)
            again = repeat(part[-1], length - len(part))
            entries = _entries(execute(self._sql.get_many(values, length), (*part, *again, self._partition)))
            by_key.update(zip(map(_KEY, entries), entries, strict=True))
        if several:
            execute("COMMIT")
        return by_key

    def _lent(self, ask: Callable[[FileConnection], T]) -> T:
        """Return what `ask` gets from a connection, which goes back; after an error, with nothing open in it."""
        try:
            connection = self._connections.take()
        except sqlite3.Error as error:
            if not Path(self._connections.path).exists():
                raise missing_table_error(self._table, self._label) from error
            raise translate_sqlite_error(error, self._label) from error
        try:
            answer = ask(connection)
        except sqlite3.Error as error:
            self._failed(connection, error)
        except BaseException:
            self._connections.give_after_error(connection)
            raise
        self._connections.give(connection)
        return answer

    def _failed(self, connection: FileConnection, error: sqlite3.Error) -> NoReturn:
        """Give the connection back and raise what an error means; nothing that was asked for has happened."""
        try:
            gone = error.sqlite_errorcode == sqlite3.SQLITE_ERROR and not is_there(connection, self._table)
        except sqlite3.Error:
            gone = False  # what is known is the first error
        self._connections.give_after_error(connection)
        if gone:
            raise deleted_table_error(self._table, self._label) from error
        if error.sqlite_errorcode == sqlite3.SQLITE_CONSTRAINT_TRIGGER and SEALED in str(error):
            raise sealed_table_error(self._table, self._label) from error
        raise translate_sqlite_error(error, self._label) from error


def _page(rows: Iterator[Any], limit: int, values: bool) -> StoredPage:
    """Return the page of these rows, at most `limit`, which ends early once its values have many bytes."""
    flat: list[Any] = []
    size, look = 0.0, 1 if values else _ROWS_ALL_LOOKED_AT
    # No row is kept: Python's collector would look at each of them.
    while size < _PAGE_BYTES and (part := list(chain.from_iterable(islice(rows, look)))):
        flat += part
        if values:
            # To look at each of many values would take as long as to make its entry.
            some = part[2 :: 3 * (1 if look < _ROWS_ALL_LOOKED_AT else _SAMPLED)]
            size += sum(map(len, some)) * (len(part) / 3 / len(some))
            look *= 2
            if size:  # rows like those so far fill the page, and a value has up to 512 MiB
                look = min(look, 1 + int((_PAGE_BYTES - size) / size * (len(flat) / 3)))
    keys = flat[::3]
    return StoredPage(keys, flat[1::3], flat[2::3], is_last=size < _PAGE_BYTES and len(keys) < limit)


def _entries(rows: Iterable[Any]) -> list[StoredEntry]:
    return list(map(tuple.__new__, repeat(StoredEntry), rows))


_LIMITS = SegmentLimits(value=2**29)


class SqliteSegments:
    """Tables in the file at `path`, which the first table makes. All partitions of a table lie in it.

    Requests run in the thread of whoever asks, and need no event loop. The file is in write-ahead mode, which needs a
    local disk, and every write is on it before it returns. There is one writer at a time: a request waits up to
    `busy_timeout` seconds for others, with its thread; then TableUnavailableError. A table that is deleted leaves its
    room to later ones. Values have 512 MiB at most.
    """

    limits = _LIMITS
    waits = False
    horizon = HORIZON

    def __init__(self, path: str | Path, *, busy_timeout: float = 10.0) -> None:
        if str(path) in ("", ":memory:"):
            raise ConfigurationError(
                f"key-value tables in SQLite have the path {str(path)!r}: each connection would have its own.",
                "Give the path of a file.",
                argument="path",
            )
        if not (isfinite(busy_timeout) and busy_timeout >= 0):
            raise ConfigurationError(
                f"key-value tables in SQLite have busy_timeout={busy_timeout!r}: expected seconds, from 0 on.",
                "Say how long a request may wait for others.",
                argument="busy_timeout",
            )
        # Another process has another working folder.
        self.path = str(Path(path).absolute())
        self.busy_timeout = busy_timeout
        self._connections = SqliteConnections(self.path, busy_timeout)

    def __repr__(self) -> str:
        return f"SqliteSegments({self.path!r})"

    def to_dict(self) -> dict[str, Any]:
        return {"path": self.path, "busy_timeout": self.busy_timeout}

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.to_dict(),)

    def create(self, table: TableId, partitions: int) -> None:
        label = self._label(table)
        try:
            self._connections.make_file()
        except sqlite3.Error as error:
            raise translate_sqlite_error(error, label) from error
        except OSError as error:
            raise TableAccessError(
                f"{label} can't be made: {error.strerror} ({error.filename}).",
                "Give a path where files may be written.",
                table=label,
            ) from error
        self._change(table, lambda connection: create(connection, table))

    def seal(self, table: TableId, partitions: int) -> None:
        def change(connection: sqlite3.Connection) -> None:
            if not is_there(connection, table):
                raise deleted_table_error(table, self._label(table))
            seal(connection, table)

        self._change(table, change)

    def delete(self, table: TableId, partitions: int) -> None:
        if Path(self.path).exists():
            self._change(table, lambda connection: drop(connection, table))

    def check_may_seal(self, table: TableId, partitions: int) -> None:
        """Whoever may write the file may do all."""
        self._change(table, lambda connection: write_something(connection, table), rehearsed=True)

    def check_may_delete(self, table: TableId, partitions: int) -> None:
        if Path(self.path).exists():
            self.check_may_seal(table, partitions)

    def open(self, table: TableId, partition: int) -> TableSegment:
        return SqliteSegment(self._connections, table, partition, self.limits, self._label(table))

    def location(self, table: TableId, partition: int) -> str:
        return f"{self.path}, table {sql_table_name(table)}, partition {partition}"

    def _change(self, table: TableId, change: Callable[[sqlite3.Connection], None], *, rehearsed: bool = False) -> None:
        """Do something to the schema in one transaction, which is alone with the file; undo what is `rehearsed`."""
        try:
            connection = self._connections.take()
        except sqlite3.Error as error:
            raise translate_sqlite_error(error, self._label(table)) from error
        try:
            self._connections.begin(connection)
            change(connection)
            connection.execute("ROLLBACK" if rehearsed else "COMMIT")
        except sqlite3.Error as error:
            raise translate_sqlite_error(error, self._label(table)) from error
        finally:
            self._connections.give_after_error(connection)

    def _label(self, table: TableId) -> str:
        return f"key-value table {table.scope}/{table.name} in {self.path}"


def _made(settings: dict[str, Any]) -> SqliteSegments:
    return SqliteSegments(**settings)
