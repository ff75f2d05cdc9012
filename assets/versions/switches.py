"""Operator actions on versions: pin, unpin, roll back, revoke, accept, remove. Each is one commit.

An action is decided from the manifests alone and decided again if another writer commits first. In
a version set it moves all members to the version of the same name in the same commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter, itemgetter
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
        now = log.lake.now()
        if expires_at is not None:
            self._check_expiry(expires_at, now)

        def pin(manifest: BoundedManifest, ref: VersionRef) -> BoundedManifest:
            pinned = Pin(version=ref.id, reason=reason, by=by, at=now, expires_at=expires_at)
            return manifest.model_copy(update={"pin": pinned})

        return _change_each_member(log, version, pin, Change(action="pin", reason=reason), by=by)

    def _check_expiry(self, expires_at: datetime, now: datetime) -> None:
        """Raise ConfigurationError unless a pin may expire at this time."""
        if expires_at.tzinfo is None:
            why = "has no time zone"
        elif expires_at <= now:
            why = f"has passed: it is {now:%Y-%m-%d %H:%M:%S} UTC"
        else:
            return
        raise ConfigurationError(
            f"a pin of {self._log.name!r} expires at {expires_at}, which {why}.",
            "Pass a later time such as datetime(…, tzinfo=UTC), or None for a pin that lasts"
            " until unpin.",
            argument="expires_at",
        )

    def unpin(self, *, reason: str, by: str) -> BoundedManifest:
        """Remove the pin, so that the version of the last switch is served again. Does nothing
        without a pin.
        """
        log = self._log
        require_audit_fields("unpin", "", reason, by)

        def unpin(manifests: Members) -> Members:
            after = {}
            for name, manifest in manifests.items():
                if manifest.pin is not None:
                    after[name] = _without_pin(log, manifest, reason)
            return after

        return log.transact_versions(unpin, by=by)

    def rollback(self, to: str | None = None, *, reason: str, by: str) -> BoundedManifest:
        """Serve an earlier version (None: the previous sealed one) until the next version is
        sealed. A pin that has expired ends. Raises DatasetError if the dataset is pinned.
        """
        require_audit_fields("rollback", to or "", reason, by)
        now = self._log.lake.now()

        def move_head(manifest: BoundedManifest, ref: VersionRef) -> BoundedManifest:
            if manifest.pin is not None and not manifest.pin.has_expired(now):
                raise DatasetError(
                    f"dataset {manifest.name!r} is pinned to {manifest.pin.version} by"
                    f" {manifest.pin.by} ({manifest.pin.reason}), so a rollback would change"
                    " nothing for readers.",
                    f"Unpin it first: adjunct dataset unpin {manifest.name} --reason ….",
                    dataset=manifest.name,
                )
            return manifest.model_copy(update={"head": ref.id, "pin": None})

        change = Change(action="rollback", reason=reason)
        return _change_each_member(self._log, to, move_head, change, by=by)

    def revoke(self, version: str, *, reason: str, by: str) -> BoundedManifest:
        """Never serve this version again. If it is current, the version that it replaced becomes
        current; a pin to it ends.

        The version that it replaced is the one that was current before the switch to it; rollbacks
        do not count (see `resolve_heads`). Where versions are ordered by time, that one may have
        arrived later and be valid from earlier. In a version set, another member revokes its
        version of this name only if it was delivered under no other name. The name becomes free: it
        can be delivered again with other content.
        """
        log = self._log
        require_audit_fields("revoke", version, reason, by)

        def revoke(manifests: Members) -> Members:
            chosen = resolve_versions(manifests, log.name, version, present=True)
            drafts = _revoke(manifests, chosen, log.name, f"{reason} (by {by})", log.lake.now())
            after = {}
            for name, draft in drafts.items():
                if draft != manifests[name]:
                    revoked = _id_of(chosen.get(name))
                    change = Change(action="revoke", version=revoked, reason=reason)
                    after[name] = with_served_version(log, draft, change)
            return after

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
            are_newest = all(is_after_head(manifests[name], ref) for name, ref in chosen.items())
            is_served = make_current or are_newest
            are_ordered_by_time = all(
                manifest.declaration.by_time for manifest in manifests.values()
            )
            after = dict[str, BoundedManifest]()
            for name, ref in chosen.items():
                manifest = manifests[name]
                _check_acceptable(log, name, ref)
                accepted = ref.model_copy(
                    update={"state": "sealed", "reason": f"accepted by {by}: {reason}"}
                )
                why = reason
                if is_served:
                    draft = switch_to(manifest, accepted)
                else:
                    draft = insert_unserved_version(manifest, accepted, between=are_ordered_by_time)
                    why += f" (sealed but not served: {manifest.head} stays current)"
                change = Change(action="accept", version=ref.id, reason=why)
                after[name] = with_served_version(log, draft, change)
            return after

        return log.transact_versions(accept, by=by)

    def remove_version(self, version: str, *, reason: str, by: str) -> BoundedManifest:
        """Remove a rejected or revoked version from the manifest; the next discard deletes its
        files.

        In a version set, the version of the same name is also removed from each other member that
        has it, unless it is sealed there. Raises DatasetError if this dataset's own is sealed.
        """
        log = self._log
        require_audit_fields("remove-version", version, reason, by)

        def drop(manifests: Members) -> Members:
            # `present`: other members may have no version of this name.
            chosen = resolve_versions(manifests, log.name, version, present=True)
            own = chosen[log.name]
            if own.state == "sealed":
                raise DatasetError(
                    f"dataset {log.name!r}: version {own.id} is sealed; only rejected and revoked"
                    " ones are dropped.",
                    "Revoke it first if it must not be served; the discard policy removes other"
                    " sealed versions.",
                    dataset=log.name,
                    version=own.id,
                )
            after = {}
            for name, ref in chosen.items():
                if ref.state == "sealed":
                    continue
                change = Change(action="remove-version", version=ref.id, reason=reason)
                remaining = _without_ref(manifests[name], ref)
                after[name] = remaining.after(change=change)
            return after

        return log.transact_versions(drop, by=by)


def _check_acceptable(log: DatasetLog, name: str, ref: VersionRef) -> None:
    """Raise DatasetError for a version that is not rejected, or was never built."""
    if ref.state != "rejected":
        raise DatasetError(
            f"dataset {name!r}: version {ref.id} is {ref.state}, and only a rejected one can be"
            " accepted.",
            f"List them: adjunct dataset versions {name}. An older sealed one: use rollback.",
            dataset=name,
            version=ref.id,
        )
    DatasetLog(log.lake, name).read_version(ref)


def expire_pin(log: DatasetLog, manifest: DatasetManifest, now: datetime) -> DatasetManifest:
    """Return the manifest without its pin if the pin has expired, else the manifest itself;
    commits nothing.
    """
    if not _has_expired_pin(manifest, now):
        return manifest
    return _without_pin(log, as_bounded(manifest), "expired")


def _has_expired_pin(manifest: DatasetManifest, now: datetime) -> bool:
    return manifest.pin is not None and manifest.pin.has_expired(now)


def expire_pins(log: DatasetLog, manifests: Manifests, now: datetime, *, by: str) -> bool:
    """Remove expired pins of all members of a version set in one commit; return whether there were
    any.

    `manifests` are those read last: if none has an expired pin, no request is made.
    """

    if not any(_has_expired_pin(manifest, now) for manifest in manifests.values()):
        return False

    def expire(current: Manifests) -> Manifests:
        after = {}
        for name, manifest in current.items():
            if _has_expired_pin(manifest, now):
                after[name] = expire_pin(log, manifest, now)
        return after

    log.transact_all(expire, by=by)
    return True


def describe_unserved_version(after: BoundedManifest) -> str:
    """Return why an accepted version is not served, with the next step; "" if the last change
    was anything else.
    """
    change = after.change
    if change is None or change.action != "accept":
        return ""
    accepted = after.ref(change.version)
    if accepted is None or accepted.id == after.head:
        return ""
    return describe_unserved(after, accepted)


def describe_unserved(manifest: BoundedManifest, ref: VersionRef) -> str:
    """Return a note on a sealed version that comes before the current one, with how to serve it."""

    def describe(ref: VersionRef) -> str:
        if ref.valid_from is None:
            return repr(ref.name)
        return f"{ref.name!r} (valid from {ref.valid_from:%Y-%m-%d %H:%M:%S} UTC)"

    if manifest.head_ref is None:
        why = "its version set stays at a later one"
    else:
        why = f"{describe(manifest.head_ref)} comes after it and stays current"
    return (
        f"version {describe(ref)} is sealed but not served: {why}. "
        f"To serve it: adjunct dataset rollback {manifest.name} {ref.id} --reason …"
    )


def with_served_version(
    log: DatasetLog, draft: BoundedManifest, change: Change, built: SealedVersion | None = None
) -> BoundedManifest:
    """Return this draft as a valid manifest, with the version that its pin and head select.

    `built` is a version that was just built, None without one. If it is the one selected, or if the
    draft serves that already, its document need not be read.
    """
    wanted = draft.chosen
    served = None
    for known in (draft.version, built):
        if known is not None and known.id == wanted:
            served = known
    if served is None and wanted is not None:
        ref = draft.ref(wanted)
        assert ref is not None, "what is chosen is retained"
        served = DatasetLog(log.lake, draft.name).read_version(ref)
    return draft.after(version=served, change=change)


# Drafts are manifests whose version is not yet the one that they choose: they are not validated
# before `with_served_version` reads it.


def with_ref(manifest: BoundedManifest, *new: VersionRef) -> BoundedManifest:
    """Return a draft with these versions, each in place of the one that has its id."""
    refs = {ref.id: ref for ref in (*manifest.versions, *new)}
    by_number = sorted(refs.values(), key=attrgetter("number"))
    return manifest.model_copy(update={"versions": tuple(by_number)})


def switch_to(manifest: BoundedManifest, ref: VersionRef) -> BoundedManifest:
    """Return a draft with this version as its head. The version records which one it replaces,
    unless it is the head already.
    """
    if ref.id != manifest.head:
        ref = ref.model_copy(update={"replaced": manifest.head})
    return with_ref(manifest, ref).model_copy(update={"head": ref.id})


def insert_unserved_version(
    manifest: BoundedManifest, new: VersionRef, *, between: bool
) -> BoundedManifest:
    """Return a draft with a new sealed version that does not become current.

    With `between` it is inserted by time into the chain of replaced versions: it is served once
    every version valid after it is revoked. That requires that all members of the version set order
    versions by time.
    """
    head = manifest.head_ref
    order = version_order(manifest)
    if not between or head is None:
        return with_ref(manifest, new)
    if order(new) >= order(head):  # it is not before the head: nothing to insert it into
        return with_ref(manifest, new)
    later = head
    before = manifest.ref(head.replaced)
    # Down the chain, as long as it is in order of time: switches out of order may be in it.
    while before is not None and order(new) < order(before) < order(later):
        later = before
        before = manifest.ref(before.replaced)
    new = new.model_copy(update={"replaced": later.replaced})
    return with_ref(manifest, new, later.model_copy(update={"replaced": new.id}))


def _revoke(
    manifests: Members, chosen: Mapping[str, VersionRef], dataset: str, reason: str, at: datetime
) -> Members:
    """Return drafts in which the chosen versions are revoked, with the heads and pins that follow.

    `dataset` is the member whose version the operator named. Other members' versions are only
    revoked if they were delivered under no other name. The names of the dataset's own version
    become free in all members. If a pin to a revoked version ends, all members are unpinned.
    """
    revoked: dict[str, VersionRef] = {}
    freed: tuple[str, ...] = ()
    for name, ref in chosen.items():
        names = list_delivered_names(manifests[name], ref)
        is_shared = name != dataset and len(names) > 1
        if ref.state == "revoked" or is_shared:
            continue
        revoked[name] = ref.model_copy(update={"state": "revoked", "reason": reason})
        if name == dataset:
            freed = names
    drafts: dict[str, BoundedManifest] = {}
    unpins = False
    for name, manifest in manifests.items():
        if name in revoked:
            version = revoked[name].id
            draft = with_ref(manifest, revoked[name])
            unpins |= manifest.pin is not None and manifest.pin.version == version
        else:
            version = None
            draft = manifest
        drafts[name] = _with_free_names(draft, version, freed, at)
    after: dict[str, BoundedManifest] = {}
    for name, head in resolve_heads(drafts, dataset).items():
        after[name] = drafts[name].model_copy(update={"head": head})
        if unpins:
            after[name] = after[name].model_copy(update={"pin": None})
    return after


def _change_each_member(
    log: DatasetLog,
    version: str | None,
    draft: Callable[[BoundedManifest, VersionRef], BoundedManifest],
    change: Change,
    *,
    by: str,
) -> BoundedManifest:
    """Commit a change of this sealed version (None: the one before the head), in all members of the
    version set.

    Other members change their version of the same name. `draft` returns the changed manifest.
    """

    def change_all(manifests: Members) -> Members:
        after = {}
        for name, ref in resolve_versions(manifests, log.name, version, sealed=True).items():
            member_change = change.model_copy(update={"version": ref.id})
            after[name] = with_served_version(log, draft(manifests[name], ref), member_change)
        return after

    return log.transact_versions(change_all, by=by)


def _without_pin(log: DatasetLog, manifest: BoundedManifest, reason: str) -> BoundedManifest:
    """Return the manifest without its pin, which serves its head; its change names the version that
    was pinned.
    """
    change = Change(action="unpin", version=manifest.chosen, reason=reason)
    return with_served_version(log, manifest.model_copy(update={"pin": None}), change)


def _without_ref(manifest: BoundedManifest, ref: VersionRef) -> BoundedManifest:
    """Return the manifest without this version, whose files become doomed; the name of a
    rejected one becomes free.
    """
    if ref.state == "rejected":  # the names of a revoked one are free already
        is_recorded = any(done.version == ref.id for done in manifest.delivered)
        other_names: list[str | None] = []
        if not is_recorded:  # delivered long ago: only its name is known
            other_names.append(ref.name)
        manifest = _with_free_names(manifest, ref.id, other_names, ref.sealed_at)
    remaining = list(manifest.versions)
    remaining.remove(ref)
    doomed = (*manifest.doomed, *ref.objects)
    return manifest.model_copy(update={"versions": tuple(remaining), "doomed": doomed})


def _with_free_names(
    manifest: BoundedManifest, version: str | None, names: Collection[str | None], at: datetime
) -> BoundedManifest:
    """Return the manifest with free names, which can be delivered again.

    These are the names under which `version` was delivered (None: no version), and `names`. `at` is
    the time since when they are free; names that are free already keep theirs.
    """
    freed: set[str] = set()
    delivered = []
    for done in manifest.delivered:
        is_meant = done.version == version or done.name in names
        if is_meant and not done.freed:
            freed.add(done.name)
            delivered.append(done.model_copy(update={"freed": at}))
        else:
            delivered.append(done)
    # Names of `known` were delivered so long ago that their markers are no longer recorded. One
    # that becomes free is recorded as a delivery again, without markers.
    known = []
    delivered_long_ago = []
    for name in manifest.known:
        if name in names and name not in freed:
            entry = Delivered(name=name, version=version or "", markers={}, freed=at)
            delivered_long_ago.append(entry)
        else:
            known.append(name)
    update = {"known": tuple(known), "delivered": (*delivered_long_ago, *delivered)}
    return manifest.model_copy(update=update)


def require_audit_fields(action: str, version: str, reason: str, by: str, **about: Any) -> None:
    """Raise ConfigurationError for a change without a reason or an author.

    `version` is what the error names after the action, "" for nothing. `about` are further fields
    of the error.
    """
    if not reason.strip():
        argument = "reason"
        missing = "reason"
    elif not by.strip():
        argument = "by"
        missing = "author"
    else:
        return
    change = f"{action} {version}".strip()
    raise ConfigurationError(
        f"{change} has no {missing}.",
        "Pass reason=… and by=…: both are recorded.",
        argument=argument,
        **about,
    )


_BEFORE_ALL = datetime.min.replace(tzinfo=UTC)


ID_PREFIX = re.compile(r"v\d{6,}(-[0-9a-f]*)?")
"""A prefix of a version's id with at least its whole number."""


