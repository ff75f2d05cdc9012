"""Commits what a dataset waits for: the offsets behind what was dropped or lost, and which markers are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.commits_meanwhile import moved
from dagster_adjunct.assets.bounded.place_in_input import place_in_input, told_by
from dagster_adjunct.assets.sources.version_source import Awaiting
from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.deliveries import Awaited
from dagster_adjunct.resources.objects.commit_log import commit_upon

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.advancing_members import Member, Unit
    from dagster_adjunct.assets.bounded.delivered_together import Answers

_TRIES = 20
Wait = tuple[Awaiting, Awaited | None]
"""What a source answered, and what is remembered of it: for which version, and since when."""


def wait(unit: Unit, answers: Answers) -> Unit:
    """Return the unit with what it waits for, which is committed; nothing new makes no commit."""
    begun = next((delivery.version for delivery in answers.complete.values()), None)
    waiting = [(member, answers.waiting[member.name]) for member in unit.members if member.name in answers.waiting]
    waits = {member.name: (answer, _awaited(member, answer, begun)) for member, answer in waiting}
    return _told(_committed(unit, waits), answers, waits, begun)


def begin(unit: Unit) -> Unit:
    """Commit every member, for without a commit the version that stands in its way can't be abandoned."""
    return _committed(unit, {})


def _committed(unit: Unit, waits: Mapping[str, Wait]) -> Unit:
    """Commit what waiting has found, and of members without a commit where they begin; return what stands then."""

    def commit(unit: Unit) -> Unit:
        members = []
        for member in unit.members:
            answer, awaited = waits.get(member.name, (None, member.manifest.awaited))
            if answer is None and member.committed is None:
                answer = Awaiting(None, (), member.manifest.offsets)
            after = None if answer is None else _left(member, answer, awaited)
            if after is not None:
                members.append(member.at(after))
        return unit.committed(members) if members else unit

    return commit_upon(unit, commit, moved, attempts=_TRIES)


def _told(unit: Unit, answers: Answers, waits: Mapping[str, Wait], begun: str | None) -> Unit:
    """Return the unit with what each member has to say of this wait; those that have a version wait for the others."""
    members = []
    for member in unit.members:
        answer = answers.waiting.get(member.name)
        if answer is None:
            missing = tuple(marker for waiting in answers.waiting.values() for marker in waiting.missing)
            since = [awaited.since for _, awaited in waits.values() if awaited is not None]
            others = Awaited(version=begun, missing=missing, since=min(since, default=member.context.now()))
            members.append(replace(member, others=others))
        else:
            awaiting = replace(answer, idle=answer.idle and not answers.complete)
            members.append(replace(member, outcome=member.outcome.heard(answer), awaiting=awaiting))
    return replace(unit, members=tuple(members))


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
    return manifest.after(awaited=awaited, **place_in_input(manifest, awaiting), change=change)


def _awaited(member: Member, awaiting: Awaiting, others: str | None) -> Awaited | None:
    """Return what to remember of a wait: for which version, and since when. `others` have it whole in the set."""
    if awaiting.idle and others is None:
        return None
    before, version = member.manifest.awaited, awaiting.version or others
    since = before.since if before is not None and before.version == version else member.context.now()
    return Awaited(version=version, missing=awaiting.missing, since=since)
