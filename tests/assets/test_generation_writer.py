"""Arrow's writer of a generation against Spark's: the same rows make the same files, byte by
byte.
"""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.assets.generation import ARROW, SPARK
from dagster_adjunct.resources.bucketing.files import BucketLayout
from dagster_adjunct.resources.bucketing.hashing import row_digests, row_hash
from dagster_adjunct.resources.bucketing.writer import WriteOptions
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

SCHEMA = Schema.of(
    k="string",
    b="boolean",
    t="tinyint",
    i="int",
    n="bigint",
    f="float",
    x="double",
    d="date",
    at="timestamp",
    raw="binary",
    small="decimal(9,2)",
    large="decimal(38,4)",
)
LAYOUT = BucketLayout(SCHEMA, ("k",), 3, key=("k",))
FOLDER = "datasets/d/data/attempt-1"


def numbers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


ROW = st.tuples(
    st.sampled_from(["a", "b", "c", "", "ü" * 20, "k" * 100]),
    *(
        st.none() | values
        for values in (
            st.booleans(),
            numbers(8),
            numbers(32),
            numbers(64),
            st.floats(width=32),
            st.floats(),
            st.dates(date(1900, 1, 1)),
            st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),
            st.binary(max_size=80),
            st.decimals(-9999, 9999, places=2),
            st.decimals(-(10**30), 10**30, places=4),
        )
    ),
)
LISTS = st.lists(ROW, min_size=1, max_size=40)
BY_HAND = (
    "a",
    True,
    -128,
    -1,
    2**63 - 1,
    -0.0,
    math.nan,
    date(1969, 12, 31),
    datetime(2013, 1, 1, tzinfo=UTC),
    b"x",
    Decimal("-0.01"),
    Decimal(-(2**63)),
)


def table_of(rows: list[tuple[object, ...]]) -> pa.Table:
    return pa.table(
        {name: pa.array([row[at] for row in rows], SCHEMA.to_arrow().field(name).type)
         for at, name in enumerate(SCHEMA.names)}
    ).append_column("offset", pa.array(range(len(rows)), pa.int64()))  # fmt: skip


@pytest.mark.spark
def test_the_digest_of_any_row_is_sparks(spark: SparkSession) -> None:

    @settings(max_examples=6, derandomize=True)
    @given(LISTS)
    def same(rows: list[tuple[object, ...]]) -> None:
        table = table_of([BY_HAND, *rows])
        hashed = spark.createDataFrame(table).select("offset", row_hash(SCHEMA.types).alias("h"))
        assert row_digests(table, SCHEMA.names).to_pylist() == [
            row.h for row in hashed.orderBy("offset").collect()
        ]

    same()


@pytest.mark.spark
def test_the_files_of_any_rows_are_sparks(spark: SparkSession, tmp_path: Path) -> None:
    numbered = iter(range(1000))

    @settings(max_examples=4, derandomize=True)
    @given(LISTS)
    def same(rows: list[tuple[object, ...]]) -> None:
        table = table_of([BY_HAND, *rows])
        lake = open_lake(tmp_path / f"{next(numbered)}")
        options = WriteOptions("d", last_per_key=True)
        reported = {"order_by": ("k", "offset"), "partitioned": False}
        by_arrow = ARROW(table, lake.store, FOLDER, LAYOUT, options, **reported)  # type: ignore[arg-type]
        elsewhere = open_lake(tmp_path / f"{next(numbered)}").store
        by_spark = SPARK(
            spark.createDataFrame(table), elsewhere, FOLDER, LAYOUT, options, **reported
        )  # type: ignore[arg-type]
        assert [file.to_json() for file in by_arrow] == [file.to_json() for file in by_spark]

    same()
