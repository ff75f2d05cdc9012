"""`adjunct checkpoint show` tells how far an application has come in the times of its records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, BatchLog
from dagster_adjunct.orchestration.batch_log.event_times import PartitionTimes, TimeState
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.orchestration.cli.commands import document, printed

APPLICATION = """
from datetime import timedelta
from dagster_adjunct import Application
from tests.orchestration.seen_times import Seen

app = Application("watching")
clicks = app.input_stream("lake.clicks", event_time="ts", idle_after=timedelta(hours=1))
clicks.apply(Seen("seen")).send_to(app.output_stream("lake.seen", partitions=1))
"""


@dataclass
class World:
    lake: Lake


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    (tmp_path / "watched_clicks.py").write_text(APPLICATION)
    monkeypatch.syspath_prepend(str(tmp_path))
    lake = open_lake(tmp_path / "lake")
    LakeStreams(lake).create(
        "clicks", schema=Schema.of(k="string", ts="timestamp"), key=["k"], partitions=2
    )
    fast, slow = (SystemStreamPartition("lake", "clicks", number) for number in (0, 1))
    now = datetime.now(UTC)

    def times(minutes: int, active: timedelta) -> PartitionTimes:
        mark = datetime(2026, 1, 1, 12, minutes, tzinfo=UTC)
        return PartitionTimes(active_at=now - active, newest=mark, watermark=mark, read_to=5)

    partitions = {fast: times(20, timedelta(minutes=1)), slow: times(5, timedelta(hours=2))}
    state = ApplicationState(
        checkpoint={fast: "5", slow: "5"},
        batch=1,
        times=TimeState(
            partitions=partitions, operators={"seen": datetime(2026, 1, 1, 12, 20, tzinfo=UTC)}
        ),
    )
    log = BatchLog(lake, "watching")
    log.commit(log.read(), state, by="run-1")
    return World(lake)


def test_watermarks_are_displayed_with_idle_partitions_and_those_that_hold_back(
    world: World,
) -> None:
    displayed = printed(world, "checkpoint", "show", "watching")
    assert "2026-01-01 12:05:00 UTC" in displayed
    assert "watermarks of operators" in displayed
    assert "idle" not in displayed
    displayed = printed(world, "checkpoint", "show", "watched_clicks:app")
    assert "lake.clicks: watermark 2026-01-01 12:20:00 UTC" in displayed
    assert "held back by lake.clicks.0" in displayed

    reported = document(world, "checkpoint", "show", "watched_clicks:app")
    (clicks,) = reported["watermarks"]
    assert (clicks["held_by"], clicks["idle"], clicks["behind_newest"]) == (
        "lake.clicks.0",
        ["lake.clicks.1"],
        0.0,
    )
    assert reported["times"]["partitions"]["lake.clicks.1"]["watermark"] == "2026-01-01T12:05:00Z"
    assert reported["waiting_for"] == {"seen": "lake.clicks.0"}
    assert "watermarks" not in document(world, "checkpoint", "show", "watching")


PRICED = """
from datetime import timedelta
from dagster_adjunct import Application, unbounded_dataset
from dagster_adjunct.changes import Watermark

prices = unbounded_dataset(
    "prices", input="lake.prices", key="k", partitions=1, history="all", valid_from="ts",
    watermark=Watermark(),
)
app = Application("priced")
clicks = app.input_stream("lake.clicks", default_offset="oldest", event_time="ts")
joined = clicks.join(app.table(prices), on="k", as_of="ts", wait=timedelta(days=3))
joined.send_to(app.output_stream("lake.priced", partitions=1, key="k"))
"""


def test_records_that_wait_are_displayed_with_what_they_wait_for(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "priced_clicks.py").write_text(PRICED)
    streams = LakeStreams(world.lake)
    times = Schema.of(k="string", ts="timestamp")
    streams.create("prices", schema=times, key=["k"], partitions=1)
    clicks = [{"k": key, "ts": datetime.now(UTC)} for key in "abcdefgh"]
    streams.append("clicks", clicks, producer="test", sequence=1)
    of_clicks = (SystemStreamPartition("lake", "clicks", number) for number in (0, 1))
    log = BatchLog(world.lake, "priced")
    checkpoint = dict.fromkeys(of_clicks, "0")
    log.commit(log.read(), ApplicationState(checkpoint=checkpoint, batch=1), by="run-1")
    displayed = printed(world, "checkpoint", "show", "priced_clicks:app")
    assert "lake.clicks.0 waits at offset 0" in displayed
    held = document(world, "checkpoint", "show", "priced_clicks:app")["held"]
    assert len(held) == 2
    assert all("for dataset prices" in text for text in held)

    ends = streams.upcoming(streams.partitions("clicks"))
    caught_up = ApplicationState(checkpoint=ends, batch=2)
    log.commit(log.read(), caught_up, by="run-2")
    assert "waits" not in printed(world, "checkpoint", "show", "priced_clicks:app")