def find_version(manifest: BoundedManifest, version: str) -> VersionRef | None:
    """Return the retained version of this id, or the newest sealed one of this name, or the newest
    one of this name that is not sealed; None without any.

    If a delivery had the content of the previous version, its name is one of that version.
    """
    exact = manifest.ref(version)
    if exact is not None:
        return exact
    delivered_under_name = {done.version for done in manifest.delivered if done.name == version}
    sealed = []
    others = []
    for ref in manifest.versions:
        if ref.name != version and ref.id not in delivered_under_name:
            continue
        if ref.state == "sealed":
            sealed.append(ref)
        else:
            others.append(ref)
    return max(sealed or others, key=attrgetter("number"), default=None)


def require_version(manifest: BoundedManifest, version: str, *, sealed: bool = False) -> VersionRef:
    """Return a retained version by id, name, or unique id prefix as shown on the command line.

    Raises DatasetError if there is none, or several; with `sealed`, also for a rejected or revoked
    one.
    """
    ref = find_version(manifest, version)
    if ref is None:
        ref = _find_by_prefix(manifest, version)
    if ref is None:
        raise _no_version_error(manifest, version)
    if sealed and ref.state != "sealed":
        if ref.state == "rejected":
            step = (
                "A rejected version can be accepted with a reason; a revoked one never comes back."
            )
        else:
            step = "Choose another version: a revoked one never comes back."
        raise DatasetError(
            f"dataset {manifest.name!r}: version {ref.id} is {ref.state} ({ref.reason}) and is not"
            " served.",
            step,
            dataset=manifest.name,
            version=ref.id,
        )
    return ref


