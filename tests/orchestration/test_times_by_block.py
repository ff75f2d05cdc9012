"""What tasks find in the times that they read, put together, against one walk over each
partition.
"""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.orchestration.step.event_times import (
    BLOCK_COLUMNS,
    NEVER,
    PriorTimes,
    TimeBlockMapper,
    merge_blocks,
)
from dagster_adjunct.resources.times import to_microseconds

Record = tuple[int, int, int | None]  # partition, offset, time
LENGTH = 4


def walked(
    records: list[Record], newest: int, floor: int, delay: int
) -> dict[tuple[int, int], int]:
    """Return the watermark that each record of a partition is below, of those that are."""
    behind = {}
    for partition, offset, time in records:
        mark = max(newest - delay, floor)
        if time is not None:
            if time < mark:
                behind[partition, offset] = mark
            newest = max(newest, time)
    return behind


def batch(records: list[Record]) -> pa.RecordBatch:
    kinds = (pa.int32(), pa.int64(), pa.int64())
    columns = [
        pa.array([record[place] for record in records], kind) for place, kind in enumerate(kinds)
    ]
    return pa.record_batch(columns, names=["p", "o", "t"])


def reported(tasks: list[list[list[Record]]], stood: dict[int, PriorTimes], delay: int) -> pa.Table:
    look = TimeBlockMapper(stood, delay, LENGTH)
    schema = pa.schema(
        [(name, pa.int32() if name == "partition" else pa.int64()) for name in BLOCK_COLUMNS]
    )
    parts = [part for task in tasks for part in look(iter([batch(records) for records in task]))]
    return pa.Table.from_batches(parts, schema)


@st.composite
def partitions(draw: st.DrawFn) -> list[list[Record]]:
    made = []
    for number in range(draw(st.integers(0, 3))):
        offset, records = draw(st.integers(0, 9)), list[Record]()
        for gap, time in draw(
            st.lists(st.tuples(st.integers(1, 3), st.none() | st.integers(0, 40)), max_size=30)
        ):
            offset += gap
            records.append((number, offset, time))
        made.append(records)
    return made


@pytest.mark.lengthy
@given(
    partitions(),
    st.integers(0, 10),
    st.lists(
        st.tuples(st.none() | st.integers(0, 20), st.none() | st.integers(0, 20)),
        min_size=3,
        max_size=3,
    ),
    st.randoms(use_true_random=False),
    st.sampled_from(("in order", "files", "all over")),
)
@settings(max_examples=150)
def test_whoever_reads_which_records_in_whatever_order_the_same_are_behind(
    made: list[list[Record]],
    delay: int,
    before: list[tuple[int | None, int | None]],
    drawn: random.Random,
    lying: str,
) -> None:
    floors = [
        (NEVER if new is None else new, NEVER if mark is None else mark) for new, mark in before
    ]
    stood = {number: PriorTimes(*times) for number, times in enumerate(floors)}
    expected = {}
    for number, records in enumerate(made):
        expected |= walked(records, *floors[number], delay)
    tasks: list[list[list[Record]]]
    if lying == "in order":
        cuts = [drawn.randint(1, 9) for _ in made]
        tasks = [
            [rows[at : at + cut] for at in range(0, len(rows), cut)]
            for rows, cut in zip(made, cuts, strict=True)
        ]
    else:
        records = [record for rows in made for record in rows]
        if lying == "all over":
            drawn.shuffle(records)
        parts = [records[at : at + 5] for at in range(0, len(records), 5)]
        drawn.shuffle(parts)
        tasks = [parts[::2], parts[1::2]]

    merged = merge_blocks(reported(tasks, stood, delay), stood, delay, LENGTH)
    behind = {
        (row["__partition"], row["__offset"]): to_microseconds(row["__behind"])
        for row in merged.behind.to_pylist()
    }
    again = merged.unsure.to_pylist()
    for row in again:
        number, begin = row["__partition"], row["block"]
        inside = [record for record in made[number] if begin <= record[1] < begin + LENGTH]
        assert not any(
            begin <= offset < begin + LENGTH for partition, offset in behind if partition == number
        )
        behind |= walked(inside, row["begun"], row["floor"], delay)
    assert behind == expected
    if lying == "in order":
        assert not again, "a task that has read a whole partition in its order is sure of it"
    newest = {
        number: time
        for number, rows in enumerate(made)
        if rows
        and (time := max([floors[number][0], *(at for *_, at in rows if at is not None)])) > NEVER
    }
    assert merged.measured.newest == newest
    assert merged.measured.read_to == {
        number: rows[-1][1] + 1 for number, rows in enumerate(made) if rows
    }
