"""Puts versions without some keys in the place of those with them, wherever these stand, in one commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.stored_files import files_of
from dagster_adjunct.assets.retention.erasing.clear_leftovers import Leftovers, find_leftovers
from dagster_adjunct.assets.retention.erasing.redaction import FORGET, redacted
from dagster_adjunct.assets.retention.erasing.rewriting import RewrittenVersion, files_with, rewrite_without
from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest, Pin
from dagster_adjunct.assets.versions.build_attempts import AttemptRenewal, attempt_key
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.manifest import DatasetManifest, as_bounded
from dagster_adjunct.assets.versions.sealed_version import SealedVersion, VersionRef
from dagster_adjunct.assets.versions.stored_manifest import manifest_from, stored_body
from dagster_adjunct.resources.errors import DatasetError, ManifestMismatchError

if TYPE_CHECKING:
    from dagster_adjunct.assets.retention.erasing.key_set import KeySet
    from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog


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

    `clean` are the documents that name none of the keys, of versions that hold none; `replacements` are what takes the
    place of the others, by the old document.
    """

    log: DatasetLog
    keys: KeySet
    by: str
    clean: set[str] = field(default_factory=set)
    replacements: dict[str, Replacement] = field(default_factory=dict)
    leftovers: Leftovers = field(default_factory=Leftovers)

    def commit(self, reason: str) -> BoundedManifest:
        """Commit the dataset without the keys, dooming what held them; return what is current then.

        A version that is published meanwhile is looked at too. Raises ManifestMismatchError, with nothing erased,
        when a damaged file can't be searched.
        """
        current = self.log.rewrite(partial(self._commit_once, reason), slower="they can be searched for keys")
        self._tidy(current)
        return current

    def _commit_once(self, reason: str) -> BoundedManifest:
        commit, current = self.log.read()
        assert current is not None
        manifest = as_bounded(current)
        self.replacements = {old: new for old, new in self.replacements.items() if self._stands(manifest, new)}
        for ref in manifest.built:
            self._look_at(ref)
        self.leftovers = find_leftovers(self.log, manifest, self.keys)
        after = self._after(manifest, reason)
        if after is not None:
            self.log.commit(commit, after, by=self.by)
        return after or manifest

    def rewritten(self, manifest: DatasetManifest) -> tuple[RewrittenVersion, ...]:
        """Return the versions that were rewritten, of those that this manifest holds."""
        made = [replacement for replacement in self.made(manifest) if replacement.rows]
        return tuple(RewrittenVersion(one.old.id, one.new.id, one.new.name, one.new.state, one.rows) for one in made)

    def reworded(self, manifest: DatasetManifest) -> int:
        """Return how many versions only got another document."""
        return sum(not replacement.rows for replacement in self.made(manifest))

    def made(self, manifest: DatasetManifest) -> list[Replacement]:
        """Return the replacements that this manifest holds."""
        documents = {ref.document for ref in manifest.listed}
        return [made for made in self.replacements.values() if made.new.document in documents]

    # -- looking

    def _look_at(self, ref: VersionRef) -> None:
        assert ref.document is not None
        if ref.document in self.clean or ref.document in self.replacements:
            return
        try:
            replacement = self._replacement(ref, self.log.read_version(ref))
        except (DatasetError, ManifestMismatchError) as error:
            if not self._retained(ref):
                return  # discarded meanwhile, with its objects
            if isinstance(error, DatasetError):
                raise
            raise error.reworded(
                f"{error.problem} So it can't be said whether it holds a key, and nothing was erased.",
                f"Restore that object, or give the version up (withdraw, drop and discard {ref.id}), and run the "
                "erasure again.",
                dataset=self.log.name,
                version=ref.id,
            ) from error
        if replacement is None:
            self.clean.add(ref.document)
        else:
            self.replacements[ref.document] = replacement
            self.clean.add(str(replacement.new.document))

    def _retained(self, ref: VersionRef) -> bool:
        manifest = self.log.read()[1]
        return manifest is not None and any(listed.document == ref.document for listed in manifest.listed)

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
        """Return the manifest without the keys; None when there is nothing to do."""
        old = {
            ref.id: self.replacements[str(ref.document)] for ref in manifest.built if ref.document in self.replacements
        }
        after = replaced(manifest, old)
        after = as_bounded(manifest_from(redacted(stored_body(after), self.keys)))
        doomed = [*manifest.doomed, *self.leftovers.garbage]
        doomed += [entry for made in old.values() for entry in (*made.old.folders, str(made.old.document))]
        # The old document of a version that keeps its id is not doomed but deleted: leases are on the id.
        kept = after.reachable() | {str(made.old.document) for made in old.values() if made.new.id == made.old.id}
        doomed = [entry for entry in dict.fromkeys(doomed) if entry not in kept]
        if after == manifest and doomed == list(manifest.doomed):
            return None
        served = old.get(manifest.version.id) if manifest.version else None
        change = Change(action=FORGET, version=served.new.id if served else None, reason=reason)
        return after.after(doomed=tuple(doomed), change=change)

    def _stands(self, manifest: BoundedManifest, made: Replacement) -> bool:
        """Whether nobody has discarded what was rewritten: with a grace period of nothing, a discard may have.

        It dooms before it deletes, in a commit that we have read or that makes ours fail.
        """
        if {*made.new.folders, made.new.document} & set(manifest.doomed):
            return False
        store, (generation,) = self.log.lake.store, made.sealed.generations
        there = {item.key for item in store.list(f"{generation.folder}/")}
        files = {f"{generation.folder}/{file.name}" for file in generation.files}
        return files <= there and store.head(str(made.new.document)) is not None

    def _tidy(self, manifest: BoundedManifest) -> None:
        """Take the builds off record, and delete what was rewritten in vain: its version went meanwhile."""
        store, used = self.log.lake.store, self.made(manifest)
        for replacement in self.replacements.values():
            if replacement not in used:
                store.delete(str(replacement.new.document))
                if replacement.attempt is not None:
                    self.log.drop(replacement.sealed.generations[0])
            if replacement.attempt is not None:
                store.delete(attempt_key(self.log.lake, self.log.name, replacement.attempt.id))


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
        delivered=tuple(done.model_copy(update={"version": renamed(done.version)}) for done in manifest.delivered),
    )


def _moved(now: VersionRef, new: VersionRef) -> VersionRef:
    """Return the new version's entry, in the state that the old one is in by now."""
    kept = {"state": now.state, "reason": now.reason, "verdicts": now.verdicts, "replaced": now.replaced}
    return new.model_copy(update=kept)
