"""Erases keys from every retained version of a dataset (data protection requests).

    search    find the retained versions, and unreferenced leftovers, that hold one of the keys
    rewrite   write each such version again in a new folder, with the same number and name and a new
              id
    switch    one commit replaces the old versions with the new ones, and dooms the old
    delete    delete what is doomed and not held; clear the keys from past commits, verdicts and
              reasons
    verify    open and search every object of the dataset

Of an unbounded dataset, the generations that are served or being built are rewritten without rows
and tombstones of the keys, in one new version. Earlier versions consist of the old generations, so
they can't be read any more. Spark reads a generation as a whole folder, so a rewritten one has a
new folder: files with a key are written again, the others copied.

Repeat an erasure until its report is complete: an interrupted run is resumed, and leased versions
are deleted later. It does not reach what is not the dataset's: its input, outputs of applications
that joined it, and Dagster's history. A later delivery with a key brings it back.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import uuid4

from dagster_adjunct.assets.generation import count_deletions
from dagster_adjunct.assets.reading.stored_file import (
    StoredFile,
    list_generation_files,
    list_stored_files,
)
from dagster_adjunct.assets.retention import key_search
from dagster_adjunct.assets.retention.discard import RetentionDecision, Roots, delete_doomed
from dagster_adjunct.assets.retention.key_search import ERASE_ACTION, KeySearch, KeySet, redact
from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog
from dagster_adjunct.assets.versions.leases import delete_attempt, read_lake_clock, renew_attempt
from dagster_adjunct.assets.versions.manifest import (
    BoundedManifest,
    Change,
    DatasetManifest,
    UnboundedManifest,
    as_bounded,
    as_unbounded,
    manifest_from_body,
)
from dagster_adjunct.assets.versions.switches import require_audit_fields
from dagster_adjunct.assets.versions.version import (
    TOMBSTONE,
    SealedVersion,
    VersionRef,
    build_layout,
    count_current_rows,
    version_id,
)
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.bucketing.files import (
    HAS_ENDS,
    VALID_FROM,
    BucketFile,
    BucketLayout,
    Generation,
    TimelineOptions,
    attempt_id,
    bucket_file_name,
    conform_to_layout,
)
from dagster_adjunct.resources.bucketing.writer import (
    BucketFileWriter,
    WriteOptions,
    write_bucket_file,
)
from dagster_adjunct.resources.lazy_modules import np, pa
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import ObjectInfo, staged_file_errors
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.schemas.schema import Field
from dagster_adjunct.resources.validation import validated


@dataclass(frozen=True, slots=True)
class RewrittenVersion:
    """A version that held some of the keys, and its replacement: `old` and `new` are ids, `rows`
    is the number of erased entries, and `state` is that of the version.

    For an unbounded dataset, it describes a generation: `old` and `new` are folders, `rows` is the
    number of erased rows, tombstones included, and `state` is "served" or "building".
    """

    old: str
    new: str
    name: str | None
    state: str
    rows: int


@dataclass(frozen=True, slots=True)
class ErasureReport(Report):
    """What one erasure did. `keys` is the number of requested keys; the report does not contain the
    keys.

    `redacted` counts documents from which keys were cleared, `deleted` the deleted objects.
    `pending` are the objects with a key that are still in use, and by whom; `proof` is the search
    afterwards. `not_erased` names the places outside of the dataset. For an unbounded dataset,
    `retained_from` is the number of the first readable version.
    """

    dataset: str
    keys: int
    reason: str
    by: str
    rewritten: tuple[RewrittenVersion, ...]
    redacted: int
    deleted: int
    pending: tuple[RetentionDecision, ...]
    proof: KeySearch
    not_erased: tuple[str, ...]
    retained_from: int | None = None

    @property
    def complete(self) -> bool:
        """Whether all objects of the dataset were searched afterwards and none of them holds a
        key.
        """
        return self.proof.clean

    def summary(self) -> str:
        """Return the outcome in one line, for logs."""
        rows = sum(version.rows for version in self.rewritten)
        count = len(self.rewritten)
        if self.retained_from is None:
            erased = f"{rows} entries of {count} versions"
        else:
            erased = f"{rows} rows of {count} generations"
        parts = [f"dataset {self.dataset}: {self.keys} key(s), {erased} erased"]
        if self.retained_from is not None:
            parts.append(f"versions from {self.retained_from} on can be read")
        parts.append(f"{self.proof.objects} objects with {self.proof.rows:,} rows searched")
        if self.complete:
            parts.append("none of the keys is left")
        else:
            parts.append("NOT complete")
            parts += [f"{decision.what}: {decision.reason}" for decision in self.pending]
            parts += map(str, (*self.proof.found, *self.proof.unsearched))
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        pending = [{"what": decision.what, "reason": decision.reason} for decision in self.pending]
        return Report.to_json(self) | {"pending": pending, "complete": self.complete}


@validated
def erase_keys(
    lake: Lake, dataset: str, keys: Iterable[object], *, reason: str, by: str, roots: Roots = dict
) -> ErasureReport:
    """Erase these keys, given as for `get`, from all objects of a dataset, and verify it by a
    search.

    `roots` gives, by version id, why applications still need a version (their open batches), as for
    `discard`. Readers keep old versions until they release them; the report names them, and a later
    erasure or discard deletes the files. Of an unbounded dataset, earlier versions that read a
    generation with a key are gone; its stream still holds the keys. Raises DatasetNotFoundError,
    SchemaMismatchError (a key of the wrong type), ConfigurationError (no keys, or one of them in
    the reason), and ManifestMismatchError where a damaged file can't be rewritten; then nothing is
    erased.
    """
    log = DatasetLog(lake, dataset)
    manifest = log.require().manifest
    key_set = _validate_request(manifest, keys, reason, by)
    work: GenerationErasure | VersionErasure
    if isinstance(manifest, UnboundedManifest):
        work = GenerationErasure(log, key_set, by)
    else:
        work = VersionErasure(log, key_set, by)
    manifest = work.commit(reason)
    deletion = delete_doomed(log, manifest, roots, read_lake_clock(lake, dataset), by=by)
    superseded = key_search.delete_superseded_documents(log)
    past = key_search.redact_past_manifests(log, key_set)
    proof = key_search.search_keys(log, key_set)
    pending = []
    for held in (*deletion.spared, *work.builds):
        if _has_found_keys(held, proof):
            pending.append(held)
    redacted = [made for made in work.made.values() if not made.rows]
    elsewhere = manifest.kept_elsewhere()
    if lake.url.startswith("s3://"):
        elsewhere.append(f"older object versions in {lake.url}, if the bucket keeps them")
    return ErasureReport(
        dataset=dataset,
        keys=len(key_set),
        reason=reason,
        by=by,
        rewritten=work.rewritten(manifest),
        redacted=past + len(redacted),
        deleted=len(deletion.deleted) + superseded,
        pending=tuple(pending),
        proof=proof,
        not_erased=tuple(elsewhere),
        retained_from=manifest.retained_from,
    )


@validated
def find_keys(lake: Lake, dataset: str, keys: Iterable[object]) -> KeySearch:
    """Return which objects of a dataset hold these keys, given as for `Dataset.get`; changes
    nothing.
    """
    log = DatasetLog(lake, dataset)
    fields = _key_fields(log.require().manifest)
    return key_search.search_keys(log, KeySet.of(f"dataset {dataset!r}", fields, keys))


def _validate_request(
    manifest: DatasetManifest, keys: Iterable[object], reason: str, by: str
) -> KeySet:
    """Return the keys to erase. Raises SchemaMismatchError for a key of the wrong type, and
    ConfigurationError for no keys, no reason, or a reason that contains a key.
    """
    what = f"dataset {manifest.name!r}"
    key_set = KeySet.of(what, _key_fields(manifest), keys)
    if not len(key_set):
        raise errors.ConfigurationError(
            f"{what}: argument 'keys' is empty.",
            "Give one or more keys.",
            argument="keys",
            dataset=manifest.name,
        )
    require_audit_fields("erase keys of", manifest.name, reason, by, dataset=manifest.name)
    if key_set.with_text().is_named_in(reason):
        raise errors.ConfigurationError(
            f"{what}: the reason of the erasure contains a key to erase, and would store it.",
            "Give the number or date of the request instead.",
            argument="reason",
            dataset=manifest.name,
        )
    return key_set


def _key_fields(manifest: DatasetManifest) -> tuple[Field, ...]:
    """Return the columns of the key, with their types."""
    declared = manifest.declaration
    names_and_types = zip(declared.key, declared.key_types, strict=True)
    return tuple(Field(name, kind) for name, kind in names_and_types)


def _has_found_keys(held: RetentionDecision, proof: KeySearch) -> bool:
    """Whether the search found keys in an object of a held entry, or could not read one. Its
    objects have the id of its attempt in their keys: files, record and document.
    """
    _, _, attempt = held.what.rpartition("/")
    return any(attempt in sighting.object for sighting in (*proof.found, *proof.unsearched))


def count_rows_by_file(
    files: Sequence[StoredFile], layout: BucketLayout, keys: KeySet
) -> dict[str, int]:
    """Return the number of rows with one of the keys, by file name, for the files that have any.

    Only files whose bucket and key range match are opened. Raises ManifestMismatchError where one
    is damaged.
    """
    buckets = keys.buckets(layout)
    found = {}
    for stored in files:
        if stored.file.bucket in buckets and keys.may_be_in(stored.file):
            count = _count_rows(stored, keys)
            if count:
                found[stored.file.name] = count
    return found


def rewrite_generation(
    files: Sequence[StoredFile],
    layout: BucketLayout,
    number: int,
    keys: KeySet,
    affected: dict[str, int],
    attempt: Attempt,
) -> Generation:
    """Write a generation again in the folder of `attempt`, under the same `number`, without the
    rows of these keys; `affected` names the files that have some.

    Rows keep their hidden columns. Other files are copied. Rewritten files have no digest, and
    files without rows are left out.
    """
    folder = attempt.generation(number).folder
    written = []
    for stored in files:
        if stored.file.name in affected:
            file = _write_file_without(stored, layout, keys, folder)
        else:
            file = _copy_file(stored, folder)
        if file is not None and file.rows:
            written.append(file)
    new = attempt.generation(number, written)
    # Footers that were too large for the manifest would be so again.
    if all(stored.file.footer is None for stored in files):
        return new.without_footers()
    return new


def _count_rows(stored: StoredFile, keys: KeySet) -> int:
    """Return the number of a file's rows with one of the keys, tombstones included."""
    return sum(len(keys.rows_in(table)) for table in stored.row_groups(keys.names))


