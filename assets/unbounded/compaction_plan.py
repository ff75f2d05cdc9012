"""Which generations of a table are worth merging, decided on the manifest alone.

minor   adjacent deltas -> one delta; every tombstone stays
major   base and deltas -> a new base; by offset without tombstones, by a column with those above the horizon
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.following_changes import DeltaCompaction
    from dagster_adjunct.assets.versions.sealed_version import SealedVersion
    from dagster_adjunct.resources.bucketing.bucket_files import Generation

Level = Literal["minor", "major"]
WORTH = 50_000
"""Deltas with fewer rows than these are merged while reading in no time: only their number makes a compaction due."""


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """What one compaction merges: adjacent generations, oldest first, and why."""

    level: Level
    generations: tuple[Generation, ...]
    reason: str

    @property
    def rows(self) -> int:
        """The stored rows that are read."""
        return sum(generation.rows for generation in self.generations)

    @property
    def size(self) -> int:
        """The bytes that are read."""
        return sum(generation.size for generation in self.generations)

    @property
    def folders(self) -> frozenset[str]:
        """The folders that the output takes the place of."""
        return frozenset(generation.folder for generation in self.generations)


def plan_compaction(
    version: SealedVersion, policy: DeltaCompaction, level: Level | None = None
) -> CompactionPlan | None:
    """Return what to compact, None where nothing is to be done.

    With `level` whatever that level can merge: all deltas, or all generations. Without it what the policy finds due.
    A minor compaction that is due takes the newest deltas, and older ones only while these are not larger than all
    that it has taken: so each row is rewritten a few times, however many commits there are.
    """
    generations = [generation for generation in version.generations if generation.files]
    base, deltas = generations[:1], generations[1:]
    if level == "major":
        return CompactionPlan("major", (*base, *deltas), "asked for") if deltas or version.lacks_base else None
    if level == "minor":
        return CompactionPlan("minor", tuple(deltas), "asked for") if len(deltas) > 1 else None
    if not deltas:
        return None
    changed, stored = sum(delta.rows for delta in deltas), base[0].rows
    many = len(deltas) >= policy.deltas
    large = changed > policy.fraction * stored
    if changed > policy.rows:
        return CompactionPlan("major", (*base, *deltas), f"the deltas hold {changed:,} rows, more than {policy.rows:,}")
    if large and (many or changed >= WORTH):
        why = f"the deltas hold {changed:,} rows, more than {policy.fraction:.0%} of the base's {stored:,}"
        return CompactionPlan("major", (*base, *deltas), why)
    if not many:
        return None
    return CompactionPlan("minor", tuple(_newest(deltas, policy.deltas)), f"there are {len(deltas)} deltas")


def plan_state(version: SealedVersion, policy: DeltaCompaction) -> CompactionPlan | None:
    """Return what to compact of a table of state: small generations, as soon as there are too many.

    There is no base, and nothing makes one: what stays would be rewritten for what goes, and a generation goes whole
    when its last row has expired.
    """
    generations = [generation for generation in version.generations if generation.files]
    if len(generations) < policy.deltas:
        return None
    why = f"there are {len(generations)} generations"
    return CompactionPlan("minor", tuple(_newest(generations, policy.deltas)), why)


def _newest(deltas: Sequence[Generation], limit: int) -> Sequence[Generation]:
    """Return the deltas to merge so that fewer than `limit` are left, and no large one for a small one's sake."""
    taken = min(len(deltas), len(deltas) - limit + 2)
    rows = sum(delta.rows for delta in deltas[-taken:])
    while taken < len(deltas) and deltas[-taken - 1].rows <= rows:
        taken += 1
        rows += deltas[-taken].rows
    return deltas[-taken:]
