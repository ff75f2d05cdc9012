"""What stream systems of users return is checked: a lost record or column is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources.errors import StreamReadError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.checked_reads import read_frame, read_table
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import (
    RECORD_META,
    NumberedOffsets,
    OffsetRange,
    StreamCapabilities,
    StreamInfo,
    SystemStreamPartition,
)

Ranges = Mapping[SystemStreamPartition, OffsetRange]
ZERO, ONE = (SystemStreamPartition("memory", "readings", number) for number in range(2))
RANGES = {ZERO: OffsetRange("0", "3"), ONE: OffsetRange("0", "2")}


def _as_it_is(table: pa.Table) -> pa.Table:
    return table


class MemoryStreams(NumberedOffsets):
    """A stream of three records and two, whose reads `spoil` changes."""

    name = "memory"
    default_offset = "oldest"
    capabilities = StreamCapabilities(reads_arrow=True)

    def __init__(self, spoil: Callable[[pa.Table], Any] = _as_it_is) -> None:
        self.spoil = spoil

    def list_streams(self) -> list[str]:
        return ["readings"]

    def info(self, stream: str) -> StreamInfo:
        return StreamInfo(stream, 2, ("sensor",), "unknown", Schema.of(sensor="string"))

    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return dict.fromkeys(ssps, "0")

    def upcoming(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return {ssp: RANGES[ssp].end for ssp in ssps}

    def read(self, spark: Any, ranges: Ranges) -> Any:
        return _Frame(self.spoil(_records(ranges)).column_names)

    def read_arrow(self, ranges: Ranges, columns: Sequence[str] | None = None) -> pa.Table:
        table = self.spoil(_records(ranges))
        if columns is None:
            return table
        return table.select([*columns, *RECORD_META])


class _Frame:
    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns


class Compacted(MemoryStreams):
    """Counts its records only by reading them all, as Kafka does."""

    def records_between(self, ranges: Ranges) -> int:
        raise NotImplementedError


class Counted(Compacted):
    """Knows that a record of each partition was compacted away."""

    capabilities = StreamCapabilities(reads_arrow=True, counts_unread=True)

    def records_between(self, ranges: Ranges) -> int:
        return sum(int(span.end) - int(span.start) - 1 for span in ranges.values())


def _records(ranges: Ranges) -> pa.Table:
    places = []
    for ssp, span in ranges.items():
        places += [(ssp.partition, offset) for offset in range(int(span.start), int(span.end))]
    partitions, offsets = zip(*places, strict=True) if places else ((), ())
    count = len(places)
    return pa.table(
        {
            "sensor": pa.array([f"s{offset}" for offset in offsets], pa.string()),
            "__partition": pa.array(partitions, pa.int32()),
            "__offset": pa.array(offsets, pa.int64()),
            "__timestamp": pa.array([0] * count, pa.timestamp("us", tz="UTC")),
            "__tombstone": pa.array([False] * count, pa.bool_()),
            "__epoch": pa.array([0] * count, pa.int32()),
        }
    )


def _without_the_last(table: pa.Table) -> pa.Table:
    return table.slice(0, table.num_rows - 1)


def _backwards(table: pa.Table) -> pa.Table:
    return table.take(list(range(table.num_rows))[::-1])


def _twice(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table.slice(0, 1), table])


def _of_another_partition(table: pa.Table) -> pa.Table:
    other = pa.array([7], pa.int32())
    return pa.concat_tables([table, table.slice(0, 1).set_column(1, "__partition", other)])


def _without_epochs(table: pa.Table) -> pa.Table:
    return table.set_column(5, "__epoch", pa.nulls(table.num_rows, pa.int32()))


@pytest.mark.parametrize(
    ("spoil", "facts"),
    [
        (_without_the_last, {"partition": 1, "end": "2", "found": "1 records"}),
        (_backwards, {"partition": 1, "column": "__offset"}),
        (_twice, {"partition": 0, "end": "3", "column": "__offset"}),
        (_of_another_partition, {"partition": 7, "found": "1 records of partition 7"}),
        (_without_epochs, {"column": "__epoch", "found": "a null __epoch"}),
        *[
            (lambda table, name=name: table.drop_columns([name]), {"partition": 0, "column": name})
            for name in RECORD_META
        ],
    ],
)
def test_a_read_that_loses_something_is_an_error(spoil: Any, facts: dict[str, Any]) -> None:
    assert read_table(MemoryStreams(), RANGES).num_rows == 5
    with pytest.raises(StreamReadError) as caught:
        read_table(MemoryStreams(spoil), RANGES)
    always = {"system": "memory", "stream": "memory.readings", "start": "0"}
    assert caught.value.facts.items() >= (always | facts).items()
    assert caught.value.expected


def test_a_frame_without_a_system_column_is_an_error_too() -> None:
    spark: Any = None
    assert "__epoch" in read_frame(MemoryStreams(), spark, RANGES).columns
    spoiled = MemoryStreams(lambda table: table.drop_columns(["__epoch"]))
    with pytest.raises(StreamReadError) as caught:
        read_frame(spoiled, spark, RANGES)
    assert caught.value.column == "__epoch"


def test_offsets_may_have_gaps_if_the_system_says_so() -> None:
    assert read_table(Compacted(_without_the_last), RANGES).num_rows == 4
    one = {ONE: RANGES[ONE]}
    assert read_table(Counted(_without_the_last), one).num_rows == 1
    with pytest.raises(StreamReadError) as caught:
        read_table(Counted(lambda table: table.slice(0, 0)), one)
    assert (caught.value.partition, caught.value.found) == (1, "0 records")


@pytest.mark.parametrize(
    ("spoil", "partition"),
    [
        (lambda table: pa.concat_tables([table, table]), 0),
        # the system does not look at the ranges
        (lambda table: _records(RANGES) if table.num_rows else table, 1),
    ],
)
def test_records_too_many_are_errors_of_the_system_that_read_them(
    spoil: Any, partition: int
) -> None:
    places = pa.table({"__partition": pa.array([0], pa.int32()), "__offset": pa.array([1])})
    assert MemoryStreams().read_records("readings", places).num_rows == 1
    with pytest.raises(StreamReadError) as caught:
        MemoryStreams(spoil).read_records("readings", places)
    error = caught.value
    assert (error.system, error.stream, error.partition) == ("memory", "memory.readings", partition)


def test_markers_of_a_lake_stream_are_no_lost_records(tmp_path: Path) -> None:
    streams = LakeStreams(open_lake(str(tmp_path)))
    streams.create("readings", schema=Schema.of(sensor="string"), key=["sensor"], partitions=1)
    rows = pa.table({"sensor": ["roof", "cellar"]})
    streams.append("readings", rows, producer="p", sequence=1, end_of_dataset="v1")
    ranges = streams.all_ranges("readings")
    assert [span.end for span in ranges.values()] == ["3"]
    assert read_table(streams, ranges, ["sensor"]).num_rows == 2


@pytest.mark.parametrize("spoil", [_without_the_last, _without_epochs])
def test_a_batch_of_a_system_that_loses_records_fails(spoil: Any, tmp_path: Path) -> None:
    lake = open_lake(str(tmp_path))
    app = Application("hot", engine="auto")
    app.input_stream("memory.readings").filter("sensor > 's0'").send_to(
        app.output_stream("lake.hot", partitions=1, key="sensor")
    )

    def run(system: MemoryStreams) -> None:
        systems = {"memory": system, "lake": LakeStreams(lake)}
        run_application(app, lake=lake, systems=systems, spark=IN_PROCESS, run="one")

    with pytest.raises(StreamReadError):
        run(MemoryStreams(spoil))
    run(MemoryStreams())
    streams = LakeStreams(lake)
    assert streams.read_arrow(streams.all_ranges("hot")).num_rows == 3
