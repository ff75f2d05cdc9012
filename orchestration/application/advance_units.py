"""Which datasets advance together: all members of a version set in one go; and which ones a run advances at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.inputs_besides_streams import QuerySource
from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset

Unit = tuple["AdjunctDataset", ...]


def units_of(datasets: Iterable[AdjunctDataset], where: str) -> tuple[Unit, ...]:
    """Return the datasets in groups that advance together, in order of declaration; `where` is for the error.

    Raises ConfigurationError for a version set of which only one member is declared there.
    """
    units: dict[str, list[AdjunctDataset]] = {}
    for dataset in datasets:
        units.setdefault(f"set {dataset.version_set}" if dataset.version_set else dataset.name, []).append(dataset)
    for unit in units.values():
        if unit[0].version_set and len(unit) == 1:
            raise ConfigurationError(
                f"{where} declares dataset {unit[0].name!r} of the version set {unit[0].version_set!r} and none of its "
                "other members, which are published together with it.",
                "Declare the other members too, with app.table(…); they need not be joined.",
                dataset=unit[0].name,
            )
    return tuple(map(tuple, units.values()))


def made_by_partition(dataset: AdjunctDataset) -> bool:
    """Whether the dataset's versions are made one by one, as they are asked for: it never advances by itself."""
    return dataset.versions is not None and isinstance(dataset.input, QuerySource)


def partitions_note(dataset: AdjunctDataset) -> str:
    """Return who makes the versions of a dataset that has them as partitions; "" for any other dataset."""
    if dataset.versions is None:
        return ""
    job = f"the Dagster job {dagster_name(dataset.name)}_versions"
    if made_by_partition(dataset):
        command = f"adjunct dataset advance {dataset.name} MODULE:APP --partition VERSION"
        return (
            f"Dataset {dataset.name} has a version for each partition, made when it is asked for: no run of the "
            f"application makes one. Ask with {job}, or {command}."
        )
    sensor = f"the sensor {dagster_name(dataset.name)}_new_versions"
    return (
        f"Dataset {dataset.name} has its versions as partitions: adjunct run takes in what is delivered, and the "
        f"application's Dagster job, which has no partitions, does not. There {job} does, launched by {sensor}."
    )


def advances_alone(dataset: AdjunctDataset) -> bool:
    """Whether a run brings the dataset up to date before its batches: it is stored, and not made by partitions."""
    return not made_by_partition(dataset) and dataset.following.persistent
