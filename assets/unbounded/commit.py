"""Commits the table of an unbounded dataset during an advance.

Each commit holds data and offsets together, so one commit is one consistent cut across all
partitions; it is retried where another writer only compacted or discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from dagster_adjunct.assets.declaration.dataset import UnboundedDataset
from dagster_adjunct.assets.generation import Runtime, count_deletions
from dagster_adjunct.assets.sources.entries import (
    Offsets,
    OpenedChanges,
    Ranges,
    offsets_by_partition,
    offsets_to_json,
)
from dagster_adjunct.assets.sources.transactions import limit_to_complete_transactions
from dagster_adjunct.assets.unbounded.recovery import (
    TableSnapshot,
    effective_max_age,
    evolve_table_columns,
)
from dagster_adjunct.assets.unbounded.row_rules import Findings
from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog
from dagster_adjunct.assets.versions.manifest import (
    Bootstrap,
    Change,
    Decision,
    Retired,
    UnboundedManifest,
    as_unbounded,
)
from dagster_adjunct.assets.versions.reports import Stages
from dagster_adjunct.assets.versions.version import (
    SealedVersion,
    build_layout,
    build_version,
    count_current_rows,
    describe_history_length,
    history_from_spec,
    version_id,
)
from dagster_adjunct.assets.versions.watermark import passed_marks
from dagster_adjunct.resources.bucketing.files import BucketLayout, Generation
from dagster_adjunct.resources.errors import CommitConflictError
from dagster_adjunct.resources.objects.commit_log import Commit, commit_with_rebase
from dagster_adjunct.resources.schemas.schema import AS_NAMED, StoredNames
from dagster_adjunct.resources.streams.system import StreamSystem, SystemStreamPartition

_NOT_BEGUN = Bootstrap(
    state="running", start={}, target={}, started_at=datetime.fromtimestamp(0, UTC)
)
"""Stands in the manifest of a new table until `begin_table` commits its first one."""


@dataclass(frozen=True, slots=True)
class Advance:
    """The state of a running advance: the table that it found, the decision made on that, and its
    progress.

    `commit` and `manifest` are the newest ones known; changes are read up to the offsets `ends`.
    `sealed` are the ids of the versions that it has committed, oldest first. `warnings` are about
    the values of the first changes, `findings` those of the validators.
    """

    context: Runtime
    snapshot: TableSnapshot
    decision: Decision
    stages: Stages
    commit: Commit | None
    manifest: UnboundedManifest
    ends: Offsets
    sealed: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    findings: Findings = ()

    @classmethod
    def of(
        cls, context: Runtime, snapshot: TableSnapshot, decision: Decision, stages: Stages
    ) -> Advance:
        """Return an advance that has done nothing yet.

        Without a stored table its manifest is a new one, which is not committed.
        """
        manifest = snapshot.manifest or UnboundedManifest(
            name=snapshot.spec.name,
            declaration=snapshot.source.declaration,
            offsets=offsets_to_json(snapshot.ends),
            bootstrap=_NOT_BEGUN,
        )
        return cls(context, snapshot, decision, stages, snapshot.commit, manifest, snapshot.ends)

    @property
    def source(self) -> OpenedChanges:
        """The opened input stream of the dataset."""
        return self.snapshot.source

    @property
    def spec(self) -> UnboundedDataset:
        """The declaration of the dataset."""
        return self.snapshot.spec

    @property
    def log(self) -> DatasetLog:
        """The commits of the dataset."""
        return self.context.log(self.spec.name)

    @property
    def bootstrap(self) -> Bootstrap:
        """The bootstrap that is running, or the last one."""
        return self.manifest.bootstrap

    @property
    def names(self) -> StoredNames:
        """The stored names of the columns: of the table that is built, else of the served
        version.
        """
        if self.running:
            return self.bootstrap.names
        version = self.manifest.version
        return AS_NAMED if version is None else version.names

    @property
    def running(self) -> bool:
        """Whether a bootstrap is running."""
        return self.bootstrap.state == "running"

    @property
    def target(self) -> Offsets:
        """Up to where it reads: a bootstrap's target, else the ends of the stream."""
        if self.running:
            return offsets_by_partition(self.bootstrap.target)
        return self.ends

    def after(self, commit: Commit, manifest: UnboundedManifest) -> Advance:
        """Return the advance after this commit, whose manifest is `manifest`. If that has a new
        version, it is added to `sealed`.
        """
        version = manifest.version
        sealed = self.sealed
        if version is not None and version is not self.manifest.version:
            sealed = (*sealed, version.id)
        return replace(self, commit=commit, manifest=manifest, sealed=sealed)


