"""A record with every type of value, and tables that wait, for the tests of each backend."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable

TYPES = {
    "id": "bigint",
    "s": "string",
    "f": "double",
    "ok": "boolean",
    "at": "timestamp",
    "day": "date",
    "price": "decimal(20,10)",
    "raw": "binary",
    "small": "smallint",
}
RECORD = {
    "id": -(2**63),
    "s": "naïve 'quoted' \"text\" ✈ {braces} \\ NULL",
    "f": 0.1,
    "ok": True,
    "at": datetime(2013, 7, 1, 5, 0, 0, 250_000, tzinfo=UTC),
    "day": date(2013, 7, 1),
    "price": Decimal("1234567890.0123456789"),
    "raw": b"\0\xff",
    "small": -7,
}


def blocking(store: Any, **settings: Any) -> BlockingTable:
    """Return a table of this store, read and written by its key."""
    return BlockingTable(
        RemoteTable("t", key=store.key, read_function=store, write_function=store, **settings)
    )
