"""`SqliteTable`: records in a table of an SQLite file, for one machine and many processes."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dagster_adjunct.resources.backends.column_values import Column, check_identifier, declared_column
from dagster_adjunct.resources.backends.per_loop import PerLoop
from dagster_adjunct.resources.backends.rows import (
    Key,
    Record,
    RowCodec,
    encode_puts,
    encode_updates,
    key_columns,
    plan_updates,
)
from dagster_adjunct.resources.backends.sqlite_schema import create_table, quoted, read_columns
from dagster_adjunct.resources.backends.sqlite_values import DECODERS, ENCODERS
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    SchemaMismatchError,
    TableAccessError,
    TableError,
    TableUnavailableError,
)
from dagster_adjunct.resources.tables.partial_update import UpdateMessage
from dagster_adjunct.resources.tables.table_functions import TableReadFunction, TableWriteFunction

T = TypeVar("T")


class _Open:
    """What one event loop has open: a connection that nobody but its thread touches."""

    def __init__(self, name: str) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.live: tuple[sqlite3.Connection, RowCodec] | None = None

    def end(self) -> Future[None]:
        """Close the connection after the requests that wait, and end the thread then."""
        closed = self.thread.submit(self._close)
        self.thread.shutdown(wait=False)
        return closed

    def _close(self) -> None:
        live, self.live = self.live, None
        if live is not None:
            live[0].close()


class SqliteTable(TableReadFunction[Key, Record], TableWriteFunction[Key, Record, Record]):
    """Read and write function over one table of an SQLite file; every request is one transaction.

    `key` names one column or several (then keys are tuples); it must be the primary key or unique.
    `columns` gives the columns' types (see `resources.backends.values`, and `sqlite_values` for how each
    is stored); without it they are read from the table. `create` makes file and table where they are
    missing, and needs `columns`. The file is kept in write-ahead mode, which needs a local disk. A writer
    waits up to `busy_timeout` seconds for others; then TableUnavailableError, which retries. Threads may
    share it, each through a `BlockingTable` of its own. Extra arguments of requests have no meaning here.
    """

    def __init__(
        self,
        path: str | Path,
        table: str,
        key: str | Sequence[str],
        *,
        columns: Mapping[str, str] | None = None,
        create: bool = False,
        busy_timeout: float = 10.0,
    ) -> None:
        self.path = str(path)
        self.table = check_identifier("table", table)
        self.key = key_columns(key)
        self.columns = None if columns is None else dict(columns)
        self.create = create
        self.busy_timeout = busy_timeout
        if self.path in ("", ":memory:"):
            raise ConfigurationError(
                f"SQLite table {table!r} has the path {self.path!r}: each connection would have its own.",
                "Give it a file, or use MemoryTable.",
                argument="path",
                table=table,
            )
        if create and columns is None:
            raise ConfigurationError(
                f"SQLite table {table!r} can't be created without its columns.",
                'Give columns={"name": "type", …}.',
                argument="columns",
                table=table,
            )
        self._declared = tuple(declared_column(*pair) for pair in (self.columns or {}).items())
        self._label = f"SQLite table {table!r} in {self.path}"
        self._open: PerLoop[_Open] = PerLoop(partial(_Open, f"sqlite-{table}"), _Open.end)

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
        }

    def __reduce__(self) -> tuple[Any, ...]:
        # An executor has another working directory, so a relative path travels as an absolute one.
        return (_rebuild, ({**self.to_dict(), "path": str(Path(self.path).absolute())},))

    async def open(self) -> None:
        if self._open.here().live is None:
            await self._in_thread(self._live)

    async def close(self) -> None:
        """Close the running event loop's connection, once its requests have ended."""
        mine = self._open.take()
        if mine is not None:
            await asyncio.wrap_future(mine.end())

    async def get(self, key: Key, *args: object) -> Record | None:
        return (await self.get_all([key], *args)).get(key)

    async def get_all(self, keys: Sequence[Key], *args: object) -> dict[Key, Record]:
        return await self._in_thread(lambda mine: self._get_all(mine, keys))

    async def put(self, key: Key, value: Record, *args: object) -> None:
        await self.put_all([(key, value)], *args)

    async def put_all(self, entries: Sequence[tuple[Key, Record]], *args: object) -> None:
        await self._in_thread(lambda mine: self._insert(mine, entries, replace=True))

    async def put_if_absent_all(self, entries: Sequence[tuple[Key, Record]], *args: object) -> int:
        return await self._in_thread(lambda mine: self._insert(mine, entries, replace=False))

    async def delete(self, key: Key, *args: object) -> None:
        await self.delete_all([key], *args)

    async def delete_all(self, keys: Sequence[Key], *args: object) -> None:
        await self._in_thread(lambda mine: self._delete(mine, keys))

    async def update(self, key: Key, update: Record, *args: object) -> None:
        await self.update_all([(key, update)], *args)

    async def update_all(self, entries: Sequence[tuple[Key, Record]], *args: object) -> None:
        bare: list[tuple[Key, UpdateMessage[Record, Record]]] = [(k, UpdateMessage(u)) for k, u in entries]
        await self._in_thread(lambda mine: self._update(mine, bare))

    async def update_with_defaults_all(
        self, entries: Sequence[tuple[Key, UpdateMessage[Record, Record]]], *args: object
    ) -> int:
        return await self._in_thread(lambda mine: self._update(mine, entries))

    # What follows runs in the thread of the event loop that asks, one request after another.

    async def _in_thread(self, request: Callable[[_Open], T]) -> T:
        mine = self._open.here()
        try:
            return await asyncio.get_running_loop().run_in_executor(mine.thread, request, mine)
        except sqlite3.Error as error:
            raise self._translated(error) from error
        except OverflowError as error:
            raise SchemaMismatchError(
                f"{self._label}: an integer does not fit into 64 bits.", "Use a decimal column."
            ) from error

    def _connect(self) -> tuple[sqlite3.Connection, RowCodec]:
        path = Path(self.path)
        if self.create:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.exists():
            raise TableAccessError(
                f"{self._label}: there is no such file.",
                "Correct the path, or declare it with create=True.",
                table=self._label,
            )
        connection = sqlite3.connect(path, timeout=self.busy_timeout, isolation_level=None, check_same_thread=False)
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode = WAL")
            # The batch that a write belongs to is committed after it, so the write must be on the disk.
            connection.execute("PRAGMA synchronous = FULL")
            if self.create:
                with _transaction(connection, "IMMEDIATE"):
                    create_table(connection, self.table, self.key, self._declared)
            stored = read_columns(connection, self._label, self.table, self.key, self._declared)
        except BaseException:
            connection.close()
            raise
        columns: Sequence[Column] = self._declared or stored
        return connection, RowCodec(self._label, self.key, columns, encoders=ENCODERS, decoders=DECODERS)

    def _live(self, mine: _Open) -> tuple[sqlite3.Connection, RowCodec]:
        if mine.live is None:
            mine.live = self._connect()
        return mine.live

    def _get_all(self, mine: _Open, keys: Sequence[Key]) -> dict[Key, Record]:
        connection, codec = self._live(mine)
        query = f"SELECT {_listed(codec.names)} FROM {quoted(self.table)} WHERE {_is_key(self.key)}"
        records: dict[Key, Record] = {}
        with _transaction(connection, "DEFERRED"):
            for key in keys:
                row = connection.execute(query, codec.key_row(key)).fetchone()
                if row is not None:
                    records[key] = codec.record(row)
        return records

    def _insert(self, mine: _Open, entries: Sequence[tuple[Key, Record]], *, replace: bool) -> int:
        connection, codec = self._live(mine)
        rows = encode_puts(codec, entries, first=not replace)
        with _transaction(connection, "IMMEDIATE"):
            return connection.executemany(self._insert_statement(codec, replace=replace), rows.values()).rowcount

    def _insert_statement(self, codec: RowCodec, *, replace: bool) -> str:
        rest = [name for name in codec.names if name not in self.key]
        changes = ", ".join(f"{quoted(name)} = excluded.{quoted(name)}" for name in rest)
        action = f"UPDATE SET {changes}" if replace and rest else "NOTHING"
        marks = ", ".join("?" * len(codec.names))
        return (
            f"INSERT INTO {quoted(self.table)} ({_listed(codec.names)}) VALUES ({marks}) "
            f"ON CONFLICT ({_listed(self.key)}) DO {action}"
        )

    def _delete(self, mine: _Open, keys: Sequence[Key]) -> None:
        connection, codec = self._live(mine)
        with _transaction(connection, "IMMEDIATE"):
            connection.executemany(
                f"DELETE FROM {quoted(self.table)} WHERE {_is_key(self.key)}",
                [codec.key_row(key) for key in keys],
            )

    def _update(self, mine: _Open, entries: Sequence[tuple[Key, UpdateMessage[Record, Record]]]) -> int:
        connection, codec = self._live(mine)
        updates = encode_updates(codec, entries)
        table, is_key = quoted(self.table), _is_key(self.key)
        look_up = f"SELECT 1 FROM {table} WHERE {is_key}"
        with _transaction(connection, "IMMEDIATE"):
            # The write lock is held from here on, so what exists stays true until the commit.
            keys = {update.row_key for update in updates}
            existing = {key for key in keys if connection.execute(look_up, key).fetchone()}
            plan = plan_updates(codec, updates, existing)
            insert = self._insert_statement(codec, replace=False)
            connection.executemany(insert, plan.inserts.values())
            for group in plan.groups():
                changes = ", ".join(f"{quoted(name)} = ?" for name in group.columns)
                connection.executemany(f"UPDATE {table} SET {changes} WHERE {is_key}", group.rows)
        plan.raise_missing(self._label)
        return len(plan.inserts)

    def _translated(self, error: sqlite3.Error) -> Exception:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return TableUnavailableError(
                f"{self._label} is locked by another process ({error}).",
                "It is tried again; if that goes on, find the long transaction, or raise busy_timeout.",
                table=self._label,
            )
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            return TableAccessError(
                f"{self._label} can't be used ({error}).",
                "Check that it is an SQLite file and may be written.",
                table=self._label,
            )
        return TableError(
            f"{self._label} refused the request: {error}.", "Correct the data or the table.", table=self._label
        )


@contextmanager
def _transaction(connection: sqlite3.Connection, kind: str) -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(quoted, names))


def _is_key(names: Sequence[str]) -> str:
    return " AND ".join(f"{quoted(name)} = ?" for name in names)


def _rebuild(settings: dict[str, Any]) -> SqliteTable:
    return SqliteTable(**settings)
