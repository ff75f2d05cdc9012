"""Build Dagster definitions from applications: their asset graph, jobs, schedules, sensors and
resources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, UnboundedDataset
from dagster_adjunct.assets.reading.change_streams import followed_dataset
from dagster_adjunct.orchestration.application.application import Application, group_datasets
from dagster_adjunct.orchestration.application.graph import (
    describe_partitions,
    is_advanced_by_partition,
    to_dagster_name,
)
from dagster_adjunct.orchestration.application.lineage import (
    dataset_source,
    find_lookup_tables,
    find_outputs,
    find_sources,
    find_unjoined_datasets,
)
from dagster_adjunct.orchestration.code_location import jobs, sensors
from dagster_adjunct.orchestration.code_location.automation import (
    AutomationSensor,
    Owner,
    Steps,
    bind_condition,
    check_condition,
    condition_error,
)
from dagster_adjunct.orchestration.code_location.checks import freshness_policy
from dagster_adjunct.orchestration.code_location.dagster_internals import DISALLOWED_NAMES
from dagster_adjunct.orchestration.code_location.dataset_assets import (
    DatasetAsset,
    dataset_assets,
    partition_job,
    partitioned_dataset_asset,
)
from dagster_adjunct.orchestration.code_location.metadata import MAX_PREVIEW_ROWS, code_references
from dagster_adjunct.orchestration.code_location.nodes import (
    NODE_KINDS,
    AdjunctTranslator,
    asset_subject,
)
from dagster_adjunct.orchestration.code_location.output_assets import (
    ApplicationAssets,
    outputs_asset,
)
from dagster_adjunct.orchestration.code_location.resources import (
    LOADER,
    AdjunctLoader,
    LakeResource,
    SparkResource,
)
from dagster_adjunct.orchestration.code_location.sensor_ticks import LaunchedJob, Launcher
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import ConfigurationError, translate_file_errors
from dagster_adjunct.resources.iceberg import IcebergTable
from dagster_adjunct.resources.package_files import read_package_file
from dagster_adjunct.resources.validation import validated

_LONGEST_INTERVAL = 86_400
Launch = LaunchedJob | dg.ScheduleDefinition | Launcher


@validated
def build_definitions(  # noqa: PLR0913
    app: Application,
    *more: Application,
    translator: AdjunctTranslator | None = None,
    lake: str | None = None,
    spark: SparkResource | None = None,
    iceberg: Mapping[str, IcebergTable] | None = None,
    launch_when: sensors.LaunchWhen | Mapping[str, sensors.LaunchWhen] | None = None,
    look_every: timedelta = timedelta(seconds=30),
    preview_rows: int = 0,
    link_code: bool = False,
) -> dg.Definitions:
    """Return the Dagster definitions of one or more applications, without opening or planning
    anything.

    Each dataset is an asset, all outputs of an application are one multi-asset, and streams that
    none of the applications writes are external assets, all in one lineage graph. Pass applications
    that share datasets or streams together, so that each of these is one asset; merge others with
    `Definitions.merge`.

    The job `<application>` runs a whole application in one process, on one Spark session. Sensors
    launch it: `<application>_new_records` when enough records are unread (as `launch_when` says,
    for all applications or by name; one record is enough without it), `<application>_startpoints`
    when startpoints were requested (not if the application has startpoints switched off),
    `<application>_restart` when a run failed before its commit and another one can help, and
    `<dataset>_delivered` (of a version set, `<set>_delivered`) when a version of a bounded dataset
    is completely delivered. `<application>_startpoint` requests or removes startpoints.
    `<application>_discard` expires old versions of its datasets, also on the schedule
    `<application>_discard_daily`; `<application>_compact` compacts its change streams' tables, also
    on the schedule `<application>_compact_hourly`; `<application>_version_action` pins, rolls back,
    revokes, accepts or removes one version. `<application>_automation` (of the first application)
    evaluates automation conditions, if there are any. A dataset whose versions are partitions is
    not part of the application's job; it has the job `<dataset>_versions`, and the sensor
    `<dataset>_new_versions` if a stream or files list the versions. All sensors and schedules are
    off by default. Sensors look once every `look_every`, in whole seconds.

    Ops are in the pools `adjunct/dataset/<name>` and `adjunct/application/<name>`; with the
    granularity "run" and a limit of 1 (as in `prepare_dagster_home`) runs wait for each other;
    otherwise the second run waits for the application's lease. `iceberg` maps dataset names to
    Iceberg tables: `<application>_iceberg` registers the served versions there, also on the
    schedule `<application>_iceberg_daily`. `translator` chooses keys, groups and owners; `lake` is
    a URL (default: `ADJUNCT_LAKE`, else `.adjunct/lake`). `preview_rows` shows up to 50 entries or
    records of datasets and output streams in Dagster; `link_code` links assets to the lines of this
    machine's files where they are declared. Raises ConfigurationError if two applications declare
    one dataset differently or write the same output, if they feed each other in a circle, and for
    an Iceberg table of a dataset that none of them stores.
    """
    apps = (app, *more)
    _reject_duplicate_names(apps)
    rules = sensors.launch_rules(launch_when, tuple(application.name for application in apps))
    check_preview_rows(preview_rows)
    interval = int(look_every.total_seconds())
    if not 1 <= interval <= _LONGEST_INTERVAL:
        what = f"build_definitions(): look_every is {look_every}"
        raise argument_error(what, "from a second to a day", argument="look_every")
    graph = AssetGraph(translator or AdjunctTranslator(), preview_rows, link_code)
    for application in apps:
        graph.add(application)
    launches = _list_launches(graph, apps, rules, iceberg or {})
    resources = _resources(lake)
    if spark is None:
        spark = resources.spark
    launchers = [launch for launch in launches if isinstance(launch, Launcher)]
    stale = _stale_launchers(graph, launchers)
    automated = _automate(graph, apps, [*launchers, *stale], resources.lake, interval)
    _reject_cycles(automated.assets)
    return dg.Definitions(
        assets=[*graph.external_specs(), *automated.assets],
        jobs=[launch for launch in launches if isinstance(launch, LaunchedJob)],
        schedules=[launch for launch in launches if isinstance(launch, dg.ScheduleDefinition)],
        sensors=[launcher.sensor(interval) for launcher in launchers] + automated.sensors,
        resources={
            "adjunct_lake": resources.lake,
            "adjunct_spark": spark,
            LOADER: _loader(lake, spark),
        },
        executor=dg.in_process_executor,
    )


def _list_launches(
    graph: AssetGraph,
    apps: Sequence[Application],
    rules: Mapping[str, sensors.LaunchWhen],
    iceberg: Mapping[str, IcebergTable],
) -> list[Launch]:
    """Return all jobs, with their sensors and schedules. Raises ConfigurationError for a name that
    two of them would have.
    """
    found: list[Launch] = []
    stored = {application.name: graph.stored_datasets(application.name) for application in apps}
    for application in apps:
        found += _launched_jobs(graph, application, rules[application.name])
    found += _partition_jobs(graph)
    for name, members in stored.items():
        found += _upkeep_jobs(name, members)
    for job in jobs.iceberg_jobs(stored, iceberg):
        found += jobs.with_schedule("iceberg", job)
    _reject_taken_names(found)
    return found


def _launched_jobs(
    graph: AssetGraph, app: Application, rule: sensors.LaunchWhen
) -> Iterator[Launch]:
    """Yield the jobs that run an application and set its startpoints, with their sensors.

    The main job materializes the application's assets in one process. An application that has only
    partitioned datasets has no such assets, and gets none of these jobs. Raises ConfigurationError
    for an automation condition of an application without outputs.
    """
    assets = graph.made[app.name]
    outputs = []
    for key, writer in graph.writers.items():
        if writer == app.name:
            outputs.append(key)
    if app.automation_condition is not None and not outputs:
        raise condition_error(
            Owner("application", app.name),
            "has an automation condition and no outputs: nothing would ask it.",
            "Give conditions to its datasets, such as new_version().",
        )
    if not assets:
        return
    texts = [app.description, *map(describe_partitions, app.datasets)]
    job = dg.define_asset_job(
        to_dagster_name(app.name),
        selection=assets,
        description="\n\n".join(filter(None, texts)) or None,
        executor_def=dg.in_process_executor,
        tags={"adjunct/application": app.name},
    )
    yield job
    if outputs:
        yield sensors.new_records_launcher(app, job, assets, outputs, rule)
    yield sensors.restart_launcher(app, job, assets, outputs)
    yield from sensors.delivered_launchers(app.name, graph.delivered_groups(app.name), job)
    stored = graph.stored_datasets(app.name)
    follows_changes = any(member.dataset.follows_changes for member in stored)
    if app.inputs or follows_changes:
        if app.startpoints:
            yield sensors.startpoints_launcher(app, job, assets, outputs)
        yield jobs.startpoint_job(app)


def _upkeep_jobs(app: str, members: Sequence[DatasetAsset]) -> Iterator[Launch]:
    """Yield the jobs that maintain an application's stored datasets, with their schedules."""
    if members:
        yield from jobs.with_schedule("discard", jobs.discard_job(app, members))
    if followed := [member for member in members if member.dataset.follows_changes]:
        yield from jobs.with_schedule("compact", jobs.compact_job(app, followed))
    if bounded := [member for member in members if not member.dataset.follows_changes]:
        yield jobs.version_job(app, bounded)


