"""Compacts a table: merges deltas into one (minor), or all generations into a new base (major).

    minor   adjacent deltas -> one delta; keeps every tombstone
    major   base and deltas -> a new base; of a table ordered by offset it has no tombstones, of one
            ordered by a column those above the horizon

Readers and commits go on meanwhile. The plan is decided on the manifest alone. One compare-and-swap
replaces exactly the inputs with the output; deltas that were committed meanwhile stay on top of it.

Stored rows are those of a Spark frame, or with IN_PROCESS of an Arrow table. They have
`__position`, `__tombstone` and `__gen` next to their columns; of each key the row with the highest
(position, generation) wins.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dagster_adjunct.assets.declaration.change_values import STREAMED_FIRST
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.assets.generation import (
    ARROW,
    SPARK,
    Runtime,
    count_deletions,
    open_runtime,
    write_generation,
)
from dagster_adjunct.assets.reading.stored_file import list_generation_files, read_stored_file
from dagster_adjunct.assets.reading.superseded import is_mask_due, try_to_write_mask
from dagster_adjunct.assets.unbounded.commit import (
    next_version,
    strip_large_footers,
    switch_version,
)
from dagster_adjunct.assets.unbounded.ignored_changes import POSITIONS
from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog
from dagster_adjunct.assets.versions.leases import Lease, record_build
from dagster_adjunct.assets.versions.manifest import Change, UnboundedManifest, as_unbounded
from dagster_adjunct.assets.versions.version import (
    POSITION,
    SealedVersion,
    count_current_rows,
    find_newest_valid_from,
)
from dagster_adjunct.resources.arguments import resolve_user
from dagster_adjunct.resources.bucketing.files import (
    GENERATION_COLUMN,
    BucketLayout,
    Generation,
    TimelineOptions,
    bucketed_frame,
)
from dagster_adjunct.resources.bucketing.writer import WriteOptions
from dagster_adjunct.resources.errors import CommitConflictError, VersionDiscardedError
from dagster_adjunct.resources.lazy_modules import F, pa, pc
from dagster_adjunct.resources.objects.commit_log import Commit, retry_conflicts
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.schemas.schema import named_column
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.times import to_microseconds
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_log = logging.getLogger("adjunct.dataset")

Level = Literal["minor", "major"]
MIN_ROWS_FOR_MAJOR = 50_000
"""Readers merge deltas with fewer rows than this quickly, so only the number of deltas makes a
compaction due.
"""


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """The adjacent generations, oldest first, that one compaction merges, and why."""

    level: Level
    generations: tuple[Generation, ...]
    reason: str

    @property
    def rows(self) -> int:
        """The number of stored rows to read."""
        return sum(generation.rows for generation in self.generations)

    @property
    def size(self) -> int:
        """The number of bytes to read."""
        return sum(generation.size for generation in self.generations)

    @property
    def folders(self) -> frozenset[str]:
        """The folders that the output replaces."""
        return frozenset(generation.folder for generation in self.generations)


def plan_compaction(
    version: SealedVersion,
    policy: DeltaCompaction,
    level: Level | None = None,
    *,
    of_state: bool = False,
) -> CompactionPlan | None:
    """Return the generations to merge and why, or None if there is nothing to do.

    With `level`, these are all deltas ("minor") or all generations ("major"). Without it, they are
    what the policy makes due: a major compaction, else a minor one. A minor compaction takes the
    newest deltas, and older ones as long as they are not larger than those taken together, so that
    each row is rewritten a few times, however many commits there are. A state table (`of_state`)
    has no base, since a generation is dropped whole when its last row has expired: there the newest
    generations are due once there are too many.
    """
    generations = version.nonempty
    deltas = generations[1:]
    if of_state:
        return _plan_minor(generations, policy, "generations")
    if level == "minor":
        if len(deltas) > 1:
            return CompactionPlan("minor", deltas, "asked for")
        return None
    if level == "major":
        is_due = bool(deltas) or version.lacks_base
        if not is_due:
            return None
        return CompactionPlan("major", generations, "asked for")
    if not deltas:
        return None
    why = _reason_for_major(generations[0], deltas, policy)
    if why:
        return CompactionPlan("major", generations, why)
    return _plan_minor(deltas, policy, "deltas")


def _reason_for_major(
    base: Generation, deltas: Sequence[Generation], policy: DeltaCompaction
) -> str:
    """Return why the policy makes a major compaction due, "" if it does not."""
    changed = sum(delta.rows for delta in deltas)
    if changed > policy.rows:
        return f"the deltas hold {changed:,} rows, more than {policy.rows:,}"
    slow_down_reads = len(deltas) >= policy.deltas or changed >= MIN_ROWS_FOR_MAJOR
    if not slow_down_reads or changed <= policy.fraction * base.rows:
        return ""
    return (
        f"the deltas hold {changed:,} rows, more than {policy.fraction:.0%} of the base's"
        f" {base.rows:,}"
    )


def _plan_minor(
    generations: Sequence[Generation], policy: DeltaCompaction, noun: str
) -> CompactionPlan | None:
    """Return the plan to merge the newest of these generations; None if there are fewer than the
    policy's number of deltas. `noun` is what the reason calls them.
    """
    if len(generations) < policy.deltas:
        return None
    newest = tuple(_select_newest(generations, policy.deltas))
    return CompactionPlan("minor", newest, f"there are {len(generations)} {noun}")


def _select_newest(deltas: Sequence[Generation], limit: int) -> Sequence[Generation]:
    """Return the newest deltas to merge, oldest first: as many that fewer than `limit` are left,
    then older ones as long as they are not larger than those taken together.
    """
    taken = min(len(deltas), len(deltas) - limit + 2)  # merged, they are one delta
    rows = sum(delta.rows for delta in deltas[-taken:])
    while taken < len(deltas) and deltas[-taken - 1].rows <= rows:
        taken += 1
        rows += deltas[-taken].rows
    return deltas[-taken:]


class BeforeAfter(NamedTuple):
    """A number of what a compaction has merged, and that of what it has made."""

    before: int
    after: int


_NOTHING = BeforeAfter(0, 0)


@dataclass(frozen=True, slots=True)
class CompactionReport(Report):
    """What one compaction did.

    `action` is "compacted" (it made `version`, an id), "nothing" (nothing was due), or "superseded"
    (another compaction, a rebuild or an erasure replaced the inputs first, and nothing was
    changed); `note` says why. `generations` is the number that a reader merges, before and after;
    `rows` and `bytes` are those of the inputs and of the output. `counters` counts superseded rows
    and dropped tombstones. Tombstones up to `horizon`, a position or with history a time in
    microseconds, are no longer stored.
    """

    dataset: str
    action: Literal["compacted", "nothing", "superseded"]
    note: str
    level: Level | None = None
    version: str | None = None
    generations: BeforeAfter = _NOTHING
    rows: BeforeAfter = _NOTHING
    bytes: BeforeAfter = _NOTHING
    counters: dict[str, int] = field(default_factory=dict)
    horizon: int | None = None
    seconds: float = 0.0

    @property
    def changed(self) -> bool:
        """Whether a version was made."""
        return self.action == "compacted"

    def summary(self) -> str:
        """Return the outcome in one line, for logs."""
        if not self.changed:
            return f"dataset {self.dataset}: {self.note}"
        generations = self.generations
        rows = self.rows
        size = self.bytes
        return (
            f"dataset {self.dataset}: {self.level} compaction, version {self.version};"
            f" {generations.before} -> {generations.after} generations; {rows.before:,} ->"
            f" {rows.after:,} rows; {size.before:,} -> {size.after:,} bytes;"
            f" {self.seconds:.2f} s ({self.note})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return Report.to_json(self) | {"seconds": round(self.seconds, 3)}


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The output of one merge.

    Tombstones up to `horizon`, a position or with history a time in microseconds, were dropped;
    None if the horizon did not move. Rows that ended before the time `pruned`, in microseconds,
    were dropped too; None without such a limit.
    """

    attempt: Attempt
    generation: Generation
    counters: dict[str, int]
    horizon: int | None
    pruned: int | None = None


