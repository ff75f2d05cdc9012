"""Changes that a table has taken in already, applied again over what it holds.

Rows carry positions, and of a key the highest (position, generation) wins. So what is applied again
replaces what was made of the same changes, and never what is newer. Two cases need more than that:

    by offset     a later change of the key makes no entry any more: an earlier one takes its position
    by a column   deletions up to the horizon are forgotten: changes below it are too late, but for keys that are there
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.following_changes import DeadLetters
from dagster_adjunct.assets.unbounded.table_rows import Rows, TableRows
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.resources.errors import DatasetError

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.opened_stream import Ranges
    from dagster_adjunct.assets.unbounded.rewind_plan import RewindPlan
    from dagster_adjunct.assets.versions.sealed_version import SealedVersion
    from dagster_adjunct.resources.objects.object_store import ObjectStore
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


@dataclass(frozen=True, slots=True)
class Rewinding:
    """A rewind that is being done: `ids` are its startpoints, by partition. `forced` sets late changes aside."""

    plan: RewindPlan
    ids: dict[str, str]
    reason: str
    forced: bool

    @property
    def ranges(self) -> Ranges:
        """What is read again."""
        rewound = (partition for partition in self.plan.partitions if partition.again)
        return {partition.ssp: (partition.start, str(partition.taken)) for partition in rewound}

    @property
    def told(self) -> tuple[object, ...]:
        """What tells this rewind from others."""
        return sorted(self.ids.items()), sorted((str(ssp), span) for ssp, span in self.ranges.items())

    def onto(
        self,
        changes: Rows,
        table: TableRows[Rows],
        store: ObjectStore,
        spec: AdjunctDataset,
        manifest: UnboundedManifest,
    ) -> tuple[Rows, Callable[[], int] | None]:
        """Return the changes as they are written over what the table holds, and what counts those that come too late.

        Raises DatasetError for changes that come too late, unless it is forced.
        """
        horizon, version = manifest.horizon, manifest.version
        assert version is not None
        by_offset = spec.following.order is None
        if horizon is None and not by_offset:
            return changes, None
        what = f"dataset {spec.name!r}, version {version.id}"
        stored = table.stored(store, what, version.layout, version.generations)
        if by_offset or horizon is None:
            return table.at_stored_positions(changes, stored, spec.key), None
        in_time, with_reasons, late = table.late_beside(changes, stored, spec.key, horizon)
        if late and not self.forced:
            raise DatasetError(
                f"dataset {spec.name!r}: {late:,} of the changes to apply again are at or below position {horizon}, up "
                "to which deletions are forgotten, and of keys that it does not hold: they may have been deleted.",
                f"Build it anew: adjunct dataset rebuild {spec.name} MODULE:APP --reason …. Forced, these changes are "
                "set aside as too late.",
                dataset=spec.name,
            )
        if isinstance(spec.following.on_bad_change, DeadLetters):
            return with_reasons, None
        return in_time, lambda: late

    def onto_history(
        self, changes: Rows, table: TableRows[Rows], store: ObjectStore, spec: AdjunctDataset, version: SealedVersion
    ) -> Rows:
        """Return the changes as they are written over rows over time: in the place of what has their key and moment."""
        if spec.following.order is not None:
            return changes
        what = f"dataset {spec.name!r}, version {version.id}"
        stored = table.stored(store, what, version.layout, version.generations)
        return table.at_stored_positions(changes, stored, version.layout.key)

    def recorded(self, after: UnboundedManifest, system: StreamSystem) -> UnboundedManifest:
        """Return the manifest with this rewind in it: its startpoints, and from and up to where the table has read."""
        bootstrap = after.bootstrap
        begins, offsets = dict(bootstrap.start), dict(after.offsets)
        for partition in self.plan.partitions:
            name = str(partition.ssp)
            if partition.skipped:
                offsets[name] = partition.start
            elif partition.again and system.compare(partition.start, begins[name]) < 0:
                begins[name] = partition.start
        return after.after(
            offsets=offsets,
            bootstrap=bootstrap.model_copy(update={"start": begins}),
            applied=after.with_applied(self.ids),
            change=Change(action="rewind", reason=self.reason),
        )
