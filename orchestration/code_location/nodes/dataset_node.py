"""Datasets as assets: what their declarations say of them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dagster import AssetKey, FreshnessPolicy

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.nodes.asset_subject import AssetSubject
from dagster_adjunct.orchestration.code_location.nodes.node_kind import NodeKind, Outputs
from dagster_adjunct.orchestration.code_location.shared.asset_metadata import (
    column_schema,
    declared_metadata,
    served_metadata,
)
from dagster_adjunct.orchestration.code_location.shared.row_preview import dataset_preview
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.column_lineage import Made
    from dagster_adjunct.resources.declared_place import Place

VERSION = "adjunct/data_version"
"""Where the metadata of an output names the data version of its own; it is taken out before it is shown."""
_SHORTEST_WINDOW = timedelta(minutes=1)


class DatasetNode(NodeKind):
    """A dataset that an application declares."""

    kind = "dataset"

    def asset_key(self, subject: AssetSubject) -> AssetKey:
        return AssetKey(["datasets", f"{dagster_name(subject.name)}_dataset"])

    def dagster_kinds(self, subject: AssetSubject) -> set[str]:
        return {"spark", "parquet"}

    def subject(self, app: Application, name: str) -> AssetSubject:
        dataset = app.dataset(name)
        owners = dataset.owners or app.owners
        return AssetSubject(self.kind, name, app.name, dataset.description, owners, dataset.group)

    def declared_metadata(self, app: Application, name: str) -> dict[str, Any]:
        return declared_metadata(app.dataset(name))

    def declared_at(self, app: Application, name: str) -> Place | None:
        return app.dataset(name).declared_at

    def output_metadata(self, outputs: Outputs, name: str, columns: Made) -> dict[str, Any]:
        """Return what a local table holds, with the version that its materialisation has under VERSION."""
        from dagster_adjunct.assets.reading.open_dataset import open_dataset
        from dagster_adjunct.assets.reading.stored_versions import StoredVersions

        dataset = outputs.app.dataset(name)
        manifest = StoredVersions(outputs.lake, dataset).manifest()
        if manifest is None or manifest.version is None:
            return {}
        shown = served_metadata(manifest, f"{outputs.lake.url}/{outputs.lake.dataset_prefix(name)}")
        descriptions = dict(dataset.column_descriptions)
        shown["dagster/column_schema"] = column_schema(manifest.version.columns, descriptions)
        shown["adjunct/stored_rows"] = manifest.version.stored_rows
        if outputs.preview_rows:
            with open_dataset(outputs.lake, name, version=manifest.version.id, lease=False) as version:
                shown |= dataset_preview(version, outputs.preview_rows, dataset.sensitive)
        return shown | {VERSION: manifest.version.id}

    def freshness(self, app: Application, name: str) -> FreshnessPolicy | None:
        """Return what Dagster warns by: the asset fails to be fresh when nobody has looked for changes so long."""
        window = app.dataset(name).following.freshness
        if window is None:
            return None
        if window < _SHORTEST_WINDOW:
            raise ConfigurationError(
                f"dataset {name!r} declares freshness={window}, and Dagster's shortest window is {_SHORTEST_WINDOW}.",
                "Declare a longer one; max_staleness= of app.table(…) takes any.",
                argument="freshness",
                dataset=name,
            )
        return FreshnessPolicy.time_window(fail_window=window)
