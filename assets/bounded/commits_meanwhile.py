"""Goes on from what others committed meanwhile, where that leaves deliveries and builds as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.advancing_members import Unit
from dagster_adjunct.assets.bounded.place_in_input import declared
from dagster_adjunct.assets.versions.manifest import BoundedManifest, as_bounded
from dagster_adjunct.resources.errors import CommitConflictError

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.build_candidate import Built
    from dagster_adjunct.assets.versions.dataset_log import Members
    from dagster_adjunct.resources.objects.commit_log import Commit


def rebased(unit: Unit, built: Sequence[Built], documents: Mapping[str, str]) -> Unit:
    """Return the unit after what others committed meanwhile. Raises CommitConflictError where a build is lost by it."""
    commit, manifests = _now(unit)
    for candidate in built:
        before, now = candidate.member.manifest, manifests.get(candidate.member.name)
        if now is None and candidate.member.committed is None:
            continue  # of a version set in which only others have advanced yet
        if now is None or candidate.folder in now.doomed:
            raise lost(candidate, "discarded this build")
        if _took_in(before, now):
            _clear(candidate, now)
            raise lost(candidate, "took in the same delivery")
        document = documents.get(candidate.id)
        if document is None and candidate.unchanged:
            held = now.ref(candidate.unchanged)
            if before.head != now.head or held is None or held.state != "sealed":
                raise lost(candidate, "changed what is current, to which this version was equal")
        elif document is not None and not _is_stored(candidate, document, now):
            raise lost(candidate, "discarded this build")
    return _taken_over(unit, commit, manifests)


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
    members = [
        replace(member, committed=now, manifest=declared(now, member.spec))
        for member in unit.members
        if (now := manifests.get(member.name)) is not None
    ]
    return Unit(commit, unit.having(members).members)


def _is_stored(built: Built, document: str, now: BoundedManifest) -> bool:
    """Whether a build is whole after this manifest was read: a discard that has ended leaves no name of the doomed."""
    return document not in now.doomed and built.member.log.lake.store.head(document) is not None and built.is_stored()


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


def lost(built: Built, what: str) -> CommitConflictError:
    """Return the error of a build that is lost by what another writer did."""
    return CommitConflictError(
        f"dataset {built.member.spec.name!r}, version {built.delivery.version!r}: another writer {what} meanwhile.",
        "Nothing of this attempt is served. Advance again: it goes on from what the other one did.",
        dataset=built.member.spec.name,
    )


def _clear(built: Built, now: BoundedManifest) -> None:
    """Delete the files of a lost build, if they are needed by nobody.

    Another writer may have found this very build and published it. Once the delivery is settled, nobody can any
    more, so what no version refers to then is nobody's.
    """
    settled = built.delivery.version in now.taken
    if settled and not any(built.folder in ref.folders for ref in now.versions):
        built.forget_attempt(files=True)
