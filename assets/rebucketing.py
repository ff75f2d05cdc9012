"""Rebucketing: rewrites a dataset into another number of partitions, with the same entries, in one
commit.

Of an unbounded dataset the served table is rewritten, base and deltas. Each generation keeps its
number and the positions and tombstones of its rows, so that readers, compactions and ordered
changes work as before. The stream's offsets stay. Earlier versions keep their partitions and can be
read until they are discarded.

Of a bounded dataset every retained version gets a copy under a new id, so that a rollback finds the
same partitions. Readers keep the old copies until they release them, as after an erasure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from dagster_adjunct.assets.declaration.dataset import DatasetKind
from dagster_adjunct.assets.reading.served_history import REPARTITION_ACTION, ServedHistory
from dagster_adjunct.assets.reading.stored_file import StoredFile, list_generation_files
from dagster_adjunct.assets.retention import erasure
from dagster_adjunct.assets.retention.discard import Roots, delete_doomed, version_holders
from dagster_adjunct.assets.retention.erasure import RewrittenGeneration, VersionReplacement
from dagster_adjunct.assets.unbounded.commit import strip_large_footers, switch_version
from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog
from dagster_adjunct.assets.versions.leases import (
    lease_served,
    list_live_leases,
    read_lake_clock,
    record_build,
)
from dagster_adjunct.assets.versions.manifest import (
    BoundedManifest,
    Change,
    DatasetManifest,
    Repartitioned,
    UnboundedManifest,
    as_bounded,
    as_unbounded,
)
from dagster_adjunct.assets.versions.version import (
    SealedVersion,
    VersionRef,
    has_row_ends,
    version_id,
)
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import require_reason
from dagster_adjunct.resources.bucketing import files
from dagster_adjunct.resources.bucketing.files import (
    BucketFile,
    BucketLayout,
    Generation,
    TimelineOptions,
)
from dagster_adjunct.resources.bucketing.writer import (
    ROWS_PER_GROUP,
    BucketFileWriter,
    WriteOptions,
    write_bucket_file,
)
from dagster_adjunct.resources.lazy_modules import np, pa
from dagster_adjunct.resources.objects.lake import Lake


@dataclass(frozen=True, slots=True)
class RebucketReport:
    """What one repartitioning did: `versions` maps the ids of rewritten versions to their new ids.

    With `dry_run`, the versions that would be rewritten have the new id "". Of an unbounded dataset
    only the served version is rewritten. `pending` are old copies that readers keep, and
    `holding` describes open batches that need a version as it is, which prevents the rewrite.
    """

    dataset: str
    before: int
    partitions: int
    versions: dict[str, str]
    pending: tuple[str, ...] = ()
    follows_changes: bool = False
    rows: int = 0
    holding: tuple[str, ...] = ()
    dry_run: bool = False

    def summary(self) -> str:
        """Return the report in one line."""
        verb = "would be rewritten" if self.dry_run else "rewritten"
        if self.follows_changes:
            what = "the served table"
        else:
            what = f"{len(self.versions)} version(s)"
        return (
            f"dataset {self.dataset}: {what} of {self.rows:,} stored rows {verb} from"
            f" {self.before} into {self.partitions} partitions; declare"
            f" partitions={self.partitions} where it is declared"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        facts = asdict(self)
        del facts["follows_changes"]
        kind: DatasetKind = "unbounded" if self.follows_changes else "bounded"
        return {**facts, "kind": kind}


def check_repartitioning(
    log: DatasetLog, manifest: DatasetManifest, partitions: int, reason: str
) -> int:
    """Return the current number of partitions.

    Raises ConfigurationError for a broadcast dataset, an unchanged number, one outside of 1 to
    100,000, or no reason, and DatasetError during a bootstrap.
    """
    declared = manifest.declaration
    what = f"dataset {log.name!r}"
    require_reason(reason, what, "repartitioned", dataset=log.name)
    if declared.partitions is None:
        raise errors.ConfigurationError(
            f"{what} is broadcast, so it has no partitions and can't be rewritten into"
            f" {partitions} of them.",
            "Declare it under a new name with the new count, which builds it from its input beside"
            " the old one; or delete and rebuild it: adjunct dataset delete"
            f" {log.name} --reason ….",
            dataset=log.name,
        )
    if not 1 <= partitions <= 100_000 or partitions == declared.partitions:
        raise errors.ConfigurationError(
            f"{what} has {declared.partitions} partitions and can't be rewritten into"
            f" {partitions}.",
            "Pass a different number from 1 to 100,000.",
            argument="partitions",
            dataset=log.name,
        )
    if manifest.unfinished:
        raise errors.DatasetError(
            f"{what} can't be repartitioned now: its bootstrap is not finished"
            f" ({manifest.unfinished}).",
            "Advance it until the bootstrap is done (adjunct dataset advance"
            f" {log.name} MODULE:APP), then repeat.",
            dataset=log.name,
        )
    return declared.partitions


def _list_readers(roots: Roots) -> tuple[str, ...]:
    """Return in words which open batches need versions as they are; () if none does."""
    return tuple(sorted(set(roots().values())))


def _check_unused(dataset: str, readers: tuple[str, ...]) -> None:
    """Raise StillReadError while open batches need versions as they are."""
    if readers:
        raise errors.StillReadError(
            f"dataset {dataset!r} can't be repartitioned now: {'; '.join(readers)}.",
            "Run the application to finish its batch, or abandon the batch (adjunct checkpoint"
            " abandon APPLICATION --reason …). Then repeat.",
            dataset=dataset,
            readers=readers,
        )


_ROWS_AT_ONCE = 4_000_000


class _BucketedRows(NamedTuple):
    """Rows, and the bucket of each (numpy)."""

    rows: pa.Table
    buckets: Any


def _rebucket_generation(
    log: DatasetLog,
    version: SealedVersion,
    old: Generation,
    partitions: int,
    attempt: Attempt,
    options: WriteOptions,
) -> Generation:
    """Write the rows of the generation `old` of a version into this number of buckets, sorted by
    key, in the folder of `attempt`. A key has one row.

    Rows keep their hidden columns and get the columns of the layout. Buckets are written in passes
    of about `_ROWS_AT_ONCE` rows, each of which reads all rows again, so that memory does not grow
    with the version. Raises ManifestMismatchError for damaged files, and if another number of rows
    was written than there are.
    """
    layout = replace(version.layout, partitions=partitions)
    folder = attempt.generation(old.id).folder
    stored = list_generation_files(log.lake.store, options.what, old)
    order = [(name, "ascending") for name in layout.key]
    passes = math.ceil(max(1, old.rows) / _ROWS_AT_ONCE)
    buckets_at_once = math.ceil(partitions / passes)
    written: list[BucketFile] = []
    for first_bucket in range(0, partitions, buckets_at_once):
        parts = [layout.arrow_schema().empty_table()]
        bucket_parts = [np.empty(0, np.int32)]
        for rows, buckets in _iterate_bucketed_rows(stored, layout):
            is_of_pass = (buckets >= first_bucket) & (buckets < first_bucket + buckets_at_once)
            parts.append(rows.filter(pa.array(is_of_pass)))
            bucket_parts.append(buckets[is_of_pass])
        rows_of_pass = pa.concat_tables(parts)
        bucket_of_row = np.concatenate(bucket_parts)
        for bucket in np.unique(bucket_of_row).tolist():
            # Sorted alone: Arrow copies what it sorts, and at most 2 GB of strings.
            rows = rows_of_pass.filter(pa.array(bucket_of_row == bucket)).sort_by(order)
            starts = range(0, rows.num_rows, ROWS_PER_GROUP)
            slices = [rows.slice(start, ROWS_PER_GROUP) for start in starts]
            writer = BucketFileWriter(log.lake.store, folder, bucket, layout, options)
            file = write_bucket_file(writer, slices)
            if file is not None and file.rows:
                written.append(file)
    new = attempt.generation(old.id, written)
    if new.rows != old.rows:
        log.drop(new)
        raise errors.ManifestMismatchError(
            f"{options.what}: rewriting generation {old.id} wrote {new.rows} rows, the manifest"
            f" lists {old.rows}.",
            "Nothing was committed. Check the version: adjunct dataset verify"
            f" {log.name} {version.id} --deep.",
            dataset=log.name,
            version=version.id,
        )
    return new


def _iterate_bucketed_rows(
    stored: Sequence[StoredFile], layout: BucketLayout
) -> Iterator[_BucketedRows]:
    """Yield the rows of these files, each with its bucket by the layout. Raises
    ManifestMismatchError for a damaged file.
    """
    from dagster_adjunct.resources.bucketing.hashing import assign_buckets

    for one in stored:
        if one.sha256() != one.file.sha256:
            raise one.damaged("its SHA-256 differs, so it can't be rewritten")
        for group in one.row_groups():
            # A change stream's table may have files from before its columns were changed.
            rows = files.conform_to_layout(group, layout)
            columns = [rows.column(name) for name in layout.bucket_by]
            yield _BucketedRows(rows, assign_buckets(columns, layout.partitions))


def _plan(
    log: DatasetLog, manifest: DatasetManifest, partitions: int, reason: str, roots: Roots
) -> RebucketReport:
    """Return what would be rewritten, with "" for new ids. Raises what `check_repartitioning`
    raises.
    """
    before = check_repartitioning(log, manifest, partitions, reason)
    if isinstance(manifest, UnboundedManifest):
        version = manifest.version
        assert version is not None, "it has no unfinished bootstrap"
        ids = {version.id: ""}
        rows = version.stored_rows
    else:
        built = as_bounded(manifest).built
        ids = {ref.id: "" for ref in built}
        rows = sum(ref.rows or 0 for ref in built)
    return RebucketReport(
        log.name,
        before,
        partitions,
        ids,
        follows_changes=manifest.versions_are_commits,
        rows=rows,
        holding=_list_readers(roots),
        dry_run=True,
    )


def _list_leased(log: DatasetLog, versions: Collection[str]) -> tuple[str, ...]:
    """Return in words which of these versions readers hold by a lease, and who they are."""
    now = log.lake.now()  # the store's clock is read by writing
    held = version_holders(list_live_leases(log.lake, log.name, now), {}, now)
    leased = []
    for version in versions:
        reason = held.get(version) or held.get("*")
        if reason is not None:
            leased.append(f"{version}: {reason}")
    return tuple(leased)


def repartition_table(
    lake: Lake,
    dataset: str,
    partitions: int,
    *,
    reason: str,
    by: str,
    roots: Roots = dict,
    dry_run: bool = False,
) -> RebucketReport:
    """Rewrite the served table of an unbounded dataset into this number of partitions; its stream's
    offsets stay.

    A crash leaves the old table, and files that a discard deletes. Concurrent commits are
    rewritten, too; an advance that read the old table fails to commit, and continues by the new
    declaration. `roots` returns, by version id, which open batches need a version; if any does,
    StillReadError is raised. `dry_run` only reports. Raises ConfigurationError for a broadcast
    dataset or an unchanged number, DatasetError for a bounded dataset and during a bootstrap, and
    CommitConflictError if other writers keep committing.
    """
    log = DatasetLog(lake, dataset)
    # By the old folder: each is written once, even if the commit is retried.
    replacements: dict[str, RewrittenGeneration] = {}

    def rewrite_once() -> RebucketReport:
        """Rewrite the generations that have no usable one in `replacements`, and commit."""
        commit, stored = log.require()
        manifest = as_unbounded(stored)
        plan = _plan(log, manifest, partitions, reason, roots)
        _check_unused(dataset, plan.holding)
        version = manifest.version
        assert version is not None, "it is planned"
        old_generations: dict[str, Generation] = {}  # by folder
        for old in version.generations:
            if old.files:
                old_generations[old.folder] = old
        lacking = erasure.drop_unusable(log, manifest, replacements, old_generations)
        with lease_served(lake, dataset, version, holder=f"repartition by {by}"):
            for folder in lacking:
                old = old_generations[folder]
                attempt = log.attempt()
                # Recorded until the commit, so that no discard deletes the new files.
                records.enter_context(record_build(lake, dataset, attempt.id, by))
                options = _choose_options(manifest, version, old)
                new = _rebucket_generation(log, version, old, partitions, attempt, options)
                replacements[folder] = RewrittenGeneration(old, new, attempt)
        _check_unused(dataset, _list_readers(roots))  # again, because writing takes a while
        commit_id = log.attempt().id
        rewritten = tuple(
            strip_large_footers(replacements[folder].new) for folder in old_generations
        )
        new_version = version.after(
            id=version_id(commit.number + 1, commit_id),
            number=commit.number + 1,
            sealed_at=lake.now(),
            partitions=partitions,
            generations=rewritten or version.generations[:1],
            counters={},
        )
        declared = _declare_partitions(log, manifest, partitions, new_version.id, reason)
        after = switch_version(declared, new_version, new_version.sealed_at)
        committed = {**replacements}
        replacements.clear()  # if the outcome is unknown, the files may be in use
        try:
            log.commit(commit, after, by=by, commit_id=commit_id)
        except errors.CommitConflictError:
            replacements.update(committed)
            raise
        return replace(plan, versions={version.id: new_version.id}, dry_run=False)

    if dry_run:
        return _plan(log, as_unbounded(log.require().manifest), partitions, reason, roots)
    with ExitStack() as records:
        try:
            return log.rewrite(rewrite_once, slower="its table can be rewritten")
        except Exception:
            # Files of a commit with an unknown outcome are not in `replacements`: it may be
            # committed. If not, a discard deletes them.
            for replacement in replacements.values():
                log.drop(replacement.new)
            raise


def _choose_options(
    manifest: UnboundedManifest, version: SealedVersion, generation: Generation
) -> WriteOptions:
    """Return how the rows of a table's generation are written again."""
    over_time = None
    if version.history is not None:
        over_time = TimelineOptions(fills_ends=has_row_ends(generation))
    return WriteOptions(
        f"dataset {manifest.name!r}, version {version.id}",
        last_per_key=True,
        # Readers learn from this statistic whether tombstones were left out.
        drop_tombstones=all("deleted" in file.stats for file in generation.files),
        range_of=manifest.declaration.expires,
        over_time=over_time,
    )


