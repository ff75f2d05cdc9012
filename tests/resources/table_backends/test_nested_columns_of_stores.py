"""How single stores keep nested columns, and what other programs have put there."""

from __future__ import annotations

import json
import sqlite3
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.table_backends.columns import make_checker, parse_column
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.nested_values import parse_inner_name
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.redis import RedisCodec
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.compact import merge_updates
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Operation,
    OperationKind,
    RowEntries,
    State,
)
from tests.resources.table_backends.every_type import blocking
from tests.servers.dynamodb import DynamoDbServer, new_name
from tests.servers.postgres import PostgresServer

COLUMNS = {
    "id": "string",
    "doc": "struct<a:bigint,b:struct<price:decimal(30,10),at:timestamp>>",
    "days": "array<date>",
    "blobs": "array<binary>",
    "maps": "array<map<string,bigint>>",
}
BIG = 2**63 - 1
OTHERS = json.dumps({"a": BIG, "kept": {"n": BIG}, "b": {"price": "1.5", "more": [1]}})


@pytest.fixture
def connect(postgres_server: PostgresServer) -> dict[str, Any]:
    return {
        "host": "127.0.0.1",
        "port": str(postgres_server.port),
        "user": "adjunct",
        "dbname": "adjunct",
    }


@pytest.mark.server
def test_postgres_keeps_nested_columns_as_jsonb_and_lists_as_arrays(
    postgres_server: PostgresServer, connect: dict[str, Any]
) -> None:
    store = PostgresTable("kept", "id", columns=COLUMNS, create=True, connect=connect)
    with blocking(store) as table:
        table.put("k", {"doc": {"b": {"price": Decimal("0.1")}}, "maps": [{"x": BIG}]})
        types = postgres_server.execute(
            "SELECT attname, format_type(atttypid, -1) FROM pg_attribute"
            " WHERE attrelid = 'kept'::regclass AND attnum > 0"
        )
        assert dict(types) == {
            "id": "text",
            "doc": "jsonb",
            "days": "date[]",
            "blobs": "bytea[]",
            "maps": "jsonb",
        }
        ((price, big),) = postgres_server.execute(
            "SELECT doc #>> '{b,price}', maps -> 0 ->> 'x' FROM kept"
        )
        assert (price, big) == ("0.1000000000", str(BIG))


@pytest.mark.server
@pytest.mark.parametrize("stored", ["json", "jsonb"])
def test_updates_inside_keep_what_others_have_stored_in_postgres(
    postgres_server: PostgresServer, connect: dict[str, Any], stored: str
) -> None:
    name = f"others_{stored}"
    postgres_server.execute(f"CREATE TABLE {name} (id text PRIMARY KEY, doc {stored})")
    postgres_server.execute(f"INSERT INTO {name} VALUES ('k', '{OTHERS}'), ('list', '[1]')")
    columns = {name: COLUMNS[name] for name in ("id", "doc")}
    store = PostgresTable(name, "id", columns=columns, connect=connect)
    change_inside(store)
    ((text,),) = postgres_server.execute(f"SELECT doc::text FROM {name} WHERE id = 'k'")
    assert json.loads(text) == CHANGED


def test_updates_inside_keep_what_others_have_stored_in_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (id TEXT PRIMARY KEY, doc TEXT)")
        connection.execute("INSERT INTO t VALUES ('k', ?), ('list', '[1]')", (OTHERS,))
    columns = {name: COLUMNS[name] for name in ("id", "doc")}
    change_inside(SqliteTable(path, "t", "id", columns=columns))
    with sqlite3.connect(path) as connection:
        (text,) = connection.execute("SELECT doc FROM t WHERE id = 'k'").fetchone()
    assert json.loads(text) == CHANGED


CHANGED = {
    "a": BIG - 1,
    "kept": {"n": BIG},
    "b": {"price": "3.0000000000", "more": [1], "at": None},
}


def change_inside(store: Any) -> None:
    """Update the records inside; the one that holds no struct is rejected by itself."""
    change = Changes(add={"doc.a": -1, "doc.b.price": Decimal("1.5")}, remove=["doc.b.at"])
    with blocking(store) as table:
        entries = RowEntries(["k", "list"], [change, change])
        outcomes = table.send(Operation(OperationKind.UPDATE, entries))
        table.flush()
        assert outcomes.places(State.REFUSED) == [1]
        with pytest.raises(SchemaMismatchError):
            table.get("list")


@pytest.mark.server
def test_a_nested_column_that_the_database_has_as_a_text_is_rejected(
    postgres_server: PostgresServer, connect: dict[str, Any]
) -> None:
    postgres_server.execute("CREATE TABLE texts (id text PRIMARY KEY, doc text)")
    columns = {"id": "string", "doc": COLUMNS["doc"]}
    with (
        blocking(PostgresTable("texts", "id", columns=columns, connect=connect)) as table,
        pytest.raises(SchemaMismatchError) as caught,
    ):
        table.get("k")
    assert caught.value.column == "doc"