def read_generations(
    spark: Callable[[], SparkSession],
    store: ObjectStore,
    what: str,
    layout: BucketLayout,
    generations: Sequence[Generation],
) -> DataFrame | pa.Table:
    """Return all rows of these generations, with the column GENERATION_COLUMN: as a frame with
    bucket i in partition i, or as an Arrow table if `spark` is IN_PROCESS.

    `what` names the dataset in errors. Raises ManifestMismatchError for missing or damaged files.
    """
    if spark is IN_PROCESS:
        return _read_in_process(store, what, layout, generations)
    rows = bucketed_frame(spark(), store, what, layout, generations)
    has_one_bucket = not layout.bucket_by
    if has_one_bucket:
        # Spark does not read these files as buckets, so they may be in several partitions.
        return rows.coalesce(1)
    return rows


def _read_in_process(
    store: ObjectStore, what: str, layout: BucketLayout, generations: Sequence[Generation]
) -> pa.Table:
    """Return all rows of these generations as an Arrow table, with the column
    GENERATION_COLUMN.
    """
    empty = layout.arrow_schema().empty_table()
    tables = [empty.append_column(GENERATION_COLUMN, pa.array([], pa.int32()))]
    for generation in generations:
        for stored in list_generation_files(store, what, generation):
            table = read_stored_file(stored, layout)
            number = pa.repeat(pa.scalar(generation.id, pa.int32()), table.num_rows)
            tables.append(table.append_column(GENERATION_COLUMN, number))
    return pa.concat_tables(tables)


