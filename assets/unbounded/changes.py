"""Applies changes in [offset, upcoming): each chunk becomes one delta and one commit.

    read -> decode -> reject late changes (a rewind places them instead) -> reject bad changes, or set them aside
         -> complete and write -> send what was set aside to the dead letters -> commit

The cost of a commit depends on its changes, not on the size of the table, because readers merge base and deltas. The
chunks of a bootstrap become generations of the new table, which is built next to the one that is served.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.change_values import Samples
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.sources.entries import Ranges, offsets_to_json, resolve_stream
from dagster_adjunct.assets.unbounded import commit
from dagster_adjunct.assets.unbounded.commit import Advance
from dagster_adjunct.assets.unbounded.complete_rows import RowCompletion
from dagster_adjunct.assets.unbounded.engine import DEAD_LETTERS, SparkEngine, list_change_spark_needs, select_engine
from dagster_adjunct.assets.unbounded.progress import bootstrap_progress
from dagster_adjunct.assets.versions.dataset_log import Attempt
from dagster_adjunct.assets.versions.leases import lease_served, record_build
from dagster_adjunct.assets.versions.manifest import Change, UnboundedManifest
from dagster_adjunct.assets.versions.reports import Action
from dagster_adjunct.assets.versions.version import POSITION, find_newest_valid_from
from dagster_adjunct.assets.writing.generation import count_deletions, write_generation
from dagster_adjunct.resources.bucketing.files import BucketFile, Generation, TimelineOptions
from dagster_adjunct.resources.bucketing.writer import WriteOptions
from dagster_adjunct.resources.common import sum_counters
from dagster_adjunct.resources.errors import CommitConflictError, DatasetError, StreamNotFoundError
from dagster_adjunct.resources.spark.tuning import interpret_small_plans
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, StreamSystem, require_writer

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.unbounded.rewind import ActiveRewind


def write_changes(
    advance: Advance, attempt: Attempt, ranges: Ranges, rewinding: ActiveRewind | None, engine: SparkEngine
) -> tuple[Advance, Generation, dict[str, int], Samples | None]:
    """Write the changes of these ranges as one generation; return the advance, the generation, counters and samples.

    The samples are the first values that changes are ordered by. The advance is new where ranges with dead letters
    were committed first. Raises BadChangeError and NullKeyError for changes that can't be applied.
    """
    source, spec, manifest, lake = advance.source, advance.spec, advance.manifest, advance.context.lake
    following, late = spec.following, None
    changes, samples = engine.read_changes(source, ranges, manifest.positions_from, manifest.first_ordered)
    if rewinding is None or following.history is not None:
        # A table that is being built has dropped no tombstones yet.
        horizon = None if advance.running else manifest.horizon
        changes, late = engine.drop_late(changes, horizon, following.on_bad_change)
    layout, set_aside, over_time = commit.table_layout(source), isinstance(following.on_bad_change, DeadLetters), None
    stored = target_generations(advance)
    begins = not any(generation.files for generation in stored)
    if following.history is not None:  # a base stores where the validity of a row ends
        newest = find_newest_valid_from(() if advance.running else stored)
        over_time = TimelineOptions(fills_ends=begins, newest=newest)
    # Ordered by a column, a deletion also wins against later changes with a lower value, so a base keeps it too. With
    # history a deletion ends the validity of a row.
    drop_tombstones = begins and following.order is None and over_time is None
    by_offset, again = following.order is None, rewinding is not None
    horizon = manifest.horizon if again and not by_offset and following.history is None else None
    completion, incomplete, late_again = None, list[tuple[int, int, str]](), 0
    if following.completes or (again and (by_offset or horizon is not None)):
        completion = RowCompletion(spec.name, layout, stored, by_offset, set_aside, again, horizon)

    def write_files(*rows_and_place: Any, **how: Any) -> list[BucketFile]:
        """Write files and collect the incomplete and late changes from their stats, which manifests don't keep."""
        nonlocal late_again
        files = []
        for file in engine.writer(*rows_and_place, **how):
            incomplete.extend(map(tuple, file.stats.get("incomplete", ())))
            late_again += file.stats.get("late", 0)
            stats = {name: value for name, value in file.stats.items() if name not in ("incomplete", "late")}
            # The footer lists them too.
            footer = None if "incomplete" in file.stats else file.footer
            files.append(replace(file, stats=stats, footer=footer))
        return files

    generation, counters = write_generation(
        lake,
        attempt,
        manifest.next_generation,
        layout,
        engine.applicable(changes, spec.name, set_aside=set_aside),
        write_files,
        WriteOptions(
            f"dataset {spec.name!r}", drop_tombstones=drop_tombstones, over_time=over_time, completion=completion
        ),
        order_by=(POSITION,) if rewinding is None and following.order_by is None else (POSITION, OFFSET, PARTITION),
        partitioned=source.copartitioned and rewinding is None,
    )
    if rewinding is not None and late_again and not rewinding.forced:
        advance.log.drop(generation)
        raise DatasetError(
            f"dataset {spec.name!r}: {late_again:,} of the changes can't be applied again, because the dataset has no "
            f"entries with their keys. The keys may have been deleted: deletions up to position {horizon} are no "
            "longer stored, and these changes are not newer.",
            f"Rebuild it: adjunct dataset rebuild {spec.name} MODULE:APP --reason …. With force, these changes are "
            "set aside as late.",
            dataset=spec.name,
        )
    letters = engine.dead_letters(changes, spec, incomplete) if set_aside else None
    if letters is not None:
        try:
            if manifest.quarantining is None and rewinding is None:
                # First, so that a run that takes over sends the same letters again, which adds nothing. A rewind that
                # is repeated reads the same ranges.
                spans = {str(ssp): span for ssp, span in ranges.items()}
                advance = commit.commit_fields(advance, quarantining=spans, change=Change(action="quarantine"))
            identity = (*(rewinding.identity if rewinding is not None else ()), *sorted(incomplete))
            read_to, distance = commit.offsets_after(advance, ranges), source.system.distance
            counters["quarantined"] = send_dead_letters(
                advance.context.systems,
                spec,
                letters,
                producer=_dead_letter_producer(advance, identity),
                sequence=1 + sum(distance(ssp, "0", end) for ssp, end in read_to.items()),
            )
        except CommitConflictError:
            advance.log.drop(generation)
            raise
    if late is not None or (horizon is not None and not set_aside):
        counters["late"] = late_again if late is None else late()
    return advance, generation, counters, samples


