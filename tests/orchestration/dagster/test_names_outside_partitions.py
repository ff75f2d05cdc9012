"""Delivered names that are no partitions are reported once and left out; days begin at midnight
in a declared zone.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo

import pytest
from dagster import DailyPartitionsDefinition, RunRequest
from dagster._core.test_utils import freeze_time

from dagster_adjunct import (
    AdjunctDataset,
    Application,
    VersionPartitions,
    bounded_dataset,
    open_dataset,
)
from dagster_adjunct.orchestration.code_location.dataset_assets import dagster_partitions
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.sources import FileSource
from tests.orchestration.dagster.lab import APPLES, NO_SPARK, SCHEMA, Lab, key_of
from tests.orchestration.dagster.ticking import BOTH, Ticker

BY_DAY = VersionPartitions("day", start="2026-11-01")
NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)


def deliver(folder: Path, *names: str) -> None:
    """Write a folder of one row for each name, and complete it."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "part-0.csv").write_text(f"item,label,price\na,{name},1\n")
        (folder / name / "_SUCCESS").touch()


def in_folders(folder: Path, versions: VersionPartitions, **more: Any) -> AdjunctDataset:
    files = FileSource(str(folder), "csv", SCHEMA)
    return bounded_dataset(
        "items", input=files, key="item", broadcast=True, versions=versions, **more
    )


def ticker(lab: Lab, dataset: AdjunctDataset, by: str = "sensor") -> Ticker:
    app = Application("shop")
    app.table(dataset)
    app.input_stream("lake.orders").send_to(app.output_stream("lake.copy", partitions=1))
    return Ticker(lab.lake, app, lab.instance, "items_new_versions", by, spark=NO_SPARK)


@BOTH
@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("versions", "outside", "inside"),
    [
        (BY_DAY, ["2026-10-30"], "2026-11-26"),
        (BY_DAY, ["0-backup", "2026-10-31", "20261101"], "2026-11-01"),
        (VersionPartitions(names=("b2", "b10")), ["a", "b1"], "b2"),
        (VersionPartitions(), ["a...b"], "b"),
    ],
)
def test_a_folder_that_is_no_partition_is_left_out_and_the_next_is_built(
    lab: Lab, tmp_path: Path, by: str, versions: VersionPartitions, outside: list[str], inside: str
) -> None:
    deliver(tmp_path / "in", *outside, inside)
    dataset = in_folders(tmp_path / "in", versions)
    sensor = ticker(lab, dataset, by)
    request = sensor.asked()
    assert request.partition_key == inside
    assert lab.run(sensor.defs, key_of(dataset), partition_key=inside).success
    assert sensor.skipped().startswith("No new version; ")
    with open_dataset(lab.lake, dataset) as opened:
        assert [version.name for version in opened.versions()] == [inside]


@BOTH
def test_what_is_left_out_is_reported_in_one_tick_and_then_again_for_another_name(
    lab: Lab, tmp_path: Path, by: str
) -> None:
    deliver(tmp_path / "in", "2026-10-30")
    sensor = ticker(lab, in_folders(tmp_path / "in", BY_DAY), by)
    first = sensor.skipped()
    assert "version '2026-10-30' is delivered and left out" in first
    assert "the first day is 2026-11-01" in first
    assert "2026-10-30" not in sensor.skipped()
    deliver(tmp_path / "in", "2026-10-29")
    again = sensor.skipped()
    assert "2026-10-29" in again
    assert "2026-10-30" not in again


