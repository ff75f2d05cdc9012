"""Applications and datasets over Iceberg and Delta tables, by both engines."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pytest

from dagster_adjunct import (
    IN_PROCESS,
    Application,
    LakeStreams,
    delta_stream,
    iceberg_stream,
    run_application,
    unbounded_dataset,
)
from dagster_adjunct.exchange import IcebergTable
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from dagster_adjunct.startpoints import Startpoints, StartpointTimestamp
from tests.resources.file_streams.table_lab import DeltaLab, IcebergLab, iceberg_lab

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = pa.schema([("id", pa.int64()), ("customer", pa.string()), ("size", pa.int32())])
CUSTOMERS = pa.schema([("customer", pa.string()), ("city", pa.string())])


def orders(*ids: int) -> pa.Table:
    rows = [{"id": n, "customer": f"c{n % 4}", "size": n * 10} for n in ids]
    return pa.Table.from_pylist(rows, ORDERS)


def customers(**cities: str) -> pa.Table:
    rows = [{"customer": name, "city": city} for name, city in cities.items()]
    return pa.Table.from_pylist(rows, CUSTOMERS)


class World:
    """Orders in an Iceberg table, customers in a Delta table, and an application that joins
    them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, engine: str) -> None:
        monkeypatch.setattr("dagster_adjunct.resources.file_streams.streams._declared", {})
        self.iceberg: IcebergLab = iceberg_lab(monkeypatch, folder)
        self.lake = self.iceberg.lake
        self.delta = DeltaLab(self.lake, str(folder / "tables"))
        self.orders: Any = self.iceberg.create(ORDERS)
        self.delta.write(customers(c0="Ulm", c1="Bonn"), "customers")
        app = Application("shop", engine=engine)  # type: ignore[arg-type]
        known = unbounded_dataset(
            "customers",
            input=delta_stream("customers", self.delta.place("customers"), key=["customer"]),
            key="customer",
            partitions=2,
        )
        table = IcebergTable("raw.events", "lab")
        stream = app.input_stream(iceberg_stream("orders", table), default_offset="oldest")
        joined = stream.partition_by("customer", partitions=2).join(
            app.table(known), on="customer", select=["city"], how="left"
        )
        joined.send_to(app.output_stream("lake.enriched", partitions=2, key="customer"))
        self.app = app

    def run(self, spark: Any) -> None:
        run_application(self.app, lake=self.lake, spark=spark)

    def results(self) -> list[tuple[Any, ...]]:
        streams = LakeStreams(self.lake)
        found = streams.read_arrow(streams.all_ranges("enriched"))
        return sorted(
            (row["id"], row["customer"], row["size"], row["city"], row["__epoch"])
            for row in found.to_pylist()
        )

    def expected(self, *, since_ms: int = 0) -> list[tuple[Any, ...]]:
        """Return what DuckDB joins of the tables."""
        snapshots = [
            one for one in self.orders.refresh().snapshots() if one.timestamp_ms >= since_ms
        ]
        fresh = {one.snapshot_id for one in snapshots}
        entries = self.orders.inspect.entries().to_pylist()
        paths = [one["data_file"]["file_path"] for one in entries if one["snapshot_id"] in fresh]
        known = self.delta.load("customers").to_pyarrow_table()
        found = duckdb.sql(
            "SELECT id, o.customer, size, city FROM read_parquet($paths) o"
            " LEFT JOIN known k ON o.customer = k.customer ORDER BY ALL",
            params={"paths": paths},
        ).fetchall()
        assert known.num_rows
        return found


@pytest.mark.spark
@pytest.mark.parametrize("engine", ["auto", "spark"])
def test_tables_are_joined_as_they_grow_and_replayed_from_a_snapshots_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, spark: SparkSession
) -> None:
    session: Callable[[], SparkSession] | Any = spark if engine == "spark" else IN_PROCESS
    world = World(monkeypatch, tmp_path, engine)
    world.orders.append(orders(0, 1, 2))
    world.run(session)
    assert [row[:4] for row in world.results()] == world.expected()
    world.delta.write(customers(c2="Köln", c3="Trier"), "customers")
    world.delta.load("customers").optimize.compact()
    world.orders.append(orders(4, 5))
    world.orders.append(orders(6, 7))
    world.run(session)
    first = world.results()
    newer = [row for row in world.expected() if row[0] > 2]
    assert [row[:4] for row in first if row[0] > 2] == newer
    assert [row[3] for row in first if row[0] <= 2] == ["Ulm", "Bonn", None]
    second = world.orders.refresh().snapshots()[1].timestamp_ms
    Startpoints(world.app, lake=world.lake).request(
        "iceberg.orders.0", StartpointTimestamp(second), by="ada", reason="again"
    )
    world.run(session)
    replayed = [row[:4] for row in world.results() if row[4] == 1]
    assert replayed == world.expected(since_ms=second) == newer


@pytest.mark.spark
def test_spark_reads_the_records_that_this_process_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> None:
    nested = pa.schema(
        [
            ("id", pa.int64()),
            ("at", pa.timestamp("us", "UTC")),
            ("price", pa.decimal128(9, 2)),
            ("s", pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])),
            ("m", pa.map_(pa.string(), pa.int64())),
        ]
    )
    rows = [
        {
            "id": 0,
            "at": 1_700_000_000_123_456,
            "price": None,
            "s": {"a": 1, "b": ["x", None]},
            "m": [("k", 1)],
        },
        {"id": 1, "at": None, "price": 1, "s": None, "m": []},
        {"id": 2, "at": 0, "price": None, "s": {"a": None, "b": []}, "m": [("a", None)]},
    ]
    table = pa.Table.from_pylist(rows, nested)
    lab = iceberg_lab(monkeypatch, tmp_path)
    for name, value in os.environ.items():
        if name.startswith("PYICEBERG_"):  # as on executors, where the catalogue is configured too
            monkeypatch.setitem(spark.sparkContext.environment, name, value)
    iceberg = lab.create(nested)
    delta = DeltaLab(lab.lake, str(tmp_path / "tables"))
    for _ in range(2):
        iceberg.append(table)
        delta.write(table, partition_by=["id"], configuration={"delta.columnMapping.mode": "name"})
    for stream in (lab.stream(), delta.stream()):
        expected = stream.table()
        for start, end in [(0, 6), (1, 5), (2, 3)]:
            ranges = {
                SystemStreamPartition.parse(f"{stream.name}.0"): OffsetRange(str(start), str(end))
            }
            read = stream.system.read(spark, ranges).orderBy("__offset").toArrow()
            assert read.cast(expected.schema).equals(expected.slice(start, end - start))