def _count_tombstones(stored: StoredFile, keys: KeySet) -> int:
    """Return the number of a file's tombstones with one of the keys."""
    tables = stored.row_groups([*keys.names, TOMBSTONE])
    return sum(len(keys.rows_in(table.filter(table.column(TOMBSTONE)))) for table in tables)


def _write_file_without(
    stored: StoredFile, layout: BucketLayout, keys: KeySet, folder: str
) -> BucketFile | None:
    """Write a file again without the rows of these keys; None if no row is left."""
    over_time = None
    if VALID_FROM in layout.key:
        over_time = TimelineOptions(fills_ends=bool(stored.file.stats.get(HAS_ENDS)))
    options = WriteOptions(stored.what, over_time=over_time)

    def rows_without_keys() -> Iterator[pa.Table]:
        for rows in stored.row_groups(list(layout.stored.columns)):
            stays = np.ones(rows.num_rows, dtype=bool)
            stays[keys.rows_in(rows)] = False
            # An unbounded table may have files from before its columns were changed.
            yield conform_to_layout(rows.filter(stays), layout)

    writer = BucketFileWriter(stored.store, folder, stored.file.bucket, layout, options)
    written = write_bucket_file(writer, rows_without_keys())
    if written is None:
        return None
    # The stats tell readers whether tombstones were left out.
    return replace(written, stats={**stored.file.stats, **written.stats})