def _partition_jobs(graph: AssetGraph) -> Iterator[Launch]:
    """Yield the jobs of the datasets whose versions are partitions, with their sensors."""
    for member in graph.datasets.values():
        if member.dataset.versions is not None:
            job = partition_job(member)
            yield job
            if not is_advanced_by_partition(member.dataset):
                yield sensors.new_versions_launcher(member, job)


def _stale_launchers(graph: AssetGraph, launchers: Sequence[Launcher]) -> Iterator[Launcher]:
    """Yield a launcher for each unbounded dataset that declares `freshness`; conditions ask it,
    no sensor does.
    """
    jobs = {launcher.job.name: launcher.job for launcher in launchers}
    for member in graph.datasets.values():
        if not isinstance(member.dataset, UnboundedDataset):
            continue
        window = member.dataset.presentation.freshness
        job_names = []
        for app, made in graph.made.items():
            if member.key in made:
                job_names.append(to_dagster_name(app))
        if window is not None and job_names:
            yield sensors.stale_launcher(member, window, jobs[job_names[0]])


class _Automated(NamedTuple):
    """The built assets, and the sensor that evaluates their conditions (none without
    conditions).
    """

    assets: list[dg.AssetsDefinition]
    sensors: list[dg.SensorDefinition]


def _automate(
    graph: AssetGraph,
    apps: Sequence[Application],
    launchers: Sequence[Launcher],
    resource: LakeResource,
    interval: int,
) -> _Automated:
    """Return the built assets, with ready-made conditions bound to their launchers, and the sensor
    that evaluates the conditions.
    """
    # By asset, the launchers that its conditions ask, by the kind of condition.
    asked: dict[dg.AssetKey, dict[str, Launcher]] = {}
    for launcher in launchers:
        for key in launcher.on:
            asked.setdefault(key, {})[launcher.condition] = launcher

    def bind(spec: dg.AssetSpec) -> dg.AssetSpec:
        """Return the asset with its ready-made conditions bound."""
        if spec.automation_condition is None:
            return spec
        by_kind = asked.get(spec.key, {})
        bound = bind_condition(spec.automation_condition, graph.owner(spec.key), by_kind, resource)
        return spec.replace_attributes(automation_condition=bound)

    built = graph.built_assets()
    unit_of: dict[dg.AssetKey, frozenset[dg.AssetKey]] = {}  # by asset, all that its op makes
    has_conditions = False
    for asset in built:
        unit_of |= dict.fromkeys(asset.keys, frozenset(asset.keys))
        has_conditions |= any(spec.automation_condition is not None for spec in asset.specs)
    if not has_conditions:
        return _Automated(built, [])
    bound = [asset.map_asset_specs(bind) for asset in built]
    made = {to_dagster_name(app): frozenset(own) for app, own in graph.made.items()}
    name = f"{to_dagster_name(apps[0].name)}_automation"
    sensor = AutomationSensor(name, Steps(unit_of, made), list(unit_of), interval)
    return _Automated(bound, [sensor])


