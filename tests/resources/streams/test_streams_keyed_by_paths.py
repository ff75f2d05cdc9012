"""Lake streams whose keys are values inside columns, against streams with flat keys and plain
Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.exchange.handover import pyarrow_dataset, stream_view
from dagster_adjunct.assets.exchange.iceberg import register_in_iceberg
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    SchemaMismatchError,
    StreamExistsError,
)
from dagster_adjunct.resources.files.formats import DeclaredFiles, read_files
from dagster_adjunct.resources.files.tree import LocalTree
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema, is_key_type
from dagster_adjunct.resources.schemas.types import Simple, Struct, Type, parse_type, write_name
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy
from dagster_adjunct.resources.streams.lake.repartition import repartition
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.clocks import Clock, on_clock
from tests.nested import comparable, draw_rows, draw_schema
from tests.resources.streams.test_nested_streams import as_arrow

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

Rows = list[dict[str, Any]]
Steps = tuple[str, ...]


@pytest.mark.parametrize("device", [{}, {"site": None}])
def test_the_advice_for_a_missing_part_of_the_key_works(
    tmp_path: Path, device: dict[str, Any]
) -> None:
    streams = LakeStreams(open_lake(tmp_path / "lake"))
    schema = Schema.of(n="int", device={"id": "string", "site": "string"})
    streams.create("s", schema=schema, key=["device.id"], partitions=1)
    with pytest.raises(SchemaMismatchError) as caught:
        streams.append("s", [{"n": 1, "device": device}], producer="p", sequence=1)
    advised = {"device": {"id": None}}
    assert repr(advised) in caught.value.next_step
    streams.append("s", [{"n": 1, **advised}], producer="p", sequence=1)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.jsonl").write_text(json.dumps({"device": device}))
    tree = LocalTree(str(tmp_path / "files"))
    files = DeclaredFiles(tree, "jsonl", schema, "files", required=("device.id",))
    with pytest.raises(SchemaMismatchError) as caught:
        read_files(files, tree.list())
    assert '"device": {"id": null}' in caught.value.next_step


def find_paths(type_: Type, steps: Steps) -> Iterator[tuple[Steps, str]]:
    """Yield the steps to the values that can be keys, and their types."""
    if isinstance(type_, Simple) and is_key_type(type_.name):
        yield steps, type_.name
    if isinstance(type_, Struct):
        for member in type_.members:
            yield from find_paths(member.type, (*steps, member.name))


def value_at(row: Any, steps: Steps) -> Any:
    for step in steps:
        row = None if row is None else row[step]
    return row


class Drawn:
    """A stream with a drawn key, and one with the same values in columns."""

    def __init__(self, drawn: Random, streams: LakeStreams) -> None:
        self.streams = streams
        found: list[tuple[Steps, str]] = []
        while not found:
            self.schema = draw_schema(drawn)
            found = [
                found
                for field in self.schema.fields
                for found in find_paths(parse_type(field.type), (field.name,))
                if len(found[0]) > 1
            ]
        self.key = drawn.sample(found, min(len(found), drawn.randint(1, 2)))
        self.rows = draw_rows(drawn, self.schema, range(12))
        self.name = f"s{len(streams.list_streams())}"
        paths = [".".join(map(write_name, steps)) for steps, _ in self.key]
        streams.create(self.name, schema=self.schema, key=paths, partitions=3)
        kinds = {f"key{place}": kind for place, (_, kind) in enumerate(self.key)}
        flat = Schema.of({"k": "bigint"} | kinds)
        streams.create(f"flat-{self.name}", schema=flat, key=list(kinds), partitions=3)
        rows = [
            {"k": row["k"]}
            | {f"key{at}": value_at(row, steps) for at, (steps, _) in enumerate(self.key)}
            for row in self.rows
        ]
        streams.append(f"flat-{self.name}", rows, producer="p", sequence=1)

    def placed(self, table: Any) -> dict[int, tuple[int, Any]]:
        """Return the partition of each record, and the record."""
        found = {}
        for row in table.to_pylist(maps_as_pydicts="strict"):
            own = {name: row[name] for name in row if not name.startswith("__")}
            found[row["k"]] = row["__partition"], comparable(own)
        return found

    def check(self, table: Any, partitions: int | None = None) -> None:
        flat = f"flat-{self.name}"
        if partitions is not None:
            more = repartition(
                self.streams, flat, partitions, reason="more", by="ada", check=lambda state: None
            )
            assert more is not None
        beside = self.streams.read_arrow(self.streams.all_ranges(flat), ["k"]).to_pylist()
        places = {row["k"]: row["__partition"] for row in beside}
        rows = {row["k"]: comparable(row) for row in self.rows}
        assert self.placed(table) == {k: (places[k], row) for k, row in rows.items()}

    def read(self) -> Any:
        return self.streams.read_arrow(self.streams.all_ranges(self.name))


@pytest.mark.parametrize("seed", range(8))
def test_records_are_in_the_partitions_of_a_flat_key(seed: int, tmp_path: Path) -> None:
    clock = Clock()
    streams = LakeStreams(on_clock(open_lake(tmp_path), clock))
    made = Drawn(Random(seed), streams)
    streams.append(made.name, made.rows[:6], producer="p", sequence=1)
    streams.append(made.name, as_arrow(made.rows[6:], made.schema), producer="p", sequence=2)
    made.check(made.read())
    streams.configure(made.name, retention=None, compaction=CompactionPolicy(min_segments=2))
    streams.maintain(made.name, clock.forward(hours=3))
    repartition(streams, made.name, 5, reason="more", by="ada", check=lambda state: None)
    made.check(made.read(), partitions=5)
    handed = pyarrow_dataset(stream_view(streams.lake, made.name)).to_table()
    assert handed.column_names == [*made.schema.names, "__tombstone", "__epoch"]


@pytest.mark.spark
@pytest.mark.lengthy
def test_spark_writes_and_reads_the_same_partitions(spark: SparkSession, tmp_path: Path) -> None:
    streams = LakeStreams(open_lake(str(tmp_path)))
    for seed in range(3):
        made = Drawn(Random(100 + seed), streams)
        frame = spark.createDataFrame(as_arrow(made.rows, made.schema))
        streams.append(made.name, frame, producer="p", sequence=1)
        assert streams.append(made.name, made.rows, producer="p", sequence=1).duplicate
        made.check(made.read())
        found = streams.read(spark, streams.all_ranges(made.name))
        assert not any(name.startswith("__key") for name in found.columns)
        made.check(found.toArrow())


@pytest.mark.lengthy
def test_an_iceberg_table_does_not_show_the_copies_of_keys(tmp_path: Path) -> None:
    sql = pytest.importorskip("pyiceberg.catalog.sql")
    kinds = ["string", "tinyint", "smallint", "int", "date", "timestamp", "binary", "decimal(9,2)"]
    schema = Schema.of(no="int", at={f"v{number}": kind for number, kind in enumerate(kinds)})
    streams = LakeStreams(open_lake(tmp_path / "lake"))
    keys = [f"at.v{number}" for number in range(len(kinds))]
    streams.create("s", schema=schema, key=keys, partitions=2)
    streams.append("s", [{"no": 1, "at": None}], producer="p", sequence=1)
    (tmp_path / "warehouse").mkdir()
    uri = f"sqlite:///{tmp_path}/catalog.db"
    catalog = sql.SqlCatalog("me", uri=uri, warehouse=str(tmp_path / "warehouse"))
    catalog.create_namespace("out")
    register_in_iceberg(stream_view(streams.lake, "s"), catalog, "out.s")
    (row,) = catalog.load_table("out.s").scan().to_arrow().to_pylist()
    assert row == {"no": 1, "at": None, "__tombstone": False, "__epoch": None}


ORDERS = Schema.of(no="int", customer={"id": "int", "home": {"city": "string"}})


@pytest.mark.parametrize(
    ("renamed", "drop"),
    [
        ({"customer.id": "number"}, ()),
        ({"customer": "buyer"}, ()),
        ({}, ("customer",)),
        ({}, ("customer.id",)),
    ],
)
def test_what_is_on_the_path_of_a_key_stays(
    streams: LakeStreams, renamed: dict[str, str], drop: tuple[str, ...]
) -> None:
    streams.create("s", schema=ORDERS, key=["customer.id"], partitions=2)
    with pytest.raises(SchemaMismatchError, match="a part of the key"):
        streams.change_columns("s", renamed=renamed, drop=drop)
    done = streams.change_columns("s", renamed={"customer.home": "town"}, drop=["no"])
    assert len(done) == 2
    assert streams.info("s").key == ("customer.id",)


@pytest.mark.parametrize(
    "columns",
    [
        {"no": "int", "customer": {"id": "bigint", "home": {"city": "string"}}},  # wider
        {**ORDERS.types, "customer.id": "int"},  # a column that the key would mean
    ],
)
def test_a_key_keeps_its_type_and_its_meaning(streams: LakeStreams, columns: Any) -> None:
    streams.create("s", schema=ORDERS, key=["customer.id"], partitions=2)
    with pytest.raises(StreamExistsError, match=r"customer\.id"):
        streams.create("s", schema=Schema.of(columns), key=["customer.id"], partitions=2)


def test_a_key_has_one_spelling_and_each_part_once(streams: LakeStreams) -> None:
    streams.create("s", schema=ORDERS, key=["`customer`.`id`"], partitions=2)
    assert streams.create("s", schema=ORDERS, key=["customer.id"], partitions=2).key == (
        "customer.id",
    )
    with pytest.raises(ConfigurationError, match="twice"):
        streams.create("t", schema=ORDERS, key=["customer.id", "customer.`id`"], partitions=2)


@pytest.mark.parametrize(
    ("row", "missing"), [({"no": 1}, "customer"), ({"customer": {"no": 1}}, "customer.id")]
)
def test_a_row_without_the_key_is_a_mistake(
    streams: LakeStreams, row: dict[str, Any], missing: str
) -> None:
    streams.create("s", schema=ORDERS, key=["customer.id"], partitions=2)
    streams.append("s", [{"customer": None}], producer="p", sequence=1)
    with pytest.raises(SchemaMismatchError) as failure:
        streams.append("s", [row], producer="p", sequence=2)
    assert failure.value.column == missing
