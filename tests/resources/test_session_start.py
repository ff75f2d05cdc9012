"""How Spark's session says that it can't start, and what its driver prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.spark.session import new_session, session_config
from tests.kept_processes import without_kept_processes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
START = """
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.spark.session import new_session

try:
    new_session({"spark.driver.port": "x"}, master="local[1]")
except ConfigurationError as error:
    print(error.setting, error.problem)
session = new_session({"spark.driver.port": "0"}, master="local[1]")
try:
    session.sql("select cast(id * 3000000000 as int) as n from range(1, 9)").write.format("noop").mode("append").save()
except Exception as error:
    print(type(error).__name__)
session.sparkContext._jvm.org.slf4j.LoggerFactory.getLogger("x").error(
    "said", session.sparkContext._jvm.java.lang.RuntimeException("why")
)
"""


@pytest.mark.parametrize(
    "master",
    [
        "locl", "local[x]", "local[0]", "local[]", "local[2", "LOCAL[2]", "localhost", "none",
        "yarn-client", "mesos://h:1", "spark://h", "spark:/h:7077", "spark://h:7077/", "sc://", "sc:/h",
    ],
)  # fmt: skip
def test_a_master_that_spark_does_not_know_is_refused_before_it_starts(master: str) -> None:
    with pytest.raises(ConfigurationError, match="has no such master") as refused:
        session_config(master=master)
    assert refused.value.setting == "spark.master"


@pytest.mark.parametrize(
    "master",
    [
        "local", "local[2]", "local[*]", "local[2,3]", "local[*, 3]", "local-cluster[2,1,1024]",
        "spark://h:7077", "spark://a:1,b:2", "spark://[::1]:7077", "k8s://https://h:443", "sc://h",
        "sc://h:15002/;token=secret",
    ],
)  # fmt: skip
def test_a_master_that_spark_knows_is_taken(master: str) -> None:
    assert session_config(master=master, lake_url="s3://b/lake")["spark.master"] == master


def test_yarn_needs_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ConfigurationError, match="neither HADOOP_CONF_DIR nor YARN_CONF_DIR"
    ) as refused:
        session_config(master="yarn", lake_url="s3://b/lake")
    assert refused.value.setting == "spark.master"
    monkeypatch.setenv("YARN_CONF_DIR", "/etc/hadoop")
    assert session_config(master="yarn", lake_url="s3://b/lake")["spark.master"] == "yarn"


@pytest.mark.spark
def test_a_session_that_can_not_start_says_why_and_no_java_frame_is_printed(tmp_path: Path) -> None:
    own = without_kept_processes(os.environ)  # what a JVM prints that is kept goes elsewhere
    done = subprocess.run(
        [sys.executable, "-c", START], cwd=tmp_path, env={**own, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "spark.master Spark could not be started with the master 'local[1]': " in done.stdout
    assert "ArithmeticException" in done.stdout
    assert "said (why)" in done.stderr
    assert "\tat " not in done.stderr
    assert "Aborting" not in done.stderr


@pytest.mark.parametrize(
    "installed", ["4.0.2", "4.1.4" if pyspark.__version__ > "4.2" else "4.3.0"]
)
def test_a_session_of_another_spark_is_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    """Stands for SPARK_HOME, which takes precedence over the Spark that PySpark brings, and for
    a server.
    """
    monkeypatch.setattr("pyspark.__version__", installed)
    refusal = (
        r"PySpark is 4\.0\.2: expected 4\.1, 4\.2"
        if installed == "4.0.2"
        else r"Spark at local\S+ is .*expected 4\."
    )
    with pytest.raises(ConfigurationError, match=refusal):
        new_session(master="local[1]")


def test_the_jars_for_s3_are_those_of_sparks_hadoop(monkeypatch: pytest.MonkeyPatch) -> None:
    jars = Path(str(pyspark.__file__)).parent / "jars"
    hadoop = next(jars.glob("hadoop-client-api-*.jar")).stem.removeprefix("hadoop-client-api-")
    assert f"hadoop-aws:{hadoop}," in session_config(lake_url="s3://b/lake")["spark.jars.packages"]
    monkeypatch.setattr("pyspark.__version__", "4.1.1-amzn-0")
    assert "hadoop-aws:3.4.2," in session_config(lake_url="s3://b/lake")["spark.jars.packages"]


def test_a_clusters_own_mode_of_sql_is_not_taken() -> None:
    setting = "spark.sql.ansi.enabled"
    assert session_config(master="spark://h:7077", lake_url="s3://b/lake")[setting] == "true"
    assert session_config({setting: "false"}, master="local")[setting] == "false"
