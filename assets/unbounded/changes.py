"""Applies changes in [offset, upcoming): each chunk becomes one delta and one commit.

    read -> decode -> reject late changes (a rewind places them instead) -> reject bad changes, or
    set them aside
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.change_formats import PROBLEM, ArrowChangeFormat
from dagster_adjunct.assets.declaration.change_values import Samples
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.sources import changes as decoding
from dagster_adjunct.assets.sources.entries import (
    OpenedStream,
    Ranges,
    list_spark_needs,
    offsets_to_json,
    raise_if_spark_needed,
)
from dagster_adjunct.assets.sources.order_samples import find_order_samples
from dagster_adjunct.assets.unbounded import commit
from dagster_adjunct.assets.unbounded.commit import Advance
from dagster_adjunct.assets.unbounded.complete_rows import RowCompletion
from dagster_adjunct.assets.unbounded.dead_letters import (
    build_dead_letters,
    dead_letter_producer,
    send_dead_letters,
)
from dagster_adjunct.assets.unbounded.ignored_changes import count_ignored, find_older_changes
from dagster_adjunct.assets.unbounded.progress import bootstrap_progress
from dagster_adjunct.assets.unbounded.suspicious_values import find_suspicious_values
from dagster_adjunct.assets.versions.dataset_log import Attempt
from dagster_adjunct.assets.versions.leases import lease_served, record_build
from dagster_adjunct.assets.versions.manifest import Change, UnboundedManifest
from dagster_adjunct.assets.versions.reports import Action
from dagster_adjunct.assets.versions.version import POSITION, find_newest_valid_from
from dagster_adjunct.assets.writing.generation import (
    ARROW,
    SPARK,
    GenerationWriter,
    count_deletions,
    write_generation,
)
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
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.assets.unbounded.rewind import ActiveRewind


def list_change_spark_needs(source: OpenedStream) -> list[str]:
    """Return, in words, why this table's changes can't be applied without Spark; empty if they can.

    Their format has to be an ArrowChangeFormat. Dead letters store records as JSON, which needs
    Spark for records with fractions or decimals.
    """
    return [*list_spark_needs(source), *list_format_spark_needs(source.spec, source.records)]


def list_format_spark_needs(spec: AdjunctDataset, records: Schema) -> list[str]:
    """Return, in words, why changes in records with these columns can't be decoded without
    Spark; empty if they can.
    """
    needed = []
    if not isinstance(spec.following.changes, ArrowChangeFormat):
        needed.append(f"the form of its changes ({spec.following.changes.describe()})")
    plain = all(decoding.supports_json(field.type) for field in records.fields)
    if isinstance(spec.following.on_bad_change, DeadLetters) and not plain:
        needed.append("dead letters of records with fractions or decimals")
    return needed


def check_spark_needs(source: OpenedStream) -> None:
    """Raise ConfigurationError for a table that can't be advanced without Spark."""
    initial = source.spec.following.initial
    needed = list_change_spark_needs(source)
    if initial is not None:
        needed.append(f"its bulk snapshot ({initial.describe()})")
    raise_if_spark_needed(source.spec, needed)


def read_changes(
    source: OpenedStream,
    ranges: Ranges,
    spark: Callable[[], SparkSession],
    positions_from: int = 0,
    samples: Samples | None = None,
    ahead: Ranges | None = None,
) -> tuple[DataFrame | pa.Table, Samples | None]:
    """Return the changes made from the records of these ranges, and the first values of the
    ordering columns.

    By offset, a change's position is its offset plus `positions_from`. `samples` are the first
    values of the ordering columns, None before the first change; `ahead` is what follows the
    ranges. Raises SchemaMismatchError if there are changes, and none of them can be ordered.
    """
    samples = find_order_samples(source, ranges, spark, samples, ahead)
    if spark is IN_PROCESS:
        return (
            decoding.decode_arrow_changes(
                source, source.read_arrow(ranges), positions_from, samples
            ),
            samples,
        )
    return (
        decoding.decode_changes(source, source.read(spark(), ranges), positions_from, samples),
        samples,
    )


