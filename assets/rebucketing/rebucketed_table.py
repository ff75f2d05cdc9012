"""Rewrites the table of an unbounded dataset into another number of partitions: base and deltas, in one commit.

Each generation is written anew under its number, with the positions and tombstones of its rows, so that readers,
compactions and changes by an ordering column meet what they met before. The stream's offsets stay. Versions before it
keep their partitions, and can be read until they are discarded.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.stored_files import StoredFile
from dagster_adjunct.assets.rebucketing.rebucket_report import RebucketReport, check, check_unused
from dagster_adjunct.assets.rebucketing.rebucketed_files import rebucketed
from dagster_adjunct.assets.unbounded.next_served_version import retire, without_large_footers
from dagster_adjunct.assets.versions.build_attempts import build_on_record
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.kept_history import told
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.manifest import DatasetManifest
from dagster_adjunct.assets.versions.sealed_version import SealedVersion, layout_of, version_id
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.resources.bucketing.write_over_time import OverTimeWrite
from dagster_adjunct.resources.bucketing.writer import WriteOptions
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    DatasetNotFoundError,
    ManifestMismatchError,
    VersionDiscardedError,
)

if TYPE_CHECKING:
    from dagster_adjunct.assets.retention.discard import Roots
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.resources.bucketing.bucket_files import Generation
    from dagster_adjunct.resources.objects.lake import Lake

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
        return _Rewriting(DatasetLog(lake, dataset), partitions, reason, by, roots, records).run(dry_run)


@dataclass
class _Rewriting:
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
        before, version = check(self.log, manifest, self.partitions, self.reason), manifest.version
        assert version is not None
        return before, version

    # -- writing

    def _write(self, version: SealedVersion) -> None:
        over_time = version.history is not None
        layout = layout_of(
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
            self.records.enter_context(build_on_record(self.log.lake, self.log.name, attempt.id, self.by))
            stored = [StoredFile(store, what, generation.folder, file) for file in generation.files]
            # Readers look there whether tombstones were left out.
            left_out = all(_LEFT_OUT in file.stats for file in generation.files)
            as_it_is = None if version.history is None else OverTimeWrite(told=told(generation))
            options = WriteOptions(what, last_per_key=True, drop_tombstones=left_out, over_time=as_it_is)
            files = rebucketed(self.log, stored, layout, attempt, generation.id, options)
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
        slim = tuple(without_large_footers(generation) for generation in new)
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
        return retire(after, made, made.sealed_at)

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
