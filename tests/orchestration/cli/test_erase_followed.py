"""`adjunct dataset erase` for the table of a change stream."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.unbounded.tables import entries, send, table


def test_a_key_is_erased_from_every_generation_after_asking(tmp_path: Path) -> None:
    world = World(open_lake(tmp_path / "lake"), IN_PROCESS)
    spec = table(world, "table")
    send(world, spec, {"a": 1, "b": 2})
    send(world, spec, {"a": 3})
    command = [
        "dataset",
        "erase",
        "table",
        "a",
        "--reason",
        "request 7",
        "--by",
        "ada",
        "--lake",
        world.lake.url,
    ]
    asked = CliRunner().invoke(root, command, input="n\n", env={"COLUMNS": "220"})
    assert "Erase 1 key(s) from every generation of table permanently?" in asked.output
    assert entries(world, spec) == {"a": 3, "b": 2}
    done = CliRunner().invoke(root, [*command, "--yes", "--json"])
    report = json.loads(done.output)
    assert (
        done.exit_code,
        report["complete"],
        [generation["rows"] for generation in report["rewritten"]],
    ) == (0, True, [1, 1])
    assert report["retained_from"] == 4
    assert "lake.table, whose records hold the keys" in report["not_erased"][0]
    assert entries(world, spec) == {"b": 2}
