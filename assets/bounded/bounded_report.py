"""What one advance of a bounded dataset has done, told for logs and Dagster, with the next step where one is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.inputs_besides_streams import FileSource, QuerySource
from dagster_adjunct.assets.versions.advance_report import Action, AdvanceReport

if TYPE_CHECKING:
    from dagster_adjunct.assets.bounded.advancing_members import Member
    from dagster_adjunct.assets.versions.sealed_version import VersionRef


def report_of(member: Member) -> AdvanceReport:
    """Return what the advance has done with this dataset, and what its next version waits for."""
    done = member.outcome
    manifest, version = member.manifest, member.manifest.version
    idle = member.awaiting is not None and member.awaiting.idle and version is not None and not done.lost
    action: Action = "waiting"
    notes = []
    if done.sealed:
        action = "sealed"
    elif done.rejected:
        action = "rejected"
    elif done.unchanged:
        action = "unchanged"
        notes.append("the version delivered equals the current one")
    elif idle:
        action = "up-to-date"
        dropped = done.notes and "redelivered" in done.counters
        notes += [] if dropped else ["nothing new was delivered"]
    for ref in (manifest.ref(rejected) for rejected in done.rejected):
        if ref is not None:
            notes.append(_rejected(member, ref))
    notes += [_kept(member, ref) for kept in done.kept if (ref := manifest.ref(kept)) is not None]
    newest = max(manifest.versions, key=lambda ref: ref.number, default=None)
    if newest is not None and newest.state == "rejected" and not done.rejected:
        notes.append(f"version {newest.name!r} ({newest.id}), delivered last, is rejected: {newest.reason}")
    awaited = member.others or manifest.awaited
    waiting = member.others.missing if member.others else member.awaiting.missing if member.awaiting else ()
    if idle:
        waiting = ()
    if waiting:
        begun = awaited.version if awaited else None
        wanted = f"version {begun!r}" if begun else "the first version" if version is None else "the next version"
        notes.append(f"{wanted} waits for the markers of {', '.join(waiting)}")
    if manifest.pin is not None:
        notes.append(f"pinned to {manifest.pin.version} by {manifest.pin.by}: {manifest.pin.reason}")
    looked_at = done.looked_at or version
    return AdvanceReport(
        dataset=manifest.name,
        kind=manifest.declaration.kind,
        action=action,
        version=None if version is None else version.id,
        sealed=done.sealed,
        rejected=done.rejected,
        lost=tuple(name for lost in done.lost for name in lost.versions),
        evaluated=looked_at.id if looked_at else None,
        verdicts=looked_at.verdicts if looked_at else (),
        warnings=tuple(dict.fromkeys([*done.warnings, *[lost.summary() for lost in done.lost], *done.notes])),
        rows=None if version is None else version.rows,
        counters=done.counters,
        offsets=manifest.offsets,
        waiting=waiting,
        waiting_since=awaited.since if awaited and waiting else None,
        seconds=member.stages.seconds,
        schema=member.source.schema if version is None else version.columns,
        note="; ".join(notes),
    )


def _kept(member: Member, ref: VersionRef) -> str:
    """Return that a version comes before the one that is current, and how to serve it all the same."""
    manifest = member.manifest
    head = manifest.ref(manifest.head or "")
    assert head is not None
    names = [
        f"{told.name!r}" + (f" (valid from {told.valid_from:%Y-%m-%d %H:%M:%S} UTC)" if told.valid_from else "")
        for told in (ref, head)
    ]
    return (
        f"version {names[0]} is sealed and kept beside {names[1]}, which comes after it and stays current. "
        f"To serve it: adjunct dataset rollback {manifest.name} {ref.id} --reason …"
    )


def _rejected(member: Member, ref: VersionRef) -> str:
    """Return why a version was rejected and what can be done about it."""
    name, source = member.spec.name, member.spec.input
    again = "deliver it again under the same name"
    if isinstance(source, FileSource):
        again = "complete the folder again"
    elif isinstance(source, QuerySource):
        again = "compute it again"
    look = f"look at it (adjunct dataset show {name} {ref.id})"
    force = f"force it with a reason (adjunct dataset force {name} {ref.id} --reason …)"
    drop = f"drop it (adjunct dataset drop {name} {ref.id} --reason …) and {again}"
    # What was refused before it was built can neither be read nor forced.
    steps = f"{look}, {force}, or {drop}" if ref.document else drop
    return f"version {ref.name!r} is rejected: {ref.reason.rstrip('.')}. Next: {steps}"
