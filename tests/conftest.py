"""Fixtures that all floors share. Real servers are in tests/servers, one module a kind."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

# Arguments are checked from here on, as they are for users: whichever tests a process runs, in whatever order.
import dagster_adjunct._api  # noqa: F401

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A test process may be told a width of its own, which would win over the one that a test gives to a command.
os.environ.pop("COLUMNS", None)

# Those that others import come first, or pytest could not rewrite their assertions.
pytest_plugins = [
    "tests.servers.s3",
    "tests.servers.kafka",
    "tests.servers.postgres",
    "tests.servers.registry",
    "tests.servers.spark_cluster",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no process of several is left with one of them at the end."""
    marks = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -marks[item.path])


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One session for all tests of a run: starting it takes 6-10 s."""
    from dagster_adjunct.resources.spark.session import new_session

    # A JVM that lives for some minutes would spend much of them on compiling what it then hardly uses.
    compile_less = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    settings = {"spark.sql.shuffle.partitions": "4", "spark.driver.extraJavaOptions": compile_less}
    session = new_session(settings, master="local[2]")
    yield session
    session.stop()
