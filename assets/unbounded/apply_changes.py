"""Applying changes: [offset, upcoming) becomes deltas, a chunk a commit; of a bootstrap, generations of the new table.

A commit costs what its changes cost, however large the table is: readers merge base and deltas. What a bootstrap
builds lies beside the table that is served, until its target is reached.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.sources.opened_stream import as_stored
from dagster_adjunct.assets.unbounded.bootstrap_progress import time_left
from dagster_adjunct.assets.unbounded.commit_table import commit_again
from dagster_adjunct.assets.unbounded.next_ranges import next_ranges, reaches_target
from dagster_adjunct.assets.unbounded.next_served_version import with_version
from dagster_adjunct.assets.unbounded.table_validity import ADVANCE_AGAIN
from dagster_adjunct.assets.unbounded.write_changes import write_changes
from dagster_adjunct.assets.versions.build_attempts import AttemptRenewal, forget_attempt
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.kept_history import newest_valid_from
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.assets.writing.write_generation import add
from dagster_adjunct.resources.bucketing.write_over_time import OverTimeWrite
from dagster_adjunct.resources.errors import CommitConflictError, VersionDiscardedError
from dagster_adjunct.resources.spark.interpreted_plans import interpreted_if_few

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.changes.change_order import Samples
    from dagster_adjunct.assets.sources.opened_stream import Ranges
    from dagster_adjunct.assets.unbounded.commit_table import Advance, AdvanceProgress
    from dagster_adjunct.assets.unbounded.reapply_changes import Rewinding
    from dagster_adjunct.assets.versions.advance_report import Action
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.resources.bucketing.bucket_files import Generation


@dataclass(frozen=True, slots=True)
class _Written:
    """The generation that an attempt made of these ranges; `reached` says that they end a bootstrap."""

    attempt: Attempt
    generation: Generation
    ranges: Ranges
    counters: dict[str, int]
    reached: bool
    rewinding: Rewinding | None
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
            detail = time_left(system, progress.manifest, took, 0 if reached else done)
            advance.stages.tell("bootstrap", took, detail)
        if last:  # what came since a bootstrap began is for the next advance: readers need not wait for it
            return progress, action if reached or not running else "waiting"


def apply_ranges(
    advance: Advance,
    progress: AdvanceProgress,
    ranges: Ranges,
    *,
    reached: bool = False,
    rewinding: Rewinding | None = None,
) -> tuple[AdvanceProgress, int]:
    """Read these changes and commit them; return how many records they were.

    `reached` says that they end a bootstrap, `rewinding` that they are applied again.
    """
    context, name, log = advance.context, advance.spec.name, advance.log
    attempt = log.attempt()
    generation = attempt.generation(progress.manifest.next_generation)
    records, samples = advance.source.count(ranges) if ranges else 0, progress.manifest.first_ordered
    counters = {"read": records}
    running, begins = progress.running, _begins(advance, progress)
    over_time = _over_time(advance, progress, begins)
    # By another order than the offset a deletion must beat what comes after it with a lower value, also in a base; over
    # time it ends what was there.
    tombstones = not begins or advance.spec.following.order is not None or over_time is not None
    try:
        with AttemptRenewal(context.lake, name, attempt.id, context.by), _held(advance, progress):
            alone = over_time is None and rewinding is None  # else stored rows are read, too
            with advance.stages("build"), interpreted_if_few(context.spark, records if records and alone else None):
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
                written = _Written(attempt, generation, ranges, counters, reached, rewinding, samples)
                progress = _commit_written(advance, progress, written)
    except CommitConflictError:
        forget_attempt(context.lake, name, attempt.id)
        raise
    forget_attempt(context.lake, name, attempt.id)
    return replace(progress, counters=add(dict(progress.counters), counters)), records


@contextmanager
def _held(advance: Advance, progress: AdvanceProgress) -> Iterator[None]:
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


def _over_time(advance: Advance, progress: AdvanceProgress, begins: bool) -> OverTimeWrite | None:
    """Return how rows over time are written, None for a table without history: a base says where each row ends."""
    if advance.spec.following.history is None:
        return None
    version = progress.manifest.version
    served = () if progress.running or version is None else version.generations
    return OverTimeWrite(told=begins, newest=newest_valid_from(served))


def _begins(advance: Advance, progress: AdvanceProgress) -> bool:
    """Whether what is written next is a base: nothing is below it."""
    if progress.running:
        return not progress.bootstrap.building
    version = progress.manifest.version
    return version is None or not any(generation.files for generation in version.generations)


def _commit_written(advance: Advance, progress: AdvanceProgress, written: _Written) -> AdvanceProgress:
    """Commit data and offsets together."""
    try:
        return commit_again(
            advance, progress, lambda current: _after(advance, current, written), commit_id=written.attempt.id
        )
    except CommitConflictError:
        advance.log.drop(written.generation)
        raise


def _after(advance: Advance, progress: AdvanceProgress, written: _Written) -> UnboundedManifest:
    """Return the manifest with these changes in it; changes that hold no record leave the version as it is."""
    source, manifest, bootstrap = advance.source, progress.manifest, progress.bootstrap
    generation, running = written.generation, progress.running
    offsets = manifest.offsets | as_stored({ssp: end for ssp, (_, end) in written.ranges.items()})
    after = manifest.after(
        declaration=source.declaration,
        offsets=offsets,
        stream=source.info.identity,
        counters=add(manifest.counters, written.counters),
        first_ordered=written.first_ordered,
        quarantining=None,
        confirmed_at=advance.seen.at if offsets == as_stored(progress.ends) else manifest.confirmed_at,
        decision=advance.decision,
        next_generation=manifest.next_generation + (1 if generation.files or running else 0),
        change=Change(action="bootstrap" if running else "apply"),
    )
    if written.rewinding is not None:
        after = written.rewinding.recorded(after, source.system)
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
        counters = add(dict(progress.counters), written.counters)
    return with_version(advance, progress.commit, after, written.attempt, generations, counters)
