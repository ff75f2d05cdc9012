"""Starts the Spark session with the settings that Adjunct's plans need, and stops it at the end
of a block of code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dagster_adjunct.resources.errors import (
    OF_FILES,
    AdjunctError,
    ConfigurationError,
    TransientError,
    file_error,
)
from dagster_adjunct.resources.objects.lake import DEFAULT_LAKE, LakeSettings
from dagster_adjunct.resources.objects.store import check_endpoint
from dagster_adjunct.resources.package_files import package_file
from dagster_adjunct.resources.spark import tuning
from dagster_adjunct.resources.spark.in_process import (
    IN_PROCESS,
    has_running_session,
    identify_session,
    is_in_process,
    is_remote,
)
from dagster_adjunct.resources.spark.jvm import (
    cache_jvm_functions,
    gateway_of,
    has_spark_context,
    join_submitted_jvm,
    limit_retries,
    running_jvm,
    start_jvm,
)
from dagster_adjunct.resources.spark.tasks import STACK_SIZE, first_message_line
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINIMUM_JAVA = 17

# The version of Hadoop in each Spark release, and so of its S3A. Of the AWS SDK only the packages
# that reading Parquet needs, instead of its bundle of 600 MB.
_HADOOP = {"4.1": "3.4.2", "4.2": "3.5.0", "4.3": "3.5.0"}
_S3A_PACKAGES = (
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

_CATALOG = "spark.sql.catalogImplementation"
# Settings of a Spark application, not of a session, which a client of Spark Connect can't change.
_OF_THE_SERVER = frozenset({_CATALOG, "spark.ui.showConsoleProgress", "spark.python.daemon.module"})
_OF_THE_SERVER |= {"spark.python.sql.dataFrameDebugging.enabled"}
_RPC_DETAILS = re.compile(r'details = "(.+)"')
_SECONDS_TO_CONNECT = 10.0
_RETRIES = 5  # of requests to a Spark Connect server, the last one after some 20 seconds
_PLANS = {
    # Bucketed scans keep one partition per bucket even where no join needs it: the writers rely on
    # it.
    "spark.sql.sources.bucketing.autoBucketedScan.enabled": "false",
    # The writer has checked that files are sorted, so joins need not sort a bucket that has one
    # file.
    "spark.sql.legacy.bucketedTableScan.outputOrdering": "true",
    # A join on (origin, time_hour) may use a table bucketed by origin alone.
    "spark.sql.requireAllClusterKeysForCoPartition": "false",
    # Only what the plan calls broadcast is broadcast.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    # Partition counts are proven before the run; re-planning after every stage costs more than it
    # finds.
    "spark.sql.adaptive.enabled": "false",
    # The JVM never compiles larger methods, such as one that hashes nested columns. Beyond this
    # limit Spark generates several small ones.
    "spark.sql.codegen.hugeMethodLimit": "8000",
    "spark.sql.session.timeZone": "UTC",
    # Without it, Spark would cast operands of different types otherwise than the code that computes
    # without Spark, and sums that overflow would be null. It is Spark's default, but a cluster's
    # own settings may change it.
    "spark.sql.ansi.enabled": "true",
    # A missing or damaged object raises an error, instead of being skipped.
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    # A struct of which a query reads only fields that were added later is not null in older files.
    # It is Spark's default, but a cluster's own settings may change it.
    "spark.sql.legacy.parquet.returnNullStructIfAllFieldsMissing": "false",
    # Without it, a flipped bit in a page may be decoded to another value.
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    _CATALOG: "in-memory",
    "spark.ui.showConsoleProgress": "false",
    # Python workers are forked from a process that has done their imports
    # (resources/spark/worker_daemon.py).
    "spark.python.daemon.module": "dagster_adjunct.resources.spark.worker_daemon",
    # Otherwise Spark looks up the Python line of every column expression, which is most of the
    # driver's work in a small batch.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}


_CONNECT = "sc://"
# spark-submit sets it for the process that it starts: the port of the JVM
_GATEWAY = "PYSPARK_GATEWAY_PORT"
_HOST = r"(\[[^]]+\]|[^\s:/,]+):\d+"
_MASTER = re.compile(
    rf"local(\[(0*[1-9]\d*|\*)(\s*,\s*\d+)?\])?|local-cluster\[(\s*\d+\s*,){{2}}\s*\d+\s*\]"
    rf"|spark://{_HOST}(,{_HOST})*|yarn|k8s://\S+|{_CONNECT}[^\s:/]+(:\d+)?(/\S*)?"
)
_MASTER_STEP = (
    "Give a master such as local[*], spark://HOST:PORT or sc://HOST:PORT (--master,"
    " ADJUNCT_SPARK_MASTER)."
)


def check_java() -> str:
    """Return the path of a `java` that Spark can use: that of JAVA_HOME, or if it is not set, the
    one on the PATH.

    Raises ConfigurationError if that one is missing or too old, and says what to install or unset.
    """
    home = os.environ.get("JAVA_HOME")
    on_path = shutil.which("java")
    if home:
        java: str | None = str(Path(home) / "bin" / "java")
    else:
        java = on_path
    version = _java_version(java)
    if java is not None and version is not None and version >= MINIMUM_JAVA:
        return java
    # only the text of the error remains
    if home:
        if version is None:
            problem = "has no bin/java that runs"
        else:
            problem = f"is Java {version}"
        found = f"JAVA_HOME, which takes precedence over the PATH, is {home!r}, which {problem}"
    elif java is None:
        found = "no java is on the PATH"
    else:
        found = f"{java} is {version or 'no java that runs'}"
    advice = (
        f"Install a Java {MINIMUM_JAVA} or 21 runtime (Debian, Ubuntu: apt install"
        " openjdk-17-jre-headless)."
    )
    if home:  # the PATH was not tried
        other = _java_version(on_path)
        if other is not None and other >= MINIMUM_JAVA:
            advice = (
                f"Unset JAVA_HOME: {on_path} on the PATH is Java {other}, which is recent enough."
            )
    raise ConfigurationError(
        f"Spark needs Java {MINIMUM_JAVA} or newer: {found}.", advice, setting="JAVA_HOME"
    )


def _java_version(java: str | None) -> int | None:
    """Return the feature release of this Java (17, 21), None if it can't be run or determined.
    Raises ConfigurationError if this process may open no more files.
    """
    if java is None:
        return None
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    except OSError as error:
        if error.errno in OF_FILES:
            raise file_error(error, java, "Java's version") from error
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    if match:
        return int(match[1])
    return None


# Checking the syntax of expressions and queries by Spark's own parser, without a session.

# What is left out of a message: the name of Spark's error before it, and the state after it.
_STATE = re.compile(r"^\[[\w.]+\] |\.?\s*SQLSTATE: \w+")


def syntax_errors(texts: Sequence[tuple[str, bool]]) -> list[str]:
    """Return for each (text, is_query) the message of Spark's parser, or "" if there is no error.

    Starts a JVM, which takes a second or two, unless the process has one. Raises ConfigurationError
    without Java.
    """
    with open_jvm() as jvm:
        parser = getattr(
            getattr(jvm.org.apache.spark.sql.catalyst.parser, "CatalystSqlParser$"), "MODULE$"
        )
        return [
            _syntax_error(parser.parsePlan if is_query else parser.parseExpression, text)
            for text, is_query in texts
        ]


def _syntax_error(parse: Any, text: str) -> str:
    """Return the first line of the message of Spark's parser for a text, "" if it parses it."""
    try:
        parse(text)
    except Exception as error:  # noqa: BLE001 - PySpark raises various types
        line = first_message_line(Exception(_java_exception(error).getMessage()))
        return _STATE.sub("", line).rstrip(".")
    return ""


