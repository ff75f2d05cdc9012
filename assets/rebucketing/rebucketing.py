"""Rewrites the table of an unbounded dataset into another number of partitions: base and deltas, in one commit.

Each generation is written anew under its number, with the positions and tombstones of its rows, so that readers,
compactions and changes by an ordering column meet what they met before. The stream's offsets stay. Versions before it
keep their partitions, and can be read until they are discarded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.reading.stored_file import StoredFile, list_stored_files
from dagster_adjunct.assets.retention.discard import delete_doomed
from dagster_adjunct.assets.retention.rewrite import VersionReplacement, replace_versions
from dagster_adjunct.assets.unbounded.commit import strip_large_footers, switch_version
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.leases import AttemptRecord, Lease, attempt_key, read_lake_clock, record_build
from dagster_adjunct.assets.versions.manifest import BoundedManifest, Change, DatasetManifest, UnboundedManifest
from dagster_adjunct.assets.versions.version import SealedVersion, VersionRef, build_layout, has_row_ends, version_id
from dagster_adjunct.resources.bucketing.files import conform_to_layout
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

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.assets.declaration.dataset import DatasetKind
    from dagster_adjunct.assets.retention.discard import Roots
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.resources.bucketing.files import BucketFile, BucketLayout, Generation
    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.objects.lake import Lake


@dataclass(frozen=True, slots=True)
class RebucketReport:
    """What was, or (`dry_run`) would be, rewritten: versions by their old and new ids; the new ones are "" then.

    Of an unbounded dataset that is the served version alone: versions before it keep their partitions until they are
    discarded. `pending` are old copies that somebody still reads, and `holding` are those who need a version as it is,
    which refuses the rewriting.
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
    """Return how many partitions the dataset has; refuse what can't be rewritten into this number of them."""
    declared, what = manifest.declaration, f"dataset {log.name!r}"
    if not reason.strip():
        raise ConfigurationError(
            f"{what} can't be repartitioned without a reason.",
            "Say why: it is kept.",
            argument="reason",
            dataset=log.name,
        )
    if declared.partitions is None:
        raise ConfigurationError(
            f"{what} is broadcast: one copy, in no partitions, and can't be rewritten into {partitions} of them.",
            "Declare it under a new name with the new count, which builds it from its input beside the old one; or "
            f"delete it and build it anew: adjunct dataset delete {log.name} --reason ….",
            dataset=log.name,
        )
    if not 1 <= partitions <= 100_000 or partitions == declared.partitions:
        raise ConfigurationError(
            f"{what} has {declared.partitions} partitions, and is to have {partitions}.",
            "Name another number, from 1 to 100,000.",
            argument="partitions",
            dataset=log.name,
        )
    if manifest.unfinished:
        raise DatasetError(
            f"{what} can't be repartitioned now: its bootstrap is not finished ({manifest.unfinished}).",
            f"Advance it until it is: adjunct dataset advance {log.name} MODULE:APP. Then repeat it.",
            dataset=log.name,
        )
    return declared.partitions


def check_unused(dataset: str, needed: Mapping[str, str]) -> None:
    """Refuse while an open batch needs a version as it lies: `needed` says which, and why."""
    if needed:
        raise StillReadError(
            f"dataset {dataset!r} can't be repartitioned now: {'; '.join(sorted(set(needed.values())))}.",
            "Let it end: run the application, or give its batch up (adjunct checkpoint abandon). Then repeat it.",
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
    """Write the rows of these files, one for a key, into their new buckets, each in the order of its keys.

    Rows keep what they carry beside their columns, and get the columns of the layout. As many buckets at a time as have
    about `_ROWS_AT_ONCE` rows, so that memory does not grow with the version.
    """
    import pyarrow as pa

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
            "Restore that object, or give the version up: withdraw and drop it.",
            key=stored.key,
        )
    file = stored.open()
    for group in range(file.metadata.num_row_groups):
        rows = stored.reading(lambda at=group: file.read_row_group(at))  # type: ignore[misc]
        # A table of a change stream has files from before its columns were added or widened.
        names = [field.name for field in layout.arrow_schema()]
        rows = conform_to_layout(rows, layout) if layout.hidden else rows.select(names)
        yield rows, assign_buckets([rows.column(name) for name in layout.bucket_by], layout.partitions)


_LEFT_OUT = "deleted"


def repartition_table(
    lake: Lake, dataset: str, partitions: int, *, reason: str, by: str, roots: Roots = dict, dry_run: bool = False
) -> RebucketReport:
    """Rewrite the served table of an unbounded dataset into this number of partitions; its stream's offsets stay.

    A crash leaves the old table, and files that discarding collects. What is committed meanwhile is rewritten, too; an
    advance that read the old table loses its commit, and goes on by the new declaration. `roots` gives, by version id,
    why applications still need a version: those of open batches refuse it with StillReadError. `dry_run` only says
    what would be done. Raises ConfigurationError for a bounded or broadcast dataset or no change, DatasetError while a
    bootstrap is not finished, and CommitConflictError where others do not stop committing.
    """
    with ExitStack() as records:
        return _TableRewrite(DatasetLog(lake, dataset), partitions, reason, by, roots, records).run(dry_run)


