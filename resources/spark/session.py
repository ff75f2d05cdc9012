"""Starts the Spark session with the settings that Adjunct's plans need.

Kept apart from the Dagster resource, so that plain Python and executors need no Dagster to use it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

from dagster import ConfigurableResource, InitResourceContext, get_dagster_logger
from pydantic import Field, PrivateAttr

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.spark.errors import STACK_SIZE, first_message_line
from dagster_adjunct.resources.spark.in_process import IN_PROCESS, is_in_process
from dagster_adjunct.resources.spark.tuning import cache_jvm_functions, is_quick, quick_jvm_options, wait_for_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINIMUM_JAVA = 17

# S3A without the 600 MB bundle of the AWS SDK: what reading Parquet needs, and nothing else.
_S3A_PACKAGES = (
    "org.apache.hadoop:hadoop-aws:3.5.0",
    "software.amazon.awssdk:s3:2.35.4",
    "software.amazon.awssdk:s3-transfer-manager:2.35.4",
    "software.amazon.awssdk:sts:2.35.4",
)
_S3A_EXCLUDES = (
    "software.amazon.awssdk:bundle",
    "org.wildfly.openssl:wildfly-openssl",
    "io.netty:*",
    "org.slf4j:*",
    "commons-logging:*",
    "commons-codec:*",
    "org.apache.httpcomponents:*",
)

_LOGGING = Path(__file__).resolve().parent / "log4j2.properties"
_PLANS = {
    # Bucketed scans keep one partition a bucket even where no join asks for it: the writers rely on it.
    "spark.sql.sources.bucketing.autoBucketedScan.enabled": "false",
    # The writer has checked that a dataset's files are sorted: no join sorts them again where a bucket has one file.
    "spark.sql.legacy.bucketedTableScan.outputOrdering": "true",
    # A join on (origin, time_hour) may use a table bucketed by origin alone.
    "spark.sql.requireAllClusterKeysForCoPartition": "false",
    # Only what the plan calls broadcast is broadcast.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    # Partition counts are proven before the run; re-planning after every stage costs more than it finds.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    # A missing or damaged object is an error, never fewer rows.
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    # Without, a flipped bit in a page may be decoded to another value.
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.ui.showConsoleProgress": "false",
    # Our workers are forked from a process that has imported what they need (resources/spark/worker_daemon.py).
    "spark.python.daemon.module": "dagster_adjunct.resources.spark.worker_daemon",
    # Spark would look up the line of Python behind every column expression: most of the driver's work in a small batch.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}


_HOST = r"(\[[^]]+\]|[^\s:/,]+):\d+"
_MASTER = re.compile(
    rf"local(\[(0*[1-9]\d*|\*)(\s*,\s*\d+)?\])?|local-cluster\[(\s*\d+\s*,){{2}}\s*\d+\s*\]"
    rf"|spark://{_HOST}(,{_HOST})*|yarn|k8s://\S+"
)
_MASTER_STEP = "Give a master such as local[*], local[4] or spark://HOST:PORT (--master, ADJUNCT_SPARK_MASTER)."


def check_java() -> str:
    """Return the path of a Java that Spark can use; say in one line what to install, or to unset, otherwise."""
    home, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    java = str(Path(home) / "bin" / "java") if home else on_path
    version = _java_version(java)
    if java is not None and version is not None and version >= MINIMUM_JAVA:
        return java
    if home:
        there = "has no bin/java that runs" if version is None else f"is Java {version}"
        found = f"JAVA_HOME, which goes before the PATH, is {home!r}, and that {there}"
    else:
        found = "no java is on the PATH" if java is None else f"{java} is {version or 'no java that runs'}"
    advice = f"Install a Java {MINIMUM_JAVA} or 21 runtime (Debian, Ubuntu: apt install openjdk-17-jre-headless)."
    other = _java_version(on_path) if home else None
    if on_path is not None and other is not None and other >= MINIMUM_JAVA:
        advice = f"Unset JAVA_HOME: {on_path} on the PATH is Java {other}, and will do."
    raise ConfigurationError(f"Spark needs Java {MINIMUM_JAVA} or newer: {found}.", advice, setting="JAVA_HOME")


def _java_version(java: str | None) -> int | None:
    """Return what feature release of Java this is; None where it can't be run, or does not say."""
    if java is None:
        return None
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return int(match[1]) if match else None


