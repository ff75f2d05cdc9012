"""`adjunct dataset lag, compact, rebuild, show`, and progress: what they say of tables that
follow change streams.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.manifest import Retention
from tests.assets.conftest import World
from tests.orchestration.cli.commands import printed, refused

SCHEMA = Schema.of(k="string", n="int")
RATES = unbounded_dataset("rates", input="lake.rates", key="k", partitions=2, chunk=2)
STOCK = bounded_dataset("stock", input="lake.stock", key="k", partitions=2)
SHORT = unbounded_dataset("short", input="lake.short", key="k", partitions=2, persistent=False)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("ADJUNCT_SPARK_MASTER", "none")
    module = ModuleType("shop")
    module.app = Application("shop")  # type: ignore[attr-defined]
    for dataset in (RATES, STOCK, SHORT):
        module.app.table(dataset)
    monkeypatch.setitem(sys.modules, "shop", module)
    world = World(open_lake(tmp_path / "lake"), IN_PROCESS)
    for name in ("rates", "stock", "short"):
        world.stream(name, SCHEMA, ["k"], 2)
    world.send("rates", [("a", 1), ("b", 2), ("c", 3), ("d", 4)])
    return world


def advanced(world: World) -> str:
    return printed(world, "dataset", "advance", "rates", "shop:app")


def test_an_advance_prints_how_far_a_bootstrap_is(world: World) -> None:
    lines = [line for line in advanced(world).splitlines() if "bootstrap took" in line]
    assert "% (" in lines[0]
    assert lines[-1].endswith("100% (4 of 4 offsets)")


def test_a_run_prints_it_too_and_leaves_alone_what_lives_for_one_run(world: World) -> None:
    text = printed(world, "run", "shop:app")
    assert "100% (4 of 4 offsets)" in text
    assert "short" not in text
    assert (
        json.loads(printed(world, "run", "shop:app", "--json"))["datasets"][0]["action"]
        == "up-to-date"
    )


def test_the_lag_is_displayed_by_partition_with_the_bootstrap(world: World) -> None:
    advanced(world)
    facts = json.loads(printed(world, "dataset", "lag", "rates", "--json"))
    assert (facts["dataset"], facts["bootstrap"]["per_cent"]) == ("rates", 100)
    assert facts["decision"]["action"] == "bootstrap"
    assert sum(lag["offsets"] for lag in facts["partitions"].values()) == 0
    world.send("rates", [("a", 5), ("b", 6)])
    behind = json.loads(printed(world, "dataset", "lag", "rates", "--json"))["partitions"]
    assert sum(lag["records"] for lag in behind.values()) == 2
    for lag in behind.values():
        assert lag["offsets"] == int(lag["end"]) - int(lag["next"])
    text = printed(world, "dataset", "lag", "rates")
    assert "lake.rates.0" in text
    assert re.search(r"0:0\d:\d\d", text), "time behind"


def test_show_reports_the_lag_and_stays_readable_without_the_stream(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    advanced(world)
    assert set(
        json.loads(printed(world, "dataset", "show", "rates", "--json"))["lag"]["partitions"]
    ) == {"lake.rates.0", "lake.rates.1"}
    assert "behind its stream" in printed(world, "dataset", "show", "rates")
    monkeypatch.setattr("dagster_adjunct.resources.streams.lake.streams.LAKE", "moon")
    text = printed(world, "dataset", "show", "rates")
    assert "The lag is unknown: there is no stream system 'lake'" in text
    assert "schema" in text
    assert "there is no stream system 'lake'" in refused(world, "dataset", "lag", "rates")


@pytest.mark.lengthy
def test_a_list_of_versions_points_to_the_history(world: World) -> None:
    advanced(world)
    assert "adjunct dataset history rates" in printed(world, "dataset", "versions", "rates")
    shown = json.loads(printed(world, "dataset", "show", "rates", "--json"))["declaration"]
    assert "order_by" in shown
    assert "order" not in shown, "that of versions is of bounded datasets"


def test_a_rebuild_says_why_and_keeps_what_was_served_until_it_is_done(world: World) -> None:
    advanced(world)
    before = StoredVersions(world.lake, "rates").require_current().version
    command = ["dataset", "rebuild", "rates", "shop:app", "--reason", "ticket 7", "--by", "ada"]
    report = json.loads(printed(world, *command, "--json"))
    assert (report["action"], report["decision"]["reason"]) == ("bootstrapped", "rebuild: ticket 7")
    assert report["version"] != before
    assert StoredVersions(world.lake, "rates").history(1)[0].by == "ada"
    assert "100% (4 of 4 offsets)" in printed(world, *command)
    unexplained = refused(world, "dataset", "rebuild", "rates", "shop:app", "--reason", " ")
    assert "--reason is empty" in unexplained
    world.streams.configure("rates", retention=Retention(max_bytes=1), compaction=None)
    world.streams.maintain("rates")
    served = StoredVersions(world.lake, "rates").require_current().version
    assert "does not hold all changes" in refused(world, *command)
    assert StoredVersions(world.lake, "rates").require_current().version == served


def test_compacting_asks_for_the_level_and_prints_the_report(world: World) -> None:
    world.advance(RATES)
    for number in (5, 6):
        world.send("rates", [("a", number)])
        world.advance(RATES)
    store = StoredVersions(world.lake, "rates")
    before = len(store.require_current().sealed.generations)
    command = ["dataset", "compact", "rates", "--by", "ada"]
    minor = json.loads(printed(world, *command, "--level", "minor", "--json"))
    assert (minor["level"], minor["generations"]) == ("minor", [before, 2])
    assert f"major compaction, version {minor['version'][:1]}" in printed(
        world, *command, "--level", "major"
    )
    assert len(store.require_current().sealed.generations) == 1
    assert "nothing" in printed(world, *command), "by its policy"
    assert [(entry.action, entry.by) for entry in store.history(limit=2)] == [
        ("compact", "ada")
    ] * 2


def test_what_is_bounded_follows_no_stream(world: World) -> None:
    world.send("stock", [("a", 1)], version="v1")
    printed(world, "dataset", "advance", "stock", "shop:app")
    assert "is bounded and has no lag" in refused(world, "dataset", "lag", "stock")
    assert "is bounded" in refused(world, "dataset", "compact", "stock")
    command = ["dataset", "rebuild", "stock", "shop:app", "--reason", "x"]
    assert "'stock' is bounded: only unbounded datasets are rebuilt" in refused(world, *command)


@pytest.mark.lengthy
def test_a_startpoint_on_its_stream_is_applied_before_the_dataset_advances(world: World) -> None:
    advanced(world)
    why = ("--oldest", "--reason", "built anew", "--by", "ada")
    printed(world, "startpoint", "set", "shop:app", "lake.rates", *why)
    applied = json.loads(printed(world, "dataset", "advance", "rates", "shop:app", "--json"))
    assert [report["action"] for report in applied] == ["bootstrapped", "up-to-date"], applied
    waiting = json.loads(printed(world, "startpoint", "list", "shop:app", "--json"))
    assert (waiting["waiting"], waiting["handed"]) == ([], [])
    assert (
        json.loads(printed(world, "dataset", "advance", "rates", "shop:app", "--json"))[0]["action"]
        == "up-to-date"
    )
