"""The manifest of a local table: how it begins, what it serves, and which columns it may have. Values alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.inputs_besides_streams import OwnedBy
from dagster_adjunct.assets.versions.manifest import as_unbounded
from dagster_adjunct.assets.versions.sealed_version import SealedVersion, table_version, version_id
from dagster_adjunct.assets.versions.stored_declaration import check_declaration, declaration_of
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.assets.versions.unbounded_state import Bootstrap
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.schemas.evolution import refused_changes
from dagster_adjunct.resources.times import microseconds

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.assets.versions.unbounded_state import SentToTable
    from dagster_adjunct.resources.bucketing.bucket_files import Generation
    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class Parent:
    """What is current of a table: its commit, and its manifest; None before the first."""

    commit: Commit | None
    manifest: UnboundedManifest | None

    @property
    def number(self) -> int:
        """The number of the commit, 0 before the first."""
        return 0 if self.commit is None else self.commit.number

    @property
    def next_generation(self) -> int:
        """The number that the next generation has."""
        return 1 if self.manifest is None else self.manifest.next_generation


def schema_of(spec: AdjunctDataset) -> Schema:
    """Return the columns that a local table is declared with."""
    assert isinstance(spec.input, OwnedBy), "other datasets have the columns of their input"
    return spec.input.schema


def expires_of(spec: AdjunctDataset) -> str | None:
    """Return the column that says when a row of a table of state is gone; None for other tables."""
    return spec.input.expires if isinstance(spec.input, OwnedBy) else None


def has_expired(generation: Generation, watermark: datetime | None) -> bool:
    """Whether all rows of a generation of state are gone at this watermark; not where a file does not tell."""
    if watermark is None or not generation.files:
        return False
    reached = microseconds(watermark)
    return all("range" in file.stats and file.stats["range"][1] <= reached for file in generation.files)


def first_manifest(spec: AdjunctDataset, now: datetime) -> UnboundedManifest:
    """Return the manifest of a table that has nothing yet, and serves nothing."""
    return UnboundedManifest(
        name=spec.name,
        declaration=declaration_of(spec, schema_of(spec)),
        offsets={},
        bootstrap=Bootstrap(state="done", start={}, target={}, started_at=now, finished_at=now),
    )


def empty_table(spec: AdjunctDataset, attempt: Attempt, number: int, now: datetime) -> UnboundedManifest:
    """Return the manifest of a table that serves a version without rows, with the commit of this number."""
    manifest = first_manifest(spec, now)
    rows = [attempt.generation(manifest.next_generation)]
    version = serving(spec, rows, number=number, id=version_id(number, attempt.id), now=now, counters={})
    return manifest.after(next_generation=manifest.next_generation + 1, version=version)


def serving(
    spec: AdjunctDataset,
    generations: Sequence[Generation],
    *,
    number: int,
    id: str,
    now: datetime,
    counters: Mapping[str, int],
) -> SealedVersion:
    """Return the version of these generations, oldest first, with the columns that are declared now."""
    exact = len(generations) == 1 and not keeps_deletions(generations[0])
    rows = generations[0].rows if exact else None
    return table_version(
        spec, schema_of(spec), generations, id=id, number=number, now=now, rows=rows, offsets={}, counters=counters
    )


def keeps_deletions(generation: Generation) -> int:
    """Return how many of a generation's rows are deletions, which are no entries."""
    return sum(int(file.stats.get("tombstones", 0)) for file in generation.files)


def counted(sends: Sequence[SentToTable]) -> dict[str, int]:
    """Return what these sends add to a table's counters."""
    return {"changes": sum(sent.rows for sent in sends), "deleted": sum(sent.deleted for sent in sends)}


def as_local(stored: DatasetManifest, spec: AdjunctDataset) -> UnboundedManifest:
    """Return what is stored, as the manifest of the local table that is declared.

    Raises DatasetError for what can't be gone on with under this declaration, saying what differs: columns can only be
    added, or widened; and for a dataset of this name that another application, or none, has.
    """
    columns = schema_of(spec)
    declared = declaration_of(spec, columns)
    if stored.declaration.owner != declared.owner:
        raise DatasetError(
            f"application {declared.owner} can't have a local table {spec.name!r}: the lake has a dataset of that "
            f"name, which is of {stored.declaration.input}.",
            "Give this local table another name.",
            dataset=spec.name,
        )
    check_declaration(spec.name, stored.declaration, declared)
    served = stored.version
    refused = [] if served is None else refused_changes(served.columns, columns, spec.key)
    if refused:
        raise DatasetError(
            f"local table {spec.name!r} has other columns than are declared: {'; '.join(refused)}. Columns can only be "
            "added, or widened.",
            "Declare them as they were, or declare a table of another name; to begin this one anew: adjunct dataset "
            f"delete {spec.name} --reason ….",
            dataset=spec.name,
        )
    return as_unbounded(stored)
