"""A table that begins with a bulk snapshot, and follows its stream from the position that the
snapshot was taken at.
"""

from __future__ import annotations

import datetime as dt
import json
import pickle
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.declaration.snapshots import (
    ParquetSnapshot,
    PostgresSnapshot,
    QuerySnapshot,
    resolve_position,
)
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.sources.entries import offsets_to_json
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetError,
    NullKeyError,
    OffsetOutOfRangeError,
    SchemaMismatchError,
    StoreUnavailableError,
    TableAccessError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.conftest import World
from tests.assets.unbounded.following_plain import NAME, Table, partition, table_in
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.spark
DSN = "ADJUNCT_TEST_SNAPSHOT_DSN"
BEGIN = {"lake.accounts.0": "0", "lake.accounts.1": "0"}


def write(folder: Path, position: dict[str, str] | None = None, **columns: Any) -> str:
    """Write a snapshot as Parquet, with its position beside it; return the folder."""
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    if position is not None:
        (folder / "position.json").write_text(json.dumps(position))
    return str(folder)


def rows(n: int) -> dict[str, Any]:
    return {"k": pa.array([f"key{i}" for i in range(n)]), "n": pa.array(range(n), pa.int32())}


def ends(table: Table) -> dict[str, str]:
    return offsets_to_json(table.streams.upcoming(table.streams.partitions(NAME)))


def advance(table: Table, initial: Any, **changes: Any) -> Any:
    from dataclasses import replace

    following = replace(table.spec.following, initial=initial, **changes)
    table.spec = replace(table.spec, following=following)
    return table.advance(spark=table.world.spark)


def left_over(table: Table) -> set[str]:
    """Return the folders of data that the manifest does not name."""
    listed = {
        item.key.rsplit("/", 1)[0] for item in table.world.lake.store.list(f"datasets/{NAME}/data/")
    }
    version = table.manifest.version
    return listed - {generation.folder for generation in (version.generations if version else ())}


def test_parquet_files_and_the_stream_from_their_position_give_the_table(
    sparkling: World, tmp_path: Path
) -> None:
    table = table_in(sparkling)
    table.send(key0=-1, key1=-1, key2=-1)  # older than the snapshot, which has it in
    folder = write(tmp_path / "bulk", ends(table), **rows(100))
    table.send(key1=None, key2=7, new=1)
    report = advance(table, ParquetSnapshot(folder))
    wanted = {f"key{i}": i for i in range(100) if i != 1} | {"key2": 7, "new": 1}
    assert (report.action, report.counters["loaded"], report.counters["read"]) == (
        "bootstrapped",
        100,
        3,
    )
    assert table.content == wanted
    bootstrap = table.manifest.bootstrap
    assert bootstrap is not None
    assert bootstrap.loaded
    frame = StoredVersions(sparkling.lake, NAME).require_current().frame(sparkling.spark())
    assert {row.k: row.n for row in frame.collect()} == wanted
    table.send(new=2)
    assert table.advance(spark=sparkling.spark).counters["read"] == 1, (
        "the snapshot is not loaded again"
    )


def test_a_snapshot_is_read_by_one_file_and_with_a_position_in_the_declaration(
    sparkling: World, tmp_path: Path
) -> None:
    table = table_in(sparkling)
    folder = write(tmp_path / "bulk", **rows(3))
    write(tmp_path / "bulk" / "other", **rows(50))
    report = advance(table, ParquetSnapshot(f"{folder}/rows.parquet", position=BEGIN))
    assert (report.rows, table.content) == (3, {"key0": 0, "key1": 1, "key2": 2})


def test_a_snapshot_makes_a_stream_that_lost_its_front_complete(
    sparkling: World, tmp_path: Path
) -> None:
    table = table_in(sparkling, partitions=1)
    table.send(a=1)
    table.send(b=1)
    folder = write(
        tmp_path / "bulk", ends(table), k=pa.array(["a", "b"]), n=pa.array([1, 1], pa.int32())
    )
    table.send(c=1)
    table.drop_the_front()
    assert advance(table, ParquetSnapshot(folder)).action == "bootstrapped"
    assert table.content == {"a": 1, "b": 1, "c": 1}


