"""Applying changes: [offset, upcoming) becomes deltas, a chunk a commit; of a bootstrap, generations of the new table.

A commit costs what its changes cost, however large the table is: readers merge base and deltas. What a bootstrap
builds lies beside the table that is served, until its target is reached.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.sources.dead_letters import send_dead_letters
from dagster_adjunct.assets.sources.opened_stream import offsets_to_json
from dagster_adjunct.assets.unbounded.commit import (
    ADVANCE_AGAIN,
    commit_fields,
    commit_with_retries,
    manifest_with_version,
    next_ranges,
    offsets_after,
    reaches_target,
    table_layout,
)
from dagster_adjunct.assets.unbounded.complete_rows import RowCompletion
from dagster_adjunct.assets.unbounded.engine import select_engine
from dagster_adjunct.assets.unbounded.progress import describe_progress
from dagster_adjunct.assets.versions.leases import AttemptRecord, Lease, delete_attempt
from dagster_adjunct.assets.versions.manifest import Change, UnboundedManifest
from dagster_adjunct.assets.versions.version import POSITION, find_newest_valid_from
from dagster_adjunct.assets.writing.generation import sum_counters, write_generation
from dagster_adjunct.resources.bucketing.write_over_time import OverTimeWrite
from dagster_adjunct.resources.errors import CommitConflictError, VersionDiscardedError
from dagster_adjunct.resources.spark.tuning import interpret_small_plans
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dagster_adjunct.assets.declaration.change_values import Samples
    from dagster_adjunct.assets.sources.opened_stream import Ranges
    from dagster_adjunct.assets.unbounded.commit import Advance, AdvanceProgress
    from dagster_adjunct.assets.unbounded.rewind import ActiveRewind
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.assets.versions.reports import Action
    from dagster_adjunct.assets.writing.generation import GenerationWriter
    from dagster_adjunct.resources.bucketing.files import BucketFile, Generation

# Ranges of a change stream written as one generation: read, decoded, bad and late ones set aside.
#
# read -> decode -> late ones out (or: placed over what is there) -> bad ones refused, or set aside -> write, completed
# -> those that were set aside to the dead letters


def write_changes(
    advance: Advance,
    progress: AdvanceProgress,
    attempt: Attempt,
    ranges: Ranges,
    *,
    keep_tombstones: bool,
    over_time: OverTimeWrite | None = None,
    rewinding: ActiveRewind | None,
) -> tuple[AdvanceProgress, Generation, dict[str, int], Samples | None]:
    """Write the changes of these ranges; return the generation that they make, counters, and the first ordered values.

    The progress is another one where ranges with dead letters were committed first. Raises BadChangeError and
    NullKeyError for changes that can't be applied.
    """
    source, spec, manifest = advance.source, advance.spec, progress.manifest
    what = f"dataset {spec.name!r}"
    engine = select_engine(advance.context.spark)
    changes, samples = engine.decoder.read_changes(
        source, ranges, positions_from=manifest.positions_from, samples=manifest.first_ordered
    )
    store, version = advance.context.lake.store, manifest.version
    if rewinding is not None and spec.following.history is None:
        changes, late = rewinding.place_in_table(changes, engine.table, store, spec, manifest)
    else:
        # A table that is built anew has forgotten no deletion yet.
        horizon = None if progress.running else manifest.horizon
        changes, late = engine.decoder.without_late(changes, horizon, spec.following.on_bad_change)
        if rewinding is not None and version is not None:
            changes = rewinding.place_in_history(changes, engine.table, store, spec, version)
    layout, set_aside = table_layout(source), isinstance(spec.following.on_bad_change, DeadLetters)
    decoder = engine.decoder
    good = decoder.without_problems(changes) if set_aside else decoder.refuse_problems(changes, spec.name)
    completion, writer = None, _CollectingWriter(engine.writer)
    if spec.following.completes:
        known = target_generations(progress)
        by_offset, again = spec.following.order is None, rewinding is not None
        completion = RowCompletion(spec.name, layout, known, by_offset, set_aside, again=again)
    generation, counters = write_generation(
        advance.context.lake,
        attempt,
        progress.manifest.next_generation,
        layout,
        good,
        writer,
        what=what,
        order_by=(*layout.key, POSITION, *(source.tie_break if rewinding is None else (OFFSET, PARTITION))),
        keep_tombstones=keep_tombstones,
        partitioned=source.copartitioned and rewinding is None,
        over_time=over_time,
        completion=completion,
    )
    letters = decoder.letters(changes, spec, writer.incomplete) if set_aside else None
    if letters is not None:
        try:
            told = (*(rewinding.identity if rewinding is not None else ()), *sorted(writer.incomplete))
            again = rewinding is not None
            progress, counters["quarantined"] = _quarantine(advance, progress, letters, ranges, told, again=again)
        except CommitConflictError:
            advance.log.drop(generation)
            raise
    counters |= {"late": late()} if late is not None else {}
    return progress, generation, counters, samples


def target_generations(progress: AdvanceProgress) -> tuple[Generation, ...]:
    """Return the generations that the next changes come upon: of the table that is built, or else served."""
    version = progress.manifest.version
    if progress.running:
        return progress.bootstrap.building
    return () if version is None else version.generations


class _CollectingWriter:
    """Writes files, and takes out of their facts the changes that were set aside: manifests don't keep these."""

    def __init__(self, writer: GenerationWriter[Any]) -> None:
        self._writer = writer
        self.incomplete: list[tuple[int, int, str]] = []
        """Partition, offset and reason of each."""

    def __call__(self, *rows_and_place: Any, **how: Any) -> list[BucketFile]:
        return [self._collect_incomplete(file) for file in self._writer(*rows_and_place, **how)]

    def _collect_incomplete(self, file: BucketFile) -> BucketFile:
        stats = dict(file.stats)
        incomplete = stats.pop("incomplete", None)
        if incomplete is None:
            return file
        self.incomplete += [(partition, offset, reason) for partition, offset, reason in incomplete]
        return replace(file, stats=stats, footer=None)  # the footer has them too


