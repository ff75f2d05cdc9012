"""Operator actions on versions: pin, unpin, roll back, revoke, accept, remove. Each is one commit.

An action is decided from the manifests alone and decided again if another writer commits first. In
a version set it moves all members to the version of the same name in the same commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dagster_adjunct.assets.declaration.policies import natural_sort_key
from dagster_adjunct.assets.versions.dataset_log import DatasetLog, Manifests, Members
from dagster_adjunct.assets.versions.manifest import (
    BoundedManifest,
    Change,
    DatasetManifest,
    Delivered,
    Pin,
    as_bounded,
)
from dagster_adjunct.assets.versions.version import SealedVersion, VersionRef, version_number
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.validation import validated_methods


@dataclass(frozen=True, slots=True)
class HistoryEntry(Report):
    """One commit of a dataset: the action, its version, who, when and why, and the version served
    after it.

    `readable` tells whether that version is retained.
    """

    number: int
    at: datetime
    by: str
    action: str
    version: str | None
    reason: str
    served: str | None
    readable: bool = False


@validated_methods
class VersionActions:
    """What operators do with the versions of a dataset. The history keeps the `reason` of each
    change and its author.

    A version is given by its id or its name.
    """

    def __init__(self, log: DatasetLog) -> None:
        self._log = log

    def pin(
        self, version: str, *, reason: str, by: str, expires_at: datetime | None = None
    ) -> BoundedManifest:
        """Serve this version, even when newer ones are sealed, until `unpin` or the first
        advance after expiry.
        """
        log = self._log
        require_audit_fields("pin", version, reason, by)
        if expires_at is not None and (expires_at.tzinfo is None or expires_at <= log.lake.now()):
            why = (
                f"has passed: it is {log.lake.now():%Y-%m-%d %H:%M:%S} UTC"
                if expires_at.tzinfo
                else "has no time zone"
            )
            problem = f"a pin of {log.name!r} expires at {expires_at}, which {why}."
            step = (
                "Pass a later time such as datetime(…, tzinfo=UTC), or None for a pin that lasts"
                " until unpin."
            )
            raise ConfigurationError(problem, step, argument="expires_at")

        def pin(manifest: BoundedManifest, ref: VersionRef) -> BoundedManifest:
            pinned = Pin(
                version=ref.id, reason=reason, by=by, at=log.lake.now(), expires_at=expires_at
            )
            return with_served_version(
                log,
                manifest,
                pin=pinned,
                change=Change(action="pin", version=ref.id, reason=reason),
            )

        return _change_each_member(log, version, pin, by=by)

    def unpin(self, *, reason: str, by: str) -> BoundedManifest:
        """Remove the pin, so that the version of the last switch is served again. Does nothing
        without a pin.
        """
        log = self._log
        require_audit_fields("unpin", "", reason, by)

        def unpin(manifests: Members) -> Members | None:
            return {
                name: _without_pin(log, m, reason)
                for name, m in manifests.items()
                if m.pin is not None
            } or None

        return log.transact_versions(unpin, by=by)

    def rollback(self, to: str | None = None, *, reason: str, by: str) -> BoundedManifest:
        """Serve an earlier version (None: the previous sealed one) until the next version is
        sealed.
        """
        log = self._log
        require_audit_fields("rollback", to or "", reason, by)

        def back(manifest: BoundedManifest, ref: VersionRef) -> BoundedManifest:
            if manifest.pin is not None:
                raise DatasetError(
                    f"dataset {manifest.name!r} is pinned to {manifest.pin.version} by"
                    f" {manifest.pin.by} ({manifest.pin.reason}), so a rollback would change"
                    " nothing for readers.",
                    f"Unpin it first: adjunct dataset unpin {manifest.name} --reason ….",
                    dataset=manifest.name,
                )
            return with_served_version(
                log,
                manifest,
                back_to=ref.id,
                change=Change(action="rollback", version=ref.id, reason=reason),
            )

        return _change_each_member(log, to, back, by=by)

    def revoke(self, version: str, *, reason: str, by: str) -> BoundedManifest:
        """Never serve this version again. The version that it replaced is served instead; a pin to
        it ends.

        The version that it replaced is the one that was current before the switch to it; rollbacks
        do not count (see `resolve_heads`). Where versions are ordered by time, that one may have
        arrived later and be valid from earlier. In a version set, another member revokes its
        version of this name only if it was delivered under no other name. The name becomes free: it
        can be delivered again with other content.
        """
        log = self._log
        require_audit_fields("revoke", version, reason, by)

        def revoke(manifests: Members) -> Members | None:
            chosen = resolve_versions(manifests, log.name, version, present=True)
            revoked = {
                name: ref.model_copy(update={"state": "revoked", "reason": f"{reason} (by {by})"})
                for name, ref in chosen.items()
                if ref.state != "revoked"
                and (name == log.name or len(list_delivered_names(manifests[name], ref)) < 2)
            }
            versions = {name: _replace_ref(m, revoked.get(name)) for name, m in manifests.items()}
            heads = resolve_heads(manifests, versions, log.name)
            unpinned = any(
                m.pin is not None and name in revoked and m.pin.version == revoked[name].id
                for name, m in manifests.items()
            )
            names = (
                list_delivered_names(manifests[log.name], chosen[log.name])
                if log.name in revoked
                else ()
            )
            freed = {
                name: _free_names(m, revoked.get(name), names, log.lake.now())
                for name, m in manifests.items()
            }
            after = {
                name: with_served_version(
                    log,
                    m,
                    versions=versions[name],
                    back_to=heads[name],
                    pin=None if unpinned else m.pin,
                    change=Change(
                        action="revoke",
                        version=chosen[name].id if name in chosen else None,
                        reason=reason,
                    ),
                    **freed[name],
                )
                for name, m in manifests.items()
                if name in revoked
                or heads[name] != m.head
                or (unpinned and m.pin is not None)
                or freed[name]
            }
            return after or None

        return log.transact_versions(revoke, by=by)

    def accept(
        self, version: str, *, reason: str, by: str, make_current: bool = False
    ) -> BoundedManifest:
        """Publish a rejected version; `by` and `reason` are recorded.

        A version that does not come after the current one is retained without being served, unless
        `make_current` is set; `describe_unserved_version` of the returned manifest says so. In a
        version set this holds for all members.
        """
        log = self._log
        require_audit_fields("accept", version, reason, by)

        def accept(manifests: Members) -> Members:
            chosen = resolve_versions(manifests, log.name, version)
            after = dict[str, BoundedManifest]()
            switches = make_current or all(
                is_after_head(manifests[name], ref) for name, ref in chosen.items()
            )
            between = all(manifest.declaration.by_time for manifest in manifests.values())
            for name, ref in chosen.items():
                if ref.state != "rejected":
                    problem = (
                        f"dataset {name!r}: version {ref.id} is {ref.state}, and only a rejected"
                        " one can be accepted."
                    )
                    step = (
                        f"List them: adjunct dataset versions {name}. An older sealed one: use"
                        " rollback."
                    )
                    raise DatasetError(problem, step, dataset=name, version=ref.id)
                manifest = manifests[name]
                DatasetLog(log.lake, name).read_version(
                    ref
                )  # raises for a version that was never built
                accepted = ref.model_copy(
                    update={"state": "sealed", "reason": f"accepted by {by}: {reason}"}
                )
                if switches:
                    changes = {"versions": _replace_ref(manifest, accepted), "head": ref.id}
                    why = reason
                else:
                    changes = {
                        "versions": insert_unserved_version(manifest, accepted, between=between)
                    }
                    why = f"{reason} (sealed but not served: {manifest.head} stays current)"
                change = Change(action="accept", version=ref.id, reason=why)
                after[name] = with_served_version(log, manifest, **changes, change=change)
            return after

        return log.transact_versions(accept, by=by)

    def remove_version(self, version: str, *, reason: str, by: str) -> BoundedManifest:
        """Remove a rejected or revoked version from the manifest; the next discard deletes its
        files.
        """
        log = self._log
        require_audit_fields("remove-version", version, reason, by)

        def drop(manifests: Members) -> Members | None:
            chosen = resolve_versions(manifests, log.name, version, present=True)
            ref = chosen[log.name]
            if ref.state == "sealed":
                problem = (
                    f"dataset {log.name!r}: version {ref.id} is sealed; only rejected and revoked"
                    " ones are dropped."
                )
                step = (
                    "Revoke it first if it must not be served; the discard policy removes other"
                    " sealed versions."
                )
                raise DatasetError(problem, step, dataset=log.name, version=ref.id)
            return {
                name: _without_ref(manifests[name], ref, reason)
                for name, ref in chosen.items()
                if ref.state != "sealed"
            }

        return log.transact_versions(drop, by=by)


def expire_pin(log: DatasetLog, manifest: DatasetManifest, now: datetime) -> DatasetManifest:
    """Return the manifest without its pin if the pin has expired, else the manifest itself;
    commits nothing.
    """
    expired = manifest.pin is not None and manifest.pin.has_expired(now)
    return _without_pin(log, as_bounded(manifest), "expired") if expired else manifest


def expire_pins(log: DatasetLog, manifests: Manifests, now: datetime, *, by: str) -> bool:
    """Remove expired pins of all members of a version set in one commit; return whether there were
    any.

    `manifests` are those read last: if none has an expired pin, no request is made.
    """
    if not any(
        manifest.pin is not None and manifest.pin.has_expired(now)
        for manifest in manifests.values()
    ):
        return False

    def expire(fresh: Manifests) -> Manifests | None:
        after = {name: expire_pin(log, m, now) for name, m in fresh.items()}
        return {name: m for name, m in after.items() if m is not fresh[name]} or None

    log.transact_all(expire, by=by)
    return True


def describe_unserved_version(after: BoundedManifest) -> str:
    """Return why an accepted version is not served, with the next step; "" if the last change
    was anything else.
    """
    change = after.change
    if change is None or change.action != "accept" or change.version in (None, after.head):
        return ""
    accepted = after.ref(change.version)
    return "" if accepted is None else describe_unserved(after, accepted)


def describe_unserved(manifest: BoundedManifest, ref: VersionRef) -> str:
    """Return a note on a sealed version that comes before the current one, with how to serve it."""

    def describe(ref: VersionRef) -> str:
        return f"{ref.name!r}" + (
            f" (valid from {ref.valid_from:%Y-%m-%d %H:%M:%S} UTC)" if ref.valid_from else ""
        )

    head = manifest.ref(manifest.head or "")
    why = (
        f"{describe(head)} comes after it and stays current"
        if head
        else "its version set stays at a later one"
    )
    return (
        f"version {describe(ref)} is sealed but not served: {why}. "
        f"To serve it: adjunct dataset rollback {manifest.name} {ref.id} --reason …"
    )


def with_served_version(
    log: DatasetLog, manifest: BoundedManifest, **changes: Any
) -> BoundedManifest:
    """Return the manifest with these changes and with the version that its pin and head then
    select.

    `head` is a switch: the version records what it replaces. `back_to` moves the head back and
    records nothing. `built` is a version that was just built, whose document then need not be read.
    """
    if "back_to" in changes:
        changes["head"] = changes.pop("back_to")
    elif changes.get("head", manifest.head) != manifest.head:
        changes["versions"] = tuple(
            ref.model_copy(update={"replaced": manifest.head}) if ref.id == changes["head"] else ref
            for ref in changes.get("versions", manifest.versions)
        )
    pin: Pin | None = changes.get("pin", manifest.pin)
    wanted: str | None = pin.version if pin is not None else changes.get("head", manifest.head)
    known: tuple[SealedVersion | None, ...] = (manifest.version, changes.pop("built", None))
    version = next(
        (version for version in known if version is not None and version.id == wanted), None
    )
    if version is None and wanted is not None:
        refs = changes.get("versions", manifest.versions)
        version = DatasetLog(log.lake, manifest.name).read_version(
            next(ref for ref in refs if ref.id == wanted)
        )
    return manifest.after(version=version, **changes)


def insert_unserved_version(
    manifest: BoundedManifest, new: VersionRef, *, between: bool
) -> tuple[VersionRef, ...]:
    """Return the retained versions with a new sealed one that does not become current.

    With `between` it is inserted by time into the chain of replaced versions: it is served once
    every version valid after it is revoked. That requires that all members of the version set order
    versions by time.
    """
    versions = [ref for ref in manifest.versions if ref.id != new.id]
    head = manifest.ref(manifest.head or "")
    order = version_order(manifest)
    if between and head is not None and order(new) < order(head):
        later = head
        before = manifest.ref(head.replaced or "")
        while before is not None and order(new) < order(before) < order(later):
            later = before
            before = manifest.ref(before.replaced or "")
        new = new.model_copy(update={"replaced": later.replaced})
        later = later.model_copy(update={"replaced": new.id})
        versions = [later if ref.id == later.id else ref for ref in versions]
    return tuple(sorted([*versions, new], key=lambda ref: ref.number))


def _change_each_member(
    log: DatasetLog,
    version: str | None,
    change: Callable[[BoundedManifest, VersionRef], BoundedManifest],
    *,
    by: str,
) -> BoundedManifest:
    """Commit a change of this sealed version (None: the one before the head), in all members of the
    version set.

    Other members change their version of the same name. `change` returns the same manifest if there
    is nothing to do.
    """

    def change_all(manifests: Members) -> Members | None:
        chosen = resolve_versions(manifests, log.name, version, sealed=True)
        after = {name: change(manifests[name], ref) for name, ref in chosen.items()}
        return {name: m for name, m in after.items() if m is not manifests[name]} or None

    return log.transact_versions(change_all, by=by)


def _without_pin(log: DatasetLog, manifest: BoundedManifest, reason: str) -> BoundedManifest:
    pinned = manifest.pin.version if manifest.pin else None
    return with_served_version(
        log, manifest, pin=None, change=Change(action="unpin", version=pinned, reason=reason)
    )


def _replace_ref(manifest: BoundedManifest, new: VersionRef | None) -> tuple[VersionRef, ...]:
    """Return the retained versions, with `new` in place of the one that has its id."""
    return tuple(new if new is not None and ref.id == new.id else ref for ref in manifest.versions)


def _without_ref(manifest: BoundedManifest, ref: VersionRef, reason: str) -> BoundedManifest:
    """Return the manifest without this version, whose files become doomed; the name of a
    rejected one becomes free.
    """
    kept = tuple(other for other in manifest.versions if other.id != ref.id)
    doomed = (*manifest.doomed, *ref.folders, *([ref.document] if ref.document else []))
    delivered = any(done.version == ref.id for done in manifest.delivered)
    freed = (
        _free_names(manifest, ref, () if delivered else (ref.name,), ref.sealed_at)
        if ref.state == "rejected"
        else {}
    )
    return manifest.after(
        versions=kept,
        doomed=doomed,
        **freed,
        change=Change(action="remove-version", version=ref.id, reason=reason),
    )


def _free_names(
    manifest: BoundedManifest, ref: VersionRef | None, names: Collection[str | None], at: datetime
) -> dict[str, Any]:
    """Return the fields of the manifest that change when names become free, so that they can be
    delivered again.

    These are the names under which `ref` was delivered, and `names`. `at` is the time since when
    they are free.
    """
    version = "" if ref is None else ref.id
    delivered = manifest.delivered
    free = [
        done
        for done in delivered
        if not done.freed and (done.version == version or done.name in names)
    ]
    # Delivered long ago: its markers are no longer recorded.
    past = [
        name
        for name in manifest.known
        if name in names and name not in {done.name for done in free}
    ]
    if not free and not past:
        return {}
    changed = tuple(
        done.model_copy(update={"freed": at}) if done in free else done for done in delivered
    )
    return {
        "known": tuple(name for name in manifest.known if name not in past),
        "delivered": (
            *(Delivered(name=name, version=version, markers={}, freed=at) for name in past),
            *changed,
        ),
    }


def require_audit_fields(action: str, version: str, reason: str, by: str, **about: Any) -> None:
    """Raise ConfigurationError for a change without a reason or an author; `about` are further
    fields of the error.
    """
    for argument, what, given in (("reason", "reason", reason), ("by", "author", by)):
        if not given.strip():
            problem = f"{action} {version} has no {what}.".replace("  ", " ")
            raise ConfigurationError(
                problem, "Pass reason=… and by=…: both are recorded.", argument=argument, **about
            )


_BEFORE_ALL = datetime.min.replace(tzinfo=UTC)


ID_PREFIX = re.compile(r"v\d{6,}(-[0-9a-f]*)?")
"""A prefix of a version's id with at least its whole number."""