@dataclass
class _TableRewrite:
    """One rewriting under way. A generation is written once, by its old folder, however often the commit is tried.

    `asked` says that a commit is asked for, and not known to have lost.
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
            if not self.asked:  # else it may be committed: what is not is garbage for discarding
                self._drop_others(None)
            raise

    def _rewrite_once(self, dry_run: bool) -> RebucketReport:
        """Rewrite and commit what is current. Raises CommitConflictError where somebody else was first."""
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
        except VersionDiscardedError as gone:  # another one is served by now
            raise CommitConflictError(gone.problem, gone.next_step, dataset=self.log.name) from gone
        check_unused(self.log.name, self.roots())  # once more: writing takes a while
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
                f"dataset {self.log.name!r} is bounded: its versions are rewritten, and it has no table.",
                "Use repartition_dataset, which does what fits.",
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
            # On record until the commit, so that nobody takes the new files for garbage.
            self.records.enter_context(record_build(self.log.lake, self.log.name, attempt.id, self.by))
            stored = [StoredFile(store, what, generation.folder, file) for file in generation.files]
            # Readers look there whether tombstones were left out.
            left_out = all(_LEFT_OUT in file.stats for file in generation.files)
            as_it_is = None if version.history is None else TimelineOptions(told=has_row_ends(generation))
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
        """Delete what was rewritten of generations that this version does not have: an erasure may have been there."""
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
            # So that an advance that is under way, which has the old partitions, loses its race.
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


# Rewrites a bounded dataset's versions into another number of partitions: the same entries, in one commit.
#
# Every version that is retained gets a copy under a new id, so that a rollback meets the same partitions. Readers keep
# the old copies until they let go, as after an erasure.


def repartition_versions(
    lake: Lake, dataset: str, partitions: int, *, reason: str, by: str, roots: Roots = dict, dry_run: bool = False
) -> RebucketReport:
    """Rewrite every retained version of a bounded dataset into this number of partitions; names and offsets stay.

    A crash leaves the dataset as it was. `roots` gives, by version id, why applications still need a version: those of
    open batches refuse it with StillReadError, for they can't meet other partitions. Until it is declared with the new
    count, the dataset is refused when it is advanced or opened. Of a member of a version set it is one commit of the
    set. `dry_run` only says what would be done. Raises ConfigurationError for an unbounded dataset, a broadcast one,
    or no change.
    """
    log = DatasetLog(lake, dataset)
    made: dict[str, VersionReplacement] = {}

    def rewrite_once() -> tuple[int, BoundedManifest]:
        commit, manifest = _read_bounded(log, partitions)
        before = check_repartitioning(log, manifest, partitions, reason)
        check_unused(dataset, roots())
        # A version is rewritten once, however often the commit is tried.
        for document in [document for document, new in made.items() if not _is_stored(lake, manifest, new)]:
            del made[document]
        for ref in manifest.built:
            if str(ref.document) not in made:
                made[str(ref.document)] = _rewrite_version(log, ref, partitions, by)
        check_unused(dataset, roots())  # once more: writing takes a while
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
            f"dataset {log.name!r} is unbounded: it has one table, and no versions to rewrite.",
            f"Rewrite it so: adjunct dataset repartition {log.name} --partitions {partitions} --reason ….",
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
    """Whether nobody has discarded what was rewritten, which no manifest lists yet."""
    document = str(made.new.document)
    return not {*made.new.folders, document} & set(manifest.doomed) and lake.store.head(document) is not None


def _apply_replacements(
    manifest: BoundedManifest, made: dict[str, VersionReplacement], partitions: int, reason: str
) -> BoundedManifest:
    """Return the manifest with the rewritten versions, `made` of all of them."""
    old = {ref.id: made[str(ref.document)] for ref in manifest.built}
    after = replace_versions(manifest, old)
    doomed = [*manifest.doomed]
    doomed += [entry for new in old.values() for entry in (*new.old.folders, str(new.old.document))]
    served = old.get(manifest.version.id) if manifest.version else None
    return after.after(
        declaration=manifest.declaration.model_copy(update={"partitions": partitions}),
        doomed=tuple(dict.fromkeys(doomed)),
        # So that a build that is under way, which has the old partitions, loses its race.
        next_number=manifest.next_number + 1,
        change=Change(action="repartition", version=served.new.id if served else None, reason=reason),
    )


def _rewrite_version(log: DatasetLog, ref: VersionRef, partitions: int, by: str) -> VersionReplacement:
    sealed = log.read_version(ref)
    (generation,) = sealed.generations
    layout = build_layout(sealed.columns, sealed.key, sealed.partition_by, partitions, sealed.positioned)
    attempt = log.attempt()
    # On record until the commit, so that nobody takes the new files for garbage.
    with AttemptRecord(log.lake, log.name, attempt.id, by):
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