def _java_exception(error: BaseException) -> Any:
    """Return the exception of the JVM in an error of py4j or PySpark; raise an error without one.

    Once a process has had a session, PySpark wraps the exceptions of all its JVMs.
    """
    cause: BaseException | None = error
    while cause is not None:
        if (java := getattr(cause, "java_exception", None)) is not None:
            return java
        cause = cause.__context__
    raise error


@contextlib.contextmanager
def open_jvm() -> Iterator[Any]:
    """Yield the JVM of the process's session, or one without a session, which starts in a second or
    two.

    Raises ConfigurationError without Java.
    """
    check_java()
    if has_spark_context():
        yield running_jvm()
        return
    with start_jvm() as jvm:
        yield jvm


def session_config(
    config: Mapping[str, str] | None = None,
    *,
    master: str | None = None,
    lake_url: str | None = None,
    quick: bool | None = None,
    keep_classes: bool = False,
    is_elsewhere: bool = False,
) -> dict[str, str]:
    """Return the Spark configuration: the settings that Adjunct and the lake need, overridden by
    the user's `config`.

    `quick` (default: ADJUNCT_SPARK_QUICK) chooses a JVM that starts quickly, for short runs and
    small batches. With `keep_classes`, the first such JVM archives its loaded classes for later
    ones, when `stop_jvm` ends it.

    `lake_url` adds S3A for `s3://` lakes; a platform may bring its own jars by setting
    `spark.jars.packages` to "". If the driver `is_elsewhere`, on another machine, settings with
    paths and addresses of this machine are left out. Raises ConfigurationError for a lake that the
    master's executors can't reach.
    """
    user = {key: str(value) for key, value in (config or {}).items()}
    master = _find_master(master, user) or "local[*]"
    _check_master(master, is_elsewhere=is_elsewhere)
    _check_reach(master, lake_url or os.environ.get("ADJUNCT_LAKE"))
    settings = {**_PLANS, "spark.master": master, "spark.app.name": "adjunct"}
    # Spark walks plans recursively, with dozens of stack frames per operator.
    settings["spark.driver.extraJavaOptions"] = f"-Xss{STACK_SIZE}"
    settings["spark.executor.extraJavaOptions"] = f"-Xss{STACK_SIZE}"
    if lake_url and lake_url.startswith("s3://"):
        settings |= _s3a()
    if not is_elsewhere:
        settings |= _local_settings(settings, quick, keep_classes)
    return settings | user


