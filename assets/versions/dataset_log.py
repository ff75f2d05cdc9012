"""The commit log of a dataset: where its manifests are stored, and how they are read and changed.

A dataset has a log of its own. The log of a member of a version set ends with a redirect, and its
manifest is in the set's log together with those of the other members, so that one swap of one
pointer changes all of them.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from dagster_adjunct.assets.versions.manifest import (
    KIND,
    BoundedManifest,
    DatasetManifest,
    as_bounded,
    describe_document_problem,
    follow_repartition,
    parse_manifest,
)
from dagster_adjunct.assets.versions.version import SealedVersion, VersionRef
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.bucketing.files import BucketFile, Generation
from dagster_adjunct.resources.objects.commit_log import (
    Commit,
    CommitLog,
    is_deletion_commit,
    retry_conflicts,
    seal_json,
    unseal_json,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import StreamInfo

NAMES = "datasets/_names"
SETS = "version-sets"
SET_KIND = "version-set"
T = TypeVar("T")

Manifests = Mapping[str, DatasetManifest]
Members = Mapping[str, BoundedManifest]
"""The manifests of a version set, or of one bounded dataset alone."""


class CommittedManifest(NamedTuple):
    """A commit that changed a dataset, and its manifest of the dataset."""

    commit: Commit
    manifest: DatasetManifest


class CurrentManifest(NamedTuple):
    """The current commit of a dataset, and its manifest: each None if there is none."""

    commit: Commit | None
    manifest: DatasetManifest | None


class CurrentManifests(NamedTuple):
    """The current commit of a version set, or of one dataset alone, and the manifests by dataset.

    Without a commit there are none; after a deletion there is its commit.
    """

    commit: Commit | None
    manifests: dict[str, DatasetManifest]


class NewestManifest(NamedTuple):
    """The current commit, the newest manifest that can be read, and why that is not the current
    one: "" if it is.

    With a problem, the commit has no body, but can be a parent.
    """

    commit: Commit | None
    manifest: DatasetManifest | None
    problem: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to build a version. Only it writes to `folder`, whose last segment is the
    attempt's `id`.
    """

    folder: str

    @property
    def id(self) -> str:
        _, _, name = self.folder.rpartition("/")
        return name

    def generation(self, number: int, files: Sequence[BucketFile] = ()) -> Generation:
        """Return these files of the attempt as the generation with this number."""
        return Generation(number, self.folder, tuple(files))


