"""Snapshots, tags and versions of Iceberg and Delta tables as versions of a bounded dataset."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.bounded.advance import abandon_version
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, bounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.declaration.table_versions import DeltaVersions, IcebergVersions
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.validation.validators import min_rows
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError, MarkerConflictError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.tables import PRODUCTS, Delta, Iceberg, Rows, iceberg_catalog
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.rounds import rounds

pytest.importorskip("pyiceberg.catalog.sql")
pytest.importorskip("deltalake")

SCHEMA = Schema.of(sku="string", price="bigint", shop="string")
KEEP = DiscardPolicy(keep=None)


@pytest.fixture
def iceberg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iceberg:
    return Iceberg(iceberg_catalog(tmp_path / "iceberg", monkeypatch))


@pytest.fixture
def delta(tmp_path: Path) -> Delta:
    return Delta(str(tmp_path / "delta"))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


def declare(source: Any, **more: Any) -> AdjunctDataset:
    return bounded_dataset("products", input=source, key="sku", partitions=2, discard=KEEP, **more)


def advance(lake: Lake, spec: AdjunctDataset, spark: Any = IN_PROCESS, **more: Any) -> Any:
    return advance_dataset(spec, lake=lake, systems={}, spark=spark, by="test", **more)


def served(lake: Lake, spec: AdjunctDataset, version: str | None = None) -> Rows:
    opened = (
        open_dataset(lake, spec) if version is None else open_dataset(lake, spec, version=version)
    )
    with opened as reader:
        return {row["sku"]: (row["price"], row["shop"]) for _, row in reader.items()}


def names(lake: Lake) -> list[str]:
    manifest = StoredVersions(lake, "products").require_manifest()
    return [str(ref.name) for ref in manifest.versions if ref.state == "sealed"]


@pytest.mark.lengthy
def test_each_snapshot_is_a_version_once_also_after_it_expired(
    iceberg: Iceberg, lake: Lake
) -> None:
    spec = declare(IcebergVersions(PRODUCTS, SCHEMA))
    assert advance(lake, spec).action == "waiting"
    first = iceberg.write({"a": (1, "x"), "b": (2, None)})
    second = iceberg.write({"b": (3, "y"), "c": (4, "z")})
    assert advance(lake, spec).action == "sealed"
    done = names(lake)
    assert done[0] == first
    assert done[-1] == second
    assert served(lake, spec) == iceberg.scanned()
    third = iceberg.delete(["a"])
    advance(lake, spec)
    iceberg.expire(first, *(name for name in done if name not in (first, third)))
    assert advance(lake, spec).action == "up-to-date"
    assert names(lake) == [*done, third]
    assert served(lake, spec, first) == iceberg.history[first]
    assert served(lake, spec, second) == iceberg.history[second]
    assert served(lake, spec) == iceberg.history[third]


def test_each_version_of_a_delta_table_is_one_once_also_after_a_vacuum(
    delta: Delta, lake: Lake
) -> None:
    spec = declare(DeltaVersions(delta.url, SCHEMA))
    delta.write({"a": (1, "x"), "b": (2, None)})
    delta.write({"b": (3, "y"), "c": (4, "z")})
    assert advance(lake, spec).action == "sealed"
    delta.delete(["a"])
    advance(lake, spec)
    delta.vacuum()
    assert advance(lake, spec).action == "up-to-date"
    assert names(lake) == ["0", "1", "2"]
    for version in names(lake):
        assert served(lake, spec, version) == delta.history[version]


@pytest.mark.lengthy
def test_compactions_are_no_versions(
    iceberg: Iceberg, delta: Delta, lake: Lake, tmp_path: Path
) -> None:
    for table, source in (
        (iceberg, IcebergVersions(PRODUCTS, SCHEMA)),
        (delta, DeltaVersions(delta.url, SCHEMA)),
    ):
        mine = open_lake(tmp_path / type(table).__name__)
        spec = declare(source)
        table.write({"a": (1, "x")})
        table.write({"b": (2, "x")})
        advance(mine, spec)
        before = names(mine)
        compacted = table.compact()
        assert advance(mine, spec).action == "up-to-date"
        assert names(mine) == before
        last = table.write({"c": (3, "x")})
        if isinstance(table, Iceberg):
            table.expire(compacted)  # it changed no row, so that nothing is lost
        assert advance(mine, spec).action == "sealed"
        assert names(mine) == [*before, last]
        assert served(mine, spec) == table.rows


@pytest.mark.lengthy
def test_states_that_expired_before_they_were_versions(
    iceberg: Iceberg, delta: Delta, tmp_path: Path
) -> None:
    for table, source in (
        (iceberg, lambda **more: IcebergVersions(PRODUCTS, SCHEMA, **more)),
        (delta, lambda **more: DeltaVersions(delta.url, SCHEMA, **more)),
    ):
        mine = open_lake(tmp_path / type(table).__name__)
        table.write({"a": (1, "x")})
        advance(mine, declare(source()))
        lost = table.write({"a": (2, "x"), "b": (2, "x")})
        table.write({"b": (3, "x")})
        last = table.write({"a": (5, "x")})
        if isinstance(table, Iceberg):
            table.expire(*[id for id in all_snapshots(table) if id != last])
        else:
            table.vacuum()
        with pytest.raises(DatasetError, match="before"):
            advance(mine, declare(source()))
        assert served(mine, declare(source()))["a"] == (1, "x")
        report = advance(mine, declare(source(on_expired="skip")))
        assert report.action == "sealed"
        assert any("goes on with" in warning for warning in report.warnings)
        assert lost not in names(mine)
        assert names(mine)[-1] == last
        assert served(mine, declare(source())) == table.rows


def all_snapshots(table: Iceberg) -> list[str]:
    return [str(snapshot.snapshot_id) for snapshot in table.table.snapshots()]


@pytest.mark.lengthy
def test_the_newest_state_alone(iceberg: Iceberg, delta: Delta, tmp_path: Path) -> None:
    for table, source in (
        (iceberg, IcebergVersions(PRODUCTS, SCHEMA, take="newest")),
        (delta, DeltaVersions(delta.url, SCHEMA, take="newest")),
    ):
        mine = open_lake(tmp_path / type(table).__name__)
        spec = declare(source)
        table.write({"a": (1, "x")})
        first = table.write({"b": (2, "x")})
        advance(mine, spec)
        assert names(mine) == [first]
        table.write({"c": (2, "x")})
        last = table.write({"c": (9, "x")})
        advance(mine, spec)
        assert names(mine) == [first, last]
        assert served(mine, spec) == table.rows


def test_tags_are_versions_of_their_names_and_times(iceberg: Iceberg, lake: Lake) -> None:
    spec = declare(IcebergVersions(PRODUCTS, SCHEMA, tags="v*"), valid_from="marker")
    one = iceberg.write({"a": (1, "x")})
    iceberg.tag("v1")
    iceberg.tag("draft")
    iceberg.write({"b": (1, "x")})
    ten = iceberg.write({"c": (1, "x")})
    iceberg.tag("v10")
    advance(lake, spec)
    assert names(lake) == ["v1", "v10"]
    assert served(lake, spec, "v1") == iceberg.history[one]
    assert served(lake, spec) == iceberg.history[ten]
    manifest = StoredVersions(lake, "products").require_manifest()
    times = {str(ref.name): ref.valid_from for ref in manifest.versions}
    snapshot = iceberg.table.snapshot_by_id(int(one))
    assert int(times["v1"].timestamp() * 1000) == snapshot.timestamp_ms
    iceberg.table.manage_snapshots().remove_tag("v1").commit()
    iceberg.table.manage_snapshots().remove_tag("draft").commit()
    iceberg.expire(one)
    assert advance(lake, spec).action == "up-to-date"
    iceberg.write({"c": (7, "x")})
    iceberg.table.manage_snapshots().remove_tag("v10").commit()
    iceberg.tag("v10")
    report = advance(lake, spec)
    assert report.action == "up-to-date"
    assert any("another snapshot now" in warning for warning in report.warnings)
    assert served(lake, spec) == iceberg.history[ten]


def test_a_late_tag_is_refused_until_it_is_abandoned(iceberg: Iceberg, lake: Lake) -> None:
    spec = declare(IcebergVersions(PRODUCTS, SCHEMA, tags="*"))
    early = iceberg.write({"a": (1, "x")})
    iceberg.write({"b": (1, "x")})
    iceberg.tag("second")
    advance(lake, spec)
    iceberg.tag("first", early)
    with pytest.raises(MarkerConflictError, match="first"):
        advance(lake, spec)
    abandon_version(lake, "products", "first", reason="not needed", by="test")
    assert advance(lake, spec).action == "up-to-date"
    iceberg.tag("first, too", early)
    with pytest.raises(MarkerConflictError, match="before that of version 'second'"):
        advance(lake, spec)


def test_a_table_that_was_replaced_is_an_error_by_name(
    iceberg: Iceberg, delta: Delta, tmp_path: Path
) -> None:
    for table, source in (
        (iceberg, lambda **more: IcebergVersions(PRODUCTS, SCHEMA, **more)),
        (delta, lambda **more: DeltaVersions(delta.url, SCHEMA, **more)),
    ):
        mine = open_lake(tmp_path / type(table).__name__)
        table.write({"a": (1, "x")})
        advance(mine, declare(source()))
        if isinstance(table, Iceberg):
            table.catalog.drop_table("ref.products")
            table.create()
        else:
            shutil.rmtree(table.url)
            table.rows = {}
        table.write({"n": (1, "new")})
        with pytest.raises(DatasetError, match="replaced"):
            advance(mine, declare(source()))
        report = advance(mine, declare(source(on_expired="skip")))
        assert report.action == "sealed"
        assert served(mine, declare(source())) == table.rows
        assert advance(mine, declare(source())).action == "up-to-date"


def test_columns_are_found_by_their_ids(iceberg: Iceberg, lake: Lake) -> None:
    first = iceberg.write({"a": (1, "x")})
    with iceberg.table.update_schema() as update:
        update.rename_column("shop", "store")
        update.delete_column("price")
    with iceberg.table.update_schema() as update:
        from pyiceberg.types import LongType

        update.add_column("price", LongType())
    table = pa.table({"sku": ["b"], "store": ["y"], "price": pa.array([7], pa.int64())})
    iceberg.table.append(table)
    with pytest.raises(DatasetError, match="no column 'shop'"):
        advance(lake, declare(IcebergVersions(PRODUCTS, SCHEMA)))
    now = Schema.of(sku="string", store="string", price="bigint")
    spec = declare(IcebergVersions(PRODUCTS, now))
    advance(lake, spec)
    with open_dataset(lake, spec, version=first) as reader:
        assert [row for _, row in reader.items()] == [{"sku": "a", "store": "x", "price": None}]
    with open_dataset(lake, spec) as reader:
        assert sorted(row["price"] or 0 for _, row in reader.items()) == [0, 7]


def test_a_column_added_to_a_delta_table_is_null_before(delta: Delta, lake: Lake) -> None:
    from deltalake import write_deltalake

    delta.write({"a": (1, "x")})
    wider = pa.table(
        {"sku": ["b"], "price": pa.array([2], pa.int64()), "shop": ["y"], "size": ["L"]}
    )
    write_deltalake(delta.url, wider, mode="append", schema_mode="merge")
    schema = Schema.of(sku="string", size="string")
    spec = declare(DeltaVersions(delta.url, schema))
    advance(lake, spec)
    with open_dataset(lake, spec, version="0") as reader:
        assert [row for _, row in reader.items()] == [{"sku": "a", "size": None}]
    with open_dataset(lake, spec) as reader:
        assert {row["sku"]: row["size"] for _, row in reader.items()} == {"a": None, "b": "L"}
    for column, kind in (("colour", "string"), ("price", "string")):
        other = Schema.of({"sku": "string", column: kind})
        fresh = open_lake(f"{lake.url}-{column}")
        with pytest.raises(DatasetError, match=column):
            advance(fresh, declare(DeltaVersions(delta.url, other)))


def test_rows_that_a_deletion_vector_deletes_are_left_out(delta: Delta, lake: Lake) -> None:
    delta.write({"a": (1, "x"), "b": (2, "x"), "c": (3, "x")})
    delta.delete_by_vector(1)
    spec = declare(DeltaVersions(delta.url, SCHEMA))
    advance(lake, spec)
    assert names(lake) == ["0", "1"]
    assert served(lake, spec, "0") == delta.rows
    assert served(lake, spec) == {"a": (1, "x"), "c": (3, "x")}


def test_a_snapshot_that_expires_while_it_is_read_is_no_empty_version(
    iceberg: Iceberg, lake: Lake
) -> None:
    spec = declare(IcebergVersions(PRODUCTS, SCHEMA, allow_empty=True))
    first = iceberg.write({"a": (1, "x")})
    iceberg.write({"b": (1, "x")})

    def expire(stage: Any) -> None:
        if stage.stage == "collect":
            return
        with suppress(ValueError):
            iceberg.expire(first)

    with pytest.raises(DatasetError, match="expired"):
        advance(lake, spec, on_stage=expire)
    advance(lake, spec)
    assert served(lake, spec) == iceberg.rows


def test_what_a_validator_rejects_does_not_block_the_next(iceberg: Iceberg, lake: Lake) -> None:
    spec = declare(IcebergVersions(PRODUCTS, SCHEMA), validators=[min_rows(2)])
    iceberg.write({"a": (1, "x")})
    assert advance(lake, spec).action == "rejected"
    last = iceberg.write({"b": (1, "x")})
    assert advance(lake, spec).action == "sealed"
    assert names(lake) == [last]


def test_a_table_that_became_empty(delta: Delta, lake: Lake) -> None:
    spec = declare(DeltaVersions(delta.url, SCHEMA))
    delta.write({"a": (1, "x")})
    advance(lake, spec)
    delta.delete(["a"])
    report = advance(lake, spec)
    assert report.action == "rejected"
    assert "EmptyVersionError" in str(report.note)
    delta.write({"b": (1, "x")})
    delta.delete(["b"])
    advance(lake, declare(DeltaVersions(delta.url, SCHEMA, allow_empty=True)))
    assert served(lake, spec) == {}


def test_what_can_not_be_declared() -> None:
    source = IcebergVersions(PRODUCTS, SCHEMA)
    from dagster_adjunct.assets.declaration.dataset import version_set
    from dagster_adjunct.assets.declaration.policies import VersionPartitions

    with pytest.raises(ConfigurationError):
        declare(source, versions=VersionPartitions(start="2026-01-01"))
    with pytest.raises(ConfigurationError):
        IcebergVersions(PRODUCTS, SCHEMA, tags="v*", take="newest")
    other = bounded_dataset("other", input=source, key="sku", broadcast=True)
    with pytest.raises(ConfigurationError):
        version_set("both", declare(source), other)


@pytest.mark.parametrize("kind", ["iceberg", "delta"])
@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("seed", rounds([1], [1, 2]))
def test_drawn_histories_are_read_at_any_cut_and_after_any_death(
    kind: str, seed: int, iceberg: Iceberg, delta: Delta, lake: Lake
) -> None:
    draw = random.Random(f"{kind} {seed}")
    table: Any = iceberg if kind == "iceberg" else delta
    source: Any = IcebergVersions(PRODUCTS, SCHEMA)
    if kind == "delta":
        source = DeltaVersions(delta.url, SCHEMA, allow_empty=True)
    else:
        source = IcebergVersions(PRODUCTS, SCHEMA, allow_empty=True)
    spec = declare(source)
    for step in range(14):
        _change(draw, table, step)
        if draw.random() < 0.6:
            _advance_with_deaths(draw, lake, spec)
    advance(lake, spec)
    done = names(lake)
    assert len(done) == len(set(done))
    for name in done:
        if name in table.history:  # an overwrite of PyIceberg is two snapshots
            assert served(lake, spec, name) == table.history[name]
        else:
            assert served(lake, spec, name) == table.scanned(name)
    assert served(lake, spec) == table.rows


def _change(draw: random.Random, table: Any, step: int) -> None:
    choice = draw.random()
    if choice < 0.15 and step:
        table.compact()
    elif choice < 0.35 and len(table.rows) > 1:
        table.delete(draw.sample(sorted(table.rows), 1))
    else:
        skus = draw.sample("abcdefgh", draw.randint(1, 3))
        table.write({sku: (draw.randint(0, 99), draw.choice(["x", "y", None])) for sku in skus})


def _advance_with_deaths(draw: random.Random, lake: Lake, spec: AdjunctDataset) -> None:
    if draw.random() < 0.5:
        fault = Fault("*", draw.randint(1, 25), draw.choice(["crash-before", "crash-after"]))
        store = FaultyStore(lake.store, [fault])
        with suppress(Crash):
            advance(Lake(store, lake.id), spec)
    else:
        advance(lake, spec)


@pytest.mark.spark
def test_spark_reads_the_same_rows(
    spark: Any, iceberg: Iceberg, delta: Delta, tmp_path: Path
) -> None:
    for table, source in (
        (iceberg, IcebergVersions(PRODUCTS, SCHEMA)),
        (delta, DeltaVersions(delta.url, SCHEMA)),
    ):
        mine = open_lake(tmp_path / f"spark-{type(table).__name__}")
        spec = declare(source)
        table.write({"a": (1, "x"), "b": (2, None)})
        table.write({"b": (3, "y"), "c": (4, "z")})
        table.delete(["a"])
        report = advance(mine, spec, spark)
        assert report.action == "sealed"
        assert served(mine, spec) == table.rows
        other = open_lake(tmp_path / f"arrow-{type(table).__name__}")
        advance(other, spec)
        assert digests(mine) == digests(other)


def digests(lake: Lake) -> list[Any]:
    manifest = StoredVersions(lake, "products").require_manifest()
    return [(ref.name, ref.rows) for ref in manifest.versions]
