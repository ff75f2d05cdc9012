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
SPENT = {"id": "bigint", "email": "string", "spent": "bigint", "town": "string"}
SEEN = {"id": "bigint", "email": "string", "town": "string"}
START = datetime(2013, 7, 1, tzinfo=UTC)


def order(number: int, customer: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "number": number,
        "at": START + timedelta(minutes=number),
        "customer": customer,
        "total": number * 10,
    }


ANN = {"id": 7, "email": "ann@example.org", "address": {"city": "Oslo"}}
BOB = {"id": 8, "email": None, "address": None}
ROWS = [
    order(1, ANN),
    order(2, BOB),
    order(3, None),
    order(4, ANN),
    order(5, {"id": None, "email": "x", "address": None}),
    order(6, ANN),
]
WITH_KEY: Rows = [row for row in ROWS if row["customer"] and row["customer"]["id"]]


def latest() -> dict[int, dict[str, Any]]:
    return {row["customer"]["id"]: {"id": row["customer"]["id"], **row} for row in WITH_KEY}


def spent() -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for row in WITH_KEY:
        customer = row["customer"]
        town = customer["address"] and customer["address"]["city"]
        begun = {"id": customer["id"], "email": customer["email"], "town": town, "spent": 0}
        found.setdefault(customer["id"], begun)["spent"] += row["total"]
    return found


def seen() -> dict[int, dict[str, Any]]:
    return {key: {name: record[name] for name in SEEN} for key, record in spent().items()}


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
    fill(lake, partitions=2)
    newest = remote("latest", store_of(request, "latest", LATEST), newest_by="at")
    sums = remote("spent", store_of(request, "spent", SPENT), idempotent=True, fenced=True)
    plain = remote("seen", store_of(request, "seen", SEEN))
    app = Application("app", engine="auto" if engine == "in process" else "spark")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    on = {"customer.id": "id"}
    after = orders.send_to(app.table(newest), on=on, on_null_key="skip").update(
        app.table(sums),
        on=on,
        set=["customer.email"],
        add={"spent": "total"},
        if_missing=["customer.address.city as town"],
        on_null_key="skip",
    )
    if engine == "spark":
        message = update_message(
            key="customer.id", update=["customer.email"], default=["customer.address.city as town"]
        )
        after.map(*message).send_to(
            app.table(plain), UpdateContract.UPDATE_WITH_DEFAULTS, on_null_key="skip"
        )
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


def sqlite_table(tmp_path: Path, columns: dict[str, str], key: Any = "id", **options: Any) -> Any:
    store = SqliteTable(tmp_path / "t.sqlite", "t", key, columns=columns, create=True)
    return RemoteTable("t", key=key, read_function=store, write_function=store, **options)


