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
    MemoryTable,
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
from dagster_adjunct.resources.tables.changes import Changes
from dagster_adjunct.resources.tables.layer import Capabilities
from dagster_adjunct.resources.tables.operation import Operation, OperationKind, RowEntries
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State
from dagster_adjunct.resources.tables.table_functions import StoreFunction

__all__ = [
    "Backoff",
    "BatchProvider",
    "BlockingTable",
    "Cache",
    "Capabilities",
    "Changes",
    "DatasetTable",
    "DynamoDbTable",
    "HttpExtra",
    "HttpTable",
    "KeyValueRows",
    "MemoryTable",
    "MetricsHook",
    "Operation",
    "OperationKind",
    "Outcomes",
    "PostgresTable",
    "Problem",
    "PrometheusTables",
    "RateLimit",
    "RedisTable",
    "RemoteTable",
    "RetryPolicy",
    "RowEntries",
    "SqliteTable",
    "State",
    "StoreFunction",
    "TableMetrics",
    "TableReadFunction",
    "TableWriteFunction",
    "UpdateMessage",
    "per_byte",
    "per_capacity_unit",
    "register_backend",
    "report_tables_to",
]

# What layers and stores make for each request is not looked at.
_PLAIN = {"Changes", "Operation", "Problem", "RowEntries"}
guard(globals(), [name for name in __all__ if name not in _PLAIN])
