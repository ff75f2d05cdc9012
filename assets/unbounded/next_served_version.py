"""Versions of a table: what a commit serves once its generations have changed, and what it retires."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.kept_history import current_rows
from dagster_adjunct.assets.versions.sealed_version import SealedVersion, layout_of, table_version, version_id
from dagster_adjunct.assets.versions.stored_declaration import kept_history
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.assets.versions.unbounded_state import Retired

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.opened_stream import Source
    from dagster_adjunct.assets.unbounded.commit_table import Advance
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.assets.versions.kept_history import KeptHistory
    from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout, Generation
    from dagster_adjunct.resources.objects.commit_log import Commit

FOOTERS = 256 * 1024
"""More bytes of footers than these are left out of a commit: every one after it would repeat them."""


def with_version(
    advance: Advance,
    parent: Commit | None,
    manifest: UnboundedManifest,
    attempt: Attempt,
    generations: tuple[Generation, ...],
    counters: Mapping[str, int],
) -> UnboundedManifest:
    """Return the manifest serving a version of these generations, read as far as its offsets; retires what it replaces.

    `parent` is the commit before the one that makes the version.
    """
    number, spec, now = (parent.number if parent else 0) + 1, advance.spec, advance.context.now()
    version = table_version(
        spec,
        advance.source.schema,
        generations,
        id=version_id(number, attempt.id),
        number=number,
        now=now,
        rows=_entries(spec, generations),
        offsets={ssp: (manifest.bootstrap.start[ssp], end) for ssp, end in manifest.offsets.items()},
        counters=counters,
        history=_history(spec, manifest, generations),
        position_type=advance.source.position_type,
    )
    return retire(manifest, version, now)


def retire(manifest: UnboundedManifest, version: SealedVersion, now: datetime) -> UnboundedManifest:
    """Return the manifest serving `version`; what only earlier versions read stays for these until it is discarded."""
    before = manifest.version.generations if manifest.version else ()
    needed = {generation.folder for generation in version.generations}
    gone = [generation for generation in before if generation.folder not in needed and generation.files]
    retired = [
        Retired(generation=generation.id, folder=generation.folder, until=version.number, at=now) for generation in gone
    ]
    return manifest.after(version=version, retired=(*manifest.retired, *retired))


def without_large_footers(generation: Generation) -> Generation:
    """Return a generation as commits keep it."""
    return generation.without_footers() if generation.footer_size > FOOTERS else generation


def table_layout(source: Source) -> BucketLayout:
    """Return how the rows of a table lie in files, by its declaration of now."""
    spec = source.spec
    over_time = spec.following.history is not None
    schema = source.schema.with_sensitive(*(name for name in spec.sensitive if name in source.schema))
    return layout_of(
        schema,
        spec.key,
        spec.partition_by,
        spec.partitions,
        positioned=True,
        over_time=over_time,
        position_type=source.position_type,
    )


def _entries(spec: AdjunctDataset, generations: tuple[Generation, ...]) -> int | None:
    """Return how many entries these generations come to, None where they have to be merged to know."""
    if len(generations) > 1:
        return None
    if spec.following.history is not None:
        return current_rows(generations[0])
    deleted = any(file.stats.get("tombstones") for file in generations[0].files)
    return None if deleted else generations[0].rows


def _history(
    spec: AdjunctDataset, manifest: UnboundedManifest, generations: tuple[Generation, ...]
) -> KeptHistory | None:
    """Return the history as declared, with what was pruned of the rows that are still served."""
    history, before = kept_history(spec), manifest.version
    if history is None or before is None or before.history is None:
        return history
    served = {generation.folder for generation in before.generations}
    goes_on = any(generation.folder in served for generation in generations)
    return history.after(pruned=before.history.pruned) if goes_on else history