def _find_master(master: str | None, config: Mapping[str, str]) -> str:
    """Return the master that is chosen by an argument, else by the settings, else by the
    environment; "" if by none.
    """
    return master or config.get("spark.master") or os.environ.get("ADJUNCT_SPARK_MASTER", "")


def _local_settings(
    settings: Mapping[str, str], quick: bool | None, keep_classes: bool
) -> dict[str, str]:
    """Return the settings that a driver on this machine needs in addition to `settings`.

    Its "spark.driver.extraJavaOptions" include those of `settings`. `quick` and `keep_classes` are
    explained at `session_config`.
    """
    # Otherwise Spark would create this folder, which stays empty, in the working directory.
    ours = {"spark.sql.warehouse.dir": str(Path(gettempdir()) / "adjunct-spark-warehouse")}
    options = [
        settings["spark.driver.extraJavaOptions"],
        f"-Dlog4j2.configurationFile={package_file('resources/spark/log4j2.properties').as_uri()}",
    ]
    if tuning.is_quick(quick):
        options.append(tuning.quick_jvm_options(check_java(), keep_classes=keep_classes))
    ours["spark.driver.extraJavaOptions"] = " ".join(options)
    master = settings["spark.master"]
    all_on_this_machine = master.startswith("local") or "127.0.0.1" in master
    if all_on_this_machine:
        ours |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        # Without the UI nobody reads the formatted plan that Spark makes of each query, which takes
        # 5% of the time of a small batch.
        ours |= {"spark.ui.enabled": "false", "spark.sql.ui.explainMode": "simple"}
    if "spark.jars.packages" in settings:
        cache = (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            / "dagster-adjunct"
            / "ivy"
        )
        ours["spark.jars.ivy"] = str(cache)
    # Executors import this package too; on one machine from where the driver has it. It comes last,
    # because folders next to a checkout may have the names of a project's own packages.
    ours["spark.executorEnv.PYTHONPATH"] = os.pathsep.join(
        [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[3])]
    )
    return ours


