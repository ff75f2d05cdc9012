"""`adjunct metadata …`: where a lake keeps its metadata."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState, BatchLog
from dagster_adjunct.resources.lakes import open_lake
from tests.orchestration.cli.commands import World, document, printed, refused

MOVE = ("metadata", "move", "--to-key-value-table", "lake/meta")


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A lake with one application that has committed once."""
    lake = open_lake(tmp_path / "lake")
    log = BatchLog(lake, "app")
    log.move(log.read(), ApplicationState(), by="test")
    return SimpleNamespace(lake=lake)


def test_they_are_moved_shown_collected_and_moved_back(world: World, tmp_path: Path) -> None:
    assert "among the lake's objects" in printed(world, "metadata", "show")
    assert document(world, "metadata", "show") is None
    report = document(world, *MOVE, "--sqlite", str(tmp_path / "meta.sqlite"))
    assert (report["moved"], report["table"], report["strays"]) == (True, "lake/meta", [])
    assert "already" in printed(world, *MOVE)
    shown = document(world, "metadata", "show")
    assert (shown["backend"]["backend"], shown["below"]) == ("sqlite", ["applications/", "metadata/"])
    assert "lake/meta" in printed(world, "metadata", "show")
    left = document(world, "metadata", "collect", "--dry-run")["objects"]
    assert left > 0
    assert f"{left} objects deleted" in printed(world, "metadata", "collect")
    assert "holds the metadata of" in refused(world, "kvt", "delete", "lake/meta", "--yes")
    assert "to the lake's objects" in printed(world, "metadata", "move", "--back")
    assert document(world, "metadata", "show") is None
    assert "sealed" in refused(world, *MOVE)
    assert "one way at a time" in refused(world, "metadata", "move")
    assert "names no scope" in refused(world, "metadata", "move", "--to-key-value-table", "meta")


def test_who_commits_in_the_old_place_all_the_same_is_told(world: World) -> None:
    stale = open_lake(world.lake.url)
    printed(world, *MOVE)
    log = BatchLog(stale, "never-ran-before")
    log.move(log.read(), ApplicationState(), by="stale")
    assert document(world, *MOVE)["strays"] == ["applications/never-ran-before/CURRENT"]
    assert "applications/never-ran-before/CURRENT: somebody who had the lake open before" in printed(world, *MOVE)
    log = BatchLog(open_lake(world.lake.url), "never-ran-before")
    log.move(log.read(), ApplicationState(), by="another")
    assert "applications/never-ran-before/CURRENT in" in refused(world, "metadata", "move", "--back")
    world.lake.store.delete("applications/never-ran-before/CURRENT")
    assert document(world, "metadata", "move", "--back")["moved"] is True
    commit = BatchLog(open_lake(world.lake.url), "never-ran-before").read().commit
    assert commit is not None
    assert commit.by == "another"
