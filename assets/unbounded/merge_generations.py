"""Generations of a table merged into one: the newest row of each key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.engine import engine_of
from dagster_adjunct.assets.unbounded.next_served_version import without_large_footers
from dagster_adjunct.assets.versions.sealed_version import POSITION
from dagster_adjunct.assets.writing.write_generation import write_generation
from dagster_adjunct.resources.bucketing.bucketed_tables import GENERATION

if TYPE_CHECKING:
    from dagster_adjunct.assets.unbounded.compaction_plan import CompactionPlan
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.assets.versions.manifest import UnboundedManifest
    from dagster_adjunct.assets.versions.sealed_version import SealedVersion
    from dagster_adjunct.assets.writing.write_context import WriteContext
    from dagster_adjunct.resources.bucketing.bucket_files import Generation


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
    engine = engine_of(context.spark)
    rows = engine.table.stored(context.lake.store, what, version.layout, plan.generations)
    ordered = version.order_by is not None and plan.level == "major"
    horizon = None
    if ordered and forget and manifest.declaration.keep_tombstones is not None:
        horizon = _horizon(manifest, engine.table.positions(rows)[1])
    forgotten = max((at for at in (manifest.horizon, horizon) if at is not None), default=None)
    observed: Callable[[], dict[str, int]] | None = None
    if ordered:
        rows, observed = engine.table.without_forgotten(rows, version.key, forgotten)
    generation, counters = write_generation(
        context.lake,
        attempt,
        plan.generations[-1].id,
        version.layout,
        rows,
        engine.writer,
        what=what,
        order_by=(*version.key, POSITION, GENERATION),
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
    table = engine_of(context.spark).table
    lowest, _ = table.positions(table.stored(context.lake.store, what, version.layout, generations))
    return lowest is not None and lowest <= horizon


def _horizon(manifest: UnboundedManifest, highest: int | None) -> int | None:
    """Return up to where deletions can be forgotten, None where they are kept for ever."""
    kept = manifest.declaration.keep_tombstones
    return None if kept is None or highest is None else highest - kept
