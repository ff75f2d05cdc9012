"""Key-value tables as remote tables, whose records are JSON documents."""

from dagster_adjunct.resources.table_backends.key_value_rows import KeyValueRows as KeyValueRows
