"""Discarding: which versions go, and the deletion of what nobody can reach any more.

    doom      one commit takes the versions out and names their folders as doomed: nobody may begin to use them
    look      leases and open batches are read then; what they hold is spared, and goes at a later run
    delete    expired leases, so that who held one finds it gone; then objects of doomed folders, and documents
    clear     one commit takes what is deleted off the list
    sweep     records of builds that ended long ago, and commit manifests that are long past

A run that dies anywhere leaves the list of the doomed, from which the next one goes on. Of an unbounded dataset,
generations go that only versions read which the policy lets go (retention/generations.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.retention.generations import oldest_kept, plan_retired
from dagster_adjunct.assets.versions.attempts import RUNNING, attempts
from dagster_adjunct.assets.versions.choosing import order_of
from dagster_adjunct.assets.versions.leases import LeaseInfo, all_leases, store_now
from dagster_adjunct.assets.versions.log import DatasetLog, set_log
from dagster_adjunct.assets.versions.manifest import BoundedManifest, Change, DatasetManifest, UnboundedManifest
from dagster_adjunct.assets.versions.operator_actions import expire_pin, expire_pins
from dagster_adjunct.assets.versions.sealed_version import VersionRef
from dagster_adjunct.resources.errors import DatasetNotFoundError
from dagster_adjunct.resources.times import before

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.commit import CommitLog
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.objects.store import ObjectInfo

COMMITS_KEPT = 200
Roots = Callable[[], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Judged:
    """A version, a folder or a document, and why it stays or goes."""

    what: str
    name: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """What lies below a dataset, as one listing saw it; times are the store's.

    `folders` are those of attempts, with the time of the newest object or renewal; `documents` those of versions.
    `running` are the ids of attempts whose builds are going on: their record was renewed a short while ago.
    `commits` are the times of an unbounded dataset's commits, by number.
    """

    now: datetime
    folders: Mapping[str, datetime] = field(default_factory=dict)
    documents: Mapping[str, datetime] = field(default_factory=dict)
    running: frozenset[str] = frozenset()
    commits: Mapping[int, datetime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DiscardPlan:
    """Which versions go and which stay, and what no version needs, each with the reason.

    Of an unbounded dataset they are the folders of retired generations, and `retained_from` is the number of the
    first version that can be read when they have gone.
    """

    go: tuple[Judged, ...]
    stay: tuple[Judged, ...]
    garbage: tuple[Judged, ...]
    retained_from: int | None = None


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
        said = [f"dataset {self.dataset}: {would} {len(self.discarded)} {what}"]
        said += [f"versions from {self.retained_from} on can be read"] if self.discarded and self.retained_from else []
        said += [f"{len(self.garbage)} leftover(s)"] if self.garbage else []
        said += [f"{self.objects:,} objects of {self.bytes:,} bytes deleted"] if self.objects else []
        said += [f"{len(self.spared)} spared"] if self.spared else []
        return "; ".join(said)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        for name in ("discarded", "kept", "garbage", "spared"):
            values[name] = [{"what": each.what, "name": each.name, "reason": each.reason} for each in values[name]]
        return values


def plan_discard(
    manifest: DatasetManifest,
    policy: DiscardPolicy,
    leases: Sequence[LeaseInfo],
    roots: Mapping[str, str],
    found: Found,
    kept_from: int = 0,
) -> DiscardPlan:
    """Decide what goes and what stays, from values alone. `roots` says of version ids why they are needed.

    `kept_from` is the number of the oldest version that an unbounded dataset keeps for being new.
    """
    held = _held(leases, roots, found.now)
    reached = manifest.reachable()
    limit = before(found.now, policy.grace)
    garbage = [
        Judged(folder, None, f"no version reaches it, untouched since {at:%Y-%m-%d %H:%M} UTC")
        for folder, at in sorted({**found.folders, **found.documents}.items())
        if folder not in reached and folder not in manifest.doomed and at <= limit and not _is_running(folder, found)
    ]
    if isinstance(manifest, UnboundedManifest):
        plan = plan_retired(manifest, policy, held, kept_from, found.commits, found.now)
        go, stay = (tuple(Judged(each.folder, None, why) for each, why in judged) for judged in (plan.go, plan.stay))
        return DiscardPlan(go, stay, tuple(garbage), plan.retained_from)
    go, stay = _judge_versions(manifest, policy, held, found)
    return DiscardPlan(go, stay, tuple(garbage))


def _judge_versions(
    manifest: BoundedManifest, policy: DiscardPolicy, held: Mapping[str, str], found: Found
) -> tuple[tuple[Judged, ...], tuple[Judged, ...]]:
    """Return which versions go, and which stay."""
    newest = _newest(manifest, policy)
    head = manifest.ref(manifest.head) if manifest.head else None
    # After a rollback that is an older one than others that stay, and these must not take its place.
    next_best = head.replaced if head is not None and policy.keep != 1 else None
    go, stay = [], []
    for ref in manifest.versions:
        age = found.now - found.documents.get(ref.document or "", ref.sealed_at)
        pinned = manifest.pin is not None and manifest.pin.version == ref.id
        served = manifest.version is not None and manifest.version.id == ref.id
        sealed = ref.state == "sealed"
        reasons = (
            ("pinned" if pinned else ""),
            ("served" if served else ""),
            ("what the last switch chose" if manifest.head == ref.id else ""),
            ("served again if the current one is withdrawn" if next_best == ref.id and sealed else ""),
            newest.get(ref.id, ""),
            held.get(ref.id, held.get("*", "")),
            (f"younger than {policy.grace}" if age < policy.grace else ""),
        )
        why = next((reason for reason in reasons if reason), "")
        if why:
            stay.append(Judged(ref.id, ref.name, why))
        else:
            go.append(Judged(ref.id, ref.name, _why_gone(manifest, ref, policy)))
    return tuple(go), tuple(stay)


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
    found = _look(log, commits=isinstance(manifests[dataset], UnboundedManifest))
    manifest = expire_pin(log, manifests[dataset], found.now)
    unpinned = _pinned(manifests[dataset]) if _pinned(manifest) is None else None
    if dry_run:
        kept_from = _kept_from(log, manifest, policy)
        plan = plan_discard(manifest, policy, all_leases(lake, dataset), roots(), found, kept_from)
        return DiscardReport(
            dataset, True, plan.go, plan.stay, plan.garbage, unpinned=unpinned, retained_from=plan.retained_from
        )
    expire_pins(log, manifests, found.now, by=by)

    plan = DiscardPlan((), (), ())

    def doom(fresh: DatasetManifest) -> DatasetManifest | None:
        nonlocal plan, found
        if not {ref.document for ref in fresh.listed if ref.document is not None} <= found.documents.keys():
            found = _look(log)  # a version was published since: how old it is, only the store can say
        kept_from = _kept_from(log, fresh, policy)
        plan = plan_discard(fresh, policy, all_leases(lake, dataset), roots(), found, kept_from)
        gone = {judged.what for judged in plan.go}
        if not gone and not plan.garbage:
            return None
        if isinstance(fresh, UnboundedManifest):
            return fresh.after(
                retired=tuple(retired for retired in fresh.retired if retired.folder not in gone),
                retained_from=plan.retained_from,
                doomed=tuple(dict.fromkeys([*fresh.doomed, *(judged.what for judged in (*plan.go, *plan.garbage))])),
                change=Change(action="discard", reason=f"{len(gone)} generations, {len(plan.garbage)} leftovers"),
            )
        leaving = [ref for ref in fresh.versions if ref.id in gone]
        entries = [entry for ref in leaving for entry in (*ref.folders, ref.document) if entry is not None]
        return fresh.after(
            versions=tuple(ref for ref in fresh.versions if ref.id not in gone),
            doomed=tuple(dict.fromkeys([*fresh.doomed, *entries, *(judged.what for judged in plan.garbage)])),
            change=Change(action="discard", reason=f"{len(gone)} versions, {len(plan.garbage)} leftovers"),
        )

    after = log.transact(doom, by=by)
    spared, objects = delete_doomed(log, after, roots, found.now, by=by)
    objects += _sweep(log, after, found, policy, roots)
    sizes = sum(item.size for item in objects)
    return DiscardReport(
        dataset, False, plan.go, plan.stay, plan.garbage, tuple(spared), len(objects), sizes, unpinned,
        plan.retained_from,
    )  # fmt: skip


def _pinned(manifest: DatasetManifest) -> str | None:
    pin = manifest.pin if isinstance(manifest, BoundedManifest) else None
    return pin.version if pin is not None else None


def _kept_from(log: DatasetLog, manifest: DatasetManifest, policy: DiscardPolicy) -> int:
    """Return the oldest version that an unbounded dataset keeps for being new; it is looked up where it matters."""
    return oldest_kept(log, manifest, policy) if isinstance(manifest, UnboundedManifest) and manifest.retired else 0


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
    spared = _spared(manifest, leases, roots(), now)
    deleted = set(manifest.doomed) - {each.what for each in spared}
    objects = _delete(log, sorted(deleted))

    def clear(fresh: DatasetManifest) -> DatasetManifest | None:
        left = tuple(entry for entry in fresh.doomed if entry not in deleted)
        change = Change(action="discard", reason=f"{len(deleted)} folders and documents are deleted")
        return None if left == fresh.doomed else fresh.after(doomed=left, change=change)

    log.transact(clear, by=by)
    return spared, objects


def _newest(manifest: BoundedManifest, policy: DiscardPolicy) -> dict[str, str]:
    """Return the versions that stay for being new; of versions ordered by name only the newest build of each name."""
    order = order_of(manifest)
    sealed = sorted((ref for ref in manifest.versions if ref.state == "sealed"), key=order, reverse=True)
    if manifest.declaration.order == "name":
        newest_build = {ref.name: ref for ref in reversed(sealed)}
        sealed = [ref for ref in sealed if newest_build[ref.name] is ref]
    kept = sealed if policy.keep is None else sealed[: policy.keep]
    why = "all are kept" if policy.keep is None else f"among the newest {policy.keep}"
    return {ref.id: why for ref in kept}


def _why_gone(manifest: BoundedManifest, ref: VersionRef, policy: DiscardPolicy) -> str:
    if ref.state != "sealed":
        return f"{ref.state}, older than {policy.grace}"
    later = [each for each in manifest.versions if (each.name, each.state) == (ref.name, "sealed")]
    if manifest.declaration.order == "name" and later[-1].number > ref.number:
        return f"built again since, as {later[-1].id}"
    return f"not among the newest {policy.keep}"


def _is_running(entry: str, found: Found) -> bool:
    """Whether a folder or document is of a build that is going on: it is nobody's garbage, however short the grace."""
    return any(attempt in entry for attempt in found.running)