def _find_by_prefix(manifest: BoundedManifest, prefix: str) -> VersionRef | None:
    """Return the only retained version whose id begins with `prefix`, None without one. Raises
    DatasetError if there are several.
    """
    if not ID_PREFIX.fullmatch(prefix):
        return None
    begun = [ref for ref in manifest.versions if ref.id.startswith(prefix)]
    if len(begun) > 1:
        raise DatasetError(
            f"dataset {manifest.name!r}: {prefix!r} is a prefix of several ids: "
            f"{', '.join(ref.id for ref in begun)}.",
            "Give more digits.",
            dataset=manifest.name,
        )
    if not begun:
        return None
    return begun[0]


def _no_version_error(manifest: BoundedManifest, version: str) -> DatasetError:
    """Return the error for a version that is not retained: it names the version that an erasure
    made of it, or else the newest ones that are retained.
    """
    rewritten = _find_rewritten(manifest, version)
    if rewritten is not None:
        return DatasetError(
            f"dataset {manifest.name!r}: version {version} was rewritten by an erasure, as"
            f" {rewritten.id}.",
            "Open that one: it has the same entries without the erased ones.",
            dataset=manifest.name,
            version=version,
        )
    listed = ", ".join(f"{ref.id} ({ref.name})" for ref in manifest.versions[-5:])
    return DatasetError(
        f"dataset {manifest.name!r} has no version {version!r}; the newest retained are"
        f" {listed or 'none'}.",
        f"See adjunct dataset versions {manifest.name}.",
        dataset=manifest.name,
        version=version,
    )


