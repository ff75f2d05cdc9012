"""The book-keeping of a table in SQLite: `<table>__adjunct_runs`, with a number for each name
(`presence.py`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.table_backends.epochs import (
    epoch_name,
    must_raise_epoch,
    no_bookkeeping_error,
)
from dagster_adjunct.resources.table_backends.write_plan import (
    bookkeeping_table_name,
    marks_table_name,
)
from dagster_adjunct.resources.tables.presence import ID, NO_TABLE, RUNS, Presence, new_table_id


def quote_sqlite_name(name: str) -> str:
    """Quote `name` as an SQL identifier, in backticks: in double quotes, SQLite takes an unknown
    column for a text.
    """
    return "`" + name.replace("`", "``") + "`"


@dataclass(frozen=True, slots=True)
class SqliteBookkeeping:
    """The book-keeping of `table`. But for `create_with_table`, the caller begins and ends the
    transactions.
    """

    connection: sqlite3.Connection
    table: str

    def create_with_table(self, create_table: Callable[[], None]) -> None:
        """Create the table by `create_table`, and give it an id, unless it exists. Marks of an
        earlier one are deleted.

        They would make the new table skip messages that only the old one has applied.
        """
        if self._has(self.table):
            return
        with self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            if self._has(self.table):
                return
            create_table()
            marks = marks_table_name(self.table)
            if self._has(marks):
                self.connection.execute(f"DELETE FROM {quote_sqlite_name(marks)}")
            self._renew()

    def create(self) -> None:
        """Create the book-keeping of an existing table unless there is one."""
        name = bookkeeping_table_name(self.table)
        if name is not None:
            self.connection.execute(
                f"CREATE TABLE IF NOT EXISTS {quote_sqlite_name(name)} "
                "(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID"
            )

    def count_run(self) -> None:
        """Count a run of an application, if the table has book-keeping; a table that has no id
        gets one.
        """
        numbers = self._numbers()
        if numbers is None:
            return
        if ID not in numbers or self._is_of_earlier_table():
            self._renew()
        self._set(RUNS, numbers.get(RUNS, 0) + 1)

    def pass_fence(self, label: str, fence: Fence) -> None:
        """Let a write of a run pass if no later run of its application has begun; raise
        RunLeaseLostError if one has.

        A smaller epoch becomes that of this run.
        """
        name = bookkeeping_table_name(self.table)
        if name is None or not self._has(name):
            raise no_bookkeeping_error(label, name, "name and value")
        query = f"SELECT value FROM {quote_sqlite_name(name)} WHERE name = ?"
        (known,) = self.connection.execute(query, (epoch_name(fence),)).fetchone() or (None,)
        if must_raise_epoch(label, known, fence):
            self._set(epoch_name(fence), fence.epoch)

    def presence(self) -> Presence:
        """Return what the file says about the table."""
        if not self._has(self.table):
            return NO_TABLE
        numbers = self._numbers() or {}
        if self._is_of_earlier_table():
            numbers.pop(ID, None)
        (rows,) = self.connection.execute(
            f"SELECT EXISTS (SELECT 1 FROM {quote_sqlite_name(self.table)})"
        ).fetchone()
        return Presence(
            exists=True,
            id=str(numbers[ID]) if ID in numbers else None,
            runs=numbers.get(RUNS),
            rows=bool(rows),
            marks=self._has(marks_table_name(self.table)),
        )

    def _is_of_earlier_table(self) -> bool:
        """Whether the table was created after its book-keeping: it alone was dropped and created
        again, perhaps from a backup.

        SQLite lists tables in the order in which they were created, also after VACUUM.
        """
        name = bookkeeping_table_name(self.table)
        query = """SELECT count(*) FROM sqlite_master AS t JOIN sqlite_master AS b
            ON t.rowid > b.rowid WHERE t.type = 'table' AND t.name = ? COLLATE NOCASE
            AND b.type = 'table' AND b.name = ? COLLATE NOCASE"""
        (found,) = self.connection.execute(query, (self.table, name)).fetchone()
        return bool(found)

    def _renew(self) -> None:
        """Create the book-keeping after its table, with a new id; epochs and runs stay."""
        numbers = self._numbers()
        name = bookkeeping_table_name(self.table)
        if numbers is not None and name is not None:
            self.connection.execute(f"DROP TABLE {quote_sqlite_name(name)}")
        self.create()
        for number_name, value in {**(numbers or {}), ID: new_table_id()}.items():
            self._set(number_name, value)

    def _numbers(self) -> dict[str, int] | None:
        """Return all numbers in the book-keeping, by their names; None if there is no
        book-keeping.
        """
        name = bookkeeping_table_name(self.table)
        if name is None or not self._has(name):
            return None
        return dict(
            self.connection.execute(f"SELECT name, value FROM {quote_sqlite_name(name)}").fetchall()
        )

    def _set(self, name: str, value: int) -> None:
        """Store a number, if the table can have book-keeping."""
        table = bookkeeping_table_name(self.table)
        if table is not None:
            self.connection.execute(
                f"INSERT INTO {quote_sqlite_name(table)} (name, value) VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                (name, value),
            )

    def _has(self, table: str) -> bool:
        """Whether the file has this table."""
        (columns,) = self.connection.execute(
            "SELECT count(*) FROM pragma_table_info(?)", (table,)
        ).fetchone()
        return bool(columns)
