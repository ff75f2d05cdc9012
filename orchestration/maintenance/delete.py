"""Deletes streams and datasets for good, unless something reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.reading.stored_versions import list_datasets, open_stored_versions
from dagster_adjunct.assets.retention import discard as datasets
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.leases import RUNNING_WITHIN, list_attempts, list_live_leases, read_lake_clock
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, BatchLog, list_applications
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetNotFoundError,
    MalformedDocumentError,
    StillReadError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.objects.commit_log import (
    DeletedObjects,
    is_deletion_commit,
    list_log_objects,
    retry_conflicts,
)
from dagster_adjunct.resources.streams.lake import streams as streams_deleting
from dagster_adjunct.resources.streams.lake.readers import list_readers
from dagster_adjunct.resources.streams.lake.streams import LakeStreams

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.objects.lake import Lake


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


def find_stream_readers(lake: Lake, name: str) -> Readers:
    """Return who reads a stream of the lake, and which open batches write to it."""
    qualified, holding = f"lake.{name}", []
    told: list[str] = []
    streams = LakeStreams(lake)
    commit = streams.log(name).current()
    there = commit is not None and not is_deletion_commit(commit)
    producers = tuple(streams.state(name)[1].producers) if there else ()
    told += [f"reader {reader.name} has a position in it" for reader in (list_readers(lake, name) if there else ())]
    for application, state in _application_states(lake):
        batch = state.open
        if batch is not None and any(ssp.qualified_stream == qualified for ssp in batch.ranges):
            holding.append(f"batch {batch.batch} of application {application} is open and reads it")
        elif batch is not None and application in producers:
            holding.append(f"batch {batch.batch} of application {application} is open and may write to it")
        elif any(ssp.qualified_stream == qualified for ssp in state.checkpoint):
            told.append(f"application {application} has a checkpoint on it")
    followers, unknown = find_followers(lake, qualified)
    told += [f"dataset {dataset} follows it" for dataset in followers]
    return Readers(tuple(holding), (*told, *unknown))


def find_dataset_readers(lake: Lake, name: str) -> Readers:
    """Return who reads a dataset: leases, holds, applications and builds."""
    now = read_lake_clock(lake, name)
    holding = [
        f"{lease.holder} holds {', '.join(lease.versions)} until {lease.expires_at:%Y-%m-%d %H:%M:%S %Z}"
        for lease in list_live_leases(lake, name, now)
    ]
    told = []
    for application, state in _application_states(lake):
        if state.open is not None and name in state.open.versions:
            holding.append(f"batch {state.open.batch} of application {application} is open and reads it")
        elif state.last is not None and name in state.last.intent.versions:
            told.append(f"application {application} met it in its last batch")
    running = [attempt for attempt in list_attempts(lake, name) if now - attempt.renewed < RUNNING_WITHIN]
    told += [f"a build of it is on record as running ({attempt.id})" for attempt in running]
    return Readers(tuple(holding), tuple(told))


def find_followers(lake: Lake, stream: str) -> tuple[dict[str, DatasetManifest], tuple[str, ...]]:
    """Return the manifests of the datasets that follow this stream ("lake.orders"), and in words who may follow it."""
    followers: dict[str, DatasetManifest] = {}
    unknown = []
    for dataset in list_datasets(lake):
        try:
            manifest = open_stored_versions(lake, dataset).manifest()
        except MalformedDocumentError as error:
            unknown.append(f"dataset {dataset} may follow it: {error.problem}")
            continue
        if manifest is not None and manifest.declaration.input == stream:
            followers[dataset] = manifest
    return followers, tuple(unknown)


def _application_states(lake: Lake) -> list[tuple[str, ApplicationState]]:
    return [(application, BatchLog(lake, application).read()[1]) for application in list_applications(lake)]


_TRIES = 5


@dataclass(frozen=True, slots=True)
class DeletionReport:
    """What a deletion did, or (`dry_run`) would do. `objects` and `size` (bytes) are what is deleted.

    `told` are readers that find out at their next look, which only a forced deletion accepts, and `holding` those that
    no deletion accepts. `repeated` says that it had been deleted before, and `left` that somebody made it anew
    meanwhile: its upkeep collects what is left of the one before.
    """

    kind: str
    name: str
    objects: int
    size: int
    holding: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    repeated: bool = False
    dry_run: bool = False
    left: bool = False

    def summary(self) -> str:
        """Return the report in one line."""
        verb = "would be deleted" if self.dry_run else "deleted"
        if self.repeated:
            left = f"{self.objects:,} objects that it had left {verb}" if self.objects else "nothing is left of it"
            return f"{self.kind} {self.name} was deleted before: {left}"
        if self.left:
            return f"{self.kind} {self.name} deleted, and made anew meanwhile: stream maintain collects what is left"
        return f"{self.kind} {self.name}: {self.objects:,} objects, {self.size:,} bytes {verb}"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        return asdict(self)


def delete_stream(
    lake: Lake, name: str, *, reason: str, by: str, force: bool = False, dry_run: bool = False
) -> DeletionReport:
    """Delete a stream of the lake for good; repeat it where it was interrupted.

    Raises StillReadError while an open batch of an application reads it or writes to it, and, unless `force`, while an
    application has a checkpoint on it or a dataset follows it: these are refused by their next run then, which
    says what to do. What is declared under the name later is another stream. Raises StreamNotFoundError.
    """
    streams = LakeStreams(lake)

    def look() -> Commit:
        commit = streams.log(name).current()
        if commit is None:
            raise StreamNotFoundError(
                f"there is no stream {name!r} in {lake.url} to delete; there are: "
                f"{', '.join(streams.list_streams()) or 'none'}.",
                "Check the name and the lake.",
                stream=f"lake.{name}",
            )
        return commit

    return _delete(
        "stream",
        name,
        look,
        lambda: find_stream_readers(lake, name),
        lambda: streams_deleting.list_deletable_objects(streams, name),
        lambda seen: streams_deleting.delete_stream(streams, name, seen, reason=reason, by=by),
        reason=reason,
        force=force,
        dry_run=dry_run,
    )


def delete_dataset(
    lake: Lake, name: str, *, reason: str, by: str, force: bool = False, dry_run: bool = False
) -> DeletionReport:
    """Delete a dataset for good, with all versions, served and retained; repeat it where it was interrupted.

    Raises StillReadError while a reader's lease, a hold or an open batch needs a version, and, unless `force`, while an
    application met it in its last batch or a build of it is on record as running. A member of a version set is a
    DatasetError. Its stream stays. Raises DatasetNotFoundError.
    """
    log = DatasetLog(lake, name).log

    def look() -> Commit:
        commit = log.current()
        if commit is None:
            raise DatasetNotFoundError(
                f"there is no dataset {name!r} in {lake.url} to delete; there are: "
                f"{', '.join(list_datasets(lake)) or 'none'}.",
                "Check the name and the lake.",
                dataset=name,
            )
        datasets.check_deletable(name, commit)
        return commit

    return _delete(
        "dataset",
        name,
        look,
        lambda: find_dataset_readers(lake, name),
        lambda: list_log_objects(log),
        lambda seen: datasets.delete_dataset_objects(lake, name, seen, reason=reason, by=by),
        reason=reason,
        force=force,
        dry_run=dry_run,
    )


def _delete(
    kind: str,
    name: str,
    look: Callable[[], Commit],
    readers: Callable[[], Readers],
    objects: Callable[[], dict[str, int]],
    delete: Callable[[Commit], DeletedObjects],
    *,
    reason: str,
    force: bool,
    dry_run: bool,
) -> DeletionReport:
    if not reason.strip():
        raise ConfigurationError(
            f"{kind} {name!r} can't be deleted without a reason.", "Say why: it is kept.", argument="reason"
        )

    def decide() -> Callable[[], DeletionReport]:  # again after a conflict: who committed may be a new reader
        seen = look()
        repeated = is_deletion_commit(seen)
        reading = Readers() if repeated else readers()
        if dry_run:
            there = objects()
            size = sum(there.values())
            report = DeletionReport(kind, name, len(there), size, reading.holding, reading.told, repeated, dry_run)
            return lambda: report
        if reading.refuse(force=force):
            raise _still_read_error(kind, name, reading)

        def commit() -> DeletionReport:
            done = delete(seen)
            return DeletionReport(
                kind, name, done.objects, done.size, told=reading.told, repeated=repeated, left=done.left
            )

        return commit

    return retry_conflicts(decide, attempts=_TRIES)


def _still_read_error(kind: str, name: str, reading: Readers) -> StillReadError:
    if reading.holding:
        step = (
            "Let them end: run the application, or give its batch up (adjunct checkpoint abandon); close the readers. "
            "A lease that nobody renews runs out within minutes."
        )
    else:
        step = (
            "Take it out of these first. Or force it (--force, force=True): nothing is mixed up by that, their next "
            "run is refused and says what to do."
        )
    return StillReadError(
        f"{kind} {name!r} is still read: {reading.words()}.",
        step,
        stream=f"lake.{name}" if kind == "stream" else None,
        dataset=name if kind == "dataset" else None,
        readers=(*reading.holding, *reading.told),
    )
