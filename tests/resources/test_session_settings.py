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


def test_records_with_arrays_or_maps_go_to_python_in_smaller_batches(spark: SparkSession) -> None:
    """Of nulls at the end of such a batch, Spark's writer takes the square of their number."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    rows = spark.range(0, 10_000, 1, 1)
    try:
        spark.conf.set(name, "65536")
        assert batch_sizes(rows.selectExpr("id", "named_struct('a', id) AS s")) == [10_000]
        assert batch_sizes(rows.selectExpr("named_struct('a', array(id)) AS s")) == [
            4096,
            4096,
            1808,
        ]
        spark.conf.set(name, "100")
        assert set(batch_sizes(rows.selectExpr("map('a', id) AS m"))) == {100}
    finally:
        spark.conf.set(name, before)


def batch_sizes(frame: DataFrame) -> list[int]:
    """Return the numbers of records in the batches that a task gets."""

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"rows": [batch.num_rows]})

    return [row.rows for row in map_in_arrow(frame, count, "rows bigint").collect()]
