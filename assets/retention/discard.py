"""Discards versions that the policy no longer retains, and objects that nothing references; deletes
whole datasets.

    doom      one commit removes the versions and lists their folders as doomed, so that no reader
              starts to use them
    spare     then leases and open batches are read; what they hold is spared until a later run
    delete    expired leases, so that their holders notice; then the objects of doomed folders, and
              documents
    clear     one commit removes what was deleted from the list
    sweep     records of builds that ended long ago, and old commit manifests

It is safe to repeat and to run concurrently: an interrupted run leaves the list of doomed entries,
from which the next one continues.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.versions.dataset_log import (
    DatasetLog,
    no_commit_error,
    redirect_target,
    version_set_log,
)
from dagster_adjunct.assets.versions.leases import (
    RUNNING_WITHIN,
    LeaseInfo,
    list_attempts,
    list_leases,
    list_live_leases,
    list_released_files,
    read_lake_clock,
)
from dagster_adjunct.assets.versions.manifest import (
    BoundedManifest,
    Change,
    DatasetManifest,
    Retired,
    UnboundedManifest,
    as_unbounded,
)
from dagster_adjunct.assets.versions.switches import expire_pin, expire_pins, version_order
from dagster_adjunct.assets.versions.version import VersionRef, version_number
from dagster_adjunct.resources.errors import (
    DatasetError,
    ObjectNotFoundError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects import commit_log
from dagster_adjunct.resources.objects.commit_log import Commit, DeletedObjects
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import ObjectInfo
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.times import subtract_span


def check_deletable(dataset: str, seen: Commit) -> None:
    """Raise DatasetError for a member of a version set, which can't be deleted alone."""
    version_set = redirect_target(seen)
    if version_set is not None:
        raise DatasetError(
            f"dataset {dataset!r} can't be deleted alone: it is a member of the version set"
            f" {version_set!r}, whose versions are one commit.",
            "Revoke its versions and discard them instead.",
            dataset=dataset,
        )


def delete_dataset_objects(
    lake: Lake, dataset: str, seen: Commit, *, reason: str, by: str
) -> DeletedObjects:
    """Delete the dataset as of the commit `seen`, or finish the deletion that `seen` has marked;
    return what was deleted.

    The objects are listed in datasets/{name}/deleting-….json before the pointer marks the dataset
    as deleted, since objects written afterwards may belong to a new dataset of that name. Raises
    CommitConflictError where the dataset has changed since. Raises DatasetError while a version is
    leased: new readers are rejected then, and a repeated call deletes the objects.
    """
    check_deletable(dataset, seen)
    log = DatasetLog(lake, dataset).log
    if commit_log.is_deletion_commit(seen):
        last = seen
    else:
        key = f"{log.prefix}/deleting-{uuid.uuid4().hex}.json"
        lake.store.put_if_absent(
            key, json.dumps(list_deletable_objects(lake, dataset, seen)).encode()
        )
        last = commit_log.commit_deletion(log, seen, reason=reason, by=by, listed=key)
    held = list_live_leases(lake, dataset, read_lake_clock(lake, dataset))
    if held:
        raise DatasetError(
            f"dataset {dataset!r} is deleted, but {held[0].holder} still reads"
            f" {', '.join(held[0].versions)}, so its objects are kept.",
            f"Delete it again after {held[0].expires_at}: adjunct dataset delete"
            f" {dataset} --reason ….",
            dataset=dataset,
        )
    sizes = list_deletable_objects(lake, dataset, last)
    lake.store.delete_many([*sizes])
    # The list itself goes last, so that a repeated call finds what is left.
    lake.store.delete(str(commit_log.deletion_record(last)["listed"]))
    return DeletedObjects(len(sizes), sum(sizes.values()))


