"""Selection of retained versions: by id, name or position, and the matching ones of a version set.

Members of a version set publish the versions of one name in one commit and serve them together. A member whose content
did not change holds the name under the version that it already had.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from dagster_adjunct.assets.declaration.policies import natural_sort_key
from dagster_adjunct.assets.versions.dataset_log import Members
from dagster_adjunct.assets.versions.manifest import BoundedManifest
from dagster_adjunct.assets.versions.version import VersionRef, version_number
from dagster_adjunct.resources.errors import DatasetError

_BEFORE_ALL = datetime.min.replace(tzinfo=UTC)


ID_PREFIX = re.compile(r"v\d{6,}(-[0-9a-f]*)?")
"""A prefix of a version's id with at least its whole number."""


def find_version(manifest: BoundedManifest, version: str) -> VersionRef | None:
    """Return the retained version of this id, or the newest one of this name, preferring sealed ones.

    A delivery whose content equalled the previous version is held by that one.
    """
    exact = manifest.ref(version)
    if exact is not None:
        return exact
    holders = [done.version for done in manifest.delivered if done.name == version]
    named = [ref for ref in manifest.versions if ref.name == version or ref.id in holders]
    return max(named, key=lambda ref: (ref.state == "sealed", ref.number), default=None)


def require_version(manifest: BoundedManifest, version: str, *, sealed: bool = False) -> VersionRef:
    """Return a retained version by id, name, or unique id prefix as shown on the command line.

    Raises DatasetError, naming the newest versions.
    """
    ref = find_version(manifest, version)
    if ref is None and ID_PREFIX.fullmatch(version):
        begun = [ref for ref in manifest.versions if ref.id.startswith(version)]
        if len(begun) > 1:
            problem = (
                f"dataset {manifest.name!r}: {version!r} is a prefix of several ids: "
                f"{', '.join(ref.id for ref in begun)}."
            )
            raise DatasetError(problem, "Give more digits.", dataset=manifest.name)
        ref = begun[0] if begun else None
    if ref is None:
        # Only an erasure gives a number a second id.
        number = version_number(version) if "-" in version else 0
        rewritten = next((ref for ref in manifest.versions if ref.number == number), None)
        if rewritten is not None:
            problem = f"dataset {manifest.name!r}: version {version} was rewritten by an erasure, as {rewritten.id}."
            step = "Open that one: it has the same entries without the erased ones."
            raise DatasetError(problem, step, dataset=manifest.name, version=version)
        listed = ", ".join(f"{ref.id} ({ref.name})" for ref in manifest.versions[-5:]) or "none"
        problem = f"dataset {manifest.name!r} has no version {version!r}; the newest retained are {listed}."
        step = f"See adjunct dataset versions {manifest.name}."
        raise DatasetError(problem, step, dataset=manifest.name, version=version)
    if sealed and ref.state != "sealed":
        raise DatasetError(
            f"dataset {manifest.name!r}: version {ref.id} is {ref.state} ({ref.reason}) and is not served.",
            "A rejected version can be accepted with a reason; a revoked one never comes back."
            if ref.state == "rejected"
            else "Choose another version: a revoked one never comes back.",
            dataset=manifest.name,
            version=ref.id,
        )
    return ref


def require_readable_version(manifest: BoundedManifest, version: str) -> VersionRef:
    """Return a retained version by id or name; raise DatasetError for a revoked one. Rejected ones can be read."""
    ref = require_version(manifest, version)
    return require_version(manifest, ref.id, sealed=True) if ref.state == "revoked" else ref


def find_previous_version(manifest: BoundedManifest, ref: VersionRef) -> VersionRef | None:
    """Return the sealed version before this one, in the dataset's own order."""
    order = version_order(manifest)
    before = [earlier for earlier in manifest.versions if earlier.state == "sealed" and order(earlier) < order(ref)]
    return max(before, key=order) if before else None


def version_order(manifest: BoundedManifest) -> Callable[[VersionRef], Any]:
    """Return the sort key of the dataset's versions: their valid-from time, arrival, or name.

    Versions of equal time are in the order of sealing; versions without a time come first.
    """
    if manifest.declaration.by_time:
        return lambda ref: (ref.valid_from or _BEFORE_ALL, ref.number)
    if manifest.declaration.order == "arrival":
        return lambda ref: ref.number
    return lambda ref: (natural_sort_key(ref.name or ""), ref.number)


def is_after_head(manifest: BoundedManifest, ref: VersionRef) -> bool:
    """Whether a version comes after the head, in the dataset's own order.

    In order of arrival, a version's place is its last delivery, under the newest of its names.
    """
    head = manifest.ref(manifest.head) if manifest.head else None
    if head is None:
        return True
    order = version_order(manifest)
    if manifest.declaration.by_time or manifest.declaration.order == "name":
        return bool(order(ref) > order(head))
    last = {done.version: at for at, done in enumerate(manifest.delivered)}
    return (last.get(ref.id, -1), ref.number) > (last.get(head.id, -1), head.number)


def list_delivered_names(manifest: BoundedManifest, ref: VersionRef) -> tuple[str, ...]:
    """Return the names under which a version was delivered, oldest first."""
    names = [done.name for done in manifest.delivered if done.version == ref.id]
    return tuple(dict.fromkeys([*([ref.name] if ref.name else []), *names]))


