"""A dataset's manifest, and a reader of any of its versions, as they are stored: nothing is held.

A reader from here takes no lease. Whoever may meet a discard holds the version while it reads, as an open `Dataset`
or a batch does, or says what was discarded where a file is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.chosen_version import chosen_version, version_of_batch
from dagster_adjunct.assets.reading.dataset_names import dataset_not_found
from dagster_adjunct.assets.reading.file_cache import FileCache
from dagster_adjunct.assets.reading.no_version import (
    is_delivered,
    nothing_computed,
    nothing_delivered,
    waiting_for,
)
from dagster_adjunct.assets.reading.version_operations import VersionOperations
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.reading.versions_over_time import VersionsOverTime
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import as_bounded
from dagster_adjunct.assets.versions.stored_declaration import check_declaration
from dagster_adjunct.resources.errors import (
    ManifestMismatchError,
    NoSealedVersionError,
)

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.reading.chosen_version import AsOf
    from dagster_adjunct.assets.reading.diff_versions import VersionDiff
    from dagster_adjunct.assets.sources.version_source import Awaiting
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.assets.versions.sealed_version import SealedVersion
    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


class StoredVersions(VersionOperations):
    """The versions of one dataset. Every call reads the pointer anew; readers stay at their version.

    `spec` is the declaration, or only the name of a dataset that exists: what is stored is enough to read it. A
    declaration that differs from the stored one is refused when a manifest is read. Readers keep what they decode in
    `cache`.
    """

    def __init__(self, lake: Lake, spec: AdjunctDataset | str, cache: FileCache | None = None) -> None:
        self.name = spec if isinstance(spec, str) else spec.name
        self.spec = None if isinstance(spec, str) else spec
        self.log = DatasetLog(lake, self.name)
        self._lake = lake
        self._cache = cache or FileCache()

    @property
    def _log(self) -> DatasetLog:
        return self.log

    def _newest(self) -> DatasetManifest:
        return self.require_manifest()

    def manifest(self) -> DatasetManifest | None:
        """Return the newest manifest, None before the first commit. Two requests."""
        return self.read()[1]

    def read(self) -> tuple[Commit | None, DatasetManifest | None]:
        """Return the newest commit and its manifest, (None, None) before the first one."""
        commit, manifest = self.log.read()
        if manifest is not None and self.spec is not None:
            self._check(manifest, self.spec)
        return commit, manifest

    def current(self) -> VersionReader | None:
        """Return the version that is served now, or None while there is none."""
        return self.reader_of(self.manifest())

    def reader_of(self, manifest: DatasetManifest | None) -> VersionReader | None:
        """Return the version that a manifest of this dataset serves."""
        return None if manifest is None or manifest.version is None else self._reader(manifest.version)

    def require_current(self, systems: Mapping[str, StreamSystem] | None = None) -> VersionReader:
        """Return the version that is served now, or raise NoSealedVersionError saying what it waits for.

        With the stream `systems` and a declaration, the error names the partitions without a marker.
        """
        manifest = self.manifest()
        if manifest is not None and manifest.version is not None:
            return self._reader(manifest.version)
        raise self.nothing_served(manifest, systems)

    def nothing_served(
        self, manifest: DatasetManifest | None, systems: Mapping[str, StreamSystem] | None = None
    ) -> NoSealedVersionError:
        """Return the error that says what a dataset without a version to read waits for; see `require_current`."""
        if computed := nothing_computed(self.name, self.spec, manifest):
            return computed
        waiting = None
        if self.spec is not None and systems is not None and is_delivered(self.spec, manifest):
            awaiting = self.awaiting(systems, manifest)
            members = [] if awaiting else self.log.read_all()[1].values()
            waits = [member.awaited for member in members if member.name != self.name and member.awaited]
            others = [marker for awaited in waits for marker in awaited.missing]
            waiting = waiting_for(awaiting, manifest, others)
        return nothing_delivered(self.name, self.spec, manifest, waiting)

    def awaiting(self, systems: Mapping[str, StreamSystem], manifest: DatasetManifest | None) -> Awaiting | None:
        """Return what a bounded dataset's next version waits for, None if one has been delivered whole.

        `manifest` is the dataset's. Builds and commits nothing. Needs the declaration, not only the name.
        """
        from dagster_adjunct.assets.sources.open_source import open_source
        from dagster_adjunct.assets.sources.version_source import Awaiting

        assert self.spec is not None
        source = open_source(systems, self.spec, self._lake)
        known = source.first_manifest() if manifest is None else source.carried_over(manifest) or manifest
        offered = source.next(as_bounded(known))
        return offered if isinstance(offered, Awaiting) else None

    def version(self, version: str | None = None, *, as_of: AsOf | None = None) -> VersionReader:
        """Return a retained version: by its id, the newest of a name, or what was served `as_of` then.

        A withdrawn one is refused. `as_of` is a time with its zone, which stands for the newest commit at or before it,
        by the clocks of those who committed; or a commit, by its number or id. Raises NoSealedVersionError where
        nothing was served then, and VersionDiscardedError (DatasetError for a bounded dataset), naming what is
        retained, where it can't be read any more.
        """
        current, manifest = self.newest()
        sealed = chosen_version(self.log, current, manifest, version, as_of)
        return VersionReader(self._lake.store, self.name, sealed, self._cache)

    def over_time(self, versions: Sequence[str] | None = None) -> VersionReader | VersionsOverTime:
        """Return what reads the dataset over time: its table with history, or the versions that say their time.

        `versions` are ids, as `version` and `versions` of what this returned: an open batch meets exactly what it met
        first. None: the version served, or all that are retained, sealed and not withdrawn. Raises DatasetError
        where no version says its time, and as `version_of_batch`.
        """
        manifest = self.require_manifest()
        retained = manifest.versions_over_time
        if retained is None:
            return self.require_current() if versions is None else self.version_of_batch(versions[0])
        ids = retained if versions is None else versions
        sealed = [version_of_batch(self.log, manifest, version) for version in ids]
        return VersionsOverTime(self._lake.store, self.name, sealed)

    def version_of_batch(self, version: str) -> VersionReader:
        """Return the version of this id that an open batch was begun with, also one that was withdrawn since."""
        return self._reader(version_of_batch(self.log, self.require_manifest(), version))

    def diff(self, old: str, new: str, *, sample: int = 20) -> VersionDiff:
        """Return what differs between two versions, by id or name: counts, and up to `sample` keys of each kind.

        Raises VersionDiscardedError where one is discarded meanwhile: a `Lease` on both keeps that from happening.
        """
        from dagster_adjunct.assets.reading.diff_versions import diff_versions

        views = self.version(old), self.version(new)
        try:
            return diff_versions(*views, sample=sample)
        except ManifestMismatchError:
            manifest = self.require_manifest()
            for view in views:
                manifest.check_kept(view.version)  # which says so, where that is why a file is missing
            raise

    def require_manifest(self) -> DatasetManifest:
        """Return the newest manifest. Raises DatasetNotFoundError before the first commit."""
        return self.newest()[1]

    def newest(self) -> tuple[Commit, DatasetManifest]:
        """Return the newest commit and its manifest. Raises DatasetNotFoundError before the first one."""
        commit, manifest = self.read()
        if commit is None or manifest is None:
            raise dataset_not_found(self._lake, self.name)
        return commit, manifest

    def _reader(self, version: SealedVersion) -> VersionReader:
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


def stored_versions(lake: Lake, name: str) -> StoredVersions:
    """Return the versions of a dataset that exists. Raises DatasetNotFoundError."""
    stored = StoredVersions(lake, name)
    stored.require_manifest()
    return stored
