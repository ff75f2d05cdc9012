"""Windows behind joins that wait, and many late changes, against plain Python."""

from __future__ import annotations

from bisect import bisect_right
from datetime import timedelta
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from dagster_adjunct.assets.declaration.policies import Watermark
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.lookups import Wait
from dagster_adjunct.orchestration.operators.windows.aggregates import Count
from dagster_adjunct.orchestration.operators.windows.kinds import Tumbling
from tests.orchestration.test_joins_that_wait import CHANGES, FACTS, MINUTE, START, World, early

pytestmark = pytest.mark.spark


def counts_of_windows(world: World) -> list[tuple[str, int, int]]:
    if "counts" not in world.streams.list_streams():
        return []
    rows = world.streams.read_arrow(world.streams.all_ranges("counts")).to_pylist()
    return sorted((row["k"], (row["window_start"] - START) // MINUTE, row["many"]) for row in rows)


def test_windows_wait_for_the_records_that_wait(tmp_path: Path, spark: SparkSession) -> None:
    world = World(tmp_path, spark, watermark=Watermark(idle_after=30 * MINUTE), wait=20 * MINUTE)
    app = Application("app")
    facts = app.input_stream(
        "lake.facts", default_offset="oldest", event_time="at", idle_after=2 * MINUTE
    )
    joined = facts.join(app.table(world.prices), on="k", as_of="at", select=["v"], wait=world.wait)
    windows = joined.window(Tumbling(5 * MINUTE), by="k", name="w", aggregates={"many": Count()})
    windows.send_to(app.output_stream("lake.counts", partitions=2, key="k"))
    first, second = "a", "b"  # of partitions 0 and 1
    world.clock.forward(minutes=5)
    world.send("prices", (first, 0, 1), (second, 0, 1), (first, 4, 2), (second, 4, 2))
    world.send("facts", (first, 1, 1), (second, 1, 2), (second, 12, 4))
    world.run_app(app)
    world.clock.forward(minutes=3)
    world.send("facts", (first, 4, 3))
    world.clock.forward(minutes=18)
    # That of the second partition has waited long enough, and the other is not idle: it waits.
    report = world.run_app(app)
    assert [str(one.ssp) for one in report.event_time.held] == ["lake.facts.0"]
    assert counts_of_windows(world) == []
    world.clock.forward(minutes=3)
    world.run_app(app)
    assert counts_of_windows(world) == []
    world.send("facts", (first, 33, 5), (second, 33, 6))
    world.send("prices", (first, 40, 1), (second, 40, 1))
    world.clock.forward(minutes=12)
    report = world.run_app(app)
    assert report.counters["window-3-w"]["late"] == 0
    assert counts_of_windows(world) == [(first, 0, 2), (second, 0, 1), (second, 10, 1)]


@pytest.mark.long
def test_a_hundred_thousand_records_meet_changes_that_come_late(
    tmp_path: Path, spark: SparkSession
) -> None:
    draw = Random(7)
    hours, keys = 6, [f"k{number}" for number in range(200)]
    watermark = Watermark(delay=10 * MINUTE, idle_after=30 * MINUTE)
    world = World(tmp_path, spark, watermark=watermark, wait=Wait(120 * MINUTE, mark="early"))
    seconds = 3600 * hours
    changes = []
    for number, second in enumerate(sorted(draw.sample(range(seconds), 20_000))):
        changes.append((second + draw.uniform(0, 600), draw.choice(keys), second, number))
    facts = []
    for number in range(100_000):
        second = draw.randrange(seconds)
        facts.append((float(second), draw.choice(keys), second, number))
    minute = 0
    while minute < hours * 60 + 90:
        step = draw.choice([15, 30, 45])
        for stream, rows, schema in (("prices", changes, CHANGES), ("facts", facts, FACTS)):
            due = sorted(row for row in rows if minute <= row[0] / 60 < minute + step)
            columns = [
                [row[1] for row in due],
                [START + timedelta(seconds=row[2]) for row in due],
                [row[3] for row in due],
            ]
            arrow = schema.to_arrow()
            arrays = [pa.array(of, arrow.field(i).type) for i, of in enumerate(columns)]
            if due:
                world.sequence += 1
                table = pa.table(arrays, schema=arrow)
                world.streams.append(stream, table, producer="test", sequence=world.sequence)
        world.clock.forward(minutes=step)
        minute += step
        report = world.run(max_batch_records=draw.choice([5_000, 40_000]))
        assert early(report) == 0
    assert report.event_time.held == ()
    of_key: dict[str, list[tuple[int, int]]] = {key: [] for key in keys}
    for _, key, second, number in changes:
        of_key[key].append((second, number))
    expected: dict[int, int | None] = {}
    for _, key, second, number in facts:
        before = bisect_right(of_key[key], (second, 10**9))
        expected[number] = of_key[key][before - 1][1] if before else None
    found = world.results()
    wrong = [number for number, value in expected.items() if found.get(number, -1) != value]
    assert (len(found), wrong) == (100_000, [])
