"""Rewinds or rebuilds the table of an unbounded dataset from startpoints on its stream.

    oldest, in every partition         the table is rebuilt
    earlier than the table's offset    [startpoint, offset) is applied again
    later, or upcoming                 the offsets in between are skipped: rejected, unless forced

The served data never gets older: a rewind applies all changes from the startpoint up to the table's
offset again, in one commit. That commit stores the ids of the startpoints, so each is applied once.

Rows carry positions, and of each key the highest (position, generation) wins, so a change that is
applied again replaces its earlier result and never a newer one. Two cases need more. Ordered by
offset, a later change of the key may no longer produce an entry; then an earlier one gets its
position. Ordered by a column, tombstones up to the horizon have been dropped, so changes below it
are late unless the table holds their key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Unpack

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    BoundedDataset,
    UnboundedDataset,
)
from dagster_adjunct.assets.generation import Runtime, RuntimeOptions, no_session, open_runtime
from dagster_adjunct.assets.sources.entries import (
    OpenedChanges,
    offsets_by_partition,
    require_changes,
)
from dagster_adjunct.assets.unbounded.advance import compact_if_due, execute_plan, resume_table
from dagster_adjunct.assets.unbounded.changes import apply_changes, apply_ranges
from dagster_adjunct.assets.unbounded.commit import Advance
from dagster_adjunct.assets.unbounded.progress import build_report
from dagster_adjunct.assets.unbounded.recovery import (
    TableSnapshot,
    inspect_table,
    order_change_error,
    order_named_now,
    plan_recovery,
    require_complete_stream,
    require_ordered_keys,
)
from dagster_adjunct.assets.unbounded.rewind_plan import ActiveRewind, PartitionRewind, RewindPlan
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.manifest import Decision, UnboundedManifest
from dagster_adjunct.assets.versions.reports import AdvanceReport, OnStage, Stages, ignore_stage
from dagster_adjunct.assets.versions.switches import require_audit_fields
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.streams.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointUpcoming,
    describe_startpoint,
    resolve_startpoint_to_offset,
)
from dagster_adjunct.resources.streams.system import StreamSystem, SystemStreamPartition
from dagster_adjunct.resources.validation import validated

Positions = Mapping[SystemStreamPartition, Startpoint]
Force = bool | Collection[SystemStreamPartition]


@validated
def plan_rewind(
    spec: AdjunctDataset,
    *,
    positions: Positions,
    force: Force = False,
    lake: Lake | None = None,
    systems: Mapping[str, StreamSystem] | None = None,
) -> RewindPlan:
    """Return what `rewind_dataset` would do with these startpoints, or why it would reject them;
    changes nothing.

    Raises DatasetError for a dataset that can't be rewound and for partitions of other streams, and
    OffsetOutOfRangeError for a startpoint that the stream does not hold.
    """
    spec = require_rewindable(spec)
    with open_runtime([spec], lake=lake, systems=systems, spark=no_session, by="plan") as runtime:
        snapshot = inspect_table(runtime, spec)
    plan = resolve_rewind(snapshot, positions, force)
    if plan.action != "rewind" or plan.refusal is not None:
        return plan
    decision = plan_recovery(snapshot).decision
    if decision.action == "continue":
        return plan
    return replace(plan, refusal=not_continuable_error(snapshot, decision))


def require_rewindable(spec: AdjunctDataset) -> UnboundedDataset:
    """Return the dataset, if it follows a change stream and its table is stored; else raise
    DatasetError.
    """
    if isinstance(spec, BoundedDataset):
        raise errors.DatasetError(
            f"dataset {spec.name!r} is bounded: it can return to earlier versions, not to positions"
            " of its stream.",
            f"Serve an earlier version: adjunct dataset rollback {spec.name} VERSION --reason …; or"
            f" one that was rejected: adjunct dataset accept {spec.name} VERSION --reason …."
            " Deliver other content as a new version.",
            dataset=spec.name,
        )
    if not spec.persistent:
        raise errors.DatasetError(
            f"dataset {spec.name!r} is declared persistent=False: it is built in each run, and has"
            " no table to rewind.",
            "Run the application again: with bootstrap=True it reads the stream from its oldest"
            " offset in each run.",
            dataset=spec.name,
        )
    return require_changes(spec)


def resolve_rewind(snapshot: TableSnapshot, positions: Positions, force: Force) -> RewindPlan:
    """Return the effect of these startpoints on the table, without those that were applied before.

    Startpoints at the oldest offset of all partitions rebuild it; any others rewind it. `force` is
    True, or the partitions in which a startpoint may have effects that are refused otherwise.
    Raises DatasetError for partitions of other streams, and OffsetOutOfRangeError for a startpoint
    that the stream does not hold.
    """
    source = snapshot.source
    manifest = snapshot.manifest
    spec = snapshot.spec
    foreign = sorted(set(positions) - set(source.ssps))
    if foreign or not positions:
        if foreign:
            problem = f"{foreign[0]} is none of them"
        else:
            problem = "no partition is named"
        raise errors.DatasetError(
            f"dataset {spec.name!r} is made from {len(source.ssps)} partitions of {spec.input}, and"
            f" {problem}.",
            f"Name partitions from {source.ssps[0]} to {source.ssps[-1]}.",
            dataset=spec.name,
        )
    pending = pending_startpoints(manifest, positions)
    if not pending:
        return RewindPlan(spec.name, "applied")
    forced = _forced_partitions(positions, force)
    partitions = tuple(_plan_partition(snapshot, ssp, pending[ssp]) for ssp in sorted(pending))
    are_oldest = all(isinstance(startpoint, StartpointOldest) for startpoint in pending.values())
    if are_oldest and pending.keys() == set(source.ssps):
        refusal = _rebuild_refusal(snapshot, forced=forced >= set(source.ssps))
        return RewindPlan(spec.name, "rebuild", partitions, refusal)
    refusal = _refusal_error(source, manifest, pending, partitions, forced)
    return RewindPlan(spec.name, "rewind", partitions, refusal)


def _forced_partitions(positions: Positions, force: Force) -> frozenset[SystemStreamPartition]:
    """Return the partitions that `force` names; True stands for all of `positions`, False for
    none.
    """
    return frozenset(positions if force is True else force or ())


def _rebuild_refusal(snapshot: TableSnapshot, *, forced: bool) -> errors.DatasetError | None:
    """Return the error that rejects a rebuild from startpoints, or None."""
    try:
        require_ordered_keys(snapshot)
        if not forced:
            require_complete_stream(
                snapshot, "a startpoint at the oldest offset of every partition"
            )
    except errors.KeyOrderError as error:
        return error
    except errors.DatasetError as error:
        step = (
            f"{error.next_step} With force, the rebuild keeps only the keys that the stream"
            " still holds."
        )
        return error.reworded(error.problem, step)
    return None


def pending_startpoints(
    manifest: UnboundedManifest | None, positions: Positions
) -> dict[SystemStreamPartition, Startpoint]:
    """Return the startpoints that the table has not applied yet."""
    found = {}
    for ssp, startpoint in positions.items():
        if manifest is None or not manifest.has_applied(str(ssp), startpoint.id):
            found[ssp] = startpoint
    return found


def _plan_partition(
    snapshot: TableSnapshot, ssp: SystemStreamPartition, startpoint: Startpoint
) -> PartitionRewind:
    """Return the effect of a startpoint in its partition. Raises OffsetOutOfRangeError and
    ConfigurationError for one that the stream does not hold.
    """
    system = snapshot.source.system
    name = snapshot.spec.name
    try:
        start = resolve_startpoint_to_offset(system, ssp, startpoint)
    except (errors.ConfigurationError, errors.OffsetOutOfRangeError) as error:
        raise error.reworded(f"dataset {name!r}: {error.problem}", error.next_step) from error
    manifest = snapshot.manifest
    taken = None
    if manifest is not None:
        if manifest.bootstrap.state == "running":  # as of its end
            read_to = manifest.bootstrap.target
        else:
            read_to = manifest.offsets
        taken = offsets_by_partition(read_to).get(ssp)
    end = taken or snapshot.ends[ssp]
    rewind = PartitionRewind(ssp, describe_startpoint(startpoint), taken, start)
    if system.compare(start, end) > 0:
        return replace(rewind, skipped=system.distance(ssp, end, start))
    return replace(rewind, again=system.distance(ssp, start, end))


def _refusal_error(
    source: OpenedChanges,
    manifest: UnboundedManifest | None,
    positions: Positions,
    partitions: tuple[PartitionRewind, ...],
    forced: frozenset[SystemStreamPartition],
) -> errors.DatasetError | None:
    """Return the error that rejects these startpoints, or None.

    They are rejected without a table, if its order has changed, and, except in partitions of
    `forced`, if they skip changes or apply changes again of which nobody knows the entries.
    """
    spec = source.spec
    what = f"dataset {spec.name!r}"
    if manifest is None:
        return errors.DatasetError(
            f"{what} has no table yet to rewind.",
            "Advance it once, or give startpoints at the oldest offset of every partition to"
            " build it.",
            dataset=spec.name,
        )
    version = manifest.version
    if version is not None and order_named_now(spec, version) != spec.following.order:
        return order_change_error(spec.name, version.order_by, spec.following.order)
    for partition in partitions:
        skips = partition.skipped or isinstance(positions[partition.ssp], StartpointUpcoming)
        if skips and partition.ssp not in forced:
            return errors.DatasetError(
                f"{what}: the startpoint of {partition.ssp} ({partition.startpoint}) is at offset"
                f" {partition.start}, and its table continues at {partition.taken}: it would skip"
                " the changes in between.",
                "Write a startpoint at or before that offset, or use force to skip changes on"
                " purpose.",
                dataset=spec.name,
            )
    keeps_key = spec.extractor is None or spec.extractor.keeps(spec.key_columns)
    if keeps_key:
        return None
    for partition in partitions:
        if partition.again and partition.ssp not in forced:
            return errors.DatasetError(
                f"{what}: its extractor computes the key ({', '.join(spec.key)}), so it is not"
                f" known which entries the changes of {partition.ssp} from offset"
                f" {partition.start} on have made: entries that they no longer make would stay.",
                f"Rebuild it: adjunct dataset rebuild {spec.name} MODULE:APP --reason …. With"
                " force, these entries stay.",
                dataset=spec.name,
            )
    return None


def not_continuable_error(snapshot: TableSnapshot, decision: Decision) -> errors.DatasetError:
    """Return the error for rewinding a table that the next advance would not continue."""
    spec = snapshot.spec
    return errors.DatasetError(
        f"dataset {spec.name!r} can't be rewound because its table is not valid"
        f" ({decision.reason}): the next advance would {_NEXT_ADVANCE[decision.action]}.",
        "Delete the startpoints and advance it, or give the oldest offset of every partition to"
        " rebuild it.",
        dataset=spec.name,
    )


_NEXT_ADVANCE = {
    "bootstrap": "rebuild it",
    "create": "create it",
    "recreate": "empty it",
    "serve-stale": "leave it as it is",
}


@validated
@translate_spark_errors()
def rewind_dataset(
    spec: AdjunctDataset,
    *,
    positions: Positions,
    reason: str,
    by: str,
    force: Force = False,
    on_stage: OnStage = ignore_stage,
    **where: Unpack[RuntimeOptions],
) -> AdvanceReport:
    """Apply changes of an unbounded dataset again from these startpoints on, given by partition of
    its stream.

    `StartpointOldest` for every partition rebuilds the table, next to the one that is served. Any
    other startpoint applies the changes between it and the table's offset again, by the current
    declaration; keys without a change there stay as they are. A startpoint whose id was applied
    before does nothing. Newer changes are left to the next advance.

    Raises DatasetError, and changes nothing, where the table would lack changes or keep wrong
    entries: for a startpoint after the table's offset, a rebuild from a stream that no longer holds
    every key, keys that an extractor computes, and late changes. `force`, for all partitions or
    some, overrides this. Also raises DatasetError for a bounded dataset and for a table that is not
    valid, OffsetOutOfRangeError for a startpoint that the stream does not hold, CommitConflictError
    when another writer committed first, and what an advance raises.
    """
    with open_runtime([spec], by=by, **where) as runtime:
        return rewind_table(
            runtime, spec, positions=positions, reason=reason, force=force, on_stage=on_stage
        )


@translate_spark_errors()
def rewind_table(
    runtime: Runtime,
    spec: AdjunctDataset,
    *,
    positions: Positions,
    reason: str,
    force: Force = False,
    on_stage: OnStage = ignore_stage,
) -> AdvanceReport:
    """Rewind a dataset as `rewind_dataset` does, with an open runtime. If another writer commits
    first, and has applied all startpoints, nothing is left to do.
    """
    spec = require_rewindable(spec)
    require_audit_fields("rewind", spec.name, reason, runtime.by)
    stages = Stages(spec.name, on_stage)
    try:
        return _rewind(runtime, spec, positions, reason, force, stages)
    except errors.CommitConflictError:
        snapshot = inspect_table(runtime, spec)
        if pending_startpoints(snapshot.manifest, positions):
            raise
        return _already_applied_report(runtime, snapshot, Stages(spec.name, on_stage))


def _rewind(
    context: Runtime,
    spec: UnboundedDataset,
    positions: Positions,
    reason: str,
    force: Force,
    stages: Stages,
) -> AdvanceReport:
    """Rewind the table as it is now, or rebuild it if the startpoints ask for that; do nothing if
    all were applied before. Raises CommitConflictError if another writer commits first.
    """
    with stages("collect"):
        snapshot = inspect_table(context, spec)
        rewind = resolve_rewind(snapshot, positions, force)
        if rewind.action == "applied":
            return _already_applied_report(context, snapshot, stages)
        rewound = {partition.ssp for partition in rewind.partitions}
        forced = _forced_partitions(positions, force) >= rewound
        ids = {str(ssp): positions[ssp].id for ssp in sorted(rewound)}
        rebuilds = rewind.action == "rebuild"
        if rebuilds:
            _raise_refusal(rewind)
            plan = plan_recovery(snapshot, rebuild=reason, forced=forced)
        else:
            plan = plan_recovery(snapshot)
    advance = Advance.of(context, snapshot, plan.decision, stages)
    if rebuilds:
        return execute_plan(advance, plan, applied=ids)
    if snapshot.manifest is None or plan.decision.action != "continue":
        _raise_refusal(rewind)
        raise not_continuable_error(snapshot, plan.decision)
    advance = resume_table(advance, plan)
    if not advance.manifest.is_settled:  # the table reads on first, so the effect is another one
        advance = _settle(advance)
        rewind = resolve_rewind(replace(snapshot, manifest=advance.manifest), positions, force)
    _raise_refusal(rewind)
    rewinding = ActiveRewind(rewind, ids, reason, forced)
    version = advance.manifest.version
    assert version is not None
    with Lease.acquire(context.lake, spec.name, [version.id], holder=f"rewind by {context.by}"):
        advance = apply_ranges(advance, rewinding.ranges, rewinding=rewinding).advance
    report = build_report(compact_if_due(advance), "rewound")
    again = sum(partition.again for partition in rewind.partitions)
    skipped = sum(partition.skipped for partition in rewind.partitions)
    note = f"{again:,} offsets of {len(rewind.partitions)} partition(s) applied again"
    if skipped:
        note += f", {skipped:,} skipped"
    return replace(report, note=note)


def _settle(advance: Advance) -> Advance:
    """Finish a bootstrap, and the ranges whose dead letters were being sent. Raises DatasetError
    for a bootstrap that waits for transactions.
    """
    advance, action = apply_changes(advance)
    if action == "waiting":
        name = advance.spec.name
        raise errors.DatasetError(
            f"dataset {name!r} can't be rewound: its bootstrap waits for unfinished transactions.",
            "Advance it until the bootstrap is done, then retry.",
            dataset=name,
        )
    return advance


def _already_applied_report(
    context: Runtime, snapshot: TableSnapshot, stages: Stages
) -> AdvanceReport:
    """Return the report of a rewind that had nothing to do."""
    reason = "its startpoints were applied before"
    decision = Decision(action="continue", store="valid", reason=reason, at=snapshot.at)
    advance = Advance.of(context, snapshot, decision, stages)
    return replace(build_report(advance, "up-to-date"), note=reason)


def _raise_refusal(plan: RewindPlan) -> None:
    """Raise the error with which the plan rejects its startpoints, if it does."""
    if plan.refusal is not None:
        raise plan.refusal
