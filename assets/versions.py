"""What operators do to versions: pin, unpin, roll back, withdraw, force, drop. Each is one commit.

Decisions are made on manifests alone and repeated when somebody else commits between. In a version set an
operation moves all members to the version of the same name, in the same commit (rule 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from assets.manifest import Change, DatasetManifest, Pin, SealedVersion, VersionRef
from assets.policies import natural_order
from resources.errors import ConfigurationError, DatasetError

if TYPE_CHECKING:
    from assets.log import DatasetLog, Manifests


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One commit of a dataset: what was done to which version, by whom, when and why, and what was served after."""

    number: int
    at: datetime
    by: str
    action: str
    version: str | None
    reason: str
    served: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON-able values."""
        return {name: getattr(self, name) for name in self.__slots__} | {"at": self.at.isoformat()}


def pin_version(
    log: DatasetLog, version: str, *, reason: str, by: str, expires_at: datetime | None = None
) -> DatasetManifest:
    """Serve this version, whatever seals meanwhile, until `unpin` or the first advance or discard after expiry."""
    _explained("pin", version, reason, by)
    if expires_at is not None and expires_at.tzinfo is None:
        raise ConfigurationError(f"a pin of {log.name!r} expires at {expires_at}, without a time zone.", "Give one.")

    def pin(manifest: DatasetManifest, ref: VersionRef) -> DatasetManifest:
        held = Pin(version=ref.id, reason=reason, by=by, at=datetime.now(UTC), expires_at=expires_at)
        return serve(log_of(log, manifest), manifest, pin=held, change=_change("pin", ref, reason))

    return _on_each(log, version, pin, by=by, sealed=True)


def unpin_version(log: DatasetLog, *, reason: str, by: str) -> DatasetManifest:
    """Serve again what the last switch chose. Without a pin nothing is done."""
    _explained("unpin", "", reason, by)

    def unpin(manifests: Manifests) -> Manifests | None:
        pinned = {name: m for name, m in manifests.items() if m.pin is not None}
        return {name: _unpinned(log_of(log, m), m, reason) for name, m in pinned.items()} or None

    return log.transact_all(unpin, by=by)[log.name]


def expire_pin(log: DatasetLog, manifest: DatasetManifest, now: datetime) -> DatasetManifest:
    """Return the manifest without its pin if that has expired, else the manifest itself; commits nothing."""
    if manifest.pin is None or manifest.pin.expires_at is None or manifest.pin.expires_at > now:
        return manifest
    return _unpinned(log, manifest, "expired")


def roll_back(log: DatasetLog, to: str | None, *, reason: str, by: str) -> DatasetManifest:
    """Serve an earlier version from now on (None: the sealed one before), until the next one seals."""
    _explained("rollback", to or "", reason, by)

    def back(manifest: DatasetManifest, ref: VersionRef) -> DatasetManifest:
        if manifest.pin is not None:
            raise DatasetError(
                f"dataset {manifest.name!r} is pinned to {manifest.pin.version} by {manifest.pin.by} "
                f"({manifest.pin.reason}), so a rollback would change nothing for readers.",
                f"Unpin it first: adjunct dataset unpin {manifest.name}.",
            )
        return serve(log_of(log, manifest), manifest, head=ref.id, change=_change("rollback", ref, reason))

    return _on_each(log, to, back, by=by, sealed=True)


def withdraw_version(log: DatasetLog, version: str, *, reason: str, by: str) -> DatasetManifest:
    """Never serve this version again. What was served before it takes its place; a pin to it ends."""
    _explained("withdraw", version, reason, by)

    def withdraw(manifest: DatasetManifest, ref: VersionRef) -> DatasetManifest:
        if ref.state == "withdrawn":
            return manifest
        gone = ref.model_copy(update={"state": "withdrawn", "reason": f"{reason} (by {by})"})
        versions = tuple(gone if each.id == ref.id else each for each in manifest.versions)
        pin = None if manifest.pin is not None and manifest.pin.version == ref.id else manifest.pin
        head = manifest.head
        if head == ref.id:
            before = previous(manifest, ref)
            head = before.id if before else None
        return serve(
            log_of(log, manifest), manifest, versions=versions, head=head, pin=pin,
            change=_change("withdraw", ref, reason),
        )  # fmt: skip

    return _on_each(log, version, withdraw, by=by)


def force_version(log: DatasetLog, version: str, *, reason: str, by: str) -> DatasetManifest:
    """Publish a rejected version after all, on the word of whoever gives the reason."""
    _explained("force", version, reason, by)

    def force(manifest: DatasetManifest, ref: VersionRef) -> DatasetManifest:
        if ref.state != "rejected":
            raise DatasetError(
                f"dataset {manifest.name!r}: version {ref.id} is {ref.state}, and only a rejected one can be forced.",
                f"See adjunct dataset versions {manifest.name}; an older sealed one is served again with rollback.",
            )
        log_of(log, manifest).read_version(ref)  # one that was never built can't be forced, and says so
        forced = ref.model_copy(update={"state": "sealed", "reason": f"forced by {by}: {reason}"})
        versions = tuple(forced if each.id == ref.id else each for each in manifest.versions)
        return serve(
            log_of(log, manifest), manifest, versions=versions, head=ref.id, change=_change("force", ref, reason)
        )

    return _on_each(log, version, force, by=by)


def drop_version(log: DatasetLog, version: str, *, reason: str, by: str) -> DatasetManifest:
    """Forget a rejected or withdrawn version; the next discard deletes its files."""
    _explained("drop", version, reason, by)

    def drop(manifest: DatasetManifest, ref: VersionRef) -> DatasetManifest:
        if ref.state == "sealed":
            raise DatasetError(
                f"dataset {manifest.name!r}: version {ref.id} is sealed; only rejected and withdrawn ones are dropped.",
                "Withdraw it first if it must not be served; sealed versions go by the discard policy.",
            )
        kept = tuple(each for each in manifest.versions if each.id != ref.id)
        doomed = (*manifest.doomed, *ref.folders, *([ref.document] if ref.document else []))
        return manifest.after(versions=kept, doomed=doomed, change=_change("drop", ref, reason))

    return _on_each(log, version, drop, by=by)


# -- what they share


def serve(log: DatasetLog, manifest: DatasetManifest, **changes: Any) -> DatasetManifest:
    """Return the manifest with these changes and, in it, the version that follows from its pin and head."""
    pin: Pin | None = changes.get("pin", manifest.pin)
    wanted: str | None = pin.version if pin is not None else changes.get("head", manifest.head)
    known: SealedVersion | None = changes.pop("built", None)
    version = next((each for each in (manifest.version, known) if each is not None and each.id == wanted), None)
    if version is None and wanted is not None:
        refs = changes.get("versions", manifest.versions)
        version = log.read_version(next(ref for ref in refs if ref.id == wanted))
    return manifest.after(version=version, **changes)


def find_version(manifest: DatasetManifest, version: str) -> VersionRef | None:
    """Return the retained version of this id, or the newest of this name: a sealed one, where there is any.

    A delivery whose content equalled the version before it is held by that one.
    """
    exact = manifest.ref(version)
    if exact is not None:
        return exact
    held = [done.version for done in manifest.delivered if done.name == version]
    named = [ref for ref in manifest.versions if ref.name == version or ref.id in held]
    return max(named, key=lambda ref: (ref.state == "sealed", ref.number), default=None)


def require_version(manifest: DatasetManifest, version: str, *, sealed: bool = False) -> VersionRef:
    """Return a retained version by id or name. Raises DatasetError, naming what there is."""
    ref = find_version(manifest, version)
    if ref is None:
        rewritten = _rewritten(manifest, version)
        if rewritten is not None:
            raise DatasetError(
                f"dataset {manifest.name!r}: version {version} was rewritten by an erasure, as {rewritten.id}.",
                "Open that one: it holds the same entries without those that were erased.",
            )
        listed = ", ".join(f"{each.id} ({each.name})" for each in manifest.versions[-5:]) or "none"
        raise DatasetError(
            f"dataset {manifest.name!r} has no version {version!r}; the newest retained are {listed}.",
            f"See adjunct dataset versions {manifest.name}.",
        )
    if sealed and ref.state != "sealed":
        raise DatasetError(
            f"dataset {manifest.name!r}: version {ref.id} is {ref.state} ({ref.reason}) and is not served.",
            "A rejected version can be forced with a reason; a withdrawn one never comes back."
            if ref.state == "rejected"
            else "Choose another version: a withdrawn one never comes back.",
        )
    return ref


def _rewritten(manifest: DatasetManifest, version: str) -> VersionRef | None:
    """Return what took the place of an id in an erasure: only there does a number get a second id."""
    number = version.removeprefix("v").partition("-")[0]
    if not number.isdecimal() or not version.startswith("v") or "-" not in version:
        return None
    return next((ref for ref in manifest.versions if ref.number == int(number)), None)


def previous(manifest: DatasetManifest, ref: VersionRef) -> VersionRef | None:
    """Return the sealed version before this one, in the dataset's own order."""
    order = order_of(manifest)
    before = [each for each in manifest.versions if each.state == "sealed" and order(each) < order(ref)]
    return max(before, key=order) if before else None