def list_deletable_objects(lake: Lake, dataset: str, last: Commit) -> dict[str, int]:
    """Return the sizes of the objects that deleting the dataset as of its `last` commit deletes, by
    key.

    If that commit has marked it as deleted, they are those that the deletion has listed; {} once it
    is finished.
    """
    log = DatasetLog(lake, dataset).log
    if not commit_log.is_deletion_commit(last):
        return commit_log.list_log_objects(log, {f"{log.prefix}/clock"})
    try:
        listed = lake.store.get(str(commit_log.deletion_record(last)["listed"]))
    except ObjectNotFoundError:
        return {}
    sizes = dict(json.loads(listed.data))
    return {key: sizes[key] for key in commit_log.exclude_newer_manifests(log, last, sizes)}


def plan_retired(
    manifest: UnboundedManifest,
    policy: DiscardPolicy,
    held: Mapping[str, str],
    kept_from: int,
    listing: Listing,
) -> DiscardReport:
    """Decide which retired generations of an unbounded dataset to delete; a pure function.

    A compaction or rebuild retires the generations that it replaces, which earlier versions still
    read. They are deleted once they have been retired for longer than the policy's grace, and
    neither the newest versions nor held ones need them. The versions that read them can't be read
    any more then.

    `held` gives the reasons why versions are needed, by id ("*": all). `kept_from` is the number of
    the oldest version that the policy keeps, 0 for all.
    """
    if policy.keep is None:
        why_kept = "all versions are kept"
    else:
        why_kept = f"version {kept_from} is among the newest {policy.keep}"
    reasons = [(kept_from, why_kept)]  # the number of a version that is needed, and why
    reasons += [(version_number(version), why) for version, why in held.items()]
    discarded: list[RetentionDecision] = []
    kept: list[RetentionDecision] = []
    retained_from = manifest.retained_from
    # Why all later generations stay: an earlier one does, and readable versions may need both.
    blocked = ""
    for retired in sorted(manifest.retired, key=attrgetter("until")):
        needed = (reason for number, reason in reasons if number < retired.until)
        why = next(needed, blocked)
        if listing.now - _retired_at(retired, listing) < policy.grace:
            why = f"younger than {policy.grace}"
        if why:
            if not blocked:
                blocked = f"versions from {retained_from} on can be read"
            kept.append(RetentionDecision(retired.folder, None, why))
        else:
            retained_from = max(retained_from, retired.until)
            why = f"generation {retired.generation}: no version from {retired.until} on reads it"
            discarded.append(RetentionDecision(retired.folder, None, why))
    return DiscardReport(
        manifest.name, True, tuple(discarded), tuple(kept), retained_from=retained_from
    )


def find_oldest_kept(log: DatasetLog, manifest: DatasetManifest, policy: DiscardPolicy) -> int:
    """Return the number of the oldest version that the policy keeps; 0 if it keeps all, or no
    generation is retired.

    The manifest holds the numbers of versions as ranges. Where it leaves out some of a very long
    history, commits are read back from the newest one. Versions before all retired generations
    decide nothing, so the search ends there.
    """
    if policy.keep is None or not manifest.retired:
        return 0
    first_retired = min(retired.until for retired in manifest.retired)
    oldest = 0
    still_to_keep = policy.keep
    for first, last in reversed(as_unbounded(manifest).numbers):
        oldest = max(first, last - still_to_keep + 1)
        still_to_keep -= last - oldest + 1
        if still_to_keep == 0 or oldest < first_retired:
            return oldest
    kept: set[int] = set()
    for _, manifest_then in log.history():
        if manifest_then.version is not None:
            kept.add(manifest_then.version.number)
        is_complete = len(kept) == policy.keep
        if kept and (is_complete or min(kept) < first_retired):
            break
    return min(kept, default=0)


def _retired_at(retired: Retired, listing: Listing) -> datetime:
    """Return when a generation was retired: the time of that commit, by the store's clock.

    It is the time of the listing for a commit that is newer. If the commit is not listed any more,
    it is the time in the manifest, by its writer's clock.
    """
    if retired.until in listing.commits:
        return listing.commits[retired.until]
    if listing.commits and retired.until > max(listing.commits):
        return listing.now
    return retired.at


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """A version (`what` is its id), folder or document (its key), and why it is kept or
    discarded.
    """

    what: str
    name: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Listing:
    """What a dataset has in the store at the time `now`. All times are by the store's clock.

    - `folders`: for each data folder, when its newest object was written or its build last renewed
      its record.
    - `documents`: for each document of a version, when it was written.
    - `running`: the ids of builds (attempts) that renewed their record recently.
    - `commits`: for each commit of an unbounded dataset, by number, when it was made.
    """

    now: datetime
    folders: Mapping[str, datetime] = field(default_factory=dict)
    documents: Mapping[str, datetime] = field(default_factory=dict)
    running: frozenset[str] = frozenset()
    commits: Mapping[int, datetime] = field(default_factory=dict)


