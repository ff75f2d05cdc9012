"""Which stored version somebody means, of a dataset's newest manifest: by id, by the beginning of one, or by name."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.time_travel import served_at
from dagster_adjunct.assets.versions.choose_version import SHORT_ID, readable_version
from dagster_adjunct.assets.versions.leases import check_not_doomed
from dagster_adjunct.assets.versions.manifest import UnboundedManifest
from dagster_adjunct.assets.versions.sealed_version import SealedVersion, version_number
from dagster_adjunct.resources.errors import DatasetError, MalformedDocumentError, ObjectNotFoundError

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.dataset_log import DatasetLog
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.resources.objects.commit_log import Commit


def chosen_version(log: DatasetLog, current: Commit, manifest: DatasetManifest, version: str) -> SealedVersion:
    """Return any retained version by its id, or the newest of a name; `manifest` is that of the `current` commit.

    Raises DatasetError where it is not there or withdrawn, and VersionDiscardedError for a version of an unbounded
    dataset that can't be read any more.
    """
    if manifest.version is not None and manifest.version.id == version:
        return manifest.version
    if not isinstance(manifest, UnboundedManifest):
        return log.read_version(readable_version(manifest, version))
    if version_number(version):
        check_not_doomed(manifest, version)
    return committed_version(log, current, manifest, version)


def committed_version(log: DatasetLog, current: Commit, manifest: UnboundedManifest, version: str) -> SealedVersion:
    """Return an unbounded dataset's version, whose number is that of the commit that holds it."""
    number, dash, commit_id = version.removeprefix("v").partition("-")
    sealed = _begun(log, current, manifest, version) if SHORT_ID.fullmatch(version) else None
    if sealed is not None:
        return sealed
    if dash and number.isdecimal() and commit_id:
        with suppress(ObjectNotFoundError, MalformedDocumentError):
            sealed = log.read_at(int(number), commit_id).version
    if sealed is None or sealed.id != version:
        newest = manifest.version.id if manifest.version else "none"
        raise DatasetError(
            f"dataset {log.name!r} has no version {version!r}; the current one is {newest}, and those from "
            f"number {manifest.retained_from} on can be read.",
            f"See adjunct dataset history {log.name}.",
            dataset=log.name,
            version=version,
        )
    return sealed


def _begun(log: DatasetLog, current: Commit, manifest: UnboundedManifest, version: str) -> SealedVersion | None:
    """Return an unbounded dataset's version by the beginning of its id; its number is that of a commit."""
    number = version_number(version)
    if not manifest.retained_from <= number <= current.number:
        return None
    with suppress(DatasetError):  # nothing was served after that commit
        sealed = served_at(log, current, manifest, number)
        return sealed if sealed.id.startswith(version) else None
    return None
