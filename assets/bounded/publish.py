"""Publishing: the commit that makes versions current, stores them as rejected, or records what is awaited.

A change that another writer commits during a long build (a pin, a rollback) does not cost the build: the decision is
made again on the new manifest. A writer that read the same delivery does: CommitConflictError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.candidate import AdvanceGroup, CandidateVersion, Member
from dagster_adjunct.assets.sources.deliveries import Awaiting, Delivery
from dagster_adjunct.assets.versions.actions import insert_unserved_version, version_order, with_served_version
from dagster_adjunct.assets.versions.dataset_log import Members
from dagster_adjunct.assets.versions.manifest import (
    MAX_DELIVERIES,
    MAX_NAMES,
    Awaited,
    BoundedManifest,
    Change,
    Delivered,
    as_bounded,
)
from dagster_adjunct.assets.versions.reports import REJECT
from dagster_adjunct.assets.versions.version import VersionRef
from dagster_adjunct.assets.writing.generation import sum_counters
from dagster_adjunct.resources.errors import AdjunctError, CommitConflictError
from dagster_adjunct.resources.objects.commit_log import commit_with_rebase

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.advance import PollResult


def rebase_candidates(group: AdvanceGroup, candidates: Sequence[CandidateVersion]) -> AdvanceGroup:
    """Return the group after concurrent commits. Raises CommitConflictError if they make a build unusable."""
    manifests, rebased = _follow_commits(group)
    for candidate in (candidate.with_member_of(group) for candidate in candidates):
        now = manifests.get(candidate.member.name)
        if now is None and candidate.member.committed is None:
            continue  # in a version set of which only others have advanced so far
        what = "discarded this build" if now is None else _find_conflict(candidate, now)
        if what:
            # Before another build of this delivery is published, another writer may still find and publish this one.
            settled = now is not None and candidate.delivery.version in now.taken - candidate.member.manifest.taken
            if now is not None and settled and not any(candidate.folder in ref.folders for ref in now.versions):
                candidate.delete_attempt(files=True)
            name = candidate.member.name
            problem = f"dataset {name!r}, version {candidate.delivery.version!r}: another writer {what} meanwhile."
            step = "Nothing of this attempt is served. Advance again: it continues from the other writer's commit."
            raise CommitConflictError(problem, step, dataset=name)
    return rebased


def _find_conflict(candidate: CandidateVersion, now: BoundedManifest) -> str:
    """Return what other writers did to make a build unusable, "" if nothing."""
    before = candidate.member.manifest
    if candidate.folder in now.doomed:
        return "discarded this build"
    if _has_new_delivery(before, now):
        return "took in the same delivery"
    if candidate.document is None and candidate.unchanged:
        ref = now.ref(candidate.unchanged)
        same = before.head == now.head and ref is not None and ref.state == "sealed"
        return "" if same else "changed what is current, to which this version was equal"
    # Checked after this manifest was read: a finished discard no longer lists the objects as doomed.
    if candidate.document is not None and (candidate.document in now.doomed or not candidate.is_stored()):
        return "discarded this build"
    return ""


def rebase_waiting(group: AdvanceGroup) -> AdvanceGroup | None:
    """Return the group after concurrent commits; None if one of them took in a delivery."""
    manifests, rebased = _follow_commits(group)
    for member in group.members:
        before, now = member.committed, manifests.get(member.name)
        if (before is None) != (now is None) or (before and now and _has_new_delivery(before, now)):
            return None
    return rebased


def _follow_commits(group: AdvanceGroup) -> tuple[Members, AdvanceGroup]:
    """Return the committed manifests, and the group with them: later commits do not undo concurrent changes."""
    commit, stored = group.members[0].log.read_all()
    manifests = {name: as_bounded(manifest) for name, manifest in stored.items()}
    members = tuple(
        replace(member, committed=now, manifest=now.with_declared_policies(member.source.declaration))
        if (now := manifests.get(member.name)) is not None
        else member
        for member in group.members
    )
    return manifests, replace(group, commit=commit, members=members)


def _has_new_delivery(before: BoundedManifest, now: BoundedManifest) -> bool:
    """Whether a version was delivered or abandoned between two manifests; dropping one does not count."""
    if (before.offsets, before.abandoned, before.next_number) != (now.offsets, now.abandoned, now.next_number):
        return True
    # Version ids are ignored: an erasure changes them, and is no delivery.
    known = [(done.name, done.markers) for done in before.delivered]
    for delivered in [(done.name, done.markers) for done in now.delivered if not done.freed]:
        if delivered not in known:
            return True
        known.remove(delivered)
    return False


def input_position(
    manifest: BoundedManifest, answer: Delivery | Awaiting, done: Delivered | None = None
) -> dict[str, object]:
    """Return the manifest fields for the position in the input after this answer: offsets, losses and deliveries.

    `done` is the delivery, None if the answer is none.
    """
    newest = {done.name: done for done in manifest.delivered}
    delivered: tuple[Delivered, ...] = tuple(  # with new markers for those whose files were copied without a change
        earlier.model_copy(update={"markers": dict(answer.copies[earlier.name])})
        if earlier.name in answer.copies and earlier is newest[earlier.name]
        else earlier
        for earlier in manifest.delivered
    )
    known = manifest.known
    if done is not None:
        # A freed name is taken again. Names that are still free are kept, whatever their age.
        delivered = (*(earlier for earlier in delivered if not (earlier.freed and earlier.name == done.name)), done)
        older, recent = delivered[:-MAX_DELIVERIES], delivered[-MAX_DELIVERIES:]
        delivered = (*(earlier for earlier in older if earlier.freed), *recent)
        known = (*known, *(earlier.name for earlier in older if not earlier.freed))[-MAX_NAMES:]
    return {
        "offsets": dict(answer.offsets),
        "stream": answer.stream or manifest.stream,
        "lost": (*manifest.lost, *([answer.lost] if answer.lost is not None else []))[-MAX_DELIVERIES:],
        "delivered": delivered,
        "known": known,
    }


def commit_reason(answer: Delivery | Awaiting, *more: str) -> str:
    """Return a commit's reason: `more`, then the losses and notes of the source's answer."""
    lost = answer.lost.summary() if answer.lost is not None else ""
    return "; ".join(filter(None, (*more, lost, *answer.notes)))


def commit_waiting(group: AdvanceGroup, polled: PollResult) -> AdvanceGroup:
    """Commit what the group waits for, if that has changed; return the group, with each member's part of this wait."""
    begun = next((delivery.version for delivery in polled.complete.values()), None)
    waits = {name: _begin_waiting(group.member(name), answer, begun) for name, answer in polled.waiting.items()}
    missing = tuple(marker for answer in waits.values() for marker in answer.missing)
    since = min((answer.since for answer in waits.values() if answer.since is not None), default=None)
    others = Awaiting(begun, missing, since=since)  # for members that have a complete version
    group = commit_waits(group, waits)
    members = [
        replace(member.with_source_report(polled.waiting[member.name]), awaiting=waits[member.name])
        if member.name in waits
        else replace(member, awaiting=others)
        for member in group.members
    ]
    return replace(group, members=tuple(members))


