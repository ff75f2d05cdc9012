"""Changes that a table has taken in already, applied again over what it holds.

Rows carry positions, and of a key the highest (position, generation) wins. So what is applied again
replaces what was made of the same changes, and never what is newer. Two cases need more than that:

    by offset     a later change of the key makes no entry any more: an earlier one takes its position
    by a column   deletions up to the horizon are forgotten: changes below it are too late, but for keys that are there
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.changes.change_formats import PROBLEM
from dagster_adjunct.assets.declaration.following_changes import DeadLetters
from dagster_adjunct.assets.versions.manifest import Change, UnboundedManifest
from dagster_adjunct.assets.versions.sealed_version import POSITION
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION, TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.opened_stream import Ranges
    from dagster_adjunct.assets.unbounded.rewind_plan import RewindPlan
    from dagster_adjunct.assets.writing.write_context import WriteContext
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

_STORED, _LATE, _NEWEST = "__stored", "__late", "__newest"


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
        self, changes: DataFrame, context: WriteContext, spec: AdjunctDataset, manifest: UnboundedManifest
    ) -> tuple[DataFrame, Callable[[], int] | None]:
        """Return the changes as they are written over what the table holds, and what counts those that come too late.

        Raises DatasetError for changes that come too late, unless it is forced.
        """
        from pyspark.sql import functions as F

        horizon = manifest.horizon
        changes = _with_stored(changes, context, spec, manifest)
        if spec.following.order_by is None:
            return changes.withColumn(POSITION, F.greatest(POSITION, _STORED)).drop(_STORED), None
        if horizon is None:
            return changes.drop(_STORED), None
        changes = _above_forgotten(changes, spec.key, horizon).drop(_STORED)
        late = changes.where(_LATE).count()
        if late and not self.forced:
            raise DatasetError(
                f"dataset {spec.name!r}: {late:,} of the changes to apply again are at or below position {horizon}, up "
                "to which deletions are forgotten, and of keys that it does not hold: they may have been deleted.",
                f"Build it anew: adjunct dataset rebuild {spec.name} MODULE:APP --reason …. Forced, these changes are "
                "set aside as too late.",
                dataset=spec.name,
            )
        if isinstance(spec.following.on_bad_change, DeadLetters):
            problem = F.lit(f"it comes too late: deletions up to position {horizon} are forgotten")
            problems = F.coalesce(F.col(PROBLEM), F.when(F.col(_LATE), problem))
            return changes.withColumn(PROBLEM, problems).drop(_LATE), None
        return changes.where(~F.col(_LATE)).drop(_LATE), lambda: late

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


def _with_stored(
    changes: DataFrame, context: WriteContext, spec: AdjunctDataset, manifest: UnboundedManifest
) -> DataFrame:
    """Return the changes with the position of what the table holds of their key; null where it holds nothing."""
    from pyspark.sql import functions as F

    from dagster_adjunct.resources.bucketing.bucketed_tables import bucketed_frame

    version, key = manifest.version, spec.key
    assert version is not None
    what = f"dataset {spec.name!r}, version {version.id}"
    stored = bucketed_frame(context.spark(), context.lake.store, what, version.layout, version.generations)
    names = [f"__key_{index}" for index in range(len(key))]
    keys = [column(own).alias(name) for own, name in zip(key, names, strict=True)]
    held = stored.select(*keys, F.col(POSITION).alias(_STORED)).groupBy(*names).agg(F.max(_STORED).alias(_STORED))
    same = reduce(and_, [column(own) == F.col(name) for own, name in zip(key, names, strict=True)])
    return changes.join(held, same, "left").drop(*names)


def _above_forgotten(changes: DataFrame, key: tuple[str, ...], horizon: int) -> DataFrame:
    """Return the changes with a mark where a deletion that is forgotten might beat them.

    These are all changes of a key that the table does not hold, where the newest is not above the horizon. Where it is
    a deletion, they are left out: there is nothing to delete, and the deletion that counts may be another.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    place = F.when(F.col(PROBLEM).isNull(), F.struct(POSITION, OFFSET, PARTITION, TOMBSTONE))
    newest = F.max(place).over(Window.partitionBy(*[column(name) for name in key]))
    changes = changes.withColumn(_NEWEST, newest)
    last = F.col(_NEWEST)
    below = F.col(_STORED).isNull() & F.col(PROBLEM).isNull() & (last[POSITION] <= F.lit(horizon))
    return changes.where(~below | ~last[TOMBSTONE]).withColumn(_LATE, below).drop(_NEWEST)