def submitted_settings() -> dict[str, str]:
    """Return the Spark settings of the application, if spark-submit has started this process, or
    else {}.
    """
    if _GATEWAY not in os.environ:
        return {}
    from pyspark import SparkConf

    join_submitted_jvm()
    return dict(SparkConf().getAll())


def new_session(
    config: Mapping[str, str] | None = None,
    *,
    master: str | None = None,
    lake_url: str | None = None,
    quick: bool | None = None,
    keep_classes: bool = False,
) -> SparkSession:
    """Return the running session, or start one, which takes 6-10 s in a fresh process.

    A master such as sc://HOST:PORT gives a session of that Spark Connect server. The parameters are
    those of `session_config`. Raises ConfigurationError if Spark can't be started with them.
    """
    url = _find_master(master, config or {})
    if is_connect(url):
        return _connect(url, config or {}, lake_url)
    prepare_environment()
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.logger import PySparkLogger
    from pyspark.sql import SparkSession

    # This logger logs the whole traceback of every error, even of those that are caught.
    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    settings = session_config(
        config, master=master, lake_url=lake_url, quick=quick, keep_classes=keep_classes
    )
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        session = builder.getOrCreate()
    except (Py4JError, PySparkException) as error:
        # py4j's errors have the JVM's exception, whose message is shorter, and may be null
        java = getattr(error, "java_exception", None)
        message = None if java is None else java.getMessage()
        reason = first_message_line(Exception(message) if message else error)
        problem = (
            f"Spark could not be started with the master {settings['spark.master']!r}:"
            f" {reason.rstrip('.')}."
        )
        step = f"{_MASTER_STEP.removesuffix('.')}, and check your own Spark settings."
        raise ConfigurationError(problem, step, setting="spark.master") from error
    prepare_session(session)
    return session


def prepare_session(session: SparkSession) -> None:
    """Check that a new session has the release of this PySpark, and make its calls of JVM
    functions faster.
    """
    _check_release(session, session.sparkContext.master)
    cache_jvm_functions(session)


def spark_release() -> str:
    """Return the release of this PySpark, such as "4.1". Raises ConfigurationError for one that
    is not supported.
    """
    from pyspark import __version__ as version

    release = ".".join(version.split(".")[:2])
    if release not in _HADOOP:
        problem = f"PySpark is {version}: expected {', '.join(_HADOOP)}."
        raise ConfigurationError(
            problem, "Install the newest of them that your cluster has.", setting="pyspark"
        )
    return release


def _check_release(session: SparkSession, master: str | None) -> None:
    """Raise ConfigurationError unless the session has the release of this PySpark.

    SPARK_HOME or a server may bring another one.
    """
    if not session.version.startswith(f"{spark_release()}."):
        problem = (
            f"Spark at {master} is {session.version}: expected {spark_release()}, as PySpark is"
            " here."
        )
        step = (
            "Install the same release on both sides, or use another Spark: unset SPARK_HOME, or"
            " correct the master."
        )
        raise ConfigurationError(problem, step, setting="spark.master")


def is_connect(master: str | None) -> bool:
    """Return whether this master, or if None that in ADJUNCT_SPARK_MASTER, is the URL of a Spark
    Connect server.
    """
    return (master or os.environ.get("ADJUNCT_SPARK_MASTER") or "").startswith(_CONNECT)


def _connection_error(error: Exception, where: str) -> AdjunctError:
    """Return the error for a Spark Connect server that can't be used.

    It is transient if the server does not answer. A missing package of the client has its own
    next step.
    """
    details = _RPC_DETAILS.search(str(error))
    reason = details[1] if details else first_message_line(error)
    problem = f"Spark Connect can't be used at {where}: {reason.rstrip('.')}."
    step = (
        "Start the server, or correct the URL, such as sc://localhost:15002 or"
        " sc://localhost:15002/;token=…."
    )
    if isinstance(error, OSError) or "UNAVAILABLE" in str(error):
        return TransientError(problem, step)
    if isinstance(error, ImportError):
        step = 'Install what the client needs: pip install "dagster-adjunct[connect]".'
    return ConfigurationError(problem, step, setting="spark.master")