def target_generations(advance: Advance) -> tuple[Generation, ...]:
    """Return the generations that the next changes apply to: of the table being built, else of the one served."""
    version = advance.manifest.version
    if advance.running:
        return advance.bootstrap.building
    return () if version is None else version.generations


def send_dead_letters(
    systems: Mapping[str, StreamSystem],
    spec: AdjunctDataset,
    letters: DataFrame | pa.Table,
    *,
    producer: str,
    sequence: int,
) -> int:
    """Append letters to the dataset's stream of dead letters, once; return their number.

    An Arrow table must be in the order of partition and offset. The stream is created if it does not exist. Repeating
    the same letters with the same producer and sequence adds nothing. Raises DatasetError for a stream with other
    columns, and ProducerConflictError for other letters.
    """
    policy = spec.following.on_bad_change
    assert isinstance(policy, DeadLetters)
    what = f"dataset {spec.name!r} sends bad changes to {policy.stream}"
    found, stream = resolve_stream(systems, policy.stream, what, dataset=spec.name)
    system = require_writer(found)
    try:
        columns = system.info(stream).schema
    except StreamNotFoundError:
        columns = system.create(stream, schema=DEAD_LETTERS, partitions=1).schema
    if columns != DEAD_LETTERS:
        wrong = "no columns" if columns is None else DEAD_LETTERS.difference(columns)
        problem = f"{what}, which is not a stream of dead letters: {wrong}."
        raise DatasetError(problem, "Name a new stream, which is then created.", dataset=spec.name)
    order_by = () if hasattr(letters, "column_names") else ("partition", "offset")
    return system.append(stream, letters, producer=producer, sequence=sequence, order_by=order_by).rows


