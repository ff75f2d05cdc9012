"""Tables in other stores that applications read and write, and backends of your own."""

from __future__ import annotations

from dagster_adjunct._arguments import guard
from dagster_adjunct.assets.reading.dataset_table import DatasetTable
from dagster_adjunct.resources.backends import (
    DynamoDbTable,
    HttpExtra,
    HttpTable,
    PostgresTable,
    RedisTable,
    SqliteTable,
    register_backend,
)
from dagster_adjunct.resources.key_value_rows import KeyValueRows
from dagster_adjunct.resources.tables import (
    Backoff,
    BatchProvider,
    BlockingTable,
    Cache,
    MetricsHook,
    PrometheusTables,
    RateLimit,
    RemoteTable,
    RetryPolicy,
    TableMetrics,
    TableReadFunction,
    TableWriteFunction,
    UpdateMessage,
    per_byte,
    per_capacity_unit,
    report_tables_to,
)

__all__ = [
    "Backoff",
    "BatchProvider",
    "BlockingTable",
    "Cache",
    "DatasetTable",
    "DynamoDbTable",
    "HttpExtra",
    "HttpTable",
    "KeyValueRows",
    "MetricsHook",
    "PostgresTable",
    "PrometheusTables",
    "RateLimit",
    "RedisTable",
    "RemoteTable",
    "RetryPolicy",
    "SqliteTable",
    "TableMetrics",
    "TableReadFunction",
    "TableWriteFunction",
    "UpdateMessage",
    "per_byte",
    "per_capacity_unit",
    "register_backend",
    "report_tables_to",
]

guard(globals(), __all__)
