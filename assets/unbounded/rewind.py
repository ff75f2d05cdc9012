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

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.sources.entries import OpenedStream, Ranges, offsets_by_partition
from dagster_adjunct.assets.unbounded.advance import compact_if_due, execute_plan, resume_table
from dagster_adjunct.assets.unbounded.changes import apply_changes, apply_ranges
from dagster_adjunct.assets.unbounded.commit import Advance
from dagster_adjunct.assets.unbounded.progress import build_report
from dagster_adjunct.assets.unbounded.recovery import (
    TableSnapshot,
    inspect_table,
    order_change_error,
    plan_recovery,
    require_complete_stream,
    require_ordered_keys,
)
from dagster_adjunct.assets.versions.actions import require_audit_fields
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.manifest import Change, Decision, UnboundedManifest
from dagster_adjunct.assets.versions.reports import AdvanceReport, OnStage, Stages, ignore_stage
from dagster_adjunct.assets.writing.generation import Runtime, no_session, open_runtime
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.reports import Report
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

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class ActiveRewind:
    """A rewind in progress. `ids` are those of its startpoints, by partition.

    `forced` leaves out late changes, or sends them to the dead letters, instead of raising
    DatasetError.
    """

    plan: RewindPlan
    ids: dict[str, str]
    reason: str
    forced: bool

    @property
    def ranges(self) -> Ranges:
        """The ranges to read again."""
        rewound = (partition for partition in self.plan.partitions if partition.again)
        return {partition.ssp: (partition.start, str(partition.taken)) for partition in rewound}

    @property
    def identity(self) -> tuple[object, ...]:
        """The values that distinguish this rewind from others: its startpoints and ranges."""
        return sorted(self.ids.items()), sorted(
            (str(ssp), span) for ssp, span in self.ranges.items()
        )

    def record_in_manifest(
        self, after: UnboundedManifest, system: StreamSystem
    ) -> UnboundedManifest:
        """Return the manifest `after` the changes, with what this rewind did.

        It has applied its startpoints, has read from earlier offsets on, and has skipped to later
        ones.
        """
        bootstrap = after.bootstrap
        begins = dict(bootstrap.start)
        offsets = dict(after.offsets)
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


Positions = Mapping[SystemStreamPartition, Startpoint]
Force = bool | Collection[SystemStreamPartition]


@dataclass(frozen=True, slots=True)
class PartitionRewind:
    """The effect of a startpoint in one partition. The startpoint stands for the offset `start`.

    `taken` is the next offset that the table would read without it, None without a table. `again`
    counts the offsets to apply again (in a rebuild, to read), `skipped` those that would never be
    read.
    """

    ssp: SystemStreamPartition
    startpoint: str
    taken: str | None
    start: str
    again: int = 0
    skipped: int = 0

    def summary(self) -> str:
        """Return the effect in one line."""
        taken = "there is no table yet" if self.taken is None else f"read up to {self.taken}"
        counts = [f"{self.again:,} offsets again"] if self.again else []
        counts += [f"{self.skipped:,} offsets never"] if self.skipped else []
        at = f"{self.ssp}: {self.startpoint}: starts at {self.start}"
        return f"{at}, {taken}: {', '.join(counts) or 'nothing to apply'}"


@dataclass(frozen=True, slots=True)
class RewindPlan(Report):
    """The effect of startpoints on a dataset's table; the action "applied" says that all were
    applied before.

    `refusal` is the error with which a rewind would reject them, None if it would not. Late changes
    of a table that is ordered by a column are found only when they are read.
    """

    dataset: str
    action: Literal["rebuild", "rewind", "applied"]
    partitions: tuple[PartitionRewind, ...] = ()
    refusal: errors.DatasetError | None = None

    def summary(self) -> str:
        """Return the plan in a few lines, one a partition."""
        lines = [f"dataset {self.dataset}: {'refused' if self.refusal else self.action}"]
        lines += [f"  {partition.summary()}" for partition in self.partitions]
        return "\n".join([*lines, *([f"  {self.refusal}"] if self.refusal else [])])


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
    require_rewindable(spec)
    with open_runtime([spec], lake=lake, systems=systems, spark=no_session, by="plan") as runtime:
        snapshot = inspect_table(runtime, spec)
    plan = resolve_rewind(snapshot, positions, force)
    if plan.action != "rewind" or plan.refusal is not None:
        return plan
    decision = plan_recovery(snapshot).decision
    return (
        plan
        if decision.action == "continue"
        else replace(plan, refusal=not_continuable_error(snapshot, decision))
    )


