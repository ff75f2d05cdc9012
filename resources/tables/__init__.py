"""The Table API: records by key in other stores, with partial updates (SAMZA-2709)."""

from dagster_adjunct.resources.tables.batch import Batch, BatchProvider
from dagster_adjunct.resources.tables.blocking_table import BlockingTable
from dagster_adjunct.resources.tables.cache import Cache
from dagster_adjunct.resources.tables.memory_table import MemoryTable
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.tables.metrics_hooks import MetricsHook, report_tables_to
from dagster_adjunct.resources.tables.partial_update import UpdateContract, UpdateMessage
from dagster_adjunct.resources.tables.prometheus_metrics import PrometheusTables
from dagster_adjunct.resources.tables.rate_limit import RateLimit, per_byte, per_capacity_unit
from dagster_adjunct.resources.tables.remote_table import RemoteTable
from dagster_adjunct.resources.tables.retry import Backoff, RetryPolicy
from dagster_adjunct.resources.tables.table_functions import TableReadFunction, TableWriteFunction

__all__ = [
    "Backoff",
    "Batch",
    "BatchProvider",
    "BlockingTable",
    "Cache",
    "MemoryTable",
    "MetricsHook",
    "PrometheusTables",
    "RateLimit",
    "RemoteTable",
    "RetryPolicy",
    "TableMetrics",
    "TableReadFunction",
    "TableWriteFunction",
    "UpdateContract",
    "UpdateMessage",
    "per_byte",
    "per_capacity_unit",
    "report_tables_to",
]
