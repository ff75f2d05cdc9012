"""Columns of versions that are renamed, dropped, added again, reordered and widened: each version
has the names of its time, and joins give every version the names of now.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import BoundedDataset, QuerySource, bounded_dataset
from dagster_adjunct.assets.exchange.handover import (
    duckdb_view,
    parquet_files,
    polars_frame,
    pyarrow_dataset,
)
from dagster_adjunct.assets.exchange.iceberg import register_in_iceberg
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.verification import verify_version
from dagster_adjunct.assets.reading.version_reader import VersionReader, read_entries
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.evolving import Evolving, Part, named_now, shown
from tests.rounds import rounds

Entries = dict[int, dict[str, Any]]


def spec_of(
    schema: Schema,
    entries: Entries,
    renamed: dict[str, str] | None = None,
    drop: list[str] | None = None,
    **options: Any,
) -> BoundedDataset:
    rows = [{"k": key, **entry} for key, entry in entries.items()]
    table = pa.Table.from_pylist(rows, schema.to_arrow())
    source = QuerySource(lambda spark, asked: table, schema, allow_empty=True)
    return bounded_dataset(
        "planes", input=source, key="k", partitions=2, renamed=renamed, drop=drop or (), **options
    )


def read_by_arrow(view: VersionReader) -> Entries:
    rows = read_entries(view, None).to_pylist()
    found = {row.pop("k"): row for row in rows}
    for key, entry in found.items():
        assert view.get(key) == {"k": key, **entry}
    return found


def read_by_spark(view: VersionReader, spark: Any) -> Entries:
    rows = [row.asDict(recursive=True) for row in view.frame(spark).collect()]
    return {row.pop("k"): row for row in rows}


def seal(world: World, evolving: Evolving, values: dict[int, dict[int, Any]]) -> str:
    entries = {key: shown(held, evolving.columns) for key, held in values.items()}
    report = world.advance(spec_of(evolving.schema, entries, evolving.renamed, evolving.drop))
    assert report.version is not None
    return report.version


def check_history(world: World, seed: int, read: Any) -> None:
    """Draw versions and changes between them, and compare every version with plain Python; by Spark
    only at the end.
    """
    evolving = Evolving(Random(seed))
    history: dict[str, tuple[list[Part], dict[int, dict[int, Any]]]] = {}
    for step in range(6):
        values = {key: evolving.draw_values() for key in range(5)}
        version = seal(world, evolving, values)
        history.setdefault(version, (deepcopy(evolving.columns), values))
        if world.spark is IN_PROCESS or step == 5:
            compare(world, history, evolving.columns, read)
        evolving.step()


def compare(
    world: World,
    history: dict[str, tuple[list[Part], dict[int, dict[int, Any]]]],
    current: list[Part],
    read: Any,
) -> None:
    then = StoredVersions(world.lake, "planes")
    now = StoredVersions(world.lake, "planes", named_now=True)
    for version, (columns, held) in history.items():
        view = then.version(version)
        assert read(view) == {key: shown(each, columns) for key, each in held.items()}
        assert verify_version(view, deep=True).damaged == ()
        named = named_now(columns, current)
        expected = {key: shown(each, named) for key, each in held.items()}
        assert read(now.version(version)) == expected


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(4, 8)))
def test_every_version_has_the_names_of_then_and_joins_those_of_now(
    world: World, seed: int
) -> None:
    world.spark = IN_PROCESS
    check_history(world, seed, read_by_arrow)


@pytest.mark.spark
@pytest.mark.parametrize("seed", [100, pytest.param(101, marks=pytest.mark.long)])
def test_spark_reads_every_version_as_plain_python_does(sparkling: World, seed: int) -> None:
    check_history(sparkling, seed, lambda view: read_by_spark(view, sparkling.spark()))


def renamed_planes(world: World, *, nested: bool = False) -> StoredVersions:
    """Build a version, and one in which a column was renamed, and one was added under its name."""
    world.spark = IN_PROCESS
    home = {"home": {"city": "string"}} if nested else {}
    at_home = {"home": {"city": "Oslo"}} if nested else {}
    before = Schema.of({"k": "bigint", "note": "string", **home})
    world.advance(spec_of(before, {1: {"note": "old", **at_home}}))
    home = {"home": {"town": "string"}} if nested else {}
    at_home = {"home": {"town": "Rome"}} if nested else {}
    after = Schema.of({"k": "bigint", "memo": "string", **home})
    renamed = {"note": "memo", "home.city": "town"}
    world.advance(spec_of(after, {1: {"memo": "new", **at_home}}, renamed))
    again = Schema.of({"k": "bigint", "memo": "string", "note": "bigint", **home})
    world.advance(spec_of(again, {1: {"memo": "new", "note": 7, **at_home}}))
    return StoredVersions(world.lake, "planes")


@pytest.mark.parametrize("nested", [False, True])
def test_other_engines_see_the_names_of_each_version(world: World, nested: bool) -> None:
    stored = renamed_planes(world, nested=nested)
    first, second, third = (ref.id for ref in stored.manifest().versions)
    old = {"home": {"city": "Oslo"}} if nested else {}
    new = {"home": {"town": "Rome"}} if nested else {}
    connection = duckdb.connect()
    for version, expected in (
        (first, {"k": 1, "note": "old", **old}),
        (second, {"k": 1, "memo": "new", **new}),
        (third, {"k": 1, "memo": "new", "note": 7, **new}),
    ):
        view = stored.version(version)
        assert pyarrow_dataset(view).to_table().to_pylist() == [expected]
        duckdb_view(connection, view, "planes")
        assert connection.sql("SELECT * FROM planes").to_arrow_table().to_pylist() == [expected]
        assert polars_frame(view).collect().to_dicts() == [expected]
    assert parquet_files(stored.version(first))
    with pytest.raises(DatasetError) as caught:
        parquet_files(stored.version(third))
    assert caught.value.dataset == "planes"


@pytest.mark.parametrize("path", ["home.park", "sites[].park", "park"])
def test_a_rename_to_what_the_version_does_not_have_is_refused(world: World, path: str) -> None:
    """A mistyped new name would take the column away for good."""
    world.spark = IN_PROCESS

    def columns(name: str) -> dict[str, Any]:
        inner = {"lat": "int", name: "string"}
        return {"k": "bigint", name: "string", "home": inner, "sites": [inner]}

    def advance(name: str, **renamed: str) -> str | None:
        others = dict.fromkeys(("home.park", "sites[].park", "park"), name)
        schema = Schema.of(columns(name))
        entry = {name: "a", "home": {"lat": 1, name: "b"}, "sites": [{"lat": 2, name: "c"}]}
        spec = spec_of(schema, {1: entry}, others | renamed if renamed else None)
        return world.advance(spec).version

    first = advance("park")
    with pytest.raises(DatasetError) as caught:
        advance("farm", **{path: "farn"})
    assert f"{path} is renamed to farn" in caught.value.problem
    assert path.replace("park", "farm") in caught.value.problem
    second = advance("farm", **{path: "farm"})
    assert second != first
    now = StoredVersions(world.lake, "planes", named_now=True)
    assert first is not None
    before = {"farm": "a", "home": {"lat": 1, "farm": "b"}, "sites": [{"lat": 2, "farm": "c"}]}
    assert read_by_arrow(now.version(first)) == {1: before}


def test_a_diff_follows_columns_and_not_names(world: World) -> None:
    stored = renamed_planes(world)
    first, _, third = (ref.id for ref in stored.manifest().versions)
    diff = stored.diff(first, third)
    assert (diff.columns.added, diff.columns.removed) == (("note",), ())
    assert diff.columns.renamed == (("note", "memo"),)
    assert diff.columns.retyped == ()
    (change,) = diff.sample.changed
    assert change.old == {"k": 1, "memo": "old"}
    assert change.new == {"k": 1, "memo": "new", "note": 7}


def test_a_diff_lists_the_members_that_changed(world: World) -> None:
    world.spark = IN_PROCESS
    inner = {"city": "string", "lat": "int", "zip": "int"}
    before = Schema.of(k="bigint", home=inner, sites=[{"lat": "int"}])
    world.advance(spec_of(before, {1: {"home": {"city": "Oslo", "lat": 1, "zip": 2}}}))
    moved = {"town": "string", "lat": "bigint", "more": "int"}
    after = Schema.of(k="bigint", home=moved, sites=[{"width": "int"}])
    changes = {"home.city": "town", "sites[].lat": "width"}
    world.advance(spec_of(after, {1: {"home": {"town": "Oslo", "lat": 1}}}, changes, ["home.zip"]))
    stored = StoredVersions(world.lake, "planes")
    diff = stored.diff(*(ref.id for ref in stored.manifest().versions))
    assert (diff.columns.added, diff.columns.removed) == (("home.more",), ("home.zip",))
    assert diff.columns.renamed == (("home.city", "home.town"), ("sites[].lat", "sites[].width"))
    assert diff.columns.retyped == (("home.lat", "int", "bigint"),)


@pytest.mark.parametrize("nested", [False, True])
def test_an_iceberg_table_renames_fields_and_adds_a_name_that_comes_again(
    world: World, tmp_path: Path, nested: bool
) -> None:
    pytest.importorskip("pyiceberg.catalog.sql")
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("test", uri=f"sqlite:///{tmp_path}/c.db", warehouse=str(tmp_path))
    catalog.create_namespace("reference")
    stored = renamed_planes(world, nested=nested)
    old = {"home": {"city": "Oslo"}} if nested else {}
    new = {"home": {"town": "Rome"}} if nested else {}
    snapshots = []
    expected = (
        {"k": 1, "note": "old", **old},
        {"k": 1, "memo": "new", **new},
        {"k": 1, "memo": "new", "note": 7, **new},
    )
    ids = []
    for ref, row in zip(stored.manifest().versions, expected, strict=True):
        registered = register_in_iceberg(stored.version(ref.id), catalog, "reference.planes")
        table = catalog.load_table("reference.planes")
        assert table.scan().to_arrow().to_pylist() == [row]
        snapshots.append(registered.snapshot_id)
        ids.append({field.name: field.field_id for field in table.schema().fields})
    assert ids[1]["memo"] == ids[0]["note"], "renamed, not added"
    assert ids[2]["memo"] == ids[0]["note"]
    assert ids[2]["note"] not in ids[0].values()
    for snapshot, row in zip(snapshots, expected, strict=True):
        assert table.scan(snapshot_id=snapshot).to_arrow().to_pylist() == [row]
    first = stored.manifest().versions[0].id
    register_in_iceberg(stored.version(first), catalog, "reference.planes", replace_newer=True)
    table = catalog.load_table("reference.planes")
    (row,) = table.scan().to_arrow().to_pylist()
    assert row == {"k": 1, "memo": "old", "note": None} | (
        {"home": {"town": "Oslo"}} if nested else {}
    )


def test_an_iceberg_table_loses_a_dropped_column(world: World, tmp_path: Path) -> None:
    pytest.importorskip("pyiceberg.catalog.sql")
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("test", uri=f"sqlite:///{tmp_path}/c.db", warehouse=str(tmp_path))
    catalog.create_namespace("reference")
    world.spark = IN_PROCESS
    stored = StoredVersions(world.lake, "planes")
    both = Schema.of(k="bigint", note="string", seats="int")
    one = Schema.of(k="bigint", seats="int")
    world.advance(spec_of(both, {1: {"note": "old", "seats": 1}}))
    register_in_iceberg(stored.require_current(), catalog, "reference.planes")
    world.advance(spec_of(one, {1: {"seats": 2}}))
    with pytest.raises(DatasetError) as caught:
        register_in_iceberg(stored.require_current(), catalog, "reference.planes")
    assert caught.value.dataset == "planes"
    world.advance(spec_of(one, {1: {"seats": 3}}, drop=["note"]))
    register_in_iceberg(stored.require_current(), catalog, "reference.planes")
    world.advance(spec_of(both, {1: {"note": "again", "seats": 4}}))
    register_in_iceberg(stored.require_current(), catalog, "reference.planes")
    table = catalog.load_table("reference.planes")
    assert table.scan().to_arrow().to_pylist() == [{"k": 1, "seats": 4, "note": "again"}]
    oldest = table.scan(snapshot_id=table.history()[0].snapshot_id)
    assert oldest.to_arrow().to_pylist() == [{"k": 1, "note": "old", "seats": 1}]