def find_version(manifest: BoundedManifest, version: str) -> VersionRef | None:
    """Return the retained version of this id, or the newest one of this name, preferring sealed
    ones.

    If a delivery had the content of the previous version, its name is one of that version.
    """
    exact = manifest.ref(version)
    if exact is not None:
        return exact
    holders = [done.version for done in manifest.delivered if done.name == version]
    named = [ref for ref in manifest.versions if ref.name == version or ref.id in holders]
    return max(named, key=lambda ref: (ref.state == "sealed", ref.number), default=None)


def require_version(manifest: BoundedManifest, version: str, *, sealed: bool = False) -> VersionRef:
    """Return a retained version by id, name, or unique id prefix as shown on the command line.

    Raises DatasetError if there is none, or several; with `sealed`, also for a rejected or revoked
    one.
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
            problem = (
                f"dataset {manifest.name!r}: version {version} was rewritten by an erasure, as"
                f" {rewritten.id}."
            )
            step = "Open that one: it has the same entries without the erased ones."
            raise DatasetError(problem, step, dataset=manifest.name, version=version)
        listed = ", ".join(f"{ref.id} ({ref.name})" for ref in manifest.versions[-5:]) or "none"
        problem = (
            f"dataset {manifest.name!r} has no version {version!r}; the newest retained are"
            f" {listed}."
        )
        step = f"See adjunct dataset versions {manifest.name}."
        raise DatasetError(problem, step, dataset=manifest.name, version=version)
    if sealed and ref.state != "sealed":
        raise DatasetError(
            f"dataset {manifest.name!r}: version {ref.id} is {ref.state} ({ref.reason}) and is not"
            " served.",
            (
                "A rejected version can be accepted with a reason; a revoked one never comes back."
                if ref.state == "rejected"
                else "Choose another version: a revoked one never comes back."
            ),
            dataset=manifest.name,
            version=ref.id,
        )
    return ref


def require_readable_version(manifest: BoundedManifest, version: str) -> VersionRef:
    """Return a retained version by id or name; raise DatasetError for a revoked one. Rejected
    ones can be read.
    """
    ref = require_version(manifest, version)
    return require_version(manifest, ref.id, sealed=True) if ref.state == "revoked" else ref


def find_previous_version(manifest: BoundedManifest, ref: VersionRef) -> VersionRef | None:
    """Return the sealed version before this one, in the dataset's own order; None without one."""
    order = version_order(manifest)
    before = [
        earlier
        for earlier in manifest.versions
        if earlier.state == "sealed" and order(earlier) < order(ref)
    ]
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
    manifests: Members,
    dataset: str,
    version: str | None,
    *,
    sealed: bool = False,
    present: bool = False,
) -> dict[str, VersionRef]:
    """Return the version to act on, and the matching ones of the other members of the version set.

    None means the version before the head. Raises DatasetError if a member no longer has such a
    version (with `present` the member is left out instead), or, with `sealed`, if one is not
    sealed.
    """
    mine = manifests[dataset]
    if version is None:
        before = _find_previous(manifests, dataset)
        if before is None:
            problem = (
                f"dataset {mine.name!r} has no sealed version before {mine.head or 'the first'} any"
                " more."
            )
            step = (
                f"List them: adjunct dataset versions {mine.name}. The discard policy sets how many"
                " are kept."
            )
            raise DatasetError(problem, step, dataset=mine.name)
        return before
    ref = require_version(mine, version, sealed=sealed)
    # Other members do not know the id; the newest of its names is the one that was served with it
    # last.
    name = version if version != ref.id else (list_delivered_names(mine, ref) or (ref.id,))[-1]
    others = {member: m for member, m in manifests.items() if member != dataset}
    if present:
        refs = {member: find_version(m, name) for member, m in others.items()}
        return {
            dataset: ref,
            **{member: other for member, other in refs.items() if other is not None},
        }
    return {
        dataset: ref,
        **{member: require_version(m, name, sealed=sealed) for member, m in others.items()},
    }


