"""Times at their edges, from outside: windows, as-of joins and readings of history against plain
Python.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_adjunct import (
    Application,
    advance_dataset,
    bounded_dataset,
    open_dataset,
    unbounded_dataset,
)
from dagster_adjunct.maintenance import compact_dataset
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.resources.errors import AdjunctError, DatasetNotFoundError, OperatorFailedError
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointUpcoming
from dagster_adjunct.windows import Count, Max, Session, Sliding, Sum, Tumbling
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark

WHO: dict[str, Any] = {"by": "ada", "reason": "an attack"}
MICRO = dt.timedelta(microseconds=1)
SECOND = dt.timedelta(seconds=1)


def hour(number: float) -> dt.datetime:
    return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=number)


def naive(number: float) -> dt.datetime:
    return hour(number).replace(tzinfo=None)


def second(number: float) -> dt.datetime:
    """Seconds around 1970, so that some are negative."""
    return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=number)


PRICES = unbounded_dataset(
    "prices",
    input="lake.prices",
    key="item",
    partitions=1,
    history=dt.timedelta(hours=10),
    valid_from="since",
)


def advance(world: StepWorld, dataset: Any = PRICES) -> Any:
    return advance_dataset(
        dataset, lake=world.lake, systems=world.systems, spark=IN_PROCESS, by="test"
    )


# -- as-of join and a window in one application, and replays of it


@pytest.mark.long
def test_replays_of_an_application_with_a_window(step_world: StepWorld) -> None:
    world = step_world
    world.stream("sales", "item", 1, n="int", item="string", at="timestamp")
    world.stream("prices", "item", 1, item="string", price="int", since="timestamp")
    app = Application("app", max_batch_records=1000)
    sales = app.input_stream("lake.sales", event_time="at")
    priced = sales.join(app.table(PRICES), on="item", how="left", select=["price"], as_of="at")
    priced.send_to(app.output_stream("lake.priced", key="item", partitions=1))
    priced.window(
        Tumbling(dt.timedelta(hours=1)),
        by="item",
        name="w",
        aggregates={"n": Count(), "sum": Sum("price")},
    ).send_to(app.output_stream("lake.windows", key="item", partitions=1))
    world.send("prices", ("a", 10, hour(0)), ("a", 20, hour(5)))
    world.send("sales", (1, "a", hour(1)), (2, "a", hour(1.5)), (3, "a", hour(5)))
    world.run(app, run="r1")
    world.send("prices", ("a", 11, hour(1.25)), ("a", 99, hour(6)))
    world.send("sales", (4, "a", hour(6.5)), (5, "a", hour(8)))
    world.run(app, run="r2")
    first = {1: 10, 2: 10, 3: 20, 4: 99, 5: 99}
    assert {row["n"]: row["price"] for row in world.rows("priced")} == first
    windows = world.rows("windows")
    assert [(row["window_start"], row["n"], row["sum"]) for row in windows] == [
        (hour(1), 2, 20),
        (hour(5), 1, 20),
        (hour(6), 1, 99),
    ]
    startpoints = Startpoints(app, lake=world.lake)
    read = 5
    expected = {
        "recorded": first,
        "as-of": {1: 10, 2: 11, 3: 20, 4: 99, 5: 99},
        "current": dict.fromkeys(range(1, 6), 99),
    }
    for number, (versions, reported) in enumerate(expected.items()):
        startpoints.request(
            "lake.sales", StartpointOldest(), until=StartpointUpcoming(), versions=versions, **WHO
        )
        world.run(app, run=f"replay-{number}")
        rows = world.rows("priced")[read:]
        assert {row["n"]: row["price"] for row in rows} == reported, versions
        assert len(rows) == 5
        read += 5
        assert world.rows("windows") == windows, versions
    # 6 is late: 8 was before it
    world.send("sales", (6, "a", hour(7.5)), (7, "a", hour(8.5)), (8, "a", hour(9)))
    world.run(app, run="r3")
    assert [(row["window_start"], row["n"], row["sum"]) for row in world.rows("windows")][3:] == [
        (hour(8), 2, 198)
    ]


# -- as-of joins at their edges


@pytest.mark.long  # the edges: test_asof_matching.py; what history shows: test_history_model.py
def test_as_of_joins_at_the_edges(step_world: StepWorld) -> None:
    world = step_world
    world.stream("sales", "item", 1, n="int", item="string", at="timestamp")
    world.stream("prices", "item", 1, item="string", price="int", since="timestamp")
    changes: list[tuple[str, int | None, dt.datetime]] = [
        ("a", 1, hour(5)),
        ("a", 2, hour(5)),  # the same moment, later: counts
        ("a", 3, hour(7)),
        ("b", 9, hour(6)),
        ("c", 7, hour(5)),
        ("d", 4, hour(12)),
    ]
    deleted = [("a", None, hour(6)), ("b", None, hour(6)), ("c", None, hour(4))]
    world.send("prices", *changes, deleted=deleted)
    advance(world)
    world.send("prices", ("a", 5, hour(5.5)), ("a", 6, hour(3)))  # the past is corrected
    advance(world)
    rows = {}
    for item, price, since in [*changes, *deleted, ("a", 5, hour(5.5)), ("a", 6, hour(3))]:
        rows[item, since] = price

    def valid(item: str, at: dt.datetime | None) -> int | None:
        past = [since for name, since in rows if name == item and at is not None and since <= at]
        return rows[item, max(past)] if past else None

    times = [hour(3), hour(4), hour(5), hour(5.5), hour(6), hour(7), hour(12)]
    asked = [
        None,
        *(time + step for time in times for step in (-MICRO, 0 * MICRO, MICRO)),
        hour(1e6),
    ]
    sales = [
        (n, item, at)
        for n, (item, at) in enumerate(
            (i, a) for i in ["a", "b", "c", "d", "x", None] for a in asked
        )
    ]
    world.send("sales", *sales)
    expected = {n: valid(item, at) for n, item, at in sales if item}
    expected |= {n: None for n, item, _ in sales if not item}
    for name, options in {"null": {}, "oldest": {"before_history": "oldest"}}.items():
        app = Application(name)
        app.input_stream("lake.sales").join(
            app.table(PRICES), on="item", how="left", select=["price"], as_of="at", **options
        ).send_to(app.output_stream(f"lake.{name}", key="item", partitions=1))
        world.run(app)
        prices = {row["n"]: row["price"] for row in world.rows(name)}
        reported = dict(expected)
        if name == "oldest":
            for n, item, at in sales:
                firsts = [since for one, since in rows if one == item]
                entries = [
                    since
                    for (one, since), price in rows.items()
                    if one == item and price is not None
                ]
                if entries and at is not None and at < min(firsts):
                    reported[n] = rows[item, min(entries)]
        assert {
            n: (sales[n], prices[n], reported[n]) for n in reported if prices[n] != reported[n]
        } == {}
    app = Application("error")
    app.input_stream("lake.sales").join(
        app.table(PRICES),
        on="item",
        how="left",
        select=["price"],
        as_of="at",
        before_history="error",
    ).send_to(app.output_stream("lake.error", key="item", partitions=1))
    with pytest.raises(OperatorFailedError) as caught:
        world.run(app)
    assert (
        caught.value.operator,
        caught.value.stream,
        caught.value.partition,
        caught.value.offset,
    ) == ("join-2-prices", "lake.sales", 0, "1")
    # the edge is 10 hours below the newest moment
    world.send("prices", ("z", 1, hour(16)), deleted=[("z", None, hour(16.25))])
    advance(world)
    compact_dataset(world.lake, "prices", spark=IN_PROCESS, by="test", level="major")
    edge = hour(6.25)
    app = Application("pruned")
    app.input_stream("lake.sales").join(
        app.table(PRICES), on="item", how="left", select=["price"], as_of="at"
    ).send_to(app.output_stream("lake.pruned", key="item", partitions=1))
    world.run(app)
    prices = {row["n"]: row["price"] for row in world.rows("pruned")}
    wrong = {
        n: (s, prices[n], expected[n])
        for n, *s in sales
        if s[1] and s[1] >= edge and prices[n] != expected[n]
    }
    assert wrong == {}
    with open_dataset(world.lake, PRICES) as served:
        spark = world.spark()
        for at in [
            edge,
            hour(7) - MICRO,
            hour(7),
            hour(12),
            hour(12) - MICRO,
            hour(16.25),
            hour(100),
        ]:
            reported = {item: valid(item, at) for item in "abcd"}
            view = served.valid_at(at)
            assert {r["item"]: r["price"] for r in view.frame(spark).collect()} == {
                k: v for k, v in reported.items() if v is not None
            }, at
        with pytest.raises(AdjunctError, match="its history begins at 2026-01-01 06:15:00"):
            served.valid_at(edge - MICRO)
        with pytest.raises(AdjunctError) as caught:
            served.valid_at(dt.datetime(2026, 1, 1, 7))
        assert (caught.value.dataset, caught.value.argument) == ("prices", "moment")
        whole = [tuple(row) for row in served.over_time().frame(spark).collect()]
        reported_whole = [
            ("a", 3, 7, None),
            ("c", 7, 5, None),
            ("d", 4, 12, None),
            ("z", 1, 16, 16.25),
        ]
        assert sorted(whole) == [
            (
                item,
                price,
                naive(begin),
                naive(begin),
                None if end is None else naive(end),
                end is None,
            )
            for item, price, begin, end in reported_whole
        ]
        assert served.history_of("x") == []


def test_versions_over_time_at_the_edges(step_world: StepWorld) -> None:
    world = step_world
    world.stream("planes", "item", 1, item="string", seats="int")
    world.stream("trips", "item", 1, n="int", item="string", day="date")
    planes = bounded_dataset(
        "planes", input="lake.planes", key="item", partitions=1, valid_from="name"
    )
    fleets = {
        "2026-01-05": {"x": 1, "y": 1},
        "2026-01-03": {"x": 3},
        "20260105T000000Z": {"x": 5},
        "2026-01-08": {"x": 5, "y": 8},
    }
    for name, fleet in fleets.items():
        world.send("planes", *fleet.items(), version=name)
        advance(world, planes)
    served_of = {3: {"x": 3}, 5: {"x": 5}, 8: {"x": 5, "y": 8}}

    def valid(item: str, day: int) -> int | None:
        past = [begin for begin in served_of if begin <= day]
        return served_of[max(past)].get(item) if past else None

    trips = [
        (n, item, dt.date(2026, 1, day))
        for n, (item, day) in enumerate((i, d) for i in "xyz" for d in range(1, 11))
    ]
    world.send("trips", *trips, (99, "x", None))
    app = Application("flown")
    app.input_stream("lake.trips").join(
        app.table(planes), on="item", how="left", select=["seats"], as_of="day"
    ).send_to(app.output_stream("lake.flown", key="item", partitions=1))
    counted = world.run(app).counters["join-2-planes"]
    assert (counted["before_history"], counted["null_times"]) == (6, 1)
    seats = {row["n"]: row["seats"] for row in world.rows("flown")}
    assert seats == {n: valid(item, day.day) for n, item, day in trips} | {99: None}
    with open_dataset(world.lake, planes) as served:
        reported = {
            item: [
                (
                    part.valid_from.day,
                    part.valid_to and part.valid_to.day,
                    part.entry and part.entry["seats"],
                )
                for part in served.history_of(item)
            ]
            for item in "xyz"
        }
    assert reported == {"x": [(3, 5, 3), (5, None, 5)], "y": [(8, None, 8)], "z": []}
    displayed = {}
    for command in ("planes x", "planes nobody", "nothing x"):
        result = CliRunner().invoke(
            root, ["dataset", "history", *command.split(), "--lake", world.lake.url]
        )
        assert isinstance(result.exception, DatasetNotFoundError | SystemExit | None), (
            result.exception
        )
        displayed[command] = result.output
    lines = [line for line in displayed["planes x"].splitlines() if "2026" in line]
    assert [line.split()[-2] for line in lines] == ["3", "5"]
    assert displayed["planes nobody"] == "planes has no entry nobody in its retained history\n"


@pytest.mark.long
def test_an_idle_partition_wakes(step_world: StepWorld) -> None:
    world = step_world
    world.stream("hits", "k", 2, k="string", at="timestamp", v="bigint")
    world.stream("probe", "k", 2, k="string")
    world.send("probe", *[(f"k{n}",) for n in range(9)])
    lies = {
        row["__partition"]: row["k"]
        for row in world.streams.read_arrow(world.streams.all_ranges("probe")).to_pylist()
    }
    one, other = lies[0], lies[1]
    app = Application("idle")
    hits = app.input_stream("lake.hits", event_time="at", idle_after=SECOND / 2)
    made = hits.window(
        Tumbling(10 * SECOND), by="k", name="w", aggregates={"n": Count()}, results="updates"
    )
    made.send_to(app.output_stream("lake.made", partitions=2, key="k"))
    made.late_records().send_to(app.output_stream("lake.late", partitions=1))
    counts = []
    for rows in (
        [(one, 5), (one, 45)],
        [(one, 55)],
        [(other, 5), (other, 52), (other, 6), (one, 54)],
        [(one, 90)],
    ):
        world.send("hits", *[(k, second(at), 1) for k, at in rows])
        counts.append(world.run(app).counters["window-2-w"])
        time.sleep(0.7)
    assert [counters["late"] for counters in counts] == [0, 0, 2, 0]
    assert sorted(row["event_time"] for row in world.rows("late")) == [second(5), second(6)]
    final = sorted(
        (row["k"], row["window_start"].second, row["n"])
        for row in world.rows("made")
        if row["final"]
    )
    assert final == sorted([(one, 0, 1), (one, 40, 1), (one, 50, 2), (other, 50, 1)])


# -- windows at their edges


def windows_app(
    name: str, most: int, idle: dt.timedelta | None = None, late: float = 2
) -> Application:
    app = Application(name, max_batch_records=most)
    hits = app.input_stream("lake.hits", event_time="at", delay=SECOND, idle_after=idle)
    kinds: dict[str, Any] = {
        "tumbling": Tumbling(4 * SECOND),
        "sliding": Sliding(4 * SECOND, 3 * SECOND),
        "session": Session(2 * SECOND),
    }
    for kind, window in kinds.items():
        for results in ("final", "updates"):
            made = hits.window(
                window,
                by="k",
                name=f"{kind}-{results}",
                aggregates={"n": Count(), "sum": Sum("v"), "most": Max("v")},
                results=results,
                allowed_lateness=late * SECOND,
            )
            made.send_to(app.output_stream(f"lake.{name}-{kind}-{results}", partitions=1, key="k"))
    return app


@pytest.mark.long
def test_windows_at_the_edges(step_world: StepWorld) -> None:
    world = step_world
    world.stream("hits", "k", 1, k="string", at="timestamp", v="bigint")
    hits = [
        ("a", second(-5), 1),
        ("a", second(-4), 2),
        ("a", second(-4) - MICRO, 4),
        ("a", second(0) - MICRO, 8),
        ("a", second(0), 16),
        ("b", None, 1),
        ("b", second(2), None),
        ("a", second(4), 32),
        ("a", second(2) - MICRO, 3),
        ("a", second(2), 64),
        ("a", second(7), 128),
        ("a", second(0), 5),
        ("a", second(4) - MICRO, 6),
        ("a", second(9), 7),
        ("b", second(9), 8),
        ("b", second(6), 9),
        ("b", second(7), 9),
        ("b", second(11) - MICRO, 9),
        ("a", second(40), 1),
        ("a", second(36), 2),
        ("a", second(37), 2),
        ("a", second(80), 1),
    ]
    for row in hits:
        world.send("hits", row)
    for name, most in {"whole": 1000, "cut": 3}.items():
        world.run(windows_app(name, most))
    reported = oracle(hits, 1, 2)
    for kind in ("tumbling", "sliding", "session"):
        for name in ("whole", "cut"):
            final = sorted(map(displayed, world.rows(f"{name}-{kind}-final")))
            assert final == sorted(reported[kind]), (name, kind)
            ends = sorted(
                displayed(row) for row in world.rows(f"{name}-{kind}-updates") if row["final"]
            )
            assert ends == final, (name, kind)
    app = windows_app("whole", 1000)
    Startpoints(app, lake=world.lake).request("lake.hits", StartpointOldest(), **WHO)
    world.send("hits", ("b", second(100), 5))
    world.run(app, run="back")
    for kind in ("tumbling", "sliding", "session"):
        reported = oracle([*hits, ("b", second(100), 5)], 1, 2)
        assert sorted(map(displayed, world.rows(f"whole-{kind}-final"))) == sorted(reported[kind])


def displayed(row: dict[str, Any]) -> tuple[Any, ...]:
    return (
        row["k"],
        row["window_start"],
        row["window_end"],
        row["n"],
        row["sum"] or 0,
        row["most"] or 0,
    )


def oracle(
    hits: Sequence[tuple[Any, ...]], delay: int, late: int
) -> dict[str, list[tuple[Any, ...]]]:
    """The closed windows of one partition."""
    mark = dt.datetime.min.replace(tzinfo=dt.UTC)
    windows: dict[tuple[str, Any, Any, Any], list[Any]] = {}
    sessions: dict[str, list[tuple[Any, Any]]] = {}
    for k, at, v in hits:
        if at is None:
            continue
        for kind, size, every in (("tumbling", 4, 4), ("sliding", 4, 3)):
            for number in range(-20, 60):
                begin = second(number * every)
                end = begin + size * SECOND
                if begin <= at < end and not (at < mark and end + late * SECOND <= mark):
                    windows.setdefault((kind, k, begin, end), []).append(v)
        if not at < mark - late * SECOND if mark.year > 1 else True:
            sessions.setdefault(k, []).append((at, v))
        mark = max(mark, at - delay * SECOND)
    for k, ones in sessions.items():
        ones.sort(key=lambda one: one[0])
        run = [ones[0]]
        for one in [*ones[1:], None]:
            if one is not None and one[0] - run[-1][0] < 2 * SECOND:
                run.append(one)
                continue
            windows["session", k, run[0][0], run[-1][0] + 2 * SECOND] = [v for _, v in run]
            run = [one] if one else []
    made: dict[str, list[tuple[Any, ...]]] = {"tumbling": [], "sliding": [], "session": []}
    for (kind, k, begin, end), values in windows.items():
        if end + late * SECOND <= mark:
            some = [v for v in values if v is not None]
            made[kind].append((k, begin, end, len(values), sum(some), max(some, default=0)))
    return made


@pytest.mark.long  # the times that windows can not hold: test_window_results.py
@pytest.mark.parametrize(("name", "most"), [("whole", 100), ("cut", 2)])
def test_what_nothing_can_hold_moves_no_watermark(
    step_world: StepWorld, name: str, most: int
) -> None:
    """Of the first record no sliding window begins in the year 1; of the third, windows would
    end in the year 10000.
    """
    world = step_world
    world.stream("hits", "k", 1, k="string", at="timestamp", v="bigint")
    world.stream("others", "k", 1, k="string", at="timestamp", v="bigint")
    first, last = dt.datetime.min.replace(tzinfo=dt.UTC), dt.datetime.max.replace(tzinfo=dt.UTC)
    kept = [("a", second(0), 2), ("a", second(3), 8), ("b", second(4), 16)]

    def app(name: str, most: int) -> Application:
        made = Application(name, max_batch_records=most)
        options: dict[str, Any] = {"default_offset": "oldest", "event_time": "at"}
        hits = made.input_stream("lake.hits", **options)
        sums = {"sum": Sum("v")}
        windows = hits.window(Sliding(10 * SECOND, 7 * SECOND), by="k", name="w", aggregates=sums)
        behind = windows.window(
            Tumbling(dt.timedelta(days=1)), by="k", name="days", aggregates={"sum": Sum("sum")}
        )
        joined = hits.join_stream(
            made.input_stream("lake.others", **options),
            on="k",
            within=5 * SECOND,
            how="full",
            name="j",
            select=["v as w"],
        )
        for what, records in (("windows", windows), ("days", behind), ("joined", joined)):
            records.send_to(made.output_stream(f"lake.{name}-{what}", partitions=1, key="k"))
        return made

    world.send("others", ("a", last, 1), ("z", second(200_000), 1))
    for row in [
        ("a", first, 1),
        kept[0],
        ("a", last - 5 * SECOND, 4),
        *kept[1:],
        ("z", second(200_000), 32),
    ]:
        world.send("hits", row)
    world.run(app(name, most))
    totals = world.state(app(name, most)).totals
    null_times = {
        operator: counts["null_times"]
        for operator, counts in totals.items()
        if "null_times" in counts
    }
    assert null_times == {"window-2-w": 2, "window-3-days": 0, "stream-join-5-j": 2}
    rows = {(row["k"], row["window_start"], row["sum"]) for row in world.rows(f"{name}-windows")}
    assert rows == {("a", second(-7), 2), ("a", second(0), 10), ("b", second(0), 16)}
    rows = {(row["k"], row["window_start"], row["sum"]) for row in world.rows(f"{name}-days")}
    assert rows == {("a", second(0), 12), ("b", second(0), 16)}
    matched = {(row["v"], row["w"]) for row in world.rows(f"{name}-joined") if row["k"] != "z"}
    assert matched == {(1, None), (2, None), (4, None), (8, None), (16, None), (None, 1)}, (
        "what can't be kept comes at once"
    )
