"""Building a table anew because somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.advance_table import advance_unbounded
from dagster_adjunct.assets.versions.advance_report import OnStage, ignore
from dagster_adjunct.assets.versions.operator_actions import explained
from dagster_adjunct.assets.writing.runtime import Runtime
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.spark.given_session import starter_of
from dagster_adjunct.resources.spark.spark_errors import unwrapped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.advance_report import AdvanceReport
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


@unwrapped()
def rebuild_dataset(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    spec: AdjunctDataset,
    spark: SparkSession | Callable[[], SparkSession],
    *,
    reason: str,
    by: str,
    on_stage: OnStage = ignore,
) -> AdvanceReport:
    """Build an unbounded dataset anew from its stream's oldest offset, or from its bulk snapshot.

    It is built beside the table that is served, which stays until the new one has reached its target, and may have
    other columns. A run that ends before is gone on with by the next advance. Raises DatasetError for a bounded
    dataset, and where the stream does not tell of every key any more; ConfigurationError without a reason.
    """
    spark = starter_of(spark)
    if not spec.follows_changes:
        raise DatasetError(
            f"dataset {spec.name!r} is bounded: there is nothing to build anew from a stream.",
            "Deliver a new version, or publish an earlier one: adjunct dataset rollback.",
            dataset=spec.name,
        )
    explained("rebuild", spec.name, reason, by)
    return advance_unbounded(Runtime(lake, systems, spark, by), spec, rebuild=reason, on_stage=on_stage)
