"""What a dataset becomes by a delivery: what is committed of it, and what the advance tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.sources.version_source import Awaiting
from dagster_adjunct.assets.versions.actions import insert_beside_head, with_served_version
from dagster_adjunct.assets.versions.deliveries import MAX_DELIVERIES, MAX_NAMES, Awaited, Delivered
from dagster_adjunct.assets.versions.manifest import BoundedManifest, Change, as_bounded
from dagster_adjunct.assets.versions.reports import REJECT
from dagster_adjunct.assets.versions.selection import version_order
from dagster_adjunct.assets.versions.version import VersionRef
from dagster_adjunct.assets.writing.generation import sum_counters
from dagster_adjunct.resources.errors import AdjunctError, CommitConflictError
from dagster_adjunct.resources.objects.commit_log import commit_with_rebase

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.advance import PollResult
    from dagster_adjunct.assets.bounded.candidate import AdvanceGroup, CandidateVersion, Member
    from dagster_adjunct.assets.sources.version_source import Delivery
    from dagster_adjunct.assets.versions.dataset_log import Members
    from dagster_adjunct.resources.objects.commit_log import Commit


def rebase_candidates(unit: AdvanceGroup, built: Sequence[CandidateVersion]) -> AdvanceGroup:
    """Return the unit after what others committed meanwhile. Raises CommitConflictError where a build is lost by it."""
    commit, manifests = _read_manifests(unit)
    for candidate in (candidate.with_member_of(unit) for candidate in built):
        now = manifests.get(candidate.member.name)
        if now is None and candidate.member.committed is None:
            continue  # of a version set in which only others have advanced yet
        what = "discarded this build" if now is None else _find_conflict(candidate, now)
        if what:
            if now is not None and candidate.is_unreferenced(now):
                candidate.delete_attempt(files=True)
            raise candidate.conflict_error(what)
    return _with_manifests(unit, commit, manifests)


def _find_conflict(built: CandidateVersion, now: BoundedManifest) -> str:
    """Return what others did by which a build is lost, "" where nothing."""
    before = built.member.manifest
    if built.folder in now.doomed:
        return "discarded this build"
    if _has_new_delivery(before, now):
        return "took in the same delivery"
    if built.document is None and built.unchanged:
        held = now.ref(built.unchanged)
        same = before.head == now.head and held is not None and held.state == "sealed"
        return "" if same else "changed what is current, to which this version was equal"
    # Looked at after this manifest was read: a discard that has ended leaves no name of the doomed.
    if built.document is not None and (built.document in now.doomed or not built.is_stored()):
        return "discarded this build"
    return ""


def rebase_waiting(unit: AdvanceGroup) -> AdvanceGroup | None:
    """Return the unit after what others committed meanwhile; None where they took in a delivery."""
    commit, manifests = _read_manifests(unit)
    for member in unit.members:
        before, now = member.committed, manifests.get(member.name)
        if (before is None) != (now is None) or (before and now and _has_new_delivery(before, now)):
            return None
    return _with_manifests(unit, commit, manifests)


def _read_manifests(unit: AdvanceGroup) -> tuple[Commit | None, Members]:
    commit, manifests = unit.members[0].log.read_all()
    return commit, {name: as_bounded(manifest) for name, manifest in manifests.items()}


def _with_manifests(unit: AdvanceGroup, commit: Commit | None, manifests: Members) -> AdvanceGroup:
    """Let all members go on from these: what one commits later must not undo what others did to it meanwhile."""
    members = tuple(
        replace(member, committed=now, manifest=now.with_declared_policies(member.source.declaration))
        if (now := manifests.get(member.name)) is not None
        else member
        for member in unit.members
    )
    return replace(unit, commit=commit, members=members)


def _has_new_delivery(before: BoundedManifest, now: BoundedManifest) -> bool:
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


def input_position(
    manifest: BoundedManifest, answer: Delivery | Awaiting, done: Delivered | None = None
) -> dict[str, object]:
    """Return where the dataset stands in its input after this, what retention took before it, and what was delivered.

    `done` is the delivery that this is, None where it is none.
    """
    delivered, known = _update_copied_markers(manifest, answer), manifest.known
    if done is not None:
        # A name that was freed is taken again. Those that still are free are remembered however old they are.
        delivered = (*(earlier for earlier in delivered if not (earlier.freed and earlier.name == done.name)), done)
        older, newest = delivered[:-MAX_DELIVERIES], delivered[-MAX_DELIVERIES:]
        delivered = (*(earlier for earlier in older if earlier.freed), *newest)
        known = (*known, *(earlier.name for earlier in older if not earlier.freed))[-MAX_NAMES:]
    return {
        "offsets": dict(answer.offsets),
        "stream": answer.stream or manifest.stream,
        "lost": (*manifest.lost, *([answer.lost] if answer.lost is not None else []))[-MAX_DELIVERIES:],
        "delivered": delivered,
        "known": known,
    }


def _update_copied_markers(manifest: BoundedManifest, answer: Delivery | Awaiting) -> tuple[Delivered, ...]:
    """Return the deliveries on record, with what the markers are now of those that lie there anew, unchanged."""
    newest = {done.name: done for done in manifest.delivered}
    return tuple(
        done.model_copy(update={"markers": dict(answer.copies[done.name])})
        if done.name in answer.copies and done is newest[done.name]
        else done
        for done in manifest.delivered
    )


def commit_reason(answer: Delivery | Awaiting, *more: str) -> str:
    """Return what a commit says of what the source told, after `more`."""
    lost = answer.lost.summary() if answer.lost is not None else ""
    return "; ".join(filter(None, (*more, lost, *answer.notes)))


_TRIES = 20
Wait = tuple[Awaiting, Awaited | None]
"""What a source answered, and what is remembered of it: for which version, and since when."""


def commit_waiting(unit: AdvanceGroup, answers: PollResult) -> AdvanceGroup:
    """Return the unit with what it waits for, which is committed; nothing new makes no commit."""
    begun = next((delivery.version for delivery in answers.complete.values()), None)
    waiting = [(member, answers.waiting[member.name]) for member in unit.members if member.name in answers.waiting]
    waits = {member.name: (answer, _awaited_version(member, answer, begun)) for member, answer in waiting}
    return _with_wait_reports(_commit_waits(unit, waits), answers, waits, begun)


def commit_initial(unit: AdvanceGroup) -> AdvanceGroup:
    """Commit every member, for without a commit the version that stands in its way can't be abandoned."""
    return _commit_waits(unit, {})


