"""How Spark's session says that it can't start, and what its driver prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kept_processes import without_kept_processes

ROOT = Path(__file__).resolve().parents[2]
START = """
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.spark.session import new_session

try:
    new_session(master="local[x]")
except ConfigurationError as error:
    print(error.setting, error.problem)
session = new_session(master="local[1]")
try:
    session.sql("select cast(id * 3000000000 as int) as n from range(1, 9)").write.format("noop").mode("append").save()
except Exception as error:
    print(type(error).__name__)
session.sparkContext._jvm.org.slf4j.LoggerFactory.getLogger("x").error(
    "said", session.sparkContext._jvm.java.lang.RuntimeException("why")
)
"""


@pytest.mark.spark
def test_a_master_that_can_not_be_is_told_and_no_java_frame_is_printed(tmp_path: Path) -> None:
    own = without_kept_processes(os.environ)  # what a JVM prints that is kept goes elsewhere
    done = subprocess.run(
        [sys.executable, "-c", START], cwd=tmp_path, env={**own, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "spark.master Spark could not be started with the master 'local[x]'" in done.stdout
    assert "ArithmeticException" in done.stdout
    assert "said (why)" in done.stderr
    assert "\tat " not in done.stderr
    assert "Aborting" not in done.stderr
