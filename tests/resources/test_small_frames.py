"""Frames of few rows as Arrow tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.resources.spark.tasks import fetch_small

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
def test_members_that_spark_declares_not_null_may_be_in_null_structs(spark: SparkSession) -> None:
    """An entry of a map has the member `key`, which is never null, and `toArrow` fails for the null
    entry of an outer explode.
    """
    maps = spark.createDataFrame([(1, {"a": 5}), (2, {}), (3, None)], "id int, m map<string,int>")
    exploded = maps.selectExpr("id", "explode_outer(map_entries(m)) as entry", "1 as one")
    frame = exploded.selectExpr("*", "array(entry) as entries", "struct(entry) as whole")
    entry = {"key": "a", "value": 5}
    assert fetch_small(frame, 1_000).to_pylist() == [
        {"id": number, "entry": each, "one": 1, "entries": [each], "whole": {"entry": each}}
        for number, each in ((1, entry), (2, None), (3, None))
    ]
