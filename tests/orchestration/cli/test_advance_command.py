"""`adjunct dataset advance`, and `adjunct run` of datasets alone: what is published, and what
they say.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import (
    Computation,
    QuerySource,
    bounded_dataset,
    unbounded_dataset,
    version_set,
)
from dagster_adjunct.assets.declaration.policies import VersionPartitions
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.validation.validators import min_rows, row_count_within
from dagster_adjunct.assets.versions.reports import StageEvent
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.orchestration.cli.commands import invoke, printed, refused

SCHEMA = Schema.of(item="string", price="int")


def answer(spark: Any, asked: Computation) -> pa.Table:
    """Return what a query says of its day."""
    return pa.table({"item": ["a"], "price": pa.array([int(asked.version[-2:])], pa.int32())})


ITEMS, FEES = version_set(
    "catalogue",
    bounded_dataset("items", input="lake.items", key="item", partitions=2),
    bounded_dataset("fees", input="lake.fees", key="item", partitions=2),
)
STOCK = bounded_dataset("stock", input="lake.stock", key="item", partitions=2)
RATES = unbounded_dataset("rates", input="lake.rates", key="item", partitions=2)
DAILY = bounded_dataset(
    "daily",
    input=QuerySource(answer, SCHEMA),
    key="item",
    broadcast=True,
    versions=VersionPartitions("day", start="2026-01-01"),
)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("ADJUNCT_SPARK_MASTER", "none")
    module = ModuleType("shop")
    module.full, module.alone = application(), application("alone", only=True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop", module)
    world = World(open_lake(tmp_path / "lake"), IN_PROCESS)
    for name in ("orders", "items", "fees", "stock", "rates"):
        world.stream(name, SCHEMA, ["item"], 2)
    return world


def application(name: str = "full", *, only: bool = False) -> Application:
    app = Application(name)
    for dataset in (ITEMS, FEES, STOCK, DAILY) if only else (ITEMS, FEES, STOCK, DAILY, RATES):
        app.table(dataset)
    if not only:
        app.input_stream("lake.orders").send_to(
            app.output_stream("lake.copy", partitions=2, key="item")
        )
    return app


def served(world: World, name: str) -> str | None:
    manifest = StoredVersions(world.lake, name).manifest()
    return None if manifest is None or manifest.version is None else manifest.version.name


def test_a_dataset_is_advanced_and_nothing_else_of_its_application(world: World) -> None:
    world.send("stock", [("a", 1)], version="v1")
    world.send("items", [("a", 1)], version="v1")
    (report,) = json.loads(
        printed(world, "dataset", "advance", "stock", "shop:full", "--by", "ada", "--json")
    )
    assert (report["dataset"], report["action"], report["rows"]) == ("stock", "sealed", 1)
    assert (served(world, "stock"), served(world, "items")) == ("v1", None)
    assert StoredVersions(world.lake, "stock").history(1)[0].by == "ada"
    assert "dataset stock: up-to-date" in printed(world, "dataset", "advance", "stock", "shop:full")


def test_a_member_of_a_version_set_is_advanced_with_all_members(world: World) -> None:
    world.send("items", [("a", 1)], version="v1")
    displayed = printed(world, "dataset", "advance", "items", "shop:full")
    assert "waits for the end-of-dataset markers of lake.fees" in displayed
    world.send("fees", [("a", 1)], version="v1")
    reports = json.loads(printed(world, "dataset", "advance", "fees", "shop:full", "--json"))
    assert [(advance["dataset"], advance["action"]) for advance in reports] == [
        ("items", "sealed"),
        ("fees", "sealed"),
    ]


def test_an_older_partition_is_not_served_unless_it_is_to_be_current(world: World) -> None:
    command = ["dataset", "advance", "daily", "shop:full", "--partition"]
    for day, then in (("2026-01-05", "2026-01-05"), ("2026-01-02", "2026-01-05")):
        printed(world, *command, day)
        assert served(world, "daily") == then
    printed(world, *command, "2026-01-03", "--make-current")
    assert served(world, "daily") == "2026-01-03"
    assert len(StoredVersions(world.lake, "daily").versions()) == 3


def test_what_can_not_be_advanced_so_is_refused_with_the_next_step(world: World) -> None:
    advance = ["dataset", "advance"]
    assert "declares no dataset 'item'; it declares: items, fees" in refused(
        world, *advance, "item", "shop:full"
    )
    assert "Pass the partition to compute: partition=" in refused(
        world, *advance, "daily", "shop:full"
    )
    assert "needs --partition" in refused(world, *advance, "daily", "shop:full", "--make-current")
    partition = ["--partition", "2026-01-01"]
    assert "declares no version partitions" in refused(
        world, *advance, "stock", "shop:full", *partition
    )
    assert "a member of the version set 'catalogue'" in refused(
        world, *advance, "fees", "shop:full", *partition
    )
    assert "'rates' is unbounded" in refused(world, *advance, "rates", "shop:full", *partition)


@pytest.mark.lengthy
def test_a_run_of_an_application_with_datasets_only_advances_them(world: World) -> None:
    for stream in ("items", "fees", "stock"):
        world.send(stream, [("a", 1)], version="v1")
    report = json.loads(printed(world, "run", "shop:alone", "--json"))
    assert [advance["dataset"] for advance in report["datasets"]] == ["items", "fees", "stock"]
    assert report["step"] is None
    assert [served(world, name) for name in ("items", "fees", "stock", "daily")] == [
        "v1",
        "v1",
        "v1",
        None,
    ]
    text = printed(world, "run", "shop:alone")
    assert "dataset stock: up-to-date" in text
    assert "adjunct dataset advance daily shop:alone --partition VERSION" in text
    assert "declares only datasets" in text
    for time in ("30m", "0m"):
        refused = invoke(world, "run", "shop:alone", "--follow", time)
        assert isinstance(refused.exception, ConfigurationError)
        assert refused.exception.setting == "--follow"


@pytest.mark.lengthy
def test_a_rejected_version_has_its_own_exit_code_and_no_stage_of_a_switch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = bounded_dataset(
        "stock",
        input="lake.stock",
        key="item",
        partitions=2,
        validators=[min_rows(2), row_count_within(0.2, severity="warn")],
    )
    app = Application("judged")
    app.table(judged)
    monkeypatch.setattr(sys.modules["shop"], "judged", app, raising=False)
    world.send("stock", [("a", 1), ("b", 2)], version="v1")
    assert invoke(world, "dataset", "advance", "stock", "shop:judged").exit_code == 0
    world.send("stock", [("a", 1), ("b", 2), ("c", 3)], version="v2")
    warned = invoke(world, "dataset", "advance", "stock", "shop:judged")
    assert warned.exit_code == 0
    assert "warning: version 'v2': row_count_within: 3 rows, +50.0% of the 2" in warned.output

    world.send("stock", [("a", 1)], version="v3")
    world.send("stock", [("b", 1)], version="v4")
    refused = invoke(world, "dataset", "advance", "stock", "shop:judged")
    assert refused.exit_code == 3
    assert refused.output.count("is rejected: min_rows: 1 row, expected 2 or more") == 2
    assert served(world, "stock") == "v2"
    later = invoke(world, "dataset", "advance", "stock", "shop:judged")
    assert later.exit_code == 0, "nothing was refused by this one"
    assert "version 'v4' (v000004-" in later.output, "and it says what the state of things is"

    world.send("stock", [("c", 1)], version="v5")
    by_run = invoke(world, "run", "shop:judged", "--json")
    assert by_run.exit_code == 3
    assert json.loads(by_run.output)["datasets"][0]["action"] == "rejected"

    events: list[StageEvent] = []
    world.send("stock", [("c", 1)], version="v6")
    advance_dataset(
        judged,
        lake=world.lake,
        systems=world.systems,
        spark=IN_PROCESS,
        by="ada",
        on_stage=events.append,
    )
    reported = {event.stage: event.summary() for event in events if event.version == "v6"}
    assert "rejected and stored" in reported["reject"]
    building, built, *_ = [event for event in events if event.version == "v6"]
    assert (building.summary(), building.is_notable) == (
        "dataset stock, version v6: building",
        True,
    )
    assert built.stage == "build"
    assert "min_rows: 1 row, expected 2 or more" in reported["reject"]
    assert not {"seal", "switch"} & reported.keys()
    world.send("stock", [("c", 3), ("b", 2), ("a", 1)], version="v7")
    events.clear()
    advance_dataset(
        judged,
        lake=world.lake,
        systems=world.systems,
        spark=IN_PROCESS,
        by="ada",
        on_stage=events.append,
    )
    assert "switch" not in {event.stage for event in events}, "it equals the one served"