def plan_discard(
    manifest: DatasetManifest,
    policy: DiscardPolicy,
    leases: Sequence[LeaseInfo],
    roots: Mapping[str, str],
    listing: Listing,
    kept_from: int = 0,
) -> DiscardReport:
    """Decide what to discard and what to keep; a pure function.

    `roots` gives, by version id, why applications need a version. `kept_from` is the number of the
    oldest version of an unbounded dataset that the policy keeps.
    """
    held = version_holders(leases, roots, listing.now)
    if isinstance(manifest, UnboundedManifest):
        plan = plan_retired(manifest, policy, held, kept_from, listing)
    else:
        plan = _plan_versions(manifest, policy, held, listing)
    return replace(plan, garbage=tuple(_find_garbage(manifest, policy, listing)))


def _find_garbage(
    manifest: DatasetManifest, policy: DiscardPolicy, listing: Listing
) -> Iterator[RetentionDecision]:
    """Yield the folders and documents that no version references, and that are older than the
    grace.

    However short the grace, what belongs to a running build is no garbage.
    """
    known = manifest.reachable() | set(manifest.doomed)
    limit = subtract_span(listing.now, policy.grace)
    for entry, at in sorted({**listing.folders, **listing.documents}.items()):
        if entry in known or at > limit:
            continue
        is_of_running_build = any(attempt in entry for attempt in listing.running)
        if not is_of_running_build:
            why = f"no version references it, unchanged since {at:%Y-%m-%d %H:%M} UTC"
            yield RetentionDecision(entry, None, why)


def _plan_versions(
    manifest: BoundedManifest, policy: DiscardPolicy, held: Mapping[str, str], listing: Listing
) -> DiscardReport:
    """Decide which versions of a bounded dataset to discard, and which to keep."""
    needed = _needed_versions(manifest, policy, held)
    discarded = []
    kept = []
    for ref in manifest.versions:
        why = needed.get(ref.id, held.get("*", ""))
        written_at = listing.documents.get(ref.document or "", ref.sealed_at)
        if not why and listing.now - written_at < policy.grace:
            why = f"younger than {policy.grace}"
        if why:
            kept.append(RetentionDecision(ref.id, ref.name, why))
        else:
            reason = _discard_reason(manifest, ref, policy)
            discarded.append(RetentionDecision(ref.id, ref.name, reason))
    return DiscardReport(manifest.name, True, tuple(discarded), tuple(kept))


def _needed_versions(
    manifest: BoundedManifest, policy: DiscardPolicy, held: Mapping[str, str]
) -> dict[str, str]:
    """Return why versions of a bounded dataset are kept, whatever their age, by id: of several
    reasons the last one in the order of this function.
    """
    needed = {**held, **_newest_versions(manifest, policy)}
    head = manifest.head_ref
    if head is not None:
        # The version to serve if the current one is revoked. After a rollback, others that are
        # kept may be newer.
        before = head.replaced
        if policy.keep != 1 and before is not None and manifest.retains(before):
            needed[before] = "served again if the current one is revoked"
        needed[head.id] = "what the last switch chose"
    if manifest.version is not None:
        needed[manifest.version.id] = "served"
    if manifest.pin is not None:
        needed[manifest.pin.version] = "pinned"
    return needed


