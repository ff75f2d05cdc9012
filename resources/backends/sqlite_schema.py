"""The columns and keys of SQLite tables: making them, and checking those that are there."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from dagster_adjunct.resources.backends.column_values import Column, Kind, check_declared, column_of, not_unique
from dagster_adjunct.resources.errors import TableAccessError

_TYPES = {
    Kind.STRING: "TEXT",
    Kind.INTEGER: "INTEGER",
    Kind.FLOAT: "REAL",
    Kind.BOOLEAN: "BOOLEAN",
    Kind.TIMESTAMP: "TIMESTAMP",
    Kind.DATE: "DATE",
    Kind.DECIMAL: "TEXT DECIMAL",  # the word TEXT keeps SQLite from turning digits into a float
    Kind.BINARY: "BLOB",
}


def create_table(connection: sqlite3.Connection, table: str, key: Sequence[str], columns: Sequence[Column]) -> None:
    """Make the table with `key` as its primary key, unless there is one of that name."""
    parts = [
        f"{quoted(c.name)} {_TYPES[c.kind]}{c.size if c.kind is Kind.DECIMAL else ''}"
        + (" NOT NULL" if c.name in key else "")
        for c in columns
    ]
    parts.append(f"PRIMARY KEY ({', '.join(map(quoted, key))})")
    connection.execute(f"CREATE TABLE IF NOT EXISTS {quoted(table)} ({', '.join(parts)})")


def read_columns(
    connection: sqlite3.Connection,
    label: str,
    table: str,
    key: Sequence[str],
    declared: Sequence[Column],
) -> tuple[Column, ...]:
    """The table's columns, checked: all declared ones are there, and `key` is unique.

    TableAccessError where there is no such table; SchemaMismatchError where it does not fit.
    """
    info = connection.execute("SELECT name, type, pk FROM pragma_table_info(?)", (table,)).fetchall()
    if not info:
        raise TableAccessError(
            f"{label}: the file has no such table.", "Correct the name, or declare it with create=True.", table=label
        )
    names = [name for name, _, _ in info]
    check_declared(label, names, declared)
    unique = [{name for name, _, primary in info if primary}]
    indexes = connection.execute(
        'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial', (table,)
    ).fetchall()
    for (index,) in indexes:
        unique.append({n for (n,) in connection.execute("SELECT name FROM pragma_index_info(?)", (index,))})
    if set(key) not in unique:
        raise not_unique(label, key)
    return tuple(column_of(name, type_) for name, type_, _ in info)


def quoted(name: str) -> str:
    """`name` as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
