"""Watermarks without Spark: which records are behind, and how far sources and operators have
come, in plain values.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState
from dagster_adjunct.orchestration.batch_log.event_times import PartitionTimes, TimeState
from dagster_adjunct.orchestration.batch_log.intent import Intent, LeftRecords
from dagster_adjunct.orchestration.operators.operator import required_retention, watermark_inputs
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.orchestration.step.event_times import NEVER, PriorTimes, find_late_in_memory
from dagster_adjunct.orchestration.step.progress import (
    Measured,
    compute_operator_watermark,
    find_holding_partitions,
    measure_input_times,
    times_after_batch,
    times_at_batch_start,
)
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from dagster_adjunct.resources.times import to_microseconds
from dagster_adjunct.windows import Count, Session, Tumbling
from tests.orchestration.seen_times import Seen, at, watermarks_in_order

SECOND = timedelta(seconds=1)


def ssp(number: int, stream: str = "clicks") -> SystemStreamPartition:
    return SystemStreamPartition("lake", stream, number)


def application(**options: Any) -> Application:
    app = Application("watching")
    clicks = app.input_stream("lake.clicks", event_time="ts", **options)
    clicks.apply(Seen("seen")).send_to(app.output_stream("lake.seen", partitions=1))
    return app


def intent(number: int, clock: datetime, *partitions: SystemStreamPartition) -> Intent:
    ranges = {one: OffsetRange(start="0", end="0") for one in partitions}
    return Intent(batch=number, run="r", clock=clock, ranges=ranges)


def stood(times: TimeState) -> dict[int, PriorTimes]:
    def micros(moment: datetime | None) -> int:
        return NEVER if moment is None else to_microseconds(moment)

    return {
        one.partition: PriorTimes(micros(partition_times.newest), micros(partition_times.watermark))
        for one, partition_times in times.partitions.items()
    }


Record = tuple[int, float | None]  # its offset, and its time in seconds


@st.composite
def streams(draw: st.DrawFn) -> list[list[Record]]:
    """Partitions of records, whose offsets have gaps and whose times are out of order, or null."""
    partitions = []
    for _ in range(draw(st.integers(1, 3))):
        offset, records = 0, list[Record]()
        for gap, time in draw(
            st.lists(st.tuples(st.integers(1, 3), st.none() | st.integers(0, 60)), max_size=12)
        ):
            offset += gap
            records.append((offset, time))
        partitions.append(records)
    return partitions


@pytest.mark.lengthy
@given(
    streams(),
    st.integers(0, 20),
    st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), max_size=5),
)
@settings(max_examples=100)
def test_any_split_into_batches_finds_the_same_late_records_and_watermarks(
    partitions: list[list[Record]], delay: int, cuts: list[list[int]]
) -> None:
    app = application(delay=delay * SECOND)
    everything = [ssp(number) for number in range(len(partitions))]
    state = ApplicationState()
    behind: dict[tuple[int, int], datetime] = {}
    read = [0] * len(partitions)
    for batch, takes in enumerate([*cuts, [100, 100, 100]], 1):
        times = times_at_batch_start(app, state, intent(batch, at(batch), *everything))
        rows = []
        for number, records in enumerate(partitions):
            rows += [
                (number, *record) for record in records[read[number] : read[number] + takes[number]]
            ]
            read[number] += takes[number]
        shuffled = random.Random(batch).sample(rows, len(rows))
        table = pa.table(
            {
                "__partition": pa.array([row[0] for row in shuffled], pa.int32()),
                "__offset": pa.array([row[1] for row in shuffled], pa.int64()),
                "time": pa.array(
                    [None if row[2] is None else to_microseconds(at(row[2])) for row in shuffled],
                    pa.int64(),
                ),
            }
        )
        looked = find_late_in_memory(table, stood(times), delay * 1_000_000)
        for row in looked.behind.to_pylist() if looked.behind is not None else ():
            behind[row["__partition"], row["__offset"]] = row["__behind"]
        moved = times_after_batch(app, times, {"lake.clicks": looked}, at(batch))
        assert moved == times_after_batch(app, times, {"lake.clicks": looked}, at(batch))
        state = state.model_copy(update={"times": moved})

    expected: dict[tuple[int, int], datetime] = {}
    ends: list[datetime | None] = []
    for number, records in enumerate(partitions):
        marks, end = watermarks_in_order([time for _, time in records], delay)
        ends.append(None if end is None else at(end))
        expected |= {
            (number, offset): at(mark)
            for (offset, _), mark in zip(records, marks, strict=True)
            if mark is not None
        }
    assert behind == expected
    assert [state.times.partitions[one].watermark for one in everything] == ends
    last = [records[-1][0] + 1 if records else 0 for records in partitions]
    assert [state.times.partitions[one].read_to for one in everything] == last
    known = [end for end in ends if end is not None]
    assert state.times.operators == ({"seen": min(known)} if len(known) == len(ends) else {})


def partition(active: float, watermark: float | None = None) -> PartitionTimes:
    mark = None if watermark is None else at(watermark)
    return PartitionTimes(active_at=at(active), newest=mark, watermark=mark)


def state_of(
    times: Mapping[int, PartitionTimes], operators: Mapping[str, datetime] | None = None
) -> TimeState:
    return TimeState(
        partitions={ssp(number): partition_times for number, partition_times in times.items()},
        operators=dict(operators or {}),
    )


def test_a_partition_without_records_holds_back_until_idle_and_nothing_goes_back() -> None:
    times = state_of({0: partition(10, 100), 1: partition(0)})
    patient, hasty = application(), application(idle_after=30 * SECOND)
    assert compute_operator_watermark(patient, times, "seen", at(10_000)) is None
    assert compute_operator_watermark(hasty, times, "seen", at(29)) is None
    assert compute_operator_watermark(hasty, times, "seen", at(30)) == at(100)
    # All idle: it stays. The one that was idle has a record again, which is older.
    left = state_of({0: partition(10, 100), 1: partition(0)}, {"seen": at(100)})
    assert compute_operator_watermark(hasty, left, "seen", at(10_000)) == at(100)
    woken = state_of({0: partition(10, 100), 1: partition(50, 70)}, {"seen": at(100)})
    assert compute_operator_watermark(hasty, woken, "seen", at(51)) == at(100)


def test_a_partition_whose_records_wait_for_a_later_batch_is_not_idle() -> None:
    app = application(idle_after=30 * SECOND)
    state = ApplicationState(times=state_of({0: partition(10, 100), 1: partition(10, 40)}))
    late = intent(2, at(1_000), ssp(0), ssp(1))
    read = times_after_batch(app, times_at_batch_start(app, state, late), {}, at(1_000))
    assert read.operators == {}  # both are idle
    late = late.model_copy(update={"left": LeftRecords(waiting=(ssp(1),))})
    waits = times_at_batch_start(app, state, late)
    assert waits.partitions[ssp(1)] == partition(1_000, 40)
    assert compute_operator_watermark(app, waits, "seen", at(1_000)) == at(40)
    assert times_at_batch_start(app, state, late) == waits


def test_what_operators_hold_back_adds_up_along_the_longest_way() -> None:
    app = Application("deep")
    clicks = app.input_stream("lake.clicks", event_time="ts")
    slow = clicks.apply(Seen("first", 5 * SECOND)).apply(Seen("second", 2 * SECOND))
    slow.apply(Seen("third"), clicks.apply(Seen("beside", SECOND)))
    spans = {name: span["lake.clicks"] for name, span in watermark_inputs(app.operators).items()}
    assert spans == {
        "first": 0 * SECOND,
        "second": 5 * SECOND,
        "beside": 0 * SECOND,
        "third": 7 * SECOND,
    }
    times = state_of({0: partition(0, 100)})
    assert compute_operator_watermark(app, times, "third", at(0)) == at(93)


def test_how_long_records_are_needed_adds_up_along_the_longest_way() -> None:
    app = Application("deep")
    clicks, other = (
        app.input_stream(f"lake.{name}", event_time="ts") for name in ("clicks", "other")
    )
    late, made = {"allowed_lateness": 3 * SECOND}, {"n": Count()}
    days = clicks.window(Tumbling(10 * SECOND), by="k", name="w", aggregates=made).window(
        Session(5 * SECOND), by="k", name="behind", aggregates=made, **late
    )
    days.join_stream(other, on="k", within=(SECOND, 2 * SECOND), name="j")
    clicks.window(Tumbling(12 * SECOND), by="k", name="beside", aggregates=made, **late)
    joined = 3 * SECOND + timedelta(microseconds=1)
    assert required_retention(app.operators) == {
        "lake.clicks": 15 * SECOND + joined,
        "lake.other": joined,
    }


def test_a_recreated_stream_starts_afresh_and_a_repartitioned_one_from_the_slowest() -> None:
    times = TimeState(
        partitions={
            ssp(0): PartitionTimes(active_at=at(5), newest=at(50), watermark=at(40), read_to=9),
            ssp(1): PartitionTimes(active_at=at(6), newest=at(70), watermark=at(60), read_to=7),
            ssp(0, "orders"): partition(1, 1),
        },
        operators={"seen": at(40)},
    )
    assert times.without_stream("lake.clicks").partitions.keys() == {ssp(0, "orders")}
    carried = times.carry_over("lake.clicks", {ssp(number): str(4 + number) for number in range(3)})
    assert carried.operators == times.operators
    assert carried.partitions.keys() == {*(ssp(number) for number in range(3)), ssp(0, "orders")}
    assert carried.partitions[ssp(2)] == PartitionTimes(
        active_at=at(6), newest=at(50), watermark=at(40), read_to=6
    )


def test_the_input_that_lags_is_reported_with_the_partition_that_holds_it_back() -> None:
    app = application(idle_after=60 * SECOND, max_watermark_lag=30 * SECOND)
    times = state_of({0: partition(90, 80), 1: partition(90, 60), 2: partition(0, 5)})
    (reported,) = measure_input_times(app, times, at(100))
    assert (reported.watermark, reported.held_by, reported.idle) == (
        at(60),
        "lake.clicks.1",
        ("lake.clicks.2",),
    )
    assert (reported.lag, reported.behind_newest, reported.exceeds) == (
        40 * SECOND,
        20 * SECOND,
        True,
    )
    assert reported.to_json()["lag"] == 40.0
    assert "held back by lake.clicks.1" in reported.describe()
    assert find_holding_partitions(app, times, at(100)) == {"seen": ssp(1)}
    (empty,) = measure_input_times(app, state_of({0: partition(90, 80), 1: partition(90)}), at(100))
    assert (empty.watermark, empty.held_by, empty.exceeds) == (None, "lake.clicks.1", True)


def test_a_plan_says_what_the_time_of_state_follows_from() -> None:
    facts = StreamFacts("lake.clicks", 2, ("k",), SPARK, Schema.of(k="string", ts="timestamp"))
    app = application(delay=10 * SECOND, idle_after=60 * SECOND)
    assert build_plan(app, {"lake.clicks": facts}).notes[-1:] == (
        (
            "seen-2 keeps state under the name seen (no table), each row until its watermark has"
            " passed it: the lowest of all partitions of lake.clicks (by ts, 0:00:10 late at most,"
            " idle after 0:01:00)."
        ),
    )


def test_a_state_that_was_stored_without_times_is_read() -> None:
    old = ApplicationState.model_validate({"batch": 3})
    assert old.times == TimeState()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), max_size=8))
def test_what_was_passed_over_is_what_no_batch_has_read(reads: list[tuple[int, int]]) -> None:
    times, read = PartitionTimes(active_at=at(0)), set[int]()
    for start, length in reads:
        skipped = times.skipped_after(start, start + length)
        read |= {*range(start, start + length)}
        times = times.model_copy(update={"skipped": skipped, "read_to": max(read) + 1})
        assert {n for low, high in skipped for n in range(low, high)} == {*range(max(read))} - read
        assert all(low < high for low, high in skipped)


def test_offsets_without_records_count_as_read_with_those_before_them() -> None:
    app, one = application(), ssp(0)
    times = times_at_batch_start(app, ApplicationState(), intent(1, at(1), one))
    # from offset 50 on, and with the end of a transaction behind each nine records
    for number in range(5, 200):
        seen = Measured({0: number * 1_000_000}, {0: 10 * number + 9})
        times = times_after_batch(
            app, times, {"lake.clicks": seen}, at(number), {one: (10 * number, 10 * number + 10)}
        )
    assert times.partitions[one].skipped == ((0, 50),)
