"""Windows in applications: across batches, runs and crashes, they are what plain Python says of
the whole input.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.operators.windows.kinds import Kind, Session, Sliding, Tumbling
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.streams import ARRIVAL
from dagster_adjunct.windows import Aggregate, Count, Distinct, Max, Mean, Min, Sum
from tests.orchestration.step_world import StepWorld
from tests.orchestration.window_oracle import (
    Click,
    Expected,
    at,
    expected,
    random_clicks,
    watermark,
)

pytestmark = pytest.mark.spark

DELAY, LATE = 5.0, 3.0
KINDS: Mapping[str, Kind] = {
    "tumbling": Tumbling(dt.timedelta(seconds=10)),
    "sliding": Sliding(dt.timedelta(seconds=10), dt.timedelta(seconds=4)),
    "session": Session(dt.timedelta(seconds=6)),
}


def texts(records: pa.Table) -> str:
    return "".join(text or "-" for text in records.column("text").to_pylist())


AGGREGATES = {
    "clicks": Count(),
    "total": Sum("number"),
    "most": Max("number"),
    "mean": Mean("number"),
    "different": Distinct("text"),
    "texts": Aggregate(texts, "string", "text"),
}


def values_of(clicks: Sequence[Click]) -> tuple[Any, ...]:
    numbers = [click.number for click in clicks if click.number is not None]
    return (
        len(clicks),
        sum(numbers) if numbers else None,
        max(numbers) if numbers else None,
        sum(numbers) / len(numbers) if numbers else None,
        len({click.text for click in clicks if click.text is not None}),
        "".join(click.text or "-" for click in clicks),
    )


def clicks_app(results: Mapping[str, str], without: Sequence[str] = ()) -> Application:
    """Return windows of these kinds with their results; those that are named in `without` call
    no function.
    """
    app = Application("clicks", max_batch_records=10_000)
    clicks = app.input_stream("lake.clicks", event_time="time", delay=dt.timedelta(seconds=DELAY))
    for name, given in results.items():
        made = {
            column: aggregate
            for column, aggregate in AGGREGATES.items()
            if name not in without or column != "texts"
        }
        windows = clicks.window(
            KINDS[name],
            by="key",
            name=name,
            aggregates=made,
            results=given,  # type: ignore[arg-type]
            allowed_lateness=dt.timedelta(seconds=LATE),
        )
        windows.send_to(app.output_stream(f"lake.{name}", partitions=2, key="key"))
        windows.late_records().send_to(app.output_stream(f"lake.{name}-late", partitions=1))
    return app


def as_sent(world: StepWorld) -> list[list[Click]]:
    """Return the records of each partition of the stream, as they were sent."""
    rows = world.streams.read_arrow(world.streams.all_ranges("clicks")).to_pylist()
    made: list[list[Click]] = [[], []]
    for row in rows:
        seconds = (
            None
            if row["time"] is None
            else (row["time"].replace(tzinfo=None) - at(0)).total_seconds()
        )
        made[row["__partition"]].append(
            Click(row["key"], seconds, row["number"], None, row["text"], None)
        )
    return made


def send(world: StepWorld, clicks: Sequence[Click]) -> None:
    rows = [(click.key, at(click.time), click.number, click.text) for click in clicks]
    world.send("clicks", *rows)


def whole(reported: Expected, limit: float) -> list[tuple[Any, ...]]:
    """Return the windows that end at the limit or before it, as they have to be."""
    return [
        (key, at(start), at(end), *values_of(own))
        for (key, start), (end, own) in reported.windows.items()
        if end <= limit
    ]


def displayed(row: Mapping[str, Any]) -> tuple[Any, ...]:
    times = (row[name].replace(tzinfo=None) for name in ("window_start", "window_end"))
    return (row["key"], *times, *(row[column] for column in AGGREGATES if column in row))


def as_long(rows: Sequence[tuple[Any, ...]], of: Sequence[tuple[Any, ...]]) -> list[str]:
    return sorted(str(row[: len(of[0])]) for row in rows)


class Killed(Exception):
    """The run dies."""


def killed(event: StepEvent) -> None:
    if event.what == "outputs":
        raise Killed


ALL = {"tumbling": "final", "sliding": "updates", "session": "final"}


# across runs that die: test_killed_windows.py; all results of one kind: test_window_results.py
@pytest.mark.long
@pytest.mark.parametrize(
    ("results", "without"),
    [
        ({"tumbling": "final"}, ()),
        ({"tumbling": "final", "session": "updates"}, ("session",)),
        (ALL, ()),
        (dict.fromkeys(KINDS, "updates"), ()),
    ],
)
def test_windows_are_whole_across_runs_and_come_out_once(
    step_world: StepWorld, results: Mapping[str, str], without: Sequence[str]
) -> None:
    step_world.stream(
        "clicks", "key", 2, key="string", time="timestamp", number="int", text="string"
    )
    clicks = [click for click in random_clicks(3, 30, 180, 1)[0] if click.key is not None]
    app = clicks_app(results, without)
    size = 60
    for begin in range(0, len(clicks), size):
        send(step_world, clicks[begin : begin + size])
        if (
            begin == size
            # killed when state is committed, and the batch is not: what it does again has to be the
            # same
        ):
            with pytest.raises(Killed):
                step_world.run(app, on_event=killed)
        step_world.run(app)
    sent = as_sent(step_world)
    mark = min(watermark(own, DELAY) or 0 for own in sent)
    for name, given in results.items():
        reported = expected(sent, KINDS[name], DELAY, LATE)
        rows = [row for row in step_world.rows(name) if row["window_end"] is not None]
        closed = whole(reported, mark - LATE)
        final_rows = [displayed(row) for row in rows if given == "final" or row["final"]]
        assert len(closed) > 20
        assert as_long(final_rows, final_rows) == as_long(closed, final_rows), name
        late = sorted((row["why"], row["record"]) for row in step_world.rows(f"{name}-late"))
        assert [why for why, _ in late] == sorted(why for _, why in reported.late)
        if given == "updates":
            assert as_long(latest(step_world, name), final_rows) == as_long(
                whole(reported, float("inf")), final_rows
            )


def latest(world: StepWorld, stream: str) -> list[tuple[Any, ...]]:
    """Return what a table of the updates holds: the last one of each key and begin, unless it is
    a tombstone.
    """
    table: dict[Any, Any] = {}
    for row in world.streams.read_arrow(world.streams.all_ranges(stream)).to_pylist():
        table[row["key"], row["window_start"]] = None if row["__tombstone"] else displayed(row)
    return [row for row in table.values() if row is not None]


@pytest.mark.parametrize("kind", ["tumbling", pytest.param("session", marks=pytest.mark.long)])
def test_a_stream_of_one_partition_has_windows_with_functions(
    step_world: StepWorld, kind: str
) -> None:
    step_world.stream(
        "clicks", "key", 1, key="string", time="timestamp", number="int", text="string"
    )
    app = Application("one")
    clicks = app.input_stream("lake.clicks", default_offset="oldest", event_time="time")
    windows = clicks.window(KINDS[kind], by="key", name="w", aggregates=AGGREGATES)
    windows.send_to(app.output_stream("lake.windows", partitions=1, key="key"))
    send(step_world, [Click("a", 1.0, 1, None, "x", None), Click("b", 2.0, 2, None, "y", None)])
    step_world.run(app)
    reported = CliRunner().invoke(
        root, ["checkpoint", "show", "one", "--lake", step_world.lake.url, "--json"]
    )
    (state,) = [
        facts for name, facts in json.loads(reported.output)["state"].items() if name == "one-w"
    ]
    assert state["rows"] == 2
    assert state["bytes"] > 0
    assert str(dt.timedelta(seconds=10 if kind == "tumbling" else 6)) in state["kept_for"], (
        "the bound that is declared"
    )
    displayed = CliRunner().invoke(
        root, ["checkpoint", "show", "one", "--lake", step_world.lake.url, "--wide"]
    )
    assert state["kept_for"] in displayed.output
    send(step_world, [Click("a", 3.0, 3, None, "z", None), Click("c", 90.0, 4, None, "-", None)])
    step_world.run(app)
    assert sorted(
        (row["key"], row["total"], row["texts"]) for row in step_world.rows("windows")
    ) == [("a", 4, "xz"), ("b", 2, "y")]


def begins(records: pa.Table) -> str:
    """Return the seconds at which the windows begin that a window behind them takes for records."""
    return " ".join(f"{begin:%S}" for begin in records.column("window_start").to_pylist())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sliding", "session"])
def test_windows_behind_others_take_the_begins_of_these_and_not_their_own(
    step_world: StepWorld, kind: str
) -> None:
    step_world.stream(
        "clicks", "key", 2, key="string", time="timestamp", number="int", text="string"
    )
    app = Application("behind")
    clicks = app.input_stream("lake.clicks", default_offset="oldest", event_time="time")
    seconds = clicks.window(
        Tumbling(dt.timedelta(seconds=2)), by="key", name="two", aggregates={"n": Count()}
    )
    made = {
        "begins": Aggregate(begins, "string"),
        "first": Min("window_start"),
        "last": Max("window_start"),
    }
    seconds.window(KINDS[kind], by="key", name="w", aggregates=made).send_to(
        app.output_stream("lake.windows", partitions=2, key="key")
    )
    for times in ((10.5, 13.0), (14.5, 90.0)):
        send(
            step_world,
            [Click(key, time, 1, None, "x", None) for time in times for key in "abcdefg"],
        )
        step_world.run(app)
    rows = {
        (row["window_start"].second, row["begins"], row["first"].second, row["last"].second)
        for row in step_world.rows("windows")
    }
    sliding = {(4, "10 12", 10, 12), (8, "10 12 14", 10, 14), (12, "12 14", 12, 14)}
    assert rows == (sliding if kind == "sliding" else {(11, "10 12 14", 10, 14)})


def test_windows_by_arrival_move_nothing_that_the_plan_does_not_list(step_world: StepWorld) -> None:
    """ADJUNCT_STRICT_PLANS is set here: before a batch, Spark has to find the input's buckets
    without a record, too.
    """
    step_world.stream(
        "clicks", "key", 2, key="string", time="timestamp", number="int", text="string"
    )
    app = Application("arrived")
    clicks = app.input_stream("lake.clicks", default_offset="oldest", event_time=ARRIVAL)
    hours = clicks.window(
        Tumbling(dt.timedelta(hours=1)),
        by="key",
        name="w",
        aggregates={"n": Count()},
        results="updates",
    )
    hours.send_to(app.output_stream("lake.windows", partitions=2, key="key"))
    send(step_world, [Click(key, 1.0, 1, None, "x", None) for key in "abc"])
    step_world.run(app)
    assert sorted(row["key"] for row in step_world.rows("windows")) == ["a", "b", "c"]
