"""Tables that follow a stream of facts (k, at, n), and what a dictionary says of them.

What a table has to hold is worked out from the facts that were sent and the offsets of the version
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.extractors import PythonExtractor
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.dead_letters import DEAD_LETTERS
from dagster_adjunct.resources.bucketing.hashing import bucket_of_key
from dagster_adjunct.resources.errors import StreamNotFoundError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.conftest import World
from tests.faulty_store import Fault, FaultyStore

NAME, DEAD = "facts", "facts-dead"
SCHEMA = Schema.of(k="string", at="bigint", n="int")
PARTITIONS = 2
KEYS = ("a", "b", "c", "d", "e")
BY_HAND = DeltaCompaction(inside_commit=False)
PROBLEM = "__problem"
# (key, position, value); no value deletes, no key is a bad change
Fact = tuple[str | None, int, int | None]
Content = dict[str, int]
# A declaration that is corrected: n counts ten times as much.
TENFOLD = PythonExtractor(
    "tests.assets.unbounded.facts:tenfold", "k STRING, at BIGINT, n INT", unchanged=("k", "at")
)
Ends = Mapping[int, int]


def facts_in(lake: Lake, spark: Any) -> World:
    """Return a world whose lake has the stream."""
    world = World(lake, spark)
    world.stream(NAME, SCHEMA, ["k"], PARTITIONS)
    return world


def table_of(**options: Any) -> AdjunctDataset:
    """Declare the table; nothing is compacted unless it is asked for."""
    declared = {
        "compaction": BY_HAND,
        **({} if options.get("broadcast") else {"partitions": 2}),
        **options,
    }
    return unbounded_dataset(NAME, input=f"lake.{NAME}", key="k", **declared)


def tenfold() -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """Return an extractor's function by which n counts ten times as much."""
    return lambda fact: [{**fact, "n": None if fact["n"] is None else 10 * fact["n"]}]


def send(world: World, facts: Sequence[Fact]) -> None:
    keys, at, values = zip(*facts, strict=True)
    columns = {
        "k": pa.array(keys, pa.string()),
        "at": pa.array(at, pa.int64()),
        "n": pa.array(values, pa.int32()),
        "__tombstone": pa.array([value is None for value in values]),
    }
    world.streams.append(NAME, pa.table(columns), producer="test", sequence=world._next(NAME))


def content(view: VersionReader | Any) -> Content:
    """Return what a view holds, read in order and by key."""
    values = {key: entry["n"] for key, entry in view.items()}
    assert {key: entry["n"] for key, entry in view.get_all(KEYS).items()} == values
    return values


def by_spark(world: World, view: VersionReader) -> Content:
    rows = [(row.k, row.n) for row in view.frame(world.spark()).collect()]
    assert len(dict(rows)) == len(rows), "a key stands twice in the frame"
    return dict(rows)


def letters(world: World) -> list[tuple[int, int]]:
    """Return the places of all dead letters, each of which gives a reason."""
    try:
        dead = world.streams.read_arrow(
            world.streams.all_ranges(DEAD), DEAD_LETTERS.names
        ).to_pylist()
    except StreamNotFoundError:
        return []
    assert all(
        letter["reason"] and (letter["dataset"], letter["stream"]) == (NAME, f"lake.{NAME}")
        for letter in dead
    )
    return [(letter["partition"], letter["offset"]) for letter in dead]


def faulty(world: World, *faults: Fault) -> Lake:
    return Lake(FaultyStore(world.lake.store, faults), world.lake.id)


# -- what a dictionary says


@dataclass
class Log:
    """All facts that were sent, by partition and offset, and what each offset of the table stands
    for.

    `late` are the moments at which deletions were forgotten: facts from these offsets on do not
    count up to this position. Values from `limit` on break a rule of the table.
    """

    by_position: bool = False
    limit: int | None = None
    facts: list[list[Fact]] = field(default_factory=lambda: [[] for _ in range(PARTITIONS)])
    late: list[tuple[Ends, int]] = field(default_factory=list)

    def add(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            self.facts[bucket_of_key([fact[0]], ["string"], PARTITIONS)].append(fact)

    @property
    def ends(self) -> dict[int, int]:
        return {partition: len(facts) for partition, facts in enumerate(self.facts)}

    def is_late(self, partition: int, offset: int) -> bool:
        at = self.facts[partition][offset][1]
        return any(offset >= ends[partition] and at <= horizon for ends, horizon in self.late)

    def is_bad(self, partition: int, offset: int) -> bool:
        """Whether no table can hold this fact."""
        key, _, value = self.facts[partition][offset]
        breaks = self.limit is not None and value is not None and value >= self.limit
        return key is None or breaks or self.is_late(partition, offset)

    def table(self, ends: Ends, starts: Ends | None = None) -> Content:
        """Return what a table holds that has read so far."""
        newest = self.newest(ends, starts)
        return {key: value for key, (_, value) in newest.items() if value is not None}

    def newest(self, ends: Ends, starts: Ends | None = None) -> dict[str, tuple[int, int | None]]:
        by_key: dict[str, tuple[int, int | None]] = {}
        for partition, facts in enumerate(self.facts):
            for offset in range((starts or {}).get(partition, 0), ends[partition]):
                key, at, value = facts[offset]
                position = at if self.by_position else offset
                if key is None or self.is_bad(partition, offset):
                    continue
                if key not in by_key or position >= by_key[key][0]:
                    by_key[key] = (position, value)
        return by_key

    def bad(self, ends: Ends) -> set[tuple[int, int]]:
        """Return the places of the facts up to here that no table can hold."""
        return {
            (partition, offset)
            for partition, facts in enumerate(self.facts)
            for offset in range(ends[partition])
            if self.is_bad(partition, offset)
        }


def spans_of(view: VersionReader) -> tuple[Ends, Ends]:
    """Return from where to where the version has read its stream, by partition."""
    spans = {int(ssp.rpartition(".")[2]): span for ssp, span in view.sealed.offsets.items()}
    return {p: int(start) for p, (start, _) in spans.items()}, {
        p: int(end) for p, (_, end) in spans.items()
    }


def ends_of(offsets: Mapping[str, str]) -> dict[int, int]:
    return {int(ssp.rpartition(".")[2]): int(offset) for ssp, offset in offsets.items()}
