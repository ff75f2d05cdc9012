"""Entries over time in other engines: the same as plain Python makes of all changes, read from
the lake's own files.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import FileSource, bounded_dataset
from dagster_adjunct.assets.exchange.handover import (
    duckdb_view,
    parquet_files,
    polars_frame,
    pyarrow_dataset,
)
from dagster_adjunct.assets.exchange.iceberg import register_in_iceberg
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.valid_time import EntriesAt, EntriesOverTime
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.leases import list_leases
from dagster_adjunct.assets.versions.version import KeptHistory
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.times import to_microseconds
from tests.assets.histories import (
    BEGIN,
    LAYOUTS,
    Change,
    Interval,
    changes_of,
    day,
    intervals,
    joined,
    stored,
)

duckdb = pytest.importorskip("duckdb")
pytest.importorskip("polars")


def table(lake: Lake, seed: int) -> tuple[VersionReader, list[Interval]]:
    """A base alone, as a major compaction leaves it, and what it says."""
    chance = random.Random(seed)
    base = [change for _ in range(3) for change in changes_of(chance, by_column=False)[0]]
    newest = {(change.key, change.at): change for change in base}
    return stored(lake, [list(newest.values())], **LAYOUTS["by its key"]), intervals(
        [list(newest.values())]
    )


def by_duckdb(view: Any) -> list[tuple[Any, ...]]:
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    duckdb_view(connection, view, "prices")
    return sorted(connection.execute("SELECT * FROM prices").fetchall(), key=repr)


def by_polars(view: Any) -> list[tuple[Any, ...]]:
    return sorted(polars_frame(view).collect().rows(), key=repr)


ENGINES: Mapping[str, Any] = {"DuckDB": by_duckdb, "Polars": by_polars}


def days(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return rows with days for times."""
    plain = [
        tuple((v.astimezone(dt.UTC) - BEGIN).days if isinstance(v, dt.datetime) else v for v in row)
        for row in rows
    ]
    return sorted(plain, key=repr)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


@pytest.mark.lengthy
@pytest.mark.parametrize("engine", ENGINES)
def test_a_table_is_handed_over_as_it_is_was_and_over_time(lake: Lake, engine: str) -> None:
    read = ENGINES[engine]
    for seed in range(4):
        reader, expected = table(lake, seed)
        assert days(read(EntriesOverTime(reader))) == sorted(joined(expected), key=repr)
        assert read(reader) == sorted(
            (
                (*row.key, row.price)
                for row in expected
                if row.end is None and row.price is not None
            ),
            key=repr,
        )
        for moment in (day(0), day(4), day(4) - dt.timedelta(microseconds=1), day(30)):
            valid = [
                row
                for row in expected
                if day(row.start) <= moment and (row.end is None or moment < day(row.end))
            ]
            assert read(EntriesAt(reader, moment)) == sorted(
                ((*row.key, row.price) for row in valid if row.price is not None), key=repr
            )


def test_views_of_one_version_in_a_connection_keep_their_moments(lake: Lake) -> None:
    reader, _ = table(lake, 0)
    views = {
        "early": EntriesAt(reader, day(4)), "late": EntriesAt(reader, day(30)), "now": reader,
        "ever": EntriesOverTime(reader),
    }  # fmt: skip
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    for name, view in views.items():
        duckdb_view(connection, view, name)
    rows = {
        name: sorted(connection.execute(f"SELECT * FROM {name}").fetchall(), key=repr)
        for name in views
    }
    assert rows == {name: by_duckdb(view) for name, view in views.items()}
    assert rows["early"] != rows["late"]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_ended_before_the_edge_is_left_out_whether_compacted_or_not(
    lake: Lake, engine: str
) -> None:
    reader, expected = table(lake, 9)
    pruned = reader.sealed.after(history=KeptHistory(pruned=to_microseconds(day(6))))
    kept = [row for row in expected if row.end is None or row.end > 6]
    over_time = EntriesOverTime(VersionReader(lake.store, "prices", pruned))
    whole = [row for row in joined(expected) if row[4] is None or row[4] > 6]
    assert days(ENGINES[engine](over_time)) == sorted(whole, key=repr)
    rows = pyarrow_dataset(over_time).to_table().to_pylist()
    assert len(rows) == len([row for row in kept if row.price is not None]), (
        "as stored, without deletions"
    )
    assert {"__valid_from", "__valid_to", "__tombstone"} < set(rows[0])


