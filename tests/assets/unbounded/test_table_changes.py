"""The changes of Iceberg and Delta tables as a stream that datasets follow."""

from __future__ import annotations

import random
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cachetools import LRUCache

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.change_formats import OperationColumn
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.table_versions import DeltaVersions, IcebergVersions
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.resources.errors import AdmittedFileError
from dagster_adjunct.resources.file_streams import streams, table_changes
from dagster_adjunct.resources.file_streams.feed import FilePiece
from dagster_adjunct.resources.file_streams.table_changes import (
    SYSTEM,
    TableChangeStreams,
    _read,
    begin_changes_again,
    delta_changes,
    iceberg_changes,
)
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from dagster_adjunct.resources.table_snapshots import iceberg
from dagster_adjunct.resources.table_snapshots.iceberg import _planned
from tests.assets.tables import PRODUCTS, Delta, Iceberg, Rows, iceberg_catalog, rows_table
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.rounds import rounds
from tests.servers.s3 import S3Server

pytest.importorskip("pyiceberg.catalog.sql")
pytest.importorskip("deltalake")

COLUMNS = "sku STRING, price BIGINT, shop STRING"
KINDS = ["iceberg", "delta"]


@pytest.fixture(autouse=True)
def undeclared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_declared", {})


@pytest.fixture
def table(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "iceberg":
        return Iceberg(iceberg_catalog(tmp_path / "iceberg", monkeypatch))
    return Delta(str(tmp_path / "delta"), **{"delta.enableChangeDataFeed": "true"})


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


def follow(table: Any, history: Any = None, **more: Any) -> AdjunctDataset:
    streams._declared.clear()
    if isinstance(table, Delta):
        stream = delta_changes("products", table.url, schema=COLUMNS, key="sku", **more)
    else:
        stream = iceberg_changes("products", PRODUCTS, schema=COLUMNS, key="sku", **more)
    return unbounded_dataset(
        "products",
        input=stream,
        key="sku",
        partitions=2,
        changes=OperationColumn(),
        history=history,
    )


def advance(lake: Lake, spec: AdjunctDataset, spark: Any = IN_PROCESS) -> Any:
    systems = {SYSTEM: TableChangeStreams(lake)}
    return advance_dataset(spec, lake=lake, systems=systems, spark=spark, by="test")


def served(lake: Lake, spec: AdjunctDataset) -> Rows:
    with open_dataset(lake, spec) as reader:
        return {row["sku"]: (row["price"], row["shop"]) for _, row in reader.items()}


@pytest.mark.lengthy
@pytest.mark.parametrize("table", KINDS, indirect=True)
def test_a_table_is_followed_from_a_snapshot_on(table: Any, lake: Lake) -> None:
    spec = follow(table)
    table.write({"a": (1, "x"), "b": (2, None)})
    table.write({"b": (3, "y"), "c": (4, "z")})
    assert advance(lake, spec).action == "bootstrapped"
    assert served(lake, spec) == table.rows
    table.write({"b": (None, "y"), "d": (4, "z")})
    table.delete(["a"])
    report = advance(lake, spec)
    assert report.action == "applied"
    # PyIceberg overwrites rows in two snapshots.
    changes = 4 if isinstance(table, Iceberg) else 3
    assert report.counters["read"] == changes, "only what has changed"
    assert served(lake, spec) == table.rows
    table.compact()
    assert advance(lake, spec).action == "up-to-date"
    assert served(lake, spec) == table.rows


@pytest.mark.parametrize("table", KINDS, indirect=True)
def test_an_advance_applies_all_commits_though_one_look_admits_only_some(
    table: Any, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = follow(table)
    table.write({"a": (1, "x")})
    advance(lake, spec)
    monkeypatch.setattr(table_changes, "_MOST_COMMITS", 1)
    for key in "bcd":
        table.write({key: (2, "y")})
    assert advance(lake, spec).counters["read"] == 3
    assert served(lake, spec) == table.rows


@pytest.mark.parametrize("table", KINDS, indirect=True)
def test_history_that_expired(table: Any, lake: Lake) -> None:
    spec = follow(table)
    table.write({"a": (1, "x"), "b": (2, "x")})
    advance(lake, spec)
    table.delete(["a"])
    table.write({"b": (3, "x"), "c": (3, "x")})
    lose_history(table)
    with pytest.raises(AdmittedFileError) as caught:
        advance(lake, spec)
    assert caught.value.rule == "expired"
    spec = follow(table, on_expired="snapshot")
    report = advance(lake, spec)
    assert report.action == "bootstrapped"
    assert served(lake, spec) == table.rows
    table.write({"d": (3, "x")})
    assert advance(lake, spec).action == "applied"
    assert served(lake, spec) == table.rows


def lose_history(table: Any) -> None:
    """Let all states but the newest expire."""
    if isinstance(table, Iceberg):
        ids = [str(snapshot.snapshot_id) for snapshot in table.table.snapshots()]
        table.expire(*[one for one in ids if one != table.head])
    else:
        table.table.create_checkpoint()
        for number in range(table.table.version()):
            (Path(table.url) / "_delta_log" / f"{number:020}.json").unlink()


@pytest.mark.parametrize("table", KINDS, indirect=True)
def test_a_table_that_was_replaced(table: Any, lake: Lake) -> None:
    spec = follow(table)
    table.write({"a": (1, "x"), "b": (2, "x")})
    advance(lake, spec)
    if isinstance(table, Iceberg):
        table.catalog.drop_table("ref.products")
        table.create()
    else:
        shutil.rmtree(table.url)
        table.rows = {}
    table.write({"n": (1, "x")})
    with pytest.raises(AdmittedFileError) as caught:
        advance(lake, spec)
    assert "another table" in caught.value.problem
    assert served(lake, spec).keys() == {"a", "b"}
    spec = follow(table, on_expired="snapshot")
    advance(lake, spec)
    assert served(lake, spec) == table.rows


@pytest.mark.lengthy
@pytest.mark.parametrize("table", KINDS, indirect=True)
def test_a_dataset_is_built_again_after_the_first_snapshot_has_expired(
    table: Any, lake: Lake
) -> None:
    spec = follow(table)
    table.write({"a": (1, "x"), "b": (2, "x")})
    advance(lake, spec)
    table.write({"b": (3, "x")})
    advance(lake, spec)
    lose_files(table)
    _read.clear()
    _planned.clear()
    table.write({"c": (3, "x")})
    assert advance(lake, spec).action == "applied", "its first rows are not needed any more"
    assert served(lake, spec) == table.rows
    with pytest.raises(AdmittedFileError, match="can't be read any more"):
        rebuild(lake, spec)
    begin_changes_again(lake, str(spec.input), reason="expired")
    assert rebuild(lake, spec).action == "bootstrapped"
    assert served(lake, spec) == table.rows
    table.delete(["a"])
    assert advance(lake, spec).action == "applied"
    assert served(lake, spec) == table.rows


def rebuild(lake: Lake, spec: AdjunctDataset) -> Any:
    systems = {SYSTEM: TableChangeStreams(lake)}
    return rebuild_dataset(
        spec, lake=lake, systems=systems, spark=IN_PROCESS, reason="test", by="test"
    )


def lose_files(table: Any) -> None:
    if isinstance(table, Iceberg):
        lose_history(table)
    else:
        table.vacuum()


@pytest.mark.parametrize("history", [None, "all"])
@pytest.mark.parametrize("table", ["iceberg"], indirect=True)
def test_a_table_that_is_rolled_back_is_followed_back(history: Any, table: Any, lake: Lake) -> None:
    spec = follow(table, history=history)
    first = table.write({"a": (1, "x"), "b": (2, "x")})
    advance(lake, spec)
    table.write({"a": (9, "x"), "c": (3, "x")})
    advance(lake, spec)
    table.table.manage_snapshots().rollback_to_snapshot(int(first)).commit()
    table.rows = table.history[first]
    advance(lake, spec)
    assert served(lake, spec) == table.rows
    table.write({"d": (3, "x")})
    advance(lake, spec)
    assert served(lake, spec) == table.rows


@pytest.mark.parametrize("table", ["iceberg"], indirect=True)
def test_renamed_columns_and_other_partitions_are_followed(table: Any, lake: Lake) -> None:
    from pyiceberg.transforms import IdentityTransform

    table.write({"a": (1, "x"), "b": (2, "x")})
    with table.table.update_schema() as update:
        update.rename_column("shop", "store")
    streams._declared.clear()
    stream = iceberg_changes(
        "products", PRODUCTS, schema="sku STRING, price BIGINT, store STRING", key="sku"
    )
    spec = unbounded_dataset(
        "products", input=stream, key="sku", broadcast=True, changes=OperationColumn()
    )
    advance(lake, spec)
    with table.table.update_spec() as update:
        update.add_field("store", IdentityTransform())
    rows = pa.table({"sku": ["a", "c"], "price": [5, 6], "store": ["y", "z"]})
    table.table.overwrite(rows, overwrite_filter="sku = 'a'")
    advance(lake, spec)
    with open_dataset(lake, spec) as reader:
        found = {row["sku"]: (row["price"], row["store"]) for _, row in reader.items()}
    assert found == {"a": (5, "y"), "b": (2, "x"), "c": (6, "z")}


@pytest.mark.parametrize("table", ["delta"], indirect=True)
def test_a_key_that_an_update_changes_is_deleted(table: Any, lake: Lake) -> None:
    spec = follow(table)
    table.write({"a": (1, "x"), "b": (2, "x")})
    advance(lake, spec)
    table.table.update(updates={"sku": "'z'"}, predicate="sku = 'a'")
    advance(lake, spec)
    assert served(lake, spec) == {"z": (1, "x"), "b": (2, "x")}


@pytest.mark.parametrize("table", ["delta"], indirect=True)
def test_rows_that_repeat_a_key_and_a_table_without_a_feed_are_refused(
    table: Any, lake: Lake, tmp_path: Path
) -> None:
    from deltalake import write_deltalake

    spec = follow(table)
    table.write({"a": (1, "x")})
    advance(lake, spec)
    write_deltalake(table.url, pa.concat_tables([rows_table({"b": (1, "x")})] * 2), mode="append")
    with pytest.raises(AdmittedFileError) as caught:
        advance(lake, spec)
    assert caught.value.rule == "unique"
    plain = Delta(str(tmp_path / "plain"))
    plain.write({"a": (1, "x")})
    fresh = open_lake(tmp_path / "other")
    spec = follow(plain)
    with pytest.raises(AdmittedFileError) as caught:
        advance(fresh, spec)
    assert caught.value.rule == "feed"


@pytest.mark.parametrize("table", ["delta"], indirect=True)
def test_deletions_that_the_feed_does_not_tell_are_refused(table: Any, lake: Lake) -> None:
    spec = follow(table)
    table.write({"a": (1, "x"), "b": (2, "x")})
    advance(lake, spec)
    table.delete_by_vector(1)
    with pytest.raises(AdmittedFileError) as caught:
        advance(lake, spec)
    assert caught.value.rule == "feed"
    assert served(lake, spec) == table.rows


@pytest.mark.parametrize("table", ["delta"], indirect=True)
def test_changes_that_were_admitted_are_not_read_from_another_table(table: Any, lake: Lake) -> None:
    spec = follow(table)
    table.write({"a": (1, "x")})
    advance(lake, spec)
    table.write({"b": (2, "x")})
    TableChangeStreams(lake).admit("products")
    shutil.rmtree(table.url)
    table.write({"n": (1, "y")})
    table.write({"m": (2, "y")})
    _read.clear()
    feed = TableChangeStreams(lake).declaration("products").feed(lake)
    state = TableChangeStreams(lake).file_log("products").read()
    assert state is not None
    with pytest.raises(AdmittedFileError, match="replaced"):
        list(feed.tables(FilePiece(state.tail[-1], 0, 1), ["sku"]))


@pytest.mark.parametrize("kind", KINDS)
def test_tables_on_s3_are_read_with_the_credentials_of_a_lake(
    kind: str, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lake: Lake
) -> None:
    table: Any
    source: Any
    if kind == "iceberg":
        catalog = iceberg_catalog(tmp_path / "iceberg", monkeypatch, s3_server.warehouse())
        table = Iceberg(catalog)
        source = IcebergVersions(PRODUCTS, Schema.from_ddl(COLUMNS, "a table"))
    else:
        url = f"s3://{s3_server.bucket()}/shop/products"
        options = {
            "AWS_ACCESS_KEY_ID": s3_server.env["AWS_ACCESS_KEY_ID"],
            "AWS_SECRET_ACCESS_KEY": s3_server.env["AWS_SECRET_ACCESS_KEY"],
            "AWS_REGION": s3_server.env["AWS_REGION"],
            "AWS_ENDPOINT_URL": s3_server.endpoint,
            "AWS_ALLOW_HTTP": "true",
        }
        table = Delta(url, options, **{"delta.enableChangeDataFeed": "true"})
        source = DeltaVersions(url, Schema.from_ddl(COLUMNS, "a table"))
    changes = follow(table)
    versions = bounded_dataset("versions", input=source, key="sku", broadcast=True)
    table.write({"a": (1, "x"), "b": (2, None)})
    advance(lake, changes)
    table.write({"b": (3, "y"), "c": (4, "z")})
    table.delete(["a"])
    assert advance(lake, changes).action == "applied"
    assert advance(lake, versions).action == "sealed"
    assert served(lake, changes) == table.rows
    assert served(lake, versions) == table.rows


@pytest.mark.spark
@pytest.mark.parametrize("table", KINDS, indirect=True)
def test_spark_follows_it_to_the_same_rows(table: Any, lake: Lake, spark: Any) -> None:
    spec = follow(table)
    table.write({"a": (1, "x"), "b": (2, None)})
    assert advance(lake, spec, spark).action == "bootstrapped"
    table.write({"b": (3, "y"), "c": (4, "z")})
    table.delete(["a"])
    assert advance(lake, spec, spark).action == "applied"
    assert served(lake, spec) == table.rows


@pytest.mark.parametrize("table", KINDS, indirect=True)
@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("seed", rounds([1], [1, 2]))
def test_drawn_histories_end_as_the_table_at_any_cut_and_after_any_death(
    table: Any, seed: int, lake: Lake
) -> None:
    draw = random.Random(f"{type(table).__name__} {seed}")
    spec = follow(table)
    table.write({"a": (1, "x")})
    for step in range(16):
        change(draw, table)
        if draw.random() < 0.6:
            advance_with_deaths(draw, lake, spec)
        if step % 5 == 4:
            advance(lake, spec)
            assert served(lake, spec) == table.rows
    advance(lake, spec)
    assert served(lake, spec) == table.rows


def change(draw: random.Random, table: Any) -> None:
    choice = draw.random()
    if choice < 0.15:
        table.compact()
    elif choice < 0.35 and len(table.rows) > 1:
        table.delete(draw.sample(sorted(table.rows), 1))
    elif choice < 0.45 and isinstance(table, Delta):
        table.replace_all({"a": (draw.randint(0, 9), "r"), "b": (1, "r")})
    else:
        skus = draw.sample("abcdefgh", draw.randint(1, 3))
        table.write({sku: (draw.randint(0, 99), draw.choice(["x", "y", None])) for sku in skus})


def advance_with_deaths(draw: random.Random, lake: Lake, spec: AdjunctDataset) -> None:
    faults = []
    if draw.random() < 0.5:
        kind: Any = draw.choice(["crash-before", "crash-after"])
        faults.append(Fault("*", draw.randint(1, 25), kind))
    store = FaultyStore(lake.store, faults)
    with suppress(Crash):
        advance(Lake(store, lake.id), spec)


@pytest.mark.lengthy
@pytest.mark.parametrize("table", ["iceberg"], indirect=True)
def test_many_changes_are_read_in_threads(
    table: Any, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More states than are kept are planned and read at once."""
    follow(table)
    system = TableChangeStreams(lake)
    table.write({"a": (0, "x")})
    system.admit("products")
    for number in range(1, 7):
        table.write({"a": (number, "x")})
    system.admit("products")
    ssp = SystemStreamPartition(SYSTEM, "products", 0)
    span = {ssp: OffsetRange("0", system.upcoming([ssp])[ssp])}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(6):
            monkeypatch.setattr(table_changes, "_read", LRUCache(1))
            monkeypatch.setattr(iceberg, "_planned", LRUCache(1))
            assert system.read_arrow(span).num_rows == 1 + 2 * 6
    finally:
        sys.setswitchinterval(interval)