def _commit_waits(unit: AdvanceGroup, waits: Mapping[str, Wait]) -> AdvanceGroup:
    """Commit what waiting has found, and of members without a commit where they begin; return what stands then."""

    def commit(unit: AdvanceGroup) -> AdvanceGroup:
        members = []
        for member in unit.members:
            answer, awaited = waits.get(member.name, (None, member.manifest.awaited))
            if answer is None and member.committed is None:
                answer = Awaiting(None, (), member.manifest.offsets)
            after = None if answer is None else _waiting_manifest(member, answer, awaited)
            if after is not None:
                members.append(member.after_commit(after))
        return unit.commit_members(members) if members else unit

    return commit_with_rebase(unit, commit, rebase_waiting, attempts=_TRIES)


def _with_wait_reports(
    unit: AdvanceGroup, answers: PollResult, waits: Mapping[str, Wait], begun: str | None
) -> AdvanceGroup:
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
            members.append(replace(member, outcome=member.outcome.with_source_report(answer), awaiting=awaiting))
    return replace(unit, members=tuple(members))


def _waiting_manifest(member: Member, awaiting: Awaiting, awaited: Awaited | None) -> BoundedManifest | None:
    """Return the manifest that says what is waited for, None where it says so already."""
    manifest = member.manifest
    same = awaited == manifest.awaited or (
        awaited is not None
        and manifest.awaited is not None
        and (awaited.version, awaited.missing) == (manifest.awaited.version, manifest.awaited.missing)
    )
    if dict(awaiting.offsets) == manifest.offsets and same and not awaiting.copies and member.committed == manifest:
        return None
    change = Change(action="wait", version=awaited.version if awaited else None, reason=commit_reason(awaiting))
    return manifest.after(awaited=awaited, **input_position(manifest, awaiting), change=change)