@dataclass(frozen=True, slots=True)
class DatasetLog:
    """The commits of one dataset in a lake."""

    lake: Lake
    name: str

    @property
    def prefix(self) -> str:
        return self.lake.dataset_prefix(self.name)

    @property
    def log(self) -> CommitLog:
        """The dataset's own log; that of a member of a version set ends with the redirect to the
        set's log.
        """
        return self.lake.commit_log(self.prefix, KIND)

    # -- reading

    def read(self) -> CurrentManifest:
        """Return the current commit and its manifest.

        Takes two requests to the store, four for a member of a version set.
        """
        current = self.read_all()
        return CurrentManifest(current.commit, current.manifests.get(self.name))

    def require(self) -> CommittedManifest:
        """Return the current commit and its manifest. Raises DatasetNotFoundError before the
        first.
        """
        commit, manifest = self.read()
        if commit is None or manifest is None:
            raise no_commit_error(self.lake, self.name)
        return CommittedManifest(commit, manifest)

    def read_or_newest(self) -> NewestManifest:
        """Return the current commit with its manifest; if that is unreadable, with the newest
        earlier one that can be read.

        Raises MalformedDocumentError if the pointer itself can't be read or belongs to another
        dataset.
        """
        try:
            current = self.read()
            return NewestManifest(current.commit, current.manifest, "")
        except errors.MalformedDocumentError as error:
            # Raises again if the pointer is damaged: then the parent commit is unknown.
            head = self.log.head()
            if head is None:
                raise
            problem = error.problem.rstrip(".")
        for commit in self.log.commits_before(head.number):
            if is_deletion_commit(commit):  # earlier ones are of a deleted dataset of this name
                break
            if redirect_target(commit) is None:
                with contextlib.suppress(errors.MalformedDocumentError):
                    return NewestManifest(head, parse_manifest(self.name, commit), problem)
        return NewestManifest(head, None, problem)

    def read_all(self) -> CurrentManifests:
        """Return the current commit with the manifests of all members of the version set, or of
        this dataset alone.

        The commit is that of the set, or of the dataset's own log if it is in none, was deleted, or
        has not joined completely.
        """
        own = self.log.current()
        if own is None or is_deletion_commit(own):
            return CurrentManifests(own, {})
        set_name = redirect_target(own)
        if set_name is None:
            return CurrentManifests(own, {self.name: parse_manifest(self.name, own)})
        shared = version_set_log(self.lake, set_name).current()
        if shared is not None and self.name in member_bodies(shared):
            return CurrentManifests(shared, member_manifests(shared))
        # The join was interrupted: until it is completed, the redirect has the dataset's manifest.
        body = own.body.get("manifest")
        if body is None:
            return CurrentManifests(own, {})
        manifest = parse_manifest(self.name, replace(own, body=body))
        return CurrentManifests(own, {self.name: manifest})

    def version_set(self) -> str | None:
        """Return the version set of this dataset, None if it is in none."""
        return redirect_target(self.log.current())

    def read_version(self, ref: VersionRef) -> SealedVersion:
        """Return a retained version from its document. Raises DatasetError if it has none, or
        the object is missing.
        """
        if ref.document is None:
            raise errors.DatasetError(
                f"dataset {self.name!r}: version {ref.id} was rejected before it was built"
                f" ({ref.reason}).",
                "It has no entries to read. Deliver the content again under a new name.",
                dataset=self.name,
                version=ref.id,
            )
        try:
            return self.read_document(ref.document)
        except errors.ObjectNotFoundError as error:
            raise errors.DatasetError(
                f"dataset {self.name!r}: the document of version {ref.id}, {ref.document}, is"
                " missing.",
                "The version was discarded concurrently, or the object is lost: open another"
                " version.",
                dataset=self.name,
                version=ref.id,
            ) from error

    def read_document(self, document: str) -> SealedVersion:
        """Return the version in this document. Raises ObjectNotFoundError and
        MalformedDocumentError.
        """
        data = self.lake.store.get(document).data
        content = unseal_json(data)
        if content is None:
            reason = f"it differs from its own SHA-256 ({len(data)} bytes found)"
            raise self._document_error(document, reason)
        try:
            return SealedVersion.model_validate_json(content)
        except (ValidationError, errors.AdjunctError) as error:
            raise self._document_error(document, describe_document_problem(error)) from error

    def _document_error(self, document: str, reason: str) -> errors.MalformedDocumentError:
        """Return the error for a version's document that can't be read."""
        return errors.MalformedDocumentError(
            f"dataset {self.name!r}: a version's document, {document}, can't be read: {reason}.",
            "Restore that object from a backup; other versions are untouched.",
            document=document,
        )

    def history(self) -> Iterator[CommittedManifest]:
        """Yield the commits that changed this dataset, newest first, as far back as their
        manifests are kept; before those of its version set, if it is in one, come its own.

        Raises MalformedDocumentError if the newest of its own manifests can't be read.
        """
        set_name = self.version_set()
        if set_name is not None:
            yield from self._history_in_set(set_name)
        is_newest = True
        try:
            for commit in self.log.history():
                if is_deletion_commit(commit):
                    return  # earlier commits belong to a deleted dataset of the same name
                if redirect_target(commit) is None:
                    yield CommittedManifest(commit, parse_manifest(self.name, commit))
                is_newest = False
        except errors.MalformedDocumentError:
            if is_newest:
                raise  # a damaged older manifest only ends the history

    def _history_in_set(self, set_name: str) -> Iterator[CommittedManifest]:
        """Yield the commits of a version set that changed this dataset, newest first."""
        commits = version_set_log(self.lake, set_name).history()
        for commit, before in pairwise(chain(commits, [None])):
            assert commit is not None, "only the last one is"
            # A commit that only changed other members has the same manifest of this dataset as
            # the one before it.
            old = member_bodies(before).get(self.name)
            if member_bodies(commit).get(self.name) != old:
                yield CommittedManifest(commit, member_manifests(commit)[self.name])

    # -- writing

    def attempt(self) -> Attempt:
        """Return a new attempt, with a folder of its own."""
        return Attempt(f"{self.prefix}/data/{uuid.uuid4().hex[:16]}")

    def write_version(self, version: SealedVersion) -> str:
        """Write a version's document and return its key; nothing refers to it until a commit
        does.
        """
        key = f"{self.prefix}/versions/{version.id}-{uuid.uuid4().hex[:8]}.json"
        self.lake.store.put_if_absent(key, seal_json(version.model_dump_json().encode()))
        return key

    def commit(
        self,
        parent: Commit | None,
        manifest: DatasetManifest,
        *,
        by: str,
        commit_id: str | None = None,
    ) -> Commit:
        """Make `manifest` current by one swap of the pointer.

        `parent` is the current commit, None before the first. `commit_id` is the id of the new one,
        None for any. Raises CommitConflictError if `parent` is not current any more: then nothing
        of this commit is visible.
        """
        return self.commit_all(parent, {self.name: manifest}, by=by, commit_id=commit_id)

    def commit_all(
        self, parent: Commit | None, manifests: Manifests, *, by: str, commit_id: str | None = None
    ) -> Commit:
        """Make the manifests of several members of a version set current, in one swap; the others
        stay as they are. Without a set, `manifests` has only this dataset's. See `commit`.
        """
        is_of_set = parent is not None and parent.manifest_key.startswith(f"{SETS}/")
        if parent is not None and is_of_set:
            set_name, _, _ = parent.manifest_key.removeprefix(f"{SETS}/").partition("/")
            log = version_set_log(self.lake, set_name)
            body = dict(parent.body)
            body["members"] = members = member_bodies(parent)
            for name, manifest in manifests.items():
                members[name] = manifest.model_dump(mode="json")
        elif redirect_target(parent) is not None:
            raise errors.CommitConflictError(
                f"dataset {self.name!r} is joining the version set {redirect_target(parent)!r}.",
                "Advance the version set, which completes the join, and try again.",
                dataset=self.name,
            )
        else:
            log = self.log
            body = manifests[self.name].model_dump(mode="json")
            self.list_name(parent)
        try:
            return log.commit(parent, body, by=by, commit_id=commit_id)
        except errors.CommitConflictError as conflict:
            raise errors.CommitConflictError(
                f"dataset {self.name!r}: another writer committed first ({conflict.problem})",
                "Nothing of this attempt is visible. Advance again: it continues from the other"
                " writer's commit.",
                dataset=self.name,
            ) from conflict

    def rewrite(self, commit_once: Callable[[], T], *, slower: str) -> T:
        """Call `commit_once`, which rewrites files and commits, again while another writer commits
        first.

        It keeps the files that it has rewritten for the next call. Raises CommitConflictError, with
        `slower` as the description of the slow part, if other writers keep committing faster.
        """
        try:
            return retry_conflicts(lambda: commit_once)
        except errors.CommitConflictError as conflict:
            raise errors.CommitConflictError(
                f"dataset {self.name!r}: commits are made faster than {slower}.",
                "Repeat it when the dataset is quiet.",
                dataset=self.name,
            ) from conflict

    def transact(
        self, change: Callable[[DatasetManifest], DatasetManifest | None], *, by: str
    ) -> DatasetManifest:
        """Commit the manifest that `change` returns, retrying after conflicts; return the current
        manifest.

        `change` must have no side effects; it returns None if there is nothing to do.
        """
        name = self.name

        def change_one(stored: Manifests) -> Manifests:
            new = change(stored[name])
            if new is None:
                return {}
            return {name: new}

        return self.transact_all(change_one, by=by)[name]

    def transact_all(
        self, change: Callable[[Manifests], Manifests], *, by: str
    ) -> dict[str, DatasetManifest]:
        """Commit the manifests that `change` returns, retrying after conflicts; return the current
        manifests of all members of the version set, or of this dataset alone.

        `change` gets all of them and returns those that it has changed, {} if there is nothing to
        do. It must have no side effects.
        """

        def once() -> dict[str, DatasetManifest]:
            commit, manifests = self.read_all()
            if self.name not in manifests:
                raise no_commit_error(self.lake, self.name)
            after = change(manifests)
            if not after:
                return manifests
            self.commit_all(commit, after, by=by)
            return manifests | dict(after)

        return retry_conflicts(lambda: once)

    def transact_versions(
        self, change: Callable[[Members], Members], *, by: str
    ) -> BoundedManifest:
        """Commit the manifests that `change` returns, as `transact_all` does, for bounded datasets;
        return the current manifest of this one.

        Raises DatasetError for a dataset that follows a change stream.
        """

        def change_bounded(manifests: Manifests) -> Manifests:
            return change({name: as_bounded(stored) for name, stored in manifests.items()})

        return as_bounded(self.transact_all(change_bounded, by=by)[self.name])

    def list_name(self, parent: Commit | None) -> None:
        """Store the name of the dataset before its first commit, so that every existing dataset
        is listed.
        """
        if parent is None:  # names without a commit are ignored
            with contextlib.suppress(errors.ObjectExistsError):
                self.lake.store.put_if_absent(f"{NAMES}/{self.name}", b"")

    def find_missing_files(self, folder: str, generations: Sequence[Generation]) -> list[str]:
        """Return the keys of files of these generations, all below `folder`, that are missing or
        have another size.
        """
        sizes: dict[str, int] = {}
        for generation in generations:
            sizes |= _list_sizes(generation)
        if not sizes:
            return []
        stored = {item.key: item.size for item in self.lake.store.list(f"{folder}/")}
        return [key for key, size in sizes.items() if stored.get(key) != size]

    def drop(self, written: Generation | None) -> None:
        """Delete the files of a generation that no commit refers to; what can't be deleted now
        is left to a discard.
        """
        if written is not None:
            with contextlib.suppress(errors.AdjunctError):
                self.lake.store.delete_many([*_list_sizes(written)])


