"""The sensor and the condition that publish versions of bounded datasets as they are delivered
whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunRequest, RunsFilter

from dagster_adjunct import (
    AdjunctDataset,
    Application,
    Schema,
    bounded_dataset,
    build_definitions,
    unbounded_dataset,
    version_set,
)
from dagster_adjunct.sources import FileSource, QuerySource
from tests.orchestration.dagster.lab import APPLES, NO_SPARK, SCHEMA, Lab, key_of, running_lab
from tests.orchestration.dagster.ticking import BOTH, Automated, Ticker, switch_on

items = bounded_dataset("items", input="lake.items", key="item", partitions=2)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with running_lab(tmp_path) as lab:
        yield lab


def shop(*datasets: AdjunctDataset) -> Application:
    app = Application("shop")
    app.input_stream("lake.orders").send_to(app.output_stream("lake.copy", partitions=1))
    for dataset in datasets:
        app.table(dataset)
    return app


def sensor_of(lab: Lab, name: str, *datasets: AdjunctDataset, by: str) -> Ticker:
    return Ticker(lab.lake, shop(*datasets), lab.instance, name, by, spark=NO_SPARK)


@BOTH
def test_a_version_launches_its_dataset_alone_once_every_partition_has_its_marker(
    lab: Lab, by: str
) -> None:
    sensor = sensor_of(lab, "items_delivered", items, by=by)
    assert sensor.skipped().startswith("No new version; there is no stream 'items'")
    lab.deliver("items", APPLES, None)
    lab.streams.append_markers("items", "v1", producer="lab", sequence=8, partitions=[0])
    assert sensor.skipped() == "No new version; version v1 waits for lake.items.1."
    lab.streams.append_markers("items", "v1", producer="lab", sequence=9, partitions=[1])
    request = sensor.asked()
    assert request.asset_selection == [key_of(items)]
    assert request.run_key is not None
    assert request.run_key.startswith(f"items:{lab.lake.id}:delivered:")
    assert "attempt 1 did not change that" in sensor.skipped()


@pytest.mark.lengthy
@BOTH
def test_the_run_it_asks_for_publishes_the_version_and_then_there_is_nothing_new(
    lab: Lab, by: str
) -> None:
    sensor = sensor_of(lab, "items_delivered", items, by=by)
    for number in (1, 2):
        lab.deliver("items", APPLES[:number], f"v{number}")
        request = sensor.asked()
        job = sensor.defs.resolve_job_def("shop").get_subset(
            asset_selection=set(request.asset_selection or ())
        )
        assert job.execute_in_process(instance=lab.instance).success
        (ref,) = [ref for ref in lab.store("items").versions() if ref.name == f"v{number}"]
        assert ref.state == "sealed"
        assert sensor.skipped().startswith("No new version")


@BOTH
def test_a_run_on_its_way_is_waited_for(lab: Lab, by: str) -> None:
    sensor = sensor_of(lab, "items_delivered", items, by=by)
    lab.deliver("items", APPLES, "v1")
    lab.instance.add_run(DagsterRun("shop", status=DagsterRunStatus.STARTED))
    assert sensor.skipped() == "Version v1 is delivered; a run is already in progress."


@BOTH
def test_a_version_set_has_one_sensor_that_waits_for_all_its_members(lab: Lab, by: str) -> None:
    prices = bounded_dataset("prices", input="lake.prices", key="item", partitions=2)
    members = version_set("catalogue", items, prices)
    sensor = sensor_of(lab, "catalogue_delivered", *members, by=by)
    lab.deliver("items", APPLES, "v1")
    lab.deliver("prices", APPLES, None)
    waits = (
        "items: version v1 is there; prices: the next one waits for lake.prices.0, lake.prices.1"
    )
    assert sensor.skipped() == f"No new version; {waits}."
    lab.deliver("prices", APPLES, "v1")
    assert sensor.asked().asset_selection == [key_of(member) for member in members]


@pytest.mark.lengthy
@BOTH
def test_a_member_that_had_the_version_before_it_joined_the_set_is_not_waited_for(
    lab: Lab, by: str
) -> None:
    prices = bounded_dataset("prices", input="lake.prices", key="item", partitions=2)
    lab.deliver("items", APPLES, "v1")
    assert lab.advance(items).success
    lab.deliver("prices", APPLES, "v1")
    sensor = sensor_of(lab, "catalogue_delivered", *version_set("catalogue", items, prices), by=by)
    sensor.asked()


@BOTH
def test_files_are_delivered_too(lab: Lab, tmp_path: Path, by: str) -> None:
    folder = tmp_path / "labels"
    labels = bounded_dataset(
        "labels", input=FileSource(str(folder), "csv", SCHEMA), key="item", broadcast=True
    )
    sensor = sensor_of(lab, "labels_delivered", labels, by=by)
    sensor.skipped()
    (folder / "v1").mkdir(parents=True)
    (folder / "v1" / "part.csv").write_text("item,label,price\na,Apple,1\n")
    (folder / "v1" / "_SUCCESS").write_text("")
    assert sensor.asked().asset_selection == [key_of(labels)]


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[DagsterInstance]:
    """An instance that stores which sensors are on."""
    (tmp_path / "home").mkdir()
    with DagsterInstance.local_temp(
        str(tmp_path / "home"), {"telemetry": {"enabled": False}}
    ) as instance:
        yield instance


class All:
    """Sensors of an application that are on, or the conditions that ask the same; runs count as in
    progress.

    Sensors are asked in turn, as the daemon asks them; conditions of all assets are evaluated in
    one tick.
    """

    def __init__(
        self,
        lab: Lab,
        instance: DagsterInstance,
        *on: str,
        datasets: tuple[AdjunctDataset, ...],
        by: str = "sensor",
    ) -> None:
        self.lab, self.instance = lab, instance
        app = shop(*datasets)
        if by == "condition":
            options = {"translator": Automated(app, *on), "spark": NO_SPARK}
            self.tickers = {
                "shop_automation": Ticker(lab.lake, app, instance, "shop_automation", **options)
            }
        else:
            self.tickers = {
                name: Ticker(lab.lake, app, instance, name, spark=NO_SPARK) for name in on
            }
            switch_on(instance, *on)

    def look(self) -> list[list[str]]:
        """Return the assets of each run that is launched in one look of each sensor, or in one
        tick of conditions.
        """
        launched = []
        for ticker in self.tickers.values():
            answer = ticker.tick()
            if isinstance(answer, RunRequest):
                keys = (
                    answer.asset_selection
                    or ticker.defs.resolve_job_def("shop").asset_layer.selected_asset_keys
                )
                launched.append(sorted(key.path[-1] for key in keys))
                self.instance.add_run(
                    DagsterRun(
                        "shop", status=DagsterRunStatus.STARTED, asset_selection=frozenset(keys)
                    )
                )
        return launched

    def end(self) -> None:
        """Do what the runs do that were launched, and end them."""
        for run in self.instance.get_runs(RunsFilter(statuses=[DagsterRunStatus.STARTED])):
            job = next(iter(self.tickers.values())).defs.resolve_job_def("shop")
            job = job.get_subset(asset_selection=set(run.asset_selection or ()))
            assert job.execute_in_process(instance=self.instance).success
            self.instance.delete_run(run.run_id)


MENU = bounded_dataset("menu", input="lake.menu", key="item", partitions=2)
PAIR = (MENU, items)


@pytest.mark.lengthy
@BOTH
@pytest.mark.parametrize("turn", [1, pytest.param(-1, marks=pytest.mark.long)])
def test_one_run_for_records_takes_all_that_is_delivered_with_them(
    lab: Lab, instance: DagsterInstance, turn: int, by: str
) -> None:
    names = [
        "items_delivered",
        "menu_delivered",
        "shop_new_records",
        "shop_startpoints",
        "shop_restart",
    ][::turn]
    sensors = All(lab, instance, *names, datasets=PAIR, by=by)
    for name in ("items", "menu"):
        lab.deliver(name, APPLES, "v1")
    lab.deliver("orders", APPLES, None)
    launched = [sensors.look() for _ in range(3)]
    assert launched == [[["copy", "items_dataset", "menu_dataset"]], [], []]


@pytest.mark.lengthy
@BOTH
@pytest.mark.parametrize("turn", [1, pytest.param(-1, marks=pytest.mark.long)])
def test_without_records_one_run_takes_what_is_delivered_of_all_datasets(
    lab: Lab, instance: DagsterInstance, turn: int, by: str
) -> None:
    names = ["items_delivered", "menu_delivered", "shop_new_records"][::turn]
    sensors = All(lab, instance, *names, datasets=PAIR, by=by)
    lab.deliver("orders", APPLES[:0], None)
    for number in (1, 2):
        for name in ("items", "menu"):
            lab.deliver(name, APPLES[:number], f"v{number}")
        launched = [run for _ in range(3) for run in sensors.look()]
        assert launched == [["items_dataset", "menu_dataset"]]
        sensors.end()
        assert [lab.store(name).require_current().sealed.name for name in ("items", "menu")] == [
            f"v{number}"
        ] * 2
        assert sensors.look() == []


@BOTH
def test_a_sensor_that_is_off_has_nothing_launched_for_its_dataset(
    lab: Lab, instance: DagsterInstance, by: str
) -> None:
    for name in ("items", "menu"):
        lab.deliver(name, APPLES, "v1")
    sensors = All(lab, instance, "menu_delivered", datasets=PAIR, by=by)
    assert sensors.look() == [["menu_dataset"]], "at once: no run for records comes"


def test_what_is_delivered_later_is_launched_though_the_first_run_got_nowhere(
    lab: Lab, instance: DagsterInstance
) -> None:
    sensors = All(lab, instance, "items_delivered", "menu_delivered", datasets=PAIR)
    lab.deliver("items", APPLES, "v1")
    assert sensors.look() == [["items_dataset"]]
    for run in instance.get_runs():
        instance.delete_run(run.run_id)
    assert sensors.look() == [], "it is asked for again ever more rarely"
    lab.deliver("menu", APPLES, "v1")
    assert sensors.look() == [["items_dataset", "menu_dataset"]]


@pytest.mark.lengthy
def test_what_is_in_the_way_of_another_dataset_holds_nothing_back(
    lab: Lab, instance: DagsterInstance
) -> None:
    sensors = All(lab, instance, "menu_delivered", "items_delivered", datasets=PAIR)
    lab.deliver("items", APPLES, "v1")
    assert sensors.look() == [["items_dataset"]]
    sensors.end()
    lab.mark("items", "v1", {0: 9, 1: 9})
    lab.deliver("menu", APPLES, "v1")
    assert sensors.tickers.pop("items_delivered")
    assert sensors.look() == [["menu_dataset"]]


def test_what_is_not_delivered_has_no_such_sensor() -> None:
    schema = Schema.of(item="string", label="string")
    asked = bounded_dataset(
        "asked", input=QuerySource("SELECT 1", schema), key="item", broadcast=True
    )
    followed = unbounded_dataset("followed", input="lake.followed", key="item", broadcast=True)
    defs = build_definitions(shop(items, asked, followed))
    assert {sensor.name for sensor in defs.sensors or ()} == {
        "shop_new_records", "shop_startpoints", "shop_restart", "items_delivered",
    }  # fmt: skip
