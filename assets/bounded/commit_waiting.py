"""Commits what a dataset waits for: the offsets behind what was dropped or lost, and which markers are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.commits_meanwhile import moved
from dagster_adjunct.assets.bounded.place_in_input import copied, place_in_input, told_by
from dagster_adjunct.assets.sources.version_source import Awaiting
from dagster_adjunct.assets.versions.deliveries import Awaited
from dagster_adjunct.assets.versions.manifest import BoundedManifest, Change
from dagster_adjunct.resources.objects.commit_log import commit_upon

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.advancing_members import Member, Unit

_TRIES = 20


def leave(unit: Unit, name: str, awaiting: Awaiting, awaited: Awaited | None, *, by: str) -> Unit:
    """Commit what waiting has found for one member, and return what stands then.

    Also the first time, so that it stands where this dataset begins to read. Nothing new makes no commit.
    """

    def commit(unit: Unit) -> Unit:
        member = unit.member(name)
        after = _left(member, awaiting, awaited)
        if after is None:
            return unit
        return unit.having([member.at(after)], member.log.commit(unit.commit, after, by=by))

    return commit_upon(unit, commit, moved, attempts=_TRIES)


def begin(unit: Unit, *, by: str) -> Unit:
    """Commit every member, for without a commit the version that stands in its way can't be abandoned."""
    for name in [member.name for member in unit.members]:
        member = unit.member(name)
        if member.committed is None:
            unit = leave(unit, name, Awaiting(None, (), member.manifest.offsets), member.manifest.awaited, by=by)
    return unit


def _left(member: Member, awaiting: Awaiting, awaited: Awaited | None) -> BoundedManifest | None:
    """Return the manifest that says what is waited for, None where it says so already."""
    manifest = member.manifest
    same = awaited == manifest.awaited or (
        awaited is not None
        and manifest.awaited is not None
        and (awaited.version, awaited.missing) == (manifest.awaited.version, manifest.awaited.missing)
    )
    if dict(awaiting.offsets) == manifest.offsets and same and not awaiting.copies and member.committed == manifest:
        return None
    change = Change(action="wait", version=awaited.version if awaited else None, reason=told_by(awaiting))
    return manifest.after(
        awaited=awaited, delivered=copied(manifest, awaiting), **place_in_input(manifest, awaiting), change=change
    )


def awaited_by(member: Member, awaiting: Awaiting, others: str | None) -> Awaited | None:
    """Return what to remember of a wait: for which version, and since when. `others` have it whole in the set."""
    if awaiting.idle and others is None:
        return None
    before, version = member.manifest.awaited, awaiting.version or others
    since = before.since if before is not None and before.version == version else member.log.lake.now()
    return Awaited(version=version, missing=awaiting.missing, since=since)
