"""Event times and watermarks of inputs, batch after batch, against plain Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.functions import unix_micros

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.event_times import MAX_MICROS, MIN_MICROS, EventTime
from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
from dagster_adjunct.orchestration.startpoints.store import open_startpoints
from dagster_adjunct.orchestration.step import event_times as records_behind
from dagster_adjunct.orchestration.step.event_times import extract_times
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources.bucketing.hashing import bucket_of_key
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointSpecific
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.streams import ARRIVAL
from dagster_adjunct.testing import TestStream, assert_plannable
from tests.clocks import on_clock
from tests.faulty_store import Crash
from tests.orchestration.seen_times import Seen, at, watermarks_in_order
from tests.orchestration.step_world import StepWorld

MINUTE = timedelta(minutes=1)


def application(records: int = 100_000, **options: object) -> Application:
    app = Application("watching", max_batch_records=records)
    clicks = app.input_stream("lake.clicks", default_offset="oldest", event_time="ts", **options)  # type: ignore[arg-type]
    clicks.apply(Seen("seen")).send_to(app.output_stream("lake.seen", partitions=1))
    return app


def test_records_are_late_by_those_before_them_however_batches_are_cut(
    step_world: StepWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this process for few records, by Spark for each of them, and by Spark in blocks."""
    step_world.stream("clicks", "k", 2, k="string", n="int", ts="timestamp")
    drawn = random.Random(5)
    rows = [
        (
            f"k{drawn.randrange(20)}",
            n,
            None if drawn.random() < 0.05 else at(n + drawn.choice([0, 0, 0, -5, -40, 30])),
        )
        for n in range(180)
    ]
    app = application(70, delay=timedelta(seconds=10))
    for begin, few, looked_at in (
        (0, 5_000, records_behind.DRIVER_LIMIT),
        (60, 0, records_behind.DRIVER_LIMIT),
        (120, 0, 0),
    ):
        app.few_records = few
        monkeypatch.setattr(records_behind, "DRIVER_LIMIT", looked_at)
        monkeypatch.setattr(records_behind, "BLOCK_LENGTH", 8)
        step_world.send("clicks", *rows[begin : begin + 60])
        step_world.run(app)

    seen = step_world.rows("seen")
    assert len(seen) == len(rows)
    times = {n: ts for _, n, ts in rows}
    last: list[datetime] = []
    for number in (0, 1):
        mine = sorted((row["n"], row) for row in seen if row["p"] == number)
        in_seconds = [
            None if (ts := times[n]) is None else (ts - at(0)).total_seconds() for n, _ in mine
        ]
        behind, end = watermarks_in_order(in_seconds, 10)
        assert [row["at"] for _, row in mine] == [times[n] for n, _ in mine]
        assert [row["behind"] for _, row in mine] == [
            None if mark is None else at(mark) for mark in behind
        ]
        assert sum(mark is not None for mark in behind) > 3
        assert end is not None
        last.append(at(end))
    assert step_world.state(app).times.operators == {"seen": min(last)}


