"""Which generations of an unbounded dataset go: those that only versions read which the policy lets go.

A compaction or rebuild retires what it replaces: versions before it still read that. It goes when it was retired
longer ago than the policy's grace, none of the newest versions needs it, and nobody holds a version that does. From
then on the versions before that number are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.sealed_version import version_number
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.assets.versions.unbounded_state import Retired

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.discard_policy import DiscardPolicy
    from dagster_adjunct.assets.versions.dataset_log import DatasetLog


@dataclass(frozen=True, slots=True)
class RetiredPlan:
    """What goes and why the rest stays, by folder; `retained_from` is the first version that can be read then."""

    go: tuple[tuple[Retired, str], ...]
    stay: tuple[tuple[Retired, str], ...]
    retained_from: int


def plan_retired(
    manifest: UnboundedManifest,
    policy: DiscardPolicy,
    held: Mapping[str, str],
    kept_from: int,
    committed: Mapping[int, datetime],
    now: datetime,
) -> RetiredPlan:
    """Decide from values alone.

    `held` says of versions why they are needed, `kept_from` is the number of the oldest of the newest versions that
    the policy keeps, and `committed` are the times of commits, by number and by the store's clock.
    """
    needed = {version_number(version): why for version, why in held.items()}
    go: list[tuple[Retired, str]] = []
    stay: list[tuple[Retired, str]] = []
    retained_from, blocked = manifest.retained_from, ""
    for retired in sorted(manifest.retired, key=lambda generation: generation.until):
        holder = next((why for number, why in needed.items() if number < retired.until), "")
        kept = (
            "all versions are kept" if policy.keep is None else f"version {kept_from} is among the newest {policy.keep}"
        )
        reasons = (
            f"younger than {policy.grace}" if now - _retired_at(retired, committed, now) < policy.grace else "",
            kept if kept_from < retired.until else "",
            holder,
            blocked,
        )
        why = next((reason for reason in reasons if reason), "")
        if why:
            blocked = blocked or f"versions from {retained_from} on can be read"
            stay.append((retired, why))
        else:
            retained_from = max(retained_from, retired.until)
            go.append((retired, f"generation {retired.generation}: no version from {retired.until} on reads it"))
    return RetiredPlan(tuple(go), tuple(stay), retained_from)


def oldest_kept(log: DatasetLog, manifest: UnboundedManifest, policy: DiscardPolicy) -> int:
    """Return the number of the oldest of the newest versions that the policy keeps; 0 where it keeps them all.

    The manifest knows their numbers. Where a very long history leaves some of them out, commits are
    read back from the newest, no further than anything is retired.
    """
    if policy.keep is None:
        return 0
    lowest = min((retired.until for retired in manifest.retired), default=0)
    oldest, left = 0, policy.keep
    for first, last in reversed(manifest.numbers):
        oldest = max(first, last - left + 1)
        left -= last - oldest + 1
        if left == 0 or oldest < lowest:
            return oldest
    kept: set[int] = set()
    for _, manifest_then in log.history():
        if manifest_then.version is not None:
            kept.add(manifest_then.version.number)
        if kept and (len(kept) == policy.keep or min(kept) < lowest):
            break
    return min(kept, default=0)


def _retired_at(retired: Retired, committed: Mapping[int, datetime], now: datetime) -> datetime:
    """Return when the commit that retired it was made; one that no listing had yet was made just now."""
    if retired.until in committed:
        return committed[retired.until]
    return now if committed and retired.until > max(committed) else retired.at