def _drop_expired(rows: DataFrame | pa.Table, manifest: UnboundedManifest) -> DataFrame | pa.Table:
    """Return the rows of a state table that have not expired by its watermark; all rows of any
    other table.
    """
    expires = manifest.declaration.expires
    watermark = None
    if manifest.written is not None:
        watermark = manifest.written.watermark
    if expires is None or watermark is None:
        return rows
    if isinstance(rows, pa.Table):
        times = rows.column(expires).cast("int64")
        return rows.filter(pc.greater(times, to_microseconds(watermark)))
    return rows.where(named_column(expires) > F.lit(watermark))


def merge_generations(
    context: Runtime,
    manifest: UnboundedManifest,
    plan: CompactionPlan,
    attempt: Attempt,
    *,
    forget: bool,
) -> MergeResult:
    """Merge the plan's generations into one with the number of the newest, so that the order of the
    others stays.

    `forget` moves the horizon of a table that is ordered by a column or has history, dropping more
    tombstones. With history, a new base stores when the validity of each row ends, and drops rows
    that ended before the history begins; tombstones older than twice its length are dropped if no
    other row of their key is left.
    """
    spark = context.spark_for(plan.rows)
    version = manifest.version
    assert version is not None
    what = f"dataset {manifest.name!r}, {plan.level} compaction"
    rows = read_generations(spark, context.lake.store, what, version.layout, plan.generations)
    if version.history is None:
        merge = _plan_merge(what, manifest, plan, forget=forget)
        rows = _drop_expired(rows, manifest)
    else:
        merge = _plan_history_merge(what, manifest, plan, version, forget=forget)
    generation, counters = write_generation(
        context.lake.store,
        attempt.generation(plan.generations[-1].id),
        version.layout,
        rows,
        ARROW if spark is IN_PROCESS else SPARK,
        merge.options,
        order_by=(POSITION, GENERATION_COLUMN),
        partitioned=True,
    )
    if version.history is None:
        horizon = merge.horizon
    else:  # the newest tombstone that was dropped, if any was
        horizon = counters.pop("forgotten_to", None)
    if merge.is_ordered:
        counters["deleted"] = counters.pop("forgotten", 0)  # dropped tombstones
        # A snapshot row is below any horizon, but not late: without a stored row of its key it is
        # the first one.
        if version.order_by == STREAMED_FIRST:
            horizon = None
    return MergeResult(attempt, strip_large_footers(generation), counters, horizon, merge.pruned_to)


@dataclass(frozen=True, slots=True)
class _Merge:
    """How generations are merged. `horizon` and `pruned_to` are `horizon` and `pruned` of the
    `MergeResult`; with history the horizon is known only once the tombstones are dropped.

    `is_ordered` says that the table is ordered by a column, so that a new base keeps the tombstones
    above a horizon.
    """

    options: WriteOptions
    horizon: int | None = None
    pruned_to: int | None = None
    is_ordered: bool = False


def _plan_merge(
    what: str, manifest: UnboundedManifest, plan: CompactionPlan, *, forget: bool
) -> _Merge:
    """Return how generations of a table without history are merged: a minor compaction keeps all
    tombstones, a major one none by offset, and those above the horizon if ordered by a column.
    """
    options = WriteOptions(what, range_of=manifest.declaration.expires)
    if plan.level != "major":
        return _Merge(options)
    if manifest.version is None or manifest.version.order_by is None:
        return _Merge(replace(options, drop_tombstones=True))
    horizon = None
    kept = manifest.declaration.keep_tombstones
    if forget and kept is not None:
        newest = max(span.highest for span in _list_ranges(plan.generations, POSITIONS))
        horizon = newest - kept
    limit = _highest(manifest.horizon, horizon)
    return _Merge(replace(options, forget_to=limit), horizon, is_ordered=True)


class _ValueRange(NamedTuple):
    """The lowest and the highest value of a file."""

    lowest: Any
    highest: Any


