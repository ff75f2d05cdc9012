"""Rewrites versions and generations without the rows of erased keys.

Of a bounded dataset, each version with a key is replaced by one with the same number and name. Of an unbounded one, the
generations that are served or being built are rewritten without rows and tombstones of the keys, and one commit
replaces the old; versions before it read the old generations, and are gone.

Spark reads a generation as a whole folder, so a rewritten one has a new folder: files with a key are written again, the
others copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar
from uuid import uuid4

import numpy as np

from dagster_adjunct.assets.reading.stored_file import StoredFile, list_stored_files
from dagster_adjunct.assets.retention.key_search import (
    ERASE_ACTION,
    KeySet,
    Leftovers,
    find_leftovers,
    redact,
    search_files,
)
from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog, no_commit_error
from dagster_adjunct.assets.versions.leases import delete_attempt, renew_attempt
from dagster_adjunct.assets.versions.manifest import (
    BoundedManifest,
    Change,
    DatasetManifest,
    Pin,
    UnboundedManifest,
    as_bounded,
    as_unbounded,
    manifest_from_body,
)
from dagster_adjunct.assets.versions.version import (
    TOMBSTONE,
    SealedVersion,
    VersionRef,
    build_layout,
    count_current_rows,
    version_id,
)
from dagster_adjunct.resources.bucketing.files import (
    BucketFile,
    BucketLayout,
    Generation,
    attempt_id,
    bucket_file_name,
    conform_to_layout,
)
from dagster_adjunct.resources.bucketing.timeline import HAS_ENDS, VALID_FROM, TimelineOptions
from dagster_adjunct.resources.bucketing.writer import BucketFileWriter, WriteOptions
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    DatasetError,
    ManifestMismatchError,
    ObjectExistsError,
)
from dagster_adjunct.resources.objects.store import ObjectStore, staged_file_errors


@dataclass(frozen=True, slots=True)
class RewrittenVersion:
    """A version that held some of the keys, and its replacement. `rows` is the number of erased entries.

    Of an unbounded dataset, a generation: `old` and `new` are folders, `rows` counts live rows and tombstones, and
    `state` is "served" or "building".
    """

    old: str
    new: str
    name: str | None
    state: str
    rows: int


def count_rows_by_file(files: Sequence[StoredFile], layout: BucketLayout, keys: KeySet) -> dict[str, int]:
    """Return the number of rows with one of the keys, by file name, for the files that have any.

    Only files whose bucket and key range match are opened. Raises ManifestMismatchError where one is damaged.
    """
    buckets = keys.buckets(layout)
    searched = [stored for stored in files if stored.file.bucket in buckets and keys.may_be_in(stored.file)]
    return {stored.file.name: count for stored in searched if (count := _count_rows(stored, keys))}


def rewrite_generation(
    files: Sequence[StoredFile],
    layout: BucketLayout,
    number: int,
    keys: KeySet,
    affected: dict[str, int],
    attempt: Attempt,
) -> Generation:
    """Write a generation again without the rows of these keys, which are in the `affected` files.

    Rows keep their hidden columns. Rewritten files have no digest, and files without rows are left out.
    """
    folder = attempt.generation(number).folder
    written = (
        _write_file_without(stored, layout, keys, folder)
        if stored.file.name in affected
        else _copy_file(stored, folder)
        for stored in files
    )
    new = attempt.generation(number, [file for file in written if file is not None and file.rows])
    # Footers that were too large for the manifest would be so again.
    return new.without_footers() if all(stored.file.footer is None for stored in files) else new


def rewrite_version(
    log: DatasetLog, sealed: SealedVersion, keys: KeySet, affected: dict[str, int], attempt: Attempt
) -> SealedVersion:
    """Write a version of one generation again without the entries of these keys, which are in the `affected` files.

    The new version has the number and name of the old one and a new id. If a file has no digest, neither has the
    version, so no later delivery is taken for equal to it.
    """
    (generation,) = sealed.generations
    stored = list_stored_files(log.lake.store, log.name, sealed)
    new = rewrite_generation(stored, sealed.layout, generation.id, keys, affected, attempt)
    erased = sealed.counters.get("erased", 0) + sum(affected.values())
    return sealed.after(
        id=version_id(sealed.number, attempt.id),
        generations=(new,),
        rows=new.rows,
        digest=new.digest,
        counters={**sealed.counters, "erased": erased},
    )


def _count_rows(stored: StoredFile, keys: KeySet, *, deleted: bool = False) -> int:
    names = [*(field.name for field in keys.fields), *([TOMBSTONE] if deleted else [])]
    file = stored.open()

    def count() -> int:
        tables = (file.read_row_group(group, columns=names) for group in range(file.num_row_groups))
        return sum(len(keys.rows_in(table.filter(table.column(TOMBSTONE)) if deleted else table)) for table in tables)

    return stored.reading(count)


def _write_file_without(stored: StoredFile, layout: BucketLayout, keys: KeySet, folder: str) -> BucketFile | None:
    file = stored.open()
    over_time = TimelineOptions(fills_ends=bool(stored.file.stats.get(HAS_ENDS))) if VALID_FROM in layout.key else None
    options = WriteOptions(stored.what, over_time=over_time)
    writer = BucketFileWriter(stored.store, folder, stored.file.bucket, layout, options)
    try:
        for group in range(file.num_row_groups):
            rows = stored.reading(partial(file.read_row_group, group, columns=list(layout.columns)))
            kept = np.ones(rows.num_rows, dtype=bool)
            kept[keys.rows_in(rows)] = False
            # An unbounded table may have files from before its columns were added or widened.
            left = rows.filter(kept)
            writer.write(conform_to_layout(left, layout) if layout.hidden else left)
        written = writer.finish()
    finally:
        writer.discard()
    # The stats tell readers whether tombstones were left out.
    return written and replace(written, stats={**stored.file.stats, **written.stats})


def _copy_file(stored: StoredFile, folder: str) -> BucketFile:
    """Copy a file through this machine and check its SHA-256, so that a damaged file is not copied."""
    path = stored.store.staging_dir() / f"{uuid4().hex}.parquet"
    name = bucket_file_name(stored.file.bucket, attempt_id(folder))
    try:
        stored.reading(lambda: stored.store.download(stored.key, path))
        with staged_file_errors(stored.store, path, stored.what), path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != stored.file.sha256:
            raise stored.damaged(f"its SHA-256 is {sha256}, the manifest lists {stored.file.sha256}")
        with suppress(ObjectExistsError):  # our own repeated request: only this attempt uses the name
            stored.store.upload(path, f"{folder}/{name}")
    finally:
        path.unlink(missing_ok=True)
    return replace(stored.file, name=name)


@dataclass(frozen=True, slots=True)
class RewrittenGeneration:
    """A generation and its replacement. `rows` counts the erased rows, `live` those that were no tombstones."""

    old: Generation
    new: Generation
    attempt: Attempt
    rows: int
    live: int


M = TypeVar("M", UnboundedManifest, BoundedManifest)


@dataclass
class _Erasure:
    """An erasure of keys; `clean` are folders or documents without the keys."""

    log: DatasetLog
    keys: KeySet
    by: str
    clean: set[str] = field(default_factory=set)
    leftovers: Leftovers = field(default_factory=Leftovers)

    def _with_doomed(
        self,
        manifest: M,
        after: M,
        replaced: Sequence[str],
        version: str | None,
        reason: str,
        deleted: Set[str] = set(),
    ) -> M | None:
        """Return `after` without the keys, and with leftovers and what was `replaced` doomed; None if nothing changes.

        `deleted` is not doomed: it is deleted once the erasure is committed.
        """
        redacted = manifest_from_body(redact(after.model_dump(mode="json"), self.keys))
        assert isinstance(redacted, type(after))
        kept = redacted.reachable() | deleted
        doomed = dict.fromkeys([*manifest.doomed, *self.leftovers.garbage, *replaced])
        doomed_now = tuple(entry for entry in doomed if entry not in kept)
        if redacted == manifest and doomed_now == manifest.doomed:
            return None
        change = Change(action=ERASE_ACTION, version=version, reason=reason)
        return redacted.after(doomed=doomed_now, change=change)

    def _unsearched_error(self, error: ManifestMismatchError, action: str, **about: str) -> ManifestMismatchError:
        problem = f"{error.problem} It is unknown whether it holds a key, so nothing was erased."
        next_step = f"Restore that object, or {action}, and run the erasure again."
        return error.reworded(problem, next_step, dataset=self.log.name, **about)


@dataclass
class GenerationErasure(_Erasure):
    """An erasure in an unbounded dataset. Each generation is searched once, however often the commit is retried.

    By folder: `clean` are generations without the keys, `regenerated` the replacements of the others, and `holding` are
    generations that only earlier versions read and that hold a key or are unreadable.
    """

    regenerated: dict[str, RewrittenGeneration] = field(default_factory=dict)
    holding: set[str] = field(default_factory=set)

    def commit(self, reason: str) -> UnboundedManifest:
        """Commit the table without the keys and doom what held them; return the current manifest then.

        Generations committed meanwhile are searched too. Raises ManifestMismatchError, with nothing erased, where a
        damaged file can't be searched.
        """
        try:
            current = self.log.rewrite(partial(self._commit_once, reason), slower="they can be searched for keys")
        except CommitConflictError:
            self._clean_up(None)
            raise
        self._clean_up(current)
        return current

    def _commit_once(self, reason: str) -> UnboundedManifest:
        commit, manifest = self.log.read()
        if commit is None or manifest is None:
            raise no_commit_error(self.log.lake, self.log.name)
        manifest = as_unbounded(manifest)
        self.regenerated = {
            folder: made for folder, made in self.regenerated.items() if self._is_usable(manifest, made)
        }
        self._search_generations(manifest)
        self.leftovers = find_leftovers(self.log, manifest, self.keys)
        commit_id = self.log.attempt().id
        after = self._manifest_without_keys(manifest, commit.number + 1, commit_id, reason)
        if after is not None:
            self.log.commit(commit, after, by=self.by, commit_id=commit_id)
        return after or manifest

    def rewritten(self, manifest: DatasetManifest) -> tuple[RewrittenVersion, ...]:
        """Return the rewritten generations."""
        served = {generation.folder for generation in manifest.version.generations} if manifest.version else set()
        return tuple(
            RewrittenVersion(
                made.old.folder, made.new.folder, None, "served" if made.new.folder in served else "building", made.rows
            )
            for made in self.regenerated.values()
        )

    def count_redacted(self, manifest: DatasetManifest) -> int:
        """Return 0: versions of an unbounded dataset have no documents to redact."""
        return 0

    # -- search

    def _search_generations(self, manifest: UnboundedManifest) -> None:
        for layout, generation in _generations_in_use(manifest):
            folder = generation.folder
            if folder in self.clean or folder in self.regenerated:
                continue
            files = self._stored_files(manifest, generation)
            try:
                affected = count_rows_by_file(files, layout, self.keys)
                if affected:
                    self.regenerated[folder] = self._rewrite(files, layout, generation, affected)
                else:
                    self.clean.add(folder)
            except ManifestMismatchError as error:
                if not self._is_in_use(folder):
                    continue  # compacted and discarded meanwhile: the commit fails and is retried
                raise self._unsearched_error(error, f"rebuild the dataset ({self.log.name})") from error
        earlier = {retired.folder for retired in manifest.retired} - self.clean - self.holding
        files_of_earlier = [item for folder in sorted(earlier) for item in self.log.lake.store.list(f"{folder}/")]
        seen = search_files(self.log.lake.store, files_of_earlier, self.keys)
        # Unreadable generations may contain the keys, so they are doomed too.
        holding = {sighting.object.rsplit("/", 1)[0] for sighting in (*seen.found, *seen.unsearched)}
        self.holding |= holding
        self.clean |= earlier - holding

    def _stored_files(self, manifest: UnboundedManifest, generation: Generation) -> list[StoredFile]:
        version = manifest.version
        served = version is not None and generation in version.generations
        what = f"dataset {self.log.name!r}, {f'version {version.id}' if version and served else 'being built'}"
        return [StoredFile(self.log.lake.store, what, generation.folder, file) for file in generation.files]

    def _rewrite(
        self, files: Sequence[StoredFile], layout: BucketLayout, generation: Generation, affected: dict[str, int]
    ) -> RewrittenGeneration:
        attempt = self.log.attempt()
        # On record until the commit, so that no discard takes the new files for garbage.
        with renew_attempt(self.log.lake, self.log.name, attempt.id, self.by):
            hit = [stored for stored in files if stored.file.name in affected]
            live = sum(affected.values()) - sum(_count_rows(stored, self.keys, deleted=True) for stored in hit)
            new = rewrite_generation(files, layout, generation.id, self.keys, affected, attempt)
        return RewrittenGeneration(generation, new, attempt, sum(affected.values()), live)

    def _is_in_use(self, folder: str) -> bool:
        manifest = self.log.read()[1]
        now = () if manifest is None else _generations_in_use(as_unbounded(manifest))
        return any(folder == generation.folder for _, generation in now)

    # -- decision

    def _manifest_without_keys(
        self, manifest: UnboundedManifest, number: int, commit_id: str, reason: str
    ) -> UnboundedManifest | None:
        """Return the manifest without the keys; None when there is nothing to do."""
        version, retired, retained_from = manifest.version, manifest.retired, manifest.retained_from
        served = version.generations if version is not None else ()
        hit = [self.regenerated[generation.folder] for generation in served if generation.folder in self.regenerated]
        if version is not None and hit:
            version = self._version_without_keys(version, hit, number, commit_id)
            retained_from = number
        else:
            retained_from = max(
                [retained_from, *(generation.until for generation in retired if generation.folder in self.holding)]
            )
        discarded = [generation.folder for generation in retired if generation.until <= retained_from]
        bootstrap = manifest.bootstrap
        building = [self.regenerated[g.folder].new if g.folder in self.regenerated else g for g in bootstrap.building]
        discarded += [g.folder for g in bootstrap.building if g.folder in self.regenerated]
        bootstrap = bootstrap.model_copy(update={"building": tuple(g for g in building if g.files)})
        after = manifest.after(
            version=version,
            retired=tuple(generation for generation in retired if generation.until > retained_from),
            retained_from=retained_from,
            bootstrap=bootstrap,
        )
        replaced, served_now = [*discarded, *(made.old.folder for made in hit)], version.id if version and hit else None
        return self._with_doomed(manifest, after, replaced, served_now, reason)

    def _version_without_keys(
        self, version: SealedVersion, hit: Sequence[RewrittenGeneration], number: int, commit_id: str
    ) -> SealedVersion:
        """Return the served version with the new generations, without empty ones."""
        new = [self.regenerated[g.folder].new if g.folder in self.regenerated else g for g in version.generations]
        rows = version.rows
        if version.history is not None:
            left = [generation for generation in new if generation.files] or new[:1]
            rows = count_current_rows(left[0]) if len(left) == 1 else None
        elif rows is not None:
            rows -= sum(made.live for made in hit)
        elif len(version.generations) > 1 and version.order_by is None and not any(g.files for g in new[1:]):
            rows = new[0].rows  # only a base is left, which has no tombstones
        return version.after(
            id=version_id(number, commit_id),
            number=number,
            sealed_at=self.log.lake.now(),
            generations=tuple(g for g in new if g.files) or (new[0],),
            rows=rows,
            counters={"erased": sum(made.rows for made in hit)},
        )

    def _is_usable(self, manifest: UnboundedManifest, made: RewrittenGeneration) -> bool:
        """Whether the rewritten generation is still needed and was not discarded, as a discard without grace may do.

        A discard dooms before it deletes, in a commit that we have read or that makes ours fail.
        """
        needed = any(generation.folder == made.old.folder for _, generation in _generations_in_use(manifest))
        usable = needed and _is_whole(self.log.lake.store, made.new) and made.new.folder not in manifest.doomed
        if not usable:
            self._drop(made)
        return usable

    def _clean_up(self, manifest: UnboundedManifest | None) -> None:
        """Remove the records of the builds; without a committed manifest, delete the builds too."""
        for made in self.regenerated.values():
            if manifest is None:
                self._drop(made)
            else:
                delete_attempt(self.log.lake, self.log.name, made.attempt.id)

    def _drop(self, made: RewrittenGeneration) -> None:
        self.log.drop(made.new)
        delete_attempt(self.log.lake, self.log.name, made.attempt.id)


def _generations_in_use(manifest: UnboundedManifest) -> Iterator[tuple[BucketLayout, Generation]]:
    """Yield the generations of the served version and of a table that is being built, with their layouts."""
    if manifest.version is not None:
        yield from ((manifest.version.layout, generation) for generation in manifest.version.generations)
    bootstrap, declared = manifest.bootstrap, manifest.declaration
    if bootstrap.columns is not None:
        layout = build_layout(
            bootstrap.columns,
            declared.key,
            declared.partition_by,
            declared.partitions,
            positioned=True,
            over_time=declared.history is not None,
            position_type=declared.position_type,
        )
        yield from ((layout, generation) for generation in bootstrap.building)


@dataclass(frozen=True, slots=True)
class VersionReplacement:
    """The replacement of a retained version: rewritten under a new id, or with only its document redacted.

    `rows` is the number of erased entries.
    """

    old: VersionRef
    new: VersionRef
    sealed: SealedVersion
    attempt: Attempt | None
    rows: int

    @classmethod
    def write(
        cls, log: DatasetLog, old: VersionRef, sealed: SealedVersion, attempt: Attempt | None, rows: int
    ) -> VersionReplacement:
        """Write the document of the new version, and return the replacement of the old one."""
        (generation,) = sealed.generations
        facts = {"id": sealed.id, "rows": sealed.rows, "folders": (generation.folder,), "bytes": generation.size}
        new = old.model_copy(update={**facts, "document": log.write_version(sealed)})
        return cls(old, new, sealed, attempt, rows)

    @property
    def old_objects(self) -> tuple[str, ...]:
        """The folders and the document that it replaces."""
        return (*self.old.folders, str(self.old.document))

    def is_stored(self, store: ObjectStore, manifest: BoundedManifest) -> bool:
        """Whether the new version, which no manifest may list yet, was not discarded by a discard without grace.

        A discard dooms before it deletes, in a commit that we have read or that makes ours fail.
        """
        if {*self.new.folders, self.new.document} & set(manifest.doomed):
            return False
        return _is_whole(store, self.sealed.generations[0]) and store.head(str(self.new.document)) is not None


def _is_whole(store: ObjectStore, generation: Generation) -> bool:
    """Whether all files of a generation are stored."""
    stored = {item.key for item in store.list(f"{generation.folder}/")}
    return {f"{generation.folder}/{file.name}" for file in generation.files} <= stored


@dataclass
class VersionErasure(_Erasure):
    """An erasure in a bounded dataset. Each version is searched once, however often the commit is retried.

    `clean` are the documents of versions without the keys, `replacements` those of the others, by the old document.
    """

    replacements: dict[str, VersionReplacement] = field(default_factory=dict)

    def commit(self, reason: str) -> BoundedManifest:
        """Commit the dataset without the keys and doom what held them; return the current manifest then.

        Versions published meanwhile are searched too. Raises ManifestMismatchError, with nothing erased, where a
        damaged file can't be searched.
        """
        current = self.log.rewrite(partial(self._commit_once, reason), slower="they can be searched for keys")
        self._clean_up(current)
        return current

    def _commit_once(self, reason: str) -> BoundedManifest:
        commit, current = self.log.read()
        assert current is not None
        manifest, store = as_bounded(current), self.log.lake.store
        self.replacements = {old: new for old, new in self.replacements.items() if new.is_stored(store, manifest)}
        for ref in manifest.built:
            self._search_version(ref)
        self.leftovers = find_leftovers(self.log, manifest, self.keys)
        after = self._manifest_without_keys(manifest, reason)
        if after is not None:
            self.log.commit(commit, after, by=self.by)
        return after or manifest

    def rewritten(self, manifest: DatasetManifest) -> tuple[RewrittenVersion, ...]:
        """Return the rewritten versions that this manifest holds."""
        made = [replacement for replacement in self.committed_replacements(manifest) if replacement.rows]
        return tuple(RewrittenVersion(one.old.id, one.new.id, one.new.name, one.new.state, one.rows) for one in made)

    def count_redacted(self, manifest: DatasetManifest) -> int:
        """Return how many versions only had their document redacted."""
        return sum(not replacement.rows for replacement in self.committed_replacements(manifest))

    def committed_replacements(self, manifest: DatasetManifest) -> list[VersionReplacement]:
        """Return the replacements that this manifest holds."""
        documents = {ref.document for ref in manifest.listed}
        return [made for made in self.replacements.values() if made.new.document in documents]

    # -- search

    def _search_version(self, ref: VersionRef) -> None:
        assert ref.document is not None
        if ref.document in self.clean or ref.document in self.replacements:
            return
        try:
            replacement = self._replace(ref, self.log.read_version(ref))
        except (DatasetError, ManifestMismatchError) as error:
            if not self._is_retained(ref):
                return  # discarded meanwhile, with its objects
            if isinstance(error, DatasetError):
                raise
            action = f"give the version up (revoke, drop and discard {ref.id})"
            raise self._unsearched_error(error, action, version=ref.id) from error
        if replacement is None:
            self.clean.add(ref.document)
        else:
            self.replacements[ref.document] = replacement
            self.clean.add(str(replacement.new.document))

    def _is_retained(self, ref: VersionRef) -> bool:
        manifest = self.log.read()[1]
        return manifest is not None and any(listed.document == ref.document for listed in manifest.listed)

    def _replace(self, ref: VersionRef, sealed: SealedVersion) -> VersionReplacement | None:
        affected = count_rows_by_file(
            list_stored_files(self.log.lake.store, self.log.name, sealed), sealed.layout, self.keys
        )
        attempt, new = None, sealed
        if affected:
            attempt = self.log.attempt()
            # On record until the commit, so that no discard takes the new files for garbage.
            with renew_attempt(self.log.lake, self.log.name, attempt.id, self.by):
                new = rewrite_version(self.log, sealed, self.keys, affected, attempt)
        new = SealedVersion.model_validate(redact(new.model_dump(mode="json"), self.keys))
        if new == sealed:
            return None
        return VersionReplacement.write(self.log, ref, new, attempt, sum(affected.values()))

    # -- decision

    def _manifest_without_keys(self, manifest: BoundedManifest, reason: str) -> BoundedManifest | None:
        """Return the manifest without the keys; None when there is nothing to do."""
        old = {
            ref.id: self.replacements[str(ref.document)] for ref in manifest.built if ref.document in self.replacements
        }
        replaced = [entry for made in old.values() for entry in made.old_objects]
        # The old document of a version that keeps its id is not doomed but deleted: leases are on the id.
        deleted = {str(made.old.document) for made in old.values() if made.new.id == made.old.id}
        served = old.get(manifest.version.id) if manifest.version else None
        version = served.new.id if served else None
        return self._with_doomed(manifest, replace_versions(manifest, old), replaced, version, reason, deleted)

    def _clean_up(self, manifest: BoundedManifest) -> None:
        """Remove the records of the builds, and delete rewritten versions whose original was discarded meanwhile."""
        store, used = self.log.lake.store, self.committed_replacements(manifest)
        for replacement in self.replacements.values():
            if replacement not in used:
                store.delete(str(replacement.new.document))
                if replacement.attempt is not None:
                    self.log.drop(replacement.sealed.generations[0])
            if replacement.attempt is not None:
                delete_attempt(self.log.lake, self.log.name, replacement.attempt.id)


def replace_versions(manifest: BoundedManifest, old: Mapping[str, VersionReplacement]) -> BoundedManifest:
    """Return the manifest with the old versions replaced by the new ones everywhere."""

    def renamed(version: str) -> str:
        return old[version].new.id if version in old else version

    version, pin = manifest.version, manifest.pin
    versions = (_with_current_state(ref, old[ref.id].new) if ref.id in old else ref for ref in manifest.versions)
    return manifest.after(
        version=old[version.id].sealed if version is not None and version.id in old else version,
        head=None if manifest.head is None else renamed(manifest.head),
        pin=None if pin is None else Pin(**{**pin.model_dump(), "version": renamed(pin.version)}),
        versions=tuple(ref.model_copy(update={"replaced": ref.replaced and renamed(ref.replaced)}) for ref in versions),
        delivered=tuple(done.model_copy(update={"version": renamed(done.version)}) for done in manifest.delivered),
    )


def _with_current_state(now: VersionRef, new: VersionRef) -> VersionRef:
    """Return the new version's entry with the current state of the old one."""
    kept = {"state": now.state, "reason": now.reason, "verdicts": now.verdicts, "replaced": now.replaced}
    return new.model_copy(update=kept)
