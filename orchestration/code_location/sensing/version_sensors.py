"""Sensors that launch the making of a bounded dataset's versions as they are delivered whole."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster import RunRequest, SensorDefinition

from dagster_adjunct.assets.declaration.inputs_besides_streams import QuerySource
from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.sensing.run_requests import Skip
from dagster_adjunct.orchestration.code_location.sensing.tick import Tick, job_sensor

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.code_location.assets.dataset_assets import DatasetAsset
    from dagster_adjunct.orchestration.code_location.sensing.tick import LaunchedJob
    from dagster_adjunct.resources.objects import Lake


def new_versions_sensor(member: "DatasetAsset", job: "LaunchedJob") -> SensorDefinition:
    """Return a sensor that launches `job` for the next version that has been delivered whole, as its partition.

    Where names come as they come, the version's name becomes a partition. A run that did not build it is asked for
    again ever more rarely.
    """
    dataset = member.dataset

    def evaluate(tick: Tick) -> RunRequest | Skip:
        from dagster_adjunct.orchestration.code_location.assets.version_partitions import known_partitions

        version, awaited = _delivered(tick.lake, [dataset])
        if version is None:
            return Skip(f"No new version; {awaited}.")
        if not known_partitions(dataset, tick.context.instance, [version]):
            return Skip(f"Version {version} is delivered, and is none of the partitions that are declared.")
        return _ask_for(tick, version, [member], f"{dataset.name}:{tick.lake.id}", partition_key=version)

    return job_sensor(
        f"{dagster_name(dataset.name)}_new_versions",
        job,
        f"Builds versions of {dataset.name} as they are delivered.",
        evaluate,
    )


def is_delivered(dataset: "AdjunctDataset") -> bool:
    """Whether versions of a dataset come by themselves, as markers or folders, and none of them is a partition."""
    return not dataset.follows_changes and dataset.versions is None and not isinstance(dataset.input, QuerySource)


def delivered_sensor(unit: "Sequence[DatasetAsset]", job: "LaunchedJob") -> SensorDefinition:
    """Return a sensor that materialises a dataset's asset, within `job`, when a version of it is delivered whole.

    All partitions of its stream then have its marker, or its folder is complete. The members of a version set, which
    are published together, share one: it waits until all of them have the version.
    """
    datasets = [member.dataset for member in unit]
    name = datasets[0].version_set or datasets[0].name
    keys = [member.key for member in unit]

    def evaluate(tick: Tick) -> RunRequest | Skip:
        version, awaited = _delivered(tick.lake, datasets)
        if version is None:
            return Skip(f"No new version; {awaited}.")
        return _ask_for(tick, version, unit, f"{name}:{tick.lake.id}:delivered", asset_selection=keys)

    return job_sensor(
        f"{dagster_name(name)}_delivered",
        job,
        f"Publishes versions of {', '.join(dataset.name for dataset in datasets)} as they are delivered.",
        evaluate,
    )


def _delivered(lake: "Lake", datasets: "Sequence[AdjunctDataset]") -> tuple[str | None, str]:
    from dagster_adjunct.orchestration.planner.lake_catalog import systems_of
    from dagster_adjunct.orchestration.step.progress.input_progress import delivered_to_all

    return delivered_to_all(lake, systems_of(datasets, lake), datasets)


def _ask_for(
    tick: Tick, version: str, unit: "Sequence[DatasetAsset]", name: str, **options: object
) -> RunRequest | Skip:
    what = f"Version {version} is delivered"
    if tick.in_progress({member.key for member in unit}):
        return Skip(f"{what}; a run is already in progress.")
    return tick.ask(name, what, {"version": version}, **options)
