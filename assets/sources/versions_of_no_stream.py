"""What sources of versions have in common whose input is no stream: files, and queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.sources.entries_of_records import schema_of_entries
from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
from dagster_adjunct.assets.versions.manifest import taken_up
from dagster_adjunct.assets.versions.stored_declaration import declaration_of

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.assets.versions.stored_declaration import DatasetDeclaration
    from dagster_adjunct.resources.schemas.schema import Schema


class VersionsOfNoStream:
    """The dataset that versions are made for, and what follows from it: no partitions and no offsets to begin with."""

    def __init__(self, spec: AdjunctDataset, records: Schema) -> None:
        self._spec, self._schema = spec, schema_of_entries(spec, records)

    @property
    def spec(self) -> AdjunctDataset:
        return self._spec

    @property
    def schema(self) -> Schema:
        return self._schema

    @property
    def declaration(self) -> DatasetDeclaration:
        return declaration_of(self._spec, self._schema)

    @property
    def copartitioned(self) -> bool:
        return False

    def first_manifest(self) -> BoundedManifest:
        return BoundedManifest(name=self._spec.name, declaration=self.declaration, offsets={})

    def carried_over(self, stored: DatasetManifest) -> None:
        return None

    def taken_up(self, stored: DatasetManifest) -> BoundedManifest:
        return taken_up(stored, self.declaration)
