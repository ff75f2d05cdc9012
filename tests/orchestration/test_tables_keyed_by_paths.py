"""Remote tables whose key is a value inside a column of the records, against plain Python."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

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
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.resources.errors import ConfigurationError, NullKeyError, PlanningError
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.redis import RedisTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.servers.dynamodb import new_name

Rows = list[dict[str, Any]]
CUSTOMER = "struct<id:bigint,email:string,address:struct<city:string>>"
ORDERS = {"number": "bigint", "at": "timestamp", "customer": CUSTOMER, "total": "bigint"}
LATEST = {"id": "bigint"} | ORDERS
SPENT = {"id": "bigint", "email": "string", "town": "string", "spent": "bigint", "first": "bigint"}
SEEN = {"id": "bigint", "email": "string", "first": "bigint"}
START = datetime(2013, 7, 1, tzinfo=UTC)


def order(number: int, customer: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "number": number,
        "at": START + timedelta(minutes=number),
        "customer": customer,
        "total": number * 10,
    }


def ann(city: str | None) -> dict[str, Any]:
    return {"id": 7, "email": "ann@example.org", "address": {"city": city}}


BOB = {"id": 8, "email": None, "address": None}
ROWS = [
    order(1, ann("Oslo")),
    order(2, BOB),
    order(3, None),
    order(4, ann("Bergen")),
    order(5, {"id": None, "email": "x", "address": None}),
    order(6, ann(None)),
]
WITH_KEY: Rows = [row for row in ROWS if row["customer"] and row["customer"]["id"]]


def latest() -> dict[int, dict[str, Any]]:
    return {row["customer"]["id"]: {"id": row["customer"]["id"], **row} for row in WITH_KEY}


def spent() -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for row in WITH_KEY:
        customer = row["customer"]
        begun = {"id": customer["id"], "first": row["number"], "spent": 0}
        record = found.setdefault(customer["id"], begun)
        record["email"] = customer["email"]
        record["town"] = customer["address"] and customer["address"]["city"]
        record["spent"] += row["total"]
    return found


def seen() -> dict[int, dict[str, Any]]:
    return {
        key: {name: record[name] for name in ("id", "email", "first")}
        for key, record in spent().items()
    }


def memory(request: pytest.FixtureRequest, name: str, columns: dict[str, str]) -> Any:
    return MemoryTable(f"{name} {request.getfixturevalue('tmp_path')}")


def sqlite(request: pytest.FixtureRequest, name: str, columns: dict[str, str]) -> Any:
    file = request.getfixturevalue("tmp_path") / "t.sqlite"
    return SqliteTable(file, name, "id", columns=columns, create=True)


def postgres(request: pytest.FixtureRequest, name: str, columns: dict[str, str]) -> Any:
    port = str(request.getfixturevalue("postgres_server").port)
    connect = {"host": "127.0.0.1", "port": port, "user": "adjunct", "dbname": "adjunct"}
    return PostgresTable(new_name(), "id", columns=columns, create=True, connect=connect)


def redis(request: pytest.FixtureRequest, name: str, columns: dict[str, str]) -> Any:
    url = request.getfixturevalue("redis_server").url()
    return RedisTable(new_name(), "id", columns=columns, url=url)


def dynamodb(request: pytest.FixtureRequest, name: str, columns: dict[str, str]) -> Any:
    session = request.getfixturevalue("dynamodb_server").session()
    return DynamoDbTable(new_name(), "id", columns=columns, create=True, **session)


def remote(name: str, store: Any, **options: Any) -> RemoteTable[Any, Any, Any]:
    return RemoteTable(name, key="id", read_function=store, write_function=store, **options)


def read(table: RemoteTable[Any, Any, Any]) -> dict[int, dict[str, Any]]:
    with BlockingTable(table) as blocking:
        found = blocking.get_all([7, 8])
    return {key: {"id": key, **record} for key, record in found.items()}  # memory keeps no key


def fill(lake: Any, rows: Rows = ROWS, partitions: int = 1) -> None:
    streams = LakeStreams(lake)
    streams.create("orders", schema=Schema.of(ORDERS), key=["number"], partitions=partitions)
    streams.append("orders", rows, producer="test", sequence=1)


@pytest.mark.parametrize(
    ("store_of", "engine"),
    [
        (memory, "in process"),
        (sqlite, "in process"),
        pytest.param(sqlite, "spark", marks=pytest.mark.spark),
        *(
            pytest.param(store, "in process", marks=pytest.mark.server)
            for store in (postgres, redis, dynamodb)
        ),
    ],
)
def test_records_and_updates_have_the_key_at_a_path(
    tmp_path: Path, request: pytest.FixtureRequest, store_of: Any, engine: str
) -> None:
    lake = open_lake(tmp_path / "lake")
    fill(lake)
    newest = remote("latest", store_of(request, "latest", LATEST), newest_by="at")
    sums = remote("spent", store_of(request, "spent", SPENT), idempotent=True, fenced=True)
    plain = remote("seen", store_of(request, "seen", SEEN))
    app = Application("app", engine="auto" if engine == "in process" else "spark")
    app.auto_repartition = True
    orders = app.input_stream("lake.orders", default_offset="oldest").partition_by(
        "customer.id", partitions=2
    )
    on = {"customer.id": "id"}
    after = orders.send_to(app.table(newest), on=on, on_null_key="skip").update(
        app.table(sums),
        on=on,
        set=["customer.email", "customer.address.city as town"],
        add={"spent": "total"},
        if_missing=["number as first"],
        on_null_key="skip",
    )
    if engine == "spark":
        after.map(
            *update_message(
                key="customer.id", update=["customer.email"], default=["number as first"]
            )
        ).send_to(app.table(plain), UpdateContract.UPDATE_WITH_DEFAULTS, on_null_key="skip")
    after.send_to(app.output_stream("lake.after", partitions=1))
    spark = IN_PROCESS if engine == "in process" else request.getfixturevalue("spark")
    run_application(app, lake=lake, spark=spark, adopt=True)

    assert read(newest) == latest()
    assert read(sums) == spent()
    if engine == "spark":
        assert read(plain) == seen()
    streams = LakeStreams(lake)
    passed = streams.read_arrow(streams.all_ranges("after")).to_pylist()
    assert sorted(row["number"] for row in passed) == [row["number"] for row in ROWS]
    assert "id" not in passed[0]
