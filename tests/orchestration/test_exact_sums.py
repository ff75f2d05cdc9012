"""Sums of wide decimals lose nothing, however windows were cut into batches: Spark itself would round them."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal, localcontext
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


MEANS = {
    "decimal(28,10)": ([Decimal(1), Decimal(2), Decimal(2)], 14),
    "decimal(38,18)": ([Decimal("-1.000000000000000001"), Decimal(-2), Decimal(-2)], 22),
    "decimal(38,0)": ([Decimal(10) ** 30, Decimal(10) ** 30, Decimal(1)], 4),
    "decimal(20,2)": ([Decimal("123456789012345678.91"), Decimal("0.01"), Decimal("-0.03")], 6),
    "decimal(38,21)": ([Decimal(1), Decimal(2), Decimal(2)], 25),
    "decimal(38,30)": ([Decimal(1), Decimal(2), Decimal(2)], 30),
    "decimal(24,22)": ([Decimal(1), Decimal(2), Decimal(2)], 26),
    "decimal(5,2)": ([Decimal("0.01"), Decimal("0.01"), Decimal("0.03")], 6),
}


@pytest.mark.spark
@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_has_all_the_digits_that_it_declares(spark: SparkSession, kind: str) -> None:
    from pyspark.sql import functions as F

    values, scale = MEANS[kind]
    mean = Mean("d")
    count, total = mean.partials("mean", kind)
    frame = spark.createDataFrame([(value,) for value in values], f"d {kind}")
    kept = frame.agg(F.expr(count.made).alias(count.name), F.expr(total.made).alias(total.name))
    made = kept.select(F.expr(mean.result("mean", kind)).alias("mean"))
    assert made.dtypes == [("mean", mean.returns_of(kind))]
    with localcontext(prec=80):
        exact = (sum(values, Decimal(0)) / 3).quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP)
    assert made.collect() == [(exact,)]
