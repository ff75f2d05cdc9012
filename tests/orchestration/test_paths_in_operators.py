"""Operators name values inside nested columns by paths, by every engine, against plain Python."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import OperatorFailedError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.windows import Aggregate, Count, Sum, Tumbling
from tests.orchestration.all_engines import BY_EACH, BY_SPARK, ENGINES, WithoutSpark
from tests.orchestration.seen_times import at

if TYPE_CHECKING:
    from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark
Rows = list[dict[str, Any]]

ORDERS = Schema.of(
    id="bigint", customer={"id": "bigint", "home": {"city": "string"}}, total="double"
)
CUSTOMERS = Schema.of(id="bigint", name="string", address={"city": "string", "geo": {"lat": "int"}})
ORDER_ROWS: Rows = [
    {"id": 1, "customer": {"id": 7, "home": {"city": "Oslo"}}, "total": 1.5},
    {"id": 2, "customer": {"id": 8, "home": None}, "total": 2.5},
    {"id": 3, "customer": None, "total": 3.5},
    {"id": 4, "customer": {"id": None, "home": {"city": "Bern"}}, "total": None},
    {"id": 5, "customer": {"id": 7, "home": {"city": "Oslo"}}, "total": 5.5},
    {"id": 6, "customer": {"id": 99, "home": {"city": "Rome"}}, "total": 6.5},
]
CUSTOMER_ROWS: Rows = [
    {"id": 7, "name": "Ann", "address": {"city": "Oslo", "geo": {"lat": 60}}},
    {"id": 8, "name": "Bob", "address": None},
    {"id": 9, "name": "Cid", "address": {"city": "Rome", "geo": None}},
]


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    return step_world


def fill(
    world: StepWorld, name: str, schema: Schema, rows: Rows, partitions: int = 2, **options: Any
) -> None:
    world.streams.create(name, schema=schema, key=["id"], partitions=partitions)
    world.streams.append(name, rows, producer="test", sequence=1, **options)


def received(world: StepWorld, name: str) -> Rows:
    table = world.streams.read_arrow(world.streams.all_ranges(name))
    names = [column for column in table.column_names if not column.startswith("__")]
    return sorted(table.select(names).to_pylist(), key=repr)


def with_customers() -> Rows:
    """Return the orders with name, city and latitude of their customers."""
    entries = {row["id"]: row for row in CUSTOMER_ROWS}
    rows = []
    for order in ORDER_ROWS:
        key = order["customer"] and order["customer"]["id"]
        entry = entries.get(key, {"name": None, "address": None})
        address = entry["address"] or {"city": None, "geo": None}
        latitude = address["geo"] and address["geo"]["lat"]
        rows.append(order | {"name": entry["name"], "city": address["city"], "latitude": latitude})
    return rows


def run(world: StepWorld, app: Application, engine: str) -> None:
    world.advance(*app.datasets)
    app.engine = "auto" if ENGINES[engine] is WithoutSpark else "spark"
    report = run_step(world.context(app), ENGINES[engine]())
    if ENGINES[engine] is WithoutSpark:
        assert report.in_process_batches == report.batches == 1


@pytest.mark.parametrize("engine", BY_EACH)
@pytest.mark.parametrize("repartitioned", [False, True])
def test_a_join_names_its_key_and_parts_of_entries_by_paths(
    world: StepWorld, engine: str, repartitioned: bool
) -> None:
    fill(world, "orders", ORDERS, ORDER_ROWS)
    fill(world, "customers", CUSTOMERS, CUSTOMER_ROWS, end_of_dataset="v1")
    app = Application("app", auto_repartition=not repartitioned)
    customers = bounded_dataset("customers", input="lake.customers", key="id", partitions=2)
    orders = app.input_stream("lake.orders")
    if repartitioned:
        orders = orders.partition_by("customer.id")
    joined = orders.join(
        app.table(customers),
        on={"customer.id": "id"},
        how="left",
        select=["name", "address.city", "address.geo.lat as latitude"],
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="id"))
    run(world, app, engine)
    assert received(world, "out") == sorted(with_customers(), key=repr)


EVENTS = Schema.of(
    id="bigint", who={"id": "bigint"}, meta={"at": "timestamp", "size": {"bytes": "int"}}
)
SECONDS = [(1, 7, 1), (2, 8, 2), (3, 7, 4), (4, None, 5), (5, 8, 12), (6, 7, 13), (7, 1, 40)]


def event_rows(offset: int = 0) -> Rows:
    rows: Rows = []
    for number, who, second in SECONDS:
        size = {"bytes": number * 10} if number != 3 else None
        meta = {"at": at(second + offset), "size": size}
        rows.append({"id": number, "who": None if who is None else {"id": who}, "meta": meta})
    return rows


@pytest.mark.parametrize("engine", BY_SPARK)
def test_a_window_names_its_key_times_and_values_by_paths(world: StepWorld, engine: str) -> None:
    fill(world, "events", EVENTS, event_rows(), partitions=1)
    app = Application("app", auto_repartition=True)
    events = app.input_stream("lake.events", event_time="meta.at", delay=dt.timedelta(seconds=5))
    made = {
        "number": Count(),
        "sum": Sum("meta.size.bytes"),
        "listed": Aggregate(
            lambda records: str(records.to_pydict()), "string", ["id", "meta.size.bytes"]
        ),
        "names": Aggregate(lambda records: ",".join(records.column_names), "string"),
    }
    windows = events.window(
        Tumbling(dt.timedelta(seconds=10)), by="who.id", name="ten", aggregates=made
    )
    windows.send_to(app.output_stream("lake.out", partitions=2, key="id"))
    windows.late_records().send_to(app.output_stream("lake.late", partitions=1))
    run(world, app, engine)
    expected: Rows = []
    for who in (7, 8):
        for begin in (0, 10):
            taken = [
                row
                for row in event_rows()
                if row["who"]
                and row["who"]["id"] == who
                and at(begin) <= row["meta"]["at"] < at(begin + 10)
            ]
            sizes = [row["meta"]["size"] and row["meta"]["size"]["bytes"] for row in taken]
            listed = {"id": [row["id"] for row in taken], "bytes": sizes}
            expected.append(
                {
                    "id": who,
                    "window_start": at(begin),
                    "window_end": at(begin + 10),
                    "number": len(taken),
                    "sum": sum(filter(None, sizes)) if any(sizes) else None,
                    "listed": str(listed),
                    "names": "id,who,meta",
                }
            )
    assert received(world, "out") == sorted(expected, key=repr)
    (late,) = received(world, "late")
    assert json.loads(late["record"]).keys() == {"id", "who", "meta"}


@pytest.mark.parametrize("engine", BY_SPARK)
@pytest.mark.parametrize("how", ["left", "full"])
def test_a_join_of_streams_names_keys_and_values_by_paths(
    world: StepWorld, engine: str, how: Any
) -> None:
    fill(world, "left", EVENTS, event_rows())
    fill(world, "right", EVENTS, event_rows(2))
    app = Application("app", auto_repartition=True)
    times: dict[str, Any] = {"event_time": "meta.at", "delay": dt.timedelta(seconds=5)}
    left = app.input_stream("lake.left", **times)
    joined = left.join_stream(
        app.input_stream("lake.right", **times),
        on={"who.id": "who.id"},
        within=dt.timedelta(seconds=3),
        how=how,
        name="meet",
        select=["id as other", "meta.size.bytes", "meta.at as met_at"],
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="id"))
    run(world, app, engine)
    expected: Rows = []
    for row in event_rows():
        met = []
        for other in event_rows(2):
            distance = abs(row["meta"]["at"] - other["meta"]["at"])
            if row["who"] and row["who"] == other["who"] and distance <= dt.timedelta(seconds=3):
                size = other["meta"]["size"] and other["meta"]["size"]["bytes"]
                met.append({"other": other["id"], "bytes": size, "met_at": other["meta"]["at"]})
        if not met and row["meta"]["at"] < at(30):
            met.append({"other": None, "bytes": None, "met_at": None})
        expected += [row | each for each in met]
    if how == "full":
        expected += unmet()
    assert received(world, "out") == sorted(expected, key=repr)


def unmet() -> Rows:
    """Return the results for right rows without a left one, whose key is where left ones have it."""
    expected: Rows = []
    for other in event_rows(2):
        if other["meta"]["at"] >= at(30):
            continue
        near = [
            row for row in event_rows() if abs(row["meta"]["at"] - other["meta"]["at"]).seconds <= 3
        ]
        if other["who"] is None or all(row["who"] != other["who"] for row in near):
            size = other["meta"]["size"] and other["meta"]["size"]["bytes"]
            made = {"other": other["id"], "bytes": size, "met_at": other["meta"]["at"]}
            expected.append({"id": None, "who": other["who"], "meta": None, **made})
    return expected


@pytest.mark.parametrize("engine", BY_EACH)
def test_an_as_of_join_names_its_key_and_time_by_paths(world: StepWorld, engine: str) -> None:
    fill(world, "events", EVENTS, event_rows())
    schema = Schema.of(id="bigint", since="timestamp", name={"first": "string"})
    history = [(7, 0, "a"), (7, 3, "b"), (7, 13, "c"), (8, 10, "d")]
    world.streams.create("people", schema=schema, key=["id"], partitions=2)
    people = unbounded_dataset(
        "people", input="lake.people", key="id", partitions=2, history="all", valid_from="since"
    )
    for number, (who, since, name) in enumerate(history, 1):
        row = {"id": who, "since": at(since), "name": {"first": name}}
        world.streams.append("people", [row], producer="test", sequence=number)
        world.advance(people)
    app = Application("app", auto_repartition=True)
    joined = app.input_stream("lake.events").join(
        app.table(people), on={"who.id": "id"}, how="left", as_of="meta.at", select=["name.first"]
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="id"))
    run(world, app, engine)
    expected = []
    for row in event_rows():
        valid = [
            name
            for who, since, name in history
            if row["who"] and row["who"]["id"] == who and at(since) <= row["meta"]["at"]
        ]
        expected.append(row | {"first": valid[-1] if valid else None})
    assert received(world, "out") == sorted(expected, key=repr)


@pytest.mark.parametrize("engine", BY_EACH)
def test_an_error_of_an_as_of_join_shows_values_of_paths(world: StepWorld, engine: str) -> None:
    fill(world, "events", EVENTS, event_rows()[:1])
    schema = Schema.of(id="bigint", since="timestamp", name="string")
    fill(world, "people", schema, [{"id": 7, "since": at(30), "name": "late"}])
    people = unbounded_dataset(
        "people", input="lake.people", key="id", partitions=2, history="all", valid_from="since"
    )
    app = Application("app", auto_repartition=True)
    joined = app.input_stream("lake.events").join(
        app.table(people), on={"who.id": "id"}, as_of="meta.at", before_history="error"
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="id"))
    with pytest.raises(OperatorFailedError) as failure:
        run(world, app, engine)
    assert "who.id = 7" in failure.value.problem
    assert "meta.at = 2026-01-01 00:00:01" in failure.value.problem


@pytest.mark.parametrize("engine", BY_EACH)
def test_a_lookup_names_its_key_and_parts_of_records_by_paths(
    world: StepWorld, engine: str
) -> None:
    fill(world, "orders", ORDERS, ORDER_ROWS)
    store = SqliteTable(
        world.folder / "t.sqlite", "people", "id", columns=CUSTOMERS.types, create=True
    )
    table = RemoteTable("people", key="id", read_function=store, write_function=store)
    fill(world, "people", CUSTOMERS, CUSTOMER_ROWS)
    writing = Application("writing")
    writing.input_stream("lake.people").send_to(writing.table(table))
    run_step(world.context(writing))
    app = Application("app")
    joined = app.input_stream("lake.orders").join(
        app.table(table),
        on={"customer.id": "id"},
        how="left",
        select=["name", "address.city", "address.geo.lat as latitude"],
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="id"))
    run(world, app, engine)
    assert received(world, "out") == sorted(with_customers(), key=repr)


@pytest.mark.parametrize("engine", BY_SPARK)
def test_a_function_gets_the_record_as_it_is(world: StepWorld, engine: str) -> None:
    fill(world, "orders", ORDERS, ORDER_ROWS)
    app = Application("app")
    customers = app.local_table("customers", key="id", schema=CUSTOMERS, partitions=2)
    fill(world, "customers", CUSTOMERS, CUSTOMER_ROWS)
    app.input_stream("lake.customers").send_to(customers)
    joined = (
        app.input_stream("lake.orders")
        .partition_by("customer.id", partitions=2)
        .join(
            customers,
            on={"customer.id": "id"},
            function=lambda record, entry: {"shown": f"{sorted(record)} of {entry['name']}"},
            schema=Schema.of(shown="string"),
        )
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="id"))
    run(world, app, engine)
    names = {row["id"]: row["name"] for row in CUSTOMER_ROWS}
    expected = []
    for order in ORDER_ROWS:
        key = order["customer"] and order["customer"]["id"]
        if key in names:
            expected.append(order | {"shown": f"['customer', 'id', 'total'] of {names[key]}"})
    assert received(world, "out") == sorted(expected, key=repr)


@pytest.mark.parametrize("engine", BY_EACH)
def test_records_stay_partitioned_by_a_path_while_its_column_is_kept(
    world: StepWorld, engine: str
) -> None:
    """ADJUNCT_STRICT_PLANS is set: an exchange that the plan does not list would fail the batch."""
    fill(world, "orders", ORDERS, ORDER_ROWS)
    fill(world, "customers", CUSTOMERS, CUSTOMER_ROWS, end_of_dataset="v1")
    customers = bounded_dataset("customers", input="lake.customers", key="id", partitions=2)
    app = Application("app")
    known = app.table(customers)
    orders = app.input_stream("lake.orders").partition_by("customer.id")
    one = orders.filter("id < 4").select("customer as buyer", "id", "upper('a') as side")
    other = orders.filter("id >= 4").with_columns(side="lower('B')", buyer="customer")
    merged = one.merge(other.partition_by("buyer.id").select("buyer", "id", "side"))
    joined = merged.join(known, on={"buyer.id": "id"}, how="left", select=["name"]).with_columns(
        more="id + 1"
    )
    again = joined.join(known, on={"buyer.id": "id"}, select=["address.city"], name="again")
    again.send_to(app.output_stream("lake.out", partitions=2, key="id"))
    run(world, app, engine)
    expected = []
    for row in with_customers():
        if row["name"] is not None:
            side = "A" if row["id"] < 4 else "b"
            made = {"buyer": row["customer"], "id": row["id"], "side": side, "name": row["name"]}
            expected.append(made | {"more": row["id"] + 1, "city": row["city"]})
    assert received(world, "out") == sorted(expected, key=repr)