def _list_sizes(generation: Generation) -> dict[str, int]:
    """Return the sizes of a generation's files, by key."""
    return {f"{generation.folder}/{file.name}": file.size for file in generation.files}


def no_commit_error(lake: Lake, dataset: str) -> errors.DatasetNotFoundError:
    """Return the error for a dataset that was never advanced."""
    return errors.DatasetNotFoundError(
        f"dataset {dataset!r} has no commit in {lake.url}.",
        "Advance it a first time.",
        dataset=dataset,
    )


def version_set_log(lake: Lake, name: str) -> CommitLog:
    """Return the log that the members of a version set share."""
    return lake.commit_log(f"{SETS}/{name}", SET_KIND)


def redirect_target(commit: Commit | None) -> str | None:
    """Return the version set that a commit of a dataset's own log redirects to, None for any
    other commit.
    """
    if commit is None:
        return None
    name = commit.body.get("version_set")
    if not isinstance(name, str):
        return None
    return name


def member_bodies(commit: Commit | None) -> dict[str, Any]:
    """Return the manifest bodies in a version set's commit, by dataset; None for a member never
    advanced.
    """
    if commit is None:
        return {}
    return dict(commit.body["members"])


def member_manifests(commit: Commit) -> dict[str, DatasetManifest]:
    """Return the manifests in a version set's commit, by dataset; members that were never
    advanced are left out.
    """
    manifests = {}
    for name, body in member_bodies(commit).items():
        if body is not None:
            manifests[name] = parse_manifest(name, replace(commit, body=body))
    return manifests


