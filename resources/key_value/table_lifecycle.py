"""What becomes of a key-value table's entry when it is created, updated, sealed, deleted: decided, not done.

Each function takes the entry as it is stored (None: there is none) and gives the entry as it is to be. Racing managers
decide again from what the other one has stored, so exactly one of them is told that it was the one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from dagster_adjunct.resources.key_value.stored_tables import StoredTable, TableState
from dagster_adjunct.resources.key_value.table_configuration import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.table_names import TableName
from dagster_adjunct.resources.key_value_errors import (
    KeyValueTableError,
    KeyValueTableExistsError,
    KeyValueTableNotFoundError,
)

UNFINISHED = frozenset({TableState.CREATING, TableState.SEALING, TableState.DELETING})


@dataclass(frozen=True, slots=True)
class TableTransition:
    """`entry` is to be stored (None: nothing is there, and stays so). What it leaves unfinished is then finished.

    `answer` is what the caller is told after that. None: what was there comes first, and then it is decided again.
    """

    answer: bool | None
    entry: StoredTable | None


def decide_create(
    current: StoredTable | None, wanted: StoredTable, name: TableName, same_backend: Callable[[StoredTable], bool]
) -> TableTransition:
    """Make `wanted`, or find that it is there. Raises KeyValueTableExistsError where that is configured otherwise."""
    if current is None:
        return TableTransition(True, wanted)
    if current.state is TableState.DELETING:
        return TableTransition(None, current)
    differences = [
        f"{field.name} {getattr(current, field.name)} (wanted: {getattr(wanted, field.name)})"
        for field in fields(KeyValueTableConfiguration)
        if getattr(current, field.name) != getattr(wanted, field.name)
    ]
    if not same_backend(current):
        differences.append(f"backend {_told(current, wanted)} (wanted: {_told(wanted, current)})")
    if differences:
        raise KeyValueTableExistsError(
            f"{name} exists with another configuration: {', '.join(differences)}.",
            "Take it as it is, update its limits (update), or use another name.",
            scope=name.scope,
            table=name.table,
        )
    return TableTransition(False, current)


def decide_update(
    current: StoredTable | None, configuration: KeyValueTableConfiguration, name: TableName
) -> TableTransition:
    """Give the table these limits; the answer is whether they are others."""
    table = existing(current, name)
    if table.partitions != configuration.partitions:
        raise KeyValueTableError(
            f"{name} has {table.partitions} partitions: expected the same, found {configuration.partitions}. The "
            "partitions of a table never change, because its keys are hashed to them.",
            "Create a table of another name with them, and copy the entries.",
            scope=name.scope,
            table=name.table,
        )
    after = table.configured(configuration)
    return TableTransition(after != table, after)


def decide_seal(current: StoredTable | None, name: TableName) -> TableTransition:
    """Seal the table; the answer is whether it was open."""
    table = existing(current, name)
    if table.state is TableState.CREATING:
        return TableTransition(None, table)
    if table.state is TableState.ACTIVE:
        return TableTransition(True, table.in_state(TableState.SEALING))
    return TableTransition(False, table)


def decide_delete(current: StoredTable | None) -> TableTransition:
    """Delete the table, in whatever state; the answer is whether there was one."""
    if current is None or current.state is TableState.DELETING:
        return TableTransition(False, current)
    return TableTransition(True, current.in_state(TableState.DELETING))


def finished(current: StoredTable | None, done: StoredTable) -> StoredTable | None:
    """Return the entry once the backend has done what the state of `done` says; what others did meanwhile stays."""
    if current is None or current.incarnation != done.incarnation or current.state is not done.state:
        return current
    after = {TableState.CREATING: TableState.ACTIVE, TableState.SEALING: TableState.SEALED}
    return current.in_state(after[current.state]) if current.state in after else None


def is_gone(current: StoredTable | None, table: StoredTable) -> bool:
    """Whether a table was deleted, or is being deleted, going by the entry that has its name now."""
    return current is None or current.incarnation != table.incarnation or current.state is TableState.DELETING


def existing(current: StoredTable | None, name: TableName) -> StoredTable:
    """Return the entry of a table that is there. Raises KeyValueTableNotFoundError, also for one being deleted."""
    if current is None:
        raise KeyValueTableNotFoundError(
            f"there is no {name}.", "Check the name, or create it.", scope=name.scope, table=name.table
        )
    if current.state is TableState.DELETING:
        raise KeyValueTableNotFoundError(
            f"{name} is being deleted: somebody has begun it, and it has not ended.",
            "Whoever deletes or creates it now ends that, and what it holds is gone.",
            scope=name.scope,
            table=name.table,
        )
    return current


def _told(table: StoredTable, other: StoredTable) -> str:
    """Return the settings of a table's backend that are not those of the other one's; all, where the kind differs."""
    is_alike = table.backend.get("backend") == other.backend.get("backend")
    differing = {
        name: value
        for name, value in table.backend.items()
        if value is not None and not (is_alike and other.backend.get(name) == value)
    }
    return ", ".join(f"{name}={value!r}" for name, value in differing.items()) or "the same without them"
