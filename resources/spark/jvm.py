"""The private interfaces of PySpark and py4j that this package uses, all in one place.

They may change in any release: `pyproject.toml` allows only the minor versions they are written
for, and `tests/test_private_interfaces.py` fails for another one, and where one is used elsewhere.
The daemon of Python workers (`worker_daemon.py`) wraps PySpark's own, which is private too.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

WRITTEN_FOR = ("4.1", "4.2", "4.3")


def has_spark_context() -> bool:
    """Return whether this process has a Spark context, without loading PySpark."""
    pyspark = sys.modules.get("pyspark")
    return pyspark is not None and pyspark.SparkContext._active_spark_context is not None


def join_submitted_jvm() -> None:
    """Connect to the JVM of spark-submit, which has started this process."""
    from pyspark import SparkContext

    SparkContext._ensure_initialized()


def running_jvm() -> Any:
    """Return the JVM that this process's Spark context runs in."""
    from pyspark import SparkContext

    return SparkContext._jvm


def gateway_of(session: SparkSession) -> Any:
    """Return py4j's gateway to the session's JVM."""
    return session.sparkContext._gateway


@contextmanager
def start_jvm() -> Iterator[Any]:
    """Yield a JVM with Spark's classes, without a session."""
    from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

    found = find_spec("pyspark")  # does not load PySpark
    jars = Path(str(found and found.origin)).parent / "jars"
    port = launch_gateway(
        jarpath=str(next(jars.glob("py4j-*.jar"))),
        classpath=str(jars / "*"),
        javaopts=["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"],
        redirect_stderr=subprocess.DEVNULL,
        die_on_exit=True,
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    try:
        yield gateway.jvm
    finally:
        gateway.shutdown()


_FUNCTION_CLASSES = ("functions", "org.apache.spark.sql.functions", "PythonUtils")


class JvmMethodCache:
    """Stands for a class of the JVM, and looks up each of its static methods only once."""

    def __init__(self, jvm_class: Any) -> None:
        self._class = jvm_class

    def __getattr__(self, name: str) -> Any:
        from py4j.java_gateway import JavaMember

        member = getattr(self._class, name)
        # it has no state but its name, so all threads may share it
        if isinstance(member, JavaMember):
            setattr(self, name, member)
        return member


def cache_jvm_functions(session: SparkSession) -> None:
    """Let this session, and later ones of its JVM, look up each of Spark's functions in the JVM
    only once.

    Otherwise py4j requests `functions` and then `col` before it calls `F.col("a")`, and a small
    batch creates about a thousand columns.
    """
    jvm = session.sparkContext._jvm
    for name in _FUNCTION_CLASSES:
        if name not in vars(jvm):  # py4j does not look up attributes that the object has
            setattr(jvm, name, JvmMethodCache(getattr(jvm, name)))


# Plans of frames. A client of Spark Connect has none.


def is_deterministic(frame: DataFrame) -> bool:
    """Return whether Spark computes the same rows each time; assumed for a frame of Spark
    Connect.
    """
    java = getattr(frame, "_jdf", None)
    return java is None or bool(java.queryExecution().analyzed().deterministic())


def executed_plan(frame: DataFrame) -> Any:
    """Return the physical plan of a frame; no job runs."""
    return _java(frame).queryExecution().executedPlan()


def cached_plan(frame: DataFrame) -> Any:
    """Return the physical plan that computes the rows of a frame that was just persisted.

    `executed_plan` may return the plan from before it was persisted.
    """
    manager = _java(frame).sparkSession().sharedState().cacheManager()
    cached = manager.lookupCachedData(_java(frame)).get()
    return cached.cachedRepresentation().cacheBuilder().cachedPlan()


def release_checkpoint(frame: DataFrame) -> None:
    """Free the memory of a frame that is checkpointed locally, as RDD.unpersist does, without
    its warning that the rows can't be computed again.
    """
    rdd = _java(frame).queryExecution().logical().rdd()
    rdd.context().unpersistRDD(rdd.id(), False)


def _java(frame: DataFrame) -> Any:
    """Return the JVM's object of a frame."""
    return frame._jdf


def spark_type_of(schema: pa.Schema) -> StructType:
    """Return the type of a frame that an Arrow table becomes."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)


def limit_retries(session: SparkSession, retries: int) -> None:
    """Limit how often a session of Spark Connect repeats a request (0: never); its own policy
    waits for ten minutes.
    """
    from pyspark.sql.connect.client.retries import DefaultPolicy

    client: Any = session.client
    client.set_retry_policies([DefaultPolicy(max_retries=retries)] if retries else [])