@BOTH
@pytest.mark.lengthy
def test_a_marker_that_is_no_partition_is_dropped_and_the_next_version_built(
    lab: Lab, by: str
) -> None:
    dataset = bounded_dataset(
        "items", input="lake.items", key="item", partitions=2, versions=BY_DAY
    )
    lab.deliver("items", [("x", "Old", 1)], "2026-10-30")
    sensor = ticker(lab, dataset, by)
    assert "2026-10-30" in sensor.skipped()
    assert "2026-10-30" not in sensor.skipped()
    lab.deliver("items", APPLES, "2026-11-26")
    assert sensor.asked().partition_key == "2026-11-26"
    finished = lab.run(sensor.defs, key_of(dataset), partition_key="2026-11-26")
    assert list(finished.made) == ["items/2026-11-26"]
    assert finished.made["items/2026-11-26"]["adjunct/records_left_out"] == 1
    assert "'2026-10-30' is delivered and left out" in finished.log
    with open_dataset(lab.lake, dataset) as opened:
        assert [version.name for version in opened.versions()] == ["2026-11-26"]
        assert {entry["label"] for _, entry in opened.items()} == {row[1] for row in APPLES}
    assert sensor.skipped().startswith("No new version; ")


@pytest.mark.lengthy
def test_a_version_that_is_published_stays_one_if_partitions_begin_later(
    lab: Lab, tmp_path: Path
) -> None:
    deliver(tmp_path / "in", "2026-11-02", "2026-11-20")
    before = in_folders(tmp_path / "in", BY_DAY)
    for day in ("2026-11-02", "2026-11-20"):
        assert lab.run(ticker(lab, before).defs, key_of(before), partition_key=day).success
    later = in_folders(tmp_path / "in", VersionPartitions("day", start="2026-11-10"))
    assert "left out" not in ticker(lab, later).skipped()


def test_a_folder_written_in_place_has_no_days_and_says_so(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "part-0.csv").write_text("item,label,price\na,A,1\n")
    (tmp_path / "in" / "_SUCCESS").touch()
    sensor = ticker(lab, in_folders(tmp_path / "in", BY_DAY))
    assert "left out" in sensor.skipped()


@BOTH
def test_a_day_is_a_partition_once_it_has_begun_in_its_zone(
    lab: Lab, tmp_path: Path, by: str
) -> None:
    deliver(tmp_path / "in", "2026-11-29")
    in_auckland = VersionPartitions("day", start="2026-11-01", timezone="Pacific/Auckland")
    with freeze_time(NOW):  # 01:00 of the 29th in Auckland
        waiting = ticker(lab, in_folders(tmp_path / "in", BY_DAY), by).skipped()
        request = ticker(lab, in_folders(tmp_path / "in", in_auckland), by).tick()
    assert "has not begun in UTC" in waiting
    assert isinstance(request, RunRequest), request
    assert request.partition_key == "2026-11-29"


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Pacific/Auckland", "2026-09-27", 23),
        ("Pacific/Auckland", "2026-04-05", 25),
        ("America/New_York", "2026-03-08", 23),
        ("America/New_York", "2026-11-01", 25),
        ("America/Santiago", "2026-09-06", 23),  # midnight is left out there
        ("UTC", "2026-03-29", 24),
    ],
)
def test_days_of_a_zone_have_the_hours_that_its_clock_shows(
    zone: str, day: str, hours: int, tmp_path: Path
) -> None:
    versions = VersionPartitions("day", start="2026-01-01", timezone=zone)
    partitions = dagster_partitions(in_folders(tmp_path, versions))
    assert isinstance(partitions, DailyPartitionsDefinition)
    window = partitions.time_window_for_partition_key(day)
    assert window.end.timestamp() - window.start.timestamp() == hours * 3600
    assert window.start.astimezone(ZoneInfo(zone)).date().isoformat() == day
    keys = partitions.get_partition_keys(current_time=NOW)
    assert keys == [
        (datetime(2026, 1, 1) + timedelta(days=number)).date().isoformat()
        for number in range(
            (NOW.astimezone(ZoneInfo(zone)).date() - datetime(2026, 1, 1).date()).days + 1
        )
    ]