def order_of(manifest: DatasetManifest) -> Callable[[VersionRef], Any]:
    """Return what the dataset's versions are ordered by: as they arrived, or by their names."""
    if manifest.declaration.order == "arrival":
        return lambda ref: ref.number
    return lambda ref: (natural_order(ref.name or ""), ref.number)


def log_of(log: DatasetLog, manifest: DatasetManifest) -> DatasetLog:
    """Return the log of another member of the same version set."""
    return type(log)(log.lake, manifest.name)


def _on_each(
    log: DatasetLog,
    version: str | None,
    change: Callable[[DatasetManifest, VersionRef], DatasetManifest],
    *,
    by: str,
    sealed: bool = False,
) -> DatasetManifest:
    """Change the named version of this dataset, and the one of the same name in each other member of its set."""

    def change_all(manifests: Manifests) -> Manifests | None:
        mine = manifests[log.name]
        ref = _chosen(mine, version, sealed=sealed)
        chosen: Mapping[str, VersionRef] = {log.name: ref}
        if len(manifests) > 1:
            name = _delivered_name(mine, ref)
            others = {each: m for each, m in manifests.items() if each != log.name}
            chosen = {**chosen, **{each: require_version(m, name, sealed=sealed) for each, m in others.items()}}
        after = {name: change(manifests[name], found) for name, found in chosen.items()}
        return {name: m for name, m in after.items() if m is not manifests[name]} or None

    return log.transact_all(change_all, by=by)[log.name]


