"""Nested values that commands print: JSON in one line in tables, JSON documents with --json."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_adjunct import Lake, LakeStreams, advance_dataset, bounded_dataset, open_lake
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.cli.output import format_value
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.nested_orders import AT, ORDERS, ROWS
from tests.orchestration.cli.commands import document, printed, refused

pytest.importorskip("duckdb")

QUERY = "FROM lake.orders SELECT * EXCLUDE (__tombstone, __epoch) ORDER BY k"


@dataclass
class World:
    lake: Lake


@pytest.fixture
def world(tmp_path: Path) -> World:
    """The orders as a stream and as versions of a dataset, of which the second has another city."""
    lake = open_lake(tmp_path / "lake")
    streams = LakeStreams(lake)
    streams.create("orders", schema=ORDERS, key=["k"], partitions=1)
    streams.append("orders", ROWS, producer="t", sequence=1, end_of_dataset="v1")
    return World(lake)


def json_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the orders as JSON holds it."""
    if row["k"] == "nulls":
        return row
    lines = []
    for line in row["lines"]:
        written = line
        if line is not None and line["at"] is not None:
            written = {**line, "price": str(line["price"]), "at": "2026-01-31T12:00:00.123456Z"}
        lines.append(written)
    notes = dict(row["notes"])
    if notes.get("x"):
        notes["x"] = {"at": "2026-01-31T12:00:00.123456Z", "by": base64.b64encode(b"\0\1").decode()}
    days = [day and day.isoformat() for day in row["days"]]
    return {**row, "lines": lines, "notes": notes, "days": days}


EXPECTED = [json_row(row) for row in ROWS]


def test_a_nested_value_is_json_in_one_line() -> None:
    assert format_value({"a": [1.5, None], "b\n": {"at": AT}}, own=True) == (
        '{"a": [1.5, null], "b\\n": {"at": "2026-01-31T12:00:00.123456Z"}}'
    )
    assert format_value([], own=True) == "[]"
    assert format_value({}, own=True) == "{}"


@pytest.mark.lengthy
def test_queries_print_nested_values(world: World, tmp_path: Path) -> None:
    assert document(world, "sql", QUERY) == EXPECTED
    table = printed(world, "sql", "FROM lake.orders SELECT k, attributes, customer.address AS home")
    assert '│ {"a": [1, null], "b": [], "c": null} │ {"city": "Ulm", "zip code": null} │' in table
    assert len({len(line) for line in table.splitlines()[1:]}) == 1, "it is one table"
    target = tmp_path / "orders.json"
    printed(world, "sql", QUERY, "--format", "json", "--output", str(target))
    assert json.loads(target.read_text()) == EXPECTED
    assert "column 'customer' has arrays, structs or maps, which CSV does not hold" in refused(
        world, "sql", QUERY, "--format", "csv"
    )


@pytest.mark.lengthy
def test_rows_whose_nested_values_do_not_fit_are_blocks_of_lines(world: World) -> None:
    query = "FROM lake.orders SELECT k, customer, lines WHERE k = 'full'"
    run = CliRunner().invoke(root, ["sql", query, "--lake", world.lake.url], env={"COLUMNS": "80"})
    title, *lines = run.output.splitlines()
    assert title == "1 row"
    assert max(map(len, lines)) <= 80
    cells = [line[1:-1].split("│", 1) for line in lines[1:-1]]
    named = {name.strip(): value.strip() for name, value in cells if name.strip()}
    assert list(named) == ["k", "customer", "lines"]
    (row,) = document(world, "sql", query)
    beginnings = [json.dumps(line)[:20] for line in row["lines"] if line is not None]
    assert beginnings
    found = [value.strip(" [") for name, value in cells if value.strip().startswith(("[", "{"))]
    for beginning in beginnings:
        assert any(value.startswith(beginning) for value in found), beginning
    wide = CliRunner().invoke(
        root, ["sql", query, "--wide", "--lake", world.lake.url], env={"COLUMNS": "80"}
    )
    assert json.dumps(row["lines"])[:40] in wide.output


@pytest.mark.lengthy
def test_entries_of_datasets_are_printed_with_their_nested_values(world: World) -> None:
    spec = bounded_dataset("orders", input="lake.orders", key="k", partitions=2)
    advance_dataset(spec, lake=world.lake, spark=IN_PROCESS)
    found = document(world, "dataset", "items", "orders")["entries"]
    assert found == EXPECTED
    (full,) = document(world, "dataset", "get", "orders", "full")
    assert full["entry"] == EXPECTED[1]
    shown = printed(world, "dataset", "get", "orders", "full")
    assert '{"a": [1, null], "b": [], "c": null}' in shown
    changed = {**ROWS[1], "attributes": {"a": []}}
    LakeStreams(world.lake).append(
        "orders", [ROWS[0], changed, *ROWS[2:]], producer="t", sequence=2, end_of_dataset="v2"
    )
    advance_dataset(spec, lake=world.lake, spark=IN_PROCESS)
    difference = printed(world, "dataset", "diff", "orders", "v1", "v2")
    assert '{"a": [1, null], "b": [], "c": null} -> {"a": []}' in difference
    (change,) = document(world, "dataset", "diff", "orders", "v1", "v2")["sample"]["changed"]
    assert change["old"] == EXPECTED[1]


def test_schemas_are_printed_with_their_nested_types(world: World) -> None:
    shown = printed(world, "stream", "show", "orders")
    for kind in ORDERS.types.values():
        assert kind in shown
    assert document(world, "stream", "show", "orders")["schema"] == ORDERS.to_json()
