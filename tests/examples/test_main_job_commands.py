"""The commands that read, on the lake that the main job left: for people and, with --json, for
programs.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.cli.output import NOT_FOUND
from tests.examples.conftest import EVERY, FinishedJob
from tests.examples.driving import ROOT
from tests.examples.oracle import ENRICHED_COLUMNS, STATE_COLUMNS, expected
from tests.kept_processes import program

pytestmark = [pytest.mark.slow, pytest.mark.rounds, pytest.mark.timeout(1200)]
FLIGHTS = -(-336_776 // EVERY)
STREAMS = ["aircraft", "airlines", "airports", "enriched-flights", "flights", "planes", "weather"]


def displayed(job: FinishedJob, *arguments: str, exit_code: int = 0) -> str:
    """Return what a command prints on this lake, with tables as wide as they need."""
    result = CliRunner().invoke(
        root, [*arguments, "--lake", job.lake], env={"COLUMNS": "300"}, catch_exceptions=False
    )
    assert result.exit_code == exit_code, result.output
    return result.output


def read(job: FinishedJob, *arguments: str, exit_code: int = 0) -> Any:
    return json.loads(displayed(job, *arguments, "--json", exit_code=exit_code))


def adjunct(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the console script itself."""
    return subprocess.run(
        [program("adjunct"), *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )


def test_streams_are_listed_with_their_records(main_job: FinishedJob) -> None:
    listed = {item["name"]: item for item in read(main_job, "stream", "list")}
    assert sorted(listed) == STREAMS
    assert listed["enriched-flights"]["records"] == listed["flights"]["records"] == FLIGHTS
    assert listed["planes"]["records"] == 2_471 + 3_322
    assert (listed["weather"]["key"], listed["weather"]["partitions"]) == (["origin"], 8)
    text = displayed(main_job, "stream", "list")
    assert all(name in text for name in STREAMS)
    assert f"{FLIGHTS:,}" in text


def test_a_stream_is_described_with_offsets_and_schema(main_job: FinishedJob) -> None:
    facts = read(main_job, "stream", "show", "lake.enriched-flights")
    assert [field["name"] for field in facts["schema"]] == list(ENRICHED_COLUMNS)
    assert sum(map(int, facts["upcoming"])) == FLIGHTS
    assert set(map(int, facts["oldest"])) == {0}
    assert read(main_job, "stream", "show", "planes")["markers"] == 16
    text = displayed(main_job, "stream", "show", "enriched-flights")
    assert "plane_year" in text
    assert f"{FLIGHTS:,}" in text


def test_a_stream_is_exported_whole_and_never_over_a_file(
    main_job: FinishedJob, tmp_path: Path
) -> None:
    target = tmp_path / "airports.parquet"
    assert "1,458 records of airports" in displayed(
        main_job, "stream", "export", "airports", "--to", str(target)
    )
    table = pq.read_table(target)
    assert table.num_rows == 1_458
    assert {"faa", "name", "__partition", "__offset", "__timestamp"} <= set(table.column_names)
    refused = adjunct("stream", "export", "airports", "--to", str(target), "--lake", main_job.lake)
    assert refused.returncode == 1
    assert "already exists" in refused.stderr


def test_datasets_are_listed_and_displayed_with_their_versions(main_job: FinishedJob) -> None:
    listed = {item["name"]: item for item in read(main_job, "dataset", "list")}
    assert sorted(listed) == ["airlines", "airports", "planes", "weather"]
    assert listed["planes"]["version"]["rows"] == 3_322
    displayed_planes = read(main_job, "dataset", "show", "planes")
    assert [version["rows"] for version in displayed_planes["versions"]] == [2_471, 3_322]
    assert [version["name"] for version in displayed_planes["versions"]] == ["2013-1", "2013-2"]
    weather = read(main_job, "dataset", "show", "weather")
    assert weather["bootstrap"]["state"] == "done"
    assert sum(map(int, weather["offsets"].values())) == 26_115
    for name in listed:
        assert name in displayed(main_job, "dataset", "list")
        assert "next offsets" in displayed(main_job, "dataset", "show", name)


def test_entries_are_found_by_key_also_by_a_key_of_two_columns(main_job: FinishedJob) -> None:
    items = read(main_job, "dataset", "get", "planes", "N14228", "N00000", exit_code=NOT_FOUND)
    assert [item["entry"] and item["entry"]["manufacturer"] for item in items] == ["BOEING", None]
    hour = read(
        main_job,
        "dataset",
        "get",
        "weather",
        "EWR",
        "2013-01-01T06:00:00Z",
        "JFK",
        "2013-12-30T12:00:00Z",
    )
    assert [item["entry"]["origin"] for item in hour] == ["EWR", "JFK"]
    assert hour[0]["entry"]["temp"] == pytest.approx(39.02)
    assert "American Airlines" in displayed(main_job, "dataset", "get", "airlines", "AA")
    assert "no entry" in displayed(
        main_job, "dataset", "get", "airlines", "??", exit_code=NOT_FOUND
    )


def test_records_of_the_remote_table_are_found_by_its_name_alone(main_job: FinishedJob) -> None:
    record = read(main_job, "table", "get", "aircraft-state", "N14228")["record"]
    wanted = dict(zip(STATE_COLUMNS, expected(EVERY)[1]["N14228"], strict=True))
    assert {**record, "last_time_hour": wanted["last_time_hour"]} == wanted
    assert record["last_time_hour"].startswith(str(wanted["last_time_hour"]).removesuffix("Z"))
    assert "BOEING" in displayed(main_job, "table", "get", "aircraft-state", "N14228")
    assert (
        read(main_job, "table", "get", "aircraft-state", "N00000", exit_code=NOT_FOUND)["record"]
        is None
    )
    assert "no record" in displayed(
        main_job, "table", "get", "aircraft-state", "N00000", exit_code=NOT_FOUND
    )


def test_the_plan_is_displayed_without_reading_data(main_job: FinishedJob) -> None:
    assert "planes" in displayed(main_job, "plan", "dagster_adjunct.examples.flights.pipeline:app")
    assert isinstance(read(main_job, "plan", "dagster_adjunct.examples.flights.pipeline:app"), dict)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("stream", "show", "nowhere"), "there is no stream 'nowhere'"),
        (("dataset", "show", "nowhere"), "there is no dataset 'nowhere'"),
        (("dataset", "get", "weather", "EWR"), "key of 2 columns"),
        (("table", "get", "nowhere", "k"), "known are aircraft-state"),
    ],
)
def test_what_is_not_there_is_reported_in_a_sentence_with_exit_code_1(
    main_job: FinishedJob, arguments: tuple[str, ...], sentence: str
) -> None:
    refused = adjunct(*arguments, "--lake", main_job.lake)
    assert refused.returncode == 1, refused.stderr
    assert sentence in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr


def test_the_console_script_prints_one_json_document_and_nothing_else(
    main_job: FinishedJob,
) -> None:
    done = adjunct("dataset", "list", "--json", "--lake", main_job.lake)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 4
