"""Columns whose names have dots, spaces and backticks go through every operator that hands
records to functions.
"""

from __future__ import annotations

import datetime as dt
import itertools
import sqlite3
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.failures import analysis_error
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.windows import Aggregate, Count, Sum, Tumbling
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark

COLUMNS = {"the.key": "string", "a.b": "int", "c d": "string", "e`f": "int"}
RECORDS = [("x", 1, "u", 10), ("y", 2, "v", 20), ("x", 3, "w", 30)]


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    step_world.stream("events", "the.key", 2, **COLUMNS)
    step_world.send("events", *RECORDS)
    return step_world


def own(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("__")}


def test_they_reach_a_remote_table_whole(world: StepWorld) -> None:
    store = SqliteTable(
        world.folder / "t.sqlite", "things", "the.key", columns=COLUMNS, create=True
    )
    table = RemoteTable("things", key="the.key", read_function=store, write_function=store)
    app = Application("tables")
    app.input_stream("lake.events").filter("`a.b` > 1").send_to(app.table(table))
    world.run(app)
    with sqlite3.connect(world.folder / "t.sqlite") as connection:
        assert sorted(connection.execute("SELECT * FROM things").fetchall()) == [
            ("x", 3, "w", 30),
            ("y", 2, "v", 20),
        ]
    # They are met by a lookup as they are, too.
    asking = Application("asking")
    events = asking.input_stream("lake.events").with_columns(**{"the`key": "`the.key`"})
    matched = events.join(asking.table(table), on={"the`key": "the.key"}, prefix="met.")
    matched.send_to(asking.output_stream("lake.met", partitions=2, key="the.key"))
    world.run(asking)
    newest = {"x": RECORDS[2], "y": RECORDS[1]}
    assert sorted(
        (row["a.b"], row["met.a.b"], row["met.e`f"]) for row in world.rows("met")
    ) == sorted((record[1], newest[record[0]][1], newest[record[0]][3]) for record in RECORDS)


def test_they_reach_functions_and_come_from_them(world: StepWorld) -> None:
    given: list[dict[str, Any]] = []
    app = Application("functions")
    newest = app.local_table("newest", key="the.key", schema=Schema.of(COLUMNS), partitions=2)
    stream = app.input_stream("lake.events").send_to(newest)
    stream = stream.flat_map(
        lambda record: [record, {**record, "c d": "again"}], schema=Schema.of(COLUMNS)
    )
    stream = stream.partition_by("the.key", partitions=2)
    stream = stream.join(
        newest,
        on="the.key",
        function=lambda record, entry: {"g.h": entry["a.b"]},
        schema=Schema.of({"g.h": "int"}),
    )

    def reported(records: pa.Table, *_: object) -> pa.Table:
        rows = records.to_pylist()
        return pa.Table.from_pylist(
            [{"the.key": r["the.key"], "all": str(sorted(own(r).items()))} for r in rows]
        )

    stream = stream.sink(reported, returns=Schema.of({"the.key": "string", "all": "string"}))
    stream.send_to(app.output_stream("lake.out", partitions=2, key="the.key"))
    world.run(app)
    newest_of = {"x": 3, "y": 2}
    for record in RECORDS:
        for text in (record[2], "again"):
            row = dict(zip(COLUMNS, record, strict=True)) | {
                "c d": text,
                "g.h": newest_of[record[0]],
            }
            given.append({"the.key": record[0], "all": str(sorted(row.items()))})
    assert sorted(map(str, map(own, world.rows("out")))) == sorted(map(str, given))


def test_they_are_the_key_and_the_values_of_windows(step_world: StepWorld) -> None:
    step_world.stream(
        "clicks", "the.key", 1, **{"the.key": "string", "at.time": "timestamp", "n.o": "int"}
    )
    times = [dt.datetime(2026, 1, 1, 0, 0, second, tzinfo=dt.UTC) for second in (1, 2, 3, 40)]
    step_world.send("clicks", *[("xyxy"[place], time, place) for place, time in enumerate(times)])

    def highest(records: pa.Table) -> int:
        return max(records.column("n.o").to_pylist())

    app = Application("windows")
    clicks = app.input_stream("lake.clicks", event_time="`at.time`", delay=dt.timedelta(seconds=5))
    made = {
        "how.many": Count(),
        "the.sum": Sum("n.o"),
        "the.highest": Aggregate(highest, "int", "n.o"),
    }
    windows = clicks.window(
        Tumbling(dt.timedelta(seconds=10)), by="the.key", name="ten", aggregates=made
    )
    windows.send_to(app.output_stream("lake.out", partitions=1, key="the.key"))
    step_world.run(app)
    rows = [own(row) for row in step_world.rows("out")]
    assert sorted((r["the.key"], r["how.many"], r["the.sum"], r["the.highest"]) for r in rows) == [
        ("x", 2, 2, 2),
        ("y", 1, 1, 1),
    ]


def test_they_are_in_records_that_are_late(step_world: StepWorld) -> None:
    columns = {"visit": "struct<id:string>", "at": "timestamp", "a.b": "int", "e`f g": "int"}
    step_world.stream("visits", "visit.id", 1, **columns)
    first = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    minutes = (0, 60, 5)  # the last one is late
    for number, after in enumerate(minutes):
        at = first + dt.timedelta(minutes=after)
        step_world.send("visits", ({"id": "x"}, at, number, -number))
    app = Application("late", few_records=0)  # Spark reads them
    visits = app.input_stream("lake.visits", event_time="at")
    visits.send_to(app.output_stream("lake.out", partitions=1, key="visit.id"))
    step_world.run(app)
    assert [(row["visit"]["id"], row["a.b"], row["e`f g"]) for row in step_world.rows("out")] == [
        ("x", number, -number) for number in range(len(minutes))
    ]


def test_every_task_reads_them(world: StepWorld) -> None:
    world.stream("others", "k", 2, k="int")
    app = Application("every")
    others = app.input_stream("lake.others")  # its partitions are divided among the tasks
    others.send_to(app.output_stream("lake.same", partitions=2, key="k"))
    events = app.input_stream("lake.events", broadcast=True)
    events.send_to(app.output_stream("lake.out", partitions=2, key="the.key"))
    world.run(app)
    copies = []
    for row in world.rows("out"):
        copies.append((tuple(row[name] for name in COLUMNS), row["task"]))
    assert sorted(copies) == sorted(itertools.product(RECORDS, range(2)))


def test_an_expression_is_blamed_only_for_names_that_it_has(world: StepWorld) -> None:
    app = Application("blamed")
    app.input_stream("lake.events").filter("the.key = 'x'")
    read, filtered = app.operators
    with pytest.raises(AnalysisException) as caught:
        world.spark().range(1).select("the.key")
    of_expression = analysis_error(filtered, caught.value)
    of_adjunct = analysis_error(read, caught.value)
    assert of_expression.next_step is not None
    assert of_expression.next_step.startswith("Correct the expression or function")
    assert of_expression.next_step != of_adjunct.next_step
