"""Which datasets advance together, and how: one by itself, or all members of a version set in one go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from assets.report import StageEvent, ignore
from assets.sources.inputs import QuerySource
from resources.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from assets.dataset import AdjunctDataset
    from assets.report import AdvanceReport, OnStage
    from resources.objects import Lake
    from resources.streams import StreamSystem

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
            )
    return tuple(map(tuple, units.values()))


def made_by_partition(dataset: AdjunctDataset) -> bool:
    """Whether the dataset's versions are made one by one, as they are asked for: it never advances by itself."""
    return dataset.versions is not None and isinstance(dataset.input, QuerySource)


def advance_together(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    unit: Sequence[AdjunctDataset],
    spark: Callable[[], SparkSession],
    *,
    by: str,
    on_stage: OnStage = ignore,
) -> list[AdvanceReport]:
    """Bring one dataset, or the members of one version set, up to date with their input; a report for each.

    Where a version was published, what the policy lets go by then is discarded: the last stage of its cycle.
    """
    from assets import advance_dataset, advance_version_set

    if unit[0].version_set is not None:
        reports = advance_version_set(lake, systems, unit, spark, by=by, on_stage=on_stage)
    else:
        reports = [advance_dataset(lake, systems, unit[0], spark, by=by, on_stage=on_stage)]
    return [discard_after(lake, dataset, report, by, on_stage) for dataset, report in zip(unit, reports, strict=True)]


def discard_after(
    lake: Lake, dataset: AdjunctDataset, report: AdvanceReport, by: str, on_stage: OnStage
) -> AdvanceReport:
    """Discard what a new version has made needless; return the report with the time that this took."""
    from orchestration.retention import discard_all

    if dataset.kind != "bounded" or not report.sealed:
        return report
    began = time.perf_counter()
    discard_all(lake, {dataset.name: dataset}, datasets=[dataset.name], by=by)
    took = time.perf_counter() - began
    on_stage(StageEvent(dataset.name, None, "discard", took))
    return replace(report, seconds={**report.seconds, "discard": took})
