"""`adjunct stream delete` and `adjunct dataset delete`: what they ask, print and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.resources.errors import StillReadError
from dagster_adjunct.resources.objects.lake import open_lake
from tests.assets.conftest import World
from tests.assets.cycle import NAME, planes_in, publish

WHY = ["--reason", "ticket 7", "--by", "ada"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = planes_in(open_lake(tmp_path / "lake"))
    publish(world, 1)
    return world


def run(world: World, *words: str, **options: object) -> Result:
    return CliRunner().invoke(root, [*words, "--lake", world.lake.url], **options)  # type: ignore[arg-type]


def test_a_stream_is_deleted_after_a_question(world: World) -> None:
    refused = run(world, "stream", "delete", f"lake.{NAME}", *WHY, "--yes")
    assert isinstance(refused.exception, StillReadError)
    dry = run(world, "stream", "delete", NAME, *WHY, "--dry-run")
    assert "objects" in dry.stdout
    assert "needs --force: dataset planes follows it" in dry.stdout
    asked = run(world, "stream", "delete", NAME, *WHY, "--force", input="n\n")
    assert asked.exit_code == 1
    assert NAME in world.streams.list_streams()
    done = run(world, "stream", "delete", NAME, *WHY, "--force", input="y\n")
    assert done.exit_code == 0, done.output
    assert "forced: dataset planes follows it" in done.stdout
    assert world.streams.list_streams() == []
    assert "nothing is left of it" in run(world, "stream", "delete", NAME, *WHY, "--yes").stdout


def test_a_dataset_is_deleted_with_a_report_for_programs(world: World) -> None:
    done = run(world, "dataset", "delete", NAME, *WHY, "--yes", "--json")
    report = json.loads(done.stdout)
    assert (report["kind"], report["name"], report["repeated"]) == ("dataset", NAME, False)
    assert report["objects"] > 3
    assert json.loads(run(world, "dataset", "list", "--json").stdout) == []


def test_a_dataset_is_rewritten_into_other_partitions(world: World) -> None:
    done = run(world, "dataset", "repartition", NAME, "--partitions", "5", *WHY)
    assert (
        "1 version(s) of 4 stored rows rewritten from 2 into 5 partitions; declare partitions=5"
        in done.stdout
    )
    displayed = json.loads(run(world, "dataset", "list", "--json").stdout)
    assert displayed[0]["declaration"]["partitions"] == 5


def test_a_dry_run_of_a_rewriting_changes_nothing(world: World) -> None:
    dry = run(world, "dataset", "repartition", NAME, "--partitions", "5", "--dry-run", *WHY)
    assert "1 version(s) of 4 stored rows would be rewritten from 2 into 5 partitions" in dry.stdout
    displayed = json.loads(run(world, "dataset", "list", "--json").stdout)
    assert displayed[0]["declaration"]["partitions"] == 2
