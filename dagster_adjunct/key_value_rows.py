"""Key-value tables as remote tables, whose records are JSON documents."""

from __future__ import annotations

from dagster_adjunct.resources.key_value_rows.rows import KeyValueRows

__all__ = [
    "KeyValueRows",
]
