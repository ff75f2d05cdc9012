"""Which changes of datasets are due to restate results by, for batches and for sensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.change_streams import parse_commit
from dagster_adjunct.assets.reading.changed_keys import VersionIds
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.versions.manifest import BoundedManifest, DatasetManifest
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState
from dagster_adjunct.orchestration.batch_log.intent import Ranges, of_stream
from dagster_adjunct.orchestration.operators.lookups import Restate
from dagster_adjunct.orchestration.startpoints.positions import (
    InputPositions,
    input_positions,
    snapshot_stream,
)
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import StreamSystem


def find_changes(
    app: Application,
    state: ApplicationState,
    positions: InputPositions,
    served: Mapping[str, VersionIds],
) -> Ranges:
    """Return the changes of datasets by which results are to be restated, now or later.

    Those of a dataset are returned if some are unread, if a startpoint says from where they count,
    or if joins by time have read other versions than those that are `served`. In the last two cases
    their ranges may be empty.
    """
    found: Ranges = {}
    for stream, dataset in app.restated.items():
        changes = of_stream(positions.changed, stream)
        is_moved = bool(changes.keys() & positions.startpoints.keys())
        if is_moved or _are_unread(changes) or _has_read_others(state, dataset, served):
            found |= changes
    return found


def find_due(
    app: Application,
    state: ApplicationState,
    positions: InputPositions,
    served: Mapping[str, VersionIds],
    now: datetime,
) -> Ranges:
    """Return the changes by which results are restated now: not those of a dataset whose last
    restatement was too short a time ago, unless a startpoint asks for it.
    """
    found = find_changes(app, state, positions, served)
    due: Ranges = {}
    for stream, dataset in app.restated.items():
        changes = of_stream(found, stream)
        is_moved = bool(changes.keys() & positions.startpoints.keys())
        if is_moved or may_begin(app, state, dataset, now):
            due |= changes
    return due


def may_begin(
    app: Application, state: ApplicationState, dataset: AdjunctDataset, now: datetime
) -> bool:
    """Whether results may be restated by a dataset now: for one of its joins, the last restatement
    was long enough ago (`every`).
    """
    last = state.offsets.restated.get(dataset.name)
    if last is None:
        return True
    for options in _iter_options(app, dataset):
        if options.every is None or now - last >= options.every:
            return True
    return False


def _iter_options(app: Application, dataset: AdjunctDataset) -> Iterator[Restate]:
    """Yield the user's options of each join with the dataset whose results are restated."""
    for operator in app.operators:
        match = operator.spec.match
        if match is not None and match.dataset == dataset.name and match.restate is not None:
            yield match.restate


def _are_unread(changes: Ranges) -> bool:
    """Whether there are changes in one of these ranges."""
    for ssp, span in changes.items():
        if parse_commit(span.start, str(ssp)) < parse_commit(span.end, str(ssp)):
            return True
    return False


def _has_read_others(
    state: ApplicationState, dataset: AdjunctDataset, served: Mapping[str, VersionIds]
) -> bool:
    """Whether joins by time have read other versions of a dataset than those of now."""
    over_time = served[dataset.name].over_time
    joined = state.offsets.joined.get(dataset.name, ())
    return any(set(read.over_time) != set(over_time) for read in joined)


def list_versions_over_time(
    app: Application, manifests: Mapping[str, DatasetManifest | None]
) -> dict[str, tuple[str, ...]]:
    """Return, by dataset, all versions in the order of their times, of the bounded datasets that
    are joined by time and have a version.
    """
    names = set()
    for operator in app.operators:
        match = operator.spec.match
        if match is None or match.as_of is None:
            continue
        if not match.as_of.known_then:
            names.add(str(match.dataset))
    over_time: dict[str, tuple[str, ...]] = {}
    for name in sorted(names):
        manifest = manifests.get(name)
        if isinstance(manifest, BoundedManifest) and manifest.version is not None:
            over_time[name] = tuple(sorted(manifest.versions_over_time, key=manifest.time_of))
    return over_time


def describe_due(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    app: Application,
    state: ApplicationState,
    stream: str,
) -> str:
    """Return why a run is needed to follow the changes of a dataset, which are the `stream`; "" if
    none is, such as before the dataset's first version.
    """
    dataset = app.restated[stream]
    try:
        snapshot = snapshot_stream(systems, stream)
    except errors.StreamNotFoundError:
        return ""
    if snapshot.was_recreated(state.offsets):
        return f"{stream} was {snapshot.info.change_since(state.offsets.streams.get(stream))}"
    if state.checkpoint and not of_stream(state.checkpoint, stream):
        return f"{stream}: no position is stored yet"
    manifest = StoredVersions(lake, dataset).manifest()
    over_time = list_versions_over_time(app, {dataset.name: manifest})
    served: dict[str, VersionIds] = {}
    for other in app.restated.values():  # only versions over time are compared with what was read
        served[other.name] = VersionIds(None, over_time.get(other.name, ()))
    positions = input_positions(app, {stream: snapshot}, state)
    due = find_due(app, state, positions, served, lake.now())
    if not of_stream(due, stream):
        return ""
    return f"dataset {dataset.name!r} has changed, which results follow"
