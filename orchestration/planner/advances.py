"""The parts of a plan on how its datasets are advanced: what needs Spark, and what their sources
will not give.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dagster_adjunct.assets.declaration.change_values import is_known_path, suggest_path
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    BoundedDataset,
    FileSource,
    QuerySource,
    UnboundedDataset,
)
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.sources.entries import (
    derive_row_schema,
    list_extractor_spark_needs,
    list_stream_spark_needs,
)
from dagster_adjunct.assets.sources.query_source import list_query_spark_needs
from dagster_adjunct.assets.unbounded.changes import list_format_spark_needs
from dagster_adjunct.assets.validation.validators import list_spark_validators
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.stream_facts import Catalog, StreamFacts
from dagster_adjunct.orchestration.planner.planned import PlannedAdvance
from dagster_adjunct.resources.errors import (
    AdjunctError,
    DatasetError,
    SchemaMismatchError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.files.tree import open_tree
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import LAKE, StreamSystem
from dagster_adjunct.resources.threads import map_in_threads


def plan_advances(app: Application, catalog: Catalog) -> tuple[PlannedAdvance, ...]:
    """Return, for each dataset that is made from a source, what needs Spark to advance it,
    however few records.
    """
    advances = []
    for dataset in app.datasets:
        if not dataset.is_local:
            advances.append(
                PlannedAdvance(dataset.name, tuple(_list_spark_needs(dataset, catalog)))
            )
    return tuple(advances)


def _list_spark_needs(dataset: AdjunctDataset, catalog: Catalog) -> Iterator[str]:
    if isinstance(dataset, BoundedDataset):
        validators = list_spark_validators(dataset)
        if validators:
            yield f"its validators {', '.join(validators)}"
        if isinstance(dataset.input, FileSource):
            yield from list_extractor_spark_needs(dataset)
            return
        if isinstance(dataset.input, QuerySource):
            yield from list_query_spark_needs(dataset, dataset.input)
            return
    facts = catalog.get(str(dataset.input))
    yield from list_stream_spark_needs(dataset, in_arrow=facts is None or facts.in_arrow)
    if isinstance(dataset, UnboundedDataset):
        yield from _list_table_spark_needs(dataset, facts)


def _list_table_spark_needs(dataset: UnboundedDataset, facts: StreamFacts | None) -> Iterator[str]:
    following = dataset.following
    if facts is not None and facts.schema is not None:
        yield from list_format_spark_needs(dataset, facts.schema)
    if following.history is not None:
        yield "its history, for which stored rows are read"
    if not following.persistent:
        yield "persistent=False, for a table in Spark's cache"
    if following.initial is not None:
        yield f"its bulk snapshot ({following.initial.describe()}), when the table is built"


def check_order_paths(dataset: UnboundedDataset, records: Schema) -> None:
    """Raise SchemaMismatchError for a path in `order_by` that is a misspelling of one that
    connectors send.
    """
    for path in _list_unknown_paths(dataset, records):
        meant = suggest_path(path)
        if meant is not None:
            raise SchemaMismatchError(
                f"dataset {dataset.name!r} (input {dataset.input}): order_by is {path!r}, which no"
                " connector sends.",
                f"Did you mean {meant!r}?",
                dataset=dataset.name,
                column=path,
                argument="order_by",
            )


def _list_unknown_paths(dataset: UnboundedDataset, records: Schema) -> list[str]:
    following = dataset.following
    if not isinstance(following.changes, DebeziumEnvelope) or not following.order_by:
        return []
    rows = derive_row_schema(dataset, records)
    return [
        name for name in following.order_by if name not in rows.names and not is_known_path(name)
    ]


def note_sources(app: Application, catalog: Catalog) -> Iterator[str]:
    """Yield a note for each source that may not give what its dataset is declared to be made of."""
    for dataset in app.datasets:
        if isinstance(dataset.input, FileSource) and dataset.input.url in catalog.empty_folders:
            yield (
                f"Dataset {dataset.name} waits for files in"
                f" {catalog.empty_folders[dataset.input.url]}, which does not exist or has no"
                " files. If nothing will be delivered there, correct the url of its FileSource."
            )
        if not isinstance(dataset, UnboundedDataset):
            continue
        facts = catalog.get(dataset.input)
        if facts is None or facts.schema is None:
            continue
        for path in _list_unknown_paths(dataset, facts.schema):
            yield (
                f"Dataset {dataset.name} is ordered by {path}, which is not known to be sent by any"
                " connector: if no change has it, the first advance fails."
            )


def note_stored_datasets(app: Application, systems: Mapping[str, StreamSystem]) -> tuple[str, ...]:
    """Return a note for each dataset that was built under another declaration, and for each
    without a version whose stream has no end-of-dataset marker.
    """
    streams = systems.get(LAKE)
    if not isinstance(streams, LakeStreams):
        return ()
    lake = streams.lake
    datasets = [dataset for dataset in app.datasets if not dataset.is_local]
    found = map_in_threads(lambda dataset: _note_stored(lake, dataset, streams), datasets)
    return tuple(note for note in found if note is not None)


def _note_stored(lake: Lake, dataset: AdjunctDataset, streams: LakeStreams) -> str | None:
    try:
        manifest = StoredVersions(lake, dataset).manifest()
    except DatasetError as error:
        return f"Its next advance fails: {error.problem} {error.next_step}"
    if not isinstance(dataset, BoundedDataset) or dataset.stream is None:
        return None
    if manifest is not None and manifest.version is not None:
        return None
    system, stream = split_stream_name(dataset.stream)
    try:
        if system != LAKE or streams.markers(stream):
            return None
    except StreamNotFoundError:
        return None
    return (
        f"Dataset {dataset.name} has no version yet, and {dataset.stream} has no end-of-dataset"
        " marker: a run that joins it ends with NoSealedVersionError until there is one."
    )


def find_empty_folders(app: Application) -> Mapping[str, str]:
    """Return the folders of the datasets' files that do not exist or have no files: their places,
    by url.

    A folder that can't be listed now is left out.
    """
    urls = {dataset.input.url for dataset in app.datasets if isinstance(dataset.input, FileSource)}
    found = {}
    for url in sorted(urls):
        try:
            tree = open_tree(url)
            if not tree.has_files():
                found[url] = tree.url
        except AdjunctError:
            continue
    return found