def _held(leases: Sequence[LeaseInfo], roots: Mapping[str, str], now: datetime) -> dict[str, str]:
    held = {
        version: f"leased by {lease.holder} until {lease.expires_at:%Y-%m-%d %H:%M:%S} UTC"
        for lease in leases
        if lease.expires_at > now
        for version in lease.versions
    }
    return {**held, **roots}


def _spared(
    manifest: DatasetManifest, leases: Sequence[LeaseInfo], roots: Mapping[str, str], now: datetime
) -> list[Judged]:
    """Return what is doomed and still held."""
    held = _held(leases, roots, now)
    reached = manifest.reachable()
    # Of an unbounded dataset nothing says any more which of them an earlier version reads: it holds all.
    unbounded = isinstance(manifest, UnboundedManifest)
    earlier = {version for version in held if unbounded and not manifest.retains(version)}
    spared = []
    for entry in manifest.doomed:
        why = next((reason for version, reason in held.items() if version in earlier or _is_of(version, entry)), "")
        if entry in reached:
            why = "a version reaches it"  # never by our own hand; better garbage than a hole
        if why:
            spared.append(Judged(entry, None, why))
    return spared


def _is_of(version: str, entry: str) -> bool:
    """Whether a folder, document or manifest may be of a version, whose id ends with its attempt's."""
    return version == "*" or version.partition("-")[2] in entry