def _connect(url: str, config: Mapping[str, str], lake_url: str | None) -> SparkSession:
    """Return a session of a Spark Connect server, with a database of its own for the tables that
    Adjunct's scans need, because all sessions of a server share its catalog.

    Raises TransientError for a server that does not answer, and ConfigurationError for one that
    rejects this client or keeps its tables in a metastore, and for settings that a session can't
    change.
    """
    _check_master(url)
    _check_reach(url, lake_url or os.environ.get("ADJUNCT_LAKE"))
    address = urlsplit(url)
    host = address.hostname or ""
    port = address.port or 15002
    from pyspark.errors import PySparkException

    try:
        # Spark's client would try for minutes.
        socket.create_connection((host, port), _SECONDS_TO_CONNECT).close()
        from pyspark.sql import SparkSession

        session = SparkSession.builder.remote(url).getOrCreate()
        limit_retries(session, _RETRIES)
        catalog = session.conf.get(_CATALOG)
    except (OSError, ImportError, PySparkException) as error:
        raise _connection_error(error, f"{host}:{port}") from error
    _check_release(session, f"sc://{host}:{port}")
    if catalog != _PLANS[_CATALOG]:
        problem = (
            f"the Spark Connect server at {host}:{port} has {_CATALOG}={catalog}: expected"
            " in-memory."
        )
        raise ConfigurationError(problem, "Start a server with this setting.", setting=_CATALOG)
    # For an application, settings of Hadoop begin with spark.hadoop; for one session, they are
    # named without that.
    settings = {}
    for name, value in _PLANS.items():
        if name not in _OF_THE_SERVER:
            settings[name.removeprefix("spark.hadoop.")] = value
    settings |= {name: str(value) for name, value in config.items() if name != "spark.master"}
    for name, value in settings.items():
        try:
            session.conf.set(name, value)
        except Exception as error:
            problem = (
                f"{name} can't be set in a session of Spark Connect:"
                f" {first_message_line(error).rstrip('.')}."
            )
            step = "Start the server with it, and leave it out of spark_config."
            raise ConfigurationError(problem, step, setting=name) from error
    session.sql(f"CREATE DATABASE IF NOT EXISTS {_database(session)}")
    session.sql(f"USE {_database(session)}")
    return session


def _database(session: SparkSession) -> str:
    """Return the name of the database that a session of Spark Connect has of its own."""
    return f"adjunct_{identify_session(session).replace('-', '')}"


def stop_session(session: SparkSession) -> None:
    """Stop a session. If its JVM was started to archive its classes, also end that.

    Of a session of Spark Connect, the database is dropped. The server goes on.
    """
    if is_remote(session):
        # each request to a dead server would be repeated for 20 seconds
        limit_retries(session, 0)
        with contextlib.suppress(Exception):  # the server may have ended, and the database with it
            session.sql("USE default")
            session.sql(f"DROP DATABASE IF EXISTS {_database(session)} CASCADE")
        session.stop()
        return
    context = session.sparkContext
    options = context.getConf().get("spark.driver.extraJavaOptions", None) or ""
    gateway = gateway_of(session)
    tuning.wait_for_workers(context)
    session.stop()
    tuning.stop_jvm(gateway, options)


@validated
@contextlib.contextmanager
def session_scope(
    *,
    master: str | None = None,
    lake_url: str | None = None,
    quick: bool | None = None,
    on_start: Callable[[str], None] = lambda text: None,
) -> Iterator[Callable[[], SparkSession]]:
    """Yield a function that returns the session; code that never calls it never waits for Spark.

    For the master "none" (also in ADJUNCT_SPARK_MASTER) it yields IN_PROCESS: nothing is ever
    started. `quick` (default: as ADJUNCT_SPARK_QUICK says, else not) is for short runs and small
    batches: the JVM compiles less, and loads classes from an archive. The first such JVM of a
    machine writes the archive when it ends, which takes some seconds. A session that is already
    running is used, and not stopped at the end. `on_start` is called with a line of text before a
    session is started, which takes 6-10 s.
    """
    if is_in_process(master):
        yield IN_PROCESS
        return
    owned: list[SparkSession] = []

    @cache
    def spark() -> SparkSession:
        """Return the running session, or start one, which this scope then owns and stops.

        Later calls return the same session (`cache`).
        """
        is_owned = not has_running_session()
        if is_owned:
            on_start("starting Spark")
        # Classes are archived when the JVM ends, and only an owned one is ended here.
        session = new_session(master=master, lake_url=lake_url, quick=quick, keep_classes=is_owned)
        if is_owned:
            owned.append(session)
        return session

    try:
        yield spark
    finally:
        for session in owned:
            stop_session(session)