def test_times_by_arrow_are_those_that_spark_makes_of_them(step_world: StepWorld) -> None:
    step_world.stream("clicks", "k", 3, k="string", ts="timestamp")
    ends = [MIN_MICROS, MAX_MICROS, 0, -1, -13_000_000_000_000_001, None]
    table = pa.table(
        {
            "k": [f"k{number}" for number in range(len(ends))],
            "ts": pa.array(ends, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
        }
    )
    step_world.streams.append("clicks", table, producer="test", sequence=1)
    step_world.streams.append("clicks", table, producer="test", sequence=2)
    ranges = step_world.streams.all_ranges("clicks")
    records = step_world.streams.read(step_world.spark(), ranges)
    time = EventTime("ts")
    assert time.column_name(dict(records.dtypes)) == "ts"
    made = records.withColumn("time", unix_micros(time.column("input clicks", records)))
    rows = made.select("__partition", "__offset", "k", "time").collect()
    times = extract_times(step_world.streams.read_arrow(ranges, ["ts"]), "ts").to_pylist()
    assert sorted(tuple(row.values()) for row in times) == sorted(
        (row[0], row[1], row["time"]) for row in rows
    )
    kept = {f"k{number}": end for number, end in enumerate(ends)}
    assert all(row["time"] == kept[row["k"]] for row in rows)
    assert {row["k"] for row in rows} == set(kept)


def test_what_is_no_time_and_what_could_not_be_late_is_refused(step_world: StepWorld) -> None:
    step_world.stream("clicks", "k", 1, k="string", ts="string")
    app = application()
    with pytest.raises(
        PlanningError, match="event_time='ts' is string: expected timestamp or date"
    ):
        step_world.run(app)
    for wrong, argument in (
        ({"event_time": "ts", "delay": -MINUTE}, "delay"),
        ({"event_time": "ts", "idle_after": timedelta(0)}, "idle_after"),
        ({"delay": MINUTE}, "delay"),
        ({"event_time": " "}, "event_time"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            Application("wrong").input_stream("lake.clicks", **wrong)  # type: ignore[arg-type]
        assert (caught.value.stream, caught.value.argument) == ("lake.clicks", argument)


@pytest.mark.parametrize(
    "looking",
    [
        "max(at) over (partition by k)",
        "lead(at) over (order by at)",
        "(select max(at) from x)",
        "max(at)",
        "current_timestamp()",
        "timestamp_millis(cast(rand() * 1000 as bigint))",
        "greatest(at, timestamp'now')",
    ],
)
def test_a_time_that_not_the_record_alone_reports_is_refused_where_it_is_planned(
    looking: str,
) -> None:
    clicks = TestStream(Schema.of(k="string", at="timestamp"), key="k", partitions=1)
    app = Application("app")
    app.input_stream("lake.clicks", event_time=looking).send_to(
        app.output_stream("lake.out", partitions=1)
    )
    with pytest.raises(PlanningError) as failure:
        assert_plannable(app, {"lake.clicks": clicks})
    assert failure.value.operator == "input-1"


def as_it_is(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"k": record["k"]}


class DearToRead(LakeStreams):
    """Streams of which some columns cost as much as all."""

    capabilities = replace(LakeStreams.capabilities, reads_in_tasks=False)


class DearWorld(StepWorld):
    """The same lake, whose streams are dear to read."""

    @property
    def streams(self) -> LakeStreams:
        return DearToRead(self.lake)


def test_arrival_time_is_kept_after_a_function_and_where_reading_twice_is_costly(
    step_world: StepWorld,
) -> None:
    step_world = DearWorld(step_world.lake, step_world.folder, step_world.spark)
    step_world.stream("clicks", "k", 1, k="string")
    step_world.send("clicks", ("a",), ("b",))
    app = Application("arriving")
    clicks = app.input_stream("lake.clicks", default_offset="oldest", event_time=ARRIVAL)
    clicks.flat_map(as_it_is, schema=Schema.of(k="string")).apply(Seen("seen")).send_to(
        app.output_stream("lake.seen", partitions=1)
    )
    step_world.run(app)
    arrivals = step_world.streams.read_arrow(step_world.streams.all_ranges("clicks"))[
        "__timestamp"
    ].to_pylist()
    assert [row["at"] for row in step_world.rows("seen")] == arrivals
    assert step_world.state(app).times.operators == {"seen": max(arrivals)}


def ask(world: StepWorld, app: Application, until: str | None = None) -> None:
    clicks = SystemStreamPartition("lake", "clicks", 0)
    made = StartpointOldest(creation_timestamp_ms=round(world.lake.now().timestamp() * 1000))
    end = (
        None
        if until is None
        else StartpointSpecific(until, creation_timestamp_ms=made.creation_timestamp_ms)
    )
    request = StartpointRequest(
        ssp=clicks, startpoint=made, by="ann", reason="again", until=end, id=made.id
    )
    open_startpoints(world.lake, app).write_startpoints([request])


def test_records_that_are_read_again_say_so_and_move_no_time(step_world: StepWorld) -> None:
    step_world.stream("clicks", "k", 1, k="string", n="int", ts="timestamp")
    step_world.send("clicks", ("a", 0, at(10)), ("a", 1, at(0)), ("a", 2, at(90)), ("a", 3, at(20)))
    app = application(delay=timedelta(seconds=5))
    step_world.run(app)
    first, times = step_world.rows("seen"), step_world.state(app).times
    assert [row["behind"] for row in first] == [None, at(5), None, at(85)]
    assert [row["again"] for row in first] == [False] * 4
    assert times.operators == {"seen": at(85)}

    ask(step_world, app, until="2")
    step_world.run(app)
    assert [(row["n"], row["again"]) for row in step_world.rows("seen")[4:]] == [
        (0, True),
        (1, True),
    ]
    assert step_world.state(app).times == times

    ask(step_world, app)
    step_world.send("clicks", ("a", 4, at(80)), ("a", 5, at(86)))

    def die(event: StepEvent) -> None:
        if event.what == "outputs":
            raise Crash("before the commit")

    with pytest.raises(Crash):
        step_world.run(app, on_event=die)
    assert step_world.state(app).times == times
    written = step_world.rows("seen")
    step_world.run(app, run="run-2")
    rows = step_world.rows("seen")
    assert rows == written
    assert [(row["n"], row["again"]) for row in rows[6:]] == [(n, n < 4) for n in range(6)]
    assert [row["behind"] for row in rows[6:] if not row["again"]] == [at(85), None]
    assert [row["before"] for row in rows[6:]] == [at(85)] * 6
    last = step_world.state(app).times.partitions[SystemStreamPartition("lake", "clicks", 0)]
    assert (last.newest, last.watermark, last.read_to) == (at(90), at(85), 6)


def test_records_that_were_passed_over_are_no_records_that_were_read_before(
    step_world: StepWorld,
) -> None:
    step_world.stream("clicks", "k", 1, k="string", n="int", ts="timestamp")
    step_world.send("clicks", *[("a", n, at(n)) for n in range(10)])
    app = application(delay=timedelta(days=1))
    clicks = SystemStreamPartition("lake", "clicks", 0)
    for starts, ended in (("7", 10), ("3", 10), (None, 12)):
        made = StartpointOldest() if starts is None else StartpointSpecific(starts)
        open_startpoints(step_world.lake, app).write_startpoints(
            [StartpointRequest(ssp=clicks, startpoint=made, by="ann", reason="again", id=made.id)]
        )
        if starts is None:
            step_world.send("clicks", ("a", 10, at(10)), ("a", 11, at(11)))
        step_world.run(app)
        times = step_world.state(app).times.partitions[clicks]
        assert times.read_to == ended
        assert times.skipped == {"7": ((0, 7),), "3": ((0, 3),)}.get(str(starts), ())
    seen = [(row["n"], row["again"]) for row in step_world.rows("seen")]
    assert seen[:3] == [(n, False) for n in (7, 8, 9)]
    assert seen[3:10] == [(n, n > 6) for n in range(3, 10)]
    assert seen[10:] == [(n, 3 <= n < 10) for n in range(12)]
    assert not any(row["behind"] for row in step_world.rows("seen"))


@pytest.mark.usefixtures("either_engine")
def test_a_partition_that_was_idle_finds_closed_what_was_closed_without_it(
    step_world: StepWorld,
) -> None:
    now = [at(0)]
    world = replace(step_world, lake=on_clock(step_world.lake, lambda: now[0]))
    world.stream("clicks", "k", 2, k="string", n="int", ts="timestamp")
    keys = [f"k{number}" for number in range(8)]
    where = {key: bucket_of_key((key,), ("string",), 2) for key in keys}
    busy, idle = (next(key for key in keys if where[key] == number) for number in (0, 1))
    app = application(idle_after=timedelta(seconds=60))
    for clock, row in (
        (0, (busy, 0, at(100))),
        (59, (busy, 1, at(200))),
        (60, (busy, 2, at(300))),
        (61, (idle, 3, at(50))),
    ):
        now[0] = at(clock)
        world.send("clicks", row)
        world.run(app)
    rows = sorted(world.rows("seen"), key=lambda row: row["n"])
    assert [(row["before"], row["after"]) for row in rows] == [
        (None, None), (None, None), (None, at(300)), (at(300), at(300)),
    ]  # fmt: skip
    assert [row["behind"] for row in rows] == [None, None, None, at(300)]
    assert world.state(app).times.operators == {"seen": at(300)}


@pytest.mark.usefixtures("either_engine")
def test_a_partition_with_a_backlog_is_waited_for_after_a_pause(step_world: StepWorld) -> None:
    now = [at(0)]
    world = replace(step_world, lake=on_clock(step_world.lake, lambda: now[0]))
    world.stream("clicks", "k", 2, k="string", n="int", ts="timestamp")
    keys = [f"k{number}" for number in range(8)]
    where = {key: bucket_of_key((key,), ("string",), 2) for key in keys}
    busy, quiet = (next(key for key in keys if where[key] == number) for number in (0, 1))
    app = application(4, idle_after=timedelta(seconds=60))
    world.send("clicks", (busy, 0, at(10)), (quiet, 1, at(10)))
    world.run(app)
    now[0] = at(1_000)
    world.send(
        "clicks",
        *((busy, 10 + number, at(100 + number)) for number in range(8)),
        (quiet, 2, at(50)),
    )
    world.run(app)
    rows = sorted(world.rows("seen"), key=lambda row: row["n"])
    assert [row["before"] for row in rows if row["n"] in (2, 10, 17)] == [at(10), at(10), at(50)]
    assert [row["behind"] for row in rows] == [None] * 11
