"""The errors of tables that have come to their end while somebody had them open."""

from __future__ import annotations

from dagster_adjunct.resources.key_value.table_segment import TableId
from dagster_adjunct.resources.key_value_errors import KeyValueTableNotFoundError, KeyValueTableSealedError


def deleted_table(table: TableId, label: str) -> KeyValueTableNotFoundError:
    """Return the error of a table that is not there any more; `label` says which it is, and where it was."""
    return KeyValueTableNotFoundError(
        f"{label} was deleted since it was opened.", "Open it again by its name.", scope=table.scope, table=table.name
    )


def sealed_table(table: TableId, label: str) -> KeyValueTableSealedError:
    """Return the error of a write to a table that is sealed."""
    return KeyValueTableSealedError(
        f"{label} is sealed: it is read, and not written any more.",
        "Write to another table.",
        scope=table.scope,
        table=table.name,
    )
