"""Checks the syntax of expressions and queries with Spark's own parser, without a session."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dagster_adjunct.resources.spark.errors import first_message_line
from dagster_adjunct.resources.spark.in_process import has_running_session
from dagster_adjunct.resources.spark.session import check_java

_STATE = re.compile(r"^\[[\w.]+\] |\.?\s*SQLSTATE: \w+")


def syntax_errors(texts: Sequence[tuple[str, bool]]) -> list[str]:
    """Return for each (text, whether it is a query) the error of Spark's parser, or "".

    Starts a JVM, which takes a second or two, unless the process has one. Raises ConfigurationError without Java.
    """
    with _jvm() as jvm:
        parser = getattr(getattr(jvm.org.apache.spark.sql.catalyst.parser, "CatalystSqlParser$"), "MODULE$")
        return [_error(parser.parsePlan if is_query else parser.parseExpression, text) for text, is_query in texts]


def _error(parse: Any, text: str) -> str:
    try:
        parse(text)
    except Exception as error:  # noqa: BLE001 - PySpark raises various types
        return _STATE.sub("", first_message_line(Exception(_java_exception(error).getMessage()))).rstrip(".")
    return ""


def _java_exception(error: BaseException) -> Any:
    """Return the JVM's exception. Once a process has had a session, PySpark wraps those of all its JVMs."""
    cause: BaseException | None = error
    while cause is not None:
        if (java := getattr(cause, "java_exception", None)) is not None:
            return java
        cause = cause.__context__
    raise error


@contextlib.contextmanager
def _jvm() -> Iterator[Any]:
    check_java()
    from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

    if has_running_session():
        import pyspark

        yield pyspark.SparkContext._jvm
        return
    found = importlib.util.find_spec("pyspark")
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
