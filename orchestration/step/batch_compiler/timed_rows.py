"""What joins by time meet in a batch: the rows of a dataset over time, of the versions that its intent pins."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.reading.versions_over_time import VersionsOverTime
from dagster_adjunct.assets.versions.sealed_version import layout_of
from dagster_adjunct.orchestration.operators.spec.compiling import TimedRows
from dagster_adjunct.resources.bucketing.bucketed_tables import bucketed_frame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.unbounded.transient_version import TransientVersion
    from dagster_adjunct.resources.objects.object_store import ObjectStore
    from dagster_adjunct.resources.schemas.schema import Schema

_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)


def timed_rows(spark: SparkSession, read: VersionReader | VersionsOverTime) -> TimedRows:
    """Return the rows over time of a version with history, or of versions."""
    if isinstance(read, VersionsOverTime):
        edge = read.edge  # a version before the oldest one may have been discarded, or was never delivered
    else:
        edge = None if read.sealed.history is None else read.sealed.history.pruned
    known_from = None if edge is None else _BEGIN + timedelta(microseconds=edge)
    return TimedRows(read.history_frame(spark), read.schema, known_from)


def no_rows(spark: SparkSession, store: ObjectStore, dataset: AdjunctDataset, schema: Schema) -> TimedRows:
    """Return what is met of a dataset that has no version yet: nothing, in its buckets."""
    layout = layout_of(schema, dataset.key, dataset.partition_by, dataset.partitions, True, over_time=True)
    return TimedRows(bucketed_frame(spark, store, dataset.name, layout, []), schema, None)


def read_over_time(
    dataset: AdjunctDataset,
    view: VersionReader | TransientVersion | None,
    pinned: VersionsOverTime | None,
) -> VersionReader | VersionsOverTime | None:
    """Return what is read of a dataset over time: the versions that are pinned, else this one; None: there is none."""
    if pinned is not None or not isinstance(view, VersionReader):
        return pinned
    return view if dataset.follows_changes else VersionsOverTime(view.store, dataset.name, [view.sealed])
