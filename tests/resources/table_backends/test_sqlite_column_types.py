"""SQLite converts values to a column's affinity: columns in which values change are refused,
others keep them.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.errors import SchemaMismatchError
from dagster_adjunct.tables import BlockingTable, RemoteTable, SqliteTable


def open_table(path: Path, stored: str, declared: str) -> BlockingTable:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"CREATE TABLE t (k TEXT PRIMARY KEY, v {stored})")
    store = SqliteTable(path=str(path), table="t", key="k", columns={"k": "string", "v": declared})
    return BlockingTable(RemoteTable("t", key="k", read_function=store, write_function=store))


CHANGED = [
    ("INTEGER", "string", "007"),
    ("NUMERIC", "string", "1e5"),
    ("REAL", "string", "1"),
    ("DATETIME", "string", "2026"),
    ("TEXT", "bigint", 7),
    ("VARCHAR(5)", "boolean", False),
    ("TEXT", "double", 0.1 + 0.2),
    ("DOUBLE", "bigint", 2**53 + 1),
    ("DECIMAL(30,10)", "decimal(30,10)", Decimal("12345678901234567890.1234567890")),
    ("INTEGER AS (7) STORED", "bigint", 8),
]
KEPT = [
    ("TEXT", "string", "007"),
    ("BLOB", "string", "007"),
    ("VARCHAR(5)", "string", "1e5"),
    ("INTEGER", "bigint", 2**53 + 1),
    ("NUMERIC", "bigint", 7),
    ("INTEGER", "double", 7.0),
    ("BOOLEAN", "boolean", False),
    ("DATE", "date", date(2026, 1, 31)),
    ("DECIMAL(10,2)", "decimal(10,2)", Decimal("12345678.10")),
    ("TEXT", "decimal(30,10)", Decimal("12345678901234567890.1234567890")),
]


@pytest.mark.parametrize(("stored", "declared", "value"), CHANGED)
def test_a_column_that_would_change_values_is_refused(
    stored: str, declared: str, value: Any, tmp_path: Path
) -> None:
    with open_table(tmp_path / "t.sqlite", stored, declared) as table:
        with pytest.raises(SchemaMismatchError) as caught:
            table.put("a", {"k": "a", "v": value})
        assert caught.value.column == "v"


@pytest.mark.parametrize(("stored", "declared", "value"), KEPT)
def test_a_column_that_keeps_values_is_taken(
    stored: str, declared: str, value: Any, tmp_path: Path
) -> None:
    with open_table(tmp_path / "t.sqlite", stored, declared) as table:
        table.put("a", {"k": "a", "v": value})
        read = table.get("a")
    assert read is not None
    assert (read["v"], type(read["v"])) == (value, type(value))
