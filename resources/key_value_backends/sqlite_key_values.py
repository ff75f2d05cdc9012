"""The two tables in an SQLite file that are a key-value table, and the statements over them.

`kvt_<incarnation>` has the entries of all partitions, in the order of their table keys; `kvt_<incarnation>_tokens` the
recent requests, oldest first. A write notes its request before anything else, so a trigger that refuses these notes is
the seal.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from functools import lru_cache

from dagster_adjunct.resources.key_value.table_segment import TableId
from dagster_adjunct.resources.key_value_backends.sql_table_name import sql_table_name

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