def test_a_snapshot_that_is_older_than_the_stream_reaches_back_is_refused(
    sparkling: World, tmp_path: Path
) -> None:
    table = table_in(sparkling, partitions=1)
    table.send(a=1)
    table.send(b=1)
    table.drop_the_front()
    folder = write(tmp_path / "bulk", {"lake.accounts.0": "0"}, **rows(1))
    with pytest.raises(OffsetOutOfRangeError) as failure:
        advance(table, ParquetSnapshot(folder))
    assert (failure.value.offset, failure.value.partition) == ("0", 0)
    write(tmp_path / "bulk", {"lake.accounts.0": "9"}, **rows(1))
    with pytest.raises(OffsetOutOfRangeError) as failure:
        advance(table, ParquetSnapshot(folder))
    assert (failure.value.offset, failure.value.upcoming) == ("9", "2")
    assert table.content is None


def test_a_crash_after_the_load_does_not_load_again(sparkling: World, tmp_path: Path) -> None:
    table = table_in(sparkling, partitions=1, chunk=1)
    folder = write(tmp_path / "bulk", {"lake.accounts.0": "0"}, **rows(3))
    table.send(a=1, b=1)
    asked = 0

    def dies_at_the_first_chunk() -> Any:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise KeyboardInterrupt
        return spark()

    spark, sparkling.spark = sparkling.spark, dies_at_the_first_chunk
    with pytest.raises(KeyboardInterrupt):
        advance(table, ParquetSnapshot(folder))
    (tmp_path / "bulk" / "rows.parquet").unlink()
    report = table.advance(spark=spark)
    assert (report.action, report.counters["read"]) == ("bootstrapped", 2)
    assert table.content == {"key0": 0, "key1": 1, "key2": 2, "a": 1, "b": 1}


def test_a_rebuild_loads_the_snapshot_again(sparkling: World, tmp_path: Path) -> None:
    table = table_in(sparkling)
    folder = write(tmp_path / "bulk", BEGIN, **rows(3))
    advance(table, ParquetSnapshot(folder))
    write(tmp_path / "bulk", BEGIN, **rows(2))
    table.send(b=1)
    report = table.advance(spark=sparkling.spark, rebuild="a new export")
    assert (report.counters["loaded"], table.content) == (2, {"key0": 0, "key1": 1, "b": 1})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"k": pa.array(["a"])}, "n is missing"),
        ({"k": pa.array(["a"]), "n": pa.array([1], pa.int64())}, "n is bigint, expected int"),
        (
            {"k": pa.array([1], pa.int32()), "n": pa.array([1], pa.int32())},
            "k is int, expected string",
        ),
    ],
)
def test_other_columns_are_refused_by_name(
    sparkling: World, tmp_path: Path, columns: Any, message: str
) -> None:
    table = table_in(sparkling)
    with pytest.raises(DatasetError, match=message):
        advance(table, ParquetSnapshot(write(tmp_path / "bulk", BEGIN, **columns)))
    assert table.content is None


def test_narrower_and_further_columns_are_taken(sparkling: World, tmp_path: Path) -> None:
    table = table_in(sparkling)
    columns = {"x": pa.array([1.0]), "n": pa.array([5], pa.int16()), "k": pa.array(["a"])}
    advance(table, ParquetSnapshot(write(tmp_path / "bulk", BEGIN, **columns)))
    assert table.content == {"a": 5}


def test_rows_without_a_key_and_rows_of_one_key_are_refused(
    sparkling: World, tmp_path: Path
) -> None:
    table = table_in(sparkling)
    ones = pa.array([1, 1], pa.int32())
    with pytest.raises(
        DatasetError, match=r"the key \(k\) is not unique in the bulk snapshot: 1 rows"
    ):
        advance(
            table, ParquetSnapshot(write(tmp_path / "bulk", BEGIN, k=pa.array(["a", "a"]), n=ones))
        )
    with pytest.raises(NullKeyError) as caught:
        advance(
            table, ParquetSnapshot(write(tmp_path / "bulk", BEGIN, k=pa.array(["a", None]), n=ones))
        )
    assert caught.value.column == "k"


def test_a_position_names_every_partition_of_the_stream_once() -> None:
    accounts = unbounded_dataset(NAME, input="lake.accounts", key="id", partitions=2)
    ssps = [partition(0), partition(1)]
    assert resolve_position(accounts, "x", {"lake.accounts.0": "5", "1": 7}, ssps) == {
        partition(0): "5",
        partition(1): "7",
    }
    assert resolve_position(accounts, "x", [(0, 5), (1, 7)], ssps) == {
        partition(0): "5",
        partition(1): "7",
    }
    for given, problem in (
        ({"lake.accounts.0": "5"}, r"each once: lake.accounts.1 missing"),
        ({"0": 1, "1": 1, "2": 1}, r"each once: 2 unknown"),
        ([(0, 1), (1, 1), (1, 2)], r"a partition occurs twice"),
    ):
        with pytest.raises(DatasetError, match=problem):
            resolve_position(accounts, "x", given, ssps)