def commit_waits(group: AdvanceGroup, waits: Mapping[str, Awaiting]) -> AdvanceGroup:
    """Commit these waits, and the start offsets of members without a commit; return the group after it.

    A version can only be abandoned in a dataset that has a commit.
    """

    def commit(group: AdvanceGroup) -> AdvanceGroup:
        members = []
        for member in group.members:
            start = Awaiting(None, (), offsets=member.manifest.offsets) if member.committed is None else None
            answer = waits.get(member.name, start)
            if answer is not None and (after := _waiting_manifest(member, answer)) is not None:
                members.append(member.after_commit(after))
        return group.commit_members(members) if members else group

    return commit_with_rebase(group, commit, rebase_waiting)


def _waiting_manifest(member: Member, awaiting: Awaiting) -> BoundedManifest | None:
    """Return the manifest with what is awaited, None if nothing changes."""
    manifest, awaited = member.manifest, None
    if awaiting.since is not None:
        awaited = Awaited(version=awaiting.version, missing=awaiting.missing, since=awaiting.since)
    now, before = (each and (each.version, each.missing) for each in (awaited, manifest.awaited))
    same = now == before
    if dict(awaiting.offsets) == manifest.offsets and same and not awaiting.copies and member.committed == manifest:
        return None
    change = Change(action="wait", version=awaited.version if awaited else None, reason=commit_reason(awaiting))
    return manifest.after(awaited=awaited, **input_position(manifest, awaiting), change=change)


