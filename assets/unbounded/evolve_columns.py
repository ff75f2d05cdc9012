"""How the columns of an unbounded dataset may change without building it anew.

Rows that are there are not written again: what is added is null in them, what is widened is cast when they are read,
by Spark and by key. The next major compaction writes them in the new columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.committing import commit_manifest
from dagster_adjunct.assets.unbounded.served_version import with_version
from dagster_adjunct.assets.versions.manifest import Change
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.schemas.evolution import refused_changes

if TYPE_CHECKING:
    from dagster_adjunct.assets.unbounded.committing import Advance, Progress
    from dagster_adjunct.resources.schemas.schema import Schema


def check_evolution(dataset: str, stored: Schema, declared: Schema, key: tuple[str, ...]) -> None:
    """Refuse columns that the stored rows can't be read with: only added and widened ones can, and no key's.

    Raises DatasetError with the differences.
    """
    refused = refused_changes(stored, declared, key)
    if refused:
        raise DatasetError(
            f"dataset {dataset!r} holds other columns than are declared now: {'; '.join(refused)}. Columns can only be "
            "added, or widened.",
            f"Restore these columns, or build it anew with the new ones: adjunct dataset rebuild {dataset} MODULE:APP "
            "--reason …; the old table is served until that is done.",
            dataset=dataset,
        )


def evolve(advance: Advance, progress: Progress) -> Progress:
    """Commit that the columns are served that are declared now; the rows there stay as they are."""
    manifest, version, source = progress.manifest, progress.manifest.version, advance.source
    assert version is not None, "there is nothing whose columns could change"
    attempt = advance.log.attempt()
    after = manifest.after(
        declaration=source.declaration,
        decision=advance.decision,
        change=Change(action="evolve", reason=version.columns.difference(source.schema)),
    )
    after = with_version(advance, progress.commit, after, attempt, version.generations, version.counters)
    return commit_manifest(advance, progress, after, commit_id=attempt.id)
