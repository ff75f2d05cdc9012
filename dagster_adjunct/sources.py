"""Where a dataset's contents come from besides streams: files, queries, and snapshots to begin with."""

from __future__ import annotations

from dagster_adjunct._arguments import guard
from dagster_adjunct.assets.declaration.initial_load import (
    InitialLoad,
    ParquetSnapshot,
    QuerySnapshot,
    Snapshot,
)
from dagster_adjunct.assets.declaration.inputs_besides_streams import Computation, FileSource, QuerySource
from dagster_adjunct.assets.declaration.postgres_snapshot import PostgresSnapshot

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

guard(globals(), __all__)
