"""Turns applications into Dagster definitions: assets, a job and a sensor each, and the resources they need."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetKey,
    AssetsDefinition,
    AssetSpec,
    Definitions,
    FreshnessPolicy,
    define_asset_job,
    in_process_executor,
)

from dagster_adjunct.assets.declaration.dataset_inputs import FileSource
from dagster_adjunct.orchestration.application.advance_units import (
    made_by_partition,
    partitions_note,
    units_of,
)
from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.application.output_lineage import (
    outputs_of,
    source_of,
    sources_read,
    unused_datasets,
)
from dagster_adjunct.orchestration.code_location.assets.dataset_assets import DatasetAsset, dataset_assets
from dagster_adjunct.orchestration.code_location.assets.output_assets import outputs_asset
from dagster_adjunct.orchestration.code_location.assets.partitioned_dataset_assets import (
    partition_job,
    partitioned_dataset_asset,
)
from dagster_adjunct.orchestration.code_location.jobs.compaction_job import compact_job, compact_schedule
from dagster_adjunct.orchestration.code_location.jobs.iceberg_job import iceberg_jobs, iceberg_schedule
from dagster_adjunct.orchestration.code_location.jobs.startpoint_job import startpoint_job
from dagster_adjunct.orchestration.code_location.jobs.version_job import (
    discard_job,
    discard_schedule,
    version_job,
)
from dagster_adjunct.orchestration.code_location.sensing.launch_when import LaunchWhen, launch_rules
from dagster_adjunct.orchestration.code_location.sensing.new_records_sensor import new_records_sensor
from dagster_adjunct.orchestration.code_location.sensing.restart_sensor import restart_sensor
from dagster_adjunct.orchestration.code_location.sensing.startpoint_sensor import startpoint_sensor
from dagster_adjunct.orchestration.code_location.sensing.version_sensors import (
    delivered_sensor,
    is_delivered,
    new_versions_sensor,
)
from dagster_adjunct.orchestration.code_location.shared.code_references import code_references
from dagster_adjunct.orchestration.code_location.shared.lake_resource import LakeResource
from dagster_adjunct.orchestration.code_location.shared.metadata import (
    declared_metadata,
    output_stream_metadata,
    storage_of,
    table_metadata,
)
from dagster_adjunct.orchestration.code_location.shared.row_preview import MOST_ROWS
from dagster_adjunct.orchestration.code_location.shared.translator import AdjunctTranslator, AssetSubject
from dagster_adjunct.orchestration.operators.column_lineage import Node
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.spark.resource import SparkResource

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.exchange.iceberg import IcebergTable
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.resources.declared_place import Place

_SHORTEST_WINDOW = timedelta(minutes=1)


def build_definitions(
    app: "Application",
    *more: "Application",
    translator: AdjunctTranslator | None = None,
    lake: str | None = None,
    spark: SparkResource | None = None,
    iceberg: "Mapping[str, IcebergTable] | None" = None,
    launch_when: LaunchWhen | Mapping[str, LaunchWhen] | None = None,
    preview_rows: int = 0,
    link_code: bool = False,
) -> Definitions:
    """Return Dagster definitions for one application or several; nothing is opened or planned while loading.

    Each dataset is an asset, all outputs of an application are one multi-asset, and the streams that nobody
    here writes are external assets, all in one lineage graph. Applications that share datasets or streams are
    given together, so that these are one asset; others may be merged with `Definitions.merge`.

    Per application the job `<application>` runs the whole in one process, on one Spark session. Sensors launch it:
    `<application>_new_records` when input waits (as `launch_when` says, for all applications or by name; one record
    is enough without it), `<application>_startpoints` when somebody has asked for startpoints, `<application>_restart`
    when it failed before its commit and another run can help, and `<dataset>_delivered` (of a version set,
    `<set>_delivered`) for a bounded dataset alone when a version is delivered whole. `<application>_startpoint` asks
    for startpoints or takes them back (the sensor for them is left out where the application has them switched off).
    `<application>_discard` discards in its datasets, also
    on the schedule `<application>_discard_daily`; `<application>_compact` compacts its change streams' tables, also
    on the schedule `<application>_compact_hourly`; `<application>_version_action` pins, rolls back, withdraws, forces
    or drops one version. A dataset whose versions are partitions is left out of the application's job; it has the
    job `<dataset>_versions`, and the sensor `<dataset>_new_versions` where a stream or files say which versions
    there are. All sensors and schedules are off until they are switched on.

    Ops are in the pools `adjunct/dataset/<name>` and `adjunct/application/<name>`; with the granularity "run" and a
    limit of 1 (as in `prepare_dagster_home`) runs wait for each other, and without one the application's lease lets
    the second wait. `iceberg` gives datasets Iceberg tables, by name: `<application>_iceberg` registers there what
    they serve, also on the schedule `<application>_iceberg_daily`. `translator` gives keys, groups and owners; `lake`
    is a URL (default: `ADJUNCT_LAKE`, else `.adjunct/lake`). `preview_rows` shows so many entries or records of
    datasets and output streams in Dagster, 50 at most; `link_code` leads from assets to the lines of this machine's
    files where they are declared, which Dagster then stores. Raises ConfigurationError where two applications declare
    one dataset differently or write the same output, and for an Iceberg table of a dataset that nobody here stores.
    """
    apps = (app, *more)
    _refuse_one_name(apps)
    rules = launch_rules(launch_when, tuple(each.name for each in apps))
    names = translator or AdjunctTranslator()
    if isinstance(preview_rows, bool) or not isinstance(preview_rows, int) or not 0 <= preview_rows <= MOST_ROWS:
        raise ConfigurationError(
            f"build_definitions has preview_rows={preview_rows!r}: expected 0 to {MOST_ROWS}.", "Change it."
        )
    graph = _Assets(names, preview_rows, link_code)
    own = {application.name: graph.add(application) for application in apps}
    jobs = {
        application.name: define_asset_job(
            dagster_name(application.name),
            selection=own[application.name],
            description=_job_description(application),
            executor_def=in_process_executor,
            tags={"adjunct/application": application.name},
        )
        for application in apps
        # Only datasets whose versions are partitions: there is nothing to run as a whole.
        if own[application.name]
    }
    handed_over = iceberg_jobs({each.name: graph.datasets(each.name) for each in apps}, iceberg or {})
    discards = [discard_job(each.name, graph.datasets(each.name)) for each in apps if graph.datasets(each.name)]
    bounded = {each.name: [d for d in graph.datasets(each.name) if d.dataset.kind == "bounded"] for each in apps}
    followed = {each.name: [d for d in graph.datasets(each.name) if d.dataset.kind == "unbounded"] for each in apps}
    compacts = [compact_job(each, members) for each, members in followed.items() if members]
    partitions = [(asset, partition_job(asset)) for asset in graph.partitioned()]
    launched = [each for each in apps if each.name in jobs]
    movable = [each for each in launched if each.inputs or followed[each.name]]
    lake_resource, spark_resource = _resources(lake)
    return Definitions(
        assets=[*graph.external(), *graph.assets()],
        jobs=[
            *jobs.values(),
            *(made for _, made in partitions),
            *discards,
            *compacts,
            *handed_over,
            *(version_job(each, members) for each, members in bounded.items() if members),
            *map(startpoint_job, movable),
        ],
        schedules=[
            *map(discard_schedule, discards),
            *map(compact_schedule, compacts),
            *map(iceberg_schedule, handed_over),
        ],
        sensors=[
            *(new_records_sensor(each, jobs[each.name], own[each.name], rules[each.name]) for each in launched),
            *(startpoint_sensor(each, jobs[each.name], own[each.name]) for each in movable if each.startpoints),
            *(restart_sensor(each, jobs[each.name], own[each.name], graph.written(each.name)) for each in launched),
            *(
                delivered_sensor(unit, jobs[owner])
                for unit in graph.delivered()
                if (owner := next((name for name in jobs if {each.key for each in unit} <= {*own[name]}), None))
            ),
            *(new_versions_sensor(asset, made) for asset, made in partitions if not made_by_partition(asset.dataset)),
        ],
        resources={"adjunct_lake": lake_resource, "adjunct_spark": spark or spark_resource},
        executor=in_process_executor,
    )


def _refuse_one_name(apps: "Sequence[Application]") -> None:
    """Refuse two applications whose jobs and sensors would have the same names."""
    known: dict[str, Application] = {}
    for app in apps:
        other = known.setdefault(dagster_name(app.name), app)
        if other is not app:
            raise ConfigurationError(
                f"applications {other.name!r} and {app.name!r} would both have the job {dagster_name(app.name)!r}: "
                "Dagster writes '-' as '_'.",
                "Rename one; the same application is given once.",
            )


@cache
def _resources(lake: str | None) -> tuple[LakeResource, SparkResource]:
    """Return the same objects for the same lake: Definitions.merge takes no two of one name."""
    return LakeResource(url=lake), SparkResource(lake=lake)


class _Assets:
    """Collects the assets of several applications, each shared one once."""

    def __init__(self, names: AdjunctTranslator, preview_rows: int, link_code: bool) -> None:
        self._nodes: dict[AssetKey, Node] = {}
        self._names, self._preview_rows, self._link_code = names, preview_rows, link_code
        self._datasets: dict[str, tuple[DatasetAsset, str]] = {}
        self._declared_by: dict[str, list[Application]] = {}
        self._writers: dict[AssetKey, str] = {}
        self._written: dict[str, list[AssetKey]] = {}
        self._read: dict[AssetKey, AssetSpec] = {}
        self._outputs: list[AssetsDefinition] = []

    def add(self, app: "Application") -> list[AssetKey]:
        """Add an application; return the keys of what its job materialises: its outputs, and its datasets.

        Datasets whose versions are partitions are left out: a job has no partitions for some of its assets only. So are
        those that live for one run: the application's step makes them.
        """
        for source in sources_read(app):
            spec = self._spec(app, source, external=True)
            self._read.setdefault(spec.key, spec)
        datasets = {dataset.name: self._add_dataset(app, dataset) for dataset in app.datasets}
        made = [dataset for dataset in app.datasets if dataset.versions is None and dataset.following.persistent]
        keys = [datasets[dataset.name] for dataset in made]
        outputs = {
            output.node: self._spec(app, output.node, [*output.upstream, *unused_datasets(app)])
            for output in outputs_of(app)
        }
        for node, spec in outputs.items():
            writer = self._writers.setdefault(spec.key, app.name)
            if writer != app.name:
                raise ConfigurationError(
                    f"applications {writer!r} and {app.name!r} both write {node.kind} {node.name!r}, which is one "
                    f"asset, {spec.key.to_user_string()}; an asset is made in one place.",
                    "Let one of them write it, or deploy them in two code locations with different asset keys.",
                )
        self._written[app.name] = [spec.key for spec in outputs.values()]
        if outputs:
            inputs = {stream: self._key(app, Node("stream", stream)) for stream in app.inputs}
            self._outputs.append(outputs_asset(app, outputs, inputs, datasets, self._preview_rows))
        return [*keys, *self._written[app.name]]

    def external(self) -> list[AssetSpec]:
        """Return what is read and not made here: streams and files that none of the applications writes, and the
        datasets that live for one run only, which Dagster shows and does not make.
        """
        passing = [asset.spec for asset, _ in self._datasets.values() if not asset.dataset.following.persistent]
        return [*(spec for key, spec in self._read.items() if key not in self._writers), *passing]

    def assets(self) -> list[AssetsDefinition]:
        """Return the assets that are made here: datasets, each version set in one, and the applications' outputs."""
        made = []
        stored = (asset.dataset for asset, _ in self._datasets.values() if asset.dataset.following.persistent)
        for unit in units_of(stored, "build_definitions"):
            members = [self._datasets[dataset.name][0] for dataset in unit]
            partitioned = members[0].dataset.versions is not None
            applications = {app.name: app for dataset in unit for app in self._declared_by[dataset.name]}
            made.append(
                partitioned_dataset_asset(members[0])
                if partitioned
                else dataset_assets(members, tuple(applications.values()))
            )
        return [*made, *self._outputs]

    def partitioned(self) -> list[DatasetAsset]:
        """Return the datasets whose versions are partitions."""
        return [asset for asset, _ in self._datasets.values() if asset.dataset.versions is not None]

    def written(self, application: str) -> list[AssetKey]:
        """Return the outputs of an application."""
        return self._written[application]

    def delivered(self) -> list[list[DatasetAsset]]:
        """Return the bounded datasets whose versions are delivered by markers or folders; members of a set as one."""
        units = units_of((asset.dataset for asset, _ in self._datasets.values()), "build_definitions")
        return [[self._datasets[dataset.name][0] for dataset in unit] for unit in units if all(map(is_delivered, unit))]

    def datasets(self, application: str) -> list[DatasetAsset]:
        """Return the stored datasets that this application is the first to declare."""
        mine = [asset for asset, owner in self._datasets.values() if owner == application]
        return [asset for asset in mine if asset.dataset.following.persistent]

    def _add_dataset(self, app: "Application", dataset: "AdjunctDataset") -> AssetKey:
        source = source_of(dataset)
        streams = {source.name: self._key(app, source)} if source and source.kind == "stream" else {}
        spec = self._spec(app, Node("dataset", dataset.name), [source] if source else [])
        known, owner = self._datasets.setdefault(
            dataset.name, (DatasetAsset(dataset, spec, streams, self._preview_rows), app.name)
        )
        if known.dataset != dataset:
            raise ConfigurationError(
                f"applications {owner!r} and {app.name!r} declare dataset {dataset.name!r} differently.",
                "Declare it once and use that object in both.",
            )
        self._declared_by.setdefault(dataset.name, []).append(app)
        return known.key

    def _key(self, app: "Application", node: Node) -> AssetKey:
        key = self._names.get_asset_key(_subject(app, node))
        known = self._nodes.setdefault(key, node)
        if known != node:
            raise ConfigurationError(
                f"{known.kind} {known.name!r} and {node.kind} {node.name!r} both have the asset key "
                f"{key.to_user_string()}; an asset is one of them.",
                "Let the translator's get_asset_key give each a key of its own, or rename one.",
            )
        return key

    def _spec(
        self, app: "Application", node: Node, upstream: Iterable[Node] = (), *, external: bool = False
    ) -> AssetSpec:
        """Return the asset of a node. An external one says nothing of the application: Definitions.merge takes several
        of one key where they are equal.
        """
        names, subject = self._names, _subject(app, node)
        if external:
            subject = replace(subject, owners=(), external=True)
        return AssetSpec(
            key=self._key(app, node),
            deps=[self._key(app, parent) for parent in upstream],
            group_name=names.get_group_name(subject),
            owners=_sequence(names.get_owners(subject)),
            description=names.get_description(subject),
            kinds=names.get_kinds(subject),
            tags=dict(names.get_tags(subject)),
            metadata=_metadata(app, node)
            | (code_references(_place(app, node)) if self._link_code and not external else {}),
            freshness_policy=_freshness(app.dataset(node.name)) if node.kind == "dataset" else None,
        )


