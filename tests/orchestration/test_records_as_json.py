"""What is left out is handed on as JSON with all that it was: nulls, and times to the
microsecond.
"""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.orchestration.operators.made_records import to_json_object

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
def test_a_record_as_json_has_its_nulls_and_its_microseconds(spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    time = dt.datetime(2026, 3, 2, 12, 3, 0, 123_456, dt.UTC)
    frame = spark.createDataFrame(
        [("home", time, time.replace(tzinfo=None), None)],
        "page string, at timestamp, local timestamp_ntz, n int",
    )
    (row,) = frame.select(
        to_json_object([F.col(name) for name in frame.columns]).alias("record")
    ).collect()
    assert json.loads(row.record) == {
        "page": "home",
        "at": "2026-03-02T12:03:00.123456Z",
        "local": "2026-03-02T12:03:00.123456",
        "n": None,
    }
