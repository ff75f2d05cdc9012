"""Records are found by key with indexes, old, damaged or none, as plain Python finds them."""

from __future__ import annotations

import errno
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from dagster_adjunct.errors import ConfigurationError, SchemaMismatchError, StreamExistsError
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake import key_index
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy, Retention
from dagster_adjunct.resources.streams.lake.repartition import repartition
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, OffsetRange
from tests.clocks import Clock, on_clock
from tests.faulty_store import Crash, Fault, FaultyStore, deaths
from tests.rounds import rounds

FLIGHTS = Schema.of(id="bigint", plane="string", place={"code": "string", "gate": "int"})
MERGING = CompactionPolicy(min_segments=2, target_bytes=20_000)


@pytest.fixture(autouse=True)
def _small_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have indexes of few records, with many row groups that are written and read in parts."""
    monkeypatch.setattr(key_index, "FEWEST_RECORDS", 5)
    monkeypatch.setattr(key_index, "_MOST_PER_GROUP", 4)
    monkeypatch.setattr(key_index, "_BYTES_SORTED", 500)
    monkeypatch.setattr(key_index, "_GROUPS_READ", 3)


def indexes(streams: LakeStreams) -> list[str]:
    keys = [item.key for item in streams.lake.store.list("streams/s/data/")]
    return [key for key in keys if "/_keys-" in key]


def opened(streams: LakeStreams, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the names of the objects that are read."""
    store = streams.lake.store
    read: list[str] = []
    get = store.get

    def noted(key: str) -> Any:
        read.append(key.rpartition("/")[2])
        return get(key)

    monkeypatch.setattr(store, "get", noted)
    return read


