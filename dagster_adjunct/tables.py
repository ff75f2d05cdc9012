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
    Batch,
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
from dagster_adjunct.resources.tables.arrow_entries import ArrowEntries
from dagster_adjunct.resources.tables.attempt_layer import AttemptLayer
from dagster_adjunct.resources.tables.batch_handler import BatchHandler
from dagster_adjunct.resources.tables.batch_layer import BatchLayer
from dagster_adjunct.resources.tables.batch_processor import BatchProcessor
from dagster_adjunct.resources.tables.cache_layer import CacheLayer
from dagster_adjunct.resources.tables.column_changes import Changes
from dagster_adjunct.resources.tables.function_layer import FunctionLayer
from dagster_adjunct.resources.tables.layer import Capabilities, Layer
from dagster_adjunct.resources.tables.layer_as_function import LayerAsFunction
from dagster_adjunct.resources.tables.operation import (
    Conditions,
    Mark,
    Operation,
    OperationKind,
    RowEntries,
    position_of,
)
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State
from dagster_adjunct.resources.tables.rate_layer import RateLayer
from dagster_adjunct.resources.tables.retry_layer import RetryLayer
from dagster_adjunct.resources.tables.table_functions import StoreFunction
from dagster_adjunct.resources.tables.update_contract_layer import UpdateContractLayer

__all__ = [
    "ArrowEntries",
    "AttemptLayer",
    "Backoff",
    "Batch",
    "BatchHandler",
    "BatchLayer",
    "BatchProcessor",
    "BatchProvider",
    "BlockingTable",
    "Cache",
    "CacheLayer",
    "Capabilities",
    "Changes",
    "Conditions",
    "DatasetTable",
    "DynamoDbTable",
    "FunctionLayer",
    "HttpExtra",
    "HttpTable",
    "KeyValueRows",
    "Layer",
    "LayerAsFunction",
    "Mark",
    "MemoryTable",
    "MetricsHook",
    "Operation",
    "OperationKind",
    "Outcomes",
    "PostgresTable",
    "Problem",
    "PrometheusTables",
    "RateLayer",
    "RateLimit",
    "RedisTable",
    "RemoteTable",
    "RetryLayer",
    "RetryPolicy",
    "RowEntries",
    "SqliteTable",
    "State",
    "StoreFunction",
    "TableMetrics",
    "TableReadFunction",
    "TableWriteFunction",
    "UpdateContractLayer",
    "UpdateMessage",
    "per_byte",
    "per_capacity_unit",
    "position_of",
    "register_backend",
    "report_tables_to",
]

# What layers and stores make for each request is not looked at.
_PLAIN = {"ArrowEntries", "Batch", "Changes", "Conditions", "Mark", "Operation", "Problem", "RowEntries"}
guard(globals(), [name for name in __all__ if name not in _PLAIN])
