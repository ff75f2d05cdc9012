"""Open the version source of a bounded dataset: a stream, files, a query or a table."""

from __future__ import annotations

from collections.abc import Mapping

from dagster_adjunct.assets.declaration.dataset import BoundedDataset, FileSource, QuerySource
from dagster_adjunct.assets.declaration.table_versions import DeltaVersions, IcebergVersions
from dagster_adjunct.assets.sources.file_source import FileVersions
from dagster_adjunct.assets.sources.query_source import QueryVersions
from dagster_adjunct.assets.sources.stream_source import StreamSource
from dagster_adjunct.assets.sources.table_source import TableStateVersions
from dagster_adjunct.assets.sources.version_source import VersionSource
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import StreamSystem


def open_source(
    systems: Mapping[str, StreamSystem],
    spec: BoundedDataset,
    lake: Lake,
    *,
    partition: str | None = None,
) -> VersionSource:
    """Return the version source of a bounded dataset: a stream, files, a query or a table.

    `partition` is the name of the one requested version, if the dataset declares version
    partitions; a stream delivers versions in its own order. Raises DatasetError for an input that
    does not fit the dataset.
    """
    if isinstance(spec.input, FileSource):
        return FileVersions(spec, spec.input, partition)
    if isinstance(spec.input, QuerySource):
        return QueryVersions(spec, spec.input, partition, now=lake.now)
    if isinstance(spec.input, IcebergVersions | DeltaVersions):
        return TableStateVersions(spec, spec.input, partition)
    return StreamSource(systems, spec, now=lake.now)
