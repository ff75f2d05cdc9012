"""Iceberg and Delta tables that applications and Spark, with the formats' own jars, write and read
in turn; compared with plain Python.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.declaration.table_versions import DeltaVersions, IcebergVersions
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.exchange import DeltaLakeTable, IcebergTable
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.file_streams.delta import DeltaStreams, delta_stream
from dagster_adjunct.resources.file_streams.iceberg import IcebergStreams, iceberg_stream
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.output_tables.opening import AnyOutputTable
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.startpoints import StartpointOldest, Startpoints
from tests.orchestration.step_world import StepWorld
from tests.resources.file_streams.table_lab import Reader
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


def with_maps(rows: list[Row]) -> list[Row]:
    """Return rows of Arrow, whose maps are lists of pairs, with dictionaries."""
    found = []
    for each in rows:
        pairs = each["attributes"]
        found.append({**each, "attributes": None if pairs is None else dict(pairs)})
    return found


@dataclass
class Tables:
    """A table of one format that Spark and applications share."""

    kind: str
    spark: SparkTables
    folder: Path
    catalog: str

    @property
    def table(self) -> AnyOutputTable:
        if self.kind == "iceberg":
            return IcebergTable("shop.orders", self.catalog, ("days(at)",))
        return DeltaLakeTable(f"{self.folder}/orders", ("day",))

    @property
    def name(self) -> str:
        """The table's name in SQL."""
        if self.kind == "iceberg":
            return f"{self.catalog}.shop.orders"
        return f"delta.`{self.folder}/orders`"

    def create(self) -> None:
        """Let Spark create the table."""
        columns = ", ".join(f"{name} {kind}" for name, kind in _COLUMNS.items())
        if self.kind == "iceberg":
            self.spark.run(f"CREATE NAMESPACE {self.catalog}.shop")
        by = "days(at)" if self.kind == "iceberg" else "day"
        self.spark.run(
            f"CREATE TABLE {self.name} ({columns}) USING {self.kind} PARTITIONED BY ({by})"
        )

    def insert(self, *ids: int) -> None:
        """Let Spark append rows."""
        names = ", ".join(_COLUMNS)
        schema = ",".join(f"{name} {kind}" for name, kind in _COLUMNS.items())
        given = ", ".join(f"('{json.dumps(each)}')" for each in as_json([row(one) for one in ids]))
        rows = f"SELECT from_json(text, '{schema}') AS parsed FROM VALUES {given} AS given(text)"
        self.spark.run(f"INSERT INTO {self.name} ({names}) SELECT parsed.* FROM ({rows})")

    def compact(self) -> None:
        """Let Spark rewrite the files."""
        if self.kind == "iceberg":
            options = "options => map('rewrite-all', 'true')"
            self.spark.run(
                f"CALL {self.catalog}.system.rewrite_data_files(table => 'shop.orders', {options})"
            )
        else:
            self.spark.run(f"OPTIMIZE {self.name}")

    def read(self, *names: str) -> list[Row]:
        """Return what Spark reads, by id."""
        self.spark.run(f"REFRESH TABLE {self.name}")
        return self.spark.rows(f"SELECT {', '.join(names)} FROM {self.name} ORDER BY id")


