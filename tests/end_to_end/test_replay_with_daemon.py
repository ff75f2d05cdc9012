"""A startpoint set by the command, with a real broker, the real daemon and webserver, and runs that
are killed.

The oracle is what the test itself produced: the output must hold exactly these records, in exactly
these epochs.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.end_to_end.world import APP, MIDNIGHT, World
from tests.servers.dagster import DONE, DagsterServers, dagster_servers
from tests.servers.kafka import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A startpoint of the UI that the daemon's sensor has a run apply:
# tests/orchestration/dagster/test_in_the_browser.py. What dies on its way:
# tests/orchestration/offsets and tests/orchestration/test_step_startpoints.py.
pytestmark = [pytest.mark.server, pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1800)]

TEN, ELEVEN = (MIDNIGHT + hour * 3_600_000 for hour in (10, 11))
REPLAYED = (2, 5)

EVENTS = """query($run: ID!) { logsForRun(runId: $run, limit: 1000) { ... on EventConnection { events {
  __typename ... on MessageEvent { message } ... on ErrorEvent { error { message causes { message } } }
  ... on MaterializationEvent { assetKey { path } metadataEntries { label
    ... on IntMetadataEntry { intValue } ... on TextMetadataEntry { text } ... on JsonMetadataEntry { jsonString } } }
  } } } }"""


@pytest.fixture(scope="module")
def world(
    kafka: KafkaServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> World:
    """A topic with records of midnight and of ten o'clock, all delivered; a batch takes 100 of
    them.
    """
    made = World(kafka, tmp_path_factory.mktemp("replay"), "shop", max_batch_records=100)
    made.create_topic()
    made.deliver(64, MIDNIGHT)
    made.deliver(32, TEN)
    made.run(spark)
    assert made.in_lake() == made.in_topic() == made.expected()
    return made


@pytest.fixture(scope="module")
def servers(world: World) -> Iterator[DagsterServers]:
    with dagster_servers(world.folder / "home", {**world.environment, "ADJUNCT_APP": APP}) as up:
        yield up


@pytest.mark.parametrize(("next_by", "deaths"), [("ui", 1), ("ui", 2), ("sensors", 2)])
def test_a_startpoint_is_replayed_once_by_the_sensor_though_processes_are_killed(
    servers: DagsterServers, world: World, next_by: str, deaths: int
) -> None:
    """Two of eight partitions by time; killed before the first commit, and perhaps after it;
    then it goes on.
    """
    known, before = set(servers.runs()), world.in_lake()
    epochs = dict.fromkeys(REPLAYED, max(epoch for epoch, _ in before) + 1)
    again = [
        event for event in world.events if event.partition in REPLAYED and event.timestamp >= TEN
    ]

    world.gate.close()
    asked = (
        "startpoint",
        "set",
        APP,
        "shop.events.2,5",
        "--timestamp",
        "2026-01-01T10:00Z",
        "--by",
        "ada",
    )
    dry = json.loads(world.command(*asked, "--reason", "prices were wrong", "--dry-run", "--json"))
    positions = {
        partition["partition"]: (partition["checkpoint"], partition["start"])
        for partition in dry["partitions"]
    }
    assert positions == _positions(world)
    world.command(*asked, "--reason", "prices were wrong")
    # A sensor that is switched on looks at once, and then every half a minute.
    for name in ("new_records", "startpoints", "restart"):
        servers.start_sensor(f"relay_{name}")
    pid = servers.until("a batch of the run that the sensor launches", 300, world.gate.held)
    assert world.in_lake() == before
    (killed,) = set(servers.runs()) - known
    tags = _tags(servers.runs()[killed])
    assert (tags["adjunct/startpoints_by"], tags["adjunct/startpoints_reason"]) == (
        "ada",
        "prices were wrong",
    )
    assert len(tags["adjunct/startpoints"].split(",")) == len(REPLAYED)
    os.kill(pid, signal.SIGKILL)
    if deaths > 1:
        world.gate.close(after=1)
    else:
        world.gate.open()

    # What comes now is more than one batch, and not in the batch that was begun.
    new = world.deliver(160, ELEVEN)
    servers.until("the failure", 120, lambda: servers.runs()[killed]["status"] == "FAILURE")
    if next_by == "ui":
        servers.launch("relay", {})
    replayed = sorted(before + world.expected(events=again, epochs=epochs))
    if deaths > 1:
        pid = servers.until("the second batch of the next run", 300, world.gate.held)
        assert world.in_lake() == replayed
        os.kill(pid, signal.SIGKILL)
        world.gate.open()
        servers.until("the second failure", 120, lambda: len(_failed(servers) - known) == 2)
        if next_by == "ui":
            servers.launch("relay", {})
    whole = len(replayed) + len(new)
    servers.until("the end", 600, lambda: _idle(servers) and len(world.in_lake()) >= whole)
    after = sorted(replayed + world.expected(events=new, epochs=epochs))
    assert world.in_lake() == after
    assert world.in_topic() == after
    history = world.command("checkpoint", "history", "relay")
    assert history.count(f"applied, epoch {epochs[2]} (ada: prices were wrong)") == len(REPLAYED), (
        history
    )


@pytest.mark.long
def test_a_bounded_replay_is_asked_for_in_the_ui_and_has_an_epoch_of_its_own(
    servers: DagsterServers, world: World
) -> None:
    before, known = world.in_lake(), set(servers.runs())
    config = {
        "partitions": ["shop.events.0"],
        "position": {"at": "oldest"},
        "until": {"at": "timestamp", "value": "2026-01-01T10:00Z"},
        "versions": "recorded",
        "reason": "an audit",
        "by": "eve",
    }
    asking = servers.launch("relay_startpoint", {"ops": {"startpoint_relay": {"config": config}}})
    servers.until("the request", 200, lambda: _ended(servers, known))
    servers.start_sensor("relay_startpoints")
    servers.until("the replay, by the sensor", 300, lambda: _ended(servers, {*known, asking}))
    (run,) = set(servers.runs()) - {*known, asking}
    tags = _tags(servers.runs()[run])
    assert (tags["adjunct/startpoints_by"], tags["adjunct/startpoints_reason"]) == (
        "eve",
        "an audit",
    )
    audited = [event for event in world.events if event.partition == 0 and event.timestamp < TEN]
    ((epoch, _),) = {(now, 0) for now, _ in (Counter(world.in_lake()) - Counter(before))}
    assert epoch > 0
    after = sorted(before + world.expected(events=audited, epochs={0: epoch}))
    assert world.in_lake() == after
    assert world.in_topic() == after
    made = _metadata(servers, run, "lake/relayed")
    assert "eve" in str(made["adjunct/startpoints"])
    assert "an audit" in str(made["adjunct/startpoints"])


@pytest.mark.long
def test_a_broker_that_is_away_in_the_middle_of_a_batch_is_waited_for(
    servers: DagsterServers, world: World
) -> None:
    """The batch fails for a reason that passes, and is finished by a later attempt, as it was
    begun.
    """
    before, known = world.in_lake(), set(servers.runs())
    epochs = dict.fromkeys(REPLAYED, max(epoch for epoch, _ in before))
    world.gate.close()
    new = world.deliver(40, ELEVEN)
    for name in ("new_records", "restart"):
        servers.start_sensor(f"relay_{name}")
    servers.until("a batch", 300, world.gate.held)
    world.kafka.stop(crash=True)
    world.gate.open()
    try:
        servers.until(
            "what it says",
            300,
            lambda: "StreamUnavailableError" in _message(servers, set(servers.runs()) - known),
        )
        assert world.in_lake() == before
    finally:
        world.kafka.start()
    servers.until(
        "the end", 600, lambda: _idle(servers) and len(world.in_lake()) >= len(before) + len(new)
    )
    assert world.in_lake() == sorted(before + world.expected(events=new, epochs=epochs))


def _message(servers: DagsterServers, runs: Iterable[str]) -> str:
    """Return all that runs have said so far."""
    return "\n".join(str(servers.graphql(EVENTS, run=run)["logsForRun"]["events"]) for run in runs)


def _positions(world: World) -> dict[str, tuple[str, str]]:
    """Return where the replayed partitions end, and where ten o'clock is in them."""
    positions = {}
    for partition in REPLAYED:
        mine = [event for event in world.events if event.partition == partition]
        since = [event.offset for event in mine if event.timestamp >= TEN]
        positions[f"{world.system}.events.{partition}"] = (str(len(mine)), str(min(since)))
    return positions