def _copy_file(stored: StoredFile, folder: str) -> BucketFile:
    """Copy a file through this machine. Raises ManifestMismatchError if its SHA-256 shows that
    it is damaged.
    """
    path = stored.store.staging_dir() / f"{uuid4().hex}.parquet"
    name = bucket_file_name(stored.file.bucket, attempt_id(folder))
    try:
        stored.reading(partial(stored.store.download, stored.key, path))
        with staged_file_errors(stored.store, path, stored.what), path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != stored.file.sha256:
            raise stored.damaged(
                f"its SHA-256 is {sha256}, the manifest lists {stored.file.sha256}"
            )
        # The name is only of this attempt, so an existing object is of our own repeated request.
        with suppress(errors.ObjectExistsError):
            stored.store.upload(path, f"{folder}/{name}")
    finally:
        path.unlink(missing_ok=True)
    return replace(stored.file, name=name)


class StoredReplacement(NamedTuple):
    """A new generation, and the key of its version's document, None if it has none."""

    generation: Generation
    document: str | None


@dataclass(frozen=True, slots=True)
class RewrittenGeneration:
    """A generation and its replacement, written by `attempt`. `rows` is the number of erased rows,
    `live` that of those that were no tombstones.
    """

    old: Generation
    new: Generation
    attempt: Attempt
    rows: int = 0
    live: int = 0

    @property
    def stored(self) -> StoredReplacement:
        """What was written."""
        return StoredReplacement(self.new, None)