def _find_rewritten(manifest: BoundedManifest, version: str) -> VersionRef | None:
    """Return the version that an erasure made of the one with this id: it has the same number and
    another id. None if there is none, or `version` is a name.
    """
    if "-" not in version:
        return None
    number = version_number(version)
    return next((ref for ref in manifest.versions if ref.number == number), None)


def require_readable_version(manifest: BoundedManifest, version: str) -> VersionRef:
    """Return a retained version by id or name; raise DatasetError for a revoked one. Rejected
    ones can be read.
    """
    ref = require_version(manifest, version)
    if ref.state == "revoked":
        return require_version(manifest, ref.id, sealed=True)  # raises
    return ref


def find_previous_version(manifest: BoundedManifest, ref: VersionRef) -> VersionRef | None:
    """Return the sealed version before this one, in the dataset's own order; None without one."""
    order = version_order(manifest)
    before = [other for other in manifest.sealed if order(other) < order(ref)]
    return max(before, key=order, default=None)


def version_order(manifest: BoundedManifest) -> Callable[[VersionRef], Any]:
    """Return the sort key of the dataset's versions: their valid-from time, arrival, or name.

    Versions of equal time are in the order of sealing; versions without a time come first.
    """
    if manifest.declaration.by_time:
        return _by_time
    if manifest.declaration.order == "arrival":
        return attrgetter("number")
    return _by_name