def _chosen(manifest: DatasetManifest, version: str | None, *, sealed: bool) -> VersionRef:
    if version is not None:
        return require_version(manifest, version, sealed=sealed)
    head = manifest.ref(manifest.head) if manifest.head else None
    before = previous(manifest, head) if head else None
    if before is None:
        raise DatasetError(
            f"dataset {manifest.name!r} has no sealed version before {manifest.head or 'the first'} any more.",
            f"See adjunct dataset versions {manifest.name}; the discard policy says how many are kept.",
        )
    return before


def _delivered_name(manifest: DatasetManifest, ref: VersionRef) -> str:
    """Return the newest name under which a version was delivered: one of equal content keeps an older one's."""
    held = [done.name for done in manifest.delivered if done.version == ref.id]
    return held[-1] if held else ref.name or ref.id


def _unpinned(log: DatasetLog, manifest: DatasetManifest, reason: str) -> DatasetManifest:
    pinned = manifest.pin.version if manifest.pin else None
    return serve(log, manifest, pin=None, change=Change(action="unpin", version=pinned, reason=reason))


def _change(action: str, ref: VersionRef, reason: str) -> Change:
    return Change(action=action, version=ref.id, reason=reason)


def _explained(action: str, version: str, reason: str, by: str) -> None:
    for what, given in (("a reason", reason), ("who does it", by)):
        if not given.strip():
            raise ConfigurationError(
                f"{action} {version} does not say {what}.".replace("  ", " "), "Pass reason=… and by=…: both are kept."
            )
