"""Operators on records of a test, each compared with what plain Python makes of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from dagster_adjunct import Application, Schema
from dagster_adjunct.tables import RemoteTable, TableReadFunction
from dagster_adjunct.testing import TestApplication, TestResult, TestStream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WORDS = Schema.of(k="string", text="string", n="int")
STREAMS = {
    "lake.a": TestStream(WORDS, key="k", partitions=2),
    "lake.b": TestStream(WORDS, key="k", partitions=2),
}
A = [{"k": f"k{i % 3}", "text": " ".join("xyz"[: i % 4]), "n": i} for i in range(12)]
B = [{"k": f"k{i % 5}", "text": "b", "n": 100 + i} for i in range(5)]


def ran(app: Application, spark: SparkSession) -> TestResult:
    with TestApplication(app, STREAMS) as test:
        test.input("lake.a", A)
        test.input("lake.b", B)
        return test.run(spark)


def sent(result: TestResult) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(record.values()) for record in result.output("lake.out"))


def test_flat_map_filter_select_and_with_columns(spark: SparkSession) -> None:
    app = Application("words")
    (
        app.input_stream("lake.a")
        .filter("text <> ''")
        .flat_map("split(text, ' ') as word")
        .with_columns(doubled="n * 2")
        .select("k", "word", "doubled")
        .send_to(app.output_stream("lake.out", partitions=2, key="k"))
    )
    expected = [
        (row["k"], word, row["n"] * 2)
        for row in A
        if row["text"]
        for word in row["text"].split(" ")
    ]
    assert sent(ran(app, spark)) == Counter(expected)


def test_merge_and_partition_by_an_expression(spark: SparkSession) -> None:
    app = Application("both")
    merged = app.input_stream("lake.a").merge(app.input_stream("lake.b"))
    moved = merged.partition_by("n % 3 as rest").map("rest", "k", "n")
    moved.send_to(app.output_stream("lake.out", partitions=3, key="rest"))
    assert sent(ran(app, spark)) == Counter((row["n"] % 3, row["k"], row["n"]) for row in [*A, *B])


def test_a_local_table_keeps_the_latest_of_each_key_from_run_to_run(spark: SparkSession) -> None:
    app = Application("latest")
    latest = app.local_table("latest", key="k", schema=Schema.of(k="string", n="int"), partitions=2)
    records = app.input_stream("lake.a")
    records.select("k", "n").send_to(latest)
    looked = app.input_stream("lake.b").join(latest, on="k", how="left", select=["n as last"])
    looked.select("k", "n", "last").send_to(app.output_stream("lake.out", partitions=2, key="k"))
    with TestApplication(app, STREAMS) as test:
        state: dict[str, int] = {}
        for rows in (A, [{**A[0], "n": 50}]):
            test.input("lake.a", rows)
            test.input("lake.b", B)
            state |= {row["k"]: row["n"] for row in rows}
            result = test.run(spark)
            assert sent(result) == Counter((row["k"], row["n"], state.get(row["k"])) for row in B)
            assert {key: entry["n"] for key, entry in result.table("latest").items()} == state


class Unreachable(TableReadFunction[str, Any]):
    """A service that no test reaches."""

    async def get(self, key: str, *args: object) -> Any:
        raise AssertionError("the real function was called")


def test_a_lookup_meets_what_the_test_has_put_there(spark: SparkSession) -> None:
    app = Application("looked-up")
    names = app.table(RemoteTable("names", key="k", read_function=Unreachable()))
    joined = app.input_stream("lake.b").join(names, on="k", how="left", select={"name": "string"})
    joined.select("k", "n", "name").send_to(app.output_stream("lake.out", partitions=2, key="k"))
    known = {"k0": "zero", "k3": "three"}
    with TestApplication(app, STREAMS) as test:
        test.table("names", {key: {"name": name} for key, name in known.items()})
        test.input("lake.b", B)
        result = test.run(spark)
    assert sent(result) == Counter((row["k"], row["n"], known.get(row["k"])) for row in B)
    assert result.table("names") == {key: {"k": key, "name": name} for key, name in known.items()}


def test_a_broadcast_input_reaches_every_task(spark: SparkSession) -> None:
    app = Application("told")
    app.input_stream("lake.a")
    app.input_stream("lake.b", broadcast=True).select("task", "n").send_to(
        app.output_stream("lake.out", partitions=2, key="task")
    )
    assert sent(ran(app, spark)) == Counter((task, row["n"]) for task in (0, 1) for row in B)