def _begin_waiting(member: Member, awaiting: Awaiting, others: str | None) -> Awaiting:
    """Return a source's answer with the version awaited, and since when. `others` is one that other members have."""
    if awaiting.idle and others is None:
        return awaiting
    before, version = member.manifest.awaited, awaiting.version or others
    since = before.since if before is not None and before.version == version else member.context.now()
    return replace(awaiting, version=version, idle=False, since=since)


def apply_delivery(
    candidate: CandidateVersion, rejected: CandidateVersion | None, *, switches: bool, between: bool
) -> Member:
    """Return the member after the commit of this delivery, with the outcome.

    `switches` makes the version current; otherwise `between` inserts it by time.
    """
    after = _apply_to_manifest(candidate, rejected, switches, between)
    member, ref = candidate.member.with_source_report(candidate.delivery).after_commit(after), after.ref(candidate.id)
    if ref is None:
        member = replace(member, unchanged=(*member.unchanged, str(candidate.unchanged)))
    elif ref.state == "rejected":
        member = replace(member, rejected=(*member.rejected, candidate.id))
    else:
        built = dict(candidate.version.counters) if candidate.version else {}
        member = replace(
            member,
            sealed=(*member.sealed, candidate.id),
            unserved=(*member.unserved, *(() if after.head == candidate.id else (candidate.id,))),
            counters=sum_counters(dict(member.counters), built),
        )
    return replace(member, warnings=(*member.warnings, *candidate.warnings), last_built=candidate.version)


def _apply_to_manifest(
    candidate: CandidateVersion, rejected: CandidateVersion | None, switches: bool, between: bool
) -> BoundedManifest:
    """Return the manifest with this delivery: published, rejected because of `rejected`, or unchanged."""
    manifest, delivery, version = candidate.member.manifest, candidate.delivery, candidate.version
    unchanged = candidate.unchanged if rejected is None else None
    ref = _version_ref(candidate, rejected)
    head = {"head": ref.id} if rejected is None and switches else {}
    # A repeated delivery of revoked content takes no name.
    freed = candidate.member.context.now() if rejected is not None and rejected.revoked else None
    done = Delivered(name=delivery.version, version=ref.id, markers=dict(delivery.markers), freed=freed)
    fields = {**input_position(manifest, delivery, done), **head, "awaited": None}
    if unchanged is None:
        used = [generation.id for generation in version.generations] if version is not None else []
        fields |= {
            "versions": (*manifest.versions, ref)
            if head or rejected
            else insert_unserved_version(manifest, ref, between=between),
            "next_number": candidate.number + 1,
            "next_generation": max([manifest.next_generation, *(number + 1 for number in used)]),
            "counters": sum_counters(manifest.counters, version.counters if version is not None else {}),
        }
    if rejected is not None:
        change = Change(action="reject", version=ref.id, reason=commit_reason(delivery, ref.reason))
        return manifest.after(**fields, change=change)
    action, note = "seal", "" if head else "sealed but not served: a later version stays current"
    if unchanged is not None:
        action, note = "unchanged", f"delivered as {delivery.version}"
    change = Change(action=action, version=ref.id, reason=commit_reason(delivery, note))
    return with_served_version(candidate.member.log, manifest, **fields, built=version, change=change)