def _job_description(app: "Application") -> str | None:
    said = [app.description, *map(partitions_note, app.datasets)]
    return "\n\n".join(filter(None, said)) or None


def _freshness(dataset: "AdjunctDataset") -> FreshnessPolicy | None:
    """Return what Dagster warns by: the table's asset fails to be fresh when nobody has looked for changes so long."""
    window = dataset.following.freshness
    if window is None:
        return None
    if window < _SHORTEST_WINDOW:
        raise ConfigurationError(
            f"dataset {dataset.name!r} declares freshness={window}, and Dagster's shortest window is "
            f"{_SHORTEST_WINDOW}.",
            "Declare a longer one; max_staleness= of app.table(…) takes any.",
        )
    return FreshnessPolicy.time_window(fail_window=window)


def _place(app: "Application", node: Node) -> "Place | None":
    return app.dataset(node.name).declared_at if node.kind == "dataset" else app.declared_at


def _metadata(app: "Application", node: Node) -> dict[str, Any]:
    if node.kind == "files":
        return {"dagster/uri": node.name}
    if node.kind == "dataset":
        return declared_metadata(app.dataset(node.name))
    if node.kind == "table":
        return table_metadata(app.tables[node.name])
    return output_stream_metadata(app.outputs[node.name]) if node.name in app.outputs else {}


def _subject(app: "Application", node: Node) -> AssetSubject:
    if node.kind == "dataset":
        dataset = app.dataset(node.name)
        owners = dataset.owners or app.owners
        return AssetSubject("dataset", node.name, app.name, dataset.description, owners, dataset.group)
    storage = storage_of(app.tables[node.name]) if node.kind == "table" else ""
    if node.kind == "files":
        made = [dataset.input for dataset in app.datasets if source_of(dataset) == node]
        storage = next(source.format for source in made if isinstance(source, FileSource))
    return AssetSubject(node.kind, node.name, app.name, owners=app.owners, storage=storage)


def _sequence(owners: str | Sequence[str]) -> list[str]:
    return [owners] if isinstance(owners, str) else list(owners)
