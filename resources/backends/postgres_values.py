"""How values travel to PostgreSQL and back: as they are, but for JSON and lists, which travel as text.

A list in an array of lists would be taken for a second dimension, so a list is written the way the server prints it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime
from decimal import Decimal
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


def array_text(values: Iterable[Any]) -> str:
    """A list as the server writes arrays: {1,NULL,"a"}; several times faster than the driver's way."""
    return "{" + ",".join(["NULL" if value is None else _TEXTS[type(value)](value) for value in values]) + "}"


def can_be_text(column: Column) -> bool:
    """Whether the column's values, as they are kept, are of types that `array_text` knows."""
    return column.kind is not Kind.OTHER


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


class _Texts(dict[type, Callable[[Any], str]]):
    """How values of a type are written; subclasses (of str, of datetime) as the type that they are of."""

    def __missing__(self, kind: type) -> Callable[[Any], str]:
        writer = next((self[known] for known in kind.__mro__ if known in self), str)
        self[kind] = writer
        return writer


_TEXTS = _Texts(
    {
        str: _quoted,
        bool: lambda value: "t" if value else "f",
        int: int.__repr__,
        float: float.__repr__,
        Decimal: str,
        datetime: lambda moment: f'"{moment.isoformat()}"',
        date: date.isoformat,
        bytes: lambda value: f'"\\\\x{value.hex()}"',
    }
)


def _utc(moment: Any) -> Any:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
