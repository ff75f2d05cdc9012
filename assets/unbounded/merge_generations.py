"""Generations of a table merged by Spark, bucket by bucket, with no shuffle: the newest row of each key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.next_served_version import without_large_footers
from dagster_adjunct.assets.versions.sealed_version import POSITION, TOMBSTONE
from dagster_adjunct.assets.writing.write_generation import write_generation

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.assets.unbounded.compaction_plan import CompactionPlan
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.assets.versions.manifest import UnboundedManifest
    from dagster_adjunct.assets.versions.sealed_version import SealedVersion
    from dagster_adjunct.assets.writing.write_context import WriteContext
    from dagster_adjunct.resources.bucketing.bucket_files import Generation

_NEWER, _GENERATION = "__newer", "__gen"


@dataclass(frozen=True, slots=True)
class Merged:
    """The output of one merge; `horizon` is what it forgets deletions up to, None where it forgets none of its own."""

    attempt: Attempt
    generation: Generation
    counters: dict[str, int]
    tombstones: int
    horizon: int | None


def merge(
    context: WriteContext, manifest: UnboundedManifest, plan: CompactionPlan, attempt: Attempt, *, forget: bool
) -> Merged:
    """Write what the generations of the plan come to, as the newest of them: its order to the others stays.

    `forget` lets a table by a column's order forget deletions further than it has yet.
    """
    version = manifest.version
    assert version is not None
    what = f"dataset {manifest.name!r}, {plan.level} compaction"
    rows = stored_rows(context, version, plan.generations, what)
    ordered = version.order_by is not None and plan.level == "major"
    horizon = _horizon(manifest, rows) if ordered and forget else None
    forgotten = max((at for at in (manifest.horizon, horizon) if at is not None), default=None)
    observed: Callable[[], dict[str, int]] | None = None
    if ordered:
        rows, observed = without_forgotten(rows, version.key, forgotten)
    generation, counters = write_generation(
        context.lake,
        attempt,
        plan.generations[-1].id,
        version.layout,
        rows,
        what=what,
        order_by=(*version.key, POSITION, _GENERATION),
        keep_tombstones=plan.level == "minor" or ordered,
        partitioned=True,
    )
    tombstones = 0
    if observed is not None:
        counts = observed()
        tombstones = counts["tombstones"]
        counters |= {"superseded": plan.rows - counts["keys"], "deleted": counts["forgotten"]}
    counters.pop("conflicting", None)
    return Merged(attempt, without_large_footers(generation), counters, tombstones, horizon)


def reach_down_to(
    context: WriteContext, version: SealedVersion, generations: Sequence[Generation], horizon: int, what: str
) -> bool:
    """Whether any row of these generations is at or below this position."""
    lowest, _ = positions_of(stored_rows(context, version, generations, what))
    return lowest is not None and lowest <= horizon


def stored_rows(
    context: WriteContext, version: SealedVersion, generations: Sequence[Generation], what: str
) -> DataFrame:
    """Return all rows of these generations; bucket i is partition i."""
    from dagster_adjunct.resources.bucketing.bucketed_tables import bucketed_frame

    rows = bucketed_frame(context.spark(), context.lake.store, what, version.layout, generations)
    return rows if version.partition_by else rows.coalesce(1)


def positions_of(rows: DataFrame) -> tuple[int | None, int | None]:
    """Return the lowest and the highest position of these rows, None where there are none."""
    from pyspark.sql import functions as F

    lowest, highest = rows.agg(F.min(POSITION), F.max(POSITION)).collect()[0]
    return lowest, highest


def _horizon(manifest: UnboundedManifest, rows: DataFrame) -> int | None:
    """Return up to where deletions can be forgotten, None where they are kept for ever."""
    kept = manifest.declaration.keep_tombstones
    _, highest = (None, None) if kept is None else positions_of(rows)
    return None if kept is None or highest is None else highest - kept


def without_forgotten(
    rows: DataFrame, key: tuple[str, ...], horizon: int | None
) -> tuple[DataFrame, Callable[[], dict[str, int]]]:
    """Return the winner of each key but for tombstones up to the horizon, and the counts once the job has run."""
    from pyspark.sql import Observation, Window
    from pyspark.sql import functions as F

    from dagster_adjunct.resources.schemas.quoted_columns import column

    places = Window.partitionBy(*[column(name) for name in key]).orderBy(POSITION, _GENERATION)
    winners = rows.withColumn(_NEWER, F.lead(F.lit(1)).over(places)).where(F.col(_NEWER).isNull()).drop(_NEWER)
    tombstone = F.col(TOMBSTONE)
    gone = tombstone & (F.col(POSITION) <= F.lit(horizon)) if horizon is not None else F.lit(False)
    observed = Observation()

    def count(condition: Column, name: str) -> Column:
        return F.coalesce(F.sum(condition.cast("long")), F.lit(0)).alias(name)

    watched = winners.observe(
        observed,
        F.count(F.lit(1)).alias("keys"),
        count(gone, "forgotten"),
        count(tombstone & ~gone, "tombstones"),
    )
    return watched.where(~gone), lambda: {name: int(value) for name, value in observed.get.items()}