def resolve_heads(
    manifests: Members, versions: Mapping[str, tuple[VersionRef, ...]], dataset: str
) -> dict[str, str | None]:
    """Return the new head of each member of a version set once `versions` are the retained ones.

    The head stays if it is still sealed. Otherwise all members go back, switch by switch, to what
    was served before. If that is no longer known, they go back to the previous sealed versions of
    one name, or all have none.
    """
    heads = {name: m.head for name, m in manifests.items()}
    sealed = {
        name: {ref.id for ref in refs if ref.state == "sealed"} for name, refs in versions.items()
    }
    if all(head is None or head in sealed[name] for name, head in heads.items()):
        return heads
    # Only for lookups: the served version does not match these lists.
    after = {
        name: m.model_copy(update={"versions": versions[name]}) for name, m in manifests.items()
    }
    at = _follow_switches_back(after, {name: m.ref(m.head or "") for name, m in after.items()})
    if all(ref is not None and ref.state == "sealed" for ref in at.values()):
        return {name: ref.id if ref else None for name, ref in at.items()}
    after = {
        name: m.model_copy(update={"head": ref.id if (ref := at[name]) else None})
        for name, m in after.items()
    }
    before = _find_previous(after, dataset)
    return {name: before[name].id if before else None for name in manifests}


