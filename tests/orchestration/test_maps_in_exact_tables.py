"""Records of one message with maps are told apart by tables that count, as other records are."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark
LINES: list[dict[str, Any]] = [
    {"k": "a", "lines": [{"tags": {"x": 1, "y": None}}, {"tags": {"y": None, "x": 1}}, None]},
    {"k": "b", "lines": [{"tags": None}, {"tags": {}}]},
]


def test_records_with_maps_of_one_message_are_counted_once(
    step_world: StepWorld, either_engine: str
) -> None:
    schema = Schema.of(k="string", lines=[{"tags": "map<string,int>"}])
    step_world.streams.create("orders", schema=schema, key=["k"], partitions=1)
    step_world.streams.append("orders", LINES, producer="test", sequence=1)
    columns = {"k": "string", "n": "bigint", "tags": "map<string,int>"}
    file = step_world.folder / "counted.sqlite"
    store = SqliteTable(file, "counted", "k", columns=columns, create=True)
    table = RemoteTable("counted", key="k", write_function=store, idempotent=True)
    app = Application("app")
    lines = app.input_stream("lake.orders", default_offset="oldest").flat_map("lines as line")
    lines.update(
        app.table(table),
        set={"tags": "line.tags"},
        add={"n": "coalesce(size(line.tags), 10)"},
        if_missing=[],
    )
    step_world.run(app)
    step_world.again(app)
    with sqlite3.connect(file) as connection:
        counted = connection.execute("SELECT k, n, tags FROM counted ORDER BY k").fetchall()
    assert counted == [("a", 14, None), ("b", 10, "{}")]
