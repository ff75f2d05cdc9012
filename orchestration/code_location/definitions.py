"""Build Dagster definitions from applications: assets, jobs, schedules, sensors and resources."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from dagster import (
    AssetKey,
    Definitions,
    JobDefinition,
    ScheduleDefinition,
    SensorDefinition,
    define_asset_job,
    in_process_executor,
)
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from dagster_adjunct.assets.exchange.iceberg import IcebergTable
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import (
    describe_partitions,
    is_advanced_by_partition,
    to_dagster_name,
)
from dagster_adjunct.orchestration.code_location.asset_graph import AssetGraph
from dagster_adjunct.orchestration.code_location.dataset_assets import DatasetAsset, partition_job
from dagster_adjunct.orchestration.code_location.jobs import (
    compact_job,
    discard_job,
    iceberg_jobs,
    startpoint_job,
    upkeep_schedule,
    version_job,
)
from dagster_adjunct.orchestration.code_location.metadata import MAX_PREVIEW_ROWS
from dagster_adjunct.orchestration.code_location.nodes import AdjunctTranslator
from dagster_adjunct.orchestration.code_location.resources import LakeResource
from dagster_adjunct.orchestration.code_location.sensor_ticks import LaunchedJob
from dagster_adjunct.orchestration.code_location.sensors import (
    LaunchWhen,
    delivered_sensors,
    launch_rules,
    new_records_sensor,
    new_versions_sensor,
    restart_sensor,
    startpoint_sensor,
)
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.file_errors import translate_file_errors
from dagster_adjunct.resources.spark.session import SparkResource


def build_definitions(
    app: Application,
    *more: Application,
    translator: AdjunctTranslator | None = None,
    lake: str | None = None,
    spark: SparkResource | None = None,
    iceberg: Mapping[str, IcebergTable] | None = None,
    launch_when: LaunchWhen | Mapping[str, LaunchWhen] | None = None,
    preview_rows: int = 0,
    link_code: bool = False,
) -> Definitions:
    """Return the Dagster definitions of one or more applications, without opening or planning anything.

    Each dataset is an asset, all outputs of an application are one multi-asset, and streams that none of
    the applications writes are external assets, all in one lineage graph. Pass applications that share datasets or
    streams together, so that each of these is one asset; merge others with `Definitions.merge`.

    The job `<application>` runs a whole application in one process, on one Spark session. Sensors launch it:
    `<application>_new_records` when input waits (as `launch_when` says, for all applications or by name; one record
    is enough without it), `<application>_startpoints` when startpoints were requested, `<application>_restart`
    when it failed before its commit and another run can help, and `<dataset>_delivered` (of a version set,
    `<set>_delivered`) when a version of a bounded dataset is completely delivered. `<application>_startpoint`
    requests or removes startpoints (without its sensor if the application has startpoints switched off).
    `<application>_discard` expires old versions of its datasets, also
    on the schedule `<application>_discard_daily`; `<application>_compact` compacts its change streams' tables, also
    on the schedule `<application>_compact_hourly`; `<application>_version_action` pins, rolls back, revokes, accepts
    or removes one version. A dataset whose versions are partitions is not part of the application's job; it has the
    job `<dataset>_versions`, and the sensor `<dataset>_new_versions` if a stream or files list the
    versions. All sensors and schedules are off by default.

    Ops are in the pools `adjunct/dataset/<name>` and `adjunct/application/<name>`; with the granularity "run" and a
    limit of 1 (as in `prepare_dagster_home`) runs wait for each other; otherwise the second run waits for the
    application's lease. `iceberg` maps dataset names to Iceberg tables: `<application>_iceberg` registers the served
    versions there, also on the schedule `<application>_iceberg_daily`. `translator` chooses keys, groups and owners;
    `lake` is a URL (default: `ADJUNCT_LAKE`, else `.adjunct/lake`). `preview_rows` shows up to 50 entries or records of
    datasets and output streams in Dagster; `link_code` links assets to the lines of this machine's files where they are
    declared. Raises ConfigurationError if two applications declare one dataset differently or write the same output,
    and for an Iceberg table of a dataset that none of them stores.
    """
    apps = (app, *more)
    _reject_duplicate_names(apps)
    rules = launch_rules(launch_when, tuple(application.name for application in apps))
    if isinstance(preview_rows, bool) or not isinstance(preview_rows, int) or not 0 <= preview_rows <= MAX_PREVIEW_ROWS:
        raise ConfigurationError(
            f"build_definitions(): preview_rows must be an integer from 0 to {MAX_PREVIEW_ROWS}, not {preview_rows!r}.",
            argument="preview_rows",
        )
    graph = AssetGraph(translator or AdjunctTranslator(), preview_rows, link_code)
    own = {application.name: graph.add(application) for application in apps}
    launched = [
        _launched_jobs(graph, application, own[application.name], rules[application.name]) for application in apps
    ]
    launched.append(_partition_jobs(graph))
    stored = {application.name: graph.stored_datasets(application.name) for application in apps}
    upkeep = [scheduled for application in apps for scheduled in _upkeep_jobs(application, stored[application.name])]
    upkeep += [(job, upkeep_schedule("iceberg", job)) for job in iceberg_jobs(stored, iceberg or {})]
    lake_resource, spark_resource = _resources(lake)
    return Definitions(
        assets=[*graph.external_specs(), *graph.built_assets()],
        jobs=[*(job for jobs, _ in launched for job in jobs), *(job for job, _ in upkeep)],
        schedules=[schedule for _, schedule in upkeep if schedule is not None],
        sensors=[sensor for _, sensors in launched for sensor in sensors],
        resources={"adjunct_lake": lake_resource, "adjunct_spark": spark or spark_resource},
        executor=in_process_executor,
    )


def _launched_jobs(
    graph: AssetGraph, app: Application, own: list[AssetKey], rule: LaunchWhen
) -> tuple[list[LaunchedJob], list[SensorDefinition]]:
    """Return the jobs that run an application and set its startpoints, with their sensors.

    `own` are the assets that its main job materializes. Without any, an application has only partitioned datasets, so
    there is no main job.
    """
    if not own:
        return [], []
    job = _application_job(app, own)
    followed = any(member.dataset.follows_changes for member in graph.stored_datasets(app.name))
    sensors = [new_records_sensor(app, job, own, rule), restart_sensor(app, job, own, graph.output_keys(app.name))]
    sensors += delivered_sensors(app.name, graph.delivered_groups(app.name), job)
    if not app.inputs and not followed:
        return [job], sensors
    if app.startpoints:
        sensors.append(startpoint_sensor(app, job, own))
    return [job, startpoint_job(app)], sensors


def _upkeep_jobs(
    app: Application, members: Sequence[DatasetAsset]
) -> Iterator[tuple[JobDefinition, ScheduleDefinition | None]]:
    """Yield the jobs that maintain an application's stored datasets, with their schedules."""
    if members:
        job = discard_job(app.name, members)
        yield job, upkeep_schedule("discard", job)
    if followed := [member for member in members if member.dataset.follows_changes]:
        job = compact_job(app.name, followed)
        yield job, upkeep_schedule("compact", job)
    if bounded := [member for member in members if not member.dataset.follows_changes]:
        yield version_job(app.name, bounded), None


