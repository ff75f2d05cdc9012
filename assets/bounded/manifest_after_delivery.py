"""What a dataset becomes by a delivery: what is committed of it, and what the advance tells."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.place_in_input import place_in_input, told_by
from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
from dagster_adjunct.assets.versions.choose_version import order_of
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.deliveries import Delivered
from dagster_adjunct.assets.versions.operator_actions import kept_beside_head, serve
from dagster_adjunct.assets.versions.sealed_version import VersionRef
from dagster_adjunct.assets.writing.write_generation import add

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.advancing_members import Member
    from dagster_adjunct.assets.bounded.built_version import Built


def after_delivery(built: Built, refused: Built | None, *, switches: bool, between: bool) -> Member:
    """Return the member as it stands once this delivery is committed, with what came of it.

    `switches` says whether it becomes what readers get, and `between` whether it takes a place by time else.
    """
    after = _manifest(built, refused, switches, between)
    outcome, ref = built.member.outcome.heard(built.delivery), after.ref(built.id)
    if ref is None:
        outcome = replace(outcome, unchanged=(*outcome.unchanged, str(built.unchanged)))
    elif ref.state == "rejected":
        outcome = replace(outcome, rejected=(*outcome.rejected, built.id))
    else:
        outcome = replace(outcome, sealed=(*outcome.sealed, built.id))
        outcome = outcome.counted(built.version.counters if built.version else {})
        kept = () if after.head == built.id else (built.id,)
        outcome = replace(outcome, kept=(*outcome.kept, *kept))
    outcome = replace(
        outcome,
        warnings=(*outcome.warnings, *built.warnings),
        taken_in=outcome.taken_in + 1,
        looked_at=built.version,
    )
    return replace(built.member.at(after), outcome=outcome)


def _manifest(built: Built, refused: Built | None, switches: bool, between: bool) -> BoundedManifest:
    """Return the manifest with this delivery: published, kept aside as `refused` says, or found unchanged."""
    manifest, delivery, version = built.member.manifest, built.delivery, built.version
    unchanged = built.unchanged if refused is None else None
    ref = _ref(built, refused)
    head = {"head": ref.id} if refused is None and switches else {}
    # What was withdrawn and came again as it was takes no name.
    freed = built.member.context.now() if refused is not None and refused.withdrawn else None
    done = Delivered(name=delivery.version, version=ref.id, markers=dict(delivery.markers), freed=freed)
    fields = {**place_in_input(manifest, delivery, done), **head, "awaited": None}
    if unchanged is None:
        used = [generation.id for generation in version.generations] if version is not None else []
        fields |= {
            "versions": (*manifest.versions, ref)
            if head or refused
            else kept_beside_head(manifest, ref, between=between),
            "next_number": built.number + 1,
            "next_generation": max([manifest.next_generation, *(number + 1 for number in used)]),
            "counters": add(manifest.counters, version.counters if version is not None else {}),
        }
    if refused is not None:
        change = Change(action="reject", version=ref.id, reason=told_by(delivery, ref.reason))
        return manifest.after(**fields, change=change)
    action, told = "seal", "" if head else "kept beside a later version"
    if unchanged is not None:
        action, told = "unchanged", f"delivered as {delivery.version}"
    change = Change(action=action, version=ref.id, reason=told_by(delivery, told))
    return serve(built.member.log, manifest, **fields, built=version, change=change)


def switches_to(built: Built) -> bool:
    """Whether a version becomes the one that readers get: never by itself an older one, in the dataset's order."""
    manifest = built.member.manifest
    head = manifest.ref(manifest.head) if manifest.head else None
    order = order_of(manifest)
    return head is None or bool(order(_ref(built, None)) >= order(head))


def _ref(built: Built, refused: Built | None) -> VersionRef:
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