def _list_ranges(generations: Sequence[Generation], name: str) -> list[_ValueRange]:
    """Return the range of each file that has one under this name in its stats."""
    found = []
    for generation in generations:
        for file in generation.files:
            if name in file.stats:
                found.append(_ValueRange(*file.stats[name]))
    return found


def _plan_history_merge(
    what: str,
    manifest: UnboundedManifest,
    plan: CompactionPlan,
    version: SealedVersion,
    *,
    forget: bool,
) -> _Merge:
    """Return how generations of a table with history are merged: a minor compaction keeps all rows;
    for a major one see `merge_generations`.
    """
    history = version.history
    assert history is not None
    if plan.level != "major":
        return _Merge(WriteOptions(what, over_time=TimelineOptions()))
    newest = find_newest_valid_from(plan.generations)
    horizon = None
    if forget and newest is not None and history.kept is not None:
        horizon = newest - 2 * history.kept
    limit = _highest(manifest.horizon, horizon)
    edge = history.edge(newest)
    timeline = TimelineOptions(fills_ends=True, edge=edge, forget=limit, compared=version.compared)
    return _Merge(WriteOptions(what, over_time=timeline), pruned_to=edge)


def _highest(*positions: int | None) -> int | None:
    """Return the highest of these positions that are given, None if none is."""
    return max((position for position in positions if position is not None), default=None)


class CompactedTable(NamedTuple):
    """The commit of a compaction, and the manifest in it."""

    commit: Commit
    manifest: UnboundedManifest


class _Compaction(NamedTuple):
    """The report of a compaction, and the table after it, None if nothing was changed."""

    report: CompactionReport
    table: CompactedTable | None = None


@validated
@translate_spark_errors()
def compact_dataset(
    lake: Lake,
    dataset_name: str,
    *,
    spark: SparkSession | Callable[[], SparkSession] | None = None,
    by: str | None = None,
    level: Level | None = None,
    policy: DeltaCompaction | None = None,
) -> CompactionReport:
    """Compact an unbounded dataset while readers and commits go on.

    Without `level`, do what is due by `policy`, or else by the policy declared at the last advance.
    "minor" merges all deltas into one, "major" everything into a new base. `spark` is called only
    if there is something to do; without it, a session is used that is running, or one is started
    and ended here. The commit stores `by`. During a rebuild the served table is compacted. Raises
    DatasetNotFoundError, and DatasetError for a bounded dataset.
    """
    manifest = as_unbounded(DatasetLog(lake, dataset_name).require()[1])
    # No stream is read, so no systems are opened.
    with open_runtime([], lake=lake, systems={}, spark=spark, by=resolve_user(by)) as runtime:
        policy = policy or manifest.declaration.compaction
        report, table = _compact(runtime, manifest, policy, level)
    if table is None:
        return report
    version = table.manifest.version
    assert version is not None
    # The mask of the version before says nothing about this one. As after an advance, making a mask
    # may take no longer than the work that made the version.
    if is_mask_due(version, report.seconds):
        problem = try_to_write_mask(lake.store, dataset_name, version)
        if problem:
            _log.info("dataset %s: no mask after the compaction: %s", dataset_name, problem)
    return report


def compact_due(
    context: Runtime, manifest: UnboundedManifest, policy: DeltaCompaction
) -> CompactedTable | None:
    """Compact what is due by the policy; return the table after it, None where nothing was
    compacted.
    """
    return _compact(context, manifest, policy, None).table


class _LateChanges(Exception):
    """Raised where deltas that were committed meanwhile have changes at or below the new
    horizon.
    """


