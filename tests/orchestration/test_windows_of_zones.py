"""Windows by the clocks of a zone: where they begin and end, and what a run makes of days with
23 and 25 hours.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_right
from collections import Counter
from functools import cache, reduce
from random import Random
from typing import Literal
from zoneinfo import ZoneInfo

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.windows.kinds import window_end, window_start
from dagster_adjunct.windows import Count, Sum, Tumbling
from tests.orchestration.step_world import StepWorld
from tests.rounds import rounds

MINUTE, DAY = dt.timedelta(minutes=1), dt.timedelta(days=1)
EPOCH = dt.datetime(1970, 1, 1)
NEW_YORK = "America/New_York"
# Where clocks were put forward or back: by an hour, at midnight, from 00:01, by half an hour, by
# two hours, by a day.
CHANGES = [
    (NEW_YORK, "2026-03-08"),
    (NEW_YORK, "2026-11-01"),
    ("America/Sao_Paulo", "2018-11-04"),
    ("America/Sao_Paulo", "2018-02-18"),
    ("America/Havana", "2026-11-01"),
    ("America/St_Johns", "2006-10-29"),
    ("America/St_Johns", "2006-04-02"),
    ("Australia/Lord_Howe", "2026-04-05"),
    ("Australia/Lord_Howe", "2026-10-04"),
    ("Antarctica/Troll", "2026-10-25"),
    ("Pacific/Apia", "2011-12-30"),
    ("Asia/Kathmandu", "1986-01-01"),
    ("UTC", "2026-03-08"),
]


def windows_by_minute(
    zone: str, first: dt.datetime, last: dt.datetime, length: dt.timedelta
) -> list[dt.datetime]:
    """Return the begins of windows: minutes at which clocks first show a multiple, or with an
    hour, show one at all.
    """
    begins, highest, moment = [], None, first
    while moment < last:
        clock = moment.astimezone(ZoneInfo(zone)).replace(tzinfo=None) - EPOCH
        label = clock // length
        again = length == dt.timedelta(hours=1) and clock % length == dt.timedelta(0)
        if highest is None or label > highest or again:
            begins.append(moment)
        highest, moment = max(label, highest if highest is not None else label), moment + MINUTE
    return begins[1:]  # the first has begun before


AT_LENGTH: list[dict[str, int]] = [{"days": 2}, {"hours": 1}, {"hours": 2}, {"hours": 12}]


@pytest.mark.spark
@pytest.mark.parametrize(
    "kind",
    [
        {"days": 1},
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ({"hours": 6}, *AT_LENGTH)),
    ],
)
def test_windows_begin_where_clocks_first_show_their_begin(
    spark: SparkSession, kind: dict[str, int]
) -> None:
    beginning = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    known: list[list[dt.datetime]] = []
    frames: list[DataFrame] = []
    for number, (zone, date) in enumerate(CHANGES):
        window = Tumbling(**kind, zone=zone)
        day = dt.datetime.fromisoformat(date).replace(tzinfo=dt.UTC)
        begins = windows_by_minute(zone, day - 4 * DAY, day + 5 * DAY, dt.timedelta(**kind))
        times = [
            begin + MINUTE * minutes
            for begin in begins[:-1]
            for minutes in range(0, 3 * 24 * 60, 30)
        ]
        times += [begin - dt.timedelta(microseconds=1) for begin in begins[1:]]
        times = sorted({time for time in times if begins[0] <= time < begins[-1]})
        micros = [((time - beginning) // dt.timedelta(microseconds=1),) for time in times]
        frame = (
            spark.createDataFrame(micros, "t bigint")
            .coalesce(1)
            .withColumn("b", window_start(F.col("t"), window))
        )
        frames.append(
            frame.withColumn("e", window_end(F.col("b"), window)).withColumn(
                "number", F.lit(number)
            )
        )
        known.append(begins)
    for *micros, number in reduce(DataFrame.unionAll, frames).collect():
        time, begin, end = (beginning + dt.timedelta(microseconds=value) for value in micros)
        place = bisect_right(known[number], time) - 1
        assert (begin, end) == tuple(known[number][place : place + 2]), (
            CHANGES[number],
            kind,
            time,
        )


# Clock changes on a Monday or on the first of a month: skipped midnights, midnights that are shown
# twice, a day before and a day after; years and leap days, also with offsets of 45 minutes.
CALENDAR_CHANGES = [
    ("America/Havana", "2001-04-01"),
    ("America/Havana", "2026-11-01"),
    ("America/Santiago", "2026-09-06"),
    ("America/St_Johns", "2009-11-01"),
    ("America/St_Johns", "2026-01-01"),
    ("Asia/Kathmandu", "1986-01-01"),
    ("Asia/Kathmandu", "2024-02-29"),
    ("America/Toronto", "1919-03-31"),
    ("Asia/Tehran", "2010-03-22"),
    ("Asia/Tehran", "2020-09-21"),
    (NEW_YORK, "2000-03-01"),
    ("Pacific/Apia", "2012-01-01"),
    ("Pacific/Kwajalein", "1969-10-01"),
]
CALENDARS: list[dict[str, int]] = [{"weeks": 1}, {"months": 1}, {"months": 12}]
# Other numbers of months are another constant in the same expression.
CALENDARS += rounds([], [{"months": 3}, {"months": 6}])


def begin_of(local: dt.datetime, kind: dict[str, int], windows: int = 0) -> dt.datetime:
    """Return the begin of the week or months that a local time is in, or of so many later."""
    if "weeks" in kind:
        monday = local.date() - dt.timedelta(days=local.weekday()) + 7 * DAY * windows
        return dt.datetime.combine(monday, dt.time())
    number = (local.year * 12 + local.month - 1) // kind["months"] + windows
    year, month = divmod(number * kind["months"], 12)
    return dt.datetime(year, month + 1, 1)


@cache
def first_shown(zone: str, local: dt.datetime) -> dt.datetime:
    """Return the first minute at which the clock shows a local time or a later one."""
    first = local.replace(tzinfo=dt.UTC) - dt.timedelta(hours=16)
    minutes = (first + MINUTE * number for number in range(40 * 60))
    return next(m for m in minutes if m.astimezone(ZoneInfo(zone)).replace(tzinfo=None) >= local)


def window_of(
    zone: str, time: dt.datetime, kind: dict[str, int]
) -> tuple[dt.datetime, dt.datetime]:
    local = time.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    begins = [first_shown(zone, begin_of(local, kind, windows)) for windows in (-1, 0, 1, 2)]
    place = bisect_right(begins, time) - 1
    return begins[place], begins[place + 1]


@pytest.mark.spark
@pytest.mark.rounds
def test_weeks_and_months_begin_at_the_midnights_of_a_calendar(spark: SparkSession) -> None:
    micro = dt.timedelta(microseconds=1)
    beginning = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    recent = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
    random = Random(53)
    times: dict[str, set[dt.datetime]] = {}
    for zone, date in CALENDAR_CHANGES:
        day = dt.datetime.fromisoformat(date).replace(tzinfo=dt.UTC)
        drawn = [recent + random.random() * 40 * 365 * DAY for _ in range(3)]
        drawn += [day + random.uniform(-2, 2) * DAY for _ in range(20)]
        for kind in CALENDARS:
            for time in (day, drawn[0]):
                for begin in window_of(zone, time, kind):
                    drawn += [begin - micro, begin, begin + random.random() * DAY]
        times.setdefault(zone, set()).update(drawn)
    frames = []
    for zone, moments in times.items():
        rows = [(zone, (moment - beginning) // micro) for moment in sorted(moments)]
        frame = spark.createDataFrame(rows, "zone string, t bigint").coalesce(1)
        for number, kind in enumerate(CALENDARS):
            window = Tumbling(**kind, zone=zone)
            frame = frame.withColumn(f"b{number}", window_start(F.col("t"), window))
            frame = frame.withColumn(f"e{number}", window_end(F.col(f"b{number}"), window))
        frames.append(frame)
    for zone, *micros in reduce(DataFrame.unionAll, frames).collect():
        time, *edges = (beginning + dt.timedelta(microseconds=value) for value in micros)
        for number, kind in enumerate(CALENDARS):
            made = tuple(edges[2 * number : 2 * number + 2])
            assert made == window_of(zone, time, kind), (zone, time, kind)


@pytest.mark.spark
def test_weeks_and_months_have_final_and_updated_results_however_batches_are_cut(
    step_world: StepWorld,
) -> None:
    world = step_world
    world.stream("sales", "shop", 1, shop="string", at="timestamp")
    app = Application("takings", max_batch_records=150)
    sales = app.input_stream("lake.sales", event_time="at")
    results: dict[str, Literal["final", "updates"]] = {"weeks": "final", "months": "updates"}
    zones = {"weeks": "Asia/Tehran", "months": "America/Santiago"}
    for unit, zone in zones.items():
        sales.window(
            Tumbling(**{unit: 1}, zone=zone),  # type: ignore[arg-type]
            by="shop",
            name=unit,
            aggregates={"n": Count()},
            results=results[unit],
        ).send_to(app.output_stream(f"lake.{unit}", partitions=1, key="shop"))
    random = Random(53)
    first = dt.datetime(2024, 1, 20, tzinfo=dt.UTC)
    times = sorted(first + random.random() * 110 * DAY for _ in range(300))
    world.send("sales", *[("s", time) for time in times])
    world.run(app)
    expected: dict[str, dict[tuple[dt.datetime, dt.datetime], int]] = {}
    for unit, zone in zones.items():
        counted = Counter(window_of(zone, time, {unit: 1}) for time in times)
        expected[unit] = dict(sorted(counted.items()))

    def rows(unit: str) -> list[tuple[tuple[dt.datetime, dt.datetime], int, bool]]:
        found = []
        for row in world.rows(unit):
            edges = [row[name].replace(tzinfo=dt.UTC) for name in ("window_start", "window_end")]
            found.append(((edges[0], edges[1]), row["n"], row.get("final", True)))
        return found

    made = [(window, count) for window, count, _ in rows("weeks")]
    assert made == list(expected["weeks"].items())[:-1]
    newest = {window: (count, final) for window, count, final in rows("months")}
    last = max(newest)
    assert newest == {window: (n, window != last) for window, n in expected["months"].items()}
    assert len(newest) == 5
    assert "tumbling 1 month of America/Santiago by shop" in [
        operator.spec.summary().split(":")[0] for operator in app.operators
    ]


@pytest.mark.spark
def test_days_of_a_zone_have_23_and_25_hours_however_batches_are_cut(step_world: StepWorld) -> None:
    world = step_world
    world.stream("sales", "shop", 1, shop="string", at="timestamp", amount="bigint")
    app = Application("takings", max_batch_records=100)
    sales = app.input_stream("lake.sales", event_time="at")
    sales.window(
        Tumbling(days=1, zone=NEW_YORK),
        by="shop",
        name="days",
        aggregates={"n": Count(), "total": Sum("amount")},
    ).send_to(app.output_stream("lake.days", partitions=1, key="shop"))
    zone = ZoneInfo(NEW_YORK)
    expected: dict[dt.date, tuple[int, int]] = {}
    for first in (
        dt.datetime(2026, 3, 6, 17, tzinfo=dt.UTC),
        dt.datetime(2026, 10, 30, 17, tzinfo=dt.UTC),
    ):
        times = [first + dt.timedelta(hours=number) for number in range(96)]
        world.send("sales", *[("s", time, number) for number, time in enumerate(times)])
        for number, time in enumerate(times):
            day = time.astimezone(zone).date()
            count, total = expected.get(day, (0, 0))
            expected[day] = (count + 1, total + number)
    world.run(app)
    rows = {
        row["window_start"].replace(tzinfo=dt.UTC).astimezone(zone): row
        for row in world.rows("days")
    }
    made = {start.date(): (row["n"], row["total"]) for start, row in rows.items()}
    last = max(expected)
    assert made == {day: value for day, value in expected.items() if day != last}, (
        "the last day is open"
    )
    assert {start.time() for start in rows} == {dt.time(0)}
    spans = {start.date(): row["window_end"] - row["window_start"] for start, row in rows.items()}
    assert spans[dt.date(2026, 3, 8)] == dt.timedelta(hours=23)
    assert spans[dt.date(2026, 11, 1)] == dt.timedelta(hours=25)
    assert (made[dt.date(2026, 3, 8)][0], made[dt.date(2026, 11, 1)][0]) == (23, 25)
    plan = next(
        operator.spec.summary() for operator in app.operators if operator.spec.kind == "window"
    )
    assert plan.startswith("tumbling 1 day of America/New_York by shop")


@pytest.mark.spark
def test_a_zone_that_java_does_not_know_is_refused_before_a_batch(step_world: StepWorld) -> None:
    world = step_world
    world.stream("sales", "shop", 1, shop="string", at="timestamp", amount="bigint")
    app = Application("takings")
    sales = app.input_stream("lake.sales", event_time="at")
    sales.window(
        Tumbling(days=1, zone="ROC"), by="shop", name="days", aggregates={"n": Count()}
    ).send_to(app.output_stream("lake.days", partitions=1, key="shop"))
    world.send("sales", ("s", dt.datetime(2026, 3, 6, 17, tzinfo=dt.UTC), 1))
    with pytest.raises(ConfigurationError) as refused:
        world.run(app)
    assert (refused.value.argument, "stays open" in str(refused.value)) == ("zone", False)


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({}, "size"),
        ({"days": 1}, "zone"),
        ({"days": 1, "zone": "localtime"}, "zone"),
        ({"days": 1, "zone": "posixrules"}, "zone"),
        ({"days": 1, "zone": "right/UTC"}, "zone"),
        ({"size": DAY, "zone": NEW_YORK}, "zone"),
        ({"size": DAY, "days": 1, "zone": NEW_YORK}, "days"),
        ({"days": 0, "zone": NEW_YORK}, "days"),
        ({"days": True, "zone": NEW_YORK}, "days"),
        ({"hours": 5, "zone": NEW_YORK}, "hours"),
        ({"hours": 24, "zone": NEW_YORK}, "hours"),
        ({"weeks": 2, "zone": NEW_YORK}, "weeks"),
        ({"months": 2, "zone": NEW_YORK}, "months"),
        ({"months": 24, "zone": NEW_YORK}, "months"),
        ({"months": 1}, "zone"),
        ({"weeks": 1, "months": 1, "zone": NEW_YORK}, "months"),
        ({"days": 1, "zone": "New York"}, "zone"),
        ({"days": 1, "zone": "+01:00"}, "zone"),
        ({"days": 1, "zone": "../etc/passwd"}, "zone"),
    ],
)
def test_units_that_no_zone_counts_are_refused(given: dict[str, object], argument: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Tumbling(**given)  # type: ignore[arg-type]
    assert refused.value.argument == argument
