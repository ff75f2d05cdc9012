"""The main job on the local lake, with all flights killed once on its way, against the oracle."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from dagster_adjunct import LakeStreams, application_state, open_lake
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog, ClosedBatch
from tests.examples.conftest import EVERY, KILLED_IN_BATCH, OPTIONS, FinishedJob
from tests.examples.driving import drive
from tests.examples.oracle import expected
from tests.examples.outputs import assert_outputs, sqlite_state

pytestmark = [pytest.mark.slow, pytest.mark.rounds, pytest.mark.timeout(1200)]
FLIGHTS = -(-336_776 // EVERY)


def batches(job: FinishedJob) -> list[ClosedBatch]:
    """Return every closed batch, oldest first."""
    history = BatchLog(open_lake(job.lake), "flight-delays").history(1000)
    reports = {
        state.last.intent.batch: state.last for _, state in history if state.last is not None
    }
    return [reports[number] for number in sorted(reports)]


def test_both_outputs_of_the_main_job_equal_the_oracle(main_job: FinishedJob) -> None:
    assert_outputs(main_job.lake, sqlite_state(main_job.state), EVERY)


def test_the_counters_are_those_of_the_data(main_job: FinishedJob) -> None:
    facts = expected(EVERY)[2]
    found = (facts["flights"], facts["updates"], facts["defaults put"], facts["no tailnum"])
    assert found == (336_776, 334_264, 4_043, 2_512) or EVERY > 1
    assert facts["flights"] == FLIGHTS
    state = application_state(open_lake(main_job.lake), "flight-delays")
    joins = {
        name.split("-", 2)[2]: counters
        for name, counters in state.totals.items()
        if name.startswith("join-")
    }
    assert {name: counters["unmatched"] for name, counters in joins.items()} == {
        "planes": facts["no plane"],
        "weather": facts["no weather"],
        "airlines": facts["no airline"],
        "airports": facts["no airport"],
    }
    assert {counters["rows"] for counters in joins.values()} == {FLIGHTS}
    assert state.records == FLIGHTS
    assert state.totals["lake.enriched-flights"] == {
        "rows": FLIGHTS,
        "duplicate_batches": int(EVERY == 1),
    }
    aircraft = state.totals["aircraft-state"]
    assert (aircraft["updates"], aircraft["defaults_put"], aircraft["null_keys"]) == found[1:]


def test_every_flight_is_in_the_stream_once_and_every_batch_is_closed(
    main_job: FinishedJob,
) -> None:
    lake = open_lake(main_job.lake)
    streams = LakeStreams(lake)
    assert streams.records_between(streams.all_ranges("enriched-flights")) == FLIGHTS
    done = batches(main_job)
    assert len(done) >= 4
    assert [batch.intent.batch for batch in done] == list(range(1, len(done) + 1))
    assert sum(batch.records for batch in done) == FLIGHTS
    state = application_state(lake, "flight-delays")
    assert state.open is None
    upcoming = streams.upcoming(streams.partitions("flights"))
    assert state.checkpoint == dict(upcoming)


def test_batches_follow_each_other_without_gap_or_overlap(main_job: FinishedJob) -> None:
    position: dict[str, str] = {}
    for batch in batches(main_job):
        for ssp, span in batch.intent.ranges.items():
            assert span.start == position.get(ssp, "0")
            position[ssp] = span.end


@pytest.mark.long
def test_the_killed_batch_was_run_again_as_it_was_written(main_job: FinishedJob) -> None:
    intents = [
        state.open
        for _, state in BatchLog(open_lake(main_job.lake), "flight-delays").history(1000)
        if state.open is not None and state.open.batch == KILLED_IN_BATCH
    ]
    again, first = intents
    assert again.ranges == first.ranges
    assert again.versions == first.versions
    assert again.clock == first.clock


def test_two_versions_of_planes_were_served_one_after_the_other(main_job: FinishedJob) -> None:
    served = [batch.intent.versions["planes"] for batch in batches(main_job)]
    first, second = dict.fromkeys(served)
    assert served == sorted(served)
    planes = StoredVersions(open_lake(main_job.lake), "planes")
    assert [planes.version(str(version)).rows for version in (first, second)] == [2_471, 3_322]
    early = sum(
        batch.records for batch in batches(main_job) if batch.intent.versions["planes"] == first
    )
    assert early == -(-166_054 // EVERY)


def test_running_it_again_changes_nothing_and_starts_no_spark(main_job: FinishedJob) -> None:
    def everything() -> list[tuple[str, int, str]]:
        stored = open_lake(main_job.lake).store.list("")
        # Who runs it is written for the time of each run.
        return [
            (info.key, info.size, info.etag)
            for info in stored
            if not info.key.endswith(("/run.json", "/clock"))
        ]

    def records(path: Path) -> list[tuple[object, ...]]:
        with sqlite3.connect(path) as connection:
            return connection.execute("SELECT * FROM aircraft_state ORDER BY tailnum").fetchall()

    before, table = everything(), records(main_job.state)
    result = drive(main_job.lake, main_job.state, *OPTIONS).result
    assert result["spark_started"] is False
    assert [report["step"]["batches"] for report in result["reports"]] == [0, 0]
    assert everything() == before
    assert records(main_job.state) == table