def drop_late(
    changes: DataFrame | pa.Table, horizon: int | None, on_bad_change: object
) -> tuple[DataFrame | pa.Table, Callable[[], int] | None]:
    """Return the changes without late ones, and a function that counts these once the changes are
    written.

    A change is late at or below the horizon, a position, or with history a time in microseconds: it
    may be older than a deletion that is no longer stored, so it can't be applied. With dead
    letters, late changes stay and get a problem instead, and there is no function (None).
    """
    if horizon is None:
        return changes, None
    set_aside = isinstance(on_bad_change, DeadLetters)
    if isinstance(changes, pa.Table):
        over_time = VALID_FROM in changes.column_names
        places = changes.column(VALID_FROM).cast("int64") if over_time else changes.column(POSITION)
        late = pc.fill_null(pc.less_equal(places, horizon), False)
        if set_aside:
            reasons = [
                decoding.late_change_reason(horizon, over_time) if is_late else None
                for is_late in late.to_pylist()
            ]
            return decoding.add_problems(changes, reasons), None
        count = int(pc.sum(late).as_py() or 0)
        return (
            changes.filter(pc.or_(pc.invert(late), pc.is_valid(changes.column(PROBLEM)))),
            lambda: count,
        )
    from pyspark.sql import Observation

    over_time = VALID_FROM in changes.columns
    late = (F.unix_micros(VALID_FROM) if over_time else F.col(POSITION)) <= F.lit(horizon)
    # A row without a time gets a problem of its own.
    late = F.coalesce(late, F.lit(False)) if over_time else late
    if set_aside:
        reason = F.lit(decoding.late_change_reason(horizon, over_time))
        return changes.withColumn(PROBLEM, F.coalesce(F.col(PROBLEM), F.when(late, reason))), None
    observed = Observation()
    counted = changes.observe(
        observed, F.coalesce(F.sum(late.cast("long")), F.lit(0)).alias("late")
    )
    return counted.where(~late | F.col(PROBLEM).isNotNull()), lambda: int(observed.get["late"])


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
            offset, partition, reason = (
                bad.column(name)[0].as_py() for name in (OFFSET, PARTITION, PROBLEM)
            )
            raise decoding.bad_change_error(dataset, offset, partition, reason)
        good = changes.filter(pc.is_null(changes.column(PROBLEM)))
        return good.drop_columns(
            [name for name in (PROBLEM, decoding.RAW) if name in changes.column_names]
        )
    if not set_aside:
        return decoding.fail_on_problems(changes, dataset)
    return changes.where(F.col(PROBLEM).isNull()).drop(PROBLEM, decoding.RAW)


@dataclass(frozen=True, slots=True)
class WrittenChanges:
    """Changes that were written as one generation, and not yet committed.

    `advance` is the one to continue with: if the ranges had to be committed before their dead
    letters were sent, it is the one after that commit. `samples` are the first values of the
    ordering columns.
    """

    advance: Advance
    generation: Generation
    counters: dict[str, int]
    samples: Samples | None


@dataclass(frozen=True, slots=True)
class _WritePlan:
    """How the changes of some ranges become one generation.

    Changes at or below `late_from`, a position or a time, are late: they may be older than
    deletions that are no longer stored. None if none is late, or if rows are placed again.
    `replaced_from` is the same for changes that a rewind applies again, which are late only if
    nothing of their key is stored.
    """

    options: WriteOptions
    order_by: tuple[str, ...]
    partitioned: bool
    late_from: int | None
    replaced_from: int | None


