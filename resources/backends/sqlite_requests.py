"""What a `SqliteTable` sends to its file: one transaction a request, in a thread that owns the connection."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dagster_adjunct.resources.backends.applied_marks import (
    COLUMNS,
    Applied,
    beside,
    from_texts,
    to_texts,
)
from dagster_adjunct.resources.backends.rows import Row, RowCodec
from dagster_adjunct.resources.backends.sqlite_schema import check_beside, create_beside, listed, quoted
from dagster_adjunct.resources.backends.write_plan import (
    Checked,
    Found,
    Plan,
    columns_to_read,
    must_look,
    planned,
)
from dagster_adjunct.resources.tables.operation import Operation


class SqliteRequests:
    """Requests over one connection; `create`: the table beside may be made."""

    def __init__(self, connection: sqlite3.Connection, codec: RowCodec, table: str, *, create: bool) -> None:
        self.connection, self.codec = connection, codec
        self._name, self._create = table, create
        self._table = quoted(table)
        self._is_key = " AND ".join(f"{quoted(name)} = ?" for name in codec.key)
        self._beside: str | None = None

    def get(self, keys: Sequence[Row]) -> list[dict[str, Any] | None]:
        """The record of each key."""
        with transaction(self.connection, "DEFERRED"):
            return [self._record(self.codec.names, key) for key in self._kept_keys(keys)]

    def write(self, operation: Operation[Any], asked: Checked) -> Plan:
        """Do it all or, on an error, nothing."""
        codec = self.codec
        if operation.conditions:
            self._open_beside()
        with transaction(self.connection, "IMMEDIATE"):
            # The write lock is held from here on, so what is found stays true until the commit.
            stored = self._found(operation, asked) if must_look(operation) else Found()
            plan = planned(codec, operation, asked, stored)
            self._write(plan)
            self._remember(operation, plan)
        return plan

    def forget(self, older_than: float) -> int:
        """Remove what was applied to keys more than these seconds ago; return how many keys' it was."""
        self._open_beside()
        assert self._beside is not None
        with transaction(self.connection, "IMMEDIATE"):
            horizon = time.time() - older_than
            return self.connection.execute(f"DELETE FROM {self._beside} WHERE at < ?", (horizon,)).rowcount

    def _record(self, names: Sequence[str], key: Sequence[Any]) -> dict[str, Any] | None:
        query = f"SELECT {listed(names) if names else 1} FROM {self._table} WHERE {self._is_key}"
        row = self.connection.execute(query, key).fetchone()
        return None if row is None else self.codec.read(names, row[: len(names)])

    def _found(self, operation: Operation[Any], asked: Checked) -> Found:
        names, newest_by = columns_to_read(operation, asked.entries), operation.conditions.newest_by
        keys = asked.keys
        records: dict[Row, dict[str, Any]] = {}
        applied: dict[Row, Applied] = {}
        for key, kept in zip(keys, self._kept_keys(keys), strict=True):
            record = self._record(names, kept)
            if record is not None:
                records[key] = record
            if operation.conditions:
                query = f"SELECT {listed(COLUMNS)} FROM {self._beside} WHERE {self._is_key}"
                texts = self.connection.execute(query, kept).fetchone()
                if texts is not None:
                    applied[key] = from_texts(self.codec, newest_by, texts)
        return Found(records, applied)

    def _write(self, plan: Plan) -> None:
        codec, run = self.codec, self.connection.executemany
        for records in (plan.puts, plan.begins):
            if records:
                rows = [tuple(map(record.get, codec.names)) for record in records.values()]
                run(self._upsert(self._table, codec.names), self._rows(codec.names, rows))
        if plan.deletes:
            run(f"DELETE FROM {self._table} WHERE {self._is_key}", self._kept_keys(list(plan.deletes)))
        for group in plan.groups():
            changes = [f"{quoted(name)} = ?" for name in group.sets]
            changes += [f"{quoted(name)} = adjunct_appended({quoted(name)}, ?)" for name in group.append]
            names = (*group.sets, *group.append, *codec.key)
            run(
                f"UPDATE {self._table} SET {', '.join(changes)} WHERE {self._is_key}",
                self._rows(names, group.rows),
            )

    def _remember(self, operation: Operation[Any], plan: Plan) -> None:
        if not plan.applied:
            return
        assert self._beside is not None
        now, newest_by = time.time(), operation.conditions.newest_by
        keys = self._kept_keys(list(plan.applied))
        texts = [to_texts(self.codec, newest_by, applied) for applied in plan.applied.values()]
        rows = [(*key, *text, now) for key, text in zip(keys, texts, strict=True)]
        self.connection.executemany(self._upsert(self._beside, (*self.codec.key, *COLUMNS, "at")), rows)

    def _upsert(self, table: str, names: Sequence[str]) -> str:
        rest = [name for name in names if name not in self.codec.key]
        changes = ", ".join(f"{quoted(name)} = excluded.{quoted(name)}" for name in rest)
        return (
            f"INSERT INTO {table} ({listed(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT ({listed(self.codec.key)}) DO {f'UPDATE SET {changes}' if rest else 'NOTHING'}"
        )

    def _rows(self, names: Sequence[str], rows: Sequence[Row]) -> list[Row]:
        return list(zip(*self.codec.kept(names, rows), strict=True))

    def _kept_keys(self, keys: Sequence[Row]) -> list[Row]:
        return self._rows(self.codec.key, keys) if keys else []

    def _open_beside(self) -> None:
        if self._beside is not None:
            return
        codec = self.codec
        name = beside(self._name, [part.lower() for part in codec.key])  # as SQLite compares names
        if self._create:
            with transaction(self.connection, "IMMEDIATE"):
                create_beside(self.connection, name, [codec.columns[part] for part in codec.key])
        check_beside(self.connection, codec.table, name, codec.key)
        self._beside = quoted(name)


class CommitFailed(Exception):
    """An error of the commit itself, after which nobody knows what is stored; its cause says which."""


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str) -> Iterator[None]:
    """BEGIN and COMMIT, or ROLLBACK after an error."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        try:
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_IOERR:
                raise CommitFailed from error
            raise
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
