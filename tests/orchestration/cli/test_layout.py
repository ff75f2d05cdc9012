"""Tables in 80 columns: ids, times and reasons stay readable, and --wide has them whole."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.cli.output import (
    NOT_FOUND,
    format_minutes,
    format_value,
    run_command,
    shorten_cells,
)
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.kept_processes import program
from tests.orchestration.cli.test_version_commands import PLANES, SCHEMA

REASON = "the April delivery has the wrong seats in it, ticket 4711, see the wiki"


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(open_lake(tmp_path / "lake"), IN_PROCESS)
    world.stream("planes", SCHEMA, ["tailnum"], 2)
    for version, rows in (("2013-01-01", [("N1", 1), ("N2", 2)]), ("2013-02-01", [("N1", 1)])):
        world.send("planes", rows, version=version)
        world.advance(PLANES)
    return world


def displayed(world: World, *arguments: str, columns: int = 80) -> list[str]:
    result = CliRunner().invoke(
        root, [*arguments, "--lake", world.lake.url], env={"COLUMNS": str(columns)}
    )
    assert result.exception is None, result.exception
    return result.output.splitlines()


@pytest.mark.parametrize(
    "command", ["list", "versions planes", "history planes", "show planes", "expire --dry-run"]
)
def test_no_id_and_no_time_is_folded_in_80_columns(world: World, command: str) -> None:
    StoredVersions(world.lake, "planes").pin(
        "2013-01-01", reason=REASON, by="ada.lovelace@example.com"
    )
    lines = displayed(world, "dataset", *command.split())
    tables = [line for line in lines if line.startswith("│")]
    assert max(map(len, tables)) <= 80
    ids = {ref.id for ref in StoredVersions(world.lake, "planes").versions()}
    cells = [cell.strip() for line in tables for cell in line.strip("│").split("│")]
    named = [cell for cell in cells if cell.startswith("v0")]
    assert named
    assert all(
        cell in ids or any(version_id.startswith(f"{cell}-") for version_id in ids)
        for cell in named
    )
    if command.startswith(("versions", "history")):
        assert any(cell == f"{datetime.now(UTC):%Y-%m-%d %H}:{cell[-2:]}" for cell in cells)
        assert any("min_rows: 1 row, expected 2 or more" in line for line in lines)
    if command.startswith("history"):
        assert any(REASON in line for line in lines)


def test_wide_tables_have_ids_times_and_reasons_whole(world: World) -> None:
    refs = StoredVersions(world.lake, "planes").versions()
    lines = displayed(world, "dataset", "versions", "planes", "--wide")
    for ref in refs:
        (line,) = [line for line in lines if ref.id in line]
        assert ref.reason in line
        assert ref.sealed_at.isoformat()[:19] in line


def test_a_shortened_id_is_taken_where_it_is_one_versions(world: World) -> None:
    store = StoredVersions(world.lake, "planes")
    first, second = store.versions()
    assert store.version(first.id[:7]).version == first.id
    assert store.version(first.id[:12]).version == first.id
    assert f"version {second.id} of planes" in displayed(
        world, "dataset", "show", "planes", second.id[:7]
    )
    displayed(world, "dataset", "pin", "planes", first.id[:7], "--reason", "x", "--by", "y")
    for wrong in ("v00000", "v0000019", "000001"):
        with pytest.raises(DatasetError) as caught:
            store.version(wrong)
        assert (caught.value.dataset, caught.value.version) == ("planes", wrong)


def test_ids_of_one_number_are_distinguished_by_what_differs() -> None:
    rows = [
        ["v000001-ab34567890abcdef"],
        ["v000001-ac34567890abcdef"],
        ["v000002-0134567890abcdef"],
        ["v1-x"],
    ]
    assert shorten_cells(rows) == [["v000001-ab"], ["v000001-ac"], ["v000002"], ["v1-x"]]


@pytest.mark.parametrize(
    ("time", "reads"),
    [
        ("2026-11-22T01:31:49.509823+00:00", "2026-11-22 01:31"),
        ("2026-11-22T01:31:49Z", "2026-11-22 01:31"),
        ("timestamp 2026-01-01T04:00:00+00:00", "timestamp 2026-01-01T04:00Z"),
        ("timestamp 2026-01-01T04:00:07+00:00", "timestamp 2026-01-01T04:00:07Z"),
        ("timestamp 2026-01-01T04:00:00.250000+00:00", "timestamp 2026-01-01T04:00:00.250000Z"),
        ("2026-11-22", "2026-11-22"),
    ],
)
def test_times_are_displayed_by_the_minute_and_those_asked_for_exactly(
    time: str, reads: str
) -> None:
    assert format_minutes(time) == reads


@pytest.mark.parametrize(
    "arguments",
    [
        ["dataset", "show", "planes", "--as-of", "2026-01-31T18:00"],
        ["dataset", "show", "planes", "--as-of", "2026-01-31"],
        ["dataset", "pin", "planes", "v000001", "--expires", "2026-01-31T18:00", "--reason", "x"],
    ],
)
def test_a_time_without_its_zone_is_answered_with_what_to_type(
    world: World, arguments: list[str]
) -> None:
    error = CliRunner().invoke(root, [*arguments, "--lake", world.lake.url]).exception
    assert isinstance(error, ConfigurationError)
    assert "has no time zone. Give 2026-01-31T" in str(error)
    assert "tzinfo" not in str(error)


@pytest.mark.lengthy
def test_a_used_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [program("adjunct"), "ui", "--port", str(port)]
        env = {"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 1
    assert f"port {port} of 127.0.0.1 can't be used" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_ui_that_a_script_starts_in_the_background_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It inherits an ignored SIGINT, and Dagster treats SIGTERM like that."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    handlers: list[object] = []
    monkeypatch.setattr(
        os, "execve", lambda *command: handlers.append(signal.getsignal(signal.SIGINT))
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        CliRunner().invoke(root, ["ui", "--port", port], catch_exceptions=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [signal.SIG_DFL]


@pytest.fixture
def prices(tmp_path: Path) -> World:
    """A dataset over time, of which each command shows values that a sum or a year would be."""
    world = World(open_lake(tmp_path / "prices"), IN_PROCESS)
    schema = Schema.of(
        item="string", price="double", year="int", shown="boolean", part="decimal(20,10)"
    )
    world.stream("prices", schema, ["item"], 1)
    dataset = bounded_dataset(
        "prices", input="lake.prices", key="item", partitions=1, valid_from="name"
    )
    for version, price in (("2026-01-01", 1234.56789012345), ("2026-01-02", 1e-7)):
        row = {
            "item": "a",
            "price": price,
            "year": 2019,
            "shown": True,
            "part": Decimal("0.1000000001"),
        }
        world.streams.append(
            "prices", [row], producer="p", sequence=int(version[-1]), end_of_dataset=version
        )
        world.advance(dataset)
    return world


@pytest.mark.parametrize("command", ["get prices a", "items prices", "history prices a"])
def test_values_of_users_are_displayed_as_they_are(prices: World, command: str) -> None:
    words = set(
        " ".join(displayed(prices, "dataset", *command.split(), columns=200))
        .replace("│", " ")
        .split()
    )
    assert {"1e-07", "2019", "True", "0.1000000001"} <= words
    assert command.startswith("history") <= ("1234.56789012345" in words)


def test_a_difference_shows_values_as_they_are(prices: World) -> None:
    lines = " ".join(
        displayed(prices, "dataset", "diff", "prices", "2026-01-01", "2026-01-02", columns=200)
    )
    assert "1234.56789012345 -> 1e-07" in lines


def test_keys_are_printed_as_commands_take_them_and_every_document_is_json(world: World) -> None:
    schema = Schema.of(blob="binary", at="timestamp", weight="double", raw="binary")
    world.stream("blobs", schema, ["blob", "at"], 1)
    moment = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    row = {"blob": b"\x00\xff", "at": moment, "weight": math.nan, "raw": b"\xfe"}
    world.streams.append("blobs", [row], producer="p", sequence=1, end_of_dataset="v1")
    world.advance(bounded_dataset("blobs", input="lake.blobs", key=["blob", "at"], partitions=1))

    def strict(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    def read(*arguments: str) -> Any:
        return json.loads(
            "\n".join(displayed(world, "dataset", *arguments, "--json")), parse_constant=strict
        )

    (entry,) = read("items", "blobs")["entries"]
    assert entry == {
        "blob": "AP8=",
        "at": "2026-01-02T03:04:05.000678Z",
        "weight": "nan",
        "raw": "/g==",
    }
    (found,) = read("get", "blobs", entry["blob"], entry["at"])
    assert (found["key"], found["entry"]) == ([entry["blob"], entry["at"]], entry)
    assert "AP8=" in " ".join(displayed(world, "dataset", "items", "blobs", columns=200))


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("get prices a", 0),
        ("get prices b", NOT_FOUND),
        ("get prices a b", NOT_FOUND),
        ("history prices a", 0),
        ("history prices b", NOT_FOUND),
        ("items prices --prefix b", 0),
    ],
)
def test_a_key_that_is_not_there_has_an_exit_code_of_its_own(
    prices: World, command: str, code: int
) -> None:
    for form in ([], ["--json"]):
        line = ["dataset", *command.split(), "--lake", prices.lake.url, *form]
        assert run_command(lambda line=line: root(line, standalone_mode=False)) == code


def test_nested_values_of_users_are_displayed_as_json() -> None:
    assert (
        format_value({"x": 0.125, "years": [2019, 2020], "in": [{"y": 1234.5}]}, own=True)
        == '{"x": 0.125, "years": [2019, 2020], "in": [{"y": 1234.5}]}'
    )
    assert format_value({"rows": 1234, "rate": 1234.5678}) == "rows: 1,234, rate: 1,234.5678"
