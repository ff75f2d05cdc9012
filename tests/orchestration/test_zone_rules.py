"""Two databases of time zones: Java's rules and Python's are compared, and their version is kept
with the state.
"""

from __future__ import annotations

import datetime as dt
import zoneinfo
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.errors import ZoneRulesError
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.windows import window, zone_clock, zone_rules
from dagster_adjunct.orchestration.operators.windows.kinds import window_start
from dagster_adjunct.orchestration.operators.windows.zone_rules import (
    check_zones_in_jvm,
    differing_spans,
)
from dagster_adjunct.windows import Count, Tumbling
from tests.orchestration.step_world import StepWorld

NEW_YORK, HOUR = "America/New_York", 3600
NOW = dt.datetime.now(dt.UTC)


def compile_zone(folder: Path, zone: str, changes: Mapping[dt.datetime, int], first: int) -> None:
    """Write a file of rules as RFC 8536 describes it, version 2: the offset in seconds from each
    time on.
    """
    offsets = [first, *changes.values()]
    kinds = sorted(set(offsets))
    times = [int(time.timestamp()) for time in changes]
    counts = [0, 0, 0, len(times), len(kinds), 4]
    header = b"TZif2" + bytes(15) + b"".join(count.to_bytes(4, "big") for count in counts)
    empty = (
        b"TZif2" + bytes(15) + b"".join(count.to_bytes(4, "big") for count in [0, 0, 0, 0, 1, 4])
    )
    types = b"".join(kind.to_bytes(4, "big", signed=True) + bytes(2) for kind in kinds)
    data = b"".join(time.to_bytes(8, "big", signed=True) for time in times)
    data += bytes(kinds.index(offset) for offset in offsets[1:]) + types + b"ABC\0"
    file = folder / zone
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(empty + bytes(6) + b"ABC\0" + header + data + b"\n\n")
    (folder / "tzdata.zi").write_text("# version 2099z\n")