def is_at_or_after_head(candidate: CandidateVersion) -> bool:
    """Whether a version does not come before the head, in the dataset's own order."""
    manifest = candidate.member.manifest
    head = manifest.ref(manifest.head) if manifest.head else None
    order = version_order(manifest)
    return head is None or bool(order(_version_ref(candidate, None)) >= order(head))


def _version_ref(candidate: CandidateVersion, rejected: CandidateVersion | None) -> VersionRef:
    """Return the manifest's entry of a version; for an unchanged one, that of the version that it equals."""
    if rejected is None and candidate.unchanged:
        same = candidate.member.manifest.ref(candidate.unchanged)
        assert same is not None, "the version that it equals was found in this manifest"
        return same
    version, reason = candidate.version, ""
    if rejected is not None:
        reason = rejected.problem
        if rejected.member.name != candidate.member.name:
            reason = f"member {rejected.member.name} of the version set rejected it: {reason}"
    return VersionRef(
        id=candidate.id,
        number=candidate.number,
        name=candidate.delivery.version,
        rows=None if version is None else version.rows,
        sealed_at=candidate.member.context.now() if version is None else version.sealed_at,
        state="sealed" if rejected is None else "rejected",
        document=candidate.document,
        folders=() if version is None else tuple(generation.folder for generation in version.generations),
        bytes=0 if version is None else sum(generation.size for generation in version.generations),
        reason=reason,
        verdicts=version.verdicts if rejected is not None and version is not None else (),
        valid_from=None if version is None else version.valid_from,
    )


def publish_candidates(
    group: AdvanceGroup, validated: Sequence[CandidateVersion], *, make_current: bool
) -> AdvanceGroup:
    """Commit these versions together: all published, or all rejected if one is. Return the group after it.

    The reported stages are "seal" and "switch", "keep" if the served version stays, "unchanged", or "reject".
    """
    rejected = next((candidate for candidate in validated if candidate.problem), None)
    first, version = validated[0].member, validated[0].delivery.version
    candidates = list(validated)
    if rejected is None:
        for at, candidate in enumerate(validated):
            if candidate.version is not None and not candidate.unchanged:
                with candidate.member.stages("seal", version):
                    candidates[at] = candidate.with_document()
    with first.stages("switch" if rejected is None else REJECT, version) as switching:
        if rejected is not None:
            candidates = [candidate.with_document() for candidate in validated]
        group = _commit_candidates(group, candidates, rejected, make_current=make_current)
        done = [candidate.with_member_of(group) for candidate in candidates]
        for candidate in done:
            candidate.delete_attempt(files=candidate.member.manifest.ref(candidate.id) is None)
        switching.detail = rejected.problem if rejected is not None else ""
        served = {now.id for candidate in done if (now := candidate.member.manifest.version) is not None}
        if rejected is None and all(candidate.unchanged for candidate in done):
            switching.name = "unchanged"
        elif rejected is None and served.isdisjoint(candidate.id for candidate in done):
            switching.name, switching.detail = "keep", "what is served stays"
    return group


def _commit_candidates(
    group: AdvanceGroup,
    candidates: Sequence[CandidateVersion],
    rejected: CandidateVersion | None,
    *,
    make_current: bool,
) -> AdvanceGroup:
    def commit(group: AdvanceGroup) -> AdvanceGroup:
        now = [candidate.with_member_of(group) for candidate in candidates]
        switches = make_current or all(map(is_at_or_after_head, now))
        between = all(member.manifest.declaration.by_time for member in group.members)
        after = (apply_delivery(candidate, rejected, switches=switches, between=between) for candidate in now)
        return group.commit_members(list(after))

    def catch_up(group: AdvanceGroup) -> AdvanceGroup:
        try:
            return rebase_candidates(group, candidates)
        except CommitConflictError:
            with suppress(AdjunctError):  # documents that remain are left to a discard
                store = group.members[0].context.lake.store
                store.delete_many([candidate.document for candidate in candidates if candidate.document is not None])
            raise

    return commit_with_rebase(group, commit, catch_up)