@pytest.mark.parametrize("offset", ["abc", "-1", " 1", "", None, 1.0, True, [1]])
def test_what_is_no_offset_is_reported_with_dataset_snapshot_and_partition(
    sparkling: World, tmp_path: Path, offset: Any
) -> None:
    table = table_in(sparkling)
    folder = write(
        tmp_path / "bulk", {"lake.accounts.0": "0", "lake.accounts.1": offset}, **rows(1)
    )
    with pytest.raises((DatasetError, OffsetOutOfRangeError)) as caught:
        advance(table, ParquetSnapshot(folder))
    for fact in (
        "dataset 'accounts': Parquet files at",
        "bulk",
        f"the offset {offset!r}",
        "partition lake.accounts.1",
    ):
        assert fact in caught.value.problem
    assert table.content is None


def test_errors_of_a_users_functions_are_reported_and_those_of_adjunct_pass(
    sparkling: World,
) -> None:
    table = table_in(sparkling)

    def wrong(_: Any = None) -> Any:
        raise ValueError("no such export")

    def busy(_: Any = None) -> Any:
        raise StoreUnavailableError("the store is busy.", "Try again.")

    with pytest.raises(DatasetError) as caught:
        advance(table, QuerySnapshot(query=wrong, position=BEGIN))
    assert caught.value.function == "query function"
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(DatasetError) as caught:
        advance(table, QuerySnapshot(sql="SELECT 1", position=wrong))
    assert caught.value.function == "position function"
    for snapshot in (
        QuerySnapshot(query=busy, position=BEGIN),
        QuerySnapshot(sql="SELECT 1", position=busy),
    ):
        with pytest.raises(StoreUnavailableError):
            advance(table, snapshot)


@pytest.mark.parametrize("given", [[("0",)], "0", 5, None, [5]])
def test_a_position_function_that_returns_something_else_is_reported(
    sparkling: World, given: Any
) -> None:
    with pytest.raises(
        DatasetError, match=r"dataset 'accounts': query \(SELECT 1\): its position is .*: expected"
    ):
        advance(table_in(sparkling), QuerySnapshot(sql="SELECT 1", position=lambda: given))


def test_a_position_that_is_missing_next_to_the_files_is_reported(
    sparkling: World, tmp_path: Path
) -> None:
    table = table_in(sparkling)
    folder = write(tmp_path / "bulk", **rows(1))
    with pytest.raises(
        DatasetError, match=r"Parquet files at .*bulk can't be read: .*position.json"
    ):
        advance(table, ParquetSnapshot(folder))
    (tmp_path / "bulk" / "position.json").write_text("[1]")
    with pytest.raises(DatasetError, match="is not a JSON object"):
        advance(table, ParquetSnapshot(folder))


def test_a_query_of_sql_or_a_function_gives_a_snapshot(sparkling: World) -> None:
    table = table_in(sparkling)
    sql = "SELECT concat('s', id) k, int(id) n FROM range(3)"
    advance(table, QuerySnapshot(sql=sql, position=BEGIN))
    assert table.content == {"s0": 0, "s1": 1, "s2": 2}

    def ranged(spark: Any) -> Any:
        return spark.sql("SELECT 'f' k, 1 n")

    advance(table, QuerySnapshot(query=ranged, position=lambda: BEGIN))
    report = table.advance(spark=sparkling.spark, rebuild="another query")
    assert (report.action, table.content) == ("bootstrapped", {"f": 1})


def test_a_query_that_can_not_be_planned_or_returns_something_else_is_reported(
    sparkling: World,
) -> None:
    table = table_in(sparkling)
    with pytest.raises(DatasetError, match=r"query \(SELECT nothing\) can't be read: .*nothing"):
        advance(table, QuerySnapshot(sql="SELECT nothing", position=BEGIN))
    with pytest.raises(DatasetError, match="returned a list"):
        advance(table, QuerySnapshot(query=lambda spark: [], position=BEGIN))  # type: ignore[arg-type, return-value]


def test_by_column_order_the_snapshots_rows_have_its_values_as_positions(
    sparkling: World, tmp_path: Path
) -> None:
    table = table_in(sparkling, order_by="n")
    table.send(key5=3, key6=60)
    folder = write(tmp_path / "bulk", BEGIN, **rows(10))
    advance(table, ParquetSnapshot(folder))
    assert table.content is not None
    assert (table.content["key5"], table.content["key6"]) == (5, 60), (
        "an older change loses against the snapshot"
    )