def test_a_column_of_another_name_becomes_the_key_and_tombstones_delete(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake")
    fill(lake, [*ROWS, {"number": 2, "__tombstone": True}], partitions=2)
    columns = {"shop": "string", "id": "bigint", "at": "timestamp", "total": "bigint"}
    table = sqlite_table(tmp_path, columns, key=["shop", "id"])
    app = Application("app", engine="auto")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    orders = orders.map("* except (customer)", "'north' as shop")
    orders.send_to(app.table(table), on={"number": "id", "shop": "shop"})
    (planned,) = plan_application(app, lake=lake).tables
    assert planned.order == "per key"
    run_application(app, lake=lake, spark=IN_PROCESS, adopt=True)
    with BlockingTable(table) as blocking:
        found = blocking.get_all([("north", row["number"]) for row in ROWS])
    assert found == {
        ("north", row["number"]): {
            "shop": "north",
            "id": row["number"],
            "at": row["at"],
            "total": row["total"],
        }
        for row in ROWS
        if row["number"] != 2
    }


def test_a_null_key_at_a_path_fails_and_a_record_that_is_refused_is_a_letter(
    tmp_path: Path,
) -> None:
    lake = open_lake(tmp_path / "lake")
    fill(lake, [*ROWS, {"number": 2, "__tombstone": True}])
    app = Application("fails", engine="auto")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    orders.send_to(app.table(sqlite_table(tmp_path, LATEST)), on={"customer.id": "id"})
    with pytest.raises(NullKeyError):
        run_application(app, lake=lake, spark=IN_PROCESS, adopt=True)

    app = Application("letters", engine="auto")
    letters = app.output_stream("lake.letters", partitions=1)
    app.input_stream("lake.orders", default_offset="oldest").update(
        app.table(sqlite_table(tmp_path, LATEST)),
        on={"customer.id": "id"},
        set=["total"],
        on_null_key="skip",
        dead_letters=letters,
    )
    with BlockingTable(sqlite_table(tmp_path, LATEST)) as blocking:
        blocking.put(8, {"id": 8})
    report = run_application(app, lake=lake, spark=IN_PROCESS, adopt=True)
    assert report.step.counters["t"]["null_keys"] == 3, "two records and the tombstone"
    with BlockingTable(sqlite_table(tmp_path, LATEST)) as blocking:
        assert blocking.get(8)["total"] == 20
    streams = LakeStreams(lake)
    sent = streams.read_arrow(streams.all_ranges("letters"))
    missing = [str(row["customer"]["id"]) for row in WITH_KEY if row["customer"]["id"] != 8]
    assert sent.column("key").to_pylist() == missing


def refuse(tmp_path: Path, build: Any) -> PlanningError:
    """Return the error of the plan of an application over the orders."""
    lake = open_lake(tmp_path / "lake")
    fill(lake)
    app = Application("app")

    def plan() -> None:
        build(app, app.input_stream("lake.orders"))
        plan_application(app, lake=lake)

    with pytest.raises(PlanningError) as raised:
        plan()
    return raised.value


@pytest.mark.parametrize(
    ("on", "column", "named"),
    [
        ({"customer.idd": "id"}, "customer.idd", "email"),
        ({"customer": "id"}, "customer", "customer.id"),
        (None, "id", "on="),
        ("customer.id", None, "on="),
    ],
)
def test_the_plan_refuses_a_key_that_records_do_not_have(
    tmp_path: Path, on: Any, column: str | None, named: str
) -> None:
    table = sqlite_table(tmp_path, LATEST)
    error = refuse(tmp_path, lambda app, orders: orders.send_to(app.table(table), on=on))
    assert error.column == column
    assert named in error.next_step


@pytest.mark.parametrize("key", ["customer.id", "customer.id as id"])
def test_a_table_that_is_declared_with_a_path_is_refused_with_what_to_write(
    tmp_path: Path, key: str
) -> None:
    table = RemoteTable("t", key=key, write_function=MemoryTable(f"t {tmp_path}"))
    error = refuse(tmp_path, lambda app, orders: orders.send_to(app.table(table)))
    assert "key='id'" in error.next_step
    assert "on={'customer.id': 'id'}" in error.next_step


def test_a_table_without_types_is_refused_with_a_struct_as_its_key(tmp_path: Path) -> None:
    table = RemoteTable("t", key="customer", write_function=MemoryTable(f"t {tmp_path}"))
    error = refuse(tmp_path, lambda app, orders: orders.send_to(app.table(table)))
    assert "on=" in error.problem
    assert "'customer.id'" in error.next_step


def test_a_column_that_a_table_lacks_is_left_out_as_advised(tmp_path: Path) -> None:
    table = sqlite_table(tmp_path, {"id": "bigint", "number": "bigint"})
    kept = ["customer", "number"]
    on = {"customer.id": "id"}
    error = refuse(
        tmp_path, lambda app, orders: orders.select(*kept).send_to(app.table(table), on=on)
    )
    assert '.map("* except (customer)", "customer.id as id"), in place of on=' in error.next_step
    app = Application("app")
    orders = app.input_stream("lake.orders").select(*kept).partition_by("customer.id")
    orders.map("* except (customer)", "customer.id as id").send_to(app.table(table))
    plan_application(app, lake=open_lake(tmp_path / "lake"))


def test_whole_records_with_another_column_of_the_keys_name_are_refused(tmp_path: Path) -> None:
    table = sqlite_table(tmp_path, LATEST | {"record_id": "bigint"})
    on = {"customer.id": "id"}

    def build(app: Application, orders: Any) -> None:
        orders.with_columns(id="number").send_to(app.table(table), on=on)

    error = refuse(tmp_path, build)
    assert '.map("* except (id)", "id as record_id")' in error.next_step
    app = Application("app")
    orders = app.input_stream("lake.orders").with_columns(id="number")
    orders.map("* except (id)", "id as record_id").send_to(app.table(table), on=on)
    store = MemoryTable(f"sums {tmp_path}")
    sums = app.table(RemoteTable("sums", key="id", write_function=store))
    orders.update(sums, on=on, set={"last": "id"}, if_missing=["customer.id"])
    plan_application(app, lake=open_lake(tmp_path / "lake"))
    with pytest.raises(ConfigurationError, match="on="):
        orders.update(sums, on=on, set={"last": "id"}, if_missing=["id"])


@pytest.mark.parametrize("kind", ["struct<id:bigint>", "array<bigint>", "map<string,bigint>"])
def test_a_nested_key_is_refused_where_a_store_is_declared(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        sqlite_table(tmp_path, LATEST | {"id": kind})
    assert raised.value.argument == "key"


def test_a_list_can_set_a_value_inside_a_column_only_as_a_mapping(tmp_path: Path) -> None:
    table = sqlite_table(tmp_path, {"id": "bigint", "address": "struct<city:string>"})
    on = {"customer.id": "id"}

    def build(app: Application, orders: Any) -> None:
        orders.update(app.table(table), on=on, set=["customer.address.city"])

    step = refuse(tmp_path, build).next_step
    assert "{'address.city': 'customer.address.city'}" in step
    app = Application("app")
    app.input_stream("lake.orders").update(
        app.table(table), on=on, set={"address.city": "customer.address.city"}
    )
    plan_application(app, lake=open_lake(tmp_path / "lake"))
