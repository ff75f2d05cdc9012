"""The entries of datasets that a batch's joins meet, in the versions that it was begun with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dagster_adjunct.assets.sources.decode_changes import stored_schema
from dagster_adjunct.orchestration.step.batch_compiler.timed_rows import no_rows, read_over_time, timed_rows
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.operators.spec.compiling import TimedRows
    from dagster_adjunct.orchestration.step.batch_compiler.known_batch import KnownBatch
    from dagster_adjunct.orchestration.step.batch_records.local_sends import LocalSends


def entries_met(
    known: KnownBatch, dataset: str, local: LocalSends, nothing: Callable[[AdjunctDataset, Schema], DataFrame]
) -> tuple[DataFrame, Schema]:
    """Return the entries of a dataset and their columns: of a local table with what the batch has sent to it.

    One that is held back by nothing and not built yet holds `nothing`, in the columns that it will have.
    """
    declared = known.app.dataset(dataset)
    if declared.is_owned_by(known.app.name):
        reader = local.reader(dataset)
        return reader.frame(known.spark), reader.schema
    view = known.inputs.views[dataset]
    if view is None:
        schema = _declared_schema(known, declared)
        return nothing(declared, schema), schema
    return view.frame(known.spark), view.schema


def rows_over_time(known: KnownBatch, dataset: str) -> TimedRows:
    """Return what was valid when in a dataset, of the version or versions that the batch was begun with."""
    declared, view = known.app.dataset(dataset), known.inputs.views[dataset]
    read = read_over_time(declared, view, known.inputs.over_time.get(dataset))
    if read is None:
        return no_rows(known.spark, known.context.lake.store, declared, _declared_schema(known, declared))
    return timed_rows(known.spark, read)


def _declared_schema(known: KnownBatch, dataset: AdjunctDataset) -> Schema:
    if not isinstance(dataset.input, str):
        return stored_schema(dataset, dataset.input.schema)
    records = known.system_of(dataset.input).info(split_stream_name(dataset.input)[1]).schema
    return Schema(()) if records is None else stored_schema(dataset, records)
