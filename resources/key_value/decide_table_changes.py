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
class Decision:
    """`entry` is to be stored (None: nothing is there, and stays so). What it leaves unfinished is then finished.

    `answer` is what the caller is told after that. None: what was there comes first, and then it is decided again.
    """

    answer: bool | None
    entry: StoredTable | None


def decide_create(
    found: StoredTable | None, wanted: StoredTable, name: TableName, same_backend: Callable[[StoredTable], bool]
) -> Decision:
    """Make `wanted`, or find that it is there. Raises KeyValueTableExistsError where that is configured otherwise."""
    if found is None:
        return Decision(True, wanted)
    if found.state is TableState.DELETING:
        return Decision(None, found)
    differences = [
        f"{field.name} {getattr(found, field.name)} (wanted: {getattr(wanted, field.name)})"
        for field in fields(KeyValueTableConfiguration)
        if getattr(found, field.name) != getattr(wanted, field.name)
    ]
    if not same_backend(found):
        differences.append(f"backend {_told(found, wanted)} (wanted: {_told(wanted, found)})")
    if differences:
        raise KeyValueTableExistsError(
            f"{name} exists with another configuration: {', '.join(differences)}.",
            "Take it as it is, update its limits (update), or use another name.",
            scope=name.scope,
            table=name.table,
        )
    return Decision(False, found)


def decide_update(found: StoredTable | None, configuration: KeyValueTableConfiguration, name: TableName) -> Decision:
    """Give the table these limits; the answer is whether they are others."""
    table = existing(found, name)
    if table.partitions != configuration.partitions:
        raise KeyValueTableError(
            f"{name} has {table.partitions} partitions: expected the same, found {configuration.partitions}. The "
            "partitions of a table never change, because its keys are hashed to them.",
            "Create a table of another name with them, and copy the entries.",
            scope=name.scope,
            table=name.table,
        )
    after = table.configured(configuration)
    return Decision(after != table, after)


def decide_seal(found: StoredTable | None, name: TableName) -> Decision:
    """Seal the table; the answer is whether it was open."""
    table = existing(found, name)
    if table.state is TableState.CREATING:
        return Decision(None, table)
    if table.state is TableState.ACTIVE:
        return Decision(True, table.in_state(TableState.SEALING))
    return Decision(False, table)


def decide_delete(found: StoredTable | None) -> Decision:
    """Delete the table, in whatever state; the answer is whether there was one."""
    if found is None or found.state is TableState.DELETING:
        return Decision(False, found)
    return Decision(True, found.in_state(TableState.DELETING))


def finished(found: StoredTable | None, done: StoredTable) -> StoredTable | None:
    """Return the entry once the backend has done what the state of `done` says; what others did meanwhile stays."""
    if found is None or found.incarnation != done.incarnation or found.state is not done.state:
        return found
    after = {TableState.CREATING: TableState.ACTIVE, TableState.SEALING: TableState.SEALED}
    return found.in_state(after[found.state]) if found.state in after else None


def is_gone(found: StoredTable | None, table: StoredTable) -> bool:
    """Whether a table was deleted, or is being deleted, going by the entry that has its name now."""
    return found is None or found.incarnation != table.incarnation or found.state is TableState.DELETING


def existing(found: StoredTable | None, name: TableName) -> StoredTable:
    """Return the entry of a table that is there. Raises KeyValueTableNotFoundError, also for one being deleted."""
    if found is None or found.state is TableState.DELETING:
        raise KeyValueTableNotFoundError(
            f"there is no {name}.", "Check the name, or create it.", scope=name.scope, table=name.table
        )
    return found


def _told(table: StoredTable, other: StoredTable) -> str:
    """Return the settings of a table's backend that are not those of the other one's; all, where the kind differs."""
    is_alike = table.backend.get("backend") == other.backend.get("backend")
    differing = {
        name: value
        for name, value in table.backend.items()
        if value is not None and not (is_alike and other.backend.get(name) == value)
    }
    return ", ".join(f"{name}={value!r}" for name, value in differing.items()) or "the same without them"
