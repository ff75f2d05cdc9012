"""Rebucketing: rewrites a dataset into another number of partitions, with the same entries, in one commit.

Of an unbounded dataset the served table is rewritten, base and deltas. Each generation keeps its number and the
positions and tombstones of its rows, so that readers, compactions and ordered changes work as before. The stream's
offsets stay. Earlier versions keep their partitions and can be read until they are discarded.

Of a bounded dataset every retained version gets a copy under a new id, so that a rollback finds the same partitions.
Readers keep the old copies until they release them, as after an erasure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from dagster_adjunct.assets.declaration.dataset import DatasetKind
from dagster_adjunct.assets.reading.stored_file import StoredFile, list_stored_files
from dagster_adjunct.assets.retention.discard import Roots, delete_doomed
from dagster_adjunct.assets.retention.rewrite import VersionReplacement, replace_versions
from dagster_adjunct.assets.unbounded.commit import strip_large_footers, switch_version
from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog
from dagster_adjunct.assets.versions.leases import Lease, attempt_key, read_lake_clock, record_build, renew_attempt
from dagster_adjunct.assets.versions.manifest import BoundedManifest, Change, DatasetManifest, UnboundedManifest
from dagster_adjunct.assets.versions.version import SealedVersion, VersionRef, build_layout, has_row_ends, version_id
from dagster_adjunct.resources.bucketing.files import BucketFile, BucketLayout, Generation, conform_to_layout
from dagster_adjunct.resources.bucketing.timeline import TimelineOptions
from dagster_adjunct.resources.bucketing.writer import ROWS_PER_GROUP, BucketFileWriter, WriteOptions
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    DatasetError,
    DatasetNotFoundError,
    ManifestMismatchError,
    StillReadError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.objects.lake import Lake


@dataclass(frozen=True, slots=True)
class RebucketReport:
    """The rewritten versions by old and new id; with `dry_run`, those that would be rewritten, with new ids "".

    Of an unbounded dataset only the served version is rewritten. `pending` are old copies that are still read, and
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
        what = "the served table" if self.follows_changes else f"{len(self.versions)} version(s)"
        return (
            f"dataset {self.dataset}: {what} of {self.rows:,} stored rows {verb} from {self.before} into "
            f"{self.partitions} partitions; declare partitions={self.partitions} where it is declared"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        facts = asdict(self)
        kind: DatasetKind = "unbounded" if facts.pop("follows_changes") else "bounded"
        return {**facts, "kind": kind}


def check_repartitioning(log: DatasetLog, manifest: DatasetManifest, partitions: int, reason: str) -> int:
    """Return the current number of partitions. Raises if the dataset can't be rewritten into the new number."""
    declared, what = manifest.declaration, f"dataset {log.name!r}"
    if not reason.strip():
        raise ConfigurationError(
            f"{what} can't be repartitioned without a reason.",
            "Pass a reason, which is stored in the commit.",
            argument="reason",
            dataset=log.name,
        )
    if declared.partitions is None:
        raise ConfigurationError(
            f"{what} is broadcast: one copy, in no partitions, and can't be rewritten into {partitions} of them.",
            "Declare it under a new name with the new count, which builds it from its input beside the old one; or "
            f"delete and rebuild it: adjunct dataset delete {log.name} --reason ….",
            dataset=log.name,
        )
    if not 1 <= partitions <= 100_000 or partitions == declared.partitions:
        raise ConfigurationError(
            f"{what} has {declared.partitions} partitions and can't be rewritten into {partitions}.",
            "Pass a different number from 1 to 100,000.",
            argument="partitions",
            dataset=log.name,
        )
    if manifest.unfinished:
        raise DatasetError(
            f"{what} can't be repartitioned now: its bootstrap is not finished ({manifest.unfinished}).",
            f"Advance it until the bootstrap is done (adjunct dataset advance {log.name} MODULE:APP), then repeat.",
            dataset=log.name,
        )
    return declared.partitions


def check_unused(dataset: str, needed: Mapping[str, str]) -> None:
    """Raise StillReadError while open batches need versions as they are; `needed` has the reason by version."""
    if needed:
        raise StillReadError(
            f"dataset {dataset!r} can't be repartitioned now: {'; '.join(sorted(set(needed.values())))}.",
            "Run the application to finish its batch, or give the batch up (adjunct checkpoint abandon). Then repeat.",
            dataset=dataset,
            readers=tuple(sorted(set(needed.values()))),
        )


_ROWS_AT_ONCE = 4_000_000


def rebucket_files(
    log: DatasetLog,
    stored: Sequence[StoredFile],
    layout: BucketLayout,
    attempt: Attempt,
    number: int,
    options: WriteOptions | None = None,
) -> list[BucketFile]:
    """Write the rows of these files, one for each key, into their new buckets, sorted by key.

    Rows keep their hidden columns and get the columns of the layout. Buckets are written in passes of about
    `_ROWS_AT_ONCE` rows, so that memory does not grow with the version.
    """
    folder = attempt.generation(number).folder
    options = options or WriteOptions(f"dataset {log.name!r}")
    passes = -(-max(1, sum(source.file.rows for source in stored)) // _ROWS_AT_ONCE)
    width = -(-layout.partitions // passes)
    written: list[BucketFile] = []
    for first in range(0, layout.partitions, width):
        parts: dict[int, list[pa.Table]] = {}
        for file in stored:
            for rows, buckets in _iterate_bucketed_rows(file, layout):
                for bucket in range(first, min(first + width, layout.partitions)):
                    mine = rows.filter(pa.array(buckets == bucket))
                    if mine.num_rows:
                        parts.setdefault(bucket, []).append(mine)
        for bucket, tables in sorted(parts.items()):
            rows = pa.concat_tables(tables).sort_by([(name, "ascending") for name in layout.key]).combine_chunks()
            writer = BucketFileWriter(log.lake.store, folder, bucket, layout, options)
            try:
                for start in range(0, rows.num_rows, ROWS_PER_GROUP):
                    writer.write(rows.slice(start, ROWS_PER_GROUP))
                done = writer.finish()
            finally:
                writer.discard()
            if done is not None and done.rows:
                written.append(done)
    return written


def _iterate_bucketed_rows(stored: StoredFile, layout: BucketLayout) -> Iterator[tuple[pa.Table, Any]]:
    """Yield the file's rows, and the new bucket of each."""
    from dagster_adjunct.resources.bucketing.hashing import assign_buckets

    if stored.sha256() != stored.file.sha256:
        raise ManifestMismatchError(
            f"{stored.what}: {stored.key} is not as it was written, so it can't be rewritten.",
            "Restore that object, or withdraw and drop the version.",
            key=stored.key,
        )
    file = stored.open()
    for group in range(file.metadata.num_row_groups):
        rows = stored.reading(lambda at=group: file.read_row_group(at))  # type: ignore[misc]
        # A change stream's table may have files older than its last added or widened column.
        names = [field.name for field in layout.arrow_schema()]
        rows = conform_to_layout(rows, layout) if layout.hidden else rows.select(names)
        yield rows, assign_buckets([rows.column(name) for name in layout.bucket_by], layout.partitions)


_LEFT_OUT = "deleted"


def repartition_table(
    lake: Lake, dataset: str, partitions: int, *, reason: str, by: str, roots: Roots = dict, dry_run: bool = False
) -> RebucketReport:
    """Rewrite the served table of an unbounded dataset into this number of partitions; its stream's offsets stay.

    A crash leaves the old table, and files that a discard deletes. Concurrent commits are rewritten, too; an advance
    that read the old table fails to commit, and continues by the new declaration. `roots` returns, by version id, why
    applications still need a version: open batches that do raise StillReadError. `dry_run` only reports. Raises
    ConfigurationError for a bounded or broadcast dataset or an unchanged number, DatasetError during a bootstrap, and
    CommitConflictError if other writers keep committing.
    """
    with ExitStack() as records:
        return _TableRewrite(DatasetLog(lake, dataset), partitions, reason, by, roots, records).run(dry_run)


@dataclass
class _TableRewrite:
    """One rewrite of a table. Each generation is written once, by its old folder, even if the commit is retried.

    `asked` means that a commit was requested and is not known to have failed.
    """

    log: DatasetLog
    partitions: int
    reason: str
    by: str
    roots: Roots
    records: ExitStack
    made: dict[str, tuple[Attempt, Generation]] = field(default_factory=dict)
    asked: bool = False

    def run(self, dry_run: bool) -> RebucketReport:
        try:
            return self.log.rewrite(partial(self._rewrite_once, dry_run), slower="its table can be rewritten")
        except Exception:
            if not self.asked:  # otherwise it may be committed; if not, a discard deletes the files
                self._drop_others(None)
            raise

    def _rewrite_once(self, dry_run: bool) -> RebucketReport:
        """Rewrite and commit the current table. Raises CommitConflictError if another writer was first."""
        commit, manifest = self.log.read()
        if commit is None or manifest is None:
            raise DatasetNotFoundError(
                f"dataset {self.log.name!r} has no commit in {self.log.lake.url}.",
                "Advance it first.",
                dataset=self.log.name,
            )
        manifest = self._checked(manifest)
        before, version = self._served(manifest)
        if dry_run:
            return self._report(before, version, "", tuple(sorted(set(self.roots().values()))))
        check_unused(self.log.name, self.roots())
        self._drop_others(version)
        try:
            with Lease.acquire(self.log.lake, self.log.name, [version.id], holder=f"repartition by {self.by}"):
                self._write(version)
        except VersionDiscardedError as gone:  # another version is served now
            raise CommitConflictError(gone.problem, gone.next_step, dataset=self.log.name) from gone
        check_unused(self.log.name, self.roots())  # again, because writing takes a while
        commit_id = self.log.attempt().id
        after = self._after(manifest, version, commit.number + 1, commit_id)
        self.asked = True
        try:
            self.log.commit(commit, after, by=self.by, commit_id=commit_id)
        except CommitConflictError:
            self.asked = False
            raise
        assert after.version is not None
        return self._report(before, version, after.version.id)

    def _checked(self, manifest: DatasetManifest) -> UnboundedManifest:
        if not isinstance(manifest, UnboundedManifest):
            raise ConfigurationError(
                f"dataset {self.log.name!r} is bounded: it has versions and no table.",
                "Use repartition_dataset, which handles both kinds.",
                dataset=self.log.name,
            )
        return manifest

    def _served(self, manifest: UnboundedManifest) -> tuple[int, SealedVersion]:
        before, version = check_repartitioning(self.log, manifest, self.partitions, self.reason), manifest.version
        assert version is not None
        return before, version

    # -- writing

    def _write(self, version: SealedVersion) -> None:
        over_time = version.history is not None
        layout = build_layout(
            version.columns,
            version.key,
            version.partition_by,
            self.partitions,
            True,
            over_time,
            position_type=version.position_type,
        )
        store, what = self.log.lake.store, f"dataset {self.log.name!r}, version {version.id}"
        for generation in version.generations:
            if generation.folder in self.made or not generation.files:
                continue
            attempt = self.log.attempt()
            # Recorded until the commit, so that no discard deletes the new files.
            self.records.enter_context(record_build(self.log.lake, self.log.name, attempt.id, self.by))
            stored = [StoredFile(store, what, generation.folder, file) for file in generation.files]
            # Readers learn from this statistic whether tombstones were left out.
            left_out = all(_LEFT_OUT in file.stats for file in generation.files)
            as_it_is = None if version.history is None else TimelineOptions(fills_ends=has_row_ends(generation))
            options = WriteOptions(what, last_per_key=True, drop_tombstones=left_out, over_time=as_it_is)
            files = rebucket_files(self.log, stored, layout, attempt, generation.id, options)
            new = attempt.generation(generation.id, files)
            self.made[generation.folder] = attempt, new
            if new.rows != generation.rows:
                raise ManifestMismatchError(
                    f"{what}: rewriting generation {generation.id} wrote {new.rows} rows, the manifest lists "
                    f"{generation.rows}.",
                    "Nothing was committed. Check the table: adjunct dataset verify.",
                    dataset=self.log.name,
                )

    def _drop_others(self, version: SealedVersion | None) -> None:
        """Delete rewritten generations that this version no longer has, for example after an erasure."""
        needed = {generation.folder for generation in version.generations} if version is not None else set()
        for folder in self.made.keys() - needed:
            self.log.drop(self.made.pop(folder)[1])

    # -- deciding

    def _after(
        self, manifest: UnboundedManifest, version: SealedVersion, number: int, commit_id: str
    ) -> UnboundedManifest:
        new = [self.made[generation.folder][1] for generation in version.generations if generation.files]
        slim = tuple(strip_large_footers(generation) for generation in new)
        facts = {
            "id": version_id(number, commit_id),
            "number": number,
            "sealed_at": self.log.lake.now(),
            "partitions": self.partitions,
            "generations": slim or version.generations[:1],
            "counters": {},
        }
        made = version.after(**facts)
        after = manifest.after(
            declaration=manifest.declaration.model_copy(update={"partitions": self.partitions}),
            # So that a running advance with the old partitions fails to commit.
            next_generation=manifest.next_generation + 1,
            change=Change(action="repartition", version=made.id, reason=self.reason),
        )
        return switch_version(after, made, made.sealed_at)

    def _report(self, before: int, version: SealedVersion, new: str, holding: tuple[str, ...] = ()) -> RebucketReport:
        return RebucketReport(
            self.log.name,
            before,
            self.partitions,
            {version.id: new},
            follows_changes=True,
            rows=version.stored_rows,
            holding=holding,
            dry_run=not new,
        )


def repartition_versions(
    lake: Lake, dataset: str, partitions: int, *, reason: str, by: str, roots: Roots = dict, dry_run: bool = False
) -> RebucketReport:
    """Rewrite every retained version of a bounded dataset into this number of partitions; names and offsets stay.

    A crash leaves the dataset unchanged. `roots` returns, by version id, why applications still need a version: open
    batches that do raise StillReadError, because they can't switch partitions. Until it is declared with the new
    number, the dataset can't be advanced or opened. For a member of a version set it is one commit of the set.
    `dry_run` only reports. Raises ConfigurationError for an unbounded or broadcast dataset or an unchanged number.
    """
    log = DatasetLog(lake, dataset)
    made: dict[str, VersionReplacement] = {}

    def rewrite_once() -> tuple[int, BoundedManifest]:
        commit, manifest = _read_bounded(log, partitions)
        before = check_repartitioning(log, manifest, partitions, reason)
        check_unused(dataset, roots())
        # A version is rewritten once, even if the commit is retried.
        for document in [document for document, new in made.items() if not _is_stored(lake, manifest, new)]:
            del made[document]
        for ref in manifest.built:
            if str(ref.document) not in made:
                made[str(ref.document)] = _rewrite_version(log, ref, partitions, by)
        check_unused(dataset, roots())  # again, because writing takes a while
        after = _apply_replacements(manifest, made, partitions, reason)
        log.commit(commit, after, by=by)
        return before, after

    if dry_run:
        return _plan_versions(log, partitions, reason, roots)
    try:
        before, after = log.rewrite(rewrite_once, slower="its versions can be rewritten")
    finally:
        for new in made.values():
            if new.attempt is not None:
                lake.store.delete(attempt_key(lake, dataset, new.attempt.id))
    spared, _ = delete_doomed(log, after, roots, read_lake_clock(lake, dataset), by=by)
    used = [new for new in made.values() if after.ref(new.new.id) is not None]
    ids, rows = {new.old.id: new.new.id for new in used}, sum(new.sealed.stored_rows for new in used)
    pending = tuple(f"{judged.what}: {judged.reason}" for judged in spared)
    return RebucketReport(dataset, before, partitions, ids, pending, rows=rows)


def _read_bounded(log: DatasetLog, partitions: int) -> tuple[Commit | None, BoundedManifest]:
    commit, manifest = log.read()
    if manifest is None:
        raise DatasetNotFoundError(
            f"dataset {log.name!r} has no commit in {log.lake.url}.", "Advance it first.", dataset=log.name
        )
    if not isinstance(manifest, BoundedManifest):
        raise ConfigurationError(
            f"dataset {log.name!r} is unbounded: it has one table and no versions to rewrite.",
            f"Rewrite the table: adjunct dataset repartition {log.name} --partitions {partitions} --reason ….",
            dataset=log.name,
        )
    return commit, manifest


def _plan_versions(log: DatasetLog, partitions: int, reason: str, roots: Roots) -> RebucketReport:
    manifest = _read_bounded(log, partitions)[1]
    before = check_repartitioning(log, manifest, partitions, reason)
    ids = {ref.id: "" for ref in manifest.built}
    rows = sum(ref.rows or 0 for ref in manifest.built)
    holding = tuple(sorted(set(roots().values())))
    return RebucketReport(log.name, before, partitions, ids, rows=rows, holding=holding, dry_run=True)


def _is_stored(lake: Lake, manifest: BoundedManifest, made: VersionReplacement) -> bool:
    """Whether a rewritten version, which no manifest lists yet, has not been discarded."""
    document = str(made.new.document)
    return not {*made.new.folders, document} & set(manifest.doomed) and lake.store.head(document) is not None


def _apply_replacements(
    manifest: BoundedManifest, made: dict[str, VersionReplacement], partitions: int, reason: str
) -> BoundedManifest:
    """Return the manifest with all versions replaced by the rewritten ones."""
    old = {ref.id: made[str(ref.document)] for ref in manifest.built}
    after = replace_versions(manifest, old)
    doomed = [*manifest.doomed]
    doomed += [entry for new in old.values() for entry in (*new.old.folders, str(new.old.document))]
    served = old.get(manifest.version.id) if manifest.version else None
    return after.after(
        declaration=manifest.declaration.model_copy(update={"partitions": partitions}),
        doomed=tuple(dict.fromkeys(doomed)),
        # So that a running build with the old partitions fails to commit.
        next_number=manifest.next_number + 1,
        change=Change(action="repartition", version=served.new.id if served else None, reason=reason),
    )


def _rewrite_version(log: DatasetLog, ref: VersionRef, partitions: int, by: str) -> VersionReplacement:
    sealed = log.read_version(ref)
    (generation,) = sealed.generations
    layout = build_layout(sealed.columns, sealed.key, sealed.partition_by, partitions, sealed.positioned)
    attempt = log.attempt()
    # Recorded until the commit, so that no discard deletes the new files.
    with renew_attempt(log.lake, log.name, attempt.id, by):
        files = rebucket_files(log, list_stored_files(log.lake.store, log.name, sealed), layout, attempt, generation.id)
    new = attempt.generation(generation.id, files)
    if new.rows != generation.rows:
        raise ManifestMismatchError(
            f"dataset {log.name!r}: rewriting version {ref.id} wrote {new.rows} rows, the manifest lists "
            f"{generation.rows}.",
            "Nothing was committed. Check the version: adjunct dataset verify.",
            dataset=log.name,
            version=ref.id,
        )
    made = sealed.after(id=version_id(sealed.number, attempt.id), partitions=partitions, generations=(new,))
    update = {
        "id": made.id,
        "document": log.write_version(made),
        "folders": (new.folder,),
        "bytes": new.size,
    }
    return VersionReplacement(ref, ref.model_copy(update=update), made, attempt, 0)
