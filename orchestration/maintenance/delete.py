"""Delete streams and datasets permanently, unless something reads them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from dagster_adjunct.assets.reading.stored_versions import list_datasets, open_stored_versions
from dagster_adjunct.assets.retention import discard
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.leases import (
    RUNNING_WITHIN,
    list_attempts,
    list_live_leases,
    read_lake_clock,
)
from dagster_adjunct.assets.versions.manifest import DatasetManifest
from dagster_adjunct.orchestration.batch_log.batch_log import list_application_states
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import require_reason
from dagster_adjunct.resources.file_streams import overview
from dagster_adjunct.resources.file_streams.overview import find_file_stream
from dagster_adjunct.resources.objects.commit_log import (
    Commit,
    DeletedObjects,
    is_deletion_commit,
    retry_conflicts,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.streams.lake import streams as streams_deleting
from dagster_adjunct.resources.streams.lake.maintenance import list_retained_attempts
from dagster_adjunct.resources.streams.lake.readers import list_readers
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import CHANGE_IMAGES, CHANGES
from dagster_adjunct.resources.validation import validated


@dataclass(frozen=True, slots=True)
class Readers:
    """Descriptions of the readers of a stream or dataset, for an operation that deletes or rewrites
    it.

    Readers in `blocking` would lose or mix up data. Readers in `affected` would only fail at their
    next read, with an error that says what happened.
    """

    blocking: tuple[str, ...] = ()
    affected: tuple[str, ...] = ()

    def check(
        self, problem: str, blocked: str, affected: str, *, force: bool, **about: Any
    ) -> None:
        """Raise StillReadError if there are `blocking` readers, or, unless `force`, `affected`
        ones.

        The message is `problem` and the readers; the next step is `blocked` if some are blocking,
        else `affected`.
        """
        accepted = force or not self.affected
        if accepted and not self.blocking:
            return
        step = blocked if self.blocking else affected
        readers = (*self.blocking, *self.affected)
        problem = f"{problem}: {'; '.join(readers)}."
        raise errors.StillReadError(problem, step, readers=readers, **about)


def find_stream_readers(lake: Lake, name: str) -> Readers:
    """Return the readers of a stream of the lake; also what holds its files, and open batches
    that write to it.
    """
    qualified = f"lake.{name}"
    streams = LakeStreams(lake)
    commit = streams.log(name).current()
    producers: Collection[str] = ()
    blocking: list[str] = []
    affected: list[str] = []
    if commit is not None and not is_deletion_commit(commit):
        producers = streams.state(name).state.producers
        for holder in list_retained_attempts(lake, name):
            blocking.append(f"{holder} holds its files")
        for reader in list_readers(lake, name):
            affected.append(f"reader {reader.name} has a position in it")
    reading = _find_readers(lake, qualified, producers)
    return Readers((*blocking, *reading.blocking), (*affected, *reading.affected))


def _find_readers(lake: Lake, qualified: str, producers: Collection[str] = ()) -> Readers:
    """Return the applications and datasets that read the stream "system.stream", and open batches
    of its producers.
    """
    blocking: list[str] = []
    affected: list[str] = []
    for application, state in list_application_states(lake).items():
        intent = state.open
        if intent is not None and qualified in intent.streams:
            blocking.append(
                f"batch {intent.batch} of application {application} is open and reads it"
            )
        elif intent is not None and application in producers:
            blocking.append(
                f"batch {intent.batch} of application {application} is open and may write to it"
            )
        elif state.has_position_in(qualified):
            affected.append(f"application {application} has a checkpoint on it")
    followers = find_followers(lake, qualified)
    affected += [f"dataset {dataset} follows it" for dataset in followers.manifests]
    return Readers(tuple(blocking), (*affected, *followers.unknown))


def find_open_batches(lake: Lake, stream: str) -> tuple[str, ...]:
    """Return the open batches that read the stream "system.stream"."""
    return _find_readers(lake, stream).blocking


def find_dataset_readers(lake: Lake, name: str) -> Readers:
    """Return the readers of a dataset: leases, holds, applications and builds."""
    now = read_lake_clock(lake, name)
    blocking = []
    affected = []
    for lease in list_live_leases(lake, name, now):
        blocking.append(
            f"{lease.holder} holds {', '.join(lease.versions)} until"
            f" {lease.expires_at:%Y-%m-%d %H:%M:%S %Z}"
        )
    for application, state in list_application_states(lake).items():
        if state.open is not None and name in state.open.versions:
            blocking.append(
                f"batch {state.open.batch} of application {application} is open and reads it"
            )
        elif state.last is not None and name in state.last.intent.versions:
            affected.append(f"application {application} read it in its last batch")
        if any(state.has_position_in(f"{system}.{name}") for system in (CHANGES, CHANGE_IMAGES)):
            affected.append(f"application {application} follows its changes")
    for attempt, renewed in list_attempts(lake, name).items():
        if now - renewed < RUNNING_WITHIN:
            affected.append(f"a build of it is recorded as running ({attempt})")
    return Readers(tuple(blocking), tuple(affected))


class FollowingDatasets(NamedTuple):
    """The manifests of the datasets whose input is a stream, by name. `unknown` describes datasets
    whose manifest can't be read, which may follow the stream too.
    """

    manifests: dict[str, DatasetManifest]
    unknown: tuple[str, ...]


def find_followers(lake: Lake, stream: str) -> FollowingDatasets:
    """Return the datasets whose input is this stream ("lake.orders")."""
    manifests: dict[str, DatasetManifest] = {}
    unknown = []
    for dataset in list_datasets(lake):
        try:
            manifest = open_stored_versions(lake, dataset).manifest()
        except errors.MalformedDocumentError as error:
            unknown.append(f"dataset {dataset} may follow it: {error.problem}")
            continue
        if manifest is not None and manifest.declaration.input == stream:
            manifests[dataset] = manifest
    return FollowingDatasets(manifests, tuple(unknown))


_TRIES = 5


@dataclass(frozen=True, slots=True)
class DeletionReport(Report):
    """What a deletion did, or (`dry_run`) would do. `objects` and `size` (bytes) count what is
    deleted.

    `affected` are readers that only a forced deletion accepts, `blocking` those that no deletion
    accepts. `repeated` means that it had been deleted before, `recreated` that it was recreated
    meanwhile.
    """

    kind: str
    name: str
    objects: int
    size: int
    blocking: tuple[str, ...] = ()
    affected: tuple[str, ...] = ()
    repeated: bool = False
    dry_run: bool = False
    recreated: bool = False

    def summary(self) -> str:
        """Return the report in one line."""
        verb = "would be deleted" if self.dry_run else "deleted"
        if self.repeated:
            if self.objects:
                rest = f"{self.objects:,} objects that it had left {verb}"
            else:
                rest = "nothing is left of it"
            return f"{self.kind} {self.name} was deleted before: {rest}"
        if self.recreated:
            return (
                f"{self.kind} {self.name} deleted, but recreated meanwhile: stream maintain"
                " collects the rest"
            )
        return f"{self.kind} {self.name}: {self.objects:,} objects, {self.size:,} bytes {verb}"


@validated
def delete_stream(
    lake: Lake, name: str, *, reason: str, by: str, force: bool = False, dry_run: bool = False
) -> DeletionReport:
    """Delete a stream of the lake permanently; safe to repeat after an interruption.

    Raises StillReadError while an Iceberg table holds its files or an open batch of an application
    reads or writes it, and, unless `force`, while an application has a checkpoint on it or a
    dataset follows it; after a forced deletion their next run fails with advice. A stream declared
    later under the name is a different stream. Raises StreamNotFoundError.

    For a stream of files, `name` has its system: "files.clicks". Its files stay; it forgets which
    of them it has admitted.
    """
    file_stream = find_file_stream(lake, name)
    if file_stream is not None:
        system, stream = file_stream
        file_log = system.file_log(stream)
        target = _Target(
            kind="stream",
            name=name,
            read_commit=file_log.log.current,
            find_readers=partial(_find_readers, lake, name),
            list_objects=partial(overview.list_deletable_objects, file_log),
            delete=partial(overview.delete_log, file_log, reason=reason, by=by),
        )
        return _delete(lake, target, reason, force=force, dry_run=dry_run)
    streams = LakeStreams(lake)
    target = _Target(
        kind="stream",
        name=name,
        read_commit=streams.log(name).current,
        find_readers=partial(find_stream_readers, lake, name),
        list_objects=partial(streams_deleting.list_deletable_objects, streams, name),
        delete=partial(streams_deleting.delete_stream, streams, name, reason=reason, by=by),
    )
    return _delete(lake, target, reason, force=force, dry_run=dry_run)


@validated
def delete_dataset(
    lake: Lake, name: str, *, reason: str, by: str, force: bool = False, dry_run: bool = False
) -> DeletionReport:
    """Delete a dataset and all its versions permanently; safe to repeat after an interruption.

    Raises StillReadError while a reader's lease, a hold or an open batch needs a version, and,
    unless `force`, while an application read it in its last batch or a build of it is recorded as
    running. Raises DatasetError for a member of a version set, and DatasetNotFoundError. Its stream
    is kept.
    """
    log = DatasetLog(lake, name).log

    def read_commit() -> Commit | None:
        """Return the current commit, None before the first; raises DatasetError for a member of a
        version set.
        """
        commit = log.current()
        if commit is not None:
            discard.check_deletable(name, commit)
        return commit

    target = _Target(
        kind="dataset",
        name=name,
        read_commit=read_commit,
        find_readers=partial(find_dataset_readers, lake, name),
        list_objects=partial(discard.list_deletable_objects, lake, name),
        delete=partial(discard.delete_dataset_objects, lake, name, reason=reason, by=by),
    )
    return _delete(lake, target, reason, force=force, dry_run=dry_run)


@dataclass(frozen=True, slots=True)
class _Target:
    """What is deleted: how its current commit, its readers and its objects are found, and how the
    objects are deleted.
    """

    kind: Literal["stream", "dataset"]
    name: str
    read_commit: Callable[[], Commit | None]
    find_readers: Callable[[], Readers]
    list_objects: Callable[[Commit], dict[str, int]]
    delete: Callable[[Commit], DeletedObjects]


def _delete(
    lake: Lake, target: _Target, reason: str, *, force: bool, dry_run: bool
) -> DeletionReport:
    """Delete what `target` describes, or only report it; raises StillReadError for readers, and the
    error for what does not exist.
    """
    kind = target.kind
    name = target.name
    require_reason(reason, f"{kind} {name!r}", "deleted")
    about: dict[str, Any] = {kind: name}
    if kind == "stream" and "." not in name:
        about = {kind: f"lake.{name}"}

    def decide() -> Callable[[], DeletionReport]:
        """Return the function that deletes what exists now, or only reports it in a dry run.

        Raises StillReadError for readers. Called again after a conflict, because there may be new
        ones.
        """
        seen = target.read_commit()
        if seen is None:
            raise _not_found_error(lake, target, about)
        was_deleted = is_deletion_commit(seen)
        if was_deleted:
            readers = Readers()  # none, so that what a deletion has left can be deleted
        else:
            readers = target.find_readers()
        if dry_run:
            sizes = target.list_objects(seen)
            report = DeletionReport(
                kind,
                name,
                objects=len(sizes),
                size=sum(sizes.values()),
                blocking=readers.blocking,
                affected=readers.affected,
                repeated=was_deleted,
                dry_run=True,
            )
            return lambda: report
        readers.check(
            f"{kind} {name!r} is still read",
            "Run the application, or abandon its batch (adjunct checkpoint abandon APPLICATION"
            " --reason …); close the readers. A lease that nobody renews expires within minutes.",
            "Remove it from these first. Or force the deletion (--force, force=True): no data is"
            " mixed up, and their next run fails with advice.",
            force=force,
            **about,
        )

        def commit() -> DeletionReport:
            """Delete what was seen; raises CommitConflictError if it has changed since."""
            deleted = target.delete(seen)
            return DeletionReport(
                kind,
                name,
                objects=deleted.objects,
                size=deleted.size,
                affected=readers.affected,
                repeated=was_deleted,
                recreated=deleted.left,
            )

        return commit

    return retry_conflicts(decide, attempts=_TRIES)


def _not_found_error(lake: Lake, target: _Target, about: Mapping[str, Any]) -> errors.AdjunctError:
    """Return the error for a stream or dataset that does not exist, with the names of those that
    do.
    """
    error_class: type[errors.AdjunctError]
    names: Iterable[str]
    if target.kind == "stream":
        error_class = errors.StreamNotFoundError
        names = [*LakeStreams(lake).list_streams(), *overview.list_stored(lake)]
    else:
        error_class = errors.DatasetNotFoundError
        names = list_datasets(lake)
    problem = (
        f"there is no {target.kind} {target.name!r} in {lake.url} to delete; there are:"
        f" {', '.join(names) or 'none'}."
    )
    return error_class(problem, "Check the name and the lake.", **about)
