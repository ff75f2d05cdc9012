"""The columns and keys of SQLite tables: making them, and checking those that are there."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from dagster_adjunct.resources.backends.applied_marks import COLUMNS, check_columns_beside
from dagster_adjunct.resources.backends.column_values import (
    Column,
    Kind,
    check_declared,
    column_of,
    not_unique,
    unequal_keys,
)
from dagster_adjunct.resources.errors import TableNotFoundError

_TYPES = {
    Kind.STRING: "TEXT",
    Kind.INTEGER: "INTEGER",
    Kind.FLOAT: "REAL",
    Kind.BOOLEAN: "BOOLEAN",
    Kind.TIMESTAMP: "TIMESTAMP",
    Kind.DATE: "DATE",
    Kind.DECIMAL: "TEXT DECIMAL",  # the word TEXT keeps SQLite from turning digits into a float
    Kind.BINARY: "BLOB",
    Kind.JSON: "TEXT JSON",
}


def create_table(connection: sqlite3.Connection, table: str, key: Sequence[str], columns: Sequence[Column]) -> None:
    """Make the table with `key` as its primary key, unless there is one of that name."""
    parts = [f"{quoted(c.name)} {_type_of(c)}" + (" NOT NULL" if c.name in key else "") for c in columns]
    parts.append(f"PRIMARY KEY ({listed(key)})")
    connection.execute(f"CREATE TABLE IF NOT EXISTS {quoted(table)} ({', '.join(parts)})")


def has_table(connection: sqlite3.Connection, table: str) -> bool:
    """Whether there is a table of that name."""
    return bool(connection.execute("SELECT count(*) FROM pragma_table_info(?)", (table,)).fetchone()[0])


def create_beside(connection: sqlite3.Connection, beside: str, key: Sequence[Column]) -> None:
    """Make the table that keeps what was applied to keys, unless it is there."""
    parts = [f"{quoted(c.name)} {_type_of(c)} NOT NULL" for c in key]
    parts += [f"{name} TEXT" for name in COLUMNS]
    parts += ["at REAL NOT NULL", f"PRIMARY KEY ({listed([c.name for c in key])})"]
    connection.execute(f"CREATE TABLE IF NOT EXISTS {quoted(beside)} ({', '.join(parts)}) WITHOUT ROWID")


def check_beside(connection: sqlite3.Connection, label: str, beside: str, key: Sequence[str]) -> None:
    """TableAccessError where the table that keeps what was applied to keys is missing or another."""
    names = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (beside,))]
    check_columns_beside(label, beside, list(key), names)


def read_columns(
    connection: sqlite3.Connection,
    label: str,
    table: str,
    key: Sequence[str],
    declared: Sequence[Column],
) -> tuple[Column, ...]:
    """The table's columns, checked: all declared ones are there, and `key` is unique.

    TableNotFoundError where there is no such table; SchemaMismatchError where it does not fit.
    """
    info = connection.execute("SELECT name, type, pk FROM pragma_table_info(?)", (table,)).fetchall()
    if not info:
        raise TableNotFoundError(
            f"{label}: the file has no such table.", "Correct the name, or declare it with create=True.", table=label
        )
    names, types = [name for name, _, _ in info], {name: type_ for name, type_, _ in info}
    check_declared(label, names, declared)
    if set(key) not in _unique(connection, table, info):
        raise not_unique(label, key)
    for name in key:
        if _compares_loosely(connection, table, name):
            raise unequal_keys(label, name, "compared by a collation of its own", "one of COLLATE BINARY")
    for column in declared:
        if column.name in key and column.kind is Kind.STRING and _is_number(types[column.name]):
            raise unequal_keys(label, column.name, f"{types[column.name]}, where '01' and '1' are one number", "TEXT")
    return tuple(column_of(name, type_) for name, type_, _ in info)


def _unique(connection: sqlite3.Connection, table: str, info: Sequence[tuple[str, str, int]]) -> list[set[str]]:
    """The sets of columns that are unique by their bytes, or as the number of a row."""
    unique_sets = []
    primary = [(name, type_) for name, type_, place in info if place]
    if len(primary) == 1 and primary[0][1].upper() == "INTEGER":
        unique_sets.append({primary[0][0]})
    indexes = connection.execute(
        'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial', (table,)
    ).fetchall()
    for (index,) in indexes:
        columns = connection.execute("SELECT name, coll FROM pragma_index_xinfo(?) WHERE key", (index,)).fetchall()
        if all(collation.upper() == "BINARY" for _, collation in columns):
            unique_sets.append({name for name, _ in columns})
    return unique_sets


def _compares_loosely(connection: sqlite3.Connection, table: str, name: str) -> bool:
    """Whether a column has texts equal that differ in case or in blanks at the end: no pragma tells its collation."""
    # A union has the collation of its first part.
    of_column = f"SELECT {quoted(name)} AS k FROM {quoted(table)} WHERE 0 UNION ALL SELECT 'a'"
    (loosely,) = connection.execute(f"SELECT EXISTS (SELECT 1 FROM ({of_column}) WHERE k = 'A' OR k = 'a ')").fetchone()
    return bool(loosely)


def _is_number(declared: str) -> bool:
    """Whether SQLite makes numbers of texts in a column of this type: its rules of affinity."""
    upper = declared.upper()
    if "INT" in upper:
        return True
    return bool(upper) and not any(word in upper for word in ("CHAR", "CLOB", "TEXT", "BLOB"))


def quoted(name: str) -> str:
    """`name` as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def listed(names: Sequence[str]) -> str:
    """Names as SQL identifiers, with commas."""
    return ", ".join(map(quoted, names))


def _type_of(column: Column) -> str:
    if column.kind is Kind.LIST:
        assert column.element is not None
        return f"TEXT ARRAY {_type_of(column.element)}"
    return _TYPES[column.kind] + (column.size if column.kind is Kind.DECIMAL else "")
