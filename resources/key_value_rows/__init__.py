"""A key-value table as a remote table: its records are JSON, and are changed optimistically."""

from dagster_adjunct.resources.backends.columns import register_backend
from dagster_adjunct.resources.key_value_rows.rows import KeyValueRows

register_backend("key-value", KeyValueRows)

__all__ = ["KeyValueRows"]
