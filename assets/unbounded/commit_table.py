"""Commits of one advance: what is current, and deciding again where somebody else only compacted or discarded.

Each commit holds data and offsets together, so there is no second place to disagree with, and one commit is one
consistent cut across all partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.sources.opened_stream import as_stored
from dagster_adjunct.assets.unbounded.table_validity import SeenTable, max_age_of
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.manifest import as_unbounded
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.assets.versions.unbounded_state import Bootstrap, Decision
from dagster_adjunct.resources.errors import CommitConflictError
from dagster_adjunct.resources.objects.commit_log import commit_upon

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.opened_stream import Offsets, Source
    from dagster_adjunct.assets.versions.advance_report import Stages
    from dagster_adjunct.assets.versions.dataset_log import DatasetLog
    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.resources.objects.commit_log import Commit

_TRIES = 20


@dataclass(frozen=True, slots=True)
class Advance:
    """What stays the same during one advance: what was seen before it, and what was decided on that."""

    context: Runtime
    seen: SeenTable
    decision: Decision
    stages: Stages

    @property
    def source(self) -> Source:
        """The input stream, as it was opened."""
        return self.seen.source

    @property
    def spec(self) -> AdjunctDataset:
        """The declaration."""
        return self.seen.spec

    @property
    def log(self) -> DatasetLog:
        """The commits of the dataset."""
        return self.context.log(self.spec.name)


@dataclass(frozen=True, slots=True)
class AdvanceProgress:
    """How far an advance has come.

    `commit` and `manifest` are current, as far as it knows; `ends` is how far the stream is read. `sealed` are the
    versions that it has made, oldest first, and `counters` what it has counted.
    """

    commit: Commit | None
    manifest: UnboundedManifest
    ends: Offsets
    sealed: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)

    @property
    def bootstrap(self) -> Bootstrap:
        """Its bootstrap: the one under way, or the last one."""
        return self.manifest.bootstrap

    @property
    def running(self) -> bool:
        """Whether the bootstrap is under way."""
        return self.bootstrap.state == "running"

    def after(self, commit: Commit, manifest: UnboundedManifest) -> AdvanceProgress:
        """Return it after this commit."""
        version = manifest.version
        made = (version.id,) if version is not None and version is not self.manifest.version else ()
        return replace(self, commit=commit, manifest=manifest, sealed=(*self.sealed, *made))


def commit_manifest(
    advance: Advance, progress: AdvanceProgress, manifest: UnboundedManifest, *, commit_id: str | None = None
) -> AdvanceProgress:
    """Make `manifest` current. Raises CommitConflictError, and then nothing is visible."""
    commit = advance.log.commit(progress.commit, manifest, by=advance.context.by, commit_id=commit_id)
    return progress.after(commit, manifest)


def commit_again(
    advance: Advance,
    progress: AdvanceProgress,
    decide: Callable[[AdvanceProgress], UnboundedManifest],
    *,
    commit_id: str | None = None,
) -> AdvanceProgress:
    """Commit what is decided on what is current, again where somebody else only compacted or discarded.

    Raises CommitConflictError where another writer has read on, or begun anew, or has erased keys whose values our
    changes may have kept.
    """

    def catch_up(seen: AdvanceProgress) -> AdvanceProgress | None:
        commit, current = advance.log.read()
        fresh = None if current is None else as_unbounded(current)
        if fresh is None or not _same_progress(progress.manifest, fresh):
            return None
        if advance.spec.following.completes and _erased_since(advance.log, progress.commit):
            return None
        return replace(seen, commit=commit, manifest=fresh)

    return commit_upon(
        progress,
        lambda seen: commit_manifest(advance, seen, decide(seen), commit_id=commit_id),
        catch_up,
        attempts=_TRIES,
    )


def keep(advance: Advance, progress: AdvanceProgress, **changes: Any) -> AdvanceProgress:
    """Commit something beside data and offsets."""
    return commit_again(advance, progress, lambda current: current.manifest.after(**changes))


def keep_decision(advance: Advance, progress: AdvanceProgress) -> AdvanceProgress:
    """Commit the decision, unless the same one stands there."""
    stored, made = progress.manifest.decision, advance.decision
    if stored is not None and (stored.action, stored.reason) == (made.action, made.reason):
        return progress
    return keep(advance, progress, decision=made, change=change_of(made))


def confirm(advance: Advance, progress: AdvanceProgress) -> AdvanceProgress:
    """Commit that the table was found caught up, where its age counts, and not at each look."""
    limit, confirmed, now = max_age_of(advance.source), progress.manifest.confirmed_at, advance.seen.at
    if progress.manifest.offsets != as_stored(progress.ends):
        return progress  # changes of a transaction that has not ended wait
    if limit is None or (confirmed is not None and now - confirmed < limit / 10):
        return progress
    try:
        return keep(advance, progress, confirmed_at=now, decision=advance.decision, change=Change(action="confirm"))
    except CommitConflictError:  # somebody else was here, and saw the same
        commit, fresh = advance.log.read()
        return replace(progress, commit=commit, manifest=as_unbounded(fresh or progress.manifest))


def change_of(decision: Decision) -> Change:
    """Return what the commit that follows a decision says of itself."""
    return Change(action=decision.action, reason=decision.reason)


def _erased_since(log: DatasetLog, commit: Commit | None) -> bool:
    """Whether keys were erased after this commit."""
    newer = takewhile(lambda made: commit is None or made[0].number > commit.number, log.history())
    return any(manifest.change is not None and manifest.change.action == "forget" for _, manifest in newer)


def _same_progress(before: UnboundedManifest, fresh: UnboundedManifest) -> bool:
    """Whether nobody else has read on, or begun anew: then our changes still follow what is there."""

    def facts(manifest: UnboundedManifest) -> tuple[object, ...]:
        running = manifest.bootstrap.state == "running"
        horizon = None if running else manifest.horizon  # what was late must be looked at again where it moved
        return (
            manifest.offsets,
            manifest.bootstrap,
            manifest.declaration.partitions,
            manifest.next_generation,
            manifest.quarantining,
            manifest.applied,
            horizon,
        )

    return facts(before) == facts(fresh)