@dataclass(frozen=True, slots=True)
class VersionReplacement:
    """The replacement of a retained version: rewritten under a new id by `attempt`, or with only
    its document redacted (`attempt` None, the same id).

    `rows` is the number of erased entries.
    """

    old: VersionRef
    new: VersionRef
    sealed: SealedVersion
    attempt: Attempt | None
    rows: int

    @classmethod
    def write(
        cls,
        log: DatasetLog,
        old: VersionRef,
        sealed: SealedVersion,
        attempt: Attempt | None,
        rows: int,
    ) -> VersionReplacement:
        """Store `sealed`, which replaces the version `old`, as a document; return the
        replacement.
        """
        (generation,) = sealed.generations
        facts = {
            "id": sealed.id,
            "rows": sealed.rows,
            "folders": (generation.folder,),
            "bytes": generation.size,
        }
        new = old.model_copy(update={**facts, "document": log.write_version(sealed)})
        return cls(old, new, sealed, attempt, rows)

    @property
    def stored(self) -> StoredReplacement:
        """What was written."""
        return StoredReplacement(self.sealed.generations[0], self.new.document)


M = TypeVar("M", UnboundedManifest, BoundedManifest)
T = TypeVar("T")
R = TypeVar("R", RewrittenGeneration, VersionReplacement)


def write_on_record(log: DatasetLog, by: str, write: Callable[[Attempt], T]) -> T:
    """Call `write` with a new attempt, and return its result.

    The attempt stays on record after that, so that no discard takes its files for garbage;
    `delete_records` deletes the record. If `write` raises, it is deleted at once.
    """
    attempt = log.attempt()
    try:
        with renew_attempt(log.lake, log.name, attempt.id, by):
            return write(attempt)
    except BaseException:
        delete_attempt(log.lake, log.name, attempt.id)
        raise


def drop_unusable(
    log: DatasetLog, manifest: DatasetManifest, made: dict[str, R], needed: Collection[str]
) -> list[str]:
    """Drop, from the replacements `made`, those of what is no longer `needed`, and those whose
    files a discard has deleted or doomed. Return what is needed and has no replacement.

    A discard first commits what it is going to delete. Either we have read that commit, or it makes
    ours fail.
    """
    for old, replacement in list(made.items()):
        if old not in needed or not _is_usable(log, manifest, replacement.stored):
            drop_replacement(log, made.pop(old))
    return [name for name in needed if name not in made]


def _is_usable(log: DatasetLog, manifest: DatasetManifest, stored: StoredReplacement) -> bool:
    """Whether what was written is still stored, and not doomed."""
    generation, document = stored
    if generation.folder in manifest.doomed or document in manifest.doomed:
        return False
    if log.find_missing_files(generation.folder, [generation]):
        return False
    return document is None or log.lake.store.head(document) is not None


def delete_records(
    log: DatasetLog, made: Iterable[RewrittenGeneration | VersionReplacement]
) -> None:
    """Delete the records of the attempts that wrote these replacements."""
    for replacement in made:
        if replacement.attempt is not None:
            delete_attempt(log.lake, log.name, replacement.attempt.id)