def _reject_duplicate_names(apps: Sequence[Application]) -> None:
    """Raise ConfigurationError if two applications' jobs and sensors would have the same names."""
    known: dict[str, Application] = {}
    for app in apps:
        other = known.setdefault(to_dagster_name(app.name), app)
        if other is not app:
            raise ConfigurationError(
                f"applications {other.name!r} and {app.name!r} have the same job name"
                f" {to_dagster_name(app.name)!r}: Dagster writes '-' as '_'.",
                "Rename one of them, and pass each application only once.",
                application=app.name,
            )


def _reject_taken_names(found: Sequence[Launch]) -> None:
    """Raise ConfigurationError for a job name that Dagster reserves, and for two definitions of
    one kind and name.
    """
    kinds: dict[str, Any] = {
        "jobs": LaunchedJob,
        "sensors": Launcher,
        "schedules": dg.ScheduleDefinition,
    }
    for what, kind in kinds.items():
        names = [launch.name for launch in found if isinstance(launch, kind)]
        for name in names:
            if name in DISALLOWED_NAMES and kind is LaunchedJob:
                raise ConfigurationError(
                    f"application {name!r} has a name that Dagster reserves, and its job would"
                    " have it.",
                    "Rename the application.",
                    application=name,
                )
            if names.count(name) > 1:
                raise ConfigurationError(
                    f"build_definitions(): two {what} have the name {name!r}. Such names are made"
                    " of those of applications and datasets, as shop_discard for the application"
                    " shop.",
                    "Rename an application or a dataset.",
                    argument="more",
                )


