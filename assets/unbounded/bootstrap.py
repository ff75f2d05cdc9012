"""Begins a table: its start and its target are committed before anything is read (SAMZA-1278).

    bootstrap            start and target recorded -> bulk snapshot, if one is declared -> changes, chunk by chunk
    create, recreate     an empty table, served at once, that goes on from the last offset or the stream's default

A table that is built anew is built beside the one that is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dagster_adjunct.assets.sources.opened_stream import Offsets, as_stored, by_partition
from dagster_adjunct.assets.unbounded.bulk_snapshot import load_snapshot
from dagster_adjunct.assets.unbounded.commit_table import AdvanceProgress, change_of, commit_manifest
from dagster_adjunct.assets.unbounded.next_served_version import with_version
from dagster_adjunct.assets.versions.build_attempts import forget_attempt
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.assets.versions.unbounded_state import Bootstrap

if TYPE_CHECKING:
    from dagster_adjunct.assets.unbounded.commit_table import Advance
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.resources.bucketing.bucket_files import Generation
    from dagster_adjunct.resources.objects.commit_log import Commit

_NOT_BEGUN = Bootstrap(state="running", start={}, target={}, started_at=datetime.fromtimestamp(0, UTC))


def begin_table(advance: Advance, commit: Commit | None, applied: Mapping[str, str]) -> AdvanceProgress:
    """Commit where a new table begins, in answer to the startpoints in `applied` (ids by partition).

    `commit` is the current one. Raises CommitConflictError where another writer was first, and what the loading of a
    bulk snapshot raises.
    """
    seen = advance.seen
    first = seen.manifest or UnboundedManifest(
        name=seen.spec.name,
        declaration=seen.source.declaration,
        offsets=as_stored(seen.ends),
        bootstrap=_NOT_BEGUN,
    )
    attempt = advance.log.attempt()
    before = AdvanceProgress(commit, first, seen.ends)
    begin = _bootstrapping if advance.decision.action == "bootstrap" else _created
    before, after = begin(advance, before, attempt)
    after = after.after(applied=first.with_applied(applied))
    progress = commit_manifest(advance, before, after, commit_id=attempt.id)
    forget_attempt(advance.context.lake, seen.spec.name, attempt.id)
    return progress


def _bootstrapping(
    advance: Advance, before: AdvanceProgress, attempt: Attempt
) -> tuple[AdvanceProgress, UnboundedManifest]:
    """Return the manifest of a bootstrap that begins beside what is served, and the progress once a snapshot is loaded.

    The target are the ends of the stream after the snapshot was loaded.
    """
    seen, source, first = advance.seen, advance.source, before.manifest
    start: Offsets = source.system.oldest(source.ssps)
    number = first.next_generation
    building: tuple[Generation, ...] = ()
    samples = None
    if seen.spec.following.initial is not None:
        with advance.stages("load"):
            loaded, start, samples = load_snapshot(advance.context, source, attempt, number)
            building, number = (loaded,) if loaded.files else (), number + 1
        before = replace(before, ends=source.system.upcoming(source.ssps), counters={"loaded": loaded.rows})
    bootstrap = Bootstrap(
        state="running",
        start=as_stored(start),
        target=as_stored(before.ends),
        started_at=seen.at,
        building=building,
        columns=source.schema,
        loaded=bool(building),
        why=advance.decision.reason,
    )
    served = first.version is not None
    after = _begun(advance, first, bootstrap).after(
        next_generation=number,
        first_ordered=samples,
        confirmed_at=first.confirmed_at if served else None,
        horizon=first.horizon if served else None,
    )
    return before, after


def _created(advance: Advance, before: AdvanceProgress, attempt: Attempt) -> tuple[AdvanceProgress, UnboundedManifest]:
    """Return the manifest of an empty table that goes on from where the one before it, if any, has read."""
    seen, source, first = advance.seen, advance.source, before.manifest
    known = {} if seen.manifest is None else by_partition(seen.manifest.offsets)
    start = as_stored(source.last_offsets(known, source.system.oldest(source.ssps), seen.ends))
    bootstrap = Bootstrap(
        state="done",
        start=start,
        target=start,
        started_at=seen.at,
        finished_at=seen.at,
        columns=source.schema,
        why=advance.decision.reason,
    )
    number = first.next_generation
    after = _begun(advance, first, bootstrap).after(next_generation=number + 1, confirmed_at=None, horizon=None)
    empty = (attempt.generation(number),)
    return before, with_version(advance, before.commit, after, attempt, empty, {})


def _begun(advance: Advance, first: UnboundedManifest, bootstrap: Bootstrap) -> UnboundedManifest:
    return first.after(
        declaration=advance.source.declaration,
        offsets=bootstrap.start,
        bootstrap=bootstrap,
        stream=advance.source.info.identity,
        first_ordered=None,
        quarantining=None,
        decision=advance.decision,
        change=change_of(advance.decision),
    )