def _quarantine(
    advance: Advance,
    progress: AdvanceProgress,
    letters: DataFrame | pa.Table,
    ranges: Ranges,
    told: tuple[object, ...],
    *,
    again: bool,
) -> tuple[AdvanceProgress, int]:
    """Send the dead letters of changes that can't be applied, once; return how many there are.

    The ranges are committed first: a run that takes over sends the very same ones again, which adds nothing. Those
    of a rewind (`again`) are its own, and it begins again with the same. `told` is what else tells these letters from
    others of the same ranges.
    """
    if progress.manifest.quarantining is None and not again:
        spans = {str(ssp): span for ssp, span in ranges.items()}
        progress = commit_fields(advance, progress, quarantining=spans, change=Change(action="quarantine"))
    system = advance.source.system
    sent = send_dead_letters(
        advance.context.systems,
        advance.spec,
        letters,
        producer=_dead_letter_producer(advance, progress, told),
        sequence=1 + sum(system.distance(ssp, "0", end) for ssp, end in offsets_after(progress, ranges).items()),
    )
    return progress, sent


def _dead_letter_producer(advance: Advance, progress: AdvanceProgress, told: tuple[object, ...]) -> str:
    """Return the producer of dead letters: another one where the same ranges may give other letters.

    That is so after a rebuild, a changed declaration, or a compaction that has moved the horizon, in a rewind, and
    where an erasure has taken the rows that changes keep columns of.
    """
    spec, extractor, manifest = advance.spec, advance.spec.extractor, progress.manifest
    facts = (
        spec.following.changes.describe(),
        extractor and extractor.describe(),
        spec.columns,
        manifest.horizon,
        *([manifest.positions_from] if manifest.positions_from else []),
        *told,
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
    return f"dead-{spec.name}-{progress.bootstrap.started_at:%Y%m%dT%H%M%S%f}-{digest}"


@dataclass(frozen=True, slots=True)
class _WrittenChanges:
    """The generation that an attempt made of these ranges; `reached` says that they end a bootstrap."""

    attempt: Attempt
    generation: Generation
    ranges: Ranges
    counters: dict[str, int]
    reached: bool
    rewinding: ActiveRewind | None
    first_ordered: Samples | None


def apply_changes(advance: Advance, progress: AdvanceProgress) -> tuple[AdvanceProgress, Action]:
    """Apply what has come, a chunk a commit; return what that came to."""
    action: Action = "up-to-date"
    began, done = time.monotonic(), 0
    while True:
        running = progress.running
        ranges, last = next_ranges(advance, progress)
        reached = running and last and reaches_target(advance, progress, ranges)
        if not ranges and not reached:
            return progress, "waiting" if running else action
        progress, records = apply_ranges(advance, progress, ranges, reached=reached)
        done += records
        action = "bootstrapped" if running else "applied" if action == "up-to-date" else action
        if running:
            took = time.monotonic() - began
            system = advance.source.system
            detail = describe_progress(system, progress.manifest, took, 0 if reached else done)
            advance.stages.tell("bootstrap", took, detail)
        if last:  # what came since a bootstrap began is for the next advance: readers need not wait for it
            return progress, action if reached or not running else "waiting"


def apply_ranges(
    advance: Advance,
    progress: AdvanceProgress,
    ranges: Ranges,
    *,
    reached: bool = False,
    rewinding: ActiveRewind | None = None,
) -> tuple[AdvanceProgress, int]:
    """Read these changes and commit them; return how many records they were.

    `reached` says that they end a bootstrap, `rewinding` that they are applied again.
    """
    context, name, log = advance.context, advance.spec.name, advance.log
    attempt = log.attempt()
    generation = attempt.generation(progress.manifest.next_generation)
    records, samples = advance.source.count(ranges) if ranges else 0, progress.manifest.first_ordered
    counters = {"read": records}
    running, begins = progress.running, _writes_base(advance, progress)
    over_time = _over_time_write(advance, progress, begins)
    # By another order than the offset a deletion must beat what comes after it with a lower value, also in a base; over
    # time it ends what was there.
    tombstones = not begins or advance.spec.following.order is not None or over_time is not None
    try:
        with AttemptRecord(context.lake, name, attempt.id, context.by), _lease_served_version(advance, progress):
            alone = over_time is None and rewinding is None  # else stored rows are read, too
            with advance.stages("build"), interpret_small_plans(context.spark, records if records and alone else None):
                if records:
                    advance.stages.begin_build()
                    progress, generation, counted, samples = write_changes(
                        advance,
                        progress,
                        attempt,
                        ranges,
                        keep_tombstones=tombstones,
                        over_time=over_time,
                        rewinding=rewinding,
                    )
                    counted["deleted"] += sum(int(file.stats.get("tombstones", 0)) for file in generation.files)
                    counted.pop("conflicting", None)  # of a change stream nothing else is expected
                    counters |= counted if running else {"changes": generation.rows, **counted}
            with advance.stages("commit"):
                written = _WrittenChanges(attempt, generation, ranges, counters, reached, rewinding, samples)
                progress = _commit_written(advance, progress, written)
    except CommitConflictError:
        delete_attempt(context.lake, name, attempt.id)
        raise
    delete_attempt(context.lake, name, attempt.id)
    return replace(progress, counters=sum_counters(dict(progress.counters), counters)), records


@contextmanager
def _lease_served_version(advance: Advance, progress: AdvanceProgress) -> Iterator[None]:
    """Hold what is served while changes are completed from its rows: compacted and discarded, they would be gone."""
    version, following = progress.manifest.version, advance.spec.following
    if not following.completes or progress.running or version is None:
        yield
        return
    lake, name = advance.context.lake, advance.spec.name
    try:
        lease = Lease.acquire(lake, name, [version.id], holder=f"advance by {advance.context.by}")
    except VersionDiscardedError as error:
        raise CommitConflictError(
            f"dataset {name!r}: version {version.id} was discarded while this advance was about to read it.",
            ADVANCE_AGAIN,
            dataset=name,
        ) from error
    with lease:
        yield


def _over_time_write(advance: Advance, progress: AdvanceProgress, begins: bool) -> OverTimeWrite | None:
    """Return how rows over time are written, None for a table without history: a base says where each row ends."""
    if advance.spec.following.history is None:
        return None
    version = progress.manifest.version
    served = () if progress.running or version is None else version.generations
    return OverTimeWrite(told=begins, newest=find_newest_valid_from(served))


def _writes_base(advance: Advance, progress: AdvanceProgress) -> bool:
    """Whether what is written next is a base: nothing is below it."""
    if progress.running:
        return not progress.bootstrap.building
    version = progress.manifest.version
    return version is None or not any(generation.files for generation in version.generations)


def _commit_written(advance: Advance, progress: AdvanceProgress, written: _WrittenChanges) -> AdvanceProgress:
    """Commit data and offsets together."""
    try:
        return commit_with_retries(
            advance,
            progress,
            lambda current: _manifest_with_changes(advance, current, written),
            commit_id=written.attempt.id,
        )
    except CommitConflictError:
        advance.log.drop(written.generation)
        raise


def _manifest_with_changes(advance: Advance, progress: AdvanceProgress, written: _WrittenChanges) -> UnboundedManifest:
    """Return the manifest with these changes in it; changes that hold no record leave the version as it is."""
    source, manifest, bootstrap = advance.source, progress.manifest, progress.bootstrap
    generation, running = written.generation, progress.running
    offsets = manifest.offsets | offsets_to_json({ssp: end for ssp, (_, end) in written.ranges.items()})
    after = manifest.after(
        declaration=source.declaration,
        offsets=offsets,
        stream=source.info.identity,
        counters=sum_counters(manifest.counters, written.counters),
        first_ordered=written.first_ordered,
        quarantining=None,
        confirmed_at=advance.snapshot.at if offsets == offsets_to_json(progress.ends) else manifest.confirmed_at,
        decision=advance.decision,
        next_generation=manifest.next_generation + (1 if generation.files or running else 0),
        change=Change(action="bootstrap" if running else "apply"),
    )
    if written.rewinding is not None:
        after = written.rewinding.record_in_manifest(after, source.system)
    if not running:
        if not generation.files:
            return after
        assert manifest.version is not None
        generations = (*(before for before in manifest.version.generations if before.files), generation)
        counters = written.counters
    else:
        building = (*bootstrap.building, *([generation] if generation.files else []))
        if not written.reached:
            return after.after(bootstrap=bootstrap.model_copy(update={"building": building}))
        now = advance.context.now()
        done = bootstrap.model_copy(update={"state": "done", "finished_at": now, "building": ()})
        after = after.after(bootstrap=done, confirmed_at=bootstrap.started_at, horizon=None)
        generations = building or (generation,)
        counters = sum_counters(dict(progress.counters), written.counters)
    return manifest_with_version(advance, progress.commit, after, written.attempt, generations, counters)
