"""Generations of a table merged into one: the newest row of each key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.changes.change_order import STREAMED_FIRST
from dagster_adjunct.assets.unbounded.engine import engine_of
from dagster_adjunct.assets.unbounded.next_served_version import without_large_footers
from dagster_adjunct.assets.versions.kept_history import current_rows, newest_valid_from
from dagster_adjunct.assets.versions.sealed_version import POSITION
from dagster_adjunct.assets.writing.write_generation import write_generation
from dagster_adjunct.resources.bucketing.bucketed_tables import GENERATION
from dagster_adjunct.resources.bucketing.write_over_time import OverTimeWrite

if TYPE_CHECKING:
    from dagster_adjunct.assets.unbounded.compaction_plan import CompactionPlan
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.assets.versions.kept_history import KeptHistory
    from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.resources.bucketing.bucket_files import Generation


@dataclass(frozen=True, slots=True)
class Merged:
    """The output of one merge.

    `entries` are its rows that are no deletions and, over time, not over yet; None for a delta with history. `horizon`
    is what it forgets deletions up to, None where it forgets none of its own. `pruned` is the edge of the history that
    it has gone by, None where it went by none.
    """

    attempt: Attempt
    generation: Generation
    counters: dict[str, int]
    entries: int | None
    horizon: int | None
    pruned: int | None = None


def merge(
    context: Runtime, manifest: UnboundedManifest, plan: CompactionPlan, attempt: Attempt, *, forget: bool
) -> Merged:
    """Write what the generations of the plan come to, as the newest of them: its order to the others stays.

    `forget` lets a table by a column's order forget deletions further than it has yet.
    """
    version = manifest.version
    assert version is not None
    what = f"dataset {manifest.name!r}, {plan.level} compaction"
    engine = engine_of(context.spark)
    rows = engine.table.stored(context.lake.store, what, version.layout, plan.generations)
    if version.history is not None:
        return _over_time(context, manifest, plan, attempt, rows, version.history, forget=forget)
    ordered = version.order_by is not None and plan.level == "major"
    horizon = None
    kept = manifest.declaration.keep_tombstones
    if ordered and forget and kept is not None:
        highest = engine.table.positions(rows)[1]
        horizon = None if highest is None else highest - kept
    forgotten = max((at for at in (manifest.horizon, horizon) if at is not None), default=None)
    observed: Callable[[], dict[str, int]] | None = None
    if ordered:
        rows, observed = engine.table.without_forgotten(rows, version.key, forgotten)
    expires, written = manifest.declaration.expires, manifest.written
    if expires is not None and written is not None and written.watermark is not None:
        rows = engine.table.not_expired(rows, expires, written.watermark)
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
        range_of=expires,
    )
    tombstones = 0
    if observed is not None:
        counts = observed()
        tombstones = counts["tombstones"]
        counters |= {"superseded": plan.rows - counts["keys"], "deleted": counts["forgotten"]}
    counters.pop("conflicting", None)
    entries = generation.rows - tombstones
    # A snapshot's row of a key that is not known is no late change: it is the first that says of it.
    horizon = None if version.order_by == STREAMED_FIRST else horizon
    return Merged(attempt, without_large_footers(generation), counters, entries, horizon)


def _over_time(
    context: Runtime,
    manifest: UnboundedManifest,
    plan: CompactionPlan,
    attempt: Attempt,
    rows: object,
    history: KeptHistory,
    *,
    forget: bool,
) -> Merged:
    """Write rows over time: as a base each says where it ends, and what ended before the edge goes.

    Deletions are forgotten that are older than the history twice over, where nothing else is left of their key.
    """
    version = manifest.version
    assert version is not None
    newest, major = newest_valid_from(plan.generations), plan.level == "major"
    edge = history.edge(newest) if major else None
    limits = [manifest.horizon] if major else []
    if major and forget and newest is not None and history.kept is not None:
        limits.append(newest - 2 * history.kept)
    limit = max((at for at in limits if at is not None), default=None)
    generation, counters = write_generation(
        context.lake,
        attempt,
        plan.generations[-1].id,
        version.layout,
        rows,
        engine_of(context.spark).writer,
        what=f"dataset {manifest.name!r}, {plan.level} compaction",
        order_by=(*version.layout.key, POSITION, GENERATION),
        keep_tombstones=True,
        partitioned=True,
        over_time=OverTimeWrite(told=major, edge=edge, forget=limit),
    )
    counters.pop("conflicting", None)
    horizon = counters.pop("forgotten_to", None)
    entries = current_rows(generation) if major else None
    return Merged(attempt, without_large_footers(generation), counters, entries, horizon, edge)