def _idle(servers: DagsterServers) -> bool:
    return all(run["status"] in DONE for run in servers.runs().values())


def _failed(servers: DagsterServers) -> set[str]:
    return {run_id for run_id, run in servers.runs().items() if run["status"] == "FAILURE"}


def _ended(servers: DagsterServers, known: Container[str]) -> bool:
    """Say whether a run that was not known has succeeded; fail where one has failed."""
    new = {run_id: run["status"] for run_id, run in servers.runs().items() if run_id not in known}
    assert "FAILURE" not in new.values(), [_errors(servers, run_id) for run_id in new]
    return bool(new) and set(new.values()) == {"SUCCESS"}


def _tags(run: dict[str, Any]) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in run["tags"]}


def _errors(servers: DagsterServers, run: str) -> str:
    events = servers.graphql(EVENTS, run=run)["logsForRun"]["events"]
    return "\n".join(
        f"{event['message']}: {event['error']}" for event in events if event.get("error")
    )


def _metadata(servers: DagsterServers, run: str, asset: str) -> dict[str, Any]:
    events = servers.graphql(EVENTS, run=run)["logsForRun"]["events"]
    made = [
        event
        for event in events
        if event.get("assetKey") and "/".join(event["assetKey"]["path"]) == asset
    ]
    values: dict[str, Any] = {}
    for entry in made[-1]["metadataEntries"]:
        values[entry["label"]] = next(
            (entry[n] for n in ("intValue", "text", "jsonString") if n in entry), None
        )
    return values