def _by_time(ref: VersionRef) -> tuple[datetime, int]:
    return (ref.valid_from or _BEFORE_ALL, ref.number)


def _by_name(ref: VersionRef) -> tuple[Any, int]:
    return (natural_sort_key(ref.name or ""), ref.number)


def is_after_head(manifest: BoundedManifest, ref: VersionRef) -> bool:
    """Whether a version comes after the head, in the dataset's own order.

    In order of arrival, a version's place is its last delivery, under the newest of its names.
    """
    head = manifest.head_ref
    if head is None:
        return True
    order = version_order(manifest)
    if manifest.declaration.by_time or manifest.declaration.order == "name":
        return bool(order(ref) > order(head))
    last_delivery = {done.version: index for index, done in enumerate(manifest.delivered)}
    delivered = last_delivery.get(ref.id, -1)  # -1: so long ago that it is no longer recorded
    head_delivered = last_delivery.get(head.id, -1)
    if delivered == head_delivered:
        return ref.number > head.number
    return delivered > head_delivered


def list_delivered_names(manifest: BoundedManifest, ref: VersionRef) -> tuple[str, ...]:
    """Return the names under which a version was delivered, oldest first; () if none is known."""
    names = [done.name for done in manifest.delivered if done.version == ref.id]
    return tuple(dict.fromkeys(filter(None, (ref.name, *names))))


