"""The switch: one commit that makes versions current, or keeps them aside; repeated over changes that don't matter.

A pin or a rollback that is committed during a long build does not cost the build: the same decision is made again
on what is current then. Another writer that took in the same delivery does: CommitConflictError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.policies import natural_order
from dagster_adjunct.assets.versions.deliveries import FACTS_KEPT, NAMES_KEPT, Awaited, Delivered
from dagster_adjunct.assets.versions.manifest import BoundedManifest, Change, as_bounded
from dagster_adjunct.assets.versions.operator_actions import serve
from dagster_adjunct.assets.versions.report import REJECT
from dagster_adjunct.assets.versions.sealed_version import VersionRef
from dagster_adjunct.assets.writing.generation import add
from dagster_adjunct.resources.errors import AdjunctError, CommitConflictError

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.advance import Member
    from dagster_adjunct.assets.bounded.candidate import Built
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.delivery import Awaiting, Delivery
    from dagster_adjunct.assets.versions.log import Members
    from dagster_adjunct.resources.objects.commit import Commit

_TRIES = 20


def publish(
    commit: Commit | None, members: Sequence[Member], built: Sequence[Built], *, by: str, make_current: bool
) -> Commit:
    """Commit these versions together: all published, or all kept aside when one of them is refused.

    The stages say which: "seal" and "switch", "keep" where what is served stays, "unchanged" or "reject".
    """
    refused = next((each for each in built if each.problem), None)
    documents = {} if refused is not None else _sealed(built)
    first = built[0].member
    with first.stages("switch" if refused is None else REJECT, built[0].delivery.version) as switching:
        if refused is not None:
            documents = {each.id: each.member.log.write_version(each.version) for each in built if each.version}
        for tried in range(_TRIES):
            after = {
                each.member.spec.name: _after(each, documents.get(each.id), refused, make_current) for each in built
            }
            try:
                done = first.log.commit_all(commit, after, by=by)
                break
            except CommitConflictError:
                if tried + 1 == _TRIES:
                    raise
                try:
                    commit = _rebase(members, built, documents)
                except CommitConflictError:
                    with suppress(AdjunctError):  # what stays is garbage for discarding
                        first.log.lake.store.delete_many(documents.values())
                    raise
        for each in built:
            _note(each, after[each.member.spec.name])
        switching.detail = refused.problem if refused is not None else ""
        if refused is None and all(each.unchanged for each in built):
            switching.name = "unchanged"
        elif refused is None and not any(_is_served(each) for each in built):
            switching.name, switching.detail = "keep", "what is served stays"
    return done


def _sealed(built: Sequence[Built]) -> dict[str, str]:
    """Write what describes each version that is not there yet; return the objects by the versions' ids."""
    documents = {}
    for each in built:
        if each.version is not None and not each.unchanged:
            with each.member.stages("seal", each.delivery.version):
                documents[each.id] = each.member.log.write_version(each.version)
    return documents


def _is_served(built: Built) -> bool:
    served = built.member.manifest.version
    return served is not None and served.id == built.id


def leave(
    commit: Commit | None,
    members: Sequence[Member],
    member: Member,
    found: Awaiting,
    awaited: Awaited | None,
    *,
    by: str,
) -> Commit | None:
    """Commit what waiting has found: offsets behind what was dropped or lost, and which markers are missing.

    Also the first time, so that it stands where this dataset begins to read. Nothing new makes no commit.
    """
    for tried in range(_TRIES):
        after = _left(member, found, awaited)
        if after is None:
            return commit
        try:
            commit = member.log.commit(commit, after, by=by)
        except CommitConflictError:
            moved = _moved(members)
            if moved is None or tried + 1 == _TRIES:
                raise
            commit = moved
        else:
            member.manifest = member.committed = after
            return commit
    raise AssertionError("unreachable")


def declared(manifest: BoundedManifest, spec: AdjunctDataset) -> BoundedManifest:
    """Return the manifest with what may change in a declaration, order and policy, as it is declared now."""
    now = {
        "order": "arrival" if spec.versions is None else "name",
        "keep": spec.discard.keep,
        "grace_seconds": spec.discard.grace.total_seconds(),
    }
    declaration = manifest.declaration.model_copy(update=now)
    return manifest if declaration == manifest.declaration else manifest.after(declaration=declaration)


def heard(member: Member, found: Delivery | Awaiting) -> None:
    """Take what was told of a delivery into the member's report."""
    member.notes += found.notes
    member.lost += [found.lost] if found.lost is not None else []


