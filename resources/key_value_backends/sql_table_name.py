"""What a key-value table is called in a database of tables."""

from __future__ import annotations

import re

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.table_segment import TableId

_INCARNATION = re.compile(r"[0-9a-f]{16}")


def sql_table_name(table: TableId) -> str:
    """Return the name of the table with the entries. Raises ConfigurationError for an incarnation that is none."""
    if not _INCARNATION.fullmatch(table.incarnation):
        raise ConfigurationError(
            f"key-value table {table} has the incarnation {table.incarnation!r}: expected 16 hexadecimal digits.",
            "Open it through its manager.",
            table=str(table),
        )
    return f"kvt_{table.incarnation}"