def version_holders(
    leases: Sequence[LeaseInfo], roots: Mapping[str, str], now: datetime
) -> dict[str, str]:
    """Return why versions may not be deleted yet, by version id ("*": all versions): leases and
    `roots`.
    """
    held = {}
    for lease in leases:
        if lease.expires_at > now:
            for version in lease.versions:
                held[version] = (
                    f"leased by {lease.holder} until {lease.expires_at:%Y-%m-%d %H:%M:%S} UTC"
                )
    return {**held, **roots}


def find_spared(
    manifest: DatasetManifest, leases: Sequence[LeaseInfo], roots: Mapping[str, str], now: datetime
) -> list[RetentionDecision]:
    """Return the doomed entries that are still held."""
    held = version_holders(leases, roots, now)
    reached = manifest.reachable()
    # Folders and documents of a bounded dataset have the version in their names. Of an unbounded
    # one, only the manifest of a version lists its folders: once that is not retained, each entry
    # may belong to the version.
    may_have_any = set()
    for version in held:
        if manifest.versions_are_commits and not manifest.retains(version):
            may_have_any.add(version)
    spared = []
    for entry in manifest.doomed:
        why = ""
        for version in held:
            if version in may_have_any or belongs_to_version(version, entry):
                why = held[version]
                break
        if entry in reached:
            # This should not happen; leaving garbage is safer than deleting data.
            why = "a version references it"
        if why:
            spared.append(RetentionDecision(entry, None, why))
    return spared


def belongs_to_version(version: str, entry: str) -> bool:
    """Whether a folder, document or manifest (by its key) may belong to a version (by its id): the
    key contains the id of the version's attempt. Every key belongs to "*", all versions.
    """
    _, _, attempt = version.partition("-")
    return version == "*" or attempt in entry


def _newest_versions(manifest: BoundedManifest, policy: DiscardPolicy) -> dict[str, str]:
    """Return the newest versions that the policy keeps, by id, with the reason.

    In a dataset that is ordered by name, only the newest build of each name counts.
    """
    sealed = []
    for ref in manifest.versions:
        if ref.state == "sealed":
            sealed.append(ref)
    sealed.sort(key=version_order(manifest), reverse=True)
    if manifest.declaration.order == "name":
        newest_build = {ref.name: ref for ref in reversed(sealed)}  # the last one counts
        sealed = [ref for ref in sealed if newest_build[ref.name] is ref]
    why = "all are kept" if policy.keep is None else f"among the newest {policy.keep}"
    return {ref.id: why for ref in sealed[: policy.keep]}


def _discard_reason(manifest: BoundedManifest, ref: VersionRef, policy: DiscardPolicy) -> str:
    """Return why a version that nothing needs is discarded."""
    if ref.state != "sealed":
        return f"{ref.state}, older than {policy.grace}"
    if manifest.declaration.order == "name":
        builds = [other for other in manifest.sealed if other.name == ref.name]
        if builds[-1].number > ref.number:
            return f"built again since, as {builds[-1].id}"
    return f"not among the newest {policy.keep}"


Roots = Callable[[], Mapping[str, str]]
"""Returns by version id why applications need a version."""


class Deletion(NamedTuple):
    """The doomed entries that are still held, and the objects that were deleted."""

    spared: list[RetentionDecision]
    deleted: list[ObjectInfo]


@dataclass(frozen=True, slots=True)
class DiscardReport(Report):
    """What one discard did, or with `dry_run` would do.

    The versions `discarded` and `kept`, and unreferenced `garbage`, are named with the reason. Of
    an unbounded dataset, `discarded` and `kept` are folders of generations that its current version
    does not read, and `retained_from` is the number of the first readable version. `spared` is what
    is doomed but still held. `objects` and `bytes` were deleted. `unpinned` is the version whose
    pin had expired.
    """

    dataset: str
    dry_run: bool
    discarded: tuple[RetentionDecision, ...] = ()
    kept: tuple[RetentionDecision, ...] = ()
    garbage: tuple[RetentionDecision, ...] = ()
    spared: tuple[RetentionDecision, ...] = ()
    objects: int = 0
    bytes: int = 0
    unpinned: str | None = None
    retained_from: int | None = None

    def summary(self) -> str:
        """Return the outcome in one line, for logs."""
        verb = "would discard" if self.dry_run else "discarded"
        what = "version(s)" if self.retained_from is None else "generation(s)"
        parts = [f"dataset {self.dataset}: {verb} {len(self.discarded)} {what}"]
        if self.discarded and self.retained_from:
            parts.append(f"versions from {self.retained_from} on can be read")
        if self.garbage:
            parts.append(f"{len(self.garbage)} leftover(s)")
        if self.objects:
            parts.append(f"{self.objects:,} objects of {self.bytes:,} bytes deleted")
        if self.spared:
            parts.append(f"{len(self.spared)} spared")
        return "; ".join(parts)


