"""Applies changes in [offset, upcoming): each chunk becomes one delta and one commit.

    read -> decode -> reject late changes (a rewind places them instead) -> check validators
         -> reject bad changes, or set them aside
         -> complete and write -> send what was set aside to the dead letters -> commit

The cost of a commit depends on its changes, not on the size of the table, because readers merge
base and deltas. The chunks of a bootstrap become generations of the new table, which is built next
to the one that is served.

Changes are rows of a Spark frame, or with IN_PROCESS of an Arrow table, with all of them in memory.
Both have the columns of the entries, those of META, `__position`, and PROBLEM: why a change can't
be applied. They build the same tables from the same streams; tests run random histories through
both.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.assets.declaration.change_formats import PROBLEM, ArrowChangeFormat
from dagster_adjunct.assets.declaration.change_values import Samples
from dagster_adjunct.assets.declaration.dataset import UnboundedDataset
from dagster_adjunct.assets.generation import (
    ARROW,
    SPARK,
    GenerationWriter,
    count_deletions,
    write_generation,
)
from dagster_adjunct.assets.sources import changes as decoding
from dagster_adjunct.assets.sources.entries import (
    OpenedChanges,
    Ranges,
    derive_entry_schema,
    derive_row_schema,
    list_spark_needs,
    offsets_to_json,
    raise_if_spark_needed,
)
from dagster_adjunct.assets.sources.json_records import find_fractions
from dagster_adjunct.assets.sources.order_samples import find_order_samples
from dagster_adjunct.assets.unbounded import commit
from dagster_adjunct.assets.unbounded.change_times import (
    NO_TIMES,
    MeasuredTimes,
    list_partitions_read,
    observe_times,
)
from dagster_adjunct.assets.unbounded.commit import Advance
from dagster_adjunct.assets.unbounded.complete_rows import RowCompletion, SetAsideChange
from dagster_adjunct.assets.unbounded.dead_letters import (
    build_dead_letters,
    dead_letter_producer,
    send_dead_letters,
)
from dagster_adjunct.assets.unbounded.ignored_changes import (
    NOTHING_IGNORED,
    IgnoredChanges,
    count_ignored,
    find_older_changes,
)
from dagster_adjunct.assets.unbounded.progress import bootstrap_progress
from dagster_adjunct.assets.unbounded.row_rules import (
    Findings,
    add_findings,
    check_rows,
    list_row_rules,
    list_rule_spark_needs,
    needs_spark_error,
)
from dagster_adjunct.assets.unbounded.suspicious_values import find_suspicious_values
from dagster_adjunct.assets.unbounded.tied_changes import find_tie_rule
from dagster_adjunct.assets.versions.dataset_log import Attempt
from dagster_adjunct.assets.versions.leases import lease_served, record_build
from dagster_adjunct.assets.versions.manifest import Change, UnboundedManifest, WatermarkState
from dagster_adjunct.assets.versions.reports import Action
from dagster_adjunct.assets.versions.version import POSITION, find_newest_valid_from
from dagster_adjunct.assets.versions.watermark import after_changes, after_late, passed_marks
from dagster_adjunct.resources.bucketing.files import (
    VALID_FROM,
    BucketFile,
    Generation,
    TimelineOptions,
)
from dagster_adjunct.resources.bucketing.writer import WriteOptions
from dagster_adjunct.resources.errors import CommitConflictError, DatasetError
from dagster_adjunct.resources.lazy_modules import F, pa, pc
from dagster_adjunct.resources.reports import sum_counters
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.spark.tuning import interpret_small_plans
from dagster_adjunct.resources.sql.arrow_kernels import NeedsSpark
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.assets.unbounded.rewind_plan import ActiveRewind


def list_change_spark_needs(source: OpenedChanges) -> list[str]:
    """Return, in words, why this table's changes can't be applied without Spark; empty if they can.

    These are the needs of reading its stream, and those that `list_format_spark_needs` lists.
    """
    return [*list_spark_needs(source), *list_format_spark_needs(source.spec, source.records)]


def list_format_spark_needs(spec: UnboundedDataset, records: Schema) -> list[str]:
    """Return, in words, why changes in records with these columns can't be decoded and checked
    without Spark; empty if they can.

    Their format has to be an ArrowChangeFormat. Dead letters hold the record as JSON, in which only
    Spark writes fractions.
    """
    needed = []
    if not isinstance(spec.following.changes, ArrowChangeFormat):
        needed.append(f"the form of its changes ({spec.following.changes.describe()})")
    fractions = find_fractions(records)
    if spec.dead_letters is not None and fractions is not None:
        needed.append(f"dead letters of records with fractions ({fractions})")
    if spec.validators:
        columns = derive_entry_schema(spec, derive_row_schema(spec, records))
        needed += list_rule_spark_needs(list_row_rules(spec, columns), columns)
    return needed


def check_spark_needs(source: OpenedChanges) -> None:
    """Raise ConfigurationError for a table that can't be advanced without Spark."""
    initial = source.spec.following.initial
    needed = list_change_spark_needs(source)
    if initial is not None:
        needed.append(f"its bulk snapshot ({initial.describe()})")
    raise_if_spark_needed(source.spec, needed)


