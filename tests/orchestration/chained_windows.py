"""An application of session windows with a window behind them, for runs that die; and what plain
Python makes of it.
"""

from __future__ import annotations

import datetime as dt
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.windows import Count, Session, Sum, Tumbling
from tests.orchestration.step_world import StepWorld
from tests.orchestration.window_oracle import Click, at, expected, random_clicks, watermark

DELAY, LATE, SPAN = 5.0, 3.0, 30.0
SESSION = Session(dt.timedelta(seconds=6))


def chained(records: int = 10_000) -> Application:
    """Return sessions of each key, and how many of them, with how many clicks, end within half a
    minute.
    """
    app = Application("chained", max_batch_records=records)
    clicks = app.input_stream(
        "lake.clicks", default_offset="oldest", event_time="time", delay=dt.timedelta(seconds=DELAY)
    )
    late = dt.timedelta(seconds=LATE)
    sessions = clicks.window(
        SESSION,
        by="key",
        name="sessions",
        aggregates={"clicks": Count(), "total": Sum("number")},
        allowed_lateness=late,
    )
    sessions.send_to(app.output_stream("lake.sessions", partitions=2, key="key"))
    spans = sessions.window(
        Tumbling(dt.timedelta(seconds=SPAN)),
        by="key",
        name="spans",
        aggregates={"sessions": Count(), "clicks": Sum("clicks")},
        allowed_lateness=late,
    )
    spans.send_to(app.output_stream("lake.spans", partitions=2, key="key"))
    return app


def create(world: StepWorld) -> None:
    world.stream("clicks", "key", 2, key="string", time="timestamp", number="int")


def clicks_of(seed: int, count: int) -> list[Click]:
    return [click for click in random_clicks(seed, 4, count, 1)[0] if click.key is not None]


def send(world: StepWorld, clicks: Sequence[Click]) -> None:
    world.send("clicks", *[(click.key, at(click.time), click.number) for click in clicks])


def check(world: StepWorld, least: int) -> None:
    """Compare sessions and what is behind them with plain Python over the whole input; at least
    so many spans.
    """
    sent: list[list[Click]] = [[], []]
    for row in world.streams.read_arrow(world.streams.all_ranges("clicks")).to_pylist():
        seconds = (
            None
            if row["time"] is None
            else (row["time"].replace(tzinfo=None) - at(0)).total_seconds()
        )
        sent[row["__partition"]].append(Click(row["key"], seconds, row["number"], None, None, None))
    mark = min(watermark(own, DELAY) or 0 for own in sent)
    sessions, behind = [], defaultdict[tuple[str, float], list[int]](list)
    for (key, start), (end, own) in expected(sent, SESSION, DELAY, LATE).windows.items():
        if end + LATE <= mark:
            numbers = [click.number for click in own if click.number is not None]
            sessions.append((key, at(start), at(end), len(own), sum(numbers) if numbers else None))
            # A session is of its last microsecond: one that ends with a span is in it.
            behind[key, (math.ceil(end / SPAN) - 1) * SPAN].append(len(own))
    spans = [
        (key, at(start), at(start + SPAN), len(clicks), sum(clicks))
        for (key, start), clicks in behind.items()
        if start + SPAN + LATE <= mark - LATE
    ]
    assert displayed(world, "sessions", "clicks", "total") == sorted(sessions, key=str)
    assert displayed(world, "spans", "sessions", "clicks") == sorted(spans, key=str)
    assert len(spans) >= least


def displayed(world: StepWorld, stream: str, *names: str) -> list[tuple[Any, ...]]:
    rows = []
    for row in world.rows(stream):
        times = (row[name].replace(tzinfo=None) for name in ("window_start", "window_end"))
        rows.append((row["key"], *times, *(row[name] for name in names)))
    return sorted(rows, key=str)


def main(folder: str) -> None:
    """Run the application in a session of this process's own."""
    from dagster_adjunct.resources.spark.session import new_session

    world = StepWorld(
        open_lake(Path(folder) / "lake"), Path(folder), lambda: new_session({}, master="local[2]")
    )
    world.run(chained(60), run="killed")


if __name__ == "__main__":
    main(*sys.argv[1:])
