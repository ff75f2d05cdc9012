"""A dataset in a lake, as readers meet it: its current version, any retained version, and what it is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.assets.declaration.inputs import QuerySource
from dagster_adjunct.assets.reading.file_cache import FileCache
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.choosing import SHORT_ID, require_version
from dagster_adjunct.assets.versions.leases import check_not_doomed
from dagster_adjunct.assets.versions.log import NAMES, DatasetLog, members_of, redirect_of, set_log
from dagster_adjunct.assets.versions.manifest import BoundedManifest, DatasetManifest, UnboundedManifest, as_bounded
from dagster_adjunct.assets.versions.operator_actions import (
    HistoryEntry,
    drop_version,
    force_version,
    pin_version,
    roll_back,
    unpin_version,
    withdraw_version,
)
from dagster_adjunct.assets.versions.sealed_version import SealedVersion, VersionRef, version_number
from dagster_adjunct.assets.versions.stored_manifest import stored_body
from dagster_adjunct.assets.writing.generation import check_declaration
from dagster_adjunct.resources.errors import (
    DatasetError,
    DatasetNotFoundError,
    MalformedDocumentError,
    ManifestMismatchError,
    NoSealedVersionError,
    ObjectNotFoundError,
)
from dagster_adjunct.resources.objects.removal import is_deleted

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.reading.diff import VersionDiff
    from dagster_adjunct.assets.reading.serving import ServedDataset
    from dagster_adjunct.assets.sources.delivery import Awaiting
    from dagster_adjunct.resources.objects.commit import Commit
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.system import StreamSystem


class StoredVersions:
    """The versions of one dataset. Every call reads the pointer anew; views stay what they were.

    A version is one state of the dataset, and has an id. One of a bounded dataset was delivered under a name, too, and
    is asked for by either; a name stands for the newest version of it.

    `spec` is the declaration, or only the name of a dataset that exists: what is stored is enough to read it. A
    declaration that differs from the stored one is refused when a version is opened.
    """

    def __init__(self, lake: Lake, spec: AdjunctDataset | str) -> None:
        self.name = spec if isinstance(spec, str) else spec.name
        self._spec = None if isinstance(spec, str) else spec
        self.log = DatasetLog(lake, self.name)
        self._lake = lake
        self._cache = FileCache()

    def manifest(self) -> DatasetManifest | None:
        """Return the newest manifest, None before the first commit. Two requests."""
        return self.read()[1]

    def read(self) -> tuple[Commit | None, DatasetManifest | None]:
        """Return the newest commit and its manifest, (None, None) before the first one."""
        commit, manifest = self.log.read()
        if manifest is not None and self._spec is not None:
            self._check(manifest, self._spec)
        return commit, manifest

    def open(
        self,
        *,
        version: str | None = None,
        cache: FileCache | None = None,
        lease: bool = True,
        on_damage: Literal["fail", "previous"] | None = None,
        holder: str | None = None,
    ) -> ServedDataset:
        """Return a reader by key in plain Python, of the version served now or, for good, of `version` (an id or name).

        `cache` is this store's unless given. `on_damage` is the declaration's, "fail" where only the name is known.
        See ServedDataset for leases.
        """
        from dagster_adjunct.assets.reading.serving import ServedDataset

        declared = self._spec.on_damage if self._spec is not None else "fail"
        return ServedDataset(
            self, version=version, cache=cache, lease=lease, on_damage=on_damage or declared, holder=holder
        )

    def current(self) -> VersionReader | None:
        """Return the version that is served now, or None while there is none."""
        return self.view_of(self.manifest())

    def view_of(self, manifest: DatasetManifest | None) -> VersionReader | None:
        """Return the version that a manifest of this dataset serves."""
        return None if manifest is None or manifest.version is None else self._view(manifest.version)

    def require_current(self, systems: Mapping[str, StreamSystem] | None = None) -> VersionReader:
        """Return the version that is served now, or raise NoSealedVersionError saying what it waits for.

        With the stream `systems` and a declaration, the error names the partitions without a marker.
        """
        manifest = self.manifest()
        if manifest is not None and manifest.version is not None:
            return self._view(manifest.version)
        if self._is_computed(manifest):
            raise NoSealedVersionError(
                f"dataset {self.name!r} has no version to read yet: {self._computation(manifest)}.",
                f"Materialise {self._to_materialise(manifest)} in Dagster, or run adjunct dataset advance {self.name} "
                f"MODULE:APP{' --partition NAME' if self._by_name(manifest) else ''}.",
                dataset=self.name,
            )
        raise NoSealedVersionError(
            f"dataset {self.name!r} has no version to read yet: {self._awaited(manifest, systems)}.",
            "Deliver what is missing and advance the dataset (materialise its asset, or adjunct run).",
            dataset=self.name,
        )

    def awaiting(self, systems: Mapping[str, StreamSystem]) -> Awaiting | None:
        """Return what a bounded dataset's next version waits for, None if one has been delivered whole.

        Builds and commits nothing. Needs the declaration, not only the name.
        """
        from dagster_adjunct.assets.sources.delivery import Awaiting
        from dagster_adjunct.assets.sources.opening import open_source

        assert self._spec is not None
        source = open_source(systems, self._spec, self._lake)
        manifest = self.manifest()
        found = source.next(source.first_manifest() if manifest is None else as_bounded(manifest))
        return found if isinstance(found, Awaiting) else None

    def version(self, version: str) -> VersionReader:
        """Return any retained version by its id, or the newest of a name; a withdrawn one is refused.

        Raises VersionDiscardedError for a version of an unbounded dataset that can't be read any more.
        """
        manifest = self.require_manifest()
        if manifest.version is not None and manifest.version.id == version:
            return self._view(manifest.version)
        if isinstance(manifest, UnboundedManifest):
            if version_number(version):
                check_not_doomed(manifest, version)
            return self._view(self._committed(manifest, version))
        ref = require_version(manifest, version)
        if ref.state == "withdrawn":
            require_version(manifest, ref.id, sealed=True)  # says why, and what to do
        return self._view(self.log.read_version(ref))

    def as_of(self, when: datetime | None = None, *, commit: int | str | None = None) -> VersionReader:
        """Return what was served at a time (with its zone), or after a commit, by its number or id.

        A time stands for the newest commit at or before it, by the clocks of those who committed. Raises
        NoSealedVersionError where nothing was served then, and VersionDiscardedError (DatasetError for a bounded
        dataset), naming what is retained, where it can't be read any more.
        """
        from dagster_adjunct.assets.reading.time_travel import served_at

        current, manifest = self.read()
        if current is None or manifest is None:
            raise self._not_found()
        served = served_at(self.log, current, manifest, when, commit)
        return self._view(served) if isinstance(manifest, UnboundedManifest) else self.version(served.id)

    def version_of_batch(self, version: str) -> VersionReader:
        """Return the version of this id that an open batch was begun with.

        Also one that was withdrawn since, or that an erasure has rewritten, which is kept as it was until that batch
        has ended: a part of its output may be written already, and the batch could never end with another version.
        """
        try:
            return self.version(version)
        except DatasetError:
            manifest = self.require_manifest()
            if isinstance(manifest, UnboundedManifest):
                return self._view(self._committed(manifest, version))
            withdrawn = manifest.ref(version)
            if withdrawn is not None:
                return self._view(self.log.read_version(withdrawn))
            document = f"{self.log.prefix}/versions/{version}-"
            for entry in manifest.doomed:
                if entry.startswith(document):
                    with suppress(ObjectNotFoundError):
                        return self._view(SealedVersion.model_validate_json(self._lake.store.get(entry).data))
            raise

    def versions(self) -> tuple[VersionRef, ...]:
        """Return all retained versions of a bounded dataset, in the order in which they were made."""
        return self.require_manifest().listed

    def history(self, limit: int | None = 100) -> list[HistoryEntry]:
        """Return the newest commits, newest first: what was done to which version, by whom, when and why.

        Each says what was served after it, and whether that can still be read.
        """
        commits = list(self.log.history(limit))
        now = commits[0][1] if commits else None
        return [
            HistoryEntry(
                number=commit.number,
                at=commit.created_at,
                by=commit.by,
                action=manifest.change.action if manifest.change else "commit",
                version=manifest.change.version if manifest.change else None,
                reason=manifest.change.reason if manifest.change else "",
                served=manifest.version.id if manifest.version else None,
                readable=now is not None and manifest.version is not None and now.retains(manifest.version.id),
            )
            for commit, manifest in commits
        ]

    def diff(self, old: str, new: str, *, sample: int = 20) -> VersionDiff:
        """Return what differs between two versions, by id or name: counts, and up to `sample` keys of each kind.

        Raises VersionDiscardedError where one is discarded meanwhile: a `Lease` on both keeps that from happening.
        """
        from dagster_adjunct.assets.reading.diff import diff_versions

        views = self.version(old), self.version(new)
        try:
            return diff_versions(*views, sample=sample)
        except ManifestMismatchError:
            manifest = self.require_manifest()
            for view in views:
                check_not_doomed(manifest, view.version)  # which says so, where that is why a file is missing
            raise

    # -- what operators do; each is one commit, and for a member of a version set one of the whole set

    def pin(self, version: str, *, reason: str, by: str, expires_at: datetime | None = None) -> DatasetManifest:
        """Serve this version, by id or name, whatever seals meanwhile, until `unpin` or expiry."""
        return pin_version(self.log, version, reason=reason, by=by, expires_at=expires_at)

    def unpin(self, *, reason: str, by: str) -> DatasetManifest:
        """Serve again what the last switch chose."""
        return unpin_version(self.log, reason=reason, by=by)

    def rollback(self, to: str | None = None, *, reason: str, by: str) -> DatasetManifest:
        """Serve an earlier version, by id or name (None: the one before), until the next one seals."""
        return roll_back(self.log, to, reason=reason, by=by)

    def withdraw(self, version: str, *, reason: str, by: str) -> DatasetManifest:
        """Never serve this version, by id or name, again; what was served before it takes its place."""
        return withdraw_version(self.log, version, reason=reason, by=by)

    def force(self, version: str, *, reason: str, by: str, make_current: bool = False) -> DatasetManifest:
        """Publish a rejected version, by id or name, after all; one that is older than what is served beside it.

        `make_current` serves it all the same, as `rollback` to it does later.
        """
        return force_version(self.log, version, reason=reason, by=by, make_current=make_current)

    def drop(self, version: str, *, reason: str, by: str) -> DatasetManifest:
        """Forget a rejected or withdrawn version, by id or name; the next discard deletes its files."""
        return drop_version(self.log, version, reason=reason, by=by)

    def require_manifest(self) -> DatasetManifest:
        """Return the newest manifest. Raises DatasetNotFoundError before the first commit."""
        manifest = self.manifest()
        if manifest is None:
            raise self._not_found()
        return manifest

    def describe(self) -> dict[str, Any]:
        """Return what the dataset is and holds, as JSON-able values. Raises DatasetNotFoundError."""
        manifest = self.require_manifest()
        hidden = {"format", "version", "delivered", "known", "next_generation", "next_number", "doomed"}
        described = {name: value for name, value in stored_body(manifest).items() if name not in hidden}
        version = manifest.version
        described["version"] = None
        if version is not None:
            described["version"] = {
                **version.model_dump(mode="json", exclude={"generations", "digest", "positioned"}),
                "stored_rows": version.stored_rows,
                "bytes": sum(generation.size for generation in version.generations),
                "files": sum(len(generation.files) for generation in version.generations),
                "generations": len(version.generations),
            }
        return described

    def _view(self, version: SealedVersion) -> VersionReader:
        return VersionReader(self._lake.store, self.name, version, self._cache)

    def _check(self, manifest: DatasetManifest, spec: AdjunctDataset) -> None:
        """Compare what a specification says by itself; the stream's types and partitions stay as stored."""
        declared = manifest.declaration.model_copy(
            update={
                "kind": spec.kind,
                "input": str(spec.input),
                "key": spec.key,
                "partition_by": spec.partition_by,
                "partitions": spec.partitions,
            }
        )
        check_declaration(self.name, manifest.declaration, declared)

    def _committed(self, manifest: UnboundedManifest, version: str) -> SealedVersion:
        """Return an unbounded dataset's version, whose number is that of the commit that holds it."""
        number, dash, commit_id = version.removeprefix("v").partition("-")
        found = self._begun(manifest, version) if SHORT_ID.fullmatch(version) else None
        if found is not None:
            return found
        if dash and number.isdecimal() and commit_id:
            with suppress(ObjectNotFoundError, MalformedDocumentError):
                found = self.log.read_at(int(number), commit_id).version
        if found is None or found.id != version:
            current = manifest.version.id if manifest.version else "none"
            raise DatasetError(
                f"dataset {self.name!r} has no version {version!r}; the current one is {current}, and those from "
                f"number {manifest.retained_from} on can be read.",
                f"See adjunct dataset history {self.name}.",
                dataset=self.name,
                version=version,
            )
        return found

    def _begun(self, manifest: UnboundedManifest, version: str) -> SealedVersion | None:
        """Return an unbounded dataset's version by the beginning of its id; its number is that of a commit."""
        from dagster_adjunct.assets.reading.time_travel import served_at

        number, current = version_number(version), self.read()[0]
        if current is None or not manifest.retained_from <= number <= current.number:
            return None
        with suppress(DatasetError):  # nothing was served after that commit
            found = served_at(self.log, current, manifest, None, number)
            return found if found.id.startswith(version) else None
        return None

    def _awaited(self, manifest: DatasetManifest | None, systems: Mapping[str, StreamSystem] | None) -> str:
        declared = self._spec.kind if self._spec is not None and manifest is None else "bounded"
        if isinstance(manifest, UnboundedManifest) or declared == "unbounded":
            return "its bootstrap is not finished"
        refs = manifest.versions if manifest is not None else ()
        if any(ref.state == "withdrawn" for ref in refs):
            return "all that were sealed are withdrawn"
        rejected = [ref for ref in refs if ref.state == "rejected"]
        refused = f"; version {rejected[-1].name!r} was rejected ({rejected[-1].reason})" if rejected else ""
        if self._spec is None or systems is None:
            source = manifest.declaration.input if manifest else self._spec.input if self._spec else "its input"
            return f"no version has been marked as complete in every partition of {source} and sealed{refused}"
        found = self.awaiting(systems)
        if found is None:
            members = [each for each in self.log.read_all()[1].values() if isinstance(each, BoundedManifest)]
            others = [member.awaited for member in members if member.awaited and member.name != self.name]
            missing = ", ".join(marker for awaited in others for marker in awaited.missing)
            lacks = (
                f", and other members of its version set wait for the end-of-dataset markers of {missing}"
                if missing
                else ""
            )
            return f"one is delivered whole and not sealed yet{lacks}{refused}"
        name = f"version {found.version!r}" if found.version else "the first version"
        since = f" since {manifest.awaited.since:%Y-%m-%d %H:%M} UTC" if manifest and manifest.awaited else ""
        return f"{name} waits{since} for the end-of-dataset markers of {', '.join(found.missing)}{refused}"

    def _is_computed(self, manifest: DatasetManifest | None) -> bool:
        """Whether the versions are answers to a query, which waits for nobody's delivery."""
        if self._spec is not None:
            return isinstance(self._spec.input, QuerySource)
        return manifest is not None and manifest.declaration.input.startswith("query ")

    def _by_name(self, manifest: DatasetManifest | None) -> bool:
        """Whether versions are partitions."""
        if self._spec is not None:
            return self._spec.versions is not None
        return manifest is not None and manifest.declaration.order == "name"

    def _computation(self, manifest: DatasetManifest | None) -> str:
        refs = manifest.listed if manifest is not None else ()
        refused = [ref for ref in refs if ref.state == "rejected"]
        if any(ref.state == "withdrawn" for ref in refs):
            return "all that were sealed are withdrawn"
        if refused:
            return f"version {refused[-1].name!r} was rejected ({refused[-1].reason})"
        if self._by_name(manifest):
            return "it is computed by a query for each of its partitions, and none has been asked for"
        return "it is computed by a query, which has not been asked yet"

    def _to_materialise(self, manifest: DatasetManifest | None) -> str:
        versions = self._spec.versions if self._spec is not None else None
        if versions is not None and versions.start is not None:
            return f"the partition of a day of its asset ({versions.start} is the first)"
        if versions is not None and versions.names:
            return f"one of the partitions of its asset ({', '.join(versions.names[:5])}, …)"
        return "a partition of its asset" if self._by_name(manifest) else "its asset"

    def _not_found(self) -> DatasetNotFoundError:
        known = ", ".join(list_datasets(self._lake)) or "none"
        return DatasetNotFoundError(
            f"there is no dataset {self.name!r} in {self._lake.url}; there are: {known}.",
            "Check the name and the lake, or advance the dataset a first time.",
            dataset=self.name,
        )


def open_dataset(lake: Lake, name: str) -> StoredVersions:
    """Return a dataset that exists, from what is stored of it alone. Raises DatasetNotFoundError."""
    store = StoredVersions(lake, name)
    if store.manifest() is None:
        raise store._not_found()
    return store


def list_datasets(lake: Lake) -> list[str]:
    """Return the names of all datasets that have a commit, sorted; not members of a set that never advanced.

    Manifests are not looked into: a dataset whose commit can't be read is listed, and says so when it is opened.
    """
    names = [item.key.rsplit("/", 1)[-1] for item in lake.store.list(f"{NAMES}/")]
    return sorted(name for name in names if _has_commit(lake, name))


def _has_commit(lake: Lake, name: str) -> bool:
    """Whether a dataset has a manifest, of its own or in its version set, whatever is in it."""
    try:
        own = DatasetLog(lake, name).log.current()
        set_name = redirect_of(own) if own is not None else None
        if own is None or set_name is None:
            return own is not None and not is_deleted(own)
        shared = set_log(lake, set_name).current()
        members = members_of(shared) if shared is not None else {}
        return members.get(name, own.body.get("manifest")) is not None
    except MalformedDocumentError:
        return True
