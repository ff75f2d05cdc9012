"""Versions handed to other engines without a copy: DuckDB, Polars, pyarrow, Iceberg."""

from __future__ import annotations

from dagster_adjunct.assets.exchange.handover import (
    StreamView,
    duckdb_view,
    parquet_files,
    polars_frame,
    pyarrow_dataset,
    stream_view,
)
from dagster_adjunct.assets.exchange.iceberg import (
    IcebergSnapshot,
    IcebergTable,
    publish_to_iceberg,
    register_in_iceberg,
    release_from_iceberg,
)

__all__ = [
    "IcebergSnapshot",
    "IcebergTable",
    "StreamView",
    "duckdb_view",
    "parquet_files",
    "polars_frame",
    "publish_to_iceberg",
    "pyarrow_dataset",
    "register_in_iceberg",
    "release_from_iceberg",
    "stream_view",
]