def _follow_switches_back(
    manifests: Members, heads: Mapping[str, VersionRef | None]
) -> dict[str, VersionRef | None]:
    """Return the heads before these, going back switch by switch until all are sealed, or no
    earlier switch is known.

    In a version set, a switch replaced the versions made under its name; other members kept theirs.
    """
    at = dict(heads)
    seen = list[Mapping[str, VersionRef | None]]()
    while not all(ref is not None and ref.state == "sealed" for ref in at.values()):
        seen.append(at)
        refs = {name: ref for name, ref in at.items() if ref is not None}
        if len(refs) < len(manifests):
            break
        names = [list_delivered_names(manifests[name], ref) for name, ref in refs.items()]
        switch = next(
            (common for common in names[0] if all(common in others for others in names[1:])), None
        )
        back = {
            name: manifests[name].ref(ref.replaced or "") if ref.name == switch else ref
            for name, ref in refs.items()
        }
        if switch is None or None in back.values() or back in seen:
            break  # two versions that replaced each other, neither of which may be served
        at = back
    return at


def _find_previous(manifests: Members, dataset: str) -> dict[str, VersionRef] | None:
    """Return the sealed version before the served one; None without any.

    In a version set, these are the newest of one name, sealed in all members and different from the
    served ones.
    """
    mine = manifests[dataset]
    if len(manifests) == 1:
        head = mine.ref(mine.head or "")
        before = find_previous_version(mine, head) if head else None
        return {dataset: before} if before else None
    heads = {member: manifest.head for member, manifest in manifests.items()}
    names = _names_in_order(mine)
    for name in reversed(names[: _served_place(names, manifests, mine)]):
        sealed = _find_sealed(manifests, name)
        if len(sealed) < len(manifests):
            continue
        if {member: ref.id for member, ref in sealed.items()} != heads:
            return sealed
    return None