@pytest.mark.parametrize(
    ("by", "start", "names"),
    [
        ("week", "2026-11-02", ["2026-11-02", "2026-11-09", "2026-11-16", "2026-11-23"]),
        ("month", "2026-09-01", ["2026-09-01", "2026-10-01", "2026-11-01"]),
    ],
)
def test_weeks_and_months_have_the_names_of_their_first_days(
    by: Literal["week", "month"], start: str, names: list[str], tmp_path: Path
) -> None:
    versions = VersionPartitions(by, start=start)
    partitions = dagster_partitions(in_folders(tmp_path, versions))
    now = datetime(2026, 11, 26, 12, tzinfo=UTC)
    assert list(partitions.get_partition_keys(current_time=now)) == names
    days = [(datetime(2026, 8, 1) + timedelta(days=day)).date().isoformat() for day in range(118)]
    assert [day for day in days if versions.has(day)] == names
    with pytest.raises(ConfigurationError):
        VersionPartitions(by, start="2026-11-04")


@pytest.mark.lengthy
def test_partitions_keep_their_versions_when_a_zone_is_declared(lab: Lab, tmp_path: Path) -> None:
    deliver(tmp_path / "in", "2026-11-26", "2026-11-27")
    dataset = in_folders(tmp_path / "in", BY_DAY, valid_from="name")
    assert lab.run(ticker(lab, dataset).defs, key_of(dataset), partition_key="2026-11-26").success
    zoned = in_folders(
        tmp_path / "in",
        VersionPartitions("day", start="2026-11-01", timezone="Pacific/Auckland"),
        valid_from="name",
    )
    sensor = ticker(lab, zoned)
    assert sensor.asked().partition_key == "2026-11-27"
    assert lab.run(sensor.defs, key_of(zoned), partition_key="2026-11-27").success
    assert lab.instance.get_materialized_partitions(key_of(zoned)) == {"2026-11-26", "2026-11-27"}
    with open_dataset(lab.lake, zoned) as opened:
        since = {version.name: version.valid_from for version in opened.versions()}
    assert since["2026-11-26"] == datetime(2026, 11, 26, tzinfo=UTC)
    assert since["2026-11-27"] == datetime(2026, 11, 27, tzinfo=ZoneInfo("Pacific/Auckland"))


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"by": "day", "start": "2026-01-01", "timezone": "Pacific/Aukland"}, "timezone"),
        ({"by": "day", "start": "2026-01-01", "timezone": "posix/UTC"}, "timezone"),
        ({"by": "day", "start": "2026-01-01", "timezone": ""}, "timezone"),
        ({"names": ("a",), "timezone": "UTC"}, "timezone"),
        ({"timezone": "UTC"}, "timezone"),
        ({"by": "day", "start": "2026-01-01", "names": ("a",)}, "names"),
        ({"names": ("a...b",)}, "names"),
        ({"names": ("a\tb",)}, "names"),
        ({"names": ("",)}, "names"),
    ],
)
def test_what_can_not_be_partitions_is_refused(arguments: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        VersionPartitions(**arguments)
    assert refused.value.facts["argument"] == wrong


@BOTH
@pytest.mark.lengthy
@pytest.mark.parametrize("timezone", ["Pacific/Auckland", "America/New_York"])
def test_the_last_day_of_all_and_odd_digits_hold_up_no_other_day(
    lab: Lab, tmp_path: Path, by: str, timezone: str
) -> None:
    # Full-width digits are digits to Python, and no date to Dagster.
    deliver(tmp_path / "in", "\uff12\uff10\uff12\uff16-11-02", "2026-11-26", "9999-12-31")
    versions = VersionPartitions("day", start="2026-11-01", timezone=timezone)
    dataset = in_folders(tmp_path / "in", versions)
    sensor = ticker(lab, dataset, by)
    assert sensor.asked().partition_key == "2026-11-26"
    assert lab.run(sensor.defs, key_of(dataset), partition_key="2026-11-26").success
    for _ in range(2):
        assert "No new version" in sensor.skipped() or "9999-12-31" in sensor.skipped()
    with open_dataset(lab.lake, dataset) as opened:
        assert [version.name for version in opened.versions()] == ["2026-11-26"]
