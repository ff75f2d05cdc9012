"""Goes on from what others committed meanwhile, where that leaves deliveries and builds as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
from dagster_adjunct.assets.versions.manifest import as_bounded

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.advancing_members import Unit
    from dagster_adjunct.assets.bounded.built_version import Built
    from dagster_adjunct.assets.versions.dataset_log import Members
    from dagster_adjunct.resources.objects.commit_log import Commit


def rebased(unit: Unit, built: Sequence[Built]) -> Unit:
    """Return the unit after what others committed meanwhile. Raises CommitConflictError where a build is lost by it."""
    commit, manifests = _now(unit)
    for candidate in (candidate.of(unit) for candidate in built):
        now = manifests.get(candidate.member.name)
        if now is None and candidate.member.committed is None:
            continue  # of a version set in which only others have advanced yet
        what = "discarded this build" if now is None else _lost_by(candidate, now)
        if what:
            if now is not None and candidate.is_nobodys(now):
                candidate.forget_attempt(files=True)
            raise candidate.lost_as(what)
    return _taken_over(unit, commit, manifests)


def _lost_by(built: Built, now: BoundedManifest) -> str:
    """Return what others did by which a build is lost, "" where nothing."""
    before = built.member.manifest
    if built.folder in now.doomed:
        return "discarded this build"
    if _took_in(before, now):
        return "took in the same delivery"
    if built.document is None and built.unchanged:
        held = now.ref(built.unchanged)
        same = before.head == now.head and held is not None and held.state == "sealed"
        return "" if same else "changed what is current, to which this version was equal"
    # Looked at after this manifest was read: a discard that has ended leaves no name of the doomed.
    if built.document is not None and (built.document in now.doomed or not built.is_stored()):
        return "discarded this build"
    return ""


def moved(unit: Unit) -> Unit | None:
    """Return the unit after what others committed meanwhile; None where they took in a delivery."""
    commit, manifests = _now(unit)
    for member in unit.members:
        before, now = member.committed, manifests.get(member.name)
        if (before is None) != (now is None) or (before and now and _took_in(before, now)):
            return None
    return _taken_over(unit, commit, manifests)


def _now(unit: Unit) -> tuple[Commit | None, Members]:
    commit, manifests = unit.members[0].log.read_all()
    return commit, {name: as_bounded(manifest) for name, manifest in manifests.items()}


def _taken_over(unit: Unit, commit: Commit | None, manifests: Members) -> Unit:
    """Let all members go on from these: what one commits later must not undo what others did to it meanwhile."""
    members = tuple(
        replace(member, committed=now, manifest=now.declared_as(member.source.declaration))
        if (now := manifests.get(member.name)) is not None
        else member
        for member in unit.members
    )
    return replace(unit, commit=commit, members=members)


def _took_in(before: BoundedManifest, now: BoundedManifest) -> bool:
    """Whether something was delivered or abandoned in between. A drop, which frees a name, takes nothing in."""
    if (before.offsets, before.abandoned, before.next_number) != (now.offsets, now.abandoned, now.next_number):
        return True
    # Without the ids that hold the deliveries: an erasure gives versions others, and takes nothing in.
    known = [(done.name, done.markers) for done in before.delivered]
    for delivered in [(done.name, done.markers) for done in now.delivered if not done.freed]:
        if delivered not in known:
            return True
        known.remove(delivered)
    return False
