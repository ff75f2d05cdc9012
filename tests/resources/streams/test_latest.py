"""The latest results of each source record, against an oracle that computes them from what every
batch did.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.lake.lineage import WithoutPosition
from dagster_adjunct.resources.streams.lake.manifest import (
    CompactionPolicy,
    Coverage,
    ReadCoverage,
    Retention,
    add_sources,
    find_replaced_since,
    list_superseded,
)
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import (
    POSITION,
    AppendOptions,
    OffsetRange,
    SourceRange,
    Sources,
)
from tests.clocks import Clock
from tests.resources.streams.stream_helpers import SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPANS = list[tuple[int, int, int, int]]
"""Of a batch: source partition, start, end, epoch."""


@dataclass
class World:
    """An output stream, and what batches of readers sent to it: (reader, source, offset) ->
    (epoch, values).
    """

    streams: LakeStreams
    kept: dict[tuple[str, str, int], tuple[int, list[int]]] = field(default_factory=dict)
    sequence: dict[str, int] = field(default_factory=dict)
    values: int = 0

    def batch(self, reader: str, spans: SPANS, copies: list[int]) -> None:
        """Append the results of these ranges: of each source record as many as `copies` says, in
        turn.
        """
        rows: dict[str, list[object]] = {name: [] for name in ("k", "v", "__epoch", *POSITION)}
        for partition, start, end, epoch in spans:
            for offset in range(start, end):
                source, made = f"lake.in.{partition}", []
                for _ in range(copies[(offset + partition) % len(copies)]):
                    self.values += 1
                    made.append(self.values)
                    row = (f"k{self.values % 7}", self.values, epoch, source, offset, epoch, reader)
                    for column, value in zip(rows.values(), row, strict=True):
                        column.append(value)
                if epoch >= self.kept.get((reader, source, offset), (0, []))[0]:
                    self.kept[reader, source, offset] = (epoch, made)
        kinds = [
            pa.string(),
            pa.int64(),
            pa.int32(),
            pa.string(),
            pa.int64(),
            pa.int32(),
            pa.string(),
        ]
        table = pa.table(
            {name: pa.array(v, kind) for (name, v), kind in zip(rows.items(), kinds, strict=True)}
        )
        number = self.sequence[reader] = self.sequence.get(reader, 0) + 1
        ranges = tuple(
            SourceRange(f"lake.in.{p}", start, end, epoch) for p, start, end, epoch in spans
        )
        for duplicate in (False, True):  # and once more, as after a crash
            result = self.streams.append(
                "out",
                table,
                producer=reader,
                sequence=number,
                options=AppendOptions(sources=Sources("lake.in", reader, ranges)),
            )
            assert result.duplicate == duplicate

    def expected(self) -> list[int]:
        return sorted(value for _, values in self.kept.values() for value in values)

    def latest(self, without_position: WithoutPosition = "refuse") -> list[int]:
        table = self.streams.read_arrow(
            self.streams.all_ranges("out"),
            ["v"],
            epochs="latest",
            without_position=without_position,
        )
        assert "__source" not in table.column_names
        return sorted(table["v"].to_pylist())


@pytest.fixture
def world(streams: LakeStreams) -> World:
    streams.create(
        "out", schema=SCHEMA, key=["k"], partitions=2, compaction=CompactionPolicy(min_segments=2)
    )
    return World(streams)


def test_without_a_replay_all_records_are_the_latest(world: World) -> None:
    world.batch("app", [(0, 0, 5, 0), (1, 0, 3, 0)], [1, 2])
    assert world.latest() == world.expected() == list(range(1, 13))


def test_a_replayed_range_replaces_all_results_also_where_it_has_none_now(world: World) -> None:
    world.batch("app", [(0, 0, 10, 0)], [1])
    world.batch("app", [(0, 4, 8, 1)], [0])  # a filter that takes nothing
    assert world.latest() == world.expected() == [1, 2, 3, 4, 9, 10]
    assert len(world.streams.read_arrow(world.streams.all_ranges("out"))) == 10


def test_another_reader_s_results_of_the_same_source_are_its_own(world: World) -> None:
    for reader in ("app", "other", "app@made anew"):
        world.batch(reader, [(0, 0, 4, 0)], [1])
    world.batch("app", [(0, 0, 4, 1)], [1])
    assert world.latest() == world.expected() == [*range(5, 17)]


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))]
)
def test_replays_bounded_and_overlapping_ones_and_compaction_agree_with_the_oracle(
    world: World, clock: Clock, seed: int
) -> None:
    chance = random.Random(seed)
    position, main, opened = {0: 0, 1: 0}, {0: 0, 1: 0}, {0: 0, 1: 0}
    replays: list[list[int]] = []  # partition, next, until, epoch
    for _ in range(25):
        what = chance.random()
        partition = chance.randrange(2)
        if what < 0.15:
            opened[partition] += 1
            start = chance.randrange(position[partition] + 1)
            replays.append([partition, start, start + chance.randrange(1, 12), opened[partition]])
        elif what < 0.3:
            opened[partition] += 1
            main[partition], position[partition] = (
                opened[partition],
                chance.randrange(position[partition] + 1),
            )
        elif what < 0.5 and replays:
            replay = chance.choice(replays)
            end = min(replay[1] + chance.randrange(1, 5), replay[2])
            world.batch(
                "app",
                [(replay[0], replay[1], end, replay[3])],
                [chance.randrange(3) for _ in range(4)],
            )
            replay[1] = end
            if end == replay[2]:
                replays.remove(replay)
        elif what < 0.6:
            clock.forward(hours=3)
            world.streams.maintain("out")
        else:
            ends = {p: position[p] + chance.randrange(5) for p in position}
            spans = [(p, position[p], ends[p], main[p]) for p in position]
            world.batch("app", spans, [chance.randrange(3) for _ in range(4)])
            position = ends
        assert world.latest() == world.expected()


@dataclass
class Reader:
    """An application that makes of each record of a stream one in another, or none."""

    streams: LakeStreams
    source: str
    target: str
    sequence: int = 0
    position: dict[int, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    opened: int = 0

    def run(self, ranges: dict[int, tuple[int, int]], epochs: dict[int, int], least: int) -> None:
        """Send on what ends in a digit of at least `least`, of these ranges, read in these
        epochs.
        """
        ssps = self.streams.partitions(self.source)
        spans = {ssps[p]: OffsetRange(str(start), str(end)) for p, (start, end) in ranges.items()}
        reader = f"{self.target}-app@{self.streams.info(self.source).identity}"
        rows = [row for row in self.streams.read_arrow(spans).to_pylist() if row["v"] % 10 >= least]
        columns: dict[str, pa.Array] = {
            "k": pa.array([row["k"] for row in rows], pa.string()),
            "v": pa.array([row["v"] for row in rows], pa.int64()),
            "__epoch": pa.array(
                [row["__epoch"] + epochs.get(row["__partition"], 0) for row in rows], pa.int32()
            ),
            "__source": pa.array(
                [f"lake.{self.source}.{row['__partition']}" for row in rows], pa.string()
            ),
            "__source_offset": pa.array([row["__offset"] for row in rows], pa.int64()),
            "__source_epoch": pa.array(
                [epochs.get(row["__partition"], 0) for row in rows], pa.int32()
            ),
            "__source_reader": pa.array([reader] * len(rows), pa.string()),
        }
        self.sequence += 1
        read = tuple(
            SourceRange(str(ssps[p]), *span, epochs.get(p, 0)) for p, span in sorted(ranges.items())
        )
        sources = Sources(f"lake.{self.source}", reader, read)
        self.streams.append(
            self.target,
            pa.table(columns),
            producer=f"{self.target}-app",
            sequence=self.sequence,
            options=AppendOptions(sources=sources),
        )

    def catch_up(self, least: int) -> None:
        upcoming = self.streams.upcoming(self.streams.partitions(self.source))
        ends = {ssp.partition: int(end) for ssp, end in upcoming.items()}
        self.run({p: (self.position.get(p, 0), end) for p, end in ends.items()}, self.epochs, least)
        self.position = ends

    def replay(self, chance: random.Random, least: int) -> None:
        """Go back in one partition, for good or for a part, in a new epoch."""
        partition = chance.choice([p for p, end in self.position.items() if end] or [0])
        end = self.position.get(partition, 0)
        start = chance.randrange(end + 1)
        self.opened += 1
        if chance.random() < 0.5:
            self.position[partition], self.epochs[partition] = start, self.opened
        else:
            self.run(
                {partition: (start, chance.randrange(start, end + 1))},
                {partition: self.opened},
                least,
            )


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, 1, 3, 4, 5))]
)
def test_along_a_chain_results_count_that_were_made_last_of_records_that_count(
    streams: LakeStreams, records: Callable[..., pa.Table], seed: int
) -> None:
    chance = random.Random(seed)
    for name in ("in", "middle", "end"):
        streams.create(name, schema=SCHEMA, key=["k"], partitions=2)
    first, second = Reader(streams, "in", "middle"), Reader(streams, "middle", "end")
    hidden = 0
    for step in range(10):
        rows = [
            (f"k{chance.randrange(5)}", 1000 * step + 10 * i + chance.randrange(10))
            for i in range(4)
        ]
        streams.append("in", records(*rows), producer="p", sequence=step)
        for reader in (first, second):
            if chance.random() < 0.5:
                reader.replay(chance, chance.randrange(6))
        first.catch_up(chance.randrange(6))
        second.catch_up(chance.randrange(6))
        counting = streams.read_arrow(streams.all_ranges("middle"), ["v"], epochs="latest")
        places = set(
            zip(counting["__partition"].to_pylist(), counting["__offset"].to_pylist(), strict=True)
        )
        again = list_superseded(streams.state("end").state.read)
        expected = []
        everything = streams.read_arrow(streams.all_ranges("end"), positions=True).to_pylist()
        for row in everything:
            source, offset, epoch = row["__source"], row["__source_offset"], row["__source_epoch"]
            made_later = any(
                s.source == source and s.start <= offset < s.end and s.epoch > epoch for s in again
            )
            if (int(source[-1]), offset) in places and not made_later:
                expected.append(row["v"])
        values = streams.read_arrow(streams.all_ranges("end"), ["v"], epochs="latest")[
            "v"
        ].to_pylist()
        assert sorted(values) == sorted(expected)
        assert len(set(values)) == len(values), "a record of the input counts twice"
        hidden += len(everything) - len(values)
    assert hidden


def test_a_chain_whose_reader_lags_or_whose_middle_lost_records_is_refused(
    streams: LakeStreams, records: Callable[..., pa.Table], clock: Clock
) -> None:
    for name in ("in", "middle", "end"):
        streams.create(name, schema=SCHEMA, key=["k"], partitions=2)
    streams.append("in", records(("a", 1), ("b", 2)), producer="p", sequence=0)
    first, second = Reader(streams, "in", "middle"), Reader(streams, "middle", "end")
    first.catch_up(0)
    second.catch_up(0)

    def latest() -> list[int]:
        return sorted(
            streams.read_arrow(streams.all_ranges("end"), ["v"], epochs="latest")["v"].to_pylist()
        )

    assert latest() == [1, 2]
    first.run({p: (0, end) for p, end in first.position.items()}, {0: 1, 1: 1}, 2)
    with pytest.raises(
        ConfigurationError, match=r"'end-app' has not read all of it yet \(in lake\.middle"
    ):
        latest()
    second.catch_up(0)
    assert latest() == [2]
    streams.configure("middle", retention=Retention(max_age=timedelta(days=1)), compaction=None)
    clock.forward(days=2)
    streams.maintain("middle")
    with pytest.raises(ConfigurationError, match=r"retention has dropped records that are needed"):
        latest()


def test_a_part_that_is_read_hides_what_any_later_append_has_replaced(world: World) -> None:
    world.batch("app", [(0, 0, 10, 0)], [1])
    first = world.streams.all_ranges("out")
    world.batch("app", [(0, 0, 5, 1)], [1])
    part = world.streams.read_arrow(first, ["v"], epochs="latest")
    assert sorted(part["v"].to_pylist()) == [6, 7, 8, 9, 10]


def test_what_replaced_dropped_appends_is_known_after_retention(world: World, clock: Clock) -> None:
    world.streams.configure("out", retention=Retention(max_age=timedelta(days=1)), compaction=None)
    world.batch("app", [(0, 0, 4, 1)], [0])
    clock.forward(days=2)
    # the main position came to what a bounded replay had read ahead
    world.batch("app", [(0, 0, 4, 0)], [1])
    world.streams.maintain("out")
    assert world.latest() == world.expected() == []


def test_records_without_a_position_are_refused_or_kept(world: World) -> None:
    plain = pa.table({"k": ["a", "b"], "v": pa.array([-1, -2], pa.int64())})
    world.streams.append("out", plain, producer="by hand", sequence=1)
    world.batch("app", [(0, 0, 4, 0)], [1])
    world.batch("app", [(0, 0, 2, 1)], [1])
    with pytest.raises(ConfigurationError, match=r"2 records have none.*(?s:.*)\"keep\""):
        world.latest()
    assert world.latest("keep") == [-2, -1, *world.expected()]
    world.streams.maintain("out")  # merged, they are as unknown as before
    assert world.latest("keep") == [-2, -1, *world.expected()]
    with pytest.raises(ConfigurationError, match="needs the source position of every record"):
        world.latest()


def test_words_that_mean_nothing_are_refused(world: World) -> None:
    with pytest.raises(ConfigurationError) as failure:
        world.streams.read_arrow(world.streams.all_ranges("out"), epochs="newest")  # type: ignore[arg-type]
    assert failure.value.argument == "epochs"
    with pytest.raises(ConfigurationError) as failure:
        world.latest("drop")  # type: ignore[arg-type]
    assert failure.value.argument == "without_position"


def test_positions_are_read_where_they_are_asked_for_and_free_where_there_are_none(
    world: World,
) -> None:
    plain = pa.table({"k": ["a"], "v": pa.array([-1], pa.int64())})
    world.streams.append("out", plain, producer="by hand", sequence=1)
    world.batch("app", [(1, 7, 8, 2)], [1])
    records = world.streams.read_arrow(
        world.streams.all_ranges("out"), ["v"], positions=True
    ).sort_by("v")
    assert records.select(["v", *POSITION]).to_pylist() == [
        {
            "v": -1,
            "__source": None,
            "__source_offset": None,
            "__source_epoch": None,
            "__source_reader": None,
        },
        {
            "v": 1,
            "__source": "lake.in.1",
            "__source_offset": 7,
            "__source_epoch": 2,
            "__source_reader": "app",
        },
    ]


def test_long_replays_are_kept_as_few_ranges() -> None:
    read: ReadCoverage = {}
    for batch in range(500):
        read = add_sources(
            read, Sources("lake.in", "app", (SourceRange("lake.in.0", batch, batch + 1, 0),))
        )
    for batch in range(100, 400):
        read = add_sources(
            read, Sources("lake.in", "app", (SourceRange("lake.in.0", batch, batch + 1, 1),))
        )
    assert read == {"app": {"lake.in.0": Coverage(until=500, replayed=((100, 400, 1),))}}


def test_what_was_replaced_since_leaves_out_what_is_new() -> None:
    def after(read: ReadCoverage, *span: int) -> ReadCoverage:
        return add_sources(read, Sources("lake.in", "app", (SourceRange("lake.in.0", *span),)))

    before = after(after({}, 0, 10, 0), 2, 4, 1)
    assert find_replaced_since(before, before) == []
    now = after(after(before, 3, 14, 2), 14, 20, 2)
    assert find_replaced_since(before, now) == [
        ("app", "lake.in.0", 3, 4, 2),
        ("app", "lake.in.0", 4, 10, 2),
    ]
    assert list_superseded(now) == [("app", "lake.in.0", 2, 3, 1), ("app", "lake.in.0", 3, 20, 2)]


@pytest.mark.spark
def test_spark_gives_what_arrow_gives_and_joins_still_need_no_exchange(
    spark: SparkSession, local_lake: Lake
) -> None:
    streams = LakeStreams(local_lake)
    streams.create("out", schema=SCHEMA, key=["k"], partitions=2)
    world = World(streams)
    world.batch("app", [(0, 0, 20, 0), (1, 0, 20, 0)], [1, 2, 0])
    assert sorted(
        row.v for row in streams.read(spark, streams.all_ranges("out"), epochs="latest").collect()
    ) == (world.expected())
    world.batch("app", [(0, 5, 12, 1)], [0, 1])
    world.batch("app", [(0, 8, 30, 2), (1, 0, 3, 1)], [1, 0])
    frame = streams.read(spark, streams.all_ranges("out"), epochs="latest")
    assert sorted(row.v for row in frame.collect()) == world.expected() == world.latest()
    assert frame.columns == streams.read(spark, streams.all_ranges("out")).columns
    counted = frame.groupBy("k").count()
    assert (
        "Exchange hashpartitioning" not in counted._jdf.queryExecution().executedPlan().toString()
    )
    assert sum(row["count"] for row in counted.collect()) == len(world.expected())
