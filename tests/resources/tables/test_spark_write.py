"""Writing frames into tables: order, keys, and errors that come back from tasks as what they
are.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.resources.errors import (
    AdjunctError,
    NullKeyError,
    SchemaMismatchError,
    TableAccessError,
)
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.operation import UpdateContract
from dagster_adjunct.resources.tables.spark import TableWrite, write_table
from dagster_adjunct.resources.tables.table import RemoteTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
PUT = "__partition int, __offset bigint, __tombstone boolean, a string, b int, v string"
UPDATE = (
    "__partition int, __offset bigint, a string, b int, `update` struct<v: string>, `default`"
    " struct<v: string>"
)


@pytest.fixture
def table(tmp_path: Path) -> RemoteTable[Any, Any, Any]:
    columns = {"a": "string", "b": "int", "v": "string"}
    store = SqliteTable(tmp_path / "t.sqlite", "t", ["a", "b"], columns=columns, create=True)
    return RemoteTable(
        "pairs", key=["a", "b"], read_function=store, write_function=store, batch_size=7
    )


def stored(folder: Path) -> dict[tuple[str, int], str]:
    with sqlite3.connect(folder / "t.sqlite") as connection:
        return {(a, b): v for a, b, v in connection.execute("SELECT a, b, v FROM t")}


def frame(spark: SparkSession, rows: list[tuple[Any, ...]], ddl: str) -> DataFrame:
    return (
        spark.createDataFrame(rows, ddl).repartition(3, "v")
        if ddl == PUT
        else spark.createDataFrame(rows, ddl)
    )


def test_records_of_a_key_arrive_in_the_order_of_their_stream_wherever_they_lay(
    spark: SparkSession, table: RemoteTable[Any, Any, Any], tmp_path: Path
) -> None:
    rows = [(0, i, i % 10 == 9, f"a{i % 4}", i % 3, str(i)) for i in range(600)]
    expected: dict[tuple[str, int], str] = {}
    for _, _, tombstone, a, b, v in rows:
        expected.pop((a, b), None)
        if not tombstone:
            expected[(a, b)] = v
    write = TableWrite(table, None, "fail", tasks=3)
    counters = write_table(
        frame(spark, rows[::-1], PUT), write, exchange=True, what="send-to-9-pairs"
    ).counters
    assert stored(tmp_path) == expected
    assert (counters["writes"], counters["deletes"]) == (540, 60)


def test_updates_of_a_composite_key_put_the_first_default_only(
    spark: SparkSession, table: RemoteTable[Any, Any, Any], tmp_path: Path
) -> None:
    rows = [(0, i, "a", i % 2, (f"u{i}",), (f"d{i}",)) for i in range(20)]
    write = TableWrite(table, UpdateContract.UPDATE_WITH_DEFAULTS, "fail", tasks=2)
    counters = write_table(
        frame(spark, rows, UPDATE), write, exchange=True, what="send-to-9-pairs"
    ).counters
    assert stored(tmp_path) == {("a", 0): "u18", ("a", 1): "u19"}
    assert (counters["updates"], counters["defaults_put"]) == (20, 2)


def test_a_key_is_null_when_any_of_its_columns_is(
    spark: SparkSession, table: RemoteTable[Any, Any, Any], tmp_path: Path
) -> None:
    rows = [(0, 0, False, "a", 1, "x"), (0, 1, False, None, 1, "y"), (0, 2, False, "a", None, "z")]
    skip = TableWrite(table, None, "skip", tasks=2)
    assert (
        write_table(frame(spark, rows, PUT), skip, exchange=True, what="sink").counters["null_keys"]
        == 2
    )
    assert stored(tmp_path) == {("a", 1): "x"}
    with pytest.raises(NullKeyError) as caught:
        write_table(
            frame(spark, rows, PUT), TableWrite(table, None, "fail", 1), exchange=False, what="sink"
        )
    assert caught.value.table == "pairs"


def test_a_frame_without_rows_writes_nothing_and_counts_nothing(
    spark: SparkSession, table: RemoteTable[Any, Any, Any], tmp_path: Path
) -> None:
    counters = write_table(
        frame(spark, [], PUT), TableWrite(table, None, "fail", 2), exchange=True, what="sink"
    ).counters
    assert not any(counters.values())


@pytest.mark.parametrize(
    ("contract", "ddl", "column"),
    [
        (None, "a string, v string", "b"),
        (UpdateContract.UPDATE_ONLY, "a string, b int, v string", "update"),
    ],
)
def test_a_frame_without_the_columns_that_are_needed_says_which(
    spark: SparkSession, table: RemoteTable[Any, Any, Any], contract: Any, ddl: str, column: str
) -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        write_table(
            spark.createDataFrame([], ddl),
            TableWrite(table, contract, "fail", 1),
            exchange=False,
            what="s",
        )
    assert (caught.value.table, caught.value.column) == ("pairs", column)


def test_what_a_task_refuses_comes_back_as_what_it_is(spark: SparkSession, tmp_path: Path) -> None:
    missing = SqliteTable(
        tmp_path / "none.sqlite",
        "t",
        ["a", "b"],
        columns={"a": "string", "b": "int", "v": "string"},
    )
    write = TableWrite(
        RemoteTable("pairs", key=["a", "b"], write_function=missing), None, "fail", 2
    )
    with pytest.raises(TableAccessError) as refused:
        write_table(
            frame(spark, [(0, 0, False, "a", 1, "x")], PUT), write, exchange=True, what="sink"
        )
    assert "none.sqlite" in str(refused.value.table)
    assert refused.value.next_step
    narrow = SqliteTable(
        tmp_path / "n.sqlite", "t", ["a", "b"], columns={"a": "string", "b": "int"}, create=True
    )
    write = TableWrite(RemoteTable("pairs", key=["a", "b"], write_function=narrow), None, "fail", 2)
    with pytest.raises(AdjunctError) as caught:
        write_table(
            frame(spark, [(0, 0, False, "a", 1, "x")], PUT), write, exchange=True, what="sink"
        )
    assert caught.value.column == "v"
