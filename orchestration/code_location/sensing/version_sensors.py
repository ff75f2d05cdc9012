"""Sensors that launch the making of a bounded dataset's versions as they are delivered whole."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from dagster import RunRequest, SensorDefinition

from dagster_adjunct.assets.declaration.inputs_besides_streams import QuerySource
from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.sensing.run_requests import LastRequest, Skip, ask
from dagster_adjunct.orchestration.code_location.sensing.tick import Tick, job_sensor
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.stored_documents import StoredDocument

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

        version, awaited = _delivered(tick.lake, [member])
        if version is None:
            return Skip(f"No new version; {awaited}.")
        if not known_partitions(dataset, tick.context.instance, [version]):
            return Skip(f"Version {version} is delivered, and is none of the partitions that are declared.")
        what = f"Version {version} is delivered"
        if tick.in_progress({member.key}):
            return Skip(f"{what}; a run is already in progress.")
        return tick.ask(f"{dataset.name}:{tick.lake.id}", what, {"version": version}, partition_key=version)

    return job_sensor(
        f"{dagster_name(dataset.name)}_new_versions",
        job,
        f"Builds versions of {dataset.name} as they are delivered.",
        evaluate,
    )


def is_delivered(dataset: "AdjunctDataset") -> bool:
    """Whether versions of a dataset come by themselves, as markers or folders, and none of them is a partition."""
    return not dataset.follows_changes and dataset.versions is None and not isinstance(dataset.input, QuerySource)


class DeliveredCursor(StoredDocument):
    """What was asked for last, and the version that was seen in the tick before."""

    asked: LastRequest = LastRequest()
    seen: str = ""


def delivered_sensors(
    application: str, units: "Sequence[Sequence[DatasetAsset]]", job: "LaunchedJob"
) -> list[SensorDefinition]:
    """Return sensors that materialise datasets' assets, within `job`, when versions of them are delivered whole.

    All partitions of a stream then have their marker, or a folder is complete. There is one for each dataset; the
    members of a version set, which are published together, share one: it waits until all of them have the version.

    One run takes all that is delivered: where several of these sensors are on, the first by name launches it for all. A
    run that is launched for new records takes it, too: where the sensor for these is on, it has one look to launch it.
    """
    by_name = {f"{dagster_name(_name(unit))}_delivered": unit for unit in units}
    for_records = f"{dagster_name(application)}_new_records"

    def evaluate(tick: Tick, mine: str) -> RunRequest | Skip:
        lake, unit, cursor = tick.lake, by_name[mine], tick.recall(DeliveredCursor)
        version, awaited = _delivered(lake, unit)
        if version is None:
            return Skip(f"No new version; {awaited}.")
        what = f"Version {version} is delivered"
        if tick.in_progress({member.key for member in unit}):
            return Skip(f"{what}; a run is already in progress.")
        on = tick.switched_on()
        if for_records in on and cursor.seen != version:
            tick.remember(cursor.model_copy(update={"seen": version}))
            return Skip(f"{what}; {for_records} may launch a run that takes it, else the next look here does.")
        together = {mine: version}
        for other in (by_name.keys() & on) - {mine}:
            with suppress(AdjunctError):  # its own sensor tells it
                there, _ = _delivered(lake, by_name[other])
                together |= {other: there} if there is not None else {}
        first = min(together)
        if first != mine:
            return Skip(f"{what}; {first} launches the run that takes it, too.")
        decision = ask(f"{_name(unit)}:{lake.id}:delivered", what, together, cursor.asked, lake.now().timestamp())
        if isinstance(decision, Skip):
            return decision
        tick.remember(DeliveredCursor(asked=decision.asked, seen=version))
        keys = [member.key for name in sorted(together) for member in by_name[name]]
        return RunRequest(run_key=decision.run_key, asset_selection=keys)

    return [
        job_sensor(
            name,
            job,
            f"Publishes versions of {', '.join(member.dataset.name for member in unit)} as they are delivered.",
            partial(evaluate, mine=name),
        )
        for name, unit in by_name.items()
    ]


def _name(unit: "Sequence[DatasetAsset]") -> str:
    return unit[0].dataset.version_set or unit[0].dataset.name


def _delivered(lake: "Lake", unit: "Sequence[DatasetAsset]") -> tuple[str | None, str]:
    from dagster_adjunct.orchestration.planner.lake_catalog import systems_of
    from dagster_adjunct.orchestration.step.progress.input_progress import delivered_to_all

    datasets = [member.dataset for member in unit]
    return delivered_to_all(lake, systems_of(datasets, lake), datasets)
