"""A dataset while it advances, and the members of a version set that advance together: frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from dagster_adjunct.assets.writing.write_generation import add

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.version_source import Awaiting, Delivery, VersionSource
    from dagster_adjunct.assets.versions.advance_report import Stages
    from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
    from dagster_adjunct.assets.versions.dataset_log import DatasetLog
    from dagster_adjunct.assets.versions.deliveries import Awaited, Lost
    from dagster_adjunct.assets.versions.sealed_version import SealedVersion
    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.resources.objects.commit_log import Commit


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an advance has done with one dataset so far.

    `sealed`, `rejected` and `unchanged` are ids of versions, `kept` those of the sealed that come before what was
    current and are kept beside it; `taken_in` counts the deliveries that they came of, and
    `looked_at` is the version that was built last.
    """

    sealed: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    lost: tuple[Lost, ...] = ()
    notes: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    taken_in: int = 0
    looked_at: SealedVersion | None = None

    def heard(self, source: Delivery | Awaiting) -> Outcome:
        """Return it with what the source told beside its answer, and the records that it dropped."""
        lost = (source.lost,) if source.lost is not None else ()
        dropped = {"redelivered": source.redelivered} if source.redelivered else {}
        return replace(self.counted(dropped), notes=(*self.notes, *source.notes), lost=(*self.lost, *lost))

    def counted(self, counters: Mapping[str, int]) -> Outcome:
        """Return it with these counters added."""
        return replace(self, counters=add(dict(self.counters), dict(counters)))


@dataclass(frozen=True, slots=True)
class Member:
    """One dataset while it advances: alone, or with the other members of its version set.

    `context` says where it is written and with what. `manifest` is what is decided on, `committed` what stands in the
    lake, None before the first commit. `others` is what other members of the set lack of the version that this one has.
    """

    spec: AdjunctDataset
    context: Runtime
    source: VersionSource
    stages: Stages
    manifest: BoundedManifest
    committed: BoundedManifest | None = None
    outcome: Outcome = Outcome()
    awaiting: Awaiting | None = None
    others: Awaited | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def log(self) -> DatasetLog:
        return self.context.log(self.spec.name)

    def at(self, manifest: BoundedManifest) -> Member:
        """Return the member as it stands once this manifest is committed."""
        return replace(self, manifest=manifest, committed=manifest)


@dataclass(frozen=True, slots=True)
class Unit:
    """What advances in one commit: a dataset alone, or all members of a version set, after `commit`."""

    commit: Commit | None
    members: tuple[Member, ...]

    def member(self, name: str) -> Member:
        """Return the member of this name."""
        return next(member for member in self.members if member.name == name)

    def having(self, members: Iterable[Member]) -> Unit:
        """Return the unit with these members as they are now."""
        changed = {member.name: member for member in members}
        return replace(self, members=tuple(changed.get(member.name, member) for member in self.members))

    def committed(self, members: Sequence[Member]) -> Unit:
        """Commit these members' manifests in one commit, and return what stands then. Raises CommitConflictError."""
        log, by = members[0].log, members[0].context.by
        commit = log.commit_all(self.commit, {member.name: member.manifest for member in members}, by=by)
        return replace(self.having(members), commit=commit)