def require_rewindable(spec: AdjunctDataset) -> None:
    """Raise DatasetError for a bounded dataset, and for one whose table is not stored."""
    if not spec.follows_changes:
        raise errors.DatasetError(
            f"dataset {spec.name!r} is bounded: it can return to earlier versions, not to positions"
            " of its stream.",
            f"Serve an earlier version: adjunct dataset rollback {spec.name} VERSION --reason …; or"
            f" one that was rejected: adjunct dataset accept {spec.name} VERSION --reason …."
            " Deliver other content as a new version.",
            dataset=spec.name,
        )
    if not spec.following.persistent:
        raise errors.DatasetError(
            f"dataset {spec.name!r} is declared persistent=False: it is built in each run, and has"
            " no table to rewind.",
            "Run the application again: with bootstrap=True it reads the stream from its oldest"
            " offset in each run.",
            dataset=spec.name,
        )


def resolve_rewind(snapshot: TableSnapshot, positions: Positions, force: Force) -> RewindPlan:
    """Return the effect of these startpoints on the table, without those that were applied before.

    Raises DatasetError for partitions of other streams, and OffsetOutOfRangeError for a startpoint
    that the stream does not hold.
    """
    source = snapshot.source
    manifest = snapshot.manifest
    spec = snapshot.spec
    foreign = sorted(set(positions) - set(source.ssps))
    if foreign or not positions:
        named = f"{foreign[0]} is none of them" if foreign else "no partition is named"
        problem = (
            f"dataset {spec.name!r} is made from {len(source.ssps)} partitions of {spec.input}, and"
            f" {named}."
        )
        raise errors.DatasetError(
            problem,
            f"Name partitions from {source.ssps[0]} to {source.ssps[-1]}.",
            dataset=spec.name,
        )
    pending = pending_startpoints(manifest, positions)
    if not pending:
        return RewindPlan(spec.name, "applied")
    forced = frozenset(pending if force is True else force or ())
    oldest = all(isinstance(startpoint, StartpointOldest) for startpoint in pending.values())
    partitions = tuple(_plan_partition(snapshot, ssp, pending[ssp]) for ssp in sorted(pending))
    if oldest and len(pending) == len(source.ssps):
        refusal = None
        try:
            require_ordered_keys(snapshot)
            if not forced >= set(source.ssps):
                require_complete_stream(
                    snapshot, "a startpoint at the oldest offset of every partition"
                )
        except errors.DatasetError as error:
            step = (
                f"{error.next_step} With force, the rebuild keeps only the keys that the stream"
                " still holds."
            )
            by_force = not isinstance(error, errors.KeyOrderError)
            refusal = error.reworded(error.problem, step) if by_force else error
        return RewindPlan(spec.name, "rebuild", partitions, refusal)
    return RewindPlan(
        spec.name,
        "rewind",
        partitions,
        _refusal_error(source, manifest, pending, partitions, forced),
    )


def pending_startpoints(
    manifest: UnboundedManifest | None, positions: Positions
) -> dict[SystemStreamPartition, Startpoint]:
    """Return the startpoints that the table has not applied yet."""
    return {
        ssp: startpoint
        for ssp, startpoint in positions.items()
        if manifest is None or not manifest.has_applied(str(ssp), startpoint.id)
    }


def _plan_partition(
    snapshot: TableSnapshot, ssp: SystemStreamPartition, startpoint: Startpoint
) -> PartitionRewind:
    system = snapshot.source.system
    name = snapshot.spec.name
    try:
        start = resolve_startpoint_to_offset(system, ssp, startpoint)
    except (errors.ConfigurationError, errors.OffsetOutOfRangeError) as error:
        raise error.reworded(f"dataset {name!r}: {error.problem}", error.next_step) from error
    manifest = snapshot.manifest
    taken = None
    if manifest is not None:  # during a bootstrap, as of its end
        running = manifest.bootstrap.state == "running"
        taken = offsets_by_partition(
            manifest.bootstrap.target if running else manifest.offsets
        ).get(ssp)
    end = snapshot.ends[ssp] if taken is None else taken
    later = system.compare(start, end) > 0
    return PartitionRewind(
        ssp,
        describe_startpoint(startpoint),
        taken,
        start,
        again=0 if later else system.distance(ssp, start, end),
        skipped=system.distance(ssp, end, start) if later else 0,
    )


