"""Compaction: deltas into one, or all generations into a new base, beside commits and readers.

Plan, merge, switch: one compare-and-swap puts the output in the place of exactly its inputs. Deltas that were committed
meanwhile stay behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.compaction_plan import CompactionPlan, Level, plan_compaction, plan_state
from dagster_adjunct.assets.unbounded.compaction_report import CompactionReport
from dagster_adjunct.assets.unbounded.engine import engine_of
from dagster_adjunct.assets.unbounded.merge_generations import Merged, merge
from dagster_adjunct.assets.unbounded.next_served_version import retire
from dagster_adjunct.assets.versions.build_attempts import build_on_record
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.manifest import as_unbounded
from dagster_adjunct.assets.versions.sealed_version import SealedVersion, version_id
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.assets.writing.runtime import Runtime
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    DatasetError,
    DatasetNotFoundError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects.commit_log import retry_conflicts
from dagster_adjunct.resources.spark.given_session import starter_of
from dagster_adjunct.resources.spark.spark_errors import unwrapped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.declaration.following_changes import DeltaCompaction
    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.objects.lake import Lake

_TRIES = 20
_Current = tuple["Commit", "UnboundedManifest"]


@unwrapped()
def compact_dataset(
    lake: Lake,
    dataset_name: str,
    spark: SparkSession | Callable[[], SparkSession],
    *,
    by: str,
    level: Level | None = None,
    policy: DeltaCompaction | None = None,
) -> CompactionReport:
    """Compact an unbounded dataset; readers and commits go on meanwhile, and whoever reads a version keeps it.

    Without `level`, what the policy finds due: that which was declared at the last advance, unless `policy` is given.
    "minor" merges all deltas into one, "major" everything into a new base. `spark` is called only if there is
    something to do, and `by` stands in the commit. A table that is being rebuilt is compacted where it is served.
    Raises DatasetNotFoundError, and DatasetError for a bounded dataset.
    """
    context = Runtime(lake, {}, starter_of(spark), by)
    if level not in (None, "minor", "major"):
        raise ConfigurationError(
            f"dataset {dataset_name!r} is to be compacted at level {level!r}: expected minor or major.",
            "Choose one.",
            argument="level",
            dataset=dataset_name,
        )
    manifest = context.log(dataset_name).read()[1]
    if manifest is None:
        raise DatasetNotFoundError(
            f"dataset {dataset_name!r} has no commit in {lake.url}.", "Advance it a first time.", dataset=dataset_name
        )
    if not isinstance(manifest, UnboundedManifest):
        raise DatasetError(
            f"dataset {dataset_name!r} is bounded: each of its versions is one generation already.",
            "Only unbounded datasets have deltas to compact.",
            dataset=dataset_name,
        )
    return _compact(context, manifest, policy or manifest.declaration.compaction, level)[0]


def compact_due(context: Runtime, manifest: UnboundedManifest, policy: DeltaCompaction) -> _Current | None:
    """Compact what the policy finds due; return the commit and its manifest, None where nothing was compacted."""
    return _compact(context, manifest, policy, None)[1]


class _LateChanges(Exception):
    """Deltas committed meanwhile hold changes at or below the new horizon, which forgotten deletions should beat."""


def _compact(
    context: Runtime, manifest: UnboundedManifest, policy: DeltaCompaction, level: Level | None
) -> tuple[CompactionReport, _Current | None]:
    began = time.perf_counter()
    version = manifest.version
    if version is None:
        why = "there is no version to compact yet: its bootstrap is not finished"
        return CompactionReport(manifest.name, "nothing", why), None
    of_state = manifest.declaration.expires is not None and level is None
    plan = plan_state(version, policy) if of_state else plan_compaction(version, policy, level)
    if plan is None:
        return CompactionReport(manifest.name, "nothing", f"nothing to compact in {_told(version)}"), None
    # The inputs may be replaced, and then discarded, while they are read.
    try:
        with Lease.acquire(context.lake, manifest.name, [version.id], holder=f"compaction by {context.by}"):
            try:
                done = _merge_and_switch(context, manifest, plan, forget=True)
            except _LateChanges:
                done = _merge_and_switch(context, manifest, plan, forget=False)
    except VersionDiscardedError:  # before it could be leased: somebody compacted and discarded
        done = None
    if done is None:
        why = (
            "another writer replaced these generations first (a compaction, rebuild or erasure); nothing of this "
            f"{plan.level} compaction is left"
        )
        return CompactionReport(manifest.name, "superseded", why), None
    merged, (commit, after) = done
    assert after.version is not None
    report = CompactionReport(
        dataset=manifest.name,
        action="compacted",
        note=plan.reason,
        level=plan.level,
        version=after.version.id,
        generations=(len(version.generations), len(after.version.generations)),
        rows=(plan.rows, merged.generation.rows),
        bytes=(plan.size, merged.generation.size),
        counters=merged.counters,
        horizon=after.horizon,
        seconds=time.perf_counter() - began,
    )
    return report, (commit, after)


def _merge_and_switch(
    context: Runtime, manifest: UnboundedManifest, plan: CompactionPlan, *, forget: bool
) -> tuple[Merged, _Current] | None:
    name = manifest.name
    attempt = context.log(name).attempt()
    with build_on_record(context.lake, name, attempt.id, context.by):
        merged = merge(context, manifest, plan, attempt, forget=forget)
        current = _switch(context, manifest, plan, merged)
    return None if current is None else (merged, current)


def _switch(context: Runtime, manifest: UnboundedManifest, plan: CompactionPlan, merged: Merged) -> _Current | None:
    """Commit the output in the place of its inputs, whatever was appended; None where these are not there."""
    assert manifest.version is not None
    log, known = context.log(manifest.name), {generation.folder for generation in manifest.version.generations}

    def once() -> _Current | None:
        commit, current = log.read()
        fresh = None if current is None else as_unbounded(current)
        if commit is None or fresh is None or not _stand(fresh, plan, merged):
            return None
        if merged.horizon is not None and _appended_late(context, fresh, known, merged.horizon):
            raise _LateChanges
        after = _replaced(fresh, plan, merged, commit.number + 1, context.now())
        return log.commit(commit, after, by=context.by, commit_id=merged.attempt.id), after

    try:
        switched = retry_conflicts(lambda: once, attempts=_TRIES)
    except (CommitConflictError, _LateChanges):
        log.drop(merged.generation)
        raise
    if switched is None:
        log.drop(merged.generation)
    return switched


def _appended_late(context: Runtime, fresh: UnboundedManifest, known: set[str], horizon: int) -> bool:
    """Whether generations that were committed meanwhile have changes, or times of a history, at or below it."""
    version = fresh.version
    assert version is not None
    appended = [delta for delta in version.generations if delta.folder not in known and delta.files]
    if version.history is not None:
        ranges = (file.stats.get("range") for generation in appended for file in generation.files)
        return any(span[0] <= horizon for span in ranges if span)
    if not appended:
        return False
    what, table = f"dataset {fresh.name!r}, deltas committed meanwhile", engine_of(context.spark).table
    lowest, _ = table.positions(table.stored(context.lake.store, what, version.layout, appended))
    return lowest is not None and lowest <= horizon


def _stand(fresh: UnboundedManifest, plan: CompactionPlan, merged: Merged) -> bool:
    """Whether the manifest serves all inputs still, and nobody takes the output for garbage."""
    served = {generation.folder for generation in fresh.version.generations} if fresh.version else set()
    return plan.folders <= served and merged.generation.folder not in fresh.doomed


def _replaced(
    fresh: UnboundedManifest, plan: CompactionPlan, merged: Merged, number: int, now: datetime
) -> UnboundedManifest:
    """Return the manifest that serves the output instead of its inputs."""
    assert fresh.version is not None
    others = [other for other in fresh.version.generations if other.folder not in plan.folders and other.files]
    output = [merged.generation] if merged.generation.files or not others else []
    generations = tuple(sorted((*others, *output), key=lambda generation: generation.id))
    exact = plan.level == "major" and not others
    facts = {
        "id": version_id(number, merged.attempt.id),
        "number": number,
        "sealed_at": now,
        "generations": generations,
        "rows": merged.entries if exact else None,
        "counters": merged.counters,
    }
    if merged.pruned is not None and fresh.version.history is not None:
        facts["history"] = fresh.version.history.after(pruned=merged.pruned)
    version = fresh.version.after(**facts)
    horizon = max((at for at in (fresh.horizon, merged.horizon) if at is not None), default=None)
    change = Change(action="compact", version=version.id, reason=f"{plan.level}: {plan.reason}")
    return retire(fresh.after(horizon=horizon, change=change), version, now)


def _told(version: SealedVersion) -> str:
    deltas = len(version.generations) - 1
    return f"version {version.id}, which is a base {'alone' if not deltas else f'and {deltas} delta(s)'}"