# A version set publishes, pins and rolls back the versions of several datasets in one commit.
#
#     version-sets/{set}/CURRENT      the one pointer: the manifests of all members
#     datasets/{member}/CURRENT       a redirect to it, and the manifest that the member joined with
#
# Joining fences a member's own pointer first, so that a writer that read it before can no longer
# commit there.

_FORMAT = 1


def join_version_set(lake: Lake, name: str, datasets: Sequence[str], *, by: str) -> None:
    """Make these datasets the members of the set. Safe to repeat; writes nothing if all are members
    already.

    Raises DatasetError if a dataset is in another set, or the set has members that are not named.
    """
    known = member_bodies(version_set_log(lake, name).current()).keys()
    missing = sorted(known - set(datasets))
    if missing:
        raise errors.DatasetError(
            f"version set {name!r} has the members {', '.join(sorted(known))}, and"
            f" {', '.join(missing)} is not declared in it any more.",
            "Declare it in the set again; to take a dataset out, declare it under a new name.",
            dataset=missing[0],
        )
    joined = {}
    for dataset in datasets:
        if dataset not in known:
            joined[dataset] = _fence(lake, name, dataset, by)
    if not joined:
        return

    def add(commit: Commit | None) -> dict[str, object] | None:
        members = member_bodies(commit)
        if joined.keys() <= members.keys():
            return None
        # Present members come first, and keep their manifests: they may have advanced since.
        return {"format": _FORMAT, "members": members | joined | members}

    version_set_log(lake, name).transact(add, by=by)


