"""Startpoints on the stream of an unbounded dataset: its table rewound, or built anew.

What is served never gets older: a rewind applies all that the table had taken in from the startpoint on, in one commit.
The ids of startpoints are in the commit of their effect, so each is applied once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from dagster_adjunct.assets.unbounded.advance import Follower
from dagster_adjunct.assets.unbounded.reapply import Rewinding
from dagster_adjunct.assets.unbounded.rewind_plan import (
    Force,
    Positions,
    RewindPlan,
    decide_rewind,
    open_startpoints,
)
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.manifest import Decision
from dagster_adjunct.assets.versions.operator_actions import explained
from dagster_adjunct.assets.versions.report import OnStage, ignore
from dagster_adjunct.resources.errors import CommitConflictError, DatasetError
from dagster_adjunct.resources.spark.errors import unwrapped
from dagster_adjunct.resources.spark.given_session import starter_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.report import AdvanceReport
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.system import StreamSystem


def plan_rewind(
    lake: Lake, systems: Mapping[str, StreamSystem], spec: AdjunctDataset, *, positions: Positions, force: Force = False
) -> RewindPlan:
    """Return what `rewind_dataset` would do with these startpoints, or why it would refuse them; changes nothing.

    Raises DatasetError for a dataset that can't be rewound at all and for partitions that are not of its stream, and
    OffsetOutOfRangeError for a startpoint that the stream does not hold.
    """
    _check_kind(spec)
    work = Follower(lake, systems, spec, _no_session, "plan", None)
    work.look()
    plan = decide_rewind(work.source, work.found, positions, force)
    if plan.action != "rewind" or plan.refusal is not None:
        return plan
    decision = work.decide()
    return plan if decision.action == "continue" else replace(plan, refusal=_not_valid(spec, decision))


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
    spark = starter_of(spark)
    _check_kind(spec)
    explained("rewind", spec.name, reason, by)
    work = Follower(lake, systems, spec, spark, by, None, on_stage)
    try:
        return _rewind(work, positions, reason, force)
    except CommitConflictError:
        again = Follower(lake, systems, spec, spark, by, None, on_stage)
        again.look()
        if open_startpoints(again.found, positions):
            raise
        return _done_before(again)


def _rewind(work: Follower, positions: Positions, reason: str, force: Force) -> AdvanceReport:
    with work.stages("collect"):
        work.look()
        plan = decide_rewind(work.source, work.found, positions, force)
        if plan.action == "applied":
            return _done_before(work)
        forced = force if isinstance(force, bool) else all(each.ssp in force for each in plan.partitions)
        ids = {str(each.ssp): positions[each.ssp].id for each in plan.partitions}
        if plan.action == "rebuild":
            _check(plan)
            work.rebuild, work.applied, work.forced = reason, ids, forced
        decision = work.decide()
    if plan.action == "rebuild":
        return work.go_on()
    if work.found is None or decision.action != "continue":
        _check(plan)
        raise _not_valid(work.spec, decision)
    work.carry()
    work.manifest = work.found
    work.evolve()
    plan = _after_what_was_begun(work, plan, positions, force)
    _check(plan)
    work.rewinding = Rewinding(plan, ids, reason, forced)
    version = work.manifest.version
    assert version is not None
    with Lease.acquire(work.lake, work.spec.name, [version.id], holder=f"rewind by {work.by}"):
        work.apply(work.rewinding.ranges)
    work.rewinding = None
    work.compact()
    again, skipped = (sum(getattr(each, what) for each in plan.partitions) for what in ("again", "skipped"))
    told = f"{again:,} offsets of {len(plan.partitions)} partition(s) applied again"
    return replace(work.report("rewound"), note=told + (f", {skipped:,} passed over" if skipped else ""))


def _after_what_was_begun(work: Follower, plan: RewindPlan, positions: Positions, force: Force) -> RewindPlan:
    """Return the plan for the table once a bootstrap, or ranges with dead letters, that were begun are ended."""
    manifest = work.manifest
    assert manifest.bootstrap is not None
    if manifest.bootstrap.state == "done" and manifest.quarantining is None:
        return plan
    if work.follow() == "waiting":
        raise DatasetError(
            f"dataset {work.spec.name!r} can't be rewound: its bootstrap waits for transactions that have not ended.",
            "Advance it until it is bootstrapped, then ask again.",
        )
    return decide_rewind(work.source, work.manifest, positions, force)


def _done_before(work: Follower) -> AdvanceReport:
    assert work.found is not None
    work.manifest = work.found
    reason = "its startpoints were applied already"
    work.decision = Decision(action="continue", store="valid", reason=reason, at=work.looked)
    return replace(work.report("up-to-date"), note=reason)


def _check(plan: RewindPlan) -> None:
    if plan.refusal is not None:
        raise plan.refusal


def _check_kind(spec: AdjunctDataset) -> None:
    if spec.kind != "unbounded":
        raise DatasetError(
            f"dataset {spec.name!r} is bounded: what it goes back to are versions, and not positions of its stream.",
            f"Serve an earlier version: adjunct dataset rollback {spec.name} VERSION --reason …; or one that was "
            f"rejected: adjunct dataset force {spec.name} VERSION --reason …. Other content comes as a new version.",
        )
    if not spec.following.persistent:
        raise DatasetError(
            f"dataset {spec.name!r} is declared persistent=False: it lives for one run, and has no table to rewind.",
            "Run the application again: with bootstrap=True it reads the stream from its oldest offset in each run.",
        )


def _not_valid(spec: AdjunctDataset, decision: Decision) -> DatasetError:
    return DatasetError(
        f"dataset {spec.name!r} can't be rewound, for its table is not valid ({decision.reason}): the next advance "
        f"would {_INSTEAD[decision.action]}.",
        "Take the startpoints back and advance it, or ask for the oldest offset of every partition: it is built anew.",
    )


_INSTEAD = {
    "bootstrap": "build it anew",
    "create": "create it",
    "recreate": "empty it",
    "serve-stale": "leave it as it is",
}


def _no_session() -> NoReturn:
    raise AssertionError("a plan reads no records")
