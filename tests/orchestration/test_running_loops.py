"""A run that is started where an event loop runs already, as in a notebook, asks tables as any
other does.
"""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.errors import PlanningError
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.tables import Cache, RemoteTable, SqliteTable
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark


def within_a_loop(world: StepWorld, app: Application) -> StepReport:
    async def main() -> StepReport:
        return world.run(app)

    return asyncio.run(main())


def levels(folder: Path, columns: str, **more: Any) -> RemoteTable[Any, Any, Any]:
    with sqlite3.connect(folder / "levels.sqlite") as connection:
        connection.execute(f"CREATE TABLE levels (visitor TEXT PRIMARY KEY, {columns})")
        connection.execute("INSERT INTO levels (visitor) VALUES ('ann')")
    store = SqliteTable(folder / "levels.sqlite", "levels", key="visitor")
    return RemoteTable("levels", key="visitor", read_function=store, write_function=store, **more)


def test_columns_that_the_store_does_not_have_are_found_before_a_batch(
    step_world: StepWorld, tmp_path: Path
) -> None:
    step_world.stream("visits", "visitor", 2, visitor="string", level="int")
    step_world.send("visits", ("ann", 1))
    app = Application("app")
    app.input_stream("lake.visits").send_to(app.table(levels(tmp_path, "other INTEGER")))
    with pytest.raises(PlanningError, match="table levels has no column 'level'"):
        within_a_loop(step_world, app)
    assert step_world.state(app).open is None


def test_a_table_with_a_cache_is_asked(step_world: StepWorld, tmp_path: Path) -> None:
    step_world.stream("visits", "visitor", 2, visitor="string", n="int")
    step_world.send("visits", ("ann", 1), ("bob", 2))
    app = Application("app")
    table = app.table(levels(tmp_path, "level INTEGER DEFAULT 7", cache=Cache()))
    joined = app.input_stream("lake.visits").join(
        table, on="visitor", how="left", select={"level": "int"}
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="visitor"))
    assert within_a_loop(step_world, app).batches == 1
    assert {row["visitor"]: row["level"] for row in step_world.rows("out")} == {
        "ann": 7,
        "bob": None,
    }