def _plan_write(advance: Advance, *, again: bool) -> _WritePlan:
    """Return how changes are written; `again` says that a rewind applies them once more."""
    spec = advance.spec
    following = spec.following
    horizon = advance.manifest.horizon
    has_history = following.history is not None
    by_offset = following.order is None
    stored = target_generations(advance)
    begins = not any(generation.files for generation in stored)
    options = WriteOptions(f"dataset {spec.name!r}")
    if has_history:  # a base stores where the validity of a row ends
        newest = find_newest_valid_from(() if advance.running else stored)
        over_time = TimelineOptions(fills_ends=begins, newest=newest)
        options = replace(options, over_time=over_time)
    elif begins and by_offset:
        # Ordered by a column, a deletion also wins against later changes with a lower value, so a
        # base keeps it too.
        options = replace(options, drop_tombstones=True)
    replaced_from = None
    if again and not by_offset and not has_history:
        replaced_from = horizon
    places_rows = again and (by_offset or replaced_from is not None)
    if following.completes or places_rows:
        completion = RowCompletion(
            dataset=spec.name,
            layout=commit.table_layout(advance.source),
            generations=stored,
            by_offset=by_offset,
            set_aside=isinstance(following.on_bad_change, DeadLetters),
            again=again,
            horizon=replaced_from,
        )
        options = replace(options, completion=completion)
    late_from = None
    # A table that is being built has dropped no tombstones yet.
    if not advance.running and (has_history or not again):
        late_from = horizon
    in_one_order = not again and following.order_by is None
    return _WritePlan(
        options,
        order_by=(POSITION,) if in_one_order else (POSITION, OFFSET, PARTITION),
        partitioned=advance.source.copartitioned and not again,
        late_from=late_from,
        replaced_from=replaced_from,
    )


class _ChangeWriter:
    """Writes files, and takes incomplete and late changes out of their stats.

    Stats and footers are stored in manifests, where these changes don't belong.
    """

    def __init__(self, write: GenerationWriter) -> None:
        self._write = write
        self.incomplete: list[tuple[int, int, str]] = []
        self.late = 0

    def __call__(self, *rows_and_place: Any, **how: Any) -> list[BucketFile]:
        return list(map(self._take_stats, self._write(*rows_and_place, **how)))

    def _take_stats(self, file: BucketFile) -> BucketFile:
        stats = dict(file.stats)
        self.late += stats.pop("late", 0)
        if "incomplete" not in stats:
            return replace(file, stats=stats)
        self.incomplete += map(tuple, stats.pop("incomplete"))
        return replace(file, stats=stats, footer=None)  # the footer has the same list


def write_changes(
    advance: Advance,
    attempt: Attempt,
    ranges: Ranges,
    rewinding: ActiveRewind | None,
    spark: Callable[[], SparkSession],
) -> WrittenChanges:
    """Write the changes of these ranges as one generation, and send those that were set aside.

    Raises BadChangeError and NullKeyError for changes that can't be applied.
    """
    spec = advance.spec
    manifest = advance.manifest
    plan = _plan_write(advance, again=rewinding is not None)
    reached = commit.offsets_after(advance, ranges)
    ahead = {ssp: (offset, advance.ends[ssp]) for ssp, offset in reached.items()}
    changes, samples = read_changes(
        advance.source, ranges, spark, manifest.positions_from, manifest.first_ordered, ahead
    )
    on_bad_change = spec.following.on_bad_change
    set_aside = isinstance(on_bad_change, DeadLetters)
    changes, count_late = drop_late(changes, plan.late_from, on_bad_change)
    writer = _ChangeWriter(ARROW if spark is IN_PROCESS else SPARK)
    generation, counters = write_generation(
        advance.context.lake,
        attempt,
        manifest.next_generation,
        commit.table_layout(advance.source),
        select_applicable(changes, spec.name, set_aside=set_aside),
        writer,
        plan.options,
        order_by=plan.order_by,
        partitioned=plan.partitioned,
    )
    if rewinding is not None and writer.late and not rewinding.forced:
        advance.log.drop(generation)
        raise _forgotten_deletions_error(spec.name, writer.late, plan.replaced_from)
    letters = build_dead_letters(changes, spec, writer.incomplete) if set_aside else None
    if letters is not None:
        try:
            advance = _commit_before_letters(advance, ranges, rewinding)
            identity = sorted(writer.incomplete)
            sent = _send_letters(advance, ranges, rewinding, letters, identity)
            counters["quarantined"] = sent
        except CommitConflictError:
            advance.log.drop(generation)
            raise
    if count_late is not None:
        counters["late"] = count_late()
    elif plan.replaced_from is not None and not set_aside:
        counters["late"] = writer.late
    return WrittenChanges(advance, generation, counters, samples)


