"""Versions as partitions of a dataset's asset: by day, by names that are known, or by names that come."""

from typing import TYPE_CHECKING

from dagster import (
    DagsterInstance,
    DailyPartitionsDefinition,
    DynamicPartitionsDefinition,
    PartitionsDefinition,
    StaticPartitionsDefinition,
)

from dagster_adjunct.assets.declaration.discard_policy import natural_order

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset


def partitions_of(dataset: "AdjunctDataset") -> PartitionsDefinition[str]:
    """Return the partitions of a dataset that declares them. A day counts from its beginning, UTC.

    Names that come are dynamic partitions, `adjunct/<dataset>`: what a run publishes is added to them.
    """
    declared = dataset.versions
    assert declared is not None
    if declared.by == "day":
        assert declared.start is not None
        # Reference data of a day is often delivered on that day: the current one is a partition too.
        return DailyPartitionsDefinition(start_date=declared.start, end_offset=1)
    if declared.names:
        return StaticPartitionsDefinition(sorted(declared.names, key=natural_order))
    return DynamicPartitionsDefinition(name=f"adjunct/{dataset.name}")


def known_partitions(dataset: "AdjunctDataset", instance: DagsterInstance, names: "Iterable[str]") -> list[str]:
    """Return those of the versions' names that are partitions; where names come as they come, they become some."""
    partitions = partitions_of(dataset)
    wanted = list(dict.fromkeys(names))
    if not isinstance(partitions, DynamicPartitionsDefinition):
        there = set(partitions.get_partition_keys())
        return [name for name in wanted if name in there]
    there = set(instance.get_dynamic_partitions(str(partitions.name)))
    missing = [name for name in wanted if name not in there]
    if missing:
        instance.add_dynamic_partitions(str(partitions.name), missing)
    return wanted