def test_declarations_are_values_without_secrets(tmp_path: Path) -> None:
    snapshots = [
        ParquetSnapshot(str(tmp_path), BEGIN),
        QuerySnapshot(sql="SELECT 1", position=BEGIN),
        PostgresSnapshot(DSN, "SELECT 1", position=BEGIN),
    ]
    for snapshot in snapshots:
        assert pickle.loads(pickle.dumps(snapshot)) == snapshot
        assert isinstance(hash(snapshot), int)
    with pytest.raises(ConfigurationError) as caught:
        QuerySnapshot(position=BEGIN)
    assert caught.value.argument == "sql"
    with pytest.raises(ConfigurationError) as caught:
        PostgresSnapshot(DSN, "SELECT 1")
    assert caught.value.argument == "position_query"
    with pytest.raises(ConfigurationError) as caught:
        PostgresSnapshot("postgresql://me:secret@db/x", "SELECT 1", position=BEGIN)
    assert caught.value.argument == "dsn_env"
    with pytest.raises(ConfigurationError) as caught:
        unbounded_dataset(
            NAME, input="lake.x", key="k", partitions=1, bootstrap=False, initial=snapshots[0]
        )
    assert caught.value.argument == "initial"


# -- PostgreSQL

VALUES = Schema.of(
    id="bigint",
    name="string",
    small="smallint",
    price="decimal(12,4)",
    weight="double",
    ok="boolean",
    opened="timestamp",
    day="date",
    raw="binary",
)


@pytest.fixture
def accounts(
    sparkling: World, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[World, PostgresServer]]:
    """A lake with a stream of accounts, and a table of them in a database."""
    monkeypatch.setenv(DSN, postgres_server.dsn())
    postgres_server.execute("DROP TABLE IF EXISTS snap, positions")
    postgres_server.execute(
        "CREATE TABLE snap (id bigint PRIMARY KEY, name text, small smallint, price numeric(12,4),"
        " weight real, ok boolean, opened timestamptz, day date, raw bytea)"
    )
    postgres_server.execute("CREATE TABLE positions (part int, next bigint)")
    postgres_server.execute("INSERT INTO positions VALUES (0, 0), (1, 0)")
    sparkling.stream("accounts", VALUES, ["id"], 2)
    yield sparkling, postgres_server
    postgres_server.execute("DROP TABLE snap, positions")


def following(initial: Any) -> Any:
    return unbounded_dataset(NAME, input="lake.accounts", key="id", partitions=2, initial=initial)


ROWS = [
    (1, "Ærø ✈", 3, Decimal("1.5000"), 0.25, True, dt.datetime(2013, 1, 1, 5, 0, 0, 123456, dt.UTC),
     dt.date(1999, 12, 31), b"\x00\xff"),
    (2, None, None, None, None, None, None, None, None),
]  # fmt: skip
_SNAP = (
    "SELECT 'ignored' AS extra, name, id, small, price, weight::float8 AS weight, ok, opened, day,"
    " raw FROM snap"
)


@pytest.mark.server
def test_a_postgresql_query_is_loaded_typed_in_batches(
    accounts: tuple[World, PostgresServer],
) -> None:
    world, server = accounts
    server.execute(
        "INSERT INTO snap VALUES (1, 'Ærø ✈', 3, 1.5, 0.25, true, '2013-01-01 07:00:00.123456+02',"
        " '1999-12-31', '\\x00ff')"
    )
    server.execute("INSERT INTO snap (id) VALUES (2)")
    initial = PostgresSnapshot(
        DSN, _SNAP, position_query="SELECT part, next FROM positions", batch=1
    )
    report = world.advance(following(initial))
    assert (report.action, report.counters["loaded"]) == ("bootstrapped", 2)
    view = StoredVersions(world.lake, NAME).require_current()
    assert [tuple(entry.values()) for _, entry in sorted(view.items())] == ROWS
    manifest = world.lake.store.get(
        json.loads(world.lake.store.get(f"datasets/{NAME}/CURRENT").data)["manifest"]
    )
    assert str(server.port).encode() not in manifest.data, (
        "where the database is, is no part of what is stored"
    )
    folders = {
        item.key.rsplit("/", 1)[0] for item in world.lake.store.list(f"datasets/{NAME}/data/")
    }
    assert folders == {generation.folder for generation in view.sealed.generations}, (
        "what was staged is deleted"
    )
    assert not list(world.lake.store.list(f"datasets/{NAME}/attempts/"))


