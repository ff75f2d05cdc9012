"""Where a dataset's contents come from besides streams: files, queries, and snapshots to begin with."""

from __future__ import annotations

from dagster_adjunct.assets.declaration.snapshots import (
    InitialLoad,
    ParquetSnapshot,
    PostgresSnapshot,
    QuerySnapshot,
    Snapshot,
)
from dagster_adjunct.assets.declaration.sources import Computation, FileSource, QuerySource

__all__ = [
    "Computation",
    "FileSource",
    "InitialLoad",
    "ParquetSnapshot",
    "PostgresSnapshot",
    "QuerySnapshot",
    "QuerySource",
    "Snapshot",
]