@pytest.mark.server
def test_dynamodb_reads_sets_of_others_as_lists_and_creates_maps(
    dynamodb_server: DynamoDbServer,
) -> None:
    columns = {**COLUMNS, "names": "array<string>", "deep": "map<string,array<bigint>>"}
    store = DynamoDbTable(
        new_name(), "id", columns=columns, create=True, **dynamodb_server.session()
    )
    with blocking(store) as table:
        table.put("k", {})
        item = {
            "id": {"S": "k"},
            "names": {"SS": ["b", "a"]},
            "deep": {"M": {"x": {"NS": ["10", "9"]}, "y": {"NULL": True}}},
            "blobs": {"BS": [b"2", b"1"]},
            "doc": {"M": {"kept": {"N": "1"}, "b": {"NULL": True}}},
        }
        client = dynamodb_server.client()
        client.put_item(TableName=store.table, Item=item)
        record = table.get("k")
        assert record["names"] == ["a", "b"]
        assert record["deep"] == {"x": [9, 10], "y": None}
        assert record["blobs"] == [b"1", b"2"]
        table.update("k", Changes(add={"doc.b.price": Decimal("0.1")}))
        stored = client.get_item(TableName=store.table, Key={"id": {"S": "k"}})["Item"]
        assert stored["doc"] == {"M": {"kept": {"N": "1"}, "b": {"M": {"price": {"N": "0.1"}}}}}
        client.put_item(TableName=store.table, Item={"id": {"S": "k"}, "doc": {"S": "text"}})
        with pytest.raises(SchemaMismatchError):
            table.update("k", {"doc.b.price": Decimal(1)})


@pytest.mark.parametrize("kind", ["array<int>", "array<date>", "array<binary>", "struct<a:int>"])
@pytest.mark.parametrize("text", ["null", "7", '"x"', "[{]", "NaN", '{"a":"x"}', '{"a":1.5}'])
def test_redis_reports_text_that_is_no_value_of_the_column(kind: str, text: str) -> None:
    declared = [parse_column("id", "string"), parse_column("x", kind)]
    codec = RedisCodec("Redis table t", "t", ("id",), declared, 100, 0)
    with pytest.raises(SchemaMismatchError) as caught:
        codec.record((b"k",), [None, b"k", text.encode()])
    assert caught.value.column == "x"


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_keys_of_json_objects_are_texts_that_every_store_can_hold(name: str) -> None:
    check = make_checker(parse_column("doc", "json"))
    for value in ({name: 1}, {"a": [{name: 1}]}, {"a": name}):
        with pytest.raises(TypeError, match="expected what JSON can hold"):
            check(value)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("a.b", ("a", "b")),
        ("`a.b`.c", ("a.b", "c")),
        ("a.`b``c`.d", ("a", "b`c", "d")),
        ("a.b c", ("a", "b c")),
        ("a", None),
        ("`a.b`", None),
        ("a.", None),
        (".a", None),
        ("a..b", None),
        ("a.`b", None),
        ("a.`b`c", None),
    ],
)
def test_a_path_names_a_column_and_fields(text: str, steps: tuple[str, ...] | None) -> None:
    path = parse_inner_name(text)
    assert (path and (path.root, *path.names)) == steps


def test_a_column_whose_name_is_the_text_wins_over_a_path(tmp_path: Path) -> None:
    columns = {"id": "string", "a": "struct<b:bigint>", "a.b": "string"}
    store = SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=columns, create=True)
    with blocking(store) as table:
        table.put("k", {"a": {"b": 1}})
        table.update("k", {"a.b": "x"})
        table.update("k", Changes(add={"a.`b`": 1}))
        assert table.get("k") == {"id": "k", "a": {"b": 2}, "a.b": "x"}


@pytest.mark.parametrize(
    "change",
    [
        {"doc": None, "doc.a": 1},
        Changes(set={"doc": None}, add={"doc.a": 1}),
        Changes(set={"doc.a": 1}, add={"doc.`a`": 1}),
        {"doc.b": None},
        {"doc.a": "1"},
        {"maps.x": 1},
        Changes(add={"doc.b.at": 1}),
        Changes(append={"doc.a": [1]}),
    ],
)
def test_what_an_update_can_not_do_inside_is_rejected(tmp_path: Path, change: Any) -> None:
    store = SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=COLUMNS, create=True)
    with blocking(store) as table:
        table.put("k", {"doc": {"a": 1}})
        before = table.get("k")
        for _ in range(2):  # also after the path was named once
            with pytest.raises(SchemaMismatchError):
                table.update("k", change)
        assert table.get("k") == before


def test_a_whole_record_names_no_values_inside_columns(tmp_path: Path) -> None:
    store = SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=COLUMNS, create=True)
    with blocking(store) as table:
        for _ in range(2):
            with pytest.raises(SchemaMismatchError):
                table.put("k", {"doc.a": 1})
        assert table.get("k") is None


@pytest.mark.parametrize(
    "updates",
    [
        [{"doc": None}, {"doc.a": 1}],
        [Changes(add={"doc.a": 1}), Changes(set={"doc": None})],
        [{"doc.a": 1}, Changes(add={"doc.`a`": 1})],
    ],
)
def test_updates_of_a_column_and_inside_it_are_not_merged(updates: list[Any]) -> None:
    assert merge_updates(updates) is None


def test_updates_inside_a_column_are_merged() -> None:
    merged = merge_updates([Changes(add={"doc.a": 1}), Changes(add={"doc.a": 2, "doc.c": 1})])
    assert merged == Changes(add={"doc.a": 3, "doc.c": 1})
