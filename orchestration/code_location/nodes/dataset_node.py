"""Datasets as assets: what their declarations say of them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dagster import AssetKey, FreshnessPolicy

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.nodes.asset_subject import AssetSubject
from dagster_adjunct.orchestration.code_location.nodes.node_kind import NodeKind
from dagster_adjunct.orchestration.code_location.shared.asset_metadata import declared_metadata
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.resources.declared_place import Place

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
