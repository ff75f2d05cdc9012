"""What plans note of SQL that gives other results in a repeated or another batch, and of updates of
windows, happens as noted.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dagster_adjunct import Application
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.errors import AdjunctError, ProducerConflictError
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.windows import Count, Tumbling
from tests.orchestration.step_world import StepWorld

pytestmark = [pytest.mark.spark, pytest.mark.lengthy]


def drawing(world: StepWorld, name: str, *, stream: bool, **conditions: Any) -> Application:
    """Return an application that draws a number for each record, and writes it to a table and, if
    asked, to a stream.
    """
    app = Application(name)
    store = SqliteTable(
        world.folder / "t.sqlite", name, "k",
        columns={"k": "string", "n": "bigint", "drawn": "double", "seen": "array<double>"},
        create=True,
    )  # fmt: skip
    table = app.table(
        RemoteTable(name, key="k", read_function=store, write_function=store, **conditions)
    )
    drawn = app.input_stream("lake.r", default_offset="oldest").with_columns(drawn="rand()")
    if stream:
        drawn = drawn.send_to(app.output_stream(f"lake.{name}", partitions=1, key="k"))
    drawn.update(table, set=["drawn"], append={"seen": "array(drawn)"}, if_missing=[])
    return app


def notes_of(app: Application, world: StepWorld, part: str) -> list[str]:
    return [note for note in plan_application(app, systems=world.systems).notes if part in note]


def row(world: StepWorld, name: str) -> dict[str, Any]:
    with closing(sqlite3.connect(world.folder / "t.sqlite")) as connection:
        connection.row_factory = sqlite3.Row
        (found,) = map(dict, connection.execute(f"SELECT * FROM {name}"))
        return found


def test_what_chance_gives_in_a_repeated_batch_is_rejected_or_written_as_noted(
    step_world: StepWorld,
) -> None:
    world = step_world
    world.stream("r", "k", 1, k="string", n="bigint")
    world.send("r", ("a", 1))
    for name, conditions in (("plain", {}), ("marked", {"idempotent": True})):
        app = drawing(world, name, stream=False, **conditions)
        (note,) = notes_of(app, world, "is repeated")
        assert "a remote table gets both" in note
        assert "unless it is idempotent" in note
        world.run(app)
        first = row(world, name)
        world.again(app)
        second = row(world, name)
        assert (second == first) == (name == "marked")
        assert len(json.loads(second["seen"])) == (1 if name == "marked" else 2)
    app = drawing(world, "streamed", stream=True)
    world.run(app)
    first = row(world, "streamed")
    with pytest.raises(ProducerConflictError):
        world.again(app)
    assert row(world, "streamed") == first
    assert [found["drawn"] for found in world.rows("streamed")] == [first["drawn"]]


def test_a_local_table_rejects_what_chance_gives_in_a_repeated_batch(step_world: StepWorld) -> None:
    world = step_world
    world.stream("r", "k", 1, k="string", n="bigint")
    world.send("r", ("a", 1))
    app = Application("kept")
    table = app.local_table(
        "drawn", key="k", schema=Schema.of(k="string", drawn="double"), partitions=1
    )
    records = app.input_stream("lake.r", default_offset="oldest")
    records.map("k", "rand() as drawn").send_to(table)
    assert len(notes_of(app, world, "is repeated")) == 1
    world.run(app)
    (kept,) = entries(world, "drawn")
    with pytest.raises(AdjunctError):
        world.again(app)
    assert entries(world, "drawn") == [kept]


def entries(world: StepWorld, dataset: str) -> list[dict[str, Any]]:
    with open_dataset(world.lake, dataset) as opened:
        return [entry for _, entry in opened.items()]


def test_sql_windows_see_one_batch_as_noted_and_a_window_over_time_all(
    step_world: StepWorld,
) -> None:
    world = step_world
    world.stream("r", "k", 1, k="string", n="bigint")
    found = {}
    for name, most in (("together", 100), ("apart", 1)):
        app = Application(name, max_batch_records=most)
        records = app.input_stream("lake.r", default_offset="oldest")
        records.with_columns(total="sum(n) over (partition by k)").send_to(
            app.output_stream(f"lake.{name}", partitions=1, key="k")
        )
        assert len(notes_of(app, world, "one batch only")) == 1
        if name == "together":
            world.send("r", ("a", 1), ("a", 2), ("a", 4))
        world.run(app)
        found[name] = sorted(row["total"] for row in world.rows(name))
    assert found == {"together": [7, 7, 7], "apart": [1, 2, 4]}


@pytest.mark.parametrize("only_final", [False, True])
def test_updates_of_a_window_are_counted_as_records_where_it_is_noted(
    step_world: StepWorld, only_final: bool
) -> None:
    world = step_world
    world.stream("sales", "k", 1, k="string", at="timestamp")
    app = Application("windows")
    sales = app.input_stream(
        "lake.sales", event_time="at", delay=timedelta(0), default_offset="oldest"
    )
    minutes = sales.window(
        Tumbling(timedelta(minutes=1)), by="k", name="m", results="updates",
        aggregates={"n": Count()},
    )  # fmt: skip
    if only_final:
        minutes = minutes.filter("final")
    hours = minutes.window(
        Tumbling(timedelta(hours=1)), by="k", name="h", aggregates={"minutes": Count()}
    )
    hours.send_to(app.output_stream("lake.hours", partitions=1, key="k"))
    assert len(notes_of(app, world, "each update of a window")) == (not only_final)
    begin = datetime(2026, 3, 2, 12, tzinfo=UTC)
    for second in (0, 10, 20):  # each batch updates the same minute
        world.send("sales", ("a", begin + timedelta(seconds=second)))
        world.run(app)
    world.send("sales", ("a", begin + timedelta(hours=5)))
    world.run(app)
    world.send("sales", ("a", begin + timedelta(hours=9)))
    world.run(app)
    first = next(row for row in world.rows("hours") if row["window_start"] == begin)
    assert (first["minutes"] > 1) == (not only_final)