def commit_manifest(
    advance: Advance, manifest: UnboundedManifest, commit_id: str | None
) -> Advance:
    """Commit `manifest`. Raises CommitConflictError where another writer committed first; then
    nothing is committed.
    """
    commit = advance.log.commit(
        advance.commit, manifest, by=advance.context.by, commit_id=commit_id
    )
    return advance.after(commit, manifest)


def commit_with_retries(
    advance: Advance,
    decide: Callable[[Advance], UnboundedManifest],
    *,
    commit_id: str | None = None,
) -> Advance:
    """Commit the manifest that `decide` makes of the current state; retry where others only
    compacted or discarded. `commit_id` is the id of the commit, None for a new one.

    Raises CommitConflictError where another writer has read further, has started the table again,
    has raised its watermark, or has erased keys from whose rows our changes may have been
    completed.
    """

    def attempt(seen: Advance) -> Advance:
        return commit_manifest(seen, decide(seen), commit_id)

    def catch_up(seen: Advance) -> Advance | None:
        """Return the advance over the current state, None if our changes no longer apply."""
        commit, current = advance.log.read()
        if current is None:
            return None
        fresh = as_unbounded(current)
        if not _has_same_progress(advance.spec, advance.manifest, fresh):
            return None
        if advance.spec.following.reads_rows and _has_erased(advance):
            return None
        return replace(seen, commit=commit, manifest=fresh)

    return commit_with_rebase(advance, attempt, catch_up)


def _has_erased(advance: Advance) -> bool:
    """Return whether another writer has erased keys since the advance's commit."""
    since = 0
    if advance.commit is not None:
        since = advance.commit.number
    for commit, manifest in advance.log.history():
        if commit.number <= since:
            return False
        if manifest.change is not None and manifest.change.action == "erase":
            return True
    return False


def commit_fields(advance: Advance, **changes: Any) -> Advance:
    """Commit new values of these manifest fields; the others stay, with the data and the
    offsets.
    """
    return commit_with_retries(advance, lambda current: current.manifest.after(**changes))


def commit_decision(advance: Advance) -> Advance:
    """Commit the decision, unless the stored one has the same action and reason."""
    stored = advance.manifest.decision
    made = advance.decision
    if stored is not None and (stored.action, stored.reason) == (made.action, made.reason):
        return advance
    return commit_fields(advance, decision=made, change=change_from_decision(made))


def confirm_caught_up(advance: Advance) -> Advance:
    """Commit that the table is caught up now. Does nothing while changes are unread.

    That is needed only where something limits how old this knowledge may be: `effective_max_age`,
    or the time after which partitions are idle. It is not committed again before a tenth of that
    time has passed.
    """
    limits = []
    max_age = effective_max_age(advance.source)
    if max_age is not None:
        limits.append(max_age)
    watermark = advance.spec.following.watermark
    if watermark is not None and watermark.idle_after is not None:
        limits.append(watermark.idle_after)
    if not limits:
        return advance
    if advance.manifest.offsets != offsets_to_json(advance.ends):
        return advance  # changes of an unfinished transaction are waiting
    confirmed = advance.manifest.confirmed_at
    now = advance.snapshot.at
    if confirmed is not None and now - confirmed < min(limits) / 10:
        return advance
    passed = passed_marks(advance.spec, advance.manifest)
    try:
        return commit_fields(
            advance,
            confirmed_at=now,
            watermark=advance.manifest.watermark.model_copy(update={"passed": passed}),
            decision=advance.decision,
            change=Change(action="confirm"),
        )
    except CommitConflictError:  # another writer has confirmed it, or read further
        commit, fresh = advance.log.read()
        return replace(advance, commit=commit, manifest=as_unbounded(fresh or advance.manifest))


