"""Inspects an unbounded dataset's table and its stream, and commits the table during an advance.

A table is valid if its manifest and objects are complete, its stream has the same partitions and still holds its
offsets, and it was confirmed caught up within `max_age`. A bootstrap continues unless its stream or its columns have
changed. Each commit holds data and offsets together, so one commit is one consistent cut across all partitions; it is
retried where another writer only compacted or discarded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any, Literal

from dagster_adjunct.assets.declaration.change_values import describe_order
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.sources.entries import Offsets, OpenedStream, Ranges, offsets_by_partition, offsets_to_json
from dagster_adjunct.assets.sources.transactions import limit_to_complete_transactions
from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog
from dagster_adjunct.assets.versions.manifest import (
    Bootstrap,
    Change,
    DatasetManifest,
    Decision,
    Retired,
    UnboundedManifest,
    as_unbounded,
    follow_repartition,
)
from dagster_adjunct.assets.versions.reports import Stages
from dagster_adjunct.assets.versions.version import (
    DatasetDeclaration,
    SealedVersion,
    build_layout,
    build_version,
    check_declaration,
    count_current_rows,
    describe_history_length,
    history_from_spec,
    version_id,
)
from dagster_adjunct.assets.writing.generation import Runtime, count_deletions
from dagster_adjunct.resources.bucketing.files import BucketLayout, Generation
from dagster_adjunct.resources.errors import CommitConflictError, MalformedDocumentError, OffsetOutOfRangeError
from dagster_adjunct.resources.objects.commit_log import Commit, commit_with_rebase, is_deletion_commit
from dagster_adjunct.resources.streams.system import SystemStreamPartition

ADVANCE_AGAIN = "Nothing of this attempt is visible. Advance again, which continues from the other commit."


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """A table and its stream at the moment `at`.

    `commit` is the current one, None before the first. `manifest` is None without a table; where `damage` says why the
    current manifest can't be read, it is the newest readable one; if `carried`, it is not committed yet and continues
    in the repartitioned stream. `oldest` and `ends` are, by partition, the first offset that the stream holds and the
    next one to come. `missing` are objects of the table that are missing or truncated. `refusal` is the error where
    nothing can be decided: the pointer is lost, or another writer committed meanwhile.
    """

    source: OpenedStream
    at: datetime
    commit: Commit | None
    manifest: UnboundedManifest | None
    oldest: Offsets
    ends: Offsets
    carried: bool = False
    damage: str = ""
    missing: tuple[str, ...] = ()
    refusal: CommitConflictError | MalformedDocumentError | None = None

    @property
    def spec(self) -> AdjunctDataset:
        """The declaration."""
        return self.source.spec

    @property
    def has_all_keys(self) -> bool:
        """Whether the stream, read from its oldest offset, holds a record of every key that was ever in it."""
        return self.source.info.has_all_keys(self.oldest)


@dataclass(frozen=True, slots=True)
class TableContinuity:
    """Whether a table can be continued.

    `problem` says why it is not valid, `lost` that retention has deleted the changes that come next, `building` that
    its bootstrap is not finished. `refusal` is the error to raise if the stream was recreated.
    """

    store: Literal["none", "building", "invalid", "valid"]
    problem: str = ""
    lost: bool = False
    building: bool = False
    refusal: OffsetOutOfRangeError | None = None


def inspect_table(context: Runtime, spec: AdjunctDataset) -> TableSnapshot:
    """Return the table and its stream as they are now; reads no data files and changes nothing.

    Raises DatasetError for an input that does not fit this dataset, and for another key, partitioning or input than the
    table was declared with. Columns are checked later.
    """
    source = OpenedStream.of(context.systems, spec)
    log = context.log(spec.name)
    commit, stored, damage = log.read_or_newest()
    manifest = None if stored is None else require_matching_manifest(stored, source.declaration)
    carried = follow_repartition(manifest, source.info) if manifest is not None and not damage else None
    manifest = manifest if carried is None else as_unbounded(carried)
    at = context.now()
    ends = source.system.upcoming(source.ssps)
    snapshot = TableSnapshot(
        source,
        at,
        commit,
        manifest,
        oldest=source.system.oldest(source.ssps),
        ends=ends,
        carried=carried is not None,
        damage=damage,
        missing=() if manifest is None or damage else tuple(_missing_objects(log, manifest)),
    )
    if manifest is None and not damage:
        return replace(snapshot, refusal=_lost_pointer_error(log))
    if commit is not None and assess_continuity(snapshot).store == "invalid":
        head = log.log.head()
        if head is not None and head.id != commit.id:  # whose writer may have removed the table's files
            return replace(snapshot, refusal=_overtaken_error(log, f" (number {head.number}, after {commit.number})"))
    return snapshot


def require_matching_manifest(stored: DatasetManifest, declared: DatasetDeclaration) -> UnboundedManifest:
    """Return the stored manifest; raise DatasetError where its declaration does not match the declared one.

    The number of input partitions is not compared: `assess_continuity` does that.
    """
    partitions = {"input_partitions": stored.declaration.input_partitions}
    check_declaration(stored.name, stored.declaration, declared.model_copy(update=partitions))
    return as_unbounded(stored)


def assess_continuity(snapshot: TableSnapshot) -> TableContinuity:
    """Return whether the table can be continued, and if not, why."""
    source, manifest = snapshot.source, snapshot.manifest
    if snapshot.damage:
        return TableContinuity("invalid", f"its manifest is damaged ({snapshot.damage})")
    if manifest is None:
        return TableContinuity("none")
    building = manifest.bootstrap.state == "running"
    offsets = offsets_by_partition(manifest.offsets)
    refusal = source.recreated_error(manifest.stream, offsets, snapshot.ends)
    if refusal is not None:
        return TableContinuity("invalid", refusal.problem, building=building, refusal=refusal)
    added, removed = sorted(set(source.ssps) - set(offsets)), sorted(set(offsets) - set(source.ssps))
    if added or removed:
        changed = ((added, "added"), (removed, "removed"))
        problem = "; ".join(f"{', '.join(map(str, ssps))} {what}" for ssps, what in changed if ssps)
        problem = f"the partitions of its stream have changed ({problem})"
        return TableContinuity("invalid", problem, building=building)
    lost = [ssp for ssp, offset in offsets.items() if source.system.compare(offset, snapshot.oldest[ssp]) < 0]
    if lost:
        ssp, oldest = lost[0], snapshot.oldest[lost[0]]
        problem = f"it continues at offset {offsets[ssp]} of {ssp}, and the oldest in the stream is {oldest}"
        return TableContinuity("invalid", problem, lost=True, building=building)
    if snapshot.missing:
        problem = f"{len(snapshot.missing)} of its objects are missing or cut, first {snapshot.missing[0]}"
        return TableContinuity("invalid", problem, building=building)
    if building:
        problem = _bootstrap_problem(manifest, source, snapshot.at)
        return TableContinuity("invalid", problem, building=True) if problem else TableContinuity("building")
    behind = any(source.system.compare(offset, snapshot.ends[ssp]) < 0 for ssp, offset in offsets.items())
    limit, confirmed = effective_max_age(source), manifest.confirmed_at
    if behind and limit is not None and confirmed is not None and snapshot.at - confirmed > limit:
        return TableContinuity(
            "invalid",
            f"it was last confirmed caught up {confirmed:%Y-%m-%d %H:%M} UTC, longer than {limit} ago, and has not "
            "read all that came since",
        )
    return TableContinuity("valid")


def effective_max_age(source: OpenedStream) -> timedelta | None:
    """Return how long a table that is behind stays valid: the declared `max_age`, else the retention of tombstones."""
    return source.spec.following.max_age or source.info.tombstones_kept


def _missing_objects(log: DatasetLog, manifest: UnboundedManifest) -> list[str]:
    generations = manifest.version.generations if manifest.version else ()
    if manifest.bootstrap.state == "running":
        generations = manifest.bootstrap.building
    return log.find_missing_files(f"{log.prefix}/data", generations)


def _lost_pointer_error(log: DatasetLog) -> CommitConflictError | MalformedDocumentError | None:
    """Return the error for a log with commits and no pointer; starting again at number 1 would hide these commits."""
    if is_deletion_commit(log.log.current()):
        return None
    newest = next(log.log.commits_before(sys.maxsize), None)
    if newest is None or newest.number <= 1:
        return None
    if log.log.head() is not None:
        return _overtaken_error(log)
    return MalformedDocumentError(
        f"dataset {log.name!r} has {newest.number} commits, and its pointer {log.log.pointer_key} is missing in "
        f"{log.lake.url}.",
        "Restore that object from a backup or an older object version; the manifests are intact. To start over, "
        "declare the dataset under a new name.",
        dataset=log.name,
        document=log.log.pointer_key,
    )


def _overtaken_error(log: DatasetLog, numbers: str = "") -> CommitConflictError:
    problem = f"dataset {log.name!r}: another writer committed first, while this one read the table{numbers}."
    return CommitConflictError(problem, ADVANCE_AGAIN, dataset=log.name)


def _bootstrap_problem(manifest: UnboundedManifest, source: OpenedStream, now: datetime) -> str:
    """Return why a running bootstrap can't be continued, "" if it can."""
    bootstrap, kept = manifest.bootstrap, source.info.tombstones_kept
    if bootstrap.columns is not None and bootstrap.columns != source.schema:
        return f"the declared columns have changed since it began ({bootstrap.columns.difference(source.schema)})"
    before, after = manifest.declaration, source.declaration
    if (before.order_by, before.position_type) != (after.order_by, after.position_type):
        was, wanted = describe_order(before.order_by), describe_order(after.order_by)
        return f"the declared order has changed since it began, from {was} to {wanted}"
    if kept is not None and now - bootstrap.started_at > kept:
        return (
            f"it began {bootstrap.started_at:%Y-%m-%d %H:%M} UTC, and its stream keeps deletions for {kept} only: it "
            "may have missed some"
        )
    return ""


