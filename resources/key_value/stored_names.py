"""Reading what is stored of scopes and key-value tables out of their namespace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.listed_tables import TableInfo, table_info
from dagster_adjunct.resources.key_value.stored_tables import StoredScope, StoredTable, parsed
from dagster_adjunct.resources.key_value.table_names import TableName
from dagster_adjunct.resources.key_value_errors import ScopeNotFoundError

if TYPE_CHECKING:
    from dagster_adjunct.resources.metadata import NamespaceSnapshot


def check_scope(snapshot: NamespaceSnapshot, scope: str) -> None:
    """Raise ScopeNotFoundError where there is no such scope."""
    stored = snapshot.get(scope)
    if stored is None:
        raise ScopeNotFoundError(
            f"there is no scope {scope!r} of key-value tables.",
            "Check the name, or create it: create_scope, or adjunct kvt scope create.",
            scope=scope,
        )
    parsed(StoredScope, stored, f"scope {scope!r} of key-value tables")


def found_table(snapshot: NamespaceSnapshot, table: TableName) -> StoredTable | None:
    """Return a table's entry, None where there is none. Raises MalformedDocumentError."""
    stored = snapshot.get(table.key)
    return None if stored is None else parsed(StoredTable, stored, str(table))


def stored_form(table: StoredTable | None) -> dict[str, Any] | None:
    """Return an entry as a namespace takes it; None removes it."""
    return None if table is None else table.model_dump(mode="json")


def tables_of(snapshot: NamespaceSnapshot, scope: str, after: str | None) -> Iterator[TableInfo]:
    """Yield the tables of a scope by name, from behind `after` on; also those that can't be read."""
    start = f"{scope}/" if after is None else behind(f"{scope}/{after}")
    for key, stored in snapshot.items(start):
        if not key.startswith(f"{scope}/"):
            return
        yield table_info(TableName(scope, key.partition("/")[2]), stored)


def behind(name: str | None) -> str:
    """Return the first key that comes behind this one; without one, the first of all."""
    return "" if name is None else f"{name}\0"


def checked_limit(limit: int | None) -> int | None:
    """Return how many are to be listed at most, None for all. Raises ConfigurationError."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigurationError(
            f"limit is {limit!r}: expected a whole number from 1 on, or None.", "Change it.", argument="limit"
        )
    return limit