def _partition_jobs(graph: AssetGraph) -> tuple[list[LaunchedJob], list[SensorDefinition]]:
    """Return the jobs of the datasets whose versions are partitions, with their sensors."""
    jobs: list[LaunchedJob] = []
    sensors = []
    for member in graph.partitioned_datasets():
        jobs.append(partition_job(member))
        if not is_advanced_by_partition(member.dataset):
            sensors.append(new_versions_sensor(member, jobs[-1]))
    return jobs, sensors


def _application_job(app: Application, own: list[AssetKey]) -> UnresolvedAssetJobDefinition:
    """Return the job that runs a whole application in one process."""
    description = "\n\n".join(filter(None, [app.description, *map(describe_partitions, app.datasets)]))
    return define_asset_job(
        to_dagster_name(app.name),
        selection=own,
        description=description or None,
        executor_def=in_process_executor,
        tags={"adjunct/application": app.name},
    )


def _reject_duplicate_names(apps: Sequence[Application]) -> None:
    """Raise ConfigurationError if two applications' jobs and sensors would have the same names."""
    known: dict[str, Application] = {}
    for app in apps:
        other = known.setdefault(to_dagster_name(app.name), app)
        if other is not app:
            raise ConfigurationError(
                f"applications {other.name!r} and {app.name!r} have the same job name {to_dagster_name(app.name)!r}: "
                "Dagster writes '-' as '_'.",
                "Rename one of them, and pass each application only once.",
                application=app.name,
            )


@cache
def _resources(lake: str | None) -> tuple[LakeResource, SparkResource]:
    """Return the same objects for the same lake, because Definitions.merge rejects two resources of one name."""
    return LakeResource(url=lake), SparkResource(lake=lake)


_CONFIG = """\
# Run one run per application and dataset at a time, however it is launched: Adjunct's ops are in pools, and a run
# waits in the queue until the pools of all its ops are free. With other settings, or if two runs use a pool for the
# first time in the same second, the second run waits for the application's lease.
concurrency:
  pools:
    granularity: run
    default_limit: 1
# End runs whose process never starts, or does not stop when cancelled: sensors launch nothing while a run is in
# progress.
run_monitoring:
  enabled: true
  start_timeout_seconds: 600
  cancel_timeout_seconds: 300
telemetry:
  enabled: false
nux:
  enabled: false
"""


def prepare_dagster_home(folder: Path) -> Path:
    """Create the folder as a DAGSTER_HOME unless it exists, and return its absolute path."""
    home = folder.resolve()
    config = home / "dagster.yaml"
    with translate_file_errors(home, "the home of Dagster"):
        home.mkdir(parents=True, exist_ok=True)
        if not config.exists():
            config.write_text(_CONFIG, encoding="utf-8")
    return home
