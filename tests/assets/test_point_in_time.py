"""Training sets, against plain Python: each record with the entry that was valid at its time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.reading import valid_time
from dagster_adjunct.assets.reading.dataset import Dataset, open_dataset
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError, SchemaMismatchError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.records import frame_from_arrow
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams

START = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
Versions = dict[int, dict[tuple[str, int], int]]


def delivered(folder: Path, versions: Versions) -> Dataset:
    """Return a bounded dataset keyed by (k, part), whose versions are valid from these hours on."""
    lake = open_lake(f"file://{folder}")
    streams = LakeStreams(lake)
    schema = Schema.of(k="string", part="int", v="int", home={"city": "string"})
    streams.create("rows", schema=schema, key=["k"], partitions=2)
    dataset = bounded_dataset(
        "rows",
        input="lake.rows",
        key=["k", "part"],
        partition_by="k",
        partitions=2,
        valid_from="marker",
    )
    for number, (hour, entries) in enumerate(sorted(versions.items())):
        rows = [
            {"k": k, "part": part, "v": v, "home": {"city": f"{k}{v}"}}
            for (k, part), v in entries.items()
        ]
        name = f"v{number}"
        streams.append("rows", rows, producer=name, sequence=0)
        valid_from = START + hour * HOUR
        streams.append_markers("rows", name, producer=name, sequence=1, valid_from=valid_from)
        advance_dataset(dataset, lake=lake, systems={"lake": streams}, spark=IN_PROCESS, by="me")
    return open_dataset(lake, "rows")


def expected(
    versions: Versions, key: tuple[str | None, int], hour: int | None, max_age: int | None
) -> int | None:
    known = [start for start in versions if hour is not None and start <= hour]
    if not known or (max_age is not None and hour is not None and hour - max(known) > max_age):
        return None
    return versions[max(known)].get(key)  # type: ignore[arg-type]


def drawn(seed: int) -> tuple[Versions, list[dict[str, Any]]]:
    draw = Random(seed)
    keys = [(k, part) for k in "abc" for part in (1, 2)]
    versions: Versions = {}
    for hour in draw.sample(range(40), 4):
        chosen = draw.sample(keys, draw.randrange(1, 6))
        versions[hour] = {key: draw.randrange(100) for key in chosen}
    records: list[dict[str, Any]] = []
    for number in range(80):
        k, part = draw.choice([*keys, ("z", 1), (None, 1)])
        at = draw.choice([None, *range(-2, 45)])
        time = None if at is None else START + at * HOUR
        records.append({"n": number, "key": k, "part": part, "at": time, "hour": at})
    return versions, records


def table_of(records: list[dict[str, Any]]) -> pa.Table:
    schema = Schema.of(n="int", key="string", part="int", at="timestamp", hour="int")
    return pa.Table.from_pylist(records, schema=schema.to_arrow())


@pytest.mark.parametrize("max_age", [None, 7])
@pytest.mark.parametrize("seed", range(4))
def test_each_record_gets_the_entry_of_its_time(
    tmp_path: Path, seed: int, max_age: int | None
) -> None:
    versions, records = drawn(seed)
    with delivered(tmp_path, versions) as rows:
        joined = rows.point_in_time(
            table_of(records),
            on={"key": "k", "part": "part"},
            as_of="at",
            select=["v", "home.city as town"],
            max_age=None if max_age is None else max_age * HOUR,
        )
    assert joined.column("n").to_pylist() == list(range(80))
    for record in joined.to_pylist():
        value = expected(versions, (record["key"], record["part"]), record["hour"], max_age)
        assert record["v"] == value
        assert record["town"] == (None if value is None else f"{record['key']}{value}")


@pytest.mark.spark
@pytest.mark.parametrize("many", [1, 64])
def test_spark_gives_the_same(
    tmp_path: Path, spark: SparkSession, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valid_time, "_MANY_ROWS", many)
    versions, records = drawn(9)
    options: dict[str, Any] = {
        "on": {"key": "k", "part": "part"},
        "as_of": "at",
        "select": ["v", "home.city as town"],
        "max_age": 9 * HOUR,
    }
    with delivered(tmp_path, versions) as rows:
        here = rows.point_in_time(table_of(records), **options)
        frame = frame_from_arrow(spark, table_of(records))
        there = rows.point_in_time(frame, **options).orderBy("n").toArrow()
    assert there.to_pylist() == here.to_pylist()


def test_a_frame_is_returned_for_a_frame(tmp_path: Path) -> None:
    versions: Versions = {0: {("a", 1): 5}}
    times = [START + HOUR, START - HOUR]
    given = {"k": ["a", "a"], "part": [1, 1], "at": times}
    with delivered(tmp_path, versions) as rows:
        pandas = rows.point_in_time(pd.DataFrame(given), on=["k", "part"], as_of="at", select=["v"])
        polars = rows.point_in_time(pl.DataFrame(given), on=["k", "part"], as_of="at", select=["v"])
    assert isinstance(pandas, pd.DataFrame)
    assert isinstance(polars, pl.DataFrame)
    assert pandas["v"].tolist()[0] == 5
    assert polars["v"].to_list() == [5, None]


@pytest.mark.spark
def test_entries_of_a_change_stream_have_their_own_age(tmp_path: Path, spark: SparkSession) -> None:
    lake = open_lake(f"file://{tmp_path}")
    streams = LakeStreams(lake)
    streams.create(
        "seats", schema=Schema.of(k="string", at="timestamp", v="int"), key=["k"], partitions=1
    )
    rows = [{"k": "a", "at": START + hour * HOUR, "v": 1} for hour in (0, 5)]
    text = f"{int(START.timestamp() * 1_000_000)}|{b'a'.hex()}"
    identity = sha256(text.encode()).hexdigest()[:32]
    streams.append("seats", rows, producer="me", sequence=0)
    seats = unbounded_dataset(
        "seats", input="lake.seats", key="k", partitions=1, history="all", valid_from="at"
    )
    advance_dataset(seats, lake=lake, systems={"lake": streams}, spark=spark, by="me")
    times = pa.table({"k": ["a"] * 3, "when": [START + hour * HOUR for hour in (2, 6, 9)]})
    with open_dataset(lake, "seats") as served:
        for records in (times, frame_from_arrow(spark, times)):
            joined = served.point_in_time(
                records, on="k", as_of="when", select=["v", "interval_id"], max_age=3 * HOUR
            )
            if not isinstance(joined, pa.Table):
                joined = joined.orderBy("when").toArrow()
            assert joined.column("v").to_pylist() == [1, 1, None]
            # The two equal entries are one interval.
            assert joined.column("interval_id").to_pylist() == [identity, identity, None]


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    records = table_of([{"n": 1, "key": "a", "part": 1, "at": START, "hour": 0}])
    on = {"key": "k", "part": "part"}
    with delivered(tmp_path, {2: {("a", 1): 5}}) as rows:
        with pytest.raises(ConfigurationError):
            rows.point_in_time(records, on={"key": "k"}, as_of="at")
        with pytest.raises(SchemaMismatchError) as caught:
            rows.point_in_time(records, on=on, as_of="when")
        assert caught.value.column == "when"
        with pytest.raises(SchemaMismatchError) as caught:
            rows.point_in_time(records, on={"n": "k", "part": "part"}, as_of="at")
        assert caught.value.column == "n"
        naive = records.set_column(
            3, "at", pa.array([START.replace(tzinfo=None)], pa.timestamp("us"))
        )
        with pytest.raises(SchemaMismatchError) as caught:
            rows.point_in_time(naive, on=on, as_of="at")
        assert caught.value.column == "at"
        with pytest.raises(SchemaMismatchError) as caught:
            rows.point_in_time(records, on=on, as_of="at", select=["v as hour"])
        assert caught.value.column == "hour"
        with pytest.raises(SchemaMismatchError):
            rows.point_in_time(records, on=on, as_of="at", select=["nothing"])
        with pytest.raises(ConfigurationError):
            rows.point_in_time(records, on=on, as_of="at", max_age=timedelta(0))
        with pytest.raises(DatasetError):
            rows.point_in_time(records, on=on, as_of="at", before_history="error")
        for wrong in ("records.csv", [1], {"at": [START]}, None):
            with pytest.raises(ConfigurationError, match="no Arrow table, frame, or list of rows"):
                rows.point_in_time(wrong, on=on, as_of="at")
        with pytest.raises(SchemaMismatchError, match="have no columns"):
            rows.point_in_time([], on=on, as_of="at")