def _left(member: Member, found: Awaiting, awaited: Awaited | None) -> BoundedManifest | None:
    """Return the manifest that says what is waited for, None where it says so already."""
    manifest = member.manifest
    same = awaited == manifest.awaited or (
        awaited is not None
        and manifest.awaited is not None
        and (awaited.version, awaited.missing) == (manifest.awaited.version, manifest.awaited.missing)
    )
    if dict(found.offsets) == manifest.offsets and same and not found.copies and member.committed == manifest:
        return None
    change = Change(action="wait", version=awaited.version if awaited else None, reason=_said(found))
    return manifest.after(awaited=awaited, delivered=copied(manifest, found), **_place(manifest, found), change=change)


def _place(manifest: BoundedManifest, found: Delivery | Awaiting) -> dict[str, object]:
    """Return where the dataset stands in its input after this, and what retention took before it."""
    return {
        "offsets": dict(found.offsets),
        "stream": found.stream or manifest.stream,
        "lost": (*manifest.lost, *([found.lost] if found.lost is not None else []))[-FACTS_KEPT:],
    }


def copied(manifest: BoundedManifest, found: Delivery | Awaiting) -> tuple[Delivered, ...]:
    """Return the deliveries on record, with what the markers are now of those that lie there anew, unchanged."""
    newest = {done.name: done for done in manifest.delivered}
    return tuple(
        done.model_copy(update={"markers": dict(found.copies[done.name])})
        if done.name in found.copies and done is newest[done.name]
        else done
        for done in manifest.delivered
    )


def _said(found: Delivery | Awaiting, *more: str) -> str:
    lost = found.lost.summary() if found.lost is not None else ""
    return "; ".join(filter(None, (*more, lost, *found.notes)))


def _after(built: Built, document: str | None, refused: Built | None, make_current: bool) -> BoundedManifest:
    manifest, delivery, version = built.member.manifest, built.delivery, built.version
    common = {
        **_place(manifest, delivery),
        "awaited": None,
        "counters": add(manifest.counters, version.counters if version else {}),
    }
    if built.unchanged and refused is None:
        held = manifest.ref(built.unchanged)
        head = {"head": held.id} if held is not None and _switches(manifest, held, make_current) else {}
        common["counters"] = manifest.counters
        again = f"delivered as {delivery.version}"
        return serve(
            built.member.log, manifest, **common, **head, **_delivered(manifest, built, built.unchanged),
            change=Change(action="unchanged", version=built.unchanged, reason=_said(delivery, again)),
        )  # fmt: skip
    ref = _ref(built, document, refused)
    fresh = {
        **common,
        **_delivered(manifest, built, ref.id),
        "versions": (*manifest.versions, ref),
        "next_number": built.number + 1,
    }
    if version is not None and version.generations:
        fresh["next_generation"] = max(manifest.next_generation, max(g.id for g in version.generations) + 1)
    if refused is not None:
        return manifest.after(
            **fresh, change=Change(action="reject", version=ref.id, reason=_said(delivery, ref.reason))
        )
    head = {"head": ref.id} if _switches(manifest, ref, make_current) else {}
    beside = "" if head else "kept beside a later version"
    return serve(
        built.member.log, manifest, **fresh, **head, built=version,
        change=Change(action="seal", version=ref.id, reason=_said(delivery, beside)),
    )  # fmt: skip


def _ref(built: Built, document: str | None, refused: Built | None) -> VersionRef:
    version, reason = built.version, ""
    if refused is not None:
        reason = refused.problem
        if refused is not built:
            reason = f"member {refused.member.spec.name} of the version set refused it: {reason}"
    return VersionRef(
        id=built.id,
        number=built.number,
        name=built.delivery.version,
        rows=None if version is None else version.rows,
        sealed_at=built.member.log.lake.now() if version is None else version.sealed_at,
        state="sealed" if refused is None else "rejected",
        document=document,
        folders=() if version is None else tuple(generation.folder for generation in version.generations),
        bytes=0 if version is None else sum(generation.size for generation in version.generations),
        reason=reason,
        verdicts=version.verdicts if refused is not None and version is not None else (),
    )