M = TypeVar("M", UnboundedManifest, BoundedManifest)


def _declare_partitions(
    log: DatasetLog, manifest: M, partitions: int, version: str | None, reason: str
) -> M:
    """Return the manifest with the new number of partitions in its declaration, and with the
    description of the commit, which serves `version`.
    """
    before = manifest.declaration.partitions
    assert before is not None, "it is planned"
    last_change = ServedHistory.read(log.lake, log.name).last_change()
    # A running advance or build with the old partitions fails to commit, because the next number
    # has changed.
    if isinstance(manifest, UnboundedManifest):
        counter = "next_generation"
    else:
        counter = "next_number"
    return manifest.after(
        declaration=manifest.declaration.model_copy(update={"partitions": partitions}),
        change=Change(action=REPARTITION_ACTION, version=version, reason=reason),
        repartitioned=Repartitioned(partitions=before, commit=last_change),
        **{counter: getattr(manifest, counter) + 1},
    )


class _Rewritten(NamedTuple):
    """The report of what was planned, and the committed manifest."""

    plan: RebucketReport
    manifest: BoundedManifest


def repartition_versions(
    lake: Lake,
    dataset: str,
    partitions: int,
    *,
    reason: str,
    by: str,
    roots: Roots = dict,
    dry_run: bool = False,
) -> RebucketReport:
    """Rewrite every retained version of a bounded dataset into this number of partitions; names and
    offsets stay.

    A crash leaves the dataset unchanged. `roots` returns, by version id, which open batches need a
    version; if any does, StillReadError is raised, because an open batch can't switch partitions.
    The dataset can't be advanced or opened until it is declared with the new number. For a member
    of a version set, this is one commit of the set. `dry_run` only reports. Raises
    ConfigurationError for a broadcast dataset or an unchanged number, and DatasetError for an
    unbounded dataset.
    """
    log = DatasetLog(lake, dataset)
    # By the old document: each is written once, even if the commit is retried.
    replacements: dict[str, VersionReplacement] = {}

    def rewrite_once() -> _Rewritten:
        """Rewrite the versions that have no usable one in `replacements`, and commit."""
        commit, stored = log.require()
        manifest = as_bounded(stored)
        plan = _plan(log, manifest, partitions, reason, roots)
        _check_unused(dataset, plan.holding)
        refs = {str(ref.document): ref for ref in manifest.built}
        for document in erasure.drop_unusable(log, manifest, replacements, refs):
            write = partial(rewrite_version, refs[document])
            replacements[document] = erasure.write_on_record(log, by, write)
        _check_unused(dataset, _list_readers(roots))  # again, because writing takes a while
        by_version = {ref.id: replacements[document] for document, ref in refs.items()}
        doomed = dict.fromkeys(manifest.doomed)
        for replacement in by_version.values():
            doomed |= dict.fromkeys(replacement.old.objects)
        after = erasure.replace_versions(manifest, by_version).after(doomed=tuple(doomed))
        after = _declare_partitions(log, after, partitions, after.served_id, reason)
        log.commit(commit, after, by=by)
        return _Rewritten(plan, after)

    def rewrite_version(ref: VersionRef, attempt: Attempt) -> VersionReplacement:
        """Write a version again, with a new document."""
        sealed = log.read_version(ref)
        (generation,) = sealed.generations
        options = WriteOptions(f"dataset {dataset!r}, version {ref.id}")
        new = _rebucket_generation(log, sealed, generation, partitions, attempt, options)
        rewritten = sealed.after(
            id=version_id(sealed.number, attempt.id), partitions=partitions, generations=(new,)
        )
        return VersionReplacement.write(log, ref, rewritten, attempt, rows=0)

    if dry_run:
        plan = _plan(log, as_bounded(log.require().manifest), partitions, reason, roots)
        return replace(plan, pending=_list_leased(log, plan.versions))
    try:
        outcome = log.rewrite(rewrite_once, slower="its versions can be rewritten")
    finally:
        erasure.delete_records(log, replacements.values())
    now = read_lake_clock(lake, dataset)
    spared = delete_doomed(log, outcome.manifest, roots, now, by=by).spared
    return replace(
        outcome.plan,
        versions={made.old.id: made.new.id for made in replacements.values()},
        pending=tuple(f"{decision.what}: {decision.reason}" for decision in spared),
        rows=sum(made.sealed.stored_rows for made in replacements.values()),
        dry_run=False,
    )
