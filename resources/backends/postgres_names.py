"""Names in statements for PostgreSQL, quoted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psycopg import sql
from psycopg.sql import Composed


def joined(between: str, parts: Iterable[sql.Composable]) -> Composed:
    return sql.SQL(between).join(parts)


def listed(names: Sequence[str], table: str | None = None) -> Composed:
    return sql.SQL(", ").join(identifier(*((table,) if table else ()), name) for name in names)


def identifier(*names: str) -> sql.Identifier:
    # Statements with parameters read a single % as the start of one.
    return sql.Identifier(*(name.replace("%", "%%") for name in names))