def _awaited_version(member: Member, awaiting: Awaiting, others: str | None) -> Awaited | None:
    """Return what to remember of a wait: for which version, and since when. `others` have it whole in the set."""
    if awaiting.idle and others is None:
        return None
    before, version = member.manifest.awaited, awaiting.version or others
    since = before.since if before is not None and before.version == version else member.context.now()
    return Awaited(version=version, missing=awaiting.missing, since=since)


def apply_delivery(
    built: CandidateVersion, refused: CandidateVersion | None, *, switches: bool, between: bool
) -> Member:
    """Return the member as it stands once this delivery is committed, with what came of it.

    `switches` says whether it becomes what readers get, and `between` whether it takes a place by time else.
    """
    after = _apply_to_manifest(built, refused, switches, between)
    outcome, ref = built.member.outcome.with_source_report(built.delivery), after.ref(built.id)
    if ref is None:
        outcome = replace(outcome, unchanged=(*outcome.unchanged, str(built.unchanged)))
    elif ref.state == "rejected":
        outcome = replace(outcome, rejected=(*outcome.rejected, built.id))
    else:
        outcome = replace(outcome, sealed=(*outcome.sealed, built.id))
        outcome = outcome.with_counters(built.version.counters if built.version else {})
        kept = () if after.head == built.id else (built.id,)
        outcome = replace(outcome, kept=(*outcome.kept, *kept))
    outcome = replace(
        outcome,
        warnings=(*outcome.warnings, *built.warnings),
        delivery_count=outcome.delivery_count + 1,
        last_built=built.version,
    )
    return replace(built.member.after_commit(after), outcome=outcome)


def _apply_to_manifest(
    built: CandidateVersion, refused: CandidateVersion | None, switches: bool, between: bool
) -> BoundedManifest:
    """Return the manifest with this delivery: published, kept aside as `refused` says, or found unchanged."""
    manifest, delivery, version = built.member.manifest, built.delivery, built.version
    unchanged = built.unchanged if refused is None else None
    ref = _version_ref(built, refused)
    head = {"head": ref.id} if refused is None and switches else {}
    # What was withdrawn and came again as it was takes no name.
    freed = built.member.context.now() if refused is not None and refused.withdrawn else None
    done = Delivered(name=delivery.version, version=ref.id, markers=dict(delivery.markers), freed=freed)
    fields = {**input_position(manifest, delivery, done), **head, "awaited": None}
    if unchanged is None:
        used = [generation.id for generation in version.generations] if version is not None else []
        fields |= {
            "versions": (*manifest.versions, ref)
            if head or refused
            else insert_beside_head(manifest, ref, between=between),
            "next_number": built.number + 1,
            "next_generation": max([manifest.next_generation, *(number + 1 for number in used)]),
            "counters": sum_counters(manifest.counters, version.counters if version is not None else {}),
        }
    if refused is not None:
        change = Change(action="reject", version=ref.id, reason=commit_reason(delivery, ref.reason))
        return manifest.after(**fields, change=change)
    action, told = "seal", "" if head else "kept beside a later version"
    if unchanged is not None:
        action, told = "unchanged", f"delivered as {delivery.version}"
    change = Change(action=action, version=ref.id, reason=commit_reason(delivery, told))
    return with_served_version(built.member.log, manifest, **fields, built=version, change=change)


def is_at_or_after_head(built: CandidateVersion) -> bool:
    """Whether a version becomes the one that readers get: never by itself an older one, in the dataset's order."""
    manifest = built.member.manifest
    head = manifest.ref(manifest.head) if manifest.head else None
    order = version_order(manifest)
    return head is None or bool(order(_version_ref(built, None)) >= order(head))


