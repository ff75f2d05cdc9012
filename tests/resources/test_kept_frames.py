"""Frames that are kept for several readers are let go without Spark planning any of them anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.resources.spark.tuning import PersistedFrames

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def _plans_of(spark: SparkSession) -> list[str]:
    """Return which plans Spark keeps at the moment; one that was planned anew is another."""
    cached = spark._jsparkSession.sharedState().cacheManager()
    field: Any = cached.getClass().getDeclaredField("cachedData")
    field.setAccessible(True)
    entries = field.get(cached)
    identity = spark._jvm.java.lang.System.identityHashCode
    return [str(identity(entries.apply(n).cachedRepresentation())) for n in range(entries.size())]


@pytest.fixture
def plans(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What Spark kept after each time that it let go of a frame."""
    from pyspark.sql.classic.dataframe import DataFrame as Frame

    seen: list[list[str]] = []
    unpersist = Frame.unpersist

    def counted(frame: DataFrame, blocking: bool = False) -> DataFrame:
        unpersist(frame, blocking)
        seen.append(_plans_of(spark))
        return frame

    monkeypatch.setattr(Frame, "unpersist", counted)
    return seen


def test_no_frame_is_planned_again_when_those_that_it_reads_are_let_go(
    spark: SparkSession, plans: list[list[str]]
) -> None:
    spark.catalog.clearCache()  # what other tests of the session have left
    kept = PersistedFrames()
    first = kept.keep(spark.range(3))
    second = kept.keep(first.selectExpr("id + 1 AS id"))
    kept.keep(second.selectExpr("id * 2 AS id"))
    before = _plans_of(spark)

    kept.release()

    assert len(before) == 3
    assert all(set(after) < set(before) for after in plans), "Spark planned a frame anew"
    assert plans[-1] == []
    kept.release()
    assert len(plans) == 3


def test_a_frame_that_is_kept_is_computed_once(spark: SparkSession) -> None:
    kept = PersistedFrames()
    frame = kept.keep(spark.range(2).selectExpr("uuid() AS once"))

    assert frame.collect() == frame.collect()

    kept.release()
