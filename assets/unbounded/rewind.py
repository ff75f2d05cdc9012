"""Startpoints on the stream of an unbounded dataset: its table rewound, or built anew.

What is served never gets older: a rewind applies all that the table had taken in from the startpoint on, in one commit.
The ids of startpoints are in the commit of their effect, so each is applied once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.advance_table import carry_out, compact, taken_up
from dagster_adjunct.assets.unbounded.apply_changes import apply_changes, apply_ranges
from dagster_adjunct.assets.unbounded.commit_table import Advance, AdvanceProgress
from dagster_adjunct.assets.unbounded.reapply_changes import Rewinding
from dagster_adjunct.assets.unbounded.recovery import decide
from dagster_adjunct.assets.unbounded.rewind_plan import (
    Force,
    Positions,
    RewindPlan,
    check_goes_back,
    decide_rewind,
    not_valid,
    open_startpoints,
)
from dagster_adjunct.assets.unbounded.table_report import report_of
from dagster_adjunct.assets.unbounded.table_validity import SeenTable, look
from dagster_adjunct.assets.versions.advance_report import OnStage, Stages, ignore
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.operator_actions import explained
from dagster_adjunct.assets.versions.unbounded_state import Decision
from dagster_adjunct.assets.writing.runtime import Runtime
from dagster_adjunct.resources.errors import CommitConflictError, DatasetError
from dagster_adjunct.resources.spark.given_session import starter_of
from dagster_adjunct.resources.spark.spark_errors import unwrapped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.advance_report import AdvanceReport
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


@unwrapped()
def rewind_dataset(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    spec: AdjunctDataset,
    spark: SparkSession | Callable[[], SparkSession],
    *,
    positions: Positions,
    reason: str,
    by: str,
    force: Force = False,
    on_stage: OnStage = ignore,
) -> AdvanceReport:
    """Apply changes of an unbounded dataset again, from these startpoints on, given by partition of its stream.

    `StartpointOldest` for every partition builds the table anew, beside the one that is served. All others apply again
    what lies between them and what the table has taken in: of each key that was changed since, the newest change counts
    by the declaration of now; other keys stay as they are. A startpoint that was applied already, by its id, does
    nothing. What has come since is for the next advance.

    Raises DatasetError, and changes nothing, where the table would lack changes or keep what is not true: for a
    startpoint after what is taken in, for a rebuild from a stream that does not tell of every key any more, for entries
    whose key an extractor computes, for changes that come too late. `force`, for all partitions or some, does it
    nevertheless. Also raises DatasetError for a bounded dataset and for a table that is not valid,
    OffsetOutOfRangeError for a startpoint that the stream does not hold, CommitConflictError when another writer was
    first, and what an advance raises.
    """
    runtime = Runtime(lake, systems, starter_of(spark), by)
    return rewind(runtime, spec, positions=positions, reason=reason, force=force, on_stage=on_stage)


@unwrapped()
def rewind(
    runtime: Runtime,
    spec: AdjunctDataset,
    *,
    positions: Positions,
    reason: str,
    force: Force = False,
    on_stage: OnStage = ignore,
) -> AdvanceReport:
    """Apply changes of an unbounded dataset again as `rewind_dataset` does."""
    check_goes_back(spec)
    explained("rewind", spec.name, reason, runtime.by)
    stages = Stages(spec.name, on_stage)
    try:
        return _rewind(runtime, spec, positions, reason, force, stages)
    except CommitConflictError:
        seen = look(runtime, spec)
        if open_startpoints(seen.manifest, positions):
            raise
        return _applied_before(runtime, seen, Stages(spec.name, on_stage))


def _rewind(
    context: Runtime, spec: AdjunctDataset, positions: Positions, reason: str, force: Force, stages: Stages
) -> AdvanceReport:
    with stages("collect"):
        seen = look(context, spec)
        rewind = decide_rewind(seen, positions, force)
        if rewind.action == "applied":
            return _applied_before(context, seen, stages)
        forced = force if isinstance(force, bool) else all(partition.ssp in force for partition in rewind.partitions)
        ids = {str(partition.ssp): positions[partition.ssp].id for partition in rewind.partitions}
        rebuilt = rewind.action == "rebuild"
        if rebuilt:
            _check(rewind)
        plan = decide(seen, rebuild=reason, forced=forced) if rebuilt else decide(seen)
    advance = Advance(context, seen, plan.decision, stages)
    if rebuilt:
        return carry_out(advance, plan, applied=ids)
    if seen.manifest is None or plan.decision.action != "continue":
        _check(rewind)
        raise not_valid(seen, plan.decision)
    progress = taken_up(advance, plan)
    if progress.running or progress.manifest.quarantining is not None:
        progress = _ended_what_was_begun(advance, progress)
        rewind = decide_rewind(replace(seen, manifest=progress.manifest), positions, force)
    _check(rewind)
    rewinding = Rewinding(rewind, ids, reason, forced)
    version = progress.manifest.version
    assert version is not None
    with Lease.acquire(context.lake, spec.name, [version.id], holder=f"rewind by {context.by}"):
        progress, _ = apply_ranges(advance, progress, rewinding.ranges, rewinding=rewinding)
    report = report_of(advance, compact(advance, progress), "rewound")
    again, skipped = (sum(getattr(partition, what) for partition in rewind.partitions) for what in ("again", "skipped"))
    note = f"{again:,} offsets of {len(rewind.partitions)} partition(s) applied again"
    return replace(report, note=note + (f", {skipped:,} passed over" if skipped else ""))


def _ended_what_was_begun(advance: Advance, progress: AdvanceProgress) -> AdvanceProgress:
    """Return where the table is once a bootstrap, or ranges with dead letters, that were begun are ended."""
    progress, action = apply_changes(advance, progress)
    if action == "waiting":
        raise DatasetError(
            f"dataset {advance.spec.name!r} can't be rewound: its bootstrap waits for transactions that have not "
            "ended.",
            "Advance it until it is bootstrapped, then ask again.",
            dataset=advance.spec.name,
        )
    return progress


def _applied_before(context: Runtime, seen: SeenTable, stages: Stages) -> AdvanceReport:
    assert seen.manifest is not None
    reason = "its startpoints were applied already"
    decision = Decision(action="continue", store="valid", reason=reason, at=seen.at)
    advance = Advance(context, seen, decision, stages)
    return replace(
        report_of(advance, AdvanceProgress(seen.commit, seen.manifest, seen.ends), "up-to-date"), note=reason
    )


def _check(plan: RewindPlan) -> None:
    if plan.refusal is not None:
        raise plan.refusal