_NO_BOOTSTRAP = Bootstrap(state="running", start={}, target={}, started_at=datetime.fromtimestamp(0, UTC))


@dataclass(frozen=True, slots=True)
class Advance:
    """An advance, by the table before it and the decision made on that, and how far it has come.

    `commit` and `manifest` are the last known ones; the stream is read up to `ends`. `sealed` are the ids of the
    versions committed so far, oldest first.
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

    @classmethod
    def of(cls, context: Runtime, snapshot: TableSnapshot, decision: Decision, stages: Stages) -> Advance:
        """Return an advance that has done nothing yet; without a table, its manifest is one of a table to begin."""
        manifest = snapshot.manifest or UnboundedManifest(
            name=snapshot.spec.name,
            declaration=snapshot.source.declaration,
            offsets=offsets_to_json(snapshot.ends),
            bootstrap=_NO_BOOTSTRAP,
        )
        return cls(context, snapshot, decision, stages, snapshot.commit, manifest, snapshot.ends)

    @property
    def source(self) -> OpenedStream:
        """The opened input stream."""
        return self.snapshot.source

    @property
    def spec(self) -> AdjunctDataset:
        """The declaration."""
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
    def running(self) -> bool:
        """Whether the bootstrap is running."""
        return self.bootstrap.state == "running"

    def after(self, commit: Commit, manifest: UnboundedManifest) -> Advance:
        """Return the advance after this commit."""
        version = manifest.version
        made = (version.id,) if version is not None and version is not self.manifest.version else ()
        return replace(self, commit=commit, manifest=manifest, sealed=(*self.sealed, *made))


def commit_manifest(advance: Advance, manifest: UnboundedManifest, *, commit_id: str | None = None) -> Advance:
    """Commit `manifest`. Raises CommitConflictError, and then nothing is visible."""
    commit = advance.log.commit(advance.commit, manifest, by=advance.context.by, commit_id=commit_id)
    return advance.after(commit, manifest)


def commit_with_retries(
    advance: Advance, decide: Callable[[Advance], UnboundedManifest], *, commit_id: str | None = None
) -> Advance:
    """Commit what `decide` makes of the current state; retry where another writer only compacted or discarded.

    Raises CommitConflictError where another writer has read further, has started the table again, or has erased keys
    from whose rows our changes may have been completed.
    """

    def catch_up(seen: Advance) -> Advance | None:
        commit, current = advance.log.read()
        fresh = None if current is None else as_unbounded(current)
        if fresh is None or not _has_same_progress(advance.manifest, fresh):
            return None
        if advance.spec.following.completes:
            since = 0 if advance.commit is None else advance.commit.number
            newer = takewhile(lambda made: made[0].number > since, advance.log.history())
            if any(after.change is not None and after.change.action == "erase" for _, after in newer):
                return None
        return replace(seen, commit=commit, manifest=fresh)

    return commit_with_rebase(advance, lambda seen: commit_manifest(seen, decide(seen), commit_id=commit_id), catch_up)


def commit_fields(advance: Advance, **changes: Any) -> Advance:
    """Commit new values of these manifest fields, without data and offsets."""
    return commit_with_retries(advance, lambda current: current.manifest.after(**changes))


def commit_decision(advance: Advance) -> Advance:
    """Commit the decision unless the same one is stored."""
    stored, made = advance.manifest.decision, advance.decision
    if stored is not None and (stored.action, stored.reason) == (made.action, made.reason):
        return advance
    return commit_fields(advance, decision=made, change=change_from_decision(made))


def confirm_caught_up(advance: Advance) -> Advance:
    """Commit that the table is caught up if its age is limited; at most once in a tenth of the limit."""
    limit, confirmed, now = effective_max_age(advance.source), advance.manifest.confirmed_at, advance.snapshot.at
    if advance.manifest.offsets != offsets_to_json(advance.ends):
        return advance  # changes of an unfinished transaction are waiting
    if limit is None or (confirmed is not None and now - confirmed < limit / 10):
        return advance
    try:
        return commit_fields(advance, confirmed_at=now, decision=advance.decision, change=Change(action="confirm"))
    except CommitConflictError:  # another writer found the same
        commit, fresh = advance.log.read()
        return replace(advance, commit=commit, manifest=as_unbounded(fresh or advance.manifest))


def change_from_decision(decision: Decision) -> Change:
    """Return the description of a commit that follows this decision."""
    return Change(action=decision.action, reason=decision.reason)


def _has_same_progress(before: UnboundedManifest, fresh: UnboundedManifest) -> bool:
    """Whether no other writer has read further or started the table again, so that our changes still apply."""
    names = ("offsets", "bootstrap", "next_generation", "quarantining", "applied")
    if before.declaration.partitions != fresh.declaration.partitions:
        return False
    if before.bootstrap.state == "done" and before.horizon != fresh.horizon:
        return False  # late changes must be decided again
    return all(getattr(before, name) == getattr(fresh, name) for name in names)


MAX_FOOTER_BYTES = 256 * 1024
"""Commits leave out larger footers, which every later commit would repeat."""


def manifest_with_version(
    advance: Advance,
    manifest: UnboundedManifest,
    attempt: Attempt,
    generations: tuple[Generation, ...],
    counters: Mapping[str, int],
) -> UnboundedManifest:
    """Return the manifest with a new version of these generations served; retires the generations that it replaces."""
    number, spec, now = (advance.commit.number if advance.commit else 0) + 1, advance.spec, advance.context.now()
    history, before, rows = history_from_spec(spec), manifest.version, None
    if history is not None and before is not None and before.history is not None:
        folders = {generation.folder for generation in before.generations}
        if any(generation.folder in folders for generation in generations):  # pruned rows are missing still
            history = history.after(pruned=before.history.pruned)
    if len(generations) == 1:  # else only a merge would tell the number of entries
        rows = generations[0].rows if not count_deletions(generations[0]) else None
        rows = count_current_rows(generations[0]) if history is not None else rows
    version = build_version(
        spec,
        advance.source.schema,
        generations,
        id=version_id(number, attempt.id),
        number=number,
        sealed_at=now,
        rows=rows,
        offsets={ssp: (manifest.bootstrap.start[ssp], end) for ssp, end in manifest.offsets.items()},
        counters=dict(counters),
        history=history,
        position_type=advance.source.position_type,
    )
    return switch_version(manifest, version, now)


def switch_version(manifest: UnboundedManifest, version: SealedVersion, now: datetime) -> UnboundedManifest:
    """Return the manifest with `version` served; generations that only earlier versions read are retired."""
    before = manifest.version.generations if manifest.version else ()
    needed = {generation.folder for generation in version.generations}
    replaced = [generation for generation in before if generation.folder not in needed and generation.files]
    retired = [
        Retired(generation=generation.id, folder=generation.folder, until=version.number, at=now)
        for generation in replaced
    ]
    return manifest.after(version=version, retired=(*manifest.retired, *retired))


def strip_large_footers(generation: Generation) -> Generation:
    """Return the generation, without footers where these are too large for a commit."""
    return generation.without_footers() if generation.footer_size > MAX_FOOTER_BYTES else generation


def table_layout(source: OpenedStream) -> BucketLayout:
    """Return the layout of a table's files by its current declaration."""
    spec = source.spec
    schema = source.schema.with_sensitive(*(name for name in spec.sensitive if name in source.schema))
    over_time, keyed = spec.following.history is not None, (spec.key, spec.partition_by, spec.partitions)
    return build_layout(schema, *keyed, positioned=True, over_time=over_time, position_type=source.position_type)


