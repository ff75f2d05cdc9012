"""Tables with history as they are written, read by Spark, other engines and the command line,
against a dictionary.
"""

from __future__ import annotations

import datetime as dt
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.exchange.handover import duckdb_view, polars_frame
from dagster_adjunct.assets.exchange.iceberg import register_in_iceberg
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.unbounded.over_time import (
    KEYS,
    LAST,
    NAME,
    Change,
    Model,
    at,
    prices,
    prices_in,
    second_of,
    send,
)
from tests.orchestration.cli import commands
from tests.servers.s3 import S3Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.reading.dataset import Dataset

# (key, value, first second, the second after the last or none)
Interval = tuple[str, int, int, int | None]


@pytest.fixture
def prices_world(tmp_path: Path) -> World:
    return prices_in(World(open_lake(tmp_path / "lake"), IN_PROCESS))


def written(world: World, chance: random.Random, **options: Any) -> Model:
    """Take in changes in a few commits, compacted in between, and return what they come to."""
    model, spec = Model(), prices(**options)
    for step in range(5):
        changes: list[Change] = [
            (
                chance.choice(KEYS),
                chance.randint(0, LAST),
                None if chance.random() < 0.2 else chance.randint(0, 2),
            )
            for _ in range(chance.randint(1, 8))
        ]
        send(world, changes)
        world.advance(spec)
        model.add(changes)
        if step == 2:
            compact_dataset(
                world.lake,
                NAME,
                spark=IN_PROCESS,
                by="test",
                level=chance.choice(["minor", "major"]),
            )
    return model


def intervals(model: Model) -> list[Interval]:
    """Return what the model says, second by second, as intervals without neighbours of one
    value.
    """
    spans: list[Interval] = []
    for key in sorted(model.valid):
        last: int | None = None
        for second in range(LAST + 2):
            value = model.value(key, second)
            if value != last:
                if last is not None:
                    spans[-1] = (*spans[-1][:3], second)
                if value is not None:
                    spans.append((key, value, second, None))
                last = value
    return spans


def over_time(rows: list[tuple[Any, ...]]) -> list[Interval]:
    """Return rows of (k, since, n, __valid_from or none, valid_to, is_current) as intervals."""
    spans = []
    for key, since, value, *more in rows:
        end, current = more[-2:]
        assert current == (end is None)
        spans.append(
            (key, value, second_of(_utc(since)), None if end is None else second_of(_utc(end)))
        )
    return sorted(spans)


def _utc(moment: dt.datetime) -> dt.datetime:
    return moment.astimezone(dt.UTC)


def held(rows: list[tuple[Any, ...]]) -> dict[str, int]:
    assert len({row[0] for row in rows}) == len(rows)
    return {row[0]: row[2] for row in rows}


