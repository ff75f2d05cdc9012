"""Takes keys out of the generations of a change stream's table: of the served one, of one being built, of earlier ones.

Generations that are served or built are written again without the rows of the keys, live ones and tombstones alike;
one commit puts them in the place of the old. Versions before it read the old ones, and can't be read any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.stored_files import StoredFile
from dagster_adjunct.assets.retention.erasing.clear_leftovers import Leftovers, find_leftovers
from dagster_adjunct.assets.retention.erasing.key_search import search_files
from dagster_adjunct.assets.retention.erasing.redaction import FORGET, redacted
from dagster_adjunct.assets.retention.erasing.rewriting import (
    RewrittenVersion,
    files_with,
    live_rows_with,
    rewrite_generation,
)
from dagster_adjunct.assets.versions.build_attempts import AttemptRenewal, attempt_key
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.kept_history import current_rows
from dagster_adjunct.assets.versions.manifest import DatasetManifest, as_unbounded
from dagster_adjunct.assets.versions.sealed_version import SealedVersion, layout_of, version_id
from dagster_adjunct.assets.versions.stored_manifest import manifest_from, stored_body
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.resources.errors import CommitConflictError, DatasetNotFoundError, ManifestMismatchError

if TYPE_CHECKING:
    from dagster_adjunct.assets.retention.erasing.key_set import KeySet
    from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog
    from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout, Generation


@dataclass(frozen=True, slots=True)
class Regenerated:
    """A generation and what takes its place. `rows` is how many went, `live` those of them that were no tombstones."""

    old: Generation
    new: Generation
    attempt: Attempt
    rows: int
    live: int


@dataclass
class Regenerating:
    """One erasure under way. A generation is searched once, however often the commit is decided again.

    By folder: `clean` are generations that hold none of the keys, `regenerated` what takes the place of the others, and
    `holding` generations that only earlier versions read and that hold a key or can't be read.
    """

    log: DatasetLog
    keys: KeySet
    by: str
    clean: set[str] = field(default_factory=set)
    regenerated: dict[str, Regenerated] = field(default_factory=dict)
    holding: set[str] = field(default_factory=set)
    leftovers: Leftovers = field(default_factory=Leftovers)

    def commit(self, reason: str) -> UnboundedManifest:
        """Commit the table without the keys, dooming what held them; return what is current then.

        What is committed meanwhile is searched too. Raises ManifestMismatchError, with nothing erased, when a damaged
        file can't be searched.
        """
        try:
            current = self.log.rewrite(partial(self._commit_once, reason), slower="they can be searched for keys")
        except CommitConflictError:
            self._tidy(None)
            raise
        self._tidy(current)
        return current

    def _commit_once(self, reason: str) -> UnboundedManifest:
        commit, manifest = self.log.read()
        if commit is None or manifest is None:
            raise DatasetNotFoundError(
                f"dataset {self.log.name!r} has no commit any more.", "Check the lake.", dataset=self.log.name
            )
        manifest = as_unbounded(manifest)
        self.regenerated = {folder: made for folder, made in self.regenerated.items() if self._stands(manifest, made)}
        self._look(manifest)
        self.leftovers = find_leftovers(self.log, manifest, self.keys)
        commit_id = self.log.attempt().id
        after = self._after(manifest, commit.number + 1, commit_id, reason)
        if after is not None:
            self.log.commit(commit, after, by=self.by, commit_id=commit_id)
        return after or manifest

    def rewritten(self, manifest: DatasetManifest) -> tuple[RewrittenVersion, ...]:
        """Return the generations that were rewritten, of those that this manifest holds."""
        served = {generation.folder for generation in manifest.version.generations} if manifest.version else set()
        return tuple(
            RewrittenVersion(
                made.old.folder, made.new.folder, None, "served" if made.new.folder in served else "building", made.rows
            )
            for made in self.regenerated.values()
        )

    def reworded(self, manifest: DatasetManifest) -> int:
        """Return how many versions only got another document: versions of a change stream have none of their own."""
        return 0

    # -- looking

    def _look(self, manifest: UnboundedManifest) -> None:
        for layout, generation in _in_use(manifest):
            folder = generation.folder
            if folder in self.clean or folder in self.regenerated:
                continue
            files = self._files(manifest, generation)
            try:
                affected = files_with(files, layout, self.keys)
                if affected:
                    self.regenerated[folder] = self._without(files, layout, generation, affected)
                else:
                    self.clean.add(folder)
            except ManifestMismatchError as error:
                if not self._in_use_now(folder):
                    continue  # compacted and discarded meanwhile: the commit fails, and is decided again
                raise error.reworded(
                    f"{error.problem} So it can't be said whether it holds a key, and nothing was erased.",
                    f"Restore that object, or rebuild the dataset ({self.log.name}), and run the erasure again.",
                    dataset=self.log.name,
                ) from error
        earlier = {retired.folder for retired in manifest.retired} - self.clean - self.holding
        files_of_earlier = [item for folder in sorted(earlier) for item in self.log.lake.store.list(f"{folder}/")]
        seen = search_files(self.log.lake.store, files_of_earlier, self.keys)
        # What can't be read can't be proved to be without the keys, so it goes with what holds them.
        holding = {sighting.object.rsplit("/", 1)[0] for sighting in (*seen.found, *seen.unsearched)}
        self.holding |= holding
        self.clean |= earlier - holding

    def _files(self, manifest: UnboundedManifest, generation: Generation) -> list[StoredFile]:
        version = manifest.version
        served = version is not None and generation in version.generations
        what = f"dataset {self.log.name!r}, {f'version {version.id}' if version and served else 'being built'}"
        return [StoredFile(self.log.lake.store, what, generation.folder, file) for file in generation.files]

    def _without(
        self, files: Sequence[StoredFile], layout: BucketLayout, generation: Generation, affected: dict[str, int]
    ) -> Regenerated:
        attempt = self.log.attempt()
        # On record until the commit, so that nobody takes the new files for garbage.
        with AttemptRenewal(self.log.lake, self.log.name, attempt.id, self.by):
            live = live_rows_with(files, self.keys, affected)
            new = rewrite_generation(files, layout, generation.id, self.keys, affected, attempt)
        return Regenerated(generation, new, attempt, sum(affected.values()), live)

    def _in_use_now(self, folder: str) -> bool:
        manifest = self.log.read()[1]
        now = () if manifest is None else _in_use(as_unbounded(manifest))
        return any(folder == generation.folder for _, generation in now)

    # -- deciding

    def _after(self, manifest: UnboundedManifest, number: int, commit_id: str, reason: str) -> UnboundedManifest | None:
        """Return the manifest without the keys; None when there is nothing to do."""
        version, retired, retained_from = manifest.version, manifest.retired, manifest.retained_from
        served = version.generations if version is not None else ()
        hit = [self.regenerated[generation.folder] for generation in served if generation.folder in self.regenerated]
        if version is not None and hit:
            version = self._version(version, hit, number, commit_id)
            retained_from = number
        else:
            retained_from = max(
                [retained_from, *(generation.until for generation in retired if generation.folder in self.holding)]
            )
        gone = [generation.folder for generation in retired if generation.until <= retained_from]
        bootstrap = manifest.bootstrap
        building = [self.regenerated[g.folder].new if g.folder in self.regenerated else g for g in bootstrap.building]
        gone += [g.folder for g in bootstrap.building if g.folder in self.regenerated]
        bootstrap = bootstrap.model_copy(update={"building": tuple(g for g in building if g.files)})
        after = manifest.after(
            version=version,
            retired=tuple(generation for generation in retired if generation.until > retained_from),
            retained_from=retained_from,
            bootstrap=bootstrap,
        )
        after = as_unbounded(manifest_from(redacted(stored_body(after), self.keys)))
        doomed = [*manifest.doomed, *self.leftovers.garbage, *gone, *(made.old.folder for made in hit)]
        kept = after.reachable()
        doomed = [entry for entry in dict.fromkeys(doomed) if entry not in kept]
        if after == manifest and doomed == list(manifest.doomed):
            return None
        change = Change(action=FORGET, version=version.id if version is not None and hit else None, reason=reason)
        return after.after(doomed=tuple(doomed), change=change)

    def _version(
        self, version: SealedVersion, hit: Sequence[Regenerated], number: int, commit_id: str
    ) -> SealedVersion:
        """Return the served version with the new generations; those without a row left are not needed."""
        new = [self.regenerated[g.folder].new if g.folder in self.regenerated else g for g in version.generations]
        rows = version.rows
        if version.history is not None:
            left = [generation for generation in new if generation.files] or new[:1]
            rows = current_rows(left[0]) if len(left) == 1 else None
        elif rows is not None:
            rows -= sum(made.live for made in hit)
        elif len(version.generations) > 1 and version.order_by is None and not any(g.files for g in new[1:]):
            rows = new[0].rows  # a base alone, which has no tombstones
        facts = {
            "id": version_id(number, commit_id),
            "number": number,
            "sealed_at": self.log.lake.now(),
            "generations": tuple(g for g in new if g.files) or (new[0],),
            "rows": rows,
            "counters": {"forgotten": sum(made.rows for made in hit)},
        }
        return version.after(**facts)

    def _stands(self, manifest: UnboundedManifest, made: Regenerated) -> bool:
        """Whether what was rewritten is needed still, and nobody has discarded it: with no grace, a discard may have.

        It dooms before it deletes, in a commit that we have read or that makes ours fail.
        """
        needed = any(generation.folder == made.old.folder for _, generation in _in_use(manifest))
        there = {item.key for item in self.log.lake.store.list(f"{made.new.folder}/")}
        whole = {f"{made.new.folder}/{file.name}" for file in made.new.files} <= there
        stands = needed and whole and made.new.folder not in manifest.doomed
        if not stands:
            self._drop(made)
        return stands

    def _tidy(self, manifest: UnboundedManifest | None) -> None:
        """Take the builds off record; without a manifest that holds them, delete them too."""
        for made in self.regenerated.values():
            if manifest is None:
                self._drop(made)
            else:
                self.log.lake.store.delete(attempt_key(self.log.lake, self.log.name, made.attempt.id))

    def _drop(self, made: Regenerated) -> None:
        self.log.drop(made.new)
        self.log.lake.store.delete(attempt_key(self.log.lake, self.log.name, made.attempt.id))


def _in_use(manifest: UnboundedManifest) -> Iterator[tuple[BucketLayout, Generation]]:
    """Yield the generations of the served version and of a table that is being built, with how their rows lie."""
    if manifest.version is not None:
        yield from ((manifest.version.layout, generation) for generation in manifest.version.generations)
    bootstrap, declared = manifest.bootstrap, manifest.declaration
    if bootstrap.columns is not None:
        layout = layout_of(
            bootstrap.columns,
            declared.key,
            declared.partition_by,
            declared.partitions,
            positioned=True,
            over_time=declared.history is not None,
            position_type=declared.position_type,
        )
        yield from ((layout, generation) for generation in bootstrap.building)
