"""The errors of tables that have come to their end while somebody had them open."""

from __future__ import annotations

from dagster_adjunct.resources.errors import TableNotFoundError
from dagster_adjunct.resources.key_value.table_segment import TableId
from dagster_adjunct.resources.key_value_errors import KeyValueTableNotFoundError, KeyValueTableSealedError


def deleted_table(table: TableId, label: str) -> KeyValueTableNotFoundError:
    """Return the error of a table that is not there any more; `label` says which it is, and where it was."""
    return KeyValueTableNotFoundError(
        f"{label} was deleted since it was opened.",
        "Open it again by its name. If that finds it, and it is still not there, bring its store back from a copy.",
        scope=table.scope,
        table=table.name,
    )


def lost_table(table: TableId, label: str) -> TableNotFoundError:
    """Return the error of a table that the lake knows, and whose store is not there."""
    return TableNotFoundError(
        f"{label} is gone: the lake knows the table, and there is none.",
        "Bring it back from a copy; or give it up and create it anew: "
        f"adjunct kvt delete {table.scope}/{table.name} --forget.",
        table=label,
    )


def sealed_table(table: TableId, label: str) -> KeyValueTableSealedError:
    """Return the error of a write to a table that is sealed."""
    return KeyValueTableSealedError(
        f"{label} is sealed: it is read, and not written any more.",
        "Write to another table.",
        scope=table.scope,
        table=table.name,
    )
