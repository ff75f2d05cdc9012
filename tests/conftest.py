"""Fixtures that tests of all packages share. Real servers are in tests/servers, one module a
kind.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.java_classes import hurry_sparks_jvms
from tests.temporary_files import keep_temporary_files_in_memory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A test process may be told a width of its own, which would win over the one that a test gives to a
# command.
os.environ.pop("COLUMNS", None)
# Some images keep Python from writing bytecode: each of the many processes that tests start would
# compile all that it imports, for two seconds and more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


# With Python's own handler, asyncio.run writes each result out as text on its way: a third of the
# time of short calls.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupt)

# No drawn example fails because the machine is busy. (With CI set, Hypothesis has a profile that
# this one extends.)
settings.register_profile(
    "any-machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")

# Thousands of tests are collected, and all of them stay: looking for garbage among them takes a
# fifth of the time.
gc.disable()
hurry_sparks_jvms()
keep_temporary_files_in_memory()

# It has fixtures and assertions, and some files import it before others name it as their plugin.
pytest.register_assert_rewrite("tests.resources.file_streams.table_lab")
# Those that others import come first, or pytest could not rewrite their assertions.
pytest_plugins = [
    "tests.kept_processes",
    "tests.servers.s3",
    "tests.servers.kafka",
    "tests.servers.postgres",
    "tests.servers.dynamodb",
    "tests.servers.redis",
    "tests.servers.registry",
    "tests.servers.spark_cluster",
    "tests.servers.spark_tables",
    "tests.servers.iceberg_rest",
    "tests.servers.browser",
    "tests.scheduling",
    "tests.timings",
]

_SERVERS = (
    "dynamodb dynamodb_on_disk dynamodb_server kafka logical_server moto_s3 policed_s3"
    " postgres_server redis_server"
)
_SERVERS += " registry_url s3_server spark_cluster tables_jvm versitygw"
_MARKED = {"spark": {"spark", "sparkling", "main_job"}, "server": set(_SERVERS.split())}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what asks for a session or a server, so that `make test-fast` leaves it out though
    nobody has marked it.
    """
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        asked = {
            *getattr(item, "fixturenames", ()),
            *(value for value in parameters if isinstance(value, str)),
        }
        for mark, fixtures in _MARKED.items():
            if asked & fixtures:
                item.add_marker(mark)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One session for all tests of a run: starting it takes 6-10 s."""
    from dagster_adjunct.resources.spark.session import new_session
    from dagster_adjunct.resources.spark.tuning import prewarm_workers, wait_for_workers

    # Hardly a query is run twice, and none over many rows: compiling each takes longer than
    # interpreting it. The checks that Spark makes of its own optimizer take a twelfth of all.
    # Sessions of examples, pages and runs have them.
    hurried = {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.lightweightPlanChangeValidation": "false",
    }
    session = new_session({"spark.sql.shuffle.partitions": "4", **hurried}, master="local[2]")
    prewarm_workers(session)
    wait_for_workers(session.sparkContext)  # tests count the jobs of what they look at
    yield session
    session.stop()