def discard(
    lake: Lake,
    dataset: str,
    policy: DiscardPolicy | None = None,
    *,
    by: str,
    roots: Roots = dict,
    manifests: Callable[[], Collection[str]] = tuple,
    dry_run: bool = False,
) -> DiscardReport:
    """Discard the versions that the policy does not keep, and delete unreferenced objects.

    Safe to repeat and to run concurrently. `policy` None is that of the declaration. `roots` gives,
    by version id, why applications still need a version (their open batches), `manifests` the keys
    of the old manifests that they need. With `dry_run` nothing is written but the object from which
    the store's clock is read. Raises DatasetNotFoundError.
    """
    log = DatasetLog(lake, dataset)
    members = log.read_all().manifests
    if dataset not in members:
        raise no_commit_error(lake, dataset)
    policy = policy or members[dataset].declaration.discard
    listing = _list_objects(log, commits=members[dataset].versions_are_commits)
    manifest = expire_pin(log, members[dataset], listing.now)
    pin = members[dataset].pin
    unpinned = None
    if pin is not None and manifest.pin is None:
        unpinned = pin.version

    def plan_for(fresh: DatasetManifest) -> DiscardReport:
        kept_from = find_oldest_kept(log, fresh, policy)
        return plan_discard(fresh, policy, list_leases(lake, dataset), roots(), listing, kept_from)

    if dry_run:
        return replace(plan_for(manifest), unpinned=unpinned)
    expire_pins(log, members, listing.now, by=by)
    plan = DiscardReport(dataset, True)

    def doom(fresh: DatasetManifest) -> DatasetManifest | None:
        """Plan again for the current manifest, and return it without what is discarded."""
        nonlocal plan, listing
        documents = {ref.document for ref in fresh.listed} - {None}
        if not documents <= listing.documents.keys():
            # A version was published since, and only the store knows its age.
            listing = _list_objects(log)
        plan = plan_for(fresh)
        if not plan.discarded and not plan.garbage:
            return None
        discarded = [entry.what for entry in plan.discarded]
        return fresh.without(discarded, [entry.what for entry in plan.garbage])

    after = log.transact(doom, by=by)
    deletion = delete_doomed(log, after, roots, listing.now, by=by)
    old_records = _delete_old_records(log, after, listing, policy, roots, manifests)
    objects = [*deletion.deleted, *old_records]
    return replace(
        plan,
        dry_run=False,
        spared=tuple(deletion.spared),
        objects=len(objects),
        bytes=sum(item.size for item in objects),
        unpinned=unpinned,
    )


def delete_doomed(
    log: DatasetLog, manifest: DatasetManifest, roots: Roots, now: datetime, *, by: str
) -> Deletion:
    """Delete the doomed entries of a committed manifest that are not held.

    `now` is by the store's clock. Leases and open batches are read here, after the commit that
    doomed the entries. Expired leases are deleted.
    """
    leases = list_leases(log.lake, log.name)
    # Before what they held is deleted, so that a holder that is only late notices at its next
    # renewal.
    log.lake.store.delete_many([lease.key for lease in leases if lease.expires_at <= now])
    if not manifest.doomed:
        return Deletion([], [])
    spared = find_spared(manifest, leases, roots(), now)
    deleted = set(manifest.doomed) - {decision.what for decision in spared}
    objects: list[ObjectInfo] = []
    for entry in sorted(deleted):
        is_folder = not entry.endswith(".json")
        if is_folder:
            objects += log.lake.store.list(f"{entry}/")
            continue
        document = log.lake.store.head(entry)
        if document is not None:
            objects.append(document)
    log.lake.store.delete_many([item.key for item in objects])

    def clear(fresh: DatasetManifest) -> DatasetManifest | None:
        """Return the manifest without the deleted entries; None if it lists none of them."""
        still_doomed = tuple(entry for entry in fresh.doomed if entry not in deleted)
        change = Change(action="expire", reason=f"{len(deleted)} folders and documents are deleted")
        if still_doomed == fresh.doomed:
            return None
        return fresh.after(doomed=still_doomed, change=change)

    log.transact(clear, by=by)
    return Deletion(spared, objects)