def change_from_decision(decision: Decision) -> Change:
    """Return the description of a commit that follows this decision."""
    return Change(action=decision.action, reason=decision.reason)


def _has_same_progress(
    spec: UnboundedDataset, before: UnboundedManifest, fresh: UnboundedManifest
) -> bool:
    """Return whether no other writer has read further, started the table again or raised its
    watermark, so that our changes still apply.
    """
    names = ("offsets", "bootstrap", "next_generation", "quarantining", "applied")
    if before.declaration.partitions != fresh.declaration.partitions:
        return False  # our files are in other buckets
    if before.bootstrap.state == "done" and before.horizon != fresh.horizon:
        return False  # the horizon has moved, so other changes are late
    if passed_marks(spec, before) != passed_marks(spec, fresh):
        return False  # our changes were not compared with the watermark that readers pass now
    return all(getattr(before, name) == getattr(fresh, name) for name in names)


MAX_FOOTER_BYTES = 256 * 1024
"""Commits leave out larger footers, which every later commit would repeat."""


def next_version(parent: Commit | None, attempt: Attempt, now: datetime) -> dict[str, Any]:
    """Return the id, number and time of the version that an attempt commits after `parent`."""
    number = 1
    if parent is not None:
        number = parent.number + 1
    return {"id": version_id(number, attempt.id), "number": number, "sealed_at": now}


def count_entries(generations: Sequence[Generation], *, over_time: bool) -> int | None:
    """Return the number of entries in these generations; None if only a merge would tell."""
    if len(generations) != 1:
        return None
    if over_time:
        return count_current_rows(generations[0])
    if count_deletions(generations[0]):
        return None
    return generations[0].rows


def manifest_with_version(
    advance: Advance,
    manifest: UnboundedManifest,
    attempt: Attempt,
    generations: tuple[Generation, ...],
    counters: Mapping[str, int],
    names: StoredNames | None = None,
) -> UnboundedManifest:
    """Return the manifest with a new version of these generations served; the generations that no
    longer belong to it are retired.

    `counters` are those of the version. `names` are the stored names of its columns, None for those
    of the advance.
    """
    source = advance.source
    now = advance.context.now()
    history = history_from_spec(advance.spec)
    before = manifest.version
    if history is not None and before is not None and before.history is not None:
        pruned = None
        if any(generation.folder in before.folders for generation in generations):
            pruned = before.history.pruned  # generations that stay lack what was pruned
        history = history.after(pruned=pruned)
    if names is None:
        names = advance.names
    start = manifest.bootstrap.start
    version = build_version(
        advance.spec,
        source.schema,
        generations,
        names=names,
        **next_version(advance.commit, attempt, now),
        rows=count_entries(generations, over_time=history is not None),
        offsets={ssp: (start[ssp], end) for ssp, end in manifest.offsets.items()},
        counters=dict(counters),
        history=history,
        positions=source.positions,
    )
    return switch_version(manifest, version, now)


def switch_version(
    manifest: UnboundedManifest, version: SealedVersion, now: datetime
) -> UnboundedManifest:
    """Return the manifest with `version` served from `now` on; generations that only earlier
    versions read are retired.
    """
    needed = version.folders
    retired = list(manifest.retired)
    for old in manifest.served_generations:
        if old.folder not in needed and old.files:
            retired.append(
                Retired(generation=old.id, folder=old.folder, until=version.number, at=now)
            )
    return manifest.after(version=version, retired=tuple(retired))


def strip_large_footers(generation: Generation) -> Generation:
    """Return the generation, without footers where these are too large for a commit."""
    if generation.footer_size > MAX_FOOTER_BYTES:
        return generation.without_footers()
    return generation


def table_layout(source: OpenedChanges, names: StoredNames) -> BucketLayout:
    """Return the layout of a table's files by its current declaration; `names` are the stored names
    of its columns.
    """
    spec = source.spec
    schema = source.schema
    layout = build_layout(
        schema.with_sensitive(*(name for name in spec.masked if name in schema)),
        spec.key,
        spec.partition_by,
        spec.partitions,
        source.positions,
        over_time=spec.over_time,
    )
    return replace(layout, names=names)


