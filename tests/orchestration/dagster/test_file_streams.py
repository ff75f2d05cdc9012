"""Streams of files in Dagster: files that arrive launch runs, an error of a rule is that of a run,
and files that were set aside are shown.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetKey, DagsterInstance

from dagster_adjunct import (
    Application,
    FileRules,
    Lake,
    SparkResource,
    build_definitions,
    file_stream,
    open_lake,
    run_application,
)
from dagster_adjunct.errors import AdmittedFileError
from dagster_adjunct.resources.file_streams import streams as declared
from dagster_adjunct.resources.file_streams.folder import FolderStreams
from tests.orchestration.dagster.test_restart_sensor import fail
from tests.orchestration.dagster.ticking import BOTH, Ticker


@pytest.fixture(autouse=True)
def _nothing_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_declared", {})


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "landing"
    folder.mkdir()
    return folder


def copying(folder: Path, **options: Any) -> Application:
    clicks = file_stream("clicks", str(folder), format="jsonl", schema="n int", **options)
    app = Application("copy", engine="auto")
    app.input_stream(clicks).send_to(app.output_stream("lake.copy", partitions=1))
    return app


def write(folder: Path, name: str, *numbers: int, text: str = "") -> None:
    lines = [f'{{"n": {number}}}\n' for number in numbers]
    (folder / name).write_text("".join(lines) + text)
    at = 1_700_000_000 + int(name.partition(".")[0])
    os.utime(folder / name, (at, at))


@BOTH
def test_files_that_arrive_launch_a_run(
    lake: Lake, folder: Path, instance: DagsterInstance, by: str
) -> None:
    app = copying(folder)
    sensor = Ticker(lake, app, instance, "copy_new_records", by=by)
    assert "No new records" in sensor.skipped()
    write(folder, "1.json", 1, 2)
    assert sensor.asked().tags["adjunct/lag"] == "2"
    run_application(app, lake=lake)
    assert "No new records" in sensor.skipped()
    write(folder, "2.json", 3)
    assert sensor.asked().tags["adjunct/lag"] == "1"


def test_an_error_of_a_rule_is_that_of_a_run_until_it_is_mended(
    lake: Lake, folder: Path, instance: DagsterInstance
) -> None:
    app = copying(folder)
    write(folder, "1.json", 1)
    run_application(app, lake=lake)
    sensor = Ticker(lake, app, instance, "copy_new_records")
    write(folder, "2.json", text='{"n": "none"}')
    sensor.asked()
    failed = fail(instance, AdmittedFileError("2.json is damaged.", "Correct it."))
    for _ in range(2):
        assert f"Run {failed[:8]} failed permanently: 2.json is damaged" in sensor.skipped()
    write(folder, "2.json", 2)
    assert sensor.asked().tags["adjunct/lag"] == "1"


def materialize(lake: Lake, app: Application, instance: DagsterInstance) -> Any:
    definitions = build_definitions(app, lake=lake.url, spark=SparkResource(master="none"))
    job = definitions.resolve_job_def("copy")
    return job.execute_in_process(instance=instance, raise_on_error=True)


@pytest.mark.lengthy
def test_files_that_were_set_aside_are_shown_and_warned_of_once(
    lake: Lake, folder: Path, instance: DagsterInstance
) -> None:
    app = copying(folder, rules=FileRules(damaged="set-aside"), marker="*.done")
    write(folder, "1.json", 1)
    write(folder, "2.json", text="{")
    write(folder, "3.json", 3)
    for name in ("1", "2"):
        (folder / f"{name}.json.done").touch()
    result = materialize(lake, app, instance)
    (check,) = result.get_asset_check_evaluations()
    assert (check.check_name, check.passed) == ("files_set_aside_files_clicks", False)
    assert check.metadata["adjunct/set_aside"].value == 1
    assert list(check.metadata["adjunct/files"].value) == ["2.json"]

    (event,) = instance.fetch_observations(AssetKey(["files", "clicks"]), limit=1).records
    assert event.asset_observation is not None
    facts = event.asset_observation.metadata
    assert facts["dagster/uri"].value == str(folder)
    assert [facts[f"adjunct/{name}"].value for name in ("files", "set_aside", "waiting")] == [
        2,
        1,
        1,
    ]
    assert facts["adjunct/waiting_files"].value == ["3.json: 3.json.done is missing"]
    (folder / "3.json.done").touch()
    (check,) = materialize(lake, app, instance).get_asset_check_evaluations()
    assert check.passed, "the first run has warned of 2.json, which is at the same offset as 3.json"
    for text in ("{", "{{"):
        write(folder, "4.json", text=text)
        (folder / "4.json.done").touch()
        FolderStreams(lake).admit("clicks")
    write(folder, "5.json", 5)
    (folder / "5.json.done").touch()
    (check,) = materialize(lake, app, instance).get_asset_check_evaluations()
    assert check.metadata["adjunct/set_aside"].value == 1, "4.json, which was delivered twice"
    ssp = FolderStreams(lake).partitions("clicks")[0]
    assert FolderStreams(lake).upcoming([ssp])[ssp] == "3"