@pytest.fixture(params=["iceberg", "delta"])
def tables(
    request: pytest.FixtureRequest,
    spark_tables: SparkTables,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Tables:
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
    if request.param == "iceberg":
        IcebergTable("shop.orders", name).open()  # makes the tables of the catalogue
        spark_tables.add_catalog(
            name,
            **{"catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog"},
            uri=f"jdbc:sqlite:{tmp_path}/catalog.db",
            warehouse=f"file://{tmp_path}/warehouse",
            **{"cache-enabled": "false"},
        )
    return Tables(request.param, spark_tables, tmp_path, name)


@pytest.fixture
def world(tmp_path: Path) -> StepWorld:
    made = StepWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    made.streams.create("orders", schema=Schema.of(_COLUMNS), key=["id"], partitions=2)
    return made


def send(world: StepWorld, *ids: int) -> None:
    world.send("orders", *(tuple(row(number).values()) for number in ids))


def test_spark_reads_what_applications_wrote_also_after_its_compaction(
    tables: Tables, world: StepWorld
) -> None:
    first = Application("enrich", engine="auto", max_batch_records=10)
    orders = first.input_stream("lake.orders", default_offset="oldest")
    orders.with_columns(twice="id * 2").send_to(
        first.output_table(tables.table, on_replay="replace")
    )
    send(world, *range(24))
    assert world.run(first).batches == 3
    wanted = [row(number) | {"twice": 2 * number} for number in range(24)]
    assert tables.read(*_COLUMNS, "twice") == as_json(wanted)
    assert {each["__source"] for each in tables.read("id", "__source")} == {
        "lake.orders.0",
        "lake.orders.1",
    }
    tables.compact()

    second = Application("enrich", engine="auto", max_batch_records=10)
    orders = second.input_stream("lake.orders", default_offset="oldest")
    kept = orders.filter("sku <> 'sku-1'").with_columns(added="named_struct('half', id / 2)")
    options: dict[str, Any] = {}
    renamed = "sku"
    if tables.kind == "iceberg":  # delta-rs can't rename and drop
        kept = kept.map("* except (sku)", "sku as code")
        options = {"renamed": {"sku": "code"}, "drop": ["twice"]}
        renamed = "code"
    kept.send_to(second.output_table(tables.table, on_replay="replace", **options))
    Startpoints(second, lake=world.lake).request(
        "lake.orders", StartpointOldest(), by="test", reason="test"
    )
    world.run(second)
    send(world, *range(24, 30))
    world.run(second)
    tables.compact()
    wanted = []
    for number in range(30):
        given = row(number)
        sku = given.pop("sku")
        if sku != "sku-1":
            wanted.append(given | {renamed: sku, "added": {"half": number / 2}})
    names = [name for name in _COLUMNS if name != "sku"]
    assert tables.read(*names, renamed, "added") == as_json(wanted)
    if tables.kind == "iceberg":
        assert "twice" not in tables.spark.session.table(tables.name).columns()
    else:
        assert {each["twice"] for each in tables.read("id", "twice")} == {None}


def test_a_table_of_spark_is_appended_to_and_read_as_a_stream_and_as_versions(
    tables: Tables, world: StepWorld
) -> None:
    tables.create()
    tables.insert(0, 1, 2)
    tables.insert(3)
    app = Application("append", engine="auto")
    app.input_stream("lake.orders", default_offset="oldest").send_to(app.output_table(tables.table))
    send(world, 10, 11, 12)
    world.run(app)
    tables.insert(20, 21)
    ids = [0, 1, 2, 3, 10, 11, 12, 20, 21]
    assert tables.read(*_COLUMNS) == as_json([row(number) for number in ids])
    assert [each["__epoch"] for each in tables.read("id", "__epoch")] == [
        *([None] * 4),
        *([0] * 3),
        *([None] * 2),
    ]
    schema = Schema.of(_COLUMNS)
    flat = Schema.of({name: _COLUMNS[name] for name in ("id", "sku", "at")})
    if isinstance(tables.table, IcebergTable):
        stream = iceberg_stream(f"s{uuid4().hex}", tables.table, schema=schema)
        system: Any = IcebergStreams(world.lake)
        versions: Any = IcebergVersions(tables.table, flat)
    else:
        stream = delta_stream(f"s{uuid4().hex}", tables.table.url, schema=schema)
        system = DeltaStreams(world.lake)
        versions = DeltaVersions(tables.table.url, flat)
    read = with_maps(Reader(system, stream).rows())
    assert sorted(read, key=lambda each: each["id"]) == [row(number) for number in ids]
    tables.compact()
    assert with_maps(Reader(system, stream).rows()) == read
    spec = bounded_dataset("orders", input=versions, key="id", partitions=2)
    advance_dataset(spec, lake=world.lake, systems={}, spark=IN_PROCESS, by="test")
    with open_dataset(world.lake, spec) as served:
        found = {entry["id"]: (entry["sku"], entry["at"]) for _, entry in served.items()}
    assert found == {number: (row(number)["sku"], row(number)["at"]) for number in ids}
