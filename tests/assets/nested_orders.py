"""Orders with nested columns, as plain Python values, for tests of hand-over."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

from dagster_adjunct.resources.schemas.schema import Schema

ORDERS = Schema.of(
    k="string",
    customer={"id": "bigint", "tier": "tinyint", "address": {"city": "string", "zip code": "int"}},
    lines=[{"sku": "string", "price": "decimal(10,2)", "at": "timestamp", "count": "smallint"}],
    attributes="map<string,array<int>>",
    notes="map<string,struct<at:timestamp,`by`:binary>>",
    days="array<date>",
    tags="array<string>",
)
AT = dt.datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=dt.UTC)
_FULL: dict[str, Any] = {
    "k": "full",
    "customer": {"id": 7, "tier": 3, "address": {"city": "Ulm", "zip code": None}},
    "lines": [{"sku": "x", "price": Decimal("1.50"), "at": AT, "count": 4}, None],
    "attributes": {"a": [1, None], "b": [], "c": None},
    "notes": {"x": {"at": AT, "by": b"\0\1"}, "y": None},
    "days": [dt.date(2026, 1, 1), None],
    "tags": ["p", None, ""],
}
_EMPTY: dict[str, Any] = {
    "k": "empty",
    "customer": {"id": None, "tier": None, "address": None},
    "lines": [],
    "attributes": {},
    "notes": {},
    "days": [],
    "tags": [],
}
_NULLS: dict[str, Any] = dict.fromkeys(ORDERS.names) | {"k": "nulls"}
_INNER_NULLS: dict[str, Any] = {
    "k": "inner nulls",
    "customer": {"id": 2, "tier": 1, "address": {"city": None, "zip code": None}},
    "lines": [None, dict.fromkeys(("sku", "price", "at", "count"))],
    "attributes": {"z": [None]},
    "notes": {"z": {"at": None, "by": None}},
    "days": [None],
    "tags": [None],
}
ROWS = [_EMPTY, _FULL, _INNER_NULLS, _NULLS]
"""Rows of which each differs from the others in nulls and empty values, sorted by k."""


def by_key(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without the columns that streams add, sorted by k."""
    own = [{name: row[name] for name in row if not name.startswith("__")} for row in rows]
    return sorted(own, key=lambda row: str(row["k"]))