def read_changes(
    source: OpenedChanges,
    ranges: Ranges,
    spark: Callable[[], SparkSession],
    samples: Samples | None,
    positions_from: int = 0,
) -> DataFrame | pa.Table:
    """Return the changes made from the records of these ranges.

    By offset, a change's position is its offset plus `positions_from`. `samples` are the first
    values of the ordering columns, None if they are not known or needed.
    """
    if spark is IN_PROCESS:
        records = source.read_arrow(ranges)
        return decoding.decode_arrow_changes(source, records, positions_from, samples)
    return decoding.decode_changes(source, source.read(spark(), ranges), positions_from, samples)


class KeptChanges(NamedTuple):
    """Changes, and a function that returns how many late ones were left out, once the changes are
    written; None if none are left out, because late changes have a problem.
    """

    changes: DataFrame | pa.Table
    count_late: Callable[[], int] | None


def drop_late(changes: DataFrame | pa.Table, horizon: int, *, set_aside: bool) -> KeptChanges:
    """Return the changes without late ones; with `set_aside`, these stay and get a problem.

    A change is late at or below the horizon, a position, or with history a time in microseconds: it
    may be older than a deletion that is no longer stored, so it can't be applied.
    """
    if isinstance(changes, pa.Table):
        return _drop_late_in_table(changes, horizon, set_aside=set_aside)
    from pyspark.sql import Observation

    over_time = VALID_FROM in changes.columns
    place = F.unix_micros(VALID_FROM) if over_time else F.col(POSITION)
    # A row without a time gets a problem of its own.
    is_late = F.coalesce(place <= F.lit(horizon), F.lit(False))
    if set_aside:
        reason = F.lit(decoding.late_change_reason(horizon, over_time))
        problem = F.coalesce(F.col(PROBLEM), F.when(is_late, reason))
        return KeptChanges(changes.withColumn(PROBLEM, problem), None)
    observed = Observation()
    late = F.coalesce(F.sum(is_late.cast("long")), F.lit(0)).alias("late")
    kept = changes.observe(observed, late).where(~is_late | F.col(PROBLEM).isNotNull())
    return KeptChanges(kept, lambda: int(observed.get["late"]))


def _drop_late_in_table(changes: pa.Table, horizon: int, *, set_aside: bool) -> KeptChanges:
    """Return the changes of an Arrow table without late ones; with `set_aside`, these stay and get
    a problem. See `drop_late`.
    """
    over_time = VALID_FROM in changes.column_names
    places = changes.column(VALID_FROM).cast("int64") if over_time else changes.column(POSITION)
    # A row without a time gets a problem of its own.
    is_late = pc.fill_null(pc.less_equal(places, horizon), False)
    if set_aside:
        reason = decoding.late_change_reason(horizon, over_time)
        reasons = pc.if_else(is_late, reason, pa.scalar(None, pa.string()))
        return KeptChanges(decoding.add_problems(changes, reasons.to_pylist()), None)
    count = int(pc.sum(is_late).as_py() or 0)
    is_kept = pc.or_(pc.invert(is_late), pc.is_valid(changes.column(PROBLEM)))
    return KeptChanges(changes.filter(is_kept), lambda: count)


