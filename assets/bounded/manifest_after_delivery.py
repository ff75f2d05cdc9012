"""What a manifest becomes by a delivery: published, kept aside, or found to be what is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.bounded.place_in_input import copied, place_in_input, told_by
from dagster_adjunct.assets.declaration.discard_policy import natural_order
from dagster_adjunct.assets.versions.deliveries import FACTS_KEPT, NAMES_KEPT, Delivered
from dagster_adjunct.assets.versions.manifest import BoundedManifest, Change
from dagster_adjunct.assets.versions.operator_actions import serve
from dagster_adjunct.assets.versions.sealed_version import VersionRef
from dagster_adjunct.assets.writing.write_generation import add

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.build_candidate import Built


def after_delivery(built: Built, document: str | None, refused: Built | None, make_current: bool) -> BoundedManifest:
    """Return the manifest with this delivery: published, kept aside as `refused` says, or found unchanged."""
    manifest, delivery, version = built.member.manifest, built.delivery, built.version
    common = {
        **place_in_input(manifest, delivery),
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
            change=Change(action="unchanged", version=built.unchanged, reason=told_by(delivery, again)),
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
            **fresh, change=Change(action="reject", version=ref.id, reason=told_by(delivery, ref.reason))
        )
    head = {"head": ref.id} if _switches(manifest, ref, make_current) else {}
    beside = "" if head else "kept beside a later version"
    return serve(
        built.member.log, manifest, **fresh, **head, built=version,
        change=Change(action="seal", version=ref.id, reason=told_by(delivery, beside)),
    )  # fmt: skip


def _ref(built: Built, document: str | None, refused: Built | None) -> VersionRef:
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
        sealed_at=built.member.log.lake.now() if version is None else version.sealed_at,
        state="sealed" if refused is None else "rejected",
        document=document,
        folders=() if version is None else tuple(generation.folder for generation in version.generations),
        bytes=0 if version is None else sum(generation.size for generation in version.generations),
        reason=reason,
        verdicts=version.verdicts if refused is not None and version is not None else (),
        valid_from=None if version is None else version.valid_from,
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
    delivered = (*(earlier for earlier in before if not (earlier.freed and earlier.name == done.name)), done)
    older, newest = delivered[:-FACTS_KEPT], delivered[-FACTS_KEPT:]
    free = tuple(earlier for earlier in older if earlier.freed)
    names = tuple(earlier.name for earlier in older if not earlier.freed)
    return {"delivered": (*free, *newest), "known": (*manifest.known, *names)[-NAMES_KEPT:]}
