"""Tables in other stores that applications read and write, and backends of your own."""

from typing import TYPE_CHECKING

_NAMES = {  # what is imported below for type checkers; tests compare the two
    "dagster_adjunct.assets.reading.dataset": ("DatasetTable",),
    "dagster_adjunct.resources.table_backends.columns": ("register_backend",),
    "dagster_adjunct.resources.table_backends.dynamodb": ("DynamoDbTable",),
    "dagster_adjunct.resources.table_backends.http": ("HttpExtra", "HttpTable"),
    "dagster_adjunct.resources.table_backends.memory": ("MemoryTable",),
    "dagster_adjunct.resources.table_backends.postgres": ("PostgresTable",),
    "dagster_adjunct.resources.table_backends.redis": ("RedisTable",),
    "dagster_adjunct.resources.table_backends.sqlite": ("SqliteTable",),
    "dagster_adjunct.resources.tables.arrow": ("ArrowEntries",),
    "dagster_adjunct.resources.tables.batching": ("BatchLayer", "BatchProvider"),
    "dagster_adjunct.resources.tables.cache": ("Cache", "CacheLayer"),
    "dagster_adjunct.resources.tables.function_layer": ("FunctionLayer", "LayerAsFunction"),
    "dagster_adjunct.resources.tables.functions": (
        "StoreFunction",
        "TableReadFunction",
        "TableUse",
        "TableWriteFunction",
    ),
    "dagster_adjunct.resources.tables.metrics": (
        "MetricsHook",
        "PrometheusTables",
        "TableMetrics",
        "report_tables_to",
    ),
    "dagster_adjunct.resources.tables.operation": (
        "Capabilities",
        "Changes",
        "Conditions",
        "Layer",
        "Mark",
        "Operation",
        "OperationKind",
        "Outcomes",
        "Problem",
        "RowEntries",
        "State",
        "UpdateMessage",
        "position_of",
    ),
    "dagster_adjunct.resources.tables.rate": (
        "RateLayer",
        "RateLimit",
        "per_byte",
        "per_capacity_unit",
    ),
    "dagster_adjunct.resources.tables.retry": (
        "AttemptLayer",
        "Backoff",
        "RetryLayer",
        "RetryPolicy",
    ),
    "dagster_adjunct.resources.tables.table": ("BlockingTable", "RemoteTable"),
    "dagster_adjunct.resources.tables.update_contract": ("UpdateContractLayer",),
}

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.dataset import DatasetTable as DatasetTable
    from dagster_adjunct.resources.table_backends.columns import (
        register_backend as register_backend,
    )
    from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable as DynamoDbTable
    from dagster_adjunct.resources.table_backends.http import HttpExtra as HttpExtra
    from dagster_adjunct.resources.table_backends.http import HttpTable as HttpTable
    from dagster_adjunct.resources.table_backends.memory import MemoryTable as MemoryTable
    from dagster_adjunct.resources.table_backends.postgres import PostgresTable as PostgresTable
    from dagster_adjunct.resources.table_backends.redis import RedisTable as RedisTable
    from dagster_adjunct.resources.table_backends.sqlite import SqliteTable as SqliteTable
    from dagster_adjunct.resources.tables.arrow import ArrowEntries as ArrowEntries
    from dagster_adjunct.resources.tables.batching import BatchLayer as BatchLayer
    from dagster_adjunct.resources.tables.batching import BatchProvider as BatchProvider
    from dagster_adjunct.resources.tables.cache import Cache as Cache
    from dagster_adjunct.resources.tables.cache import CacheLayer as CacheLayer
    from dagster_adjunct.resources.tables.function_layer import FunctionLayer as FunctionLayer
    from dagster_adjunct.resources.tables.function_layer import LayerAsFunction as LayerAsFunction
    from dagster_adjunct.resources.tables.functions import StoreFunction as StoreFunction
    from dagster_adjunct.resources.tables.functions import TableReadFunction as TableReadFunction
    from dagster_adjunct.resources.tables.functions import TableUse as TableUse
    from dagster_adjunct.resources.tables.functions import TableWriteFunction as TableWriteFunction
    from dagster_adjunct.resources.tables.metrics import MetricsHook as MetricsHook
    from dagster_adjunct.resources.tables.metrics import PrometheusTables as PrometheusTables
    from dagster_adjunct.resources.tables.metrics import TableMetrics as TableMetrics
    from dagster_adjunct.resources.tables.metrics import report_tables_to as report_tables_to
    from dagster_adjunct.resources.tables.operation import Capabilities as Capabilities
    from dagster_adjunct.resources.tables.operation import Changes as Changes
    from dagster_adjunct.resources.tables.operation import Conditions as Conditions
    from dagster_adjunct.resources.tables.operation import Layer as Layer
    from dagster_adjunct.resources.tables.operation import Mark as Mark
    from dagster_adjunct.resources.tables.operation import Operation as Operation
    from dagster_adjunct.resources.tables.operation import OperationKind as OperationKind
    from dagster_adjunct.resources.tables.operation import Outcomes as Outcomes
    from dagster_adjunct.resources.tables.operation import Problem as Problem
    from dagster_adjunct.resources.tables.operation import RowEntries as RowEntries
    from dagster_adjunct.resources.tables.operation import State as State
    from dagster_adjunct.resources.tables.operation import UpdateMessage as UpdateMessage
    from dagster_adjunct.resources.tables.operation import position_of as position_of
    from dagster_adjunct.resources.tables.rate import RateLayer as RateLayer
    from dagster_adjunct.resources.tables.rate import RateLimit as RateLimit
    from dagster_adjunct.resources.tables.rate import per_byte as per_byte
    from dagster_adjunct.resources.tables.rate import per_capacity_unit as per_capacity_unit
    from dagster_adjunct.resources.tables.retry import AttemptLayer as AttemptLayer
    from dagster_adjunct.resources.tables.retry import Backoff as Backoff
    from dagster_adjunct.resources.tables.retry import RetryLayer as RetryLayer
    from dagster_adjunct.resources.tables.retry import RetryPolicy as RetryPolicy
    from dagster_adjunct.resources.tables.table import BlockingTable as BlockingTable
    from dagster_adjunct.resources.tables.table import RemoteTable as RemoteTable
    from dagster_adjunct.resources.tables.update_contract import (
        UpdateContractLayer as UpdateContractLayer,
    )
else:
    from dagster_adjunct.resources.lazy_modules import lazy_names

    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
