"""What a dataset served after each of its commits.

A commit has a number. 0 is before the first one, when nothing was served. The commits of a version
set are counted on from the number of the commit with which the dataset joined it. Many commits
leave the entries as they are: those that serve the same version, compactions and repartitionings.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import NamedTuple

from dagster_adjunct.assets.versions.dataset_log import (
    DatasetLog,
    member_bodies,
    no_commit_error,
    redirect_target,
    version_set_log,
)
from dagster_adjunct.assets.versions.manifest import (
    DatasetManifest,
    UnboundedManifest,
    parse_manifest,
)
from dagster_adjunct.assets.versions.version import SealedVersion
from dagster_adjunct.resources.errors import ObjectNotFoundError, VersionDiscardedError
from dagster_adjunct.resources.objects.commit_log import Commit, CommitLog, is_deletion_commit
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import CHANGES

ERASE_ACTION = "erase"
REPARTITION_ACTION = "repartition"
SAME_ENTRIES = ("compact", REPARTITION_ACTION)


class Compaction(NamedTuple):
    """The versions of a table before and after its base was replaced, which have the same
    entries.
    """

    before: SealedVersion
    after: SealedVersion


@dataclass(frozen=True, slots=True)
class Served:
    """What a dataset served after a commit: `manifest` is None before its first one, and after it
    was deleted.
    """

    number: int
    at: datetime | None = None
    manifest: DatasetManifest | None = None

    @property
    def version(self) -> SealedVersion | None:
        """The version served, None for nothing."""
        if self.manifest is None:
            return None
        return self.manifest.version

    @property
    def id(self) -> str | None:
        """The id of the version served, None for nothing."""
        if self.manifest is None:
            return None
        return self.manifest.served_id

    @property
    def action(self) -> str:
        """What the commit did, as in the history of the dataset."""
        if self.manifest is None or self.manifest.change is None:
            return ""
        return self.manifest.change.action


@dataclass
class ServedHistory:
    """The commits of a dataset up to the `newest`. Each is read once, when it is needed.

    `log` has the dataset's own commits, `shared` those of the version set that it has joined (None:
    none). `joined` is the number of the commit with which it joined, 0 without a set. `manifest` is
    the one that says which versions are stored now. Errors name the dataset's stream in the stream
    system `system`.
    """

    log: DatasetLog
    newest: Served
    manifest: DatasetManifest
    joined: int = 0
    shared: CommitLog | None = None
    system: str = CHANGES
    _read: dict[int, Commit] = field(default_factory=dict)
    _served: dict[int, Served] = field(default_factory=dict)
    _stored: dict[int, tuple[SealedVersion, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, lake: Lake, dataset: str) -> ServedHistory:
        """Return the commits of a dataset as they are now. Raises DatasetNotFoundError."""
        log = DatasetLog(lake, dataset)
        own = log.log.current()
        if own is None or is_deletion_commit(own):
            raise no_commit_error(lake, dataset)
        set_name = redirect_target(own)
        if set_name is None:
            return cls._up_to(log, own, parse_manifest(dataset, own))
        shared = version_set_log(lake, set_name)
        commit = shared.current()
        if commit is not None and member_bodies(commit).get(dataset) is not None:
            return cls._up_to(log, commit, _member_manifest(dataset, commit), own.number, shared)
        # It has joined a set that has no commit with it yet: what it had before is served.
        body = own.body.get("manifest")
        if body is None:
            raise no_commit_error(lake, dataset)
        return cls._up_to(log, own, parse_manifest(dataset, replace(own, body=body)))

    @classmethod
    def _up_to(
        cls,
        log: DatasetLog,
        commit: Commit,
        manifest: DatasetManifest,
        joined: int = 0,
        shared: CommitLog | None = None,
    ) -> ServedHistory:
        """Return the history of which this commit is the newest: one of `log`, or with `shared` of
        the version set. `manifest` is the dataset's in it.
        """
        number = joined + commit.number
        newest = Served(number, commit.created_at, manifest)
        history = cls(log, newest, manifest, joined, shared)
        history._read[number] = commit
        history._served[number] = newest
        return history

    @property
    def number(self) -> int:
        """The number of the newest commit."""
        return self.newest.number

    def up_to(self, number: int) -> ServedHistory:
        """Return the history as it was after the commit of this number. What is stored is still
        decided by the manifest of now.
        """
        return replace(self, newest=self.at(number))

    def with_known(self, other: ServedHistory) -> ServedHistory:
        """Return this history, with the commits that an earlier reading of it has read."""
        read = {**other._read, **self._read}
        return replace(self, _read=read, _served={**other._served, **self._served})

    def candidates(self) -> Sequence[int]:
        """Return the numbers, in order, of all commits that may serve other files than those before
        them.
        """
        return self._candidates(0, self.number)

    # -- one commit

    def at(self, number: int) -> Served:
        """Return what was served after a commit. Raises VersionDiscardedError if that is no longer
        known.
        """
        if number == 0:
            return Served(0)
        if number not in self._served:
            self._served[number] = self._find(number)
        return self._served[number]

    def _find(self, number: int) -> Served:
        """Return what the stored commit of this number serves: one of the version set, or one of
        the dataset's own log, which may delete it, or let it join a version set.
        """
        commit = self._commit(number)
        name = self.log.name
        is_of_set = self.shared is not None and number > self.joined
        if is_of_set:
            if member_bodies(commit).get(name) is None:  # it joined a set that had commits already
                return replace(self.at(self.joined), number=number)
            return Served(number, commit.created_at, _member_manifest(name, commit))
        if is_deletion_commit(commit):
            return Served(number, commit.created_at)
        if redirect_target(commit) is not None:  # it has joined, with the manifest it had, if any
            body = commit.body.get("manifest")
            if body is None:
                return Served(number, commit.created_at)
            commit = replace(commit, body=body)
        return Served(number, commit.created_at, parse_manifest(name, commit))

    def _commit(self, number: int) -> Commit:
        """Return a commit by its number. Raises VersionDiscardedError if it is no longer stored.

        A writer that lost the race for a number may have left a manifest with it too; the next
        commit of the same log names the right one. The last commit of a log has no next one.
        """
        if number in self._read:
            return self._read[number]
        if self.shared is not None and number > self.joined:
            log = self.shared
            number_in_log = number - self.joined
        else:
            log = self.log.log
            number_in_log = number
        prefix = f"{log.prefix}/manifests/{number_in_log:012d}-"
        keys = [item.key for item in log.store.list(prefix)]
        is_last_own = self.shared is not None and number == self.joined
        has_next = number < self.number and not is_last_own
        if len(keys) > 1 and has_next:
            keys = [log.manifest_key(number_in_log, str(self._commit(number + 1).parent))]
        try:
            self._read[number] = log.read(keys[-1])
        except (IndexError, ObjectNotFoundError) as error:
            raise self.discarded_error(number) from error
        return self._read[number]

    def versions_at(self, number: int) -> tuple[SealedVersion, ...]:
        """Return stored versions with the entries that were served after a commit: the newest one,
        then the oldest one, which is that of the commit itself if it is still stored.

        () if nothing was served, one version if only one is left. Later commits keep the entries if
        they only compact or repartition: the newest version is the one that shares a base, or the
        number of partitions, with what is served since. Raises VersionDiscardedError if none is
        left.
        """
        if number not in self._stored:
            self._stored[number] = self._find_stored(number)
        return self._stored[number]

    def _find_stored(self, number: int) -> tuple[SealedVersion, ...]:
        """Return what `versions_at` returns, from the manifests of this and later commits."""
        version = self.at(number).version
        if version is None:
            return ()
        stored = {}  # by id, oldest first
        if self.is_stored(version):
            stored[version.id] = version
        for later in self._candidates(number, self.number):
            try:
                if not self._keeps_entries(later):
                    break
                version = self.at(later).version
            except VersionDiscardedError:  # unknown whether it keeps them
                break
            if version is not None and self.is_stored(version):
                stored[version.id] = version
        if not stored:
            raise self.discarded_error(number)
        versions = list(stored.values())
        if len(versions) == 1:
            return (versions[0],)
        return (versions[-1], versions[0])

    def is_stored(self, version: SealedVersion) -> bool:
        """Whether the files of a version still exist, as far as the manifest of now knows: those of
        a doomed one may be gone.
        """
        return all(part.folder in self._folders for part in version.generations if part.files)

    @cached_property
    def _folders(self) -> set[str]:
        """The folders and documents that the manifest of now needs, or has doomed."""
        return self.manifest.reachable() | set(self.manifest.doomed)

    def is_retained(self, version: SealedVersion) -> bool:
        """Whether a version can be leased. One that can't may hold keys that were erased."""
        try:
            self.manifest.check_kept(version.id)
        except VersionDiscardedError:
            return False
        return self.is_stored(version)

    def discarded_error(self, number: int) -> VersionDiscardedError:
        """Return the error that what was served after a commit is gone."""
        name = self.log.name
        stream = f"{self.system}.{name}"
        return VersionDiscardedError(
            f"dataset {name!r}: what it served after its commit {number} has been discarded, so"
            " what has changed since is unknown.",
            "Empty what follows it, or send to new tables and streams, because rows that were"
            " deleted since would stay. Then read everything again: adjunct startpoint set"
            f" MODULE:APP {stream} --oldest --reason …. To keep versions longer for readers that"
            " lag: discard=DiscardPolicy(followed=…).",
            dataset=name,
        )

    # -- several commits

    def last_change(self) -> int:
        """Return the number of the last commit that changed the entries that are served, 0 if none
        did. A commit of which it is no longer known counts as one that changed them.
        """
        for number in reversed(self._candidates(0, self.number)):
            try:
                if not self._keeps_entries(number):
                    return number
            except VersionDiscardedError:  # no longer known
                return number
        return 0

    def compactions(self, since: int, until: int) -> tuple[Compaction, ...] | None:
        """Return the compactions of an unbounded dataset that replaced its base between two
        commits, oldest first; () if the base is the same.

        None if the base was also replaced by other means, or if that is not known any more.
        """
        numbers = [since, *self._candidates(since, until)]
        found = []
        index = 0
        try:
            base = self._base_at(since)
            while base != self._base_at(until):
                # The next commit with a later base; few commits are read to find it.
                index = bisect_right(numbers, base, lo=index, key=self._base_at)
                if index == len(numbers):
                    return None
                compaction = self._compaction_between(numbers[index - 1], numbers[index])
                if compaction is None:
                    return None
                found.append(compaction)
                base = self._base_at(numbers[index])
        except VersionDiscardedError:
            return None
        return tuple(found)

    def _compaction_between(self, number: int, later: int) -> Compaction | None:
        """Return what the commit `later` did to the version of the commit before it; None if it
        changed the entries, or one of the two is not stored any more.
        """
        before = self.at(number).version
        after = self.at(later).version
        if before is None or after is None or not self._keeps_entries(later):
            return None
        if not self.is_stored(before) or not self.is_stored(after):
            return None
        return Compaction(before, after)

    def _base_at(self, number: int) -> int:
        """Return the id of the first generation of the version that was served after a commit, 0
        before the first version.

        In an unbounded dataset it never decreases from commit to commit: a new base has a higher
        id, and there are no rollbacks or pins.
        """
        version = self.at(number).version
        if version is None:
            return 0
        return version.generations[0].id

    def replaced_at(self, number: int) -> datetime | None:
        """Return when the entries that were served after a commit were replaced by others; None if
        they are served now. If later commits are no longer known, return the time of the last
        change.
        """
        try:
            for later in self._candidates(number, self.number):
                if not self._keeps_entries(later):
                    return self.at(later).at
        except VersionDiscardedError:
            return self.at(self.last_change()).at
        return None

    def manifests_of(self, number: int) -> tuple[str, ...]:
        """Return the keys of the objects that say what was served after a commit."""
        return (self._commit(number).manifest_key,)

    def may_have_erased(self, after: int, until: int) -> bool:
        """Whether one of the commits after a number, up to another one, erased keys, or is no
        longer known.
        """
        try:
            actions = {self.at(number).action for number in self._candidates(after, until)}
        except VersionDiscardedError:
            return True
        return ERASE_ACTION in actions

    def cuts(self, after: int, until: int) -> Sequence[int]:
        """Return the numbers, in order, of the commits after one at which a reader may stop: they
        serve a version that is retained, or nothing. The last one is `until` in any case.
        """
        numbers = [number for number in self._candidates(after, until) if number < until]
        if isinstance(self.manifest, UnboundedManifest):
            numbers = [number for number in numbers if number >= self.manifest.retained_from]
        else:
            numbers = [number for number in numbers if self._serves_retained(number)]
        return [*numbers, until]

    def _serves_retained(self, number: int) -> bool:
        """Whether a commit serves a version that is retained, or nothing."""
        try:
            version = self.at(number).version
        except VersionDiscardedError:
            return False
        return version is None or self.is_retained(version)

    def number_at(self, moment: datetime) -> int:
        """Return the number of the newest commit at or before a time, by its writer's clock; 0 if
        all are later. That commit may no longer be stored.
        """

        def is_later(number: int) -> bool:
            try:
                created_at = self._commit(number).created_at
            except VersionDiscardedError:  # deleted ones are older than those that are stored
                return False
            return created_at > moment

        return bisect_right(range(1, self.number + 1), False, key=is_later)

    def _candidates(self, after: int, until: int) -> Sequence[int]:
        """Return the numbers in (after, until] of commits that may serve other files than the
        commits before them.
        """
        if isinstance(self.manifest, UnboundedManifest):
            return list(_made_versions(self.manifest, after, until))
        return range(after + 1, until + 1)

    def _keeps_entries(self, number: int) -> bool:
        """Whether the entries served after a commit are those served before it."""
        here = self.at(number)
        if here.action in SAME_ENTRIES:
            return True
        return here.id == self.at(number - 1).id


def _made_versions(manifest: UnboundedManifest, after: int, until: int) -> Iterator[int]:
    """Yield the numbers in (after, until] of the commits that made versions, and all numbers before
    the first range that the manifest records: a very long history has lost its oldest ranges.
    """
    for first_recorded, _ in manifest.numbers[:1]:
        yield from range(after + 1, min(first_recorded, until + 1))
    for first, last in manifest.numbers:
        yield from range(max(first, after + 1), min(last, until) + 1)


def _member_manifest(name: str, commit: Commit) -> DatasetManifest:
    """Return the manifest of a member in a commit of its version set."""
    return parse_manifest(name, replace(commit, body=member_bodies(commit)[name]))