def _describe_columns(names: Sequence[str] | None) -> str:
    """Return the history columns in words; None are all columns."""
    if names is None:
        return "all"
    return ", ".join(names)


def evolve_table(advance: Advance) -> Advance:
    """Commit a version with the declared columns and length of history; stored rows are not
    rewritten.

    On read, added columns are null in stored rows, widened ones are cast, and renamed ones have
    their stored names. The next major compaction rewrites the rows, and drops those that ended
    before the new history: that is why this is committed even without changes.
    """
    version = advance.manifest.version
    source = advance.source
    assert version is not None, "only a served version evolves"
    input_names = advance.manifest.declaration.input_names
    evolution = evolve_table_columns(source, version.named_columns, input_names)
    changes = [*evolution.changes]
    history = describe_history_length(version.history)
    declared = describe_history_length(history_from_spec(advance.spec))
    if history != declared:
        changes.append(f"history is {declared}, was {history}")
    if version.history_columns != advance.spec.history_columns:
        changes.append(f"history_columns are {_describe_columns(advance.spec.history_columns)}")
    attempt = advance.log.attempt()
    after = advance.manifest.after(
        declaration=source.declaration,
        decision=advance.decision,
        change=Change(action="evolve", reason="; ".join(filter(None, changes))),
    )
    after = manifest_with_version(
        advance, after, attempt, version.generations, version.counters, evolution.names
    )
    return commit_manifest(advance, after, attempt.id)


class NextRanges(NamedTuple):
    """The next ranges to read, about one chunk, and whether they are the last ones for now."""

    ranges: Ranges
    are_last: bool


def next_ranges(advance: Advance) -> NextRanges:
    """Return the next ranges to read, {} if there is nothing to read.

    If an earlier run was sending the dead letters of some ranges, exactly these are returned. Where
    transactions are kept whole, the ranges end before the first incomplete one, and a chunk without
    a complete one is enlarged. A bootstrap then reads beyond its target to the end of the
    transaction.
    """
    quarantining = advance.manifest.quarantining
    if quarantining is not None:
        begun = {SystemStreamPartition.parse(ssp): span for ssp, span in quarantining.items()}
        return NextRanges(begun, reaches_target(advance, begun))
    system = advance.source.system
    starts = offsets_by_partition(advance.manifest.offsets)
    are_whole = advance.spec.transactions is not None
    ends = advance.ends if are_whole else advance.target
    # 0 in a partition that has read beyond the target.
    lags = {ssp: max(system.distance(ssp, start, ends[ssp]), 0) for ssp, start in starts.items()}
    lag = sum(lags.values())
    chunk = advance.spec.following.chunk
    while True:
        ranges = _divide_chunk(system, starts, lags, chunk)
        if are_whole and ranges:
            context = advance.context
            ranges = limit_to_complete_transactions(
                advance.spec, context.systems, context.spark(), advance.source, ranges
            )
        are_last = lag <= chunk
        if ranges or are_last:
            return NextRanges(ranges, are_last)
        chunk *= 4


def _divide_chunk(
    system: StreamSystem, starts: Offsets, lags: Mapping[SystemStreamPartition, int], chunk: int
) -> Ranges:
    """Return the next ranges of all partitions, about `chunk` offsets together, divided in
    proportion to the unread ones (`lags`); {} if none is unread.
    """
    lag = sum(lags.values())
    ranges = {}
    for ssp, unread in lags.items():
        if unread:
            share = -(-unread * min(chunk, lag) // lag)  # rounded up
            ranges[ssp] = (starts[ssp], system.advance(ssp, starts[ssp], share))
    return ranges


def reaches_target(advance: Advance, ranges: Ranges) -> bool:
    """Whether the table has reached the advance's target once these ranges are applied."""
    at = offsets_after(advance, ranges)
    compare = advance.source.system.compare
    return all(compare(at[ssp], end) >= 0 for ssp, end in advance.target.items())


def offsets_after(advance: Advance, ranges: Ranges) -> Offsets:
    """Return the next offsets to read once these ranges are applied."""
    ends = {ssp: end for ssp, (_, end) in ranges.items()}
    return {**offsets_by_partition(advance.manifest.offsets), **ends}
