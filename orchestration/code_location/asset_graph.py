"""`AssetGraph`: the assets of several applications, and which application writes each."""

from collections.abc import Iterable
from dataclasses import replace

from dagster import AssetKey, AssetsDefinition, AssetSpec

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import (
    dataset_source,
    find_lookup_tables,
    find_outputs,
    find_sources,
    find_unjoined_datasets,
    group_datasets,
)
from dagster_adjunct.orchestration.code_location.dataset_assets import (
    DatasetAsset,
    dataset_assets,
    partitioned_dataset_asset,
)
from dagster_adjunct.orchestration.code_location.metadata import code_references
from dagster_adjunct.orchestration.code_location.nodes import (
    NODE_KINDS,
    AdjunctTranslator,
    asset_subject,
    find_declaration,
    freshness_policy,
)
from dagster_adjunct.orchestration.code_location.output_assets import outputs_asset
from dagster_adjunct.orchestration.code_location.sensors import has_delivered_versions
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode
from dagster_adjunct.resources.errors import ConfigurationError


class AssetGraph:
    """The assets of several applications; shared streams and datasets appear once."""

    def __init__(self, names: AdjunctTranslator, preview_rows: int, link_code: bool) -> None:
        self._nodes: dict[AssetKey, LineageNode] = {}
        self._names, self._preview_rows, self._link_code = names, preview_rows, link_code
        self._datasets: dict[str, tuple[DatasetAsset, str]] = {}
        self._declared_by: dict[str, list[Application]] = {}
        self._writers: dict[AssetKey, str] = {}
        self._written: dict[str, list[AssetKey]] = {}
        self._made: dict[str, list[AssetKey]] = {}
        self._read: dict[AssetKey, AssetSpec] = {}
        self._outputs: list[AssetsDefinition] = []

    def add(self, app: "Application") -> list[AssetKey]:
        """Add an application; return the keys that its job materializes: its outputs and datasets.

        Datasets whose versions are partitions are excluded, because all assets of a job must share their partitions.
        So are datasets of one run, which the application's step builds.
        """
        for source in find_sources(app):
            spec = self._spec(app, source, external=True)
            self._read.setdefault(spec.key, spec)
        datasets = {dataset.name: self._add_dataset(app, dataset) for dataset in app.datasets}
        stored = [dataset for dataset in app.datasets if dataset.versions is None and _has_own_asset(dataset)]
        keys = [datasets[dataset.name] for dataset in stored]
        outputs = {
            output.node: self._spec(app, output.node, [*output.upstream, *find_unjoined_datasets(app)])
            for output in find_outputs(app)
        }
        for node, spec in outputs.items():
            writer = self._writers.setdefault(spec.key, app.name)
            if writer != app.name:
                raise ConfigurationError(
                    f"applications {writer!r} and {app.name!r} both write {node.kind} {node.name!r}, which is one "
                    f"asset, {spec.key.to_user_string()}; only one application may write an asset.",
                    "Let one of them write it, or deploy them in two code locations with different asset keys.",
                    application=app.name,
                )
        self._written[app.name] = [spec.key for spec in outputs.values()]
        if outputs:
            inputs = {stream: self._key(app, LineageNode("stream", stream)) for stream in app.inputs}
            tables = {node.name: self._key(app, node) for node in find_lookup_tables(app)}
            self._outputs.append(outputs_asset(app, outputs, inputs, datasets, tables, self._preview_rows))
        self._made[app.name] = [*keys, *self._written[app.name]]
        return self._made[app.name]

    def external_specs(self) -> list[AssetSpec]:
        """Return the assets that Dagster shows but does not build: streams, files and tables that none of the
        applications writes, and datasets of one run.
        """
        passing = [asset.spec for asset, _ in self._datasets.values() if not _has_own_asset(asset.dataset)]
        return [spec for spec in (*self._read.values(), *passing) if spec.key not in self._writers]

    def built_assets(self) -> list[AssetsDefinition]:
        """Return the assets that are built here: datasets (each version set as one) and the applications' outputs."""
        made = []
        stored = (asset.dataset for asset, _ in self._datasets.values() if _has_own_asset(asset.dataset))
        for unit in group_datasets(stored, "build_definitions"):
            members = [self._datasets[dataset.name][0] for dataset in unit]
            applications = {app.name: app for dataset in unit for app in self._declared_by[dataset.name]}
            if members[0].dataset.versions is not None:
                made.append(partitioned_dataset_asset(members[0]))
            else:
                made.append(dataset_assets(members, tuple(applications.values())))
        return [*made, *self._outputs]

    def partitioned_datasets(self) -> list[DatasetAsset]:
        """Return the datasets whose versions are partitions."""
        return [asset for asset, _ in self._datasets.values() if asset.dataset.versions is not None]

    def output_keys(self, application: str) -> list[AssetKey]:
        """Return the outputs of an application."""
        return self._written[application]

    def delivered_groups(self, application: str) -> list[list[DatasetAsset]]:
        """Return groups of bounded datasets that are delivered by markers or folders; a version set is one group.

        Only groups that this application's job is the first to build are returned.
        """
        units = group_datasets((asset.dataset for asset, _ in self._datasets.values()), "build_definitions")
        groups = []
        for unit in units:
            members = [self._datasets[dataset.name][0] for dataset in unit]
            keys = {member.key for member in members}
            first = next((name for name, made in self._made.items() if keys <= {*made}), None)
            if first == application and all(map(has_delivered_versions, unit)):
                groups.append(members)
        return groups

    def stored_datasets(self, application: str) -> list[DatasetAsset]:
        """Return the stored datasets that this application is the first to declare."""
        mine = [asset for asset, owner in self._datasets.values() if owner == application]
        return [asset for asset in mine if asset.dataset.following.persistent]

    def _add_dataset(self, app: "Application", dataset: "AdjunctDataset") -> AssetKey:
        source = dataset_source(dataset)
        streams = (
            {} if dataset.stream is None else {dataset.stream: self._key(app, LineageNode("stream", dataset.stream))}
        )
        spec = self._spec(app, LineageNode("dataset", dataset.name), [source] if source else [])
        known, owner = self._datasets.setdefault(
            dataset.name, (DatasetAsset(dataset, spec, streams, self._preview_rows), app.name)
        )
        if known.dataset != dataset:
            raise ConfigurationError(
                f"applications {owner!r} and {app.name!r} declare dataset {dataset.name!r} differently.",
                "Declare it once and pass that object to both.",
                dataset=dataset.name,
            )
        self._declared_by.setdefault(dataset.name, []).append(app)
        return known.key

    def _key(self, app: "Application", node: LineageNode) -> AssetKey:
        key = self._names.get_asset_key(asset_subject(app, node))
        known = self._nodes.setdefault(key, node)
        if known != node:
            raise ConfigurationError(
                f"{known.kind} {known.name!r} and {node.kind} {node.name!r} both have the asset key "
                f"{key.to_user_string()}.",
                "Return different keys from the translator's get_asset_key, or rename one.",
                application=app.name,
            )
        return key

    def _spec(
        self, app: "Application", node: LineageNode, upstream: Iterable[LineageNode] = (), *, external: bool = False
    ) -> AssetSpec:
        """Return the asset of a node. An external one does not depend on the application, because Definitions.merge
        accepts several assets of one key only if they are equal.
        """
        names, subject = self._names, asset_subject(app, node)
        metadata = NODE_KINDS[node.kind].declared(app, node.name)
        if external:
            subject = replace(subject, owners=(), external=True)
        elif self._link_code:
            metadata |= code_references(find_declaration(app, node))
        owners = names.get_owners(subject)
        return AssetSpec(
            key=self._key(app, node),
            deps=[self._key(app, parent) for parent in upstream],
            group_name=names.get_group_name(subject),
            owners=[owners] if isinstance(owners, str) else list(owners),
            description=names.get_description(subject),
            kinds=names.get_kinds(subject),
            tags=dict(names.get_tags(subject)),
            metadata=metadata,
            freshness_policy=freshness_policy(app, node),
        )


def _has_own_asset(dataset: "AdjunctDataset") -> bool:
    """Whether the dataset has its own asset; an application's step builds local tables and datasets of one run."""
    return dataset.following.persistent and not dataset.is_local
