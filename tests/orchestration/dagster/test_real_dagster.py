"""The real webserver and daemon run applications: from the UI's own requests, from sensors, and
by conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct import Lake, open_dataset, open_lake
from tests.orchestration.dagster import small
from tests.servers.dagster import DONE, LOCATION, REPOSITORY, DagsterServers, dagster_servers

pytestmark = [pytest.mark.server, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1800)]

REPOSITORY_SELECTOR = {"repositoryName": REPOSITORY, "repositoryLocationName": LOCATION}
SENSOR = "order_totals_new_records"
AUTOMATION = "order_totals_automation"
ASSETS = {
    "lake/orders": [],
    "lake/items": [],
    "lake/rates": [],
    "datasets/items_dataset": ["lake/items"],
    "datasets/rates_dataset": ["lake/rates"],
    "lake/priced": ["datasets/items_dataset", "datasets/rates_dataset", "lake/orders"],
    "tables/item_state": ["lake/priced"],
    "datasets/rates_by_day_dataset": [],
    "lake/prices": [],
    "datasets/prices_by_day_dataset": ["lake/prices"],
    "lake/calls": [],
    "datasets/labels_dataset": ["lake/items"],
    "lake/answers": ["datasets/labels_dataset", "lake/calls"],
}
READ = {f"lake/{name}" for name in ("orders", "items", "rates", "prices", "calls")}
APPLICATIONS = [
    f"tests.orchestration.dagster.small:{name}"
    for name in ("app", "daily", "priced_daily", "answered")
]
DAYS = [f"2026-01-0{day}" for day in range(1, 5)]
FIRST, SECOND = small.orders(0, 40), small.orders(40, 30)

GRAPH = """{ assetNodes { assetKey { path } groupName kinds isMaterializable isObservable
  dependencyKeys { path } owners { ... on TeamAssetOwner { team } } } }"""
MATERIALIZATIONS = """query($key: AssetKeyInput!) { assetOrError(assetKey: $key) { ... on Asset {
  assetMaterializations(limit: 50) { runId metadataEntries { __typename label
    ... on IntMetadataEntry { intValue } ... on TextMetadataEntry { text } ... on JsonMetadataEntry { jsonString }
    ... on TableSchemaMetadataEntry { schema { columns { name type } } } } } } } }"""
OBSERVATIONS = MATERIALIZATIONS.replace("assetMaterializations", "assetObservations")
BACKFILL = """mutation($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
  __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
ENDED = """query($id: String!) { partitionBackfillOrError(backfillId: $id) {
  ... on PartitionBackfill { status } ... on PythonError { message } } }"""
PARTITIONS = """query($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
  assetPartitionStatuses { ... on TimePartitionStatuses { ranges { status startKey endKey } } } } } }"""
ERRORS = """query($run: ID!) { logsForRun(runId: $run, limit: 1000) { ... on EventConnection { events {
  ... on MessageEvent { message } ... on ErrorEvent { error { message causes { message } } } } } } }"""
TICKS = """query($sensor: SensorSelector!) { sensorOrError(sensorSelector: $sensor) { ... on Sensor {
  sensorState { ticks { timestamp status skipReason runIds error { message } } } } } }"""


LAUNCHED = ["lake/priced", "datasets/items_dataset", "datasets/rates_dataset", "tables/item_state"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dagster")


@pytest.fixture(scope="module")
def lake(folder: Path) -> Lake:
    """A lake with datasets delivered and some orders waiting."""
    lake = open_lake(folder / "lake")
    small.append(lake, "items", 1, small.ITEMS, marker="v1")
    small.append(lake, "rates", 1, small.RATES)
    small.append(lake, "orders", 1, FIRST)
    # the second and the fourth are not delivered
    for number, day in enumerate((DAYS[0], DAYS[2]), 1):
        small.append(lake, "prices", number, [("a", float(number))], marker=day)
    return lake


@pytest.fixture(scope="module")
def servers(folder: Path, lake: Lake) -> Iterator[DagsterServers]:
    env = {
        "ADJUNCT_APP": ",".join(APPLICATIONS),
        "ADJUNCT_LAKE": lake.url,
        "ADJUNCT_TEST_SQLITE": str(folder / "item-state.sqlite"),
        "ADJUNCT_SPARK_MASTER": "local[2]",
        "ADJUNCT_ENGINE": "auto",
    }
    with dagster_servers(folder / "home", env) as running:
        yield running


@pytest.fixture(scope="module")
def backfill(servers: DagsterServers) -> str:
    """A backfill of four days, launched as the UI does; the daemon looks for it every 30 s."""
    return _backfill(servers, "rates_by_day_dataset")


@pytest.fixture(scope="module")
def backfill_with_gaps(servers: DagsterServers) -> str:
    """A backfill of four days, of which two are not delivered."""
    return _backfill(servers, "prices_by_day_dataset")


def test_the_asset_graph_shows_streams_datasets_enriched_stream_and_table(
    servers: DagsterServers,
) -> None:
    nodes = {_path(node["assetKey"]): node for node in servers.graphql(GRAPH)["assetNodes"]}
    assert {
        key: sorted(map(_path, node["dependencyKeys"])) for key, node in nodes.items()
    } == ASSETS
    assert {key for key, node in nodes.items() if not node["isMaterializable"]} == READ
    assert nodes["datasets/items_dataset"]["groupName"] == "shop"
    assert nodes["datasets/items_dataset"]["owners"] == [{"team": "catalog"}]
    assert nodes["lake/priced"]["groupName"] == "order_totals"
    assert nodes["tables/item_state"]["kinds"] == ["sqlite"]


def test_assets_launched_from_the_ui_materialize_and_runs_wait_for_each_other(
    servers: DagsterServers, lake: Lake
) -> None:
    first = _launch(servers, LAUNCHED)
    servers.until("its start", 300, lambda: servers.runs()[first]["startTime"])
    second = _launch(servers, LAUNCHED)
    runs = servers.until("the end of both runs", 600, lambda: _ended(servers, {first, second}))
    assert {run["status"] for run in runs.values()} == {"SUCCESS"}, _errors(servers, runs)
    assert runs[second]["startTime"] >= runs[first]["endTime"]

    assert small.priced(lake) == small.expected(FIRST)
    enriched = _materializations(servers, "lake/priced")
    assert [entry["runId"] for entry in enriched] == [first]
    (made,) = map(_metadata, enriched)
    observed = servers.graphql(OBSERVATIONS, key={"path": ["lake", "priced"]})["assetOrError"][
        "assetObservations"
    ]
    (nothing,) = [_metadata(entry) for entry in observed if entry["runId"] == second]
    assert (made["adjunct/batches"], nothing["adjunct/batches"]) == (1, 0)
    assert made["dagster/row_count"] == len(FIRST)
    assert [column["name"] for column in made["dagster/column_schema"]] == [
        "id", "item", "currency", "quantity", "label", "rate",
    ]  # fmt: skip
    items = _metadata(_materializations(servers, "datasets/items_dataset")[0])
    assert items["dagster/row_count"] == len(small.ITEMS)
    assert items["adjunct/version"].startswith("v000001-")
    table = _metadata(_materializations(servers, "tables/item_state")[0])
    assert table["dagster/table_name"] == "item_state"


@pytest.fixture(scope="module")
def quiet(servers: DagsterServers) -> set[str]:
    """The runs that there were when the sensor had looked and found nothing; it looks again
    after half a minute.
    """
    if not _materializations(servers, "lake/priced"):  # no test before has launched a run
        launched = {_launch(servers, LAUNCHED)}
        servers.until("its end", 600, lambda: _ended(servers, launched))
    before = _not_of_the_backfill(servers)
    servers.start_sensor(SENSOR)
    servers.until("a tick without records", 300, lambda: _skipped(servers, "No new records."))
    return before


@pytest.mark.long  # without servers: test_new_records_sensor.py
def test_the_sensor_launches_no_run_without_new_records(
    servers: DagsterServers, quiet: set[str]
) -> None:
    assert _not_of_the_backfill(servers) == quiet


@pytest.mark.long  # without servers: test_partitioned_datasets.py
def test_a_backfill_that_fails_half_way_is_one_run_that_keeps_what_it_finished(
    servers: DagsterServers, lake: Lake, backfill: str
) -> None:
    tag = {"key": "dagster/backfill", "value": backfill}
    launched = servers.until(
        "its run", 120, lambda: {i for i, run in servers.runs().items() if tag in run["tags"]}
    )
    ((run_id, run),) = servers.until(
        "the end of its run", 300, lambda: _ended(servers, launched)
    ).items()
    assert run["status"] == "FAILURE"
    assert "nobody knows the rates of 3 January" in _errors(servers, [run_id])
    asset = servers.graphql(PARTITIONS, key={"path": ["datasets", "rates_by_day_dataset"]})[
        "assetNodeOrError"
    ]
    ranges = [
        (span["status"], span["startKey"], span["endKey"])
        for span in asset["assetPartitionStatuses"]["ranges"]
    ]
    assert ranges == [("MATERIALIZED", DAYS[0], DAYS[1]), ("FAILED", DAYS[2], DAYS[3])]
    assert [ref.name for ref in open_dataset(lake, "rates-by-day").versions()] == DAYS[:2]
    made = [
        _metadata(entry) for entry in _materializations(servers, "datasets/rates_by_day_dataset")
    ]
    assert [entry["adjunct/name"] for entry in made] == [DAYS[1], DAYS[0]]


# test_delivered_sensor.py shows it without servers, test_replay_with_daemon.py a run of the
# daemon's
@pytest.mark.long
def test_records_and_a_version_delivered_together_launch_one_run(
    servers: DagsterServers, lake: Lake, quiet: set[str]
) -> None:
    small.append(lake, "items", 2, small.ITEMS, marker="v2")
    small.append(lake, "orders", 2, SECOND)
    # Started only now: a look between the two appends would rightly launch a run for the version
    # alone.
    for sensor in ("items_delivered", "order_totals_startpoints", "order_totals_restart"):
        servers.start_sensor(sensor)
    launched = servers.until(
        "a run by the sensor", 300, lambda: _not_of_the_backfill(servers) - quiet
    )
    runs = servers.until("its end", 600, lambda: _ended(servers, launched))
    assert [run["status"] for run in runs.values()] == ["SUCCESS"], _errors(servers, runs)
    (run,) = runs.values()
    tags = {tag["key"]: tag["value"] for tag in run["tags"]}
    assert tags["dagster/sensor_name"] == "order_totals_new_records"
    assert tags["adjunct/lag"] == str(len(SECOND))
    assert small.priced(lake) == small.expected(FIRST + SECOND)
    nothing = "No new version; the next one waits for lake.items.0, lake.items.1."
    servers.until(
        "a look after it",
        300,
        lambda: _skipped(servers, nothing, "items_delivered", since=run["endTime"]),
    )
    assert _not_of_the_backfill(servers) - quiet == launched


@pytest.mark.long  # the run itself: test_partitioned_datasets.py
def test_a_backfill_with_missing_days_ends_as_failed_though_its_run_succeeds(
    servers: DagsterServers, lake: Lake, backfill_with_gaps: str
) -> None:
    """As Dagster promises for partitions that have no materialization when all runs of a
    backfill have ended.
    """

    def ended() -> dict[str, Any] | None:
        state: dict[str, Any] = servers.graphql(ENDED, id=backfill_with_gaps)[
            "partitionBackfillOrError"
        ]
        return state if state["status"].startswith("COMPLETED") else None

    state = servers.until("the end of the backfill", 300, ended)
    assert state["status"] == "COMPLETED_FAILED"
    tag = {"key": "dagster/backfill", "value": backfill_with_gaps}
    runs = {run_id: run for run_id, run in servers.runs().items() if tag in run["tags"]}
    assert [run["status"] for run in runs.values()] == ["SUCCESS"]
    asset = servers.graphql(PARTITIONS, key={"path": ["datasets", "prices_by_day_dataset"]})[
        "assetNodeOrError"
    ]
    ranges = [
        (span["status"], span["startKey"], span["endKey"])
        for span in asset["assetPartitionStatuses"]["ranges"]
    ]
    assert ranges == [("MATERIALIZED", day, day) for day in (DAYS[0], DAYS[2])]
    assert [ref.name for ref in open_dataset(lake, "prices-by-day").versions()] == [
        DAYS[0],
        DAYS[2],
    ]


@pytest.mark.long  # test_automation.py has the conditions evaluated without servers
def test_conditions_launch_the_run_that_the_sensors_would_launch(
    servers: DagsterServers, lake: Lake
) -> None:
    tag = {"key": "dagster/sensor_name", "value": AUTOMATION}

    def by_conditions() -> set[str]:
        return {run_id for run_id, run in servers.runs().items() if tag in run["tags"]}

    small.append(lake, "calls", 1, [(number, "abc"[number % 3]) for number in range(9)])
    servers.start_sensor(AUTOMATION)
    launched = servers.until("a run by conditions", 120, by_conditions)
    runs = servers.until("its end", 300, lambda: _ended(servers, launched))
    assert [run["status"] for run in runs.values()] == ["SUCCESS"], _errors(servers, runs)
    (run,) = runs.values()
    tags = {tag["key"]: tag["value"] for tag in run["tags"]}
    assert tags["dagster/from_automation_condition"] == "true"
    assert tags["adjunct/lag"] == "9"
    made = [_materializations(servers, key) for key in ("datasets/labels_dataset", "lake/answers")]
    assert [{entry["runId"] for entry in entries} for entries in made] == [launched, launched]
    assert _metadata(made[1][0])["dagster/row_count"] == 9
    nothing = (
        "labels_delivered: No new version; the next one waits for lake.items.0, lake.items.1. "
        "answered_new_records: No new records."
    )
    servers.until(
        "a tick after it", 120, lambda: _skipped(servers, nothing, AUTOMATION, since=run["endTime"])
    )
    assert by_conditions() == launched


def _backfill(servers: DagsterServers, dataset: str) -> str:
    """Launch a backfill of the four days as the UI does; return its id."""
    asset = {"path": ["datasets", dataset]}
    launched = servers.graphql(
        BACKFILL, params={"assetSelection": [asset], "partitionNames": DAYS, "tags": []}
    )
    answer = launched["launchPartitionBackfill"]
    assert answer["__typename"] == "LaunchBackfillSuccess", answer
    backfill_id: str = answer["backfillId"]
    return backfill_id


def _not_of_the_backfill(servers: DagsterServers) -> set[str]:
    """Return the runs that were not launched by the daemon of backfills, which works beside the
    sensor.
    """
    runs = servers.runs().items()
    return {
        run_id
        for run_id, run in runs
        if all(tag["key"] != "dagster/backfill" for tag in run["tags"])
    }


def _path(key: dict[str, Any]) -> str:
    return "/".join(key["path"])


def _launch(servers: DagsterServers, keys: list[str]) -> str:
    """Launch a run as the UI's Materialize button does: the implicit asset job, with a selection
    of assets.
    """
    selection = [{"path": key.split("/")} for key in keys]
    return servers.launch("__ASSET_JOB", assetSelection=selection, assetCheckSelection=[])


def _ended(servers: DagsterServers, wanted: set[str]) -> dict[str, dict[str, Any]] | None:
    runs = {run_id: run for run_id, run in servers.runs().items() if run_id in wanted}
    return (
        runs
        if len(runs) == len(wanted) and all(run["status"] in DONE for run in runs.values())
        else None
    )


def _errors(servers: DagsterServers, runs: Iterable[str]) -> str:
    """Return what the runs said when they failed."""
    events = [
        event for run in runs for event in servers.graphql(ERRORS, run=run)["logsForRun"]["events"]
    ]
    return "\n".join(
        f"{event['message']}: {event['error']}" for event in events if event.get("error")
    )


def _skipped(
    servers: DagsterServers, reason: str, sensor: str = SENSOR, *, since: float = 0
) -> bool:
    selector = {**REPOSITORY_SELECTOR, "sensorName": sensor}
    ticks = servers.graphql(TICKS, sensor=selector)["sensorOrError"]["sensorState"]["ticks"]
    assert not [tick["error"] for tick in ticks if tick["error"]]
    later = [tick for tick in ticks if tick["timestamp"] >= since]
    return any(tick["status"] == "SKIPPED" and tick["skipReason"] == reason for tick in later)


def _materializations(servers: DagsterServers, key: str) -> list[dict[str, Any]]:
    """Return an asset's materialisations, newest first."""
    listed = servers.graphql(MATERIALIZATIONS, key={"path": key.split("/")})["assetOrError"][
        "assetMaterializations"
    ]
    materializations: list[dict[str, Any]] = listed
    return materializations


def _metadata(materialization: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for entry in materialization["metadataEntries"]:
        value = next(
            (entry[name] for name in ("intValue", "text", "jsonString") if name in entry), None
        )
        values[entry["label"]] = entry["schema"]["columns"] if "schema" in entry else value
    return values