@pytest.mark.server
def test_rows_and_position_are_of_one_moment(accounts: tuple[World, PostgresServer]) -> None:
    world, server = accounts
    server.execute("INSERT INTO snap (id, name) SELECT n, 'first' FROM generate_series(1, 50) n")

    def position() -> dict[str, str]:
        server.execute("INSERT INTO snap (id, name) VALUES (51, 'before the transaction')")
        return BEGIN

    slow = PostgresSnapshot(DSN, _SNAP, position=position, batch=10)
    snapshot = slow.load(following(slow), VALUES, (partition(0), partition(1)), world.spark())
    tables = iter(snapshot.rows)  # type: ignore[arg-type]
    first = next(tables)
    server.execute("UPDATE snap SET name = 'later'")
    server.execute("INSERT INTO snap (id) VALUES (99)")
    loaded = pa.concat_tables([first, *tables])
    snapshot.close()
    assert sorted(loaded.column("id").to_pylist()) == list(range(1, 52))
    assert set(loaded.column("name").to_pylist()) == {"first", "before the transaction"}


@pytest.mark.server
def test_the_position_query_sees_what_the_rows_see(accounts: tuple[World, PostgresServer]) -> None:
    world, server = accounts
    server.execute("INSERT INTO snap (id) VALUES (1)")
    initial = PostgresSnapshot(DSN, _SNAP, position_query="SELECT part, next FROM positions")
    snapshot = initial.load(following(initial), VALUES, (partition(0), partition(1)), world.spark())
    server.execute("INSERT INTO snap (id) VALUES (2)")
    server.execute("UPDATE positions SET next = 9")
    assert snapshot.position == {partition(0): "0", partition(1): "0"}
    assert pa.concat_tables(list(snapshot.rows)).column("id").to_pylist() == [1]  # type: ignore[arg-type]
    snapshot.close()


@pytest.mark.server
@pytest.mark.parametrize(
    ("query", "error", "message"),
    [
        (
            "SELECT id FROM snap",
            DatasetError,
            "name, small, price, weight, ok, opened, day, raw missing",
        ),
        (
            _SNAP.replace("id,", "id::text AS id,"),
            SchemaMismatchError,
            "'id' holds values of str, expected bigint",
        ),
        (
            _SNAP.replace("opened,", "now()::timestamp AS opened,"),
            SchemaMismatchError,
            "without a time zone",
        ),
        (
            _SNAP.replace("price,", "123456789.5::numeric AS price,"),
            SchemaMismatchError,
            "does not fit",
        ),
        (_SNAP.replace("small,", "70000 AS small,"), SchemaMismatchError, "does not fit"),
        (
            _SNAP.replace("day,", "now() AS day,"),
            SchemaMismatchError,
            "holds values of datetime, expected date",
        ),
        ("SELECT * FROM nowhere", TableAccessError, "nowhere"),
        ("SELEC", SchemaMismatchError, "syntax error"),
    ],
)
def test_what_does_not_fit_is_reported_and_publishes_nothing(
    accounts: tuple[World, PostgresServer], query: str, error: type[Exception], message: str
) -> None:
    world, server = accounts
    server.execute("INSERT INTO snap (id) VALUES (1)")
    initial = PostgresSnapshot(DSN, query, position=BEGIN)
    with pytest.raises(error, match=message) as caught:
        world.advance(following(initial))
    assert server.dsn() not in str(caught.value)
    assert StoredVersions(world.lake, NAME).current() is None
    busy, deadline = (
        "SELECT FROM pg_stat_activity WHERE application_name = 'adjunct' AND state <> 'idle'",
        120,
    )
    while server.execute(busy):  # the server takes a moment to notice
        assert (deadline := deadline - 0.1) > 0, "a transaction is left open"
        time.sleep(0.1)


@pytest.mark.server
def test_a_variable_that_is_not_set_is_named(
    accounts: tuple[World, PostgresServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DSN)
    with pytest.raises(ConfigurationError) as caught:
        accounts[0].advance(following(PostgresSnapshot(DSN, _SNAP, position=BEGIN)))
    assert caught.value.setting == DSN


@pytest.mark.server
def test_an_empty_table_in_postgresql_is_an_empty_snapshot(
    accounts: tuple[World, PostgresServer],
) -> None:
    world, _ = accounts
    report = world.advance(following(PostgresSnapshot(DSN, _SNAP, position=BEGIN)))
    assert (report.action, report.rows) == ("bootstrapped", 0)