def _reject_cycles(built: Sequence[dg.AssetsDefinition]) -> None:
    """Raise ConfigurationError for applications that feed each other in a circle: Dagster would
    not load them.
    """
    made_of = {}
    for asset in built:
        for spec in asset.specs:
            made_of[spec.key] = [dependency.asset_key for dependency in spec.deps]
    try:
        TopologicalSorter(made_of).prepare()
    except CycleError as error:
        circle = " -> ".join(key.to_user_string() for key in error.args[1])
        raise ConfigurationError(
            "build_definitions(): applications feed each other in a circle, which Dagster can't"
            f" show: {circle}.",
            "Leave one of them out and start it by adjunct run MODULE:APP, or let it write or read"
            " another stream.",
            argument="more",
        ) from None


class _Resources(NamedTuple):
    lake: LakeResource
    spark: SparkResource


# Cached, because Definitions.merge accepts two resources of one name only if they are the same
# object.
@cache
def _resources(lake: str | None) -> _Resources:
    """Return the resources of a lake URL, the same objects in each call."""
    return _Resources(LakeResource(url=lake), SparkResource(lake=lake))


# By lake URL and id of the SparkResource. Each loader keeps its SparkResource, so that no id is
# used again.
_loaders: dict[tuple[str | None, int], AdjunctLoader] = {}


def _loader(lake: str | None, spark: SparkResource) -> AdjunctLoader:
    """Return the loader of assets' contents for these resources, the same object in each call."""
    return _loaders.setdefault((lake, id(spark)), AdjunctLoader(lake=lake, spark=spark))


@validated
def prepare_dagster_home(folder: Path) -> Path:
    """Create the folder as a DAGSTER_HOME unless it exists, and return its absolute path."""
    home = folder.resolve()
    config = home / "dagster.yaml"
    with translate_file_errors(home, "the home of Dagster"):
        home.mkdir(parents=True, exist_ok=True)
        if not config.exists():
            settings = read_package_file("orchestration/code_location/dagster.yaml")
            config.write_text(settings, encoding="utf-8")
    return home