def _dead_letter_producer(advance: Advance, identity: tuple[object, ...]) -> str:
    """Return the producer id of dead letters; it differs where the same ranges may give different letters.

    That is the case after a rebuild, a changed declaration or a compaction that moved the horizon, in a rewind, and
    after an erasure of rows from which changes are completed.
    """
    spec, extractor, manifest = advance.spec, advance.spec.extractor, advance.manifest
    facts = (
        spec.following.changes.describe(),
        extractor and extractor.describe(),
        spec.columns,
        manifest.horizon,
        *([manifest.positions_from] if manifest.positions_from else []),
        *identity,
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
    return f"dead-{spec.name}-{advance.bootstrap.started_at:%Y%m%dT%H%M%S%f}-{digest}"


def apply_changes(advance: Advance) -> tuple[Advance, Action]:
    """Apply the changes since the last commit, one commit a chunk; return the advance and the action taken."""
    action: Action = "up-to-date"
    began, done = time.monotonic(), 0
    while True:
        running = advance.running
        ranges, last = commit.next_ranges(advance)
        reached = running and last and commit.reaches_target(advance, ranges)
        if not ranges and not reached:
            return advance, "waiting" if running else action
        advance, records = apply_ranges(advance, ranges, reached=reached)
        done += records
        action = "bootstrapped" if running else "applied" if action == "up-to-date" else action
        if running:
            took = time.monotonic() - began
            at = bootstrap_progress(advance.context.systems, advance.manifest, advance.context.now())
            advance.stages.report_progress("bootstrap", took, at.describe(took, 0 if reached else done))
        if last:  # the next advance applies what came after a bootstrap began, so that readers need not wait
            return advance, action if reached or not running else "waiting"


def apply_ranges(
    advance: Advance, ranges: Ranges, *, reached: bool = False, rewinding: ActiveRewind | None = None
) -> tuple[Advance, int]:
    """Read these changes and commit them; return the advance and the number of records.

    `reached` says that they complete a bootstrap, `rewinding` that they are applied again.
    """
    context, name = advance.context, advance.spec.name
    attempt, bootstrapping = advance.log.attempt(), advance.running
    generation = attempt.generation(advance.manifest.next_generation)
    records, samples = advance.source.count(ranges) if ranges else 0, advance.manifest.first_ordered
    counters = {"read": records}
    # Changes are completed from rows of the served version.
    completes = advance.spec.following.completes and not bootstrapping
    read = advance.manifest.version if completes else None
    try:
        with (
            record_build(context.lake, name, attempt.id, context.by),
            lease_served(context.lake, name, read, holder=f"advance by {context.by}"),
        ):
            # With history, or in a rewind, stored rows are read too.
            alone = advance.spec.following.history is None and rewinding is None
            spark = context.spark_for(records if alone else None, list_change_spark_needs(advance.source))
            with advance.stages("build"), interpret_small_plans(spark, records if records and alone else None):
                if records:
                    advance.stages.begin_build()
                    advance, generation, counted, samples = write_changes(
                        advance, attempt, ranges, rewinding, select_engine(spark)
                    )
                    counted["deleted"] += count_deletions(generation)
                    counted.pop("conflicting", None)  # normal in a change stream
                    counters |= counted if bootstrapping else {"changes": generation.rows, **counted}
            with advance.stages("commit"):
                decide = partial(
                    _manifest_with_changes, attempt, generation, ranges, counters, samples, reached, rewinding
                )
                advance = commit.commit_with_retries(advance, decide, commit_id=attempt.id)
    except CommitConflictError:
        advance.log.drop(generation)
        raise
    return replace(advance, counters=sum_counters(dict(advance.counters), counters)), records


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
    """Return the manifest with these changes; a chunk without records leaves the version unchanged."""
    source, manifest, bootstrap, running = advance.source, advance.manifest, advance.bootstrap, advance.running
    offsets = manifest.offsets | offsets_to_json({ssp: end for ssp, (_, end) in ranges.items()})
    after = manifest.after(
        declaration=source.declaration,
        offsets=offsets,
        stream=source.info.identity,
        counters=sum_counters(manifest.counters, counters),
        first_ordered=samples,
        quarantining=None,
        confirmed_at=advance.snapshot.at if offsets == offsets_to_json(advance.ends) else manifest.confirmed_at,
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
        generations = (*(before for before in manifest.version.generations if before.files), generation)
    return commit.manifest_with_version(advance, after, attempt, generations, counters)
