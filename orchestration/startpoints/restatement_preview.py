"""What startpoints in the changes of datasets would restate: how many records of which streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.changed_keys import VersionIds
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.batch_log.batch_log import ResolvedStartpoint
from dagster_adjunct.orchestration.operators.stream_facts import CURRENT
from dagster_adjunct.orchestration.planner.planned import PlannedRestatement
from dagster_adjunct.orchestration.startpoints.due_restatements import list_versions_over_time
from dagster_adjunct.orchestration.startpoints.positions import (
    AskedApplication,
    InputPositions,
    resolve_request,
)
from dagster_adjunct.orchestration.startpoints.preview import Preview
from dagster_adjunct.orchestration.startpoints.restatement import find_restatement
from dagster_adjunct.resources.errors import RestatementError
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.system import OffsetRange


def describe_restatements(asked: AskedApplication, previews: Sequence[Preview]) -> Iterator[str]:
    """Yield how many keys of each dataset have changed since these startpoints, how many records
    would be read again for them, and what that does to each output; or why a run would not.

    The records are searched for, as a run does.
    """
    for stream, dataset in asked.app.restated.items():
        of_dataset = []
        for shown in previews:
            if shown.request.ssp.qualified_stream == stream and shown.error is None:
                of_dataset.append(shown)
        if of_dataset:
            yield from _describe(asked, stream, dataset, of_dataset)


def _describe(
    asked: AskedApplication, stream: str, dataset: AdjunctDataset, previews: Sequence[Preview]
) -> Iterator[str]:
    """Yield the texts of `describe_restatements` about one dataset, whose changes are `stream`;
    `previews` are those of the startpoints in these changes.
    """
    changes = asked.snapshot(stream)
    positions = InputPositions()
    for shown in previews:
        ssp = shown.request.ssp
        start = resolve_request(changes, shown.request, versions=CURRENT, now=asked.at)
        if isinstance(start, ResolvedStartpoint):
            positions.startpoints[ssp] = start
            positions.changed[ssp] = OffsetRange(start.offset, changes.upcoming[ssp])
    effects: dict[str, None] = {}
    inputs = {}
    restatements: Sequence[PlannedRestatement] = ()
    if asked.plan is not None:
        restatements = asked.plan.late_data.restatements
    for restated in restatements:
        if restated.changes == stream:
            effects |= dict.fromkeys(restated.effects)
            for source in restated.inputs:
                inputs[source.stream] = asked.snapshot(source.stream)
    served = {dataset.name: _find_served(asked, dataset)}
    try:
        due = find_restatement(asked, inputs, positions, positions.changed, served)
    except RestatementError as error:
        yield f"a run would be refused: {error}"
        return
    records = [_describe_read(asked, name, places) for name, places in due.places.items()]
    read = " and ".join(records) or "no records"
    yield f"dataset {dataset.name}: {due.keys:,} keys have changed; {read} would be read again"
    if due.records:
        yield from effects


def _describe_read(asked: AskedApplication, stream: str, places: pa.Table) -> str:
    """Return how many records of a stream are read, of how many files."""
    records = f"{places.num_rows:,} records of {stream}"
    _, name = split_stream_name(stream)
    files = asked.snapshot(stream).system.count_files(name, places)
    if files is None:
        return records
    return f"{records} in {files:,} files"


def _find_served(asked: AskedApplication, dataset: AdjunctDataset) -> VersionIds:
    """Return the version of a dataset that is served now, None without one, and all that are
    joined by time.
    """
    stored = StoredVersions(asked.lake, dataset)
    manifest = stored.manifest()
    reader = stored.reader_of(manifest)
    over_time = list_versions_over_time(asked.app, {dataset.name: manifest})
    version = None if reader is None else reader.version
    return VersionIds(version, over_time.get(dataset.name, ()))