def _fence(lake: Lake, name: str, dataset: str, by: str) -> dict[str, object] | None:
    """Turn a dataset's own pointer into a redirect to the set `name`; return the manifest that the
    dataset joins with, None if it was never advanced or has been deleted.
    """
    log = DatasetLog(lake, dataset)

    def redirect() -> dict[str, object] | None:
        own = log.log.current()
        target = redirect_target(own)
        if target is not None and target != name:
            raise errors.DatasetError(
                f"dataset {dataset!r} is a member of the version set {target!r} and can't join"
                f" {name!r} as well.",
                "A dataset is in one version set; declare it under a new name for the other.",
                dataset=dataset,
            )
        manifest: dict[str, object] | None = None
        if own is not None and target == name:
            # An earlier attempt to join has redirected it already.
            manifest = own.body["manifest"]
            return manifest
        if own is not None and not is_deletion_commit(own):
            manifest = own.body
        log.list_name(own)
        log.log.commit(own, {"version_set": name, "manifest": manifest}, by=by)
        return manifest

    # Each try reads the pointer again.
    return retry_conflicts(lambda: redirect)


def commit_repartition(log: DatasetLog, stream: str, info: StreamInfo, *, by: str) -> bool:
    """Commit a dataset's position in its repartitioned stream, if it can follow; return whether
    that was so. Does nothing for a dataset with another input, or that was deleted.
    """
    attempts: list[DatasetManifest | None] = []  # one for each try, of which the last one counts

    def carry(manifest: DatasetManifest) -> DatasetManifest | None:
        after = None
        if manifest.declaration.input == stream:
            after = follow_repartition(manifest, info)
        attempts.append(after)
        return after

    with contextlib.suppress(errors.DatasetNotFoundError):  # deleted concurrently
        log.transact(carry, by=by)
    return bool(attempts) and attempts[-1] is not None