class Story:
    """A stream that changes in drawn ways, and what plain Python knows about its records."""

    def __init__(self, lake: Lake, seed: int) -> None:
        self.draw = Random(seed)
        self.clock = Clock()
        self.streams = LakeStreams(on_clock(lake, self.clock))
        self.streams.create("s", schema=FLIGHTS, key=["id"], partitions=3)
        self.names = {"plane": "plane", "code": "place.code", "gate": "place.gate"}
        self.names["id"] = "id"
        self.kinds = {
            "id": pa.int64(),
            "plane": pa.string(),
            "code": pa.string(),
            "gate": pa.int32(),
        }
        self.rows: dict[int, dict[str, Any]] = {}
        self.appends = 0

    def append(self) -> None:
        schema = self.streams.info("s").schema
        assert schema is not None
        drawn = []
        for _ in range(self.draw.randrange(1, 40)):
            values = {
                "plane": self.draw.choice([f"N{n}" for n in range(9)] + [None]),
                "code": self.draw.choice([*"abc", None]),
                "gate": self.draw.choice([*range(-2, 4), None]),
            }
            if self.draw.random() < 0.1:
                values |= {"code": None, "gate": None}
            number = len(self.rows)
            self.rows[number] = values | {"id": number}
            inner = [self.names[name].rpartition(".")[2] for name in ("code", "gate")]
            place = dict(zip(inner, (values["code"], values["gate"]), strict=True))
            has_place = place != dict.fromkeys(inner) or self.draw.random() < 0.5
            row = dict.fromkeys(schema.names)
            row |= {"id": number, self.names["plane"]: values["plane"]}
            row[self.names["code"].partition(".")[0]] = place if has_place else None
            drawn.append(row)
        table = pa.Table.from_pylist(drawn, schema.to_arrow())
        dead = [self.draw.random() < 0.2 for _ in drawn]
        table = table.append_column("__tombstone", pa.array(dead))
        end = f"v{self.appends}" if self.draw.random() < 0.3 else None
        self.streams.append("s", table, producer="p", sequence=self.appends, end_of_dataset=end)
        self.appends += 1
        self.clock.forward(minutes=self.draw.randrange(30))

    def rename(self) -> None:
        column, inner = self.names["code"].split(".")
        _, gate = self.names["gate"].split(".")
        choice = self.draw.choice(["plane", "column", "code"])
        now = f"{choice}{self.draw.randrange(10**6)}"
        if choice == "plane":
            self.streams.change_columns("s", renamed={self.names["plane"]: now})
            self.names["plane"] = now
        elif choice == "column":
            self.streams.change_columns("s", renamed={column: now})
            self.names |= {"code": f"{now}.{inner}", "gate": f"{now}.{gate}"}
        else:
            self.streams.change_columns("s", renamed={self.names["code"]: now})
            self.names["code"] = f"{column}.{now}"

    def widen(self) -> None:
        schema = self.streams.info("s").schema
        assert schema is not None
        wide = {name: kind.replace(":int", ":bigint") for name, kind in schema.types.items()}
        self.streams.change_columns("s", schema=Schema.of(wide))
        self.kinds["gate"] = pa.int64()

    def configure(self) -> None:
        keys = [["plane"], ["gate", "code"], ["gate"], ["id"]]
        chosen = self.draw.sample(keys, self.draw.randrange(5))
        find_by = [[self.names[part] for part in key] for key in chosen]
        retention = self.draw.choice([None, Retention(max_age=timedelta(hours=2))])
        self.streams.configure("s", retention=retention, compaction=MERGING, find_by=find_by)

    def repartition(self) -> None:
        now = self.streams.info("s").partitions % 4 + 1
        repartition(self.streams, "s", now, reason="r", by="me", check=lambda _: None)

    def maintain(self) -> None:
        self.streams.maintain("s")
        self.clock.forward(minutes=self.draw.randrange(90))

    def damage(self) -> None:
        """Cut some indexes, and remove others."""
        store = self.streams.lake.store
        for key in indexes(self.streams):
            data = store.get(key).data
            place = self.draw.randrange(len(data))
            choice = self.draw.random()
            if choice < 0.1:
                store.delete(key)
            elif choice < 0.3:
                store.put(key, data[:place])

    def check(self) -> None:
        streams = self.streams
        ranges = {}
        for ssp, span in streams.all_ranges("s").items():
            start = self.draw.randint(int(span.start), int(span.end))
            if self.draw.random() < 0.5:
                start = int(span.start)
            ranges[ssp] = OffsetRange(str(start), span.end)
        there = {row["id"]: row for row in streams.read_arrow(ranges).to_pylist()}
        for parts in (["plane"], ["code", "gate"], ["gate"], ["id"], ["id", "plane"]):
            drawn = self.draw.choices(list(self.rows.values()) or [{}], k=self.draw.randrange(1, 6))
            keys = {tuple(row.get(part) for part in parts) for row in drawn}
            columns = list(zip(*keys, strict=True))
            table = pa.table(
                {
                    self.names[part]: pa.array(values, self.kinds[part])
                    for part, values in zip(parts, columns, strict=True)
                }
            )
            expected = []
            for number, row in there.items():
                key = tuple(self.rows[number][part] for part in parts)
                if key in keys and None not in key:
                    expected.append((row[PARTITION], row[OFFSET], number, row["__tombstone"]))
            found = streams.find_records(ranges, table, ["id", "__tombstone"])
            assert [tuple(row.values()) for row in found.to_pylist()] == sorted(expected)
            places = streams.find_records(ranges, table)
            assert places.equals(found.select([PARTITION, OFFSET]))
            records = streams.read_records("s", places)
            assert records.to_pylist() == [there[number] for _, _, number, _ in sorted(expected)]


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("seed", rounds(range(3), range(200)))
def test_records_are_found_in_any_history_of_a_stream(seed: int, lake: Lake) -> None:
    story = Story(lake, seed)
    acts = [story.append] * 4 + [story.maintain] * 3 + [story.configure, story.damage]
    acts += [story.rename, story.widen, story.repartition]
    story.configure()
    for _ in range(25):
        story.draw.choice(acts)()
        if story.draw.random() < 0.5:
            story.check()
    story.maintain()
    story.check()


def filled(lake: Lake, clock: Clock, **options: Any) -> LakeStreams:
    """Return a stream with three appends of flights of N0 to N9 at their gates."""
    streams = LakeStreams(on_clock(lake, clock))
    streams.create("s", schema=FLIGHTS, key=["id"], partitions=2, **options)
    for sequence in range(3):
        rows = [
            {"id": n, "plane": f"N{n % 10}", "place": {"code": "a", "gate": n % 7}}
            for n in range(sequence * 20, sequence * 20 + 20)
        ]
        table = pa.Table.from_pylist(rows, FLIGHTS.to_arrow())
        streams.append("s", table, producer="p", sequence=sequence)
    return streams


def ids(streams: LakeStreams, **keys: list[Any]) -> list[int]:
    table = pa.table({name.replace("_", "."): values for name, values in keys.items()})
    found = streams.find_records(streams.all_ranges("s"), table, ["id"])
    return sorted(found.column("id").to_pylist())


