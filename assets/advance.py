"""Brings a dataset of either kind up to date with its input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from assets.dataset import AdjunctDataset
    from assets.report import AdvanceReport
    from resources.objects.lake import Lake
    from resources.streams.system import StreamSystem


def advance_dataset(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    spec: AdjunctDataset,
    spark: Callable[[], SparkSession],
    *,
    by: str,
) -> AdvanceReport:
    """Seal the complete versions of a bounded dataset, or bootstrap and follow an unbounded one.

    `spark` is called only when there is something to build. Safe to call again after any failure; several
    datasets may advance at the same time, in threads of one session.
    """
    if spec.kind == "bounded":
        from assets.bounded import advance_bounded

        return advance_bounded(lake, systems, spec, spark, by=by)
    from assets.unbounded import advance_unbounded

    return advance_unbounded(lake, systems, spec, spark, by=by)
