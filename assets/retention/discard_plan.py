"""Which versions and files of a dataset go, and which stay and why: decided from values alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_adjunct.assets.retention.retired_generations import plan_retired
from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
from dagster_adjunct.assets.versions.choose_version import order_of
from dagster_adjunct.assets.versions.manifest import DatasetManifest
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.resources.times import before

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.discard_policy import DiscardPolicy
    from dagster_adjunct.assets.versions.leases import LeaseInfo
    from dagster_adjunct.assets.versions.sealed_version import VersionRef


@dataclass(frozen=True, slots=True)
class Judged:
    """A version, a folder or a document, and why it stays or goes."""

    what: str
    name: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Listing:
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


def plan_discard(
    manifest: DatasetManifest,
    policy: DiscardPolicy,
    leases: Sequence[LeaseInfo],
    roots: Mapping[str, str],
    listing: Listing,
    kept_from: int = 0,
) -> DiscardPlan:
    """Decide what goes and what stays, from values alone. `roots` says of version ids why they are needed.

    `kept_from` is the number of the oldest version that an unbounded dataset keeps for being new.
    """
    held = holders_of(leases, roots, listing.now)
    reached = manifest.reachable()
    limit = before(listing.now, policy.grace)
    garbage = [
        Judged(folder, None, f"no version reaches it, untouched since {at:%Y-%m-%d %H:%M} UTC")
        for folder, at in sorted({**listing.folders, **listing.documents}.items())
        if folder not in reached and folder not in manifest.doomed and at <= limit and not _is_running(folder, listing)
    ]
    if isinstance(manifest, UnboundedManifest):
        plan = plan_retired(manifest, policy, held, kept_from, listing.commits, listing.now)
        go, stay = (
            tuple(Judged(retired.folder, None, why) for retired, why in judged) for judged in (plan.go, plan.stay)
        )
        return DiscardPlan(go, stay, tuple(garbage), plan.retained_from)
    go, stay = _judge_versions(manifest, policy, held, listing)
    return DiscardPlan(go, stay, tuple(garbage))


def _judge_versions(
    manifest: BoundedManifest, policy: DiscardPolicy, held: Mapping[str, str], listing: Listing
) -> tuple[tuple[Judged, ...], tuple[Judged, ...]]:
    """Return which versions go, and which stay."""
    newest = _newest(manifest, policy)
    head = manifest.ref(manifest.head) if manifest.head else None
    # After a rollback that is an older one than others that stay, and these must not take its place.
    next_best = head.replaced if head is not None and policy.keep != 1 else None
    go, stay = [], []
    for ref in manifest.versions:
        age = listing.now - listing.documents.get(ref.document or "", ref.sealed_at)
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


def doomed_by(manifest: DatasetManifest, plan: DiscardPlan) -> DatasetManifest | None:
    """Return the manifest from which what goes is taken out, and named as doomed; None where nothing goes."""
    gone, garbage = [judged.what for judged in plan.go], [judged.what for judged in plan.garbage]
    return manifest.without(gone, garbage) if gone or garbage else None


def holders_of(leases: Sequence[LeaseInfo], roots: Mapping[str, str], now: datetime) -> dict[str, str]:
    held = {
        version: f"leased by {lease.holder} until {lease.expires_at:%Y-%m-%d %H:%M:%S} UTC"
        for lease in leases
        if lease.expires_at > now
        for version in lease.versions
    }
    return {**held, **roots}


def spared_of(
    manifest: DatasetManifest, leases: Sequence[LeaseInfo], roots: Mapping[str, str], now: datetime
) -> list[Judged]:
    """Return what is doomed and still held."""
    held = holders_of(leases, roots, now)
    reached = manifest.reachable()
    earlier = {version for version in held if manifest.may_have_needed(version)}
    spared = []
    for entry in manifest.doomed:
        why = next((reason for version, reason in held.items() if version in earlier or is_of(version, entry)), "")
        if entry in reached:
            why = "a version reaches it"  # never by our own hand; better garbage than a hole
        if why:
            spared.append(Judged(entry, None, why))
    return spared


def is_of(version: str, entry: str) -> bool:
    """Whether a folder, document or manifest may be of a version, whose id ends with its attempt's."""
    return version == "*" or version.partition("-")[2] in entry


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
    later = [other for other in manifest.versions if (other.name, other.state) == (ref.name, "sealed")]
    if manifest.declaration.order == "name" and later[-1].number > ref.number:
        return f"built again since, as {later[-1].id}"
    return f"not among the newest {policy.keep}"


def _is_running(entry: str, listing: Listing) -> bool:
    """Whether a folder or document is of a build that is going on: it is nobody's garbage, however short the grace."""
    return any(attempt in entry for attempt in listing.running)