def _forgotten_deletions_error(dataset: str, late: int, horizon: int | None) -> DatasetError:
    return DatasetError(
        f"dataset {dataset!r}: {late:,} of the changes can't be applied again, because"
        " the dataset has no entries with their keys. The keys may have been deleted:"
        f" deletions up to position {horizon} are no longer stored, and these changes are not"
        " newer.",
        f"Rebuild it: adjunct dataset rebuild {dataset} MODULE:APP --reason …. With force,"
        " these changes are set aside as late.",
        dataset=dataset,
    )


def _commit_before_letters(
    advance: Advance, ranges: Ranges, rewinding: ActiveRewind | None
) -> Advance:
    """Commit the ranges whose dead letters are about to be sent.

    A run that takes over then sends the same letters again, which adds nothing. A rewind that is
    repeated reads the same ranges anyway.
    """
    if rewinding is not None or advance.manifest.quarantining is not None:
        return advance
    spans = {str(ssp): span for ssp, span in ranges.items()}
    return commit.commit_fields(advance, quarantining=spans, change=Change(action="quarantine"))


def _send_letters(
    advance: Advance,
    ranges: Ranges,
    rewinding: ActiveRewind | None,
    letters: Any,
    incomplete: Sequence[tuple[int, int, str]],
) -> int:
    """Send the dead letters of these ranges once; return their number."""
    identity: tuple[object, ...] = tuple(incomplete)
    if rewinding is not None:
        identity = (*rewinding.identity, *identity)
    distance = advance.source.system.distance
    read_to = commit.offsets_after(advance, ranges)
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
    version = advance.manifest.version
    if advance.running:
        return advance.bootstrap.building
    return () if version is None else version.generations


def apply_changes(advance: Advance) -> tuple[Advance, Action]:
    """Apply the changes since the last commit, one commit a chunk; return the advance and the
    action taken.
    """
    action: Action = "up-to-date"
    began = time.monotonic()
    done = 0
    while True:
        running = advance.running
        ranges, last = commit.next_ranges(advance)
        reached = running and last and commit.reaches_target(advance, ranges)
        if not ranges and not reached:
            return advance, "waiting" if running else action
        is_first = not any(generation.files for generation in target_generations(advance))
        if is_first and ranges and advance.context.spark is not IN_PROCESS:
            found = find_suspicious_values(advance.source, ranges, advance.context.spark)
            advance = replace(advance, warnings=found)
        advance, records = apply_ranges(advance, ranges, reached=reached)
        done += records
        action = "bootstrapped" if running else "applied" if action == "up-to-date" else action
        if running:
            took = time.monotonic() - began
            at = bootstrap_progress(
                advance.context.systems, advance.manifest, advance.context.now()
            )
            advance.stages.report_progress(
                "bootstrap", took, at.describe(took, 0 if reached else done)
            )
        # the next advance applies what came after a bootstrap began, so that readers need not wait
        if last:
            return advance, action if reached or not running else "waiting"


