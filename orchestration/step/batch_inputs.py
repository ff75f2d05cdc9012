"""The entries of datasets that a batch's joins read, in the versions named in its intent."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.history import VersionsOverTime
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.sources.changes import derive_stored_schema
from dagster_adjunct.assets.unbounded.transient import TransientVersion
from dagster_adjunct.assets.versions.version import build_layout
from dagster_adjunct.orchestration.operators.batch_context import TimedRows
from dagster_adjunct.orchestration.step.state import LocalTableWrites
from dagster_adjunct.resources.bucketing.files import bucketed_frame
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.orchestration.step.compile_batch import BatchGraph

_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)


def build_timed_rows(spark: SparkSession, read: VersionReader | VersionsOverTime) -> TimedRows:
    """Return the rows over time of a version with history, or of several versions."""
    if isinstance(read, VersionsOverTime):
        edge = read.edge  # earlier versions may have been discarded
    else:
        edge = None if read.sealed.history is None else read.sealed.history.pruned
    known_from = None if edge is None else _BEGIN + timedelta(microseconds=edge)
    return TimedRows(read.history_frame(spark), read.schema, known_from)


def empty_timed_rows(spark: SparkSession, store: ObjectStore, dataset: AdjunctDataset, schema: Schema) -> TimedRows:
    """Return the rows of a dataset that has no version yet: none, in its buckets."""
    layout = build_layout(schema, dataset.key, dataset.partition_by, dataset.partitions, True, over_time=True)
    return TimedRows(bucketed_frame(spark, store, dataset.name, layout, []), schema, None)


def choose_history(
    dataset: AdjunctDataset,
    view: VersionReader | TransientVersion | None,
    pinned: VersionsOverTime | None,
) -> VersionReader | VersionsOverTime | None:
    """Return what to read of a dataset over time: the pinned versions, else this version; None if there is none."""
    if pinned is not None or not isinstance(view, VersionReader):
        return pinned
    return view if dataset.follows_changes else VersionsOverTime(view.store, dataset.name, [view.sealed])


def read_entries(
    graph: BatchGraph, dataset: str, local: LocalTableWrites, nothing: Callable[[AdjunctDataset, Schema], DataFrame]
) -> tuple[DataFrame, Schema]:
    """Return the entries of a dataset and their columns; a local table includes what the batch has sent to it.

    For a dataset without `bootstrap` that is not built yet, return `nothing` with the columns that it will have.
    """
    declared = graph.app.dataset(dataset)
    if declared.is_owned_by(graph.app.name):
        reader = local.reader(dataset)
        return reader.frame(graph.spark), reader.schema
    view = graph.inputs.views[dataset]
    if view is None:
        schema = _declared_schema(graph, declared)
        return nothing(declared, schema), schema
    return view.frame(graph.spark), view.schema


def read_rows_over_time(graph: BatchGraph, dataset: str) -> TimedRows:
    """Return which rows of a dataset were valid when, in the version or versions of the batch."""
    declared, view = graph.app.dataset(dataset), graph.inputs.views[dataset]
    read = choose_history(declared, view, graph.inputs.over_time.get(dataset))
    if read is None:
        return empty_timed_rows(graph.spark, graph.context.lake.store, declared, _declared_schema(graph, declared))
    return build_timed_rows(graph.spark, read)


def _declared_schema(graph: BatchGraph, dataset: AdjunctDataset) -> Schema:
    if not isinstance(dataset.input, str):
        return derive_stored_schema(dataset, dataset.input.schema)
    records = graph.system_of(dataset.input).info(split_stream_name(dataset.input)[1]).schema
    return Schema(()) if records is None else derive_stored_schema(dataset, records)