def session_config(
    config: Mapping[str, str] | None = None,
    *,
    master: str | None = None,
    lake_url: str | None = None,
    quick: bool | None = None,
    keep_classes: bool = False,
) -> dict[str, str]:
    """Return the whole Spark configuration: what Adjunct needs, what the lake needs, then the user's own.

    `quick` (default: as ADJUNCT_SPARK_QUICK says) chooses a JVM that begins quickly, for short runs and small batches;
    with `keep_classes` the first one leaves an archive of its classes for others, once it is ended by `end_jvm`.

    `lake_url` adds S3A for `s3://` lakes. The user's settings win, so a platform may bring its own jars by
    setting `spark.jars.packages` to "". Raises ConfigurationError for a lake that the master's executors can't see.
    """
    user = {key: str(value) for key, value in (config or {}).items()}
    master = master or user.get("spark.master") or os.environ.get("ADJUNCT_SPARK_MASTER") or "local[*]"
    _check_master(master)
    _check_reach(master, lake_url or os.environ.get("ADJUNCT_LAKE"))
    settings = {**_PLANS, "spark.master": master, "spark.app.name": "adjunct"}
    # Spark makes this folder in the working directory otherwise, though nothing is ever put there.
    settings["spark.sql.warehouse.dir"] = str(Path(gettempdir()) / "adjunct-spark-warehouse")
    # Spark follows a plan by functions that call themselves, for each operator some dozen times.
    options = [f"-Xss{STACK_SIZE}", f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"]
    if is_quick(quick):
        options.append(quick_jvm_options(check_java(), keep_classes=keep_classes))
    settings["spark.driver.extraJavaOptions"] = " ".join(options)
    settings["spark.executor.extraJavaOptions"] = f"-Xss{STACK_SIZE}"
    if master.startswith("local") or "127.0.0.1" in master:
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        settings |= {"spark.ui.enabled": "false"}
    if lake_url and lake_url.startswith("s3://"):
        settings |= _s3a()
    # Executors import this package too; on one machine it is where the driver has it. It comes last: beside a checkout
    # lie folders with names that a project may have for its own.
    settings["spark.executorEnv.PYTHONPATH"] = os.pathsep.join(
        [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[3])]
    )
    return settings | user


def new_session(
    config: Mapping[str, str] | None = None,
    *,
    master: str | None = None,
    lake_url: str | None = None,
    quick: bool | None = None,
    keep_classes: bool = False,
) -> SparkSession:
    """Start a session, or return the running one. Takes 6-10 s in a fresh process."""
    prepare_environment()
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.logger import PySparkLogger
    from pyspark.sql import SparkSession

    # It prints the whole trace of an error before anybody has caught it.
    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    settings = session_config(config, master=master, lake_url=lake_url, quick=quick, keep_classes=keep_classes)
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        session = builder.getOrCreate()
    except (Py4JError, PySparkException) as error:
        java = getattr(error, "java_exception", None)
        reason = first_message_line(Exception(java.getMessage()) if java is not None and java.getMessage() else error)
        raise ConfigurationError(
            f"Spark could not be started with the master {settings['spark.master']!r}: {reason.rstrip('.')}.",
            f"{_MASTER_STEP[:-1]}, and check your own Spark settings.",
            setting="spark.master",
        ) from error
    cache_jvm_functions(session)
    return session


def stop_session(session: SparkSession) -> None:
    """Stop a session, and end its JVM where that is to leave its classes for others."""
    from dagster_adjunct.resources.spark.tuning import stop_jvm

    context = session.sparkContext
    options, gateway = context.getConf().get("spark.driver.extraJavaOptions", None) or "", context._gateway
    wait_for_workers(context)
    session.stop()
    stop_jvm(gateway, options)


def prepare_environment() -> None:
    """Check Java and make Spark's workers use this very Python."""
    check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # Spark's launcher resolves its own host name otherwise, which a laptop or container may not know.
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("SPARK_LOCAL_HOSTNAME", "localhost")
    # Of the small JVM that only puts together how to start Spark's.
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def _check_master(master: str) -> None:
    """Refuse a master that Spark does not know, or that lacks what it needs: Spark's launcher dies of it."""
    if not _MASTER.fullmatch(master):
        problem, step = "Spark knows no such master", _MASTER_STEP
    elif master == "yarn" and not {"HADOOP_CONF_DIR", "YARN_CONF_DIR"} & os.environ.keys():
        problem = "neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set"
        step = "Set one of them to the folder with the configuration of your YARN cluster."
    else:
        return
    raise ConfigurationError(
        f"Spark could not be started with the master {master!r}: {problem}.", step, setting="spark.master"
    )


