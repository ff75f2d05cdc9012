"""What a run says of records that a table drops without an error: letters, or an error with
their keys.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.errors import TableError
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.step_world import StepWorld


@pytest.fixture
def world(tmp_path: Path) -> StepWorld:
    world = StepWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    world.stream("changes", "k", 2, k="string", v="int")
    world.send("changes", *((f"k{n}", n) for n in range(40)))
    with sqlite3.connect(tmp_path / "t.sqlite") as connection:
        connection.execute("CREATE TABLE things (k TEXT PRIMARY KEY, v INT)")
        for event in ("INSERT", "UPDATE"):
            connection.execute(
                f"CREATE TRIGGER drop_{event} BEFORE {event} ON things WHEN NEW.v % 10 = 3 "
                "BEGIN SELECT RAISE(IGNORE); END"
            )
    return world


def sending(world: StepWorld, name: str, **letters: Any) -> Application:
    app = Application(name, engine="auto")
    store = SqliteTable(world.folder / "t.sqlite", "things", "k")
    if letters:
        letters["dead_letters"] = app.output_stream("lake.letters", partitions=1)
    app.input_stream("lake.changes").update(
        app.table(RemoteTable("things", key="k", write_function=store)),
        set=["v"],
        if_missing=[],
        **letters,
    )
    return app


def test_dropped_records_become_letters_and_are_not_counted_as_written(world: StepWorld) -> None:
    counters = world.run(sending(world, "app", at_most=10)).counters
    assert (counters["things"]["updates"], counters["things"]["dead_letters"]) == (36, 4)
    assert sorted(row["key"] for row in world.rows("letters")) == [
        '"k13"',
        '"k23"',
        '"k3"',
        '"k33"',
    ]
    with sqlite3.connect(world.folder / "t.sqlite") as connection:
        assert connection.execute("SELECT count(*) FROM things").fetchone() == (36,)


def test_without_letters_the_batch_fails_and_names_the_keys(world: StepWorld) -> None:
    app = sending(world, "app")
    with pytest.raises(TableError) as caught:
        world.run(app)
    assert "rejected 4 records" in caught.value.problem
    assert world.state(app).open is not None