def drop_replacement(log: DatasetLog, made: RewrittenGeneration | VersionReplacement) -> None:
    """Delete the objects and the record of a replacement that no manifest lists."""
    generation, document = made.stored
    if document is not None:
        log.lake.store.delete(document)
    if made.attempt is not None:  # else the files are those of the old version
        log.drop(generation)
        delete_records(log, [made])


@dataclass
class _Erasure(ABC, Generic[M, R]):
    """An erasure of keys. Each part of the dataset is searched once, however often the commit is
    retried.

    Parts are named by folder or document: `clean` are those without the keys, `made` has the
    replacements of the others. `garbage` and `builds` are what `find_leftovers` has found.
    """

    log: DatasetLog
    keys: KeySet
    by: str
    clean: set[str] = field(default_factory=set)
    made: dict[str, R] = field(default_factory=dict)
    garbage: list[str] = field(default_factory=list)
    builds: list[RetentionDecision] = field(default_factory=list)

    def commit(self, reason: str) -> M:
        """Commit the dataset without the keys, with the objects that hold them doomed; return the
        new manifest.

        What other writers commit meanwhile is searched too. If a damaged file can't be searched,
        ManifestMismatchError is raised and nothing is erased.
        """
        try:
            current = self.log.rewrite(
                partial(self._commit_once, reason), slower="they can be searched for keys"
            )
        except errors.CommitConflictError:
            for made in self.made.values():
                drop_replacement(self.log, made)
            raise
        delete_records(self.log, self.made.values())
        return current

    def _commit_once(self, reason: str) -> M:
        """Search what is not searched yet, and commit the manifest without the keys; return the
        current manifest. Raises CommitConflictError if another writer commits first.
        """
        commit, stored = self.log.require()
        manifest = self._of_kind(stored)
        parts = self._parts(manifest)
        for name in drop_unusable(self.log, manifest, self.made, parts):
            if name in self.clean:
                continue
            try:
                made = self._replace(manifest, parts[name])
            except (errors.DatasetError, errors.ManifestMismatchError) as error:
                parts_now = self._parts(self._of_kind(self.log.require().manifest))
                if name not in parts_now:
                    continue  # compacted or discarded meanwhile: the commit fails and is retried
                if isinstance(error, errors.DatasetError):
                    raise
                raise self._unsearched_error(error, parts[name]) from error
            if made is None:
                self.clean.add(name)
            else:
                self.made[name] = made
        leftovers = key_search.find_leftovers(self.log, manifest, self.keys)
        self.garbage = leftovers.garbage
        self.builds = leftovers.builds
        commit_id = self.log.attempt().id
        after = self._manifest_without_keys(manifest, commit.number + 1, commit_id, reason)
        if after is None:
            return manifest
        self.log.commit(commit, after, by=self.by, commit_id=commit_id)
        return after

    @staticmethod
    @abstractmethod
    def _of_kind(manifest: DatasetManifest) -> M:
        """Return the manifest, as that of a bounded or an unbounded dataset."""

    @abstractmethod
    def _parts(self, manifest: M) -> dict[str, Any]:
        """Return what may hold keys, by name.

        These are the retained versions by document, or the generations that are served or being
        built by folder.
        """

    @abstractmethod
    def _replace(self, manifest: M, part: Any) -> R | None:
        """Return the replacement of a part, None if it holds no key."""

    @abstractmethod
    def _manifest_without_keys(
        self, manifest: M, number: int, commit_id: str, reason: str
    ) -> M | None:
        """Return the manifest to commit, without the keys; None when there is nothing to do."""

    def _with_doomed(
        self,
        manifest: M,
        after: M,
        replaced: Sequence[str],
        version: str | None,
        reason: str,
        deleted: Set[str] = set(),
    ) -> M | None:
        """Return `after` redacted, and with leftovers and what was `replaced` doomed; None if
        nothing changes.

        `manifest` is the one before, `version` the new id of what is served (None: unchanged).
        `deleted` is not doomed: it is deleted once the erasure is committed.
        """
        redacted = manifest_from_body(redact(after.model_dump(mode="json"), self.keys))
        assert isinstance(redacted, type(after))
        not_doomed = redacted.reachable() | deleted
        doomed = dict.fromkeys([*manifest.doomed, *self.garbage, *replaced])
        doomed_now = tuple(entry for entry in doomed if entry not in not_doomed)
        if redacted == manifest and doomed_now == manifest.doomed:
            return None
        change = Change(action=ERASE_ACTION, version=version, reason=reason)
        return redacted.after(doomed=doomed_now, change=change)

    def _unsearched_error(
        self, error: errors.ManifestMismatchError, part: Any
    ) -> errors.ManifestMismatchError:
        """Return the error that a part of the dataset could not be searched."""
        about = {}
        if isinstance(part, VersionRef):
            action = f"give the version up (revoke, drop and discard {part.id})"
            about = {"version": part.id}
        else:
            action = f"rebuild the dataset ({self.log.name})"
        problem = f"{error.problem} It is unknown whether it holds a key, so nothing was erased."
        next_step = f"Restore that object, or {action}, and run the erasure again."
        return error.reworded(problem, next_step, dataset=self.log.name, **about)


