"""Discarding: deletes what the policy lets go and nobody can reach any more, safe to repeat and to race.

    doom      one commit takes the versions out and names their folders as doomed: nobody may begin to use them
    look      leases and open batches are read then; what they hold is spared, and goes at a later run
    delete    expired leases, so that who held one finds it gone; then objects of doomed folders, and documents
    clear     one commit takes what is deleted off the list
    sweep     records of builds that ended long ago, and commit manifests that are long past

What goes is decided in discard_plan.py. A run that dies anywhere leaves the list of the doomed, from which the next one
goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.discard_policy import DiscardPolicy
from dagster_adjunct.assets.retention.discard_plan import (
    DiscardPlan,
    Judged,
    Listing,
    doomed_by,
    holders_of,
    is_of,
    plan_discard,
    spared_of,
)
from dagster_adjunct.assets.retention.retired_generations import oldest_kept
from dagster_adjunct.assets.versions.build_attempts import RUNNING, attempts
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.dataset_log import DatasetLog, set_log
from dagster_adjunct.assets.versions.leases import all_leases, store_now
from dagster_adjunct.assets.versions.manifest import DatasetManifest, as_unbounded
from dagster_adjunct.assets.versions.operator_actions import expire_pin, expire_pins
from dagster_adjunct.resources.errors import DatasetNotFoundError
from dagster_adjunct.resources.times import before

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.commit_log import CommitLog
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.objects.object_store import ObjectInfo

COMMITS_KEPT = 200
Roots = Callable[[], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class DiscardReport:
    """What one discard did, or with `dry_run` would do. `spared` is doomed, and held by somebody for now.

    Of an unbounded dataset, `discarded` and `kept` are folders of generations that its current version does not read,
    and `retained_from` is the number of the first version that can be read.
    """

    dataset: str
    dry_run: bool
    discarded: tuple[Judged, ...]
    kept: tuple[Judged, ...]
    garbage: tuple[Judged, ...]
    spared: tuple[Judged, ...] = ()
    objects: int = 0
    bytes: int = 0
    unpinned: str | None = None
    retained_from: int | None = None

    def summary(self) -> str:
        """Return the outcome in one line, for logs."""
        would = "would discard" if self.dry_run else "discarded"
        what = "version(s)" if self.retained_from is None else "generation(s)"
        parts = [f"dataset {self.dataset}: {would} {len(self.discarded)} {what}"]
        parts += [f"versions from {self.retained_from} on can be read"] if self.discarded and self.retained_from else []
        parts += [f"{len(self.garbage)} leftover(s)"] if self.garbage else []
        parts += [f"{self.objects:,} objects of {self.bytes:,} bytes deleted"] if self.objects else []
        parts += [f"{len(self.spared)} spared"] if self.spared else []
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        for name in ("discarded", "kept", "garbage", "spared"):
            values[name] = [
                {"what": judged.what, "name": judged.name, "reason": judged.reason} for judged in values[name]
            ]
        return values


def discard(
    lake: Lake,
    dataset: str,
    policy: DiscardPolicy | None = None,
    *,
    by: str,
    roots: Roots = dict,
    dry_run: bool = False,
) -> DiscardReport:
    """Discard the versions that the policy lets go, and delete what nothing reaches; safe to repeat and to race.

    `roots` gives, by version id, why applications still need a version (their open batches). With `dry_run` nothing
    is written but the store's clock. Raises DatasetNotFoundError.
    """
    log = DatasetLog(lake, dataset)
    manifests = log.read_all()[1]
    if dataset not in manifests:
        raise DatasetNotFoundError(
            f"dataset {dataset!r} has no commit in {lake.url}.", "Advance it a first time.", dataset=dataset
        )
    policy = policy or manifests[dataset].declaration.discard
    listing = _look(log, commits=manifests[dataset].versions_are_commits)
    manifest = expire_pin(log, manifests[dataset], listing.now)
    pin = manifests[dataset].pin
    unpinned = pin.version if pin is not None and manifest.pin is None else None
    if dry_run:
        kept_from = _kept_from(log, manifest, policy)
        plan = plan_discard(manifest, policy, all_leases(lake, dataset), roots(), listing, kept_from)
        return DiscardReport(
            dataset, True, plan.go, plan.stay, plan.garbage, unpinned=unpinned, retained_from=plan.retained_from
        )
    expire_pins(log, manifests, listing.now, by=by)

    plan = DiscardPlan((), (), ())

    def doom(fresh: DatasetManifest) -> DatasetManifest | None:
        nonlocal plan, listing
        if not {ref.document for ref in fresh.listed if ref.document is not None} <= listing.documents.keys():
            listing = _look(log)  # a version was published since: how old it is, only the store can say
        kept_from = _kept_from(log, fresh, policy)
        plan = plan_discard(fresh, policy, all_leases(lake, dataset), roots(), listing, kept_from)
        return doomed_by(fresh, plan)

    after = log.transact(doom, by=by)
    spared, objects = delete_doomed(log, after, roots, listing.now, by=by)
    objects += _sweep(log, after, listing, policy, roots)
    sizes = sum(item.size for item in objects)
    return DiscardReport(
        dataset, False, plan.go, plan.stay, plan.garbage, tuple(spared), len(objects), sizes, unpinned,
        plan.retained_from,
    )  # fmt: skip


def delete_doomed(
    log: DatasetLog, manifest: DatasetManifest, roots: Roots, now: datetime, *, by: str
) -> tuple[list[Judged], list[ObjectInfo]]:
    """Delete what a committed manifest dooms and nobody holds; return what is spared, and the deleted objects.

    `now` is by the store's clock. Leases and open batches are read here, after the commit that doomed.
    """
    leases = all_leases(log.lake, log.name)
    # Before anything that they held: a holder that was only late finds out by its next renewal.
    log.lake.store.delete_many([lease.key for lease in leases if lease.expires_at <= now])
    if not manifest.doomed:
        return [], []
    spared = spared_of(manifest, leases, roots(), now)
    deleted = set(manifest.doomed) - {judged.what for judged in spared}
    objects = _delete(log, sorted(deleted))

    def clear(fresh: DatasetManifest) -> DatasetManifest | None:
        left = tuple(entry for entry in fresh.doomed if entry not in deleted)
        change = Change(action="discard", reason=f"{len(deleted)} folders and documents are deleted")
        return None if left == fresh.doomed else fresh.after(doomed=left, change=change)

    log.transact(clear, by=by)
    return spared, objects


def _kept_from(log: DatasetLog, manifest: DatasetManifest, policy: DiscardPolicy) -> int:
    """Return the oldest version that an unbounded dataset keeps for being new; it is looked up where it matters."""
    return oldest_kept(log, as_unbounded(manifest), policy) if manifest.retired else 0


def _look(log: DatasetLog, *, commits: bool = False) -> Listing:
    store, prefix = log.lake.store, log.prefix
    now = store_now(log.lake, log.name)
    folders: dict[str, datetime] = {}
    for item in store.list(f"{prefix}/data/"):
        folder = item.key.rsplit("/", 1)[0]
        folders[folder] = max(item.modified, folders.get(folder, item.modified))
    running = set()
    for attempt in attempts(log.lake, log.name):
        folder = f"{prefix}/data/{attempt.id}"
        if folder in folders:
            folders[folder] = max(attempt.renewed, folders[folder])
        if attempt.renewed > now - RUNNING:
            running.add(attempt.id)
    documents = {item.key: item.modified for item in store.list(f"{prefix}/versions/")}
    committed: dict[int, datetime] = {}
    for item in store.list(f"{prefix}/manifests/") if commits else ():
        number = _number_of(item)
        committed[number] = max(item.modified, committed.get(number, item.modified))
    return Listing(now, folders, documents, frozenset(running), committed)


def _number_of(manifest: ObjectInfo) -> int:
    """Return the number of the commit whose manifest an object is."""
    return int(manifest.key.rsplit("/", 1)[1].partition("-")[0])


def _delete(log: DatasetLog, entries: Sequence[str]) -> list[ObjectInfo]:
    """Delete the objects of doomed folders and doomed documents; return them."""
    store = log.lake.store
    objects: list[ObjectInfo] = []
    for entry in entries:
        if entry.endswith(".json"):
            stored = store.head(entry)
            objects += [stored] if stored else []
        else:
            objects += store.list(f"{entry}/")
    store.delete_many([item.key for item in objects])
    return objects


def _sweep(
    log: DatasetLog, manifest: DatasetManifest, listing: Listing, policy: DiscardPolicy, roots: Roots
) -> list[ObjectInfo]:
    """Delete records of builds that ended long ago, and commits that are long past."""
    store, limit = log.lake.store, before(listing.now, policy.grace)
    held: Mapping[str, str] = {}
    if manifest.versions_are_commits:
        held = holders_of(all_leases(log.lake, log.name), roots(), listing.now)
    ended = min(limit, listing.now - RUNNING)
    objects = [item for item in store.list(f"{log.prefix}/attempts/") if item.modified <= ended]
    logs = [log.log]
    set_name = log.version_set()
    if set_name is not None:
        logs.append(set_log(log.lake, set_name))
    for commits in logs:
        past = [item for item in _past(commits, limit) if not any(is_of(version, item.key) for version in held)]
        if manifest.retained_from is not None:
            past = [item for item in past if _number_of(item) < manifest.retained_from]
        objects += past
    store.delete_many([item.key for item in objects])
    return objects


def _past(log: CommitLog, limit: datetime) -> list[ObjectInfo]:
    """Return commit manifests that are neither recent nor young; the history ends where they did."""
    current = log.current()
    if current is None or current.number <= COMMITS_KEPT:
        return []
    oldest = log.manifest_key(current.number - COMMITS_KEPT, "0")
    return [item for item in log.store.list(f"{log.prefix}/manifests/") if item.key < oldest and item.modified <= limit]
