"""Finds stored versions of a dataset by id, name or time, and opens readers of them; makes errors
where there is none.

These readers take no lease. Callers that may race with a discard lease the version, as an open
`Dataset` and a batch do, or report it as discarded where a file is missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, NoReturn, TypeAlias

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, BoundedDataset, QuerySource
from dagster_adjunct.assets.reading.diff import VersionDiff, diff_versions
from dagster_adjunct.assets.reading.key_lookup import FileCache
from dagster_adjunct.assets.reading.valid_time import VersionsOverTime
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.sources.version_source import Awaiting
from dagster_adjunct.assets.versions import dataset_log
from dagster_adjunct.assets.versions import switches as actions
from dagster_adjunct.assets.versions.dataset_log import (
    CommittedManifest,
    CurrentManifest,
    DatasetLog,
)
from dagster_adjunct.assets.versions.manifest import (
    Change,
    DatasetManifest,
    UnboundedManifest,
    as_bounded,
    parse_manifest,
)
from dagster_adjunct.assets.versions.switches import HistoryEntry, VersionActions
from dagster_adjunct.assets.versions.version import (
    SealedVersion,
    VersionRef,
    check_declaration,
    paths_of,
    version_number,
)
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.commit_log import Commit, commit_number, is_deletion_commit
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import requests_at_once
from dagster_adjunct.resources.schemas.column_changes import FixedColumns, evolve
from dagster_adjunct.resources.schemas.version_columns import NamedColumns
from dagster_adjunct.resources.streams.system import StreamSystem
from dagster_adjunct.resources.threads import map_in_threads, requested_once
from dagster_adjunct.resources.validation import Limit, validated, validated_methods

AsOf: TypeAlias = datetime | int | str
"""A time with its zone, or a commit by its number or id."""


def resolve_version(
    log: DatasetLog,
    current: Commit,
    manifest: DatasetManifest,
    version: str | None,
    as_of: AsOf | None = None,
) -> SealedVersion:
    """Return a retained version by id, or the newest one of a name, or the one served `as_of` a
    time or commit.

    Exactly one of `version` and `as_of` is given. `manifest` is that of the `current` commit.
    Commit times are by their writers' clocks. Raises DatasetError for an unknown or revoked version
    or commit, NoSealedVersionError where nothing was served yet, VersionDiscardedError for a
    discarded version of an unbounded dataset, and ConfigurationError for both or neither argument
    and for a time without zone.
    """
    _validate_request(log.name, version, as_of)
    if version is not None and manifest.version is not None and manifest.version.id == version:
        return manifest.version
    if isinstance(manifest, UnboundedManifest):
        history = _CommitHistory(log, current, manifest)
        if version is None:
            assert as_of is not None
            return history.served_as_of(as_of)
        if version_number(version):  # it has the form of an id; raises if it was discarded
            manifest.check_kept(version)
        return history.find_by_prefix(version) or read_committed_version(log, manifest, version)
    if version is not None:
        return log.read_version(actions.require_readable_version(manifest, version))
    served = None
    for past in log.history():
        if _matches_commit(past.commit, as_of):
            served = past.manifest.version
            break
    if served is None:
        raise errors.NoSealedVersionError(
            f"dataset {log.name!r}: its history has no version served {_describe_as_of(as_of)}.",
            f"See adjunct dataset history {log.name}, and adjunct dataset versions {log.name}.",
            dataset=log.name,
        )
    # Raises if it was revoked or is not retained.
    actions.require_readable_version(manifest, served.id)
    return served


def _validate_request(dataset: str, version: str | None, as_of: AsOf | None) -> None:
    """Raise ConfigurationError unless one of both is given, and a time has a zone."""
    if (version is None) == (as_of is None):
        if version is None:
            asked = "neither version nor as_of"
        else:
            asked = f"both version {version!r} and as_of {as_of}"
        raise errors.ConfigurationError(
            f"dataset {dataset!r}: {asked} is given, expected one of the two.",
            "Give version= or as_of=.",
            argument="as_of",
            dataset=dataset,
        )
    if isinstance(as_of, datetime) and as_of.tzinfo is None:
        raise errors.ConfigurationError(
            f"dataset {dataset!r}: as_of is {as_of}, expected a time with its zone.",
            "Give it one, such as tzinfo=UTC.",
            argument="as_of",
            dataset=dataset,
        )


def _matches_commit(commit: Commit, as_of: AsOf | None) -> bool:
    """Whether the commit has this number or id, or was made at or before this time; False for
    None.
    """
    if isinstance(as_of, datetime):
        return commit.created_at <= as_of
    return as_of in (commit.number, commit.id)


def _describe_as_of(as_of: AsOf | None) -> str:
    """Return in words when something was served: "at …" or "after commit …"."""
    if isinstance(as_of, datetime):
        return f"at {as_of:%Y-%m-%d %H:%M:%S %Z}"
    return f"after commit {as_of}"


def read_batch_version(log: DatasetLog, manifest: DatasetManifest, version: str) -> SealedVersion:
    """Return the version with this id, with which a batch began.

    It may have been revoked since, or rewritten by an erasure: the original is kept until the batch
    has ended, because a part of the batch's output may be written already. Raises DatasetError
    where it is gone.
    """
    if manifest.version is not None and manifest.version.id == version:
        return manifest.version
    if isinstance(manifest, UnboundedManifest):
        return read_committed_version(log, manifest, version)
    ref = manifest.ref(version)
    if ref is not None:
        return log.read_version(ref)
    # An erasure has doomed its document, which stays as long as the version is held.
    document = f"{log.prefix}/versions/{version}-"
    for entry in manifest.doomed:
        if entry.startswith(document):
            with suppress(errors.ObjectNotFoundError):
                return log.read_document(entry)
    return log.read_version(actions.require_version(manifest, version))  # raises


def read_committed_version(
    log: DatasetLog, manifest: UnboundedManifest, version: str
) -> SealedVersion:
    """Return an unbounded dataset's version by its id, which contains number and id of its commit.

    Raises DatasetError where there is no such commit, or its manifest is gone.
    """
    number, _, commit_id = version.removeprefix("v").partition("-")
    sealed = None
    if number.isdecimal() and commit_id:
        with suppress(errors.ObjectNotFoundError, errors.MalformedDocumentError):
            commit = log.log.read(log.log.manifest_key(int(number), commit_id))
            sealed = parse_manifest(log.name, commit).version
    if sealed is None or sealed.id != version:
        newest = manifest.served_id or "none"
        raise errors.DatasetError(
            f"dataset {log.name!r} has no version {version!r}; the current one is {newest}, and"
            f" those from number {manifest.retained_from} on can be read.",
            f"See adjunct dataset history {log.name}.",
            dataset=log.name,
            version=version,
        )
    return sealed


@dataclass
class _CommitHistory:
    """The readable commits of an unbounded dataset. They are listed once; each is read when it is
    needed.

    `manifest` is that of the `current` commit.
    """

    log: DatasetLog
    current: Commit
    manifest: UnboundedManifest
    read: dict[int, Commit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read[self.current.number] = self.current

    @requested_once
    def keys(self) -> dict[int, list[str]]:
        """The object keys of the stored manifests, by commit number."""
        keys: dict[int, list[str]] = {}
        for item in self.log.lake.store.list(f"{self.log.prefix}/manifests/"):
            keys.setdefault(commit_number(item.key), []).append(item.key)
        return keys

    @requested_once
    def numbers(self) -> list[int]:
        """The numbers of the readable commits, in order."""
        found = []
        for number in sorted(self.keys):
            if self.manifest.retained_from <= number <= self.current.number:
                found.append(number)
        return found

    def served_as_of(self, as_of: AsOf) -> SealedVersion:
        """Return the version served at that time or after that commit; raises what
        `resolve_version` raises.
        """
        then = None
        if isinstance(as_of, datetime):  # the newest commit at or before it
            earlier = bisect_right(self.numbers, as_of, key=self._created_at)
            if earlier:
                then = self.manifest_at(self.numbers[earlier - 1])
        else:
            then = self.manifest_of(as_of)
        if then is None or then.version is None:
            self.raise_not_readable(_describe_as_of(as_of))
        self.manifest.check_kept(then.version.id)
        return then.version

    def find_by_prefix(self, version: str) -> SealedVersion | None:
        """Return the version whose id starts with `version`, which has to contain the whole number;
        None if there is none, or if it is not retained.
        """
        if not actions.ID_PREFIX.fullmatch(version):
            return None
        number = version_number(version)
        if not self.manifest.retained_from <= number <= self.current.number:
            return None
        try:
            sealed = self.served_as_of(number)
        except errors.DatasetError:  # nothing was served after that commit
            return None
        if not sealed.id.startswith(version):
            return None
        return sealed

    def commit_at(self, number: int) -> Commit:
        """Return a commit by its number.

        A writer that lost the race for a number may have left a manifest with it too; the next
        commit names the right one.
        """
        if number not in self.read:
            keys = self.keys[number]
            if len(keys) > 1:  # not the current commit, which `read` has
                keys = [self.log.log.manifest_key(number, str(self.commit_at(number + 1).parent))]
            try:
                self.read[number] = self.log.log.read(keys[0])
            except errors.ObjectNotFoundError as error:
                raise errors.VersionDiscardedError(
                    f"dataset {self.log.name!r}: commit {number} was discarded during this read.",
                    "Retry to read what is left.",
                    dataset=self.log.name,
                ) from error
        return self.read[number]

    def _created_at(self, number: int) -> datetime:
        return self.commit_at(number).created_at

    def _serves_version(self, number: int) -> bool:
        return self.manifest_at(number).version is not None

    def manifest_at(self, number: int) -> DatasetManifest:
        """Return the manifest of a commit by its number."""
        return parse_manifest(self.log.name, self.commit_at(number))

    def manifest_of(self, asked: int | str) -> DatasetManifest | None:
        """Return the manifest of the commit with this number or id.

        None for a number before the oldest readable commit. Raises DatasetError for an unknown
        commit.
        """
        number = None
        if isinstance(asked, str):
            for likely in self.numbers:
                named = any(key.endswith(f"-{asked}.json") for key in self.keys[likely])
                if named and self.commit_at(likely).id == asked:
                    number = likely
                    break
        elif asked in self.numbers:
            number = asked
        elif 1 <= asked < self.manifest.retained_from:
            return None
        if number is None:
            raise errors.DatasetError(
                f"dataset {self.log.name!r} has no commit {asked!r}; those that can be read are"
                f" numbered {self.numbers[0]} to {self.numbers[-1]}.",
                f"See adjunct dataset history {self.log.name}.",
                dataset=self.log.name,
            )
        return self.manifest_at(number)

    def raise_not_readable(self, asked: str) -> NoReturn:
        """Raise the error that no version of this time or commit is readable, naming the oldest
        readable version.

        It is a VersionDiscardedError if earlier versions were discarded, else a
        NoSealedVersionError.
        """
        name = self.log.name
        first = bisect_left(self.numbers, True, key=self._serves_version)
        if first == len(self.numbers):
            raise errors.NoSealedVersionError(
                f"dataset {name!r} has no version to read yet: its bootstrap is not finished.",
                "Advance the dataset.",
                dataset=name,
            )
        commit = self.commit_at(self.numbers[first])
        when = f"{commit.created_at:%Y-%m-%d %H:%M:%S} UTC"
        oldest = f"the oldest readable version was committed at {when}, as number {commit.number}"
        if self.manifest.retained_from > 1:
            raise errors.VersionDiscardedError(
                f"dataset {name!r}: the version served {asked} has been discarded; {oldest}.",
                f"See adjunct dataset history {name}. A longer grace keeps more:"
                " discard=DiscardPolicy(grace=…).",
                dataset=name,
            )
        raise errors.NoSealedVersionError(
            f"dataset {name!r} served nothing {asked}; {oldest}.",
            f"See adjunct dataset history {name}.",
            dataset=name,
        )


@validated
def list_datasets(lake: Lake) -> list[str]:
    """Return the sorted names of all datasets that have a commit, so without set members that never
    advanced.

    Manifests are not read, so a dataset with an unreadable commit is listed and raises when it is
    opened.
    """
    names = [item.key.rsplit("/", 1)[-1] for item in lake.store.list(f"{dataset_log.NAMES}/")]
    return sorted(name for name in names if _has_commit(lake, name))


def dataset_not_found_error(lake: Lake, name: str) -> errors.DatasetNotFoundError:
    """Return the error for an unknown dataset, listing the existing ones."""
    known = ", ".join(list_datasets(lake)) or "none"
    return errors.DatasetNotFoundError(
        f"there is no dataset {name!r} in {lake.url}; there are: {known}.",
        "Check the name and the lake, or advance the dataset once to create it.",
        dataset=name,
    )


def _has_commit(lake: Lake, name: str) -> bool:
    """Whether a dataset has a manifest, of its own or in its version set; True if its commit can't
    be read.
    """
    try:
        own = DatasetLog(lake, name).log.current()
        set_name = None
        if own is not None:
            set_name = dataset_log.redirect_target(own)
        if own is None or set_name is None:
            return own is not None and not is_deletion_commit(own)
        shared = dataset_log.version_set_log(lake, set_name).current()
        members = {}
        if shared is not None:
            members = dataset_log.member_bodies(shared)
        return members.get(name, own.body.get("manifest")) is not None
    except errors.MalformedDocumentError:
        return True


_HIDDEN = {
    "format",
    "version",
    "delivered",
    "known",
    "known_columns",
    "next_generation",
    "next_number",
    "doomed",
}


@validated_methods
class VersionOperations(VersionActions, ABC):
    """The operations of a dataset that read and write its log. Every call reads the current
    pointer.

    Each change is one commit; for a member of a version set, a commit of the whole set. The history
    keeps its `reason` and who made it (`by`).
    """

    @abstractmethod
    def _newest(self) -> DatasetManifest:
        """Return the newest manifest. Raises DatasetNotFoundError before the first commit."""

    # -- what is known

    def versions(self) -> tuple[VersionRef, ...]:
        """Return all retained versions of a bounded dataset in the order of their creation."""
        return self._newest().listed

    def history(self, limit: Limit | None = 100) -> list[HistoryEntry]:
        """Return the newest commits, newest first: the action, its version, author, time and
        reason.

        Each entry names the version served after it, and whether that is still readable.
        """
        commits = list(islice(self._log.history(), limit))
        entries = []
        for commit, manifest in commits:
            change = manifest.change or Change(action="commit")
            served = manifest.served_id
            is_readable = served is not None and commits[0].manifest.retains(served)
            entries.append(
                HistoryEntry(
                    number=commit.number,
                    at=commit.created_at,
                    by=commit.by,
                    action=change.action,
                    version=change.version,
                    reason=change.reason,
                    served=served,
                    readable=is_readable,
                )
            )
        return entries

    def describe(self) -> dict[str, Any]:
        """Return a description of the dataset as JSON-able values. Raises DatasetNotFoundError."""
        manifest = self._newest()
        described = {}
        for name, value in manifest.model_dump(mode="json").items():
            if name not in _HIDDEN:
                described[name] = value
        version = manifest.version
        if version is None:
            return {**described, "version": None}
        facts = version.model_dump(mode="json", exclude={"generations", "digest", "positioned"})
        facts["stored_rows"] = version.stored_rows
        facts["bytes"] = sum(generation.size for generation in version.generations)
        facts["files"] = sum(len(generation.files) for generation in version.generations)
        facts["generations"] = len(version.generations)
        return {**described, "version": facts}


class StoredVersions(VersionOperations):
    """The stored versions of one dataset. Every call reads the current pointer; readers stay at
    their version.

    `spec` is the declaration, or only the name of an existing dataset. A declaration must match the
    stored one: reading a manifest raises DatasetError if it does not. All readers share `cache`.

    A version has the columns and names of its own time. With `named_now`, as for joins, its columns
    have the names that they have now, and dropped ones are left out.
    """

    def __init__(
        self,
        lake: Lake,
        spec: AdjunctDataset | str,
        cache: FileCache | None = None,
        *,
        named_now: bool = False,
    ) -> None:
        self.spec: AdjunctDataset | None = None
        if isinstance(spec, str):
            self.name = spec
        else:
            self.name = spec.name
            self.spec = spec
        self.log = DatasetLog(lake, self.name)
        self._lake = lake
        super().__init__(self.log)
        self._cache = cache or FileCache()
        self._named_now = named_now

    def manifest(self) -> DatasetManifest | None:
        """Return the newest manifest, None before the first commit. Two requests."""
        return self.read().manifest

    def read(self) -> CurrentManifest:
        """Return the newest commit and its manifest. Raises DatasetError if the declaration does
        not match it.
        """
        current = self.log.read()
        spec = self.spec
        if current.manifest is not None and spec is not None:
            # The stream's types and partitions are not compared.
            declared = {
                "kind": spec.kind,
                "key": spec.key,
                "paths": paths_of(spec),
                "partition_by": spec.partition_by,
                "partitions": spec.partitions,
                "input": str(spec.input),
            }
            stored = current.manifest.declaration
            check_declaration(spec, stored, stored.model_copy(update=declared))
        return current

    def _read_members(self) -> dict[str, DatasetManifest]:
        """Return the newest manifests of all members of the version set, or of this dataset."""
        return self.log.read_all().manifests

    def current(self) -> VersionReader | None:
        """Return a reader of the served version, None if there is none."""
        return self.reader_of(self.manifest())

    def reader_of(self, manifest: DatasetManifest | None) -> VersionReader | None:
        """Return a reader of the version that this manifest of the dataset serves, None if there is
        none.
        """
        if manifest is None or manifest.version is None:
            return None
        return self._reader(manifest, manifest.version)

    def require_current(self, systems: Mapping[str, StreamSystem] | None = None) -> VersionReader:
        """Return a reader of the served version, or raise NoSealedVersionError saying what the next
        one waits for.

        With `systems` and a declaration, the error names the partitions without a marker.
        """
        manifest = self.manifest()
        reader = self.reader_of(manifest)
        if reader is None:
            raise self.not_served_error(manifest, systems)
        return reader

    def not_served_error(
        self, manifest: DatasetManifest | None, systems: Mapping[str, StreamSystem] | None = None
    ) -> errors.NoSealedVersionError:
        """Return the error that says what the first version waits for, as far as that is known; see
        `require_current`.
        """
        waiting = None
        unserved = _Unserved(self.spec, manifest)
        if self.spec is not None and systems is not None and unserved.is_delivered:
            awaiting = self.awaiting(systems, manifest)
            others: list[str] = []
            if awaiting is None:  # it is delivered, and other members of the set may not have it
                for member in self.log.read_all().manifests.values():
                    if member.name != self.name and member.awaited:
                        others += member.awaited.missing
            waiting = unserved.describe_waiting(awaiting, others)
        return unserved.error(self.name, waiting)

    def awaiting(
        self, systems: Mapping[str, StreamSystem], manifest: DatasetManifest | None
    ) -> Awaiting | None:
        """Return what a bounded dataset's next version waits for, None if one is completely
        delivered.

        `manifest` is the newest of the dataset. Builds and commits nothing. Needs the declaration,
        not only the name.
        """
        from dagster_adjunct.assets.sources.open_source import open_source

        assert isinstance(self.spec, BoundedDataset)
        source = open_source(systems, self.spec, self._lake)
        known: DatasetManifest
        if manifest is None:
            known = source.first_manifest()
        else:
            known = source.follow_repartition(manifest) or manifest
        offered = source.next(as_bounded(known))
        if isinstance(offered, Awaiting):
            return offered
        return None

    def version(self, version: str | None = None, *, as_of: AsOf | None = None) -> VersionReader:
        """Return a reader of a retained version: by id, the newest of a name, or the one served
        `as_of` then.

        `as_of` is a time with its zone (the newest commit at or before it, by its writer's clock),
        or a commit's number or id. Raises DatasetError for a revoked version, NoSealedVersionError
        where nothing was served then, and VersionDiscardedError (DatasetError for a bounded
        dataset), naming what is retained, for a discarded one.
        """
        current, manifest = self.newest()
        sealed = resolve_version(self.log, current, manifest, version, as_of)
        return self._reader(manifest, sealed)

    def over_time(self, versions: Sequence[str]) -> VersionsOverTime:
        """Return a reader of these versions of a bounded dataset over time, by the times that they
        state.

        Raises DatasetError where none states its time, and what `version_of_batch` raises.
        """
        manifest = self.require_manifest()
        sealed = [read_batch_version(self.log, manifest, version) for version in versions]
        return VersionsOverTime(self._lake.store, self.name, sealed)

    def version_of_batch(self, version: str) -> VersionReader:
        """Return a reader of the version with which an open batch began, even if it was revoked
        since.

        Raises DatasetError where it is gone.
        """
        manifest = self.require_manifest()
        return self._reader(manifest, read_batch_version(self.log, manifest, version))

    def diff(self, old: str, new: str, *, sample: int = 20) -> VersionDiff:
        """Return the differences between two versions, by id or name: counts, and up to `sample`
        keys of each kind.

        Raises VersionDiscardedError where one is discarded meanwhile; a `Lease` on both prevents
        that.
        """
        before = self.version(old)
        after = self.version(new)
        try:
            return diff_versions(before, after, sample=sample)
        except errors.ManifestMismatchError:
            manifest = self.require_manifest()
            for view in (before, after):  # raises if the file is missing because of a discard
                manifest.check_kept(view.version)
            raise

    def require_manifest(self) -> DatasetManifest:
        """Return the newest manifest. Raises DatasetNotFoundError before the first commit."""
        return self.newest().manifest

    def _newest(self) -> DatasetManifest:
        return self.newest().manifest

    def newest(self) -> CommittedManifest:
        """Return the newest commit and its manifest. Raises DatasetNotFoundError before the
        first one.
        """
        commit, manifest = self.read()
        if commit is None or manifest is None:
            raise dataset_not_found_error(self._lake, self.name)
        return CommittedManifest(commit, manifest)

    def _reader(self, manifest: DatasetManifest, version: SealedVersion) -> VersionReader:
        """Return a reader of a version; `manifest` is the newest one of the dataset."""
        if self._named_now:
            columns = find_current_columns(manifest, self.spec)
            if columns is not None:
                version = version.named_as(columns)
        return VersionReader(self._lake.store, self.name, version, self._cache)


def find_current_columns(
    manifest: DatasetManifest, spec: AdjunctDataset | None
) -> NamedColumns | None:
    """Return a dataset's columns with the names that they have now, also by a declaration that no
    version follows yet; None without a version.

    Raises DatasetError for renamed and dropped columns that contradict what is stored.
    """
    known = manifest.named_columns
    if known is None or spec is None or not spec.evolution:
        return known
    after = evolve(known.schema, known.names, None, spec.evolution, FixedColumns(spec.key))
    if after.problems:
        raise errors.DatasetError(
            f"dataset {spec.name!r} can't follow its columns: {'; '.join(after.problems)}.",
            "Correct renamed= and drop= of the dataset.",
            dataset=spec.name,
        )
    return NamedColumns(after.schema, after.names)


def open_stored_versions(lake: Lake, name: str) -> StoredVersions:
    """Return the versions of an existing dataset. Raises DatasetNotFoundError."""
    stored = StoredVersions(lake, name)
    stored.require_manifest()
    return stored


def current_manifests(datasets: Mapping[str, StoredVersions]) -> dict[str, DatasetManifest | None]:
    """Return each dataset's newest manifest, None without one; those of members of one version set
    come from one snapshot of it.

    Datasets that are declared in no set are read in parallel. Of any other, it is only known
    afterwards which ones were read with it.
    """
    alone = []
    for stored in datasets.values():
        if stored.spec is not None and stored.spec.version_set is None:
            alone.append(stored)
    limits = [requests_at_once(stored._lake.store) for stored in datasets.values()]
    at_once = min(limits, default=1)
    found = map_in_threads(StoredVersions._read_members, alone, at_once)
    snapshots = {stored.name: members for stored, members in zip(alone, found, strict=True)}
    manifests: dict[str, DatasetManifest | None] = {}
    for name, stored in datasets.items():
        if name not in manifests:
            snapshot = snapshots[name] if name in snapshots else stored._read_members()
            manifests = {name: snapshot.get(name), **snapshot, **manifests}  # the first read counts
    return {name: manifests[name] for name in datasets}


@dataclass(frozen=True, slots=True)
class _Unserved:
    """A dataset that serves no version: its declaration and manifest, each None if unknown."""

    spec: AdjunctDataset | None
    manifest: DatasetManifest | None

    @property
    def refs(self) -> tuple[VersionRef, ...]:
        """Its retained versions."""
        if self.manifest is None:
            return ()
        return self.manifest.listed

    @property
    def is_revoked(self) -> bool:
        """Whether a version was revoked."""
        return any(ref.state == "revoked" for ref in self.refs)

    @property
    def is_local(self) -> bool:
        """Whether the batches of one application write it."""
        if self.spec is not None and self.spec.is_local:
            return True
        return self.manifest is not None and self.manifest.declaration.owner is not None

    @property
    def follows_changes(self) -> bool:
        """Whether it follows a change stream."""
        if self.manifest:
            return self.manifest.versions_are_commits
        return self.spec is not None and self.spec.follows_changes

    @property
    def is_computed(self) -> bool:
        """Whether a query computes the versions."""
        if self.spec:
            return isinstance(self.spec.input, QuerySource)
        return self.manifest is not None and self.manifest.declaration.computed

    @property
    def has_partitions(self) -> bool:
        """Whether its asset has a partition for each version, by name."""
        if self.spec:
            return self.spec.versions is not None
        return self.manifest is not None and self.manifest.declaration.order == "name"

    @property
    def is_delivered(self) -> bool:
        """Whether versions are delivered through the input, and not commits of changes or computed
        by a query; False also if one of them was revoked.
        """
        is_made_otherwise = self.follows_changes or self.is_computed
        return not is_made_otherwise and not self.is_revoked

    def error(self, name: str, waiting: str | None) -> errors.NoSealedVersionError:
        """Return the error that no version can be read. `waiting` describes what the next version
        waits for, None if that is unknown.
        """
        if self.is_computed:
            command = f"adjunct dataset advance {name} MODULE:APP"
            if self.has_partitions:
                command += " --partition NAME"
            step = f"Materialise {self._describe_partitions()} in Dagster, or run {command}."
        else:
            step = (
                "Advance it when a version is completely delivered: materialise its asset, or use"
                " adjunct run MODULE:APP."
            )
        return errors.NoSealedVersionError(
            f"dataset {name!r} has no version to read yet: {self._describe_cause(waiting)}.",
            step,
            dataset=name,
        )

    def describe_waiting(self, awaiting: Awaiting | None, others: Sequence[str] = ()) -> str:
        """Return in words what the next version waits for; None says that it is completely
        delivered.

        `others` are the markers that the other members of its version set wait for.
        """
        if awaiting is None:
            done = "one is completely delivered, but not published yet"
            if not others:
                return done
            return (
                f"{done}, and other members of its version set wait for the end-of-dataset markers"
                f" of {', '.join(others)}"
            )
        if awaiting.version:
            version = f"version {awaiting.version!r}"
        else:
            version = "the first version"
        since = ""
        if self.manifest is not None and self.manifest.awaited:
            since = f" since {self.manifest.awaited.since:%Y-%m-%d %H:%M} UTC"
        return f"{version} waits{since} for {awaiting.described}"

    def _describe_cause(self, waiting: str | None) -> str:
        """Return in words why no version can be read; for `waiting` see `error`."""
        if self.is_local:
            return "no batch of its application has written it"
        if self.follows_changes:
            return "its bootstrap is not finished"
        if self.is_revoked:
            return "all that were sealed are revoked"
        refused = ""
        for ref in self.refs:
            if ref.state == "rejected":  # the last one counts
                refused = f"version {ref.name!r} was rejected ({ref.reason})"
        if not self.is_computed:
            cause = waiting or (
                "no version has been marked as complete in every partition of"
                f" {self._name_source()} and sealed"
            )
            if refused:
                cause += f"; {refused}"
            return cause
        if refused:
            return refused
        if self.has_partitions:
            return "a query computes each of its partitions, and none has been materialised"
        return "a query computes it, and has not run yet"

    def _name_source(self) -> str:
        """Return what errors call the input."""
        if self.manifest is not None:
            return self.manifest.declaration.input
        if self.spec is None:
            return "its input"
        return str(self.spec.input)

    def _describe_partitions(self) -> str:
        """Return in words what to materialise in Dagster."""
        versions = None
        if self.spec is not None:
            versions = self.spec.versions
        if versions is not None and versions.start is not None:
            return f"the partition of a day of its asset ({versions.start} is the first)"
        if versions is not None and versions.names:
            return f"one of the partitions of its asset ({', '.join(versions.names[:5])}, …)"
        if self.has_partitions:
            return "a partition of its asset"
        return "its asset"


def no_complete_version_error(
    spec: AdjunctDataset, manifest: DatasetManifest | None, awaiting: Awaiting
) -> errors.NoSealedVersionError:
    """Return the error for a declared dataset of which no version is complete: the next one
    waits for `awaiting`.
    """
    unserved = _Unserved(spec, manifest)
    waiting = None
    if unserved.is_delivered:
        waiting = unserved.describe_waiting(awaiting)
    return unserved.error(spec.name, waiting)