def _refusal_error(
    source: OpenedStream,
    manifest: UnboundedManifest | None,
    positions: Positions,
    partitions: tuple[PartitionRewind, ...],
    forced: frozenset[SystemStreamPartition],
) -> errors.DatasetError | None:
    """Return the error that rejects these startpoints, or None. `forced` are the partitions with
    force.
    """
    spec = source.spec
    what = f"dataset {spec.name!r}"
    rebuild = f"adjunct dataset rebuild {spec.name} MODULE:APP --reason …"
    if manifest is None:
        step = (
            "Advance it once, or give startpoints at the oldest offset of every partition to"
            " build it."
        )
        return errors.DatasetError(f"{what} has no table yet to rewind.", step, dataset=spec.name)
    if manifest.version is not None and manifest.version.order_by != spec.following.order:
        return order_change_error(spec.name, manifest.version.order_by, spec.following.order)
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
    extractor = spec.extractor
    unforced = [rewind for rewind in partitions if rewind.again and rewind.ssp not in forced]
    if extractor is None or extractor.keeps(spec.key) or not unforced:
        return None
    problem = (
        f"{what}: its extractor computes the key ({', '.join(spec.key)}), so it is not known which"
        f" entries the changes of {unforced[0].ssp} from offset {unforced[0].start} on have made:"
        " entries that they no longer make would stay."
    )
    return errors.DatasetError(
        problem, f"Rebuild it: {rebuild}. With force, these entries stay.", dataset=spec.name
    )


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
    lake: Lake | None = None,
    systems: Mapping[str, StreamSystem] | None = None,
    spark: SparkSession | Callable[[], SparkSession] | None = None,
    positions: Positions,
    reason: str,
    by: str,
    force: Force = False,
    on_stage: OnStage = ignore_stage,
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
    with open_runtime([spec], lake=lake, systems=systems, spark=spark, by=by) as runtime:
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
    """Do what `rewind_dataset` does, with an open runtime."""
    require_rewindable(spec)
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
    spec: AdjunctDataset,
    positions: Positions,
    reason: str,
    force: Force,
    stages: Stages,
) -> AdvanceReport:
    with stages("collect"):
        snapshot = inspect_table(context, spec)
        rewind = resolve_rewind(snapshot, positions, force)
        if rewind.action == "applied":
            return _already_applied_report(context, snapshot, stages)
        forced = (
            force
            if isinstance(force, bool)
            else all(partition.ssp in force for partition in rewind.partitions)
        )
        ids = {str(partition.ssp): positions[partition.ssp].id for partition in rewind.partitions}
        rebuilt = rewind.action == "rebuild"
        if rebuilt:
            _raise_refusal(rewind)
        plan = (
            plan_recovery(snapshot, rebuild=reason, forced=forced)
            if rebuilt
            else plan_recovery(snapshot)
        )
    advance = Advance.of(context, snapshot, plan.decision, stages)
    if rebuilt:
        return execute_plan(advance, plan, applied=ids)
    if snapshot.manifest is None or plan.decision.action != "continue":
        _raise_refusal(rewind)
        raise not_continuable_error(snapshot, plan.decision)
    advance = resume_table(advance, plan)
    if advance.running or advance.manifest.quarantining is not None:
        advance, action = apply_changes(
            advance
        )  # a bootstrap, or ranges whose dead letters were being sent
        if action == "waiting":
            problem = (
                f"dataset {spec.name!r} can't be rewound: its bootstrap waits for unfinished"
                " transactions."
            )
            raise errors.DatasetError(
                problem, "Advance it until the bootstrap is done, then retry.", dataset=spec.name
            )
        rewind = resolve_rewind(replace(snapshot, manifest=advance.manifest), positions, force)
    _raise_refusal(rewind)
    rewinding = ActiveRewind(rewind, ids, reason, forced)
    version = advance.manifest.version
    assert version is not None
    with Lease.acquire(context.lake, spec.name, [version.id], holder=f"rewind by {context.by}"):
        advance, _ = apply_ranges(advance, rewinding.ranges, rewinding=rewinding)
    report = build_report(compact_if_due(advance), "rewound")
    again, skipped = (
        sum(getattr(partition, what) for partition in rewind.partitions)
        for what in ("again", "skipped")
    )
    note = f"{again:,} offsets of {len(rewind.partitions)} partition(s) applied again"
    return replace(report, note=note + (f", {skipped:,} skipped" if skipped else ""))


def _already_applied_report(
    context: Runtime, snapshot: TableSnapshot, stages: Stages
) -> AdvanceReport:
    reason = "its startpoints were applied before"
    decision = Decision(action="continue", store="valid", reason=reason, at=snapshot.at)
    advance = Advance.of(context, snapshot, decision, stages)
    return replace(build_report(advance, "up-to-date"), note=reason)


def _raise_refusal(plan: RewindPlan) -> None:
    if plan.refusal is not None:
        raise plan.refusal