@pytest.mark.spark
@pytest.mark.parametrize("seed", range(2))
def test_spark_reads_what_a_dictionary_says(
    prices_world: World, spark: SparkSession, seed: int
) -> None:
    model = written(prices_world, random.Random(seed), broadcast=seed == 1)
    with open_dataset(prices_world.lake, NAME) as opened:
        assert len(opened.sealed.generations) > 1
        assert over_time(
            [tuple(row) for row in opened.over_time().frame(spark).collect()]
        ) == sorted(intervals(model))
        assert held([tuple(row) for row in opened.frame(spark).collect()]) == model.current
        for second in (0, LAST // 2, LAST + 1):
            entries = held(
                [tuple(row) for row in opened.valid_at(at(second)).frame(spark).collect()]
            )
            values = {key: model.value(key, second) for key in KEYS}
            assert entries == {key: value for key, value in values.items() if value is not None}


def by_duckdb(view: Any) -> list[tuple[Any, ...]]:
    duckdb = pytest.importorskip("duckdb")
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    duckdb_view(connection, view, "prices")
    rows: list[tuple[Any, ...]] = connection.execute("SELECT * FROM prices").fetchall()
    return rows


def by_polars(view: Any) -> list[tuple[Any, ...]]:
    pytest.importorskip("polars")
    return polars_frame(view).collect().rows()


@pytest.mark.lengthy
@pytest.mark.parametrize("seed", range(3))
def test_other_engines_and_the_entries_of_each_key_say_the_same_once_compacted(
    prices_world: World, seed: int
) -> None:
    engines_say_the_same(prices_world, random.Random(seed))


# on this machine: test_other_engines_and_the_entries_of_each_key_say_the_same_once_compacted
@pytest.mark.long
@pytest.mark.server
def test_other_engines_say_the_same_of_a_table_on_s3(
    versitygw: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    versitygw.set_in(monkeypatch)
    engines_say_the_same(prices_in(World(open_lake(versitygw.url()), IN_PROCESS)), random.Random(3))


def engines_say_the_same(world: World, chance: random.Random) -> None:
    model = written(world, chance)
    compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
    with open_dataset(world.lake, NAME) as opened:
        assert by_key(opened) == sorted(intervals(model))
        for read in (by_duckdb, by_polars):
            assert over_time(read(opened.over_time())) == sorted(intervals(model))
            assert held(read(opened)) == model.current
            then = {key: value for key in KEYS if (value := model.value(key, 20)) is not None}
            assert held(read(opened.valid_at(at(20)))) == then


def by_key(opened: Dataset) -> list[Interval]:
    parts = [
        (key, part) for key in KEYS for part in opened.history_of(key) if part.entry is not None
    ]
    return sorted(
        (
            key,
            part.entry["n"],
            second_of(part.valid_from),
            part.valid_to and second_of(part.valid_to),
        )  # type: ignore[index]
        for key, part in parts
    )


def test_what_lies_before_the_history_is_left_out_and_refused(prices_world: World) -> None:
    spec = prices(history=dt.timedelta(seconds=10))
    changes: list[Change] = [("a", 1, 1), ("a", 5, 2), ("a", 30, 3), ("b", 2, 7)]
    send(prices_world, changes)
    prices_world.advance(spec)
    for level in (None, "major"):
        if level is not None:
            compact_dataset(prices_world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
        with open_dataset(prices_world.lake, NAME) as opened:
            assert by_key(opened) == [("a", 2, 5, 30), ("a", 3, 30, None), ("b", 7, 2, None)]
            if level is not None:
                assert over_time(by_duckdb(opened.over_time())) == by_key(opened)
            assert opened.valid_at(at(20)).moment == at(20)
            with pytest.raises(
                Exception, match=r"its history begins at 2026-01-01 00:00:20\+00:00"
            ):
                opened.valid_at(at(19))


def test_iceberg_has_the_rows_over_time_with_the_columns_that_tell_it(
    prices_world: World, tmp_path: Path
) -> None:
    pytest.importorskip("pyiceberg")
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog(
        "me", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=str(tmp_path / "warehouse")
    )
    catalog.create_namespace("out")
    send(prices_world, [("a", 1, 1), ("a", 5, None), ("b", 2, 7)])
    prices_world.advance(prices())
    compact_dataset(prices_world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
    with open_dataset(prices_world.lake, NAME) as opened:
        first = register_in_iceberg(opened.over_time(), catalog, "out.prices")
        assert (first.new, first.version) == (True, opened.version)
        assert not register_in_iceberg(opened.over_time(), catalog, "out.prices").new
    rows = catalog.load_table("out.prices").scan().to_arrow().to_pylist()
    assert set(rows[0]) == {"k", "since", "n", "__valid_from", "__valid_to", "__tombstone"}
    reported = [
        (row["k"], row["__valid_from"], row["__valid_to"], row["__tombstone"]) for row in rows
    ]
    assert sorted(reported) == [
        ("a", at(1), at(5), False),
        ("a", at(5), None, True),
        ("b", at(2), None, False),
    ]


def test_the_command_line_shows_one_entry_over_time(prices_world: World) -> None:
    send(prices_world, [("a", 1, 1), ("a", 5, None), ("a", 9, 4), ("b", 2, 7)])
    prices_world.advance(prices())
    reported = commands.document(prices_world, "dataset", "history", NAME, "a")
    assert [(part["entry"] and part["entry"]["n"], part["is_current"]) for part in reported] == [
        (1, False), (None, False), (4, True),
    ]  # fmt: skip
    printed = commands.printed(prices_world, "dataset", "history", NAME, "a", "--limit", "2")
    assert "2026-01-01 00:00:05" in printed
    assert "deleted" in printed
    assert "2026-01-01 00:00:01" not in printed, "the newest two"
    assert "history shows one entry" in commands.refused(
        prices_world, "dataset", "history", NAME, "a", "b"
    )
