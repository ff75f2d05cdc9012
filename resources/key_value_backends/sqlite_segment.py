"""`SqliteSegment`: one partition of a key-value table in an SQLite file, in the thread of whoever asks."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value.ended_tables import deleted_table, lost_table, sealed_table
from dagster_adjunct.resources.key_value.table_segment import (
    ABSENT,
    ANYTHING,
    ConditionsFailed,
    ReplyLostError,
    SegmentChange,
    SegmentLimits,
    StoredEntry,
    StoredPage,
    TableId,
)
from dagster_adjunct.resources.key_value_backends.sqlite_connections import (
    FileConnection,
    SqliteConnections,
    is_busy,
    translated,
)
from dagster_adjunct.resources.key_value_backends.sqlite_key_values import (
    SEALED,
    SqliteStatements,
    is_there,
)

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
                raise lost_table(self._table, self._label) from error
            raise translated(error, self._label) from error
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
            raise deleted_table(self._table, self._label) from error
        if error.sqlite_errorcode == sqlite3.SQLITE_CONSTRAINT_TRIGGER and SEALED in str(error):
            raise sealed_table(self._table, self._label) from error
        raise translated(error, self._label) from error


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
