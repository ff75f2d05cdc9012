"""Tables in other stores that applications read and write, and backends of your own."""

from __future__ import annotations

from dagster_adjunct.assets.reading.dataset import DatasetTable
from dagster_adjunct.resources.backends.columns import register_backend
from dagster_adjunct.resources.backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.backends.http import HttpExtra, HttpTable
from dagster_adjunct.resources.backends.postgres import PostgresTable
from dagster_adjunct.resources.backends.redis import RedisTable
from dagster_adjunct.resources.backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.arrow import ArrowEntries
from dagster_adjunct.resources.tables.batching import Batch, BatchHandler, BatchLayer, BatchProcessor, BatchProvider
from dagster_adjunct.resources.tables.cache import Cache, CacheLayer
from dagster_adjunct.resources.tables.functions import (
    FunctionLayer,
    LayerAsFunction,
    StoreFunction,
    TableReadFunction,
    TableWriteFunction,
)
from dagster_adjunct.resources.tables.layers import Capabilities, Layer
from dagster_adjunct.resources.tables.memory import MemoryTable
from dagster_adjunct.resources.tables.metrics import MetricsHook, PrometheusTables, TableMetrics, report_tables_to
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Mark,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
    UpdateMessage,
    position_of,
)
from dagster_adjunct.resources.tables.rate import RateLayer, RateLimit, per_byte, per_capacity_unit
from dagster_adjunct.resources.tables.retry import AttemptLayer, Backoff, RetryLayer, RetryPolicy
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from dagster_adjunct.resources.tables.update_contract import UpdateContractLayer

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