def resolve_versions(
    manifests: Members, dataset: str, version: str | None, *, sealed: bool = False, present: bool = False
) -> dict[str, VersionRef]:
    """Return the version to act on, and the matching ones of the other members of the version set.

    None means the version before the head. Raises DatasetError if a member no longer has such a version (with `present`
    the member is left out instead), or, with `sealed`, if one is not sealed.
    """
    mine = manifests[dataset]
    if version is None:
        before = _find_previous(manifests, dataset)
        if before is None:
            problem = f"dataset {mine.name!r} has no sealed version before {mine.head or 'the first'} any more."
            step = f"List them: adjunct dataset versions {mine.name}. The discard policy sets how many are kept."
            raise DatasetError(problem, step, dataset=mine.name)
        return before
    ref = require_version(mine, version, sealed=sealed)
    # Other members do not know the id; the newest of its names is the one that was served with it last.
    name = version if version != ref.id else (list_delivered_names(mine, ref) or (ref.id,))[-1]
    others = {member: m for member, m in manifests.items() if member != dataset}
    if present:
        refs = {member: find_version(m, name) for member, m in others.items()}
        return {dataset: ref, **{member: other for member, other in refs.items() if other is not None}}
    return {dataset: ref, **{member: require_version(m, name, sealed=sealed) for member, m in others.items()}}


def resolve_heads(
    manifests: Members, versions: Mapping[str, tuple[VersionRef, ...]], dataset: str
) -> dict[str, str | None]:
    """Return the new head of each member of a version set once `versions` are the retained ones.

    The head stays if it is still sealed. Otherwise all members go back, switch by switch, to what was served before. If
    that is no longer known, they go back to the previous sealed versions of one name, or all have none.
    """
    heads = {name: m.head for name, m in manifests.items()}
    sealed = {name: {ref.id for ref in refs if ref.state == "sealed"} for name, refs in versions.items()}
    if all(head is None or head in sealed[name] for name, head in heads.items()):
        return heads
    # Only for lookups: the served version does not match these lists.
    after = {name: m.model_copy(update={"versions": versions[name]}) for name, m in manifests.items()}
    at = _follow_switches_back(after, {name: m.ref(m.head or "") for name, m in after.items()})
    if all(ref is not None and ref.state == "sealed" for ref in at.values()):
        return {name: ref.id if ref else None for name, ref in at.items()}
    after = {name: m.model_copy(update={"head": ref.id if (ref := at[name]) else None}) for name, m in after.items()}
    before = _find_previous(after, dataset)
    return {name: before[name].id if before else None for name in manifests}


def _follow_switches_back(manifests: Members, heads: Mapping[str, VersionRef | None]) -> dict[str, VersionRef | None]:
    """Return the heads before, switch by switch, until all are sealed, or until no earlier switch is known.

    In a version set, a switch replaced the versions made under its name; other members kept theirs.
    """
    at, seen = dict(heads), list[Mapping[str, VersionRef | None]]()
    while not all(ref is not None and ref.state == "sealed" for ref in at.values()):
        seen.append(at)
        refs = {name: ref for name, ref in at.items() if ref is not None}
        if len(refs) < len(manifests):
            break
        names = [list_delivered_names(manifests[name], ref) for name, ref in refs.items()]
        switch = next((common for common in names[0] if all(common in others for others in names[1:])), None)
        back = {
            name: manifests[name].ref(ref.replaced or "") if ref.name == switch else ref for name, ref in refs.items()
        }
        if switch is None or None in back.values() or back in seen:
            break  # two versions that replaced each other, neither of which may be served
        at = back
    return at


def _find_previous(manifests: Members, dataset: str) -> dict[str, VersionRef] | None:
    """Return the sealed version before the served one; None without any.

    In a version set, these are the newest of one name, sealed in all members and different from the served ones.
    """
    mine = manifests[dataset]
    if len(manifests) == 1:
        head = mine.ref(mine.head or "")
        before = find_previous_version(mine, head) if head else None
        return {dataset: before} if before else None
    heads = {name: m.head for name, m in manifests.items()}
    names = [done.name for done in mine.delivered]
    if mine.declaration.by_time:
        order = version_order(mine)
        named_refs = [(name, ref) for name in names if (ref := find_version(mine, name)) is not None]
        names = [name for name, _ in sorted(named_refs, key=lambda named: order(named[1]))]

    def is_head(manifest: BoundedManifest, name: str) -> bool:
        ref = find_version(manifest, name)
        return ref is not None and ref.id == manifest.head

    # The name that all members, or else this one, serve now.
    by_all = [at for at, name in enumerate(names) if all(is_head(m, name) for m in manifests.values())]
    served = by_all or [at for at, name in enumerate(names) if is_head(mine, name)] or [len(names)]
    for name in reversed(names[: served[-1]]):
        refs = {member: find_version(m, name) for member, m in manifests.items()}
        sealed = {member: ref for member, ref in refs.items() if ref is not None and ref.state == "sealed"}
        if len(sealed) == len(manifests) and {member: ref.id for member, ref in sealed.items()} != heads:
            return sealed
    return None
