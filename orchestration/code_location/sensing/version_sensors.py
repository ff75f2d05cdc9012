"""Sensors that launch the making of a bounded dataset's versions as they are delivered whole."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster import (
    DefaultSensorStatus,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    sensor,
)

from dagster_adjunct.assets.declaration.dataset_inputs import QuerySource
from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.sensing.cursor import read_cursor, write_cursor
from dagster_adjunct.orchestration.code_location.sensing.run_requests import (
    SECONDS_BETWEEN_LOOKS,
    Asked,
    Skip,
    ask,
)
from dagster_adjunct.orchestration.code_location.shared.lake_resource import LakeResource
from dagster_adjunct.orchestration.code_location.shared.runs import in_progress

if TYPE_CHECKING:
    from dagster import JobDefinition
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.code_location.assets.dataset_assets import DatasetAsset
    from dagster_adjunct.resources.objects import Lake


def new_versions_sensor(
    member: "DatasetAsset",
    job: "JobDefinition | UnresolvedAssetJobDefinition",
) -> SensorDefinition:
    """Return a sensor that launches `job` for the next version that has been delivered whole, as its partition.

    Where names come as they come, the version's name becomes a partition. A run that did not build it is asked for
    again ever more rarely.
    """
    dataset = member.dataset

    @sensor(
        name=f"{dagster_name(dataset.name)}_new_versions",
        job=job,
        minimum_interval_seconds=SECONDS_BETWEEN_LOOKS,
        default_status=DefaultSensorStatus.STOPPED,
        description=f"Builds versions of {dataset.name} as they are delivered.",
    )
    def evaluate(context: SensorEvaluationContext, adjunct_lake: LakeResource) -> SensorResult | SkipReason:
        from dagster_adjunct.orchestration.code_location.assets.version_partitions import known_partitions

        lake = adjunct_lake.open()
        version, awaited = _delivered(lake, [dataset])
        if version is None:
            return SkipReason(f"No new version; {awaited}.")
        if not known_partitions(dataset, context.instance, [version]):
            return SkipReason(f"Version {version} is delivered, and is none of the partitions that are declared.")
        return _asked_for(
            context, lake, job.name, [member], f"{dataset.name}:{lake.id}", version, partition_key=version
        )

    return evaluate


def is_delivered(dataset: "AdjunctDataset") -> bool:
    """Whether versions of a dataset come by themselves, as markers or folders, and none of them is a partition."""
    return dataset.kind == "bounded" and dataset.versions is None and not isinstance(dataset.input, QuerySource)


def delivered_sensor(
    unit: "Sequence[DatasetAsset]",
    job: "JobDefinition | UnresolvedAssetJobDefinition",
) -> SensorDefinition:
    """Return a sensor that materialises a dataset's asset, within `job`, when a version of it is delivered whole.

    All partitions of its stream then have its marker, or its folder is complete. The members of a version set, which
    are published together, share one: it waits until all of them have the version.
    """
    datasets = [member.dataset for member in unit]
    name = datasets[0].version_set or datasets[0].name

    @sensor(
        name=f"{dagster_name(name)}_delivered",
        job=job,
        minimum_interval_seconds=SECONDS_BETWEEN_LOOKS,
        default_status=DefaultSensorStatus.STOPPED,
        description=f"Publishes versions of {', '.join(dataset.name for dataset in datasets)} as they are delivered.",
    )
    def evaluate(context: SensorEvaluationContext, adjunct_lake: LakeResource) -> SensorResult | SkipReason:
        lake = adjunct_lake.open()
        version, awaited = _delivered(lake, datasets)
        if version is None:
            return SkipReason(f"No new version; {awaited}.")
        keys = [member.key for member in unit]
        return _asked_for(context, lake, job.name, unit, f"{name}:{lake.id}:delivered", version, asset_selection=keys)

    return evaluate


def _delivered(lake: "Lake", datasets: "Sequence[AdjunctDataset]") -> tuple[str | None, str]:
    from dagster_adjunct.orchestration.planner.lake_catalog import systems_of
    from dagster_adjunct.orchestration.step.input_progress import delivered_to_all

    return delivered_to_all(lake, systems_of(datasets, lake), datasets)


def _asked_for(
    context: SensorEvaluationContext,
    lake: "Lake",
    job: str,
    unit: "Sequence[DatasetAsset]",
    name: str,
    version: str,
    **options: object,
) -> SensorResult | SkipReason:
    what = f"Version {version} is delivered"
    if in_progress(context.instance, job, {member.key for member in unit}):
        return SkipReason(f"{what}; a run is already in progress.")
    asked, note = read_cursor(Asked, context.cursor)
    if note:
        context.log.warning(note)
    decision = ask(name, what, {"version": version}, asked, lake.now().timestamp())
    if isinstance(decision, Skip):
        return SkipReason(decision.reason)
    request = RunRequest(run_key=decision.run_key, **options)  # type: ignore[arg-type]
    return SensorResult(run_requests=[request], cursor=write_cursor(decision.asked))
