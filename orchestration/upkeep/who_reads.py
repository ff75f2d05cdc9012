"""Who reads a stream or a dataset: asked before it is deleted, or rewritten into other partitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.dataset_names import list_datasets
from dagster_adjunct.assets.reading.stored_versions import stored_versions
from dagster_adjunct.assets.versions.build_attempts import RUNNING, attempts
from dagster_adjunct.assets.versions.leases import live_leases, store_now
from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState, BatchLog
from dagster_adjunct.orchestration.batchlog.known_applications import list_applications
from dagster_adjunct.resources.errors import MalformedDocumentError
from dagster_adjunct.resources.objects.removal import is_deleted
from dagster_adjunct.resources.streams.lake.lake_streams import LakeStreams
from dagster_adjunct.resources.streams.lake.named_readers import list_readers

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.resources.objects import Lake


@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads a stream or dataset, in words.

    Those of `holding` would lose or mix something if it went; those of `told` find at their next look that it is gone,
    or another one, and say so.
    """

    holding: tuple[str, ...] = ()
    told: tuple[str, ...] = ()

    def refuse(self, *, force: bool) -> bool:
        """Whether they stand in the way: those that are told do only where it is not forced."""
        return bool(self.holding or (self.told and not force))

    def words(self) -> str:
        """Return all of them in one line."""
        return "; ".join((*self.holding, *self.told))


def readers_of_stream(lake: Lake, name: str) -> Readers:
    """Return who reads a stream of the lake, and which open batches write to it."""
    qualified, holding = f"lake.{name}", []
    told: list[str] = []
    streams = LakeStreams(lake)
    commit = streams.log(name).current()
    there = commit is not None and not is_deleted(commit)
    producers = tuple(streams.state(name)[1].producers) if there else ()
    told += [f"reader {reader.name} has a position in it" for reader in (list_readers(lake, name) if there else ())]
    for application, state in _applications(lake):
        batch = state.open
        if batch is not None and any(ssp.qualified_stream == qualified for ssp in batch.ranges):
            holding.append(f"batch {batch.batch} of application {application} is open and reads it")
        elif batch is not None and application in producers:
            holding.append(f"batch {batch.batch} of application {application} is open and may write to it")
        elif any(ssp.qualified_stream == qualified for ssp in state.checkpoint):
            told.append(f"application {application} has a checkpoint on it")
    followers, unknown = followers_of(lake, qualified)
    told += [f"dataset {dataset} follows it" for dataset in followers]
    return Readers(tuple(holding), (*told, *unknown))


def readers_of_dataset(lake: Lake, name: str) -> Readers:
    """Return who reads a dataset: leases, holds, applications and builds."""
    now = store_now(lake, name)
    holding = [
        f"{lease.holder} holds {', '.join(lease.versions)} until {lease.expires_at:%Y-%m-%d %H:%M:%S %Z}"
        for lease in live_leases(lake, name, now)
    ]
    told = []
    for application, state in _applications(lake):
        if state.open is not None and name in state.open.versions:
            holding.append(f"batch {state.open.batch} of application {application} is open and reads it")
        elif state.last is not None and name in state.last.intent.versions:
            told.append(f"application {application} met it in its last batch")
    running = [attempt for attempt in attempts(lake, name) if now - attempt.renewed < RUNNING]
    told += [f"a build of it is on record as running ({attempt.id})" for attempt in running]
    return Readers(tuple(holding), tuple(told))


def followers_of(lake: Lake, stream: str) -> tuple[dict[str, DatasetManifest], tuple[str, ...]]:
    """Return the manifests of the datasets that follow this stream ("lake.orders"), and in words who may follow it."""
    followers: dict[str, DatasetManifest] = {}
    unknown = []
    for dataset in list_datasets(lake):
        try:
            manifest = stored_versions(lake, dataset).manifest()
        except MalformedDocumentError as error:
            unknown.append(f"dataset {dataset} may follow it: {error.problem}")
            continue
        if manifest is not None and manifest.declaration.input == stream:
            followers[dataset] = manifest
    return followers, tuple(unknown)


def _applications(lake: Lake) -> list[tuple[str, ApplicationState]]:
    return [(application, BatchLog(lake, application).read()[1]) for application in list_applications(lake)]
