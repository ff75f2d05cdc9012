"""The versions of datasets that a batch reads, and their columns."""

from __future__ import annotations

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, OwnedBy
from dagster_adjunct.assets.reading.valid_time import Reader, VersionsOverTime
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.sources.entries import derive_stored_schema
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.schemas.schema import Schema


def schema_of_dataset(planned: PlannedBatch, dataset: str, *, over_time: bool = False) -> Schema:
    """Return the columns of the entries that a batch reads of a dataset, or of its rows over time.

    Without a version, they are those that it will have; none if its input has none yet.
    """
    declared = planned.app.dataset(dataset)
    is_own = planned.is_dry_run or declared.is_owned_by(planned.app.name)
    if isinstance(declared.input, OwnedBy) and is_own:
        return declared.input.schema
    read = reader_over_time(planned, dataset)[0] if over_time else planned.inputs.views[dataset]
    return _declared_schema(planned, declared) if read is None else read.schema


def _declared_schema(planned: PlannedBatch, dataset: AdjunctDataset) -> Schema:
    if not isinstance(dataset.input, str):
        return derive_stored_schema(dataset, dataset.input.schema)
    stream = split_stream_name(dataset.input)[1]
    records = planned.system_of(dataset.input).info(stream).schema
    return Schema(()) if records is None else derive_stored_schema(dataset, records)


def reader_over_time(planned: PlannedBatch, dataset: str) -> tuple[Reader | None, int | None]:
    """Return a reader of a dataset's rows over time (None if it has no version yet), and the
    time from which its history is known, in microseconds (None if all of it is known).
    """
    view = planned.inputs.views[dataset]
    versions = planned.inputs.over_time.get(dataset)
    if versions is None and isinstance(view, VersionReader):
        if planned.app.dataset(dataset).follows_changes:
            history = view.sealed.history
            return view, None if history is None else history.pruned
        versions = VersionsOverTime(view.store, dataset, [view.sealed])
    if versions is None:
        return None, None
    return versions, versions.edge  # versions before it may have been discarded