def prepare_environment() -> None:
    """Check Java, and set the environment so that Spark's workers use this Python."""
    check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # Otherwise Spark's launcher resolves the name of this host, which may fail on a laptop or in a
    # container.
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("SPARK_LOCAL_HOSTNAME", "localhost")
    # Options of the small JVM that only assembles the command line of Spark's JVM.
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def _check_master(master: str, *, is_elsewhere: bool = False) -> None:
    """Raise ConfigurationError for an unknown master or a missing YARN configuration, which crash
    Spark's launcher.

    What spark-submit has accepted is not checked again: services have masters of their own. For a
    driver that `is_elsewhere`, the YARN configuration of this machine does not matter.
    """
    if _GATEWAY in os.environ:
        return
    is_known = _MASTER.fullmatch(master) is not None
    needs_yarn = master == "yarn" and not is_elsewhere
    has_yarn = not {"HADOOP_CONF_DIR", "YARN_CONF_DIR"}.isdisjoint(os.environ)
    if is_known and (has_yarn or not needs_yarn):
        return
    if not is_known:
        problem = "Spark has no such master"
        step = _MASTER_STEP
    else:
        problem = "neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set"
        step = "Set one of them to the folder with the configuration of your YARN cluster."
    # a token would follow the semicolon
    problem = f"Spark could not be started with the master {master.partition(';')[0]!r}: {problem}."
    raise ConfigurationError(problem, step, setting="spark.master")


def _check_reach(master: str, lake_url: str | None) -> None:
    """Raise ConfigurationError if executors may run on machines that can't access the folder in
    which the lake is.

    With a local master they run on this machine. None for `lake_url` means the default lake, which
    is a folder.
    """
    url = lake_url or DEFAULT_LAKE
    if master.startswith("local") or url.startswith(("s3://", "s3a://")):
        return
    if LakeSettings().shared:
        return
    problem = (
        f"lake {url!r} is a folder, and the executors of {master} may run on machines that can't"
        " access it."
    )
    step = (
        "Set ADJUNCT_LAKE_SHARED=true if every machine has this folder under the same path;"
        " otherwise use an s3:// lake or a local master."
    )
    raise ConfigurationError(problem, step, argument="lake_url")


def _s3a() -> dict[str, str]:
    """Return the settings for S3A, without credentials, which come from its standard chain."""
    lake = LakeSettings()
    settings = {
        "spark.jars.packages": ",".join(
            (f"org.apache.hadoop:hadoop-aws:{_HADOOP[spark_release()]}", *_S3A_PACKAGES)
        ),
        "spark.jars.excludes": ",".join(_S3A_EXCLUDES),
        "spark.hadoop.fs.s3a.path.style.access": "true" if lake.path_style else "false",
        "spark.hadoop.fs.s3a.connection.ssl.enabled": "true",
        # This input stream requests the rest if a reply is cut off; the default of newer releases
        # fails.
        "spark.hadoop.fs.s3a.input.stream.type": "classic",
    }
    endpoint = lake.endpoint or _find_variable("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    check_endpoint(endpoint)
    if endpoint:
        settings["spark.hadoop.fs.s3a.endpoint"] = endpoint
        settings["spark.hadoop.fs.s3a.connection.ssl.enabled"] = str(
            endpoint.startswith("https")
        ).lower()
    region = lake.region or _find_variable("AWS_REGION", "AWS_DEFAULT_REGION")
    if region:
        settings["spark.hadoop.fs.s3a.endpoint.region"] = region
    return settings


def _find_variable(*names: str) -> str:
    """Return the first of these environment variables that is set, or ""."""
    for name in names:
        if os.environ.get(name):
            return os.environ[name]
    return ""
