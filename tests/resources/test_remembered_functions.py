"""Spark's functions are looked up in the JVM once, and make the same columns."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from py4j.clientserver import ClientServerConnection
from pyspark.sql import functions as F

from dagster_adjunct.resources.spark.jvm import cache_jvm_functions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
def test_a_column_takes_one_request_to_the_jvm_and_is_the_same(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    send = ClientServerConnection.send_command

    def noted(connection: Any, command: str) -> Any:
        if threading.current_thread() is threading.main_thread():
            asked.append(command)
        return send(connection, command)

    made = [F.col("id"), F.upper(F.lit("a"))]  # looked up, if they were not before
    monkeypatch.setattr(ClientServerConnection, "send_command", noted)
    columns = [F.col(f"c{number}") for number in range(10)]
    columns += [F.upper(F.lit("a"))]
    assert len([command for command in asked if not command.startswith("m\nd")]) == 12
    assert [str(column) for column in columns] == [
        *(f"Column<'c{number}'>" for number in range(10)),
        str(made[1]),
    ]


@pytest.mark.spark
def test_what_spark_has_not_is_refused_as_before_and_sessions_may_share_it(
    spark: SparkSession,
) -> None:
    cache_jvm_functions(spark)
    cache_jvm_functions(spark.newSession())
    jvm: Any = spark.sparkContext._jvm
    with pytest.raises(Exception, match="no_such does not exist in the JVM"):
        jvm.functions.no_such  # noqa: B018 - asking is the point
    rows: list[Any] = []
    threads = [
        threading.Thread(target=lambda: rows.append(spark.range(3).select(F.sum("id")).first()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row[0] for row in rows] == [3] * 4
