"""How far an application has come: the lag of its inputs, from the batch log and the streams alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.startpoints.positions.first_positions import default_offset
from dagster_adjunct.resources.errors import MalformedDocumentError, StreamNotFoundError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.operators.inputs.input import Input
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamInfo, StreamSystem


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """How far an application has come in one of its input streams.

    `unread` has the next offset of each partition that holds more; `lag` counts these offsets, and those of replays
    under way. `due` says what a run is needed for, however little waits; "" for nothing.
    """

    lag: int = 0
    unread: Mapping[SystemStreamPartition, str] = field(default_factory=dict)
    due: str = ""


def followed_state(app: Application, state: ApplicationState) -> ApplicationState:
    """Return what a run follows of an application's state: without startpoints where they are switched off."""
    if app.startpoints:
        return state
    return state.model_copy(update={"offsets": state.offsets.model_copy(update={"resolved": {}, "replays": {}})})


def looked_at(systems: Mapping[str, StreamSystem], stream: str) -> StreamSystem:
    """Return the system of the stream "system.stream" as it answers questions about that stream now."""
    name, short = split_stream_name(stream)
    return systems[name].snapshot(short)


def stream_progress(system: StreamSystem, source: Input, state: ApplicationState) -> StreamProgress:
    """Return how far the application has come in one input stream, which `system` has been opened for."""
    name, stream = split_stream_name(source.stream)
    try:
        info = system.info(stream)
    except StreamNotFoundError:
        return StreamProgress()
    ssps = [SystemStreamPartition(name, stream, number) for number in range(info.partitions)]
    upcoming = system.upcoming(ssps)
    starts = {ssp: start for ssp in ssps if (start := _next_offset(state, ssp)) is not None}
    fresh = [ssp for ssp in ssps if ssp not in starts]
    due = _not_what_it_was(source, system, info, state, starts, upcoming)
    if fresh and default_offset(source, info, system) == "upcoming":
        due = due or f"{source.stream}: no position is stored yet"
    elif fresh:
        starts |= system.oldest(fresh)
    lags = {ssp: system.distance(ssp, start, upcoming[ssp]) for ssp, start in starts.items()}
    replays = [replay for replay in state.offsets.replays.values() if replay.ssp.qualified_stream == source.stream]
    again = sum(system.distance(replay.ssp, replay.next, replay.until) for replay in replays)
    return StreamProgress(sum(lags.values()) + again, {ssp: starts[ssp] for ssp, lag in lags.items() if lag}, due)


def position_of(app: Application, state: ApplicationState) -> dict[str, object]:
    """Return where the application stands by its batch log, in JSON-able values.

    Another one after every batch, and after a startpoint also where it leads back to offsets that were passed before.
    """
    offsets = state.offsets
    return {
        "checkpoint": {str(ssp): at for ssp, at in state.checkpoint.items() if ssp.qualified_stream in app.inputs},
        "resolved": {str(ssp): start.id for ssp, start in offsets.resolved.items()},
        "replays": {key: replay.next for key, replay in offsets.replays.items()},
        "opened": {str(ssp): epoch for ssp, epoch in offsets.opened.items()},
    }


def unfinished(state: ApplicationState) -> tuple[str, ...]:
    """Return what of the application a run has begun and not finished, a text each."""
    open_batch = [f"batch {state.open.batch} is open"] if state.open is not None else []
    replays = sorted({str(replay.ssp) for replay in state.offsets.replays.values()})
    return (*open_batch, *([f"a replay is under way on {', '.join(replays[:3])}"] if replays else []))


def delivered_to_all(
    lake: Lake, systems: Mapping[str, StreamSystem], datasets: Sequence[AdjunctDataset]
) -> tuple[str | None, str]:
    """Return the version that a dataset, or all members of a version set, have next and whole; else what is awaited.

    A member that has published the version already, before it joined the set, is not waited for.
    """
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions
    from dagster_adjunct.assets.versions.manifest import as_bounded

    delivered = {dataset.name: delivered_version(lake, systems, dataset) for dataset in datasets}
    for version in dict.fromkeys(version for version, _ in delivered.values() if version is not None):
        without = [dataset for dataset in datasets if delivered[dataset.name][0] != version]
        manifests = [StoredVersions(lake, dataset).manifest() for dataset in without]
        if all(manifest is not None and version in as_bounded(manifest).taken for manifest in manifests):
            return version, ""
    if len(datasets) == 1:
        return None, delivered[datasets[0].name][1]
    awaited = [f"{name}: {what or f'version {version} is there'}" for name, (version, what) in delivered.items()]
    return None, "; ".join(awaited)