def test_files_are_given_only_where_their_rows_are_all_that_is_asked_for(lake: Lake) -> None:
    reader, _ = table(lake, 2)
    assert len(parquet_files(EntriesOverTime(reader))) == len(reader.sealed.generations[0].files)
    for view in (reader, EntriesAt(reader, day(3))):
        with pytest.raises(DatasetError, match="its files also have rows of other times"):
            parquet_files(view)
    deltas = stored(
        lake, [[Change(("a", 1), 1, 1, 1)], [Change(("a", 1), 2, 2, 2)]], **LAYOUTS["by its key"]
    )
    for hand_over in (pyarrow_dataset, polars_frame, parquet_files):
        with pytest.raises(DatasetError, match="adjunct dataset compact prices --level major"):
            hand_over(EntriesOverTime(deltas))


PLANES = Schema.of(tailnum="string", seats="int")
FLEETS = {1: {"N1": 1, "N2": 2}, 3: {"N1": 1, "N3": 3}, 5: {"N1": 1, "N2": 2, "N3": 4}}


def planes(root: Path) -> Lake:
    """A bounded dataset whose versions are valid from the days in their names."""
    for number, fleet in FLEETS.items():
        folder = root / "incoming" / f"2026-01-0{number + 1}"
        folder.mkdir(parents=True)
        (folder / "a.csv").write_text(
            "tailnum,seats\n" + "".join(f"{n},{s}\n" for n, s in fleet.items())
        )
        (folder / "_SUCCESS").touch()
    lake = open_lake(root / "lake")
    source = FileSource(str(root / "incoming"), "csv", PLANES)
    spec = bounded_dataset("planes", input=source, key="tailnum", partitions=2, valid_from="name")
    advance_dataset(spec, lake=lake, systems={}, spark=IN_PROCESS, by="test")
    return lake


@pytest.mark.parametrize("engine", ENGINES)
def test_versions_are_handed_over_over_time_and_held_until_the_dataset_is_closed(
    tmp_path: Path, engine: str
) -> None:
    lake, read = planes(tmp_path), ENGINES[engine]
    with open_dataset(lake, "planes") as opened:
        # Gaps where a version lacks a key; equal neighbours are one.
        assert days(read(opened.over_time())) == [
            ("N1", 1, 1, None, True), ("N2", 2, 1, 3, False), ("N2", 2, 5, None, True),
            ("N3", 3, 3, 5, False), ("N3", 4, 5, None, True),
        ]  # fmt: skip
        assert read(opened.valid_at(day(4))) == sorted(FLEETS[3].items(), key=repr)
        held = [set(lease.versions) for lease in list_leases(lake, "planes")]
        assert {version.id for version in opened.versions()} in held
        with pytest.raises(DatasetError, match="its history begins at 2026-01-02"):
            opened.valid_at(day(1) - dt.timedelta(seconds=1))
    assert list_leases(lake, "planes") == []


def test_iceberg_takes_the_version_of_a_moment_and_no_rows_of_other_times(
    tmp_path: Path, lake: Lake
) -> None:
    pytest.importorskip("pyiceberg")
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog(
        "me", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=str(tmp_path / "warehouse")
    )
    catalog.create_namespace("out")
    reader, _ = table(lake, 5)
    with pytest.raises(DatasetError, match=r"dataset\.over_time\(\)"):
        register_in_iceberg(reader, catalog, "out.prices")
    with open_dataset(planes(tmp_path / "planes"), "planes") as opened:
        with pytest.raises(DatasetError, match="its files have no valid-from times"):
            register_in_iceberg(opened.over_time(), catalog, "out.planes")
        assert (
            register_in_iceberg(opened.valid_at(day(4)), catalog, "out.planes").version
            == opened.versions()[1].id
        )