def _compact(
    context: Runtime, manifest: UnboundedManifest, policy: DeltaCompaction, level: Level | None
) -> _Compaction:
    """Do one compaction, if one is due (or possible, at a `level` that was asked for); the report
    says why not.

    If changes below the new horizon were committed meanwhile, it is done again without moving the
    horizon.
    """
    began = time.perf_counter()
    version = manifest.version
    if version is None:
        why = "there is no version to compact yet: its bootstrap is not finished"
        return _Compaction(CompactionReport(manifest.name, "nothing", why))
    of_state = manifest.declaration.expires is not None and level is None
    plan = plan_compaction(version, policy, level, of_state=of_state)
    if plan is None:
        deltas = len(version.generations) - 1
        beside = "1 delta" if deltas == 1 else f"{deltas or 'no'} deltas"
        why = f"nothing to compact in version {version.id}: it has a base and {beside}"
        return _Compaction(CompactionReport(manifest.name, "nothing", why))
    # The inputs may be replaced, and then discarded, while they are read.
    try:
        with Lease.acquire(
            context.lake, manifest.name, [version.id], holder=f"compaction by {context.by}"
        ):
            try:
                done = _merge_and_commit(context, manifest, plan, forget=True)
            except _LateChanges:
                done = _merge_and_commit(context, manifest, plan, forget=False)
    except VersionDiscardedError:  # compacted and discarded by others before it could be leased
        done = None
    if done is None:
        why = (
            "another writer replaced these generations first (a compaction, rebuild or erasure);"
            f" this {plan.level} compaction changed nothing"
        )
        return _Compaction(CompactionReport(manifest.name, "superseded", why))
    merged, table = done
    after = table.manifest
    assert after.version is not None
    report = CompactionReport(
        dataset=manifest.name,
        action="compacted",
        note=plan.reason,
        level=plan.level,
        version=after.version.id,
        generations=BeforeAfter(len(version.generations), len(after.version.generations)),
        rows=BeforeAfter(plan.rows, merged.generation.rows),
        bytes=BeforeAfter(plan.size, merged.generation.size),
        counters=merged.counters,
        horizon=after.horizon,
        seconds=time.perf_counter() - began,
    )
    return _Compaction(report, table)


class _CommittedMerge(NamedTuple):
    """A merge that was committed, and the table after it."""

    merged: MergeResult
    table: CompactedTable


def _merge_and_commit(
    context: Runtime, manifest: UnboundedManifest, plan: CompactionPlan, *, forget: bool
) -> _CommittedMerge | None:
    """Merge, and commit the output in place of its inputs, below deltas committed meanwhile.

    Returns None where another writer has replaced the inputs. Raises _LateChanges.
    """
    assert manifest.version is not None
    log = context.log(manifest.name)
    known = manifest.version.folders
    attempt = log.attempt()

    def commit_merged() -> CompactedTable | None:
        commit, current = log.read()
        if commit is None or current is None:  # the dataset was deleted
            return None
        fresh = as_unbounded(current)
        if fresh.version is None or not plan.folders <= fresh.version.folders:
            return None
        if merged.generation.folder in fresh.doomed:  # a discard took the output for garbage
            return None
        if merged.horizon is not None and _has_late_deltas(fresh.version, known, merged.horizon):
            raise _LateChanges
        made = next_version(commit, merged.attempt, context.now())
        after = _manifest_with_merged(fresh, plan, merged, made)
        commit = log.commit(commit, after, by=context.by, commit_id=merged.attempt.id)
        return CompactedTable(commit, after)

    with record_build(context.lake, manifest.name, attempt.id, context.by):
        merged = merge_generations(context, manifest, plan, attempt, forget=forget)
        try:
            table = retry_conflicts(lambda: commit_merged)
        except (CommitConflictError, _LateChanges):
            log.drop(merged.generation)
            raise
        if table is None:
            log.drop(merged.generation)
            return None
    return _CommittedMerge(merged, table)


def _has_late_deltas(version: SealedVersion, known: frozenset[str], horizon: int) -> bool:
    """Return whether deltas that were committed meanwhile, in folders that are not `known`, have
    positions, or with history times, at or below the horizon.
    """
    appended = [delta for delta in version.generations if delta.folder not in known]
    name = POSITIONS if version.history is None else "range"
    return any(span.lowest <= horizon for span in _list_ranges(appended, name))


def _manifest_with_merged(
    fresh: UnboundedManifest, plan: CompactionPlan, merged: MergeResult, made: dict[str, Any]
) -> UnboundedManifest:
    """Return the manifest `fresh` with the output in place of its inputs, in the version whose id,
    number and time are `made`.
    """
    assert fresh.version is not None
    generations = []
    for other in fresh.version.generations:
        if other.folder not in plan.folders and other.files:
            generations.append(other)
    if merged.generation.files or not generations:  # a version has at least one generation
        generations.append(merged.generation)
    history = fresh.version.history
    if merged.pruned is not None and history is not None:
        history = history.after(pruned=merged.pruned)
    rows = None  # only a merge would tell
    if plan.level == "major" and generations == [merged.generation]:
        base = merged.generation
        rows = base.rows - count_deletions(base) if history is None else count_current_rows(base)
    version = fresh.version.after(
        **made,
        generations=tuple(sorted(generations, key=lambda generation: generation.id)),
        rows=rows,
        counters=merged.counters,
        history=history,
    )
    horizon = _highest(fresh.horizon, merged.horizon)
    change = Change(action="compact", version=version.id, reason=f"{plan.level}: {plan.reason}")
    after = fresh.after(horizon=horizon, change=change)
    return switch_version(after, version, version.sealed_at)
