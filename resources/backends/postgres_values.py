"""How values travel to PostgreSQL and back: as they are, but for JSON and lists, which travel as text.

A list in an array of lists would be taken for a second dimension, so a list is written the way the server prints it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date
from typing import Any

from dagster_adjunct.resources.backends.column_values import Column, Kind

AS_TEXT = (Kind.JSON, Kind.LIST)


def keep(column: Column) -> Callable[[Any], Any] | None:
    """The function that brings a checked value into the form that is sent; None where it is that already."""
    if column.kind is Kind.LIST:
        return array_text
    return json.dumps if column.kind is Kind.JSON else None


def decode(column: Column) -> Callable[[Any], Any] | None:
    """The function that brings what was read into its one form; None where it is that already."""
    if column.kind is Kind.LIST:
        assert column.element is not None
        item = decode(column.element)
        return item and (lambda values: [v if v is None else item(v) for v in values])
    return _utc if column.kind is Kind.TIMESTAMP else None


def array_text(values: list[Any]) -> str:
    """A list as the server writes arrays: {1,NULL,"a"}."""
    return "{" + ",".join(map(_item, values)) + "}"


def _item(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "t" if value else "f"
    text = value.isoformat() if isinstance(value, date) else str(value)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _utc(moment: Any) -> Any:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
