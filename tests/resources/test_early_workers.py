"""Python workers that are begun beside what comes before the first task."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.resources.spark.tuning import prewarm_workers, wait_for_workers
from tests.kept_processes import program

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENDED_AT_ONCE = """
from dagster_adjunct.resources.spark.tuning import prewarm_workers
from dagster_adjunct.resources.spark.session import new_session, stop_session

spark = new_session(master="local[1]")
store, stop = spark.sparkContext._jsc.sc().statusStore(), spark.stop

def told():
    jobs = store.jobsList(None)
    print([str(jobs.apply(n).status()) for n in range(jobs.size())])
    stop()

spark.stop = told
prewarm_workers(spark)
stop_session(spark)
"""


def jobs(spark: SparkSession) -> int:
    return int(spark.sparkContext._jsc.sc().statusStore().jobsList(None).size())


def test_workers_are_begun_once_a_session(spark: SparkSession) -> None:
    before = jobs(spark)  # the fixture has begun them
    prewarm_workers(spark)
    wait_for_workers(spark.sparkContext)
    assert jobs(spark) == before


@pytest.mark.spark
def test_a_session_that_ends_at_once_loses_no_task_of_theirs() -> None:
    done = subprocess.run(
        [program("python"), "-c", ENDED_AT_ONCE], capture_output=True, text=True, check=False
    )
    assert done.stdout == "['SUCCEEDED']\n", done.stderr
    assert "Lost task" not in done.stderr