def apply_ranges(
    advance: Advance,
    ranges: Ranges,
    *,
    reached: bool = False,
    rewinding: ActiveRewind | None = None,
) -> tuple[Advance, int]:
    """Read the changes in these ranges and commit them; return the advance and the number of
    records.

    `reached` says that with them a bootstrap has reached its target; `rewinding` is the rewind that
    applies them again.
    """
    context = advance.context
    name = advance.spec.name
    attempt = advance.log.attempt()
    bootstrapping = advance.running
    generation = attempt.generation(advance.manifest.next_generation)
    records = advance.source.count(ranges) if ranges else 0
    samples = advance.manifest.first_ordered
    counters = {"read": records}
    # Changes are completed from rows of the served version, so it is leased.
    completes = advance.spec.following.completes and not bootstrapping
    read = advance.manifest.version if completes else None
    try:
        with (
            record_build(context.lake, name, attempt.id, context.by),
            lease_served(context.lake, name, read, holder=f"advance by {context.by}"),
        ):
            # With history, or in a rewind, stored rows are read too, so the number of rows is
            # unknown.
            alone = advance.spec.following.history is None and rewinding is None
            spark = context.spark_for(
                records if alone else None, list_change_spark_needs(advance.source)
            )
            with (
                advance.stages("build"),
                interpret_small_plans(spark, records if records and alone else None),
            ):
                if records:
                    advance.stages.begin_build()
                    written = write_changes(advance, attempt, ranges, rewinding, spark)
                    advance = written.advance
                    generation = written.generation
                    samples = written.samples
                    counted = written.counters
                    counted["deleted"] += count_deletions(generation)
                    if not bootstrapping:
                        ignored, deletions = (
                            (0, 0) if rewinding is not None else _count_ignored(advance, generation)
                        )
                        counted["superseded"] += ignored
                        counted["deleted"] -= deletions
                        counted = {"changes": generation.rows - ignored, **counted}
                    counters |= counted
            with advance.stages("commit"):
                decide = partial(
                    _manifest_with_changes,
                    attempt,
                    generation,
                    ranges,
                    counters,
                    samples,
                    reached,
                    rewinding,
                )
                advance = commit.commit_with_retries(advance, decide, commit_id=attempt.id)
    except CommitConflictError:
        advance.log.drop(generation)
        raise
    return replace(advance, counters=sum_counters(dict(advance.counters), counters)), records


def _count_ignored(advance: Advance, generation: Generation) -> tuple[int, int]:
    """Return how many of the generation's changes are older than the stored ones of their keys; of
    these, deletions.

    By offset, streamed changes are never older, so none are looked for. With history, older changes
    correct the past.
    """
    following = advance.spec.following
    lake = advance.context.lake
    name = advance.spec.name
    if following.order_by is None or following.history is not None:
        return 0, 0
    stored = target_generations(advance)
    older = find_older_changes(lake.store, f"dataset {name!r}", stored, generation)
    if not older:
        return 0, 0
    with lease_served(
        lake, name, advance.manifest.version, holder=f"advance by {advance.context.by}"
    ):
        return count_ignored(older, advance.spec.key)


def _manifest_with_changes(
    attempt: Attempt,
    generation: Generation,
    ranges: Ranges,
    counters: dict[str, int],
    samples: Samples | None,
    reached: bool,
    rewinding: ActiveRewind | None,
    advance: Advance,
) -> UnboundedManifest:
    """Return the manifest with these changes; a chunk without records leaves the version
    unchanged.
    """
    source = advance.source
    manifest = advance.manifest
    bootstrap = advance.bootstrap
    running = advance.running
    offsets = manifest.offsets | offsets_to_json({ssp: end for ssp, (_, end) in ranges.items()})
    after = manifest.after(
        declaration=source.declaration,
        offsets=offsets,
        stream=source.info.identity,
        counters=sum_counters(manifest.counters, counters),
        first_ordered=samples,
        quarantining=None,
        confirmed_at=(
            advance.snapshot.at
            if offsets == offsets_to_json(advance.ends)
            else manifest.confirmed_at
        ),
        decision=advance.decision,
        next_generation=manifest.next_generation + (1 if generation.files or running else 0),
        change=Change(action="bootstrap" if running else "apply"),
    )
    if rewinding is not None:
        after = rewinding.record_in_manifest(after, source.system)
    if running:
        building = (*bootstrap.building, *([generation] if generation.files else []))
        if not reached:
            return after.after(bootstrap=bootstrap.model_copy(update={"building": building}))
        now = advance.context.now()
        done = bootstrap.model_copy(update={"state": "done", "finished_at": now, "building": ()})
        after = after.after(bootstrap=done, confirmed_at=bootstrap.started_at, horizon=None)
        generations = building or (generation,)
        counters = sum_counters(dict(advance.counters), counters)
    elif not generation.files:
        return after
    else:
        assert manifest.version is not None
        generations = (
            *(before for before in manifest.version.generations if before.files),
            generation,
        )
    return commit.manifest_with_version(advance, after, attempt, generations, counters)