def _check_reach(master: str, lake_url: str | None) -> None:
    """Refuse executors elsewhere for a lake in a folder, unless all machines see it."""
    from dagster_adjunct.resources.objects.lake import DEFAULT_LAKE, LakeSettings

    url = lake_url or DEFAULT_LAKE
    if master.startswith("local") or url.startswith(("s3://", "s3a://")) or LakeSettings().shared:
        return
    raise ConfigurationError(
        f"lake {url!r} is a folder, and the executors of {master} may run on machines that do not see it.",
        "Set ADJUNCT_LAKE_SHARED=true if every machine sees this folder under the same path; otherwise use an "
        "s3:// lake or a local master.",
        argument="lake_url",
    )


def _s3a() -> dict[str, str]:
    """Return what S3A needs; credentials come from its own standard chain, never from this configuration."""
    from dagster_adjunct.resources.objects.lake import LakeSettings
    from dagster_adjunct.resources.objects.store import check_endpoint

    lake = LakeSettings()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dagster-adjunct" / "ivy"
    settings = {
        "spark.jars.packages": ",".join(_S3A_PACKAGES),
        "spark.jars.excludes": ",".join(_S3A_EXCLUDES),
        "spark.jars.ivy": str(cache),
        "spark.hadoop.fs.s3a.path.style.access": "true" if lake.path_style else "false",
        "spark.hadoop.fs.s3a.connection.ssl.enabled": "true",
        # The stream that asks again for the rest when a reply ends in the middle; the newer default gives up.
        "spark.hadoop.fs.s3a.input.stream.type": "classic",
    }
    endpoint = lake.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    check_endpoint(endpoint)
    if endpoint:
        settings["spark.hadoop.fs.s3a.endpoint"] = endpoint
        settings["spark.hadoop.fs.s3a.connection.ssl.enabled"] = str(endpoint.startswith("https")).lower()
    region = lake.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region:
        settings["spark.hadoop.fs.s3a.endpoint.region"] = region
    return settings


class SparkResource(ConfigurableResource):  # type: ignore[type-arg]
    """One session a run, on dagster-pyspark's resource.

    That resource imports pyspark where it is defined, and never stops its session; here the import waits for
    the first use, so that loading a code location and ticking sensors stay light, and the session ends with
    the run. One that this process had before the run is used, and left running. `master` takes any Spark
    master (default: `ADJUNCT_SPARK_MASTER`, else all cores of this machine), or "none": then small datasets are
    advanced in the run's own process, and what needs Spark is refused.
    """

    master: str | None = Field(default=None, description="Spark master URL, such as local[2] or spark://host:7077.")
    spark_config: dict[str, Any] = Field(default_factory=dict, description="More Spark settings; they win.")
    lake: str | None = Field(default=None, description="Lake URL; an s3:// lake brings the S3A packages along.")

    _session: Any = PrivateAttr(default=None)
    _ours: bool = PrivateAttr(default=False)

    @property
    def starter(self) -> Callable[[], SparkSession]:
        """Return a function that returns the run's session; for the master "none", IN_PROCESS."""
        return IN_PROCESS if is_in_process(self.master) else lambda: self.spark_session

    @property
    def spark_session(self) -> SparkSession:
        """Return the run's session, starting it on first use (6-10 s)."""
        if self._session is None:
            for log in (get_dagster_logger(), logging.getLogger("adjunct.spark")):
                log.info("starting Spark")
            prepare_environment()
            from dagster_pyspark import LazyPySparkResource
            from pyspark.sql import SparkSession

            lake = self.lake or os.environ.get("ADJUNCT_LAKE")
            config = session_config(self.spark_config, master=self.master, lake_url=lake)
            running = SparkSession.getActiveSession()
            self._session = LazyPySparkResource(spark_config=config).spark_session
            self._ours = running is None
            cache_jvm_functions(self._session)
        session: SparkSession = self._session
        return session

    def teardown_after_execution(self, context: InitResourceContext) -> None:
        """Stop the session, if the run started one: it leaves no executors behind."""
        session, self._session = self._session, None
        if session is not None and self._ours:
            wait_for_workers(session.sparkContext)
            session.stop()
