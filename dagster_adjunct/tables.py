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
from dagster_adjunct.resources.tables import (
    Backoff,
    BatchProvider,
    BlockingTable,
    Cache,
    RateLimit,
    RemoteTable,
    RetryPolicy,
    TableMetrics,
    TableReadFunction,
    TableWriteFunction,
    UpdateMessage,
)
from dagster_adjunct.resources.tables.changes import Changes
from dagster_adjunct.resources.tables.layer import Capabilities
from dagster_adjunct.resources.tables.operation import Mark, Operation, OperationKind, RowEntries
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
    "Mark",
    "Operation",
    "OperationKind",
    "Outcomes",
    "PostgresTable",
    "Problem",
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
    "register_backend",
]

# Every request is made of these, and their arguments are looked at as entries.
_REQUESTS = {"Changes", "Mark", "Operation", "OperationKind", "Outcomes", "Problem", "RowEntries", "State"}

guard(globals(), [name for name in __all__ if name not in _REQUESTS])
