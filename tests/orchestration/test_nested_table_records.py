"""Applications over nested records and remote tables: puts, updates inside columns and lookups, by
Spark and in process.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct import (
    Application,
    LakeStreams,
    Schema,
    UpdateContract,
    open_lake,
    run_application,
    update_message,
)
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.redis import RedisTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.operation import Changes
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.servers.dynamodb import new_name

ORDERS = {
    "id": "string",
    "city": "string",
    "views": "bigint",
    "customer": "struct<name:string,address:struct<city:string,`zip.code`:int>,seen:timestamp>",
    "lines": "array<struct<sku:string,price:decimal(10,2),day:date>>",
    "attributes": "map<string,array<bigint>>",
}
NESTED = ("customer", "lines", "attributes")
AT = datetime(2013, 7, 1, 5, 0, 0, 250_000, tzinfo=UTC)
FIRST: dict[str, Any] = {
    "id": "a",
    "city": "Oslo",
    "views": 2**60,
    "customer": {"name": "Ada", "address": {"city": None, "zip.code": 7}, "seen": AT},
    "lines": [{"sku": "s", "price": Decimal("0.10"), "day": date(2013, 7, 1)}, None],
    "attributes": {"b.c": [2**53 + 1, None], "a": None},
}
RECORDS: list[dict[str, Any]] = [
    FIRST,
    {**dict.fromkeys(ORDERS), "id": "b", "city": "Rome", "views": 1, "lines": [], "attributes": {}},
]


@pytest.fixture(params=["in process", pytest.param("spark", marks=pytest.mark.spark)])
def spark_or_process(request: pytest.FixtureRequest) -> Any:
    """The session in which an application runs."""
    if request.param == "spark":
        return request.getfixturevalue("spark")
    return IN_PROCESS


def table(name: str, store: Any) -> RemoteTable[Any, Any, Any]:
    return RemoteTable(name, key="id", read_function=store, write_function=store)


def test_nested_records_go_into_tables_are_changed_inside_and_looked_up(
    tmp_path: Path, spark_or_process: Any
) -> None:
    lake = open_lake(tmp_path / "lake")
    streams = LakeStreams(lake)
    arriving = {"id": "string", "city": "string", "views": "bigint"}
    streams.create("orders", schema=Schema.of(arriving), key=["id"], partitions=1)
    rows = pa.Table.from_pylist([{name: r[name] for name in arriving} for r in RECORDS])
    streams.append("orders", rows, producer="test", sequence=1)
    file = tmp_path / "t.sqlite"
    known = table("known", SqliteTable(file, "known", "id", columns=ORDERS, create=True))
    copies = table("copies", SqliteTable(file, "copies", "id", columns=ORDERS, create=True))
    kept = {**ORDERS, "counts": "struct<views:bigint,inner:struct<n:int>>"}
    changed = table("changed", SqliteTable(file, "changed", "id", columns=kept, create=True))
    plain = table("plain", MemoryTable(f"plain {tmp_path}"))
    with BlockingTable(known) as direct:
        direct.put_all([(record["id"], record) for record in RECORDS])

    engine = "auto" if spark_or_process is IN_PROCESS else "spark"
    app = Application("orders", engine=engine)
    orders = app.input_stream("lake.orders", default_offset="oldest")
    found = orders.join(app.table(known), on="id", select=list(NESTED))
    found.send_to(app.table(copies))
    for target in (changed, plain):
        found.update(
            app.table(target),
            set={"customer.address.city": "city", "attributes": "attributes"},
            add={"counts.views": "views", "counts.inner.n": "1"},
            if_missing=["customer", "lines"],
        )
    run_application(app, lake=lake, spark=spark_or_process, adopt=True)

    expected = {
        "a": {
            "customer": {**FIRST["customer"], "address": {"city": "Oslo", "zip.code": 7}},
            "lines": FIRST["lines"],
            "attributes": FIRST["attributes"],
            "counts": {"views": 2**60, "inner": {"n": 1}},
        },
        "b": {
            "customer": {"name": None, "address": {"city": "Rome", "zip.code": None}, "seen": None},
            "lines": [],
            "attributes": {},
            "counts": {"views": 1, "inner": {"n": 1}},
        },
    }
    with BlockingTable(changed) as stored:
        for key, record in stored.get_all(["a", "b"]).items():
            assert {name: record[name] for name in expected[key]} == expected[key]
    with BlockingTable(plain) as stored:
        assert stored.get("a") == expected["a"]
    with BlockingTable(copies) as stored:
        assert stored.get_all(["a", "b"]) == {record["id"]: record for record in RECORDS}


@pytest.mark.spark
def test_update_messages_change_values_inside_and_have_nested_defaults(
    tmp_path: Path, spark: Any
) -> None:
    lake = open_lake(tmp_path / "lake")
    streams = LakeStreams(lake)
    schema = Schema.of({"id": "string", "city": "string"})
    streams.create("orders", schema=schema, key=["id"], partitions=1)
    rows = pa.table({"id": ["a", "b"], "city": ["Oslo", "Rome"]})
    streams.append("orders", rows, producer="test", sequence=1)
    store = SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=ORDERS, create=True)
    changed = table("changed", store)
    with BlockingTable(changed) as direct:
        direct.put("a", FIRST)

    app = Application("messages", engine="spark")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    default = {"customer": "named_struct('name', 'none')", "attributes": "map('x', array(1L))"}
    orders.map(
        *update_message(key="id", update={"customer.address.city": "city"}, default=default)
    ).send_to(app.table(changed), UpdateContract.UPDATE_WITH_DEFAULTS)
    run_application(app, lake=lake, spark=spark, adopt=True)

    address = {"city": "Oslo", "zip.code": 7}
    begun = {"name": "none", "address": {"city": "Rome", "zip.code": None}, "seen": None}
    with BlockingTable(changed) as stored:
        found = stored.get_all(["a", "b"])
    assert found["a"] == {**FIRST, "customer": {**FIRST["customer"], "address": address}}
    assert (found["b"]["customer"], found["b"]["attributes"]) == (begun, {"x": [1]})


JSON_TYPES = {
    "id": "string",
    "tags": "map<string,array<bigint>>",
    "customer": "struct<name:string,scores:map<string,double>>",
    "lines": "array<struct<sku:string,ok:boolean>>",
}
JSON_RECORDS: list[dict[str, Any]] = [
    {
        "id": "a",
        "tags": {"b": [2**60, None], "a": None, "é.b": []},
        "customer": {"name": "Ada", "scores": {"x": 1.5, "y": None}},
        "lines": [{"sku": None, "ok": True}, None],
    },
    {"id": "b", "tags": {}, "customer": {"name": None, "scores": None}, "lines": []},
    {"id": "c", "tags": None, "customer": None, "lines": None},
]


def sqlite_of_json(request: pytest.FixtureRequest, columns: dict[str, str]) -> SqliteTable:
    file = request.getfixturevalue("tmp_path") / "t.sqlite"
    return SqliteTable(file, "t", "id", columns=columns, create=True)


def postgres_of_json(request: pytest.FixtureRequest, columns: dict[str, str]) -> PostgresTable:
    port = str(request.getfixturevalue("postgres_server").port)
    connect = {"host": "127.0.0.1", "port": port, "user": "adjunct", "dbname": "adjunct"}
    kinds = columns | {"tags": "jsonb"}
    return PostgresTable(new_name(), "id", columns=kinds, create=True, connect=connect)


def redis_of_json(request: pytest.FixtureRequest, columns: dict[str, str]) -> RedisTable:
    url = request.getfixturevalue("redis_server").url()
    return RedisTable(new_name(), "id", columns=columns, url=url)


def dynamodb_of_json(request: pytest.FixtureRequest, columns: dict[str, str]) -> DynamoDbTable:
    session = request.getfixturevalue("dynamodb_server").session()
    return DynamoDbTable(new_name(), "id", columns=columns, create=True, **session)


@pytest.mark.parametrize(
    "store_of",
    [
        sqlite_of_json,
        *(
            pytest.param(store, marks=pytest.mark.server)
            for store in (postgres_of_json, redis_of_json, dynamodb_of_json)
        ),
    ],
)
def test_maps_structs_and_arrays_go_into_columns_of_json(
    tmp_path: Path, request: pytest.FixtureRequest, spark_or_process: Any, store_of: Any
) -> None:
    lake = open_lake(tmp_path / "lake")
    streams = LakeStreams(lake)
    streams.create("orders", schema=Schema.of(JSON_TYPES), key=["id"], partitions=1)
    streams.append("orders", JSON_RECORDS, producer="test", sequence=1)
    store = store_of(request, {"id": "string", **dict.fromkeys(list(JSON_TYPES)[1:], "json")})
    app = Application("to-json", engine="auto" if spark_or_process is IN_PROCESS else "spark")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    orders.send_to(app.table(table("copies", store)))
    run_application(app, lake=lake, spark=spark_or_process, adopt=True)
    with BlockingTable(table("copies", store)) as stored:
        found = stored.get_all([record["id"] for record in JSON_RECORDS])
    assert found == {record["id"]: record for record in JSON_RECORDS}


COUNTS = {"id": "string", "counts": "struct<views:int,inner:struct<city:string>>"}


def dynamodb(request: pytest.FixtureRequest) -> DynamoDbTable:
    session = request.getfixturevalue("dynamodb_server").session()
    return DynamoDbTable(new_name(), "id", columns=COUNTS, create=True, **session)


def postgres(request: pytest.FixtureRequest) -> PostgresTable:
    port = str(request.getfixturevalue("postgres_server").port)
    connect = {"host": "127.0.0.1", "port": port, "user": "adjunct", "dbname": "adjunct"}
    return PostgresTable("nested_counts", "id", columns=COUNTS, create=True, connect=connect)


def redis(request: pytest.FixtureRequest) -> RedisTable:
    server = request.getfixturevalue("redis_server")
    return RedisTable("nested_counts", "id", columns=COUNTS, url=server.url())


@pytest.mark.server
@pytest.mark.parametrize("store_of", [dynamodb, postgres, redis])
def test_fenced_and_idempotent_tables_are_changed_inside_once(
    tmp_path: Path, request: pytest.FixtureRequest, store_of: Any
) -> None:
    lake = open_lake(tmp_path / "lake")
    streams = LakeStreams(lake)
    schema = Schema.of({"id": "string", "city": "string"})
    streams.create("orders", schema=schema, key=["id"], partitions=1)
    rows = pa.table({"id": ["a", "b", "a"], "city": ["Oslo", "Rome", "Bern"]})
    streams.append("orders", rows, producer="test", sequence=1)
    store = store_of(request)
    counted = RemoteTable(
        "counted", key="id", read_function=store, write_function=store, fenced=True, idempotent=True
    )

    app = Application("counting", engine="auto")
    app.input_stream("lake.orders", default_offset="oldest").update(
        app.table(counted),
        set={"counts.inner.city": "city"},
        add={"counts.views": "1"},
        if_missing=[],
    )
    run_application(app, lake=lake, spark=IN_PROCESS, adopt=True)

    with BlockingTable(counted) as stored:
        found = stored.get_all(["a", "b"])
        assert found["a"]["counts"] == {"views": 2, "inner": {"city": "Bern"}}
        assert found["b"]["counts"] == {"views": 1, "inner": {"city": "Rome"}}
        with pytest.raises(AdjunctError):
            stored.update("a", Changes(add={"counts.views": 2**31 - 2}))
        assert stored.get("a") == found["a"]
