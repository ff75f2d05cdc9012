"""Any sequence of appends, retries, reads and maintenance against plain lists."""

from __future__ import annotations

from datetime import timedelta

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dagster_adjunct.resources.bucketing.hashing import bucket_of_key
from dagster_adjunct.resources.objects.lake import lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.streams.lake import manifest as stream_index
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy, Retention
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from tests.clocks import Clock, on_clock
from tests.resources.streams.stream_helpers import SCHEMA
from tests.rounds import rounds

pytestmark = pytest.mark.rounds
N = 3
KEYS = st.one_of(st.none(), st.text(max_size=5))
ROWS = st.lists(st.tuples(KEYS, st.integers(-5, 5), st.booleans()), max_size=6)
Row = tuple[str | None, int, bool]


class StreamMachine(RuleBasedStateMachine):
    """The model: per partition a list whose index is the offset; an entry is a record or a
    marker's version.
    """

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.streams = LakeStreams(on_clock(lake_in(InMemoryStore()), self.clock))
        self.streams.create(
            "s",
            schema=SCHEMA,
            key=["k"],
            partitions=N,
            retention=Retention(max_age=timedelta(hours=5)),
            compaction=CompactionPolicy(min_segments=3),
        )
        self.log: list[list[Row | str]] = [[] for _ in range(N)]
        self.times: list[list[float]] = [[] for _ in range(N)]
        self.sent: list[tuple[list[Row], str | None]] = []

    def _append(self, sequence: int, rows: list[Row], end: str | None) -> bool:
        table = pa.table(
            {
                "k": pa.array([k for k, _, _ in rows], pa.string()),
                "v": pa.array([v for _, v, _ in rows], pa.int64()),
                "__tombstone": pa.array([t for _, _, t in rows], pa.bool_()),
            }
        )
        result = self.streams.append(
            "s", table, producer="p", sequence=sequence, end_of_dataset=end
        )
        return result.duplicate

    @rule(rows=ROWS, ended=st.booleans())
    def append(self, rows: list[Row], ended: bool) -> None:
        end = f"v{len(self.sent)}" if ended else None
        assert not self._append(len(self.sent), rows, end)
        self.sent.append((rows, end))
        for row in rows:
            self.log[bucket_of_key([row[0]], ["string"], N)].append(row)
        for entries in self.log if end else []:
            entries.append(end or "")
        for entries, times in zip(self.log, self.times, strict=True):
            times.extend([self.clock.now.timestamp()] * (len(entries) - len(times)))

    @rule(back=st.integers(1, 5))
    def retry(self, back: int) -> None:
        if back <= len(self.sent):
            sequence = len(self.sent) - back
            assert self._append(sequence, *self.sent[sequence])

    @rule(minutes=st.integers(1, 120))
    def wait(self, minutes: int) -> None:
        self.clock.forward(minutes=minutes)

    @rule()
    def maintain(self) -> None:
        self.streams.maintain("s", self.clock.now)
        limit = self.clock.now.timestamp() - 5 * 3600
        for ssp, oldest in self.streams.oldest(self.streams.partitions("s")).items():
            times = self.times[ssp.partition]
            # Merged segments leave when their youngest append does: nothing young is lost.
            assert all(time <= limit for time in times[: int(oldest)])

    @rule(data=st.data())
    def read_a_range(self, data: st.DataObject) -> None:
        ranges, expected, records = {}, [], 0
        for ssp, oldest in self.streams.oldest(self.streams.partitions("s")).items():
            entries = self.log[ssp.partition]
            start = data.draw(st.integers(int(oldest), len(entries)))
            end = data.draw(st.integers(start, len(entries)))
            ranges[ssp] = OffsetRange(str(start), str(end))
            entries_there = [
                (ssp.partition, at, entries[at])
                for at in range(start, end)
                if not isinstance(entries[at], str)
            ]
            expected += entries_there
            records += len(entries_there)
        table = self.streams.read_arrow(ranges)
        assert [
            (row["__partition"], row["__offset"], (row["k"], row["v"], row["__tombstone"]))
            for row in table.to_pylist()
        ] == expected
        assert self.streams.records_between(ranges) == records

    @invariant()
    def ends_and_markers_are_those_of_the_model(self) -> None:
        upcoming = self.streams.upcoming(self.streams.partitions("s"))
        assert [int(offset) for offset in upcoming.values()] == [
            len(entries) for entries in self.log
        ]
        oldest = self.streams.oldest(self.streams.partitions("s"))
        markers = {(m.ssp.partition, int(m.offset), m.version) for m in self.streams.markers("s")}
        assert markers == {
            (p, at, entry)
            for p, entries in enumerate(self.log)
            for at, entry in enumerate(entries)
            if isinstance(entry, str) and at >= int(oldest[SystemStreamPartition("lake", "s", p)])
        }


class StreamMachineWithSmallPages(StreamMachine):
    """The same with pages of two entries, so that short runs build a deep index."""

    @initialize()
    def make_pages_small(self) -> None:
        self._fan, stream_index.FAN_OUT = stream_index.FAN_OUT, 2

    def teardown(self) -> None:
        stream_index.FAN_OUT = getattr(self, "_fan", stream_index.FAN_OUT)


TestStreamModel = pytest.mark.lengthy(StreamMachine.TestCase)
TestStreamModelWithSmallPages = pytest.mark.lengthy(StreamMachineWithSmallPages.TestCase)
TestStreamModel.settings = settings(max_examples=rounds(4, 15), stateful_step_count=40)
TestStreamModelWithSmallPages.settings = settings(
    max_examples=rounds(5, 25), stateful_step_count=50
)
