"""The Table API: records by key in other stores, with partial updates (SAMZA-2709)."""

from resources.tables.blocking import BlockingTable
from resources.tables.clock import Clock, ManualClock, SystemClock
from resources.tables.functions import (
    PutsIfAbsent,
    TableFunction,
    TableReadFunction,
    TableWriteFunction,
    UpdatesWithDefaults,
)
from resources.tables.memory import MemoryTable
from resources.tables.metrics import TableMetrics
from resources.tables.rate_limit import RateLimit
from resources.tables.remote import RemoteTable
from resources.tables.retry import RetryPolicy
from resources.tables.update import UpdateContract, UpdateMessage

__all__ = [
    "BlockingTable",
    "Clock",
    "ManualClock",
    "MemoryTable",
    "PutsIfAbsent",
    "RateLimit",
    "RemoteTable",
    "RetryPolicy",
    "SystemClock",
    "TableFunction",
    "TableMetrics",
    "TableReadFunction",
    "TableWriteFunction",
    "UpdateContract",
    "UpdateMessage",
    "UpdatesWithDefaults",
]
