"""The times that tasks read of a lake's records, against those that were written."""

from __future__ import annotations

import pickle

import pyarrow as pa

from dagster_adjunct.orchestration.operators.event_times import MAX_MICROS, MIN_MICROS
from dagster_adjunct.orchestration.step.event_times import TaskTimeReader
from dagster_adjunct.resources.streams.system import OffsetRange
from dagster_adjunct.streams import ARRIVAL
from tests.orchestration.step_world import StepWorld


def test_tasks_read_the_times_of_exactly_the_records_that_are_asked_for(
    step_world: StepWorld,
) -> None:
    step_world.stream("clicks", "k", 2, k="string", ts="timestamp")
    ends = [MIN_MICROS, MIN_MICROS + 1, MAX_MICROS, MAX_MICROS - 1, 0, -1, 2**52, None, 7, 8, 9, 10]
    for number in (1, 2, 3):
        table = pa.table(
            {
                "k": [f"k{place}" for place in range(len(ends))],
                "ts": pa.array(ends, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
            }
        )
        step_world.streams.append("clicks", table, producer="test", sequence=number)
    whole = step_world.streams.all_ranges("clicks")
    asked = {
        ssp: OffsetRange(str(2 + ssp.partition), str(int(span.end) - 3))
        for ssp, span in whole.items()
    }
    rows = step_world.streams.read_arrow(whole, ["k"]).to_pylist()
    for name in ("ts", ARRIVAL):
        reads = step_world.streams.task_reads(asked, [] if name == ARRIVAL else [name])
        times: TaskTimeReader = pickle.loads(pickle.dumps(TaskTimeReader(reads, [0, 1], name)))
        for ssp, span in asked.items():
            rows_read = [
                tuple(row.values()) for part in times.of(ssp.partition) for row in part.to_pylist()
            ]
            offsets = range(int(span.start), int(span.end))
            assert [(number, offset) for number, offset, _ in rows_read] == [
                (ssp.partition, offset) for offset in offsets
            ]
            mine = {row["__offset"]: row for row in rows if row["__partition"] == ssp.partition}
            if name == ARRIVAL:
                arrived = [
                    pa.scalar(mine[offset][ARRIVAL]).cast(pa.int64()).as_py() for offset in offsets
                ]
                assert [time for *_, time in rows_read] == arrived
            else:
                written = [ends[int(mine[offset]["k"][1:])] for offset in offsets]
                assert [time for *_, time in rows_read] == written
