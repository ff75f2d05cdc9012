"""Brings a dataset of either kind up to date with its input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.advance_report import OnStage, ignore
from dagster_adjunct.assets.writing.runtime import Runtime
from dagster_adjunct.resources.spark.given_session import starter_of
from dagster_adjunct.resources.spark.spark_errors import unwrapped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.advance_report import AdvanceReport
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


@unwrapped()
def advance_dataset(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    spec: AdjunctDataset,
    spark: SparkSession | Callable[[], SparkSession],
    *,
    by: str,
    partition: str | None = None,
    make_current: bool = False,
    on_stage: OnStage = ignore,
) -> AdvanceReport:
    """Publish the complete versions of a bounded dataset, or bootstrap and follow an unbounded one.

    A local table is only compacted, where that is due: its application's batches write it.

    `spark` is called only when there is something to build. Safe to call again after any failure; several
    datasets may advance at the same time, in threads of one session. `partition` and `make_current` are for
    bounded datasets with version partitions (see `advance_bounded`); `on_stage` hears of each stage's end, and of
    each build's begin.
    """
    runtime = Runtime(lake, systems, starter_of(spark), by)
    return advance(runtime, spec, partition=partition, make_current=make_current, on_stage=on_stage)


@unwrapped()
def advance(
    runtime: Runtime,
    spec: AdjunctDataset,
    *,
    partition: str | None = None,
    make_current: bool = False,
    on_stage: OnStage = ignore,
) -> AdvanceReport:
    """Bring a dataset up to date as `advance_dataset` does."""
    if not spec.follows_changes:
        from dagster_adjunct.assets.bounded.advance_versions import advance_bounded

        return advance_bounded(runtime, spec, partition=partition, make_current=make_current, on_stage=on_stage)
    if spec.is_local:
        from dagster_adjunct.assets.unbounded.local_table_upkeep import advance_local

        return advance_local(runtime, spec, on_stage=on_stage)
    from dagster_adjunct.assets.unbounded.advance_table import advance_unbounded

    return advance_unbounded(runtime, spec, on_stage=on_stage)
