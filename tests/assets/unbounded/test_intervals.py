"""Which intervals a history has, and their ids: the same for every reader, whatever was compacted
and however far back the history reaches.

`n` is a history column, `note` is none.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import itertools
import random
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.exchange.handover import duckdb_view, polars_frame, pyarrow_dataset
from dagster_adjunct.assets.reading.dataset import Dataset, open_dataset
from dagster_adjunct.assets.reading.interval_ids import interval_id_sql, interval_ids
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.valid_time import frame_over_time, read_rows_over_time
from dagster_adjunct.assets.retention.erasure import erase_keys
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.orchestration.maintenance.repartition import repartition_dataset
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError, SchemaMismatchError
from dagster_adjunct.resources.objects.lake import lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.column_changes import ColumnChanges
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.unbounded.over_time import BY_HAND, at, second_of
from tests.rounds import rounds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "states"
COLUMNS = Schema.of(k="string", d="date", since="timestamp", n="int", note="string")
DAY = dt.date(2026, 3, 1)
Key = tuple[str, dt.date]
# (key, second since which it is valid, (n, note)); none deletes
Change = tuple[Key, int, tuple[int, str] | None]
# (key, n, note, since, begin, end, id)
Interval = tuple[Any, ...]
KEYS = [(name, DAY + dt.timedelta(days=day)) for name in ("a|", "é") for day in (0, 40)]


def states(history: Any = "all", **options: Any) -> AdjunctDataset:
    given = {"history_columns": ["n"], "valid_from": "since", "compaction": BY_HAND, **options}
    return unbounded_dataset(
        NAME, input=f"lake.{NAME}", key=["k", "d"], partitions=2, history=history, **given
    )


def send(world: World, changes: list[Change], stream: str = NAME) -> None:
    rows = pa.table(
        {
            "k": [key[0] for key, _, _ in changes],
            "d": [key[1] for key, _, _ in changes],
            "since": pa.array([at(second) for _, second, _ in changes], pa.timestamp("us", "UTC")),
            "n": pa.array([value and value[0] for _, _, value in changes], pa.int32()),
            "note": pa.array([value and value[1] for _, _, value in changes], pa.string()),
            "__tombstone": [value is None for _, _, value in changes],
        }
    )
    world.streams.append(stream, rows, producer="test", sequence=world._next(stream))


def id_of(key: Key, begin: int) -> str:
    """Return the id by its definition, in words of the documentation."""
    micros = int(at(begin).timestamp() * 1_000_000)
    days = (key[1] - dt.date(1970, 1, 1)).days
    text = f"{micros}|{key[0].encode().hex().upper()}|{days}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Model:
    """All changes, and the intervals that they come to."""

    def __init__(self, *, by_all: bool = False) -> None:
        self.valid: dict[Key, dict[int, tuple[int, str] | None]] = {}
        self.by_all = by_all

    def add(self, changes: list[Change]) -> None:
        for key, second, value in changes:
            self.valid.setdefault(key, {})[second] = value

    @property
    def newest(self) -> int:
        return max(max(rows) for rows in self.valid.values())

    def intervals(self, edge: int | None = None) -> list[Interval]:
        found = []
        for key, rows in self.valid.items():
            begins = sorted(rows)
            spans = zip(begins, [*begins[1:], None], strict=True)
            for value, run in itertools.groupby(
                spans, lambda span, of=rows: self._content(of[span[0]])
            ):
                same = list(run)
                first, last, end = same[0][0], same[-1][0], same[-1][1]
                if value is None or (edge is not None and end is not None and end <= edge):
                    continue
                entry = rows[last]
                assert entry is not None
                found.append((*key, entry[0], entry[1], first, first, end, id_of(key, first)))
        return sorted(found, key=repr)

    def _content(self, value: tuple[int, str] | None) -> Any:
        return value if value is None or self.by_all else value[0]


def some(chance: random.Random, first: int, last: int) -> list[Change]:
    made: list[Change] = []
    for _ in range(chance.randint(1, 6)):
        value = (chance.randint(0, 1), chance.choice("xyz"))
        second = chance.randint(first, last)
        made.append((chance.choice(KEYS), second, None if chance.random() < 0.15 else value))
    return made


def shown(rows: Any) -> list[Interval]:
    """Return rows of (k, d, since, n, note, valid_from, valid_to, is_current, interval_id)."""
    found = []
    for key, day, since, n, note, begin, end, current, identity in rows:
        assert current == (end is None)
        until = None if end is None else _second(end)
        found.append((key, day, n, note, _second(since), _second(begin), until, identity))
    return sorted(found, key=repr)


def _second(moment: dt.datetime) -> int:
    return second_of(moment.astimezone(dt.UTC))


def by_key(opened: Dataset) -> list[Interval]:
    rows = []
    for key in KEYS:
        for part in opened.history_of(key):
            if part.entry is None:
                assert part.interval_id is None
                continue
            times = (part.valid_from, part.valid_to, part.is_current, part.interval_id)
            rows.append((*part.entry.values(), *times))
    return shown(rows)


def by_duckdb(opened: Dataset) -> list[Interval]:
    duckdb = pytest.importorskip("duckdb")
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'Asia/Tokyo'")
    duckdb_view(connection, opened.over_time(interval_id=True), "states")
    return shown(connection.execute("SELECT * FROM states").fetchall())


def by_polars(opened: Dataset) -> list[Interval]:
    pytest.importorskip("polars")
    return shown(polars_frame(opened.over_time(interval_id=True)).collect().rows())


def rows_with_ids(rows: Any) -> list[tuple[Any, ...]]:
    return sorted((row["k"], row["d"], row["n"], _second(row["__valid_from"]), row["interval_id"])
                  for row in rows if not row["__tombstone"])  # fmt: skip


def world_in(lake: Any, session: Any = IN_PROCESS) -> World:
    world = World(lake, session)
    world.stream(NAME, COLUMNS, ["k", "d"], 2)
    return world


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(4, 60)))
def test_intervals_keep_begin_and_id_while_the_edge_moves_over_them(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    history = chance.choice([5, 12])
    by_all = seed % 4 == 3
    options = {"history_columns": None} if by_all else {}
    spec = states(dt.timedelta(seconds=history), **options)
    world, model = world_in(open_lake(tmp_path / "lake")), Model(by_all=by_all)
    sent: list[Change] = []
    for step in range(8):
        edge = model.newest - history if sent else 0
        # Corrections reach back to the edge; some changes come again.
        changes = some(chance, max(edge, 0), 6 * step + 6)
        again = [change for change in sent if change[1] > edge and chance.random() < 0.2]
        changes = [*(change for change in again if change[0] != changes[0][0]), *changes]
        send(world, changes)
        world.advance(spec)
        sent += changes
        model.add(changes)
        level = chance.choice([None, "minor", "major", "major"])
        if level is not None:
            compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level=level)
        with open_dataset(world.lake, NAME) as opened:
            expected = model.intervals(model.newest - history)
            assert by_key(opened) == expected, step
            if level == "major":
                assert by_duckdb(opened) == expected
                assert by_polars(opened) == expected


def test_what_was_dropped_before_the_edge_is_not_read_as_valid_then() -> None:
    world, spec = world_in(lake_in(InMemoryStore())), states(dt.timedelta(seconds=5))
    key = KEYS[0]
    send(world, [(key, 1, (7, "x")), (key, 3, (7, "y")), (key, 6, (7, "z"))])
    world.advance(spec)
    send(world, [(KEYS[2], 20, (1, "w"))])
    world.advance(spec)
    report = compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
    assert report.counters["pruned"] == 1

    def check() -> None:
        rows = read_rows_over_time(
            StoredVersions(world.lake, NAME).require_current(), with_ids=True
        )
        told = [row for row in rows.to_pylist() if row["k"] == key[0]]
        assert [(row["note"], row["__first"]) for row in told] == [("z", True)]
        assert told[0]["interval_id"] == id_of(key, 1)

    check()
    send(world, [(KEYS[2], 21, (1, "v"))])
    world.advance(spec)
    check()
    erase_keys(world.lake, NAME, [KEYS[2]], reason="test", by="test")
    check()
    repartition_dataset(world.lake, NAME, 3, reason="test", by="test")
    check()


def test_a_correction_older_than_the_history_may_begin_an_interval_anew() -> None:
    world, spec = world_in(lake_in(InMemoryStore())), states(dt.timedelta(seconds=5))
    key = KEYS[0]
    send(
        world, [(key, 11, (7, "x")), (key, 13, (7, "y")), (key, 14, (7, "z")), (key, 18, (8, "z"))]
    )
    world.advance(spec)
    compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
    send(world, [(KEYS[1], 20, (1, "w"))])
    world.advance(spec)
    compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
    send(world, [(key, 12, (3, "late"))])
    world.advance(spec)
    with open_dataset(world.lake, NAME) as opened:
        # Seven came again at 13, but that change was dropped: it is known from 14 on.
        begins = [_second(part.valid_from) for part in opened.history_of(key)]
        assert begins == [14, 18]


def test_other_history_columns_make_other_intervals_of_the_same_rows() -> None:
    world, model = world_in(lake_in(InMemoryStore())), Model()
    send(world, [(KEYS[0], 1, (1, "x")), (KEYS[0], 2, (1, "y")), (KEYS[0], 3, (2, "y"))])
    model.add([(KEYS[0], 1, (1, "x")), (KEYS[0], 2, (1, "y")), (KEYS[0], 3, (2, "y"))])
    for columns, begins in (
        (["n"], [1, 3]),
        (["note"], [1, 2]),
        (None, [1, 2, 3]),
        (["n"], [1, 3]),
    ):
        world.advance(states(history_columns=columns))
        with open_dataset(world.lake, NAME) as opened:
            assert [row[5] for row in by_key(opened)] == begins
            # At each moment all columns are as they were.
            assert opened.get(KEYS[0])["note"] == "y"  # type: ignore[index]
            rows = read_rows_over_time(opened._served.lend_over_time()).to_pylist()
            assert [row["note"] for row in rows] == ["x", "y", "y"]


KEY_TYPES = Schema.of(
    s="string",
    b="binary",
    i="tinyint",
    l="bigint",
    d="date",
    t="timestamp",
    m="decimal(12,3)",
    w="decimal(38,0)",
)


def keys_of_all_types() -> pa.Table:
    """Return a few keys, and a begin for each."""
    row = {
        "s": "é|\x00",
        "b": b"\x00\xff",
        "i": -3,
        "l": 2**62,
        "d": dt.date(1, 1, 1),
        "t": dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, dt.UTC),
        "m": Decimal("-0.500"),
        "w": Decimal(10**37),
    }
    other = {
        "s": "",
        "b": b"",
        "i": 0,
        "l": -1,
        "d": dt.date(9999, 12, 31),
        "t": dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, dt.UTC),
        "m": Decimal("0.000"),
        "w": Decimal(-1),
    }
    begins = {"begin": pa.array([-1, 2**50], pa.timestamp("us", "UTC"))}
    table = pa.Table.from_pylist([row, other], schema=KEY_TYPES.to_arrow())
    return table.append_column("begin", begins["begin"])


def ids_of_all_types() -> list[str]:
    rows = keys_of_all_types()
    found: list[str] = interval_ids(rows, KEY_TYPES.names, [-1, 2**50]).to_pylist()
    first = "-1|C3A97C00|00FF|-3|4611686018427387904|-719162|-1|-0.500|1" + "0" * 37
    assert found[0] == hashlib.sha256(first.encode()).hexdigest()[:32]
    return found


def test_duckdb_writes_keys_of_all_types_as_python_does() -> None:
    duckdb = pytest.importorskip("duckdb")
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'Asia/Tokyo'")
    connection.register("rows", keys_of_all_types())
    sql = interval_id_sql(KEY_TYPES, KEY_TYPES.names, "begin", '"{}"'.format, duckdb=True)
    rows = connection.execute(f"SELECT {sql} FROM rows").fetchall()
    assert [row[0] for row in rows] == ids_of_all_types()


@pytest.mark.spark
def test_spark_writes_keys_of_all_types_as_python_does(spark: SparkSession) -> None:
    sql = interval_id_sql(KEY_TYPES, KEY_TYPES.names, "begin", "`{}`".format)
    rows = spark.createDataFrame(keys_of_all_types()).selectExpr(sql).collect()
    assert [row[0] for row in rows] == ids_of_all_types()


@pytest.mark.spark
def test_spark_has_the_same_intervals_and_ids(tmp_path: Path, spark: SparkSession) -> None:
    chance = random.Random(5)
    spec = states(dt.timedelta(seconds=9))
    world, model = world_in(open_lake(tmp_path / "lake"), lambda: spark), Model()
    for step in range(4):
        changes = some(chance, max(0, 6 * step - 6), 6 * step + 6)
        send(world, changes)
        world.advance(spec)
        model.add(changes)
        if step == 2:
            compact_dataset(world.lake, NAME, spark=lambda: spark, by="test", level="major")
    with open_dataset(world.lake, NAME) as opened:
        expected = model.intervals(model.newest - 9)
        frame = opened.over_time(interval_id=True).frame(spark)
        assert frame.columns[-4:] == ["valid_from", "valid_to", "is_current", "interval_id"]
        assert shown([tuple(row) for row in frame.collect()]) == expected == by_key(opened)
        reader = opened._served.lend_over_time()
        spark_rows = [
            row.asDict() for row in frame_over_time(reader, spark, with_ids=True).collect()
        ]
        plain = read_rows_over_time(reader, with_ids=True).to_pylist()
        assert rows_with_ids(spark_rows) == rows_with_ids(plain)
        assert {row["interval_id"] for row in plain} >= {row[-1] for row in expected}
    expected = fleets(world, chance).intervals()
    with open_dataset(world.lake, "fleet") as opened:
        frame = opened.over_time(interval_id=True).frame(spark)
        read = shown([tuple(row) for row in frame.collect()])
        assert without_since(read) == without_since(expected)


def test_history_columns_follow_a_renamed_column(tmp_path: Path) -> None:
    world = world_in(open_lake(tmp_path / "lake"))
    send(world, [(KEYS[0], 1, (1, "x")), (KEYS[0], 2, (1, "y"))])
    world.advance(states())
    renamed = Schema.of(k="string", d="date", since="timestamp", m="int", note="string")
    world.streams.create(
        NAME, schema=renamed, key=["k", "d"], partitions=2, changes=ColumnChanges({"n": "m"})
    )
    rows = [(*KEYS[0], at(second), value, "z") for second, value in ((3, 1), (4, 2))]
    table = pa.Table.from_pylist(
        [dict(zip(renamed.names, row, strict=True)) for row in rows], schema=renamed.to_arrow()
    )
    world.streams.append(NAME, table, producer="test", sequence=world._next(NAME))
    world.advance(states(history_columns=["m"], renamed={"n": "m"}))
    compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
    with open_dataset(world.lake, NAME) as opened:
        expected = [(*KEYS[0], 1, "z", 1, 1, 4, id_of(KEYS[0], 1))]
        expected.append((*KEYS[0], 2, "z", 4, 4, None, id_of(KEYS[0], 4)))
        for read in (by_key, by_duckdb, by_polars):
            assert read(opened) == expected


def fleets(world: World, chance: random.Random) -> Model:
    """Deliver a few versions, each valid from a time, and return what they come to."""
    world.stream("fleet", COLUMNS, ["k", "d"], 2)
    spec = bounded_dataset(
        "fleet",
        input="lake.fleet",
        key=["k", "d"],
        partitions=2,
        valid_from="marker",
        history_columns=["n"],
    )
    model = Model()
    for second in chance.sample(range(30), 6):
        there = chance.sample(KEYS, chance.randint(1, 3))
        changes: list[Change] = [
            (key, second, (chance.randint(0, 1), chance.choice("xyz"))) for key in there
        ]
        send(world, changes, "fleet")
        name = f"v{second}"
        world.streams.append_markers(
            "fleet", name, producer="test", sequence=world._next("fleet"), valid_from=at(second)
        )
        world.advance(spec)
        model.add([*changes, *((key, second, None) for key in KEYS if key not in there)])
    return model


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(2, 20)))
def test_history_columns_make_the_intervals_of_versions(tmp_path: Path, seed: int) -> None:
    world = World(open_lake(tmp_path / "lake"), IN_PROCESS)
    expected = fleets(world, random.Random(seed)).intervals()
    with open_dataset(world.lake, "fleet") as opened:
        for read in (by_key, by_duckdb, by_polars):
            assert without_since(read(opened)) == without_since(expected)


def without_since(found: list[Interval]) -> list[Interval]:
    """Versions state their time themselves, so that the column `since` is one like others."""
    return [row[:4] + row[5:] for row in found]


def test_files_have_no_intervals_with_ids() -> None:
    world, spec = world_in(lake_in(InMemoryStore())), states()
    send(world, [(KEYS[0], 1, (1, "x"))])
    world.advance(spec)
    with open_dataset(world.lake, NAME) as opened, pytest.raises(DatasetError, match="duckdb_view"):
        pyarrow_dataset(opened.over_time(interval_id=True))


@pytest.mark.parametrize(
    "options",
    [
        {"history": None, "valid_from": None},
        {"history_columns": []},
        {"history_columns": ["k"]},
        {"history_columns": ["__n"]},
        {"history_columns": ["n", "n"]},
        {"history_columns": ["n"], "columns": ["k", "d", "since", "note"]},
    ],
)
def test_history_columns_without_a_meaning_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        states(**options)
    assert caught.value.argument == "history_columns"


def test_history_columns_must_be_columns_of_the_entries() -> None:
    world = world_in(lake_in(InMemoryStore()))
    send(world, [(KEYS[0], 1, (1, "x"))])
    with pytest.raises(SchemaMismatchError) as caught:
        world.advance(states(history_columns=["m"]))
    assert (caught.value.argument, caught.value.column) == ("history_columns", "m")