def _look(log: DatasetLog, *, commits: bool = False) -> Found:
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
    return Found(now, folders, documents, frozenset(running), committed)


def _number_of(manifest: ObjectInfo) -> int:
    """Return the number of the commit whose manifest an object is."""
    return int(manifest.key.rsplit("/", 1)[1].partition("-")[0])


def _delete(log: DatasetLog, entries: Sequence[str]) -> list[ObjectInfo]:
    """Delete the objects of doomed folders and doomed documents; return them."""
    store = log.lake.store
    objects: list[ObjectInfo] = []
    for entry in entries:
        if entry.endswith(".json"):
            found = store.head(entry)
            objects += [found] if found else []
        else:
            objects += store.list(f"{entry}/")
    store.delete_many([item.key for item in objects])
    return objects


def _sweep(
    log: DatasetLog, manifest: DatasetManifest, found: Found, policy: DiscardPolicy, roots: Roots
) -> list[ObjectInfo]:
    """Delete records of builds that ended long ago, and commits that are long past."""
    store, limit = log.lake.store, before(found.now, policy.grace)
    held: Mapping[str, str] = {}
    if isinstance(manifest, UnboundedManifest):  # a version of which stands nowhere but in its commit
        held = _held(all_leases(log.lake, log.name), roots(), found.now)
    ended = min(limit, found.now - RUNNING)
    objects = [item for item in store.list(f"{log.prefix}/attempts/") if item.modified <= ended]
    logs = [log.log]
    set_name = log.version_set()
    if set_name is not None:
        logs.append(set_log(log.lake, set_name))
    for each in logs:
        past = [item for item in _past(each, limit) if not any(_is_of(version, item.key) for version in held)]
        if isinstance(manifest, UnboundedManifest):
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
