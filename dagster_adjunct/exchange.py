"""Versions handed to other engines without a copy: DuckDB, Polars, pyarrow, Iceberg; and the
tables that applications write for them.
"""

from dagster_adjunct.assets.exchange.handover import StreamView as StreamView
from dagster_adjunct.assets.exchange.handover import duckdb_view as duckdb_view
from dagster_adjunct.assets.exchange.handover import parquet_files as parquet_files
from dagster_adjunct.assets.exchange.handover import polars_frame as polars_frame
from dagster_adjunct.assets.exchange.handover import pyarrow_dataset as pyarrow_dataset
from dagster_adjunct.assets.exchange.handover import stream_view as stream_view
from dagster_adjunct.assets.exchange.iceberg import IcebergSnapshot as IcebergSnapshot
from dagster_adjunct.assets.exchange.iceberg import publish_to_iceberg as publish_to_iceberg
from dagster_adjunct.assets.exchange.iceberg import register_in_iceberg as register_in_iceberg
from dagster_adjunct.assets.exchange.iceberg import release_from_iceberg as release_from_iceberg
from dagster_adjunct.resources.iceberg import IcebergTable as IcebergTable
from dagster_adjunct.resources.output_tables.delta import DeltaLakeTable as DeltaLakeTable
