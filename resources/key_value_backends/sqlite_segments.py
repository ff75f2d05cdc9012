"""`SqliteSegments`: key-value tables in an SQLite file, for one machine and many processes; no server."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError, TableAccessError
from dagster_adjunct.resources.key_value.ended_tables import deleted_table
from dagster_adjunct.resources.key_value.table_segment import SegmentLimits, TableId, TableSegment
from dagster_adjunct.resources.key_value_backends import sqlite_key_values
from dagster_adjunct.resources.key_value_backends.sql_table_name import sql_table_name
from dagster_adjunct.resources.key_value_backends.sqlite_connections import SqliteConnections, translated
from dagster_adjunct.resources.key_value_backends.sqlite_key_values import is_there
from dagster_adjunct.resources.key_value_backends.sqlite_segment import HORIZON, SqliteSegment

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
            raise translated(error, label) from error
        except OSError as error:
            raise TableAccessError(
                f"{label} can't be made: {error.strerror} ({error.filename}).",
                "Give a path where files may be written.",
                table=label,
            ) from error
        self._change(table, lambda connection: sqlite_key_values.create(connection, table))

    def seal(self, table: TableId, partitions: int) -> None:
        def change(connection: sqlite3.Connection) -> None:
            if not is_there(connection, table):
                raise deleted_table(table, self._label(table))
            sqlite_key_values.seal(connection, table)

        self._change(table, change)

    def delete(self, table: TableId, partitions: int) -> None:
        if Path(self.path).exists():
            self._change(table, lambda connection: sqlite_key_values.drop(connection, table))

    def check_may_seal(self, table: TableId, partitions: int) -> None:
        """Whoever may write the file may do all."""
        self._change(table, lambda connection: sqlite_key_values.write_something(connection, table), rehearsed=True)

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
            raise translated(error, self._label(table)) from error
        try:
            self._connections.begin(connection)
            change(connection)
            connection.execute("ROLLBACK" if rehearsed else "COMMIT")
        except sqlite3.Error as error:
            raise translated(error, self._label(table)) from error
        finally:
            self._connections.give_after_error(connection)

    def _label(self, table: TableId) -> str:
        return f"key-value table {table.scope}/{table.name} in {self.path}"


def _made(settings: dict[str, Any]) -> SqliteSegments:
    return SqliteSegments(**settings)
