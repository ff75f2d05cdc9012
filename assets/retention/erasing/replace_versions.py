"""Puts versions without some keys in the place of those with them, wherever these stand, in one commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.stored_files import files_of
from dagster_adjunct.assets.retention.erasing.clear_leftovers import Leftovers, find_leftovers
from dagster_adjunct.assets.retention.erasing.redaction import FORGET, redacted
from dagster_adjunct.assets.retention.erasing.rewriting import Rewritten, files_with, rewrite_without
from dagster_adjunct.assets.versions.build_attempts import AttemptRenewal, attempt_key
from dagster_adjunct.assets.versions.manifest import BoundedManifest, Change, DatasetManifest, Pin, as_bounded
from dagster_adjunct.assets.versions.sealed_version import SealedVersion, VersionRef
from dagster_adjunct.assets.versions.stored_manifest import manifest_from, stored_body
from dagster_adjunct.resources.errors import CommitConflictError, DatasetError, ManifestMismatchError

if TYPE_CHECKING:
    from dagster_adjunct.assets.retention.erasing.key_set import KeySet
    from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog

_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Replacement:
    """What takes the place of a retained version: rewritten under a new id, or only with another document.

    `rows` is how many entries went.
    """

    old: VersionRef
    new: VersionRef
    sealed: SealedVersion
    attempt: Attempt | None
    rows: int


@dataclass
class Replacing:
    """One erasure under way. A version's document is looked at once, however often the commit is decided again.

    `clean` are the documents that name none of the keys, of versions that hold none; `found` are the others.
    """

    log: DatasetLog
    keys: KeySet
    by: str
    clean: set[str] = field(default_factory=set)
    found: dict[str, Replacement] = field(default_factory=dict)
    leftovers: Leftovers = field(default_factory=Leftovers)

    def commit(self, reason: str) -> BoundedManifest:
        """Commit the dataset without the keys, dooming what held them; return what is current then.

        A version that is published meanwhile is looked at too. Raises ManifestMismatchError, with nothing erased,
        when a damaged file can't be searched.
        """
        for _ in range(_ROUNDS):
            manifest = self.log.read()[1]
            assert manifest is not None
            manifest = as_bounded(manifest)
            self.found = {old: each for old, each in self.found.items() if self._stands(manifest, each)}
            for ref in _documented(manifest):
                self._look_at(ref)
            self.leftovers = find_leftovers(self.log, manifest, self.keys)
            manifest = as_bounded(self.log.transact(lambda fresh: self._after(as_bounded(fresh), reason), by=self.by))
            if all(ref.document in self.clean for ref in _documented(manifest)):
                self._tidy(manifest)
                return manifest
        raise CommitConflictError(
            f"dataset {self.log.name!r}: versions are published faster than they can be searched for keys.",
            "Run the erasure again when the dataset is quiet.",
            dataset=self.log.name,
        )

    def rewritten(self, manifest: DatasetManifest) -> tuple[Rewritten, ...]:
        """Return the versions that were rewritten, of those that this manifest holds."""
        made = [each for each in self.made(manifest) if each.rows]
        return tuple(Rewritten(each.old.id, each.new.id, each.new.name, each.new.state, each.rows) for each in made)

    def reworded(self, manifest: DatasetManifest) -> int:
        """Return how many versions only got another document."""
        return sum(not each.rows for each in self.made(manifest))

    def made(self, manifest: DatasetManifest) -> list[Replacement]:
        """Return the replacements that this manifest holds."""
        documents = {ref.document for ref in manifest.listed}
        return [each for each in self.found.values() if each.new.document in documents]

    # -- looking

    def _look_at(self, ref: VersionRef) -> None:
        assert ref.document is not None
        if ref.document in self.clean or ref.document in self.found:
            return
        try:
            found = self._replacement(ref, self.log.read_version(ref))
        except (DatasetError, ManifestMismatchError) as error:
            if not self._retained(ref):
                return  # discarded meanwhile, with its objects
            if isinstance(error, DatasetError):
                raise
            raise ManifestMismatchError(
                f"{error.problem} So it can't be said whether it holds a key, and nothing was erased.",
                f"Restore that object, or give the version up (withdraw, drop and discard {ref.id}), and run the "
                "erasure again.",
            ) from error
        if found is None:
            self.clean.add(ref.document)
        else:
            self.found[ref.document] = found
            self.clean.add(str(found.new.document))

    def _retained(self, ref: VersionRef) -> bool:
        manifest = self.log.read()[1]
        return manifest is not None and any(each.document == ref.document for each in manifest.listed)

    def _replacement(self, ref: VersionRef, sealed: SealedVersion) -> Replacement | None:
        affected = files_with(files_of(self.log.lake.store, self.log.name, sealed), sealed.layout, self.keys)
        attempt, new = None, sealed
        if affected:
            attempt = self.log.attempt()
            # On record until the commit, so that nobody takes the new files for garbage.
            with AttemptRenewal(self.log.lake, self.log.name, attempt.id, self.by):
                new = rewrite_without(self.log, sealed, self.keys, affected, attempt)
        new = SealedVersion.model_validate(redacted(new.model_dump(mode="json"), self.keys))
        if new == sealed:
            return None
        (generation,) = new.generations
        changes = {
            "id": new.id,
            "rows": new.rows,
            "document": self.log.write_version(new),
            "folders": (generation.folder,),
            "bytes": generation.size,
        }
        return Replacement(ref, ref.model_copy(update=changes), new, attempt, sum(affected.values()))

    # -- deciding

    def _after(self, manifest: BoundedManifest, reason: str) -> BoundedManifest | None:
        """Return the manifest without the keys; None when there is nothing to do, or more to look at."""
        refs = list(_documented(manifest))
        if any(ref.document not in self.clean and ref.document not in self.found for ref in refs):
            return None
        old = {ref.id: self.found[str(ref.document)] for ref in refs if ref.document in self.found}
        if not all(self._stands(manifest, each) for each in old.values()):
            return None
        after = replaced(manifest, old)
        after = as_bounded(manifest_from(redacted(stored_body(after), self.keys)))
        doomed = [*manifest.doomed, *self.leftovers.garbage]
        doomed += [entry for each in old.values() for entry in (*each.old.folders, str(each.old.document))]
        # The old document of a version that keeps its id is not doomed but deleted: leases are on the id.
        kept = after.reachable() | {str(each.old.document) for each in old.values() if each.new.id == each.old.id}
        doomed = [entry for entry in dict.fromkeys(doomed) if entry not in kept]
        if after == manifest and doomed == list(manifest.doomed):
            return None
        served = old.get(manifest.version.id) if manifest.version else None
        change = Change(action=FORGET, version=served.new.id if served else None, reason=reason)
        return after.after(doomed=tuple(doomed), change=change)

    def _stands(self, manifest: BoundedManifest, each: Replacement) -> bool:
        """Whether nobody has discarded what was rewritten: with a grace period of nothing, a discard may have.

        It dooms before it deletes, in a commit that we have read or that makes ours fail.
        """
        if {*each.new.folders, each.new.document} & set(manifest.doomed):
            return False
        store, (generation,) = self.log.lake.store, each.sealed.generations
        there = {item.key for item in store.list(f"{generation.folder}/")}
        files = {f"{generation.folder}/{file.name}" for file in generation.files}
        return files <= there and store.head(str(each.new.document)) is not None

    def _tidy(self, manifest: BoundedManifest) -> None:
        """Take the builds off record, and delete what was rewritten in vain: its version went meanwhile."""
        store, made = self.log.lake.store, self.made(manifest)
        for each in self.found.values():
            if each not in made:
                store.delete(str(each.new.document))
                if each.attempt is not None:
                    self.log.drop(each.sealed.generations[0])
            if each.attempt is not None:
                store.delete(attempt_key(self.log.lake, self.log.name, each.attempt.id))


def _documented(manifest: BoundedManifest) -> Iterator[VersionRef]:
    """Yield the versions that were built; of others there is nothing but their reason."""
    return (ref for ref in manifest.versions if ref.document is not None)


def replaced(manifest: BoundedManifest, old: Mapping[str, Replacement]) -> BoundedManifest:
    """Return the manifest with the new versions wherever the old ones stand."""

    def renamed(version: str) -> str:
        return old[version].new.id if version in old else version

    version, pin = manifest.version, manifest.pin
    versions = (_moved(ref, old[ref.id].new) if ref.id in old else ref for ref in manifest.versions)
    return manifest.after(
        version=old[version.id].sealed if version is not None and version.id in old else version,
        head=None if manifest.head is None else renamed(manifest.head),
        pin=None if pin is None else Pin(**{**pin.model_dump(), "version": renamed(pin.version)}),
        versions=tuple(ref.model_copy(update={"replaced": ref.replaced and renamed(ref.replaced)}) for ref in versions),
        delivered=tuple(each.model_copy(update={"version": renamed(each.version)}) for each in manifest.delivered),
    )


def _moved(now: VersionRef, new: VersionRef) -> VersionRef:
    """Return the new version's entry, in the state that the old one is in by now."""
    kept = {"state": now.state, "reason": now.reason, "verdicts": now.verdicts, "replaced": now.replaced}
    return new.model_copy(update=kept)