@pytest.fixture
def rules(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """A function that puts rules of a zone in place of those that Python has; afterwards they
    are as they were.
    """

    def forget() -> None:
        zoneinfo.ZoneInfo.clear_cache()
        zone_rules.python_database.cache_clear()
        zone_rules.clock_changes.cache_clear()
        zone_clock.skipped_begins.cache_clear()
        zone_rules._differences.clear()

    def install(zone: str, changes: Mapping[dt.datetime, int], first: int) -> None:
        folder = tmp_path / "zoneinfo"
        compile_zone(folder, zone, changes, first)
        zoneinfo.reset_tzpath([str(folder), *before])
        forget()

    before = zoneinfo.TZPATH
    yield install
    zoneinfo.reset_tzpath(before)
    forget()


def changed(zone: str, since: dt.datetime, seconds: int) -> tuple[dict[dt.datetime, int], int]:
    """Return the changes of a zone's clock and its first offset, with `seconds` more from a time
    on.
    """
    zero = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    known = zone_rules.clock_changes(zone)
    found = {zero + dt.timedelta(microseconds=moment): after // 10**6 for moment, _, after in known}
    offset = since.astimezone(zoneinfo.ZoneInfo(zone)).utcoffset()
    assert offset is not None
    found[since] = int(offset.total_seconds())
    later = {moment: offset + seconds * (moment >= since) for moment, offset in found.items()}
    return dict(sorted(later.items())), known[0][1] // 10**6


@pytest.mark.spark
@pytest.mark.parametrize("zone", [NEW_YORK, "UTC", "Asia/Kathmandu", "Africa/Casablanca"])
def test_equal_rules_are_accepted_by_both_ways_of_asking_java(
    spark: SparkSession, zone: str
) -> None:
    differing_spans(spark, zone)
    check_zones_in_jvm([zone])


@pytest.mark.spark
@pytest.mark.parametrize("days", [-3000, -1, 30, 3000])
def test_other_rules_within_ten_years_are_refused_with_both_versions(
    spark: SparkSession, rules: Callable[..., None], days: int
) -> None:
    since = (NOW + dt.timedelta(days=days)).replace(microsecond=0)
    rules(NEW_YORK, *changed(NEW_YORK, since, HOUR))
    for compare in (
        lambda: differing_spans(spark, NEW_YORK),
        lambda: check_zones_in_jvm([NEW_YORK]),
    ):
        with pytest.raises(ZoneRulesError) as refused:
            compare()
        error = refused.value
        assert (error.zone, error.python_rules) == (NEW_YORK, "2099z")
        assert error.java_rules is not None
        assert f"{zone_rules._package_version(error.java_rules)}" in error.next_step
        assert dt.datetime.fromisoformat(error.at or "") - since < dt.timedelta(days=1)


@pytest.mark.spark
def test_a_difference_of_an_hour_on_one_day_is_found(
    spark: SparkSession, rules: Callable[..., None]
) -> None:
    changes, first = changed(NEW_YORK, NOW.replace(microsecond=0), 0)
    moment = next(time for time in changes if time > NOW + dt.timedelta(days=7))
    moved = {
        time + dt.timedelta(hours=1) * (time == moment): offset for time, offset in changes.items()
    }
    rules(NEW_YORK, moved, first)
    with pytest.raises(ZoneRulesError) as refused:
        differing_spans(spark, NEW_YORK)
    assert (refused.value.at or "")[:13] == moment.isoformat()[:13]


@pytest.mark.spark
def test_only_records_of_a_time_far_off_meet_other_rules(
    spark: SparkSession, rules: Callable[..., None]
) -> None:
    changes, first = changed(NEW_YORK, dt.datetime(1950, 1, 1, tzinfo=dt.UTC), 0)
    first_change = min(time for time in changes if time.year == 1950 and time.month > 1)
    rules(
        NEW_YORK, {time: offset for time, offset in changes.items() if time != first_change}, first
    )
    kind = Tumbling(days=1, zone=NEW_YORK)

    def start(time: dt.datetime) -> Any:
        micros = int(time.timestamp()) * 10**6
        return (
            spark.range(1).select(window_start(F.lit(micros) + F.col("id"), kind)).collect()[0][0]
        )

    assert differing_spans(spark, NEW_YORK)
    assert start(dt.datetime(1951, 6, 1, 12, tzinfo=dt.UTC)) is not None
    assert start(NOW) is not None
    with pytest.raises(Exception, match="ZoneRulesError"):
        start(first_change + dt.timedelta(days=10))


def days_of(zone: str) -> Application:
    app = Application("takings")
    sales = app.input_stream("lake.sales", event_time="at")
    sales.window(
        Tumbling(days=1, zone=zone), by="shop", name="days", aggregates={"n": Count()}
    ).send_to(app.output_stream("lake.days", partitions=1, key="shop"))
    return app


@pytest.mark.spark
def test_an_application_is_refused_before_its_first_batch(
    step_world: StepWorld, rules: Callable[..., None]
) -> None:
    world = step_world
    world.stream("sales", "shop", 1, shop="string", at="timestamp")
    world.send("sales", ("s", NOW))
    rules(NEW_YORK, *changed(NEW_YORK, NOW.replace(microsecond=0) + dt.timedelta(days=40), HOUR))
    app = days_of(NEW_YORK)
    with pytest.raises(ZoneRulesError) as refused:
        world.run(app)
    assert refused.value.operator is not None
    assert world.state(app).open is None, "no batch was begun"


@pytest.mark.spark
def test_open_windows_of_other_rules_are_refused_and_closed_ones_are_not(
    step_world: StepWorld, rules: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, app = step_world, days_of(NEW_YORK)
    world.stream("sales", "shop", 1, shop="string", at="timestamp")
    noon = dt.datetime(2026, 3, 6, 17, tzinfo=dt.UTC)
    world.send("sales", ("s", noon))
    monkeypatch.setattr(window, "describe_rules", lambda zone: "2001a 00")
    world.run(app)
    monkeypatch.undo()
    log = DatasetLog(world.lake, "takings-days")

    def stored_rules() -> str:
        manifest = log.read()[1]
        assert manifest is not None
        return manifest.declaration.zone_rules

    assert stored_rules() == "2001a 00"
    # The open window starts and ends at the same times by the present rules: it goes on, and they
    # are stored.
    world.send("sales", ("s", noon + dt.timedelta(hours=1)))
    world.run(app)
    assert stored_rules() == zone_rules.describe_rules(NEW_YORK)

    world.send("sales", ("s", noon + dt.timedelta(days=30)))
    other = days_of("America/Chicago")
    monkeypatch.setattr(Tumbling, "describe", lambda self: f"tumbling 1 day of {NEW_YORK}")
    with pytest.raises(ZoneRulesError) as refused:  # as if midnight were an hour later by new rules
        world.run(other)
    facts = refused.value
    assert (facts.dataset, facts.stored_rules) == ("takings-days", stored_rules().split()[0])
    assert world.state(app).open is None, "no batch was begun"
    monkeypatch.undo()
    world.run(app)
    assert [row["n"] for row in world.rows("days")] == [2]


def test_the_package_of_a_version_of_the_rules_is_named() -> None:
    named = [
        zone_rules._package_version(rules) for rules in ("2025a", "2025b", "2026f", "", "2025")
    ]
    assert named == ["2025.1", "2025.2", "2026.6", None, None]
