"""`SqliteTable`: records in a table of an SQLite file, for one machine and many processes."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from dagster_adjunct.resources.backends.column_values import Column, check_identifier, declared_column
from dagster_adjunct.resources.backends.forgetting_schedule import is_time_to_forget
from dagster_adjunct.resources.backends.rows import Key, Record, RowCodec
from dagster_adjunct.resources.backends.sqlite_requests import CommitFailed, SqliteRequests, transaction
from dagster_adjunct.resources.backends.sqlite_schema import create_table, has_table, read_columns
from dagster_adjunct.resources.backends.sqlite_values import appended, decode, keep
from dagster_adjunct.resources.backends.write_plan import Halving, checked
from dagster_adjunct.resources.checked_numbers import check_seconds
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    TableAccessError,
    TableError,
    TableNotFoundError,
    TableUnavailableError,
)
from dagster_adjunct.resources.tables.column_changes import Changes
from dagster_adjunct.resources.tables.key_columns import key_columns
from dagster_adjunct.resources.tables.layer import OF_A_STORE, Capabilities
from dagster_adjunct.resources.tables.operation import Operation, OperationKind
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State
from dagster_adjunct.resources.tables.per_loop import PerLoop
from dagster_adjunct.resources.tables.pickled_functions import as_declared
from dagster_adjunct.resources.tables.table_functions import StoreFunction

T = TypeVar("T")

_LONGEST_WAIT = 2e6  # seconds; SQLite counts milliseconds in 32 bits

# What is wrong with the file or its disk, whatever is asked of it.
_UNUSABLE = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CORRUPT,
)


class _OpenConnection:
    """What one event loop has open: a connection that nobody but its thread touches."""

    def __init__(self, name: str) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.live: SqliteRequests | None = None
        self.file: tuple[int, int] | None = None  # that it has open: another may come under its name

    def end(self) -> Future[None]:
        """Close the connection after the requests that wait, and end the thread then."""
        closed = self.thread.submit(self.close)
        self.thread.shutdown(wait=False)
        return closed

    def close(self) -> None:
        live, self.live = self.live, None
        if live is not None:
            live.connection.close()


class SqliteTable(StoreFunction[Key, Record, Record | Changes]):
    """Read and write function over one table of an SQLite file; every request is one transaction.

    A relative `path` counts from the working directory in which it is declared. `key` names one column or several
    (then keys are tuples); it must be the primary key or unique. `columns` gives the columns' types (see
    `column_values`, and `sqlite_values` for how each is stored); without it they are read from the table. `create` has
    the first write make file and table where they are missing, and needs `columns`; reading makes neither, and finds
    no records then. The file is kept in write-ahead mode, which needs a local disk. A writer waits up to
    `busy_timeout` seconds for others; then TableUnavailableError, which retries. Threads may share it, each through a
    `BlockingTable` of its own.

    What `newest_by` and `idempotent` need lies in the table `<table>__adjunct`; `forget` removes what is
    old of it, and where `forget_after` (seconds) is given each process does so once an hour, when it connects.
    """

    appends_to_json: ClassVar[bool] = False  # only to lists

    def __init__(
        self,
        path: str | Path,
        table: str,
        key: str | Sequence[str],
        *,
        columns: Mapping[str, str] | None = None,
        create: bool = False,
        busy_timeout: float = 10.0,
        forget_after: float | None = None,
    ) -> None:
        if str(path) in ("", ":memory:"):
            raise ConfigurationError(
                f"SQLite table {table!r} has the path {str(path)!r}: each connection would have its own.",
                "Give it a file, or use MemoryTable.",
                argument="path",
                table=table,
            )
        self.path = str(Path(path).expanduser().absolute())
        self.table = check_identifier("table", table)
        self.key = key_columns(table, key)
        self.columns = None if columns is None else dict(columns)
        self.create = create
        self.busy_timeout = busy_timeout
        self.forget_after = forget_after
        if create and columns is None:
            raise ConfigurationError(
                f"SQLite table {table!r} can't be created without its columns.",
                'Give columns={"name": "type", …}.',
                argument="columns",
                table=table,
            )
        what = f"SQLite table {table!r} has"
        check_seconds(busy_timeout, f"{what} busy_timeout={busy_timeout!r}", argument="busy_timeout", zero=True)
        check_seconds(forget_after, f"{what} forget_after={forget_after!r}", argument="forget_after", none=True)
        self._declared = tuple(declared_column(*pair) for pair in (self.columns or {}).items())
        self._label = f"SQLite table {table!r} in {self.path}"
        self._open: PerLoop[_OpenConnection] = PerLoop(partial(_OpenConnection, f"sqlite-{table}"), _OpenConnection.end)

    def __repr__(self) -> str:
        return f"SqliteTable({self.path!r}, {self.table!r}, key={self.key})"

    def to_dict(self) -> dict[str, Any]:
        """The declaration as plain values."""
        return {
            "path": self.path,
            "table": self.table,
            "key": list(self.key),
            "columns": self.columns,
            "create": self.create,
            "busy_timeout": self.busy_timeout,
            "forget_after": self.forget_after,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return as_declared(self, SqliteTable, SqliteTable.to_dict(self))

    @property
    def capabilities(self) -> Capabilities:
        return OF_A_STORE

    def column_types(self) -> dict[str, str] | None:
        return None if self.columns is None else dict(self.columns)

    async def stored_types(self) -> dict[str, str] | None:
        await self.open()
        return await self._in_thread(lambda mine: mine.live.codec.types if mine.live else self.column_types())

    def exists(self) -> bool:
        """Whether the file has the table; looking makes neither."""
        if not Path(self.path).exists():
            return False
        try:
            with closing(self._file("rw")) as connection:
                return has_table(connection, self.table)
        except sqlite3.Error as error:
            raise self._translated(error) from error

    async def open(self) -> None:
        """Connect, where the table is there or its `create` is not asked for; else the first write makes it."""
        if self._open.here().live is None:
            try:
                await self._in_thread(self._reading)
            except sqlite3.Error as error:
                raise self._translated(error) from error

    async def close(self) -> None:
        """Close the running event loop's connection, once its requests have ended."""
        mine = self._open.take()
        if mine is not None:
            await asyncio.wrap_future(mine.end())

    async def send(self, operation: Operation[Any]) -> Outcomes:
        request = self._get if operation.kind is OperationKind.GET else self._write
        return await self._in_thread(lambda mine: request(mine, operation))

    async def forget(self, older_than: float) -> int:
        """Forget what was applied to keys more than these seconds ago, deleted records' too; return how many keys'.

        A message as old as that is from then on applied when it comes (again).
        """
        await self.open()
        return await self._in_thread(lambda mine: mine.live.forget(older_than) if mine.live else 0)

    # What follows runs in the thread of the event loop that asks, one request after another.

    async def _in_thread(self, request: Callable[[_OpenConnection], T]) -> T:
        mine = self._open.here()
        return await asyncio.get_running_loop().run_in_executor(mine.thread, request, mine)

    def _get(self, mine: _OpenConnection, operation: Operation[Any]) -> Outcomes:
        count = len(operation)
        try:
            requests = self._reading(mine)
        except (sqlite3.Error, AdjunctError) as error:
            return Outcomes.all(count, self._problem(error))
        if requests is None:
            return Outcomes(count, [None] * count)
        asked = checked(requests.codec, operation)
        try:
            stored = requests.get([entry.key for entry in asked.entries])
        except sqlite3.Error as error:
            return Outcomes.all(count, self._problem(error))
        records: list[Any] = [None] * count
        for entry, record in zip(asked.entries, stored, strict=True):
            records[entry.place] = record
        return Outcomes(count, records, asked.problems)

    def _write(self, mine: _OpenConnection, operation: Operation[Any]) -> Outcomes:
        count = len(operation)
        try:
            requests = self._live(mine, make=self.create)
        except (sqlite3.Error, AdjunctError) as error:
            return Outcomes.all(count, self._problem(error))
        halving = Halving(checked(requests.codec, operation))
        while (part := halving.next()) is not None:
            try:
                halving.done(requests.write(operation, part))
            except (sqlite3.Error, AdjunctError, CommitFailed) as error:
                by_data = isinstance(error, sqlite3.IntegrityError | sqlite3.DataError)
                halving.failed(self._problem(error), by_data=by_data)
        return Outcomes(count, problems=halving.problems, defaults_put=halving.defaults_put)

    def _problem(self, error: Exception) -> Problem:
        """What an error says of the entries; whatever was begun is rolled back, so they may be sent again."""
        if isinstance(error, CommitFailed):
            cause = error.__cause__
            assert isinstance(cause, sqlite3.Error)
            return Problem(State.UNKNOWN, self._chained(cause))
        known = self._chained(error) if isinstance(error, sqlite3.Error) else error
        return self.problem_of(known, sent=False)

    def _chained(self, error: sqlite3.Error) -> Exception:
        translated = self._translated(error)
        translated.__cause__ = error
        return translated

    def _file(self, mode: str) -> sqlite3.Connection:
        """Connect to the file, which the mode "rwc" makes."""
        return sqlite3.connect(
            f"{Path(self.path).as_uri()}?mode={mode}",
            uri=True,
            timeout=min(self.busy_timeout, _LONGEST_WAIT),
            isolation_level=None,
            check_same_thread=False,
        )

    def _connect(self, *, make: bool) -> SqliteRequests:
        path = Path(self.path)
        if make:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise TableAccessError(
                    f"{self._label} can't be made: {error.strerror} ({error.filename}).",
                    "Give a path where files may be written.",
                    table=self._label,
                ) from error
        elif not path.exists():
            raise TableNotFoundError(
                f"{self._label}: there is no such file.",
                "Correct the path, or bring the file back. With create=True the first write makes one.",
                table=self._label,
            )
        connection = self._file("rwc" if make else "rw")
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode = WAL")
            # The batch that a write belongs to is committed after it, so the write must be on the disk.
            connection.execute("PRAGMA synchronous = FULL")
            if make:
                with transaction(connection, "IMMEDIATE"):
                    create_table(connection, self.table, self.key, self._declared)
            connection.create_function("adjunct_appended", 2, appended, deterministic=True)
            stored = read_columns(connection, self._label, self.table, self.key, self._declared)
            columns: Sequence[Column] = self._declared or stored
            bits = None if self._declared else 64  # "INTEGER", as a file says it, is any
            codec = RowCodec(self._label, self.key, columns, bits=bits, keep=keep, decode=decode)
            requests = SqliteRequests(connection, codec, self.table, create=self.create)
            if self.forget_after is not None and is_time_to_forget(self._label, self.forget_after):
                requests.forget(self.forget_after)
        except BaseException:
            connection.close()
            raise
        return requests

    def _reading(self, mine: _OpenConnection) -> SqliteRequests | None:
        """The requests of this thread; None where the table is to be made by the first write."""
        if mine.live is None and self.create and not self.exists():
            return None
        return self._live(mine, make=False)

    def _live(self, mine: _OpenConnection, *, make: bool) -> SqliteRequests:
        if mine.live is not None and mine.file != _identity(self.path):
            # It would live on for this connection alone, and what is written be lost with it.
            mine.close()
            make = False
        if mine.live is None:
            mine.live = self._connect(make=make)
            mine.file = _identity(self.path)
        return mine.live

    def _translated(self, error: sqlite3.Error) -> Exception:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return TableUnavailableError(
                f"{self._label} is locked by another process ({error}).",
                "It is tried again; if that goes on, find the long transaction, or raise busy_timeout.",
                table=self._label,
            )
        if code in _UNUSABLE:
            return TableAccessError(
                f"{self._label} can't be used ({error}).",
                "Check that it is an SQLite file, whole, and may be written, and that its disk has room.",
                table=self._label,
            )
        return TableError(
            f"{self._label} refused the request: {error}.", "Correct the data or the table.", table=self._label
        )


def _identity(path: str) -> tuple[int, int] | None:
    """Which file has the path; None where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - it is asked for each request, and a Path takes thrice as long
    except OSError:
        return None
    return status.st_dev, status.st_ino
