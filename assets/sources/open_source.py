"""Opens what a bounded dataset's versions come from: a stream, folders of files, or a query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.inputs_besides_streams import FileSource, QuerySource

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.version_source import VersionSource
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


def open_source(
    systems: Mapping[str, StreamSystem],
    spec: AdjunctDataset,
    lake: Lake,
    *,
    partition: str | None = None,
) -> VersionSource:
    """Return the versions that a bounded dataset is made from, whatever they arrive by.

    `partition` is the name of the one version that is asked for, where the dataset declares version partitions; a
    stream gives its versions in its own order. Raises DatasetError for an input that can't make the dataset.
    """
    from dagster_adjunct.assets.sources.stream_source import StreamSource

    if isinstance(spec.input, FileSource):
        from dagster_adjunct.assets.sources.file_source import FileVersions

        return FileVersions(spec, spec.input, partition)
    if isinstance(spec.input, QuerySource):
        from dagster_adjunct.assets.sources.query_source import QueryVersions

        return QueryVersions(spec, spec.input, partition, now=lake.now)
    return StreamSource.of(systems, spec, now=lake.now)
