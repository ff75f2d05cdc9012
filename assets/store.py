"""A dataset in a lake, as readers meet it: its current version, any retained version, and what it is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from assets.build import NAMES, DatasetLog, check_declaration
from assets.lookup import FileCache
from assets.manifest import DatasetManifest, SealedVersion
from assets.view import DatasetView
from resources.errors import (
    DatasetError,
    DatasetNotFoundError,
    MalformedDocumentError,
    NoSealedVersionError,
    ObjectNotFoundError,
)

if TYPE_CHECKING:
    from assets.dataset import AdjunctDataset
    from resources.objects.lake import Lake
    from resources.streams.system import StreamSystem


class DatasetStore:
    """The versions of one dataset. Every call reads the pointer anew; views stay what they were.

    `spec` is the declaration, or only the name of a dataset that exists: what is stored is enough to read it. A
    declaration that differs from the stored one is refused when a version is opened.
    """

    def __init__(self, lake: Lake, spec: AdjunctDataset | str) -> None:
        self.name = spec if isinstance(spec, str) else spec.name
        self._spec = None if isinstance(spec, str) else spec
        self._log = DatasetLog(lake, self.name)
        self._lake = lake
        self._cache = FileCache()

    def manifest(self) -> DatasetManifest | None:
        """Return the newest manifest, None before the first commit. Two requests."""
        manifest = self._log.read()[1]
        if manifest is not None and self._spec is not None:
            self._check(manifest, self._spec)
        return manifest

    def current(self) -> DatasetView | None:
        """Return the version that is served now, or None while there is none."""
        manifest = self.manifest()
        return None if manifest is None or manifest.version is None else self._view(manifest.version)

    def require_current(self, systems: Mapping[str, StreamSystem] | None = None) -> DatasetView:
        """Return the version that is served now, or raise NoSealedVersionError saying what it waits for.

        With the stream `systems` and a declaration, the error names the partitions without a marker.
        """
        manifest = self.manifest()
        if manifest is not None and manifest.version is not None:
            return self._view(manifest.version)
        raise NoSealedVersionError(
            f"dataset {self.name!r} has no version to read yet: {self._awaited(manifest, systems)}.",
            "Deliver what is missing and advance the dataset (materialise its asset, or adjunct run).",
        )

    def version(self, version_id: str) -> DatasetView:
        """Return any retained version by its id, current or not."""
        manifest = self.manifest()
        if manifest is None:
            raise self._not_found()
        if manifest.version is not None and manifest.version.id == version_id:
            return self._view(manifest.version)
        place = _commit_of(manifest, version_id)
        found = None
        if place is not None:
            with suppress(ObjectNotFoundError, MalformedDocumentError):
                found = self._log.read_at(*place).version
        if found is None or found.id != version_id:
            listed = ", ".join(ref.id for ref in manifest.versions[-3:])
            current = manifest.version.id if manifest.version else "none"
            raise DatasetError(
                f"dataset {self.name!r} has no version {version_id!r}; the current one is {current}"
                f"{f', the newest are {listed}' if listed else ''}.",
                f"See adjunct dataset show {self.name}.",
            )
        return self._view(found)

    def describe(self) -> dict[str, Any]:
        """Return what the dataset is and holds, as JSON-able values. Raises DatasetNotFoundError."""
        manifest = self.manifest()
        if manifest is None:
            raise self._not_found()
        described = manifest.model_dump(mode="json", exclude={"format", "version", "delivered", "next_generation"})
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

    def _view(self, version: SealedVersion) -> DatasetView:
        return DatasetView(self._lake.store, self.name, version, self._cache)

    def _check(self, manifest: DatasetManifest, spec: AdjunctDataset) -> None:
        """Compare what a specification says by itself; the stream's types and partitions stay as stored."""
        declared = manifest.declaration.model_copy(
            update={
                "kind": spec.kind,
                "input": spec.input,
                "key": spec.key,
                "partition_by": spec.partition_by,
                "partitions": spec.partitions,
            }
        )
        check_declaration(self.name, manifest.declaration, declared)

    def _awaited(self, manifest: DatasetManifest | None, systems: Mapping[str, StreamSystem] | None) -> str:
        kind = manifest.declaration.kind if manifest is not None else self._spec.kind if self._spec else None
        if kind == "unbounded":
            return "its bootstrap is not finished"
        if self._spec is None or systems is None:
            source = manifest.declaration.input if manifest else self._spec.input if self._spec else "its input"
            return f"no version has been marked as complete in every partition of {source} and sealed"
        from assets.bounded import waiting_for

        found = waiting_for(systems, self._spec, manifest)
        if not found.missing:
            return "one is delivered whole and not sealed yet"
        name = f"version {found.version!r}" if found.version else "the first version"
        return f"{name} waits for the end-of-dataset markers of {', '.join(map(str, found.missing))}"

    def _not_found(self) -> DatasetNotFoundError:
        known = ", ".join(list_datasets(self._lake)) or "none"
        return DatasetNotFoundError(
            f"there is no dataset {self.name!r} in {self._lake.url}; there are: {known}.",
            "Check the name and the lake, or advance the dataset a first time.",
        )


def open_dataset(lake: Lake, name: str) -> DatasetStore:
    """Return a dataset that exists, from what is stored of it alone. Raises DatasetNotFoundError."""
    store = DatasetStore(lake, name)
    if store.manifest() is None:
        raise store._not_found()
    return store


def list_datasets(lake: Lake) -> list[str]:
    """Return the names of all datasets that have a commit, sorted."""
    names = [item.key.rsplit("/", 1)[-1] for item in lake.store.list(f"{NAMES}/")]
    return sorted(name for name in names if lake.store.head(DatasetLog(lake, name).log.pointer_key))


def _commit_of(manifest: DatasetManifest, version_id: str) -> tuple[int, str] | None:
    """Return (commit number, commit id) of a version; an unbounded version's number is its commit's."""
    for ref in manifest.versions:
        if ref.id == version_id:
            return ref.commit_number, ref.commit
    number, dash, commit_id = version_id.removeprefix("v").partition("-")
    if manifest.declaration.kind == "unbounded" and dash and number.isdecimal() and commit_id:
        return int(number), commit_id
    return None
