"""Errors for datasets that have no version to read, saying what the next version waits for."""

from __future__ import annotations

from collections.abc import Sequence

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, QuerySource
from dagster_adjunct.assets.sources.deliveries import Awaiting
from dagster_adjunct.assets.versions.manifest import DatasetManifest
from dagster_adjunct.resources.errors import NoSealedVersionError


def is_delivered(spec: AdjunctDataset | None, manifest: DatasetManifest | None) -> bool:
    """Whether this dataset's versions are delivered, and none was revoked."""
    revoked = manifest is not None and any(ref.state == "revoked" for ref in manifest.listed)
    return not (revoked or _follows_changes(spec, manifest) or _is_computed(spec, manifest))


def no_version_error(
    name: str, spec: AdjunctDataset | None, manifest: DatasetManifest | None, waiting: str | None = None
) -> NoSealedVersionError:
    """Return the error for a dataset without a version; `waiting` describes what a delivered one waits for."""
    by_name, step = False, "Deliver what is missing and advance the dataset (materialise its asset, or adjunct run)."
    if _is_computed(spec, manifest):
        # Whether versions are partitions of the asset.
        by_name = spec.versions is not None if spec else bool(manifest and manifest.declaration.order == "name")
        step = f"Materialise {_describe_partitions(spec, by_name)} in Dagster, or run adjunct dataset advance {name} "
        step += f"MODULE:APP{' --partition NAME' if by_name else ''}."
    cause = _describe_cause(spec, manifest, waiting, by_name)
    return NoSealedVersionError(f"dataset {name!r} has no version to read yet: {cause}.", step, dataset=name)


def no_complete_version_error(
    spec: AdjunctDataset, manifest: DatasetManifest | None, awaiting: Awaiting
) -> NoSealedVersionError:
    """Return the error for a declared dataset without a complete version, which waits for `awaiting`."""
    waiting = describe_waiting(awaiting, manifest) if is_delivered(spec, manifest) else None
    return no_version_error(spec.name, spec, manifest, waiting)


def describe_waiting(awaiting: Awaiting | None, manifest: DatasetManifest | None, others: Sequence[str] = ()) -> str:
    """Return a description of what the next version waits for; with None it is completely delivered.

    `others` are the markers that the other members of its version set wait for.
    """
    if awaiting is None:
        lacks = f", and other members of its version set wait for the end-of-dataset markers of {', '.join(others)}"
        return f"one is completely delivered and not sealed yet{lacks if others else ''}"
    version = f"version {awaiting.version!r}" if awaiting.version else "the first version"
    begun = manifest.awaited if manifest is not None else None
    since = f" since {begun.since:%Y-%m-%d %H:%M} UTC" if begun else ""
    return f"{version} waits{since} for the end-of-dataset markers of {', '.join(awaiting.missing)}"


def _describe_cause(
    spec: AdjunctDataset | None, manifest: DatasetManifest | None, waiting: str | None, by_name: bool
) -> str:
    is_computed = _is_computed(spec, manifest)
    if not is_computed:
        if (spec is not None and spec.is_local) or (manifest is not None and manifest.declaration.owner is not None):
            return "no batch of its application has written it"
        if _follows_changes(spec, manifest):
            return "its bootstrap is not finished"
    refs = manifest.listed if manifest is not None else ()
    if any(ref.state == "revoked" for ref in refs):
        return "all that were sealed are revoked"
    rejected = next((ref for ref in reversed(refs) if ref.state == "rejected"), None)
    refused = f"version {rejected.name!r} was rejected ({rejected.reason})" if rejected else ""
    if not is_computed:
        source = manifest.declaration.input if manifest else spec.input if spec else "its input"
        waiting = waiting or f"no version has been marked as complete in every partition of {source} and sealed"
        return "; ".join(filter(None, (waiting, refused)))
    if by_name:
        return refused or "a query computes each of its partitions, and none has been materialised"
    return refused or "a query computes it, and has not run yet"


def _follows_changes(spec: AdjunctDataset | None, manifest: DatasetManifest | None) -> bool:
    """Whether the dataset follows a change stream."""
    return manifest.versions_are_commits if manifest else spec is not None and spec.follows_changes


def _is_computed(spec: AdjunctDataset | None, manifest: DatasetManifest | None) -> bool:
    """Whether a query computes the versions."""
    return isinstance(spec.input, QuerySource) if spec else manifest is not None and manifest.declaration.computed


def _describe_partitions(spec: AdjunctDataset | None, by_name: bool) -> str:
    versions = spec.versions if spec is not None else None
    if versions is not None and versions.start is not None:
        return f"the partition of a day of its asset ({versions.start} is the first)"
    if versions is not None and versions.names:
        return f"one of the partitions of its asset ({', '.join(versions.names[:5])}, …)"
    return "a partition of its asset" if by_name else "its asset"