def feeding_streams(app: Application) -> tuple[str, ...]:
    """Return the streams that the application's datasets are made from, each once."""
    return tuple(dict.fromkeys(dataset.stream for dataset in app.datasets if dataset.stream is not None))


def stream_ends(system: StreamSystem, stream: str) -> dict[str, str]:
    """Return the end of each partition of a stream, nothing where there is none of this name."""
    try:
        return {str(ssp): end for ssp, end in system.upcoming(system.partitions(split_stream_name(stream)[1])).items()}
    except StreamNotFoundError:
        return {}


def waiting_datasets(lake: Lake, systems: Mapping[str, StreamSystem], app: Application) -> tuple[str, ...]:
    """Return, for each dataset that holds the input back and can't be made yet, what it waits for.

    A dataset that has a version, or whose first one is delivered, holds nothing back: a run seals it.
    """
    from dagster_adjunct.assets.reading.no_version import nothing_whole
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions

    waiting = []
    for dataset in app.datasets:
        if not dataset.bootstrap:
            continue
        store = StoredVersions(lake, dataset)
        try:
            manifest = store.manifest()
        except MalformedDocumentError:
            if not dataset.follows_changes:
                raise
            manifest = None  # a run builds the table anew
        if manifest is not None and manifest.version is not None:
            continue
        try:
            # What is delivered whole is sealed by the run, and an unbounded dataset bootstraps in it.
            if dataset.follows_changes:
                system, stream = dataset.system_stream
                systems[system].info(stream)
            elif dataset.versions is not None:
                waiting.append(f"dataset {dataset.name!r} has no version yet: materialise a partition of its asset")
            elif (awaiting := store.awaiting(systems, manifest)) is not None:
                waiting.append(nothing_whole(dataset, manifest, awaiting).problem)
        except StreamNotFoundError as error:
            waiting.append(error.problem)
    return tuple(waiting)


def delivered_version(
    lake: Lake, systems: Mapping[str, StreamSystem], dataset: AdjunctDataset
) -> tuple[str | None, str]:
    """Return the next version of a bounded dataset that is delivered whole, else None and what it waits for."""
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions
    from dagster_adjunct.assets.sources.open_source import open_source
    from dagster_adjunct.assets.sources.version_source import Awaiting
    from dagster_adjunct.assets.versions.manifest import as_bounded

    try:
        source = open_source(systems, dataset, lake)
    except StreamNotFoundError as error:
        return None, error.problem.rstrip(".")
    stored = StoredVersions(lake, dataset).manifest()
    manifest = source.first_manifest() if stored is None else as_bounded(stored)
    arrived = source.next(as_bounded(source.carried_over(manifest) or manifest))
    if not isinstance(arrived, Awaiting):
        return arrived.version, ""
    named = f"version {arrived.version}" if arrived.version else "the next one"
    return None, f"{named} waits for {', '.join(arrived.missing)}" if arrived.missing else "nothing was delivered"


def _next_offset(state: ApplicationState, ssp: SystemStreamPartition) -> str | None:
    resolved = state.offsets.resolved.get(ssp)
    return state.checkpoint.get(ssp) if resolved is None else resolved.offset


def _not_what_it_was(
    source: Input,
    system: StreamSystem,
    info: StreamInfo,
    state: ApplicationState,
    starts: Mapping[SystemStreamPartition, str],
    upcoming: Mapping[SystemStreamPartition, str],
) -> str:
    """Say what of the stream does not fit its checkpoint: a run then fails, and says what to do."""
    if source.reset_offset:
        return ""
    before = state.offsets.streams.get(source.stream)
    if info.is_another(before):
        return f"{source.stream} was deleted and made anew"
    behind = [ssp for ssp, start in starts.items() if system.compare(start, upcoming[ssp]) > 0]
    return f"{behind[0]} ends before the offset that comes next" if behind else ""