class AssetGraph:
    """The assets of several applications; shared streams and datasets appear once."""

    def __init__(self, names: AdjunctTranslator, preview_rows: int, link_code: bool) -> None:
        self._nodes: dict[dg.AssetKey, LineageNode] = {}
        self._names = names
        self._preview_rows = preview_rows
        self._link_code = link_code
        self.datasets: dict[str, DatasetAsset] = {}
        # By dataset, the applications that declare it.
        self._declared_by: dict[str, list[Application]] = {}
        # By output, the application that writes it.
        self.writers: dict[dg.AssetKey, str] = {}
        # By application, the assets that its job makes.
        self.made: dict[str, list[dg.AssetKey]] = {}
        # By application with outputs.
        self.applications: dict[str, ApplicationAssets] = {}
        # What applications read, also if another one writes it.
        self._read: dict[dg.AssetKey, dg.AssetSpec] = {}
        self._outputs: list[dg.AssetsDefinition] = []

    def add(self, app: Application) -> None:
        """Add an application; its job materializes its outputs and datasets.

        The job leaves out datasets whose versions are partitions, because all assets of a job must
        share their partitions, and datasets of one run, which the application's step builds.
        """
        for source in find_sources(app):
            spec = self._spec(app, source, external=True)
            self._read.setdefault(spec.key, spec)
        datasets = {dataset.name: self._add_dataset(app, dataset) for dataset in app.datasets}
        made = []
        for dataset in app.datasets:
            if dataset.versions is None and _has_own_asset(dataset):
                made.append(datasets[dataset.name])
        unjoined = find_unjoined_datasets(app)
        outputs: dict[LineageNode, dg.AssetSpec] = {}
        for output in find_outputs(app):
            spec = self._spec(app, output.node, [*output.upstream, *unjoined])
            outputs[output.node] = spec
            made.append(spec.key)
        for node, spec in outputs.items():
            self._claim_output(app, node, spec.key)
        if outputs:
            inputs = {
                stream: self._key(app, LineageNode("stream", stream)) for stream in app.inputs
            }
            tables = {node.name: self._key(app, node) for node in find_lookup_tables(app)}
            assets = ApplicationAssets(app, outputs, inputs, datasets, tables, self._preview_rows)
            self.applications[app.name] = assets
            self._outputs.append(outputs_asset(assets))
        self.made[app.name] = made

    def _claim_output(self, app: Application, node: LineageNode, key: dg.AssetKey) -> None:
        """Note that the application writes an output. Raises ConfigurationError if another one
        does.
        """
        writer = self.writers.setdefault(key, app.name)
        if writer != app.name:
            raise ConfigurationError(
                f"applications {writer!r} and {app.name!r} both write"
                f" {node.kind} {node.name!r}, which is one asset, {key.to_user_string()};"
                " only one application may write an asset.",
                "Let one of them write it, or deploy them in two code locations with different"
                " asset keys.",
                application=app.name,
            )

    def owner(self, key: dg.AssetKey) -> Owner:
        """Return the application or dataset whose run makes an asset."""
        if key in self.writers:
            return Owner("application", self.writers[key])
        return Owner("dataset", self._nodes[key].name)

    def external_specs(self) -> list[dg.AssetSpec]:
        """Return the assets that Dagster shows but does not build: streams, files and tables that
        none of the applications writes, and datasets of one run.
        """
        of_steps = []
        for asset in self.datasets.values():
            if not _has_own_asset(asset.dataset):
                of_steps.append(asset.spec)
        found = []
        for spec in (*map(self._after_followed, self._read.values()), *of_steps):
            if spec.key not in self.writers:  # local tables are outputs
                found.append(spec)
        return found

    def _after_followed(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        """Return the asset; that of a dataset's changes depends on the dataset's asset, if that is
        here.
        """
        node = self._nodes[spec.key]
        followed = followed_dataset(node.name) if node.kind == "stream" else None
        if followed not in self.datasets:
            return spec
        return spec.replace_attributes(deps=[self.datasets[followed].spec.key])

    def built_assets(self) -> list[dg.AssetsDefinition]:
        """Return the assets that are built here: datasets (each version set as one) and the
        applications' outputs.
        """
        made = []
        for members in self._groups():
            first = members[0]
            if not _has_own_asset(first.dataset):
                continue
            if first.dataset.versions is not None:
                made.append(partitioned_dataset_asset(first))
            else:
                declaring = {}
                for member in members:
                    for app in self._declared_by[member.dataset.name]:
                        declaring[app.name] = app
                made.append(dataset_assets(members, tuple(declaring.values())))
        return [*made, *self._outputs]

    def _groups(self) -> list[list[DatasetAsset]]:
        """Return the datasets, the members of a version set together."""
        units = group_datasets(
            (asset.dataset for asset in self.datasets.values()), "build_definitions"
        )
        return [[self.datasets[dataset.name] for dataset in unit] for unit in units]

    def delivered_groups(self, application: str) -> list[list[DatasetAsset]]:
        """Return the groups of bounded datasets, delivered by markers or folders, that this
        application's job builds.

        A version set is one group. A group that several jobs build belongs to the first of them.
        """
        groups = []
        for members in self._groups():
            keys = {member.key for member in members}
            builders = []
            for name, made in self.made.items():
                if keys <= {*made}:
                    builders.append(name)
            are_delivered = all(sensors.has_delivered_versions(each.dataset) for each in members)
            if are_delivered and builders[:1] == [application]:
                groups.append(members)
        return groups

    def stored_datasets(self, application: str) -> list[DatasetAsset]:
        """Return the stored datasets that this application is the first to declare."""
        found = []
        for asset in self.datasets.values():
            if asset.application == application and asset.dataset.persistent:
                found.append(asset)
        return found

    def _add_dataset(self, app: Application, dataset: AdjunctDataset) -> dg.AssetKey:
        """Add a dataset unless another application has added it; return its asset key.

        Raises ConfigurationError if the other application declares the dataset differently, or if a
        dataset of one run has an automation condition.
        """
        source = dataset_source(dataset)
        streams = {}
        if dataset.stream is not None:
            streams[dataset.stream] = self._key(app, LineageNode("stream", dataset.stream))
        spec = self._spec(app, LineageNode("dataset", dataset.name), [source] if source else [])
        is_of_one_run = not dataset.persistent
        if spec.automation_condition is not None and is_of_one_run:
            raise ConfigurationError(
                f"dataset {dataset.name!r} has an automation condition, but no run makes it alone:"
                " the batches of its applications do (persistent=False).",
                "Give the condition to the application, or leave persistent=False out.",
                argument="automation_condition",
                dataset=dataset.name,
            )
        known = self.datasets.setdefault(
            dataset.name, DatasetAsset(dataset, spec, streams, app.name, self._preview_rows)
        )
        if known.dataset != dataset:
            raise ConfigurationError(
                f"applications {known.application!r} and {app.name!r} declare dataset"
                f" {dataset.name!r} differently.",
                "Declare it once and pass that object to both.",
                dataset=dataset.name,
            )
        self._declared_by.setdefault(dataset.name, []).append(app)
        return known.key

    def _key(self, app: Application, node: LineageNode) -> dg.AssetKey:
        """Return the asset key of a node. Raises ConfigurationError if another node has it."""
        key = self._names.get_asset_key(asset_subject(app, node))
        known = self._nodes.setdefault(key, node)
        if known != node:
            raise ConfigurationError(
                f"{known.kind} {known.name!r} and {node.kind} {node.name!r} both have the asset key"
                f" {key.to_user_string()}.",
                "Return different keys from the translator's get_asset_key, or rename one.",
                application=app.name,
            )
        return key

    def _spec(
        self,
        app: Application,
        node: LineageNode,
        upstream: Iterable[LineageNode] = (),
        *,
        external: bool = False,
    ) -> dg.AssetSpec:
        """Return the asset of a node.

        An external asset has no owners or condition of the application, because Definitions.merge
        accepts several assets of one key only if they are equal.
        """
        names = self._names
        subject = asset_subject(app, node)
        metadata = NODE_KINDS[node.kind].declared(app, node.name)
        if external:
            subject = replace(subject, owners=(), external=True, automation_condition=None)
        elif self._link_code:
            metadata |= code_references(
                app.dataset(node.name).declared_at if node.kind == "dataset" else app.declared_at
            )
        owners = names.get_owners(subject)
        if node.kind == "dataset":
            declared_by = Owner("dataset", node.name)
        else:
            declared_by = Owner("application", app.name)
        condition = None if external else names.get_automation_condition(subject)
        return dg.AssetSpec(
            key=self._key(app, node),
            deps=[self._key(app, parent) for parent in upstream],
            group_name=names.get_group_name(subject),
            owners=[owners] if isinstance(owners, str) else list(owners),
            description=names.get_description(subject),
            kinds=names.get_kinds(subject),
            tags=dict(names.get_tags(subject)),
            metadata=metadata,
            freshness_policy=freshness_policy(app, node),
            automation_condition=check_condition(condition, declared_by),
        )


def _has_own_asset(dataset: AdjunctDataset) -> bool:
    """Whether the dataset has its own asset; an application's step builds local tables and
    datasets of one run.
    """
    return dataset.persistent and not dataset.is_local


def check_preview_rows(preview_rows: int) -> None:
    """Raise ConfigurationError unless so many rows can be displayed."""
    if not 0 <= preview_rows <= MAX_PREVIEW_ROWS:
        expected = f"an integer from 0 to {MAX_PREVIEW_ROWS}"
        raise ConfigurationError(
            f"build_definitions(): preview_rows must be {expected}, not {preview_rows!r}.",
            argument="preview_rows",
        )
