"""What is told of the latest results when the stream that they were made of was rewritten into
other partitions.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy, Retention
from dagster_adjunct.resources.streams.lake.readers import read_new
from dagster_adjunct.resources.streams.lake.repartition import repartition
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import AppendOptions, SourceRange, Sources
from tests.resources.streams.stream_helpers import SCHEMA

Records = Callable[..., pa.Table]


class Copying:
    """An application that copies stream `in` to `out`, times a factor, and is sent back by hand."""

    def __init__(self, streams: LakeStreams, records: Records) -> None:
        self.streams, self.records, self.sequence = streams, records, 0
        for name in ("in", "out"):
            streams.create(name, schema=SCHEMA, key=["k"], partitions=2)

    def arrive(self, *values: int) -> None:
        self.sequence += 1
        table = self.records(*[(f"k{value}", value) for value in values])
        self.streams.append("in", table, producer="p", sequence=self.sequence)

    def read(self, epoch: int, spans: dict[int, tuple[int, int]], factor: int = 1) -> None:
        """Send on what these offsets of partitions hold."""
        self.sequence += 1
        reader = f"app@{self.streams.info('in').identity}"
        ranges = tuple(
            SourceRange(f"lake.in.{p}", start, end, epoch) for p, (start, end) in spans.items()
        )
        rows = [
            row
            for row in self.streams.read_arrow(self.streams.all_ranges("in")).to_pylist()
            if row["__partition"] in spans and row["__offset"] in range(*spans[row["__partition"]])
        ]
        table = self.records(
            *[(row["k"], row["v"] * factor) for row in rows],
            __epoch=pa.array([epoch] * len(rows), pa.int32()),
            __source=pa.array([f"lake.in.{row['__partition']}" for row in rows], pa.string()),
            __source_offset=pa.array([row["__offset"] for row in rows], pa.int64()),
            __source_epoch=pa.array([epoch] * len(rows), pa.int32()),
            __source_reader=pa.array([reader] * len(rows), pa.string()),
        )
        sources = Sources("lake.in", reader, ranges)
        self.streams.append(
            "out",
            table,
            producer="app",
            sequence=self.sequence,
            options=AppendOptions(sources=sources),
        )

    def ends(self) -> dict[int, tuple[int, int]]:
        return {ssp.partition: (0, int(end)) for ssp, end in self.upcoming().items()}

    def upcoming(self) -> dict[object, str]:
        return self.streams.upcoming(self.streams.partitions("in"))  # type: ignore[return-value]

    def rewrite(self, partitions: int) -> None:
        repartition(self.streams, "in", partitions, reason="a test", by="ada", check=lambda _: None)

    def latest(self) -> list[int]:
        table = self.streams.read_arrow(self.streams.all_ranges("out"), ["v"], epochs="latest")
        return sorted(table["v"].to_pylist())


@pytest.fixture
def copying(streams: LakeStreams, records: Records) -> Copying:
    return Copying(streams, records)


def test_what_is_read_again_after_a_rewriting_replaces_what_was_made_before_it(
    copying: Copying,
) -> None:
    copying.arrive(*range(1, 20))
    copying.read(0, copying.ends())
    for partitions in (5, 3):
        copying.rewrite(partitions)
    assert copying.latest() == list(range(1, 20)), "rewriting changes nothing"
    before = copying.ends()
    copying.arrive(20, 21)
    copying.read(0, {p: (before[p][1], end) for p, (_, end) in copying.ends().items()})
    assert copying.latest() == list(range(1, 22)), "nor does what is new"
    copying.read(1, {p: span for p, span in before.items() if p != 1}, factor=100)
    with pytest.raises(
        ConfigurationError, match=r"lake\.in was repartitioned after 'app' .*--oldest"
    ):
        copying.latest()
    copying.read(1, {1: before[1]}, factor=100)
    assert copying.latest() == [20, 21, *range(100, 2000, 100)]


def test_results_of_records_that_retention_took_before_the_rewriting_stay(
    copying: Copying, streams: LakeStreams, records: Records
) -> None:
    copying.arrive(*range(1, 10))
    copying.arrive(*range(10, 20))
    copying.read(0, copying.ends())
    _, state = streams.state("in")
    size = sum(file.size for file in state.index.tail[-1].files)
    streams.configure("in", retention=Retention(max_bytes=size), compaction=CompactionPolicy())
    streams.maintain("in")
    kept = sorted(streams.read_arrow(streams.all_ranges("in"))["v"].to_pylist())
    assert kept == list(range(10, 20))
    copying.rewrite(5)
    copying.read(1, {p: (1, end) for p, (_, end) in copying.ends().items()}, factor=100)
    assert copying.latest() == [*range(1, 10), *range(1000, 2000, 100)]


def test_a_named_reader_is_reported_that_what_was_rewritten_was_read_again(
    copying: Copying, lake: Lake
) -> None:
    copying.arrive(*range(1, 20))
    copying.read(0, copying.ends())
    read_new(lake, "out", reader="report").commit()
    copying.rewrite(3)
    before = copying.ends()
    copying.arrive(20)
    copying.read(0, {p: (before[p][1], end) for p, (_, end) in copying.ends().items()})
    batch = read_new(lake, "out", reader="report")
    assert batch.replaced == ()
    batch.commit()
    copying.read(1, copying.ends(), factor=100)
    for _ in range(2):  # as long as some of it is to come
        batch = read_new(lake, "out", reader="report", max_records=12)
        assert {(span.source, span.start, span.end) for span in batch.replaced} == {
            (f"lake.in.{p}", 0, end) for p, (_, end) in copying.ends().items() if end
        }
        batch.commit()
    batch = read_new(lake, "out", reader="report")
    assert (batch.replaced, batch.records) == ((), 0)


def test_a_named_reader_that_catches_up_in_batches_learns_what_was_replaced(
    copying: Copying, lake: Lake
) -> None:
    copying.arrive(*range(1, 20))
    copying.read(0, copying.ends())
    first = read_new(lake, "out", reader="report", max_records=5)
    assert first.replaced == ()
    first.commit()
    copying.read(1, copying.ends(), factor=100)
    assert len(read_new(lake, "out", reader="report", max_records=5).replaced) == 2
