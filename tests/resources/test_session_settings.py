"""Sessions whose time zone is not UTC, or whose SQL is not ANSI's, are refused before anything
is begun.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct import Application, advance_dataset, run_application, unbounded_dataset
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import resolve_session, session_factory
from dagster_adjunct.resources.streams.lake.streams import LakeStreams

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

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