@dataclass
class GenerationErasure(_Erasure[UnboundedManifest, RewrittenGeneration]):
    """An erasure in an unbounded dataset.

    `holding` are generations that only earlier versions read and that hold a key or are unreadable.
    """

    holding: set[str] = field(default_factory=set)

    def rewritten(self, manifest: DatasetManifest) -> tuple[RewrittenVersion, ...]:
        """Return the rewritten generations."""
        served = {generation.folder for generation in manifest.served_generations}
        rewritten = []
        for made in self.made.values():
            state = "served" if made.new.folder in served else "building"
            rewritten.append(
                RewrittenVersion(made.old.folder, made.new.folder, None, state, made.rows)
            )
        return tuple(rewritten)

    _of_kind = staticmethod(as_unbounded)

    def _parts(self, manifest: UnboundedManifest) -> dict[str, _GenerationInUse]:
        """Return the generations that are served or being built, by folder."""
        return {part.generation.folder: part for part in _generations_in_use(manifest)}

    def _replace(
        self, manifest: UnboundedManifest, part: _GenerationInUse
    ) -> RewrittenGeneration | None:
        """Return the replacement of a generation, None if it holds no key."""
        layout, generation = part
        version = manifest.version
        if version is not None and generation in version.generations:
            what = f"dataset {self.log.name!r}, version {version.id}"
        else:
            what = f"dataset {self.log.name!r}, being built"
        files = list_generation_files(self.log.lake.store, what, generation)
        affected = count_rows_by_file(files, layout, self.keys)
        if not affected:
            return None
        erased = sum(affected.values())

        def write(attempt: Attempt) -> RewrittenGeneration:
            tombstones = 0
            for stored in files:
                if stored.file.name in affected:
                    tombstones += _count_tombstones(stored, self.keys)
            new = rewrite_generation(files, layout, generation.id, self.keys, affected, attempt)
            return RewrittenGeneration(generation, new, attempt, erased, erased - tombstones)

        return write_on_record(self.log, self.by, write)

    def _search_earlier(self, manifest: UnboundedManifest) -> None:
        """Search the generations that only earlier versions read, for `holding` and `clean`."""
        earlier = {retired.folder for retired in manifest.retired} - self.clean - self.holding
        files: list[ObjectInfo] = []
        for folder in sorted(earlier):
            files += self.log.lake.store.list(f"{folder}/")
        seen = key_search.search_files(self.log.lake.store, files, self.keys)
        holding = set()
        # Unreadable generations may contain the keys, so they are doomed too.
        for finding in (*seen.found, *seen.unsearched):
            folder, _, _ = finding.object.rpartition("/")
            holding.add(folder)
        self.holding |= holding
        self.clean |= earlier - holding

    def _manifest_without_keys(
        self, manifest: UnboundedManifest, number: int, commit_id: str, reason: str
    ) -> UnboundedManifest | None:
        """Return the manifest with the new generations, None when there is nothing to do."""
        self._search_earlier(manifest)
        retained_from = manifest.retained_from
        for retired in manifest.retired:
            if retired.folder in self.holding:
                retained_from = max(retained_from, retired.until)
        served = manifest.served_generations
        replaced = [self.made[old.folder] for old in served if old.folder in self.made]
        version = manifest.version
        new_id = None
        if version is not None and replaced:
            version = self._version_without_keys(version, replaced, number, commit_id)
            new_id = version.id
            retained_from = number  # all earlier versions read a generation with a key
        being_built = manifest.bootstrap.building
        building = tuple(self._without_keys(being_built))
        after = manifest.after(
            version=version,
            retired=tuple(each for each in manifest.retired if each.until > retained_from),
            retained_from=retained_from,
            bootstrap=manifest.bootstrap.model_copy(update={"building": building}),
        )
        # Of these, only folders that are no longer reachable become doomed.
        old_folders = [retired.folder for retired in manifest.retired]
        old_folders += [old.folder for old in (*being_built, *served) if old.folder in self.made]
        return self._with_doomed(manifest, after, old_folders, new_id, reason)

    def _without_keys(self, generations: Sequence[Generation]) -> list[Generation]:
        """Return the generations, rewritten where they held keys, without empty ones."""
        remaining = []
        for old in generations:
            new = self._replacement_of(old)
            if new.files:
                remaining.append(new)
        return remaining

    def _replacement_of(self, old: Generation) -> Generation:
        """Return the replacement of a generation, or the generation itself if it holds no key."""
        made = self.made.get(old.folder)
        if made is None:
            return old
        return made.new

    def _version_without_keys(
        self,
        version: SealedVersion,
        replaced: Sequence[RewrittenGeneration],
        number: int,
        commit_id: str,
    ) -> SealedVersion:
        """Return the served version with the new generations, without empty ones; an empty one if
        no rows are left. `number` and `commit_id` are those of the commit.

        The number of entries is exact or None, as before.
        """
        first = version.generations[0]
        generations = self._without_keys(version.generations)
        if not generations:  # a version has at least one
            generations = [self._replacement_of(first)]
        is_alone = len(generations) == 1
        rows: int | None
        if version.history is not None:
            rows = count_current_rows(generations[0]) if is_alone else None
        elif version.rows is not None:
            rows = version.rows - sum(made.live for made in replaced)
        elif is_alone and generations[0].id == first.id and version.order_by is None:
            # All deltas have become empty. What is left is usually a base; it is a delta, perhaps
            # with tombstones, if an earlier erasure removed the base.
            rows = None if count_deletions(generations[0]) else generations[0].rows
        else:
            rows = None
        return version.after(
            id=version_id(number, commit_id),
            number=number,
            sealed_at=self.log.lake.now(),
            generations=tuple(generations),
            rows=rows,
            counters={"erased": sum(made.rows for made in replaced)},
        )


