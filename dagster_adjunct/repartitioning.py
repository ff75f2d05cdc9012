"""Other partition counts for streams and datasets that exist."""

from __future__ import annotations

from dagster_adjunct.assets.rebucketing.rebucketing import RebucketReport
from dagster_adjunct.orchestration.maintenance.repartition import (
    RepartitionReport,
    repartition_dataset,
    repartition_stream,
)

__all__ = [
    "RebucketReport",
    "RepartitionReport",
    "repartition_dataset",
    "repartition_stream",
]
