"""Spark's functions, looked up in its JVM once and not at each call.

For each `F.col("a")`, py4j asks the JVM what `functions` is, then what `col` of it is, and only then has the column
made. A small batch makes about a thousand columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CLASSES = ("functions", "org.apache.spark.sql.functions", "PythonUtils")


class Remembered:
    """A class of the JVM whose static methods are asked for once each."""

    def __init__(self, jvm_class: Any) -> None:
        self._class = jvm_class

    def __getattr__(self, name: str) -> Any:
        from py4j.java_gateway import JavaMember

        member = getattr(self._class, name)
        if isinstance(member, JavaMember):  # it knows its name alone: any thread may call it
            setattr(self, name, member)
        return member


def remember_functions(session: SparkSession) -> None:
    """Have Python look up Spark's functions in the JVM of this session once, whatever sessions it has later."""
    jvm = session.sparkContext._jvm
    for name in _CLASSES:
        if name not in vars(jvm):  # what an object has, it does not ask the JVM for
            setattr(jvm, name, Remembered(getattr(jvm, name)))