def _names_in_order(manifest: BoundedManifest) -> list[str]:
    """Return the names of delivered versions, oldest first; by time if the dataset is."""
    names = [done.name for done in manifest.delivered]
    if not manifest.declaration.by_time:
        return names
    order = version_order(manifest)
    refs = {name: find_version(manifest, name) for name in names}
    known = [(order(ref), name) for name, ref in refs.items() if ref is not None]
    return [name for _, name in sorted(known, key=lambda place: place[0])]


def _served_place(names: Sequence[str], manifests: Members, mine: BoundedManifest) -> int:
    """Return the place of the name that all members serve, or else this one; the end if none is."""
    by_all = [at for at, name in enumerate(names) if _is_served(manifests.values(), name)]
    if by_all:
        return by_all[-1]
    here = [at for at, name in enumerate(names) if _is_served([mine], name)]
    return here[-1] if here else len(names)


def _is_served(manifests: Iterable[BoundedManifest], name: str) -> bool:
    """Whether all of these datasets serve the version of this name."""
    for manifest in manifests:
        ref = find_version(manifest, name)
        if ref is None or ref.id != manifest.head:
            return False
    return True


def _find_sealed(manifests: Members, name: str) -> dict[str, VersionRef]:
    """Return the version of this name in each member that has it sealed."""
    sealed: dict[str, VersionRef] = {}
    for member, manifest in manifests.items():
        ref = find_version(manifest, name)
        if ref is not None and ref.state == "sealed":
            sealed[member] = ref
    return sealed