def _list_objects(log: DatasetLog, *, commits: bool = False) -> Listing:
    """Return what the dataset has in the store, with its `commits` if they are needed."""
    store = log.lake.store
    prefix = log.prefix
    now = read_lake_clock(log.lake, log.name)
    folders: dict[str, datetime] = {}
    for item in store.list(f"{prefix}/data/"):
        folder, _, _ = item.key.rpartition("/")
        folders[folder] = max(item.modified, folders.get(folder, item.modified))
    attempts = list_attempts(log.lake, log.name)
    for attempt, renewed in attempts.items():
        folder = f"{prefix}/data/{attempt}"
        if folder in folders:
            folders[folder] = max(renewed, folders[folder])
    running = set()
    for attempt, renewed in attempts.items():
        if renewed > now - RUNNING_WITHIN:
            running.add(attempt)
    documents = {item.key: item.modified for item in store.list(f"{prefix}/versions/")}
    committed: dict[int, datetime] = {}
    if commits:
        for item in store.list(f"{prefix}/manifests/"):
            number = commit_log.commit_number(item.key)
            committed[number] = max(item.modified, committed.get(number, item.modified))
    return Listing(now, folders, documents, frozenset(running), committed)


def _delete_old_records(
    log: DatasetLog,
    manifest: DatasetManifest,
    listing: Listing,
    policy: DiscardPolicy,
    roots: Roots,
    manifests: Callable[[], Collection[str]],
) -> list[ObjectInfo]:
    """Delete records of builds that ended long ago, old commit manifests that applications do not
    need, and released files of discarded versions.

    Returns the deleted objects.
    """
    store = log.lake.store
    limit = subtract_span(listing.now, policy.grace)
    held: Mapping[str, str] = {}
    if manifest.versions_are_commits:  # a version is found by the manifest of its commit
        held = version_holders(list_leases(log.lake, log.name), roots(), listing.now)
    ended_by = min(limit, listing.now - RUNNING_WITHIN)
    objects = [item for item in store.list(f"{log.prefix}/attempts/") if item.modified <= ended_by]
    logs = [log.log]
    set_name = log.version_set()
    if set_name is not None:
        logs.append(version_set_log(log.lake, set_name))
    old = list(chain.from_iterable(commits.list_old_manifests(limit) for commits in logs))
    if old:  # `manifests` takes requests
        objects += _without_retained(old, manifest, held, manifests())
    for version, files in list_released_files(log.lake, log.name).items():
        if not _is_kept(manifest, version):
            objects += files
    store.delete_many([item.key for item in objects])
    return objects


def _without_retained(
    manifests: Sequence[ObjectInfo],
    manifest: DatasetManifest,
    held: Collection[str],
    needed: Collection[str],
) -> list[ObjectInfo]:
    """Return those of the commit manifests that are not needed: by retained versions, by versions
    that are `held`, or by applications (`needed`, by key).
    """
    first = manifest.retained_from
    rest = []
    for item in manifests:
        is_retained = first is not None and commit_log.commit_number(item.key) >= first
        is_held = any(belongs_to_version(version, item.key) for version in held)
        if not is_retained and not is_held and item.key not in needed:
            rest.append(item)
    return rest


def _is_kept(manifest: DatasetManifest, version: str) -> bool:
    """Whether a version is retained and is not being deleted."""
    try:
        manifest.check_kept(version)
    except VersionDiscardedError:
        return False
    return True
