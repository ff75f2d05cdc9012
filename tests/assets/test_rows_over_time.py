"""History read by Spark, against plain Python: deltas, deletions, late and repeated changes,
every kind of layout.
"""

from __future__ import annotations

import datetime as dt
import random
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.reading.valid_time import EntriesAt, EntriesOverTime
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.version import TOMBSTONE, KeptHistory
from dagster_adjunct.resources.bucketing.files import IS_FIRST, VALID_FROM, VALID_TO, Generation
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.times import to_microseconds
from tests.assets.histories import (
    BEGIN,
    LAYOUTS,
    Change,
    Interval,
    changes_of,
    day,
    in_order,
    intervals,
    joined,
    stored,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
READER = "dagster_adjunct.assets.reading.version_reader"


def rows_of(frame: DataFrame) -> list[Interval]:
    names = frame.columns
    as_intervals = []
    for row in (dict(zip(names, values, strict=True)) for values in frame.collect()):
        price = None if row.get(TOMBSTONE) else row["price"]
        start, end = _day_of(row[VALID_FROM]), _day_of(row[VALID_TO])
        assert start is not None
        as_intervals.append(Interval((row["item"], row["shop"]), start, end, row[IS_FIRST], price))
    return as_intervals


def _day_of(time: dt.datetime | None) -> int | None:
    return None if time is None else (time.astimezone(dt.UTC) - BEGIN).days


@pytest.fixture
def lake(tmp_path: Any) -> Lake:
    return open_lake(tmp_path / "lake")


@pytest.mark.parametrize(
    ("layout", "rows", "by_column"),
    [
        ("by its key", "few", False),
        pytest.param("by one column of it", "few", True, marks=pytest.mark.long),
        pytest.param("one copy", "few", True, marks=pytest.mark.long),
        ("by its key", "many", False),
        pytest.param("by one column of it", "many", True, marks=pytest.mark.long),
        ("one copy", "many", True),
        ("by one column of it", "many changes", False),
    ],
)
def test_history_is_what_all_changes_come_to(
    lake: Lake,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    rows: str,
    by_column: bool,
) -> None:
    if rows != "few":
        monkeypatch.setattr(f"{READER}._SORTED_ROWS", 0)
    if rows == "many changes":
        monkeypatch.setattr(f"{READER}._BROADCAST_ROWS", 0)
    chance = random.Random(f"{layout} {rows == 'few'}")
    generations = [
        *changes_of(chance, by_column=by_column),
        *changes_of(chance, by_column=by_column),
    ]
    reader, expected = stored(lake, generations, **LAYOUTS[layout]), intervals(generations)
    assert in_order(rows_of(reader.history_frame(spark))) == in_order(expected)
    current = {(row["item"], row["shop"]): row["price"] for row in reader.frame(spark).collect()}
    assert current == {
        row.key: row.price for row in expected if row.end is None and row.price is not None
    }
    whole = EntriesOverTime(reader).frame(spark).collect()
    in_days = [(*row[:3], _day_of(row[3]), _day_of(row[4]), row[5]) for row in whole]
    assert sorted(in_days) == sorted(joined(expected))


@pytest.mark.parametrize("rows", ["few", "many"])
def test_entries_at_a_moment_are_those_whose_interval_has_it(
    lake: Lake, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, rows: str
) -> None:
    if rows == "many":
        monkeypatch.setattr(f"{READER}._SORTED_ROWS", 0)
    chance = random.Random(7)
    generations = [*changes_of(chance, by_column=False), *changes_of(chance, by_column=False)]
    reader, expected = stored(lake, generations, **LAYOUTS["by its key"]), intervals(generations)
    for after in (0, 1, -1):
        moment = day(5) + dt.timedelta(microseconds=after)
        prices = {
            tuple(row[:2]): row[2] for row in EntriesAt(reader, moment).frame(spark).collect()
        }
        valid = [
            row
            for row in expected
            if day(row.start) <= moment and (row.end is None or moment < day(row.end))
        ]
        assert prices == {row.key: row.price for row in valid if row.price is not None}


def test_few_rows_over_time_are_read_in_one_scan_and_sorted_once(
    lake: Lake, spark: SparkSession
) -> None:
    chance = random.Random(3)
    changes = [[Change(("é1", 1), at, 900 + at, 7)] for at in (4, 2, 6)]
    reader = stored(
        lake,
        [list(changes_of(chance, by_column=False)[0]), *changes],
        **LAYOUTS["by one column of it"],
    )
    over, at = EntriesOverTime(reader).frame(spark), EntriesAt(reader, day(5)).frame(spark)
    for frame in (reader.history_frame(spark), reader.frame(spark), at, over):
        plan = frame._jdf.queryExecution().executedPlan().toString()
        assert plan.count("FileScan") == 1
        assert "Exchange" not in plan
    joined_by_key = reader.history_frame(spark).groupBy("item", "shop").count()
    plan = joined_by_key._jdf.queryExecution().executedPlan().toString()
    assert plan.count("Sort [") == 1, "what meets the rows by their key finds them in its order"


def test_a_scan_of_history_joins_without_an_exchange(
    lake: Lake, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{READER}._SORTED_ROWS", 0)
    chance = random.Random(3)
    generations = [list(changes_of(chance, by_column=False)[0]), [Change(("é1", 1), 4, 900, 7)]]
    for stays in (1, 2):
        reader = stored(lake, generations[:stays], **LAYOUTS["by one column of it"])
        frame = reader.history_frame(spark)
        grouped = frame.groupBy("item", "shop").count()
        plan = grouped._jdf.queryExecution().executedPlan().toString()
        assert "Exchange hashpartitioning" not in plan
        assert ("Exchange" in plan) == (stays == 2), "only what deltas change is broadcast"


def test_a_version_without_history_and_times_out_of_reach_are_refused(lake: Lake) -> None:
    reader = stored(lake, [[Change(("a", 1), 3, 1, 5)]], **LAYOUTS["by its key"])
    plain = reader.sealed.after(history=None, generations=(Generation(1, "nothing", ()),))
    with pytest.raises(DatasetError, match="keeps no history"):
        EntriesOverTime(VersionReader(lake.store, "prices", plain))
    with pytest.raises(ConfigurationError) as caught:
        EntriesAt(reader, dt.datetime(2026, 1, 1))
    assert (caught.value.dataset, caught.value.argument) == ("prices", "moment")
    kept = KeptHistory(pruned=to_microseconds(day(3)))
    pruned = VersionReader(lake.store, "prices", reader.sealed.after(history=kept))
    with pytest.raises(DatasetError, match=r"its history begins at 2026-01-04 00:00:00\+00:00"):
        EntriesAt(pruned, day(2))
