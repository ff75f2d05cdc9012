"""Iceberg tables that applications write, read and compacted by Spark with Iceberg's own jars;
compared with plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from dagster_adjunct.exchange import IcebergTable
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.startpoints import StartpointOldest, Startpoints
from tests.orchestration.step_world import StepWorld
from tests.servers.spark_tables import SparkTables

Row = dict[str, Any]
_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
_COLUMNS = {
    "id": "bigint",
    "sku": "string",
    "at": "timestamp",
    "day": "date",
    "lines": "array<struct<n:int,marks:array<string>>>",
    "attributes": "map<string,struct<sizes:array<int>>>",
    "place": "struct<city:string,zip:int>",
}


def row(number: int) -> Row:
    """Return a record; its nested values are null, empty, or have nulls in them."""
    at = _BEGIN + timedelta(hours=7 * number)
    lines = [None, [], [{"n": number, "marks": ["a", None]}, {"n": None, "marks": None}, None]]
    attributes = [{"a": {"sizes": [1, None]}, "b": None, "c": {"sizes": None}}, None, {}]
    place = [{"city": None, "zip": None}, {"city": "Ulm", "zip": number}, None]
    return {
        "id": number,
        "sku": f"sku-{number % 5}",
        "at": at,
        "day": at.date(),
        "lines": lines[number % 3],
        "attributes": attributes[number % 3],
        "place": place[number % 3],
    }


def as_json(rows: list[Row]) -> list[Row]:
    """Return rows as Spark has them in JSON."""
    found = []
    for each in rows:
        times = {"at": f"{each['at']:%Y-%m-%dT%H:%M:%S}.000Z", "day": each["day"].isoformat()}
        found.append({**each, **{name: times[name] for name in times if name in each}})
    return found


@dataclass
class Orders:
    """The table `shop.orders` of a catalogue that Spark and applications share."""

    spark: SparkTables
    catalog: str

    @property
    def table(self) -> IcebergTable:
        return IcebergTable("shop.orders", self.catalog, ("days(at)",))

    @property
    def name(self) -> str:
        """The table's name in SQL."""
        return f"{self.catalog}.shop.orders"

    def compact(self) -> None:
        """Let Spark rewrite the files."""
        options = "options => map('rewrite-all', 'true')"
        self.spark.run(
            f"CALL {self.catalog}.system.rewrite_data_files(table => 'shop.orders', {options})"
        )

    def read(self, *names: str) -> list[Row]:
        """Return what Spark reads, by id."""
        self.spark.run(f"REFRESH TABLE {self.name}")
        return self.spark.rows(f"SELECT {', '.join(names)} FROM {self.name} ORDER BY id")


@pytest.fixture
def orders(spark_tables: SparkTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Orders:
    import pyiceberg.catalog
    from pyiceberg.utils.config import Config

    name = f"c{uuid4().hex}"
    settings = {
        "TYPE": "sql",
        "URI": f"sqlite:///{tmp_path}/catalog.db",
        "WAREHOUSE": f"file://{tmp_path}/warehouse",
    }
    for setting, value in settings.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__{name.upper()}__{setting}", value)
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    IcebergTable("shop.orders", name).open()  # makes the tables of the catalogue
    spark_tables.add_catalog(
        name,
        **{"catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog"},
        uri=f"jdbc:sqlite:{tmp_path}/catalog.db",
        warehouse=f"file://{tmp_path}/warehouse",
        **{"cache-enabled": "false"},
    )
    return Orders(spark_tables, name)


@pytest.fixture
def world(tmp_path: Path) -> StepWorld:
    made = StepWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    made.streams.create("orders", schema=Schema.of(_COLUMNS), key=["id"], partitions=2)
    return made


def send(world: StepWorld, *ids: int) -> None:
    world.send("orders", *(tuple(row(number).values()) for number in ids))


def test_spark_reads_what_applications_wrote_also_after_its_compaction(
    orders: Orders, world: StepWorld
) -> None:
    first = Application("enrich", engine="auto", max_batch_records=10)
    records = first.input_stream("lake.orders", default_offset="oldest")
    records.with_columns(twice="id * 2").send_to(
        first.output_table(orders.table, on_replay="replace")
    )
    send(world, *range(24))
    assert world.run(first).batches == 3
    wanted = [row(number) | {"twice": 2 * number} for number in range(24)]
    assert orders.read(*_COLUMNS, "twice") == as_json(wanted)
    assert {each["__source"] for each in orders.read("id", "__source")} == {
        "lake.orders.0",
        "lake.orders.1",
    }
    orders.compact()

    second = Application("enrich", engine="auto", max_batch_records=10)
    records = second.input_stream("lake.orders", default_offset="oldest")
    kept = records.filter("sku <> 'sku-1'").with_columns(added="named_struct('half', id / 2)")
    kept.map("* except (sku)", "sku as code").send_to(
        second.output_table(
            orders.table, on_replay="replace", renamed={"sku": "code"}, drop=["twice"]
        )
    )
    Startpoints(second, lake=world.lake).request(
        "lake.orders", StartpointOldest(), by="test", reason="test"
    )
    world.run(second)
    send(world, *range(24, 30))
    world.run(second)
    orders.compact()
    wanted = []
    for number in range(30):
        given = row(number)
        code = given.pop("sku")
        if code != "sku-1":
            wanted.append(given | {"code": code, "added": {"half": number / 2}})
    names = [name for name in _COLUMNS if name != "sku"]
    assert orders.read(*names, "code", "added") == as_json(wanted)
    assert "twice" not in orders.spark.session.table(orders.name).columns()
