"""`adjunct table …`: records of remote tables by keys of every type."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_adjunct import Application
from dagster_adjunct.orchestration.application.table_registry import register_tables
from dagster_adjunct.orchestration.cli.output import NOT_FOUND
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.tables import BlockingTable, RemoteTable, SqliteTable
from tests.orchestration.cli.commands import document, refused


@pytest.mark.parametrize(
    ("kind", "key", "text", "other", "wrong"),
    [
        ("decimal(10,2)", Decimal("12.50"), "12.5", "12.51", "12,50"),
        ("boolean", True, "true", "false", "yes"),
        ("double", 0.5, "0.5", "1", "half"),
        ("string", "12.50", "12.50", "12.5", None),
    ],
)
def test_a_record_is_found_by_a_key_of_its_type(
    kind: str, key: Any, text: str, other: str, wrong: str | None, tmp_path: Path
) -> None:
    world, app = SimpleNamespace(lake=open_lake(tmp_path / "lake")), Application("prices")
    function = SqliteTable(
        tmp_path / "prices.sqlite", "prices", "k", columns={"k": kind, "n": "int"}, create=True
    )
    app.table(
        table := RemoteTable("prices", key="k", read_function=function, write_function=function)
    )
    with register_tables(world.lake, app, by="test"), BlockingTable(table) as prices:
        prices.put(key, {"n": 7})
    assert document(world, "table", "get", "prices", text)["record"]["n"] == 7
    assert document(world, "table", "get", "prices", other, code=NOT_FOUND)["record"] is None
    if wrong is not None:
        assert f"is {kind}, not {wrong!r}" in refused(world, "table", "get", "prices", wrong)
