"""The example's third application on both deliveries of flights, against plain Python; then the
first is read again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct import LakeStreams, application_state, open_lake, run_application, systems_for
from dagster_adjunct.examples.flights import deliver as delivery
from dagster_adjunct.examples.flights.over_time import flights_over_time
from dagster_adjunct.startpoints import StartpointOldest, Startpoints, StartpointSpecific
from tests.examples.drive import every_nth
from tests.examples.outputs_over_time import DAYS, INSTEAD, OF_AIRCRAFT, assert_over_time, outputs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OUTPUTS = {"flights-of-aircraft": OF_AIRCRAFT, "flights-instead": INSTEAD, "airport-days": DAYS}


@pytest.mark.spark
@pytest.mark.parametrize(
    ("every", "batch"),
    [
        # test_main_job_elsewhere runs it, too
        pytest.param(48, 3_000, id="every 48th", marks=pytest.mark.long),
        pytest.param(1, 60_000, id="all", marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_each_flight_joins_its_own_time_and_a_replay_gives_the_same(
    every: int, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> None:
    """A replay is cut otherwise than the first run was."""
    monkeypatch.setattr(delivery, "load", lambda name: every_nth(name, every))
    monkeypatch.setenv("ADJUNCT_DEMO_SQLITE", str(tmp_path / "tables.sqlite"))
    lake = open_lake(str(tmp_path / "lake"))
    streams, app = LakeStreams(lake), flights_over_time()
    app.max_batch_records = batch

    def run(name: str) -> None:
        run_application(
            app, lake=lake, systems=systems_for(app, lake=lake), spark=lambda: spark, run=name
        )

    delivery.deliver(lake, 1)
    run("first half")
    first_half = streams.upcoming(streams.partitions("flights"))
    first = outputs(lake, "flights-of-aircraft", OF_AIRCRAFT)
    delivery.deliver(lake, 2)
    run("second half")
    assert_over_time(lake.url, every)

    for ssp, end in first_half.items():
        Startpoints(app, lake=lake).request(
            str(ssp),
            StartpointOldest(),
            until=StartpointSpecific(end),
            by="test",
            reason="once more",
        )
    before = {stream: outputs(lake, stream, columns) for stream, columns in OUTPUTS.items()}
    app.max_batch_records = batch * 2 // 3
    run("replay")
    counted = application_state(lake, app.name).totals
    again = [counters.get("again") for counters in counted.values() if "again" in counters]
    # the window leaves each out, and the two sides of the join
    assert sum(again) >= 2 * sum(first.values())
    after = {stream: outputs(lake, stream, columns) for stream, columns in OUTPUTS.items()}
    assert after.pop("flights-of-aircraft") - before.pop("flights-of-aircraft") == first
    assert after == before