def select_applicable(
    changes: DataFrame | pa.Table, dataset: str, *, set_aside: bool
) -> DataFrame | pa.Table:
    """Return the changes without problems.

    A change with a problem raises BadChangeError, at once or when the frame is written, unless such
    changes are set aside.
    """
    if isinstance(changes, pa.Table):
        bad = changes.filter(pc.is_valid(changes.column(PROBLEM)))
        if bad.num_rows and not set_aside:
            (first,) = bad.select([OFFSET, PARTITION, PROBLEM]).slice(0, 1).to_pylist()
            raise decoding.bad_change_error(
                dataset, first[OFFSET], first[PARTITION], first[PROBLEM]
            )
        good = changes.filter(pc.is_null(changes.column(PROBLEM)))
        names = [name for name in good.column_names if name not in (PROBLEM, decoding.RAW)]
        return good.select(names)
    if not set_aside:
        return decoding.fail_on_problems(changes, dataset)
    return changes.where(F.col(PROBLEM).isNull()).drop(PROBLEM, decoding.RAW)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The changes that one commit applies.

    `reached` says that with them a bootstrap has reached its target; `rewinding` is the rewind that
    applies them again.
    """

    attempt: Attempt
    ranges: Ranges
    reached: bool
    rewinding: ActiveRewind | None


@dataclass(frozen=True, slots=True)
class _WrittenChanges:
    """Changes that were written as one generation, and not yet committed.

    `advance` is the one to continue with: if the ranges had to be committed before their dead
    letters were sent, it is the one after that commit. `samples` are the first values of the
    ordering columns. `times` are those of the changes, if the dataset has a watermark. `findings`
    are those of the validators.
    """

    advance: Advance
    generation: Generation
    counters: dict[str, int]
    samples: Samples | None
    times: MeasuredTimes = NO_TIMES
    findings: Findings = ()


@dataclass(frozen=True, slots=True)
class _WritePlan:
    """How the changes of some ranges become one generation.

    Changes at or below `late_from`, a position or a time, are late: they may be older than
    deletions that are no longer stored. None if none is late. `replaced_from` is the position up to
    which changes that a rewind applies again may be late: they are if nothing of their key is
    stored. None if none of them is.
    """

    options: WriteOptions
    order_by: tuple[str, ...]
    late_from: int | None
    replaced_from: int | None


def _plan_write(advance: Advance, *, again: bool) -> _WritePlan:
    """Return how changes are written; `again` says that a rewind applies them once more."""
    spec = advance.spec
    following = spec.following
    stored = target_generations(advance)
    begins = not any(generation.files for generation in stored)
    replaced_from = None
    if again and following.order is not None and not spec.over_time:
        replaced_from = advance.manifest.horizon
    options = WriteOptions(
        f"dataset {spec.name!r}", completion=_plan_completion(advance, again, replaced_from)
    )
    if spec.over_time:  # a base stores where the validity of a row ends
        newest = find_newest_valid_from(() if advance.running else stored)
        options = replace(options, over_time=TimelineOptions(fills_ends=begins, newest=newest))
    elif begins and following.order is None:
        # Ordered by a column, a deletion also wins against later changes with a lower value, so a
        # base keeps it too.
        options = replace(options, drop_tombstones=True)
    late_from = None
    # A table that is being built has dropped no tombstones yet.
    if not advance.running and (spec.over_time or not again):
        late_from = _find_latest_gap(advance)
    order_by: tuple[str, ...]
    if following.order_by is None and not again:  # positions are offsets; a rewind raises them
        order_by = (POSITION,)
    else:
        order_by = (POSITION, OFFSET, PARTITION)
    return _WritePlan(options, order_by, late_from, replaced_from)


def _find_latest_gap(advance: Advance) -> int | None:
    """Return the position, or with a history the time in microseconds, up to which changes can't be
    applied; None if all can.

    Up to the horizon, deletions were dropped. Where columns are merged in a history, a change also
    needs the rows before it, so it can't be from before the time up to which rows were pruned.
    """
    manifest = advance.manifest
    version = manifest.version
    gaps = []
    if manifest.horizon is not None:
        gaps.append(manifest.horizon)
    is_merged = advance.spec.over_time and advance.spec.following.merges_columns
    if is_merged and version is not None and version.history is not None:
        pruned = version.history.pruned
        if pruned is not None:
            gaps.append(pruned - 1)
    return max(gaps, default=None)


def _plan_completion(
    advance: Advance, again: bool, replaced_from: int | None
) -> RowCompletion | None:
    """Return how the changes are completed from stored rows, None where they need none.

    They need them to find ties, to take the columns that they leave out, and in a rewind to raise
    positions or to find late changes. `again` and `replaced_from` are as in `_plan_write`.
    """
    spec = advance.spec
    by_offset = spec.following.order is None
    layout = commit.table_layout(advance.source, advance.names)
    ties = find_tie_rule(advance.source, layout)
    moves_rows = again and (by_offset or replaced_from is not None)
    reads_rows = ties is not None or spec.following.reads_rows or moves_rows
    if not reads_rows:
        return None
    return RowCompletion(
        dataset=spec.name,
        layout=layout,
        generations=target_generations(advance),
        by_offset=by_offset,
        set_aside=spec.dead_letters is not None,
        again=again,
        horizon=replaced_from,
        ties=ties,
        groups=advance.source.stored_groups,
    )


class _ChangeWriter:
    """Writes files, and moves from their stats to itself what manifests, which store stats and
    footers, should not have: the changes that were refused while they were written, the number of
    `late` changes and, where there are any (`counted`), those `of_others`, and the rows that were
    `carried` or are `held` (see `Merged`).
    """

    def __init__(self, write: GenerationWriter) -> None:
        self._write = write
        self.refused: list[SetAsideChange] = []
        self.late = 0
        self.counted: Counter[str] = Counter()

    def __call__(self, *rows_and_place: Any, **how: Any) -> list[BucketFile]:
        return list(map(self._take_stats, self._write(*rows_and_place, **how)))

    def _take_stats(self, file: BucketFile) -> BucketFile:
        """Return a written file without these stats, after adding them to those of the writer."""
        stats = dict(file.stats)
        self.late += stats.pop("late", 0)
        for name in ("carried", "held", "of_others"):
            number = stats.pop(name, 0)
            if number:
                self.counted[name] += number
        if "incomplete" not in stats:
            return replace(file, stats=stats)
        self.refused += [SetAsideChange(*change) for change in stats.pop("incomplete")]
        return replace(file, stats=stats, footer=None)  # the footer has the same list


def _write_changes(
    advance: Advance, chunk: _Chunk, spark: Callable[[], SparkSession]
) -> _WrittenChanges:
    """Write the changes of the chunk as one generation, and send those that were set aside.

    Raises BadChangeError and NullKeyError for changes that can't be applied, and DatasetError for
    late ones in a rewind without force, after which the files are dropped.
    """
    spec = advance.spec
    source = advance.source
    manifest = advance.manifest
    rewinding = chunk.rewinding
    again = rewinding is not None
    set_aside = spec.dead_letters is not None
    plan = _plan_write(advance, again=again)
    reached = commit.offsets_after(advance, chunk.ranges)
    not_read_yet = {ssp: (offset, advance.ends[ssp]) for ssp, offset in reached.items()}
    samples = find_order_samples(source, chunk.ranges, spark, manifest.first_ordered, not_read_yet)
    changes = read_changes(source, chunk.ranges, spark, samples, manifest.positions_from)
    timed = observe_times(changes, spec, manifest)
    changes = timed.changes
    count_late = None
    if plan.late_from is not None:
        changes, count_late = drop_late(changes, plan.late_from, set_aside=set_aside)
    rules = list_row_rules(spec, source.schema)
    checked = check_rows(changes, spec, rules, source.schema)
    changes = checked.rows
    writer = _ChangeWriter(ARROW if spark is IN_PROCESS else SPARK)
    generation, counters = write_generation(
        advance.context.lake.store,
        chunk.attempt.generation(manifest.next_generation),
        commit.table_layout(source, advance.names),
        select_applicable(changes, spec.name, set_aside=set_aside),
        writer,
        plan.options,
        order_by=plan.order_by,
        partitioned=source.copartitioned and not again,
    )
    if rewinding is not None and writer.late and not rewinding.forced:
        advance.log.drop(generation)
        raise _forgotten_deletions_error(spec.name, writer.late, plan.replaced_from)
    counters |= writer.counted
    letters = None
    if set_aside:
        letters = build_dead_letters(changes, spec, writer.refused)
    if letters is not None:
        sent = _set_aside(advance, chunk, letters, sorted(writer.refused), generation)
        advance = sent.advance
        counters["quarantined"] = sent.letters
    if count_late is not None:
        counters["late"] = count_late()
    elif plan.replaced_from is not None and not set_aside:  # else they are among the dead letters
        counters["late"] = writer.late
    return _WrittenChanges(
        advance, generation, counters, samples, timed.read_times(), checked.read_findings()
    )


def _forgotten_deletions_error(dataset: str, late: int, horizon: int | None) -> DatasetError:
    """Return the error for changes that a rewind can't apply again: whether their keys were deleted
    is no longer known.
    """
    return DatasetError(
        f"dataset {dataset!r}: {late:,} of the changes can't be applied again, because"
        " the dataset has no entries with their keys. The keys may have been deleted:"
        f" deletions up to position {horizon} are no longer stored, and these changes are not"
        " newer.",
        f"Rebuild it: adjunct dataset rebuild {dataset} MODULE:APP --reason …. With force,"
        " these changes are set aside as late.",
        dataset=dataset,
    )


class _SentLetters(NamedTuple):
    """The advance after the commit before dead letters, and how many of these were sent."""

    advance: Advance
    letters: int


def _set_aside(
    advance: Advance,
    chunk: _Chunk,
    letters: DataFrame | pa.Table,
    refused: Sequence[SetAsideChange],
    generation: Generation,
) -> _SentLetters:
    """Commit the ranges of the chunk, then send its dead letters.

    If another writer commits first, the generation that was written is dropped. `refused` are the
    changes that were refused while they were written.
    """
    try:
        advance = _commit_before_letters(advance, chunk)
        return _SentLetters(advance, _send_letters(advance, chunk, letters, refused))
    except CommitConflictError:
        advance.log.drop(generation)
        raise


def _commit_before_letters(advance: Advance, chunk: _Chunk) -> Advance:
    """Commit the ranges whose dead letters are about to be sent, unless they are committed already.

    A run that takes over then sends the same letters again, which adds nothing. A rewind commits
    nothing here: repeated, it reads the same ranges anyway.
    """
    is_committed = advance.manifest.quarantining is not None
    if chunk.rewinding is not None or is_committed:
        return advance
    spans = {str(ssp): span for ssp, span in chunk.ranges.items()}
    return commit.commit_fields(advance, quarantining=spans, change=Change(action="quarantine"))


def _send_letters(
    advance: Advance, chunk: _Chunk, letters: Any, refused: Sequence[SetAsideChange]
) -> int:
    """Send the dead letters of the chunk once; return their number.

    Their sequence number grows with the offsets read, so that later chunks have higher ones.
    """
    identity: tuple[object, ...] = tuple(map(tuple, refused))
    if chunk.rewinding is not None:
        identity = (*chunk.rewinding.identity, *identity)
    distance = advance.source.system.distance
    read_to = commit.offsets_after(advance, chunk.ranges)
    return send_dead_letters(
        advance.context.systems,
        advance.spec,
        letters,
        producer=dead_letter_producer(advance, identity),
        sequence=1 + sum(distance(ssp, "0", end) for ssp, end in read_to.items()),
    )


def target_generations(advance: Advance) -> tuple[Generation, ...]:
    """Return the generations that the next changes are applied to: of the table being built,
    else the served one.
    """
    if advance.running:
        return advance.bootstrap.building
    return advance.manifest.served_generations


def _report_bootstrap(advance: Advance, seconds: float, records: int) -> None:
    """Report how far the bootstrap is. `records` were read in these seconds; with 0, the time left
    is not estimated.
    """
    progress = bootstrap_progress(advance.context.systems, advance.manifest, advance.context.now())
    advance.stages.report_progress("bootstrap", seconds, progress.describe(seconds, records))


class AppliedChanges(NamedTuple):
    """The advance after changes were applied, and the action taken."""

    advance: Advance
    action: Action


def apply_changes(advance: Advance) -> AppliedChanges:
    """Apply the changes since the last commit, one commit a chunk."""
    if advance.running:
        return _continue_bootstrap(advance)
    action: Action = "up-to-date"
    is_last = False
    while not is_last:
        ranges, is_last = commit.next_ranges(advance)
        if ranges:
            advance = apply_ranges(_warn_of_first(advance, ranges), ranges).advance
            action = "applied"
    return AppliedChanges(advance, action)


def _continue_bootstrap(advance: Advance) -> AppliedChanges:
    """Apply the changes up to the bootstrap's target. The action is "waiting" if only changes of
    unfinished transactions are left before it.

    The next advance applies what came after it began, so that readers need not wait.
    """
    began = time.monotonic()
    records = 0
    is_last = False
    reached = False
    while not is_last:
        ranges, is_last = commit.next_ranges(advance)
        reached = is_last and commit.reaches_target(advance, ranges)
        if not ranges and not reached:
            continue
        applied = apply_ranges(_warn_of_first(advance, ranges), ranges, reached=reached)
        advance = applied.advance
        records += applied.records
        seconds = time.monotonic() - began
        _report_bootstrap(advance, seconds, 0 if reached else records)
    return AppliedChanges(advance, "bootstrapped" if reached else "waiting")


def _warn_of_first(advance: Advance, ranges: Ranges) -> Advance:
    """Return the advance with warnings about these changes, if they are the table's first ones;
    unchanged in process, where no format is read that has such warnings.
    """
    spark = advance.context.spark
    has_rows = any(generation.files for generation in target_generations(advance))
    if has_rows or not ranges or spark is IN_PROCESS:
        return advance
    return replace(advance, warnings=find_suspicious_values(advance.source, ranges, spark))


def apply_ranges(
    advance: Advance,
    ranges: Ranges,
    *,
    reached: bool = False,
    rewinding: ActiveRewind | None = None,
) -> _AppliedRanges:
    """Read the changes in these ranges and commit them; ranges without records only move the
    offsets.

    `reached` says that with them a bootstrap has reached its target; `rewinding` is the rewind that
    applies them again.
    """
    context = advance.context
    name = advance.spec.name
    attempt = advance.log.attempt()
    chunk = _Chunk(attempt, ranges, reached, rewinding)
    records = 0
    if ranges:
        records = advance.source.count(ranges)
    written = _WrittenChanges(
        advance,
        attempt.generation(advance.manifest.next_generation),
        {"read": records},
        advance.manifest.first_ordered,
    )
    # Changes are completed from rows of the served version, so it is leased.
    version_read = None
    if advance.spec.following.reads_rows and not advance.running:
        version_read = advance.manifest.version
    try:
        with (
            record_build(context.lake, name, attempt.id, context.by),
            lease_served(context.lake, name, version_read, holder=f"advance by {context.by}"),
        ):
            with advance.stages("build"):
                if records:
                    advance.stages.begin_build()
                    written = _build_chunk(advance, chunk, records)
            with advance.stages("commit"):
                advance = commit.commit_with_retries(
                    written.advance,
                    partial(_manifest_with_changes, chunk, written),
                    commit_id=attempt.id,
                )
    except CommitConflictError:
        advance.log.drop(written.generation)
        raise
    counters = sum_counters(dict(advance.counters), written.counters)
    findings = advance.findings
    if written.findings:
        findings = add_findings(findings, written.findings)
    advance = replace(advance, counters=counters, findings=findings)
    return _AppliedRanges(advance, records)


class _AppliedRanges(NamedTuple):
    """The advance after ranges were applied, and the number of their records."""

    advance: Advance
    records: int


def _build_chunk(advance: Advance, chunk: _Chunk, records: int) -> _WrittenChanges:
    """Write the chunk's changes, made from this number of records, and count them."""
    # With history, or in a rewind, stored rows are read too, so the number of rows is unknown.
    reads_stored = advance.spec.over_time or chunk.rewinding is not None
    rows = None if reads_stored else records  # decides which engine writes
    spark = advance.context.spark_for(rows, list_change_spark_needs(advance.source))
    try:
        with interpret_small_plans(spark, rows):
            written = _write_changes(advance, chunk, spark)
    except NeedsSpark as reason:  # of a validator, before anything is written
        if advance.context.spark is IN_PROCESS:
            raise needs_spark_error(advance.spec, reason) from reason
        written = _write_changes(advance, chunk, advance.context.spark)
    counters = written.counters
    # The changes of a rewind were counted when they came first.
    if chunk.rewinding is None and written.times.all_late:
        counters["late_changes"] = written.times.all_late
    # Rows that are held are stored as tombstones, but delete nothing.
    counters["deleted"] += count_deletions(written.generation) - counters.get("held", 0)
    if not advance.running:  # a bootstrap changes nothing that is served
        if chunk.rewinding is None:
            ignored = _count_ignored(written.advance, written.generation)
        else:
            ignored = NOTHING_IGNORED
        counters["superseded"] += ignored.changes
        counters["deleted"] -= ignored.deletions
        changed = written.generation.rows - ignored.changes - counters.get("carried", 0)
        counters = {"changes": changed, **counters}
    return replace(written, counters={"read": records, **counters})