def _version_ref(built: CandidateVersion, refused: CandidateVersion | None) -> VersionRef:
    """Return how a version is listed; of one that is unchanged, the one that it equals."""
    if refused is None and built.unchanged:
        same = built.member.manifest.ref(built.unchanged)
        assert same is not None, "the version that it equals was found in this manifest"
        return same
    version, reason = built.version, ""
    if refused is not None:
        reason = refused.problem
        if refused.member.name != built.member.name:
            reason = f"member {refused.member.name} of the version set refused it: {reason}"
    return VersionRef(
        id=built.id,
        number=built.number,
        name=built.delivery.version,
        rows=None if version is None else version.rows,
        sealed_at=built.member.context.now() if version is None else version.sealed_at,
        state="sealed" if refused is None else "rejected",
        document=built.document,
        folders=() if version is None else tuple(generation.folder for generation in version.generations),
        bytes=0 if version is None else sum(generation.size for generation in version.generations),
        reason=reason,
        verdicts=version.verdicts if refused is not None and version is not None else (),
        valid_from=None if version is None else version.valid_from,
    )


# The switch: one commit that makes versions current, or keeps them aside; repeated over changes that don't matter.
#
# A pin or a rollback that is committed during a long build does not cost the build: the same decision is made again
# on what is current then. Another writer that took in the same delivery does: CommitConflictError.


def publish_candidates(unit: AdvanceGroup, judged: Sequence[CandidateVersion], *, make_current: bool) -> AdvanceGroup:
    """Commit these versions together, and return what stands then: all published, or all kept aside if one is refused.

    The stages say which: "seal" and "switch", "keep" where what is served stays, "unchanged" or "reject".
    """
    refused = next((candidate for candidate in judged if candidate.problem), None)
    first, version = judged[0].member, judged[0].delivery.version
    built = [_write_document(candidate) for candidate in judged] if refused is None else judged
    with first.stages("switch" if refused is None else REJECT, version) as switching:
        if refused is not None:
            built = [candidate.with_document() for candidate in judged]
        unit = _commit_candidates(unit, built, refused, make_current=make_current)
        done = [candidate.with_member_of(unit) for candidate in built]
        for candidate in done:
            candidate.delete_attempt(files=candidate.member.manifest.ref(candidate.id) is None)
        switching.detail = refused.problem if refused is not None else ""
        if refused is None and all(candidate.unchanged for candidate in done):
            switching.name = "unchanged"
        elif refused is None and not any(candidate.is_served for candidate in done):
            switching.name, switching.detail = "keep", "what is served stays"
    return unit


def _write_document(built: CandidateVersion) -> CandidateVersion:
    """Return a version with what describes it written; one that is there already is described."""
    if built.version is None or built.unchanged:
        return built
    with built.member.stages("seal", built.delivery.version):
        return built.with_document()


def _commit_candidates(
    unit: AdvanceGroup, built: Sequence[CandidateVersion], refused: CandidateVersion | None, *, make_current: bool
) -> AdvanceGroup:
    def commit(unit: AdvanceGroup) -> AdvanceGroup:
        now = [candidate.with_member_of(unit) for candidate in built]
        switches = make_current or all(map(is_at_or_after_head, now))
        between = all(member.manifest.declaration.by_time for member in unit.members)
        after = (apply_delivery(candidate, refused, switches=switches, between=between) for candidate in now)
        return unit.commit_members(list(after))

    def catch_up(unit: AdvanceGroup) -> AdvanceGroup:
        try:
            return rebase_candidates(unit, built)
        except CommitConflictError:
            with suppress(AdjunctError):  # what stays is garbage for discarding
                store = unit.members[0].context.lake.store
                store.delete_many([candidate.document for candidate in built if candidate.document is not None])
            raise

    return commit_with_rebase(unit, commit, catch_up, attempts=_TRIES)