def resolve_versions(
    manifests: Members,
    dataset: str,
    version: str | None,
    *,
    sealed: bool = False,
    present: bool = False,
) -> dict[str, VersionRef]:
    """Return, by member of the version set, the version to act on.

    `version` is that of the member `dataset` by id, name or prefix of an id, None for the version
    before the head. The other members have theirs under the same name. Raises DatasetError if one
    has none (with `present` that member is left out instead), or, with `sealed`, if one is not
    sealed.
    """
    mine = manifests[dataset]
    if version is None:
        before = _find_previous(manifests, dataset)
        if not before:
            raise DatasetError(
                f"dataset {mine.name!r} has no sealed version before {mine.head or 'the first'} any"
                " more.",
                f"List them: adjunct dataset versions {mine.name}. The discard policy sets how many"
                " are kept.",
                dataset=mine.name,
            )
        return before
    ref = require_version(mine, version, sealed=sealed)
    # Other members do not know the id or its prefix. Of several names, the newest is the one under
    # which it was served with them last.
    names = list_delivered_names(mine, ref)
    if version in names:
        name = version
    elif names:
        name = names[-1]
    else:
        name = ref.id  # without a name, no other member has the version
    chosen = {dataset: ref}
    for member, manifest in manifests.items():
        is_left_out = present and find_version(manifest, name) is None
        if member != dataset and not is_left_out:
            chosen[member] = require_version(manifest, name, sealed=sealed)
    return chosen


Heads = Mapping[str, VersionRef | None]
"""The version that each member of a version set is at, None before its first."""


def resolve_heads(drafts: Members, dataset: str) -> dict[str, str | None]:
    """Return the new head of each member of a version set once some versions are revoked.

    The heads stay if all are still sealed. Otherwise all members go back, switch by switch, to what
    was served before. If that is no longer known, they go back to the previous sealed versions of
    one name, or all have none. `dataset` is the member whose order of names counts.
    """
    if all(map(_has_sealed_head, drafts.values())):
        return {name: draft.head for name, draft in drafts.items()}
    at = _follow_switches_back(drafts)
    if not _are_sealed(at):  # go on from the earliest versions that are known
        moved = {}
        for name, ref in at.items():
            moved[name] = drafts[name].model_copy(update={"head": _id_of(ref)})
        at = _find_previous(moved, dataset)
    return {name: _id_of(at.get(name)) for name in drafts}


