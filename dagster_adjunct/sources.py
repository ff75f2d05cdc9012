"""Where a dataset's contents come from besides streams: files, queries, Iceberg and Delta tables,
and snapshots to bootstrap from.
"""

from dagster_adjunct.assets.declaration.dataset import Computation as Computation
from dagster_adjunct.assets.declaration.dataset import FileSource as FileSource
from dagster_adjunct.assets.declaration.dataset import QuerySource as QuerySource
from dagster_adjunct.assets.declaration.snapshots import InitialLoad as InitialLoad
from dagster_adjunct.assets.declaration.snapshots import ParquetSnapshot as ParquetSnapshot
from dagster_adjunct.assets.declaration.snapshots import PostgresSnapshot as PostgresSnapshot
from dagster_adjunct.assets.declaration.snapshots import QuerySnapshot as QuerySnapshot
from dagster_adjunct.assets.declaration.snapshots import Snapshot as Snapshot
from dagster_adjunct.assets.declaration.table_versions import DeltaVersions as DeltaVersions
from dagster_adjunct.assets.declaration.table_versions import IcebergVersions as IcebergVersions
from dagster_adjunct.resources.file_streams.table_changes import delta_changes as delta_changes
from dagster_adjunct.resources.file_streams.table_changes import iceberg_changes as iceberg_changes