def _switches(manifest: BoundedManifest, new: VersionRef, make_current: bool) -> bool:
    """Whether a version becomes the one that readers get: never by itself an older one, in the dataset's order."""
    head = manifest.ref(manifest.head) if manifest.head else None
    if head is None or make_current:
        return True
    if manifest.declaration.order == "arrival":
        return new.number >= head.number or manifest.head == new.id
    return natural_order(new.name or "") >= natural_order(head.name or "")


def _delivered(manifest: BoundedManifest, built: Built, version: str) -> dict[str, object]:
    done = Delivered(name=built.delivery.version, version=version, markers=dict(built.delivery.markers))
    # A name that was freed is taken again. Those that still are free are remembered however old they are.
    before = copied(manifest, built.delivery)
    delivered = (*(each for each in before if not (each.freed and each.name == done.name)), done)
    older, newest = delivered[:-FACTS_KEPT], delivered[-FACTS_KEPT:]
    free = tuple(each for each in older if each.freed)
    names = tuple(each.name for each in older if not each.freed)
    return {"delivered": (*free, *newest), "known": (*manifest.known, *names)[-NAMES_KEPT:]}


def _rebase(members: Sequence[Member], built: Sequence[Built], documents: Mapping[str, str]) -> Commit | None:
    """Take over what others committed meanwhile, if it leaves these deliveries and builds as they were."""
    commit, manifests = _now(members)
    for each in built:
        before, now = each.member.manifest, manifests.get(each.member.spec.name)
        if now is None and each.member.committed is None:
            continue  # of a version set in which only others have advanced yet
        if now is None or each.folder in now.doomed:
            raise _lost(each, "discarded this build")
        if _took_in(before, now):
            _clear(each, now)
            raise _lost(each, "took in the same delivery")
        document = documents.get(each.id)
        if document is None and each.unchanged:
            held = now.ref(each.unchanged)
            if before.head != now.head or held is None or held.state != "sealed":
                raise _lost(each, "changed what is current, to which this version was equal")
        elif document is not None and not _is_stored(each, document, now):
            raise _lost(each, "discarded this build")
    _take_over(members, manifests)
    return commit


def _now(members: Sequence[Member]) -> tuple[Commit | None, Members]:
    commit, manifests = members[0].log.read_all()
    return commit, {name: as_bounded(manifest) for name, manifest in manifests.items()}


def _is_stored(built: Built, document: str, now: BoundedManifest) -> bool:
    """Whether a build is whole after this manifest was read: a discard that has ended leaves no name of the doomed."""
    return document not in now.doomed and built.member.log.lake.store.head(document) is not None and built.is_stored()


def _moved(members: Sequence[Member]) -> Commit | None:
    """Take over what others committed meanwhile, and return that; None where they took in a delivery."""
    commit, manifests = _now(members)
    for member in members:
        before, now = member.committed, manifests.get(member.spec.name)
        if (before is None) != (now is None) or (before and now and _took_in(before, now)):
            return None
    _take_over(members, manifests)
    return commit


def _take_over(members: Sequence[Member], manifests: Mapping[str, BoundedManifest]) -> None:
    """Let all members go on from these: what one commits later must not undo what others did to it meanwhile."""
    for member in members:
        now = manifests.get(member.spec.name)
        if now is not None:
            member.committed, member.manifest = now, declared(now, member.spec)


def _took_in(before: BoundedManifest, now: BoundedManifest) -> bool:
    """Whether something was delivered or abandoned in between. A drop, which frees a name, takes nothing in."""
    if (before.offsets, before.abandoned, before.next_number) != (now.offsets, now.abandoned, now.next_number):
        return True
    # Without the ids that hold the deliveries: an erasure gives versions others, and takes nothing in.
    known = [(done.name, done.markers) for done in before.delivered]
    for each in [(done.name, done.markers) for done in now.delivered if not done.freed]:
        if each not in known:
            return True
        known.remove(each)
    return False


def _lost(built: Built, what: str) -> CommitConflictError:
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


def _note(built: Built, after: BoundedManifest) -> None:
    member, delivery = built.member, built.delivery
    member.manifest = member.committed = after
    member.last = built
    heard(member, delivery)
    counters = {"redelivered": delivery.redelivered} if delivery.redelivered else {}
    ref = after.ref(built.id)
    if ref is None:
        member.unchanged.append(str(built.unchanged))
    elif ref.state == "rejected":
        member.rejected.append(built.id)
    else:
        member.sealed.append(built.id)
        counters = add(counters, built.version.counters if built.version else {})
    member.counters = add(member.counters, counters)
    built.forget_attempt(files=ref is None)