def evolve_table(advance: Advance) -> Advance:
    """Commit a version with the declared columns and length of history; stored rows are not rewritten.

    Added columns are null in them, widened ones are cast on read. The next major compaction rewrites them, and prunes
    by the new history: that is why this is committed even without changes.
    """
    manifest, version, source = advance.manifest, advance.manifest.version, advance.source
    assert version is not None, "only a served version evolves"
    history, declared = map(describe_history_length, (version.history, history_from_spec(advance.spec)))
    lengths = f"history is {declared}, was {history}" if history != declared else ""
    reason = "; ".join(filter(None, (version.columns.difference(source.schema), lengths)))
    attempt = advance.log.attempt()
    after = manifest.after(
        declaration=source.declaration, decision=advance.decision, change=Change(action="evolve", reason=reason)
    )
    after = manifest_with_version(advance, after, attempt, version.generations, version.counters)
    return commit_manifest(advance, after, commit_id=attempt.id)


def next_ranges(advance: Advance) -> tuple[Ranges, bool]:
    """Return the next ranges to read, about one chunk, and whether they are the last ones for now.

    Ranges whose dead letters were being sent are read again unchanged. Where transactions are kept whole, the ranges
    end before the first incomplete one, and a chunk without a complete one is enlarged. A bootstrap then reads beyond
    its target to the end of the transaction.
    """
    system, form = advance.source.system, advance.spec.following.changes
    starts = offsets_by_partition(advance.manifest.offsets)
    transactions = isinstance(form, DebeziumEnvelope) and form.transactions is not None
    target = offsets_by_partition(advance.bootstrap.target) if advance.running else advance.ends
    quarantining = advance.manifest.quarantining
    if quarantining is not None:
        begun: Ranges = {SystemStreamPartition.parse(ssp): span for ssp, span in quarantining.items()}
        at = offsets_after(advance, begun)
        return begun, all(system.compare(at[ssp], target[ssp]) >= 0 for ssp in starts)
    ends = advance.ends if transactions else target
    lags = {ssp: max(system.distance(ssp, start, ends[ssp]), 0) for ssp, start in starts.items()}
    lag, chunk = sum(lags.values()), advance.spec.following.chunk
    while True:
        shares = {ssp: most if lag <= chunk else -(-most * chunk // lag) for ssp, most in lags.items() if most}
        ranges: Ranges = {ssp: (starts[ssp], system.advance(ssp, starts[ssp], count)) for ssp, count in shares.items()}
        if transactions and ranges:
            context = advance.context
            ranges = limit_to_complete_transactions(
                advance.spec, context.systems, context.spark(), advance.source, ranges
            )
        if ranges or lag <= chunk:
            return ranges, lag <= chunk
        chunk *= 4


def reaches_target(advance: Advance, ranges: Ranges) -> bool:
    """Whether the table has reached the bootstrap's target once these ranges are applied."""
    at, target = offsets_after(advance, ranges), offsets_by_partition(advance.bootstrap.target)
    return all(advance.source.system.compare(at[ssp], end) >= 0 for ssp, end in target.items())


def offsets_after(advance: Advance, ranges: Ranges) -> Offsets:
    """Return the next offsets to read once these ranges are applied."""
    return {**offsets_by_partition(advance.manifest.offsets), **{ssp: end for ssp, (_, end) in ranges.items()}}
