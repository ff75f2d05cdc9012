"""What a user of a new YAML project sees and clicks in the Dagster UI, in a real browser.

One project, webserver and daemon; each test goes on where those before it ended.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dagster_adjunct import LakeStreams, open_lake
from tests.kept_processes import program
from tests.servers.browser import keep_screenshot
from tests.servers.dagster import DONE, DagsterServers, dagster_servers

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

DAYS = [f"{datetime.now(UTC) - timedelta(days=age):%Y-%m-%d}" for age in (2, 1)]
GROUPS = "?expanded=global@global:inputs,global@global:my_orders,global@global:warehouse"
STARTPOINT = """ops:
  startpoint_my_orders:
    config:
      partitions: [lake.orders.0-1]
      position: {at: oldest}
      reason: prices were wrong
      by: ann
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project as `adjunct new` makes it, changed as its user would, with the first part of its
    sample data.
    """
    parent = tmp_path_factory.mktemp("browser")
    subprocess.run(
        [program("adjunct"), "new", "my-orders", "--yaml"],
        cwd=parent,
        check=True,
        capture_output=True,
    )
    folder = parent / "my-orders"
    file = folder / "my_orders/defs/orders/defs.yaml"
    declared = yaml.safe_load(file.read_text())
    attributes = declared["attributes"]
    attributes["bounded_datasets"]["products"] |= {
        "validators": [{"min_rows": 2}],
        "automation_condition": {"new_version": None},
    }
    attributes["bounded_datasets"]["stock"] = {
        "input": {
            "FileSource": {
                "url": "stock",
                "format": "csv",
                "schema": {"product": "string", "pieces": "int"},
            }
        },
        "key": "product",
        "broadcast": True,
        "versions": {"VersionPartitions": {"by": "day", "start": DAYS[0]}},
    }
    attributes["applications"]["my-orders"]["automation_condition"] = {"new_records": None}
    attributes["applications"]["warehouse"] = {"datasets": ["stock"], "steps": []}
    file.write_text(yaml.safe_dump(declared, sort_keys=False))
    for day in DAYS:
        (folder / "stock" / day).mkdir(parents=True)
        (folder / "stock" / day / "stock.csv").write_text("product,pieces\napple,10\nbread,4\n")
        (folder / "stock" / day / "_SUCCESS").touch()
    python = str(Path(program("adjunct")).with_name("python"))
    subprocess.run(
        [python, "-m", "my_orders.deliver", "1"], cwd=folder, check=True, capture_output=True
    )
    return folder


@pytest.fixture(scope="module")
def servers(project: Path) -> Iterator[DagsterServers]:
    env = {"ADJUNCT_SPARK_MASTER": "none", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    with dagster_servers(project, env, project=project, location="my_orders") as running:
        yield running


@pytest.fixture(scope="module")
def backfill(page: Page, servers: DagsterServers) -> None:
    """A backfill of two days; the daemon begins it within half a minute."""
    page.goto(f"{servers.url}/assets/datasets/stock_dataset")
    page.get_by_role("button", name="Materialize").first.click()
    dialog = page.get_by_role("dialog")
    days = dialog.get_by_role("textbox").first
    days.fill(f"[{DAYS[0]}...{DAYS[1]}]")
    days.press("Enter")
    dialog.get_by_text("2 partitions").wait_for()
    dialog.get_by_role("button", name="Launch backfill").click()
    page.get_by_text("Created backfill").wait_for()


@pytest.fixture(scope="module")
def run(page: Page, servers: DagsterServers) -> str:
    """The id of a run that was launched on the job's page, and has ended."""
    page.goto(f"{servers.url}/locations/my_orders/jobs/my_orders")
    page.get_by_role("button", name="Materialize all").click()
    return ended(servers, "my_orders")


@pytest.mark.long  # by what the UI asks for: test_real_dagster.py
def test_the_asset_graph_shows_streams_datasets_outputs_and_the_table(
    page: Page, servers: DagsterServers, backfill: None
) -> None:
    from playwright.sync_api import expect

    page.goto(f"{servers.url}/asset-groups{GROUPS}")
    for name in (
        "orders",
        "products",
        "products_dataset",
        "customers_dataset",
        "priced_orders",
        "spending",
    ):
        displayed(page, name).wait_for()
    page.get_by_role("button", name="Hide navigation").click()
    zoom_out = page.locator("button", has=page.get_by_label("zoom_out"))
    zoom_out.click()
    zoom_out.click()
    for name in ("customers_dataset", "stock", "spending"):
        expect(displayed(page, name)).to_be_in_viewport(ratio=1)
    keep_screenshot(page, "yaml-graph")