class _GenerationInUse(NamedTuple):
    """A generation, and the layout of its files."""

    layout: BucketLayout
    generation: Generation


def _generations_in_use(manifest: UnboundedManifest) -> Iterator[_GenerationInUse]:
    """Yield the generations of the served version and of a table that is being built."""
    version = manifest.version
    if version is not None:
        for generation in version.generations:
            yield _GenerationInUse(version.layout, generation)
    bootstrap = manifest.bootstrap
    declared = manifest.declaration
    if bootstrap.columns is not None:
        layout = build_layout(
            bootstrap.columns,
            declared.key,
            declared.partition_by,
            declared.partitions,
            declared.positions,
            over_time=declared.history is not None,
        )
        layout = replace(layout, names=bootstrap.names)
        for generation in bootstrap.building:
            yield _GenerationInUse(layout, generation)


class _WrittenVersion(NamedTuple):
    """A version that was written again, and the attempt that wrote it."""

    attempt: Attempt
    version: SealedVersion


@dataclass
class VersionErasure(_Erasure[BoundedManifest, VersionReplacement]):
    """An erasure in a bounded dataset."""

    def rewritten(self, manifest: DatasetManifest) -> tuple[RewrittenVersion, ...]:
        """Return the rewritten versions."""
        rewritten = []
        for made in self.made.values():
            if made.rows:
                new = made.new
                rewritten.append(
                    RewrittenVersion(made.old.id, new.id, new.name, new.state, made.rows)
                )
        return tuple(rewritten)

    _of_kind = staticmethod(as_bounded)

    def _parts(self, manifest: BoundedManifest) -> dict[str, VersionRef]:
        """Return the retained versions that were built, by document."""
        return {str(ref.document): ref for ref in manifest.built}

    def _replace(self, manifest: BoundedManifest, part: VersionRef) -> VersionReplacement | None:
        """Return the replacement of a version, None if neither its files nor its document hold a
        key. Files are only written again if they do.
        """
        sealed = self.log.read_version(part)
        files = list_stored_files(self.log.lake.store, self.log.name, sealed)
        affected = count_rows_by_file(files, sealed.layout, self.keys)
        attempt = None
        new = sealed
        if affected:
            rewrite = partial(self._rewrite, sealed, files, affected)
            rewritten = write_on_record(self.log, self.by, rewrite)
            attempt = rewritten.attempt
            new = rewritten.version
        new = SealedVersion.model_validate(redact(new.model_dump(mode="json"), self.keys))
        if new == sealed:
            return None
        return VersionReplacement.write(self.log, part, new, attempt, sum(affected.values()))

    def _rewrite(
        self,
        sealed: SealedVersion,
        files: Sequence[StoredFile],
        affected: dict[str, int],
        attempt: Attempt,
    ) -> _WrittenVersion:
        """Write a version again without the entries of the keys, under the same number and name and
        a new id.

        If a file has no digest, neither has the version, so no later delivery is taken for equal to
        it.
        """
        (generation,) = sealed.generations
        new = rewrite_generation(files, sealed.layout, generation.id, self.keys, affected, attempt)
        erased = sealed.counters.get("erased", 0) + sum(affected.values())
        version = sealed.after(
            id=version_id(sealed.number, attempt.id),
            generations=(new,),
            rows=new.rows,
            digest=new.digest,
            counters={**sealed.counters, "erased": erased},
        )
        return _WrittenVersion(attempt, version)

    def _manifest_without_keys(
        self, manifest: BoundedManifest, number: int, commit_id: str, reason: str
    ) -> BoundedManifest | None:
        """Return the manifest with the replaced versions, None when there is nothing to do."""
        by_old_id = {made.old.id: made for made in self.made.values()}
        replaced: list[str] = []
        for made in by_old_id.values():
            replaced += made.old.objects
        # The old document of a version that keeps its id is not doomed but deleted: leases are on
        # the id.
        deleted = set()
        for made in by_old_id.values():
            if made.new.id == made.old.id:
                deleted.add(str(made.old.document))
        served = None
        if manifest.version:
            served = by_old_id.get(manifest.version.id)
        new_id = None
        if served:
            new_id = served.new.id
        after = replace_versions(manifest, by_old_id)
        return self._with_doomed(manifest, after, replaced, new_id, reason, deleted)