def _count_ignored(advance: Advance, generation: Generation) -> IgnoredChanges:
    """Return how many of the generation's changes are older than the stored ones of their keys.

    By offset, streamed changes are never older, so none are looked for. With history, older changes
    correct the past. Where columns are merged, older changes were left out before.
    """
    spec = advance.spec
    lake = advance.context.lake
    if spec.following.order_by is None or spec.over_time or spec.following.merges_columns:
        return NOTHING_IGNORED
    stored = target_generations(advance)
    older = find_older_changes(lake.store, f"dataset {spec.name!r}", stored, generation)
    if not older:
        return NOTHING_IGNORED
    holder = f"advance by {advance.context.by}"
    with lease_served(lake, spec.name, advance.manifest.version, holder=holder):
        return count_ignored(older, spec.key)


def _manifest_with_changes(
    chunk: _Chunk, written: _WrittenChanges, advance: Advance
) -> UnboundedManifest:
    """Return the manifest with these changes and offsets. The version stays if no file was written;
    in a bootstrap it stays until the last chunk.
    """
    source = advance.source
    manifest = advance.manifest
    running = advance.running
    generation = written.generation
    offsets = offsets_to_json(commit.offsets_after(advance, chunk.ranges))
    after = manifest.after(
        declaration=source.declaration,
        offsets=offsets,
        stream=source.info.identity,
        counters=sum_counters(manifest.counters, written.counters),
        first_ordered=written.samples,
        quarantining=None,
        decision=advance.decision,
        next_generation=manifest.next_generation + int(running or bool(generation.files)),
        change=Change(action="bootstrap" if running else "apply"),
    )
    if offsets == offsets_to_json(advance.ends):
        after = after.after(confirmed_at=advance.snapshot.at)
    watermark = advance.spec.following.watermark
    if watermark is not None:
        partitions = list_partitions_read(source.system, chunk.ranges)
        now = advance.context.now()
        times = after_changes(watermark, manifest, written.times.newest, partitions, now)
        if chunk.rewinding is None:
            late = written.times.late
        else:  # counted when the changes came first
            late = ()
        passed = after_late(passed_marks(advance.spec, manifest), late)
        after = after.after(watermark=WatermarkState(times=times, passed=passed))
    if chunk.rewinding is not None:
        after = chunk.rewinding.record_in_manifest(after, source.system)
    if running:
        return _manifest_with_chunk(chunk, written, advance, after)
    if not generation.files:
        return after
    before = [stored for stored in target_generations(advance) if stored.files]
    return commit.manifest_with_version(
        advance, after, chunk.attempt, (*before, generation), written.counters
    )


def _manifest_with_chunk(
    chunk: _Chunk, written: _WrittenChanges, advance: Advance, after: UnboundedManifest
) -> UnboundedManifest:
    """Return the manifest `after` a chunk of the bootstrap; the last one serves the new table."""
    bootstrap = advance.bootstrap
    building = bootstrap.building
    if written.generation.files:
        building = (*building, written.generation)
    if not chunk.reached:
        return after.after(bootstrap=bootstrap.model_copy(update={"building": building}))
    now = advance.context.now()
    done = bootstrap.model_copy(update={"state": "done", "finished_at": now, "building": ()})
    after = after.after(bootstrap=done, confirmed_at=bootstrap.started_at, horizon=None)
    generations = building or (written.generation,)
    counters = sum_counters(dict(advance.counters), written.counters)
    return commit.manifest_with_version(advance, after, chunk.attempt, generations, counters)
