"""Connections to one SQLite file that the threads of a process lend and give back, and what its errors mean."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from pathlib import Path
from weakref import WeakSet

import tenacity

from dagster_adjunct.resources.errors import AdjunctError, TableAccessError, TableError, TableUnavailableError

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


def translated(error: sqlite3.Error, label: str) -> AdjunctError:
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