def test_an_index_says_where_records_are_without_their_files(
    lake: Lake, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = filled(lake, clock, find_by=["plane", ["place.gate", "plane"]])
    assert streams.maintain("s").indexes == 6
    assert streams.maintain("s").indexes == 0
    keys = pa.table({"plane": ["N3", "N8", "none"]})
    read = opened(streams, monkeypatch)
    found = streams.find_records(streams.all_ranges("s"), keys)
    assert found.num_rows == 12
    assert [name for name in read if name.startswith("part-")] == []
    # Files in which no record has the key are not read, either.
    both = pa.table({"plane": ["N3"], "place.gate": pa.array([3], pa.int32())})
    assert ids(streams, plane=["N3"]) == [3, 13, 23, 33, 43, 53]
    read.clear()
    found = streams.find_records(streams.all_ranges("s"), both, ["id"])
    assert found.column("id").to_pylist() == [3]
    assert len([name for name in read if name.startswith("part-")]) == 1


def test_files_whose_keys_are_in_another_range_are_not_read(
    lake: Lake, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = filled(lake, clock)
    read = []
    read_keys = key_index.StoredKey.read

    def noted(self: Any, parquet: Any, group: int) -> Any:
        read.append(group)
        return read_keys(self, parquet, group)

    monkeypatch.setattr(key_index.StoredKey, "read", noted)
    assert ids(streams, id=[25, 99]) == [25]
    assert len(read) <= 2  # of six files
    read.clear()
    assert ids(streams, plane=["M", "O"]) == []
    assert read == []


@pytest.mark.parametrize("find_by", [[], ["a.b"]])
def test_a_column_with_a_dot_is_not_a_value_inside_another(
    find_by: list[str], lake: Lake, clock: Clock
) -> None:
    schema = Schema.of({"a.b": "int", "a": {"b": "int"}, "id": "int"})
    streams = LakeStreams(on_clock(lake, clock))
    streams.create("s", schema=schema, partitions=1, find_by=find_by)
    rows = [{"a.b": n, "a": {"b": 100 + n}, "id": n} for n in range(9)]
    streams.append("s", pa.Table.from_pylist(rows, schema.to_arrow()), producer="p", sequence=1)
    streams.maintain("s")
    for name, value, expected in (("a.b", 5, [5]), ("`a`.b", 105, [5]), ("`a`.b", 5, [])):
        keys = pa.table({name: pa.array([value], pa.int32())})
        found = streams.find_records(streams.all_ranges("s"), keys, ["id"])
        assert found.column("id").to_pylist() == expected, name


def test_an_index_follows_renames_and_not_other_columns(
    lake: Lake, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = filled(lake, clock, find_by=["plane", "place.gate"])
    streams.maintain("s")
    streams.change_columns("s", renamed={"plane": "tail", "place": "at"})
    assert streams.describe("s")["find_by"] == [["at.gate"], ["tail"]]
    assert streams.maintain("s").indexes == 0
    read = opened(streams, monkeypatch)
    keys = pa.table({"tail": ["N3"]})
    assert streams.find_records(streams.all_ranges("s"), keys).num_rows == 6
    assert [name for name in read if name.startswith("part-")] == []
    # A column that was dropped takes its key along, and a new one of its name has no index yet.
    streams.change_columns("s", drop=["tail"])
    assert streams.describe("s")["find_by"] == [["at.gate"]]
    wide = Schema.of(id="bigint", at={"code": "string", "gate": "int"}, tail="string")
    streams.create("s", schema=wide, key=["id"], partitions=2)
    assert ids(streams, tail=["N3"]) == []


def test_indexes_that_are_not_needed_stay_for_their_readers_only(lake: Lake, clock: Clock) -> None:
    streams = filled(lake, clock, find_by=["plane"])
    streams.maintain("s")
    first = indexes(streams)
    streams.configure("s", retention=None, compaction=MERGING, find_by=["place.gate"])
    assert streams.maintain("s").merged_segments == 3
    clock.forward(minutes=50)
    streams.maintain("s")
    assert set(first) < set(indexes(streams))
    clock.forward(minutes=20)
    streams.maintain("s")
    (left,) = indexes(streams)
    assert left not in first
    streams.configure("s", retention=None, compaction=MERGING, find_by=[])
    streams.maintain("s")
    clock.forward(minutes=50)
    streams.maintain("s")
    assert indexes(streams) == [left]
    clock.forward(minutes=20)
    assert streams.maintain("s").deleted_objects > 0
    assert indexes(streams) == []
    assert ids(streams, plane=["N3"]) == [3, 13, 23, 33, 43, 53]


def test_maintenance_may_be_killed_anywhere() -> None:
    store = InMemoryStore()
    whole = FaultyStore(store)
    filled(lake_in(whole), Clock(), find_by=["plane"], compaction=MERGING).maintain("s")
    before = len(_requests_of_filling())
    for nth in [nth for nth in deaths(whole.requests) if nth > before]:
        store = InMemoryStore()
        faulty = FaultyStore(store, [Fault("*", nth, "crash-before")])
        clock = Clock()
        with pytest.raises(Crash):
            filled(lake_in(faulty), clock, find_by=["plane"], compaction=MERGING).maintain("s")
        streams = LakeStreams(on_clock(lake_in(store), clock))
        assert ids(streams, plane=["N3"]) == [3, 13, 23, 33, 43, 53]
        streams.maintain("s")
        clock.forward(minutes=90)
        streams.maintain("s")
        assert len(indexes(streams)) == 1
        assert ids(streams, plane=["N3"]) == [3, 13, 23, 33, 43, 53]


def _requests_of_filling() -> list[tuple[str, str]]:
    faulty = FaultyStore(InMemoryStore())
    filled(lake_in(faulty), Clock(), find_by=["plane"], compaction=MERGING)
    return list(faulty.requests)


@pytest.mark.lengthy
def test_an_index_with_damaged_keys_is_not_used(lake: Lake, clock: Clock) -> None:
    streams = filled(lake, clock, find_by=["plane"])
    streams.maintain("s")
    key = indexes(streams)[0]
    data = lake.store.get(key).data
    expected = [n for n in range(60) if n % 10 in {3, 4}]
    group = pq.ParquetFile(pa.BufferReader(data[:-32])).metadata.row_group(0)
    for place in range(group.num_columns):
        column = group.column(place)
        end = column.data_page_offset + column.total_compressed_size
        for damaged in range(end - 12, end):
            flipped = bytes([data[damaged] ^ 1])
            lake.store.put(key, data[:damaged] + flipped + data[damaged + 1 :])
            assert ids(streams, plane=["N3", "N4"]) == expected


class _OutOfFiles(InMemoryStore):
    """A store that can't open indexes: too many files are open."""

    def get(self, key: str) -> Any:
        if "/_keys-" in key:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().get(key)


def test_an_index_that_this_process_can_not_open_is_not_missing(clock: Clock) -> None:
    streams = filled(lake_in(_OutOfFiles()), clock, find_by=["plane"])
    streams.maintain("s")
    with pytest.raises(ConfigurationError) as caught:
        ids(streams, plane=["N3"])
    assert "ulimit -n" in caught.value.next_step


def test_an_index_with_a_damaged_footer_is_not_used(lake: Lake, clock: Clock) -> None:
    streams = filled(lake, clock, find_by=["plane"])
    streams.maintain("s")
    key = indexes(streams)[0]
    data = lake.store.get(key).data
    expected = [n for n in range(60) if n % 10 in {3, 4}]
    length = int.from_bytes(data[-40:-36], "little")
    for damaged in range(len(data) - 40 - length, len(data), 29):
        flipped = bytes([data[damaged] ^ 1])
        lake.store.put(key, data[:damaged] + flipped + data[damaged + 1 :])
        assert ids(streams, plane=["N3", "N4"]) == expected
    lake.store.put(key, data[:7])
    assert ids(streams, plane=["N3", "N4"]) == expected


def test_keys_with_equal_hashes_are_told_apart(
    lake: Lake, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        key_index, "spark_hash", lambda columns: np.zeros(len(columns[0]), np.int32)
    )
    streams = filled(lake, clock, find_by=["plane"])
    streams.maintain("s")
    assert ids(streams, plane=["N3"]) == [3, 13, 23, 33, 43, 53]


@pytest.mark.parametrize("find_by", [["plane", ["plane"]], [[]], [["id", "id"]]])
def test_keys_are_declared_once(find_by: Any, lake: Lake, clock: Clock) -> None:
    with pytest.raises(ConfigurationError):
        filled(lake, clock, find_by=find_by)


@pytest.mark.parametrize("find_by", [["tail"], ["place"], ["place.name"]])
def test_keys_have_columns_that_can_be_compared(find_by: Any, lake: Lake, clock: Clock) -> None:
    with pytest.raises(SchemaMismatchError):
        filled(lake, clock, find_by=find_by)


def test_other_keys_are_another_declaration(lake: Lake, clock: Clock) -> None:
    streams = filled(lake, clock, find_by=[["plane", "id"]])
    declared: dict[str, Any] = {"schema": FLIGHTS, "key": ["id"], "partitions": 2}
    streams.create("s", **declared)
    streams.create("s", **declared, find_by=[["id", "plane"]])
    with pytest.raises(StreamExistsError):
        streams.create("s", **declared, find_by=["plane"])
    streams.configure("s", retention=None, compaction=None)
    assert streams.describe("s")["find_by"] == [["id", "plane"]]


@pytest.mark.spark
def test_spark_reads_streams_with_indexes(tmp_path: Path, spark: SparkSession) -> None:
    streams = filled(open_lake(str(tmp_path / "lake")), Clock(), find_by=["plane"])
    assert streams.maintain("s").indexes == 3
    assert streams.read(spark, streams.all_ranges("s")).count() == 60