def _has_sealed_head(draft: BoundedManifest) -> bool:
    """Whether the head is sealed, or there is none."""
    return draft.head is None or draft.retains(draft.head)


def _id_of(ref: VersionRef | None) -> str | None:
    if ref is None:
        return None
    return ref.id


def _are_sealed(at: Heads) -> bool:
    """Whether each member is at a sealed version. Before its first one it is not."""
    return all(ref is not None and ref.state == "sealed" for ref in at.values())


def _follow_switches_back(drafts: Members) -> Heads:
    """Return the versions that were served last, going back from the heads switch by switch until
    all are sealed.

    If that leads to nothing, the result is not sealed: the versions before which no switch is
    known, or at which the switches begin to repeat.
    """
    at: Heads = {name: draft.head_ref for name, draft in drafts.items()}
    seen: list[Heads] = []
    while not _are_sealed(at):
        seen.append(at)
        back = _find_replaced(drafts, at)
        if back is None:
            return at
        if back in seen:  # two versions that replaced each other, neither of which may be served
            return at
        at = back
    return at


def _common_names(drafts: Members, at: Heads) -> list[str]:
    """Return the names under which all of these versions were delivered, oldest first by the first
    member; [] if there is none, or if a member is before its first version.
    """
    names: list[tuple[str, ...]] = []
    for member, ref in at.items():
        if ref is None:
            return []
        names.append(list_delivered_names(drafts[member], ref))
    return [name for name in names[0] if all(name in others for others in names)]


def _find_replaced(drafts: Members, at: Heads) -> Heads | None:
    """Return the versions before the last switch to these, None if that is not known.

    In a version set, a switch has one name. A member has replaced its version if the new one was
    made under that name; a member whose delivery was unchanged has kept its version.
    """
    common = _common_names(drafts, at)
    if not common:
        return None
    switched_as = common[0]
    back = dict(at)
    for name, ref in at.items():
        if ref is not None and ref.name == switched_as:
            back[name] = drafts[name].ref(ref.replaced)
    if None in back.values():
        return None
    return back


def _find_previous(manifests: Members, dataset: str) -> dict[str, VersionRef]:
    """Return, by member, the sealed version before the head; {} without any.

    In a version set, these are the versions of one name: the newest name, in the order of the
    member `dataset`, that is sealed in all members and is not the name of all heads.
    """
    mine = manifests[dataset]
    if len(manifests) == 1:
        if mine.head_ref is None:
            return {}
        before = find_previous_version(mine, mine.head_ref)
        if before is None:
            return {}
        return {dataset: before}
    names = _names_in_order(mine)
    earlier = names[: _index_of_served_name(names, manifests, mine)]
    for name in reversed(earlier):
        sealed = _find_sealed(manifests, name)
        if len(sealed) == len(manifests) and not _is_served(manifests.values(), name):
            return sealed
    return {}


def _names_in_order(manifest: BoundedManifest) -> list[str]:
    """Return the names of delivered versions in the order of arrival; in the order of time, without
    those that are no longer retained, if the dataset's versions are ordered so.
    """
    names = [done.name for done in manifest.delivered]
    if not manifest.declaration.by_time:
        return names
    order = version_order(manifest)
    ranked = []
    for name in names:
        ref = find_version(manifest, name)
        if ref is not None:
            ranked.append((order(ref), name))
    return [name for _, name in sorted(ranked, key=itemgetter(0))]


def _index_of_served_name(names: Sequence[str], manifests: Members, mine: BoundedManifest) -> int:
    """Return the index of the last name that is the head of all members; if there is none, of the
    last one that is the head of `mine`; else the number of names.
    """
    of_all = None
    of_mine = len(names)
    for index, name in enumerate(names):
        if _is_served([mine], name):
            of_mine = index
        if _is_served(manifests.values(), name):
            of_all = index
    if of_all is None:
        return of_mine
    return of_all


def _is_served(manifests: Iterable[BoundedManifest], name: str) -> bool:
    """Whether the version of this name is the head of all these datasets."""
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