def test_a_run_launched_in_the_ui_succeeds_and_its_asset_shows_the_results(
    page: Page, servers: DagsterServers, run: str
) -> None:
    page.goto(f"{servers.url}/runs/{run}")
    displayed(page, "Success").wait_for()
    page.goto(f"{servers.url}/assets/lake/priced_orders")
    for text in ("order_id", "bigint", "adjunct/in_process_batches", "lake.priced-orders"):
        displayed(page, text).wait_for()
    keep_screenshot(page, "asset")
    page.goto(f"{servers.url}/assets/datasets/products_dataset")
    for text in ("Prices of products by edition", "adjunct/records_read", "edition-1"):
        displayed(page, text).wait_for()


def test_a_startpoint_of_the_launchpad_is_applied_by_the_run_of_the_sensor(
    page: Page, servers: DagsterServers, run: str
) -> None:
    page.goto(f"{servers.url}/locations/my_orders/jobs/my_orders_startpoint/playground")
    displayed(page, "startpoint_my_orders").wait_for()
    page.locator(".CodeMirror").first.click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(STARTPOINT)
    displayed(page, "No errors").wait_for()
    keep_screenshot(page, "startpoint")
    page.get_by_role("button", name="Launch Run").click()
    page.get_by_text("the next run of my-orders applies it").wait_for()
    switch_on(page, servers, "my_orders_startpoints")
    page.goto(f"{servers.url}/runs/{ended(servers, 'my_orders', besides=run)}")
    displayed(page, "Success").wait_for()
    page.goto(f"{servers.url}/assets/lake/priced_orders?view=events")
    displayed(page, "adjunct/startpoints").wait_for()


@pytest.mark.long  # without a browser: test_dataset_assets.py, test_automation.py
def test_a_delivery_that_conditions_request_and_validation_rejects_fails_checks(
    page: Page, servers: DagsterServers, project: Path, run: str
) -> None:
    streams = LakeStreams(open_lake(project / ".adjunct/lake"))
    too_few = [{"product": "apple", "price": 0.75}]
    streams.append("products", too_few, producer="sample", sequence=2, end_of_dataset="edition-2")
    switch_on(page, servers, "my_orders_automation")
    ended(servers, "__ASSET_JOB", tag="dagster/from_automation_condition")
    page.goto(f"{servers.url}/assets/datasets/products_dataset?view=checks")
    displayed(page, "adjunct_accepted").click()
    displayed(page, "min_rows: 1 row, expected 2 or more").wait_for()
    page.get_by_text("Failed", exact=True).nth(
        2
    ).wait_for()  # of both checks, and of the chosen one's evaluation
    keep_screenshot(page, "failed-check")
    page.goto(f"{servers.url}/assets/datasets/products_dataset?view=automation")
    displayed(page, "Requested").wait_for()
    page.get_by_text(re.compile(r"\d:\d\d:\d\d")).first.click()
    page.get_by_role("dialog").get_by_text("new_version").wait_for()


@pytest.mark.long  # without a browser: test_partitioned_datasets.py
def test_a_backfill_of_two_days_materializes_both(
    page: Page, servers: DagsterServers, backfill: None
) -> None:
    ended(servers, "__ASSET_JOB", tag="dagster/backfill")
    page.goto(f"{servers.url}/assets/datasets/stock_dataset?view=partitions")
    displayed(page, "Materialized (2)").wait_for()
    for day in DAYS:
        displayed(page, day).wait_for()
    keep_screenshot(page, "backfill")


def displayed(page: Page, text: str) -> Locator:
    """Return the first place where the page shows exactly this text; the UI also has hidden
    copies to measure.
    """
    return page.get_by_text(text, exact=True).filter(visible=True).first


def switch_on(page: Page, servers: DagsterServers, sensor: str) -> None:
    """Switch a sensor on; a sensor that was off is evaluated at once."""
    page.goto(f"{servers.url}/locations/my_orders/sensors/{sensor}")
    page.locator("label:has(input[type=checkbox])").click()
    page.locator("input[type=checkbox]:checked").wait_for(state="attached")


def ended(servers: DagsterServers, job: str, *, besides: str = "", tag: str | None = None) -> str:
    """Return the id of the run of this job, with such a tag, that has succeeded."""

    def found() -> tuple[str, dict[str, Any]] | None:
        for run_id, run in servers.runs().items():
            is_meant = run["jobName"] == job and run_id != besides
            if (
                is_meant
                and (tag is None or any(one["key"] == tag for one in run["tags"]))
                and run["status"] in DONE
            ):
                return run_id, run
        return None

    run_id, run = servers.until(f"a run of {job}", 240, found)
    assert run["status"] == "SUCCESS", run
    return run_id
