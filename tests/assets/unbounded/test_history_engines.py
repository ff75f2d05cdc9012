"""Spark and this process make the same table with history of the same stream, and read the same
of it.
"""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.declaration.snapshots import ParquetSnapshot
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.rewind import rewind_dataset
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.startpoint import StartpointSpecific
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.assets.conftest import World
from tests.assets.unbounded.over_time import (
    COLUMNS,
    KEYS,
    NAME,
    Change,
    Model,
    at,
    check,
    edge_of,
    manifest_of,
    prices,
    prices_in,
    second_of,
    send,
)

pytestmark = pytest.mark.spark


def some_changes(chance: random.Random, begin: int) -> list[Change]:
    return [
        (
            chance.choice(KEYS),
            chance.randrange(begin, begin + 12),
            None if chance.random() < 0.3 else chance.randrange(5),
        )
        for _ in range(8)
    ]


def facts(world: World) -> dict[str, Any]:
    """Return all that a table holds and says of itself, but for ids and times of commits."""
    manifest = manifest_of(world)
    assert manifest.version is not None
    view = StoredVersions(world.lake, NAME).require_current()
    generations = manifest.version.generations
    return {
        "files": [
            (
                generation.id,
                file.bucket,
                file.rows,
                file.digest,
                file.min_key,
                file.max_key,
                file.stats,
            )
            for generation in generations
            for file in generation.files
        ],
        "history": manifest.version.history,
        "rows": manifest.version.rows,
        "horizon": manifest.horizon,
        "counters": manifest.counters,
        "told": [
            [(part.valid_from, part.valid_to, part.entry) for part in view.history_of(key)]
            for key in KEYS
        ],
    }


def test_any_changes_make_the_same_history_by_both(tmp_path: Path, spark: Any) -> None:
    chance, spec = random.Random("history"), prices(history=timedelta(seconds=9))
    worlds = [
        prices_in(World(open_lake(tmp_path / name), session))
        for name, session in (("spark", lambda: spark), ("process", IN_PROCESS))
    ]
    positions = {
        SystemStreamPartition("lake", NAME, part): StartpointSpecific(offset="0")
        for part in range(2)
    }
    for step, level in enumerate((None, "minor", "major", "again", "major")):
        changes = some_changes(chance, 8 * step)
        outcomes = []
        for world in worlds:
            send(world, changes)
            report = world.advance(spec)
            if level == "again":
                rewind_dataset(
                    spec,
                    lake=world.lake,
                    systems=world.systems,
                    spark=world.spark,
                    positions=positions,
                    reason="again",
                    by="test",
                )
            elif level is not None:
                compact_dataset(world.lake, NAME, spark=world.spark, by="test", level=level)
            outcomes.append((report.counters, facts(world)))
        assert outcomes[0] == outcomes[1], level
    model_checked_by_spark(worlds[0], spec, spark)


def model_checked_by_spark(world: World, spec: Any, spark: Any) -> None:
    """Hold what Spark reads over time against what is read by key."""
    view = world.view(spec)
    entries = {row.k: row.n for row in view.frame(spark).collect()}
    assert entries == {key: entry["n"] for key, entry in view.items()}
    rows = view.history_frame(spark).collect()
    micros = {
        key: sorted((row for row in rows if row.k == key), key=lambda row: row["__valid_from"])
        for key in KEYS
    }
    for key in KEYS:
        for second in range(edge_of(view), 60):
            matched = [
                row.n
                for row in micros[key]
                if _moment(row["__valid_from"]) <= second
                and (row["__valid_to"] is None or second < _moment(row["__valid_to"]))
                and not row["__tombstone"]
            ]
            parts = [
                part.entry["n"]
                for part in view.history_of(key)
                if part.holds(at(second)) and part.entry
            ]
            assert matched == parts, (key, second)


def _moment(value: Any) -> int:
    return second_of(value.astimezone(at(0).tzinfo))


def test_a_bulk_snapshot_is_valid_from_its_column_or_since_before_what_follows(
    sparkling: World, tmp_path: Path
) -> None:
    world, model = prices_in(sparkling), Model()
    begun: list[Change] = [("a", 5, 1), ("b", 6, 2)]
    columns = [[change[i] for change in begun] for i in range(3)]
    table = pa.table(
        {
            "k": columns[0],
            "since": pa.array([at(second) for second in columns[1]], pa.timestamp("us", tz="UTC")),
            "n": pa.array(columns[2], pa.int32()),
        }
    )
    pq.write_table(table.cast(COLUMNS.to_arrow()), tmp_path / "rows.parquet")
    initial = ParquetSnapshot(
        str(tmp_path / "rows.parquet"), {f"lake.{NAME}.{part}": "0" for part in range(2)}
    )
    changes: list[Change] = [("a", 3, 7), ("a", 9, None), ("c", 9, 1)]
    send(world, changes)
    world.advance(prices(initial=initial))
    for taken in (begun, changes):
        model.add(taken)
    check(world.view(prices()), model)
    other = World(open_lake(tmp_path / "by-record"), world.spark)
    prices_in(other)
    send(other, changes)
    spec = prices(initial=initial, valid_from=None)
    other.advance(spec)
    view = other.view(spec)
    assert {key: entry["n"] for key, entry in view.items()} == {"b": 2, "c": 1}
    (valid,) = view.history_of("b")
    assert valid.valid_from <= view.history_of("c")[0].valid_from
