"""What a dataset's commit holds: its declaration, its current version, how far its input was read.

The body of each commit below `datasets/<name>` is one manifest. Offsets stand in the same document as the version
that was made from them, so there is no second place to disagree with. It is a `BoundedManifest` or an
`UnboundedManifest`: what only the one kind has is in that, and which of them it is says the kind. What is asked of
either is an attribute of both, with the answer of its kind; this file is for who handles one of them alone.
"""

from __future__ import annotations

from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
from dagster_adjunct.assets.versions.stored_declaration import DatasetDeclaration, check_declaration
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.resources.errors import DatasetError

KIND = "dataset"

DatasetManifest = BoundedManifest | UnboundedManifest
MANIFEST_OF: dict[str, type[BoundedManifest] | type[UnboundedManifest]] = {
    BoundedManifest.kind: BoundedManifest,
    UnboundedManifest.kind: UnboundedManifest,
}


def as_bounded(manifest: DatasetManifest) -> BoundedManifest:
    """Return the manifest of a dataset that arrives in versions. Raises DatasetError for one that has none."""
    if not isinstance(manifest, BoundedManifest):
        raise DatasetError(
            f"dataset {manifest.name!r} follows a change stream: it has one table, and no versions that are delivered.",
            f"Its commits are versions of the table: adjunct dataset history {manifest.name}.",
            dataset=manifest.name,
        )
    return manifest


def taken_up(stored: DatasetManifest, declared: DatasetDeclaration) -> BoundedManifest:
    """Return a stored manifest with order and policy as they are declared now; DatasetError where more was changed."""
    check_declaration(stored.name, stored.declaration, declared)
    return as_bounded(stored).declared_as(declared)


def as_unbounded(manifest: DatasetManifest) -> UnboundedManifest:
    """Return the manifest of a dataset that follows a change stream. Raises DatasetError for one that does not."""
    if not isinstance(manifest, UnboundedManifest):
        raise DatasetError(
            f"dataset {manifest.name!r} arrives in versions: it follows no change stream, and has no table.",
            f"See adjunct dataset versions {manifest.name}.",
            dataset=manifest.name,
        )
    return manifest


def follower(manifest: DatasetManifest) -> UnboundedManifest | None:
    """Return the manifest of a table that follows a stream, and may be behind it; None for all else."""
    if isinstance(manifest, UnboundedManifest) and manifest.declaration.owner is None:
        return manifest
    return None
