"""Sums of wide decimals lose nothing, however windows were cut into batches: Spark itself would round them."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.windows import Mean, Sum

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["decimal(38,18)", "decimal(28,10)", "decimal(20,2)", "decimal(38,0)"])
@pytest.mark.parametrize("made", [Sum, Mean])
def test_what_was_kept_and_what_is_new_are_added_without_rounding(
    spark: SparkSession, made: type[Sum | Mean], kind: str
) -> None:
    from pyspark.sql import functions as F

    partial = made("d").partials("total", kind)[-1]
    least = Decimal(1).scaleb(-int(kind.partition(",")[2].rstrip(")")))
    frame = spark.createDataFrame([(Decimal(7), least)], f"old {partial.type}, new {partial.type}")
    (row,) = frame.select(F.expr(partial.added.format("old", "new")).cast(partial.type).alias("sum")).collect()
    assert row.sum == 7 + least
