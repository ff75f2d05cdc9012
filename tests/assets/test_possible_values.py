"""What `values_in` allows, held against the type of the column: as Spark does, which refuses
what is impossible.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.assets.validation.validators import find_impossible_values

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VALUES = [
    "a",
    "1",
    "2020-01-01",
    "true",
    "no",
    "nan",
    "-inf",
    "",
    1,
    1.5,
    True,
    Decimal("1.5"),
    date(2020, 1, 1),
    datetime(2020, 1, 1, tzinfo=UTC),
    b"a",
    None,
]
ROWS = {
    "int": "1",
    "bigint": "2L",
    "double": "1.5D",
    "decimal(4,1)": "cast(1.5 as decimal(4,1))",
    "boolean": "true",
    "date": "date'2020-01-01'",
    "timestamp": "timestamp'2020-01-01'",
    "string": "'1'",
    "binary": "cast('a' as binary)",
}


def test_texts_of_the_right_kind_and_values_that_are_not_known_may_be() -> None:
    assert find_impossible_values(["1", 2, 2.0, None], "int") == []
    assert find_impossible_values(["x", True, date(2020, 1, 1)], "int") == [
        "x",
        True,
        date(2020, 1, 1),
    ]
    assert find_impossible_values(["NaN", "-Infinity"], "double") == []
    assert find_impossible_values(["NaN"], "int") == ["NaN"]
    assert find_impossible_values(["yes", "F", True], "boolean") == []
    assert find_impossible_values(["maybe", 1], "boolean") == ["maybe", 1]
    assert find_impossible_values([object()], "int") == []


@pytest.mark.spark
def test_spark_refuses_whatever_is_impossible(spark: SparkSession) -> None:
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    tried, accepted = 0, []
    for kind, row in ROWS.items():
        frame = spark.sql(f"SELECT {row} AS c")
        for value in find_impossible_values(VALUES, kind):
            tried += 1
            with contextlib.suppress(PySparkException):
                frame.where(~F.col("c").isin(value)).collect()
                accepted.append((kind, value))
    assert accepted == []
    assert tried > 50
