"""What one advance of an unbounded dataset has done, as its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.sources.opened_stream import by_partition
from dagster_adjunct.assets.versions.advance_report import Action, AdvanceReport

if TYPE_CHECKING:
    from dagster_adjunct.assets.unbounded.commit_table import Advance, AdvanceProgress


def report_of(advance: Advance, progress: AdvanceProgress, action: Action) -> AdvanceReport:
    """Return what this advance has done: `action`, with the version that is served and how far it is behind."""
    manifest, version, decision = progress.manifest, progress.manifest.version, advance.decision
    system = advance.source.system
    offsets = by_partition(manifest.offsets)
    lag = {str(ssp): system.distance(ssp, offset, progress.ends[ssp]) for ssp, offset in offsets.items()}
    notes = []
    if decision.action != "continue":
        notes.append(f"{decision.action}: {decision.reason}")
    held = sum(lag.values())
    if action == "waiting" or (action == "up-to-date" and held):
        notes.append(f"{held:,} offsets wait for transactions that have not ended")
    elif action == "up-to-date":
        notes.append("no changes since the last commit")
    return AdvanceReport(
        dataset=manifest.name,
        kind=manifest.declaration.kind,
        action=action,
        version=None if version is None else version.id,
        sealed=tuple(dict.fromkeys(progress.sealed)),
        rows=None if version is None else version.rows,
        counters=progress.counters,
        offsets=manifest.offsets,
        lag=lag,
        decision=decision,
        seconds=advance.stages.seconds,
        schema=advance.source.schema if version is None else version.columns,
        note="; ".join(notes),
    )
