"""How far an application has come: the lag of its inputs, from the batch log and the streams alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestration.batchlog import BatchLog
from orchestration.offsets.manager import default_offset
from resources.errors import MalformedDocumentError, NoSealedVersionError, StreamNotFoundError
from resources.names import split_stream_name

if TYPE_CHECKING:
    from assets.dataset import AdjunctDataset
    from orchestration.application import Application
    from resources.objects import Lake
    from resources.streams import StreamSystem, SystemStreamPartition


@dataclass(frozen=True, slots=True)
class InputProgress:
    """`lag` counts offsets between checkpoint and end, over all input partitions.

    `position` is where the application stands: its next offset of every input partition, and the ends of the
    streams that feed its datasets. `unresolved` says that a stream to be read from its end on has no position
    yet; records that come before a run stores one would be passed over.
    """

    lag: int
    position: dict[str, str]
    unresolved: bool = False


def input_progress(lake: Lake, systems: Mapping[str, StreamSystem], app: Application) -> InputProgress:
    """Return how far the application has come; a stream that does not exist yet counts for nothing."""
    _, state = BatchLog(lake, app.name).read()
    lag = 0
    unresolved = False
    position: dict[str, str] = {}
    for dataset in app.datasets:
        if dataset.stream is not None:
            position |= {f"{dataset.name}<{ssp}": end for ssp, end in _upcoming(systems, dataset.stream).items()}
    for source in app.inputs.values():
        upcoming = _upcoming(systems, source.stream)
        name, stream = split_stream_name(source.stream)
        system = systems[name]
        fresh = [ssp for ssp in upcoming if str(ssp) not in state.checkpoint]
        oldest = system.oldest(fresh) if fresh else {}
        if fresh and default_offset(source, system.info(stream), system) == "upcoming":
            unresolved, oldest = True, upcoming
        for ssp, end in upcoming.items():
            start = state.checkpoint.get(str(ssp)) or oldest[ssp]
            lag += system.distance(ssp, start, end)
            position[str(ssp)] = state.checkpoint.get(str(ssp), "")
    return InputProgress(lag, position, unresolved)


def waiting_datasets(lake: Lake, systems: Mapping[str, StreamSystem], app: Application) -> tuple[str, ...]:
    """Return, for each dataset that holds the input back and can't be made yet, what it waits for.

    A dataset that has a version, or whose first one is delivered, holds nothing back: a run seals it.
    """
    from assets import DatasetStore

    waiting = []
    for dataset in app.datasets:
        if not dataset.bootstrap:
            continue
        store = DatasetStore(lake, dataset)
        try:
            manifest = store.manifest()
        except MalformedDocumentError:
            if dataset.kind != "unbounded":
                raise
            manifest = None  # a run builds the table anew
        if manifest is not None and manifest.version is not None:
            continue
        try:
            # What is delivered whole is sealed by the run, and an unbounded dataset bootstraps in it.
            if dataset.kind == "unbounded":
                system, stream = split_stream_name(str(dataset.stream))
                systems[system].info(stream)
            elif dataset.versions is not None:
                waiting.append(f"dataset {dataset.name!r} has no version yet: materialise a partition of its asset")
            elif store.awaiting(systems) is not None:
                store.require_current(systems)
        except (NoSealedVersionError, StreamNotFoundError) as error:
            waiting.append(error.problem)
    return tuple(waiting)


def delivered_version(
    lake: Lake, systems: Mapping[str, StreamSystem], dataset: AdjunctDataset
) -> tuple[str | None, str]:
    """Return the next version of a bounded dataset that is delivered whole, else None and what it waits for."""
    from assets import DatasetStore
    from assets.sources.delivery import Awaiting
    from assets.sources.opening import open_source

    try:
        source = open_source(systems, dataset, lake)
    except StreamNotFoundError as error:
        return None, error.problem.rstrip(".")
    found = source.next(DatasetStore(lake, dataset).manifest() or source.first_manifest())
    if not isinstance(found, Awaiting):
        return found.version, ""
    named = f"version {found.version}" if found.version else "the next one"
    return None, f"{named} waits for {', '.join(found.missing)}" if found.missing else "nothing was delivered"


def _upcoming(systems: Mapping[str, StreamSystem], name: str) -> dict[SystemStreamPartition, str]:
    system_name, stream = split_stream_name(name)
    system = systems[system_name]
    try:
        return system.upcoming(system.partitions(stream))
    except StreamNotFoundError:
        return {}