def replace_versions(
    manifest: BoundedManifest, replacements: Mapping[str, VersionReplacement]
) -> BoundedManifest:
    """Return the manifest with these versions replaced everywhere; `replacements` are by old id."""

    def new_id_of(version: Any) -> Any:
        """Return the new id of a version, or its own if it stays."""
        if version not in replacements:
            return version
        return replacements[version].new.id

    version = manifest.version
    if version is not None and version.id in replacements:
        version = replacements[version.id].sealed
    versions = []
    for ref in manifest.versions:
        if ref.id in replacements:
            new = _with_current_state(ref, replacements[ref.id].new)
        else:
            new = ref
        versions.append(new.model_copy(update={"replaced": new_id_of(new.replaced)}))
    delivered = []
    for done in manifest.delivered:
        delivered.append(done.model_copy(update={"version": new_id_of(done.version)}))
    pin = manifest.pin
    if pin is not None:
        pin = pin.model_copy(update={"version": new_id_of(pin.version)})
    return manifest.after(
        version=version,
        head=new_id_of(manifest.head),
        pin=pin,
        versions=tuple(versions),
        delivered=tuple(delivered),
    )


def _with_current_state(now: VersionRef, new: VersionRef) -> VersionRef:
    """Return the manifest's entry `new` of a version, with the state that its old entry `now` has:
    it may have changed since the replacement was written.
    """
    kept = {
        "state": now.state,
        "reason": now.reason,
        "verdicts": now.verdicts,
        "replaced": now.replaced,
    }
    return new.model_copy(update=kept)
