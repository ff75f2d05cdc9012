"""Sessions whose time zone is not UTC, or whose SQL is not ANSI's, are refused before anything
is begun; and the size of batches for Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dagster_adjunct import Application, advance_dataset, run_application, unbounded_dataset
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import resolve_session, session_factory
from dagster_adjunct.resources.spark.tasks import map_in_arrow
from dagster_adjunct.resources.streams.lake.streams import LakeStreams

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
ZONE = "spark.sql.session.timeZone"


@pytest.fixture
def elsewhere(spark: SparkSession) -> SparkSession:
    session = spark.newSession()
    session.conf.set(ZONE, "America/New_York")
    return session


def advanced(root: Path, spark: Any) -> None:
    lake = open_lake(root)
    streams = LakeStreams(lake)
    streams.create("c", schema=Schema.of(k="string", day="date"), key=["k"], partitions=1)
    dataset = unbounded_dataset(
        "d", input="lake.c", key="k", partitions=1, history="all", valid_from="day"
    )
    advance_dataset(dataset, lake=lake, systems={"lake": streams}, spark=spark, by="test")


def applied(root: Path, spark: Any) -> None:
    lake = open_lake(root)
    streams = LakeStreams(lake)
    streams.create("c", schema=Schema.of(k="string", day="date"), key=["k"], partitions=1)
    app = Application("app")
    app.input_stream("lake.c", event_time="day").send_to(app.output_stream("lake.o", partitions=1))
    run_application(app, lake=lake, systems={"lake": streams}, spark=spark, run="r")


@pytest.mark.parametrize(
    "used",
    [
        lambda _, spark: resolve_session(spark),
        lambda _, spark: resolve_session(lambda: spark),
        lambda _, spark: session_factory(spark),
        lambda _, spark: session_factory(lambda: spark)(),
        advanced,
        applied,
    ],
)
def test_a_session_in_another_time_zone_is_refused(
    elsewhere: SparkSession, tmp_path: Path, used: Callable[[Path, Any], object]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        used(tmp_path / "lake", elsewhere)
    assert caught.value.setting == ZONE
    assert f'spark.conf.set("{ZONE}", "UTC")' in str(caught.value)
    elsewhere.conf.set(ZONE, "Etc/UTC")
    assert resolve_session(elsewhere) is elsewhere


def test_a_session_whose_sql_is_not_that_of_ansi_is_refused(spark: SparkSession) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.ansi.enabled", "false")
    with pytest.raises(
        ConfigurationError, match=r"ansi\.enabled=false: expected true.*spark\.conf\.set"
    ) as caught:
        resolve_session(session)
    assert caught.value.setting == "spark.sql.ansi.enabled"


def test_records_with_arrays_or_maps_go_to_python_in_small_batches_that_tasks_get_together(
    spark: SparkSession,
) -> None:
    """With a limit of bytes, Spark's writer would go through all vectors after each record."""
    limits = [f"spark.sql.execution.arrow.max{what}PerBatch" for what in ("Records", "Bytes")]
    before = list(map(spark.conf.get, limits))
    rows = spark.range(0, 20_000, 1, 1)
    nested = rows.selectExpr("id", "named_struct('a', array(id)) AS s")

    def set_limits(*values: str) -> None:
        for name, value in zip(limits, values, strict=True):
            spark.conf.set(name, value)

    try:
        set_limits("65536", "67108864")
        assert batches_of(rows.selectExpr("id", "named_struct('a', id) AS s")) == [
            list(range(20_000))
        ]
        assert spark.conf.get(limits[0]) == "65536"
        for _ in range(2):
            assert batches_of(nested) == [list(range(16_384)), list(range(16_384, 20_000))]
        assert list(map(spark.conf.get, limits)) == ["512", str(2**31 - 1)]
        set_limits("100", "67108864")  # as a user wants them
        assert set(map(len, batches_of(nested))) == {100}
        assert list(map(spark.conf.get, limits)) == ["100", "67108864"]
    finally:
        set_limits(*before)


def batches_of(frame: DataFrame) -> list[list[int]]:
    """Return the ids in each of the batches that a task gets."""

    def collect(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            ids = batch.column(0).to_pylist()
            yield pa.RecordBatch.from_pydict({"ids": pa.array([ids], pa.list_(pa.int64()))})

    return [row.ids for row in map_in_arrow(frame, collect, "ids array<bigint>").collect()]


def test_spark_generates_no_method_that_the_jvm_does_not_compile(spark: SparkSession) -> None:
    """HotSpot interprets methods of more than 8,000 bytes: hashes of nested columns have them."""
    assert int(spark.conf.get("spark.sql.codegen.hugeMethodLimit") or 0) <= 8000
