"""Tables that follow a stream of facts (k, at, n), what a dictionary says of them, and the cycle without Spark.

What is replaced of Spark: reading, decoding, dead letters, and the merge of a compaction. What a table has to hold is
worked out from the facts that were sent and the offsets of the version alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.following_changes import DeltaCompaction
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.sources import dead_letters
from dagster_adjunct.assets.sources import order_by_column as ordering
from dagster_adjunct.assets.sources.dead_letters import DEAD_LETTERS
from dagster_adjunct.assets.sources.opened_stream import Source
from dagster_adjunct.assets.unbounded import merge_generations, write_changes
from dagster_adjunct.assets.versions.sealed_version import POSITION
from dagster_adjunct.resources.bucketing.hashing import bucket_of
from dagster_adjunct.resources.errors import BadChangeError, StreamNotFoundError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects import Lake
from dagster_adjunct.resources.objects.faulty_store import Fault, FaultyStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION, TIMESTAMP, TOMBSTONE
from dagster_adjunct.resources.streams.lake.lake_streams import LakeStreams
from tests.assets.conftest import World
from tests.assets.unbounded.following_plain import records_of
from tests.assets.unbounded.tables import without_spark

NAME, DEAD = "facts", "facts-dead"
SCHEMA = Schema.of(k="string", at="bigint", n="int")
PARTITIONS = 2
KEYS = ("a", "b", "c", "d", "e")
BY_HAND = DeltaCompaction(inside_commit=False)
PROBLEM = "__problem"
Fact = tuple[str | None, int, int | None]  # (key, position, value); no value deletes, no key is a bad change
Content = dict[str, int]
Ends = Mapping[int, int]


def facts_in(lake: Lake, spark: Any) -> World:
    """Return a world whose lake has the stream."""
    world = World(lake, spark)
    world.stream(NAME, SCHEMA, ["k"], PARTITIONS)
    return world


def table_of(**options: Any) -> AdjunctDataset:
    """Declare the table; nothing is compacted unless it is asked for."""
    declared = {"compaction": BY_HAND, **({} if options.get("broadcast") else {"partitions": 2}), **options}
    return unbounded_dataset(NAME, input=f"lake.{NAME}", key="k", **declared)


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
    found = {key: entry["n"] for key, entry in view.items()}
    assert {key: entry["n"] for key, entry in view.get_all(KEYS).items()} == found
    return found


def by_spark(world: World, view: VersionReader) -> Content:
    rows = [(row.k, row.n) for row in view.frame(world.spark()).collect()]
    assert len(dict(rows)) == len(rows), "a key stands twice in the frame"
    return dict(rows)


def letters(world: World) -> list[tuple[int, int]]:
    """Return the places of all dead letters, each of which gives a reason."""
    try:
        found = world.streams.read_arrow(world.streams.whole(DEAD), DEAD_LETTERS.names).to_pylist()
    except StreamNotFoundError:
        return []
    assert all(letter["reason"] and (letter["dataset"], letter["stream"]) == (NAME, f"lake.{NAME}") for letter in found)
    return [(letter["partition"], letter["offset"]) for letter in found]


def faulty(world: World, *faults: Fault) -> Lake:
    return Lake(FaultyStore(world.lake.store, faults), world.lake.id)


# -- what a dictionary says


@dataclass
class Log:
    """All facts that were sent, by partition and offset, and what each offset of the table stands for.

    `late` are the moments at which deletions were forgotten: facts from these offsets on do not count up to this
    position.
    """

    by_position: bool = False
    facts: list[list[Fact]] = field(default_factory=lambda: [[] for _ in range(PARTITIONS)])
    late: list[tuple[Ends, int]] = field(default_factory=list)

    def add(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            self.facts[bucket_of([fact[0]], ["string"], PARTITIONS)].append(fact)

    @property
    def ends(self) -> dict[int, int]:
        return {partition: len(facts) for partition, facts in enumerate(self.facts)}

    def is_late(self, partition: int, offset: int) -> bool:
        at = self.facts[partition][offset][1]
        return any(offset >= ends[partition] and at <= horizon for ends, horizon in self.late)

    def table(self, ends: Ends, starts: Ends | None = None) -> Content:
        """Return what a table holds that has read so far."""
        newest = self.newest(ends, starts)
        return {key: value for key, (_, value) in newest.items() if value is not None}

    def newest(self, ends: Ends, starts: Ends | None = None) -> dict[str, tuple[int, int | None]]:
        found: dict[str, tuple[int, int | None]] = {}
        for partition, facts in enumerate(self.facts):
            for offset in range((starts or {}).get(partition, 0), ends[partition]):
                key, at, value = facts[offset]
                position = at if self.by_position else offset
                if key is None or self.is_late(partition, offset):
                    continue
                if key not in found or position >= found[key][0]:
                    found[key] = (position, value)
        return found

    def bad(self, ends: Ends) -> set[tuple[int, int]]:
        """Return the places of the facts up to here that no table can hold."""
        return {
            (partition, offset)
            for partition, facts in enumerate(self.facts)
            for offset in range(ends[partition])
            if facts[offset][0] is None or self.is_late(partition, offset)
        }


def spans_of(view: VersionReader) -> tuple[Ends, Ends]:
    """Return from where to where the version has read its stream, by partition."""
    spans = {int(ssp.rpartition(".")[2]): span for ssp, span in view.sealed.offsets.items()}
    return {p: int(start) for p, (start, _) in spans.items()}, {p: int(end) for p, (_, end) in spans.items()}


def ends_of(offsets: Mapping[str, str]) -> dict[int, int]:
    return {int(ssp.rpartition(".")[2]): int(offset) for ssp, offset in offsets.items()}


# -- the cycle without Spark


def facts_without_spark(patch: pytest.MonkeyPatch) -> None:
    """Replace Spark in advances and compactions until the patch is undone, by offset and by `at`, with dead letters."""
    without_spark(patch)
    patch.setattr(Source, "read_changes", read_changes)
    patch.setattr(write_changes, "refuse_problems", _refuse)
    patch.setattr(ordering, "without_late", _without_late)
    patch.setattr(dead_letters, "split_problems", lambda rows: (_without_problems(rows), _Bad(_with_problems(rows))))
    patch.setattr(dead_letters, "send_dead_letters", _send_dead_letters)
    patch.setattr(merge_generations, "positions_of", _positions_of)
    patch.setattr(merge_generations, "without_forgotten", _without_forgotten)


def read_changes(source: Source, spark: Any, ranges: Any, *, positions_from: int = 0) -> pa.Table:
    """Do in Arrow what Source.read_changes does by Spark, of facts."""
    records, (name,) = records_of(source, ranges), source.spec.key
    problems = pa.array([f"null key column {name!r}" if key is None else None for key in records[name].to_pylist()])
    by_offset = source.spec.following.order_by is None
    position = pc.add(records[OFFSET], positions_from) if by_offset else records["at"].cast(pa.int64())
    return records.append_column(POSITION, position).append_column(PROBLEM, problems.cast(pa.string()))


def _with_problems(changes: pa.Table) -> pa.Table:
    return changes.filter(pc.is_valid(changes[PROBLEM]))


def _without_problems(changes: pa.Table) -> pa.Table:
    return changes.filter(pc.is_null(changes[PROBLEM])).drop_columns([PROBLEM])


def _refuse(changes: pa.Table, dataset: str) -> pa.Table:
    for reason in _with_problems(changes)[PROBLEM].to_pylist():
        raise BadChangeError(f"dataset {dataset!r}: {reason}.", "Nothing was committed.", dataset=dataset)
    return _without_problems(changes)


def _without_late(changes: pa.Table, horizon: int | None, on_bad_change: object) -> tuple[pa.Table, Any]:
    if horizon is None:
        return changes, None
    late = pc.less_equal(changes[POSITION], horizon)
    if on_bad_change == "fail":
        return changes.filter(pc.invert(late)), lambda: sum(late.to_pylist())
    told = pc.coalesce(changes[PROBLEM], pc.if_else(late, "it comes too late", pa.scalar(None, pa.string())))
    return changes.set_column(changes.column_names.index(PROBLEM), PROBLEM, told), None


@dataclass
class _Bad:
    rows: pa.Table

    def isEmpty(self) -> bool:
        return self.rows.num_rows == 0


def _send_dead_letters(
    systems: Mapping[str, Any], spec: AdjunctDataset, bad: _Bad, *, producer: str, sequence: int
) -> int:
    system, stream = systems["lake"], split_stream_name(spec.following.on_bad_change.stream)[1]  # type: ignore[union-attr]
    assert isinstance(system, LakeStreams)
    if stream not in system.list_streams():
        system.create(stream, schema=DEAD_LETTERS, partitions=1)
    rows = bad.rows.sort_by([(PARTITION, "ascending"), (OFFSET, "ascending")])
    columns = {
        "dataset": pa.array([spec.name] * rows.num_rows),
        "stream": pa.array([str(spec.input)] * rows.num_rows),
        "partition": rows[PARTITION].cast(pa.int32()),
        "offset": rows[OFFSET].cast(pa.int64()),
        "reason": rows[PROBLEM],
        "value": pa.array([None] * rows.num_rows, pa.string()),
        "at": rows[TIMESTAMP],
    }
    return int(system.append(stream, pa.table(columns), producer=producer, sequence=sequence).rows)


def _positions_of(rows: pa.Table) -> tuple[int | None, int | None]:
    return pc.min(rows[POSITION]).as_py(), pc.max(rows[POSITION]).as_py()


def _without_forgotten(rows: pa.Table, key: tuple[str, ...], horizon: int | None) -> tuple[pa.Table, Any]:
    places: dict[Any, tuple[int, int, int]] = {}
    for index, row in enumerate(rows.to_pylist()):
        place = (row[POSITION], row["__gen"], index)
        places[row["k"]] = max(place, places.get(row["k"], place))
    winners = rows.take(sorted(index for _, _, index in places.values()))
    deleted = winners[TOMBSTONE].to_pylist()
    places_of = zip(deleted, winners[POSITION].to_pylist(), strict=True)
    gone = [each and horizon is not None and at <= horizon for each, at in places_of]
    counts = {"keys": len(places), "forgotten": sum(gone), "tombstones": sum(deleted) - sum(gone)}
    return winners.filter(pa.array([not each for each in gone], pa.bool_())), lambda: counts
