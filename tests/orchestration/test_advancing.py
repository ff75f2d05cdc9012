"""What a run of an application brings up to date, and what its sensor waits for, whatever a
dataset is made from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import (
    FileSource,
    QuerySource,
    bounded_dataset,
    unbounded_dataset,
    version_set,
)
from dagster_adjunct.assets.declaration.policies import VersionPartitions
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.orchestration.application.application import Application, group_datasets
from dagster_adjunct.orchestration.planner.planner import systems_for
from dagster_adjunct.orchestration.step.progress import describe_waiting_datasets
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World

SCHEMA = Schema.of(item="string", price="int")
ITEMS = bounded_dataset("items", input="lake.items", key="item", partitions=2)
PRICES = bounded_dataset("prices", input="lake.prices", key="item", partitions=2)
DAILY = bounded_dataset(
    "daily",
    input=QuerySource("SELECT …", SCHEMA),
    key="item",
    broadcast=True,
    bootstrap=False,
    versions=VersionPartitions("day", start="2026-01-01"),
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(open_lake(tmp_path / "lake"), IN_PROCESS)
    for name in ("orders", "items", "prices"):
        world.stream(name, SCHEMA, ["item"], 2)
    return world


def application(*datasets: Any) -> Application:
    app = Application("shop")
    app.input_stream("lake.orders").send_to(
        app.output_stream("lake.copy", partitions=2, key="item")
    )
    for dataset in datasets:
        app.table(dataset)
    return app


def test_a_run_publishes_a_version_set_in_one_commit_and_skips_partitioned_datasets(
    world: World,
) -> None:
    app = application(*version_set("catalogue", ITEMS, PRICES), DAILY)
    for stream in ("items", "prices"):
        world.send(stream, [("a", 1), ("b", 2)], version="v1")
    received: list[str] = []
    report = run_application(
        app,
        lake=world.lake,
        systems=systems_for(app, lake=world.lake),
        spark=IN_PROCESS,
        run="r1",
        on_event=lambda e: received.append(e.summary()),
    )
    assert [(done.dataset, done.action) for done in report.datasets] == [
        ("items", "sealed"),
        ("prices", "sealed"),
    ]
    assert received[0] == "planned: 1 input, 2 operators, 1 output, 3 datasets"
    assert [text.split(";")[0] for text in received[1:3]] == [
        "dataset items: sealed",
        "dataset prices: sealed",
    ]
    items, prices = (open_dataset(world.lake, name).history(1)[0] for name in ("items", "prices"))
    assert (items.number, items.at, items.action) == (prices.number, prices.at, prices.action)


def test_datasets_advance_in_order_of_declaration_and_members_of_a_set_together() -> None:
    rates = unbounded_dataset("rates", input="lake.rates", key="item", broadcast=True)
    items, prices = version_set("catalogue", ITEMS, PRICES)
    units = group_datasets([items, rates, prices], "application 'shop'")
    assert [[dataset.name for dataset in unit] for unit in units] == [
        ["items", "prices"],
        ["rates"],
    ]
    with pytest.raises(ConfigurationError) as failure:
        group_datasets([rates, prices], "application 'shop'")
    assert failure.value.dataset == "prices"


def test_the_sensor_waits_for_completion_objects_and_for_first_partitions(
    world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    files = bounded_dataset(
        "files", input=FileSource(str(folder), "csv", SCHEMA), key="item", broadcast=True
    )
    first = bounded_dataset(
        "first", input=DAILY.input, key="item", broadcast=True, versions=DAILY.versions
    )
    app = application(files, first, DAILY)
    (folder / "v1").mkdir(parents=True)
    (folder / "v1" / "part.csv").write_text("item,price\na,1\n", encoding="utf-8")
    systems = systems_for(app, lake=world.lake)
    waiting = describe_waiting_datasets(world.lake, systems, app)
    assert len(waiting) == 2
    assert "dataset 'files' has no version to read yet" in waiting[0]
    assert f"{folder}/v1/_SUCCESS" in waiting[0]
    assert waiting[1].startswith("dataset 'first' has no version yet: materialise a partition")
    (folder / "v1" / "_SUCCESS").touch()
    assert len(describe_waiting_datasets(world.lake, systems, app)) == 1, (
        "a run seals what is delivered"
    )
